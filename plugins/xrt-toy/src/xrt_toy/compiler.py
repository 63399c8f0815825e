"""ToyGraphCompiler: walks a Function in topological order, asks every node's kernel, lays out memory."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from xrt_core.engine.contract import CompileOptions, Function, GraphCompiler, InputOutputAlias, Parameter
from xrt_core.engine.op_kernels import op_kernels
from xrt_core.errors import CompileError, OptionError, XRTError
from xrt_core.ir.graph import Node, Value
from xrt_core.ir.types import TensorType, dtype_name
from xrt_toy import _toolkit
from xrt_toy.aliases import compute_in
from xrt_toy.executable import FunctionCode, Program, Slot, Temporary, ToyExecutable
from xrt_toy.kernels.context import Buffer, Storage, ToyOpContext
from xrt_toy.kernels.elementwise import copy

_ALIGN: Final = 256  # bytes; what cudaMalloc aligns to, so that any vector load is aligned


class ToyGraphCompiler(GraphCompiler):
    """Compiles Functions for one GPU, or for the simulator. It keeps no state between compilations."""

    stages = MappingProxyType(
        {
            "python": "the source of its kernels",
            **({} if _toolkit.SIMULATED else {"ptx": "what numba makes of them"}),
            "launches": "its buffers and kernel launches",
        }
    )

    def __init__(self, device: str, options: CompileOptions) -> None:
        if options.extra:
            raise OptionError(f"toy: unknown option {sorted(options.extra)[0]!r}; it has none of its own")
        self._device = _toolkit.device_index(device)

    def compile(
        self,
        function: Function,
        entry_params: Sequence[Parameter],
        return_params: Sequence[Parameter],
        aliases: Sequence[InputOutputAlias],
    ) -> ToyExecutable:
        """An executable for `function`. Raises CompileError, naming the node where it is one node's fault."""
        return ToyExecutable(make_program(function, entry_params, return_params, aliases), self._device)

    def as_text(
        self,
        function: Function,
        entry_params: Sequence[Parameter],
        return_params: Sequence[Parameter],
        aliases: Sequence[InputOutputAlias],
        stage: str,
    ) -> str:
        """The source of its kernels, or their PTX; else what the executable shows."""
        if stage not in self.stages or stage == "launches":
            return super().as_text(function, entry_params, return_params, aliases, stage)
        program = make_program(function, entry_params, return_params, aliases)
        if stage == "ptx":
            return ptx_of(program, _toolkit.capability(self._device))
        return "\n".join(inspect.getsource(inspect.unwrap(k)) for k in dict.fromkeys(c.kernel for c in program.codes))


def ptx_of(program: Program, capability: tuple[int, int]) -> str:
    """The PTX of a program's kernels, each once for the types of its arguments, for a compute capability. Needs CUDA's
    compiler (pip install 'numba-cuda[cu13]'), and no GPU."""
    dtypes = program.dtypes()
    kernels = dict.fromkeys(
        (c.kernel, _toolkit.signature([dtypes[a] if isinstance(a, Slot) else a for a in c.arguments]))
        for c in program.codes
    )
    return "\n".join(_toolkit.ptx(kernel, signature, capability) for kernel, signature in kernels)


def make_program(
    function: Function,
    entries: Sequence[Parameter],
    returns: Sequence[Parameter],
    aliases: Sequence[InputOutputAlias] = (),
) -> Program:
    """The Program of a Function; it takes no device and runs nothing."""
    codes: list[FunctionCode] = []
    constants: dict[int, tuple[np.ndarray, Buffer]] = {}  # by identity; the array is held so that its id stays its own
    values: dict[Value, Buffer] = {}
    entry_storages = [Storage(p.dtype, _size(p.shape)) for p in entries]
    for value, parameter, storage in zip(function.body.inputs, entries, entry_storages, strict=True):
        values[value] = Buffer(storage, parameter.shape)

    def buffer(value: Value) -> Buffer:
        data = value.data
        if data is None:
            return values[value]
        if id(data) not in constants:
            constants[id(data)] = data, Buffer(Storage(data.dtype, data.size), data.shape)
        return constants[id(data)][1]

    for node in function.body.nodes:
        for output, result in zip(node.outputs, _run_kernel(node, codes, buffer), strict=False):
            if output is not None:
                values[output] = _checked(result, output, node)

    # What the function returns is computed where the caller gets it. A return that shares its storage with an entry, a
    # constant or an earlier return is copied there, unless it is the entry that it is to share its storage with.
    entry_of = {a.output: a.input for a in aliases}
    updates = tuple(entry_of.get(i) for i in range(len(returns)))
    return_storages: list[Storage] = []
    taken = {*entry_storages, *(b.storage for _, b in constants.values())}

    def copy_to(target: Storage, source: Storage, value: Value) -> Storage:
        ctx = ToyOpContext(Node("Identity", [value], [value], version=1, name=value.name), codes)
        copy(ctx, Buffer(source, (source.size,)), Buffer(target, (target.size,)))
        return target

    for value, parameter, entry in zip(function.body.outputs, returns, updates, strict=True):
        found = buffer(value)
        if found.dtype != parameter.dtype or found.size != _size(parameter.shape):
            raise CompileError(
                f"toy: function {function.name!r} computes {parameter.name!r} as {dtype_name(found.dtype)}"
                f"{list(found.shape)}, but it is declared as {parameter.type}"
            )
        storage = found.storage
        unchanged = entry is not None and storage is entry_storages[entry]
        if not unchanged and (storage in taken or storage in (b.storage for _, b in constants.values())):
            storage = copy_to(Storage(storage.dtype, storage.size), storage, value)
        taken.add(storage)
        return_storages.append(storage)

    # Every read of an old value is among the codes now, so it shows which may be overwritten. Where one is read too
    # late, the new value stays in a temporary of its own until the end.
    for value, entry, storage in zip(function.body.outputs, updates, return_storages, strict=True):
        if entry is None or storage is entry_storages[entry]:
            continue
        if not compute_in(codes, entry_storages[entry], storage):
            copy_to(entry_storages[entry], storage, value)

    kept = [*entry_storages, *(b.storage for _, b in constants.values())]
    own = [s for s, entry in zip(return_storages, updates, strict=True) if entry is None]
    temporaries, arena = _lay_out(codes, {*kept, *own})
    numbers = {s: Slot(i) for i, s in enumerate([*kept, *temporaries, *own])}
    placed = tuple(
        replace(c, arguments=tuple(numbers[a.storage] if isinstance(a, Buffer) else a for a in c.arguments))
        for c in codes
    )
    arrays = tuple(a for a, _ in constants.values())
    return Program(tuple(entries), arrays, tuple(temporaries.values()), tuple(returns), updates, placed, arena)


def _run_kernel(node: Node, codes: list[FunctionCode], buffer: Any) -> tuple[Buffer, ...]:
    """Let the node's kernel append its launches; inputs that it wants to know come as NumPy arrays."""
    entry = op_kernels.find("toy", node.domain, node.op_type)
    if entry is None:
        raise CompileError(f"toy: no kernel for {_describe(node)}")
    inputs = [
        None if v is None else np.asarray(v.data) if i in entry.static else buffer(v) for i, v in enumerate(node.inputs)
    ]
    try:
        results = entry.function(ToyOpContext(node, codes), *inputs)
    except XRTError as e:
        raise CompileError(f"toy: {_describe(node)} does not compile: {e}") from e
    except Exception as e:
        raise CompileError(f"toy: {_describe(node)} does not compile: {type(e).__name__}: {e}") from e
    return results if isinstance(results, tuple) else (results,)


def _checked(result: Any, value: Value, node: Node) -> Buffer:
    """The result of a kernel, held against the type that inference found."""
    t = value.type
    if not isinstance(result, Buffer):
        raise CompileError(f"toy: the kernel of {_describe(node)} gave {result!r} for {value.name!r}, not a Buffer")
    if isinstance(t, TensorType) and t.is_static and (result.dtype != t.dtype or result.shape != t.shape):
        raise CompileError(
            f"toy: {value.name!r} of {_describe(node)} came out as {dtype_name(result.dtype)}{list(result.shape)}, "
            f"but its type is {t}"
        )
    return result


def _lay_out(codes: Sequence[FunctionCode], kept: set[Storage]) -> tuple[dict[Storage, Temporary], int]:
    """Places in one arena for the storages that are not `kept`, and its size.

    A storage lives from the first code that touches it to the last; first fit among those that live at the same time.
    """
    lives: dict[Storage, tuple[int, int]] = {}
    for i, code in enumerate(codes):
        for argument in code.arguments:
            if isinstance(argument, Buffer) and argument.storage not in kept:
                lives[argument.storage] = lives.get(argument.storage, (i, i))[0], i
    placed: dict[Storage, Temporary] = {}
    top = 0
    for storage, (first, _) in lives.items():  # in the order of their first use
        neighbours = sorted(
            (t.offset, t.offset + _padded(t.dtype, t.size)) for s, t in placed.items() if lives[s][1] >= first
        )
        need, offset = _padded(storage.dtype, storage.size), 0
        for begin, end in neighbours:
            if begin - offset >= need:
                break
            offset = max(offset, end)
        placed[storage] = Temporary(storage.dtype, storage.size, offset)
        top = max(top, offset + need)
    return placed, top


def _padded(dtype: np.dtype, size: int) -> int:
    return -(-dtype.itemsize * size // _ALIGN) * _ALIGN


def _size(shape: Sequence[int]) -> int:
    return math.prod(shape)


def _describe(node: Node) -> str:
    source = node.annotations.source
    return f"node {node.name!r} ({node.operator}-{node.version})" + (f" from {source}" if source else "")

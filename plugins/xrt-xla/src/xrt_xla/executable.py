"""XlaExecutable: a compiled XLA program with its weights on the device, called with as little ceremony as possible."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from xrt_core.engine.contract import DEFAULT_RUN_OPTIONS, Executable, InputOutputAlias, Parameter, RunOptions
from xrt_core.errors import CompileError, ExecutionError, UnsupportedError
from xrt_core.ir.types import dtype_from_name, dtype_name
from xrt_xla import _toolkit
from xrt_xla._toolkit import jax, jnp, x64

_MAGIC: Final = b"XRTXLA2\n"
_ALIGN: Final = 64
_FEW: Final = 6  # up to so many results, waiting for each costs less than JAX's own wait for a list


def program_order(outputs: int, aliases: Sequence[InputOutputAlias]) -> list[int]:
    """The order in which a program returns its outputs: aliased ones first, by the input they share storage with.

    JAX gives a donated buffer to the first output of its type, so this order makes it the right one.
    """
    first = [a.output for a in sorted(aliases, key=lambda a: a.input)]
    return first + [i for i in range(outputs) if i not in first]


class XlaExecutable(Executable):
    """A program compiled ahead of time.

    Large NumPy inputs whose memory is 64-byte aligned are read in place. Results are fresh `jax.Array`s, except those
    that live in the storage of a donated input: a `jax.Array` given for an aliased input is consumed by the call.
    """

    def __init__(
        self,
        compiled: Any,
        weights: Sequence[Any],
        entry_params: Sequence[Parameter],
        outputs: int,
        aliases: Sequence[InputOutputAlias],
        device: Any,
        program: bytes | None = None,
    ) -> None:
        self._compiled = compiled
        self._weights = tuple(weights)
        self._params = tuple(entry_params)
        self._outputs = outputs
        self._aliases = tuple(sorted(aliases, key=lambda a: a.input))
        self._donated = tuple(a.input for a in self._aliases)
        order = program_order(outputs, self._aliases)
        self._order = tuple(order.index(i) for i in range(outputs)) if self._aliases else None
        self._device = device
        self._program = program  # of a loaded one: XLA serialises only what it compiled itself

    def run(
        self, inputs: Sequence[Any], run_options: RunOptions = DEFAULT_RUN_OPTIONS, block_until_done: bool = True
    ) -> Sequence[Any]:
        """Run once. Inputs are NumPy or JAX arrays of the entries' dtypes and shapes; results are JAX arrays.

        With block_until_done=False a NumPy input must stay as it is until the results are there.
        """
        if self._donated:
            if not run_options.donate:
                inputs = self._with_copies(inputs)
            if _toolkit.checks_numbers():  # JAX would raise after the donated inputs are gone
                return self._run_pinned(inputs)
        results: Sequence[Any]
        try:
            with x64(True):  # 64-bit NumPy inputs are cut to 32 bits outside of it; entering costs 0.4 us
                results = self._compiled(*inputs, *self._weights)
            if block_until_done:
                if self._outputs > _FEW:
                    _toolkit.wait_for(results)
                else:
                    for r in results:
                        r.block_until_ready()
        except Exception:  # often the caller's own configuration (debug_nans, disable_jit, ...) gets in the way
            return self._run_pinned(inputs)
        return results if self._order is None else [results[i] for i in self._order]

    def _run_pinned(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Run once under the engine's own configuration, and wait. Raises ExecutionError with the cause."""
        try:
            with _toolkit.pinned():
                results: Sequence[Any] = _toolkit.wait_for(self._compiled(*inputs, *self._weights))
            return results if self._order is None else [results[i] for i in self._order]
        except Exception as e:
            raise ExecutionError(f"xla: {self._complaint(inputs) or f'{type(e).__name__}: {e}'}") from e

    def _with_copies(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """The inputs with copies for those that the program would write into (it never writes into NumPy arrays)."""
        copied = list(inputs)
        with x64(True):
            for i in self._donated:
                if isinstance(copied[i], jax.Array):
                    copied[i] = jnp.array(copied[i], copy=True)
        return copied

    def _complaint(self, inputs: Sequence[Any]) -> str | None:
        """What is wrong with the inputs, if it is they."""
        if len(inputs) != len(self._params):
            return f"the executable takes {len(self._params)} inputs, {len(inputs)} were given"
        for p, x in zip(self._params, inputs, strict=True):
            dtype, shape = getattr(x, "dtype", None), getattr(x, "shape", None)
            if dtype != p.dtype or shape != p.shape:
                given = type(x).__name__ if dtype is None or shape is None else f"{dtype}{list(shape)}"
                return f"input {p.name!r} must be {p.type}, {given} was given"
        return None

    def serialize(self) -> bytes:
        """The program and its weights in one piece, for `XlaGraphCompiler.load` on a machine of the same kind."""
        return self._serialized(weights=True)

    def serialize_code(self) -> bytes:
        """The program alone: its weights come from the Function again, most of them in place."""
        return self._serialized(weights=False)

    def _serialized(self, weights: bool) -> bytes:
        try:
            program = self._program or _toolkit.serialize_compiled(self._compiled)
        except (NotImplementedError, ValueError) as e:
            raise UnsupportedError(f"this XLA program cannot be serialised: {e}") from e
        header = {
            "for": _toolkit.fingerprint_of(self._device),
            "params": [[p.name, dtype_name(p.dtype), list(p.shape)] for p in self._params],
            "outputs": self._outputs,
            "aliases": [[a.output, a.input] for a in self._aliases],
            "weights": [[dtype_name(np.dtype(w.dtype)), list(w.shape)] for w in self._weights],
            "holds": weights,
            "program": len(program),
        }
        text = json.dumps(header).encode()
        parts: list[bytes | memoryview] = [_MAGIC, struct.pack("<Q", len(text)), text, program]
        size = sum(map(len, parts))
        for w in self._weights if weights else ():
            raw = np.ascontiguousarray(np.asarray(w)).reshape(-1).view(np.uint8).data
            parts += [bytes(-size % _ALIGN), raw]
            size += -size % _ALIGN + len(raw)
        return b"".join(parts)

    def as_text(self) -> str:
        """The optimised HLO."""
        return str(self._compiled.as_text())

    def __repr__(self) -> str:
        return f"<XlaExecutable: {len(self._params)} in, {len(self._weights)} weights, {self._outputs} out>"


def load_executable(
    blob: bytes, device: Any, function_weights: Callable[[], Sequence[np.ndarray]] | None = None
) -> XlaExecutable:
    """The executable that `serialize` made `blob` of, or `serialize_code`, whose weights are then asked for.

    Raises CompileError where it does not fit.
    """
    start = len(_MAGIC) + 8
    if blob[: len(_MAGIC)] != _MAGIC or len(blob) < start:
        raise CompileError("xla: this is not a serialised XLA executable of this package")
    try:
        (length,) = struct.unpack_from("<Q", blob, len(_MAGIC))
        header = json.loads(blob[start : start + length])
        here = _toolkit.fingerprint_of(device)
        if header["for"] != here:
            raise CompileError(f"xla: the executable was made for {header['for']!r}; here is {here!r}")
        at = start + length + header["program"]
        params = [Parameter(n, dtype_from_name(d), tuple(s)) for n, d, s in header["params"]]
        types = [(dtype_from_name(name), tuple(shape)) for name, shape in header["weights"]]
        arrays: Sequence[np.ndarray] = () if header["holds"] or function_weights is None else function_weights()
        if not header["holds"] and [(a.dtype, a.shape) for a in arrays] != types:
            raise CompileError(f"xla: the executable takes {len(types)} weights that are not those of the function")
        held = []
        for dtype, shape in types if header["holds"] else ():
            at += -at % _ALIGN
            count = int(np.prod(shape, dtype=np.int64))
            held.append(np.frombuffer(blob, dtype, count, at).reshape(shape))
            at += count * dtype.itemsize
        if at != len(blob):
            raise CompileError(f"xla: a serialised executable of {len(blob)} bytes should have {at}")
        program = blob[start + length : start + length + header["program"]]
        weights = _toolkit.put_all(held or arrays, device)
        compiled = _toolkit.load_compiled(program, len(params) + len(weights), header["outputs"], device)
    except CompileError:
        raise
    except Exception as e:
        raise CompileError(f"xla: a serialised executable does not load: {type(e).__name__}: {e}") from e
    aliases = [InputOutputAlias(o, i) for o, i in header["aliases"]]
    return XlaExecutable(compiled, weights, params, header["outputs"], aliases, device, program)

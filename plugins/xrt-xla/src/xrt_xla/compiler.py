"""XlaGraphCompiler: traces a Function node by node into one XLA program and compiles it ahead of time."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from xrt_core.engine.contract import CompileOptions, Executable, Function, GraphCompiler, InputOutputAlias, Parameter
from xrt_core.engine.op_kernels import OpKernel, op_kernels
from xrt_core.errors import CompileError, OptionError, XRTError
from xrt_core.ir.graph import Node, Value
from xrt_core.ir.types import TensorType, dtype_name
from xrt_core.kernels import OpContext, find_kernel
from xrt_xla import _toolkit
from xrt_xla._toolkit import jax, jnp, lax
from xrt_xla.executable import XlaExecutable, load_executable, program_order
from xrt_xla.kernels.context import Layout, XlaContext, layout_of

FOLD_BYTES: Final = 16384
"""Constants up to this size go into the program, where XLA simplifies with them; larger ones are laid out once and
stay arguments on the device: compilation does not see them, and they are held once."""

_GROWTH: Final = 4
"""Nodes of constants are computed when the executable is built if that grows their bytes at most so much (int8 weights
become float32 ones)."""

_RANDOM: Final = frozenset(("Bernoulli", "Dropout", "Multinomial", "RandomNormalLike", "RandomUniformLike"))
_OPTIONS: Final = frozenset(("fold_bytes", "xla"))
_DISABLE: Final = "xla_disable_hlo_passes"


class XlaGraphCompiler(GraphCompiler):
    """Compiles Functions for one device.

    Options of its own (`CompileOptions.extra`): `fold_bytes`, the size up to which constants go into the program;
    `xla`, a mapping of XLA compiler options such as {"xla_backend_optimization_level": 1}.
    """

    def __init__(self, device: str, options: CompileOptions) -> None:
        unknown = set(options.extra) - _OPTIONS
        if unknown:
            raise OptionError(f"xla: unknown option {sorted(unknown)[0]!r}; it takes {', '.join(sorted(_OPTIONS))}")
        self._device = _toolkit.device_named(device)
        self._kind = _toolkit.kind_of(self._device)
        self._fold = int(options.extra.get("fold_bytes", FOLD_BYTES))
        self._asked: Mapping[str, Any] = options.extra.get("xla", {})
        # unfused: no fused loops, and dot products by XLA's own code instead of the library's
        self._disabled = [] if options.fused else ["fusion", "dot-library-rewriter"]

    @functools.cached_property
    def _xla_options(self) -> dict[str, Any]:
        """Found out at the first compilation: who only loads does not wait for it."""
        # without it XLA drops the rounding of x.astype(bfloat16).astype(float32), which ONNX's types ask for
        found: dict[str, Any] = {"xla_allow_excess_precision": False}
        if self._kind == "cpu":
            with _toolkit.pinned(self._device):
                found.update(_toolkit.cpu_options())
        return {**found, **{k: v for k, v in self._asked.items() if k != _DISABLE}}

    def compile(
        self,
        function: Function,
        entry_params: Sequence[Parameter],
        return_params: Sequence[Parameter],
        aliases: Sequence[InputOutputAlias],
    ) -> Executable:
        """One XLA program for `function`. Raises CompileError, naming the node where it is one node's fault."""
        with _toolkit.pinned(self._device):
            order = program_order(len(return_params), aliases)
            program = _Program(function, return_params, order, self._kind, self._fold)
            sharding = _toolkit.sharding_on(self._device)
            shapes = [(p.shape, p.dtype) for p in entry_params] + [(w.shape, w.dtype) for w in program.weights]
            arguments = [_toolkit.abstract(s, d, sharding) for s, d in shapes]
            donated = tuple(sorted(a.input for a in aliases))
            try:
                traced = jax.jit(program.xrt_program, donate_argnums=donated).trace(*arguments)
                compiled = traced.lower().compile(compiler_options=self._options_for(traced.jaxpr))
            except XRTError:
                raise
            except Exception as e:
                raise CompileError(f"xla: function {function.name!r} does not compile: {_first_lines(e)}") from e
            weights = _toolkit.put_all(program.weights, self._device)
            program.weights.clear()  # JAX may keep the traced callable
        return XlaExecutable(compiled, weights, entry_params, len(return_params), aliases, self._device)

    def _options_for(self, jaxpr: Any) -> dict[str, Any]:
        """XLA options for one program."""
        disabled = list(self._disabled)
        if self._kind == "cpu":
            disabled += _toolkit.cpu_passes_off(jaxpr)
        if asked := self._asked.get(_DISABLE):
            disabled.append(str(asked))
        return {**self._xla_options, _DISABLE: ",".join(disabled)} if disabled else self._xla_options

    def load(self, blob: bytes) -> Executable:
        """The executable that `serialize` gave `blob` for; `blob` must come from a trusted place (it is unpickled)."""
        with _toolkit.pinned(self._device):
            return load_executable(blob, self._device)

    def load_code(self, blob: bytes, function: Function) -> Executable:
        """The executable that `serialize_code` gave `blob` for, with the weights of `function`; else as `load`."""

        def weights() -> list[np.ndarray]:
            order = program_order(len(function.returns), function.aliases)
            return _Program(function, function.returns, order, self._kind, self._fold).weights

        with _toolkit.pinned(self._device):
            return load_executable(blob, self._device, weights)


class _Program:
    """The Function as a Python callable for JAX, and the constants it takes as arguments after its entries.

    Nodes of constants only (a weight's DequantizeLinear, say) are computed here, once, unless that grows them much.
    """

    def __init__(
        self, function: Function, returns: Sequence[Parameter], order: Sequence[int], kind: str, fold: int
    ) -> None:
        self._function = function
        self._returns = [(function.body.outputs[i], returns[i]) for i in order]
        self._kind = kind
        self._fold = fold
        self.weights: list[np.ndarray] = []
        self._slots: dict[tuple[int, str], int] = {}  # (constant, layout) -> index in weights
        self._derived: dict[Value, np.ndarray] = {}
        self._plan = [step for node in function.body.nodes if (step := self._step(node)) is not None]

    def _known(self, value: Value | None) -> np.ndarray | None:
        if value is None:
            return None
        return value.data if value.data is not None else self._derived.get(value)

    def _step(self, node: Node) -> tuple[Node, OpKernel, XlaContext, list[Any]] | None:
        """A node, its kernel and where its inputs come from (a Value, a weight's index, an array, None).

        None for a node that was computed here.
        """
        entry = op_kernels.find("xla", node.domain, node.op_type)
        if entry is None:
            raise CompileError(f"xla: no kernel for {_describe(node)}")
        known = tuple(self._known(v) for v in node.inputs)
        if self._derive(node, known):
            return None
        sources: list[Any] = []
        laid_out = set()
        for i, (v, data) in enumerate(zip(node.inputs, known, strict=True)):
            if data is None:
                sources.append(v)
                continue
            if i in entry.static:
                sources.append(data)
                continue
            layout = layout_of(node, i, self._kind)
            if layout is not None:
                laid_out.add(i)
            if data.nbytes <= self._fold:
                sources.append(data if layout is None else layout.make(np, data))
            else:
                sources.append(self._weight(data, layout))
        return node, entry, XlaContext(node, jnp, lax, self._kind, known, frozenset(laid_out)), sources

    def _weight(self, data: np.ndarray, layout: Layout | None) -> int:
        key = (id(data), "" if layout is None else layout.name)
        slot = self._slots.get(key)
        if slot is None:
            slot = self._slots[key] = len(self.weights)
            self.weights.append(data if layout is None else layout.make(np, data))
        return slot

    def _derive(self, node: Node, known: Sequence[np.ndarray | None]) -> bool:
        """Compute a node of constants with NumPy, if it is one and its results are not much larger."""
        given = [x for x, v in zip(known, node.inputs, strict=True) if v is not None]
        portable = find_kernel(node.domain, node.op_type)
        if not given or portable is None or node.op_type in _RANDOM or any(x is None for x in given):
            return False
        size = 0
        for v in node.outputs:
            if v is not None and isinstance(v.type, TensorType) and v.type.dtype is not None:
                size += _elements(v.type) * v.type.dtype.itemsize
        if size > max(_GROWTH * sum(x.nbytes for x in given if x is not None), self._fold):
            return False
        try:
            with np.errstate(all="ignore"):
                results = portable.function(OpContext(node, np), *known)
        except Exception:  # not computable here: the traced form decides, and names the node
            return False
        for v, r in zip(node.outputs, results if isinstance(results, tuple) else (results,), strict=False):
            if v is not None and r is not None:
                self._derived[v] = np.asarray(r)
        return True

    def xrt_program(self, *arguments: Any) -> tuple[Any, ...]:
        """Trace: entries first, then the weights."""
        body = self._function.body
        count = len(body.inputs)
        weights = arguments[count:]
        values: dict[Value, Any] = dict(zip(body.inputs, arguments, strict=False))
        for node, entry, ctx, sources in self._plan:
            inputs = []
            for i, source in enumerate(sources):
                if type(source) is int:
                    inputs.append(weights[source])
                elif isinstance(source, np.ndarray):
                    inputs.append(source if i in entry.static else jnp.asarray(source))
                else:
                    inputs.append(None if source is None else values[source])
            try:
                results = entry.function(ctx, *inputs)
            except XRTError as e:
                raise CompileError(f"xla: {_describe(node)} does not trace: {e}") from e
            except Exception as e:
                raise CompileError(
                    f"xla: {_describe(node)} does not trace: {type(e).__name__}: {_first_lines(e)}"
                ) from e
            if not isinstance(results, tuple):
                results = (results,)
            for i, v in enumerate(node.outputs):
                if v is not None:
                    values[v] = _checked(results, i, v, node)
        return tuple(self._result(values, v, p) for v, p in self._returns)

    def _result(self, values: dict[Value, Any], value: Value, expected: Parameter) -> Any:
        data = self._known(value)
        got = values[value] if data is None else jnp.asarray(data)
        if got.dtype != expected.dtype or got.shape != expected.shape:
            raise CompileError(
                f"xla: function {self._function.name!r} computes {expected.name!r} as "
                f"{dtype_name(np.dtype(got.dtype))}{list(got.shape)}, but it is declared as {expected.type}"
            )
        return got


def _elements(t: TensorType) -> int:
    return math.prod(d for d in t.shape or () if isinstance(d, int))


def _checked(results: tuple[Any, ...], index: int, value: Value, node: Node) -> Any:
    """Result `index` as an array, held against the type that inference found."""
    got = results[index] if index < len(results) else None
    if got is None:
        raise CompileError(f"xla: the kernel gave no output {index} for {_describe(node)}")
    got = jnp.asarray(got)
    t = value.type
    if isinstance(t, TensorType) and t.is_static and (got.dtype != t.dtype or got.shape != t.shape):
        raise CompileError(
            f"xla: output {index} of {_describe(node)} came out as {dtype_name(np.dtype(got.dtype))}{list(got.shape)}, "
            f"but its type is {t}"
        )
    return got


def _describe(node: Node) -> str:
    source = node.annotations.source
    return f"node {node.name!r} ({node.operator}-{node.version})" + (f" from {source}" if source else "")


def _first_lines(error: BaseException) -> str:
    return "\n".join(str(error).strip().splitlines()[:6])

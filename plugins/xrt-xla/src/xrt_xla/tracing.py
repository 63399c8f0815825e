"""Tracing: a Function's program as one Python callable for JAX."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from xrt_core.engine.contract import Function, Parameter
from xrt_core.errors import CompileError, XRTError
from xrt_core.ir.graph import Node, Value
from xrt_core.ir.op_traits import traits_of
from xrt_core.ir.types import TensorType, dtype_name
from xrt_xla._toolkit import jnp, lax, program_name
from xrt_xla.channels_last import ChannelsLast, turned
from xrt_xla.kernels.context import XlaContext
from xrt_xla.program import Body, Program, Step, describe


class Traced:
    """The Function as a Python callable for JAX. order: in which its results are returned. on_mesh: whether it is for
    several devices. places: by number of the result, the sharding it must have, where there is one."""

    def __init__(
        self,
        function: Function,
        program: Program,
        returns: Sequence[Parameter],
        order: Sequence[int],
        kind: str,
        on_mesh: bool,
        places: Mapping[int, Any] = MappingProxyType({}),
    ) -> None:
        self._function = function
        self._program = program
        self._returns = [(function.body.outputs[i], returns[i], places.get(i)) for i in order]
        self._kind, self._on_mesh = kind, on_mesh
        self._last = ChannelsLast(kind == "cpu")

    def named(self, is_stored: bool) -> Callable[..., tuple[Any, ...]]:
        """The callable as a function whose name becomes that of the program. is_stored: see `program_name`."""

        def program(*arguments: Any) -> tuple[Any, ...]:
            return self(*arguments)

        program.__name__ = program_name(is_stored)
        return program

    def __call__(self, *arguments: Any) -> tuple[Any, ...]:
        """Trace: entries first, then the weights."""
        body = self._function.body
        count = len(body.inputs)
        weights = arguments[count:]
        values: dict[Value, Any] = dict(zip(body.inputs, arguments, strict=False))
        self._trace(self._program.steps, values, weights)
        found = [(self._result(values, v, p), place) for v, p, place in self._returns]
        return tuple(r if place is None else lax.with_sharding_constraint(r, place) for r, place in found)

    def _trace(self, steps: Sequence[Step], values: dict[Value, Any], weights: Sequence[Any]) -> None:
        """Trace steps, whose results are added to `values`."""
        self._last.enter(steps)
        for node, entry, sources, known, laid_out, bodies in steps:
            ctx = XlaContext(node, jnp, lax, self._kind, known, laid_out, self._on_mesh)
            if bodies:
                ctx.bodies = {name: partial(self._run_body, body, values, weights) for name, body in bodies.items()}
            inputs = []
            for i, source in enumerate(sources):
                if type(source) is int:
                    inputs.append(weights[source])
                elif isinstance(source, np.ndarray):
                    inputs.append(source if i in entry.static else jnp.asarray(source))
                else:
                    inputs.append(None if source is None else values[source])
            ctx.channels_last = self._last.reaches(node)
            is_turned = ctx.channels_last and traits_of(node).elementwise
            try:
                results = entry.function(ctx, *(turned(inputs, entry.static) if is_turned else inputs))
            except XRTError as e:
                raise CompileError(f"xla: {describe(node)} does not trace: {e}") from e
            except Exception as e:
                raise CompileError(f"xla: {describe(node)} does not trace: {type(e).__name__}: {first_lines(e)}") from e
            if not isinstance(results, tuple):
                results = (results,)
            if is_turned:
                results = tuple(jnp.moveaxis(r, -1, 1) for r in results)
            for i, v in enumerate(node.outputs):
                if v is not None:
                    values[v] = _checked(results, i, v, node)
            if self._kind == "cpu":
                values.update(
                    (v, lax.optimization_barrier(values[v])) for v in self._last.note(node, ctx.channels_last)
                )

    def _run_body(self, body: Body, around: Mapping[Value, Any], weights: Sequence[Any], *inputs: Any) -> list[Any]:
        """Trace a subgraph: its results for these inputs, reading the values around it."""
        values = {**around, **dict(zip(body.graph.inputs, inputs, strict=True))}
        self._trace(body.steps, values, weights)
        results = []
        for v in body.graph.outputs:
            data = self._program.known(v)
            results.append(jnp.asarray(values[v] if data is None else data, v.dtype))
        return results

    def _result(self, values: dict[Value, Any], value: Value, expected: Parameter) -> Any:
        data = self._program.known(value)
        got = values[value] if data is None else jnp.asarray(data)
        if got.dtype != expected.dtype or got.shape != expected.shape:
            raise CompileError(
                f"xla: function {self._function.name!r} computes {expected.name!r} as "
                f"{dtype_name(np.dtype(got.dtype))}{list(got.shape)}, but it is declared as {expected.type}"
            )
        return got


def _checked(results: tuple[Any, ...], index: int, value: Value, node: Node) -> Any:
    """Result `index` as an array, held against the type that inference found."""
    got = results[index] if index < len(results) else None
    if got is None:
        raise CompileError(f"xla: the kernel gave no output {index} for {describe(node)}")
    got = jnp.asarray(got)
    t = value.type
    if isinstance(t, TensorType) and t.is_static and (got.dtype != t.dtype or got.shape != t.shape):
        raise CompileError(
            f"xla: output {index} of {describe(node)} came out as {dtype_name(np.dtype(got.dtype))}{list(got.shape)}, "
            f"but its type is {t}"
        )
    return got


def first_lines(error: BaseException) -> str:
    """The head of what XLA says."""
    return "\n".join(str(error).strip().splitlines()[:6])

"""TracedModel: an `xrt.Graph` or a function as a module calls it, traced for static shapes or with symbols."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from xrt_core.cache.lru import LRU
from xrt_core.compiler.models import CompiledGraph, Shapes, quantised
from xrt_core.compiler.pipeline import Pipeline
from xrt_core.errors import InputError, XRTError, describe, nearest
from xrt_core.ir.graph import Graph, Value
from xrt_core.ir.symbols import SymbolicSignature
from xrt_core.ir.types import TensorType, ValueType
from xrt_core.runtime.arrays import plain_arguments, to_numpy
from xrt_core.runtime.varying import VaryingShapes, declared_shapes

if TYPE_CHECKING:
    from xrt_core.frontends.graph import Call, Traced

Made = tuple[CompiledGraph, "Traced"]


class _Form(NamedTuple):
    """What calls have in common that differ in sizes alone: the nesting, and dtype and rank of each array."""

    layout: Hashable
    arrays: tuple[tuple[Any, int], ...]


class _Family(NamedTuple):
    """What one trace with symbols serves: calls of this form whose shapes its signature admits."""

    form: _Form
    signature: SymbolicSignature
    made: Made

    def admits(self, form: _Form, shapes: Sequence[Sequence[Any]]) -> bool:
        """Whether it serves arrays of these shapes."""
        return form == self.form and self.signature.declared.admits(shapes) is not None


class TracedModel:
    """An `xrt.Graph` or a function, traced once per signature; the nesting of the arguments is part of it.

    Where shapes vary (`runtime.varying`), and an engine takes symbols or calls are padded, it is traced with symbols,
    for all sizes. A `build` that needs the numbers is traced for each.

    shapes: what the user declares of the shapes of the arguments, by the names of the inputs. Raises InputError where
    `build` has no such argument.
    """

    def __init__(self, graph: Any, pipeline: Pipeline, shapes: Shapes | None = None) -> None:
        from xrt_core.frontends.graph import Binder, parameter_arrays, parameter_loads, parameters_of

        self.caller: CompiledGraph | None = None
        self.output_names: tuple[str, ...] = ()
        self.optional: tuple[str, ...] = ()
        self.shapes = shapes
        self._graph = graph
        self._binder = Binder(graph)
        self._pipeline = pipeline
        self._traced: LRU[Made] = LRU(pipeline.options.cache_size)
        self._families: list[_Family] = []
        self._varying: dict[_Form, VaryingShapes] = {}
        self._lock = threading.RLock()
        self._count_loads, self._loads = parameter_loads, parameter_loads()
        self._parameters = parameter_arrays(graph)
        parameters = parameters_of(graph)
        open_ = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        for name in shapes or ():
            if not open_ and name.partition(".")[0] not in parameters:
                hint = nearest(name, parameters)
                raise InputError(f"shapes: unknown input {name!r}; build takes {', '.join(parameters)}{hint}")

    @property
    def input_types(self) -> dict[str, ValueType | None]:
        """Input name -> type, of the most recently traced signature."""
        caller = self.caller
        return dict(zip(caller.names, (v.type for v in caller.graph.inputs), strict=True)) if caller else {}

    def __call__(self, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
        args, named, back = plain_arguments(args, named)
        (caller, traced), arrays = self._bind(args, named)
        results = caller(arrays)
        return traced.structure.rebuild(results if back is None else back(results))

    def run(self, inputs: Mapping[str, Any], results: Mapping[str, Any] | None = None) -> dict[str, Any]:
        _, inputs, back = plain_arguments((), inputs)
        (caller, traced), arrays = self._bind((), inputs)
        names = traced.output_names
        made = caller.run_into(arrays, names, results) if results else caller(arrays)
        given = results or {}
        back_again = made if back is None else [given.get(n, r) for n, r in zip(names, back(made), strict=True)]
        return dict(zip(names, back_again, strict=True))

    def bind(self, args: Sequence[Any], named: Mapping[str, Any]) -> tuple[CompiledGraph, Sequence[Any]]:
        """Return the CompiledGraph for the signature of these arguments, and its input arrays."""
        (caller, _), arrays = self._bind(*plain_arguments(args, named)[:2])
        return caller, arrays

    def bound(
        self, inputs: Mapping[str, Any], results: Mapping[str, Any]
    ) -> tuple[Sequence[str], Callable[[], Sequence[Any]]]:
        """See `ImportedModel.bound`. Each call looks whether parameters were loaded since, and it is traced again."""
        (caller, traced), arrays = self._bind(*plain_arguments((), inputs)[:2])
        caller.bound(arrays, traced.output_names, results)  # which raises what is wrong with them
        return traced.output_names, lambda: tuple(self.run(inputs, results).values())

    def saved(self) -> tuple[Graph, list[CompiledGraph]]:
        """Return the contents of a model file. Raises InputError unless there is exactly one traced graph."""
        traced = {id(caller): caller for caller, _ in (*self._traced.values(), *(f.made for f in self._families))}
        if len(traced) != 1:
            raise InputError(
                f"a traced graph is saved after it ran with one signature, and this one has {len(traced)}: make a "
                "module for each signature, or one with shapes= for all"
            )
        (caller,) = traced.values()
        return caller.graph, [caller]

    def _bind(self, args: Sequence[Any], named: Mapping[str, Any]) -> tuple[Made, list[Any]]:
        if self._loads != self._count_loads():
            self._renew()
        try:
            call = self._binder(args, named)
            key = (tuple([(type(a), a.shape, a.dtype) for a in call.arrays]), call.layout)
        except XRTError:
            raise
        except Exception as e:  # what reading an object of the caller's raises
            raise InputError(f"an argument cannot be read as an array: {describe(e)}") from e
        return self._traced.get_or_make(key, lambda: self._trace(call)), list(call.arrays)

    def _renew(self) -> None:
        """Forget what was traced with arrays that `load_parameters` has replaced."""
        from xrt_core.frontends.graph import parameter_arrays

        loads, parameters = self._count_loads(), parameter_arrays(self._graph)
        known = self._parameters
        if parameters is None or known is None or [*map(id, parameters)] != [*map(id, known)]:
            self._traced.clear()
            self._families.clear()
        self._loads, self._parameters = loads, parameters

    def _trace(self, call: Call) -> Made:
        """What serves the signature of a call that is new. Raises InputError where it is not as declared."""
        types = [TensorType(x.dtype, x.shape) for x in map(to_numpy, call.arrays)]
        shapes = [tuple(x.shape) for x in call.arrays]
        form = _Form(call.layout, tuple((t.dtype, len(s)) for t, s in zip(types, shapes, strict=True)))
        with self._lock:
            varying = self._varying_of(call, form)
            if varying.declared is not None:
                varying.declared.bind(shapes)
            made = next((f.made for f in self._families if f.admits(form, shapes)), None)
            if made is None:
                signature = varying.signature_for([(t.dtype, s) for t, s in zip(types, shapes, strict=True)])
                made = None if signature is None else self._with_symbols(call, form, signature, varying)
        if made is None:
            made = self._traced_for(call, types, None)
        self.caller, self.output_names = made[0], tuple(made[1].output_names)
        return made

    def _varying_of(self, call: Call, form: _Form) -> VaryingShapes:
        found = self._varying.get(form)
        if found is None:
            open_ = [TensorType(dtype, (None,) * rank) for dtype, rank in form.arrays]
            if self.shapes and (unknown := sorted(set(self.shapes) - set(call.names))):
                hint = nearest(unknown[0], call.names)
                raise InputError(f"shapes: unknown input {unknown[0]!r}; this call has {', '.join(call.names)}{hint}")
            declared = None if self.shapes is None else declared_shapes(call.names, open_, self.shapes)
            inputs = Graph([Value(n, t) for n, t in zip(call.names, open_, strict=True)], (), (), opsets={})
            found = VaryingShapes(inputs, declared, self._wanted_after, varied_alone=True, on_end=self._tell_exact)
            self._varying[form] = found
        return found

    def _wanted_after(self) -> int | None:
        after = self._pipeline.symbolic_after
        return 1 if after is None and self._pipeline.options.buckets != "off" else after

    def _with_symbols(
        self, call: Call, form: _Form, signature: SymbolicSignature, varying: VaryingShapes
    ) -> Made | None:
        """The trace for all sizes of a signature; None where `build` cannot be traced so."""
        dims = [TensorType(d, s) for (d, _), s in zip(form.arrays, signature.declared.shapes, strict=True)]
        try:
            made = self._traced_for(call, dims, signature)
        except Exception as e:  # of the user's code: an exact trace raises what is the caller's to see
            reason = f"it cannot be traced with symbols: {describe(e)}"
            varying.give_up(reason)
            self._tell_exact(reason)
            return None
        family = _Family(form, signature, made)
        self._families.append(family)
        made[0].plans.on_live = lambda: self._supersede(family)
        return made

    def _tell_exact(self, reason: str) -> None:
        self._pipeline.services.events.emit("shapes.exact", model=type(self._graph).__name__, reason=reason)

    def _supersede(self, family: _Family) -> None:
        """Let a trace with symbols take the place of exact ones, whose executables are freed, once it has its own."""
        if self._pipeline.symbolic_after != 1 or not family.made[0].plans.has_symbolic:
            return  # an exact plan may be on another, faster engine
        for key, made in self._traced.items():
            assert isinstance(key, tuple)  # as `_bind` makes it
            types = [v.type for v in made[1].graph.inputs]
            exact = [t for t in types if isinstance(t, TensorType) and t.is_static]
            shapes = [tuple(t.shape or ()) for t in exact]
            form = _Form(key[1], tuple((t.dtype, len(s)) for t, s in zip(exact, shapes, strict=True)))
            if len(exact) == len(types) and family.admits(form, shapes):
                self._traced.replace(made, family.made)
                made[0].forget("a plan for all sizes took its place")

    def _traced_for(self, call: Call, types: Sequence[TensorType], signature: SymbolicSignature | None) -> Made:
        from xrt_core.frontends.graph import trace_call

        traced = trace_call(self._graph, types, call.layout, call.names)
        shapes: Shapes | None = None
        if signature is not None:
            symbols = signature.declared.symbols
            shapes = {
                v.name: [symbols.get(d, d) if isinstance(d, str) else d for d in dims or ()]
                for v, dims in zip(traced.graph.inputs, signature.declared.shapes, strict=True)
            }
        is_exact = signature is None  # without symbols there is nothing to pad
        graph = quantised(traced.graph, self._pipeline)
        return CompiledGraph(graph, self._pipeline, shapes, padded=is_exact, compared=True), traced

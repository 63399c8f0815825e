"""`xrt.Graph`, the base class of graphs written in Python; binding of a call's arguments; tracing of `build`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from msgspec import Struct

from xrt_core.errors import InputError, TraceError, nearest
from xrt_core.frontends.control_flow import as_output, is_tensor_like
from xrt_core.frontends.numpy_interop import is_array
from xrt_core.frontends.pytree import LEAF, Structure, flatten
from xrt_core.frontends.source_location import located, trace_error
from xrt_core.frontends.tensor import Tensor, value_of
from xrt_core.frontends.tracing import Tracer, active_tracer, tracing
from xrt_core.ir import graph as ir
from xrt_core.ir.schema import MINIMUM_OPSET, latest_opset
from xrt_core.ir.types import STRING, TensorType, ValueType, type_from_text


class Graph:
    """Base class of graphs written in Python: a subclass defines `build`.

        class Dense(xrt.Graph):
            def __init__(self, w, b):
                self.w, self.b = w, b

            def build(self, x):
                return xrt.ops.Relu(x @ self.w + self.b)

    `build` is traced once for each signature of its inputs. It may take any arguments (also *args, defaults, lists and
    dicts of arrays) and return a tensor or tensors nested in tuples, lists and dicts. Arrays stored in attributes are
    the parameters: they become constants named by their attribute path ('layers.0.w'), without a copy. Graphs stored
    in attributes can be called inside `build`.

    opset: the opset of the ONNX domain to trace at (or a mapping from domain to opset); None: the newest.
    """

    opset: ClassVar[int | Mapping[str, int] | None] = None

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the outputs from the inputs, both traced tensors. Defined by the subclass."""
        raise TraceError(f"{type(self).__name__} defines no build method: write `def build(self, x): return ...`")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Inline this graph into the graph being traced. Raises TraceError if no graph is being traced."""
        tracer = active_tracer()
        name = type(self).__name__
        if tracer is None:
            raise trace_error(
                f"{name} is called outside of tracing; to compute with arrays, wrap it: xrt.XRTModule({name}(...))(...)"
            )
        if self.opset is not None and any(tracer.pinned.get(d) != v for d, v in pinned_opsets(self).items()):
            raise trace_error(
                f"{name} sets opset {self.opset}, but is part of {tracer.label}; set `opset` on the outermost graph"
            )
        path = tracer.path_of(self)
        if path is None:
            path = tracer.fresh(tracer.prefix + name)
            tracer.add_paths(attribute_paths(self, path))
        with tracer.inside(path):
            return self.build(*args, **kwargs)

    def add_optimizer(self, optimizer: Any) -> None:
        """Set the optimizer that `training.TrainModule` uses for this graph.

        optimizer: an instance of a class of `xrt.optim`. Raises TraceError if one is set already.
        """
        known = getattr(self, "_optimizer", None)
        if known is not None:
            raise TraceError(f"{type(self).__name__} has an optimizer already: {type(known).__name__}")
        self._optimizer: Any = optimizer

    def named_parameters(self) -> dict[str, Any]:
        """Return the arrays stored in attributes, nested graphs included: 'layers.0.w' -> array."""
        paths = attribute_paths(self, "")
        return {path: obj for obj, path in paths.values() if not isinstance(obj, Graph)}


    def load_parameters(self, arrays: Mapping[str, Any]) -> None:
        """Replace the arrays that `named_parameters` returns by `arrays` (of any array library), all or none.

            graph.load_parameters(trainer.parameters())     # XRTModule(graph) then runs the trained model

        Raises InputError for an unknown or missing name, and for an array of another dtype or shape.
        """
        own = self.named_parameters()
        new = {name: np.asarray(a) for name, a in arrays.items()}
        if missing := [n for n in own if n not in new]:
            raise InputError(f"{type(self).__name__} also has the parameter {missing[0]!r}, which is not given")
        for name, a in new.items():
            if name not in own:
                has = ", ".join(own) or "none"
                raise InputError(f"{type(self).__name__} has no parameter {name!r}; it has {has}{nearest(name, own)}")
            old = np.asarray(own[name])
            if (a.dtype, a.shape) != (old.dtype, old.shape):
                raise InputError(
                    f"parameter {name!r} of {type(self).__name__} is {old.dtype}{list(old.shape)}, given is "
                    f"{a.dtype}{list(a.shape)}"
                )
        by_id = {id(own[name]): a for name, a in new.items()}  # an array referenced twice is replaced at both places
        _exchange(self, by_id, set())
        global _loads
        _loads += 1


_loads = 0


def parameter_loads() -> int:
    """How often `load_parameters` has replaced arrays in this process: where it is unchanged, so are all graphs."""
    return _loads


def parameter_arrays(graph: Any) -> tuple[Any, ...] | None:
    """The arrays of a `Graph` and the graphs in it; None for a function, which may reach any."""
    if not isinstance(graph, Graph):
        return None
    return tuple(part for part, _ in attribute_paths(graph, "").values() if not isinstance(part, Graph))


def _exchange(holder: Any, new: Mapping[int, np.ndarray], seen: set[int]) -> Any:
    """Replace the arrays reachable from `holder` by `new` (id of the old one -> array): in place, tuples rebuilt."""
    if id(holder) in new:
        return new[id(holder)]
    if not isinstance(holder, Graph | list | tuple | dict) or id(holder) in seen:
        return holder
    seen.add(id(holder))
    changed = {name: made for name, part in _parts(holder) if (made := _exchange(part, new, seen)) is not part}
    if isinstance(holder, Graph):
        for name, made in changed.items():
            setattr(holder, name, made)
    elif isinstance(holder, tuple):
        parts = [changed.get(i, part) for i, part in enumerate(holder)]
        return (type(holder)(*parts) if hasattr(holder, "_fields") else tuple(parts)) if changed else holder
    else:
        for name, made in changed.items():
            holder[name] = made
    return holder


def attribute_paths(root: Graph, prefix: str) -> dict[int, tuple[Any, str]]:
    """Return id -> (object, path) of the arrays and graphs reachable through attributes, lists, tuples and dicts.

    An object that is reachable by several paths has the first one.
    """
    found: dict[int, tuple[Any, str]] = {id(root): (root, prefix)}
    seen: set[int] = {id(root)}
    stack = [(_parts(root), prefix)]
    while stack:
        parts, path = stack[-1]
        entry = next(parts, None)
        if entry is None:
            stack.pop()
            continue
        name, part = entry
        here = f"{path}.{name}" if path else str(name)
        if isinstance(part, Graph | list | tuple | dict):
            if id(part) not in seen:
                seen.add(id(part))
                stack.append((_parts(part), here))
                if isinstance(part, Graph):
                    found[id(part)] = (part, here)
        elif is_array(part) and not isinstance(part, Tensor):
            found.setdefault(id(part), (part, here))
    return found


def _parts(holder: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(holder, Graph):
        for cls in type(holder).__mro__:
            if cls is Graph:
                break
            slots = cls.__dict__.get("__slots__", ())
            for s in (slots,) if isinstance(slots, str) else slots:
                if hasattr(holder, s):
                    yield s, getattr(holder, s)
        yield from getattr(holder, "__dict__", {}).items()
    elif isinstance(holder, dict):
        yield from holder.items()
    else:
        yield from enumerate(holder)


# calls


class Call(NamedTuple):
    """A bound call of `build`: its arguments flattened.

    names: a unique name per array, from the parameter it belongs to: 'x', 'args.0', 'state.h'.
    arrays: the caller's arrays, in the order of the graph's inputs.
    layout: the nesting of the arrays and all Python values; hashable, part of the signature.
    """

    names: tuple[str, ...]
    arrays: tuple[Any, ...]
    layout: Structure


Buildable = Graph | Callable[..., Any]


def _function(graph: Buildable) -> Callable[..., Any]:
    return graph.build if isinstance(graph, Graph) else graph


def _label(graph: Buildable) -> str:
    return type(graph).__name__ if isinstance(graph, Graph) else getattr(graph, "__name__", type(graph).__name__)


def parameters_of(graph: Buildable) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of `build` (or of a function), without `self`. Raises TraceError if inspection fails."""
    try:
        return inspect.signature(_function(graph)).parameters
    except (TypeError, ValueError) as e:
        raise TraceError(f"{_label(graph)}: the parameters of its build cannot be read: {e}") from None


class Binder:
    """Binds calls of one `build`; created once per graph, as inspecting a Python signature is slow.

    Arrays (of any library, also nested in lists, tuples and dicts) become inputs. A parameter that has a default or is
    keyword-only also takes Python values, which become part of the signature. Thread-safe.
    """

    __slots__ = ("_graph", "_parameters", "_plain", "_signature")

    def __init__(self, graph: Buildable) -> None:
        self._graph = graph
        self._parameters = parameters_of(graph)
        self._signature = inspect.Signature(list(self._parameters.values()))
        self._plain: dict[int, Call] = {}  # number of arrays, all positional -> a call of this form

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """Return the call's arrays, names and layout.

        Raises InputError for missing and surplus arguments and for values that are not arrays.
        """
        if kwargs or not all(map(is_array, args)):
            return _bind(self._graph, self._parameters, self._signature, args, kwargs)
        known = self._plain.get(len(args))
        if known is None:
            known = _bind(self._graph, self._parameters, self._signature, args, kwargs)
            self._plain[len(args)] = Call(known.names, (), known.layout)  # keeps no array alive
        return Call(known.names, tuple(args), known.layout)


def bind(graph: Buildable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """Bind one call: `Binder` for a single use."""
    return Binder(graph)(args, kwargs)


def _bind(
    graph: Buildable,
    parameters: Mapping[str, inspect.Parameter],
    signature: inspect.Signature,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Call:
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as e:
        wanted = ", ".join(str(p) for p in parameters.values())
        raise InputError(f"{_label(graph)}.build({wanted}): {e}") from None
    names: list[str] = []
    for key, value in bound.arguments.items():
        p = parameters[key]
        prefix = "" if p.kind is p.VAR_KEYWORD else key
        _, structure = flatten(value, is_array)
        if p.default is p.empty and p.kind is not p.KEYWORD_ONLY:
            _check_arrays(structure, key, _label(graph))
        names += structure.paths(prefix)
    arrays, layout = flatten((bound.args, bound.kwargs), is_array)
    try:
        hash(layout)
    except TypeError as e:
        raise InputError(f"{_label(graph)}.build: an argument is neither an array nor hashable: {e}") from None
    return Call(tuple(names), tuple(arrays), layout)


def _check_arrays(structure: Structure, name: str, label: str) -> None:
    if structure.kind == "static":
        kind, value = structure.payload
        own = "" if kind.__module__ == "builtins" else ", or register the type with xrt.register_array_type"
        raise InputError(
            f"{label}.build: argument {name!r} is {value!r} ({kind.__name__}), not an array; pass np.asarray(...), or "
            f"give the parameter a default to take Python values{own}"
        )
    for i, child in enumerate(structure.children):
        _check_arrays(child, f"{name}.{structure.keys[i] if structure.keys else i}", label)


def layout_of(count: int) -> Structure:
    """Return the layout of a call with exactly `count` positional arrays."""
    return Structure("tuple", (Structure("tuple", (LEAF,) * count), Structure("dict")))


# tracing


class Traced(Struct, frozen=True):
    """A traced graph, and the nesting of its outputs in the return value of `build`.

    output_names: a unique name per output: 'output' for a single tensor, 'output_0', ... for a tuple, keys for a dict.
    structure: rebuilds the nested result from the arrays of the outputs. loss: the value `backward` was called on, or
    None.
    """

    graph: ir.Graph
    output_names: tuple[str, ...]
    structure: Structure
    loss: ir.Value | None = None


def pinned_opsets(graph: Buildable) -> dict[str, int]:
    """Return domain -> opset of a graph's `opset`. Raises TraceError for one that is too old, too new or no number."""
    opset = getattr(graph, "opset", None) if isinstance(graph, Graph) else None
    if opset is None:
        return {}
    pinned = dict(opset) if isinstance(opset, Mapping) else {"": opset}
    if "ai.onnx" in pinned:
        pinned[""] = pinned.pop("ai.onnx")
    for domain, version in pinned.items():
        low, high = (MINIMUM_OPSET if not domain else 1), latest_opset(domain)
        if not isinstance(version, int) or not low <= version <= high:
            raise TraceError(f"{_label(graph)}.opset: {domain or 'ai.onnx'} {version!r} is not one of {low} to {high}")
    return pinned


def trace_call(
    graph: Buildable,
    types: Sequence[ValueType],
    layout: Structure | None = None,
    names: Sequence[str] | None = None,
) -> Traced:
    """Run `build` on traced tensors of these types and return the recorded graph.

    types: one per array of the call; with symbols as dimensions ("float32[batch, 4]"), sizes are values of the graph
    (`frontends.tensor.Size`). layout, names: from `bind`; default: all arrays positional.
    Raises TraceError and ShapeError, which name the user's source line; exceptions of user code propagate.
    """
    label = _label(graph)
    layout = layout_of(len(types)) if layout is None else layout
    if names is None:
        names = _positional_names(graph, len(types))
    dims = (d for t in types if isinstance(t, TensorType) for d in t.shape or ())
    tracer = Tracer(label, pinned_opsets(graph), has_symbols=any(isinstance(d, str) for d in dims))
    if isinstance(graph, Graph):
        tracer.add_paths(attribute_paths(graph, ""))
    with tracing(tracer):
        inputs = [ir.Value(tracer.fresh(n), t) for n, t in zip(names, types, strict=True)]
        args, kwargs = layout.rebuild([Tensor(v, tracer.scope) for v in inputs])
        result = _function(graph)(*args, **kwargs)
        leaves, structure = flatten(result, is_tensor_like)
        outputs = [value_of(as_output(x)) for x in leaves]
        if not outputs:
            raise TraceError(f"{label}.build returned no tensor, but {result!r}: return what it computes")
        output_names = _name_outputs(tracer, structure, outputs, inputs)
    made = ir.Graph(inputs, outputs, tracer.scope.nodes, opsets=dict(tracer.opsets), name=label)
    return Traced(made, tuple(output_names), structure, tracer.loss)


def _positional_names(graph: Buildable, count: int) -> list[str]:
    names: list[str] = []
    for p in parameters_of(graph).values():
        if p.kind is p.VAR_POSITIONAL:
            names += [f"{p.name}.{i}" for i in range(count - len(names))]
        elif p.kind is not p.VAR_KEYWORD and len(names) < count:
            names.append(p.name)
    if len(names) != count:
        raise TraceError(f"{_label(graph)}.build takes {len(names)} arrays, {count} types are given")
    return names


def _name_outputs(
    tracer: Tracer, structure: Structure, outputs: Sequence[ir.Value], inputs: Sequence[ir.Value]
) -> list[str]:
    """Return a name per output. A value that a node produces is renamed to it; no reader refers to the old name yet."""
    paths = structure.paths("output" if structure.kind != "dict" else "")
    names: list[str] = []
    seen: set[int] = {id(v) for v in inputs}
    for value, path in zip(outputs, paths, strict=True):
        name = tracer.fresh(path if structure.kind == "dict" else path.replace("output.", "output_", 1))
        names.append(name)
        if value.data is None and id(value) not in seen:
            object.__setattr__(value, "name", name)  # the graph around the value is not built yet
        seen.add(id(value))
    return names


def as_type(spec: Any) -> ValueType:
    """Return the ValueType of a ValueType, its text, an array, or an object with dtype and shape. Raises TraceError."""
    if hasattr(spec, "dtype") and hasattr(spec, "shape") and not isinstance(spec, TensorType):
        dtype = np.dtype(spec.dtype)
        return TensorType(STRING if dtype.kind in "UST" else dtype, tuple(spec.shape))
    if isinstance(spec, str):
        spec = type_from_text(", ".join(part.strip() for part in spec.split(","))) or spec
    if isinstance(spec, ValueType.__args__):
        return spec  # type: ignore[no-any-return]
    raise TraceError(located(f"{spec!r} is no type: give a TensorType, its text ('float32[2, 3]'), or an array"))


def trace(graph: Buildable, *types: Any) -> ir.Graph:
    """Trace a `Graph` or a plain function on inputs of the given types (TensorTypes, their text, or arrays).

    g = xrt.trace(lambda x, y: x @ y + 1, "float32[2, 3]", np.ones((3, 4), np.float32))
    """
    return trace_call(graph, [as_type(t) for t in types]).graph

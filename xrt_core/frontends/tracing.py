"""The tracer: records the operators applied in `Graph.build` as nodes with inferred types and source lines."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from xrt_core.errors import GraphError, ShapeError
from xrt_core.frontends.numpy_interop import as_array
from xrt_core.frontends.source_location import trace_error, user_location
from xrt_core.ir.graph import NO_ANNOTATIONS, Annotations, Attribute, Node, Value
from xrt_core.ir.inference import infer_types
from xrt_core.ir.op_traits import traits_of
from xrt_core.ir.schema import Schema, find_schema, latest_opset, why_unknown
from xrt_core.ir.types import STRING, Dim, SequenceType, TensorType, ValueType

_tracer: contextvars.ContextVar[Tracer | None] = contextvars.ContextVar("xrt_tracer", default=None)
_marks: contextvars.ContextVar[tuple[tuple[str, str], ...]] = contextvars.ContextVar("xrt_marks", default=())
"""(engine, region) of the active `power_by_engine` blocks, the innermost last."""

_devices: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("xrt_devices", default=())
"""Devices of the active `device` blocks, the innermost last."""

_LITERAL_SIZE = 64  # elements up to which equal literals share one constant
_KNOWN_SIZE = 1024  # elements up to which shape arithmetic is evaluated while tracing


class power_by_engine(contextlib.ContextDecorator):
    """Mark the nodes built inside the block, or the decorated function, for the engine `name`; None: for the host.

    Every block is a separate region, which becomes one launch if possible. Of nested blocks the innermost takes
    precedence; one that names the engine of the enclosing block has no effect. Raises TraceError if `name` is not a
    name, and if no graph is being traced.
    """

    def __init__(self, name: str | None) -> None:
        if name is not None and not (isinstance(name, str) and name):
            raise trace_error(f"power_by_engine({name!r}): it takes the name of an engine, or None for the host")
        self._engine = name or "host"

    def __enter__(self) -> None:
        tracer = _tracer.get()
        if tracer is None:
            raise trace_error(
                "power_by_engine marks nodes while a graph is traced, and none is: put it around the operators inside "
                "Graph.build, or mark by name or operator with XRTModule(..., marks={...})"
            )
        marks = _marks.get()
        if marks and marks[-1][0] == self._engine:
            mark = marks[-1]
        elif self._engine == "host":
            mark = ("host", "")
        else:
            tracer.blocks += 1
            mark = (self._engine, f"block {tracer.blocks}")
        _marks.set((*marks, mark))

    def __exit__(self, *exception: object) -> None:
        _marks.set(_marks.get()[:-1])


class device(contextlib.ContextDecorator):
    """Place the nodes built inside the block, or the decorated function, on a device such as "cpu:1" or "cuda:0".

    Of nested blocks the innermost takes precedence. Whether the device is there, and an engine on it takes the nodes,
    is seen when the graph is compiled (docs/devices.md). Raises TraceError if `name` is not a name, and if no graph is
    being traced.
    """

    def __init__(self, name: str) -> None:
        if not (isinstance(name, str) and name):
            raise trace_error(f"device({name!r}): it takes the name of a device, such as 'cpu:1' or 'cuda:0'")
        self._name = name

    def __enter__(self) -> None:
        if _tracer.get() is None:
            raise trace_error(
                "device places nodes while a graph is traced, and none is: put it around the operators inside "
                "Graph.build, or place by name with XRTModule(..., placement={...})"
            )
        _devices.set((*_devices.get(), self._name))

    def __exit__(self, *exception: object) -> None:
        _devices.set(_devices.get()[:-1])


class Scope:
    """The nodes of one graph under construction: the traced graph itself, or the body of an If, Loop or Scan."""

    __slots__ = ("closed", "label", "nodes", "parent", "tracer")

    def __init__(self, tracer: Tracer, parent: Scope | None, label: str) -> None:
        self.tracer = tracer
        self.parent = parent
        self.label = label
        self.nodes: list[Node] = []
        self.closed = False


class Tracer:
    """The state of one trace of a `build`: collects nodes and constants, and assigns names.

    pinned: domain -> opset that the graph sets; other domains are traced at the newest opset of the `onnx` package.
    opsets: domain -> opset for the domains used so far.
    known: results of nodes that shape arithmetic has evaluated. loss: the value `backward` was called on.
    blocks: the number of `power_by_engine` blocks entered. has_symbols: inputs have symbolic dimensions, and sizes that
    are no integers are values of the graph. sizes: those that were read, by scope, tensor and axis; dims: their
    dimensions.
    """

    def __init__(self, label: str, pinned: Mapping[str, int], has_symbols: bool = False) -> None:
        self.label = label
        self.has_symbols = has_symbols
        self.sizes: dict[tuple[Scope, Value, int], Value] = {}
        self.dims: dict[Value, Dim] = {}
        self.pinned = pinned
        self.opsets: dict[str, int] = {"": pinned.get("", 0) or latest_opset("")}
        self.known: dict[Value, np.ndarray] = {}
        self.loss: Value | None = None
        self.blocks = 0
        self.prefix = ""
        self.scope = Scope(self, None, label)
        self._used: dict[str, int] = {}
        self._paths: dict[int, tuple[Any, str]] = {}
        self._constants: dict[tuple[int, np.dtype | None], tuple[Any, Value]] = {}
        self._literals: dict[Any, Value] = {}

    # names

    def fresh(self, base: str) -> str:
        """Return a name that no value or node of this trace has: `base`, or `base_1`, `base_2`, ..."""
        used = self._used
        count = used.get(base)
        if count is None:
            used[base] = 1
            return base
        while (name := f"{base}_{count}") in used:
            count += 1
        used[base] = count + 1
        used[name] = 1
        return name

    def reserve(self, names: Iterable[str]) -> None:
        """Register these names as taken."""
        for name in names:
            self._used.setdefault(name, 1)

    def snapshot_names(self) -> dict[str, int]:
        """Return the names taken so far, for `restore_names`."""
        return dict(self._used)

    def restore_names(self, names: dict[str, int]) -> None:
        """Release the names taken since the snapshot; their values and nodes must be discarded."""
        self._used = names

    def add_paths(self, paths: Mapping[int, tuple[Any, str]]) -> None:
        """Register attribute paths: id -> (object, path). The first path of an object takes precedence."""
        for key, entry in paths.items():
            self._paths.setdefault(key, entry)

    def path_of(self, obj: object) -> str | None:
        """Return the attribute path of an object registered by `add_paths`, or None."""
        found = self._paths.get(id(obj))
        return found[1] if found is not None and found[0] is obj else None

    @contextlib.contextmanager
    def inside(self, path: str) -> Iterator[None]:
        """Prefix the names of the nodes recorded inside with `path` and a dot."""
        before = self.prefix
        self.prefix = f"{path}." if path else ""
        try:
            yield
        finally:
            self.prefix = before

    # scopes

    @contextlib.contextmanager
    def nested(self, label: str) -> Iterator[Scope]:
        """Record into a new scope nested in the current one."""
        outer = self.scope
        self.scope = Scope(self, outer, label)
        try:
            yield self.scope
        finally:
            self.scope.closed = True
            self.scope = outer

    # constants

    def constant(self, obj: Any, dtype: np.dtype | None = None) -> Value:
        """Return the constant of an array-like object; the same object always maps to the same constant.

        dtype: the element type; None: the object's own. Raises TraceError for an object that is not an array.
        """
        key = (id(obj), dtype)
        found = self._constants.get(key)
        if found is not None:
            return found[1]
        array = as_array(obj)
        wanted = array.dtype if dtype is None else dtype
        found = self._constants.get((id(obj), wanted))  # dtype=None and the object's own dtype give the same constant
        if found is not None:
            return found[1]
        path = self.path_of(obj)
        if path is None and array.size <= _LITERAL_SIZE:
            return self.literal(array, wanted)
        if wanted != array.dtype:
            array = array.astype(wanted)
        value = Value.constant(array, self.fresh(path or f"{self.prefix}constant"))
        self._constants[key] = self._constants[id(obj), wanted] = (obj, value)  # keeps the object and its id alive
        return value

    def literal(self, data: Any, dtype: np.dtype) -> Value:
        """Return the constant of a number, a string or a nested list of them; equal small literals share one."""
        try:
            array = np.array(data, dtype=dtype)  # a copy: the caller may modify a small array later
        except (ValueError, TypeError, OverflowError) as e:
            raise trace_error(f"{data!r} is not a value of {dtype}: {e}") from None
        if array.dtype == STRING or array.size > _LITERAL_SIZE:
            return Value.constant(array, self.fresh(f"{self.prefix}constant"))
        key = (array.dtype, array.shape, array.tobytes())
        found = self._literals.get(key)
        if found is None:
            found = self._literals[key] = Value.constant(array, self.fresh("constant"))
        return found

    def data_of(self, value: Value | None) -> np.ndarray | None:
        """Return the value's data if it is a constant or evaluated shape arithmetic, else None."""
        if value is None:
            return None
        return value.data if value.data is not None else self.known.get(value)

    # nodes

    def schema(self, op_type: str, domain: str = "") -> Schema:
        """Return the schema of an operator at this trace's opset of its domain. Raises TraceError if there is none."""
        opset = self.opsets.get(domain)
        if opset is None:
            try:
                opset = self.opsets[domain] = self.pinned.get(domain) or latest_opset(domain)
            except GraphError as e:
                raise trace_error(str(e)) from None
        found = find_schema(op_type, domain, opset)
        if found is None:
            raise trace_error(f"{why_unknown(op_type, domain, opset)} (set by `opset` of {self.label})")
        return found

    def emit(
        self,
        schema: Schema,
        inputs: Sequence[Value | None],
        attributes: Mapping[str, Attribute],
        outputs: int,
        types: Sequence[ValueType | None] | None = None,
        name: str = "",
    ) -> tuple[Value, ...]:
        """Append a node and return its outputs. types: of the outputs; default: inferred.

        Raises ShapeError, naming the user's line, if the inputs do not fit the operator.
        """
        where = user_location()
        label = name or self.fresh(self.prefix + schema.op_type)
        op = (schema.op_type, schema.domain, schema.since_version)
        if types is None:
            shown = [self._shown(v) for v in inputs]
            draft = Node(op[0], shown, (Value(),) * outputs, attributes, domain=op[1], version=op[2], name=label)
            try:
                types = infer_types(draft)
                types = tuple(_completed(t, i, schema, inputs) for i, t in enumerate(types))
            except ShapeError as e:
                raise ShapeError(f"{where}: {e}" if where else str(e)) from None
        if outputs == 1:
            made = (Value(label, types[0]),)
        else:
            made = tuple(Value(self.fresh(f"{label}.{i}"), t) for i, t in enumerate(types))  # type: ignore[assignment]
        marks = _marks.get()
        engine, region = marks[-1] if marks else (None, "")
        devices = _devices.get()
        annotations = NO_ANNOTATIONS
        if where or engine or devices:
            placed = devices[-1] if devices else None
            annotations = Annotations(engine=engine, region=region, device=placed, source=where)
        node = Node(op[0], inputs, made, attributes, domain=op[1], version=op[2], name=label, annotations=annotations)
        self.scope.nodes.append(node)
        traits = traits_of(node)
        if traits.shape_arithmetic or traits.shape_query:
            self._follow(node)
        return made

    def _shown(self, value: Value | None) -> Value | None:
        data = self.known.get(value) if self.known and value is not None else None
        return value if data is None else Value.constant(data)

    def _follow(self, node: Node) -> None:
        """Evaluate a node of shape arithmetic if its inputs are known and small."""
        if not all(_is_countable(v) for v in node.outputs):
            return
        if traits_of(node).shape_query:
            source = node.inputs[0]
            if source is None or not source.is_static:
                return
            given: list[Any] = [np.broadcast_to(np.int8(0), source.shape)]  # type: ignore[arg-type]
        else:
            given = [self.data_of(v) for v in node.inputs]
            if any(a is None or a.size > _KNOWN_SIZE for a, v in zip(given, node.inputs, strict=True) if v is not None):
                return
        from xrt_core.kernels.registry import OpContext, find_kernel

        kernel = find_kernel("", node.op_type)
        if kernel is None:
            return
        try:
            result = kernel.function(OpContext(node, np), *given)
        except Exception:  # evaluation is optional: the same error is raised, and reported, when the node runs
            return
        results = result if isinstance(result, tuple) else (result,)
        for v, a in zip(node.outputs, results, strict=False):
            if v is not None and a is not None:
                self.known[v] = np.asarray(a)


def _is_countable(value: Value | None) -> bool:
    if value is None or not value.is_static or value.dtype is None or value.dtype.kind not in "iub":
        return False
    return int(np.prod(value.shape, dtype=np.int64)) <= _KNOWN_SIZE  # type: ignore[arg-type]


def _completed(found: ValueType | None, index: int, schema: Schema, inputs: Sequence[Value | None]) -> ValueType | None:
    """Return the inferred type; if inference found none, the one that the schema's type variables determine."""
    if found is None and schema.onnx is not None and schema.onnx.outputs:
        formal = schema.onnx.outputs[min(index, len(schema.onnx.outputs) - 1)]
        for parameter, v in zip(schema.onnx.inputs, inputs, strict=False):
            if parameter.type_str == formal.type_str and v is not None and isinstance(v.type, TensorType):
                found = TensorType(v.type.dtype)
                break
        else:
            from xrt_core.ir.schema import schema_type

            found = schema_type(next(iter(formal.types))) if len(formal.types) == 1 else None
    if not isinstance(found, TensorType) or schema.op_type == "Reshape":
        _check_reshape(found, schema, inputs)
    return found


def _check_reshape(found: ValueType | None, schema: Schema, inputs: Sequence[Value | None]) -> None:
    source = inputs[0] if inputs else None
    if schema.op_type != "Reshape" or source is None or not source.is_static or source.shape is None:
        return
    if isinstance(found, TensorType) and found.is_static and found.shape is not None:
        have, want = np.prod(source.shape, dtype=np.int64), np.prod(found.shape, dtype=np.int64)  # type: ignore[arg-type]
        if have != want:
            raise ShapeError(f"Reshape: {source.type} has {have} elements, the shape {list(found.shape)} takes {want}")


def active_tracer() -> Tracer | None:
    """Return the active tracer of this context, or None."""
    return _tracer.get()


def current_tracer(what: str) -> Tracer:
    """Return the active tracer of this context. Raises TraceError, naming `what`, outside `Graph.build`."""
    tracer = _tracer.get()
    if tracer is None:
        raise trace_error(
            f"{what} records into a graph and works only while one is traced: inside Graph.build or a function given "
            f"to xrt.trace. To compute with arrays, wrap the graph: xrt.XRTModule(graph)(array)"
        )
    return tracer


@contextlib.contextmanager
def tracing(tracer: Tracer) -> Iterator[Tracer]:
    """Activate `tracer` in this context; engine marks and devices of an enclosing trace do not apply."""
    token, marks, devices = _tracer.set(tracer), _marks.set(()), _devices.set(())
    try:
        yield tracer
    finally:
        tracer.scope.closed = True
        _devices.reset(devices)
        _marks.reset(marks)
        _tracer.reset(token)


def joined(a: ValueType | None, b: ValueType | None) -> ValueType | None:
    """Return the join of two types: dimensions that differ become unknown. Raises ShapeError if the dtypes differ."""
    if a == b:
        return a
    if isinstance(a, SequenceType) and isinstance(b, SequenceType):
        return SequenceType(joined(a.element, b.element))
    if a is None or b is None:
        return None
    if not isinstance(a, TensorType) or not isinstance(b, TensorType) or a.dtype != b.dtype:
        raise ShapeError(f"{a} and {b}")
    if a.shape is None or b.shape is None or len(a.shape) != len(b.shape):
        return TensorType(a.dtype)
    return TensorType(a.dtype, tuple(x if x == y else None for x, y in zip(a.shape, b.shape, strict=True)))

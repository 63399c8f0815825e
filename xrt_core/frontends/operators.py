"""The functions of `xrt.ops`: generated from the schemas of the onnx package, one per operator, on first use.

Attribute values are converted from Python objects to the IR's form and checked against the schema's kind.
"""

from __future__ import annotations

import difflib
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from msgspec import Struct

from xrt_core.errors import GraphError
from xrt_core.frontends.control_flow import trace_bodies
from xrt_core.frontends.numpy_interop import as_array, is_array
from xrt_core.frontends.promotion import BOOL, FLOAT32, INT64
from xrt_core.frontends.source_location import trace_error
from xrt_core.frontends.tensor import Tensor, constant, literal, stack_scalars, value_of
from xrt_core.frontends.tracing import Tracer, current_tracer
from xrt_core.ir.graph import Attribute, Graph, SparseTensor, Value
from xrt_core.ir.schema import AttributeKind, Schema, find_schema, latest_opset, schema_dtypes
from xrt_core.ir.types import (
    DTYPE_TO_ONNX,
    MapType,
    OptionalType,
    SequenceType,
    SparseTensorType,
    TensorType,
    dtype_from_name,
    dtype_name,
)

_STRING = np.dtype(object)


class Formal(Struct, frozen=True):
    """One formal input of an operator: its type variable, the allowed dtypes, and its arity."""

    name: str
    variable: str
    dtypes: frozenset[np.dtype]
    optional: bool
    variadic: bool
    homogeneous: bool


class Operator(Struct, frozen=True):
    """The callable form of one version of an operator."""

    schema: Schema
    formals: tuple[Formal, ...]
    positions: Mapping[str, int]

    def __call__(self, tracer: Tracer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Check and convert the arguments; append the node. Raises TraceError and ShapeError with the user's line."""
        schema = self.schema
        if schema.deprecated:
            raise trace_error(
                f"{schema.operator} is deprecated since opset {schema.since_version}: use its successor, or trace at "
                f"an older opset"
            )
        wanted, name = kwargs.pop("outputs", None), kwargs.pop("name", "")
        given, attributes, graphs = self._arguments(args, kwargs)
        inputs = [None if x is None else value_of(x) for x in self._tensors(given)]
        while inputs and inputs[-1] is None:
            inputs.pop()
        label = tracer.fresh(tracer.prefix + (name or schema.op_type))
        if schema.op_type == "Constant" and not schema.domain and "sparse_value" not in attributes:
            return _constant(attributes)
        if graphs:
            bodies = trace_bodies(tracer, schema.op_type, label, inputs, graphs, attributes)
            made = tracer.emit(
                schema, inputs, {**attributes, **bodies.attributes}, len(bodies.types), bodies.types, name=label
            )
            tensors = [Tensor(v, tracer.scope) for v in made]
            if bodies.structure is not None:
                return bodies.structure.rebuild(tensors)
            return tensors[0] if len(tensors) == 1 else tuple(tensors)
        count = self._output_count(inputs, attributes, wanted, tracer)
        made = tracer.emit(schema, inputs, attributes, count, name=label)
        tensors = [Tensor(v, tracer.scope) for v in made]
        return tensors[0] if count == 1 and not self._gives_list else tuple(tensors)

    @property
    def _gives_list(self) -> bool:
        return self.schema.op_type == "Split"

    # arguments

    def _arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Attribute], dict[str, Any]]:
        """Return the inputs in order, the converted attributes, and the graph attributes unconverted."""
        schema, formals, op = self.schema, self.formals, self.schema.operator
        last = formals[-1] if formals else None
        if last is not None and last.variadic and len(args) == len(formals) and isinstance(args[-1], list | tuple):
            args = (*args[:-1], *args[-1])
        if len(args) > len(formals) and not (last and last.variadic):
            raise trace_error(
                f"{op} takes {len(formals)} inputs ({', '.join(f.name for f in formals)}), {len(args)} are given; "
                f"attributes are given by name"
            )
        given = list(args)
        attributes: dict[str, Attribute] = {}
        graphs: dict[str, Any] = {}
        for key, value in kwargs.items():
            known = schema.attributes.get(key)
            if known is not None:
                if value is None:
                    continue
                if known.kind == "graph":
                    graphs[key] = value
                else:
                    attributes[key] = attribute_value(known.kind, value, f"{op}: attribute {key!r}", op)
                continue
            at = self.positions.get(key)
            if at is None:
                raise trace_error(self._unknown(key))
            if at < len(given):
                if given[at] is not None:
                    raise trace_error(f"{op}: input {key!r} is given twice, by position and by name")
                given[at] = value
            elif formals[at].variadic and isinstance(value, list | tuple):
                given += [None] * (at - len(given)) + list(value)
            else:
                given += [None] * (at - len(given)) + [value]
        self._check_complete(given, attributes, graphs)
        return given, attributes, graphs

    def _unknown(self, key: str) -> str:
        names = [*self.positions, *self.schema.attributes]
        near = difflib.get_close_matches(key, names, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return (
            f"{self.schema.operator} (version {self.schema.since_version}) has no input or attribute {key!r}{hint} "
            f"It has {', '.join(names) or 'none'}"
        )

    def _check_complete(self, given: Sequence[Any], attributes: Mapping[str, Any], graphs: Mapping[str, Any]) -> None:
        op = self.schema.operator
        for i, f in enumerate(self.formals):
            if (i >= len(given) or given[i] is None) and not f.optional and not (f.variadic and i >= len(given)):
                raise trace_error(f"{op}: input {f.name!r} is missing")
        if len(given) < self.schema.min_inputs:
            raise trace_error(f"{op} takes {self.schema.min_inputs} inputs at least, {len(given)} are given")
        for n in self.schema.required_attributes:
            if n not in attributes and n not in graphs:
                raise trace_error(f"{op}: attribute {n!r} is required")

    def _tensors(self, given: Sequence[Any]) -> list[Tensor | None]:
        """Convert every input to a tensor; a Python number takes the dtype of the tensors of its type variable."""
        found: list[Tensor | None] = [None] * len(given)
        bound: dict[str, np.dtype] = {}
        waiting: list[tuple[int, Formal, Any]] = []
        for i, x in enumerate(given):
            formal = self.formals[min(i, len(self.formals) - 1)]
            if x is None:
                continue
            if isinstance(x, list | tuple) and any(isinstance(e, Tensor) for e in x):
                x = stack_scalars(x)
            if isinstance(x, Tensor):
                found[i] = x
            elif is_array(x):
                found[i] = constant(x)
            else:
                waiting.append((i, formal, x))
                continue
            dtype = _element_dtype(found[i])
            if dtype is not None and formal.homogeneous:
                bound.setdefault(formal.variable, dtype)
        for _, formal, _ in waiting:  # numbers alone: 0.5, 1 are floats
            if formal.variable not in bound and formal.homogeneous and len(formal.dtypes) != 1:
                alike = [y for _, f, y in waiting if f.variable == formal.variable]
                bound[formal.variable] = self._literal_dtype(alike, formal)
        for i, formal, x in waiting:
            dtype = bound.get(formal.variable) if formal.homogeneous else None
            found[i] = literal(x, dtype if dtype is not None else self._literal_dtype([x], formal))
        return found

    def _literal_dtype(self, values: Any, formal: Formal) -> np.dtype:
        if len(formal.dtypes) == 1:
            return next(iter(formal.dtypes))
        try:
            kind = np.asarray(values).dtype.kind
        except ValueError:
            kind = np.asarray(np.concatenate([np.ravel(v) for v in values])).dtype.kind
        natural = {"b": BOOL, "i": INT64, "f": FLOAT32, "U": _STRING}.get(kind)
        if natural is None:
            raise trace_error(
                f"{self.schema.operator}: input {formal.name!r} takes a tensor, an array or a number, not {values[0]!r}"
            )
        if natural == INT64 and INT64 not in formal.dtypes and FLOAT32 in formal.dtypes:
            return FLOAT32
        return natural

    # outputs

    def _output_count(
        self, inputs: Sequence[Value | None], attributes: Mapping[str, Any], wanted: int | None, tracer: Tracer
    ) -> int:
        schema = self.schema
        if wanted is not None:
            if not isinstance(wanted, int) or not max(schema.min_outputs, 1) <= wanted <= schema.max_outputs:
                raise trace_error(
                    f"{schema.operator}: outputs={wanted!r}; it has {schema.min_outputs} to {schema.max_outputs}"
                )
            return wanted
        outputs = schema.onnx.outputs
        if outputs and outputs[-1].option.name == "Variadic":
            count = _variadic_count(schema, inputs, attributes, tracer)
            if count is None:
                raise trace_error(f"{schema.operator}: give the number of outputs, with outputs=N")
            return count
        if schema.op_type == "BatchNormalization" and attributes.get("training_mode"):
            return 3  # the running mean and variance are part of training
        return schema.min_outputs or schema.max_outputs


def _constant(attributes: Mapping[str, Attribute]) -> Tensor:
    """Return the constant of a Constant node with these attributes."""
    if len(attributes) != 1:
        raise trace_error(f"Constant takes one of its attributes, not {', '.join(attributes) or 'none'}")
    ((key, data),) = attributes.items()
    if isinstance(data, np.ndarray):
        return constant(data)
    dtype = _STRING if "string" in key else INT64 if "int" in key else FLOAT32
    return literal(data, dtype)


def _variadic_count(
    schema: Schema, inputs: Sequence[Value | None], attributes: Mapping[str, Any], tracer: Tracer
) -> int | None:
    op = schema.op_type
    if op == "Split":
        if "num_outputs" in attributes:
            return int(attributes["num_outputs"])
        if "split" in attributes:
            return len(attributes["split"])
        sizes = inputs[1] if len(inputs) > 1 else None
        if sizes is None:
            return None
        known = tracer.data_of(sizes)
        if known is not None:
            return known.size
        return sizes.shape[0] if sizes.shape is not None and isinstance(sizes.shape[0], int) else None
    if schema.domain == "ai.onnx.preview.training":
        rows = {"Adagrad": 3, "Momentum": 3, "Adam": 4}.get(op)  # tensors per weight: weight, gradient and state
        if rows is not None:
            return (len(inputs) - 2) // rows * (rows - 1)
        return len(attributes.get("xs", ())) or None
    return None


def _element_dtype(tensor: Tensor | None) -> np.dtype | None:
    t = None if tensor is None else tensor.type
    if isinstance(t, SequenceType):
        t = t.element
    return t.dtype if isinstance(t, TensorType) else None


@cache
def operator_for(op_type: str, domain: str, since_version: int) -> Operator:
    """Return the callable form of one version of an operator. The schema must exist."""
    schema = find_schema(op_type, domain, since_version)
    if schema is None or schema.onnx is None:
        raise KeyError((op_type, domain, since_version))
    formals = []
    for f in schema.onnx.inputs:
        option = f.option.name
        formals.append(
            Formal(
                name=f.name,
                variable=f.type_str,
                dtypes=schema_dtypes(f.types),
                optional=option == "Optional",
                variadic=option == "Variadic",
                homogeneous=f.is_homogeneous,
            )
        )
    return Operator(schema, tuple(formals), {f.name: i for i, f in enumerate(formals)})


@cache
def operator_function(op_type: str, domain: str) -> Callable[..., Any]:
    """Return the function `xrt.ops.<op_type>`, with the name, the documentation and the signature of the newest schema.

    A call uses the version at the traced graph's opset. Raises KeyError for an operator that no opset has.
    """
    newest = operator_for(op_type, domain, latest_opset(domain))

    def apply(*args: Any, **kwargs: Any) -> Any:
        tracer = current_tracer(f"xrt.ops.{op_type}")
        since = tracer.schema(op_type, domain).since_version
        return operator_for(op_type, domain, since)(tracer, args, kwargs)

    apply.__name__ = op_type
    apply.__qualname__ = op_type
    apply.__module__ = "xrt_core.frontends.ops"
    apply.__doc__ = _documentation(newest.schema)
    apply.__signature__ = _signature(newest)  # type: ignore[attr-defined]
    return apply


def _signature(operator: Operator) -> inspect.Signature:
    P = inspect.Parameter
    parameters: list[inspect.Parameter] = []
    optional = False
    for f in operator.formals:
        optional = optional or f.optional
        if f.variadic:
            parameters.append(P(f.name, P.VAR_POSITIONAL))
        else:
            parameters.append(P(f.name, P.POSITIONAL_OR_KEYWORD, default=None if optional else P.empty))
    for a in operator.schema.onnx.attributes.values():
        default = P.empty if a.required else _default(a)
        parameters.append(P(a.name, P.KEYWORD_ONLY, default=default))
    schema = operator.schema
    if schema.max_outputs > max(schema.min_outputs, 1):
        parameters.append(P("outputs", P.KEYWORD_ONLY, default=None))
    parameters.append(P("name", P.KEYWORD_ONLY, default=""))
    return inspect.Signature(parameters)


def _default(attribute: Any) -> Any:
    from onnx.helper import get_attribute_value

    if not attribute.default_value.type:
        return None
    value = get_attribute_value(attribute.default_value)
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, str | int | float):
        return value
    return [v.decode() if isinstance(v, bytes) else v for v in value] if isinstance(value, Sequence) else None


def _documentation(schema: Schema) -> str:
    s = schema.onnx
    lines = [s.doc.strip() if s.doc else schema.operator, ""]
    for title, formals in (("Inputs", s.inputs), ("Outputs", s.outputs)):
        if formals:
            lines.append(f"{title}:")
            for f in formals:
                how = {"Optional": ", optional", "Variadic": ", any number"}.get(f.option.name, "")
                dtypes = ", ".join(sorted(dtype_name(d) for d in schema_dtypes(f.types)))
                lines.append(f"    {f.name} ({dtypes or f.type_str}{how}): {' '.join(f.description.split())}")
            lines.append("")
    if s.attributes:
        lines.append("Attributes:")
        for a in s.attributes.values():
            kind = schema.attributes[a.name].kind + (", required" if a.required else "")
            lines.append(f"    {a.name} ({kind}): {' '.join(a.description.split())}")
        lines.append("")
    lines.append(f"Since version {schema.since_version} of {schema.domain or 'ai.onnx'}.")
    return "\n".join(lines)


_TYPES = (TensorType, SparseTensorType, SequenceType, OptionalType, MapType)


def attribute_value(kind: AttributeKind, value: Any, where: str, op: str = "") -> Attribute:
    """Convert a Python value to an attribute of `kind`: ints also from dtypes (`to=np.float16`), tensors from arrays.

    Raises TraceError, naming `where` and the expected kind, for any other value.
    """
    single = _SINGLE.get(kind)
    if single is not None:
        try:
            made: Attribute = single(value)
        except (TypeError, ValueError, OverflowError, GraphError):
            raise trace_error(f"{where} must be {_EXPECTED[kind]}, not {_described(value)}") from None
        if op == "ConstantOfShape" and isinstance(made, np.ndarray) and made.ndim == 0:
            return made.reshape(1)  # ONNX requires a one-element tensor here
        return made
    one = _LISTS[kind]
    if isinstance(value, str | bytes) or not hasattr(value, "__iter__"):
        raise trace_error(f"{where} must be a list of which each is {_EXPECTED[one]}, not {_described(value)}")
    return tuple(attribute_value(one, v, f"{where}[{i}]") for i, v in enumerate(value))


def _described(value: Any) -> str:
    return f"{value!r} ({type(value).__name__})"


def _int(value: Any) -> int:
    if isinstance(value, str):
        return DTYPE_TO_ONNX[dtype_from_name(value)]
    if isinstance(value, np.dtype) or (isinstance(value, type) and not issubclass(value, int | float | bool)):
        return _element_type(np.dtype(value))
    if isinstance(value, type):
        return _element_type(np.dtype({int: np.int64, float: np.float32}.get(value, value)))
    made = operator.index(value)
    if not -(2**63) <= made < 2**63:
        raise OverflowError
    return int(made)


def _element_type(dtype: np.dtype) -> int:
    if dtype not in DTYPE_TO_ONNX:
        raise TypeError
    return DTYPE_TO_ONNX[dtype]


def _float(value: Any) -> float:
    if isinstance(value, int | float | np.integer | np.floating):
        return float(value)
    raise TypeError


def _string(value: Any) -> str | bytes:
    if isinstance(value, str | bytes):
        return value
    raise TypeError


def _tensor(value: Any) -> np.ndarray:
    if is_array(value):
        return as_array(value)
    array = np.asarray(value)
    natural = {"b": np.bool_, "i": np.int64, "f": np.float32, "U": object}.get(array.dtype.kind)
    if natural is None:
        raise TypeError
    return array.astype(natural)


def _instance(kinds: tuple[type, ...]) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if isinstance(value, kinds):
            return value
        raise TypeError

    return check


_SINGLE: Mapping[str, Callable[[Any], Any]] = {
    "int": _int,
    "float": _float,
    "string": _string,
    "tensor": _tensor,
    "sparse_tensor": _instance((SparseTensor,)),
    "type": _instance(_TYPES),
    "graph": _instance((Graph,)),
}
_LISTS: Mapping[str, AttributeKind] = {
    "ints": "int", "floats": "float", "strings": "string", "tensors": "tensor", "graphs": "graph", "types": "type",
    "sparse_tensors": "sparse_tensor",
}  # fmt: skip
_EXPECTED: Mapping[str, str] = {
    "int": "an integer",
    "float": "a number",
    "string": "a string",
    "tensor": "an array or a number",
    "sparse_tensor": "an xrt_core.ir.graph.SparseTensor",
    "type": "a type such as xrt_core.ir.types.TensorType",
    "graph": "an ir.Graph",
}

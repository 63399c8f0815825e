"""Schemas of operators: those of the `onnx` package, looked up lazily and cached, and those of the `xrt` dialect.

The dialect holds what stands for a part of a graph (Launch, ...) and the gradients that no composition of ONNX
operators expresses well. Types are written as ONNX schemas write them: 'tensor(float)', 'seq(tensor(int64))'.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, Final, Literal, cast

import numpy as np
from msgspec import Struct

from xrt_core.errors import GraphError, RegistrationError, ShapeError
from xrt_core.ir.graph import Node
from xrt_core.ir.operator_set import (
    find_operator,
    newest_version,
    operator_versions,
    plugin_domains,
    types_by_lowering,
)
from xrt_core.ir.types import (
    ONNX_TO_DTYPE,
    Dim,
    OptionalType,
    SequenceType,
    TensorType,
    ValueType,
)
from xrt_core.plugins import plugins

MANY: Final = 2**31 - 1
"""The `max_inputs` of an operator that takes any number."""

MINIMUM_OPSET: Final = 7
"""The oldest opset of the ONNX domain that is accepted."""

DIALECT: Final = "xrt"
"""The domain of the project's own operators."""

DIALECT_VERSION: Final = 1

PROVIDERS: Final[Mapping[str, str]] = MappingProxyType({
    "com.microsoft": "pip install xrt-contrib",
    "ai.onnx.contrib": "pip install onnxruntime-extensions, whose library the option custom_op_libraries takes "
    "(docs/operators.md)",
})  # fmt: skip
"""Domains of other projects -> how to get their operators, for messages."""

OutputTypes = tuple[ValueType | None, ...]
InferTypes = Callable[[Node], OutputTypes]
AttributeKind = Literal[
    "float", "int", "string", "tensor", "graph", "sparse_tensor", "type", "function",
    "floats", "ints", "strings", "tensors", "graphs", "sparse_tensors", "types",
]  # fmt: skip

# Source: onnx.proto3, `AttributeProto.AttributeType`.
ATTRIBUTE_KINDS: Final[Mapping[int, AttributeKind]] = MappingProxyType({
    1: "float", 2: "int", 3: "string", 4: "tensor", 5: "graph", 11: "sparse_tensor", 13: "type",
    6: "floats", 7: "ints", 8: "strings", 9: "tensors", 10: "graphs", 12: "sparse_tensors", 14: "types",
})  # fmt: skip
"""AttributeProto.AttributeType -> kind."""


class AttributeSchema(Struct, frozen=True):
    """One attribute of an operator: its kind, and whether a node must give it."""

    name: str
    kind: AttributeKind
    required: bool = False


@dataclass(frozen=True, slots=True)
class Schema:
    """What an operator takes and gives.

    since_version: the opset version of its domain in which this form appeared.
    min_inputs .. max_outputs: how many it may list, left-out optional ones included.
    attributes: by name.
    deprecated: newer opsets do without it.
    infer: for the dialect and plugins: types of the outputs from a node whose inputs are typed.
    onnx: the `onnx.defs.OpSchema` (for inference, documentation); None for the dialect.
    is_open: of an operator that nobody here defines: any inputs, outputs and attributes.
    """

    domain: str
    op_type: str
    since_version: int
    min_inputs: int
    max_inputs: int
    min_outputs: int
    max_outputs: int
    attributes: Mapping[str, AttributeSchema] = field(default_factory=dict)
    deprecated: bool = False
    infer: InferTypes | None = None
    onnx: Any = None
    is_open: bool = False

    @property
    def required_attributes(self) -> tuple[str, ...]:
        """Names of the attributes that a node must give."""
        return tuple(a.name for a in self.attributes.values() if a.required)

    @property
    def operator(self) -> str:
        """The operator with its domain, as 'Relu' or 'ai.onnx.ml.Scaler'."""
        return f"{self.domain}.{self.op_type}" if self.domain else self.op_type


_DIALECT: dict[str, Schema] = {}
_HISTORY: dict[tuple[str, str], list[int]] = {}
_CACHE: dict[tuple[str, str, int], Schema | None] = {}


def normal_domain(domain: str) -> str:
    """The domain as the IR writes it: '' for 'ai.onnx'."""
    return "" if domain == "ai.onnx" else domain


def register_schema(schema: Schema) -> Schema:
    """Add an operator to the dialect. Raises RegistrationError for a foreign domain or a taken name."""
    if schema.domain != DIALECT:
        raise RegistrationError(f"schema {schema.operator}: only operators of domain {DIALECT!r} are registered here")
    if schema.op_type in _DIALECT:
        raise RegistrationError(f"schema {schema.operator} is registered twice")
    _DIALECT[schema.op_type] = schema
    _CACHE.clear()
    return schema


def dialect() -> Mapping[str, Schema]:
    """The operators of the `xrt` dialect by name; read-only."""
    return MappingProxyType(_DIALECT)


def domain_versions() -> Mapping[str, int]:
    """Every domain of the `onnx` package and the dialect -> the newest version known."""
    import onnx

    versions = {d: newest for d, (_, newest) in onnx.defs.C.schema_version_map().items()}
    return {**versions, DIALECT: DIALECT_VERSION}


def domain_version(domain: str) -> int:
    """The newest version of a domain, of a plugin's too; 0 for one that is unknown."""
    return domain_versions().get(domain) or newest_version(domain)


def latest_opset(domain: str = "") -> int:
    """The newest version of a domain that the installed `onnx`, the dialect or a plugin knows. Raises GraphError."""
    domain = normal_domain(domain)
    newest = domain_version(domain)
    if not newest:
        known = sorted({*domain_versions(), *plugin_domains()})
        raise GraphError(f"unknown operator domain {domain!r}; known: {', '.join(map(repr, known))}")
    return newest


def latest_schemas(operators: Collection[tuple[str, str]]) -> dict[tuple[str, str], Schema | None]:
    """The newest schema of each operator, given as (domain, name); None where there is none."""
    newest = {domain: domain_version(normal_domain(domain)) for domain in {d for d, _ in operators}}
    return {(d, op_type): find_schema(op_type, d, newest[d]) for d, op_type in operators}


def find_schema(op_type: str, domain: str, opset: int) -> Schema | None:
    """The schema of an operator as of version `opset` of its domain, or None where there is none. Cached."""
    domain = normal_domain(domain)
    key = (domain, op_type, opset)
    try:
        return _CACHE[key]
    except KeyError:
        found = _look_up(op_type, domain, opset)
        if found is None:
            own = find_operator(domain, op_type, opset)  # kept there, as long as the plugin is
            return None if own is None else cast(Schema, own.schema)  # a plugin may bring it later
        _CACHE[key] = found
        return found


def find_schema_or_open(op_type: str, domain: str, opset: int) -> Schema | None:
    """As `find_schema`; for an operator that nobody here defines, in a domain that is not ONNX's, a schema that allows
    everything: a model that has it can be read, and the node is an error where it would have to run."""
    found = find_schema(op_type, domain, opset)
    if found is None and normal_domain(domain) not in domain_versions():
        return open_schema(op_type, domain, opset)
    return found


def open_schema(op_type: str, domain: str, version: int, infer: InferTypes | None = None) -> Schema:
    """A schema that allows any inputs, outputs and attributes."""
    return Schema(domain, op_type, version, 0, MANY, 0, MANY, infer=infer, is_open=True)


def undefined_operator(node: Node) -> str:
    """Why nobody here defines the operator of a node, with the remedy; "" for one that is defined."""
    if node.domain in domain_versions() or find_operator(node.domain, node.op_type, node.version) is not None:
        return ""
    return why_unknown(node.op_type, node.domain, node.version)


def schema_for(op_type: str, domain: str, opset: int) -> Schema:
    """The schema of an operator as of version `opset` of its domain.

    Raises GraphError where the domain or the operator is unknown, or came later than `opset`.
    """
    found = find_schema(op_type, domain, opset)
    if found is None:
        raise GraphError(why_unknown(op_type, normal_domain(domain), opset))
    return found


def since_version(op_type: str, domain: str, opset: int) -> int:
    """The `since_version` that `Node.version` holds for an operator in a model of `opset`. Raises GraphError."""
    return schema_for(op_type, domain, opset).since_version


def opset_range(op_type: str, domain: str, version: int) -> tuple[int, int]:
    """The first and last opset in which an operator is of that `since_version`. Raises GraphError if there is none."""
    domain = normal_domain(domain)
    if not _HISTORY:
        import onnx

        for s in onnx.defs.get_all_schemas_with_history():
            _HISTORY.setdefault((s.domain, s.name), []).append(s.since_version)
    versions = [DIALECT_VERSION] if domain == DIALECT else _HISTORY.get((domain, op_type), [])
    versions = versions or operator_versions(domain, op_type)
    if version not in versions:
        known = sorted(versions) or "none"
        raise GraphError(f"{domain or 'ai.onnx'} {op_type} has no version {version}; it has {known}")
    return version, min((v - 1 for v in versions if v > version), default=latest_opset(domain))


def dialect_inference(node: Node) -> InferTypes | None:
    """The type inference that an operator of the dialect, or of a plugin, brings with it; None for every other."""
    if node.domain == DIALECT:
        own = _DIALECT.get(node.op_type)
        return None if own is None else own.infer
    import onnx

    if not node.domain and onnx.defs.has(node.op_type):
        return None
    found = find_operator(node.domain, node.op_type, node.version)
    if found is None:
        return None
    infer = cast(Schema, found.schema).infer
    if infer is None and found.lowering is not None:
        return partial(types_by_lowering, lowering=found.lowering)
    return infer


def why_unknown(op_type: str, domain: str, opset: int) -> str:
    """A sentence on why there is no such operator, with the nearest one that exists."""
    import onnx

    label = domain or "ai.onnx"
    if newest_version(domain):
        return (
            f"{label} has no operator {op_type} as of version {opset} of its plugin; define it by "
            f"xrt.custom_op({f'{domain}::{op_type}'!r})"
        )
    versions = domain_versions()
    if domain not in versions and domain in plugin_domains():
        why = "; ".join(p.reason for p in plugins.problems() if domain in p.what) or "it defines no operators"
        return f"operator {op_type} is of the domain {domain!r}, whose plugin cannot be used: {why}"
    if domain not in versions:
        known = ", ".join(sorted({d or "ai.onnx" for d in (*versions, *plugin_domains())}))
        remedy = PROVIDERS.get(domain, "install a package that has its operators")
        return (
            f"operator {op_type} is of the unknown domain {domain!r} (known: {known}) and no function of the model "
            f"defines it; {remedy}, or define it by xrt.custom_op({f'{domain}::{op_type}'!r})"
        )
    if domain == DIALECT:
        return f"the dialect {DIALECT!r} has no operator {op_type}; it has {', '.join(sorted(_DIALECT))}"
    history = onnx.defs.get_all_schemas_with_history()
    since = min((s.since_version for s in history if (s.domain, s.name) == (domain, op_type)), default=None)
    if since is not None:
        return f"{label} {op_type} came with opset {since}, but opset {opset} is imported; import a newer opset"
    import difflib

    names = {s.name for s in onnx.defs.get_all_schemas() if s.domain == domain}
    near = difflib.get_close_matches(op_type, names, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{label} has no operator {op_type} (newest opset known: {versions[domain]}){hint}"


def _look_up(op_type: str, domain: str, opset: int) -> Schema | None:
    if domain == DIALECT:
        return _DIALECT.get(op_type)
    import onnx

    try:
        s = onnx.defs.get_schema(op_type, opset, domain)
    except onnx.defs.SchemaError:
        return None
    key = (domain, op_type, s.since_version)
    known = _CACHE.get(key)
    if known is not None:
        return known
    made = _CACHE[key] = schema_of_onnx(s)
    return made


def schema_of_onnx(schema: Any) -> Schema:
    """The schema that an `onnx.defs.OpSchema` stands for."""
    s = schema
    attributes = {
        n: AttributeSchema(n, ATTRIBUTE_KINDS[cast(Any, a.type).value], a.required) for n, a in s.attributes.items()
    }
    return Schema(
        s.domain, s.name, s.since_version, s.min_input, s.max_input, s.min_output, s.max_output,
        MappingProxyType(attributes), s.deprecated, None, s,
    )  # fmt: skip


def _own(
    op_type: str,
    inputs: tuple[int, int],
    outputs: tuple[int, int],
    attributes: Iterable[AttributeSchema],
    infer: InferTypes,
) -> Schema:
    return register_schema(
        Schema(
            DIALECT,
            op_type,
            DIALECT_VERSION,
            *inputs,
            *outputs,
            MappingProxyType({a.name: a for a in attributes}),
            infer=infer,
        )
    )


def _launch_types(node: Node) -> OutputTypes:
    return tuple(r.type for r in node.attributes["function"].returns)  # type: ignore[union-attr]


def _late_types(node: Node) -> OutputTypes:
    return tuple(v.type for v in node.attributes["body"].outputs)  # type: ignore[union-attr]


def _same_types(node: Node) -> OutputTypes:
    return tuple(None if v is None else v.type for v in node.inputs)


_own(
    "Launch", (0, MANY), (1, MANY),
    [AttributeSchema("engine", "string", True), AttributeSchema("function", "function", True)], _launch_types,
)  # fmt: skip
_own("Late", (0, MANY), (0, MANY), [AttributeSchema("body", "graph", True)], _late_types)
for _name in ("EngineInputConvert", "EngineOutputConvert"):
    _own(
        _name, (1, 1), (1, 1),
        [AttributeSchema("source", "string", True), AttributeSchema("target", "string", True)], _same_types,
    )  # fmt: skip


_own(
    "Boxing", (1, 1), (1, 1),
    [
        AttributeSchema("target", "string", True),
        *(AttributeSchema(n, "string", False) for n in ("mesh", "source", "kind")),
        AttributeSchema("bytes", "int", False),
    ],
    _same_types,
)  # fmt: skip


def _tensor(node: Node, index: int) -> TensorType:
    v = node.inputs[index]
    return v.type if v is not None and isinstance(v.type, TensorType) else TensorType(None)


def _like(index: int) -> InferTypes:
    def infer(node: Node) -> OutputTypes:
        v = node.inputs[index]
        return (None if v is None else v.type,)

    return infer


def _filter(node: Node) -> OutputTypes:
    """ConvFilterGrad: [channels of dy, channels of x / group, *kernel_shape]."""
    x, dy = _tensor(node, 0), _tensor(node, 1)
    kernel = tuple(node.attributes["kernel_shape"])  # type: ignore[arg-type]
    group = node.attributes.get("group", 1)
    channels: Dim = None
    if x.shape is not None and isinstance(x.shape[1], int):
        assert isinstance(group, int)
        channels = x.shape[1] // group
    if x.shape is not None and len(x.shape) != len(kernel) + 2:
        raise ShapeError(f"ConvFilterGrad {node.name!r}: kernel_shape {kernel} for an input of rank {len(x.shape)}")
    return (TensorType(x.dtype, (dy.shape[1] if dy.shape is not None else None, channels, *kernel)),)


def _same(node: Node) -> OutputTypes:
    """Barrier: each output is the input of its number."""
    return tuple(None if v is None else v.type for v in node.inputs[: len(node.outputs)])


def _input_shape(node: Node) -> OutputTypes:
    """AveragePoolGrad: the channels of dy, over `size`."""
    dy = _tensor(node, 0)
    lead = (None, None) if dy.shape is None else dy.shape[:2]
    return (TensorType(dy.dtype, (*lead, *node.attributes["size"])),)  # type: ignore[misc]


def _batch_norm(node: Node) -> OutputTypes:
    """BatchNormGrad: gradients by x, by the scale, and by the bias, which is of the scale's type."""
    return _tensor(node, 1), _tensor(node, 2), _tensor(node, 2)


def _uniform(node: Node) -> OutputTypes:
    """CounterUniform: `shape` numbers of float32."""
    return (TensorType(np.dtype(np.float32), tuple(node.attributes["shape"])),)  # type: ignore[arg-type]


_WINDOW: Final[dict[str, AttributeKind]] = {
    "kernel_shape": "ints", "strides": "ints", "dilations": "ints", "pads": "ints", "auto_pad": "string",
}  # fmt: skip
_POOL: Final[dict[str, AttributeKind]] = {**_WINDOW, "ceil_mode": "int"}


def _gradient(
    name: str, inputs: int, infer: InferTypes, required: tuple[str, ...] = (), **attributes: AttributeKind
) -> None:
    table = {k: AttributeSchema(k, kind, k in required) for k, kind in attributes.items()}
    register_schema(
        Schema(
            DIALECT, name, DIALECT_VERSION, inputs, inputs, 1, 1, MappingProxyType(table),
            infer=infer,
        )
    )  # fmt: skip


_gradient("StopGradient", 1, _like(0))
_gradient("Assign", 2, _like(0))
register_schema(Schema(DIALECT, "Barrier", DIALECT_VERSION, 1, MANY, 1, MANY, infer=_same))
_gradient("Cofactors", 1, _like(0))
_gradient("ConvFilterGrad", 2, _filter, ("kernel_shape",), **_WINDOW, group="int")
_gradient("MaxPoolGrad", 3, _like(1), ("kernel_shape",), **_POOL)
_gradient("AveragePoolGrad", 1, _input_shape, ("kernel_shape", "size"), **_POOL, count_include_pad="int", size="ints")
register_schema(
    Schema(
        DIALECT, "BatchNormGrad", DIALECT_VERSION, 3, 3, 1, 3,
        MappingProxyType({"epsilon": AttributeSchema("epsilon", "float", False)}), infer=_batch_norm,
    )
)  # fmt: skip
_gradient("CounterUniform", 1, _uniform, ("shape", "stream"), shape="ints", stream="int")
_gradient("WriteSlice", 3, _like(0), ("axis",), axis="int")


@lru_cache(maxsize=1)
def _element_dtypes() -> dict[str, np.dtype]:
    from onnx import TensorProto

    return {name.lower(): ONNX_TO_DTYPE[n] for name, n in TensorProto.DataType.items() if n in ONNX_TO_DTYPE}


def schema_dtype(text: str) -> np.dtype | None:
    """The element dtype of 'tensor(float)', None for text that is no dense tensor."""
    if text.startswith("tensor(") and text.endswith(")"):
        return _element_dtypes().get(text[7:-1])
    return None


def schema_type(text: str) -> ValueType | None:
    """The type, without a shape, that a schema's text stands for; None where the IR has none."""
    for start, kind in (("seq(", SequenceType), ("optional(", OptionalType)):
        if text.startswith(start):
            return kind(schema_type(text[len(start) : -1]))
    dtype = schema_dtype(text)
    return None if dtype is None else TensorType(dtype)


def schema_dtypes(texts: Iterable[str]) -> frozenset[np.dtype]:
    """The element dtypes of the dense tensors among the texts."""
    return frozenset(d for t in texts if (d := schema_dtype(t)) is not None)

"""`xrt.custom_op`: an operator that a program defines for itself, by a function in the place of a package.

It becomes an operator set of the domain, as a package's would be (`ir/operator_set.py`), which all registries ask:
models that have it are read and typed, the host and engines run it, and it has gradients.
"""

from __future__ import annotations

import inspect
import re
import threading
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, get_args, get_origin

import numpy as np

from xrt_core.errors import ExecutionError, RegistrationError, ShapeError, nearest
from xrt_core.frontends.graph import trace
from xrt_core.frontends.onnx_functions import inlined
from xrt_core.frontends.operators import attribute_value
from xrt_core.frontends.source_location import trace_error
from xrt_core.frontends.tensor import Tensor, constant, value_of
from xrt_core.frontends.tracing import current_tracer
from xrt_core.ir import inference
from xrt_core.ir.graph import Graph, Node
from xrt_core.ir.op_traits import Traits
from xrt_core.ir.operator_set import Operator, OperatorSet, add_domain, operator_versions, remove_domain, why_not
from xrt_core.ir.schema import (
    ATTRIBUTE_KINDS,
    MANY,
    AttributeKind,
    AttributeSchema,
    OutputTypes,
    Schema,
)
from xrt_core.ir.types import TensorType, ValueType
from xrt_core.plugins import hookimpl

if TYPE_CHECKING:
    from onnx import FunctionProto

_NAME: Final = re.compile(r"([\w.\-]+)::([A-Za-z_]\w*)")
_KINDS: Final[Mapping[Any, AttributeKind]] = {
    float: "float", int: "int", bool: "int", str: "string", np.ndarray: "tensor",
}  # fmt: skip
_NUMPY: Final = "its kernel is a Python function on NumPy arrays"


@dataclass(frozen=True, slots=True)
class _Attribute:
    """A keyword of the function. kind: of the ONNX attribute. default: what the function gets where a node has none."""

    kind: AttributeKind
    default: Any = inspect.Parameter.empty
    is_flag: bool = False

    def given(self, value: Any) -> Any:
        """A node's value as the function takes it."""
        if value is None:
            return self.default
        return bool(value) if self.is_flag else value


@dataclass(frozen=True, slots=True)
class _Form:
    """What the signature of a function says of its operator: counts of inputs, and its attributes."""

    minimum: int
    maximum: int
    attributes: Mapping[str, _Attribute]

    def arguments(self, node: Node) -> dict[str, Any]:
        """The function's keywords for a node."""
        return {name: a.given(node.attributes.get(name)) for name, a in self.attributes.items()}


class CustomOp:
    """An operator that `custom_op` defined. Called within a traced graph it adds a node and returns its outputs.

    operator: the `Operator`, for an operator set. schema: its `Schema`.
    """

    def __init__(self, operator: Operator, schema: Schema, form: _Form, outputs: int, doc: str | None) -> None:
        self.operator = operator
        self.schema = schema
        self.__doc__ = doc
        self._form = form
        self._outputs = outputs

    def __call__(self, *inputs: Any, name: str = "", **attributes: Any) -> Any:
        """Add the node. inputs: traced tensors, arrays, numbers, or None for one that is left out.

        Raises TraceError outside a traced graph, and for inputs and attributes that the operator does not have.
        """
        operator = self.schema.operator
        tracer = current_tracer(operator)
        schema = tracer.schema(self.schema.op_type, self.schema.domain)
        if not schema.min_inputs <= len(inputs) <= schema.max_inputs:
            raise trace_error(
                f"{operator} takes {schema.min_inputs} to {schema.max_inputs} inputs, {len(inputs)} are given"
            )
        unknown = sorted(attributes.keys() - self._form.attributes.keys())
        if unknown:
            known = ", ".join(self._form.attributes) or "none"
            hint = nearest(unknown[0], self._form.attributes)
            raise trace_error(f"{operator} has no attribute {unknown[0]!r}; it has {known}{hint}")
        found = {
            key: attribute_value(self._form.attributes[key].kind, value, f"{operator}: {key}")
            for key, value in attributes.items()
            if value is not None
        }
        for key in self.schema.required_attributes:
            if key not in found:
                raise trace_error(f"{operator}: the attribute {key!r} is missing")
        values = [None if x is None else value_of(x if isinstance(x, Tensor) else constant(x)) for x in inputs]
        while values and values[-1] is None:
            values.pop()
        label = tracer.fresh(tracer.prefix + (name or schema.op_type))
        made = tracer.emit(schema, values, found, self._outputs, name=label)
        tensors = [Tensor(v, tracer.scope) for v in made]
        return tensors[0] if len(tensors) == 1 else tuple(tensors)

    def remove(self) -> None:
        """Take the operator out of the process; modules that were made with it go on."""
        _registered.remove(self.schema)

    def __repr__(self) -> str:
        return f"<operator {self.schema.domain}::{self.schema.op_type}, version {self.schema.since_version}>"


def custom_op(
    name: str,
    *,
    version: int = 1,
    outputs: int = 1,
    types: Callable[..., Any] | None = None,
    gradient: Callable[[Any], Any] | None = None,
    static: Sequence[int] = (),
    traits: Traits | None = None,
    engine_kernels: Sequence[Any] = (),
    register: bool = True,
) -> Callable[[Callable[..., Any] | FunctionProto], CustomOp]:
    """Define an operator of a domain of one's own by the decorated function.

        @xrt.custom_op("acme::Swish")
        def swish(x, *, beta: float = 1.0):
            return x * xrt.ops.Sigmoid(x * beta)

    The positional parameters are the inputs (default None: may be left out; `*xs`: any number), the keyword-only ones
    the attributes, whose kinds follow from annotations or defaults: float, int, bool, str, np.ndarray, and lists.

    Without `types` the function is a *lowering*: written with traced tensors and `xrt.ops` it says which ONNX operators
    the operator stands for, so every engine, the gradients and quantisation have it. An `onnx.FunctionProto` in the
    place of the function (`xrt.custom_op(name)(proto)`) is the same. With `types` the function is a *kernel*: it
    computes with NumPy arrays, on the host; engines leave the node to the host.

    :param name: "domain::Operator"; the domain is the one that models import, and none of ONNX's.
    :param version: the version of the domain with which this form came. A model's node has the newest form up to the
        version that the model imports.
    :param outputs: how many results the function returns, as a tuple if more than one.
    :param types: of a kernel: from the inputs' `TensorType`s (None for one that is left out) and the attributes to the
        type of the output, or a tuple of them.
    :param gradient: the rule, as for `xrt_core.training.registry.gradient`; without it gradients go through the
        lowering, and a kernel has none.
    :param static: indices of inputs whose values the function must know: it gets them as NumPy arrays.
    :param traits: what is known of the operator (`xrt_core.ir.op_traits.Traits`), such as that it draws random numbers.
    :param engine_kernels: `xrt_core.engine.OpKernel`s of engines that compile node by node.

    :param register: whether the operator is known in this process from now on. False in a package, whose hook
        `xrt_operators` gives the `operator` of the result (docs/operators.md).

    A definition of the same name and version takes the place of the one before.

    Raises RegistrationError for a name, signature or argument that does not fit.
    """
    matched = _NAME.fullmatch(name) if isinstance(name, str) else None
    if matched is None:
        raise RegistrationError(f"custom_op({name!r}): expected a name such as 'acme::MyOp', of domain and operator")
    if not isinstance(version, int) or version < 1 or not isinstance(outputs, int) or outputs < 1:
        raise RegistrationError(f"custom_op({name!r}): version={version!r}, outputs={outputs!r} must be 1 or more")
    more = {
        "static": tuple(static), "gradient": gradient, "traits": traits, "engine_kernels": tuple(engine_kernels),
    }  # fmt: skip

    def define(function: Callable[..., Any] | FunctionProto) -> CustomOp:
        made = _made(matched[1], matched[2], version, outputs, function, types, more)
        if register:
            _registered.define(made.operator)
        return made

    return define


def _made(
    domain: str,
    op_type: str,
    version: int,
    outputs: int,
    function: Callable[..., Any] | FunctionProto,
    types: Callable[..., Any] | None,
    more: Mapping[str, Any],
) -> CustomOp:
    """An operator by its function. more: further fields of its `Operator`. Raises RegistrationError."""
    from onnx import FunctionProto

    name = f"{domain}::{op_type}"
    if callable(function):
        form, doc = _form(name, function), inspect.getdoc(function)
        lowering: Callable[[Node], Graph | None] = _traced(function, form, more["static"])
    elif isinstance(function, FunctionProto) and types is None:
        form, doc = _form_of_proto(name, function), function.doc_string
        lowering = _of_proto(function)
    else:
        why = "is a lowering and has its own types" if isinstance(function, FunctionProto) else "is no function"
        raise RegistrationError(f"custom_op({name!r}): {function!r} {why}, and no onnx.FunctionProto without types")
    schema = Schema(
        domain,
        op_type,
        version,
        form.minimum,
        form.maximum,
        1,
        outputs,
        {k: AttributeSchema(k, a.kind, a.default is inspect.Parameter.empty) for k, a in form.attributes.items()},
        infer=None if types is None else _by_types(types, form),
    )
    if types is None:
        operator = Operator(schema, lowering=lowering, **more)
    else:
        assert callable(function)
        operator = Operator(schema, _kernel(function, form), dynamic=_NUMPY, **more)
    return CustomOp(operator, schema, form, outputs, doc)


# --- the process's own operators ---


class _OfDomain:
    """The operators of one domain that the program defined: a plugin like any other, of the domain's name."""

    def __init__(self, domain: str, operators: Mapping[tuple[str, int], Operator]) -> None:
        self.domain = domain
        self.operators = operators

    @hookimpl
    def xrt_operators(self) -> list[OperatorSet]:
        """Give them as one set."""
        newest = max(version for _, version in self.operators)
        return [OperatorSet(self.domain, newest, tuple(self.operators.values()))]


class _Registered:
    """What `custom_op` defined in this process, by domain."""

    def __init__(self) -> None:
        self._domains: dict[str, _OfDomain] = {}
        self._lock = threading.Lock()

    def define(self, operator: Operator) -> None:
        """Add an operator, in the place of one of the same name and version. Raises RegistrationError."""
        schema = operator.schema
        domain, key = schema.domain, (schema.op_type, schema.since_version)
        why = why_not(OperatorSet(domain, schema.since_version, [operator]))
        with self._lock:
            own = self._own(domain)
            if not why and key not in own and key[1] in operator_versions(domain, key[0]):
                why = f"a package has version {key[1]} of it; define another version, or in another domain"
            if why:
                raise RegistrationError(f"operator {domain}::{key[0]}: {why}")
            self._replace(domain, {**own, key: operator})

    def remove(self, schema: Schema) -> None:
        """Take an operator out, if it is there."""
        with self._lock:
            own = self._own(schema.domain)
            own.pop((schema.op_type, schema.since_version), None)
            self._replace(schema.domain, own)

    def _own(self, domain: str) -> dict[tuple[str, int], Operator]:
        found = self._domains.get(domain)
        return {} if found is None else dict(found.operators)

    def _replace(self, domain: str, operators: Mapping[tuple[str, int], Operator]) -> None:
        before = self._domains.pop(domain, None)
        if before is not None:
            remove_domain(before)
        if operators:
            made = self._domains[domain] = _OfDomain(domain, operators)
            add_domain(made, domain, "this program")
        inference.forget()  # types that the definition before gave


_registered: Final = _Registered()


# --- what a signature says ---


def _form(name: str, function: Callable[..., Any]) -> _Form:
    try:
        parameters = inspect.signature(function).parameters.values()
        hints = typing.get_type_hints(function)
    except (TypeError, ValueError, NameError) as e:
        raise RegistrationError(f"custom_op({name!r}): the signature of {function!r} cannot be read: {e}") from e
    minimum = maximum = 0
    attributes: dict[str, _Attribute] = {}
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY:
            attributes[p.name] = _attribute(name, p, hints.get(p.name, p.empty))
        elif p.kind is p.VAR_POSITIONAL:
            maximum = MANY
        elif p.kind is p.VAR_KEYWORD:
            raise RegistrationError(f"custom_op({name!r}): **{p.name} names no attribute; write them out")
        elif p.default not in (p.empty, None):
            raise RegistrationError(
                f"custom_op({name!r}): input {p.name!r} has the default {p.default!r}; only None is one, and an "
                "attribute stands after a *"
            )
        else:
            maximum += 1
            minimum = maximum if p.default is p.empty else minimum
    return _Form(minimum, maximum, attributes)


def _attribute(name: str, p: inspect.Parameter, hint: Any) -> _Attribute:
    hint = next((h for h in get_args(hint) if h is not type(None)), hint) if type(None) in get_args(hint) else hint
    if hint is p.empty and p.default not in (p.empty, None):
        hint = type(p.default)
        if hint in (list, tuple) and p.default:
            hint = list[type(p.default[0])]  # type: ignore[misc]
    kind = _KINDS.get(hint)
    if kind is None and get_origin(hint) in (list, tuple, Sequence):
        single = _KINDS.get(get_args(hint)[0])
        kind = None if single is None else typing.cast("AttributeKind", f"{single}s")
    if kind is None:
        raise RegistrationError(
            f"custom_op({name!r}): of what kind is the attribute {p.name!r}? Annotate it as float, int, bool, str, "
            "np.ndarray or a list of one of them"
        )
    return _Attribute(kind, p.default, hint is bool)


def _form_of_proto(name: str, function: FunctionProto) -> _Form:
    from onnx.helper import get_attribute_value

    kinds = {a.ref_attr_name: a.type for n in function.node for a in n.attribute if a.ref_attr_name}
    attributes: dict[str, _Attribute] = {}
    for required in function.attribute:
        kind = ATTRIBUTE_KINDS.get(kinds.get(required, 0))
        if kind is None:
            raise RegistrationError(f"custom_op({name!r}): no node of the function uses its attribute {required!r}")
        attributes[required] = _Attribute(kind)
    for a in function.attribute_proto:
        attributes[a.name] = _Attribute(ATTRIBUTE_KINDS[a.type], get_attribute_value(a))
    return _Form(0, len(function.input), attributes)


# --- lowerings and kernels ---


def _traced(function: Callable[..., Any], form: _Form, static: Sequence[int]) -> Callable[[Node], Graph]:
    """A lowering that traces the function, with the values of the inputs in `static` where they are known."""

    def lowering(node: Node) -> Graph:
        places = [i for i, v in enumerate(node.inputs) if v is not None]
        keywords = form.arguments(node)

        def body(*given: Any) -> Any:
            inputs: list[Any] = [None] * max(len(node.inputs), form.maximum if form.maximum < MANY else 0)
            for i, x in zip(places, given, strict=True):
                data = node.inputs[i].data if i in static else None  # type: ignore[union-attr]
                inputs[i] = x if data is None else data
            results = function(*inputs, **keywords)
            results = results if isinstance(results, tuple) else (results,)
            wanted = tuple(r for r, v in zip(results, node.outputs, strict=False) if v is not None)
            return wanted[0] if len(wanted) == 1 else wanted

        return trace(body, *(_type(node, i) for i in places))

    return lowering


def _type(node: Node, index: int) -> ValueType:
    v = node.inputs[index]
    if v is None or v.type is None:
        raise ShapeError(f"node {node.name!r} ({node.operator}): the type of input {index} is not known")
    return v.type


def _of_proto(function: FunctionProto) -> Callable[[Node], Graph | None]:
    def lowering(node: Node) -> Graph | None:
        copy = type(function)()
        copy.CopyFrom(function)
        return inlined(node, copy)

    return lowering


def _by_types(types: Callable[..., Any], form: _Form) -> Callable[[Node], OutputTypes]:
    def infer(node: Node) -> OutputTypes:
        if any(v is not None and not isinstance(v.type, TensorType) for v in node.inputs):
            return (None,) * len(node.outputs)
        given = [None if v is None else v.type for v in node.inputs]
        given += [None] * ((form.maximum if form.maximum < MANY else 0) - len(given))
        try:
            found = types(*given, **form.arguments(node))
        except Exception as e:
            raise ShapeError(f"node {node.name!r} ({node.operator}): its types: {e}") from e
        found = found if isinstance(found, tuple) else (found,)
        if len(found) < len(node.outputs) or not all(isinstance(t, TensorType | None) for t in found):
            raise ShapeError(
                f"node {node.name!r} ({node.operator}): its types gave {found!r}; a TensorType for each of its "
                f"{len(node.outputs)} outputs is needed"
            )
        return tuple(found[: len(node.outputs)])

    return infer


def _kernel(function: Callable[..., Any], form: _Form) -> Callable[..., Any]:
    def kernel(ctx: Any, *inputs: Any) -> Any:
        node = ctx.node
        given = [*inputs, *[None] * ((form.maximum if form.maximum < MANY else 0) - len(inputs))]
        results = function(*given, **form.arguments(node))
        results = results if isinstance(results, tuple) else (results,)
        if len(results) < len(node.outputs):
            raise ExecutionError(f"{node.operator} gave {len(results)} results, {len(node.outputs)} are declared")
        return tuple(_checked(node, i, r) for i, r in enumerate(results[: len(node.outputs)]))

    return kernel


def _checked(node: Node, index: int, result: Any) -> Any:
    """A result as an array of the type that the node's output has."""
    out = node.outputs[index]
    array = np.asarray(result) if isinstance(result, np.generic | int | float | bool | list) else result
    if out is not None and isinstance(out.type, TensorType):
        dtype, shape = out.type.dtype, out.type.shape
        fits = shape is None or len(shape) == array.ndim
        fits = fits and all(not isinstance(d, int) or d == n for d, n in zip(shape or (), array.shape, strict=False))
        if not fits or dtype not in (None, array.dtype):
            raise ExecutionError(
                f"node {node.name!r}: result {index} of {node.operator} is {array.dtype}{list(array.shape)}, its "
                f"types say {out.type}"
            )
    return array

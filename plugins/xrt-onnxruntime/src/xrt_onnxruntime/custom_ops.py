"""Operators of an ONNX Runtime custom-operator library, such as onnxruntime-extensions: their nodes run there.

The library says nothing of its operators until a model has one, so the domain is open: it is asked about each one by a
model of that node. Its kernel runs a session of the one node, on the host's side, between the clusters of engines.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from xrt_core import hookimpl
from xrt_core.errors import RegistrationError
from xrt_core.ir.graph import Node
from xrt_core.ir.onnx_proto import attribute_to_proto, dtype_to_onnx
from xrt_core.ir.operator_set import Operator, OperatorSet, add_domain, remove_domain
from xrt_core.ir.schema import OutputTypes, open_schema, schema_type
from xrt_core.ir.types import TensorType
from xrt_onnxruntime import _toolkit

if TYPE_CHECKING:
    from onnx import GraphProto

_SESSIONS: Final = 512
_FIRST: Final = 1
"""The version of a domain that its operators are of, where nothing else is said."""
_STATIC: Final = "it runs in a custom-operator library of ONNX Runtime"


class CustomOps:
    """The operators of one domain in one library; a plugin of the process. `remove()` takes it out again."""

    def __init__(self, library: str, domain: str, version: int) -> None:
        self.library = library
        self.domain = domain
        self.version = version

    @property
    def operators(self) -> OperatorSet:
        """The open set of the domain."""
        return OperatorSet(self.domain, self.version, (), self.operator)

    @hookimpl
    def xrt_operators(self) -> list[OperatorSet]:
        """The same."""
        return [self.operators]

    def operator(self, op_type: str) -> Operator | None:
        """An operator of the library; None where it has none of that name."""
        if not _has(self.library, self.domain, self.version, op_type):
            return None

        def infer(node: Node) -> OutputTypes:
            return self._types(node)

        def kernel(ctx: Any, *inputs: Any) -> tuple[Any, ...]:
            given = [x for x in inputs if x is not None]
            session = self._session(ctx.node, tuple((x.dtype, x.ndim) for x in given))
            feeds = {name: np.ascontiguousarray(x) for name, x in zip(session.inputs, given, strict=True)}
            results = iter(session.run(feeds))
            return tuple(None if v is None else next(results) for v in ctx.node.outputs)

        schema = open_schema(op_type, self.domain, self.version, infer)
        return Operator(schema, kernel, dynamic=_STATIC)

    def remove(self) -> None:
        """Take the domain out of the process."""
        remove_domain(self)

    def _types(self, node: Node) -> OutputTypes:
        given = [v.type for v in node.inputs if v is not None]
        unknown: OutputTypes = (None,) * len(node.outputs)
        if not all(isinstance(t, TensorType) and t.dtype is not None and t.shape is not None for t in given):
            return unknown
        tensors = [t for t in given if isinstance(t, TensorType) and t.shape is not None]
        try:
            found = iter(self._session(node, tuple((t.dtype, len(t.shape or ())) for t in tensors)).output_types)
        except Exception:  # the library has no such operator, or not for these types: running it says so
            return unknown
        return tuple(None if v is None else schema_type(next(found)) for v in node.outputs)

    def _session(self, node: Node, given: tuple[Any, ...]) -> _toolkit.NodeSession:
        """The session of a node for inputs of these dtypes and ranks."""
        from onnx import helper

        proto = helper.make_node(
            node.op_type,
            [f"i{k}" if v is not None else "" for k, v in enumerate(node.inputs)],
            [f"o{k}" if v is not None else "" for k, v in enumerate(node.outputs)],
            domain=self.domain,
        )
        proto.attribute.extend(attribute_to_proto(k, a) for k, a in node.attributes.items())
        types = tuple((dtype_to_onnx(dtype), rank) for dtype, rank in given)
        return _session(self.library, self.version, proto.SerializeToString(), types)


def register_custom_ops(library: str | os.PathLike[str], domain: str, version: int = 1) -> CustomOps:
    """Make the operators of a custom-operator library known in this process: models that have them run.

    library: the file that `SessionOptions.register_custom_ops_library` takes, such as
    `onnxruntime_extensions.get_library_path()`. domain: of its operators, such as "ai.onnx.contrib". version: the
    newest of the domain. The option `custom_op_libraries` of a module does the same for the domains that its model has.

    The nodes run on the host's side, by sessions of one node, with strings where the library has them; engines take
    what lies between. Raises RegistrationError for a library that cannot be loaded, and a domain that is taken.
    """
    path = os.fspath(library)
    _check(path)
    made = CustomOps(path, domain, version)
    add_domain(made, domain, f"the custom-operator library {path}")
    return made


def open_operators(library: str, operators: Collection[tuple[str, str]]) -> list[OperatorSet]:
    """The open sets of those domains of `operators` (domain and name) in which a library has one of them.

    Raises RegistrationError for a library that cannot be loaded.
    """
    _check(library)
    domains = {domain for domain, name in operators if _has(library, domain, _FIRST, name)}
    return [CustomOps(library, domain, _FIRST).operators for domain in sorted(domains)]


def _check(library: str) -> None:
    reason = _toolkit.why_no_library(library)
    if reason:
        raise RegistrationError(f"custom operators of {library!r}: {reason}")


@lru_cache(_SESSIONS)
def _has(library: str, domain: str, version: int, op_type: str) -> bool:
    from onnx import TensorProto, helper

    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in "xy"]
    graph = helper.make_graph([helper.make_node(op_type, ["x"], ["y"], domain=domain)], "has", ports[:1], ports[1:])
    return _toolkit.has_operator(library, _model(graph, domain, version))


@lru_cache(_SESSIONS)
def _session(library: str, version: int, node: bytes, types: tuple[tuple[int, int], ...]) -> _toolkit.NodeSession:
    from onnx import NodeProto, ValueInfoProto, helper

    proto = NodeProto.FromString(node)
    names = [n for n in proto.input if n]
    inputs = [
        helper.make_tensor_value_info(n, dtype, [None] * rank) for n, (dtype, rank) in zip(names, types, strict=True)
    ]
    graph = helper.make_graph([proto], proto.op_type, inputs, [ValueInfoProto(name=n) for n in proto.output if n])
    return _toolkit.NodeSession(_model(graph, proto.domain, version), library)


def _model(graph: GraphProto, domain: str, version: int) -> bytes:
    from onnx import helper

    opsets = [helper.make_opsetid("", _toolkit.newest_opset()), helper.make_opsetid(domain, version)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()

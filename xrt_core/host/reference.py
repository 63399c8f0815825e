"""Host kernels for the remaining operators (those without a portable kernel), through `onnx.reference` on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from xrt_core.errors import ExecutionError
from xrt_core.ir.graph import Node


def reference_kernel(node: Node) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return a function from the node's inputs to its outputs, computed by `onnx.reference` at the node's version.

    Raises ExecutionError if the onnx package has no implementation of the operator.
    """
    import onnx
    from onnx.reference import ReferenceEvaluator

    from xrt_core.ir.onnx_proto import attribute_to_proto, type_to_proto

    names_in = ["" if v is None else f"i{k}" for k, v in enumerate(node.inputs)]
    names_out = ["" if v is None else f"o{k}" for k, v in enumerate(node.outputs)]
    proto = onnx.helper.make_node(node.op_type, names_in, names_out, domain=node.domain)
    proto.attribute.extend(attribute_to_proto(k, a, kind=_kind(node, k)) for k, a in node.attributes.items())
    inputs = [
        onnx.ValueInfoProto(name=n, type=type_to_proto(v.type))
        for n, v in zip(names_in, node.inputs, strict=True)
        if v is not None
    ]
    outputs = [onnx.ValueInfoProto(name=n) for n in names_out if n]
    graph = onnx.helper.make_graph([proto], "node", inputs, outputs)
    opsets = [onnx.helper.make_opsetid(node.domain, node.version)]
    if node.domain:
        opsets.append(onnx.helper.make_opsetid("", onnx.defs.onnx_opset_version()))
    try:
        evaluator = ReferenceEvaluator(
            onnx.helper.make_model(graph, opset_imports=opsets), new_ops=_corrected(node.op_type)
        )
    except Exception as e:
        raise ExecutionError(
            f"node {node.name!r}: the host has no kernel for {node.operator} (version {node.version}): {e}"
        ) from e
    given = [n for n in names_in if n]

    def run(arrays: Sequence[Any]) -> tuple[Any, ...]:
        present = [a for a, n in zip(arrays, names_in, strict=True) if n]
        results = iter(evaluator.run(None, dict(zip(given, present, strict=True))))
        return tuple(_tidy(next(results)) if n else None for n in names_out)

    return run


def _corrected(op_type: str) -> list[Any] | None:
    """Implementations in the place of those of onnx that do something else than the standard says."""
    if op_type != "TfIdfVectorizer":
        return None
    from onnx.reference.ops import op_tfidf_vectorizer

    base: Any = op_tfidf_vectorizer.TfIdfVectorizer

    class TfIdfVectorizer(base):  # type: ignore[misc]
        """Weights go by entry of the pool, not by column of the result, and counts add up where entries share one."""

        op_domain = ""

        def __init__(self, onnx_node: Any, run_params: Any) -> None:
            super().__init__(onnx_node, run_params)
            self._columns = np.array(self.ngram_indexes, np.int64)
            self.ngram_indexes_ = range(len(self._columns))  # what the base class counts in
            self.output_size_ = len(self._columns)

        def output_result(self, B: int, frequencies: Any) -> np.ndarray:
            counts = np.asarray(frequencies, np.float32).reshape(max(B, 1), -1)
            if self.mode == "IDF":
                counts = np.minimum(counts, 1)
            if self.mode != "TF" and self.weights:
                counts = counts * np.array(self.weights, np.float32)
            out = np.zeros((len(counts), int(self._columns.max()) + 1), np.float32)
            np.add.at(out.T, self._columns, counts.T)
            return out if B else out[0]

    return [TfIdfVectorizer]


def _kind(node: Node, attribute: str) -> int:
    import onnx

    try:
        schema = onnx.defs.get_schema(node.op_type, node.version, node.domain)
    except onnx.defs.SchemaError:
        return 0
    found = schema.attributes.get(attribute)
    return 0 if found is None else int(found.type.value)  # type: ignore[attr-defined]


def _tidy(result: Any) -> Any:
    """Convert NumPy scalars to arrays, and strings to object arrays, as XRT represents them."""
    if isinstance(result, list):
        return [_tidy(r) for r in result]
    if isinstance(result, np.generic):
        result = np.asarray(result)
    if isinstance(result, np.ndarray) and result.dtype.kind in "US":
        return result.astype(object)
    return result

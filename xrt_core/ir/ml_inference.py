"""Types and shapes of the outputs of ai.onnx.ml operators, which the onnx package leaves open for most.

Source: https://onnx.ai/onnx/operators/index_ai_onnx_ml.html; where the text names no shape, the
one that libraries agree on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from xrt_core.ir.graph import Node
from xrt_core.ir.ml_limits import class_count, linear_classes, svm_vectors
from xrt_core.ir.types import STRING, Dim, MapType, SequenceType, TensorType, ValueType

Types = tuple[ValueType | None, ...]

_FLOAT: Final = np.dtype(np.float32)
_INT: Final = np.dtype(np.int64)


def ml_types(node: Node) -> Types | None:
    """The types of the outputs of a node of ai.onnx.ml that keeps to its limits; None for another operator."""
    rule = _RULES.get(node.op_type)
    return None if rule is None else rule(node)


def _first(node: Node) -> TensorType:
    found = node.inputs[0].type if node.inputs and node.inputs[0] is not None else None
    return found if isinstance(found, TensorType) else TensorType(None)


def _rows(node: Node) -> Dim:
    """How many rows the first input has; a vector is one."""
    shape = _first(node).shape
    if shape is None or not shape:
        return None
    return 1 if len(shape) == 1 else shape[0]


def _same(dtype: np.dtype | None = None) -> Callable[[Node], Types]:
    def rule(node: Node) -> Types:
        first = _first(node)
        return (TensorType(dtype or first.dtype, first.shape),)

    return rule


def _labels(node: Node) -> np.dtype:
    return STRING if node.attributes.get("classlabels_strings") else _INT


def _classified(node: Node, scores: int) -> Types:
    rows = _rows(node)
    return (TensorType(_labels(node), (rows,)), TensorType(_FLOAT, (rows, scores)))[: len(node.outputs)]


def _tree_classifier(node: Node) -> Types:
    return _classified(node, class_count(node.attributes))


def _svm_classifier(node: Node) -> Types:
    count = class_count(node.attributes)
    if svm_vectors(node.attributes) and not node.attributes.get("prob_a") and count > 2:
        return _classified(node, count * (count - 1) // 2)
    return _classified(node, count)


def _linear_classifier(node: Node) -> Types:
    count = linear_classes(node.attributes)
    return _classified(node, max(count, 2) if class_count(node.attributes) == 2 else count)


def _targets(name: str, dtype: np.dtype | None) -> Callable[[Node], Types]:
    def rule(node: Node) -> Types:
        count: Any = node.attributes.get(name, 1) if name else 1
        return (TensorType(dtype or _first(node).dtype, (_rows(node), count)),)

    return rule


def _vectorizer(node: Node) -> Types:
    sizes: Any = node.attributes.get("inputdimensions")
    widths: list[Any] = []
    for v in node.inputs:
        shape = None if v is None else v.shape
        widths.append(None if shape is None else shape[-1] if len(shape) > 1 else 1)
    widths = list(sizes) if sizes else widths
    known = all(isinstance(w, int) for w in widths)
    shape = _first(node).shape
    rows = None if shape is None or not shape else shape[0]
    return (TensorType(_FLOAT, (rows, sum(widths) if known else None)),)


def _extractor(node: Node) -> Types:
    first, index = _first(node), node.inputs[1]
    where = None if index is None else index.shape
    if first.shape is None or where is None:
        return (TensorType(first.dtype),)
    known = all(isinstance(d, int) for d in where)
    count = int(np.prod(where, dtype=np.int64)) if known else None  # type: ignore[arg-type]
    return (TensorType(first.dtype, (1, count) if len(first.shape) <= 1 else (*first.shape[:-1], count)),)


def _one_hot(node: Node) -> Types:
    cats: Any = node.attributes.get("cats_int64s") or node.attributes.get("cats_strings") or ()
    shape = _first(node).shape
    return (TensorType(_FLOAT, None if shape is None else (*shape, len(cats))),)


def _encoder(node: Node) -> Types:
    first, a = _first(node), node.attributes
    tensor: Any = a.get("values_tensor")
    dtype: np.dtype
    if tensor is not None:
        dtype = np.asarray(tensor).dtype
    elif "classes_strings" in a:
        dtype = _INT if first.dtype == STRING else STRING
    else:
        dtype = STRING if a.get("values_strings") else _INT if a.get("values_int64s") else _FLOAT
    return (TensorType(dtype, first.shape),)


def _mapper(node: Node) -> Types:
    first = _first(node)
    return (TensorType(None if first.dtype is None else _INT if first.dtype == STRING else STRING, first.shape),)


def _zip(node: Node) -> Types:
    key = STRING if node.attributes.get("classlabels_strings") else _INT
    return (SequenceType(MapType(key, TensorType(_FLOAT, ()))),)


def _cast_map(node: Node) -> Types:
    named = node.attributes.get("cast_to", "TO_FLOAT")
    to = _FLOAT if named == "TO_FLOAT" else _INT if named == "TO_INT64" else STRING
    is_sparse = node.attributes.get("map_form", "DENSE") == "SPARSE"
    count: Any = node.attributes.get("max_map", 1) if is_sparse else None
    return (TensorType(to, (1, count)),)


def _dict_vectorizer(node: Node) -> Types:
    t: Any = node.inputs[0].type if node.inputs[0] is not None else None
    value = t.value if isinstance(t, MapType) else None
    words: Any = node.attributes.get("int64_vocabulary") or node.attributes.get("string_vocabulary") or ()
    return (TensorType(value.dtype if isinstance(value, TensorType) else None, (1, len(words))),)


_RULES: Final[Mapping[str, Callable[[Node], Types]]] = MappingProxyType({
    "ArrayFeatureExtractor": _extractor,
    "Binarizer": _same(),
    "CastMap": _cast_map,
    "CategoryMapper": _mapper,
    "DictVectorizer": _dict_vectorizer,
    "FeatureVectorizer": _vectorizer,
    "Imputer": _same(),
    "LabelEncoder": _encoder,
    "LinearClassifier": _linear_classifier,
    "LinearRegressor": _targets("targets", _FLOAT),
    "Normalizer": _same(_FLOAT),
    "OneHotEncoder": _one_hot,
    "SVMClassifier": _svm_classifier,
    "SVMRegressor": _targets("", _FLOAT),
    "Scaler": _same(_FLOAT),
    "TreeEnsemble": _targets("n_targets", None),
    "TreeEnsembleClassifier": _tree_classifier,
    "TreeEnsembleRegressor": _targets("n_targets", _FLOAT),
    "ZipMap": _zip,
})  # fmt: skip

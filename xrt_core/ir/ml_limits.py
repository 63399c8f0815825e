"""Limits of the operators of ai.onnx.ml: what attributes allow, and how they agree with each other and the inputs.

`attribute_limits` asks here for that domain.

Source: https://onnx.ai/onnx/operators/index_ai_onnx_ml.html.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from xrt_core.ir.graph import Attribute, Node
from xrt_core.ir.long_list import LongList
from xrt_core.ir.tree_tables import AGGREGATES, TRANSFORMS, tree_facts

DOMAIN: Final = "ai.onnx.ml"
Attributes = Mapping[str, Attribute]
Check = Callable[[Attributes], str | None]

_WORDS: Final[Mapping[str, Sequence[str]]] = MappingProxyType({
    "post_transform": sorted(TRANSFORMS),
    "aggregate_function": sorted(AGGREGATES),
    "norm": ("L1", "L2", "MAX"),
    "kernel_type": ("LINEAR", "POLY", "RBF", "SIGMOID"),
    "cast_to": ("TO_FLOAT", "TO_INT64", "TO_STRING"),
    "map_form": ("DENSE", "SPARSE"),
})  # fmt: skip
_INTEGERS: Final[Mapping[str, tuple[int, int]]] = MappingProxyType({
    "post_transform": (0, len(TRANSFORMS) - 1),
    "aggregate_function": (0, len(AGGREGATES) - 1),
    "n_targets": (1, 1 << 31),
    "targets": (1, 1 << 31),
    "max_map": (1, 1 << 31),
    "n_supports": (0, 1 << 31),
    "one_class": (0, 1),
    "zeros": (0, 1),
})  # fmt: skip


def ml_attribute_fault(op_type: str, attributes: Attributes) -> str | None:
    """What is wrong with the attributes of a node of ai.onnx.ml, beginning with the attribute's name; None where
    nothing is. Their kinds must be those of the schema."""
    for name, value in attributes.items():
        words, limits = _WORDS.get(name), _INTEGERS.get(name)
        if isinstance(value, int):
            if limits is not None and not limits[0] <= value <= limits[1]:
                return f"{name} = {value}; {op_type} allows {limits[0]} to {limits[1]}"
        elif words is not None and value not in words:
            return f"{name} = {value!r}; {op_type} allows one of {', '.join(words)}"
    check = _CHECKS.get(op_type)
    return None if check is None else check(attributes)


def ml_node_fault(node: Node) -> str | None:
    """What is wrong with a node of ai.onnx.ml: `ml_attribute_fault`, or attributes that do not fit the inputs."""
    fault = ml_attribute_fault(node.op_type, node.attributes)
    if fault is not None or not node.inputs or node.inputs[0] is None:
        return fault
    shape = node.inputs[0].shape
    if node.op_type in _MATRIX and shape is not None and len(shape) not in (1, 2):
        return f"the input X is of rank {len(shape)}; it must be a row or a matrix [rows, features]"
    features = shape[-1] if shape else None
    if isinstance(features, int):
        fits = _FITS.get(node.op_type)
        fault = None if fits is None else fits(node, features)
    if fault is None and node.op_type == "FeatureVectorizer":
        sizes = node.attributes.get("inputdimensions")
        if isinstance(sizes, tuple | LongList) and len(sizes) != len(node.inputs):
            return f"inputdimensions has {len(sizes)} entries; the node has {len(node.inputs)} inputs"
    return fault


def class_count(attributes: Attributes) -> int:
    """How many class labels a classifier has."""
    for name in ("classlabels_strings", "classlabels_int64s", "classlabels_ints"):
        found: Any = attributes.get(name)
        if found:
            return len(found)
    return 0


def svm_vectors(attributes: Attributes) -> int:
    """How many support vectors a classifier has; 0 for a linear one."""
    counts: Any = attributes.get("vectors_per_class") or ()
    return int(sum(counts))


def _size(attributes: Attributes, name: str) -> int:
    found: Any = attributes.get(name)
    return 0 if found is None else len(found) if isinstance(found, LongList) else int(np.size(found))


def _sized(attributes: Attributes, name: str, wanted: int, why: str) -> str | None:
    size = _size(attributes, name)
    return None if size == wanted else f"{name} has {size} entries; {why} needs {wanted}"


def _labels(attributes: Attributes) -> str | None:
    if class_count(attributes):
        return None
    name = "classlabels_int64s" if "nodes_modes" in attributes else "classlabels_ints"
    return f"{name} is empty, and so is classlabels_strings; a classifier needs its labels"


def _ensemble(op_type: str) -> Check:
    def check(attributes: Attributes) -> str | None:
        is_classifier = op_type == "TreeEnsembleClassifier"
        fault = _labels(attributes) if is_classifier else None
        if fault is not None:
            return fault
        try:
            facts = tree_facts(op_type, attributes)
        except ValueError as e:
            return str(e)
        count: Any = class_count(attributes) if is_classifier else attributes.get("n_targets", 1)
        most = max(count, 2) if is_classifier else count  # one label may be that of the second class
        if facts.targets > most:
            name = {"TreeEnsemble": "leaf_targetids", "TreeEnsembleClassifier": "class_ids"}.get(op_type, "target_ids")
            of = "labels" if is_classifier else "targets"
            return f"{name} has {facts.targets - 1}; there are {count} {of}"
        if not facts.targets and is_classifier:
            return "class_ids is empty; no leaf gives a score"
        for name in ("base_values_as_tensor", "base_values"):
            if _size(attributes, name) not in (0, 1, count):
                return f"{name} has {_size(attributes, name)} entries; {count} are needed, or one"
        return None

    return check


def _svm_classifier(attributes: Attributes) -> str | None:
    fault = _labels(attributes)
    if fault is not None:
        return fault
    count, vectors = class_count(attributes), svm_vectors(attributes)
    per_class: Any = attributes.get("vectors_per_class") or ()
    if any(n < 0 for n in per_class):
        return f"vectors_per_class has {min(per_class)}; counts are not negative"
    if not vectors:
        if not _size(attributes, "coefficients") or _size(attributes, "coefficients") % count:
            return (
                f"coefficients has {_size(attributes, 'coefficients')} entries; {count} classes need equally many each"
            )
        return None if _size(attributes, "rho") else "rho is empty; it needs an entry"
    pairs = count * (count - 1) // 2
    if count < 2:
        return f"vectors_per_class is given for {count} class; support vectors separate two at least"
    fault = (
        _sized(attributes, "vectors_per_class", count, f"{count} classes")
        or _sized(attributes, "coefficients", (count - 1) * vectors, f"{vectors} vectors of {count} classes")
        or _sized(attributes, "rho", pairs, f"{count} classes")
    )
    for name in ("prob_a", "prob_b"):
        if _size(attributes, "prob_a") or _size(attributes, "prob_b"):
            fault = fault or _sized(attributes, name, pairs, f"{count} classes")
    return fault or _vectors(attributes, vectors) or _kernel(attributes)


def _svm_regressor(attributes: Attributes) -> str | None:
    vectors: Any = attributes.get("n_supports", 0)
    if not _size(attributes, "rho"):
        return "rho is empty; it needs an entry"
    if not vectors:
        return None if _size(attributes, "coefficients") else "coefficients is empty; it needs one for each feature"
    return (
        _sized(attributes, "coefficients", vectors, f"n_supports = {vectors}")
        or _vectors(attributes, vectors)
        or _kernel(attributes)
    )


def _vectors(attributes: Attributes, vectors: int) -> str | None:
    size = _size(attributes, "support_vectors")
    return None if size and not size % vectors else f"support_vectors has {size} entries for {vectors} vectors"


def _kernel(attributes: Attributes) -> str | None:
    size = _size(attributes, "kernel_params")
    return None if size in (0, 3) else f"kernel_params has {size} entries; gamma, coef0 and degree are needed"


def linear_classes(attributes: Attributes) -> int:
    """How many scores LinearClassifier computes."""
    return _size(attributes, "intercepts") or class_count(attributes) or 1


def _linear_classifier(attributes: Attributes) -> str | None:
    count, labels = linear_classes(attributes), class_count(attributes)
    if labels and labels != count and not (count == 1 and labels == 2):
        return f"intercepts has {count} entries; there are {labels} labels"
    if count > 1 and not labels:
        return _labels(attributes)
    size = _size(attributes, "coefficients")
    return f"coefficients has {size} entries for {count} classes" if not size or size % count else None


def _linear_regressor(attributes: Attributes) -> str | None:
    count: Any = attributes.get("targets", 1)
    size = _size(attributes, "coefficients")
    if not size or size % count:
        return f"coefficients has {size} entries for targets = {count}"
    return None if _size(attributes, "intercepts") == 0 else _sized(attributes, "intercepts", count, "targets")


def _encoder(attributes: Attributes) -> str | None:
    if "classes_strings" in attributes:
        return None
    keys, values = (
        {n: _size(attributes, n) for n in (f"{side}_{t}" for t in ("tensor", "strings", "int64s", "floats"))
         if attributes.get(n) is not None}
        for side in ("keys", "values")
    )  # fmt: skip
    for side, found in (("keys", keys), ("values", values)):
        if len(found) != 1:
            return f"{side}_* is given {len(found)} times ({', '.join(found) or 'none'}); LabelEncoder needs one"
    (key, n), (value, m) = *keys.items(), *values.items()
    return None if n == m else f"{key} has {n} entries, {value} has {m}; each key needs a value"


def _one_of(*names: str) -> Check:
    def check(attributes: Attributes) -> str | None:
        given = [n for n in names if _size(attributes, n)]
        return None if len(given) == 1 else f"{names[0]} or {names[1]} must be given, and not both"

    return check


def _mapper(attributes: Attributes) -> str | None:
    ints, strings = _size(attributes, "cats_int64s"), _size(attributes, "cats_strings")
    return None if ints == strings else f"cats_int64s has {ints} entries, cats_strings has {strings}; they are pairs"


def _vectorizer(attributes: Attributes) -> str | None:
    sizes: Any = attributes.get("inputdimensions") or ()
    return f"inputdimensions has {min(sizes)}; widths are not negative" if any(s < 0 for s in sizes) else None


_CHECKS: Final[Mapping[str, Check]] = MappingProxyType({
    **{op: _ensemble(op) for op in ("TreeEnsemble", "TreeEnsembleClassifier", "TreeEnsembleRegressor")},
    "SVMClassifier": _svm_classifier,
    "SVMRegressor": _svm_regressor,
    "LinearClassifier": _linear_classifier,
    "LinearRegressor": _linear_regressor,
    "LabelEncoder": _encoder,
    "CategoryMapper": _mapper,
    "FeatureVectorizer": _vectorizer,
    "OneHotEncoder": _one_of("cats_int64s", "cats_strings"),
    "ZipMap": _one_of("classlabels_int64s", "classlabels_strings"),
    "DictVectorizer": _one_of("int64_vocabulary", "string_vocabulary"),
    "Imputer": _one_of("imputed_value_floats", "imputed_value_int64s"),
})  # fmt: skip

_MATRIX: Final = frozenset((
    "TreeEnsemble", "TreeEnsembleClassifier", "TreeEnsembleRegressor", "SVMClassifier", "SVMRegressor",
    "LinearClassifier", "LinearRegressor", "Normalizer", "ZipMap",
))  # fmt: skip


# --- agreement with the inputs ---------------------------------------------------------------------------------------


def _tree_features(node: Node, features: int) -> str | None:
    needed = tree_facts(node.op_type, node.attributes).features
    if needed <= features:
        return None
    return f"nodes_featureids has feature {needed - 1}; the input has {features} features"


def _per_feature(*names: str) -> Callable[[Node, int], str | None]:
    def check(node: Node, features: int) -> str | None:
        for name in names:
            size = _size(node.attributes, name)
            if size not in (0, 1, features):
                return f"{name} has {size} entries; the input has {features} features"
        return None

    return check


def _rows_of(name: str, rows: Callable[[Attributes], int]) -> Callable[[Node, int], str | None]:
    def check(node: Node, features: int) -> str | None:
        size, count = _size(node.attributes, name), rows(node.attributes)
        if size == features * count:
            return None
        return f"{name} has {size} entries, {size // max(count, 1)} for each row; the input has {features} features"

    return check


def _svm_features(node: Node, features: int) -> str | None:
    a: Any = node.attributes
    vectors = svm_vectors(a) if node.op_type == "SVMClassifier" else a.get("n_supports", 0)
    if vectors:
        return _rows_of("support_vectors", lambda _: vectors)(node, features)
    rows = class_count(a) if node.op_type == "SVMClassifier" else 1
    return _rows_of("coefficients", lambda _: rows)(node, features)


def _zip(node: Node, features: int) -> str | None:
    name = "classlabels_int64s" if node.attributes.get("classlabels_int64s") else "classlabels_strings"
    size = _size(node.attributes, name)
    return None if size == features else f"{name} has {size} entries; the input has {features} columns"


_FITS: Final[Mapping[str, Callable[[Node, int], str | None]]] = MappingProxyType({
    **dict.fromkeys(("TreeEnsemble", "TreeEnsembleClassifier", "TreeEnsembleRegressor"), _tree_features),
    **dict.fromkeys(("SVMClassifier", "SVMRegressor"), _svm_features),
    "Scaler": _per_feature("offset", "scale"),
    "Imputer": _per_feature("imputed_value_floats", "imputed_value_int64s"),
    "LinearClassifier": _rows_of("coefficients", linear_classes),
    "LinearRegressor": _rows_of("coefficients", lambda a: int(a.get("targets", 1))),  # type: ignore[arg-type]
    "ZipMap": _zip,
})  # fmt: skip

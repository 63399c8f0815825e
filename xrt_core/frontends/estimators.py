"""Estimators: models of scikit-learn, and of libraries with its interface, as ONNX models, by the package skl2onnx.

Nothing of scikit-learn is imported unless the object is one of its estimators, so that it is imported already.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from xrt_core.errors import ModelLoadError

_BOOSTERS: Final[Mapping[str, tuple[str, str]]] = {
    "LGBMClassifier": ("lightgbm", "LightGbm"),
    "LGBMRegressor": ("lightgbm", "LightGbm"),
    "XGBClassifier": ("xgboost", "XGBoost"),
    "XGBRFClassifier": ("xgboost", "XGBoost"),
    "XGBRegressor": ("xgboost", "XGBoost"),
    "XGBRFRegressor": ("xgboost", "XGBoost"),
}
"""Estimators of other packages -> the package, and how onnxmltools spells it in the names of its converters."""

_BOOLEANS: Final = frozenset(("HistGradientBoostingClassifier", "HistGradientBoostingRegressor"))
"""Estimators whose converter gives booleans for integers, which some versions of protobuf refuse."""


_registered: set[type] = set()  # estimators of other packages that skl2onnx was told of


def is_estimator(model: object) -> bool:
    """Whether an object is an estimator: its class, or one that it derives from, is of the package sklearn."""
    if "sklearn" not in sys.modules:
        return False
    is_one = any(c.__module__.partition(".")[0] == "sklearn" for c in type(model).__mro__)
    return is_one and hasattr(model, "get_params")


def onnx_of(estimator: Any, example: Any = None) -> Any:
    """The ONNX model (a ModelProto) of a fitted estimator: for classifiers the labels and the scores as arrays.

    example: a few rows of what the estimator takes, an array or a DataFrame (whose columns become inputs of one column
    each); its dtypes are those of the inputs. None for float32 and as many features as the estimator was fitted with.

    Raises ModelLoadError where skl2onnx is not installed, or cannot convert the estimator, with its reason.
    """
    what = f"{type(estimator).__module__}.{type(estimator).__qualname__}"
    try:
        skl2onnx: Any = importlib.import_module("skl2onnx")
        helper: Any = importlib.import_module("skl2onnx.algebra.type_helper")
    except ImportError as e:
        raise ModelLoadError(
            f"{what} is an estimator of scikit-learn, which skl2onnx converts, and that is not usable here ({e}): "
            "pip install skl2onnx"
        ) from e
    parts = list(_parts(estimator))
    converters = _converters(parts, what)
    options: dict[int, dict[str, bool]] = {id(estimator): {"zipmap": False}} if _is_classifier(estimator) else {}
    types = helper.guess_initial_types(_rows(estimator, example, what), None)

    def convert(types: Any) -> Any:
        try:
            return converted(types)
        except NameError:  # a classifier without scores does not know the option
            options.clear()
            return converted(types)

    def converted(types: Any) -> Any:
        return skl2onnx.convert_sklearn(
            estimator,
            initial_types=types,
            options=options,
            custom_conversion_functions=converters,
            target_opset={"": skl2onnx.get_latest_tested_opset_version(), "ai.onnx.ml": 3},
        )

    wide = {name for name, t in types if type(t).__name__ == "DoubleTensorType"}
    try:
        if wide:
            with contextlib.suppress(Exception):  # many converters give no types of doubles that fit
                model = convert(types)
                if not any("TreeEnsemble" in n.op_type for n in model.graph.node):
                    return model
            single: Any = importlib.import_module("skl2onnx.common.data_types").FloatTensorType
            return _rounded(convert([(name, single(t.shape) if name in wide else t) for name, t in types]), wide)
        return convert(types)
    except Exception as e:
        why = str(e).strip().partition("\n")[0][:300]
        raise ModelLoadError(
            f"{what} is not converted by skl2onnx {skl2onnx.__version__}: {type(e).__name__}: {why}"
        ) from e


def _rounded(model: Any, wide: set[str]) -> Any:
    """The model with inputs of float64 under these names, rounded to the float32 that it takes: the thresholds of trees
    are rounded so, and a number must not fall between the two."""
    from onnx import TensorProto, helper

    def rename(graph: Any) -> None:
        for node in graph.node:
            node.input[:] = [f"{n}/float32" if n in wide else n for n in node.input]
            for a in node.attribute:
                if a.HasField("g"):
                    rename(a.g)

    rename(model.graph)
    casts = [helper.make_node("Cast", [n], [f"{n}/float32"], to=TensorProto.FLOAT) for n in sorted(wide)]
    nodes = [*casts, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    for given in model.graph.input:
        if given.name in wide:
            given.type.tensor_type.elem_type = TensorProto.DOUBLE
    return model


def _rows(estimator: Any, example: Any, what: str) -> Any:
    """The first row of the example, whose columns' dtypes are to be the inputs'."""
    import numpy as np

    if example is None:
        count = getattr(estimator, "n_features_in_", None)
        if count is None or getattr(estimator, "feature_names_in_", None) is not None:
            raise ModelLoadError(f"{what}: give example=X, a few rows of its input, which tell names and dtypes")
        return np.zeros((1, count), np.float32)
    if hasattr(example, "columns"):  # a DataFrame
        return example[:1]
    rows = np.asarray(example)
    if rows.ndim == 1 and rows.dtype.kind in "UO":  # texts
        return rows[:1].astype(str).reshape(-1, 1)
    return rows[:1].astype(str) if rows.dtype.kind in "UO" else rows[:1]


def _is_classifier(estimator: Any) -> bool:
    """Whether scikit-learn takes it for a classifier, whose scores skl2onnx would give as maps."""
    return bool(importlib.import_module("sklearn.base").is_classifier(estimator))


def _parts(estimator: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """An estimator and those within it, by its parameters."""
    seen = set() if seen is None else seen
    if id(estimator) in seen or not is_estimator(estimator):
        return
    seen.add(id(estimator))
    yield estimator
    for value in estimator.get_params(deep=True).values():
        yield from _parts(value, seen)


def _converters(parts: list[Any], what: str) -> dict[type, Callable[..., Any]]:
    """Conversion functions for what skl2onnx does not convert by itself. Registers those of onnxmltools.

    Raises ModelLoadError where onnxmltools is needed and is not installed.
    """
    found: dict[type, Callable[..., Any]] = {}
    for kind in dict.fromkeys(map(type, parts)):
        if kind.__name__ in _BOOLEANS:
            # the one use of what skl2onnx does not publish; without it the package's own converter is taken
            with contextlib.suppress(ImportError, AttributeError, KeyError):
                names: Any = importlib.import_module("skl2onnx._supported_operators").sklearn_operator_name_map
                common: Any = importlib.import_module("skl2onnx.common._registration")
                found[kind] = _with_integers(common.get_converter(names[kind]))
        elif kind.__name__ in _BOOSTERS and kind not in _registered:
            _register(kind, *_BOOSTERS[kind.__name__], what)
            _registered.add(kind)
    return found


def _register(kind: type, package: str, spelling: str, what: str) -> None:
    """Register the converter that onnxmltools has for an estimator of another package."""
    converter = f"onnxmltools.convert.{package}.operator_converters.{spelling}"
    try:
        convert = getattr(importlib.import_module(converter), f"convert_{package}")
    except ImportError as e:
        raise ModelLoadError(
            f"{what} holds a {kind.__name__}, which onnxmltools converts, and that is not usable here ({e}): "
            "pip install onnxmltools"
        ) from e
    skl2onnx: Any = importlib.import_module("skl2onnx")
    shapes: Any = importlib.import_module("skl2onnx.common.shape_calculator")
    is_classifier = kind.__name__.endswith("Classifier")
    role = "classifier" if is_classifier else "regressor"
    skl2onnx.update_registered_converter(
        kind,
        f"Xrt{kind.__name__}",
        getattr(shapes, f"calculate_linear_{role}_output_shapes"),
        convert,
        options={"nocl": [True, False], "zipmap": [True, False, "columns"]} if is_classifier else None,
    )


def _with_integers(convert: Callable[..., Any]) -> Callable[..., Any]:
    """A conversion function whose nodes have integers where it gives booleans."""

    def converted(scope: Any, operator: Any, container: Any) -> None:
        convert(scope, operator, _Integers(container))

    return converted


class _Integers:
    """A container of skl2onnx whose nodes' lists of booleans become integers."""

    def __init__(self, container: Any) -> None:
        self._container = container

    def __getattr__(self, name: str) -> Any:
        return getattr(self._container, name)

    def add_node(self, *args: Any, **attributes: Any) -> Any:
        import numpy as np

        plain = {
            name: [int(v) if isinstance(v, bool | np.bool_) else v for v in value] if type(value) is list else value
            for name, value in attributes.items()
        }
        return self._container.add_node(*args, **plain)

"""Estimators of scikit-learn, LightGBM and XGBoost, converted by skl2onnx, against what they predict themselves."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pytest

from xrt_core import XRTModule
from xrt_core.errors import InputError, ModelLoadError

sklearn = pytest.importorskip("sklearn")
skl2onnx = pytest.importorskip("skl2onnx")

ROWS: Final = 160
FEATURES: Final = 5
TOLERANCE: Final = 2e-4
"""Of scores: scikit-learn computes in float64, the converted graphs in float32."""


def _data(kind: str) -> tuple[Any, Any]:
    """Rows and targets of a kind of task."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(2 * ROWS, FEATURES)).astype(np.float32)
    linear = x @ rng.normal(size=(FEATURES, 3)).astype(np.float32)
    if kind == "regression":
        return x, (linear[:, 0] + np.sin(x[:, 1])).astype(np.float32)
    if kind == "positive":
        return np.abs(x), np.exp(linear[:, 0] / 4).astype(np.float32)
    if kind == "targets":
        return x, linear[:, :2]
    if kind == "binary":
        return x, (linear[:, 0] > 0).astype(np.int64)
    if kind == "words":
        return x, np.array(["cat", "dog", "eel"])[linear.argmax(axis=1)]
    if kind == "labels":
        return x, (linear[:, :2] > 0).astype(np.int64)
    if kind == "counts":
        return np.floor(np.abs(3 * x)).astype(np.float32), linear.argmax(axis=1)
    if kind == "missing":
        x = np.where(rng.random(x.shape) < 0.2, np.float32(np.nan), x)
        return x, linear.argmax(axis=1)
    return x, linear.argmax(axis=1)


@dataclass(frozen=True)
class Case:
    """make: the estimator. kind: of data. outputs: methods whose results the model gives, in its order."""

    make: Callable[[], Any]
    kind: str = "classes"
    outputs: tuple[str, ...] = ("predict", "predict_proba")
    tolerance: float = TOLERANCE


def _class(module: str, name: str, **parameters: Any) -> Callable[[], Any]:
    def make() -> Any:
        found = getattr(pytest.importorskip(module), name)
        return found(**parameters)

    return make


def _pipeline(*steps: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: pytest.importorskip("sklearn.pipeline").make_pipeline(*(s() for s in steps))


_ENSEMBLE, _TREE, _LINEAR, _SVM = "sklearn.ensemble", "sklearn.tree", "sklearn.linear_model", "sklearn.svm"
_PREPROCESSING, _NEIGHBORS, _NAIVE = "sklearn.preprocessing", "sklearn.neighbors", "sklearn.naive_bayes"
_POOLED = "averaged_inverted_cdf"
_scaler = _class(_PREPROCESSING, "StandardScaler")
_logistic = _class(_LINEAR, "LogisticRegression", max_iter=300)
_PREDICT: Final = ("predict",)
_TRANSFORM: Final = ("transform",)
_DECISION: Final = ("predict", "decision_function")

CASES: Final[Mapping[str, Case]] = {
    # trees
    "forest": Case(_class(_ENSEMBLE, "RandomForestClassifier", n_estimators=10, random_state=0)),
    "forest of two classes": Case(_class(_ENSEMBLE, "RandomForestClassifier", n_estimators=10), "binary"),
    "forest of words": Case(_class(_ENSEMBLE, "RandomForestClassifier", n_estimators=10), "words"),
    "forest regressor": Case(_class(_ENSEMBLE, "RandomForestRegressor", n_estimators=10), "regression", _PREDICT),
    "forest of two targets": Case(_class(_ENSEMBLE, "RandomForestRegressor", n_estimators=5), "targets", _PREDICT),
    "extra trees": Case(_class(_ENSEMBLE, "ExtraTreesClassifier", n_estimators=10)),
    "extra trees regressor": Case(_class(_ENSEMBLE, "ExtraTreesRegressor", n_estimators=10), "regression", _PREDICT),
    "tree": Case(_class(_TREE, "DecisionTreeClassifier", max_depth=5)),
    "tree of two classes": Case(_class(_TREE, "DecisionTreeClassifier", max_depth=4), "binary"),
    "tree regressor": Case(_class(_TREE, "DecisionTreeRegressor", max_depth=6), "regression", _PREDICT),
    "extra tree": Case(_class(_TREE, "ExtraTreeClassifier", max_depth=5)),
    "extra tree regressor": Case(_class(_TREE, "ExtraTreeRegressor", max_depth=5), "regression", _PREDICT),
    "boosting": Case(_class(_ENSEMBLE, "GradientBoostingClassifier", n_estimators=10)),
    "boosting of two classes": Case(_class(_ENSEMBLE, "GradientBoostingClassifier", n_estimators=10), "binary"),
    "boosting regressor": Case(_class(_ENSEMBLE, "GradientBoostingRegressor", n_estimators=10), "regression", _PREDICT),
    "histogram boosting": Case(_class(_ENSEMBLE, "HistGradientBoostingClassifier", max_iter=10)),
    "histogram boosting of two classes": Case(
        _class(_ENSEMBLE, "HistGradientBoostingClassifier", max_iter=10), "binary"
    ),
    "histogram boosting with missing values": Case(
        _class(_ENSEMBLE, "HistGradientBoostingClassifier", max_iter=10), "missing"
    ),
    "histogram boosting regressor": Case(
        _class(_ENSEMBLE, "HistGradientBoostingRegressor", max_iter=10), "regression", _PREDICT
    ),
    "ada boost": Case(_class(_ENSEMBLE, "AdaBoostClassifier", n_estimators=4)),
    "ada boost regressor": Case(_class(_ENSEMBLE, "AdaBoostRegressor", n_estimators=4), "regression", _PREDICT),
    "bagging": Case(_class(_ENSEMBLE, "BaggingClassifier", n_estimators=4)),
    "bagging regressor": Case(_class(_ENSEMBLE, "BaggingRegressor", n_estimators=4), "regression", _PREDICT),
    "isolation forest": Case(_class(_ENSEMBLE, "IsolationForest", n_estimators=10), outputs=_DECISION),
    "lightgbm": Case(_class("lightgbm", "LGBMClassifier", n_estimators=10, verbose=-1)),
    "lightgbm of two classes": Case(_class("lightgbm", "LGBMClassifier", n_estimators=10, verbose=-1), "binary"),
    "lightgbm regressor": Case(
        _class("lightgbm", "LGBMRegressor", n_estimators=10, verbose=-1), "regression", _PREDICT
    ),
    "xgboost": Case(_class("xgboost", "XGBClassifier", n_estimators=10)),
    "xgboost of two classes": Case(_class("xgboost", "XGBClassifier", n_estimators=10), "binary"),
    "xgboost regressor": Case(_class("xgboost", "XGBRegressor", n_estimators=10), "regression", _PREDICT),
    "stacking": Case(
        lambda: pytest.importorskip(_ENSEMBLE).StackingClassifier(
            [("tree", _class(_TREE, "DecisionTreeClassifier", max_depth=3)()), ("linear", _logistic())]
        )
    ),
    "voting": Case(
        lambda: pytest.importorskip(_ENSEMBLE).VotingClassifier(
            [("tree", _class(_TREE, "DecisionTreeClassifier", max_depth=3)()), ("linear", _logistic())],
            voting="soft",
            flatten_transform=False,
        )
    ),
    "voting regressor": Case(
        lambda: pytest.importorskip(_ENSEMBLE).VotingRegressor(
            [("tree", _class(_TREE, "DecisionTreeRegressor", max_depth=3)()), ("linear", _class(_LINEAR, "Ridge")())]
        ),
        "regression",
        _PREDICT,
    ),
    # support vectors
    "svc": Case(_class(_SVM, "SVC", probability=True, random_state=0), tolerance=2e-3),
    "svc of two classes": Case(_class(_SVM, "SVC", probability=True, random_state=0), "binary", tolerance=2e-3),
    "svc without probabilities": Case(_class(_SVM, "SVC", decision_function_shape="ovo"), outputs=_DECISION),
    "svc polynomial": Case(_class(_SVM, "SVC", kernel="poly", probability=True, random_state=0), tolerance=2e-3),
    "svc sigmoid": Case(_class(_SVM, "SVC", kernel="sigmoid", probability=True, random_state=0), tolerance=2e-3),
    "svc linear": Case(_class(_SVM, "SVC", kernel="linear", probability=True, random_state=0), tolerance=2e-3),
    "nu svc": Case(_class(_SVM, "NuSVC", nu=0.3, probability=True, random_state=0), tolerance=2e-3),
    "linear svc": Case(_class(_SVM, "LinearSVC"), outputs=_DECISION),
    "svr": Case(_class(_SVM, "SVR"), "regression", _PREDICT),
    "nu svr": Case(_class(_SVM, "NuSVR"), "regression", _PREDICT),
    "linear svr": Case(_class(_SVM, "LinearSVR", max_iter=5000), "regression", _PREDICT),
    "one-class svm": Case(_class(_SVM, "OneClassSVM", nu=0.2), outputs=_DECISION),
    # linear models
    "logistic": Case(_logistic),
    "logistic of two classes": Case(_logistic, "binary"),
    "logistic of words": Case(_logistic, "words"),
    "stochastic gradient": Case(_class(_LINEAR, "SGDClassifier", loss="log_loss", random_state=0)),
    "perceptron": Case(_class(_LINEAR, "Perceptron"), outputs=_DECISION),
    "ridge classifier": Case(_class(_LINEAR, "RidgeClassifier"), outputs=_DECISION),
    "linear": Case(_class(_LINEAR, "LinearRegression"), "regression", _PREDICT),
    "linear of two targets": Case(_class(_LINEAR, "LinearRegression"), "targets", _PREDICT),
    "ridge": Case(_class(_LINEAR, "Ridge"), "regression", _PREDICT),
    "lasso": Case(_class(_LINEAR, "Lasso", alpha=0.1), "regression", _PREDICT),
    "elastic net": Case(_class(_LINEAR, "ElasticNet", alpha=0.1), "regression", _PREDICT),
    "bayesian ridge": Case(_class(_LINEAR, "BayesianRidge"), "regression", _PREDICT),
    "huber": Case(_class(_LINEAR, "HuberRegressor"), "regression", _PREDICT),
    "poisson": Case(_class(_LINEAR, "PoissonRegressor"), "positive", _PREDICT),
    "discriminant": Case(_class("sklearn.discriminant_analysis", "LinearDiscriminantAnalysis")),
    "quadratic discriminant": Case(_class("sklearn.discriminant_analysis", "QuadraticDiscriminantAnalysis")),
    # others
    "naive bayes": Case(_class(_NAIVE, "GaussianNB")),
    "multinomial bayes": Case(_class(_NAIVE, "MultinomialNB"), "counts"),
    "bernoulli bayes": Case(_class(_NAIVE, "BernoulliNB")),
    "perceptrons": Case(_class("sklearn.neural_network", "MLPClassifier", max_iter=50, random_state=0)),
    "perceptrons regressor": Case(
        _class("sklearn.neural_network", "MLPRegressor", max_iter=50, random_state=0), "regression", _PREDICT
    ),
    "neighbours": Case(_class(_NEIGHBORS, "KNeighborsClassifier", n_neighbors=3)),
    "neighbours regressor": Case(_class(_NEIGHBORS, "KNeighborsRegressor", n_neighbors=3), "regression", _PREDICT),
    "clusters": Case(
        _class("sklearn.cluster", "KMeans", n_clusters=3, n_init=2, random_state=0), outputs=("predict", "transform")
    ),
    "mixture": Case(_class("sklearn.mixture", "GaussianMixture", n_components=2, random_state=0)),
    "one against the rest": Case(lambda: pytest.importorskip("sklearn.multiclass").OneVsRestClassifier(_logistic())),
    "calibrated": Case(lambda: pytest.importorskip("sklearn.calibration").CalibratedClassifierCV(_logistic(), cv=2)),
    "several regressors": Case(
        lambda: pytest.importorskip("sklearn.multioutput").MultiOutputRegressor(_class(_LINEAR, "Ridge")()),
        "targets",
        _PREDICT,
    ),
    # transformers and pipelines
    "scaler": Case(_scaler, outputs=_TRANSFORM),
    "least and greatest": Case(_class(_PREPROCESSING, "MinMaxScaler"), outputs=_TRANSFORM),
    "robust scaler": Case(_class(_PREPROCESSING, "RobustScaler"), outputs=_TRANSFORM),
    "normalizer": Case(_class(_PREPROCESSING, "Normalizer"), outputs=_TRANSFORM),
    "normalizer by sums": Case(_class(_PREPROCESSING, "Normalizer", norm="l1"), outputs=_TRANSFORM),
    "normalizer by the largest": Case(_class(_PREPROCESSING, "Normalizer", norm="max"), outputs=_TRANSFORM),
    "binarizer": Case(_class(_PREPROCESSING, "Binarizer"), outputs=_TRANSFORM),
    "bins": Case(
        _class(_PREPROCESSING, "KBinsDiscretizer", n_bins=4, encode="onehot-dense", quantile_method=_POOLED),
        outputs=_TRANSFORM,
    ),
    "powers": Case(_class(_PREPROCESSING, "PolynomialFeatures", degree=2), outputs=_TRANSFORM),
    "components": Case(_class("sklearn.decomposition", "PCA", n_components=2), outputs=_TRANSFORM),
    "imputer": Case(_class("sklearn.impute", "SimpleImputer"), "missing", _TRANSFORM),
    "imputer and boosting": Case(
        _pipeline(
            _class("sklearn.impute", "SimpleImputer"), _class(_ENSEMBLE, "GradientBoostingClassifier", n_estimators=5)
        ),
        "missing",
    ),
    "scaler and logistic": Case(_pipeline(_scaler, _logistic)),
    "scaler and svc": Case(_pipeline(_scaler, _class(_SVM, "SVC", probability=True, random_state=0)), tolerance=2e-3),
    "selection and forest": Case(
        _pipeline(
            lambda: pytest.importorskip("sklearn.feature_selection").SelectKBest(k=3),
            _class(_ENSEMBLE, "RandomForestClassifier", n_estimators=5),
        )
    ),
}

SAMPLE: Final = (
    "forest", "forest of words", "forest of two targets", "boosting of two classes", "isolation forest", "svc",
    "imputer and boosting", "one-class svm", "logistic of two classes", "scaler and logistic",
    "normalizer", "imputer",
)  # fmt: skip
"""Cases of the default run."""

ON_XLA: Final = ("scaler and logistic",)
"""Of these on XLA too."""

ENGINES: Final = ("host", "xla", "onnxruntime")


def _every_case() -> list[Any]:
    """Case and engine; by day the sample, of which XLA compiles few."""
    by_day = {(n, e) for n in SAMPLE for e in ENGINES if e != "xla" or n in ON_XLA}
    pairs = [(n, e) for n in CASES for e in ENGINES]
    return [pytest.param(*p, marks=[] if p in by_day else [pytest.mark.nightly]) for p in pairs]


@pytest.mark.parametrize(("name", "engine"), _every_case())
def test_estimator(name: str, engine: str) -> None:
    """The converted estimator gives what scikit-learn gives, on rows that it was not fitted with."""
    if engine != "host":
        pytest.importorskip("jax" if engine == "xla" else engine)
    case = CASES[name]
    x, y = _data(case.kind)
    estimator = case.make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        estimator.fit(x[:ROWS], y[:ROWS])
        rows = x[ROWS:]
        module = XRTModule(estimator, example=rows, engine=engine, guard=False, prune=False, cache="off")
        results = module(rows)
        results = results if isinstance(results, tuple) else (results,)
        wanted = [np.asarray(getattr(estimator, method)(rows)) for method in case.outputs]

    for got, want in zip(results, wanted, strict=False):
        if want.dtype.kind in "iuUO":
            assert np.mean(np.asarray(got).reshape(want.shape) == want) >= 1 - 1 / len(rows)
        else:
            np.testing.assert_allclose(
                np.asarray(got, np.float64).reshape(want.shape), want, rtol=case.tolerance, atol=case.tolerance
            )


@pytest.mark.parametrize("engine", ["xla", "onnxruntime"])
def test_engines_take_the_whole_pipeline(engine: str) -> None:
    """A scaler, a tree and its scores are one cluster of an engine."""
    pytest.importorskip("jax" if engine == "xla" else engine)
    x, y = _data("classes")
    estimator = _pipeline(_scaler, _class(_TREE, "DecisionTreeClassifier", max_depth=3))().fit(x, y)
    module = XRTModule(estimator, example=x, engine=engine, guard=False, prune=False, cache="off")
    module(x)

    assert f"clusters: 1 on {engine}; 100% of nodes" in str(module.explain())


def test_rows_of_float64_are_taken() -> None:
    """An example of float64 makes a model that takes float64, whether or not skl2onnx converts it so."""
    x, y = _data("classes")
    estimator = CASES["forest"].make().fit(x.astype(np.float64), y)
    labels, scores = XRTModule(estimator, example=x.astype(np.float64), engine="host")(x.astype(np.float64))

    assert (labels == estimator.predict(x)).all()
    np.testing.assert_allclose(scores, estimator.predict_proba(x), atol=1e-5)


def test_columns_of_text_and_numbers() -> None:
    """The columns of a DataFrame are inputs by name; words are encoded on the host."""
    pandas = pytest.importorskip("pandas")
    compose = pytest.importorskip("sklearn.compose")
    rng = np.random.default_rng(0)
    frame = pandas.DataFrame({
        "colour": rng.choice(["red", "green", "blue"], 60), "size": rng.normal(size=60).astype(np.float32)
    })  # fmt: skip
    wanted = (frame["colour"] == "red").to_numpy() | (frame["size"].to_numpy() > 1)
    columns = compose.make_column_transformer(
        (_class(_PREPROCESSING, "OneHotEncoder", handle_unknown="ignore")(), ["colour"]), (_scaler(), ["size"])
    )
    estimator = _pipeline(lambda: columns, _logistic)().fit(frame, wanted.astype(np.int64))
    module = XRTModule(estimator, example=frame)
    labels, scores = module(colour=frame[["colour"]].to_numpy().astype(object), size=frame[["size"]].to_numpy())

    assert (labels == estimator.predict(frame)).all()
    np.testing.assert_allclose(scores, estimator.predict_proba(frame), atol=1e-5)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without skl2onnx the error says which package converts estimators."""
    monkeypatch.setitem(sys.modules, "skl2onnx", None)
    with pytest.raises(ModelLoadError, match="pip install skl2onnx"):
        XRTModule(CASES["linear"].make())


def test_the_example_is_needed_where_nothing_else_tells() -> None:
    """An estimator that was fitted with names of columns asks for an example."""
    estimator = CASES["linear"].make()
    with pytest.raises(ModelLoadError, match="give example=X"):
        XRTModule(estimator)


def test_other_models_take_no_example() -> None:
    """Other models say what they take."""
    with pytest.raises(InputError, match="example is for models that do not say what they take"):
        XRTModule(b"", example=np.zeros(1))


def test_objects_that_derive_from_nothing_of_sklearn_are_no_estimators() -> None:
    """An object that only looks like an estimator goes to the frontends of plugins."""

    class Looks:
        def get_params(self) -> dict[str, Any]:
            return {}

    with pytest.raises(ModelLoadError, match="is not a model"):
        XRTModule(Looks())

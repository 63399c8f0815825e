"""Operators of ai.onnx.ml on the host and under jax.numpy: trees against a walk node by node, the others by hand."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import pytest

from xrt_core import XRTModule
from xrt_core.errors import InputError, XRTError
from xrt_core.host.executor import host_kernel, run_node
from xrt_core.ir import tree_tables
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.inference import infer_types
from xrt_core.ir.long_list import LongList
from xrt_core.ir.ml_limits import ml_attribute_fault
from xrt_core.ir.schema import since_version
from xrt_core.ir.types import DTYPE_TO_ONNX, STRING, MapType, SequenceType, TensorType
from xrt_core.kernels import OpContext, find_kernel

ML: Final = "ai.onnx.ml"
F32: Final = np.dtype(np.float32)
INT: Final = np.dtype(np.int64)
COMPARISONS: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "BRANCH_LEQ": operator.le,
    "BRANCH_LT": operator.lt,
    "BRANCH_GTE": operator.ge,
    "BRANCH_GT": operator.gt,
    "BRANCH_EQ": operator.eq,
    "BRANCH_NEQ": operator.ne,
}


def _node(op: str, x: Any, *, opset: int = 3, more: tuple[Any, ...] = (), outputs: int = 1, **attributes: Any) -> Node:
    """A typed node; lists become tuples, as the IR has them."""
    inputs = [Value(f"x{i}", TensorType(a.dtype, a.shape)) for i, a in enumerate((x, *more))]
    plain = {k: tuple(v) if isinstance(v, list) else v for k, v in attributes.items()}
    bare = Node(op, inputs, [Value(f"y{i}") for i in range(outputs)], plain, domain=ML,
                version=since_version(op, ML, opset), name="n")  # fmt: skip
    return bare.replace(outputs=[Value(v.name, t) for v, t in zip(bare.outputs, infer_types(bare), strict=True) if v])


def _run(node: Node, *arrays: Any) -> tuple[Any, ...]:
    """The results of the host, which have the types that were inferred."""
    results = run_node(node, arrays)
    for v, r in zip(node.outputs, results, strict=True):
        assert v is not None
        t = v.type
        if isinstance(t, TensorType):
            assert (r.dtype, r.shape) == (t.dtype, t.shape)
    return results


def _under_jax(node: Node, *arrays: Any) -> tuple[Any, ...]:
    """The results of the portable kernel under jax.jit."""
    jax = pytest.importorskip("jax")
    kernel = find_kernel(node.domain, node.op_type)
    assert kernel is not None

    def call(*given: Any) -> Any:
        return kernel.function(OpContext(node, jax.numpy), *given)

    with jax.enable_x64(True):
        results = jax.jit(call)(*arrays)
    return tuple(np.asarray(r) for r in (results if isinstance(results, tuple) else (results,)))


def _trees(
    rng: np.random.Generator, modes: list[str], depth: int, targets: Callable[[int], list[int]]
) -> dict[str, Any]:
    """The tables of three random trees of [rows, 4], the weights under `target_*`."""
    a: dict[str, list[Any]] = {
        k: [] for k in (
            "nodes_treeids", "nodes_nodeids", "nodes_featureids", "nodes_values", "nodes_modes", "nodes_truenodeids",
            "nodes_falsenodeids", "nodes_missing_value_tracks_true", "target_treeids", "target_nodeids", "target_ids",
            "target_weights",
        )
    }  # fmt: skip

    def build(tree: int, left: int, numbers: list[int]) -> int:
        number = len(numbers)
        numbers.append(number)
        row = len(a["nodes_nodeids"])
        leaf = left == 0 or (left < depth and rng.random() < 0.2)
        for name, value in (
            ("treeids", tree), ("nodeids", number), ("featureids", int(rng.integers(4))),
            ("values", float(rng.integers(-2, 3))), ("modes", "LEAF" if leaf else str(rng.choice(modes))),
            ("truenodeids", 0), ("falsenodeids", 0), ("missing_value_tracks_true", int(rng.random() < 0.3)),
        ):  # fmt: skip
            a[f"nodes_{name}"].append(value)
        if leaf:
            for target in targets(tree):
                a["target_treeids"].append(tree)
                a["target_nodeids"].append(number)
                a["target_ids"].append(target)
                a["target_weights"].append(float(np.float32(rng.normal())))
        else:
            a["nodes_truenodeids"][row] = build(tree, left - 1, numbers)
            a["nodes_falsenodeids"][row] = build(tree, left - 1, numbers)
        return number

    for tree in range(3):
        build(tree, depth, [])
    return a


def _walked(a: Mapping[str, Any], x: np.ndarray, targets: int, how: str) -> np.ndarray:
    """The ensemble's result by a walk from each root."""
    rows = {key: i for i, key in enumerate(zip(a["nodes_treeids"], a["nodes_nodeids"], strict=True))}
    out = np.zeros((len(x), targets))
    for r, row in enumerate(x.tolist()):
        given: list[list[float]] = [[] for _ in range(targets)]
        for tree in range(3):
            at = rows[tree, 0]
            while a["nodes_modes"][at] != "LEAF":
                v = row[a["nodes_featureids"][at]]
                goes = COMPARISONS[a["nodes_modes"][at]](v, a["nodes_values"][at])
                goes = goes or (v != v and bool(a["nodes_missing_value_tracks_true"][at]))
                at = rows[tree, a[f"nodes_{'true' if goes else 'false'}nodeids"][at]]
            for t, n, target, weight in zip(*(a[f"target_{k}"] for k in ("treeids", "nodeids", "ids", "weights")),
                                            strict=True):  # fmt: skip
                if (t, n) == (tree, a["nodes_nodeids"][at]):
                    given[target].append(weight)
        for k, values in enumerate(given):
            total = sum(values) / (3 if how == "AVERAGE" else 1)
            out[r, k] = {"MIN": min, "MAX": max}.get(how, lambda _, total=total: total)(values) if values else 0.0
    return out


def _rows_with_nan(rng: np.random.Generator) -> np.ndarray:
    x = rng.integers(-3, 4, (25, 4)).astype(np.float32)
    x[rng.random(x.shape) < 0.15] = np.nan
    return x


@pytest.mark.parametrize("how", ["SUM", "AVERAGE", "MIN", "MAX"])
@pytest.mark.parametrize("modes", [list(COMPARISONS), ["BRANCH_LEQ"], ["BRANCH_LT"], ["BRANCH_GTE"], ["BRANCH_GT"]])
def test_ensembles_are_what_a_walk_finds(how: str, modes: list[str]) -> None:
    """All comparisons, missing values and aggregates; leaves with one target or with all; deep trees and small ones."""
    rng = np.random.default_rng(len(modes) * 7 + len(how))
    x = _rows_with_nan(rng)
    for depth, targets in ((3, lambda tree: [tree % 2]), (7, lambda tree: [0, 1])):
        a = _trees(rng, modes, depth, targets)
        node = _node("TreeEnsembleRegressor", x, n_targets=2, aggregate_function=how, **a)
        want = _walked(a, x, 2, how)
        np.testing.assert_allclose(_run(node, x)[0], want, atol=1e-6)
        if how == "SUM" and modes == ["BRANCH_LT"]:
            np.testing.assert_allclose(_under_jax(node, x)[0], want, atol=1e-6)


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("names", ["in order", "shuffled", "far apart"])
def test_rows_may_stand_anywhere(names: str, long: bool) -> None:
    """Nodes in any order, and of any numbers; as tuples and as long lists."""
    rng = np.random.default_rng(5)
    x = _rows_with_nan(rng)
    a = _trees(rng, list(COMPARISONS), 6, lambda tree: [tree % 2])
    want = _walked(a, x, 2, "SUM")
    tables = {k: np.array(v) for k, v in a.items()}
    if names == "shuffled":
        for prefix in ("nodes_", "target_"):
            order = rng.permutation(len(tables[f"{prefix}treeids"]))
            tables.update({k: v[order] for k, v in tables.items() if k.startswith(prefix)})
    if names == "far apart":
        for k in tables:
            if k.endswith("treeids"):
                tables[k] = tables[k] * 5000 - 7000
            elif k.endswith(("nodeids", "nodes_nodeids")):
                tables[k] = tables[k] * 3 + 1
    values: dict[str, Any] = {k: tuple(v.tolist()) for k, v in tables.items()}
    if long:
        values = {k: LongList.of(v) for k, v in values.items()}
    node = _node("TreeEnsembleRegressor", x, n_targets=2, **a)
    node = node.replace(attributes={**node.attributes, **values})
    assert ml_attribute_fault(node.op_type, node.attributes) is None
    np.testing.assert_allclose(_run(node, x)[0], want, atol=1e-6)


@pytest.mark.parametrize("long", [False, True])
def test_tables_name_the_tree_that_is_not_there(long: bool) -> None:
    """Weights of a tree, or a node, that no row has; as tuples and as long lists."""
    for changed, message in (
        ({"target_treeids": [0, 9]}, "node 2 of tree 9"),
        ({"target_treeids": [0, -9]}, "node 2 of tree -9"),
        ({"target_nodeids": [1, -2]}, "node -2 of tree 0"),
        ({"nodes_truenodeids": [-1, 0, 0]}, "leads to node -1 of tree 0"),
    ):
        a: dict[str, Any] = _stump(**changed)
        values = {k: (LongList.of if long else tuple)(v) if isinstance(v, list) else v for k, v in a.items()}
        fault = ml_attribute_fault("TreeEnsembleRegressor", values)
        assert fault is not None
        assert message in fault


def test_large_ensembles_are_looked_at_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What that finds is what all tables together say; whatever is wrong or unusual is left to them."""
    monkeypatch.setattr(tree_tables, "_HELD", 0)
    monkeypatch.setattr(tree_tables, "_PART", 16)
    rng = np.random.default_rng(3)
    a = _trees(rng, ["BRANCH_LEQ"], 6, lambda tree: [tree % 2])
    tables: dict[str, Any] = {k: LongList.of(v) for k, v in a.items()}
    assert tree_tables._facts_by_parts("TreeEnsembleRegressor", tables) is not None
    looked_at = 0
    for _ in range(600):
        name = rng.choice(list(a))
        values = list(a[name])
        i = int(rng.integers(len(values)))
        if name == "nodes_modes":
            values[i] = str(rng.choice(["LEAF", "BRANCH_LEQ", "BRANCH_GT", "MEMBER", "OTHER"]))
        elif isinstance(values[i], int):
            values[i] += int(rng.integers(-3, 4))
        if rng.random() < 0.1:
            values.pop(i)
        changed = {**tables, name: LongList.of(values)}
        found = tree_tables._facts_by_parts("TreeEnsembleRegressor", changed)
        if found is not None:
            looked_at += 1
            assert found == tree_tables._columns("TreeEnsembleRegressor", changed).check()
    assert 100 < looked_at < 500


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["SUM", "AVERAGE", "MIN", "MAX"])
@pytest.mark.parametrize("modes", [list(COMPARISONS), ["BRANCH_LEQ"], ["BRANCH_GTE"], ["BRANCH_GT"]])
def test_ensembles_under_jax(how: str, modes: list[str]) -> None:
    """Traversal by gathers and by bits gives what the host gives."""
    rng = np.random.default_rng(len(modes) * 5 + len(how))
    x = _rows_with_nan(rng)
    for depth, targets in ((3, lambda tree: [tree % 2]), (7, lambda tree: [0, 1])):
        node = _node(
            "TreeEnsembleRegressor", x, n_targets=2, aggregate_function=how, **_trees(rng, modes, depth, targets)
        )
        np.testing.assert_allclose(_under_jax(node, x)[0], _run(node, x)[0], atol=1e-6)


def test_rows_are_followed_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of a block changes no result."""
    from xrt_core.kernels import trees

    rng = np.random.default_rng(5)
    x = _rows_with_nan(rng)
    a = _trees(rng, ["BRANCH_LEQ"], 9, lambda tree: [0])
    node = _node("TreeEnsembleRegressor", x, n_targets=1, **a)
    want = _walked(a, x, 1, "SUM")
    for block in (1, 7, 60):
        monkeypatch.setattr(trees, "_BLOCK", block)
        np.testing.assert_allclose(_run(node, x)[0], want, atol=1e-6)


def test_sets_of_members() -> None:
    """TreeEnsemble 5 with a member test, one comparison and leaves of two targets."""
    x = np.array([[1.0], [5.0], [3.0], [np.nan]], np.float32)
    node = _node(
        "TreeEnsemble", x, opset=5, n_targets=2, tree_roots=[0], nodes_modes=np.array([6, 0], np.uint8),
        nodes_splits=np.array([0, 4], np.float32), nodes_featureids=[0, 0], nodes_truenodeids=[0, 1],
        nodes_falsenodeids=[1, 2], nodes_trueleafs=[1, 1], nodes_falseleafs=[0, 1],
        membership_values=np.array([1, 2, 3, np.nan], np.float32), leaf_targetids=[0, 1, 1],
        leaf_weights=np.array([10, 20, 30], np.float32),
    )  # fmt: skip

    want = [[10, 0], [0, 30], [10, 0], [0, 30]]
    np.testing.assert_array_equal(_run(node, x)[0], want)
    np.testing.assert_array_equal(_under_jax(node, x)[0], want)


def _stump(**changed: Any) -> dict[str, Any]:
    """The tables of a tree of one comparison."""
    return {
        "nodes_treeids": [0, 0, 0], "nodes_nodeids": [0, 1, 2], "nodes_featureids": [0, 0, 0],
        "nodes_values": [0.5, 0.0, 0.0], "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"],
        "nodes_truenodeids": [1, 0, 0], "nodes_falsenodeids": [2, 0, 0], "target_treeids": [0, 0],
        "target_nodeids": [1, 2], "target_ids": [0, 0], "target_weights": [1.0, 2.0], "n_targets": 1, **changed,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({"nodes_truenodeids": [0, 0, 0]}, "nodes_truenodeids"),
        ({"nodes_truenodeids": [9, 0, 0]}, "nodes_truenodeids leads to node 9 of tree 0"),
        ({"nodes_values": [0.5]}, "nodes_values has 1 entries; nodes_modes has 3"),
        ({"nodes_modes": ["BRANCH_LE", "LEAF", "LEAF"]}, "nodes_modes has 'BRANCH_LE'"),
        ({"nodes_nodeids": [0, 1, 1]}, "nodes_nodeids has node 1 of tree 0 twice"),
        ({"nodes_nodeids": [0, 1, 1 << 50]}, "nodes_nodeids goes from 0 to"),
        ({"nodes_featureids": [-1, 0, 0]}, "nodes_featureids has -1"),
        ({"nodes_featureids": [8, 0, 0]}, "nodes_featureids has feature 8"),
        ({"target_ids": [0, 1]}, "target_ids has 1; there are 1 targets"),
        ({"target_nodeids": [1, 7]}, "target_nodeids has node 7 of tree 0"),
        ({"n_targets": 0}, "n_targets = 0"),
        ({"aggregate_function": "MEAN"}, "aggregate_function = 'MEAN'"),
        ({"post_transform": "TANH"}, "post_transform = 'TANH'"),
        ({"base_values": [1.0, 2.0]}, "base_values has 2 entries"),
    ],
)
def test_tables_that_contradict_each_other_are_refused(changed: dict[str, Any], names: str) -> None:
    """The error names the node and the attribute."""
    x = np.zeros((2, 3), np.float32)
    with pytest.raises(XRTError, match="'n'.*" + names):
        _node("TreeEnsembleRegressor", x, **_stump(**changed))


def test_a_long_cycle_is_found_at_once() -> None:
    """A cycle through a hundred thousand nodes, whose last one leads to the first, is refused."""
    count = 100_000
    numbers = list(range(count))
    a = _stump(
        nodes_treeids=[0] * count, nodes_nodeids=numbers, nodes_featureids=[0] * count, nodes_values=[0.0] * count,
        nodes_modes=["BRANCH_LEQ"] * (count - 1) + ["LEAF"], nodes_truenodeids=[*numbers[1:-1], 0, 0],
        nodes_falsenodeids=[count - 1] * count, target_treeids=[0], target_nodeids=[count - 1], target_ids=[0],
        target_weights=[1.0],
    )  # fmt: skip
    fault = ml_attribute_fault(
        "TreeEnsembleRegressor", {k: tuple(v) if isinstance(v, list) else v for k, v in a.items()}
    )

    assert fault is not None
    assert "cycle" in fault


@pytest.mark.parametrize(
    ("op", "attributes", "names"),
    [
        ("SVMRegressor", {"n_supports": 2, "coefficients": [1.0], "rho": [0.0]}, "coefficients has 1"),
        (
            "SVMRegressor",
            {"n_supports": 2, "coefficients": [1.0] * 2, "rho": [0.0], "support_vectors": [0.0] * 4},
            "support_vectors has 4",
        ),
        ("SVMRegressor", {"coefficients": [1.0] * 3}, "rho is empty"),
        ("SVMRegressor", {"coefficients": [1.0] * 3, "rho": [0.0], "kernel_type": "SPLINE"}, "kernel_type = 'SPLINE'"),
        ("LinearRegressor", {"coefficients": [1.0] * 5, "targets": 2}, "coefficients has 5"),
        ("LinearRegressor", {"coefficients": [1.0] * 4, "targets": 2}, "coefficients has 4"),
        ("Normalizer", {"norm": "L3"}, "norm = 'L3'"),
        ("Scaler", {"offset": [1.0, 2.0]}, "offset has 2 entries; the input has 3"),
        ("Imputer", {}, "imputed_value_floats or imputed_value_int64s must be given"),
        ("OneHotEncoder", {}, "cats_int64s or cats_strings must be given"),
        ("LabelEncoder", {"keys_floats": [1.0], "values_floats": [1.0, 2.0]}, "keys_floats has 1 entr"),
        ("FeatureVectorizer", {"inputdimensions": [1, 2]}, "inputdimensions has 2 entries; the node has 1"),
        ("ZipMap", {"classlabels_int64s": [1, 2]}, "classlabels_int64s has 2 entries; the input has 3"),
    ],
)
def test_attributes_out_of_their_limits_are_refused(op: str, attributes: dict[str, Any], names: str) -> None:
    """The error names the node and the attribute, before anything runs."""
    with pytest.raises(XRTError, match="'n'.*" + names):
        _node(op, np.zeros((2, 3), np.float32), **attributes)


def test_classifiers_need_labels() -> None:
    """A classifier without labels is refused by the name of the attribute."""
    x = np.zeros((2, 3), np.float32)
    with pytest.raises(XRTError, match="classlabels_ints is empty"):
        _node("SVMClassifier", x, outputs=2, coefficients=[1.0] * 6, rho=[0.0])
    a = {k.replace("target", "class"): v for k, v in _stump().items() if k != "n_targets"}
    with pytest.raises(XRTError, match="classlabels_int64s is empty"):
        _node("TreeEnsembleClassifier", x, outputs=2, **a)


def _coupled(r: np.ndarray) -> np.ndarray:
    """Probabilities from pairwise ones by the linear system that the iteration solves (Wu, Lin and Weng, 2004, 4.1)."""
    k = len(r)
    q = -r.T * r
    np.fill_diagonal(q, 0)
    q += np.diag([sum(r[j, t] ** 2 for j in range(k) if j != t) for t in range(k)])
    system = np.block([[q, np.ones((k, 1))], [np.ones((1, k)), np.zeros((1, 1))]])
    return np.linalg.solve(system, np.r_[np.zeros(k), 1.0])[:k]


def test_probabilities_of_support_vectors_are_coupled() -> None:
    """They solve the system of pairwise coupling, within the bound of the iteration."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(30, 3)).astype(np.float32)
    attributes = {
        "coefficients": rng.normal(size=3 * 8).tolist(), "support_vectors": rng.normal(size=24).tolist(),
        "vectors_per_class": [2, 2, 2, 2], "rho": rng.normal(size=6).tolist(), "kernel_type": "RBF",
        "kernel_params": [0.5, 0.0, 0.0], "classlabels_ints": [4, 7, 1, 2],
    }  # fmt: skip
    a, b = (-np.abs(rng.normal(size=6))).tolist(), rng.normal(size=6).tolist()
    decisions = _run(_node("SVMClassifier", x, outputs=2, **attributes), x)[1]
    node = _node("SVMClassifier", x, outputs=2, **attributes, prob_a=a, prob_b=b)
    labels, found = _run(node, x)
    for row, p, label in zip(decisions, found, labels, strict=True):
        r, votes = np.zeros((4, 4)), np.zeros(4)
        for s, i, j, c, d in zip(row, *np.triu_indices(4, 1), a, b, strict=True):
            r[i, j] = 1 / (1 + np.exp(s * c + d))
            r[j, i] = 1 - r[i, j]
            votes[i if s > 0 else j] += 1
        np.testing.assert_allclose(p, _coupled(r), atol=5e-3)
        assert label == (4, 7, 1, 2)[votes.argmax()]


@pytest.mark.nightly
def test_probabilities_of_support_vectors_under_jax() -> None:
    """The iteration under jax.lax.while_loop ends where the host's does."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(30, 3)).astype(np.float32)
    node = _node(
        "SVMClassifier", x, outputs=2, coefficients=rng.normal(size=16).tolist(), vectors_per_class=[3, 2, 3],
        support_vectors=rng.normal(size=24).tolist(), rho=rng.normal(size=3).tolist(), kernel_type="RBF",
        kernel_params=[0.5, 0.0, 0.0], classlabels_ints=[4, 7, 1], prob_a=[-1.0, -2.0, -0.5], prob_b=[0.1, 0.0, 0.2],
    )  # fmt: skip
    found = _run(node, x)

    np.testing.assert_array_equal(_under_jax(node, x)[0], found[0])
    np.testing.assert_allclose(_under_jax(node, x)[1], found[1], atol=1e-5)


def test_distances_do_not_cancel() -> None:
    """Kernels of rows far from zero and near each other are right in float32."""
    rng = np.random.default_rng(0)
    vectors = (3000 + rng.normal(size=(5, 2))).astype(np.float32)
    x = (3000 + rng.normal(size=(4, 2))).astype(np.float32)
    node = _node(
        "SVMRegressor", x, n_supports=5, coefficients=[1.0] * 5, support_vectors=vectors.reshape(-1).tolist(),
        rho=[0.0], kernel_type="RBF", kernel_params=[1.0, 0.0, 0.0],
    )  # fmt: skip
    apart = ((x[:, None].astype(np.float64) - vectors) ** 2).sum(axis=-1)

    np.testing.assert_allclose(_run(node, x)[0][:, 0], np.exp(-apart).sum(axis=1), rtol=1e-5)


NUMBERS: Final = np.array([[1, 2], [3, 1]])
CASES: Final[Mapping[str, tuple[str, Any, dict[str, Any], Any]]] = {
    "words to numbers": (
        "LabelEncoder", np.array(["a", "c", "b"], object),
        {"keys_strings": ["a", "b", "a"], "values_int64s": [5, 6, 7]}, [5, -1, 6],
    ),
    "numbers to words": (
        "LabelEncoder", NUMBERS, {"keys_int64s": [1, 2], "values_strings": ["x", "y"], "default_string": "z"},
        [["x", "y"], ["z", "x"]],
    ),
    "numbers to numbers": (
        "LabelEncoder", NUMBERS, {"keys_int64s": [3, 1], "values_floats": [1.5, 2.5]}, [[2.5, 0.0], [1.5, 2.5]]
    ),
    "a key that is no number": (
        "LabelEncoder", np.array([np.nan, 2.0], np.float32),
        {"keys_floats": [2.0, float("nan")], "values_int64s": [4, 5]}, [5, 4],
    ),
    "categories": (
        "CategoryMapper", np.array(["u", "w"], object), {"cats_strings": ["u", "v"], "cats_int64s": [8, 9]}, [8, -1]
    ),
    "one hot": ("OneHotEncoder", NUMBERS, {"cats_int64s": [1, 2]}, [[[1, 0], [0, 1]], [[0, 0], [1, 0]]]),
    "one hot of words": (
        "OneHotEncoder", np.array(["q", "p"], object), {"cats_strings": ["p", "q"]}, [[0, 1], [1, 0]]
    ),
    "imputed": (
        "Imputer", np.array([[np.nan, 1.0], [2.0, np.nan]], np.float32),
        {"imputed_value_floats": [7.0, 8.0], "replaced_value_float": float("nan")}, [[7, 1], [2, 8]],
    ),
    "imputed integers": (
        "Imputer", NUMBERS, {"imputed_value_int64s": [9], "replaced_value_int64": 1}, [[9, 2], [3, 9]]
    ),
    "scaled": ("Scaler", NUMBERS, {"offset": [1.0, 0.0], "scale": [2.0, 0.5]}, [[0, 1], [4, 0.5]]),
    "divided by the largest": (
        "Normalizer", np.array([[2, -4], [0, 0]], np.float32), {"norm": "MAX"}, [[0.5, -1], [0, 0]]
    ),
    "above a threshold": ("Binarizer", np.array([[0.5, 2.0]]), {"threshold": 1.0}, [[0, 1]]),
    "joined": ("FeatureVectorizer", NUMBERS, {"inputdimensions": [3]}, [[1, 2, 0], [3, 1, 0]]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_features_and_categories(name: str) -> None:
    """Each operator by hand."""
    op, x, attributes, want = CASES[name]
    node = _node(op, x, **attributes)
    found = _run(node, x)[0]
    assert found.tolist() == want if found.dtype == STRING else (found == np.array(want)).all()


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_features_and_categories_under_jax(name: str) -> None:
    """Numbers give under jax.numpy what they give on the host."""
    op, x, attributes, _ = CASES[name]
    node = _node(op, x, **attributes)
    found = _run(node, x)[0]
    if x.dtype != STRING and found.dtype != STRING:
        np.testing.assert_array_equal(_under_jax(node, x)[0], found)


def test_unknown_categories_are_refused_where_the_node_says_so() -> None:
    """OneHotEncoder with zeros = 0 raises for the place of an unknown category, on any engine's behalf."""
    node = _node("OneHotEncoder", NUMBERS, cats_int64s=[1, 2], zeros=0)
    kernel = find_kernel(ML, "OneHotEncoder")
    assert kernel is not None
    assert "depends on the data" in str(kernel.why_dynamic(node))
    with pytest.raises(InputError, match=r"unknown category at \[1, 0\]"):
        _run(node, NUMBERS)


def test_columns_are_picked_by_index() -> None:
    """Of a vector one row comes, and an index out of range is an error."""
    x = np.array([1.0, 2.0, 3.0], np.float32)
    index = np.array([2, 0], np.int64)
    node = _node("ArrayFeatureExtractor", x, more=(index,))

    np.testing.assert_array_equal(_run(node, x, index)[0], [[3, 1]])
    with pytest.raises(InputError, match="outside 0 to 2"):
        host_kernel(node)([x, np.array([3, 0])])


def _map_model(op: str, key: np.dtype, value: np.dtype, **attributes: Any) -> XRTModule:
    x = Value("x", MapType(key, TensorType(value)))
    plain = {k: tuple(v) if isinstance(v, list) else v for k, v in attributes.items()}
    bare = Node(op, [x], [Value("y")], plain, domain=ML, version=since_version(op, ML, 3), name="n")
    y = Value("y", infer_types(bare)[0])
    return XRTModule(Graph([x], [y], [bare.replace(outputs=[y])], opsets={"": 18, ML: 3}))


def test_maps_are_arguments() -> None:
    """Dicts go in by position and by name; what is no dict, or has other keys, is an InputError."""
    words = _map_model("DictVectorizer", STRING, F32, string_vocabulary=["b", "c", "a"])
    np.testing.assert_array_equal(words({"a": 1.5, "b": 2.0}), [[2.0, 0.0, 1.5]])
    np.testing.assert_array_equal(words.run({"x": {"c": 4.0}})["y"], [[0.0, 4.0, 0.0]])
    with pytest.raises(InputError, match="takes a dict"):
        words(np.zeros(3, np.float32))
    with pytest.raises(InputError, match="3 is no str"):
        words({3: 1.0})

    dense = _map_model("CastMap", INT, F32)
    np.testing.assert_array_equal(dense({5: 1.5, 0: 2.0}), [[2.0, 1.5]])
    np.testing.assert_array_equal(dense({1: 3.0}), [[3.0]])
    sparse = _map_model("CastMap", INT, F32, map_form="SPARSE", max_map=3, cast_to="TO_INT64")
    np.testing.assert_array_equal(sparse({2: 7.9}), [[0, 0, 7]])
    with pytest.raises(InputError, match="max_map = 3"):
        sparse({3: 1.0})


def test_maps_are_results() -> None:
    """ZipMap gives a dict for each row, also as the graph's result, at every signature."""
    x = Value("x", TensorType(F32, (None, 2)))
    bare = Node("ZipMap", [x], [Value("y")], {"classlabels_strings": ("no", "yes")}, domain=ML, version=1, name="n")
    types = infer_types(bare)
    assert types == (SequenceType(MapType(STRING, TensorType(F32, ()))),)
    y = Value("y", types[0])
    module = XRTModule(Graph([x], [y], [bare.replace(outputs=[y])], opsets={"": 18, ML: 1}))

    assert module(np.array([[0.25, 0.75]], np.float32)) == [{"no": 0.25, "yes": 0.75}]
    assert module(np.zeros((3, 2), np.float32)) == [{"no": 0.0, "yes": 0.0}] * 3


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(20))
def test_ensembles_are_those_of_onnxruntime(seed: int) -> None:
    """Random ensembles give what ONNX Runtime gives."""
    ort = pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    rng = np.random.default_rng(seed)
    x = _rows_with_nan(rng)
    how = str(rng.choice(["SUM", "AVERAGE", "MIN", "MAX"]))
    modes = list(COMPARISONS) if seed % 2 else [str(rng.choice(list(COMPARISONS)))]
    a = _trees(rng, modes, 4, (lambda tree: [tree % 3]) if seed % 3 else (lambda tree: [0, 1, 2]))
    attributes = {**a, "n_targets": 3, "aggregate_function": how, "base_values": [0.5, 1.0, 1.5]}
    proto = onnx.helper.make_node("TreeEnsembleRegressor", ["x"], ["y"], domain=ML, **attributes)
    float32 = DTYPE_TO_ONNX[F32]
    graph = onnx.helper.make_graph(
        [proto], "g", [onnx.helper.make_tensor_value_info("x", float32, [None, 4])],
        [onnx.helper.make_tensor_value_info("y", float32, [None, 3])],
    )  # fmt: skip
    opsets = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid(ML, 3)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8)
    want = ort.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]

    np.testing.assert_allclose(XRTModule(model, engine="host")(x), want, atol=2e-6)

"""Trees: ensembles of decision trees, all rows and trees at once, a level at a time.

Source: TreeEnsembleClassifier, TreeEnsembleRegressor and TreeEnsemble of https://onnx.ai/onnx/operators/index_ai_onnx_ml.html.
Strategies under compilers: Nakandala et al., "A Tensor Compiler for Unified Machine Learning Prediction Serving", 2020
(traversal by gathers), and for small trees Lucchese et al., "QuickScorer", 2015: each leaf is a bit, each comparison
that fails clears the bits of the leaves it rules out, and the first bit left is the leaf.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from msgspec import Struct

from xrt_core.errors import ShapeError
from xrt_core.ir.graph import Node
from xrt_core.ir.tree_tables import AGGREGATES, TRANSFORMS, TreeTables, tree_tables
from xrt_core.kernels.class_scores import chosen, labels_of, transformed, two_classes
from xrt_core.kernels.namespace import is_jax, widen
from xrt_core.kernels.registry import OpContext, kernel

_BLOCK: Final = 32768
"""Ways that are followed at a time: their indices and values stay in a core's cache."""

_MANY: Final = 8
"""From so many targets on, the weights of a leaf are gathered together."""

_BITS: Final = 64
"""Leaves that a tree may have to be evaluated by bits."""


class Ensemble(Struct, frozen=True):
    """What a node's trees compute with.

    children [2 * nodes]: `no` and `yes` of each node. weights [leaves, targets]: sums of what each leaf gives; for
    minima and maxima, infinities where it gives nothing. target_of [trees]: the one target of each tree, where each has
    one: `weights` is then [leaves, 1]. bits: the tables of the evaluation by bits, where the trees are small. scored:
    the targets that leaves give something to. tests: see `_tests`.
    """

    tables: TreeTables
    children: np.ndarray
    weights: np.ndarray
    target_of: np.ndarray | None
    bits: Bits | None
    scored: np.ndarray
    tests: tuple[bool | np.ndarray, ...]


class Bits(Struct, frozen=True):
    """Trees as bits. feature, value, nan_yes, mask [comparisons, trees]: `mask` has the leaves that stay where the
    comparison fails; where a tree has fewer comparisons, masks of ones. leaf [trees, leaves]: in order of the bits.
    strict: they compare `<`.
    """

    strict: bool
    feature: np.ndarray
    value: np.ndarray
    nan_yes: np.ndarray
    mask: np.ndarray
    leaf: np.ndarray


@kernel("TreeEnsembleRegressor", domain="ai.onnx.ml")
def tree_ensemble_regressor(ctx: OpContext, x: Any) -> Any:
    """[rows, targets]: sum, average, minimum or maximum of the trees' weights, plus base values, transformed."""
    xp, node = ctx.xp, ctx.node
    count = int(ctx.attr("n_targets", 1))
    how = str(ctx.attr("aggregate_function", "SUM"))
    scores = _scores(ctx, x, _prepared(ctx, count, how), count, how)
    base = _base_values(node)
    if base.size:
        scores = scores + xp.asarray(base.astype(scores.dtype))
    transform = str(ctx.attr("post_transform", "NONE"))
    return transformed(xp, scores, transform).astype(np.float32)


@kernel("TreeEnsemble", domain="ai.onnx.ml")
def tree_ensemble(ctx: OpContext, x: Any) -> Any:
    """[rows, targets] in the dtype of `x`: sum, average, minimum or maximum of the trees' weights, transformed."""
    count, how = int(ctx.attr("n_targets", 1)), AGGREGATES[ctx.attr("aggregate_function", 1)]
    scores = _scores(ctx, x, _prepared(ctx, count, how), count, how)
    return transformed(ctx.xp, scores, TRANSFORMS[ctx.attr("post_transform", 0)]).astype(x.dtype)


@kernel("TreeEnsembleClassifier", domain="ai.onnx.ml", strings=True)
def tree_ensemble_classifier(ctx: OpContext, x: Any) -> Any:
    """Labels [rows] and scores [rows, classes]."""
    xp, node = ctx.xp, ctx.node
    labels = labels_of(ctx, "classlabels_int64s", "classlabels_strings")
    assert labels is not None  # by the limits of attributes
    count = max(len(labels), 2)
    ensemble = _prepared(ctx, count, "SUM")
    scores = _scores(ctx, x, ensemble, count, "SUM")
    base = _base_values(node).astype(scores.dtype)
    scored = ensemble.scored
    transform = str(ctx.attr("post_transform", "NONE"))
    if len(labels) <= 2 and scored.tolist() == [0]:  # one score for two classes
        score = scores[:, 0]
        if base.size:
            score = score + base[-1]
        positive = transform == "NONE" and bool((ensemble.tables.weights >= 0).all())  # a probability
        is_second = score > (0.5 if positive else 0)
        if len(labels) == 1:
            found = transformed(xp, score[:, None], transform)
            labels = np.array(["", labels[0]], object) if labels.dtype == object else np.array([0, labels[0]])
        else:
            found = two_classes(xp, score, transform, complement=positive)
        return chosen(xp, labels, is_second.astype(np.intp)), found.astype(np.float32)
    scores = scores[:, : len(labels)]
    if base.size:
        scores = scores + xp.asarray(base)
    ranked = scores
    if not base.size and len(scored) < len(labels):  # classes that no leaf scores are not chosen
        unscored = np.setdiff1d(np.arange(len(labels)), scored)
        penalty = np.zeros(len(labels), scores.dtype)
        penalty[unscored] = -np.inf
        ranked = scores + xp.asarray(penalty)
    index = xp.argmax(ranked, axis=1)
    return chosen(xp, labels, index), transformed(xp, scores, transform).astype(np.float32)


def _base_values(node: Node) -> np.ndarray:
    tensor: Any = node.attributes.get("base_values_as_tensor")
    if tensor is not None and np.size(tensor):
        return np.asarray(tensor).reshape(-1)
    return np.asarray(node.attributes.get("base_values") or (), np.float32)


def _prepared(ctx: OpContext, count: int, how: str) -> Ensemble:
    found: Ensemble = ctx.prepared(lambda node: _ensemble(node, count, how))
    return found


def _scores(ctx: OpContext, x: Any, ensemble: Ensemble, count: int, how: str) -> Any:
    """[rows, count]: what the leaves that rows reach give to each target, aggregated; 0 where nothing is given."""
    xp = ctx.xp
    tables = ensemble.tables
    x = widen(x)
    x = x if x.dtype.kind == "f" else x.astype(np.float32)
    x = x.reshape(1, -1) if x.ndim == 1 else x
    if x.shape[1] < tables.features:
        raise ShapeError(
            f"node {ctx.node.name!r}: nodes_featureids has feature {tables.features - 1}; the input has {x.shape[1]}"
        )
    columns = x.T if is_jax(xp) else xp.ascontiguousarray(x.T)
    if ensemble.bits is not None and is_jax(xp):
        leaf = _once(_by_bits(xp, ensemble.bits, columns))
    elif is_jax(xp):
        leaf = _once(_by_gathers(xp, ensemble, columns))
    else:
        leaf = _followed(xp, ensemble, columns)
    return _aggregated(xp, ensemble, leaf, count, how)


# --- tables ----------------------------------------------------------------------------------------------------------


def _ensemble(node: Node, count: int, how: str) -> Ensemble:
    tables = tree_tables(node.op_type, node.attributes)
    children = np.stack([tables.no, tables.yes], axis=1).reshape(-1)
    weights = tables.weights if tables.weights.dtype == np.float64 else tables.weights.astype(np.float32)
    bits, scored, tests = _bits(tables), np.unique(tables.targets), _tests(tables)
    if how in ("MIN", "MAX"):
        least = np.inf if how == "MIN" else -np.inf
        table = np.full((tables.leaves, count), least, weights.dtype)
        (np.minimum if how == "MIN" else np.maximum).at(table, (tables.owners, tables.targets), weights)
        return Ensemble(tables, children, table, None, bits, scored, tests)
    target_of = _target_of(tables) if count > 1 else np.zeros(len(tables.roots), np.intp)
    if target_of is not None:
        table = np.zeros((tables.leaves, 1), weights.dtype)
        np.add.at(table[:, 0], tables.owners, weights)
    else:
        table = np.zeros((tables.leaves, count), weights.dtype)
        np.add.at(table, (tables.owners, tables.targets), weights)
    return Ensemble(tables, children, table, target_of, bits, scored, tests)


def _tree_of(tables: TreeTables) -> np.ndarray:
    """The tree of each node, the last one for a node that several have, -1 for one that none reaches."""
    tree = np.full(len(tables.leaf), -1, np.intp)
    level, owner = tables.roots, np.arange(len(tables.roots))
    for _ in range(tables.depth + 1):
        tree[level] = owner
        inner = tables.leaf[level] < 0
        level, owner = level[inner], owner[inner]
        level, owner = np.concatenate([tables.yes[level], tables.no[level]]), np.concatenate([owner, owner])
        level, first = np.unique(level, return_index=True)
        owner = owner[first]
    return tree


def _target_of(tables: TreeTables) -> np.ndarray | None:
    """The one target of each tree; None where a tree has several, or shares a leaf."""
    tree = _tree_of(tables)[np.flatnonzero(tables.leaf >= 0)]  # of each leaf, by number
    owners = tree[tables.owners]
    target = np.full(len(tables.roots), -1, np.intp)
    target[owners] = tables.targets
    is_one = bool((target[owners] == tables.targets).all()) and len(np.unique(tables.roots)) == len(tables.roots)
    return np.maximum(target, 0) if is_one else None


def _bits(tables: TreeTables) -> Bits | None:
    """The tables of the evaluation by bits; None where a tree is too large, compares `==`, or shares nodes."""
    count = len(tables.leaf)
    if tables.equal.any() or (tables.strict != tables.strict[tables.roots[0]])[tables.leaf < 0].any():
        return None
    if not tables.depth or len(tables.roots) * 2 * _BITS < count:
        return None
    inner: list[list[tuple[int, int]]] = []
    leaves: list[list[int]] = []
    yes, no, leaf = tables.yes.tolist(), tables.no.tolist(), tables.leaf.tolist()
    seen = 0
    for root in tables.roots.tolist():
        cleared: list[tuple[int, int]] = []
        order: list[int] = []
        stack: list[tuple[int, int, int]] = [(root, -1, 0)]  # (node, -1, _) to visit; (node, bit, _) after its `yes`
        while stack:
            at, first, _ = stack.pop()
            if first >= 0:  # the leaves under `yes` are those since `first`
                under = ((1 << len(order)) - 1) & ~((1 << first) - 1)
                cleared.append((at, under))
            elif leaf[at] >= 0:
                order.append(leaf[at])
                if len(order) > _BITS:
                    return None
            else:
                stack.append((no[at], -1, 0))
                stack.append((at, len(order), 0))
                stack.append((yes[at], -1, 0))
        inner.append(cleared)
        leaves.append(order)
        seen += len(cleared) + len(order)
        if seen > count:
            return None
    width = 32 if max(map(len, leaves)) <= 32 else 64
    dtype = np.uint32 if width == 32 else np.uint64
    ones = (1 << width) - 1
    trees, most = len(inner), max(map(len, inner))
    feature = np.zeros((most, trees), np.int32)
    value = np.full((most, trees), np.inf, tables.value.dtype)
    nan_yes = np.zeros((most, trees), np.bool_)
    mask = np.full((most, trees), ones, dtype)
    numbered = np.zeros((trees, max(map(len, leaves))), np.int32)
    for t, (cleared, order) in enumerate(zip(inner, leaves, strict=True)):
        places = [at for at, _ in cleared]
        n = len(places)
        feature[:n, t], value[:n, t] = tables.feature[places], tables.value[places]
        nan_yes[:n, t] = tables.nan_yes[places]
        mask[:n, t] = np.array([ones & ~m for _, m in cleared], dtype)
        numbered[t, : len(order)] = order
    return Bits(bool(tables.strict[tables.roots[0]]), feature, value, nan_yes, mask, numbered)


def _tests(tables: TreeTables) -> tuple[bool | np.ndarray, ...]:
    """`equal`, `strict` and `nan_yes` of the nodes: a bool where they agree, else arrays."""
    inner = tables.leaf < 0
    found: list[bool | np.ndarray] = []
    for flag in (tables.equal, tables.strict, tables.nan_yes):
        some = bool(flag[inner].any())
        found.append(some if not some or bool(flag[inner].all()) else flag)
    return tuple(found)


def _on(xp: Any, tests: tuple[bool | np.ndarray, ...]) -> list[Any]:
    return [t if isinstance(t, bool) else xp.asarray(t) for t in tests]


def _goes(xp: Any, x: Any, value: Any, equal: Any, strict: Any, nan_yes: Any, has_nan: bool = True) -> Any:
    """Whether `x` takes the branch `yes`. equal, strict, nan_yes: of its node, a bool or an array."""
    if isinstance(strict, bool):
        goes = x < value if strict else x <= value
    else:
        goes = xp.where(strict, x < value, x <= value)
    if not isinstance(equal, bool):
        goes = xp.where(equal, x == value, goes)
    elif equal:
        goes = x == value
    return goes | (xp.isnan(x) & nan_yes) if has_nan and nan_yes is not False else goes


# --- strategies ------------------------------------------------------------------------------------------------------


def _followed(xp: Any, ensemble: Ensemble, columns: Any) -> Any:
    """The leaf [trees, rows] that each row reaches; ways that have ended are left out every other level."""
    t = ensemble.tables
    rows = columns.shape[1]
    values, feature = t.value, t.feature * rows
    children, leaf, roots = ensemble.children, t.leaf, t.roots
    flat = columns.reshape(-1)
    has_nan = bool(t.nan_yes.any()) and bool(xp.isnan(flat).any())
    if xp is not np:
        values, feature, children, leaf, roots = (xp.asarray(a) for a in (values, feature, children, leaf, roots))
    tests = _on(xp, ensemble.tests)
    out = xp.empty((len(t.roots), rows), np.intp)
    wide = min(rows, _BLOCK)
    tall = max(_BLOCK // max(wide, 1), 1)
    for first in range(0, len(t.roots), tall):
        for start in range(0, rows, wide):
            part = out[first : first + tall, start : start + wide]
            at = xp.repeat(roots[first : first + tall], part.shape[1])
            row = xp.tile(xp.arange(start, start + part.shape[1]), part.shape[0])
            alive = None  # places in `at` of the whole block of the ways that go on
            done = at
            for level in range(t.depth):
                where = feature.take(at)
                where += row
                x = flat.take(where)
                value = values.take(at)
                equal, strict, nan_yes = (f if isinstance(f, bool) else f.take(at) for f in tests)
                goes = _goes(xp, x, value, equal, strict, nan_yes, has_nan)
                at = at << 1
                at += goes
                at = children.take(at)
                if level % 2 and level + 1 < t.depth:
                    if alive is None:
                        done = at
                    else:
                        done[alive] = at
                    going = xp.flatnonzero(leaf.take(at) < 0)
                    if not going.size:
                        alive = going
                        at = at.take(going)
                        break
                    alive = going if alive is None else alive.take(going)
                    at, row = at.take(going), row.take(going)
            if alive is None:
                done = at
            elif alive.size:
                done[alive] = at
            part[...] = leaf.take(done).reshape(part.shape)
    return out


def _once(leaf: Any) -> Any:
    """The leaves, computed before what reads them: a compiler that fuses would compute them again for each target."""
    import jax

    return jax.lax.optimization_barrier(leaf)  # type: ignore[no-untyped-call]


def _by_gathers(xp: Any, ensemble: Ensemble, columns: Any) -> Any:
    """The leaf [trees, rows], every way followed as many levels as the deepest tree has."""
    import jax

    t = ensemble.tables
    rows = columns.shape[1]
    flat = columns.reshape(-1)
    feature, value, children, leaf = (
        xp.asarray(a) for a in (t.feature.astype(np.int32), t.value, ensemble.children.astype(np.int32), t.leaf)
    )
    row = xp.arange(rows, dtype=np.int32)[None, :]
    tests = _on(xp, ensemble.tests)

    def take(a: Any, index: Any) -> Any:
        return xp.take(a, index, mode="clip")

    def step(_: Any, at: Any) -> Any:
        x, limit = take(flat, take(feature, at) * rows + row), take(value, at)
        equal, strict, nan_yes = (f if isinstance(f, bool) else take(f, at) for f in tests)
        goes = _goes(xp, x, limit, equal, strict, nan_yes)
        return take(children, 2 * at + goes)

    at = xp.broadcast_to(xp.asarray(t.roots.astype(np.int32))[:, None], (len(t.roots), rows))
    return take(leaf, jax.lax.fori_loop(0, t.depth, step, at))


def _by_bits(xp: Any, bits: Bits, columns: Any) -> Any:
    """The leaf [trees, rows]: the first bit that no failed comparison clears."""
    import jax

    ones = xp.asarray(np.array(np.iinfo(bits.mask.dtype).max, bits.mask.dtype))
    left = xp.broadcast_to(ones, (bits.mask.shape[1], columns.shape[1]))
    for feature, value, nan_yes, mask in zip(bits.feature, bits.value, bits.nan_yes, bits.mask, strict=True):
        x = xp.take(columns, xp.asarray(feature), axis=0, mode="clip")
        nan_goes = xp.asarray(nan_yes)[:, None] if nan_yes.any() else False
        goes = _goes(xp, x, xp.asarray(value)[:, None], False, bits.strict, nan_goes)
        left = left & xp.where(goes, ones, xp.asarray(mask)[:, None])
    first = jax.lax.population_count((left & -left) - 1).astype(np.int32)
    index = xp.asarray((np.arange(len(bits.leaf)) * bits.leaf.shape[1]).astype(np.int32))[:, None] + first
    return xp.take(xp.asarray(bits.leaf.reshape(-1)), index, mode="clip")


def _aggregated(xp: Any, ensemble: Ensemble, leaf: Any, count: int, how: str) -> Any:
    """[rows, count] from the leaf [trees, rows]."""
    weights = xp.asarray(ensemble.weights)
    options = {"mode": "clip"} if is_jax(xp) else {}
    if how in ("MIN", "MAX"):
        found = xp.take(weights, leaf, axis=0, **options)
        found = xp.min(found, axis=0) if how == "MIN" else xp.max(found, axis=0)
        return xp.where(xp.isinf(found), xp.zeros_like(found), found)
    if ensemble.target_of is not None:
        given = xp.take(weights.reshape(-1), leaf, **options)
        if count == 1 or not ensemble.target_of.any():
            total = xp.sum(given, axis=0)[:, None]
            rest = xp.zeros((total.shape[0], count - 1), total.dtype)
            scores = xp.concatenate([total, rest], axis=1) if count > 1 else total
        else:
            members = [np.flatnonzero(ensemble.target_of == i) for i in range(count)]
            scores = xp.stack([xp.sum(given[xp.asarray(m)], axis=0) for m in members], axis=1)
    elif count < _MANY:
        columns = [xp.sum(xp.take(weights[:, i], leaf, **options), axis=0) for i in range(count)]
        scores = xp.stack(columns, axis=1)
    else:
        scores = xp.sum(xp.take(weights, leaf, axis=0, **options), axis=0)
    return scores / np.asarray(len(ensemble.tables.roots), scores.dtype) if how == "AVERAGE" else scores

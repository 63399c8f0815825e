"""Tree tables: the nodes of a tree ensemble of ai.onnx.ml as arrays, read from the attributes of a node and checked.

Every comparison is brought into one of three forms, `x <= value`, `x < value` and `x == value`, by exchanging branches
and, for the set of a member test, by a chain of `==` nodes.

Source: TreeEnsembleClassifier and TreeEnsembleRegressor (versions 1 and 3) and TreeEnsemble (version 5),
https://onnx.ai/onnx/operators/index_ai_onnx_ml.html.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from msgspec import Struct

from xrt_core.ir.graph import Attribute
from xrt_core.ir.long_list import LongList

AGGREGATES: Final = ("AVERAGE", "SUM", "MIN", "MAX")
"""Aggregate functions, in the order in which TreeEnsemble numbers them."""

TRANSFORMS: Final = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")
"""Transforms of scores, in the order in which TreeEnsemble numbers them."""

_MODES: Final = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ", "MEMBER", "LEAF")
_LEQ, _LT, _GTE, _GT, _EQ, _NEQ, _MEMBER, _LEAF = range(8)


class TreeTables(Struct, frozen=True):
    """A tree ensemble. The nodes of all trees have one numbering; a leaf is its own child on both sides.

    feature [nodes] (intp), value [nodes]: what an inner node compares; yes, no [nodes] (intp): where it leads.
    equal, strict [nodes] (bool): it compares `==`, or `<`, and not `<=`. nan_yes [nodes] (bool): NaN takes the branch
        `yes`.
    roots [trees] (intp). depth: comparisons on the longest way. leaf [nodes] (intp): a leaf's number, -1 elsewhere.
    targets, weights, owners [contributions]: what a leaf (its number in `owners`) gives to which target.
    leaves: how many there are. features: how many features an input must have at least.
    """

    feature: np.ndarray
    value: np.ndarray
    yes: np.ndarray
    no: np.ndarray
    equal: np.ndarray
    strict: np.ndarray
    nan_yes: np.ndarray
    roots: np.ndarray
    depth: int
    leaf: np.ndarray
    leaves: int
    owners: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    features: int


class TreeFacts(Struct, frozen=True):
    """What the tables of a tree ensemble ask of the rest of the node: features of the input and targets, at least."""

    features: int
    targets: int


class _Columns(Struct, frozen=True):
    """What the attributes say, checked, before comparisons are brought into one form: as `TreeTables`, with the modes
    by number, a target for each entry of `owners`, which are nodes, and `missing` empty where no attribute gives it."""

    feature: np.ndarray
    value: np.ndarray
    modes: np.ndarray
    missing: np.ndarray
    yes: np.ndarray
    no: np.ndarray
    roots: np.ndarray
    owners: np.ndarray
    targets: np.ndarray
    weights: np.ndarray

    def check(self) -> TreeFacts:
        """Raise ValueError for a number below 0, and for a cycle."""
        inner = np.flatnonzero(self.modes != _LEAF)
        features, targets = self.feature[inner], self.targets
        if features.size and (least := int(features.min())) < 0:
            raise ValueError(f"nodes_featureids has {least}; features are numbered from 0")
        if targets.size and (least := int(targets.min())) < 0:
            raise ValueError(f"the ids of targets have {least}; targets are numbered from 0")
        if not all((a[inner] > inner).all() for a in (self.yes, self.no)):  # else what leads to a node is before it
            _depth(self.yes, self.no, self.modes == _LEAF)
        return TreeFacts(*(int(a.max()) + 1 if a.size else 0 for a in (features, targets)))


class _Known(Struct, frozen=True):
    attributes: Mapping[str, Attribute]  # held, so that its identity is not given away
    facts: TreeFacts | str
    tables: TreeTables | None


_REMEMBERED: Final = 8
_HELD: Final = 1 << 16
"""Nodes up to which tables are remembered, and not read once more for a kernel."""
_known: OrderedDict[tuple[str, int], _Known] = OrderedDict()
_lock = threading.Lock()


def tree_facts(op_type: str, attributes: Mapping[str, Attribute]) -> TreeFacts:
    """What the tables of a node of TreeEnsemble, TreeEnsembleClassifier or TreeEnsembleRegressor ask for.

    Raises ValueError, naming the attribute, for tables that contradict each other, and for trees with a cycle. The
    last few results are remembered by the identity of `attributes`.
    """
    key = (op_type, id(attributes))
    with _lock:
        found = _known.get(key)
    if found is None:
        found = _examined(op_type, attributes)
        with _lock:
            _known[key] = found
            while len(_known) > _REMEMBERED:
                _known.popitem(last=False)
    if isinstance(found.facts, str):
        raise ValueError(found.facts)
    return found.facts


def _examined(op_type: str, attributes: Mapping[str, Attribute]) -> _Known:
    facts = None if op_type == "TreeEnsemble" else _facts_by_parts(op_type, attributes)
    if facts is not None:
        return _Known(attributes, facts, None)
    try:
        columns = _columns(op_type, attributes)
        facts = columns.check()
    except ValueError as e:
        return _Known(attributes, str(e), None)
    return _Known(attributes, facts, _tables(columns, facts) if len(columns.modes) <= _HELD else None)


def tree_tables(op_type: str, attributes: Mapping[str, Attribute]) -> TreeTables:
    """The tables of a node of TreeEnsemble, TreeEnsembleClassifier or TreeEnsembleRegressor.

    Raises ValueError as `tree_facts` does. Those of large ensembles are read anew at every call.
    """
    with _lock:
        found = _known.get((op_type, id(attributes)))
    if found is not None and found.tables is not None:
        return found.tables
    columns = _columns(op_type, attributes)
    return _tables(columns, columns.check())


_PART: Final = 1 << 15
"""Nodes that are looked at together: what is made of them stays in a core's cache."""


def _facts_by_parts(op_type: str, attributes: Mapping[str, Attribute]) -> TreeFacts | None:
    """As `_Columns.check`, for a large ensemble of version 1 or 3 as converters write it, without copies of its tables:
    each tree's nodes stand together, are counted from 0 and lead to later ones, so that there is no cycle.

    None for any other, and for one that is wrong, of which `_read` says what.
    """
    names = attributes.get("nodes_modes")
    if not isinstance(names, LongList) or len(names) <= _HELD or not set(names.texts) <= {*_MODES} - {"MEMBER"}:
        return None
    count, prefix = len(names), "class" if op_type == "TreeEnsembleClassifier" else "target"
    trees, nodes, features, yes, no = (
        _numbers(attributes, f"nodes_{n}", np.int64)
        for n in ("treeids", "nodeids", "featureids", "truenodeids", "falsenodeids")
    )
    sizes = {a.size for a in (trees, nodes, features, yes, no, _numbers(attributes, "nodes_values", np.float32))}
    missing = _numbers(attributes, "nodes_missing_value_tracks_true", np.int64)
    leaf_trees, leaf_nodes, ids = (
        _numbers(attributes, f"{prefix}_{n}", np.int64) for n in ("treeids", "nodeids", "ids")
    )
    weights = _numbers(attributes, f"{prefix}_weights", np.float32)
    if sizes != {count} or missing.size not in (0, count):
        return None
    if {a.size for a in (leaf_trees, leaf_nodes, ids)} != {weights.size}:
        return None
    firsts = np.concatenate([[0], np.flatnonzero(trees[1:] != trees[:-1]) + 1])
    lengths, numbers = np.diff(np.append(firsts, count)), trees[firsts].astype(np.int64)
    low, high = int(numbers.min()), int(numbers.max())
    if high - low >= _SPAN or len(np.unique(numbers)) != len(numbers):
        return None
    is_inner = names.array != (names.texts.index("LEAF") if "LEAF" in names.texts else len(names.texts))
    used = _inner_nodes_fit(firsts, lengths, nodes, (yes, no), features, is_inner)
    if used is None:
        return None
    start, length = np.zeros((2, high - low + 1), np.int64)
    start[numbers - low], length[numbers - low] = firsts, lengths
    given = 0
    for i in range(0, weights.size, _PART):
        part = slice(i, i + _PART)
        tree, node, target = leaf_trees[part].astype(np.int64), leaf_nodes[part], ids[part]
        if int(tree.min()) < low or int(tree.max()) > high or int(node.min()) < 0:
            return None
        tree -= low
        if not (node < length[tree]).all():
            return None
        kept = target[~is_inner[start[tree] + node]]  # a weight at an inner node is never reached
        if kept.size:
            if int(kept.min()) < 0:
                return None
            given = max(given, int(kept.max()) + 1)
    return TreeFacts(used, given)


def _inner_nodes_fit(
    firsts: np.ndarray,
    lengths: np.ndarray,
    nodes: np.ndarray,
    children: Sequence[np.ndarray],
    features: np.ndarray,
    is_inner: np.ndarray,
) -> int | None:
    """How many features the inner nodes ask for; None where a tree is not as `_facts_by_parts` says. firsts, lengths:
    [trees]."""
    used, tree = 0, 0
    while tree < len(firsts):
        last = max(int(np.searchsorted(firsts, firsts[tree] + _PART)), tree + 1)
        size = lengths[tree:last]
        part = slice(int(firsts[tree]), int(firsts[last - 1] + lengths[last - 1]))
        number = np.arange(part.stop - part.start) - np.repeat(firsts[tree:last] - part.start, size)
        if not (nodes[part] == number).all():
            return None
        size, inner = np.repeat(size, size), is_inner[part]
        for child in children:
            to = child[part]
            if not (((to > number) & (to < size)) | ~inner).all():
                return None
        read = features[part][inner]
        if read.size:
            if int(read.min()) < 0:
                return None
            used = max(used, int(read.max()) + 1)
        tree = last
    return used


def _columns(op_type: str, attributes: Mapping[str, Attribute]) -> _Columns:
    return _read_v5(attributes) if op_type == "TreeEnsemble" else _read(op_type, attributes)


def _numbers(attributes: Mapping[str, Attribute], name: str, dtype: Any) -> np.ndarray:
    """The attribute as a flat array, empty where it is not given; its form as a tensor comes first. Integers of a long
    list may be of 32 bits."""
    tensor: Any = attributes.get(f"{name}_as_tensor")
    if tensor is not None and np.size(tensor):
        return np.asarray(tensor).reshape(-1)
    found: Any = attributes.get(name)
    if isinstance(found, LongList):
        return found.array
    return np.zeros(0, dtype) if found is None else np.asarray(found, dtype).reshape(-1)


def _same_length(sizes: Mapping[str, int], count: int, of: str) -> None:
    for name, size in sizes.items():
        if size != count:
            raise ValueError(f"{name} has {size} entries; {of} has {count}, and they must agree")


def _read(op_type: str, attributes: Mapping[str, Attribute]) -> _Columns:
    """Versions 1 and 3: nodes are named by (tree, node)."""
    prefix = "class" if op_type == "TreeEnsembleClassifier" else "target"
    ints = {n: _numbers(attributes, f"nodes_{n}", np.int64)
            for n in ("treeids", "nodeids", "featureids", "truenodeids", "falsenodeids")}  # fmt: skip
    values = _numbers(attributes, "nodes_values", np.float32)
    names: Any = attributes.get("nodes_modes") or ()
    count = len(names)
    if not count:
        raise ValueError(f"nodes_modes is empty; {op_type} needs at least one node")
    _same_length({**{f"nodes_{n}": a.size for n, a in ints.items()}, "nodes_values": values.size}, count, "nodes_modes")
    missing = _numbers(attributes, "nodes_missing_value_tracks_true", np.int64)
    if missing.size:
        _same_length({"nodes_missing_value_tracks_true": missing.size}, count, "nodes_modes")
    modes = _modes(names)
    trees, index = _numbered(ints["treeids"], ints["nodeids"])
    inner = modes != _LEAF
    yes, no = (
        _children(index, ints["treeids"], ints[f"{which}nodeids"], inner, f"nodes_{which}nodeids")
        for which in ("true", "false")
    )
    where = {n: _numbers(attributes, f"{prefix}_{n}", np.int64) for n in ("treeids", "nodeids", "ids")}
    weights = _numbers(attributes, f"{prefix}_weights", np.float32)
    _same_length({f"{prefix}_{n}": a.size for n, a in where.items()}, weights.size, f"{prefix}_weights")
    owners = index(where["treeids"], where["nodeids"])
    if owners.size and owners.min() < 0:
        i = int(np.flatnonzero(owners < 0)[0])
        raise ValueError(
            f"{prefix}_nodeids has node {where['nodeids'][i]} of tree {where['treeids'][i]}, which is not among the "
            "nodes"
        )
    targets, kept = where["ids"], ~inner[owners]  # a weight at an inner node is never reached
    if not kept.all():
        owners, targets, weights = owners[kept], targets[kept], weights[kept]
    roots = _roots(ints["treeids"], trees, yes, no, inner)
    return _Columns(ints["featureids"], values, modes, missing, yes, no, roots, owners, targets, weights)


def _modes(names: Any) -> np.ndarray:
    codes: dict[Any, int] = {name: i for i, name in enumerate(_MODES) if name != "MEMBER"}
    try:
        if isinstance(names, LongList):
            return np.asarray(np.array([codes[name] for name in names.texts], np.int8)[names.array])
        return np.fromiter((codes[name] for name in names), np.int8, len(names))
    except KeyError as e:
        raise ValueError(f"nodes_modes has {e.args[0]!r}; it allows {', '.join(codes)}") from None


def _numbered(trees: np.ndarray, nodes: np.ndarray) -> tuple[np.ndarray, Any]:
    """The trees there are, in the order of their first node; and a function from (tree, node) to the place among the
    nodes, -1 for what is not there. The tree None: each node's own."""
    found = _in_blocks(trees, nodes)
    if found is not None:
        return found
    trees, nodes = trees.astype(np.int64), nodes.astype(np.int64)
    order = np.lexsort((nodes, trees))
    t, n = trees[order], nodes[order]
    twice = np.flatnonzero((t[1:] == t[:-1]) & (n[1:] == n[:-1]))
    if twice.size:
        i = int(twice[0])
        raise ValueError(f"nodes_nodeids has node {n[i]} of tree {t[i]} twice")
    ids, first = np.unique(trees, return_index=True)
    low, high = int(nodes.min()), int(nodes.max())
    span = high - low + 1
    if span > (1 << 40):
        raise ValueError(f"nodes_nodeids goes from {low} to {high}; numbers of nodes must lie closer together")
    keys = np.searchsorted(ids, t) * span + (n - low)

    def place(tree: np.ndarray | None, node: np.ndarray) -> np.ndarray:
        tree = trees if tree is None else tree
        at = np.minimum(np.searchsorted(ids, tree), len(ids) - 1)
        valid = (ids[at] == tree) & (node >= low) & (node <= high)
        wanted = at * span + np.where(valid, node - low, 0)
        found = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        return np.where(valid & (keys[found] == wanted), order[found], -1)

    return ids[np.argsort(first)], place


_SPAN: Final = 1 << 20
"""Numbers that the trees of an ensemble may be apart to be looked up in a table."""


def _in_blocks(trees: np.ndarray, nodes: np.ndarray) -> tuple[np.ndarray, Any] | None:
    """As `_numbered`, where each tree's nodes stand together and are counted from 0, as converters write them; None
    where they do not."""
    changes = np.flatnonzero(trees[1:] != trees[:-1]) + 1
    starts = np.concatenate([[0], changes])
    ids = trees[starts]
    low, high = int(ids.min()), int(ids.max())
    if high - low >= _SPAN or len(np.unique(ids)) != len(ids) or nodes[starts].any() or nodes.min() < 0:
        return None
    steps = nodes[1:] - nodes[:-1] == 1
    steps[changes - 1] = True
    if not steps.all():
        return None
    index = np.int32 if len(nodes) < 1 << 30 else np.int64
    none = len(ids)  # the number of a tree that is not there, which has no nodes
    sizes: Any = np.diff(np.append(starts, [len(nodes), len(nodes)])).astype(index)
    starts = np.append(starts, 0).astype(index)
    numbers = np.full(high - low + 1, none, index)
    numbers[ids.astype(np.int64) - low] = np.arange(none)

    def place(tree: np.ndarray | None, node: np.ndarray) -> np.ndarray:
        if tree is None:
            first, size = np.repeat(starts, sizes), np.repeat(sizes, sizes)
        elif not node.size or (low <= int(tree.min()) and int(tree.max()) <= high):
            at = numbers[tree.astype(index) - low]
            first, size = starts[at], sizes[at]
        else:
            inside = np.greater_equal(tree, low) & np.less_equal(tree, high)
            at = np.where(inside, numbers[np.where(inside, tree, low).astype(np.int64) - low], none)
            first, size = starts[at], sizes[at]
        valid = np.less(node, size)
        if node.size and int(node.min()) < 0:
            valid &= np.greater_equal(node, 0)
        if valid.all():
            return np.asarray(np.add(first, node, dtype=index))
        return np.where(valid, first + np.where(valid, node, 0), -1).astype(index)

    return ids, place


def _children(place: Any, trees: np.ndarray, named: np.ndarray, inner: np.ndarray, attribute: str) -> np.ndarray:
    found = place(None, named)
    lost = np.flatnonzero(inner & (found < 0))
    if lost.size:
        i = int(lost[0])
        raise ValueError(f"{attribute} leads to node {named[i]} of tree {trees[i]}, which is not among the nodes")
    return np.where(inner, found, np.arange(len(named), dtype=found.dtype))


def _roots(treeids: np.ndarray, trees: np.ndarray, yes: np.ndarray, no: np.ndarray, inner: np.ndarray) -> np.ndarray:
    """The first node of each tree that no other node leads to."""
    reached = np.zeros(len(yes), np.bool_)
    places = np.flatnonzero(inner)
    reached[yes.take(places)] = True
    reached[no.take(places)] = True
    candidates = np.flatnonzero(~reached)
    ids, first = np.unique(treeids[candidates], return_index=True)
    if len(ids) != len(trees):
        lost = sorted(set(trees.tolist()) - set(ids.tolist()))[0]
        raise ValueError(f"nodes_truenodeids and nodes_falsenodeids make a cycle in tree {lost}: it has no root")
    roots = dict(zip(ids.tolist(), candidates[first].tolist(), strict=True))
    return np.array([roots[t] for t in trees.tolist()], np.intp)


def _read_v5(attributes: Mapping[str, Attribute]) -> _Columns:
    """Version 5: inner nodes and leaves have tables of their own."""
    roots = _numbers(attributes, "tree_roots", np.int64)
    splits: Any = attributes.get("nodes_splits")
    modes: Any = attributes.get("nodes_modes")
    weights: Any = attributes.get("leaf_weights")
    splits, modes, weights = (np.asarray(a if a is not None else ()).reshape(-1) for a in (splits, modes, weights))
    ints = {n: _numbers(attributes, n, np.int64)
            for n in ("nodes_featureids", "nodes_truenodeids", "nodes_falsenodeids", "nodes_trueleafs",
                      "nodes_falseleafs")}  # fmt: skip
    ids = _numbers(attributes, "leaf_targetids", np.int64)
    count = modes.size
    if not count or not roots.size:
        raise ValueError(f"{'nodes_modes' if not count else 'tree_roots'} is empty; TreeEnsemble needs a node")
    _same_length({**{n: a.size for n, a in ints.items()}, "nodes_splits": splits.size}, count, "nodes_modes")
    _same_length({"leaf_targetids": ids.size}, weights.size, "leaf_weights")
    missing = _numbers(attributes, "nodes_missing_value_tracks_true", np.int64)
    if missing.size:
        _same_length({"nodes_missing_value_tracks_true": missing.size}, count, "nodes_modes")
    modes = modes.astype(np.int64)
    if ((modes < 0) | (modes > _MEMBER)).any():
        raise ValueError(f"nodes_modes has {modes[(modes < 0) | (modes > _MEMBER)][0]}; it allows 0 to 6")
    leaves = weights.size
    children = []
    for which in ("true", "false"):
        to, is_leaf = ints[f"nodes_{which}nodeids"], ints[f"nodes_{which}leafs"] != 0
        bad = np.flatnonzero((to < 0) | (to >= np.where(is_leaf, leaves, count)))
        if bad.size:
            kind, most = ("leaf", leaves) if is_leaf[bad[0]] else ("node", count)
            raise ValueError(f"nodes_{which}nodeids leads to {kind} {to[bad[0]]}; there are {most}")
        children.append(np.where(is_leaf, to + count, to))
    out = np.flatnonzero((roots < 0) | (roots >= count))
    if out.size:
        raise ValueError(f"tree_roots has node {roots[out[0]]}; there are {count}")
    members: Any = attributes.get("membership_values")
    value, feature = np.asarray(splits), ints["nodes_featureids"]
    flags = missing if missing.size else np.zeros(count, np.int64)
    yes, no = (np.concatenate([c, np.arange(count, count + leaves)]) for c in children)
    kinds = np.concatenate([modes, np.full(leaves, _LEAF)])
    value = np.concatenate([value, np.zeros(leaves, value.dtype)])
    feature = np.concatenate([feature, np.zeros(leaves, np.int64)])
    flags = np.concatenate([flags, np.zeros(leaves, np.int64)])
    if (modes == _MEMBER).any():
        value, feature, flags, yes, no, kinds = _chains(value, feature, flags, yes, no, kinds, members)
    owners = np.arange(count, count + leaves)
    return _Columns(feature, value, kinds, flags, yes, no, roots.astype(np.intp), owners, ids, weights)


def _chains(
    value: np.ndarray, feature: np.ndarray, flags: np.ndarray, yes: np.ndarray, no: np.ndarray, kinds: np.ndarray,
    members: Any,
) -> tuple[np.ndarray, ...]:  # fmt: skip
    """The tables with a chain of `==` nodes for each member test; sets stand one after another, NaN ends each."""
    flat = np.asarray(members if members is not None else ()).reshape(-1)
    ends = np.flatnonzero(np.isnan(flat))
    places = np.flatnonzero(kinds == _MEMBER)
    if len(ends) != len(places) or (flat.size and not np.isnan(flat[-1])):
        raise ValueError(
            f"membership_values has {len(ends)} sets, each ends with NaN; nodes_modes has {len(places)} 6s"
        )
    tables = [value.tolist(), feature.tolist(), flags.tolist(), yes.tolist(), no.tolist(), kinds.tolist()]
    start = 0
    for place, end in zip(places.tolist(), ends.tolist(), strict=True):
        found = flat[start:end].tolist()
        start = end + 1
        rest, at = tables[4][place], place
        tables[5][place], tables[0][place] = _EQ, found[0] if found else np.nan
        for v in found[1:]:
            fresh = len(tables[0])
            tables[4][at] = fresh
            for column, entry in zip(tables, (v, tables[1][place], tables[2][place], tables[3][place], rest, _EQ),
                                     strict=True):  # fmt: skip
                column.append(entry)
            at = fresh
    dtypes = (value.dtype, feature.dtype, flags.dtype, yes.dtype, no.dtype, kinds.dtype)
    return tuple(np.array(c, t) for c, t in zip(tables, dtypes, strict=True))


def _tables(columns: _Columns, facts: TreeFacts) -> TreeTables:
    c = columns
    modes, missing, value, yes, no = c.modes, c.missing, c.value, c.yes, c.no
    is_leaf = modes == _LEAF
    swap = (modes == _GTE) | (modes == _GT) | (modes == _NEQ)
    nan_yes = (modes == _NEQ) | (missing.astype(np.bool_) if missing.size else False)
    nan_yes = np.where(swap, ~nan_yes, nan_yes) & ~is_leaf
    yes, no = np.where(swap, no, yes).astype(np.intp), np.where(swap, yes, no).astype(np.intp)
    leaf = np.full(len(modes), -1, np.intp)
    places = np.flatnonzero(is_leaf)
    leaf[places] = np.arange(len(places))
    return TreeTables(
        np.where(is_leaf, 0, c.feature).astype(np.intp), np.where(is_leaf, np.asarray(0, value.dtype), value), yes, no,
        (modes == _EQ) | (modes == _NEQ), (modes == _LT) | (modes == _GTE), nan_yes, c.roots,
        _depth(yes, no, is_leaf), leaf, len(places), leaf[c.owners], c.targets, c.weights, facts.features,
    )  # fmt: skip


def _depth(yes: np.ndarray, no: np.ndarray, is_leaf: np.ndarray) -> int:
    """The longest way, in comparisons. Raises ValueError where there is a cycle.

    Source: A. B. Kahn, "Topological sorting of large networks", 1962, a level at a time.
    """
    inner = np.flatnonzero(~is_leaf)
    waiting = np.bincount(np.concatenate([yes[inner], no[inner]]), minlength=len(yes))
    level = np.flatnonzero(waiting == 0)
    are_trees = not (waiting > 1).any()  # every node is reached once, right after what leads to it
    left, depth = len(yes), 0
    while level.size:
        left -= level.size
        inner = level[~is_leaf[level]]
        depth += bool(inner.size)
        children = np.concatenate([yes[inner], no[inner]])
        if are_trees:
            level = children
            continue
        children, times = np.unique(children, return_counts=True)
        waiting[children] -= times
        level = children[waiting[children] == 0]
    if left:
        raise ValueError("nodes_truenodeids and nodes_falsenodeids make a cycle")
    return depth

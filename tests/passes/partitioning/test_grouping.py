"""Free groups against their definition, contractions against theirs, and sets that stay short."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.profiles import examples
from xrt_core.passes.partitioning import contraction as module
from xrt_core.passes.partitioning.contraction import Contraction, free_groups

Edges = list[tuple[int, int]]


def contraction(count: int, edges: Edges) -> Contraction:
    """Units of one node each."""
    listed = np.array(sorted(set(edges)), np.int64).reshape(-1, 2)
    return Contraction([1] * count, (listed[:, 0].copy(), listed[:, 1].copy()))


@st.composite
def dags(draw: st.DrawFn) -> tuple[int, Edges]:
    """Up to 30 units; most edges lead to near ones, so that few sets are live at a time."""
    count = draw(st.integers(1, 30))
    reach = draw(st.sampled_from([2, 4, 40]))
    edges = []
    for target in range(1, count):
        for back in draw(st.lists(st.integers(1, reach), max_size=3)):
            edges.append((max(0, target - back), target))
    return count, edges


def waiting(count: int, edges: Edges, closed: list[bool]) -> list[frozenset[int]]:
    """For each unit the closed ones that a path leads to."""
    found: list[frozenset[int]] = [frozenset()] * count
    for u in range(count - 1, -1, -1):
        below = [t for s, t in edges if s == u]
        found[u] = frozenset({t for t in below if closed[t]}.union(*(found[t] for t in below)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("long", [0, 2, 512])
@examples(100)
@given(dags(), st.data())
def test_free_groups_are_those_for_which_the_same_closed_units_wait(
    long: int, dag: tuple[int, Edges], data: st.DataObject
) -> None:
    """Whether the sets are shortened after every unit, now and then, or not at all."""
    count, edges = dag
    open_ = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    unread = [u for u in range(count) if not open_[u] and all(s != u for s, _ in edges)]
    ignored = data.draw(st.lists(st.sampled_from(unread), unique=True)) if unread else []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_LONG", long)
        label = free_groups(contraction(count, edges), np.array(open_), ignored).tolist()
    sets = waiting(count, edges, [not o and u not in ignored for u, o in enumerate(open_)])
    for u in range(count):
        for v in range(u):
            assert (label[u] == label[v]) == (open_[u] and open_[v] and sets[u] == sets[v])


def test_sets_stay_short_where_one_path_joins_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain of diamonds with thousands of closed units: no set is much longer than the least that is shortened."""
    edges = [e for i in range(0, 12_000, 3) for e in ((i, i + 1), (i, i + 2), (i + 1, i + 3), (i + 2, i + 3))]
    open_ = np.arange(12_001) % 3 != 1
    lengths = []
    find = module._Sets.find
    monkeypatch.setattr(module._Sets, "find", lambda self, m, u: lengths.append(m.bit_length()) or find(self, m, u))
    label = free_groups(contraction(12_001, edges), open_)
    assert len(set(label.tolist())) == 8001  # the open side of a diamond is one with its end
    assert len(lengths) > 4000
    assert max(lengths) <= module._LONG + 2


@examples(100)
@given(dags(), st.data())
def test_merging_gives_the_quotient(dag: tuple[int, Edges], data: st.DataObject) -> None:
    """Labels of neighbours in a topological order: every edge between two groups once, ascending; sizes add up."""
    count, edges = dag
    cuts = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    label = np.cumsum(cuts)
    if data.draw(st.booleans()):
        label = label.max() - label  # what the labels are does not matter
    merged, new = contraction(count, edges).merge(label)
    wanted = sorted({(int(new[s]), int(new[t])) for s, t in set(edges) if new[s] != new[t]})
    assert list(zip(*(e.tolist() for e in merged.edges), strict=True)) == wanted
    assert all(s < t for s, t in wanted)
    assert merged.sizes == np.bincount(new).tolist()
    assert [(u, t) for u, row in enumerate(merged.successors) for t in row] == wanted
    assert sorted((s, u) for u, row in enumerate(merged.predecessors) for s in row) == wanted

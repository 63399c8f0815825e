"""The choice of buckets: which one is worth making for a call, by sizes alone, without a module or an engine."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xrt_core.compiler.buckets import Bucket, Found, rung
from xrt_core.compiler.buckets import choice as policy
from xrt_core.compiler.buckets.bucket import smallest
from xrt_core.compiler.buckets.choice import Choice
from xrt_core.compiler.buckets.sizes import Family, Symbols, fine, rounded
from xrt_core.compiler.buckets.times import EARNED, LEAST_SECONDS, USUAL_SECONDS, Times
from xrt_core.errors import OptionError
from xrt_core.ir.graph import Graph, Value
from xrt_core.ir.symbols import Declared, Symbol
from xrt_core.ir.types import Dim, TensorType
from xrt_core.passes.padding import PaddedGraph
from xrt_core.passes.padding.rows import Rows

BOTH = Family({}, {"b": "b", "s": "s"})
ROWS = Rows("b", (0,), (0,), 1.0, 32.0, {"s": 1})  # a run is worth 32 elements at least
calls = st.lists(st.fixed_dictionaries({"b": st.integers(1, 8), "s": st.integers(1, 256)}), min_size=1, max_size=24)


def symbols_of(*shape: Dim, declared: Sequence[Symbol] = ()) -> Symbols:
    """Those of a graph with one input."""
    graph = Graph((Value("x", TensorType(np.float32, shape)),), (), (), opsets={"": 18})
    return Symbols(graph, Declared(("x",), (shape,), {s.name: s for s in declared}) if declared else None)


def choice_of(option: Any = "auto", times: Times | None = None, rows: Rows | None = None) -> Choice:
    return Choice(option, symbols_of("b", "s"), times or Times(), {BOTH: rows})


def bucket_of(sizes: Mapping[str, int], family: Family = BOTH, rows: Rows | None = None) -> Bucket:
    """A bucket that nothing runs, of fewer rows where those do not mix."""
    count = 1
    if rows is not None and rows.worth(sizes) < sizes[rows.symbol]:
        count, sizes = rows.worth(sizes), {s: n for s, n in sizes.items() if s != rows.symbol}
    else:
        rows = None
    form = PaddedGraph(Graph((), (), (), opsets={"": 18}), tuple(sizes), sizes, (), ())
    return Bucket(form, None, family, {}, rows, count)


def vary(choice: Choice) -> None:
    """Note two calls, so that both symbols vary from the start."""
    for n in (1, 2):
        choice.note({"b": n, "s": n})


def share_of(found: Found) -> float:
    """The share of a call that is not padding."""
    assert found.bucket is not None
    return math.prod(found.sizes.values()) / found.bucket.spent(found.sizes)


@given(calls)
def test_a_bucket_for_a_call_that_none_serves(given: list[dict[str, int]]) -> None:
    """It holds all sizes that were seen, each as a rung, unless the call would be a little of it; what never varied is
    fixed, and the first size has none."""
    choice = choice_of()
    for sizes in given:
        choice.note(sizes)
    sizes, varied = given[-1], {s for s in "bs" if len({g[s] for g in given}) > 1}
    for is_free in (False, True):
        wanted = choice.wanted(sizes, None, [], is_free)
        if not varied:
            assert wanted is None
            continue
        assert wanted is not None
        assert wanted.family == Family({s: sizes[s] for s in sizes if s not in varied}, {s: s for s in varied})
        hull = {s: rung(max(g[s] for g in given)) for s in varied}
        own = {s: sizes[s] for s in varied}
        is_little = is_free and math.prod(own.values()) < 0.25 * math.prod(hull.values())
        assert wanted.tries(None) == [{s: rung(n) for s, n in own.items()} if is_little else hull, own]


@given(calls, st.sampled_from([None, ROWS]))
def test_every_call_is_served(given: list[dict[str, int]], rows: Rows | None) -> None:
    """Where rows mix, by a bucket of which it is more than a tenth. Where none is earned, no more than the first ones
    are made beside others, but for calls that are next to nothing in them."""
    choice, buckets = choice_of(rows=rows), list[Bucket]()
    vary(choice)
    for sizes in given:
        choice.note(sizes)
        found = smallest(buckets, sizes)
        share = 0.0 if found is None else share_of(found)
        wanted = choice.wanted(sizes, found, buckets, is_free=True)
        if wanted is not None:
            assert not wanted.beside or len(buckets) < policy.FIRST_BUCKETS or share < 0.1
            buckets.append(bucket_of(wanted.tries(rows)[0], wanted.family, rows))
        found = smallest(buckets, sizes)
        assert found is not None
        assert rows is not None or share_of(found) > 0.1 - 1e-9


@given(calls, st.sampled_from([None, ROWS]), st.booleans())
def test_the_bucket_that_saves_the_most(given: list[dict[str, int]], rows: Rows | None, is_later: bool) -> None:
    """Of all that hold two of the sizes that were seen, by trying each: where it saves enough."""
    largest = bucket_of({s: fine(max(g[s] for g in given)) for s in "bs"}, BOTH, rows)
    buckets = [largest] * (policy.FIRST_BUCKETS if is_later else 1)
    times = Times()
    choice = choice_of(times=times, rows=rows)
    vary(choice)
    for sizes in given:
        choice.note(sizes)
    seen = [s for s in choice.seen if largest.sizes_for(s) is not None]
    now = [largest.spent(s) for s in seen]

    def saved(full: Mapping[str, int]) -> int:
        made = bucket_of(full, BOTH, rows)
        return sum(max(w - made.spent(s), 0) for s, w in zip(seen, now, strict=True) if made.sizes_for(s) is not None)

    steps = [{s: fine(n) for s, n in sizes.items()} for sizes in seen]
    most = max(saved({s: max(a[s], b[s]) for s in "bs"}) for a, b in itertools.product(steps, steps))
    share = policy.LITTLE if is_later else policy.GAIN if rows is None else policy.ROWS_GAIN
    is_enough = most > share * max(*now, largest.whole)
    if is_later and 1 - sum(math.prod(s.values()) for s in seen) / sum(now) <= policy.FINAL_WASTE:
        is_enough = False
    sizes = given[-1]
    found = smallest(buckets, sizes)
    assert found is not None
    if is_later:
        assert choice.wanted(sizes, found, buckets, is_free=True) is None or share_of(found) < 0.1
        times.wasted = 1e9  # which earns another
    wanted = choice.wanted(sizes, found, buckets, is_free=True)
    if share_of(found) < 0.1:
        assert wanted is not None
        assert wanted.sizes[0] == {s: min(rung(n), largest.form.buckets.get(s, rung(n))) for s, n in sizes.items()}
    elif not is_enough:
        assert wanted is None
        assert times.wasted == 0.0  # padding earned what is not to be had
    else:
        assert wanted is not None
        assert wanted.beside
        assert saved(wanted.sizes[0]) == most
    assert choice.wanted(sizes, found, buckets, is_free=False) is None


def test_sizes_that_the_user_gave() -> None:
    """The smallest that holds a call, whatever was seen, or the call's own above them all; each may have a bucket."""
    choice, buckets = choice_of((("b", (4,)), ("s", (8, 32)))), list[Bucket]()
    for b, s in ((1, 3), (2, 9), (3, 40), (4, 8), (1, 2)):
        choice.note({"b": b, "s": s})
        wanted = choice.wanted({"b": b, "s": s}, smallest(buckets, {"b": b, "s": s}), buckets, is_free=True)
        if wanted is not None:
            buckets.append(bucket_of(wanted.tries(None)[0]))
    assert [b.sizes for b in buckets] == [{"b": 4, "s": 8}, {"b": 4, "s": 32}, {"b": 4, "s": 40}]
    sizes = {"b": 2, "s": 5}
    for there, beside in (([buckets[1]], True), ([buckets[0]], False)):  # the smaller one is made beside the larger
        found = smallest(there, sizes)
        assert (choice.wanted(sizes, found, there, is_free=True) is not None) == beside
    with pytest.raises(OptionError, match=r"no symbol 'n'; its inputs have b, s"):
        choice_of((("n", (8,)),))


def test_what_is_not_to_be_had() -> None:
    """It is wanted no more until others made room, nor is its family, unless that has a bucket; the padding that should
    have earned it is forgotten."""
    times = Times()
    choice, large, sizes = choice_of(times=times), bucket_of({"b": 8, "s": 256}), {"b": 1, "s": 4}
    for seen in ({"b": 8, "s": 200}, sizes):
        choice.note(seen)
    wanted = choice.wanted(sizes, smallest([large], sizes), [large], is_free=True)
    assert wanted is not None
    assert choice.wants_another(large, sizes, [large])
    times.wasted = 1e9
    choice.give_up(wanted, "no", [large])
    assert times.wasted == 0.0
    assert not choice.wants_another(large, sizes, [large])
    assert choice.wanted(sizes, smallest([large], sizes), [large], is_free=True) is None
    assert not choice.refused  # the larger one serves
    choice.try_again()
    assert choice.wants_another(large, sizes, [large])
    assert choice.wanted(sizes, None, [], is_free=True) is not None
    large.failed = "wrong"
    choice.refuse(BOTH, "wrong", [large])
    assert choice.wanted(sizes, None, [], is_free=True) is None
    assert choice.refused == {BOTH: "wrong"}


def test_what_varies() -> None:
    """Dimensions without names that were always equal are one symbol; the last sizes count, each once."""
    choice = Choice("auto", symbols_of(None, None, "s"), Times(), {})
    for n in range(1, 2 * policy.MAX_SEEN):
        choice.note({"dim_0_0": n, "dim_0_1": n, "s": 7})
        choice.note({"dim_0_0": n, "dim_0_1": n, "s": 7})
    assert len(choice.seen) == policy.MAX_SEEN
    wanted = choice.wanted(choice.seen[-1], None, [], is_free=False)
    assert wanted is not None
    assert wanted.family == Family({"s": 7}, {"dim_0_0": "dim_0_0", "dim_0_1": "dim_0_0"})
    assert wanted.own == {"dim_0_0": 2 * policy.MAX_SEEN - 1}
    family = wanted.family
    assert family.all_sizes({"dim_0_0": 3}) == {"dim_0_0": 3, "dim_0_1": 3, "s": 7}
    assert family.admits({"dim_0_0": 3, "dim_0_1": 3, "s": 7})
    assert not family.admits({"dim_0_0": 3, "dim_0_1": 3, "s": 8})
    assert hash(family) == hash(Family({"s": 7}, {"dim_0_1": "dim_0_0", "dim_0_0": "dim_0_0"}))


def test_what_the_user_declared() -> None:
    """A bucket keeps to the multiples of a symbol, and does not exceed its largest size."""
    symbols = symbols_of("b", "s", declared=[Symbol("s", 1, 30, 5)])
    assert [symbols.in_limits("s", rung(n), n) for n in (5, 10, 20, 25)] == [10, 15, 25, 30]
    assert symbols.in_limits("b", 96, 70) == 96


@given(st.integers(1, 100_000))
def test_rounding(n: int) -> None:
    """Rungs are at most half larger than a size, eighths of an octave an eighth; given sizes are taken as they are."""
    assert n <= rung(n) < 1.5 * n or n == rung(n)
    assert n <= fine(n) <= n * 1.125
    assert rung(rung(n)) == rung(n)
    assert fine(fine(n)) == fine(n)
    assert rounded(n, (8, 64)) == (8 if n <= 8 else 64 if n <= 64 else n)


def test_times() -> None:
    """A bucket is earned by padding of two compilations; the host takes what it is faster at, as far as is known."""
    times, bucket = Times(), bucket_of({"b": 8, "s": 64}, Family({"n": 2}, {"b": "b", "s": "s"}))
    times.took_padded(EARNED * USUAL_SECONDS * 4, 100, 133)
    assert not times.has_earned
    times.took_padded(EARNED * USUAL_SECONDS * 4, 100, 400)
    assert times.has_earned
    assert times.most == 400
    times.took_compilation(1e9)
    assert not times.has_earned
    times.took_compilation(0.0)
    times.wasted = EARNED * LEAST_SECONDS
    assert not times.has_earned
    bucket.took(3.0)
    bucket.took(5.0)
    assert bucket.seconds == 3.0
    assert not times.host_is_faster(bucket, {"b": 1, "s": 1})  # nothing is known of it
    times.took_host({"n": 2, "b": 1, "s": 100}, 2.0)
    assert times.host_is_faster(bucket, {"b": 1, "s": 100})
    assert not times.host_is_faster(bucket, {"b": 2, "s": 100})
    assert times.host_is_faster(bucket, {"b": 1, "s": 1})
    times.took_host({"n": 2, "b": 1, "s": 1}, 4.0)
    assert times.host_is_faster(bucket, {"b": 1, "s": 100})


def test_a_call_that_is_lost_in_a_bucket_of_which_less_varied() -> None:
    """It gets a bucket of all that varies now, which serves it."""
    choice = choice_of()
    for s in (9, 200):
        choice.note({"b": 1, "s": s})
    older = bucket_of({"s": 256}, Family({"b": 1}, {"s": "s"}))
    for b, s in ((2, 200), (1, 3)):
        choice.note({"b": b, "s": s})
    call = {"b": 1, "s": 3}
    found = smallest([older], call)
    assert found is not None
    assert choice.wants_another(older, found.sizes, [older])
    wanted = choice.wanted(call, found, [older], is_free=True)
    assert wanted is not None
    assert wanted.family == BOTH
    assert wanted.tries(None) == [{"b": 1, "s": 3}] * 2


def test_a_call_that_is_lost_in_a_bucket_of_a_part_of_the_rows() -> None:
    """It gets a bucket that serves all its rows, in fewer runs."""
    choice, call = choice_of(rows=ROWS), {"b": 5, "s": 2}
    vary(choice)
    choice.note(call)
    divided = bucket_of({"b": 8, "s": 256}, BOTH, ROWS)
    assert divided.runs(call) == 5
    found = smallest([divided], call)
    assert found is not None
    wanted = choice.wanted(call, found, [divided], is_free=True)
    assert wanted is not None
    made = bucket_of(wanted.tries(ROWS)[0], wanted.family, ROWS)
    assert made.sizes_for(call) == call
    assert made.runs(call) == 1


def test_names_that_were_always_equal() -> None:
    """Exporters name the batch of each input by itself: along the same axis one stands for all, until they differ."""
    types = [TensorType(np.float32, s) for s in (("s1", "s2"), ("s3", "s2"), ("s4", None))]
    graph = Graph([Value(f"x{i}", t) for i, t in enumerate(types)], (), (), opsets={"": 18})
    choice = Choice("auto", Symbols(graph), Times(), {})
    sizes = [dict(zip(("s1", "s2", "s3", "s4", "dim_2_1"), n, strict=True)) for n in ((2, 9, 2, 2, 9), (3, 7, 3, 3, 7))]
    for n in sizes:
        choice.note(n)
    wanted = choice.wanted(sizes[-1], None, [], is_free=True)
    assert wanted is not None
    assert wanted.family == Family({}, {"s1": "s1", "s2": "s2", "s3": "s1", "s4": "s1", "dim_2_1": "dim_2_1"})
    differs = {**sizes[0], "s3": 5}
    choice.note(differs)
    wanted = choice.wanted(differs, None, [], is_free=True)
    assert wanted is not None
    assert wanted.family.same == {"s1": "s1", "s2": "s2", "s3": "s3", "s4": "s1", "dim_2_1": "dim_2_1"}

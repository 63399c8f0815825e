"""Buckets: modules whose calls of new sizes are padded to executables that are there."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.fake_engines import FakeEngine, fake_engine
from tests.passes.varying_graphs import HIDDEN, Builder, arguments, encoder
from xrt_core.compiler.buckets import Bucket, Buckets, choice, edges, forms, rung
from xrt_core.compiler.buckets.bucket import smallest
from xrt_core.compiler.buckets.check import difference
from xrt_core.compiler.buckets.times import Times
from xrt_core.compiler.services import usable_processors
from xrt_core.errors import OptionError
from xrt_core.events import EventLog
from xrt_core.host.executor import run_graph
from xrt_core.ir.graph import Graph
from xrt_core.module import XRTModule
from xrt_core.options.kinds import BUCKETS
from xrt_core.passes.padding.rows import Rows


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    """An engine of static shapes."""
    with fake_engine() as made:
        yield made


@pytest.fixture(scope="module")
def graph() -> Graph:
    """A small transformer."""
    return encoder(np.random.default_rng(5))


def module_of(graph: Graph, buckets: Any = "auto", **options: Any) -> XRTModule:
    return XRTModule(graph, engine="fake", buckets=buckets, guard=options.pop("guard", False), cache="off", **options)


def agree(module: XRTModule, graph: Graph, b: int, s: int) -> None:
    """Assert that a call of these sizes gives what the host gives."""
    arrays = arguments(np.random.default_rng(b * 100 + s), b, s)
    found = module(*arrays)
    for got, want in zip(found if type(found) is tuple else (found,), run_graph(graph, arrays), strict=True):
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def buckets_of(module: XRTModule) -> list[Bucket]:
    caller = module._source.caller
    assert caller is not None
    assert caller._buckets is not None
    return caller._buckets.buckets


def waste(module: XRTModule) -> float:
    """The share of padding of all sizes that were seen."""
    caller = module._source.caller
    assert caller is not None
    assert caller.buckets is not None
    seen = caller.buckets._choice.seen
    served = [smallest(caller.buckets.buckets, s) for s in seen]
    spent = sum(f.bucket.spent(f.sizes) for f in served if f is not None and f.bucket is not None)
    return 1 - sum(math.prod(s.values()) for s in seen) / spent


def test_one_executable_serves_many_sizes(engine: FakeEngine, graph: Graph) -> None:
    """The first signature is compiled as it is; of others, those that fit a bucket share its executable."""
    with module_of(graph) as m:
        agree(m, graph, 2, 9)
        for s in (12, 11, 9, 10, 7, 12):
            agree(m, graph, 2, s)
        assert [b.form.buckets for b in buckets_of(m)] == [{"s": 12}]  # b never varied
        named = [dict(zip(m.input_types, arguments(np.random.default_rng(0), 2, s), strict=True)) for s in (8, 13)]
        assert [m.is_prepared(x) for x in named] == [True, False]
        agree(m, graph, 3, 12)
        assert buckets_of(m)[-1].form.buckets == {"b": 3, "s": 12}
    assert len(engine.compiled) == 3


def test_sizes_can_be_given(engine: FakeEngine, graph: Graph) -> None:
    """With sizes of symbols the first call is padded; what is above them all is a bucket of its own."""
    with module_of(graph, {"s": (8, 32), "b": 4}) as m:
        for b, s in ((1, 3), (4, 8), (2, 9), (3, 32), (2, 33), (3, 2)):
            agree(m, graph, b, s)
        assert [tuple(b.form.buckets.values()) for b in buckets_of(m)] == [(4, 8), (4, 32), (4, 33)]
        assert "s 3 to 8" in str(
            m.explain(dict(zip(("x", "ids", "mask"), arguments(np.random.default_rng(0), 1, 3), strict=True)))
        )
    with pytest.raises(OptionError, match=r"no symbol 'n'; its inputs have b, s"):
        module_of(graph, {"n": 8})


def test_what_is_not_proven_runs_as_it_is(engine: FakeEngine) -> None:
    """A graph that padding might reach is compiled for each signature, and explain() has the reason."""
    g = Builder(np.random.default_rng(0))
    graph = g.graph([g.add("TopK", g.x, g.ints(2), axis=1, outputs=2)[0]])
    with module_of(graph) as m:
        for s in (4, 5, 6):
            agree(m, graph, 2, s)
        assert not buckets_of(m)
        assert "not padded: TopK" in str(m.explain())
    assert len(engine.compiled) == 3


def settle() -> None:
    """Wait for buckets that are made or checked in the background."""
    for t in threading.enumerate():
        if t.name == "xrt-bucket":
            t.join(30)


def test_no_call_is_next_to_nothing_but_padding(
    engine: FakeEngine, graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call of which more than nine tenths would be padding gets a bucket of its size; others must earn theirs."""
    monkeypatch.setattr(choice, "FIRST_BUCKETS", 1)
    with module_of(graph) as m:
        for b, s in ((8, 60), (7, 64), (8, 50), (1, 16), (1, 10), (1, 16)):
            agree(m, graph, b, s)
            settle()
        assert [tuple(b.form.buckets.values()) for b in buckets_of(m)] == [(8, 64), (1, 16)]
        assert [b.calls for b in buckets_of(m)] == [3, 2]
    assert len(engine.compiled) == 3


def test_a_bucket_that_cannot_be_made_beside_another(
    engine: FakeEngine, graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The larger one serves; it is told once, and not tried again in each call."""
    m, tried = module_of(graph), []

    def broken(*given: Any, **more: Any) -> Any:
        tried.append(given)
        raise ZeroDivisionError("in the background")

    for b, s in ((1, 7), (4, 200)):
        agree(m, graph, b, s)
    before = len(buckets_of(m))
    monkeypatch.setattr(forms, "pad_graph", broken)
    for _ in range(6):
        agree(m, graph, 1, 3)
        for t in threading.enumerate():
            if t.name == "xrt-bucket":
                t.join()
    assert len(buckets_of(m)) == before
    assert 1 <= len(tried) <= 2


def test_few_buckets_at_first(engine: FakeEngine) -> None:
    """However sizes vary, no more than a dozen executables are made until time wasted on padding has earned others."""
    g = Builder(np.random.default_rng(0))
    graph = g.graph([g.add("ReduceMean", g.x, g.ints(1))])
    rng = np.random.default_rng(1)
    with module_of(graph) as m:
        for _ in range(60):
            agree(m, graph, int(rng.integers(1, 9)), int(rng.integers(3, 60)))
            settle()
        assert 10 <= len(engine.compiled) <= 12
        caller = m._source.caller
        assert caller is not None
        assert caller._buckets is not None
        buckets = caller._buckets
        buckets._times.wasted = 1e9
        before, count = waste(m), len(buckets_of(m))
        for _ in range(300):
            if len(buckets_of(m)) > count:
                break
            agree(m, graph, int(rng.integers(1, 9)), int(rng.integers(3, 60)))
            settle()
        assert waste(m) < before < 0.4  # it is chosen by what all sizes that were seen waste
        count = len(engine.compiled)
        sizes = buckets_of(m)[-1].form.buckets
        for _ in range(100):  # until the calls have moved to it
            agree(m, graph, sizes["b"], sizes["s"])
            if buckets_of(m)[-1].calls:
                break
            time.sleep(0.01)
        assert buckets_of(m)[-1].calls
        assert len(engine.compiled) == count <= 13


@pytest.mark.parametrize("count", [1, 2])
def test_rows_that_do_not_mix(engine: FakeEngine, graph: Graph, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """A bucket of as few rows as are worth a run serves calls of any number of them, by several runs."""
    monkeypatch.setattr(Rows, "worth", lambda *given: count)
    monkeypatch.setattr(choice, "FIRST_BUCKETS", 1)  # none is made beside it
    with module_of(graph) as m:
        for b, s in ((3, 9), (5, 12), (2, 7), (8, 12), (1, 11), (7, 10)):
            agree(m, graph, b, s)
        assert [b.sizes for b in buckets_of(m)] == [{"b": count, "s": 12}]
        bucket = buckets_of(m)[0]
        assert bucket.is_shared == (usable_processors() > 1)
        assert bucket.calls == 5
        assert bucket.padded == sum(12 * count * -(-b // count) for b in (5, 2, 8, 1, 7))
        text = str(m.explain(dict(zip(("x", "ids", "mask"), arguments(np.random.default_rng(0), 7, 10), strict=True))))
        assert f"s 10 to 12, b 7 in {-(-7 // count)} runs of {count}, as rows do not mix" in text
    assert len(engine.compiled) == 2


def test_rows_that_mix(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stay together, and so do those of sizes that the user gave, and of which a run is worth all."""
    monkeypatch.setattr(Rows, "worth", lambda *given: 1)
    monkeypatch.setattr(Times, "has_earned", False)  # however long a run takes beside a compilation by the fake
    g = Builder(np.random.default_rng(0))
    mixed = g.graph([g.add("ReduceMean", g.x, g.ints(0, 1))])
    with module_of(mixed) as m:
        for b, s in ((3, 9), (5, 12), (4, 11)):
            agree(m, mixed, b, s)
        assert [b.sizes for b in buckets_of(m)] == [{"b": 6, "s": 12}]
        assert any(e.name == "padding.rows" and "how many rows" in e.fields["reason"] for e in m.events)
    g = Builder(np.random.default_rng(0))
    apart = g.graph([g.add("Relu", g.x)])
    with module_of(apart, {"s": 16, "b": 8}) as m:
        agree(m, apart, 5, 9)
        assert buckets_of(m)[0].sizes == {"b": 8, "s": 16}
    with module_of(apart, threads=1) as m:
        for b, s in ((3, 9), (5, 12)):
            agree(m, apart, b, s)
        assert buckets_of(m)[0].sizes == {"b": 1, "s": 12}
        assert not buckets_of(m)[0].is_shared
    monkeypatch.undo()
    monkeypatch.setattr(Times, "has_earned", False)
    monkeypatch.setattr(choice, "FIRST_BUCKETS", 1)  # none is made beside it, on a thread that may be quicker than this
    with module_of(apart) as m:
        for b, s in ((3, 9), (5, 12), (4, 11)):
            agree(m, apart, b, s)
        assert [b.sizes for b in buckets_of(m)] == [{"b": 6, "s": 12}]


def test_few_buckets_where_rows_do_not_mix(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of any number of rows and lengths waste little, by no more buckets than else."""
    monkeypatch.setattr(Rows, "worth", lambda self, sizes: max(1, 32 // sizes["s"]))
    g = Builder(np.random.default_rng(0))
    graph = g.graph([g.add("ReduceMean", g.x, g.ints(1))])
    rng = np.random.default_rng(1)
    with module_of(graph) as m:
        for _ in range(60):
            agree(m, graph, int(rng.integers(1, 9)), int(rng.integers(3, 60)))
            settle()
        assert waste(m) < 0.2
        assert len(engine.compiled) <= 12


def test_wrong_bucket_is_retired(engine: FakeEngine, graph: Graph) -> None:
    """A bucket whose executable differs from the host at one of its edges is found and not used any more."""
    with module_of(graph, {"s": 8, "b": 2}, guard=True, guard_async=False, guard_sandbox=False, guard_tune=False) as m:
        agree(m, graph, 2, 5)
        bucket = buckets_of(m)[0]
        settle()
        assert bucket.checked
        assert not bucket.failed
        run = bucket.inner
        bucket.inner = lambda arrays: [r + 1 if arrays[-1] == 7 else r for r in run(arrays)]  # one below the bucket
        caller = m._source.caller
        assert caller is not None
        assert caller._buckets is not None
        bucket.sample = arguments(np.random.default_rng(0), 2, 5)
        assert "'s': 7" in difference(bucket, bucket.sample, caller.on_host)
        caller._buckets.examine(bucket)
        assert "'s': 7" in bucket.failed
        agree(m, graph, 2, 5)
        assert buckets_of(m)[0] is bucket


def test_unnamed_dimensions(engine: FakeEngine) -> None:
    """Dimensions without names that were always equal are one symbol; a call that parts them is compiled as it is."""
    g = Builder(np.random.default_rng(0))
    y = g.add("Add", g.add("Unsqueeze", g.add("Cast", g.ids, to=1), g.ints(2)), g.x)
    graph = g.graph([g.add("ReduceMax", y, g.ints(1))])
    unnamed = {v: type(v)(v.name, type(v.type)(v.dtype, (None, None, HIDDEN)[: len(v.shape or ())])) for v in g.inputs}
    from xrt_core.ir.graph import substitute

    graph = graph.replace(inputs=unnamed.values(), nodes=[substitute(n, unnamed) for n in graph.nodes])
    with module_of(graph) as m:
        for s in (9, 12, 10, 11):
            agree(m, graph, 2, s)
        assert [tuple(b.form.buckets.values()) for b in buckets_of(m)] == [(12,)]
        x, ids, mask = arguments(np.random.default_rng(0), 2, 12)
        assert m(x, ids[:, :1], mask).shape == (2, 1, HIDDEN)


def test_declared_ranges(engine: FakeEngine, graph: Graph) -> None:
    """A bucket does not exceed the range that the user declares, and keeps to its multiples."""
    from xrt_core.ir.symbols import Symbol

    shapes = {"ids": ("b", Symbol("s", 1, 14))}
    with module_of(graph, shapes=shapes) as m:
        for s in (9, 13, 14):
            agree(m, graph, 2, s)
        assert [b.form.buckets for b in buckets_of(m)] == [{"s": 14}]


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(4))
def test_static_engine(seed: int) -> None:
    """A compiler of static shapes gives what the host gives, for every size of a bucket, and compiles once for each."""
    pytest.importorskip("xrt_xla")
    graph = encoder(np.random.default_rng(seed))
    with XRTModule(graph, engine="xla", buckets={"b": 4, "s": (8, 16)}, guard=False, cache="off") as m:
        for b, s in ((4, 16), (3, 15), (1, 9), (2, 8), (4, 7), (1, 1)):
            agree(m, graph, b, s)
            settle()
        assert len(buckets_of(m)) == 2
        caller = m._source.caller
        assert caller is not None
        assert not caller.plans.plans()


def test_sizes_of_buckets() -> None:
    """Rungs are two an octave; a bucket is checked full, one below, and one above the next smaller one."""
    assert [rung(n) for n in (1, 2, 3, 5, 7, 9, 13, 100, 129, 193)] == [1, 2, 3, 6, 8, 12, 16, 128, 192, 256]
    assert edges({"s": 12}, {"s": 8}) == [{"s": 12}, {"s": 11}, {"s": 9}]
    assert edges({"s": 1}, {}) == [{"s": 1}] * 3
    assert edges({"b": 2, "s": 8}, {"s": 4}, "b") == [{"b": 3, "s": 8}, {"b": 1, "s": 7}, {"b": 1, "s": 5}]


def test_option() -> None:
    """The option's text and value mean the same; sizes below 1 and empty ones are errors."""
    assert BUCKETS.parse("batch=4,1;sequence=64") == BUCKETS.accept({"batch": [4, 1], "sequence": 64})
    for wrong in ({"batch": 0}, {"batch": ()}, {}, "always", 3):
        with pytest.raises(OptionError, match="buckets"):
            XRTModule(Graph((), (), (), opsets={"": 18}), buckets=wrong)


def test_nothing_checks_a_bucket_whose_results_are_not_verified(graph: Graph) -> None:
    """Not when its executables are forgotten again as they become live either; calls use it once engines run it."""

    class Inner:
        """What an engine runs now and then."""

        is_live, is_pending, runs_beside_itself = False, False, False

        def build(self, arrays: Any) -> None:
            """It is there already."""

    begun: list[Any] = []
    made = Buckets(graph, "auto", lambda padded: Inner(), EventLog(), begin=begun.append)  # type: ignore[arg-type]
    for b, s in ((1, 5), (2, 9)):
        found = made.find(arguments(np.random.default_rng(0), b, s))
    assert found == (None, {"b": 2, "s": 9})
    (making,) = begun
    making.prepare()
    (bucket,) = made.buckets
    made.became_live(bucket.inner)
    assert begun == [making]
    bucket.inner.is_live = True
    made.became_live(bucket.inner)
    assert begun == [making]
    assert not bucket.failed
    found = made.find(arguments(np.random.default_rng(0), 2, 9))
    assert found is not None
    assert found.bucket is bucket

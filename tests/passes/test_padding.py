"""Padding with proof: padded graphs against the originals, with garbage in the padding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from tests.passes.varying_graphs import HIDDEN, SHAPES, Builder, arguments, encoder, soup
from xrt_core.host.executor import run_graph
from xrt_core.ir.graph import Graph, Value
from xrt_core.ir.verifier import verify
from xrt_core.passes.padding import PaddedGraph, PaddingRefused, pad_graph

BUCKETS = {"b": 4, "s": 16}
GARBAGE = {"f": (np.nan, np.inf, -np.inf, 1e30, -7.0), "i": (-(2**62), 2**31 - 1, -1, 0, 7, 100)}


def soiled(rng: np.random.Generator, padded: Sequence[np.ndarray], arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The arguments of a padded graph with NaN, infinities and wild integers in the padding."""
    found = list(padded)
    for i, a in enumerate(arrays):
        outside = np.ones(found[i].shape, bool)
        outside[tuple(slice(n) for n in a.shape)] = False
        found[i] = found[i].copy()
        found[i][outside] = rng.choice(GARBAGE[a.dtype.kind], outside.sum())
    return found


def compare(graph: Graph, padded: PaddedGraph, rng: np.random.Generator, b: int, s: int, dirty: bool) -> None:
    """Assert that the padded graph gives what the original gives for these sizes."""
    arrays, sizes = arguments(rng, b, s), {"b": b, "s": s}
    given = padded.pad(arrays, sizes)
    found = padded.cut(run_graph(padded.graph, soiled(rng, given, arrays) if dirty else given), sizes)
    for want, got in zip(run_graph(graph, arrays), found, strict=True):
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        scale = np.abs(want[np.isfinite(want)]).max(initial=1)
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4 * scale)


def try_graphs(make: Callable[[np.random.Generator], Graph], seeds: range, shapes: int) -> tuple[int, Counter[str]]:
    """The number of graphs that are padded, each compared on so many sizes; and what was refused, by reason."""
    padded, refused = 0, Counter[str]()
    for seed in seeds:
        rng = np.random.default_rng(seed)
        graph = make(rng)
        try:
            forms = [pad_graph(graph, SHAPES, BUCKETS, zero_filled=clean) for clean in (True, False)]
        except PaddingRefused as e:
            refused[str(e).partition(": ")[2]] += 1
            continue
        padded += 1
        verify(forms[1].graph, "padded")
        sizes = [(4, 16), (3, 15), (1, 1), (int(rng.integers(1, 5)), int(rng.integers(1, 17))), (2, 9), (3, 5)]
        for b, s in sizes[:shapes]:
            for form, dirty in zip(forms, (False, True), strict=True):
                if form.why_not({"b": b, "s": s}) is None:
                    compare(graph, form, rng, b, s, dirty)
    return padded, refused


def test_transformers_are_padded() -> None:
    """Encoders as exporters write them are padded, and garbage in the padding reaches no result."""
    padded, refused = try_graphs(encoder, range(4), 2)
    assert padded == 4, refused


def test_random_graphs() -> None:
    """Graphs of random operators are padded without an error in any result, or refused."""
    padded, refused = try_graphs(soup, range(12), 3)
    assert padded >= 4
    assert refused


@pytest.mark.nightly
@pytest.mark.parametrize(("make", "count", "least"), [(encoder, 250, 0.6), (soup, 500, 0.3)])
def test_many_graphs(make: Callable[[np.random.Generator], Graph], count: int, least: float) -> None:
    """Of many graphs none is wrong for any of six sizes, and most transformers are padded."""
    padded, refused = try_graphs(make, range(1000, 1000 + count), 6)
    print(f"{make.__name__}: {padded} of {count} padded; refused: {refused.most_common()}")
    assert padded >= least * count


def build(make: Callable[[Builder], Value]) -> Graph:
    g = Builder(np.random.default_rng(0))
    return g.graph([make(g)])


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda g: g.add("NonZero", g.x), "no rule"),
        (lambda g: g.add("TopK", g.x, g.ints(2), axis=1, outputs=2)[0], "no rule"),
        (lambda g: g.add("Add", g.x, g.weight(7, HIDDEN)), "sizes 7, s are combined"),
        (lambda g: g.add("Gather", g.x, g.add("Squeeze", g.add("ReduceMin", g.ids)), axis=1), "behind the valid size"),
        (lambda g: g.add("Reshape", g.x, g.ints(3, -1)), "not made of whole axes"),
        (lambda g: g.add("InstanceNormalization", g.x, g.weight(7), g.weight(7)), "a normalised axis carries padding"),
        (lambda g: g.add("RandomNormalLike", g.x), "no rule"),
        (lambda g: g.add("Split", g.x, num_outputs=2, axis=1, outputs=2)[0], "axis that is split"),
        (lambda g: g.add("ArgMax", g.x, axis=1, select_last_index=1), "the last is taken"),
        (lambda g: g.add("Resize", g.x, None, None, g.ints(3, 14, HIDDEN), mode="linear"), "ratio that depends"),
    ],
)  # fmt: skip
def test_refusals(make: Callable[[Builder], Value], reason: str) -> None:
    """What padding might reach, and what no rule covers, is refused with the node and the reason."""
    with pytest.raises(PaddingRefused, match=reason):
        pad_graph(build(make), SHAPES, BUCKETS)


def test_sizes_that_are_not_served() -> None:
    """A padded graph says which sizes it does not serve: too large, and too small for what it reads."""
    padded = pad_graph(build(lambda g: g.add("Gather", g.x, g.scalar(2), axis=1)), SHAPES, BUCKETS)
    assert padded.why_not({"b": 1, "s": 3}) is None
    assert "s" in (padded.why_not({"b": 1, "s": 2}) or "")
    assert padded.why_not({"b": 5, "s": 3}) == "b = 5 is not within 1..4"


def test_masks_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without masks the comparison fails: it can see padding."""
    monkeypatch.setattr("xrt_core.passes.padding.walk.Padder.masked", lambda self, s, axes, fill: s)
    with pytest.raises(AssertionError):
        try_graphs(encoder, range(3), 2)

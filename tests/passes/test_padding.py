"""Padding with proof: padded graphs against the originals, with garbage in the padding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from tests.passes.varying_graphs import HIDDEN, SHAPES, Builder, arguments, encoder, looked_up, soup
from xrt_core.errors import ExecutionError, PluginError
from xrt_core.frontends.onnx_functions import function_body
from xrt_core.host.executor import run_graph
from xrt_core.ir.graph import Graph, Node, Value
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
    """Assert that the padded graph gives what the original gives for these sizes, or fails as that does."""
    arrays, sizes = arguments(rng, b, s), {"b": b, "s": s}
    given = padded.pad(arrays, sizes)
    given = soiled(rng, given, arrays) if dirty else given
    try:
        expected = run_graph(graph, arrays)
    except ExecutionError:  # it reads beyond an axis, say
        with pytest.raises(ExecutionError):
            run_graph(padded.graph, given)
        return
    found = padded.cut(run_graph(padded.graph, given), sizes)
    for want, got in zip(expected, found, strict=True):
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
    padded, refused = try_graphs(encoder, range(3), 2)
    assert padded == 3, refused


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
        (lambda g: g.add("InstanceNormalization", g.x, g.weight(7), g.weight(7)), "the axis of channels"),
        (lambda g: g.add("GroupNormalization", _channels(g), g.weight(2), g.weight(2), num_groups=2),
         "a normalised axis"),
        (lambda g: g.add("RandomNormalLike", g.x), "no rule"),
        (lambda g: _to_a_multiple(g, "Sqrt"), "computed from data"),
        (lambda g: g.add("Pad", g.x, g.add("Concat", g.ints(0), g.size(g.x, 1), g.ints(0, 0, 0, 0), axis=0)),
         "how far its elements move"),
        (lambda g: g.add("Split", g.x, num_outputs=2, axis=1, outputs=2)[0], "axis that is split"),
        (lambda g: g.add("ArgMax", g.x, axis=1, select_last_index=1), "the last is taken"),
        (lambda g: g.add("Resize", g.x, None, None, g.ints(3, 14, HIDDEN)), "resized otherwise"),
        (lambda g: g.add("Resize", g.x, None, Value.constant(np.array([1, 2.5, 1], np.float32)), mode="linear"),
         "ratio that is no integer"),
        (lambda g: g.add("AveragePool", _channels(g), kernel_shape=(3,), strides=(2,), ceil_mode=1, pads=(1, 1),
                         count_include_pad=1), "ceil_mode"),
        (lambda g: g.add("MaxPool", _channels(g), kernel_shape=(2,), strides=(3,), ceil_mode=1), "ceil_mode"),
        (lambda g: _by_places(g, stride=7), "between the valid elements of a merged axis"),
        (lambda g: _by_places(g, first=1), "between the valid elements of a merged axis"),
        (lambda g: _turned(g, 1), "between the valid elements of a merged axis"),
    ],
)  # fmt: skip
def test_refusals(make: Callable[[Builder], Value], reason: str) -> None:
    """What padding might reach, and what no rule covers, is refused with the node and the reason."""
    with pytest.raises(PaddingRefused, match=reason):
        pad_graph(build(make), SHAPES, BUCKETS)


def _heads(g: Builder) -> Value:
    """x as [b, 2, s, 4]."""
    return g.add("Transpose", g.add("Reshape", g.x, g.ints(0, 0, 2, 4)), perm=(0, 2, 1, 3))


def _channels(g: Builder) -> Value:
    """x as [b, 8, s]."""
    return g.add("Transpose", g.x, perm=(0, 2, 1))


def _recurrent(g: Builder, op: str, gates: int, **attributes: str) -> Value:
    ways = 2 if attributes.get("direction") == "bidirectional" else 1
    x = g.add("Transpose", g.x, perm=(1, 0, 2))
    w, r = g.weight(ways, gates * 3, HIDDEN), g.weight(ways, gates * 3, 3)
    every, last = g.add(op, x, w, r, outputs=2, hidden_size=3, **attributes)
    return g.add("Add", g.add("ReduceSum", every, g.ints(0), keepdims=0), last)


def _places(g: Builder) -> Value:
    """0, 1, ... as [b, s, 1], made from the shape."""
    at = g.add("Range", g.scalar(0), g.add("Squeeze", g.size(g.ids, 1)), g.scalar(1))
    return g.add("Expand", g.add("Unsqueeze", at, g.ints(0, 2)), g.add("Concat", g.size(g.x, 0), g.ints(1, 1), axis=0))


def _pairs(g: Builder, count: Value | None = None) -> Value:
    """Elements of x by their places. count: of the rows that are taken; by default all."""
    rows = g.add("Range", g.scalar(0), count or g.add("Squeeze", g.size(g.ids, 0)), g.scalar(1))
    rows = g.add("Expand", g.add("Unsqueeze", rows, g.ints(1, 2)), g.add("Shape", _places(g)))
    return g.add("GatherND", g.x, g.add("Concat", rows, _places(g), axis=-1))


def _turned(g: Builder, times: int) -> Value:
    """Elements of the mask by row * length + place, where that index was transposed so many times, and moved else."""
    b, s = (g.add("Squeeze", g.size(g.ids, axis)) for axis in (0, 1))
    rows = g.add("Squeeze", g.add("Unsqueeze", g.add("Range", g.scalar(0), b, g.scalar(1)), g.ints(1, 2)), g.ints(2))
    index = g.add("Add", g.add("Mul", s, rows), g.add("Identity", g.add("Range", g.scalar(0), s, g.scalar(1))))
    for _ in range(times):
        index = g.add("Transpose", index, perm=(1, 0))
    index = g.add("Reshape", g.add("Cast", index, to=6), g.add("Concat", g.ints(1), g.add("Shape", index), axis=0))
    return g.add("Gather", g.add("Reshape", g.mask, g.ints(-1)), index, axis=0)


def _by_places(g: Builder, *, stride: int | None = None, first: int = 0, repeated: int = 1) -> Value:
    """Elements of the mask by row * stride + place, from a first one on, for so many of them beside one another."""
    b, s = (g.add("Squeeze", g.size(g.ids, axis)) for axis in (0, 1))
    rows = g.add("Unsqueeze", g.add("Range", g.scalar(0), b, g.scalar(1)), g.ints(1))
    places = g.add("Unsqueeze", g.add("Range", g.scalar(first), s, g.scalar(1)), g.ints(0))
    index = g.add("Add", g.add("Mul", rows, s if stride is None else g.scalar(stride)), places)
    index = g.add("Expand", g.add("Unsqueeze", index, g.ints(1)), g.ints(1, repeated, 1))
    return g.add("Gather", g.add("Reshape", g.mask, g.ints(-1)), index, axis=0)


def _resized(g: Builder, coordinates: str, dtype: int = 1) -> Value:
    """x as an image of its length times 8, in the size of its half and another one."""
    length = g.add("Div", g.add("Add", g.size(g.x, 1), g.ints(6)), g.ints(2))
    shape = g.add("Concat", g.size(g.x, 0), g.ints(1), length, g.ints(5), axis=0)
    x = g.add("Cast", g.add("Unsqueeze", g.x, g.ints(1)), to=dtype)
    return g.add("Resize", x, None, None, shape, mode="linear", coordinate_transformation_mode=coordinates)


def _to_a_multiple(g: Builder, rounding: str) -> Value:
    """x with zeros behind it up to a multiple of 4, by arithmetic in floats."""
    length = g.size(g.x, 1)
    blocks = g.add(rounding, g.add("Div", g.add("Cast", g.add("Squeeze", length), to=1), g.number(4.0)))
    whole = g.add("Cast", g.add("Unsqueeze", g.add("Mul", blocks, g.number(4.0)), g.ints(0)), to=7)
    amounts = g.add("Concat", g.ints(0, 0, 0, 0), g.add("Sub", whole, length), g.ints(0), axis=0)
    return g.add("ReduceMean", g.add("Pad", g.x, amounts), g.ints(1))


def _quantised_conv(g: Builder, op: str) -> Value:
    """Channels in uint8 with a zero point from data, convolved."""
    x, scale, zero = g.add("DynamicQuantizeLinear", _channels(g), outputs=3)
    w = Value.constant(g.rng.integers(0, 9, (3, HIDDEN, 3)).astype(np.uint8))
    of_w = g.number(0.1), Value.constant(np.array(4, np.uint8))
    window = {"pads": (1, 1), "strides": (2,)}
    if op == "ConvInteger":
        return g.add("Cast", g.add(op, x, w, zero, of_w[1], **window), to=1)
    return g.add(op, x, scale, zero, w, *of_w, g.number(0.2), of_w[1], **window)


def _sized_by_split(g: Builder) -> Value:
    """The last two axes as one, by sizes that come out of a Split of the shape."""
    b, s, h = g.add("Split", g.add("Shape", g.x), g.ints(1, 1, 1), axis=0, outputs=3)
    return g.add("Softmax", g.add("Reshape", g.x, g.add("Concat", b, g.add("Mul", s, h), axis=0)), axis=1)


def _merged_sums(g: Builder, x: Value) -> Value:
    """Two axes as one, whose size is computed as their product."""
    size = g.add("Mul", g.size(x, 0), g.size(x, 1))
    return g.add("ReduceSum", g.add("Reshape", x, g.add("Concat", size, g.ints(HIDDEN), axis=0)), g.ints(0))


def _expanded_sums(g: Builder, op: str) -> Value:
    """Rows and columns as one axis, beside their sum expanded to the product of their sizes."""
    rows = g.add("Reshape", g.x, g.ints(-1, HIDDEN))
    size = g.add("Mul", g.size(g.x, 0), g.size(g.x, 1))
    total = g.add("ReduceSum", g.add("Abs", rows), g.ints(0), keepdims=1)
    total = g.add("Expand", total, g.add("Concat", size, g.ints(HIDDEN), axis=0))
    made = g.add("Where", g.add("Greater", rows, total), rows, total) if op == "Where" else g.add(op, rows, total)
    return g.add("ReduceSum", made, g.ints(0))


CASES: dict[str, Callable[[Builder], Value]] = {
    "Expand to a product of sizes": lambda g: _expanded_sums(g, "Div"),
    "Expand to a product of sizes twice": lambda g: _expanded_sums(g, "Where"),
    "GatherND of all places": lambda g: looked_up(g, "GatherND"),
    "Gather of all places": lambda g: looked_up(g, "Gather"),
    "Gather of all places twice": lambda g: _by_places(g, repeated=2),
    "Gather of all places in order": lambda g: _turned(g, 0),
    "Gather of all places turned twice": lambda g: _turned(g, 2),
    "GatherElements": lambda g: g.add(
        "GatherElements", g.x, g.add("Expand", g.add("Unsqueeze", g.add("Mod", g.ids, g.scalar(8)), g.ints(2)),
                                     g.add("Shape", g.x)), axis=2),
    "GatherND": _pairs,
    "GatherND of one row": lambda g: _pairs(g, g.scalar(1)),
    "Concat behind": lambda g: g.add("CumSum", g.add("Concat", g.x, g.add("ReduceMean", g.x, g.ints(1)), axis=1),
                                     g.scalar(1), reverse=1),
    "Gather from the end": lambda g: g.add("Gather", g.x, g.ints(-1, 0), axis=1),
    "Gather of places": lambda g: g.add("Gather", g.x, g.add("Squeeze", g.add("Slice", _places(g), g.ints(0), g.ints(1),
                                                                      g.ints(0)), g.ints(0, 2)), axis=1),
    "OneHot": lambda g: g.add("OneHot", g.ids, g.scalar(16), Value.constant(np.array([0, 1], np.float32))),
    "Split": lambda g: g.add("Split", g.x, g.ints(3, 5), axis=2, outputs=2)[1],
    "Split of a shape": _sized_by_split,
    "Resize": lambda g: g.add("Resize", g.add("Unsqueeze", _channels(g), g.ints(2)), None,
                              Value.constant(np.array([1, 1, 2, 2], np.float32)), mode="nearest",
                              nearest_mode="floor", coordinate_transformation_mode="asymmetric"),
    "Resize between": lambda g: _resized(g, "half_pixel"),
    "Resize from the first": lambda g: _resized(g, "asymmetric"),
    "Resize to corners": lambda g: _resized(g, "align_corners"),
    "Resize of float16": lambda g: g.add("Cast", _resized(g, "pytorch_half_pixel", 10), to=1),
    "Resize between by scales": lambda g: g.add("Resize", g.add("Unsqueeze", _channels(g), g.ints(2)), None,
                                                Value.constant(np.array([1, 1, 4, 3], np.float32)), mode="linear"),
    "Resize beside": lambda g: g.add("Resize", g.add("Unsqueeze", _channels(g), g.ints(2)), None,
                                     Value.constant(np.array([1, 1, 2, 1], np.float32)), mode="linear"),
    "DepthToSpace": lambda g: g.add("DepthToSpace", g.add("Unsqueeze", _channels(g), g.ints(2)), blocksize=2),
    "LSTM": lambda g: _recurrent(g, "LSTM", 4, direction="bidirectional"),
    "GRU": lambda g: _recurrent(g, "GRU", 3, direction="reverse"),
    "RNN": lambda g: _recurrent(g, "RNN", 1),
    "ConvTranspose": lambda g: g.add("ConvTranspose", _channels(g), g.weight(HIDDEN, 2, 3), strides=(2,), pads=(1, 1),
                                     output_padding=(1,)),
    "Conv of a stride": lambda g: g.add("Conv", _channels(g), g.weight(3, HIDDEN, 3), strides=(2,), pads=(1, 1)),
    "Conv with auto_pad": lambda g: g.add("Conv", _channels(g), g.weight(3, HIDDEN, 4), auto_pad="SAME_LOWER"),
    "MaxPool beyond the edge": lambda g: g.add("MaxPool", _channels(g), kernel_shape=(3,), strides=(2,), ceil_mode=1),
    "AveragePool beyond the edge": lambda g: g.add("AveragePool", _channels(g), kernel_shape=(3,), strides=(2,),
                                                   pads=(1, 0), ceil_mode=1),
    "MaxPool whose channels are fixed": lambda g: g.add("MaxPool", g.add("Unsqueeze", g.x, g.ints(1)), strides=(2, 3),
                                                        kernel_shape=(3, 2), ceil_mode=1, pads=(0, 0, 0, 1)),
    "MaxPool": lambda g: g.add("MaxPool", _channels(g), kernel_shape=(3,), strides=(2,), pads=(1, 1)),
    "AveragePool": lambda g: g.add("AveragePool", _channels(g), kernel_shape=(2,), strides=(1,), pads=(1, 1),
                                   count_include_pad=1),
    "AveragePool of what is there": lambda g: g.add("AveragePool", _channels(g), kernel_shape=(3,), strides=(2,),
                                                    pads=(1, 1)),
    "AveragePool of float16": lambda g: g.add("Cast", g.add("AveragePool", g.add("Cast", _channels(g), to=10),
                                                           kernel_shape=(3,), pads=(1, 1)), to=1),
    "GlobalMaxPool": lambda g: g.add("GlobalMaxPool", _channels(g)),
    "Dropout": lambda g: g.add("Dropout", g.x),
    "MatMulInteger": lambda g: g.add("MatMulInteger", g.add("Cast", g.x, to=3),
                                     Value.constant(np.ones((HIDDEN, 2), np.int8))),
    "ConvInteger": lambda g: _quantised_conv(g, "ConvInteger"),
    "QLinearConv": lambda g: _quantised_conv(g, "QLinearConv"),
    "QuantizeLinear": lambda g: g.add("QuantizeLinear", g.x, g.number(0.1), Value.constant(np.array(3, np.uint8))),
    "InstanceNormalization": lambda g: g.add("InstanceNormalization", _channels(g), g.weight(HIDDEN), g.weight(HIDDEN)),
    "InstanceNormalization of groups": lambda g: g.add("InstanceNormalization", g.add("Reshape", _channels(g), g.ints(
        0, 2, -1)), g.weight(2), g.weight(2), epsilon=1e-3),
    "InstanceNormalization of float16": lambda g: g.add("Cast", g.add("InstanceNormalization", *[g.add(
        "Cast", v, to=10) for v in (_channels(g), g.weight(HIDDEN), g.weight(HIDDEN))]), to=1),
    "LpNormalization": lambda g: g.add("LpNormalization", g.x, axis=1),
    "MeanVarianceNormalization": lambda g: g.add("MeanVarianceNormalization", g.x, axes=(2,)),
    "Trilu": lambda g: g.add("Trilu", g.add("MatMul", g.x, _channels(g))),
    "EyeLike": lambda g: g.add("EyeLike", g.ids, dtype=1),
    "Einsum": lambda g: g.add("Einsum", g.x, g.x, equation="bsh,bth->h"),
    "Einsum of an ellipsis": lambda g: g.add("Einsum", g.x, g.x, equation="...h, ...h"),
    "Einsum over an ellipsis": lambda g: g.add("Einsum", g.x, g.weight(HIDDEN, 2), equation="...h,hk->k"),
    "merged axes": lambda g: g.add("ReduceMax", g.add("Reshape", g.x, g.ints(-1, HIDDEN)), g.ints(0)),
    "numbers in other groups": lambda g: g.add("Reshape", g.add("Reshape", g.add("Slice", g.x, g.ints(0), g.ints(6),
        g.ints(2)), g.ints(0, 0, 2, 3)), g.ints(0, 0, 3, 2)),
    "merged and kept": lambda g: g.add("Reshape", g.add("Softmax", g.add("Flatten", _heads(g), axis=3), axis=0),
                                       g.ints(-1)),
    "merged axes whose sizes are sums": lambda g: _merged_sums(g, g.add("Pad", g.x, g.ints(0, 0, 0, 1, 1, 0))),
    "Mod of sizes": lambda g: g.add("Slice", g.x, g.ints(0), g.add("Add", g.add("Mod", g.size(g.x, 2), g.ints(3)),
                                                                   g.add("Mod", g.size(g.x, 1), g.ints(1))), g.ints(2)),
    "Concat in the middle": lambda g: g.add("Concat", g.x, g.add("Neg", g.x), g.x, axis=1),
    "Tile": lambda g: g.add("ReduceSum", g.add("Tile", g.x, g.ints(2, 3, 1)), g.ints(1)),
    "Slice backwards": lambda g: g.add("Slice", g.x, g.ints(-1), g.ints(-(2**63)), g.ints(1), g.ints(-2)),
    "Pad to a multiple": lambda g: _to_a_multiple(g, "Ceil"),
    "Pad by what is known": lambda g: g.add("CumSum", g.add("Pad", g.x, g.add(
        "Concat", g.ints(0, 1, 0, 0), g.add("Add", g.size(g.x, 1), g.ints(1)), g.ints(2), axis=0)), g.scalar(1)),
    "Pad at both ends": lambda g: g.add("CumSum", g.add("Pad", g.x, g.ints(0, 1, 0, 1, 2, 0), g.number(2.0)),
                                        g.scalar(1), reverse=1),
    "size as data": lambda g: g.add("Div", g.add("ReduceSum", g.x, g.ints(1)), g.add("Sqrt", g.add("Cast", g.add(
        "Mul", g.size(g.x, 1), g.size(g.x, 0)), to=1))),
    "integer division": lambda g: g.add("ReduceSum", g.add("Div", g.mask, g.add("Add", g.ids, g.scalar(1))), g.ints(1)),
    "integer maximum": lambda g: g.add("ReduceMax", g.ids, g.ints(1)),
    "float16 mean": lambda g: g.add("ReduceMean", g.add("Cast", g.x, to=10), g.ints(1)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_rules(case: str) -> None:
    """Each rule keeps garbage out of the results, for the full bucket, sizes below it and the smallest."""
    graph, rng = build(CASES[case]), np.random.default_rng(0)
    padded = pad_graph(graph, SHAPES, BUCKETS, zero_filled=False)
    served = [(b, s) for b, s in ((4, 16), (3, 15), (1, 1), (2, 6)) if padded.why_not({"b": b, "s": s}) is None]
    assert len(served) >= 3
    for b, s in served:
        compare(graph, padded, rng, b, s, dirty=True)


def _attention(g: Builder) -> Value:
    """Attention of opset 23, of queries, keys and values of two heads."""
    y = Value("attended")
    g.nodes.append(Node("Attention", [_heads(g)] * 3, [y], {"is_causal": 1}, version=23, name="attention"))
    g.arrays[y] = g.arrays[g.nodes[-2].outputs[0]]  # type: ignore[index]
    return y


@pytest.mark.parametrize(
    "make",
    [_attention, lambda g: g.add("SoftmaxCrossEntropyLoss", _channels(g), g.add("Mod", g.ids, g.scalar(HIDDEN)))],
    ids=["Attention", "SoftmaxCrossEntropyLoss"],
)
def test_function_bodies(make: Callable[[Builder], Value]) -> None:
    """An operator without a rule is padded as what the standard says that it stands for."""
    graph, rng = build(make), np.random.default_rng(0)
    with pytest.raises(PaddingRefused, match="no rule"):
        pad_graph(graph, SHAPES, BUCKETS)
    padded = pad_graph(graph, SHAPES, BUCKETS, zero_filled=False, body_of=function_body)
    for b, s in ((4, 16), (3, 15), (1, 1), (2, 6)):
        compare(graph, padded, rng, b, s, dirty=True)


def test_a_refusal_within_a_body() -> None:
    """It names the node, and what it is refused for."""
    def make(g: Builder) -> Value:
        none = g.add("Mul", g.add("ReduceMax", g.x, g.ints(1), keepdims=0), g.number(0))
        return g.add("SoftmaxCrossEntropyLoss", g.x, g.add("Cast", none, to=7))

    with pytest.raises(PaddingRefused, match=r"SoftmaxCrossEntropyLoss 'v\d+': of what it stands for, "):
        pad_graph(build(make), SHAPES, BUCKETS, body_of=function_body)


def test_a_body_that_needs_numbers() -> None:
    """A plugin's lowering that fails for symbolic sizes is a refusal."""

    def body_of(node: Node) -> Graph | None:
        raise PluginError("the lowering needs the number")

    with pytest.raises(PaddingRefused, match=r"NonZero 'v0': what it stands for cannot be told .* needs the number"):
        pad_graph(build(lambda g: g.add("NonZero", g.x)), SHAPES, BUCKETS, body_of=body_of)


def test_branches() -> None:
    """Of an If whose condition follows from the ranges of sizes the branch that is taken is padded."""
    g = Builder(np.random.default_rng(0))
    known = g.add("Squeeze", g.add("Greater", g.size(g.x, 1), g.ints(0)))
    bodies = []
    for op in ("Exp", "Neg"):
        inner = Value(op)
        bodies.append(Graph([], [inner], [Node(op, [g.x], [inner], version=13, name=op)], opsets={"": 18}, name=op))
    y = Value("chosen")
    g.nodes.append(Node("If", [known], [y], {"then_branch": bodies[0], "else_branch": bodies[1]}, version=16))
    g.arrays[y] = g.arrays[g.x]
    padded = pad_graph(g.graph([g.add("ReduceMean", y, g.ints(1))]), SHAPES, BUCKETS, zero_filled=False)
    same = build(lambda g: g.add("ReduceMean", g.add("Exp", g.x), g.ints(1)))
    compare(same, padded, np.random.default_rng(0), 3, 9, dirty=True)


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

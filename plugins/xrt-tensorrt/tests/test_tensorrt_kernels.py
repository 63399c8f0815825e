"""Op kernels on the network API: what they write is built, and NumPy makes of its layers what the host computes.

Nothing here runs on a GPU: `network_numpy` evaluates the layers that were written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from network_numpy import evaluate
from node_table import function_of, is_numeric
from xrt_tensorrt import TensorRTEngine, _toolkit
from xrt_tensorrt.compiler import TensorRTCompiler
from xrt_tensorrt.joining import trial
from xrt_tensorrt.kernels.context import FLOATS
from xrt_tensorrt.kernels.quantization import EXACT, pieces

import xrt_core as xrt
from xrt_core.engine.contract import CompileOptions, Function
from xrt_core.engine.op_kernels import op_kernels
from xrt_core.errors import CompileError
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.inference import infer_types
from xrt_core.ir.types import TensorType
from xrt_core.kernels import OpContext, find_kernel
from xrt_core.kernels.windows import windows_of
from xrt_core.testing.generated import all_generated
from xrt_core.testing.node_cases import Case, all_cases

F32, U8, I8, BF16 = (np.dtype(t) for t in (np.float32, np.uint8, np.int8, ml_dtypes.bfloat16))
RNG = np.random.default_rng(5)


@pytest.fixture
def compiler(engine: TensorRTEngine) -> TensorRTCompiler:
    """A compiler for sm_89."""
    return engine.compiler("cuda:0", CompileOptions())


def _floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def _integers(dtype: np.dtype, *shape: int) -> np.ndarray:
    limits = np.iinfo(dtype)
    return RNG.integers(limits.min, limits.max, shape, dtype=dtype, endpoint=True)


def _function(
    op_type: str, arrays: Sequence[np.ndarray | None], attributes: Mapping[str, Any], *, domain: str = "",
    version: int, outputs: int = 1, known: Sequence[int] = (),
) -> Function:  # fmt: skip
    """A function of one node; the inputs `known` are constants."""
    values = [
        None if a is None else Value(f"x{i}", TensorType(a.dtype, a.shape), a if i in known else None)
        for i, a in enumerate(arrays)
    ]
    made = [Value(f"y{i}") for i in range(outputs)]
    node = Node(op_type, values, made, attributes, domain=domain, version=version, name="node")
    node = node.replace(outputs=[Value(v.name, t) for v, t in zip(made, infer_types(node), strict=True)])
    entries = [v for v in values if v is not None and v.data is None]
    opsets = {"": 21} if not domain else {"": 21, domain: version}
    return Function.from_graph(Graph(entries, [v for v in node.outputs if v], [node], opsets=opsets, name="f"))


def _host(function: Function, arrays: Sequence[np.ndarray | None]) -> tuple[np.ndarray, ...]:
    (node,) = function.body.nodes
    portable = find_kernel(node.domain, node.op_type)
    assert portable is not None
    found = portable.function(OpContext(node, np), *arrays)
    return tuple(found) if isinstance(found, tuple) else (found,)


def _agree(
    compiler: TensorRTCompiler, function: Function, arrays: Sequence[np.ndarray | None], rtol: float = 1e-5
) -> _toolkit.Network:
    """The function's network by kernels, after it gave what the host gives."""
    network = compiler.network(function)
    assert network.by_kernels
    given = {f"x{i}": a for i, a in enumerate(arrays) if f"x{i}" in network.model.inputs and a is not None}
    made = evaluate(network, given)
    for name, want in zip(network.model.outputs, _host(function, arrays), strict=False):
        assert made[name].dtype == want.dtype
        if want.dtype in FLOATS:
            wide = want.astype(np.float64)
            scale = float(np.abs(wide).max(initial=1.0))
            np.testing.assert_allclose(made[name].astype(np.float64), wide, rtol=rtol, atol=rtol * scale)
        else:
            np.testing.assert_array_equal(made[name], want)
    return network


# --- the standard's operators ---------------------------------------------------------------------------------------


def _cases() -> list[tuple[Case, Function]]:
    """ONNX's node tests that kernels take."""
    from xrt_tensorrt.support import verdict

    have = {op for domain, op in op_kernels.of_engine("tensorrt") if domain != "xrt"}
    found = [(c, function_of(c)) for c in all_cases() if c.node.op_type in have and is_numeric(c)]
    return [(c, f) for c, f in found if (v := verdict(f.body.nodes[0])).way == "kernel" and not v.reason]


def test_onnx_node_tests(compiler: TensorRTCompiler) -> None:
    """The expected results come out of every network that a kernel wrote for a node test."""
    cases = _cases()
    assert len(cases) >= 170
    faults = []
    for case, function in cases:
        network = compiler.network(function)
        values = function.body.nodes[0].inputs
        given = {v.name: x for v, x in zip(values, case.inputs, strict=True) if v in function.body.inputs}
        made = evaluate(network, given)
        for name, want in zip(network.model.outputs, [y for y in case.outputs if y is not None], strict=True):
            got = made[name].astype(np.float64)
            same = got.shape == want.shape and made[name].dtype == want.dtype
            if not same or not np.allclose(got, want.astype(np.float64), case.rtol, max(case.atol, 1e-5), True):
                faults.append(f"{case.name}: {made[name].dtype}{list(got.shape)} {got.ravel()[:4]}")
    assert not faults, "\n".join(faults)


def test_generated_cases(compiler: TensorRTCompiler) -> None:
    """The conformance kit's cases of other shapes, dtypes and values, against the host."""
    from xrt_tensorrt.support import verdict

    have, seen = {op for domain, op in op_kernels.of_engine("tensorrt") if not domain}, 0
    for case in [g.case() for g in all_generated() if g.op_type in have and g.dtype not in (BF16, np.float16)]:
        if case is None:
            continue
        function = function_of(case)
        found = verdict(function.body.nodes[0])
        if found.way == "kernel" and not found.reason:
            seen += 1
            _agree(compiler, function, case.inputs, rtol=1e-4)
    assert seen >= 150


def test_kernels_are_of_operators_that_exist(engine: TensorRTEngine) -> None:
    """Every kernel takes as many inputs as its operator has, and names inputs that there are."""
    import xrt_tensorrt.kernels  # noqa: F401

    op_kernels.validate("tensorrt")


def test_a_large_resize_stays_with_the_host(engine: TensorRTEngine) -> None:
    """Antialiasing that would take hundreds of layers is refused with the reason."""
    sizes = np.array([1, 1, 8, 8])
    arrays = [_floats(1, 1, 400, 400), None, None, sizes]
    function = _function("Resize", arrays, {"mode": "linear", "antialias": 1}, version=19, known=(3,))
    said = engine.supports(function.body.nodes[0], "cuda", "inference")
    assert "shrinking 50 times with antialiasing" in said.reason


@pytest.mark.parametrize("cells", [40, 4000])
def test_updates_that_meet_are_added(compiler: TensorRTCompiler, cells: int) -> None:
    """Few are added up one by one, many by a product with the matrix of where they go."""
    arrays = [_floats(cells, 16), RNG.integers(-cells, cells, (100, 1)), _floats(100, 16)]
    network = _agree(compiler, _function("ScatterND", arrays, {"reduction": "add"}, version=18), arrays)
    kinds = [str(layer.type).rpartition(".")[2] for layer in network.layers]
    assert ("MATRIX_MULTIPLY" in kinds) == (cells == 4000)


@pytest.mark.parametrize("op_type", ["ScatterND", "ScatterElements"])
def test_narrow_sums_are_rounded_once(compiler: TensorRTCompiler, op_type: str) -> None:
    """A sum of updates that float16 does not hold is none of the result's business."""
    updates = np.full(8, 10_000, np.float16)
    at = np.zeros((8, 1) if op_type == "ScatterND" else 8, np.int64)
    arrays = [np.full(2, -60_000, np.float16), at, updates]
    _agree(compiler, _function(op_type, arrays, {"reduction": "add"}, version=18), arrays, rtol=0)


# --- quantisation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [U8, I8], ids=str)
@pytest.mark.parametrize("per_axis", [False, True])
@pytest.mark.parametrize("known", [True, False])
def test_asymmetric_quantisation(compiler: TensorRTCompiler, dtype: np.dtype, per_axis: bool, known: bool) -> None:
    """Quotients that lie between two integers go to the even one, and what is beyond saturates; both ways exactly."""
    scale = np.array([0.5, 0.25, 2.0] if per_axis else 0.5, np.float32)
    zero = np.array([3, 100, 7] if per_axis else 3, dtype)
    constants = (1, 2) if known else ()
    x = (np.arange(-600, 600, dtype=np.float32) * np.float32(0.25)).reshape(4, 3, 100)
    function = _function("QuantizeLinear", [x, scale, zero], {"axis": 1}, version=21, known=constants)
    _agree(compiler, function, [x, scale, zero], rtol=0)
    q = _integers(dtype, 4, 3, 100)
    function = _function("DequantizeLinear", [q, scale, zero], {"axis": 1}, version=21, known=constants)
    _agree(compiler, function, [q, scale, zero], rtol=0)


@pytest.mark.parametrize("known", [(1, 2), ()], ids=["constants", "tensors"])
def test_quotients_of_the_precision_asked_for(compiler: TensorRTCompiler, known: tuple[int, ...]) -> None:
    """Both sides of the division, and the quotient, are rounded to it."""
    arrays = [np.linspace(0, 25, 5000, dtype=np.float32), np.array(0.1, np.float32), np.array(3, U8)]
    function = _function("QuantizeLinear", arrays, {"precision": 10}, version=23, known=known)
    _agree(compiler, function, arrays, rtol=0)


def test_constants_are_dequantised_ahead(compiler: TensorRTCompiler) -> None:
    """A weight of uint8 that is only dequantised is a float weight of the network, and no layer of it."""
    w, scale, zero = _integers(U8, 8, 8), np.float32(0.1), np.uint8(120)
    x, d, y = (Value(n, TensorType(F32, (2, 8) if n != "d" else (8, 8))) for n in "xdy")
    given = [Value.constant(np.asarray(a), n) for a, n in ((w, "w"), (scale, "scale"), (zero, "zero"))]
    nodes = [
        Node("DequantizeLinear", given, [d], version=21, name="dequantise"),
        Node("MatMul", [x, d], [y], version=13, name="product"),
    ]
    network = compiler.network(Function.from_graph(Graph([x], [y], nodes, opsets={"": 21}, name="f")))
    data = _floats(2, 8)
    want = data @ ((w.astype(np.float32) - 120) * scale)
    np.testing.assert_allclose(evaluate(network, {"x": data})["y"], want, rtol=1e-5, atol=1e-5)
    assert not [layer.name for layer in network.layers if layer.name.startswith("dequantise")]


@given(
    st.lists(st.integers(0, 255), min_size=1, max_size=300),
    st.integers(1, 255 * 255),
)
def test_sums_are_cut_where_float32_ends(heaviest: list[int], each: int) -> None:
    """The pieces follow one another, and none can reach 2^24 unless it is a single product."""
    found = pieces(len(heaviest), np.array(heaviest, np.int64), each)
    assert [s for s, _ in found] == list(np.cumsum([0, *(n for _, n in found)])[:-1])
    assert sum(n for _, n in found) == len(heaviest)
    for start, size in found:
        assert size == 1 or sum(heaviest[start : start + size]) * each < EXACT
    assert len(found) <= 2 * (sum(heaviest) * each // EXACT) + 1


@pytest.mark.parametrize("known", [(), (1, 3), (0, 2)])
def test_products_of_integers_are_exact(compiler: TensorRTCompiler, known: tuple[int, ...]) -> None:
    """Sums far above 2^24, of the largest products there are."""
    a, b = np.full((2, 3, 700), 255, np.uint8), np.full((700, 5), -128, np.int8)
    a[0] = _integers(U8, 3, 700)
    arrays = [a, b, np.array(0, np.uint8), np.array([127] * 4 + [0], np.int8)]
    function = _function("MatMulInteger", arrays, {}, version=10, known=known)
    network = _agree(compiler, function, arrays)
    products = [x for x in network.layers if str(x.type).endswith("MATRIX_MULTIPLY")]
    assert len(products) >= 3


@pytest.mark.parametrize("known", [(), (1, 3)])
@pytest.mark.parametrize("group", [1, 2])
def test_convolutions_of_integers_are_exact(compiler: TensorRTCompiler, known: tuple[int, ...], group: int) -> None:
    """Padding counts as the zero point, sums go beyond 2^24, and groups stay apart."""
    channels = 64 if group == 1 else 8
    arrays = [
        _integers(U8, 1, channels, 6, 6), _integers(I8, 4, channels // group, 3, 3), np.array(255, np.uint8),
        np.array([127, -128, 0, 5], np.int8),
    ]  # fmt: skip
    attributes = {"pads": (1, 1, 0, 1), "strides": (2, 1), "group": group}
    _agree(compiler, _function("ConvInteger", arrays, attributes, version=10, known=known), arrays)


def test_quantised_products_and_convolutions(compiler: TensorRTCompiler) -> None:
    """QLinearMatMul with a scale for each column, QLinearConv with one for each channel and a bias."""
    a, b = _integers(U8, 3, 20), _integers(U8, 20, 4)
    scales = [np.float32(0.02), np.array([0.1, 0.2, 0.3, 0.01], np.float32), np.float32(0.7)]
    zeros = [np.uint8(7), np.array([1, 2, 200, 0], np.uint8), np.uint8(130)]
    arrays = [np.asarray(p) for p in (a, scales[0], zeros[0], b, scales[1], zeros[1], scales[2], zeros[2])]
    _agree(compiler, _function("QLinearMatMul", arrays, {}, version=21, known=(1, 2, 3, 4, 5, 6, 7)), arrays)

    x, w = _integers(U8, 1, 3, 6, 6), _integers(I8, 4, 3, 3, 3)
    bias = np.array([100, -2000, 3, 0], np.int32)
    parts = (x, scales[0], zeros[0], w, scales[1], np.zeros(4, np.int8), scales[2], zeros[2], bias)
    arrays = [np.asarray(p) for p in parts]
    _agree(compiler, _function("QLinearConv", arrays, {"pads": (1, 1, 1, 1)}, version=10, known=range(1, 9)), arrays)


def test_dynamic_quantisation(compiler: TensorRTCompiler) -> None:
    """Also of nothing but zeros, whose scale is 1."""
    for x in (_floats(3, 5), np.zeros((3, 5), np.float32)):
        _agree(compiler, _function("DynamicQuantizeLinear", [x], {}, version=11, outputs=3), [x])


@pytest.mark.parametrize("sign", [np.uint8, np.int8], ids=["uint8", "int8"])
def test_remainders_of_eight_bits(compiler: TensorRTCompiler, sign: Any) -> None:
    """With the dividend's sign as well, where the parser's layers are not built; uint8 meets floats alone."""
    arrays = [_integers(np.dtype(sign), 40), np.resize(np.array([3, 7, 5, 2, 100], sign), 40)]
    function = _function("Mod", arrays, {"fmod": 1}, version=13)
    network = _agree(compiler, function, arrays)
    assert compiler.compile(function, function.params, function.returns, ())
    casts = [layer for layer in network.layers if str(layer.type).endswith("CAST")]
    pairs = [{network.toolkit.dtype(t.dtype) for t in (x.get_input(0), x.get_output(0))} for x in casts]
    assert casts
    assert all(U8 not in p or F32 in p for p in pairs)


def test_zero_points_of_many_channels_are_told_apart(engine: TensorRTEngine) -> None:
    """The parser takes zeros alone; what it said of them is not said of others of the same size."""
    from xrt_tensorrt.support import verdict

    ways = []
    for zero in (np.zeros(5000, np.int8), np.ones(5000, np.int8)):
        arrays = [_floats(2, 5000), np.ones(5000, np.float32), zero]
        (node,) = _function("QuantizeLinear", arrays, {"axis": 1}, version=21, known=(1, 2)).body.nodes
        ways.append(verdict(node).way)
    assert ways == ["parser", "kernel"]


# --- the dialect ----------------------------------------------------------------------------------------------------

_windows = st.fixed_dictionaries(
    {
        "kernel_shape": st.tuples(st.integers(1, 3), st.integers(1, 3)),
        "strides": st.tuples(st.integers(1, 3), st.integers(1, 3)),
        "dilations": st.tuples(st.integers(1, 2), st.integers(1, 2)),
        "pads": st.tuples(*[st.integers(0, 1)] * 4),
    }
)


@settings(max_examples=20, deadline=None)
@given(_windows, st.sampled_from([1, 2]))
def test_gradients_of_windows(attributes: dict[str, Any], group: int) -> None:
    """Filters, maxima (with many that are equal) and means give what the host's gradients are."""
    compiler = TensorRTEngine().targeting("sm_89").compiler("cuda:0", CompileOptions())
    probe = Node("probe", [], [], attributes, version=1)
    windows = windows_of(OpContext(probe, np), (7, 8), attributes["kernel_shape"])
    x, dy = np.round(_floats(2, 4, 7, 8)), _floats(2, 4, *windows.out)
    arrays: list[np.ndarray | None] = [x, dy]
    grouped = {**attributes, "group": group}
    _agree(compiler, _function("ConvFilterGrad", arrays, grouped, domain="xrt", version=1), arrays)
    pooled = _function("MaxPool", [x], attributes, version=12)
    arrays = [dy, x, _host(pooled, [x])[0]]
    _agree(compiler, _function("MaxPoolGrad", arrays, attributes, domain="xrt", version=1), arrays)
    arrays = [dy]
    for include in (0, 1):
        more = {**attributes, "size": (7, 8), "count_include_pad": include}
        _agree(compiler, _function("AveragePoolGrad", arrays, more, domain="xrt", version=1), arrays)


def test_the_rest_of_the_dialect(compiler: TensorRTCompiler) -> None:
    """Gradients of normalisation, new values of variables, and what stops a gradient; and a convolution of one axis."""
    arrays = [_floats(3, 4, 5), _floats(3, 4, 5), _floats(4)]
    _agree(compiler, _function("BatchNormGrad", arrays, {}, domain="xrt", version=1, outputs=3), arrays, rtol=1e-4)
    pair = [_floats(3), _floats(3)]
    _agree(compiler, _function("Assign", pair, {}, domain="xrt", version=1), pair)
    _agree(compiler, _function("StopGradient", pair[:1], {}, domain="xrt", version=1), pair[:1])
    line = [_floats(2, 3, 9), _floats(2, 5, 7)]
    _agree(compiler, _function("ConvFilterGrad", line, {"kernel_shape": (3,)}, domain="xrt", version=1), line)


def test_labels_that_are_no_classes(compiler: TensorRTCompiler) -> None:
    """Nothing is read where they point; the loss is NaN there, and nothing for those that are ignored."""
    arrays = [_floats(4, 3), np.array([2, 3, -2, -1])]
    attributes = {"reduction": "none", "ignore_index": -1}
    function = _function("SoftmaxCrossEntropyLoss", arrays, attributes, version=13)
    network = compiler.network(function)
    (loss,) = evaluate(network, {"x0": arrays[0], "x1": arrays[1]}).values()
    assert np.isnan(loss).tolist() == [False, True, True, False]
    assert loss[3] == 0
    assert compiler.compile(function, function.params, function.returns, ())


@pytest.mark.parametrize("attributes", [{}, {"alpha": 0.0, "beta": 0.0, "epsilon": 0.01}], ids=["usual", "no memory"])
@pytest.mark.parametrize("count", [0, 1, 1700, 100_000])
def test_adam_at_any_count(compiler: TensorRTCompiler, count: int, attributes: dict[str, Any]) -> None:
    """What is corrected for bias fades away over many updates, and nothing overflows."""
    arrays = [np.asarray(a) for a in (np.float32(0.1), np.int64(count), *(_floats(3) for _ in range(4)))]
    arrays[-1] = np.abs(arrays[-1])
    domain = "ai.onnx.preview.training"
    _agree(compiler, _function("Adam", arrays, attributes, domain=domain, version=1, outputs=3), arrays)


# --- together with the parser ---------------------------------------------------------------------------------------


def _mixed(batch: int = 2) -> Function:
    """A parser's Relu, a kernel's quantisation to uint8 that is returned too, its transposition, and a kernel again."""
    x, r, y = (Value(n, TensorType(F32, (batch, 3, 4))) for n in "xry")
    q, t = Value("q", TensorType(U8, (batch, 3, 4))), Value("t", TensorType(U8, (batch, 4, 3)))
    d, z = (Value(n, TensorType(F32, (batch, 4, 3))) for n in "dz")
    scale, zero = Value.constant(np.float32(0.1), "scale"), Value.constant(np.uint8(7), "zero")
    nodes = [
        Node("Relu", [x], [r], version=14, name="relu"),
        Node("QuantizeLinear", [r, scale, zero], [q], version=21, name="quantise"),
        Node("Transpose", [q], [t], {"perm": (0, 2, 1)}, version=21, name="turn"),
        Node("DequantizeLinear", [t, scale, zero], [d], version=21, name="dequantise"),
        Node("Relu", [d], [z], version=14, name="last"),
        Node("StopGradient", [r], [y], domain="xrt", version=1, name="stop"),
    ]
    opsets = {"": 21, "xrt": 1}
    return Function.from_graph(Graph([x], [z, q, t, d, y, x], nodes, opsets=opsets, name="mixed"))


def _expected(x: np.ndarray) -> list[np.ndarray]:
    r = np.maximum(x, 0)
    q = np.clip(np.rint(r / np.float32(0.1)) + 7, 0, 255).astype(np.uint8)
    t = q.transpose(0, 2, 1)
    d = (t.astype(np.float32) - 7) * np.float32(0.1)
    return [np.maximum(d, 0), q, t, d, r, x]


def test_kernels_between_parsed_layers(compiler: TensorRTCompiler) -> None:
    """No layer reads a placeholder, results have the function's types and numbers, and the engine is built."""
    function = _mixed()
    network = compiler.network(function)
    x = _floats(2, 3, 4)
    made = evaluate(network, {"x": x})
    for name, want in zip(network.model.outputs, _expected(x), strict=True):
        assert made[name].dtype == want.dtype
        np.testing.assert_allclose(made[name], want, rtol=1e-6)
    read = {layer.get_input(i).name for layer in network.layers for i in range(layer.num_inputs) if layer.get_input(i)}
    assert not {name for name in read if name.endswith(("/placeholder", "/zeros"))}
    assert {"relu", "turn", "last", "quantise/0", "dequantise/0"} <= {layer.name for layer in network.layers}
    for target in ("sm_80", "sm_89"):
        made_ = TensorRTEngine().targeting(target).compiler("cuda:0", CompileOptions())
        assert made_.compile(function, function.params, function.returns, ()).serialize()


def test_any_batch_with_kernels(engine: TensorRTEngine) -> None:
    """The batch stays open through placeholders: one engine for two batches, and a network that shows it."""
    compiler = engine.compiler("cuda:0", CompileOptions(max_batch_size=8))
    made = [compiler.compile(f, f.params, f.returns, ()) for f in (_mixed(2), _mixed(5))]
    assert made[0].built is made[1].built  # type: ignore[attr-defined]
    network = compiler.network(_mixed(2), -1)
    assert {t.shape[0] for t in (*network.inputs, *network.outputs)} == {-1}
    other = compiler.network(_mixed(2), 7)
    x = _floats(7, 3, 4)
    found = evaluate(other, {"x": x})
    for name, want in zip(other.model.outputs, _expected(x), strict=True):
        np.testing.assert_allclose(found[name], want, rtol=1e-6)


_ones = lambda *shape: np.ones(shape, np.float32)  # noqa: E731
_SCATTERED = {"reduction": "add", "axis": 1}


@pytest.mark.parametrize(
    "function",
    [
        _function("ScatterElements", [_ones(1, 4), np.zeros((1, 4), np.int64), _ones(1, 4)], _SCATTERED,
                  version=18, known=(1, 2)),
        _function("ScatterND", [_ones(2, 4), np.zeros((2, 1), np.int64), _ones(2, 4)], {"reduction": "add"},
                  version=18),
        _function("MaxUnpool", [_ones(2, 1, 2, 2), np.zeros((2, 1, 2, 2), np.int64)], {"kernel_shape": (2, 2)},
                  version=22),
    ],
    ids=lambda f: f.body.nodes[0].op_type,
)  # fmt: skip
def test_kernels_that_must_know_the_batch(engine: TensorRTEngine, function: Function) -> None:
    """They refuse an open one, and the function gets an engine of its own batch."""
    compiler = engine.compiler("cuda:0", CompileOptions(max_batch_size=8))
    with pytest.raises(CompileError, match="is open, and a kernel must know its length"):
        compiler.network(function, -1)
    made = compiler.compile(function, function.params, function.returns, ())
    assert made.built.manifest.profiles == ()  # type: ignore[attr-defined]


def test_what_kernels_give_the_parser(compiler: TensorRTCompiler) -> None:
    """Scalars, booleans and 64-bit integers take their places among the layers of the parser; constants come back."""
    x, b = Value("x", TensorType(F32, (2, 3, 6, 6))), Value("b", TensorType(np.dtype(bool), (4, 5)))
    q, s, z = Value("q", TensorType(U8, (2, 3, 6, 6))), Value("s", TensorType(F32, ())), Value("z", TensorType(U8, ()))
    best = Value("best", TensorType(F32, (2, 3, 2, 2)))
    at, twice = (Value(n, TensorType(np.dtype(np.int64), (2, 3, 2, 2))) for n in ("at", "twice"))
    some, none = (Value(n, TensorType(np.dtype(bool), (4,))) for n in ("some", "none"))
    double, weight = Value("double", TensorType(F32, ())), Value("weight", TensorType(F32, (3,)))
    quantised = Value.constant(np.array([1, 200, 255], np.uint8), "w")
    scale, zero = Value.constant(np.float32(0.5), "scale"), Value.constant(np.uint8(3), "zero")
    axes = Value.constant(np.array([1]), "axes")
    nodes = [
        Node("DynamicQuantizeLinear", [x], [q, s, z], version=11),
        Node("Add", [s, s], [double], version=14),
        Node("MaxPool", [x], [best, at], {"kernel_shape": (3, 3), "strides": (3, 3)}, version=12),
        Node("Add", [at, at], [twice], version=14),
        Node("ReduceMax", [b, axes], [some], {"keepdims": 0}, version=20),
        Node("Not", [some], [none], version=1),
        Node("DequantizeLinear", [quantised, scale, zero], [weight], version=21),
    ]
    outputs = [double, twice, none, weight, z, z]
    network = compiler.network(Function.from_graph(Graph([x, b], outputs, nodes, opsets={"": 21}, name="f")))
    data, held = _floats(2, 3, 6, 6), RNG.integers(0, 2, (4, 5)).astype(bool)
    made = evaluate(network, {"x": data, "b": held})
    span = max(data.max(), 0) - min(data.min(), 0)
    pooled = _host(_function("MaxPool", [data], nodes[2].attributes, version=12, outputs=2), [data])
    shift = np.uint8(np.rint(-min(data.min(), 0) / (span / 255)))
    wanted = [span * 2 / 255, pooled[1] * 2, ~held.any(axis=1), np.array([-1, 98.5, 126], np.float32), shift, shift]
    for name, want in zip(network.model.outputs, wanted, strict=True):
        np.testing.assert_allclose(made[name].astype(np.float64), np.asarray(want, np.float64), rtol=1e-6)


def test_a_kernel_that_makes_something_else_is_refused(
    compiler: TensorRTCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another shape than the node's is an error that names both."""
    entry = op_kernels.find("tensorrt", "xrt", "StopGradient")
    assert entry is not None
    function = _mixed()
    compiler.network(function)  # its nodes are known to be taken
    wrong = lambda ctx, x: x.transpose((0, 2, 1))  # noqa: E731
    monkeypatch.setitem(
        op_kernels._kernels, ("tensorrt", "xrt", "StopGradient"),
        type(entry)("tensorrt", "xrt", "StopGradient", wrong, ("cuda",), train=True),
    )  # fmt: skip
    with pytest.raises(CompileError, match=r"Gradient makes float32\[2, 4, 3\] of 'y', which is float32\[2, 3, 4\]"):
        compiler.network(function)


def test_a_kernel_that_fails_costs_its_node(compiler: TensorRTCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it raises is the node's reason, and an error of the compiler."""
    function = _mixed()
    compiler.network(function)  # its nodes are known to be taken

    def failing(ctx: Any, x: Any) -> Any:
        raise ValueError("math domain error")

    key = ("tensorrt", "xrt", "StopGradient")
    monkeypatch.setitem(op_kernels._kernels, key, type(op_kernels._kernels[key])(*key, failing, ("cuda",), train=True))
    said = r"the kernel for xrt\.StopGradient fails: ValueError: math domain error"
    with pytest.raises(CompileError, match=said):
        compiler.network(function)
    assert re.search(said, trial(_toolkit.toolkit(), function.body.nodes[-1]))


def test_kernels_keep_their_weights_in_stripped_engines(engine: TensorRTEngine) -> None:
    """Nothing could give back what kernels' layers hold, so such an engine is built whole."""
    compiler = engine.compiler("cuda:0", CompileOptions(extra={"strip_weights": True}))
    function = _mixed()
    made = compiler.compile(function, function.params, function.returns, ())
    assert not made.built.manifest.stripped  # type: ignore[attr-defined]


def test_weights_of_four_bits(engine: TensorRTEngine) -> None:
    """Constants of types that TensorRT does not have are dequantised ahead, by blocks and with zero points."""
    w = Value.constant(np.arange(16).reshape(4, 4).astype(ml_dtypes.uint4), "w")
    scale, zero = Value.constant(_floats(2, 4), "scale"), Value.constant(np.full((2, 4), 7, ml_dtypes.uint4), "zero")
    x, d, y = (Value(n, TensorType(F32, (4, 4))) for n in "xdy")
    node = Node("DequantizeLinear", [w, scale, zero], [d], {"axis": 0, "block_size": 2}, version=21, name="weights")
    nodes = [node, Node("MatMul", [x, d], [y], version=13, name="product")]
    assert engine.supports(node, "cuda", "inference")
    function = Function.from_graph(Graph([x], [y], nodes, opsets={"": 21}, name="f"))
    network = engine.compiler("cuda:0", CompileOptions()).network(function)
    assert w.data is not None
    assert scale.data is not None
    data = _floats(4, 4)
    want = data @ ((w.data.astype(np.float32) - 7) * np.repeat(scale.data, 2, axis=0))
    np.testing.assert_allclose(evaluate(network, {"x": data})["y"], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=str)
def test_narrow_floats(compiler: TensorRTCompiler, dtype: Any) -> None:
    """Pooling and its gradient, scattering and normalisation in 16 bits, and networks of them that are built."""
    x, dy = _floats(2, 3, 6, 6).astype(dtype), _floats(2, 3, 4, 4).astype(dtype)
    window = {"kernel_shape": (2, 2), "dilations": (2, 2)}
    normed: list[np.ndarray | None] = [x, x, x[0, :, 0, 0]]
    cases: list[tuple[Function, list[np.ndarray | None]]] = [
        (_function("AveragePool", [x], window, version=22), [x]),
        (_function("ConvFilterGrad", [x, dy], {"kernel_shape": (3, 3)}, domain="xrt", version=1), [x, dy]),
        (_function("BatchNormGrad", normed, {}, domain="xrt", version=1, outputs=3), normed),
    ]
    scattered: list[np.ndarray | None] = [x[0, 0], np.array([[1], [1], [-1]]), x[0, 1, :3]]
    for reduction in ("add", "mul", "max", "min"):
        cases.append((_function("ScatterND", scattered, {"reduction": reduction}, version=18), scattered))
    for function, arrays in cases:
        _agree(compiler, function, arrays, rtol=0.02)
        assert compiler.compile(function, function.params, function.returns, ())


@pytest.mark.gpu
def test_on_a_gpu(gpu: None) -> None:
    """The engine of parsed layers and kernels between them computes what NumPy does."""
    x = _floats(2, 3, 4)
    made = xrt.XRTModule(_mixed().body, engine="tensorrt", prune=False)(x)
    for got, want in zip(made, _expected(x), strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float64), want.astype(np.float64), rtol=1e-5, atol=1e-6)

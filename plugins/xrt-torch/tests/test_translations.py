"""What torchlib lacks or gets wrong, and is written here: against torch eager in float64, with gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

import xrt_torch  # noqa: E402
from xrt_torch import groups, ordering, polynomials, pooling, resampling, special_functions, windows  # noqa: E402
from xrt_torch.backend import captured  # noqa: E402
from xrt_torch.compiled import CompiledGraph  # noqa: E402
from xrt_torch.decompositions import table  # noqa: E402
from xrt_torch.partition import AT_BORDER  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
aten = torch.ops.aten


def agrees(function: Callable[..., Any], *args: Any) -> list[CompiledGraph]:
    """Results and gradients of a function on XRT's host are eager's, twice; return its graphs."""
    graphs: list[CompiledGraph] = []
    call = captured(function, {"engine": "host"}, graphs)

    def run(f: Callable[..., Any]) -> list[Any]:
        given = [a.detach().clone().requires_grad_(a.requires_grad) for a in args]
        result = f(*given)
        wanted = [g for g in given if g.requires_grad]
        real = torch.view_as_real(result) if result.is_complex() else result
        return [result.detach(), *(torch.autograd.grad(real.square().sum(), wanted) if wanted else ())]

    for _ in range(2):
        for a, b in zip(run(call), run(function), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    assert graphs
    assert all(g.reason is None for g in graphs), [g.reason for g in graphs]
    return graphs


def _spectral_gate(x: Any) -> Any:
    """Spectra that are scaled by their magnitudes, and transformed back."""
    window = torch.hann_window(16, dtype=x.dtype)
    spectrum = torch.stft(x, 16, window=window, return_complex=True)
    size = spectrum.abs()
    return torch.istft(spectrum * (size / (1 + size)), 16, window=window)


COMPLEX: dict[str, Callable[[Any], Any]] = {
    "fft, a filter, and back": lambda x: torch.fft.irfft(torch.fft.rfft(x) * torch.linspace(0, 1, 17), n=32),
    "two dimensions": lambda x: torch.fft.fft2(x.reshape(4, 4, 8), norm="ortho"),
    "odd lengths": lambda x: torch.fft.irfftn(torch.fft.rfftn(x[:, :31], dim=(0, 1)), s=(4, 31)),
    "products and quotients": lambda x: torch.complex(x, x + 1) * (2 - 1j) / torch.complex(x, 3 - x),
    "matrices": lambda x: torch.complex(x, -x) @ torch.complex(x, 2 * x).mH,
    "polar": lambda x: torch.polar(x.abs() + 1, x).conj().exp(),
    "rotation of queries": lambda x: torch.view_as_real(
        torch.view_as_complex(x.reshape(4, 16, 2)) * torch.polar(torch.ones(16).double(), torch.arange(16.0).double())
    ),
    "parts": lambda x: torch.cat([torch.complex(x, 2 * x).real, torch.complex(x, x * x).imag]).angle(),
    "angles and signs": lambda x: torch.complex(x, x + 2).angle() + torch.complex(x, x).sgn().imag,
}


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_numbers_are_computed_by_their_parts(name: str) -> None:
    """Forward and backward; torch does nothing but take apart what comes in, and put together what goes out."""
    torch.manual_seed(0)
    graphs = agrees(COMPLEX[name], torch.randn(4, 32, dtype=torch.float64, requires_grad=True))
    assert not [why for g in graphs for why in g.eager_nodes.values() if AT_BORDER not in why]


def test_short_time_fourier_transforms() -> None:
    """What the inverse needs of data runs in torch; the spectra do not."""
    torch.manual_seed(0)
    graphs = agrees(_spectral_gate, torch.randn(2, 128, dtype=torch.float64, requires_grad=True))
    left = [why for g in graphs for why in g.eager_nodes.values() if AT_BORDER not in why]
    assert not [why for why in left if "complex numbers" in why], left


OF_REALS: dict[str, Callable[[Any], Any]] = {
    "expm1": torch.expm1,
    "log1p": torch.log1p,
    "ldexp": lambda z: torch.ldexp(z, torch.arange(3.0)),
    "logaddexp": lambda z: torch.logaddexp(z, z * 2),
    "logcumsumexp": lambda z: z.logcumsumexp(0),
    "cumprod": lambda z: z.cumprod(0),
    "real zeros": lambda z: z + torch.zeros_like(z, dtype=torch.float64) + torch.full_like(z, 3, dtype=torch.float64),
    "constants": lambda z: z * torch.tensor([1j, 2.0, 3 + 1j], dtype=torch.complex128),
}


@pytest.mark.parametrize("name", OF_REALS)
def test_what_is_written_for_real_numbers_is_not_taken_for_complex_ones(name: str) -> None:
    """`expm1` and `log1p` had the real parts alone, so that the comparison left the graph to eager."""
    agrees(OF_REALS[name], torch.randn(3, dtype=torch.complex128))


def test_complex_inputs_and_operators_without_a_rule() -> None:
    """A conjugate comes in; an operator of LAPACK computes with complex numbers in torch, between stages of XRT."""
    z = torch.randn(3, 3, dtype=torch.complex128) + 3 * torch.eye(3)
    graphs = agrees(lambda v: torch.linalg.inv_ex(v * 2)[0] * 1j, z.conj())
    reasons = [why for g in graphs for why in g.eager_nodes.values()]
    assert any("inv_ex" in why for why in reasons), reasons


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.bfloat16, torch.float16, torch.float64])
def test_of_equal_elements_the_first_comes_first(dtype: Any) -> None:
    """As torch's own stable sort has it, which XRT's numbers are compared with."""
    x = torch.randint(0, 2 if dtype is torch.bool else 4, (3, 40)).to(dtype)
    graphs: list[CompiledGraph] = []
    call = captured(
        lambda v: (*torch.sort(v, dim=1), *torch.sort(v, dim=0, descending=True)), {"engine": "host"}, graphs
    )
    for _ in range(2):
        found = call(x)
    want = (*torch.sort(x, stable=True, dim=1), *torch.sort(x, stable=True, dim=0, descending=True))
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    assert not [why for g in graphs for why in (*g.eager_nodes.values(), *filter(None, [g.reason]))]
    if dtype is not torch.bool:
        values, indices = captured(lambda v: torch.topk(v, 5), {"engine": "host"}, [])(x)
        assert torch.equal(values, torch.topk(x, 5)[0])
        assert torch.equal(torch.gather(x, -1, indices), values)


def test_grids_sample_with_gradients() -> None:
    """All kinds of interpolation and padding, images and volumes, places outside included."""
    torch.manual_seed(0)
    kinds = itertools.product((2, 3), (0, 1, 2), (0, 1, 2), (True, False))
    for axes, interpolation, padding, align in kinds:
        if axes == 3 and interpolation == 2:
            continue
        x = torch.randn(2, 3, *(5, 7, 4)[:axes], dtype=torch.float64)
        grid = torch.rand(2, *(4, 6, 3)[:axes], axes, dtype=torch.float64) * 3 - 1.5
        name = f"grid_sampler_{axes}d"
        args = x, grid, interpolation, padding, align
        want = getattr(aten, name).default(*args)
        torch.testing.assert_close(resampling.grid_sampler(*args), want, rtol=1e-9, atol=1e-9)
        grad = torch.randn_like(want)
        found = resampling.grid_sampler_backward(grad, *args, (True, True))
        for a, b in zip(found, getattr(aten, f"{name}_backward").default(grad, *args, (True, True)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("align", [True, False])
def test_places_that_are_no_numbers_are_torchs(padding: str, align: bool) -> None:
    """Linear samples are GridSample where a reflection leaves no doubt about them; NaN and infinities as in eager."""
    inf, nan = float("inf"), float("nan")
    x = torch.randn(2, 3, 9, 7, dtype=torch.float64)
    grid = torch.rand(2, 5, 6, 2, dtype=torch.float64) * 3 - 1.5
    odd = [[inf, 0], [-inf, 0], [nan, 0], [0, inf], [0, nan], [nan, nan], [inf, nan], [inf, inf], [3, 0], [0, -9]]
    grid[1, :2, :5] = torch.tensor(odd).reshape(2, 5, 2)
    graphs: list[Any] = []

    def f(v: Any, g: Any) -> Any:
        return torch.nn.functional.grid_sample(v, g, "bilinear", padding, align)

    call = captured(f, {"engine": "host"}, graphs)
    for _ in range(2):
        torch.testing.assert_close(call(x, grid), f(x, grid), equal_nan=True)
    operators = {n.op_type for n in graphs[0]._stages[0].module.graph.nodes}
    assert ("GridSample" in operators) == (padding != "reflection")


def test_windows_unfold_and_add_up() -> None:
    """Windows of all kinds, of one image too, those that torch's own decompositions compute included."""
    torch.manual_seed(0)
    own, n = windows.decompositions(), 0
    kernels, strides = ((3, 3), (2, 4), (1, 1), (9, 8)), ((1, 1), (2, 2), (4, 3))
    for kernel, dilation, padding, stride in itertools.product(kernels, ((1, 1), (2, 1)), ((0, 0), (1, 2)), strides):
        how = [*map(list, (kernel, dilation, padding, stride))]
        for sizes in ((2, 3, 19, 11), (3, 18, 10)):
            x = torch.randn(sizes, dtype=torch.float64)
            patches = aten.im2col.default(x, *how)
            assert torch.equal(own[aten.im2col.default](x, *how), patches)
            grad, size = torch.randn_like(patches), list(sizes[-2:])
            want = aten.col2im.default(grad, size, *how)
            torch.testing.assert_close(own[aten.col2im.default](grad, size, *how), want)
            n += 1
    for size, step, dim in itertools.product((1, 3, 4, 7), (1, 2, 3, 5, 9), (0, 1, -1)):
        x = torch.randn(9, 10, 11, dtype=torch.float64)
        args = torch.randn_like(x.unfold(dim, size, step)), [*x.shape], dim, size, step
        want = aten.unfold_backward.default(*args)
        torch.testing.assert_close(own[aten.unfold_backward.default](*args), want)
    assert n == 96


@pytest.mark.parametrize("kind", ["several", "written", "overlap"])
def test_indices_of_32_bits_cut_no_graph(kind: str) -> None:
    """ONNX's operators on several indices have none, and a result of theirs had no type: the rest waited for it. Frames
    that overlap were added by one such operator for each of their elements."""
    graphs: list[Any] = []
    x, window = torch.randn(6, 1024), torch.hann_window(256)
    i, j = torch.tensor([1, 3, 3], dtype=torch.int32), torch.tensor([0, 2, 7], dtype=torch.int32)

    def f(v: Any, i: Any, j: Any, window: Any) -> Any:
        if kind == "several":
            return v[i, j] * 2
        if kind == "written":
            return torch.index_put(v, (i, j), torch.ones(3), accumulate=True) * 2
        spectrum = torch.stft(v, 256, 64, window=window, return_complex=True)
        return torch.istft(spectrum, 256, 64, window=window)

    call = captured(f, {"engine": "onnxruntime", "guard": False}, graphs)
    for _ in range(2):
        torch.testing.assert_close(call(x, i, j, window), f(x, i, j, window))
    (graph,) = graphs
    assert graph.reason is None
    (stage,) = graph._stages
    assert "Late" not in {n.op_type for n in stage.module.partitioned().nodes}
    assert len(stage.module.graph.nodes) < 150


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("align", [True, False])
def test_resizing_with_antialiasing(align: bool, mode: str) -> None:
    """Smaller, larger, and both; with its gradient, all of it on XRT."""
    resize = torch.nn.functional.interpolate
    for size in ((3, 4), (5, 20), (1, 1)):
        graphs = agrees(
            lambda v, size=size: resize(v, size=size, mode=mode, align_corners=align, antialias=True),
            torch.randn(2, 3, 8, 9, dtype=torch.float64, requires_grad=True),
        )
        assert not any(g.eager_nodes for g in graphs)


def test_chebyshev_polynomials_of_any_degree() -> None:
    """Within, at and outside of the interval, negative degrees, NaN."""
    x = torch.cat([torch.linspace(-3, 3, 120, dtype=torch.float64), torch.tensor([1.0, -1.0, 0.5, math.nan])])
    n = torch.tensor([-2.0, 0.0, 1.0, 2.0, 5.0, 9.0, 12.0, 31.5], dtype=torch.float64)
    a, b = (t.contiguous() for t in torch.broadcast_tensors(x.double().unsqueeze(1), n))
    for operator, function in polynomials.decompositions().items():
        if operator._overloadname == "default":
            torch.testing.assert_close(function(a, b), operator(a, b), rtol=1e-10, atol=1e-10, equal_nan=True)


def test_polynomials_by_recurrence_run_in_a_loop() -> None:
    """On XRT's host, with NaN and degrees below zero; torch gives up Hermite's above a degree."""
    x = torch.cat([torch.linspace(-3, 3, 31, dtype=torch.float64), torch.tensor([1.0, -1.0, math.nan])])
    n = torch.tensor([-2.0, 0.0, 1.0, 2.0, 7.0, 31.5], dtype=torch.float64)
    a, b = (t.contiguous() for t in torch.broadcast_tensors(x.double().unsqueeze(1), n))
    for family in ("hermite_polynomial_h", "hermite_polynomial_he", "laguerre_polynomial_l", "legendre_polynomial_p"):
        function = getattr(torch.special, family)
        graphs: list[CompiledGraph] = []
        call = captured(lambda u, v, function=function: function(u, v), {"engine": "host"}, graphs)
        for _ in range(2):
            torch.testing.assert_close(call(a, b), function(a, b), rtol=1e-10, atol=1e-10, equal_nan=True)
        assert not [why for g in graphs for why in (*g.eager_nodes.values(), *filter(None, [g.reason]))]
    high = torch.full([2], 600.0, dtype=torch.float64)
    decomposed = table()[aten.special_hermite_polynomial_he.default](a[:2, 0], high)
    torch.testing.assert_close(decomposed, torch.special.hermite_polynomial_he(a[:2, 0], high), equal_nan=True)


def test_zeta_of_hurwitz() -> None:
    """Below zero too, at the poles, and where it is not defined."""
    s = torch.tensor([1.0, 1.5, 2.0, 3.0, 5.5, 8.0, 20.0, 0.5, math.nan], dtype=torch.float64).unsqueeze(1)
    q = torch.cat([torch.linspace(-12.3, 15, 57), torch.tensor([0.0, -1.0, -2.0, 1e-3, 1e5, math.nan])]).double()
    s, q = torch.broadcast_tensors(s, q)
    found = special_functions.zeta(s, q)
    torch.testing.assert_close(found, torch.special.zeta(s, q), rtol=1e-10, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_next_numbers(dtype: Any) -> None:
    """All pairs of zeros, ends, powers of two, numbers without leading bit, infinities and NaN, bit for bit."""
    info = torch.finfo(dtype)
    some = [0.0, -0.0, 1.0, -1.0, 2.0, 0.5, 3.14, -2.7, info.tiny, info.smallest_normal / 4, info.max, math.inf]
    x = torch.tensor([*some, -math.inf, math.nan], dtype=torch.float64).to(dtype)
    a, b = (t.contiguous() for t in torch.broadcast_tensors(x.unsqueeze(1), x))
    found, want = table()[aten.nextafter.default](a, b), torch.nextafter(a, b)
    assert bool(((found == want) | (found.isnan() & want.isnan())).all())


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("ends", [True, False])
def test_bags_of_embeddings(mode: str, ends: bool) -> None:
    """With empty bags and padding; sums with weights; gradients of the table and of the weights."""
    torch.manual_seed(0)
    indices = torch.tensor([1, 2, 2, 0, 5, 5, 5, 3])
    offsets = torch.tensor([0, 3, 3, 6, *([8] if ends else [])])

    def bag(table: Any, indices: Any, offsets: Any, weights: Any = None) -> Any:
        return torch.nn.functional.embedding_bag(
            indices, table, offsets, mode=mode, padding_idx=2, include_last_offset=ends, per_sample_weights=weights
        )

    table = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(8, dtype=torch.float64, requires_grad=True)
    graphs = agrees(bag, table, indices, offsets, *([weights] if mode == "sum" else []))
    assert not [why for g in graphs for why in g.eager_nodes.values()]


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min", "prod"])
def test_segments(reduce: str) -> None:
    """An empty segment, equal extremes, zeros in a product; lengths and offsets, with and without a first value."""
    x = torch.tensor([[1.0, 0.0], [3.0, 2.0], [3.0, 0.0], [0.0, 0.0], [2.0, -1.0]], dtype=torch.float64)
    lengths, offsets = torch.tensor([3, 0, 2]), torch.tensor([0, 3, 3, 5])
    for given in ({"lengths": lengths}, {"offsets": offsets}):
        for initial in ({"initial": 2.0}, {}):
            want = torch.segment_reduce(x, reduce, **given, **initial)
            found = groups.segment_reduce(x, reduce, **given, **initial)
            torch.testing.assert_close(found, want, equal_nan=True)
            grad = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], dtype=torch.float64)
            args = grad, want, x, reduce
            found = groups.segment_reduce_backward(*args, **given, **initial)
            want = aten._segment_reduce_backward(*args, **given, **initial)
            torch.testing.assert_close(found, want, equal_nan=True)


def test_fractional_pooling() -> None:
    """Images and volumes; the places follow from the numbers that are drawn."""
    torch.manual_seed(0)
    for axes, kernel, size in ((2, (2, 3), (4, 3)), (3, (2, 3, 2), (4, 1, 3))):
        for dtype in (torch.float32, torch.float64):
            x, drawn = torch.randn(2, 3, *(9, 8, 7)[:axes], dtype=dtype), torch.rand(2, 3, axes, dtype=dtype)
            want = getattr(aten, f"fractional_max_pool{axes}d").default(x, kernel, size, drawn)
            for a, b in zip(pooling.fractional_max_pool(x, kernel, size, drawn), want, strict=True):
                assert torch.equal(a, b)


def test_places_of_nonzero_elements_in_a_given_number() -> None:
    """Fewer and more than there are; a tensor without dimensions."""
    x = torch.tensor([[0.0, 1.0, 0.0], [2.0, 0.0, 3.0]])
    own = table()[aten.nonzero_static.default]
    for size in (0, 2, 5):
        want = torch.nonzero_static(x, size=size, fill_value=-7)
        assert torch.equal(own(x, size=size, fill_value=-7), want)
    assert torch.equal(own(x.sum(), size=2), torch.nonzero_static(x.sum(), size=2))


def test_splits_are_slices() -> None:
    """Engines take no sequences of tensors: a graph with a split would be cut there."""

    def f(x: Any) -> Any:
        a, b, c = x.split(3, 1)
        d, e = torch.split(x, [1, 3], 0)
        return a * b + c.sum() + (d + e.sum(0)).sum()

    graphs = agrees(f, torch.randn(4, 8, dtype=torch.float64, requires_grad=True))
    operators = [n["operator"] for g in graphs for s in g.to_json()["stages"] for n in s["host_nodes"]]
    assert "Slice" in operators
    assert not [o for o in operators if "Sequence" in o]


def test_attention_is_not_cut_by_rows_that_are_masked_as_a_whole() -> None:
    """They are zeros, as torch's, without a reduction of bools, which engines refuse."""

    def f(q: Any, k: Any, mask: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, k, k + 1, attn_mask=mask)

    q, k = (torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    mask = torch.full([5, 5], -math.inf, dtype=torch.float64).triu()  # of the first row all
    assert not f(q, k, mask)[:, :, 0].any()
    graphs = agrees(f, q, k, mask)
    operators = [n["operator"] for g in graphs for s in g.to_json()["stages"] for n in s["host_nodes"]]
    assert "Softmax" in operators
    assert not [o for o in operators if o in ("Not", "ReduceMax", "ReduceMin")]


def test_evaluated_batch_norm_has_empty_statistics() -> None:
    """As torch's has, where they are read."""
    x = torch.randn(2, 3, 4)
    given = torch.ones(3), torch.zeros(3), torch.zeros(3), torch.ones(3)
    graphs: list[CompiledGraph] = []
    call = captured(lambda *v: torch.native_batch_norm(*v, False, 0.1, 1e-5), {"engine": "host"}, graphs)
    for _ in range(2):
        for a, b in zip(call(x, *given), torch.native_batch_norm(x, *given, False, 0.1, 1e-5), strict=True):
            torch.testing.assert_close(a, b)
    assert not [why for g in graphs for why in (*g.eager_nodes.values(), *filter(None, [g.reason]))]


def test_integers_and_the_parts_of_floats() -> None:
    """Divisors of the worst pairs (Fibonacci's), the least integers, and floats without leading bit."""
    a = torch.tensor([0, 12, -18, 7540113804746346429, 4660046610375530309, 2**62])
    b = torch.tensor([0, 18, 12, 4660046610375530309, 7540113804746346429, -(2**40)])
    assert torch.equal(table()[aten.gcd.default](a, b), torch.gcd(a, b))
    assert torch.equal(table()[aten.lcm.default](a[:3], b[:3]), torch.lcm(a[:3], b[:3]))
    x = torch.tensor([0.0, 1.0, -1.0, 0.5, 3.14, 5e-324, -2.3e-310, 1.7e308, 2.0**-1022], dtype=torch.float64)
    for found, want in zip(table()[aten.frexp.Tensor](x), torch.frexp(x), strict=True):
        assert torch.equal(found, want)


TYPES = {
    torch.float64: torch.tensor([0.3, -2.7, 5.1, -0.1], dtype=torch.float64),
    torch.float16: torch.tensor([95.0, -2.75, 5.125, -0.1], dtype=torch.float16),
    torch.float32: torch.tensor([1.1, 4.2, -0.0, 4.0]),
    torch.int32: torch.tensor([-3, 7, 2, 5], dtype=torch.int32),
    torch.uint8: torch.tensor([95, 139, 1, 2], dtype=torch.uint8),
    torch.bool: torch.tensor([True, False, True, True]),
}
MIXED: dict[str, Callable[[Any, Any], Any]] = {
    "copysign": torch.copysign,
    "diagonal_scatter": lambda a, b: torch.diag_embed(a).diagonal_scatter(b.expand(4)),
    "difference from a number": lambda a, b: 1.5 - a + b,
    "elu": lambda a, b: torch.nn.functional.elu(a, 0.3),
    "flip": lambda a, b: a * b.flip(-1),
    "hardtanh": lambda a, b: torch.nn.functional.hardtanh(a, -0.3, 0.3),
    "huber_loss": torch.nn.functional.huber_loss,
    "hypot": torch.hypot,
    "index_fill": lambda a, b: a.index_fill(0, torch.tensor([0, 2]), b.reshape(-1)[0]),
    "ldexp": lambda a, b: torch.ldexp(a, b % 5),
    "leaky_relu": lambda a, b: torch.nn.functional.leaky_relu(a, 0.3),
    "logarithms": lambda a, b: torch.log2(a.abs() + 3) + torch.log10(b.abs() + 1),
    "mean": lambda a, b: a.mean(0, dtype=b.dtype),
    "power": lambda a, b: a.abs() ** b.abs(),
    "remainder": lambda a, b: a % b,
    "remainder by a number": lambda a, b: a % 0.3 + b,
    "rsub": lambda a, b: torch.rsub(a, 1.5) + torch.rsub(a, b, alpha=2),
    "select_scatter": lambda a, b: a.select_scatter(b.reshape(-1)[0], 0, -1),
    "shift left": lambda a, b: (a * 1) << b.abs() % 5,
    "shift right": lambda a, b: (a * 1) >> b.abs() % 5,
    "signbit": lambda a, b: torch.signbit(b),
}


@pytest.mark.parametrize("name", MIXED)
def test_operands_of_different_types(name: str) -> None:
    """Values and type of the result are eager's, where the second operand is a tensor and where it is a scalar one: all
    in one graph."""
    pairs, wanted = [], []
    for a, b in itertools.product(TYPES.values(), TYPES.values()):
        for args in ((a, b), (a, b[0])):
            try:
                wanted.append(MIXED[name](*args))
            except RuntimeError:  # types that torch does not take
                continue
            pairs.append(args)
    assert pairs

    def function(*given: Any) -> list[Any]:
        return [MIXED[name](a, b) for a, b in zip(given[::2], given[1::2], strict=True)]

    graphs: list[CompiledGraph] = []
    found = captured(function, {"engine": "host"}, graphs)(*itertools.chain.from_iterable(pairs))
    for one, expected, (a, b) in zip(found, wanted, pairs, strict=True):
        torch.testing.assert_close(one, expected, equal_nan=True, msg=lambda m, a=a, b=b: f"{a}, {b}: {m}")
    assert not [why for g in graphs for why in g.eager_nodes.values() if "divided by 0" not in why]
    assert not [g.reason for g in graphs if g.reason]


def test_histograms_and_modes() -> None:
    """Edges count; elements outside do not; an empty range is widened."""
    x = torch.tensor([0.0, 0.25, 0.5, 1.0, 1.0, 2.5, -1.0, 4.0, 3.999], dtype=torch.float64)
    for bins, low, high in ((4, 0, 4), (7, -1, 1), (3, 0, 0), (5, 2, 2)):
        assert torch.equal(ordering.histc(x, bins, low, high), torch.histc(x, bins, low, high))
    for given in ({"range": (0.0, 4.0)}, {}, {"density": True}, {"weight": x.abs()}):
        for a, b in zip(ordering.histogram(x, 4, **given), torch.histogram(x, 4, **given), strict=True):
            torch.testing.assert_close(a, b)
    same = torch.full([3], 2.0)
    assert torch.equal(ordering.histogram(same, 4)[0], torch.histogram(same, 4)[0])
    points = torch.tensor([[0.0, 1.0], [1.0, 3.0], [0.5, 2.0], [1.0, 1.0]], dtype=torch.float64)
    for given in ({"range": (0.0, 1.0, 1.0, 2.5)}, {}, {"density": True}, {"weight": points[:, 1] + 1}):
        want = torch.histogramdd(points, [2, 3], **given)
        torch.testing.assert_close(ordering.histogramdd(points, [2, 3], **given), want[0])
        for a, b in zip(ordering.histogramdd_edges(points, [2, 3], **given), want[1], strict=True):
            torch.testing.assert_close(a, b)
    y = torch.tensor([[3, 1, 3, 1, 2], [5, 5, 4, 4, 4]])
    values, indices = ordering.mode(y)
    assert torch.equal(values, torch.mode(y)[0])
    assert torch.equal(torch.gather(y, 1, indices.unsqueeze(1)).squeeze(1), values)
    assert torch.equal(ordering.mode(y, 0, True)[0], torch.mode(y, 0, True)[0])


@pytest.mark.parametrize("mask_type", [None, 0, 1, 2])
def test_layers_of_transformers_in_evaluation(mask_type: int | None) -> None:
    """torch's fused attention and encoder layer, of all types of a mask; a row that is masked whole has no number."""
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8)
    weights = [torch.randn(24, 8), torch.randn(24), torch.randn(8, 8), torch.randn(8)]
    norms = [torch.randn(8) for _ in range(4)]
    feed = [torch.randn(16, 8), torch.randn(16), torch.randn(8, 16), torch.randn(8)]
    mask = {
        None: None,
        0: torch.ones(5, 5).triu(1).bool(),
        1: torch.tensor([[False, False, True, False, True], [True] * 5]),
        2: torch.rand(2, 2, 5, 5) > 0.7,
    }[mask_type]
    attend = aten._native_multi_head_attention.default
    layer = aten._transformer_encoder_layer_fwd.default
    for average in (False, True):
        given = (x, x, x, 8, 2, *weights, mask, True, average, mask_type)
        for made, expected in zip(table()[attend](*given), attend(*given), strict=True):
            torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-4, equal_nan=True)
    for gelu, first in itertools.product((False, True), repeat=2):
        args = (x, 8, 2, *weights, gelu, first, 1e-5, *norms, *feed, mask, mask_type)
        torch.testing.assert_close(table()[layer](*args), layer(*args), rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("case", ["plain", "causal", "mask", "narrow"])
def test_fused_attention_gives_its_sums(case: str) -> None:
    """The operator itself, whose second result torch's own decomposition has not."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if case == "narrow" else torch.float64
    q, k, v = (torch.randn(2, 4, n, 8, dtype=dtype) for n in (5, 7, 7))
    args = q, k, v, *([torch.randn(2, 1, 5, 7, dtype=dtype)] if case == "mask" else [])

    def f(q: Any, k: Any, v: Any, *mask: Any) -> Any:
        given = {"attn_mask": mask[0]} if mask else {"scale": 0.3}
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, case == "causal", **given)

    graphs: list[CompiledGraph] = []
    call = captured(f, {"engine": "host"}, graphs)
    tolerance = 2e-2 if case == "narrow" else 1e-9
    for _ in range(2):
        for got, want in zip(call(*args), f(*args), strict=True):
            assert got.stride() == want.stride()
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    assert not [why for g in graphs for why in (*g.eager_nodes.values(), *filter(None, [g.reason]))]


def test_a_size_that_no_tensor_has_is_a_lookup_error() -> None:
    """Then the graph stays as it was given, and torch computes its complex numbers."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    from xrt_torch.complex_numbers import _Recorder

    recorder = _Recorder(torch.fx.Graph())
    with pytest.raises(LookupError, match="no tensor of the graph has"):
        recorder.node_of(ShapeEnv().create_unbacked_symint())


DOUBLES: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda x, y: torch.add(x, y, alpha=0.1),
    "sum with a number": lambda x, y: torch.add(x, 0.7, alpha=0.1),
    "difference": lambda x, y: torch.sub(x, y, alpha=0.1),
    "difference of the other": lambda x, y: torch.rsub(x, y, alpha=0.1),
    "product of matrices": lambda x, y: torch.addmm(x, y, y, alpha=0.1, beta=0.3),
    "products of matrices": lambda x, y: torch.baddbmm(x[None], y[None], y[None], alpha=0.1, beta=0.3),
    "not a number, times 0": lambda x, y: torch.addmm(x * math.nan, y, y, alpha=0.1, beta=0.0),
    "product with a vector": lambda x, y: torch.addmv(x[0], y, x[1], alpha=0.1, beta=0.3),
    "not a number beside a vector": lambda x, y: torch.addmv(x[0] * math.nan, y, x[1], alpha=0.1, beta=0.0),
    "sum of products": lambda x, y: torch.addbmm(x, y[None], y[None], alpha=0.1, beta=0.3),
    "variance": lambda x, y: torch.var(x, 1, correction=0.3, keepdim=True) + torch.var(y, correction=1.7),
    "normalisation of groups": lambda x, y: torch.nn.functional.group_norm(x[None], 2, y[0], y[1], eps=0.1),
    "normalisation of batches": lambda x, y: torch.nn.functional.batch_norm(x, None, None, y[0], None, True, eps=0.1),
    "normalisation by statistics": lambda x, y: torch.nn.functional.batch_norm(x, y[0], y[1].abs(), eps=0.1),
    "interpolation": lambda x, y: torch.nn.functional.interpolate(x[None], scale_factor=1.7, mode="linear"),
    "interpolation of pictures": lambda x, y: torch.nn.functional.interpolate(
        x[None, None], size=(7, 3), mode="bicubic"
    ),
    "interpolation of volumes": lambda x, y: torch.nn.functional.interpolate(
        torch.stack([x, y])[None, None], size=(3, 6, 5), mode="trilinear", align_corners=True
    ),
    "power of a number": lambda x, y: torch.pow(0.1, x),
    "range": lambda x, y: x[0, 0] + torch.arange(0.1, 1, 0.1, dtype=torch.float64),
}


@pytest.mark.parametrize("name", DOUBLES)
def test_numbers_beside_float64_have_its_digits(name: str) -> None:
    """ONNX's attributes are float32, of which 0.1 is off by 1.5e-9."""
    x, y = torch.randn(2, 4, 4, dtype=torch.float64).unbind()
    graphs: list[CompiledGraph] = []
    call = captured(DOUBLES[name], {"engine": "host"}, graphs)
    for _ in range(2):
        torch.testing.assert_close(call(x, y), DOUBLES[name](x, y), rtol=1e-14, atol=1e-14, equal_nan=True)
    assert [g.reason for g in graphs] == [None]
    assert [g.eager_nodes for g in graphs] == [{}]


@pytest.mark.usefixtures("fresh_graphs")
def test_filled_tensors_of_sizes_that_vary_have_the_digits_of_float64() -> None:
    from xrt_torch.backend import xrt as backend

    torch._dynamo.reset()
    call = torch.compile(
        lambda x: torch.full_like(x, 0.1) * x, backend=backend, dynamic=True,
        options={"engine": "host", "background": False},
    )  # fmt: skip
    for n in (3, 3, 5):
        x = torch.randn(n, dtype=torch.float64)
        torch.testing.assert_close(call(x), 0.1 * x, rtol=1e-14, atol=0)
    assert [g.reason for g in xrt_torch.graphs()] == [None]


@pytest.mark.parametrize(
    ("number", "dtype"),
    [(0.5, torch.bool), (2, torch.bool), (2, torch.int32), (0.5, torch.float16), (0.1, torch.float64)],
)
def test_a_number_in_the_place_of_a_tensor(number: float, dtype: Any) -> None:
    """`torch.add(0.5, mask, alpha=2)`, as in mixtures of experts: torch's exporter finds no overload for it."""
    x = torch.tensor([0, 1, 3]).to(dtype)
    graphs: list[CompiledGraph] = []
    call = captured(lambda v: torch.add(number, v, alpha=2), {"engine": "host"}, graphs)
    for _ in range(2):
        torch.testing.assert_close(call(x), torch.add(number, x, alpha=2), rtol=1e-14, atol=0)
    assert [g.reason for g in graphs] == [None]


def test_products_of_bytes() -> None:
    """As torchao's dynamic quantisation has them: sums in int32, exactly."""
    a, b = (torch.randint(-128, 128, s, dtype=torch.int8) for s in ((17, 8), (8, 16)))
    (graph,) = agrees(torch._int_mm, a, b)
    assert not graph.eager_nodes

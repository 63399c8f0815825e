"""NaN, infinities, large integers and quotients that rounding carries over a whole number: as torch eager has them.

`op_db` has none of these, and a comparison of the first call sees only what that is given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

import xrt_torch  # noqa: E402
from xrt_torch.backend import captured  # noqa: E402
from xrt_torch.backend import xrt as backend  # noqa: E402
from xrt_torch.compiled import CompiledGraph  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
F = torch.nn.functional
NAN, INF = float("nan"), float("inf")
SPECIAL = (NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 0.3, 7.0, -6.0, 3e38, 2.5)


def agrees(function: Callable[..., Any], *args: Any) -> None:
    """Results and gradients on XRT's host are eager's, also where these are NaN or infinite."""
    graphs: list[CompiledGraph] = []
    call = captured(function, {"engine": "host"}, graphs)

    def run(f: Callable[..., Any]) -> list[Any]:
        given = [a.detach().clone().requires_grad_(a.requires_grad) for a in args]
        result, wanted = f(*given), [g for g in given if g.requires_grad]
        return [result.detach(), *(torch.autograd.grad(result.sum(), wanted) if wanted else ())]

    for _ in range(2):  # where the first comparison finds a difference, what is compiled is made again
        for found, expected in zip(run(call), run(function), strict=True):
            torch.testing.assert_close(found, expected, equal_nan=True)
    assert all(g.reason is None for g in graphs), [g.reason for g in graphs]
    assert not [why for g in graphs for why in g.eager_nodes.values()]


def at_one_place(value: float, *shape: int, gradient: bool = False) -> Any:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    x.reshape(-1)[x.shape[-1] + 2] = value
    return x.requires_grad_(gradient)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
@pytest.mark.parametrize("mode", ["floor", "trunc"])
def test_integers_are_divided_in_all_their_digits(mode: str, dtype: Any) -> None:
    """float32 has 24 bits."""
    most = torch.iinfo(dtype).max
    x = torch.tensor([most, most - 1, most // 2, 20_000_001 % most, 7, 1, 0], dtype=dtype)
    x = torch.cat([x, -x]) if dtype.is_signed else x
    for y in (1, 2, 3, 7, most):
        agrees(lambda a, y=y: torch.div(a, y, rounding_mode=mode), x)
        agrees(lambda a, b: torch.div(a, b.clamp(min=1), rounding_mode=mode), x, torch.full_like(x, y))
    if dtype.is_signed:
        divide = lambda a, b: torch.div(a, torch.where(b == 0, 1, b), rounding_mode=mode)  # noqa: E731
        agrees(divide, x, torch.full_like(x, -3))


def test_integers_that_are_rounded_or_averaged_keep_their_digits() -> None:
    x = torch.tensor([[[2**62 + 1, 2**53 + 1, -(2**55) - 3, 5, 2**31 + 1, 9]]])
    agrees(torch.round, x)
    agrees(lambda a: F.avg_pool1d(a, 2), x // 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("divide", [torch.floor_divide, lambda a, b: torch.div(a, b, rounding_mode="floor")])
def test_floors_of_quotients_are_those_of_the_numbers(divide: Callable[..., Any], dtype: Any) -> None:
    """1 // 0.1 is 9, though 1 / 0.1 is rounded to 10; what is divided by an infinity may be -1."""
    x = torch.tensor([*SPECIAL[:-2], 2.5, 100.0], dtype=dtype)
    for y in (0.1, -0.1, 0.7, 2.0, INF, -INF, 0.0, NAN):
        agrees(divide, x, torch.full_like(x, y))
    agrees(lambda a: a // 0.1, x)


@pytest.mark.parametrize("offset", [-2, 0, 1, 9])
def test_what_lies_beside_a_diagonal_is_not_part_of_it(offset: int) -> None:
    x = at_one_place(NAN, 4, 5)
    x[3, 0], x[2, 2] = INF, -INF
    agrees(lambda a: a.diagonal(offset).clone(), x)
    agrees(lambda a: a.diagonal(offset, -1, 0).clone(), torch.stack([x, 2 * x], 1))
    agrees(lambda a: a.diagonal(offset).clone(), x > 0)
    agrees(lambda a: torch.diag_embed(a).abs() ** 0.5, torch.rand(3, 8).add(0.1).requires_grad_())


def test_a_trace_is_that_of_the_diagonal() -> None:
    agrees(torch.trace, at_one_place(INF, 4, 4))


def test_the_sign_of_nan_is_zero() -> None:
    x = torch.tensor(SPECIAL)
    agrees(torch.sign, x)
    agrees(torch.sgn, x)
    agrees(torch.abs, x.requires_grad_())
    agrees(torch.sign, torch.tensor([2**53 + 1, 0, -1]))


@pytest.mark.parametrize("right", [False, True])
def test_nan_is_behind_all_boundaries(right: bool) -> None:
    bounds, x = torch.tensor([-1.0, 0.0, 1.0, INF]), torch.tensor(SPECIAL)
    agrees(lambda a, b: torch.bucketize(a, b, right=right), x, bounds)
    agrees(lambda a, b: torch.searchsorted(b, a, right=right), x, bounds)
    agrees(lambda a, b: torch.searchsorted(b, a, right=right), torch.arange(-3, 4), torch.tensor([-2, 0, 0, 1]))


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize(
    "pool",
    [
        lambda x: F.avg_pool2d(x, 3, 2, 1, divisor_override=2),
        lambda x: F.avg_pool2d(x, (2, 3), divisor_override=-5),
        lambda x: F.avg_pool2d(x, 2),
        lambda x: F.adaptive_avg_pool2d(x, (3, 2)),
        lambda x: F.adaptive_avg_pool3d(x, (2, 3, 1)),
        lambda x: F.avg_pool3d(x, 2),
        lambda x: F.lp_pool2d(x, 2, 2),
    ],
)
def test_pooling_leaves_other_windows_alone(pool: Callable[..., Any], value: float) -> None:
    agrees(pool, at_one_place(value, 1, 4, 6, 6))


@pytest.mark.parametrize(
    "pool",
    [
        lambda x: F.avg_pool2d(x, 2),
        lambda x: F.avg_pool2d(x, (3, 2), divisor_override=4),
        lambda x: F.avg_pool3d(x, 2),
        lambda x: F.adaptive_avg_pool2d(x, 3),
        lambda x: F.adaptive_avg_pool3d(x, (2, 3, 1)),
    ],
)
def test_gradients_of_windows_side_by_side(pool: Callable[..., Any]) -> None:
    """That of an infinite element is NaN, and those of the windows beside it are numbers."""
    agrees(lambda x: pool(x).log(), at_one_place(INF, 1, 4, 6, 6).detach().abs().add(0.1).requires_grad_())


LOST = [
    ("onnxruntime", lambda x: F.max_pool2d(x * 2, 2)),
    ("onnxruntime", lambda x: (x * 2).argmax(-1)),
    ("openvino", lambda x: torch.relu(x * 2)),
    ("openvino", lambda x: (x * 2).softmax(-1)),
]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(("engine", "function"), LOST)
@pytest.mark.usefixtures("fresh_graphs")
def test_calls_with_nan_are_eagers_where_an_engine_makes_numbers_of_it(
    engine: str, function: Callable[..., Any], background: bool
) -> None:
    """Though the call that was compared had none; others stay XRT's."""
    pytest.importorskip(engine)
    x = at_one_place(1.0, 2, 4, 6, 6)
    call = torch.compile(function, backend=backend, options={"engine": engine, "background": background})
    with torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(call(x), function(x), rtol=1e-3, atol=1e-3)
            assert xrt_torch.wait(60)
        (graph,) = xrt_torch.graphs()
        calls = graph._calls
        assert calls
        for place in range(36, 72, 5):
            y = x.clone()
            y.view(-1)[place] = NAN
            torch.testing.assert_close(call(y), function(y), rtol=1e-3, atol=1e-3, equal_nan=True)
        assert graph._calls == calls
        call(x)
        assert graph._calls == calls + 1


@pytest.mark.usefixtures("fresh_graphs")
def test_a_forward_pass_with_nan_has_eagers_gradients() -> None:
    pytest.importorskip("openvino")
    weight = torch.randn(8, 8, requires_grad=True)
    call = torch.compile(
        lambda x: (x @ weight).relu(), backend=backend, options={"engine": "openvino", "background": False}
    )
    for value in (1.0, 1.0, 1.0, NAN, 1.0):
        x = at_one_place(value, 4, 8)
        found, expected = call(x), (x @ weight).relu()
        torch.testing.assert_close(found, expected, equal_nan=True)
        gradients = [torch.autograd.grad(y.nan_to_num().sum(), weight)[0] for y in (found, expected)]
        torch.testing.assert_close(*gradients, equal_nan=True)


@pytest.mark.usefixtures("fresh_graphs")
def test_nothing_is_looked_at_where_nan_is_passed_on() -> None:
    weight = torch.nn.Parameter(torch.randn(8, 8))
    call = torch.compile(
        lambda x: (x @ weight).relu(), backend=backend, options={"engine": "host", "background": False}
    )
    with torch.no_grad():
        for value in (1.0, 1.0, 1.0, NAN):
            x = at_one_place(value, 4, 8)
            torch.testing.assert_close(call(x), (x @ weight).relu(), equal_nan=True)
    (graph,) = xrt_torch.graphs()
    assert graph._stages is not None
    assert graph._stages.data == []

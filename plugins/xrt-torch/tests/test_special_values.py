"""NaN, infinities, large integers and quotients that rounding carries over a whole number: as torch eager has them.

`op_db` has none of these, and a comparison of the first call sees only what that is given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from xrt_torch.backend import captured  # noqa: E402
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
        agrees(lambda a, b: torch.div(a, b, rounding_mode=mode), x, torch.full_like(x, y))
    if dtype.is_signed:
        agrees(lambda a, b: torch.div(a, b, rounding_mode=mode), x, torch.full_like(x, -3))


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

"""Linear algebra of small matrices: against LAPACK in float64, and errors as torch raises them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from xrt_torch import linear_algebra  # noqa: E402
from xrt_torch.backend import captured  # noqa: E402
from xrt_torch.compiled import CompiledGraph  # noqa: E402
from xrt_torch.partition import CHECKS  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
aten = torch.ops.aten
OWN = linear_algebra.decompositions()
SHAPES = [(5, 5), (2, 3, 4, 4), (7, 4), (2, 4, 7), (1, 1), (16, 16), (0, 0), (2, 0, 3), (0, 3, 3)]
SQUARE = [s for s in SHAPES if s[-1] == s[-2]]


def matrices(*shape: int) -> Any:
    """The same random numbers each time."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def same(operator: Any, *args: Any, **kwargs: Any) -> None:
    """Our decomposition of an operator gives what torch gives."""
    found, want = OWN[operator](*args, **kwargs), operator(*args, **kwargs)
    found, want = (x if isinstance(x, tuple) else (x,) for x in (found, want))
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=lambda m: f"{operator}: {m}")


@pytest.mark.parametrize("shape", SHAPES)
def test_factorisations(shape: tuple[int, ...]) -> None:
    """Of wide, high, square, single and empty matrices, with the signs and exchanges of LAPACK."""
    a = matrices(*shape)
    for operator in (aten.linalg_lu_factor_ex.default, aten.linalg_lu.default, aten.geqrf.default):
        same(operator, a)
    for mode in ("reduced", "complete", "r"):
        same(aten.linalg_qr.default, a, mode)
    packed, pivots, _ = torch.linalg.lu_factor_ex(a)
    for flags in ({}, {"unpack_data": False}, {"unpack_pivots": False}):
        same(aten.lu_unpack.default, packed, pivots, **flags)
    reflections, factors = torch.geqrf(a)
    if shape[-2] >= shape[-1]:
        same(aten.linalg_householder_product.default, reflections, factors)
    for left in (True, False) if a.numel() else ():
        b = matrices(*shape[:-2], *((shape[-2], 3) if left else (3, shape[-2])))
        for transpose in (True, False):
            same(aten.ormqr.default, reflections, factors, b, left, transpose)


@pytest.mark.parametrize("shape", SQUARE)
def test_solutions(shape: tuple[int, ...]) -> None:
    """Systems from both sides, triangles of all kinds, determinants, inverses, of matrices in both orders of memory."""
    a, b = matrices(*shape), matrices(*shape[:-1], 3)
    for m in (a, a.mT):
        for operator in (aten._linalg_det.default, aten._linalg_slogdet.default, aten.linalg_inv_ex.default):
            same(operator, m)
        same(aten._linalg_solve_ex.default, m, b)
        same(aten._linalg_solve_ex.default, m, b[..., 0])
        same(aten._linalg_solve_ex.default, m, b.mT, left=False)
    packed, pivots, _ = torch.linalg.lu_factor_ex(a)
    for left in (True, False):
        right = b if left else b.mT.contiguous()
        for flag in (True, False):
            same(aten.linalg_lu_solve.default, packed, pivots, right, left=left, adjoint=flag)
            for unit in (True, False):
                same(aten.linalg_solve_triangular.default, a, right, upper=flag, left=left, unitriangular=unit)
    positive = a @ a.mT + torch.eye(shape[-1], dtype=a.dtype)
    for upper in (True, False):
        factor = torch.linalg.cholesky_ex(positive, upper=upper)[0]
        same(aten.linalg_cholesky_ex.default, positive, upper=upper)
        same(aten.cholesky_solve.default, b, factor, upper)
        same(aten.cholesky_inverse.default, factor, upper)
        for transpose in (True, False):
            same(aten.triangular_solve.default, b, a, upper, transpose, False)
    for scale in (1e-3, 1.0, 4.0) if a.numel() else ():
        same(aten.linalg_matrix_exp.default, a * scale)


def test_failures_have_the_place_of_the_first_pivot() -> None:
    """Of a matrix without inverse, and of one that is not positive."""
    ones = torch.ones(3, 3, dtype=torch.float64)
    for operator, x in (
        (aten.linalg_lu_factor_ex.default, ones),
        (aten.linalg_inv_ex.default, ones),
        (aten.linalg_cholesky_ex.default, -ones),
    ):
        assert torch.equal(OWN[operator](x)[-1], operator(x)[-1])


MODELS: dict[str, Callable[[Any], Any]] = {
    "inverse": torch.linalg.inv,
    "gaussian": lambda x: torch.linalg.cholesky(x @ x.mT + torch.eye(4)).diagonal(0, -2, -1).log().sum(-1),
    "solution": lambda x: torch.linalg.solve(x + 4 * torch.eye(4), x.mT),
    "rotation": lambda x: torch.matrix_exp(x - x.mT) @ torch.linalg.qr(x)[0] + x,
}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_and_errors(name: str) -> None:
    """XRT runs all of it, torch looks whether it failed, and raises."""
    graphs: list[CompiledGraph] = []
    call = captured(MODELS[name], {"engine": "host"}, graphs)
    for _ in range(2):
        x = (matrices(3, 4, 4).float() + 2 * torch.eye(4)).requires_grad_()
        y = x.detach().clone().requires_grad_()
        found, want = call(x), MODELS[name](y)
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
        found.square().sum().backward()
        want.square().sum().backward()
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-3, atol=1e-3)
    assert not [why for g in graphs for why in g.eager_nodes.values() if CHECKS not in why]
    assert not [g.reason for g in graphs if g.reason]
    if name == "inverse" and torch.__version__ >= "2.13":  # before, torch drops the check from graphs
        with pytest.raises(torch.linalg.LinAlgError):
            call(torch.zeros(3, 4, 4, requires_grad=True))


def test_large_matrices_are_torchs() -> None:
    """Their factorisation would be a graph of thousands of operators."""
    graphs: list[CompiledGraph] = []
    call = captured(torch.linalg.inv, {"engine": "host"}, graphs)
    x = matrices(40, 40) + 9 * torch.eye(40)
    for _ in range(2):
        torch.testing.assert_close(call(x), torch.linalg.inv(x))
    assert any("linalg_inv_ex" in why for g in graphs for why in g.eager_nodes.values())

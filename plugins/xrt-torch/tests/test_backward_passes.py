"""Backward passes that AOTAutograd refuses and eager makes, and derivatives that torch takes in other ways."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

import xrt_torch  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from xrt_torch.backend import xrt as backend  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("fresh_graphs")]
nn = torch.nn
CALLS = 5
"""Of which the last are XRT's."""


def on_xrt(model: Any) -> Any:
    return torch.compile(model, backend=backend, options={"engine": "host", "background": False})


def network(*more: Any) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), *more, nn.Linear(16, 1))


def assert_answered() -> None:
    """XRT made the last forward and backward pass."""
    assert {g.kind for g in xrt_torch.graphs() if g.is_proven and g.reason is None} == {"forward", "backward"}


def test_a_backward_pass_is_made_again() -> None:
    """`retain_graph=True` keeps what the forward pass saved; without it the next backward pass raises, as in eager."""
    model, x = network(), torch.randn(4, 8)
    call = on_xrt(model)
    for _ in range(CALLS):
        call(x).sum().backward()
        model.zero_grad()
        loss = call(x).square().mean()
        loss.backward(retain_graph=True)
        first = [p.grad.clone() for p in model.parameters()]
        loss.backward()
        torch.testing.assert_close([p.grad for p in model.parameters()], [2 * g for g in first])
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    assert_answered()


def penalty(call: Any, model: Any, x: Any) -> list[Any]:
    """The gradients of a critic's penalty (https://arxiv.org/abs/1704.00028): of the norm of a gradient."""
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
    loss = (slope.norm(2, 1) - 1).square().mean()
    return [slope.detach(), *torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)]


@pytest.mark.parametrize("more", [(), (nn.Dropout(0.5),)], ids=["plain", "dropout"])
def test_the_gradient_of_a_gradient(more: tuple[Any, ...]) -> None:
    """Random numbers are those that the forward pass drew, and go on from where they are."""
    model, x = network(*more), torch.randn(4, 8)
    call, want = on_xrt(model), penalty(model, model, x)
    after = torch.get_rng_state()
    for _ in range(CALLS):
        call(x).sum().backward()
        torch.testing.assert_close(penalty(call, model, x), want)
        assert torch.equal(torch.get_rng_state(), after)
    assert_answered()


def test_statistics_are_written_once() -> None:
    """The graph that eager runs once more writes copies."""
    models = [network(nn.BatchNorm1d(16)) for _ in range(2)]
    calls = on_xrt(models[0]), models[1]
    for _ in range(CALLS):
        x = torch.randn(6, 8)
        found = []
        for call, model in zip(calls, models, strict=True):
            call(x).sum().backward()
            model.zero_grad()
            found.append([*penalty(call, model, x), *model.buffers()])
        torch.testing.assert_close(*found)
    assert models[0][3].num_batches_tracked == 2 * CALLS
    assert_answered()


def test_backward_passes_of_all_inputs() -> None:
    """A Hessian of several arguments, one of which has a function of its own before it, and of several results."""

    def function(x: Any, y: Any) -> Any:
        return (x * y.sin()).sum(), x.exp()

    call, x, y = on_xrt(function), torch.randn(3), torch.randn(3)
    for _ in range(CALLS):
        sum(r.sum() for r in call(x.clone().requires_grad_(), y.clone().requires_grad_())).backward()

    def scalar(f: Any) -> Any:
        return lambda a, b: f(a.cos(), b)[0] + f(a, b)[1].sum()

    made, want = (torch.autograd.functional.hessian(scalar(f), (x, y)) for f in (call, function))
    torch.testing.assert_close(made, want)


def test_types_are_those_of_the_forward_pass() -> None:
    """Under autocast the forward pass computes in bfloat16, whatever holds when the gradients are asked for."""
    model, x = network(), torch.randn(4, 8)

    def narrow(call: Any) -> Any:
        def run(v: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                return call(v)

        return run

    call, want = narrow(on_xrt(model)), penalty(narrow(model), model, x)
    for _ in range(CALLS):
        call(x).float().sum().backward()
        torch.testing.assert_close(penalty(call, model, x), want, rtol=0.05, atol=0.02)


def twice(y: Any, x: Any) -> Any:
    (slope,) = torch.autograd.grad(y, x, create_graph=True)
    return torch.autograd.grad(slope.sum(), x)[0]


def test_an_argument_that_is_written_before_raises() -> None:
    """What eager would compute is not known any more: torch's own error says that there is no second derivative."""
    call = on_xrt(lambda v: v.sin().sum())
    for _ in range(CALLS):
        base = torch.ones(3, requires_grad=True)
        x = base * 1
        y = call(x)
        torch.testing.assert_close(twice(y, base), -base.detach().sin())
        y = call(x)
        with torch.no_grad():
            x.mul_(2)
        with pytest.raises(RuntimeError):
            twice(y, base)


def test_arguments_are_let_go_with_the_results() -> None:
    call = on_xrt(lambda v: v.sin().sum())
    for _ in range(CALLS):
        x = torch.ones(3, requires_grad=True)
        y = call(x * 1)
        held = weakref.ref(y.grad_fn)
        y.backward()
        del y
        gc.collect()
        assert held() is None


def test_deterministic_algorithms_that_are_turned_on_between_the_passes() -> None:
    model, x = network(), torch.randn(4, 8)
    call = on_xrt(model)
    for _ in range(CALLS):
        loss = call(x).sum()
        torch.use_deterministic_algorithms(True)
        try:
            loss.backward()
        finally:
            torch.use_deterministic_algorithms(False)
    assert_answered()


def test_several_backward_passes_at_once() -> None:
    """With `is_grads_batched=True` tensors stand for several: such a backward pass is eager's, the next one is not."""
    model, x = network(), torch.randn(4, 8)
    call = on_xrt(model)
    for _ in range(CALLS):
        call(x).sum().backward()
        given = x.clone().requires_grad_()
        of_each = {"grad_outputs": torch.eye(4)[..., None], "is_grads_batched": True}
        made, want = (torch.autograd.grad(f(given), given, **of_each) for f in (call, model))
        torch.testing.assert_close(made, want)
    assert_answered()


@pytest.mark.parametrize("grad", [False, True])
def test_derivatives_of_forward_mode(grad: bool) -> None:
    """A tensor may carry a derivative, which its values in memory do not show."""
    model, x = network(), torch.randn(4, 8)
    call = on_xrt(model)
    with torch.set_grad_enabled(grad):
        for _ in range(CALLS):
            call(x)
        with forward_ad.dual_level():
            made, want = (forward_ad.unpack_dual(f(forward_ad.make_dual(x, torch.ones_like(x)))) for f in (call, model))
        torch.testing.assert_close(made.primal, want.primal)
        torch.testing.assert_close(made.tangent, want.tangent)
        call(x)
    assert all(g.reason is None for g in xrt_torch.graphs())


def test_compiled_autograd() -> None:
    """Whose graphs empty the lists that they are given, so that they are called once: they are eager's."""
    model, x = network(), torch.randn(4, 8)
    model(x).sum().backward()
    want = [p.grad.clone() for p in model.parameters()]
    call = on_xrt(model)

    @torch.compile(backend=backend, options={"engine": "host", "background": False})
    def step(x: Any) -> Any:
        call(x).sum().backward()

    with torch._dynamo.config.patch(compiled_autograd=True):
        for run in (step, lambda v: call(v).sum().backward()):
            for _ in range(CALLS):
                model.zero_grad()
                run(x)
                torch.testing.assert_close([p.grad for p in model.parameters()], want)
    assert any(g.is_proven for g in xrt_torch.graphs())

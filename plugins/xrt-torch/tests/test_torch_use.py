"""How people use compiled models: frozen weights, autocast, threads, copies, memory, torch's structured log."""

from __future__ import annotations

import copy
import gc
import json
import math
import os
import pathlib
import pickle
import subprocess
import sys
import threading
import time
import types
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

import xrt_torch  # noqa: E402
from torch.fx import traceback  # noqa: E402
from xrt_torch import backend as backends  # noqa: E402
from xrt_torch import background, choice, compiled, translation  # noqa: E402
from xrt_torch.backend import xrt as backend  # noqa: E402
from xrt_torch.choice import Choice  # noqa: E402
from xrt_torch.partition import AT_BORDER, Stage  # noqa: E402

import xrt_core as xrt  # noqa: E402
from xrt_core.module import XRTModule  # noqa: E402
from xrt_core.testing.processes import run_python  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("fresh_graphs")]
HOST = {"engine": "host", "background": False}
nn = torch.nn


def on_xrt(model: Any, **options: Any) -> Any:
    return torch.compile(model, backend=backend, options={**HOST, **options})


def small() -> Any:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3))


def inputs_of_stages() -> list[int]:
    return [len(r.stage.inputs) for g in xrt_torch.graphs() for r in g._stages or ()]


def test_frozen_parameters_are_constants_until_they_change() -> None:
    """With freeze=True parameters are constants of inference; load_state_dict and in-place writes are seen."""
    model, x = small().requires_grad_(False), torch.randn(4, 8)
    call = on_xrt(model, freeze=True)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(call(x), model(x))
        assert inputs_of_stages() == [1]
        model.load_state_dict(small().state_dict())
        for _ in range(3):
            torch.testing.assert_close(call(x), model(x))
        assert inputs_of_stages() == [7]
        model[0].weight.mul_(2)
        torch.testing.assert_close(call(x), model(x))
    assert all(g.reason is None for g in xrt_torch.graphs())


def test_parameters_are_frozen_as_the_option_says() -> None:
    """freeze=True takes those that need a gradient too, in inference alone; by default all stay inputs."""
    x = torch.randn(4, 8)
    for given, inputs in (({"freeze": True}, [1]), ({}, [7]), ({"freeze": False}, [7])):
        torch._dynamo.reset()
        gc.collect()
        model = small()
        call = on_xrt(model, **given)
        with torch.no_grad():
            for _ in range(2):
                torch.testing.assert_close(call(x), model(x))
        assert inputs_of_stages() == inputs
    with pytest.raises(Exception, match="freeze='yes': it takes True or False"):
        on_xrt(torch.sin, freeze="yes")(torch.ones(2))


def test_writes_through_data_are_seen_by_default() -> None:
    """A moving average of weights is written so, into parameters that need no gradient: no version counts it."""
    model, x = nn.Linear(4, 2).requires_grad_(False), torch.randn(3, 4)
    call = on_xrt(model)
    for _ in range(3):
        call(x)
    model.weight.data.mul_(0.5).add_(1)
    torch.testing.assert_close(call(x), model(x))


def test_a_parameter_with_other_memory_is_seen() -> None:
    """Views of parameters are kept between calls; `param.data = other` gives the parameter other memory."""
    model, x = nn.Linear(4, 2), torch.randn(3, 4)
    call = on_xrt(model)
    for _ in range(3):
        call(x).sum().backward()
    model.weight.data = torch.ones(2, 4)
    torch.testing.assert_close(call(x), model(x))
    with torch.no_grad():
        model.weight.zero_()
    torch.testing.assert_close(call(x), model(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: Any) -> None:
    """Casts are part of the graphs: dtypes are eager's, numbers within the rounding of the narrow floats."""
    model, x = small(), torch.randn(4, 8)
    eager = copy.deepcopy(model)
    call = on_xrt(model)
    for _ in range(3):
        found = []
        for f, m in ((call, model), (eager, eager)):
            m.zero_grad()
            with torch.autocast("cpu", dtype):
                y = f(x)
            y.float().square().mean().backward()
            found.append([y.detach(), *(p.grad.clone() for p in m.parameters())])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=3e-2, atol=3e-2)
    assert all(g.reason is None for g in xrt_torch.graphs()), xrt_torch.explain()


def raising(name: str) -> tuple[Any, ...]:
    """Divisions that raise for a divisor of 0, an index beyond a table, a label that no class has."""
    table, labels, scores = torch.randn(5, 3), torch.tensor([1, 2]), torch.randn(2, 3)
    rows = (lambda i: nn.functional.embedding(i, table)), (labels,), (torch.tensor([7, 2]),), IndexError
    bytes_, wide = labels.to(torch.uint8), torch.tensor([1, 256])
    narrowed = lambda a, b: a // b.clamp(min=1).to(torch.uint8)  # noqa: E731
    return {
        "floor": ((lambda a, b: a // b), (labels, labels), (labels, labels - 1), RuntimeError),
        "remainder": ((lambda a, b: a % b + 1), (labels, labels), (labels, labels - 2), RuntimeError),
        "rest": (torch.fmod, (labels, labels), (labels, labels - 1), RuntimeError),
        "row": rows,
        "narrowed": (narrowed, (bytes_, labels), (bytes_, wide), RuntimeError),
        "label": (nn.functional.cross_entropy, (scores, labels), (scores, labels + 2), (IndexError, RuntimeError)),
    }[name]


@pytest.mark.parametrize("name", ["floor", "remainder", "rest", "narrowed", "row", "label"])
def test_what_raises_in_eager_raises(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """And leaves the graph as it was: it is the arguments that are wrong. Nothing is printed."""
    function, right, wrong, error = raising(name)
    call = on_xrt(function)
    for _ in range(3):
        torch.testing.assert_close(call(*(x.clone() for x in right)), function(*right))
    capfd.readouterr()
    with pytest.raises(error):
        call(*wrong)
    assert capfd.readouterr() == ("", "")
    torch.testing.assert_close(call(*right[:-1], right[-1].clone()), function(*right))
    (graph,) = xrt_torch.graphs()
    assert graph.is_proven
    assert graph.reason is None


@pytest.mark.parametrize("background", [False, True])
def test_a_first_call_that_raises(background: bool) -> None:
    """Nothing is compiled for wrong arguments: the next call begins."""
    function, right, wrong, error = raising("floor")
    call = on_xrt(function, background=background)
    for _ in range(2):
        with pytest.raises(error):
            call(*(x.clone() for x in wrong))
    for _ in range(5):
        torch.testing.assert_close(call(*(x.clone() for x in right)), function(*right))
        assert xrt_torch.wait(60)
    (graph,) = xrt_torch.graphs()
    assert graph.is_proven
    assert graph.reason is None


def test_divisors_that_are_never_zero() -> None:
    """Integers are divided by XRT where the graph tells that no divisor is 0."""
    function = lambda a, b: (a // 3, a % b.clamp(min=1), torch.where(b == 0, 1, b).fmod(2), torch.gcd(a, b))  # noqa: E731
    call, a, b = on_xrt(function), torch.tensor([7, 12]), torch.tensor([0, 9])
    for _ in range(3):
        torch.testing.assert_close(call(a, b), function(a, b))
    (graph,) = xrt_torch.graphs()
    assert graph.reason is None
    assert not graph.eager_nodes


def test_four_threads() -> None:
    """Calls and backward passes from four threads, from before XRT is ready to after."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    call, wrong = torch.compile(model, backend=backend, options={"engine": "host"}), []

    def work(x: Any) -> None:
        for _ in range(30):
            found = []
            for f in (call, model):
                given = x.clone().requires_grad_()
                y = f(given)
                found.append((y.detach(), torch.autograd.grad(y.sum(), given)[0]))
            if not all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*found, strict=True)):
                wrong.append(found)

    threads = [threading.Thread(target=work, args=(torch.randn(4, 8),)) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    assert xrt_torch.wait(60)
    assert all(g.reason is None for g in xrt_torch.graphs())


def test_copies_pickles_and_states() -> None:
    """What torch.compile gives is copied, and its state loaded, as ever; the module that it wraps is pickled."""
    model, x = nn.Linear(4, 2), torch.randn(3, 4)
    call = on_xrt(model)
    for _ in range(2):
        y = call(x)
    other = copy.deepcopy(call)
    torch.testing.assert_close(other(x), y)
    other.load_state_dict(call.state_dict())
    torch.testing.assert_close(pickle.loads(pickle.dumps(model))(x), y)


def test_ctrl_c_in_backward_leaves_the_state_intact(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reaches the caller; the next step is right, and on XRT."""
    model, x = nn.Linear(4, 2), torch.randn(3, 4)
    call = on_xrt(model)
    for _ in range(2):
        call(x).sum().backward()
    run = compiled.CompiledGraph._on_xrt

    def interrupted(self: Any, *args: Any) -> Any:
        if self.kind == "backward":
            raise KeyboardInterrupt
        return run(self, *args)

    with monkeypatch.context() as m:
        m.setattr(compiled.CompiledGraph, "_on_xrt", interrupted)
        with pytest.raises(KeyboardInterrupt):
            call(x).sum().backward()
    model.zero_grad()
    call(x).sum().backward()
    torch.testing.assert_close(model.weight.grad, x.sum(0).expand(2, 4))
    assert all(g.reason is None for g in xrt_torch.graphs())


def test_checkpointing_and_hooks() -> None:
    """Recomputation in the backward pass, hooks of modules and of tensors."""
    from torch.utils.checkpoint import checkpoint

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    model[0].register_forward_hook(lambda module, given, made: made * 2)
    eager, x = copy.deepcopy(model), torch.randn(3, 4)
    for m in (model, eager):
        m[2].weight.register_hook(lambda g: g * 3)
    calls = [
        (lambda v, m=m: checkpoint(lambda t: torch.tanh(m(t)), v, use_reentrant=False).sum()) for m in (model, eager)
    ]
    calls[0] = torch.compile(calls[0], backend=backend, options=HOST)
    for _ in range(3):
        for m, f in zip((model, eager), calls, strict=True):
            m.zero_grad()
            f(x).backward()
        for a, b in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)


class Own(torch.Tensor):
    """A tensor of a class of its own."""


@pytest.mark.parametrize("kind", ["sparse", "subclass"])
def test_tensors_that_are_torchs(events: list[Any], kind: str) -> None:
    """Sparse inputs, and those of a class of their own, run in eager; where a graph was captured, with the reason."""
    x = torch.eye(3).to_sparse() if kind == "sparse" else torch.randn(3).as_subclass(Own)
    call = on_xrt(lambda v: v * 2)
    for _ in range(2):
        y = call(x)
    assert type(y) is type(x)
    assert y.layout is x.layout
    torch.testing.assert_close(y, x * 2)
    reasons = [e.fields["error"] for e in events if e.name == "fallback"]
    assert not xrt_torch.graphs()
    assert all("layout torch.sparse_coo" in r or "of class" in r for r in reasons)
    assert len(reasons) == (kind == "subclass")


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_may_be_resized_afterwards(dtype: str, background: bool) -> None:
    """As `fully_shard` does, which frees the memory of parameters between calls."""
    x, weight = (torch.ones(4, 4, dtype=getattr(torch, dtype)) for _ in range(2))
    parameter = nn.Parameter(weight)
    call = torch.compile(lambda x, w: x @ w + 1, backend=backend, options={"engine": "host", "background": background})
    for n in range(1, 5):
        with torch.no_grad():
            parameter.untyped_storage().resize_(16 * parameter.itemsize)
            parameter.fill_(n)
        y = call(x, parameter)
        y.sum().backward()
        assert xrt_torch.wait(60)
        assert float(y[0, 0]) == 4 * n + 1
        parameter.untyped_storage().resize_(0)
    assert x.untyped_storage().resizable()
    assert len(xrt_torch.graphs()) == 2
    assert all(g.reason is None for g in xrt_torch.graphs())


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("is_plain", [False, True])
def test_tensors_made_of_tensors(train: bool, background: bool, is_plain: bool) -> None:
    """Weights of a class that holds others, as torchao's quantised ones are, and inputs of it."""
    from torch.testing._internal.two_tensor import TwoTensor

    def pair(x: Any) -> Any:
        return TwoTensor(x.detach().clone(), 2 * x.detach())

    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    for linear in (eager[0], eager[2]):
        linear.weight = nn.Parameter(pair(linear.weight))
    model = copy.deepcopy(eager)
    call = torch.compile(model, backend=backend, options={"engine": "host", "background": background})
    x = torch.randn(3, 8) if is_plain else pair(torch.randn(3, 8))
    with torch.set_grad_enabled(train):
        want = eager(x)
        for _ in range(4):
            found = call(x)
            if train:
                model.zero_grad()
                found.sum().backward()
            assert xrt_torch.wait(60)
    torch.testing.assert_close((found.a, found.b), (want.a, want.b))
    if train:
        want.sum().backward()
        for p, q in zip(model.parameters(), eager.parameters(), strict=True):
            assert type(p.grad) is type(q.grad)
            torch.testing.assert_close((p.grad.a, p.grad.b), (q.grad.a, q.grad.b))
    assert len(xrt_torch.graphs(model)) == 1 + train
    assert all(g.reason is None and not g.eager_nodes for g in xrt_torch.graphs())


def test_reading_through_data_is_no_write() -> None:
    """However often what follows branches and joins again."""

    def f(x: Any) -> Any:
        scale = x.data.abs().max()
        for _ in range(40):
            x = x + torch.cat([x, scale.reshape(1)])[:-1].sin() / scale
            scale = scale + scale.cos()
        return x

    call = on_xrt(f)
    x = torch.linspace(0, 1, 8, requires_grad=True)
    for _ in range(3):
        torch.testing.assert_close(call(x * 2), f(x * 2))
    assert [(g.kind, g.reason) for g in xrt_torch.graphs()] == [("forward", None)]


class _Assigned(torch.autograd.Function):
    """As torchdiffeq's, which writes where the version counter does not see it."""

    @staticmethod
    def forward(ctx: Any, whole: Any, part: Any, i: int) -> Any:
        ctx.i = i
        whole.data[..., i] = part
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient, gradient[..., ctx.i], None


def _stages(x: Any) -> Any:
    made = torch.zeros(*x.shape, 3)
    for i in range(3):
        torch._dynamo.graph_break()
        made = _Assigned.apply(made, x, i)
        x = x + made[..., : i + 1].sin().sum(-1)
    return made.sum() + x.sum()


@pytest.mark.parametrize("background", [False, True])
def test_writes_that_autograd_does_not_see(background: bool) -> None:
    """AOTAutograd shows them to it, and the backward pass raises: such a graph is eager's."""
    call = torch.compile(_stages, backend=backend, options={"engine": "host", "background": background})
    for _ in range(4):
        gradients = []
        for f in (call, _stages):
            x = torch.linspace(0, 1, 4, requires_grad=True)
            f(x * 2).backward()
            gradients.append(x.grad)
        torch.testing.assert_close(*gradients)
        assert xrt_torch.wait(60)


@pytest.mark.parametrize("name", ["grad", "jacrev", "jacfwd", "hessian", "vmap of grad"])
def test_derivatives_of_functions(name: str) -> None:
    """`torch.func` within a graph, whose operators follow the mode for gradients of its capture."""

    def loss(x: Any) -> Any:
        return (x.sin() ** 2).sum()

    function = torch.func.vmap(torch.func.grad(loss)) if name == "vmap of grad" else getattr(torch.func, name)(loss)
    x = torch.randn(3, 4)
    call = on_xrt(lambda x: function(x))
    for _ in range(3):
        torch.testing.assert_close(call(x), function(x))
    assert xrt_torch.graphs()
    assert all(g.reason is None for g in xrt_torch.graphs())


@pytest.mark.parametrize("options", [{"background": True}, {"background": False}])
def test_parameters_may_be_swapped(options: dict[str, Any]) -> None:
    """For others, as torch does where it is told to, or has tensors made of tensors: nothing refers to them weakly."""
    model = small().eval()
    call = torch.compile(model, backend=backend, options={**HOST, **options})
    x = torch.randn(5, 8)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with torch.no_grad():
            for dtype in (torch.float32, torch.float64, torch.float32):
                model.to(dtype)
                for _ in range(5):
                    torch.testing.assert_close(call(x.to(dtype)), model(x.to(dtype)))
                    assert xrt_torch.wait(60)
            model.load_state_dict({k: 2 * v for k, v in model.state_dict().items()})
            torch.testing.assert_close(call(x), model(x))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert all(g.reason is None for g in xrt_torch.graphs())


def test_memory_is_flat_over_resets() -> None:
    """Models that were compiled, trained and forgotten leave nothing: graphs, modules of XRT, nor memory. In a process
    of its own: that of other tests has gigabytes, in pieces."""
    script = """
import gc, os, pathlib, torch, xrt_torch
from torch import nn
from xrt_torch.backend import xrt

sizes = []
for _ in range(15):
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    call = torch.compile(model, backend=xrt, options={"engine": "host", "background": False})
    for _ in range(3):
        call(torch.randn(2, 256)).sum().backward()
    del model, call
    torch._dynamo.reset()
    gc.collect()
    sizes.append(int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 1e6)
assert not xrt_torch.graphs()
assert sizes[-1] - sizes[4] < 10, sizes  # MB; one model with its gradients has 1
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr


def test_the_quicker_side_answers() -> None:
    """XRT and eager take turns; then the quicker one answers, and explain tells the times of both."""
    calls = {"xrt": 0, "eager": 0}

    def side(name: str, seconds: float) -> Any:
        def call(x: Any) -> tuple[Any]:
            calls[name] += 1
            time.sleep(seconds)
            return (x * 2,)

        return call

    for xrt_seconds, eager_seconds, quicker in ((0.001, 0.01, "xrt"), (0.01, 0.001, "eager")):
        made = on_xrt(torch.sin)
        for _ in range(2):
            made(torch.ones(3))
        graphs = xrt_torch.graphs()
        own = side("xrt", xrt_seconds)
        choice = Choice(side("eager", eager_seconds), lambda own=own: own, graphs, race=True)
        for _ in range(12):
            choice.answer(torch.ones(3))
        before = dict(calls)
        choice.answer(torch.ones(3))
        assert calls[quicker] == before[quicker] + 1
        assert ("torch eager, which is quicker" in xrt_torch.explain()) == (quicker == "eager")
        torch._dynamo.reset()
        gc.collect()


def test_what_eager_answers_for_good_is_let_go() -> None:
    """Its executables go, what is being compiled is given up, and `explain` still tells what there was; a backward pass
    that is still to come is eager's."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4)
    call = torch.compile(model, backend=backend, options=HOST)
    for _ in range(3):
        call(x).sum().backward()
    graphs = xrt_torch.graphs(model)
    modules = [r.module for g in graphs for r in g._stages or () if r.module is not None]
    answers = Choice(model, lambda: call, graphs, race=True)
    late = call(x).sum()
    answers._timings = {side: [choice._Timing(1, torch.device("cpu")) for _ in range(5)] for side in (True, False)}
    for side, seconds in ((True, 2.0), (False, 1.0)):
        for t in answers._timings[side]:
            t.seconds = seconds
    assert answers._is_decided(at_once=False)
    assert answers.answer is model
    background.compiler.submit(int).result()
    assert [g._stages for g in graphs] == [None, None]
    assert all(m._pipeline.services.guard is None or m._pipeline.services.guard.closed for m in modules)
    for text in (xrt_torch.explain(model), str([g.to_json()["stages"] for g in graphs])):
        assert "Gemm" in text or "MatMul" in text
    assert xrt_torch.explain(model).count("torch eager, which is quicker answers") == 2
    model.zero_grad()
    late.backward()
    made = model[0].weight.grad.clone()
    model.zero_grad()
    model(x).sum().backward()
    torch.testing.assert_close(made, model[0].weight.grad)


def test_a_graph_that_cannot_be_explained_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all that is data about a graph, and the reason."""

    def broken(*_: Any) -> Any:
        raise RuntimeError("no words")

    model, x = nn.Linear(4, 2), torch.randn(3, 4)
    call = on_xrt(model)
    with torch.no_grad():
        call(x)
    (graph,) = xrt_torch.graphs(model)
    known = set(graph.to_json())
    monkeypatch.setattr(XRTModule, "explain", broken)
    graph.release()
    background.compiler.submit(int).result()
    assert graph._stages is None
    assert set(graph.to_json()) == known
    assert graph.to_json()["stages"] == []
    assert "RuntimeError: no words" in graph.explain()


def test_a_graph_that_is_called_once_costs_no_capture() -> None:
    """It is eager's; the second call has AOTAutograd capture it, draws no random number, and gradients are eager's."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2)), torch.randn(3, 4)
    eager = copy.deepcopy(model)
    call = torch.compile(model, backend=backend, options={"engine": "host", "background": True})
    for i in range(5):
        found = []
        for m, f in ((model, call), (eager, eager)):
            torch.manual_seed(i)
            m.zero_grad()
            y = f(x)
            y.square().sum().backward()
            found.append([y.detach(), torch.rand(1), *(p.grad.clone() for p in m.parameters())])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b)
        assert len(xrt_torch.graphs()) == min(i, 2)  # the call that is compared has the module's backward pass
        assert xrt_torch.wait(60)
    assert all(g.is_proven and g.reason is None for g in xrt_torch.graphs())


@pytest.mark.parametrize("background", [False, True])
def test_tensors_that_share_memory_later_are_eagers(background: bool) -> None:
    """What is written through one is seen through the other, which a graph captured for others does not know of."""

    def f(a: Any, b: Any) -> Any:
        a.add_(1)
        return a * 2 + b

    call = torch.compile(f, backend=backend, options={"engine": "host", "background": background})
    for shares in (False, False, False, False, True, False, True):
        found = []
        for function in (call, f):
            base = torch.arange(8.0)
            a, b = (base[:4], base[2:6]) if shares else (base[:4].clone(), base[2:6].clone())
            found.append([function(a, b), a, b])
        for got, wanted in zip(*found, strict=True):
            torch.testing.assert_close(got, wanted)
        assert xrt_torch.wait(60)
    (graph,) = xrt_torch.graphs()
    assert graph.is_proven


def test_tensors_that_share_memory_are_captured_at_once() -> None:
    """As AOTAutograd looks at the tensors themselves, and not at what stands for them."""
    call = torch.compile(
        lambda a, b: (a.add_(1), a + b)[1], backend=backend, options={"engine": "host", "background": True}
    )
    for _ in range(3):
        found = []
        for f in (call, lambda a, b: (a.add_(1), a + b)[1]):
            base = torch.arange(8.0)
            found.append((f(base[:4], base[2:6]), base))
        for a, b in zip(*found, strict=True):
            assert torch.equal(a, b)
        assert xrt_torch.graphs()
        assert xrt_torch.wait(60)


def test_a_capture_that_fails_at_the_second_call_ends_in_eager(
    events: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the event, once; calls stay right."""
    import xrt_torch.backend as module

    def broken(_: Any) -> Any:
        raise RuntimeError("no capture")

    monkeypatch.setattr(module, "_as_compiling", broken)
    model, x = nn.Linear(4, 2), torch.randn(3, 4)
    call = torch.compile(model, backend=backend, options={"engine": "host", "background": True})
    for _ in range(4):
        torch.testing.assert_close(call(x), model(x))
    assert [e.fields["error"] for e in events if e.name == "fallback"] == ["RuntimeError: no capture"]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_wrong_decomposition_ends_in_eager(
    events: list[Any], monkeypatch: pytest.MonkeyPatch, background: bool, mode: Any
) -> None:
    """The captured graph is as wrong in eager as on XRT, so that its first call is compared with the module. What it
    drew of random numbers meanwhile is drawn again."""
    wrong = {**backends.table(), torch.ops.aten.tanh.default: lambda x: x.sigmoid() * 2}
    monkeypatch.setattr(backends, "table", lambda: wrong)

    def f(x: Any) -> Any:
        return nn.functional.dropout(x, 0.5).tanh()

    call = torch.compile(f, backend=backend, options={"engine": "host", "background": background})
    with mode():
        x = torch.randn(64, requires_grad=mode is torch.enable_grad)
        for seed in range(5):
            torch.manual_seed(seed)
            expected, following = f(x), torch.rand(())
            torch.manual_seed(seed)
            torch.testing.assert_close(call(x), expected)
            assert torch.rand(()) == following
            assert xrt_torch.wait(60)
    assert [e.fields["kind"] for e in events if e.name == "fallback"] == ["wrong numbers"]


def test_a_wrong_decomposition_is_found_after_a_call_that_raises(
    events: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call that would have been compared has wrong arguments; the next one is."""
    wrong = {**backends.table(), torch.ops.aten.tanh.default: lambda x: x.sigmoid() * 2}
    monkeypatch.setattr(backends, "table", lambda: wrong)
    f = lambda i, x: nn.functional.embedding(i, x).tanh()  # noqa: E731
    call, x, right = on_xrt(f, background=True), torch.randn(5, 3), torch.tensor([1, 4])
    call(right, x)
    for _ in range(3):
        with pytest.raises(IndexError):
            call(torch.tensor([1, 9]), x)
    for _ in range(4):
        torch.testing.assert_close(call(right, x), f(right, x))
        assert xrt_torch.wait(60)
    assert [e.fields["kind"] for e in events if e.name == "fallback"] == ["wrong numbers"]


@pytest.mark.parametrize("background", [False, True])
def test_a_wrong_decomposition_of_gradients_ends_in_eager(
    events: list[Any], monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    """Before a caller gets a gradient of it, where XRT compiles in the background; after the first one where not. What
    the comparison drew of random numbers is drawn again."""
    wrong = {**backends.table(), torch.ops.aten.tanh_backward.default: lambda g, y: g * (1 - y)}
    monkeypatch.setattr(backends, "table", lambda: wrong)

    def f(x: Any, w: Any) -> Any:
        return (nn.functional.dropout(x, 0.5) * w).tanh()

    call = torch.compile(f, backend=backend, options={"engine": "host", "background": background})
    x, w = torch.randn(64, requires_grad=True), nn.Parameter(torch.randn(64))
    for seed in range(6):
        found = []
        for g in (f, call):
            torch.manual_seed(seed)
            y = g(x, w)
            found.append([y.detach(), torch.rand(()), *torch.autograd.grad(y.sum(), (x, w))])
        if background or seed > 1:
            for a, b in zip(*found, strict=True):
                torch.testing.assert_close(a, b)
        assert xrt_torch.wait(60)
    assert [e.fields["kind"] for e in events if e.name == "fallback"] == ["wrong numbers"]
    assert "gradient of" in next(e.fields["error"] for e in events if e.name == "fallback")


@pytest.mark.parametrize("wrong", ["tanh", "tanh_backward"])
@pytest.mark.parametrize("background", [False, True])
def test_calls_that_write_are_compared_on_copies(
    events: list[Any], monkeypatch: pytest.MonkeyPatch, background: bool, wrong: str
) -> None:
    """Statistics are written once in each call, and never from a wrong decomposition where XRT compiles in the
    background; gradients are compared beside them."""
    op = getattr(torch.ops.aten, wrong).default
    table = {**backends.table(), op: lambda *x: torch.ops.aten.sigmoid(x[-1]) * x[0]}
    monkeypatch.setattr(backends, "table", lambda: table)

    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(-1, 1, 8))
            self.register_buffer("mean", torch.zeros(8))
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = (nn.functional.dropout(x, 0.2) * self.weight).tanh()
            self.mean.mul_(0.9).add_(y.detach().mean(0))
            self.calls += 1
            return y - self.mean

    model = Running()
    eager = copy.deepcopy(model)
    call = torch.compile(model, backend=backend, options={"engine": "host", "background": background})
    for seed in range(6):
        x = torch.randn(4, 8)
        found = []
        for m, f in ((model, call), (eager, eager)):
            torch.manual_seed(seed)
            y = f(x)
            m.weight.grad = None
            y.square().sum().backward()
            found.append([y.detach(), m.mean.clone(), m.calls.clone(), torch.rand(()), m.weight.grad])
        if background or seed > 1:
            for a, b in zip(*found, strict=True):
                torch.testing.assert_close(a, b)
        else:
            model.load_state_dict(eager.state_dict())
        assert xrt_torch.wait(60)
    (error,) = [e.fields["error"] for e in events if e.name == "fallback"]
    assert ("gradient of" in error) == (wrong == "tanh_backward")


@pytest.mark.parametrize("background", [False, True])
def test_statistics_are_written_once_in_each_call(background: bool) -> None:
    """Tensors do not count the writes of `batch_norm`, so that a comparison with the module wrote them twice."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    eager, x = copy.deepcopy(model), torch.randn(2, 3, 8, 8)
    call = torch.compile(model, backend=backend, options={**HOST, "background": background})
    mean, var = torch.zeros(4), torch.ones(4)
    normalise = torch.compile(
        lambda x: nn.functional.batch_norm(x, mean, var, training=True) * 2,
        backend=backend,
        options={**HOST, "background": background},
    )
    other = torch.zeros(4), torch.ones(4)
    for _ in range(5):
        torch.testing.assert_close(call(x), eager(x))
        torch.testing.assert_close(model[1].running_var, eager[1].running_var)
        torch.testing.assert_close(
            normalise(x[:, :1] * torch.ones(4)[:, None, None]),
            nn.functional.batch_norm(x[:, :1] * torch.ones(4)[:, None, None], *other, training=True) * 2,
        )
        torch.testing.assert_close((mean, var), other)
        assert xrt_torch.wait(60)
    assert not any(g.reason for g in xrt_torch.graphs())
    assert int(model[1].num_batches_tracked) == 5


@pytest.mark.parametrize("background", [False, True])
def test_a_checkpoint_around_what_is_compiled(background: bool) -> None:
    """It makes the forward pass again, and counts what is saved: the side that answers must not change in between. What
    answers for good does so in checkpoints too."""
    from torch.utils.checkpoint import checkpoint

    block = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    eager = copy.deepcopy(block)
    call = torch.compile(block, backend=backend, options={**HOST, "background": background})

    def step(through: Any) -> None:
        x = torch.randn(4, 8)
        for f in (call, eager):
            through(f, x).square().sum().backward()
        for a, b in zip(block.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)
        assert xrt_torch.wait(60)

    for _ in range(4):
        step(lambda f, x: checkpoint(f, x, use_reentrant=False))
    assert not any(g.is_proven for g in xrt_torch.graphs())
    for _ in range(6):
        step(lambda f, x: f(x))
    (forward,) = [g for g in xrt_torch.graphs() if g.kind == "forward"]
    assert forward.is_proven
    calls = forward._calls
    for _ in range(2):
        step(lambda f, x: checkpoint(f, x, use_reentrant=False))
    assert forward._calls == calls + 4


@pytest.mark.parametrize("needs_number", [False, True])
def test_floats_that_vary(events: list[Any], needs_number: bool) -> None:
    """They are given as tensors, or where an operator takes none torch begins anew with the number as a constant."""

    def scaled(x: Any, factor: float) -> Any:
        return nn.functional.pad(x, (1, 2), value=factor) * factor if needs_number else (x * factor).sin()

    call, x = torch.compile(scaled, backend=backend, options={"engine": "host", "background": True}), torch.randn(4)
    for factor in (0.5, 1.5, 2.5, *[3.25] * 4):
        torch.testing.assert_close(call(x, factor), scaled(x, factor))
        assert xrt_torch.wait(60)
    assert not [e.fields["error"] for e in events if e.name == "fallback"]
    assert xrt_torch.graphs()[-1]._calls


def test_a_gradient_that_is_nothing_but_rounding_is_right() -> None:
    """What is added to all elements changes no softmax, and of random numbers there are none in float64."""
    from xrt_torch.confirmation import Confirmation

    def by_parts(x: Any, s: Any) -> Any:
        e = torch.exp(x + s)
        return (e / e.sum(0) * torch.rand_like(x),)

    module = torch.fx.symbolic_trace(lambda x, s: (torch.softmax(x + s, 0) * torch.rand_like(x),))
    for seed in (8, 14, 17, 24, 25):
        torch.manual_seed(seed)
        args = [torch.randn(7), torch.randn((), requires_grad=True)]
        confirmation = Confirmation(module, torch.device("cpu"))
        assert not confirmation.compare(args, by_parts)
        assert confirmation.needs_gradients
        assert not confirmation.compare(args, by_parts)


def test_a_comparison_that_is_interrupted_is_made_in_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C passes through, and what was captured still answers nothing that was not compared."""
    from xrt_torch.confirmation import Confirmation

    wrong = {**backends.table(), torch.ops.aten.tanh.default: lambda x: x.sigmoid() * 2}
    monkeypatch.setattr(backends, "table", lambda: wrong)
    judged, interrupted = Confirmation._judged, []

    def once(*args: Any) -> str:
        if not interrupted:
            interrupted.append(1)
            raise KeyboardInterrupt
        return judged(*args)

    monkeypatch.setattr(Confirmation, "_judged", once)
    call, x = torch.compile(torch.tanh, backend=backend, options=HOST), torch.randn(8)
    with pytest.raises(KeyboardInterrupt):
        call(x)
    for _ in range(3):
        torch.testing.assert_close(call(x), torch.tanh(x))
    assert interrupted


def test_hooks_of_tensors_are_not_called_for_comparisons() -> None:
    w, called = nn.Parameter(torch.randn(8)), []
    w.register_hook(called.append)
    call = torch.compile(lambda x: nn.functional.gelu(x * w).cumsum(0), backend=backend, options=HOST)
    for _ in range(4):
        call(torch.randn(8)).sum().backward()
    assert len(called) == 4
    assert [g.reason for g in xrt_torch.graphs()] == [None, None]


@pytest.mark.filterwarnings("ignore")
def test_what_communicates_is_never_called_twice() -> None:
    """A call that is compared would add to another process's next sum: two processes got wrong ones, unnoticed, where
    one had compiled earlier than the other."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("this torch has no collective operators")

    def f(x: Any) -> Any:
        y = x * 2
        distributed.all_reduce(y)
        return y + 1

    events: list[Any] = []
    undo = xrt.subscribe(events.append)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        call = torch.compile(f, backend=backend, options=HOST)
        for _ in range(3):
            torch.testing.assert_close(call(torch.ones(4)), torch.full((4,), 3.0))
    finally:
        distributed.destroy_process_group()
        undo()
    assert xrt_torch.graphs() == []
    assert any("communicates" in e.fields["error"] for e in events if e.name == "fallback")


_SHARDED = """
import copy, os, sys
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard

class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(8, 16), torch.nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.body(x).relu())

torch.manual_seed(0)
eager = Classifier()
model = copy.deepcopy(eager)
child = os.fork()
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=int(not child), world_size=2)
import xrt_torch
mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
model = fully_shard(model, mesh=mesh, reshard_after_forward=True)
call = torch.compile(model, backend="xrt", options={"engine": "host", "background": True})
for train in (True, False):
    for n in range(4):
        x = torch.full((4, 8), float(n))
        with torch.set_grad_enabled(train):
            found, want = call(x), eager(x)
        torch.testing.assert_close(found, want)
        if train:
            for made in (found, want):
                made.square().sum().backward()
        assert xrt_torch.wait(60)
for p, q in zip(model.parameters(), eager.parameters()):
    torch.testing.assert_close(p.grad.full_tensor(), q.grad)
assert xrt_torch.graphs() and all(g.reason is None for g in xrt_torch.graphs()), xrt_torch.explain()
dist.destroy_process_group()
if child:
    assert os.waitpid(child, 0)[1] == 0
    print("right")
"""


def test_parameters_that_are_gathered_for_each_call(tmp_path: pathlib.Path) -> None:
    """`fully_shard` frees their memory after it, and resizes it before: nothing reads it in the background."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_gloo_available() or not hasattr(os, "fork"):
        pytest.skip("this torch has no collective operators, or this system no fork")
    if not hasattr(pytest.importorskip("torch.distributed.fsdp"), "fully_shard"):
        pytest.skip("this torch has fully_shard elsewhere")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _SHARDED, str(tmp_path / "store")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.endswith("right\n"), done.stderr[-3000:]


def test_results_that_cannot_be_compared_are_eagers(events: list[Any]) -> None:
    """Whatever torch raises when it compares them; what was compiled is let go."""
    released = []
    graph = types.SimpleNamespace(
        name="g",
        kind="inference",
        module=None,
        reason=None,
        is_compiling=False,
        is_proven=False,
        release=lambda: released.append(1),
    )

    def refuses(*_: Any) -> str:
        raise NotImplementedError("no kernel")

    confirmation = types.SimpleNamespace(module="torch's", needs_results=True, needs_gradients=False, compare=refuses)
    answers = Choice(lambda x: (x * 2,), lambda: lambda x: (x * 3,), [graph], race=True, confirmation=confirmation)
    for _ in range(2):
        assert torch.equal(answers.answer(torch.ones(3))[0], torch.full((3,), 2.0))
    assert ["no kernel" in e.fields["error"] for e in events if e.name == "fallback"] == [True]
    assert released == [1]


def test_what_aotautograd_gets_wrong_ends_in_eager(events: list[Any]) -> None:
    """A graph that raises where the module does not is the module's from then on, with the event; what the caller does
    wrong is raised as it is, and changes nothing."""

    def module(x: Any) -> tuple[Any]:
        if x.shape[0] == 2:
            raise ValueError("two rows")
        return (x * 2,)

    def graph(x: Any) -> tuple[Any]:
        raise RuntimeError("strides")

    answers = Choice(module, lambda: graph, [], race=True)
    with pytest.raises(ValueError, match="two rows"):
        answers.answer(torch.ones(2))
    assert not events
    for _ in range(2):
        assert torch.equal(answers.answer(torch.ones(3))[0], torch.full((3,), 2.0))
    assert [e.fields["error"] for e in events if e.name == "fallback"] == ["RuntimeError: strides"]
    assert answers.answer is module


def test_an_encoder_layer_in_evaluation_is_run_whole() -> None:
    """torch.nn calls one fused operator for it."""
    layer, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), torch.randn(2, 5, 8)
    call = on_xrt(layer)
    with torch.no_grad():
        torch.testing.assert_close(call(x), layer(x), rtol=1e-4, atol=1e-5)
    assert [(g.eager_nodes, g.reason) for g in xrt_torch.graphs(layer)] == [({}, None)]


def test_groups_are_normalised_whatever_the_strides() -> None:
    """torch's kernel wants them contiguous; what comes before it may be laid out otherwise than was foreseen."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.norm = nn.MultiheadAttention(8, 1, batch_first=True), nn.GroupNorm(2, 8)

        def forward(self, x: Any) -> Any:
            y = x.flatten(2).transpose(1, 2)
            y = nn.functional.scaled_dot_product_attention(y, y, y).transpose(1, 2).reshape(x.shape)
            return self.norm((y + x) / 1.0)

    module, x = Block(), torch.randn(1, 8, 4, 4)
    call = torch.compile(module, backend=backend, options={"engine": "host", "background": True})
    for _ in range(3):
        torch.testing.assert_close(call(x), module(x), rtol=1e-4, atol=1e-5)
        assert xrt_torch.wait(60)


@pytest.mark.parametrize("background", [False, True])
def test_forward_passes_are_timed_alone_where_no_backward_pass_follows(background: bool) -> None:
    """An evaluation without `no_grad`: the backward pass that gradients were compared with is nobody's."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8)
    call = torch.compile(model, backend=backend, options={"guard": False, "background": background})
    for _ in range(90):
        torch.testing.assert_close(call(x), model(x), rtol=1e-4, atol=1e-5)
        assert xrt_torch.wait(60)
    (forward,) = [g for g in xrt_torch.graphs(model) if g.kind == "forward"]
    assert forward.is_settled
    assert forward.reason is None


def test_backward_passes_are_timed() -> None:
    """A model that trains, with no engine named, has both sides timed with their backward passes."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8)
    eager = copy.deepcopy(model)
    call = torch.compile(model, backend=backend, options={"guard": False, "background": False})
    for _ in range(12):
        for m, f in ((model, call), (eager, eager)):
            m.zero_grad()
            f(x).sum().backward()
        torch.testing.assert_close(model[0].weight.grad, eager[0].weight.grad, rtol=1e-4, atol=1e-5)
    assert all(g.is_settled and g.reason is None for g in xrt_torch.graphs(model))
    assert xrt_torch.explain(model).count("us in eager") == 2
    assert not model[0].weight._backward_hooks


def test_a_backward_pass_is_timed_without_that_of_other_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of an argument may wait for other graphs that read it."""
    now = [1.0]
    monkeypatch.setattr(choice, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))

    class Other(torch.autograd.Function):
        seconds = 0.0

        @staticmethod
        def forward(context: Any, x: Any) -> Any:
            return x.clone()

        @classmethod
        def backward(cls, context: Any, grad: Any) -> Any:
            now[0] += cls.seconds
            return grad

    class Own(Other):
        seconds = 2.0

    class Another(Other):
        seconds = 5.0

    x = torch.randn(3, requires_grad=True)
    h = x * 2
    other = Another.apply(h)
    timing = choice._Timing(1, torch.device("cpu"))
    (result,) = timing.run(lambda a: (Own.apply(a).sin(),), [h])
    assert not timing.is_done(is_over=True)
    (result + other).sum().backward()
    assert timing.is_done()
    assert timing.seconds == 2.0

    timing = choice._Timing(1, torch.device("cpu"))  # part of it is not needed
    results = timing.run(lambda a: (Own.apply(a).sin(), a.cos()), [x * 2])
    results[0].sum().backward()
    assert timing.is_done(is_over=True)
    assert timing.seconds == 2.0
    timing.close()


def test_sizes_that_vary_are_served_by_one_plan() -> None:
    """One compilation for all sizes, forward and backward; the first are compared with eager."""
    pytest.importorskip("xrt_onnxruntime")

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.read, self.write = nn.Linear(8, 24), nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            q, k, v = self.read(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            return self.write(y) + torch.arange(x.shape[1], dtype=x.dtype)[:, None] * x.shape[0]

    model = Attention()
    eager = copy.deepcopy(model)
    options = {"engine": "onnxruntime", "guard_verify": False, "background": True}
    call = torch.compile(model, backend=backend, dynamic=True, options=options)
    for n in range(3, 12):
        x = torch.randn(n % 3 + 2, n, 8)
        for m, f in ((model, call), (eager, eager)):
            m.zero_grad()
            f(x).square().mean().backward()
        for p, q in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)
        assert xrt_torch.wait(60)
    graphs = xrt_torch.graphs(model)
    assert [g.kind for g in graphs] == ["forward", "backward"]
    for g in graphs:
        assert g.reason is None
        assert len(g._work) == 1
        assert len(g._stages.proven) >= 7  # one call was compared as a whole


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_padding_is_one_operator_where_sizes_vary(mode: str) -> None:
    """Of an engine, with what is around it; what cuts something off is right as well."""

    def f(x: Any) -> Any:
        return nn.functional.pad(x.exp(), (2, 1, 1, 2), mode=mode) * 2

    options = {"engine": "onnxruntime", "guard_verify": False}
    call = torch.compile(f, backend=backend, dynamic=True, options=options)
    for n in (5, 8, 6, 7):
        x = torch.randn(2, 3, n, n + 2)
        torch.testing.assert_close(call(x), f(x))
        assert xrt_torch.wait(60)
    (graph,) = xrt_torch.graphs()
    (stage,) = graph._stages or ()
    assert [c.node_count for c in stage.module.explain().report.clusters] == [stage.module.explain().node_count]
    if mode == "replicate":
        x = torch.randn(2, 3, 6)
        cut = torch.compile(lambda v: nn.functional.pad(v, (-1, 2), mode=mode), backend=backend, options=HOST)
        for _ in range(2):
            torch.testing.assert_close(cut(x), nn.functional.pad(x, (-1, 2), mode=mode))


@pytest.mark.parametrize("said", [None, False])
def test_engines_are_told_that_torch_computes_with_threads_too(said: bool | None) -> None:
    """Threads of theirs that spin after a call keep a core from torch's next operator; who knows better says so."""
    options = {**HOST, **({} if said is None else {"release_cores": said})}
    call = torch.compile(lambda x: x.exp() * 2, backend=backend, options=options)
    call(torch.ones(3))
    (stage,) = xrt_torch.graphs()[0]._stages or ()
    assert stage.module.options.release_cores == (said is None)


def _spectrogram(x: Any) -> Any:
    return torch.stft(x, 16, 8, window=torch.hann_window(16), return_complex=True).abs()


def _rotated(x: Any) -> Any:
    """Rotary positions as complex numbers."""
    angles = torch.arange(x.shape[1])[:, None] * 0.5 ** torch.arange(4.0)
    turned = torch.view_as_complex(x.reshape(*x.shape[:2], 4, 2)) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).flatten(2)


@pytest.mark.parametrize(
    ("function", "shape", "left"),
    [
        (_spectrogram, lambda n: (2, 20 + 3 * n), 0),
        (_rotated, lambda n: (2, n, 8), 0),
        (lambda x: torch.fft.fft(x).real, lambda n: (3, n), 1),  # the length of a transform varies: torch's
    ],
    ids=["spectrogram", "rotary positions", "transform"],
)
def test_complex_numbers_where_sizes_vary(function: Any, shape: Any, left: int) -> None:
    """By their parts, with gradients; forward in one plan for all sizes."""
    options = {"engine": "onnxruntime", "guard_verify": False, "background": True}
    call = torch.compile(function, backend=backend, dynamic=True, options=options)
    for n in (9, 12, 7, 15, 10):
        x, y = (torch.linspace(-1, 3, math.prod(shape(n))).reshape(shape(n)).requires_grad_() for _ in range(2))
        got, want = call(x), function(y)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        got.square().mean().backward()
        want.square().mean().backward()
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-5)
        assert xrt_torch.wait(60)
    forward, backward = xrt_torch.graphs()
    if torch.__version__ < "2.13":  # complex numbers are torch's there
        return
    for g in (forward, backward):
        assert g.reason is None
        assert len([why for why in g.eager_nodes.values() if AT_BORDER not in why]) == left, g.eager_nodes
    assert len(forward._work) == 1


def test_sizes_without_a_plan_run_in_eager_until_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no plan serves all sizes, each is compiled, and compared, for itself."""
    monkeypatch.setattr(Stage, "shapes", dict)
    monkeypatch.setattr(XRTModule, "is_prepared", lambda self, inputs: False)
    call = torch.compile(lambda x: x.sin() * x.shape[0], backend=backend, dynamic=True, options={"engine": "host"})
    for n in (3, 4, 5, 3, 4, 5, 3):
        x = torch.randn(n)
        torch.testing.assert_close(call(x), x.sin() * n)
        assert xrt_torch.wait(60)
    (graph,) = xrt_torch.graphs()
    assert graph.reason is None
    assert len(graph._work) == len(graph._stages.proven) == 3


def test_the_quicker_side_answers_where_sizes_vary() -> None:
    """By what an element takes, so that the sizes that each side happens to get do not matter."""
    seen: list[str] = []

    def side(name: str, seconds: float) -> Any:
        def call(n: Any, x: Any) -> tuple[Any]:
            seen.append(name)
            time.sleep(seconds * x.numel())
            return (x * 2,)

        return call

    made = torch.compile(torch.sin, backend=backend, dynamic=True, options=HOST)
    for n in (3, 4, 5, 6):
        made(torch.ones(n))
    graphs = xrt_torch.graphs()
    assert graphs[0].is_dynamic
    own = side("xrt", 2e-4)
    answers = Choice(side("eager", 1e-3), lambda: own, graphs, race=True)
    answers.answer(4, torch.ones(4))
    seen.clear()
    for i in range(20):  # XRT, in the turns of five calls that are its own, gets the large ones
        answers.answer(4, torch.ones(9 if i // 5 % 2 == 0 else 3))
    assert seen == (["xrt"] * 5 + ["eager"] * 5) * 2
    seen.clear()
    for _ in range(3):
        answers.answer(4, torch.ones(4))
    assert seen == ["xrt"] * 3


def test_calls_that_are_compared_are_no_timings() -> None:
    """Both sides run in them, so that XRT would seem slower than it is."""
    made = torch.compile(torch.sin, backend=backend, dynamic=True, options=HOST)
    for n in (3, 4, 5, 6):
        made(torch.ones(n))
    (graph,) = graphs = xrt_torch.graphs()
    seen: list[str] = []

    def side(name: str, seconds: float) -> Any:
        def call(n: Any, x: Any) -> tuple[Any]:
            seen.append(name)
            compared = name == "xrt" and seen.count(name) < 10
            graph.comparisons += compared
            time.sleep(0.05 if compared else seconds)
            return (x * 2,)

        return call

    own = side("xrt", 1e-3)
    answers = Choice(side("eager", 1e-2), lambda: own, graphs, race=True)
    for _ in range(40):
        answers.answer(4, torch.ones(4))
    assert set(seen[-5:]) == {"xrt"}


def test_what_decides_for_good_is_timed_when_xrt_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timings beside a compilation say little; but where that does not end, they are taken."""
    made = torch.compile(torch.sin, backend=backend, dynamic=True, options=HOST)
    for n in (3, 4, 5, 6):
        made(torch.ones(n))
    graphs, seen = xrt_torch.graphs(), []
    answers = Choice(
        lambda n, x: seen.append("eager") or (x,), lambda: lambda n, x: seen.append("xrt") or (x,), graphs, race=True
    )
    release = threading.Event()
    work = background.compiler.submit(release.wait)
    try:
        for _ in range(40):
            answers.answer(4, torch.ones(4))
        assert set(seen[1:]) == {"eager"}
        monkeypatch.setattr(choice, "_BUSY_SECONDS", 0.0)
        for _ in range(6):
            answers.answer(4, torch.ones(4))
        assert set(seen[-6:]) == {"eager", "xrt"}
        monkeypatch.undo()
    finally:
        release.set()
    work.result()
    while background.is_busy():
        time.sleep(0.01)
    seen.clear()
    for _ in range(6):
        answers.answer(4, torch.ones(4))
    assert set(seen) == {"eager", "xrt"}


def test_threads_beside_a_compilation() -> None:
    """While XRT works there are more OpenMP threads than processors, so that none spins, and turns at the interpreter
    are short; afterwards both are as before, and none of its threads lives, which would slow eager's operators down."""

    def state() -> tuple[bool, float]:
        return any(t.name == "xrt-torch-team" for t in threading.enumerate()), sys.getswitchinterval()

    usual, begun, release = sys.getswitchinterval(), threading.Event(), threading.Event()
    jobs = [background.compiler.submit(lambda: begun.set() or release.wait()), background.tuner.submit(release.wait)]
    begun.wait()
    assert state() == (True, pytest.approx(2e-4))
    release.set()
    for j in jobs:
        j.result()

    def ours() -> list[str]:  # a thread that has run an operator has a team for as long as it lives
        return [t.name for t in threading.enumerate() if t.name.startswith("xrt-torch")]

    until = time.monotonic() + 30
    while (state() != (False, usual) or ours()) and time.monotonic() < until:
        time.sleep(0.01)
    assert state() == (False, usual)
    assert not ours()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no process forks here")
def test_a_forked_process_compiles_as_well() -> None:
    """The threads that do so are the parent's; what it has begun is not begun in the child."""
    script = (
        "import os, threading, warnings\nfrom xrt_torch import background\nwarnings.simplefilter('ignore')\n"
        "release = threading.Event()\nwork = background.compiler.submit(release.wait)\nassert background.is_busy()\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    assert not background.is_busy()\n"
        "    background.compiler.submit(int).result(30)\n"
        "    os._exit(7)\n"
        "release.set()\nassert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_a_process_that_ends_as_work_begins() -> None:
    """The thread that holds a team of OpenMP's is in an operator then, and none is when the interpreter ends."""
    script = "from xrt_torch import background\nbackground.compiler.submit(int)\n"
    for _ in range(3):  # with a thread that is a daemon every second one aborted
        subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_a_first_call_that_is_eagers() -> None:
    """`xrt_torch.compile` captures nothing in the first call, hooks of the module run once in each, the second call is
    compiled, and a copy of the module is as that of any compiled one; functions are taken as well."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4)
    called = []
    model.register_forward_hook(lambda *_: called.append(1))
    made = xrt_torch.compile(model, options=HOST, fullgraph=True)
    assert isinstance(made, torch._dynamo.OptimizedModule)
    function = xrt_torch.compile(torch.nn.functional.silu, options=HOST)
    assert function.__name__ == "silu"
    for k in range(3):
        y = made(x)
        y.sum().backward()
        torch.testing.assert_close(y, model[1](model[0](x)))
        assert len(called) == k + 1
        assert {g.kind for g in xrt_torch.graphs()} == ({"forward", "backward"} if k else set())
    torch.testing.assert_close(copy.deepcopy(made)(x), y)
    before = len(xrt_torch.graphs())
    for k in range(3):
        torch.testing.assert_close(function(x), nn.functional.silu(x))
        assert (len(xrt_torch.graphs()) > before) == (k > 0)


@pytest.mark.parametrize("options", [{}, {"guard_verify": False}])
def test_equal_elements_in_the_order_that_torch_chooses(options: dict[str, Any]) -> None:
    """Where results differ for it, torch runs the operators that choose, and XRT all others."""

    def largest(x: Any) -> Any:
        values, places = (x - 1).relu().topk(6)
        return values * 2, places + 1

    call = on_xrt(largest, **options)
    for _ in range(6):
        x = torch.rand(3, 40) + 0.05
        for a, b in zip(call(x), largest(x), strict=True):
            torch.testing.assert_close(a, b)
    (graph,) = xrt_torch.graphs()
    assert graph.reason is None
    assert graph.is_proven
    assert list(graph.eager_nodes.values()) == ["aten.topk.default: torch chooses the order of equal elements"]


@pytest.mark.parametrize("training", [True, False])
def test_a_wrong_engine_is_looked_for(monkeypatch: pytest.MonkeyPatch, training: bool) -> None:
    """Graphs are compiled without the guard's reference; if they differ from eager, with it."""
    made: list[dict[str, Any]] = []
    init = xrt.XRTModule.__init__

    def noted(self: Any, model: Any, **options: Any) -> None:
        made.append(options)
        init(self, model, **{**options, "guard": False, "engine": "host"})

    monkeypatch.setattr(compiled.xrt.XRTModule, "__init__", noted)
    run = compiled.CompiledGraph._on_xrt

    def wrong(self: Any, args: Any, stages: Any = None) -> Any:
        results = run(self, args, stages)
        return [r if r is None else r + 1 for r in results] if self._is_quick else results

    monkeypatch.setattr(compiled.CompiledGraph, "_on_xrt", wrong)
    model, x = nn.Linear(4, 2), torch.randn(3, 4)
    call = torch.compile(model, backend=backend, options={"background": False})
    for _ in range(4):
        with torch.set_grad_enabled(training):
            y = call(x)
            torch.testing.assert_close(y, nn.functional.linear(x, model.weight, model.bias))
        if training:
            y.sum().backward()
    graphs = 2 if training else 1
    assert [o.get("guard_verify") for o in made].count(False) == graphs
    assert [o.get("guard_verify") for o in made].count(None) == graphs
    assert all(g.reason is None for g in xrt_torch.graphs(model))


@pytest.mark.parametrize("is_right", [True, False])
def test_the_fastest_engine_follows_the_first(monkeypatch: pytest.MonkeyPatch, is_right: bool) -> None:
    """The first engine answers while all are timed; what was fastest takes its place if its results are eager's."""
    monkeypatch.setenv("XRT_GUARD", "1")
    made: list[tuple[Any, dict[str, Any]]] = []
    init, run = xrt.XRTModule.__init__, compiled.CompiledGraph._on_xrt

    def noted(self: Any, model: Any, **options: Any) -> None:
        made.append((self, options))
        init(self, model, **{**options, "guard": False, "engine": "host"})

    def perhaps_wrong(self: Any, args: Any, stages: Any = None) -> Any:
        results = run(self, args, stages)
        return results if is_right or stages in (None, self._stages) else [r + 1 for r in results]

    monkeypatch.setattr(compiled.xrt.XRTModule, "__init__", noted)
    monkeypatch.setattr(compiled.CompiledGraph, "_on_xrt", perhaps_wrong)
    monkeypatch.setattr(compiled.CompiledGraph, "release", lambda self: None)  # where eager is the quicker side
    model, x = nn.Linear(4, 2), torch.randn(3, 4)
    call = torch.compile(model, backend=backend, options={"freeze": False})  # constants would be tried, by the clock
    with torch.no_grad():
        for _ in range(60):
            torch.testing.assert_close(call(x), nn.functional.linear(x, model.weight, model.bias))
            assert xrt_torch.wait(60)
            if any(g.is_settled for g in xrt_torch.graphs()):
                break
    (graph,) = xrt_torch.graphs()
    assert graph.is_settled
    assert graph.reason is None
    assert [o.get("engine") for _, o in made] == [None, "auto"]
    assert [o["guard_verify"] for _, o in made] == [False, False]
    assert graph._stages is not None
    assert graph._stages[0].module is made[is_right][0]


@pytest.mark.parametrize("engine", [None, "onnxruntime"])
def test_where_results_differ_the_guard_verifies(monkeypatch: pytest.MonkeyPatch, engine: str | None) -> None:
    """Until then they are compared with eager alone, whoever named the engine: inputs of a graph of training are all
    parameters, of which the guard's verification would make several sets."""
    monkeypatch.setenv("XRT_GUARD", "1")
    made: list[dict[str, Any]] = []
    init, run = xrt.XRTModule.__init__, compiled.CompiledGraph._on_xrt

    def noted(self: Any, model: Any, **options: Any) -> None:
        made.append(options)
        init(self, model, **{**options, "guard": False, "engine": "host"})

    def wrong_at_first(self: Any, args: Any, stages: Any = None) -> Any:
        results = run(self, args, stages)
        return results if len(made) > 1 else [r + 1 for r in results]

    monkeypatch.setattr(compiled.xrt.XRTModule, "__init__", noted)
    monkeypatch.setattr(compiled.CompiledGraph, "_on_xrt", wrong_at_first)
    x, call = (
        torch.randn(3, 4),
        torch.compile(lambda x: x.sin() * 2, backend=backend, options={"engine": engine, "background": False}),
    )
    for _ in range(4):
        torch.testing.assert_close(call(x), x.sin() * 2)
    assert ["guard_verify" in o for o in made] == [True, False]
    (graph,) = xrt_torch.graphs()
    assert graph.reason is None


def test_a_program_ends_while_something_is_compiled() -> None:
    """It does not wait for engines that nobody will call."""
    script = (
        "import time, torch, xrt_torch, xrt_core\n"
        "xrt_core.XRTModule.wait = lambda self, timeout=600: time.sleep(timeout)\n"
        "f = torch.compile(lambda x: x.sin() + 1, backend='xrt', options={'engine': 'host', 'background': True})\n"
        "for _ in range(3):\n    f(torch.ones(3))\n"
        "while not any(g._stages for g in xrt_torch.graphs()):\n    time.sleep(0.1)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not done.stderr


def test_torchs_structured_log_has_the_graphs(tmp_path: pathlib.Path) -> None:
    """With TORCH_TRACE, tlparse shows what XRT got and made of it."""
    script = (
        "import torch, xrt_torch\nfrom xrt_torch.backend import xrt\n"
        "options = {'engine': 'host', 'background': False}\n"
        "f = torch.compile(lambda x, i: x.sin().index_put((i,), x + 1), backend=xrt, options=options)\n"
        "f(torch.ones(3), torch.arange(3))\n"
    )
    environment = {**os.environ, "TORCH_TRACE": str(tmp_path), "XRT_CACHE_MODE": "off"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for note in ("torchvision", "ambiguous"):  # of torch's exporter and what it uses: nothing to who compiles
        assert note not in done.stderr
    log = "".join(p.read_text() for p in tmp_path.iterdir())
    assert '"name": "xrt_torch_inference_0_graph"' in log
    assert '"name": "xrt_torch_inference_0_explain"' in log
    assert "torch.ops.aten.sin.default" in log


def test_a_pt2_file_is_a_model(tmp_path: pathlib.Path) -> None:
    """XRTModule takes the path; a damaged one is an error that says so, and an archive of another kind no model."""
    model, x = small().eval(), torch.randn(4, 8)
    path = tmp_path / "model.pt2"
    torch.export.save(torch.export.export(model, (x,)), path)
    for given in (path, str(path)):
        torch.testing.assert_close(xrt.XRTModule(given, engine="host")(x), model(x).detach())
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(xrt.ModelLoadError, match="torch.export does not load"):
        xrt.XRTModule(path, engine="host")
    other = tmp_path / "other.zip"
    other.write_bytes(b"PK\3\4" + bytes(40))
    with pytest.raises(xrt.ModelLoadError, match="is not a model"):
        xrt.XRTModule(other, engine="host")


def test_the_command_shows_all_graphs_of_a_script(tmp_path: pathlib.Path) -> None:
    """Forward and backward, of a model that is gone when the script ends; its arguments are the script's own."""
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch\nfrom xrt_torch.backend import xrt\nassert sys.argv[1:] == ['--steps', '3'], sys.argv\n"
        "model = torch.nn.Linear(4, 2)\n"
        "call = torch.compile(model, backend=xrt, options={'engine': 'host', 'background': False})\n"
        "for _ in range(3):\n    call(torch.ones(2, 4)).sum().backward()\n"
        "del model, call\ntorch._dynamo.reset()\n"
    )
    command = [sys.executable, "-c", "import typer; from xrt_torch.command import report\n"
               "app = typer.Typer()\napp.command(context_settings=report.context_settings)(report)\napp()"]  # fmt: skip
    done = subprocess.run([*command, str(script), "--steps", "3"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "torch_forward_0: " in done.stdout
    assert "torch_backward_1: " in done.stdout
    assert done.stdout.count("on XRT in 1 stages") == 2
    file = tmp_path / "graphs.json"
    done = subprocess.run(
        [*command, "--json", str(file), str(script), "--steps", "3"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    forward, backward = json.loads(file.read_text())
    assert (forward["name"], backward["name"]) == ("torch_forward_0", "torch_backward_1")
    assert forward["compiled"]
    assert forward["eager_reason"] is None
    assert forward["stages"][0]["nodes"] >= 1


def test_the_command_needs_a_script(tmp_path: pathlib.Path) -> None:
    from typer import Typer
    from typer.testing import CliRunner
    from xrt_torch.command import report

    app = Typer()
    app.command(context_settings=report.context_settings)(report)  # type: ignore[attr-defined]
    assert CliRunner().invoke(app, [str(tmp_path / "none.py")]).exit_code

def test_a_translation_does_not_disturb_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch notes the node at hand, of interpreters and captures, in one place for all threads. So the background
    interprets a graph between captures: one that begins meanwhile, of whatever backend, ends before, or comes after."""
    insert, begun = translation._fx_passes.insert_type_promotion_nodes, threading.Event()

    def slowly(module: Any) -> None:
        begun.set()
        insert(module)
        for _ in range(40):  # as many nodes as it takes for the capture to come in between
            with traceback.preserve_node_meta(), traceback.set_current_meta(next(iter(module.graph.nodes))):
                time.sleep(0.01)

    monkeypatch.setattr(translation._fx_passes, "insert_type_promotion_nodes", slowly)
    options = {"engine": "host", "background": True}
    first = torch.compile(small(), backend=backend, options=options)
    x = torch.randn(4, 8)
    for _ in range(2):
        first(x).sum().backward()
    assert begun.wait(60)
    other = small()
    second = torch.compile(other, backend="aot_eager")
    torch.testing.assert_close(second(x), other(x))
    second(x).sum().backward()
    assert xrt_torch.wait(60)
    assert all(g.reason is None for g in xrt_torch.graphs())


def test_no_other_thread_runs_while_sources_are_parsed() -> None:
    """Where the collector runs, Python's parser gives another thread's parsing an error, and gets one."""
    run_python("""
        import ast, gc, threading
        import torch, xrt_torch

        parse, collects = ast.parse, []
        def noted(*args, **kwargs):
            if threading.current_thread() is not threading.main_thread():
                collects.append(gc.isenabled())
            return parse(*args, **kwargs)

        ast.parse = noted
        call = torch.compile(torch.nn.functional.gelu, backend="xrt", options={"engine": "host"})
        for _ in range(3):
            call(torch.ones(4))
            xrt_torch.wait(60)
        ast.parse = parse
        assert len(collects) > 100 and not any(collects), (len(collects), sum(collects))
        assert gc.isenabled()
    """)

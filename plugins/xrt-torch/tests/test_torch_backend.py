"""`torch.compile(model, backend="xrt")`: results, gradients and state are those of eager."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

import xrt_torch  # noqa: E402
from xrt_torch import compiled  # noqa: E402
from xrt_torch.backend import xrt as backend  # noqa: E402
from xrt_torch.calls import StageCall  # noqa: E402
from xrt_torch.comparison import Comparison, results_in_double  # noqa: E402

import xrt_core as xrt  # noqa: E402
from xrt_core.events import process_events  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("fresh_graphs")]
HOST = {"engine": "host", "background": False}
nn = torch.nn


def on_xrt(model: Any, **options: Any) -> Any:
    return torch.compile(model, backend=backend, options={**HOST, **options})


def step(model: Any, x: Any, seed: int) -> tuple[Any, list[Any]]:
    torch.manual_seed(seed)
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters()]


def assert_trains_alike(model: Any, x: Any) -> None:
    """Three steps of gradients: compilation and comparison in the first, XRT alone in the others; buffers as well."""
    eager = copy.deepcopy(model)
    made = on_xrt(model)
    for seed in range(3):
        loss, gradients = step(made, x, seed)
        expected, wanted = step(eager, x, seed)
        torch.testing.assert_close(loss, expected)
        for a, b in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    for a, b in zip(model.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(a, b)
    assert {g.kind for g in xrt_torch.graphs(model)} == {"forward", "backward"}
    assert all(g.reason is None for g in xrt_torch.graphs(model)), xrt_torch.explain(model)


def test_training_with_dropout_draws_the_numbers_of_eager() -> None:
    """A seed gives the same loss and gradients as in eager: random operators run in torch, and explain says so."""
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Dropout(0.5), nn.Linear(16, 3))
    assert_trains_alike(model, torch.randn(4, 8))
    assert "random numbers" in xrt_torch.explain(model)


def test_masks_do_not_cut_a_graph() -> None:
    """Random numbers that depend on no data are drawn first; the rest is one stage, however many dropouts there are."""
    model = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(4, 4), nn.Dropout(0.3))])
    assert_trains_alike(model, torch.randn(2, 4))
    assert xrt_torch.explain(model).count("on XRT in 1 stages") == 2


def test_a_convolutional_network_trains_and_its_statistics_are_updated() -> None:
    """Convolution, pooling and BatchNorm: gradients, and the buffers that the forward pass mutates."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 3),
    )
    assert_trains_alike(model, torch.randn(2, 3, 8, 8))


def test_the_gradient_of_a_filter_is_an_operator_that_engines_have_forms_of() -> None:
    """It is one node of XRT's dialect, not a convolution with the images as channels."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.ReLU(), nn.Conv2d(4, 2, 1, bias=False))
    assert_trains_alike(model, torch.randn(2, 3, 8, 8))
    backward = next(g for g in xrt_torch.graphs(model) if g.kind == "backward")
    assert backward.explain().count("ConvFilterGrad") >= 2, backward.explain()


def test_updates_of_an_optimizer_are_seen() -> None:
    """Weights are inputs, never constants: ten steps of Adam end where eager's end."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    other = copy.deepcopy(model)
    x = torch.randn(6, 4)
    for m, call in ((model, on_xrt(model)), (other, other)):
        optimizer = torch.optim.Adam(m.parameters(), 1e-2)
        for _ in range(10):
            optimizer.zero_grad()
            call(x).square().mean().backward()
            optimizer.step()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_views_strides_and_aliases_are_those_of_eager() -> None:
    """Non-contiguous inputs, results that are views of inputs, and inputs that are results."""

    def f(x: Any, y: Any) -> Any:
        return x, x.t()[1:], (x.t() @ y).transpose(0, 1), y.sum(0)

    x, y = torch.randn(6, 4).t().contiguous().t(), torch.randn(12, 5)[::2]
    call = on_xrt(f)
    for _ in range(2):
        for a, b in zip(call(x, y), f(x, y), strict=True):
            torch.testing.assert_close(a, b)
            assert a.stride() == b.stride()
    assert call(x, y)[1].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def shares(results: list[Any], inputs: list[Any]) -> list[list[bool]]:
    """Which results and inputs show the same memory."""
    places = [x.untyped_storage()._cdata for x in (*results, *inputs)]
    return [[a == b for b in places] for a in places]


@pytest.mark.parametrize("dynamic", [False, True])
def test_results_share_memory_as_in_eager(dynamic: bool) -> None:
    """Views of inputs of any size, views of other results, and both where a node between is read by XRT as well."""

    def of_inputs(x: Any) -> Any:
        first, second, *_ = x.split(2)
        return x.unflatten(-1, (2, -1)), x.expand(2, *x.shape), x.diagonal(), second, x.unfold(0, 2, 1), first * 2

    def of_results(x: Any) -> Any:
        y = x * 2
        return y[0], y.t()[1:], y, y.t() @ x, (x * 3).as_strided((2, 2), (1, 1)) + 1

    def of_what_is_no_result(x: Any) -> Any:
        y = (x * 2).t()
        return y[0], y[1:], x[1:].sum()

    x = torch.randn(4, 4).t()
    for f in (of_inputs, of_results, of_what_is_no_result):
        call = torch.compile(f, backend=backend, options=HOST, dynamic=dynamic)
        for x in (torch.randn(4, 4).t(), torch.randn(6, 6).t()):
            expected = list(f(x))
            for _ in range(2):
                found = list(call(x))
                for a, b in zip(found, expected, strict=True):
                    torch.testing.assert_close(a, b)
                    assert a.stride() == b.stride()
                assert shares(found, [x]) == shares(expected, [x])
    assert not [g.reason for g in xrt_torch.graphs() if g.reason]


def test_random_numbers_are_drawn_in_the_order_of_eager() -> None:
    """Whatever stage the draws are in, and however the tensors lie in memory."""

    def f(x: Any) -> Any:
        a = torch.bernoulli((x * 2).sigmoid())
        b = nn.functional.dropout(x.t(), 0.5)
        return a, b, torch.rand_like(x), (x + a).clone().uniform_()

    x, call = torch.randn(8, 6), on_xrt(f)
    for seed in range(3):
        torch.manual_seed(seed)
        expected, state = f(x), torch.get_rng_state()
        torch.manual_seed(seed)
        for a, b in zip(call(x), expected, strict=True):
            torch.testing.assert_close(a, b)
        assert torch.equal(torch.get_rng_state(), state)


def test_numbers_of_python_that_vary() -> None:
    """Floats of sizes, as operands and results; and floats as arguments, for which TorchDynamo begins anew."""

    def f(x: Any, scale: float) -> Any:
        return x * (x.shape[0] / 3) * scale, x.shape[0] / 7

    call = torch.compile(f, backend=backend, options=HOST, dynamic=True)
    for n in (4, 6, 6, 8):
        x = torch.randn(n)
        for found, expected in zip(call(x, n / 10), f(x, n / 10), strict=True):
            torch.testing.assert_close(found, expected)
    assert not [e for e in process_events.recent("fallback") if "RestartAnalysis" in str(e.fields)]
    assert xrt_torch.graphs()
    assert not [g.reason for g in xrt_torch.graphs() if g.reason]


def test_what_comes_of_fewer_digits_is_compared_by_them() -> None:
    """A float64 of a sum in float32 is as far from eager's as that sum may be."""

    def f(x: Any) -> Any:
        return x.sin().cumsum(-1).double() / 3

    x, call = torch.randn(2, 10_000), on_xrt(f)
    for _ in range(2):
        torch.testing.assert_close(call(x), f(x), rtol=1e-3, atol=1e-3)
    (graph,) = xrt_torch.graphs()
    assert graph.reason is None


def test_an_input_that_is_written_is_written() -> None:
    """In-place operators on inputs have their effect, once per call."""

    def f(x: Any) -> Any:
        x.add_(1)
        return x * 2

    x = torch.zeros(3)
    call = on_xrt(f)
    assert [call(x)[0].item() for _ in range(3)] == [2, 4, 6]


def test_sizes_as_inputs() -> None:
    """dynamic=True: one graph for several sizes, each compared with eager before XRT answers."""
    call = torch.compile(lambda x: (x.reshape(-1, 2) * x.shape[0]).sum(0), backend=backend, options=HOST, dynamic=True)
    for n in (4, 6, 8, 4, 6, 8):
        x = torch.randn(n, 2)
        torch.testing.assert_close(call(x), x.sum(0) * n)
    assert len(xrt_torch.graphs()) == 1


@pytest.mark.parametrize("made", [torch.optim.AdamW, torch.optim.SGD], ids=lambda c: c.__name__)
def test_a_step_of_an_optimizer(made: Any) -> None:
    """As a graph of its own, all of it XRT's: parameters and the optimizer's state are written as eager writes them."""
    options = {"lr": 0.1, "momentum": 0.9} if made is torch.optim.SGD else {"lr": 0.1}
    weights = [torch.randn(3, 4), torch.randn(4)]
    sides = [[w.clone().requires_grad_() for w in weights] for _ in range(2)]
    optimizers = [made(s, foreach=True, **options) for s in sides]
    compiled_step = torch.compile(optimizers[0].step, backend=backend, options=HOST)
    for turn in range(5):
        for side, step in zip(sides, (compiled_step, optimizers[1].step), strict=True):
            for p in side:
                p.grad = torch.full_like(p, turn - 1.5)
            step()
        for a, b in zip(*sides, strict=True):
            torch.testing.assert_close(a, b)
    assert not [n for g in xrt_torch.graphs() for n in g.eager_nodes]


def test_an_operator_without_translation_runs_in_torch() -> None:
    """The rest of the graph is XRT's, and explain names the operator with the reason."""

    def f(x: Any) -> Any:
        return torch.linalg.svdvals(x @ x.t() + 1) * 2

    x, call = torch.randn(3, 3), on_xrt(f)
    for _ in range(2):
        torch.testing.assert_close(call(x), f(x), rtol=1e-4, atol=1e-4)
    (graph,) = xrt_torch.graphs()
    assert graph.reason is None
    assert any("linalg_svd" in why and "torchlib has no translation" in why for why in graph.eager_nodes.values())
    assert "in 2 stages" in xrt_torch.explain()


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_what_fails_ends_in_eager(events: list[Any], kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure while XRT compiles or runs, in `loss.backward()` too: eager's gradients, one event, and the reason."""
    run = compiled.CompiledGraph._on_xrt

    def dies(self: Any, *given: Any) -> Any:
        if self.kind == kind:
            raise MemoryError("none left")
        return run(self, *given)

    monkeypatch.setattr(compiled.CompiledGraph, "_on_xrt", dies)
    model = nn.Linear(4, 2)
    eager, x = copy.deepcopy(model), torch.randn(3, 4)
    made = on_xrt(model)
    for seed in range(2):
        for a, b in zip(step(made, x, seed)[1], step(eager, x, seed)[1], strict=True):
            torch.testing.assert_close(a, b)
    (failed,) = [e for e in events if e.name == "fallback"]
    assert (failed.kind, failed.stage) == ("memory", "run")
    assert "none left" in xrt_torch.explain(model)


def test_wrong_numbers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first results are compared with eager's; a graph that differs stays eager."""
    run = compiled.CompiledGraph._on_xrt
    wrong = lambda self, *given: [r + 0.1 for r in run(self, *given)]  # noqa: E731
    monkeypatch.setattr(compiled.CompiledGraph, "_on_xrt", wrong)
    x, call = torch.randn(5), on_xrt(torch.sin)
    for _ in range(2):
        torch.testing.assert_close(call(x), x.sin())
    assert "differs by up to 0.1" in xrt_torch.explain()


@pytest.mark.parametrize(("error", "is_right"), [(1e-7, True), (1e-5, False), (torch.nan, False)])
def test_results_that_are_rounding_errors(monkeypatch: pytest.MonkeyPatch, error: float, is_right: bool) -> None:
    """Zero in mathematics: XRT's are right if they are about as near to it as eager's, whatever digits they have."""
    run = compiled.CompiledGraph._on_xrt
    monkeypatch.setattr(compiled.CompiledGraph, "_on_xrt", lambda self, *given: [r + error for r in run(self, *given)])
    x, call = torch.randn(64, 100), on_xrt(lambda v: v.softmax(-1).sum(-1) - 1)
    for _ in range(4):
        call(x)
    (graph,) = xrt_torch.graphs()
    assert (graph.reason is None) is is_right
    assert graph.is_proven is is_right


@pytest.mark.parametrize("drops", [False, True])
def test_choices_that_rounding_makes(drops: bool) -> None:
    """Where two sums are the same in mathematics, rounding decides which is the larger: XRT's integers are right
    if they differ from eager's about as often as eager's own do, once arguments are off by rounding."""
    x, gap = torch.randn(4096, 300), torch.linspace(-2e-4, 2e-4, 4096)

    def choice(v: Any) -> Any:
        v = torch.nn.functional.dropout(v, 0.1) if drops else v
        return torch.stack([v.sum(-1), v.flip(-1).sum(-1) + gap], -1).argmax(-1)

    call = on_xrt(choice)
    for _ in range(4):
        call(x)
    (graph,) = xrt_torch.graphs()
    assert graph.reason is None
    assert graph.is_proven


def test_choices_that_rounding_does_not_make(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 4096 rows has the smaller of its two numbers, which are not near each other."""
    run = compiled.CompiledGraph._on_xrt

    def wrong(self: Any, *given: Any) -> Any:
        (made,) = run(self, *given)
        made[-1] = 1 - made[-1]
        return [made]

    monkeypatch.setattr(compiled.CompiledGraph, "_on_xrt", wrong)
    x, call = torch.randn(4096, 2), on_xrt(lambda v: (v * 3).argmax(-1))
    for _ in range(4):
        assert torch.equal(call(x), x.argmax(-1))
    (graph,) = xrt_torch.graphs()
    assert graph.reason is not None


def test_a_graph_in_double() -> None:
    """Types in arguments, constants and inputs are all double ones; what draws random numbers is refused, and what
    is a user's."""
    aten, graph = torch.ops.aten, torch.fx.Graph()
    x = graph.placeholder("x")
    half = graph.call_function(aten._to_copy.default, (x,), {"dtype": torch.float16})
    third = graph.call_function(aten.mul.Tensor, (half, graph.get_attr("third")))
    graph.output((third, graph.call_function(aten.argmax.default, (third,))))
    module = torch.fx.GraphModule({"third": torch.tensor(1 / 3, dtype=torch.float64)}, graph)
    made, place = results_in_double(module, [torch.tensor([0.1, 0.7])])
    assert torch.equal(made, torch.tensor([0.1, 0.7]).double() / 3)
    assert place.dtype is torch.int64
    with pytest.raises(xrt.UnsupportedError, match="bernoulli"):
        results_in_double(torch.fx.symbolic_trace(lambda v: (aten.bernoulli.p(v, 0.5),)), [torch.ones(2)])
    with torch.library._scoped_library("comparison_test", "DEF") as library:
        library.define("half(Tensor x) -> Tensor")
        of_a_user = torch.fx.symbolic_trace(lambda v: (torch.ops.comparison_test.half.default(v),))
        with pytest.raises(xrt.UnsupportedError, match="may not take float64"):
            results_in_double(of_a_user, [torch.ones(2)])


@pytest.mark.parametrize(
    ("found", "expected", "is_wrong"),
    [
        ([1.0, 2.0], [1.0, 2.0005], False), ([1.0, 2.0], [1.0, 2.1], True), ([torch.nan], [torch.nan], False),
        ([0.0, 0.0], [8e-40, 1e-39], False), ([0.0], [1e-36], True), ([torch.inf], [-torch.inf], True),
    ],
)  # fmt: skip
def test_what_counts_as_wrong(found: list[float], expected: list[float], is_wrong: bool) -> None:
    """Relative to the largest number; what is below the least normal one may be 0."""
    comparison = Comparison(torch.fx.symbolic_trace(lambda v: (v.sin(),)).graph)
    a, b = [torch.tensor(found)], [torch.tensor(expected)]
    assert bool(comparison.wrong(a, b)) is is_wrong
    assert comparison.are_as_good(a, b, [t.double() for t in b]) is not is_wrong


def test_what_is_compiled_in_the_background_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph of one stage is compiled without a call, which would be answered by the host; XRT has it then."""
    monkeypatch.setattr(StageCall, "__call__", None)
    call = torch.compile(lambda v: v.cos() * 2, backend=backend, options={"engine": "host", "background": True})
    x = torch.randn(5)
    for _ in range(2):
        torch.testing.assert_close(call(x), x.cos() * 2)
    assert xrt_torch.wait(60)
    (graph,) = xrt_torch.graphs()
    assert graph.reason is None
    monkeypatch.undo()
    for _ in range(2):
        torch.testing.assert_close(call(x), x.cos() * 2)
    assert graph.is_proven


def test_random_numbers_are_left_alone_by_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled in the background neither draws nor sets a state, which would undo the draws of who calls."""

    def f(x: Any) -> Any:
        return (torch.rand_like(x * 2) + torch.nn.functional.dropout(x)) * torch.multinomial(x.abs() + 1, 3).sum()

    call = torch.compile(f, backend=backend, options={"engine": "host", "background": True})
    x = torch.randn(5)
    call(x)
    call(x)
    touched = []
    for name in ("set_rng_state", "get_rng_state"):
        monkeypatch.setattr(torch, name, lambda *_, name=name: touched.append(name))
    assert xrt_torch.wait(60)
    monkeypatch.undo()
    (graph,) = xrt_torch.graphs()
    assert (graph.reason, touched) == (None, [])
    for seed in range(2):
        torch.manual_seed(seed)
        expected = f(x)
        torch.manual_seed(seed)
        torch.testing.assert_close(call(x), expected)
    assert graph.is_proven


def test_calls_run_eager_while_xrt_compiles() -> None:
    """In the background: the first calls are eager's and right, and XRT answers once it is ready."""
    call = torch.compile(torch.cos, backend=backend, options={"engine": "host", "background": True})
    x = torch.randn(5)
    for _ in range(2):  # the second one has the graph captured
        torch.testing.assert_close(call(x), x.cos())
    assert xrt_torch.wait(60)
    torch.testing.assert_close(call(x), x.cos())
    (graph,) = xrt_torch.graphs()
    assert graph._stages.proven
    torch.testing.assert_close(call(x), x.cos())


def test_an_unknown_option_names_the_known() -> None:
    """Options are XRTModule's; a misspelt one is an error that names the right one."""
    with pytest.raises(Exception, match="engine"):
        torch.compile(torch.sin, backend=backend, options={"engin": "host"})(torch.ones(2))
    with pytest.raises(Exception, match="it takes True or False"):
        torch.compile(torch.sin, backend=backend, options={"background": 3})(torch.ones(2))


def test_graphs_are_freed() -> None:
    """`torch._dynamo.reset()` leaves no compiled graph behind."""
    on_xrt(torch.sin)(torch.ones(2))
    assert xrt_torch.graphs()
    torch._dynamo.reset()
    until = time.monotonic() + 30
    while xrt_torch.graphs() and time.monotonic() < until:  # the thread that compiled may hold it a little longer
        gc.collect()
        time.sleep(0.01)
    assert not xrt_torch.graphs()


CASES = {
    "convolution": (
        lambda x, w: nn.functional.conv2d(x, w, stride=2, padding=1, groups=2),
        [(2, 4, 7, 6), (6, 2, 3, 3)],
    ),
    "dilated": (lambda x, w: nn.functional.conv1d(x, w, dilation=2, padding=2), [(2, 3, 9), (4, 3, 3)]),
    "transposed": (
        lambda x, w: nn.functional.conv_transpose2d(x, w, stride=2, padding=1, output_padding=1, groups=2),
        [(2, 4, 4, 5), (4, 3, 3, 3)],
    ),
    "transposed, beyond its windows": (
        lambda x, w: nn.functional.conv_transpose2d(x, w, padding=1, output_padding=(1, 0), dilation=2),
        [(2, 4, 3, 5), (4, 3, 3, 2)],
    ),
    "three dimensions": (lambda x, w: nn.functional.conv3d(x, w, stride=(1, 2, 1)), [(2, 2, 3, 5, 4), (3, 2, 2, 2, 3)]),
    "max pool": (lambda x: nn.functional.max_pool2d(x, 3, 2, 1), [(2, 3, 7, 8)]),
    "avg pool": (lambda x: nn.functional.avg_pool2d(x, 3, 2, 1), [(2, 3, 7, 8)]),
    "adaptive pool": (lambda x: nn.functional.adaptive_avg_pool2d(x, (2, 4)), [(2, 3, 6, 8)]),
    "layer norm": (lambda x, w, b: nn.functional.layer_norm(x, (5,), w, b), [(3, 5), (5,), (5,)]),
    "group norm": (lambda x, w, b: nn.functional.group_norm(x, 2, w, b), [(2, 4, 3), (4,), (4,)]),
    "embedding": (lambda w: nn.functional.embedding(torch.tensor([[1, 2, 1]]), w), [(4, 3)]),
    "attention": (
        lambda q, k, v: nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True),
        [(1, 2, 4, 3)] * 3,
    ),
    "var": (lambda x: x.var(1, correction=0).sqrt() + x.var((0, 1)), [(3, 5)]),
    "atan2": (torch.atan2, [(3, 4), (3, 4)]),
    "squeeze": (lambda x: x.squeeze((0, 2)).exp(), [(1, 3, 1, 2)]),
    "cross entropy": (lambda x: nn.functional.cross_entropy(x, torch.tensor([1, 0, 2])), [(3, 4)]),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_in_float64(name: str) -> None:
    """Forward and backward of operators that torchlib lacks in part, against eager in double precision."""
    function, shapes = CASES[name]
    given = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    call = on_xrt(function)
    for _ in range(2):
        results = []
        for f in (call, function):
            y = f(*given)
            weight = torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).reshape(y.shape)
            results.append([y.detach(), *torch.autograd.grad((y * weight).sum(), given)])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    assert {g.kind for g in xrt_torch.graphs()} == {"forward", "backward"}
    for g in xrt_torch.graphs():
        assert g.reason is None, g.explain()


def test_an_exported_program_runs_without_torch(tmp_path: Any) -> None:
    """A module with example arguments and an ExportedProgram are models; a saved one needs no torch."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)).eval()
    x = torch.randn(2, 3, 4, 4)
    for source, example in ((model, (x,)), (torch.export.export(model, (x,)), None)):
        module = xrt.XRTModule(source, example=example, engine="host")
        torch.testing.assert_close(module(x), model(x).detach())
    module.save(tmp_path / "m.xrt")
    y = tmp_path / "x.npy"
    np.save(y, x.numpy())
    script = (
        "import sys; sys.modules['torch'] = None\nimport numpy as np, xrt_core as xrt\n"
        f"print(float(xrt.XRTModule.load({str(tmp_path / 'm.xrt')!r})(np.load({str(y)!r})).sum()))"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert float(ran.stdout) == pytest.approx(model(x).sum().item(), abs=1e-4)
    with pytest.raises(xrt.ModelLoadError, match="give example="):
        xrt.XRTModule(model)


class Accumulating(nn.Module):
    """Results that depend on what earlier calls wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total += x
        return self.total * 2


def test_exported_programs_with_state_are_refused() -> None:
    """The second call's result would be the first one's."""
    with pytest.raises(xrt.ModelLoadError, match="writes the buffer 'total', and its results depend on it"):
        xrt.XRTModule(Accumulating(), example=(torch.ones(3),), engine="host")


def test_writes_of_exported_programs_that_no_caller_sees_are_told() -> None:
    """Into an argument, or into statistics; the program's own buffers are as they were after the comparison."""
    seen = []
    unsubscribe = xrt.subscribe(lambda e: seen.append(e.fields.get("targets")) if "torch" in e.name else None)
    model = Of(lambda x: model.norm(x.mul_(2)), norm=nn.BatchNorm1d(4))
    x = torch.randn(5, 4)
    want = nn.BatchNorm1d(4)(x * 2).detach()
    program = torch.export.export(model, (x,))
    found = xrt.XRTModule(program, engine="host")(x)
    unsubscribe()
    torch.testing.assert_close(torch.as_tensor(found), want)
    assert seen == ["norm.running_mean, norm.running_var, norm.num_batches_tracked, args_0"]
    assert not program.state_dict["norm.running_mean"].any()


@pytest.mark.parametrize("function", [torch.sin, lambda x: torch.cond(x.sum() > 0, torch.sin, torch.neg, (x,))])
def test_a_mistranslated_exported_program_is_refused(function: Any, monkeypatch: Any) -> None:
    """A graph that computes something else than eager does, in a branch as well."""
    import_model = xrt.import_model

    def wrong(translated: Any) -> Any:
        for node in translated.graph.all_nodes():
            node.op_type = "Cos" if node.op_type == "Sin" else node.op_type
        return import_model(translated)

    monkeypatch.setattr(xrt, "import_model", wrong)
    x = torch.rand(4)
    with pytest.raises(xrt.ModelLoadError, match=r"mistranslated: result 0 \(.*\): differs by up to"):
        xrt.XRTModule(Of(function), example=(x,), engine="host")


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: nn.functional.dropout(x, 0.5, True), "it draws random numbers"),
        (lambda x: torch.linalg.inv(x), "eager raises"),
        (lambda x: x.sin(), "the host raises ExecutionError: no kernel"),
    ],
)
def test_what_cannot_be_compared_of_exported_programs_is_told(monkeypatch: Any, function: Any, reason: str) -> None:
    """It is a model all the same."""
    if "kernel" in reason:

        def fails(*_: Any) -> None:
            raise xrt.ExecutionError("no kernel")

        monkeypatch.setattr(xrt.XRTModule, "__call__", fails)
    seen = []
    unsubscribe = xrt.subscribe(lambda e: seen.append(e.fields["reason"]) if e.name == "torch.not_compared" else None)
    xrt.XRTModule(torch.export.export(Of(function), (torch.zeros(2, 2),)), engine="host")
    unsubscribe()
    assert len(seen) == 1
    assert seen[0].startswith(reason)


class Of(nn.Module):
    """A module that computes a function, and holds others."""

    def __init__(self, function: Any, **held: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


EXPORTED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "attention without a batch": (nn.functional.scaled_dot_product_attention, tuple(torch.randn(3, 4) for _ in "qkv")),
    "a whole number as argument": (lambda x, n: x * n, (torch.ones(3), 2)),
    "branches": (
        lambda x: torch.cond(x.sum() > 0, lambda v: v.softmax(0, dtype=torch.float64), lambda v: v.double(), (x,)),
        (torch.tensor([1, 0]),),
    ),
    "clamps of one tensor": (lambda x: (2 ** x.clamp(-3, 3), torch.exp(x.clamp(-5, 5))), (torch.tensor([-4.0, 9.0]),)),
    "float64": (lambda x: x * 0.1 + 1 / 3, (torch.rand(3, dtype=torch.float64),)),
    "factorisations": (
        lambda x: (torch.linalg.inv(x) @ torch.linalg.cholesky(x @ x.mT), torch.linalg.solve(x, x[:, 0])),
        (torch.tensor([[3.0, 1.0], [-1.0, 2.0]]),),
    ),
    "fmax and hypot": (lambda x: torch.fmax(x, torch.hypot(x, x)), (torch.randn(3),)),
    "kthvalue": (lambda x: torch.kthvalue(x, 2), (torch.randn(4, 3),)),
    "no tensor": (lambda x: (x + 1, None, x * 2), (torch.ones(2),)),
    "softmax of integers": (lambda x: x.softmax(0, dtype=torch.float64), (torch.tensor([1, 0]),)),
    "sort": (lambda x: torch.sort(x, dim=0, descending=True, stable=True), (torch.tensor([1, 2, 1, 0]),)),
    "squeeze of what is wider": (lambda x: x.squeeze(0) + 1, (torch.ones(2, 3),)),
    "windows without a batch": (lambda x: nn.functional.unfold(x, 2), (torch.randn(2, 3, 4),)),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPORTED)
def test_exported_programs_compute_what_eager_does(name: str) -> None:
    function, args = EXPORTED[name]
    program = torch.export.export(Of(function), args)
    found = xrt.XRTModule(program, engine="host")(*(x for x in args if isinstance(x, torch.Tensor)))
    expected = function(*args)
    found = found if isinstance(found, tuple) else (found,)
    wanted = tuple(expected) if isinstance(expected, tuple) else (expected,)
    for a, b in zip(found, (w for w in wanted if w is not None), strict=True):
        exact = 1e-13 if b.dtype is torch.float64 else 1e-5
        torch.testing.assert_close(torch.as_tensor(a), b, rtol=exact, atol=exact)


@pytest.mark.parametrize("in_branch", [False, True])
def test_what_torchlib_gets_wrong_is_refused_in_exported_programs(in_branch: bool) -> None:
    """The factors of a determinant of more rows than XRT writes out, in the graph and in a branch."""

    def det(x: Any) -> Any:
        return torch.ops.aten._linalg_det(x)[0] * 2

    def f(x: Any) -> Any:
        return torch.cond(x.sum() > 0, det, lambda v: v.sum(), (x,)) if in_branch else det(x)

    with pytest.raises(xrt.ModelLoadError, match="_linalg_det"):
        xrt.XRTModule(torch.export.export(Of(f), (torch.eye(20),)), engine="host")


def test_an_exported_program_does_not_look_whether_a_matrix_is_singular() -> None:
    """As torch would, with an effect of the program's; other effects are refused."""
    singular = torch.ones(3, 3)
    made = xrt.XRTModule(torch.export.export(Of(torch.linalg.inv), (torch.eye(3),)), engine="host")(singular)
    assert not torch.as_tensor(made).isfinite().any()

    def prints(x: Any) -> Any:
        torch.ops.aten._print("x")
        return x * 2

    with pytest.raises(xrt.ModelLoadError, match="_print.* has an effect"):
        xrt.XRTModule(torch.export.export(Of(prints), (singular,)), engine="host")


def test_statistics_of_an_exported_program_in_training_are_those_of_the_batch() -> None:
    model, x = nn.BatchNorm1d(4), torch.randn(5, 4)
    found = xrt.XRTModule(torch.export.export(model, (x,)), engine="host")(x)
    torch.testing.assert_close(torch.as_tensor(found), nn.BatchNorm1d(4)(x).detach())


def test_exported_programs_keep_what_is_one_operator() -> None:
    """LSTMs stay whole, norms disappear in the weights before them, and inputs keep their names."""
    layers = Of(None, conv=nn.Conv2d(1, 2, 2), norm=nn.BatchNorm2d(2), lstm=nn.LSTM(6, 3, batch_first=True)).eval()
    layers.norm.running_var.uniform_(1, 2)
    layers.function = lambda x: layers.lstm(nn.functional.gelu(layers.norm(layers.conv(x))).flatten(2))[0]
    x = torch.randn(2, 1, 3, 4)
    module = xrt.XRTModule(layers, example=(x,), engine="host")
    torch.testing.assert_close(torch.as_tensor(module(x)), layers(x).detach())
    operators = {n.op_type for n in module.graph.nodes}
    assert {"Conv", "Gelu", "LSTM"} <= operators
    assert "BatchNormalization" not in operators

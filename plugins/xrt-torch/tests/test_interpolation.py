"""`torch.nn.functional.interpolate`: one operator of ONNX, with the results and gradients of eager."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

import xrt_torch  # noqa: E402
from xrt_torch.backend import xrt as backend  # noqa: E402
from xrt_torch.interpolation import WholeInterpolation  # noqa: E402

import xrt_core as xrt  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("fresh_graphs")]
HOST = {"engine": "host", "background": False}
interpolate = torch.nn.functional.interpolate
KINDS = [
    ((5,), {"scale_factor": 2}), ((5, 6), {"size": (10, 18)}), ((3, 4, 2), {"scale_factor": (3, 2.0, 1)}),
    ((5, 6), {"size": (7, 13)}), ((5, 6), {"scale_factor": 0.7, "recompute_scale_factor": True}),
    ((5, 6), {"scale_factor": 2, "mode": "nearest-exact"}),
    ((5,), {"scale_factor": 2.5, "mode": "linear"}), ((3, 4, 2), {"size": 5, "mode": "trilinear"}),
    ((5, 6), {"scale_factor": 1.5, "mode": "bilinear"}), ((5, 6), {"size": (1, 9), "mode": "bilinear"}),
    ((5, 6), {"scale_factor": 1.5, "mode": "bilinear", "align_corners": True}),
    ((5, 6), {"scale_factor": 0.7, "mode": "bicubic"}),
    ((5, 6), {"scale_factor": 2, "mode": "bicubic", "align_corners": True}),
]  # fmt: skip


def _operators(graph: Any) -> set[str]:
    return {n.op_type for stage in graph._stages or () if stage.module for n in stage.module.graph.nodes}


@pytest.mark.parametrize(("sizes", "how"), KINDS, ids=str)
def test_results_and_gradients_are_those_of_eager(sizes: tuple[int, ...], how: dict[str, Any]) -> None:
    """In torch.compile, and as an exported program."""
    x = torch.randn(2, 3, *sizes)
    call = torch.compile(lambda v: interpolate(v, **how) + 1, backend=backend, options=HOST)
    mine, eager = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = interpolate(eager, **how) + 1
    weight = torch.randn_like(expected)
    (expected * weight).sum().backward()
    for _ in range(2):
        mine.grad = None
        made = call(mine)
        (made * weight).sum().backward()
        torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(mine.grad, eager.grad, rtol=1e-5, atol=1e-5)
    forward = next(g for g in xrt_torch.graphs() if g.kind == "forward")
    assert "Resize" in _operators(forward)
    assert not {"Gather", "GatherND"} & _operators(forward)
    backward = next(g for g in xrt_torch.graphs() if g.kind == "backward")
    assert backward.reason is None
    assert not backward.eager_nodes

    class Model(torch.nn.Module):
        def forward(self, v: Any) -> Any:
            return interpolate(v, **how) + 1

    exported = xrt.XRTModule(Model(), example=(x,), engine="host")
    torch.testing.assert_close(torch.as_tensor(exported(x.numpy())), expected.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("to", ["twice", "other", "linear"])
def test_sizes_that_vary_have_one_plan(to: str) -> None:
    """Of an engine, with what is around it: by a whole factor, and to sizes of another tensor, however large."""

    def f(x: Any, y: Any) -> Any:
        if to == "twice":
            return interpolate(x.exp(), scale_factor=2) * 2
        mode = "nearest" if to == "other" else "bilinear"
        return interpolate(x.exp(), size=y.shape[2:], mode=mode) * 2

    options = {"engine": "onnxruntime", "guard_verify": False, "background": False}
    call = torch.compile(f, backend=backend, dynamic=True, options=options)
    wide = 2 if to == "linear" else 400  # torch's float32 places of so many pixels are coarse
    for given, wanted in (((5, 7), (11, 12)), ((6, 4), (5, 9)), ((3, 5 * wide), (4, 10 * wide + 3))):
        x, y = torch.randn(1, 2, *given), torch.randn(1, 1, *wanted)
        for _ in range(2):
            torch.testing.assert_close(call(x, y), f(x, y), rtol=1e-5, atol=1e-5)
    (graph,) = xrt_torch.graphs()
    (stage,) = graph._stages or ()
    assert [c.node_count for c in stage.module.explain().report.clusters] == [stage.module.explain().node_count]


def test_gradients_of_large_images_are_sums_of_torch() -> None:
    """Whole matrices, most of whose elements are zero, would take longer."""
    x = torch.randn(1, 1, 4, 300, requires_grad=True)
    call = torch.compile(lambda v: interpolate(v, size=(8, 700), mode="bilinear") * 2, backend=backend, options=HOST)
    for _ in range(2):
        (made,) = torch.autograd.grad(call(x).sum(), x)
    torch.testing.assert_close(made, torch.autograd.grad(2 * interpolate(x, (8, 700), mode="bilinear").sum(), x)[0])
    backward = next(g for g in xrt_torch.graphs() if g.kind == "backward")
    assert [why for why in backward.eager_nodes.values() if "more quickly" in why]


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_training_where_sizes_vary(mode: str) -> None:
    """To sizes of another tensor, and by a factor: one forward and one backward graph, whose gradients are eager's."""
    conv = torch.nn.Conv2d(3, 3, 3, padding=1)

    def f(x: Any, y: Any) -> Any:
        z = interpolate(conv(x), size=y.shape[2:], mode=mode)
        return (z * y).mean() + interpolate(conv(x), scale_factor=2, mode=mode).square().mean()

    call = torch.compile(f, backend=backend, dynamic=True, options=HOST)
    for n, m in ((5, 11), (7, 9), (8, 20), (12, 13)):
        x, y = torch.randn(2, 3, n, n + 1), torch.randn(2, 3, m, m + 2)
        gradients = []
        for g in (call, f):
            conv.zero_grad()
            g(x, y).backward()
            gradients.append([p.grad.clone() for p in conv.parameters()])
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert [(g.kind, g.reason) for g in xrt_torch.graphs()] == [("forward", None), ("backward", None)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_what_torch_rounds_runs_in_torch(dtype: Any) -> None:
    """Bytes and narrow floats have the results of eager, bit by bit."""
    x = (torch.rand(1, 3, 5, 6) * 200).to(dtype)

    def f(v: Any) -> Any:
        return interpolate(v, size=(7, 13), mode="bilinear")

    call = torch.compile(f, backend=backend, options=HOST)
    for _ in range(2):
        assert torch.equal(call(x), f(x))


def _twice(x: Any) -> Any:
    return interpolate(x, scale_factor=2, mode="bilinear") * 2


TRANSFORMED = {
    "vmap": torch.func.vmap(_twice),
    "gradients of each": torch.func.vmap(torch.func.grad(lambda v: _twice(v).square().sum())),
    "forward": lambda x: torch.func.jvp(_twice, (x[0],), (x[1],))[1],
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transforms_are_those_of_eager(name: str) -> None:
    x, function = torch.randn(3, 2, 4, 5, 6), TRANSFORMED[name]
    call = torch.compile(function, backend=backend, options=HOST)
    for _ in range(2):
        torch.testing.assert_close(call(x), function(x))
    assert [g.reason for g in xrt_torch.graphs()] == [None]


@pytest.mark.parametrize("name", TRANSFORMED)
def test_a_capture_that_fails_within_a_transform_leaves_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call is eager's, and torch does not take the transform for the caller's."""

    def fails(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is interpolate:
            raise RuntimeError("not captured")
        return func(*args, **(kwargs or {}))

    monkeypatch.setattr(WholeInterpolation, "__torch_function__", fails)
    x, function = torch.randn(3, 2, 4, 5, 6), TRANSFORMED[name]
    call = torch.compile(lambda v: function(v) + 0.5, backend=backend, options=HOST)
    for _ in range(2):
        torch.testing.assert_close(call(x), function(x) + 0.5)
    assert xrt_torch.graphs() == []
    assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0

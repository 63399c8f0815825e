"""Graphs on a GPU as far as they can be told without one: tensors that are fake, streams that are stand-ins."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from xrt_torch import devices  # noqa: E402
from xrt_torch.calls import StageCall  # noqa: E402
from xrt_torch.choice import Choice  # noqa: E402
from xrt_torch.compiled import CompiledGraph  # noqa: E402
from xrt_torch.partition import stages_of  # noqa: E402

from xrt_core.errors import UnsupportedError  # noqa: E402

GPU = torch.device("cuda:0")


@pytest.fixture
def mode() -> Any:
    """Tensors of any device, without memory."""
    with FakeTensorMode() as made:
        yield made


class _Streams:
    """A stand-in for `torch.cuda`: what was done, in order."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def current_stream(self, device: Any) -> Any:
        return self

    def record_event(self) -> Any:
        self.done.append("recorded")
        return self

    def wait(self, stream: Any) -> None:
        self.done.append("waited for")

    def synchronize(self, device: Any) -> None:
        self.done.append("finished")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> _Streams:
    """In place of torch's functions of streams."""
    made = _Streams()
    for name in ("current_stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, getattr(made, name))
    return made


def on_gpu(*shape: int) -> Any:
    return torch.ones(shape, device=GPU)


def test_the_device_of_a_graph_is_that_of_its_tensors_on_a_gpu(mode: Any) -> None:
    """Beside the CPU's; two GPUs, and other devices, are refused by their names."""
    assert devices.device_of([torch.ones(2), 3]) == torch.device("cpu")
    assert devices.device_of([torch.ones(2), 3, on_gpu(2), on_gpu()]) == GPU
    with pytest.raises(UnsupportedError, match="cuda:0 and cuda:1"):
        devices.device_of([on_gpu(2), torch.ones(2, device="cuda:1")])
    with pytest.raises(UnsupportedError, match="a tensor on meta"):
        devices.device_of([torch.ones(2, device="meta")])


def test_the_cpu_may_have_a_number(mode: Any) -> None:
    """As torch.device("cpu:0") has, which fake tensors keep."""
    assert devices.device_of([torch.ones(2, device="cpu:0")]) == devices.CPU
    graph = make_fx(lambda: (torch.ones(3, device="cpu:0") + 1,))().graph
    assert [devices.why_elsewhere(n, devices.CPU) for n in graph.nodes] == [None] * len(graph.nodes)


def test_engines_compile_for_the_device_of_the_graph_unless_another_is_asked_for() -> None:
    """The options of XRTModule."""
    assert devices.on_device({"engine": "xla"}, GPU) == {"engine": "xla", "device": "cuda:0"}
    assert devices.on_device({"device": "cpu"}, GPU) == {"device": "cpu"}
    assert devices.on_device({"engine": "xla"}, devices.CPU) == {"engine": "xla"}


def _mixed(x: Any, w: Any, s: Any) -> Any:
    y = ((x @ w) * s).relu()
    return y, y.cpu() + 1


def test_what_lies_elsewhere_is_torchs(mode: Any) -> None:
    """A number of the CPU is an operand of a GPU's operators; tensors that go to the CPU, and what follows, are not."""
    args = on_gpu(4, 8), on_gpu(8, 8), torch.ones(())
    graph = CompiledGraph(make_fx(_mixed)(*args), "inference", {"engine": "host"}, False, set(), device=GPU)
    ran = [r for r in graph._build() if r.module is not None]
    assert [n.target for r in ran for n in r.stage.graph.nodes if n.op == "call_function"] == [
        torch.ops.aten.mm.default, torch.ops.aten.mul.Tensor, torch.ops.aten.relu.default,
    ]  # fmt: skip
    why = graph.eager_nodes
    assert why["_to_copy"].endswith("a tensor on cpu, in a graph on cuda:0"), why
    assert why["add"].endswith("a tensor on cpu, in a graph on cuda:0"), why


def test_a_graph_of_the_cpu_leaves_tensors_on_a_gpu_to_torch(mode: Any) -> None:
    """They would have come back on the CPU."""
    traced = make_fx(lambda x: (torch.ops.aten._to_copy.default(x + 1, device=GPU) * 2,))(torch.ones(3))
    graph = CompiledGraph(traced, "inference", {"engine": "host"}, False, set())
    graph._build()
    assert sorted(graph.eager_nodes) == ["_to_copy", "mul"], graph.eager_nodes


def test_a_graph_that_no_engine_can_compile_for_its_device_is_eager_with_the_reason(mode: Any, streams: Any) -> None:
    """The caller gets eager's results, on the GPU."""
    far = torch.device("cuda:63")  # which no machine has
    args = torch.ones(4, 8, device=far), torch.ones(8, 8, device=far), torch.ones(())
    options = devices.on_device({"engine": "host"}, far)
    graph = CompiledGraph(make_fx(_mixed)(*args), "inference", options, False, set(), device=far)
    first, second = graph(*args)
    assert (first.device, second.device) == (far, devices.CPU)
    assert graph.reason is not None
    assert "cuda:63" in graph.reason


def test_a_device_that_fails_leaves_the_graph_to_eager(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is compiled: no call waits for a compilation that does not come."""

    def broken(device: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "current_stream", broken)
    args = on_gpu(4, 8), on_gpu(8, 8), torch.ones(())
    graph = CompiledGraph(make_fx(_mixed)(*args), "inference", {"engine": "host"}, False, set(), device=GPU)
    for _ in range(2):
        assert graph(*args)[0].device == GPU
    assert graph.reason is not None
    assert "illegal memory access" in graph.reason


def test_only_where_torch_rounds_factors_results_may_be_farther_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN does unless it is told not to; products of matrices are not in TF32 unless they are told to be."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    assert devices.multiplies_in_tf32()
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert not devices.multiplies_in_tf32()


def test_a_background_thread_comes_after_what_the_caller_has_queued(streams: _Streams) -> None:
    """It waits for the caller's stream, not the caller for it; on the CPU there is nothing to wait for."""
    come_after = devices.after_this_thread(GPU)
    assert streams.done == ["recorded"]
    come_after()
    assert streams.done == ["recorded", "waited for"]
    devices.after_this_thread(devices.CPU)()
    devices.finish(devices.CPU)
    assert len(streams.done) == 2


def test_calls_on_a_gpu_are_timed_with_the_gpus_work(streams: _Streams) -> None:
    """A call that only queues work for the GPU is not quick: both ends of what is timed wait for it."""
    order: list[str] = []

    def side(name: str) -> Callable[..., Any]:
        def call(*_: Any) -> list[Any]:
            order.append(f"{name} after {len(streams.done)}")
            return [torch.ones(1)]

        return call

    class Graph:
        reason, is_dynamic, is_compiling, is_proven, is_tuned, name = None, False, False, True, True, "g"
        comparisons = 0

        def timed(self, *_: Any) -> None:
            pass

        def release(self) -> None:
            pass

    answers = Choice(side("eager"), lambda: side("xrt"), [Graph()], race=True, device=GPU)  # type: ignore[list-item]
    until = time.monotonic() + 30
    while answers.answer in (answers._in_turns, answers._while_compiling) and time.monotonic() < until:
        answers.answer(on_cpu := torch.ones(1), on_cpu)
    timed = [o for o in order if not o.endswith(" 0")]
    assert len(timed) >= 6, order
    assert streams.done.count("finished") == len(streams.done) >= 12


def test_tensors_of_a_stage_go_in_and_come_back_on_its_device(mode: Any) -> None:
    """Numbers of the CPU as well, and what is not dense is made so: engines read memory in order."""
    args = on_gpu(8, 4).t(), on_gpu(8, 8), torch.ones(())
    (stage,) = stages_of(make_fx(lambda x, w, s: ((x @ w) * s,))(*args).graph, ())
    given: list[Any] = []

    class Module:
        input_types, output_names = dict.fromkeys(stage.inputs), stage.outputs

        def __call__(self, *arrays: Any) -> Any:
            given.extend(arrays)
            return torch.ones(4, 8)  # of an engine whose results come on the CPU

    (result,) = StageCall(Module(), stage, GPU)(*args)
    assert all(a.device == GPU and a.is_contiguous() for a in given), given
    assert (result.device, result.stride()) == (GPU, (8, 1))


def test_random_numbers_of_a_gpu_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where both sides run, both generators go back."""
    states = {"cuda": 7}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda _: states["cuda"])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, _: states.update(cuda=state))
    state = devices.RandomState(GPU)
    first = torch.rand(2)
    states["cuda"] = 8
    state.restore()
    assert states["cuda"] == 7
    assert torch.equal(first, torch.rand(2))

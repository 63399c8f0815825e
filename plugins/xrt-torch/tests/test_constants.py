"""Parameters and buffers that inference takes as constants by default, and every way in which they may change."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

import xrt_torch  # noqa: E402
from xrt_torch import constants  # noqa: E402
from xrt_torch.backend import xrt as backend  # noqa: E402
from xrt_torch.compiled import CompiledGraph  # noqa: E402

from xrt_core.module import XRTModule  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("fresh_graphs")]
nn = torch.nn


@pytest.fixture
def quicker(monkeypatch: pytest.MonkeyPatch) -> None:
    """With constants a call takes no time, without them a second."""
    monkeypatch.setattr(CompiledGraph, "_timed", lambda self, stages, args: 1.0 if stages.constants is None else 0.0)


def convolutions() -> Any:
    """Four parameters of two layers, and three buffers."""
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()


def settled(model: Any, x: Any, **options: Any) -> Any:
    """The compiled model, after the calls that it takes to be tuned."""
    call = torch.compile(model, backend=backend, options={"engine": "host", "background": True, **options})
    with torch.no_grad():
        for _ in range(5):
            torch.testing.assert_close(call(x), model(x), rtol=1e-4, atol=1e-5)
            assert xrt_torch.wait(60)
    return call


def inputs_of_stages() -> list[int]:
    return [len(r.stage.inputs) for g in xrt_torch.graphs() for r in g._stages or ()]


@pytest.mark.usefixtures("quicker")
def test_parameters_and_buffers_become_constants() -> None:
    """By default, in the background; `explain` and `to_json` tell how many."""
    settled(convolutions(), torch.randn(2, 3, 8, 8))
    assert inputs_of_stages() == [1]
    (graph,) = xrt_torch.graphs()
    assert graph.to_json()["constants"] == 6
    assert "6 parameters and buffers are constants, looked at in each call" in graph.explain()


def _data(model: Any) -> None:
    model[0].weight.data.mul_(2)


def _in_place(model: Any) -> None:
    with torch.no_grad():
        model[0].bias.add_(1)


def _buffer(model: Any) -> None:
    model[1].running_mean.add_(1)


def _numpy(model: Any) -> None:
    model[1].weight.detach().numpy()[2] = 7


def _one_bit(model: Any) -> None:
    model[0].weight.data.view(torch.int32)[0, 0, 0, 0] ^= 1 << 23


def _swapped(model: Any) -> None:
    """The same numbers in another order."""
    model[0].weight.data = model[0].weight.data.flip(0)


def _loaded(model: Any) -> None:
    model.load_state_dict(convolutions().state_dict())


def _assigned(model: Any) -> None:
    model.load_state_dict(convolutions().state_dict(), assign=True)


def _not_a_number(model: Any) -> None:
    model[0].bias.data[1] = torch.nan


@pytest.mark.usefixtures("quicker")
@pytest.mark.parametrize(
    "change", [_data, _in_place, _buffer, _numpy, _one_bit, _swapped, _loaded, _assigned, _not_a_number]
)
def test_every_change_is_seen_by_the_next_call(change: Callable[[Any], None]) -> None:
    """Then they are inputs, for good, without a compilation: what there was before answers again."""
    model, x = convolutions(), torch.randn(2, 3, 8, 8)
    call = settled(model, x)
    assert inputs_of_stages() == [1]
    change(model)
    with torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(call(x), model(x), rtol=1e-4, atol=1e-5, equal_nan=True)
            assert xrt_torch.wait(60)
    if change is not _assigned:  # for which TorchDynamo captures the model again
        assert inputs_of_stages() == [7]
    assert all(g.reason is None for g in xrt_torch.graphs())


@pytest.mark.usefixtures("quicker")
def test_a_change_before_constants_answer() -> None:
    """Between compilation and the first call of what has been compiled."""
    model, x = convolutions(), torch.randn(2, 3, 8, 8)
    call = torch.compile(model, backend=backend, options={"engine": "host", "background": True})
    with torch.no_grad():
        while not any(g._tuned for g in xrt_torch.graphs()):
            torch.testing.assert_close(call(x), model(x), rtol=1e-4, atol=1e-5)
            assert xrt_torch.wait(60)
        model[0].weight.data.mul_(2)
        for _ in range(3):
            torch.testing.assert_close(call(x), model(x), rtol=1e-4, atol=1e-5)
    assert inputs_of_stages() == [7]


@pytest.mark.usefixtures("quicker")
@pytest.mark.parametrize("why", ["asked", "too large", "trains", "looking takes too long"])
def test_what_stays_an_input(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the user says so, where looking at them would take long, and where calls write them."""
    model = convolutions()
    if why == "trains":
        model.train()
    elif why == "too large":
        monkeypatch.setattr(constants, "MOST_BYTES", 100)
    elif why == "looking takes too long":
        monkeypatch.setattr(constants.Constants, "seconds", lambda self: 0.2)
    settled(model, torch.randn(2, 3, 8, 8), **({"freeze": False} if why == "asked" else {}))
    assert inputs_of_stages()[0] >= 5


@pytest.mark.usefixtures("quicker")
@pytest.mark.parametrize("is_early", [True, False])
def test_modules_that_share_a_graph(is_early: bool) -> None:
    """TorchDynamo has one for all modules of a class. is_early: whether they take turns from the first call on, and
    nothing is compiled again; otherwise the second one comes when the first one's parameters are constants."""
    models, x = [convolutions(), convolutions()], torch.randn(2, 3, 8, 8)
    calls = [torch.compile(m, backend=backend, options={"engine": "host", "background": True}) for m in models]
    with torch.no_grad():
        for k in range(8):
            i = k % 2 if is_early else k // 5
            torch.testing.assert_close(calls[i](x), models[i](x), rtol=1e-4, atol=1e-5)
            assert xrt_torch.wait(60)
            if k == 4:
                assert inputs_of_stages() == [7 if is_early else 1]
    (graph,) = xrt_torch.graphs()
    assert graph._tuning is None
    assert inputs_of_stages() == [7]


def test_constants_that_are_not_quicker(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are compiled, timed in turns with what answers, and let go."""
    timed: list[bool] = []
    monkeypatch.setattr(CompiledGraph, "_timed", lambda self, s, args: timed.append(s.constants is None) or 1.0)
    settled(convolutions(), torch.randn(2, 3, 8, 8))
    assert timed == [True] * 3 + [True, False] * 5
    assert inputs_of_stages() == [7]


@pytest.mark.parametrize("tunes", [False, True])
def test_constants_from_the_first_compilation_on(monkeypatch: pytest.MonkeyPatch, tunes: bool) -> None:
    """With freeze=True; a write is seen also when the fastest engine has taken the first one's place."""
    init = XRTModule.__init__
    if tunes:
        monkeypatch.setenv("XRT_GUARD", "1")
        on_host = {"guard": False, "engine": "host"}
        monkeypatch.setattr(XRTModule, "__init__", lambda self, model, **o: init(self, model, **{**o, **on_host}))
        monkeypatch.setattr(CompiledGraph, "release", lambda self: None)  # where eager is the quicker side
    model, x = convolutions(), torch.randn(2, 3, 8, 8)
    call = settled(model, x, engine="auto" if tunes else "host", freeze=True)
    (graph,) = xrt_torch.graphs()
    assert (graph._tuning is not None) is tunes
    stages = graph._tuned or graph._stages
    assert inputs_of_stages() == [1]
    assert stages is not None
    assert stages.constants is not None
    model.load_state_dict(convolutions().state_dict())
    with torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(call(x), model(x), rtol=1e-4, atol=1e-5)
            assert xrt_torch.wait(60)
    assert graph.reason is None


def test_constants_that_do_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller notices nothing, and all engines are tried without."""

    def fails(*_: Any) -> Any:
        raise MemoryError("of a test")

    monkeypatch.setattr(CompiledGraph, "_with_constants", fails)
    compiled_again = CompiledGraph._compiled_again
    tried: list[int] = []
    monkeypatch.setattr(CompiledGraph, "_compiled_again", lambda *a: tried.append(1) or compiled_again(*a))
    settled(convolutions(), torch.randn(2, 3, 8, 8), engine="auto")
    assert tried == [1]
    assert all(g.reason is None for g in xrt_torch.graphs())


@pytest.mark.usefixtures("quicker")
def test_tables_that_are_looked_up_stay_inputs() -> None:
    """Of an embedding a call reads a few rows, and all of it would be looked at."""
    model = nn.Sequential(nn.Embedding(50, 4), nn.Linear(4, 2))
    settled(model, torch.arange(6))
    assert inputs_of_stages() == [2]


@pytest.mark.usefixtures("quicker")
def test_parameters_of_every_layout() -> None:
    """Channels last, narrow floats, and one that is not dense in memory, which stays an input."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
            self.narrow = nn.Parameter(torch.randn(4, 1, 1, dtype=torch.bfloat16))
            self.part = nn.Parameter(torch.randn(4, 2)[:, 0])

        def forward(self, x: Any) -> Any:
            return self.conv(x) * self.narrow.float() + self.part.view(4, 1, 1)

    model, x = Model().eval(), torch.randn(2, 3, 8, 8)
    call = settled(model, x)
    assert inputs_of_stages() == [2]
    for changed in (model.conv.weight, model.narrow, model.part):
        changed.data.add_(1)
        with torch.no_grad():
            torch.testing.assert_close(call(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("quicker")
def test_a_translation_of_another_process_takes_them_too(tmp_path: pathlib.Path) -> None:
    """What is kept on disk has parameters as inputs, so that it is another model's as well."""
    model, x = convolutions(), torch.randn(2, 3, 8, 8)
    for is_kept in (False, True):
        torch._dynamo.reset()
        settled(model, x, cache_dir=str(tmp_path))
        (graph,) = [g for g in xrt_torch.graphs() if not g._is_released][-1:]
        assert (graph._kept is not None) is is_kept
        assert [len(r.stage.inputs) for r in graph._stages or ()] == [1]


def varying(calls: int) -> tuple[Any, Any]:
    """A model and what is compiled of it, for all sizes, on ONNX Runtime, after calls of several."""
    pytest.importorskip("xrt_onnxruntime")
    model = convolutions()
    call = torch.compile(model, backend=backend, dynamic=True, options={"engine": "onnxruntime", "background": True})
    for n in range(10, 10 + calls):
        check(call, model, n)
        assert xrt_torch.wait(60)
    return model, call


def check(call: Any, model: Any, n: int) -> None:
    x = torch.randn(1, 3, n, n + 1)
    with torch.no_grad():
        torch.testing.assert_close(call(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("quicker")
def test_constants_where_sizes_vary(monkeypatch: pytest.MonkeyPatch) -> None:
    """One plan with constants serves large calls, the one without them small ones; a write is seen by both."""
    monkeypatch.setattr(constants.Constants, "share", staticmethod(lambda *seconds: 0.5))
    model, call = varying(8)
    (graph,) = xrt_torch.graphs()
    large, small = graph._stages, graph._without_constants
    assert large.least > 0
    assert [len(s[0].stage.inputs) for s in (large, small)] == [1, 7]
    before = [len(s.proven) for s in (large, small)]
    for n in (4, 30, 5, 31):
        check(call, model, n)
    assert [len(s.proven) for s in (large, small)] == [b + 2 for b in before]
    assert not graph.is_compiling
    model[1].running_mean.data.add_(1)
    for n in (30, 4, 33, 6):
        check(call, model, n)
        assert xrt_torch.wait(60)
    assert graph._stages is small
    assert graph.reason is None


def test_constants_where_sizes_vary_are_not_taken_if_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompiledGraph, "_timed", lambda self, stages, args: 1.0 if stages.constants else 0.5)
    varying(8)
    (graph,) = xrt_torch.graphs()
    assert graph.is_tuned
    assert len(graph._stages[0].stage.inputs) == 7

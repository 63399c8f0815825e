"""Translations that are kept on disk: a second process takes them, and takes no wrong one."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

import xrt_torch  # noqa: E402
from xrt_torch import kept, stages, translation  # noqa: E402
from xrt_torch.backend import xrt as backend  # noqa: E402

from xrt_core.cache.disk import DiskCache  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("fresh_graphs")]
nn = torch.nn


def entries(folder: pathlib.Path) -> list[Any]:
    disk = DiskCache(folder, 1 << 30)
    return [f.path for f in disk.files() if disk.manifest(f.path).info["cluster"] == "a translation of torch"]


def run(
    function: Callable[..., Any],
    folder: pathlib.Path,
    *args: Any,
    background: bool = False,
    engine: str | None = "host",
) -> Any:
    """The results of a call that XRT answers, of a function that is compiled anew, as in another process."""
    torch._dynamo.reset()
    options = {"engine": engine, "background": background, "cache_dir": str(folder)}
    call = torch.compile(function, backend=backend, options=options)
    with torch.no_grad():
        for _ in range(4):
            made = call(*args)
            assert xrt_torch.wait(60)
    return made


def two(x: Any, y: Any) -> Any:
    """Results in another order than they are computed in, and an input between that nothing reads."""
    a = torch.nn.functional.gelu(x.transpose(0, 1)) @ x[..., None].squeeze(-1)
    return a.softmax(-1).t(), (a + 1).reshape(-1, 2)


@pytest.mark.parametrize("background", [False, True])
def test_a_second_process_neither_captures_nor_translates(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    """Results, their order and their strides are those of the first one."""
    x, y = torch.randn(6, 4), torch.randn(3)
    first = run(two, tmp_path, x, y, background=background)
    assert len(entries(tmp_path)) == 1

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("it was captured, or translated")

    monkeypatch.setattr(translation, "translate", never)
    monkeypatch.setattr("torch._dynamo.backends.common.aot_autograd", never)
    second = run(two, tmp_path, x, y, background=background)
    (graph,) = xrt_torch.graphs()
    assert graph.is_proven, graph.explain()
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b)
        assert a.stride() == b.stride()


def test_parameters_are_inputs(tmp_path: pathlib.Path) -> None:
    """Another model of the same layers takes the translation, with its own weights."""
    models = [nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)) for _ in range(2)]
    x = torch.randn(3, 4)
    for model in models:
        torch.testing.assert_close(run(model, tmp_path, x), model(x).detach())
    assert len(entries(tmp_path)) == 1


def test_the_engine_that_took_it_is_kept_too(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second process loads no other one at first; one that is not there any more is passed over, as is any where the
    process names its own."""
    pytest.importorskip("xrt_xla")
    model, x = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)), torch.randn(32, 64)
    chosen: list[Any] = []
    made = stages.Builder._ran

    def ran_by(self: Any, stage: Any, graph: Any, options: Any) -> Any:
        ran = made(self, stage, graph, options)
        chosen.append(options.get("engine"))
        return ran

    monkeypatch.setattr(stages.Builder, "_ran", ran_by)
    read = kept.TranslationFile.read
    for count, engine in enumerate((None, None, "host", None)):
        if count == 3:
            monkeypatch.setattr(kept.TranslationFile, "read", lambda self: replace(read(self), engine="not installed"))
        torch.testing.assert_close(run(model, tmp_path, x, engine=engine), model(x).detach())
        assert xrt_torch.graphs()[0].is_proven
    first, second, named, last = chosen
    assert first is last is None
    assert named == "host"
    assert second == xrt_torch.graphs()[0].to_json()["stages"][0]["clusters"][0]["engine"]


class Dropping(nn.Module):
    """What draws random numbers in training."""

    def forward(self, x: Any) -> Any:
        """x: float32 [n] -> the same."""
        return nn.functional.dropout(x, 0.5, training=True) * 2


@torch._dynamo.allow_in_graph
def _of_a_user(x: Any) -> Any:
    return x.sin()


NOT_KEPT: dict[str, Callable[..., Any]] = {
    "an input is written": lambda x: x.add_(1) * 2,
    "a result is a view of an input": lambda x: (x.cos(), x[1:]),
    "random numbers": Dropping(),
    "a function of the user": lambda x: _of_a_user(x) + 1,
    "a number among the results": lambda x: (x.cos(), x.shape[0]),
    "a constant tensor": lambda x: x + torch.tensor([1.0, 2.0, 3.0]),
    "an order that torch chooses": lambda x: (x * 0).sort()[0] + x,
}


@pytest.mark.parametrize("name", NOT_KEPT)
def test_what_is_not_kept(tmp_path: pathlib.Path, name: str) -> None:
    """Such graphs give eager's results, in a second process too."""
    function = NOT_KEPT[name]
    for _ in range(2):
        x = torch.randn(3)
        expected = x.clone()
        torch._dynamo.reset()
        options = {"engine": "host", "background": False, "cache_dir": str(tmp_path)}
        call = torch.compile(function, backend=backend, options=options)
        for seed in range(3):
            with torch.no_grad():
                torch.manual_seed(seed)
                found = call(x)
                torch.manual_seed(seed)
                torch.testing.assert_close(found, function(expected))
        torch.testing.assert_close(x, expected)
    if name not in ("a number among the results", "a constant tensor"):  # TorchDynamo may leave these to Python
        assert not entries(tmp_path)


def test_what_differs_has_another_entry(tmp_path: pathlib.Path) -> None:
    """Arguments, types, strides and modes are all in the key."""
    x = torch.randn(4, 6)
    cases: list[tuple[Callable[..., Any], Any]] = [
        (lambda v: torch.softmax(v, 0), x),
        (lambda v: torch.softmax(v, 1), x),
        (lambda v: torch.softmax(v, 1), x.double()),
        (lambda v: torch.softmax(v, 1), torch.randn(6, 4).t()),
        (lambda v: torch.softmax(v * 1, 1), x),
        (lambda v: torch.softmax(v * 1.0, 1), x),
    ]
    for count, (function, given) in enumerate(cases, 1):
        torch.testing.assert_close(run(function, tmp_path, given), function(given))
        assert len(entries(tmp_path)) == count
    with torch.autocast("cpu", torch.bfloat16):
        run(lambda v: v @ v.t(), tmp_path, x)
        assert len(entries(tmp_path)) == len(cases) + 1
    run(lambda v: v @ v.t(), tmp_path, x)
    assert len(entries(tmp_path)) == len(cases) + 2


def test_a_damaged_entry_is_captured_anew(tmp_path: pathlib.Path) -> None:
    """It is a miss, and is replaced."""
    x, y = torch.randn(6, 4), torch.randn(3)
    first = run(two, tmp_path, x, y)
    (path,) = entries(tmp_path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)
    for a, b in zip(run(two, tmp_path, x, y), first, strict=True):
        torch.testing.assert_close(a, b)
    assert xrt_torch.graphs()[0].reason is None


def test_a_translation_of_another_graph_does_not_answer(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were the key wrong, the comparison with eager would find it."""
    monkeypatch.setattr(kept, "_lines", lambda module, inputs: ["all the same"])
    x = torch.randn(5)
    run(torch.sin, tmp_path, x)
    torch.testing.assert_close(run(torch.cos, tmp_path, x), x.cos())
    assert "examine" in str(xrt_torch.graphs()[0].reason)

"""What engines said in a child is kept: by content, for their versions, and only where no harm was done."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.guard import engines as tested
from tests.guard.guarded import chain, module, registered
from xrt_core.cache.disk import DiskCache
from xrt_core.cache.key import cache_key
from xrt_core.engine import engines
from xrt_core.engine.contract import CompileOptions
from xrt_core.events import EventLog
from xrt_core.guard import capability
from xrt_core.guard.background import BackgroundCompiler
from xrt_core.guard.capability import Answers, Asker, about
from xrt_core.guard.policy import GuardSettings
from xrt_core.guard.verdict_cache import forget_all
from xrt_core.guard.worker_pool import WorkerFailure
from xrt_core.ir.support import Support
from xrt_core.options import resolve


@pytest.fixture(autouse=True)
def _alone(own_cache: pathlib.Path) -> Iterator[None]:
    forget_all()
    with registered(*tested.ALL):
        yield
    forget_all()


def test_answers_come_back(tmp_path: pathlib.Path) -> None:
    """As they were; for another device or engine there are none, and none are kept of who ended the child."""
    disk = DiskCache(tmp_path, 1 << 20)
    disk.prepare()
    function = about(list(chain()[0].nodes), chain()[0])
    engine = engines.get("plain")
    key = capability.answers_key(cache_key(function, engine, "cpu", CompileOptions()))
    assert capability.find_answers(key, function, disk) is None
    given = Answers([Support.yes(), Support.no("not this one"), Support.yes()], "it raised once")
    capability.keep_answers(key, function, disk, Answers((), "", WorkerFailure("crashed", "gone")))
    assert capability.find_answers(key, function, disk) is None
    capability.keep_answers(key, function, disk, given)
    found = capability.find_answers(key, function, disk)
    assert found is not None
    assert (list(found.supports), found.fault) == (given.supports, given.fault)
    for other in (cache_key(function, engines.get("memo"), "cpu", CompileOptions()),
                  cache_key(function, engine, "cpu", CompileOptions(phase="train"))):  # fmt: skip
        assert capability.find_answers(capability.answers_key(other), function, disk) is None


def test_what_is_damaged_is_asked_again(tmp_path: pathlib.Path) -> None:
    """Too few answers, and no JSON."""
    disk = DiskCache(tmp_path, 1 << 20)
    disk.prepare()
    function = about(list(chain()[0].nodes), chain()[0])
    key = capability.answers_key(cache_key(function, engines.get("plain"), "cpu", CompileOptions()))
    for blob in (b'{"supports": [[true, ""]], "fault": ""}', b"no json", b'{"supports": 1}'):
        disk.write(key, {"cluster": "x", "nodes": 3, "created": 0.0, "compile_seconds": 0.0},
                   capability._text(function), blob)  # fmt: skip
        assert capability.find_answers(key, function, disk) is None


def test_a_graph_is_asked_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second module of it asks no child, whatever its names are; another graph does; without a cache all do."""
    asked: list[list[str]] = []
    supports = Asker.supports

    def spy(self: Asker, function: Any, engines: Any, phase: Any) -> Any:
        asked.append([e.name for e, _ in engines])
        return supports(self, function, engines, phase)

    monkeypatch.setattr(Asker, "supports", spy)
    graph, x, want = chain()
    ways: list[tuple[list[str], dict[str, Any]]] = [
        (["plain"], {}), (["plain"], {}), (["plain", "memo"], {}), (["plain"], {"cache": False})
    ]  # fmt: skip
    for names, options in ways:
        with module(graph, names, guard_tune=False, **options) as m:
            np.testing.assert_array_equal(m(x), want)
            assert m.wait(60)
            assert [c["state"] for c in m.report().clusters] == ["live"]
    assert asked == [["plain"], ["memo"], ["plain"]]


def test_probes_of_installed_engines_are_kept(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the version of the package and of what it requires; engines of this process are probed each time."""
    settings = GuardSettings.of(resolve({"guard": True}))
    assert settings is not None
    installed = {line.name for line in engines.listing(probe=False) if line.version}
    assert installed, "an engine's package is installed where the tests run"
    probed: list[set[str]] = []

    class Fake(Asker):
        def __init__(self) -> None:
            pass

        def wanted(self) -> bool:
            return True

        def probe(self, names: Any) -> dict[str, WorkerFailure | None]:
            probed.append(set(names))
            return {n: WorkerFailure("crashed", "gone") if n == "plain" else None for n in names}

    monkeypatch.setattr("xrt_core.guard.background.asker", Fake)
    planning = BackgroundCompiler(settings, "auto", DiskCache(tmp_path, 1 << 20), EventLog())
    for _ in range(2):
        assert list(planning.harmful()) == ["plain"]
    here = {c.name for c in tested.ALL}
    assert probed == [set(engines.names()), here]
    first, again = (capability.probe_key("xla", "xrt-core", v).digest for v in ("1", "2"))
    assert first != again

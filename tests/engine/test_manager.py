"""Which engines take part: order by phase, switches, devices, and engines registered in the process."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from xrt_core import events
from xrt_core.engine import CompileOptions, Engine, EngineStatus, GraphCompiler, Support, hookimpl
from xrt_core.engine.manager import EngineManager
from xrt_core.errors import EngineNotFoundError, EngineUnavailableError, RegistrationError
from xrt_core.events import process_events
from xrt_core.options import resolve
from xrt_core.plugins.discovery import Discovery


class Stand(Engine):
    """An engine that is always ready and takes nothing."""

    name = "stand"

    def probe(self) -> EngineStatus:
        return EngineStatus(True, "1", self.devices)

    def supports(self, node: Any, device: str, phase: Any) -> Support:
        return Support.no("it takes nothing")

    def compiler(self, device: str, options: CompileOptions) -> GraphCompiler:
        raise AssertionError("nothing to compile")

    def fingerprint(self, device: str) -> str:
        return "1"


class Xla(Stand):
    name = "xla"
    switch = "use_xla_jit"
    devices = ("cpu", "cuda")
    priority = {"train": 100, "inference": 50}  # noqa: RUF012 - the contract asks for a Mapping

    def probe(self) -> EngineStatus:
        return EngineStatus(True, "1", ("cpu", "cuda:0", "cuda:1"))


class TensorRT(Stand):
    name = "tensorrt"
    switch = "use_tensorrt"
    devices = ("cuda",)
    priority = {"train": 50, "inference": 100}  # noqa: RUF012


class ByName(Stand):
    """An engine for those who ask for it; being probed would be a fault."""

    name = "by_name"
    automatic = False
    probed = 0

    def probe(self) -> EngineStatus:
        type(self).probed += 1
        return super().probe()


class Missing(Stand):
    name = "missing"

    def probe(self) -> EngineStatus:
        return EngineStatus(False, reason="no such hardware")


@pytest.fixture
def manager(tmp_path: pathlib.Path) -> EngineManager:
    """A manager with the four engines above and no installed package."""
    made = EngineManager(Discovery("0.1.0", [str(tmp_path)]))
    for engine in (Stand, Xla, TensorRT, Missing):
        made.register(engine)
    return made


def names(manager: EngineManager, **keywords: Any) -> list[str]:
    return [e.name for e in manager.select(resolve(keywords, {}))]


def test_order_by_phase(manager: EngineManager) -> None:
    """Without a word, every ready engine takes part, in the order of the phase."""
    assert names(manager) == ["tensorrt", "xla", "stand"]
    assert names(manager, phase="train") == ["xla", "tensorrt", "stand"]


def test_engine_overrides(manager: EngineManager) -> None:
    """engine= gives exactly these in this order, whatever the switches say; the host is none."""
    assert names(manager, engine=["stand", "xla"], use_xla_jit=False) == ["stand", "xla"]
    assert names(manager, engine="host") == []
    assert names(manager, engine=["stand", "host"]) == ["stand"]


def test_an_engine_that_waits_to_be_named(manager: EngineManager) -> None:
    """An engine with automatic=False is left out, and not even probed, until its name is given."""
    manager.register(ByName)

    assert "by_name" not in names(manager)
    assert names(manager, use_xla_jit=False) == ["tensorrt", "stand"]
    assert ByName.probed == 0
    assert names(manager, engine=["by_name", "xla"]) == ["by_name", "xla"]


def test_switches(manager: EngineManager) -> None:
    """True leaves only what is switched on, False takes out, both True keep the order of the phase."""
    assert names(manager, use_xla_jit=True) == ["xla"]
    assert names(manager, use_xla_jit=False) == ["tensorrt", "stand"]
    assert names(manager, use_xla_jit=True, use_tensorrt=False) == ["xla"]
    assert names(manager, use_xla_jit=True, use_tensorrt=True) == ["tensorrt", "xla"]


def test_switch_for_an_engine_that_is_absent(tmp_path: pathlib.Path) -> None:
    """A switch asks for an engine by name: if it is not there, the error says so and where the switch was."""
    empty = EngineManager(Discovery("0.1.0", [str(tmp_path)]))

    with pytest.raises(EngineNotFoundError, match="pip install xrt-xla .asked for by environment variable FLAGS_use_x"):
        empty.select(resolve({}, {"FLAGS_use_xla_jit": "1"}))


def test_devices(manager: EngineManager) -> None:
    """Without engine= the device filters; with it, an engine that cannot drive the device is an error."""
    assert names(manager, device="cpu") == ["xla", "stand"]
    assert names(manager, device="cuda:1") == ["tensorrt", "xla"]
    xla = manager.get("xla")
    assert [manager.device(xla, w) for w in (None, "cpu", "cuda", "cuda:1")] == ["cpu", "cpu", "cuda:0", "cuda:1"]
    with pytest.raises(EngineUnavailableError, match="'xla' cannot use device 'cuda:7' here; it can use cpu, cuda:0"):
        names(manager, engine="xla", device="cuda:7")


def test_unavailable_by_name(manager: EngineManager) -> None:
    """An engine that is not usable here is left out silently, and an error by name."""
    with pytest.raises(EngineUnavailableError, match="no such hardware"):
        names(manager, engine="missing")
    names(manager)
    assert process_events.recent("engine.left_out")[-1].fields["engine"] == "missing"


def test_registering(manager: EngineManager) -> None:
    """A taken name, a class that breaks the contract and the reserved name are refused; unregister makes room."""
    with pytest.raises(RegistrationError, match=r"'stand' is registered twice: by .*Stand and by .*Stand"):
        manager.register(Stand)
    with pytest.raises(RegistrationError, match="is not a subclass"):
        manager.register(int)  # type: ignore[arg-type]
    with pytest.raises(RegistrationError, match="'host'"):
        manager.register(type("Host", (Stand,), {"name": "host"}))
    manager.unregister("stand")
    assert "stand" not in manager.names()
    manager.register(Stand)
    assert manager.get("stand").name == "stand"


def test_hooks_of_an_engine_hear_events(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that implements a hook is called, with only the arguments it asks for, until it is unregistered."""
    monkeypatch.setattr(events, "_listeners", [])  # a manager listens for as long as its process lives
    heard: list[str] = []

    class Listening(Stand):
        name = "listening"

        @hookimpl
        def xrt_event(self, event: Any) -> None:
            heard.append(event.name)

    manager = EngineManager(Discovery("0.1.0", [str(tmp_path)]))
    manager.register(Listening)
    manager.get("listening")
    process_events.emit("test.heard")
    manager.unregister("listening")
    process_events.emit("test.unheard")

    assert heard == ["engine.loaded", "test.heard"]


def test_a_device_that_no_engine_can_use_is_an_error(tmp_path: pathlib.Path) -> None:
    """Nobody who asks for a GPU gets the CPU in silence, nor where he wants no engine."""
    manager = EngineManager(Discovery("0.1.0", [str(tmp_path)]))
    manager.register(Stand)
    with pytest.raises(EngineUnavailableError, match=r"device='tpu' \(keyword device=\): no engine that is ready"):
        manager.select(resolve({"device": "tpu"}))
    with pytest.raises(EngineUnavailableError, match="engine='host' cannot compute on device='tpu'"):
        manager.select(resolve({"device": "tpu", "engine": "host"}))
    assert manager.select(resolve({"device": "cpu", "engine": "host"})) == []
    assert [e.name for e in manager.select(resolve({"device": "cpu"}))] == ["stand"]

"""Device kinds: the registry, what it refuses, and what the core's own kinds say of this machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.fake_cupy import installed
from xrt_core.engine import cuda
from xrt_core.engine.device_kinds import (
    DeviceArrays,
    DeviceKind,
    DeviceKinds,
    Streams,
    add_rows,
    device_kind,
    device_kinds,
    is_host,
    number_of,
)
from xrt_core.errors import DeviceNotFoundError, PluginError, RegistrationError, XRTError
from xrt_core.ir.graph import Support


class Array:
    """An array of some device."""


def kind(name: str = "dsp", count: int = 2, **more: Any) -> DeviceKind:
    """A kind with devices."""
    return DeviceKind(name, Support.yes, lambda: count, **more)


ARRAYS = DeviceArrays(Array, lambda x: np.zeros(1), lambda x, device: Array())


@pytest.fixture
def registry() -> DeviceKinds:
    """An empty one."""
    return DeviceKinds()


def test_a_kind_is_found_by_the_name_of_a_device(registry: DeviceKinds) -> None:
    """With a number or without; numbers default to 0."""
    mine = kind()
    registry.register(mine, "xrt-dsp")
    assert registry.find("dsp") is registry.find("dsp:1") is mine
    assert (number_of("dsp"), number_of("dsp:12")) == (0, 12)
    with pytest.raises(DeviceNotFoundError, match="device 'dsp:one': what follows the kind must be a number"):
        number_of("dsp:one")


def test_a_taken_name_names_both_owners(registry: DeviceKinds) -> None:
    """The same object again is no second kind."""
    mine = kind()
    registry.register(mine, "xrt-dsp 1.0")
    registry.register(mine, "xrt-dsp 1.0")
    with pytest.raises(RegistrationError, match=r"device kind 'dsp' is registered twice: by xrt-dsp 1.0 and by rival"):
        registry.register(kind(), "rival")
    assert registry.names() == ("dsp",)


def test_a_taken_class_of_arrays_names_both_owners(registry: DeviceKinds) -> None:
    """An array must say by its class alone whose it is."""
    registry.register(kind(arrays=ARRAYS), "xrt-dsp")
    with pytest.raises(RegistrationError, match=r"Array belongs to two device kinds: 'dsp' of xrt-dsp and 'fpga' of f"):
        registry.register(kind("fpga", arrays=ARRAYS), "fast")
    assert registry.names() == ("dsp",)


@pytest.mark.parametrize("name", ["", "Dsp", "1st", "a b", "torch", "numpy", "other", "host"])
def test_a_name_is_a_lower_case_identifier(registry: DeviceKinds, name: str) -> None:
    """And not the name of a library of arrays, or of the host."""
    with pytest.raises(RegistrationError, match=r"device kind .* of xrt-dsp: the name must be"):
        registry.register(kind(name), "xrt-dsp")


def test_an_unknown_kind_lists_those_that_there_are() -> None:
    """With the closest of them."""
    with pytest.raises(XRTError, match=r"there is no device kind 'cudda'; did you mean 'cuda'\? known: cpu, cuda, tpu"):
        device_kind("cudda:0")


def test_an_absent_number_lists_those_that_are_here(registry: DeviceKinds) -> None:
    """A kind that cannot be used here has no numbers to compare with: its engines say why."""
    registry.register(kind(), "xrt-dsp")
    registry.register(DeviceKind("off", lambda: Support.no("no driver"), lambda: 0), "xrt-off")
    registry.check("dsp:1")
    registry.check("off:7")
    with pytest.raises(DeviceNotFoundError, match="there is no device 'dsp:2' here; there are dsp:0, dsp:1"):
        registry.check("dsp:2")


def test_the_listing_has_reasons(registry: DeviceKinds) -> None:
    """Devices with their memory; a reason for each kind without, a function of the plugin that fails included."""

    def broken() -> Support:
        raise RuntimeError("the driver is in a bad mood")

    registry.register(kind(memory=lambda i: (10, i)), "xrt-dsp")
    registry.register(DeviceKind("off", lambda: Support.no("no driver"), lambda: 0), "xrt-off")
    registry.register(DeviceKind("odd", broken, lambda: 1), "xrt-odd")
    dsp, off, odd = registry.listing()
    assert (dsp.devices, dsp.memory, dsp.reason, dsp.owner) == (("dsp:0", "dsp:1"), ((10, 0), (10, 1)), "", "xrt-dsp")
    assert (off.devices, off.reason) == ((), "no driver")
    assert odd.reason == "asking it failed: RuntimeError: the driver is in a bad mood"


def test_arrays_are_known_by_their_class(registry: DeviceKinds) -> None:
    """Classes that derive from it included; a kind that is taken out takes its class with it."""

    class Mine(Array):
        device = 1

    registry.register(kind(arrays=ARRAYS), "xrt-dsp")
    found = registry.of_array(Mine)
    assert found is not None
    assert (found.name, found.device_of(Mine()), found.device_of(np.zeros(1))) == ("dsp", 1, None)
    assert registry.of_array(np.ndarray) is None
    registry.unregister("dsp")
    assert registry.of_array(Mine) is None


def test_what_a_hook_gives_is_registered_whole_or_not_at_all(registry: DeviceKinds) -> None:
    """An error names the package."""
    assert add_rows(registry, [kind("one"), kind("two")], "xrt-two") == ["one", "two"]
    with pytest.raises(PluginError, match=r"rival: its hook xrt_device_kinds .*'two' is registered twice: by xrt-two"):
        add_rows(registry, [kind("three"), kind("two")], "rival")
    with pytest.raises(PluginError, match="rival: .*'four' is no DeviceKind"):
        add_rows(registry, ["four"], "rival")
    assert registry.names() == ("one", "two")


def test_the_kinds_of_the_core() -> None:
    """The processor is always there, with its memory; the others are there, or say why not."""
    lines = {line.name: line for line in device_kinds()}
    assert list(lines)[:3] == ["cpu", "cuda", "tpu"]
    cpu = lines["cpu"]
    total, free = cpu.memory[0]
    assert (cpu.devices, cpu.reason) == (("cpu",), "")
    assert total is not None
    assert free is not None
    assert 0 < free <= total
    assert all(bool(line.devices) != bool(line.reason) for line in lines.values())
    assert [is_host(d) for d in (None, "cpu", "cuda:0", "tpu", "no_such_kind")] == [True, True, False, False, False]
    assert [device_kind(d).numpy_readable for d in ("cpu", "cuda:0", "tpu")] == [True, False, True]


def test_the_namespace_of_the_host_beside_a_device() -> None:
    """NumPy on the CPU; on CUDA CuPy where it is installed and finds a GPU, else the reason is said."""
    assert device_kind("cpu").namespace() is np
    kind = device_kind("cuda:0")
    for devices in (1, 0):
        with installed(devices) as cupy:
            assert kind.namespace() is (cupy if devices else np)
            assert ("driver version is insufficient" in kind.why_no_namespace()) == (devices == 0)


class Nvml:
    """A driver with GPUs of so many bytes each, by number and by UUID."""

    def __init__(self, *totals: int) -> None:
        self.totals = totals

    def nvmlDeviceGetCount_v2(self, number: Any) -> int:
        number._obj.value = len(self.totals)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        handle._obj.value = index.value + 1
        return int(index.value >= len(self.totals))

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        handle._obj.value = int(uuid[4:] or 0) + 1
        return int(not uuid.startswith(b"GPU-"))

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj.total = self.totals[handle.value - 1]
        memory._obj.free = self.totals[handle.value - 1] // 2
        return 0


@pytest.mark.parametrize(
    ("visible", "totals"),
    [(None, [10, 20, 30]), ("2,0", [30, 10]), ("GPU-1", [20]), ("1,9,0", [20]), ("", []), ("-1", [])],
)
def test_gpus_are_those_that_the_process_may_use(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, totals: list[int]
) -> None:
    """In the order of CUDA_VISIBLE_DEVICES, up to the first entry that is none."""
    monkeypatch.setattr(cuda, "_library", lambda: Nvml(10, 20, 30))
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert cuda.count() == len(totals)
    assert [cuda.memory(i) for i in range(len(totals))] == [(t, t // 2) for t in totals]
    assert cuda.memory(len(totals)) == (None, None)
    expected = "" if totals else f"CUDA_VISIBLE_DEVICES={visible} leaves no GPU"
    assert (cuda.status().ok, cuda.status().reason) == (bool(totals), expected)


def test_a_machine_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's own message is the reason."""

    def library() -> Any:
        raise OSError("libnvidia-ml.so.1: cannot open shared object file")

    monkeypatch.setattr(cuda, "_library", library)
    assert (cuda.count(), cuda.memory(0)) == (0, (None, None))
    assert cuda.status().reason == "no NVIDIA driver: libnvidia-ml.so.1: cannot open shared object file"


def test_streams_default_to_nothing_to_switch() -> None:
    """A kind need not have a namespace of the host's that works on its streams."""
    streams = Streams(lambda x, device: 3, lambda device: None)
    with streams.using(3, 0) as found:
        assert found is None
    assert not kind(streams=streams).numpy_readable

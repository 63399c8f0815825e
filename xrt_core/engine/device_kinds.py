"""Device kinds: what the core knows of the devices that engines compile for, in a registry that plugins add to.

    from xrt_core.engine import DeviceArrays, DeviceKind, register_device_kind

    register_device_kind(DeviceKind("npu", status, count, arrays=DeviceArrays(NpuArray, to_host, from_host)), "xrt-npu")

A device is named by its kind, with its number where there are several: "cpu", "cuda", "cuda:1", "npu:0". The core asks
a kind which devices are here, how arrays get to them and back, and on which stream its caller works; what an engine
does on a device is up to the engine.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from msgspec import Struct

from xrt_core.engine import cuda
from xrt_core.engine.converters import FAMILIES
from xrt_core.engine.registry import Registry
from xrt_core.errors import DeviceNotFoundError, PluginError, RegistrationError, nearest
from xrt_core.ir.graph import Support
from xrt_core.plugins import plugins

Memory = tuple[int | None, int | None]


def _unknown_memory(index: int) -> Memory:
    return None, None


def _nowhere(x: Any) -> int | None:
    return None


def _any_stream(stream: int | None, index: int) -> AbstractContextManager[Any]:
    return contextlib.nullcontext()


def _numpy() -> Any:
    return np


class DeviceArrays(Struct, frozen=True):
    """Arrays in the memory of a device, of a class that NumPy need not be able to read.

    type: the class; its objects have `dtype` (NumPy's), `shape` and `device`, the number of the device they lie on.
    to_host: array -> NumPy array with memory of its own; waits until the array is computed.
    from_host: (NumPy array of any layout, number of a device) -> new array there, which shares no memory with it.
    """

    type: type
    to_host: Callable[[Any], np.ndarray]
    from_host: Callable[[np.ndarray, int], Any]


class Streams(Struct, frozen=True):
    """Queues of work on the devices of a kind, named by integer handles; engines get one as `RunOptions.stream`.

    current: (array of the caller's on the device or None, number of the device) -> stream on which the caller works,
        None where there is none.
    synchronize: waits for all work on a device.
    using: (stream, number) -> context within which the host's namespace works on that device, there on that stream;
        None: on the current one; 0: on the default one, which is the same for every thread.
    """

    current: Callable[[Any, int], int | None]
    synchronize: Callable[[int], None]
    using: Callable[[int | None, int], AbstractContextManager[Any]] = _any_stream


class DeviceKind(Struct, frozen=True):
    """One kind of device. Its functions are called at need, and may import a library only then.

    name: a lower-case identifier. status: whether its devices can be used here, or why not.
    count: how many are here; asked where `status` is yes.
    memory: number of a device -> its bytes, in all and free; None for what is not known.
    is_host: it is the processor that runs Python: executables share its cores, and NumPy its memory.
    arrays: the class of its arrays; None where they are of libraries that the runtime knows (NumPy, JAX, CuPy, torch,
        DLPack, the CUDA array interface). With it executables of the kind are given such arrays, and give such.
    locate: array of any library -> number of the device of this kind in whose memory it lies, or None. Needed with
        `streams` where `arrays` does not say it.
    streams: None where work on its devices has no streams that a caller could see; then every run is waited for.
    namespace: the array namespace in which the host runs operators beside engines on such a device; NumPy, or one with
        CuPy's functions (`asarray`, `asnumpy`, `ndarray`).
    why_no_namespace: why that is NumPy now, and what to do; "" where it is not.
    """

    name: str
    status: Callable[[], Support]
    count: Callable[[], int]
    memory: Callable[[int], Memory] = _unknown_memory
    is_host: bool = False
    arrays: DeviceArrays | None = None
    locate: Callable[[Any], int | None] = _nowhere
    streams: Streams | None = None
    namespace: Callable[[], Any] = _numpy
    why_no_namespace: Callable[[], str] = lambda: "the host runs on the CPU beside it, and engines alone on the device"

    @property
    def numpy_readable(self) -> bool:
        """Whether `numpy.asarray` reads every array of its executables."""
        return self.arrays is None and self.streams is None

    def device_of(self, x: Any) -> int | None:
        """The number of the device of this kind in whose memory an array lies; None for any other memory."""
        own: Any = x
        if self.arrays is not None and isinstance(x, self.arrays.type):
            return int(own.device)
        return self.locate(x)


@dataclass(frozen=True, slots=True)
class DeviceKindListing:
    """A line of the listing. owner: who registered the kind. reason: why its devices cannot be used, "" if they can.

    devices: names of those that are here. memory: for each its bytes, in all and free.
    """

    name: str
    owner: str
    reason: str
    devices: tuple[str, ...] = ()
    memory: tuple[Memory, ...] = ()


class DeviceKinds:
    """Device kinds by name. Safe to use from many threads.

    load: registers the kinds that plugins bring under a name, or all of them for "".
    """

    def __init__(self, load: Callable[[str], None] = lambda name: None) -> None:
        self._load = load
        self._kinds: Registry[DeviceKind] = Registry(
            "device kind",
            hint="packages of engines bring kinds, and `xrt doctor` lists those that are here",
            missing=DeviceNotFoundError,
        )
        self._by_name: dict[str, DeviceKind] = {}
        self._of_type: dict[type, DeviceKind] = {}

    def register(self, kind: DeviceKind, owner: str) -> None:
        """Add a kind; the same one again changes nothing.

        Raises RegistrationError for a name, or a class of arrays, that is taken (naming both owners), or no name.
        """
        if self._kinds.get(kind.name) is kind:
            return
        if kind.name in (*FAMILIES, "host") or kind.name != str(kind.name).lower():
            raise RegistrationError(
                f"device kind {kind.name!r} of {owner}: the name must be a lower-case identifier, and not one of "
                f"{', '.join(FAMILIES)}, host"
            )
        for other in self._kinds.values():
            if kind.arrays is not None and other.arrays is not None and other.arrays.type is kind.arrays.type:
                what = f"{kind.arrays.type.__module__}.{kind.arrays.type.__qualname__}"
                raise RegistrationError(
                    f"array type {what} belongs to two device kinds: {other.name!r} of "
                    f"{self._kinds.owner(other.name)} and {kind.name!r} of {owner}"
                )
        self._kinds.register(kind.name, kind, owner=owner)
        self._index()

    def unregister(self, name: str) -> None:
        """Take a kind out. Raises DeviceNotFoundError where there is none."""
        self._kinds.unregister(name)
        self._index()

    def _index(self) -> None:
        self._by_name = dict(self._kinds)
        self._of_type = {k.arrays.type: k for k in self._by_name.values() if k.arrays is not None}

    def names(self) -> tuple[str, ...]:
        """Names of all kinds, in the order of registration."""
        return tuple(self._by_name)

    def find(self, device: str) -> DeviceKind:
        """The kind of a device such as "cuda:1", by its name alone.

        Raises DeviceNotFoundError, listing the kinds that there are, for any other.
        """
        name = device.partition(":")[0]
        return self._by_name[name] if self.is_known(name) else self._kinds.find(name)

    def is_known(self, name: str) -> bool:
        """Whether there is a kind of this name, in this process or in a package."""
        if name not in self._by_name:
            self._load(name)
        return name in self._by_name

    def of_array(self, array_type: type) -> DeviceKind | None:
        """The kind whose arrays are of this class, or of one that it derives from; None for arrays of libraries."""
        if not self._of_type:
            return None
        return next((k for base in array_type.__mro__ if (k := self._of_type.get(base)) is not None), None)

    def check(self, device: str) -> None:
        """Raises DeviceNotFoundError for a kind that is not known, or a number of which there is no device here."""
        kind = self.find(device)
        line = self._line(kind)
        # a library may divide the host's processor into several devices: which there are, its engine knows
        if not line.reason and not kind.is_host and number_of(device) >= len(line.devices):
            here = ", ".join(line.devices)
            raise DeviceNotFoundError(
                f"there is no device {device!r} here; there are {here}{nearest(device, line.devices)}"
            )

    def listing(self) -> list[DeviceKindListing]:
        """A line for each kind, with its devices and their memory, or the reason why there are none."""
        self._load("")
        return [self._line(k) for k in list(self._kinds.values())]

    def _line(self, kind: DeviceKind) -> DeviceKindListing:
        owner = self._kinds.owner(kind.name)
        try:
            found = kind.status()
            if not found.ok:
                return DeviceKindListing(kind.name, owner, found.reason or "it gives no reason")
            count = kind.count()
            memory = tuple(kind.memory(i) for i in range(count))
        except Exception as e:  # a plugin's function raises what it likes
            return DeviceKindListing(kind.name, owner, f"asking it failed: {type(e).__name__}: {e}")
        devices = (kind.name,) if kind.is_host else tuple(f"{kind.name}:{i}" for i in range(count))
        return DeviceKindListing(kind.name, owner, "", devices, memory)


def number_of(device: str) -> int:
    """The number in a device's name; 0 where it has none. Raises DeviceNotFoundError for what is no number."""
    _, colon, number = device.partition(":")
    if not colon:
        return 0
    if not (number.isascii() and number.isdigit()):
        raise DeviceNotFoundError(f"device {device!r}: what follows the kind must be a number, such as 'cuda:1'")
    return int(number)


def same_device(one: str, other: str) -> bool:
    """Whether two names mean one device: "cuda" is "cuda:0"."""
    return one.partition(":")[0] == other.partition(":")[0] and number_of(one) == number_of(other)


def add_rows(registry: DeviceKinds, rows: Iterable[Any], owner: str) -> list[str]:
    """Register what a plugin's hook `xrt_device_kinds` gave: DeviceKind objects. Returns their names.

    Raises PluginError, with nothing registered, for anything else, or a kind that is taken.
    """
    added: list[str] = []
    before = registry.names()
    try:
        for kind in rows:
            if not isinstance(kind, DeviceKind):
                raise TypeError(f"{kind!r} is no DeviceKind")
            registry.register(kind, owner)
            added.append(kind.name)
    except (RegistrationError, TypeError) as e:
        for name in set(added) - set(before):
            registry.unregister(name)
        raise PluginError(f"{owner}: its hook xrt_device_kinds must give DeviceKind objects: {e}") from e
    return added


# --- the kinds of the core ------------------------------------------------------------------------------------------


def _cpu_memory(index: int) -> Memory:
    try:
        page, names = os.sysconf("SC_PAGE_SIZE"), os.sysconf_names
        total, free = (os.sysconf(n) * page if n in names else None for n in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
    except (AttributeError, OSError, ValueError):  # not POSIX
        return None, None
    return total, free


_GOOGLE: Final = "0x1ae0"
_TPUS: Final = frozenset(("0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"))
"""PCI device identifiers, as in `jax._src.hardware_utils`."""


def _tpus() -> int:
    """TPU chips on the PCI bus (Linux)."""
    folder, found = "/sys/bus/pci/devices", 0
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        with contextlib.suppress(OSError):
            read = [_text_of(f"{folder}/{name}/{what}") for what in ("vendor", "device")]
            found += read[0] == _GOOGLE and read[1] in _TPUS
    return found


def _text_of(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read().strip()


def _tpu_status() -> Support:
    return Support.yes() if _tpus() else Support.no("there is no TPU on the PCI bus")


CPU: Final = DeviceKind("cpu", Support.yes, lambda: 1, _cpu_memory, is_host=True)
CUDA: Final = DeviceKind(
    "cuda",
    cuda.status,
    cuda.count,
    cuda.memory,
    locate=cuda.locate,
    streams=Streams(cuda.current_stream, cuda.synchronize, cuda.using),
    namespace=cuda.namespace,
    why_no_namespace=cuda.why_no_cupy,
)
TPU: Final = DeviceKind("tpu", _tpu_status, _tpus)


def _load_plugins(name: str) -> None:
    for plugin, owner, row in plugins.contributions("xrt_device_kinds", "xrt.devices", name=name):
        try:
            add_rows(kinds, [row], owner)
        except PluginError as e:
            plugins.problem(f"device kind of {plugin}", owner, str(e))


kinds: Final = DeviceKinds(_load_plugins)
"""The device kinds of this process."""
for _kind in (CPU, CUDA, TPU):
    kinds.register(_kind, "xrt-core")


def register_device_kind(kind: DeviceKind, owner: str) -> None:
    """Add a kind of device to this process. owner: the package that brings it; see `DeviceKinds.register`."""
    kinds.register(kind, owner)


def device_kind(device: str) -> DeviceKind:
    """The kind of a device; see `DeviceKinds.find`."""
    return kinds.find(device)


def device_kinds() -> Sequence[DeviceKindListing]:
    """All kinds, each with its devices or the reason why there are none; see `DeviceKinds.listing`."""
    return kinds.listing()


def is_host(device: str | None) -> bool:
    """Whether a device, None for the default, is the processor that runs Python."""
    return device is None or (kinds.is_known(device.partition(":")[0]) and kinds.find(device).is_host)

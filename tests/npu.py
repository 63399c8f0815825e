"""A plugin that brings a device kind: `npu`, whose arrays NumPy cannot read, and an engine that takes only such arrays.

The device is a piece of the process's memory that nothing but the kind's functions reads and writes; every transfer is
counted. Importing the module registers both, as importing a plugin's package does; a worker process imports it too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from xrt_core.engine import (
    CompileOptions,
    DeviceArrays,
    DeviceKind,
    EngineStatus,
    Executable,
    Function,
    GraphCompiler,
    InputOutputAlias,
    Parameter,
    Phase,
    RunOptions,
    Support,
    register_device_kind,
)
from xrt_core.engine.contract import DEFAULT_RUN_OPTIONS
from xrt_core.errors import EngineUnavailableError, ExecutionError
from xrt_core.ir.graph import Node
from xrt_core.testing.host_engine import HostEngine, HostExecutable

DEVICES = 2
BYTES = 1 << 30


class NpuArray:
    """An array in the memory of an NPU. NumPy has no way to its numbers."""

    __slots__ = ("__memory", "device", "dtype", "shape")

    def __init__(self, memory: np.ndarray, device: int) -> None:
        self.__memory = memory
        self.dtype, self.shape, self.device = memory.dtype, memory.shape, device

    def __array__(self, *args: Any, **options: Any) -> np.ndarray:
        raise TypeError("NumPy reads no memory of an NPU")

    def data_ptr(self) -> int:
        """Where its memory begins, which the conformance kit asks to see updates in place."""
        return self.__memory.ctypes.data


class Counts:
    """How many arrays were moved, by direction; ran: the inputs of each run of an executable; asked: for each run the
    stream, and whether to wait."""

    def __init__(self) -> None:
        self.up = self.down = 0
        self.ran: list[Sequence[Any]] = []
        self.asked: list[tuple[int | None, bool]] = []


COUNTS: Counts | None = None


@contextlib.contextmanager
def counted() -> Iterator[Counts]:
    """What happens within the block."""
    global COUNTS
    COUNTS = made = Counts()
    try:
        yield made
    finally:
        COUNTS = None


def memory_of(x: NpuArray) -> np.ndarray:
    """The memory of an array, as the device's own programs see it."""
    return x._NpuArray__memory  # type: ignore[attr-defined,no-any-return]


def to_host(x: NpuArray) -> np.ndarray:
    if COUNTS is not None:
        COUNTS.down += 1
    return memory_of(x).copy()


def from_host(x: np.ndarray, device: int) -> NpuArray:
    if not 0 <= device < DEVICES:
        raise EngineUnavailableError(f"there is no NPU {device}")
    if COUNTS is not None:
        COUNTS.up += 1
    return NpuArray(np.array(x), device)


NPU = DeviceKind(
    "npu",
    status=Support.yes,
    count=lambda: DEVICES,
    memory=lambda i: (BYTES, BYTES // (i + 1)),
    arrays=DeviceArrays(NpuArray, to_host, from_host),
)


class NpuExecutable(Executable):
    """Host kernels over the memory of NPU arrays. Anything but arrays of its own device is refused."""

    def __init__(self, inner: HostExecutable, engine: str, device: int) -> None:
        self.inner = inner
        self._engine, self._device = engine, device

    def run(
        self, inputs: Sequence[Any], run_options: RunOptions = DEFAULT_RUN_OPTIONS, block_until_done: bool = True
    ) -> Sequence[Any]:
        if COUNTS is not None:
            COUNTS.ran.append(list(inputs))
            COUNTS.asked.append((run_options.stream, block_until_done))
        for i, x in enumerate(inputs):
            if not isinstance(x, NpuArray) or x.device != self._device:
                raise ExecutionError(f"input {i} is no array of npu:{self._device} but a {type(x).__name__}")
        made = self.inner.run([memory_of(x) for x in inputs], run_options)
        return [NpuArray(np.asarray(r), self._device) for r in made]

    def serialize(self) -> bytes:
        return self.inner.serialize()


class _NpuCompiler(GraphCompiler):
    def __init__(self, inner: GraphCompiler, engine: str, device: int) -> None:
        self._inner = inner
        self._engine, self._device = engine, device

    def _placed(self, made: Any) -> Executable:
        return NpuExecutable(made, self._engine, self._device)

    def compile(
        self,
        function: Function,
        entry_params: Sequence[Parameter],
        return_params: Sequence[Parameter],
        aliases: Sequence[InputOutputAlias],
    ) -> Executable:
        return self._placed(self._inner.compile(function, entry_params, return_params, aliases))

    def load(self, blob: bytes) -> Executable:
        return self._placed(self._inner.load(blob))


class NpuEngine(HostEngine):
    """An engine on NPUs."""

    name = "npu_engine"
    devices: ClassVar[tuple[str, ...]] = ("npu",)
    automatic = False

    def probe(self) -> EngineStatus:
        return EngineStatus(True, np.__version__, tuple(f"npu:{i}" for i in range(DEVICES)))

    def supports(self, node: Node, device: str, phase: Phase) -> Support:
        return super().supports(node, "cpu", phase)

    def compiler(self, device: str, options: CompileOptions) -> GraphCompiler:
        kind, _, number = device.partition(":")
        if kind != "npu" or int(number or 0) >= DEVICES:
            raise EngineUnavailableError(f"npu_engine cannot use device {device!r}; it can use npu:0, npu:1")
        return _NpuCompiler(super().compiler("cpu", options), self.name, int(number or 0))

    def fingerprint(self, device: str) -> str:
        return f"npu {super().fingerprint('cpu')}"

    @property
    def package(self) -> str:
        return "xrt-npu"


register_device_kind(NPU, "xrt-npu")

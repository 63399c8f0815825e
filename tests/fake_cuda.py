"""GPUs for tests: streams are queues that run when somebody waits; CuPy's and torch's stand-ins work on them.

What is enqueued is not computed before its stream is waited for, so an array that is read too early, or by work on a
stream that was not ordered after the one that makes it, holds NaN; so does memory that was freed while work on another
stream still reads it. Each thread has its own current device and, for each library, its own current streams.
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

Work = Callable[[], None]
NO_DRIVER = "cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version"
ILLEGAL = "cudaErrorIllegalAddress: an illegal memory access was encountered"


class CUDARuntimeError(RuntimeError):
    """What `cupy.cuda.runtime.CUDARuntimeError` is."""


class Gpu:
    """Queues of work by stream; 0 is the default stream of the first device, -n that of device n.

    count: of devices. current, torch: the current streams of the calling thread in CuPy and in torch, for its current
    device. waits: streams that the host waited for. up, down: bytes copied to and from devices; downloads: how often.
    error: what every call fails with, once work has broken the context. memory: bytes of each device; used: of all.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.reset()

    def reset(self, count: int = 2) -> None:
        """Idle devices, with nothing enqueued and no error."""
        self.count = count
        self.queues: dict[int, list[Work]] = {}
        self.waits: list[int] = []
        self.up = self.down = self.downloads = self.used = 0
        self.memory = 1 << 40
        self.error: str | None = None
        self._local = threading.local()
        self._streams: dict[int, int] = {}  # handle -> device

    # --- what each thread has ---------------------------------------------------------------------------------------

    @property
    def device(self) -> int:
        return int(getattr(self._local, "device", 0))

    def set_device(self, index: int) -> None:
        self.check()
        if not 0 <= index < self.count:
            raise CUDARuntimeError("cudaErrorInvalidDevice: invalid device ordinal")
        self._local.device = index

    @contextlib.contextmanager
    def on(self, index: int) -> Iterator[None]:
        """The device as the current one of this thread."""
        before = self.device
        self._local.device = index
        try:
            yield
        finally:
            self._local.device = before

    def _current(self, library: str) -> dict[int, int]:
        return self._local.__dict__.setdefault(library, {})  # type: ignore[no-any-return]

    @property
    def current(self) -> int:
        return self._current("cupy").get(self.device, -self.device)

    @current.setter
    def current(self, stream: int) -> None:
        self._current("cupy")[self.device] = stream if stream > 1 else -self.device

    @property
    def torch(self) -> int:
        return self._current("torch").get(self.device, 0)

    @torch.setter
    def torch(self, stream: int) -> None:
        self._current("torch")[self.device] = stream

    # --- streams ----------------------------------------------------------------------------------------------------

    def new_stream(self) -> int:
        """A stream of the current device."""
        handle = 1000 + len(self._streams)
        self._streams[handle] = self.device
        return handle

    def check_stream(self, handle: int) -> None:
        """Raises CUDARuntimeError for a stream of another device than the current one."""
        if self._streams.get(handle, self.device) != self.device:
            raise CUDARuntimeError("cudaErrorInvalidResourceHandle: invalid resource handle")

    def put(self, stream: int, work: Work) -> None:
        """Enqueue work."""
        with self._lock:
            self.queues.setdefault(stream, []).append(work)

    def drain(self, stream: int) -> None:
        """Do all that is on a stream, as a GPU does at some time. Raises what the work raises."""
        with self._lock:
            queue = self.queues.get(stream, [])
            while queue:
                queue.pop(0)()

    def wait(self, stream: int) -> None:
        """`drain`, as somebody on the host who waits for it."""
        self.check()
        self.waits.append(stream)
        self.drain(stream)
        self.check()

    def wait_for_all(self) -> None:
        """Wait for every stream."""
        for stream in list(self.queues):
            self.wait(stream)

    def record(self, stream: int) -> Work:
        """An event: work that does what is on the stream now, unless that is done."""
        with self._lock:
            todo, self.queues[stream] = self.queues.get(stream, []), []

            def work() -> None:
                while todo:
                    todo.pop(0)()

            self.put(stream, work)
            return work

    def order(self, stream: int, after: int) -> None:
        """Let what comes next on `stream` wait for what is on `after` now."""
        if stream != after:
            self.put(stream, self.record(after))

    # --- errors and memory ------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises CUDARuntimeError without a driver, and after work that broke the context."""
        if self.error is not None or not self.count:
            raise CUDARuntimeError(self.error or NO_DRIVER)

    def break_context(self, error: str = ILLEGAL) -> None:
        """Fail as work does that reads a wrong address: every later call fails as well."""
        self.error = error
        raise CUDARuntimeError(error)

    def allocate(self, size: int, error: type[Exception]) -> None:
        """Take memory of the device."""
        if self.used + size > self.memory:
            raise error(f"Out of memory allocating {size:,} bytes (allocated so far: {self.used:,} bytes).")
        self.used += size

    def memory_at(self, address: int, shape: Sequence[int], typestr: str) -> np.ndarray:
        """The memory that a CUDA array interface names."""
        held = {"shape": tuple(shape), "typestr": typestr, "data": (address, False), "version": 3}
        return np.asarray(types.SimpleNamespace(__array_interface__=held))


GPU = Gpu()


class Capsule:
    """What DLPack hands over. owner: what keeps the memory."""

    def __init__(self, memory: np.ndarray, owner: object, device: int) -> None:
        self.memory, self.owner, self.device = memory, owner, device


def dlpack_order(stream: Any, made_on: int) -> None:
    """Order a consumer's stream as `__dlpack__(stream=...)` does; None is the default stream, 0 is refused."""
    if stream is not None and (not isinstance(stream, int) or stream < -1 or stream == 0):
        raise ValueError(f"stream {stream!r} is disallowed as it is ambiguous")
    if stream != -1:
        GPU.order(-GPU.device if stream in (None, 1) else stream, made_on)

"""Stand-ins for the CUDA runtime and for TensorRT's run side, over the CPU's memory: calls are noted, and compute.

Work waits in its stream until somebody waits for it (or `Cuda.finish`), so that who reads too early, or on a stream
that was not ordered after the one that computes, reads old bytes; memory that was given back is overwritten when its
stream comes past.
"""

from __future__ import annotations

import collections
import ctypes
import enum
import threading
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from xrt_core.engine.contract import Parameter

ALIGNMENT = 256
"""Of device memory, and of the addresses that TensorRT takes."""


class Error(enum.IntEnum):
    """Codes of the runtime."""

    success = 0
    out_of_memory = 2
    invalid_device = 101
    invalid_handle = 400
    not_ready = 600
    illegal_address = 700
    capture_unsupported = 900


STICKY = (Error.illegal_address,)
"""Errors after which every call fails."""


UNSAFE = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaEventQuery", "cudaMallocAsync", "cudaFreeAsync")
"""What a thread may not call while it captures: the first three are refused by CUDA, memory of the last two would be
the graph's."""


class _Failed(Exception):
    """A call that fails with a code of `Error`."""


class Cuda:
    """The functions of `cuda.bindings.runtime` that the engine calls. calls: (name, arguments), in order.

    Memory is the CPU's. A capture notes what is enqueued. fail: function name -> the code it returns. queues: what
    waits in each stream; the default stream (0) and streams of `cudaStreamCreate` wait for each other.
    """

    cudaMemcpyKind = SimpleNamespace(cudaMemcpyDefault=4)
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeThreadLocal=1)
    cudaDeviceAttr = SimpleNamespace(
        cudaDevAttrComputeCapabilityMajor="major", cudaDevAttrComputeCapabilityMinor="minor"
    )

    def __init__(self, capability: tuple[int, int] = (8, 9), devices: int = 1) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.fail: dict[str, Error] = {}
        self.live: dict[int, Any] = {}
        self.captures: dict[int, list[Callable[[], None]]] = {}
        self._capability = {"major": capability[0], "minor": capability[1]}
        self._devices = devices
        self._streams = 100
        self._events = 6
        self.device = 0
        self.model = b"NVIDIA Stand-in"
        self.broken: Error | None = None
        self.graphs: dict[int, list[Callable[[], None]]] = {}
        self._graphs = 50_000
        self.events: dict[int, list[Callable[[], None]]] = {}  # what is left to do of what each stands for
        self.queues: dict[int, list[Callable[[], None]]] = {}
        self.blocking: set[int] = set()
        self._freed: collections.deque[Any] = collections.deque(maxlen=64)  # late readers find overwritten bytes
        self._lock = threading.RLock()

    def names(self, *wanted: str) -> list[str]:
        """Names of the calls made, of these functions alone where any are named."""
        return [n for n, _ in self.calls if not wanted or n in wanted]

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cuda"):
            raise AttributeError(name)

        def call(*args: Any) -> tuple[Any, ...]:
            self.calls.append((name, args))
            if self.broken is not None:
                return (self.broken, None)
            if self.captures and name in UNSAFE:
                return (Error.capture_unsupported, None)
            if name in self.fail:
                if name == "cudaStreamEndCapture":
                    self.captures.pop(args[0], None)  # a broken capture has ended as well
                if self.fail[name] in STICKY:
                    self.broken = self.fail[name]
                return (self.fail[name], None)
            found = getattr(self, f"_{name}", None)
            try:
                with self._lock:
                    result = found(*args) if found is not None else None
            except _Failed as e:
                if e.args[0] in STICKY:
                    self.broken = e.args[0]
                return (e.args[0], None)
            return (Error.success,) if result is None else (Error.success, result)

        return call

    def cudaGetErrorString(self, error: Error) -> tuple[Error, bytes]:
        return Error.success, f"words for {error.name}".encode()

    def cudaMemGetInfo(self) -> tuple[Error, int, int]:
        return Error.success, 4096, 1 << 30

    def _cudaGetDeviceCount(self) -> int:
        return self._devices

    def _cudaDeviceGetAttribute(self, which: str, device: int) -> int:
        return self._capability[which]

    def _cudaGetDeviceProperties(self, device: int) -> Any:
        return SimpleNamespace(name=self.model)

    def _cudaGetDevice(self) -> int:
        return self.device

    def _cudaSetDevice(self, device: int) -> Any:
        if not 0 <= device < self._devices:
            raise _Failed(Error.invalid_device)
        self.device = device

    def _cudaStreamCreate(self) -> int:
        self._streams += 1
        self.blocking.add(self._streams)
        return self._streams

    def _cudaStreamCreateWithFlags(self, flags: int) -> int:
        self._streams += 1
        if not flags & 1:
            self.blocking.add(self._streams)
        return self._streams

    def _cudaStreamSynchronize(self, stream: int) -> None:
        self.drain(stream)

    def _cudaEventCreateWithFlags(self, flags: int) -> int:
        self._events += 1
        self.events[self._events] = []
        return self._events

    def _cudaEventRecord(self, event: int, stream: int) -> None:
        self._check_event(event)
        self.events[event] = self._marked(stream)

    def _cudaEventQuery(self, event: int) -> None:
        self._check_event(event)
        if self.events[event]:
            raise _Failed(Error.not_ready)

    def _cudaEventSynchronize(self, event: int) -> None:
        self._check_event(event)
        _do(self.events[event])

    def _cudaStreamWaitEvent(self, stream: int, event: int, flags: int) -> None:
        self._check_event(event)
        left = self.events[event]
        if left:
            self.put(stream, lambda: _do(left))

    def _cudaEventDestroy(self, event: int) -> None:
        self._check_event(event)
        del self.events[event]

    def _marked(self, stream: int) -> list[Callable[[], None]]:
        """What is on a stream now, as a list that empties as it is done."""
        left = self.queues.pop(stream, [])
        self.queues[stream] = [lambda: _do(left)] if left else []
        return left

    def _check_event(self, event: int) -> None:
        if event not in self.events:
            raise _Failed(Error.invalid_handle)

    def _cudaMallocAsync(self, size: int, stream: int) -> int:
        memory = ctypes.create_string_buffer(size + ALIGNMENT)
        address = -(-ctypes.addressof(memory) // ALIGNMENT) * ALIGNMENT
        self.live[address] = memory
        return address

    def _cudaFreeAsync(self, pointer: int, stream: int) -> None:
        memory = self.live.pop(pointer)
        self._freed.append(memory)
        self.put(stream, lambda: ctypes.memset(memory, 255, len(memory)))

    def _cudaMemcpyAsync(self, target: int, source: int, size: int, kind: int, stream: int) -> None:
        self.put(stream, lambda: ctypes.memmove(target, source, size))

    def _cudaStreamBeginCapture(self, stream: int, mode: int) -> None:
        if stream in (0, 1, 2) or stream in self.captures:
            raise _Failed(Error.capture_unsupported)
        self.captures[stream] = []

    def _cudaStreamEndCapture(self, stream: int) -> int:
        return self._new_graph(self.captures.pop(stream))

    def _new_graph(self, work: list[Callable[[], None]]) -> int:
        self._graphs += 1
        self.graphs[self._graphs] = work
        return self._graphs

    def _graph(self, graph: int) -> list[Callable[[], None]]:
        if graph not in self.graphs:
            raise _Failed(Error.invalid_handle)
        return self.graphs[graph]

    def _cudaGraphInstantiate(self, graph: int, flags: int) -> int:
        return self._new_graph(list(self._graph(graph)))

    def _cudaGraphLaunch(self, graph: int, stream: int) -> None:
        for work in self._graph(graph):
            self.put(stream, work)

    def _cudaGraphDestroy(self, graph: int) -> None:
        self._graph(graph)
        del self.graphs[graph]

    _cudaGraphExecDestroy = _cudaGraphDestroy

    def put_graph_work(self, stream: int, addresses: dict[str, int], work: Callable[[], Any]) -> None:
        """`put`; work that is captured fails where memory that it has the addresses of was given back since."""
        if stream not in self.captures:
            self.put(stream, work)
            return
        used = {a: self.live.get(a) for a in addresses.values()}

        def checked() -> None:
            assert all(self.live.get(a) is m for a, m in used.items()), "a graph runs in memory that was given back"
            work()

        self.put(stream, checked)

    def put(self, stream: int, work: Callable[[], Any]) -> None:
        """Enqueue work, or note it where the stream is being captured."""
        with self._lock:
            self._put(stream, work)

    def _put(self, stream: int, work: Callable[[], Any]) -> None:
        if stream in self.captures:
            self.captures[stream].append(work)
            return
        stream = 0 if stream == 1 else stream
        for other in self.blocking if stream == 0 else {0} if stream in self.blocking else ():
            if self.queues.get(other):
                left = self._marked(other)
                self.queues.setdefault(stream, []).append(lambda left=left: _do(left))  # type: ignore[misc]
        self.queues.setdefault(stream, []).append(work)

    def drain(self, stream: int) -> None:
        """Do what is on a stream."""
        with self._lock:
            _do(self.queues.get(0 if stream == 1 else stream, []))

    def finish(self) -> None:
        """Do all there is to do, as a GPU does at some time."""
        for stream in list(self.queues):
            self.drain(stream)


def _do(works: list[Callable[[], None]]) -> None:
    while works:
        works.pop(0)()


class Severity(enum.IntEnum):
    """ILogger.Severity."""

    INTERNAL_ERROR = 0
    ERROR = 1
    WARNING = 2
    INFO = 3
    VERBOSE = 4


class ILogger:
    """The base class of loggers."""

    Severity = Severity

    def log(self, severity: Severity, message: str) -> None:
        raise NotImplementedError


class Allocation(enum.Enum):
    """ExecutionContextAllocationStrategy."""

    STATIC = 0
    USER_MANAGED = 2


class GraphStrategy(enum.Enum):
    """CudaGraphStrategy."""

    DISABLED = 0
    WHOLE_GRAPH_CAPTURE = 1


class Location(enum.Enum):
    """TensorLocation."""

    DEVICE = 0
    HOST = 1


class IOutputAllocator:
    """The base class of output allocators, which wants its own __init__ called."""

    def __init__(self) -> None:
        self.made = True


class Context:
    """IExecutionContext: checks what it is given, and computes when it is enqueued.

    A new one runs by the first profile; work that switches to another one waits in a stream like any other, and shapes
    are to be set again. An output of open shape needs an allocator. Its run is waited for until the shape is known,
    within the call, so it cannot be captured.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.memory: tuple[int, int] | None = None
        self.sized = 0
        self.allocators: dict[str, weakref.ref[IOutputAllocator]] = {}
        self.streams: list[int] = []
        self.devices: list[int] = []
        self.chosen = self.active = 0

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        if not 0 <= profile_index < len(self.engine.profiles):
            return False
        self.chosen = profile_index
        self.shapes.clear()
        self.engine.cuda.put(stream_handle, lambda: setattr(self, "active", profile_index))
        return True

    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        self.shapes[name] = tuple(shape)
        if not self.engine.profiles:
            return True
        least, most = self.engine.profiles[self.chosen]
        return least <= shape[0] <= most

    def infer_shapes(self) -> list[str]:
        if self.engine.uninferable:
            raise RuntimeError(self.engine.uninferable)
        return []

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self.engine.shape_of(name, self.shapes)

    def update_device_memory_size_for_shapes(self) -> int:
        self.sized = max(self.engine.scratch, 1)
        return self.engine.scratch

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self.addresses[name] = memory
        return name in self.engine.tensors and bool(memory) and memory % ALIGNMENT == 0

    def set_output_allocator(self, name: str, output_allocator: IOutputAllocator | None) -> bool:
        if not isinstance(output_allocator, IOutputAllocator) or not hasattr(output_allocator, "made"):
            raise TypeError("set_output_allocator(): incompatible function arguments")
        if name not in self.engine.outputs:
            return False
        self.allocators[name] = weakref.ref(output_allocator)  # the library holds no reference
        return True

    def set_device_memory(self, memory: int, size: int) -> None:
        assert size >= self.engine.device_memory_size_v2, "less scratch memory than the largest shapes need"
        self.memory = (memory, size)

    @property
    def device_memory(self) -> int:
        return self.memory[0] if self.memory else 0

    @device_memory.setter
    def device_memory(self, memory: int) -> None:
        assert self.sized, "the size for the shapes was not asked for"
        self.memory = (memory, self.sized)

    def execute_async_v3(self, stream_handle: int) -> bool:
        stream = stream_handle
        self.streams.append(stream)
        if self.engine.broken:
            self.engine.logger.log(Severity.ERROR, self.engine.broken)
            return False
        assert self.active == self.chosen, "the profile is still being switched"
        assert set(self.addresses) | set(self.allocators) == set(self.engine.tensors)
        assert all(a and a % ALIGNMENT == 0 for a in self.addresses.values())
        assert self.memory is not None or not self.engine.device_memory_size_v2
        assert self.memory is None or self.memory[0] in self.engine.cuda.live
        self.devices.append(self.engine.cuda.device)
        addresses = dict(self.addresses)
        if not self.allocators:
            self.engine.cuda.put_graph_work(stream, addresses, lambda: self.engine.compute(addresses, self.shapes))
            return True
        if self.engine.cuda.captures:
            self.engine.logger.log(Severity.ERROR, "a run with shapes that depend on data cannot be captured")
            return False
        self.engine.cuda.drain(stream)
        return self._run_open(stream, addresses)

    def _run_open(self, stream: int, addresses: dict[str, int]) -> bool:
        results = dict(zip(self.engine.outputs, self.engine.results(addresses, self.shapes), strict=True))
        for name, kept in self.allocators.items():
            allocator, r = kept(), np.asarray(results[name])
            assert allocator is not None, "the allocator is gone"
            wanted = max(r.nbytes, self.engine.asks)
            address = allocator.reallocate_output_async(name, None, wanted, ALIGNMENT, stream)  # type: ignore[attr-defined]
            if not address:
                self.engine.logger.log(Severity.ERROR, f"the allocator gave no memory for {name}")
                return False
            assert address % ALIGNMENT == 0
            assert len(self.engine.cuda.live[address]) >= wanted
            self.engine.cuda.put(stream, lambda a=address, r=r: _at(a, r.shape, r.dtype).__setitem__(..., r))
            if not self.engine.is_silent:
                allocator.notify_shape(name, r.shape)  # type: ignore[attr-defined]
        for name, p in self.engine.outputs.items():
            if name not in self.allocators:
                _at(addresses[name], p.shape, p.dtype)[...] = results[name]
        return True


class RuntimeCache:
    """IRuntimeCache that has compiled something once a context was made with it, and takes its own bytes alone."""

    def __init__(self) -> None:
        self.kernels = b""

    def deserialize(self, blob: bytes) -> bool:
        if blob.startswith(b"kernels"):
            self.kernels = blob
        return bool(self.kernels)

    def serialize(self) -> bytes:
        return self.kernels


class RuntimeConfig:
    """IRuntimeConfig."""

    cuda_graph_strategy: GraphStrategy | None = None

    def __init__(self) -> None:
        self.strategy: Allocation | None = None
        self.cache: RuntimeCache | None = None

    def set_execution_context_allocation_strategy(self, strategy: Allocation) -> None:
        self.strategy = strategy

    def create_runtime_cache(self) -> RuntimeCache:
        return RuntimeCache()

    def set_runtime_cache(self, cache: RuntimeCache) -> bool:
        self.cache = cache
        return True


class Engine:
    """ICudaEngine of a function of NumPy arrays. largest: of the first dimension, None for static shapes. profiles:
    least and largest of each, of which there is one unless they are set.
    """

    def __init__(
        self,
        cuda: Cuda,
        function: Callable[..., Sequence[np.ndarray]],
        inputs: Sequence[Parameter],
        outputs: Sequence[Parameter],
        largest: int | None = None,
        scratch: int = 64,
    ) -> None:
        self.cuda = cuda
        self.function = function
        self.inputs = {p.name: p for p in inputs}
        self.outputs = {p.name: p for p in outputs}
        self.largest = largest
        self.profiles = [] if largest is None else [(1, largest)]
        self.scratch = scratch
        self.device_memory_size_v2 = scratch
        self.tensors = [*self.inputs, *self.outputs]
        self.locations: dict[str, Location] = {}
        self.broken = ""
        self.asks = 0  # bytes that it asks of an output allocator at least, as for an upper bound
        self.is_silent = False  # it tells no shapes
        self.uninferable = ""
        self.compiled = 0
        self.logger: Any = None
        self.contexts: list[Context] = []
        self.runtime_config: Any = None

    @property
    def num_io_tensors(self) -> int:
        return len(self.tensors)

    def get_tensor_name(self, index: int) -> str:
        return self.tensors[index]

    def get_tensor_location(self, name: str) -> Location:
        return self.locations.get(name, Location.DEVICE)

    def create_execution_context(self, strategy: Any) -> Context:
        how = self.runtime_config = strategy
        if isinstance(how, RuntimeConfig) and how.cache is not None and not how.cache.kernels:
            self.compiled += 1
            how.cache.kernels = f"kernels {self.compiled}".encode()
        made = Context(self)
        self.contexts.append(made)
        return made

    def create_engine_inspector(self) -> Any:
        return SimpleNamespace(get_engine_information=lambda format: "layers of the stand-in")

    def create_runtime_config(self) -> RuntimeConfig:
        return RuntimeConfig()

    def shape_of(self, name: str, shapes: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
        shape = tuple(-1 if d is None else int(d) for d in {**self.inputs, **self.outputs}[name].dims)
        return shape if self.largest is None else (next(iter(shapes.values()))[0], *shape[1:])

    def results(self, addresses: dict[str, int], shapes: dict[str, tuple[int, ...]]) -> Sequence[np.ndarray]:
        return self.function(*(_at(addresses[n], shapes[n], p.dtype) for n, p in self.inputs.items() if n in addresses))

    def compute(self, addresses: dict[str, int], shapes: dict[str, tuple[int, ...]]) -> None:
        for (name, p), r in zip(self.outputs.items(), self.results(addresses, shapes), strict=True):
            _at(addresses[name], self.shape_of(name, shapes), p.dtype)[...] = r


class Runtime:
    """IRuntime that gives the engine of the module's `engine`."""

    def __init__(self, logger: Any) -> None:
        self.logger = logger

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> Any:
        found = MODULE.engines.get(serialized_engine)
        if found is None:
            self.logger.log(Severity.ERROR, "magicTag does not match")
        else:
            found.logger = self.logger
        return found


MODULE = SimpleNamespace(
    LayerInformationFormat=SimpleNamespace(ONELINE=0),
    __version__="10.9.0.34",
    ILogger=ILogger,
    Runtime=Runtime,
    ExecutionContextAllocationStrategy=Allocation,
    CudaGraphStrategy=GraphStrategy,
    IOutputAllocator=IOutputAllocator,
    engines={},
)
"""A module like `tensorrt`, as far as running goes. engines: serialized bytes -> the engine they become."""


def _at(pointer: int, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = (ctypes.c_char * size).from_address(pointer)
    return np.frombuffer(memory, np.uint8).view(dtype).reshape(tuple(shape))

"""Session: an execution context of one thread and what is bound to it; runs that nobody waited for; recorded runs."""

from __future__ import annotations

import collections
import contextlib
import logging
import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from xrt_core.engine.contract import InputOutputAlias, Parameter
from xrt_core.errors import ExecutionError
from xrt_tensorrt import _cuda
from xrt_tensorrt.engine import BuiltEngine
from xrt_tensorrt.kernels_cache import KernelsCache
from xrt_tensorrt.memory import (
    Storage,
    address_of,
    bytes_of,
    fits,
    is_aligned,
    new_array,
    overlap,
    own_stream,
    pointer_of,
    scratch,
    storage_of,
)

log = logging.getLogger("xrt.tensorrt")

Into = Mapping[int, tuple[Any, Storage]]
"""By the number of a result: the array of the caller's that it is wanted in (of a recorded run also the input that it
becomes the new content of), and that array's memory."""

_SOLE: Final = 2
"""References to an array that nobody else has: of a local name, and of the question."""


class Session:
    """An execution context of one thread, with what is bound to it.

    A context runs one thing at a time: a run on another stream than the one before waits for that.
    """

    def __init__(
        self,
        built: BuiltEngine,
        engine: Any,
        generation: int,
        params: Sequence[Parameter],
        returns: Sequence[Parameter],
        cuda_graph: bool,
        kernels: KernelsCache | None,
    ) -> None:
        self._flying: collections.deque[tuple[Any, int, list[Any]]] = collections.deque()
        self._events: list[Any] = []
        self.generation = generation
        self._device = built.device
        self._toolkit, self._engine = built.toolkit, engine
        self._params = params
        self._returns = returns
        self._manifest = built.manifest
        self._inputs = built.manifest.inputs
        self._outputs = built.manifest.outputs
        self._graph: Recorded | None = None
        # TensorRT-RTX records by itself; a run that asks for memory on the way cannot be recorded
        self._records = cuda_graph and not built.toolkit.is_rtx and not any(p.is_open for p in returns)
        self._known = built.toolkit.tensors(engine)
        self._kernels = self._unkept = kernels
        self._context: Any = built.toolkit.new_context(engine, cuda_graph=cuda_graph, kernels=kernels)
        self._choose_profile()
        for name, p in zip(self._inputs, params, strict=True):
            if name in self._known and not self._context.set_input_shape(name, p.shape):
                raise ExecutionError(
                    f"tensorrt: input {name!r} of shape {list(p.shape)} is outside the engine's profile"
                )
        try:
            unknown = self._context.infer_shapes()
        except RuntimeError as e:  # the binding's word for failing otherwise
            raise ExecutionError(f"tensorrt: the engine's shapes cannot be inferred: {e}") from e
        if unknown:
            raise ExecutionError(f"tensorrt: {', '.join(unknown)} must be given before the engine can run")
        self._check_outputs()
        self._open = {
            i: built.toolkit.opened(self._context, name)
            for i, (name, p) in enumerate(zip(self._outputs, returns, strict=True))
            if p.is_open
        }
        self._scratch_bytes = built.toolkit.scratch_bytes(engine, self._context)
        self._bound: dict[str, int] = {}
        self._memory: _cuda.DeviceArray | None = None
        self._nothing: _cuda.DeviceArray | None = None
        self._variables: dict[int, _Variable] = {}  # by the number of the result

    def _choose_profile(self) -> None:
        """Let the context run by the profile that holds this batch, if the engine has several. What that copies is
        waited for, as runs may come on any stream."""
        if len(self._manifest.profiles) < 2:
            return
        batch = self._params[0].shape[0]
        number = self._manifest.profile_for(batch)
        if number is None:
            shown = ", ".join(f"{least} to {most}" for least, _, most in self._manifest.profiles)
            raise ExecutionError(f"tensorrt: batch {batch} is outside the engine's profiles ({shown})")
        if number:  # a new context runs by the first
            stream = own_stream(self._device)
            self._toolkit.use_profile(self._context, number, stream)
            _cuda.synchronize(stream)

    def _check_outputs(self) -> None:
        for name, p in zip(self._outputs, self._returns, strict=True):
            shape = tuple(self._context.get_tensor_shape(name))
            if shape != tuple(-1 if d is None else d for d in p.dims):  # only the run tells
                raise ExecutionError(f"tensorrt: output {name!r} would have shape {list(shape)}, expected {p.type}")

    def run(
        self,
        inputs: Sequence[Any],
        stream: int,
        block_until_done: bool,
        aliases: Sequence[InputOutputAlias] = (),
        wanted: Sequence[Any] = (),
    ) -> list[Any]:
        """Put one run on a stream; the results are there when the stream has come so far, or at once.

        aliases: results that are the new contents of inputs, which nobody uses any more. wanted: arrays that results
        are wanted in, as `RunOptions.results` has them.
        """
        self._settle(stream)
        held: list[Any] = []
        try:
            work = self._replayed if self._records else self._enqueued
            into = self._into(wanted, {a.output for a in aliases})
            results = work(inputs, stream, held, aliases, into)
        except BaseException:
            with contextlib.suppress(ExecutionError):
                self._note(stream, held)  # some of it may be on the stream
            raise
        if block_until_done:
            _cuda.synchronize(stream)
            self._landed(len(self._flying))
        else:
            self._note(stream, held)
        if self._unkept is not None:  # the first run compiled what was not compiled yet
            self._unkept.keep()
            self._unkept = None
        return results

    def _into(self, wanted: Sequence[Any], updated: set[int]) -> dict[int, tuple[Any, Storage]]:
        """The arrays that results are wanted in, of those that can be written to on this device, with their memory."""
        found: dict[int, tuple[Any, Storage]] = {}
        for i, (x, p) in enumerate(zip(wanted, self._returns, strict=False)):
            if x is not None and i not in updated and not p.is_open and fits(x, p):
                storage = storage_of(x, p, self._device)
                if storage is not None and not any(overlap(storage, s) for _, s in found.values()):
                    found[i] = (x, storage)
        return found

    def _enqueued(
        self, inputs: Sequence[Any], stream: int, held: list[Any], aliases: Sequence[InputOutputAlias], into: Into
    ) -> list[Any]:
        before = {a.output: inputs[a.input] for a in aliases}
        read = []
        for name, p, x in zip(self._inputs, self._params, inputs, strict=True):
            pointer = address_of(x, p, stream, held)
            read.append(Storage(pointer, bytes_of(p), None))
            self._bind(name, pointer, stream)
        results: list[Any] = []
        late: dict[int, Storage] = {}  # what is copied into the caller's array after the run
        for i, (name, p) in enumerate(zip(self._outputs, self._returns, strict=True)):
            x, place = into.get(i, (None, None))
            if i in self._open:
                self._open[i].begin(stream)
                results.append(None)
                continue
            if place is not None and is_aligned(place.pointer) and not any(overlap(place, s) for s in read):
                place.wait(stream)
                held.append(x)
                self._bind(name, place.pointer, stream)
                results.append(x)
                continue
            if place is not None:
                late[i] = place
            results.append(self._next(i, p, before[i], stream) if i in before else new_array(p, stream, self._device))
            self._bind(name, pointer_of(results[i]), stream)
        if self._scratch_bytes:
            self._use(scratch(self._device, stream, self._scratch_bytes))
        self._enqueue(stream)
        for i, opened in self._open.items():
            results[i] = opened.result(self._returns[i], stream, self._device)
        for i, (x, place) in into.items():
            if i in late:
                held.append(results[i])
                place.write(pointer_of(results[i]), stream)
                results[i] = x
            else:
                place.release(stream)
        for i, x in before.items():
            known = self._variables.get(i)
            spare = None
            if known is not None and known.last() is x and known.stream == stream:
                spare = x  # what runs on this stream next comes after this run has read it
                held[:] = [h for h in held if h is not x]
            self._variables[i] = _Variable(weakref.ref(results[i]), spare, stream)
        return results

    def _enqueue(self, stream: int) -> None:
        """Put the context's run on a stream. Raises ExecutionError with what an allocator met, or TensorRT's words."""
        try:
            self._toolkit.enqueue(self._context, stream)
        except ExecutionError as e:
            cause = next((o.error for o in self._open.values() if o.error is not None), None)
            raise (e if cause is None else cause) from e

    def _next(self, i: int, p: Parameter, x: Any, stream: int) -> Any:
        """The array for the next content of a variable whose content `x` is: that of the one before, where nobody else
        has it, else a new one."""
        known = self._variables.get(i)
        if known is not None and known.last() is x and known.stream == stream:
            spare, known.spare = known.spare, None
            if spare is not None and sys.getrefcount(spare) <= _SOLE:
                return spare
        return new_array(p, stream, self._device)

    def _replayed(
        self, inputs: Sequence[Any], stream: int, held: list[Any], aliases: Sequence[InputOutputAlias], into: Into
    ) -> list[Any]:
        """As `_enqueued`, through a recorded graph over memory of its own."""
        found = ((a, storage_of(inputs[a.input], self._params[a.input], self._device)) for a in aliases)
        updated = {a.output: (inputs[a.input], storage) for a, storage in found if storage is not None}
        into = {**into, **updated}
        graph = self._graph
        if graph is None:
            graph = Recorded(self._params, self._returns, self._scratch_bytes, stream, self._device)
            for name, a in zip((*self._inputs, *self._outputs), graph.arrays, strict=True):
                self._bind(name, a.pointer, stream)
            self._use(graph.memory)
            graph.fill(inputs, stream, held)
            self._toolkit.enqueue(self._context, stream)  # what is set up at a first run must not be recorded
            _cuda.synchronize(stream)
            try:
                graph.keep(_cuda.capture(lambda s: self._toolkit.enqueue(self._context, s)))
            except ExecutionError as e:
                log.info("a run cannot be recorded and replayed: %s", e)
                self._records = False
                held.append(graph)
            else:
                self._graph = graph
        else:
            graph.fill(inputs, stream, held)
            graph.replay(stream)
        return graph.results(stream, into)

    def _bind(self, name: str, pointer: int, stream: int) -> None:
        if name not in self._known:  # an input that nothing reads
            return
        if not pointer:  # an array without elements may lie nowhere, a bound tensor may not
            if self._nothing is None:
                self._nothing = _cuda.DeviceArray(np.dtype(np.uint8), (1,), stream)
            pointer = self._nothing.pointer
        if self._bound.get(name) != pointer:
            if not self._context.set_tensor_address(name, pointer):
                raise ExecutionError(f"tensorrt: {name!r} cannot be bound to the address {pointer:#x}")
            self._bound[name] = pointer

    def _use(self, memory: _cuda.DeviceArray) -> None:
        """Run in this scratch memory, and hold it until another takes its place."""
        if memory is not self._memory:
            if self._scratch_bytes:
                self._toolkit.give_scratch(self._engine, self._context, memory.pointer, self._scratch_bytes)
            self._memory = memory

    # --- runs that nobody waited for -------------------------------------------------------------------------------

    def _settle(self, stream: int) -> None:
        """Let go of what earlier runs needed, and let `stream` wait for the last of them where that is on another."""
        while self._flying and _cuda.is_past(self._flying[0][0]):
            self._landed(1)
        if self._flying:
            event, other, _ = self._flying[-1]
            if other != stream:
                _cuda.wait_event(stream, event)

    def _note(self, stream: int, held: list[Any]) -> None:
        """Keep what is not given back in the order of `stream`, until what is on it now is done."""
        event = self._events.pop() if self._events else _cuda.new_event()
        _cuda.record(event, stream)
        kept = [x for x in held if not (isinstance(x, _cuda.DeviceArray) and x.stream == stream)]
        self._flying.append((event, stream, kept))

    def _landed(self, count: int) -> None:
        for _ in range(count):
            self._events.append(self._flying.popleft()[0])

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        with contextlib.suppress(ExecutionError):  # after an error of the device, nothing runs there any more
            if self._flying:  # a context must outlive what it runs
                _cuda.synchronize_event(self._flying[-1][0])
        self._context = self._engine = None  # before the cache of its kernels, and in this order
        with contextlib.suppress(ExecutionError):
            for event in (*self._events, *(f[0] for f in self._flying)):
                _cuda.forget_event(event)


class _Variable:
    """An updated variable: two arrays that swap roles from run to run.

    last: the result of the last run, which is its content. spare: its content before, which nothing reads any more.
    stream: on which both are used.
    """

    __slots__ = ("last", "spare", "stream")

    def __init__(self, last: weakref.ref[Any], spare: Any, stream: int) -> None:
        self.last, self.spare, self.stream = last, spare, stream


class Recorded:
    """A recorded run and the memory that it reads and writes, its scratch memory too: a graph holds addresses."""

    def __init__(
        self, params: Sequence[Parameter], returns: Sequence[Parameter], scratch_bytes: int, stream: int, device: int
    ) -> None:
        self._params, self._device = params, device
        self._returns = returns
        self.arrays = [_cuda.DeviceArray(p.dtype, p.shape, stream) for p in (*params, *returns)]
        self.memory = _cuda.DeviceArray(np.dtype(np.uint8), (scratch_bytes,), stream)
        self._graph: Any = None

    def keep(self, graph: Any) -> None:
        """Replay this from now on."""
        self._graph = graph

    def fill(self, inputs: Sequence[Any], stream: int, held: list[Any]) -> None:
        """Copy the inputs to where the graph reads them. held: as in `address_of`."""
        for a, p, x in zip(self.arrays, self._params, inputs, strict=False):
            if isinstance(x, np.ndarray):
                host = np.ascontiguousarray(x)
                held.append(host)
                _cuda.copy(a.pointer, host.ctypes.data, a.nbytes, stream)
            else:
                _cuda.copy(a.pointer, address_of(x, p, stream, held), a.nbytes, stream)

    def replay(self, stream: int) -> None:
        """Run the graph."""
        _cuda.replay(self._graph, stream)

    def results(self, stream: int, into: Into) -> list[Any]:
        """The results, in memory of their own or that of inputs: the next replay writes over the graph's."""
        made = []
        for i, (a, p) in enumerate(zip(self.arrays[len(self._params) :], self._returns, strict=True)):
            if i in into:
                x, storage = into[i]
                storage.write(a.pointer, stream)
                made.append(x)
                continue
            r = new_array(p, stream, self._device)
            _cuda.copy(pointer_of(r), a.pointer, a.nbytes, stream)
            made.append(r)
        return made

    def __del__(self) -> None:
        if self._graph is not None and not sys.is_finalizing():
            try:
                _cuda.forget(self._graph)
            except ExecutionError:  # the context is gone, and the graph with it
                return

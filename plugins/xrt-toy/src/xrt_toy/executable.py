"""ToyExecutable: an ordered list of function codes and the buffers they work on, run on a CUDA stream."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xrt_core.engine.contract import DEFAULT_RUN_OPTIONS, Executable, Parameter, RunOptions
from xrt_core.errors import ExecutionError
from xrt_core.ir.types import dtype_name
from xrt_toy import _toolkit


class Slot(int):
    """The index of a buffer, among the arguments of a function code."""


@dataclass(frozen=True, slots=True)
class FunctionCode:
    """One kernel launch. arguments: a Slot stands for the flat array in that buffer, everything else for itself.

    The kernel writes into the first argument. pointwise: positions of those that may be the same array, because each
    thread reads of them only the elements that it writes, and reads them first.
    """

    node: str
    kernel: Callable[..., None]
    grid: int
    block: int | tuple[int, int]
    shared: int
    arguments: tuple[Any, ...]
    pointwise: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Temporary:
    """A buffer that lives for a part of a run only: `size` elements from byte `offset` of the arena on."""

    dtype: np.dtype
    size: int
    offset: int


@dataclass(frozen=True, slots=True)
class Program:
    """What the compiler makes: buffers are numbered entries first, then constants, temporaries and returns.

    updates: for each return the entry in whose storage it is computed, or None where it has a buffer of its own.
    """

    entries: tuple[Parameter, ...]
    constants: tuple[np.ndarray, ...]
    temporaries: tuple[Temporary, ...]
    returns: tuple[Parameter, ...]
    updates: tuple[int | None, ...]
    codes: tuple[FunctionCode, ...]
    arena: int

    def dtypes(self) -> list[np.dtype]:
        """Element dtype of every buffer."""
        own = [r for r, entry in zip(self.returns, self.updates, strict=True) if entry is None]
        return [b.dtype for group in (self.entries, self.constants, self.temporaries, own) for b in group]

    def __str__(self) -> str:
        lines = [
            f"{code.node}: {code.kernel.__qualname__}[{code.grid}, {code.block}]"
            f"({', '.join(f'%{int(a)}' if isinstance(a, Slot) else str(a) for a in code.arguments)})"
            for code in self.codes
        ]
        counts = f"{len(self.entries)} entries, {len(self.constants)} constants, {len(self.temporaries)} temporaries"
        updates = [f"return {i} in entry {entry}" for i, entry in enumerate(self.updates) if entry is not None]
        returns = ", ".join([f"{len(self.returns)} returns", *updates])
        return "\n".join([f"{counts} in {self.arena} bytes, {returns}", *lines])


class ToyExecutable(Executable):
    """Runs a Program. Any number of threads may call it: each call in flight has an arena of its own from a pool.

    Inputs on the device are read where they are; results are numba's device arrays, fresh for each call, which CuPy,
    torch and others read through `__cuda_array_interface__` without a copy, and NumPy with one. What a run that nobody
    waits for reads is held until it is done: its owners do not know that it is still read.
    """

    def __init__(self, program: Program, device: int) -> None:
        self._program, self._device = program, device
        self._updated = frozenset(entry for entry in program.updates if entry is not None)
        self._proven = False  # whether a run has succeeded
        self._pool: dict[int | None, list[list[Any]]] = {}  # stream -> temporaries of calls that are enqueued
        self._lock = threading.Lock()
        self._flying: list[tuple[Any, Any]] = []  # an event behind each run that nobody waited for, and what it reads
        with _toolkit.on_device(device):
            self._stream = _toolkit.stream_of(None)
            self._constants = [_toolkit.upload(c, self._stream) for c in program.constants]
            self._stream.synchronize()

    def run(
        self, inputs: Sequence[Any], run_options: RunOptions = DEFAULT_RUN_OPTIONS, block_until_done: bool = True
    ) -> Sequence[Any]:
        """Run once: enqueue every function code on the stream, and wait for the stream if asked to.

        inputs: NumPy arrays, or contiguous arrays on the device. An input that is aliased, on the device and donated is
        updated in place and comes back as the result. Raises ExecutionError.
        """
        try:
            with _toolkit.on_device(self._device):
                return self._run(inputs, run_options, block_until_done)
        except ExecutionError:
            raise
        except Exception as e:
            raise ExecutionError(f"toy: {type(e).__name__}: {e}") from e

    def _run(self, inputs: Sequence[Any], run_options: RunOptions, block_until_done: bool) -> list[Any]:
        program, handle = self._program, run_options.stream
        caller: Any = None
        if handle == _toolkit.PER_THREAD:  # no name by which another thread's run could be told from this one's
            caller, handle = _toolkit.stream_of(handle), None
        stream = self._stream if handle is None else _toolkit.stream_of(handle)
        _toolkit.order(stream, caller)
        given = [_toolkit.as_device_array(x, stream) for x in inputs]
        self._check(inputs, given)
        taken = self._updated_in_place(inputs, given, run_options)
        # Kernels are compiled at their first launch, and a failure must leave the inputs as they were: until a run has
        # succeeded, updates are computed in copies, which are brought in as the last step.
        writable = taken if self._proven else frozenset()
        entries = [
            _toolkit.copied(_toolkit.host_array(x) if g is None else g, stream) if i in self._updated - writable
            else _toolkit.upload(_toolkit.host_array(x), stream) if g is None
            else g
            for i, (x, g) in enumerate(zip(inputs, given, strict=True))
        ]  # fmt: skip
        results = [
            _toolkit.empty(p.shape, p.dtype, stream) if i is None else entries[i]
            for i, p in zip(program.updates, program.returns, strict=True)
        ]
        temporaries = self._take(handle, stream)
        buffers = [
            *(e.reshape(-1) for e in entries),
            *self._constants,
            *temporaries,
            *(r.reshape(-1) for r, i in zip(results, program.updates, strict=True) if i is None),
        ]
        try:
            self._launch(buffers, stream)
        except ExecutionError:
            with contextlib.suppress(Exception):  # kernels that were launched before still read
                self._hold(stream, (inputs, given, entries, buffers))
            raise
        for output, i in enumerate(program.updates):
            if i in taken:
                if i not in writable:
                    given[i].reshape(-1).copy_to_device(entries[i].reshape(-1), stream=stream)
                results[output] = given[i]
                _toolkit.order(getattr(given[i], "stream", 0) or stream, stream)  # its owner goes on after this
        self._proven = True
        with self._lock:  # the next call on this stream comes after this one, so it may have the same memory
            self._pool.setdefault(handle, []).append(temporaries)
        _toolkit.order(caller or stream, stream)
        if block_until_done:
            stream.synchronize()
        else:
            self._hold(stream, (inputs, given, entries))
        return results

    def _launch(self, buffers: Sequence[Any], stream: Any) -> None:
        for code in self._program.codes:
            arguments = [buffers[a] if type(a) is Slot else a for a in code.arguments]
            try:
                _toolkit.launch(code.kernel, code.grid, code.block, code.shared, stream, arguments)
            except Exception as e:
                raise ExecutionError(f"toy: {code.node} failed: {type(e).__name__}: {e}") from e

    def _hold(self, stream: Any, arrays: Any) -> None:
        """Keep arrays until what is on the stream now is done; let go of those of runs that are."""
        event = _toolkit.mark(stream)
        with self._lock:
            self._flying = [f for f in self._flying if not _toolkit.is_past(f[0])]
            if event is not None:
                self._flying.append((event, arrays))

    def __del__(self) -> None:
        for event, _ in getattr(self, "_flying", ()) if not sys.is_finalizing() else ():
            with contextlib.suppress(Exception):  # after an error of the device nothing runs there any more
                _toolkit.wait_for(event)

    def _updated_in_place(self, inputs: Sequence[Any], given: Sequence[Any], run_options: RunOptions) -> frozenset[int]:
        """Indices of the inputs that this call updates: donated, on the device, and no constant nor another input."""
        return frozenset(
            i
            for i in self._updated
            if run_options.donate
            and given[i] is not None
            and _toolkit.may_change(inputs[i])
            and sum(x is inputs[i] for x in inputs) == 1
        )

    def _take(self, handle: int | None, stream: Any) -> list[Any]:
        """Temporary buffers that no call on another stream and no unfinished one on this stream has."""
        with self._lock:
            free = self._pool.get(handle)
            if free:
                return free.pop()
        arena = _toolkit.empty(self._program.arena, np.dtype(np.uint8), stream)
        return [arena[t.offset : t.offset + t.size * t.dtype.itemsize].view(t.dtype) for t in self._program.temporaries]

    def _check(self, inputs: Sequence[Any], given: Sequence[Any]) -> None:
        entries = self._program.entries
        if len(inputs) != len(entries):
            raise ExecutionError(f"toy: the executable takes {len(entries)} inputs, {len(inputs)} were given")
        for p, x, g in zip(entries, inputs, given, strict=True):
            x = x if g is None else g
            dtype, shape = getattr(x, "dtype", None), getattr(x, "shape", None)
            if dtype != p.dtype or shape is None or tuple(shape) != p.shape:
                got = f"{dtype_name(np.dtype(dtype))}{list(shape)}" if dtype and shape is not None else type(x).__name__
                raise ExecutionError(f"toy: input {p.name!r} must be {p.type}, {got} was given")

    def as_text(self) -> str:
        """Buffers and launches, a line each."""
        return str(self._program)

    def __repr__(self) -> str:
        p = self._program
        return f"<ToyExecutable: {len(p.entries)} in, {len(p.codes)} launches, {len(p.returns)} out>"

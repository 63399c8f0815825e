"""ToyExecutable: an ordered list of function codes and the buffers they work on, run on a CUDA stream."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xrt_core.engine.contract import DEFAULT_RUN_OPTIONS, Executable, InputOutputAlias, Parameter, RunOptions
from xrt_core.errors import ExecutionError
from xrt_core.ir.types import dtype_name
from xrt_toy import _toolkit


class Slot(int):
    """The index of a buffer, among the arguments of a function code."""


@dataclass(frozen=True, slots=True)
class FunctionCode:
    """One kernel launch. arguments: a Slot stands for the flat array in that buffer, everything else for itself."""

    node: str
    kernel: Callable[..., None]
    grid: int
    block: int | tuple[int, int]
    shared: int
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Temporary:
    """A buffer that lives for a part of a run only: `size` elements from byte `offset` of the arena on."""

    dtype: np.dtype
    size: int
    offset: int


@dataclass(frozen=True, slots=True)
class Program:
    """What the compiler makes: buffers are numbered entries first, then constants, temporaries and returns."""

    entries: tuple[Parameter, ...]
    constants: tuple[np.ndarray, ...]
    temporaries: tuple[Temporary, ...]
    returns: tuple[Parameter, ...]
    codes: tuple[FunctionCode, ...]
    arena: int

    def dtypes(self) -> list[np.dtype]:
        """Element dtype of every buffer."""
        groups = (self.entries, self.constants, self.temporaries, self.returns)
        return [b.dtype for group in groups for b in group]

    def __str__(self) -> str:
        lines = [
            f"{code.node}: {code.kernel.__qualname__}[{code.grid}, {code.block}]"
            f"({', '.join(f'%{int(a)}' if isinstance(a, Slot) else str(a) for a in code.arguments)})"
            for code in self.codes
        ]
        counts = f"{len(self.entries)} entries, {len(self.constants)} constants, {len(self.temporaries)} temporaries"
        return "\n".join([f"{counts} in {self.arena} bytes, {len(self.returns)} returns", *lines])


class ToyExecutable(Executable):
    """Runs a Program. Any number of threads may call it: each call in flight has an arena of its own from a pool.

    Inputs on the device are read where they are; results are numba's device arrays, fresh for each call, which CuPy,
    torch and others read through `__cuda_array_interface__` without a copy, and NumPy with one.
    """

    def __init__(self, program: Program, aliases: Sequence[InputOutputAlias], device: int) -> None:
        self._program, self._aliases, self._device = program, tuple(aliases), device
        self._pool: dict[int | None, list[list[Any]]] = {}  # stream -> temporaries of calls that are enqueued
        self._lock = threading.Lock()
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
        stream = self._stream if handle is None else _toolkit.stream_of(handle)
        given = [_toolkit.as_device_array(x, stream) for x in inputs]
        self._check(inputs, given)
        results = [_toolkit.empty(p.shape, p.dtype, stream) for p in program.returns]
        temporaries = self._take(handle, stream)
        buffers = [
            *(_toolkit.upload(np.asarray(x), stream) if g is None else g.reshape(-1)
              for x, g in zip(inputs, given, strict=True)),
            *self._constants,
            *temporaries,
            *(r.reshape(-1) for r in results),
        ]  # fmt: skip
        for code in program.codes:
            arguments = [buffers[a] if type(a) is Slot else a for a in code.arguments]
            try:
                _toolkit.launch(code.kernel, code.grid, code.block, code.shared, stream, arguments)
            except Exception as e:
                raise ExecutionError(f"toy: {code.node} failed: {type(e).__name__}: {e}") from e
        for alias in self._aliases:
            storage = given[alias.input] if _toolkit.may_change(inputs[alias.input]) else None
            if run_options.donate and storage is not None:  # the last step of all: nobody reads the old value any more
                storage.reshape(-1).copy_to_device(results[alias.output].reshape(-1), stream=stream)
                results[alias.output] = storage
                _toolkit.order(getattr(storage, "stream", 0) or stream, stream)  # its owner goes on after this
        with self._lock:  # the next call on this stream comes after this one, so it may have the same memory
            self._pool.setdefault(handle, []).append(temporaries)
        if block_until_done:
            stream.synchronize()
        return results

    def _take(self, handle: int | None, stream: Any) -> list[Any]:
        """Temporary buffers that no call on another stream and no unfinished one on this stream has."""
        with self._lock:
            free = self._pool.get(handle)
            if free:
                return free.pop()
        arena = _toolkit.empty(self._program.arena, np.dtype(np.uint8), stream)
        return [
            arena[t.offset : t.offset + t.size * t.dtype.itemsize].view(t.dtype) for t in self._program.temporaries
        ]

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

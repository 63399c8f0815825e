"""Opened: an output of an execution context whose shape depends on data, by TensorRT's output allocators."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from xrt_core.engine.contract import Parameter
from xrt_core.errors import ExecutionError
from xrt_tensorrt import _cuda
from xrt_tensorrt.memory import bytes_of, new_array, pointer_of


class Opened:
    """A result whose shape the run determines: what TensorRT asks for its memory, and tells its shape.

    trt: the library's module. The memory is kept from run to run and grows to the most that was asked for; a result is
    a copy of the part that is used. error: what went wrong when memory was asked for, which TensorRT would only call a
    failed allocation.
    """

    def __init__(self, trt: Any) -> None:
        self.allocator = _allocator_class(trt)(self)
        self._memory: _cuda.DeviceArray | None = None
        self._stream = 0
        self._shape: tuple[int, ...] | None = None
        self.error: ExecutionError | None = None

    def begin(self, stream: int) -> None:
        """A run on this stream comes next."""
        self._stream, self._shape, self.error = stream, None, None

    def memory(self, size: int) -> int:
        """The address of so many bytes; 0 where there are not so many, `error` says why."""
        known = self._memory
        if known is None or known.nbytes < size or known.stream != self._stream:  # it goes back in its stream's order
            known = self._memory = None
            try:
                self._memory = _cuda.DeviceArray(np.dtype(np.uint8), (max(size, 1),), self._stream)
            except ExecutionError as e:
                self.error = e
                return 0
        return self._memory.pointer

    def tell(self, shape: Sequence[int]) -> None:
        """The result has this shape."""
        self._shape = tuple(int(n) for n in shape)

    def result(self, p: Parameter, stream: int, device: int) -> Any:
        """The result of the run, in memory of its own. Raises ExecutionError where TensorRT did not tell its shape."""
        if self._shape is None or not p.fits(self._shape):
            told = "no shape" if self._shape is None else f"the shape {list(self._shape)}"
            raise ExecutionError(f"tensorrt: the run told {told} for {p.name!r}, expected {p.type}")
        found = replace(p, dims=self._shape)
        made, nbytes = new_array(found, stream, device), bytes_of(found)
        if nbytes:
            if self._memory is None or self._memory.nbytes < nbytes:
                raise ExecutionError(f"tensorrt: the run asked for less memory than {p.name!r} takes: {nbytes:,} bytes")
            _cuda.copy(pointer_of(made), self._memory.pointer, nbytes, stream)
        return made


def _allocator_class(trt: Any) -> type:
    """The library's IOutputAllocator over an `Opened`. It is called while a run is enqueued, before that returns, and
    must not raise: an exception would cross the library."""

    class Allocator(trt.IOutputAllocator):  # type: ignore[misc]
        def __init__(self, opened: Opened) -> None:
            trt.IOutputAllocator.__init__(self)
            self._opened = weakref.proxy(opened)  # which holds this

        def reallocate_output(self, tensor_name: str, memory: Any, size: int, alignment: int) -> int:
            return int(self._opened.memory(size))

        def reallocate_output_async(self, tensor_name: str, memory: Any, size: int, alignment: int, stream: Any) -> int:
            return int(self._opened.memory(size))

        def notify_shape(self, tensor_name: str, shape: Any) -> None:
            self._opened.tell(shape)

    return Allocator

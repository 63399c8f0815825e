"""NumPy arrays over the memory of other libraries.

They are made by the array interface: https://numpy.org/doc/stable/reference/arrays.interface.html
"""

from __future__ import annotations

from typing import Any

import numpy as np


class _Memory:
    """What NumPy makes an array of. The array keeps it, and with it the owner of the memory."""

    __slots__ = ("__array_interface__", "owner")
    __array_interface__: dict[str, Any]
    owner: Any


def writable_over(array: np.ndarray, owner: Any) -> np.ndarray:
    """The same memory, writable. owner: what it belongs to, which is kept with it."""
    memory, shown = _Memory(), array.__array_interface__
    memory.owner = owner
    memory.__array_interface__ = {**shown, "data": (shown["data"][0], False)}
    return np.asarray(memory)


def array_of_tensor(tensor: Any, typestr: str) -> np.ndarray:
    """The memory of a torch tensor, whose storage may still be resized afterwards.

    `torch.Tensor.numpy` marks the storage as one that cannot be, for good: what frees and refills the memory of
    parameters (`torch.distributed.fsdp`), or resizes a tensor, would fail from then on.

    tensor: on the CPU, dense, with the numbers themselves in its memory (`resolve_conj`, `resolve_neg`). typestr: its
    dtype, as `numpy.dtype.str`. Raises RuntimeError, as torch does, for a tensor without memory.
    """
    place = tensor.data_ptr()
    if not place and tensor.numel():
        raise RuntimeError("this tensor has no memory: it was freed, or the tensor stands for others")
    memory = _Memory()
    memory.owner = tensor
    shown = {"data": (place, False), "shape": tuple(tensor.shape), "typestr": typestr, "version": 3}
    if not tensor.is_contiguous():
        size = tensor.itemsize
        shown["strides"] = tuple([n * size for n in tensor.stride()])
    memory.__array_interface__ = shown
    return np.asarray(memory)

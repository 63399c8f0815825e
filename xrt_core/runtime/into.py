"""Results in arrays of the caller's: which can be written to, and the copy where an engine did not write there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from xrt_core.errors import InputError, nearest
from xrt_core.runtime.arrays import family_of, is_array, to_cupy, to_numpy
from xrt_core.runtime.transfers import to_caller

WRITABLE: Final = ("numpy", "cupy", "torch")
"""Families of arrays that can be written to."""


def wanted_of(results: Mapping[str, Any], names: Sequence[str]) -> tuple[Any, ...]:
    """The arrays that the outputs of these names are wanted in, None for those that are not in `results`.

    Raises InputError for a name that is no output, and for what is no array that can be written to.
    """
    for name, x in results.items():
        if name not in names:
            known = ", ".join(map(repr, names))
            raise InputError(f"results: unknown output {name!r}; the model gives {known}{nearest(name, names)}")
        if not is_array(x) or family_of(type(x)) not in WRITABLE:
            raise InputError(
                f"results[{name!r}] is a {type(x).__name__}, which cannot be written to; give an array of NumPy or "
                "CuPy, or a tensor of torch"
            )
        if isinstance(x, np.ndarray) and not x.flags.writeable:
            raise InputError(f"results[{name!r}] is read-only; give an array that can be written to")
    return tuple(results.get(n) for n in names)


def put(result: Any, x: Any, name: str) -> Any:
    """`x`, with the content of a result. Raises InputError where its dtype or shape is another."""
    if type(x) is np.ndarray and type(result) is np.ndarray and x.shape == result.shape and x.dtype == result.dtype:
        if result is not x:
            np.copyto(x, result)
        return x
    if not is_array(result) or tuple(result.shape) != tuple(x.shape) or _dtype(result) != _dtype(x):
        given = f"{_dtype(result)}{list(result.shape)}" if is_array(result) else f"a {type(result).__name__}"
        raise InputError(f"results[{name!r}] is {_dtype(x)}{list(x.shape)}, the model gives {given} for this signature")
    family = family_of(type(x))
    if family == "numpy":
        if result is not x:
            np.copyto(x, to_numpy(result))
    elif family == "cupy":
        with x.device:
            made = to_cupy(result)
            if made.data.ptr != x.data.ptr:
                x[...] = made
    else:
        made = to_caller("torch", x)(result)
        if made.data_ptr() != x.data_ptr():
            x.detach().copy_(made)
    return x


def _dtype(x: Any) -> str:
    return x.dtype.name if isinstance(x.dtype, np.dtype) else str(x.dtype).rpartition(".")[2]

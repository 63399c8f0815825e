"""Arrays between libraries: which family an array belongs to, and the way to NumPy and back, copying only if needed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from xrt_core.errors import InputError

Converter = Callable[[Any], Any]

_FAMILIES = {"numpy": "numpy", "jax": "jax", "jaxlib": "jax", "cupy": "cupy", "torch": "torch"}
_CONTAINERS = (list, tuple, dict, type(None))


def family_of(array_type: type) -> str:
    """The library an array type belongs to: "numpy", "jax", "cupy", "torch", or "other"."""
    for base in array_type.__mro__:
        found = _FAMILIES.get(base.__module__.partition(".")[0])
        if found is not None:
            return found
    return "other"


def is_array(x: Any) -> bool:
    """Whether `x` is a tensor of some library: it has dtype and shape."""
    return hasattr(x, "dtype") and hasattr(x, "shape")


def to_numpy(x: Any) -> Any:
    """The NumPy array of an array of any family; containers (sequences, maps, None) element by element.

    Without a copy where memory is on the CPU and the library shares it. NumPy arrays of text come as object arrays,
    foreign byte orders as native. Raises InputError for what is not an array.
    """
    if type(x) is np.ndarray:
        kind = x.dtype.kind
        if kind in "US":
            return x.astype(object)
        return x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))
    if isinstance(x, np.ndarray | np.generic):
        return to_numpy(np.asarray(x))
    if isinstance(x, list | tuple):
        return [to_numpy(e) for e in x]
    if isinstance(x, dict):
        return {k: to_numpy(v) if is_array(v) else v for k, v in x.items()}
    if x is None:
        return None
    family = family_of(type(x))
    if family == "jax":
        return np.asarray(x)
    if family == "torch":
        return _numpy_of_torch(x)
    if family == "cupy":
        return x.get()
    if hasattr(x, "__dlpack__"):
        try:
            return np.from_dlpack(x)
        except (BufferError, RuntimeError, TypeError):
            pass  # a dtype or device that NumPy's DLPack does not take; __array__ may
    if hasattr(x, "__array__") and is_array(x):
        return np.asarray(x)
    raise InputError(f"{type(x).__name__} is not an array; give NumPy, JAX, CuPy or torch arrays (np.asarray(x) makes one)")


def _numpy_of_torch(x: Any) -> np.ndarray:
    import ml_dtypes

    x = x.detach()
    if x.device.type != "cpu":
        x = x.cpu()
    name = str(x.dtype).removeprefix("torch.")
    narrow = {"bfloat16": ml_dtypes.bfloat16, "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
              "float8_e5m2": ml_dtypes.float8_e5m2, "float8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
              "float8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz}.get(name)  # fmt: skip
    if narrow is None:
        return x.numpy()  # type: ignore[no-any-return]
    torch = sys.modules["torch"]
    bits = torch.int16 if name == "bfloat16" else torch.uint8
    return x.contiguous().view(bits).numpy().view(narrow)  # type: ignore[no-any-return]


def from_numpy(family: str) -> Converter:
    """The function that takes results (NumPy arrays or an engine's) to a family."""
    return _TO_FAMILY.get(family, to_numpy)


def _to_jax(x: Any) -> Any:
    import jax

    if isinstance(x, jax.Array):
        return x
    x = to_numpy(x)
    return x if not isinstance(x, np.ndarray) or x.dtype == object else _jax_array(x)


def _jax_array(x: np.ndarray) -> Any:
    import jax

    with jax.enable_x64(True):  # keep ONNX's 64-bit dtypes, whatever the caller's configuration
        return jax.device_put(x)


def _to_torch(x: Any) -> Any:
    torch = sys.modules["torch"]
    x = to_numpy(x)
    if not isinstance(x, np.ndarray) or x.dtype == object:
        return x
    bits = {"bfloat16": np.int16, "float8_e4m3fn": np.uint8, "float8_e5m2": np.uint8}.get(x.dtype.name)
    if not x.flags.writeable:
        x = x.copy()  # torch has no read-only tensors
    if bits is not None:
        return torch.from_numpy(x.view(bits)).view(getattr(torch, x.dtype.name))
    return torch.from_numpy(x) if x.ndim or x.flags.owndata else torch.tensor(x)


def _to_cupy(x: Any) -> Any:
    import cupy

    if isinstance(x, cupy.ndarray):
        return x
    if hasattr(x, "__dlpack_device__") and x.__dlpack_device__()[0] == 2:  # kDLCUDA
        return cupy.from_dlpack(x)
    x = to_numpy(x)
    return cupy.asarray(x) if isinstance(x, np.ndarray) and x.dtype != object else x


_TO_FAMILY: dict[str, Converter] = {"numpy": to_numpy, "jax": _to_jax, "torch": _to_torch, "cupy": _to_cupy}

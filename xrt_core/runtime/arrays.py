"""Arrays between libraries: which family an array belongs to, and the way to NumPy and back, copying only if needed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from xrt_core.engine.array_families import library_of
from xrt_core.engine.cuda import cuda_device
from xrt_core.engine.device_kinds import kinds
from xrt_core.errors import InputError

Converter = Callable[[Any], Any]


def family_of(array_type: type) -> str:
    """What an array type belongs to: a library ("numpy", "jax", "cupy", "torch"), a device kind, or "other"."""
    kind = kinds.of_array(array_type)
    return library_of(array_type) if kind is None else kind.name


def is_array(x: Any) -> bool:
    """Whether `x` is a tensor of some library: it has dtype and shape."""
    return hasattr(x, "dtype") and hasattr(x, "shape")


def to_numpy(x: Any) -> Any:
    """The NumPy array of an array of any family; containers (sequences, maps, None) element by element.

    Without a copy where memory is on the CPU and the library shares it. NumPy arrays of text come as object arrays,
    foreign byte orders as native. Raises InputError for what is not an array, or cannot be read as one.
    """
    if type(x) is np.ndarray:
        kind = x.dtype.kind
        if kind in "UST":
            return _text(x)
        return x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))
    if isinstance(x, list | tuple):
        return [to_numpy(e) for e in x]
    if isinstance(x, dict):
        return {k: to_numpy(v) if is_array(v) else v for k, v in x.items()}
    if x is None:
        return None
    try:
        found = _read(x)
    except Exception as e:  # a tracer, an array that was deleted or donated, a sparse tensor, ...
        reason = str(e).strip().partition("\n")[0]
        raise InputError(f"this {_type_name(x)} cannot be read as a NumPy array: {reason}") from e
    if found is None:
        raise InputError(
            f"{_type_name(x)} is not an array; give NumPy, JAX, CuPy or torch arrays (np.asarray(x) makes one), or "
            "tell XRT about the type: xrt.register_array_type"
        )
    return found if found.dtype.isnative and found.dtype.kind not in "UST" else to_numpy(found)


def _type_name(x: Any) -> str:
    return f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")


def _read(x: Any) -> np.ndarray | None:
    kind = kinds.of_array(type(x))
    if kind is not None and kind.arrays is not None:
        return kind.arrays.to_host(x)
    family = library_of(type(x))
    if family == "numpy" and isinstance(x, np.ndarray | np.generic):
        if type(x).__name__ == "MaskedArray" and np.any(x.mask):  # type: ignore[union-attr]
            raise InputError("it has masked elements; fill them first (x.filled(value))")
        return np.asarray(x)
    if family == "jax":
        return np.asarray(x)
    if family == "torch":
        return _numpy_of_torch(x)
    if family == "cupy":
        return x.get()  # type: ignore[no-any-return]
    if hasattr(x, "__dlpack__"):
        try:
            return np.from_dlpack(x)
        except (BufferError, RuntimeError, TypeError):
            pass  # a dtype or device that NumPy's DLPack does not take; __array__ may
    return np.asarray(x) if hasattr(x, "__array__") and is_array(x) else None


def _text(x: np.ndarray) -> np.ndarray:
    return (np.char.decode(x, "utf-8") if x.dtype.kind == "S" else x).astype(object)


# torch dtypes that NumPy has through ml_dtypes, under the same names
_NARROW = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")


def _numpy_of_torch(x: Any) -> np.ndarray:
    x = x.detach().cpu().resolve_conj().resolve_neg()
    name = str(x.dtype).removeprefix("torch.")
    if name not in _NARROW:
        return x.numpy()  # type: ignore[no-any-return]
    import ml_dtypes

    torch = sys.modules["torch"]
    bits = torch.int16 if name == "bfloat16" else torch.uint8
    return x.view(bits).numpy().view(getattr(ml_dtypes, name))  # type: ignore[no-any-return]


def to_host(xp: Any) -> Converter:
    """The function that takes arrays to the host's namespace: to NumPy, or under CuPy to the device."""
    return to_numpy if xp is np else to_cupy


def from_numpy(family: str) -> Converter:
    """The function that takes results (NumPy arrays or an engine's) to a family.

    What the family has no dtype for (text, int4 in torch) stays NumPy's.
    """
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
    if family_of(type(x)) == "jax":
        try:
            return torch.from_dlpack(x).cpu()  # a result of this call: its memory is not shared
        except (AssertionError, BufferError, RuntimeError, TypeError, ValueError):
            pass  # a dtype that the two do not exchange, or a torch without CUDA, which asserts that it has it
    x = to_numpy(x)
    if not isinstance(x, np.ndarray):
        return x
    if not x.flags.writeable or any(s < 0 for s in x.strides):
        x = x.copy()  # torch has no read-only tensors, and no negative strides
    name = x.dtype.name
    if name in _NARROW:
        return torch.from_numpy(x.view(np.int16 if name == "bfloat16" else np.uint8)).view(getattr(torch, name))
    return torch.from_numpy(x) if x.dtype.kind in "biufc" else x


def to_cupy(x: Any) -> Any:
    """A CuPy array of any array: in place where it lies on a GPU; text stays NumPy's. CuPy must have been loaded."""
    cupy = sys.modules["cupy"]
    if isinstance(x, cupy.ndarray):
        return x
    if type(x) is not np.ndarray and cuda_device(x) is not None:
        try:
            x = plain_tensor(x) if family_of(type(x)) == "torch" else x
            return cupy.from_dlpack(x) if hasattr(x, "__dlpack__") else cupy.asarray(x)
        except (BufferError, RuntimeError, TypeError, ValueError):
            pass  # a dtype that CuPy has not
    x = to_numpy(x)
    return cupy.asarray(x) if isinstance(x, np.ndarray) and x.dtype != object else x


def plain_tensor(x: Any) -> Any:
    """A torch tensor whose memory holds its numbers, and which shows it to other libraries."""
    if x.requires_grad:
        x = x.detach()
    return x.resolve_neg() if x.is_neg() else x


_TO_FAMILY: dict[str, Converter] = {"numpy": to_numpy, "jax": _to_jax, "torch": _to_torch, "cupy": to_cupy}

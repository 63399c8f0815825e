"""The only importer of {{ cookiecutter.__library }}: its version, devices, dtypes and memory."""

from __future__ import annotations

import contextlib
{%- if cookiecutter.array_library == "namespace" %}
import functools
{%- endif %}
import importlib
import warnings
from collections.abc import Container, Iterable, Iterator
from typing import Any, Final

import numpy as np
from xrt_core.errors import EngineUnavailableError{{ ', GraphError' if cookiecutter.array_library == 'namespace' else '' }}
from xrt_core.ir.types import DTYPE_TO_ONNX, STRING{{ ', dtype_from_name' if cookiecutter.array_library == 'namespace' else '' }}
{%- if cookiecutter.array_library == "namespace" %}
from xrt_core.kernels.standard import DTYPES as STANDARD_DTYPES
{%- endif %}
{%- if cookiecutter.devices == "other" %}

from {{ cookiecutter.__module }}.device import {{ cookiecutter.__class }}Array
{%- endif %}

__all__ = ["DTYPES", "xp"]
{% if cookiecutter.array_library == "kernels" %}
# YOUR ENGINE: import your runtime here. NumPy stands for it: its arrays for your buffers, its functions for your
# launches.
NAMESPACE: Final = "numpy"
{%- else %}
NAMESPACE: Final = "{{ cookiecutter.namespace }}"
{%- endif %}
xp: Any = importlib.import_module(NAMESPACE)
Array: Final[type[Any]] = type(xp.asarray(np.zeros(1, np.float32)))
"""The library's own array type."""
{%- if cookiecutter.array_library == "namespace" %}
LIKE_NUMPY: Final = isinstance(xp.asarray(np.zeros(1, np.float32)).dtype, np.dtype)
"""Whether arrays have NumPy's dtypes (CuPy, JAX); others are used by the array API standard alone (torch)."""
if not LIKE_NUMPY:
    xp = importlib.import_module("array_api_compat").array_namespace(xp.asarray(np.zeros(1, np.float32)))
{%- endif %}


{% if cookiecutter.array_library == "namespace" -%}
def dtype_of(array: Any) -> np.dtype[Any] | None:
    """The dtype of an array of NumPy's or the library's; None for what has none that NumPy knows."""
    found = getattr(array, "dtype", None)
    return found if found is None or isinstance(found, np.dtype) else _dtype_named(str(found).rpartition(".")[2])


@functools.cache
def _dtype_named(name: str) -> np.dtype[Any] | None:
    try:
        return dtype_from_name(name)
    except GraphError:
        return None


{% else -%}
def dtype_of(array: Any) -> np.dtype[Any] | None:
    """The dtype of an array; None for what has none."""
    found = getattr(array, "dtype", None)
    return found if isinstance(found, np.dtype) else None


{% endif -%}
def _keeps(dtype: np.dtype[Any]) -> bool:
    """Whether the library has arrays of `dtype` (JAX, for one, cuts 64 bits to 32 unless told otherwise)."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return dtype_of(xp.asarray(np.zeros(1, dtype))) == dtype
    except Exception:  # each library has its own way to say no
        return False


def _writes() -> bool:
    """Whether arrays can be written into."""
    try:
        xp.asarray(np.zeros(1, np.float32))[...] = 1
    except Exception:  # JAX's arrays are immutable
        return False
    return True


{% if cookiecutter.array_library == "namespace" -%}
DTYPES: Final = frozenset(d for d in (DTYPE_TO_ONNX if LIKE_NUMPY else STANDARD_DTYPES) if d != STRING and _keeps(d))
{%- else -%}
DTYPES: Final = frozenset(d for d in DTYPE_TO_ONNX if d != STRING and _keeps(d))
{%- endif %}
"""Element dtypes that the library has."""
IN_PLACE: Final = _writes()


def version() -> str:
    """The library's version."""
    return str(getattr(importlib.import_module(NAMESPACE.partition(".")[0]), "__version__", "unknown"))


def devices() -> tuple[str, ...]:
    """The devices that are here, by XRT's names: "cpu", "cuda:0", "cuda:1", "tpu:0"."""
    # YOUR ENGINE: ask the library. As generated, whatever the library computes on stands for one device of each kind.
    return {{ cookiecutter.__places }}


def device_named(name: str) -> str:
    """The device for "cpu", "cuda" (the first one) or "cuda:1". Raises EngineUnavailableError where it is not there."""
    found = devices()
    for device in found:
        if name in (device, device.removesuffix(":0")):
            return device
    raise EngineUnavailableError(f"{{ cookiecutter.engine }}: no device {name!r} here; there is {', '.join(found)}")


def fingerprint_of(device: str) -> str:
    """What an executable depends on."""
    # YOUR ENGINE: add what compiled code depends on: a GPU's compute capability, a processor's instruction set.
    return f"{NAMESPACE} {version()} {device_named(device)}"


def put(array: Any, device: str) -> Any:
    """A NumPy array, or one of the library's own, as an array of the library on `device`; a copy only if it must be."""
    # YOUR ENGINE: with several devices, move it there. What `run` returned earlier comes back here: leave it in place.
{%- if cookiecutter.devices == "other" %}
    if isinstance(array, {{ cookiecutter.__class }}Array):
        return array.buffer
{%- endif %}
{%- if cookiecutter.array_library == "namespace" %}
    if not LIKE_NUMPY and not isinstance(array, Array):
        return xp.asarray(np.array(array, order="C"))  # a copy: not every library takes any layout, or read-only memory
{%- endif %}
    return xp.asarray(array)
{%- if cookiecutter.devices == "other" %}


def new(array: np.ndarray[Any, Any]) -> Any:
    """A new array of the library, for `device.from_host`."""
    return xp.asarray(np.array(array))


def on_device(array: Any, device: str) -> {{ cookiecutter.__class }}Array:
    """An array of the library as XRT sees it: on the device."""
    return {{ cookiecutter.__class }}Array(array, int(device.partition(":")[2] or 0))
{%- endif %}


@contextlib.contextmanager
def computing(device: str, stream: int | None) -> Iterator[None]:
    """What kernels run under."""
    # YOUR ENGINE: enter `device`, and use the caller's CUDA stream where `stream` is not None.
    with np.errstate(all="ignore"):  # NaN and infinities are results, not warnings
        yield


def wait_for(arrays: Iterable[Any]) -> None:
    """Return when the arrays are computed."""
    # YOUR ENGINE: wait for your stream. NumPy is done when it returns; arrays of libraries that go on say how to wait.
    for array in arrays:
        wait = getattr(array, "block_until_ready", None)
        if wait is not None:
            wait()


def owned(array: Any, held: Container[int]) -> Any:
    """`array` as one that shares memory with no other: views, and arrays whose `id` is held, are copied."""
    if not IN_PLACE:  # nobody can tell
        return array
{%- if cookiecutter.array_library == "namespace" %}
    if not LIKE_NUMPY:  # whether an array is a view is not in the standard
        return xp.asarray(array, copy=True)
{%- endif %}
    is_fresh = hasattr(array, "base") and array.base is None and id(array) not in held
    return array if is_fresh else xp.array(array, copy=True)


def write_into(target: Any, array: Any) -> Any:
    """`target` with the content of `array` where it is a writable array of the library's, else `array`."""
    if not (IN_PLACE and isinstance(target, Array) and getattr(getattr(target, "flags", None), "writeable", True)):
        return array
    target[...] = array
    return target

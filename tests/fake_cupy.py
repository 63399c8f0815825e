"""A stand-in for CuPy 14 over the memory of the fake GPU, which refuses what CuPy refuses.

Its functions have CuPy's own signatures (`test_fake_cupy.py` holds them against the wheel where that is installed) and
its universal functions the loops of CuPy. Work goes to the current stream of the calling thread: a result holds NaN
until that stream's work is done, and memory that is freed holds NaN as soon as its stream comes past.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import operator
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import ml_dtypes
import numpy as np

from tests.fake_cuda import GPU, Capsule, CUDARuntimeError, dlpack_order
from xrt_core.engine import cuda

BFLOAT16: Final = np.dtype(ml_dtypes.bfloat16)
_PLAIN: Final = frozenset(np.dtype(c).type for c in "?bhilqBHILQefdFD")


def checked(dtype: Any) -> np.dtype:
    """A dtype that CuPy has: NumPy's numbers and bfloat16. Raises ValueError for any other."""
    found = np.dtype(dtype)
    if found == BFLOAT16 or (found.type in _PLAIN and found.isnative):
        return found
    raise ValueError(f"Unsupported dtype {found}")


class _Block:
    """Memory of the device: given back, it is overwritten as soon as the work enqueued on its stream is done."""

    def __init__(self, bytes_: np.ndarray, stream: int) -> None:
        self.bytes, self.stream = bytes_, stream

    def __del__(self) -> None:
        bytes_ = self.bytes
        if GPU is not None and bytes_.size:
            GPU.used -= bytes_.nbytes
            GPU.put(self.stream, lambda: bytes_.fill(255))


def _allocated(shape: Sequence[int], dtype: np.dtype, strides: Any = None) -> ndarray:
    """An array of NaN (or of bytes 255)."""
    GPU.check()
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    GPU.allocate(size, OutOfMemoryError)
    bytes_ = np.full(size, 255, np.uint8)
    memory = np.ndarray(shape, dtype, bytes_.data if size else bytearray(dtype.itemsize), strides=strides)
    return ndarray._over(memory, _Block(bytes_, GPU.current), GPU.device)


def _made(value: Any) -> ndarray:
    """The result of a kernel: there once the current stream's work is done."""
    value = np.asarray(value)
    packed = value.flags.c_contiguous or value.flags.f_contiguous
    found = _allocated(value.shape, checked(value.dtype), value.strides if packed and value.size else None)
    memory = found._memory
    GPU.put(GPU.current, lambda: memory.__setitem__(..., value))
    return found


def _uploaded(array: np.ndarray) -> ndarray:
    checked(array.dtype)
    GPU.up += array.nbytes
    return _made(np.array(array))


def _read(x: ndarray) -> np.ndarray:
    """What a kernel on the current stream reads."""
    GPU.check()
    if x._device != GPU.device:
        raise ValueError(
            f"The device where the array resides ({x._device}) is different from the current device ({GPU.device}). "
            "Peer access is unavailable between these devices."
        )
    GPU.drain(GPU.current)
    return x._memory


def _downloaded(x: ndarray) -> np.ndarray:
    """A copy on the host; the calling thread waits for its stream."""
    with GPU.on(x._device):
        GPU.wait(GPU.current)
        GPU.down += x.nbytes
        GPU.downloads += 1
        return np.array(x._memory)


def _is_scalar(x: Any) -> bool:
    return isinstance(x, bool | int | float | complex | np.generic)


def _operand(x: Any) -> Any:
    """An operand of a kernel: an array of CuPy's, or a scalar."""
    if isinstance(x, ndarray):
        return _read(x)
    if _is_scalar(x):
        if isinstance(x, np.generic):
            checked(x.dtype)
        return x
    raise TypeError(f"Unsupported type {type(x)}")


def _array(x: Any, name: str = "a") -> np.ndarray:
    """The operand of a typed function, which takes CuPy's arrays only."""
    if not isinstance(x, ndarray):
        raise TypeError(
            f"Argument '{name}' has incorrect type (expected cupy._core.core._ndarray_base, got {type(x).__name__})"
        )
    return _read(x)


def _whole(x: Any) -> Any:
    return operator.index(x)


def _shape(shape: Any) -> tuple[int, ...]:
    if np.isscalar(shape) or isinstance(shape, ndarray):
        return (_whole(shape),)
    return tuple(_whole(d) for d in shape)


class _Flags:
    def __init__(self, flags: Any) -> None:
        self.c_contiguous, self.f_contiguous, self.owndata = flags.c_contiguous, flags.f_contiguous, flags.owndata
        self.carray, self.writeable = flags.c_contiguous, True


class ndarray:
    """CuPy's array. Not one of NumPy's, and not to be made one without saying so."""

    __array_priority__ = 100
    __hash__ = None  # type: ignore[assignment]
    _memory: np.ndarray
    _block: object
    _device: int

    def __init__(self, shape: Any, dtype: Any = float, memptr: Any = None, strides: Any = None, order: str = "C"):
        made = _allocated(_shape(shape), checked(dtype))
        self._memory, self._block, self._device = made._memory, made._block, made._device

    @classmethod
    def _over(cls, memory: np.ndarray, block: object, device: int) -> ndarray:
        made: ndarray = object.__new__(cls)
        made._memory, made._block, made._device = memory, block, device
        return made

    def _view(self, memory: np.ndarray) -> ndarray:
        return ndarray._over(memory, self._block, self._device)

    dtype = property(lambda s: s._memory.dtype)
    shape = property(lambda s: s._memory.shape)
    ndim = property(lambda s: s._memory.ndim)
    size = property(lambda s: s._memory.size)
    nbytes = property(lambda s: s._memory.nbytes)
    itemsize = property(lambda s: s._memory.itemsize)
    strides = property(lambda s: s._memory.strides)
    flags = property(lambda s: _Flags(s._memory.flags))
    device = property(lambda s: Device(s._device))
    data = property(
        lambda s: types.SimpleNamespace(mem=s._block, ptr=s._memory.__array_interface__["data"][0], device_id=s._device)
    )
    T = property(lambda s: s._view(s._memory.T))
    real = property(lambda s: s._view(s._memory.real))
    imag = property(lambda s: s._view(s._memory.imag))

    # --- to the host ------------------------------------------------------------------------------------------------

    def get(self, stream: Any = None, order: str = "C", out: Any = None, blocking: bool = True) -> np.ndarray:
        return _downloaded(self)

    def item(self) -> Any:
        return _downloaded(self).item()

    def tolist(self) -> Any:
        return _downloaded(self).tolist()

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct a NumPy array "
            "explicitly."
        )

    def __bool__(self) -> bool:
        return bool(_downloaded(self))

    def __int__(self) -> int:
        return int(_downloaded(self).item())

    def __float__(self) -> float:
        return float(_downloaded(self).item())

    def __index__(self) -> int:
        return operator.index(_downloaded(self)[()])

    # --- views ------------------------------------------------------------------------------------------------------

    def reshape(self, *shape: Any, order: str = "C", copy: Any = None) -> ndarray:
        wanted = shape[0] if len(shape) == 1 and not np.isscalar(shape[0]) else shape
        found = self._memory.reshape(_shape(wanted))
        return (
            self._view(found) if np.shares_memory(found, self._memory) else _made(_read(self).reshape(_shape(wanted)))
        )

    def view(self, dtype: Any = None, type: Any = None) -> ndarray:
        return self._view(self._memory if dtype is None else self._memory.view(checked(dtype)))

    def squeeze(self, axis: Any = None) -> ndarray:
        return self._view(np.squeeze(self._memory, axis))

    def swapaxes(self, axis1: int, axis2: int) -> ndarray:
        return self._view(np.swapaxes(self._memory, axis1, axis2))

    def transpose(self, *axes: Any) -> ndarray:
        return self._view(np.transpose(self._memory, axes[0] if len(axes) == 1 else (axes or None)))

    def ravel(self, order: str = "C") -> ndarray:
        return self.reshape(-1)

    # --- kernels ----------------------------------------------------------------------------------------------------

    def astype(
        self, dtype: Any, order: str = "K", casting: Any = None, subok: Any = None, copy: bool = True
    ) -> ndarray:
        wanted = checked(dtype)
        if not copy and wanted == self.dtype:
            return self
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            return _made(_read(self).astype(wanted))

    def copy(self, order: str = "C") -> ndarray:
        with GPU.on(self._device):
            return _made(np.array(_read(self), order=order))  # type: ignore[call-overload]

    def flatten(self, order: str = "C") -> ndarray:
        return _made(_read(self).flatten())

    def fill(self, value: Any) -> None:
        self[...] = value

    def set(self, arr: np.ndarray, stream: Any = None) -> None:
        if not isinstance(arr, np.ndarray):
            raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
        GPU.up += arr.nbytes
        self._write(..., np.array(arr))

    def sum(self, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
        return _made(np.sum(_read(self), axis=axis, dtype=dtype, keepdims=keepdims))

    def prod(self, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
        return _made(np.prod(_read(self), axis=axis, dtype=dtype, keepdims=keepdims))

    def mean(self, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
        return _made(np.mean(_read(self), axis=axis, dtype=dtype, keepdims=keepdims))

    def max(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
        return _made(np.max(_read(self), axis=axis, keepdims=keepdims))

    def min(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
        return _made(np.min(_read(self), axis=axis, keepdims=keepdims))

    def argmax(self, axis: Any = None, out: Any = None, dtype: Any = None, keepdims: bool = False) -> ndarray:
        return _made(np.argmax(_read(self), axis=axis, keepdims=keepdims))

    def argmin(self, axis: Any = None, out: Any = None, dtype: Any = None, keepdims: bool = False) -> ndarray:
        return _made(np.argmin(_read(self), axis=axis, keepdims=keepdims))

    def argsort(self, axis: Any = -1, kind: Any = None) -> ndarray:
        if kind is not None and kind != "stable":
            raise ValueError("kind can only be None or 'stable'")
        return _made(np.argsort(_read(self), axis=axis, kind="stable"))

    def any(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
        return _made(np.any(_read(self), axis=axis, keepdims=keepdims))

    def all(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
        return _made(np.all(_read(self), axis=axis, keepdims=keepdims))

    def cumsum(self, axis: Any = None, dtype: Any = None, out: Any = None) -> ndarray:
        return _made(np.cumsum(_read(self), axis=axis, dtype=dtype))

    def cumprod(self, axis: Any = None, dtype: Any = None, out: Any = None) -> ndarray:
        return _made(np.cumprod(_read(self), axis=axis, dtype=dtype))

    def clip(self, min: Any = None, max: Any = None, out: Any = None) -> ndarray:
        if self.dtype == np.bool_:
            raise TypeError("Wrong type (bool) of arguments for cupy_clip")
        low, high = (None if b is None else _operand(b) for b in (min, max))
        return _made(np.clip(_read(self), low, high))

    def round(self, decimals: int = 0, out: Any = None) -> ndarray:
        return _made(np.round(_read(self), decimals))

    def take(self, indices: Any, axis: Any = None, out: Any = None) -> ndarray:
        """Indices out of range wrap round."""
        if isinstance(indices, ndarray):
            found: Any = _read(indices)
        else:
            found = indices if np.isscalar(indices) else _read(_uploaded(np.asarray(indices, dtype=int)))
        memory = _read(self)
        if not memory.size and np.size(found):
            raise IndexError("cannot do a non-empty take from an empty axes.")
        return _made(np.take(memory, found, axis=axis, mode="wrap" if memory.size else "raise"))

    def nonzero(self) -> tuple[ndarray, ...]:
        if self.ndim == 0:
            raise ValueError(
                "Calling nonzero on 0d arrays is not allowed. Use cupy.atleast_1d(scalar).nonzero() instead."
            )
        found = np.nonzero(_read(self))
        GPU.wait(GPU.current)  # their number is read on the host
        return tuple(map(_made, found))

    def repeat(self, repeats: Any, axis: Any = None) -> ndarray:
        return _made(np.repeat(_read(self), repeats, axis))

    def conj(self) -> ndarray:
        return ufunc("conjugate")(self)

    def dot(self, b: Any, out: Any = None) -> ndarray:
        return _made(_read(self).dot(_array(b, "b")))

    # --- elements ---------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        if self.ndim == 0:
            raise TypeError("len() of unsized object")
        return int(self.shape[0])

    def __iter__(self) -> Iterator[ndarray]:
        if self.ndim == 0:
            raise TypeError("iteration over a 0-d array")
        return (self[i] for i in range(self.shape[0]))

    def __getitem__(self, index: Any) -> ndarray:
        items, fancy = _index(index, self.shape)
        if fancy:
            return _made(_read(self)[items])
        if not any(i is Ellipsis for i in items):
            items = (*items, ...)
        return self._view(self._memory[items])

    def __setitem__(self, index: Any, value: Any) -> None:
        items, fancy = _index(index, self.shape)
        if isinstance(value, ndarray):
            found = np.array(_read(value))
        else:
            if isinstance(value, np.ndarray):
                GPU.up += value.nbytes
            found = np.asarray(value)
            checked(found.dtype)
            if found.ndim and not fancy:
                raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
        self._write(items, found)

    def _write(self, items: Any, value: np.ndarray) -> None:
        memory = _read(self)
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = value.astype(self.dtype)
        np.broadcast_to(value, memory[items].shape)  # raises where it does not fit
        GPU.put(GPU.current, lambda: memory.__setitem__(items, value))

    # --- other libraries --------------------------------------------------------------------------------------------

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        found = getattr(sys.modules["cupy"], ufunc.__name__, None)
        if found is None or method not in ("__call__", "at"):
            return NotImplemented
        if "out" in kwargs:
            (kwargs["out"],) = kwargs["out"]
        if method == "at":
            return found.at(*inputs, **kwargs)
        if ufunc.__name__ in _COMPARISONS:
            inputs = tuple(x.item() if isinstance(x, np.ndarray) and x.ndim == 0 else x for x in inputs)
        return found(*inputs, **kwargs)

    def __array_function__(self, function: Any, kinds: Any, args: Any, kwargs: Any) -> Any:
        try:
            module = functools.reduce(getattr, function.__module__.split(".")[1:], sys.modules["cupy"])
            found = getattr(module, function.__name__)
        except AttributeError:
            return NotImplemented
        return found(*args, **kwargs)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The stream is the current one of the thread that reads this, and never 0."""
        return {
            "shape": self.shape, "typestr": self.dtype.str, "descr": self.dtype.descr, "version": 3,
            "strides": None if self._memory.flags.c_contiguous else self.strides, "stream": max(GPU.current, 1),
            "data": (self._memory.__array_interface__["data"][0], False),
        }  # fmt: skip

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self._device

    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: Any = None
    ) -> Capsule:
        GPU.check()
        with GPU.on(self._device):
            dlpack_order(stream, GPU.current)
        return Capsule(self._memory, self._block, self._device)

    def __repr__(self) -> str:
        return f"cupy.ndarray({self._memory!r})"


ndarray.__module__ = "cupy"


def _index(given: Any, shape: tuple[int, ...]) -> tuple[Any, bool]:
    """An index for NumPy that does what CuPy does, and whether it is a fancy one. Integers out of range wrap round."""
    if isinstance(given, list):
        given = np.asarray(given)
    items = list(given) if isinstance(given, tuple) else [given]
    plain: list[Any] = []
    for i in items:
        if i is None or i is Ellipsis or (np.isscalar(i) and not isinstance(i, str)):
            plain.append(i)
        elif isinstance(i, slice):
            plain.append(slice(*(None if v is None else _whole(v) for v in (i.start, i.stop, i.step))))
        elif isinstance(i, ndarray):
            plain.append(_read(i))
        elif isinstance(i, np.ndarray | list | tuple):
            plain.append(_read(_uploaded(np.asarray(i))))
        else:
            raise IndexError(f"Unsupported type {type(i)}")
    fancy = any(isinstance(i, np.ndarray) for i in plain)
    if fancy:
        used = sum(i.ndim if isinstance(i, np.ndarray) and i.dtype == bool else i is not None and i is not Ellipsis
                   for i in plain)  # fmt: skip
        axis = 0
        for k, i in enumerate(plain):
            if i is Ellipsis:
                axis += len(shape) - used
            elif isinstance(i, np.ndarray) and i.dtype == bool:
                axis += i.ndim
            elif i is not None:
                if isinstance(i, np.ndarray):
                    if i.dtype.kind not in "iu":
                        raise IndexError("arrays used as indices must be of integer (or boolean) type")
                    plain[k] = i.astype(np.int64) % shape[axis] if shape[axis] else i
                axis += 1
    return tuple(plain), fancy


# --- universal functions ----------------------------------------------------------------------------------------------

_COMPARISONS: Final = ("greater", "greater_equal", "less", "less_equal", "equal", "not_equal")
_INTS: Final = "bBhHiIlLqQ"
_SCATTER: Final = {
    "add": "ilqefdIQL", "subtract": "iI", "maximum": "ilqfdILQ", "minimum": "ilqfdILQ",
}  # fmt: skip
"""Dtypes of `ufunc.at`; no other function has one."""


def _loops(names: str, inputs: str, output: str | None = None) -> dict[str, tuple[str, str | None]]:
    return dict.fromkeys(names.split(), (inputs, output))


_ROUNDED = "?" + _INTS + "eEfd"
_FLOATS: Final = "eEfdFD"
_UFUNCS: Final[dict[str, tuple[str, str | None]]] = {
    **_loops("abs absolute negative", "?" + _INTS + _FLOATS),
    **_loops("arccos arccosh arcsin arcsinh arctan arctanh cos cosh exp expm1 log log1p log2 log10 rint sin sinh sqrt"
             " tan tanh copysign hypot arctan2", _FLOATS),
    **_loops("ceil floor trunc", _ROUNDED),
    **_loops("sign conj conjugate square", _INTS + _FLOATS),
    **_loops("add multiply maximum minimum fmax fmin", "?" + _INTS + _FLOATS),
    **_loops("subtract", _INTS + _FLOATS),
    **_loops("power", "?" + _INTS + _FLOATS),
    **_loops("true_divide divide", "qQ" + _FLOATS),
    **_loops("floor_divide mod remainder fmod", _INTS + "eEfd"),
    **_loops("logaddexp", "eEfd"),
    **_loops("equal not_equal greater greater_equal less less_equal", "?qQ" + _FLOATS, "?"),
    **_loops("logical_and logical_or", "?qQeEfd", "?"),
    **_loops("logical_xor logical_not", "?" + _INTS + "efd", "?"),
    **_loops("bitwise_and bitwise_or bitwise_xor invert", "?" + _INTS),
    **_loops("left_shift right_shift", _INTS),
    **_loops("isnan isinf isfinite", _FLOATS, "?"),
}  # fmt: skip
"""Types of the loops of each function, in CuPy's order; "E" is bfloat16."""


def _dtype_of(char: str) -> np.dtype:
    return BFLOAT16 if char == "E" else np.dtype(char)


def _can_cast(dtype: np.dtype, to: np.dtype) -> bool:
    return dtype == to or (np.can_cast(dtype, to) if BFLOAT16 not in (dtype, to) else _bfloat16_casts(dtype, to))


def _bfloat16_casts(dtype: np.dtype, to: np.dtype) -> bool:
    return to.kind in "fc" and to.itemsize >= 4 if dtype == BFLOAT16 else dtype.itemsize == 1


class ufunc:
    """A universal function: CuPy's loops, NumPy's numbers."""

    def __init__(self, name: str) -> None:
        self.name = f"cupy_{name}"
        self.__name__ = name
        self._numpy: Any = getattr(np, name)
        self._inputs, self._output = _UFUNCS[name]
        self.nin, self.nout = self._numpy.nin, self._numpy.nout

    @property
    def types(self) -> list[str]:
        """The loops as NumPy writes them."""
        return [f"{c * self.nin}->{self._output or c}" for c in self._inputs]

    def __call__(
        self, *args: Any, out: Any = None, where: Any = None, casting: str = "same_kind", dtype: Any = None
    ) -> Any:
        if where is not None:
            raise NotImplementedError("the stand-in has no where=")
        if len(args) not in (self.nin, self.nin + 1):
            raise TypeError(f"wrong number of arguments for {self.name}")
        given = [_operand(a) for a in args[: self.nin]]
        out = args[self.nin] if len(args) > self.nin else out
        if out is not None and not isinstance(out, ndarray):
            raise TypeError(f"Unsupported type {type(out)}")
        if self.__name__ == "subtract" and all(np.asarray(g).dtype == bool for g in given):
            raise TypeError(
                "cupy boolean subtract, the `-` operator, is deprecated, use the bitwise_xor or logical_xor"
            )
        loop = self._loop(given)
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if self.__name__ == "fmod" and loop.kind in "iu":  # through doubles
                divisor = np.asarray(given[1])
                kept = np.where(divisor == 0, 1, divisor).astype(float)
                made = np.where(divisor == 0, 0, np.fmod(np.asarray(given[0]).astype(float), kept))
            else:
                made = self._numpy(*given, **({} if dtype is None else {"dtype": dtype}))
            if dtype is None:
                made = np.asarray(made).astype(np.bool_ if self._output else self._result(loop))
        if out is not None:
            out._write(..., np.asarray(made))
            return out
        return _made(made)

    def _result(self, loop: np.dtype) -> np.dtype:
        if self.__name__ in ("true_divide", "divide") and loop.kind in "iu":
            return np.dtype(np.float64)
        if self.__name__ == "power" and loop == np.bool_:
            return np.dtype(np.int8)
        if self.__name__ in ("abs", "absolute") and loop.kind == "c":
            return np.dtype(np.float32 if loop.itemsize == 8 else np.float64)
        return loop

    def _loop(self, given: Sequence[Any]) -> np.dtype:
        """The dtype of the first loop to which the operands can be cast; Python's scalars take the arrays' kind."""
        dtypes = [g.dtype for g in given if isinstance(g, np.ndarray | np.generic)]
        weak = [g for g in given if not isinstance(g, np.ndarray | np.generic)]
        if weak and dtypes:
            dtypes = [np.result_type(*dtypes, *weak) if BFLOAT16 not in dtypes else BFLOAT16]
        dtypes = dtypes or [np.result_type(*weak)]
        for c in self._inputs:
            if all(_can_cast(d, _dtype_of(c)) for d in dtypes):
                return _dtype_of(c)
        raise TypeError(f"Wrong type ({', '.join(map(str, dtypes))}) of arguments for {self.name}")

    def at(self, a: Any, indices: Any, b: Any = None) -> None:
        if self.__name__ not in _SCATTER:
            raise NotImplementedError(f"`{self.name}.at` is not supported yet")
        if not isinstance(a, ndarray):
            raise AttributeError("'numpy.ndarray' object has no attribute '_scatter_op'")
        if a.dtype.char not in _SCATTER[self.__name__]:
            raise TypeError(f"cupy.{self.__name__}.at does not support {a.dtype} as data type")
        items, _ = _index(indices, a.shape)
        values = np.array(_read(b)) if isinstance(b, ndarray) else np.asarray(b)
        memory, function = _read(a), self._numpy
        GPU.put(GPU.current, lambda: function.at(memory, items, values.astype(memory.dtype)))


# --- functions --------------------------------------------------------------------------------------------------------


def _of_interface(x: Any) -> ndarray:
    """CuPy waits for the stream that an interface names."""
    interface = x.__cuda_array_interface__
    if interface.get("stream") is not None:
        GPU.wait(0 if interface["stream"] == 1 else interface["stream"])
    found = GPU.memory_at(interface["data"][0], interface["shape"], interface["typestr"])
    return ndarray._over(found, x, GPU.device)


def _cupy_only(a: Any) -> ndarray:
    if not isinstance(a, ndarray):
        raise TypeError(f"'a' must be a cupy.ndarray object, not {type(a)}.")
    return a


class _Functions:
    """CuPy's functions, with its signatures."""

    def array(obj, dtype=None, copy=True, order="K", subok=False, ndmin=0, *, blocking=False):
        found = _Functions.asarray(obj, dtype)
        return _made(np.array(_read(found), ndmin=ndmin)) if found is obj and copy else found

    def asarray(a, dtype=None, order=None, *, copy=None, blocking=False):
        if isinstance(a, ndarray):
            return a if dtype is None or np.dtype(dtype) == a.dtype else a.astype(dtype)
        if isinstance(a, list | tuple) and any(isinstance(x, ndarray) for x in a):
            return _made(np.array([_operand(x) for x in a], dtype))
        if not isinstance(a, np.ndarray | np.generic) and hasattr(a, "__cuda_array_interface__"):
            return _of_interface(a)
        return _uploaded(np.array(a, dtype=dtype))

    def asnumpy(a, stream=None, order="C", out=None, *, blocking=True):
        return a.get() if isinstance(a, ndarray) else np.asarray(a)

    def from_dlpack(array, *, device=None, copy=None):
        kind, index = array.__dlpack_device__()
        if kind != 2:
            raise BufferError("Unsupported array with DLPack device type")
        with GPU.on(index):
            capsule = array.__dlpack__(stream=max(GPU.current, 1), max_version=(1, 0))
            checked(capsule.memory.dtype)
            return ndarray._over(capsule.memory, capsule.owner, capsule.device)

    def ascontiguousarray(a, dtype=None):
        x = _Functions.asarray(a, dtype)
        if x.flags.c_contiguous and x.ndim:
            return x
        return _made(np.ascontiguousarray(_read(x)))

    def zeros(shape, dtype=float, order="C"):
        return _made(np.zeros(_shape(shape), checked(dtype)))

    def ones(shape, dtype=float, order="C"):
        return _made(np.ones(_shape(shape), checked(dtype)))

    def empty(shape, dtype=float, order="C"):
        return _allocated(_shape(shape), checked(dtype))

    def full(shape, fill_value, dtype=None, order="C"):
        if dtype is None:
            dtype = fill_value.dtype if isinstance(fill_value, ndarray) else np.array(fill_value).dtype
        made = _Functions.empty(shape, dtype)
        made.fill(fill_value)
        return made

    def zeros_like(a, dtype=None, order="K", subok=None, shape=None):
        return _made(np.zeros(a.shape if shape is None else shape, checked(dtype or a.dtype)))

    def ones_like(a, dtype=None, order="K", subok=None, shape=None):
        return _made(np.ones(a.shape if shape is None else shape, checked(dtype or a.dtype)))

    def full_like(a, fill_value, dtype=None, order="K", subok=None, shape=None):
        return _Functions.full(a.shape if shape is None else shape, fill_value, dtype or a.dtype)

    def arange(start, stop=None, step=1, dtype=None):
        given = [start] if stop is None else [start, stop, step]
        return _made(np.arange(*(g.item() if isinstance(g, ndarray) else g for g in given), dtype=dtype))

    def sum(a, axis=None, dtype=None, out=None, keepdims=False):
        return a.sum(axis=axis, dtype=dtype, keepdims=keepdims)

    def prod(a, axis=None, dtype=None, out=None, keepdims=False):
        return a.prod(axis=axis, dtype=dtype, keepdims=keepdims)

    def mean(a, axis=None, dtype=None, out=None, keepdims=False):
        return a.mean(axis=axis, dtype=dtype, keepdims=keepdims)

    def max(a, axis=None, out=None, keepdims=False):
        return a.max(axis=axis, keepdims=keepdims)

    def min(a, axis=None, out=None, keepdims=False):
        return a.min(axis=axis, keepdims=keepdims)

    def argmax(a, axis=None, dtype=None, out=None, keepdims=False):
        return a.argmax(axis=axis, keepdims=keepdims)

    def argmin(a, axis=None, dtype=None, out=None, keepdims=False):
        return a.argmin(axis=axis, keepdims=keepdims)

    def argsort(a, axis=-1, kind=None):
        return a.argsort(axis=axis, kind=kind)

    def cumsum(a, axis=None, dtype=None, out=None):
        return a.cumsum(axis, dtype)

    def cumprod(a, axis=None, dtype=None, out=None):
        return a.cumprod(axis, dtype)

    def any(a, axis=None, out=None, keepdims=False):
        return _cupy_only(a).any(axis, out, keepdims)

    def all(a, axis=None, out=None, keepdims=False):
        return _cupy_only(a).all(axis, out, keepdims)

    def nonzero(a):
        return _cupy_only(a).nonzero()

    def flatnonzero(a):
        return _cupy_only(a).ravel().nonzero()[0]

    def reshape(a, newshape, order="C", *, copy=None):
        return a.reshape(newshape, order=order)

    def squeeze(a, axis=None):
        return a.squeeze(axis)

    def swapaxes(a, axis1, axis2):
        return a.swapaxes(axis1, axis2)

    def transpose(a, axes=None):
        return a.transpose(axes)

    def moveaxis(a, source, destination):
        _array(a)
        return a._view(np.moveaxis(a._memory, source, destination))

    def expand_dims(a, axis):
        _array(a)
        return a._view(np.expand_dims(a._memory, axis))

    def broadcast_to(array, shape):
        _array(array, "array")
        return array._view(np.broadcast_to(array._memory, shape))

    def broadcast_arrays(*args):
        return [a._view(m) for a, m in zip(args, np.broadcast_arrays(*map(_array, args)), strict=True)]

    def flip(a, axis=None):
        _array(a)
        return a._view(np.flip(a._memory, axis))

    def take(a, indices, axis=None, out=None):
        return a.take(indices, axis)

    def take_along_axis(a, indices, axis):
        if indices.dtype.kind not in "iu":
            raise IndexError("`indices` must be an integer array")
        return _made(np.take_along_axis(_array(a), _array(indices).astype(np.int64), axis))

    def concatenate(tup, axis=0, out=None, *, dtype=None, casting="same_kind"):
        found = []
        for x in tup:
            if not isinstance(x, ndarray):
                raise TypeError(f"Unsupported type {type(x)}")
            if x.ndim == 0:
                raise TypeError("zero-dimensional arrays cannot be concatenated")
            found.append(_read(x))
        return _made(np.concatenate(found, axis))

    def stack(tup, axis=0, out=None, *, dtype=None, casting="same_kind"):
        return _Functions.concatenate([_Functions.expand_dims(x, axis) for x in tup], axis)

    def tile(A, reps):
        return _made(np.tile(_array(A), reps))

    def repeat(a, repeats, axis=None):
        return a.repeat(repeats, axis)

    def pad(array, pad_width, mode="constant", **kwargs):
        return _made(np.pad(_array(array, "array"), pad_width, mode, **kwargs))

    def where(condition, x=None, y=None):
        chosen = _operand(condition.astype("?", copy=False))
        return _made(np.where(chosen, _operand(x), _operand(y)))

    def clip(a, a_min, a_max, out=None):
        return a.clip(a_min, a_max)

    def round(a, decimals=0, out=None):
        return a.round(decimals)

    def matmul(*args, axes=None, axis=None, keepdims=False, casting="same_kind", dtype=None, signature=None, order="K",
               out=None):  # fmt: skip
        made = np.matmul(_array(args[0], "x1"), _array(args[1], "x2"))
        if out is None:
            return _made(made)
        out._write(..., made)
        return out

    def einsum(*operands, **kwargs):
        return _made(np.einsum(operands[0], *[_array(x) for x in operands[1:]], **kwargs))

    def searchsorted(a, v, side="left", sorter=None):
        if not isinstance(a, ndarray):
            raise NotImplementedError("Only int or ndarray are supported for a")
        return _made(np.searchsorted(_read(a), _array(v, "v"), side))


FUNCTIONS: Final = {name: f for name, f in vars(_Functions).items() if not name.startswith("_")}


def _transform(name: str) -> Callable[..., ndarray]:
    def transform(a: Any, n: Any = None, axis: int = -1, norm: Any = None) -> ndarray:
        x = _array(a)
        made = getattr(np.fft, name)(x, n, axis)
        single = x.dtype.name in ("float16", "float32", "complex64")
        return _made(made.astype(("c8" if made.dtype.kind == "c" else "f4") if single else made.dtype))

    return transform


def _sliding(x: Any, window_shape: Any, axis: Any = None) -> ndarray:
    _array(x, "x")
    return x._view(np.lib.stride_tricks.sliding_window_view(x._memory, window_shape, axis))  # type: ignore[no-any-return]


# --- devices and streams ----------------------------------------------------------------------------------------------


class OutOfMemoryError(MemoryError):
    """What `cupy.cuda.memory.OutOfMemoryError` is."""


class Device:
    """`cupy.cuda.Device`: whether it exists shows when it is used."""

    def __init__(self, device: Any = None) -> None:
        GPU.check()
        self.id = GPU.device if device is None else int(device)
        self._before: list[Any] = []

    def __int__(self) -> int:
        return self.id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and other.id == self.id

    __hash__ = None  # type: ignore[assignment]

    def use(self) -> None:
        GPU.set_device(self.id)

    def __enter__(self) -> Device:
        before = GPU.device
        self.use()
        self._before.append(before)
        return self

    def __exit__(self, *_: object) -> None:
        GPU.set_device(self._before.pop())

    def synchronize(self) -> None:
        with self:
            GPU.wait_for_all()

    @property
    def mem_info(self) -> tuple[int, int]:
        return GPU.memory - GPU.used, GPU.memory


class Stream:
    """`cupy.cuda.Stream`."""

    def __init__(
        self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority: Any = None
    ) -> None:
        GPU.check()
        self.ptr = 0 if null else GPU.new_stream()
        self.device_id = -1 if null else GPU.device
        self._held: Any = None
        self._before: list[int] = []

    @classmethod
    def from_external(cls, obj: Any) -> Stream:
        version, handle = obj.__cuda_stream__()
        if version != 0 or not isinstance(handle, int):
            raise TypeError("__cuda_stream__ must return (version, handle)")
        made = object.__new__(cls)
        made.ptr, made.device_id, made._held, made._before = handle, -1, obj, []
        return made

    def __enter__(self) -> Stream:
        before = GPU.current
        self.use()
        self._before.append(before)
        return self

    def __exit__(self, *_: object) -> None:
        GPU.current = self._before.pop()

    def use(self) -> Stream:
        if self.device_id not in (-1, GPU.device):
            raise RuntimeError(
                f"This stream belongs to device {self.device_id}, which does not match with the current device "
                f"({GPU.device})"
            )
        GPU.check_stream(self.ptr)
        GPU.current = self.ptr
        return self

    @property
    def done(self) -> bool:
        return not GPU.queues.get(self.ptr or -GPU.device)

    def synchronize(self) -> None:
        GPU.wait(self.ptr or -GPU.device)

    def record(self, event: Any = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event  # type: ignore[no-any-return]

    def wait_event(self, event: Event) -> None:
        event._wait(self.ptr or -GPU.device)


class ExternalStream(Stream):
    """Deprecated since CuPy 14."""

    def __init__(self, ptr: int, device_id: int = -1) -> None:
        warnings.warn("ExternalStream is deprecated; use Stream.from_external", DeprecationWarning, stacklevel=2)
        self.ptr, self.device_id, self._held, self._before = ptr, device_id, None, []


class Event:
    """`cupy.cuda.Event`."""

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        GPU.check()
        self._work: Callable[[], None] | None = None

    def record(self, stream: Any = None) -> None:
        self._work = GPU.record(GPU.current if stream is None else stream.ptr or -GPU.device)

    def _wait(self, stream: int) -> None:
        if self._work is not None:
            GPU.put(stream, self._work)

    def synchronize(self) -> None:
        GPU.waits.append(-1)
        if self._work is not None:
            self._work()


def fake_cupy() -> types.ModuleType:
    """A module `cupy` on the fake GPU, with `cupyx.scipy.special.erf`; to be put into `sys.modules` by `installed`."""
    made = types.ModuleType("cupy")
    made.__path__ = []
    made.__spec__ = importlib.machinery.ModuleSpec("cupy", None)
    made.__version__ = "14.2.0"  # type: ignore[attr-defined]
    made.__dict__.update(FUNCTIONS)
    for name in _UFUNCS:
        setattr(made, name, ufunc(name))
    made.__dict__.update(
        ndarray=ndarray, ufunc=ufunc, amax=_Functions.max, amin=_Functions.min,
        around=_Functions.round, asanyarray=_Functions.asarray,
        is_available=lambda: GPU.count > 0,
        float16=np.float16, float32=np.float32, float64=np.float64, int8=np.int8, int32=np.int32, int64=np.int64,
        uint8=np.uint8, bool_=np.bool_, dtype=np.dtype, inf=np.inf, nan=np.nan,
    )  # fmt: skip
    made.__dict__["linalg"] = types.SimpleNamespace(
        det=lambda a: _made(np.linalg.det(_array(a))),
        svd=lambda a, full_matrices=True, compute_uv=True: tuple(
            map(_made, np.linalg.svd(_array(a), full_matrices, compute_uv))
        ),
    )
    made.__dict__["fft"] = types.SimpleNamespace(**{n: _transform(n) for n in ("fft", "ifft", "rfft", "irfft")})
    made.__dict__["lib"] = types.SimpleNamespace(stride_tricks=types.SimpleNamespace(sliding_window_view=_sliding))
    runtime = types.SimpleNamespace(
        getDevice=lambda: (GPU.check(), GPU.device)[1], setDevice=GPU.set_device, CUDARuntimeError=CUDARuntimeError,
        getDeviceCount=lambda: (GPU.check(), GPU.count)[1], streamSynchronize=GPU.wait,
        driverGetVersion=lambda: 13000, runtimeGetVersion=lambda: 13000,
    )  # fmt: skip
    made.__dict__["cuda"] = types.SimpleNamespace(
        Device=Device, Stream=Stream, ExternalStream=ExternalStream, Event=Event, runtime=runtime,
        is_available=made.is_available,
        get_current_stream=lambda device_id=None: _current(),
        memory=types.SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
    )  # fmt: skip
    return made


def _current() -> Stream:
    made = object.__new__(Stream)
    GPU.check()
    made.ptr, made.device_id, made._held, made._before = max(GPU.current, 0), -1, None, []
    return made


def _special() -> types.ModuleType:
    from scipy.special import erf

    made = types.ModuleType("cupyx.scipy.special")
    made.erf = lambda x: _made(erf(_operand(x)).astype(x.dtype))  # type: ignore[attr-defined]
    return made


def _no_nvml() -> Any:
    raise OSError("the fake GPUs have no NVML")


@contextlib.contextmanager
def installed(devices: int = 1) -> Iterator[Any]:
    """The stand-in in the place of CuPy, with idle GPUs. devices: how many; with none there is no driver."""
    GPU.reset(devices)
    module, special = fake_cupy(), _special()
    scipy = types.ModuleType("cupyx.scipy")
    scipy.special = special  # type: ignore[attr-defined]
    cupyx = types.ModuleType("cupyx")
    cupyx.scipy = scipy  # type: ignore[attr-defined]
    new = {"cupy": module, "cupyx": cupyx, "cupyx.scipy": scipy, "cupyx.scipy.special": special}
    before = {name: sys.modules.get(name) for name in new}
    sys.modules.update(new)
    handles, cuda._handles = cuda._handles, _no_nvml  # a real GPU's driver has nothing to say about these
    try:
        yield module
    finally:
        cuda._handles = handles
        for name, was in before.items():
            if was is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = was
        GPU.reset()


_OPERATORS: Final = {
    "add": "add", "sub": "subtract", "mul": "multiply", "truediv": "true_divide", "floordiv": "floor_divide",
    "mod": "remainder", "pow": "power", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
    "lshift": "left_shift", "rshift": "right_shift",
}  # fmt: skip


def _define(dunder: str, function: Any) -> None:
    setattr(ndarray, f"__{dunder}__", lambda self, other: function(self, other))
    setattr(ndarray, f"__r{dunder}__", lambda self, other: function(other, self))
    setattr(ndarray, f"__i{dunder}__", lambda self, other: function(self, other, out=self))


for _dunder, _name in _OPERATORS.items():
    _define(_dunder, ufunc(_name))
for _dunder, _name in {
    "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal", "eq": "equal", "ne": "not_equal",
}.items():  # fmt: skip
    setattr(ndarray, f"__{_dunder}__", (lambda f: lambda self, other: f(self, other))(ufunc(_name)))
ndarray.__matmul__ = lambda self, other: _Functions.matmul(self, other)  # type: ignore[attr-defined]
ndarray.__neg__ = (lambda f: lambda self: f(self))(ufunc("negative"))  # type: ignore[attr-defined]
ndarray.__invert__ = (lambda f: lambda self: f(self))(ufunc("invert"))  # type: ignore[attr-defined]
ndarray.__abs__ = (lambda f: lambda self: f(self))(ufunc("absolute"))  # type: ignore[attr-defined]

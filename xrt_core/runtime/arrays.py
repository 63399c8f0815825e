"""Arrays between libraries and engines: the family of an array, conversion to NumPy and back, copying only if needed.

Also what an `EngineInputConvert` or `EngineOutputConvert` node does (`Conversion`), and arguments of types that users
registered.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import copy_context
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np

from xrt_core.engine.converters import HOST, ArrayType, Convert, Converters, converters, library_of
from xrt_core.engine.cuda import broken_context, cuda_device
from xrt_core.engine.device_kinds import kinds
from xrt_core.errors import BrokenContextError, ConverterError, ExecutionError, InputError
from xrt_core.ir.foreign_memory import array_of_tensor, writable_over
from xrt_core.ir.graph import Graph, Node
from xrt_core.ir.types import TensorType, float_like

T = TypeVar("T")
Converter = Callable[[Any], Any]
Range = tuple[float, float]
"""The least and the greatest number of an input."""

_SEQUENCES: Final = (list, tuple)
_PLAIN: Final = frozenset((float, int, str))  # in maps
_NUMPY: Final = (np.ndarray, np.generic)
_MEASURED: Final = 1 << 24  # bytes: a few milliseconds
_VIEWED: Final = 1 << 15  # bytes that are copied in the time that a view takes


def family_of(array_type: type) -> str:
    """What an array type belongs to: a library ("numpy", "jax", "cupy", "torch"), a device kind, or "other"."""
    kind = kinds.of_array(array_type)
    return library_of(array_type) if kind is None else kind.name


def is_array(x: Any) -> bool:
    """Whether `x` is a tensor of some library: it has dtype and shape, which can be read."""
    try:
        return hasattr(x, "dtype") and hasattr(x, "shape")
    except Exception:  # hasattr lets by what is no AttributeError
        return False


def without_warnings(call: Callable[..., T], *args: Any) -> T:
    """What `call` returns, with NumPy's floating-point errors ignored.

    In a context of its own, which NumPy's error state is a part of: an interrupt can keep `np.errstate` from restoring
    the caller's, as its end is Python code.
    """
    return copy_context().run(_ignoring, call, args)


def _ignoring(call: Callable[..., T], args: Sequence[Any]) -> T:
    np.errstate(all="ignore").__enter__()
    return call(*args)


def ranges_of(arrays: Sequence[Any]) -> tuple[Range | None, ...]:
    """The range of each floating NumPy array; None for others, where not all numbers are finite, and for all where
    they have more than `_MEASURED` bytes."""
    if sum(getattr(a, "nbytes", 0) for a in arrays) > _MEASURED:
        return (None,) * len(arrays)
    found: list[Range | None] = []
    for a in arrays:
        ends = (math.nan, math.nan)
        if isinstance(a, np.ndarray) and a.size and float_like(a.dtype):
            ends = (float(a.min()), float(a.max()))
        found.append(ends if math.isfinite(ends[0]) and math.isfinite(ends[1]) else None)
    return tuple(found)


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
    if isinstance(x, _SEQUENCES):
        return [to_numpy(e) for e in x]
    if isinstance(x, dict):
        if _PLAIN.issuperset(map(type, x.values())):
            return x
        return {k: to_numpy(v) if is_array(v) else v for k, v in x.items()}
    if x is None:
        return None
    try:
        found = _read(x)
    except Exception as e:  # a tracer, an array that was deleted or donated, a sparse tensor, ...
        if broken := broken_context(e):
            raise BrokenContextError(broken) from e
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
    if family == "numpy" and isinstance(x, _NUMPY):
        if type(x).__name__ == "MaskedArray" and np.any(x.mask):  # type: ignore[union-attr]
            raise InputError("it has masked elements; fill them first (x.filled(value))")
        return np.asarray(x)
    if family == "jax":
        try:
            return np.asarray(x)
        except RuntimeError:
            if x.is_fully_addressable:
                raise
            return _gathered(x)
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


def own_numpy(x: Any) -> np.ndarray:
    """The NumPy array of a result of this call, writable: JAX's memory as it is, where a copy takes longer than a view,
    because a program's results share theirs with nothing; else a copy. Raises what reading it does."""
    read = np.asarray(x)
    if read.nbytes < _VIEWED or read.dtype.isbuiltin != 1 or family_of(type(x)) != "jax":
        return np.array(read)
    return writable_over(read, x)


def _gathered(x: Any) -> np.ndarray:
    """The whole of an array that lies on devices of several processes, all of which read it together."""
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def beside(x: np.ndarray, scalar: Any) -> Any:
    """A NumPy array as JAX's, whole on each device that a scalar of JAX lies on; as it is for scalars of others."""
    if family_of(type(scalar)) != "jax":
        return x
    import jax

    with jax.enable_x64(True):
        return jax.device_put(x, scalar.sharding)


def devices_of(x: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The numbers of the devices that a JAX array lies on, and those of them that this process holds; of other arrays
    none."""
    if family_of(type(x)) != "jax":
        return (), ()
    places = x.sharding
    return tuple(d.id for d in places.device_set), tuple(d.id for d in places.addressable_devices)


def held_pieces(x: Any, first: int) -> Iterator[tuple[int, tuple[int, ...], np.ndarray]]:
    """Copies of the pieces of an array that this process holds, each of them once: the device, where the piece starts
    in the array, and its elements. first: the device that arrays of other libraries than JAX, which are whole, are
    counted with."""
    if family_of(type(x)) != "jax":
        yield first, (0,) * len(x.shape), np.array(to_numpy(x))
        return
    for piece in x.addressable_shards:
        if piece.replica_id == 0:
            start = tuple(part.start or 0 for part in piece.index)
            yield piece.device.id, start, np.array(piece.data)


def _text(x: np.ndarray) -> np.ndarray:
    return (np.char.decode(x, "utf-8") if x.dtype.kind == "S" else x).astype(object)


def texts_of(x: Any) -> Any:
    """What stands for a tensor of strings: an array of objects, all of which are str. Lists become arrays, and other
    objects what `str` makes of them, bytes their UTF-8; anything else comes back as it is.

    Raises InputError for None, which no text stands for, and for bytes that are no UTF-8.
    """
    if isinstance(x, list | tuple):
        x = np.array(x, dtype=object)
    if type(x) is not np.ndarray or x.dtype != object or set(map(type, x.flat)) <= {str}:
        return x
    return np.array([_text_of(e, i) for i, e in enumerate(x.flat)], dtype=object).reshape(x.shape)


def _text_of(element: Any, index: int) -> str:
    if element is None:
        raise InputError(f"element {index} is None; give the text that stands for what is missing")
    if isinstance(element, list | tuple | dict | np.ndarray):
        raise InputError(f"element {index} is a {type(element).__name__}, no text; are the lines of one length?")
    if not isinstance(element, bytes):
        return str(element)
    try:
        return element.decode()
    except UnicodeDecodeError as e:
        raise InputError(f"element {index}: these bytes are not UTF-8: {e.reason}") from e


# torch dtypes that NumPy has through ml_dtypes, under the same names
_NARROW = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")


def _numpy_of_torch(x: Any) -> np.ndarray:
    x = x.detach().cpu().resolve_conj().resolve_neg()
    name = str(x.dtype).removeprefix("torch.")
    if str(x.layout) != "torch.strided":
        return x.numpy()  # type: ignore[no-any-return]  # says why it has no memory of this kind
    if name not in _NARROW:
        return array_of_tensor(x, np.dtype(name).str)
    import ml_dtypes

    torch = sys.modules["torch"]
    bits = "int16" if name == "bfloat16" else "uint8"
    return array_of_tensor(x.view(getattr(torch, bits)), np.dtype(bits).str).view(getattr(ml_dtypes, name))


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
    """A CuPy array of any array: in place where it lies on the current GPU. CuPy must have been loaded.

    What CuPy has no dtype for (text, float8, int4) stays NumPy's; sequences are taken element by element.
    """
    cupy = sys.modules["cupy"]
    here = cupy.cuda.runtime.getDevice()
    if isinstance(x, cupy.ndarray):
        return x if x.device.id == here else cupy.asarray(x.get())
    if isinstance(x, list | tuple):
        return [to_cupy(e) for e in x]
    if type(x) is not np.ndarray and cuda_device(x) == here:
        try:
            x = plain_tensor(x) if family_of(type(x)) == "torch" else x
            return cupy.from_dlpack(x) if hasattr(x, "__dlpack__") else cupy.asarray(x)
        except (BufferError, RuntimeError, TypeError, ValueError):
            pass  # a dtype that CuPy has not
    x = to_numpy(x)
    try:
        return cupy.asarray(x) if isinstance(x, np.ndarray) and x.dtype != object else x
    except ValueError:
        return x
    except MemoryError as e:
        free, whole = cupy.cuda.Device(here).mem_info
        raise ExecutionError(
            f"cuda:{here} has no room for {x.dtype}{list(x.shape)} of {x.nbytes:,} bytes: {e}; {free:,} of {whole:,} "
            "bytes are free"
        ) from e


def plain_tensor(x: Any) -> Any:
    """A torch tensor whose memory holds its numbers, and which shows it to other libraries."""
    if x.requires_grad:
        x = x.detach()
    return x.resolve_neg() if x.is_neg() else x


_TO_FAMILY: dict[str, Converter] = {"numpy": to_numpy, "jax": _to_jax, "torch": _to_torch, "cupy": to_cupy}


_DEFAULT: Final = "default converter (DLPack or the array protocol)"


class UnreadableResult(ConverterError):
    """A result of an engine cannot be read by DLPack or the array protocol. engine: its name."""

    def __init__(self, message: str, engine: str) -> None:
        super().__init__(message)
        self.engine = engine


def has_converter(source: str, target: str) -> bool:
    """Whether the registry has a converter for this pair of engines."""
    return converters.find(source, target) is not None


def conversion(node: Node, graph: Graph, to_host: Convert, registry: Converters = converters) -> Conversion | None:
    """What the converter `node` of `graph` does; None where its input is its output as it is.

    to_host: conversion of the arrays of engines without a converter of their own.
    Raises ConverterError, naming the value and the nodes around it, for a pair that nothing converts between.
    """
    source, target = str(node.attributes["source"]), str(node.attributes["target"])
    found = registry.find(source, target)
    if found is not None:
        return None if found.function is None else Conversion(found.function, str(found), node, graph)
    if source == HOST:
        return None  # engines take the host's arrays
    if target == HOST:
        return Conversion(to_host, f"{_DEFAULT} {source} -> {target}", node, graph)
    raise ConverterError(
        f"there is no converter from {source!r} to {target!r}, for {_transfer(node, graph)}; {registry.known()}. Write "
        f"one and register it with @xrt.register_converter({source!r}, {target!r})"
    )


class Conversion:
    """One converter as a step. Its first result is checked against the type of the value; later ones are not."""

    __slots__ = ("_function", "_is_default", "_label", "_proven", "_remedy", "_source", "_transfer", "_type")

    def __init__(self, function: Convert, label: str, node: Node, graph: Graph) -> None:
        self._function = function
        self._label = label
        self._transfer = _transfer(node, graph)
        made = node.outputs[0]
        self._type = made.type if made is not None else None
        self._proven = False
        pair = f"{node.attributes['source']!r}, {node.attributes['target']!r}"
        self._source = str(node.attributes["source"])
        self._is_default = label.startswith(_DEFAULT)
        self._remedy = f"@xrt.register_converter({pair}) registers one" if self._is_default else "Mend it"

    def __call__(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """The array in the other space. Raises ConverterError where the converter fails or gives something else."""
        try:
            made = self._function(arrays[0])
        except Exception as e:
            message = f"{self._label} failed for {self._transfer}: {type(e).__name__}: {e}. {self._remedy}"
            if self._is_default:
                raise UnreadableResult(message, self._source) from e
            raise ConverterError(message) from e
        if not self._proven:
            self._prove(made)
        return (made,)

    def _prove(self, made: Any) -> None:
        t = self._type
        if isinstance(t, TensorType):
            dtype, shape = getattr(made, "dtype", None), getattr(made, "shape", None)
            if dtype is None or shape is None:
                raise ConverterError(
                    f"{self._label} gave a {type(made).__name__} for {self._transfer}; an array {t} is needed"
                )
            fits = t.shape is None or (
                len(shape) == len(t.shape)
                and all(not isinstance(d, int) or d == n for d, n in zip(t.shape, shape, strict=True))
            )
            # dtypes of other libraries are not NumPy's; their arrays are known by shape alone
            if not fits or (isinstance(dtype, np.dtype) and t.dtype is not None and dtype != t.dtype):
                raise ConverterError(
                    f"{self._label} gave {dtype}{list(shape)} for {self._transfer}; {t} is needed: a converter must "
                    "keep dtype and shape"
                )
        self._proven = True


def _transfer(node: Node, graph: Graph) -> str:
    """The value that a converter transfers, its producer and its consumers, for messages."""
    value, made = node.inputs[0], node.outputs[0]
    assert value is not None
    assert made is not None
    producer = graph.producer(value)
    maker = "an input of the graph" if producer is None else f"made by {_shown(producer)}"
    readers = [_shown(graph.nodes[i]) for i in graph.consumers.get(made, ())[:3]]
    return f"value {value.name!r} ({maker}, read by {', '.join(readers) or 'the graph as an output'})"


def _shown(node: Node) -> str:
    if node.op_type == "Launch":
        return f"{node.name} on {node.attributes['engine']!s}"
    return f"{node.operator} {node.name!r}" if node.name else node.operator


Inverse = Callable[[Sequence[Any]], list[Any]]


def plain_arrays(arguments: Sequence[Any]) -> tuple[Sequence[Any], Inverse | None]:
    """Arrays in the place of arguments of registered types, and the inverse conversion for the results.

    The same object and None where no argument is of such a type; None as well where the first array among the arguments
    is not. Raises InputError where `to_host` of a type fails or gives no array.
    """
    if not converters.has_types:
        return arguments, None
    types = [converters.array_type(type(a)) for a in arguments]
    if not any(types):
        return arguments, None
    back: Inverse | None = None
    for t, a in zip(types, arguments, strict=True):
        if t is not None:
            back = partial(_results_in, t, a)
        if t is not None or is_array(a):
            break
    return [a if t is None else _array_from(t, a) for t, a in zip(types, arguments, strict=True)], back


def plain_arguments(
    args: Sequence[Any], named: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any], Inverse | None]:
    """`plain_arrays` of arguments by position and by name."""
    if not converters.has_types:
        return args, named, None
    arrays, back = plain_arrays([*args, *named.values()])
    return arrays[: len(args)], dict(zip(named, arrays[len(args) :], strict=True)), back


def _array_from(array_type: ArrayType, value: Any) -> Any:
    name = f"to_host of the array type {array_type.name!r} ({array_type.owner})"
    try:
        made = array_type.to_host(value)
    except Exception as e:
        raise InputError(f"{name} failed: {type(e).__name__}: {e}") from e
    if converters.array_type(type(made)) is not None or not is_array(made):
        raise InputError(f"{name} gave a {type(made).__name__}, which is no array of a library that XRT knows")
    return made


def _results_in(array_type: ArrayType, like: Any, results: Sequence[Any]) -> list[Any]:
    """Results as objects of a registered type. Raises ConverterError where `from_host` fails."""
    plain = [to_numpy(r) for r in results]
    if array_type.from_host is None:
        return plain
    try:
        return [array_type.from_host(r, like) for r in plain]
    except Exception as e:
        raise ConverterError(
            f"from_host of the array type {array_type.name!r} ({array_type.owner}) failed: {type(e).__name__}: {e}"
        ) from e

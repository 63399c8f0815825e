"""Conversions between element types: Cast, CastLike, BitCast."""

from __future__ import annotations

import functools
import math
from typing import Any, Final

import ml_dtypes
import numpy as np

from xrt_core.errors import ExecutionError
from xrt_core.ir.graph import Node
from xrt_core.ir.types import ONNX_TO_DTYPE, STRING, dtype_name, float_like
from xrt_core.kernels.namespace import bit_cast, is_jax, widen
from xrt_core.kernels.registry import OpContext, kernel

_SUB_BYTE_BITS: Final = {"int4": 4, "uint4": 4, "int2": 2, "uint2": 2, "float4_e2m1fn": 4}
_SATURATING: Final = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
_NOT_FINITE: Final = {"nan": "NaN", "inf": "INF", "-inf": "-INF"}
_WIDE: Final = (np.dtype(np.int64), np.dtype(np.uint32))
_E2M1: Final = np.dtype(ml_dtypes.float4_e2m1fn)
_E8M0: Final = np.dtype(ml_dtypes.float8_e8m0fnu)


def _is_small_integer(dtype: np.dtype) -> bool:
    return dtype.name in ("int4", "uint4", "int2", "uint2")


def _to_e8m0(xp: Any, x: Any, saturate: bool, round_mode: str) -> Any:
    """Powers of two: the exponent of |x| as float32, rounded by its fraction; 2**-127 is a float32 subnormal."""
    bits = bit_cast(xp, x.astype(np.float32), np.dtype(np.int32)) & 0x7FFFFFFF
    exponent, fraction = bits >> 23, bits & 0x7FFFFF
    tiny = exponent == 0
    above = xp.where(tiny, fraction - 0x400000, fraction)  # distance to the power of two below
    if round_mode == "up":
        code = exponent + (above > 0)
    elif round_mode == "nearest":
        code = exponent + (above >= xp.where(tiny, 0x200000, 0x400000))
    else:
        code = exponent
    nan = bits > 0x7F800000
    if saturate:
        code = xp.where(nan, 0xFF, xp.minimum(code, 0xFE))
    else:
        code = xp.where(nan | (code > 0xFE) | (tiny & (above < 0)), 0xFF, code)
    return bit_cast(xp, code.astype(np.uint8), _E8M0)


def _from_strings(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    try:
        if dtype.kind in "iu":
            try:
                return x.astype(dtype)
            except ValueError:  # "100.5" and "1e3" are integers too, by way of float
                return x.astype(np.float64).astype(dtype)
        numbers = np.asarray(x.astype(np.float64))
    except (ValueError, TypeError) as e:
        raise ExecutionError(f"Cast of a string to {dtype_name(dtype)}: {e}; give it numeric literals") from e
    return np.asarray(cast_array(np, numbers, dtype))


def _to_strings(x: np.ndarray) -> np.ndarray:
    """Numbers as texts. The standard asks for a "plain floating-point representation" and leaves the rest open, which
    is as other runtimes have it: 8 digits at most, no zeros behind, and "NaN", "INF" and "-INF", its own literals."""
    flat = x.reshape(-1)
    if not float_like(x.dtype):
        texts = [str(int(v)) for v in flat.tolist()] if x.dtype == np.bool_ else list(map(str, flat.tolist()))
    else:
        texts = [f"{v:.8g}" if math.isfinite(v) else _NOT_FINITE[str(v)] for v in widen(flat).tolist()]
    found = np.empty(flat.shape, STRING)
    found[:] = texts
    return found.reshape(x.shape)


def cast_array(xp: Any, x: Any, dtype: np.dtype, *, saturate: bool = True, round_mode: str = "up") -> Any:
    """`x` converted to `dtype` by the rules of ONNX Cast.

    saturate: what exceeds a float8 type becomes its largest finite value, not NaN or infinity.
    round_mode: "up", "down" or "nearest", to float8_e8m0 only. Integers out of range wrap,
    and so do floats (`_to_integer`).
    Raises ExecutionError for a string that is no number.
    """
    if x.dtype == dtype:
        return x
    if x.dtype == STRING:
        return _from_strings(x, dtype)
    if x.dtype.name in _SUB_BYTE_BITS or x.dtype.name.startswith("float8"):
        x = x.astype(np.float32 if float_like(x.dtype) else np.int32)  # small types lack casts to one another
    if dtype == STRING:
        return _to_strings(x)
    if dtype == np.bool_:
        return x != 0
    if dtype == _E8M0:
        return _to_e8m0(xp, x, saturate, round_mode)
    if dtype == _E2M1:  # which has neither infinity nor NaN: what is beyond its largest number becomes that
        return xp.clip(x.astype(np.float32), -6.0, 6.0).astype(dtype)
    if dtype.name in _SATURATING and saturate:
        largest = float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]
        return xp.clip(x.astype(np.float32) if x.dtype != np.float64 else x, -largest, largest).astype(dtype)
    if dtype.kind in "iu" or _is_small_integer(dtype):
        return _to_integer(xp, x, dtype)
    return x.astype(dtype)


def _to_integer(xp: Any, x: Any, dtype: np.dtype) -> Any:
    """`x` as integers. ONNX leaves open what floats become that the type does not hold. Here they are the same on every
    engine, what C compilers make of them on x86-64, and so NumPy and other runtimes: truncated to 64 bits for 64-bit
    and unsigned 32-bit types, else to 32, whose low bits are kept; what does not fit those, or is NaN, is their least
    number."""
    if not float_like(x.dtype):
        return x.astype(np.int32).astype(dtype) if _is_small_integer(dtype) else x.astype(dtype)
    carrier = np.dtype(np.int64 if dtype in _WIDE else np.int32)
    if xp is np and _numpy_converts_alike():  # but for uint32, where it depends on the place of an element
        x = x.astype(carrier) if dtype == np.uint32 or _is_small_integer(dtype) else x
    else:
        x = _halves(xp, x) if dtype == np.uint64 else _truncated(xp, x, carrier)
    return x if x.dtype == dtype else x.astype(dtype)


def _truncated(xp: Any, x: Any, carrier: np.dtype) -> Any:
    """Floats as integers of 32 or 64 bits, for namespaces that saturate, or that say nothing of floats out of range."""
    if x.dtype.itemsize < 4:
        x = x.astype(np.float32)
    info = np.iinfo(carrier)
    inside = (x >= float(info.min)) & (x < -float(info.min))  # both are floats; NaN is not inside
    return xp.where(inside, xp.where(inside, x, 0).astype(carrier), xp.asarray(info.min, dtype=carrier))


def _halves(xp: Any, x: Any) -> Any:
    """Floats as uint64: the upper half is converted as that much less, and negative numbers wrap around."""
    if x.dtype.itemsize < 4:
        x = x.astype(np.float32)
    half = 2.0**63
    upper = x >= half
    lower = _truncated(xp, xp.where(upper, x - half, x), np.dtype(np.int64)).astype(np.uint64)
    return xp.where(upper, lower ^ np.uint64(1 << 63), lower)


@functools.cache
def _numpy_converts_alike() -> bool:
    """Whether NumPy's conversions are those of x86-64 here; on other processors they saturate."""
    x = np.repeat(np.array((3e19, -3e19, np.nan), np.float32), 9)
    with np.errstate(all="ignore"):
        short, long = x.astype(np.int32), x.astype(np.int64)
    return bool(np.all(short == np.iinfo(np.int32).min) and np.all(long == np.iinfo(np.int64).min))


def _strings(node: Node) -> str | None:
    dtypes = [v.dtype for v in (*node.inputs, *node.outputs) if v is not None]
    return "strings are computed on the host" if STRING in dtypes else None


def _cast(ctx: OpContext, x: Any, dtype: np.dtype) -> Any:
    out = cast_array(
        ctx.xp, x, dtype, saturate=bool(ctx.attr("saturate", 1)), round_mode=str(ctx.attr("round_mode", "up"))
    )
    return ctx.xp.asarray(out)


def _target(ctx: OpContext) -> np.dtype:
    to = ctx.attr("to")
    found = ONNX_TO_DTYPE.get(to)
    if found is None:
        raise ExecutionError(f"{ctx.node.operator} to ONNX element type {to}, which XRT does not know")
    return found


@kernel("Cast", dynamic=_strings)
def cast(ctx: OpContext, x: Any) -> Any:
    """x in the element type `to`."""
    return _cast(ctx, x, _target(ctx))


@kernel("CastLike", dynamic=_strings)
def cast_like(ctx: OpContext, x: Any, target: Any) -> Any:
    """x in the element type of the second input."""
    return _cast(ctx, x, np.dtype(target.dtype))


def _codes(x: np.ndarray) -> np.ndarray:
    """The bits of a sub-byte array in the low bits of bytes (ml_dtypes spreads a sign over the byte)."""
    mask = np.uint8((1 << _SUB_BYTE_BITS[x.dtype.name]) - 1)
    return np.asarray((x.astype(np.int8) if x.dtype.name.startswith("int") else x).view(np.uint8) & mask)


def _no_bits(node: Node) -> str | None:
    names = [v.dtype.name for v in (*node.inputs, *node.outputs) if v is not None and v.dtype is not None]
    return "the bits of complex numbers are read on the host" if any(n.startswith("complex") for n in names) else None


@kernel("BitCast", dynamic=_no_bits)
def bit_cast_(ctx: OpContext, x: Any) -> Any:
    """The bits of x read as the element type `to`, of the same width."""
    xp, dtype = ctx.xp, _target(ctx)
    if is_jax(xp):
        if x.dtype == np.bool_:
            x = x.astype(np.uint8)
        return x != 0 if dtype == np.bool_ else bit_cast(xp, x, dtype)
    if x.dtype.name in _SUB_BYTE_BITS and x.dtype != dtype:
        codes = _codes(x)
        if dtype.name.startswith("int"):
            sign = 1 << (_SUB_BYTE_BITS[dtype.name] - 1)
            return ((codes.astype(np.int8) ^ sign) - sign).astype(dtype)
        return codes.view(dtype)
    return bit_cast(xp, x, dtype)

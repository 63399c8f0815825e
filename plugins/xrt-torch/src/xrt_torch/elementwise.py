"""Elementwise arithmetic: where torchlib has no translation, or one of fewer types or digits than torch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _fmax(a: Tensor, b: Tensor) -> Tensor:
    if not torch.result_type(a, b).is_floating_point:
        return torch.maximum(a, b)
    return torch.where(torch.isnan(a), b, torch.where(torch.isnan(b), a, torch.maximum(a, b)))


def _fmin(a: Tensor, b: Tensor) -> Tensor:
    if not torch.result_type(a, b).is_floating_point:
        return torch.minimum(a, b)
    return torch.where(torch.isnan(a), b, torch.where(torch.isnan(b), a, torch.minimum(a, b)))


def _is_negative(x: Tensor) -> Tensor:
    """Whether the sign is minus, that of zero included."""
    return (x < 0) | ((x == 0) & (1 / x < 0)) if x.dtype.is_floating_point else x < 0


def _rsub(x: Tensor, other: Any, alpha: Any = 1) -> Tensor:
    """Of a number, which torch would have as the first operand of `sub`, as a tensor."""
    if not isinstance(other, Tensor):
        other = torch.full([], other, dtype=torch.result_type(x, other), device=x.device)
    return torch.sub(other, x, alpha=alpha)


def _copysign(a: Tensor, b: Any) -> Tensor:
    kind = torch.result_type(a, b)
    a = a.to(kind if kind.is_floating_point else torch.get_default_dtype())
    if not isinstance(b, Tensor):
        return -a.abs() if math.copysign(1.0, b) < 0 else a.abs()
    return torch.where(_is_negative(b), -a.abs(), a.abs())


def _hypot(a: Tensor, b: Tensor) -> Tensor:
    kind = torch.result_type(a, b)
    a, b = a.to(kind).abs(), b.to(kind).abs()
    most, least = torch.maximum(a, b), torch.minimum(a, b)
    ratio = least / torch.where(most == 0, torch.ones_like(most), most)
    made = torch.where(most == 0, most, most * torch.sqrt(1 + ratio * ratio))
    return torch.where((a == math.inf) | (b == math.inf), torch.full_like(made, math.inf), made)


def _ldexp(a: Tensor, b: Tensor) -> Tensor:
    """Powers of two are of the type of a float exponent."""
    if not b.dtype.is_floating_point:
        kind = torch.result_type(a, b)
        b = b.to(kind if kind.is_floating_point else torch.get_default_dtype())
    return a * torch.pow(2.0, b)


def _angle(x: Tensor) -> Any:
    if x.dtype.is_complex:
        return NotImplemented
    kind = x.dtype if x.dtype.is_floating_point else torch.get_default_dtype()
    made = (x < 0).to(kind) * math.pi  # of `where` with two numbers the result would be of the default dtype
    return torch.where(torch.isnan(x), x, made) if x.dtype.is_floating_point else made


def _atan2(y: Tensor, x: Tensor) -> Tensor:
    """By the quotient, which infinite operands are made finite for."""
    kind = torch.result_type(y, x)
    kind = kind if kind.is_floating_point else torch.get_default_dtype()
    y, x = y.to(kind), x.to(kind)
    endless = (y.abs() == math.inf) & (x.abs() == math.inf)
    b, a = torch.where(endless, torch.sign(y), y), torch.where(endless, torch.sign(x), x)
    quotient = torch.atan(b / torch.where(a == 0, torch.ones_like(a), a))
    below = _is_negative(b)
    turned = torch.where(below, quotient - math.pi, quotient + math.pi)
    upright = torch.where(b == 0, b, torch.sign(b) * (math.pi / 2))
    flat = torch.where(below, _filled(b, -math.pi), _filled(b, math.pi))
    upright = torch.where((b == 0) & _is_negative(a), flat, upright)
    return torch.where(a == 0, upright, torch.where(a < 0, turned, quotient))


def _filled(x: Tensor, value: float) -> Tensor:
    return torch.full_like(x, value)


def _power_of_bool(x: Tensor, exponent: Any) -> Any:
    return aten.pow.Tensor_Scalar(x.to(torch.int64), exponent) if x.dtype is torch.bool else NotImplemented


def _power(x: Tensor, exponent: Tensor) -> Any:
    """ONNX's result is of the base's type."""
    kind = torch.result_type(x, exponent)
    return NotImplemented if kind is x.dtype else aten.pow.Tensor_Tensor(x.to(kind), exponent.to(kind))


def _remainder(x: Any, other: Any) -> Any:
    """Of floats by `fmod`, which is exact: what is left of x without the multiple of other is not, in few digits."""
    kind = torch.result_type(x, other)
    if not kind.is_floating_point:
        return NotImplemented
    x, other = (_as_tensor(v, kind) for v in (x, other))
    left = torch.fmod(x, other)
    return torch.where((left != 0) & ((left < 0) != (other < 0)), left + other, left)


def _hardtanh(x: Tensor, least: Any = -1, most: Any = 1) -> Any:
    """As `_leaky_relu`."""
    return torch.clamp(x, least, most) if x.dtype is torch.float64 else NotImplemented


def _shifted(x: Any, n: Any, called: Any, kept: Any) -> Any:
    """The operator called, as the one that torchlib has, of two tensors of one type. Unsigned bytes, of which it makes
    signed ones, are shifted as numbers of more digits."""
    kind = torch.result_type(x, n)
    wide = torch.int32 if kind is torch.uint8 else kind
    if called is kept and all(isinstance(v, Tensor) and v.dtype is wide for v in (x, n)):
        return NotImplemented
    x, n = (v.to(wide) if isinstance(v, Tensor) else torch.full([], v, dtype=wide) for v in (x, n))
    return kept(x, n).to(kind)


def _floor_divide(a: Any, b: Any) -> Any:
    """Of floats by what `fmod` leaves, which is exact: 1 // 0.1 is 9, and the quotient is rounded to 10. Of booleans as
    of the integers that torch makes of them."""
    kind = torch.result_type(a, b)
    if kind.is_floating_point:
        wide = kind if kind is torch.float64 else torch.float32
        return _floor_of_floats(*(_as_tensor(v, wide) for v in (a, b))).to(kind)
    if torch.bool not in {v.dtype for v in (a, b) if isinstance(v, Tensor)}:
        return NotImplemented
    a, b = (v.to(kind) if isinstance(v, Tensor) else v for v in (a, b))
    return torch.floor_divide(a, b)


def _floor_of_floats(a: Tensor, b: Tensor) -> Tensor:
    left = torch.fmod(a, b)
    made = (a - left) / b
    made = torch.where((left != 0) & ((left < 0) != (b < 0)), made - 1, made)
    whole = torch.floor(made)
    return torch.where(b == 0, a / b, torch.where(made - whole > 0.5, whole + 1, whole))


def _as_tensor(v: Any, kind: torch.dtype) -> Tensor:
    return v.to(kind) if isinstance(v, Tensor) else torch.full([], v, dtype=kind)


def _divide(a: Any, b: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode != "floor":
        return NotImplemented
    if torch.result_type(a, b).is_floating_point:
        return _floor_divide(a, b)
    return torch.floor_divide(a, b)


def _round(x: Tensor) -> Any:
    return NotImplemented if x.dtype.is_floating_point else x.clone()


def _leaky_relu(x: Tensor, slope: Any = 0.01) -> Any:
    """ONNX's operator has its attribute in float32."""
    return torch.where(x > 0, x, x * slope) if x.dtype is torch.float64 else NotImplemented


def _log(x: Tensor, base: float) -> Any:
    """torchlib has the logarithm of the base in float32."""
    return torch.log(x) / math.log(base) if x.dtype is torch.float64 else NotImplemented


def _elu(x: Tensor, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Any:
    """As `_leaky_relu`."""
    if x.dtype is not torch.float64:
        return NotImplemented
    return torch.where(x > 0, x, torch.expm1(x * input_scale) * alpha) * scale


_EUCLID = {torch.int64: 92, torch.int32: 47, torch.int16: 24, torch.int8: 12, torch.uint8: 13}
"""Steps of Euclid's algorithm at most: consecutive Fibonacci numbers take the most (Lame)."""


def _gcd(a: Tensor, b: Tensor) -> Any:
    kind = torch.result_type(a, b)
    a, b = (x.to(kind).abs() if kind.is_signed else x.to(kind) for x in torch.broadcast_tensors(a, b))
    for _ in range(_EUCLID[kind]):
        done = b == 0
        a, b = torch.where(done, a, b), torch.where(done, b, torch.fmod(a, torch.where(done, 1, b)))
    return a.abs() if kind.is_signed else a.clone()


def _lcm(a: Tensor, b: Tensor) -> Any:
    divisor = aten.gcd.default(a, b)
    a, b = a.to(divisor.dtype), b.to(divisor.dtype)
    made = torch.div(a, torch.where(divisor == 0, 1, divisor), rounding_mode="trunc") * b
    return made.abs() if made.dtype.is_signed else made


def _frexp(x: Tensor) -> tuple[Tensor, Tensor]:
    """By the logarithm, put right where it was rounded over a power of two; multiplied in halves, so that the factor
    of numbers without leading bit does not overflow."""
    wide = x.to(torch.float64)
    finite = (wide != 0) & (wide.abs() < math.inf)
    size = torch.where(finite, wide.abs(), 1.0)
    exponent = torch.floor(torch.log2(size)) + 1
    half = torch.floor(exponent / 2)
    mantissa = size * torch.pow(2.0, -half) * torch.pow(2.0, half - exponent)
    more, less = mantissa >= 1, mantissa < 0.5
    exponent = exponent + more.to(torch.float64) - less.to(torch.float64)
    mantissa = torch.where(more, mantissa / 2, torch.where(less, mantissa * 2, mantissa))
    mantissa = torch.where(finite, torch.where(wide < 0, -mantissa, mantissa), wide)
    return mantissa.to(x.dtype), torch.where(finite, exponent, 0.0).to(torch.int32)


_FLOATS = {
    torch.float64: (53, -1074),
    torch.float32: (24, -149),
    torch.bfloat16: (8, -133),
    torch.float16: (11, -24),
}
"""Digits of a type, and the exponent of its least number."""


def _next_after(a: Tensor, b: Tensor) -> Any:
    """By the distance to the neighbour, a power of two."""
    kind = torch.result_type(a, b)
    if kind not in _FLOATS:
        return NotImplemented
    digits, least = _FLOATS[kind]
    a, b = (x.to(torch.float64) for x in torch.broadcast_tensors(a.to(kind), b.to(kind)))
    mantissa, exponent = aten.frexp.Tensor(a)
    rises = b > a
    inwards = (mantissa.abs() == 0.5) & (rises == (a < 0))  # where numbers are twice as dense
    place = torch.clamp(exponent.to(torch.float64) - digits - inwards.to(torch.float64), min=least)
    half = torch.floor(place / 2)
    step = torch.pow(2.0, half) * torch.pow(2.0, place - half)
    step = torch.where(a == 0, 2.0**least, step)
    made = torch.where(rises, a + step, a - step)
    most = torch.finfo(kind).max
    made = torch.where(a.abs() == math.inf, torch.sign(a) * most, made)
    made = torch.where(a == b, b, made)
    return torch.where(torch.isnan(a) | torch.isnan(b), math.nan, made).to(kind)


def decompositions() -> dict[Any, Callable[..., Any]]:
    """ATen's operators on elements."""
    return {
        aten.angle.default: _angle,
        aten.atan2.default: _atan2,
        aten.copysign.Scalar: _copysign,
        aten.copysign.Tensor: _copysign,
        aten.div.Scalar_mode: _divide,
        aten.div.Tensor_mode: _divide,
        aten.elu.default: _elu,
        aten.floor_divide.Scalar: _floor_divide,
        aten.floor_divide.default: _floor_divide,
        aten.fmax.default: _fmax,
        aten.fmin.default: _fmin,
        aten.frexp.Tensor: _frexp,
        aten.gcd.default: _gcd,
        aten.hardtanh.default: _hardtanh,
        aten.hypot.default: _hypot,
        aten.lcm.default: _lcm,
        aten.ldexp.Tensor: _ldexp,
        aten.leaky_relu.default: _leaky_relu,
        aten.log10.default: functools.partial(_log, base=10),
        aten.log2.default: functools.partial(_log, base=2),
        aten.nextafter.default: _next_after,
        aten.pow.Tensor_Scalar: _power_of_bool,
        aten.pow.Tensor_Tensor: _power,
        aten.remainder.Scalar: _remainder,
        aten.remainder.Scalar_Tensor: _remainder,
        aten.remainder.Tensor: _remainder,
        aten.round.default: _round,
        aten.rsub.Scalar: _rsub,
        aten.rsub.Tensor: _rsub,
        aten.signbit.default: _is_negative,
        **{
            called: functools.partial(_shifted, called=called, kept=kept)
            for kept, packets in (
                (aten.bitwise_left_shift.Tensor, (aten.bitwise_left_shift, aten.__lshift__)),
                (aten.bitwise_right_shift.Tensor, (aten.bitwise_right_shift, aten.__rshift__)),
            )
            for packet in packets
            for called in (getattr(packet, name) for name in packet.overloads() if name != "int" and "out" not in name)
        },
    }

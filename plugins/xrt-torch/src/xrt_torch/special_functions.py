"""Special functions that ONNX has no operator for, in terms of elementary ones; computed in float64.

Series and recurrences are those of the Digital Library of Mathematical Functions (DLMF, https://dlmf.nist.gov), by
whose numbers they are named. Each is held against torch eager in float64 by the tests.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

aten = torch.ops.aten

_LANCZOS: Final = (
    0.99999999999980993, 676.5203681218851, -1259.1392167224028, 771.32342877765313, -176.61502916214059,
    12.507343278686905, -0.13857109526572012, 9.9843695780195716e-6, 1.5056327351493116e-7,
)  # fmt: skip
_BERNOULLI: Final = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510)
"""B(2), B(4), ..."""


def _in_double(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function of floats or integers whose results have the type that torch gives them."""

    @functools.wraps(function)
    def call(x: Tensor, *rest: Any) -> Tensor:
        wanted = x.dtype if x.dtype.is_floating_point else torch.get_default_dtype()
        return function(x.to(torch.float64), *rest).to(wanted)

    return call


def _like(x: Tensor, value: float) -> Tensor:
    return torch.full_like(x, value)


@_in_double
def lgamma(x: Tensor) -> Tensor:
    """Lanczos' approximation; the reflection of DLMF 5.5.3 below 1/2."""
    low = x < 0.5
    y = torch.where(low, 1 - x, x) - 1
    total: Any = _LANCZOS[0]
    for i, c in enumerate(_LANCZOS[1:], 1):
        total = total + c / (y + i)
    t = y + 7.5
    made = 0.5 * math.log(2 * math.pi) + (y + 0.5) * torch.log(t) - t + torch.log(total)
    made = torch.where(t == math.inf, t, made)
    sine = torch.sin(math.pi * (x - torch.round(x))).abs()
    made = torch.where(low, math.log(math.pi) - torch.log(sine) - made, made)
    return torch.where(x == -math.inf, _like(x, math.inf), made)


@_in_double
def digamma(x: Tensor) -> Tensor:
    """DLMF 5.5.2 up to 8, from there 5.11.2; 5.5.4 for negative numbers."""
    low = x < 0
    y = torch.where(low, 1 - x, x)
    shift: Any = 0.0
    for k in range(8):
        shift = shift + 1 / (y + k)
    z = y + 8
    inverse = 1 / (z * z)
    tail: Any = 0.0
    for k in range(len(_BERNOULLI), 0, -1):
        tail = (tail + _BERNOULLI[k - 1] / (2 * k)) * inverse
    made = torch.log(z) - 0.5 / z - tail - shift
    made = torch.where(low, made - math.pi / torch.tan(math.pi * (x - torch.round(x))), made)
    pole = low & (x == torch.round(x))
    made = torch.where(pole, _like(x, math.nan), made)
    return torch.where(x == 0, -1 / x, made)


def polygamma(n: int, x: Tensor) -> Tensor:
    """DLMF 5.5.2 by 12 steps up, from there 5.15.9; the reflection 5.15.6 below 1/2."""
    return digamma(x) if n == 0 else _polygamma(x, n)


@_in_double
def _polygamma(x: Tensor, n: int) -> Tensor:
    low = x < 0.5
    y = torch.where(low, 1 - x, x)
    z = y + 12
    total: Any = math.factorial(n - 1) / z**n + math.factorial(n) / (2 * z ** (n + 1))
    for k in range(12):
        total = total + math.factorial(n) / (y + k) ** (n + 1)
    for k, b in enumerate(_BERNOULLI, 1):
        total = total + b * (math.factorial(2 * k + n - 1) / math.factorial(2 * k)) / z ** (2 * k + n)
    sign = 1.0 if n % 2 else -1.0
    cotangent = 1 / torch.tan(math.pi * (x - torch.round(x)))
    derivative: Any = 0.0
    for c in reversed(_cotangent_derivative(n)):
        derivative = derivative * cotangent + c
    made = torch.where(low, -math.pi * derivative - total, sign * total)
    return torch.where(low & (x == torch.round(x)), _like(x, sign * math.inf), made)


def _cotangent_derivative(n: int) -> list[float]:
    """The n-th derivative of cot(pi x) as a polynomial in the cotangent, the lowest coefficient first."""
    p = [0.0, 1.0]
    for _ in range(n):
        slope = [i * c for i, c in enumerate(p)][1:]
        p = [-math.pi * (a + b) for a, b in zip([*slope, 0.0, 0.0], [0.0, 0.0, *slope], strict=True)]
    return p


def _zeta_from_zero(s: Tensor, q: Tensor) -> Tensor:
    """Ten terms, and Euler and Maclaurin's sum for the rest (DLMF 25.2.9), for q > 0."""
    w = q + 10
    power = w**-s
    total = w * power / (s - 1) + power / 2
    for k in range(10):
        total = total + (q + k) ** -s
    term = s * power / w
    for k, b in enumerate(_BERNOULLI, 1):
        total = total + b / math.factorial(2 * k) * term
        term = term * ((s + 2 * k - 1) / w) * ((s + 2 * k) / w)
    return total


def zeta(s: Any, q: Any) -> Tensor:
    """The sum of (q + k) ** -s over all k from 0 on; below zero, for whole s, from both ends of the terms."""
    kind = torch.result_type(s, q)
    kind = kind if kind.is_floating_point else torch.get_default_dtype()
    s, q = (v.to(torch.float64) if isinstance(v, Tensor) else torch.full([], v, dtype=torch.float64) for v in (s, q))
    s, q = torch.broadcast_tensors(s, q)
    below, is_whole = q < 0, q == torch.floor(q)
    rest = torch.where(below, q - torch.floor(q), q)
    rest = torch.where(rest <= 0, 1.0, rest)
    exponent = torch.where(s <= 1, 2.0, s)
    sign = 1 - 2 * torch.remainder(exponent, 2)
    mirrored = _zeta_from_zero(exponent, torch.where(below & ~is_whole, 1 - rest, 1.0))
    beyond = _zeta_from_zero(exponent, torch.where(below, 1 - q, 1.0))
    made = _zeta_from_zero(exponent, rest)
    made = torch.where(below, made + sign * (mirrored - beyond), made)
    made = torch.where((q <= 0) & (s != torch.floor(s)), math.nan, made)
    made = torch.where((q <= 0) & is_whole, math.inf, made)
    return torch.where(s < 1, math.nan, torch.where(s == 1, math.inf, made)).to(kind)


@_in_double
def erfinv(x: Tensor) -> Tensor:
    """Newton's steps from Winitzki's approximation."""
    a = 0.147
    log = torch.log((1 - x) * (1 + x))
    half = 2 / (math.pi * a) + log / 2
    y = torch.sign(x) * torch.sqrt(torch.sqrt(half * half - log / a) - half)
    for _ in range(3):
        error = (torch.erf(y) - x) / (2 / math.sqrt(math.pi) * torch.exp(-y * y))
        y = y - error / (1 + y * error)
    return torch.where(x.abs() == 1, x * math.inf, y)


@_in_double
def erfcx(x: Tensor) -> Tensor:
    """exp(x^2) erfc(x): from 3 on the continued fraction of DLMF 7.9.3."""
    a = x.abs()
    fraction: Any = torch.clamp(a, min=2.0)
    for k in range(40, 0, -1):
        fraction = torch.clamp(a, min=2.0) + (k / 2) / fraction
    small = torch.clamp(a, max=3.0)
    made = torch.where(a < 3, torch.exp(small * small) * (1 - torch.erf(small)), 1 / (math.sqrt(math.pi) * fraction))
    return torch.where(x < 0, 2 * torch.exp(x * x) - made, made)


def _modified(x: Tensor, order: int) -> Tensor:
    """exp(-|x|) I(x): the series of DLMF 10.25.2 up to 20, then 10.40.1."""
    a = x.abs()
    low = torch.clamp(a, max=20.0)
    t = low * low / 4
    total: Any = 1.0
    for k in range(46, 0, -1):
        total = 1 + t / (k * (k + order)) * total
    series = total * torch.exp(-low) * (low / 2 if order else 1.0)
    z = torch.clamp(a, min=20.0)
    tail: Any = 1.0
    for k in range(18, 0, -1):
        tail = 1 - (4 * order * order - (2 * k - 1) ** 2) / (8 * k * z) * tail
    made = torch.where(a < 20, series, tail / torch.sqrt(2 * math.pi * z))
    return torch.where(x < 0, -made, made) if order else made


@_in_double
def i0(x: Tensor) -> Tensor:
    """The modified Bessel function of order 0."""
    return _modified(x, 0) * torch.exp(x.abs())


@_in_double
def i0e(x: Tensor) -> Tensor:
    """exp(-|x|) i0(x)."""
    return _modified(x, 0)


@_in_double
def i1(x: Tensor) -> Tensor:
    """The modified Bessel function of order 1."""
    return _modified(x, 1) * torch.exp(x.abs())


@_in_double
def i1e(x: Tensor) -> Tensor:
    """exp(-|x|) i1(x)."""
    return _modified(x, 1)


@_in_double
def ndtri(p: Tensor) -> Tensor:
    """The inverse of the normal distribution: Newton's steps on the logarithm of the smaller tail."""
    tail = torch.minimum(p, 1 - p)
    log = torch.log(tail)
    t = torch.sqrt(-2 * log)
    x = t - (2.30753 + 0.27061 * t) / (1 + 0.99229 * t + 0.04481 * t * t)
    for _ in range(4):
        scaled = erfcx(x / math.sqrt(2))
        x = x + (torch.log(scaled / 2) - x * x / 2 - log) * scaled * math.sqrt(math.pi / 2)
    x = torch.where(tail == 0, _like(x, math.inf), x)
    return torch.where(p < 0.5, -x, x)


def _modified_k(x: Tensor, order: int) -> Tensor:
    """exp(x) K(x): the series of DLMF 10.31.1 and 2 up to 2, then the integral 10.32.9."""
    low, z = torch.clamp(x, max=2.0), torch.clamp(x, min=2.0)
    t = low * low / 4
    total, scale = torch.zeros_like(low), torch.ones_like(low)
    for k in range(24):
        harmonic = (_harmonic(k) + _harmonic(k + order)) / 2 - _EULER
        total = total + scale * harmonic
        scale = scale * (t / ((k + 1) * (k + 1 + order)))
    log = torch.log(low / 2) * _modified(low, order) * torch.exp(low)
    near = 1 / low + log - low / 2 * total if order else total - log
    step = 0.125
    integral: Any = step / 2
    for k in range(1, 32):
        integral = integral + step * math.cosh(order * k * step) * torch.exp(z * (1 - math.cosh(k * step)))
    made = torch.where(x < 2, near * torch.exp(low), integral)
    made = torch.where(x == 0, _like(x, math.inf), made)
    return torch.where(x < 0, _like(x, math.nan), made)


@_in_double
def k0(x: Tensor) -> Tensor:
    """The modified Bessel function of the second kind, of order 0."""
    return _modified_k(x, 0) * torch.exp(-x)


@_in_double
def k1(x: Tensor) -> Tensor:
    """The modified Bessel function of the second kind, of order 1."""
    return _modified_k(x, 1) * torch.exp(-x)


@_in_double
def scaled_k0(x: Tensor) -> Tensor:
    """exp(x) k0(x)."""
    return _modified_k(x, 0)


@_in_double
def scaled_k1(x: Tensor) -> Tensor:
    """exp(x) k1(x)."""
    return _modified_k(x, 1)


_EDGE: Final = 12.0  # from where on the asymptotic expansions are as good as the series


def _asymptotic(z: Tensor, order: int) -> tuple[Tensor, Tensor]:
    """P and Q of DLMF 10.17.3, for arguments of 12 or more."""
    term: Any = torch.ones_like(z)
    sums: list[Any] = [torch.ones_like(z), torch.zeros_like(z)]
    for k in range(1, 22):
        term = term * ((4 * order * order - (2 * k - 1) ** 2) / (8 * k)) / z
        sums[k % 2] = sums[k % 2] + (term if k % 4 < 2 else -term)
    return sums[0], sums[1]


def _bessel_j(x: Tensor, order: int) -> Tensor:
    a = x.abs()
    low, z = torch.clamp(a, max=_EDGE), torch.clamp(a, min=_EDGE)
    t = low * low / 4
    total: Any = 1.0
    for k in range(40, 0, -1):
        total = 1 - t / (k * (k + order)) * total
    p, q = _asymptotic(z, order)
    angle = z - math.pi * (0.25 + order / 2)
    far = torch.sqrt(2 / (math.pi * z)) * (p * torch.cos(angle) - q * torch.sin(angle))
    made = torch.where(a < _EDGE, total * (low / 2) ** order, far)
    made = torch.where(a == math.inf, torch.zeros_like(a), made)
    return torch.where(x < 0, -made, made) if order else made


@_in_double
def bessel_j0(x: Tensor) -> Tensor:
    """DLMF 10.2.2 up to 12, then 10.17.3."""
    return _bessel_j(x, 0)


@_in_double
def bessel_j1(x: Tensor) -> Tensor:
    """DLMF 10.2.2 up to 12, then 10.17.3."""
    return _bessel_j(x, 1)


def _bessel_y(x: Tensor, order: int) -> Tensor:
    """DLMF 10.8.1 up to 12, then 10.17.4; -inf at 0, NaN below."""
    low, z = torch.clamp(x, max=_EDGE), torch.clamp(x, min=_EDGE)
    t = low * low / 4
    total, scale = torch.zeros_like(low), torch.ones_like(low)
    for k in range(40):
        harmonic = _harmonic(k) + _harmonic(k + order) - 2 * _EULER
        total = total + scale * harmonic
        scale = scale * (-t / ((k + 1) * (k + 1 + order)))
    near = 2 / math.pi * torch.log(low / 2) * _bessel_j(low, order) - total / math.pi * (low / 2) ** order
    if order:
        near = near - 2 / (math.pi * low)
    p, q = _asymptotic(z, order)
    angle = z - math.pi * (0.25 + order / 2)
    far = torch.sqrt(2 / (math.pi * z)) * (p * torch.sin(angle) + q * torch.cos(angle))
    made = torch.where(x < _EDGE, near, far)
    made = torch.where(x == math.inf, torch.zeros_like(x), made)
    made = torch.where(x == 0, _like(x, -math.inf), made)
    return torch.where(x < 0, _like(x, math.nan), made)


_EULER: Final = 0.57721566490153286


def _harmonic(n: int) -> float:
    return math.fsum(1 / k for k in range(1, n + 1))


@_in_double
def bessel_y0(x: Tensor) -> Tensor:
    """The Bessel function of the second kind, of order 0."""
    return _bessel_y(x, 0)


@_in_double
def bessel_y1(x: Tensor) -> Tensor:
    """The Bessel function of the second kind, of order 1."""
    return _bessel_y(x, 1)


@_in_double
def spherical_bessel_j0(x: Tensor) -> Tensor:
    """sin(x) / x."""
    made = torch.where(x == 0, torch.ones_like(x), torch.sin(x) / torch.where(x == 0, torch.ones_like(x), x))
    return torch.where(x.abs() == math.inf, torch.zeros_like(x), made)


def _airy_series(x: Tensor) -> Tensor:
    """DLMF 9.4.1."""
    cube = x * x * x
    f: Any = 1.0
    g: Any = 1.0
    for k in range(40, 0, -1):
        f = 1 + f * cube / ((3 * k - 1) * (3 * k))
        g = 1 + g * cube / ((3 * k) * (3 * k + 1))
    return 0.35502805388781723926 * f - 0.25881940379280679840 * x * g


@_in_double
def airy_ai(x: Tensor) -> Tensor:
    """The series up to 6, from there DLMF 9.7.5 and 9.7.9."""
    far = torch.clamp(x.abs(), min=6)
    zeta = torch.where(x.abs() < math.inf, far * torch.sqrt(far) * (2 / 3), 1e6)
    coefficients = [1.0]
    for k in range(1, 16):
        coefficients.append(coefficients[-1] * (6 * k - 5) * (6 * k - 3) * (6 * k - 1) / (216 * k * (2 * k - 1)))
    inverse = 1 / zeta
    power: Any = torch.ones_like(x)
    falling: Any = 0.0
    even: Any = 0.0
    odd: Any = 0.0
    for k, c in enumerate(coefficients):
        falling = falling + (-c if k % 2 else c) * power
        signed = (-c if k // 2 % 2 else c) * power
        even, odd = (even, odd + signed) if k % 2 else (even + signed, odd)
        power = power * inverse
    root = torch.sqrt(torch.sqrt(far)) * math.sqrt(math.pi)
    right = torch.exp(-zeta) / (2 * root) * falling
    left = (torch.cos(zeta - math.pi / 4) * even + torch.sin(zeta - math.pi / 4) * odd) / root
    made = torch.where(x > 6, right, torch.where(x < -6, left, _airy_series(torch.clamp(x, -6, 6))))
    return torch.where(x.abs() == math.inf, math.nan, made)


def log1p(x: Tensor) -> Tensor:
    """As exact near 0 as elsewhere: log(1 + x) corrected by the rounding of 1 + x."""
    y = _wide(x)
    u = 1 + y
    exact = (u == 1) | (u == math.inf)
    rest = torch.where(exact, torch.ones_like(u), u - 1)
    return torch.where(exact, y, torch.log(u) * (y / rest)).to(_floating(x))


def expm1(x: Tensor) -> Tensor:
    """As exact near 0 as elsewhere: exp(x) - 1 corrected by the rounding of exp(x)."""
    y = _wide(x)
    u = torch.exp(y)
    exact = (u == 1) | (u == 0) | (u == math.inf)
    rest = torch.where(exact, torch.ones_like(u), torch.log(torch.where(exact, torch.full_like(u, 2), u)))
    made = torch.where(exact, torch.where(u == 1, y, u - 1), (u - 1) * (y / rest))
    return made.to(_floating(x))


def _floating(x: Tensor) -> torch.dtype:
    return x.dtype if x.dtype.is_floating_point else torch.get_default_dtype()


def _wide(x: Tensor) -> Tensor:
    wide = x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32
    return x.to(wide)


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Operator -> function."""
    names: Sequence[tuple[str, Callable[..., Any]]] = [
        ("lgamma", lgamma), ("digamma", digamma), ("polygamma", polygamma), ("erfinv", erfinv), ("log1p", log1p),
        ("expm1", expm1), ("i0", i0), ("special_i0e", i0e), ("special_i1", i1), ("special_i1e", i1e),
        ("special_modified_bessel_i0", i0), ("special_modified_bessel_i1", i1), ("special_bessel_j0", bessel_j0),
        ("special_bessel_j1", bessel_j1), ("special_bessel_y0", bessel_y0), ("special_bessel_y1", bessel_y1),
        ("special_modified_bessel_k0", k0), ("special_modified_bessel_k1", k1), ("special_ndtri", ndtri),
        ("special_scaled_modified_bessel_k0", scaled_k0), ("special_scaled_modified_bessel_k1", scaled_k1),
        ("special_spherical_bessel_j0", spherical_bessel_j0), ("special_erfcx", erfcx),
        ("special_airy_ai", airy_ai),
    ]  # fmt: skip
    zetas = {getattr(aten.special_zeta, name): zeta for name in ("default", "other_scalar", "self_scalar")}
    return {getattr(aten, name).default: function for name, function in names} | zetas

"""Interpolation: `torch.nn.functional.interpolate` as one operator, `xrt.interpolate`, which is ONNX's Resize.

Torch takes it apart into indices of pixels before it asks for decompositions, where a graph is captured: a gather for
each neighbour of a pixel, of which engines make something slower than eager, and a scatter for the gradient.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import interpolate as of_torch
from torch.overrides import TorchFunctionMode

from xrt_torch.transforms import within_transform

aten = torch.ops.aten

_NEAREST: Final = "nearest"
_KINDS: Final = {
    (_NEAREST, 1): (aten.upsample_nearest1d, aten.upsample_nearest1d_backward),
    (_NEAREST, 2): (aten.upsample_nearest2d, aten.upsample_nearest2d_backward),
    (_NEAREST, 3): (aten.upsample_nearest3d, aten.upsample_nearest3d_backward),
    ("linear", 1): (aten.upsample_linear1d, aten.upsample_linear1d_backward),
    ("linear", 2): (aten.upsample_bilinear2d, aten.upsample_bilinear2d_backward),
    ("linear", 3): (aten.upsample_trilinear3d, aten.upsample_trilinear3d_backward),
    ("cubic", 2): (aten.upsample_bicubic2d, aten.upsample_bicubic2d_backward),
}
"""ONNX's name of a mode, and the number of axes -> the operator, and that of its gradient."""
_MODES: Final = {
    "nearest": _NEAREST, "nearest-exact": _NEAREST,
    "linear": "linear", "bilinear": "linear", "trilinear": "linear", "bicubic": "cubic",
}  # fmt: skip
_MOST_DENSE: Final = 512
"""A size up to which products with whole matrices are about as quick as torch's sums, or quicker (ONNX Runtime and
PyTorch 2.13, AVX-512: linear 25 ms and 23 from 256 to 512 pixels, 14 and 24 from 128 to 256, cubic 14 and 91)."""
_MOST_EXACT: Final = 1 << 22
"""A product of two sizes up to which a place is nearer to no integer that it is not than float32 rounds it."""


def _interpolated(x: Tensor, size: Sequence[int], scales: Sequence[float], mode: str, align_corners: bool) -> Tensor:
    """x: [n, channels, ...]. size: that of the result along each further axis. scales: the factors by which places are
    mapped; empty for those of the sizes. mode: as ONNX names it ("nearest", "linear", "cubic").

    Returns [n, channels, *size].
    """
    operator = _KINDS[mode, len(size)][0].default
    return operator(x, size, *_how(size, scales, mode, align_corners))  # type: ignore[no-any-return]


def _how(size: Sequence[int], scales: Sequence[float], mode: str, align_corners: bool) -> list[Any]:
    """The arguments of torch's operators after the sizes."""
    return [*([] if mode == _NEAREST else [align_corners]), *(scales or [None] * len(size))]


interpolate = torch.library.custom_op("xrt::interpolate", _interpolated, mutates_args=())
interpolate.register_fake(_interpolated)


def _interpolated_backward(
    grad: Tensor, size: Sequence[int], given: Sequence[int], scales: Sequence[float], mode: str, align_corners: bool
) -> Tensor:
    """The gradient of an interpolation by its operand, of sizes `given`."""
    operator = _KINDS[mode, len(size)][1].default
    made: Tensor = operator(grad, size, given, *_how(size, scales, mode, align_corners))
    return made.contiguous(memory_format=_format_of(grad))


def _format_of(grad: Tensor) -> torch.memory_format:
    is_last = grad.dim() == 4 and not grad.is_contiguous() and grad.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if is_last else torch.contiguous_format


interpolate_backward = torch.library.custom_op("xrt::interpolate_backward", _interpolated_backward, mutates_args=())


@interpolate_backward.register_fake
def _(
    grad: Tensor, size: Sequence[int], given: Sequence[int], scales: Sequence[float], mode: str, align_corners: bool
) -> Tensor:
    return torch.empty(given, dtype=grad.dtype, device=grad.device, memory_format=_format_of(grad))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *ctx.how = inputs
    ctx.given = x.shape


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    size, scales, mode, align_corners = ctx.how
    factors = [_factor(n, m) for n, m in zip(ctx.given[2:], size, strict=True)]
    if mode == _NEAREST and all(factors):
        return _sums(grad, ctx.given, factors), None, None, None, None
    made = torch.ops.xrt.interpolate_backward(grad, size, ctx.given, scales, mode, align_corners)
    return made, None, None, None, None


interpolate.register_autograd(_gradient, setup_context=_keep)


def _sums(grad: Tensor, given: Sequence[int], factors: Sequence[int]) -> Tensor:
    """The sum over the pixels of which each was repeated."""
    split = [part for n, f in zip(given[2:], factors, strict=True) for part in (n, f)]
    made = grad.reshape([*given[:2], *split])
    return made.sum([3 + 2 * i for i in range(len(factors))])


def _factor(size: Any, wanted: Any) -> int:
    """The whole number by which a size is multiplied; 0 where it is none, or not known."""
    if isinstance(size, int) and isinstance(wanted, int):
        return wanted // size if wanted % size == 0 else 0
    ratio = _expression(wanted) / _expression(size)
    return int(ratio) if ratio.is_Integer else 0


def _expression(size: Any) -> Any:
    import sympy

    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


class WholeInterpolation(TorchFunctionMode):
    """While it is entered, `interpolate` is one operator where ONNX has it.

    Not within the transforms of `torch.func`, which take torch's own operators.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_plain = func is of_torch and not within_transform()
        made = _whole(*args, **(kwargs or {})) if is_plain else None
        return func(*args, **(kwargs or {})) if made is None else made


def _whole(
    x: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = _NEAREST,
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor | None:
    """The interpolation by the operator; None where it is left to torch, which also says what is wrong with it."""
    kind, axes = _MODES.get(mode, ""), x.dim() - 2
    given = scale_factor if size is None else size
    numbers = list(given) if isinstance(given, list | tuple) else [given] * axes
    if (kind, axes) not in _KINDS or antialias or len(numbers) != axes:
        return None
    if (size is None) == (scale_factor is None) or (kind == _NEAREST and align_corners is not None):
        return None
    scales: list[float] = []
    if size is None:
        sizes = [_scaled(n, s) for n, s in zip(x.shape[2:], numbers, strict=True)]
        scales = [] if recompute_scale_factor or align_corners else [float(s) for s in numbers]
    else:
        sizes = [n if isinstance(n, int | torch.SymInt) and not recompute_scale_factor else None for n in numbers]
    if any(n is None or (isinstance(n, int) and n < 1) for n in (*x.shape, *sizes)):
        return None
    if kind == _NEAREST:
        factors = [_factor(n, m) for n, m in zip(x.shape[2:], sizes, strict=True)]
        if not all(s.is_integer() for s in scales) or (mode != _NEAREST and not all(factors)):
            return None
        scales = [float(f) for f in factors] if all(factors) else []
    return torch.ops.xrt.interpolate(x, sizes, scales, kind, bool(align_corners))  # type: ignore[no-any-return]


def rounds_otherwise(node: torch.fx.Node) -> bool:
    """Whether torch computes an interpolation, or its gradient, with fewer digits than its operands have, or with
    integers."""
    x: Any = node.args[0]
    is_nearest = node.args[3] == _NEAREST and node.target is interpolate._opoverload
    return not is_nearest and x.meta["val"].dtype not in (torch.float32, torch.float64)


def is_dense(node: torch.fx.Node) -> bool:
    """Whether a gradient is as quick by products with whole matrices, most of whose elements are zero: where sizes are
    known, and not large."""
    arguments: Any = node.args
    _, size, given, *_ = arguments
    return has_small(size, given[2:])


def has_small(*sizes: Sequence[Any]) -> bool:
    """Whether all sizes are known, and none is large for a matrix."""
    return all(isinstance(n, int) and n <= _MOST_DENSE for each in sizes for n in each)


def weights(given: int, size: int, scale: float | None, mode: str, align_corners: bool, dtype: torch.dtype) -> Tensor:
    """The matrix [size, given] by which an interpolation along one axis multiplies, as torch computes it."""
    axes = 2 if mode == "cubic" else 1  # of one alone torch has none
    unit = torch.eye(given, dtype=dtype).reshape(1, given, given, *[1] * (axes - 1))
    scales = [] if scale is None else [scale, *[1.0] * (axes - 1)]
    made = _interpolated(unit, [size, *[1] * (axes - 1)], scales, mode, align_corners)
    return made.reshape(given, size).t().contiguous()


def finds_same(size: Any, wanted: Any) -> bool:
    """Whether all of those who resize a size to another are known to find the same nearest pixels, by floats as torch
    does, or by exact numbers."""
    return isinstance(size, int) and isinstance(wanted, int) and size * wanted <= _MOST_EXACT


def _scaled(size: Any, scale: Any) -> Any:
    """A size multiplied; None where ONNX, whose scales are float32, may make it another."""
    if not isinstance(scale, int | float) or not math.isfinite(scale):
        return None
    if scale == int(scale):
        return size * int(scale)
    if not isinstance(size, int):
        return None
    made = math.floor(size * scale)
    return made if math.floor(size * torch.tensor(scale, dtype=torch.float32).item()) == made else None


def _of_program(decomposition: Callable[..., Tensor], mode: str, x: Tensor, size: Any, *rest: Any) -> Tensor:
    """What `_whole` makes of an operator that an exported program has. rest: align_corners, if the mode has it, and the
    scales."""
    corners, scales = rest if len(rest) == 2 else (None, *rest)
    is_whole = mode == _NEAREST or x.dtype in (torch.float32, torch.float64)
    made = _whole(x, size, scales, mode, corners) if is_whole else None
    return decomposition(x, size, *rest) if made is None else made


def decompositions() -> dict[Any, Callable[..., Any]]:
    """ATen's operators of interpolation in exported programs, where torchlib's factors give other places."""
    from torch._decomp import get_decompositions

    modes = {"linear": ("linear", "bilinear", "trilinear"), "cubic": ("", "bicubic", ""), _NEAREST: [_NEAREST] * 3}
    named = {packet.vec: modes[kind][axes - 1] for (kind, axes), (packet, _) in _KINDS.items()}
    known = get_decompositions(list(named))
    linear = known[aten.upsample_bilinear2d.vec]  # for any number of axes, though torch has none for that of one
    return {o: functools.partial(_of_program, known.get(o, linear), mode) for o, mode in named.items()}

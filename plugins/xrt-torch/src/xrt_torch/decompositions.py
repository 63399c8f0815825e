"""Decompositions: which ATen operators are taken apart before translation, and into what.

Core ATen operators stay whole, because torchlib translates them and graphs stay small. What torchlib lacks is written
here in terms of operators that it has.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from xrt_torch import (
    attention,
    convolution,
    elementwise,
    foreach,
    groups,
    interpolation,
    linear_algebra,
    ordering,
    polynomials,
    pooling,
    resampling,
    special_functions,
    windows,
)
from xrt_torch.pooling import along
from xrt_torch.strided import laid_out

aten = torch.ops.aten

_OF_TORCH: list[Any] = [
    aten._adaptive_avg_pool2d,
    aten._batch_norm_with_update_functional,
    aten._native_batch_norm_legit_functional,
    aten.embedding_dense_backward,
    aten.linalg_vector_norm,
    aten.native_group_norm_backward,
    aten.native_layer_norm_backward,
    aten.permute_copy,
    aten.rrelu_with_noise_backward,
    aten.tril_indices,
    aten.triu_indices,
    aten.unbind_copy,
    aten.var.correction,
    aten.var_mean.correction,
]
_PADS = (
    aten.reflection_pad1d.default, aten.reflection_pad2d.default, aten.reflection_pad3d.default,
    aten.replication_pad1d.default, aten.replication_pad2d.default, aten.replication_pad3d.default,
)  # fmt: skip
_KEPT = (aten.bernoulli, aten.rrelu)  # run by torch itself, so that a seed gives the numbers of eager


def table() -> dict[Any, Callable[..., Any]]:
    """Operator -> its decomposition, whose results lie in memory as torch's do."""
    fma = getattr(torch.ops.prims, "fma", None)  # what TorchDynamo makes of steps of optimizers, from torch 2.13 on
    return _table() if fma is None else _table() | {fma.default: lambda a, b, c: a * b + c}


@functools.cache
def _table() -> dict[Any, Callable[..., Any]]:
    from torch._decomp import core_aten_decompositions, get_decompositions

    made = dict(core_aten_decompositions().items())
    made.update(get_decompositions(_OF_TORCH))
    made.update({pad: functools.partial(_pad, made[pad]) for pad in _PADS})
    made[aten.logaddexp.default] = _of_reals(made[aten.logaddexp.default])
    made[aten.var.correction] = functools.partial(_var, made[aten.var.correction])
    for packet in _KEPT:
        for name in packet.overloads():
            made.pop(getattr(packet, name), None)
    return {operator: laid_out(operator, function) for operator, function in (made | own()).items()}


@functools.cache
def own() -> dict[Any, Callable[..., Any]]:
    """The decompositions of this package: of what torchlib lacks or gets wrong."""
    made: dict[Any, Callable[..., Any]] = {}
    for module in (elementwise, special_functions, polynomials):
        made.update({operator: _of_reals(function) for operator, function in module.decompositions().items()})
    for module in (
        foreach,
        ordering,
        pooling,
        resampling,
        convolution,
        groups,
        interpolation,
        linear_algebra,
        attention,
        windows,
    ):
        made.update(module.decompositions())
    return made | _OWN


def _of_reals(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decomposition that leaves complex numbers to the operator."""

    @functools.wraps(function)
    def made(*args: Any, **kwargs: Any) -> Any:
        is_complex = any(isinstance(x, complex) or (isinstance(x, Tensor) and x.dtype.is_complex) for x in args)
        return NotImplemented if is_complex else function(*args, **kwargs)

    return made


def _dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """The mask depends on no data, so that all masks of a graph are drawn before the rest runs. Its elements are drawn
    in the order in which those of x lie in memory."""
    if train is False or p == 0:
        return x.clone(), torch.ones(x.shape, dtype=torch.bool, device=x.device)
    strides = torch.empty_like(x).stride()
    order = sorted(range(x.dim()), key=lambda d: strides[d], reverse=True)
    drawn = aten.bernoulli.p(torch.empty([x.shape[d] for d in order], dtype=x.dtype, device=x.device), 1 - p)
    if order != sorted(order):
        drawn = drawn.permute([order.index(d) for d in range(x.dim())])
    return x * drawn * (1 / (1 - p) if p < 1 else 0.0), drawn.to(torch.bool)


def _layer_norm(x: Tensor, *rest: Any) -> Any:
    """ONNX's operator gives mean and deviation in float32, torch's in the type of the input."""
    if x.dtype is torch.float32:
        return NotImplemented
    from torch._refs import native_layer_norm

    return native_layer_norm(x, *rest)


def _group_norm(x: Tensor, *rest: Any) -> Any:
    """Of float64 by its parts: ONNX's operator has a float32 for epsilon."""
    if x.dtype is not torch.float64:
        return NotImplemented
    from torch._refs import native_group_norm

    return native_group_norm(x, *rest)


def _var(
    of_torch: Callable[..., Any],
    x: Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: Any = None,
    keepdim: bool = False,
) -> Any:
    """Of float64 by its parts where the correction is no integer: torchlib has a float32 for it. Else torch's own."""
    if x.dtype is not torch.float64 or correction is None or correction == int(correction):
        return of_torch(x, dim, correction=correction, keepdim=keepdim)
    dims = list(range(x.dim())) if not dim else [d % x.dim() for d in dim]
    far = (x - x.mean(dims, keepdim=True)).square().sum(dims, keepdim=keepdim)
    return far / max(math.prod(x.shape[d] for d in dims) - correction, 0)


def _scaled_sum(x: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """`addmv` and `addbmm` of float64 by their parts: torchlib has the factors in float32."""
    if x.dtype is not torch.float64 or {alpha, beta} == {1}:
        return NotImplemented
    made = (torch.mv(a, b) if b.dim() == 1 else torch.bmm(a, b).sum(0)) * alpha
    return made if beta == 0 else x * beta + made


def _batch_norm(x: Tensor, *rest: Any) -> Any:
    """As `_layer_norm`; its epsilon is a float32."""
    if x.dtype is torch.float32:
        return NotImplemented
    from torch._decomp.decompositions import native_batch_norm_helper

    weight, bias, mean, variance, momentum, epsilon = rest
    return native_batch_norm_helper(x, weight, bias, mean, variance, False, momentum, epsilon, True)[:3]


def _norm_without_statistics(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, momentum: float, epsilon: float
) -> Any:
    """As `_layer_norm`; its epsilon is a float32."""
    if x.dtype is torch.float32:
        return NotImplemented
    from torch._decomp.decompositions import native_batch_norm_helper

    return native_batch_norm_helper(x, weight, bias, None, None, training, momentum, epsilon, False)[:3]


def _weight_norm_backward(grad: Tensor, v: Tensor, g: Tensor, norms: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    others = [d for d in range(v.dim()) if d != dim % v.dim()]
    along = (grad * v).sum(others, keepdim=True)
    return (g / norms * (grad - v * (along / (norms * norms)))).to(grad.dtype), (along / norms).to(g.dtype)


def _safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Zeros where the row is minus infinity, whose softmax is not a number, as elements that are minus infinity have
    zeros in every other row of numbers. torch asks whether all of a row is, by a reduction of bools, which engines
    refuse: each layer of attention would cut their graph."""
    return torch.where(x == -math.inf, 0.0, torch.softmax(x, dim, dtype=dtype))


def _squeeze(x: Tensor, dims: Sequence[int]) -> Tensor:
    gone = {d % x.dim() for d in dims} if x.dim() else set()
    return x.reshape([n for i, n in enumerate(x.shape) if i not in gone or n != 1])


def _copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    return source.to(x.dtype).expand(x.shape).clone()


def _empty_permuted(size: Sequence[int], physical_layout: Sequence[int], **given: Any) -> Tensor:
    order = [physical_layout.index(i) for i in range(len(size))]
    return torch.empty([size[d] for d in physical_layout], **given).permute(order)


def _pad(decomposition: Callable[..., Tensor], x: Tensor, padding: Sequence[int]) -> Any:
    """Whole, as one operator of ONNX, but where something is cut off."""
    return NotImplemented if all(isinstance(n, int) and n >= 0 for n in padding) else decomposition(x, padding)


def _replication_pad_backward(grad: Tensor, x: Tensor, padding: Sequence[int]) -> Tensor:
    """Each gradient added where its element came from."""
    for i in range(len(padding) // 2):
        d, left = -1 - i, padding[2 * i]
        source = torch.clamp(torch.arange(grad.shape[d], device=x.device) - left, 0, x.shape[d] - 1)
        matrix = (source.unsqueeze(1) == torch.arange(x.shape[d], device=x.device)).to(grad.dtype)
        grad = along(grad, d, matrix.t())
    return grad


def _cdist(x: Tensor, y: Tensor, p: float, compute_mode: int | None = None) -> Tensor:
    return torch.linalg.vector_norm(x.unsqueeze(-2) - y.unsqueeze(-3), p, dim=-1)


def _cdist_backward(grad: Tensor, x: Tensor, y: Tensor, p: float, distances: Tensor) -> Tensor:
    difference = x.unsqueeze(-2) - y.unsqueeze(-3)
    far, grad = distances.unsqueeze(-1), grad.unsqueeze(-1)
    if p == 0:
        made = torch.zeros_like(difference)
    elif p == 1:
        made = grad * torch.sign(difference)
    elif p == math.inf:
        made = grad * torch.sign(difference) * (difference.abs() == far)
    else:
        safe = torch.where(far == 0, torch.ones_like(far), far)
        power = torch.where(difference == 0, torch.zeros_like(difference), difference.abs() ** (p - 1))
        made = torch.where(
            far == 0, torch.zeros_like(difference), grad * torch.sign(difference) * power / safe ** (p - 1)
        )
    return made.sum(-2)


def _dist(a: Tensor, b: Tensor, p: float = 2) -> Tensor:
    return torch.linalg.vector_norm(a - b, p)


def _huber_loss(x: Tensor, target: Tensor, reduction: int = 1, delta: float = 1.0) -> Any:
    """The result is of the type of x."""
    kind = torch.result_type(x, target)
    far = (x.to(kind) - target.to(kind)).abs()
    loss = torch.where(far <= delta, far * far / 2, delta * (far - delta / 2))
    return (loss.mean() if reduction == 1 else loss.sum() if reduction == 2 else loss).to(x.dtype)


def _softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None, *, log: bool = False) -> Tensor:
    """Of what is cast before, where torchlib casts the result."""
    x = x if dtype is None else x.to(dtype)
    return (aten._log_softmax if log else aten._softmax)(x, dim, False)


def _mean(
    x: Tensor, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """Of what is cast before, where torchlib casts the result."""
    return NotImplemented if dtype in (None, x.dtype) else aten.mean.dim(x.to(dtype), dim, keepdim)


def _select_scatter(x: Tensor, source: Tensor, dim: int, index: int) -> Tensor:
    """What is written takes the type of what it is written to."""
    dim = dim % x.dim()
    is_written = torch.arange(x.shape[dim], device=x.device) == (index + x.shape[dim] if index < 0 else index)
    along = is_written.reshape([-1 if d == dim else 1 for d in range(x.dim())])
    return torch.where(along, source.to(x.dtype).unsqueeze(dim), x)


def _index_fill(x: Tensor, dim: int, index: Tensor, value: Tensor) -> Any:
    """With a number of the type of x."""
    if not x.dim():
        return NotImplemented
    shape = [index.numel() if d == dim % x.dim() else n for d, n in enumerate(x.shape)]
    return aten.index_copy(x, dim, index, value.to(x.dtype).expand(shape))


def _scan(
    values: list[Tensor], dim: int, combine: Callable[[list[Tensor], list[Tensor]], list[Tensor]]
) -> list[Tensor]:
    """Inclusive prefix combinations, in as many steps as the length has binary digits."""
    n, step = values[0].shape[dim], 1
    while step < n:
        late = [v.narrow(dim, step, n - step) for v in values]
        early = [v.narrow(dim, 0, n - step) for v in values]
        first = [v.narrow(dim, 0, step) for v in values]
        values = [torch.cat([f, c], dim) for f, c in zip(first, combine(early, late), strict=True)]
        step *= 2
    return values


def _cumprod(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    is_integer = not (x.dtype.is_floating_point or x.dtype.is_complex)
    kind = dtype or (torch.int64 if is_integer else x.dtype)
    if x.dim() == 0:
        return x.to(kind, copy=True)
    return _scan([x.to(kind)], dim, lambda a, b: [a[0] * b[0]])[0].clone()


def _cumulative_extreme(x: Tensor, dim: int, larger: bool) -> tuple[Tensor, Tensor]:
    """The last of equal elements counts, and NaN above all."""
    if x.dim() == 0:
        return x.clone(), torch.zeros(x.shape, dtype=torch.int64, device=x.device)
    shape = [1] * x.dim()
    shape[dim] = x.shape[dim]
    places = torch.arange(x.shape[dim], device=x.device).reshape(shape).expand(x.shape)

    def combine(early: list[Tensor], late: list[Tensor]) -> list[Tensor]:
        a, b = early[0], late[0]
        takes = b >= a if larger else b <= a
        if x.dtype.is_floating_point:
            takes = torch.isnan(b) | (takes & ~torch.isnan(a))
        return [torch.where(takes, s, r) for r, s in zip(early, late, strict=True)]

    values, indices = _scan([x, places], dim, combine)
    return values.clone(), indices.clone()


def _cummax(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    return _cumulative_extreme(x, dim, True)


def _cummin(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    return _cumulative_extreme(x, dim, False)


def _scatter_reduce(x: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True) -> Any:
    """Tensors without dimensions, and means, as sums over counts, are none of ONNX."""
    if x.dim() == 0 or index.dim() == 0 or src.dim() == 0:
        return _flat(
            x, index, src, lambda a, i, s: aten.scatter_reduce.two(a, dim, i, s, reduce, include_self=include_self)
        )
    if reduce != "mean":
        return NotImplemented
    total = aten.scatter_reduce.two(x, dim, index, src, "sum", include_self=include_self)
    ones, zeros = torch.ones_like(src), torch.zeros_like(x)
    hits = aten.scatter_add(zeros, dim, index, ones)
    count = torch.clamp(hits + 1 if include_self else hits, min=1)
    return total / count if x.dtype.is_floating_point else torch.div(total, count, rounding_mode="floor")


def _flat(x: Tensor, index: Tensor, src: Any, call: Callable[..., Tensor]) -> Tensor:
    one = src.reshape(-1) if isinstance(src, Tensor) else src
    return call(x.reshape(-1), index.reshape(-1), one).reshape(x.shape)


def _scatter_add(x: Tensor, dim: int, index: Tensor, src: Tensor) -> Any:
    if x.dim():
        return NotImplemented
    return _flat(x, index, src, lambda a, i, s: aten.scatter_add(a, 0, i, s))


def _scatter(x: Tensor, dim: int, index: Tensor, src: Any) -> Any:
    if x.dim():
        return NotImplemented
    call = aten.scatter.src if isinstance(src, Tensor) else aten.scatter.value
    return _flat(x, index, src, lambda a, i, s: call(a, 0, i, s))


def _by_wide(operator: Any, x: Tensor, indices: Sequence[Tensor | None], *rest: Any) -> Any:
    """By indices of 64 bits, the only ones that ONNX's operators on several take."""
    if not any(i is not None and i.dtype is torch.int32 for i in indices):
        return NotImplemented
    return operator(x, [i.long() if i is not None and i.dtype is torch.int32 else i for i in indices], *rest)


def _scatter_by(x: Tensor, dim: int, index: Tensor, src: Any, *, reduce: str) -> Tensor:
    source = src if isinstance(src, Tensor) else torch.full(index.shape, src, dtype=x.dtype, device=x.device)
    return aten.scatter_reduce.two(x, dim, index, source, "sum" if reduce == "add" else "prod")


def _index_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    if x.dim() == 0:
        x, source = x.reshape(1), source.reshape(-1)
        return _index_reduce(x, 0, index.reshape(-1), source, reduce, include_self=include_self).reshape(())
    shape = [1] * x.dim()
    shape[dim] = index.numel()
    at = index.reshape(shape).expand(source.shape)
    return aten.scatter_reduce.two(x, dim, at, source, reduce, include_self=include_self)


def _put(x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    at = index.reshape(-1)
    return aten.index_put(x.reshape(-1), [at], source.reshape(-1), accumulate).reshape(x.shape)


_MOST_COMPARED = 1 << 24


def _searchsorted(
    sequence: Tensor,
    values: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Any:
    """The number of elements below each value: all are compared, where that are few."""
    if not isinstance(values, Tensor):
        values = torch.full([], values, dtype=sequence.dtype, device=sequence.device)
    if sequence.shape[-1] * values.numel() > _MOST_COMPARED:
        return NotImplemented
    if sorter is not None:
        sequence = torch.gather(sequence, -1, sorter)
    after = right or side == "right"
    many = sequence.dim() > 1
    a, b = (sequence.unsqueeze(-2) if many else sequence), values.unsqueeze(-1)
    made = torch.logical_not(a > b if after else a >= b).sum(-1)  # NaN is behind all
    return made.to(torch.int32) if out_int32 else made


def _bucketize(values: Any, boundaries: Tensor, *, out_int32: bool = False, right: bool = False) -> Any:
    return _searchsorted(boundaries, values, out_int32=out_int32, right=right)


def _repeat_interleave(repeats: Tensor, *, output_size: int | None = None) -> Any:
    if output_size is None or output_size * repeats.numel() > _MOST_COMPARED:
        return NotImplemented
    ends = torch.cumsum(repeats, 0)
    return (ends <= torch.arange(output_size, device=repeats.device).unsqueeze(1)).sum(1).to(repeats.dtype)


def _kth_value(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    if x.dim() == 0:
        return x.clone(), torch.zeros([], dtype=torch.int64, device=x.device)
    values, indices = aten.sort.default(x, dim, False)
    values, indices = values.narrow(dim, k - 1, 1), indices.narrow(dim, k - 1, 1)
    return (values.clone(), indices.clone()) if keepdim else (values.squeeze(dim), indices.squeeze(dim))


def _amax(x: Tensor, dim: Sequence[int] = (), keepdim: bool = False) -> Any:
    if x.dim() == 0:
        return x.clone()
    return NotImplemented if dim else aten.amax(x, list(range(x.dim())), keepdim)


def _amin(x: Tensor, dim: Sequence[int] = (), keepdim: bool = False) -> Any:
    if x.dim() == 0:
        return x.clone()
    return NotImplemented if dim else aten.amin(x, list(range(x.dim())), keepdim)


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """Tensors of no elements and one dimension, which fit every other, are left out."""
    kept = [t for t in tensors if t.dim() != 1 or t.shape[0] != 0]
    if len(kept) == len(tensors):
        return NotImplemented
    kind = tensors[0].dtype
    for t in tensors[1:]:
        kind = torch.promote_types(kind, t.dtype)
    if not kept:
        return torch.empty([0], dtype=kind, device=tensors[0].device)
    return aten.cat([t.to(kind) for t in kept], dim) if len(kept) > 1 else kept[0].to(kind, copy=True)


def _split(x: Tensor, size: int, dim: int = 0) -> Any:
    """As slices: ONNX has sequences of tensors for it, which engines leave to the host."""
    n = x.shape[dim] if x.dim() else 1
    if not isinstance(n, int) or not isinstance(size, int) or not size or not n:
        return NotImplemented
    return [x.narrow(dim, i, min(size, n - i)) for i in range(0, n, size)]


def _split_with_sizes(x: Tensor, sizes: Sequence[int], dim: int = 0) -> Any:
    if not all(isinstance(n, int) for n in (*sizes, *x.shape)):
        return NotImplemented
    return [x.narrow(dim, sum(sizes[:i]), n) for i, n in enumerate(sizes)]


def _flip(x: Tensor, dims: Sequence[int]) -> Any:
    """A scalar has no axis for torchlib's slices."""
    return NotImplemented if x.dim() else x.clone()


def _copy_strided(x: Tensor, stride: Sequence[int]) -> Tensor:
    """Where a tensor lies in memory is nothing to ONNX."""
    return x.clone()


def _narrow_copy(x: Tensor, dim: int, start: int, length: int) -> Tensor:
    return x.narrow(dim, start, length).clone()


def _strided_places(x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None) -> Tensor | None:
    """Where the elements of such a view lie in x made flat; None where x is not all of its memory, in order."""
    if not x.is_contiguous() or x.storage_offset() or x.untyped_storage().nbytes() != x.numel() * x.element_size():
        return None
    place = torch.full([], storage_offset or 0, dtype=torch.int64, device=x.device)
    for n, s in zip(size, stride, strict=True):
        place = place.unsqueeze(-1) + torch.arange(n, device=x.device) * s
    return place


def _as_strided_copy(x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Any:
    place = _strided_places(x, size, stride, storage_offset)
    return NotImplemented if place is None else x.reshape(-1).index_select(0, place.reshape(-1)).reshape(list(size))


def _as_strided_scatter(
    x: Tensor, src: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Any:
    place = _strided_places(x, size, stride, storage_offset)
    if place is None:
        return NotImplemented
    return aten.scatter.src(x.reshape(-1), 0, place.reshape(-1), src.reshape(-1)).reshape(x.shape)


def _masked_scatter_backward(grad: Tensor, mask: Tensor, sizes: Sequence[int]) -> Tensor:
    """The gradients under the mask in a row, then zeros."""
    mask = mask.expand(grad.shape).reshape(-1)
    place = torch.clamp(torch.cumsum(mask, 0) - 1, min=0)
    made = torch.zeros([max(math.prod(sizes), grad.numel())], dtype=grad.dtype, device=grad.device)
    made = made.scatter_add(0, place, torch.where(mask, grad.reshape(-1), 0.0).to(grad.dtype))
    return made.narrow(0, 0, math.prod(sizes)).reshape(list(sizes))


def _nonzero_static(x: Tensor, *, size: int, fill_value: int = -1) -> Tensor:
    """The first places, in order: each goes to the row that the number of those before it says."""
    found = x.reshape(-1) != 0
    row = torch.cumsum(found.to(torch.int64), 0) - 1
    row = torch.where(found & (row < size), row, size)
    places = torch.full([size + 1], -1, dtype=torch.int64).scatter(0, row, torch.arange(x.numel()))[:size]
    columns: list[Tensor] = []
    rest = torch.clamp(places, min=0)
    for n in reversed(x.shape):
        columns.insert(0, torch.where(places < 0, fill_value, torch.remainder(rest, n)))
        rest = torch.div(rest, n, rounding_mode="floor")
    return torch.stack(columns, 1) if columns else torch.empty([size, 0], dtype=torch.int64)


def _resize(x: Tensor, size: Sequence[int], *, memory_format: torch.memory_format | None = None) -> Any:
    """The first elements in memory; of what is added torch says nothing."""
    n = math.prod(size)
    if n > x.numel() or not x.is_contiguous() or memory_format not in (None, torch.contiguous_format):
        return NotImplemented
    return x.reshape(-1).narrow(0, 0, n).reshape(list(size)).clone()


def _efficientzerotensor(size: Sequence[int], **given: Any) -> Tensor:
    return torch.zeros(size, **given)


def _diagonal_scatter(x: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    if not src.shape[-1]:
        return x.clone()
    matrix = x.movedim((dim1, dim2), (-2, -1))
    rows, columns = (torch.arange(n, device=x.device) for n in matrix.shape[-2:])
    place = torch.clamp(rows + min(offset, 0), 0, src.shape[-1] - 1)
    values = src.to(x.dtype).index_select(-1, place).unsqueeze(-1)
    made = torch.where(columns - rows.unsqueeze(1) == offset, values, matrix)
    return made.movedim((-2, -1), (dim1, dim2)).clone()


def _median(x: Tensor, dim: int, keepdim: bool, ignores_nan: bool) -> Any:
    """The lower of the two in the middle."""
    if x.dim() == 0:
        return x.clone(), torch.zeros([], dtype=torch.int64, device=x.device)
    if not x.dtype.is_floating_point:
        return _kth_value(x, (x.shape[dim] + 1) // 2, dim, keepdim)
    absent = torch.isnan(x)
    values, indices = aten.sort.default(torch.where(absent, torch.full_like(x, math.inf), x), dim, False)
    count = (~absent).sum(dim, keepdim=True)
    place = torch.clamp((count - 1) // 2, min=0) if ignores_nan else torch.full_like(count, (x.shape[dim] - 1) // 2)
    gone = count == 0 if ignores_nan else count < x.shape[dim]
    first = torch.argmax(absent.to(torch.int64), dim, keepdim=True)
    value = torch.where(gone, math.nan, torch.gather(values, dim, place))
    index = torch.where(gone, first, torch.gather(indices, dim, place))
    return (value, index) if keepdim else (value.squeeze(dim), index.squeeze(dim))


def _median_of_all(x: Tensor, ignores_nan: bool) -> Any:
    if not x.numel():
        return NotImplemented
    return _median(x.reshape(-1), 0, False, ignores_nan)[0]


def _pairs(x: Tensor) -> tuple[Tensor, Tensor]:
    i, j = torch.triu_indices(x.shape[0], x.shape[0], 1, device=x.device)
    return i, j


def _pdist(x: Tensor, p: float = 2) -> Tensor:
    i, j = _pairs(x)
    return torch.linalg.vector_norm(x.index_select(0, i) - x.index_select(0, j), p, dim=-1)


def _pdist_backward(grad: Tensor, x: Tensor, p: float, distances: Tensor) -> Tensor:
    i, j = _pairs(x)
    if not distances.numel():
        return torch.zeros_like(x)
    first, second = x.index_select(0, i).unsqueeze(1), x.index_select(0, j).unsqueeze(1)
    each = _cdist_backward(grad.reshape(-1, 1, 1), first, second, p, distances.reshape(-1, 1, 1)).squeeze(-2)
    return torch.zeros_like(x).index_add(0, i, each).index_add(0, j, -each)


def _trilinear(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> Any:
    for d in expand1:
        a = a.unsqueeze(d)
    for d in expand2:
        b = b.unsqueeze(d)
    for d in expand3:
        c = c.unsqueeze(d)
    if math.prod(torch.broadcast_shapes(a.shape, b.shape, c.shape)) > _MOST_COMPARED:
        return NotImplemented
    return (a * b * c).sum(list(sumdim), dtype=a.dtype) if sumdim else a * b * c


def _logcumsumexp(x: Tensor, dim: int) -> Tensor:
    if x.dim() == 0:
        return x.clone()

    def combine(early: list[Tensor], late: list[Tensor]) -> list[Tensor]:
        most, least = torch.maximum(early[0], late[0]), torch.minimum(early[0], late[0])
        added = most + torch.log1p(torch.exp(least - most))
        return [torch.where(most.abs() == math.inf, most, added)]

    return _scan([x], dim, combine)[0].clone()


_OWN: dict[Any, Callable[..., Any]] = {
    torch.ops.prims.copy_strided.default: _copy_strided,
    aten._cdist_backward.default: _cdist_backward,
    aten._cdist_forward.default: _cdist,
    aten._efficientzerotensor.default: _efficientzerotensor,
    aten._native_batch_norm_legit.no_stats: _norm_without_statistics,
    aten._native_batch_norm_legit_no_training.default: _batch_norm,
    aten._neg_view.default: lambda x: -x,
    aten._pdist_backward.default: _pdist_backward,
    aten._pdist_forward.default: _pdist,
    aten._safe_softmax.default: _safe_softmax,
    aten._trilinear.default: _trilinear,
    aten._weight_norm_interface_backward.default: _weight_norm_backward,
    aten.addbmm.default: _scaled_sum,
    aten.addmv.default: _scaled_sum,
    aten.amax.default: _amax,
    aten.amin.default: _amin,
    aten.as_strided_copy.default: _as_strided_copy,
    aten.as_strided_scatter.default: _as_strided_scatter,
    aten.bucketize.Scalar: _bucketize,
    aten.bucketize.Tensor: _bucketize,
    aten.cat.default: _cat,
    aten.copy.default: _copy,
    aten.cummax.default: _cummax,
    aten.cummin.default: _cummin,
    aten.cumprod.default: _cumprod,
    aten.diagonal_scatter.default: _diagonal_scatter,
    aten.dist.default: _dist,
    aten.empty_permuted.default: _empty_permuted,
    aten.flip.default: _flip,
    aten.huber_loss.default: _huber_loss,
    aten.index_reduce.default: _index_reduce,
    aten.index_fill.int_Tensor: _index_fill,
    **{o: functools.partial(_by_wide, o) for o in (aten.index.Tensor, aten.index_put.default)},
    aten.kthvalue.default: _kth_value,
    aten.log_softmax.int: functools.partial(_softmax, log=True),
    aten.logcumsumexp.default: _of_reals(_logcumsumexp),
    aten.masked_scatter_backward.default: _masked_scatter_backward,
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.median.default: functools.partial(_median_of_all, ignores_nan=False),
    aten.median.dim: lambda x, dim, keepdim=False: _median(x, dim, keepdim, ignores_nan=False),
    aten.nanmedian.default: functools.partial(_median_of_all, ignores_nan=True),
    aten.nanmedian.dim: lambda x, dim, keepdim=False: _median(x, dim, keepdim, ignores_nan=True),
    aten.narrow_copy.default: _narrow_copy,
    aten.native_dropout.default: _dropout,
    aten.native_group_norm.default: _group_norm,
    aten.native_layer_norm.default: _layer_norm,
    aten.nonzero_static.default: _nonzero_static,
    aten.put.default: _put,
    aten.repeat_interleave.Tensor: _repeat_interleave,
    aten.replication_pad1d_backward.default: _replication_pad_backward,
    aten.replication_pad2d_backward.default: _replication_pad_backward,
    aten.replication_pad3d_backward.default: _replication_pad_backward,
    aten.resize.default: _resize,
    aten.scatter.reduce: _scatter_by,
    aten.scatter.src: _scatter,
    aten.scatter.value: _scatter,
    aten.scatter.value_reduce: _scatter_by,
    aten.scatter_add.default: _scatter_add,
    aten.scatter_reduce.two: _scatter_reduce,
    aten.searchsorted.Scalar: _searchsorted,
    aten.searchsorted.Tensor: _searchsorted,
    aten.select_scatter.default: _select_scatter,
    aten.softmax.int: _softmax,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split_with_sizes,
    aten.squeeze.dims: _squeeze,
}

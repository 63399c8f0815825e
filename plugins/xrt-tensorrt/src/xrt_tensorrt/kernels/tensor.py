"""Tensor: a tensor of a network with NumPy's arithmetic, each operation a layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Union

import numpy as np

from xrt_core.errors import CompileError

if TYPE_CHECKING:
    from xrt_tensorrt._toolkit import Toolkit

Operand = Union["Tensor", np.ndarray, float, int]
"""What arithmetic takes beside a tensor: a constant, which becomes a layer of the other operand's dtype and rank."""

F32 = np.dtype(np.float32)
INT32 = np.dtype(np.int32)
INT64 = np.dtype(np.int64)
UINT8 = np.dtype(np.uint8)
BOOL = np.dtype(np.bool_)


class Layers:
    """Writes layers into a network under the name of one node.

    toolkit: the library. network: its `INetworkDefinition`. name: of the node. kept: what the network points to, which
    must live as long as it.
    """

    def __init__(self, toolkit: Toolkit, network: Any, name: str, kept: list[Any]) -> None:
        self.toolkit = toolkit
        self.trt = toolkit.trt
        self.network = network
        self.kept = kept
        self._name = name
        self._count = 0

    def of(self, layer: Any, output: int = 0) -> Tensor:
        """An output of a layer that was just made. Raises CompileError where the library made none."""
        if layer is None:
            raise CompileError(f"tensorrt: the network API refuses a layer of {self._name!r}")
        layer.name = f"{self._name}/{self._count}"
        self._count += 1
        return Tensor(self, layer.get_output(output))

    def constant(self, data: np.ndarray) -> Tensor:
        """A constant, of a dtype that TensorRT computes in."""
        data = np.require(data, requirements=("C", "A"))
        self.kept.append(data)
        weights = self.trt.Weights(self.toolkit.data_type(data.dtype), data.ctypes.data, data.size)
        return self.of(self.network.add_constant(data.shape, weights))

    def tensor(self, x: Operand, dtype: np.dtype | None = None) -> Tensor:
        """`x` as a tensor; a constant gets the dtype first where one is named."""
        if isinstance(x, Tensor):
            return x if dtype is None else x.astype(dtype)
        data = np.asarray(x)
        return self.constant(data if dtype is None else data.astype(dtype))

    def concat(self, parts: Sequence[Tensor], axis: int) -> Tensor:
        """Tensors one after another along an axis."""
        if len(parts) == 1:
            return parts[0]
        layer = self.network.add_concatenation([p.raw for p in parts])
        layer.axis = axis % parts[0].rank
        return self.of(layer)

    def where(self, condition: Tensor, a: Operand, b: Operand) -> Tensor:
        """`a` where the condition holds, else `b`; one of them may be a number."""
        like = a if isinstance(a, Tensor) else b
        if not isinstance(like, Tensor):
            raise TypeError("where() needs a tensor to know the dtype")
        rank = max(condition.rank, *(t.rank for t in (a, b) if isinstance(t, Tensor)))
        left, right = (self._aligned(v, like.dtype, rank) for v in (a, b))
        return self.of(self.network.add_select(condition.with_rank(rank).raw, left.raw, right.raw))

    def _aligned(self, x: Operand, dtype: np.dtype, rank: int) -> Tensor:
        if isinstance(x, Tensor):
            return x.astype(dtype).with_rank(rank)
        data = np.asarray(x).astype(dtype)
        return self.constant(data.reshape((1,) * (rank - data.ndim) + data.shape))


class Tensor:
    """A tensor of a network. raw: its `ITensor`; dtype: what it has there; shape: -1 where the batch is open."""

    __slots__ = ("dtype", "layers", "raw", "shape")
    __array_ufunc__ = None  # NumPy leaves `array + tensor` to the tensor

    def __init__(self, layers: Layers, raw: Any) -> None:
        self.layers = layers
        self.raw = raw
        dtype = layers.toolkit.dtype(raw.dtype)
        assert dtype is not None
        self.dtype: np.dtype = dtype
        with layers.toolkit.logger.messages.collect() as said:
            try:
                self.shape = tuple(int(d) for d in raw.shape)
            except (RuntimeError, ValueError) as e:
                raise CompileError(f"tensorrt: a layer does not fit: {'; '.join(said) or e}") from e

    def under(self, layers: Layers) -> Tensor:
        """The same tensor, whose further layers get another node's name."""
        made = object.__new__(Tensor)
        made.layers, made.raw, made.dtype, made.shape = layers, self.raw, self.dtype, self.shape
        return made

    @property
    def rank(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def size(self, axis: int) -> int:
        """The length of an axis. Raises CompileError where it is open."""
        if self.shape[axis] < 0:
            raise CompileError(f"tensorrt: axis {axis} of {self.shape} is open, and a kernel must know its length")
        return self.shape[axis]

    def sizes(self) -> tuple[int, ...]:
        """The lengths of all axes. Raises CompileError where one is open."""
        return tuple(self.size(a) for a in range(self.rank))

    # --- arithmetic ----------------------------------------------------------------------------------------------

    def _with(self, other: Operand, operation: str, *, swapped: bool = False) -> Tensor:
        rank = max(self.rank, other.rank if isinstance(other, Tensor) else np.ndim(other))
        left, right = self.with_rank(rank), self.layers._aligned(other, self.dtype, rank)
        if swapped:
            left, right = right, left
        kind = getattr(self.layers.trt.ElementWiseOperation, operation)
        return self.layers.of(self.layers.network.add_elementwise(left.raw, right.raw, kind))

    def __add__(self, other: Operand) -> Tensor:
        return self._with(other, "SUM")

    def __sub__(self, other: Operand) -> Tensor:
        return self._with(other, "SUB")

    def __mul__(self, other: Operand) -> Tensor:
        return self._with(other, "PROD")

    def __truediv__(self, other: Operand) -> Tensor:
        return self._with(other, "DIV")

    def __floordiv__(self, other: Operand) -> Tensor:
        return self._with(other, "FLOOR_DIV")

    def __radd__(self, other: Operand) -> Tensor:
        return self._with(other, "SUM", swapped=True)

    def __rsub__(self, other: Operand) -> Tensor:
        return self._with(other, "SUB", swapped=True)

    def __rmul__(self, other: Operand) -> Tensor:
        return self._with(other, "PROD", swapped=True)

    def __rtruediv__(self, other: Operand) -> Tensor:
        return self._with(other, "DIV", swapped=True)

    def __neg__(self) -> Tensor:
        return self.unary("NEG")

    def __invert__(self) -> Tensor:
        return self.unary("NOT")

    def __and__(self, other: Tensor) -> Tensor:
        return self._with(other, "AND")

    def __or__(self, other: Tensor) -> Tensor:
        return self._with(other, "OR")

    def __lt__(self, other: Operand) -> Tensor:  # type: ignore[misc]
        return self._with(other, "LESS")

    def __gt__(self, other: Operand) -> Tensor:  # type: ignore[misc]
        return self._with(other, "GREATER")

    def equals(self, other: Operand) -> Tensor:
        """Element by element, as booleans."""
        return self._with(other, "EQUAL")

    def maximum(self, other: Operand) -> Tensor:
        """The larger of each pair."""
        return self._with(other, "MAX")

    def minimum(self, other: Operand) -> Tensor:
        """The smaller of each pair."""
        return self._with(other, "MIN")

    def power(self, other: Operand) -> Tensor:
        """Each element to a power."""
        return self._with(other, "POW")

    def clip(self, low: float, high: float) -> Tensor:
        """Each element, no smaller than `low` and no larger than `high`."""
        return self.maximum(low).minimum(high)

    def unary(self, operation: str) -> Tensor:
        """A `UnaryOperation` by its name; ROUND rounds half to even."""
        kind = getattr(self.layers.trt.UnaryOperation, operation)
        return self.layers.of(self.layers.network.add_unary(self.raw, kind))

    def astype(self, dtype: np.dtype) -> Tensor:
        """In another dtype; the same tensor where it has it."""
        if dtype == self.dtype:
            return self
        if UINT8 in (dtype, self.dtype) and F32 not in (dtype, self.dtype):  # TensorRT has it from and to floats alone
            return self.astype(F32).astype(dtype)
        kind = self.layers.toolkit.data_type(dtype)
        return self.layers.of(self.layers.network.add_cast(self.raw, kind))

    def reduce(self, operation: str, axes: Sequence[int], *, keep: bool = False) -> Tensor:
        """SUM, PROD, MAX, MIN or AVG over axes."""
        kind = getattr(self.layers.trt.ReduceOperation, operation)
        mask = sum(1 << (a % self.rank) for a in axes)
        return self.layers.of(self.layers.network.add_reduce(self.raw, kind, mask, keep))

    def matmul(self, other: Tensor) -> Tensor:
        """The product of matrices in the last two axes; the axes before are broadcast."""
        rank = max(self.rank, other.rank)
        plain = self.layers.trt.MatrixOperation.NONE
        left, right = self.with_rank(rank), other.with_rank(rank)
        return self.layers.of(self.layers.network.add_matrix_multiply(left.raw, plain, right.raw, plain))

    # --- movement ------------------------------------------------------------------------------------------------

    def reshape(self, shape: Sequence[int]) -> Tensor:
        """In another shape; -1 stands for what is left. Raises CompileError where more than one axis is open."""
        wanted = tuple(int(d) for d in shape)
        if wanted == self.shape and wanted.count(-1) <= 1:
            return self
        if wanted.count(-1) > 1:
            raise CompileError(f"tensorrt: {self.shape} as {wanted} leaves more than one axis open")
        layer = self.layers.network.add_shuffle(self.raw)
        layer.reshape_dims = wanted
        layer.zero_is_placeholder = False
        return self.layers.of(layer)

    def with_rank(self, rank: int) -> Tensor:
        """With axes of length 1 before the others."""
        return self.reshape((1,) * (rank - self.rank) + self.shape)

    def transpose(self, order: Sequence[int]) -> Tensor:
        """With axes in another order."""
        if list(order) == list(range(self.rank)):
            return self
        layer = self.layers.network.add_shuffle(self.raw)
        layer.first_transpose = tuple(order)
        return self.layers.of(layer)

    def window(
        self, axes: Sequence[int], starts: Sequence[int], sizes: Sequence[int], steps: Sequence[int] | None = None,
        fill: float | None = None,
    ) -> Tensor:  # fmt: skip
        """Along `axes`, `sizes` elements from `starts` in steps; other axes whole.

        fill: stands for what lies outside; without it nothing may.
        """
        start, step, size = [0] * self.rank, [1] * self.rank, list(self.shape)
        for i, axis in enumerate(axes):
            start[axis], size[axis] = starts[i], sizes[i]
            step[axis] = 1 if steps is None else steps[i]
        if tuple(size) == self.shape and not any(start) and all(s == 1 for s in step):
            return self
        net = self.layers.network
        layer = net.add_slice(self.raw, tuple(start), tuple(max(n, 0) for n in size), tuple(step))
        if -1 in size:  # the open batch, as long as it is
            whole = self.layers.of(net.add_shape(self.raw))
            mask = np.array([n < 0 for n in size], np.int64)
            layer.set_input(2, (whole * mask + np.where(mask, 0, np.array(size)).astype(np.int64)).raw)
        if fill is not None:
            layer.mode = self.layers.trt.SampleMode.FILL
            layer.set_input(4, self.layers.constant(np.asarray(fill).astype(self.dtype)).raw)
        return self.layers.of(layer)

    def padded(self, axes: Sequence[int], begin: Sequence[int], end: Sequence[int], fill: float) -> Tensor:
        """With `begin` and `end` more elements along `axes`; fewer where they are negative."""
        sizes = [self.size(a) + b + e for a, b, e in zip(axes, begin, end, strict=True)]
        return self.window(axes, [-b for b in begin], sizes, fill=fill)

    def spaced(self, axis: int, step: int) -> Tensor:
        """Elements along an axis with `step` - 1 zeros after each."""
        if step == 1:
            return self
        n, at = self.size(axis), axis + 1
        apart = self.reshape((*self.shape[:at], 1, *self.shape[at:])).padded((at,), (0,), (step - 1,), 0)
        return apart.reshape((*self.shape[:axis], n * step, *self.shape[at:]))

    def take(self, indices: np.ndarray | Tensor, axis: int) -> Tensor:
        """Elements of an axis by their indices."""
        found = self.layers.tensor(indices)
        return self.layers.of(self.layers.network.add_gather(self.raw, found.raw, axis))

    def take_along(self, indices: Tensor, axis: int) -> Tensor:
        """Elements of an axis by an index for each place."""
        layer = self.layers.network.add_gather_v2(self.raw, indices.raw, self.layers.trt.GatherMode.ELEMENT)
        layer.axis = axis
        return self.layers.of(layer)

    # --- windows -------------------------------------------------------------------------------------------------

    def convolve(
        self, kernel: Tensor, *, strides: Sequence[int] | None = None, dilations: Sequence[int] | None = None,
        begin: Sequence[int] | None = None, end: Sequence[int] | None = None, groups: int = 1,
    ) -> Tensor:  # fmt: skip
        """Cross-correlation of [N, C, ...] by [M, C / groups, ...], over one, two or three axes, padded by zeros."""
        axes = self.rank - 2
        one, none = (1,) * axes, (0,) * axes
        parts = [tuple(p or d) for p, d in ((strides, one), (dilations, one), (begin, none), (end, none))]
        if axes == 1:  # convolutions have two axes at least
            x, w = self.reshape((*self.shape[:2], 1, self.shape[2])), kernel.reshape((*kernel.shape[:2], 1, -1))
            lead = (1, 1, 0, 0)
            parts = [(first, *p) for first, p in zip(lead, parts, strict=True)]
        else:
            x, w = self, kernel
        sizes = tuple(w.size(i) for i in range(2, w.rank))
        none_yet = self.layers.trt.Weights()
        layer = self.layers.network.add_convolution_nd(x.raw, w.size(0), sizes, none_yet, none_yet)
        layer.set_input(1, w.raw)
        layer.stride_nd, layer.dilation_nd, layer.pre_padding, layer.post_padding = parts
        layer.num_groups = groups
        made = self.layers.of(layer)
        return made.reshape((*made.shape[:2], made.shape[3])) if axes == 1 else made


def volume(shape: Sequence[int]) -> int:
    """Number of elements."""
    return math.prod(shape)

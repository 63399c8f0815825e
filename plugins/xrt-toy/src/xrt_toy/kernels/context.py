"""ToyOpContext: what a kernel of this engine is given for its node, and how it asks for buffers and launches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

import numpy as np

from xrt_core.engine.contract import Support
from xrt_core.engine.op_kernels import op_kernel
from xrt_core.ir.graph import Node
from xrt_core.ir.types import dtype_name
from xrt_core.kernels import OpContext
from xrt_toy import _toolkit
from xrt_toy._toolkit import Scalar
from xrt_toy.executable import FunctionCode

F = TypeVar("F", bound=Callable[..., Any])
DTypes = frozenset[np.dtype]

FLOATS: Final[DTypes] = frozenset(map(np.dtype, ("float16", "float32", "float64")))
NUMBERS: Final[DTypes] = FLOATS | frozenset(map(np.dtype, ("int32", "int64")))
BOOL: Final[DTypes] = frozenset([np.dtype("bool")])
ANY: Final[DTypes] = NUMBERS | BOOL


class Storage:
    """Memory for `size` elements of one dtype. Identity tells storages apart; where one lies is decided later."""

    __slots__ = ("dtype", "size")

    def __init__(self, dtype: np.dtype, size: int) -> None:
        self.dtype, self.size = dtype, size


class Buffer:
    """A contiguous array of static shape in a storage; buffers of other shapes may share it."""

    __slots__ = ("shape", "storage")

    def __init__(self, storage: Storage, shape: Sequence[int]) -> None:
        self.storage, self.shape = storage, tuple(int(d) for d in shape)

    @property
    def dtype(self) -> np.dtype:
        """Element dtype."""
        return self.storage.dtype

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.storage.size


class ToyOpContext(OpContext):
    """One node, seen by a kernel: its attributes, and the places for its results, temporaries and launches."""

    __slots__ = ("_codes",)

    def __init__(self, node: Node, codes: list[FunctionCode]) -> None:
        super().__init__(node, np)
        self._codes = codes

    def output(self, index: int = 0) -> Buffer:
        """A new buffer for output `index`, of its type."""
        value: Any = self.node.outputs[index]
        return self.temporary(value.shape, value.dtype)  # both are known, says `ToyEngine.supports`

    def temporary(self, shape: Sequence[int], dtype: np.dtype) -> Buffer:
        """A new buffer that no output names."""
        return Buffer(Storage(dtype, math.prod(shape)), shape)

    def view(self, buffer: Buffer, shape: Sequence[int]) -> Buffer:
        """The same memory in another shape."""
        return Buffer(buffer.storage, shape)

    def launch(
        self, kernel: Callable[..., None], items: int, *arguments: Any, block: int | tuple[int, int] | None = None,
        shared: int = 0, pointwise: Iterable[int] = (),
    ) -> None:  # fmt: skip
        """Append a launch of `kernel` over `items`: threads by default, blocks where `block` gives their shape.

        arguments: Buffers come as flat arrays, the one that is written first; integers and tuples of integers as
        themselves. shared: bytes for each block. pointwise: see `FunctionCode`. The grid is limited, so a kernel must
        walk over its items with a stride.
        """
        if items:
            grid = min(_toolkit.BLOCKS, items if block is not None else -(-items // _toolkit.THREADS))
            name = f"{self.node.operator} {self.node.name!r}"
            self._codes.append(
                FunctionCode(name, kernel, grid, block or _toolkit.THREADS, shared, arguments, frozenset(pointwise))
            )


def compute_type(dtype: np.dtype) -> Scalar:
    """The scalar type that kernels calculate in: half precision in single."""
    return np.float32 if dtype == np.float16 else dtype.type


def accumulator_type(dtype: np.dtype) -> Scalar:
    """The scalar type of long sums: integers in 64 bits, half precision in single."""
    return np.int64 if dtype.kind in "bi" else compute_type(dtype)


def toy_kernel(
    *op_types: str,
    dtypes: DTypes,
    of: tuple[int, ...] | None = None,
    static: tuple[int, ...] = (),
    check: Callable[[Node], str] | None = None,
) -> Callable[[F], F]:
    """Register a kernel of this engine. dtypes: of inputs `of` (all that are not static); the others may be ANY.

    check: why a node cannot be taken, or "".
    """

    def accepts(node: Node) -> Support:
        for i, v in enumerate(node.inputs):
            if v is None or v.dtype is None or i in static:
                continue
            if v.dtype not in (dtypes if of is None or i in of else ANY):
                return Support.no(f"toy's kernel for {node.operator} does not take {dtype_name(v.dtype)} as input {i}")
        for v in node.outputs:
            if v is not None and v.dtype is not None and v.dtype not in ANY:
                return Support.no(f"toy's kernel for {node.operator} does not make {dtype_name(v.dtype)}")
        reason = check(node) if check is not None else ""
        return Support.no(reason) if reason else Support.yes()

    return op_kernel(*op_types, engine="toy", devices=("cuda",), train=True, static=static, check=accepts)


def only_first_output(node: Node) -> str:
    """Why a node that asks for more than its first output is refused."""
    return f"toy's kernel for {node.operator} makes its first output only" if any(node.outputs[1:]) else ""

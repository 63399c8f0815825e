"""NetworkContext: what an op kernel on the network API is told about its node, and how kernels are registered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import ml_dtypes
import numpy as np

from xrt_core.engine.contract import Support
from xrt_core.engine.op_kernels import op_kernel
from xrt_core.ir.graph import Node
from xrt_core.ir.types import dtype_name
from xrt_core.kernels import OpContext
from xrt_tensorrt.kernels.tensor import Layers

F = TypeVar("F", bound=Callable[..., Any])
DTypes = frozenset[np.dtype]

FLOATS: Final[DTypes] = frozenset(map(np.dtype, ("float32", "float16", ml_dtypes.bfloat16)))
INTEGERS: Final[DTypes] = frozenset(map(np.dtype, ("int32", "int64")))
EIGHT_BITS: Final[DTypes] = frozenset(map(np.dtype, ("int8", "uint8")))
BOOLEANS: Final[DTypes] = frozenset([np.dtype(np.bool_)])


class NetworkContext(OpContext):
    """One node, seen by a kernel of this engine: its attributes, and `layers`, which writes into the network.

    A kernel is called with a `Tensor` for each input, None where it is left out; an input that it wants so
    (`arrays_of`) is a NumPy array where it is a constant. Integers of 8 bits come and go as float32, which holds them
    exactly: TensorRT computes in int8 between quantisation alone, and in uint8 not at all.
    """

    __slots__ = ("layers",)

    def __init__(self, node: Node, layers: Layers) -> None:
        super().__init__(node, np)
        self.layers = layers


def shapes(node: Node) -> list[tuple[int, ...]]:
    """The shapes of the node's inputs, which are known; () for one that is left out."""
    return [() if v is None else tuple(d for d in v.shape or () if isinstance(d, int)) for v in node.inputs]


def made_shape(node: Node) -> tuple[int, ...]:
    """The shape of the node's first output, which is known."""
    return shapes(node.replace(inputs=node.outputs[:1]))[0]


_ARRAYS: dict[tuple[str, str], frozenset[int]] = {}


def arrays_of(node: Node) -> frozenset[int]:
    """The inputs that the node's kernel takes as arrays where they are constants."""
    return _ARRAYS.get((node.domain, node.op_type), frozenset())


def tensorrt_kernel(
    *op_types: str,
    dtypes: DTypes,
    of: tuple[int, ...] | None = None,
    static: tuple[int, ...] = (),
    arrays: tuple[int, ...] = (),
    domain: str = "",
    train: bool = False,
    check: Callable[[Node], str] | None = None,
) -> Callable[[F], F]:
    """Register a kernel of this engine. dtypes: of inputs `of` (all that are not static).

    static: inputs whose values must be constants. arrays: inputs that come as arrays where they are constants; those of
    `static` do anyway. train: forward and gradient need no weights. check: why a node
    cannot be taken, or "".
    """

    def accepts(node: Node) -> Support:
        for i, v in enumerate(node.inputs):
            if v is None or v.dtype is None or (i in static if of is None else i not in of):
                continue
            if v.dtype not in dtypes:
                return Support.no(f"tensorrt has no kernel for {node.operator} of {dtype_name(v.dtype)} (input {i})")
        read = node.inputs if of is None else [node.inputs[i] for i in of if i < len(node.inputs)]
        if any(v is not None and 0 in (v.shape or ()) for v in (*read, *node.outputs)):
            return Support.no(f"tensorrt's kernel for {node.operator} takes no empty tensors")
        reason = check(node) if check is not None else ""
        return Support.no(reason) if reason else Support.yes()

    for op_type in op_types:
        _ARRAYS[domain, op_type] = frozenset((*arrays, *static))
    return op_kernel(
        *op_types, engine="tensorrt", devices=("cuda",), domain=domain, train=train, static=static, check=accepts
    )

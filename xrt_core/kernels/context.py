"""OpContext: what a kernel is told about the node it computes."""

from __future__ import annotations

from typing import Any

import numpy as np

from xrt_core.ir.graph import Node


class OpContext:
    """One node, seen by a kernel.

    node: the node (operator, version, attributes, typed inputs and outputs).
    xp: the array namespace that the arguments live in: `numpy`, `cupy`, `jax.numpy`, ...
    """

    __slots__ = ("node", "xp")

    def __init__(self, node: Node, xp: Any) -> None:
        self.node = node
        self.xp = xp

    @property
    def version(self) -> int:
        """`since_version` of the node's schema: 11 for Softmax in a model of opset 12, 13 in one of opset 13."""
        return self.node.version

    def attr(self, name: str, default: Any = None) -> Any:
        """The attribute, or `default` where the node does not set it.

        Ints, floats and strings come as Python's, lists as tuples, tensors as NumPy arrays.
        """
        return self.node.attributes.get(name, default)

    def has_input(self, index: int) -> bool:
        """Whether input `index` is given (an optional one may be left out)."""
        inputs = self.node.inputs
        return index < len(inputs) and inputs[index] is not None

    def wants(self, index: int) -> bool:
        """Whether output `index` is asked for."""
        outputs = self.node.outputs
        return index < len(outputs) and outputs[index] is not None

    @property
    def num_outputs(self) -> int:
        """How many outputs the node lists, left-out ones in between included."""
        return len(self.node.outputs)

    def output_dtype(self, index: int = 0) -> np.dtype | None:
        """Element dtype of output `index` where inference has found it."""
        out = self.node.outputs[index]
        return None if out is None else out.dtype

"""OpContext: the node that a kernel computes, with its attributes, and the array namespace."""

from __future__ import annotations

from typing import Any

import numpy as np

from xrt_core.ir.graph import Node


class OpContext:
    """The context of one kernel call.

    node: the node (operator, version, attributes, typed inputs and outputs).
    xp: the array namespace of the arguments: `numpy`, `cupy`, `jax.numpy`, ...
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
        """Return the attribute, or `default` if the node does not set it.

        Ints, floats and strings are Python objects, lists are tuples, tensors are NumPy arrays.
        """
        return self.node.attributes.get(name, default)

    def has_input(self, index: int) -> bool:
        """Return whether input `index` is given (an optional one may be omitted)."""
        inputs = self.node.inputs
        return index < len(inputs) and inputs[index] is not None

    def wants(self, index: int) -> bool:
        """Return whether output `index` is used."""
        outputs = self.node.outputs
        return index < len(outputs) and outputs[index] is not None

    @property
    def num_outputs(self) -> int:
        """The number of outputs that the node lists, omitted ones in between included."""
        return len(self.node.outputs)

    def output_dtype(self, index: int = 0) -> np.dtype | None:
        """Return the element dtype of output `index` if it is known."""
        out = self.node.outputs[index]
        return None if out is None else out.dtype

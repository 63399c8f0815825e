"""The registry of portable kernels: one function per operator, generic over the array namespace.

    @kernel("Reshape", static=(1,))
    def reshape(ctx, x, shape):
        return ctx.xp.reshape(x, ...)

A kernel takes the context and one array per listed input (None for an omitted one) and returns an array, or a tuple
with one entry per output (None for an unused one). It must not write into its arguments, must not read the *values* of
inputs other than those in `static`, and supports every dtype that the operator's schema allows. The context
(`OpContext`) is the node, with its attributes, and the array namespace.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from msgspec import Struct

from xrt_core.errors import RegistrationError
from xrt_core.ir.graph import Node
from xrt_core.ir.operator_set import CORE_DOMAINS, find_operator


class OpContext:
    """The context of one kernel call.

    node: the node (operator, version, attributes, typed inputs and outputs).
    xp: the array namespace of the arguments: `numpy`, `cupy`, `jax.numpy`, ...
    """

    __slots__ = ("_prepared", "node", "xp")

    def __init__(self, node: Node, xp: Any) -> None:
        self.node = node
        self.xp = xp
        self._prepared: Any = None

    def prepared(self, make: Callable[[Node], Any]) -> Any:
        """Return `make(node)`, computed at the first call of this context: what follows from the node alone."""
        if self._prepared is None:
            self._prepared = make(self.node)
        return self._prepared

    @property
    def version(self) -> int:
        """`since_version` of the node's schema: 11 for Softmax in a model of opset 12, 13 in one of opset 13."""
        return self.node.version

    def attr(self, name: str, default: Any = None) -> Any:
        """Return the attribute, or `default` if the node does not set it.

        Ints, floats and strings are Python objects, lists are tuples, long ones each a `LongList`, which is read like a
        tuple or by `np.asarray`; tensors are NumPy arrays.
        """
        return self.node.attributes.get(name, default)

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


KernelFunction = Callable[..., Any]
F = TypeVar("F", bound=KernelFunction)

FAMILIES = (
    "elementwise", "logic", "cast", "activation", "reduction", "linear", "normalization", "loss", "quantization",
    "optimizer", "movement", "padding", "indexing", "scatter", "generator", "random", "convolution", "pooling",
    "resize", "recurrent", "signal", "attention", "vision", "sequence", "text", "detection", "gradient", "trees",
    "linear_models", "support_vectors", "features", "categories", "maps",
)  # fmt: skip
"""Modules of this package that register kernels."""


class PortableKernel(Struct, frozen=True):
    """A registered kernel.

    function: `f(ctx, *inputs) -> array | tuple`.
    static: indices of inputs whose values must be known before the kernel runs; they are passed as NumPy arrays.
    dynamic: None, or why an engine with static shapes cannot run it: a sentence, or a function from the node to a
        sentence or None ("output shape depends on the data").
    train: whether the kernel may be used in training (its gradient exists).
    ufunc: the NumPy ufunc that the kernel calls and nothing else, if its arguments have one dtype that needs no
        widening and is the result's: the result can then be written over an input's memory. "" for none.
    strings: whether it takes strings; `onnx.reference` runs the nodes on strings of other kernels.
    """

    domain: str
    op_type: str
    function: KernelFunction
    static: tuple[int, ...] = ()
    dynamic: str | Callable[[Node], str | None] | None = None
    train: bool = True
    ufunc: str = ""
    strings: bool = False

    def why_dynamic(self, node: Node) -> str | None:
        """Return why `node` cannot run with static shapes, or None if it can."""
        return self.dynamic(node) if callable(self.dynamic) else self.dynamic


_KERNELS: dict[tuple[str, str], PortableKernel] = {}
_loaded = False


def kernel(
    *op_types: str,
    domain: str = "",
    static: tuple[int, ...] = (),
    dynamic: str | Callable[[Node], str | None] | None = None,
    train: bool = True,
    ufunc: str = "",
    strings: bool = False,
) -> Callable[[F], F]:
    """Register the decorated function as the portable kernel of these operators. See `PortableKernel`."""

    def register(function: F) -> F:
        for op_type in op_types:
            taken = _KERNELS.get((domain, op_type))
            if taken is not None:
                raise RegistrationError(
                    f"portable kernel {domain or 'ai.onnx'}.{op_type} is registered twice: by "
                    f"{taken.function.__module__}.{taken.function.__qualname__} and by "
                    f"{function.__module__}.{function.__qualname__}"
                )
            _KERNELS[domain, op_type] = PortableKernel(
                domain, op_type, function, static, dynamic, train, ufunc, strings
            )
        return function

    return register


def _load() -> None:
    global _loaded
    if not _loaded:
        for family in FAMILIES:
            importlib.import_module(f"xrt_core.kernels.{family}")
        _loaded = True


def find_kernel(domain: str, op_type: str) -> PortableKernel | None:
    """Return the portable kernel of an operator, or None."""
    _load()
    found = _KERNELS.get((domain, op_type))
    if found is None and domain not in CORE_DOMAINS:
        own = find_operator(domain, op_type)
        if own is not None and own.kernel is not None:
            return PortableKernel(domain, op_type, own.kernel, own.static, own.dynamic, strings=True)
    return found


def portable_kernels() -> Mapping[tuple[str, str], PortableKernel]:
    """Return every portable kernel by (domain, operator); read-only."""
    _load()
    return MappingProxyType(_KERNELS)


def depends_on_data(node: Node) -> bool:
    """Whether the shapes of a node's results depend on the values that it reads (NonZero)."""
    found = find_kernel(node.domain, node.op_type)
    return found is not None and found.why_dynamic(node) is not None


def static_inputs(node: Node) -> Iterator[int]:
    """Yield the indices of the given inputs of `node` whose values an engine with static shapes needs."""
    found = find_kernel(node.domain, node.op_type) or find_operator(node.domain, node.op_type, node.version)
    if found is not None:
        for i in found.static:
            if i < len(node.inputs) and node.inputs[i] is not None:
                yield i

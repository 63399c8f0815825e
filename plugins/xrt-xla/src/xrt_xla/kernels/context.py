"""XlaContext: what an XLA kernel is told about its node, and how kernels and constant layouts are registered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np

from xrt_core.engine.op_kernels import op_kernel
from xrt_core.ir.graph import Node
from xrt_core.kernels import OpContext, find_kernel

DEVICES: Final = ("cpu", "cuda", "tpu")
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Layout:
    """A form in which a kernel wants a constant input, made once when the executable is built.

    name: equal names over one constant share the array. make: `make(xp, constant)`, with NumPy or `jax.numpy` as `xp`.
    """

    name: str
    make: Callable[[Any, Any], Any]


class XlaContext(OpContext):
    """One node, seen by a kernel of this engine.

    lax: `jax.lax`. kind: "cpu", "cuda" or "tpu". known: for each input its value where it is a constant (NumPy).
    laid_out: indices of inputs that come in the form that `layout_of` asked for. on_mesh: whether the program is for
    several devices, which share the arrays. bodies: of control flow, by attribute,
    functions from a subgraph's inputs to its results. channels_last: whether an input was computed with channels last
    (`xrt_xla.channels_last`) and only turned round for the kernel.
    """

    __slots__ = ("bodies", "channels_last", "kind", "known", "laid_out", "lax", "on_mesh")

    def __init__(
        self,
        node: Node,
        xp: Any,
        lax: Any,
        kind: str,
        known: tuple[np.ndarray | None, ...],
        laid_out: frozenset[int],
        on_mesh: bool,
    ) -> None:
        super().__init__(node, xp)
        self.lax, self.kind, self.known, self.laid_out, self.on_mesh = lax, kind, known, laid_out, on_mesh
        self.bodies: Mapping[str, Callable[..., list[Any]]] = {}
        self.channels_last = False

    def in_layout(self, index: int, array: Any) -> Any:
        """Input `index` in the form its kernel asks for: as given where the constant was laid out, else made here."""
        if index in self.laid_out:
            return array
        layout = layout_of(self.node, index, self.kind)
        return array if layout is None else layout.make(self.xp, array)


LayoutRule = Callable[[Node, str], "Layout | None"]
_LAYOUTS: dict[tuple[str, str, int], LayoutRule] = {}


def layout(op_type: str, index: int) -> Callable[[LayoutRule], LayoutRule]:
    """Register the decorated rule `(node, device kind) -> Layout | None` for input `index` of an operator."""

    def register(rule: LayoutRule) -> LayoutRule:
        _LAYOUTS["", op_type, index] = rule
        return rule

    return register


def layout_of(node: Node, index: int, kind: str) -> Layout | None:
    """The form that the kernel of `node` wants input `index` in, or None for the form it has."""
    rule = _LAYOUTS.get((node.domain, node.op_type, index))
    return None if rule is None else rule(node, kind)


def xla_kernel(*op_types: str, **how: Any) -> Callable[[F], F]:
    """`op_kernel` for this engine, on all its devices, for training too."""
    return op_kernel(*op_types, **{"engine": "xla", "devices": DEVICES, "train": True, **how})


def portable(ctx: XlaContext, *inputs: Any) -> Any:
    """What the portable kernel of the node gives, for the constants as they are and not as they were laid out."""
    kernel = find_kernel(ctx.node.domain, ctx.node.op_type)
    assert kernel is not None
    given = [ctx.xp.asarray(ctx.known[i]) if i in ctx.laid_out else x for i, x in enumerate(inputs)]
    return kernel.function(ctx, *given)

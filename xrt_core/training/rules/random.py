"""Gradients of operators that draw random numbers: Dropout."""

from __future__ import annotations

from typing import Any

import numpy as np

from xrt_core.errors import GradientError
from xrt_core.frontends import ops
from xrt_core.training.gradient_context import Backward, Forward, where
from xrt_core.training.registry import composition, gradient


def trains(ctx: Forward) -> bool:
    """Return whether a Dropout is in training mode. Raises GradientError if that is not known."""
    if ctx.version < 12 or ctx.input(2) is None:
        return False
    return bool(np.asarray(ctx.known(2, "training_mode")).reshape(-1)[0])


@composition("Dropout")
def with_mask(ctx: Forward) -> Any:
    """The same Dropout with its mask output, which the backward pass reads."""
    if not trains(ctx) or (len(ctx.node.outputs) > 1 and ctx.node.outputs[1] is not None):
        return None
    attributes = {"seed": int(ctx.attr("seed"))} if ctx.attr("seed") is not None else {}
    return ops.Dropout(*ctx.inputs, outputs=2, **attributes)


@gradient("Dropout")
def dropout(ctx: Backward) -> Any:
    """dy at the kept elements, with the same scale."""
    rest = [None] * (len(ctx.inputs) - 1)
    if not trains(ctx):
        return (ctx.grad, *rest)
    ratio = ctx.input(1)
    mask = ctx.outputs[1]
    if mask is None:
        raise GradientError(f"no gradient for {ctx.node!r}: its mask is left out")
    if ctx.wants(1):
        raise ctx.error("there is no gradient by its ratio")
    kept = where(mask, ctx.grad, 0.0)
    if ratio is None:
        return (kept * 2.0, *rest)
    known = ctx.data(1)
    if known is not None:
        return (kept * (1.0 / (1.0 - float(np.asarray(known).reshape(())))), *rest)
    return (kept / (1.0 - ratio.astype(kept.dtype)), *rest)

"""Transforms: those of `torch.func` (vmap, grad, jvp) that are entered while a graph is captured, those within which
a graph is called, and hooks for saved tensors.

Torch has no public functions that tell of them. Where a version has not these either, a transform is taken to be
entered, what a capture that fails leaves entered stays so, and hooks, batched tensors and forward mode are taken to be
none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.autograd import forward_ad

try:
    from torch._C import _enter_dual_level, _exit_dual_level
    from torch._C._functorch import (
        TransformType,
        _func_decrement_nesting,
        _grad_decrement_nesting,
        _jvp_decrement_nesting,
        _vmap_decrement_nesting,
        get_dynamic_layer_stack_depth,
        peek_interpreter_stack,
    )

    _LEAVE = {
        TransformType.Functionalize: _func_decrement_nesting,
        TransformType.Grad: _grad_decrement_nesting,
        TransformType.Jvp: _jvp_decrement_nesting,
        TransformType.Vmap: _vmap_decrement_nesting,
    }
    _KNOWN = True
except ImportError:
    _KNOWN = False


try:
    from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor
except ImportError:

    def is_batchedtensor(_: Any) -> bool:
        return False

    is_legacy_batchedtensor = is_batchedtensor

try:
    from torch._C._autograd import _top_saved_tensors_default_hooks
except ImportError:

    def _top_saved_tensors_default_hooks(_: bool) -> None:
        return None


def are_saved_by_hooks() -> bool:
    """Whether hooks are called with what torch saves for backward passes, as checkpoints do: they count the tensors,
    and expect as many of them when the forward pass is made again."""
    return _top_saved_tensors_default_hooks(True) is not None


def are_batched(tensors: Iterable[Any]) -> bool:
    """Whether some of these tensors stand for several each, as in the backward pass of `is_grads_batched=True`."""
    return any(isinstance(x, torch.Tensor) and (is_legacy_batchedtensor(x) or is_batchedtensor(x)) for x in tensors)


def in_forward_mode() -> bool:
    """Whether tensors may carry derivatives of forward mode (`torch.autograd.forward_ad`)."""
    return getattr(forward_ad, "_current_level", -1) >= 0


def within_transform() -> bool:
    """Whether what is called now is called by a transform."""
    return not _KNOWN or peek_interpreter_stack() is not None


@contextlib.contextmanager
def left_on_failure() -> Iterator[None]:
    """A context that leaves the transforms which were entered in it, if it ends by an exception: torch would take them
    for the caller's."""
    if not _KNOWN:
        yield
        return
    depth, is_forward = get_dynamic_layer_stack_depth(), _is_level_entered()
    try:
        yield
    except BaseException:
        while get_dynamic_layer_stack_depth() > depth:
            _LEAVE[peek_interpreter_stack().key()]()
        if not is_forward and _is_level_entered():
            _exit_dual_level(level=0)  # there is no other: forward mode does not nest
        raise


def _is_level_entered() -> bool:
    """Whether forward mode is entered, by a capture too. It is at most once at a time."""
    try:
        _exit_dual_level(level=_enter_dual_level())
    except RuntimeError:
        return True
    return False

"""Deferral: a compiled function or module whose first call is that of the original."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def compile(model: Callable[..., Any], **given: Any) -> Any:
    """`torch.compile(model, backend="xrt", **given)`, but the first call runs the model as it is, in eager.

    TorchDynamo takes a second or more to capture a model, before a first result is there. Here it does so in the second
    call, with which errors of `fullgraph=True` come too; a model that is called once is not captured at all.

    model: a function, or a module, for which it returns what `torch.compile` does. given: the other arguments of
    `torch.compile`, `options` among them. Raises what `torch.compile` raises.
    """
    made: Any = torch.compile(model, backend="xrt", **given)
    if not isinstance(model, torch.nn.Module):
        answer: Callable[..., Any]

        def first(*args: Any, **kwargs: Any) -> Any:
            nonlocal answer
            answer = made
            return model(*args, **kwargs)

        answer = first
        return functools.wraps(model)(lambda *args, **kwargs: answer(*args, **kwargs))

    compiled = made.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        made.forward = compiled
        return model(*args, **kwargs)

    made.forward = forward  # as torch itself does where it compiles ahead of time
    return made

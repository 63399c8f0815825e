"""Operators on lists of tensors (`torch._foreach_add` and the like), which optimizers' steps and the clipping of
gradients are made of: one tensor after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _extreme(by_tensor: Callable[..., Tensor], by_number: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, limit: (by_tensor if isinstance(limit, Tensor) else by_number)(x, limit)


def _of_products(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, a, b, value=1: _scaled(function, x, a, b, value)


def _scaled(function: Callable[..., Tensor], x: Tensor, a: Tensor, b: Tensor, value: Any) -> Tensor:
    return function(x, a * value, b) if isinstance(value, Tensor) else function(x, a, b, value=value)


def _norm(x: Tensor, ord: Any = 2, dtype: torch.dtype | None = None) -> Tensor:
    return torch.linalg.vector_norm(x, ord, dtype=dtype)


_OF_ONE: dict[str, Callable[..., Tensor]] = {
    "addcdiv": _of_products(torch.addcdiv),
    "addcmul": _of_products(torch.addcmul),
    "copy": lambda x, source, non_blocking=False: aten.copy(x, source, non_blocking),
    "maximum": _extreme(torch.maximum, torch.clamp_min),
    "minimum": _extreme(torch.minimum, torch.clamp_max),
    "norm": _norm,
    "zero": torch.zeros_like,
    **{
        name: getattr(torch, name)
        for name in (
            "abs", "acos", "add", "asin", "atan", "ceil", "clamp_max", "clamp_min", "clone", "cos", "cosh", "div",
            "erf", "erfc", "exp", "expm1", "floor", "frac", "lerp", "lgamma", "log", "log10", "log1p", "log2", "max",
            "mm", "mul", "neg", "pow", "reciprocal", "round", "rsqrt", "sigmoid", "sign", "sin", "sinh", "sqrt", "sub",
            "tan", "tanh", "trunc",
        )
    },
}  # fmt: skip
"""The name of an operator on lists -> the function of one tensor."""


def _of_each(function: Callable[..., Tensor], schema: Any) -> Callable[..., list[Tensor]]:
    """A function of lists. schema: of its operator, which says what arguments have an element for each tensor."""
    takes_numbers = len(schema.arguments) > 3 and str(schema.arguments[3].type) == "Tensor"  # a tensor of them
    is_list = [str(a.type).startswith("List[") for a in schema.arguments]

    def called(*args: Any, **kwargs: Any) -> list[Tensor]:
        count = next(len(a) for a, has in zip(args, is_list, strict=False) if has)
        if takes_numbers:
            args = (*args[:3], args[3].unbind(0))
        each = [a if isinstance(a, list | tuple) else [a] * count for a in args]
        return [function(*(a[i] for a in each), **kwargs) for i in range(count)]

    return called


def decompositions() -> dict[Any, Callable[..., Any]]:
    """ATen's operator -> function."""
    made: dict[Any, Callable[..., Any]] = {}
    for name, function in _OF_ONE.items():
        packet = getattr(aten, f"_foreach_{name}", None)  # the younger ones are missing from older torch
        for overload in packet.overloads() if packet is not None else ():
            if "out" not in overload:
                operator = getattr(packet, overload)
                made[operator] = _of_each(function, operator._schema)
    return made

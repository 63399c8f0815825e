"""NaN in the arguments of a call: whether what is compiled passes it on as torch does.

Libraries make numbers of NaN (OpenVINO's Relu, Exp and Softmax, ONNX Runtime's MaxPool and ArgMax), which a comparison
of results sees only in a call that has one. So one is made for that, once; a graph that is found to lose NaN is eager's
in calls that have any.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from xrt_torch.constants import own_tensors
from xrt_torch.devices import CPU, RandomState

_SUMS = {
    torch.float64: torch.float64, torch.float32: torch.float32, torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}  # fmt: skip
"""The type in which each is added up: one that does not overflow for narrow floats."""


def places_of_data(args: Sequence[Any]) -> list[int]:
    """The arguments that are looked at: floats on a CPU, but for parameters and buffers, which are large."""
    own = {i for i, _ in own_tensors([str(i) for i in range(len(args))], args).values()}
    return [
        i
        for i, x in enumerate(args)
        if i not in own and isinstance(x, torch.Tensor) and x.dtype in _SUMS and x.device == CPU
    ]


def have_nan(args: Sequence[Any], places: Sequence[int]) -> bool:
    """Whether an argument has NaN, or infinities of both signs. A sum is read as quickly as memory allows."""
    with torch.no_grad():
        return any(math.isnan(args[i].sum(dtype=_SUMS[args[i].dtype]).item()) for i in places)


def loses_nan(
    compiled: Callable[[Sequence[Any]], Sequence[Any]],
    eager: Callable[..., Sequence[Any]],
    args: Sequence[Any],
    places: Sequence[int],
) -> bool:
    """Whether results have NaN elsewhere than eager's, or integers other than eager's, where each of the arguments in
    these places has two NaN; or a side raises. Random numbers go on as if none had been drawn."""
    given = [x.detach() if isinstance(x, torch.Tensor) else x for x in args]
    for i in places:
        given[i] = x = given[i].clone()
        for ahead in (0, 1) if x.numel() else ():  # the first and the last of a window, say
            x[tuple(min(n // 2 + ahead, n - 1) for n in x.shape)] = math.nan
    state = RandomState(CPU)
    try:
        with torch.no_grad():
            expected = eager(*given)
            state.restore()
            found = compiled(given)
    except Exception:  # it may be read as an index
        return True
    finally:
        state.restore()
    return not all(map(_have_same_nan, found, expected))


def _have_same_nan(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor):
        return True
    if a.is_floating_point() or a.is_complex():
        a, b = torch.isnan(a), torch.isnan(b)
    return torch.equal(a, b)

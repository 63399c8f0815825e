"""Comparison: whether XRT's results of a graph agree with those of torch eager."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from xrt_torch.devices import CPU, multiplies_in_tf32
from xrt_torch.partition import VIEWS

_TOLERANCE: Final = {torch.float16: 2e-2, torch.bfloat16: 5e-2, torch.float64: 1e-9}
_TOLERANCE_OF_TF32: Final = {**_TOLERANCE, torch.float32: 5e-3}
_SMALLEST: Final = 2.0**-126
"""Below it floats of 32 bits lose their digits, or are taken as 0."""


class Comparison:
    """Of the results of a graph: integers exactly, floats within what their type allows, relative to the largest number
    of the tensor, but at least to a hundredth of the largest of all: below is the rounding error of what cancels out.

    unset: the results that hold whatever the memory did.
    """

    def __init__(self, graph: torch.fx.Graph) -> None:
        results: Any = graph.output_node().args[0]
        self._names = [r.name if isinstance(r, torch.fx.Node) else "a constant" for r in results]
        self.unset = {i for i, r in enumerate(results) if _is_unset(r)}
        self._coarse = _of_coarser_types(graph)

    def wrong(self, found: Sequence[Any], expected: Sequence[Any]) -> str:
        """What is wrong with XRT's results; "" for nothing."""
        least = max(map(_scale, expected), default=0.0) / 100
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            if i not in self.unset and (wrong := _difference(a, b, least, i in self._coarse)):
                return f"result {i} ({self._names[i]}): {wrong}"
        return ""


def _is_unset(result: Any) -> bool:
    """Whether a result holds whatever the memory did."""
    while isinstance(result, torch.fx.Node):
        packet = getattr(result.target, "overloadpacket", None)
        if packet in _EMPTY:
            return True
        if packet not in VIEWS:
            return False
        result = result.args[0]
    return False


_EMPTY: Final = tuple(
    getattr(torch.ops.aten, n) for n in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)


def _as_real(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(x.detach().resolve_conj())


def _scale(x: Any) -> float:
    """The largest finite magnitude in a tensor of floats; 0 for others."""
    if isinstance(x, torch.Tensor) and x.dtype.is_complex:
        x = _as_real(x)
    if not isinstance(x, torch.Tensor) or not x.dtype.is_floating_point or not x.numel():
        return 0.0
    return float(x.detach().abs().nan_to_num(posinf=0, neginf=0).amax())


def _of_coarser_types(graph: torch.fx.Graph) -> set[int]:
    """The results that come of floats with fewer digits than float64 has, whatever type they are."""
    is_coarse: dict[torch.fx.Node, bool] = {}
    for n in graph.nodes:
        value = n.meta.get("val", n.meta.get("example_value"))
        values = value if isinstance(value, tuple | list) else [value]
        dtypes = {v.dtype for v in values if isinstance(v, torch.Tensor)}
        computes = n.op not in ("placeholder", "get_attr") and any(d.is_floating_point or d.is_complex for d in dtypes)
        is_fine = dtypes <= {torch.float64, torch.complex128}
        is_coarse[n] = (computes and not is_fine) or any(is_coarse[a] for a in n.all_input_nodes)
    results: Any = graph.output_node().args[0]
    return {i for i, r in enumerate(results) if isinstance(r, torch.fx.Node) and is_coarse[r]}


def _difference(found: Any, expected: Any, least: float, coarse: bool) -> str | None:
    """How far a result is from eager's, as text; None where it is close enough, or equal if it is not a float.
    least: the magnitude that the error is taken relative to, at least; coarse: whether float64 comes of coarser types,
    and has no more digits than they."""
    if not isinstance(expected, torch.Tensor) or not isinstance(found, torch.Tensor):
        return None if found == expected or found is expected else f"{found!r} instead of {expected!r}"
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return f"{found.dtype}{list(found.shape)} instead of {expected.dtype}{list(expected.shape)}"
    if expected.dtype.is_complex:
        return _difference(_as_real(found), _as_real(expected), least, coarse)
    if not expected.dtype.is_floating_point:
        wrong = int((found != expected).sum())
        return f"{wrong} of {expected.numel()} elements differ" if wrong else None
    known = _TOLERANCE_OF_TF32 if expected.device != CPU and multiplies_in_tf32() else _TOLERANCE
    limit = known.get(torch.float32 if coarse and expected.dtype is torch.float64 else expected.dtype, 1e-3)
    scale = _scale(expected)
    smallest = min(torch.finfo(expected.dtype).tiny, _SMALLEST)
    if torch.allclose(found, expected, rtol=limit, atol=max(limit * max(scale, least), smallest), equal_nan=True):
        return None
    return f"differs by up to {(found - expected).abs().max().item():.3g}, where the largest is {scale:.3g}"

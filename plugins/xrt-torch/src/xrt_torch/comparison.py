"""Comparison: whether XRT's results of a graph agree with those of torch eager.

Where sums cancel out, as in gradients that are zero in mathematics, both sides' results are rounding errors, and have
no digit in common. So results that differ are compared once more, with those of the same graph in float64: XRT's are
right if they are about as near to these as eager's. And with eager's own results for arguments that are off by some
rounding steps: where two floats are nearly equal, rounding decides which of them is the largest (of a window of
`max_pool2d`, of an expert's scores), and XRT's integers may differ from eager's about as often as eager's own do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch.fx import GraphModule
from torch.utils._pytree import tree_map_only

from xrt_core.errors import UnsupportedError
from xrt_torch.devices import CPU, RandomState, multiplies_in_tf32
from xrt_torch.partition import VIEWS, copy_of, draws_numbers

_TOLERANCE: Final = {torch.float16: 2e-2, torch.bfloat16: 5e-2, torch.float64: 1e-9}
_TOLERANCE_OF_TF32: Final = {**_TOLERANCE, torch.float32: 5e-3}
_IN_DOUBLE: Final = {
    torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64,
    torch.complex32: torch.complex128, torch.complex64: torch.complex128,
}  # fmt: skip
_KNOWN: Final = ("aten", "prims", "xrt")  # operators of other libraries may have effects, or read memory as float32
_WORSE: Final = 4.0
"""How many times eager's error to float64 another one may be."""
_SMALLEST: Final = 2.0**-126
"""Below it floats of 32 bits lose their digits, or are taken as 0."""
_LARGEST_SHARE: Final = 0.01
"""Of a tensor's integers, which rounding may change, or one of few."""
_STEPS: Final = 4.0
"""Rounding steps by which arguments are moved, to see what rounding does to results."""
MOVES: Final = 4  # times that they are, each otherwise: a single number may stay where it is


class Comparison:
    """Of the results of a graph: integers exactly, floats within what their type allows, relative to the largest number
    of the tensor, but at least to a hundredth of the largest of all: below is the rounding error of what cancels out.

    more: names of what is compared behind the results, such as gradients, which depends on all that the graph computes.
    has_results: whether they are compared. unset: the results that hold whatever the memory did.
    """

    def __init__(self, graph: torch.fx.Graph, more: Sequence[str] = (), *, has_results: bool = True) -> None:
        results: Any = graph.output_node().args[0] if has_results else ()
        self._names = [*(r.name if isinstance(r, torch.fx.Node) else "a constant" for r in results), *more]
        self.unset = {i for i, r in enumerate(results) if _is_unset(r)}
        coarse = _of_coarser_types(graph)
        self._coarse = {i for i in coarse if has_results} | (
            set(range(len(results), len(self._names))) if coarse else set()
        )

    def verdict(
        self,
        args: Sequence[Any],
        found: Sequence[Any],
        expected: Sequence[Any],
        module: GraphModule,
        before: RandomState | None = None,
    ) -> str:
        """What is wrong with XRT's results for these arguments; "" for nothing. expected: those of eager; module: the
        graph in eager, which is run again where they differ; before: where random numbers stood when it began. They go
        on from where they are."""
        wrong = self.wrong(found, expected)
        if not wrong:
            return ""
        with contextlib.suppress(Exception):  # without float64 they are wrong
            if self.are_as_good(found, expected, results_in_double(module, args)):
                return ""
        after = None if before is None else before.now()
        try:
            with torch.no_grad():
                for seed in range(MOVES):
                    if before is not None:
                        before.restore()
                    if self.are_as_good(found, list(module.forward(*moved(args, seed))), expected):
                        return ""
        except Exception:  # it does not take such arguments
            return wrong
        finally:
            if after is not None:
                after.restore()
        return wrong

    def wrong(self, found: Sequence[Any], expected: Sequence[Any]) -> str:
        """How results differ from eager's; "" for not at all."""
        return next((f"result {i} ({self._names[i]}): {why}" for i, why in self._differences(found, expected)), "")

    def are_as_good(self, found: Sequence[Any], expected: Sequence[Any], exact: Sequence[Any]) -> bool:
        """Whether all results that differ are about as near to `exact` as eager's are: floats, or integers that come of
        floats with fewer digits than float64 has."""
        return all(
            _is_as_good(found[i], expected[i], exact[i], i in self._coarse)
            for i, _ in self._differences(found, expected)
        )

    def _differences(self, found: Sequence[Any], expected: Sequence[Any]) -> Iterator[tuple[int, str]]:
        least = max(map(_scale, expected), default=0.0) / 100
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            if i not in self.unset and (why := _difference(a, b, least, i in self._coarse)):
                yield i, why


def results_in_double(module: GraphModule, args: Sequence[Any]) -> list[Any]:
    """The results of a graph that is computed with float64 where it has shorter floats. Raises UnsupportedError for one
    that draws random numbers, or has operators of users or of higher order, and whatever its operators raise."""
    made = in_float64(module)
    with torch.no_grad():
        return list(made.forward(*in_double(args)))


def in_float64(module: GraphModule) -> GraphModule:
    """A graph that has float64 where it had shorter floats. Raises as `results_in_double`."""
    graph = copy_of(module.graph)
    for node in graph.nodes:
        if draws_numbers(node.target):
            raise UnsupportedError(f"{node.target} draws other numbers for float64")
        if isinstance(node.target, torch._ops.OperatorBase) and getattr(node.target, "namespace", "") not in _KNOWN:
            raise UnsupportedError(f"{node.target} may not take float64")
        node.args, node.kwargs = tree_map_only(torch.dtype, lambda d: _IN_DOUBLE.get(d, d), (node.args, node.kwargs))
    made = GraphModule(module, graph)
    for node in graph.find_nodes(op="get_attr"):
        setattr(made, node.target, _in_double(getattr(made, node.target)))
    return made


def in_double(args: Sequence[Any]) -> list[Any]:
    """Arguments of such a graph."""
    return [*map(_in_double, args)]


def _in_double(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    return x.detach().to(_IN_DOUBLE.get(x.dtype, x.dtype)).requires_grad_(x.requires_grad)


def moved(args: Sequence[Any], seed: int) -> list[Any]:
    """Arguments like these, of which elements of floats are off by some rounding steps."""
    return [_moved(x, seed) for x in args]


def _moved(x: Any, seed: int) -> Any:
    if not isinstance(x, torch.Tensor) or not (x.is_floating_point() or x.is_complex()):
        return x
    signs = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)).sub_(0.5).sign_().to(x.device)
    return (x.detach() * (1 + _STEPS * torch.finfo(x.dtype).eps * signs).to(x.dtype)).requires_grad_(x.requires_grad)


def _is_as_good(found: Any, expected: Any, exact: Any, coarse: bool) -> bool:
    if not isinstance(expected, torch.Tensor) or not isinstance(found, torch.Tensor) or found.shape != expected.shape:
        return False
    if found.dtype != expected.dtype or exact.shape != expected.shape:
        return False
    if not (expected.dtype.is_floating_point or expected.dtype.is_complex):
        wrong, eagers = (int((x != exact).sum()) for x in (found, expected))
        return coarse and wrong <= min(_WORSE * eagers, max(1.0, _LARGEST_SHARE * expected.numel()))
    if not torch.allclose(*(torch.where(x.isfinite(), 0, x) for x in (found, expected)), equal_nan=True):
        return False
    own, eagers = ((x - exact).abs().nan_to_num(0, 0, 0).max() for x in map(_in_double, (found, expected)))
    return bool(own <= _WORSE * eagers)


def _is_unset(result: Any) -> bool:
    """Whether a result holds whatever the memory did."""
    while isinstance(result, torch.fx.Node):
        packet = getattr(result.target, "overloadpacket", None)
        if packet in _EMPTY or getattr(result.target, "__name__", result.target) in _NAMES_OF_EMPTY:
            return True
        if packet not in VIEWS:
            return False
        result = result.args[0]
    return False


_NAMES_OF_EMPTY: Final = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_EMPTY: Final = tuple(getattr(torch.ops.aten, n) for n in _NAMES_OF_EMPTY)


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

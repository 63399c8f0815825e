"""Which values a program for the CPU has with channels last, and where they are computed once.

Convolutions compute so, and their kernels turn the tensors round on both sides. XLA drops what turns a tensor round and
back, but does not carry it over the operators between: those it would compute with channels first, element by element,
where what they read and what reads them has channels last (ppocr_cls: 1.6 ms, and 0.9 so). So elementwise operators
are traced on turned operands as well, and pools, BatchNormalization and Concat have kernels that do the same.

XLA fuses a depthwise convolution, or a pool, with all that reads it, and computes it again for each: a barrier behind
what several operators read stops that (ppocr_rec: 33 ms, and 27 so).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

from xrt_core.ir.graph import Node, Value
from xrt_core.ir.op_traits import traits_of
from xrt_xla._toolkit import jnp
from xrt_xla.program import Step

_CONVOLUTIONS: Final = frozenset(("Conv", "ConvTranspose"))
_FOLLOW: Final = frozenset(("AveragePool", "BatchNormalization", "GlobalAveragePool", "MaxPool"))
_WORK: Final = 9
"""Operations for an element, a depthwise convolution by 3 x 3 among them, that are not to be done twice."""


class ChannelsLast:
    """The values of one program that lie so. is_on: whether there are any, as on CPUs."""

    def __init__(self, is_on: bool) -> None:
        self._is_on = is_on
        self._work: dict[Value, int] = {}  # operations for an element since it was last written to memory
        self._shared: set[Value] = set()

    def enter(self, steps: Sequence[Step]) -> None:
        """Before a graph's steps are traced: find what several of them read, not all element by element.

        Not of a training step: with it a step of MobileNetV2 takes 303 ms instead of 225, one of ResNet-18 5 % more.
        """
        operators = {step.node.op_type for step in steps}
        self._is_on = self._is_on and "ConvFilterGrad" not in operators
        if not self._is_on or operators.isdisjoint(_CONVOLUTIONS):
            return
        readers: dict[Value, list[bool]] = {}
        for step in steps:
            for v in {s for s in step.sources if isinstance(s, Value)}:
                readers.setdefault(v, []).append(traits_of(step.node).elementwise)
        self._shared.update(v for v, found in readers.items() if len(found) > 1 and not all(found))

    def reaches(self, node: Node) -> bool:
        """Whether an input lies so, and the others have no more axes."""
        if not self._work:
            return False
        ranks = [(len(v.shape or ()), v in self._work) for v in node.inputs if v is not None]
        return any(last for _, last in ranks) and max(ranks)[0] == max(r for r, last in ranks if last)

    def note(self, node: Node, reached: bool) -> set[Value]:
        """After a node: which of its results are to be computed once, before others read them."""
        starts = node.op_type in _CONVOLUTIONS and not node.domain
        if not self._is_on or (not starts and not (reached and _follows(node))):
            return set()
        before = 0 if starts else sum(self._work.get(v, 0) for v in node.inputs if v is not None)
        work = _operations(node) + before
        outputs = {v for v in node.outputs if v is not None and len(v.shape or ()) > 2}
        once = outputs & self._shared if work >= _WORK else set()
        self._work.update((v, 0 if v in once else work) for v in outputs)
        return once


def turned(inputs: Iterable[Any], static: Sequence[int]) -> list[Any]:
    """The operands of an elementwise operator with the second axis last; those that must be known as they are."""
    given = list(inputs)
    rank = max(x.ndim for x in given if x is not None)
    return [
        x if x is None or i in static or x.size == 1
        else jnp.moveaxis(jnp.reshape(x, (1,) * (rank - x.ndim) + x.shape), 1, -1)
        for i, x in enumerate(given)
    ]  # fmt: skip


def _follows(node: Node) -> bool:
    """Whether a node's kernel computes with channels last where its input lies so."""
    if node.domain or node.op_type != "Concat":
        return traits_of(node).elementwise or (not node.domain and node.op_type in _FOLLOW)
    return node.attributes.get("axis", 1) in (1, 1 - max(len(v.shape or ()) for v in node.inputs if v is not None))


def _operations(node: Node) -> int:
    """For an element of the result, of what XLA fuses with what follows."""
    if node.op_type in ("AveragePool", "MaxPool"):
        return math.prod(node.attributes["kernel_shape"])  # type: ignore[arg-type]
    w = node.inputs[1] if node.op_type == "Conv" else None
    if w is None or w.shape is None:
        return 1
    is_depthwise = w.shape[1] == 1 and node.attributes.get("group", 1) == w.shape[0]
    return math.prod(int(d) for d in w.shape[2:]) if is_depthwise else 0  # type: ignore[arg-type]

"""Contents of small tensors in a walk, as expressions over the valid sizes: by the rules of `symbolic_elements`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from xrt_core.errors import XRTError
from xrt_core.ir.graph import Node, Value
from xrt_core.ir.symbols import Bounds, Expr, product
from xrt_core.passes.padding.form import Known, Padded
from xrt_core.passes.size_ratios import FOLLOWED, MOST, Ratio
from xrt_core.passes.symbolic_elements import ELEMENT_RULES, MOST_ELEMENTS, RATIO_RULES


class Contents:
    """What the rules may ask. state: of a value. bounds: of an expression, for sizes up to the bucket's.

    Nothing becomes a guard: what holds, holds for all these sizes.
    """

    def __init__(self, state: Callable[[Value], Padded], bounds: Callable[[Expr], Bounds]) -> None:
        self._state: Final = state
        self.bounds: Final = bounds

    def of_result(self, node: Node) -> Known | None:
        """The contents of a node's one result of integers or booleans; None where they do not follow in full."""
        return self._result(ELEMENT_RULES, node)

    def ratios_of_result(self, node: Node) -> Known | None:
        """As `of_result`, of a result of floats."""
        return self._result(RATIO_RULES, node)

    def _result(self, rules: Mapping[str, Callable[[Any, Node], Known | None]], node: Node) -> Known | None:
        rule = rules.get(node.op_type)
        if rule is None or node.domain or len(node.outputs) != 1:
            return None
        try:
            found = rule(self, node)
        except (ArithmeticError, IndexError, TypeError, ValueError, XRTError):
            return None
        return None if found is None or found.size > MOST_ELEMENTS or None in found.reshape(-1) else found

    # --- what the rules use ---

    def dims(self, v: Value | None) -> list[Expr | None] | None:
        """The valid sizes of a value."""
        return None if v is None else [product(a) for a in self._state(v).axes]

    def elements(self, v: Value | None) -> Known | None:
        """The contents of a small tensor of integers or booleans; None where they are not known."""
        return None if v is None else self._state(v).known

    def ratios(self, v: Value | None) -> Known | None:
        """The contents of a small tensor of floats as `Ratio`; None where they are not known."""
        if v is None:
            return None
        s = self._state(v)
        data = None if s.value is None else s.value.data
        if s.dtype not in FOLLOWED or data is None:
            return s.ratios
        if data.size > MOST_ELEMENTS:
            return None
        made = np.empty(data.size, object)
        try:
            made[:] = [Ratio.of(x) for x in data.reshape(-1).tolist()]
        except (ValueError, OverflowError):  # no quotient of small integers, NaN and infinity among them
            return None
        return made.reshape(data.shape)

    def rounded(self, r: Ratio, up: bool = False) -> Expr | None:
        """A quotient of sizes rounded as floats round it, where it is not negative, and its numerator not large."""
        if not self.holds(r.above) or not self.holds(MOST - r.above):
            return None
        return r.ceil() if up else r.floor()

    def holds(self, e: Expr) -> bool:
        """Whether an expression is never negative."""
        low = self.bounds(e)[0]
        return low is not None and low >= 0

"""A bucket: one padded form of a graph, and how calls of other sizes run in it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from xrt_core.compiler.buckets.sizes import Family
from xrt_core.passes.padding import PaddedGraph
from xrt_core.passes.padding.rows import Rows
from xrt_core.runtime.scheduler import shared

if TYPE_CHECKING:
    from xrt_core.guard.background import Plannable


class Runs(Protocol):
    """What compiles and runs a padded graph: `compiler.models.CompiledGraph`."""

    plans: Any

    @property
    def is_live(self) -> bool:
        """Whether engines run it."""
        ...

    @property
    def is_pending(self) -> bool:
        """Whether executables of it are being built."""
        ...

    @property
    def runs_beside_itself(self) -> bool:
        """Whether two calls at once take less time than one after the other."""
        ...

    def __call__(self, arrays: Sequence[Any]) -> list[Any]:
        """Run it on the bucket's arrays."""
        ...

    def build(self, arrays: Sequence[Any]) -> None:
        """Plan it for the bucket's arrays; its executables are there afterwards, or being built."""
        ...

    def retry(self) -> None:
        """Build executables again that failed, where another attempt is due."""
        ...

    def forget(self, reason: str) -> None:
        """Give its executables up."""
        ...


@dataclass(eq=False)
class Bucket:
    """One padded form and what runs it.

    family: which symbols vary. lower: the next smaller size of each of its symbols that another bucket has. rows: how
    rows lie where they do not mix, of which the form has `of_rows`: calls of any number take as many runs as they need,
    on two threads where `is_shared`. is_beside: whether it is made beside calls, which use it once engines run it and
    it was checked. needs_check: whether it is compared with the host at its edges; sample: arguments of a call at its
    full size, until it was; checked: whether it was; check: what does so, which nothing else holds. begun: when it was
    begun, in seconds; None once its executables were there.

    failed: why it is not used any more, "" while it is. calls: so far; valid: the sum of their volumes, and padded: of
    what was computed for them. seconds: that a run takes, the least that was seen; 0.0 before the first. used: when
    last, in seconds.
    """

    form: PaddedGraph
    inner: Any
    family: Family
    lower: Mapping[str, int]
    rows: Rows | None = None
    of_rows: int = 1
    is_shared: bool = False
    is_beside: bool = False
    needs_check: bool = False
    sample: Sequence[np.ndarray] = ()
    checked: bool = False
    check: Plannable | None = None
    begun: float | None = None
    failed: str = ""
    calls: int = 0
    valid: int = 0
    padded: int = 0
    seconds: float = 0.0
    used: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_ready(self) -> bool:
        """Whether calls may use it, unless it failed. The host would compute the padding as well, so that engines must
        run it."""
        return not self.is_beside or ((self.checked or not self.needs_check) and bool(self.inner.is_live))

    def sizes_for(self, sizes: Mapping[str, int]) -> dict[str, int] | None:
        """The sizes of its symbols for those of all symbols; None where the bucket does not serve them."""
        found: dict[str, int] = {}
        for name, n in sizes.items():
            if name in self.family.fixed:
                if self.family.fixed[name] != n:
                    return None
            elif found.setdefault(self.family.same[name], n) != n:
                return None
        return found if self.form.why_not(found) is None else None

    @property
    def sizes(self) -> dict[str, int]:
        """Those of its symbols, at which it is full."""
        return full_sizes(self.form, self.rows, self.of_rows)

    @property
    def volume(self) -> int:
        """The product of its sizes."""
        return math.prod(self.sizes.values())

    @property
    def whole(self) -> int:
        """That of all symbols, with those that are fixed."""
        return self.volume * math.prod(self.family.fixed.values())

    def runs(self, sizes: Mapping[str, int]) -> int:
        """How many runs a call of these sizes of its symbols takes."""
        return 1 if self.rows is None else -(-sizes[self.rows.symbol] // self.of_rows)

    def spent(self, sizes: Mapping[str, int]) -> int:
        """The elements that a call of these sizes takes, with padding."""
        return self.runs(sizes) * self.volume

    def elements(self, sizes: Mapping[str, int]) -> int:
        """That of all symbols, with those that are fixed."""
        return self.runs(sizes) * self.whole

    def shapes(self, sizes: Mapping[str, int]) -> list[tuple[int, ...]]:
        """The shapes of the graph's inputs for sizes of its symbols."""
        found = [tuple(math.prod(f.evaluate(sizes) for f in axis) for axis in axes) for axes in self.form.inputs]
        if self.rows is None:
            return found
        n = sizes[self.rows.symbol]
        return [
            s if a is None else (*s[:a], n, *s[a + 1 :]) for s, a in zip(found, self.rows.inputs, strict=True)
        ]  # fmt: skip

    def arguments(self, arrays: Sequence[np.ndarray], sizes: Mapping[str, int], start: int = 0) -> list[np.ndarray]:
        """The form's arguments for these of the graph; of rows that do not mix, from `start` on."""
        part = arrays if self.rows is None else self.rows.part(arrays, start, self.of_rows)
        return self.form.pad(part, sizes)

    def run(self, arrays: Sequence[np.ndarray], sizes: Mapping[str, int]) -> list[np.ndarray]:
        """The graph's results, by as many runs as these arguments take."""
        starts = range(0, self.runs(sizes) * self.of_rows, self.of_rows)
        calls = [partial(self._run, arrays, sizes, start) for start in starts]
        parts = shared(calls) if self.is_shared else [call() for call in calls]
        return parts[0] if self.rows is None else self.rows.joined(parts, sizes[self.rows.symbol], self.of_rows)

    def _run(self, arrays: Sequence[np.ndarray], sizes: Mapping[str, int], start: int) -> list[np.ndarray]:
        return self.form.cut([np.asarray(r) for r in self.inner(self.arguments(arrays, sizes, start))], sizes)

    def took(self, seconds: float) -> None:
        """Note what a run took."""
        self.seconds = min(self.seconds or seconds, seconds)

    def saved(self) -> dict[str, Any]:
        """It as plain data: its sizes, what is fixed, the symbol whose rows do not mix, and its inputs' shapes."""
        return {
            "sizes": self.sizes,
            "rows": "" if self.rows is None else self.rows.symbol,
            "fixed": dict(self.family.fixed),
            "same": dict(self.family.same),
            "lower": dict(self.lower),
            "shapes": [list(s) for s in self.shapes(self.sizes)],
        }

    def explain(self, sizes: Mapping[str, int]) -> str:
        """What is padded in a call of these sizes, and what is masked, human-readable."""
        padded = [f"{s} {sizes[s]} to {n}" for s, n in self.form.buckets.items() if sizes[s] != n]
        runs = self.runs(sizes)
        if self.rows is not None and (runs > 1 or self.of_rows != sizes[self.rows.symbol]):
            name, n = self.rows.symbol, self.of_rows
            padded.append(f"{name} {sizes[name]} in {runs} run{'s' * (runs > 1)} of {n}, as rows do not mix")
        masks = ", ".join(f"{op} x{n}" for op, n in self.form.masks.items()) or "none"
        waste = 1 - math.prod(sizes.values()) / self.spent(sizes)
        return f"padded: {', '.join(padded) or 'nothing'} ({waste:.0%} of it padding); masked before: {masks}"

    def __str__(self) -> str:
        return " x ".join(f"{s} {n}" for s, n in self.sizes.items())


class Found(NamedTuple):
    """What answers a call. bucket: None for the host, until there is one. sizes: of the bucket's symbols, or of all."""

    bucket: Bucket | None
    sizes: Mapping[str, int]


def full_sizes(form: PaddedGraph, rows: Rows | None, of_rows: int) -> dict[str, int]:
    """The sizes of a form's symbols, at which it is full, with the number of its rows where they do not mix."""
    return dict(form.buckets) if rows is None else {rows.symbol: of_rows, **form.buckets}


def smallest(buckets: Iterable[Bucket], sizes: Mapping[str, int], ready: bool = True) -> Found | None:
    """The bucket that serves a call of these sizes of all symbols by the fewest elements, then by the fewest runs.
    ready: of those that calls may use now."""
    served = [
        (b, s) for b in buckets if not b.failed and (b.is_ready or not ready) and (s := b.sizes_for(sizes)) is not None
    ]
    if not served:
        return None
    return Found(*min(served, key=lambda found: (found[0].elements(found[1]), found[0].runs(found[1]))))

"""Buckets: one padded executable for many sizes of a graph's inputs, where padding is proven harmless.

An engine of static shapes compiles for every new signature. With buckets, a call of a new signature whose dimensions
alone differ from earlier ones is padded to a bucket that serves all smaller sizes, and its results are cut
(`passes.padding`). Sizes that the proof does not cover are compiled as they are.
"""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Protocol

import numpy as np

from xrt_core.errors import OptionError, nearest
from xrt_core.events import EventLog
from xrt_core.ir.graph import Graph
from xrt_core.ir.symbols import Declared, Expr, expression
from xrt_core.ir.types import Dim, TensorType
from xrt_core.passes.padding import PaddedGraph, PaddingRefused, pad_graph

BucketSizes = str | tuple[tuple[str, tuple[int, ...]], ...]
"""The option: "off", "auto", or the sizes of each symbol, ascending."""

HULL_WASTE: Final = 0.75
"""The share of a call's padded elements that may be padding in a bucket that is made for all sizes that were seen."""
FINAL_WASTE: Final = 0.25
"""The share of padding, of all sizes that were seen, from which no further bucket is made."""
GAIN: Final = 0.5
"""The padding, of all sizes that were seen, that a further bucket must save, as a share of the largest."""
MOST_WASTE: Final = 0.9
"""The share of padding from which a call gets a bucket of about its own size, whatever that costs."""
LOOKED_AT: Final = 64
"""Sizes, the last, by which a further bucket is chosen."""
LITTLE: Final = 0.2
"""The padding, as a share of the largest bucket, that is never worth a compilation."""
FIRST_BUCKETS: Final = 10
"""Buckets that a graph may have from the start. Each further one is earned, by time spent on padding."""
EARNED: Final = 2.0
"""Of how many compilations: a call's share of padding is more than what a smaller bucket saves."""
LEAST_SECONDS: Final = 1.0
"""What a compilation costs at least: an executable takes memory as well."""
USUAL_SECONDS: Final = 5.0
"""Of a compilation, before one was measured."""
MAX_BOUND: Final = 1024
"""Signatures whose padded calls stay bound; the oldest goes first."""


class Runs(Protocol):
    """What compiles and runs a padded graph: `compiler.models.CompiledGraph`."""

    plans: Any

    def __call__(self, arrays: Sequence[Any]) -> list[Any]:
        """Run it on the bucket's arrays."""
        ...


@dataclass(eq=False)
class Bucket:
    """One padded form and what runs it.

    fixed: symbols whose size is part of it. same: symbol -> the symbol of the form that stands for it. failed: why it
    is not used any more, "" while it is. ready: whether it may serve; one that is made while a larger one serves
    is not at first. calls: so far; valid: the sum of their volumes. used: when last, in seconds. checked: whether it
    was compared at its edges. live: whether engines have run it.
    """

    form: PaddedGraph
    inner: Any
    fixed: Mapping[str, int]
    same: Mapping[str, str]
    lower: Mapping[str, int]
    failed: str = ""
    ready: bool = True
    calls: int = 0
    valid: int = 0
    checked: bool = False
    live: bool = False
    used: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def sizes_for(self, sizes: Mapping[str, int]) -> dict[str, int] | None:
        """The sizes of the form's symbols for those of all symbols; None where the bucket does not serve them."""
        found: dict[str, int] = {}
        for name, n in sizes.items():
            if name in self.fixed:
                if self.fixed[name] != n:
                    return None
            elif found.setdefault(self.same[name], n) != n:
                return None
        return found if self.form.why_not(found) is None else None

    def shapes(self, sizes: Mapping[str, int]) -> list[tuple[int, ...]]:
        """The shapes of the graph's inputs for sizes of the form's symbols."""
        return [tuple(math.prod(f.evaluate(sizes) for f in axis) for axis in axes) for axes in self.form.inputs]

    @property
    def volume(self) -> int:
        """The product of its sizes."""
        return math.prod(self.form.buckets.values())

    @property
    def whole(self) -> int:
        """That of all symbols, with those that are fixed."""
        return self.volume * math.prod(self.fixed.values())

    def __str__(self) -> str:
        return " x ".join(f"{s} {n}" for s, n in self.form.buckets.items())


class Buckets:
    """The buckets of one graph. Thread-safe.

    graph: as captured. choice: the option. make: compiles a padded graph. reference: runs the graph as it is on the
    host, for the check of a new bucket; None where results are not verified. declared: the shapes that the user
    declared. beside: whether a bucket may be made although a larger one serves. fits: whether these may be in memory
    together; the bucket used longest ago goes first.

    Raises OptionError where the option names a symbol that no input of the graph has.
    """

    def __init__(
        self,
        graph: Graph,
        choice: BucketSizes,
        make: Callable[[Graph], Runs],
        events: EventLog,
        reference: Callable[[Sequence[np.ndarray]], Sequence[Any]] | None = None,
        declared: Declared | None = None,
        beside: bool = True,
        fits: Callable[[Sequence[Runs]], bool] = lambda inner: True,
    ) -> None:
        self._graph, self._make, self._events, self._reference = graph, make, events, reference
        self._explicit = dict(choice) if not isinstance(choice, str) else None
        self._declared = _declared(graph, declared)
        self._symbols = {} if self._declared is None else _symbols(self._declared)
        self._beside, self._fits = beside, fits
        self._lock = threading.RLock()
        self._is_making = False  # a bucket, beside a larger one
        self._seen: list[dict[str, int]] = []
        self._refused: dict[Hashable, str] = {}
        self._none: set[Hashable] = set()  # sizes for which no bucket is made beside others
        self._bound: dict[Hashable, None] = {}
        self._wasted = 0.0  # seconds of calls, by their share of padding, since a bucket was made
        self._cost = USUAL_SECONDS
        self.generation = 0  # rises where a bucket becomes ready: calls look for theirs again
        self.buckets: list[Bucket] = []
        for name in self._explicit or ():
            if name not in self._symbols:
                known = ", ".join(self._symbols) or "no symbols"
                hint = nearest(name, self._symbols)
                raise OptionError(f"buckets: the model has no symbol {name!r}; its inputs have {known}{hint}")

    def find(self, arrays: Sequence[Any]) -> tuple[Bucket, dict[str, int]] | None:
        """The bucket for the sizes of these arguments, made if it is worth it, and the sizes of its symbols."""
        sizes = self._sizes(arrays)
        if sizes is None:
            return None
        with self._lock:
            if sizes not in self._seen:
                self._seen.append(sizes)
                del self._seen[:-256]
            found = self._smallest(sizes)
            if found is None:
                return self._new(sizes)
            is_lost = self._is_lost(*found)
            if (is_lost and self._is_free) or (
                self._may_make() and (self._explicit is None or not self._good(*found))
            ):
                if self._explicit is not None:
                    wanted: Mapping[str, int] | None = {}
                else:
                    wanted = self._own(*found) if is_lost else self._worthwhile(sizes)
                if wanted is None or _sizes_key(wanted or sizes) in self._none:
                    self._make_none()
                else:  # the larger one serves until it is ready
                    self._is_making = True
                    beside = sizes, wanted, [np.array(a) for a in arrays]
                    threading.Thread(target=self._make_beside, args=beside, name="xrt-bucket").start()
            return found

    def prepare(self, bucket: Bucket, arrays: Sequence[np.ndarray], at_once: bool) -> None:
        """Plan a bucket, on its own arguments, and note how long that takes."""
        start = time.perf_counter()
        bucket.inner.prepare(arrays, at_once=at_once)
        if at_once or bucket.inner.is_final:
            self._cost = max(LEAST_SECONDS, time.perf_counter() - start)

    def _make_beside(self, sizes: dict[str, int], wanted: Mapping[str, int], arrays: Sequence[np.ndarray]) -> None:
        """Make and compile a bucket beside the larger one that serves meanwhile."""
        try:
            try:
                made = self._new(sizes, wanted, ready=False)
            except Exception as e:  # in this thread nobody would hear of it; the larger bucket serves
                made, why = None, f"{type(e).__name__}: {e}"
                self._events.emit("padding.refused", level=logging.WARNING, model=self._graph.name, reason=why)
            if made is None:
                if len(self._none) >= MAX_BOUND:
                    self._none.clear()
                self._none.add(_sizes_key(wanted or sizes))
                self._make_none()
                return
            bucket = made[0]
            try:
                full = [stretched(a, s) for a, s in zip(arrays, bucket.shapes(bucket.form.buckets), strict=True)]
                self.prepare(bucket, bucket.form.pad(full, bucket.form.buckets), True)
            except Exception as e:  # a call with these sizes would raise it to its caller; the larger bucket does not
                bucket.failed = f"{type(e).__name__}: {e}"
            bucket.ready = True
        finally:
            self._is_making = False
            self.generation += 1

    def _make_none(self) -> None:
        """Forget the padding of calls that should have earned a bucket: there is none to be had."""
        if self._has_earned:
            self._wasted = 0.0

    def wants_another(self, bucket: Bucket, sizes: Mapping[str, int]) -> bool:
        """Whether a call of these sizes should look for its bucket again: time wasted on padding has earned one, or it
        is next to nothing but padding."""
        if self._is_lost(bucket, sizes):
            return self._is_free and _sizes_key(self._own(bucket, sizes)) not in self._none
        return self._has_earned and not self._good(bucket, sizes) and self._may_make()

    @property
    def _has_earned(self) -> bool:
        return self._wasted > EARNED * self._cost

    def known(self, arrays: Sequence[Any]) -> tuple[Bucket, dict[str, int]] | None:
        """The bucket that is there for these arguments, or None."""
        sizes = self._sizes(arrays)
        return None if sizes is None else self._smallest(sizes)

    def covers(self, parts: Sequence[Any]) -> bool:
        """Whether a bucket that engines run serves a signature: (dtype, shape) of each argument."""
        if self._declared is None or not all(type(p) is tuple for p in parts):
            return False
        sizes = self._declared.admits([tuple(s) for _, s in parts])
        if sizes is None or sizes.keys() != self._symbols.keys():
            return False
        served = (b for b in self.buckets if b.ready and not b.failed and b.inner.is_final)
        return any(b.sizes_for(sizes) is not None for b in served)

    def saved(self) -> list[dict[str, Any]]:
        """The buckets in use as plain data, for `restore`: of each the sizes, what is fixed, and its inputs' shapes."""
        return [
            {
                "sizes": dict(b.form.buckets),
                "fixed": dict(b.fixed),
                "same": dict(b.same),
                "lower": dict(b.lower),
                "shapes": [list(s) for s in b.shapes(b.form.buckets)],
            }
            for b in self.buckets
            if b.ready and not b.failed
        ]

    def restore(
        self,
        sizes: Mapping[str, int],
        fixed: Mapping[str, int],
        same: Mapping[str, str],
        lower: Mapping[str, int],
        arrays: Sequence[np.ndarray],
    ) -> None:
        """Make a bucket that `saved` told, and plan it. arrays: of its full size.

        Raises PaddingRefused, KeyError and ValueError where it does not fit the graph.
        """
        if set(fixed) | set(same) != set(self._symbols) or set(fixed) & set(same):
            raise ValueError("the symbols of a bucket are not those of the graph")
        form = pad_graph(self._graph, _shapes(self._declared, fixed, same), sizes)
        made = Bucket(form, self._make(form.graph), dict(fixed), dict(same), dict(lower), used=time.monotonic())
        for at in (sizes, {**sizes, **dict.fromkeys(sizes, 1)}):  # what varied before
            self._seen.append({**fixed, **{s: at[t] for s, t in same.items()}})
        self.buckets.append(made)
        made.inner.prepare(form.pad(arrays, sizes))

    def keep(self, key: Hashable) -> Hashable | None:
        """Note a bound call; returns the key of one that is to be forgotten, or None."""
        with self._lock:
            self._bound[key] = None
            if len(self._bound) <= MAX_BOUND:
                return None
            oldest = next(iter(self._bound))
            del self._bound[oldest]
            return oldest

    def is_for_host(self, bucket: Bucket, sizes: Mapping[str, int]) -> bool:
        """Whether the host should compute a call of these sizes as it is: engines do not run the bucket yet, and most
        of what the host would compute in their place is padding."""
        bucket.live = bucket.live or bucket.inner.is_final
        return not bucket.live and 2 * math.prod(sizes.values()) < bucket.volume

    def run(self, bucket: Bucket, sizes: Mapping[str, int], arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The results of the graph through a bucket."""
        form = bucket.form
        start = time.perf_counter()
        results = form.cut([np.asarray(r) for r in bucket.inner(form.pad(arrays, sizes))], sizes)
        volume = math.prod(sizes.values())
        self._wasted += (time.perf_counter() - start) * (1 - volume / bucket.volume)
        bucket.used = time.monotonic()
        bucket.calls += 1  # without a lock: statistics
        bucket.valid += volume
        if self._reference is not None and not bucket.checked:
            self._begin_check(bucket, arrays, sizes)
        return results

    def text(self, bucket: Bucket | None, sizes: Mapping[str, int] | None) -> str:
        """The decisions about padding, human-readable, of a signature that a bucket serves, or (None) of another."""
        if bucket is None or sizes is None:
            why = "; ".join(dict.fromkeys(self._refused.values()))
            return f"not padded: {why}" if why else "not padded: no size has varied yet"
        padded = (
            ", ".join(f"{s} {sizes[s]} to {n}" for s, n in bucket.form.buckets.items() if sizes[s] != n) or "nothing"
        )
        masks = ", ".join(f"{op} x{n}" for op, n in bucket.form.masks.items()) or "none"
        waste = 1 - math.prod(sizes.values()) / bucket.volume
        lines = [f"padded: {padded} ({waste:.0%} of it padding); masked before: {masks}"]
        for b in self.buckets:
            share = f", {1 - b.valid / (b.calls * b.volume):.0%} padding" if b.calls else ""
            lines.append(f"bucket {b}: {b.calls} calls{share}{'; not used: ' + b.failed if b.failed else ''}")
        return "\n".join(lines)

    # --- choice -------------------------------------------------------------------------------------------------------

    def _sizes(self, arrays: Sequence[Any]) -> dict[str, int] | None:
        if self._declared is None or not all(type(a) is np.ndarray and a.size for a in arrays):
            return None
        sizes = self._declared.admits([a.shape for a in arrays])
        return None if sizes is None or sizes.keys() != self._symbols.keys() else sizes

    def _smallest(self, sizes: Mapping[str, int]) -> tuple[Bucket, dict[str, int]] | None:
        served = [(b, s) for b in self.buckets if b.ready and not b.failed and (s := b.sizes_for(sizes)) is not None]
        return min(served, key=lambda bs: bs[0].whole, default=None)

    def _good(self, bucket: Bucket, sizes: Mapping[str, int]) -> bool:
        if self._explicit is not None:
            return all(bucket.form.buckets[s] <= _rounded(n, self._explicit.get(s)) for s, n in sizes.items())
        waste = bucket.volume - math.prod(sizes.values())
        if waste <= LITTLE * max(b.volume for b in self.buckets):
            return True
        return waste / bucket.volume <= FINAL_WASTE

    def _is_lost(self, bucket: Bucket, sizes: Mapping[str, int]) -> bool:
        """Whether a call in this bucket is next to nothing but padding."""
        return self._explicit is None and math.prod(sizes.values()) < (1 - MOST_WASTE) * bucket.volume

    def _own(self, bucket: Bucket, sizes: Mapping[str, int]) -> dict[str, int]:
        """The sizes of a bucket for a call that is lost in this one."""
        return {s: min(rung(n), bucket.form.buckets[s]) for s, n in sizes.items()}

    @property
    def _is_free(self) -> bool:
        """Whether a bucket may be made beside others, and none is being made."""
        return self._beside and not self._is_making

    def _may_make(self) -> bool:
        if not self._is_free:  # one after the other
            return False
        return self._explicit is not None or len(self.buckets) < FIRST_BUCKETS or self._has_earned

    def _worthwhile(self, sizes: Mapping[str, int]) -> dict[str, int] | None:
        """The sizes of the bucket that would save the most padding of all that was seen; None where that is too little.

        Candidates are what holds two of the sizes that were seen, in steps of an eighth of an octave.
        """
        fixed, same = self._family(sizes)
        symbols = sorted(set(same.values()))
        if not symbols:
            return None
        scale = math.prod(fixed.values())
        found = [
            ([next(n for s, n in seen.items() if same.get(s) == t) for t in symbols], served[0].whole)
            for seen in self._seen[-LOOKED_AT:]
            if all(seen[s] == n for s, n in fixed.items()) and (served := self._smallest(seen)) is not None
        ]
        if not found:
            return None
        rows, now = np.array([r for r, _ in found]), np.array([w for _, w in found], float)
        is_first = len(self.buckets) < FIRST_BUCKETS
        if not is_first and 1 - rows.prod(1).sum() * scale / now.sum() <= FINAL_WASTE:
            return None
        steps = np.unique([[fine(int(n)) for n in r] for r in rows], axis=0)
        candidates = np.unique(np.maximum(steps[:, None], steps[None]).reshape(-1, len(symbols)), axis=0)
        volumes = candidates.prod(1) * scale
        holds = (rows[None] <= candidates[:, None]).all(-1)
        gains = (np.maximum(now[None] - volumes[:, None], 0) * holds).sum(1)
        best = int(gains.argmax())
        if gains[best] <= (GAIN if is_first else LITTLE) * max(b.whole for b in self.buckets):
            return None
        return {s: int(n) for s, n in zip(symbols, candidates[best], strict=True)}

    def _new(
        self, sizes: dict[str, int], wanted: Mapping[str, int] = MappingProxyType({}), ready: bool = True
    ) -> tuple[Bucket, dict[str, int]] | None:
        """A new bucket, for these sizes unless others are `wanted`; None where padding is refused. ready: whether calls
        may use it at once."""
        with self._lock:
            fixed, same = self._family(sizes)
            seen_sizes = list(self._seen)
        symbols = sorted(set(same.values()))
        family = (tuple(sorted(fixed.items())), tuple(sorted(same.items())))
        if not symbols or family in self._refused:
            return None
        own = {same[s]: n for s, n in sizes.items() if s in same}
        explicit = self._explicit or {}
        if wanted:
            rounded = {s: self._in_limits(s, wanted[s], wanted[s]) for s in symbols}
        else:
            hull = dict(own)
            for seen in seen_sizes if self._explicit is None else ():
                for s, n in seen.items():
                    if s in same:
                        hull[same[s]] = max(hull[same[s]], n)
            rounded = {s: self._in_limits(s, _rounded(hull[s], explicit.get(s)), hull[s]) for s in symbols}
            share = math.prod(own.values()) / math.prod(rounded.values())
            if self._explicit is None and share < 1 - HULL_WASTE and self._may_make():
                rounded = {s: self._in_limits(s, rung(own[s]), own[s]) for s in symbols}
        start = time.perf_counter()
        form = reason = None
        for buckets in (rounded, wanted or own):  # an axis of the model may end between the two
            try:
                form = pad_graph(self._graph, _shapes(self._declared, fixed, same), buckets)
                break
            except PaddingRefused as e:
                reason = str(e)
        if form is None:
            assert reason is not None
            if not any(b.same == same and b.fixed == fixed for b in self.buckets):
                self._refused[family] = reason
            self._events.emit("padding.refused", level=logging.INFO, model=self._graph.name, reason=reason)
            return None
        inner = self._make(form.graph)
        with self._lock:
            same_sizes = (b for b in self.buckets if b.form.buckets == form.buckets)
            if any(b.same == same and b.fixed == fixed for b in same_sizes) or (
                not wanted and form.why_not(own) is not None
            ):
                return None
            self._wasted = 0.0
            lower = {
                s: max((b.form.buckets[s] for b in self.buckets if b.form.buckets.get(s, n) < n), default=0)
                for s, n in form.buckets.items()
            }
            made = Bucket(form, inner, fixed, same, lower, used=time.monotonic(), ready=ready)
            while self.buckets and not self._fits([b.inner for b in self.buckets]):
                oldest = min(self.buckets, key=lambda b: b.used)
                self.buckets.remove(oldest)
                oldest.failed = "it was dropped, as others took its memory"
                oldest.inner.forget(oldest.failed)
                self._none.clear()
            self.buckets.append(made)
        self._events.emit(
            "padding.bucket", level=logging.INFO, seconds=time.perf_counter() - start, model=self._graph.name,
            bucket=str(made),
        )  # fmt: skip
        return made, own

    def _in_limits(self, symbol: str, rounded: int, size: int) -> int:
        """The size of a bucket within what the user declared of the symbol."""
        assert self._declared is not None
        limits = self._declared.symbols.get(symbol)
        if limits is None:
            return rounded
        rounded = -(-rounded // limits.multiple) * limits.multiple
        return rounded if limits.max is None else max(size, min(rounded, limits.max))

    def _family(self, sizes: Mapping[str, int]) -> tuple[dict[str, int], dict[str, str]]:
        """The symbols that never varied, with their sizes; and for each other the symbol that stands for it: of
        unnamed dimensions that were always equal, the first."""
        assert self._declared is not None
        fixed: dict[str, int] = {}
        same: dict[str, str] = {}
        first: dict[tuple[int, ...], str] = {}
        for name, is_named in self._symbols.items():
            history = tuple(s[name] for s in self._seen)
            wanted = name in self._explicit if self._explicit is not None else len(set(history)) > 1
            if not wanted:
                fixed[name] = sizes[name]
            else:
                same[name] = name if is_named else first.setdefault(history, name)
        return fixed, same

    # --- the check of a new bucket ------------------------------------------------------------------------------------

    def _begin_check(self, bucket: Bucket, arrays: Sequence[np.ndarray], sizes: Mapping[str, int]) -> None:
        with bucket.lock:
            if bucket.checked or not getattr(bucket.inner, "is_final", True):
                return
            bucket.checked = True
        given = [a.copy() for a in arrays]
        threading.Thread(target=self._check, args=(bucket, given, dict(sizes)), name="xrt-bucket").start()

    def _check(self, bucket: Bucket, arrays: Sequence[np.ndarray], sizes: Mapping[str, int]) -> None:
        """Compare the bucket's executable with the graph as it is on the host, on the lengths at its edges."""
        try:
            why = self.difference(bucket, arrays, sizes)
        except Exception as e:  # a bucket that cannot be checked is not used
            why = f"its check failed: {type(e).__name__}: {e}"
        if why:
            bucket.failed = why
            level = logging.WARNING
            self._events.emit("padding.wrong", level=level, model=self._graph.name, bucket=str(bucket), error=why)
        else:
            self._events.emit("padding.checked", model=self._graph.name, bucket=str(bucket))

    def difference(self, bucket: Bucket, arrays: Sequence[np.ndarray], sizes: Mapping[str, int]) -> str:
        """Where the bucket's results differ from the host's on the arguments of a call, stretched to the lengths at the
        bucket's edges: the full bucket, one below, one above the next smaller. "" if they do not."""
        from xrt_core.verify.compare import EXACT, compare, float_dtypes, tolerance_for

        assert self._declared is not None
        assert self._reference is not None
        form = bucket.form
        dtypes = float_dtypes(form.graph)
        for at in edges(form.buckets, bucket.lower):
            if form.why_not(at) is not None:
                continue
            given = [stretched(a, shape) for a, shape in zip(arrays, bucket.shapes(at), strict=True)]
            found = form.cut([np.asarray(r) for r in bucket.inner(form.pad(given, at))], at)
            for i, (got, want) in enumerate(zip(found, map(np.asarray, self._reference(given)), strict=True)):
                if got.shape != want.shape or got.dtype != want.dtype:
                    return f"result {i} for {at} is {got.dtype}{list(got.shape)}, not {want.dtype}{list(want.shape)}"
                tolerance = tolerance_for(want.dtype, dtypes, {}) if dtypes else EXACT
                difference = compare(got, want, tolerance)
                if not difference.is_right:
                    return f"result {i} for {at}: {difference.reason}"
        return ""


def _sizes_key(sizes: Mapping[str, int]) -> Hashable:
    return tuple(sorted(sizes.items()))


def edges(buckets: Mapping[str, int], lower: Mapping[str, int]) -> list[dict[str, int]]:
    """The sizes on which a bucket is checked: the full bucket, one below, and one above the next smaller one."""
    return [
        dict(buckets),
        {s: max(1, n - 1) for s, n in buckets.items()},
        {s: min(n, lower.get(s, 0) + 1) for s, n in buckets.items()},
    ]


def stretched(array: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """The array cut or repeated along its axes to a shape: real contents at another size."""
    for axis, n in enumerate(shape):
        array = np.take(array, np.arange(n) % array.shape[axis], axis=axis)
    return np.ascontiguousarray(array)


def rung(n: int) -> int:
    """The smallest of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... that is at least n: two sizes an octave, a fifth of which is
    padding on average where all sizes are as frequent."""
    k = 1
    while k < n:
        if k > 1 and k * 3 // 2 >= n:
            return k * 3 // 2
        k *= 2
    return k


def fine(n: int) -> int:
    """The smallest of eight sizes an octave that is at least n; n itself up to 16."""
    step = max(1, (1 << (n - 1).bit_length()) // 16)
    return -(-n // step) * step


def _rounded(n: int, sizes: Sequence[int] | None) -> int:
    """The size of the bucket for n: of the given ones the smallest that fits; n itself above them all."""
    return rung(n) if sizes is None else min((s for s in sizes if s >= n), default=n)


def _declared(graph: Graph, user: Declared | None) -> Declared | None:
    """The symbols of a graph's inputs, as the user declared them or else the graph; dimensions without a name get one.
    None where a rank is unknown, and where no dimension varies."""
    shapes: list[tuple[Dim, ...]] = []
    for i, v in enumerate(graph.inputs):
        own = v.type.shape if isinstance(v.type, TensorType) and v.type.dtype is not None else None
        shape = own if user is None or user.shapes[i] is None else user.shapes[i]
        if own is None or shape is None:
            return None
        shapes.append(tuple(_dim(d, i, a) for a, d in enumerate(shape)))
    if all(isinstance(d, int) for s in shapes for d in s):
        return None
    return Declared(tuple(v.name for v in graph.inputs), tuple(shapes), {} if user is None else user.symbols)


_UNNAMED: Final = "dim_"


def _dim(d: Dim, i: int, axis: int) -> Dim:
    if isinstance(d, int) or (d is not None and expression(d) is not None):
        return d
    return f"{_UNNAMED}{i}_{axis}" if d is None else "symbol_" + re.sub(r"\W", "_", d)


def _symbols(declared: Declared) -> dict[str, bool]:
    """The symbols, in order, and whether the model named them."""
    found: dict[str, bool] = {}
    for shape in declared.shapes:
        for d in shape or ():
            made = None if d is None else expression(d)
            for s in sorted(made.symbols) if made is not None else ():
                found.setdefault(s, not s.startswith(_UNNAMED))
    return found


def _shapes(
    declared: Declared | None, fixed: Mapping[str, int], same: Mapping[str, str]
) -> list[tuple[Dim, ...] | None]:
    """The declared shapes with sizes in the place of fixed symbols, and with what stands for each other symbol."""
    assert declared is not None
    new = {**{s: Expr.of(n) for s, n in fixed.items()}, **{s: Expr.of(t) for s, t in same.items()}}
    found: list[tuple[Dim, ...] | None] = []
    for shape in declared.shapes:
        exprs = [expression(d) for d in shape or ()]
        found.append(tuple(None if e is None else e.substitute(new).dim for e in exprs))
    return found

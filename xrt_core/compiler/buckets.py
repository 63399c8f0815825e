"""Buckets: one padded executable for many sizes of a graph's inputs, where padding is proven harmless.

An engine of static shapes compiles for every new signature. With buckets, a call of a new signature whose dimensions
alone differ from earlier ones is padded to a bucket that serves all smaller sizes, and its results are cut
(`passes.padding`). Sizes that the proof does not cover are compiled as they are.

Where compilation is in the background, so is all of this: until a bucket that serves a call was checked, a larger one
answers, or the host computes the call as it is, whichever takes less time.
"""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np

from xrt_core.engine.boundary import beside_the_program
from xrt_core.errors import OptionError, nearest
from xrt_core.events import EventLog
from xrt_core.guard.timeouts import Cancelled
from xrt_core.ir.graph import Graph
from xrt_core.ir.symbols import Declared, Expr, expression
from xrt_core.ir.types import Dim, TensorType
from xrt_core.options.guard_settings import retry_time
from xrt_core.passes.padding import PaddedGraph, PaddingRefused, pad_graph
from xrt_core.passes.padding.rows import Rows, divided
from xrt_core.runtime.scheduler import shared

if TYPE_CHECKING:
    from xrt_core.guard.background import Plannable

BucketSizes = str | tuple[tuple[str, tuple[int, ...]], ...]
"""The option: "off", "auto", or the sizes of each symbol, ascending."""

HULL_WASTE: Final = 0.75
"""The share of a call's padded elements that may be padding in a bucket that is made for all sizes that were seen."""
FINAL_WASTE: Final = 0.25
"""The share of padding, of all sizes that were seen, from which no further bucket is made."""
GAIN: Final = 0.5
"""The padding, of all sizes that were seen, that a further bucket must save, as a share of the largest."""
ROWS_GAIN: Final = 0.25
"""The same where rows do not mix: calls of any number of them share it, so that fewer buckets are there to choose."""
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
DOUBT: Final = 0.95
"""What the time of a bucket is multiplied with whenever the host takes a call for it: in the end it is tried again."""
MAX_BOUND: Final = 1024
"""Signatures whose padded calls stay bound; the oldest goes first."""


TRIED_ROWS: Final = 4
"""Rows by which it is found out whether they mix."""

_Form = tuple[PaddedGraph, Rows | None, int]
"""A padded form; how its rows lie where they do not mix, and how many of them it has."""


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


@dataclass(eq=False)
class Bucket:
    """One padded form and what runs it.

    fixed: symbols whose size is part of it. same: symbol -> the symbol of the form that stands for it. failed: why it
    is not used any more, "" while it is. calls: so far; valid: the sum of their volumes, and padded: of what was
    computed for them. sample: arguments of a call at its full size, until it was compared with the host at its edges;
    checked: whether that was. seconds: that a run takes, the least that was seen; 0.0 before the first. begun: when it
    was begun, in seconds; None once its executables were there. used: when last, in seconds. rows: how rows lie where
    they do not mix, of which the form has `of_rows`: calls of any number take as many runs as they need, on two threads
    where `is_shared`.
    """

    form: PaddedGraph
    inner: Any
    fixed: Mapping[str, int]
    same: Mapping[str, str]
    lower: Mapping[str, int]
    failed: str = ""
    calls: int = 0
    valid: int = 0
    padded: int = 0
    sample: Sequence[np.ndarray] = ()
    checked: bool = False
    seconds: float = 0.0
    check: _Check | None = None
    begun: float | None = None
    used: float = field(default_factory=time.monotonic)
    rows: Rows | None = None
    of_rows: int = 1
    is_shared: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def sizes_for(self, sizes: Mapping[str, int]) -> dict[str, int] | None:
        """The sizes of its symbols for those of all symbols; None where the bucket does not serve them."""
        found: dict[str, int] = {}
        for name, n in sizes.items():
            if name in self.fixed:
                if self.fixed[name] != n:
                    return None
            elif found.setdefault(self.same[name], n) != n:
                return None
        return found if self.form.why_not(found) is None else None

    def shapes(self, sizes: Mapping[str, int]) -> list[tuple[int, ...]]:
        """The shapes of the graph's inputs for sizes of its symbols."""
        found = [tuple(math.prod(f.evaluate(sizes) for f in axis) for axis in axes) for axes in self.form.inputs]
        if self.rows is None:
            return found
        n = sizes[self.rows.symbol]
        return [
            s if a is None else (*s[:a], n, *s[a + 1 :]) for s, a in zip(found, self.rows.inputs, strict=True)
        ]  # fmt: skip

    @property
    def sizes(self) -> dict[str, int]:
        """Those of its symbols, at which it is full."""
        return dict(self.form.buckets) if self.rows is None else {self.rows.symbol: self.of_rows, **self.form.buckets}

    def runs(self, sizes: Mapping[str, int]) -> int:
        """How many runs a call of these sizes of its symbols takes."""
        return 1 if self.rows is None else -(-sizes[self.rows.symbol] // self.of_rows)

    def run(self, arrays: Sequence[np.ndarray], sizes: Mapping[str, int]) -> list[np.ndarray]:
        """The graph's results, by as many runs as these arguments take."""
        starts = range(0, self.runs(sizes) * self.of_rows, self.of_rows)
        calls = [partial(self._run, arrays, sizes, start) for start in starts]
        parts = shared(calls) if self.is_shared else [call() for call in calls]
        return parts[0] if self.rows is None else self.rows.joined(parts, sizes[self.rows.symbol], self.of_rows)

    def _run(self, arrays: Sequence[np.ndarray], sizes: Mapping[str, int], start: int) -> list[np.ndarray]:
        return self.form.cut([np.asarray(r) for r in self.inner(self.arguments(arrays, sizes, start))], sizes)

    def arguments(self, arrays: Sequence[np.ndarray], sizes: Mapping[str, int], start: int = 0) -> list[np.ndarray]:
        """The form's arguments for these of the graph; of rows that do not mix, from `start` on."""
        part = arrays if self.rows is None else self.rows.part(arrays, start, self.of_rows)
        return self.form.pad(part, sizes)

    @property
    def family(self) -> Hashable:
        """See `_family`."""
        return _family(self.fixed, self.same)

    def took(self, seconds: float) -> None:
        """Note what a run took."""
        self.seconds = min(self.seconds or seconds, seconds)

    @property
    def volume(self) -> int:
        """The product of its sizes."""
        return math.prod(self.sizes.values())

    def spent(self, sizes: Mapping[str, int]) -> int:
        """The elements that a call of these sizes takes, with padding."""
        return self.runs(sizes) * self.volume

    @property
    def whole(self) -> int:
        """That of all symbols, with those that are fixed."""
        return self.volume * math.prod(self.fixed.values())

    def __str__(self) -> str:
        return " x ".join(f"{s} {n}" for s, n in self.sizes.items())


class Found(NamedTuple):
    """What answers a call. bucket: None for the host, until there is one. sizes: of the bucket's symbols, or of all."""

    bucket: Bucket | None
    sizes: Mapping[str, int]


class _Wanted(NamedTuple):
    """A bucket that is to be made. sizes: of its symbols; the later ones where the model ends before the first. fixed,
    same: as of `Bucket`. own: the sizes of the call that wants it, of the bucket's symbols. beside: whether another
    serves that call. key: what is noted where there is none to be had. small: what takes the place of the first sizes
    where more than three quarters of the call in these would be padding; None where nothing does."""

    sizes: Sequence[Mapping[str, int]]
    fixed: Mapping[str, int]
    same: Mapping[str, str]
    own: Mapping[str, int]
    beside: bool
    key: Hashable
    small: Mapping[str, int] | None = None

    @property
    def family(self) -> Hashable:
        """See `_family`."""
        return _family(self.fixed, self.same)


class Buckets:
    """The buckets of one graph. Thread-safe.

    graph: as captured. choice: the option. make: compiles a padded graph. reference: runs the graph as it is on the
    host, for the check of a new bucket; None where results are not verified. declared: the shapes that the user
    declared. beside: whether a bucket may be made although a larger one serves. begin: prepares what it is given on
    another thread, soon; None: what a call needs is made in that call. on_ready: called when calls may use another
    bucket; on_begin: when the first one is begun beside the host. fits: whether these may be in memory together; the
    bucket used longest ago goes first.

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
        begin: Callable[[Plannable], object] | None = None,
        on_ready: Callable[[], object] = lambda: None,
        on_begin: Callable[[], object] = lambda: None,
        fits: Callable[[Sequence[Runs]], bool] = lambda inner: True,
    ) -> None:
        self.name = graph.name or "graph"
        self._graph, self._compile, self._events, self._reference = graph, make, events, reference
        self._explicit = dict(choice) if not isinstance(choice, str) else None
        self._declared = _declared(graph, declared)
        self._symbols = {} if self._declared is None else _symbols(self._declared)
        self._beside, self._begin, self._fits = beside, begin, fits
        self._on_ready, self._on_begin = on_ready, on_begin
        self._lock = threading.RLock()
        self._in_call = threading.Lock()  # held while a bucket is made in a call
        self._making: _Making | None = None  # on another thread
        self._attempts, self._due = 0, 0.0
        self._seen: list[dict[str, int]] = []
        self._refused: dict[Hashable, str] = {}
        self._rows: dict[Hashable, Rows | None] = {}  # by family, once they were looked for
        self._most = 0  # elements that a call took
        self._none: set[Hashable] = set()  # sizes for which there is no bucket to be had
        self._bound: dict[Hashable, None] = {}
        self._wasted = 0.0  # seconds of calls, by their share of padding, since a bucket was made
        self._cost = USUAL_SECONDS
        self._host_pace = self._host_least = math.inf  # seconds of the host for an element, and for a call at least
        self.generation = 0  # rises where calls may use another bucket: they look for theirs again
        self.buckets: list[Bucket] = []
        for name in self._explicit or ():
            if name not in self._symbols:
                known = ", ".join(self._symbols) or "no symbols"
                hint = nearest(name, self._symbols)
                raise OptionError(f"buckets: the model has no symbol {name!r}; its inputs have {known}{hint}")

    def find(self, arrays: Sequence[Any], at_once: bool = False) -> Found | None:
        """What answers calls of the sizes of these arguments; a bucket is made where that is worth it. None for an
        exact plan. at_once: make it in this call, and name it although no engine may run it yet."""
        sizes = self._sizes(arrays)
        if sizes is None:
            return None
        with self._lock:
            if sizes not in self._seen:
                self._seen.append(sizes)
                del self._seen[:-256]
            found = self._smallest(sizes, live=not at_once)
            wanted = self._choice(sizes, found)
            if found is not None and found.bucket is not None:
                if wanted is not None:
                    self._start(wanted, arrays)
                if at_once or not self._is_for_host(found.bucket, found.sizes):
                    return found
                found.bucket.seconds *= DOUBT
                return Found(None, sizes)
            if self._begin is not None and not at_once:
                return self._host_meanwhile(sizes, wanted, arrays)
        if wanted is None:
            return None
        with self._in_call:  # another call may have made it
            return self._smallest(sizes, live=False) or self.make(wanted, arrays)

    def _host_meanwhile(
        self, sizes: Mapping[str, int], wanted: _Wanted | None, arrays: Sequence[np.ndarray]
    ) -> Found | None:
        """The host, while a bucket for these sizes is made; None where none will be."""
        if self._smallest(sizes, live=False) is None:
            if wanted is None:
                return None
            if self._is_free:
                self._start(wanted, arrays)
        for b in self.buckets:
            if not b.failed:
                b.inner.retry()
        return Found(None, sizes)

    # --- making one ---------------------------------------------------------------------------------------------------

    def _start(self, wanted: _Wanted, arrays: Sequence[np.ndarray]) -> None:
        """Make a bucket on another thread."""
        self._making = made = _Making(self, wanted, [np.array(a) for a in arrays])
        if self._begin is None:
            _beside(made)
        else:
            self._begin(made)
            if not self.buckets:
                self._on_begin()

    def make(self, wanted: _Wanted, arrays: Sequence[np.ndarray]) -> Found | None:
        """Make a bucket, with its executables or the beginning of their builds. None where there is none to be had."""
        begun = time.monotonic()
        found = self._padded(wanted)
        if found is None:
            return None
        form, rows, of_rows = found
        lower = {
            s: max((b.form.buckets[s] for b in self.buckets if b.form.buckets.get(s, n) < n), default=0)
            for s, n in form.buckets.items()
        }
        inner = self._compile(form.graph)
        bucket = Bucket(form, inner, wanted.fixed, wanted.same, lower, begun=begun, rows=rows, of_rows=of_rows)
        bucket.sample = [stretched(a, s) for a, s in zip(arrays, bucket.shapes(bucket.sizes), strict=True)]
        inner.build(bucket.arguments(bucket.sample, bucket.sizes))
        bucket.is_shared = inner.runs_beside_itself
        with self._lock:
            self._keep(bucket)
        seconds = time.monotonic() - begun
        self._events.emit(
            "padding.bucket", level=logging.INFO, seconds=seconds, model=self._graph.name, bucket=str(bucket)
        )
        if self._begin is None:
            self._note_time(bucket)
        elif bucket.inner.is_live:
            self.became_live(bucket.inner)
        return Found(bucket, wanted.own)

    def _padded(self, wanted: _Wanted) -> _Form | None:
        """The padded form of a bucket; None, which is noted, where there is none that serves what it is wanted for."""
        reason: str | None = None
        first, *rest = wanted.sizes
        shapes = _shapes(self._declared, wanted.fixed, wanted.same)
        rows = self._known_rows(wanted.family, shapes, first)
        if wanted.small is not None and math.prod(wanted.own.values()) < (1 - HULL_WASTE) * _spent(
            first, wanted.own, rows
        ):
            first = wanted.small
        for sizes in (first, *rest):
            try:
                found = self._form(wanted.family, shapes, sizes)
            except PaddingRefused as e:
                reason = str(e)
                continue
            form, rows, of_rows = found
            made = dict(form.buckets) if rows is None else {rows.symbol: of_rows, **form.buckets}
            reason = None if wanted.beside else form.why_not(wanted.own)
            if any(b.family == wanted.family and b.sizes == made for b in self.buckets):
                reason = "there is such a bucket"
            if reason is None:
                return found
            break
        assert reason is not None
        self.give_up(wanted, reason, logging.INFO)
        return None

    def _form(self, family: Hashable, shapes: Sequence[tuple[Dim, ...] | None], sizes: Mapping[str, int]) -> _Form:
        """The padded form for these sizes, of fewer rows where they do not mix. Raises PaddingRefused."""
        known = self._known_rows(family, shapes, sizes)
        if known is not None and known.worth(sizes) < sizes[known.symbol]:
            count = known.worth(sizes)
            others = {s: n for s, n in sizes.items() if s != known.symbol}
            try:
                form, rows = divided(self._graph, shapes, others, known.symbol, count)
            except PaddingRefused:  # of this number of rows
                self._rows[family] = None
            else:
                return form, rows, count
        return pad_graph(self._graph, shapes, sizes), None, 1

    def _known_rows(
        self, family: Hashable, shapes: Sequence[tuple[Dim, ...] | None], sizes: Mapping[str, int]
    ) -> Rows | None:
        """How rows lie in a family, where they do not mix."""
        if family not in self._rows:
            self._rows[family] = self._proven_rows(shapes, sizes)
        return self._rows[family]

    def _proven_rows(self, shapes: Sequence[tuple[Dim, ...] | None], sizes: Mapping[str, int]) -> Rows | None:
        """How rows lie, along the first symbol that counts rows which do not mix."""
        for symbol in sizes if self._explicit is None else ():
            try:
                others = {s: n for s, n in sizes.items() if s != symbol}
                return divided(self._graph, shapes, others, symbol, TRIED_ROWS)[1]
            except PaddingRefused as e:
                self._events.emit("padding.rows", model=self._graph.name, symbol=symbol, reason=str(e))
        return None

    def give_up(self, wanted: _Wanted, reason: str, level: int) -> None:
        """Note that there is no such bucket to be had."""
        with self._lock:
            self._refuse(wanted.family, reason)
            if len(self._none) >= MAX_BOUND:
                self._none.clear()
            self._none.add(wanted.key)
            self._make_none()
        self._events.emit("padding.refused", level=level, model=self._graph.name, reason=reason)

    def _refuse(self, family: Hashable, reason: str) -> None:
        """Pad no calls of a family any more, unless it has a bucket."""
        if not any(b.family == family and not b.failed for b in self.buckets):
            self._refused[family] = reason

    def _keep(self, made: Bucket) -> None:
        self._wasted = 0.0
        self.buckets.append(made)
        while len(self.buckets) > 1 and not self._fits([b.inner for b in self.buckets]):
            oldest = min(self.buckets[:-1], key=lambda b: b.used)
            self.buckets.remove(oldest)
            oldest.failed = "it was dropped, as others took its memory"
            oldest.inner.forget(oldest.failed)
            self._none.clear()

    def became_live(self, inner: Runs) -> None:
        """Note that engines run a bucket: it is checked, then calls may use it."""
        for b in self.buckets:
            if b.inner is not inner:
                continue
            self._note_time(b)
            if self._serves(b):
                self._ready()
            elif self._begin is not None and b.check is None:
                b.check = _Check(self, b)
                self._begin(b.check)

    def _ready(self) -> None:
        self.generation += 1
        self._on_ready()

    def _note_time(self, bucket: Bucket) -> None:
        if bucket.begun is not None:
            self._cost = max(LEAST_SECONDS, time.monotonic() - bucket.begun)
            bucket.begun = None

    def forget_making(self, made: _Making) -> None:
        """Note that what is made on another thread is done, one way or another."""
        with self._lock:
            if self._making is made:
                self._making = None
        if self._begin is None:
            self._ready()

    def postpone(self, made: _Making, first: float) -> None:
        """Make no bucket for some seconds, as that did not come to an end: `first`, and longer after each time."""
        self._attempts += 1
        self._due = retry_time(first, self._attempts)
        self.forget_making(made)

    def finish(self) -> None:
        """Wait for the bucket that is being made, or make it in this thread."""
        made = self._making
        if made is not None:
            made.prepare()

    def _make_none(self) -> None:
        """Forget the padding of calls that should have earned a bucket: there is none to be had."""
        if self._has_earned:
            self._wasted = 0.0

    def wants_another(self, bucket: Bucket, sizes: Mapping[str, int]) -> bool:
        """Whether a call of these sizes should look for its bucket again: engines do not run this one, the host is
        faster, time wasted on padding has earned another, or it is next to nothing but padding."""
        if bucket.failed or not self._serves(bucket) or self._is_for_host(bucket, sizes):
            return True
        if self._is_lost(bucket, sizes):
            return self._is_free and _sizes_key(self._own(bucket, sizes)) not in self._none
        return self._has_earned and not self._good(bucket, sizes) and self._may_make()

    def _serves(self, bucket: Bucket) -> bool:
        """Whether calls may use a bucket. The host would compute the padding as well, so that engines must run it."""
        if self._begin is None:
            return True
        return (bucket.checked or self._reference is None) and bool(bucket.inner.is_live)

    def _is_for_host(self, bucket: Bucket, sizes: Mapping[str, int]) -> bool:
        """Whether the host takes less time for a call of these sizes as it is than the bucket's engines for all of it,
        as far as is known."""
        if self._begin is None or self._host_least == math.inf:
            return False
        elements = math.prod(bucket.fixed.values()) * math.prod(sizes[s] for s in bucket.same.values())
        return bucket.runs(sizes) * bucket.seconds > max(self._host_least, self._host_pace * elements)

    def took_host(self, sizes: Mapping[str, int], seconds: float) -> None:
        """Note what the host took for a call of these sizes of all symbols."""
        self._host_least = min(self._host_least, seconds)
        self._host_pace = min(self._host_pace, seconds / math.prod(sizes.values()))

    @property
    def _has_earned(self) -> bool:
        return self._wasted > EARNED * self._cost

    def known(self, arrays: Sequence[Any]) -> Found | None:
        """The bucket that is there for these arguments, though engines may not run it yet, or None."""
        sizes = self._sizes(arrays)
        return None if sizes is None else self.known_for(sizes)

    def known_for(self, sizes: Mapping[str, int]) -> Found | None:
        """As `known`, for the sizes of all symbols."""
        return self._smallest(sizes, live=False)

    def covers(self, parts: Sequence[Any]) -> bool:
        """Whether a bucket that engines run serves a signature: (dtype, shape) of each argument."""
        sizes = self._sizes_of(parts)
        if sizes is None:
            return False
        served = (b for b in self.buckets if not b.failed and self._serves(b) and b.inner.is_live)
        return any(b.sizes_for(sizes) is not None for b in served)

    def will_cover(self, parts: Sequence[Any]) -> bool:
        """Whether a signature is one of those for which the first bucket is being made."""
        sizes, making = self._sizes_of(parts), self._making
        return sizes is not None and making is not None and making.will_serve(sizes)

    def _sizes_of(self, parts: Sequence[Any]) -> dict[str, int] | None:
        if self._declared is None or not all(type(p) is tuple for p in parts):
            return None
        sizes = self._declared.admits([tuple(s) for _, s in parts])
        return None if sizes is None or sizes.keys() != self._symbols.keys() else sizes

    def saved(self) -> list[dict[str, Any]]:
        """The buckets in use as plain data, for `restore`: of each the sizes, what is fixed, the symbol whose rows do
        not mix, and its inputs' shapes."""
        return [
            {
                "sizes": b.sizes,
                "rows": "" if b.rows is None else b.rows.symbol,
                "fixed": dict(b.fixed),
                "same": dict(b.same),
                "lower": dict(b.lower),
                "shapes": [list(s) for s in b.shapes(b.sizes)],
            }
            for b in self.buckets
            if not b.failed
        ]

    def restore(
        self,
        sizes: Mapping[str, int],
        fixed: Mapping[str, int],
        same: Mapping[str, str],
        lower: Mapping[str, int],
        rows: str,
        arrays: Sequence[np.ndarray],
    ) -> None:
        """Make a bucket that `saved` told, and plan it. arrays: of its full size.

        Raises PaddingRefused, KeyError and ValueError where it does not fit the graph.
        """
        if set(fixed) | set(same) != set(self._symbols) or set(fixed) & set(same):
            raise ValueError("the symbols of a bucket are not those of the graph")
        shapes = _shapes(self._declared, fixed, same)
        if rows:
            others = {s: n for s, n in sizes.items() if s != rows}
            form, proven = divided(self._graph, shapes, others, rows, sizes[rows])
            made = Bucket(form, self._compile(form.graph), dict(fixed), dict(same), dict(lower), rows=proven)
            made.of_rows = sizes[rows]
            self._rows[made.family] = proven
        else:
            form = pad_graph(self._graph, shapes, sizes)
            made = Bucket(form, self._compile(form.graph), dict(fixed), dict(same), dict(lower))
        for at in (sizes, {**sizes, **dict.fromkeys(sizes, 1)}):  # what varied before
            self._seen.append({**fixed, **{s: at[t] for s, t in same.items()}})
        self.buckets.append(made)
        made.inner.build(made.arguments(arrays, sizes))
        made.is_shared = made.inner.runs_beside_itself

    def keep(self, key: Hashable) -> Hashable | None:
        """Note a bound call; returns the key of one that is to be forgotten, or None."""
        with self._lock:
            self._bound[key] = None
            if len(self._bound) <= MAX_BOUND:
                return None
            oldest = next(iter(self._bound))
            del self._bound[oldest]
            return oldest

    def run(self, bucket: Bucket, sizes: Mapping[str, int], arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The results of the graph through a bucket."""
        start = time.perf_counter()
        results = bucket.run(arrays, sizes)
        volume, spent, seconds = math.prod(sizes.values()), bucket.spent(sizes), time.perf_counter() - start
        self._wasted += seconds * (1 - volume / spent)
        self._most = max(self._most, spent)
        bucket.took(seconds / bucket.runs(sizes))
        bucket.used = time.monotonic()
        bucket.calls += 1  # without a lock: statistics
        bucket.valid += volume
        bucket.padded += spent
        if self._reference is not None and not bucket.checked and bucket.check is None and bucket.inner.is_live:
            bucket.sample = bucket.sample or [a.copy() for a in arrays]
            bucket.check = _Check(self, bucket)
            _beside(bucket.check)
        return results

    def text(self, found: Found | None) -> str:
        """The decisions about padding, human-readable, of a signature that `found` answers."""
        if found is None:
            why = "; ".join(dict.fromkeys(self._refused.values()))
            return f"not padded: {why}" if why else "not padded: no size has varied yet"
        bucket, sizes = found
        if bucket is None:
            return "not padded yet: a bucket is being made, the host answers"
        padded = [f"{s} {sizes[s]} to {n}" for s, n in bucket.form.buckets.items() if sizes[s] != n]
        runs = bucket.runs(sizes)
        if bucket.rows is not None and (runs > 1 or bucket.of_rows != sizes[bucket.rows.symbol]):
            name, n = bucket.rows.symbol, bucket.of_rows
            padded.append(f"{name} {sizes[name]} in {runs} run{'s' * (runs > 1)} of {n}, as rows do not mix")
        masks = ", ".join(f"{op} x{n}" for op, n in bucket.form.masks.items()) or "none"
        waste = 1 - math.prod(sizes.values()) / bucket.spent(sizes)
        lines = [f"padded: {', '.join(padded) or 'nothing'} ({waste:.0%} of it padding); masked before: {masks}"]
        for b in self.buckets:
            share = f", {1 - b.valid / b.padded:.0%} padding" if b.calls else ""
            lines.append(f"bucket {b}: {b.calls} calls{share}{'; not used: ' + b.failed if b.failed else ''}")
        return "\n".join(lines)

    # --- choice -------------------------------------------------------------------------------------------------------

    def _sizes(self, arrays: Sequence[Any]) -> dict[str, int] | None:
        if self._declared is None or not all(type(a) is np.ndarray and a.size for a in arrays):
            return None
        sizes = self._declared.admits([a.shape for a in arrays])
        return None if sizes is None or sizes.keys() != self._symbols.keys() else sizes

    def _smallest(self, sizes: Mapping[str, int], live: bool = True) -> Found | None:
        """The smallest bucket for these sizes. live: of those that calls may use now."""
        served = [
            Found(b, s)
            for b in self.buckets
            if not b.failed and (not live or self._serves(b)) and (s := b.sizes_for(sizes)) is not None
        ]
        return min(served, key=_elements, default=None)

    def _good(self, bucket: Bucket, sizes: Mapping[str, int]) -> bool:
        if self._explicit is not None:
            return all(bucket.form.buckets[s] <= _rounded(n, self._explicit.get(s)) for s, n in sizes.items())
        spent = bucket.spent(sizes)
        waste = spent - math.prod(sizes.values())
        if waste <= LITTLE * max(self._most, *(b.volume for b in self.buckets)):
            return True
        return waste / spent <= FINAL_WASTE

    def _is_lost(self, bucket: Bucket, sizes: Mapping[str, int]) -> bool:
        """Whether a call in this bucket is next to nothing but padding."""
        return self._explicit is None and math.prod(sizes.values()) < (1 - MOST_WASTE) * bucket.spent(sizes)

    def _own(self, bucket: Bucket, sizes: Mapping[str, int]) -> dict[str, int]:
        """The sizes of a bucket for a call that is lost in this one."""
        return {s: min(rung(n), bucket.sizes[s]) for s, n in sizes.items()}

    @property
    def _is_free(self) -> bool:
        """Whether a bucket may be made beside others: one after the other."""
        if not self._beside or self._making is not None or time.monotonic() < self._due:
            return False
        return self._begin is None or not any(b.inner.is_pending for b in self.buckets if not b.failed)

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
            ([next(n for s, n in seen.items() if same.get(s) == t) for t in symbols], _elements(served)[0])
            for seen in self._seen[-LOOKED_AT:]
            if all(seen[s] == n for s, n in fixed.items())
            and (served := self._smallest(seen)) is not None
            and served.bucket
        ]
        if not found:
            return None
        rows, now = np.array([r for r, _ in found]), np.array([w for _, w in found], float)
        is_first = len(self.buckets) < FIRST_BUCKETS
        if not is_first and 1 - rows.prod(1).sum() * scale / now.sum() <= FINAL_WASTE:
            return None
        steps = np.unique([[fine(int(n)) for n in r] for r in rows], axis=0)
        candidates = np.unique(np.maximum(steps[:, None], steps[None]).reshape(-1, len(symbols)), axis=0)
        family = _family(fixed, same)
        largest, elements = self._elements(family, symbols, candidates, rows)
        holds = (rows[None] <= largest[:, None]).all(-1)
        gains = (np.maximum(now[None] - elements * scale, 0) * holds).sum(1)
        best = int(gains.argmax())
        least = LITTLE if not is_first else GAIN if self._rows.get(family) is None else ROWS_GAIN
        if gains[best] <= least * max(now.max(), *(b.whole for b in self.buckets)):
            return None
        return {s: int(n) for s, n in zip(symbols, candidates[best], strict=True)}

    def _elements(
        self, family: Hashable, symbols: Sequence[str], candidates: np.ndarray, seen: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The largest sizes that buckets of these sizes serve, and the elements that each computes for each of those
        that were seen: where rows do not mix a bucket has no more of them than a run is worth."""
        known = self._rows.get(family)
        if known is None or known.symbol not in symbols:
            return candidates, np.broadcast_to(candidates.prod(1)[:, None], (len(candidates), len(seen)))
        at = list(symbols).index(known.symbol)
        worth = np.array([known.worth(dict(zip(symbols, map(int, c), strict=True))) for c in candidates])
        is_divided = worth < candidates[:, at]
        largest, full = candidates.copy(), candidates.copy()
        largest[is_divided, at] = np.iinfo(largest.dtype).max
        full[is_divided, at] = worth[is_divided]
        runs = -(-seen[None, :, at] // full[:, None, at])
        return largest, full.prod(1)[:, None] * runs

    def _choice(self, sizes: Mapping[str, int], found: Found | None) -> _Wanted | None:
        """The bucket that is worth making at a call of these sizes, which `found` answers; None for none."""
        if found is None or found.bucket is None:
            return self._for_call(sizes)
        if not self._is_free:
            return None
        is_lost = self._is_lost(found.bucket, found.sizes)
        if not (is_lost or self._may_make()):
            return None
        if self._explicit is not None:
            return None if self._good(found.bucket, found.sizes) else self._for_call(sizes, beside=True)
        wanted = self._own(found.bucket, found.sizes) if is_lost else self._worthwhile(sizes)
        if wanted is None or _sizes_key(wanted) in self._none:
            self._make_none()
            return None
        fixed, same = self._family(sizes)
        limited = {s: self._in_limits(s, n, n) for s, n in wanted.items()}
        own = {same[s]: n for s, n in sizes.items() if s in same}
        return _Wanted((limited, wanted), fixed, same, own, True, _sizes_key(wanted))

    def _for_call(self, sizes: Mapping[str, int], beside: bool = False) -> _Wanted | None:
        """A bucket that holds a call of these sizes, and all that were seen; None where padding is refused."""
        fixed, same = self._family(sizes)
        own = {same[s]: n for s, n in sizes.items() if s in same}
        hull = dict(own)
        for seen in self._seen if self._explicit is None else ():
            for s, n in seen.items():
                if s in same:
                    hull[same[s]] = max(hull[same[s]], n)
        explicit = self._explicit or {}
        rounded = {s: self._in_limits(s, _rounded(n, explicit.get(s)), n) for s, n in hull.items()}
        small = None
        if self._explicit is None and self._may_make():
            small = {s: self._in_limits(s, rung(n), n) for s, n in own.items()}
        wanted = _Wanted((rounded, own), fixed, same, own, beside, _sizes_key(sizes), small)
        return None if not own or wanted.family in self._refused or wanted.key in self._none else wanted

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

    def examine(self, bucket: Bucket) -> None:
        """Compare the bucket's executable with the graph as it is on the host, on the lengths at its edges."""
        try:
            why = self.difference(bucket, bucket.sample)
        except Cancelled:
            raise
        except Exception as e:  # a bucket that cannot be checked is not used
            why = f"its check failed: {type(e).__name__}: {e}"
        bucket.sample, bucket.checked = (), True
        if why:
            bucket.failed = why
            with self._lock:
                self._refuse(bucket.family, why)
            level = logging.WARNING
            self._events.emit("padding.wrong", level=level, model=self._graph.name, bucket=str(bucket), error=why)
        else:
            self._events.emit("padding.checked", model=self._graph.name, bucket=str(bucket))
        self._ready()

    def difference(self, bucket: Bucket, arrays: Sequence[np.ndarray]) -> str:
        """Where the bucket's results differ from the host's on the arguments of a call, stretched to the lengths at the
        bucket's edges: the full bucket, one below, one above the next smaller. "" if they do not."""
        from xrt_core.verify.compare import EXACT, compare, float_dtypes, tolerance_for

        assert self._declared is not None
        assert self._reference is not None
        form = bucket.form
        dtypes = float_dtypes(form.graph)
        for at in edges(bucket.sizes, bucket.lower, "" if bucket.rows is None else bucket.rows.symbol):
            if form.why_not(at) is not None:
                continue
            given = [stretched(a, shape) for a, shape in zip(arrays, bucket.shapes(at), strict=True)]
            start = time.perf_counter()
            found = bucket.run(given, at)
            bucket.took((time.perf_counter() - start) / bucket.runs(at))
            for i, (got, want) in enumerate(zip(found, map(np.asarray, self._reference(given)), strict=True)):
                if got.shape != want.shape or got.dtype != want.dtype:
                    return f"result {i} for {at} is {got.dtype}{list(got.shape)}, not {want.dtype}{list(want.shape)}"
                tolerance = tolerance_for(want.dtype, dtypes, {}) if dtypes else EXACT
                difference = compare(got, want, tolerance)
                if not difference.is_right:
                    return f"result {i} for {at}: {difference.reason}"
        return ""


class _Making:
    """A bucket that is made on another thread, once (`guard.background.Plannable`). is_dropped: never."""

    is_dropped = False

    def __init__(self, buckets: Buckets, wanted: _Wanted, arrays: Sequence[np.ndarray]) -> None:
        self.name = buckets.name
        self._buckets, self._wanted, self._arrays = buckets, wanted, arrays
        self._lock = threading.Lock()
        self._is_done = False

    def prepare(self, inputs: Sequence[Any] | None = None) -> None:
        """Make it."""
        with self._lock:
            if self._is_done:
                return
            self._is_done = True
            try:
                self._buckets.make(self._wanted, self._arrays)
            except Cancelled:
                raise
            except Exception as e:  # nobody would hear of it; the host or a larger bucket serves
                self._buckets.give_up(self._wanted, f"{type(e).__name__}: {e}", logging.WARNING)
            finally:
                self._buckets.forget_making(self)

    def will_serve(self, sizes: Mapping[str, int]) -> bool:
        """Whether it is made for sizes like these: as they vary, they get a bucket as well where this one is too
        small."""
        return all(self._wanted.fixed.get(s, n) == n for s, n in sizes.items())

    def postpone(self, first: float) -> None:
        """Let a later call begin again, after `first` seconds at the first time."""
        self._buckets.postpone(self, first)


class _Check:
    """The check of a new bucket on another thread, once (`guard.background.Plannable`). is_dropped: never."""

    is_dropped = False

    def __init__(self, buckets: Buckets, bucket: Bucket) -> None:
        self.name = buckets.name
        self._buckets, self._bucket = buckets, bucket

    def prepare(self, inputs: Sequence[Any] | None = None) -> None:
        """Check it."""
        with self._bucket.lock:
            if not self._bucket.checked:
                self._buckets.examine(self._bucket)

    def postpone(self, first: float) -> None:
        """Leave the bucket: its check did not come to an end."""
        self._bucket.failed = "its check did not come to an end"


def _beside(plannable: _Making | _Check) -> None:
    """Prepare it on a thread of its own."""

    def prepare() -> None:
        with beside_the_program():
            plannable.prepare()

    threading.Thread(target=prepare, name="xrt-bucket").start()


def _family(fixed: Mapping[str, int], same: Mapping[str, str]) -> Hashable:
    """What buckets have in common of which each may serve another's calls, but for their sizes."""
    return tuple(sorted(fixed.items())), tuple(sorted(same.items()))


def _spent(full: Mapping[str, int], sizes: Mapping[str, int], rows: Rows | None) -> int:
    """The elements that a call of these sizes takes in a bucket that is made for others."""
    whole = math.prod(full.values())
    if rows is None or (worth := rows.worth(full)) >= full[rows.symbol]:
        return whole
    return whole // full[rows.symbol] * worth * -(-sizes[rows.symbol] // worth)


def _elements(found: Found) -> tuple[int, int]:
    """What answers a call is the bucket that computes the fewest elements, then by the fewest runs."""
    bucket, sizes = found
    if bucket is None:
        return 0, 0
    runs = bucket.runs(sizes)
    return runs * bucket.whole, runs


def _sizes_key(sizes: Mapping[str, int]) -> Hashable:
    return tuple(sorted(sizes.items()))


def edges(buckets: Mapping[str, int], lower: Mapping[str, int], rows: str = "") -> list[dict[str, int]]:
    """The sizes on which a bucket is checked: the full bucket, one below, and one above the next smaller one. Of rows
    that do not mix one more than the bucket has, by two runs."""
    return [
        {s: n + (s == rows) for s, n in buckets.items()},
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

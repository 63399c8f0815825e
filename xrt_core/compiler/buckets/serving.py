"""Buckets of one graph: the one that serves a call is found, and those that are worth it are made and kept."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from xrt_core.compiler.buckets.bucket import Bucket, Found, Runs, smallest
from xrt_core.compiler.buckets.check import Check, Reference, next_smaller, stretched, why_wrong
from xrt_core.compiler.buckets.choice import Choice, Wanted
from xrt_core.compiler.buckets.forms import Form, Forms
from xrt_core.compiler.buckets.sizes import BucketSizes, Family, Symbols
from xrt_core.compiler.buckets.times import Times
from xrt_core.engine.boundary import beside_the_program
from xrt_core.events import EventLog
from xrt_core.guard.timeouts import Cancelled
from xrt_core.ir.graph import Graph
from xrt_core.ir.symbols import Declared
from xrt_core.options.guard_settings import retry_time
from xrt_core.passes.padding import PaddingRefused

if TYPE_CHECKING:
    from xrt_core.guard.background import Plannable

DOUBT: Final = 0.95
"""What the time of a bucket is multiplied with whenever the host takes a call for it: in the end it is tried again."""
MAX_BOUND: Final = 1024
"""Signatures whose padded calls stay bound; the oldest goes first."""


class Buckets:
    """The buckets of one graph. Thread-safe.

    graph: as captured. option: "auto", or the sizes of each symbol. make: compiles a padded graph. reference: runs the
    graph as it is on the host, for the check of a new bucket; None where results are not verified. declared: the shapes
    that the user declared. beside: whether a bucket may be made although a larger one serves. begin: prepares what it
    is given on another thread, soon; None: what a call needs is made in that call. on_ready: called when calls may use
    another bucket; on_begin: when the first one is begun beside the host. fits: whether these may be in memory
    together; the bucket used longest ago goes first.

    Raises OptionError where the option names a symbol that no input of the graph has.
    """

    def __init__(
        self,
        graph: Graph,
        option: BucketSizes,
        make: Callable[[Graph], Runs],
        events: EventLog,
        reference: Reference | None = None,
        declared: Declared | None = None,
        beside: bool = True,
        begin: Callable[[Plannable], object] | None = None,
        on_ready: Callable[[], object] = lambda: None,
        on_begin: Callable[[], object] = lambda: None,
        fits: Callable[[Sequence[Runs]], bool] = lambda inner: True,
    ) -> None:
        self.name = graph.name or "graph"
        self._model = graph.name
        self._compile, self._events, self._reference = make, events, reference
        self._beside, self._begin, self._fits = beside, begin, fits
        self._on_ready, self._on_begin = on_ready, on_begin
        self._symbols, self._times = Symbols(graph, declared), Times()
        self._forms = Forms(graph, self._symbols, events, may_divide=isinstance(option, str))
        self._choice = Choice(option, self._symbols, self._times, self._forms.rows)
        self._lock = threading.RLock()
        self._in_call = threading.Lock()  # held while a bucket is made in a call
        self._making: _Making | None = None  # on another thread
        self._attempts, self._due = 0, 0.0
        self._bound: dict[Hashable, None] = {}
        self.generation = 0  # rises where calls may use another bucket: they look for theirs again
        self.buckets: list[Bucket] = []

    # --- serving ------------------------------------------------------------------------------------------------------

    def find(self, arrays: Sequence[Any], at_once: bool = False) -> Found | None:
        """What answers calls of the sizes of these arguments; a bucket is made where that is worth it. None for an
        exact plan. at_once: make it in this call, and name it although no engine may run it yet."""
        sizes = self._symbols.of_arrays(arrays)
        if sizes is None:
            return None
        with self._lock:
            self._choice.note(sizes)
            found = smallest(self.buckets, sizes, ready=not at_once)
            wanted = self._choice.wanted(sizes, found, self.buckets, self._is_free)
            if found is not None and found.bucket is not None:
                if wanted is not None:
                    self._start(wanted, arrays)
                if at_once or not self._times.host_is_faster(found.bucket, found.sizes):
                    return found
                found.bucket.seconds *= DOUBT
                return Found(None, sizes)
            if self._begin is not None and not at_once:
                return self._host_meanwhile(sizes, wanted, arrays)
        if wanted is None:
            return None
        with self._in_call:  # another call may have made it
            return self.known_for(sizes) or self.make(wanted, arrays)

    def _host_meanwhile(
        self, sizes: Mapping[str, int], wanted: Wanted | None, arrays: Sequence[np.ndarray]
    ) -> Found | None:
        """The host, while a bucket for these sizes is made; None where none will be."""
        if self.known_for(sizes) is None:
            if wanted is None:
                return None
            if self._is_free:
                self._start(wanted, arrays)
        for b in self.buckets:
            if not b.failed:
                b.inner.retry()
        return Found(None, sizes)

    def run(self, bucket: Bucket, sizes: Mapping[str, int], arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The results of the graph through a bucket."""
        start = time.perf_counter()
        results = bucket.run(arrays, sizes)
        volume, spent, seconds = math.prod(sizes.values()), bucket.spent(sizes), time.perf_counter() - start
        self._times.took_padded(seconds, volume, spent)
        bucket.took(seconds / bucket.runs(sizes))
        bucket.used = time.monotonic()
        bucket.calls += 1  # without a lock: statistics
        bucket.valid += volume
        bucket.padded += spent
        if bucket.needs_check and not bucket.checked and bucket.check is None and bucket.inner.is_live:
            bucket.sample = bucket.sample or [a.copy() for a in arrays]
            bucket.check = Check(self.name, bucket, self.examine)
            _prepare_beside(bucket.check)
        return results

    def took_host(self, sizes: Mapping[str, int], seconds: float) -> None:
        """Note what the host took for a call of these sizes of all symbols."""
        self._times.took_host(sizes, seconds)

    def wants_another(self, bucket: Bucket, sizes: Mapping[str, int]) -> bool:
        """Whether a call of these sizes should look for its bucket again: engines do not run this one, the host is
        faster, or another is worth making."""
        if bucket.failed or not bucket.is_ready or self._times.host_is_faster(bucket, sizes):
            return True
        return self._is_free and self._choice.wants_another(bucket, sizes, self.buckets)

    def known(self, arrays: Sequence[Any]) -> Found | None:
        """The bucket that is there for these arguments, though engines may not run it yet, or None."""
        sizes = self._symbols.of_arrays(arrays)
        return None if sizes is None else self.known_for(sizes)

    def known_for(self, sizes: Mapping[str, int]) -> Found | None:
        """As `known`, for the sizes of all symbols."""
        return smallest(self.buckets, sizes, ready=False)

    def covers(self, parts: Sequence[Any]) -> bool:
        """Whether a bucket that engines run serves a signature: (dtype, shape) of each argument."""
        sizes = self._symbols.of_signature(parts)
        if sizes is None:
            return False
        served = (b for b in self.buckets if not b.failed and b.is_ready and b.inner.is_live)
        return any(b.sizes_for(sizes) is not None for b in served)

    def will_cover(self, parts: Sequence[Any]) -> bool:
        """Whether a signature is one of those for which the first bucket is being made."""
        sizes, making = self._symbols.of_signature(parts), self._making
        return sizes is not None and making is not None and making.will_serve(sizes)

    def keep(self, key: Hashable) -> Hashable | None:
        """Note a bound call; returns the key of one that is to be forgotten, or None."""
        with self._lock:
            self._bound[key] = None
            if len(self._bound) <= MAX_BOUND:
                return None
            oldest = next(iter(self._bound))
            del self._bound[oldest]
            return oldest

    def text(self, found: Found | None) -> str:
        """The decisions about padding, human-readable, of a signature that `found` answers."""
        if found is None:
            why = "; ".join(dict.fromkeys(self._choice.refused.values()))
            if not why:
                why = "it was compiled before a size had varied" if self.buckets else "no size has varied yet"
            return f"not padded: {why}"
        if found.bucket is None:
            return "not padded yet: a bucket is being made, the host answers"
        lines = [found.bucket.explain(found.sizes)]
        for b in self.buckets:
            share = f", {1 - b.valid / b.padded:.0%} padding" if b.calls else ""
            lines.append(f"bucket {b}: {b.calls} calls{share}{'; not used: ' + b.failed if b.failed else ''}")
        return "\n".join(lines)

    # --- making -------------------------------------------------------------------------------------------------------

    @property
    def _is_free(self) -> bool:
        """Whether a bucket may be made beside others: one after the other."""
        if not self._beside or self._making is not None or time.monotonic() < self._due:
            return False
        return self._begin is None or not any(b.inner.is_pending for b in self.buckets if not b.failed)

    def _start(self, wanted: Wanted, arrays: Sequence[np.ndarray]) -> None:
        """Make a bucket on another thread."""
        self._making = made = _Making(self, wanted, [np.array(a) for a in arrays])
        if self._begin is None:
            _prepare_beside(made)
        else:
            self._begin(made)
            if not self.buckets:
                self._on_begin()

    def make(self, wanted: Wanted, arrays: Sequence[np.ndarray]) -> Found | None:
        """Make a bucket, with its executables or the beginning of their builds. None where there is none to be had."""
        begun = time.monotonic()
        form = self._form(wanted)
        if form is None:
            return None
        bucket = self._unbuilt(form, wanted.family, next_smaller(form.padded.buckets, self.buckets))
        bucket.begun = begun
        bucket.sample = [stretched(a, s) for a, s in zip(arrays, bucket.shapes(bucket.sizes), strict=True)]
        self._build(bucket, bucket.sample)
        with self._lock:
            self._keep(bucket)
        seconds = time.monotonic() - begun
        self._events.emit("padding.bucket", level=logging.INFO, seconds=seconds, model=self._model, bucket=str(bucket))
        if self._begin is None:
            self._note_time(bucket)
        elif bucket.inner.is_live:
            self.became_live(bucket.inner)
        return Found(bucket, wanted.own)

    def _form(self, wanted: Wanted) -> Form | None:
        """The padded form of a bucket; None, which is noted, where there is none that serves what it is wanted for."""
        reason: str | None = None
        for sizes in wanted.tries(self._forms.rows_of(wanted.family, wanted.sizes[0])):
            try:
                form = self._forms.make(wanted.family, sizes)
            except PaddingRefused as e:
                reason = str(e)
                continue
            reason = None if wanted.beside else form.padded.why_not(wanted.own)
            if any(b.family == wanted.family and b.sizes == form.sizes for b in self.buckets):
                reason = "there is such a bucket"
            if reason is None:
                return form
            break
        assert reason is not None
        self.give_up(wanted, reason, logging.INFO)
        return None

    def _unbuilt(self, form: Form, family: Family, lower: Mapping[str, int]) -> Bucket:
        """The bucket of a form, without executables yet."""
        return Bucket(
            form.padded,
            self._compile(form.padded.graph),
            family,
            lower,
            form.rows,
            form.of_rows,
            is_beside=self._begin is not None,
            needs_check=self._reference is not None,
        )

    def _build(self, bucket: Bucket, arrays: Sequence[np.ndarray]) -> None:
        """Build a bucket's executables, or begin to. arrays: of its full size."""
        bucket.inner.build(bucket.arguments(arrays, bucket.sizes))
        bucket.is_shared = bucket.inner.runs_beside_itself

    def give_up(self, wanted: Wanted, reason: str, level: int) -> None:
        """Note that there is no such bucket to be had."""
        with self._lock:
            self._choice.give_up(wanted, reason, self.buckets)
        self._events.emit("padding.refused", level=level, model=self._model, reason=reason)

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

    # --- keeping ------------------------------------------------------------------------------------------------------

    def _keep(self, made: Bucket) -> None:
        self._times.wasted = 0.0
        self.buckets.append(made)
        while len(self.buckets) > 1 and not self._fits([b.inner for b in self.buckets]):
            oldest = min(self.buckets[:-1], key=lambda b: b.used)
            self.buckets.remove(oldest)
            oldest.failed = "it was dropped, as others took its memory"
            oldest.inner.forget(oldest.failed)
            self._choice.try_again()

    def became_live(self, inner: Runs) -> None:
        """Note that engines run a bucket: it is checked, then calls may use it."""
        for b in self.buckets:
            if b.inner is not inner:
                continue
            self._note_time(b)
            if b.is_ready:
                self._ready()
            elif self._begin is not None and b.needs_check and b.check is None:
                b.check = Check(self.name, b, self.examine)
                self._begin(b.check)

    def examine(self, bucket: Bucket) -> None:
        """Compare the bucket's executable with the graph as it is on the host, on the lengths at its edges."""
        why = why_wrong(bucket, self._reference)
        bucket.sample, bucket.checked = (), True
        if why:
            bucket.failed = why
            with self._lock:
                self._choice.refuse(bucket.family, why, self.buckets)
            level = logging.WARNING
            self._events.emit("padding.wrong", level=level, model=self._model, bucket=str(bucket), error=why)
        else:
            self._events.emit("padding.checked", model=self._model, bucket=str(bucket))
        self._ready()

    def _ready(self) -> None:
        self.generation += 1
        self._on_ready()

    def _note_time(self, bucket: Bucket) -> None:
        if bucket.begun is not None:
            self._times.took_compilation(time.monotonic() - bucket.begun)
            bucket.begun = None

    def saved(self) -> list[dict[str, Any]]:
        """The buckets in use as plain data, for `restore`."""
        return [b.saved() for b in self.buckets if not b.failed]

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
        if set(fixed) | set(same) != set(self._symbols.is_named) or set(fixed) & set(same):
            raise ValueError("the symbols of a bucket are not those of the graph")
        family = Family(dict(fixed), dict(same))
        made = self._unbuilt(self._forms.make_again(family, sizes, rows), family, dict(lower))
        self._choice.note_saved(family, sizes)
        self.buckets.append(made)
        self._build(made, arrays)


class _Making:
    """A bucket that is made on another thread, once (`guard.background.Plannable`). is_dropped: never."""

    is_dropped = False

    def __init__(self, buckets: Buckets, wanted: Wanted, arrays: Sequence[np.ndarray]) -> None:
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
        return self._wanted.family.admits(sizes)

    def postpone(self, first: float) -> None:
        """Let a later call begin again, after `first` seconds at the first time."""
        self._buckets.postpone(self, first)


def _prepare_beside(plannable: _Making | Check) -> None:
    """Prepare it on a thread of its own."""

    def prepare() -> None:
        with beside_the_program():
            plannable.prepare()

    threading.Thread(target=prepare, name="xrt-bucket").start()

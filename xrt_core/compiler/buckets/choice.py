"""The choice of buckets: the sizes that were seen, and by them the bucket that is worth making for a call."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from xrt_core.compiler.buckets.bucket import Bucket, Found, smallest
from xrt_core.compiler.buckets.sizes import BucketSizes, Family, Symbols, fine, rounded, rung
from xrt_core.compiler.buckets.times import Times
from xrt_core.errors import OptionError, nearest
from xrt_core.passes.padding.rows import Rows

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
LITTLE: Final = 0.2
"""The padding, as a share of the largest bucket, that is never worth a compilation."""
FIRST_BUCKETS: Final = 10
"""Buckets that a graph may have from the start. Each further one is earned, by time spent on padding."""
LOOKED_AT: Final = 64
"""Sizes, the last, by which a further bucket is chosen."""
MAX_SEEN: Final = 256
"""Sizes, the last, by which it is told what varies."""
MAX_GIVEN_UP: Final = 1024
"""Sizes for which there is no bucket to be had, before all of them are tried again."""


class Wanted(NamedTuple):
    """A bucket that is to be made. sizes: of its symbols; the later ones where the model ends before the first. family:
    as of `Bucket`. own: the sizes of the call that wants it, of the bucket's symbols. beside: whether another serves
    that call. key: what is noted where there is none to be had. small: what takes the place of the first sizes where
    more than three quarters of the call in these would be padding; None where nothing does."""

    sizes: Sequence[Mapping[str, int]]
    family: Family
    own: Mapping[str, int]
    beside: bool
    key: Hashable
    small: Mapping[str, int] | None = None

    def tries(self, rows: Rows | None) -> list[Mapping[str, int]]:
        """The sizes to make it of, the later ones where the earlier cannot be. rows: how those of its family lie."""
        first, *rest = self.sizes
        if self.small is not None and math.prod(self.own.values()) < (1 - HULL_WASTE) * _spent(first, self.own, rows):
            first = self.small
        return [first, *rest]


class Choice:
    """Which bucket is worth making at a call. It has no lock: `Buckets` holds its own where it calls what changes this.

    option: "auto", or the sizes of each symbol. times: what calls took. rows: how rows lie where they do not mix, by
    family, as far as that is known. seen: the sizes of all symbols in different calls, the last ones. refused: why no
    bucket is made of a family.

    Raises OptionError where the option names a symbol that no input of the graph has.
    """

    def __init__(self, option: BucketSizes, symbols: Symbols, times: Times, rows: Mapping[Family, Rows | None]) -> None:
        self._explicit = None if isinstance(option, str) else dict(option)
        self._symbols, self._times, self._rows = symbols, times, rows
        self.seen: list[Mapping[str, int]] = []
        self.refused: dict[Family, str] = {}
        self._given_up: set[Hashable] = set()  # sizes for which there is no bucket to be had
        for name in self._explicit or ():
            if name not in symbols.is_named:
                known = ", ".join(symbols.is_named) or "no symbols"
                hint = nearest(name, symbols.is_named)
                raise OptionError(f"buckets: the model has no symbol {name!r}; its inputs have {known}{hint}")
        self._same: Mapping[str, str] = self._varied()  # of `Family`, for the sizes that were seen

    # --- what is known ------------------------------------------------------------------------------------------------

    def note(self, sizes: Mapping[str, int]) -> None:
        """Note a call of these sizes of all symbols."""
        if sizes not in self.seen:
            self.seen.append(sizes)
            del self.seen[:-MAX_SEEN]
            self._same = self._varied()

    def note_saved(self, family: Family, sizes: Mapping[str, int]) -> None:
        """Note what varied before a bucket of these sizes was saved."""
        self.note(family.all_sizes(sizes))
        self.note(family.all_sizes(dict.fromkeys(sizes, 1)))

    def refuse(self, family: Family, reason: str, buckets: Collection[Bucket]) -> None:
        """Pad no calls of a family any more, unless it has a bucket."""
        if not any(b.family == family and not b.failed for b in buckets):
            self.refused[family] = reason

    def give_up(self, wanted: Wanted, reason: str, buckets: Collection[Bucket]) -> None:
        """Note that there is no such bucket to be had."""
        self.refuse(wanted.family, reason, buckets)
        if len(self._given_up) >= MAX_GIVEN_UP:
            self._given_up.clear()
        self._given_up.add(wanted.key)
        self._forget_earned()

    def try_again(self) -> None:
        """Forget for which sizes there was no bucket to be had: there may be one now."""
        self._given_up.clear()

    def _forget_earned(self) -> None:
        """Forget the padding of calls that should have earned a bucket: there is none to be had."""
        if self._times.has_earned:
            self._times.wasted = 0.0

    # --- what is worth it ---------------------------------------------------------------------------------------------

    def wanted(
        self, sizes: Mapping[str, int], found: Found | None, buckets: Collection[Bucket], is_free: bool
    ) -> Wanted | None:
        """The bucket that is worth making at a call of these sizes, which `found` answers; None for none. is_free:
        whether one may be made beside others."""
        if found is None or found.bucket is None:
            return self._for_call(sizes, or_small=is_free and self._may_have_another(buckets))
        if not is_free:
            return None
        is_lost = self._is_lost(found.bucket, found.sizes)
        if not (is_lost or self._may_have_another(buckets)):
            return None
        if self._explicit is not None:
            is_good = self._is_good(found.bucket, found.sizes, buckets)
            return None if is_good else self._for_call(sizes, beside=True)
        family = self._family(sizes)
        full = _about(found.bucket, family, sizes) if is_lost else self._worthwhile(family, buckets)
        if full is None or _key(full) in self._given_up:
            self._forget_earned()
            return None
        limited = {s: self._symbols.in_limits(s, n, n) for s, n in full.items()}
        return Wanted((limited, full), family, family.own(sizes), True, _key(full))

    def wants_another(self, bucket: Bucket, sizes: Mapping[str, int], buckets: Collection[Bucket]) -> bool:
        """Whether a call of these sizes of a bucket's symbols should look for its bucket again: time wasted on padding
        has earned another, or it is next to nothing but padding."""
        if self._is_lost(bucket, sizes):
            every = bucket.family.all_sizes(sizes)
            return _key(_about(bucket, self._family(every), every)) not in self._given_up
        return self._times.has_earned and not self._is_good(bucket, sizes, buckets)

    def _for_call(self, sizes: Mapping[str, int], beside: bool = False, or_small: bool = False) -> Wanted | None:
        """A bucket that holds a call of these sizes, and all that were seen; None where padding is refused. or_small:
        it may be of the call's own size."""
        family = self._family(sizes)
        own, explicit = family.own(sizes), self._explicit or {}
        hull = dict(own)
        for seen in self.seen if self._explicit is None else ():
            for s, n in family.own(seen).items():
                hull[s] = max(hull[s], n)
        full = {s: self._symbols.in_limits(s, rounded(n, explicit.get(s)), n) for s, n in hull.items()}
        small = None
        if self._explicit is None and or_small:
            small = {s: self._symbols.in_limits(s, rung(n), n) for s, n in own.items()}
        wanted = Wanted((full, own), family, own, beside, _key(sizes), small)
        return None if not own or family in self.refused or wanted.key in self._given_up else wanted

    def _family(self, sizes: Mapping[str, int]) -> Family:
        """That of calls of these sizes of all symbols."""
        same = self._same
        return Family({s: n for s, n in sizes.items() if s not in same}, same)

    def _varied(self) -> dict[str, str]:
        """Which symbols varied: those that the option names, or that had several sizes so far. Of those that were
        always equal, the first stands for all: of dimensions without a name, and of names along the same axis of
        different inputs, as exporters give each input's batch one of its own."""
        same: dict[str, str] = {}
        first: dict[Hashable, str] = {}
        for name, is_named in self._symbols.is_named.items():
            history = tuple(s[name] for s in self.seen)
            if not (name in self._explicit if self._explicit is not None else len(set(history)) > 1):
                continue
            if is_named and self._explicit is not None:  # its sizes are its own
                same[name] = name
                continue
            alike = history, frozenset(self._symbols.axes[name]) if is_named else None
            same[name] = first.setdefault(alike, name)
        return same

    def _is_lost(self, bucket: Bucket, sizes: Mapping[str, int]) -> bool:
        """Whether a call in this bucket is next to nothing but padding."""
        return self._explicit is None and math.prod(sizes.values()) < (1 - MOST_WASTE) * bucket.spent(sizes)

    def _is_good(self, bucket: Bucket, sizes: Mapping[str, int], buckets: Collection[Bucket]) -> bool:
        """Whether a call in this bucket has so little padding that no smaller one is worth making for it."""
        if self._explicit is not None:
            return all(bucket.form.buckets[s] <= rounded(n, self._explicit.get(s)) for s, n in sizes.items())
        spent = bucket.spent(sizes)
        waste = spent - math.prod(sizes.values())
        if waste <= LITTLE * max(self._times.most, *(b.volume for b in buckets)):
            return True
        return waste / spent <= FINAL_WASTE

    def _may_have_another(self, buckets: Collection[Bucket]) -> bool:
        """Whether the graph may have one bucket more."""
        return self._explicit is not None or len(buckets) < FIRST_BUCKETS or self._times.has_earned

    def _worthwhile(self, family: Family, buckets: Collection[Bucket]) -> dict[str, int] | None:
        """The sizes of the bucket that would save the most padding of all that was seen; None where that is too little.

        Candidates are what holds two of the sizes that were seen, in steps of an eighth of an octave.
        """
        symbols = sorted(set(family.same.values()))
        if not symbols:
            return None
        served = [
            (family.own(sizes), found.bucket.elements(found.sizes))
            for sizes in self.seen[-LOOKED_AT:]
            if family.admits(sizes) and (found := smallest(buckets, sizes)) is not None and found.bucket
        ]
        if not served:
            return None
        scale = math.prod(family.fixed.values())
        seen = np.array([[own[s] for s in symbols] for own, _ in served])
        now = np.array([elements for _, elements in served], float)
        is_first = len(buckets) < FIRST_BUCKETS
        if not is_first and 1 - seen.prod(1).sum() * scale / now.sum() <= FINAL_WASTE:
            return None
        steps = np.unique([[fine(int(n)) for n in row] for row in seen], axis=0)
        candidates = np.unique(np.maximum(steps[:, None], steps[None]).reshape(-1, len(symbols)), axis=0)
        largest, elements = self._elements(family, symbols, candidates, seen)
        holds = (seen[None] <= largest[:, None]).all(-1)
        gains = (np.maximum(now[None] - elements * scale, 0) * holds).sum(1)
        best = int(gains.argmax())
        least = LITTLE if not is_first else GAIN if self._rows.get(family) is None else ROWS_GAIN
        if gains[best] <= least * max(now.max(), *(b.whole for b in buckets)):
            return None
        return {s: int(n) for s, n in zip(symbols, candidates[best], strict=True)}

    def _elements(
        self, family: Family, symbols: Sequence[str], candidates: np.ndarray, seen: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The largest sizes that buckets of these sizes serve, and the elements that each computes for each of those
        that were seen: where rows do not mix a bucket has no more of them than a run is worth."""
        rows = self._rows.get(family)
        if rows is None or rows.symbol not in symbols:
            return candidates, np.broadcast_to(candidates.prod(1)[:, None], (len(candidates), len(seen)))
        at = list(symbols).index(rows.symbol)
        worth = np.array([rows.worth(dict(zip(symbols, map(int, c), strict=True))) for c in candidates])
        is_divided = worth < candidates[:, at]
        largest, full = candidates.copy(), candidates.copy()
        largest[is_divided, at] = np.iinfo(largest.dtype).max
        full[is_divided, at] = worth[is_divided]
        runs = -(-seen[None, :, at] // full[:, None, at])
        return largest, full.prod(1)[:, None] * runs


def _about(bucket: Bucket, family: Family, sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes of a bucket for a call of these sizes of all symbols that is lost in this one, which may be of a family
    in which less varied, or have but a part of the rows."""
    return {s: max(n, min(rung(n), bucket.form.buckets.get(s, rung(n)))) for s, n in family.own(sizes).items()}


def _spent(full: Mapping[str, int], sizes: Mapping[str, int], rows: Rows | None) -> int:
    """The elements that a call of these sizes takes in a bucket that is made for others."""
    whole = math.prod(full.values())
    if rows is None or (worth := rows.worth(full)) >= full[rows.symbol]:
        return whole
    return whole // full[rows.symbol] * worth * -(-sizes[rows.symbol] // worth)


def _key(sizes: Mapping[str, int]) -> Hashable:
    return tuple(sorted(sizes.items()))

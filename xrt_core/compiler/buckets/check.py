"""The check of a new bucket: its results at its edges against those of the graph as it is on the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from xrt_core.compiler.buckets.bucket import Bucket
from xrt_core.guard.timeouts import Cancelled

Reference = Callable[[Sequence[np.ndarray]], Sequence[Any]]
"""Runs the graph as it is on the host."""


class Check:
    """The check of a new bucket on another thread, once (`guard.background.Plannable`). is_dropped: never."""

    is_dropped = False

    def __init__(self, name: str, bucket: Bucket, examine: Callable[[Bucket], None]) -> None:
        self.name = name
        self._bucket, self._examine = bucket, examine

    def prepare(self, inputs: Sequence[Any] | None = None) -> None:
        """Check it."""
        with self._bucket.lock:
            if not self._bucket.checked:
                self._examine(self._bucket)

    def postpone(self, first: float) -> None:
        """Leave the bucket: its check did not come to an end."""
        self._bucket.failed = "its check did not come to an end"


def why_wrong(bucket: Bucket, reference: Reference | None) -> str:
    """Why a bucket is not to be used, by its results on its sample; "" where it may be."""
    try:
        assert reference is not None
        return difference(bucket, bucket.sample, reference)
    except Cancelled:
        raise
    except Exception as e:  # a bucket that cannot be checked is not used
        return f"its check failed: {type(e).__name__}: {e}"


def difference(bucket: Bucket, arrays: Sequence[np.ndarray], reference: Reference) -> str:
    """Where the bucket's results differ from the host's on the arguments of a call, stretched to the lengths at the
    bucket's edges: the full bucket, one below, one above the next smaller. "" if they do not."""
    from xrt_core.verify.compare import EXACT, compare, float_dtypes, tolerance_for

    form = bucket.form
    dtypes = float_dtypes(form.graph)
    for at in edges(bucket.sizes, bucket.lower, "" if bucket.rows is None else bucket.rows.symbol):
        if form.why_not(at) is not None:
            continue
        given = [stretched(a, shape) for a, shape in zip(arrays, bucket.shapes(at), strict=True)]
        start = time.perf_counter()
        found = bucket.run(given, at)
        bucket.took((time.perf_counter() - start) / bucket.runs(at))
        for i, (got, want) in enumerate(zip(found, map(np.asarray, reference(given)), strict=True)):
            if got.shape != want.shape or got.dtype != want.dtype:
                return f"result {i} for {at} is {got.dtype}{list(got.shape)}, not {want.dtype}{list(want.shape)}"
            tolerance = tolerance_for(want.dtype, dtypes, {}) if dtypes else EXACT
            found_difference = compare(got, want, tolerance)
            if not found_difference.is_right:
                return f"result {i} for {at}: {found_difference.reason}"
    return ""


def edges(buckets: Mapping[str, int], lower: Mapping[str, int], rows: str = "") -> list[dict[str, int]]:
    """The sizes on which a bucket is checked: the full bucket, one below, and one above the next smaller one. Of rows
    that do not mix one more than the bucket has, by two runs."""
    return [
        {s: n + (s == rows) for s, n in buckets.items()},
        {s: max(1, n - 1) for s, n in buckets.items()},
        {s: min(n, lower.get(s, 0) + 1) for s, n in buckets.items()},
    ]


def next_smaller(sizes: Mapping[str, int], buckets: Iterable[Bucket]) -> dict[str, int]:
    """The next smaller size of each symbol that one of these buckets has; 0 for none."""
    there = [b.form.buckets for b in buckets]
    return {s: max((t[s] for t in there if t.get(s, n) < n), default=0) for s, n in sizes.items()}


def stretched(array: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """The array cut or repeated along its axes to a shape: real contents at another size."""
    for axis, n in enumerate(shape):
        array = np.take(array, np.arange(n) % array.shape[axis], axis=axis)
    return np.ascontiguousarray(array)

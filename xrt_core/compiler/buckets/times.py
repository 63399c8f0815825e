"""Times: what calls and compilations took, by which the host is chosen for a call, and a further bucket is earned."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from xrt_core.compiler.buckets.bucket import Bucket

EARNED: Final = 2.0
"""Of how many compilations: a call's share of padding is more than what a smaller bucket saves."""
LEAST_SECONDS: Final = 1.0
"""What a compilation costs at least: an executable takes memory as well."""
USUAL_SECONDS: Final = 5.0
"""Of a compilation, before one was measured."""


class Times:
    """What calls and compilations of one graph took, so far.

    wasted: seconds of calls, by their share of padding, since a bucket was made. host_pace, host_least: seconds of the
    host for an element, and for a call, at least. most: elements that a call took in a bucket.
    """

    def __init__(self) -> None:
        self.wasted = 0.0
        self.host_pace = self.host_least = math.inf
        self.most = 0
        self._compilation = USUAL_SECONDS

    def took_padded(self, seconds: float, volume: int, spent: int) -> None:
        """Note a call of so many elements, for which a bucket computed `spent`."""
        self.wasted += seconds * (1 - volume / spent)
        self.most = max(self.most, spent)

    def took_host(self, sizes: Mapping[str, int], seconds: float) -> None:
        """Note what the host took for a call of these sizes of all symbols."""
        self.host_least = min(self.host_least, seconds)
        self.host_pace = min(self.host_pace, seconds / math.prod(sizes.values()))

    def took_compilation(self, seconds: float) -> None:
        """Note what a bucket took until its executables were there."""
        self._compilation = max(LEAST_SECONDS, seconds)

    @property
    def has_earned(self) -> bool:
        """Whether as much time was spent on padding as a further bucket must save."""
        return self.wasted > EARNED * self._compilation

    def host_is_faster(self, bucket: Bucket, sizes: Mapping[str, int]) -> bool:
        """Whether the host takes less time for a call of these sizes as it is than the bucket's engines for all of it,
        as far as is known."""
        if self.host_least == math.inf:
            return False
        elements = math.prod(bucket.family.all_sizes(sizes).values())
        return bucket.runs(sizes) * bucket.seconds > max(self.host_least, self.host_pace * elements)

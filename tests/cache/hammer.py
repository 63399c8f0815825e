"""A process that reads and writes one cache as fast as it can: `python hammer.py FOLDER SEED SECONDS`.

It prints how often it hit and ends with an error if it ever gets other bytes than were stored for a key.
"""

from __future__ import annotations

import hashlib
import pathlib
import random
import sys
import time

from xrt_core.cache.disk import DiskCache, Hit
from xrt_core.cache.key import CacheKey

KEYS = 12
LIMIT = 400_000


def blob_of(number: int) -> bytes:
    """What belongs to a key: from a few to 60 000 bytes."""
    return hashlib.shake_128(str(number).encode()).digest(5_000 * number + 10)


def main(folder: str, seed: int, seconds: float) -> None:
    """Hammer the cache of `folder`."""
    rng = random.Random(seed)
    disk = DiskCache(pathlib.Path(folder), LIMIT)
    hits = stores = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        number = rng.randrange(KEYS)
        key, text = CacheKey((("number", str(number)),)), f"function {number}".encode()
        found = disk.read(key, text)
        if isinstance(found, Hit):
            assert found.blob == blob_of(number), f"wrong bytes for {number}"
            hits += 1
            if rng.random() < 0.9:
                continue
        else:
            assert not found.stored, found.reason  # no writer, killed or not, leaves a damaged entry
        with disk.making(key, 1.0):
            reason = disk.write(key, {}, text, blob_of(number))
            assert not reason, reason
            stores += 1
    print(hits, stores)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))

"""The one hash of XRT: BLAKE3, for weights, functions, keys and stored blobs.

Keys of caches are digests of contents, where a collision would be a wrong result: BLAKE3 is cryptographic, and on one
thread several times as fast as BLAKE2b or SHA-256. Source: https://github.com/BLAKE3-team/BLAKE3-specs.
"""

from __future__ import annotations

from typing import Final

SIZE: Final = 20
"""Bytes of a digest: the chance of two equal ones among 2**64 contents is below 2**-32."""


def digest(*contents: bytes | memoryview) -> str:
    """Hex digest of the contents, one behind another. Views must be C-contiguous."""
    from blake3 import blake3

    h = blake3()
    for content in contents:
        h.update(content)
    return h.hexdigest(length=SIZE)

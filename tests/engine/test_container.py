"""Containers: what is written comes back, and what is damaged, foreign or of another version is an error."""

from __future__ import annotations

import io
import json
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xrt_core.engine.serialization import Kind, Writer, open_bytes, open_file, pack_container
from xrt_core.errors import CacheError
from xrt_core.ir.function import SIZE, digest

KIND = Kind(b"XRTTESTS", 3, "a test", CacheError)
WHOLE = pack_container(KIND, {"n": [1, 2]}, (b"one", b"", b"three" * 30))


def with_manifest(text: bytes) -> bytes:
    """A container with this manifest, whatever it says, and its digest."""
    head = struct.pack(f"<8sIQQ{SIZE}s", KIND.magic, KIND.version, 64, len(text), bytes.fromhex(digest(text)))
    return head.ljust(64, b"\0") + text


@pytest.mark.slow
@given(
    st.dictionaries(st.text(max_size=4), st.integers() | st.text() | st.none()),
    st.lists(st.binary(max_size=100), max_size=4),
    st.booleans(),
)
def test_what_is_packed_comes_back(header: dict[str, object], blobs: list[bytes], in_file: bool) -> None:
    """Header and blobs, from memory and from a file; each blob lies at a multiple of 64 bytes."""
    whole = pack_container(KIND, header, blobs)
    found = open_file(KIND, "it", io.BytesIO(whole)) if in_file else open_bytes(KIND, "it", whole)

    assert found.header(dict[str, Any]) == header
    assert [bytes(found.blob(i)) for i in range(len(found.blobs))] == blobs
    assert all(b.offset % 64 == 0 for b in found.blobs)
    assert found.size == len(whole)


def test_what_others_write_between_stays() -> None:
    """Bytes that the owner wrote into the file by itself lie where it put them, and blobs follow."""
    file = io.BytesIO()
    writer = Writer(file, KIND)
    at = file.tell()
    file.write(b"weights")
    assert writer.add(b"first") == 0
    writer.finish({})
    whole = file.getvalue()

    assert whole[at : at + 7] == b"weights"
    assert bytes(open_bytes(KIND, "it", whole).blob(0)) == b"first"


def test_blobs_in_memory_are_views() -> None:
    """An array in a container is used where it lies."""
    array = np.arange(1000, dtype=np.float32)
    whole = pack_container(KIND, {}, (array.view(np.uint8).data,))
    found = np.frombuffer(open_bytes(KIND, "it", whole).blob(0), np.float32)

    np.testing.assert_array_equal(found, array)
    assert np.shares_memory(found, np.frombuffer(whole, np.uint8))


def test_every_flipped_bit_but_those_of_padding_is_an_error() -> None:
    """In the head, in any blob or in the manifest."""
    manifest = WHOLE.rindex(b'{"header"')
    blobs = [at for b in open_bytes(KIND, "it", WHOLE).blobs for at in range(b.offset, b.offset + b.size)]
    for at in (*range(28 + SIZE), *blobs, *range(manifest, len(WHOLE))):
        damaged = bytearray(WHOLE)
        damaged[at] ^= 1
        with pytest.raises(CacheError):
            read_all(bytes(damaged))


@pytest.mark.parametrize("size", range(len(WHOLE)))
def test_what_is_cut_is_an_error(size: int) -> None:
    """At every byte."""
    with pytest.raises(CacheError, match=r"^it is (empty|not a test|damaged or cut off)"):
        open_bytes(KIND, "it", WHOLE[:size])


@pytest.mark.parametrize(
    ("whole", "reason"),
    [
        (b"XRTOTHER" + WHOLE[8:], "it is not a test"),
        (WHOLE[:8] + struct.pack("<I", 9) + WHOLE[12:], "it has layout 9, this version of XRT reads 3"),
        (WHOLE + b"x", f"it has {len(WHOLE) + 1} bytes, its manifest describes {len(WHOLE)}"),
        (WHOLE[:20] + struct.pack("<Q", 1 << 60) + WHOLE[28:], "claims a manifest of"),
        (with_manifest(b"[1]"), "it: its manifest is damaged: Expected `object`, got `array`"),
        (with_manifest(b'{"header": {}}'), "missing required field `blobs`"),
        (
            with_manifest(b'{"header": {}, "blobs": [[1e999, 1, ""]]}'),
            r"Number out of range - at `\$.blobs\[0\]\[0\]",
        ),
        (with_manifest(b'{"header": {}, "blobs": [[0, -1, ""]]}'), "Expected `int` >= 0"),
        (with_manifest(b'{"header": {}, "blobs": [[0, 65, ""]]}'), "blob 0 does not end before the manifest"),
        (with_manifest(b'{"header": {"a": ' + b"[" * 100_000), "nested more than 64 levels deep"),
        (with_manifest(b"\xff"), "its manifest is damaged"),
    ],
    ids=["foreign", "version", "longer", "long", "list", "no blobs", "inf", "negative", "beyond", "deep", "bytes"],
)
def test_the_reason_is_said(whole: bytes, reason: str) -> None:
    """With the subject that the reader named; never another exception."""
    with pytest.raises(CacheError, match=reason):
        open_bytes(KIND, "it", whole)


def test_a_blob_that_is_not_there() -> None:
    """Says how many there are."""
    with pytest.raises(CacheError, match="it holds 3 blobs, not blob 3"):
        open_bytes(KIND, "it", WHOLE).blob(3)


def test_the_manifest_is_json() -> None:
    """Other programs can read what a container holds."""
    manifest = json.loads(WHOLE[WHOLE.rindex(b'{"header"') :])
    assert manifest["header"] == {"n": [1, 2]}
    assert [size for _, size, _ in manifest["blobs"]] == [3, 0, 150]


def read_all(whole: bytes) -> list[bytes]:
    """Every blob."""
    found = open_bytes(KIND, "it", whole)
    return [bytes(found.blob(i)) for i in range(len(found.blobs))]

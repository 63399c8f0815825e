"""Long lists of an attribute out of the protobuf wire format and into it, by whole arrays.

Other tools write a field for each element. Here they are written packed, which every parser of protobufs reads as well,
and faster.

Source: `AttributeProto` in onnx.proto (floats = 7, ints = 8, strings = 9), and protobuf's "Encoding" page.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from xrt_core.ir.long_list import LONG, MOST_TEXTS, LongList, narrow, text_of

_FLOAT: Final = 7 << 3 | 5
_INT: Final = 8 << 3
_TEXT: Final = 9 << 3 | 2
_PART: Final = 1 << 17
"""Bytes that are read at a time: what is made of them stays in a core's cache."""
_LONGEST: Final = 10  # bytes of a varint


def read_list(number: int, view: memoryview) -> tuple[LongList, int] | None:
    """Return the list of field `number` that `view` begins with, and its bytes.

    None where there are fewer than `LONG` elements, and for what is left to protobuf: integers of more than 10 bytes,
    many distinct texts or long ones, and texts that hold the tag of their field.
    """
    raw = np.frombuffer(view, np.uint8)
    if number in (7, 8) and raw[0] == number << 3 | 2:
        return _unpacked(number, raw)
    if number == 7:
        floats = _floats(raw)
        return None if len(floats) < LONG else (LongList("floats", floats), 5 * len(floats))
    if number == 8:
        ints, size = _ints(raw)
        return None if len(ints) < LONG else (LongList("ints", ints), size)
    found = _texts(raw, view)
    return None if found is None else (found, len(found.wire or b""))


def _unpacked(number: int, raw: np.ndarray) -> tuple[LongList, int] | None:
    """The one field that holds a whole list, and its bytes."""
    head = raw[1 : 1 + _LONGEST]
    last = int((head < 0x80).argmax())
    if head[last] >= 0x80:
        return None
    start = last + 2
    size = sum((int(b) & 0x7F) << (7 * k) for k, b in enumerate(head[: last + 1].tolist()))
    content = raw[start : start + size]
    if len(content) < size:
        return None
    if number == 7:
        if size % 4 or size < 4 * LONG:
            return None
        return LongList("floats", content.copy().view("<f4")), start + size
    parts, pos = [np.zeros(0, np.int8)], 0
    while pos < size:
        part = content[pos : pos + _PART]
        ends = np.flatnonzero(part < 0x80)
        starts = np.concatenate([[0], ends[:-1] + 1])
        if not len(ends) or int((ends - starts).max()) >= _LONGEST:
            return None
        parts.append(narrow(_decoded(part, starts, ends - starts + 1)))
        pos += int(ends[-1]) + 1
    ints = np.concatenate(parts)
    return None if len(ints) < LONG else (LongList("ints", ints), start + size)


def packed(values: LongList) -> tuple[bytes | memoryview, ...] | None:
    """The field or fields of a list, in pieces; None for texts that were read from no file."""
    if values.kind == "strings":
        return None if values.wire is None else (values.wire,)
    if values.kind == "floats":
        content = values.array.astype("<f4", copy=False).data.cast("B")
        return field_head(7, len(content)), content
    content = _varints(values.array).data.cast("B")
    return field_head(8, len(content)), content


def _varints(values: np.ndarray) -> np.ndarray:
    """Integers as varints of one length, [elements, bytes]: zeros above the highest bit do not count."""
    size = _LONGEST
    if values.min() >= 0:
        size = -(-max(int(values.max()).bit_length(), 1) // 7)
    if size == 1:
        return values.view(np.uint8)
    found = np.empty((len(values), size), np.uint8)
    for start in range(0, len(values), _PART):
        part, into = values[start : start + _PART], found[start : start + _PART]
        if size == 2:  # both bytes as one number
            np.bitwise_or((part & 0x7F) | 0x80, (part << 1) & 0x7F00, out=into.view("<i2")[:, 0])
            continue
        left: Any = part.astype(np.int64).view(np.uint64) if size > 4 else part
        for k in range(size):
            into[:, k] = (left >> (7 * k)) & 0x7F
        into[:, :-1] |= 0x80
    return found


def field_head(number: int, size: int) -> bytes:
    """Tag and length of a field of `size` bytes."""
    return encode(number << 3 | 2) + encode(size)


def encode(value: int) -> bytes:
    """A varint."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _leading(fits: np.ndarray) -> int:
    """How many of the first ones hold."""
    return len(fits) if fits.all() else int(fits.argmin())


def _floats(raw: np.ndarray) -> np.ndarray:
    count = _leading(raw[: len(raw) // 5 * 5 : 5] == _FLOAT)
    return np.ndarray((count,), "<f4", raw.data, 1, (5,)).copy() if count else np.zeros(0, np.float32)


def _ints(raw: np.ndarray) -> tuple[np.ndarray, int]:
    """The integers, and the bytes that they take."""
    parts = [np.zeros(0, np.int8)]
    pos = 0
    while pos < len(raw):
        part = raw[pos : pos + _PART]
        found, size = _of_one_length(part) or _of_any_length(part)
        if not size:
            break
        parts.append(narrow(found))
        pos += size
    return np.concatenate(parts), pos


def _of_one_length(part: np.ndarray) -> tuple[np.ndarray, int] | None:
    """The integers of a part, which all take one byte, or two; None where they do not."""
    if len(part) > 1 and part[1] < 0x80:
        rows = part[: len(part) // 2 * 2].reshape(-1, 2)
        if rows[-1, 0] == _INT and ((rows[:, 0] == _INT) & (rows[:, 1] < 0x80)).all():
            return rows[:, 1].astype(np.int8), rows.size
    elif len(part) > 2:
        rows = part[: len(part) // 3 * 3].reshape(-1, 3)
        if rows[-1, 0] == _INT and ((rows[:, 0] == _INT) & (rows[:, 1] >= 0x80) & (rows[:, 2] < 0x80)).all():
            return (rows[:, 1] & 0x7F) | (rows[:, 2].astype(np.int16) << 7), rows.size
    return None


def _of_any_length(part: np.ndarray) -> tuple[np.ndarray, int]:
    """The integers that a part begins with, and the bytes that they take. A byte below 0x80 is the tag of an element,
    or the last byte of one, in turns."""
    ends = np.flatnonzero(part < 0x80)
    ends = ends[: len(ends) // 2 * 2]
    tags, lasts = ends[0::2], ends[1::2]
    lengths = lasts - tags
    fits = part[tags] == _INT
    fits[1:] &= tags[1:] - lasts[:-1] == 1
    fits &= lengths <= _LONGEST
    if len(tags):
        fits[0] &= tags[0] == 0
    count = _leading(fits)
    if not count:
        return np.zeros(0, np.int8), 0
    return _decoded(part, tags[:count] + 1, lengths[:count]), int(lasts[count - 1]) + 1


def _decoded(part: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The varints that begin at these places."""
    most = int(lengths.max())
    dtype = np.int16 if most <= 2 else np.int32 if most <= 4 else np.uint64
    values: np.ndarray = (part[starts] & 0x7F).astype(dtype)
    for k in range(1, most):
        more: Any = (part.take(starts + k, mode="clip") & 0x7F).astype(dtype)
        more *= lengths > k
        values |= more << (7 * k)
    return values if most <= 4 else values.view(np.int64)


def _texts(raw: np.ndarray, view: memoryview) -> LongList | None:
    texts: dict[bytes, int] = {}
    parts: list[np.ndarray] = []
    pos = 0
    while pos < len(raw):
        starts, ends = _text_bounds(raw[pos : pos + _PART])
        if not len(starts):
            break
        places = _text_numbers(raw[pos : pos + _PART], starts, ends, texts)
        if places is None:
            return None
        parts.append(places)
        pos += int(ends[-1])
    if sum(map(len, parts)) < LONG or raw[pos : pos + 1].tobytes() == bytes([_TEXT]):
        return None
    return LongList("strings", np.concatenate(parts), [text_of(t) for t in texts], view[:pos])


def _text_bounds(part: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the texts begin and end that a part begins with; those of less than 128 bytes, without the tag."""
    tags = np.flatnonzero(part[:-1] == _TEXT)
    ends = tags + 2 + part[tags + 1]
    fits = part[tags + 1] < 0x80
    fits &= ends <= len(part)
    fits[1:] &= tags[1:] == ends[:-1]
    if len(tags):
        fits[0] &= tags[0] == 0
    count = _leading(fits)
    return tags[:count] + 2, ends[:count]


def _text_numbers(part: np.ndarray, starts: np.ndarray, ends: np.ndarray, texts: dict[bytes, int]) -> np.ndarray | None:
    """The number of each text in `texts`, which gets new ones; None where they become too many."""
    lengths = ends - starts
    places = np.zeros(len(starts), np.uint8)
    for length in np.flatnonzero(np.bincount(lengths)).tolist():
        left = np.flatnonzero(lengths == length)
        while len(left):
            at = starts[left]
            text = part[at[0] : at[0] + length].tobytes()
            if len(texts) == MOST_TEXTS and text not in texts:
                return None
            same = _begins(part, at, text)
            places[left[same]] = texts.setdefault(text, len(texts))
            left = left[~same]
    return places


def _begins(part: np.ndarray, at: np.ndarray, text: bytes) -> np.ndarray:
    """Whether `text` stands at these places."""
    same = np.ones(len(at), np.bool_)
    width = next((w for w in (8, 4, 2, 1) if w <= len(text)), 1)
    windows = np.ndarray((len(part) - width + 1,), f"<u{width}", part.data, strides=(1,))
    for start in {*range(0, len(text) - width + 1, width), len(text) - width} if text else ():
        same &= windows[at + start] == int.from_bytes(text[start : start + width], "little")
    return same

"""A scanner of the protobuf wire format that locates the weights of an ONNX file without parsing them.

A model file is memory-mapped; the data of every large tensor (initialisers, Constant attributes, also in subgraphs and
functions) is replaced by a marker with its offset and size, and only the small remainder is parsed by protobuf. Weights
are then views over the mapped file, and protobuf's limit of 2 GB applies to the remainder only. Long lists of numbers
and texts, the tables of tree ensembles, are replaced in the same way (`onnx_lists` reads them); `LongLists` puts them
into a model that is written.

Source of the field numbers: onnx.proto; of the encoding: protobuf's "Encoding" page.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import numpy as np

from xrt_core.errors import ModelLoadError
from xrt_core.frontends.onnx_lists import field_head, packed, read_list
from xrt_core.ir.file_backed import let_go
from xrt_core.ir.long_list import LONG, LongList

if TYPE_CHECKING:
    from onnx import AttributeProto, TensorProto

THRESHOLD: Final = 1024
"""Tensors of fewer bytes are left to protobuf."""

_MANY: Final = 1 << 22
"""Bytes of a node from which on the lists of its attributes are read by `_READERS` threads."""
_READERS: Final = 2

_MAX_DEPTH: Final = 100  # protobuf's own limit

# message -> field number -> message of that field; only what can hold a tensor
_MESSAGES: Final[Mapping[str, Mapping[int, str]]] = {
    "model": {7: "graph", 25: "function"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 10: "tensor", 6: "graph", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
}
# TensorProto fields whose packed bytes are the raw layout -> data types (None: any but string) they hold it for
_BLOBS: Final[Mapping[int, tuple[int, ...] | None]] = {9: None, 4: (1, 14), 10: (11, 15)}
_LISTS: Final = frozenset({7, 8, 9})
"""Fields of an attribute that list floats, integers or strings, each element by itself: such an attribute holds no
tensor, and the tables of a tree ensemble are a million elements."""
_MARKED: Final = 4
"""The field of an attribute that holds the marker of a long list: its string, which such an attribute has not."""
_KIND: Final = 20
_TENSOR_DATA: Final = frozenset({4, 5, 6, 7, 9, 10, 11, 3})
_STRING: Final = 8


class Weights:
    """The large tensors and long lists of one model file: the mapped file, and the key of the markers that point into
    it."""

    def __init__(self, buffer: memoryview) -> None:
        self.buffer = buffer
        self.key = secrets.token_hex(16)  # random per file, so that a file cannot contain a forged marker
        self.count = 0
        self._lists: list[LongList] = []
        self._ahead: dict[int, tuple[LongList, int] | None] = {}  # by place in the file

    def strip(self) -> bytes:
        """Return the model's bytes with a marker in place of every large tensor's data and every long list.

        Raises ModelLoadError if the bytes are not a protobuf message, or are truncated.
        """
        chunks: list[bytes | memoryview] = []
        self._message("model", 0, len(self.buffer), chunks, 0)
        return b"".join(chunks)

    def find(self, tensor: TensorProto) -> np.ndarray | None:
        """Return the data of a tensor that carries a marker, as bytes of the mapped file; None for other tensors."""
        if self.count:
            for entry in tensor.external_data:
                if entry.key == self.key:
                    start, _, size = entry.value.partition(":")
                    return np.frombuffer(self.buffer, np.uint8, int(size), int(start))
        return None

    def find_list(self, attribute: AttributeProto) -> LongList | None:
        """Return the elements of an attribute that carries a marker; None for others."""
        if not self._lists or not attribute.s:
            return None
        key, _, index = attribute.s.partition(b":")
        return self._lists[int(index)] if key == self.key.encode() else None

    def _message(self, kind: str, start: int, end: int, out: list[bytes | memoryview], depth: int) -> int:
        """Write message `kind` at start:end without its weights to `out`; returns the bytes written."""
        if kind == "tensor":
            return self._tensor(start, end, out)
        if depth > _MAX_DEPTH:
            raise ModelLoadError(f"the model nests graphs more than {_MAX_DEPTH} messages deep; it cannot be read")
        if kind == "node" and end - start >= _MANY:
            self._read_ahead(start, end)
        inside = _MESSAGES[kind]
        kept = pos = start
        written = 0
        while pos < end:
            number, wire, body, stop = _field(self.buffer, pos, end)
            if wire == 2 and stop - body >= THRESHOLD and number in inside:
                inner: list[bytes | memoryview] = []
                before = self.count
                size = self._message(inside[number], body, stop, inner, depth + 1)
                if self.count > before:
                    head = field_head(number, size)
                    out += [self.buffer[kept:pos], head, *inner]
                    written += pos - kept + len(head) + size
                    kept = stop
            elif kind == "attribute" and number in _LISTS:
                size = self._list(number, pos, end)
                if size:
                    marker = _bytes_field(_MARKED, f"{self.key}:{len(self._lists) - 1}".encode())
                    out += [self.buffer[kept:pos], marker]
                    written += pos - kept + len(marker)
                    kept = pos + size
                    self.count += 1
                break
            pos = stop
        out.append(self.buffer[kept:end])
        return written + end - kept

    def _read_ahead(self, start: int, end: int) -> None:
        """Read the lists of the attributes of a large node by several threads."""
        from concurrent.futures import ThreadPoolExecutor

        lists, pos = [], start
        while pos < end:
            number, wire, body, stop = _field(self.buffer, pos, end)
            is_large = wire == 2 and number in _MESSAGES["node"] and stop - body >= THRESHOLD
            while is_large and body < stop:
                inner, _, _, after = _field(self.buffer, body, stop)
                if inner in _LISTS:
                    lists.append((inner, body, stop))
                    break
                body = after
            pos = stop
        with ThreadPoolExecutor(_READERS, "xrt-lists") as pool:
            found = pool.map(lambda row: read_list(row[0], self.buffer[row[1] : row[2]]), lists)
            self._ahead = dict(zip((at for _, at, _ in lists), found, strict=True))

    def _list(self, number: int, start: int, end: int) -> int:
        """Read the list of an attribute that starts at `start`; returns its bytes, 0 if it is left to protobuf."""
        if end - start < 2 * LONG:
            return 0
        found = self._ahead.pop(start) if start in self._ahead else read_list(number, self.buffer[start:end])
        if found is None:
            return 0
        values, size = found
        pos = start + size
        if end - pos > THRESHOLD:
            return 0
        kind = 0
        while pos < end:  # a list may come in several pieces
            other, wire, body, stop = _field(self.buffer, pos, end)
            if other in _LISTS or other == _MARKED:
                return 0
            if other == _KIND and wire == 0:
                kind = _varint(self.buffer, body, end)[0]
            pos = stop
        if kind != number - 1:  # FLOATS = 6, INTS = 7, STRINGS = 8
            return 0
        self._lists.append(values)
        let_go(np.frombuffer(self.buffer[start : start + size], np.uint8))
        return size

    def _tensor(self, start: int, end: int, out: list[bytes | memoryview]) -> int:
        data_type = 0
        data: list[tuple[int, int, int, int, int]] = []
        pos = start
        while pos < end:
            number, wire, body, stop = _field(self.buffer, pos, end)
            if number == 2 and wire == 0:
                data_type = _varint(self.buffer, body, end)[0]
            elif number in _TENSOR_DATA:
                data.append((number, wire, pos, body, stop))
            pos = stop
        if len(data) == 1:
            number, wire, at, body, stop = data[0]
            if wire == 2 and stop - body >= THRESHOLD and number in _BLOBS and data_type != _STRING:
                types = _BLOBS[number]
                if types is None or data_type in types:
                    marker = self._marker(body, stop - body)
                    out += [self.buffer[start:at], marker, self.buffer[stop:end]]
                    self.count += 1
                    return at - start + len(marker) + end - stop
        out.append(self.buffer[start:end])
        return end - start

    def _marker(self, start: int, size: int) -> bytes:
        # TensorProto.external_data (13) { key (1), value (2) }
        entry = _bytes_field(1, self.key.encode()) + _bytes_field(2, f"{start}:{size}".encode())
        return _bytes_field(13, entry)


class LongLists:
    """Long lists on their way into a model's bytes: the protobuf gets markers, which `fill` replaces (`packed`)."""

    def __init__(self) -> None:
        self._key = secrets.token_hex(16).encode()
        self._written: list[LongList] = []

    def __call__(self, attribute: AttributeProto, values: LongList) -> bool:
        """Write a marker into an attribute that has its kind; returns False for texts that were read from no file."""
        if values.kind == "strings" and values.wire is None:
            return False
        attribute.s = self._key + b":%d" % len(self._written)
        self._written.append(values)
        return True

    def fill(self, model: bytes) -> bytes:
        """Return the bytes of a model with the lists in the place of their markers."""
        if not self._written:
            return model
        chunks: list[bytes | memoryview] = []
        self._message("model", memoryview(model), model, 0, len(model), chunks)
        return b"".join(chunks)

    def _message(
        self, kind: str, view: memoryview, raw: bytes, start: int, end: int, out: list[bytes | memoryview]
    ) -> int:
        """Write message `kind` at start:end with its lists to `out`; returns the bytes written."""
        kept = pos = start
        written = 0
        while (at := raw.find(self._key, pos, end)) >= 0:
            number, _, body, stop = _field(view, pos, end)
            while stop <= at:
                pos = stop
                number, _, body, stop = _field(view, pos, end)
            inner: list[bytes | memoryview]
            if kind == "attribute" and number == _MARKED:
                content = packed(self._written[int(raw[at + len(self._key) + 1 : stop])])
                assert content is not None
                inner, size = list(content), sum(map(len, content))
            else:
                inner = []
                size = self._message(_MESSAGES[kind][number], view, raw, body, stop, inner)
                head = field_head(number, size)
                inner.insert(0, head)
                size += len(head)
            out += [view[kept:pos], *inner]
            written += pos - kept + size
            kept = pos = stop
        out.append(view[kept:end])
        return written + end - kept


def _varint(buffer: memoryview, pos: int, end: int) -> tuple[int, int]:
    value, shift = 0, 0
    while pos < end and shift < 70:
        byte = buffer[pos]
        pos += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, pos
        shift += 7
    raise _damaged(pos)


def _field(buffer: memoryview, pos: int, end: int) -> tuple[int, int, int, int]:
    """Return number, wire type, start of the content and end of the field at `pos`."""
    byte = buffer[pos]
    tag, body = (byte, pos + 1) if byte < 0x80 else _varint(buffer, pos, end)
    wire = tag & 7
    if wire == 2:
        if body >= end:
            raise _damaged(pos)
        byte = buffer[body]
        size, body = (byte, body + 1) if byte < 0x80 else _varint(buffer, body, end)
        stop = body + size
    elif wire == 0:
        stop = _varint(buffer, body, end)[1]
    elif wire == 5:
        stop = body + 4
    elif wire == 1:
        stop = body + 8
    else:
        raise _damaged(pos)
    if stop > end or tag < 8:
        raise _damaged(pos)
    return tag >> 3, wire, body, stop


def _bytes_field(number: int, content: bytes) -> bytes:
    return field_head(number, len(content)) + content


def _damaged(pos: int) -> ModelLoadError:
    return ModelLoadError(f"the bytes are not an ONNX model, or are truncated: damaged at byte {pos}")

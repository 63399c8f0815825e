"""What comes from outside: for any content a reader gives a result, or the one error that its docstring names."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import json
import pathlib
import random
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
import pytest

from xrt_core.cache.archive import export_entries, import_entries
from xrt_core.cache.disk import DiskCache, FileDigests, Hit, Miss, check_entry, read_blob, read_manifest, write_entry
from xrt_core.cache.key import CacheKey
from xrt_core.engine.contract import CompileOptions, Parameter
from xrt_core.engine.serialization import ParameterRow, pack, parameters_of, rows_of, unpack
from xrt_core.errors import (
    CacheError,
    CheckpointError,
    CompileError,
    InputError,
    ModelLoadError,
    QuantizationError,
    XRTError,
)
from xrt_core.files import MOST_NESTED, decode, decompress, encode, reading, storable
from xrt_core.frontends.onnx_file import map_file
from xrt_core.guard import ipc
from xrt_core.guard.capability import Answers
from xrt_core.ir import file_backed
from xrt_core.ir.function import SIZE, digest
from xrt_core.module import XRTModule
from xrt_core.quantization.ranges import Ranges, find_ranges
from xrt_core.reports.difference import difference
from xrt_core.saved_model import open_saved
from xrt_core.testing import functions
from xrt_core.training import checkpoint, sharded_checkpoint
from xrt_core.verify.inputs import synthesize_inputs
from xrt_core.verify.repro import Bundle, read_bundle, write_bundle
from xrt_core.verify.verdict import Outcome, Piece

# --- the module -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """A declared type, with a bound."""

    name: str
    sizes: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"name": "a", "sizes": [1, -2]}', r"x.json is damaged: Expected `int` >= 0 - at `\$.sizes\[1\]`"),
        (b'{"name": 3, "sizes": []}', r"Expected `str`, got `int` - at `\$.name`"),
        (b'{"name": "a"}', "missing required field `sizes`"),
        (b'{"name": "a", "sizes": [1e999]}', "out of range"),
        (b'{"name": "\xff", "sizes": []}', "UnicodeDecodeError|Invalid UTF-8"),  # by msgspec 0.22 and 0.23
        (b"[" * 100_000, f"more than {MOST_NESTED} levels"),
        (b'"' + b'\\"' * 1_000_000, "is damaged"),  # in linear time
        (b"", "is damaged"),
    ],
    ids=["bound", "type", "missing", "inf", "bytes", "deep", "quotes", "empty"],
)
def test_a_fault_has_its_path(content: bytes, reason: str) -> None:
    """The message names the subject, and the place in it."""
    with pytest.raises(InputError, match=reason):
        decode(content, Row, "x.json", InputError)


def test_text_comes_back() -> None:
    """Unicode text as it is, brackets in it too; half of a surrogate pair as its escape, in keys of the cache too."""
    names = ["plain", "ünï", "😀", "[" * 200, '"\\', "a\u2028b", "\x00"]
    assert decode(encode(names), list[str], "it", InputError) == names
    assert decode(encode(["a\udcff"]), list[str], "it", InputError) == [storable("a\udcff")] == ["a\\udcff"]
    file = io.BytesIO()
    key = CacheKey((("python", "/opt/\udcff/python"),))
    write_entry(file, key, {}, {})
    assert read_manifest(file).key == key


@pytest.mark.parametrize(
    "fault",
    [RecursionError(), OverflowError("x"), zlib.error("x"), EOFError(), NotImplementedError(), MemoryError(),
     UnicodeDecodeError("utf-8", b"", 0, 1, "x"), struct.error("x"), OSError(5, "x"), ModelLoadError("x"), KeyError(1)],
)  # fmt: skip
def test_every_fault_is_the_one_error(fault: Exception) -> None:
    """Whatever a library raises about the data; the cause is chained."""
    with pytest.raises(CacheError, match="^the file") as caught, reading("the file", CacheError):
        raise fault
    assert caught.value.__cause__ is fault


def test_decompression_is_bounded() -> None:
    """A gigabyte of zeros in a megabyte is refused before it is unpacked."""
    machine = zlib.compressobj(9)
    bomb = b"".join(machine.compress(bytes(1 << 20)) for _ in range(64)) + machine.flush()
    with pytest.raises(ValueError, match="more than 1000 bytes"):
        decompress(bomb, 1000)
    assert decompress(zlib.compress(b"abc"), 3) == b"abc"
    with pytest.raises(ValueError, match="cut off"):
        decompress(zlib.compress(b"abc")[:-2], 3)


# --- mutations --------------------------------------------------------------------------------------------------------

STRANGE: tuple[Any, ...] = (
    None, True, -1, 0, 1 << 31, 1 << 63, 1 << 64, 10**40, 0.5, -1e308, "", "x", "-1", "float32", "string", "\x1b[31m",
    "../..", [], {}, [[]], [1e308], {"": None}, "@1e999@", "@-1e999@", "@NaN@", "@" + "9" * 5000 + "@",
    "@" + "[" * 300 + "]" * 300 + "@", '@"\\ud800"@', '@{"a": 1, "a": 2}@', "@@",
)  # fmt: skip


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) in a tree of JSON."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(pairs):
        yield tree, key
        yield from places(value)


def texts(whole: Any, rng: random.Random, count: int) -> Iterator[bytes]:
    """JSON with one or two of its values replaced, deleted or doubled, or with other names."""
    for _ in range(count):
        root = [copy.deepcopy(whole)]
        for _ in range(rng.choice((1, 1, 2))):
            container, key = rng.choice(list(places(root)))
            kind = rng.randrange(6)
            if kind == 0 and container is not root:
                del container[key]
            elif kind == 1 and isinstance(container, dict):
                container[rng.choice(("", "x", "@", "name"))] = container.pop(key)
            elif kind == 2 and isinstance(container, list) and container is not root:
                container.append(container[key])
            else:
                container[key] = copy.deepcopy(rng.choice(STRANGE))
        yield json.dumps(root[0]).replace('"@', "").replace('@"', "").replace('\\"', '"').encode()


def damaged(whole: bytes, rng: random.Random, count: int) -> Iterator[bytes]:
    """Bytes with flips, cut off, with parts doubled or overwritten."""
    for _ in range(count):
        data, at = bytearray(whole), rng.randrange(len(whole))
        kind = rng.randrange(5)
        if kind == 0:
            del data[at:]
        elif kind == 1:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            data[at : at + 8] = rng.randbytes(8)
        elif kind == 3:
            data[at:at] = data[at // 2 : at]
        else:
            data[at : at + 8] = rng.choice((b"\xff" * 8, bytes(8), b"\x7f" + b"\xff" * 7))
        yield bytes(data)


def survives(read: Callable[[Any], object], contents: Iterator[Any], *errors: type[XRTError]) -> None:
    """Each content is read, or is one of the errors; and some are errors."""
    refused = 0
    for content in contents:
        try:
            read(content)
        except errors:
            refused += 1
        except BaseException as e:
            raise AssertionError(f"{type(e).__name__}: {e} from {repr(content)[:2000]}") from e
    assert refused


def resealed(whole: bytes, manifest: bytes) -> bytes:
    """A container with another manifest, under a digest that fits."""
    magic, version, at, _ = struct.unpack_from("<8sIQQ", whole)
    head = struct.pack(f"<8sIQQ{SIZE}s", magic, version, at, len(manifest), bytes.fromhex(digest(manifest)))
    return head + whole[len(head) : at] + manifest


def manifest_of(whole: bytes) -> Any:
    """The manifest of a container, as JSON."""
    _, _, at, length = struct.unpack_from("<8sIQQ", whole)
    return json.loads(whole[at : at + length])


def container_contents(whole: bytes, seed: int, count: int) -> Iterator[bytes]:
    """Mutations of a container: of its bytes, and of its manifest under a fitting digest."""
    rng = random.Random(seed)
    manifests = itertools.chain(texts(manifest_of(whole), rng, count), damaged(encode(manifest_of(whole)), rng, count))
    return itertools.chain(damaged(whole, rng, count), (resealed(whole, m) for m in manifests))


@dataclass(frozen=True, slots=True)
class Header:
    """As an engine declares it."""

    params: tuple[ParameterRow, ...]
    outputs: Annotated[int, msgspec.Meta(ge=0)]


def test_executables() -> None:
    """A serialised executable is a CompileError, for any bytes and any header."""
    rows = rows_of([Parameter("x", np.dtype(np.float32), (2, 3)), Parameter("s", np.dtype(np.int64), ())])
    whole = pack(b"XRTTEST\n", {"for": "here", "params": rows, "outputs": 1}, (b"one", b"two"))

    def read(content: bytes) -> None:
        header, _ = unpack(b"XRTTEST\n", content, "acme", Header, "here")
        parameters_of(header.params)

    read(whole)
    survives(read, container_contents(whole, 1, 700), CompileError)


KEY = CacheKey((("function", "abc"), ("engine", "acme")))


def test_entries(tmp_path: pathlib.Path) -> None:
    """A cache entry is a CacheError for who reads it, and a miss for the cache."""
    file = io.BytesIO()
    info = {"cluster": "c", "nodes": 3, "created": 1.5, "compile_seconds": 0.1}
    write_entry(file, KEY, info, {"function": zlib.compress(b"text"), "executable": b"blob"})

    def read(content: bytes) -> None:
        check_entry(io.BytesIO(content))
        manifest = read_manifest(io.BytesIO(content))
        for name in manifest.blobs:
            read_blob(manifest, name)
        float(manifest.info.get("compile_seconds", 0)), int(manifest.info.get("nodes", 0))

    survives(read, container_contents(file.getvalue(), 2, 600), CacheError)

    disk = DiskCache(tmp_path / "cache", 1 << 20)
    assert disk.write(KEY, info, b"text", b"blob") == ""
    path = disk.path_of(KEY)
    sound = path.read_bytes()
    for content in container_contents(sound, 3, 100):
        path.write_bytes(content)
        assert isinstance(disk.read(KEY, b"text"), Hit | Miss)
        with contextlib.suppress(CacheError):
            disk.function_text(path)


def test_a_compressed_bomb_in_an_entry_is_a_miss(tmp_path: pathlib.Path) -> None:
    """It is unpacked no further than the text that is expected."""
    disk = DiskCache(tmp_path / "cache", 1 << 24)
    disk.write(KEY, {}, b"text", b"blob")
    path = disk.path_of(KEY)
    with path.open("wb") as file:
        write_entry(file, KEY, {}, {"function": zlib.compress(bytes(1 << 26)), "executable": b"blob"})
    found = disk.read(KEY, b"text")
    assert isinstance(found, Miss)
    assert "more than 4 bytes" in found.reason


@pytest.mark.slow
def test_archives(tmp_path: pathlib.Path) -> None:
    """An exported cache is a CacheError, or entries that are refused with a reason."""
    disk = DiskCache(tmp_path / "cache", 1 << 20)
    disk.write(KEY, {"cluster": "c"}, b"text", b"blob")
    export_entries(disk, disk.files(), tmp_path / "a.tar")
    whole = (tmp_path / "a.tar").read_bytes()[:2560]
    assert import_entries(DiskCache(tmp_path / "b", 1 << 20), tmp_path / "a.tar")[1] == []
    rng = random.Random(4)
    heads = (h + whole[512:] for h in damaged(whole[:512], rng, 400))
    summed = (with_checksum(h) + whole[512:] for h in damaged(whole[:512], rng, 600) if len(h) == 512)
    target = DiskCache(tmp_path / "c", 1 << 20)

    def read(content: bytes) -> None:
        (tmp_path / "x.tar").write_bytes(content)
        import_entries(target, tmp_path / "x.tar")

    survives(read, itertools.chain(heads, summed, damaged(whole, rng, 300)), CacheError)
    with pytest.raises(CacheError, match="no such file"):
        import_entries(target, tmp_path / "none.tar")


def with_checksum(head: bytes) -> bytes:
    """A tar header whose checksum fits."""
    total = sum(head[:148]) + 32 * 8 + sum(head[156:])
    return head[:148] + b"%06o\0 " % total + head[156:]


@pytest.mark.parametrize("kind", ["link", "hard link", "device", "folder", "sparse", "pipe"])
def test_only_regular_members_of_an_archive_are_read(tmp_path: pathlib.Path, kind: str) -> None:
    """Links, devices and files with holes are refused by name, and nothing is written anywhere."""
    member = tarfile.TarInfo("../../escape.xrt")
    member.type = {
        "link": tarfile.SYMTYPE, "hard link": tarfile.LNKTYPE, "device": tarfile.CHRTYPE, "folder": tarfile.DIRTYPE,
        "sparse": tarfile.GNUTYPE_SPARSE, "pipe": tarfile.FIFOTYPE,
    }[kind]  # fmt: skip
    member.linkname = "/etc/passwd"
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.addfile(member)
    disk = DiskCache(tmp_path / "cache", 1 << 20)
    assert import_entries(disk, tmp_path / "a.tar") == ([], [("../../escape.xrt", "it is no regular file")])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.tar", "cache"]


def test_a_member_that_leads_back_ends(tmp_path: pathlib.Path) -> None:
    """A negative size would make tarfile read the same header for ever."""
    member = tarfile.TarInfo("a.xrt")
    member.size = 0
    head = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    head[124:136] = b"\xff" * 10 + struct.pack(">h", -1024)
    (tmp_path / "a.tar").write_bytes(with_checksum(bytes(head)) + bytes(4096))
    with contextlib.suppress(CacheError):
        assert import_entries(DiskCache(tmp_path / "cache", 1 << 20), tmp_path / "a.tar")[0] == []


@pytest.mark.slow
def test_saved_modules(tmp_path: pathlib.Path) -> None:
    """A saved module is a CacheError or a ModelLoadError, when it is opened and when its signatures are made."""
    function, _ = functions.chain()
    m = XRTModule(function.body, engine="host", maximum_nodes=9)
    m(*synthesize_inputs(function))
    m.save(tmp_path / "m.xrt")
    path = tmp_path / "x.xrt"

    def read(content: bytes) -> None:
        path.write_bytes(content)
        saved = open_saved(path)
        saved.engine_names()
        saved.check([])
        list(saved.signatures())

    read((tmp_path / "m.xrt").read_bytes())
    survives(read, container_contents((tmp_path / "m.xrt").read_bytes(), 5, 250), CacheError, ModelLoadError)

    def load(content: bytes) -> None:
        path.write_bytes(content)
        XRTModule.load(path)

    whole = (tmp_path / "m.xrt").read_bytes()
    rng = random.Random(6)
    survives(load, (resealed(whole, t) for t in texts(manifest_of(whole), rng, 150)), CacheError, ModelLoadError)


@pytest.mark.slow
def test_bundles(tmp_path: pathlib.Path) -> None:
    """A bundle is a ModelLoadError."""
    function, _ = functions.chain()
    inputs = tuple(synthesize_inputs(function))
    versions = {"python": "3"}
    made = Bundle(function, "acme", "cpu", CompileOptions(threads=2), "wrong", "it is", inputs, versions, "log")
    write_bundle(made, tmp_path / "b", large=16)
    whole = (tmp_path / "b").read_bytes()
    with zipfile.ZipFile(tmp_path / "b") as archive:
        members = {n: archive.read(n) for n in archive.namelist()}

    def packed(**changes: bytes) -> bytes:
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            for name, content in {**members, **changes}.items():
                archive.writestr(name, content)
        return file.getvalue()

    def read(content: bytes) -> None:
        (tmp_path / "x").write_bytes(content)
        read_bundle(tmp_path / "x")

    read(whole)
    rng = random.Random(7)
    manifests = (packed(**{"manifest.json": t}) for t in texts(json.loads(members["manifest.json"]), rng, 300))
    models = (packed(**{"function.onnx": t}) for t in damaged(members["function.onnx"], rng, 200))
    survives(read, itertools.chain(damaged(whole, rng, 400), manifests, models), ModelLoadError)


def test_a_bundle_that_unpacks_to_gigabytes_is_refused(tmp_path: pathlib.Path) -> None:
    """By the sum of what its members claim, before any is unpacked."""
    with zipfile.ZipFile(tmp_path / "b", "w", zipfile.ZIP_DEFLATED) as archive:
        for i in range(3):
            with archive.open(f"input{i}.raw", "w", force_zip64=True) as member:
                member.write(bytes(1 << 16))
    content = bytearray((tmp_path / "b").read_bytes())
    at = -1
    while (at := content.find(b"PK\x01\x02", at + 1)) >= 0:  # the central directory says what unpacks
        struct.pack_into("<I", content, at + 24, (1 << 32) - 2)
    (tmp_path / "b").write_bytes(content)
    with pytest.raises(ModelLoadError, match="would unpack to 12884901882 bytes"):
        read_bundle(tmp_path / "b")


def test_answers_of_workers() -> None:
    """A message, an outcome, answers about nodes: typed, or an error."""
    outcome = Outcome("ready", (Piece("a", (0, 2)), Piece("host", (1,))), "fine", {"compile": 0.5}, ("no",))
    rng = random.Random(8)
    for type_, whole in (
        (ipc.Message, {"outcome": outcome.to_json()}),
        (ipc.Message, {"error": "e", "kind": "memory"}),
        (ipc.Message, {"stage": "compiling", "engine": "a"}),
        (ipc.Message, {"supports": [[True, ""], [False, "no"]], "fault": ""}),
        (Answers, {"supports": [[True, ""], [False, "no"]], "fault": ""}),
        (Outcome, outcome.to_json()),
    ):
        read = lambda content, t=type_: decode(content, t, "the answer", CacheError)  # noqa: E731
        contents = itertools.chain(texts(whole, rng, 400), damaged(encode(whole), rng, 200))
        survives(read, contents, CacheError)
    assert decode(encode({"outcome": outcome.to_json()}), ipc.Message, "it", CacheError).outcome == outcome


def test_functions_for_workers(tmp_path: pathlib.Path) -> None:
    """The types and annotations that come beside a function are a ModelLoadError."""
    function, _ = functions.chain()
    ipc.write_function(function, tmp_path)
    types = tmp_path / "types.json"
    whole = types.read_bytes()

    def read(content: bytes) -> None:
        types.write_bytes(content)
        ipc.read_function(tmp_path)

    rng = random.Random(9)
    survives(read, itertools.chain(texts(json.loads(whole), rng, 200), damaged(whole, rng, 100)), ModelLoadError)
    rows = ipc.write_arrays([np.zeros((2, 3), np.float32)], tmp_path)
    known = [{**rows[0], "dtype": d, "shape": s} for d in STRANGE for s in ([2, 3], [6], *STRANGE)]
    survives(lambda row: ipc.read_arrays(tmp_path, [row]), iter(known), ModelLoadError)


def test_files_of_ranges(tmp_path: pathlib.Path) -> None:
    """Recorded ranges are a QuantizationError."""
    path = Ranges("m", "abc", 2, {"x": (-1.0, 2.0), "y": (float("nan"), float("nan"))}).save(tmp_path)
    whole = path.read_bytes()

    def read(content: bytes) -> None:
        path.write_bytes(content)
        find_ranges(tmp_path, "abc")

    rng = random.Random(10)
    survives(read, itertools.chain(texts(json.loads(whole), rng, 500), damaged(whole, rng, 300)), QuantizationError)


def test_reports_of_partitions() -> None:
    """A report that is compared is an InputError."""
    host = {"name": "n", "operator": "Exp", "index": 0, "reason": "why"}
    whole = {"clusters": [{"name": "c", "engine": "a", "nodes": ["x", ""]}], "host_nodes": [host], "nodes": 3}
    rng = random.Random(11)

    def read(content: bytes) -> None:
        difference(whole, decode(content, dict[str, Any], "it", InputError)).as_text()

    survives(read, texts(whole, rng, 800), InputError)


def test_checkpoints(tmp_path: pathlib.Path) -> None:
    """A checkpoint is a CheckpointError."""
    pytest.importorskip("safetensors")
    path = tmp_path / "a.safetensors"
    checkpoint.save({"w": np.ones((3, 2), np.float32), "s": np.array(7)}, path, {"seed": "3"})
    whole = path.read_bytes()
    (length,) = struct.unpack_from("<Q", whole)

    def read(content: bytes) -> None:
        path.write_bytes(content)
        checkpoint.load(path)

    rng = random.Random(12)
    header, body = json.loads(whole[8 : 8 + length]), whole[8 + length :]
    headers = (struct.pack("<Q", len(t)) + t + body for t in texts(header, rng, 500))
    survives(read, itertools.chain(headers, damaged(whole, rng, 500)), CheckpointError)


def test_folders_of_pieces(tmp_path: pathlib.Path) -> None:
    """The index of a checkpoint in pieces, and what a file says of its pieces, are a CheckpointError; sizes that are
    not there take no memory."""
    pytest.importorskip("safetensors")
    state = {"w": np.ones((3, 2), np.float32), "s": np.array(7)}
    sharded_checkpoint.save(sharded_checkpoint.pieces(state), tmp_path, {"seed": "3"})
    (file,) = tmp_path.glob("*.safetensors")
    index, content = tmp_path / sharded_checkpoint.INDEX, file.read_bytes()
    whole = index.read_bytes()
    arrays, metadata = checkpoint.load(file)
    rng = random.Random(13)

    def read_index(text: bytes) -> None:
        index.write_bytes(text)
        sharded_checkpoint.load(tmp_path)

    def read_pieces(text: bytes) -> None:
        checkpoint.save(arrays, file, {"pieces": text.decode()})
        sharded_checkpoint.load(tmp_path)

    survives(read_index, itertools.chain(texts(json.loads(whole), rng, 500), damaged(whole, rng, 200)), CheckpointError)
    index.write_bytes(whole)
    survives(read_pieces, texts(json.loads(metadata["pieces"]), rng, 300), CheckpointError)
    file.write_bytes(content)
    np.testing.assert_array_equal(sharded_checkpoint.load(tmp_path)[0]["w"], state["w"])


@pytest.mark.parametrize(
    ("offsets", "size"), [(([0, 4], [0, 4]), 4), (([0, 4], [4, 8]), 12), (([0, 4], [8, 12]), 12)],
    ids=["the same bytes", "bytes behind", "bytes between"],
)  # fmt: skip
def test_tensors_of_a_checkpoint_cover_its_bytes_once(
    tmp_path: pathlib.Path, offsets: tuple[list[int], list[int]], size: int
) -> None:
    """Two tensors on the same bytes, and bytes that belong to none, are refused."""
    pytest.importorskip("safetensors")
    rows = {n: {"dtype": "F32", "shape": [1], "data_offsets": o} for n, o in zip("ab", offsets, strict=True)}
    text = json.dumps(rows).encode()
    (tmp_path / "c").write_bytes(struct.pack("<Q", len(text)) + text + bytes(size))
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.load(tmp_path / "c")


def test_remembered_digests(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests of weights that make no sense are forgotten."""
    monkeypatch.setattr(file_backed, "_SETTLED", -1e18)  # as if the file had been there for long
    path = tmp_path / "w"
    np.arange(10_000, dtype=np.float32).tofile(path)
    array = np.frombuffer(map_file(path), np.float32)
    memory = FileDigests(tmp_path / "cache")
    memory.put(array, "abc")
    memory.flush()
    (file,) = (tmp_path / "cache").rglob("*.json")
    whole = file.read_bytes()
    assert FileDigests(tmp_path / "cache").get(array) == "abc"
    rng = random.Random(13)
    for content in itertools.chain(texts(json.loads(whole), rng, 200), damaged(whole, rng, 200)):
        file.write_bytes(content)
        assert FileDigests(tmp_path / "cache").get(array) in ("abc", None)

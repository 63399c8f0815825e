"""Model files: weights stay in the file, external data stays in its folder, damage is told."""

from __future__ import annotations

import contextlib
import os
import pathlib
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto
from onnx.external_data_helper import convert_model_to_external_data

from tests.frontends.onnx_models import ATTR, N, function, info, model, subgraph, tensor
from tests.profiles import examples
from xrt_core.errors import ModelLoadError
from xrt_core.frontends.onnx_file import map_file
from xrt_core.frontends.onnx_import import import_model
from xrt_core.frontends.onnx_wire import Weights
from xrt_core.ir.function import graph_fingerprint
from xrt_core.ir.verifier import verify

BIG = np.arange(3000, dtype=np.float32).reshape(1000, 3)


def _everywhere() -> onnx.ModelProto:
    """Large tensors in every place that can hold one."""
    inner = N("Constant", [], ["k"], value=tensor("", BIG + 3))
    body = subgraph([inner, N("Add", ["h", "k"], ["r"])], ["r"])
    f = function("F", ["a"], ["c"], [N("Constant", [], ["k"], value=tensor("", BIG + 4)), N("Add", ["a", "k"], ["c"])])
    typed = TensorProto(name="typed", data_type=TensorProto.FLOAT, dims=[1000, 3], float_data=(BIG + 5).reshape(-1))
    doubles = TensorProto(name="d", data_type=TensorProto.DOUBLE, dims=[3000], double_data=np.arange(3000.0))
    sparse = onnx.helper.make_sparse_tensor(
        tensor("s", np.ones(500, np.float32)), tensor("i", np.arange(500) * 2), [1000, 3]
    )
    nodes = [
        N("Constant", [], ["c"], value=tensor("", BIG + 1)),
        N("Sum", ["x", "w", "c", "typed", "s"], ["h"]),
        N("If", ["flag"], ["i"], then_branch=body, else_branch=body),
        N("F", ["i"], ["y"], domain="f"),
        N("Identity", ["d"], ["dd"]),
    ]
    inputs = [info("x", (1000, 3)), info("flag", (), TensorProto.BOOL)]
    proto = model(
        nodes, inputs, ["y", "dd"], initializer=[tensor("w", BIG), typed, doubles], functions=[f], domains=("f",)
    )
    proto.graph.sparse_initializer.append(sparse)
    return proto


def test_weights_never_pass_through_protobuf() -> None:
    """What protobuf gets is small; the arrays are views over the caller's bytes, and hold what they held."""
    proto = _everywhere()
    raw = proto.SerializeToString()
    weights = Weights(memoryview(raw))
    rest = weights.strip()

    assert len(raw) > 60_000
    assert len(rest) < 3000
    assert weights.count == 9  # w, typed, d, values and indices of s, c, k on both sides of the If, k of F

    graph = import_model(raw)
    found = {v.name: v.data for v in graph.constants}
    whole = np.frombuffer(raw, np.uint8)
    for name in ("w", "c", "typed", "d"):
        assert found[name] is not None
        assert np.shares_memory(found[name], whole)
    np.testing.assert_array_equal(found["w"], BIG)
    np.testing.assert_array_equal(found["typed"], BIG + 5)
    assert graph_fingerprint(graph) == graph_fingerprint(import_model(proto))


def test_a_file_is_mapped_and_its_arrays_are_read_only(tmp_path: pathlib.Path) -> None:
    """Arrays of a file outlive the importer and cannot be written to."""
    path = tmp_path / "m.onnx"
    path.write_bytes(_everywhere().SerializeToString())
    (w,) = (v.data for v in import_model(path).constants if v.name == "w")

    assert w is not None
    assert not w.flags.writeable
    np.testing.assert_array_equal(w, BIG)


def test_a_file_cannot_forge_a_marker() -> None:
    """An entry that looks like a marker is not one: the key is drawn per load."""
    t = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2])
    t.external_data.add(key="0" * 32, value="0:8")
    proto = model([N("Identity", ["w"], ["y"])], [], [info("y", None)], initializer=[t, tensor("u", BIG)])
    with pytest.raises(ModelLoadError, match="'w'"):
        import_model(proto.SerializeToString())


def _external(folder: pathlib.Path, location: str = "w.bin", **entries: str) -> pathlib.Path:
    """A model whose initialiser w: float32[4] lies in external data."""
    t = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, **entries}.items():
        t.external_data.add(key=key, value=value)
    path = folder / "m.onnx"
    proto = model([N("Identity", ["w"], ["y"])], [], [info("y", None)], initializer=[t])
    path.write_bytes(proto.SerializeToString())
    return path


def test_external_data_is_mapped_once(tmp_path: pathlib.Path) -> None:
    """onnx's own writer: all tensors in one file, all of them views over one map."""
    proto = _everywhere()
    convert_model_to_external_data(proto, all_tensors_to_one_file=True, location="data.bin", size_threshold=100)
    onnx.save(proto, tmp_path / "m.onnx")
    graph = import_model(tmp_path / "m.onnx")
    found = {v.name: v.data for v in graph.constants}

    np.testing.assert_array_equal(found["w"], BIG)
    assert graph_fingerprint(graph) == graph_fingerprint(import_model(_everywhere()))
    assert (tmp_path / "data.bin").stat().st_size > 10_000

    bare = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    assert graph_fingerprint(import_model(bare, folder=tmp_path)) == graph_fingerprint(graph)
    with pytest.raises(ModelLoadError, match="came without a file; give the folder"):
        import_model(bare)


def test_offset_and_length_are_kept_to(tmp_path: pathlib.Path) -> None:
    """A tensor takes its own bytes of the file."""
    (tmp_path / "sub").mkdir()
    np.arange(8, dtype=np.float32).tofile(tmp_path / "sub" / "w.bin")
    graph = import_model(_external(tmp_path, "sub/w.bin", offset="8", length="16"))

    assert graph.constants[0].data is not None
    assert graph.constants[0].data.tolist() == [2, 3, 4, 5]


BAD_EXTERNAL: dict[str, tuple[dict[str, str], str]] = {
    "missing file": ({"location": "none.bin"}, "external data file .*none.bin' does not exist"),
    "no location": ({"location": ""}, "must be a path inside the model's folder"),
    "absolute": ({"location": "/etc/hostname"}, "must be a path inside"),
    "upwards": ({"location": "../outside.bin"}, "must be a path inside"),
    "upwards within": ({"location": "sub/../../outside.bin"}, "must be a path inside"),
    "backslashes": ({"location": "..\\outside.bin"}, "must be a path inside"),
    "drive": ({"location": "C:/w.bin"}, "must be a path inside"),
    "link": ({"location": "link.bin"}, "leads out of the model's folder"),
    "linked folder": ({"location": "away/outside.bin"}, "leads out of the model's folder"),
    "a directory": ({"location": "sub"}, "is a directory"),
    "link to itself": ({"location": "circle.bin"}, "cannot be (located|read)"),
    "linked device": ({"location": "null.bin"}, "leads out of the model's folder"),
    "long name": ({"location": "x" * 5000}, "cannot be (located|read)"),
    "range past the end": ({"length": "64"}, "bytes 0 to 64 .* has only 32"),
    "offset past the end": ({"offset": "40"}, "has only 32"),
    "negative offset": ({"offset": "-4"}, "offset '-4' .* is not a number"),
    "huge offset": ({"offset": "9" * 30}, "is not a number"),
    "wrong size": ({"length": "12"}, r"12 bytes of data for float32\[4\], which takes 16"),
}


@pytest.mark.parametrize("case", BAD_EXTERNAL)
def test_bad_external_data_is_refused(case: str, tmp_path: pathlib.Path) -> None:
    """Missing, outside the folder, or of the wrong size: an error that names the tensor."""
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    outside = tmp_path / "outside.bin"
    np.arange(4, dtype=np.float32).tofile(outside)
    np.arange(8, dtype=np.float32).tofile(folder / "w.bin")
    (folder / "link.bin").symlink_to(outside)
    (folder / "away").symlink_to(tmp_path)
    (folder / "circle.bin").symlink_to(folder / "circle.bin")
    (folder / "null.bin").symlink_to("/dev/null")
    entries, message = BAD_EXTERNAL[case]
    with pytest.raises(ModelLoadError, match=message) as e:
        import_model(_external(folder, **{"location": "w.bin", **entries}))
    assert "initialiser 'w'" in str(e.value)


def test_a_linked_model_finds_its_data_beside_the_link_or_its_target(tmp_path: pathlib.Path) -> None:
    """Download caches keep models and data as links into one folder of blobs."""
    blobs, shown = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    shown.mkdir()
    np.arange(4, dtype=np.float32).tofile(blobs / "1234")
    (shown / "w.bin").symlink_to(blobs / "1234")
    _external(blobs).rename(blobs / "abcd")
    (shown / "m.onnx").symlink_to(blobs / "abcd")

    assert import_model(shown / "m.onnx").constants[0].data is not None


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_no_external_data(tmp_path: pathlib.Path) -> None:
    """Opening a named pipe would wait for ever."""
    os.mkfifo(tmp_path / "w.bin")
    with pytest.raises(ModelLoadError, match="not a regular file"):
        import_model(_external(tmp_path))


def _bad_files(folder: pathlib.Path) -> dict[str, tuple[Any, str]]:
    raw = _everywhere().SerializeToString()
    (folder / "truncated.onnx").write_bytes(raw[: len(raw) // 2])
    (folder / "random.onnx").write_bytes(np.random.default_rng(0).bytes(5000))
    (folder / "empty.onnx").write_bytes(b"")
    (folder / "text.onnx").write_text("this is not a model\n" * 100)
    return {
        "missing": (folder / "missing.onnx", "missing.onnx' does not exist"),
        "directory": (folder, "is a directory"),
        "truncated": (folder / "truncated.onnx", "truncated.onnx'.*truncated"),
        "random": (folder / "random.onnx", "not an ONNX model"),
        "empty": (folder / "empty.onnx", "is empty"),
        "text": (folder / "text.onnx", "not an ONNX model"),
        "no bytes": (b"", "is empty"),
        "no graph": (onnx.ModelProto(ir_version=8).SerializeToString(), "there is no graph"),
        "no opset": (onnx.ModelProto(ir_version=8, graph=onnx.GraphProto(name="g")), "no opset is imported"),
        "another object": (42, r"builtins\.int is not a model"),
        "another message": (onnx.GraphProto(), "GraphProto is not a model"),
    }


BAD_FILES = (
    "missing", "directory", "truncated", "random", "empty", "text", "no bytes", "no graph", "no opset",
    "another object", "another message",
)  # fmt: skip


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files_are_refused(case: str, tmp_path: pathlib.Path) -> None:
    """Each is one clear error that names the file."""
    source, message = _bad_files(tmp_path)[case]
    with pytest.raises(ModelLoadError, match=message):
        import_model(source)


@examples(150)
@given(st.data())
def test_damaged_bytes_load_or_are_refused(data: st.DataObject) -> None:
    """Cut or overwritten anywhere, a model is either a model or a ModelLoadError, never anything else."""
    raw = bytearray(_everywhere().SerializeToString() if data.draw(st.booleans()) else _small())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(0, len(raw)))]
    with contextlib.suppress(ModelLoadError):
        verify(import_model(bytes(raw)), "captured")


def _small() -> bytes:
    return model([N("Relu", ["x"], ["h"]), N("LeakyRelu", ["h"], ["y"], alpha=0.5)]).SerializeToString()


@examples(100)
@given(st.binary(max_size=3000))
def test_random_bytes_never_crash(raw: bytes) -> None:
    """Random bytes are refused with the one error."""
    with pytest.raises(ModelLoadError):
        import_model(raw)


def test_deep_nesting_is_refused() -> None:
    """Subgraphs nested beyond protobuf's own limit are refused, not a stack overflow."""
    n = N("Constant", [], ["k"], value=tensor("", BIG))
    body = n.SerializeToString()

    def field(number: int, content: bytes) -> bytes:
        size, out = len(content), bytearray([number << 3 | 2])
        while size > 0x7F:
            out.append(size & 0x7F | 0x80)
            size >>= 7
        return bytes([*out, size]) + content

    for _ in range(80):  # graph { node { attribute { graph ... } } }
        body = field(5, field(6, field(1, body)))
    raw = field(7, field(1, body))
    with pytest.raises(ModelLoadError, match="deep"):
        import_model(raw)


def test_a_map_of_a_file_is_shared_and_empty_files_are_empty(tmp_path: pathlib.Path) -> None:
    """Mapping needs no length; an empty file, which cannot be mapped, is no bytes."""
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "b").write_bytes(b"")

    assert bytes(map_file(tmp_path / "a")) == b"abc"
    assert bytes(map_file(tmp_path / "b")) == b""


def test_attribute_kinds_survive_the_file(tmp_path: pathlib.Path) -> None:
    """Small and large attributes side by side."""
    n = N("Constant", [], ["c"])
    n.attribute.append(ATTR("value", tensor("", np.arange(5000))))
    path = tmp_path / "m.onnx"
    path.write_bytes(model([n, N("Identity", ["c"], ["y"])], [], [info("y", None)]).SerializeToString())

    assert import_model(path).constants[0].data is not None

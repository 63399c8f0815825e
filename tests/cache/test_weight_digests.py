"""Digests of mapped weights: hashed once for a file that stays as it is, by whichever process came first."""

from __future__ import annotations

import json
import os
import pathlib
import time

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from xrt_core.cache.disk import FileDigests
from xrt_core.frontends.onnx_import import import_model
from xrt_core.ir import function
from xrt_core.ir.function import graph_fingerprint, remembering
from xrt_core.ir.graph import Graph

SHAPE = (64, 64)


@pytest.fixture
def model(tmp_path: pathlib.Path) -> pathlib.Path:
    """A model with a large weight in the file itself, last changed a minute ago."""
    path = tmp_path / "model.onnx"
    save(path, 1.0)
    return path


def save(path: pathlib.Path, value: float) -> None:
    """y = x @ w with every element of w the same."""
    w = numpy_helper.from_array(np.full(SHAPE, value, np.float32), "w")
    io = [helper.make_tensor_value_info(n, TensorProto.FLOAT, SHAPE) for n in "xy"]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", io[:1], io[1:], [w])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the arrays whose contents were read."""
    seen: list[int] = []
    content = function._content

    def note(array: np.ndarray) -> object:
        if array.nbytes > 1000:
            seen.append(array.nbytes)
        return content(array)

    monkeypatch.setattr(function, "_content", note)
    # a file's time of change cannot be set, so the test looks at it from a later time
    later = time.time_ns() + int(10e9)
    monkeypatch.setattr(time, "time_ns", lambda: later)
    return seen


def digest(model: pathlib.Path, folder: pathlib.Path) -> str:
    """The fingerprint of a model as a new process would have it."""
    graph: Graph = import_model(model)
    memory = FileDigests(folder)
    with remembering(memory):
        found = graph_fingerprint(graph)
    memory.flush()
    return found


def test_an_unchanged_file_is_hashed_once(model: pathlib.Path, tmp_path: pathlib.Path, hashed: list[int]) -> None:
    """The second process gives the same fingerprint without reading the weights; as do those without a memory."""
    first = digest(model, tmp_path / "cache")
    assert hashed == [4 * 64 * 64]
    assert digest(model, tmp_path / "cache") == first
    assert len(hashed) == 1
    assert graph_fingerprint(import_model(model)) == first


@pytest.mark.parametrize("how", ["written", "replaced", "same size and time"])
def test_a_changed_file_is_hashed_again(
    model: pathlib.Path, tmp_path: pathlib.Path, hashed: list[int], how: str
) -> None:
    """However the file changes, even with its time of modification put back, the new weights count."""
    before = digest(model, tmp_path / "cache")
    times = model.stat()
    if how == "replaced":
        save(tmp_path / "new.onnx", 2.0)
        (tmp_path / "new.onnx").rename(model)
    else:
        save(model, 2.0)
    if how == "same size and time":
        os.utime(model, ns=(times.st_atime_ns, times.st_mtime_ns))
    after = digest(model, tmp_path / "cache")

    assert after != before
    assert len(hashed) == 2
    assert after == graph_fingerprint(import_model(model))


def test_a_file_that_may_still_change_is_not_remembered(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A change within the same tick of the file system's clock would not be seen, so fresh files wait."""
    digest(model, tmp_path / "cache")

    assert list((tmp_path / "cache").rglob("*.json")) == []


@pytest.mark.parametrize("damage", ["cut", "flipped digest", "not json", "no dict", "others may write"])
def test_damaged_tables_are_ignored(
    model: pathlib.Path, tmp_path: pathlib.Path, hashed: list[int], damage: str
) -> None:
    """They are hashed anew and written anew."""
    first = digest(model, tmp_path / "cache")
    (table,) = (tmp_path / "cache").rglob("*.json")
    text = table.read_text()
    if damage == "cut":
        table.write_text(text[:-20])
    elif damage == "flipped digest":
        (_, old), *_ = json.loads(text)["digests"].items()
        table.write_text(text.replace(old, old[::-1]))
    elif damage == "not json":
        table.write_bytes(b"\xff\xfe")
    elif damage == "no dict":
        table.write_text("[]")
    else:
        table.chmod(0o666)
    assert digest(model, tmp_path / "cache") == first
    assert len(hashed) == 2
    assert digest(model, tmp_path / "cache") == first
    assert len(hashed) == 2


def test_arrays_in_memory_are_hashed_every_time(tmp_path: pathlib.Path, hashed: list[int]) -> None:
    """Nothing is known of where they come from."""
    for _ in range(2):
        memory = FileDigests(tmp_path)
        with remembering(memory):
            function.array_digest(np.ones(2000, np.float32))
        memory.flush()

    assert hashed == [8000, 8000]
    assert list(tmp_path.rglob("*.json")) == []


def test_a_transposed_view_of_a_mapped_array_is_not_mistaken_for_it(
    model: pathlib.Path, tmp_path: pathlib.Path, hashed: list[int]
) -> None:
    """It starts at the same place of the file and holds other contents."""
    (w,) = (v.data for v in import_model(model).constants)
    assert w is not None
    memory = FileDigests(tmp_path / "cache")
    with remembering(memory):
        function.array_digest(w)
        function.array_digest(w.T)

    assert len(hashed) == 2

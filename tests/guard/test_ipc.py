"""What is exchanged with a worker: functions, mapped weights and arrays arrive as they were."""

from __future__ import annotations

import os
import pathlib

import numpy as np
import pytest

from xrt_core.errors import ModelLoadError
from xrt_core.frontends.onnx_export import save
from xrt_core.frontends.onnx_import import import_function
from xrt_core.guard import ipc
from xrt_core.ir.function import Function
from xrt_core.ir.graph import Annotations, Graph, Node, Value
from xrt_core.ir.long_list import LongList
from xrt_core.testing import functions
from xrt_core.testing.processes import run_python


def test_a_function_with_its_constants(tmp_path: pathlib.Path) -> None:
    """Same fingerprint on the other side; constants that lie in no file are written once."""
    function, _ = functions.chain()
    ipc.write_function(function, tmp_path)
    back = ipc.read_function(tmp_path)
    assert back.fingerprint == function.fingerprint
    assert back.as_text() == function.as_text()


def test_types_and_annotations(tmp_path: pathlib.Path) -> None:
    """Engines say yes or no by the types of inner values, and folding by annotations."""
    function = functions.update(8)
    mark = Annotations(phase="train", model_update=True, aliases=((0, 0),), sbp=("broadcast",))
    nodes = [n.replace(annotations=mark) for n in function.body.nodes]
    marked = Function(
        function.name, function.params, function.returns, function.body.replace(nodes=nodes), function.aliases
    )
    ipc.write_function(marked, tmp_path)
    back = ipc.read_function(tmp_path)
    assert back.fingerprint == marked.fingerprint
    assert back.aliases == marked.aliases
    for a, b in zip(back.body.nodes, marked.body.nodes, strict=True):
        assert a.annotations == b.annotations
        assert [v and v.type for v in a.outputs] == [v and v.type for v in b.outputs]
        assert [v and v.type for v in a.inputs] == [v and v.type for v in b.inputs]


def test_mapped_weights_stay_where_they_are(tmp_path: pathlib.Path) -> None:
    """A model's large weights are referred to by path and offset, not copied, whichever file they lie in."""
    weights = Value.constant(np.random.default_rng(0).standard_normal((512, 512), np.float32), "w")
    x, y = functions.value("x", 4, 512), functions.value("y", 4, 512)
    made = functions.function("big", [x], [functions.node("MatMul", [x, weights], [y])], [y])
    for external in (False, True):
        folder = tmp_path / f"model-{external}"
        folder.mkdir()
        save(made, folder / "m.onnx", external_data=external)
        function = import_function(folder / "m.onnx")
        job = tmp_path / f"job-{external}"
        job.mkdir()
        ipc.write_function(function, job)
        assert sum(f.stat().st_size for f in job.iterdir()) < 10_000
        assert ipc.read_function(job).fingerprint == function.fingerprint


def test_weights_of_a_file_that_has_changed_are_copied(tmp_path: pathlib.Path) -> None:
    """The caller computes with what is mapped, so that is sent, and not what the file has become."""
    weights = Value.constant(np.random.default_rng(0).standard_normal((64, 64), np.float32), "w")
    x, y = functions.value("x", 4, 64), functions.value("y", 4, 64)
    path = tmp_path / "m.onnx"
    save(functions.function("f", [x], [functions.node("MatMul", [x, weights], [y])], [y]), path)
    function = import_function(path)
    other = path.with_suffix(".new")
    other.write_bytes(bytes(path.stat().st_size))
    os.replace(other, path)
    job = tmp_path / "job"
    job.mkdir()
    ipc.write_function(function, job)
    assert ipc.read_function(job).fingerprint == function.fingerprint


def test_arrays(tmp_path: pathlib.Path) -> None:
    """Every dtype, scalars, empty ones and views, bit for bit."""
    import ml_dtypes

    arrays = [
        np.float32(3).reshape(()), np.zeros((0, 3), np.int64), np.arange(12, dtype=np.float16).reshape(3, 4).T,
        np.array([True, False]), np.arange(5).astype(ml_dtypes.bfloat16), np.arange(4).astype(np.complex64),
    ]  # fmt: skip
    back = ipc.read_arrays(tmp_path, ipc.write_arrays(arrays, tmp_path))
    for a, b in zip(arrays, back, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.tobytes() == b.tobytes()


def test_long_lists_of_attributes(tmp_path: pathlib.Path) -> None:
    """They are written packed, and are on the other side what they were."""
    values = tuple(range(200)) * 50
    x, y = functions.value("x", 2, 3), functions.value("y", 2, 3)
    lists = {"a": values, "b": tuple(map(float, values)), "c": ("u", "v") * 999}
    attributes = {k: LongList.of(v) for k, v in lists.items()}
    node = Node("Any", [x], [y], attributes, domain="com.acme", version=1)  # type: ignore[arg-type]
    function = Function.from_graph(Graph([x], [y], [node], opsets={"com.acme": 1}), name="f")
    ipc.write_function(function, tmp_path)
    assert (tmp_path / "function.onnx").stat().st_size < 70_000  # 82_000 where each element is a field
    back = ipc.read_function(tmp_path)
    assert back.fingerprint == function.fingerprint
    assert back.body.nodes[0].attributes == attributes


def test_truncated_data_is_refused(tmp_path: pathlib.Path) -> None:
    """Data that is shorter than the model says is an error, not numbers."""
    weights = Value.constant(np.ones((64, 64), np.float32), "w")
    x, y = functions.value("x", 4, 64), functions.value("y", 4, 64)
    ipc.write_function(functions.function("f", [x], [functions.node("MatMul", [x, weights], [y])], [y]), tmp_path)
    data = tmp_path / "function.data"
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(ModelLoadError, match="truncated"):
        ipc.read_function(tmp_path)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_process_that_ends_removes_the_folders_of_killed_children(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child that was killed, as by a pool, cannot remove its folder; its parent does at its end."""
    code = """
import os, signal
from xrt_core.guard.ipc import process_folder
process_folder()
pid = os.fork()
if not pid:
    process_folder()
    os.kill(os.getpid(), signal.SIGKILL)
os.waitpid(pid, 0)
print(len(os.listdir(os.environ["TMPDIR"])))
"""
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    assert run_python(code) == "2"
    assert list(tmp_path.iterdir()) == []

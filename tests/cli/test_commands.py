"""The command line end to end: a real model file through the real module, and the errors that only those can make."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from typer.testing import CliRunner, Result

from tests.fake_engines import fake_engine
from xrt_core.cli.app import application

Xrt = Callable[..., Result]


@pytest.fixture
def model(tmp_path: pathlib.Path) -> pathlib.Path:
    """y = Relu(x + w) with x: float32[batch, 3], where w is a constant and bias an input that has a default."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3])
    bias = helper.make_tensor_value_info("bias", TensorProto.FLOAT, [3])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3])
    nodes = [helper.make_node("Add", ["x", "bias"], ["s"], "sum"), helper.make_node("Relu", ["s"], ["y"], "act")]
    default = helper.make_tensor("bias", TensorProto.FLOAT, [3], [1.0, 2.0, 3.0])
    graph = helper.make_graph(nodes, "small", [x, bias], [y], [default])
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
    return path


@pytest.fixture
def xrt() -> Xrt:
    """Runs the command with these arguments."""
    return lambda *arguments: CliRunner().invoke(application(), [str(a) for a in arguments])


def test_run_on_the_host(xrt: Xrt, model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Inputs from a file, one left out that has a default, results in a file."""
    np.savez(tmp_path / "x.npz", x=np.array([[-9, 0, 1]], np.float32))

    done = xrt("run", model, "-e", "host", "-i", tmp_path / "x.npz", "--output", tmp_path / "y.npz")

    assert done.exit_code == 0, done.output
    assert "2 nodes on the host" in done.stdout
    with np.load(tmp_path / "y.npz") as results:
        np.testing.assert_array_equal(results["y"], np.array([[0, 2, 4]], np.float32))


def test_random_shapes(xrt: Xrt, model: pathlib.Path) -> None:
    """A symbolic dimension is 1 unless --shape says otherwise; inputs with a default are left out."""
    assert "float32[1, 3]" in xrt("run", model, "-e", "host").stdout
    done = xrt("run", model, "-e", "host", "--shape", "batch=5")
    assert done.stdout.count("float32[5, 3]") == 2
    assert "  bias" not in done.stdout


def test_partition_on_the_host(xrt: Xrt, model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Every host node has its reason; the exported model is valid ONNX that computes the same."""
    done = xrt("partition", model, "-e", "host", "--report", tmp_path / "r.json", "--onnx", tmp_path / "out.onnx")

    assert done.exit_code == 0, done.output
    assert "on the host:" in done.stdout
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["nodes"] == 2
    assert report["node_share"] == 0
    onnx.checker.check_model(tmp_path / "out.onnx")
    again = xrt("run", tmp_path / "out.onnx", "-e", "host")
    assert again.exit_code == 0, again.output


@pytest.mark.tiny_clusters  # a cluster of two nodes is shown
@pytest.mark.parametrize("stage", ["captured", "optimised", "partitioned"])
def test_stages_as_onnx(xrt: Xrt, model: pathlib.Path, tmp_path: pathlib.Path, stage: str) -> None:
    """Each stage is valid ONNX that computes the same; the partition's clusters are functions that name an engine."""
    np.savez(tmp_path / "x.npz", x=np.array([[-9, 0, 1]], np.float32))
    out = tmp_path / "out.onnx"
    with fake_engine():
        options = ("--option", "prune=False", "-i", tmp_path / "x.npz", "-o", out)
        done = xrt("export", model, "-e", "fake", "--stage", stage, *options)
    assert done.exit_code == 0, done.output
    assert "valid ONNX" in done.stdout

    made = onnx.load(out)
    onnx.checker.check_model(made, full_check=True)
    clusters = [f for f in made.functions if f.domain == "xrt.cluster"]
    named = [p.value for f in clusters for p in f.metadata_props if p.key == "xrt.engine"]
    assert named == (["fake"] if stage == "partitioned" else [])
    shape = [d.dim_value for d in made.graph.input[0].type.tensor_type.shape.dim]
    assert shape == ([0, 3] if stage == "captured" else [1, 3])
    again = xrt("run", out, "-e", "host", "-i", tmp_path / "x.npz", "--output", tmp_path / "y.npz")
    assert again.exit_code == 0, again.output
    with np.load(tmp_path / "y.npz") as results:
        np.testing.assert_array_equal(results["y"], np.array([[0, 2, 4]], np.float32))


def test_pictures_and_the_difference_of_two(xrt: Xrt, model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A page, a DOT file; equal reports have no difference and exit code 0, others are compared, with exit code 1."""
    files = ["--html", tmp_path / "p.html", "--dot", tmp_path / "p.dot", "--report", tmp_path / "a.json"]
    done = xrt("partition", model, "-e", "host", *files)

    assert done.exit_code == 0, done.output
    assert "cytoscape" in (tmp_path / "p.html").read_text()
    assert (tmp_path / "p.dot").read_text().startswith("digraph")
    same = xrt("partition", "--diff", tmp_path / "a.json", tmp_path / "a.json")
    assert (same.exit_code, same.stdout.strip()) == (0, "no difference")
    report = json.loads((tmp_path / "a.json").read_text())
    report["host_nodes"][0]["reason"] = "another"
    (tmp_path / "b.json").write_text(json.dumps(report))
    other = xrt("partition", "--diff", tmp_path / "a.json", tmp_path / "b.json")
    assert other.exit_code == 1
    assert "-> another" in other.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["partition"], "give a model, or two reports with --diff"),
        (["partition", "MODEL", "--diff", "WRONG", "WRONG"], "it takes no model"),
        (["partition", "--diff", "RANDOM", "RANDOM"], "JSON is malformed"),
        (["run", "/no/such/model.onnx"], "/no/such/model.onnx"),
        (["run", "FOLDER"], "FOLDER"),
        (["run", "RANDOM"], "RANDOM"),
        (["run", "MODEL", "-e", "nonsense"], "there is no engine 'nonsense'"),
        (["run", "MODEL", "-e", "host", "-i", "WRONG"], "unknown input 'z'"),
        (["run", "MODEL", "-e", "host", "--shape", "x=4"], "shape [4] given"),
        (["partition", "MODEL", "-o", "guard_timeout=0"], "a number of seconds above 0"),
    ],
)
def test_bad_input(
    xrt: Xrt, model: pathlib.Path, tmp_path: pathlib.Path, arguments: list[str], message: str
) -> None:
    """Each is one line with the cause, exit code 2, and nothing on stdout."""
    (tmp_path / "random.onnx").write_bytes(np.random.default_rng(0).bytes(1000))
    np.savez(tmp_path / "wrong.npz", z=np.zeros(1))
    names = {"MODEL": model, "FOLDER": tmp_path, "RANDOM": tmp_path / "random.onnx", "WRONG": tmp_path / "wrong.npz"}

    done = xrt(*(names.get(a, a) for a in arguments))

    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert str(names.get(message, message)) in done.stderr

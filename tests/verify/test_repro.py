"""Bundles: written, read, replayed; and the commands `xrt bisect` and `xrt replay`."""

from __future__ import annotations

import json
import pathlib
import zipfile
from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from typer.testing import CliRunner

from tests.verify.planted import deep, value
from xrt_core.cli.app import application
from xrt_core.engine import engines
from xrt_core.engine.contract import CompileOptions, Executable, Function, GraphCompiler
from xrt_core.errors import CompileError, ModelLoadError
from xrt_core.frontends import onnx_export
from xrt_core.guard.replay import replay
from xrt_core.ir.function import Parameter
from xrt_core.ir.graph import Graph, Value
from xrt_core.testing.functions import node
from xrt_core.testing.host_engine import HostEngine
from xrt_core.verify.inputs import synthesize_inputs
from xrt_core.verify.repro import Bundle, make_bundle, read_bundle, save_bundle, write_bundle


class Suspect(HostEngine):
    """Its Erf is too large by a half, and its compiler fails on Sigmoid of seven columns."""

    name = "suspect"
    wrong = True

    def compiler(self, device: str, options: CompileOptions) -> GraphCompiler:
        return SuspectCompiler(super().compiler(device, options), type(self).wrong)


class SuspectCompiler(GraphCompiler):
    def __init__(self, inner: GraphCompiler, wrong: bool) -> None:
        self.inner, self.wrong = inner, wrong

    def compile(self, function: Function, *parts: Any) -> Executable:
        if any(n.op_type == "Sigmoid" and n.outputs[0].shape[-1] == 7 for n in function.body.nodes):  # type: ignore
            raise CompileError("no seven columns")
        return Spoilt(function) if self.wrong else self.inner.compile(function, *parts)


class Spoilt(Executable):
    def __init__(self, function: Function) -> None:
        self.function = function

    def run(self, inputs: Sequence[Any], run_options: Any = None, block_until_done: bool = True) -> Sequence[Any]:
        from xrt_core.host.executor import run_node

        env = dict(zip(self.function.body.inputs, inputs, strict=True))
        for n in self.function.body.nodes:
            given = [None if v is None else v.data if v.data is not None else env[v] for v in n.inputs]
            results = run_node(n, given)
            off = np.float32(0.5 if n.op_type == "Erf" else 0)
            env.update((v, r + off) for v, r in zip(n.outputs, results, strict=False) if v is not None)
        return [env[v] for v in self.function.body.outputs]


@pytest.fixture
def suspect() -> Iterator[type[Suspect]]:
    engines.register(Suspect)
    yield Suspect
    Suspect.wrong = True
    engines.unregister("suspect")


def bundle(function: Function, **changes: Any) -> Bundle:
    found = make_bundle(function, Suspect(), "cpu", CompileOptions(fused=False, threads=2), "wrong", "it is wrong",
                      synthesize_inputs(function), "said\nmuch")  # fmt: skip
    return Bundle(**({f: getattr(found, f) for f in found.__dataclass_fields__} | changes))


def test_a_bundle_comes_back(tmp_path: pathlib.Path) -> None:
    """Function, types of inner values, options, inputs and words survive the file."""
    function = deep(20)
    write_bundle(bundle(function), tmp_path / "b.xrtbundle")
    found = read_bundle(tmp_path / "b.xrtbundle")

    assert found.function.fingerprint == function.fingerprint
    assert [str(v.type) for n in found.function.body.nodes for v in n.outputs if v is not None] == [
        str(v.type) for n in function.body.nodes for v in n.outputs if v is not None
    ]
    assert found.options == CompileOptions(fused=False, threads=2)
    assert (found.engine, found.stage, found.error, found.log) == ("suspect", "wrong", "it is wrong", "said\nmuch")
    assert found.inputs is not None
    for a, b in zip(found.inputs, synthesize_inputs(function), strict=True):
        np.testing.assert_array_equal(a, b)
    assert [p.name for p in tmp_path.iterdir()] == ["b.xrtbundle"]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int8, np.int64])
def test_large_weights_are_made_again(tmp_path: pathlib.Path, dtype: Any) -> None:
    """A megabyte of weights takes no room, and comes back as constants of its dtype, shape, mean and spread."""
    rng = np.random.default_rng(0)
    weights = (rng.standard_normal((512, 512)) * 10 + 20).astype(dtype)
    small = np.arange(4, dtype=np.int64)
    x, y, z = value("x", (512, 512), dtype), value("y", (512, 512), dtype), value("z", (4, 512), dtype)
    nodes = [node("Max" if dtype == np.int8 else "Add", [x, Value.constant(weights)], [y]),
             node("Gather", [y, Value.constant(small)], [z], axis=0)]  # fmt: skip
    function = Function.from_graph(Graph([x], [z], nodes, opsets={"": 21}, name="big"))
    write_bundle(bundle(function, inputs=None), tmp_path / "b.xrtbundle")

    found = read_bundle(tmp_path / "b.xrtbundle")

    assert (tmp_path / "b.xrtbundle").stat().st_size < 20_000
    assert found.inputs is None
    assert len(found.function.params) == 1
    made, kept = (found.function.body.nodes[i].inputs[1].data for i in (0, 1))  # type: ignore[union-attr]
    assert made is not None
    assert (made.dtype, made.shape) == (weights.dtype, weights.shape)
    assert abs(float(made.astype(float).mean()) - 20) < 10
    np.testing.assert_array_equal(kept, small)


def test_what_is_known_of_elements_stays(tmp_path: pathlib.Path) -> None:
    """Sizes that the function gets as numbers are made up as what they are, beside weights that are made again."""
    x, shape, y = value("x", (4, 1)), value("shape", (2,), np.int64), value("y", (4, 512))
    wide, weight = value("wide", (4, 512)), Value.constant(np.ones(512, np.float32))
    nodes = [node("Expand", [x, shape], [wide]), node("Add", [wide, weight], [y])]
    plain = Function.from_graph(Graph([x, shape], [y], nodes, opsets={"": 21}, name="f"))
    params = [plain.params[0], Parameter("shape", np.dtype(np.int64), (2,), (4, 512))]
    function = Function("f", params, plain.returns, plain.body)
    write_bundle(bundle(function, inputs=None), tmp_path / "b.xrtbundle", large=512)
    assert read_bundle(tmp_path / "b.xrtbundle").function.params == function.params


def test_what_is_no_bundle(tmp_path: pathlib.Path) -> None:
    """Missing, foreign, damaged and future files are refused with the reason."""
    with pytest.raises(ModelLoadError, match="does not exist"):
        read_bundle(tmp_path / "nothing")
    foreign = tmp_path / "foreign"
    foreign.write_bytes(b"not a zip")
    with pytest.raises(ModelLoadError, match="not a bundle"):
        read_bundle(foreign)
    path = tmp_path / "b.xrtbundle"
    write_bundle(bundle(deep(5)), path)
    damaged = path.read_bytes()
    path.write_bytes(damaged[: len(damaged) // 2])
    with pytest.raises(ModelLoadError, match="not a bundle"):
        read_bundle(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("manifest.json", json.dumps({"format": 99}))
    with pytest.raises(ModelLoadError, match="format 99"):
        read_bundle(path)


def test_a_folder_of_bundles_is_bounded(tmp_path: pathlib.Path) -> None:
    """The same failure has one file, and the number of files is bounded."""
    for count in (3, 4, 4, 5, 6):
        save_bundle(bundle(deep(count)), tmp_path / "bundles", most=3)
    assert len(list((tmp_path / "bundles").iterdir())) == 3


def test_replay_says_whether_it_still_fails(suspect: type[Suspect]) -> None:
    """Wrong while the engine is; right once it is mended; a compiler that fails says so."""
    found = replay(bundle(deep(12)), suspect())
    assert found.fails
    assert "out of bounds" in found.text
    suspect.wrong = False
    assert not replay(bundle(deep(12)), suspect()).fails

    x, y = value("x", (2, 7)), value("y", (2, 7))
    seven = Function.from_graph(Graph([x], [y], [node("Sigmoid", [x], [y])], opsets={"": 21}, name="seven"))
    assert "no seven columns" in replay(bundle(seven, inputs=None), suspect()).text


def xrt(*arguments: object) -> Any:
    return CliRunner().invoke(application(), [str(a) for a in arguments])


def test_the_commands_end_to_end(tmp_path: pathlib.Path, suspect: type[Suspect]) -> None:
    """`xrt bisect` names every faulty node with its errors and leaves a bundle of each; `xrt replay` fails on it
    until the engine is mended."""
    function = deep(40)
    faulty = [i for i, n in enumerate(function.body.nodes) if n.op_type == "Erf"]
    onnx_export.save(function.body, tmp_path / "model.onnx")

    found = xrt("bisect", tmp_path / "model.onnx", "--engine", "suspect", "--bundle", tmp_path / "bundles")

    assert found.exit_code == 1, found.output
    assert f"{len(faulty)} of 40 nodes are faulty, found with " in found.output
    assert found.output.count(" Erf ") == len(faulty)
    assert " 0.5" in found.output  # the largest error, of Erf's largest value
    left = list((tmp_path / "bundles").iterdir())
    assert left
    assert len(read_bundle(left[0]).function.body.nodes) == 1

    again = xrt("replay", left[0], "--here", "--onnx", tmp_path / "node.onnx")
    assert again.exit_code == 1
    assert "still fails: it compiles, and is wrong" in again.output
    assert (tmp_path / "node.onnx").exists()
    suspect.wrong = False
    assert "fixed" in xrt("replay", left[0], "--here").output
    right = xrt("bisect", tmp_path / "model.onnx", "--engine", "suspect")
    assert (right.exit_code, "right (40 nodes)" in right.output) == (0, True)


def test_bisect_takes_the_callers_inputs(tmp_path: pathlib.Path, suspect: type[Suspect]) -> None:
    """Given inputs are used, and a bad file of them is an error of the user."""
    function = deep(12)
    onnx_export.save(function.body, tmp_path / "model.onnx")
    np.savez(tmp_path / "in.npz", x=np.full((4, 6), 0.5, np.float32), y=np.ones((4, 6), np.float32))
    found = xrt("bisect", tmp_path / "model.onnx", "-e", "suspect", "-i", tmp_path / "in.npz")
    assert found.exit_code == 1
    assert xrt("bisect", tmp_path / "model.onnx", "-e", "suspect", "-i", tmp_path / "no.npz").exit_code == 2
    assert xrt("replay", tmp_path / "no.npz").exit_code == 2


@pytest.mark.slow
def test_replay_in_another_process(tmp_path: pathlib.Path) -> None:
    """By default the engine works in another process; here a right one, and one that cannot be imported there."""
    pytest.importorskip("onnxruntime")
    write_bundle(bundle(deep(8), engine="onnxruntime"), tmp_path / "b.xrtbundle")
    found = xrt("replay", tmp_path / "b.xrtbundle")
    assert found.exit_code == 0, found.output
    assert "now: fixed: it compiles, and its results are right" in found.output
    write_bundle(bundle(deep(8), engine="suspect"), tmp_path / "b.xrtbundle")
    assert xrt("replay", tmp_path / "b.xrtbundle").exit_code == 2

"""The command line against a stand-in module: arguments, output, exit codes."""

from __future__ import annotations

import json
import pathlib
import re
import sys
import tomllib
import types
from collections.abc import Callable

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper
from typer.testing import CliRunner, Result

from tests.cli.fake_module import FakeModule
from xrt_core import __version__
from xrt_core.cli import cuda_report
from xrt_core.cli.app import COMMANDS, application
from xrt_core.cli.inputs import parse_shapes, random_inputs, read_inputs, write_outputs
from xrt_core.engine import cuda
from xrt_core.errors import InputError, OptionError
from xrt_core.ir.types import SequenceType, TensorType
from xrt_core.testing.processes import run_python

Xrt = Callable[..., Result]


@pytest.fixture
def xrt(monkeypatch: pytest.MonkeyPatch) -> Xrt:
    """Runs the command with these arguments, FakeModule in the place of XRTModule."""
    fake = types.ModuleType("xrt_core.module")
    fake.XRTModule = FakeModule  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "xrt_core.module", fake)
    monkeypatch.delenv("XRT_DEBUG", raising=False)
    return lambda *arguments: CliRunner().invoke(application(), [str(a) for a in arguments])


@pytest.fixture
def model(tmp_path: pathlib.Path) -> pathlib.Path:
    """A file that exists."""
    path = tmp_path / "model.onnx"
    path.write_bytes(b"")
    return path


def test_run_shows_types_summary_and_times(xrt: Xrt, model: pathlib.Path) -> None:
    """A plain run makes inputs, prepares, runs once, and says where it ran; no escape codes when piped."""
    done = xrt("run", model)

    assert done.exit_code == 0, done.output
    assert FakeModule.runs == 1
    assert "float32[1, 3]" in done.stdout
    assert "sequence of 1" in done.stdout
    assert "1 of 1 nodes in 1 cluster on fake" in done.stdout
    assert "compile" in done.stdout
    assert "\x1b" not in done.output
    assert done.stderr == ""


def test_run_writes_a_timeline(xrt: Xrt, model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """--timeline: one more run, its steps as trace events."""
    done = xrt("run", model, "--timeline", tmp_path / "t.json")

    assert done.exit_code == 0, done.output
    assert FakeModule.runs == 2
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert [(e["name"], e["dur"]) for e in events if e["ph"] == "X"] == [("double", 250_000)]


def test_run_passes_engines_and_options(xrt: Xrt, model: pathlib.Path) -> None:
    """--engine and --option reach the module as clean keywords."""
    done = xrt("run", model, "-e", "tensorrt", "-e", "xla", "-o", "minimum_nodes=4", "-o", "strict_clustering=off")

    assert done.exit_code == 0, done.output
    assert FakeModule.made == (model, {"minimum_nodes": 4, "strict_clustering": False, "engine": ["tensorrt", "xla"]})


def test_run_reads_and_writes_npz(xrt: Xrt, model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """--inputs gives the values, --output holds the results, --repeat runs that often."""
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.savez(tmp_path / "x.npz", x=x, flag=np.array([1]))

    done = xrt("run", model, "--inputs", tmp_path / "x.npz", "--output", tmp_path / "y", "--repeat", 3)

    assert done.exit_code == 0, done.output
    assert FakeModule.runs == 3
    assert "3 runs: median" in done.stdout
    with np.load(tmp_path / "y") as results:
        np.testing.assert_array_equal(results["y"], 2 * x)
        assert set(results.files) == {"y", "parts[0]"}


def test_partition(xrt: Xrt, model: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report is printed, written as JSON, and the model is exported."""
    saved: list[object] = []
    exporter = types.ModuleType("xrt_core.frontends.onnx_export")
    exporter.save = lambda graph, path: saved.append(path)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "xrt_core.frontends.onnx_export", exporter)
    monkeypatch.setattr("xrt_core.frontends.onnx_export", exporter, raising=False)

    done = xrt("partition", model, "--report", tmp_path / "r.json", "--onnx", tmp_path / "out.onnx")

    assert done.exit_code == 0, done.output
    assert "cluster 0 -> fake [1 node]" in done.stdout
    assert json.loads((tmp_path / "r.json").read_text()) == {"clusters": []}
    assert saved == [tmp_path / "out.onnx"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "missing.onnx"], "missing.onnx: there is no such file"),
        (["run", "MODEL", "-o", "minimum_nodes=0"], "from --option minimum_nodes=0); it takes an integer of at least"),
        (["run", "MODEL", "-o", "minimum_node=1"], "did you mean 'minimum_nodes'"),
        (["run", "MODEL", "-o", "strict"], "it takes NAME=VALUE"),
        (["run", "MODEL", "--inputs", "none.npz"], "none.npz does not exist"),
        (["run", "MODEL", "--inputs", "MODEL"], "cannot be read as .npz"),
        (["run", "MODEL", "--inputs", "MODEL", "--random"], "--random and --shape cannot be combined with it"),
        (["run", "MODEL", "--shape", "x=a,b"], "it takes NAME=DIM,DIM"),
        (["run", "MODEL", "--shape", "z=1"], "no input or dimension 'z'; there are x, flag, batch"),
        (["run", "MODEL", "--output", "MODEL/y.npz"], "/y.npz: Not a directory"),
        (["partition", "MODEL", "--report", "no/such/folder/r.json"], "No such file or directory"),
    ],
)
def test_errors_are_one_line(xrt: Xrt, model: pathlib.Path, arguments: list[str], message: str) -> None:
    """A user's error is one line on stderr, exit code 2, no traceback."""
    done = xrt(*(a.replace("MODEL", str(model)) for a in arguments))

    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr


def test_debug_shows_the_traceback(xrt: Xrt, monkeypatch: pytest.MonkeyPatch) -> None:
    """XRT_DEBUG=1 adds the traceback."""
    monkeypatch.setenv("XRT_DEBUG", "1")
    done = xrt("run", "missing.onnx")

    assert done.exit_code == 2
    assert "Traceback" in done.stderr


def test_a_bug_is_told_apart(xrt: Xrt, model: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception that is not ours has exit code 3 and asks to be reported."""
    monkeypatch.setattr(FakeModule, "run", lambda self, inputs: 1 // 0)
    done = xrt("run", model)

    assert done.exit_code == 3
    assert "internal error: ZeroDivisionError" in done.stderr


def test_version_and_engines(xrt: Xrt) -> None:
    """--version prints it; engines lists the host first, as a table and as JSON."""
    assert xrt("--version").stdout == f"xrt-core {__version__}\n"
    assert xrt("engines").stdout.splitlines()[1].split()[:3] == ["host", "ready", "cpu"]
    listed = json.loads(xrt("engines", "--json").stdout)["engines"]
    assert listed[0]["name"] == "host"
    assert set(listed[0]) >= {"name", "package", "version", "status", "devices", "reason", "remedy"}


def test_doctor(xrt: Xrt, monkeypatch: pytest.MonkeyPatch) -> None:
    """It shows versions and settings; a bad variable and a stray name are problems with cures and exit code 1."""
    done = xrt("doctor")
    assert done.exit_code == 0, done.output
    assert re.search(rf"xrt-core +{re.escape(__version__)}", done.stdout)
    assert "no problems found" in done.stdout
    assert re.search(r"devices\n  cpu, of xrt-core: cpu \(.* GiB, .* free\)\n  cuda, of xrt-core: ", done.stdout)
    assert re.search(r"\n  tpu, of xrt-core: (tpu:0|none: there is no TPU on the PCI bus)", done.stdout)

    monkeypatch.setenv("FLAGS_strict_clustering", "maybe")
    monkeypatch.setenv("XRT_DISABLE_PLUGINS", "ghost")
    monkeypatch.setattr("xrt_core.compiler.passes._plugin_passes", {("fuse", "pkg"): "its module is broken"})
    done = xrt("doctor")
    assert done.exit_code == 1
    assert "problem: option 'strict_clustering' cannot be 'maybe' (from environment variable FLAGS_" in done.stdout
    assert "XRT_DISABLE_PLUGINS names 'ghost', which is not installed" in done.stdout
    assert "problem: pass fuse of a plugin is left out: its module is broken" in done.stdout


@pytest.mark.parametrize(
    ("domain", "remedy"),
    [
        ("com.microsoft", "define it by xrt.custom_op('com.microsoft::Fresh')"),
        ("ai.onnx.contrib", "pip install onnxruntime-extensions, whose library the option custom_op_libraries takes"),
        ("com.acme", "install a package that has its operators, or define it by xrt.custom_op('com.acme::Fresh')"),
    ],
)
def test_doctor_of_a_model(xrt: Xrt, tmp_path: pathlib.Path, domain: str, remedy: str) -> None:
    """It lists the operators that nobody defines, each once, with who would."""
    nodes = [helper.make_node("Fresh", [f"v{i}"], [f"v{i + 1}"], f"n{i}", domain=domain) for i in range(2)]
    ends = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [3]) for n in ("v0", "v2")]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(domain, 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets), tmp_path / "m.onnx")
    done = xrt("doctor", str(tmp_path / "m.onnx"))
    assert done.exit_code == 1
    assert done.stdout.count("problem: ") == 1
    assert f"{domain}.Fresh (2 nodes, the first 'n0')" in done.stdout
    assert remedy in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("driver", "installed", "expected"),
    [
        (None, {}, []),
        (None, {"onnxruntime": "1.30", "onnxruntime-gpu": "1.30"}, ["onnxruntime 1.30 and onnxruntime-gpu 1.30"]),
        (None, {"cupy-cuda12x": "14", "cupy-cuda13x": "14"}, ["cupy-cuda13x and cupy-cuda12x exclude each other"]),
        (None, {"tensorrt-rtx-cu13-bindings": "1", "tensorrt-rtx-cu12-bindings": "1"}, ["two builds of one library"]),
        (None, {"jax-cuda12-plugin": "0.11.1", "jaxlib": "0.11.2"}, ["jax-cuda12-plugin 0.11.1 does not fit jaxlib"]),
        (None, {"jax-cuda13-plugin": "0.11.2+local", "jaxlib": "0.11.2"}, []),
        (13, {}, ["there is a GPU, and CuPy is not installed"]),
        (13, {"cupy-cuda13x": "14", "jax": "0.11.2"}, ["JAX has no plugin for it"]),
        (13, {"cupy-cuda13x": "14", "jax-cuda13-plugin": "0.10.1", "jaxlib": "0.11.2"}, ["does not fit jaxlib 0.11.2"]),
        (12, {"cupy-cuda13x": "14"}, ["cupy-cuda13x needs a driver for CUDA 13, and 550.1 is for CUDA up to 12.8"]),
        (12, {"cupy-cuda12x": "14", "cuda-bindings": "13.0.1"}, ["cuda-bindings 13.0.1 needs a driver for CUDA 13"]),
        (13, {"cupy-cuda13x": "14", "cuda-bindings": "12.9.2"}, ["cuda-bindings 12.9.2 for CUDA 12: two"]),
        (12, {"cupy-cuda12x": "14", "tensorrt-rtx-cu13-bindings": "1"}, ["tensorrt-rtx-cu13-bindings needs a"]),
        (12, {"cupy-cuda12x": "14", "jax-cuda13-plugin": "1", "jax": "1"}, ["jax-cuda13-plugin needs a driver"]),
        (12, {"cupy-cuda12x": "14", "cuda-bindings": "12.9.1"}, []),
        (12, {"jax": "0.11.2"}, ["CuPy is not installed", "JAX has no plugin for it"]),
        (13, {"cupy-cuda12x": "14", "tensorrt-cu12": "11.4", "cuda-bindings": "12.9"}, []),
        (13, {"cupy-cuda13x": "14", "cuda-bindings": "13.0.1"}, []),
        (13, {"cupy-cuda13x": "14", "jax-cuda13-plugin": "0.11.2", "jaxlib": "0.11.2", "jax": "0.11.2"}, []),
    ],
)  # fmt: skip
def test_the_doctor_explains_cuda(
    monkeypatch: pytest.MonkeyPatch, driver: int | None, installed: dict[str, str], expected: list[str]
) -> None:
    """What excludes one another, what the driver does not run, and what a machine with a GPU lacks, with the remedy."""
    monkeypatch.setattr(cuda, "driver", lambda: None if driver is None else ("550.1", (driver, 8)))
    monkeypatch.setattr(cuda, "count", lambda: int(driver is not None))
    monkeypatch.setattr(cuda, "why_no_cupy", lambda: "")
    known = cuda_report.libraries([
        ("xrt-tensorrt", "tensorrt-rtx-cu12-bindings==1.7.*; sys_platform == 'linux' and extra == 'rtx-cu12'"),
        ("xrt-tensorrt", "tensorrt-cu13>=10.8; extra == 'cu13'"),
    ])  # fmt: skip
    assert [library.extra for library in known[2:]] == ["xrt-tensorrt[rtx-cu{}]", "xrt-tensorrt[cu{}]"]
    found = list(cuda_report.problems(lambda name: installed.get(name, ""), known))
    assert len(found) == len(expected), found
    for (what, remedy), part in zip(found, expected, strict=True):
        assert part in what
        assert "install" in remedy
        assert driver != 12 or "cuda13]" not in remedy, "this driver does not run it"
    rows = dict(cuda_report.lines(lambda name: installed.get(name, ""), known))
    assert rows["driver"] == ("none" if driver is None else f"550.1, for CUDA up to {driver}.8")


def test_the_doctor_says_why_the_host_cannot_use_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What CuPy says is told where a build for this driver is installed; with a hidden GPU nothing is missing."""
    monkeypatch.setattr(cuda, "driver", lambda: ("580.1", (13, 0)))
    monkeypatch.setattr(cuda, "count", lambda: 1)
    monkeypatch.setattr(cuda, "why_no_cupy", lambda: "CuPy finds no GPU: cudaErrorSystemNotReady")
    installed = {"cupy-cuda13x": "14"}
    ((what, remedy),) = cuda_report.problems(lambda name: installed.get(name, ""), cuda_report.libraries())
    assert what == "the host cannot use the GPU: CuPy finds no GPU: cudaErrorSystemNotReady"
    assert remedy == "pip install --force-reinstall cupy-cuda13x"
    monkeypatch.setattr(cuda, "count", lambda: 0)
    assert not list(cuda_report.problems(lambda name: installed.get(name, ""), cuda_report.libraries()))


def test_extras_are_for_one_version_of_cuda() -> None:
    """What comes without an extra is for every CUDA, an extra for 12 brings nothing for 13, and the other way round."""
    root = pathlib.Path(__file__).parents[2]
    projects = {}
    for file in (root / "pyproject.toml", *root.glob("plugins/*/pyproject.toml")):
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        projects[project["name"]] = project
    for name, project in projects.items():
        assert not re.search(r"cu(da)?1[23]|nvidia-cuda", " ".join(project["dependencies"])), name
        for extra, needs in project.get("optional-dependencies", {}).items():
            for this, other in (("12", "13"), ("13", "12")):
                if re.search(rf"cu(da)?{this}", extra):
                    assert not any(re.search(rf"cu(da)?{other}", n) for n in needs), (name, extra)
                    assert f"{extra[:-2]}{other}" in project["optional-dependencies"], (name, extra)


def test_random_inputs_follow_the_types() -> None:
    """Same seed, same arrays; dims that nobody knows are 1; integers stay within {0, 1}; a scalar can be asked for."""
    inputs = {
        "f": TensorType(np.dtype(np.float64), ("n", 4)),
        "b": TensorType(np.dtype(ml_dtypes.bfloat16), ("n", None)),
        "i": TensorType(np.dtype(np.uint8), (100,)),
        "q": TensorType(np.dtype(ml_dtypes.int4), (100,)),
        "t": TensorType(np.dtype(np.bool_), ()),
        "s": TensorType(np.dtype(object), (2,)),
        "u": TensorType(None, None),
    }
    shapes = parse_shapes(["n=5", "u="], inputs)
    made = random_inputs(inputs, shapes, seed=3)

    assert {n: a.shape for n, a in made.items()} == {
        "f": (5, 4), "b": (5, 1), "i": (100,), "q": (100,), "t": (), "s": (2,), "u": (),
    }  # fmt: skip
    assert {n: a.dtype for n, a in made.items() if inputs[n].dtype is not None} == {
        n: t.dtype for n, t in inputs.items() if t.dtype is not None
    }
    assert set(made["i"]) == {0, 1}
    np.testing.assert_array_equal(made["f"], random_inputs(inputs, shapes, seed=3)["f"])
    assert not np.array_equal(made["f"], random_inputs(inputs, shapes, seed=4)["f"])
    with pytest.raises(InputError, match="shape of input 'u' is not known; give it as --shape u="):
        random_inputs(inputs, {}, seed=0)
    with pytest.raises(InputError, match=r"input 'z' is a sequence\(\?\)"):
        random_inputs({"z": SequenceType(None)}, {}, seed=0)
    with pytest.raises(OptionError, match="dimension 'n' takes one number"):
        parse_shapes(["n=1,2"], inputs)


def test_outputs_survive_the_file(tmp_path: pathlib.Path) -> None:
    """Types that .npz lacks are widened, strings stay strings, and nothing half-written is left behind."""
    path = tmp_path / "y.npz"
    wide = np.array([1.5, -2], ml_dtypes.bfloat16)
    write_outputs(path, {"a/b": wide, "q": np.array([3, -4], ml_dtypes.int4), "s": np.array(["x", "yz"], object)})
    found = read_inputs(path)

    assert found["a/b"].dtype == np.float32
    np.testing.assert_array_equal(found["a/b"], [1.5, -2])
    np.testing.assert_array_equal(found["q"], np.array([3, -4], np.int8))
    assert found["s"].tolist() == ["x", "yz"]
    assert [p.name for p in tmp_path.iterdir()] == ["y.npz"]
    np.save(tmp_path / "one.npy", np.ones(1))
    with pytest.raises(InputError, match="holds one array without a name"):
        read_inputs(tmp_path / "one.npy")


# --- start ---


def test_help_imports_no_command() -> None:
    """`xrt --help` imports neither NumPy nor rich, nor a command; it lists them all, and those of plugins."""
    code = (
        "import sys; sys.argv = ['xrt', '--help']\n"
        "from xrt_core.cli.app import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "seen = {'numpy', 'rich', 'onnx'} & sys.modules.keys()\n"
        "print('imported', sorted(seen | {m for m in sys.modules if m.startswith('xrt_core.cli.')}))"
    )

    found = run_python(code)

    assert all(f"  {name} " in found for name in COMMANDS)
    assert found.splitlines()[-1] == "imported ['xrt_core.cli.app', 'xrt_core.cli.plugin_commands']"


def test_another_command_than_the_one_asked_for_has_its_line() -> None:
    """The table's line is what `xrt --help` shows, whether or not the command is imported."""
    one, every = (CliRunner().invoke(application(asked), ["--help"]).stdout for asked in ("passes", None))

    assert one == every
    assert all(line in one for line in COMMANDS.values())

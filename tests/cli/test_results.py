"""`--json` of every command is of its declared type, errors too; exit codes; docs/cli.md; completion by the shell."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner, Result

import xrt_core as xrt
from tests.docs.test_examples import X, write_model
from xrt_core.cli import inputs, reference, results
from xrt_core.cli.app import application
from xrt_core.cli.display import ExitCode
from xrt_core.profiling import Roofline, roofline
from xrt_core.testing.scorecard import ScoreCard

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "cli.md"
KINDS = {words: type_ for words, _, type_ in reference.commands()}
Run = Callable[..., Result]


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A folder to work in, with a model, inputs, and a cache of its own."""
    monkeypatch.setattr(Roofline, "measure", classmethod(lambda cls: cls(1e10, 1e11, roofline._machine())))
    monkeypatch.setenv("XRT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model.onnx")
    np.savez(tmp_path / "x.npz", x=X)
    return tmp_path


def run(words: str, *arguments: object) -> Result:
    return CliRunner().invoke(application(), [*words.split(), *map(str, arguments)])


def fits(data: Any, kind: Any) -> bool:
    """Whether data is of a type."""
    try:
        msgspec.convert(data, kind, strict=True)
    except msgspec.ValidationError:
        return False
    return True


def found(words: str, *arguments: object, code: int = 0) -> Any:
    """What a command prints with --json, as its type: neither a field more nor one less."""
    done = run(words, *arguments, "--json")
    assert done.exit_code == code, done.output
    data = json.loads(done.stdout)
    kinds = reference.kinds_of(KINDS[words])
    decoded = next(k for k in kinds if k is kinds[-1] or fits(data, k))
    decoded = msgspec.convert(data, decoded, strict=True)
    required = {f.encode_name for f in msgspec.structs.fields(type(decoded)) if f.required}
    assert required <= set(data)
    return decoded


def test_run_partition_inspect_profile_compile(folder: pathlib.Path) -> None:
    """Of a model on the host and on an engine, with every file that there may be beside."""
    ran = found("run", "model.onnx", "-e", "host", "-i", "x.npz", "-n", 3, "--output", "y.npz")
    assert [v.name for v in ran.outputs] == ["y"]
    assert len(ran.run_seconds) == 3
    assert ran.wrote == ["y.npz"]
    assert ran.inputs[0].mean == pytest.approx(float(X.mean()))
    parts = found("partition", "model.onnx", "-e", "host", "--report", "a.json", "--html", "a.html")
    assert parts.nodes == len(parts.host_nodes) == 5
    assert msgspec.convert(json.loads(pathlib.Path("a.json").read_text()), results.Partition) == parts
    assert found("partition", "--diff", "a.json", "a.json").moved == []
    other = json.loads(pathlib.Path("a.json").read_text())
    other["host_nodes"][0]["reason"] = "another"
    pathlib.Path("b.json").write_text(json.dumps(other))
    assert "another" in found("partition", "--diff", "a.json", "b.json", code=ExitCode.FAILED_CHECK).reasons[0]
    assert found("inspect", "model.onnx", "-e", "host").clusters == []
    assert found("profile", "model.onnx", "-e", "host", "-n", 2).calls == 2
    exported = found("export", "model.onnx", "-e", "host", "--stage", "optimised", "-o", "out.onnx")
    assert (exported.file, exported.stage) == ("out.onnx", "optimised")
    written = found("compile", "model.onnx", "-e", "host", "--output", "m.xrt")
    assert written.bytes == pathlib.Path("m.xrt").stat().st_size


def test_with_an_engine(folder: pathlib.Path) -> None:
    """Clusters, texts, guard reports, bisection and replay have their types as well."""
    pytest.importorskip("xrt_openvino._toolkit")  # not openvino itself: imported alone it sends telemetry
    on = ("-e", "openvino", "-o", "prune=False")
    (cluster,) = found("partition", "model.onnx", *on).clusters
    assert cluster.engine == "openvino"
    text = found("inspect", "model.onnx", *on, "--cluster", 0, "--stage", "ir", "--diff", "use_bf16=True")
    assert text.text.startswith("<?xml")
    assert text.diff
    (guarded,) = found("report", "model.onnx", *on, "-o", "guard_sandbox=False", "-o", "guard_tune=False").clusters
    assert guarded.state == "live"
    assert guarded.outcome.pieces[0].engine == "openvino"
    assert all(c.right for c in found("bisect", "model.onnx", *on).clusters)


def test_train_and_what_is_installed(folder: pathlib.Path) -> None:
    """Training, engines, passes and the doctor."""
    np.savez("train.npz", x=np.concatenate([X] * 8), labels=np.arange(16) % 10)
    trained = found("train", "model.onnx", "-d", "train.npz", "--loss", "cross_entropy", "-b", 4, "-n", 2, "-e", "host")
    assert (trained.first_step, trained.last_step) == (1, 2)
    assert found("engines").engines[0].name == "host"
    assert found("passes").passes
    assert found("doctor").problems == []


def test_of_engines_authors(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new engine's folder, and the score card of one."""
    pytest.importorskip("cookiecutter")
    made = found("new-engine", "acme", "--style", "kernels", "--author", "A. Uthor", "--no-ask")
    assert pathlib.Path(made.folder, "pyproject.toml").is_file()
    card = ScoreCard("acme", "1", "cpu", claims={"Exp": "", "Log": "not yet"}).as_dict()
    monkeypatch.setattr("xrt_core.cli.check_engine._tested", lambda *_: (card, 1))
    assert found("check-engine", "openvino", code=ExitCode.FAILED_CHECK).operators["Log"]["reason"] == "not yet"


def test_the_cache(folder: pathlib.Path) -> None:
    """Each of its commands."""
    pytest.importorskip("jax")
    m = xrt.XRTModule("model.onnx", engine="xla", guard=False, cache_dir=str(folder / "cache"), prune=False)
    m(X)
    (entry,) = found("cache ls").entries
    assert entry.engine == "xla"
    assert found("cache info").entries == 1
    assert found("cache info", entry.entry[:12]).entry["problem"] == "none"
    assert found("cache explain", entry.entry[:12], entry.entry[:12]).differences == []
    assert found("cache export", "all.xrtcache").entries == 1
    assert found("cache import", "all.xrtcache").stored == 1
    assert found("cache verify").damaged == {}
    assert found("cache clear").entries == 1


def test_a_replayed_bundle(folder: pathlib.Path) -> None:
    """A bundle that an engine computes rightly."""
    pytest.importorskip("onnxruntime")
    from tests.verify.test_repro import bundle, deep
    from xrt_core.verify.repro import write_bundle

    write_bundle(bundle(deep(8), engine="onnxruntime"), folder / "b.xrtbundle")
    assert not found("replay", "b.xrtbundle", "--here").fails


def test_every_command_is_covered_here() -> None:
    """Each command of the core declares the type of its result, and a test above reads one."""
    text = pathlib.Path(__file__).read_text("utf-8")
    for words, type_ in KINDS.items():
        kinds = reference.kinds_of(type_)
        assert kinds, words
        assert all(issubclass(k, results.Result) for k in kinds), words
        assert f'found("{words}"' in text, words
        shown = run(words, "--help").output
        assert "--json" in shown, words
        assert "--quiet" in shown, words


def test_errors_as_json(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error stands in the place of the result: its kind and message, with the exit code of its kind."""

    def failed(*arguments: object, code: int) -> results.ErrorText:
        done = run("run", *arguments, "--json")
        assert done.exit_code == code, done.output
        assert done.stderr.startswith("error: ")
        return msgspec.convert(json.loads(done.stdout), results.Error, strict=True).error

    assert failed("model.onnx", "-e", "hosst", code=ExitCode.USAGE).kind == "EngineNotFoundError"
    assert "did you mean 'host'" in failed("model.onnx", "-e", "hosst", code=ExitCode.USAGE).message
    assert failed("model.onnx", "-e", "host", "--output", "no/y.npz", code=ExitCode.USAGE).kind == "OSError"
    monkeypatch.setattr(inputs, "write_outputs", 1)
    monkeypatch.setattr("xrt_core.cli.run.write_outputs", lambda *_: 1 // 0)
    assert failed("model.onnx", "-e", "host", "--output", "y.npz", code=ExitCode.BUG).kind == "internal"


@pytest.mark.slow
def test_an_interrupt_has_its_code(folder: pathlib.Path) -> None:
    """Ctrl-C ends a command with 130 and a word, without a traceback."""
    program = (
        "import sys, os, signal, threading, xrt_core.cli.run as r\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it\n"
        "r.write_outputs = lambda *a: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.argv = ['xrt', 'run', 'model.onnx', '-e', 'host', '--output', 'y.npz']\n"
        "from xrt_core.cli.app import main\nmain()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == ExitCode.INTERRUPTED == 128 + signal.SIGINT
    assert done.stderr == "interrupted\n"


def test_hints_to_mend(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`xrt doctor --fix-hints` is a shell script: commands as they are, everything else a comment."""
    monkeypatch.setenv("FLAGS_strict_clustering", "maybe")
    monkeypatch.setenv("FLAGS_use_nothing", "1")
    monkeypatch.setattr("xrt_core.compiler.passes._plugin_passes", {("fuse", "pkg"): "its module is broken"})
    done = run("doctor", "--fix-hints")
    assert done.exit_code == ExitCode.FAILED_CHECK
    lines = done.stdout.splitlines()
    commands = [line for line in lines if not line.startswith("#")]
    assert commands == ["unset FLAGS_use_nothing"]
    assert "# pass fuse of a plugin is left out: its module is broken" in lines
    assert subprocess.run(["sh", "-n", "-c", done.stdout], check=False).returncode == 0
    problems = found("doctor", code=ExitCode.FAILED_CHECK).problems
    assert {p.command for p in problems} >= {"", "unset FLAGS_use_nothing"}


@pytest.mark.parametrize(
    ("remedy", "command"),
    [
        ("pip install 'xrt-core[cuda13]'", "pip install 'xrt-core[cuda13]'"),
        ("pip uninstall a b, then pip install one of them ('c')", "pip uninstall a b"),
        ("pip install -U 'jax[cuda12]'", "pip install -U 'jax[cuda12]'"),
        ("unset XRT_FOO", "unset XRT_FOO"),
        ("pip install --upgrade xrt-xla", "pip install --upgrade xrt-xla"),
        ("mend or remove its package", ""),
        ("upgrade the driver, or pip uninstall x", ""),
    ],
)
def test_commands_in_remedies(remedy: str, command: str) -> None:
    """What can be typed is told from what explains it."""
    from xrt_core.cli.doctor import Problem

    assert Problem("it is broken", remedy).command == command


def test_the_page_is_the_commands() -> None:
    """docs/cli.md is what `python -m xrt_core.cli.reference` prints; schemas are valid JSON of each type."""
    assert reference.page() == PAGE.read_text("utf-8"), "run: python -m xrt_core.cli.reference > docs/cli.md"
    for type_ in KINDS.values():
        assert "$defs" in json.loads(json.dumps(reference.schema(type_)))


def test_the_reference_as_a_program(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With a command it prints a schema; a wrong one has a hint."""
    monkeypatch.setattr(sys, "argv", ["reference", "cache", "ls"])
    reference.main()
    assert json.loads(capsys.readouterr().out)["anyOf"][0]["$ref"].endswith("/CacheList")
    monkeypatch.setattr(sys, "argv", ["reference", "cache", "list"])
    with pytest.raises(SystemExit, match="did you mean 'cache ls'"):
        reference.main()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("xrt in", ["inspect"]),
        ("xrt inspect --clu", ["--cluster"]),
        ("xrt run -e ho", ["host"]),
        ("xrt run -o minimum_n", ["minimum_nodes="]),
        ("xrt cache ver", ["verify"]),
    ],
)
def test_completion_by_the_shell(words: str, expected: list[str]) -> None:
    """bash asks for the rest of a command, an option, an engine and an option of modules."""
    program = "import sys; sys.argv = ['xrt']; from xrt_core.cli.app import main; main()"
    variables = {"_XRT_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False,
                          env={**os.environ, **variables})  # fmt: skip
    assert done.stdout.split() == expected, done.stderr


def test_completion_is_offered() -> None:
    """The application says how to install it."""
    shown = run("--help").output
    assert "--install-completion" in shown
    assert "--show-completion" in shown

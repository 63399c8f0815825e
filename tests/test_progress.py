"""Progress on a real terminal (a pseudo-terminal of the system): what is done, how far it is, what it waits for."""

from __future__ import annotations

import io
import os
import pathlib
import pty
import re
import subprocess
import sys
import threading

import numpy as np
import pytest

import xrt_core as xrt
from tests.fake_engines import fake_engine
from xrt_core import events
from xrt_core.events import Event, EventLog, process_events
from xrt_core.progress import Progress, State

ROOT = pathlib.Path(__file__).parents[1]
PROGRAM = """
import sys, time
import numpy as np
from tests.fake_engines import fake_engine
import xrt_core as xrt
from xrt_core.cli.app import application

def slow(function):
    time.sleep(0.4)

with fake_engine() as engine:
    engine.on_compile = slow
    engine.takes = lambda n: n.op_type == "MatMul"
    if sys.argv[1] == "library":
        class Steps(xrt.Graph):
            def build(self, x):
                for k in range(2):  # of different constants: equal clusters are compiled once
                    x = xrt.ops.Tanh(xrt.ops.MatMul(x, np.full((8, 8), k, np.float32)))
                return x
        m = xrt.XRTModule(Steps(), engine="fake", guard=False, prune=False, cache="off")
        with xrt.show_progress("mine"):
            m(np.ones((8, 8), np.float32))
    else:
        application()(sys.argv[1:] + ["-e", "fake", "-o", "guard=False", "-o", "prune=False", "-o", "cache=off"])
"""
"""A program whose engine takes 0.4 s for each cluster."""


def on_a_terminal(*arguments: str, folder: pathlib.Path) -> str:
    """What a program writes to stderr, where that is a terminal of 200 columns."""
    ours, theirs = pty.openpty()
    os.set_blocking(ours, True)
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "200", "PYTHONPATH": _path()}
    command = [sys.executable, "-c", PROGRAM, *arguments]
    process = subprocess.Popen(command, stderr=theirs, stdout=subprocess.DEVNULL, env=environment, cwd=folder)
    os.close(theirs)
    written = bytearray()

    def read() -> None:
        while True:
            try:
                piece = os.read(ours, 4096)
            except OSError:  # the other side is closed
                return
            if not piece:
                return
            written.extend(piece)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert process.wait(timeout=120) == 0, written.decode(errors="replace")
    finally:
        process.kill()
        reader.join(10)
        os.close(ours)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode(errors="replace"))


def _path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])])


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """With a model of one product."""
    from tests.docs.test_examples import write_model

    write_model(tmp_path / "model.onnx")
    return tmp_path


@pytest.mark.slow
def test_a_command_on_a_terminal(folder: pathlib.Path) -> None:
    """It says which cluster is compiled, and how many there are."""
    written = on_a_terminal("run", "model.onnx", folder=folder)
    assert "compiling: 0 of 1 clusters; compiling fake_0 on fake (1 nodes)" in written


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("run", "model.onnx", "--quiet"), ("--quiet", "run", "model.onnx")])
def test_quiet(folder: pathlib.Path, arguments: tuple[str, ...]) -> None:
    """Nothing on a terminal with --quiet, before the command or behind it."""
    assert on_a_terminal(*arguments, folder=folder) == ""


@pytest.mark.slow
def test_a_program_on_a_terminal(folder: pathlib.Path) -> None:
    """`xrt.show_progress`: the first of two clusters, then the second."""
    written = on_a_terminal("library", folder=folder)
    assert "mine: 0 of 2 clusters; compiling fake_0 on fake" in written
    assert "mine: 1 of 2 clusters; compiling fake_1 on fake" in written


def test_a_pipe_sees_nothing() -> None:
    """Where stderr is no terminal nothing is written, and nothing listens."""
    stream = io.StringIO()
    with Progress("compiling", 3, file=stream) as progress:
        progress.advance("loss 1")
        assert not events._listeners
    assert stream.getvalue() == ""


def heard(*told: Event) -> str:
    state = State()
    for event in told:
        state.hear(event)
    return state.text()


def event(name: str, **fields: object) -> Event:
    return Event(name, 0.0, None, fields)


def test_what_is_said() -> None:
    """Of each thing that begins, of several at once, and of what has ended."""
    plan = event("progress.plan", model="m", clusters=3)
    compiling = event("progress.compile", cluster="a", engine="xla", nodes=4)
    assert heard(plan) == "0 of 3 clusters"
    assert heard(plan, compiling) == "0 of 3 clusters; compiling a on xla (4 nodes)"
    verifying = event("progress.verify", cluster="b", engine="openvino")
    assert heard(plan, compiling, verifying) == "0 of 3 clusters; verifying and timing b on openvino and 1 more"
    done = [event("compile", cluster="a"), event("guard.live", cluster="b")]
    assert heard(plan, compiling, verifying, *done) == "2 of 3 clusters"
    waiting = event("progress.wait", cluster="c", engine="xla", reason="another process compiles the same")
    assert heard(waiting) == "waiting: another process compiles the same (c)"
    assert heard(event("progress.fetch", cluster="c", engine="xla")) == "fetching c from a shared cache"
    log = EventLog()
    lost = log.fallback(cluster="a", engine="xla", stage="compile", kind="raised", error="no", level=0)
    assert heard(plan, compiling, lost) == "1 of 3 clusters"
    run = log.fallback(cluster="a", engine="xla", stage="run", kind="raised", error="no", level=0)
    assert heard(compiling, run) == "compiling a on xla (4 nodes)"
    assert heard(event("specialised", model="m")) == ""


def test_events_of_progress_are_heard_and_not_kept() -> None:
    """A listener hears what begins in the order of the work; the module's log keeps what it kept before."""
    told: list[Event] = []
    process_events.progress("compile", cluster="nobody listens")
    stop = events.subscribe(told.append)
    try:
        with fake_engine():
            m = xrt.XRTModule(lambda x: xrt.ops.Neg(x), engine="fake", guard=False, prune=False, cache="off")
            m(np.ones(3, np.float32))
    finally:
        stop()
    names = [e.name for e in told if e.name.startswith("progress.") or e.name == "compile"]
    assert names == ["progress.plan", "progress.compile", "compile"]
    assert not m.events.recent("progress")


def test_under_guard_verification_is_told(tmp_path: pathlib.Path) -> None:
    """Compiling, then verifying, then live."""
    pytest.importorskip("xrt_openvino._toolkit")  # not openvino itself: imported alone it sends telemetry
    told: list[str] = []
    stop = events.subscribe(lambda e: told.append(e.name))
    try:
        options = {"guard_async": False, "guard_sandbox": False, "guard_tune": False, "prune": False}
        product = np.eye(8, dtype=np.float32)
        with xrt.XRTModule(lambda x: xrt.ops.MatMul(x, product), engine="openvino", guard=True, **options) as m:
            m(np.ones((8, 8), np.float32))
    finally:
        stop()
    order = [n for n in told if n in ("progress.compile", "progress.verify", "guard.live")]
    assert order[0] == "progress.compile"
    assert order.index("progress.verify") < order.index("guard.live")


def test_waiting_for_another_process_is_told(tmp_path: pathlib.Path) -> None:
    """Whoever wants what another holds the lock of calls `waits` first, and then waits."""
    from tests.cache.cached import key_of, shifted
    from xrt_core.cache.disk import DiskCache

    disk, key = DiskCache(tmp_path, 1 << 20), key_of(shifted(1.0))
    waited: list[str] = []
    with disk.making(key, 1.0, lambda: waited.append("first")) as before:
        assert not before
        assert not waited

        def other() -> None:
            with disk.making(key, 0.1, lambda: waited.append("second")) as again:
                waited.append(str(again))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join(10)
    assert waited == ["second", "True"]

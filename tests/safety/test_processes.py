"""Programs that fork, are interrupted or are ended while engines are in use end soon, and leave nothing behind."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from xrt_core.engine import engines

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks, and looks at /proc")

ENGINES = ["onnxruntime", "xla", "openvino"]
_HEAD = """
import os, signal, sys, time, warnings
import numpy as np
from xrt_core import XRTModule
from tests.guard.guarded import chain
warnings.simplefilter("ignore")  # JAX warns of forks
graph, x, _ = chain()
def made(**options):
    m = XRTModule(graph, engine=sys.argv[1], prune=False, **options)
    m(x), m.wait(120), m(x)
    return m
def child(work):
    pid = os.fork()
    if not pid:
        work()
        sys.exit(7)
    begin = time.monotonic()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(code, time.monotonic() - begin, flush=True)
"""
_FORKS = {
    # a module of the parent goes on in its child; a guarded one is accelerated again, in a process of its own
    "guarded": """
m = made()
want = m(x)
def work():
    np.testing.assert_allclose(m(x), want, rtol=1e-5)
    until = time.monotonic() + 60
    while m.report().clusters[0]["state"] != "live" and time.monotonic() < until:
        m(x), m.wait(60)
    assert m.report().clusters[0]["reason"].endswith("in a child process"), m.report()
    np.testing.assert_allclose(m(x), want, rtol=1e-5)
child(work)
np.testing.assert_allclose(m(x), want, rtol=1e-5)
""",
    "raw": """
m = made(guard=False)
want = m(x)
def work():
    np.testing.assert_allclose(m(x), want, rtol=1e-5)
    assert "was forked" in str(m.explain().errors)
    n = XRTModule(graph, engine=sys.argv[1], prune=False, guard=False)  # made in the child: the host answers
    np.testing.assert_allclose(n(x), want, rtol=1e-5)
child(work)
np.testing.assert_allclose(m(x), want, rtol=1e-5)
assert not m.explain().errors
""",
    "isolated": """
m = made(guard="isolated")
want = m(x)
child(lambda: np.testing.assert_allclose(m(x), want, rtol=1e-5))
np.testing.assert_allclose(m(x), want, rtol=1e-5)
assert m.report().clusters[0]["state"] == "live"
""",
    # while the plan with engines is being made
    "early": """
m = XRTModule(graph, engine=sys.argv[1], prune=False)
want = m(x)
child(lambda: np.testing.assert_allclose(m(x), want, rtol=1e-5))
""",
}


def run(engine: str, program: str, cache: pathlib.Path) -> subprocess.CompletedProcess[str]:
    """Run a program to its end."""
    return subprocess.run(
        [sys.executable, "-c", _HEAD + program, engine], capture_output=True, text=True, timeout=120,
        env={**os.environ, "XRT_CACHE_DIR": str(cache), "XRT_GUARD": ""}, cwd=pathlib.Path(__file__).parents[2],
    )  # fmt: skip


def usable(engine: str) -> None:
    """Skip a test whose engine is not there."""
    if engine not in engines.names():
        pytest.skip(f"{engine} is not installed")


@pytest.mark.parametrize(
    ("engine", "how"),
    [
        pytest.param(e, h, marks=pytest.mark.slow if e == "onnxruntime" else pytest.mark.nightly)
        for e in ENGINES
        for h in _FORKS
    ],
)
def test_forks(engine: str, how: str, own_cache: pathlib.Path) -> None:
    """A child forked while an engine was in use gets the right numbers, and ends with its own exit code."""
    usable(engine)
    done = run(engine, _FORKS[how], own_cache)
    assert done.returncode == 0, done.stderr
    code, seconds = done.stdout.split()
    assert code == "7", done.stderr
    assert float(seconds) < 60


_SEARCH = """
import threading
from xrt_core.guard.builder import ClusterBuilder
from xrt_core.verify import evaluate
begun = threading.Event()
examine = evaluate._Evaluation._compiled
def compiled(self, candidate):
    begun.set()
    return examine(self, candidate)
evaluate._Evaluation._compiled = compiled
from tests.guard.guarded import chain
graph, x, _ = chain()
for i in range(20):  # a background build that compiles in this process is under way when the program ends
    m = XRTModule(graph, engine=sys.argv[1], prune=False, guard_sandbox=False, cache=False)
    m(x)
begun.wait(60)
"""


@pytest.mark.parametrize(
    "engine", [pytest.param("openvino", marks=pytest.mark.slow), pytest.param("onnxruntime", marks=pytest.mark.nightly)]
)
def test_an_end_in_the_midst_of_a_compilation_in_this_process(engine: str, own_cache: pathlib.Path) -> None:
    """The interpreter waits for it: a thread that comes back from a library afterwards ends the process by an abort."""
    usable(engine)
    done = run(engine, _SEARCH, own_cache)
    assert done.returncode == 0, done.stderr


_LOOP = """
m = made(guard={guard!r})
print("ready", flush=True)
while True:
    m(x)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("guard", [None, "isolated"])
@pytest.mark.parametrize("engine", ENGINES)
def test_signals(engine: str, guard: str | None, number: signal.Signals, own_cache: pathlib.Path) -> None:
    """Ctrl-C and SIGTERM end a program that runs a model soon, and all its processes."""
    usable(engine)
    with subprocess.Popen(
        [sys.executable, "-c", _HEAD + _LOOP.format(guard=guard), engine],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=pathlib.Path(__file__).parents[2],
        env={**os.environ, "XRT_CACHE_DIR": str(own_cache), "XRT_GUARD": "", "XRT_TEST_TAG": str(own_cache)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        begin = time.monotonic()
        process.send_signal(number)
        assert process.wait(30) == -number
        assert time.monotonic() - begin < 10
    until = time.monotonic() + 10
    while (left := tagged(str(own_cache))) and time.monotonic() < until:
        time.sleep(0.05)
    assert not left


def tagged(tag: str) -> list[str]:
    """The processes that were started with a tag in their environment."""
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if tag.encode() in (folder / "environ").read_bytes() and folder.name != str(os.getpid()):
                found.append(folder.name)
        except OSError:
            continue
    return found

"""Isolated executables: arrays through shared memory, one process for a module, and its end."""

from __future__ import annotations

import gc
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.guard.engines import Plain, Unserialisable
from tests.guard.guarded import captured_events, chain, eventually, fallbacks, gone, is_running, module, registered
from xrt_core.errors import EngineUnavailableError
from xrt_core.guard import isolation
from xrt_core.guard.isolation import IS_SUPPORTED, IsolatedExecutable
from xrt_core.module import XRTModule
from xrt_core.testing import functions
from xrt_core.testing.stage_faults import STAGE_FAULTS

pytestmark = pytest.mark.skipif(
    not (IS_SUPPORTED and sys.platform.startswith("linux")), reason="needs POSIX, and looks at /proc"
)
ISOLATED = {"guard": "isolated", "guard_async": False}


def processes(m: XRTModule) -> list[int]:
    """The process of a module's executables."""
    guard = m._pipeline.accelerated.services.guard
    assert guard is not None
    isolated = guard._builder._isolated
    return [] if isolated is None else isolated.pids()


@pytest.fixture(params=[Plain, Unserialisable])
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    with registered(request.param):
        yield request.param.name


class Interrupting:
    """A channel whose use is interrupted: before a request goes out, or after a reply came in."""

    def __init__(self, channel: socket.socket, where: str) -> None:
        self._channel, self._where = channel, where

    def send(self, *args: Any) -> int:
        if self._where == "send":
            raise KeyboardInterrupt
        return self._channel.send(*args)

    def recv(self, *args: Any) -> bytes:
        found = self._channel.recv(*args)
        raise KeyboardInterrupt if found else AssertionError


@pytest.mark.slow
@pytest.mark.parametrize("where", ["send", "recv"])
def test_an_interrupted_run(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it was interrupted, the next run is answered at once, by its own reply."""
    with registered(Plain):
        graph, x, want = chain()
        m = module(graph, Plain.name, **ISOLATED)
        m(x)
        pids = processes(m)
        executable = next(
            o for o in gc.get_objects() if type(o) is IsolatedExecutable and o._worker.pid in pids and o._worker.alive
        )
        executable.seconds = 5.0
        for _ in range(3):
            with monkeypatch.context() as patch:
                channel = Interrupting(executable._channel, where)
                patch.setattr(executable, "_channel", channel)
                patch.setattr(executable._receiver, "_channel", channel)
                with pytest.raises(KeyboardInterrupt):
                    executable.run([x + 1])
            np.testing.assert_array_equal(executable.run([x])[0], m(x))
        np.testing.assert_array_equal(m(x), want)
        assert m.report().clusters[0]["state"] == "live"
        m.close()


def test_one_process_runs_all_clusters(engine: str) -> None:
    """Results are the host's and the caller's own; the process ends with the module."""
    graph, x, want = chain()
    m = module(graph, engine, **ISOLATED)
    first = m(x)
    second = m(x + 1)
    np.testing.assert_array_equal(first, want)
    assert first.flags.writeable
    assert not np.shares_memory(first, second)
    other = functions.chain()[0].body
    with XRTModule(other, engine="host") as host:
        np.testing.assert_array_equal(m(x + 1), host(x + 1))
    pids = processes(m)
    assert len(pids) == 1
    assert os.getpid() not in pids
    cluster = m.report().clusters[0]
    assert cluster["state"] == "live"
    assert cluster["reason"].endswith("in a child process")
    m.close()
    del m
    # a comparison in the background may still hold the module
    assert eventually(lambda: gc.collect() >= 0 and not is_running(pids[0]))


@pytest.mark.slow
def test_the_process_starts_again() -> None:
    """A process that was killed costs one call on the host, and after the time of a retry there is another one."""
    graph, x, want = chain()
    with registered(Plain), captured_events() as events, module(graph, "plain", guard_retry=1e-3, **ISOLATED) as m:
        m(x)
        (pid,) = processes(m)
        os.kill(pid, signal.SIGKILL)
        assert gone([pid])
        np.testing.assert_array_equal(m(x), want)
        assert eventually(lambda: (m(x), m.report().clusters[0]["state"])[1] == "live")
        assert processes(m) not in ([], [pid])
        np.testing.assert_array_equal(m(x), want)
    assert fallbacks(events) == [("run", "crashed")]


class Looked:
    """A channel that counts how often it is looked at without waiting."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel, self.looks = channel, 0

    def fileno(self) -> int:
        return self._channel.fileno()

    def recv(self, size: int, flags: int = 0) -> bytes:
        self.looks += flags == socket.MSG_DONTWAIT
        return self._channel.recv(size, flags)


def test_who_looks_in_vain_sleeps_at_once() -> None:
    """After two times, but for every sixteenth; what was found by looking makes it look again."""
    own, its = socket.socketpair()
    with own, its:
        looked = Looked(own)
        receiver = isolation._Receiver(looked)  # type: ignore[arg-type]
        looks = []
        for _ in range(18):
            looked.looks = 0
            assert receiver.receive(0.0, 1e-4) is None
            looks.append(looked.looks > 0)
        assert [i for i, is_one in enumerate(looks) if is_one] == [0, 1, 16]
        its.send(b"a")
        looked.looks = 0
        assert (receiver.receive(1.0, 1e-4), looked.looks) == (b"a", 0)  # it slept, and was woken
        receiver._in_vain = 32
        its.send(b"b")
        assert (receiver.receive(1.0, 1.0), looked.looks) == (b"b", 1)
        assert receiver.receive(0.0, 1e-4) is None
        assert looked.looks > 1
        its.close()
        assert receiver.receive(1.0, 1e-4) == b""


def test_threads_take_turns() -> None:
    """Four threads share one process, each gets the results of its own inputs."""
    graph, x, _ = chain()
    wrong: list[int] = []
    with registered(Plain), module(graph, "plain", **ISOLATED) as m, XRTModule(graph, engine="host") as host:
        m(x)
        inputs = [x + i for i in range(4)]
        wanted = [host(i) for i in inputs]

        def call(k: int) -> None:
            wrong.extend(k for _ in range(50) if not np.array_equal(m(inputs[k]), wanted[k]))

        threads = [threading.Thread(target=call, args=(k,)) for k in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert m.report().clusters[0]["state"] == "live"
    assert not wrong


_PROGRAM = """
import json, os, signal, sys
from tests.guard.engines import Plain
from tests.guard.guarded import chain, module
from xrt_core.engine import engines
engines.register(Plain)
graph, x, want = chain()
m = module(graph, "plain", guard_async=False, guard_tune=False, prune=False)
m(x)
print(json.dumps(m.report().clusters[0]["reason"]), flush=True)
if sys.argv[1] == "dies":
    Plain.on_run = lambda self, run, inputs: os.kill(os.getpid(), signal.SIGKILL)
m(x)
"""


@pytest.mark.slow
def test_a_cluster_that_took_a_process_down(own_cache: pathlib.Path) -> None:
    """The next process runs it in a child process; when that one has ended in order, all is as before."""
    told = []
    for how in ("lives", "dies", "lives", "lives"):
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, how], capture_output=True, text=True, cwd=pathlib.Path(__file__).parents[2]
        )
        assert (done.returncode == -signal.SIGKILL) == (how == "dies"), done.stderr
        told.append("in a child process" in done.stdout)
    assert told == [False, False, True, False]


def test_a_named_engine_that_ends_the_process_when_it_is_probed() -> None:
    """It does so in a worker, and is refused with the reason."""
    graph, _, _ = chain()
    with registered(STAGE_FAULTS["probe_crashes"]), pytest.raises(EngineUnavailableError, match="ended or hung"):
        module(graph, "probe_crashes", **ISOLATED)

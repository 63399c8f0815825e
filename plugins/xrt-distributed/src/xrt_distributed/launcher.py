"""The launcher: starts the processes of a program, passes their output on, and ends all when one of them fails.

Each process sends heartbeats through a pipe (`xrt_distributed.process`); JAX itself would wait for ever for one
that is stopped, and minutes for one that died.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TextIO

from xrt_distributed.jobs import JOB, job_name

HEARTBEAT_VARIABLE: Final = "XRT_LAUNCH_HEARTBEAT"
"""The variable with the number of the pipe into which a process writes its heartbeats."""
_START_SECONDS: Final = 120.0  # until the first heartbeat
_GRACE_SECONDS: Final = 3.0  # between asking a process to end and ending it
_LAST_LINES: Final = 10


@dataclass(frozen=True, slots=True)
class Settings:
    """count: of processes. devices: of each process's CPU. logs: a folder, or None. restarts: how often all are started
    again. hang: seconds without a heartbeat. port: None for any. job: its name, where the environment has none."""

    count: int
    devices: int | None = None
    logs: pathlib.Path | None = None
    restarts: int = 0
    hang: float = 20.0
    port: int | None = None
    job: str = field(default_factory=job_name)


@dataclass(eq=False)
class _Process:
    """A process with the threads that read its output and its heartbeats."""

    rank: int
    handle: subprocess.Popen[bytes]
    seen: float
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_LAST_LINES))
    threads: list[threading.Thread] = field(default_factory=list)
    alive: bool = False  # whether there was a heartbeat


def launch_all(command: Sequence[str], settings: Settings) -> int:
    """Run `python command` in every process, again after a failure as often as allowed; the exit code."""
    code = 0
    with _turned_into_exits():
        for attempt in range(settings.restarts + 1):
            code = _attempt(command, settings, attempt)
            if code == 0:
                break
            if attempt < settings.restarts:
                _say(f"starting all {settings.count} again ({attempt + 1} of {settings.restarts})")
    return code


def _attempt(command: Sequence[str], settings: Settings, attempt: int) -> int:
    port = settings.port or _free_port()
    processes: list[_Process] = []
    began = time.monotonic()
    try:
        for rank in range(settings.count):
            processes.append(_start(command, settings, rank, port, attempt))
        failed, why, code = _watch(processes, settings.hang)
    finally:
        _end(processes)
    if failed is None:
        return 0
    _say(
        f"rank {failed.rank} (process {failed.handle.pid}) {why} after {time.monotonic() - began:.1f} s; all are ended"
    )
    if failed.lines:
        _say("its last lines:\n" + "\n".join(f"    {line}" for line in failed.lines))
    return code


def _start(command: Sequence[str], settings: Settings, rank: int, port: int, attempt: int) -> _Process:
    read, write = os.pipe()
    environment = {
        **os.environ,
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(settings.count),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "XRT_LAUNCH_ATTEMPT": str(attempt), HEARTBEAT_VARIABLE: str(write), "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    environment.setdefault(JOB, settings.job)
    environment.setdefault("JAX_CPU_COLLECTIVES_IMPLEMENTATION", "gloo")
    # under guard each process would take a program up at a time of its own, and the others would wait for it
    environment.setdefault("XRT_GUARD", "0")
    if settings.devices is not None:
        flags = [f for f in environment.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in f]
        environment["XLA_FLAGS"] = " ".join([*flags, f"--xla_force_host_platform_device_count={settings.devices}"])
    try:
        handle = subprocess.Popen(
            [sys.executable, "-m", "xrt_distributed.process", *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(write,),
            start_new_session=True,  # with it, all that it starts can be ended
        )
    finally:
        os.close(write)
    made = _Process(rank, handle, time.monotonic())
    log: TextIO | None = None
    if settings.logs is not None:
        settings.logs.mkdir(parents=True, exist_ok=True)
        log = (settings.logs / f"rank{rank}.log").open("a" if attempt else "w", encoding="utf-8")
    for target, arguments in ((_pass_on, (made, log)), (_hear, (made, read))):
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        thread.start()
        made.threads.append(thread)
    return made


def _pass_on(process: _Process, log: TextIO | None) -> None:
    """Print what a process prints, with its rank before each line."""
    assert process.handle.stdout is not None
    with contextlib.ExitStack() as stack:
        if log is not None:
            stack.enter_context(log)
        for raw in process.handle.stdout:
            line = raw.decode("utf-8", "replace").rstrip("\n")
            process.lines.append(line)
            sys.stdout.write(f"[{process.rank}] {line}\n")
            sys.stdout.flush()
            if log is not None:
                log.write(line + "\n")
                log.flush()


def _hear(process: _Process, pipe: int) -> None:
    """Note the heartbeats of a process."""
    try:
        while os.read(pipe, 64):
            process.seen, process.alive = time.monotonic(), True
    finally:
        os.close(pipe)


def _watch(processes: Sequence[_Process], hang: float) -> tuple[_Process | None, str, int]:
    """Wait until all have ended well, or one has failed: which, why, and the exit code."""
    while True:
        codes = [p.handle.poll() for p in processes]
        # who was killed is the cause; those that lost it end with errors of their own
        bad = [(p, c) for p, c in zip(processes, codes, strict=True) if c]
        if bad:
            failed, code = min(bad, key=lambda found: found[1])
            failed.threads[0].join(2)  # its last lines
            if code < 0:
                return failed, f"was ended by {signal.Signals(-code).name}", 128 - code
            return failed, f"ended with exit code {code}", code
        if all(c == 0 for c in codes):
            for p in processes:
                p.threads[0].join(5)
            return None, "", 0
        now = time.monotonic()
        for p, c in zip(processes, codes, strict=True):
            silent, limit = now - p.seen, hang if p.alive else max(hang, _START_SECONDS)
            if c is None and silent > limit:
                return p, f"hangs (no heartbeat for {silent:.0f} s)", 75
        time.sleep(0.05)


def _end(processes: Sequence[_Process]) -> None:
    """End all processes that still run, with what they started."""
    running = [p for p in processes if p.handle.poll() is None]
    for p in running:
        _signal(p, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_SECONDS
    for p in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            p.handle.wait(max(0.0, deadline - time.monotonic()))
    for p in processes:
        _signal(p, signal.SIGKILL)  # what it started may have outlived it
        p.handle.wait()


def _signal(process: _Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.handle.pid, number)


@contextlib.contextmanager
def _turned_into_exits() -> Iterator[None]:
    """SIGTERM ends the launcher as Ctrl-C does: with the processes that it started."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _say(text: str) -> None:
    print(f"xrt launch: {text}", file=sys.stderr, flush=True)

"""A process of a program on this machine: started with a pipe for heartbeats, and ended with all that it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

HEARTBEAT_VARIABLE: Final = "XRT_LAUNCH_HEARTBEAT"
"""The variable with the number of the pipe into which a process writes its heartbeats."""
IN_JAX: Final = ", in JAX"
"""What a heartbeat's place ends with where the program waits for JAX, as for a collective."""
LAST_LINES: Final = 10
_GRACE_SECONDS: Final = 3.0  # between asking a process to end and ending it


@dataclass(eq=False)
class LocalProcess:
    """A process, with the threads that read its output and its heartbeats.

    seen: when it last gave a heartbeat, or was started. alive: whether it has given one. still, place: for how many
    seconds its program has stood where it is, and where that is. host: "" for this machine.
    """

    rank: int
    handle: subprocess.Popen[bytes]
    seen: float
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    threads: list[threading.Thread] = field(default_factory=list)
    alive: bool = False
    still: float = 0.0
    place: str = ""
    host: str = ""
    lost: str = ""  # a process on this machine is never out of reach

    def beats(self, said: str) -> None:
        """Note a heartbeat."""
        self.seen, self.alive = time.monotonic(), True
        self.still, self.place = parsed(said)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self.handle.pid

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self.handle.poll()

    def finish(self, seconds: float) -> None:
        """Wait until its output has been read."""
        self.threads[0].join(seconds)


def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    rank: int,
    on_line: Callable[[str], object],
    on_beat: Callable[[str], object] = lambda said: None,
) -> LocalProcess:
    """Start `python command` as the process of a rank. on_line, on_beat: are called, by a thread each, with every line
    that it prints, and with every heartbeat (`parsed`)."""
    read, write = os.pipe()
    try:
        handle = subprocess.Popen(
            [sys.executable, "-m", "xrt_distributed.process", *command],
            env={**environment, HEARTBEAT_VARIABLE: str(write), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(write,),
            start_new_session=True,  # with it, all that it starts can be ended
        )
    finally:
        os.close(write)
    made = LocalProcess(rank, handle, time.monotonic())
    for target, arguments in ((_pass_on, (made, on_line)), (_hear, (made, read, on_beat))):
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        thread.start()
        made.threads.append(thread)
    return made


def _pass_on(process: LocalProcess, on_line: Callable[[str], object]) -> None:
    assert process.handle.stdout is not None
    for raw in process.handle.stdout:
        line = raw.decode("utf-8", "replace").rstrip("\n")
        process.lines.append(line)
        on_line(line)


def _hear(process: LocalProcess, pipe: int, on_beat: Callable[[str], object]) -> None:
    """Note the heartbeats of a process."""
    with os.fdopen(pipe, "rb") as lines:
        for raw in lines:
            said = raw.decode("utf-8", "replace").strip()
            process.beats(said)
            on_beat(said)


def parsed(said: str) -> tuple[float, str]:
    """Seconds and place of a heartbeat such as "1.5 train.py:14 (step)"."""
    seconds, _, place = said.partition(" ")
    try:
        return float(seconds), place
    except ValueError:
        return 0.0, place


def end_all(processes: Sequence[LocalProcess]) -> None:
    """End all processes that still run, with what they started."""
    running = [p for p in processes if p.poll() is None]
    for p in running:
        _signal(p, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_SECONDS
    for p in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            p.handle.wait(max(0.0, deadline - time.monotonic()))
    for p in processes:
        _signal(p, signal.SIGKILL)  # what it started may have outlived it
        p.handle.wait()


def _signal(process: LocalProcess, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)

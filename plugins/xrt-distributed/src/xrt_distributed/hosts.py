"""Processes on other machines, which the launcher starts over ssh (`xrt_distributed.agent` runs there)."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from msgspec import json

from xrt_distributed import __version__
from xrt_distributed.agent import Order
from xrt_distributed.local import LAST_LINES, parsed

_CONNECT_SECONDS: Final = 60.0
_LIFE_SECONDS: Final = 1.0
_END_SECONDS: Final = 8.0  # for an agent to end its processes
LOST: Final = -1000
"""The exit code of a process whose machine is out of reach: below those of signals."""


@dataclass(eq=False)
class RemoteProcess:
    """A process on another machine, as its agent tells. See `LocalProcess`; lost: why it is out of reach, or ""."""

    rank: int
    host: str
    seen: float
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    alive: bool = False
    still: float = 0.0
    place: str = ""
    pid: int = 0
    code: int | None = None
    lost: str = ""

    def poll(self) -> int | None:
        """See `LocalProcess.poll`."""
        return self.code

    def finish(self, seconds: float) -> None:
        """Its agent tells the end of a process after its last line."""


class Host:
    """The connection to a machine. Raises nothing: what is wrong is `failure`, and that of its processes.

    on_line: is called with the rank and each line that one of its processes prints.
    """

    def __init__(self, name: str, ssh: Sequence[str], python: str, on_line: Callable[[int, str], object]) -> None:
        self.name, self.failure = name, ""
        self.port = 0
        self._deadline = 0.0  # when `release` was called, and the time limit
        self.processes: dict[int, RemoteProcess] = {}
        self._on_line = on_line
        self._said: deque[str] = deque(maxlen=3)
        self._hello = threading.Event()
        self._lock = threading.Lock()
        remote = f"exec {shlex.quote(python)} -m xrt_distributed.agent"
        try:
            self._ssh: subprocess.Popen[bytes] | None = subprocess.Popen(
                [*ssh, name, remote], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is the launcher's to pass on
            )  # fmt: skip
        except OSError as e:
            self._ssh = None
            self._lose(f"{ssh[0]} cannot be run: {e.strerror}")
            return
        targets = (self._read_errors, self._read, self._show_life)
        self._threads = [threading.Thread(target=t, args=(self._ssh,), daemon=True) for t in targets]
        for thread in self._threads:
            thread.start()

    def connected(self) -> str:
        """Wait until the agent is there; why it is not, or ""."""
        if not self._hello.wait(_CONNECT_SECONDS):
            self._lose(f"nothing answers within {_CONNECT_SECONDS:.0f} s")
        return self.failure

    def begin(self, order: Order) -> list[RemoteProcess]:
        """Have the agent start processes."""
        now = time.monotonic()
        self.processes = {rank: RemoteProcess(rank, self.name, now) for rank in order.variables}
        self._write(json.encode(order) + b"\n")
        if self.failure:
            self._lose(self.failure)
        return list(self.processes.values())

    def release(self) -> None:
        """Let the agent end its processes."""
        self._deadline = self._deadline or time.monotonic() + _END_SECONDS
        if self._ssh is not None and self._ssh.stdin is not None:
            with self._lock, contextlib.suppress(OSError):
                self._ssh.stdin.close()

    def join(self) -> None:
        """Wait until the agent has ended, and end the connection; not longer than a time limit after `release`."""
        self.release()
        if self._ssh is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._ssh.wait(max(self._deadline - time.monotonic(), 0.0))
            self._ssh.kill()
            self._ssh.wait()
            for thread in self._threads:
                thread.join(max(self._deadline - time.monotonic(), 0.05))

    def _write(self, data: bytes) -> bool:
        if self._ssh is None or self._ssh.stdin is None:
            return False
        try:
            with self._lock:
                self._ssh.stdin.write(data)
                self._ssh.stdin.flush()
        except (OSError, ValueError):  # gone, or closed by `release`
            return False
        return True

    def _show_life(self, ssh: subprocess.Popen[bytes]) -> None:
        self._hello.wait()
        while ssh.poll() is None and self._write(b"\n" if self.processes else b""):
            time.sleep(_LIFE_SECONDS)

    def _read(self, ssh: subprocess.Popen[bytes]) -> None:
        assert ssh.stdout is not None
        for line in ssh.stdout:
            try:
                self._hear(*json.decode(line))
            except (ValueError, TypeError, LookupError):  # a login script's words, say
                self._said.append(line.decode("utf-8", "replace").strip())
        ssh.stdout.close()
        code = ssh.wait()
        self._threads[0].join(1)  # what it said of it
        said = f": {' / '.join(self._said)}" if self._said else ""
        self._lose(f"the connection ended with exit code {code}{said}")

    def _read_errors(self, ssh: subprocess.Popen[bytes]) -> None:
        assert ssh.stderr is not None
        for line in ssh.stderr:
            self._said.append(line.decode("utf-8", "replace").strip())
        ssh.stderr.close()

    def _hear(self, rank: int, what: str, *data: Any) -> None:
        if what == "hello":
            self.port = int(data[0])
            if data[1] != __version__:
                self._lose(f"xrt-distributed is {data[1]} there, and {__version__} here")
            self._hello.set()
            return
        if what == "failed":
            self._lose(str(data[0]))
            return
        process = self.processes[rank]
        process.seen = time.monotonic()
        if what == "started":
            process.pid = int(data[0])
        elif what == "beat":
            process.alive = True
            process.still, process.place = parsed(str(data[0]))
        elif what == "line":
            process.lines.append(str(data[0]))
            self._on_line(rank, str(data[0]))
        elif what == "ended":
            process.code = int(data[0])

    def _lose(self, why: str) -> None:
        self.failure = self.failure or why
        for p in self.processes.values():
            if p.code is None:
                p.lost, p.code = self.failure, LOST
        self._hello.set()

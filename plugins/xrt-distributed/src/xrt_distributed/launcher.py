"""The launcher: starts the processes of a program, passes their output on, and ends all when one of them fails.

Each process sends heartbeats (`xrt_distributed.process`), through a pipe or, from another machine, through the
connection to its agent; JAX itself would wait for ever for one that is stopped, and minutes for one that died.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TextIO

from xrt_distributed.agent import Order, free_port, merged
from xrt_distributed.hosts import LOST, Host, RemoteProcess
from xrt_distributed.jobs import JOB, job_name
from xrt_distributed.local import IN_JAX, LocalProcess, end_all, start

SSH: Final = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")
"""How another machine is reached: no terminal, no questions, and an end where it no longer answers."""
_START_SECONDS: Final = 120.0  # until the first heartbeat
_FORWARDED: Final = ("XRT_", "FLAGS_", "JAX_", "XLA_", "NCCL_", "GLOO_", "TF_", "OMP_", "PYTHON", "OTEL_", "TRACE")
"""What the variables begin with that other machines get too."""

Process = LocalProcess | RemoteProcess


@dataclass(frozen=True, slots=True)
class Settings:
    """count: of processes, on each host. devices: of each process's CPU. logs: a folder, or None. restarts: how often
    all are started again. hang: seconds without a heartbeat. port: None for any. job: its name, where the environment
    has none. stall: seconds after which programs that stand still are ended; 0 for never. hosts: machines, by the names
    that `ssh` and the processes know; none for this one alone. python: there.
    """

    count: int
    devices: int | None = None
    logs: pathlib.Path | None = None
    restarts: int = 0
    hang: float = 20.0
    port: int | None = None
    job: str = field(default_factory=job_name)
    stall: float = 0.0
    hosts: tuple[str, ...] = ()
    ssh: tuple[str, ...] = SSH
    python: str = sys.executable

    @property
    def total(self) -> int:
        """How many processes there are."""
        return self.count * max(len(self.hosts), 1)


def launch_all(command: Sequence[str], settings: Settings) -> int:
    """Run `python command` in every process, again after a failure as often as allowed; the exit code."""
    code = 0
    with _turned_into_exits():
        for attempt in range(settings.restarts + 1):
            code = _attempt(command, settings, attempt)
            if code == 0:
                break
            if attempt < settings.restarts:
                _say(f"starting all {settings.total} again ({attempt + 1} of {settings.restarts})")
    return code


def _attempt(command: Sequence[str], settings: Settings, attempt: int) -> int:
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(_Output(settings, attempt))
        if settings.hosts:
            processes: Sequence[Process] | None = _start_there(command, settings, attempt, output, stack)
        else:
            processes = _start_here(command, settings, attempt, output, stack)
        if processes is None:
            return 255
        failed, why, code = _watch(processes, settings.hang, settings.stall)
    if failed is None:
        return 0
    where = f" on {failed.host}" if failed.host else ""
    after = f"after {time.monotonic() - began:.1f} s"
    _say(f"rank {failed.rank} (process {failed.pid}{where}) {why} {after}; all are ended")
    if failed.lines:
        _say("its last lines:\n" + "\n".join(f"    {line}" for line in failed.lines))
    return code


def _start_here(
    command: Sequence[str], settings: Settings, attempt: int, output: _Output, stack: contextlib.ExitStack
) -> list[LocalProcess]:
    processes: list[LocalProcess] = []
    stack.callback(end_all, processes)
    order = _order(command, settings, attempt, 0, "127.0.0.1", settings.port or free_port())
    for rank, own in order.variables.items():
        environment = merged(os.environ, own, order)
        processes.append(start(command, environment, rank, partial(output.write, rank)))
    return processes


def _start_there(
    command: Sequence[str], settings: Settings, attempt: int, output: _Output, stack: contextlib.ExitStack
) -> list[RemoteProcess] | None:
    """The processes on all hosts; None where a host cannot be reached, which is said."""
    hosts: list[Host] = []
    for name in settings.hosts:
        hosts.append(Host(name, settings.ssh, settings.python, output.write))
        stack.callback(hosts[-1].join)
    for host in hosts:
        stack.callback(host.release)  # all of them, before the first is waited for
    failures = [f"host {h.name}: {why}" for h in hosts if (why := h.connected())]
    if failures:
        _say("; ".join(failures))
        return None
    address, port = settings.hosts[0].rpartition("@")[2], settings.port or hosts[0].port
    return [
        p for number, h in enumerate(hosts) for p in h.begin(_order(command, settings, attempt, number, address, port))
    ]


def _order(command: Sequence[str], settings: Settings, attempt: int, host: int, address: str, port: int) -> Order:
    """What to start on a host."""
    common = {
        "WORLD_SIZE": str(settings.total), "LOCAL_WORLD_SIZE": str(settings.count),
        "MASTER_ADDR": address, "MASTER_PORT": str(port), "XRT_LAUNCH_ATTEMPT": str(attempt),
    }  # fmt: skip
    if settings.devices is not None:
        flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in f]
        common["XLA_FLAGS"] = " ".join([*flags, f"--xla_force_host_platform_device_count={settings.devices}"])
    first = host * settings.count
    variables = {first + n: {**common, "RANK": str(first + n), "LOCAL_RANK": str(n)} for n in range(settings.count)}
    # under guard each process would take a program up at a time of its own, and the others would wait for it
    defaults = {"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo", "XRT_GUARD": "0", JOB: settings.job}
    shared = {n: v for n, v in os.environ.items() if n.startswith(_FORWARDED)} if settings.hosts else {}
    return Order(tuple(command), os.getcwd(), variables, shared, defaults)


class _Output:
    """Prints what processes print, with their ranks before each line, and writes it to files."""

    def __init__(self, settings: Settings, attempt: int) -> None:
        self._files: dict[int, TextIO] = {}
        self._lock = threading.Lock()
        if settings.logs is not None:
            settings.logs.mkdir(parents=True, exist_ok=True)
            for rank in range(settings.total):
                path = settings.logs / f"rank{rank}.log"
                self._files[rank] = path.open("a" if attempt else "w", encoding="utf-8")

    def __enter__(self) -> _Output:
        return self

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()

    def write(self, rank: int, line: str) -> None:
        """A line of a rank."""
        with self._lock:
            sys.stdout.write(f"[{rank}] {line}\n")
            sys.stdout.flush()
            if (file := self._files.get(rank)) is not None:
                file.write(line + "\n")
                file.flush()


def _watch(processes: Sequence[Process], hang: float, stall: float) -> tuple[Process | None, str, int]:
    """Wait until all have ended well, or one has failed: which, why, and the exit code."""
    while True:
        codes = [p.poll() for p in processes]
        # who was killed is the cause; those that lost it end with errors of their own
        bad = [(p, c) for p, c in zip(processes, codes, strict=True) if c]
        if bad:
            failed, code = min(bad, key=lambda found: found[1])
            failed.finish(2)  # its last lines
            if code == LOST:
                return failed, f"is out of reach: {failed.lost}", 255
            if code < 0:
                return failed, f"was ended by {signal.Signals(-code).name}", 128 - code
            return failed, f"ended with exit code {code}", code
        if all(c == 0 for c in codes):
            for p in processes:
                p.finish(5)
            return None, "", 0
        now = time.monotonic()
        for p, c in zip(processes, codes, strict=True):
            silent, limit = now - p.seen, hang if p.alive else max(hang, _START_SECONDS)
            if c is None and silent > limit:
                return p, f"hangs (no heartbeat for {silent:.0f} s)", 75
        running = [p for p, c in zip(processes, codes, strict=True) if c is None]
        if stall and any(p.still >= stall for p in running):
            return *_standing(running, stall), 75
        time.sleep(0.05)


def _standing(running: Sequence[Process], stall: float) -> tuple[Process, str]:
    """The process that others wait for, as far as that can be told: one that is not in a call of JAX, or else the one
    that has stood still for longest; and where each is."""
    own = [p for p in running if not p.place.endswith(IN_JAX)]
    failed = max(own or running, key=lambda p: p.still)
    places = "; ".join(f"rank {p.rank} for {p.still:.0f} s at {p.place}" for p in running)
    return failed, f"seems to hold the others up: nothing has moved for {stall:g} s ({places})"


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


def _say(text: str) -> None:
    print(f"xrt launch: {text}", file=sys.stderr, flush=True)

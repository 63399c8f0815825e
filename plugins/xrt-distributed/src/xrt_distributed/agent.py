"""The launcher's agent on another machine: starts the processes of that machine and tells what becomes of them.

`xrt launch --hosts` runs it over ssh. It speaks by lines of JSON, lists that begin with a rank, or -1 for itself:

    [-1, "hello", free port, version]       at its start
    [rank, "started", process]              [rank, "beat", text]
    [rank, "line", text]                    [rank, "ended", exit code]
    [-1, "failed", why]                     it cannot start them

It reads one line with what to start (`Order`), and then nothing but signs of life: where its input ends, or is silent
for `SILENCE` seconds, it ends its processes.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from msgspec import Struct, json

from xrt_distributed import __version__
from xrt_distributed.local import LocalProcess, end_all, start

SILENCE: Final = 60.0
_POLL_SECONDS: Final = 0.05


class Order(Struct, frozen=True):
    """What to start. folder: to work in. variables: rank -> of its environment. shared: variables of all; defaults:
    those where the environment has none."""

    command: tuple[str, ...]
    folder: str
    variables: dict[int, dict[str, str]]
    shared: dict[str, str]
    defaults: dict[str, str]


def main() -> int:
    """Serve one launcher; the exit code."""
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # nothing else may print there
    lock = threading.Lock()

    def send(*frame: Any) -> None:
        with lock:
            try:
                out.write(json.encode(frame) + b"\n")
            except OSError:
                os._exit(70)  # the launcher is gone; the system ends the processes with their parent

    send(-1, "hello", free_port(), __version__)
    try:
        order = json.decode(sys.stdin.buffer.readline(), type=Order)
        os.chdir(order.folder)
    except (OSError, ValueError) as e:
        send(-1, "failed", f"{e}")
        return 2
    processes: list[LocalProcess] = []
    try:
        for rank, own in order.variables.items():
            environment = merged(os.environ, own, order)
            says, beats = partial(send, rank, "line"), partial(send, rank, "beat")
            process = start(order.command, environment, rank, says, beats)
            processes.append(process)
            send(rank, "started", process.pid)
        _serve(processes, send)
    finally:
        end_all(processes)
    return 0


def merged(environ: Mapping[str, str], own: Mapping[str, str], order: Order) -> dict[str, str]:
    """The environment of a process: this machine's, what all of them share, and its own."""
    return {**order.defaults, **environ, **order.shared, **own}


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as s:
        s.bind(("", 0))
        return int(s.getsockname()[1])


def _serve(processes: list[LocalProcess], send: Any) -> None:
    """Tell what ends, until the launcher says no more: that ends its part as well."""
    told: set[int] = set()
    heard, stdin = time.monotonic(), sys.stdin.fileno()
    while True:
        for p in processes:
            if p.rank not in told and (code := p.poll()) is not None:
                p.finish(2)
                told.add(p.rank)
                send(p.rank, "ended", code)
        if select.select([stdin], [], [], _POLL_SECONDS)[0]:
            if not os.read(stdin, 4096):
                return
            heard = time.monotonic()
        if time.monotonic() - heard > SILENCE:
            return


if __name__ == "__main__":
    sys.exit(main())

"""One process of several: joins the others, gives heartbeats, and runs the program."""

from __future__ import annotations

import contextlib
import ctypes
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Final

_HEARTBEAT_SECONDS: Final = 0.5
_DEATH_SIGNAL: Final = 1  # PR_SET_PDEATHSIG


def main(command: Sequence[str]) -> None:
    """Run `program.py arguments` or `-m package arguments`, and end the process at once where it fails."""
    try:
        _run(command)
    except SystemExit as e:
        if e.code in (None, 0):
            raise
        if not isinstance(e.code, int):
            print(e.code, file=sys.stderr)
        _leave(e.code if isinstance(e.code, int) else 1)
    except BaseException:
        traceback.print_exc()
        _leave(1)


def _leave(code: int) -> None:
    """End the process without what JAX does at the end: it waits until all the others are there too, for minutes."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _run(command: Sequence[str]) -> None:
    from xrt_distributed import initialize
    from xrt_distributed.local import HEARTBEAT_VARIABLE

    _die_with_launcher()
    pipe = os.environ.pop(HEARTBEAT_VARIABLE, "")
    if pipe:
        os.set_inheritable(int(pipe), False)
        threading.Thread(target=_beat, args=(int(pipe),), daemon=True, name="xrt-launch-beat").start()
    initialize()
    if command[0] == "-m":
        sys.argv = list(command[1:])
        sys.path.insert(0, os.getcwd())
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(command)
        sys.path.insert(0, os.path.dirname(os.path.abspath(command[0])))
        runpy.run_path(command[0], run_name="__main__")


def _beat(pipe: int) -> None:
    """Write a byte now and then; end where nobody reads them."""
    while True:
        try:
            os.write(pipe, b".")
        except OSError:
            os._exit(70)
        time.sleep(_HEARTBEAT_SECONDS)


def _die_with_launcher() -> None:
    """Have the system end this process when the launcher dies (Linux; elsewhere the pipe tells)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])

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
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Final

from xrt_distributed.local import HEARTBEAT_VARIABLE, IN_JAX

_HEARTBEAT_SECONDS: Final = 0.5
_LINE: Final = 500  # bytes: a line is written as a whole
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
    """Write a line now and then: for how long the program has stood where it is, and where; end where nobody reads."""
    main, known, since = threading.main_thread().ident, None, time.monotonic()
    while True:
        frame = sys._current_frames().get(main or 0)
        stack = [(f.f_code, f.f_lasti) for f in _frames(frame)]
        if stack != known:
            known, since = stack, time.monotonic()
        line = f"{time.monotonic() - since:.1f} {_place(frame)}".encode("utf-8", "replace")
        frame = None  # it holds the program's variables
        try:
            os.write(pipe, line[:_LINE] + b"\n")
        except OSError:
            os._exit(70)
        time.sleep(_HEARTBEAT_SECONDS)


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _place(frame: FrameType | None) -> str:
    """Line and function of the program that the innermost call belongs to, and whether that is one of JAX."""
    installed = (sys.prefix, sys.base_prefix, os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "<frozen")
    within = ""
    for f in _frames(frame):
        if f"{os.sep}jax{os.sep}" in f.f_code.co_filename:
            within = IN_JAX
        if not f.f_code.co_filename.startswith(installed):
            return f"{os.path.basename(f.f_code.co_filename)}:{f.f_lineno} ({f.f_code.co_name}){within}"
    return "its start" if frame is not None else "its end"


def _die_with_launcher() -> None:
    """Have the system end this process when the launcher dies (Linux; elsewhere the pipe tells)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])

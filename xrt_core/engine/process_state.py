"""Process state: what a library can change in the thread and the process that call it, as one table of aspects.

The boundary restores some aspects after an import, a compilation, a load and a first run; a stress test compares all of
them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import locale
import logging
import os
import platform
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from xrt_core.events import process_events

State = Mapping[str, Any]
"""The values of aspects, by name. None: not known on this platform, or in this thread."""


@dataclass(frozen=True, slots=True)
class Aspect:
    """One part of the state.

    name: for messages. read: its value, which compares by `==`. restore: sets a value that was read before. boundary:
    restored after every call into an engine that may load a library. It costs microseconds, and no other thread of
    the program is disturbed. rejects: an engine that changes it is not used: "always", if a "run" does so, or "never".
    """

    name: str
    read: Callable[[], Any]
    restore: Callable[[Any], object] | None = None
    boundary: bool = False
    rejects: Literal["always", "run", "never"] = "never"


def snapshot(aspects: Iterable[Aspect] | None = None) -> State:
    """The values of these aspects, by default of all. What cannot be read is None."""
    found: dict[str, Any] = {}
    for a in ASPECTS.values() if aspects is None else aspects:
        found[a.name] = None
        with contextlib.suppress(Exception):
            found[a.name] = a.read()
    return found


def changed(before: State, after: State) -> list[Aspect]:
    """The aspects that differ between two snapshots, of those that both know."""
    return [
        ASPECTS[name]
        for name, value in before.items()
        if value is not None and after.get(name) is not None and after[name] != value
    ]


def restore(aspects: Iterable[Aspect], state: State) -> None:
    """Set these aspects to the values of a snapshot, as far as they can be set."""
    for a in aspects:
        if a.restore is not None:
            with contextlib.suppress(Exception):  # a folder that was removed, a handler of C code
                a.restore(state[a.name])


@contextlib.contextmanager
def preserved_state(owner: str) -> Iterator[None]:
    """Restore at the end of the block what a library may have changed, as far as `AT_BOUNDARY` has it: NumPy's error
    state, the floating-point environment and the affinity of this thread, the working directory, signal handlers.

    owner: for the event `state.restored`, which names what was changed.
    """
    before = snapshot(AT_BOUNDARY)
    try:
        yield
    finally:
        found = changed(before, snapshot(AT_BOUNDARY))
        if found:
            restore(found, before)
            process_events.emit("state.restored", owner=owner, changed=", ".join(a.name for a in found))


# --- floating point ---------------------------------------------------------------------------------------------------


@functools.cache
def _libm() -> Any:
    """The C library's fegetenv and fesetenv; None on a processor whose environment is not understood here."""
    if platform.machine() not in ("x86_64", "AMD64", "aarch64"):
        return None
    try:
        library = ctypes.CDLL(None)
        if library.fegetenv and library.fesetenv:
            return library
    except (OSError, AttributeError, TypeError):
        pass
    return None


def _environment() -> Any:
    library = _libm()
    if library is None:
        return None
    environment = ctypes.create_string_buffer(64)
    library.fegetenv(environment)
    return environment


_STICKY: Final = 0x3F  # bits of SSE's control word that say what has happened so far
_CONTROL: Final = slice(28, 32)  # of SSE, in the environment


def _float_control() -> tuple[bytes, int] | None:
    """The part of the environment that controls results: rounding, flush to zero, masks; not the sticky flags.

    x86-64: the control words of the FPU and of SSE. aarch64: FPCR.
    """
    environment = _environment()
    if environment is None:
        return None
    raw = bytes(environment)
    if platform.machine() == "aarch64":
        return raw[:4], 0
    return raw[:2], int.from_bytes(raw[_CONTROL], "little") & ~_STICKY


def _set_float_control(control: tuple[bytes, int]) -> None:
    raw = bytearray(_environment())
    if platform.machine() == "aarch64":
        raw[:4] = control[0]
    else:
        raw[:2] = control[0]
        happened = int.from_bytes(raw[_CONTROL], "little") & _STICKY
        raw[_CONTROL] = (control[1] | happened).to_bytes(4, "little")
    _libm().fesetenv(bytes(raw))


# --- the process ------------------------------------------------------------------------------------------------------


def _handlers() -> dict[str, Any] | None:
    if threading.current_thread() is not threading.main_thread():
        return None  # only that thread can set them
    names = ("SIGINT", "SIGTERM", "SIGABRT", "SIGSEGV", "SIGFPE", "SIGHUP", "SIGPIPE", "SIGCHLD", "SIGUSR1", "SIGUSR2")
    return {name: signal.getsignal(n) for name in names if (n := getattr(signal, name, None)) is not None}


def _set_handlers(before: Mapping[str, Any]) -> None:
    for name, handler in before.items():
        number = getattr(signal, name)
        if handler is not None and signal.getsignal(number) != handler:
            signal.signal(number, handler)


def _umask() -> int | None:
    """Read without setting it, which would be felt by other threads."""
    with open("/proc/self/status") as status:
        return next((int(line.split()[1], 8) for line in status if line.startswith("Umask:")), None)


def _streams() -> tuple[Any, ...]:
    descriptors = []
    for k in range(3):
        try:
            found = os.fstat(k)
            descriptors.append((found.st_dev, found.st_ino))
        except OSError:
            descriptors.append((-1, -1))
    return sys.stdin, sys.stdout, sys.stderr, tuple(descriptors)


def _set_streams(streams: tuple[Any, ...]) -> None:
    sys.stdin, sys.stdout, sys.stderr = streams[:3]


def _limits() -> tuple[Any, ...]:
    import resource  # not on every platform

    names = ("RLIMIT_NOFILE", "RLIMIT_AS", "RLIMIT_CORE", "RLIMIT_STACK", "RLIMIT_DATA", "RLIMIT_CPU")
    return tuple(resource.getrlimit(getattr(resource, n)) for n in names)


def _numpy_random() -> Any:
    state: Any = np.random.get_state()
    key, position, *rest = state[1:]
    return np.asarray(key).tobytes(), position, *rest


def _set_numpy_random(state: tuple[Any, ...]) -> None:
    np.random.set_state(("MT19937", np.frombuffer(state[0], np.uint32), *state[1:]))


def _set_collector(state: tuple[bool, tuple[int, int, int]]) -> None:
    (gc.enable if state[0] else gc.disable)()
    gc.set_threshold(*state[1])


def _root_logger() -> Any:
    root = logging.getLogger()
    return root.level, list(root.handlers), list(root.filters), logging.root.manager.disable


def _hooks() -> Any:
    return (
        sys.excepthook, sys.displayhook, sys.unraisablehook, threading.excepthook, sys.gettrace(), sys.getprofile(),
    )  # fmt: skip


ASPECTS: Final[Mapping[str, Aspect]] = {
    a.name: a
    for a in (
        Aspect("NumPy's error state", np.geterr, lambda v: np.seterr(**v), True, "run"),
        Aspect("the floating-point environment", _float_control, _set_float_control, True, "run"),
        Aspect("the working directory", os.getcwd, os.chdir, True, "run"),
        Aspect("signal handlers", _handlers, _set_handlers, True, "run"),
        Aspect("the CPU affinity", lambda: os.sched_getaffinity(0), lambda v: os.sched_setaffinity(0, v), True, "run"),
        Aspect("random's state", random.getstate, random.setstate, rejects="run"),
        Aspect("NumPy's random state", _numpy_random, _set_numpy_random, rejects="run"),
        Aspect("the umask", _umask, os.umask, rejects="always"),
        Aspect(
            "the locale",
            lambda: locale.setlocale(locale.LC_ALL),
            lambda v: locale.setlocale(locale.LC_ALL, v),
            rejects="always",
        ),
        Aspect("the standard streams", _streams, _set_streams, rejects="always"),
        Aspect("the priority", lambda: os.getpriority(os.PRIO_PROCESS, 0), rejects="always"),
        Aspect("resource limits", _limits, rejects="always"),
        Aspect("the garbage collector", lambda: (gc.isenabled(), gc.get_threshold()), _set_collector, rejects="always"),
        Aspect("the switch interval", sys.getswitchinterval, sys.setswitchinterval, rejects="always"),
        Aspect("the environment", lambda: dict(os.environ)),
        Aspect("warnings filters", lambda: list(warnings.filters)),
        Aspect("the root logger", _root_logger),
        Aspect("the recursion limit", sys.getrecursionlimit),
        Aspect("the interpreter's hooks", _hooks),
        Aspect("NumPy's print options", lambda: {k: str(v) for k, v in np.get_printoptions().items()}),
        Aspect("sys.path", lambda: list(sys.path)),
    )
}
"""Every aspect by name."""

AT_BOUNDARY: Final = tuple(a for a in ASPECTS.values() if a.boundary)
"""Those that the boundary restores."""

"""The boundary to engines: every call of the core into an engine's code goes through the proxies of this module.

An engine, its compilers and its executables are used as `EngineProxy`, `CompilerProxy` and `ExecutableProxy`. What an
engine raises, SystemExit and KeyboardInterrupt included, comes out as an `XRTError` whose message is bounded and which
holds neither traceback nor arguments, and so no array. What signal handlers of the program raise meanwhile, Ctrl-C
first of all, passes through. The attributes of an engine are read once, checked, and kept. State of the thread and the
process that a library changes when it is loaded, compiles, or first runs is restored.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import locale
import logging
import math
import os
import platform
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Literal, TypeVar

import numpy as np
from msgspec import Struct

from xrt_core import errors
from xrt_core.engine.contract import (
    ARRAY_FAMILIES,
    DEFAULT_RUN_OPTIONS,
    CompileOptions,
    Engine,
    EngineStatus,
    Executable,
    GraphCompiler,
    RunOptions,
    Tolerance,
)
from xrt_core.engine.device_kinds import device_kind, kinds, number_of
from xrt_core.engine.interpreter_turns import usual_interval
from xrt_core.errors import (
    CompileError,
    EngineError,
    ExecutionError,
    PluginError,
    XRTError,
    describe,
    is_from_program,
    message_of,
    printable,
)
from xrt_core.events import process_events
from xrt_core.ir.function import Function, InputOutputAlias, Parameter, operators_of
from xrt_core.ir.garbage_collection import is_usually_on
from xrt_core.ir.graph import Node, Phase, Support

T = TypeVar("T")

_FINGERPRINT_LIMIT: Final = 1000
_PRIORITY_LIMIT: Final = 1_000_000


# --- exceptions -------------------------------------------------------------------------------------------------------


def failure_of(error: BaseException, subject: str, kind: type[XRTError] = EngineError) -> XRTError:
    """The error that stands for what an engine raised; raises `error` itself where it comes from the program.

    subject: who did what ("engine 'acme': its probe"). kind: the class for what is no XRTError. To be raised outside
    of the `except` block, so that it keeps no reference to the original.
    """
    if is_from_program(error):
        raise error
    if isinstance(error, XRTError):
        own = next((c for c in type(error).__mro__ if c.__module__ == errors.__name__), kind)
        return own(message_of(error))  # type: ignore[no-any-return]
    return kind(f"{subject} raised {describe(error)}")


def call_engine(subject: str, kind: type[XRTError], call: Callable[..., T], *args: Any) -> T:
    """What `call` returns. Raises an XRTError (`failure_of`) for whatever it raises."""
    try:
        return call(*args)
    except BaseException as e:
        failure = failure_of(e, subject, kind)
    raise failure


State = Mapping[str, Any]
"""The values of aspects, by name. None: not known on this platform, or in this thread."""


class Aspect(Struct, frozen=True):
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


class _Here(threading.local):
    is_beside = False


_here: Final = _Here()


@contextlib.contextmanager
def beside_the_program() -> Iterator[None]:
    """Mark what this thread does as done while the program goes on. What belongs to the process, as its working
    directory does, is not restored then: the program may have changed it meanwhile."""
    before, _here.is_beside = _here.is_beside, True
    try:
        yield
    finally:
        _here.is_beside = before


@contextlib.contextmanager
def preserved_state(owner: str) -> Iterator[None]:
    """Restore at the end of the block what a library may have changed, as far as `AT_BOUNDARY` has it: NumPy's error
    state, the floating-point environment and the affinity of this thread, the working directory, signal handlers,
    timers whose signal would end the program. A copy of this process, where the library forked and both returned, ends:
    else it would run the rest of the program once more.

    owner: for the event `state.restored`, which names what was changed.
    """
    aspects = _OF_THREAD if _here.is_beside else AT_BOUNDARY
    before, process = snapshot(aspects), os.getpid()
    try:
        yield
    finally:
        if os.getpid() != process:
            os._exit(1)
        found = changed(before, snapshot(aspects))
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


def round_to_nearest() -> None:
    """Set the rounding of this thread to what Python and NumPy assume."""
    library = _libm()
    if library is not None:
        library.fesetround(0)  # FE_TONEAREST on the processors that are understood


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


_TIMERS: Final = tuple(
    getattr(signal, name) for name in ("ITIMER_REAL", "ITIMER_VIRTUAL", "ITIMER_PROF") if hasattr(signal, name)
)


def _armed_timers() -> tuple[int, ...]:
    return tuple(timer for timer in _TIMERS if signal.getitimer(timer)[0])


def _disarm_others(before: tuple[int, ...]) -> None:
    """One of the program's own that has expired or was taken away cannot be known from one that it stopped."""
    for timer in _armed_timers():
        if timer not in before:
            signal.setitimer(timer, 0.0)


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


def _collector() -> tuple[bool, tuple[int, int, int]]:
    return is_usually_on(), gc.get_threshold()


def _set_collector(state: tuple[bool, tuple[int, int, int]]) -> None:
    (gc.enable if state[0] else gc.disable)()  # where it is paused, for the rest of the pause
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
        Aspect("interval timers", _armed_timers, _disarm_others, True, "run"),
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
        Aspect("the garbage collector", _collector, _set_collector, rejects="always"),
        Aspect("the switch interval", usual_interval, sys.setswitchinterval, rejects="always"),
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
_OF_THREAD: Final = tuple(a for a in AT_BOUNDARY if a.name not in ("the working directory", "interval timers"))
"""Of these, those that only this thread has."""


# --- proxies ----------------------------------------------------------------------------------------------------------


class EngineProxy(Engine):
    """An engine behind the boundary, with its attributes read once.

    inner: the engine's own object. owner: its package, for messages. Raises PluginError, at construction, for an
    attribute that cannot be read or that breaks the contract.
    """

    def __init__(self, inner: Engine, owner: str) -> None:
        self.inner = inner
        self._owner = owner
        for name, (fits, expected, convert) in _ATTRIBUTES.items():
            setattr(self, name, self._attribute(name, fits, expected, convert))
        self._package: str = self._attribute("package", _is_text, "a string")
        self._process: int | None = None  # in which its library was first used
        self._subject = f"engine {self.name!r}"

    def _attribute(
        self, name: str, fits: Callable[[Any], bool], expected: str, convert: Callable[[Any], Any] | None = None
    ) -> Any:
        value = call_engine(f"{self._owner}: reading {name}", PluginError, getattr, self.inner, name)
        right = call_engine(f"{self._owner}: reading {name}", PluginError, fits, value)
        if not right:
            raise PluginError(f"{self._owner}: its {name} is {clipped(value)}; expected {expected}")
        return value if convert is None else call_engine(f"{self._owner}: reading {name}", PluginError, convert, value)

    @property
    def is_inherited(self) -> bool:
        """Whether its library was in use when this process was forked: the library's threads do not exist here."""
        return self._process not in (None, os.getpid())

    @property
    def package(self) -> str:
        """See `Engine.package`."""
        return self._package

    @property
    def conformance(self) -> Mapping[str, Any]:  # type: ignore[override]
        """See `Engine.conformance`. Read when the kit asks: the answer may need the library."""
        return self._attribute("conformance", lambda v: isinstance(v, Mapping), "a mapping", _frozen)  # type: ignore[no-any-return]

    def probe(self) -> EngineStatus:
        """See `Engine.probe`. Raises PluginError for a probe that raises or returns something else."""
        self._process = self._process or os.getpid()
        what = f"{self._subject} of {self._package}: its probe"
        with preserved_state(self._subject):
            status = call_engine(what, PluginError, self.inner.probe)
        return self._checked_status(status, what)

    @staticmethod
    def _checked_status(status: object, what: str) -> EngineStatus:
        if not isinstance(status, EngineStatus):
            raise PluginError(f"{what} returned {clipped(status)} instead of an EngineStatus")
        texts = (status.version, status.reason, status.remedy)
        if not all(map(_is_text, texts)) or not _are_device_names(status.devices) or type(status.available) is not bool:
            raise PluginError(f"{what} returned {clipped(status)}, whose fields are not of the types of EngineStatus")
        return status

    def probe_installed(self) -> EngineStatus | None:
        """See `Engine.probe_installed`; None for one that raises or returns something else: then `probe` is asked."""
        with preserved_state(self._subject), contextlib.suppress(PluginError):
            what = f"{self._subject} of {self._package}: its probe_installed"
            status = call_engine(what, PluginError, self.inner.probe_installed)
            return status if status is None else self._checked_status(status, what)
        return None

    def supports(self, node: Node, device: str, phase: Phase) -> Support:
        """See `Engine.supports`. Raises EngineError for one that raises or returns something else."""
        found = call_engine(f"{self._subject}: supports", EngineError, self.inner.supports, node, device, phase)
        if type(found) is not Support or type(found.ok) is not bool or not _is_text(found.reason):
            raise EngineError(f"it returned {clipped(found)} instead of a Support")
        return found

    def compiler(self, device: str, options: CompileOptions) -> GraphCompiler:
        """See `Engine.compiler`. Raises CompileError for one that raises or returns something else, and in a forked
        process where the engine was left behind."""
        self._process = self._process or os.getpid()
        if self.is_inherited:
            raise CompileError(
                f"{self._subject} was in use when this process was forked, and its library's threads are not here: "
                "fork before it is used, start processes by 'spawn', or set guard='isolated'"
            )
        with preserved_state(self._subject):
            made = call_engine(f"{self._subject}: compiler", CompileError, self.inner.compiler, device, options)
        if not isinstance(made, GraphCompiler):
            raise CompileError(
                f"{self._subject} ({self._package}) gave a {type(made).__name__} as its compiler for {device}, "
                "expected a GraphCompiler; this is a bug of that package"
            )
        return CompilerProxy(made, self.name, self._package, device)

    def fingerprint(self, device: str) -> str:
        """See `Engine.fingerprint`. Raises PluginError for what is no short text."""
        with preserved_state(self._subject):
            found = call_engine(f"{self._subject}: fingerprint", PluginError, self.inner.fingerprint, device)
        if not _is_text(found) or len(found) > _FINGERPRINT_LIMIT:
            raise PluginError(
                f"{self._subject} of {self._package}: its fingerprint for {device} is {clipped(found)}; expected a "
                f"text of at most {_FINGERPRINT_LIMIT} characters"
            )
        return found

    def targeting(self, target: str) -> Engine:
        """See `Engine.targeting`."""
        found = call_engine(f"{self._subject}: targeting", EngineError, self.inner.targeting, target)
        return EngineProxy(found, self._owner)

    def tolerance_with(self, options: CompileOptions) -> Mapping[str, Tolerance]:
        """See `Engine.tolerance_with`. Raises EngineError for what is no mapping of dtypes to finite Tolerances."""
        with preserved_state(self._subject):
            found = call_engine(f"{self._subject}: tolerance_with", EngineError, self.inner.tolerance_with, options)
        if not _are_tolerances(found):
            raise EngineError(
                f"{self._subject}: tolerance_with gave {clipped(found)}, expected a mapping of dtypes to finite "
                "Tolerances; this is a bug of the engine's package"
            )
        return _frozen(found)

    def prepare(self) -> None:
        """See `Engine.prepare`."""
        with preserved_state(self._subject):
            call_engine(f"{self._subject}: prepare", EngineError, self.inner.prepare)


class CompilerProxy(GraphCompiler):
    """A compiler behind the boundary. On a kind of device with `arrays` its executables take NumPy arrays as well.

    inner: the engine's own object.
    """

    def __init__(self, inner: GraphCompiler, engine: str, package: str, device: str) -> None:
        self.inner = inner
        self._engine, self._package = engine, package
        self._move = mover(device)

    def compile(
        self,
        function: Function,
        entry_params: Sequence[Parameter],
        return_params: Sequence[Parameter],
        aliases: Sequence[InputOutputAlias],
    ) -> Executable:
        """See `GraphCompiler.compile`. Raises CompileError for a compiler that returns something else."""
        return self._made(
            f"{function.name} ({operators_of(function)})",
            self.inner.compile, function, entry_params, return_params, aliases,
        )  # fmt: skip

    @property
    def stages(self) -> Mapping[str, str]:  # type: ignore[override]
        """See `GraphCompiler.stages`. Raises CompileError for what is no mapping of texts; read when somebody asks."""
        subject = f"engine {self._engine!r}: reading stages"
        found = call_engine(subject, CompileError, lambda: dict(self.inner.stages))
        if not all(_is_text(k) and _is_text(v) for k, v in found.items()):
            raise CompileError(f"{subject}: {clipped(found)}; expected a mapping of names to descriptions")
        return _frozen(found)

    def as_text(
        self,
        function: Function,
        entry_params: Sequence[Parameter],
        return_params: Sequence[Parameter],
        aliases: Sequence[InputOutputAlias],
        stage: str,
    ) -> str:
        """See `GraphCompiler.as_text`."""
        subject = f"engine {self._engine!r}: {function.name}, stage {stage!r}"
        with preserved_state(f"engine {self._engine!r}"):
            given = function, entry_params, return_params, aliases, stage
            return printable(str(call_engine(subject, CompileError, self.inner.as_text, *given)))

    def load(self, blob: bytes) -> Executable:
        """See `GraphCompiler.load`."""
        return self._made("load", self.inner.load, blob)

    def load_code(self, blob: bytes, function: Function) -> Executable:
        """See `GraphCompiler.load_code`."""
        return self._made("load_code", self.inner.load_code, blob, function)

    def _made(self, what: str, call: Callable[..., Executable], *args: Any) -> Executable:
        with preserved_state(f"engine {self._engine!r}"):
            made = call_engine(f"engine {self._engine!r}: {what}", CompileError, call, *args)
        if not isinstance(made, Executable):
            raise CompileError(
                f"the compiler of engine {self._engine!r} ({self._package}) returned a {type(made).__name__} for "
                f"{what}, expected an Executable; this is a bug of that package"
            )
        return ExecutableProxy(made, self._engine, self._move)


class ExecutableProxy(Executable):
    """An executable behind the boundary.

    inner: the engine's own object. move: takes inputs to its device, or None. has_run: whether a run has succeeded.
    """

    def __init__(self, inner: Executable, engine: str, move: Callable[[Any], Any] | None = None) -> None:
        self.inner = inner
        self._engine = engine
        self.move = move
        self.has_run = False
        declared = call_engine(f"engine {engine!r}: reading tolerance", CompileError, lambda: inner.tolerance)
        if declared is not None:
            if not _are_tolerances(declared):
                raise CompileError(
                    f"engine {engine!r}: an executable's tolerance is {clipped(declared)}, expected a mapping of "
                    "dtypes to finite Tolerances; this is a bug of the engine's package"
                )
            self.tolerance = _frozen(declared)
        self.fixed_results = call_engine(
            f"engine {engine!r}: reading fixed_results", CompileError, lambda: inner.fixed_results is True
        )

    def run(
        self, inputs: Sequence[Any], run_options: RunOptions = DEFAULT_RUN_OPTIONS, block_until_done: bool = True
    ) -> Sequence[Any]:
        """See `Executable.run`. Raises ExecutionError for whatever the engine raises."""
        try:
            if self.has_run:
                if self.move is not None:
                    inputs = [self.move(x) for x in inputs]
                return self.inner.run(inputs, run_options, block_until_done)
            return self._first(inputs, run_options, block_until_done)
        except BaseException as e:
            failure = failure_of(e, f"engine {self._engine!r}", ExecutionError)
        raise failure

    def _first(self, inputs: Sequence[Any], run_options: RunOptions, block_until_done: bool) -> Sequence[Any]:
        with preserved_state(f"engine {self._engine!r}"):
            if self.move is not None:
                inputs = [self.move(x) for x in inputs]
            results = self.inner.run(inputs, run_options, block_until_done)
        self.has_run = True
        return results

    def devices(self) -> tuple[str, ...]:
        """See `Executable.devices`."""
        found = call_engine(f"engine {self._engine!r}: devices", EngineError, self.inner.devices)
        return tuple(map(str, found)) if isinstance(found, tuple) else ()

    def serialize(self) -> bytes:
        """See `Executable.serialize`."""
        return _bytes(call_engine(f"engine {self._engine!r}: serialize", EngineError, self.inner.serialize))

    def serialize_code(self) -> bytes:
        """See `Executable.serialize_code`."""
        return _bytes(call_engine(f"engine {self._engine!r}: serialize_code", EngineError, self.inner.serialize_code))

    def as_text(self) -> str:
        """See `Executable.as_text`."""
        return printable(str(call_engine(f"engine {self._engine!r}: as_text", EngineError, self.inner.as_text)))

    def __repr__(self) -> str:
        return f"<executable of {self._engine}>"


def mover(device: str) -> Callable[[Any], Any] | None:
    """The function that takes an input to a device whose kind has a class of arrays of its own; None for the others."""
    kind = device_kind(device)
    if kind.arrays is None:
        return None
    arrays, number = kind.arrays, number_of(device)

    def move(x: Any) -> Any:
        if isinstance(x, np.ndarray):
            return arrays.from_host(x, number)
        if isinstance(x, arrays.type) and kind.device_of(x) != number:
            return arrays.from_host(arrays.to_host(x), number)
        return x

    return move


def read(x: Any) -> np.ndarray:
    """The NumPy array of a result of an executable: of an array of a device kind, or what `numpy.asarray` can read."""
    kind = kinds.of_array(type(x))
    return np.asarray(x) if kind is None or kind.arrays is None else kind.arrays.to_host(x)


def direct(executable: Executable) -> Executable:
    """The engine's own object, for a caller that handles whatever its `run` raises, after a run through the proxy."""
    if isinstance(executable, ExecutableProxy) and executable.has_run and executable.move is None:
        return executable.inner
    return executable


def loads(compiler: GraphCompiler) -> bool:
    """Whether an engine implements `load` or `load_code`: its executables can come from the disk."""
    kind = type(compiler.inner if isinstance(compiler, CompilerProxy) else compiler)
    return kind.load is not GraphCompiler.load or kind.load_code is not GraphCompiler.load_code


def is_inherited(engine: Engine) -> bool:
    """See `EngineProxy.is_inherited`."""
    return isinstance(engine, EngineProxy) and engine.is_inherited


def inner_of(engine: Engine) -> Engine:
    """The engine's own object."""
    return engine.inner if isinstance(engine, EngineProxy) else engine


def clipped(value: object) -> str:
    """The representation of a value for a message, at most 200 printable characters. Never raises."""
    try:
        return printable(repr(value)[:200])
    except BaseException:
        return f"a {type(value).__name__} that cannot be printed"


def _bytes(blob: Any) -> bytes:
    if not isinstance(blob, bytes):
        raise EngineError(f"it returned {clipped(blob)}, expected bytes")
    return blob


def _is_text(value: Any) -> bool:
    return type(value) is str


def _are_texts(value: Any) -> bool:
    return isinstance(value, tuple | list) and bool(value) and all(map(_is_text, value))


def _are_device_names(value: Any) -> bool:
    return isinstance(value, tuple) and all(_is_text(d) and kinds.is_known(d.partition(":")[0]) for d in value)


def _are_families(value: Any) -> bool:
    return isinstance(value, tuple) and all(f in ARRAY_FAMILIES for f in value)


def _are_ranks(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        _is_text(k) and type(v) is int and abs(v) <= _PRIORITY_LIMIT for k, v in value.items()
    )


def _are_tolerances(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        _is_text(k)
        and isinstance(t, Tolerance)
        and all(isinstance(x, int | float) and math.isfinite(x) and x >= 0 for x in (t.absolute, t.relative, t.share))
        and t.share <= 1
        and _is_text(t.reason)
        and t.accumulates in ("", "float16", "bfloat16")
        and t.computed_in in ("", "float16", "bfloat16")
        for k, t in value.items()
    )


def _are_precisions(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        k in ("float16", "bfloat16") and isinstance(options, Mapping) and all(map(_is_text, options))
        for k, options in value.items()
    )


def _frozen(value: Mapping[Any, Any]) -> Mapping[Any, Any]:
    return MappingProxyType(dict(value))


def _is_bool(value: Any) -> bool:
    return type(value) is bool


_ATTRIBUTES: Final[Mapping[str, tuple[Callable[[Any], bool], str, Callable[[Any], Any] | None]]] = MappingProxyType(
    {
        "name": (_is_text, "a string", None),
        "api_version": (lambda v: type(v) is int, "an integer", None),
        "devices": (_are_texts, "a tuple of device kinds", tuple),
        "priority": (_are_ranks, "a mapping of phases to integers", _frozen),
        "switch": (_is_text, "a string", None),
        "automatic": (_is_bool, "a bool", None),
        "array_families": (_are_families, f"a tuple of some of {', '.join(ARRAY_FAMILIES)}", tuple),
        "asynchronous": (_is_bool, "a bool", None),
        "open_shapes": (lambda v: v in ("none", "results", "any"), "'none', 'results' or 'any'", None),
        "checks_indices": (lambda v: not v or _are_texts(v), "a tuple of strings", tuple),
        "meshes": (_is_bool, "a bool", None),
        "tolerance": (_are_tolerances, "a mapping of dtypes to finite Tolerances", _frozen),
        "dynamic_dims": (lambda v: v in ("none", "any"), "'none' or 'any'", None),
        "reduced_precisions": (_are_precisions, "a mapping of 'float16', 'bfloat16' to options of the engine", _frozen),
        "native_operators": (lambda v: not v or _are_texts(v), "a tuple of strings", tuple),
        "variables": (lambda v: not v or _are_texts(v), "a tuple of strings", tuple),
    }
)
"""Attribute of an engine -> (whether a value is right, what is expected, how it is kept)."""

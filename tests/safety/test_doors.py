"""Every call of the core into an engine x everything that it may do there: the caller gets the host's numbers.

The engine computes right through the host's kernels, but for one door (an attribute or a method) and one kind of
misbehaviour. Modules run unguarded: the boundary and the checks of the launch are always there.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from xrt_core.cache.store import forget_all
from xrt_core.engine import engines
from xrt_core.engine.contract import CompileOptions, Tolerance
from xrt_core.engine.serialization import instruction_set
from xrt_core.errors import EngineError, XRTError
from xrt_core.ir.graph import Graph, Support, Value
from xrt_core.ir.types import TensorType
from xrt_core.module import XRTModule
from xrt_core.plugins import plugins
from xrt_core.plugins.discovery import DISABLE_VARIABLE
from xrt_core.testing import functions
from xrt_core.testing.host_engine import HostCompiler, HostEngine, HostExecutable
from xrt_core.testing.processes import run_python

pytestmark = pytest.mark.tiny_clusters

X = np.linspace(-2, 2, 32, dtype=np.float32).reshape(4, 8)


class Unprintable(BaseException):
    """An exception whose message cannot be had."""

    def __str__(self) -> str:
        raise SystemExit("no message")

    __repr__ = __str__


def raising(error: Callable[[], BaseException]) -> Callable[..., Any]:
    def call(*args: Any, **keywords: Any) -> Any:
        raise error()

    return call


RAISES: dict[str, Callable[..., Any]] = {
    "raises": raising(lambda: RuntimeError("boom")),
    "raises SystemExit": raising(lambda: SystemExit(3)),
    "raises KeyboardInterrupt": raising(KeyboardInterrupt),
    "raises GeneratorExit": raising(GeneratorExit),
    "raises a group": raising(lambda: BaseExceptionGroup("several", [SystemExit(1), ValueError("x")])),
    "raises StopIteration": raising(StopIteration),
    "raises MemoryError": raising(MemoryError),
    "raises what cannot be printed": raising(Unprintable),
    "raises a long message": raising(lambda: ValueError("x" * 50_000_000)),
}
RETURNS: dict[str, Callable[..., Any]] = {
    "returns None": lambda *a, **k: None,
    "returns an int": lambda *a, **k: 3,
    "returns text": lambda *a, **k: "yes",
    "returns a class": lambda *a, **k: int,
}


def graph() -> Graph:
    """y = relu(x) + c."""
    x, h, y = (functions.value(n, 4, 8) for n in "xhy")
    c = Value.constant(np.arange(8, dtype=np.float32))
    nodes = [functions.node("Relu", [x], [h]), functions.node("Add", [h, c], [y])]
    return functions.function("g", [x], nodes, [y]).body


WANT = np.maximum(X, 0) + np.arange(8, dtype=np.float32)


@pytest.fixture
def register() -> Iterator[Callable[[type[HostEngine]], str]]:
    made: list[str] = []

    def add(engine: type[HostEngine]) -> str:
        forget_all()  # an executable of another test's engine of the same name
        engines.register(engine)
        made.append(engine.name)
        return engine.name

    yield add
    for name in made:
        engines.unregister(name)


def engine_with(method: str, does: Callable[..., Any]) -> type[HostEngine]:
    """An engine, one of whose methods, or those of its compiler or executable, does something else."""
    executable = type("Executable", (HostExecutable,), {method: does} if hasattr(HostExecutable, method) else {})

    class Compiler(HostCompiler):
        def compile(self, function: Any, *args: Any) -> Any:
            return executable(function, *args)

    compiler = type("Compiler", (Compiler,), {method: does} if method in ("compile", "load") else {})
    own: dict[str, Any] = {"name": "odd", "compiler": lambda self, device, options: compiler()}
    if hasattr(HostEngine, method):
        own[method] = does
    return type("Odd", (HostEngine,), own)


def answer(engine: str, **options: Any) -> tuple[np.ndarray, XRTModule]:
    """What a caller gets from two calls, unless the engine, which is asked for by name, is refused with a reason."""
    module = XRTModule(graph(), engine=engine, **{"cache": "off", **options})
    module(X)
    return module(X), module


METHODS = ["supports", "compiler", "compile", "run", "serialize", "serialize_code", "as_text"]


@pytest.mark.parametrize("kind", [*RAISES, *RETURNS])
@pytest.mark.parametrize("method", METHODS)
def test_methods(method: str, kind: str, register: Callable[[type[HostEngine]], str]) -> None:
    """The host's numbers, and what is kept of the failure is short."""
    does = {**RAISES, **RETURNS}[kind]
    found, module = answer(register(engine_with(method, does)))
    np.testing.assert_array_equal(found, WANT)
    assert all(len(text) < 3000 for text in module.explain().errors.values())


@pytest.mark.parametrize("kind", [*RAISES, *RETURNS])
@pytest.mark.parametrize("method", ["probe", "fingerprint", "prepare"])
def test_methods_of_the_engine(method: str, kind: str, register: Callable[[type[HostEngine]], str]) -> None:
    """Asked for by name, a broken engine is an EngineError, or the host stands in; with auto it stays out."""
    does = {**RAISES, **RETURNS}[kind]
    name = register(engine_with(method, does))
    try:
        found, _ = answer(name, cache="readwrite")
    except EngineError as e:
        message = str(e)
    else:
        message = ""
        np.testing.assert_array_equal(found, WANT)
    assert len(message) < 3000


ATTRIBUTES: list[tuple[str, Any]] = [
    ("priority", 3), ("priority", {"inference": "high"}), ("priority", {"inference": 10**30}), ("priority", None),
    ("automatic", "yes"), ("automatic", None),
    ("tolerance", {"float32": 1e30}), ("tolerance", {"float32": Tolerance(float("nan"), 0.0)}),
    ("tolerance", {"float32": Tolerance(0.0, float("inf"))}), ("tolerance", {3: Tolerance(0.0, 0.0)}),
    ("devices", "cpu"), ("devices", ()), ("devices", (1,)), ("devices", ("abacus",)),
    ("array_families", ("punched cards",)), ("array_families", 7), ("asynchronous", "maybe"),
    ("switch", 5), ("variables", 5), ("package", 5), ("package", None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), ATTRIBUTES, ids=lambda v: str(v)[:30])
def test_attributes(name: str, value: Any) -> None:
    """A wrong attribute leaves that engine out, with the reason; the others take part."""
    broken = type("Broken", (HostEngine,), {"name": "broken", name: value})
    _left_out(broken, name)


@pytest.mark.parametrize("kind", RAISES)
@pytest.mark.parametrize("name", ["priority", "automatic", "tolerance", "array_families", "package", "variables"])
def test_attributes_that_raise(name: str, kind: str) -> None:
    """So does one that cannot be read."""
    broken = type("Broken", (HostEngine,), {"name": "broken", name: property(RAISES[kind])})
    _left_out(broken, name)


def _left_out(broken: type[HostEngine], name: str) -> None:
    good = type("Good", (HostEngine,), {"name": "good", "automatic": True})
    engines.register(good)
    try:
        try:
            engines.register(broken)
        except EngineError as e:  # what a class shows is refused at once
            message = str(e)
        else:
            message = ""
        if message:
            assert name in message
            return
        try:
            with pytest.raises(EngineError, match=f"{name}|device"):
                XRTModule(graph(), engine="broken")(X)
            module = XRTModule(graph(), device="cpu", guard=False)
            np.testing.assert_allclose(module(X), WANT)
            listed = {line.name: line for line in engines.listing()}
            assert listed["broken"].status == "broken"
            assert listed["good"].status == "ready"
        finally:
            engines.unregister("broken")
    finally:
        engines.unregister("good")


class OfRing(HostExecutable):
    """Hands out the same few buffers again and again."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.buffers = [[np.empty(p.shape, p.dtype) for p in self.return_params] for _ in range(8)]
        self.calls = 0

    def run(self, inputs: Sequence[Any], *args: Any) -> Sequence[Any]:
        buffers = self.buffers[self.calls % 8]
        self.calls += 1
        for buffer, result in zip(buffers, super().run(inputs, *args), strict=True):
            np.copyto(buffer, result)
        return self.hand_out(buffers)

    def hand_out(self, buffers: list[np.ndarray]) -> Sequence[Any]:
        return buffers


class Held(np.ndarray):
    """A class of NumPy arrays of the engine's own."""


class Late:
    """An array that fails when it is read."""

    def __init__(self, like: np.ndarray) -> None:
        self.dtype, self.shape = like.dtype, like.shape

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        raise SystemExit("late")


class OddShape(Late):
    @property
    def shape(self) -> Any:  # type: ignore[override]
        raise KeyboardInterrupt

    @shape.setter
    def shape(self, value: Any) -> None:
        pass


def _written(inputs: Sequence[np.ndarray]) -> Any:
    inputs[0][:] = 77
    raise RuntimeError("after writing to its input")


OUTPUTS: dict[str, Callable[[Sequence[np.ndarray], list[np.ndarray]], Any]] = {
    "nothing": lambda i, r: [],
    "one more": lambda i, r: [*r, *r],
    "None": lambda i, r: None,
    "an iterator": lambda i, r: iter(r),
    "a dict": lambda i, r: dict(enumerate(r)),
    "None within": lambda i, r: [None],
    "a number": lambda i, r: [3.0],
    "float64": lambda i, r: [x.astype(np.float64) for x in r],
    "foreign byte order": lambda i, r: [x.astype(">f4") for x in r],
    "objects": lambda i, r: [x.astype(object) for x in r],
    "another shape": lambda i, r: [x.reshape(8, 4) for x in r],
    "one dimension more": lambda i, r: [x[None] for x in r],
    "fails when read": lambda i, r: [Late(x) for x in r],
    "shape that raises": lambda i, r: [OddShape(x) for x in r],
    "writes to its input, then raises": lambda i, r: _written(i),
}
KEPT: dict[str, Callable[[Sequence[np.ndarray], list[np.ndarray]], Any]] = {
    "read-only": lambda i, r: [_read_only(x) for x in r],
    "strided": lambda i, r: [np.asfortranarray(x) for x in r],
    "a view of something larger": lambda i, r: [np.stack([x, x])[0] for x in r],
    "a class of its own": lambda i, r: [x.view(Held) for x in r],
}


def _read_only(x: np.ndarray) -> np.ndarray:
    x.setflags(write=False)
    return x


def _engine_of(kind: type[HostExecutable]) -> type[HostEngine]:
    class Compiler(HostCompiler):
        def compile(self, function: Any, *args: Any) -> Any:
            return kind(function, *args)

    return type("Odd", (HostEngine,), {"name": "odd", "compiler": lambda self, device, options: Compiler()})


@pytest.mark.parametrize("kind", [*OUTPUTS, *KEPT])
def test_results(kind: str, register: Callable[[type[HostEngine]], str]) -> None:
    """Plain NumPy arrays of the right dtype and shape, that are the caller's alone; the input is as it was."""
    change = {**OUTPUTS, **KEPT}[kind]

    class Executable(HostExecutable):
        def run(self, inputs: Sequence[Any], *args: Any) -> Any:
            return change(inputs, list(super().run(inputs, *args)))

    module = XRTModule(graph(), engine=register(_engine_of(Executable)), cache="off")
    given = X.copy()
    results = [module(given) for _ in range(6)]
    for found in results:
        assert type(found) is np.ndarray
        assert found.flags.carray
        assert found.dtype.isnative
        np.testing.assert_array_equal(found, WANT)
        found[:] = 0
    np.testing.assert_array_equal(given, X)
    assert (module.explain().errors == {}) == (kind in KEPT)


@pytest.mark.parametrize("how", ["the buffers", "views of them", "memoryviews of them", "the same list"])
def test_results_are_never_written_again(how: str, register: Callable[[type[HostEngine]], str]) -> None:
    """An engine that reuses its buffers, however many, costs a copy."""

    class Executable(OfRing):
        def hand_out(self, buffers: list[np.ndarray]) -> Sequence[Any]:
            if how == "views of them":
                return [b[:] for b in buffers]
            if how == "memoryviews of them":
                return [np.asarray(memoryview(b)) for b in buffers]
            return buffers if how == "the same list" else list(buffers)

    module = XRTModule(graph(), engine=register(_engine_of(Executable)), cache="off")
    found = [(k, module(X * k)) for k in range(20)]
    for k, y in found:
        np.testing.assert_array_equal(y, np.maximum(X * k, 0) + np.arange(8, dtype=np.float32))
    assert not any(np.shares_memory(a, b) for i, (_, a) in enumerate(found) for _, b in found[:i])
    assert not module.explain().errors


def test_two_results_of_one_memory(register: Callable[[type[HostEngine]], str]) -> None:
    """Writing to one result leaves the other, and the input, alone."""
    x, y, z = (functions.value(n, 4, 8) for n in "xyz")
    nodes = [functions.node("Relu", [x], [y]), functions.node("Abs", [x], [z])]
    body = functions.function("two", [x], nodes, [y, z]).body

    class Executable(HostExecutable):
        def run(self, inputs: Sequence[Any], *args: Any) -> Any:
            return [inputs[0], inputs[0]]  # right for numbers that are not negative

    module = XRTModule(body, engine=register(_engine_of(Executable)), cache="off")
    given = np.abs(X)
    a, b = module(given)
    a[:] = -1
    np.testing.assert_array_equal(b, np.abs(X))
    np.testing.assert_array_equal(given, np.abs(X))


def test_what_the_program_raises_comes_through(register: Callable[[type[HostEngine]], str]) -> None:
    """A signal handler of the program that raises within an engine's run is the caller's affair, and so is Ctrl-C."""

    class Stop(BaseException):
        pass

    class Executable(HostExecutable):
        def run(self, inputs: Sequence[Any], *args: Any) -> Any:
            os.kill(os.getpid(), signal.SIGUSR1 if armed == "handler" else signal.SIGINT)
            for _ in range(1000):
                pass
            return super().run(inputs, *args)

    def stop(*_: object) -> None:
        raise Stop

    module = XRTModule(graph(), engine=register(_engine_of(Executable)), cache="off")
    before = signal.signal(signal.SIGUSR1, stop)
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        armed = "handler"
        with pytest.raises(Stop):
            module(X)
        armed = "interrupt"
        with pytest.raises(KeyboardInterrupt):
            module(X)
    finally:
        signal.signal(signal.SIGUSR1, before)
        signal.signal(signal.SIGINT, interrupt)


def test_state_of_the_process(register: Callable[[type[HostEngine]], str], tmp_path: Any) -> None:
    """What a library changes when it compiles or first runs is restored: error state, folder, handlers, rounding."""
    import ctypes

    libm = ctypes.CDLL(None)

    class Executable(HostExecutable):
        def run(self, inputs: Sequence[Any], *args: Any) -> Any:
            results = super().run(inputs, *args)
            np.seterr(divide="raise")
            os.chdir(tmp_path)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            libm.fesetround(0x400)
            return results

    module = XRTModule(graph(), engine=register(_engine_of(Executable)), cache="off")
    before = np.geterr(), os.getcwd(), signal.getsignal(signal.SIGTERM), libm.fegetround()
    np.testing.assert_array_equal(module(X), WANT)
    assert (np.geterr(), os.getcwd(), signal.getsignal(signal.SIGTERM), libm.fegetround()) == before


def test_attributes_that_change_the_process(register: Callable[[type[HostEngine]], str], tmp_path: Any) -> None:
    """What reading an attribute changes is restored too, whenever that is: the tolerance is asked for with options."""

    def tolerance(self: HostEngine) -> Any:
        os.chdir(tmp_path)
        return HostEngine.tolerance

    odd = type("Odd", (HostEngine,), {"name": "odd", "tolerance": property(tolerance)})
    before = os.getcwd()
    engine = engines.get(register(odd))
    try:
        os.chdir(before)
        engine.tolerance_with(CompileOptions())
        assert os.getcwd() == before
    finally:
        os.chdir(before)


def test_bad_requests_cost_no_acceleration(register: Callable[[type[HostEngine]], str]) -> None:
    """A failure counts only where the host succeeds on the same arrays."""
    x, i, y = functions.value("x", 4, 8), Value("i", TensorType(np.dtype(np.int64), (2,))), functions.value("y", 2, 8)
    body = functions.function("g", [x, i], [functions.node("Gather", [x, i], [y])], [y]).body

    class Executable(HostExecutable):
        runs = 0

        def run(self, inputs: Sequence[Any], *args: Any) -> Any:
            type(self).runs += 1
            return super().run(inputs, *args)

    module = XRTModule(body, engine=register(_engine_of(Executable)), cache="off")
    for _ in range(10):
        with pytest.raises(XRTError):
            module(X, np.array([0, 99]))
    for _ in range(3):
        np.testing.assert_array_equal(module(X, np.array([0, 3])), X[[0, 3]])
    assert Executable.runs == 3  # indices are checked in front of it
    assert not module.explain().errors


def test_a_failure_now_and_then(register: Callable[[type[HostEngine]], str]) -> None:
    """One call in five that fails takes the engine away; one in a thousand does not."""

    class Executable(HostExecutable):
        calls, every = 0, 5

        def run(self, inputs: Sequence[Any], *args: Any) -> Any:
            type(self).calls += 1
            if self.calls % self.every == 0:
                raise RuntimeError("now and then")
            return super().run(inputs, *args)

    name = register(_engine_of(Executable))
    often = XRTModule(graph(), engine=name, cache="off")
    for _ in range(30):
        np.testing.assert_array_equal(often(X), WANT)
    assert often.explain().lost
    Executable.calls, Executable.every = 0, 600
    seldom = XRTModule(graph(), engine=name, cache="off")
    for _ in range(3000):
        seldom(X)
    assert not seldom.explain().lost


def test_a_support_of_another_kind(register: Callable[[type[HostEngine]], str]) -> None:
    """A Support whose fields are of other types is no answer."""

    class Odd(HostEngine):
        name = "odd"

        def supports(self, *args: Any) -> Support:
            return Support("yes", 5)  # type: ignore[arg-type]

    found, module = answer(register(Odd))
    np.testing.assert_array_equal(found, WANT)
    assert module.explain().engine_node_count == 0


def test_an_engine_without_a_fingerprint_takes_no_other_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With "auto" it is left out, and the others are measured."""
    monkeypatch.setenv(DISABLE_VARIABLE, ",".join(plugins.names("xrt.engines")))
    good = type("Good", (HostEngine,), {"name": "good", "automatic": True})
    bad = type("Bad", (HostEngine,), {"name": "bad", "automatic": True, "fingerprint": RAISES["raises SystemExit"]})
    engines.register(good)
    engines.register(bad)
    try:
        module = XRTModule(graph(), engine="auto", guard_sandbox=False, guard_async=False, cache="off")
        np.testing.assert_array_equal(module(X), WANT)
        (cluster,) = module.report().clusters
        assert "good" in str(cluster["outcome"])
        unusable = [e for e in module.events.recent("fallback") if e.engine == "bad"]
        assert [e.kind for e in unusable] == ["unusable"]
        assert "fingerprint raised SystemExit" in unusable[0].error
    finally:
        engines.unregister("good")
        engines.unregister("bad")


def test_no_process_is_started_to_name_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork of the program meanwhile would wait for it for ever."""
    import subprocess

    instruction_set.cache_clear()
    monkeypatch.setattr(subprocess, "Popen", None)
    assert len(instruction_set()) == 16


def test_a_timer_that_would_end_the_program(register: Callable[[type[HostEngine]], str]) -> None:
    """A first run starts it, as a library that is initialised may: it is stopped before its signal comes."""
    begun: list[bool] = []

    def run(self: HostExecutable, inputs: Sequence[Any], *more: Any, **options: Any) -> Sequence[Any]:
        if not begun:
            begun.append(True)
            signal.setitimer(signal.ITIMER_REAL, 3600.0)
        return HostExecutable.run(self, inputs)

    try:
        found, _ = answer(register(engine_with("run", run)), guard=False)
        assert signal.getitimer(signal.ITIMER_REAL)[0] == 0.0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
    np.testing.assert_array_equal(found, WANT)


FORKS = """
    import os
    import numpy as np
    from tests.safety.test_doors import WANT, X, answer, engine_with
    from xrt_core.engine import engines
    from xrt_core.testing.host_engine import HostExecutable

    forked = []

    def run(self, inputs, *more, **options):
        if not forked:
            forked.append(os.fork())
        return HostExecutable.run(self, inputs)

    engines.register(engine_with("run", run))
    found, _ = answer("odd", guard=False)
    assert (found == WANT).all()
    print("the program goes on")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
def test_a_copy_of_the_program_ends() -> None:
    """An engine forks and returns in both processes: the rest of the program runs once."""
    assert run_python(FORKS, timeout=60) == "the program goes on"

"""Executables through memory, disk and compiler: what is compiled, what is loaded, and what a bad disk changes."""

from __future__ import annotations

import dataclasses
import gc
import logging
import pathlib
import threading

import numpy as np
import pytest

from tests.cache.cached import OPTIONS, CountingEngine, key_of, shifted, text_of
from xrt_core.cache import store
from xrt_core.cache.disk import DiskCache, Hit, Mode, open_cache
from xrt_core.cache.key import IGNORED_OPTIONS
from xrt_core.cache.store import ExecutableStore, forget_all
from xrt_core.engine.contract import CompileOptions, Executable, Function, GraphCompiler
from xrt_core.errors import CompileError, OptionError
from xrt_core.events import EventLog
from xrt_core.options import resolve
from xrt_core.verify.evaluate import difference

X = np.arange(6, dtype=np.float32).reshape(2, 3)


@dataclasses.dataclass
class Process:
    """What a new process would have: no executables in memory, a store of its own."""

    folder: pathlib.Path
    mode: Mode = "readwrite"
    limit: int = 1 << 20

    def __post_init__(self) -> None:
        gc.collect()
        forget_all()
        self.engine = CountingEngine()
        self.events = EventLog()
        self.disk = DiskCache(self.folder, self.limit, self.mode)
        self.store = ExecutableStore(self.disk, self.events, differs=difference)

    def obtain(self, f: Function, options: CompileOptions = OPTIONS) -> Executable:
        return self.store.obtain(
            f,
            self.engine,
            "cpu",
            options,
            lambda: self.engine.compiler("cpu", options),
            lambda c: c.compile(f, f.params, f.returns, f.aliases),
        )

    def run(self, f: Function) -> np.ndarray:
        return np.asarray(self.obtain(f).run([X])[0])

    def names(self) -> list[str]:
        return [e.name for e in self.events]

    def reasons(self) -> list[str]:
        return [str(e.fields["reason"]) for e in self.events if "reason" in e.fields]


@pytest.mark.slow
def test_the_second_process_compiles_nothing(tmp_path: pathlib.Path) -> None:
    """The first compiles and stores, the second loads; both have the same numbers, and memory comes first."""
    first = Process(tmp_path)
    kept = first.obtain(shifted(1.0))
    assert first.obtain(shifted(1.0)) is kept
    assert (first.engine.compiled, first.engine.loaded) == (1, 0)
    assert first.names() == ["cache.miss", "cache.stored", "compile.cached"]

    second = Process(tmp_path)
    np.testing.assert_array_equal(second.run(shifted(1.0)), X + 1)
    assert (second.engine.compiled, second.engine.loaded) == (0, 1)
    assert second.names() == ["cache.hit"]


def test_every_option_is_in_the_key() -> None:
    """A field of CompileOptions changes the key, unless it is on the list of those that change nothing."""
    limits = {"workspace_bytes": 1, "max_batch_size": 1, "threads": 1}
    cores = {"shared": True, "release_cores": True}
    other = {"phase": "train", "fused": False, **limits, **cores, "extra": {"a": 1}}
    assert set(other) == {f.name for f in dataclasses.fields(CompileOptions)}
    for name, value in other.items():
        key = key_of(shifted(1.0), dataclasses.replace(OPTIONS, **{name: value}))
        rows = [line.partition(":")[0] for line in key.differences(key_of(shifted(1.0)))]
        assert rows == ([] if name in IGNORED_OPTIONS else [name])


@pytest.mark.slow
def test_a_miss_says_what_is_nearest(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """At level DEBUG, the line of a miss names the nearest entry and the rows that differ."""
    caplog.set_level(logging.DEBUG, "xrt")
    Process(tmp_path).obtain(shifted(1.0))
    Process(tmp_path).obtain(shifted(1.0), dataclasses.replace(OPTIONS, threads=3))

    assert "differs in threads: 3 != None" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["truncated", "not loadable", "not an executable"])
def test_an_entry_that_does_not_load_is_compiled_again(tmp_path: pathlib.Path, damage: str) -> None:
    """The reason is in an event, the caller gets the right result, and the entry is sound again."""
    f = shifted(1.0)
    first = Process(tmp_path)
    first.obtain(f)
    path = first.disk.path_of(key_of_engine(f))
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        first.disk.write(key_of_engine(f), {}, text_of(f), b"nonsense")
    second = Process(tmp_path)
    if damage == "not an executable":
        compiler = type(second.engine.compiler("cpu", OPTIONS))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compiler, "load", lambda self, blob: object())
            np.testing.assert_array_equal(second.run(f), X + 1)
        assert "not an Executable" in second.reasons()[0]
    else:
        np.testing.assert_array_equal(second.run(f), X + 1)
    assert second.names() == ["cache.miss", "cache.stored"]
    assert second.engine.compiled == 1
    third = Process(tmp_path)
    third.obtain(f)
    assert third.names() == ["cache.hit"]


def key_of_engine(f: Function) -> object:
    """The key as the store makes it, whose engine is this module's."""
    from xrt_core.cache.key import cache_key

    return cache_key(f, CountingEngine(), "cpu", OPTIONS)


def test_engines_that_cannot_load_never_touch_the_disk(tmp_path: pathlib.Path) -> None:
    """No key is looked up, no folder filled for them."""

    class Plain(GraphCompiler):
        def compile(self, function, entry_params, return_params, aliases):  # type: ignore[no-untyped-def]
            return made

    process = Process(tmp_path / "cache")
    made = Process(tmp_path / "other").obtain(shifted(3.0))
    f = shifted(1.0)
    got = process.store.obtain(
        f, process.engine, "cpu", OPTIONS, Plain, lambda c: c.compile(f, f.params, f.returns, f.aliases)
    )

    assert got is made
    assert process.names() == []
    assert process.disk.files() == []


def test_a_failing_serialisation_hurts_nobody(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was compiled is used; the reason is said."""
    process = Process(tmp_path)
    monkeypatch.setattr("xrt_core.testing.host_engine.HostExecutable.serialize", lambda self: 1 / 0)
    np.testing.assert_array_equal(process.run(shifted(1.0)), X + 1)

    assert process.names() == ["cache.miss", "cache.not_stored"]
    assert "ZeroDivisionError" in process.reasons()[1]


@pytest.mark.slow
def test_what_reads_slower_than_it_compiles_is_not_stored(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entry then says so, and later processes neither serialise nor ask again."""
    monkeypatch.setattr(store, "BYTES_A_SECOND", 1.0)
    first = Process(tmp_path)
    first.obtain(shifted(1.0))
    assert "would take longer than compiling it again" in first.reasons()[-1]
    second = Process(tmp_path)
    monkeypatch.setattr("xrt_core.testing.host_engine.HostExecutable.serialize", lambda self: pytest.fail("again"))
    np.testing.assert_array_equal(second.run(shifted(1.0)), X + 1)

    assert second.names() == ["cache.miss"]
    assert all(second.disk.check(e.path) == "" for e in second.disk.files())


@pytest.mark.slow
def test_mode_read_stores_nothing(tmp_path: pathlib.Path) -> None:
    """What is stored is used, what is not is compiled and not stored."""
    Process(tmp_path).obtain(shifted(1.0))
    reader = Process(tmp_path, "read")
    reader.obtain(shifted(1.0))
    reader.obtain(shifted(2.0))

    assert reader.names() == ["cache.hit", "cache.miss"]
    assert len(reader.disk.files()) == 1


@pytest.mark.slow
def test_mode_verify_finds_a_wrong_executable(tmp_path: pathlib.Path) -> None:
    """What is stored is compiled again: the same results keep it, others replace it, and the right one is used."""
    f, wrong = shifted(1.0), shifted(2.0)
    Process(tmp_path).obtain(f)
    sound = Process(tmp_path, "verify")
    sound.obtain(f)
    assert sound.names() == ["cache.hit", "cache.verified"]

    lie = CountingEngine().compiler("cpu", OPTIONS).compile(wrong, wrong.params, wrong.returns, ()).serialize()
    sound.disk.write(key_of_engine(f), {}, text_of(f), lie)  # type: ignore[arg-type]
    process = Process(tmp_path, "verify")
    np.testing.assert_array_equal(process.run(f), X + 1)
    assert process.names() == ["cache.hit", "cache.wrong", "cache.stored"]
    assert "out of bounds" in process.reasons()[0]
    np.testing.assert_array_equal(Process(tmp_path).run(f), X + 1)


def test_a_folder_that_is_refused_is_said_once(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """Others may write to it: nothing is read or written, one warning says so, everything works."""
    tmp_path.chmod(0o777)
    process = Process(tmp_path)
    for by in (1.0, 2.0):
        np.testing.assert_array_equal(process.run(shifted(by)), X + by)

    assert process.names() == ["cache.refused"]
    assert "chmod go-w" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_many_threads_compile_once(tmp_path: pathlib.Path) -> None:
    """Threads that want the same executable at once wait for the one that makes it."""
    process = Process(tmp_path)
    f = shifted(1.0)
    barrier = threading.Barrier(6)
    results: list[Executable] = []

    def want() -> None:
        barrier.wait()
        results.append(process.obtain(f))

    threads = [threading.Thread(target=want) for _ in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()

    assert len(results) == 6
    assert process.engine.compiled == 1


def test_a_failing_compilation_stays_an_error(tmp_path: pathlib.Path) -> None:
    """The cache neither hides nor stores it."""
    process = Process(tmp_path)
    f = shifted(1.0)

    def fail(compiler: GraphCompiler) -> Executable:
        raise CompileError("no")

    for _ in range(2):
        with pytest.raises(CompileError, match="no"):
            process.store.obtain(
                f, process.engine, "cpu", OPTIONS, lambda: process.engine.compiler("cpu", OPTIONS), fail
            )
    assert process.disk.files() == []


def test_comparison_sees_what_differs() -> None:
    """Equal results are equal; other values and NaN in another place are not."""
    f = shifted(1.0)
    compiler = CountingEngine().compiler("cpu", OPTIONS)

    def made(g: Function) -> Executable:
        return compiler.compile(g, g.params, g.returns, g.aliases)

    assert difference(f, made(f), made(shifted(1.0))) == ""
    assert "out of bounds" in difference(f, made(shifted(1.001)), made(f))
    assert "it is nan" in difference(f, made(shifted(float("nan"))), made(f))


def test_one_cache_for_each_setting() -> None:
    """Modules with the same settings share one object, "off" has none, a home folder is found."""
    assert open_cache("off", None, 1) is None
    one = open_cache("readwrite", "~/somewhere", 1 << 20)
    assert one is open_cache("readwrite", "~/somewhere", 1 << 20)
    assert one is not None
    assert one.folder == pathlib.Path("~/somewhere").expanduser()


def test_a_hit_is_a_hit_on_the_disk(tmp_path: pathlib.Path) -> None:
    """The stored blob is what the engine's `serialize_code` gave."""
    process = Process(tmp_path)
    made = process.obtain(shifted(1.0))
    found = process.disk.read(key_of_engine(shifted(1.0)), text_of(shifted(1.0)))  # type: ignore[arg-type]

    assert isinstance(found, Hit)
    assert found.blob == made.serialize()


def test_the_options_of_the_cache() -> None:
    """Modes may be given as True and False, sizes with a unit; a relative folder is refused."""
    assert [resolve({"cache": c}, {}).cache for c in (True, False, "read")] == ["readwrite", "off", "read"]
    assert resolve({}, {"XRT_CACHE_MODE": "Verify"}).cache == "verify"
    assert resolve({}, {"XRT_CACHE_MODE": "0"}).cache == "off"
    sizes = {"500": 500, "500M": 500 << 20, "4g": 4 << 30, "1.5 GiB": 3 << 29}
    assert {t: resolve({}, {"XRT_CACHE_SIZE": t}).cache_bytes for t in sizes} == sizes
    assert resolve({"cache_dir": pathlib.Path("/somewhere")}, {}).cache_dir == "/somewhere"
    for bad in ({"cache": "sometimes"}, {"cache_bytes": "4X"}, {"cache_bytes": -1}, {"cache_dir": "here"}):
        with pytest.raises(OptionError, match=next(iter(bad))):
            resolve(bad, {})


@pytest.mark.slow
def test_a_module_uses_the_cache_of_its_options(tmp_path: pathlib.Path) -> None:
    """What one module compiled, another one loads; with `cache=False` nothing is stored."""
    from xrt_core.engine import engines
    from xrt_core.module import XRTModule

    engines.register(type("CacheCounting", (CountingEngine,), {"name": "cache_counting"}))
    counts = []
    for folder, on in (("a", True), ("a", True), ("b", False), ("b", False)):
        gc.collect()
        forget_all()
        module = XRTModule(
            shifted(1.0).body, engine="cache_counting", cache=on, cache_dir=str(tmp_path / folder), minimum_nodes=1
        )
        np.testing.assert_array_equal(np.asarray(module(X)), X + 1)
        names = {e.name for e in module.events}
        counts.append(("compile" in names, "cache.hit" in names))
        del module
    engines.unregister("cache_counting")

    assert counts == [(True, False), (False, True), (True, False), (True, False)]
    assert not (tmp_path / "b").exists()

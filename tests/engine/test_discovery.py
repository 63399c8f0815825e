"""Discovery, with real little packages in a folder of their own."""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement

from tests.engine.packages import add_package, engine_source
from xrt_core.engine.manager import EngineManager
from xrt_core.errors import EngineNotFoundError, EngineUnavailableError, PluginError
from xrt_core.events import process_events
from xrt_core.options import resolve
from xrt_core.plugins.discovery import Discovery, _is_plainly_met

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """An empty folder for packages, importable."""
    monkeypatch.delenv("XRT_DISABLE_PLUGINS", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.fixture
def manager(folder: pathlib.Path) -> EngineManager:
    """A manager that sees only the packages in the folder, with core 0.1.0."""
    return EngineManager(Discovery("0.1.0", [str(folder)]))


def line(manager: EngineManager, name: str) -> object:
    return next(e for e in manager.listing() if e.name == name)


def test_names_import_nothing(folder: pathlib.Path, manager: EngineManager) -> None:
    """Fifty engines are listed, and none of their modules is imported (benchmarks/sdk.py measures the time)."""
    modules = [
        add_package(folder, f"xrt-many{i}", "raise SystemExit('imported')", engine=f"many{i:02}") for i in range(50)
    ]
    names = manager.names()
    listing = manager.listing(probe=False)

    assert names == tuple(f"many{i:02}" for i in range(50))
    assert [e.status for e in listing] == ["installed"] * 50
    assert not any(m in sys.modules for m in modules)


def test_an_engine_is_made_once(folder: pathlib.Path, manager: EngineManager) -> None:
    """The engine is imported at its first use, and it is the same object from then on."""
    module = add_package(folder, "xrt-good", engine_source("good"), engine="good")
    assert module not in sys.modules

    engine = manager.get("good")

    assert module in sys.modules
    assert engine.name == "good"
    assert manager.get("good") is engine
    assert line(manager, "good").status == "ready"
    assert (line(manager, "good").package, line(manager, "good").version) == ("xrt-good", "1.0")
    assert line(manager, "good").library_version == "9.9"


def test_unknown_engine_lists_what_is_there(folder: pathlib.Path, manager: EngineManager) -> None:
    """A miss names what is installed, the closest name, and how to install a known engine."""
    add_package(folder, "xrt-good", engine_source("good"), engine="good")

    with pytest.raises(EngineNotFoundError, match="there is no engine 'goud'; did you mean 'good'.*known: good"):
        manager.get("goud")
    with pytest.raises(EngineNotFoundError, match="pip install xrt-tensorrt"):
        manager.get("tensorrt")


def test_import_that_raises(folder: pathlib.Path, manager: EngineManager) -> None:
    """It is a line with the cause, an error with the cause chained each time, and nothing to the others."""
    add_package(folder, "xrt-bad", "raise OSError('libbad.so is missing')", engine="bad")
    add_package(folder, "xrt-good", engine_source("good"), engine="good")

    for _ in range(2):
        with pytest.raises(PluginError, match=r"'bad' of xrt-bad 1.0 cannot be imported: OSError: libbad.so") as e:
            manager.get("bad")
        assert isinstance(e.value.__cause__, OSError)
    assert line(manager, "bad").status == "broken"
    assert "libbad.so is missing" in line(manager, "bad").reason
    assert [e.name for e in manager.ready("inference", None, resolve({}))] == ["good"]


INSTALLED = """def probe_installed(self):
        {}
"""


@pytest.mark.parametrize(
    ("says", "devices"),
    [
        ("return EngineStatus(True, '1', ('cpu', 'cpu:1'))", ("cpu", "cpu:1")),
        ("return None", ("cpu",)),
        ("raise OSError('no')", ("cpu",)),
        ("return 'ready'", ("cpu",)),
    ],
)
def test_what_the_packages_tell(
    folder: pathlib.Path, manager: EngineManager, says: str, devices: tuple[str, ...]
) -> None:
    """It stands for the probe, with "auto", of an engine that another process found usable; whoever names the engine
    has it probed."""
    add_package(folder, "xrt-good", engine_source("good", INSTALLED.format(says)), engine="good")
    engine = manager.get("good")

    assert manager.ready("inference", None, resolve({}), found_usable=("good",)) == [engine]
    assert manager.devices(engine) == devices
    assert manager.usable("good") is engine
    assert manager.devices(engine) == ("cpu",)


@pytest.mark.parametrize("source", ["import sys; sys.exit(3)", "import no_such_library", "def broken(:"])
def test_every_way_to_fail_at_import(folder: pathlib.Path, manager: EngineManager, source: str) -> None:
    """Exiting, a missing library and a syntax error are all a broken plugin, never the caller's end."""
    add_package(folder, "xrt-bad", source, engine="bad")

    with pytest.raises(PluginError, match="XRT_DISABLE_PLUGINS=bad"):
        manager.get("bad")


def test_two_packages_of_one_name(folder: pathlib.Path, manager: EngineManager) -> None:
    """Neither is taken; both owners are named; neither is imported."""
    first = add_package(folder, "xrt-one", engine_source("same"), engine="same")
    second = add_package(folder, "xrt-two", engine_source("same"), engine="same", version="2.0")

    with pytest.raises(PluginError, match="named twice in xrt.engines: by xrt-one 1.0 and xrt-two 2.0"):
        manager.get("same")
    assert line(manager, "same").status == "broken"
    assert manager.ready("inference", None, resolve({})) == []
    assert not {first, second} & set(sys.modules)


def test_needs_a_newer_core(folder: pathlib.Path, manager: EngineManager) -> None:
    """The requirement on xrt-core is checked before the import; markers that do not apply are passed over."""
    source = engine_source("next")
    module = add_package(folder, "xrt-next", source, engine="next", requires=["numpy", "xrt_core>=9,<10"])
    add_package(
        folder, "xrt-ok", engine_source("ok"), engine="ok", requires=["xrt-core >= 9; python_version < '3'", "xrt-core"]
    )

    with pytest.raises(PluginError, match=r"needs xrt-core<10,>=9, and this is xrt-core 0.1.0; pip install --upgrade"):
        manager.get("next")
    assert module not in sys.modules
    assert line(manager, "next").status == "broken"
    assert line(manager, "ok").status == "ready"


def test_several_versions_of_the_core(folder: pathlib.Path) -> None:
    """One plugin, three cores: it works with those that its requirement admits, development versions included."""
    add_package(folder, "xrt-good", engine_source("good"), engine="good", requires=["xrt-core>=0.1,<1"])

    fits = {v: line(EngineManager(Discovery(v, [str(folder)])), "good").status for v in ("0.1.0", "0.9.dev1", "1.0")}

    assert fits == {"0.1.0": "ready", "0.9.dev1": "ready", "1.0": "broken"}


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ("api_version = 99", "engine API 99, and this core has 1; upgrade xrt-core"),
        ("api_version = 0", "upgrade the package of engine 'odd'"),
        ("name = 'other'", "calls itself 'other'; the entry point and the class must agree"),
        ("devices = ('gpu',)", "there is no device kind 'gpu'"),
        ("priority = 3", "must map 'train' and 'inference' to integers"),
        ("array_families = 'jax'", "must be a tuple of some of jax, cupy, torch, other"),
        ("array_families = ('numba',)", "must be a tuple of some of jax"),
        ("def __init__(self): raise RuntimeError('no luck')", "its constructor raised RuntimeError: no luck"),
        ("from abc import abstractmethod\n    @abstractmethod\n    def more(self): ...", "does not implement more"),
        (
            "from xrt_core.engine import hookimpl\n    @hookimpl\n    def xrt_event(self, event, nonsense): ...",
            "implements a hook wrongly",
        ),
        (
            "from xrt_core.engine import hookimpl\n    @hookimpl\n    def xrt_no_such_hook(self): ...",
            "implements a hook wrongly",
        ),
    ],
)
def test_engine_class_that_breaks_the_contract(
    folder: pathlib.Path, manager: EngineManager, members: str, message: str
) -> None:
    """What the class gets wrong is said at registration, with the package."""
    add_package(folder, "xrt-odd", engine_source("odd", members), engine="odd")

    with pytest.raises(PluginError, match=r"xrt-odd 1.0") as e:
        manager.get("odd")
    assert message in str(e.value)
    assert line(manager, "odd").status == "broken"


def test_entry_point_that_names_no_engine(folder: pathlib.Path, manager: EngineManager) -> None:
    """An object that is no Engine, a missing attribute and a malformed target are broken plugins."""
    add_package(folder, "xrt-a", "TheEngine = 3", engine="a")
    add_package(folder, "xrt-b", "", engine="b")
    add_package(folder, "xrt-c", "", engine="c", target="not a module")

    with pytest.raises(PluginError, match="3 is not a subclass of"):
        manager.get("a")
    with pytest.raises(PluginError, match="has no attribute 'TheEngine'"):
        manager.get("b")
    with pytest.raises(PluginError, match="not of the form module:attribute"):
        manager.get("c")


def test_unusable_here(folder: pathlib.Path, manager: EngineManager) -> None:
    """An engine that says it is not available is an error with its reason and cure when asked for by name."""
    probe = 'return EngineStatus(False, reason="no driver", remedy="install one")'
    add_package(folder, "xrt-gone", engine_source("gone", probe=probe), engine="gone")

    with pytest.raises(EngineUnavailableError, match="'gone' is installed but cannot be used here: no driver; install"):
        manager.usable("gone")
    assert manager.get("gone").name == "gone"
    assert line(manager, "gone").status == "unavailable"
    assert line(manager, "gone").remedy == "install one"


@pytest.mark.parametrize("probe", ["raise OSError('boom')", "return True"])
def test_probe_that_misbehaves(folder: pathlib.Path, manager: EngineManager, probe: str) -> None:
    """A probe that raises or returns something else is the plugin's fault, said with its name."""
    add_package(folder, "xrt-odd", engine_source("odd", probe=probe), engine="odd")

    with pytest.raises(PluginError, match="engine 'odd' of xrt-odd: its probe (raised OSError: boom|returned True)"):
        manager.usable("odd")
    assert manager.ready("inference", None, resolve({})) == []


def test_disabled(folder: pathlib.Path, manager: EngineManager, monkeypatch: pytest.MonkeyPatch) -> None:
    """XRT_DISABLE_PLUGINS takes an engine out by name or package, without importing it."""
    module = add_package(folder, "xrt-off", engine_source("off"), engine="off")
    add_package(folder, "xrt-more", engine_source("more"), engine="more")
    monkeypatch.setenv("XRT_DISABLE_PLUGINS", "off, xrt-more")

    assert manager.names() == ()
    assert [e.status for e in manager.listing()] == ["disabled", "disabled"]
    with pytest.raises(EngineUnavailableError, match="'off' of xrt-off 1.0 is disabled by XRT_DISABLE_PLUGINS"):
        manager.get("off")
    assert module not in sys.modules


def test_slow_import_is_reported(folder: pathlib.Path, manager: EngineManager, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that takes long to import works, its line says so, and so does an event."""
    monkeypatch.setattr("xrt_core.engine.manager.SLOW_IMPORT_SECONDS", 0.05)
    add_package(folder, "xrt-slow", "import time; time.sleep(0.1)\n" + engine_source("slow"), engine="slow")

    assert line(manager, "slow").status == "ready"
    assert re.search(r"importing it took \d+\.\d s", line(manager, "slow").reason)
    assert process_events.recent("plugin.imported")[-1].fields["plugin"] == "slow"


def test_removed_while_cached(folder: pathlib.Path, manager: EngineManager) -> None:
    """A package that goes away after it was listed is 'removed', not 'broken'; refresh finds new ones."""
    module = add_package(folder, "xrt-here", engine_source("here"), engine="here")
    assert manager.names() == ("here",)
    (folder / f"{module}.py").unlink()
    shutil.rmtree(folder / "xrt_here-1.0.dist-info")

    with pytest.raises(EngineNotFoundError, match="xrt-here 1.0 has been removed; there is no engine 'here'"):
        manager.get("here")
    add_package(folder, "xrt-new", engine_source("new"), engine="new")
    manager.refresh()
    assert manager.names() == ("new",)


def test_damaged_metadata_hides_nobody_else(folder: pathlib.Path, manager: EngineManager) -> None:
    """A package whose metadata cannot be read is left out with an event; the others are found."""
    add_package(folder, "xrt-good", engine_source("good"), engine="good")
    bad = folder / "xrt_bad-1.0.dist-info"
    bad.mkdir()
    (bad / "entry_points.txt").write_text("[xrt.engines]\nbad = x:y\n")
    (bad / "METADATA").write_bytes(b"\xff\xfe garbage")

    assert manager.names() == ("good",)
    assert "xrt_bad" in process_events.recent("plugin.unreadable")[-1].fields["package"]


@pytest.mark.slow
def test_the_second_command_in_a_fresh_process(folder: pathlib.Path) -> None:
    """`python -m xrt_core.engines` prints a reason per engine, with a broken plugin on the path."""
    add_package(folder, "xrt-bad", "raise OSError('libbad.so is missing')", engine="bad")
    add_package(folder, "xrt-good", engine_source("good"), engine="good")

    code = f"import sys; sys.path[:0] = [{str(folder)!r}, {str(ROOT)!r}]; sys.argv = ['x']; import runpy; " + (
        "runpy.run_module('xrt_core.engines', run_name='__main__'); assert 'rich' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 0, done.stderr
    rows = {r.split()[0]: r for r in done.stdout.splitlines()}
    assert "ready" in rows["good"]
    assert "library 9.9" in rows["good"]
    assert "broken" in rows["bad"]
    assert "libbad.so is missing" in rows["bad"]


def test_many_threads_get_one_engine(folder: pathlib.Path, manager: EngineManager) -> None:
    """Threads that ask at once import the plugin once and get the same object."""
    source = "import time; time.sleep(0.05)\n" + engine_source("shared")
    add_package(folder, "xrt-shared", source, engine="shared")

    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: id(manager.get("shared")), range(32)))

    assert len(found) == 1


_NUMBERS = st.lists(st.integers(0, 3), min_size=1, max_size=4).map(lambda n: ".".join(map(str, n)))


@given(
    bounds=st.lists(st.tuples(st.sampled_from(["<", "<=", ">", ">="]), _NUMBERS), min_size=1, max_size=3),
    core=_NUMBERS,
    comma=st.sampled_from([",", ", "]),
)
def test_plain_requirements_are_read_as_packaging_reads_them(
    bounds: list[tuple[str, str]], core: str, comma: str
) -> None:
    """The short cut says yes exactly where `packaging` does, for requirements that are made of numbers."""
    text = "xrt-core" + comma.join(sign + number for sign, number in bounds)
    assert _is_plainly_met(text, core) == Requirement(text).specifier.contains(core, prereleases=True)


@pytest.mark.parametrize(
    ("text", "core"),
    [
        ("xrt-core>=0.1; python_version>'3'", "0.1"),
        ("xrt-core[x]>=0.1", "0.1"),
        ("xrt-core-more>=0.1", "0.1"),
        ("xrt-core~=0.1", "0.1"),
        ("xrt-core>=0.1a1", "0.1"),
        ("xrt-core>=0.1", "0.2.dev1"),
        ("xrt-core", "0.1"),
    ],
)
def test_other_requirements_are_left_to_packaging(text: str, core: str) -> None:
    """Markers, extras, other signs and versions with letters are nothing for the short cut."""
    assert not _is_plainly_met(text, core)


def test_plain_requirements_do_not_import_packaging() -> None:
    """Listing and loading the installed engines does without it."""
    code = "import sys; from xrt_core.engine import engines; engines.get('xla'); print('packaging' in sys.modules)"
    pytest.importorskip("xrt_xla", reason="a plugin of the project")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "False", done.stderr

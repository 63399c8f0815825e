"""Engines that compile for devices that are not here, and options of single engines, from module to compiler."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

from xrt_core.engine import engines
from xrt_core.engine.contract import CompileOptions, Engine, EngineStatus, GraphCompiler
from xrt_core.errors import EngineUnavailableError, OptionError
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.types import TensorType
from xrt_core.module import XRTModule
from xrt_core.options import from_text, resolve
from xrt_core.testing.host_engine import HostEngine


class Elsewhere(HostEngine):
    """An engine that runs only on a device that is not here, and compiles for two kinds of it."""

    name: ClassVar[str] = "elsewhere"
    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    seen: ClassVar[list[tuple[str, str, CompileOptions]]] = []

    def __init__(self, target: str = "") -> None:
        super().__init__()
        self.target = target

    def probe(self) -> EngineStatus:
        return EngineStatus(bool(self.target), devices=("cuda:0",) if self.target else (), reason="no such device")

    def targeting(self, target: str) -> Engine:
        if target not in ("one", "two"):
            raise EngineUnavailableError(f"elsewhere compiles for one and two, not for {target!r}")
        return Elsewhere(target)

    def compiler(self, device: str, options: CompileOptions) -> GraphCompiler:
        if set(options.extra) - {"depth"}:
            raise OptionError(f"elsewhere: unknown option {min(options.extra)!r}")
        self.seen.append((self.target, device, options))
        return HostEngine().compiler("cpu", CompileOptions())

    def fingerprint(self, device: str) -> str:
        return f"elsewhere {self.target}"


@pytest.fixture
def elsewhere() -> Iterator[type[Elsewhere]]:
    """The engine, registered for one test."""
    Elsewhere.seen.clear()
    engines.register(Elsewhere)
    yield Elsewhere
    engines.unregister("elsewhere")


def _graph() -> Graph:
    x, y = Value("x", TensorType(np.dtype(np.float32), (2,))), Value("y")
    return Graph([x], [y], [Node("Neg", [x], [y], version=13)], opsets={"": 21})


def test_a_module_for_a_target(elsewhere: type[Elsewhere]) -> None:
    """The engine that is not usable here compiles for the target, on the device that it has there."""
    with pytest.raises(EngineUnavailableError, match="no such device"):
        XRTModule(_graph(), engine="elsewhere")
    module = XRTModule(_graph(), engine="elsewhere", target="two", prune=False)
    module.prepare({"x": np.ones(2, np.float32)})

    assert [(t, d) for t, d, _ in elsewhere.seen] == [("two", "cuda:0")]
    assert module.explain().node_share == 1


def test_the_target_is_not_kept_in_the_file(elsewhere: type[Elsewhere], tmp_path: pathlib.Path) -> None:
    """A file that was made for a target is opened without one, where such a device is."""
    from xrt_core.saved_model import open_saved

    module = XRTModule(_graph(), engine="elsewhere", target="one", prune=False, max_batch_size=3)
    module.save(tmp_path / "m.xrt")
    saved = open_saved(tmp_path / "m.xrt")
    assert "target" not in saved.options
    assert saved.options["max_batch_size"] == 3


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({"engine": "elsewhere", "target": "three"}, EngineUnavailableError, "compiles for one and two"),
        ({"target": "one"}, OptionError, "in the words of an engine, and none is named"),
        ({"engine": "elsewhere", "target": "one", "guard": True}, OptionError, "examines what runs here"),
        ({"engine": "elsewhere", "target": ""}, OptionError, "option 'target' cannot be ''"),
    ],
)
def test_targets_that_make_no_sense(
    elsewhere: type[Elsewhere], options: dict[str, Any], error: type[Exception], reason: str
) -> None:
    """Each is refused when the module is made."""
    with pytest.raises(error, match=reason):
        XRTModule(_graph(), **options)


def test_an_engine_without_targets_says_so() -> None:
    """The default of the contract."""
    with pytest.raises(EngineUnavailableError, match="compiles for the devices that are here, not for 'x'"):
        HostEngine().targeting("x")


def test_options_of_one_engine_reach_its_compiler(elsewhere: type[Elsewhere]) -> None:
    """They are that engine's `extra`, beside the options of all."""
    module = XRTModule(
        _graph(), engine="elsewhere", target="one", threads=2, prune=False,
        engine_options={"elsewhere": {"depth": [1, 2]}},
    )  # fmt: skip
    module.prepare({"x": np.ones(2, np.float32)})
    ((_, _, options),) = elsewhere.seen
    assert options.extra == {"depth": [1, 2]}
    assert options.threads == 2


def test_an_unknown_option_of_an_engine_is_an_error_of_the_module(elsewhere: type[Elsewhere]) -> None:
    """It is said when the module is made, not when a cluster falls back to the host."""
    with pytest.raises(OptionError, match="elsewhere: unknown option 'width'"):
        XRTModule(_graph(), engine="elsewhere", target="one", engine_options={"elsewhere": {"width": 1}})
    with pytest.raises(OptionError, match=r"'engine_options' .keyword engine_options=. speaks of engine 'elsewere'"):
        XRTModule(_graph(), engine="host", engine_options={"elsewere": {}})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a.x=1,a.y=True,b.z=some words", {"a": {"x": 1, "y": True}, "b": {"z": "some words"}}),
        ('{"a": {"x": {"deep": [1]}}}', {"a": {"x": {"deep": [1]}}}),
    ],
)
def test_options_of_engines_as_text(text: str, value: Any) -> None:
    """A command line's form and JSON mean the same as the mapping."""
    assert from_text("engine_options", text, "--option") == resolve({"engine_options": value}).engine_options


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([1], "a mapping from an engine's name"),
        ({"a": 1}, "what it says of engine 'a' is 1, and no mapping"),
        ({"a": {"x": object}}, "engines take numbers"),
    ],
)
def test_options_of_engines_that_are_none(value: Any, reason: str) -> None:
    """Other forms are refused with what is taken."""
    with pytest.raises(OptionError, match=reason):
        resolve({"engine_options": value})

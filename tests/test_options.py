"""The table of options: precedence, every bad value, and the documentation made from it."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from xrt_core.errors import OptionError
from xrt_core.options import HUGE, TABLE, Options, declared, process_config, resolve
from xrt_core.options.__main__ import as_markdown, core_table
from xrt_core.options.kinds import FLAG, PLACE

DOCS = pathlib.Path(__file__).parents[1] / "docs" / "options.md"


@pytest.fixture(autouse=True)
def _undefined() -> Iterator[None]:
    """Nothing is configured before or after."""
    process_config.reset()
    yield
    process_config.reset()


def test_defaults() -> None:
    """With nothing said, every option has its default and says so."""
    options = resolve({}, {})

    assert options == Options()
    assert (options.minimum_nodes, options.maximum_nodes, options.strict_clustering) == (1, HUGE, True)
    assert {options.source(n) for n in TABLE} == {"default"}


def test_keyword_over_config_over_environment() -> None:
    """Each source wins over the next, and the source is known."""
    env = {"FLAGS_use_xla_jit": "0", "FLAGS_strict_clustering": "off", "FLAGS_clustering_minimum_nodes": "3"}
    assert resolve({}, env).switch("use_xla_jit") is False
    assert resolve({}, env).source("use_xla_jit") == "environment variable FLAGS_use_xla_jit"
    process_config.use_xla_jit(True)
    assert resolve({}, env).switch("use_xla_jit") is True
    assert resolve({}, env).source("use_xla_jit") == "xrt.config.use_xla_jit"
    both = resolve({"use_xla_jit": False, "minimum_nodes": 5}, env)
    assert (both.switch("use_xla_jit"), both.minimum_nodes, both.strict_clustering) == (False, 5, False)
    assert both.source("use_xla_jit") == "keyword use_xla_jit="


def test_undefined() -> None:
    """None by keyword or through xrt.config, and an empty variable, mean: not said."""
    process_config.use_xla_jit(True)
    assert resolve({"use_xla_jit": None}, {}).switch("use_xla_jit") is True
    process_config.use_xla_jit(None)
    assert resolve({}, {"FLAGS_use_xla_jit": " "}).switch("use_xla_jit") is None


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an environment given, os.environ is read at each call."""
    monkeypatch.setenv("FLAGS_max_batch_size", "32")
    assert resolve({}).max_batch_size == 32


@pytest.mark.parametrize(
    ("name", "value", "clean"),
    [
        ("engine", "xla", ("xla",)),
        ("engine", ["tensorrt", "xla"], ("tensorrt", "xla")),
        ("minimum_nodes", np.int64(4), 4),
        ("strict_clustering", np.bool_(False), False),
        ("device", "cuda:1", "cuda:1"),
        ("guard", False, False), ("guard", True, True), ("guard_memory", "2G", 2 << 30),
        ("constant_fold_limit", 0, 0),
    ],
)
def test_values_are_cleaned(name: str, value: Any, clean: Any) -> None:
    """What fits comes out in one form."""
    assert getattr(resolve({name: value}, {}), name) == clean


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("engine", []), ("engine", ["xla", "xla"]), ("engine", ["host", "xla"]), ("engine", 3), ("engine", [3]),
        ("phase", "test"), ("phase", ["train"]), ("device", "GPU 0"), ("device", "cuda:x"), ("device", 0),
        ("use_xla_jit", "yes"), ("use_tensorrt", 1), ("strict_clustering", None), ("strict", "yes"),
        ("minimum_nodes", 0), ("minimum_nodes", True), ("custom_op_libraries", 3), ("custom_op_libraries", [""]),
        ("minimum_nodes", 2.0), ("maximum_nodes", 1 << 70), ("cache_size", 0), ("threads", -1), ("guard", 1),
        ("constant_fold_limit", -1), ("max_batch_size", "8"), ("verify", "1"),
    ],
)  # fmt: skip
def test_bad_keyword(name: str, value: Any) -> None:
    """Every bad value names the option, the value, where it came from, and what the option takes."""
    with pytest.raises(OptionError) as e:
        resolve({name: value}, {})
    text = str(e.value)
    assert f"option {name!r} cannot be {value!r} (from keyword {name}=)" in text
    assert f"it takes {TABLE[name].kind.takes if name in TABLE else FLAG.takes}" in text


@pytest.mark.parametrize("option", [o for o in TABLE.values() if o.env], ids=lambda o: o.name)
def test_bad_environment(option: Any) -> None:
    """A bad value from the environment names the variable."""
    with pytest.raises(OptionError, match=f"option '{option.name}' .*environment variable {option.env}.* it takes "):
        resolve({}, {option.env: "maybe" if option.kind is not PLACE else "maybe\0"})


def test_bad_configuration() -> None:
    """xrt.config takes True, False or None."""
    with pytest.raises(OptionError, match=r"xrt.config.use_tensorrt\(1\): it takes True, False, or None"):
        process_config.use_tensorrt(1)


def test_unknown_option() -> None:
    """An unknown name is an error with the closest one and the whole list."""
    with pytest.raises(OptionError, match="unknown option 'minimum_node'.*did you mean 'minimum_nodes'.*cache_size"):
        resolve({"minimum_node": 3}, {})
    with pytest.raises(OptionError, match="unknown option 'x'"):
        Options().source("x")


def test_bounds_against_each_other() -> None:
    """minimum_nodes above maximum_nodes is an error that says where both came from."""
    with pytest.raises(OptionError, match=r"minimum_nodes=9 \(keyword.*maximum_nodes=4 \(environment variable FLAGS_"):
        resolve({"minimum_nodes": 9}, {"FLAGS_clustering_maximum_nodes": "4"})


def test_documentation_holds_the_table() -> None:
    """docs/options.md is what `python -m xrt_core.options` prints where this repository's packages are installed."""
    cure = 'run: python -m xrt_core.options > docs/options.md'
    page = DOCS.read_text(encoding="utf-8")
    assert page.partition("\n## ")[0] == core_table(), cure
    if {s.owner.partition(" ")[0] for s in declared.switches().values()} == {"xrt-tensorrt", "xrt-xla"}:
        assert page == as_markdown(), cure


def test_a_sharding_needs_a_mesh() -> None:
    """How tensors lie on a mesh that is not there is no setting to pass over in silence."""
    with pytest.raises(OptionError, match=r"sharding='auto' .* and there is none: give mesh="):
        resolve({"sharding": "auto"}, {})
    assert resolve({"sharding": "auto"}, {"XRT_MESH": "data=2"}).sharding == "auto"

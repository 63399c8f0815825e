"""A guarded module in one file: its verdicts come with it, pieces included, and nothing is verified again."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from tests.guard.guarded import states
from tests.verify.planted import deep
from xrt_core import XRTModule
from xrt_core.cache.store import forget_all
from xrt_core.engine import engines
from xrt_core.engine.contract import CompileOptions, Executable, GraphCompiler
from xrt_core.errors import CacheError
from xrt_core.guard.verdict_cache import forget_all as forget_verdicts
from xrt_core.testing.host_engine import HostCompiler, HostEngine, HostExecutable
from xrt_core.verify.inputs import synthesize_inputs

GUARD = {"guard": True, "guard_async": False, "guard_sandbox": False, "guard_tune": False}


class _Spoilt(HostExecutable):
    def run(self, *args: Any, **options: Any) -> Sequence[Any]:
        return [r + 1 for r in super().run(*args, **options)]


class _Compiler(HostCompiler):
    def compile(self, *args: Any) -> Executable:
        erf = any(n.op_type == "Erf" for n in args[0].body.nodes)
        return _Spoilt(*args) if erf else super().compile(*args)


class Suspect(HostEngine):
    """Serialises, and is wrong wherever there is an Erf."""

    name = "suspect"

    def compiler(self, device: str, options: CompileOptions) -> GraphCompiler:
        return _Compiler()


@pytest.fixture
def suspect() -> Iterator[None]:
    engines.register(Suspect)
    yield
    engines.unregister("suspect")


@pytest.mark.usefixtures("suspect")
@pytest.mark.parametrize("cache", [True, False])
def test_pieces_come_with_the_model(cache: bool, own_cache: pathlib.Path, tmp_path: pathlib.Path) -> None:
    function = deep(12)
    inputs = synthesize_inputs(function, seed=9)
    m = XRTModule(function.body, engine="suspect", cache=cache, **GUARD)
    expected = m(*inputs)
    assert len(m._pipeline.services.guard.outcomes()) == 1  # type: ignore[union-attr]
    m.save(tmp_path / "model.xrt")
    forget_all()
    forget_verdicts()
    loaded = XRTModule.load(tmp_path / "model.xrt", cache=False, **GUARD)
    assert states(loaded) == ["queued", "ready", "live"]
    for got, want in zip(loaded(*inputs), expected, strict=True):
        np.testing.assert_array_equal(got, want)
    names = [e.name for e in loaded.events]
    assert "saved.loaded" in names
    assert "compile" not in names
    assert "it came with the model" in loaded.report().as_text()


@pytest.mark.usefixtures("suspect", "own_cache")
def test_other_signatures_of_a_loaded_model_are_verified(tmp_path: pathlib.Path) -> None:
    function = deep(12)
    m = XRTModule(function.body, engine="suspect", cache=False)
    m(*synthesize_inputs(function))
    m.save(tmp_path / "model.xrt")  # without a guard: nothing was verified
    forget_all()
    loaded = XRTModule.load(tmp_path / "model.xrt", cache=False, **GUARD)
    loaded(*synthesize_inputs(function))
    assert "it came with the model" not in loaded.report().as_text()
    assert "right on" in loaded.report().as_text()


@pytest.mark.usefixtures("suspect", "own_cache")
def test_a_guarded_load_refuses_what_an_unguarded_one_refuses(tmp_path: pathlib.Path) -> None:
    """Executables that do not fit are an error, not a compilation in the background."""
    function = deep(12)
    m = XRTModule(function.body, engine="suspect", cache=False)
    m(*synthesize_inputs(function))
    m.save(tmp_path / "model.xrt")
    forget_all()
    for guard in ({}, GUARD):
        with pytest.raises(CacheError, match="holds no executable for suspect_0; the nearest differs in threads"):
            XRTModule.load(tmp_path / "model.xrt", cache=False, threads=1, **guard)

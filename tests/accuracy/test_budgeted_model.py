"""A module with a budget of errors: what is tried, what answers, and what happens where the budget is exceeded."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

import xrt_core as xrt
from tests.fake_engines import FakeCompiler, FakeEngine, FakeExecutable, fake_engine
from tests.random_graphs import F32, graph_of, node
from xrt_core.accuracy.search import PrecisionSearch
from xrt_core.engine.contract import CompileOptions, Executable, Tolerance
from xrt_core.errors import InputError, OptionError, UnsupportedError
from xrt_core.ir.graph import Graph, Value
from xrt_core.ir.types import TensorType
from xrt_core.verify.autotune import Neighbours

SLOW = 4e-3  # seconds


class HalfExecutable(Executable):
    """As the inner one, rounded to float16, and `off` times the result away."""

    def __init__(self, inner: Executable, engine: HalfEngine) -> None:
        self.inner, self.engine = inner, engine

    def run(self, inputs: Sequence[Any], run_options: Any = None, block_until_done: bool = True) -> Sequence[Any]:
        results = self.inner.run(inputs)
        return [(np.asarray(r) * (1 + self.engine.off)).astype(np.float16).astype(np.float32) for r in results]


class HalfCompiler(FakeCompiler):
    """Fast with the option `half`, slow without."""

    def __init__(self, engine: HalfEngine, half: bool) -> None:
        super().__init__(engine)
        self.owner, self.half = engine, half

    def compile(self, function: Any, entry_params: Any, return_params: Any, aliases: Any) -> Executable:
        made = super().compile(function, entry_params, return_params, aliases)
        if self.half:
            return HalfExecutable(made, self.owner)
        assert isinstance(made, FakeExecutable)
        call = made.call

        def slow(inputs: Sequence[Any]) -> Sequence[Any]:
            time.sleep(SLOW)
            return call(inputs)

        made.call = slow
        return made


class HalfEngine(FakeEngine):
    """Computes float32 in float16 if asked."""

    name = "half"
    reduced_precisions: ClassVar[Mapping[str, Mapping[str, Any]]] = {"float16": {"half": True}}

    def __init__(self) -> None:
        super().__init__()
        self.off = 0.0

    def compiler(self, device: str, options: Any) -> HalfCompiler:
        return HalfCompiler(self, options.extra.get("half", False))

    def tolerance_with(self, options: CompileOptions) -> Mapping[str, Tolerance]:
        if options.extra.get("half"):
            return {"float32": Tolerance(0.0, 0.0, reason="asked for", computed_in="float16")}
        return {}


@pytest.fixture
def engine() -> Iterator[HalfEngine]:
    with fake_engine(HalfEngine) as made:
        assert isinstance(made, HalfEngine)
        yield made


def model() -> Graph:
    """A chain of elementwise operators: nothing to quantise."""
    x, a, y = Value("x", TensorType(F32, ("n", 16))), Value("a"), Value("y")
    return graph_of([x], [y], [node("Tanh", [x], [a]), node("Exp", [a], [y])])


X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(2, 16)
Y = np.exp(np.tanh(X))


def module(**options: Any) -> xrt.XRTModule:
    given = {"engine": "half", "guard_verify": True, "guard_async": True, "cache": "off", "prune": False, **options}
    return xrt.XRTModule(model(), **given)


def test_a_faster_form_within_the_budget_answers(engine: HalfEngine) -> None:
    """Calls before the search are exact; afterwards the reduced form answers, and says so."""
    with module(accuracy=1e-2) as m:
        np.testing.assert_allclose(m(X), Y, rtol=1e-6)
        assert m.wait(60)
        report = m.accuracy
        assert report is not None
        assert report.chosen is not None, report
        assert (report.chosen.form, report.chosen.engine) == ("float16", "half")
        assert report.chosen.used is not None
        assert 0 < report.chosen.used < 1
        assert report.chosen.ratio is not None
        assert report.chosen.ratio < 0.9
        assert (report.inputs, report.given) == (1, False)
        y = m(X)
        assert 0 < np.abs(y - Y).max() / Y.max() < 1e-2
        assert m.accuracy is not None
        assert m.accuracy.checked == 1
        assert m.accuracy.worst < 1
        assert "float16 on half" in str(m.accuracy)
        assert m.accuracy.to_json()["state"] == "done"
        assert np.array_equal(m.run({"x": X})["y"], y)


def test_a_form_beyond_the_budget_does_not(engine: HalfEngine) -> None:
    """The model's own precision goes on."""
    with module(accuracy=1e-6, calibration=[{"x": X}, {"x": -X}]) as m:
        assert m.wait(60)
        report = m.accuracy
        assert report is not None
        assert report.chosen is None
        assert [t.verdict for t in report.trials if t.form == "float16"] == ["too far off"]
        assert (report.inputs, report.given) == (2, True)
        np.testing.assert_allclose(m(X), Y, rtol=1e-6)


def test_results_that_exceed_the_budget_later(engine: HalfEngine) -> None:
    """The first reduced results do not go out; later ones end the form, and the user is told."""
    with module(accuracy=1e-2) as m:
        m(X)
        assert m.wait(60)
        engine.off = 0.5
        np.testing.assert_allclose(m(X), Y, rtol=1e-6)
        assert m.accuracy is not None
        assert [t.verdict for t in m.accuracy.trials if t.form == "float16"] == ["exceeded"]
        assert m.accuracy.worst > 1
        assert "accuracy.exceeded" in [e.name for e in m.events.recent()]
        np.testing.assert_allclose(m(X), Y, rtol=1e-6)


def test_other_signatures_are_exact_until_they_are_compiled(engine: HalfEngine) -> None:
    """A new shape is answered at once, and by the reduced form later."""
    with module(accuracy=1e-2) as m:
        m(X)
        assert m.wait(60)
        wide = np.concatenate([X, X, X])
        np.testing.assert_allclose(m(wide), np.exp(np.tanh(wide)), rtol=1e-6)
        end = time.monotonic() + 30
        while np.abs(m(wide) - np.exp(np.tanh(wide))).max() < 1e-5:
            assert time.monotonic() < end
            time.sleep(0.05)


def test_another_process_starts_with_what_the_first_chose(engine: HalfEngine, tmp_path: pathlib.Path) -> None:
    """Nothing is timed again; the errors are measured again, and the first result is compared as ever."""
    kept = {"accuracy": 1e-2, "cache": "readwrite", "cache_dir": str(tmp_path)}
    with module(**kept) as m:
        m(X)
        assert m.wait(60)
        assert m.accuracy is not None
        first = m.accuracy.chosen
        assert first is not None, m.accuracy
    raced: list[str] = []
    with pytest.MonkeyPatch.context() as patch, module(**kept) as m:
        patch.setattr(PrecisionSearch, "_race", lambda *_: raced.append("race"))
        np.testing.assert_allclose(m(X), Y, rtol=1e-6)
        assert m.wait(60)
        assert m.accuracy is not None
        again = m.accuracy.chosen
        assert again is not None, m.accuracy
        assert (again.form, again.engine, again.ratio, again.reason) == (
            first.form, first.engine, first.ratio, "by an earlier process"
        )  # fmt: skip
        assert not raced
        assert 0 < np.abs(m(X) - Y).max() / Y.max() < 1e-2
        assert m.accuracy.checked == 1
    with module(**{**kept, "accuracy": 2e-2}) as m:  # another budget is another search
        m(X)
        assert m.wait(60)
        assert m.accuracy is not None
        assert m.accuracy.chosen is not None
        assert m.accuracy.chosen.reason != "by an earlier process"


def test_a_kept_choice_that_is_off_is_searched_anew(engine: HalfEngine, tmp_path: pathlib.Path) -> None:
    """Where it is wrong from the start, and where it exceeded its budget in a call: no other process begins with it."""
    kept = {"accuracy": 1e-2, "cache": "readwrite", "cache_dir": str(tmp_path)}
    with module(**kept) as m:
        m(X)
        assert m.wait(60)
        assert m.accuracy is not None
        assert m.accuracy.chosen is not None, m.accuracy
    engine.off = 0.5
    with module(**kept) as m:
        np.testing.assert_allclose(m(X), Y, rtol=1e-6)
        assert m.wait(60)
        assert m.accuracy is not None
        assert m.accuracy.chosen is None
        np.testing.assert_allclose(m(X), Y, rtol=1e-6)
        assert "by an earlier process" not in str(m.accuracy)


def test_a_choice_that_exceeded_its_budget_is_forgotten(engine: HalfEngine, tmp_path: pathlib.Path) -> None:
    """The next process searches again."""
    kept = {"accuracy": 1e-2, "cache": "readwrite", "cache_dir": str(tmp_path), "guard_shadow": 0}
    for off in (0.5, 0.0):
        with module(**kept) as m:
            m(X)
            assert m.wait(60)
            assert m.accuracy is not None
            assert m.accuracy.chosen is not None, m.accuracy
            assert m.accuracy.chosen.reason != "by an earlier process"
            engine.off = off
            np.testing.assert_allclose(m(X), Y, rtol=1e-2)
            engine.off = 0.0


def test_the_models_own_precision_is_a_choice_as_well(engine: HalfEngine, tmp_path: pathlib.Path) -> None:
    """Another process does not search for what is not there."""
    given: Any = {"accuracy": 1e-6, "cache": "readwrite", "cache_dir": str(tmp_path), "calibration": [{"x": X}]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Neighbours, "are_busy", lambda _: False)
        with module(**given) as m:
            assert m.wait(60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrecisionSearch, "find", lambda _: pytest.fail("it was searched again"))
        with module(**given) as m:
            assert m.wait(60)
            assert m.accuracy is not None
            assert m.accuracy.state == "done", m.accuracy
            assert [t.verdict for t in m.accuracy.trials if t.form == "float16"] == ["too far off"]
            np.testing.assert_allclose(m(X), Y, rtol=1e-6)


def test_an_engine_that_fails_in_the_search_is_reported(engine: HalfEngine) -> None:
    """The caller notices nothing."""

    def fail(_: Any) -> None:
        raise RuntimeError("no")

    engine.on_compile = fail
    with module(accuracy=1e-2) as m:
        np.testing.assert_allclose(m(X), Y, rtol=1e-6)
        assert m.wait(60)
        assert m.accuracy is not None
        assert m.accuracy.state == "done", m.accuracy
        assert [t.verdict for t in m.accuracy.trials if t.form == "float16"] == ["not live"]
        np.testing.assert_allclose(m(X), Y, rtol=1e-6)


def test_what_it_is_not_for(engine: HalfEngine) -> None:
    """Each error names the reason; nothing is started."""
    with pytest.raises(UnsupportedError, match="models of fixed inputs"):
        xrt.XRTModule(lambda x: xrt.ops.Relu(x), accuracy=1e-2)
    with pytest.raises(UnsupportedError, match="verified"):
        module(accuracy=1e-2, guard_verify=False, guard_async=False)
    with pytest.raises(UnsupportedError, match="lowered by other options"):
        module(accuracy=1e-2, use_bf16=True)
    with pytest.raises(InputError, match="calibration is for accuracy="):
        module(calibration=[{"x": X}])
    with pytest.raises(InputError, match="calibration is empty"):
        module(accuracy=1e-2, calibration=[])
    with pytest.raises(InputError, match="unknown input 'z'"):
        module(accuracy=1e-2, calibration=[{"z": X}])
    with pytest.raises(InputError, match="the same shapes"):
        module(accuracy=1e-2, calibration=[{"x": X}, {"x": X[:1]}])
    with pytest.raises(InputError, match="no output 'w'"):
        module(accuracy={"error": 1e-2, "outputs": {"w": 1e-3}})
    with pytest.raises(OptionError, match="no positive number"):
        module(accuracy=0)


def test_the_environment_speaks_of_no_single_module(engine: HalfEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it does not apply the variable is passed over, with an event; else it counts."""
    monkeypatch.setenv("XRT_ACCURACY", "0.01")
    traced = xrt.XRTModule(lambda x: xrt.ops.Relu(x), engine="host")
    np.testing.assert_array_equal(traced(X), np.maximum(X, 0))
    assert traced.accuracy is None
    assert "accuracy.not_applied" in [e.name for e in traced.events.recent()]
    with module() as m:
        assert m.accuracy is not None

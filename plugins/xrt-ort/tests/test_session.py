"""Sessions over the genuine library: behaviours equal to it, engines that take over, and engines that fail."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import library_tests  # noqa: F401 (which adds its rows)
import numpy as np
import pytest
from behaviours import BEHAVIOURS, F, X, affine, info, model, outcome, overridable, session, strings
from onnx import helper

import xrt_core as xrt
from xrt_core.events import Event

onnxruntime = pytest.importorskip("onnxruntime")

import xrt_ort  # noqa: E402
from xrt_ort import acceleration, settings  # noqa: E402


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sessions are tried from the first call on, and engines need not be faster."""
    monkeypatch.setattr(acceleration, "_FASTER", 1e9)
    monkeypatch.setattr(acceleration, "_NO_SLOWER", 1e9)
    monkeypatch.setattr(acceleration, "_SECONDS", 0.0)
    monkeypatch.setattr(settings.settings, "after", 0.0)
    monkeypatch.setattr(settings.settings, "options", {"engine": "onnxruntime", "prune": False, "cache": "off"})
    yield
    assert xrt_ort.wait(60)


def live(made: bytes | None = None, feeds: Any = None, **given: Any) -> Any:
    """A session that engines answer for these feeds."""
    s = session(xrt_ort, made, **given)
    s.run(None, {"x": X} if feeds is None else feeds)
    assert xrt_ort.wait(60)
    assert s._acceleration.live, s._acceleration.state
    return s


@pytest.mark.parametrize("name", BEHAVIOURS)
@pytest.mark.filterwarnings("ignore:Specified provider")
def test_behaves_as_the_library(name: str) -> None:
    """A session gives what one of the library gives, and raises what that raises, message included."""
    function, facts = BEHAVIOURS[name]
    expected, message = outcome(function, onnxruntime)
    assert outcome(function, xrt_ort) == (expected, message)
    assert all(fact in message for fact in facts)


def test_classes_are_those_of_the_library() -> None:
    """isinstance and except of programs hold: metadata, options, values and exceptions are the library's."""
    s = session(xrt_ort)
    state = onnxruntime.capi.onnxruntime_pybind11_state
    assert isinstance(s, onnxruntime.InferenceSession)
    assert isinstance(xrt_ort.SessionOptions(), onnxruntime.SessionOptions)
    assert type(s.get_inputs()[0]) is onnxruntime.NodeArg
    assert type(s.get_modelmeta()) is onnxruntime.ModelMetadata
    assert xrt_ort.OrtValue is onnxruntime.OrtValue
    with pytest.raises(state.InvalidArgument):
        s.run(["nothing"], {"x": X})


def test_engines_take_over(at_once: None) -> None:
    """After a trial engines answer, with equal results that are the caller's own; the report tells."""
    s = live()
    before = s._acceleration.offloaded
    y, _ = s.run(None, {"x": X})
    assert s._acceleration.offloaded == before + 1
    want = onnxruntime.InferenceSession(affine()).run(None, {"x": X})
    np.testing.assert_allclose(y, want[0], rtol=1e-5)
    assert y.flags.writeable
    assert not np.shares_memory(y, s.run(None, {"x": X})[0])
    row = next(r for r in xrt_ort.report() if r.offloaded)
    assert row.engines == ("onnxruntime",)
    assert "answer" in str(row)


def test_live_sessions_behave_as_the_library(at_once: None) -> None:
    """Where engines answer one signature, every other call behaves as before: names, lists, layouts, bad feeds."""
    s, plain = live(), onnxruntime.InferenceSession(affine(), providers=["CPUExecutionProvider"])
    calls: list[tuple[Any, Any]] = [
        (None, {"x": X}), ([], {"x": X}), (["z"], {"x": X}), (["z", "y"], {"x": X}), (None, {"x": X.tolist()}),
        (None, {"x": np.asfortranarray(X)}), (None, {"x": X.astype(">f4")}), (None, {"x": X[:1]}), (None, {}),
        (["nothing"], {"x": X}), (None, {"x": X, "q": X}), (None, {"x": X[0]}), (None, {"x": X.astype(np.float64)}),
        (None, {"x": np.full((2, 3), np.nan, F)}), (None, [X]), (None, {"x": None}),
        (None, {"x": onnxruntime.OrtValue.ortvalue_from_numpy(X)}),
    ]  # fmt: skip
    for names, feeds in calls:
        expected = outcome(lambda p: p.run(names, feeds), plain)  # noqa: B023
        got = outcome(lambda p: p.run(names, feeds), s)  # noqa: B023
        assert got == expected, (names, feeds)
        assert xrt_ort.wait(60)
    v = s.run_with_ort_values(["z"], {"x": onnxruntime.OrtValue.ortvalue_from_numpy(X)})
    assert isinstance(v[0], onnxruntime.OrtValue)
    foreign = plain.create_ortvalue_from_shape_and_type([2, 3], F, "cpu")
    with pytest.raises(ValueError, match="session that created it"):
        s.run_with_ort_values(["z"], {"x": foreign})


def test_engine_that_fails_gives_the_library_the_call(at_once: None) -> None:
    """An exception of an engine is a FallbackEvent; the library answers that call and later ones."""
    s, found = live(), []
    call = next(iter(s._acceleration.live.values()))

    def broken(arrays: Any) -> Any:
        raise RuntimeError("engine broke")

    call._run = broken
    undo = xrt.subscribe(found.append)
    try:
        y = s.run(["y"], {"x": X})[0] if not s._acceleration.live.get(("y",)) else None
        y = s.run(None, {"x": X})[0]
    finally:
        undo()
    np.testing.assert_array_equal(y, onnxruntime.InferenceSession(affine()).run(None, {"x": X})[0])
    assert [e for e in found if isinstance(e, xrt.FallbackEvent) and "engine broke" in e.error]
    assert call not in s._acceleration.live.values()


def test_engines_that_differ_are_not_used(at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results that differ from the library's in the trial leave the library where it is, and the report says why."""
    monkeypatch.setattr(acceleration, "_difference", lambda *_: "result 0: other values")
    s = session(xrt_ort)
    s.run(None, {"x": X})
    assert xrt_ort.wait(60)
    assert not s._acceleration.live
    assert "differ" in s._acceleration.state


@pytest.mark.parametrize("change", ["value", "nan", "dtype", "shape", "count", "readonly"])
def test_differences_are_found(change: str) -> None:
    """A result of another value, kind of number, dtype, shape or number, or that is read-only, is a difference."""
    a = np.array([1, 2, np.nan], F)
    owner = acceleration.Acceleration(type("S", (), {})(), lambda *_: None, "m", {})
    assert acceleration._difference([a], [a.copy()], [], owner) == ""
    b = a.copy()
    if change == "value":
        b[0] = 1.01
    elif change == "nan":
        b[2] = 0
    elif change == "dtype":
        b = b.astype(np.float64)
    elif change == "shape":
        b = b[None]
    elif change == "readonly":
        b.flags.writeable = False
    assert acceleration._difference([a], [b, b] if change == "count" else [b], [], owner)


def test_slower_engines_are_left(at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is slower in the trial, or in the program, is answered by the library again."""
    s = live()
    call = next(iter(s._acceleration.live.values()))
    monkeypatch.setattr(acceleration, "_NO_SLOWER", 1.0)
    call._usual, call._times, call._doubt = 1e-9, [], True
    for _ in range(acceleration._SKIPPED + acceleration._TIMED):
        s.run(None, {"x": X})
    assert not s._acceleration.live
    monkeypatch.setattr(acceleration, "_FASTER", 0.0)
    other = session(xrt_ort)
    other.run(None, {"x": X})
    assert xrt_ort.wait(60)
    assert not other._acceleration.live
    assert "time" in other._acceleration.state


def test_where_engines_lost_calls_are_looked_at_at_times(at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a trial that the library won, most calls are its own without a look; another size is found all the same."""
    monkeypatch.setattr(acceleration, "_FASTER", 0.0)
    s = session(xrt_ort)
    s.run(None, {"x": X})
    assert xrt_ort.wait(60)
    s.run(None, {"x": X})
    looked: list[object] = []
    observe = s._acceleration.observe
    monkeypatch.setattr(s._acceleration, "observe", lambda *given: (looked.append(given[0]), observe(*given)))
    for _ in range(10 * (acceleration._UNWATCHED + 1)):
        y, _ = s.run(None, {"x": X})
    assert len(looked) == 10
    assert s._acceleration.calls == 2 + 10 * (acceleration._UNWATCHED + 1)
    np.testing.assert_array_equal(y, onnxruntime.InferenceSession(affine()).run(None, {"x": X})[0])
    monkeypatch.setattr(acceleration, "_FASTER", 1e9)
    for _ in range(acceleration._UNWATCHED + 1):
        s.run(None, {"x": X[:1]})
    assert xrt_ort.wait(60)
    assert s._acceleration.live


@pytest.mark.parametrize("timed_again", [True, False])
def test_engines_that_become_slower_are_left(timed_again: bool, at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that become slower than the library, long after they took over, are left once the library is timed again
    twice; only that finds it: where the library is not timed again, they answer for good."""
    monkeypatch.setattr(acceleration, "_NO_SLOWER", 1.03)
    if not timed_again:
        monkeypatch.setattr(acceleration, "_AGAIN", 10**9)
    s = live()
    call = next(iter(s._acceleration.live.values()))
    for _ in range(acceleration._CHECK):
        s.run(None, {"x": X})
    assert s._acceleration.offloaded == acceleration._CHECK
    run = call._run

    def slow(arrays: Any) -> Any:
        threading.Event().wait(0.002)
        return run(arrays)

    call._run = slow
    check = acceleration._CHECK + acceleration._SKIPPED + acceleration._TIMED
    for _ in range(32 + check):
        s.run(None, {"x": X})
    assert s._acceleration.live  # once may be chance
    for _ in range(check):
        s.run(None, {"x": X})
    assert bool(s._acceleration.live) is not timed_again
    assert ("time in the program" in s._acceleration.state) is timed_again


def test_what_xrt_cannot_load_stays_with_the_library(at_once: None, tmp_path: Any) -> None:
    """A model that XRT cannot read runs in the library as a whole, with an event."""
    found: list[Event] = []
    path = tmp_path / "m.onnx"
    path.write_bytes(affine())
    s = session(xrt_ort, str(path))
    path.write_bytes(b"encrypted since")
    undo = xrt.subscribe(found.append)
    try:
        s.run(None, {"x": X})
        assert xrt_ort.wait(60)
    finally:
        undo()
    assert any(isinstance(e, xrt.FallbackEvent) and e.stage == "plan" for e in found)
    assert "cannot run" in s._acceleration.state
    assert s.run(["y"], {"x": X})[0].shape == (2, 2)


def test_what_only_the_library_can_do(at_once: None) -> None:
    """Weights in the options, profiles and determinism are the library's: such sessions have no acceleration."""
    replaced, same = xrt_ort.SessionOptions(), xrt_ort.SessionOptions()
    weight = xrt_ort.OrtValue.ortvalue_from_numpy(np.ones((3, 2), F))
    replaced.add_initializer("w", weight)
    same.use_deterministic_compute = True
    for o in (replaced, same):
        assert session(xrt_ort, sess_options=o)._acceleration is None
    o = xrt_ort.SessionOptions()
    o.intra_op_num_threads = 1
    assert session(xrt_ort, sess_options=o)._acceleration._options["threads"] == 1
    assert live(overridable(), {"x": X[0]}).run(None, {"x": X[0], "s": np.array([3], F)})[0].tolist() == [0, 3, 6]
    assert session(xrt_ort, strings()).run(None, {"x": np.array(["a"])})[0].tolist() == ["a"]


def test_options_that_the_model_brings(at_once: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """A model that turns profiling on has a session of the library's alone; its number of threads reaches engines."""
    monkeypatch.chdir(tmp_path)  # where the library writes the profile
    monkeypatch.setenv("ORT_LOAD_CONFIG_FROM_MODEL", "1")
    node, x, y = helper.make_node("Neg", ["x"], ["y"]), info("x", 1, [2]), info("y", 1, [2])
    profiled = model([node], [x], [y], ort_config='{"session_options": {"enable_profiling": 1}}')
    assert session(xrt_ort, profiled)._acceleration is None
    threads = model([node], [x], [y], ort_config='{"session_options": {"intra_op_num_threads": 3}}')
    assert session(xrt_ort, threads)._acceleration._options["threads"] == 3


def test_provider_has_options() -> None:
    """XRT's provider is listed, takes options of XRT, and says what is wrong with them."""
    s = xrt_ort.InferenceSession(affine(), providers=[("XRTExecutionProvider", {"minimum_nodes": "2"})])
    assert s.get_providers() == ["XRTExecutionProvider", "CPUExecutionProvider"]
    assert s._acceleration._options["minimum_nodes"] == 2
    assert xrt_ort.get_available_providers()[0] == "XRTExecutionProvider"
    assert next(iter(s.get_provider_options())) == "XRTExecutionProvider"
    o = xrt_ort.SessionOptions()
    o.add_provider("XRTExecutionProvider", {"minimum_nodes": "3"})
    added = xrt_ort.InferenceSession(affine(), o)
    assert o.has_providers()
    assert added.get_providers() == s.get_providers()
    assert added._acceleration._options["minimum_nodes"] == 3
    with pytest.raises(ValueError, match="minimum_node"):
        o.add_provider("XRTExecutionProvider", {"minimum_node": "3"})
    with pytest.raises(ValueError, match="minimum_node"):
        xrt_ort.InferenceSession(affine(), providers=[("XRTExecutionProvider", {"minimum_node": "2"})])


def test_configure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of the process reach sessions made later; bad ones are errors."""
    monkeypatch.setattr(settings, "settings", settings.settings)
    xrt_ort.configure(minimum_nodes=3)
    try:
        assert session(xrt_ort)._acceleration._options["minimum_nodes"] == 3
    finally:
        xrt_ort.configure(minimum_nodes=None)
    with pytest.raises(xrt.errors.OptionError, match="no_such_option"):
        xrt_ort.configure(no_such_option=1)
    with pytest.raises(xrt.errors.OptionError, match="after"):
        xrt_ort.configure(after=-1)


def test_sessions_are_freed(at_once: None) -> None:
    """A session that the program drops is freed, with what was compiled for it."""
    import weakref

    s = live()
    gone = weakref.ref(s._acceleration)
    del s
    gc.collect()
    assert gone() is None


def test_values_that_determine_shapes_are_told_apart(at_once: None) -> None:
    """A Reshape whose target is an input: calls of equal shapes and other values have results of other shapes."""
    node = helper.make_node("Reshape", ["x", "shape"], ["r"])
    neg = helper.make_node("Neg", ["r"], ["y"])
    made = model([node, neg], [info("x", 1, [2, 3]), info("shape", 7, [2])], [info("y", 1, [None, None])])
    s = session(xrt_ort, made)
    for shape in ([3, 2], [6, 1], [3, 2], [1, 6], [6, 1], [3, 2], [1, 6]):
        y = s.run(None, {"x": X, "shape": np.array(shape)})[0]
        assert list(y.shape) == shape
        assert xrt_ort.wait(60)


def test_threads_share_a_live_session(at_once: None) -> None:
    """Four threads get their own results while engines take over."""
    s, wrong = session(xrt_ort), []
    plain = onnxruntime.InferenceSession(affine())

    def work(k: int) -> None:
        want = plain.run(None, {"x": X * k})
        for _ in range(100):
            got = s.run(None, {"x": X * k})
            if not all(np.allclose(a, b, rtol=1e-5) for a, b in zip(want, got, strict=True)):
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(1, 5)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong

"""A model bound to arrays, and runs of many sets of inputs."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

import xrt_core as xrt
from tests.fake_engines import fake_engine
from tests.random_graphs import F32, graph_of, node
from xrt_core.errors import ExecutionError, InputError
from xrt_core.ir.graph import Graph, Value
from xrt_core.ir.types import TensorType
from xrt_core.module import XRTModule

pytestmark = pytest.mark.tiny_clusters

X = np.array([[1, -2], [3, 4]], np.float32)


def _graph() -> Graph:
    """y = x + state, next = -state."""
    x, state = Value("x", TensorType(F32, ("n", 2))), Value("state", TensorType(F32, (2,)))
    y, after = Value("y"), Value("next")
    return graph_of([x, state], [y, after], [node("Add", [x, state], [y]), node("Neg", [state], [after])])


@pytest.mark.parametrize("engine", ["host", "fake"])
def test_the_same_arrays_are_read_and_written_at_each_call(engine: str) -> None:
    """What they hold then is what counts; the array of an input may take an output; others are new each time."""
    with fake_engine():
        m = XRTModule(_graph(), engine=engine)
        x, state = X.copy(), np.array([1, 2], np.float32)
        step = m.bind({"x": x, "state": state}, {"next": state})
        for k in range(3):
            x[:] = k
            before = state.copy()
            found = step()
            np.testing.assert_array_equal(found["y"], np.full((2, 2), k) + before)
            assert found["next"] is state
            np.testing.assert_array_equal(state, -before)
        assert step()["y"] is not found["y"]
        assert (step.inputs["x"] is x, step.outputs["next"] is state) == (True, True)


def test_a_bound_call_finds_its_plan_again() -> None:
    """Its signature is looked up, so that a plan which was dropped in between is made again."""
    m = XRTModule(_graph(), engine="host", cache_size=1)
    x, state = X.copy(), np.ones(2, np.float32)
    step = m.bind({"x": x, "state": state})
    for n in (3, 4, 5):
        m.run({"x": np.zeros((n, 2), np.float32), "state": state})
    np.testing.assert_array_equal(step()["y"], X + 1)


def test_a_bound_call_looks_at_nothing_twice() -> None:
    """It enters fewer Python functions than a call by name; those that the collector enters do not count."""
    import gc
    import sys

    def python_calls(call: Any) -> int:
        seen = 0

        def profile(frame: Any, event: str, arg: Any) -> None:
            nonlocal seen
            seen += event == "call"

        gc.collect()
        gc.disable()
        sys.setprofile(profile)
        try:
            call()
        finally:
            sys.setprofile(None)
            gc.enable()
        return seen

    m = XRTModule(_graph(), engine="host")
    given = {"x": X, "state": np.ones(2, np.float32)}
    step = m.bind(given)
    m.run(given), step()
    assert python_calls(step) < python_calls(lambda: m.run(given))


def test_arrays_that_do_not_fit() -> None:
    """Wrong ones are named when they are bound; one that was given another shape since, in the call."""
    m = XRTModule(_graph(), engine="host")
    x, state = X.copy(), np.ones(2, np.float32)
    with pytest.raises(InputError, match="missing input 'state'"):
        m.bind({"x": x})
    with pytest.raises(InputError, match="input 'x': dtype float64 given"):
        m.bind({"x": x.astype(np.float64), "state": state})
    with pytest.raises(InputError, match="unknown output 'z'"):
        m.bind({"x": x, "state": state}, {"z": state})
    with pytest.raises(InputError, match="must be a mapping"):
        m.bind([x, state])  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"results\['next'\] is float32\[3\]"):
        m.bind({"x": x, "state": state}, {"next": np.zeros(3, np.float32)})()
    step = m.bind({"x": x, "state": state})
    x.resize((1, 4), refcheck=False)
    with pytest.raises(InputError, match=r"input 'x': shape \[1, 4\], it was bound with \[2, 2\]"):
        step()


def test_values_that_determine_shapes_are_read_at_each_call() -> None:
    """A bound input may be one of them: each value has a plan of its own."""
    x, shape, y = Value("x", TensorType(F32, (4,))), Value("shape", TensorType(np.dtype(np.int64), (2,))), Value("y")
    m = XRTModule(graph_of([x, shape], [y], [node("Reshape", [x, shape], [y])]), engine="host")
    sizes = np.array([2, 2])
    step = m.bind({"x": np.arange(4, dtype=np.float32), "shape": sizes})
    assert step()["y"].shape == (2, 2)
    sizes[:] = 1, 4
    assert step()["y"].shape == (1, 4)


def test_a_traced_graph_is_bound_as_well() -> None:
    """Its signature is traced when it is bound."""
    m = XRTModule(lambda x: {"twice": x + x}, engine="host")
    x = X.copy()
    step = m.bind({"x": x})
    x[:] = 3
    (found,) = step().values()
    np.testing.assert_array_equal(found, np.full((2, 2), 6))


def test_a_model_with_a_budget_is_bound_as_well() -> None:
    """Results are those of a call, in the given arrays."""
    with fake_engine(), XRTModule(_graph(), engine="fake", guard=True, accuracy=1e-2) as m:
        out = np.empty((2, 2), np.float32)
        found = m.bind({"x": X, "state": np.ones(2, np.float32)}, {"y": out})()
        assert found["y"] is out
        np.testing.assert_array_equal(out, X + 1)


@pytest.mark.parametrize("callers", [1, 3])
def test_many_sets_in_their_order(callers: int) -> None:
    """One result for each, whoever is ready first; sets are taken only as they are needed."""
    m, taken = XRTModule(_graph(), engine="host"), []

    def sets() -> Iterator[Mapping[str, Any]]:
        for k in range(20):
            taken.append(k)
            yield {"x": np.full((1, 2), k, np.float32), "state": np.zeros(2, np.float32)}

    results = m.run_many(sets(), callers=callers)
    first = next(iter(results))
    assert first["y"][0, 0] == 0
    assert len(taken) <= 2 * callers
    assert [r["y"][0, 0] for r in results] == list(range(1, 20))
    assert not [t for t in threading.enumerate() if t.name.startswith("xrt-caller")]


@pytest.mark.parametrize("callers", [1, 2])
def test_a_set_that_fails_ends_the_rest(callers: int) -> None:
    """Its error comes in its place, after the results before it."""
    m = XRTModule(_graph(), engine="host")
    good = {"x": X, "state": np.ones(2, np.float32)}
    results = m.run_many([good, {"x": X}, good], callers=callers)
    assert set(next(iter(results))) == {"y", "next"}
    with pytest.raises(InputError, match="missing input 'state'"):
        next(iter(results))
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(InputError, match="callers must be a positive integer"):
            m.run_many([good], callers=wrong)  # type: ignore[arg-type]


def test_a_run_that_fails_on_the_host_raises_from_a_bound_call() -> None:
    """As it does from any call, and the next call works."""
    x, i, y = Value("x", TensorType(F32, (2, 2))), Value("i", TensorType(np.dtype(np.int64), (1,))), Value("y")
    m = XRTModule(graph_of([x, i], [y], [node("Gather", [x, i], [y])]), engine="host")
    index = np.array([7])
    step = m.bind({"x": X, "i": index})
    with pytest.raises(xrt.XRTError) as failed:
        step()
    assert isinstance(failed.value, ExecutionError)
    index[0] = 1
    np.testing.assert_array_equal(step()["y"], X[1:])

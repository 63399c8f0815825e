"""Evaluations where the host computes on a GPU: inputs and reference are there, times are of finished work."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from tests.fake_cuda import GPU
from tests.fake_cupy import installed, ndarray
from tests.random_graphs import F32, graph_of, node
from xrt_core.engine.contract import Executable, Function
from xrt_core.host.place import HostPlace
from xrt_core.ir.graph import Value
from xrt_core.ir.types import TensorType
from xrt_core.verify.evaluate import EvaluationSettings, evaluate
from xrt_core.verify.isolate import Candidate
from xrt_core.verify.verdict import Outcome

SLOW = 0.02


@pytest.fixture
def cupy() -> Iterator[Any]:
    """CuPy's stand-in on a GPU of which nothing is in use."""
    with installed() as module:
        yield module


def negated(dtype: Any = F32) -> Function:
    """y = -x."""
    x, y = Value("x", TensorType(np.dtype(dtype), (64,))), Value("y", TensorType(np.dtype(dtype), (64,)))
    return Function.from_graph(graph_of([x], [y], [node("Neg", [x], [y])]))


class Runs(Executable):
    """`call`, which notes what it was given."""

    def __init__(self, call: Callable[[Any], Any]) -> None:
        self.call = call
        self.given: list[type] = []

    def run(self, inputs: Sequence[Any], *args: Any, **options: Any) -> Sequence[Any]:
        self.given.append(type(inputs[0]))
        return [self.call(inputs[0])]


def judged(function: Function, executable: Executable, **settings: Any) -> Outcome:
    """The outcome of the one candidate beside CuPy."""
    candidate = Candidate("gpu", lambda f, fused: executable)
    return evaluate(function, [candidate], EvaluationSettings(**settings), place=HostPlace.beside("cuda:0"))


def test_candidates_are_given_arrays_on_the_device(cupy: Any) -> None:
    """In checks and in timed runs, the latter without an upload; what lies elsewhere would measure the bus."""
    executable = Runs(lambda x: -x)
    outcome = judged(negated(), executable)
    assert outcome.verdict in ("ready", "slower"), outcome.reason
    assert set(executable.given) == {ndarray}
    sets = 2 + 10  # of inputs; the host and the candidate get each some times, and the timed runs share one
    assert GPU.up < 64 * 4 * 6 * sets < 64 * 4 * len(executable.given) * 6


@pytest.mark.parametrize("slow", ["host", "engine"])
def test_times_are_of_finished_work(cupy: Any, monkeypatch: pytest.MonkeyPatch, slow: str) -> None:
    """Work that waits in its stream counts: else what only enqueues would be the quickest."""

    own = cupy.negative

    def late(x: Any) -> Any:
        GPU.put(GPU.current, lambda: time.sleep(SLOW))
        return own(x)

    if slow == "host":
        monkeypatch.setattr(cupy, "negative", late)
    outcome = judged(negated(), Runs(late if slow == "engine" else lambda x: x * -1), edges=False)
    times = outcome.timings["host"], outcome.timings["gpu"]
    assert (times[0] >= SLOW) == (slow == "host")
    assert (times[1] >= SLOW) == (slow == "engine")
    assert outcome.verdict == ("ready" if slow == "host" else "slower")


@pytest.mark.parametrize("dtype", [np.float32, np.int64], ids=str)
def test_numpy_judges_where_the_device_is_in_doubt(cupy: Any, monkeypatch: pytest.MonkeyPatch, dtype: Any) -> None:
    """An engine that differs from a wrong CuPy is right all the same, and one that is wrong is found."""
    own = cupy.negative
    monkeypatch.setattr(cupy, "negative", lambda x, **k: own(x) + 1)
    assert judged(negated(dtype), Runs(lambda x: x * -1), tune=False, edges=False).verdict == "ready"
    assert judged(negated(dtype), Runs(lambda x: x * -1 - 1), tune=False, edges=False).verdict == "wrong"


def test_a_device_without_room_leaves_the_verdict_to_numpy(cupy: Any) -> None:
    """The reference does not fit beside the engine's arrays: the engine is judged all the same."""
    GPU.memory = GPU.used + 100
    executable = Runs(lambda x: -x)
    assert judged(negated(), executable, tune=False).verdict == "ready"
    assert set(executable.given) == {np.ndarray}


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda x: x, "shares the memory of an input"),
        (lambda x: x.__imul__(-1), "it wrote into its input"),
    ],
    ids=["shares", "writes"],
)
def test_misuse_of_arrays_on_the_device(cupy: Any, call: Callable[[Any], Any], reason: str) -> None:
    """As for NumPy's arrays: results own their memory, and inputs are left alone."""
    x, y = Value("x", TensorType(F32, (64,))), Value("y", TensorType(F32, (64,)))
    function = Function.from_graph(graph_of([x], [y], [node("Identity", [x], [y])]))
    outcome = judged(function, Runs(call), tune=False)
    assert reason in outcome.reason


def test_results_in_memory_that_is_used_again(cupy: Any) -> None:
    """One buffer for the results of all runs is found, though it is on the device."""
    kept: list[Any] = []

    def call(x: Any) -> Any:
        kept[:] = kept or [-x]
        kept[0][...] = -x
        return kept[0]

    assert "shares the memory of an earlier run's results" in judged(negated(), Runs(call), tune=False).reason

"""Autotuning of candidates and the host, on an injected clock."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from xrt_core.verify import autotune
from xrt_core.verify.autotune import (
    HOST_RUNS,
    MAX_ROUNDS,
    MIN_ROUNDS,
    MIN_SECONDS,
    Neighbours,
    Tuning,
    interval,
    settle,
)
from xrt_core.verify.autotune import tune as tune_for_real


class Track:
    """A clock that runs only while a candidate does."""

    def __init__(self, seconds: Mapping[str, float | Iterator[float]]) -> None:
        self.now = 0.0
        self.runs = dict.fromkeys(seconds, 0)
        self.busy = dict.fromkeys(seconds, 0.0)
        self._seconds = {n: itertools.repeat(s) if isinstance(s, float) else s for n, s in seconds.items()}

    def clock(self) -> float:
        return self.now

    @property
    def candidates(self) -> dict[str, Callable[[], object]]:
        return {name: lambda name=name: self._run(name) for name in self.runs}  # type: ignore[misc]

    def _run(self, name: str) -> None:
        took = next(self._seconds[name])
        self.now += took
        self.runs[name] += 1
        self.busy[name] += took


def tune(*args: Any, **options: Any) -> Tuning:
    """Without rests: nothing here has threads."""
    return tune_for_real(*args, rest=lambda: None, **options)


@pytest.mark.parametrize(
    ("seconds", "winner"),
    [
        ({"a": 1.0, "b": 0.5, "host": 4.0}, "b"),
        ({"a": 1.0, "b": 0.995, "host": 4.0}, "a"),  # not clearly faster: the preferred one stays
        ({"a": 1.0, "host": 0.95}, "a"),  # the host wins by a tenth or not at all
        ({"a": 1.0, "host": 0.89}, "host"),
        ({"a": 3.0, "b": 2.0, "host": 1.0}, "host"),
        ({"host": 1.0}, "host"),
    ],
)
def test_the_winner(seconds: dict[str, float], winner: str) -> None:
    """The fastest wins; a later one by 1 %, the host by 10 %."""
    track = Track(seconds)
    found = tune(track.candidates, "host", clock=track.clock)
    assert found.winner == winner
    assert found.seconds == pytest.approx(seconds)


def test_outliers_and_drift_decide_nothing() -> None:
    """A machine that slows down while it is measured, and a run that was interrupted, leave the verdict as it was."""

    def noisy(base: float) -> Iterator[float]:
        for k in itertools.count():
            yield base * (1 + k / 5) * (30.0 if k == 4 else 1.0)

    track = Track({"a": noisy(0.010), "b": noisy(0.008), "host": noisy(0.011)})
    assert tune(track.candidates, "host", clock=track.clock).winner == "b"


def test_a_busy_machine_decides_nothing() -> None:
    """Where more than half of the runs take longer, by anything up to five times, the better runs decide."""
    rng = random.Random(0)

    def busy(base: float) -> Iterator[float]:
        while True:
            yield base * (1.0 + rng.random() * 0.02 if rng.random() < 0.4 else 1.0 + 4.0 * rng.random())

    for _ in range(20):
        track = Track({"a": busy(0.0125), "b": busy(0.010), "host": busy(0.100)})
        assert tune(track.candidates, "host", clock=track.clock).winner == "b"


def test_a_slow_candidate_is_pruned() -> None:
    """Who takes twice as long as another drops out: after one round where runs are long, else after some."""
    track = Track({"a": 0.2, "b": 0.21, "slow": 1.0, "host": 9.0})
    found = tune(track.candidates, "host", clock=track.clock)
    assert found.winner == "a"
    assert track.runs["slow"] == track.runs["host"] == 2
    assert set(found.seconds) == {"a", "b", "slow", "host"}

    short = Track({"a": 0.03, "b": 0.031, "slow": 0.07, "host": 0.08})
    assert tune(short.candidates, "host", clock=short.clock).winner == "a"
    assert short.runs["slow"] == short.runs["host"] == MIN_ROUNDS + 1


def test_what_was_said_to_be_known_and_is_not_has_the_time_of_its_first_run() -> None:
    """Candidates that were not checked have no fastest run so far: infinity, which no outcome may hold."""
    track = Track({"a": 0.1, "slow": 2.0})
    found = tune(track.candidates, clock=track.clock, known={"a": math.inf, "slow": math.inf})
    assert found.winner == "a"
    assert found.seconds == pytest.approx({"a": 0.1, "slow": 2.0})


def test_what_is_known_is_not_run_again() -> None:
    """Who has run before is not warmed up; who took long and several times as long as another has no turn, however it
    would have done now; what is short, or not so much longer, races."""
    track = Track({"a": 0.3, "b": 0.31, "host": 0.2})
    found = tune(track.candidates, "host", clock=track.clock, known={"a": 0.32, "host": 2.0})
    assert found.winner == "a"
    assert track.runs["host"] == 0
    assert track.runs["b"] == track.runs["a"] + 1
    assert found.seconds["host"] == 2.0

    for known, took in ((1.1, 0.2), (0.15, 0.02)):
        active = Track({"a": took * 1.5, "host": took})
        assert tune(active.candidates, "host", clock=active.clock, known={"a": 0.3, "host": known}).winner == "host"

    alone = Track({"a": 0.3})
    assert tune(alone.candidates, clock=alone.clock, known={"a": 0.3}).rounds == 1


def test_a_stopwatch_counts_runs() -> None:
    """All runs count, those that fail too; only what came to an end is a quick one."""
    clock = Track({"x": 0.0})
    watch = autotune.Stopwatch(clock.clock)

    def run(seconds: float, fails: bool = False) -> list[Any]:
        clock.now += seconds
        if fails:
            raise RuntimeError
        return []

    assert watch.quickest == float("inf")
    watch.run(lambda: run(2.0))
    watch.run(lambda: run(1.0))
    with pytest.raises(RuntimeError):
        watch.run(lambda: run(0.5, fails=True))
    assert (watch.seconds, watch.quickest) == (3.5, 1.0)


def test_one_interrupted_run_prunes_nothing() -> None:
    """A short run that was interrupted in the first round is no verdict."""
    track = Track({"a": 0.03, "b": itertools.chain([0.5, 0.09], itertools.repeat(0.02)), "host": 0.2})
    assert tune(track.candidates, "host", clock=track.clock).winner == "b"


def test_a_close_race_ends() -> None:
    """Equals run until their ratios show it; those that noise hides run all rounds, each time twice; long ones are
    stopped by the time limit."""
    track = Track({"a": 1e-4, "b": 1e-4, "host": 1e-4})
    assert tune(track.candidates, "host", clock=track.clock).winner == "a"
    assert track.runs["a"] == 2 * 8 + 1  # eight rounds make an interval

    noise = {n: itertools.cycle([1e-4, 1e-4, 1.4e-4, 1.4e-4, *[1.2e-4] * more]) for n, more in (("a", 1), ("b", 3))}
    hidden = Track(noise)
    tune(hidden.candidates, clock=hidden.clock)
    assert hidden.runs["a"] == 2 * MAX_ROUNDS + 1
    assert hidden.now <= MIN_SECONDS

    long = Track({"a": 1.0, "b": 1.0, "host": 1.0})
    tune(long.candidates, "host", clock=long.clock)
    # two rounds, what the limit allows, and the round that passed it
    assert sum(long.busy.values()) <= 2 * 3 + HOST_RUNS * 1.0 + 3


def test_a_clear_race_ends_early() -> None:
    """Ahead of the best of all others by more than a tenth, after some rounds, is enough."""
    track = Track({"a": 1e-4, "host": 1.5e-4})
    found = tune(track.candidates, "host", clock=track.clock)
    assert (found.winner, found.rounds) == ("a", MIN_ROUNDS)


@pytest.mark.parametrize(
    ("busy", "steps"),
    [
        ([0.0, 0.0], 2),
        ([1.0, 1.0, 0.0, 1.0, 0.0, 0.0], 6),  # one that only drew breath
        ([1.0] * 100, 25),  # whoever never rests is not waited for
    ],
)
def test_a_rest_is_until_the_threads_are_quiet(busy: list[float], steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is waited for is that the process takes no processor time while this thread sleeps."""
    now, used, looks = 0.0, 0.0, 0

    def sleep(seconds: float) -> None:
        nonlocal now, used, looks
        now += seconds
        used += busy[looks] * seconds
        looks += 1

    fake = SimpleNamespace(perf_counter=lambda: now, process_time=lambda: used, sleep=sleep)
    monkeypatch.setattr(autotune, "time", fake)
    settle()
    assert looks == pytest.approx(steps, abs=1)  # 50 ms are 25 steps, or 26 as floats add up


def test_the_deadline_ends_it() -> None:
    """No round begins after the deadline."""
    track = Track({"a": 1.0, "host": 1.0})
    assert tune(track.candidates, "host", clock=track.clock, until=3.0).rounds == 1


def test_what_a_run_raises_is_raised() -> None:
    """A candidate that fails while it is timed is a failure."""

    def broken() -> None:
        raise RuntimeError("the device has fallen off the bus")

    with pytest.raises(RuntimeError, match="bus"):
        tune({"a": broken})


def test_a_small_difference_is_found_behind_noise() -> None:
    """Rounds go on until the interval of the ratio excludes 1: 4 % are found where runs vary by 10 %."""
    rng = random.Random(1)

    def noisy(base: float) -> Iterator[float]:
        while True:
            yield base * (1 + 0.1 * rng.random())

    found = [
        tune(track.candidates, clock=track.clock)
        for track in (Track({"a": noisy(1.04e-3), "b": noisy(1e-3)}) for _ in range(20))
    ]
    assert sum(t.winner == "b" for t in found) >= 19
    assert max(t.rounds for t in found) > MIN_ROUNDS


def test_the_interval_of_a_median() -> None:
    """It is that of the binomial distribution's tables, and says nothing of fewer than eight values."""
    assert interval([1.0] * 7) == (0.0, float("inf"))
    assert interval([float(k) for k in range(8)]) == (0.0, 7.0)
    assert interval([float(k) for k in range(20)]) == (4.0, 15.0)


def test_a_race_says_whether_the_machine_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What others use of the processors during the race counts; not what they used before, nor this process itself."""
    # seconds of the clock, of all work, of this process; and the processors
    looks = iter([(0.0, 0.0, 0.0, 2.0), (1.0, 2.0, 0.0, 2.0), (2.0, 3.5, 1.0, 2.0), (2.01, 3.5, 1.0, 2.0)])
    monkeypatch.setattr(autotune, "_times", lambda: next(looks))
    track = Track({"a": 1.0})
    neighbours = Neighbours()
    assert tune(track.candidates, clock=track.clock, neighbours=neighbours).busy  # 0.5 of 2 processors
    assert not neighbours.are_busy()  # 10 ms are too short to tell
    looks = iter([(0.0, 0.0, 0.0, 64.0), (1.0, 64.0, 60.0, 64.0)])
    assert not Neighbours().are_busy()  # 4 of 64
    looks = iter([None, None])  # type: ignore[list-item]
    assert not Neighbours().are_busy()

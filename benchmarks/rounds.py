"""What several functions take, measured in turns, so that a load that comes and goes meets all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a call, by round: of the wall clock, and of the process's processor time."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The median of the wall clock."""
        return statistics.median(self.wall)


def interleaved(
    functions: Sequence[Callable[[], Any]],
    *,
    rounds: int = 5,
    seconds: float = 0.0,
    calls: int = 1,
    batch: float = 0.0,
    warm: float = 0.0,
    rest: float = 0.0,
    settle: Callable[[], Any] | None = None,
) -> list[Times]:
    """The times of each function, one a round.

    rounds: at least so many; more until `seconds` have passed. calls: in a turn; the time is divided by it.
    batch: instead, as many calls as take so many seconds, by the second call of each.
    warm: so many times the calls of a turn are made before its clock starts, one at least if it is not zero.
    rest: seconds to sleep before each turn, in which threads that spin for the one before come to rest.
    settle: waits for what a call left running, before and after the clock.
    """
    counts = [_count(f, batch, settle) if batch else calls for f in functions]
    times = [Times() for _ in functions]
    end = time.perf_counter() + seconds
    done = 0
    while done < rounds or time.perf_counter() < end:
        for f, count, found in zip(functions, counts, times, strict=True):
            time.sleep(rest)
            for _ in range(max(1, int(count * warm)) if warm else 0):
                f()
            _turn(f, count, settle, found)
        done += 1
    return times


def least(calls: Mapping[str, Callable[[], Any]], seconds: float, threads: int) -> dict[str, float]:
    """The least seconds of a call of each, in many short turns: what other processes take away lengthens most of them.

    Of calls that compute with one thread it is the processor's time, which they disturb even less; of others it would
    count threads that spin as well, so it is that of the wall clock.
    """
    times = interleaved(list(calls.values()), rounds=9, seconds=seconds, batch=2e-3, warm=0.5, rest=0.02)
    return {name: min(t.cpu if threads == 1 else t.wall) for name, t in zip(calls, times, strict=True)}


def median(function: Callable[[], Any], *, rounds: int = 5, calls: int = 1) -> float:
    """Median seconds of a call of one function."""
    return interleaved([function], rounds=rounds, calls=calls)[0].median


def _turn(f: Callable[[], Any], count: int, settle: Callable[[], Any] | None, found: Times) -> None:
    if settle is not None:
        settle()
    used, start = time.process_time(), time.perf_counter()
    for _ in range(count):
        f()
    if settle is not None:
        settle()
    wall = time.perf_counter() - start
    found.wall.append(wall / count)
    found.cpu.append((time.process_time() - used) / count)


def _count(f: Callable[[], Any], batch: float, settle: Callable[[], Any] | None) -> int:
    f()
    once = Times()
    _turn(f, 1, settle, once)
    return max(1, int(batch / max(once.wall[0], 1e-7)))

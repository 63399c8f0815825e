"""Which of several ways to compute the same is the fastest: timed in turns, compared by their better runs."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from xrt_core.engine.contract import DEFAULT_RUN_OPTIONS, Executable, RunOptions

MARGIN: Final = 1.01
"""A later contestant takes the place of an earlier one when it is this many times as fast."""

HOST_MARGIN: Final = 1.10
"""The host takes the place of an engine when it is this many times as fast: engines leave it free for other work, and
what was compiled for good reasons is not given up over noise."""

HOST_RUNS: Final = 10.0
"""A tuning takes at most the time of so many runs of the slowest of host and first contestant, beside the first round
and `LEAST_SECONDS`."""

LEAST_SECONDS: Final = 0.3
"""Seconds of running that a tuning may take however fast the contestants are."""

PRUNE_RATIO: Final = 2.0
"""A contestant whose best run takes so many times as long as another's middle one drops out: at once where its runs are
long, after `ENOUGH` rounds where they are short, for one of those may just have been interrupted."""

KNOWN_HOPELESS: Final = 4.0
"""The same for one whose time is known from other runs, the first among them."""

NOTHING_KNOWN: Final[Mapping[str, float]] = MappingProxyType({})

ROUNDS: Final = 25
ENOUGH: Final = 5  # rounds after which a clear lead ends it
LONG: Final = 0.2  # seconds of a run that an interruption makes no more than twice as long
_EXCUSED: Final = 8.0  # so many times the bar may a short run take and still be called interrupted
_WARM: Final = 0.02  # seconds of a run before which the caches and threads need no other run
_REST, _STEP = 0.05, 2e-3  # seconds: the longest rest, and between two looks at the threads
_QUIET: Final = 0.2  # share of one processor that a process at rest may use


def settle() -> None:
    """Wait until the threads of this process have nothing to do, 50 ms at the longest.

    Threads of some engines go on spinning for some ten milliseconds after a run, and would take the
    processor from whoever is timed next. The one that is chosen will not have that neighbour.
    """
    end, quiet = time.perf_counter() + _REST, 0
    while quiet < 2 and time.perf_counter() < end:
        used, start = time.process_time(), time.perf_counter()
        time.sleep(_STEP)
        is_quiet = time.process_time() - used < _QUIET * (time.perf_counter() - start)
        quiet = quiet + 1 if is_quiet else 0


@dataclass(frozen=True, slots=True)
class Tuning:
    """winner: a contestant's name. seconds: what a run of each takes. rounds: how often the winner was timed."""

    winner: str
    seconds: Mapping[str, float]
    rounds: int


class Stopwatch:
    """Times the runs of executables by `clock`. seconds: of all of them; quickest: of the quickest one."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds = 0.0
        self.quickest = math.inf
        self._clock = clock

    def on(self, executable: Executable) -> Executable:
        """The executable, whose runs count."""
        return _Timed(executable, self)

    def run(self, call: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        """Time one run. Raises what it raises; then it does not count as a quick one."""
        start = self._clock()
        try:
            results = call()
            self.quickest = min(self.quickest, self._clock() - start)
            return results
        finally:
            self.seconds += self._clock() - start


class _Timed(Executable):
    def __init__(self, inner: Executable, watch: Stopwatch) -> None:
        self._inner, self._watch = inner, watch

    def run(
        self, inputs: Sequence[Any], run_options: RunOptions = DEFAULT_RUN_OPTIONS, block_until_done: bool = True
    ) -> Sequence[Any]:
        return self._watch.run(lambda: self._inner.run(inputs, run_options, block_until_done))


def tune(
    candidates: Mapping[str, Callable[[], object]],
    host: str | None = None,
    *,
    clock: Callable[[], float] = time.perf_counter,
    until: float = float("inf"),
    rest: Callable[[], None] = settle,
    known: Mapping[str, float] = NOTHING_KNOWN,
) -> Tuning:
    """Time the contestants and say who stays.

    contestants: name -> one run that has finished when it returns, in the order in which they are preferred.
    host: the name of the one that only wins clearly (`HOST_MARGIN`). until: a moment of `clock` after which no other
    round begins. rest: what is waited for before a contestant's turn. known: seconds that the quickest run took of
    those who have run before: they need no warming up, and one whose run was long, and `KNOWN_HOPELESS` times as long
    as another's, has no turn at all.

    The others run once for warming up; then rounds in changing order, in which everybody has a turn, until the time is
    up, `ROUNDS` are over, or one is clearly ahead. A turn is a rest, a run that is not timed where runs are short (as
    a caller in a loop has it), and one that is. Raises what a run raises.
    """
    names = list(candidates)
    last: dict[str, float] = {}

    def run(name: str) -> float:
        start = clock()
        candidates[name]()
        last[name] = clock() - start
        return last[name]

    for name in names:
        last[name] = known.get(name, math.inf)
        if last[name] == math.inf:
            run(name)
    best = min(last.values())
    times: dict[str, list[float]] = {}
    for name in names:
        is_hopeless = name in known and last[name] > max(LONG, KNOWN_HOPELESS * best)
        times[name] = [known[name]] if is_hopeless else []
    racing = [name for name in names if not times[name]]
    spent, limit = 0.0, 0.0
    for k in range(ROUNDS):
        for name in racing[k % len(racing) :] + racing[: k % len(racing)]:
            rest()
            if last[name] < _WARM:
                spent += run(name)
            times[name].append(run(name))
            spent += last[name]
        if k == 0:
            limit = max(LEAST_SECONDS, HOST_RUNS * max(times[host if host in times else names[0]]))
            spent = 0.0
        bar = PRUNE_RATIO * min(statistics.median(times[name]) for name in racing)
        racing = [
            name
            for name in racing
            if min(times[name]) <= bar or (k + 1 < ENOUGH and min(times[name]) < min(LONG, _EXCUSED * bar))
        ]
        if len(racing) == 1 or spent > limit or clock() > until:
            break
        if k + 1 >= ENOUGH and _is_clear(times, racing, host):
            break
    winner = _winner(times, names, host)
    return Tuning(winner, {name: typical(times[name]) for name in names}, len(times[winner]))


def typical(times: Sequence[float]) -> float:
    """What an eighth of the runs stay under: other processes make runs longer and never shorter, so the better ones
    tell more, and of many the best one may be an accident. On a machine that does nothing else they are all alike."""
    return sorted(times)[len(times) // 8]


def _ratio(times: Mapping[str, Sequence[float]], one: str, other: str) -> float:
    """How many times as long as `other` one takes, over the rounds that both ran in."""
    rounds = min(len(times[one]), len(times[other]))
    a, b = typical(times[one][:rounds]), typical(times[other][:rounds])
    return a / b if b > 0 else (float("inf") if a > 0 else 1.0)


def _winner(times: Mapping[str, Sequence[float]], names: Sequence[str], host: str | None) -> str:
    engines = [name for name in names if name != host]
    if not engines or host is None:
        engines = list(names)
    winner = engines[0]
    for name in engines[1:]:
        if _ratio(times, winner, name) >= MARGIN:
            winner = name
    if host is not None and host in times and winner != host and _ratio(times, winner, host) >= HOST_MARGIN:
        return host
    return winner


def _is_clear(times: Mapping[str, Sequence[float]], racing: Sequence[str], host: str | None) -> bool:
    """Whether the middle run of the winner so far is ahead of everybody's best one by the host's margin."""
    first = _winner(times, racing, host if host in racing else None)
    middle = statistics.median(times[first])
    return all(middle * HOST_MARGIN <= min(times[name]) for name in racing if name != first)

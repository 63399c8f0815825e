"""Autotuning: times candidates for the same computation in interleaved rounds and picks the fastest.

A race on a machine that other processes keep busy says so (`Neighbours`): its choice is provisional.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from xrt_core.engine.contract import DEFAULT_RUN_OPTIONS, Executable, RunOptions

MARGIN: Final = 1.01
"""A later candidate replaces an earlier one if it is this many times as fast."""

HOST_MARGIN: Final = 1.10
"""The host replaces an engine if it is this many times as fast: engines leave the host's cores free for other work, and
noise should not undo a compilation."""

HOST_RUNS: Final = 10.0
"""Time budget of a tuning, in runs of the slower of the host and the first candidate. The first round, and
`MIN_SECONDS`, are always available."""

MIN_SECONDS: Final = 0.6
"""Seconds of running that an undecided tuning may take however fast the candidates are."""

PRUNE_RATIO: Final = 2.0
"""A candidate is pruned when its minimum exceeds this times the best median; after `MIN_ROUNDS` if its runs are short,
whose samples are noisy."""

KNOWN_PRUNE_RATIO: Final = 4.0
"""The same for a candidate whose time is known from single runs, the first run among them."""

NOTHING_KNOWN: Final[Mapping[str, float]] = MappingProxyType({})

MAX_ROUNDS: Final = 40
MIN_ROUNDS: Final = 5  # rounds after which a clear lead ends the tuning
MATTERS: Final = 1.02
"""Candidates whose times differ by less than this are equals."""
BUSY: Final = 0.25  # processors that other processes take, at least, on a busy machine
_BUSY_SHARE: Final = 0.1  # of many processors
_SHORTEST_LOOK: Final = 0.05  # seconds; the times of processors come in steps of 10 ms
LONG_RUN: Final = 0.2  # seconds of a run that an interruption at most doubles
_EXCUSED_RATIO: Final = 8.0  # a short run up to this times the bar counts as interrupted, not as slow
_WARM: Final = 0.02  # seconds of a run from which on caches and threads need no warm-up run
_LONGEST_SETTLE, _STEP = 0.05, 2e-3  # seconds: the longest wait for idle threads, and between two measurements
_QUIET: Final = 0.2  # share of one processor that an idle process may use


def settle() -> None:
    """Wait until the threads of this process are idle, at most 50 ms.

    Threads of some engines spin for tens of milliseconds after a run, and would take the processor from the candidate
    that is timed next.
    """
    end, quiet = time.perf_counter() + _LONGEST_SETTLE, 0
    while quiet < 2 and time.perf_counter() < end:
        used, start = time.process_time(), time.perf_counter()
        time.sleep(_STEP)
        is_quiet = time.process_time() - used < _QUIET * (time.perf_counter() - start)
        quiet = quiet + 1 if is_quiet else 0


class Neighbours:
    """What other processes take of the processors that this one may use, since the last time that was asked.

    It is the time that these processors were busy, less this process's own, beside the wall clock. Unknown, and taken
    for nothing, on systems without /proc/stat.
    """

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last = _times()

    def seconds(self) -> float:
        """Seconds since the last time."""
        return math.inf if self._last is None else time.perf_counter() - self._last[0]

    def processors(self) -> float:
        """How many processors the others kept busy; 0.0 where it is not known, or the time was too short to tell."""
        before, self._last = self._last, _times()
        if before is None or self._last is None:
            return 0.0
        now, used, own, _ = (b - a for a, b in zip(before, self._last, strict=True))
        return max(used - own, 0.0) / now if now >= _SHORTEST_LOOK else 0.0

    def are_busy(self) -> bool:
        """Whether they took so much that times measured meanwhile may mislead."""
        taken = self.processors()
        return self._last is not None and taken > max(BUSY, _BUSY_SHARE * self._last[3])


def _times() -> tuple[float, float, float, float] | None:
    """Seconds: of the clock, of work on the processors of this process, and of its own; the number of processors."""
    try:
        mine = {f"cpu{i}" for i in os.sched_getaffinity(0)}
        with open("/proc/stat", encoding="ascii") as file:
            rows = [row for line in file if (row := line.split())[0] in mine]
        ticks = os.sysconf("SC_CLK_TCK")
    except (AttributeError, OSError, ValueError):
        return None
    # user, nice, system, idle, iowait, irq, softirq, steal
    used = sum(int(row[i]) for row in rows for i in (1, 2, 3, 6, 7, 8)) / ticks
    return time.perf_counter(), used, time.process_time(), float(len(rows))


@dataclass(frozen=True, slots=True)
class Tuning:
    """Result of a tuning. winner: the name of a candidate. seconds: of a run of each. rounds: timed runs of the
    winner. busy: whether other processes kept the machine busy."""

    winner: str
    seconds: Mapping[str, float]
    rounds: int
    busy: bool = False


class Stopwatch:
    """Times the runs of executables by `clock`. seconds: of all runs. quickest: of the fastest one."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds = 0.0
        self.quickest = math.inf
        self._clock = clock

    def on(self, executable: Executable) -> Executable:
        """The executable, with its runs timed."""
        return _Timed(executable, self)

    def run(self, call: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        """Time one run. Raises what it raises; then it does not count for `quickest`."""
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
        self.tolerance = inner.tolerance

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
    neighbours: Neighbours | None = None,
) -> Tuning:
    """Time the candidates and pick one.

    candidates: name -> a function that runs it once and returns when it has finished, in order of preference. host: the
    name of the one that must win by `HOST_MARGIN`. until: `clock` time after which no round begins. rest: called before
    each turn. known: seconds of the fastest of earlier runs: these candidates need no warm-up run, and one whose runs
    are long and `KNOWN_PRUNE_RATIO` times as long as another's is not timed. neighbours: tell whether the machine is
    busy.

    Rounds follow one another in rotating order until one candidate clearly leads, the intervals of confidence of the
    ratios of its times to all others' exclude the margin or are too narrow to matter, the time is up, or `MAX_ROUNDS`
    are over. A turn is a rest, an untimed run where runs are short, and a timed run. Raises what a run raises.
    """
    neighbours = neighbours or Neighbours()
    neighbours.are_busy()
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
        is_pruned = name in known and last[name] > max(LONG_RUN, KNOWN_PRUNE_RATIO * best)
        times[name] = [last[name]] if is_pruned else []
    active = [name for name in names if not times[name]]
    spent, limit = 0.0, 0.0
    for k in range(MAX_ROUNDS):
        for name in active[k % len(active) :] + active[: k % len(active)]:
            rest()
            if last[name] < _WARM:
                spent += run(name)
            times[name].append(run(name))
            spent += last[name]
        if k == 0:
            limit = max(MIN_SECONDS, HOST_RUNS * max(times[host if host in times else names[0]]))
            spent = 0.0
        bar = PRUNE_RATIO * min(statistics.median(times[name]) for name in active)
        excused = min(LONG_RUN, _EXCUSED_RATIO * bar) if k + 1 < MIN_ROUNDS else bar
        active = [name for name in active if min(times[name]) <= max(bar, excused)]
        if len(active) == 1 or spent > limit or clock() > until:
            break
        if k + 1 >= MIN_ROUNDS and (_is_clear(times, active, host) or _is_decided(times, active, host)):
            break
    winner = _winner(times, names, host)
    seconds = {name: typical(times[name]) for name in names}
    return Tuning(winner, seconds, len(times[winner]), neighbours.are_busy())


def typical(times: Sequence[float]) -> float:
    """The lower octile: other processes make runs longer and never shorter, so the fast runs are representative, while
    the minimum of many may be an outlier."""
    return sorted(times)[len(times) // 8]


def _ratio(times: Mapping[str, Sequence[float]], one: str, other: str) -> float:
    """The time of `one` divided by that of `other`, over the rounds in which both ran."""
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


def _is_clear(times: Mapping[str, Sequence[float]], active: Sequence[str], host: str | None) -> bool:
    """Whether the median of the leader is below the minimum of every other candidate by the host's margin."""
    first = _winner(times, active, host if host in active else None)
    middle = statistics.median(times[first])
    return all(middle * HOST_MARGIN <= min(times[name]) for name in active if name != first)


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """The 99 % interval of confidence of the median of these, (0, inf) for less than eight.

    By order statistics, which assume nothing of the noise: the k-th smallest and largest with k from the binomial
    distribution's normal approximation (Conover, Practical Nonparametric Statistics, 3.2). 99 %, as it is looked at
    after every round.
    """
    k = math.floor((len(ratios) - 2.576 * math.sqrt(len(ratios))) / 2)
    if len(ratios) < 8:
        return 0.0, math.inf
    ordered, k = sorted(ratios), max(k, 0)
    return ordered[k], ordered[-1 - k]


def _is_decided(times: Mapping[str, Sequence[float]], active: Sequence[str], host: str | None) -> bool:
    """Whether the ratio of every other candidate's time to the leader's is on its side of the margin, or so close to it
    that it does not matter, over the rounds in which both ran."""
    first = _winner(times, active, host if host in active else None)
    for name in active:
        if name == first:
            continue
        pairs = zip(times[name], times[first], strict=False)
        low, high = interval([a / b if b > 0 else 1.0 for a, b in pairs])
        margin = HOST_MARGIN if first == host else 1 / HOST_MARGIN if name == host else 1.0
        if low <= margin and not (margin / MATTERS <= low and high <= margin * MATTERS):
            return False
    return True

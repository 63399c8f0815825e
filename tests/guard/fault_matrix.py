"""The fault matrix: doors x kinds of fault x modes, each cell being what the caller got, and how the cluster ended.

    python -m tests.guard.fault_matrix [--only TEXT] [--workers 1]   # run it, and write fault_matrix.json and the page

A cell runs in a process of its own, as it may end or hang that. `fault_matrix.json` is what the tests compare with;
docs/guard-internals.md shows it in a compact form.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import math
import multiprocessing
import os
import pathlib
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple
from unittest import mock

import numpy as np

from xrt_core.testing.stage_faults import DOORS, ISOLATED, LATE_DOORS, LATE_PROCESS, STAGE_FAULTS, _kinds

FILE: Final = pathlib.Path(__file__).with_suffix(".json")
PAGE: Final = pathlib.Path(__file__).parents[2] / "docs" / "guard-internals.md"
BEGIN: Final = "<!-- fault matrix: python -m tests.guard.fault_matrix -->"
END: Final = "<!-- end of the fault matrix -->"

MODES: Final[Mapping[str, Mapping[str, Any]]] = {
    "unguarded": {"guard": False},
    "sync": {"guard": True, "guard_async": False},
    "background": {"guard": True},
    "isolated": {"guard": "isolated", "guard_async": False},
}
UNNAMED: Final = ("import", "construct", "attribute", "probe", "fingerprint")
"""Doors of engines that no module names: named, an engine that fails there is refused with an error, as it should."""
THREADED: Final = ("run", "first_run", "late_run")
"""Doors that are tried with four threads as well."""
RIGHT: Final = "host's numbers"
ENDED: Final = "process ends"
HANGS: Final = "hangs"
UNTIL: Final = "wrong numbers until a comparison"
"""Some calls with wrong numbers, until a sampled comparison took the cluster to the host, which the event names."""
_BY_CHANCE: Final[Mapping[str, tuple[str, ...]]] = {
    "run": ("leaks_memory", "leaks_files", "leaks_threads", "hundredth"),
    "first_run": ("hundredth",),
    "late_run": ("hundredth",),
}
"""What is found or not, by how many runs there are in the time."""
EITHER: Final = "host's numbers, or wrong ones until a comparison"
"""What is wrong only while two runs overlap, which they may or may not do."""
CALLS: Final = 60
MOST_CALLS: Final = 5000
"""Further calls, by as many threads, in which a comparison has to come where some of the first were wrong."""
_CELLS_OF_A_PROCESS: Final = 60
_MEMORY: Final = 1 << 30  # bytes that a process of cells may allocate


class Cell(NamedTuple):
    """One cell: an engine of `STAGE_FAULTS`, or one that fails when it is imported; a mode; how many threads call."""

    fault: str
    mode: str
    threads: int

    @property
    def door(self) -> str:
        """Where the engine fails."""
        return next(d for d in ("import", *DOORS) if self.fault.startswith(f"{d}_"))

    @property
    def kind(self) -> str:
        """What it does there."""
        return self.fault.removeprefix(f"{self.door}_")

    @property
    def column(self) -> str:
        """Its key in the file."""
        return f"{self.mode}/{self.threads}"


def faults() -> list[str]:
    """Every fault."""
    return [*(f"import_{k}" for k in _kinds("construct")), *STAGE_FAULTS]


def cells() -> list[Cell]:
    """Every cell."""
    found = []
    for fault in faults():
        for mode in MODES:
            one = Cell(fault, mode, 1)
            found += [one, one._replace(threads=4)] if one.door in THREADED else [one]
    return found


# --- one cell, in this process ----------------------------------------------------------------------------------------


def two_outputs() -> tuple[Any, np.ndarray, list[np.ndarray]]:
    """A graph whose second result equals its input, an input, and the host's results."""
    from xrt_core.module import XRTModule
    from xrt_core.testing import functions

    rng = np.random.default_rng(5)
    x = functions.value("x", 4, 8)
    w = functions.Value.constant(rng.standard_normal((8, 8), np.float32), "w")
    product, y, z = (functions.value(n, 4, 8) for n in ("product", "y", "z"))
    nodes = [
        functions.node("MatMul", [x, w], [product]), functions.node("Mul", [product, x], [y]),
        functions.node("Relu", [x], [z]),
    ]  # fmt: skip
    graph = functions.function("two", [x], nodes, [y, z]).body
    given = rng.uniform(0.5, 1.5, (4, 8)).astype(np.float32)
    with XRTModule(graph, engine="host") as host:
        return graph, given, [np.array(r) for r in host(given)]


def examine(cell: Cell, **more: Any) -> dict[str, Any]:
    """What the caller gets: `got`, the `state` of the cluster, and the `events` (stage, kind) of the guard.

    Late faults are hit in the processes that `LATE_PROCESS` names. more: options of the module.
    """
    from tests.guard.guarded import captured_events, eventually, fallbacks, registered
    from xrt_core.guard import launch

    graph, x, want = two_outputs()
    hangs = cell.kind == "hangs"
    options: dict[str, Any] = {**MODES[cell.mode]}
    if cell.mode != "unguarded":
        limit = 4.0 if hangs and cell.door not in LATE_DOORS else 40.0
        options |= {
            "guard_tune": False, "guard_timeout": limit, "guard_memory": 300 << 20, "guard_retry": 3600.0,
            "guard_run_timeout": 0.5 if hangs else 30.0, "guard_shadow": 1 if cell.kind == "hundredth" else None,
        }  # fmt: skip
    engine = None if cell.door in UNNAMED else cell.fault
    classes = [STAGE_FAULTS[cell.fault]] if cell.fault in STAGE_FAULTS else []
    slow = launch._SLOW if cell.kind == "slow" else math.inf  # a busy machine is no fault of the engine
    with registered(*classes), captured_events() as events, mock.patch.object(launch, "_SLOW", slow):
        got, state = _call(graph, engine, x, want, cell.threads, {**options, **more})
        if state in ("failed", "rejected"):
            eventually(lambda: fallbacks(events), 5)  # a comparison in the background tells after it has acted
    return _settled(cell, {"got": got, "state": state, "events": sorted(map(list, set(fallbacks(events))))})


def _settled(cell: Cell, found: dict[str, Any]) -> dict[str, Any]:
    """What does not depend on how fast the machine is."""
    by_chance = cell.mode != "unguarded" and found["state"] in ("live", "rejected")
    if by_chance and cell.kind == "threads" and cell.threads > 1 and cell.door != "run":
        return {"got": EITHER, "state": "live or rejected", "events": []} if found["got"] in (RIGHT, UNTIL) else found
    if by_chance and cell.kind in _BY_CHANCE.get(cell.door, ()):
        return found | {"state": "live or rejected", "events": []} if found["got"] == RIGHT else found
    late = cell.door == "late_run" and cell.mode != "unguarded"
    if late and found["got"] == RIGHT and found["events"] == [["shadow", "wrong numbers"]]:
        found |= {"got": UNTIL}  # the comparison came before a wrong call
    return found


def _call(
    graph: Any, engine: str | None, x: np.ndarray, want: list[np.ndarray], threads: int, options: Mapping[str, Any]
) -> tuple[str, str]:
    from xrt_core.errors import XRTError
    from xrt_core.module import XRTModule

    found: collections.Counter[str] = collections.Counter()
    given = x.copy()
    try:
        m = XRTModule(graph, engine=engine, **options)
    except XRTError as e:
        return f"an {type(e).__name__}", "none"

    def call() -> None:
        kept = []
        for i in range(CALLS):
            try:
                results = m(given)
                kept.append(results)
                found[_judged(results, given, want)] += 1
            except XRTError as e:
                found[f"an {type(e).__name__}"] += 1
            except BaseException as e:
                found[f"a raw {type(e).__name__}"] += 1
            if i < 3:
                m.wait(60)
        for results in kept:
            if not all(np.array_equal(r, w) for r, w in zip(results, want, strict=True)) and found[RIGHT]:
                found["results that change later"] += found["wrong numbers"] == 0
                break

    def go_on() -> None:
        for _ in range(MOST_CALLS // threads):  # comparisons are rarer and rarer, and bounded in time
            if _state(m) != "live":
                break
            m(given)
            time.sleep(1e-3)

    for phase in (call, go_on):
        if phase is call or (options.get("guard") and found["wrong numbers"]):
            callers = [threading.Thread(target=phase) for _ in range(threads)]
            for t in callers:
                t.start()
            for t in callers:
                t.join()
    explanation = m.explain()
    clusters = m.report().clusters
    state = _state(m)
    if not clusters:
        state = "given up" if explanation.lost else "live" if explanation.engine_node_count else "none"
    m.close()
    if not np.array_equal(given, x):
        found["a changed input"] += 1
    wrong = sorted(n for n, count in found.items() if n != RIGHT and count)
    if wrong == ["wrong numbers"] and state == "rejected":
        return UNTIL, state
    return ", ".join(wrong) or RIGHT, state


def _state(m: Any) -> str:
    """The states of the module's clusters."""
    return ", ".join(sorted({c["state"] for c in m.report().clusters}))


def _judged(results: Sequence[Any], x: np.ndarray, want: list[np.ndarray]) -> str:
    if not all(
        type(r) is np.ndarray and r.flags.carray and r.dtype == w.dtype for r, w in zip(results, want, strict=True)
    ):
        return "odd arrays"
    if not all(np.array_equal(r, w) for r, w in zip(results, want, strict=True)):
        return "wrong numbers"
    if any(np.shares_memory(r, x) for r in results) or np.shares_memory(*results):
        return "shared memory"
    return RIGHT


# --- a process of cells -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def faulty_package(cell: Cell, folder: pathlib.Path) -> Iterator[None]:
    """For the door "import": an installed package whose import does it."""
    if cell.door != "import":
        yield
        return
    from tests.engine.packages import add_package, engine_source
    from xrt_core.engine import engines

    kind = cell.kind
    source = f"from xrt_core.testing.stage_faults import DEEDS\nDEEDS[{kind!r}]()\n" + engine_source(cell.fault)
    add_package(folder, f"xrt-{kind.replace('_', '-')}", source, engine=cell.fault)
    before = os.environ.get("PYTHONPATH", "")
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = f"{folder}{os.pathsep}{before}"
    engines.refresh()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        os.environ["PYTHONPATH"] = before
        engines.refresh()


def _serve(pipe: Any, log: str) -> None:
    """Run the cells that come over a pipe."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(256 << 10)  # of threads that leak
    os.environ["XRT_PRUNE"] = "0"
    from xrt_core.engine.boundary import changed, restore, snapshot
    from xrt_core.guard.verdict_cache import forget_all
    from xrt_core.guard.worker_pool import process_pool
    from xrt_core.plugins import plugins
    from xrt_core.plugins.discovery import DISABLE_VARIABLE

    os.environ[DISABLE_VARIABLE] = ",".join(plugins.names("xrt.engines"))
    while True:
        cell, folder, again = pipe.recv()
        os.environ["XRT_CACHE_DIR"] = str(pathlib.Path(folder, "cache"))
        # after a process ended, the one that isolates the cluster may end too
        os.environ[LATE_PROCESS] = ISOLATED if cell.mode == "isolated" else str(os.getpid()) + f",{ISOLATED}" * again
        forget_all()
        if cell.door == "import" or cell.kind.startswith("starts"):
            process_pool().close()  # a worker knows the packages that were there when it started
        before = snapshot()
        packages = pathlib.Path(folder, "packages")
        packages.mkdir(exist_ok=True)
        with faulty_package(cell, packages):
            found = examine(cell)
        if cell.kind.startswith("leaks") or any("side effect" in e for e in found["events"]):
            process_pool().close()  # what an engine did to a worker is held against the next one there
        kept = [t for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]
        aspects = [a for a in changed(before, snapshot()) if a.name not in _OUR_OWN]
        found["changed"] = ", ".join([*sorted(a.name for a in aspects), *(["threads"] if kept else [])])
        restore(aspects, before)
        # an executable may end after its module, when the collector finds it
        spoils = ("starts_thread", "leaks_threads")
        pipe.send((found, bool(found["changed"]) or cell.door == "delete" or cell.kind in spoils))


_OUR_OWN: Final = (
    "the switch interval", "sys.path", "random's state", "NumPy's random state", "the environment", "warnings filters",
)  # fmt: skip
"""What a cell may change by itself: it draws inputs, and imports."""


class _Process:
    """A process that runs cells, started when it is needed and after its end."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._process: Any = None
        self._pipe: Any = None
        self._cells = 0

    def run(self, cell: Cell, folder: pathlib.Path, again: bool = False) -> dict[str, Any]:
        """What became of a cell."""
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs, str(self._folder / "log")))
            self._process.start()
            theirs.close()
            self._cells = 0
        self._cells += 1
        seconds = 8.0 if cell.mode == "unguarded" and cell.kind == "hangs" else 40.0
        try:
            self._pipe.send((cell, str(folder), again))
            if not self._pipe.poll(seconds):
                self.end()
                return {"got": HANGS}
            found, is_spoiled = self._pipe.recv()
        except (EOFError, OSError):
            self.end()
            return {"got": ENDED}
        if is_spoiled or self._cells >= _CELLS_OF_A_PROCESS:
            self.end()
        return found  # type: ignore[no-any-return]

    def end(self) -> None:
        """Kill the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
        self._process = None


def run(wanted: Sequence[Cell], workers: int, told: Callable[[Cell, dict[str, Any]], None]) -> None:
    """Run cells, each in a cache folder of its own; where the process ends, the next process is tried as well."""
    waiting = collections.deque(wanted)
    lock = threading.Lock()

    def serve() -> None:
        with tempfile.TemporaryDirectory() as scratch:
            process = _Process(pathlib.Path(scratch))
            try:
                while True:
                    with lock:
                        if not waiting:
                            return
                        cell = waiting.popleft()
                    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                        found = process.run(cell, pathlib.Path(folder))
                        if found["got"] == ENDED and cell.mode != "unguarded":
                            found["then"] = process.run(cell, pathlib.Path(folder), again=True)["got"]
                    with lock:
                        told(cell, found)
            finally:
                process.end()

    threads = [threading.Thread(target=serve) for _ in range(workers)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()


def as_text(found: Mapping[str, Any]) -> str:
    """A cell as it stands in the file."""
    parts = [found["got"]]
    if "then" in found:
        parts.append(f"then {found['then']}")
    if found.get("changed"):
        parts.append(f"changed: {found['changed']}")
    if "state" in found:
        parts.append(found["state"])
    parts += [f"{stage}: {kind}" for stage, kind in found.get("events", ())]
    return "; ".join(parts)


DOOR_NAMES: Final[Mapping[str, str]] = {
    "import": "import of the package",
    "construct": "construction",
    "attribute": "an attribute (`tolerance`)",
    "probe": "`probe`",
    "fingerprint": "`fingerprint`",
    "supports": "`supports`",
    "compiler": "`compiler`",
    "compile": "`compile`",
    "serialize": "`serialize`",
    "load": "`load`",
    "as_text": "`as_text`",
    "delete": "`__del__` of an executable",
    "run": "`run`, from the first on",
    "first_run": "`run`, where it is live only",
    "late_run": "`run`, where it is live only, from the 30th on",
    "array": "`__array__` of a result",
    "shape": "`shape` of a result",
    "length": "`len` of the results",
}
_SHORT: Final = {d: d.replace("_", " ") for d in DOOR_NAMES}


def as_page(known: Mapping[str, Mapping[str, str]]) -> str:
    """The doors, and a table: kinds by modes, each cell with the doors where it is not the host's numbers."""
    rows: dict[tuple[str, ...], list[str]] = {}
    found: dict[str, dict[str, list[Cell]]] = {}
    for cell in cells():
        found.setdefault(cell.kind, {mode: [] for mode in MODES})[cell.mode].append(cell)
    for kind, of_mode in found.items():
        row = tuple(_column(known, of_mode[mode]) for mode in MODES)
        rows.setdefault(row, []).append(kind.replace("_", " "))
    doors = "; ".join(f"{_SHORT[d]}: {name}" if name.strip("`") != d else name for d, name in DOOR_NAMES.items())
    lines = [f"Doors: {doors}.", "", f"| what it does | {' | '.join(MODES)} |", "|---" * (1 + len(MODES)) + "|"]
    lines += [f"| {', '.join(names)} | {' | '.join(row)} |" for row, names in rows.items()]
    return "\n".join(lines)


def _column(known: Mapping[str, Mapping[str, str]], of_a_kind: Sequence[Cell]) -> str:
    """What callers got at all doors: the usual thing, then what else."""
    found: dict[str, dict[str, None]] = collections.defaultdict(dict)
    for cell in of_a_kind:
        found[_told(known.get(cell.fault, {}).get(cell.column, "?"))][_SHORT[cell.door]] = None
    usual = RIGHT if RIGHT in found else max(found, key=lambda text: len(found[text]))
    others = [f"{text} ({', '.join(doors)})" for text, doors in found.items() if text != usual]
    return "; ".join([usual, *others])


def _told(text: str) -> str:
    """What of a cell stands on the page."""
    got, *more = text.split("; ")
    kept = [m if m.startswith("then") else m.replace("changed: ", "stays changed: ") for m in more]
    return ", ".join([got, *(m for m in kept if m.startswith(("then", "stays")))])


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cells whose fault or column has this text")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--missing", action="store_true", help="only cells that are not in the file yet")
    parser.add_argument("--dry", action="store_true", help="write nothing")
    args = parser.parse_args()
    wanted = [c for c in cells() if args.only in f"{c.fault} {c.column}"]
    known: dict[str, dict[str, str]] = json.loads(FILE.read_text()) if FILE.exists() else {}
    if args.missing:
        wanted = [c for c in wanted if c.column not in known.get(c.fault, ())]
    start, done = time.monotonic(), 0

    def told(cell: Cell, found: dict[str, Any]) -> None:
        nonlocal done
        done += 1
        text = as_text(found)
        before = known.setdefault(cell.fault, {}).get(cell.column)
        print(
            f"{cell.fault} {cell.column}: {text}" + f"   (before: {before})" * (before not in (None, text)), flush=True
        )
        known[cell.fault][cell.column] = text
        if done % 100 == 0:
            print(f"# {done} of {len(wanted)}, {time.monotonic() - start:.0f} s", flush=True)
        if done % 20 == 0 and not args.dry:
            write(known)

    run(wanted, args.workers, told)
    if not args.dry:
        write(known)
        page = PAGE.read_text(encoding="utf-8")
        before, _, rest = page.partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n\n{as_page(known)}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    return 0


def write(known: Mapping[str, Mapping[str, str]]) -> None:
    """Write the file."""
    columns = [f"{m}/{n}" for m in MODES for n in (1, 4)]
    ordered = {f: {c: known[f][c] for c in columns if c in known[f]} for f in faults() if f in known}
    FILE.write_text(json.dumps(ordered, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())

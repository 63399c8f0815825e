"""What the guard costs and gives: first results, overhead of a live cluster, examination, and engine="auto".

    python benchmarks/guard.py overhead              # of a call of a live cluster over its bare executable
    python benchmarks/guard.py isolated              # of a call whose executable another process runs, and its copies
    python benchmarks/guard.py sampling              # what comparing some live calls with the host costs
    python benchmarks/guard.py first [NAME ...]      # first result with the asynchronous guard beside the plain host
    python benchmarks/guard.py auto [NAME ...]       # every engine alone, and all of them under guard
    python benchmarks/guard.py verify [NAME ...]     # time of checking results, in runs of the host, for each engine

NAME: exported models (see exported.py); for `verify` development models too. Every process of `first` and
`auto` starts with an empty cache of its own, but for the second one of `first`, which has what the first one left. Run
it on a machine that does nothing else.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import shared_memory
from typing import Any

import numpy as np
from exported import NAMES, inputs_for, path
from rounds import interleaved

MAX_ROUNDS = 5
SAMPLING_TURNS = 16
FIRST = """
import json, sys, time
sys.path.insert(0, {folder!r})
from exported import inputs_for
from xrt_core.engine import engines
from xrt_core.module import XRTModule
engines.usable("xla").prepare()
inputs = inputs_for({name!r})
start = time.perf_counter()
m = XRTModule({path!r}, engine={engine!r}, guard={guard!r})
m.run(inputs)
first = time.perf_counter() - start
m.wait(900)
settled = time.perf_counter() - start
m.run(inputs)
clusters = m.report().clusters
print(json.dumps([first, settled, [c["state"] for c in clusters], [c["outcome"]["timings"] for c in clusters
    if c["outcome"]]]))
"""


def overhead() -> None:
    """Median nanoseconds of a call: the executable, its checks, an unguarded and a guarded Launch around it.

    The executable makes its result anew in each call, as engines do.
    """
    from xrt_core.cache.live_notes import LiveNotes
    from xrt_core.engine.contract import Executable
    from xrt_core.guard.launch import GuardedLaunch
    from xrt_core.guard.record import ClusterRecord, State
    from xrt_core.options import resolve
    from xrt_core.options.guard_settings import GuardSettings
    from xrt_core.runtime.launch import Launch, LaunchCheck
    from xrt_core.testing.functions import binary

    settings = GuardSettings.of(resolve({"guard": True}))
    assert settings is not None

    class NoFailures:
        def record_failure(self, *failure: Any) -> None:
            raise AssertionError("nothing fails here")

    class Nothing(Executable):
        def run(self, inputs: Sequence[Any], *args: Any, **options: Any) -> list[np.ndarray]:
            return [x.copy()]

    def record() -> ClusterRecord:
        return ClusterRecord("c", "e", 1, "Add")

    function = binary("Add")
    x = np.ones((2, 3), np.float32)
    executable = Nothing()
    check = LaunchCheck(function, "e")
    noted = GuardedLaunch(function, "e", lambda: list, record(), settings, NoFailures(), lambda *call: None)
    noted.note = LiveNotes(pathlib.Path(tempfile.mkdtemp())).begin("0" * 64)
    plain = Launch(function, "e", executable, lambda: list)
    guarded = GuardedLaunch(function, "e", lambda: list, record(), settings, NoFailures(), lambda *call: None)
    for launch in (guarded, noted):
        launch.record.move(State.READY)
        launch.go_live(executable, "")

    calls: list[Callable[[Any], Any]] = [executable.run, check.around(executable), plain, guarded, noted]
    arguments = [x, x]
    times = interleaved([partial(call, arguments) for call in calls], rounds=60, calls=10_000)
    bare, alone, unguarded, live, in_notes = (t.median * 1e9 for t in times)
    print(f"a call over its executable: views of two inputs and the check of a result {alone - bare:.0f} ns "
          f"(accepted: 1000), "
          f"Launch {unguarded - bare:.0f} ns, live GuardedLaunch {live - bare:.0f} ns "
          f"(accepted: 2000), of them with a note {in_notes - bare:.0f} ns")  # fmt: skip


class CopiesBetween:
    """The copies that a call of an isolated executable makes, alone: into memory that is shared with another process,
    of a result into it by that process, and out of it. Each side waits by looking, which costs next to nothing."""

    def __init__(self, size: int) -> None:
        self.memory = shared_memory.SharedMemory(create=True, size=64 + 8 * size)
        self.flags, self.place, self.result = _places(self.memory, size)
        self.flags[:] = 0
        self.channel, its = socket.socketpair()
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=_copy_results, args=(self.memory.name, size, its), daemon=True)
        self.process.start()
        its.close()

    def __call__(self, x: np.ndarray) -> np.ndarray:
        np.copyto(self.place, x)
        self.flags[0] += 1
        while self.flags[1] != self.flags[0]:
            if self.flags[2]:
                self.channel.send(b"w")  # it sleeps
        return self.result.copy()

    def close(self) -> None:
        self.channel.close()
        self.process.join()
        del self.flags, self.place, self.result
        self.memory.close()
        self.memory.unlink()


def _places(memory: shared_memory.SharedMemory, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Flags (calls, answers, whether the process sleeps), the input, and the result."""
    places = (np.ndarray(size, np.float32, memory.buf, 64 + 4 * size * k) for k in range(2))
    return np.ndarray(3, np.int64, memory.buf), *places


def _copy_results(name: str, size: int, channel: socket.socket) -> None:
    """The other process: copies a result of its own at each call, until the channel is closed."""
    memory = shared_memory.SharedMemory(name)
    flags, _, place = _places(memory, size)
    own = np.ones(size, np.float32)
    while True:
        end = time.perf_counter() + 5e-3
        while flags[0] == flags[1] and time.perf_counter() < end:
            pass
        if flags[0] == flags[1]:
            flags[2] = 1
            if not channel.recv(1 << 16):
                break
            flags[2] = 0
            continue
        np.copyto(place, own)
        flags[1] += 1
    del flags, place
    memory.close()


def isolated() -> None:
    """Microseconds of a call of one element-wise node through XLA: guarded, isolated, and the copies between alone."""
    from xrt_core import Graph, XRTModule, ops

    print("| elements | guarded (us) | isolated (us) | copies (us) | the rest (us) |\n|---|---|---|---|---|")
    for size in (1 << 4, 1 << 14, 1 << 18, 1 << 21):
        x = np.ones(size, np.float32)

        class Net(Graph):
            def build(self, x: Any) -> Any:
                return ops.Tanh(x)

        with XRTModule(Net(), engine="xla", prune=False) as plain, XRTModule(
            Net(), engine="xla", guard="isolated", prune=False
        ) as apart, contextlib.closing(CopiesBetween(size)) as copies:
            for m in (plain, apart):
                m(x)
                m.wait(300)
                m(x)
                assert m.report().clusters[0]["state"] == "live", m.report()
            times = interleaved(
                [partial(plain, x), partial(apart, x), partial(copies, x)], rounds=15, batch=0.05, warm=1, rest=0.01
            )
            a, b, c = (t.median * 1e6 for t in times)
            print(f"| {size} | {a:.1f} | {b:.1f} | {c:.1f} | {b - a - c:.1f} |", flush=True)


def sampling() -> None:
    """Time and CPU time of calls with the sampled comparisons over those without, of an MLP at several widths.

    The modules take turns of a second: comparisons run in the background, beside the calls that follow. As they are
    rare and the ratios noisy, the last column is what their number says: runs of the host over the time of the calls.
    """
    from xrt_core import XRTModule, ops

    print("| width | us a call | time | CPU time | without / without | comparisons | of it |\n" + "|---" * 7 + "|")
    for width in (16, 128, 512, 1536):
        weights = [np.full((width, width), 1 / width, np.float32) for _ in range(8)]

        def net(x: Any, weights: Sequence[np.ndarray] = weights) -> Any:
            for w in weights:
                x = ops.Tanh(x @ w)
            return x

        x = np.ones((64, width), np.float32)
        modules = [XRTModule(net, engine="xla", prune=False, guard_shadow=s) for s in (None, 0, 0)]
        for m in modules:
            m(x)
            m.wait(300)
            for _ in range(100):
                m(x)
        before = modules[0].report().clusters[0]["shadow_runs"]
        with XRTModule(net, engine="host") as host:
            host(x)
            seconds = interleaved([partial(host, x)], rounds=15)[0].median
        rows: list[list[tuple[float, float]]] = [[], [], []]
        for turn in range(SAMPLING_TURNS):
            for i in ((0, 1, 2), (2, 1, 0))[turn % 2]:
                start, cpu, calls = time.perf_counter(), time.process_time(), 0
                while time.perf_counter() - start < 1.0:
                    modules[i](x)
                    calls += 1
                rows[i].append(((time.perf_counter() - start) / calls, (time.process_time() - cpu) / calls))
        wall, cpus = ([statistics.fmean(r[k] for r in rows[i]) for i in range(3)] for k in (0, 1))
        compared = modules[0].report().clusters[0]["shadow_runs"] - before
        print(
            f"| {width} | {wall[1] * 1e6:.0f} | {2 * wall[0] / (wall[1] + wall[2]):.3f} "
            f"| {2 * cpus[0] / (cpus[1] + cpus[2]):.3f} | {wall[1] / wall[2]:.3f} | {compared} "
            f"| {compared * seconds / SAMPLING_TURNS:.2%} |", flush=True
        )  # fmt: skip
        for m in modules:
            m.close()


def first(names: Sequence[str]) -> None:
    """Seconds to the first result of the plain host, and of the guarded module in a first and a second process.

    From making the module on; all of them have loaded the engine's library before.
    """
    print("| model | host | guarded | ratio (at most 1.05) | settled | second process | ratio | host runs to verify |")
    print("|---|---|---|---|---|---|---|---|")
    for name in names:
        host, guarded, second = [], [], []
        settled, examined = [], []
        for _ in range(MAX_ROUNDS):
            with tempfile.TemporaryDirectory() as cache:
                host.append(_process(name, "host", False, cache)[0])
                seconds, done, states, timings = _process(name, "xla", True, cache)
                assert set(states) <= {"live", "rejected"}, states
                guarded.append(seconds)
                settled.append(done)
                examined += [t.get("verify", 0.0) / t["host"] for t in timings if "host" in t]
                second.append(_process(name, "xla", True, cache)[0])
        h, g, s = (statistics.median(t) for t in (host, guarded, second))
        runs = f"{statistics.median(examined):.1f}" if examined else ""
        print(f"| {name} | {h:.2f} | {g:.2f} | {g / h:.2f} | {statistics.median(settled):.1f} | {s:.2f} | {s / h:.2f} "
              f"| {runs} |")  # fmt: skip


def auto(names: Sequence[str]) -> None:
    """Median milliseconds of each ready engine alone, and of `engine="auto"`, whose calls alternate."""
    from xrt_core.engine import engines
    from xrt_core.module import XRTModule
    from xrt_core.options import resolve

    ready = [e.name for e in engines.select(resolve({"engine": "auto"}))]
    print(f"| model | {' | '.join(ready)} | auto | auto to best (accepted: 1.03) | chosen |")
    print("|---|" + "---|" * (len(ready) + 3))
    for name in names:
        inputs = inputs_for(name)
        with tempfile.TemporaryDirectory() as cache:
            modules = {e: XRTModule(path(name), engine=e, cache_dir=cache, guard=e == "auto") for e in (*ready, "auto")}
            for m in modules.values():
                m.run(inputs)
            modules["auto"].wait()
            times = interleaved([partial(m.run, inputs) for m in modules.values()], rounds=20, warm=1, rest=0.05)
            found = {e: t.median * 1e3 for e, t in zip(modules, times, strict=True)}
            chosen = ", ".join(dict.fromkeys(c["chosen"] for c in modules["auto"].report().clusters))
            modules["auto"].close()
        best = min(found[e] for e in ready)
        columns = " | ".join(f"{found[e]:.2f}" for e in (*ready, "auto"))
        print(f"| {name} | {columns} | {found['auto'] / best:.3f} | {chosen} |")


def verify(names: Sequence[str]) -> None:
    """For each model and engine what an examination without tuning takes, in runs of the host, over all clusters.

    verification: all but compilations and the candidate's own runs (accepted: 2). stress: of the stress test (accepted:
    0.75, or 50 ms a cluster). A run of the host is the middle one of five in the same process, by the plan of a module
    without engines.
    """
    from cpu_engines import model_of

    from xrt_core.engine import engines
    from xrt_core.engine.contract import CompileOptions, Executable, Function
    from xrt_core.guard.stress import StressTest
    from xrt_core.module import XRTModule
    from xrt_core.options import resolve
    from xrt_core.verify.autotune import settle
    from xrt_core.verify.evaluate import EvaluationSettings, evaluate
    from xrt_core.verify.inputs import synthesize_inputs
    from xrt_core.verify.isolate import Candidate
    from xrt_core.verify.reference import ReferenceExecutor

    print("| model | engine | clusters | host run (ms) | compile (ms) | candidate's runs | verification | stress "
          "| stress (ms) | verdicts |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name in names:
        found = model_of(name)
        if found is None:
            continue
        for engine in engines.select(resolve({"engine": "auto"})):
            module = XRTModule(found[0], engine=engine.name, cache="off", guard=False)
            nodes = module.partitioned(found[1]).nodes
            functions = [f for n in nodes if isinstance(f := n.attributes.get("function"), Function)]
            compilers = {fused: engine.compiler("cpu", CompileOptions(fused=fused)) for fused in (True, False)}

            def compile(f: Function, fused: bool, compilers: Any = compilers) -> Executable:
                return compilers[fused].compile(f, f.params, f.returns, f.aliases)  # type: ignore[no-any-return]

            host = compiled = runs = verified = stressed = 0.0
            verdicts = []
            for f in functions:
                inputs, plan = synthesize_inputs(f), ReferenceExecutor(f)
                (timed,) = interleaved([partial(plan.run, inputs)], settle=settle)
                candidate = Candidate(engine.name, compile, engine.tolerance)
                outcome = evaluate(f, [candidate], EvaluationSettings(tune=False), stress=StressTest(True))
                stressed += outcome.timings.get("stress", 0.0)
                host += timed.median
                compiled += outcome.timings.get("compile", 0.0)
                runs += outcome.timings.get("checked runs", 0.0)
                verified += outcome.timings.get("verify", 0.0)
                verdicts.append(outcome.verdict)
            if functions:
                said = ", ".join(dict.fromkeys(verdicts))
                print(f"| {name} | {engine.name} | {len(functions)} | {host * 1e3:.1f} | {compiled * 1e3:.0f} "
                      f"| {runs / host:.2f} | {verified / host:.2f} | {stressed / host:.2f} | {stressed * 1e3:.0f} "
                      f"| {said} |", flush=True)  # fmt: skip


def _process(name: str, engine: str, guard: bool, cache: str) -> list[Any]:
    code = FIRST.format(folder=os.path.dirname(__file__), name=name, path=str(path(name)), engine=engine, guard=guard)
    environment = {**os.environ, "XRT_CACHE_DIR": cache}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return list(json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    what = sys.argv[1] if len(sys.argv) > 1 else ""
    if what not in ("overhead", "isolated", "sampling", "first", "auto", "verify"):
        raise SystemExit(__doc__)
    if what in ("overhead", "isolated", "sampling"):
        {"overhead": overhead, "isolated": isolated, "sampling": sampling}[what]()
    else:
        {"first": first, "auto": auto, "verify": verify}[what](sys.argv[2:] or NAMES)

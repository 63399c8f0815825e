"""Where an engine does worse through XRT than by itself, and why.

    python benchmarks/engines_direct.py [MODEL ...] [--models FOLDER] [--shape NAME=DIM,...] [--engines NAME ...]
                                        [--threads N] [--seconds S]

For each model and engine, in turns, the least time of many short ones: the library used directly on the file; the same
library used directly on what XRT's passes made of the graph for these sizes, as one model ("rewritten"); and a module
on that engine alone (`guard=False`). A call through XRT is divided by the timeline of the quickest of some runs into
the executables' own runs ("inside") and nodes on the host with their conversions ("host"). The last column says what a
loss of more than 3 % is made of: pieces (more than one launch or nodes on the host, with the operators that were
refused and the reason of the first), rewrites (the rewritten graph is slower than the file), the session (one launch,
slower inside than the library on the rewritten graph), or the call (what is around the executable). Where the machine
is busy with other things, `--threads 1` compares processor times.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
from cpu_engines import DIRECT
from inference import machine, models, versions
from rounds import least

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from xrt_core.compiler.services import usable_processors
from xrt_core.errors import XRTError
from xrt_core.frontends.onnx_export import save
from xrt_core.module import XRTModule

Call = Callable[[], Any]
LOSS: Final = 1.03
TIMED: Final = 20  # runs with a timeline
HOLDS: Final = 1.1  # of the least time of a call, which a timeline may take and still say what that is made of


def parts(m: XRTModule, inputs: Mapping[str, Any]) -> tuple[float, float]:
    """Seconds inside executables and on the host, of the quickest of some runs."""
    found = []
    for _ in range(TIMED):
        spans = m.run_timed(inputs)[1].spans
        inside = sum(s.end - s.start for s in spans if s.lane)
        found.append((inside, sum(s.end - s.start for s in spans) - inside))
    return min(found, key=sum)


def row(name: str, file: str, inputs: Mapping[str, Any], engine: str, threads: int, seconds: float) -> str:
    """One row of the table. Raises XRTError where XRT cannot run the model."""
    with XRTModule(file, engine=[engine], threads=threads, cache=False, guard=False) as m:
        for _ in range(2):
            m.run(inputs)
        calls: dict[str, Call] = {"XRT": lambda: m.run(inputs)}
        missing = {}
        with tempfile.TemporaryDirectory() as folder:
            made = pathlib.Path(folder) / "rewritten.onnx"
            graph = m.optimised(inputs)
            save(graph, made)
            left = {v.name: np.asarray(inputs[v.name]) for v in graph.inputs}
            for label, path, given in (("direct", file, dict(inputs)), ("rewritten", str(made), left)):
                try:
                    call = DIRECT[engine](path, given, threads)
                    call()
                    calls[label] = call
                except Exception as e:  # a library that does not take the model, or a graph
                    missing[label] = type(e).__name__
            times = least(calls, seconds, threads)
        inside, host = parts(m, inputs)
        report = m.explain().report
    launches, refused = len(report.clusters), report.host_nodes
    shown = [f"{times[n] * 1e3:.3f}" if n in times else missing[n] for n in ("direct", "rewritten", "XRT")]
    ratios = [
        f"{times[n] / times['direct']:.2f}" if {n, "direct"} <= times.keys() else "" for n in ("rewritten", "XRT")
    ]
    why: list[str] = []
    if "direct" in times and times["XRT"] > LOSS * times["direct"]:
        if launches != 1 or refused:
            operators = Counter(h.operator for h in refused)
            listed = ", ".join(f"{n} {op}" for op, n in operators.most_common(4))
            first = f": {refused[0].reason[:80]}" if refused else ""
            why.append(f"{launches} pieces, on the host {listed or 'none'}{first}")
        if "rewritten" in times and times["rewritten"] > LOSS * times["direct"]:
            why.append("rewrites")
        if inside + host > HOLDS * times["XRT"]:
            why.append("what is around or inside the launches cannot be told apart, as the machine is busy")
        else:
            if launches == 1 and not refused and inside > LOSS * min(t for n, t in times.items() if n != "XRT"):
                why.append("session")
            if times["XRT"] - inside - host > (LOSS - 1) * times["direct"]:
                why.append("call")
    divided = f"{inside * 1e3:.3f} | {host * 1e3:.3f}"
    return f"| {name} | {engine} | {' | '.join([*shown, *ratios])} | {divided} | {'; '.join(why)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", metavar="MODEL")
    parser.add_argument("--models", type=pathlib.Path, help="a folder of ONNX files")
    parser.add_argument("--shape", action="append", default=[], help="of an input, or the size of a dimension by name")
    parser.add_argument("--engines", nargs="+", default=list(DIRECT), choices=list(DIRECT))
    parser.add_argument("--threads", type=int, default=usable_processors())
    parser.add_argument("--seconds", type=float, default=5.0, help="of timing for each row")
    args = parser.parse_args()
    print(f"{machine()}; {args.threads} threads; {versions()}; milliseconds\n")
    heads = ["model", "engine", "direct", "rewritten", "XRT", "rewritten / direct", "XRT / direct", "inside", "host"]
    print(f"| {' | '.join(heads)} | a loss by |\n|{'---|' * (len(heads) + 1)}")
    for name, file, inputs in models(args):
        for engine in args.engines:
            try:
                print(row(name, file, inputs, engine, args.threads, args.seconds), flush=True)
            except XRTError as e:
                print(f"| {name} | {engine} | {type(e).__name__}: {str(e).splitlines()[0][:120]} |", flush=True)


if __name__ == "__main__":
    main()

"""What engine="auto" chooses beside a busy neighbour that comes and goes, and how fast it is then.

    python benchmarks/neighbour.py MODEL.onnx [--phase SECONDS] [--processes N] [--engines onnxruntime,openvino]

The neighbour is N processes that compute (default: one for each processor). It is there from before the first call on,
so that the first choice is made beside it, leaves after a phase, comes again and leaves again. Meanwhile calls of auto
and of each engine alone (`guard=False`) take turns. Each line is a window of 5 seconds: who answers, whether that is
provisional, how often the choice was revisited, and the median of auto over that of the fastest engine in the window.
The last column is an engine against a second module of itself: the noise.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from rounds import interleaved

from xrt_core.cli.inputs import random_inputs
from xrt_core.compiler.services import usable_processors
from xrt_core.module import XRTModule

WINDOW = 5.0
SPIN = "while True: pass"


def main() -> None:
    """Print the table."""
    cores = usable_processors()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--phase", type=float, default=60.0)
    parser.add_argument("--processes", type=int, default=cores)
    parser.add_argument("--engines", default="onnxruntime,openvino")
    args = parser.parse_args()
    names = args.engines.split(",")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XRT_CACHE_DIR"] = folder
        alone = [XRTModule(args.model, engine=name, guard=False) for name in (*names, names[0])]
        auto = XRTModule(args.model, engine="auto")
        inputs = random_inputs(auto.input_types, {}, 0)
        for module in alone:
            module.run(inputs)
        begin = time.perf_counter()
        print(f"{args.model.name}, {cores} processors, a neighbour of {args.processes} processes")
        print("| s | neighbour | answers | provisional | races | auto, ms | auto / best | noise |\n" + "|---" * 8 + "|")
        for is_there in (True, False, True, False):
            busy = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(args.processes if is_there else 0)]
            try:
                until = time.perf_counter() + args.phase
                while time.perf_counter() < until:
                    calls = [lambda m=m: m.run(inputs) for m in (auto, *alone)]
                    times = [t.median for t in interleaved(calls, seconds=WINDOW, batch=0.05, rest=0.02)]
                    clusters = auto.report().clusters
                    answers = ", ".join(sorted({c["chosen"] for c in clusters})) or "host"
                    provisional = any((c["outcome"] or {}).get("provisional") for c in clusters)
                    row: list[object] = [f"{time.perf_counter() - begin:.0f}", "yes" if is_there else "no", answers]
                    row += ["yes" if provisional else "no", sum(c["races"] for c in clusters)]
                    row += [f"{times[0] * 1e3:.2f}", f"{times[0] / min(times[1:-1]):.2f}"]
                    row += [f"{times[-1] / times[1]:.2f}"]
                    print(f"| {' | '.join(map(str, row))} |", flush=True)
            finally:
                for process in busy:
                    process.kill()
                    process.wait()
        for module in (auto, *alone):
            module.close()


if __name__ == "__main__":
    main()

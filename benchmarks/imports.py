"""What `from xrt_core import XRTModule` costs beside `import numpy, onnx`, each in processes of its own, in turns.

    python benchmarks/imports.py [--rounds 15]

Prints the medians of the seconds that the statements take (the start of the interpreter is not counted), their ratio
(goal: 0.6), and the modules of the core and of others that the first one loads.
"""

from __future__ import annotations

import argparse
import collections
import json
import statistics
import subprocess
import sys

GOAL = 0.6
STATEMENTS = ("from xrt_core import XRTModule", "import numpy, onnx")
MEASURE = """
import json, sys, time
before, start = set(sys.modules), time.perf_counter()
{statement}
took = time.perf_counter() - start
print(json.dumps([took, sorted(set(sys.modules) - before)]))
"""


def measured(statement: str) -> tuple[float, list[str]]:
    """Seconds of a statement in a new process, and the modules that it loads."""
    code = MEASURE.format(statement=statement)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, modules = json.loads(done.stdout)
    return seconds, modules


def main() -> None:
    """Print the medians, the ratio and the parts of the core."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    found = [[measured(s)[0] for s in STATEMENTS] for _ in range(rounds + 1)][1:]  # the first compiles bytecode
    ours, theirs = (statistics.median(column) for column in zip(*found, strict=True))
    modules = measured(STATEMENTS[0])[1]
    parts = collections.Counter(m.split(".")[1] for m in modules if m.startswith("xrt_core."))
    others = collections.Counter(m.split(".")[0] for m in modules if m.split(".")[0] not in {"xrt_core", "numpy"})
    print(f"{STATEMENTS[0]}: {ours * 1e3:.0f} ms; {STATEMENTS[1]}: {theirs * 1e3:.0f} ms; ratio {ours / theirs:.2f}")
    print(f"goal {GOAL}; core: {sum(parts.values())} modules, {', '.join(f'{p} {n}' for p, n in parts.most_common())}")
    print(f"others beside numpy: {', '.join(f'{p} {n}' if n > 1 else p for p, n in others.most_common(40))}")


if __name__ == "__main__":
    main()

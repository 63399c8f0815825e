"""Memory: what running BERT-base (435 MB of weights) holds, and whether calls leak.

    python benchmarks/memory.py            # needs the exported models, see exported.py

Prints resident and anonymous memory (the file's own map, which the system can drop, counts only as resident) before
loading, after loading, after the first call and after many calls.
"""

from __future__ import annotations

import gc
import pathlib
import sys

import numpy as np
from exported import inputs_for, path

from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.types import TensorType
from xrt_core.module import XRTModule


def memory() -> dict[str, float]:
    """Resident (all), anonymous and file-backed memory of this process, in MB."""
    found = dict.fromkeys(("VmRSS", "RssAnon", "RssFile", "VmHWM"), 0.0)
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        name = line.partition(":")[0]
        if name in found:
            found[name] = int(line.split()[1]) / 1024
    return found


def show(what: str, since: dict[str, float] | None = None) -> dict[str, float]:
    """Print a row and return the reading."""
    gc.collect()
    now = memory()
    grown = f"{now['RssAnon'] - since['RssAnon']:+.0f}" if since else ""
    print(f"| {what} | {now['VmRSS']:.0f} | {now['RssAnon']:.0f} | {grown} | {now['VmHWM']:.0f} |", flush=True)
    return now


def main() -> None:
    """Print the table."""
    name = sys.argv[1] if len(sys.argv) > 1 else "bert"
    print("| after | resident (MB) | anonymous (MB) | anonymous, since start | peak resident |\n|---|---|---|---|---|")
    t = TensorType(np.dtype(np.float32), (8,))
    x, y = Value("x", t), Value("y", t)
    small = XRTModule(Graph([x], [y], [Node("Relu", [x], [y], version=14)], opsets={"": 18}), engine="xla", guard=False)
    small(np.ones(8, np.float32))
    start = show("start, with XLA loaded")
    module = XRTModule(path(name), engine="xla", guard=False)
    show(f"loading {name}", start)
    arrays = list(inputs_for(name).values())
    module(*arrays)
    show("its first call", start)
    for _ in range(20):
        module(*arrays)
    show("20 more calls", start)
    before = show("(before the small calls)", start)
    array = np.ones(8, np.float32)
    for _ in range(10_000):
        small(array)
    show("10 000 calls of one Relu", before)
    for size in range(1, 101):
        dynamic(size)
    show("100 modules, made and dropped", before)


def dynamic(size: int) -> None:
    """A module of its own, used once."""
    t = TensorType(np.dtype(np.float32), ("n",))
    x, y = Value("x", t), Value("y", t)
    module = XRTModule(Graph([x], [y], [Node("Exp", [x], [y], version=13)], opsets={"": 18}), engine="xla", guard=False)
    module(np.ones(size, np.float32))


if __name__ == "__main__":
    main()

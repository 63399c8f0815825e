"""Times mark, cluster and fold on synthetic graphs of growing size, and prints how the time grows with the nodes.

Run as `python benchmarks/partition.py [--sizes 1000,...] [--repeats N] [--engines 3] [--marked SHARE] [--no-prune]`.
With `--marked` that share of the nodes is marked: runs of 20 neighbours, each a region of one of the engines or kept on
the host. A row is one shape of graph;
the columns are medians of CPU milliseconds, then the time of each size over that of the size before it, scaled to a
doubling of the nodes. Goals: 1000 nodes under 30 ms, 100 000 under 1.5 s, a doubling at most 2.3 times.
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from xrt_core.ir.graph import Annotations, Graph, Node, Support, Value
from xrt_core.ir.types import TensorType
from xrt_core.passes.partitioning import Candidate, cluster, costs_for, mark, outline

TYPE = TensorType(np.dtype(np.float32), (4, 4))
_NO = Support.no("the operator has no kernel")


class Builder:
    """Makes nodes; each is unsupported (`Host`) with the probability `sprinkle`."""

    def __init__(self, sprinkle: float) -> None:
        self.random = random.Random(0)
        self.sprinkle = sprinkle
        self.nodes: list[Node] = []
        self.input = Value("input", TYPE)

    def node(self, op: str, *inputs: Value) -> Value:
        """One more node reading `inputs`; returns its output."""
        if self.random.random() < self.sprinkle:
            op = "Host"
        name = f"v{len(self.nodes)}"
        out = Value(name, TYPE)
        self.nodes.append(Node(op, inputs, (out,), version=13, name=name))
        return out

    def graph(self, *outputs: Value) -> Graph:
        """The graph so far."""
        return Graph((self.input,), outputs, self.nodes, opsets={"": 13})


def chain(b: Builder, n: int) -> Graph:
    """One long path."""
    x = b.input
    for _ in range(n):
        x = b.node("Relu", x)
    return b.graph(x)


def wide(b: Builder, n: int) -> Graph:
    """One node, n-2 that read it, one that reads all of them."""
    x = b.node("Relu", b.input)
    middle = [b.node("Relu", x) for _ in range(n - 2)]
    return b.graph(b.node("Sum", *middle))


def diamonds(b: Builder, n: int) -> Graph:
    """A path of diamonds: each splits in two and joins again."""
    x = b.input
    for _ in range(n // 4):
        x = b.node("Relu", x)
        x = b.node("Add", b.node("Neg", x), b.node("Exp", x))
    return b.graph(x)


def lattice(b: Builder, n: int) -> Graph:
    """Square layers, each node reading two neighbours of the layer before: wide and deep, with very many paths."""
    width = max(2, math.isqrt(n))
    layer = [b.node("Relu", b.input) for _ in range(width)]
    while len(b.nodes) < n:
        layer = [b.node("Add", layer[i], layer[(i + 1) % width]) for i in range(width)]
    return b.graph(*layer)


def transformer(b: Builder, n: int) -> Graph:
    """Attention blocks with residuals: 20 nodes each."""
    x = b.input
    for _ in range(n // 20):
        h = b.node("LayerNormalization", x)
        q, k, v = (b.node("Transpose", b.node("Reshape", b.node("MatMul", h))) for _ in range(3))
        a = b.node("Softmax", b.node("Mul", b.node("MatMul", q, k)))
        x = b.node("Add", x, b.node("MatMul", b.node("MatMul", a, v)))
        f = b.node("Gelu", b.node("MatMul", b.node("LayerNormalization", x)))
        x = b.node("Add", x, b.node("MatMul", f))
    return b.graph(x)


def scattered(b: Builder, n: int) -> Graph:
    """Every node reads two of the 50 before it."""
    values = [b.input]
    for _ in range(n):
        near = values[-50:]
        values.append(b.node("Add", b.random.choice(near), b.random.choice(near)))
    return b.graph(values[-1])


SHAPES: dict[str, Callable[[Builder, int], Graph]] = {
    f.__name__: f for f in (chain, wide, diamonds, lattice, transformer, scattered)
}


def candidates(count: int) -> list[Candidate]:
    """Engines: the first takes all but Host; with more, each refuses one operator, so that all get some."""
    refused = [{"Host"}, {"Host", "Relu"}, {"Host", "Exp"}]
    if count > 1:
        refused = [{"Host", "Add", "MatMul"}, {"Host", "Add"}, {"Host"}]

    def supports(refuses: set[str]) -> Callable[[Node], Support]:
        return lambda n: _NO if n.op_type in refuses else Support.yes()

    return [Candidate(f"engine{i}", supports(refused[i])) for i in range(count)]


def marked(graph: Graph, engines: Sequence[Candidate], share: float) -> Graph:
    """The graph with about this share of its nodes marked, in runs of 20, where the engine takes the node."""
    draw = random.Random(1)
    nodes = list(graph.nodes)
    for start in range(0, len(nodes), 20):
        if draw.random() >= share:
            continue
        engine = draw.choice([*engines, None])
        for i in range(start, min(start + 20, len(nodes))):
            if engine is None or engine.supports(nodes[i]).ok:
                noted = Annotations(engine=engine.name, region=f"run {start}") if engine else Annotations(engine="host")
                nodes[i] = nodes[i].replace(annotations=noted)
    return graph.replace(nodes=nodes)


def measure(graph: Graph, engines: Sequence[Candidate], strict: bool, minimum: int, prune: bool) -> tuple[float, int]:
    """CPU seconds for mark, cluster and fold of a graph whose tables are not made yet, and the number of clusters."""
    fresh = graph.replace()
    gc.collect()
    gc.freeze()  # the garbage collector runs, but does not go through the graphs of the other rows again and again
    start = time.process_time()  # the work is in one thread; a busy machine does not count
    marks = mark(fresh, engines)
    costs = costs_for(is_host=True)
    found = cluster(
        fresh, marks, minimum_nodes=minimum, strict=strict, costs=lambda device: costs, prune=prune
    )
    outline(fresh, found)
    taken = time.process_time() - start
    gc.unfreeze()
    return taken, len(found.clusters)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="1000,2000,50000,100000", help="node counts, ascending")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engines", type=int, default=1, choices=(1, 2, 3))
    parser.add_argument("--minimum", type=int, default=1, help="minimum_nodes")
    parser.add_argument("--marked", type=float, default=0.0, help="share of the nodes that carry marks")
    parser.add_argument("--no-prune", action="store_true", help="keep clusters that are estimated to save nothing")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    arguments = parser.parse_args()
    sizes = [int(s) for s in arguments.sizes.split(",")]
    engines = candidates(arguments.engines)
    head = "".join(f"{n:>10}" for n in sizes) + "".join(f"{f'x2@{n}':>11}" for n in sizes[1:])
    print(f"{'graph':<14}{'host':>5} {'strict':<7}{head}{'clusters':>10}")
    for name in arguments.shapes.split(","):
        for sprinkle in (0.0, 0.1):
            graphs = [SHAPES[name](Builder(sprinkle), n) for n in sizes]
            if arguments.marked:
                graphs = [marked(g, engines, arguments.marked) for g in graphs]
            for strict in (True, False):
                times: list[float] = []
                for graph in graphs:
                    runs = [
                        measure(graph, engines, strict, arguments.minimum, not arguments.no_prune)
                        for _ in range(arguments.repeats)
                    ]
                    times.append(statistics.median(t for t, _ in runs))
                doubling = [
                    (t1 / t0) ** (1 / math.log2(n1 / n0))
                    for t0, t1, n0, n1 in zip(times, times[1:], sizes, sizes[1:], strict=False)
                ]
                cells = "".join(f"{t * 1e3:>10.1f}" for t in times) + "".join(f"{d:>11.2f}" for d in doubling)
                print(f"{name:<14}{sprinkle:>5.0%} {strict!s:<7}{cells}{runs[-1][1]:>10}", flush=True)


if __name__ == "__main__":
    main()

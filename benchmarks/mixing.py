"""Whether several engines in one model are faster than the best of them alone: regions measured once, the mix planned.

    python benchmarks/mixing.py [MODEL ...] [--models FOLDER] [--engines NAME ...] [--threads N] [--seconds S]

A model is cut where engines' relative speed changes: at recurrent, quantised, attention and convolution nodes, with the
small operators around them; regions with little of the work join their neighbour. Each region is compiled and timed on
each engine, in turns with the others, on the values that it gets in a run of the model. A shortest path over the chain
of regions gives the best engine of each, where going over to another costs the launch and the hand-over, measured as
well. The mixed model (one executable of several engines, as the guard builds them, whose threads do not spin) is then
timed against each engine with the whole model. "planned" and "mixed" are over the best engine with the whole model:
below 1 the mix pays. With `--cuts N` a model of one kind of region is cut into N parts of about equal work. The model
"conv_scan" is made for the purpose: convolutions, whose result is the first state of a loop of small operators. Where
the machine is busy with other things, `--threads 1` compares processor times.
"""

from __future__ import annotations

import argparse
import math
import pathlib
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
import onnx
from control_flow import _floats, _model
from inference import machine, models, versions
from rounds import least

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from xrt_core.compiler.services import usable_processors
from xrt_core.engine.contract import Executable
from xrt_core.errors import XRTError
from xrt_core.guard.composite import CompositeBuilder
from xrt_core.ir.function import Function
from xrt_core.ir.graph import Graph, Node
from xrt_core.module import XRTModule
from xrt_core.passes.partitioning import outline
from xrt_core.passes.partitioning.cluster import Cluster, Clustering
from xrt_core.passes.partitioning.cost_model import flops
from xrt_core.verify.reference import ReferenceExecutor
from xrt_core.verify.subgraph import convex_partition
from xrt_core.verify.verdict import Piece

KINDS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("LSTM", "GRU", "RNN", "Loop", "Scan"), "recurrent"),
    **dict.fromkeys(("Conv", "ConvTranspose", "MaxPool", "AveragePool"), "convolution"),
    **dict.fromkeys(("MatMul", "Gemm", "Einsum", "Softmax", "LayerNormalization", "Attention"), "attention"),
    **dict.fromkeys(("ConvInteger", "MatMulInteger", "QLinearConv", "QLinearMatMul"), "quantised"),
}
LEAST_WORK: Final = 0.05  # of the model's operations in a region
MOST_REGIONS: Final = 6


def regions_of(graph: Graph) -> list[tuple[str, tuple[int, ...]]]:
    """Runs of nodes in topological order, with their kind: of a node with a kind of its own and the small ones after
    it. Neighbours of a kind are one; a region with little work joins the smaller of its neighbours."""
    found: list[tuple[str, list[int]]] = []
    for i, n in enumerate(graph.nodes):
        kind = KINDS.get(n.op_type) if not n.domain else None
        quantised = any(v is not None and _made_by(graph, v, "DequantizeLinear") for v in n.inputs)
        kind = "quantised" if kind and quantised else kind
        if not found or (kind is not None and found[-1][0] not in (kind, "")):
            found.append((kind or "", [i]))
        else:
            found[-1] = (found[-1][0] or kind or "", [*found[-1][1], i])
    total = sum(map(flops, graph.nodes)) or 1
    while len(found) > 1:
        # of a loop the cost model knows nothing: it stays a region
        work = [math.inf if kind == "recurrent" else sum(flops(graph.nodes[i]) for i in r) for kind, r in found]
        k = min(range(len(found)), key=work.__getitem__)
        if work[k] >= LEAST_WORK * total and (len(found) <= MOST_REGIONS or math.isinf(work[k])):
            break
        beside = [j for j in (k - 1, k + 1) if 0 <= j < len(found)]
        other = min(beside, key=work.__getitem__)
        first, second = sorted((k, other))
        kind = found[first][0] if work[first] >= work[second] else found[second][0]
        found[first : second + 1] = [(kind, found[first][1] + found[second][1])]
        k = 0
        while k + 1 < len(found):  # what has become neighbours of one kind
            if found[k][0] == found[k + 1][0]:
                found[k : k + 2] = [(found[k][0], found[k][1] + found[k + 1][1])]
            else:
                k += 1
    return [(kind or "small operators", tuple(nodes)) for kind, nodes in found]


def cuts_of(graph: Graph, count: int) -> list[tuple[str, tuple[int, ...]]]:
    """Runs of nodes in topological order with about the same work each."""
    work = [flops(n) for n in graph.nodes]
    total, done = sum(work) or 1, 0
    found: list[list[int]] = [[]]
    for i, w in enumerate(work):
        if found[-1] and done >= total * len(found) / count:
            found.append([])
        found[-1].append(i)
        done += w
    return [(f"part {k + 1}", tuple(nodes)) for k, nodes in enumerate(found)]


def conv_scan(folder: pathlib.Path) -> tuple[str, str, Mapping[str, Any]]:
    """Six convolutions of 64 channels and a Scan of 1000 small steps: name, file and inputs."""
    layers, last = [], "x"
    for k in range(6):
        layers.append(f"c{k} = Conv<pads = [1, 1, 1, 1]>({last}, w{k})  r{k} = Relu(c{k})")
        last = f"r{k}"
    text = f"""g (float[1,64,40,40] x, float[1000,1,64] xs) => (float[1,64] y, float[1000,1,64] ys) {{
      {" ".join(layers)}  p = GlobalAveragePool({last})  h = Flatten(p)
      y, ys = Scan(h, xs) <num_scan_inputs = 1, body = b (float[1,64] s, float[1,64] e)
          => (float[1,64] t, float[1,64] o) {{
        m = MatMul(s, u)  a = Add(m, e)  z = Sigmoid(a)  q = Tanh(a)  t = Mul(z, q)  o = Identity(t) }}>
    }}"""
    weights = {f"w{k}": _floats(64, 64, 3, 3, scale=0.04) for k in range(6)}
    model, path = _model(text, u=_floats(64, 64, scale=0.1), **weights), folder / "conv_scan.onnx"
    onnx.save(model, path)
    return "conv_scan", str(path), {"x": _floats(1, 64, 40, 40), "xs": _floats(1000, 1, 64)}


def _made_by(graph: Graph, value: Any, op: str) -> bool:
    producer = graph.producer(value)
    return producer is not None and producer.op_type == op


def plan(times: Sequence[Mapping[str, float]], handing_over: float) -> list[str]:
    """The engine of each region: the shortest path. times: of each region by engine. handing_over: seconds for going
    over to another engine."""
    best: dict[str, tuple[float, list[str]]] = {e: (t, [e]) for e, t in times[0].items()}
    for row in times[1:]:
        step = {}
        for e, t in row.items():
            cost, way = min(
                ((c + (0.0 if w[-1] == e else handing_over), w) for c, w in best.values()), key=lambda x: x[0]
            )
            step[e] = cost + t, [*way, e]
        best = step
    return min(best.values(), key=lambda x: x[0])[1]


class Model:
    """A model's specialised graph as one Function, whole and in pieces, on several engines."""

    def __init__(self, file: str, inputs: Mapping[str, Any], engines: Sequence[str], threads: int) -> None:
        self.module = XRTModule(file, engine=list(engines), threads=threads, cache=False, guard=False)
        self.engines = engines
        self.builder = CompositeBuilder(self.module._pipeline.accelerated.services.compilation)
        graph = self.module.optimised(inputs)
        self.reader = {v.name: np.asarray(inputs[v.name]) for v in graph.inputs if v.name in inputs}
        everything = Clustering((Cluster(engines[0], tuple(range(len(graph.nodes))), "cpu"),), {}, len(graph.nodes))
        launch = next(n for n in outline(graph, everything).nodes if n.op_type == "Launch")
        function = launch.attributes["function"]
        assert isinstance(function, Function)
        self.function = function
        self.arrays = [self.reader[v.name] for v in launch.inputs if v is not None]

    def takes(self, engine: str, nodes: Sequence[Node]) -> bool:
        """Whether an engine takes all of these nodes."""
        return all(self.builder._support(engine, n).ok for n in nodes)

    def pieces(self, regions: Sequence[tuple[int, ...]], on: Sequence[str]) -> Executable:
        """The regions on these engines; neighbours on one engine are one piece."""
        merged: list[Piece] = []
        for nodes, engine in zip(regions, on, strict=True):
            if merged and merged[-1].engine == engine:
                merged[-1] = Piece(engine, tuple(sorted((*merged[-1].nodes, *nodes))))
            else:
                merged.append(Piece(engine, nodes))
        return self.builder.pieces(self.function, merged)

    def parts(self, regions: Sequence[tuple[int, ...]]) -> list[tuple[Function, list[np.ndarray]]]:
        """Each region as a Function, with the values that it gets in a run of the model."""
        body = self.function.body
        clusters = tuple(Cluster(self.engines[0], nodes, "cpu") for nodes in regions)
        outlined = outline(body, Clustering(clusters, {}, len(body.nodes)))
        known = dict(zip(body.inputs, self.arrays, strict=True))
        found = []
        for n in outlined.nodes:
            function = n.attributes["function"]
            assert isinstance(function, Function)
            given = [known.get(v, v.data) for v in n.inputs if v is not None]
            made = ReferenceExecutor(function).run(given)
            known.update({v: np.ascontiguousarray(y) for v, y in zip(n.outputs, made, strict=True) if v is not None})
            found.append((function, [np.asarray(x) for x in given]))
        return found


def row(name: str, file: str, inputs: Mapping[str, Any], args: argparse.Namespace) -> str:
    """The measurements of one model as a row of the table. Raises XRTError where XRT cannot run it."""
    model = Model(file, inputs, args.engines, args.threads)
    body = model.function.body
    whole_on = [e for e in args.engines if model.takes(e, body.nodes)]
    wholes = {e: model.builder.executable(model.function, e) for e in args.engines}
    marks = ["" if e in whole_on else " (part)" for e in args.engines]
    regions = regions_of(body)
    if len(regions) < 2 and args.cuts > 1:
        regions = cuts_of(body, args.cuts)
    nodes = [r for _, r in regions]
    if len(convex_partition(body, range(len(body.nodes)))[1]) != 1 or len(nodes) < 2:
        taken = least({e: lambda x=x: x.run(model.arrays) for e, x in wholes.items()}, args.seconds, args.threads)  # type: ignore[misc]
        shown = " | ".join(f"{taken[e] * 1e3:.2f}{m}" for e, m in zip(args.engines, marks, strict=True))
        return f"| {name} | {shown} | one region ({regions[0][0]}) | | | |"
    times = []
    for function, given in model.parts(nodes):
        able = [e for e in args.engines if model.takes(e, function.body.nodes)]
        if not able:
            return f"| {name} | | no engine takes a whole region | | | |"
        made = {e: model.builder.at_host(model.builder.executable(function, e, shared=True), e) for e in able}
        times.append(least({e: lambda x=x, g=given: x.run(g) for e, x in made.items()}, args.seconds / 3, args.threads))  # type: ignore[misc]
    best_parts = min(
        (e for e in args.engines if all(e in t for t in times)), key=lambda e: sum(t[e] for t in times), default=None
    )
    calls: dict[str, Callable[[], Any]] = {e: lambda x=x: x.run(model.arrays) for e, x in wholes.items()}  # type: ignore[misc]
    # pieces on one engine are merged when they are planned: to see what a cut costs they are built one by one
    over = 0.0
    if best_parts is not None:
        cut = model.builder.pieces(model.function, [Piece(best_parts, r) for r in nodes])
        calls["cut"] = lambda: cut.run(model.arrays)
        taken = least({"whole": calls[best_parts], "cut": calls["cut"]}, args.seconds / 2, args.threads)
        over = max(taken["cut"] - taken["whole"], 0.0) / (len(nodes) - 1)
    on = plan(times, over)
    mixed = model.pieces(nodes, on)
    calls["mixed"] = lambda: mixed.run(model.arrays)
    taken = least(calls, args.seconds, args.threads)
    best = min(args.engines, key=lambda e: taken[e])
    cost = sum(t[e] for t, e in zip(times, on, strict=True)) + over * sum(a != b for a, b in pairwise(on))
    shown = " | ".join(f"{taken[e] * 1e3:.2f}{m}" for e, m in zip(args.engines, marks, strict=True))
    who = ", ".join(f"{kind} ({len(r)}) {e}" for (kind, r), e in zip(regions, on, strict=True))
    ends = f"{over * 1e6:.0f} | {cost / taken[best]:.2f} | {taken['mixed'] / taken[best]:.2f}"
    return f"| {name} | {shown} | {who} | {ends} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", metavar="MODEL")
    parser.add_argument("--models", type=pathlib.Path, help="a folder of ONNX files")
    parser.add_argument("--shape", action="append", default=[], help="of an input, or the size of a dimension by name")
    parser.add_argument("--engines", nargs="+", default=["onnxruntime", "openvino", "xla"])
    parser.add_argument("--cuts", type=int, default=1, help="parts of equal work that a model of one kind is cut into")
    parser.add_argument("--threads", type=int, default=usable_processors())
    parser.add_argument("--seconds", type=float, default=6.0, help="of timing for each comparison")
    args = parser.parse_args()
    print(f"{machine()}; {args.threads} threads; {versions()}\n")
    heads = [f"{e} (ms)" for e in args.engines]
    print(f"| model | {' | '.join(heads)} | regions (nodes), who runs them | a cut (us) | planned | mixed |")
    print(f"|{'---|' * (len(heads) + 5)}")
    with tempfile.TemporaryDirectory() as folder:
        named, args.names = args.names, [n for n in args.names if n != "conv_scan"]
        found = [conv_scan(pathlib.Path(folder))] if not named or len(named) > len(args.names) else []
        found += models(args) if args.names or not named else []
        for name, file, inputs in found:
            try:
                print(row(name, file, inputs, args), flush=True)
            except XRTError as e:
                print(f"| {name} | {type(e).__name__}: {str(e).splitlines()[0][:120]} |", flush=True)


if __name__ == "__main__":
    main()

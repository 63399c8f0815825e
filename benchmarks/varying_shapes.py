"""Requests whose batch and length differ at every call, through XRT and through one session of ONNX Runtime.

    python benchmarks/varying_shapes.py [--engine onnxruntime] [--requests 60] [--layers 6] [--guard 0|1] [--host]
    python benchmarks/varying_shapes.py --engine xla --buckets auto --host
    python benchmarks/varying_shapes.py --engine auto --apart 3

The model is an encoder like all-MiniLM-L6 (6 layers, 384 wide, 12 heads, vocabulary 30522, random weights) with the
shape arithmetic that exporters write. Requests come to both sides in turn, so that a busy machine slows both; the first
call of each is in the total. With `--host` each request is timed through the host alone as well, beside the others: its
first call, which plans for these sizes, and its second. What the process holds then counts the host's plans too.

ONNX Runtime's threads spin for 20 ms and more after a run, and take a processor from the side that comes next. With
`--apart N` each side has a process of its own, in which the requests come at full rate, N times in turns; the medians
are compared. Processor time is that of the process and its workers. With `--kept` XRT's processes share a cache, as
processes of one user do, which one that does not count fills before.

What starts cold is told about packages that are compiled to bytecode, as pip leaves them: run `python -m compileall`
over a working tree before (with PYTHONDONTWRITEBYTECODE set, Python compiles XRT's modules anew in each process).
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


class _Builder:
    """Nodes and weights of an ONNX graph, named by numbers."""

    def __init__(self, seed: int) -> None:
        self.nodes: list[Any] = []
        self.weights: list[Any] = []
        self._rng = np.random.default_rng(seed)

    def op(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, [name], name=f"{op_type}_{len(self.nodes)}", **attributes))
        return name

    def constant(self, array: Any, dtype: Any = np.int64) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(array, dtype), name))
        return name

    def weight(self, *shape: int) -> str:
        return self.constant(self._rng.standard_normal(shape) * 0.05, np.float32)

    def size(self, x: str, axis: int) -> str:
        """One size of `x`, as exporters read it: a tensor of one element."""
        scalar = self.op("Gather", self.op("Shape", x), self.constant(axis), axis=0)
        return self.op("Unsqueeze", scalar, self.constant([0]))

    def linear(self, x: str, width: int, out: int) -> str:
        return self.op("Add", self.op("MatMul", x, self.weight(width, out)), self.weight(out))

    def norm(self, x: str, width: int) -> str:
        return self.op("LayerNormalization", x, self.constant(np.ones(width), np.float32), self.weight(width))


def encoder(layers: int = 6, width: int = 384, heads: int = 12, words: int = 30522, seed: int = 0) -> onnx.ModelProto:
    """An encoder of sentences: ids and mask [batch, length] of int64 -> normalised mean [batch, width]."""
    b = _Builder(seed)
    batch, length = b.size("ids", 0), b.size("ids", 1)
    positions = b.op("Slice", b.constant(np.arange(512)[None]), b.constant([0]), length, b.constant([1]))
    x = b.op("Add", b.op("Gather", b.weight(words, width), "ids"), b.op("Gather", b.weight(512, width), positions))
    x = b.norm(x, width)
    mask = b.op("Cast", b.op("Unsqueeze", "mask", b.constant([1, 2])), to=TensorProto.FLOAT)
    bias = b.op("Mul", b.op("Sub", b.constant(1.0, np.float32), mask), b.constant(-1e4, np.float32))
    each = width // heads
    for _ in range(layers):
        split = b.op("Concat", batch, length, b.constant([heads]), b.constant([each]), axis=0)
        q, k, v = (
            b.op("Transpose", b.op("Reshape", b.linear(x, width, width), split), perm=perm)
            for perm in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3])
        )
        scores = b.op("Div", b.op("MatMul", q, k), b.constant(each**0.5, np.float32))
        attended = b.op("MatMul", b.op("Softmax", b.op("Add", scores, bias), axis=-1), v)
        merged = b.op("Concat", batch, length, b.constant([width]), axis=0)
        joined = b.op("Reshape", b.op("Transpose", attended, perm=[0, 2, 1, 3]), merged)
        x = b.norm(b.op("Add", x, b.linear(joined, width, width)), width)
        inner = b.linear(x, width, 4 * width)
        erf = b.op("Erf", b.op("Div", inner, b.constant(2**0.5, np.float32)))
        half = b.op(
            "Mul", inner, b.op("Mul", b.op("Add", erf, b.constant(1.0, np.float32)), b.constant(0.5, np.float32))
        )
        x = b.norm(b.op("Add", x, b.linear(half, 4 * width, width)), width)
    weights = b.op("Unsqueeze", b.op("Cast", "mask", to=TensorProto.FLOAT), b.constant([2]))
    total = b.op("ReduceSum", b.op("Mul", x, weights), b.constant([1]), keepdims=0)
    mean = b.op("Div", total, b.op("ReduceSum", weights, b.constant([1]), keepdims=0))
    b.nodes.append(helper.make_node("LpNormalization", [mean], ["out"], axis=-1, p=2))
    tokens = [helper.make_tensor_value_info(n, TensorProto.INT64, ["batch", "length"]) for n in ("ids", "mask")]
    out = helper.make_tensor_value_info("out", TensorProto.FLOAT, ["batch", width])
    graph = helper.make_graph(b.nodes, "encoder", tokens, [out], b.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def requests(count: int, words: int = 30522, seed: int = 1) -> list[dict[str, np.ndarray]]:
    """Random requests: batch 1 to 8, length 3 to 256."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        b, n = int(rng.integers(1, 9)), int(rng.integers(3, 257))
        mask = (np.arange(n) < rng.integers(3, n + 1, (b, 1))).astype(np.int64)
        made.append({"ids": rng.integers(0, words, (b, n)), "mask": mask})
    return made


def resident() -> float:
    """MB of memory that this process holds; pages that are mapped twice, as a model's file may be, count once."""
    try:
        rows = pathlib.Path("/proc/self/smaps_rollup").read_text().splitlines()
        return next(int(row.split()[1]) for row in rows if row.startswith("Pss:")) * 1024 / 1e6
    except (OSError, StopIteration):
        pass
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def processor_seconds() -> float:
    """Processor time of this process and its children, running and ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = time.process_time() + ended.ru_utime + ended.ru_stime
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            row = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:  # it has ended
            continue
        if int(row[1]) == os.getpid():
            total += (int(row[11]) + int(row[12])) / os.sysconf("SC_CLK_TCK")
    return total


def alone(side: str, path: pathlib.Path, work: list[dict[str, np.ndarray]], more: dict[str, Any]) -> None:
    """All requests through one side, and what they took as a line of JSON."""
    import onnxruntime as ort

    import xrt_core as xrt

    settings = ort.SessionOptions()
    settings.log_severity_level = 3
    module = None
    start, used = time.perf_counter(), processor_seconds()
    if side == "onnxruntime":
        session = ort.InferenceSession(path, settings)
        call: Any = lambda inputs: session.run(None, inputs)  # noqa: E731
    else:
        module = xrt.XRTModule(path, **more)
        call = module.run
    begin, memory = time.perf_counter(), []
    seconds = begin - start
    for inputs in work:
        begin = time.perf_counter()
        call(inputs)
        seconds += time.perf_counter() - begin
        memory.append(resident())
    used = processor_seconds() - used
    live = (
        0 if module is None else next((c["host_calls"] for c in module.report().clusters if c["chosen"] != "host"), -1)
    )
    if module is not None:
        module.wait(300)
    begin = time.perf_counter()
    for inputs in work:
        call(inputs)
    again = time.perf_counter() - begin
    after = memory[-1] - memory[min(9, len(memory) - 1)]
    print(json.dumps({"total": seconds, "processor": used, "again": again, "after_tenth_mb": after, "by_host": live}))


def apart(rounds: int, given: Sequence[str]) -> None:
    """Run each side in processes of its own, in turns, and print one line of JSON."""
    found: dict[str, list[dict[str, float]]] = {"onnxruntime": [], "xrt": []}
    if "--kept" in given:
        given = [*given, "--cache", tempfile.mkdtemp(prefix="xrt-shapes-cache-")]
        subprocess.run([sys.executable, __file__, *given, "--only", "xrt"], check=True, capture_output=True)
    for k in range(rounds):
        for side in sorted(found, reverse=bool(k % 2)):
            command = [sys.executable, __file__, *given, "--only", side]
            said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found[side].append(json.loads(said.splitlines()[-1]))
    middle = {s: {k: statistics.median(row[k] for row in rows) for k in rows[0]} for s, rows in found.items()}
    row: dict[str, Any] = {s: {k: round(v, 2) for k, v in values.items()} for s, values in middle.items()}
    for k in ("total", "processor", "again"):
        row[f"ratio_{k}"] = round(middle["xrt"][k] / middle["onnxruntime"][k], 3)
    print(json.dumps(row))


def main(given: Sequence[str] | None = None) -> None:
    """Measure, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--engine", default="onnxruntime")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--guard", type=int, default=1)
    parser.add_argument("--declared", action="store_true", help="give shapes= rather than have them discovered")
    parser.add_argument("--buckets", default="off")
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--explain", action="store_true")
    parser.add_argument("--apart", type=int, default=0, help="rounds of a process for each side")
    parser.add_argument("--kept", action="store_true", help="with --apart: a cache that an earlier process filled")
    parser.add_argument("--cache", help=argparse.SUPPRESS)
    parser.add_argument("--only", choices=("onnxruntime", "xrt"), help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if options.apart and options.only is None:
        apart(options.apart, sys.argv[1:] if given is None else given)
        return

    import onnxruntime as ort

    import xrt_core as xrt

    path = pathlib.Path(tempfile.mkdtemp(prefix="xrt-shapes-")) / "encoder.onnx"
    onnx.save(encoder(options.layers), path)
    more: dict[str, Any] = {"buckets": options.buckets} | ({} if options.guard else {"guard": False})
    if options.declared:
        more["shapes"] = {"ids": ("batch", "length"), "mask": ("batch", "length")}
    work = requests(options.requests)
    if options.only is not None:
        more |= {"cache": "off"} if options.cache is None else {"cache_dir": options.cache}
        alone(options.only, path, work, {"engine": options.engine.split(","), **more})
        return
    seconds: dict[str, list[float]] = {"onnxruntime": [], "xrt": []}
    settings = ort.SessionOptions()
    settings.log_severity_level = 3

    by_host: dict[str, list[float]] = {"slowest_to_host": [], "slowest_to_host_first": []}
    host = xrt.XRTModule(path, engine="host", cache="off") if options.host else None
    begin = time.perf_counter()
    session = ort.InferenceSession(path, settings)
    seconds["onnxruntime"].append(time.perf_counter() - begin)
    session.run(None, work[0])
    before = resident()
    begin = time.perf_counter()
    module = xrt.XRTModule(path, engine=options.engine.split(","), cache="off", **more)
    seconds["xrt"].append(time.perf_counter() - begin)
    memory: list[float] = []
    worst = 0.0
    for i, inputs in enumerate(work):
        sides = [("onnxruntime", lambda x: session.run(None, x)[0]), ("xrt", lambda x: module.run(x)["out"])]
        results = {}
        for name, call in sides if i % 2 else sides[::-1]:
            begin = time.perf_counter()
            results[name] = call(inputs)
            seconds[name].append(time.perf_counter() - begin)
        worst = max(worst, float(np.abs(results["xrt"] - results["onnxruntime"]).max()))
        for name in reversed(by_host) if host is not None else ():  # the first call of these sizes plans for them
            begin = time.perf_counter()
            host.run(inputs)
            by_host[name].append(time.perf_counter() - begin)
        memory.append(resident() - before)
    module.wait(300)
    again = {"onnxruntime": 0.0, "xrt": 0.0}
    for inputs in work:  # every signature once more
        for name, call in (("xrt", module.run), ("onnxruntime", lambda x: session.run(None, x))):
            begin = time.perf_counter()
            call(inputs)
            again[name] += time.perf_counter() - begin
    totals = {name: sum(s) for name, s in seconds.items()}
    row = {
        "engine": options.engine,
        "requests": len(work),
        "total_s": {k: round(v, 2) for k, v in totals.items()},
        "ratio": round(totals["xrt"] / totals["onnxruntime"], 3),
        "ratio_again": round(again["xrt"] / again["onnxruntime"], 3),
        "slowest_call": round(
            max(x / o for x, o in zip(seconds["xrt"][1:], seconds["onnxruntime"][1:], strict=True)), 1
        ),
        **{
            name: round(max(x / h for x, h in zip(seconds["xrt"][1:], times, strict=True)), 1)
            for name, times in by_host.items()
            if times
        },
        "executables": sum(e.name == ("guard.live" if options.guard else "compile") for e in module.events),
        "memory_mb": {f"after {k}": round(memory[min(k, len(memory)) - 1]) for k in (1, 2, 10, len(memory))},
        "worst_difference": worst,
    }
    print(json.dumps(row))
    if options.explain:
        print(module.explain())
        print(module.guard_report() if hasattr(module, "guard_report") else "")


if __name__ == "__main__":
    main()

"""XRT beside ONNX Runtime and OpenVINO used directly, on the development models or on any folder of ONNX files.

    python benchmarks/inference.py [MODEL ...] [--models FOLDER] [--shape NAME=DIM,...] [--engines NAME ...]
                                   [--threads N] [--seconds S] [--json FILE]

For each model one process holds: a session of ONNX Runtime, a second one (the control: what the two differ by is
noise), OpenVINO's compiled model (fixed to the same sizes, computing in the model's types), the module with no engine
named, and a module for each engine (`guard=False`). They take turns, in an order that is shuffled, with a rest before
each turn, in which threads that spin for the one before come to rest. Ratios are medians of the rounds' ratios, with
the interval that 95 % of 2000 resampled medians lie in. Inputs of a folder's models are random, and dimensions that
the model leaves open 1 unless --shape says otherwise. "off" is how far the module's outputs are from ONNX Runtime's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import exported
import numpy as np
from cpu_engines import DIRECT, REST, model_of

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from tests.conformance import dev_models
from xrt_core.cli.inputs import parse_shapes, random_inputs
from xrt_core.compiler.services import usable_processors
from xrt_core.errors import XRTError
from xrt_core.module import XRTModule

Call = Callable[[], Any]
AUTO, CONTROL = "no engine named", "control"
LEAST_ROUNDS, BATCH = 9, 20e-3
RESAMPLED = 2000


@dataclass
class Row:
    """What was measured of one model: milliseconds of a call by contender, ratios with their intervals, who runs it."""

    model: str
    milliseconds: dict[str, float] = field(default_factory=dict)
    ratios: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    chosen: str = ""
    off: float = 0.0
    missing: dict[str, str] = field(default_factory=dict)


def rounds(calls: Mapping[str, Call], seconds: float) -> dict[str, list[float]]:
    """Seconds of a call, by contender and round."""
    counts = {}
    for name, call in calls.items():
        call()
        start = time.perf_counter()
        call()
        counts[name] = max(1, int(BATCH / max(time.perf_counter() - start, 1e-6)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    shuffle, end = random.Random(0), time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[next(iter(calls))]) < LEAST_ROUNDS:
        for name in shuffle.sample(list(calls), len(calls)):
            time.sleep(REST)
            call, count = calls[name], counts[name]
            for _ in range(1 + count // 4):
                call()
            start = time.perf_counter()
            for _ in range(count):
                call()
            times[name].append((time.perf_counter() - start) / count)
    return times


def ratio(one: Sequence[float], other: Sequence[float]) -> tuple[float, float, float]:
    """The median of the rounds' ratios, and the ends of its interval."""
    each = np.array(one) / np.array(other)
    drawn = np.random.default_rng(0).choice(each, (RESAMPLED, len(each)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return float(np.median(each)), float(low), float(high)


def measure(
    name: str, file: str, inputs: Mapping[str, Any], engines: Sequence[str], threads: int, seconds: float
) -> Row:
    """One row of the table. Raises XRTError where XRT cannot run the model."""
    row, calls = Row(name), dict[str, Call]()
    for label, library in (*((e, e) for e in DIRECT), (CONTROL, "onnxruntime")):
        try:
            call = DIRECT[library](file, dict(inputs), threads)
            call()
            calls[label] = call
        except Exception as e:  # a library that does not take the model
            row.missing[label] = f"{type(e).__name__}: {str(e).splitlines()[0][:80] if str(e) else ''}"
    with contextlib.ExitStack() as stack:
        start = XRTModule(file, threads=threads, cache=False)
        modules = {AUTO: start} | {
            f"XRT on {e}": XRTModule(file, engine=[e], threads=threads, cache=False, guard=False) for e in engines
        }
        for label, m in modules.items():
            stack.enter_context(m)
            for _ in range(2):  # control flow comes to new clusters with the second call
                got = m.run(inputs)
                m.wait()
            calls[label] = lambda m=m: m.run(inputs)  # type: ignore[misc]
        got = start.run(inputs)
        if "onnxruntime" in calls:
            row.off = max(map(distance, got.values(), calls["onnxruntime"]()), default=0.0)
        times = rounds(calls, seconds)
        clusters = start.report().clusters
        row.chosen = ", ".join(sorted({c["chosen"] if c["state"] == "live" else "host" for c in clusters})) or "host"
    row.milliseconds = {n: statistics.median(t) * 1e3 for n, t in times.items()}
    direct = [n for n in DIRECT if n in times]
    if direct:
        best = min(direct, key=lambda n: row.milliseconds[n])
        row.ratios["auto / best direct"] = ratio(times[AUTO], times[best])
    for e in engines:
        if e in times:
            row.ratios[f"{e} / itself"] = ratio(times[f"XRT on {e}"], times[e])
        elif "onnxruntime" in times:
            row.ratios[f"{e} / onnxruntime"] = ratio(times[f"XRT on {e}"], times["onnxruntime"])
    if "onnxruntime" in times:
        row.ratios["auto / onnxruntime"] = ratio(times[AUTO], times["onnxruntime"])
        row.ratios["control"] = ratio(times[CONTROL], times["onnxruntime"])
    return row


def distance(one: Any, other: Any) -> float:
    """The largest difference, relative to the largest number of either; 0 for what is no array of numbers."""
    a, b = np.asarray(one), np.asarray(other)
    if a.dtype.kind not in "iufb" or a.shape != b.shape or not a.size:
        return 0.0 if a.shape == b.shape else float("inf")
    a, b = a.astype(np.float64), b.astype(np.float64)
    if not (np.isfinite(a) == np.isfinite(b)).all():
        return float("inf")
    finite = np.isfinite(a)
    return float(np.abs(a - b)[finite].max(initial=0.0) / max(np.abs(b[finite]).max(initial=0.0), 1e-12))


def machine() -> str:
    """Processor, its instructions for vectors, threads and load."""
    flags: set[str] = set()
    model = platform.processor()
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = (part.strip() for part in line.partition(":"))
            if key == "model name":
                model = value
            elif key == "flags":
                flags = set(value.split())
    known = [f for f in ("avx2", "fma", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_tile") if f in flags]
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    cores = f"{usable_processors()} of {os.cpu_count()} cores"
    return f"{model}, {cores} ({' '.join(known)}){load}, Python {platform.python_version()}"


def versions() -> str:
    """Of the libraries that take part."""
    found = []
    for name in ("onnxruntime", "openvino", "jax", "numpy", "onnx"):
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return ", ".join(found)


def models(args: argparse.Namespace) -> list[tuple[str, str, Mapping[str, Any]]]:
    """Names, files and inputs."""
    if args.models is None:
        found = [(n, model_of(n)) for n in args.names or [*dev_models.names(), *exported.NAMES]]
        return [(n, *f) for n, f in found if f is not None]
    made = []
    for path in sorted(args.models.rglob("*.onnx")):
        if args.names and path.stem not in args.names:
            continue
        try:
            with XRTModule(path, engine="host") as m:
                types = {n: t for n, t in m.input_types.items() if n not in m.optional_inputs}
            asked = [s for s in args.shape if s.partition("=")[0] in str(types)]
            made.append((path.stem, str(path), random_inputs(types, parse_shapes(asked, types), 0)))
        except XRTError as e:
            print(f"{path.name}: {type(e).__name__}: {e}", file=sys.stderr)
    return made


def main() -> None:
    """Print the table, and the geometric means."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", metavar="MODEL")
    parser.add_argument("--models", type=pathlib.Path, help="a folder of ONNX files")
    parser.add_argument("--shape", action="append", default=[], help="of an input, or the size of a dimension by name")
    parser.add_argument("--engines", nargs="*", default=["onnxruntime", "openvino", "xla"])
    parser.add_argument("--threads", type=int, default=usable_processors())
    parser.add_argument("--seconds", type=float, default=10.0, help="of timing for each model")
    parser.add_argument("--json", type=pathlib.Path, help="a file for everything that was measured")
    args = parser.parse_args()
    print(f"{machine()}; {args.threads} threads; {versions()}\n")
    rows: list[Row] = []
    columns: list[str] = []
    for name, file, inputs in models(args):
        try:
            row = measure(name, file, inputs, args.engines, args.threads, args.seconds)
        except XRTError as e:
            print(f"| {name} | {type(e).__name__}: {str(e).splitlines()[0]} |", flush=True)
            continue
        if not columns:
            columns = ["auto / best direct", "auto / onnxruntime"]
            columns += [f"{e} / {'itself' if e in DIRECT else 'onnxruntime'}" for e in args.engines] + ["control"]
            heads = ["model", "ONNX Runtime (ms)", "OpenVINO (ms)", "auto (ms)", "runs on", *columns, "off"]
            print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
        rows.append(row)
        times = [f"{row.milliseconds[n]:.2f}" if n in row.milliseconds else "none" for n in (*DIRECT, AUTO)]
        shown = ["{:.3f} ({:.2f} to {:.2f})".format(*row.ratios[c]) if c in row.ratios else "" for c in columns]
        print(f"| {' | '.join([name, *times, row.chosen, *shown, f'{row.off:.1e}'])} |", flush=True)
    for column in columns:
        found = [r.ratios[column][0] for r in rows if column in r.ratios]
        if found:
            mean, worst = statistics.geometric_mean(found), max(found)
            print(f"\n{column}: geometric mean {mean:.3f}, worst {worst:.3f}, of {len(found)} models", end="")
    print(f"\n\n{machine()}")
    if args.json:
        args.json.write_text(json.dumps([asdict(r) for r in rows], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()

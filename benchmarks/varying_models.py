"""Any ONNX model over random sizes, beside one session of ONNX Runtime, each side in a process of its own.

    python benchmarks/varying_models.py MODEL --range h=140:260 --range w=160:352:32 [--calls 24] [--passes 4]
        [--sides library,onnxruntime,guarded,default]

A range is LOW:HIGH, or LOW:HIGH:STEP.

The same calls several times: a pass each. library: one session of ONNX Runtime. onnxruntime: the engine with
`guard=False`. guarded: the engine under guard. default: no engine named, under guard. Between passes a guarded module
is waited for. Inputs are uniform in [0, 1), integers 0 or 1; a dimension that is not named by --range is 1. Prints for
each side and pass the median and the slowest call in ms, and the seconds of the wait after it.
"""

from __future__ import annotations

import argparse
import logging
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx

SIDES = ("library", "onnxruntime", "guarded", "default")


def calls_of(model: onnx.ModelProto, ranges: Sequence[str], count: int) -> list[dict[str, np.ndarray]]:
    """Inputs of `count` calls."""
    rng, draw = np.random.default_rng(1), random.Random(1)
    ends = {name: tuple(map(int, r.split(":"))) for name, _, r in (text.partition("=") for text in ranges)}
    weights = {t.name for t in model.graph.initializer}
    made = []
    for _ in range(count):
        sizes = {name: draw.randrange(low, high + 1, *step) for name, (low, high, *step) in ends.items()}
        arrays = {}
        for v in model.graph.input:
            t = v.type.tensor_type
            shape = [d.dim_value or sizes.get(d.dim_param, 1) for d in t.shape.dim]
            dtype = onnx.helper.tensor_dtype_to_np_dtype(t.elem_type)
            values = rng.random(shape) if dtype.kind == "f" else rng.integers(0, 2, shape)
            if v.name not in weights:
                arrays[v.name] = values.astype(dtype)
        made.append(arrays)
    return made


def side_of(side: str, path: str, cache: str) -> tuple[Callable[[dict[str, np.ndarray]], Any], Callable[[], Any]]:
    """What makes a call, and what waits for executables."""
    if side == "library":
        import onnxruntime

        settings = onnxruntime.SessionOptions()
        settings.log_severity_level = 3
        session = onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])
        return lambda arrays: session.run(None, arrays), lambda: None
    import xrt_core as xrt

    logging.getLogger("xrt").setLevel(logging.ERROR)
    options: dict[str, Any] = {} if side == "default" else {"engine": "onnxruntime", "guard": side == "guarded"}
    module = xrt.XRTModule(path, cache_dir=cache, **options)
    return module.run, lambda: module.wait() if side != "onnxruntime" else None


def run(side: str, path: str, ranges: Sequence[str], count: int, passes: int) -> None:
    """One side, in this process."""
    given = calls_of(onnx.load(path), ranges, count)
    with tempfile.TemporaryDirectory() as cache:
        call, wait = side_of(side, path, cache)
        for k in range(passes):
            took = []
            for arrays in given:
                start = time.perf_counter()
                call(arrays)
                took.append((time.perf_counter() - start) * 1e3)
            start = time.perf_counter()
            wait()
            waited = time.perf_counter() - start
            shown = f"median {statistics.median(took):7.1f}, slowest {max(took):7.1f} ms; wait {waited:.1f} s"
            print(f"{side:12} pass {k + 1}: {shown}", flush=True)


def main() -> None:
    """Read the arguments, and run each side in a process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--range", action="append", default=[], dest="ranges")
    parser.add_argument("--calls", type=int, default=24)
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--here", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sides = args.sides.split(",")
    if unknown := set(sides) - set(SIDES):
        parser.error(f"--sides: {', '.join(sorted(unknown))}; there are {', '.join(SIDES)}")
    if wrong := [r for r in args.ranges if not re.fullmatch(r"\w+=\d+:\d+(:[1-9]\d*)?", r)]:
        parser.error(f"--range {wrong[0]}: a name, two sizes and perhaps a step, as in h=140:260 or h=160:352:32")
    if args.here:
        run(args.here, args.model, args.ranges, args.calls, args.passes)
        return
    for side in sides:
        subprocess.run([sys.executable, *sys.argv, "--here", side], check=True)


if __name__ == "__main__":
    main()

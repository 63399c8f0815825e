"""Whole models on a GPU: XRT on TensorRT and on XLA, its host op by op (CuPy), trtexec and Torch-TensorRT.

    python benchmarks/gpu_models.py [MODEL ...] [--engines tensorrt xla] [--device cuda] [--seconds 1]

Models are those of exported.py and tests/conformance/dev_models.py. Inputs lie on the GPU (CuPy's arrays, where CuPy is
installed), calls are queued, and the GPU is waited for at the end of each round; the rounds take turns. `trtexec` (or
TensorRT-RTX's `tensorrt_rtx`) takes part where it is on the path, with its own mean of the GPU's time; Torch-TensorRT
where it is installed, for the exported models. What is not there is named on the error stream. `--device cpu` runs the
same on the CPU with engines of the CPU, to try the script.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import exported
import numpy as np
from cpu_engines import model_of
from gpu_calls import libraries
from rounds import interleaved

from xrt_core.errors import XRTError
from xrt_core.module import XRTModule

ROUNDS = 7
_TRTEXEC = ("trtexec", "tensorrt_rtx")
_MEAN = re.compile(r"GPU Compute Time:.*?mean = ([0-9.]+) ms")


def on_gpu() -> tuple[Callable[[np.ndarray], Any], Callable[[], None]]:
    """A way to arrays on the GPU, CuPy's if it is there, then torch's, and the wait for it."""
    ways = {name: (array, settle) for name, array, settle, _ in libraries()}
    return next(ways[n] for n in ("cupy", "torch", "numpy") if n in ways)


def milliseconds(
    calls: Mapping[str, Callable[[], Any]], settle: Callable[[], None], seconds: float
) -> dict[str, float]:
    """Median milliseconds of one of many queued calls, by name; the rounds alternate."""
    times = interleaved(list(calls.values()), rounds=ROUNDS, batch=seconds / ROUNDS, settle=settle)
    return {name: t.median * 1e3 for name, t in zip(calls, times, strict=True)}


def by_trtexec(file: str, inputs: Mapping[str, np.ndarray]) -> float | None:
    """TensorRT's own measurement of the file; None where its program is not there, or fails."""
    program = next(filter(None, map(shutil.which, _TRTEXEC)), None)
    if program is None:
        return None
    shapes = ",".join(f"{name}:{'x'.join(map(str, x.shape))}" for name, x in inputs.items() if x.ndim)
    command = [program, f"--onnx={file}", f"--shapes={shapes}", "--noDataTransfers"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = _MEAN.search(done.stdout)
    if found is None:
        print(f"{program} gives no time for {file} (exit {done.returncode})", file=sys.stderr)
    return float(found[1]) if found else None


def by_torch_tensorrt(name: str, inputs: Mapping[str, np.ndarray]) -> Callable[[], Any] | None:
    """The exported model compiled by Torch-TensorRT; None where that is not installed."""
    if name not in exported.NAMES:
        return None
    try:
        import torch
        import torch_tensorrt  # noqa: F401  it registers the backend
    except ImportError as e:
        print(f"no Torch-TensorRT: {e}", file=sys.stderr)
        return None
    module = torch.compile(exported.torch_module(name).cuda(), backend="torch_tensorrt")
    tensors = [torch.from_numpy(x).cuda() for x in inputs.values()]

    def call() -> Any:
        with torch.no_grad():
            return module(*tensors)

    return call


def row(name: str, engines: list[str], device: str, seconds: float) -> str | None:
    """The measurements of a model; None where the model is not there."""
    found = model_of(name)
    if found is None:
        return None
    file, inputs = found
    array, settle = on_gpu() if device == "cuda" else ((lambda x: x), (lambda: None))
    given = {k: array(x) for k, x in inputs.items()}
    calls: dict[str, Callable[[], Any]] = {}
    for engine in (*engines, "host"):
        try:
            module = XRTModule(file, engine=engine, device=device, guard=False)
            module.run(given)
        except XRTError as e:
            print(f"no {engine} for {name}: {e}", file=sys.stderr)
            continue
        calls[engine] = lambda m=module: m.run(given)
    if device == "cuda" and (peer := by_torch_tensorrt(name, inputs)) is not None:
        calls["Torch-TensorRT"] = peer
    took: dict[str, float | None] = dict(milliseconds(calls, settle, seconds))
    took["trtexec"] = by_trtexec(file, inputs) if device == "cuda" else None
    columns = [*engines, "host", "trtexec", "Torch-TensorRT"]
    return " | ".join(["", name, *("" if (ms := took.get(c)) is None else f"{ms:.3f}" for c in columns), ""]).strip()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--engines", nargs="*", default=["tensorrt", "xla"])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=1.0, help="of timing for each way of each model")
    options = parser.parse_args()
    columns = [*(f"XRT on {e} (ms)" for e in options.engines), "host (ms)", "trtexec (ms)", "Torch-TensorRT (ms)"]
    print(f"| model | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
    for name in options.models or exported.NAMES:
        if (line := row(name, options.engines, options.device, options.seconds)) is not None:
            print(line, flush=True)


if __name__ == "__main__":
    main()

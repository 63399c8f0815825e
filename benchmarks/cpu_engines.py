"""XRT on ONNX Runtime and on OpenVINO beside the two libraries used directly, interleaved in one process.

    python benchmarks/cpu_engines.py [--engine NAME] [--threads N] [--seconds S] [MODEL ...]

Models are those of tests/conformance/dev_models.py (the packages of tests/conformance/models.txt) and of exported.py;
those that are not there are left out. "Directly" is `InferenceSession.run` of the file, and for OpenVINO the call of
the file's compiled model, its inputs fixed to the same sizes, with the same properties. The goal is 1.03 of the direct
call plus 15 us, in wall clock. Where the machine is busy with other things, the least processor time of a call with one
thread (`--threads 1`, column "CPU ratio") tells more.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from typing import Any

import exported
import numpy as np
import onnx
from rounds import interleaved

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from tests.conformance import dev_models
from xrt_core.module import XRTModule

Call = Callable[[], Any]
ENGINES = ("onnxruntime", "openvino")
FACTOR, MICROSECONDS = 1.03, 15.0
REST = 0.05
"""Seconds between calls of the two: the threads of ONNX Runtime spin for a while, and would take the processor away."""


def model_of(name: str) -> tuple[str, dict[str, np.ndarray]] | None:
    """The file of a model and inputs by name; None where it is not there."""
    if name in exported.NAMES:
        file = exported.folder() / f"{name}.onnx"
        return (str(file), exported.inputs_for(name)) if file.exists() else None
    try:
        path, given = str(dev_models.path(name)), dev_models.inputs_for(name)
    except PackageNotFoundError:
        return None
    if name.startswith("light_"):  # they name their one input each in its own way, and list their weights as inputs
        graph = onnx.load(path).graph
        weights = {t.name for t in graph.initializer}
        given = dict(zip((i.name for i in graph.input if i.name not in weights), given.values(), strict=True))
    return path, given


def direct_onnxruntime(file: str, inputs: dict[str, np.ndarray], threads: int) -> Call:
    """A session of the file, called with a dictionary as its documentation has it."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, inputs)


def direct_openvino(file: str, inputs: dict[str, np.ndarray], threads: int) -> Call:
    """The compiled model of the file for these sizes, called with a list as its documentation has it."""
    from xrt_openvino import _toolkit

    model = _toolkit.core().read_model(file)
    arrays = list(inputs.values())
    model.reshape({port: list(x.shape) for port, x in zip(model.inputs, arrays, strict=True)})
    compiled = _toolkit.core().compile_model(model, "CPU", {**_toolkit.EXACT, "INFERENCE_NUM_THREADS": threads})
    return lambda: compiled(arrays)


DIRECT = {"onnxruntime": direct_onnxruntime, "openvino": direct_openvino}


def row(name: str, engine: str, threads: int, seconds: float) -> str | None:
    """The measurements of one model on one engine, as a row of the table; None where the model is not there."""
    found = model_of(name)
    if found is None:
        return None
    file, inputs = found
    module = XRTModule(file, engine=[engine], threads=threads, cache=False, guard=False)
    module.run(inputs)
    e = module.explain()
    start = f"| {name} | {engine} | {e.node_share:.0%} | {len(e.report.clusters)} |"
    try:
        direct = DIRECT[engine](file, inputs, threads)
        direct()
    except Exception as error:  # OpenVINO's reader does not take every model
        return f"{start} {type(error).__name__} | | | | | |"
    both: list[Call] = [lambda: module.run(inputs), direct]
    times = interleaved(both, rounds=7, seconds=seconds, batch=20e-3, warm=0.25, rest=REST)
    wall, cpu = ([of * 1e6 for of in found] for found in ([t.median for t in times], [min(t.cpu) for t in times]))
    over = wall[0] - wall[1]
    good = wall[0] <= FACTOR * wall[1] + MICROSECONDS
    return (
        f"{start} {wall[0]:.0f} | {wall[1]:.0f} | {wall[0] / wall[1]:.3f} | {over:+.0f} | {cpu[0] / cpu[1]:.3f} "
        f"| {'yes' if good else 'no'} |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--engine", choices=ENGINES, help="one engine; both by default")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=6.0, help="for each row")
    args = parser.parse_args()
    print(f"batch 1, {args.threads} threads; goal: at most {FACTOR} times the direct call plus {MICROSECONDS:.0f} us")
    print("| model | engine | on it | launches | XRT (us) | direct (us) | ratio | over (us) | CPU ratio | reached |")
    print(f"|{'---|' * 10}")
    for name in args.models or [*dev_models.names(), *exported.NAMES]:
        for engine in [args.engine] if args.engine else ENGINES:
            line = row(name, engine, args.threads, args.seconds)
            if line:
                print(line, flush=True)


if __name__ == "__main__":
    main()

"""What XRT adds to a TensorRT build: its way from a partitioned cluster to an engine, beside TensorRT's own.

    python benchmarks/tensorrt_build.py [--target sm_89] [--repeat 5] [MODEL ...]

For each model the same options on both sides, interleaved in one process, in CPU time and wall-clock time:

    own    parse_from_file of the model's file, and build_serialized_network
    xrt    TensorRTCompiler.compile of the cluster, from the Function to an Executable (partitioning is timed beside it)

The aim is a median ratio of at most 1.15. Needs no GPU with TensorRT-RTX. Models: see exported.py.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import exported
from rounds import interleaved
from xrt_tensorrt import TensorRTEngine, _toolkit
from xrt_tensorrt.settings import Settings

import xrt_core as xrt
from xrt_core.engine.contract import CompileOptions, Function

DEFAULT = ("mobilenetv2", "resnet50", "bert")


def own_build(path: str, target: str) -> int:
    """TensorRT's own parse and build; returns the engine's size."""
    toolkit = _toolkit.toolkit()
    trt = toolkit.trt
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    assert parser.parse_from_file(path), parser.get_error(0).desc()
    config = toolkit.configure(builder, Settings((target,)))
    return int(builder.build_serialized_network(network, config).nbytes)


def timed(function: Callable[[], Any]) -> tuple[float, float, Any]:
    """CPU seconds of the process, wall-clock seconds, and the result."""
    cpu, wall = time.process_time(), time.perf_counter()
    result = function()
    return time.process_time() - cpu, time.perf_counter() - wall, result


def cluster_of(path: str, name: str, target: str) -> tuple[Function, float]:
    """The model's one cluster, and the seconds that specialising and partitioning took."""
    module = xrt.XRTModule(path, engine="tensorrt", target=target, cache="off", guard=False)
    _, seconds, graph = timed(lambda: module.partitioned(exported.inputs_for(name)))
    functions = [f for n in graph.nodes if isinstance(f := n.attributes.get("function"), Function)]
    assert len(functions) == 1, f"{name} is {len(functions)} clusters"
    return functions[0], seconds


def main() -> None:
    """Print a table."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("models", nargs="*", default=DEFAULT, metavar="MODEL")
    arguments.add_argument("--target", default="sm_89")
    arguments.add_argument("--repeat", type=int, default=5)
    given = arguments.parse_args()
    toolkit = _toolkit.toolkit()
    print(f"{toolkit.flavour} {toolkit.version}, {given.target}, median of {given.repeat}")
    heads = ("own cpu s", "xrt cpu s", "ratio", "  own s", "  xrt s", " ratio", "partition s")
    print(f"{'model':12} {' '.join(heads)}")
    for name in given.models:
        path = str(exported.path(name))
        function, partition = cluster_of(path, name, given.target)
        compiler = TensorRTEngine().targeting(given.target).compiler("cuda:0", CompileOptions())
        compile = lambda c=compiler, f=function: c.compile(f, f.params, f.returns, f.aliases)  # noqa: E731
        both = [lambda p=path: own_build(p, given.target), compile]
        interleaved(both, rounds=1)  # the first of each loads and warms
        own, ours = interleaved(both, rounds=given.repeat)
        columns = []
        for k, (theirs, mine) in enumerate(((own.cpu, ours.cpu), (own.wall, ours.wall))):
            left, right = statistics.median(theirs), statistics.median(mine)
            ratio = statistics.median(o / w for o, w in zip(mine, theirs, strict=True))
            columns.append(f"{left:{(9, 7)[k]}.2f} {right:{(9, 7)[k]}.2f} {ratio:6.2f}")
        print(f"{name:12} {' '.join(columns)} {partition:11.2f}")


if __name__ == "__main__":
    main()

"""Overhead of calling a module on a GPU, over calling its executable directly on the same arrays and stream.

    python benchmarks/gpu_calls.py [engine ...]

For each engine that is usable on a GPU here, each library whose arrays it may be given (NumPy; CuPy and torch where
they are installed), and 1 and 5 inputs: the median time of a call, medians of interleaved rounds. Calls with arrays on
the GPU wait for nothing; the device is waited for after each round, and that is not timed. The direct call has its
arrays in the form that the engine takes; for TensorRT it is `execute_async_v3` with bound addresses. Goal: 15 us over
that.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from call_overhead import graph_of
from rounds import interleaved

from xrt_core.engine import engines
from xrt_core.engine.contract import CompileOptions, Function, RunOptions
from xrt_core.engine.device_kinds import CUDA
from xrt_core.errors import EngineError
from xrt_core.module import XRTModule
from xrt_core.runtime.arrays import family_of, to_numpy
from xrt_core.runtime.transfers import to_engine

CALLS, ROUNDS = (1, 2) if os.environ.get("XRT_GPU_REHEARSAL") else (100, 30)


def libraries() -> Iterator[tuple[str, Callable[[np.ndarray], Any], Callable[[], None], Callable[[], int | None]]]:
    """Name, a way to its arrays on the GPU, a wait for the GPU, and the current stream."""
    yield "numpy", lambda x: x, lambda: None, lambda: None
    try:
        import cupy

        if cupy.cuda.runtime.getDeviceCount():
            yield "cupy", cupy.asarray, cupy.cuda.Device().synchronize, lambda: cupy.cuda.get_current_stream().ptr
    except Exception as e:  # not installed, or no driver
        print(f"no cupy: {type(e).__name__}", file=sys.stderr)
    try:
        import torch

        if torch.cuda.is_available():
            yield (
                "torch", lambda x: torch.from_numpy(x).cuda(), torch.cuda.synchronize,
                lambda: torch.cuda.current_stream().cuda_stream,
            )  # fmt: skip
    except ImportError as e:
        print(f"no torch: {e}", file=sys.stderr)


def bare(executable: Any, arrays: list[Any], stream: int | None) -> Callable[[], Any]:
    """The least that a call can be: TensorRT's own where it is that, else the executable without a wait."""
    if type(arrays[0]) is np.ndarray:
        return lambda: [to_numpy(r) for r in executable.run(arrays)]
    options = RunOptions(stream=stream)
    results = executable.run(arrays, options)
    session = getattr(getattr(executable, "_local", None), "session", None)
    if session is None:
        return lambda: executable.run(arrays, options, False)
    from xrt_tensorrt.memory import own_stream

    context, handle = session._context, own_stream(0)
    held = arrays, results  # what is bound stays there while this is called
    return lambda _=held: context.execute_async_v3(handle)


def main(names: list[str]) -> None:
    """Print the table."""
    print("| engine | arrays | inputs | XRTModule (us) | direct (us) | overhead (us) |\n|---|---|---|---|---|---|")
    for name in names:
        try:
            engine = engines.usable(name)
        except EngineError as e:
            print(f"no {name}: {e}", file=sys.stderr)
            continue
        if not any(d.startswith("cuda") for d in engine.probe().devices):
            print(f"no {name}: it sees no GPU", file=sys.stderr)
            continue
        for library, array, settle, stream in libraries():
            for count in (1, 5):
                graph = graph_of(count)
                function = Function.from_graph(graph)
                made = engine.compiler("cuda:0", CompileOptions()).compile(
                    function, function.params, function.returns, ()
                )
                module = XRTModule(graph, engine=name, device="cuda", prune=False, guard=False)
                arrays = [array(np.full(8, i, np.float32)) for i in range(count)]
                module(*arrays)
                assert module.explain().node_share == 1.0, module.explain()
                taken = [to_engine(family_of(type(a)), engine.array_families, CUDA, 0)(a) for a in arrays]
                direct = bare(made, taken, stream())
                both = [lambda m=module, a=arrays: m(*a), direct]
                times = interleaved(both, rounds=ROUNDS, calls=CALLS, settle=settle)
                ours, theirs = (t.median * 1e6 for t in times)
                print(f"| {name} | {library} | {count} | {ours:.1f} | {theirs:.1f} | {ours - theirs:.1f} |")


if __name__ == "__main__":
    main(sys.argv[1:] or ["tensorrt", "xla"])

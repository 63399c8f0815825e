"""Compile once: the first and the second process with XRT's disk cache, JAX's persistent cache and ONNX Runtime.

    python benchmarks/disk_cache.py [NAME ...] [--rounds N]      # exported models, see exported.py

Each time is that of a process of its own, from its start to its first result, the interpreter's start included and its
end left out; CPU seconds, which tell more on a busy machine, are those of the whole process. Processes alternate and
the best of the rounds counts: what other programs on the machine take only adds. "First" has an empty cache, "second"
finds what the first left. JAX's process reads the model through XRT's frontend, jits all of it as one function and has
`jax_compilation_cache_dir` set: it still traces and lowers. ONNX Runtime builds its session anew.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from exported import NAMES, inputs_for, path


def as_xrt(name: str) -> dict[str, float]:
    """One process of XRT: milliseconds of its parts."""
    from xrt_core.module import XRTModule

    module = XRTModule(path(name), engine="xla", guard=False)
    module(*inputs_for(name).values())
    spans = {e.name: e.seconds * 1e3 for e in module.events if e.seconds is not None}
    return {k: spans[k] for k in ("compile", "cache.hit", "cache.stored") if k in spans}


def as_jax(name: str) -> dict[str, float]:
    """One process of JAX with its persistent cache: the model's nodes as one jitted function, weights as arguments."""
    import jax

    from xrt_core.ir.function import Function
    from xrt_core.ir.graph import Value
    from xrt_core.kernels import OpContext, find_kernel
    from xrt_core.module import XRTModule

    jax.config.update("jax_compilation_cache_dir", os.environ["JAX_CACHE"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    from whole_models import _conv

    inputs = list(inputs_for(name).values())
    caller = XRTModule(path(name), engine="xla", guard=False)._source.caller
    assert caller is not None
    nodes = caller.partition(inputs).graph.nodes  # XRT compiles nothing here
    (launch,) = (n for n in nodes if n.op_type == "Launch")
    function = launch.attributes["function"]
    assert isinstance(function, Function)
    body = function.body
    large = [v for v in body.constants if v.data is not None and v.data.nbytes > 4096]

    def run(inputs: list[Any], weights: list[Any]) -> list[Any]:
        values: dict[Value, Any] = dict(zip([*body.inputs, *large], [*inputs, *weights], strict=True))
        for n in body.nodes:
            found = find_kernel(n.domain, n.op_type)
            assert found is not None
            arguments = [
                None if v is None else v.data if i in found.static or v not in values else values[v]
                for i, v in enumerate(n.inputs)
            ]
            made = (_conv if n.op_type == "Conv" else found.function)(OpContext(n, jax.numpy), *arguments)
            values.update(zip([v for v in n.outputs if v], made if isinstance(made, tuple) else (made,), strict=False))
        return [values[v] for v in body.outputs]

    start = time.perf_counter()
    with jax.enable_x64(True):
        weights = [jax.device_put(v.data) for v in large]
        compiled = jax.jit(run).lower(inputs, weights).compile()
        made = (time.perf_counter() - start) * 1e3
        jax.block_until_ready(compiled(inputs, weights))
    return {"compile": made}


def as_ort(name: str) -> dict[str, float]:
    """One process of ONNX Runtime."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    start = time.perf_counter()
    session = ort.InferenceSession(str(path(name)), options, providers=["CPUExecutionProvider"])
    made = (time.perf_counter() - start) * 1e3
    session.run(None, inputs_for(name))
    return {"compile": made}


KINDS: dict[str, Callable[[str], dict[str, float]]] = {"xrt": as_xrt, "jax": as_jax, "ort": as_ort}


def process(kind: str, name: str, folder: pathlib.Path) -> dict[str, float]:
    """Run a process, with its total in seconds and what it said about its parts."""
    environment = {**os.environ, "XRT_CACHE_DIR": str(folder / "xrt"), "JAX_CACHE": str(folder / "jax")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # Python's own cache is part of what a second process finds
    start, used = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, __file__, "--child", kind, name], env=environment, capture_output=True, text=True, check=False
    )
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{kind} on {name} failed:\n{done.stderr}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    found["total"] = found.pop("there") - start
    return {**found, "cpu": now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime}


def best(runs: list[dict[str, float]], key: str) -> float:
    """The least of a figure over the rounds."""
    return min((r[key] for r in runs if key in r), default=float("nan"))


def measure(name: str, rounds: int) -> dict[str, Any]:
    """All figures of a model."""
    path(name)  # exported here, not within a measured process
    runs: dict[str, list[dict[str, float]]] = {k: [] for k in ("first", "second", "jax first", "jax second", "ort")}
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        for kind in KINDS:
            process(kind, name, folder)  # imports are compiled, files are in the system's memory
        for _ in range(rounds):
            for kind in ("xrt", "jax"):
                shutil.rmtree(folder / kind, ignore_errors=True)
            runs["first"].append(process("xrt", name, folder))
            runs["jax first"].append(process("jax", name, folder))
            runs["second"].append(process("xrt", name, folder))
            runs["jax second"].append(process("jax", name, folder))
            runs["ort"].append(process("ort", name, folder))
        size = sum(f.stat().st_size for f in (folder / "xrt").rglob("*.xrt"))
        assert all("cache.hit" in r and "compile" not in r for r in runs["second"]), runs["second"]
    return {"runs": runs, "bytes": size}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=list(NAMES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", nargs=2)
    arguments = parser.parse_args()
    if arguments.child:
        kind, name = arguments.child
        parts = KINDS[kind](name)
        print(json.dumps({**parts, "there": time.monotonic()}))  # a clock that all processes share
        return
    print(
        "| model | XRT first (s) | second (s) | ratio | its CPU (s) | its CPU (s) | ratio | compile (ms) | store (ms) "
        "| load (ms) | entry (kB) | JAX first (s) | second (s) | ratio | ORT (s) | session (ms) |"
    )
    print("|---" * 16 + "|")
    for name in arguments.names:
        found = measure(name, arguments.rounds)
        r = found["runs"]
        first, second = best(r["first"], "total"), best(r["second"], "total")
        cpu = best(r["first"], "cpu"), best(r["second"], "cpu")
        jax_first, jax_second = best(r["jax first"], "total"), best(r["jax second"], "total")
        print(
            f"| {name} | {first:.2f} | {second:.2f} | {second / first:.2f} "
            f"| {cpu[0]:.2f} | {cpu[1]:.2f} | {cpu[1] / cpu[0]:.2f} | {best(r['first'], 'compile'):.0f} "
            f"| {best(r['first'], 'cache.stored'):.0f} | {best(r['second'], 'cache.hit'):.0f} "
            f"| {found['bytes'] / 1e3:.0f} | {jax_first:.2f} | {jax_second:.2f} | {jax_second / jax_first:.2f} "
            f"| {best(r['ort'], 'total'):.2f} | {best(r['ort'], 'compile'):.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()

"""Whole models: XRT on XLA beside ONNX Runtime and the same graph hand-jitted in JAX, interleaved in one process.

    python benchmarks/whole_models.py [NAME ...]      # exported models (see exported.py) and installed light_* models

"Hand-jitted" is what a JAX user would write: one `jax.jit` of a function that calls each operator's jax.numpy form
(convolutions by `jax.lax`, NCHW), nothing of XRT's engine, plan or launch in it; the faster of weights as constants and
weights as arguments. Ratios are medians of interleaved calls.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from exported import NAMES, inputs_for, path
from rounds import interleaved

from xrt_core.ir.function import Function
from xrt_core.ir.graph import Value
from xrt_core.kernels import OpContext, find_kernel
from xrt_core.module import XRTModule

TARGETS = {"mobilenetv2": 2.0, "resnet50": 1.7, "bert": 1.25, "gpt2": 1.25, "vit": 1.25}
"""Largest accepted ratio to ONNX Runtime."""


def medians(functions: Sequence[Callable[[], Any]], seconds: float = 12.0) -> list[float]:
    """Median milliseconds of each function; calls alternate until the time is used up (at least 7 rounds).

    Each call is made twice and the second timed, after a pause: ONNX Runtime's threads go on spinning for a while after
    a call, and would take the processor from whoever comes next.
    """
    return [t.median * 1e3 for t in interleaved(functions, rounds=7, seconds=seconds, warm=1, rest=0.05)]


def hand_jitted(module: XRTModule, arrays: Sequence[np.ndarray]) -> list[Callable[[], Any]]:
    """The whole graph as one jitted JAX function, with the weights as constants and as arguments."""
    import jax

    caller = module._source.caller
    assert caller is not None
    (node,) = (n for n in caller.partition(arrays).graph.nodes if n.op_type == "Launch")
    function = node.attributes["function"]
    assert isinstance(function, Function)
    body = function.body
    weights = [v for v in body.constants if v.data is not None and v.data.nbytes > 4096]

    def run(inputs: Sequence[Any], given: Sequence[Any]) -> list[Any]:
        values: dict[Value, Any] = dict(zip(body.inputs, inputs, strict=True))
        values.update(zip(weights, given, strict=True))
        for n in body.nodes:
            found = find_kernel(n.domain, n.op_type)
            assert found is not None
            args = [
                None if v is None else v.data if i in found.static else values.get(v, v.data)
                for i, v in enumerate(n.inputs)
            ]
            f = _conv if n.op_type == "Conv" else found.function
            made = f(OpContext(n, jax.numpy), *args)
            for v, r in zip(n.outputs, made if isinstance(made, tuple) else (made,), strict=False):
                if v is not None:
                    values[v] = r
        return [values[v] for v in body.outputs]

    data = [np.asarray(v.data) for v in weights]
    with jax.enable_x64(True):
        constant = jax.jit(lambda *xs: run(xs, data)).lower(*arrays).compile()
        on_device = [jax.device_put(d) for d in data]
        argument = jax.jit(run).lower(list(arrays), on_device).compile()

    def as_constants() -> Any:
        with jax.enable_x64(True):
            return [np.asarray(r) for r in constant(*arrays)]

    def as_arguments() -> Any:
        with jax.enable_x64(True):
            return [np.asarray(r) for r in argument(list(arrays), on_device)]

    return [as_constants, as_arguments]


def _conv(ctx: OpContext, x: Any, w: Any, b: Any = None) -> Any:
    """Conv as the documentation of jax.lax shows it: NCHW, OIHW."""
    from jax import lax

    spatial = x.ndim - 2
    pads = ctx.attr("pads", (0,) * 2 * spatial)
    y = lax.conv_general_dilated(
        x,
        w,
        ctx.attr("strides", (1,) * spatial),
        list(zip(pads[:spatial], pads[spatial:], strict=True)),
        rhs_dilation=ctx.attr("dilations", (1,) * spatial),
        feature_group_count=ctx.attr("group", 1),
    )
    return y if b is None else y + b.reshape(1, -1, *[1] * spatial)


def main() -> None:
    """Print the table."""
    import jax
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    print(f"jax {jax.__version__}, onnxruntime {ort.__version__}, numpy {np.__version__}; batch 1, 2 threads")
    columns = ("model", "nodes", "on XLA", "load + compile (s)", "XRT (ms)", "hand-jitted (ms)", "ORT (ms)")
    print(f"| {' | '.join(columns)} | XRT/hand | XRT/ORT |\n|{'---|' * 9}")
    for name in sys.argv[1:] or NAMES:
        print(row(name, options), flush=True)


def row(name: str, options: Any) -> str:
    """The measurements of one model, as a row of the table."""
    import onnxruntime as ort

    inputs = inputs_for(name)
    arrays = list(inputs.values())
    session = ort.InferenceSession(str(path(name)), options, providers=["CPUExecutionProvider"])
    start = time.perf_counter()
    module = XRTModule(path(name), engine="xla", cache=False, guard=False)
    got = module(*arrays)
    ready = time.perf_counter() - start
    want = session.run(None, inputs)[0]
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3 * float(np.abs(want).max()))
    calls = [lambda: module(*arrays), *hand_jitted(module, arrays), lambda: session.run(None, inputs)]
    ours, constants, arguments, peer = medians(calls)
    theirs = min(constants, arguments)
    e = module.explain()
    return (
        f"| {name} | {e.node_count} | {e.node_share:.0%} | {ready:.1f} | {ours:.1f} | {theirs:.1f} | {peer:.1f} "
        f"| {ours / theirs:.2f} | {ours / peer:.2f} (at most {TARGETS.get(name, '-')}) |"
    )


if __name__ == "__main__":
    main()

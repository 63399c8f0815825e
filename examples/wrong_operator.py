"""An engine with a wrong operator: the guard keeps it from the caller, and the search names it.

    python examples/wrong_operator.py

The engine of own_engine.py gets a Tanh that is wrong: a rational approximation that leaves the function beyond 1, by
more the larger the number. Outputs of the network are a few percent off, which nobody would notice by looking at them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from own_engine import ArenaEngine, Net

import xrt_core as xrt
from xrt_core.engine import engines, register_engine
from xrt_core.verify.isolate import Candidate, bisect_function


def fast_tanh(x: Any, out: Any) -> Any:
    """x (27 + x^2) / (27 + 9 x^2): Pade's approximation, right within 1e-4 up to 0.7, and off by 0.02 at 2."""
    square = x * x
    return np.divide(x * (27 + square), 27 + 9 * square, out=out)


class HastyEngine(ArenaEngine):
    """The engine with that Tanh."""

    name = "hasty"
    kernels = {**ArenaEngine.kernels, "Tanh": fast_tanh}  # noqa: RUF012

    def fingerprint(self, device: str) -> str:
        """Another one than that of the engine that is right."""
        return f"hasty {super().fingerprint(device)}"


def main() -> None:
    """Print how far off results are without the guard and with it, and what is wrong."""
    register_engine(HastyEngine)
    x = np.random.default_rng(1).standard_normal((8, 64)).astype(np.float32)
    expected = xrt.XRTModule(Net(), engine="host")(x)

    unguarded = xrt.XRTModule(Net(), engine="hasty", guard=False, prune=False)
    print(f"without the guard: off by {np.abs(unguarded(x) / expected - 1).max():.1%}")

    with xrt.XRTModule(Net(), engine="hasty", prune=False) as m:
        m(x)
        m.wait()
        print(f"with the guard:    off by {np.abs(m(x) / expected - 1).max():.1%}")
        (cluster,) = m.report().clusters
        print(f"{cluster['name']} is {cluster['state']}: {cluster['reason']}")

    graph = unguarded.partitioned({"x": x})  # what `xrt bisect model.onnx -e hasty` does for a file
    (function,) = (n.attributes["function"] for n in graph.nodes if "function" in n.attributes)
    compiler = engines.get("hasty").compiler("cpu", unguarded.compile_options("hasty"))
    search = Candidate("hasty", lambda f, fused: compiler.compile(f, f.params, f.returns, f.aliases))
    for fault in bisect_function(function, search).faults:
        print(f"wrong: {fault.operator}, {fault.reason}")


if __name__ == "__main__":
    import wrong_operator  # by this name another process can import the engine, which compiles it there first

    wrong_operator.main()

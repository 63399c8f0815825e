"""An engine in one file: which nodes it takes, what it compiles them to, and how that runs.

    python examples/own_engine.py

The library here is NumPy with memory that is reused: an executable writes every intermediate result into arrays that it
keeps. What the engine does not take (Softmax below) runs on XRT's host. A package has the same classes and an entry
point: `cookiecutter templates/engine` writes one, docs/tutorial-engine.md explains each part.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import xrt_core as xrt
from xrt_core.engine import (
    CompileOptions,
    Engine,
    EngineStatus,
    Executable,
    Function,
    GraphCompiler,
    Phase,
    Support,
    register_engine,
)
from xrt_core.ir.graph import Node, Value
from xrt_core.ir.types import TensorType

Kernel = Callable[..., Any]
"""Computes a node from its inputs into the array `out`."""


class ArenaExecutable(Executable):
    """Runs the nodes of a Function in order, each into the same array in every call."""

    def __init__(self, function: Function, kernels: dict[str, Kernel]) -> None:
        body = function.body
        self.kernels, self.nodes, self.results = kernels, body.nodes, body.outputs
        self.inputs = body.inputs
        made = [n.outputs[0] for n in body.nodes]
        self.memory = {v: np.empty(v.type.shape, v.type.dtype) for v in made if v is not None}
        self.lock = threading.Lock()  # the memory is one call's at a time

    def run(self, inputs: Sequence[Any], run_options: Any = None, block_until_done: bool = True) -> list[np.ndarray]:
        """The results, as copies: the memory is written again by the next call."""
        arrays: dict[Value, Any] = dict(zip(self.inputs, inputs, strict=True))
        with self.lock:
            for node in self.nodes:
                given = [v.data if v.data is not None else arrays[v] for v in node.inputs]
                (result,) = node.outputs
                arrays[result] = self.kernels[node.op_type](*given, out=self.memory[result])
            return [np.array(v.data if v.data is not None else arrays[v]) for v in self.results]


class ArenaCompiler(GraphCompiler):
    """Compiles a Function: here, reserves its memory."""

    def __init__(self, kernels: dict[str, Kernel]) -> None:
        self.kernels = kernels

    def compile(self, function: Function, entry_params: Any, return_params: Any, aliases: Any) -> ArenaExecutable:
        """The executable; parameters and results have the types that the Function's values have."""
        return ArenaExecutable(function, self.kernels)


class ArenaEngine(Engine):
    """Elementwise operators and MatMul in float32, of static shapes."""

    name = "arena"
    devices = ("cpu",)
    automatic = False  # for those who name it
    kernels: dict[str, Kernel] = {  # noqa: RUF012
        "Add": np.add,
        "Sub": np.subtract,
        "Mul": np.multiply,
        "MatMul": np.matmul,
        "Tanh": np.tanh,
        "Relu": lambda x, out: np.maximum(x, np.float32(0), out=out),
    }

    def probe(self) -> EngineStatus:
        """NumPy is always there."""
        return EngineStatus(True, np.__version__, ("cpu",))

    def supports(self, node: Node, device: str, phase: Phase) -> Support:
        """Whether the engine takes a node; the reason, if not, is what users read."""
        if node.domain or node.op_type not in self.kernels:
            return Support.no(f"arena has no kernel for {node.operator}")
        for value in (*node.inputs, *node.outputs):
            t = value.type if value is not None else None
            if not isinstance(t, TensorType) or t.dtype != np.float32 or not t.is_static:
                return Support.no(f"arena takes float32 of static shapes, and {value} is {t}")
        return Support.yes()

    def compiler(self, device: str, options: CompileOptions) -> ArenaCompiler:
        """The compiler for a device."""
        return ArenaCompiler(self.kernels)

    def fingerprint(self, device: str) -> str:
        """What executables depend on: those of another version are compiled again."""
        return f"arena 1, numpy {np.__version__}"


class Net(xrt.Graph):
    """Two layers, and a Softmax that the engine does not take."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.w = [rng.standard_normal((64, 64)).astype(np.float32) / 8 for _ in range(2)]

    def build(self, x: Any) -> Any:
        """x: float32[N, 64]. Returns float32[N, 64]."""
        for w in self.w:
            x = xrt.ops.Tanh(x @ w + 0.1)
        return xrt.ops.Softmax(x)


def main() -> None:
    """Run the network on the engine, verified, and print what ran where."""
    register_engine(ArenaEngine)
    x = np.random.default_rng(1).standard_normal((8, 64)).astype(np.float32)
    expected = xrt.XRTModule(Net(), engine="host")(x)
    with xrt.XRTModule(Net(), engine="arena", prune=False) as m:
        m(x)  # by the host; the engine is compiled and verified in the background
        m.wait()
        y = m(x)
        print(m.explain().summary())
        (cluster,) = m.report().clusters
        off = abs(y - expected).max()
        print(f"{cluster['name']}: {cluster['state']} on {cluster['chosen']}; off by at most {off:.1e}")
        for node in m.explain().report.host_nodes:
            print(f"host: {node.reason}")


if __name__ == "__main__":
    import own_engine  # by this name another process can import the engine, which compiles it there first

    own_engine.main()

"""Speed of what engine authors and users of graphs meet: listing engines, tracing, and an engine's verdict on a node.

    python benchmarks/sdk.py
"""

from __future__ import annotations

import pathlib
import tempfile
from typing import Any

import numpy as np
from rounds import median

import xrt_core as xrt
from xrt_core.engine import engines
from xrt_core.engine.manager import EngineManager
from xrt_core.ir.graph import Node, Value
from xrt_core.ir.types import TensorType
from xrt_core.plugins.discovery import Discovery


def fifty_engines(folder: pathlib.Path) -> None:
    """Metadata of fifty engine packages whose modules do not exist."""
    for i in range(50):
        info = folder / f"xrt_many{i}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: xrt-many{i}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[xrt.engines]\nmany{i} = xrt_many{i}:Engine\n")


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as name:
        fifty_engines(pathlib.Path(name))

        def listing() -> int:
            return len(EngineManager(Discovery(xrt.__version__, [name])).listing(probe=False))

        assert listing() == 50
        rows = [("list 50 installed engines, importing none (ms)", median(listing, rounds=7) * 1e3, "50")]

    def build(x: Any) -> Any:
        for _ in range(500):
            x = xrt.ops.Relu(x) + 1
        return x

    rows.append(("trace 1000 nodes (ms)", median(lambda: xrt.trace(build, "float32[2, 3]"), rounds=7) * 1e3, ""))
    t = TensorType(np.dtype(np.float32), (2, 3, 4))
    node = Node("Add", [Value("a", t), Value("b", t)], [Value("c", t)], version=14)
    for engine in ("xla", "onnxruntime", "openvino"):
        if engine in engines.names():
            found = engines.get(engine)
            found.supports(node, "cpu", "inference")
            verdict = median(lambda e=found: e.supports(node, "cpu", "inference"), rounds=7, calls=1000)  # type: ignore[misc]
            rows.append((f"verdict of {engine} on a node of a known kind (us)", verdict * 1e6, ""))
    print("| what | median | goal |\n|---|---|---|")
    for what, value, goal in rows:
        print(f"| {what} | {value:.2f} | {goal} |")


if __name__ == "__main__":
    main()

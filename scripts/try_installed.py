"""Runs a small model through each engine that is named, as installed: `python scripts/try_installed.py xla ort`.

For the session `installed` of the noxfile, in a fresh environment. `ort` stands for the API of onnxruntime, `torch` for
torch.compile; an engine that is not usable here must say why.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import xrt_core as xrt


def model(folder: str) -> str:
    """The path of `y = Softmax(Relu(x @ w))` for any number of rows."""
    w = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("Softmax", ["r"], ["y"]),
    ]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", k]) for n, k in (("x", 64), ("y", 32))]
    graph = helper.make_graph(nodes, "small", ends[:1], ends[1:], [numpy_helper.from_array(w, "w")])
    path = str(pathlib.Path(folder) / "small.onnx")
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


def by_torch(x: np.ndarray) -> None:
    """Compile a layer of PyTorch and compare it with eager."""
    import torch

    net = torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.ReLU())
    given = torch.from_numpy(x)
    compiled = torch.compile(net, backend="xrt")
    assert torch.allclose(compiled(given), net(given), atol=1e-4)


def by_ort(path: str, x: np.ndarray) -> np.ndarray:
    """Run the model through the API of onnxruntime that xrt-ort has."""
    import xrt_ort

    return np.asarray(xrt_ort.InferenceSession(path).run(None, {"x": x})[0])


def by_engine(name: str, path: str, x: np.ndarray) -> np.ndarray:
    """Run the model on an engine, verified; its one cluster must be on it."""
    with xrt.XRTModule(path, engine=name, prune=False) as m:
        m(x)
        assert m.wait(300), f"{name} was not done in 300 s"
        y = np.asarray(m(x))
        (cluster,) = m.report().clusters
        assert cluster["state"] == "live", cluster["reason"]
        assert cluster["chosen"] == name, cluster["chosen"]
    return y


def main(names: list[str]) -> None:
    """Print a line for each name; raise where one does not give the host's result."""
    home = pathlib.Path(xrt.__file__).resolve()
    assert home.is_relative_to(pathlib.Path(sys.prefix).resolve()), f"{home} is not what was installed"
    x = np.random.default_rng(1).standard_normal((4, 64)).astype(np.float32)
    with tempfile.TemporaryDirectory() as folder:
        path = model(folder)
        expected = np.asarray(xrt.XRTModule(path, engine="host")(x))
        print(f"Python {sys.version.split()[0]}, xrt-core {xrt.__version__} on the host: {expected.shape}")
        for name in names:
            if name == "torch":
                by_torch(x)
            elif name == "ort":
                np.testing.assert_allclose(by_ort(path, x), expected, rtol=1e-4, atol=1e-6)
            else:
                try:
                    y = by_engine(name, path, x)
                except xrt.EngineUnavailableError as e:
                    print(f"not usable here: {e}")
                    continue
                np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-6)
            print(f"{name}: right")
        subprocess.run([str(pathlib.Path(sys.executable).with_name("xrt")), "engines"], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])

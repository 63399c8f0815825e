"""Sizes that vary: lowerings for symbolic shapes, as one plan for all sizes and padded."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import onnx
import pytest
from onnx import helper
from ort_comparison import Case, by_onnxruntime

import xrt_core as xrt
from xrt_core.frontends.onnx_functions import function_body
from xrt_core.frontends.onnx_import import import_model
from xrt_core.host.executor import run_graph
from xrt_core.ir.onnx_proto import dtype_to_onnx, tensor_from_array
from xrt_core.passes.padding import pad_graph

pytest.importorskip("onnxruntime", reason="it computes what is expected")

R = np.random.default_rng(3)
BUCKETS: Final = {"b": 4, "n": 16}
SIZES: Final = ((4, 16), (2, 7), (3, 15), (1, 1))


@dataclass(frozen=True)
class Varying:
    """A node some of whose inputs have sizes that vary.

    inputs: arrays are constants; else a dtype and a shape of numbers and symbols. below: what integers of an input are
    less than.
    """

    op: str
    inputs: Sequence[Any]
    attributes: dict[str, Any] = field(default_factory=dict)
    below: int = 2

    def __str__(self) -> str:
        return f"{self.op}-{len([x for x in self.inputs if x is not None])}-{'-'.join(self.attributes)}"

    def arrays(self, b: int, n: int) -> dict[int, np.ndarray]:
        """Its arguments for these sizes, by the number of the input."""
        sizes, found = {"b": b, "n": n}, {}
        rng = np.random.default_rng([b, n, *str(self).encode()])  # the same, whatever ran before
        for i, given in enumerate(self.inputs):
            if isinstance(given, tuple):
                dtype, *shape = given
                dims = [sizes.get(d, d) for d in shape]
                if np.dtype(dtype).kind in "iu":
                    is_length = tuple(shape) == ("b",)
                    found[i] = rng.integers(int(is_length), n + 1 if is_length else self.below, dims).astype(dtype)
                    if tuple(shape) == ("b", "n"):
                        found[i][:, 0] = 1  # rows that are masked as a whole have the rounding of the mask's -10000
                else:
                    found[i] = rng.standard_normal(dims).astype(dtype)
        return found

    def model(self) -> onnx.ModelProto:
        """The model of the node."""
        names = ["" if x is None else f"x{i}" for i, x in enumerate(self.inputs)]
        node = helper.make_node(self.op, names, ["y"], domain="com.microsoft", name="the_node", **self.attributes)
        entries = [
            helper.make_tensor_value_info(f"x{i}", dtype_to_onnx(np.dtype(x[0])), x[1:])
            for i, x in enumerate(self.inputs)
            if isinstance(x, tuple)
        ]
        constants = [tensor_from_array(x, f"x{i}") for i, x in enumerate(self.inputs) if isinstance(x, np.ndarray)]
        result = onnx.ValueInfoProto(name="y")
        graph = helper.make_graph([node], "one", entries, [result], constants)
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)

    def expected(self, arrays: dict[int, np.ndarray]) -> np.ndarray:
        """What ONNX Runtime computes."""
        given = [arrays.get(i, x) for i, x in enumerate(self.inputs)]
        constants = [i for i, x in enumerate(self.inputs) if isinstance(x, np.ndarray)]
        outputs = (0, 1) if self.op == "EmbedLayerNormalization" else (0,)
        return by_onnxruntime(Case(self.op, given, self.attributes, outputs, constants))[0]


def f(*shape: int) -> np.ndarray:
    """Weights."""
    return R.standard_normal(shape).astype(np.float32)


def u8(*shape: int) -> np.ndarray:
    """Quantised weights."""
    return R.integers(0, 255, shape).astype(np.uint8)


X: Final = ("float32", "b", "n", 8)
IDS: Final = ("int32", "b", "n")
LENGTHS: Final = ("int32", "b")
SCALE, ZERO = np.array(0.02, np.float32), np.array(128, np.uint8)
NODES: Final = [
    Varying("SkipLayerNormalization", [X, X, f(8), f(8), f(8)]),
    Varying("SkipSimplifiedLayerNormalization", [X, X, f(8)]),
    Varying("BiasGelu", [X, f(8)]),
    Varying("FastGelu", [X, f(8)]),
    Varying("QuickGelu", [X]),
    Varying("FusedMatMul", [X, X], {"transB": 1, "alpha": 0.5}),
    Varying("EmbedLayerNormalization", [IDS, IDS, f(9, 8), f(20, 8), f(2, 8), f(8), f(8), IDS]),
    Varying("Attention", [X, f(8, 24), f(24), LENGTHS], {"num_heads": 2}),
    Varying("Attention", [X, f(8, 24), f(24), IDS], {"num_heads": 2}),
    Varying("Attention", [X, f(8, 24), f(24), None, None, ("float32", "b", 2, "n", "n")], {"num_heads": 2}),
    Varying("Attention", [X, f(8, 24), f(24)], {"num_heads": 2, "unidirectional": 1}),
    Varying("MultiHeadAttention", [X, X, X, f(24), IDS], {"num_heads": 2}),
    Varying("MultiHeadAttention", [X, X, X, None, None, ("float32", 1, 2, "n", "n")], {"num_heads": 2}),
    Varying("RotaryEmbedding", [X, ("int64", "b", "n"), f(20, 2), f(20, 2)], {"num_heads": 2}, below=20),
    Varying("RotaryEmbedding", [X, ("int64", 1), f(20, 2), f(20, 2)], {"num_heads": 2}),
    Varying("MatMulNBits", [("float32", "b", "n", 32), u8(6, 2, 8), f(12)],
            {"bits": 4, "block_size": 16, "N": 6, "K": 32}),
    Varying("MatMulIntegerToFloat", [("uint8", "b", "n", 8), u8(8, 6), SCALE, SCALE, ZERO, ZERO], below=255),
    Varying("QAttention", [("uint8", "b", "n", 8), u8(8, 24), f(24), SCALE, SCALE, LENGTHS, ZERO, ZERO],
            {"num_heads": 2}, below=255),
    Varying("FusedConv", [("float32", "b", 3, "n"), f(4, 3, 3), f(4)],
            {"kernel_shape": [3], "pads": [1, 1], "activation": "Relu"}),
]  # fmt: skip


def close(found: np.ndarray, wanted: np.ndarray) -> None:
    """Assert that both are the same but for rounding."""
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", NODES, ids=str)
def test_padded(case: Varying) -> None:
    """What a node is lowered to is padded in its place: garbage in the padding reaches no result."""
    graph = import_model(case.model())
    padded = pad_graph(graph, [v.shape for v in graph.inputs], BUCKETS, zero_filled=False, body_of=function_body)
    for b, n in SIZES:
        arrays, sizes = case.arrays(b, n), {"b": b, "n": n}
        assert padded.why_not(sizes) is None
        given = padded.pad(list(arrays.values()), sizes)
        for i, a in enumerate(arrays.values()):
            outside = np.ones(given[i].shape, bool)
            outside[tuple(slice(k) for k in a.shape)] = False
            given[i] = given[i].copy()
            given[i][outside] = np.nan if a.dtype.kind == "f" else 100
        (found,) = padded.cut(run_graph(padded.graph, given), sizes)
        close(found, case.expected(arrays))


@pytest.mark.skipif(not importlib.util.find_spec("xrt_onnxruntime"), reason="xrt-onnxruntime is not installed")
@pytest.mark.parametrize("case", NODES, ids=str)
def test_one_plan(case: Varying) -> None:
    """An engine of dynamic shapes has one plan for all sizes, whether it takes the node as it is or its lowering."""
    with xrt.XRTModule(case.model(), engine="onnxruntime", guard=False, cache="off", prune=False) as module:
        for b, n in SIZES:
            arrays = case.arrays(b, n)
            close(np.asarray(module(*arrays.values())), case.expected(arrays))
        assert "one plan for all sizes" in str(module.explain())
        assert sum(e.name == "specialised" for e in module.events) <= 2

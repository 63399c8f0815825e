"""Operators that ONNX Runtime alone computes: a node runs in a session of its own where onnxruntime is installed."""

from __future__ import annotations

import threading
from typing import Any, Final

import numpy as np

from xrt_core.engine.onnx_bridge import to_onnx
from xrt_core.errors import UnsupportedError
from xrt_core.ir.function import Function
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.types import TensorType
from xrt_core.kernels import OpContext

NATIVE: Final = (
    "AttnLSTM", "BeamSearch", "GatedDeltaNet", "GatherPacked", "GreedySearch", "MatMulFpQ4", "MoEGroupRouter",
    "NGramHashMapping", "Sampling", "VarlenCausalConvWithState", "VarlenNGramHashMapping", "WhisperBeamSearch",
)  # fmt: skip
"""Loops over a model that choose tokens, and operators that nobody's models have been seen to use."""

_LOCK: Final = threading.Lock()
_REMEMBERED: Final = 64
_sessions: dict[Any, Any] = {}  # (node, dtypes, ranks) -> session


def native_kernel(ctx: OpContext, *inputs: Any) -> tuple[Any, ...]:
    """Run the node in ONNX Runtime. Raises UnsupportedError where that is not installed, or refuses the node."""
    node = ctx.node
    arrays = [None if a is None else np.asarray(a) for a in inputs]
    key = (id(node), tuple(None if a is None else (a.dtype, a.ndim) for a in arrays))
    with _LOCK:
        found = _sessions.get(key)
    if found is None:
        found = (node, _session(node, arrays))  # the node stays, so that no other gets its id
        with _LOCK:
            if len(_sessions) >= _REMEMBERED:
                _sessions.clear()
            _sessions[key] = found
    session = found[1]
    given = [a for a in arrays if a is not None]
    names = [p.name for p in session.get_inputs()]
    results = iter(session.run(None, dict(zip(names, given, strict=True))))
    return tuple(None if v is None else next(results) for v in node.outputs)


def _session(node: Node, arrays: list[np.ndarray | None]) -> Any:
    try:
        import onnxruntime as ort  # type: ignore[import-untyped]
    except ImportError as e:
        raise UnsupportedError(
            f"node {node.name!r}: {node.operator} runs in ONNX Runtime alone, which is not installed: pip install "
            f"onnxruntime"
        ) from e
    if node.captures:
        raise UnsupportedError(f"node {node.name!r} ({node.operator}): its subgraphs use values from outside")
    inputs = [None if a is None else Value(f"x{i}", TensorType(a.dtype, a.shape)) for i, a in enumerate(arrays)]
    stand_in = TensorType(np.dtype(np.float32), (1,))  # ONNX Runtime infers the types
    outputs = [None if v is None else Value(f"y{i}", stand_in) for i, v in enumerate(node.outputs)]
    opsets = {"": 17, node.domain: node.version}
    for g in node.subgraphs:
        opsets.update(g.opsets)
    alone = Graph(
        [v for v in inputs if v is not None], [v for v in outputs if v is not None],
        [node.replace(inputs=inputs, outputs=outputs)], opsets=opsets, name="native",
    )  # fmt: skip
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        model = to_onnx(Function.from_graph(alone))
        for p in model.graph.input:
            for d in p.type.tensor_type.shape.dim:
                d.Clear()
        for p in model.graph.output:
            p.ClearField("type")
        return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as e:  # the binding's exceptions have no common base
        raise UnsupportedError(f"node {node.name!r}: ONNX Runtime refuses {node.operator}: {e}") from e

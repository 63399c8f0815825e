"""Resize by scales with aligned corners: engines get it where the sizes that come of the scales are whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

import xrt_core as xrt
from tests.shapes.models import Builder


def resized(scale: float, mode: str, dims: tuple[Any, ...]) -> bytes:
    b = Builder()
    scales = b.constant([1, 1, scale, scale], np.float32)
    b.op("Resize", "x", "", scales, mode=mode, coordinate_transformation_mode="align_corners")
    return b.model([("x", TensorProto.FLOAT, [1, 2, *dims])], [f"v{len(b.nodes) - 1}"])


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("mode", ["linear", "cubic", "nearest"])
@pytest.mark.parametrize(
    ("scale", "dims", "is_whole"),
    [(2.0, (7, 9), True), (3.0, ("h", "w"), True), (2.5, (4, 6), True), (2.5, (4, 7), False), (2.5, ("h", 4), False)],
)
def test_whole_sizes(engine: str, mode: str, scale: float, dims: tuple[Any, ...], is_whole: bool) -> None:
    pytest.importorskip(engine)
    model = resized(scale, mode, dims)
    shapes = {"x": (1, 2, *dims)} if "h" in dims else None
    m = xrt.XRTModule(model, engine=engine, guard=False, cache="off", prune=False, shapes=shapes)  # type: ignore[arg-type]
    x = np.random.default_rng(0).standard_normal([1, 2, *(5 if d in ("h", "w") else d for d in dims)])
    x = x.astype(np.float32)
    np.testing.assert_allclose(m(x), xrt.XRTModule(model, engine="host")(x), rtol=1e-4, atol=1e-5)
    assert ("100% of nodes" in str(m.explain())) is is_whole

"""Arrays of mapped files: aligned copies are shared by all who hold one."""

from __future__ import annotations

import gc
import pathlib
import weakref

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import xrt_core as xrt
from xrt_core.ir import file_backed
from xrt_core.ir.file_backed import aligned


def test_copies_are_shared_while_they_live() -> None:
    """An aligned array is its own; of another there is one read-only copy, which goes with those who hold it."""
    whole = np.arange(10.0)
    assert aligned(whole) is whole
    x = np.frombuffer(bytearray(81), np.uint8)[1:].view(np.float64)
    assert not x.flags.aligned
    before = len(file_backed._copies)
    copy = aligned(x)
    assert aligned(x) is copy
    assert (copy.flags.aligned, copy.flags.writeable) == (True, False)
    np.testing.assert_array_equal(copy, x)
    assert len(file_backed._copies) == before + 1
    gone = weakref.ref(copy)
    del copy
    gc.collect()
    assert gone() is None
    assert aligned(x) is not None
    del x
    gc.collect()
    assert len(file_backed._copies) == before


def test_plans_of_several_shapes_hold_a_weight_once(tmp_path: pathlib.Path) -> None:
    """Where it lies unaligned in the model's file."""
    weight = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32)
    for name in ("w", "ww", "www", "wwww"):  # which moves what lies behind it
        ports = [helper.make_tensor_value_info(p, TensorProto.FLOAT, ["n", 256]) for p in "xy"]
        node = helper.make_node("MatMul", ["x", name], ["y"])
        graph = helper.make_graph([node], "g", ports[:1], ports[1:], [numpy_helper.from_array(weight, name)])
        path = tmp_path / f"{name}.onnx"
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
        m = xrt.XRTModule(path, engine="host")
        for n in (1, 2, 3):
            x = np.ones((n, 256), np.float32)
            np.testing.assert_allclose(m(x), x @ weight, rtol=1e-5)
        caller = m._source.caller
        assert caller is not None
        plans = caller.plans.plans()
        held = [r for p in plans for r in p._template if isinstance(r, np.ndarray) and r.shape == weight.shape]
        assert len(plans) == len(held) == 3
        assert len({r.__array_interface__["data"][0] for r in held}) == 1
        assert all(r.flags.aligned for r in held)

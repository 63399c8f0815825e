"""A node of com.microsoft through XRT and through ONNX Runtime's own kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes  # noqa: F401
import numpy as np
import onnx
from onnx import helper

import xrt_core as xrt
from xrt_core.ir.onnx_proto import dtype_to_onnx, tensor_from_array


@dataclass(frozen=True)
class Case:
    """One node. inputs: arrays, None for one left out. outputs: which of them it has. constants: inputs that are
    initialisers. rtol, atol: how far the results may be apart, in the dtype's units where they are None. types:
    names of the outputs' dtypes, where ONNX Runtime does not infer them. rows: so many of caches say something."""

    op: str
    inputs: Sequence[Any]
    attributes: dict[str, Any] = field(default_factory=dict)
    outputs: Sequence[int] = (0,)
    constants: Sequence[int] = ()
    rtol: float | None = None
    atol: float | None = None
    domain: str = "com.microsoft"
    types: Sequence[str] = ()
    note: str = ""
    rows: int | None = None

    def __str__(self) -> str:
        given = ",".join("_" if a is None else f"{np.asarray(a).dtype}{list(np.shape(a))}" for a in self.inputs)
        said = ",".join(f"{k}={v}" for k, v in self.attributes.items() if not isinstance(v, onnx.GraphProto))
        return f"{self.op}({given}){said}{list(self.outputs)}{self.note}".replace(" ", "")


def model_of(case: Case, symbolic: bool = False) -> onnx.ModelProto:
    """The model of the one node."""
    arrays = [None if a is None else np.asarray(a) for a in case.inputs]
    names = ["" if a is None else f"x{i}" for i, a in enumerate(arrays)]
    outputs = ["" if i not in case.outputs else f"y{i}" for i in range(max(case.outputs) + 1)]
    node = helper.make_node(case.op, names, outputs, domain=case.domain, name="the_node", **case.attributes)
    entries, constants = [], []
    for i, a in enumerate(arrays):
        if a is None:
            continue
        if i in case.constants:
            constants.append(tensor_from_array(a, f"x{i}"))
        else:
            shape = [f"d{i}_{k}" for k in range(a.ndim)] if symbolic else a.shape
            entries.append(helper.make_tensor_value_info(f"x{i}", dtype_to_onnx(a.dtype), shape))
    results = [onnx.ValueInfoProto(name=n) for n in outputs if n]
    for v, t in zip(results, case.types, strict=False):
        v.type.tensor_type.elem_type = onnx.TensorProto.DataType.Value(t)
    graph = helper.make_graph([node], "one", entries, results, constants)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def fed(case: Case) -> list[np.ndarray]:
    """The arrays of a call."""
    return [np.asarray(a) for i, a in enumerate(case.inputs) if a is not None and i not in case.constants]


def by_onnxruntime(case: Case) -> list[np.ndarray]:
    """What ONNX Runtime computes, without optimisation."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model_of(case).SerializeToString(), options, providers=["CPUExecutionProvider"])
    entries = [p.name for p in session.get_inputs()]
    values = {}
    for name, a in zip(entries, fed(case), strict=True):
        if a.dtype.name in ("bfloat16",) or a.dtype.kind == "V":
            values[name] = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(a.view(np.uint16), dtype_to_onnx(a.dtype))
        else:
            values[name] = ort.OrtValue.ortvalue_from_numpy(a.copy()) if a.dtype.kind != "O" else a
    if case.op == "SparseAttention":  # its cache is one buffer, before and after
        binding = session.io_binding()
        for name, v in values.items():
            binding.bind_ortvalue_input(name, v)
        binding.bind_output("y0", "cpu")
        for name, cache in (("y1", "x3"), ("y2", "x4")):
            binding.bind_ortvalue_output(name, values[cache])
        session.run_with_iobinding(binding)
        return [a.copy() for a in binding.copy_outputs_to_cpu()]
    if any(isinstance(v, np.ndarray) for v in values.values()):
        return list(session.run(None, dict(zip(entries, fed(case), strict=True))))
    return [v.numpy() for v in session.run_with_ort_values(None, values)]


def by_xrt(case: Case, engine: str = "host", symbolic: bool = False, **options: Any) -> list[np.ndarray]:
    """What XRT computes."""
    module = xrt.XRTModule(model_of(case, symbolic), engine=engine, cache="off", **options)
    found = module(*fed(case))
    return [np.asarray(a) for a in (found if isinstance(found, tuple | list) else (found,))]


_UNITS = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 3e-5, "float64": 1e-10}


def compare(case: Case, engine: str = "host", expected: Sequence[np.ndarray] | None = None, **options: Any) -> None:
    """Raise AssertionError where XRT's results differ from ONNX Runtime's."""
    wanted = by_onnxruntime(case) if expected is None else expected
    found = by_xrt(case, engine, **options)
    for k, (a, b) in enumerate(zip(found, wanted, strict=True)):
        what = f"{case}: output {k}"
        assert a.shape == b.shape, f"{what} is of {a.shape}, ONNX Runtime's of {b.shape}"
        assert a.dtype == b.dtype, f"{what} is {a.dtype}, ONNX Runtime's {b.dtype}"
        if k and case.rows is not None:
            a, b = a[:, :, : case.rows], b[:, :, : case.rows]
        if a.dtype.kind in "iub":
            off = np.abs(a.astype(np.int64) - b.astype(np.int64)).max(initial=0)
            assert off <= (case.atol or 0), f"{what}: off by {off}"
        elif a.dtype.kind == "O":
            np.testing.assert_array_equal(a, b, err_msg=what)
        else:
            unit = _UNITS[a.dtype.name]
            rtol, atol = case.rtol or unit, case.atol or unit
            np.testing.assert_allclose(a.astype(np.float64), b.astype(np.float64), rtol=rtol, atol=atol, err_msg=what)

"""The single-node ONNX backend tests as cases for portable kernels, run through NumPy and through a jitted JAX."""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx.backend.test.loader import load_model_tests

from xrt_core.ir.onnx_proto import array_from_tensor, attribute_from_proto, type_from_proto
from xrt_core.ir.graph import Node, Value
from xrt_core.ir.types import TensorType
from xrt_core.kernels import OpContext, find_kernel


@dataclass(frozen=True)
class Case:
    """One backend test of one node: the node, the arrays it gets and the arrays it must give."""

    name: str
    node: Node
    inputs: list[Any]
    outputs: list[Any]
    rtol: float
    atol: float

    def __repr__(self) -> str:
        return self.name


def _no_graph(_: onnx.GraphProto) -> Any:
    raise NotImplementedError("cases of control flow are not kernel cases")


def _array(x: Any) -> np.ndarray:
    if isinstance(x, onnx.TensorProto):
        return array_from_tensor(x, x.name)
    x = np.asarray(x)
    return x.astype(object) if x.dtype.kind in "US" else x


def _cases(test: Any) -> list[Case]:
    model = test.model
    if len(model.graph.node) != 1 or model.functions:
        return []
    proto = model.graph.node[0]
    if any(a.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS) for a in proto.attribute):
        return []
    opsets = {o.domain: o.version for o in model.opset_import}
    schema = onnx.defs.get_schema(proto.op_type, opsets[proto.domain], proto.domain)
    types = {v.name: type_from_proto(v.type, v.name) for v in [*model.graph.input, *model.graph.output]}
    if not all(isinstance(t, TensorType) for t in types.values()):
        return []
    cases = []
    for given, expected in test.data_sets:
        arrays = {v.name: _array(x) for v, x in zip(model.graph.input, given, strict=True)}
        arrays |= {v.name: _array(x) for v, x in zip(model.graph.output, expected, strict=True)}
        values = {n: Value(n, TensorType(arrays[n].dtype, arrays[n].shape)) for n in arrays}
        node = Node(
            proto.op_type,
            [values[n] if n else None for n in proto.input],
            [values[n] if n else None for n in proto.output],
            {a.name: attribute_from_proto(a, _no_graph, proto.op_type) for a in proto.attribute},
            domain=proto.domain,
            version=schema.since_version,
        )
        ins, outs = ([arrays[n] if n else None for n in names] for names in (proto.input, proto.output))
        cases.append(Case(test.name, node, ins, outs, test.rtol, test.atol))
    return cases


@functools.cache
def all_cases() -> list[Case]:
    """Every single-node backend test whose inputs and outputs are tensors."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return [case for test in load_model_tests(kind="node") for case in _cases(test)]


def cases_for(*op_types: str, domain: str = "") -> list[Case]:
    """The cases of these operators."""
    return [c for c in all_cases() if c.node.op_type in op_types and c.node.domain == domain]


def _as_tuple(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def run_numpy(case: Case) -> list[Any]:
    """The kernel's results under NumPy; the arguments are read-only, so a kernel that writes into them fails."""
    found = find_kernel(case.node.domain, case.node.op_type)
    assert found is not None, f"no portable kernel for {case.node.operator}"
    inputs = []
    for x in case.inputs:
        if isinstance(x, np.ndarray):
            x = x.copy()
            x.flags.writeable = False
        inputs.append(x)
    with np.errstate(all="ignore"):
        return list(_as_tuple(found.function(OpContext(case.node, np), *inputs)))


def run_jax(case: Case) -> list[Any]:
    """The kernel's results under jax.jit; inputs in `static` are constants, the others are traced."""
    import jax
    import jax.numpy as jnp

    found = find_kernel(case.node.domain, case.node.op_type)
    assert found is not None, f"no portable kernel for {case.node.operator}"
    traced = [i for i, x in enumerate(case.inputs) if x is not None and i not in found.static]

    def call(*args: Any) -> tuple[Any, ...]:
        inputs = list(case.inputs)
        for i, a in zip(traced, args, strict=True):
            inputs[i] = a
        results = _as_tuple(found.function(OpContext(case.node, jnp), *inputs))
        return tuple(jnp.asarray(r) if r is not None else None for r in results)

    with jax.enable_x64(True):
        return [None if r is None else np.asarray(r) for r in jax.jit(call)(*[case.inputs[i] for i in traced])]


def check(case: Case, results: list[Any]) -> None:
    """Assert that results have the expected count, dtypes, shapes and numbers."""
    assert len(results) >= len(case.outputs)
    for i, (got, want) in enumerate(zip(results, case.outputs, strict=False)):
        if want is None:
            continue
        got = np.asarray(got)
        assert got.dtype == want.dtype, f"output {i}: dtype {got.dtype}, expected {want.dtype}"
        assert got.shape == want.shape, f"output {i}: shape {got.shape}, expected {want.shape}"
        if want.dtype.kind in "biuO":
            np.testing.assert_array_equal(got, want)
        else:
            wide = np.complex128 if want.dtype.kind == "c" else np.float64
            np.testing.assert_allclose(got.astype(wide), want.astype(wide), rtol=case.rtol, atol=case.atol)

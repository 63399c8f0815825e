"""Automatic sharding as a function: what `sharding="auto"` would choose, as rules to look at, to change and to keep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xrt_core.compiler.models import is_traced, read_model
from xrt_core.errors import OptionError
from xrt_core.frontends.graph import bind, trace_call
from xrt_core.ir.graph import Graph
from xrt_core.ir.sharding import Mesh
from xrt_core.ir.types import TensorType
from xrt_core.module import XRTModule
from xrt_core.passes.sharding import automatic, exact_name
from xrt_core.runtime.arrays import to_numpy


def auto(model: Any, mesh: Mesh | Mapping[str, int], inputs: Mapping[str, Any] | None = None) -> dict[str, str]:
    """How the inputs and weights of a model lie on a mesh by estimated time, by pattern of their names.

        rules = xrt.sharding.auto("model.onnx", mesh, {"x": x})
        XRTModule("model.onnx", mesh=mesh, sharding=rules)
        TrainModule("model.onnx", mesh=mesh, sharding=rules)

    model: anything that `XRTModule` takes. inputs: an example of each input, for its shape; only a model whose declared
    shapes are static needs none. Nothing is compiled, and no devices are needed. What lies whole has no rule. The
    estimate is of a call (`passes/sharding/automatic.py`); that of `TrainModule(..., sharding="auto")` counts gradients
    and optimizer as well. Weights that are computed from others before the first call have no rule.

    Raises OptionError for what is no mesh, InputError for unknown shapes, and what `XRTModule` raises for the model.
    """
    if not isinstance(mesh, Mesh):
        mesh = Mesh(mesh)
    given, inputs = _read(model, inputs)
    with XRTModule(given, engine="host", cache="off") as module:
        graph = module.optimised(inputs)
    named = [v.name for v in (*given.inputs, *given.constants) if v.name]
    known = {exact_name(name) for name in named}
    chosen = {pattern: sbp for pattern, sbp in automatic(graph, mesh).items() if pattern in known}
    if not chosen and not named:
        raise OptionError("the model has neither inputs nor weights that could lie on a mesh")
    return chosen or {exact_name(named[0]): "B"}


def _read(model: Any, inputs: Mapping[str, Any] | None) -> tuple[Graph, Mapping[str, Any] | None]:
    """The graph of a model before any pass has renamed a weight, and its inputs by name."""
    if not is_traced(model):
        return read_model(model), inputs
    call = bind(model, (), inputs or {})
    types = [TensorType(a.dtype, a.shape) for a in map(to_numpy, call.arrays)]
    return trace_call(model, types, call.layout, call.names).graph, dict(zip(call.names, call.arrays, strict=True))

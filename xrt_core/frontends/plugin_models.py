"""Import of models of other libraries through frontends that plugins register (hook `xrt_import_model`)."""

from __future__ import annotations

from typing import Any

from xrt_core.errors import ModelLoadError, PluginError
from xrt_core.ir.graph import Graph
from xrt_core.plugins import plugins


def import_object(model: Any, example: Any = None) -> Graph:
    """Import an object of unknown type as a graph, with the first frontend that accepts it.

    example: arguments of the model, for frontends that need them.

    Raises ModelLoadError if none does, with the failures of frontends, and propagates an XRTError of a frontend that
    recognises the object but rejects it.
    """
    failed: list[str] = []
    asked: list[str] = []
    for name, owner, ask in plugins.each("xrt_import_model", "xrt.frontends", model=model, example=example):
        asked.append(name)
        try:
            graph = ask()
            if graph is not None and not isinstance(graph, Graph):
                raise PluginError(
                    f"{owner}: the hook xrt_import_model of {name!r} gave a {type(graph).__name__} instead of a Graph "
                    "or None"
                )
        except PluginError as e:
            plugins.problem(f"frontend {name}", owner, str(e))
            failed.append(str(e))
            continue
        if graph is not None:
            return graph
    known = f"; no frontend knows it ({', '.join(asked)})" if asked else "; no frontend for it is installed"
    raise ModelLoadError(
        f"{type(model).__module__}.{type(model).__qualname__} is not a model: give a path, the bytes of an ONNX file, "
        f"a ModelProto or an onnx_ir.Model{known}" + "".join(f"; {why}" for why in failed)
    )

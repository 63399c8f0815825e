"""The PyTorch frontend: `torch.compile(model, backend="xrt")`, and exported programs as models of `XRTModule`.

    model = torch.compile(model, backend="xrt")  # options={...}: every option of XRTModule
    model = xrt_torch.compile(model)  # the same, whose first call is eager's
    print(xrt_torch.explain())

Importing this package imports neither torch nor onnxscript.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from xrt_core import hookimpl

if TYPE_CHECKING:
    from xrt_torch.compiled import explain, graphs, wait
    from xrt_torch.deferred import compile

__all__ = ["compile", "explain", "graphs", "wait", "xrt_commands", "xrt_import_model"]


def __getattr__(name: str) -> Any:
    if name in ("explain", "graphs", "wait"):
        from xrt_torch import compiled

        return getattr(compiled, name)
    if name == "compile":
        from xrt_torch.deferred import compile

        return compile
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@hookimpl
def xrt_import_model(model: object, example: object) -> Any:
    """The graph of a `torch.export.ExportedProgram`, of a .pt2 file that holds one, or of a module for example
    arguments, with its parameters as constants; None for other objects."""
    is_file = isinstance(model, str | os.PathLike) and os.fspath(model).endswith(".pt2")
    if "torch" not in sys.modules and not is_file:
        return None
    from xrt_torch.exported import graph_of

    return graph_of(model, example)


@hookimpl
def xrt_commands() -> list[tuple[str, str, str]]:
    """The command `xrt torch`."""
    return [
        ("torch", "xrt_torch.command:report", "Run a script and show what XRT made of its graphs of torch.compile.")
    ]

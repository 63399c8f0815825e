"""The hooks of this package, beside it: `import xrt_ort` imports onnxruntime, and `xrt --help` shall not."""

from __future__ import annotations

from xrt_core import hookimpl


@hookimpl
def xrt_commands() -> list[tuple[str, str, str]]:
    """The command `xrt ort`."""
    return [("ort", "xrt_ort.command:ort", "Run a program written for onnxruntime on XRT.")]

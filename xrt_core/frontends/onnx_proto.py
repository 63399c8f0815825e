"""Moved to xrt_core.ir.onnx_proto."""
from xrt_core.ir.onnx_proto import *  # noqa: F403
from xrt_core.ir.onnx_proto import _SUB_BYTE  # noqa: F401

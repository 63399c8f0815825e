"""ONNX Runtime's operators: domain com.microsoft, and those that it adds to the standard's, as an operator set."""

from __future__ import annotations

from xrt_core import hookimpl
from xrt_core.ir.operator_set import OperatorSet

__version__ = "0.1.0"


@hookimpl
def xrt_operators() -> list[OperatorSet]:
    """The operators of this package."""
    from xrt_contrib.operators import operator_sets

    return operator_sets()

"""Operators at which gradients end: the derivative is zero almost everywhere, or the operator is not differentiated."""

from __future__ import annotations

from xrt_core.ir.op_traits import operators_with
from xrt_core.training.registry import no_gradient

_DRAWS = operators_with("random") - {"Dropout"}  # Dropout has a rule
_TAKEN_AS_CONSTANT = ("BitCast", "DynamicQuantizeLinear", "Unique")  # not constant, but not differentiated

no_gradient(*sorted(operators_with("piecewise_constant") | _DRAWS), *_TAKEN_AS_CONSTANT, by=__name__)
no_gradient(*sorted(operators_with("piecewise_constant", "ai.onnx.ml")), domain="ai.onnx.ml", by=__name__)
no_gradient("StopGradient", domain="xrt", by=__name__)

"""Functions of ONNX, with control flow, that translations call. Importing this module imports onnxscript."""

import onnxscript
from onnxscript import DOUBLE, FLOAT
from onnxscript.onnx_opset import opset18 as op
from onnxscript.onnx_opset import opset20

_OPSET = onnxscript.values.Opset("xrt.torch", 1)


@onnxscript.script(_OPSET)
def polynomial(x: DOUBLE, n: DOUBLE, a: DOUBLE, b: DOUBLE, c: DOUBLE, d: DOUBLE, e: DOUBLE) -> DOUBLE:
    """What `polynomials.recurrence` says."""
    before = op.Mul(n, 0.0)  # x may be NaN
    made = op.Add(before, 1.0)
    count = op.Cast(op.ReduceMax(n, keepdims=0), to=7)
    for i in range(count):
        k = op.CastLike(i, x)
        following = ((a * (2.0 * k + 1.0) + (b + c * k) * x) * made - d * k * before) / (1.0 + e * k)
        goes_on = op.Less(k, n)
        before = op.Where(goes_on, made, before)
        made = op.Where(goes_on, following, made)
    return made


@onnxscript.script(_OPSET, default_opset=opset20)
def gelu(x: FLOAT) -> FLOAT:
    """The operator, which is younger than the opset of torchlib."""
    return opset20.Gelu(x)


@onnxscript.script(_OPSET, default_opset=opset20)
def gelu_tanh(x: FLOAT) -> FLOAT:
    """With the hyperbolic tangent in the place of the error function."""
    return opset20.Gelu(x, approximate="tanh")

"""Activations, and biases with an activation."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from xrt_contrib.lowering import Call, lowering
from xrt_core import ops

_LOW: Final = ("float16", "bfloat16")


def wide(x: Any) -> Any:
    """`x` in float32 where its dtype is of 16 bits: there ONNX Runtime computes in it."""
    return x.astype(np.float32) if x.dtype.name in _LOW else x


def gelu(x: Any) -> Any:
    """x * Phi(x), by the error function."""
    w = wide(x)
    return (0.5 * w * (1 + ops.Erf(w * math.sqrt(0.5)))).astype(x.dtype)


def fast_gelu(x: Any) -> Any:
    """Gelu by tanh."""
    w = wide(x)
    return (0.5 * w * (1 + ops.Tanh(w * (0.7978845608028654 + 0.035677408136300125 * w * w)))).astype(x.dtype)


def silu(x: Any, alpha: float = 1.0) -> Any:
    """x * sigmoid(alpha * x)."""
    return x * ops.Sigmoid(x * alpha)


def activate(n: Call, x: Any, name: str, alpha: float | None = None, beta: float | None = None, **more: Any) -> Any:
    """Apply the activation of a fused operator by its name; "" is none."""
    if name in ("", "Identity"):
        return x
    if name == "LeakyRelu":
        return ops.LeakyRelu(x, alpha=0.01 if alpha is None else alpha)
    if name == "ThresholdedRelu":
        return ops.ThresholdedRelu(x, alpha=1.0 if alpha is None else alpha)
    if name == "Elu":
        return ops.Elu(x, alpha=1.0 if alpha is None else alpha)
    if name == "HardSigmoid":
        return ops.HardSigmoid(x, alpha=0.2 if alpha is None else alpha, beta=0.5 if beta is None else beta)
    if name == "Clip":
        low = np.array(-math.inf if alpha is None else alpha, x.dtype)
        return ops.Clip(x, low, np.array(math.inf if beta is None else beta, x.dtype))
    if name == "Selu":
        return ops.Selu(x, **{k: v for k, v in (("alpha", alpha), ("gamma", more.get("gamma"))) if v is not None})
    if name == "Softmax":
        return ops.Softmax(x, axis=more.get("axis", -1))
    if name in ("Gelu", "gelu"):
        return gelu(x)
    if name in ("HardSwish", "Relu", "Sigmoid", "Softplus", "Softsign", "Tanh", "Exp", "Abs", "Neg", "Mish"):
        return getattr(ops, name)(x)
    if name in ("Swish", "Silu", "SiLU", "silu", "swish"):
        return silu(x)
    if name in ("relu", "tanh", "sigmoid"):
        return getattr(ops, name.capitalize())(x)
    raise n.refuse(f"activation = {name!r} is not known")


@lowering("Gelu")
def _gelu(n: Call, x: Any) -> Any:
    return gelu(x)


@lowering("FastGelu")
def _fast_gelu(n: Call, x: Any, bias: Any) -> Any:
    return fast_gelu(x if bias is None else x + bias)


@lowering("BiasGelu")
def _bias_gelu(n: Call, a: Any, b: Any) -> Any:
    return gelu(a + b)


@lowering("GemmFastGelu")
def _gemm_fast_gelu(n: Call, x: Any, w: Any, bias: Any) -> Any:
    y = ops.MatMul(x, w)
    return fast_gelu(y if bias is None else y + bias)


@lowering("QuickGelu")
def _quick_gelu(n: Call, x: Any) -> Any:
    return silu(x, n.attr("alpha", 1.702))


@lowering("ScaledSiLU")
def _scaled_silu(n: Call, x: Any, scale: Any) -> Any:
    z = (wide(x) * (n.attr("alpha", 1.0) if scale is None else wide(scale))).astype(x.dtype)
    return z * ops.Sigmoid(z)


@lowering("BiasAdd")
def _bias_add(n: Call, x: Any, bias: Any, skip: Any) -> Any:
    return x + bias + skip


@lowering("BiasSplitGelu")
def _bias_split_gelu(n: Call, x: Any, bias: Any) -> Any:
    left, right = ops.Split(x + bias, axis=-1, num_outputs=2)
    return left * gelu(right)


@lowering("BiasSoftmax")
def _bias_softmax(n: Call, data: Any, bias: Any) -> Any:
    """Softmax over the axes from `axis` on. A bias that is broadcast over inner axes serves consecutive rows of the
    data; one that is broadcast over outer axes begins anew after its last row."""
    axis = n.attr("axis", 1) % data.ndim
    shape = data.shape
    rows, columns = math.prod(shape[:axis]), math.prod(shape[axis:])
    size = math.prod(bias.shape)
    n.check(size % columns == 0 and rows % (size // columns) == 0, f"a bias of {bias.shape} for data of {shape}")
    groups = size // columns
    if n.attr("is_inner_broadcast"):
        total = data.reshape(groups, rows // groups, columns) + bias.reshape(groups, 1, columns)
    else:
        total = data.reshape(rows // groups, groups, columns) + bias.reshape(1, groups, columns)
    return ops.Softmax(total, axis=-1).reshape(*shape)


@lowering("BiasDropout", "BitmaskBiasDropout")
def _bias_dropout(n: Call, data: Any, bias: Any, residual: Any, ratio: Any, training: Any) -> Any:
    mode = n.data(4)
    if training is not None and (mode is None or bool(mode)):
        raise n.refuse("training_mode is set; XRT lowers the inference form")
    total = data + bias
    total = total if residual is None else total + residual
    mask = None
    if n.wants(1):
        if n.node.op_type != "BiasDropout":
            raise n.refuse("its mask of bits is not lowered")
        mask = ops.Expand(np.array(True), np.array(data.shape, np.int64))
    return total, mask


@lowering("BitmaskDropout")
def _bitmask_dropout(n: Call, data: Any, ratio: Any, training: Any) -> Any:
    mode = n.data(2)
    if training is not None and (mode is None or bool(mode)):
        raise n.refuse("training_mode is set; XRT lowers the inference form")
    return ops.Identity(data), None


@lowering("SwiGLU")
def _swiglu(n: Call, gate: Any, up: Any) -> Any:
    """silu(alpha * gate) gated by `up + beta`, both clipped to the limit."""
    if up is None:
        gate, up = ops.Split(gate, axis=-1, num_outputs=2)
    if n.attr("round_activation", 0):
        raise n.refuse("round_activation is not lowered")
    limit = n.attr("limit", 0.0)
    dtype = gate.dtype
    g, u = wide(gate), wide(up)
    if limit:
        g = ops.Min(g, np.array(limit, g.dtype))
        u = ops.Clip(u, np.array(-limit, u.dtype), np.array(limit, u.dtype))
    return (silu(g, n.attr("activation_alpha", 1.0)) * (u + n.attr("activation_beta", 0.0))).astype(dtype)

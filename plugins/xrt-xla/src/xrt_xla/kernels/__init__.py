"""Op kernels of the XLA engine: those with a better form in `jax.lax` first, the portable ones for the rest."""

from xrt_core.engine.op_kernels import register_portable_kernels
from xrt_xla.kernels import (
    barrier,
    boxing,
    control,
    convolution,
    gradient,
    linear,
    normalization,
    pooling,
    quantized,
    recurrent,
    reduction,
    softmax,
    transposed,
    write,
)
from xrt_xla.kernels.context import DEVICES

__all__ = [
    "barrier", "boxing", "control", "convolution", "gradient", "linear", "normalization", "pooling", "quantized",
    "recurrent", "reduction", "softmax", "transposed", "write",
]  # fmt: skip

register_portable_kernels("xla", DEVICES)

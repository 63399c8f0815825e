"""Portable kernels: one function per operator, generic over the array namespace (numpy, cupy, jax.numpy)."""

from xrt_core.kernels.registry import (
    OpContext,
    PortableKernel,
    depends_on_data,
    find_kernel,
    kernel,
    portable_kernels,
    static_inputs,
)

__all__ = [
    "OpContext",
    "PortableKernel",
    "depends_on_data",
    "find_kernel",
    "kernel",
    "portable_kernels",
    "static_inputs",
]

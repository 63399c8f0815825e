"""Op kernels: those of the engine's own first, XRT's for every other operator."""

from xrt_core.engine.op_kernels import register_portable_kernels, register_standard_kernels

from {{ cookiecutter.__module }} import _toolkit
from {{ cookiecutter.__module }}.kernels import elementwise

__all__ = ["elementwise"]

# An operator that has a kernel of the engine's own, by the imports above, keeps it. The portable kernels, about 175,
# are written against NumPy and what is like it (CuPy, jax.numpy); those of the array API standard, about 100, run on
# torch, array_api_strict and other libraries of the standard.
if _toolkit.LIKE_NUMPY:
    register_portable_kernels("{{ cookiecutter.engine }}", {{ cookiecutter.__devices }})
else:
    register_standard_kernels("{{ cookiecutter.engine }}", {{ cookiecutter.__devices }})

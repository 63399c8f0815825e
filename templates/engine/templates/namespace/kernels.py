"""Op kernels: those of the engine's own first, XRT's portable ones for every other operator."""

from xrt_core.engine.op_kernels import register_portable_kernels

from {{ cookiecutter.__module }}.kernels import elementwise

__all__ = ["elementwise"]

# Every portable kernel is written against a NumPy-like namespace, so the library gets them all by this line. It comes
# after the imports above: an operator that has a kernel of the engine's own keeps it.
register_portable_kernels("{{ cookiecutter.engine }}", {{ cookiecutter.__devices }})

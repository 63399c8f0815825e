"""Op kernels, by operator family: importing a family registers its kernels, and what is registered is supported."""

from {{ cookiecutter.__module }}.kernels import elementwise, linear

__all__ = ["elementwise", "linear"]

# YOUR ENGINE: add families. An operator without a kernel stays on XRT's host, so any model runs from the first day.

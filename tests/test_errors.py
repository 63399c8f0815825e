"""The exception hierarchy as users see it."""

from __future__ import annotations

import inspect

import xrt_core as xrt
from xrt_core import errors


def test_every_error_is_at_the_top_level() -> None:
    """`xrt.XRTError` and its kinds are names of the package, and all of them are XRTErrors."""
    found = {n: c for n, c in vars(errors).items() if inspect.isclass(c) and issubclass(c, Exception)}
    assert all(issubclass(c, errors.XRTError) for c in found.values())
    for name, kind in found.items():
        assert getattr(xrt, name) is kind
        assert name in xrt.__all__

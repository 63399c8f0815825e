"""The exception hierarchy as users see it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import xrt_core as xrt
from xrt_core import errors
from xrt_core.ir import types


def test_every_error_is_at_the_top_level() -> None:
    """`xrt.XRTError` and its kinds are names of the package, and all of them are XRTErrors."""
    found = {n: c for n, c in vars(errors).items() if inspect.isclass(c) and issubclass(c, Exception)}
    assert all(issubclass(c, errors.XRTError) for c in found.values())
    for name, kind in found.items():
        assert getattr(xrt, name) is kind
        assert name in xrt.__all__


def test_names_have_hints() -> None:
    """The nearest name is told wherever a name is taken, whatever its case; nothing where none is close."""
    assert errors.nearest("relu", ["Relu", "Elu"]) == "; did you mean 'Relu'?"
    assert errors.nearest("zzz", ["Relu"]) == ""
    assert errors.nearest(3, []) == ""
    with pytest.raises(AttributeError, match="did you mean 'XRTModule'"):
        _ = xrt.XRTModul
    m = xrt.XRTModule(lambda x: -x, engine="host")
    x = np.ones(3, np.float32)
    m(x)
    takes: list[tuple[str, Callable[[], Any]]] = [
        ("'minimum_nodes'", lambda: xrt.XRTModule(lambda x: x, minimum_node=1)),
        ("'host'", lambda: xrt.XRTModule(lambda x: x, engine="hosts")),
        ("'output_0'|did you mean", lambda: m.run({"x": x}, results={"output_1": x})),
        ("'float32'", lambda: xrt.TensorType("flaot32", (1,)) and types.dtype_from_name("flaot32")),
        ("'data'", lambda: xrt.Mesh({"data": 2}).size("dat")),
        ("'learning_rate'|did you mean", lambda: xrt.optim.Adam(0.1, beta_1=3)),
    ]
    for hint, call in takes:
        with pytest.raises(errors.XRTError, match=f"did you mean .*{hint}|{hint}"):
            call()

"""Every ONNX node test on a CuPy host, by the stand-in that refuses what CuPy refuses: results are NumPy's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx.numpy_helper
import pytest

from tests.conformance.node_tests import node_tests
from tests.conformance.test_onnx_nodes import expected_failures
from tests.fake_cupy import installed
from xrt_core.errors import XRTError
from xrt_core.module import XRTModule

pytestmark = pytest.mark.slow

_RANDOM = ("bernoulli", "dropout", "random", "multinomial")
"""Parts of the names of tests whose numbers are drawn."""


_BODIES = "function bodies"


def _by_operator() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for k, (name, test) in enumerate(sorted(node_tests().items())):
        if test.data_sets is not None and name not in expected_failures():
            group = f"{_BODIES} {k % 4}" if "_expanded" in name else test.model.graph.node[0].op_type
            found.setdefault(group, []).append(name)
    return found


BY_OPERATOR = _by_operator()
GROUPS = [pytest.param(n, marks=pytest.mark.nightly if n[:-1] == f"{_BODIES} " and n[-1] != "0" else ())
          for n in sorted(BY_OPERATOR)]  # fmt: skip
"""Names of operators; of the bodies of functions, whose operators have tests of their own, a quarter by day."""


@pytest.fixture(autouse=True)
def _cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XRT_VERIFY", "0")  # tests of NumPy's host verify the same graphs
    with installed():
        yield


def _array(x: Any) -> Any:
    return onnx.numpy_helper.to_array(x) if isinstance(x, onnx.TensorProto) else x


def _on_device(x: Any, cupy: Any) -> Any:
    """A caller's CuPy array, where CuPy has the dtype."""
    if isinstance(x, list):
        return [_on_device(e, cupy) for e in x]
    try:
        return cupy.asarray(x) if isinstance(x, np.ndarray) and x.dtype != object else x
    except ValueError:
        return x


def _same(got: Any, want: Any, numbers: bool) -> None:
    if isinstance(want, list | tuple):
        assert len(got) == len(want)
        for g, w in zip(got, want, strict=True):
            _same(g, w, numbers)
    elif hasattr(want, "dtype"):
        got = got.get() if hasattr(got, "get") else got
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        if want.dtype == object:
            assert got.tolist() == want.tolist()
        elif numbers:
            narrow = want.dtype.itemsize < 4
            np.testing.assert_allclose(
                got.astype(np.complex128), want.astype(np.complex128), rtol=2e-2 if narrow else 1e-3, atol=1e-4
            )
    else:
        assert got == want


def wrong_of(operator: str, both: bool = False) -> dict[str, str]:
    """The tests of an operator that fail, with the reason. All are run with NumPy's arrays; the first and every third,
    or with `both` all, with CuPy's as well."""
    import cupy

    failed: dict[str, str] = {}
    for k, name in enumerate(BY_OPERATOR[operator]):
        test = node_tests()[name]
        inputs, want = ([_array(x) for x in part] for part in test.data_sets[0])
        try:
            module = XRTModule(test.model, engine="host", device="cuda")
            for given in (inputs, [_on_device(x, cupy) for x in inputs])[: 1 if k % 3 and not both else 2]:
                found = module(*given)
                _same(found if isinstance(found, tuple) else (found,), want, not any(part in name for part in _RANDOM))
        except Exception as e:
            with contextlib.suppress(XRTError):  # what NumPy's host cannot either, for want of a package, is not CuPy's
                XRTModule(test.model, engine="host")(*inputs)
                failed[name] = f"{type(e).__name__}: {e}"
    return failed


@pytest.mark.parametrize("operator", GROUPS)
def test_operator(operator: str) -> None:
    """What NumPy's host computes CuPy's does."""
    failed = wrong_of(operator)
    assert not failed, "\n".join(f"{name}: {why}" for name, why in failed.items())

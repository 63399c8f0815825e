"""The stand-in for CuPy refuses what CuPy refuses; it is held against CuPy's wheel where that is (no GPU needed)."""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.fake_cuda import GPU, CUDARuntimeError
from tests.fake_cupy import FUNCTIONS, fake_cupy, installed, ufunc
from xrt_core.runtime.arrays import to_numpy

X = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture
def cupy() -> Iterator[Any]:
    with installed(devices=2) as module:
        yield module


def _real() -> Any:
    return pytest.importorskip("cupy", reason="CuPy's wheel is not installed")


def test_signatures_are_those_of_cupy() -> None:
    """Names, order and kinds of the parameters of every function that it has."""
    real = _real()
    for name, function in FUNCTIONS.items():
        if name == "from_dlpack":  # built in, with its signature in its text
            continue
        own, theirs = (inspect.signature(f).parameters.values() for f in (function, getattr(real, name)))
        assert [(p.name, p.kind) for p in own] == [(p.name, p.kind) for p in theirs], name


def test_loops_are_those_of_cupy() -> None:
    """Each universal function takes the dtypes that CuPy's takes, and gives its."""
    real = _real()
    for name, found in vars(fake_cupy()).items():
        # the first two take structures as well; subtract has a loop of bool, which raises
        if isinstance(found, ufunc) and name not in ("equal", "not_equal", "subtract"):
            loops = {re.sub(r"[^A-Za-z?]", "", t.partition("->")[0])[0] for t in getattr(real, name).types}
            assert {t[0] for t in found.types} == loops, name


def test_methods_are_those_of_cupy() -> None:
    """Parameters of the methods of arrays, which CuPy has in their documentation."""
    real = _real()
    fake = fake_cupy().ndarray
    for name in ("get", "astype", "reshape", "sum", "max", "argsort", "fill", "round", "take", "nonzero", "set"):
        text = str(getattr(real.ndarray, name).__doc__).partition("\n")[0]
        named = [p.partition("=")[0].strip() for p in text.partition("(")[2].partition(")")[0].split(",")]
        found = inspect.signature(getattr(fake, name)).parameters.items()
        assert [f"{'*' * (p.kind is p.VAR_POSITIONAL)}{n}" for n, p in found] == named, name


@pytest.mark.parametrize(
    "call",
    [
        lambda cp, x: np.asarray(x),
        lambda cp, x: x + X,
        lambda cp, x: x * np.array(2.0),
        lambda cp, x: cp.stack([x, X]),
        lambda cp, x: cp.moveaxis(X, 0, 1),
        lambda cp, x: cp.nonzero(X),
        lambda cp, x: cp.argsort(x, stable=True),
        lambda cp, x: cp.max(x, initial=0),
        lambda cp, x: cp.take(x, 0, mode="clip"),
        lambda cp, x: cp.asarray(X.astype(ml_dtypes.float8_e5m2)),
        lambda cp, x: cp.multiply.at(x, (cp.asarray([0]),), 1),
        lambda cp, x: cp.add.at(x.astype(np.int8), (cp.asarray([0]),), 1),
        lambda cp, x: cp.concatenate([cp.sum(x), cp.sum(x)]),
        lambda cp, x: x.__setitem__(slice(None), X),
        lambda cp, x: cp.isnan(x, casting="unsafe", order="C"),
        lambda cp, x: cp.cuda.Device(5).use(),
        lambda cp, x: cp.cuda.ExternalStream(7),
        lambda cp, x: x.__dlpack__(stream=0),
        lambda cp, x: cp.median(x),
    ],
)  # fmt: skip
def test_what_cupy_refuses(cupy: Any, call: Any) -> None:
    """Each of these works with NumPy's arrays or was taken by a laxer stand-in."""
    x = cupy.asarray(X)
    errors = (TypeError, ValueError, NotImplementedError, AttributeError, CUDARuntimeError, DeprecationWarning)
    with pytest.raises(errors):
        call(cupy, x)


def test_arrays_are_not_numpys(cupy: Any) -> None:
    """Neither by class, nor by what reads them; each download is counted."""
    x = cupy.asarray(X)
    assert not isinstance(x, np.ndarray)
    GPU.downloads = 0
    assert (float(x[0, 1]), x[1, 1].item(), bool(x[0, 0])) == (1.0, 4.0, False)
    np.testing.assert_array_equal(to_numpy(x), X)
    assert GPU.downloads == 4


def test_indices_out_of_range_wrap(cupy: Any) -> None:
    """As CuPy documents."""
    x = cupy.asarray(X)
    np.testing.assert_array_equal(x[cupy.asarray([5])].get(), X[[1]])
    np.testing.assert_array_equal(x.take(cupy.asarray([4]), axis=1).get(), X[:, [1]])


def test_results_are_late_on_other_streams(cupy: Any) -> None:
    """A stream that nothing orders after the one of a kernel reads NaN; a DLPack consumer is ordered."""
    with cupy.cuda.Stream(non_blocking=True):
        x = cupy.asarray(X) * 2
    with cupy.cuda.Stream(non_blocking=True):
        assert np.isnan((x + 1).get()).all()
    with cupy.cuda.Stream(non_blocking=True) as other:
        x = cupy.asarray(X) * 2
        ordered = cupy.from_dlpack(x)
    del ordered
    other.synchronize()
    np.testing.assert_array_equal((x + 1).get(), 2 * X + 1)


def test_freed_memory_is_overwritten(cupy: Any) -> None:
    """Once its own stream comes past: a reader on another stream that is late finds NaN."""
    x = cupy.asarray(X)
    cupy.cuda.Device(0).synchronize()
    late = x._memory
    GPU.put(77, lambda: None)
    del x
    (cupy.asarray(X) + 1).get()
    assert np.isnan(late).all()


def test_each_thread_has_its_own_current_stream(cupy: Any) -> None:
    """What an array says of its stream depends on who asks."""
    x, seen = cupy.asarray(X), []
    with cupy.cuda.Stream(non_blocking=True) as stream:
        seen.append(x.__cuda_array_interface__["stream"])
        thread = threading.Thread(target=lambda: seen.append(x.__cuda_array_interface__["stream"]))
        thread.start()
        thread.join()
    assert seen == [stream.ptr, 1]


def test_streams_and_arrays_belong_to_devices(cupy: Any) -> None:
    """Neither is used on another device than its own."""
    x, stream = cupy.asarray(X), cupy.cuda.Stream(non_blocking=True)
    with cupy.cuda.Device(1):
        with pytest.raises(ValueError, match="Peer access"):
            x + 1
        with pytest.raises(RuntimeError, match="does not match"):
            stream.use()


def test_a_broken_context_breaks_every_call(cupy: Any) -> None:
    """CUDA's errors of this kind stay until the process ends."""
    x = cupy.asarray(X)
    GPU.put(0, GPU.break_context)
    for call in (x.get, lambda: x + 1, lambda: cupy.zeros(3)):
        with pytest.raises(CUDARuntimeError, match="illegal memory access"):
            call()


def test_without_a_driver_every_call_fails() -> None:
    """It imports, and says that nothing is there."""
    with installed(devices=0) as cupy:
        assert not cupy.is_available()
        for call in (lambda: cupy.zeros(3), lambda: cupy.cuda.Device(), lambda: cupy.cuda.runtime.getDevice()):
            with pytest.raises(CUDARuntimeError, match="driver version is insufficient"):
                call()

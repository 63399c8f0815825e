"""What only a GPU can show: arrays of other libraries without copies, streams, a grid of full size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from toy_cases import data, of_nodes, value
from xrt_toy import ToyEngine

from xrt_core.engine.contract import InputOutputAlias, RunOptions
from xrt_core.ir.graph import Node

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]


def _add(engine: ToyEngine, *shape: int, alias: bool = False) -> Any:
    a, b, y = (value(n, np.float32, *shape) for n in "aby")
    aliases = [InputOutputAlias(0, 0)] if alias else []
    return of_nodes(engine, [a, b], [Node("Add", [a, b], [y], version=14)], [y], *aliases)


def test_cupy_goes_in_and_out_without_a_copy(engine: ToyEngine) -> None:
    """An aliased CuPy array is updated where it is, and CuPy reads a result from the memory that Toy wrote."""
    cupy = pytest.importorskip("cupy")
    a, b = cupy.arange(6, dtype=cupy.float32), cupy.ones(6, cupy.float32)
    (result,) = _add(engine, 6, alias=True).run([a, b])

    seen = cupy.asarray(result)
    assert seen.data.ptr == a.data.ptr
    assert a.get().tolist() == [1, 2, 3, 4, 5, 6]
    assert b.get().tolist() == [1] * 6


def test_torch_and_dlpack_go_in(engine: ToyEngine) -> None:
    """torch tensors come through their CUDA interface; an object with nothing but DLPack is read in place as well."""
    torch = pytest.importorskip("torch")

    class OnlyDLPack:
        def __init__(self, tensor: Any) -> None:
            self.__dlpack__, self.__dlpack_device__ = tensor.__dlpack__, tensor.__dlpack_device__

    a = torch.arange(6, dtype=torch.float32, device="cuda")
    (y,) = _add(engine, 6).run([a, OnlyDLPack(a)])
    assert np.asarray(y).tolist() == [0, 2, 4, 6, 8, 10]


def test_an_array_with_gaps_is_packed_first(engine: ToyEngine) -> None:
    """A transposed view on the device gives what its elements say, not what its memory holds."""
    cupy = pytest.importorskip("cupy")
    a = cupy.arange(6, dtype=cupy.float32).reshape(2, 3).T
    (y,) = _add(engine, 3, 2).run([a, cupy.zeros((3, 2), cupy.float32)])
    assert np.array_equal(np.asarray(y), a.get())


def test_the_callers_stream_is_used(engine: ToyEngine) -> None:
    """Work goes to the stream in the run options, after what the caller has put there."""
    cupy = pytest.importorskip("cupy")
    run = _add(engine, 1 << 20).run
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        a = cupy.zeros(1 << 20, cupy.float32)
        a += 1
        (y,) = run([a, a], RunOptions(stream=stream.ptr), block_until_done=False)
        total = float(cupy.asarray(y).sum())
    assert total == 2 << 20


@pytest.mark.parametrize("n", [1 << 22, (1 << 22) + 3])
def test_large_arrays_fill_the_grid(engine: ToyEngine, n: int) -> None:
    """Every element of an array that is larger than the grid is computed once."""
    x = data("float32", n)
    (y,) = _add(engine, n).run([x, x])
    assert np.array_equal(np.asarray(y), x + x)


def test_a_large_product(engine: ToyEngine) -> None:
    """Tiles at the edges of matrices that no tile divides."""
    a, b, y = value("a", np.float32, 517, 333), value("b", np.float32, 333, 129), value("y", np.float32, 517, 129)
    run = of_nodes(engine, [a, b], [Node("MatMul", [a, b], [y], version=13)], [y]).run
    left, right = data("float32", 517, 333), data("float32", 333, 129)
    want = left.astype(np.float64) @ right.astype(np.float64)
    np.testing.assert_allclose(np.asarray(run([left, right])[0]), want, rtol=1e-4, atol=1e-3)

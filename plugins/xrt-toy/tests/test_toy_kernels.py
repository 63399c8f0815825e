"""Every kernel with every dtype: on the device at hand against the core's portable kernels, and compiled to PTX."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy_cases import Case, cases, compiled, data, of_nodes, value
from xrt_toy import ToyEngine, _toolkit

from xrt_core.engine.op_kernels import op_kernels
from xrt_core.ir.graph import Node

TOLERANCE = {"float16": 4e-3, "float32": 2e-5, "float64": 1e-12}
SLOW_IN_SINGLE = {"Cos", "Sin", "Cast"}
"""Who may calculate in double precision where no operand has it: CUDA reduces large angles so, and Cast takes integers
through it."""
HERE = Path(__file__).parent


@pytest.mark.parametrize("case", list(cases()), ids=repr)
def test_a_case_agrees_with_numpy(engine: ToyEngine, case: Case) -> None:
    """The engine takes the node and gives the numbers, dtype and shape of the core's own kernel."""
    function, arrays = case.function()
    verdict = engine.supports(function.body.nodes[0], "cuda:0", "inference")
    assert verdict, verdict.reason

    results = [np.asarray(r) for r in compiled(engine, function).run(arrays)]

    for got, want in zip(results, case.expected(), strict=True):
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        limit = TOLERANCE.get(got.dtype.name, 0)
        np.testing.assert_allclose(got, want, rtol=limit, atol=limit)


def test_the_cases_reach_every_kernel(engine: ToyEngine) -> None:
    """No operator is registered that the cases leave out."""
    engine.prepare()
    assert {case.op_type for case in cases()} == {op for _, op in op_kernels.of_engine("toy")}


def _unary(engine: ToyEngine, op_type: str, x: np.ndarray, **attributes: Any) -> np.ndarray:
    a, y = value("x", x.dtype, *x.shape), value("y", x.dtype, *x.shape)
    return np.asarray(of_nodes(engine, [a], [Node(op_type, [a], [y], attributes, version=13)], [y]).run([x])[0])


def test_nan_and_infinities_go_through(engine: ToyEngine) -> None:
    """Special numbers give what IEEE 754 says, without warnings; a NaN is never lost."""
    x = np.array([np.nan, np.inf, -np.inf, 0], np.float32)

    assert np.array_equal(_unary(engine, "Relu", x), [np.nan, np.inf, 0, 0], equal_nan=True)
    assert np.array_equal(_unary(engine, "Exp", x), [np.nan, np.inf, 0, 1], equal_nan=True)
    assert np.array_equal(_unary(engine, "Log", x), [np.nan, np.inf, np.nan, -np.inf], equal_nan=True)
    assert np.array_equal(_unary(engine, "Sqrt", x), [np.nan, np.inf, np.nan, 0], equal_nan=True)
    assert np.array_equal(_unary(engine, "Sigmoid", x), [np.nan, 1, 0, 0.5], equal_nan=True)
    assert np.array_equal(_unary(engine, "Reciprocal", x), [np.nan, 0, 0, np.inf], equal_nan=True)
    assert np.isnan(_unary(engine, "ReduceMax", x[:1], keepdims=1)).all()


def test_integers_wrap(engine: ToyEngine) -> None:
    """Sums and products beyond the range of an integer wrap around, as NumPy's do."""
    for dtype in (np.int32, np.int64):
        a, b, y = (value(n, dtype, 2) for n in "aby")
        top = np.iinfo(dtype).max
        for op_type, want in (("Add", np.iinfo(dtype).min), ("Mul", top)):
            run = of_nodes(engine, [a, b], [Node(op_type, [a, b], [y], version=14)], [y]).run
            second = np.ones(2, dtype)
            (got,) = run([np.full(2, top, dtype), second])
            assert np.asarray(got).tolist() == [want, want]


@pytest.mark.parametrize("n", [1, 3, 7, 8, 9, 40])
def test_the_flat_kernel_covers_every_length(engine: ToyEngine, n: int) -> None:
    """Four elements a turn and the rest one by one: none is left out and none done twice, whatever the grid."""
    x = data("float32", n)
    assert np.array_equal(_unary(engine, "Neg", x), -x)


@pytest.mark.parametrize("threads", [1, 4])
def test_a_reduction_does_not_depend_on_the_block(
    engine: ToyEngine, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """The tree in shared memory adds up everything for any power of two of threads."""
    if not _toolkit.SIMULATED:
        threads *= 64
    monkeypatch.setattr(_toolkit, "THREADS", threads)
    x, y = value("x", np.int64, 7), value("y", np.int64, 1)
    run = of_nodes(engine, [x], [Node("ReduceSum", [x], [y], version=13)], [y]).run
    assert np.asarray(run([np.arange(7)])[0]).tolist() == [21]


@pytest.mark.parametrize(
    ("op_type", "shapes", "out"),
    [("Relu", [(0, 3)], (0, 3)), ("Add", [(0,), (1,)], (0,)), ("MatMul", [(2, 0), (0, 3)], (2, 3)), ("Neg", [()], ())],
)
def test_empty_tensors_and_scalars(
    engine: ToyEngine, op_type: str, shapes: list[tuple[int, ...]], out: tuple[int, ...]
) -> None:
    """Nothing in gives nothing out, a sum over nothing is 0, and a scalar is an array of one element."""
    inputs = [value(f"x{i}", np.float32, *s) for i, s in enumerate(shapes)]
    y = value("y", np.float32, *out)
    (got,) = of_nodes(engine, inputs, [Node(op_type, inputs, [y], version=14)], [y]).run(
        [np.ones(s, np.float32) for s in shapes]
    )
    assert np.array_equal(np.asarray(got), np.full(out, -1 if op_type == "Neg" else 0, np.float32))


def _ptx(*arguments: str) -> dict[str, Any]:
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "0"}
    numba = "ignore:The 'generic' unit for NumPy timedelta:DeprecationWarning"  # its own, beside NumPy 2.5
    command = [sys.executable, "-W", "error", "-W", numba, str(HERE / "ptx.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=HERE)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    if "missing" in report:
        pytest.skip(f"no CUDA compiler libraries (pip install 'numba-cuda[cu13]'): {report['missing']}")
    return report


OF_EACH_KIND = (
    "Add", "Cast", "Conv", "Gather", "LayerNormalization", "MatMul", "MaxPool", "Pow", "ReduceMean", "Round", "Softmax",
    "Transpose", "Where",
)  # fmt: skip
"""Operators that between them take every kernel, with one, two and three operands and CUDA's own functions."""


def test_a_kernel_of_each_kind_compiles_to_ptx() -> None:
    """What the simulator runs is real CUDA: every kernel compiles, for some operators, for compute capability 9.0."""
    report = _ptx("90", *OF_EACH_KIND)
    assert report["failed"] == {}
    assert set(report["doubles"]) <= SLOW_IN_SINGLE
    assert report["seen"] == sorted(OF_EACH_KIND)
    assert report["compiled"] >= len(OF_EACH_KIND)


@pytest.mark.nightly
def test_every_kernel_compiles_to_ptx() -> None:
    """Every kernel, with every dtype it claims, compiles for compute capabilities 8.0 and 9.0."""
    report = _ptx("80", "90")
    assert report["failed"] == {}
    assert set(report["doubles"]) <= SLOW_IN_SINGLE
    assert report["compiled"] >= 600

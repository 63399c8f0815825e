"""Reductions on the CPU: beside products of uniform weights, which XLA's library gets wrong, and in their forms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from xla_functions import compile_nodes
from xrt_xla import XlaEngine, _toolkit
from xrt_xla._toolkit import jax, jnp

from xrt_core.compiler.services import usable_processors
from xrt_core.ir.graph import Node, Value
from xrt_core.ir.types import TensorType

RNG = np.random.default_rng(5)


def _pooled(engine: XlaEngine, size: int, channels: int, filters: int, **options: Any) -> tuple[Any, np.ndarray]:
    """What a classifier's last layers give for filters that are one number, and what they should."""
    x = np.abs(RNG.standard_normal((1, channels, size, size), dtype=np.float32))
    v = [Value(f"v{i}", TensorType(np.dtype(np.float32), s)) for i, s in enumerate((
        x.shape, (filters, channels, 1, 1), (1, filters, size, size), (1, filters, size, size), (1, filters, 1, 1),
        (1, filters, 1, 1)))]  # fmt: skip
    bias = RNG.standard_normal(filters, dtype=np.float32)
    shape = Value.constant(np.array((filters, channels, 1, 1)), "shape")
    nodes = [
        Node("Expand", [Value.constant(np.float32(0.02), "c"), shape], [v[1]], version=13),
        Node("Conv", [v[0], v[1], Value.constant(bias, "b")], [v[2]], version=11),
        Node("Relu", [v[2]], [v[3]], version=14),
        Node("GlobalAveragePool", [v[3]], [v[4]], version=1),
        Node("Softmax", [v[4]], [v[5]], {"axis": 1}, version=13),
    ]
    got = np.asarray(compile_nodes(engine, [v[0]], nodes, [v[5]], **options).run([x])[0])
    y = x.astype(np.float64).sum(1, keepdims=True) * np.float32(0.02) + bias.reshape(1, -1, 1, 1)
    y = np.maximum(y, 0).mean((2, 3), keepdims=True)
    y = np.exp(y - y.max())
    return got, y / y.sum()


@pytest.mark.parametrize(
    ("size", "channels", "filters", "fused"),
    [(13, 512, 1000, True), (7, 300, 257, True), (3, 40, 600, True), (7, 300, 257, False)],
)
def test_pooling_of_uniform_filters(engine: XlaEngine, size: int, channels: int, filters: int, fused: bool) -> None:
    """A weight that is one number, broadcast in the program, and the reduction after it give finite, right numbers."""
    for _ in range(2 if fused else 1):  # without the engine's option a third of the fused builds give wrong numbers
        got, want = _pooled(engine, size, channels, filters, fused=fused)
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=1e-7)


@pytest.mark.parametrize("operator", ["ReduceSum", "ReduceMax"])
@pytest.mark.parametrize(("rows", "depth", "columns"), [(169, 512, 300), (37, 3, 435)])
@pytest.mark.parametrize("axis", [0, 1])
def test_reduced_products_of_uniform_weights(
    engine: XlaEngine, operator: str, rows: int, depth: int, columns: int, axis: int
) -> None:
    """x @ Expand(scalar), then a reduction over rows or columns, agrees with float64."""
    x = RNG.standard_normal((rows, depth), dtype=np.float32)
    kind = np.dtype(np.float32)
    entry, w, product = (Value(n, TensorType(kind, s)) for n, s in (
        ("x", x.shape), ("w", (depth, columns)), ("p", (rows, columns))))  # fmt: skip
    out = Value("y", TensorType(kind, (columns,) if axis == 0 else (rows,)))
    axes = Value.constant(np.array([axis]), "axes")
    nodes = [
        Node("Expand", [Value.constant(np.float32(0.5), "c"), Value.constant(np.array((depth, columns)))], [w],
             version=13),
        Node("MatMul", [entry, w], [product], version=13),
        Node(operator, [product, axes], [out], {"keepdims": 0}, version=18 if operator == "ReduceMax" else 13),
    ]  # fmt: skip
    got = np.asarray(compile_nodes(engine, [entry], nodes, [out]).run([x])[0])
    y = np.repeat(x.astype(np.float64).sum(1, keepdims=True) * 0.5, columns, 1)
    want = y.max(axis) if operator == "ReduceMax" else y.sum(axis)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize(
    ("shape", "axes", "long"),
    [((4, 70000), (1,), False), ((70000, 4), (0,), True), ((9, 64, 64), (1, 2), True), ((49, 8), (0,), False)],
)
def test_long_reductions_across_rows_are_found(shape: tuple[int, ...], axes: tuple[int, ...], long: bool) -> None:
    """They are seen at the top, and inside jitted calls, loops and branches."""
    x = jnp.zeros(shape)

    def plain(x: Any) -> Any:
        return jnp.sum(x, axes)

    def looped(x: Any) -> Any:
        return jax.lax.fori_loop(0, 3, lambda _, y: y + plain(x * y.sum()), plain(x))

    def branched(x: Any) -> Any:
        return jax.lax.cond(x[(0,) * len(shape)] > 0, plain, lambda x: plain(x) + 1, x)

    for f in (plain, jax.jit(plain), looped, branched):
        assert _toolkit.has_long_reduction(jax.make_jaxpr(f)(x)) is long


def test_a_long_sum_that_is_little_of_the_work_has_no_stages() -> None:
    """Stages would double the time of the many sums along rows; a very long sum keeps them for its digits."""

    def mixed(x: Any, rows: Any) -> Any:
        return x.sum(0), rows.sum(-1)

    cases = ((400, 64), (400, 4000), False), ((400, 64), (400, 400), True), ((5000, 8), (999, 999), True)
    for x, rows, long in cases:
        assert _toolkit.has_long_reduction(jax.make_jaxpr(mixed)(jnp.zeros(x), jnp.zeros(rows))) is long


@pytest.mark.parametrize(
    ("shape", "dtype", "eigen"),
    [((784, 136), np.float32, True), ((128, 136), np.float32, False), ((784, 136), np.float64, False)],
)
def test_products_of_many_rows_are_eigens(
    engine: XlaEngine, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], dtype: Any, eigen: bool
) -> None:
    """XLA's library is left out where Eigen divides a product better; what is asked for wins."""
    monkeypatch.setattr("xrt_xla.compiler.has_few_processors", lambda: True)
    kind, w = np.dtype(dtype), RNG.standard_normal((136, 136)).astype(dtype)
    x, y = (Value(n, TensorType(kind, shape)) for n in "xy")
    node = Node("MatMul", [x, Value.constant(w)], [y], version=13)
    array = RNG.standard_normal(shape).astype(dtype)
    asked = {"xla": dict(_toolkit.CPU_OPTIONS)}
    for extra, is_library in ({}, not eigen), (asked, True):
        executable = compile_nodes(engine, [x], [node], [y], extra=extra)
        np.testing.assert_allclose(executable.run([array])[0], array.astype(np.float64) @ w, rtol=1e-4, atol=1e-4)
        if _toolkit.cpu_options():
            assert ("__ynn_fusion" in executable.as_text()) is is_library


def test_the_largest_loop_is_found() -> None:
    """What a library computes is none; what is reduced is one, and so is what loops and branches compute."""
    x, w = jnp.zeros((4, 1000)), jnp.zeros((1000, 3000))

    def product(x: Any) -> Any:
        return x @ w

    def looped(x: Any) -> Any:
        return jax.lax.fori_loop(0, 3, lambda _, y: y + 1, x)

    def branched(x: Any) -> Any:
        return jax.lax.cond(x[0, 0] > 0, lambda x: jnp.tile(x, 5).sum(), lambda x: x[0, 0], x)

    for f, floats in ((product, 0), (looped, 4000), (branched, 20000), (lambda x: x.sum(), 4000)):
        assert _toolkit.largest_loop(jax.make_jaxpr(f)(x)) == 4 * floats, f


@pytest.mark.parametrize(("columns", "divided"), [(4096, False), (65536, True)])
def test_only_programs_with_long_loops_divide_them(engine: XlaEngine, columns: int, divided: bool) -> None:
    x, y = (Value(n, TensorType(np.dtype(np.float32), (4, columns))) for n in "xy")
    executable = compile_nodes(engine, [x], [Node("Exp", [x], [y], version=13)], [y])
    array = RNG.standard_normal((4, columns), np.float32)
    np.testing.assert_allclose(executable.run([array])[0], np.exp(array.astype(np.float64)), rtol=1e-5)
    if usable_processors() > 1:
        assert ("outer_dimension_partitions" in executable.as_text()) is divided


@pytest.mark.parametrize(("shape", "axis"), [((1 << 22,), 0), ((1 << 19, 8), 0), ((3, 1 << 18), 1)])
def test_long_sums_keep_their_digits(engine: XlaEngine, shape: tuple[int, ...], axis: int) -> None:
    """A sum of millions of float32 has six digits, along rows and across them."""
    x = RNG.random(shape, dtype=np.float32)
    want = x.astype(np.float64).sum(axis)
    entry, out = (Value(n, TensorType(np.dtype(np.float32), s)) for n, s in (("x", shape), ("y", want.shape)))
    node = Node("ReduceSum", [entry, Value.constant(np.array([axis]))], [out], {"keepdims": 0}, version=13)
    np.testing.assert_allclose(compile_nodes(engine, [entry], [node], [out]).run([x])[0], want, rtol=5e-6)


def test_options_that_the_compiler_does_not_know_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another release of JAX without this option, or with other values for it, compiles without."""
    known = {"xla_cpu_enable_fast_math": False}
    options: Mapping[str, Any] = {"xla_no_such_option": "1", "xla_cpu_experimental_ynn_fusion_type": "NONE", **known}
    monkeypatch.setattr(_toolkit, "CPU_OPTIONS", options)
    assert dict(_toolkit.cpu_options.__wrapped__()) == known


@pytest.mark.parametrize("operator", ["Softmax", "LogSoftmax"])
def test_softmax_of_huge_logits_is_finite(engine: XlaEngine, operator: str) -> None:
    """Equal means around 1e10, which XLA computes in two places with two roundings, share the probability."""
    kind = np.dtype(np.float32)
    entry = Value("x", TensorType(kind, (1, 1000, 13, 13)))
    mean, out = (Value(n, TensorType(kind, (1, 1000, 1, 1))) for n in "my")
    nodes = [
        Node("GlobalAveragePool", [entry], [mean], version=1),
        Node(operator, [mean], [out], {"axis": 1}, version=13),
    ]
    executable = compile_nodes(engine, [entry], nodes, [out])
    for _ in range(4):
        x = np.repeat(RNG.random((1, 1, 13, 13), dtype=np.float32) * np.float32(1e10), 1000, 1)
        got = np.asarray(executable.run([x])[0])
        np.testing.assert_allclose(got, 1e-3 if operator == "Softmax" else np.log(1e-3), rtol=1e-5)


@pytest.mark.parametrize("operator", ["LayerNormalization", "RMSNormalization"])
def test_a_residual_sum_is_computed_once(engine: XlaEngine, operator: str) -> None:
    """Normalisations of one residual stream do not compute the earlier ones again, and agree with float64."""
    layers, shape, kind = 8, (1, 128, 256), np.dtype(np.float32)
    weights = [RNG.standard_normal((256, 256), dtype=np.float32) / 16 for _ in range(layers)]
    scale = RNG.standard_normal(256, dtype=np.float32)
    x = RNG.standard_normal(shape, dtype=np.float32)
    entry = stream = Value("x", TensorType(kind, shape))
    want, nodes = x.astype(np.float64), []
    version = 17 if operator == "LayerNormalization" else 23
    for i, w in enumerate(weights):
        normal, product, total = (Value(f"{n}{i}", TensorType(kind, shape)) for n in "npt")
        nodes += [
            Node(operator, [stream, Value.constant(scale, "s")], [normal], version=version),
            Node("MatMul", [normal, Value.constant(w, f"w{i}")], [product], version=13),
            Node("Add", [normal, product], [total], version=14),
        ]
        centred = want - want.mean(-1, keepdims=True) if operator == "LayerNormalization" else want
        normed = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale
        want, stream = normed + normed @ w, total
    executable = compile_nodes(engine, [entry], nodes, [stream])
    np.testing.assert_allclose(np.asarray(executable.run([x])[0]), want, rtol=1e-4, atol=1e-4)
    assert executable.as_text().count("rsqrt(") + executable.as_text().count(" divide(") <= 2 * layers
    largest = max(line.count("param_") for line in executable.as_text().splitlines() if line.startswith("%fused"))
    assert largest <= 6  # a fusion that reaches back through the stream takes something from every layer


@pytest.mark.parametrize("operator", ["ReduceSum", "ReduceMean"])
@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("shape", [(2, 3, 300, 5), (1, 2, 1, 2, 3), (130, 4, 1), (3, 2, 8, 9)])
def test_sums_and_means_over_all_but_channels(
    engine: XlaEngine, shape: tuple[int, ...], keepdims: int, operator: str
) -> None:
    """In stages, channels last, they are float64's to rounding: a thousand equal numbers lose nothing."""
    x = RNG.standard_normal(shape, dtype=np.float32) + 1000
    entry = Value("x", TensorType(x.dtype, x.shape))
    over = (0, *range(2, x.ndim))
    reduction = np.sum if operator == "ReduceSum" else np.mean
    want = reduction(x.astype(np.float64), over, keepdims=bool(keepdims))
    y = Value("y", TensorType(x.dtype, want.shape))
    axes = Value.constant(np.array([*range(2, x.ndim), -x.ndim]), "axes")
    node = Node(operator, [entry, axes], [y], {"keepdims": keepdims}, version=13 if operator == "ReduceSum" else 18)
    got = np.asarray(compile_nodes(engine, [entry], [node], [y]).run([x])[0])
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=5e-7)

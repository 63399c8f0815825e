"""Compiling and running: numbers, dtypes, configuration, aliasing, threads, serialisation, bad input."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from msgspec import structs
from xla_functions import compile_nodes
from xrt_xla import XlaEngine, _toolkit
from xrt_xla.blob import pack, unpack
from xrt_xla.program import Program

import xrt_core as xrt
from xrt_core.engine import engines
from xrt_core.engine.contract import CompileOptions, Function, InputOutputAlias, RunOptions
from xrt_core.engine.op_kernels import op_kernels
from xrt_core.errors import CompileError, ExecutionError
from xrt_core.ir.graph import NO_ANNOTATIONS, Graph, Node, SourceLocation, Value
from xrt_core.ir.types import DTYPE_TO_ONNX, TensorType

RNG = np.random.default_rng(7)


def _value(name: str, dtype: Any, *shape: int) -> Value:
    return Value(name, TensorType(np.dtype(dtype), shape))


def _binary(engine: XlaEngine, op_type: str, dtype: Any, *shape: int, version: int = 14, **options: Any) -> Any:
    a, b, y = (_value(n, dtype, *shape) for n in "aby")
    return compile_nodes(engine, [a, b], [Node(op_type, [a, b], [y], version=version, name="n")], [y], **options)


def _aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def _chain(*layers: tuple[np.ndarray, np.ndarray]) -> tuple[list[Value], list[Node], list[Value]]:
    """Dense layers with Tanh between them."""
    x = current = _value("x", np.float32, 4, layers[0][0].shape[0])
    nodes = []
    for i, (w, b) in enumerate(layers):
        product, shifted, out = (_value(f"{n}{i}", np.float32, 4, w.shape[1]) for n in ("m", "s", "t"))
        nodes.append(Node("MatMul", [current, Value.constant(w, f"w{i}")], [product], version=13))
        nodes.append(Node("Add", [product, Value.constant(b, f"b{i}")], [shifted], version=14))
        nodes.append(Node("Tanh", [shifted], [out], version=13))
        current = out
    return [x], nodes, [current]


def _layers(*sizes: int) -> list[tuple[np.ndarray, np.ndarray]]:
    return [
        (RNG.standard_normal((m, n), np.float32) / np.float32(np.sqrt(m)), RNG.standard_normal(n, np.float32))
        for m, n in pairwise(sizes)
    ]


def _expect(layers: list[tuple[np.ndarray, np.ndarray]], x: np.ndarray) -> np.ndarray:
    y = x.astype(np.float64)
    for w, b in layers:
        y = np.tanh(y @ w + b)
    return y


@pytest.mark.parametrize("fold_bytes", [0, 16384, 1 << 30])
def test_a_chain_agrees_with_numpy_in_float64(engine: XlaEngine, fold_bytes: int) -> None:
    """Weights in the program, beside it, or both: the numbers are those of float64 up to float32 rounding."""
    layers = _layers(64, 256, 32, 8)
    run = compile_nodes(engine, *_chain(*layers), extra={"fold_bytes": fold_bytes}).run
    x = RNG.standard_normal((4, 64), np.float32)
    (y,) = run([x])
    np.testing.assert_allclose(np.asarray(y), _expect(layers, x), rtol=1e-5, atol=1e-6)


def test_64_bit_types_are_exact(engine: XlaEngine) -> None:
    """int64, uint64 and float64 keep every bit while `jax_enable_x64` is off for the rest of the process."""
    assert not jax.config.jax_enable_x64
    big = np.array([2**62 + 1, -(2**53) - 1], np.int64)
    (y,) = _binary(engine, "Add", np.int64, 2).run([big, np.array([3, -4], np.int64)])
    assert np.asarray(y).tolist() == [2**62 + 4, -(2**53) - 5]
    (y,) = _binary(engine, "Mul", np.uint64, 1).run([np.array([2**40 + 1], np.uint64), np.array([2**23], np.uint64)])
    assert int(np.asarray(y)[0]) == (2**40 + 1) * 2**23
    (y,) = _binary(engine, "Add", np.float64, 1).run([np.array([1.0]), np.array([2.0**-50])])
    assert np.asarray(y)[0] == 1 + 2.0**-50
    assert not jax.config.jax_enable_x64
    assert jax.numpy.asarray(np.array([1, 2])).dtype == np.int32


def test_results_feed_the_next_call(engine: XlaEngine) -> None:
    """What one call returns can be given to the next, 64-bit arrays too."""
    add = _binary(engine, "Add", np.int64, 2)
    one = np.array([2**40, 1], np.int64)
    (y,) = add.run([one, one])
    (z,) = add.run([y, y])
    assert np.asarray(z).tolist() == [2**42, 4]


SETTINGS = [
    ("jax_enable_x64", True),
    ("jax_default_matmul_precision", "bfloat16"),
    ("jax_numpy_dtype_promotion", "strict"),
    ("jax_numpy_rank_promotion", "raise"),
    ("jax_debug_nans", True),
    ("jax_debug_infs", True),
    ("jax_disable_jit", True),
    ("jax_transfer_guard", "disallow"),
    ("jax_default_prng_impl", "rbg"),
]


@pytest.fixture(scope="module")
def divided(engine: XlaEngine) -> tuple[Callable[[], list[np.ndarray]], list[np.ndarray]]:
    """Compiles and runs a product and a quotient; and what they give without settings."""
    a, b, y, q = (_value(n, np.float32, 2, 2) for n in "abyq")
    nodes = [Node("MatMul", [a, b], [y], version=13), Node("Div", [a, b], [q], version=14)]
    left, right = np.array([[1, 0], [1.0001, 3]], np.float32), np.array([[0, 0], [1, 1]], np.float32)

    def run() -> list[np.ndarray]:
        return [np.asarray(r) for r in compile_nodes(engine, [a, b], nodes, [y, q]).run([left, right])]

    return run, run()


@pytest.mark.parametrize(("name", "value"), SETTINGS)
def test_the_callers_configuration_changes_nothing(divided: Any, name: str, value: Any) -> None:
    """Whatever the caller set in JAX: the same numbers, NaN and infinity are results, and the setting stays."""
    run, want = divided
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        got = run()
        assert getattr(jax.config, name) == value
    finally:
        jax.config.update(name, before)
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype
        np.testing.assert_array_equal(g, w)
    assert np.isnan(want[1]).any()
    assert np.isinf(want[1]).any()


def test_rounding_to_a_narrow_type_and_back_is_kept(engine: XlaEngine) -> None:
    """A Cast to float8 and back rounds, also inside one fusion."""
    x, y, z = _value("x", np.float32, 8), _value("y", ml_dtypes.float8_e4m3fn, 8), _value("z", np.float32, 8)
    nodes = [
        Node("Cast", [x], [y], {"to": 17}, version=19),
        Node("Cast", [y], [z], {"to": 1}, version=19),
    ]
    array = np.linspace(0.1, 3, 8).astype(np.float32)
    (got,) = compile_nodes(engine, [x], nodes, [z]).run([array])
    np.testing.assert_array_equal(np.asarray(got), array.astype(ml_dtypes.float8_e4m3fn).astype(np.float32))


def test_inputs_and_constants_may_be_returned(engine: XlaEngine) -> None:
    """Inputs passed through, constants, and one value returned twice; the caller may reuse its buffer afterwards."""
    x = _value("x", np.float32, 1 << 16)
    y = _value("y", np.float32, 1 << 16)
    constant = Value.constant(np.arange(3, dtype=np.int64), "c")
    executable = compile_nodes(engine, [x], [Node("Neg", [x], [y], version=13)], [x, constant, y, y])
    array = _aligned((1 << 16,), np.float32)
    array[:] = 1
    same, three, minus, again = executable.run([array])
    array[:] = 5
    assert np.asarray(same)[0] == 1
    assert np.asarray(three).tolist() == [0, 1, 2]
    assert np.asarray(three).dtype == np.int64
    assert np.asarray(minus)[-1] == np.asarray(again)[-1] == -1


def test_a_graph_without_nodes_or_inputs_runs(engine: XlaEngine) -> None:
    """Nothing to compute is no special case."""
    x = _value("x", np.int32, 0, 3)
    (y,) = compile_nodes(engine, [x], [], [x]).run([np.zeros((0, 3), np.int32)])
    assert np.asarray(y).shape == (0, 3)
    (c,) = compile_nodes(engine, [], [], [Value.constant(np.float64(2.5) * np.ones(()), "c")]).run([])
    assert np.asarray(c) == 2.5


def test_a_large_aligned_input_is_read_in_place_and_left_alone(engine: XlaEngine) -> None:
    """Inputs are never written to, whatever their alignment, and are free again after the call."""
    add = _binary(engine, "Add", np.float32, 1 << 18)
    for a in (_aligned((1 << 18,), np.float32), np.empty((1 << 18) + 1, np.float32)[1:]):
        a[:] = 2
        a.flags.writeable = False
        (y,) = add.run([a, a])
        assert np.asarray(y)[7] == 4
        a.flags.writeable = True
        assert (a == 2).all()


def _updater(engine: XlaEngine) -> Any:
    """p' = p - g, written into p; and the sum p + g beside it."""
    p, g, new, total = (_value(n, np.float32, 1024) for n in ("p", "g", "new", "total"))
    nodes = [Node("Sub", [p, g], [new], version=14), Node("Add", [p, g], [total], version=14)]
    function = Function.from_graph(
        Graph([p, g], [total, new], nodes, opsets={"": 21}), name="update", aliases=[InputOutputAlias(1, 0)]
    )
    compiler = engine.compiler("cpu", CompileOptions())
    return compiler.compile(function, function.params, function.returns, function.aliases)


def test_an_aliased_output_takes_the_storage_of_its_input(engine: XlaEngine) -> None:
    """The updated variable lies where the old one lay; nothing is copied."""
    update = _updater(engine)
    assert "input_output_alias" in update.as_text()
    p = jax.numpy.full(1024, 5, np.float32)  # a buffer of JAX's own: one that NumPy lent is never written
    g = jax.device_put(np.full(1024, 2, np.float32))
    where = p.unsafe_buffer_pointer()
    total, new = update.run([p, g])
    assert (np.asarray(total) == 7).all()
    assert (np.asarray(new) == 3).all()
    assert new.unsafe_buffer_pointer() == where
    assert p.is_deleted()
    assert not g.is_deleted()


def test_without_donation_the_aliased_input_stays(engine: XlaEngine) -> None:
    """`donate=False` keeps the old variable, given as JAX or as NumPy array."""
    update = _updater(engine)
    host = _aligned((1024,), np.float32)
    host[:] = 5
    for p in (jax.device_put(np.full(1024, 5, np.float32)), host):
        _, new = update.run([p, np.ones(1024, np.float32)], RunOptions(donate=False))
        assert (np.asarray(new) == 4).all()
        assert (np.asarray(p) == 5).all()


def test_donation_survives_a_caller_who_hunts_for_nan(engine: XlaEngine) -> None:
    """A NaN in an update is a result, and no input is lost on the way, under `jax_debug_nans`."""
    update = _updater(engine)
    with jax.debug_nans(True):
        _, new = update.run([jax.device_put(np.full(1024, np.nan, np.float32)), np.ones(1024, np.float32)])
    assert np.isnan(np.asarray(new)).all()


def test_many_threads_may_run_and_compile(engine: XlaEngine) -> None:
    """Sixteen threads over one executable and over one compiler each get their own, right results."""
    layers = _layers(32, 64, 8)
    inputs, nodes, outputs = _chain(*layers)
    executable = compile_nodes(engine, inputs, nodes, outputs)
    start = threading.Barrier(16)

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        start.wait()
        own = compile_nodes(engine, inputs, nodes, outputs) if seed % 4 == 0 else executable
        for _ in range(50):
            x = rng.standard_normal((4, 32), np.float32)
            np.testing.assert_allclose(np.asarray(own.run([x])[0]), _expect(layers, x), rtol=1e-4, atol=1e-5)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(16)))


def test_an_executable_is_loaded_with_its_weights(engine: XlaEngine) -> None:
    """The same bits, weights and 64-bit inputs included; what was loaded can be shown and stored again."""
    inputs, nodes, outputs = _chain(*_layers(64, 256, 8))
    extra = _value("n", np.int64, 2)
    double = _value("d", np.int64, 2)
    nodes.append(Node("Add", [extra, extra], [double], version=14))
    executable = compile_nodes(engine, [*inputs, extra], nodes, [*outputs, double])
    given = [RNG.standard_normal((4, 64), np.float32), np.array([2**40, -1], np.int64)]
    want = [np.asarray(r) for r in executable.run(given)]
    compiler = engine.compiler("cpu", CompileOptions())
    loaded = compiler.load(executable.serialize())
    assert "HloModule" in loaded.as_text()
    for e in (loaded, compiler.load(loaded.serialize())):
        for got, expected in zip(e.run(given), want, strict=True):
            assert got.dtype == expected.dtype
            np.testing.assert_array_equal(np.asarray(got), expected)


@pytest.fixture
def jaxs_own_cache(tmp_path: Path) -> Iterator[Path]:
    """A caller who has JAX store all that it compiles."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        yield tmp_path
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def test_executables_serialise_under_a_caller_who_caches_compilations(engine: XlaEngine, jaxs_own_cache: Path) -> None:
    """JAX's own disk cache does not come between: what is compiled twice with it on still serialises and runs."""
    x, y, z = (_value(n, np.float32, 67) for n in "xyz")
    nodes = [Node("Tanh", [x], [y], version=13), Node("Add", [x, y], [z], version=14)]
    for _ in range(2):
        blob = compile_nodes(engine, [x], nodes, [z]).serialize()
        jax.clear_caches()
    assert list(jaxs_own_cache.iterdir())
    (r,) = engine.compiler("cpu", CompileOptions()).load(blob).run([np.zeros(67, np.float32)])
    assert (np.asarray(r) == 0).all()


def test_arrays_of_another_device_are_brought_here() -> None:
    """JAX's arrays may lie where the executable does not, say on a GPU while it is for the CPU, or on several."""
    code = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from xrt_core.engine.contract import CompileOptions, Function
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.types import TensorType
from xrt_xla import XlaEngine, _toolkit
from xrt_xla.blob import pack, unpack
t = TensorType(np.dtype(np.float32), (64,))
x, w, y = Value("x", t), Value("w", t), Value("y", t)
function = Function.from_graph(Graph([x, w], [y], [Node("Add", [x, w], [y], version=14)], opsets={"": 21}))
made = XlaEngine().compiler("cpu", CompileOptions()).compile(function, function.params, function.returns, ())
first, second = jax.devices("cpu")
given = np.arange(64, dtype=np.float32)
spread = NamedSharding(Mesh(np.array([first, second]), ("i",)), PartitionSpec("i"))
for place in (second, spread):
    (r,) = made.run([jax.device_put(given, place), given])
    assert r.devices() == {first}
    np.testing.assert_array_equal(np.asarray(r), given + given)
"""
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr


def test_donation_survives_serialisation(engine: XlaEngine) -> None:
    """A loaded update still writes in place, and still keeps its input when told to."""
    update = engine.compiler("cpu", CompileOptions()).load(_updater(engine).serialize())
    p = jax.device_put(np.full(1024, 5, np.float32))
    _, new = update.run([p, np.ones(1024, np.float32)], RunOptions(donate=False))
    assert not p.is_deleted()
    _, newer = update.run([new, np.ones(1024, np.float32)])
    assert new.is_deleted()
    assert np.asarray(newer)[0] == 3


def test_damaged_blobs_are_refused(engine: XlaEngine) -> None:
    """Foreign, cut and altered blobs are a CompileError with the reason."""
    compiler = engine.compiler("cpu", CompileOptions())
    blob = _binary(engine, "Add", np.float32, 2).serialize()
    with pytest.raises(CompileError, match="xla: the blob is not a serialised executable of this version"):
        compiler.load(b"something else entirely")
    with pytest.raises(CompileError, match="xla: the blob is damaged or cut off"):
        compiler.load(blob[:-40])
    stored = unpack(blob, _toolkit.fingerprint_of(_toolkit.device_named("cpu")))
    with pytest.raises(CompileError, match="made for 'jax 0"):
        compiler.load(pack(stored, "jax 0", (), hold=False))


def test_the_unfused_build_has_no_fusions_and_the_same_numbers(engine: XlaEngine) -> None:
    """`fused=False` is an independent build to hold the fused one against."""
    layers = _layers(16, 16)
    fused = compile_nodes(engine, *_chain(*layers))
    unfused = compile_nodes(engine, *_chain(*layers), fused=False)
    assert "fused_computation" in fused.as_text()
    assert "fused_computation" not in unfused.as_text()
    x = RNG.standard_normal((4, 16), np.float32)
    np.testing.assert_allclose(np.asarray(unfused.run([x])[0]), np.asarray(fused.run([x])[0]), rtol=1e-6, atol=1e-6)


def test_bad_input_is_named_and_the_executable_stays_usable(engine: XlaEngine) -> None:
    """Wrong count, dtype, shape or kind of input: one ExecutionError that says which, then it works again."""
    add = _binary(engine, "Add", np.float32, 2)
    good = np.ones(2, np.float32)
    with pytest.raises(ExecutionError, match="takes 2 inputs, 1 were given"):
        add.run([good])
    with pytest.raises(ExecutionError, match=r"input 'b' must be float32\[2\], float64\[2\] was given"):
        add.run([good, np.ones(2)])
    with pytest.raises(ExecutionError, match=r"input 'a' must be float32\[2\], float32\[3\] was given"):
        add.run([np.ones(3, np.float32), good])
    with pytest.raises(ExecutionError, match=r"input 'a' must be float32\[2\], str was given"):
        add.run(["no", good])
    (y,) = add.run([good, good])
    assert np.asarray(y).tolist() == [2, 2]


@pytest.mark.parametrize("x64", [True, False])
def test_small_results_of_numpy_arrays_are_numpy_arrays(engine: XlaEngine, x64: bool) -> None:
    """The caller's own and writable, of 64 bits too; those of JAX's arrays, and large ones, are JAX's."""
    x, most, sums = _value("x", np.float32, 8, 4), _value("most", np.int64, 8), _value("sums", np.float32, 4)
    nodes = [
        Node("ArgMax", [x], [most], {"axis": 1, "keepdims": 0}, version=13),
        Node("ReduceSum", [x, Value.constant(np.array([0]))], [sums], {"keepdims": 0}, version=13),
    ]
    small = compile_nodes(engine, [x], nodes, [most, sums])
    given = RNG.standard_normal((8, 4), np.float32)
    with jax.enable_x64(x64):
        found, of_jax = small.run([given]), small.run([jax.device_put(given)])
        again = small.run([given])
    for results in (found, of_jax):
        assert [r.dtype for r in results] == [np.int64, np.float32]
        np.testing.assert_array_equal(results[0], given.argmax(1))
        np.testing.assert_allclose(np.asarray(results[1]), given.astype(np.float64).sum(0), rtol=1e-5, atol=1e-6)
    assert [type(r) for r in found] == [np.ndarray] * 2
    assert all(isinstance(r, jax.Array) for r in of_jax)
    found[1][:] = 0
    np.testing.assert_array_equal(again[1], of_jax[1])
    large = np.ones((64, 128), np.float32)
    assert isinstance(_binary(engine, "Add", np.float32, 64, 128).run([large, large])[0], jax.Array)
    wide = np.ones(2, np.float64)
    assert isinstance(_binary(engine, "Add", np.float64, 2).run([wide, wide])[0], jax.Array)


def test_large_results_of_a_model_are_not_copied() -> None:
    """They are the memory that the program wrote: the caller's, writable, alive after the module, and of each call its
    own. Types that NumPy does not have are copied."""
    n = 1 << 14
    x, twice, same = _value("x", np.float32, n), _value("twice", np.float32, n), _value("same", np.float32, n)
    narrow = _value("narrow", ml_dtypes.bfloat16, n)
    nodes = [
        Node("Add", [x, x], [twice], version=14),
        Node("Abs", [twice], [same], version=13),
        Node("Cast", [x], [narrow], {"to": DTYPE_TO_ONNX[np.dtype(ml_dtypes.bfloat16)]}, version=13),
    ]
    m = xrt.XRTModule(Graph([x], [twice, same, narrow], nodes, name="g", opsets={"": 18}), engine="xla", guard=False)
    given = np.arange(n, dtype=np.float32)
    first, second = m(given), m(given)
    assert {c.engine for c in m.explain().report.clusters} == {"xla"}
    assert [y.flags.owndata for y in first[:2]] == [False, False]
    assert all(y.flags.writeable for y in first)
    for y in first:
        y[:] = 7
    m.close()
    del m
    gc.collect()
    for y, dtype in zip(second, (np.float32, np.float32, ml_dtypes.bfloat16), strict=True):
        assert y.dtype == dtype
        np.testing.assert_array_equal(y, (given if dtype != np.float32 else given * 2).astype(dtype))
    np.testing.assert_array_equal(given, np.arange(n))


def test_a_node_that_does_not_trace_is_named(engine: XlaEngine) -> None:
    """A compile error says which node, from which line, and why."""
    a, b, y = _value("a", np.float32, 2, 3), _value("b", np.float32, 2, 3), _value("y", np.float32, 2, 3)
    here = NO_ANNOTATIONS.replace(source=SourceLocation("model.py", 12, "build"))
    node = Node("MatMul", [a, b], [y], version=13, name="bad", annotations=here)
    with pytest.raises(CompileError, match=r"node 'bad' \(MatMul-13\) from model.py:12 in build does not trace"):
        compile_nodes(engine, [a, b], [node], [y])


def test_a_wrong_declared_type_is_named(engine: XlaEngine) -> None:
    """A graph whose types are wrong is refused, not silently computed."""
    a, y = _value("a", np.float32, 2, 3), _value("y", np.float32, 3, 2)
    with pytest.raises(CompileError, match=r"output 0 of node 'n' .* came out as float32\[2, 3\], but its type is"):
        compile_nodes(engine, [a], [Node("Neg", [a], [y], version=13, name="n")], [y])


def test_nodes_of_constants_are_computed_once(engine: XlaEngine) -> None:
    """Dequantising a weight happens when the executable is built, not at every call."""
    q = RNG.integers(-128, 128, (256, 256)).astype(np.int8)
    scale = np.float32(0.5) * np.ones((), np.float32)
    x, w, y = _value("x", np.float32, 1, 256), _value("w", np.float32, 256, 256), _value("y", np.float32, 1, 256)
    nodes = [
        Node("DequantizeLinear", [Value.constant(q, "q"), Value.constant(scale, "s")], [w], version=21),
        Node("MatMul", [x, w], [y], version=13),
    ]
    executable = compile_nodes(engine, [x], nodes, [y])
    array = RNG.standard_normal((1, 256), np.float32)
    assert "s8[" not in executable.as_text()
    want = array.astype(np.float64) @ (q * 0.5)
    np.testing.assert_allclose(np.asarray(executable.run([array])[0]), want, rtol=1e-4, atol=1e-3)


def _filled(name: str, number: float, *shape: int) -> tuple[Value, Node]:
    v = _value(name, np.float32, *shape)
    of = Value.constant(np.array(shape, np.int64), f"{name} shape")
    return v, Node("ConstantOfShape", [of], [v], {"value": np.array([number], np.float32)}, version=9)


def test_operands_of_one_number_are_filled_once(engine: XlaEngine) -> None:
    """A product's weight made by ConstantOfShape, also as a view of it, is not filled in each call, nor stored."""
    x, y = _value("x", np.float32, 1, 256), _value("y", np.float32, 1, 256)
    h, flat = _value("h", np.float32, 1, 256), _value("flat", np.float32, 256, 256)
    (a, fill_a), (b, fill_b) = _filled("a", 0.25, 256, 256), _filled("b", -0.5, 256 * 256)
    square = Value.constant(np.array([256, 256], np.int64), "square")
    nodes = [
        fill_a, fill_b, Node("Reshape", [b, square], [flat], version=14),
        Node("Gemm", [x, a], [h], {"transB": 1}, version=13), Node("MatMul", [h, flat], [y], version=13),
    ]  # fmt: skip
    function = Function.from_graph(Graph([x], [y], nodes, opsets={"": 21}, name="test"))
    compiler = engine.compiler("cpu", CompileOptions())
    executable = compiler.compile(function, function.params, function.returns, ())
    array = RNG.standard_normal((1, 256), np.float32)
    want = array.astype(np.float64) @ np.full((256, 256), 0.25) @ np.full((256, 256), -0.5)
    code = executable.serialize_code()
    assert "broadcast" not in executable.as_text()
    assert len(code) < 256 * 256 * 4
    for made in (executable, compiler.load_code(code, function)):
        np.testing.assert_allclose(np.asarray(made.run([array])[0]), want, rtol=1e-4, atol=1e-3)


def test_only_operands_of_products_are_filled_once_and_not_without_bound(
    engine: XlaEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is added or multiplied element by element stays a number of the program."""
    x, y = _value("x", np.float32, 256, 256), _value("y", np.float32, 256, 256)
    (a, fill), array = _filled("a", 0.25, 256, 256), RNG.standard_normal((256, 256), np.float32)
    added = compile_nodes(engine, [x], [fill, Node("Add", [x, a], [y], version=14)], [y])
    monkeypatch.setattr("xrt_xla.program._FILLED", a_bytes := 256 * 256 * 4)
    nodes = [fill, Node("MatMul", [x, a], [y], version=13)]
    kept = compile_nodes(engine, [x], nodes, [y])
    monkeypatch.setattr("xrt_xla.program._FILLED", a_bytes - 1)
    beyond = compile_nodes(engine, [x], nodes, [y])
    assert [repr(e).split(", ")[1] for e in (added, kept, beyond)] == ["0 weights", "1 weights", "0 weights"]
    np.testing.assert_allclose(np.asarray(added.run([array])[0]), array + 0.25, rtol=1e-6)
    want = array.astype(np.float64) @ np.full((256, 256), 0.25)
    for made in (kept, beyond):
        np.testing.assert_allclose(np.asarray(made.run([array])[0]), want, rtol=1e-4, atol=1e-4)


def test_random_draws_are_left_to_the_program(engine: XlaEngine) -> None:
    """A Dropout of constants is computed beforehand unless it is in training mode."""
    x = Value.constant(np.ones(8, np.float32), "x")
    for mode, steps in ((False, 0), (True, 1)):
        y = _value("y", np.float32, 8)
        inputs = [x, None, Value.constant(np.array(mode), "mode")]
        nodes = [Node("Dropout", inputs, [y], {"seed": 1}, version=13)]
        function = Function.from_graph(Graph([], [y], nodes, opsets={"": 21}, name="f"))
        assert len(Program(function, "cpu", 0).steps) == steps


def test_unblocked_runs_give_the_same(engine: XlaEngine) -> None:
    """Results of a run that does not wait are the same once they are read."""
    add = _binary(engine, "Add", np.float32, 1 << 16)
    x = np.arange(1 << 16, dtype=np.float32)
    (y,) = add.run([x, x], block_until_done=False)
    np.testing.assert_array_equal(np.asarray(y), 2 * x)


def test_a_kernel_that_declares_an_update_is_given_the_state_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """An SGD-like kernel (w - g): the state that a module is called with is consumed, and the new value lies there."""
    engines.get("xla").prepare()
    plain = op_kernels.find("xla", "", "Sub")
    assert plain is not None
    declared = structs.replace(plain, mutable_variables=(0,), model_update=True)
    monkeypatch.setitem(op_kernels._kernels, ("xla", "", "Sub"), declared)
    w, g, new, seen = (_value(n, np.float32, 1024) for n in ("w", "g", "new", "seen"))
    nodes = [Node("Sub", [w, g], [new], version=14, name="update"), Node("Exp", [w], [seen], version=13, name="read")]
    graph = Graph([w, g], [new, seen], nodes, opsets={"": 21}, name="step")
    with xrt.XRTModule(graph, engine="xla", phase="train") as module:
        for start in (5, 3):
            state = jax.numpy.full(1024, start, np.float32)
            where = state.unsafe_buffer_pointer()
            made, read = module(state, jax.numpy.full(1024, 2, np.float32))
            assert (np.asarray(made) == start - 2).all()
            np.testing.assert_allclose(np.asarray(read), np.exp(np.float32(start)), rtol=1e-6)
            assert made.unsafe_buffer_pointer() == where
            assert state.is_deleted()
        rows = module.explain().to_json()["clusters"]
    assert sorted((c["operators"].popitem()[0], c["model_update"]) for c in rows) == [("Exp", False), ("Sub", True)]

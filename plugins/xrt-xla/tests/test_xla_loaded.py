"""Stored programs in jaxlib's own client: a second process does without JAX, and JAX can take over at any time."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from xla_functions import compile_nodes
from xrt_xla import XlaEngine, _jaxlib, loaded
from xrt_xla.executable import XlaExecutable
from xrt_xla.loaded import LoadedExecutable

from xrt_core.engine.contract import CompileOptions, Function, InputOutputAlias
from xrt_core.errors import CompileError, ExecutionError
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.types import TensorType

RNG = np.random.default_rng(3)

pytestmark = pytest.mark.skipif(not _jaxlib._fits(), reason="made for other versions of jaxlib, or for the CPU alone")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine loads as it would in a process that has not imported JAX."""
    monkeypatch.setattr(_jaxlib, "usable", _jaxlib._fits)


def _value(name: str, dtype: Any, *shape: int) -> Value:
    return Value(name, TensorType(np.dtype(dtype), shape))


def _reload(engine: XlaEngine, made: Any) -> Any:
    return engine.compiler("cpu", CompileOptions()).load(made.serialize())


def _product(engine: XlaEngine, size: int = 128) -> tuple[Any, np.ndarray]:
    """An executable of y = x @ w, with the weight beside the program, and w."""
    w = RNG.standard_normal((size, size), np.float32)
    x, y = _value("x", np.float32, 2, size), _value("y", np.float32, 2, size)
    return compile_nodes(engine, [x], [Node("MatMul", [x, Value.constant(w, "w")], [y], version=13)], [y]), w


_RUN = """
import sys
import numpy as np
from xrt_core.module import XRTModule
m = XRTModule(sys.argv[1], engine="xla")
x = np.random.default_rng(0).standard_normal({x}).astype(np.float32)
y = m(x)
print("jax" in sys.modules, "xrt_xla._toolkit" in sys.modules, [e.name for e in m.events][0])
print(np.asarray(y).tobytes().hex())
"""

_HEAVY = """
own = ("xrt_core.frontends.tracing", "xrt_core.reports", "xrt_core.training", "xrt_xla.tracing")
print([name for name in (*own, "numpy.ma", "packaging") if name in sys.modules])
"""

_THEN_JAX = """
import jax
z = m(jax.numpy.asarray(x))
assert isinstance(z, jax.Array) and (np.asarray(z) == y).all()
assert (m(x) == y).all() and isinstance(m(x), np.ndarray)
assert float((jax.jit(lambda a: a @ a.T)(z))[0, 0]) == float(np.asarray(z @ z.T)[0, 0])
"""


def _process(code: str, model: Path, folder: Path, **environment: str) -> list[str]:
    """What a process of its own prints; nothing else may come out of it."""
    done = subprocess.run(
        [sys.executable, "-c", code, str(model)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "XRT_CACHE_DIR": str(folder), **environment},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


def _save(path: Path, x: Sequence[int], w: Sequence[int], y: Sequence[int], last: str) -> Path:
    """A model `last(x @ w)` with that weight."""
    weight = numpy_helper.from_array(np.full(w, 0.5, np.float32) + np.eye(w[-1], dtype=np.float32), "w")
    given, result = (helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", x), ("y", y)))
    nodes = [helper.make_node("MatMul", ["x", "w"], ["a"]), helper.make_node(last, ["a"], ["y"])]
    graph = helper.make_graph(nodes, "g", [given], [result], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
    return path


@pytest.fixture
def two_layers(tmp_path: Path) -> Path:
    """A model whose weight is too large to become part of the program."""
    return _save(tmp_path / "model.onnx", [4, 96], [96, 96], [4, 96], "Tanh")


def test_the_second_process_does_not_import_jax(two_layers: Path, tmp_path: Path) -> None:
    """It loads and runs to the same bits; JAX, when it comes later, lives beside it and its arrays work."""
    run = _RUN.format(x=(4, 96))
    first, second, third = (_process(run + more, two_layers, tmp_path) for more in ("", _HEAVY, _THEN_JAX))

    assert first[0] == "True True cache.miss"
    assert second[0] == third[0] == "False False cache.hit"
    assert first[1] == second[1] == third[1]
    assert second[2] == "[]"


def test_who_has_jax_or_wants_another_device_gets_jax(two_layers: Path, tmp_path: Path) -> None:
    """Nothing is to be saved where JAX is imported, and what JAX_PLATFORMS asks for is JAX's affair."""
    run = _RUN.format(x=(4, 96))
    first = _process(run, two_layers, tmp_path)
    with_jax = _process("import jax\n" + run, two_layers, tmp_path)
    asked = _process(run, two_layers, tmp_path, JAX_PLATFORM_NAME="CPU")

    assert with_jax == ["True True cache.hit", first[1]]
    assert asked == ["True True cache.hit", first[1]]


def test_a_saved_model_is_loaded_without_jax(two_layers: Path, tmp_path: Path) -> None:
    """The same for a model in one file."""
    folder, file = tmp_path / "cache", tmp_path / "model.xrt"
    first = _process(_RUN.format(x=(4, 96)) + f"m.save({str(file)!r})\n", two_layers, folder)
    code = _RUN.format(x=(4, 96)).replace("XRTModule(sys.argv[1], engine=", "XRTModule.load(sys.argv[1], engine=")
    assert _process(code, file, tmp_path / "empty") == ["False False saved.loaded", first[1]]


def test_a_program_that_calls_lapack_goes_through_jax(tmp_path: Path) -> None:
    """Functions that JAX brings to the runtime are not there without it: the load says so, and JAX takes over, which
    crashes the process unless it has looked LAPACK up."""
    path = _save(tmp_path / "model.onnx", [2, 5, 5], [5, 5], [2], "Det")
    first, second = (_process(_RUN.format(x=(2, 5, 5)), path, tmp_path) for _ in range(2))

    assert second == ["True True cache.hit", first[1]]


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int64", "float16", "float32", "float64", "complex64"])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3, 700)], ids=str)
def test_results_are_those_of_jax(alone: None, engine: XlaEngine, dtype: str, shape: tuple[int, ...]) -> None:
    """Every dtype that NumPy has of its own, of any shape, passed through and computed; nothing is shared."""
    x, y = _value("x", dtype, *shape), _value("y", dtype, *shape)
    op = Node("Not", [x], [y], version=1) if dtype == "bool" else Node("Add", [x, x], [y], version=14)
    made = compile_nodes(engine, [x], [op], [x, y])
    given = np.asarray(RNG.standard_normal(shape) * 50, dtype)
    want = [np.asarray(r) for r in made.run([given])]
    same, computed = (executable := _reload(engine, made)).run([given])

    assert type(executable) is LoadedExecutable
    for got, expected in zip((same, computed), want, strict=True):
        assert type(got) is np.ndarray
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        np.testing.assert_array_equal(got, expected)
    assert not np.shares_memory(same, given)
    kept = computed.copy()
    del executable, made
    gc.collect()
    np.testing.assert_array_equal(computed, kept)


def test_inputs_of_any_layout_are_read_and_let_go(alone: None, engine: XlaEngine) -> None:
    """Transposed, strided and unaligned inputs give the right numbers, and no call holds on to its inputs."""
    x, y = _value("x", np.float32, 300, 200), _value("y", np.float32, 300, 200)
    run = _reload(engine, compile_nodes(engine, [x], [Node("Neg", [x], [y], version=13)], [y])).run
    raw = RNG.standard_normal(400 * 600 + 1).astype(np.float32)
    strided = raw[: 300 * 400].reshape(300, 400)[:, ::2]
    for given in (raw[:60000].reshape(200, 300).T, strided, raw[1:60001].reshape(300, 200)):
        np.testing.assert_array_equal(run([given])[0], -given)
    last = raw[:60000].reshape(300, 200).copy()
    seen = weakref.ref(last)
    run([last])
    del last
    run([np.zeros((300, 200), np.float32)])
    gc.collect()
    assert seen() is None


def test_scalars_and_kinds_of_arrays_of_numpy_are_arrays(alone: None, engine: XlaEngine) -> None:
    """What NumPy gives for 0-d results, and its maps of files, are no reason to import JAX."""
    x, y, z = _value("x", np.float32), _value("y", np.float32, 3), _value("z", np.float32, 3)
    executable = _reload(engine, compile_nodes(engine, [x, y], [Node("Add", [x, y], [z], version=14)], [z]))
    (got,) = executable.run([np.float32(2), np.ones(3, np.float32).view(np.recarray)])
    assert type(got) is np.ndarray
    assert got.tolist() == [3, 3, 3]


def test_entries_and_weights_that_nothing_reads_are_skipped(alone: None, engine: XlaEngine) -> None:
    """XLA's program lacks the arguments that it does not need; the call still takes all of them."""
    a, b, c, y = (_value(n, np.float32, 4) for n in "abcy")
    made = compile_nodes(engine, [a, b, c], [Node("Sub", [c, a], [y], version=14)], [y])
    one, two, three = (np.full(4, i, np.float32) for i in (1, 2, 3))
    (got,) = _reload(engine, made).run([one, two, three])
    assert got.tolist() == [2, 2, 2, 2]


def test_weights_come_from_the_function(alone: None, engine: XlaEngine) -> None:
    """`load_code` takes them in place or laid out, and what was loaded serialises again, with them and without."""
    w = RNG.standard_normal((128, 128), np.float32)
    x, y = _value("x", np.float32, 2, 128), _value("y", np.float32, 2, 128)
    graph = Graph([x], [y], [Node("MatMul", [x, Value.constant(w, "w")], [y], version=13)], opsets={"": 21}, name="t")
    function = Function.from_graph(graph)
    compiler = engine.compiler("cpu", CompileOptions())
    made = compiler.compile(function, function.params, function.returns, ())
    given = np.ones((2, 128), np.float32)
    want = np.asarray(made.run([given])[0])
    code = made.serialize_code()
    executable = compiler.load_code(code, function)
    again = compiler.load_code(executable.serialize_code(), function)
    whole = compiler.load(executable.serialize())

    for e in (executable, again, whole):
        assert type(e) is LoadedExecutable
        np.testing.assert_array_equal(e.run([given])[0], want)
    assert executable.serialize_code() == code
    with pytest.raises(CompileError, match="not those of the function"):
        compiler.load(code)


def test_bad_input_is_named_and_costs_nothing(alone: None, engine: XlaEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong count, dtype or shape is an error without JAX's help, and the executable stays as it was."""
    executable = _reload(engine, _product(engine, 128)[0])
    monkeypatch.setattr(LoadedExecutable, "_in_jax", lambda _: pytest.fail("JAX was asked"))
    good = np.ones((2, 128), np.float32)
    with pytest.raises(ExecutionError, match="takes 1 inputs, 2 were given"):
        executable.run([good, good])
    with pytest.raises(ExecutionError, match=r"input 'x' must be float32\[2, 128\], float64\[2, 128\] was given"):
        executable.run([good.astype(np.float64)])
    with pytest.raises(ExecutionError, match=r"float32\[3, 128\] was given"):
        executable.run([np.ones((3, 128), np.float32)])
    assert executable.run([good])[0].shape == (2, 128)


def test_an_array_of_jax_hands_over_for_good(alone: None, engine: XlaEngine) -> None:
    """Results are JAX's then, with the same weights and numbers, and the text of the program can be had."""
    made, w = _product(engine)
    executable = _reload(engine, made)
    given = RNG.standard_normal((2, 128), np.float32)
    (before,) = executable.run([given])
    (after,) = executable.run([jax.numpy.asarray(given)])
    assert isinstance(after, jax.Array)
    np.testing.assert_array_equal(np.asarray(after), before)
    assert isinstance(executable.run([given])[0], jax.Array)
    assert "dot" in executable.as_text()
    np.testing.assert_allclose(before, given @ w, rtol=1e-4, atol=1e-4)


def test_many_short_calls_hand_over_beside_the_caller(
    alone: None, engine: XlaEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JAX's own call is quicker by microseconds: who calls often gets it, and who calls rarely never waits for it."""
    made, _ = _product(engine)
    given = RNG.standard_normal((2, 128), np.float32)
    monkeypatch.setattr(loaded, "_MANY", 10)
    often, seldom = _reload(engine, made), _reload(engine, made)
    (want,) = often.run([given])
    monkeypatch.setattr(loaded, "_SOON", 0.0)
    for _ in range(20):
        assert type(seldom.run([given])[0]) is np.ndarray
    monkeypatch.setattr(loaded, "_SOON", 1e9)
    for _ in range(9):
        np.testing.assert_array_equal(np.asarray(often.run([given])[0]), want)
    for thread in threading.enumerate():
        if thread.name == "xrt-xla-jax":
            thread.join()
    (after,) = often.run([given])
    assert isinstance(after, jax.Array)
    np.testing.assert_array_equal(np.asarray(after), want)
    assert type(seldom.run([given])[0]) is np.ndarray


def test_a_call_needs_no_thread(alone: None, engine: XlaEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where none can be started, as at the interpreter's end, calls go on as they were."""

    def refuse(_: Any) -> None:
        raise RuntimeError("can't start new thread")

    made, _ = _product(engine)
    given = RNG.standard_normal((2, 128), np.float32)
    executable = _reload(engine, made)
    monkeypatch.setattr(loaded, "_MANY", 1)
    monkeypatch.setattr(loaded, "_SOON", 1e9)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert type(executable.run([given])[0]) is np.ndarray
    assert type(executable.run([given])[0]) is np.ndarray


def test_what_the_client_refuses_goes_through_jax(
    alone: None, engine: XlaEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a call and at a load, whatever it raises: the caller sees the result."""
    made, _ = _product(engine)
    given = RNG.standard_normal((2, 128), np.float32)
    want = np.asarray(made.run([given])[0])

    def refuse(*_: Any) -> Any:
        raise RuntimeError("no such interface any more")

    executable = _reload(engine, made)
    monkeypatch.setattr(executable, "_program", refuse)
    np.testing.assert_array_equal(np.asarray(executable.run([given])[0]), want)
    monkeypatch.setattr(_jaxlib, "Program", refuse)
    executable = _reload(engine, made)
    assert type(executable) is XlaExecutable
    np.testing.assert_array_equal(np.asarray(executable.run([given])[0]), want)


def test_programs_that_need_jax_are_loaded_by_it(alone: None, engine: XlaEngine) -> None:
    """Results that NumPy has no dtype for, and outputs in the storage of inputs."""
    x, y = _value("x", np.float32, 4), _value("y", ml_dtypes.bfloat16, 4)
    cast = _reload(engine, compile_nodes(engine, [x], [Node("Cast", [x], [y], {"to": 16}, version=19)], [y]))
    assert type(cast) is XlaExecutable
    assert np.asarray(cast.run([np.ones(4, np.float32)])[0]).tolist() == [1, 1, 1, 1]

    p, g, new = (_value(n, np.float32, 4) for n in ("p", "g", "new"))
    graph = Graph([p, g], [new], [Node("Sub", [p, g], [new], version=14)], opsets={"": 21})
    update = Function.from_graph(graph, name="update", aliases=[InputOutputAlias(0, 0)])
    made = engine.compiler("cpu", CompileOptions()).compile(update, update.params, update.returns, update.aliases)
    assert type(_reload(engine, made)) is XlaExecutable


def test_many_threads_share_one_program(alone: None, engine: XlaEngine) -> None:
    """Each call gets its own results, also while one of them hands over to JAX."""
    made, w = _product(engine, 64)
    executable = _reload(engine, made)

    def call(i: int) -> bool:
        given: Any = np.full((2, 64), i, np.float32)
        got = executable.run([jax.numpy.asarray(given) if i == 150 else given])[0]
        return np.allclose(np.asarray(got), given @ w, rtol=1e-4, atol=1e-3)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(call, range(300)))


@pytest.fixture
def fresh() -> Iterator[None]:
    """`_fits` is asked anew, and again afterwards."""
    _jaxlib._fits.cache_clear()
    yield
    _jaxlib._fits.cache_clear()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("JAX_PLATFORMS", "cuda,cpu"),
        ("PJRT_NAMES_AND_LIBRARY_PATHS", "mine:/lib/mine.so"),
        ("TPU_LIBRARY_PATH", "/lib/libtpu.so"),
    ],
)
def test_other_devices_than_the_cpu_are_for_jax(
    fresh: None, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    """Where JAX may find another device, XRT must not look past it."""
    monkeypatch.setenv(name, value)
    assert not _jaxlib._fits()


def test_versions_without_tests_are_for_jax(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A private interface is used in the versions that these tests ran with, and in no other."""
    monkeypatch.setattr(_jaxlib, "TESTED", frozenset(("0.0.1",)))
    assert not _jaxlib._fits()


def test_both_ways_have_the_same_fingerprint(alone: None, engine: XlaEngine) -> None:
    """What a process with JAX stores, one without finds."""
    without = engine.fingerprint("cpu")
    assert _jaxlib.cpu_fingerprint() in without
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_jaxlib, "usable", lambda: False)
        assert engine.fingerprint("cpu") == without

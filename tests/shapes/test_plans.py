"""One plan for many shapes: discovered or declared, with its guards, and the same results as by exact shapes."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

import xrt_core as xrt
from tests.profiles import examples
from tests.shapes.models import (
    Builder,
    attention,
    decoder,
    detector,
    expanded,
    found_by_data,
    framed,
    grown,
    masked,
    pixels,
    positioned,
    read_by_number,
    scanned,
    tokens,
)
from xrt_core.errors import CompileError, InputError, ShapeError
from xrt_core.host.executor import host_kernel
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.types import TensorType
from xrt_core.runtime.plan_cache import SymbolicEntry
from xrt_core.runtime.varying import VaryingShapes

pytestmark = pytest.mark.filterwarnings("ignore:os.fork.. was called:RuntimeWarning")
"""JAX, which other tests of this process import, warns of programs that are started from it."""

ENGINES = ("onnxruntime", "openvino")
PLAIN = {"guard": False, "cache": "off", "prune": False}


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    """An engine that takes symbolic shapes and is installed here."""
    pytest.importorskip(request.param)
    return str(request.param)


def entries(m: xrt.XRTModule) -> list[Any]:
    """The plans of a module, exact ones and symbolic ones."""
    return list(m._source.caller.plans._entries.values())  # type: ignore[union-attr]


def symbolic(m: xrt.XRTModule) -> list[Any]:
    return [e for e in entries(m) if isinstance(e, SymbolicEntry)]


def run(m: xrt.XRTModule, inputs: dict[str, np.ndarray]) -> np.ndarray:
    return np.asarray(next(iter(m.run(inputs).values())))


HOST = {name: xrt.XRTModule(model(), engine="host") for name, model in (("attention", attention), ("pixels", pixels))}


@pytest.mark.nightly
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 24)), min_size=3, max_size=6, unique=True))
@examples(60)
def test_a_symbolic_plan_computes_what_exact_ones_do(sizes: list[tuple[int, int]]) -> None:
    """For random shapes the results are those of the host; from the second on there is one plan for all."""
    pytest.importorskip("onnxruntime")
    m = xrt.XRTModule(attention(), engine="onnxruntime", **PLAIN)  # type: ignore[arg-type]
    for b, n in sizes:
        inputs = tokens(b, n, seed=n)
        np.testing.assert_allclose(run(m, inputs), run(HOST["attention"], inputs), rtol=1e-4, atol=1e-5)
    assert len(symbolic(m)) == 1
    assert len(entries(m)) == 1  # it has taken the place of the first


def test_another_process_knows_what_varied(tmp_path: pathlib.Path) -> None:
    """A graph whose sizes varied is planned symbolically from the first call on, in a module of another process; not
    without a cache, nor once its symbolic plan was given up."""
    pytest.importorskip("onnxruntime")

    def module(**more: object) -> xrt.XRTModule:
        kept = {"guard": False, "prune": False, "cache_dir": str(tmp_path), "engine": "onnxruntime"}
        return xrt.XRTModule(attention(), **{**kept, **more})  # type: ignore[arg-type]

    def plans(m: xrt.XRTModule, *sizes: tuple[int, int]) -> list[bool]:
        """Whether there is a symbolic plan after each call."""
        found = []
        for b, n in sizes:
            inputs = tokens(b, n)
            np.testing.assert_allclose(run(m, inputs), run(HOST["attention"], inputs), rtol=1e-4, atol=1e-5)
            found.append(bool(symbolic(m)))
        return found

    assert plans(module(), (2, 7)) == [False]
    assert plans(module(), (2, 7)) == [False]  # of one shape only
    assert plans(module(), (2, 7), (3, 5)) == [False, True]
    assert plans(module(cache="off"), (4, 9)) == [False]
    m = module()
    assert plans(m, (4, 9), (1, 3)) == [True, True]
    assert len(entries(m)) == 1
    caller = m._source.caller  # type: ignore[union-attr]
    caller.pipeline.exact_from_now_on(caller.plans, symbolic(m)[0].plan, "of the test")
    assert plans(module(), (4, 9), (3, 5)) == [False, True]
    (entry,) = (f for f in tmp_path.rglob("*.xrt") if b"varying shapes" in f.read_bytes())
    entry.write_bytes(entry.read_bytes()[:-9])
    assert plans(module(), (4, 9), (3, 5)) == [False, True]


def test_a_shape_that_was_seen_varies(engine: str) -> None:
    """The second shape makes a symbolic plan with one executable; the explanation shows symbols and guards."""
    m = xrt.XRTModule(attention(), engine=engine, **PLAIN)  # type: ignore[arg-type]
    for b, n in ((2, 7), (3, 5), (1, 1), (4, 24)):
        inputs = tokens(b, n)
        np.testing.assert_allclose(run(m, inputs), run(HOST["attention"], inputs), rtol=1e-4, atol=1e-5)
    (entry,) = symbolic(m)
    assert len(entry.plan.launches) == 1
    explained = m.explain(tokens(1, 9))
    assert explained.symbols == ("batch in 1..", "length in 1..")
    assert "-length + 24 >= 0" in explained.guards
    assert "one plan for all sizes" in str(explained)
    assert explained.flop_share == 1.0


def test_images_of_any_size(engine: str) -> None:
    """Convolution, pooling, resizing and slices by computed ends keep shapes that are known as expressions."""
    m = xrt.XRTModule(pixels(), engine=engine, shapes={"x": (1, 3, "h", "w")}, **PLAIN)  # type: ignore[arg-type]
    for h, w in ((16, 24), (15, 9), (8, 8), (33, 18)):
        inputs = {"x": np.random.default_rng(h).standard_normal((1, 3, h, w)).astype(np.float32)}
        np.testing.assert_allclose(run(m, inputs), run(HOST["pixels"], inputs), rtol=1e-4, atol=1e-5)
    assert len(entries(m)) == len(symbolic(m)) == 1


def compilations(m: xrt.XRTModule) -> int:
    return sum(e.name == "compile" for e in m.events)


def sparse(n: int, m: int, share: float) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(n * m)
    return {"x": (rng.standard_normal((n, m)) * (rng.random((n, m)) < share)).astype(np.float32)}


@pytest.mark.parametrize("read", [False, True])
def test_what_follows_data_is_planned_once(engine: str, read: bool) -> None:
    """How many elements are not zero is known at run time; what follows has a symbolic plan of its own. Where there is
    none at all it is planned exactly, as libraries differ in what they make of empty tensors."""
    m = xrt.XRTModule(found_by_data(read), engine=engine, **PLAIN)  # type: ignore[arg-type]
    host = xrt.XRTModule(found_by_data(read), engine="host")
    for n, k in ((3, 4), (5, 4), (2, 7), (8, 8), (9, 4), (7, 3), (6, 6), (1, 9)):
        inputs = sparse(n, k, 0.6)
        np.testing.assert_allclose(run(m, inputs), run(host, inputs), rtol=1e-5, atol=1e-6)
    assert len(symbolic(m)) == 1
    count = compilations(m)
    assert count <= (5 if engine == "onnxruntime" else 4)  # it gets NonZero and Cast as well, for all sizes at once
    for n, k in ((11, 3), (4, 12), (10, 10)):
        np.testing.assert_allclose(run(m, sparse(n, k, 0.5)), run(host, sparse(n, k, 0.5)), rtol=1e-5, atol=1e-6)
    assert compilations(m) == count
    empty = sparse(4, 4, 0.0)
    np.testing.assert_array_equal(run(m, empty), run(host, empty))


def test_a_detector_for_images_of_any_size(engine: str) -> None:
    """A size that is not an expression of others, that of an image brought to a side, is no reason for exact plans:
    what follows it has a symbolic plan of its own, and so has what follows the boxes that are kept."""
    m = xrt.XRTModule(detector(), engine=engine, **PLAIN)  # type: ignore[arg-type]
    host = xrt.XRTModule(detector(), engine="host")

    def check(*sizes: tuple[int, int]) -> None:
        for h, w in sizes:
            inputs = {"image": np.random.default_rng(h * w).random((3, h, w)).astype(np.float32)}
            np.testing.assert_allclose(run(m, inputs), run(host, inputs), rtol=1e-4, atol=1e-5)

    check((30, 40), (26, 50), (64, 48), (31, 33), (47, 90), (80, 41), (100, 24))
    assert len(symbolic(m)) == 1
    assert not [e for e in m.events if e.name == "shapes.exact"]
    count = compilations(m)
    check((55, 35), (29, 77), (63, 120), (36, 38))
    assert compilations(m) == count


@pytest.mark.parametrize("model", [decoder, scanned])
def test_control_flow_of_any_size(model: Any) -> None:
    """An engine gets it whole, bodies included, once for all sizes."""
    pytest.importorskip("onnxruntime")
    m = xrt.XRTModule(model(), engine="onnxruntime", **PLAIN)  # type: ignore[arg-type]
    host = xrt.XRTModule(model(), engine="host")
    for n, b in ((5, 3), (7, 2), (1, 1), (6, 4), (3, 3), (1, 8)):
        x = {"x": np.random.default_rng(n).standard_normal((n, b, 4)).astype(np.float32)}
        np.testing.assert_allclose(run(m, x), run(host, x), rtol=1e-4, atol=1e-5)
    assert len(symbolic(m)) == len(entries(m)) == 1
    assert "100% of nodes" in str(m.explain())
    assert compilations(m) == 2  # that of the first size, and that of all


@pytest.mark.parametrize("model", [expanded, lambda: decoder(marked=True)], ids=["shape", "turns"])
def test_sizes_that_come_to_an_engine_as_numbers(model: Any, tmp_path: pathlib.Path) -> None:
    """What checks an executable makes up inputs that hold the sizes which the shapes of the results promise."""
    pytest.importorskip("onnxruntime")
    m = xrt.XRTModule(
        model(),
        engine="onnxruntime",
        guard=True,
        guard_tune=False,  # the host may be as fast on a busy machine
        automatic=True,
        prune=False,
        cache_dir=str(tmp_path),
    )
    host = xrt.XRTModule(model(), engine="host")
    for n, b in ((5, 3), (7, 2), (6, 4), (3, 3)):
        x = {"x": np.random.default_rng(n).standard_normal((n, b, 4)).astype(np.float32)}
        np.testing.assert_allclose(run(m, x), run(host, x), rtol=1e-4, atol=1e-5)
        m.wait()
    assert len(symbolic(m)) == len(entries(m)) == 1
    assert not [e for e in m.events if e.name in ("fallback", "shapes.exact")]
    assert [e for e in m.events if e.name == "guard.live"]


def test_a_loop_whose_values_grow(engine: str) -> None:
    """Its body is not compiled for every turn."""
    m = xrt.XRTModule(grown(), engine=engine, **PLAIN)  # type: ignore[arg-type]
    m.run({"times": np.array(1), "x": np.ones((2, 4), np.float32)})
    for times, n in ((3, 2), (30, 1)):
        x = np.random.default_rng(n).random((n, 4)).astype(np.float32)
        got = run(m, {"times": np.array(times), "x": x})
        np.testing.assert_array_equal(got, np.concatenate([x, np.ones((times, 4), np.float32)]))
    assert compilations(m) <= 8


def test_what_a_guard_excludes_is_planned_exactly() -> None:
    """A length beyond the table of positions, and an empty input, are not for the symbolic plan."""
    pytest.importorskip("onnxruntime")
    m = xrt.XRTModule(attention(), engine="onnxruntime", **PLAIN)  # type: ignore[arg-type]
    for n in (4, 6):
        m.run(tokens(2, n))
    with pytest.raises(xrt.XRTError):  # the model itself has no 25th position
        m.run(tokens(2, 25))
    empty = {"ids": np.zeros((0, 4), np.int64), "mask": np.zeros((0, 4), np.int64)}
    assert run(m, empty).shape == (0, 16)
    plan = symbolic(m)[0].plan
    assert run(m, tokens(3, 8)).shape == (3, 16)
    assert m._source.caller.plans.known_plan(list(tokens(3, 8).values())) is plan  # type: ignore[union-attr]


def test_a_computed_index_is_proven_for_all_sizes(engine: str) -> None:
    """Its range follows from the sizes, with a guard: the node is for the engine, and other calls for the host."""
    rng = np.random.default_rng(0)
    m = xrt.XRTModule(read_by_number(), engine=engine, **PLAIN)  # type: ignore[arg-type]

    def inputs(batch: int, n: int, total: int) -> dict[str, np.ndarray]:
        return {"x": rng.random((batch, n), np.float32), "mask": rng.random((batch, total), np.float32)}

    for sizes in ((2, 5, 7), (3, 4, 9), (1, 2, 2), (4, 3, 8)):
        given = inputs(*sizes)
        np.testing.assert_allclose(run(m, given), np.exp(given["x"]) * given["mask"][:, : sizes[1]], rtol=1e-5)
    (entry,) = symbolic(m)
    assert len(entry.plan.launches) == 1
    assert "-n + total >= 0" in entry.plan.explain().guards
    assert "its index is computed" not in str(entry.plan.explain())
    with pytest.raises(xrt.XRTError):
        m.run(inputs(2, 9, 8))  # the last row's last number is beyond the mask


def test_an_index_that_is_mirrored_and_framed(engine: str) -> None:
    """As audio is cut: both indices are proven, and the plan is one launch."""
    m = xrt.XRTModule(framed(), engine=engine, **PLAIN)  # type: ignore[arg-type]
    rng = np.random.default_rng(0)
    for batch, n in ((1, 9), (2, 12), (3, 7), (1, 30)):
        x = rng.random((batch, n), np.float32)
        mirrored = np.pad(x, ((0, 0), (4, 4)), mode="reflect")
        frames = np.lib.stride_tricks.sliding_window_view(mirrored, 8, axis=1)[:, ::3]
        np.testing.assert_allclose(run(m, {"x": x}), np.exp(frames), rtol=1e-5)
    (entry,) = symbolic(m)
    assert entry.plan.launches
    if engine == "onnxruntime":  # OpenVINO computes no sizes in 64 bits
        (launch,) = entry.plan.launches
        assert launch.function.body.outputs[0].shape == ("batch", "n//3 + 1", 8)
    with pytest.raises(xrt.XRTError):
        m.run({"x": np.zeros((1, 2), np.float32)})  # its mirror image has no fourth place


@pytest.mark.parametrize("written", [False, True])
def test_a_mask_that_is_read_by_row_and_column(engine: str, written: bool) -> None:
    """All of it is the engine's, once for all sizes; sizes that the model takes to be equal are a guard."""
    rng = np.random.default_rng(0)
    m = xrt.XRTModule(masked(written), engine=engine, **PLAIN)  # type: ignore[arg-type]
    for b, n in ((2, 5), (3, 4), (1, 2), (4, 7)):
        x, mask = rng.random((2, b, n), np.float32)
        np.testing.assert_allclose(run(m, {"x": x, "mask": mask}), np.exp(x) * mask, rtol=1e-5)
    (entry,) = symbolic(m)
    (launch,) = entry.plan.launches
    assert not any(n.op_type == "Div" for n in launch.function.body.nodes)
    if engine == "onnxruntime":  # the other one's integers have 32 bits
        assert entry.plan.explain().node_share == 1
    else:
        assert any(n.op_type.endswith("ND") for n in launch.function.body.nodes)
    assert {"s0 - s2 >= 0", "-s0 + s2 >= 0"} <= set(entry.plan.explain().guards)
    x, mask = rng.random((4, 3), np.float32), rng.random((2, 6), np.float32)  # the same elements otherwise
    np.testing.assert_allclose(run(m, {"x": x, "mask": mask}), np.exp(x) * mask.reshape(4, 3), rtol=1e-5)


def test_a_quotient_in_a_branch_is_no_size_of_the_other_one(engine: str) -> None:
    """Both branches have the length of x, by its shape and by what is left of its elements: each its own."""
    text = """
    <ir_version: 8, opset_import: ["": 17]>
    branches (float[a, b] x) => (float[c] y) {
        largest = ReduceMax <keepdims = 0> (x)
        nothing = Constant <value = float {0}> ()
        go = Greater (largest, nothing)
        y = If (go) <
            then_branch = one () => (float[n] y1) {
                shape = Shape (x)
                at = Constant <value = int64 {1}> ()
                length = Gather <axis = 0> (shape, at)
                flat = Constant <value = int64[1] {0}> ()
                size = Unsqueeze (length, flat)
                zeros = ConstantOfShape (size)
                y1 = Exp (zeros)
            },
            else_branch = other () => (float[m] y2) {
                shape2 = Shape (x)
                first = Constant <value = int64 {0}> ()
                rows = Gather <axis = 0> (shape2, first)
                all = Size (x)
                left = Div (all, rows)
                flat2 = Constant <value = int64[1] {0}> ()
                size2 = Unsqueeze (left, flat2)
                zeros2 = ConstantOfShape (size2)
                y2 = Cos (zeros2)
            }
        >
    }
    """
    m = xrt.XRTModule(onnx.parser.parse_model(text), engine=engine, **PLAIN)  # type: ignore[arg-type]
    for a, b in ((2, 3), (3, 5), (4, 2), (1, 6)):
        for x in (np.ones((a, b), np.float32), np.zeros((a, b), np.float32)):
            np.testing.assert_array_equal(run(m, {"x": x}), np.ones(b, np.float32))
    (entry,) = symbolic(m)
    assert not any(x.trouble for x in entry.plan.launches)


def test_positions_that_are_counted(engine: str) -> None:
    """Sums along an axis and positions in one are bounded by its size: lookups by them are the engine's, up to the
    length that the table of positions has."""
    rng = np.random.default_rng(0)
    m, host = (xrt.XRTModule(positioned(), engine=e, **PLAIN) for e in (engine, "host"))  # type: ignore[arg-type]

    def inputs(b: int, n: int) -> dict[str, np.ndarray]:
        return {"x": rng.random((b, n, 4), np.float32), "ids": rng.integers(0, 9, (b, n))}

    for b, n in ((2, 5), (3, 4), (1, 2), (4, 10)):
        given = inputs(b, n)
        np.testing.assert_allclose(run(m, given), run(host, given), rtol=1e-5)
    (entry,) = symbolic(m)
    assert "-n + 10 >= 0" in entry.plan.explain().guards
    assert sum(n.op_type == "Gather" for x in entry.plan.launches for n in x.function.body.nodes) == 2
    long = {"x": rng.random((2, 14, 4), np.float32), "ids": np.zeros((2, 14), np.int64)}
    with pytest.raises(xrt.XRTError):
        m.run(long)


def packed() -> onnx.ModelProto:
    """A GRU over sentences of several lengths, as torch exports its pack_padded_sequence: sorted by their lengths, and
    put back in order; and the last state of each by its length."""
    text = """
        <ir_version: 8, opset_import: ["" : 17]>
        packed (float[b, n, 3] x, int64[b] lengths) => (float[b, n, 4] y, float[b, 4] last)
        <int64[1] first = {0}, int64 zero = {0}, int64 one = {1}, int64[1] at = {1}, int64[0] none = {}> {
          sizes = Shape(lengths)
          count = Gather<axis = 0>(sizes, zero)
          k = Unsqueeze(count, first)
          sorted, found = TopK<axis = -1, largest = 1>(lengths, k)
          order = Cast<to = 7>(found)
          rows = Gather<axis = 0>(x, order)
          steps = Transpose<perm = [1, 0, 2]>(rows)
          short = Cast<to = 6>(sorted)
          all, h = GRU<hidden_size = 4, linear_before_reset = 1>(steps, W, R, B, short)
          states = Squeeze(all, at)
          whole = ReduceProd<keepdims = 0>(sizes)
          places = Range(zero, whole, one)
          blank = ConstantOfShape<value = int64[1] {0}>(sizes)
          back = ScatterElements<axis = 0>(blank, order, places)
          turned = Transpose<perm = [1, 0, 2]>(states)
          y = Gather<axis = 0>(turned, back)
          end = Sub(lengths, one)
          row = Range(zero, count, one)
          columns = Unsqueeze(end, at)
          numbers = Unsqueeze(row, at)
          places2 = Concat<axis = 1>(numbers, columns)
          last = GatherND(y, places2)
        }
    """
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    for name, shape in (("W", (1, 12, 3)), ("R", (1, 12, 4)), ("B", (1, 24))):
        data = rng.standard_normal(shape).astype(np.float32) / 2
        model.graph.initializer.append(onnx.numpy_helper.from_array(data, name))
    return model


def test_indices_whose_limit_is_a_size_are_checked_at_each_call(engine: str) -> None:
    """Lengths of sentences are held to the size of each call's input in front of the engine, which has all that reads
    by them; what exceeds it is the host's to refuse."""
    m, host = (xrt.XRTModule(packed(), engine=e, **PLAIN) for e in (engine, "host"))  # type: ignore[arg-type]
    rng = np.random.default_rng(0)

    def inputs(b: int, n: int, longest: int) -> dict[str, np.ndarray]:
        lengths = rng.integers(1, longest + 1, b)
        lengths[0] = longest
        return {"x": rng.standard_normal((b, n, 3)).astype(np.float32), "lengths": lengths}

    for b, n in ((2, 5), (3, 4), (1, 2), (4, 9)):
        given = inputs(b, n, n)
        for mine, want in zip(m.run(given).values(), host.run(given).values(), strict=True):
            np.testing.assert_allclose(mine, want, rtol=1e-4, atol=1e-6)
    (entry,) = symbolic(m)
    ran = {n.op_type for x in entry.plan.launches for n in x.function.body.nodes}
    if engine == "onnxruntime":  # OpenVINO ignores lengths where sizes vary
        assert {"Gather", "GRU", "ScatterElements", "Size"} <= ran
    for n, longest in ((4, 5), (9, 10)):
        with pytest.raises(xrt.XRTError):
            m.run(inputs(3, n, longest))
    given = inputs(3, 10, 10)  # as long as what was refused, in an input that has it
    np.testing.assert_allclose(run(m, given), run(host, given), rtol=1e-4, atol=1e-6)


def test_dimensions_that_differ_after_all_get_another_plan() -> None:
    """Two sizes that were equal in all calls are one symbol, until a call in which they are not."""
    pytest.importorskip("onnxruntime")
    model = attention(names=(None, None))
    m = xrt.XRTModule(model, engine="onnxruntime", **PLAIN)  # type: ignore[arg-type]
    for b, n in ((2, 2), (3, 3), (4, 4), (2, 5), (5, 2)):
        inputs = tokens(b, n)
        np.testing.assert_allclose(run(m, inputs), run(HOST["attention"], inputs), rtol=1e-4, atol=1e-5)
    assert 1 <= len(symbolic(m)) <= 2
    assert len(entries(m)) == len(symbolic(m))


def test_shapes_that_no_symbols_cover_are_told() -> None:
    """After four symbolic signatures that were not enough, exact plans are made, and an event says so."""
    told: list[str] = []
    x = Value("x", TensorType(np.dtype(np.float32), (None, None)))
    varying = VaryingShapes(Graph([x], (), (), opsets={}), None, lambda: 1, on_end=told.append)
    found = [varying.signature_for([(np.dtype(np.float32), (n, n + 1))]) for n in range(1, 9)]
    assert [f is not None for f in found] == [False, *[True] * 4, *[False] * 3]
    assert told == ["4 symbolic plans did not cover the shapes that came"]


@pytest.mark.parametrize("may_vary", [True, False])
def test_many_shapes_before_engines_are_chosen(may_vary: bool) -> None:
    """From the fifth on sizes vary, unless nothing here takes sizes that do; else each would be built by itself."""
    x = Value("x", TensorType(np.dtype(np.float32), (None,)))
    later = (lambda: 2) if may_vary else (lambda: None)
    varying = VaryingShapes(Graph([x], (), (), opsets={}), None, lambda: None, wanted_again=later)
    found = [varying.signature_for([(np.dtype(np.float32), (n,))]) for n in range(1, 7)]
    assert [f is not None for f in found] == [*[False] * 4, *[may_vary] * 2]


def test_a_fixed_shape_stays_exact() -> None:
    """A module that is called with one shape has the plan that it had before."""
    pytest.importorskip("onnxruntime")
    m = xrt.XRTModule(attention(), engine="onnxruntime", **PLAIN)  # type: ignore[arg-type]
    for _ in range(3):
        m.run(tokens(2, 7))
    assert len(entries(m)) == 1
    assert not symbolic(m)
    assert not m.explain().symbols


def test_static_engines_keep_exact_plans() -> None:
    """An engine without dynamic dimensions gets a plan for each shape, also where it is asked first of several."""
    pytest.importorskip("xrt_toy")
    m = xrt.XRTModule(attention(), engine=["toy", "onnxruntime"], automatic=False, **PLAIN)  # type: ignore[arg-type]
    for n in (4, 6, 8):
        m.run(tokens(2, n))
    assert not symbolic(m)
    assert len(entries(m)) == 3


SHAPES = {"ids": ("b", xrt.Symbol("n", max=16, multiple=2)), "mask": ("b", "n")}


@pytest.mark.parametrize("name", ["onnxruntime", "host"])
def test_declared_shapes_are_held(name: str) -> None:
    """A shape outside the declared range, and inputs that contradict, are errors; nothing is compiled or kept."""
    if name != "host":
        pytest.importorskip(name)
    m = xrt.XRTModule(attention(), engine=name, shapes=SHAPES, **PLAIN)  # type: ignore[arg-type]
    assert run(m, tokens(2, 8)).shape == (2, 16)
    before = len(entries(m))
    with pytest.raises(InputError, match=r"'ids', axis 1: 18 given, which is more than the maximum 16 \(symbol 'n'\)"):
        m.run(tokens(2, 18))
    with pytest.raises(InputError, match=r"'ids', axis 1: 7 given, which is no multiple of 2"):
        m.run(tokens(2, 7))
    with pytest.raises(InputError, match=r"'mask', axis 0: symbol 'b' = 3, but 'b' = 2 by input 'ids', axis 0"):
        m.run({"ids": tokens(2, 8)["ids"], "mask": tokens(3, 8)["mask"]})
    assert len(entries(m)) == before == 1
    assert len(symbolic(m)) == (name != "host")


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"no": ("b",)}, "unknown input 'no'"),
        ({"ids": ("b", "n", 1)}, "3 dimensions, the model declares"),
        ({"ids": "bn"}, "give a tuple"),
        ({"ids": ("b", "n m")}, "no expression"),
        ({"ids": ("b", 1.5)}, "no size"),
        ({"ids": (xrt.Symbol("b", max=2), "n"), "mask": (xrt.Symbol("b", max=3), "n")}, "is declared as"),
    ],
)
def test_shapes_that_do_not_fit_the_model_are_refused(shapes: Any, message: str) -> None:
    """At once, with the reason."""
    with pytest.raises(InputError, match=message):
        xrt.XRTModule(attention(), engine="host", shapes=shapes)


def test_compilation_can_be_forbidden(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a warm-up every size of the declared shapes runs; what would need another plan raises."""
    pytest.importorskip("onnxruntime")
    monkeypatch.setenv("XRT_FORBID_COMPILATION", "1")
    shapes = {"ids": ("b", "n"), "mask": ("b", "n")}
    m = xrt.XRTModule(attention(), engine="onnxruntime", shapes=shapes, **PLAIN)  # type: ignore[arg-type]
    with pytest.raises(CompileError, match=r"XRT_FORBID_COMPILATION.*warmup"):
        m.run(tokens(2, 8))
    rows = tmp_path / "shapes.json"
    rows.write_text(json.dumps([{"ids": [1, 8], "mask": [1, 8]}]))
    xrt.warmup(m, rows)
    for b, n in ((2, 8), (5, 3)):
        assert m.is_prepared(tokens(b, n))
        assert run(m, tokens(b, n)).shape == (b, 16)
    exact = xrt.XRTModule(attention(), engine="host")
    assert not exact.is_prepared(tokens(1, 8))
    xrt.warmup(exact, [{"ids": (1, 8), "mask": (1, 8)}])
    assert [exact.is_prepared(tokens(1, n)) for n in (8, 9)] == [True, False]
    with pytest.raises(InputError, match="ids"):
        exact.is_prepared({"ids": np.zeros((1, 8), np.float32), "mask": np.ones((1, 8), np.int64)})
    exact.run(tokens(1, 8))
    with pytest.raises(CompileError, match="ids: int64"):
        exact.run(tokens(1, 9))


def test_a_saved_module_serves_all_sizes(engine: str, tmp_path: pathlib.Path) -> None:
    """A file holds symbolic signatures: other sizes run without compiling, and what was declared still holds."""
    m = xrt.XRTModule(attention(), engine=engine, shapes=SHAPES, **PLAIN)  # type: ignore[arg-type]
    m.run(tokens(2, 8))
    m.save(tmp_path / "m.xrt")
    back = xrt.XRTModule.load(tmp_path / "m.xrt", guard=False, cache="off", forbid_compilation=True)
    for b, n in ((2, 8), (3, 4), (1, 16)):
        inputs = tokens(b, n)
        np.testing.assert_allclose(run(back, inputs), run(HOST["attention"], inputs), rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match="maximum 16"):
        back.run(tokens(2, 18))


def recurrent() -> bytes:
    """x [n, 1, 2] with an initial state and peepholes whose sizes the model leaves open -> the last state [1, 1, 3]."""
    b = Builder()
    bias, lengths = b.constant(np.zeros((1, 24)), np.float32), ""
    given = ["x", b.weight(1, 12, 2), b.weight(1, 12, 3), bias, lengths, "h", "h", "p"]
    b.nodes.append(helper.make_node("LSTM", given, ["", "y"], hidden_size=3))
    return b.model([(n, TensorProto.FLOAT, [f"{n}{i}" for i in range(r)]) for n, r in (("x", 3), ("h", 3), ("p", 2))],
                   ["y"])  # fmt: skip


def test_sizes_that_do_not_agree_are_the_hosts_error() -> None:
    """A plan for all sizes answers no call whose sizes an operator does not allow, which a library may follow into
    foreign memory; the calls behind it are answered as before."""
    pytest.importorskip("onnxruntime")
    m = xrt.XRTModule(recurrent(), engine="onnxruntime", **PLAIN)  # type: ignore[arg-type]
    host = xrt.XRTModule(recurrent(), engine="host")

    def arrays(n: int, batch: int = 1, rows: int = 1) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(n)
        shapes = {"x": (n, 1, 2), "h": (1, batch, 3), "p": (rows, 9)}
        return {k: rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()}

    for inputs in (arrays(2), arrays(3), arrays(4, rows=2), arrays(4), arrays(5, batch=2), arrays(5)):
        if inputs["p"].shape == (1, 9) and inputs["h"].shape == (1, 1, 3):
            np.testing.assert_allclose(run(m, inputs), run(host, inputs), rtol=1e-5, atol=1e-6)
        else:
            with pytest.raises(ShapeError, match="need"):
                m.run(inputs)
    assert symbolic(m), "there is one plan for all sizes"


PRODUCTS = {
    "MatMul": ((5, 3), {}, [(2, 5), (3, 5)], [(3, 4), (3, 6)], "columns"),
    "Gemm": ((3, 5), {"transB": 1}, [(2, 5), (3, 5)], [(3, 4), (3, 6)], "columns"),
    "Einsum": ((5, 3), {"equation": "nk,km->nm"}, [(2, 5), (3, 5)], [(3, 4), (3, 6)], "'k' is of size"),
    "Conv": ((2, 3, 3, 3), {}, [(1, 3, 8, 8), (1, 3, 9, 7)], [(1, 3, 2, 8), (1, 3, 8, 1)], "the kernel covers"),
    "MaxPool": (None, {"kernel_shape": [2, 2], "strides": [2, 2]}, [(1, 3, 8, 8), (1, 3, 9, 7)], [(1, 3, 1, 8)], "2"),
}


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino", "xla"])
@pytest.mark.parametrize("operator", PRODUCTS)
def test_sizes_of_products_and_windows(engine: str, operator: str) -> None:
    """OpenVINO multiplies by what lies behind a matrix of fewer columns, ONNX Runtime pools what is smaller than the
    kernel, and XLA gives an empty result, of which a mean is NaN: an error instead, and no memory is read."""
    pytest.importorskip({"xla": "jax"}.get(engine, engine))
    filters, attributes, good, bad, message = PRODUCTS[operator]
    b = Builder()
    inputs = ["x"] if filters is None else ["x", b.weight(*filters)]
    b.nodes.append(helper.make_node(operator, inputs, ["y"], **attributes))
    model = b.model([("x", TensorProto.FLOAT, [f"d{i}" for i in range(len(good[0]))])], ["y"])
    m, host = xrt.XRTModule(model, engine=engine, **PLAIN), xrt.XRTModule(model, engine="host")  # type: ignore[arg-type]
    rng = np.random.default_rng(0)
    for shape in (*good, *bad, good[0]):
        inputs_of = {"x": rng.standard_normal(shape).astype(np.float32)}
        if shape in good:
            np.testing.assert_allclose(run(m, inputs_of), run(host, inputs_of), rtol=1e-5, atol=1e-5)
        else:
            with pytest.raises(ShapeError, match=message):
                m.run(inputs_of)


def test_a_host_step_checks_sizes_that_only_a_call_tells() -> None:
    """With the error that it has where sizes are known beforehand."""
    ranks = {"x": 3, "w": 3, "r": 3, "p": 2}
    x, w, r, p = (Value(n, TensorType(np.dtype(np.float32), (None,) * rank)) for n, rank in ranks.items())
    outputs = [None, Value("y", TensorType(np.dtype(np.float32), (None,) * 3))]
    call = host_kernel(Node("LSTM", [x, w, r, None, None, None, None, p], outputs, {"hidden_size": 3}, version=14))

    def given(rows: int) -> list[Any]:
        shapes = (2, 1, 2), (1, 12, 2), (1, 12, 3), None, None, None, None, (rows, 9)
        return [None if s is None else np.ones(s, np.float32) for s in shapes]

    assert call(given(1))[1].shape == (1, 1, 3)
    with pytest.raises(ShapeError, match=r"need P of \[1, 9\]; it is \[2, 9\]"):
        call(given(2))
    assert call(given(1))[1].shape == (1, 1, 3)

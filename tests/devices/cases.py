"""Cases for four devices; `test_on_four_devices.py` runs them in a process of its own."""

from __future__ import annotations

import pathlib
import re
from collections import Counter

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import xrt_core as xrt
from xrt_core import ops

RNG = np.random.default_rng(0)
W = RNG.standard_normal((16, 16)).astype(np.float32)
X = RNG.standard_normal((8, 16)).astype(np.float32)


class TwoBranches(xrt.Graph):
    """Two branches on devices of their own, and what joins them."""

    def __init__(self) -> None:
        super().__init__()
        self.w = W

    def build(self, x: xrt.TensorType) -> object:
        with xrt.device("cpu:1"):
            a = ops.Tanh(x @ self.w)
        with xrt.device("cpu:2"):
            b = ops.Sigmoid(x @ self.w)
        return a + b


WANTED = np.tanh(X @ W) + 1 / (1 + np.exp(-(X @ W)))


def two_branches_model(metadata: bool = False) -> bytes:
    """The same as an ONNX model; metadata: one branch is placed by the model itself."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["p"], name="left/product"),
        helper.make_node("Tanh", ["p"], ["a"], name="left/tanh"),
        helper.make_node("MatMul", ["x", "w"], ["q"], name="right/product"),
        helper.make_node("Sigmoid", ["q"], ["b"], name="right/sigmoid"),
        helper.make_node("Add", ["a", "b"], ["y"], name="sum"),
    ]
    for n in nodes[:2] if metadata else ():
        n.metadata_props.add(key="xrt.device", value="cpu:1")
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [8, 16])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [8, 16])
    graph = helper.make_graph(nodes, "branches", [x], [y], [numpy_helper.from_array(W, "w")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10).SerializeToString()


def where(m: xrt.XRTModule) -> dict[str, str]:
    """Cluster -> the device that its executable says it runs on."""
    return dict(m.explain().ran_on)


@pytest.mark.parametrize("options", [{"guard": False, "parallel": True}])
def test_blocks(options: dict[str, bool]) -> None:
    """Clusters of one engine run on the devices of their blocks, transfers are nodes, and results are the host's."""
    m = xrt.XRTModule(TwoBranches(), engine="xla", **options)
    np.testing.assert_allclose(m(X), WANTED, rtol=1e-5, atol=1e-6)
    assert {where(m)["xla_cpu1_0"], where(m)["xla_cpu2_0"]} == {"cpu:1", "cpu:2"}
    targets = [n.attributes["target"] for n in m.partitioned().nodes if n.op_type == "EngineInputConvert"]
    assert {"xla@cpu:1", "xla@cpu:2"} <= set(targets)
    assert "run concurrently" in str(m.explain())
    timeline = m.run_timed({"x": X})[1]
    assert {"Tanh_on_host", "Sigmoid_on_host"} <= {span.label.rpartition(" ")[2] for span in timeline.spans}


def test_rules_and_metadata() -> None:
    """Rules by name and the model's metadata place nodes; a rule wins over metadata."""
    m = xrt.XRTModule(two_branches_model(True), engine="xla", guard=False, placement={"name:right/*": "cpu:3"})
    np.testing.assert_allclose(m(X), WANTED, rtol=1e-5, atol=1e-6)
    assert {where(m)["xla_cpu1_0"], where(m)["xla_cpu3_0"]} == {"cpu:1", "cpu:3"}
    m = xrt.XRTModule(two_branches_model(True), engine="xla", guard=False, placement={"name:*/*": "cpu:2"})
    assert {c.device for c in m.explain({"x": X}).report.clusters} == {"cpu", "cpu:2"}


def test_whole_module_on_a_device() -> None:
    """`device=` puts a module on a device, which its executable confirms, and its own name places nothing anew."""
    m = xrt.XRTModule(two_branches_model(), engine="xla", guard=False, device="cpu:2", placement={"op:Tanh": "cpu:2"})
    np.testing.assert_allclose(m(X), WANTED, rtol=1e-5, atol=1e-6)
    assert where(m) == {"xla_0": "cpu:2"}


def test_refused() -> None:
    """A device that is not there, and one where nothing takes the node, are errors that say what there is."""
    model = two_branches_model()
    with pytest.raises(xrt.EngineUnavailableError, match=r"'cpu:9' here; it can use cpu, cpu:1, cpu:2, cpu:3"):
        xrt.XRTModule(model, engine="xla", device="cpu:9", guard=False)
    with pytest.raises(xrt.EngineUnavailableError, match=r"'cpu:9' \(keyword device=\).* there are cpu, cpu:1, cpu:2"):
        xrt.XRTModule(model, device="cpu:9")
    with pytest.raises(xrt.EngineUnavailableError, match="host' computes on 'cpu'"):
        xrt.XRTModule(model, engine="host", device="cpu:1")
    m = xrt.XRTModule(model, engine="xla", guard=False, placement={"op:Tanh": "cpu:9"})
    with pytest.raises(xrt.DeviceNotFoundError, match=r"node 'left/tanh'.*there are cpu, cpu:1, cpu:2, cpu:3"):
        m(X)
    m = xrt.XRTModule(model, engine="host", placement={"op:Tanh": "cpu:1"})
    with pytest.raises(xrt.DeviceNotFoundError, match=r"there are cpu;"):
        m(X)
    m = xrt.XRTModule(
        model,
        engine=["xla", "onnxruntime"],
        guard=False,
        placement={"op:Tanh": "cpu:1"},
        marks={"op:Tanh": "onnxruntime"},
    )
    with pytest.raises(xrt.GraphError, match=r"placed on 'cpu:1', where nothing takes it: it is marked for"):
        m(X)


def test_prefer() -> None:
    """With "prefer" a placement that cannot be had is given up, with an event that says so."""
    m = xrt.XRTModule(
        two_branches_model(),
        engine="xla",
        guard=False,
        device="cpu:9",
        placement=("prefer", {"op:Tanh": "cuda:0", "op:Sigmoid": "cpu:1"}),
    )
    np.testing.assert_allclose(m(X), WANTED, rtol=1e-5, atol=1e-6)
    given_up = [dict(e.fields) for e in m.events.recent("placement.")]
    assert [g["device"] for g in given_up] == ["cpu:9", "cuda:0"]
    assert given_up[1]["node"] == "left/tanh"
    assert where(m)["xla_cpu1_0"] == "cpu:1"


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ["xla", "auto"])
def test_guarded(engine: str) -> None:
    """Under guard a placed cluster is verified on its device, and stays there though the host may be faster."""
    m = xrt.XRTModule(TwoBranches(), engine=engine, guard=True, guard_async=False, cache="off")
    np.testing.assert_allclose(m(X), WANTED, rtol=1e-5, atol=1e-6)
    assert m.wait(120)
    m(X)
    assert {where(m)["xla_cpu1_0"], where(m)["xla_cpu2_0"]} == {"cpu:1", "cpu:2"}


# --- mesh and SBP ---

UP, DOWN = (RNG.standard_normal(s).astype(np.float32) for s in ((64, 128), (128, 64)))
PARTS = {"up": "model:S(1)", "down": "model:S(0)"}
BIAS = RNG.standard_normal(64).astype(np.float32)
ROWS = RNG.standard_normal((16, 64)).astype(np.float32)


def mlp_model() -> bytes:
    """Two products with a Relu between, a bias and a Softmax."""
    nodes = [
        helper.make_node("MatMul", ["x", "up"], ["h"], name="first"),
        helper.make_node("Relu", ["h"], ["r"], name="relu"),
        helper.make_node("MatMul", ["r", "down"], ["z"], name="second"),
        helper.make_node("Add", ["z", "b"], ["s"], name="bias"),
        helper.make_node("Softmax", ["s"], ["y"], name="softmax"),
    ]
    weights = [numpy_helper.from_array(a, n) for a, n in ((UP, "up"), (DOWN, "down"), (BIAS, "b"))]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 64])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 64])
    graph = helper.make_graph(nodes, "mlp", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10).SerializeToString()


COLLECTIVES = re.compile(r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


def collectives_in(hlo: str) -> list[str]:
    """The kinds of the collectives of a compiled program, in no order."""
    return sorted(kind for _, kind in COLLECTIVES.findall(hlo))


@pytest.mark.parametrize(
    ("mesh", "sharding", "expected"),
    [
        ({"data": 4}, None, []),
        pytest.param({"model": 4}, PARTS, ["all-reduce"], marks=pytest.mark.nightly),
        ({"data": 2, "model": 2}, {"x": "data:S(0)", "up": "model:S(1)", "down": "model:S(0)"}, ["all-reduce"]),
        pytest.param({"model": 4}, {"up": "model:S(1)"}, ["all-to-all"], marks=pytest.mark.nightly),
        ({"data": 2, "model": 2}, {"x": "data:S(0)", "up": "model:S(1)"}, ["all-to-all"]),
    ],
)
def test_collectives_are_those_announced(
    mesh: dict[str, int], sharding: dict[str, str] | None, expected: list[str]
) -> None:
    """Results are one device's; the compiled program has the collectives that `explain().sharding` announces."""
    want = xrt.XRTModule(mlp_model(), engine="host")(ROWS)
    m = xrt.XRTModule(mlp_model(), engine="xla", guard=False, mesh=xrt.Mesh(mesh), sharding=sharding)
    np.testing.assert_allclose(m(ROWS), want, rtol=1e-4, atol=1e-5)
    found = m.explain().sharding
    assert found is not None
    announced = sorted(c.kind for c in found.collectives if c.kind != "slice")
    assert announced == expected, str(m.explain())
    assert where(m)["xla_0"] == "cpu, cpu:1, cpu:2, cpu:3"
    executable = m._source.caller.last.launches[0].executable
    assert executable is not None
    assert collectives_in(executable.as_text()) == announced, str(m.explain())


def test_weights_lie_in_parts() -> None:
    """A weight that is split takes its part of the memory of each device."""
    sharding = {"up": "model:S(1)", "down": "model:S(0)"}
    m = xrt.XRTModule(mlp_model(), engine="xla", guard=False, mesh={"model": 4}, sharding=sharding)
    m(ROWS)
    executable = m._source.caller.last.launches[0].executable
    parts = {w.addressable_shards[0].data.shape for w in executable.inner._weights}
    assert {(64, 32), (32, 64)} <= parts


class Block(xrt.Graph):
    """An embedding, an attention of four heads, a product and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.table = RNG.standard_normal((512, 16)).astype(np.float32)
        self.q, self.k, self.v, self.o = (RNG.standard_normal((16, 16)).astype(np.float32) for _ in range(4))

    def build(self, ids: xrt.TensorType) -> object:
        x = ops.Gather(self.table, ids)
        return x + ops.Attention(x @ self.q, x @ self.k, x @ self.v, q_num_heads=4, kv_num_heads=4) @ self.o


def test_a_transformer_block() -> None:
    """A table split by rows gives partial sums, an attention is split by its heads; both are announced and compiled."""
    ids, block = RNG.integers(0, 512, (2, 2)), Block()
    sharding = {"table": {"model": xrt.sbp.S(0)}, **dict.fromkeys("qkv", "model:S(1)"), "o": "model:S(0)"}
    m = xrt.XRTModule(block, engine="xla", guard=False, mesh={"model": 4}, sharding=sharding)
    np.testing.assert_allclose(m(ids), xrt.XRTModule(block, engine="host")(ids), rtol=1e-3, atol=1e-4)
    found = m.explain().sharding
    assert found is not None
    announced = [(c.kind, c.value) for c in found.collectives if c.kind != "slice"]
    assert ("all-reduce", "Gather") in announced, str(m.explain())
    assert found.tensors["Attention"] == "model:S(2)"
    executable = m._source.caller.last.launches[0].executable
    assert executable is not None
    assert collectives_in(executable.as_text()) == sorted(kind for kind, _ in announced), str(m.explain())
    page = m.explain().to_html()
    assert "On the mesh model=4" in page
    assert "<td>model:P(sum)</td>" in page


class Annotated(xrt.Graph):
    """A product whose result is split by a mark within the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.w = W

    def build(self, x: xrt.TensorType) -> object:
        return ops.Tanh(xrt.shard(x @ self.w, "model:S(1)"))


def test_marks_within_a_graph() -> None:
    """`xrt.shard` decides how a value lies, and what follows stays so; without a mesh it is nothing."""
    m = xrt.XRTModule(Annotated(), engine="xla", guard=False, mesh={"model": 4}, sharding={})
    np.testing.assert_allclose(m(X), np.tanh(X @ W), rtol=1e-5, atol=1e-6)
    found = m.explain().sharding
    assert found is not None
    assert found.tensors["output"] == "model:S(1)"
    plain = xrt.XRTModule(Annotated(), engine="xla", guard=False)
    np.testing.assert_allclose(plain(X), np.tanh(X @ W), rtol=1e-5, atol=1e-6)
    assert [n.op_type for n in plain.partitioned().nodes] == ["EngineInputConvert", "Launch"]


class Marked(xrt.Graph):
    """Two products whose weights are split by marks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = 0.1 * UP, xrt.Variable(0.1 * DOWN)

    def build(self, x: xrt.TensorType) -> object:
        return ops.Tanh(x @ xrt.shard(self.up, "model:S(1)")) @ xrt.shard(self.down, "model:S(0)")


@pytest.mark.parametrize("options", [{}, pytest.param({"precision": "bf16"}, marks=pytest.mark.nightly)])
def test_marks_of_weights(options: dict[str, object]) -> None:
    """`xrt.shard` of a weight decides where it is kept: in inference, and in training with its slots."""
    m = xrt.XRTModule(Marked(), engine="xla", guard=False, mesh={"model": 4}, sharding={})
    np.testing.assert_allclose(m(ROWS), xrt.XRTModule(Marked(), engine="host")(ROWS), rtol=1e-4, atol=1e-5)
    found = m.explain().sharding
    assert found is not None
    assert [c.kind for c in found.collectives if c.kind != "slice"] == ["all-reduce"], str(found.lines())
    executable = m._source.caller.last.launches[0].executable
    assert {(64, 32), (32, 64)} <= {w.addressable_shards[0].data.shape for w in executable.inner._weights}
    one, many = (
        xrt.training.TrainModule(
            Marked(),
            loss="mse",
            optimizer=xrt.optim.Adam(1e-3, ema=0.9),
            engine="xla",
            guard=False,
            accumulate=2,
            **options,
            **mesh,
        )
        for mesh in ({}, {"mesh": {"data": 2, "model": 2}})
    )
    np.testing.assert_allclose(losses(many, 5), losses(one, 5), rtol=0, atol=1e-5 if not options else 1e-2)
    many.apply()
    assert losses(many, 1)
    held = {
        n: a.addressable_shards[0].data.shape for n, a in many._state.entries().items() if a.ndim
    }
    assert {s for n, s in held.items() if n.endswith("up")} == {(64, 64)}
    assert {s for n, s in held.items() if n.endswith("down")} == {(64, 64)}


def test_wrong_meshes() -> None:
    """A mesh larger than the devices, an axis that is not there and a size that does not divide are errors."""
    m = xrt.XRTModule(mlp_model(), engine="xla", mesh={"data": 8})
    with pytest.raises(
        xrt.DeviceNotFoundError, match=r"mesh data=8 .* has 8 devices, and there are 4 here: cpu, cpu:1"
    ):
        m(ROWS)
    m = xrt.XRTModule(mlp_model(), engine="xla", mesh={"data": 4}, device="cpu:1")
    with pytest.raises(xrt.OptionError, match=r"device='cpu:1' .* is one device, and the mesh data=4 .*device='cpu'"):
        m(ROWS)
    with pytest.raises(xrt.OptionError, match=r"'mesh' cannot be 4 .* axes with their sizes"):
        xrt.XRTModule(mlp_model(), engine="xla", mesh=4)
    m = xrt.XRTModule(mlp_model(), engine="xla", guard=False, mesh={"data": 4}, sharding={"x": "batch:S(0)"})
    with pytest.raises(xrt.OptionError, match=r"no axis 'batch'; it has data=4"):
        m(ROWS)
    m = xrt.XRTModule(mlp_model(), engine="xla", guard=False, mesh={"data": 4})
    with pytest.raises(xrt.GraphError, match=r"axis 0 of 'x', of size 6, over 4 devices .*multiples of 4"):
        m(ROWS[:6])
    m = xrt.XRTModule(mlp_model(), engine="xla", guard=False, mesh={"data": 4}, sharding={"weights": "data:S(0)"})
    with pytest.raises(xrt.OptionError, match=r"'weights' matches no value of the graph; there are x, up"):
        m(ROWS)


def test_an_engine_that_does_not_shard() -> None:
    """It runs the whole graph on its device, and the report has the reason."""
    pytest.importorskip("onnxruntime")
    m = xrt.XRTModule(mlp_model(), engine="onnxruntime", guard=False, mesh={"data": 4})
    np.testing.assert_allclose(m(ROWS), xrt.XRTModule(mlp_model(), engine="host")(ROWS), rtol=1e-4, atol=1e-5)
    assert "no engine that takes part runs on several devices at once (onnxruntime)" in str(m.explain())
    m = xrt.XRTModule(mlp_model(), engine="host", mesh={"data": 4})
    m(ROWS)
    assert "no engine that takes part runs on several devices at once (host)" in str(m.explain())


# --- training ---

BATCH = RNG.standard_normal((16, 64)).astype(np.float32)
TARGET = RNG.standard_normal((16, 64)).astype(np.float32)


class Regression(xrt.Graph):
    """Two layers with a bias, by the mean square."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.bias = 0.1 * UP, 0.1 * DOWN, BIAS.copy()

    def build(self, x: xrt.TensorType) -> object:
        return ops.Tanh(x @ self.up) @ self.down + self.bias


def trainer(optimizer: object = None, **options: object) -> xrt.training.TrainModule:
    """A trainer of the same start."""
    optimizer = optimizer or xrt.optim.Adam(1e-3)
    return xrt.training.TrainModule(Regression(), loss="mse", optimizer=optimizer, engine="xla", guard=False, **options)


def losses(t: xrt.training.TrainModule, steps: int) -> list[float]:
    """Losses of some steps on one batch."""
    return [float(t.step(x=BATCH, target=TARGET)) for _ in range(steps)]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"mesh": {"data": 4}}, marks=pytest.mark.nightly),
        pytest.param({"mesh": {"data": 4}, "zero": True}, marks=pytest.mark.nightly),
        pytest.param({"mesh": {"data": 2, "model": 2}, "sharding": PARTS}, marks=pytest.mark.nightly),
        {"mesh": {"data": 2, "model": 2}, "sharding": PARTS, "zero": True},
    ],
)
def test_training(options: dict[str, object], tmp_path: pathlib.Path) -> None:
    """Losses over 100 steps are those of one device; the state lies as it was asked for, and loads where
    there is no mesh; a batch that the mesh does not divide is right, with an event."""
    t, one = trainer(**options), trainer()
    np.testing.assert_allclose(losses(t, 100), losses(one, 100), rtol=0, atol=1e-5)
    report = t.explain()
    assert report.sharding is not None
    kinds = {c.kind for c in report.sharding.collectives}
    assert "all-reduce" in kinds
    by_name = t._state.entries()
    moment = by_name[next(n for n in by_name if n.endswith("up") and n != "up")]
    parts = {s.data.shape for s in moment.addressable_shards}
    whole = (64, 128)
    rows = whole[0] // (4 if options["mesh"] == {"data": 4} else 2) if options.get("zero") else whole[0]
    assert parts == {(rows, whole[1] // (2 if "sharding" in options else 1))}
    t.save(tmp_path / "state.safetensors")  # whole tensors, for any mesh or none
    losses(one, 1)
    one.load(tmp_path / "state.safetensors")
    np.testing.assert_allclose(losses(t, 2), losses(one, 2), rtol=0, atol=1e-5)
    few = {"x": BATCH[:7], "target": TARGET[:7]}
    assert abs(t.evaluate([few])["loss"] - one.evaluate([few])["loss"]) < 1e-5
    reason = t.events.recent("training.whole_batch")[-1].fields["reason"]
    assert "devices of the mesh's axis 'data' do not divide the 7 examples" in str(reason)


def test_a_batch_that_is_to_be_divided() -> None:
    """Where a rule says how an input lies, a batch that the mesh does not divide is an error that changes nothing."""
    t = trainer(mesh={"data": 4}, sharding={"x": "data:S(0)", "target": "data:S(0)"})
    first = losses(t, 1)
    with pytest.raises(xrt.GraphError, match=r"'x', of size 7, over 4 devices \(data=4\).*multiples of 4"):
        t.step(x=BATCH[:7], target=TARGET[:7])
    np.testing.assert_allclose([*first, *losses(t, 2)], losses(trainer(), 3), rtol=0, atol=1e-5)


class Lookup(xrt.Graph):
    """Rows of a table, and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up = np.resize(UP, (512, 16)), np.resize(DOWN, (16, 16))

    def build(self, ids: xrt.TensorType) -> object:
        return ops.Gather(self.table, ids) @ self.up


@pytest.mark.parametrize(
    ("sharding", "expected"),
    [
        ({}, ["all-gather", "all-gather", "all-reduce", "all-reduce"]),  # a small batch's rows, rather than the table
        pytest.param({"table": "data:S(1)"}, None, marks=pytest.mark.nightly),
        pytest.param({"table": "data:S(0)"}, None, marks=pytest.mark.nightly),
    ],
)
def test_the_gradient_of_a_table(sharding: dict[str, str], expected: list[str] | None) -> None:
    """Losses are one device's, and the compiled program has the announced collectives, however the table lies."""
    ids, target = RNG.integers(0, 512, (8, 4)), RNG.standard_normal((8, 4, 16)).astype(np.float32)
    many, one = (
        xrt.training.TrainModule(
            Lookup(), loss="mse", optimizer=xrt.optim.SGD(0.1), engine="xla", guard=False, donate=False, **mesh
        )
        for mesh in ({"mesh": {"data": 4}, "sharding": sharding}, {})
    )
    found = [[float(t.step(ids=ids, target=target)) for _ in range(3)] for t in (many, one)]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)
    report = many.explain().sharding
    assert report is not None
    assert not report.replicated
    announced = sorted(c.kind for c in report.collectives if c.kind != "slice")
    if expected is not None:
        assert announced == expected, str(report.lines())
        (launch,) = many._last.plan.launches
        assert set(collectives_in(launch.executable.as_text())) == set(announced)


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": {"data": 4}},
        pytest.param({"mesh": {"data": 2, "model": 2}, "sharding": PARTS}, marks=pytest.mark.nightly),
    ],
)
def test_collectives_of_a_step_are_those_announced(options: dict[str, object]) -> None:
    """XLA combines the all-reduces of gradients into one or a few; their operands, and all others, are as announced."""
    t = trainer(**options)
    losses(t, 1)
    report = t.explain().sharding
    assert report is not None
    announced = Counter(c.kind for c in report.collectives if c.kind != "slice")
    found: Counter[str] = Counter()
    for launch in t._last.plan.launches:
        for result, kind in COLLECTIVES.findall(launch.executable.as_text()):
            found[kind] += len(re.findall(r"\w+\[[\d,]*\]", result)) if kind == "all-reduce" else 1
    if "sharding" in options:  # two axes of the mesh split one of a tensor: XLA puts the parts in order
        del found["collective-permute"]
    assert found == announced, "\n".join(report.lines())


@pytest.mark.nightly
def test_checkpoints(tmp_path: pathlib.Path) -> None:
    """A checkpoint loads on another mesh and on none."""
    one = trainer(mesh={"data": 4}, zero=True)
    losses(one, 3)
    one.save(tmp_path / "state.safetensors")
    want = losses(one, 3)
    for options in ({}, {"mesh": {"data": 2, "model": 2}, "sharding": PARTS}):
        other = trainer(**options)
        losses(other, 1)
        other.load(tmp_path / "state.safetensors")
        np.testing.assert_allclose(losses(other, 3), want, rtol=0, atol=1e-5)


def used(t: xrt.training.TrainModule) -> list[object]:
    """Numbers of everything that trains or answers, batches that four devices do not divide among them."""
    found: list[object] = [float(t.step(x=BATCH, target=TARGET))]
    data = {"x": BATCH[:14], "target": TARGET[:14]}
    found += [list(e.values()) for e in t.fit(data, 1, batch_size=8, validation=data, metrics="mae")]
    found += [t.predict(BATCH[:14]), t.evaluate(data, batch_size=8)["loss"], t.step_count]
    found += t.gradients(x=BATCH[:8], target=TARGET[:8]).values()
    found += [float(t.step(x=BATCH, target=TARGET)), *t.parameters().values()]
    return found


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"mesh": {"data": 2, "model": 2}, "sharding": PARTS, "zero": True}, {"accumulate": 2, "lazy_loss": True}),
        ({"mesh": {"data": 2, "model": 2}, "sharding": {**PARTS, "target": "data:S(0)"}}, {"accumulate": 3}),
        ({"mesh": {"data": 4}, "zero": True}, {"precision": "bf16"}),
        ({"mesh": {"data": 4}}, {"donate": False, "recompute": "Tanh"}),
        ({"mesh": {"data": 4}, "zero": True}, {"ema": 0.9}),
        ({"mesh": {"data": 2, "model": 2}, "sharding": PARTS}, {"optax": True}),
        ({"mesh": {"data": 4}}, {"optax": True, "accumulate": 2}),
    ],
)
def test_everything_on_a_mesh(mesh: dict[str, object], options: dict[str, object]) -> None:
    """Epochs, evaluation, prediction and gradients are those of one device, whatever the batch; an event says what was
    not shared."""
    optimizer: object = xrt.optim.Adam(1e-3, ema=options.get("ema"))
    if options.get("optax"):
        optax = pytest.importorskip("optax")
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    plain = {n: v for n, v in options.items() if n not in ("ema", "optax")}
    one, many = trainer(optimizer, **plain), trainer(optimizer, **mesh, **plain)
    atol = 2e-2 if "precision" in options else 1e-5
    for got, want in zip(used(many), used(one), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=atol)
    reasons = {str(e.fields["reason"]) for e in many.events.recent("training.whole_batch")}
    assert not [r for r in reasons if "do not divide the 8 examples" in r]
    if mesh["mesh"] == {"data": 4}:
        assert any("the 4 devices of the mesh's axis 'data' do not divide the 6 examples" in r for r in reasons)


@pytest.mark.nightly
def test_automatic_sharding() -> None:
    """Results and losses are one device's, whatever is chosen; the choice holds for every method of a training."""
    m = xrt.XRTModule(mlp_model(), engine="xla", guard=False, mesh={"data": 2, "model": 2}, sharding="auto")
    want = xrt.XRTModule(mlp_model(), engine="host")
    for rows in (ROWS, ROWS[:6], ROWS[:3]):
        np.testing.assert_allclose(m(rows), want(rows), rtol=1e-4, atol=1e-5)
    many, one = trainer(mesh={"data": 2, "model": 2}, sharding="auto"), trainer()
    np.testing.assert_allclose(losses(many, 5), losses(one, 5), rtol=0, atol=1e-5)
    np.testing.assert_allclose(many.predict(BATCH[:3]), one.predict(BATCH[:3]), rtol=0, atol=1e-5)


def test_automatic_sharding_as_rules() -> None:
    """The rules of `xrt.sharding.auto` are for modules and for trainings; unknown shapes and meshes are errors."""
    rules = xrt.sharding.auto(mlp_model(), {"data": 2, "model": 2}, {"x": ROWS})
    m = xrt.XRTModule(mlp_model(), engine="xla", guard=False, mesh={"data": 2, "model": 2}, sharding=rules)
    np.testing.assert_allclose(m(ROWS), xrt.XRTModule(mlp_model(), engine="host")(ROWS), rtol=1e-4, atol=1e-5)
    rules = xrt.sharding.auto(Regression(), xrt.Mesh({"data": 4}), {"x": BATCH})
    np.testing.assert_allclose(
        losses(trainer(mesh={"data": 4}, sharding=rules), 3), losses(trainer(), 3), rtol=0, atol=1e-5
    )
    with pytest.raises(xrt.InputError, match="input 'x' is declared as"):
        xrt.sharding.auto(mlp_model(), {"data": 4})
    with pytest.raises(xrt.OptionError, match="it takes axes with their sizes"):
        xrt.sharding.auto(mlp_model(), 4, {"x": ROWS})


def test_zero_with_optax() -> None:
    """Its state stays whole, so that asking for its split is an error."""
    optax = pytest.importorskip("optax")
    with pytest.raises(xrt.OptionError, match=r"the state of optax's stays whole"):
        trainer(optax.adam(1e-3), mesh={"data": 4}, zero=True)


@pytest.mark.nightly
def test_a_guarded_mesh() -> None:
    """Under guard an executable for a mesh is compiled and verified in a worker, and answers on the mesh."""
    m = xrt.XRTModule(
        mlp_model(), engine="xla", guard_tune=False, guard_async=False, mesh={"model": 4}, sharding=PARTS, cache="off"
    )
    want = xrt.XRTModule(mlp_model(), engine="host")(ROWS)
    for _ in range(2):
        np.testing.assert_allclose(m(ROWS), want, rtol=1e-4, atol=1e-5)
        assert m.wait(120)
    assert where(m)["xla_0"] == "cpu, cpu:1, cpu:2, cpu:3"


def test_states_in_pieces(tmp_path: pathlib.Path) -> None:
    """Each device's part is a file; what they hold is loaded for another mesh, and for one device, to the same bits.
    Batches that lie on the mesh are read there."""
    jax = pytest.importorskip("jax")
    from jax.sharding import NamedSharding, PartitionSpec

    t, whole = trainer(mesh={"data": 4}, zero=True), {"x": BATCH, "target": TARGET}
    places = NamedSharding(jax.sharding.Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    given = {n: jax.device_put(a, places) for n, a in whole.items()}
    bound = t._source.bind((), given, ("target",))
    assert all(bound[n] is a for n, a in given.items())
    other = trainer(mesh={"data": 4}, zero=True)
    for _ in range(2):
        assert t.step(**given) == other.step(**whole)
    t.save(tmp_path / "run", sharded=True)
    sizes = [p.stat().st_size for p in sorted((tmp_path / "run").glob("*.safetensors"))]
    assert len(sizes) == 4
    slots = [a for n, a in t.state_dict().items() if n.startswith("optimizer/") and a.shape[0] % 4 == 0]
    assert sizes[3] >= sum(a.nbytes for a in slots) // 4 > 0
    assert sum(sizes) < 1.5 * sum(a.nbytes for a in t.state_dict().values()) + 4 * 4096
    for options in ({"mesh": {"data": 2, "model": 2}}, {}):
        again = trainer(**options)
        again.load(tmp_path / "run")
        for (n, a), b in zip(t.state_dict().items(), again.state_dict().values(), strict=True):
            np.testing.assert_array_equal(a, b, err_msg=n)
        again.step(**whole)

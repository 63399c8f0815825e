"""Every hook, by a package that brings something and changes nothing in the core; and what is said where it fails."""

from __future__ import annotations

import pathlib
import re
import signal
import sys
from typing import Any

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

import xrt_core as xrt
from tests.engine.packages import add_package, add_plugin, engine_source
from xrt_core.cache import store
from xrt_core.cache.key import cache_key
from xrt_core.cli.app import application
from xrt_core.cli.plugin_commands import add_commands
from xrt_core.engine import CompileOptions, engines
from xrt_core.engine.op_kernels import op_kernels
from xrt_core.errors import EngineNotFoundError, ModelLoadError, OptionError, PluginError
from xrt_core.events import Event, subscribe
from xrt_core.frontends.tensor import Tensor
from xrt_core.frontends.tracing import current_tracer
from xrt_core.ir.function import Function
from xrt_core.ir.schema import find_schema
from xrt_core.options import resolve
from xrt_core.options.__main__ import as_markdown
from xrt_core.plugins import plugins
from xrt_core.testing.host_engine import HostEngine
from xrt_core.training.autodiff import gradients

X = np.array([-1.0, 0.0, 2.5], np.float32)


def said() -> str:
    """Every problem of a plugin, a line each."""
    return "\n".join(f"{p.what} ({p.owner}): {p.reason}" for p in plugins.problems())


def relu_model(domain: str = "", op_type: str = "Relu", version: int = 18, **attributes: Any) -> bytes:
    """A model of one node, y = op(x), x a vector of 3."""
    node = onnx.helper.make_node(op_type, ["x"], ["y"], domain=domain, name="n", **attributes)
    x, y = (onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [3]) for n in "xy")
    graph = onnx.helper.make_graph([node], "g", [x], [y])
    opsets = [onnx.helper.make_opsetid("", 18)]
    if domain:
        opsets.append(onnx.helper.make_opsetid(domain, version))
    return bytes(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())


# --- engines ---

HOOKED = (
    "import xrt_core as xrt\n"
    + engine_source("hooked", 'switch = "use_hooked"')
    + """
@xrt.hookimpl
def xrt_engines():
    return [TheEngine]
"""
)


def test_an_engine_by_its_hook(installed: pathlib.Path) -> None:
    """The module is imported when the engine is first needed; listing and asking for others imports nothing."""
    module = add_plugin(installed, "xrt-hooked", HOOKED, {"xrt.engines": "hooked"})

    assert "hooked" in engines.names()
    engines.listing(probe=False)
    resolve({"minimum_nodes": 3})
    assert module not in sys.modules
    assert engines.get("hooked").name == "hooked"
    assert module in sys.modules


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("return []", "must give one engine called 'odd'; it gives nothing"),
        ("return 3", "the hook xrt_engines of 'odd' failed: TypeError"),
        ("raise SystemExit(4)", "the hook xrt_engines of 'odd' failed: SystemExit: 4"),
        ("yield 1; raise GeneratorExit", "the hook xrt_engines of 'odd' failed: GeneratorExit"),
        ("class Odd: name = 'odd'\n    return [Odd]", "is not a subclass of xrt_core.engine.Engine"),
    ],
)
def test_an_engine_hook_that_fails(installed: pathlib.Path, source: str, message: str) -> None:
    """The engine is broken, with the reason; the others are there."""
    text = f"import xrt_core as xrt\n@xrt.hookimpl\ndef xrt_engines():\n    {source}\n"
    add_plugin(installed, "xrt-odd", text, {"xrt.engines": "odd"})
    add_plugin(installed, "xrt-hooked", HOOKED, {"xrt.engines": "hooked"})

    with pytest.raises(PluginError, match=message):
        engines.get("odd")
    lines = {e.name: e for e in engines.listing()}
    assert lines["odd"].status == "broken"
    assert lines["hooked"].status == "ready"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def xrt_engines(nonsense): return []", "implements a hook wrongly.*nonsense"),
        ("def xrt_no_such_hook(): return []", "implements a hook wrongly.*xrt_no_such_hook"),
        ("def f(): ...", "implements no hook"),
    ],
)
def test_a_wrong_signature(installed: pathlib.Path, text: str, message: str) -> None:
    """What pluggy finds wrong is said with the package, and nothing of the plugin is kept."""
    source = f"import xrt_core as xrt\n{'@xrt.hookimpl' if 'xrt_' in text else ''}\n{text}\n"
    add_plugin(installed, "xrt-odd", source, {"xrt.frontends": "odd"})

    plugins.load("xrt.frontends")

    assert len([p for p in plugins.problems() if p.owner == "xrt-odd 1.0"]) == 1
    assert re.search(message, said())


def test_a_wrapper_is_refused(installed: pathlib.Path) -> None:
    """Each implementation is called by itself, so there is nothing to wrap."""
    source = "import xrt_core as xrt\n@xrt.hookimpl(wrapper=True)\ndef xrt_event(event):\n    return (yield)\n"
    add_plugin(installed, "xrt-odd", source, {"xrt.observers": "odd"})
    plugins.load("xrt.observers")
    assert "xrt_event is a wrapper" in said()


def test_ctrl_c_goes_through(installed: pathlib.Path) -> None:
    """The signal's KeyboardInterrupt is the user's, whoever is being asked; what a plugin raises itself is its own."""
    source = "import os, signal\nimport xrt_core as xrt\n@xrt.hookimpl\ndef xrt_passes():\n    {}\n    sum(range(9))\n"
    add_plugin(installed, "xrt-odd", source.format("os.kill(os.getpid(), signal.SIGINT)"), {"xrt.passes": "odd"})
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process of many tests may ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            engines.load_passes()
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interrupt_of_a_plugins_own(installed: pathlib.Path) -> None:
    """It is a failure like any other."""
    source = "import xrt_core as xrt\n@xrt.hookimpl\ndef xrt_passes():\n    raise KeyboardInterrupt\n"
    add_plugin(installed, "xrt-odd", source, {"xrt.passes": "odd"})
    ((_, _, found),) = (row for row in engines.load_passes() if row[0] == "odd")
    assert "KeyboardInterrupt" in str(found)


# --- switches ---


def test_a_switch_comes_with_its_engine(installed: pathlib.Path) -> None:
    """As a keyword, through `xrt.config` and as a variable; its owner is imported when it is given."""
    module = add_plugin(installed, "xrt-hooked", HOOKED, {"xrt.engines": "hooked"})
    assert module not in sys.modules

    assert resolve({}, {"FLAGS_use_hooked": "1"}).switches == (("use_hooked", True),)
    assert module in sys.modules
    xrt.config.use_hooked(True)
    chosen = [e.name for e in engines.select(resolve({}, {}))]
    assert chosen == ["hooked"]
    assert resolve({}, {}).source("use_hooked") == "xrt.config.use_hooked"
    assert "hooked" not in [e.name for e in engines.select(resolve({"use_hooked": False}, {}))]
    assert "`FLAGS_use_hooked`" in as_markdown()


def test_a_switch_that_nobody_declares(installed: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error as a keyword and in `xrt.config`, a warning as a variable; each says where switches come from."""
    message = "no installed package declares the switch 'use_ghost'.*by convention xrt-<name> .pip install xrt-ghost"
    with pytest.raises(OptionError, match=message):
        resolve({"use_ghost": True}, {})
    with pytest.raises(OptionError, match="xrt.config.use_ghost: " + message):
        xrt.config.use_ghost(True)
    assert not hasattr(xrt.config, "use_ghost")
    monkeypatch.setattr("xrt_core.options._warned", set())
    told: list[Event] = []  # not from `process_events`, which drops old events when new ones come
    undo = subscribe(lambda e: told.append(e) if e.name == "option.undeclared" else None)
    try:
        assert resolve({}, {"FLAGS_use_ghost": "1"}).switches == ()
        resolve({}, {"FLAGS_use_ghost": "1"})
    finally:
        undo()
    assert [e.fields["variable"] for e in told] == ["FLAGS_use_ghost"]


def test_two_owners_of_a_switch(installed: pathlib.Path) -> None:
    """The first by name has it; the problem names both."""
    second = HOOKED.replace('"hooked"', '"other"')
    add_plugin(installed, "xrt-hooked", HOOKED, {"xrt.engines": "hooked"})
    add_plugin(installed, "xrt-other", second, {"xrt.engines": "other"})

    assert resolve({"use_hooked": True}, {}).switch("use_hooked") is True
    assert "declared twice: by engine 'hooked' of xrt-hooked 1.0 and by engine 'other' of xrt-other 1.0" in said()


# --- options ---

OPTIONS = """
import xrt_core as xrt
from xrt_core.options import PluginOption
from xrt_core.options.kinds import FLAG, integer

@xrt.hookimpl
def xrt_options():
    return [
        PluginOption("depth", integer(1), 3, "How deep."),
        PluginOption("loud", FLAG, False, "Whether it speaks."),
    ]

@xrt.hookimpl
def xrt_import_model(model):
    return None
"""


def test_options_of_a_plugin(installed: pathlib.Path) -> None:
    """They have a section of their own, are checked, and come from keywords before the environment."""
    module = add_plugin(installed, "xrt-deep", OPTIONS, {"xrt.frontends": "deep"})
    assert resolve({}, {}).sections == {}
    assert module not in sys.modules

    found = resolve({"engine_options": {"deep": {"depth": 5}}}, {"XRT_DEEP_DEPTH": "7", "XRT_DEEP_LOUD": "on"})
    assert found.section("deep") == {"depth": 5, "loud": True}
    assert found.source("deep.loud") == "environment variable XRT_DEEP_LOUD"
    assert resolve({}, {}).section("deep") == {"depth": 3, "loud": False}
    assert found != resolve({}, {})
    assert "## Options of `deep`" in as_markdown()
    assert "`XRT_DEEP_DEPTH`" in as_markdown()
    with pytest.raises(OptionError, match="section 'deep' has no option 'dept': did you mean 'depth'.*xrt-deep 1.0"):
        resolve({"engine_options": {"deep": {"dept": 5}}}, {})
    with pytest.raises(OptionError, match=r"option 'depth' cannot be 0 .from keyword engine_options= deep.*at least 1"):
        resolve({"engine_options": {"deep": {"depth": 0}}}, {})
    with pytest.raises(OptionError, match="option 'loud' cannot be 'maybe' .from environment variable XRT_DEEP_LOUD"):
        resolve({}, {"XRT_DEEP_LOUD": "maybe"})
    with pytest.raises(OptionError, match="no installed plugin declares options in a section 'shallow'"):
        found.section("shallow")
    np.testing.assert_array_equal(
        xrt.XRTModule(relu_model(), engine="host", engine_options={"deep": {"depth": 5}})(X), np.maximum(X, 0)
    )


def test_options_of_an_engine_reach_its_compiler(installed: pathlib.Path) -> None:
    """An engine reads what was given, clean, in `CompileOptions.extra`; defaults are no part of it."""
    compiles = HOOKED.replace('raise AssertionError("nothing to compile")', "return object()")
    source = compiles + OPTIONS.replace("@xrt.hookimpl\ndef xrt_import_model(model):\n    return None\n", "")
    add_plugin(installed, "xrt-hooked", source, {"xrt.engines": "hooked"})
    m = xrt.XRTModule(relu_model(), engine="hooked", engine_options={"hooked": {"depth": 4}})
    assert m.compile_options("hooked").extra == {"depth": 4}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("3", "gives 3, which is no PluginOption"),
        ("PluginOption('Depth', FLAG, None, '')", "an option's name is 'Depth'"),
        ("PluginOption('depth', 7, None, '')", "no PluginOption with a Kind"),
        ("PluginOption('depth', FLAG, 5, '')", "the default of option 'depth' is 5"),
    ],
)
def test_a_bad_option(installed: pathlib.Path, row: str, message: str) -> None:
    """It is left out and listed; the section's others work."""
    text = OPTIONS.replace('PluginOption("depth", integer(1), 3, "How deep."),', row + ",")
    add_plugin(installed, "xrt-deep", text, {"xrt.frontends": "deep"})
    assert resolve({}, {}).section("deep") == {"loud": False}
    assert message in said()


# --- frontends ---

FRONTEND = """
import xrt_core as xrt
from xrt_core.errors import ModelLoadError

class Recipe:
    def __init__(self, name):
        self.name = name

@xrt.hookimpl
def xrt_import_model(model):
    if not isinstance(model, Recipe):
        return None
    if model.name == "bad":
        raise ModelLoadError("the recipe 'bad' cannot be cooked")
    return xrt.trace(lambda x: xrt.ops.Relu(x), "float32[3]")
"""


def test_a_frontend(installed: pathlib.Path) -> None:
    """A module takes objects of another library; one that no frontend knows says who was asked."""
    module = add_plugin(installed, "xrt-recipes", FRONTEND, {"xrt.frontends": "recipes"})
    np.testing.assert_array_equal(xrt.XRTModule(relu_model(), engine="host")(X), np.maximum(X, 0))
    assert module not in sys.modules
    with pytest.raises(ModelLoadError, match="builtins.int is not a model.*no frontend knows it .recipes."):
        xrt.XRTModule(3, engine="host")
    recipe = sys.modules[module].Recipe
    np.testing.assert_array_equal(xrt.XRTModule(recipe("good"), engine="host")(X), np.maximum(X, 0))
    with pytest.raises(ModelLoadError, match="the recipe 'bad' cannot be cooked"):
        xrt.XRTModule(recipe("bad"), engine="host")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raise SystemExit('no')", "xrt-broken 1.0: the hook xrt_import_model of 'broken' failed: SystemExit"),
        ("return 5", "xrt-broken 1.0: the hook xrt_import_model of 'broken' gave a int instead of a Graph"),
    ],
)
def test_a_frontend_that_fails_stops_no_other(installed: pathlib.Path, source: str, message: str) -> None:
    """The next is asked; where none knows the object, what failed is said."""
    text = f"import xrt_core as xrt\n@xrt.hookimpl\ndef xrt_import_model(model):\n    {source}\n"
    add_plugin(installed, "xrt-broken", text, {"xrt.frontends": "broken"})
    module = add_plugin(installed, "xrt-recipes", FRONTEND, {"xrt.frontends": "recipes"})
    with pytest.raises(ModelLoadError, match=message):
        xrt.XRTModule(object(), engine="host")
    good = sys.modules[module].Recipe("good")
    np.testing.assert_array_equal(xrt.XRTModule(good, engine="host")(X), np.maximum(X, 0))
    assert message in said()


def test_a_frontend_that_cannot_be_imported(installed: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a problem with its reason; a module without frontends says that none is installed."""
    monkeypatch.setenv("XRT_DISABLE_PLUGINS", "torch")
    engines.refresh()
    with pytest.raises(ModelLoadError, match="no frontend for it is installed"):
        xrt.XRTModule(3, engine="host")
    add_package(installed, "xrt-torn", "import nothing_of_the_sort", engine="torn", group="xrt.frontends")
    engines.refresh()
    with pytest.raises(ModelLoadError, match="is not a model"):
        xrt.XRTModule(3, engine="host")
    assert "No module named 'nothing_of_the_sort'" in said()


# --- operator sets ---

OPERATORS = """
import numpy as np
import xrt_core as xrt
from xrt_core.engine import OpKernel
from xrt_core.frontends import ops
from xrt_core.ir.operator_set import Operator, OperatorSet
from xrt_core.ir.schema import AttributeSchema, Schema

def like(node):
    return (node.inputs[0].type,)

def schema(name, since=1):
    slope = {"slope": AttributeSchema("slope", "float")}
    return Schema("com.acme", name, since, 1, 1, 1, 1, slope, infer=like)

def leaky(ctx, x):
    return ctx.xp.where(x > 0, x, x * x.dtype.type(ctx.attr("slope", 0.5)))

def leaky_gradient(ctx):
    slope = ctx.attr("slope", 0.5)
    return ctx.grad * ops.Where(ctx.inputs[0] > 0, np.float32(1), np.float32(slope))

def doubled(node):
    return xrt.trace(lambda x: x + x, node.inputs[0].type)

def on_kernels(ctx, x):
    return x

@xrt.hookimpl
def xrt_operators():
    return [OperatorSet("com.acme", 2, [
        Operator(schema("Leaky"), kernel=leaky, gradient=leaky_gradient,
                 engine_kernels=[OpKernel("kernels", "com.acme", "Leaky", on_kernels, ("cpu",))]),
        Operator(schema("Double"), lowering=doubled),
        Operator(schema("Double", 2), lowering=doubled),
    ])]
"""


def test_an_operator_that_was_asked_for_before_its_plugin_came(installed: pathlib.Path) -> None:
    """A look-up that found nothing is not kept over `refresh`: the operator is there once its plugin is."""
    assert find_schema("Leaky", "com.acme", 2) is None
    add_plugin(installed, "xrt-acme", OPERATORS, {"xrt.operators": "com.acme"})
    engines.refresh()
    xrt.import_model(relu_model("com.acme", "Leaky", 2, slope=0.25))
    assert find_schema("Leaky", "com.acme", 2) is not None


def test_an_operator_set(installed: pathlib.Path) -> None:
    """Its domain is imported when a model has it: schema, types, the host's kernel, a lowering, engines' kernels."""
    module = add_plugin(installed, "xrt-acme", OPERATORS, {"xrt.operators": "com.acme"})
    xrt.XRTModule(relu_model(), engine="host")(X)
    assert module not in sys.modules

    m = xrt.XRTModule(relu_model("com.acme", "Leaky", 2, slope=0.25), engine="host")
    np.testing.assert_array_equal(m(X), np.where(X > 0, X, X * 0.25))
    assert module in sys.modules
    doubled = xrt.XRTModule(relu_model("com.acme", "Double", 2), engine="host")
    np.testing.assert_array_equal(doubled(X), X + X)
    assert [n.op_type for n in doubled.partitioned().nodes] == ["Add"]
    assert {n.version for n in xrt.import_model(relu_model("com.acme", "Double", 1)).nodes} == {1}
    kernel = op_kernels.find("kernels", "com.acme", "Leaky")
    assert kernel is not None
    assert kernel.function is sys.modules[module].on_kernels
    assert op_kernels.find("kernels", "com.acme", "Double") is None


def test_an_operator_on_an_engine(installed: pathlib.Path) -> None:
    """An engine that took the portable kernels has those of plugins as well: the cluster is compiled, and right."""
    pytest.importorskip("xrt_xla", reason="a plugin of the project")
    add_plugin(installed, "xrt-acme", OPERATORS, {"xrt.operators": "com.acme"})
    m = xrt.XRTModule(relu_model("com.acme", "Leaky", 2), engine="xla", cache="off")
    np.testing.assert_array_equal(m(X), np.where(X > 0, X, X * 0.5))
    assert m.explain().summary().startswith("1 nodes, clusters: 1 on xla; 100% of nodes")


@pytest.mark.parametrize("op_type", ["Leaky", "Double"])
def test_an_operator_is_verified_and_cached(installed: pathlib.Path, tmp_path: pathlib.Path, op_type: str) -> None:
    """The guard holds the engine against the host; the key names the package, so a newer one's kernel is another."""
    pytest.importorskip("xrt_xla", reason="a plugin of the project")
    module = add_plugin(installed, "xrt-acme", OPERATORS, {"xrt.operators": "com.acme"})
    model, want = relu_model("com.acme", op_type, 2), X + X if op_type == "Double" else np.where(X > 0, X, X * 0.5)
    options: dict[str, Any] = {"engine": "xla", "cache_dir": str(tmp_path), "prune": False}
    guarded = {"guard": True, "guard_async": False, "guard_sandbox": False, "guard_tune": False}
    with xrt.XRTModule(model, **options, **guarded) as m:
        np.testing.assert_array_equal(m(X), want)
        assert m.report().clusters[0]["outcome"]["verdict"] == "ready"
    events: list[Event] = []
    undo = subscribe(events.append)
    for _ in range(2):
        store.forget_all()
        with xrt.XRTModule(model, **options, guard=False) as m:
            np.testing.assert_array_equal(m(X), want)
    undo()
    assert "cache.hit" in [e.name for e in events]
    assert module in sys.modules


def test_the_key_names_the_operators_of_plugins(installed: pathlib.Path) -> None:
    """With their package and its version; the standard's own are not listed."""
    pytest.importorskip("xrt_xla", reason="a plugin of the project")
    add_plugin(installed, "xrt-acme", OPERATORS, {"xrt.operators": "com.acme"})
    rows = []
    for model in (relu_model("com.acme", "Leaky", 2), relu_model()):
        nodes = xrt.XRTModule(model, engine="xla", prune=False).partitioned().nodes
        (function,) = (n.attributes["function"] for n in nodes if n.op_type == "Launch")
        assert isinstance(function, Function)
        rows.append(cache_key(function, HostEngine(), "cpu", CompileOptions()).row("operators"))
    assert rows[0].startswith("com.acme.Leaky-1 of xrt-acme 1.0, source ")
    assert rows[1] == ""


@pytest.mark.parametrize(("op_type", "slopes"), [("Leaky", [0.5, 0.5, 1.0]), ("Double", [2.0, 2.0, 2.0])])
def test_the_gradient_of_an_operator(installed: pathlib.Path, op_type: str, slopes: list[float]) -> None:
    """By its rule, or through its lowering."""
    add_plugin(installed, "xrt-acme", OPERATORS, {"xrt.operators": "com.acme"})

    def loss(x: Any) -> Any:
        tracer = current_tracer("a test")
        (made,) = tracer.emit(tracer.schema(op_type, "com.acme"), [x._value], {}, 1)
        return xrt.ops.ReduceSum(Tensor(made, tracer.scope), keepdims=0)

    _, found = xrt.XRTModule(gradients(xrt.trace(loss, "float32[3]"), 0, ["x"]), engine="host")(X)
    np.testing.assert_array_equal(found, np.array(slopes, np.float32))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"com.acme", 2, [', '"com.acme", 1, [', "Double came with version 2 of the domain, whose newest is 1"),
        ("kernel=leaky,", "kernel=3,", "the kernel of Leaky is 3, which is no function"),
        ('"Double"), lowering=doubled', '"Double")', "neither a kernel nor a lowering"),
        ('schema("Double", 2)', 'schema("Double")', "Double of version 1 is defined twice"),
        ("return [OperatorSet(", "return [3] or [OperatorSet(", "gives 3, which is no OperatorSet"),
        ("def xrt_operators():", "def xrt_operators():\n    raise SystemExit", "xrt_operators of 'com.acme' failed"),
    ],
)
def test_an_operator_set_that_is_wrong(installed: pathlib.Path, old: str, new: str, message: str) -> None:
    """A model that uses it is an error with the reason; others load."""
    assert old in OPERATORS
    add_plugin(installed, "xrt-acme", OPERATORS.replace(old, new), {"xrt.operators": "com.acme"})
    with pytest.raises(ModelLoadError, match="domain 'com.acme', whose plugin cannot be used"):
        xrt.XRTModule(relu_model("com.acme", "Leaky", 2), engine="host", strict=True)
    assert message in said()
    assert xrt.import_model(relu_model())


def test_a_lowering_that_fails(installed: pathlib.Path) -> None:
    """The error names the operator and the node."""
    text = OPERATORS.replace("return xrt.trace(lambda x: x + x, node.inputs[0].type)", "return 3")
    add_plugin(installed, "xrt-acme", text, {"xrt.operators": "com.acme"})
    with pytest.raises(PluginError, match=r"the lowering of com.acme.Double gave 3 for node 'n'; a Graph of 1 inputs"):
        xrt.XRTModule(relu_model("com.acme", "Double", 2), engine="host")(X)


# --- passes, converters, observers ---

MORE = """
import xrt_core as xrt

HEARD = []

def renamed(graph):
    return graph

@xrt.hookimpl
def xrt_passes():
    return [renamed]

@xrt.hookimpl
def xrt_converters():
    return [("left", "right", None)]

@xrt.hookimpl
def xrt_event(event):
    HEARD.append(event.name)
"""


def test_one_module_in_several_groups(installed: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package's passes, converters and observer come from one module, which is registered once."""
    from xrt_core.compiler import passes
    from xrt_core.engine.converters import converters

    monkeypatch.setattr(passes, "_plugin_passes", {})  # those that this process has seen
    groups = dict.fromkeys(("xrt.passes", "xrt.converters", "xrt.observers"), "more")
    module = add_plugin(installed, "xrt-more", MORE, groups)
    try:
        xrt.XRTModule(relu_model(), engine="host")(X)
        heard = sys.modules[module].HEARD
        assert "specialised" in heard
        assert "renamed" in passes.passes.names()
        assert engines.load_converters() == {}
        assert converters.find("left", "right") is not None
        assert not said()
    finally:
        if "renamed" in passes.passes.names():
            passes.unregister_pass("renamed")
        passes._plugin_passes.pop(("renamed", "xrt-more 1.0"), None)
    engines.refresh()
    assert converters.find("left", "right") is None


@pytest.mark.parametrize("error", ["ValueError('x')", "SystemExit(3)"])
def test_an_observer_that_fails(installed: pathlib.Path, error: str) -> None:
    """It is a problem, once, and every call goes on."""
    text = f"import xrt_core as xrt\n@xrt.hookimpl\ndef xrt_event():\n    raise {error}\n"
    add_plugin(installed, "xrt-grumpy", text, {"xrt.observers": "grumpy"})
    m = xrt.XRTModule(relu_model(), engine="host")
    np.testing.assert_array_equal(m(X), np.maximum(X, 0))
    assert said().count("the hook xrt_event of 'grumpy' failed") == 1


# --- commands ---

COMMANDS = """
import typer
import xrt_core as xrt

app = typer.Typer(help="Recipes.")

@app.command()
def cook(dish: str):
    print(f"cooking {dish}")

@app.command()
def wash():
    print("washing")

def hello():
    '''Say hello.'''
    raise xrt.errors.OptionError("nobody is here")

@xrt.hookimpl
def xrt_commands():
    return [("recipes", app), ("hello", hello), ("run", hello), ("bad name", hello), 7,
            ("later", "LATER:serve", "Serve."), ("absent", "LATER:nothing", "Never."), ("half", "LATER:serve")]
"""
LATER = """
def serve():
    print("served")
"""


def test_commands(installed: pathlib.Path) -> None:
    """A typer application becomes subcommands, a function a command with the errors of XRT; bad rows are left out."""
    import typer

    later = add_plugin(installed, "xrt-later", LATER, {"other.group": "later"})
    module = add_plugin(installed, "xrt-recipes", COMMANDS.replace("LATER", later), {"xrt.commands": "recipes"})
    own = {"run", "doctor"}
    assert module not in sys.modules
    host = typer.Typer()
    host.command("run")(lambda: None)
    left_out = add_commands(host, own)

    done = CliRunner().invoke(host, ["recipes", "cook", "soup"])
    assert (done.exit_code, done.stdout) == (0, "cooking soup\n")
    done = CliRunner().invoke(host, ["hello"])
    assert (done.exit_code, done.stderr) == (2, "error: nobody is here\n")
    text = "\n".join(left_out)
    assert "command 'run' is registered twice: by xrt-core and by xrt-recipes 1.0" in text
    assert "the command's name is 'bad name'" in text
    assert "gives 7, which is no row" in text
    assert f"command 'absent', {later}:nothing: AttributeError" in text
    assert "command 'half' is (" in text
    assert CliRunner().invoke(host, ["later"]).stdout == "served\n"


def test_a_command_named_by_its_module_is_imported_when_asked_for(installed: pathlib.Path) -> None:
    """The help has the plugin's line without importing the module; the command itself runs it."""
    import typer

    later = add_plugin(installed, "xrt-later", LATER, {"other.group": "later"})
    code = f"""
import xrt_core as xrt

@xrt.hookimpl
def xrt_commands():
    return [("later", "{later}:serve", "Serve."), ("never", "{later}:nothing", "Never.")]
"""
    add_plugin(installed, "xrt-recipes", code, {"xrt.commands": "recipes"})
    for asked in ("", "later"):
        host = typer.Typer(rich_markup_mode=None)
        assert add_commands(host, (), asked) == []
        assert (later in sys.modules) == (asked == "later")
        assert "Serve." in CliRunner().invoke(host, ["--help"]).stdout
    assert CliRunner().invoke(host, ["later"]).stdout == "served\n"


@pytest.mark.slow
def test_a_command_in_a_fresh_process(installed: pathlib.Path) -> None:
    """`xrt recipes wash` runs it; `xrt --help` lists it, and says why a broken package's commands are missing."""
    import subprocess

    add_plugin(installed, "xrt-recipes", COMMANDS.replace("LATER", "xrt_absent"), {"xrt.commands": "recipes"})
    add_plugin(installed, "xrt-torn", "raise SystemExit(5)", {"xrt.commands": "torn"})

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        code = f"import sys; sys.path[:0] = {[str(installed), *sys.path]!r}; sys.argv = ['xrt', *{list(arguments)!r}]"
        code += "; from xrt_core.cli.app import main; main()"
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)

    done = run("recipes", "wash")
    assert done.stdout == "washing\n", done.stderr
    done = run("--help")
    assert "recipes" in done.stdout
    assert "plugin 'torn' of xrt-torn 1.0 cannot be imported: SystemExit: 5" in done.stderr


# --- names that are taken ---


def test_two_packages_of_one_domain(installed: pathlib.Path) -> None:
    """Neither is taken, and both are named."""
    add_plugin(installed, "xrt-acme", OPERATORS, {"xrt.operators": "com.acme"})
    add_plugin(installed, "xrt-rival", OPERATORS, {"xrt.operators": "com.acme"})
    with pytest.raises(ModelLoadError, match="named twice in xrt.operators: by xrt-acme 1.0 and xrt-rival 1.0"):
        xrt.XRTModule(relu_model("com.acme", "Leaky", 2), engine="host", strict=True)


def test_two_packages_of_one_section(installed: pathlib.Path) -> None:
    """The first has it; the problem names both."""
    add_plugin(installed, "xrt-deep", OPTIONS, {"xrt.frontends": "deep"})
    add_plugin(installed, "xrt-rival", OPTIONS.replace('"depth"', '"width"'), {"xrt.commands": "deep"})
    assert resolve({}, {}).section("deep") == {"depth": 3, "loud": False}
    assert "option of deep (xrt-deep 1.0 and xrt-rival 1.0): the section has options of xrt-deep 1.0" in said()


# --- everything that is wrong, in one listing ---


def test_the_doctor_lists_every_broken_plugin(installed: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With package and reason, and a cure; a switch's variable that nobody declares as well."""
    add_plugin(installed, "xrt-torn", "import nothing_at_all", {"xrt.frontends": "torn"})
    add_plugin(installed, "xrt-odd", "import no_engine", {"xrt.engines": "odd"})
    wrong = OPERATORS.replace("kernel=leaky,", "kernel=3,")
    add_plugin(installed, "xrt-acme", wrong, {"xrt.operators": "com.acme"})
    add_plugin(installed, "xrt-deep", OPTIONS.replace("integer(1), 3", "integer(1), 0"), {"xrt.frontends": "deep"})
    add_plugin(installed, "xrt-recipes", COMMANDS.replace("LATER", "xrt_absent"), {"xrt.commands": "recipes"})
    monkeypatch.setenv("FLAGS_use_ghost", "1")
    engines.refresh()

    done = CliRunner().invoke(application(), ["doctor"])

    assert done.exit_code == 1, done.output
    assert "problem: plugin torn of xrt.frontends (xrt-torn 1.0)" in done.stdout
    assert "problem: engine odd: " in done.stdout
    assert done.stdout.count("No module named 'no_engine'") == 2  # in the list of engines, and as one problem
    assert "problem: operators of com.acme (xrt-acme 1.0): the kernel of Leaky is 3" in done.stdout
    assert "problem: option of deep (xrt-deep 1.0): the default of option 'depth' is 0" in done.stdout
    assert "command 'run' is registered twice: by xrt-core and by xrt-recipes 1.0" in done.stdout
    assert "problem: FLAGS_use_ghost is set: no installed package declares the switch 'use_ghost'" in done.stdout
    assert "deep.loud = False" in done.stdout


def test_a_missing_engine_says_where_engines_come_from(installed: pathlib.Path) -> None:
    """By the convention of names; the core has no list of packages."""
    with pytest.raises(EngineNotFoundError, match="pip install xrt-<name>.*'ghost' would be pip install xrt-ghost"):
        xrt.XRTModule(relu_model(), engine="ghost")


def test_the_host_engine_of_the_kit_is_no_plugin() -> None:
    """Objects without hooks are none, and cost nothing."""
    before = plugins.generation
    plugins.add(HostEngine(), "host_engine", "the kit")
    assert plugins.generation == before

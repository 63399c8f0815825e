"""Operators of ONNX Runtime's custom-operator libraries: onnxruntime-extensions, on the host and beside an engine."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from xrt_onnxruntime import register_custom_ops

import xrt_core as xrt
from xrt_core.errors import EngineUnavailableError, ModelLoadError, OptionError, RegistrationError, UnsupportedError
from xrt_core.ir import operator_libraries
from xrt_core.ir.operator_set import find_operator, operator_owner
from xrt_core.plugins import plugins

extensions = pytest.importorskip("onnxruntime_extensions", reason="the library that is tried")
DOMAIN = "ai.onnx.contrib"
LIBRARY = extensions.get_library_path()
X = np.array([-1.0, 2.0, 3.0], np.float32)
WANTED = np.exp(np.maximum(X, 0)) + X * X


@pytest.fixture
def library() -> Iterator[None]:
    """The library, known for the time of a test."""
    made = register_custom_ops(LIBRARY, DOMAIN)
    yield
    made.remove()


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """What the option of a module made known goes with the test."""
    yield
    while operator_libraries._opened:
        plugins.remove(operator_libraries._opened.popitem()[1])


def model(nodes: list[Any], dtype: int = TensorProto.FLOAT) -> Any:
    """From x, of three elements, to y."""
    x = helper.make_tensor_value_info("x", dtype, [3])
    graph = helper.make_graph(nodes, "g", [x], [onnx.ValueInfoProto(name="y")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid(DOMAIN, 1)])


PARTS = [
    helper.make_node("Mul", ["x", "x"], ["s"]),
    helper.make_node("NegPos", ["x"], ["low", "high"], domain=DOMAIN, name="parts"),
    helper.make_node("Exp", ["high"], ["e"]),
    helper.make_node("Add", ["e", "s"], ["y"]),
]
UPPER = [helper.make_node("StringUpper", ["x"], ["y"], domain=DOMAIN)]
UNHEARD = [helper.make_node("Unheard", ["x"], ["y"], domain=DOMAIN, name="it")]


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("engine", ["host", "onnxruntime"])
def test_between_nodes_of_an_engine(engine: str) -> None:
    """The library computes its node, the engine what lies around it."""
    with xrt.XRTModule(model(PARTS), engine=engine, prune=False, guard=False) as m:
        np.testing.assert_allclose(m(X), WANTED, rtol=1e-6)


@pytest.mark.usefixtures("library")
def test_strings() -> None:
    """They go in and come out."""
    m = xrt.XRTModule(model(UPPER, TensorProto.STRING), engine="host")
    assert m(np.array(["ab", "c", ""], object)).tolist() == ["AB", "C", ""]


@pytest.mark.usefixtures("library")
def test_an_operator_that_the_library_has_not() -> None:
    """It is one that nobody defines."""
    with pytest.raises(UnsupportedError, match="node 'it'.*ai.onnx.contrib has no operator Unheard"):
        xrt.XRTModule(model(UNHEARD), engine="host")(X)


def test_without_the_library() -> None:
    """The model loads; running it says that nobody defines the operator. A file that is no library is refused."""
    with pytest.raises(UnsupportedError, match=r"NegPos is of the unknown domain.*custom_op_libraries"):
        xrt.XRTModule(model(PARTS), engine="host")(X)
    with pytest.raises(RegistrationError, match="custom operators of '/nowhere.so'"):
        register_custom_ops("/nowhere.so", DOMAIN)


@pytest.mark.parametrize("engine", ["host", "onnxruntime"])
def test_named_in_the_options(engine: str) -> None:
    """A module names the library by its path alone; again for the next module, and with a domain of ONNX Runtime's own
    in the model, whose operators are not the library's."""
    for _ in range(2):
        options = {"engine": engine, "prune": False, "guard": False, "strict": True}
        with xrt.XRTModule(model(PARTS), custom_op_libraries=[LIBRARY], **options) as m:
            np.testing.assert_allclose(m(X), WANTED, rtol=1e-6)
    assert [domain for _, domain in operator_libraries._opened] == [DOMAIN]
    found = find_operator(DOMAIN, "NegPos")
    assert found is not None
    assert operator_owner(found).startswith(f"the library {LIBRARY} (")
    gelu = model([*PARTS[:3], helper.make_node("Gelu", ["s"], ["y"], domain="com.microsoft")])
    gelu.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    xrt.XRTModule(gelu, engine="host", custom_op_libraries=LIBRARY)
    assert [domain for _, domain in operator_libraries._opened] == [DOMAIN]


def test_an_operator_that_a_named_library_has_not() -> None:
    """With `strict` it is an error when the module is made; others of the domain run."""
    both = model([*UNHEARD, *PARTS[:3], helper.make_node("Add", ["e", "s"], ["y2"])])
    with pytest.raises(ModelLoadError, match="node 'it': ai.onnx.contrib has no operator Unheard") as e:
        xrt.XRTModule(both, engine="host", custom_op_libraries=[LIBRARY], strict=True)
    assert "NegPos" not in str(e.value)


def test_with_the_guard() -> None:
    """Worker processes compile and check what lies around the library's nodes."""
    options = {"engine": "onnxruntime", "prune": False, "guard": True, "guard_tune": False, "cache": False}
    with xrt.XRTModule(model(PARTS), custom_op_libraries=[LIBRARY], **options) as m:
        np.testing.assert_allclose(m(X), WANTED, rtol=1e-6)
        assert m.wait(60)
        np.testing.assert_allclose(m(X), WANTED, rtol=1e-6)
        assert m.explain().engine_node_count == 3


def test_in_a_saved_module(tmp_path: pathlib.Path) -> None:
    """The file names the library; where that is not there, the error says what to give, and another path is taken."""
    beside = tmp_path / "operators.so"
    os.symlink(LIBRARY, beside)
    options = {"engine": "onnxruntime", "prune": False, "guard": False}
    with xrt.XRTModule(model(PARTS), custom_op_libraries=[beside], **options) as m:
        m(X)
        m.save(tmp_path / "saved.xrt")
    with xrt.XRTModule.load(tmp_path / "saved.xrt", guard=False) as m:
        assert m.options.custom_op_libraries == (str(beside),)
        np.testing.assert_allclose(m(X), WANTED, rtol=1e-6)
    with pytest.raises(RegistrationError, match=r"has ai.onnx.contrib.NegPos, which this process has from the library"):
        xrt.XRTModule.load(tmp_path / "saved.xrt", custom_op_libraries=[LIBRARY])
    beside.unlink()
    with pytest.raises(OptionError, match=r"custom_op_libraries names .*operators.so', and there is no such file"):
        xrt.XRTModule.load(tmp_path / "saved.xrt")


def test_files_that_are_no_libraries(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the file; what is no path is an error of the option, and so is a library that nobody opens."""
    (tmp_path / "text.so").write_text("no library")
    with pytest.raises(RegistrationError, match=r"custom operators of '.*text.so'"):
        xrt.XRTModule(model(PARTS), custom_op_libraries=[tmp_path / "text.so"])
    with pytest.raises(OptionError, match="custom_op_libraries.*the path of a library"):
        xrt.XRTModule(model(PARTS), custom_op_libraries=[3])
    why = xrt.engine.EngineStatus(False, reason="it is not installed", remedy="pip install it")
    monkeypatch.setattr("xrt_onnxruntime._probe", lambda: why)
    with pytest.raises(EngineUnavailableError, match="it is not installed; pip install it"):
        xrt.XRTModule(model(PARTS), engine="host", custom_op_libraries=[LIBRARY])
    monkeypatch.setattr(plugins, "each", lambda *_, **__: iter(()))
    with pytest.raises(OptionError, match="no installed plugin opens such a library; install the engine"):
        xrt.XRTModule(model(PARTS), engine="host", custom_op_libraries=[LIBRARY])

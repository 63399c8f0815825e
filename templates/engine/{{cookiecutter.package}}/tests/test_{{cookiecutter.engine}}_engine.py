"""What the engine says about itself and about nodes, and a model that it runs."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import pytest
import xrt_core as xrt
from xrt_core.engine import CompileOptions, engines
from xrt_core.errors import EngineUnavailableError, OptionError
from xrt_core.ir.graph import Node, Value
from xrt_core.ir.types import STRING, TensorType, ValueType

from {{ cookiecutter.__module }} import {{ cookiecutter.__class }}Engine

F32 = np.dtype(np.float32)


class Perceptron(xrt.Graph):
    """relu(x @ w)."""

    def build(self, x: Any, w: Any) -> Any:
        """The graph."""
        return xrt.ops.Relu(xrt.ops.MatMul(x, w))


@pytest.fixture
def engine() -> {{ cookiecutter.__class }}Engine:
    """The engine; skips where its library is not there."""
    engine = {{ cookiecutter.__class }}Engine()
    status = engine.probe()
    if not status.available:
        pytest.skip(f"{status.reason}; {status.remedy}")
    return engine


def _run(code: str) -> str:
    """What a fresh interpreter prints for the code."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _node(op_type: str, *types: ValueType | None) -> Node:
    inputs = [Value(f"x{i}", t) for i, t in enumerate(types)]
    return Node(op_type, inputs, [Value("y", types[0])], version=14, name="n")


def test_importing_the_engine_does_not_import_its_library() -> None:
    """Listing engines must not pay for the library: `_toolkit` is loaded at the first use."""
    said = _run("""
        import sys
        from {{ cookiecutter.__module }} import {{ cookiecutter.__class }}Engine
        {{ cookiecutter.__class }}Engine()
        print("{{ cookiecutter.__module }}._toolkit" in sys.modules)
    """)
    assert said == "False"


def test_a_missing_library_is_said_with_the_cure() -> None:
    """Without its library the engine is unavailable, says why and what to do, and raises only when it is used."""
    said = _run("""
        import sys
        sys.modules["{{ cookiecutter.__module }}._toolkit"] = None
        from {{ cookiecutter.__module }} import {{ cookiecutter.__class }}Engine
        from xrt_core.engine import CompileOptions
        from xrt_core.errors import EngineUnavailableError
        status = {{ cookiecutter.__class }}Engine().probe()
        assert not status.available
        print(status.reason, "|", status.remedy)
        try:
            {{ cookiecutter.__class }}Engine().compiler("{{ cookiecutter.__kinds.split(',')[0] }}", CompileOptions())
        except EngineUnavailableError as e:
            print(e)
    """)
    assert "is not installed | pip install" in said
    assert "{{ cookiecutter.engine }} cannot be used" in said


def test_xrt_lists_the_engine(engine: {{ cookiecutter.__class }}Engine) -> None:
    """The entry point is found, fits this core, and the engine is ready."""
    (line,) = [line for line in engines.listing() if line.name == "{{ cookiecutter.engine }}"]

    assert line.package == "{{ cookiecutter.package|lower|replace('_', '-')|replace('.', '-') }}"
    assert line.status == "ready", line.reason
    assert {d.partition(":")[0] for d in line.devices} <= {*engine.devices}


def test_a_model_runs_on_the_engine(engine: {{ cookiecutter.__class }}Engine) -> None:
    """Every node goes to the engine, and the results are those of XRT's host."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((4, 8), np.float32), rng.standard_normal((8, 3), np.float32)
    module = xrt.XRTModule(Perceptron(), engine="{{ cookiecutter.engine }}", guard=False)

    got = module(x, w)

    np.testing.assert_allclose(np.asarray(got), xrt.XRTModule(Perceptron(), engine="host")(x, w), rtol=1e-5, atol=1e-6)
    summary = module.explain().summary()
    assert "on {{ cookiecutter.engine }}; 100% of nodes" in summary, summary


def test_an_absent_device_is_an_error_that_lists_the_present(engine: {{ cookiecutter.__class }}Engine) -> None:
    """A device that is not here is refused by name."""
    with pytest.raises(EngineUnavailableError, match="no device 'quantum' here; there is {{ cookiecutter.__kinds.split(',')[0] }}"):
        engine.compiler("quantum", CompileOptions())


def test_an_unknown_option_is_an_error(engine: {{ cookiecutter.__class }}Engine) -> None:
    """Options of other engines are not swallowed."""
    with pytest.raises(OptionError, match="unknown option 'precision_mode'"):
        engine.compiler(engine.probe().devices[0], CompileOptions(extra={"precision_mode": 1}))


def test_supports_takes_a_static_node(engine: {{ cookiecutter.__class }}Engine) -> None:
    """A plain node is taken in both phases."""
    node = _node("Relu", TensorType(F32, (2, 3)))
    device = engine.probe().devices[0]

    assert engine.supports(node, device, "inference")
    assert engine.supports(node, device, "train")


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        (_node("Relu", TensorType(F32, ("batch", 3))), "every dimension must be known"),
        (_node("Relu", TensorType(F32, None)), "every dimension must be known"),
        (_node("Relu", None), "is unknown"),
        (_node("Identity", TensorType(STRING, (2,))), "is string, which the library does not have"),
        (_node("NoSuchOperator", TensorType(F32, (2,))), "no {{ 'operator' if cookiecutter.array_library == 'onnx' else 'kernel for' }} NoSuchOperator"),
{%- if cookiecutter.array_library == "kernels" %}
        (_node("MatMul", TensorType(F32, (2,)), TensorType(F32, (2, 3))), "'x0' of MatMul is a vector"),
        (_node("Relu", TensorType(np.dtype(np.int8), (2,))), "does not take int8"),
{%- endif %}
    ],
)
def test_supports_refuses_with_the_reason(engine: {{ cookiecutter.__class }}Engine, node: Node, reason: str) -> None:
    """What the engine cannot do is refused with a sentence that names it; XRT shows it to users."""
    verdict = engine.supports(node, engine.probe().devices[0], "inference")

    assert not verdict
    assert reason in verdict.reason

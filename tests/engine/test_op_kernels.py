"""Bad registrations of kernels: each says which engine, which operator, whose function, and what was expected."""

from __future__ import annotations

import functools
import inspect
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from xrt_core.engine import EngineStatus, OpKernelRegistry, Support, op_kernel, op_kernels
from xrt_core.engine.contract import CompileOptions, Engine, GraphCompiler
from xrt_core.engine.manager import EngineManager
from xrt_core.engine.op_kernels import _takes
from xrt_core.errors import RegistrationError
from xrt_core.events import process_events
from xrt_core.plugins.discovery import Discovery


@pytest.fixture
def registry() -> OpKernelRegistry:
    """A registry of the test's own."""
    return OpKernelRegistry()


def kernel(ctx: Any, *inputs: Any) -> Any:
    """A kernel of any operator."""
    return inputs[0]


def one_input(ctx: Any, x: Any) -> Any:
    """A kernel of one input."""
    return x


def test_good_kernels_are_valid(registry: OpKernelRegistry) -> None:
    """Kernels of operators that there are, of any domain, those that the newest opset has dropped included."""
    op_kernel("Relu", "Add", "Concat", "Upsample", engine="it", registry=registry)(kernel)
    op_kernel("Binarizer", engine="it", domain="ai.onnx.ml", registry=registry)(one_input)
    op_kernel("Reshape", engine="it", static=(1,), registry=registry)(kernel)
    op_kernel("Launch", engine="it", domain="xrt", registry=registry)(kernel)
    registry.validate("it")


def test_an_unknown_operator(registry: OpKernelRegistry) -> None:
    """Validation names every kernel of an operator that does not exist, and the nearest one that does."""
    op_kernel("Rellu", "Add", engine="it", registry=registry)(kernel)
    op_kernel("Scaler", engine="it", domain="ai.onnx.nonsense", registry=registry)(kernel)
    op_kernel("Rellu", engine="other", registry=registry)(kernel)

    with pytest.raises(RegistrationError) as error:
        registry.validate("it")
    first, second = str(error.value).split("\n")
    assert "kernel ai.onnx.Rellu of engine 'it', by tests.engine.test_op_kernels.kernel: " in first
    assert "did you mean" in first
    assert "unknown domain 'ai.onnx.nonsense'" in second


def test_a_wrong_signature(registry: OpKernelRegistry) -> None:
    """One without a context is refused at once; one with too few inputs when the operator is looked at."""
    with pytest.raises(RegistrationError, match=r"Relu of engine 'it': the signature \(\) must b"):
        op_kernel("Relu", engine="it", registry=registry)(lambda: None)
    with pytest.raises(RegistrationError, match="3 is not callable; it must be kernel"):
        op_kernel("Relu", engine="it", registry=registry)(3)  # type: ignore[type-var]
    op_kernel("Add", engine="it", registry=registry)(one_input)
    with pytest.raises(RegistrationError, match=r"Add of engine 'it', by .*one_input.* and 2 inputs.*\(ctx, \*in"):
        registry.validate("it")


def test_a_kernel_twice(registry: OpKernelRegistry) -> None:
    """Both functions are named."""
    op_kernel("Relu", engine="it", registry=registry)(kernel)
    with pytest.raises(RegistrationError, match=r"Relu of engine 'it' is registered twice: by .*\.kernel and .*\.one_"):
        op_kernel("Relu", engine="it", registry=registry)(one_input)


@pytest.mark.parametrize(
    ("devices", "expected"),
    [((), "expected a tuple"), ("cpu", "expected a tuple")],
)
def test_no_device(registry: OpKernelRegistry, devices: Any, expected: str) -> None:
    """A kernel has a device; a bare string is not taken for a tuple of letters."""
    with pytest.raises(RegistrationError, match=f"kernel ai.onnx.Relu of engine 'it': .*{expected}"):
        op_kernel("Relu", engine="it", devices=devices, registry=registry)(kernel)


def test_an_unknown_device(registry: OpKernelRegistry) -> None:
    """A kind that nobody brings is named with those that there are, when the kernels are checked against operators."""
    op_kernel("Relu", engine="it", devices=("gpu",), registry=registry)(kernel)
    with pytest.raises(RegistrationError, match="kernel ai.onnx.Relu of .*no device kind 'gpu'; .*known: cpu, cuda"):
        registry.validate("it")


@pytest.mark.parametrize("keyword", ["static", "mutable_variables"])
def test_an_input_that_there_is_not(registry: OpKernelRegistry, keyword: str) -> None:
    """An index beyond the operator's inputs is named with how many there are."""
    op_kernel("Reshape", engine="it", registry=registry, **{keyword: (2,)})(kernel)  # type: ignore[arg-type]
    with pytest.raises(RegistrationError, match=f"Reshape of engine 'it', .*{keyword} names input 2; Reshape has 2"):
        registry.validate("it")


def test_an_unknown_engine(registry: OpKernelRegistry) -> None:
    """Kernels that a package registers for an engine that nobody provides are named with what was expected."""
    op_kernel("Relu", "Add", engine="typo", registry=registry)(kernel)
    op_kernel("Neg", engine="it", registry=registry)(kernel)
    assert registry.strays("another_package", {"it"}) == []
    first, second = registry.strays("tests", {"it", "toy"})
    assert first == (
        "kernel ai.onnx.Relu of engine 'typo', by tests.engine.test_op_kernels.kernel: there is no engine 'typo'; "
        "expected one of it, toy"
    )
    assert "ai.onnx.Add" in second


def test_an_unknown_engine_is_reported_when_the_package_is_loaded(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading an engine whose package registers for another name leaves an event that says so."""

    class Typed(Engine):
        name = "typed"

        def probe(self) -> EngineStatus:
            return EngineStatus(True, "1", ("cpu",))

        def supports(self, node: Any, device: str, phase: Any) -> Support:
            return Support.no("it takes nothing")

        def compiler(self, device: str, options: CompileOptions) -> GraphCompiler:
            raise AssertionError("nothing to compile")

        def fingerprint(self, device: str) -> str:
            return "1"

    monkeypatch.setattr(op_kernels, "_kernels", {})
    op_kernel("Relu", engine="tiped")(kernel)
    manager = EngineManager(Discovery("0.1.0", [str(tmp_path)]))
    manager.register(Typed)
    manager.get("typed")

    event = process_events.recent("kernels.stray")[-1]
    assert "there is no engine 'tiped'; expected one of typed" in event.fields["error"]


def test_dtypes_are_checked_per_node() -> None:
    """`dtypes` refuses by name; see the tests of supports for the rest."""
    registry = OpKernelRegistry()
    op_kernel("Relu", engine="it", dtypes=frozenset([np.dtype(np.float32)]), registry=registry)(kernel)
    found = registry.find("it", "", "Relu")
    assert found is not None
    assert found.dtypes == {np.dtype(np.float32)}
    assert dict(registry.of_engine("it")) == {("", "Relu"): found}


def _wrapped(ctx: Any, x: Any) -> Any:
    return x


_KERNELS: list[Callable[..., Any]] = [
    lambda: None,
    lambda ctx: None,
    lambda ctx, x: None,
    lambda ctx, x, y=None: None,
    lambda ctx, *xs: None,
    lambda *xs: None,
    lambda ctx, x, *, axis=0: None,
    lambda ctx, x, *, axis: None,
    lambda ctx, x, *xs, **named: None,
]


@pytest.mark.parametrize("kernel", _KERNELS, ids=lambda k: str(inspect.signature(k)))
@pytest.mark.parametrize("inputs", range(4))
def test_the_code_of_a_kernel_tells_what_its_signature_does(kernel: Callable[..., Any], inputs: int) -> None:
    """The quick look at how many inputs a kernel takes agrees with `inspect`."""
    try:
        inspect.signature(kernel).bind(None, *[None] * inputs)
        binds = True
    except TypeError:
        binds = False
    assert _takes(kernel, inputs) == binds


def test_what_is_no_plain_function_is_left_to_inspect() -> None:
    """Wrapped, partial and built-in functions, and objects that can be called."""

    @functools.wraps(_wrapped)
    def wrapper(*args: Any) -> Any:
        return _wrapped(*args)

    for function in (wrapper, functools.partial(_wrapped, None), len, type("K", (), {"__call__": _wrapped})()):
        assert not _takes(function, 1)

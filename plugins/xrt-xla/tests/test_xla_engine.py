"""What the engine says about itself and about nodes."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import xrt_xla
from xrt_xla import XlaEngine, _installed

from xrt_core.engine.contract import CompileOptions
from xrt_core.engine.manager import EngineManager
from xrt_core.errors import EngineUnavailableError, OptionError
from xrt_core.ir.graph import Node, Value
from xrt_core.ir.types import DTYPE_TO_ONNX, STRING, SequenceType, TensorType, ValueType
from xrt_core.plugins.discovery import Discovery

F32 = np.dtype(np.float32)


def _run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _node(op_type: str, *types: ValueType | None, version: int = 13, out: ValueType | None = None) -> Node:
    inputs = [Value(f"x{i}", t) for i, t in enumerate(types)]
    return Node(op_type, inputs, [Value("y", out or types[0])], version=version, name="n")


def test_what_packages_tell_of_the_cpu() -> None:
    """Without an import of JAX, it is what JAX says: also the identity of what is compiled."""
    assert (
        _run("""
            import sys
            from xrt_xla import XlaEngine
            engine = XlaEngine()
            told = engine.probe_installed(), engine.fingerprint("cpu")
            assert "jax" not in sys.modules
            assert told == (engine.probe(), engine.fingerprint("cpu"))
            print("jax" in sys.modules, engine.probe_installed())
        """)
        == "True None"
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("JAX_PLATFORMS", "cuda"),
        ("JAX_NUM_CPU_DEVICES", "2"),
        ("XLA_FLAGS", "--xla_force_host_platform_device_count=2"),
    ],
)
def test_where_packages_do_not_tell(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """Variables that say something of devices are JAX's to read; so are packages that bring some."""
    for module in ("jax", "jaxlib"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    assert _installed.finds_one_cpu()
    with monkeypatch.context() as patch:
        patch.setenv(name, value)
        assert not _installed.finds_one_cpu()
    with monkeypatch.context() as patch:
        patch.setattr(_installed, "entry_points", lambda group: [group])
        _installed._is_for_cpu.cache_clear()
        assert not _installed.finds_one_cpu()
    (tmp_path / "jax_plugins" / "xla_new").mkdir(parents=True)
    (tmp_path / "jax_plugins" / "xla_new" / "__init__.py").touch()
    with monkeypatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        _installed._is_for_cpu.cache_clear()
        assert not _installed.finds_one_cpu()
    _installed._is_for_cpu.cache_clear()
    assert _installed.finds_one_cpu()


def test_a_gpu_comes_before_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where JAX has both, XRT compiles for the GPU unless the CPU is asked for."""
    from xrt_xla import _toolkit

    gpu, cpu = (SimpleNamespace(platform=p, process_index=0) for p in ("gpu", "cpu"))
    there = {"cuda": [gpu, gpu], "cpu": [cpu]}

    def local_devices(kind: str) -> list[object]:
        if kind not in there:
            raise RuntimeError(f"Unknown backend {kind}")
        return there[kind]

    monkeypatch.setattr(_toolkit, "_local_devices", local_devices)
    monkeypatch.setattr(_toolkit.jax, "process_index", lambda: 0)
    assert list(_toolkit.devices()) == ["cuda:0", "cuda:1", "cpu"]
    xrt_xla._probe.cache_clear()
    try:
        manager = EngineManager(Discovery("0.1.0", []))
        manager.register(XlaEngine)
        engine = manager.get("xla")
        assert [manager.device(engine, d) for d in (None, "cuda:1", "cpu")] == ["cuda:0", "cuda:1", "cpu"]
        with pytest.raises(EngineUnavailableError, match="'cuda:7' here; it can use cuda:0, cuda:1, cpu"):
            manager.device(engine, "cuda:7")
    finally:
        xrt_xla._probe.cache_clear()


@pytest.mark.parametrize(
    ("libraries", "given", "expected"),
    [
        ({"cupy"}, {}, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}),
        ({"torch"}, {}, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}),
        (set(), {}, {}),
        ({"cupy"}, {"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}, {"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}),
        ({"cupy", "torch"}, {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".5"}, {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".5"}),
    ],
)  # fmt: skip
def test_the_gpu_is_shared_with_other_libraries(
    monkeypatch: pytest.MonkeyPatch, libraries: set[str], given: dict[str, str], expected: dict[str, str]
) -> None:
    """JAX leaves memory to the host where that computes with CuPy, and to a torch with GPUs that the program has
    loaded, unless the user has said how much it takes."""
    from xrt_xla import _toolkit

    monkeypatch.setattr(_toolkit.importlib.util, "find_spec", lambda name: object() if name in libraries else None)
    there = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: "torch" in libraries))
    monkeypatch.setitem(sys.modules, "torch", there)
    _toolkit.share_memory(given)
    assert given == expected


def test_importing_the_engine_and_asking_about_nodes_does_not_import_jax() -> None:
    """Listing engines and partitioning must not pay for JAX."""
    said = _run("""
        import sys
        from xrt_xla import XlaEngine
        from xrt_core.ir.graph import Node, Value
        from xrt_core.ir.types import TensorType
        import numpy as np
        t = TensorType(np.dtype(np.float32), (2,))
        engine = XlaEngine()
        assert engine.supports(Node("Relu", [Value("x", t)], [Value("y", t)], version=14), "cpu", "inference")
        print("jax" in sys.modules)
    """)
    assert said == "False"


def test_a_missing_jax_is_said_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without JAX the engine is unavailable, says why, and does not raise."""
    from xrt_xla import _toolkit

    monkeypatch.setitem(sys.modules, "jax", None)
    monkeypatch.delitem(sys.modules, _toolkit.__name__)
    monkeypatch.delattr(xrt_xla, "_toolkit")
    status = xrt_xla._probe.__wrapped__()
    assert not status.available
    assert status.reason == "JAX is not installed"
    assert "pip install" in status.remedy
    monkeypatch.setattr(xrt_xla, "_probe", lambda: status)
    with pytest.raises(EngineUnavailableError, match="xla cannot be used: JAX is not installed; pip install"):
        XlaEngine().compiler("cpu", CompileOptions())


def test_probe_lists_version_and_devices(engine: XlaEngine) -> None:
    """A usable engine names its version and at least the CPU."""
    import jax

    status = engine.probe()
    assert status.available
    assert status.version.startswith(jax.__version__)
    assert "cpu" in status.devices


def test_fingerprint_names_the_library_and_the_processor(engine: XlaEngine) -> None:
    """The fingerprint is stable and holds what an executable depends on."""
    import jax

    assert engine.fingerprint("cpu") == engine.fingerprint("cpu")
    assert jax.__version__ in engine.fingerprint("cpu")


def test_an_absent_device_is_an_error_that_lists_the_present(engine: XlaEngine) -> None:
    """A device that is not here is refused by name."""
    with pytest.raises(EngineUnavailableError, match=r"no device 'cpu:99' here; JAX sees cpu"):
        engine.compiler("cpu:99", CompileOptions())
    with pytest.raises(EngineUnavailableError, match="no device 'quantum'"):
        engine.compiler("quantum", CompileOptions())


def test_an_unknown_option_is_an_error(engine: XlaEngine) -> None:
    """Options of other engines are not swallowed."""
    with pytest.raises(OptionError, match=r"unknown option 'precision_mode'.*fold_bytes"):
        engine.compiler("cpu", CompileOptions(extra={"precision_mode": 1}))


def test_supports_takes_a_static_node(engine: XlaEngine) -> None:
    """A plain node is taken in both phases."""
    node = _node("Relu", TensorType(F32, (2, 3)), version=14)
    assert engine.supports(node, "cpu", "inference")
    assert engine.supports(node, "cuda:0", "train")


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        (_node("Relu", TensorType(F32, ("batch", 3))), "every dimension must be known"),
        (_node("Relu", TensorType(F32, None)), "dtype and rank must be known"),
        (_node("Relu", None), "type unknown"),
        (_node("Identity", TensorType(STRING, (2,))), "is string"),
        (_node("Identity", SequenceType(TensorType(F32, (2,)))), "is a sequence"),
        (_node("NonZero", TensorType(F32, (2,)), out=TensorType(np.dtype(np.int64), (1, 2))), "depends on the data"),
        (_node("Reshape", TensorType(F32, (2,)), TensorType(np.dtype(np.int64), (1,))), "must be known at compile"),
        (_node("Concat", TensorType(np.dtype(ml_dtypes.int2), (2,))), "cannot run Concat on int2"),
        (_node("NoSuchOperator", TensorType(F32, (2,))), "no kernel for NoSuchOperator"),
    ],
    ids=lambda x: x.op_type if isinstance(x, Node) else None,
)
def test_supports_refuses_with_the_reason(engine: XlaEngine, node: Node, reason: str) -> None:
    """What XLA cannot do is refused with a sentence that names it."""
    verdict = engine.supports(node, "cpu", "inference")
    assert not verdict
    assert reason in verdict.reason


def test_every_numeric_dtype_can_be_copied(engine: XlaEngine) -> None:
    """Identity gives back every ONNX element type but strings, bit for bit, and Transpose moves it."""
    from xla_functions import compile_nodes

    for dtype in DTYPE_TO_ONNX:
        if dtype == STRING:
            continue
        t = TensorType(dtype, (2, 3))
        x, y, z = Value("x", t), Value("y", t), Value("z", TensorType(dtype, (3, 2)))
        nodes = [Node("Identity", [x], [y], version=14), Node("Transpose", [x], [z], version=13)]
        for node in nodes:
            assert engine.supports(node, "cpu", "inference"), dtype
        array = np.array([[1, 1, 2], [1, 2, 1]], np.float32).astype(dtype)
        same, turned = compile_nodes(engine, [x], nodes, [y, z]).run([array])
        assert np.asarray(same).dtype == dtype
        assert np.asarray(same).tobytes() == array.tobytes()
        assert np.asarray(turned).tobytes() == np.ascontiguousarray(array.T).tobytes()

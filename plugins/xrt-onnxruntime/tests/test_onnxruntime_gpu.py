"""The engine on a GPU, over stand-ins: sessions that refuse what the CUDA provider refuses, and CuPy's."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import xrt_onnxruntime
from onnx.helper import tensor_dtype_to_np_dtype
from xrt_onnxruntime import OnnxRuntimeEngine, _toolkit

from tests.fake_cuda import GPU
from tests.fake_cupy import installed
from tests.random_graphs import F32, graph_of, node
from xrt_core.engine import engines
from xrt_core.engine.contract import CompileOptions, Executable, Function
from xrt_core.errors import CompileError, EngineUnavailableError, ExecutionError, OptionError
from xrt_core.ir.graph import Value
from xrt_core.ir.types import TensorType
from xrt_core.module import XRTModule

_SIGNATURES = {n: inspect.signature(getattr(ort.IOBinding, n)) for n in ("bind_input", "bind_output")}


class Binding:
    """`IOBinding`, by the real one's signatures; addresses are read when it runs."""

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}
        self.made: dict[str, Any] = {}

    def _buffer(self, kind: str, *args: Any) -> tuple[str, np.ndarray]:
        found = _SIGNATURES[kind].bind(self, *args).arguments
        assert found["device_type"] == "cuda"
        assert found["device_id"] == Session.device
        assert type(found["element_type"]) is int
        assert found["buffer_ptr"], "the library would allocate"
        dtype = np.dtype(tensor_dtype_to_np_dtype(found["element_type"]))
        return found["name"], GPU.memory_at(found["buffer_ptr"], found["shape"], dtype.str)

    def bind_input(self, *args: Any) -> None:
        name, memory = self._buffer("bind_input", *args)
        self.given[name] = memory

    def bind_output(self, *args: Any) -> None:
        name, memory = self._buffer("bind_output", *args)
        self.made[name] = memory

    def bind_ortvalue_input(self, name: str, value: Any) -> None:
        assert value.device_name() == "cpu"
        self.given[name] = value.numpy()


class Session:
    """A session on the CPU that says that it is one on a GPU. made: with what providers. starts: whether they do."""

    device = 0
    made: list[Any] = []  # noqa: RUF012
    starts = True
    real = ort.InferenceSession

    def __init__(self, model: bytes, options: Any, providers: Sequence[Any]) -> None:
        self.inner = self.real(model, options, providers=["CPUExecutionProvider"])
        self.names = [p if isinstance(p, str) else p[0] for p in providers]
        if self.names[0] != "CPUExecutionProvider":
            Session.made.append(list(providers))
        self.run = self.inner.run

    def get_providers(self) -> list[str]:
        return self.names if self.starts else self.names[-1:]

    def io_binding(self) -> Binding:
        return Binding()

    def run_with_iobinding(self, binding: Binding) -> None:
        """On a stream of its own: what is not there yet is read as it is."""
        results = self.inner.run(list(binding.made), {n: np.array(x) for n, x in binding.given.items()})
        for memory, r in zip(binding.made.values(), results, strict=True):
            memory[...] = r


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """CuPy's stand-in on two devices, and a build of the library for GPUs."""
    there = ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(ort, "get_available_providers", lambda: there)
    monkeypatch.setattr(ort, "InferenceSession", Session)
    monkeypatch.setattr(ort, "preload_dlls", lambda *a, **k: None, raising=False)
    monkeypatch.setattr(Session, "made", [])
    xrt_onnxruntime._probe.cache_clear()
    engines.refresh()
    with installed(devices=2) as cupy:
        yield cupy
    monkeypatch.undo()
    xrt_onnxruntime._probe.cache_clear()
    engines.refresh()


def _function() -> Function:
    """x + w, x: with the input itself among the results."""
    x, y = Value("x", TensorType(F32, (2, 3))), Value("y", TensorType(F32, (2, 3)))
    w = Value.constant(np.arange(6, dtype=np.float32).reshape(2, 3), "w")
    return Function.from_graph(graph_of([x], [y, x], [node("Add", [x, w], [y])]))


def _compiled(device: str = "cuda:0", **extra: Any) -> Executable:
    f = _function()
    compiler = OnnxRuntimeEngine().compiler(device, CompileOptions(extra=extra))
    return compiler.compile(f, f.params, f.returns, ())


def test_devices(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs where the build has a provider for them and the driver shows some; the CPU always."""
    engine = OnnxRuntimeEngine()
    assert engine.probe().devices == ("cuda:0", "cuda:1", "cpu")
    with pytest.raises(EngineUnavailableError, match="no device 'cuda:2' here; this engine drives cuda:0, cuda:1, cpu"):
        engine.compiler("cuda:2", CompileOptions())
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CPUExecutionProvider"])
    xrt_onnxruntime._probe.cache_clear()
    assert engine.probe().devices == ("cpu",)
    with pytest.raises(EngineUnavailableError, match="no device 'cuda'"):
        engine.compiler("cuda", CompileOptions())


def test_arrays_on_the_device_are_read_in_place(gpu: Any) -> None:
    """Nothing is copied up or down, results own their memory, and what a stream still computes is waited for."""
    executable = _compiled()
    with gpu.cuda.Stream(non_blocking=True):
        x = gpu.asarray(np.ones((2, 3), np.float32)) * 2
        GPU.up = GPU.down = 0
        y, same = executable.run([x])
        assert (GPU.up, GPU.down) == (0, 0)
        assert isinstance(y, gpu.ndarray)
        np.testing.assert_array_equal(y.get(), np.arange(6).reshape(2, 3) + 2)
        np.testing.assert_array_equal(same.get(), np.full((2, 3), 2))
        assert same is not x
        np.testing.assert_array_equal(executable.run([x.T.reshape(3, 2).T])[0].get(), np.arange(6).reshape(2, 3) + 2)
    y, _ = executable.run([np.ones((2, 3), np.float32)])
    assert type(y) is np.ndarray


def test_what_lies_elsewhere(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session of another GPU refuses it, and says which is which."""
    executable = _compiled("cuda:1")
    monkeypatch.setattr(Session, "device", 1)
    with pytest.raises(ExecutionError, match="input 'x' lies on cuda:0, and the session is on cuda:1"):
        executable.run([gpu.ones((2, 3), np.float32)])
    with gpu.cuda.Device(1):
        x = gpu.ones((2, 3), np.float32)
    y, _ = executable.run([x])
    assert y.device.id == 1
    with pytest.raises(ExecutionError, match="input 'x' must be float32"):
        executable.run([gpu.ones((2, 3), np.float64)])


def test_providers_and_their_options(gpu: Any) -> None:
    """TF32 is off unless it is asked for, which declares a tolerance; TensorRT's provider leaves the rest to CUDA's."""
    engine = OnnxRuntimeEngine()
    _compiled("cuda:1", provider_options={"cudnn_conv_algo_search": "HEURISTIC"})
    _compiled(tf32=True)
    _compiled(provider="tensorrt")
    cuda = {"device_id": "0", "use_tf32": "0"}
    assert Session.made == [
        [("CUDAExecutionProvider", {"device_id": "1", "use_tf32": "0", "cudnn_conv_algo_search": "HEURISTIC"}),
         "CPUExecutionProvider"],
        [("CUDAExecutionProvider", {**cuda, "use_tf32": "1"}), "CPUExecutionProvider"],
        [("TensorrtExecutionProvider", {"device_id": "0"}), ("CUDAExecutionProvider", cuda), "CPUExecutionProvider"],
    ]  # fmt: skip
    assert engine.tolerance_with(CompileOptions()) == {}
    for extra in ({"tf32": True}, {"provider": "tensorrt"}):
        declared = engine.tolerance_with(CompileOptions(extra=extra))
        assert "TF32" in declared["float32"].reason
        assert ("float16" in declared) == (extra.get("provider") == "tensorrt")
    with pytest.raises(OptionError, match="'provider' is 'rocm'; it takes cuda, tensorrt"):
        _compiled(provider="rocm")


def test_a_provider_that_does_not_start(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library would compute on the CPU and say so in its log alone: here nothing compiles."""
    monkeypatch.setattr(Session, "starts", False)
    with pytest.raises(CompileError, match="CUDAExecutionProvider does not start: check CUDA and cuDNN"):
        _compiled()


@pytest.mark.tiny_clusters
@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
def test_modules(gpu: Any, device: str) -> None:
    """A caller with CuPy's arrays gets such; on the CPU they are brought down."""
    m = XRTModule(_function().body, engine="onnxruntime", device=device, guard=False, cache="off", prune=False)
    y, _ = m(gpu.asarray(np.ones((2, 3), np.float32)))
    assert isinstance(y, gpu.ndarray)
    np.testing.assert_array_equal(y.get(), np.arange(6).reshape(2, 3) + 1)
    assert not m.explain().errors
    assert bool(Session.made) == (device == "cuda:0")
    assert _toolkit.gpu_providers() == ("cuda", "tensorrt")

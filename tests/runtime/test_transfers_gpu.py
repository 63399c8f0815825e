"""What only a GPU can show of arrays there, streams and launches that run ahead; for each engine that can use it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.random_graphs import F32, graph_of, node
from xrt_core.engine import engines
from xrt_core.errors import EngineError
from xrt_core.ir.graph import Graph, Value
from xrt_core.ir.types import TensorType
from xrt_core.module import XRTModule

pytestmark = pytest.mark.gpu

N = 256
_SPIN = 400_000_000
"""Clock ticks for which the producer keeps the GPU busy: about 0.2 s."""

_FILL = r"""
extern "C" __global__ void fill(float* x, const float* y, int n, long long ticks) {
    long long start = clock64();
    while (clock64() - start < ticks) {}
    for (int i = threadIdx.x; i < n; i += blockDim.x) x[i] = y[i];
}
"""


@pytest.fixture(params=["xla", "tensorrt", "toy"])
def engine(request: pytest.FixtureRequest) -> str:
    """The name of an engine on a real GPU."""
    try:
        status = engines.usable(request.param).probe()
    except EngineError as e:
        pytest.skip(str(e))
    if "simulator" in status.version or "cuda:0" not in status.devices:
        pytest.skip(f"{request.param} sees no GPU: {status.devices}")
    return str(request.param)


def graph() -> Graph:
    """tanh(x @ w) + x."""
    x, h, t, y = (Value(n, TensorType(F32, (N, N))) for n in "xhty")
    w = Value.constant(weights(), "w")
    return graph_of([x], [y], [node("MatMul", [x, w], [h]), node("Tanh", [h], [t]), node("Add", [t, x], [y])])


def weights() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((N, N)).astype(np.float32) / N


def expected(x: np.ndarray) -> np.ndarray:
    return np.tanh(x @ weights()) + x


def numbers(seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((N, N)).astype(np.float32)


def module(engine: str, **options: Any) -> XRTModule:
    return XRTModule(graph(), engine=engine, device="cuda", **options)


def close(got: Any, want: np.ndarray) -> None:
    np.testing.assert_allclose(got, want, rtol=5e-3, atol=5e-3)  # TF32 is what GPUs multiply with unless told


def test_numpy(engine: str) -> None:
    """NumPy in and out, finished; several calls, and none fails."""
    m = module(engine)
    for seed in range(3):
        y = m(numbers(seed))
        assert type(y) is np.ndarray
        close(y, expected(numbers(seed)))
    assert not m.explain().errors


def test_cupy_in_the_order_of_its_stream(engine: str) -> None:
    """A slow producer, the module and a consumer on one stream: nothing waits, and the numbers are right."""
    cupy = pytest.importorskip("cupy")
    m, fill = module(engine), cupy.RawKernel(_FILL, "fill")
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x, source = cupy.zeros((N, N), cupy.float32), cupy.asarray(numbers())
        for _ in range(3):  # compiled, and whatever is set up at first runs
            m(x)
        stream.synchronize()
        fill((1,), (256,), (x, source, np.int32(N * N), np.int64(_SPIN)))
        y = m(x)
        still_running = not stream.done
        z = y * 2
        stream.synchronize()
    assert still_running or engine == "toy"  # CuPy waits for arrays that it reads by the CUDA array interface
    assert isinstance(y, cupy.ndarray)
    close(z.get(), 2 * expected(numbers()))
    assert not m.explain().errors


def test_torch_in_the_order_of_its_stream(engine: str) -> None:
    """The same with tensors; one that wants a gradient goes in as well."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch has no GPU here")
    m, stream = module(engine), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch.zeros((N, N), device="cuda")
        source = torch.from_numpy(numbers()).cuda()
        for _ in range(3):
            m(x)
        stream.synchronize()
        torch.cuda._sleep(_SPIN)
        x.copy_(source)
        y = m(x)
        still_running = not stream.query()
        z = y * 2
        w = m(x.clone().requires_grad_())
        stream.synchronize()
    assert still_running
    assert y.is_cuda
    assert y.device == x.device
    close(z.cpu().numpy(), 2 * expected(numbers()))
    close(w.cpu().numpy(), expected(numbers()))
    assert not m.explain().errors


def test_torch_on_the_default_stream(engine: str) -> None:
    """Where most people work."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch has no GPU here")
    m = module(engine)
    x, source = torch.zeros((N, N), device="cuda"), torch.from_numpy(numbers()).cuda()
    for _ in range(3):
        m(x)
    torch.cuda.synchronize()
    torch.cuda._sleep(_SPIN)
    x.copy_(source)
    y = m(x)
    still_running = not torch.cuda.current_stream().query()
    x.zero_()  # in the order of the stream: after the module has read it
    close(y.cpu().numpy(), expected(numbers()))
    assert still_running
    assert not m.explain().errors


def test_torch_on_the_cpu(engine: str) -> None:
    """Tensors of the CPU come out there, also from a call that has seen tensors of the GPU."""
    torch = pytest.importorskip("torch")
    m = module(engine)
    places = ["cpu", "cuda:0", "cpu"] if torch.cuda.is_available() else ["cpu", "cpu"]
    for place in places:
        y = m(torch.from_numpy(numbers()).to(place))
        assert str(y.device) == place
        close(y.cpu().numpy(), expected(numbers()))


def test_jax(engine: str) -> None:
    """Arrays of JAX come out on the device on which they went in."""
    jax = pytest.importorskip("jax")
    try:
        (device, *_) = jax.devices("gpu")
    except RuntimeError as e:
        pytest.skip(f"jax has no GPU here: {e}")
    m = module(engine)
    for place in (device, jax.devices("cpu")[0], device):
        x = jax.device_put(numbers(), place)
        y = m(x)
        assert isinstance(y, jax.Array)
        assert y.devices() == {place}
        close(np.asarray(y), expected(numbers()))
    assert not m.explain().errors


def test_host_steps_between(engine: str) -> None:
    """What the engine leaves to the host is computed beside it, in the order of the caller's stream."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch has no GPU here")
    x, h, a, y = (Value(n, TensorType(F32, (N, N))) for n in "xhay")
    nodes = [node("MatMul", [x, x], [h]), node("Abs", [h], [a]), node("Neg", [a], [y])]
    m = XRTModule(graph_of([x], [y], nodes), engine=engine, device="cuda", marks={"op:Abs": "host"}, prune=False)
    stream, source = torch.cuda.Stream(), torch.from_numpy(numbers()).cuda()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        given = torch.zeros((N, N), device="cuda")
        for _ in range(3):
            m(given)
        torch.cuda._sleep(_SPIN)
        given.copy_(source)
        found = m(given)
        stream.synchronize()
    want = -np.abs(numbers() @ numbers())
    np.testing.assert_allclose(found.cpu().numpy(), want, atol=0.02 * float(np.abs(want).max()))
    assert not m.explain().errors


def test_threads_on_streams_of_their_own(engine: str) -> None:
    """Each gets the results of its own inputs."""
    import threading

    cupy = pytest.importorskip("cupy")
    m = module(engine)
    m(cupy.asarray(numbers()))
    wrong: list[int] = []

    def work(seed: int) -> None:
        with cupy.cuda.Stream(non_blocking=True) as stream:
            for i in range(20):
                x = numbers(100 * seed + i)
                y = m(cupy.asarray(x))
                got = y.get()
                stream.synchronize()
                if not np.allclose(got, expected(x), rtol=5e-3, atol=5e-3):
                    wrong.append(seed)

    threads = [threading.Thread(target=work, args=(s,)) for s in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    assert not m.explain().errors

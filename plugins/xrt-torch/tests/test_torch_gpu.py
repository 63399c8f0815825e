"""What only a GPU can show of graphs of `torch.compile` there: results, gradients, streams, random numbers, devices."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

import xrt_torch  # noqa: E402
from xrt_torch.backend import xrt as backend  # noqa: E402

from xrt_core.engine import engines  # noqa: E402
from xrt_core.errors import EngineError  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("float32_products", "fresh_graphs"),
]
nn = torch.nn
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture
def float32_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips where there is no GPU; cuDNN multiplies in float32, which is compared with."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture(params=["xla", "tensorrt"])
def engine(request: pytest.FixtureRequest) -> str:
    """The name of an engine on a real GPU."""
    try:
        status = engines.usable(request.param).probe()
    except EngineError as e:
        pytest.skip(str(e))
    if "cuda:0" not in status.devices:
        pytest.skip(f"{request.param} sees no GPU: {status.devices}")
    return str(request.param)


def on_xrt(model: Any, engine: str, **options: Any) -> Any:
    return torch.compile(model, backend=backend, options={"engine": engine, "background": False, **options})


def perceptron(device: str = "cuda") -> Any:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8)).to(device)


def assert_on_xrt(model: Any) -> None:
    found = xrt_torch.graphs(model)
    assert found
    assert all(g.reason is None and g.is_proven for g in found), xrt_torch.explain(model)


def test_results_stay_on_the_gpu(engine: str) -> None:
    """They are eager's, of tensors that are not dense as well."""
    model = perceptron()
    made = on_xrt(model, engine)
    with torch.no_grad():
        for k in range(3):
            x = torch.randn(32, 16, device="cuda").t() * (k + 1)
            y = made(x)
            assert y.device == x.device
            torch.testing.assert_close(y, model(x), **CLOSE)
    assert_on_xrt(model)


def test_a_network_of_convolutions(engine: str) -> None:
    """Convolution, BatchNorm, pooling."""
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    model = nn.Sequential(*layers, nn.Linear(8 * 64, 5)).cuda().eval()
    made = on_xrt(model, engine)
    x = torch.randn(4, 3, 16, 16, device="cuda").contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(made(x), model(x), **CLOSE)
    assert_on_xrt(model)


def test_training_with_dropout_is_eagers(engine: str) -> None:
    """Losses and parameters of steps of AdamW, with the random numbers of eager."""
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, 4)).cuda()
    other = copy.deepcopy(model)
    x = torch.randn(32, 16, device="cuda")
    losses = []
    for m, call in ((model, on_xrt(model, engine)), (other, other)):
        torch.manual_seed(0)
        optimizer = torch.optim.AdamW(m.parameters(), 1e-2)
        losses.append([])
        for _ in range(6):
            optimizer.zero_grad()
            loss = call(x).square().mean()
            loss.backward()
            optimizer.step()
            losses[-1].append(float(loss))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert {g.kind for g in xrt_torch.graphs(model)} == {"forward", "backward"}
    assert_on_xrt(model)


def test_work_on_a_stream_of_the_caller_is_waited_for(engine: str) -> None:
    """An input that a slow kernel still writes on a stream of its own; results that are read there."""
    model = perceptron()
    made = on_xrt(model, engine)
    with torch.no_grad():
        for _ in range(3):
            made(torch.zeros(16, 32, device="cuda"))
        source = torch.randn(16, 32, device="cuda")
        expected = model(source) * 2
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(8):
                x = torch.zeros(16, 32, device="cuda")
                torch.cuda._sleep(50_000_000)
                x.copy_(source)
                y = made(x) * 2
                del x
                torch.testing.assert_close(y, expected, **CLOSE)
    assert_on_xrt(model)


def test_autocast(engine: str) -> None:
    """Products in float16, as eager's."""
    model = perceptron()
    made = on_xrt(model, engine)
    x = torch.randn(16, 32, device="cuda")
    with torch.no_grad(), torch.autocast("cuda", torch.float16):
        for _ in range(3):
            y = made(x)
            assert y.dtype is torch.float16
            torch.testing.assert_close(y, model(x), rtol=2e-2, atol=2e-2)
    assert_on_xrt(model)


def test_what_goes_to_the_cpu_is_torchs(engine: str) -> None:
    """Within a graph; and numbers of the CPU are operands on the GPU."""

    def function(x: Any, s: Any) -> Any:
        y = (x @ x.t() * s).relu()
        return y, y.sum(0).cpu() + 1

    made = torch.compile(function, backend=backend, options={"engine": engine, "background": False})
    x, s = torch.randn(8, 8, device="cuda"), torch.tensor(3.0)
    for _ in range(3):
        for a, b in zip(made(x, s), function(x, s), strict=True):
            assert a.device == b.device
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_sizes_that_vary(engine: str) -> None:
    """One graph of torch for all sizes."""
    model = perceptron()
    made = torch.compile(model, backend=backend, dynamic=True, options={"engine": engine, "background": False})
    with torch.no_grad():
        for n in (4, 7, 12, 4):
            x = torch.randn(n, 32, device="cuda")
            torch.testing.assert_close(made(x), model(x), **CLOSE)


def test_the_second_gpu(engine: str) -> None:
    """A model there is compiled for it."""
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    model = perceptron("cuda:1")
    made = on_xrt(model, engine)
    x = torch.randn(16, 32, device="cuda:1")
    with torch.no_grad():
        for _ in range(3):
            assert made(x).device == x.device
            torch.testing.assert_close(made(x), model(x), **CLOSE)
    assert_on_xrt(model)


def test_a_model_on_two_devices_is_eagers() -> None:
    """As the reason says."""
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    made = torch.compile(lambda x, y: x + y.to(x.device), backend=backend)
    x, y = torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1")
    assert torch.equal(made(x, y), x + 1)

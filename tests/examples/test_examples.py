"""The examples learn what they say they learn."""

from __future__ import annotations

import importlib.util
import pathlib
import subprocess
import sys
from types import ModuleType

import numpy as np
import pytest

import xrt_core as xrt

pytest.importorskip("jax")
load_digits = pytest.importorskip("sklearn.datasets").load_digits
pytestmark = pytest.mark.slow

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def example(name: str) -> ModuleType:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("kind", "share"), [("mlp", 0.95), ("cnn", 0.97)])
def test_digits_are_read(kind: str, share: float) -> None:
    digits = example("digits")
    losses, right = digits.run(kind, digits.STEPS[kind], "xla")
    assert len(losses) == digits.STEPS[kind]
    assert np.mean(losses[-20:]) < 0.1 < losses[0]
    assert right >= share


@pytest.mark.parametrize(
    ("epochs", "least"), [(1, 0.05), pytest.param(30, 0.88, marks=pytest.mark.nightly)], ids=["begins", "learns"]
)
def test_lora(epochs: int, least: float, tmp_path: pathlib.Path) -> None:
    """Adapters learn what the file did not know; merged, they leave its graph, which gives what was trained."""
    found = example("lora").run(tmp_path / "adapted.onnx", epochs=epochs, engine="host")
    assert found["before"] < 0.25
    assert found["after"] > least
    assert found["share"] < 0.1
    assert len((EXAMPLES / "lora.py").read_text().splitlines()) < 100
    adapted = xrt.import_model(tmp_path / "adapted.onnx")
    assert [n.op_type for n in adapted.nodes] == ["MatMul", "Relu", "MatMul", "Relu", "MatMul"]
    digits = load_digits()
    lying = (digits.images.transpose(0, 2, 1)[:, :, ::-1].reshape(-1, 64) / 16).astype(np.float32)
    scores = xrt.XRTModule(adapted, engine="host")(lying)
    assert (scores.argmax(1) == digits.target).mean() > least
    held = np.random.default_rng(0).permutation(len(digits.target))[14 * 64 :]
    np.testing.assert_allclose((scores.argmax(1) == digits.target)[held].mean(), found["after"], atol=0.002)


@pytest.mark.nightly
def test_a_gpt_learns_characters() -> None:
    gpt = example("char_gpt")
    losses, held, model, corpus = gpt.run(gpt.STEPS, "xla")
    assert losses[0] == pytest.approx(np.log(len(corpus.alphabet)), rel=0.05)
    assert held < 2.2
    assert gpt.write(model, corpus, "The ", 20).startswith("The ")


@pytest.mark.nightly
def test_a_gpt_begins_to_learn() -> None:
    gpt = example("char_gpt")
    losses, held, _, _ = gpt.run(60, "xla", length=32, size=8)
    assert held < 3.4 < 4 < losses[0]


def test_host_and_engine_learn_the_same() -> None:
    digits = example("digits")
    host, _ = digits.run("mlp", 20, "host")
    engine, _ = digits.run("mlp", 20, "xla")
    np.testing.assert_allclose(engine, host, rtol=1e-4)


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_integers_that_saturate_do_not_reach_the_caller(engine: str) -> None:
    """With VNNI the library is right as well; without it only the host is."""
    pytest.importorskip(engine)
    command = [sys.executable, str(EXAMPLES / "int8_saturation.py"), "--engine", engine]

    # a process of its own: OpenVINO reports its use out of a forked one, of which JAX warns
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)

    assert done.returncode == 0, done.stderr
    assert "through XRT: off by 0.0%" in done.stdout
    assert ("itself: off by 0.0%" in done.stdout) == ("nothing saturates here" in done.stdout)
    if "nothing saturates here" not in done.stdout:
        assert "answered by the host" in done.stdout


def test_scikit_learn_learns_the_same() -> None:
    """Its own network of the same layers reads as many of the digits, within a hundredth."""
    digits = example("digits")
    _, right = digits.run("mlp", digits.STEPS["mlp"], "host")
    losses, other = digits.by_scikit_learn(digits.STEPS["mlp"])
    assert len(losses) == digits.STEPS["mlp"]
    assert abs(right - other) < 0.01


@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt"])
def test_exports_run_in_onnxruntime(name: str, tmp_path: pathlib.Path) -> None:
    """With a batch of another size than that of the steps."""
    ort = pytest.importorskip("onnxruntime")
    rng = np.random.default_rng(0)
    if name == "gpt":
        graph = example("char_gpt").GPT(20, 8, width=16)
        given, labels = {"tokens": rng.integers(0, 20, (7, 8))}, rng.integers(0, 20, (7, 8))
    else:
        digits = example("digits")
        graph = {"mlp": digits.MLP, "cnn": digits.CNN}[name](rng)
        given, labels = {"image": rng.random((7, 1, 8, 8)).astype(np.float32)}, rng.integers(0, 10, 7)
    t = xrt.training.TrainModule(graph, loss="cross_entropy", optimizer=xrt.optim.Adam(1e-3), engine="host")
    for _ in range(2):
        t.step(**{n: a[:4] for n, a in given.items()}, labels=labels[:4])
    t.export(tmp_path / "m.onnx")
    (found,) = ort.InferenceSession(tmp_path / "m.onnx").run(None, given)
    np.testing.assert_allclose(found, t.predict(**given), rtol=1e-4, atol=1e-5)

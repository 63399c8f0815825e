"""Node tests and development models through `engine="auto", guard=True`: right results, and no right engine condemned.

Where the point is the verdict, the guard works at the first call and in this process (`guard_async`, `guard_sandbox`
off); a sample goes the whole way, beside the caller and in a child. `benchmarks/inference.py` has every model, and
the speed.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import pytest

from tests.conformance import dev_models
from tests.conformance.host_results import model_on_host
from tests.conformance.node_tests import Runner, _normalize_tensor, node_tests
from tests.conformance.test_onnx_nodes import expected_failures
from xrt_core.module import XRTModule
from xrt_core.onnx_backend import XRTBackend

for _engine in ("onnxruntime", "openvino", "xla"):
    pytest.importorskip(f"xrt_{_engine}", reason=f"the engine {_engine} is not installed")
for _library in ("jax", "onnxruntime", "openvino"):
    pytest.importorskip(_library, reason="an engine's library is not installed")

pytestmark = pytest.mark.slow

AT_ONCE: Final[Mapping[str, Any]] = MappingProxyType(
    {"engine": "auto", "guard": True, "guard_async": False, "guard_sandbox": False, "cache": False}
)
_NIGHTLY, _DAY = 10, 50  # by night, one node test of ten; fewer by day
_MODELS: Final = (
    "silero_vad_sequence",
    "silero_vad",
    "ppocr_cls",
    pytest.param("minilm_int8", marks=pytest.mark.nightly),
    pytest.param("light_shufflenet", marks=pytest.mark.nightly),
)


def _node_cases() -> list[Any]:
    names = sorted(node_tests().keys() - expected_failures().keys())
    return [
        pytest.param(n, marks=pytest.mark.nightly if i % _DAY else ()) for i, n in enumerate(names) if i % _NIGHTLY == 0
    ]


@pytest.mark.parametrize("name", _node_cases())
def test_a_node_test_passes(name: str) -> None:
    """Whoever is chosen gives what ONNX expects, and no engine is found wrong: they pass these tests by themselves."""
    test = node_tests()[name]
    prepared = XRTBackend.prepare(test.model, **AT_ONCE)
    for inputs, expected in test.data_sets:
        for _ in range(2):
            results = prepared.run([_normalize_tensor(x) for x in inputs])
            with np.errstate(all="ignore"):
                wanted = [_normalize_tensor(x) for x in expected]
                Runner.assert_similar_outputs(wanted, list(results), rtol=test.rtol, atol=test.atol)
    for c in prepared.module.report().clusters:
        assert c["outcome"]["errors"] == []
        assert c["outcome"]["verdict"] in ("ready", "slower")


def _check(name: str, results: Mapping[str, Any]) -> None:
    tolerance = dev_models.MODELS[name][3] if name in dev_models.MODELS else 1e-3
    for label, want in model_on_host(name)[2].items():
        got = results[label]
        assert (got.dtype, got.shape) == (want.dtype, want.shape), label
        scale = max(float(np.ptp(want)), float(np.abs(want).max()), 1e-12)
        assert float(np.abs(got.astype(np.float64) - want).max()) <= tolerance * scale, label


@pytest.mark.parametrize("name", _MODELS)
def test_a_model_is_right(name: str) -> None:
    """All engines are found right and timed, and the one that was chosen gives the host's results."""
    graph, inputs, _ = model_on_host(name)
    module = XRTModule(graph, **AT_ONCE)
    for _ in range(3):
        _check(name, module.run(inputs))
    report = module.report()
    assert report.accelerated_share > 0
    assert sum(c["nodes"] for c in report.clusters) >= 20
    for c in report.clusters:
        outcome = c["outcome"]
        assert c["state"] == "live" or outcome["verdict"] == "slower", c["reason"]
        assert outcome["errors"] == []
        assert {"xla", "onnxruntime", "openvino", "host"} <= set(outcome["timings"])
        if c["state"] == "live":  # who was at least twice as fast as another was chosen over it
            times = {label: s for label, s in outcome["timings"].items() if label != "host"}
            assert times[outcome["reason"].split(":")[0]] < 2 * min(times.values())


@pytest.mark.parametrize("name", ["silero_vad_sequence", pytest.param("ppocr_cls", marks=pytest.mark.nightly)])
def test_a_model_goes_the_whole_way(name: str, tmp_path: pathlib.Path) -> None:
    """The host answers until a child has examined all engines; the next module has the verdict from the disk."""
    graph, inputs, _ = model_on_host(name)
    with XRTModule(graph, engine="auto", guard=True, cache_dir=str(tmp_path)) as module:
        _check(name, module.run(inputs))
        assert module.wait(300)
        _check(name, module.run(inputs))
        (cluster,) = module.report().clusters
        assert (cluster["state"], cluster["host_calls"], cluster["calls"]) == ("live", 1, 2), cluster["reason"]

    with XRTModule(graph, engine="auto", guard=True, cache_dir=str(tmp_path)) as again:
        again.run(inputs)
        assert again.wait(60)
        _check(name, again.run(inputs))
        (known,) = again.report().clusters
        assert (known["chosen"], known["reason"]) == (cluster["chosen"], cluster["reason"])

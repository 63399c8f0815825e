"""Spans and metrics of OpenTelemetry, read from its own in-memory exporters."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("opentelemetry.semconv")

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from xrt_distributed.otel import instrument, observe

import xrt_core as xrt
from xrt_core import ops
from xrt_core.engine import engines
from xrt_core.events import EventLog
from xrt_core.testing.faults import RaisesAtRun
from xrt_core.testing.host_engine import HostEngine

X = np.ones((4, 4), np.float32)


class Sink:
    """Providers whose spans and metrics can be read."""

    def __init__(self) -> None:
        self._spans, self._reader = InMemorySpanExporter(), InMemoryMetricReader()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self._spans))
        self.meters = MeterProvider([self._reader])

    @property
    def spans(self) -> dict[str, Any]:
        return {s.name: s for s in self._spans.get_finished_spans()}

    def metrics(self) -> dict[str, list[Any]]:
        data = self._reader.get_metrics_data()
        found = [m for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics] if data else []
        return {m.name: list(m.data.data_points) for m in found}


def test_spans_and_metrics() -> None:
    """A call's events are within its span; a failure is an error by its standard names; metrics count and time."""
    sink = Sink()
    stop = instrument(sink.tracers, sink.meters)
    engines.register(RaisesAtRun)
    try:
        with sink.tracers.get_tracer("test").start_as_current_span("request") as request:
            m = xrt.XRTModule(
                lambda x: ops.Tanh(x @ x), engine="raises_at_run", guard_async=False, guard_sandbox=False, cache="off",
                guard_verify=False, guard_tune=False, prune=False,
            )  # fmt: skip
            np.testing.assert_allclose(m(X), np.tanh(X @ X), rtol=1e-6)
        rows = sink.metrics()
    finally:
        stop()
        engines.unregister(RaisesAtRun.name)
    specialised = sink.spans["xrt.specialised"]
    assert specialised.parent.span_id == request.get_span_context().span_id
    assert specialised.end_time - specialised.start_time > 0
    assert "xrt.result" in specialised.attributes
    failed = [e for e in sink.spans["request"].events if e.name == "xrt.fallback"]
    failed += [s for n, s in sink.spans.items() if n == "xrt.fallback"]
    assert failed[0].attributes["error.type"] == "raised"
    assert "fallen off the bus" in failed[0].attributes["exception.message"]
    assert not any(n.startswith("xrt.progress") for n in sink.spans)
    (fallbacks,) = rows["xrt.fallbacks"]
    assert dict(fallbacks.attributes) == {"xrt.engine": "raises_at_run", "xrt.stage": "run", "error.type": "raised"}
    assert fallbacks.value == 1
    assert rows["xrt.specialise.duration"][0].count == 1


class Fine(HostEngine):
    """An engine that is right."""

    name = "fine"


def test_counters_of_a_module() -> None:
    """What the guard counts of a module's clusters can be read while the module is there."""
    sink = Sink()
    engines.register(Fine)
    try:
        m = xrt.XRTModule(
            lambda x: ops.Tanh(x @ x), engine="fine", guard=True, guard_async=False, guard_sandbox=False,
            guard_tune=False, cache="off", prune=False,
        )
        m(X)
        observe(m, "model", sink.meters)
        m(X)
        rows = sink.metrics()
    finally:
        engines.unregister(Fine.name)
    (calls,) = rows["xrt.cluster.calls"]
    assert calls.value == 2
    assert calls.attributes["xrt.model"] == "model"
    assert calls.attributes["xrt.engine"] == "fine"
    assert rows["xrt.cluster.failures"][0].value == 0
    m.close()
    del m
    gc.collect()
    assert "xrt.cluster.calls" not in sink.metrics()


def test_without_a_span_around(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fallback in the background is a span with the status "error", of the trace that TRACEPARENT names."""
    monkeypatch.setenv("TRACEPARENT", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    sink, log = Sink(), EventLog()
    stop = instrument(sink.tracers, sink.meters)

    def work() -> None:
        log.fallback(cluster="c", engine="e", stage="compile", kind="hung", error="slow")
        log.emit("cache.hit", engine="e")
        log.emit("guard.live", seconds=2.0, cluster="c", chosen="e", reason="r", timings={"e": 0.1, "host": 0.3})
        log.emit("rollout.compared", engine="e", is_right=True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    stop()
    log.emit("guard.live", seconds=2.0, cluster="c", chosen="e")
    span = sink.spans["xrt.fallback"]
    assert span.status.status_code is StatusCode.ERROR
    assert f"{span.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert span.attributes["xrt.rank"] == 1
    assert set(sink.spans) == {"xrt.fallback", "xrt.guard.live"}
    rows = sink.metrics()
    assert rows["xrt.cache.lookups"][0].attributes["xrt.cache.result"] == "hit"
    assert rows["xrt.cluster.build.duration"][0].sum == 2.0
    assert abs(rows["xrt.cluster.speedup"][0].sum - 3.0) < 1e-9
    assert rows["xrt.rollout.comparisons"][0].value == 1


@pytest.mark.slow
def test_by_a_variable(environment: dict[str, str]) -> None:
    """XRT_DISTRIBUTED_OTEL=1 hands events to the global providers, whenever these were set."""
    program = (
        "import json, numpy as np, xrt_core as xrt\nfrom xrt_core import ops\nfrom opentelemetry import trace\n"
        "from opentelemetry.sdk.trace import TracerProvider\n"
        "from opentelemetry.sdk.trace.export import SimpleSpanProcessor\n"
        "from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter\n"
        "m = xrt.XRTModule(lambda x: ops.Tanh(x), engine='host')\n"
        "sink, made = InMemorySpanExporter(), TracerProvider()\n"
        "made.add_span_processor(SimpleSpanProcessor(sink))\ntrace.set_tracer_provider(made)\n"
        "m(np.ones(4, np.float32))\nprint(json.dumps([s.name for s in sink.get_finished_spans()]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={**environment, "XRT_DISTRIBUTED_OTEL": "1"}, capture_output=True,
        text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "xrt.specialised" in json.loads(done.stdout)

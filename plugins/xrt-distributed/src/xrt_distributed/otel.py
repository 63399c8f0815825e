"""XRT's events as spans and metrics of OpenTelemetry: `pip install xrt-distributed[otel]`.

Names follow OpenTelemetry's semantic conventions (https://opentelemetry.io/docs/specs/semconv/): `error.type` and
`exception.message` of failures, durations as histograms in seconds with the suffix `.duration`, and what has no
standard name under `xrt.`. Exporters, samplers and the resource (`service.name`) are the program's, by its providers.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final

from opentelemetry import metrics, trace
from opentelemetry.context import Context
from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation
from opentelemetry.semconv.attributes.error_attributes import ERROR_TYPE
from opentelemetry.semconv.attributes.exception_attributes import EXCEPTION_MESSAGE
from opentelemetry.trace import Status, StatusCode, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from xrt_core import FallbackEvent, XRTModule, subscribe
from xrt_core.events import Event

SCOPE: Final = "xrt"
"""The instrumentation scope of all spans and metrics."""
_PLAIN: Final = (bool, int, float, str)
_LOOKUPS: Final = {"cache.hit": "hit", "cache.miss": "miss", "cache.fetched": "fetched"}
_COUNTERS: Final = {
    "calls": "Calls of clusters.",
    "host_calls": "Calls of clusters that the host answered.",
    "shadow_runs": "Calls of clusters that were compared with the host.",
    "failures": "Failures of clusters.",
}


class Instrumentation:
    """Hands events on. A timed event is a span, one without a duration an event of the span around it; a fallback to
    the host is a span with the status "error" where there is none around it.

    Spans without one around them, as those of the background, belong to the trace that TRACEPARENT names, if it does.
    """

    def __init__(
        self, tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None
    ) -> None:
        self._tracer = trace.get_tracer(SCOPE, tracer_provider=tracer_provider)
        meter = metrics.get_meter(SCOPE, meter_provider=meter_provider)
        self._specialise = meter.create_histogram(
            "xrt.specialise.duration", "s", "Time to specialise, partition and plan a signature."
        )
        self._build = meter.create_histogram(
            "xrt.cluster.build.duration", "s", "Time until a cluster was compiled, verified and timed."
        )
        self._speedup = meter.create_histogram(
            "xrt.cluster.speedup", "1", "Time of the host over that of what runs a cluster, as the guard measured them."
        )
        self._fallbacks = meter.create_counter("xrt.fallbacks", "{fallback}", "Clusters that fell back to the host.")
        self._lookups = meter.create_counter("xrt.cache.lookups", "{lookup}", "Look-ups of executables, by result.")
        self._compared = meter.create_counter(
            "xrt.rollout.comparisons", "{comparison}", "Results of a new engine that were compared with the proven."
        )

    def hear(self, event: Event) -> None:
        """Take an event."""
        if event.name.startswith("progress."):
            return
        self._measure(event)
        around = trace.get_current_span()
        attributes = _attributes(event)
        if event.seconds is None and around.is_recording():
            around.add_event(f"xrt.{event.name}", attributes, int(event.time * 1e9))
            return
        if event.seconds is None and not isinstance(event, FallbackEvent):
            return
        end = int(event.time * 1e9)
        span = self._tracer.start_span(
            f"xrt.{event.name}", None if around.get_span_context().is_valid else _from_parent(),
            attributes=attributes, start_time=end - int((event.seconds or 0.0) * 1e9),
        )  # fmt: skip
        if isinstance(event, FallbackEvent):
            span.set_status(Status(StatusCode.ERROR, f"{event.engine}: {event.kind} at {event.stage}"))
        span.end(end)

    def _measure(self, event: Event) -> None:
        fields = event.fields
        if isinstance(event, FallbackEvent):
            own = {"xrt.engine": event.engine, "xrt.stage": event.stage, ERROR_TYPE: event.kind}
            self._fallbacks.add(1, own)
        elif event.name == "specialised":
            self._specialise.record(event.seconds or 0.0, {"xrt.model": str(fields["model"])})
        elif event.name in _LOOKUPS:
            self._lookups.add(1, {"xrt.cache.result": _LOOKUPS[event.name]})
        elif event.name == "guard.live":
            own = {"xrt.engine": str(fields["chosen"])}
            self._build.record(event.seconds or 0.0, own)
            timings = fields.get("timings", {})
            engine, host = timings.get(fields["chosen"]), timings.get("host")
            if engine and host:
                self._speedup.record(host / engine, own)
        elif event.name == "rollout.compared":
            right = bool(fields["is_right"])
            self._compared.add(1, {"xrt.engine": str(fields["engine"]), "xrt.rollout.is_right": right})


def instrument(
    tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None
) -> Callable[[], None]:
    """Hand all events of this process to OpenTelemetry, by these providers or the global ones; returns what ends that.

    The variable XRT_DISTRIBUTED_OTEL=1 does so without a call, once the first module is made.
    """
    return subscribe(Instrumentation(tracer_provider, meter_provider).hear)


def observe(module: XRTModule, name: str, meter_provider: MeterProvider | None = None) -> None:
    """Offer the counters of a guarded module's clusters: `xrt.cluster.calls`, `.host_calls`, `.shadow_runs`,
    `.failures`, with the attributes `xrt.model` (name), `xrt.cluster` and `xrt.engine`, until the module is gone.
    """
    meter, known = metrics.get_meter(SCOPE, meter_provider=meter_provider), weakref.ref(module)

    def reader(key: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def read(options: CallbackOptions) -> Iterable[Observation]:
            found = known()
            for c in () if found is None else found.report().clusters:
                count = sum(row["count"] for row in c["fault_counts"]) if key == "failures" else c[key]
                yield Observation(
                    count, {"xrt.model": name, "xrt.cluster": f"{c['name']}/{c['number']}", "xrt.engine": c["engine"]}
                )

        return read

    for key, text in _COUNTERS.items():
        meter.create_observable_counter(f"xrt.cluster.{key}", [reader(key)], f"{{{key.removesuffix('s')}}}", text)


def _attributes(event: Event) -> dict[str, str | bool | int | float]:
    """The fields of an event by their standard names, or under `xrt.`; what is no number is text."""
    found = {f"xrt.{n}": v if isinstance(v, _PLAIN) else str(v) for n, v in event.fields.items()}
    if isinstance(event, FallbackEvent):
        found[ERROR_TYPE] = str(found.pop("xrt.kind"))
        found[EXCEPTION_MESSAGE] = str(found.pop("xrt.error"))
    if os.environ.get("WORLD_SIZE", "1") != "1":
        found["xrt.rank"] = int(os.environ.get("RANK", "0"))
    return found


def _from_parent() -> Context | None:
    """The trace that the environment names (W3C Trace Context in TRACEPARENT and TRACESTATE), or None."""
    names = ("traceparent", "tracestate")
    carrier: dict[str, Any] = {n: os.environ[n.upper()] for n in names if n.upper() in os.environ}
    return TraceContextTextMapPropagator().extract(carrier) if carrier else None

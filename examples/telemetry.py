"""XRT's events as spans of OpenTelemetry: what is timed becomes a span, what is not, an event of the span around it.

    python examples/telemetry.py        # needs opentelemetry-sdk; prints the spans

A program sets up its own exporter; `listen(tracer)` is all that XRT needs. Compilation in the background has spans of
its own; those of a call are children of the span in which the program made it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
from opentelemetry.trace import Status, StatusCode, Tracer

import xrt_core as xrt
from xrt_core.events import Event


def attributes(event: Event) -> dict[str, str | int | float | bool]:
    """The fields of an event as attributes; what is no number is text."""
    plain = (bool, int, float, str)
    return {f"xrt.{name}": v if isinstance(v, plain) else str(v) for name, v in event.fields.items()}


def listen(tracer: Tracer) -> Callable[[], None]:
    """Hand every event to `tracer`; returns a function that stops it. A fallback to the host is an error."""

    def hear(event: Event) -> None:
        around = trace.get_current_span()
        if event.seconds is None and around.is_recording():
            around.add_event(f"xrt.{event.name}", attributes(event), int(event.time * 1e9))
            return
        end = int(event.time * 1e9)
        begun = end - int((event.seconds or 0.0) * 1e9)
        span = tracer.start_span(f"xrt.{event.name}", start_time=begun, attributes=attributes(event))
        if isinstance(event, xrt.FallbackEvent):
            span.set_status(Status(StatusCode.ERROR, f"{event.engine}: {event.kind} at {event.stage}"))
        span.end(end)

    return xrt.subscribe(hear)


def main() -> None:
    """Two calls of a small graph, with their spans on the terminal."""
    provider = TracerProvider()
    provider.add_span_processor(
        SimpleSpanProcessor(ConsoleSpanExporter(formatter=lambda span: f"{span.name} {dict(span.attributes or {})}\n"))
    )
    tracer = provider.get_tracer("xrt-example")
    stop = listen(tracer)
    with xrt.XRTModule(lambda x: xrt.ops.Tanh(x @ x)) as m:
        for _ in range(2):
            with tracer.start_as_current_span("request"):
                m(np.ones((64, 64), np.float32))
            m.wait()
    stop()
    provider.shutdown()


if __name__ == "__main__":
    main()

"""Event log: named events with timings, logged through `logging` (logger "xrt") and stored in a ring buffer.

Each `XRTModule` has its own `EventLog`; `process_events` has the events of no module (such as plugin loading).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal

from xrt_core.errors import RegistrationError, printable

logger: Final = logging.getLogger("xrt")


@dataclass(frozen=True, slots=True)
class Event:
    """A logged event.

    name: dotted, such as "compile.done". time: seconds since the epoch. seconds: the duration, None for an instant
    event. fields: further data, by name.
    """

    name: str
    time: float
    seconds: float | None
    fields: Mapping[str, Any]

    def __str__(self) -> str:
        took = "" if self.seconds is None else f" in {self.seconds * 1e3:.1f} ms"
        return printable(self.name + took + "".join(f" {k}={v}" for k, v in self.fields.items()))


Kind = Literal[
    "raised", "hung", "crashed", "memory", "wrong count", "wrong shape", "wrong dtype", "wrong numbers", "side effect",
    "slower", "unusable", "closed",
]  # fmt: skip
"""The kind of failure that caused a fallback to the host: `FallbackEvent.kind`."""


@dataclass(frozen=True, slots=True)
class FallbackEvent(Event):
    """An engine failed and the host ran the cluster instead: the event "fallback".

    In addition to the properties, `fields` has `exit_code` and `log` (its tail) of a worker process that died, and
    `bundle`, the path of a repro bundle, if one was written.
    """

    @property
    def cluster(self) -> str:
        """The name of the cluster, or of the graph if the failure concerns no single cluster."""
        return str(self.fields["cluster"])

    @property
    def engine(self) -> str:
        """The name of the engine."""
        return str(self.fields["engine"])

    @property
    def stage(self) -> str:
        """The operation that failed: probe, supports, plan, compile, examine, load, run or shadow."""
        return str(self.fields["stage"])

    @property
    def kind(self) -> Kind:
        """The kind of failure."""
        found: Kind = self.fields["kind"]
        return found

    @property
    def error(self) -> str:
        """The error message, human-readable."""
        return str(self.fields["error"])


Listener = Callable[[Event], None]
_listeners: list[Listener] = []


def subscribe(listener: Listener) -> Callable[[], None]:
    """Call `listener` with every event of every log, in the emitting thread. Returns a function that unsubscribes.

    Raises RegistrationError if `listener` is not callable.
    """
    if not callable(listener):
        raise RegistrationError(f"subscribe takes a function of an event, not {listener!r}")
    _listeners.append(listener)

    def undo() -> None:
        if listener in _listeners:
            _listeners.remove(listener)

    return undo


def _tell(event: Event) -> None:
    for listener in tuple(_listeners):
        try:
            listener(event)
        except Exception:
            logger.exception("a listener failed on %s", event)


class EventLog:
    """A ring buffer of the latest events. Emitting costs about a microsecond and is thread-safe.

    heard: the listeners of every log; empty where nobody listens. most: the highest level at which events are logged:
    what goes wrong with something that is only tried warns nobody. silent: events are kept, not logged, and no listener
    hears them.
    """

    heard: ClassVar[Sequence[Listener]] = _listeners

    __slots__ = ("_ring", "most", "silent")

    def __init__(self, size: int = 256, most: int = logging.CRITICAL, *, silent: bool = False) -> None:
        self._ring: deque[Event] = deque(maxlen=size)
        self.most = most
        self.silent = silent

    def emit(self, name: str, *, level: int = logging.DEBUG, seconds: float | None = None, **fields: Any) -> Event:
        """Record an event, log it at `level`, and call the listeners; an exception of a listener is logged only."""
        event = Event(name, time.time(), seconds, MappingProxyType(fields))
        self._notify(event, level)
        return event

    @staticmethod
    def is_observed(level: int) -> bool:
        """Whether an event of this level is logged or heard by a listener; if not, costly fields can be left out."""
        return bool(_listeners) or logger.isEnabledFor(level)

    def fallback(
        self,
        *,
        cluster: str,
        engine: str,
        stage: str,
        kind: Kind,
        error: str,
        level: int = logging.WARNING,
        **more: Any,
    ) -> FallbackEvent:
        """Record a fallback of an engine to the host. more: further fields. Otherwise as `emit`."""
        fields = {"cluster": cluster, "engine": engine, "stage": stage, "kind": kind, "error": error, **more}
        event = FallbackEvent("fallback", time.time(), None, MappingProxyType(fields))
        self._notify(event, level)
        return event

    @staticmethod
    def progress(name: str, **fields: Any) -> None:
        """Tell listeners what begins, or what is waited for: an event "progress.<name>". It is neither kept nor logged,
        and not made where nobody listens."""
        if _listeners:
            _tell(Event(f"progress.{name}", time.time(), None, MappingProxyType(fields)))

    def _notify(self, event: Event, level: int) -> None:
        self._ring.append(event)
        if self.silent:
            return
        logger.log(min(level, self.most), "%s", event)
        _tell(event)

    @contextmanager
    def span(self, name: str, *, level: int = logging.DEBUG, **fields: Any) -> Iterator[dict[str, Any]]:
        """Time the body and emit one event at its end; the body may add fields to the yielded dict. Listeners hear of
        the beginning as well (`progress`).

        If the body raises, the event has the field `error`, and the exception propagates.
        """
        if _listeners:
            _tell(Event(f"progress.{name}", time.time(), None, MappingProxyType(dict(fields))))
        start = time.perf_counter()
        try:
            yield fields
        except BaseException as e:
            fields["error"] = f"{type(e).__name__}: {e}"
            raise
        finally:
            self.emit(name, level=level, seconds=time.perf_counter() - start, **fields)

    def recent(self, prefix: str = "") -> list[Event]:
        """Return the stored events whose name begins with `prefix`, oldest first."""
        return [e for e in self._ring.copy() if e.name.startswith(prefix)]

    def __len__(self) -> int:
        return len(self._ring)

    def __iter__(self) -> Iterator[Event]:
        return iter(self._ring.copy())


process_events: Final = EventLog()
"""The log of events that belong to no module."""

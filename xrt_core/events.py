"""What happened: named events with timings, logged through `logging` (logger "xrt") and kept in a short memory.

Each `XRTModule` has an `EventLog` of its own; `process_events` is the one for what belongs to no module (plugins).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from xrt_core.errors import RegistrationError

logger: Final = logging.getLogger("xrt")


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened.

    name: dotted, such as "compile.done". time: seconds since the epoch. seconds: how long it took, None for a moment.
    fields: the rest, by name.
    """

    name: str
    time: float
    seconds: float | None
    fields: Mapping[str, Any]

    def __str__(self) -> str:
        took = "" if self.seconds is None else f" in {self.seconds * 1e3:.1f} ms"
        return self.name + took + "".join(f" {k}={v}" for k, v in self.fields.items())


Listener = Callable[[Event], None]
_listeners: list[Listener] = []


def subscribe(listener: Listener) -> Callable[[], None]:
    """Have every event of every log passed to `listener`, in the thread that emits it. Returns the way to undo it.

    Raises RegistrationError for what is no function.
    """
    if not callable(listener):
        raise RegistrationError(f"subscribe takes a function of an event, not {listener!r}")
    _listeners.append(listener)

    def undo() -> None:
        if listener in _listeners:
            _listeners.remove(listener)

    return undo


class EventLog:
    """A ring of the latest events. Emitting costs about a microsecond and is safe from many threads."""

    __slots__ = ("_ring",)

    def __init__(self, size: int = 256) -> None:
        self._ring: deque[Event] = deque(maxlen=size)

    def emit(self, name: str, *, level: int = logging.DEBUG, seconds: float | None = None, **fields: Any) -> Event:
        """Record an event, log it at `level`, and tell the listeners; one that raises is logged and changes nothing."""
        event = Event(name, time.time(), seconds, MappingProxyType(fields))
        self._ring.append(event)
        logger.log(level, "%s", event)
        for listener in tuple(_listeners):
            try:
                listener(event)
            except Exception:
                logger.exception("a listener failed on %s", event)
        return event

    @contextmanager
    def span(self, name: str, *, level: int = logging.DEBUG, **fields: Any) -> Iterator[dict[str, Any]]:
        """Time the body and emit one event at its end; the body may add fields to the dict it gets.

        A body that raises is recorded with the field `error`, and the exception goes on.
        """
        start = time.perf_counter()
        try:
            yield fields
        except BaseException as e:
            fields["error"] = f"{type(e).__name__}: {e}"
            raise
        finally:
            self.emit(name, level=level, seconds=time.perf_counter() - start, **fields)

    def recent(self, prefix: str = "") -> list[Event]:
        """The kept events whose name begins with `prefix`, oldest first."""
        return [e for e in self._ring.copy() if e.name.startswith(prefix)]

    def __len__(self) -> int:
        return len(self._ring)

    def __iter__(self) -> Iterator[Event]:
        return iter(self._ring.copy())


process_events: Final = EventLog()
"""Events that belong to no module."""

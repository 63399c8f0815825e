"""Desk: lets another thread have jobs done by the child process of a thread of the pool."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from xrt_core.guard.leaving import outside_library
from xrt_core.guard.limits import TooLong
from xrt_core.guard.pool import Slot, WorkerFailure

_LOOK: Final = 1.0  # seconds between looks at whether anybody serves any more


class _Request(NamedTuple):
    arguments: tuple[Any, ...]
    reply: queue.SimpleQueue[tuple[dict[str, Any] | None, WorkerFailure | None]]


class _Done(NamedTuple):
    error: BaseException | None


class Desk:
    """The thread of the pool serves; the one that it watches asks. A child is started by the former alone, since the
    system ends a child with the thread that started it (see `worker`)."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._inbox: queue.SimpleQueue[_Request | _Done] = queue.SimpleQueue()
        self._closed = False

    def run(
        self, request: Mapping[str, Any], timeout: float, memory: int, stage: Callable[[str], None]
    ) -> dict[str, Any]:
        """See `Slot.run`; for the thread that is served. Raises WorkerFailure, also where nobody serves any more."""
        reply: queue.SimpleQueue[tuple[dict[str, Any] | None, WorkerFailure | None]] = queue.SimpleQueue()
        self._inbox.put(_Request((request, timeout, memory, stage), reply))
        with outside_library():
            while True:
                try:
                    answer, failure = reply.get(timeout=_LOOK)
                    break
                except queue.Empty:
                    if self._closed:
                        raise WorkerFailure("closed", "it was given up") from None
        if failure is not None:
            raise failure
        assert answer is not None
        return answer

    def serve(self, seconds: float, call: Callable[[], None]) -> None:
        """Run `call` in a thread of its own and serve it until it ends; raises what it raises.

        Raises TooLong after `seconds` of which it did not wait for the child; the thread is left then.
        """

        def watched() -> None:
            try:
                call()
                self._inbox.put(_Done(None))
            except BaseException as e:
                self._inbox.put(_Done(e))

        threading.Thread(target=watched, name="xrt-planning", daemon=True).start()
        left = seconds
        try:
            while True:
                start = time.monotonic()
                try:
                    item = self._inbox.get(timeout=max(left, 0.0))
                except queue.Empty:
                    raise TooLong(f"it did not come back within {seconds:g} s") from None
                left -= time.monotonic() - start
                if isinstance(item, _Done):
                    if item.error is not None:
                        raise item.error
                    return
                try:
                    item.reply.put((self._slot.run(*item.arguments), None))
                except WorkerFailure as e:
                    item.reply.put((None, e))
        finally:
            self._closed = True

"""One file at a time, written by a thread beside the training."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Writer:
    """Runs writes one after another in a thread; the program ends when the last is done.

    At most one is on its way: the next waits for it, so that no more than one copy of a state is held.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None

    def start(self, write: Callable[[], None]) -> None:
        """Begin a write, after the one before. Raises what that one raised; then nothing begins."""
        self.wait()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="xrt-checkpoint")
        self._last = self._pool.submit(write)

    def wait(self) -> None:
        """Wait for the last write. Raises what it raised, once."""
        last, self._last = self._last, None
        if last is not None:
            try:
                last.result()
            except BaseException:
                if not last.done():  # what was raised is an interrupt of the waiting
                    self._last = last
                raise

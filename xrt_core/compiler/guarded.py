"""GuardedModule: what every module has whose clusters may be under guard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from xrt_core.compiler.pipeline import Pipeline

if TYPE_CHECKING:
    from xrt_core.guard.report import GuardReport


class GuardedModule:
    """Waits for the guard, reports what it did, and ends it. Subclasses set `_pipeline`."""

    _pipeline: Pipeline

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until background compilation is done: every plan with engines is made, and every cluster is live, or
        was given to the host.

        Returns False after `timeout` seconds; True at once where nothing is guarded.
        """
        return self._pipeline.wait(timeout)

    def report(self) -> GuardReport:
        """What the guard did with every cluster, with timings, failures and totals; empty where it is off."""
        return self._pipeline.report()

    def close(self) -> None:
        """Start no background compilation any more, and end what runs, without waiting. Calls go on as they are.

        Leaving the interpreter does the same. `with` closes the module at its end.
        """
        self._pipeline.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

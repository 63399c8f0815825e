"""GuardedModule: base class of modules whose clusters may be guarded: wait, report, close."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from xrt_core.compiler.pipeline import Pipeline
    from xrt_core.guard.record import GuardReport


class GuardedModule:
    """Waits for the guard, reports its verdicts, and shuts it down. Subclasses set `_pipeline`."""

    _pipeline: Pipeline

    def wait(self, timeout: float | None = None) -> bool:
        """Block until background compilation is done: every tier-up is complete, and every cluster has a verdict (runs
        on its engine, or falls back to the host). First results that the background judges are judged by then.

        Returns False after `timeout` seconds; True immediately if nothing is guarded.
        """
        return self._pipeline.wait(timeout)

    def report(self) -> GuardReport:
        """Return the guard's verdict on every cluster, with timings, failures and totals; empty if it is off."""
        return self._pipeline.report()

    def close(self) -> None:
        """Cancel background compilation, without waiting; no further one starts. Calls keep their current plans.

        Interpreter shutdown does the same. A `with` block closes the module at its end.
        """
        self._pipeline.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

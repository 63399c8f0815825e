"""Launch: one cluster at run time, its executable and the host behind it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from xrt_core.engine.contract import Executable, Function
from xrt_core.errors import EngineError
from xrt_core.runtime.arrays import to_numpy

log = logging.getLogger("xrt")

_MAX_FAILURES = 3

HostRun = Callable[[Sequence[Any]], Sequence[Any]]


class Launch:
    """Runs one Function on its engine; where the engine fails, on the host, so that the caller gets a result.

    function, engine: what runs where. executable: None when compilation failed, `error` then says why.
    host: makes the function that runs the same nodes on the host (called at the first failure).
    After three failures in a row the executable is given up and the host keeps the cluster.
    """

    __slots__ = ("engine", "error", "executable", "failures", "function", "_host", "_host_run", "_lock")

    def __init__(
        self,
        function: Function,
        engine: str,
        executable: Executable | None,
        host: Callable[[], HostRun],
        error: EngineError | None = None,
    ) -> None:
        self.function = function
        self.engine = engine
        self.executable = executable
        self.error: Exception | None = error
        self.failures = 0
        self._host = host
        self._host_run: HostRun | None = None
        self._lock = threading.Lock()

    def __call__(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Results for the arrays of the Function's entry parameters."""
        executable = self.executable
        if executable is None:
            return self.on_host(arrays)
        try:
            return executable.run(arrays)
        except Exception as e:  # whatever an engine raises must not reach a caller who has a host to fall back on
            self.failed(e)
            return self.on_host(arrays)

    def failed(self, error: Exception) -> None:
        """Note a failure of the executable; the third in a row retires it."""
        with self._lock:
            self.error = error
            self.failures += 1
            if self.failures >= _MAX_FAILURES:
                self.executable = None
        log.warning(
            "cluster %s failed on engine %s (failure %d), the host ran it instead%s: %s",
            self.function.name,
            self.engine,
            self.failures,
            ", and keeps it" if self.executable is None else "",
            error,
        )

    def on_host(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """The same results, from the host."""
        if self._host_run is None:
            with self._lock:
                if self._host_run is None:
                    self._host_run = self._host()
        return self._host_run([to_numpy(a) for a in arrays])

"""LoadedExecutable: a stored program that runs without JAX for as long as its inputs are NumPy's."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from xrt_core.engine.contract import DEFAULT_RUN_OPTIONS, Executable, RunOptions
from xrt_core.errors import ExecutionError
from xrt_xla import _jaxlib
from xrt_xla.blob import Stored, complaint, pack

if TYPE_CHECKING:
    from xrt_xla.executable import XlaExecutable

_logger = logging.getLogger("xrt.xla")

_MANY: Final = 1000
_SOON: Final = 0.5
"""So many calls within so many seconds are worth JAX, whose own call takes a microsecond less for each input."""


class LoadedExecutable(Executable):
    """A program in jaxlib's own client. Results are NumPy arrays over the client's memory, which are read-only.

    At the first call that it cannot serve, with an array of JAX or because the client refuses, it becomes for good the
    executable that JAX makes of the same program and weights. Where calls are many and short it does so too, and JAX is
    imported in a thread beside them.
    """

    def __init__(
        self,
        stored: Stored,
        code: _jaxlib.Code,
        weights: Sequence[np.ndarray],
        made_for: str,
        through_jax: Callable[[], XlaExecutable],
    ) -> None:
        assert stored.bare is not None
        types = [(p.dtype, p.shape) for p in stored.params]
        self._program = _jaxlib.Program(code, stored.bare.kept, types, weights, stored.bare.results)
        self._types = [(np.ndarray, *t) for t in types]
        self._stored = stored
        self._weights = weights
        self._made_for = made_for
        self._through_jax = through_jax
        self._jax: XlaExecutable | None = None
        self._lock = threading.Lock()
        self._calls = itertools.count(1)
        self._since = time.monotonic()
        self._leaves = False

    def run(
        self, inputs: Sequence[Any], run_options: RunOptions = DEFAULT_RUN_OPTIONS, block_until_done: bool = True
    ) -> Sequence[Any]:
        """Run once. Inputs are NumPy or JAX arrays of the entries' dtypes and shapes; results are NumPy arrays, and JAX
        arrays once one was given. Waits for them as long as they are NumPy's."""
        if self._jax is None:
            if not next(self._calls) % _MANY:
                self._look_at_the_clock()
            try:
                if [(type(x), x.dtype, x.shape) for x in inputs] == self._types:
                    return self._program(inputs)
                if all(isinstance(x, np.ndarray | np.generic) for x in inputs):
                    if wrong := complaint(self._stored.params, inputs):
                        raise ExecutionError(f"xla: {wrong}")
                    return self._program([np.asarray(x) for x in inputs])
            except ExecutionError:
                raise
            except Exception as e:  # also what has no dtype: JAX says what is wrong with it
                _logger.debug("a program that was loaded without JAX does not run, so JAX takes over: %r", e)
        return self._in_jax().run(inputs, run_options, block_until_done)

    def serialize(self) -> bytes:
        """The program and its weights in one piece."""
        return pack(self._stored, self._made_for, self._weights, hold=True)

    def serialize_code(self) -> bytes:
        """The program alone: its weights come from the Function again."""
        return pack(self._stored, self._made_for, self._weights, hold=False)

    def as_text(self) -> str:
        """The optimised HLO."""
        return self._in_jax().as_text()

    def _look_at_the_clock(self) -> None:
        before, self._since = self._since, time.monotonic()
        if self._since - before < _SOON and not self._leaves:
            self._leaves = True
            with suppress(RuntimeError):  # no thread can be had, or the interpreter is about to end
                threading.Thread(target=self._leave, name="xrt-xla-jax").start()

    def _leave(self) -> None:
        try:
            self._in_jax()
        except Exception as e:  # such as an interpreter that is about to end
            _logger.debug("JAX does not take over from jaxlib: %r", e)

    def _in_jax(self) -> XlaExecutable:
        with self._lock:
            if self._jax is None:
                self._jax = self._through_jax()
            return self._jax

    def __repr__(self) -> str:
        return f"<LoadedExecutable: {len(self._types)} in, {len(self._weights)} weights, {self._stored.outputs} out>"

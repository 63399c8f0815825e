"""DeviceExecutable: a session on a GPU, over CuPy's memory where inputs lie there."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from xrt_core.engine.contract import DEFAULT_RUN_OPTIONS, RunOptions
from xrt_core.errors import ExecutionError, UnsupportedError
from xrt_onnxruntime import _toolkit
from xrt_onnxruntime.executable import OnnxRuntimeExecutable


class DeviceExecutable(OnnxRuntimeExecutable):
    """A session on a GPU. With an input of CuPy's, inputs there are read in place and results are CuPy's arrays, which
    the library writes into; with NumPy's alone it copies both ways.

    The library works on a stream of its own, which nothing orders after others: so who makes an input is waited for,
    and the run is complete when it returns.
    """

    def run(
        self, inputs: Sequence[Any], run_options: RunOptions = DEFAULT_RUN_OPTIONS, block_until_done: bool = True
    ) -> Sequence[Any]:
        """Run once, and wait. Raises ExecutionError with the library's first line, or what is wrong with the inputs."""
        cupy = sys.modules.get("cupy")
        if cupy is None or not any(isinstance(x, cupy.ndarray) for x in inputs):
            return super().run(inputs)
        try:
            complaint = self._misfit(inputs, cupy)
            if complaint:
                raise ExecutionError(complaint)
            with cupy.cuda.Device(self._compiler.index):
                return self._run_there(inputs, cupy)
        except Exception as e:
            raise ExecutionError(f"onnxruntime: {_toolkit.first_line(e)}") from e

    def _run_there(self, inputs: Sequence[Any], cupy: Any) -> list[Any]:
        index = self._compiler.index
        given = [np.ascontiguousarray(x) if isinstance(x, np.ndarray) else cupy.ascontiguousarray(x) for x in inputs]
        made = [
            given[self._passed[i]].copy() if i in self._passed else cupy.empty(p.shape, p.dtype)
            for i, p in enumerate(self._returns)
        ]
        if self._computed:
            # what makes inputs, and what still reads memory that the results got again
            cupy.cuda.get_current_stream().synchronize()
            outputs = [(n, made[i]) for i, n in enumerate(self._outputs) if i not in self._passed]
            _toolkit.run_on_device(self._session, list(zip(self._inputs, given, strict=True)), outputs, index)
        return [cupy.asarray(r) if isinstance(r, np.ndarray) else r for r in made]

    def _misfit(self, inputs: Sequence[Any], cupy: Any) -> str | None:
        if len(inputs) != len(self._params):
            return f"the executable takes {len(self._params)} inputs, {len(inputs)} were given"
        index = self._compiler.index
        for p, x in zip(self._params, inputs, strict=True):
            if not isinstance(x, np.ndarray | cupy.ndarray) or x.dtype != p.dtype or x.shape != p.shape:
                shown = f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else ""
                return f"input {p.name!r} must be {p.type}, {type(x).__name__} {shown} was given"
            if isinstance(x, cupy.ndarray) and x.device.id != index:
                return f"input {p.name!r} lies on cuda:{x.device.id}, and the session is on cuda:{index}"
        return None

    def serialize(self) -> bytes:
        """Raises UnsupportedError: what the library optimises for a GPU is made of the function."""
        raise UnsupportedError("onnxruntime: sessions on a GPU are made of the function anew")

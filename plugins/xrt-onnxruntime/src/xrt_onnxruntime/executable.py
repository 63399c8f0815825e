"""OnnxRuntimeExecutable: a session, called with as little ceremony as possible; its serialised form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from xrt_core.engine.contract import DEFAULT_RUN_OPTIONS, Executable, Parameter, RunOptions
from xrt_core.engine.converters import library_of
from xrt_core.engine.serialization import ParameterRow, loading, pack, parameters_of, rows_of, unpack
from xrt_core.errors import ExecutionError, UnsupportedError
from xrt_onnxruntime import _toolkit

if TYPE_CHECKING:
    from xrt_core.engine.onnx_bridge import OnnxModel
    from xrt_onnxruntime.compiler import OnnxRuntimeCompiler

_MAGIC: Final = b"XRTORT2\n"


@dataclass(frozen=True, slots=True)
class _Header:
    params: tuple[ParameterRow, ...]
    returns: tuple[ParameterRow, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class OnnxRuntimeExecutable(Executable):
    """A session, for all sizes of its symbolic dimensions. Contiguous NumPy inputs are read in place; results are NumPy
    arrays over memory of their own."""

    def __init__(
        self,
        session: Any,
        entry_params: Sequence[Parameter],
        return_params: Sequence[Parameter],
        inputs: Sequence[str],
        outputs: Sequence[str],
        compiler: OnnxRuntimeCompiler,
        source: OnnxModel | bytes,
    ) -> None:
        self._session = session
        self._run = _toolkit.runner_of(session)
        self._params = tuple(entry_params)
        self._returns = tuple(return_params)
        self._inputs = tuple(inputs)
        self._only = self._inputs[0] if len(self._inputs) == 1 else None
        self._outputs = list(outputs)
        self._compiler = compiler
        self._source = source  # what the session was made of, or its serialised form; holds the constants that it reads
        dtypes = {p.dtype for p in (*self._params, *self._returns)}
        self._native = all(map(_toolkit.is_native, dtypes))
        # the library would hand the caller's own memory back
        self._passed = {i: self._inputs.index(n) for i, n in enumerate(self._outputs) if n in self._inputs}
        self._computed = [n for n in self._outputs if n not in self._inputs]

    def run(
        self, inputs: Sequence[Any], run_options: RunOptions = DEFAULT_RUN_OPTIONS, block_until_done: bool = True
    ) -> Sequence[Any]:
        """Run once, and wait. Inputs are NumPy arrays of the entries' dtypes and shapes; so are the results."""
        try:
            if self._passed:
                return self._run_with_copies(inputs)
            if not self._native:
                return self._run_bound(inputs)
            if self._only is not None:
                (x,) = inputs
                return self._run(self._outputs, {self._only: x}, None)
            return self._run(self._outputs, dict(zip(self._inputs, inputs, strict=True)), None)
        except Exception as e:
            if any(library_of(type(x)) == "cupy" for x in inputs):  # taken on a GPU, and brought down for the CPU
                return self.run([x.get() if library_of(type(x)) == "cupy" else x for x in inputs])
            raise ExecutionError(f"onnxruntime: {self._complaint(inputs) or _toolkit.first_line(e)}") from e

    def _run_with_copies(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Results where some are inputs that come back."""
        complaint = self._complaint(inputs)
        if complaint:
            raise ExecutionError(complaint)
        if not self._computed:
            computed: Sequence[Any] = ()
        elif self._native:
            computed = self._run(self._computed, dict(zip(self._inputs, inputs, strict=True)), None)
        else:
            computed = self._run_bound(inputs)
        left = iter(computed)
        return [inputs[self._passed[i]].copy() if i in self._passed else next(left) for i in range(len(self._outputs))]

    def _run_bound(self, inputs: Sequence[Any]) -> Sequence[np.ndarray]:
        complaint = self._complaint(inputs)
        if complaint:  # values over memory are not checked by the library
            raise ExecutionError(complaint)
        given = [(n, np.ascontiguousarray(x).reshape(x.shape)) for n, x in zip(self._inputs, inputs, strict=True)]
        results = [np.empty(p.shape, p.dtype) for i, p in enumerate(self._returns) if i not in self._passed]
        _toolkit.run_bound(self._session, given, list(zip(self._computed, results, strict=True)))
        return results

    def _complaint(self, inputs: Sequence[Any]) -> str | None:
        """What is wrong with the inputs, if it is they."""
        if len(inputs) != len(self._params):
            return f"the executable takes {len(self._params)} inputs, {len(inputs)} were given"
        for p, x in zip(self._params, inputs, strict=True):
            dtype, shape = getattr(x, "dtype", None), getattr(x, "shape", None)
            if dtype != p.dtype or shape is None or not p.fits(shape) or not isinstance(x, np.ndarray):
                given = type(x).__name__ if not isinstance(x, np.ndarray) else f"{dtype}{list(x.shape)}"
                return f"input {p.name!r} must be {p.type}, {given} was given"
        return None

    def serialize(self) -> bytes:
        """The optimised model and its constants in one piece, for `OnnxRuntimeCompiler.load` on such a processor."""
        source = self._source
        if isinstance(source, bytes):
            return source
        try:
            model, constants = _toolkit.optimised(
                source.to_bytes(), self._compiler.session_options(), source.weights
            )
        except Exception as e:
            raise UnsupportedError(f"onnxruntime: the optimised model is not written: {_toolkit.first_line(e)}") from e
        header = {
            "for": _toolkit.fingerprint(),
            "params": rows_of(self._params),
            "returns": rows_of(self._returns),
            "inputs": list(self._inputs),
            "outputs": self._outputs,
        }
        return pack(_MAGIC, header, (model, constants))

    def serialize_code(self) -> bytes:
        """Raises UnsupportedError: optimising the Function's model anew is as quick as reading a stored one."""
        raise UnsupportedError("onnxruntime makes a session of the function as quickly as of a stored one")

    def as_text(self) -> str:
        """The model that was given to the library, before it was optimised."""
        if isinstance(self._source, bytes):
            return super().as_text()
        import onnx

        return str(onnx.printer.to_text(onnx.load_from_string(self._source.to_bytes())))

    def __repr__(self) -> str:
        return f"<OnnxRuntimeExecutable: {len(self._params)} in, {len(self._outputs)} out>"


def load_executable(blob: bytes, compiler: OnnxRuntimeCompiler) -> OnnxRuntimeExecutable:
    """The executable that `serialize` made `blob` of. Raises CompileError where it does not fit."""
    header, parts = unpack(_MAGIC, blob, "onnxruntime", _Header, _toolkit.fingerprint())
    with loading("onnxruntime"):
        model, constants = parts
        session = _toolkit.load_optimised(bytes(model), bytes(constants), compiler.session_options(optimised=True))
    params, returns = parameters_of(header.params), parameters_of(header.returns)
    return OnnxRuntimeExecutable(session, params, returns, header.inputs, header.outputs, compiler, blob)

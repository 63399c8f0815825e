"""OpenVinoExecutable: a compiled model and its idle requests; its serialised form."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from xrt_core.engine.contract import DEFAULT_RUN_OPTIONS, Executable, Parameter, RunOptions
from xrt_core.engine.serialization import ParameterRow, loading, pack, parameters_of, rows_of, unpack
from xrt_core.errors import ExecutionError, UnsupportedError
from xrt_openvino import _toolkit

_MAGIC: Final = b"XRTOPV2\n"
_MOST_STORED: Final = 1 << 25
_LOST: Final = frozenset(("RoPE",))
"""Operations whose settings are not in what the library exports (2026.4): imported they compute something else."""


@dataclass(frozen=True, slots=True)
class _Header:
    params: tuple[ParameterRow, ...]
    returns: tuple[ParameterRow, ...]
    names: tuple[tuple[str, ...], tuple[str, ...]]


class OpenVinoExecutable(Executable):
    """A compiled model. Contiguous NumPy inputs are read in place; results are fresh NumPy arrays, written in place, or
    copied where their sizes differ between calls.

    A request serves one call at a time: each call takes an idle one, or makes another.
    """

    def __init__(
        self,
        compiled: Any,
        entry_params: Sequence[Parameter],
        return_params: Sequence[Parameter],
        inputs: Sequence[str],
        outputs: Sequence[str],
        weights: Mapping[str, np.ndarray],
    ) -> None:
        self._compiled = compiled
        self._params = tuple(entry_params)
        self._returns = tuple(return_params)
        self._names = list(inputs), list(outputs)
        self._weights = weights  # the compiled model may read them where they are
        entries = _toolkit.ports(compiled, inputs, outputs)
        self._entries = tuple((i, port, p) for i, (port, p) in enumerate(zip(entries, self._params, strict=True)))
        self._is_symbolic = not all(p.is_static for p in (*self._params, *self._returns))
        self._results = () if self._is_symbolic else tuple((p.shape, p.dtype) for p in self._returns)
        self._idle: deque[Any] = deque()

    def run(
        self, inputs: Sequence[Any], run_options: RunOptions = DEFAULT_RUN_OPTIONS, block_until_done: bool = True
    ) -> Sequence[Any]:
        """Run once, and wait. Inputs are NumPy arrays of the entries' dtypes and shapes; so are the results."""
        if len(inputs) != len(self._params):
            raise ExecutionError(f"openvino: the executable takes {len(self._params)} inputs, {len(inputs)} were given")
        given = {}
        for i, port, p in self._entries:
            x = inputs[i]
            if type(x) is not np.ndarray or x.dtype != p.dtype or x.shape != p.dims:
                x = self._accepted(x, p)
            if port is not None:
                given[port] = _toolkit.tensor_over(x if x.flags.c_contiguous else x.copy(order="C"))
        results = [np.empty(shape, dtype) for shape, dtype in self._results]
        try:
            request = self._idle.pop()
        except IndexError:
            request = self._compiled.create_infer_request()
        try:
            out = [_toolkit.tensor_over(y) for y in results]
            _toolkit.infer(request, given, out)
            if self._is_symbolic:
                results = _toolkit.results_of(request, len(self._returns))
        except Exception as e:  # a request that failed is not used again
            raise ExecutionError(f"openvino: {_toolkit.first_line(e)}") from e
        self._idle.append(request)
        return results

    def _accepted(self, x: Any, p: Parameter) -> np.ndarray:
        """An array of a subclass of NumPy's as a plain one. Raises ExecutionError for anything else."""
        if isinstance(x, np.ndarray) and x.dtype == p.dtype and p.fits(x.shape):
            return np.asarray(x)
        given = f"{x.dtype}{list(x.shape)}" if isinstance(x, np.ndarray) else type(x).__name__
        raise ExecutionError(f"openvino: input {p.name!r} must be {p.type}, {given} was given")

    def serialize(self) -> bytes:
        """The compiled model in one piece, for `OpenVinoCompiler.load` on a processor of the same kind.

        Raises UnsupportedError for one that the library would give back as another.
        """
        if lost := _toolkit.layers(self._compiled) & _LOST:
            raise UnsupportedError(f"openvino: an exported model forgets the settings of {', '.join(lost)}")
        try:
            model = _toolkit.exported(self._compiled)
        except Exception as e:
            raise UnsupportedError(f"openvino: the compiled model is not exported: {_toolkit.first_line(e)}") from e
        header = {
            "for": _toolkit.fingerprint(),
            "params": rows_of(self._params),
            "returns": rows_of(self._returns),
            "names": self._names,
        }
        return pack(_MAGIC, header, (model,))

    def serialize_code(self) -> bytes:
        """As `serialize`. Raises UnsupportedError where the constants, which it holds, are so many that compiling the
        Function again is as quick as reading it."""
        size = sum(w.nbytes for w in self._weights.values())
        if size > _MOST_STORED:
            raise UnsupportedError(f"openvino compiles the function as quickly as it reads {size} bytes of constants")
        return self.serialize()

    def as_text(self) -> str:
        """The operations that the library runs, after its own fusions."""
        return _toolkit.listing(self._compiled)

    def __repr__(self) -> str:
        return f"<OpenVinoExecutable: {len(self._params)} in, {len(self._returns)} out>"


def load_executable(blob: bytes, config: Mapping[str, Any]) -> OpenVinoExecutable:
    """The executable that `serialize` made `blob` of. Raises CompileError where it does not fit."""
    header, parts = unpack(_MAGIC, blob, "openvino", _Header, _toolkit.fingerprint())
    with loading("openvino"):
        (model,) = parts
        compiled = _toolkit.import_model(bytes(model), config)
    params, returns = parameters_of(header.params), parameters_of(header.returns)
    inputs, outputs = header.names
    return OpenVinoExecutable(compiled, params, returns, inputs, outputs, {})

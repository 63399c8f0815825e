"""{{ cookiecutter.__class }}Executable: a session of the toolkit, called with as little ceremony as possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from xrt_core.engine.contract import DEFAULT_RUN_OPTIONS, Executable, InputOutputAlias, Parameter, RunOptions
from xrt_core.engine.serialization import ParameterRow, Size, loading, pack, parameters_of, rows_of, unpack
from xrt_core.errors import ExecutionError

from {{ cookiecutter.__module }} import _toolkit

_MAGIC: Final = b"{{ (cookiecutter.engine[:7] ~ '1').ljust(8) }}"  # 8 bytes; the digit is the version of the format


@dataclass(frozen=True, slots=True)
class _Header:
    """What `serialize` notes down; a serialised executable that says anything else is not loaded."""

    entries: tuple[ParameterRow, ...]
    returns: tuple[ParameterRow, ...]
    aliases: tuple[tuple[Size, Size], ...]


class {{ cookiecutter.__class }}Executable(Executable):
    """Runs a session on NumPy arrays. It keeps nothing between runs, so any number of threads may call it.

    model: the ONNX model that the session was made from, for `serialize`.
    """

    def __init__(
        self,
        session: _toolkit.Session,
        model: bytes,
        entry_params: Sequence[Parameter],
        return_params: Sequence[Parameter],
        aliases: Sequence[InputOutputAlias],
        device: str,
    ) -> None:
        self._session, self._model, self._device = session, model, device
        self._entries, self._returns = tuple(entry_params), tuple(return_params)
        self._aliases = tuple(aliases)

    def run(
        self, inputs: Sequence[Any], run_options: RunOptions = DEFAULT_RUN_OPTIONS, block_until_done: bool = True
    ) -> Sequence[Any]:
        """Run once. Raises ExecutionError."""
        self._check_inputs(inputs)
        # YOUR ENGINE: bind the toolkit's own arrays where they lie, use `run_options.stream`, and with
        # `block_until_done=False` return before the results are there. The reference implementation blocks.
        try:
            given = [{% if cookiecutter.devices == "other" %}_toolkit.buffer_of(x){% else %}np.asarray(x){% endif %} for x in inputs]
            results = self._session.run(given)
        except Exception as e:
            raise ExecutionError(f"{{ cookiecutter.engine }}: {type(e).__name__}: {e}") from e
        self._check_results(results)
        owned = [_owned(r, given, results[:i]) for i, r in enumerate(results)]
        if run_options.donate:
            for alias in self._aliases:  # the last of all: nobody reads the old value any more
                target = {{ "given" if cookiecutter.devices == "other" else "inputs" }}[alias.input]
                if type(target) is np.ndarray and target.flags.writeable:
                    target[...] = owned[alias.output]
                    owned[alias.output] = target
{%- if cookiecutter.devices == "other" %}
        return [_toolkit.on_device(r, self._device) for r in owned]
{%- else %}
        return owned
{%- endif %}

    def _check_inputs(self, inputs: Sequence[Any]) -> None:
        if len(inputs) != len(self._entries):
            raise ExecutionError(
                f"{{ cookiecutter.engine }}: the executable takes {len(self._entries)} inputs, {len(inputs)} were given"
            )
        for p, x in zip(self._entries, inputs, strict=True):
            dtype, shape = getattr(x, "dtype", None), getattr(x, "shape", None)
            if dtype != p.dtype or shape is None or tuple(shape) != p.shape:
                given = type(x).__name__ if dtype is None or shape is None else f"{dtype}{list(shape)}"
                raise ExecutionError(f"{{ cookiecutter.engine }}: input {p.name!r} must be {p.type}, {given} was given")

    def _check_results(self, results: Sequence[np.ndarray[Any, Any]]) -> None:
        if len(results) != len(self._returns):
            raise ExecutionError(
                f"{{ cookiecutter.engine }}: the toolkit gave {len(results)} results, {len(self._returns)} are declared"
            )
        for p, r in zip(self._returns, results, strict=True):
            if r.dtype != p.dtype or r.shape != p.shape:
                raise ExecutionError(
                    f"{{ cookiecutter.engine }}: result {p.name!r} is declared as {p.type}, and came out as "
                    f"{r.dtype}{list(r.shape)}"
                )

    def serialize(self) -> bytes:
        """The model, what it was made for, and the parameters, for the compiler's `load`."""
        # YOUR ENGINE: put the toolkit's compiled form here, so that loading it does not compile again.
        header = {
            "for": _toolkit.fingerprint_of(self._device),
            "entries": rows_of(self._entries),
            "returns": rows_of(self._returns),
            "aliases": [[a.output, a.input] for a in self._aliases],
        }
        return pack(_MAGIC, header, (self._model,))

    def as_text(self) -> str:
        """What goes in, what comes out."""
        lines = [f"on {self._device}: an ONNX model of {len(self._model)} bytes"]
        return "\n".join([*lines, *(f"in  {p}" for p in self._entries), *(f"out {p}" for p in self._returns)])

    def __repr__(self) -> str:
        return f"<{{ cookiecutter.__class }}Executable: {len(self._entries)} in, {len(self._returns)} out>"


def load_executable(blob: bytes, device: str) -> {{ cookiecutter.__class }}Executable:
    """The executable that `serialize` made `blob` of. Raises CompileError where it does not fit."""
    header, parts = unpack(_MAGIC, blob, "{{ cookiecutter.engine }}", _Header, _toolkit.fingerprint_of(device))
    with loading("{{ cookiecutter.engine }}"):
        model = bytes(parts[0])
        session = _toolkit.Session(model, device)
    entries, returns = parameters_of(header.entries), parameters_of(header.returns)
    aliases = [InputOutputAlias(o, i) for o, i in header.aliases]
    return {{ cookiecutter.__class }}Executable(session, model, entries, returns, aliases, device)


def _owned(
    result: np.ndarray[Any, Any], inputs: Sequence[np.ndarray[Any, Any]], earlier: Sequence[np.ndarray[Any, Any]]
) -> np.ndarray[Any, Any]:
    """`result` as an array that shares memory with no input, no earlier result and no constant of the model."""
    is_fresh = result.base is None and result.flags.writeable and not any(result is x for x in (*inputs, *earlier))
    return result if is_fresh else result.copy()

"""A serialised executable: XLA's program as JAX pickles it, and the weights where they are held.

The header says what it was made for, its entries, results, aliases and the types of its weights. The first blob is the
payload of `jax.experimental.serialize_executable`, the others are the weights, if the header says that they are held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from xrt_core.engine.contract import InputOutputAlias, Parameter
from xrt_core.engine.serialization import ArrayRow, ParameterRow, Size, array_of, loading, parameters_of, rows_of
from xrt_core.engine.serialization import pack as pack_parts
from xrt_core.engine.serialization import unpack as unpack_parts
from xrt_core.errors import CompileError
from xrt_core.ir.types import dtype_from_name, dtype_name

_MAGIC: Final = b"XRTXLA7\n"  # the digit is the version of the format


@dataclass(frozen=True, slots=True)
class _Header:
    params: tuple[ParameterRow, ...]
    outputs: Size
    linalg: bool
    aliases: tuple[tuple[Size, Size], ...]
    weights: tuple[ArrayRow, ...]
    holds: bool


ArrayType = tuple[np.dtype, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Stored:
    """A serialised executable, taken apart.

    program: JAX's payload, a pickle. linalg: whether it may call LAPACK. types: of the weights. held: the weights,
    views of the serialised form; None where they come from the Function.
    """

    params: tuple[Parameter, ...]
    outputs: int
    aliases: tuple[InputOutputAlias, ...]
    linalg: bool
    program: bytes
    types: tuple[ArrayType, ...] = ()
    held: tuple[np.ndarray, ...] | None = None

    def weights(self, function_weights: Sequence[np.ndarray] | None) -> Sequence[np.ndarray]:
        """Those that are held, or those of the function. Raises CompileError where they do not fit."""
        given = function_weights if self.held is None else self.held
        if given is None or tuple((w.dtype, w.shape) for w in given) != self.types:
            raise CompileError(
                f"xla: the executable takes {len(self.types)} weights that are not those of the function"
            )
        return given


def pack(stored: Stored, made_for: str, weights: Sequence[Any], hold: bool) -> bytes:
    """The serialised form. weights: arrays of any library. hold: put them in; else their types are noted."""
    header = {
        "for": made_for,
        "params": rows_of(stored.params),
        "outputs": stored.outputs,
        "linalg": stored.linalg,
        "aliases": [[a.output, a.input] for a in stored.aliases],
        "weights": [{"dtype": dtype_name(np.dtype(w.dtype)), "shape": list(w.shape)} for w in weights],
        "holds": hold,
    }
    held = (np.ascontiguousarray(np.asarray(w)).reshape(-1).view(np.uint8).data for w in (weights if hold else ()))
    return pack_parts(_MAGIC, header, (stored.program, *held))


def unpack(blob: bytes, made_for: str) -> Stored:
    """What `pack` packed. Raises CompileError for what was made for something else, or is damaged."""
    header, parts = unpack_parts(_MAGIC, blob, "xla", _Header, made_for)
    with loading("xla"):
        program, *rest = parts
        held = None
        if header.holds:
            held = tuple(array_of(row, np.frombuffer(p, np.uint8)) for row, p in zip(header.weights, rest, strict=True))
        return Stored(
            tuple(parameters_of(header.params)),
            header.outputs,
            tuple(InputOutputAlias(o, i) for o, i in header.aliases),
            header.linalg,
            bytes(program),
            tuple((dtype_from_name(row.dtype), row.shape) for row in header.weights),
            held,
        )

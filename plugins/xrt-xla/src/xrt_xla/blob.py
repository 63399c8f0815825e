"""A serialised executable: a header in JSON, XLA's program as JAX pickles it, and the weights where they are held.

8 bytes  magic
8 bytes  length of the header, little endian
header   what it was made for, its entries, results, aliases and weights, in UTF-8 JSON
program  the payload of `jax.experimental.serialize_executable`
weights  each begun at a multiple of 64 bytes, if the header says that they are held
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from xrt_core.engine.contract import InputOutputAlias, Parameter
from xrt_core.errors import CompileError
from xrt_core.ir.types import dtype_from_name, dtype_name

_MAGIC: Final = b"XRTXLA4\n"  # the digit is the version of the format
_ALIGN: Final = 64

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

    def weights(self, function_weights: Callable[[], Sequence[np.ndarray]] | None) -> Sequence[np.ndarray]:
        """Those that are held, or those of the function. Raises CompileError where they do not fit."""
        given = self.held if self.held is not None or function_weights is None else function_weights()
        if given is None or tuple((w.dtype, w.shape) for w in given) != self.types:
            raise CompileError(
                f"xla: the executable takes {len(self.types)} weights that are not those of the function"
            )
        return given


def pack(stored: Stored, made_for: str, weights: Sequence[Any], hold: bool) -> bytes:
    """The serialised form. weights: arrays of any library. hold: put them in; else their types are noted."""
    header = {
        "for": made_for,
        "params": [[p.name, dtype_name(p.dtype), list(p.shape)] for p in stored.params],
        "outputs": stored.outputs,
        "linalg": stored.linalg,
        "aliases": [[a.output, a.input] for a in stored.aliases],
        "weights": [[dtype_name(np.dtype(w.dtype)), list(w.shape)] for w in weights],
        "holds": hold,
        "program": len(stored.program),
    }
    text = json.dumps(header).encode()
    parts: list[bytes | memoryview] = [_MAGIC, struct.pack("<Q", len(text)), text, stored.program]
    size = sum(map(len, parts))
    for w in weights if hold else ():
        raw = np.ascontiguousarray(np.asarray(w)).reshape(-1).view(np.uint8).data
        parts += [bytes(-size % _ALIGN), raw]
        size += -size % _ALIGN + len(raw)
    return b"".join(parts)


def unpack(blob: bytes, made_for: str) -> Stored:
    """What `pack` packed. Raises CompileError for what was made for something else, or is damaged."""
    start = len(_MAGIC) + 8
    if blob[: len(_MAGIC)] != _MAGIC or len(blob) < start:
        raise CompileError("xla: this is not a serialised XLA executable of this version of the package")
    try:
        (length,) = struct.unpack_from("<Q", blob, len(_MAGIC))
        header = json.loads(blob[start : start + length])
        if header["for"] != made_for:
            raise CompileError(f"xla: the executable was made for {header['for']!r}; here is {made_for!r}")
        at = start + length + header["program"]
        types = tuple((dtype_from_name(name), tuple(shape)) for name, shape in header["weights"])
        held = []
        for dtype, shape in types if header["holds"] else ():
            at += -at % _ALIGN
            count = int(np.prod(shape, dtype=np.int64))
            held.append(np.frombuffer(blob, dtype, count, at).reshape(shape))
            at += count * dtype.itemsize
        if at != len(blob):
            raise CompileError(f"xla: a serialised executable of {len(blob)} bytes should have {at}")
        return Stored(
            tuple(Parameter(n, dtype_from_name(d), tuple(s)) for n, d, s in header["params"]),
            header["outputs"],
            tuple(InputOutputAlias(o, i) for o, i in header["aliases"]),
            header["linalg"],
            blob[start + length : start + length + header["program"]],
            types,
            tuple(held) if header["holds"] else None,
        )
    except CompileError:
        raise
    except Exception as e:
        raise CompileError(f"xla: a serialised executable does not load: {type(e).__name__}: {e}") from e

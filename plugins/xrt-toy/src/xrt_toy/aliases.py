"""Results that share the storage of an entry: where the launches may compute them there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from xrt_toy.executable import FunctionCode
from xrt_toy.kernels.context import Buffer, Storage


def compute_in(codes: list[FunctionCode], entry: Storage, result: Storage) -> bool:
    """Have `codes` compute `result` in the storage of `entry`; False, and no change, where that is not safe.

    result: a storage that the codes write, no entry and no constant.
    """
    if not _may_overwrite(codes, entry, result):
        return False
    codes[:] = [
        replace(c, arguments=tuple(Buffer(entry, a.shape) if _is(a, result) else a for a in c.arguments)) for c in codes
    ]
    return True


def _may_overwrite(codes: Sequence[FunctionCode], entry: Storage, result: Storage) -> bool:
    """Whether nobody reads the old value of `entry` once `result` is being written.

    The launch that begins to write may read it, but only where each thread writes what it has read itself: threads run
    in any order, and others would find new elements among the old ones.
    """
    if (entry.dtype, entry.size) != (result.dtype, result.size):
        return False
    begun = False
    for code in codes:
        reads = {i for i, a in enumerate(code.arguments) if _is(a, entry)}
        begins = not begun and any(_is(a, result) for a in code.arguments)
        if (begun and reads) or (begins and not reads <= code.pointwise):
            return False
        begun = begun or begins
    return True


def _is(argument: object, storage: Storage) -> bool:
    return isinstance(argument, Buffer) and argument.storage is storage

"""Arrays in a device's memory: conversions between libraries without a copy."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

import numpy as np

from xrt_core.engine import boundary
from xrt_core.engine.contract import Executable
from xrt_core.engine.device_kinds import DeviceKind
from xrt_core.runtime.arrays import Converter, family_of, from_numpy, plain_tensor, to_cupy, to_numpy

# what libraries raise for DLPack; AssertionError is what a torch without CUDA raises for arrays on a GPU
_FAILS: Final = (AssertionError, AttributeError, BufferError, RuntimeError, TypeError, ValueError)

# --- into an engine -------------------------------------------------------------------------------------------------


def to_engine(family: str, taken: Collection[str], kind: DeviceKind, device: int) -> Converter:
    """The function that takes a caller's array of `family` to what the reader of an input takes.

    kind, device: the device of the reader. taken: families that it takes where they lie there. Arrays there of other
    families become, in place, arrays of a family that it takes; all else goes to NumPy.
    """
    if family == "numpy":
        return to_numpy
    locate = kind.device_of
    if family in taken:
        across: Converter = plain_tensor if family == "torch" else _same
    else:
        across = next((_INTO[f] for f in ("cupy", "jax", "torch") if f in taken and f in sys.modules), to_numpy)

    def enter(x: Any) -> Any:
        return across(x) if locate(x) == device else to_numpy(x)

    return enter


Enter = Callable[[Sequence[Any]], Sequence[Any]]


def to_launch(xp: Any, taken: Collection[str]) -> Enter | None:
    """The function that takes the host's arrays to those of an engine; None where the engine takes them as they are."""
    if xp is np or "cupy" in taken:
        return None
    across = _jax_of if "jax" in taken else to_numpy
    ours = xp.ndarray
    return lambda arrays: [across(x) if isinstance(x, ours) else x for x in arrays]


Adapt = Callable[[Executable, str, str], Executable]
"""(executable, the engine that made it, the engine of the launch) -> executable for the arrays of that launch."""


def adapter(xp: Any, takes: Callable[[str], Collection[str]], spaces: Collection[str]) -> Adapt:
    """The function that makes the executable of one engine fit a launch of another; with NumPy's arrays, or under CuPy
    with arrays that stay on the device.

    takes: engine -> families that it takes where the host computes. spaces: names of launches that are given the host's
    arrays, and whose results go to the host, beside engines that take CuPy's.
    """

    def adapt(made: Executable, engine: str, launch: str) -> Executable:
        if xp is np or not (launch in spaces or "cupy" in takes(launch)):
            return numpy_executable(made, engine, launch)
        return _Adapted(made, to_launch(xp, takes(engine)) or list, to_cupy)

    return adapt


def numpy_executable(made: Executable, engine: str, launch: str) -> Executable:
    """An executable that takes and returns NumPy arrays."""
    return _Adapted(made, lambda arrays: [to_numpy(x) for x in arrays], to_numpy)


class _Adapted(Executable):
    def __init__(self, inner: Executable, enter: Enter, leave: Converter) -> None:
        self._inner, self._enter, self._leave = inner, enter, leave
        self.tolerance = inner.tolerance

    def run(self, inputs: Sequence[Any], *args: Any, **options: Any) -> Sequence[Any]:
        """See `Executable.run`."""
        return [self._leave(r) for r in self._inner.run(self._enter(inputs), *args, **options)]

    def direct(self) -> Executable:
        """See `direct`."""
        return _Adapted(boundary.direct(self._inner), self._enter, self._leave)

    def as_text(self) -> str:
        """See `Executable.as_text`."""
        return self._inner.as_text()


def direct(executable: Executable) -> Executable:
    """As `engine.boundary.direct`, also within an executable that was made for other arrays here."""
    return executable.direct() if isinstance(executable, _Adapted) else boundary.direct(executable)


def _same(x: Any) -> Any:
    return x


def _jax_of(x: Any) -> Any:
    import jax

    try:
        with jax.enable_x64(True):  # or 64 bits would become 32
            return jax.dlpack.from_dlpack(plain_tensor(x) if family_of(type(x)) == "torch" else x)
    except _FAILS:  # a dtype that DLPack has not
        return to_numpy(x)


def _torch_of(x: Any) -> Any:
    try:
        return sys.modules["torch"].from_dlpack(x)
    except _FAILS:  # a dtype that torch has not
        return to_numpy(x)


def on_host(xp: Any) -> tuple[str, ...]:
    """The families that the host takes as they are, beside NumPy's."""
    return () if xp is np else ("cupy",)


_INTO: Final[dict[str, Converter]] = {"cupy": to_cupy, "jax": _jax_of, "torch": _torch_of}


# --- back to the caller ---------------------------------------------------------------------------------------------


def to_caller(family: str, like: Any) -> Converter:
    """The function that takes results to the family and the device of `like`, an array on a GPU.

    Arrays that lie there are not copied. What the family has no dtype for stays NumPy's.
    """
    if family == "cupy":
        return to_cupy
    if family == "torch":
        return _to_tensors(like.device)
    if family == "jax":
        return _to_jax_arrays(like)
    return to_numpy


def _to_tensors(device: Any) -> Converter:
    torch, host = sys.modules["torch"], from_numpy("torch")

    def convert(x: Any) -> Any:
        if type(x) is not np.ndarray:
            try:
                made = torch.from_dlpack(x) if hasattr(x, "__dlpack__") else torch.as_tensor(x, device=device)
                return made.to(device)
            except _FAILS:
                pass
        made = host(x)
        return made.to(device) if isinstance(made, torch.Tensor) else made

    return convert


def _to_jax_arrays(like: Any) -> Converter:
    import jax

    host, place = from_numpy("jax"), like.sharding

    def convert(x: Any) -> Any:
        if not isinstance(x, jax.Array):
            x = _jax_of(x) if type(x) is not np.ndarray else x
            x = x if isinstance(x, jax.Array) else host(x)
        if not isinstance(x, jax.Array) or x.sharding == place:
            return x
        with jax.enable_x64(True):
            return jax.device_put(x, place)

    return convert

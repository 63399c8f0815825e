"""Executables of devices with arrays of a class of their own: inputs in NumPy's memory are moved to the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from xrt_core.engine.contract import (
    DEFAULT_RUN_OPTIONS,
    Executable,
    Function,
    GraphCompiler,
    InputOutputAlias,
    Parameter,
    RunOptions,
)
from xrt_core.engine.device_kinds import device_kind, kinds, number_of


def on_device(compiler: GraphCompiler, device: str) -> GraphCompiler:
    """`compiler`, or for a kind of device with `arrays` one whose executables take NumPy arrays as well.

    Raises DeviceNotFoundError for a kind that is not known.
    """
    kind = device_kind(device)
    if kind.arrays is None:
        return compiler
    arrays, number = kind.arrays, number_of(device)

    def move(x: Any) -> Any:
        if isinstance(x, np.ndarray):
            return arrays.from_host(x, number)
        if isinstance(x, arrays.type) and kind.device_of(x) != number:
            return arrays.from_host(arrays.to_host(x), number)
        return x

    return DeviceCompiler(compiler, move)


def read(x: Any) -> np.ndarray:
    """The NumPy array of a result of an executable: of an array of a device kind, or what `numpy.asarray` can read."""
    kind = kinds.of_array(type(x))
    return np.asarray(x) if kind is None or kind.arrays is None else kind.arrays.to_host(x)


class DeviceExecutable(Executable):
    """An executable and the way of its inputs to the device. Arrays that lie there go in as they are."""

    def __init__(self, inner: Executable, move: Callable[[Any], Any]) -> None:
        self._inner = inner
        self._move = move

    def run(
        self, inputs: Sequence[Any], run_options: RunOptions = DEFAULT_RUN_OPTIONS, block_until_done: bool = True
    ) -> Sequence[Any]:
        """Run once, on arrays of the device and of NumPy. Results are the device's."""
        return self._inner.run([self._move(x) for x in inputs], run_options, block_until_done)

    def serialize(self) -> bytes:
        """The inner executable's bytes."""
        return self._inner.serialize()

    def serialize_code(self) -> bytes:
        """The inner executable's bytes, without its constants where it can do so."""
        return self._inner.serialize_code()

    def as_text(self) -> str:
        """The inner executable's text."""
        return self._inner.as_text()


class DeviceCompiler(GraphCompiler):
    """A compiler whose executables are `DeviceExecutable`s. inner: the engine's own."""

    def __init__(self, inner: GraphCompiler, move: Callable[[Any], Any]) -> None:
        self.inner = inner
        self._move = move

    def compile(
        self,
        function: Function,
        entry_params: Sequence[Parameter],
        return_params: Sequence[Parameter],
        aliases: Sequence[InputOutputAlias],
    ) -> Executable:
        """See `GraphCompiler.compile`."""
        return self._placed(self.inner.compile(function, entry_params, return_params, aliases))

    def load(self, blob: bytes) -> Executable:
        """See `GraphCompiler.load`."""
        return self._placed(self.inner.load(blob))

    def load_code(self, blob: bytes, function: Function) -> Executable:
        """See `GraphCompiler.load_code`."""
        return self._placed(self.inner.load_code(blob, function))

    def _placed(self, made: Executable) -> Executable:
        """What is no executable, against the contract, stays as it is: the caller names the package that made it."""
        return DeviceExecutable(made, self._move) if isinstance(made, Executable) else made

"""A loss that is still on the device: a number that is read when it is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from xrt_core.runtime.arrays import to_numpy


class LazyLoss(NDArrayOperatorsMixin):
    """A scalar of a device. It computes and compares like a NumPy scalar, for which it is read once.

    failed: called with what reading it raises, the failure of a step that ran ahead; may raise something else.
    """

    __slots__ = ("_array", "_failed", "_value")

    def __init__(self, array: Any, failed: Callable[[Exception], None] | None = None) -> None:
        self._array: Any = array
        self._failed = failed
        self._value: Any = None

    def item(self) -> Any:
        """Return the number. Waits for the device."""
        if self._value is None:
            try:
                self._value = to_numpy(self._array)[()]
            except Exception as e:
                if self._failed is not None:
                    self._failed(e)
                raise
            self._array = self._failed = None
        return self._value

    @property
    def dtype(self) -> np.dtype:
        """The element type, without reading."""
        found: np.dtype = np.dtype((self._array if self._value is None else self._value).dtype)
        return found

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, without reading."""
        return tuple((self._array if self._value is None else self._value).shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.item(), dtype)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        given = (x.item() if isinstance(x, LazyLoss) else x for x in inputs)
        return getattr(ufunc, method)(*given, **options)

    def __float__(self) -> float:
        return float(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec)

    def __repr__(self) -> str:
        return repr(self.item())

"""Calls: a stage's XRTModule as a function of torch's tensors and integers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch

from xrt_core.ir.foreign_memory import array_of_tensor
from xrt_torch.background import ending
from xrt_torch.devices import CPU, in_order, moved
from xrt_torch.partition import Stage

PLAIN: Final = frozenset(
    (
        torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
        torch.bool,
    )
)  # fmt: skip
TYPESTRS: Final = {d: np.dtype(str(d).removeprefix("torch.")).str for d in PLAIN}
_DTYPES: Final = {int: "int64", bool: "bool", float: "float64"}


class Ending(Exception):
    """The program ended while something was compiled."""


class StageCall:
    """A function of tensors and numbers (SymInts and the like), whose results are a sequence of the same.

    device: where its tensors are. Those on the CPU go in as NumPy's views of their memory, the shortest way through
    XRT. A parameter's view is kept, with the memory, until it has other memory: what is written into it shows there.
    Tensors on a GPU go in as they are, and come back there, ordered on torch's current stream. Results have the strides
    that torch expects, as its kernels may rely on them.
    """

    def __init__(self, module: Any, stage: Stage, device: torch.device = CPU) -> None:
        self._module = module
        self._names = tuple(module.input_types)
        self._is_single = len(module.output_names) == 1
        self._device = device
        self._is_plain = all(map(_is_plain, stage.takes))
        self._views: list[tuple[int, Any]] = [(0, None)] * len(stage.takes)
        self._made = [_maker_of(v, self._device) for v in stage.gives]

    def prepare(self, *args: Any) -> None:
        """Compile for arguments like these, and wait for it, without a run. Raises what XRT raises, and Ending."""
        self._module.prepare(self._named(args), background=True)
        while not self._module.wait(0.5):
            if ending.is_set():
                raise Ending

    def is_prepared(self, *args: Any) -> bool:
        """Whether a call with arguments like these compiles nothing."""
        return bool(self._module.is_prepared(self._named(args)))

    def _named(self, args: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(self._names, self._given(args), strict=True))

    def _given(self, args: Sequence[Any]) -> list[Any]:
        if self._is_plain:
            return [
                (self._view(i, a) if type(a) is torch.nn.Parameter else _array(a))
                if isinstance(a, torch.Tensor)
                else np.asarray(a, _DTYPES[type(a)])
                for i, a in enumerate(args)
            ]
        return [self._there(a) if isinstance(a, torch.Tensor) else np.asarray(a, _DTYPES[type(a)]) for a in args]

    def _there(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor for any library: on the stage's device, where a number may come from the CPU."""
        plain = x.detach().resolve_neg()
        return plain if self._device == CPU else in_order(plain, self._device)

    def __call__(self, *args: Any) -> Sequence[Any]:
        """The results. Raises what XRT raises."""
        made = self._module(*self._given(args))
        return [make(r) for r, make in zip((made,) if self._is_single else made, self._made, strict=True)]

    def _view(self, i: int, parameter: Any) -> Any:
        known, view = self._views[i]
        if (place := parameter.data_ptr()) != known or not place:
            view = _array(parameter.detach())
            self._views[i] = place, view
        return view


def _array(x: torch.Tensor) -> Any:
    """NumPy's view of a tensor; of one that is negative when it is read, as parts of conjugates are, a copy."""
    return array_of_tensor(x.detach().resolve_neg() if x.is_neg() else x, TYPESTRS[x.dtype])


def _is_plain(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or (value.dtype in PLAIN and value.device.type == "cpu")


def _maker_of(value: Any, device: torch.device) -> Callable[[Any], Any]:
    """What makes torch's value of a result, by what is known of it. device: where tensors are wanted."""
    if device != CPU:
        made = _maker_of(value, CPU)
        return (lambda r: made(moved(_tensor(r), device))) if isinstance(value, torch.Tensor) else made
    for kind, symbol in ((bool, torch.SymBool), (int, torch.SymInt), (float, torch.SymFloat)):
        if isinstance(value, kind | symbol):
            return kind
    if not isinstance(value, torch.Tensor):
        return _contiguous
    if all(isinstance(n, int) for n in (*value.shape, *value.stride())):
        # where elements are repeated nothing writes
        repeats = any(n > 1 and s == 0 for n, s in zip(value.shape, value.stride(), strict=True))
        is_plain = value.is_contiguous() or repeats
        return _contiguous if is_plain else functools.partial(_strided, tuple(value.stride()))
    order = _order_of(value)
    return _contiguous if order == sorted(order) else functools.partial(_ordered, order)


def _order_of(value: torch.Tensor) -> list[int]:
    """The axes of a tensor whose sizes are symbols as they lie in memory, the slowest first; [] where they do not lie
    densely, or that is not known."""
    sizes, strides = ([hint(n) for n in numbers] for numbers in (value.shape, value.stride()))
    order = sorted(range(len(sizes)), key=lambda d: -strides[d])
    dense = 1
    for d in reversed(order):
        if sizes[d] != 1 and strides[d] != dense:
            return []
        dense *= sizes[d]
    return order


def hint(n: int | torch.SymInt) -> int:
    """The size that a symbol had when it was captured; -1 where none is known."""
    known = n if isinstance(n, int) else n.node.hint
    return -1 if known is None else int(known)


def _contiguous(result: Any) -> torch.Tensor:
    x = _tensor(result)
    return x.contiguous() if x.numel() else x.new_empty(x.shape)  # NumPy has other strides where nothing is stored


def _strided(strides: tuple[int, ...], result: Any) -> torch.Tensor:
    x = _tensor(result)
    if x.stride() == strides:
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def _ordered(order: list[int], result: Any) -> torch.Tensor:
    back = [order.index(d) for d in range(len(order))]
    return _tensor(result).permute(order).contiguous().permute(back)


def _tensor(result: Any) -> torch.Tensor:
    """A result, of NumPy as a tensor of the same memory."""
    if isinstance(result, torch.Tensor):
        return result
    plain = type(result) is np.ndarray and result.flags.writeable and all(s >= 0 for s in result.strides)
    array = result if plain else np.array(result, order="C")
    if array.dtype.isbuiltin != 1 and array.dtype.name == "bfloat16":  # which torch does not take from NumPy
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)

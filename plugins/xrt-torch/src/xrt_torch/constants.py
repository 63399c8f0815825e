"""Constants: parameters and buffers of modules as constants of inference, while they are what they were.

Engines prefer constants: they lay weights out as their kernels want them, and multiply normalisation into convolutions.
But torch may write a parameter at any time, and by `.data`, NumPy or DLPack without a trace. So those that are taken as
constants by default are looked at in each call, by a digest of their memory (XXH3, https://xxhash.com), which is read
at some 20 GB/s; where the user answers for such writes (`freeze=True`), torch's version counters tell of the others.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

import ml_dtypes
import numpy as np
import torch
from xxhash import xxh3_64

from xrt_core.ir.foreign_memory import array_of_tensor
from xrt_core.ir.graph import Graph, bind_defaults
from xrt_torch.calls import PLAIN, TYPESTRS
from xrt_torch.partition import Stage

MOST_BYTES: Final = 128 << 20
"""Of constants that are looked at in each call."""
_LARGEST_SHARE: Final = 0.1
"""The time that looking may take, over that of the call."""

Own = dict[str, tuple[int, torch.Tensor]]
"""The name of an input -> its number among the arguments, and the tensor of a module that it was. They are held for as
long as a compilation takes: what had weak references could not take part in `torch.utils.swap_tensors`."""


def own_tensors(names: Sequence[str], args: Sequence[Any]) -> Own:
    """The inputs that are parameters or buffers of modules. TorchDynamo marks both; without its mark, parameters."""
    return {
        n: (i, a)
        for i, (n, a) in enumerate(zip(names, args, strict=True))
        if isinstance(a, torch.nn.Parameter) or getattr(a, "_dynamo_static_input_type", None) is not None
    }


def are_few_bytes(own: Own, wanted: Iterable[str]) -> bool:
    """Whether these are small enough to be looked at in each call."""
    return sum(own[n][1].nbytes for n in wanted) <= MOST_BYTES


class Constants:
    """Inputs as constants. values: by name.

    own: the tensors; wanted: the names of those to take, if they can be: of a type that NumPy has. looks: whether to
    see by their contents that they changed, of which `values` has a copy then (those on a CPU that are dense in
    memory); otherwise by torch's version counters, if they have one.
    """

    def __init__(self, own: Own, wanted: Iterable[str], looks: bool) -> None:
        self.values: dict[str, np.ndarray] = {}
        self.looks = looks
        self._known: list[tuple[int, int, weakref.ref[torch.Tensor] | None, int]] = []
        self._memory: list[np.ndarray] = []
        self._copies: list[np.ndarray] = []
        for name in wanted:
            at, x = own[name]
            if not (x.dtype in PLAIN or x.dtype is torch.bfloat16) or x.is_neg():
                continue
            value = x.detach()
            if looks:
                value = value.clone()
                memory, copy = _memory(x), _memory(value)
                if memory is None or copy is None:
                    continue
                self._memory.append(memory)
                self._copies.append(copy)
            elif x.is_inference():
                continue
            known, version = (None, 0) if looks else (weakref.ref(x), x._version)
            self._known.append((at, x.data_ptr(), known, version))
            self.values[name] = _array(value)
        self._digest = _digest(self._copies)

    def hold(self, args: Sequence[Any]) -> bool:
        """Whether the arguments have them as they were."""
        for at, place, known, version in self._known:
            x: Any = args[at]
            if x.data_ptr() != place or not (known is None or (x is known() and x._version == version)):
                return False
        return not self.looks or _digest(self._memory) == self._digest

    def seconds(self) -> float:
        """The least of three times of looking at them: at the copies, as their own memory may be freed meanwhile."""
        taken = []
        for _ in range(3):
            start = time.perf_counter()
            _digest(self._copies)
            taken.append(time.perf_counter() - start)
        return min(taken)

    def pay(self, call: float) -> bool:
        """Whether there are some, and looking at them may be worth its time. call: the seconds of one without them."""
        return bool(self.values) and self.seconds() <= _LARGEST_SHARE * call

    @staticmethod
    def share(before: float, after: float, looking: float) -> float:
        """How small a call may be, over one that takes `before` seconds without constants and `after` with them, for
        looking at them to be worth its time."""
        return looking / min(before - after, _LARGEST_SHARE * before)

    def bound(self, stage: Stage, graph: Graph) -> tuple[Stage, Graph]:
        """A stage, and its graph in XRT, with these in place of inputs."""
        wanted = self.values.keys() & worthwhile(stage, graph)
        given = {v: self.values[n] for n, v in zip(stage.inputs, graph.inputs, strict=True) if n in wanted}
        if not given or len(given) == len(graph.inputs):
            return stage, graph
        kept = [i for i, v in enumerate(graph.inputs) if v not in given]
        taken = replace(
            stage, inputs=tuple(stage.inputs[i] for i in kept), takes=tuple(stage.takes[i] for i in kept)
        )
        return taken, bind_defaults(graph.replace(defaults=given))


def worthwhile(stage: Stage, graph: Graph) -> list[str]:
    """The inputs that engines may make more of as constants: not tables of which only rows are read."""
    return [
        n
        for n, v in zip(stage.inputs, graph.inputs, strict=True)
        if not all(graph.nodes[i].op_type == "Gather" for i in graph.consumers.get(v, ()))
    ]


def _memory(x: torch.Tensor) -> np.ndarray | None:
    """The bytes of a tensor in the order of its memory; None for one that is not on a CPU, or not dense."""
    ordered = x.detach().permute(sorted(range(x.dim()), key=x.stride, reverse=True))
    is_dense = x.device.type == "cpu" and ordered.is_contiguous()
    return array_of_tensor(ordered.view(-1).view(torch.uint8), "|u1") if is_dense else None


def _array(x: torch.Tensor) -> np.ndarray:
    x = x.contiguous().cpu()
    if x.dtype is torch.bfloat16:
        return array_of_tensor(x.view(torch.int16), TYPESTRS[torch.int16]).view(ml_dtypes.bfloat16)
    return array_of_tensor(x, TYPESTRS[x.dtype])


def _digest(contents: Sequence[np.ndarray]) -> bytes:
    made = xxh3_64()
    for c in contents:
        made.update(c)
    return made.digest()

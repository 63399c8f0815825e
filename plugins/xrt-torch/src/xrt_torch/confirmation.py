"""Confirmation: whether what AOTAutograd made of a graph of TorchDynamo computes what the graph itself does in eager.

XRT's results are compared with the captured graph's. Operators are taken apart in that: where a decomposition is wrong,
eager has the same wrong results of it. So the captured graph is compared with TorchDynamo's own, once: results, and
what a call writes (statistics of batches, the state of optimizers), before it answers a call, and gradients in a call
that follows. What is written, is written into copies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from xrt_core.ir.types import physical_memory
from xrt_torch.comparison import MOVES, Comparison, in_double, in_float64, moved
from xrt_torch.devices import RandomState

Call = Callable[..., Any]
Copies = Callable[[], list[Any]]
"""Makes the arguments of a call, of which those that it writes are copies."""


class _ModuleRaisesError(Exception):
    """Nothing can be compared."""


class Confirmation:
    """Compares the calls of one graph. module: TorchDynamo's graph. device: that of its tensors.

    needs_results, needs_gradients: what is to be compared next.
    """

    def __init__(self, module: GraphModule, device: torch.device) -> None:
        self.module, self._device = module, device
        self.needs_results = True
        self.needs_gradients = False
        self._written: Sequence[int] = ()
        self._names = [n.name for n in module.graph.nodes if n.op == "placeholder"]

    def note_writes(self, arguments: Sequence[int], is_all: bool) -> None:
        """Note which arguments a call writes, as AOTAutograd found it (tensors do not count all writes: not those of
        statistics by `batch_norm`). is_all: whether nothing else is written, such as the module's own tensors: then
        nothing is compared."""
        self._written, self.needs_results = arguments, is_all

    def compare(self, args: Sequence[Any], compiled: Call) -> str:
        """What is wrong with what is compared next, for these arguments; "" for nothing. compiled: what was made of the
        graph. Raises what that does, or torch where it cannot compare.

        Random numbers go on as if none had been drawn."""
        of_results, wrong = self.needs_results, ""
        copies = self._copies(args)
        if copies is not None:
            before = RandomState(self._device)
            try:
                wrong = (self._of_results if of_results else self._of_gradients)(copies, compiled, before)
            except _ModuleRaisesError:  # so the call will raise it; or torch has no gradient
                if of_results:
                    return ""
            finally:
                before.restore()
        # not where it is interrupted
        takes_gradients = any(isinstance(x, torch.Tensor) and x.requires_grad for x in args)
        self.needs_results = False
        self.needs_gradients = of_results and copies is not None and takes_gradients and torch.is_grad_enabled()
        return wrong

    def _copies(self, args: Sequence[Any]) -> Copies | None:
        """Makes arguments that may be written; None where that takes much memory, or others are written as well."""
        written = [args[i] for i in self._written]
        places = [x.untyped_storage()._cdata for x in args if isinstance(x, torch.Tensor)]
        is_shared = bool(written) and len(set(places)) < len(places)
        if is_shared or any(x.requires_grad for x in written) or 2 * _bytes(written) > _room(self._device):
            return None
        return lambda: [x.clone() if i in self._written else x for i, x in enumerate(args)]

    def _of_results(self, copies: Copies, compiled: Call, before: RandomState) -> str:
        def run(call: Call, args: list[Any]) -> list[Any]:
            # in the caller's grad mode, of which a graph of `torch.func.grad` takes that it is the one of its capture
            made = [*call(*args), *(args[i] for i in self._written)]
            return [x.detach() if isinstance(x, torch.Tensor) else x for x in made]

        comparison = Comparison(self.module.graph, [self._names[i] for i in self._written])
        return self._judged(comparison, run, copies, compiled, before)

    def _of_gradients(self, copies: Copies, compiled: Call, before: RandomState) -> str:
        args = copies()
        wanted = [i for i, x in enumerate(args) if isinstance(x, torch.Tensor) and x.requires_grad]
        if 2 * _bytes([args[i] for i in wanted]) > _room(self._device):
            return ""
        names = [f"the gradient of {self._names[i]}" for i in wanted]
        comparison = Comparison(self.module.graph, names, has_results=False)
        return self._judged(comparison, lambda call, x: _gradients(call, x, wanted), copies, compiled, before)

    def _judged(
        self,
        comparison: Comparison,
        run: Callable[[Call, list[Any]], list[Any]],
        copies: Copies,
        compiled: Call,
        before: RandomState,
    ) -> str:
        """What is wrong with what `run` gives. Where it differs from the module's it may do so as far as the module's
        does for arguments that are off by some rounding steps, or in float64."""
        try:
            expected = run(self.module.forward, copies())
        except Exception as e:
            raise _ModuleRaisesError from e
        draws = not before.is_now()
        before.restore()
        found = run(compiled, copies())
        if wrong := comparison.wrong(found, expected):
            for seed in range(MOVES):
                before.restore()
                if comparison.are_as_good(found, run(self.module.forward, moved(copies(), seed)), expected):
                    return ""
            with contextlib.suppress(Exception):  # without float64 they are wrong
                exact = [] if draws else run(in_float64(self.module), in_double(copies()))  # it would draw others
                if exact and comparison.are_as_good(found, expected, exact):
                    return ""
        return wrong


def _gradients(call: Call, args: Sequence[Any], wanted: Sequence[int]) -> list[Any]:
    """Gradients of arguments, for random gradients of the results. The arguments are new tensors over the same memory,
    which have no hooks."""
    given = [_twin(x) if isinstance(x, torch.Tensor) else x for x in args]
    generator = torch.Generator().manual_seed(0)

    def drawn(x: torch.Tensor) -> torch.Tensor:
        if is_traceable_wrapper_subclass(x):
            return torch.ones_like(x)  # of its class, as the backward pass expects
        dtype = torch.complex128 if x.dtype.is_complex else torch.float64
        return torch.randn(x.shape, generator=generator, dtype=dtype).to(x.device, x.dtype)

    with torch.enable_grad():
        made = call(*given)
        results = [y for y in made if isinstance(y, torch.Tensor) and y.requires_grad]
        inputs = [given[i] for i in wanted]
        found = torch.autograd.grad(results, inputs, [*map(drawn, results)], allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs, strict=True)]


def _twin(x: torch.Tensor) -> torch.Tensor:
    twin = x.detach()
    if isinstance(x, torch.nn.Parameter):
        return torch.nn.Parameter(twin, x.requires_grad)
    return twin.requires_grad_(x.requires_grad)


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(x.nbytes for x in tensors)


def _room(device: torch.device) -> int:
    """Bytes that copies and gradients may take."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 4
    return physical_memory() // 16

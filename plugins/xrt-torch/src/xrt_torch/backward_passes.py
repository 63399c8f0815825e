"""Backward passes that AOTAutograd refuses and eager makes: those that are made again, and gradients of gradients.

AOTAutograd's backward pass has no derivative, and may overwrite what the forward pass saved, so that it raises for
`retain_graph=True` and for `create_graph=True`. No engine overwrites its inputs, so the first is allowed here. For the
second its gradients are replaced by those of the graph in eager, which is run once more.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.autograd.graph import get_gradient_edge

from xrt_torch.devices import RandomState

Call = Callable[..., Any]
_MOST_COPIED: Final = 1 << 20
"""Bytes of what a call writes of its arguments, which is copied before it is written."""


def allow_backward_passes() -> None:
    """Have the backward pass of the graph that AOTAutograd compiles just now leave alone what was saved for it, and
    not ask whether torch's deterministic algorithms have been turned on since the forward pass."""
    from torch._guards import TracingContext

    metadata = getattr(TracingContext.try_get(), "fw_metadata", None)
    if donated := getattr(metadata, "bw_donated_idxs", None):
        donated.clear()
    if getattr(metadata, "deterministic", None) is False:
        metadata.deterministic = True


def twice_differentiable(
    compiled: Call, module: Call, written: Sequence[int], draws: bool, device: torch.device
) -> Call:
    """What AOTAutograd made of a graph, with gradients that have gradients. module: the graph in eager; written: the
    arguments that it writes, such as a batch normalisation's statistics; draws: whether it draws random numbers;
    device: that of its tensors."""

    def call(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return compiled(*args)
        if sum(args[i].nbytes for i in written) > _MOST_COPIED or any(args[i].requires_grad for i in written):
            return compiled(*args)
        before = RandomState(device) if draws else None
        given = [x.clone() if i in written else x for i, x in enumerate(args)] if written else args
        results = compiled(*args)
        places: dict[Any, dict[int, int]] = {}
        for i, r in enumerate(results):
            if isinstance(r, torch.Tensor) and (made := r.grad_fn) is not None:
                places.setdefault(made, {})[r.output_nr] = i
        for made, results_of in places.items():
            if type(made).__name__ == "CompiledFunctionBackward":  # not that of a view of one of its results
                made.register_hook(_EagerGradients(made, results_of, given, module, before, device))
        return results

    return call


class _EagerGradients:
    """A hook of a backward pass: its gradients, where a caller wants gradients of them, by eager.

    node: the backward pass; places: result of it -> that of the module; args: of the call, as they were before.
    """

    def __init__(
        self,
        node: Any,
        places: dict[int, int],
        args: Sequence[Any],
        module: Call,
        before: RandomState | None,
        device: torch.device,
    ) -> None:
        self._node = weakref.ref(node)  # which holds this
        self._places, self._args, self._module, self._before = places, args, module, before
        self._versions = _versions(args)
        self._autocast = device.type, torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)

    def __call__(self, grads: Sequence[Any], of_results: Sequence[Any]) -> tuple[Any, ...] | None:
        """The gradients in place of `grads`; None, which leaves them, where nobody wants gradients of them, or eager
        has others by now: torch raises if they are asked for."""
        node, known = self._node(), [i for i, g in enumerate(of_results) if g is not None]
        if not torch.is_grad_enabled() or node is None or not set(known) <= set(self._places):
            return None
        if _versions(self._args) != self._versions:
            return None
        wanted = {get_gradient_edge(x)[:2]: x for x in self._args if isinstance(x, torch.Tensor) and x.requires_grad}
        edges = [wanted.get(edge) for edge in node.next_functions]
        if any(g is not None and x is None for g, x in zip(grads, edges, strict=True)):
            return None
        kind, enabled, dtype = self._autocast
        after = None if self._before is None else self._before.now()
        try:
            if self._before is not None:
                self._before.restore()
            with torch.autocast(kind, dtype, enabled):
                results = self._module(*self._args)
        finally:
            if after is not None:
                after.restore()
        made = torch.autograd.grad(
            [results[self._places[i]] for i in known],
            [*wanted.values()],
            [of_results[i] for i in known],
            create_graph=True,
            allow_unused=True,
        )
        found = dict(zip(map(id, wanted.values()), made, strict=True))
        return tuple(g if x is None else found[id(x)] for g, x in zip(grads, edges, strict=True))


def _versions(args: Sequence[Any]) -> list[int]:
    """How often each tensor has been written."""
    return [x._version for x in args if isinstance(x, torch.Tensor) and not x.is_inference()]

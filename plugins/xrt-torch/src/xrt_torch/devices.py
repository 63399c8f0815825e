"""Devices: where a graph's tensors are, and what work on a GPU needs: order between threads, random numbers, clocks.

A graph has one device: that of its tensors on a GPU, or the CPU. Torch runs what lies elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch

from xrt_core.errors import UnsupportedError
from xrt_core.options import resolve

CPU: Final = torch.device("cpu")


def device_of(values: Iterable[Any]) -> torch.device:
    """The device of a graph that takes these values. Raises UnsupportedError for tensors of two GPUs, and for those
    that are neither on a CPU nor on a GPU of CUDA."""
    found = {_of(v) for v in values if isinstance(v, torch.Tensor)} - {CPU}
    for device in found:
        if device.type != "cuda" or torch.version.hip is not None:
            raise UnsupportedError(f"a tensor on {device}: only those of CPUs and of CUDA are compiled")
    if len(found) > 1:
        raise UnsupportedError(f"tensors on {' and '.join(sorted(map(str, found)))}: a graph is compiled for one GPU")
    return next(iter(found), CPU)


def _of(x: torch.Tensor) -> torch.device:
    """Where a tensor is; fake ones may say "cpu:0"."""
    return CPU if x.device.type == "cpu" else x.device


def on_device(options: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The options of `XRTModule` for a graph on a device: engines compile for it, if no other is asked for."""
    if device == CPU or resolve(options).device is not None:
        return dict(options)
    return {**options, "device": str(device)}


def why_elsewhere(node: torch.fx.Node, device: torch.device) -> str | None:
    """Why XRT does not run an operator: a result that is not on the graph's device, or an operand; None otherwise.
    Numbers on the CPU, tensors without axes, are operands of any device, as in torch."""
    for value in tensors_of(node):
        if _of(value) != device:
            return f"a tensor on {value.device}, in a graph on {device}"
    for operand in node.all_input_nodes:
        for value in tensors_of(operand):
            if _of(value) != device and (value.dim() or _of(value) != CPU):
                return f"an operand on {value.device}, in a graph on {device}"
    return None


def tensors_of(node: torch.fx.Node) -> list[torch.Tensor]:
    """What is known of the tensors that a node makes."""
    value = node.meta.get("val")
    return [v for v in (value if isinstance(value, tuple | list) else [value]) if isinstance(v, torch.Tensor)]


def moved(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor on a device, itself where it is there."""
    return x if _of(x) == device else torch.ops.aten._to_copy.default(x, device=device)


def in_order(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor on a device whose elements lie there densely, in the order of its axes; itself where they do."""
    x = moved(x, device)
    return x if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)


def after_this_thread(device: torch.device) -> Callable[[], None]:
    """What another thread calls so that its work on a device comes after what this one has queued there until now."""
    if device == CPU:
        return _nothing
    queued = torch.cuda.current_stream(device).record_event()
    return lambda: queued.wait(torch.cuda.current_stream(device))


def _nothing() -> None:
    pass


def finish(device: torch.device) -> None:
    """Wait for all work on a device: before its time is taken, and before another thread's tensors are let go."""
    if device != CPU:
        torch.cuda.synchronize(device)


def multiplies_in_tf32() -> bool:
    """Whether torch may round factors of float32 to 10 bits on GPUs, as cuDNN does unless it is told not to
    (https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices)."""
    try:
        return bool(torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32)
    except RuntimeError:  # it was set by another of torch's interfaces, for some operators alone
        return True


class RandomState:
    """The state of torch's generators, of the CPU's and of a device's, as it is now."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cpu = torch.get_rng_state()
        self._own = None if device == CPU else torch.cuda.get_rng_state(device)

    def now(self) -> RandomState:
        """That of the same generators at this moment."""
        return RandomState(self._device)

    def is_now(self) -> bool:
        """Whether no number has been drawn since."""
        now = self.now()
        is_own = self._own is None or torch.equal(self._own, now._own)
        return is_own and torch.equal(self._cpu, now._cpu)

    def restore(self) -> None:
        """Go on from there."""
        torch.set_rng_state(self._cpu)
        if self._own is not None:
            torch.cuda.set_rng_state(self._own, self._device)

"""XRT as an ONNX backend: the `onnx.backend.base` interface, used by ONNX's conformance tests and tools.

    import xrt_core.onnx_backend as backend
    results = backend.run_model(model, [x], engine="auto")

Source: `onnx.backend.base.Backend`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx
from onnx.backend.base import Backend, BackendRep

from xrt_core.module import XRTModule


class XRTBackendRep(BackendRep):
    """A prepared model. module: the XRTModule that runs it."""

    def __init__(self, module: XRTModule) -> None:
        self.module = module

    def run(self, inputs: Any, **_: Any) -> tuple[Any, ...]:
        """Run the model on inputs in the model's order or by name; return its outputs in order."""
        if isinstance(inputs, Mapping):
            results = self.module(**inputs)
        else:
            results = self.module(*inputs) if isinstance(inputs, Sequence) else self.module(inputs)
        return results if isinstance(results, tuple) else (results,)


class XRTBackend(Backend):
    """Runs models through XRTModule. Keyword arguments of `prepare` are XRTModule's (engine=..., ...)."""

    @classmethod
    def is_compatible(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> bool:
        """Return whether `prepare` accepts the model."""
        from xrt_core.errors import XRTError

        try:
            cls.prepare(model, device, **kwargs)
        except XRTError:
            return False
        return True

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> XRTBackendRep:
        """Return the prepared model. Raises the errors of XRTModule."""
        return XRTBackendRep(XRTModule(model, device=_device(device), **{"guard": False, **kwargs}))

    @classmethod
    def run_node(
        cls, node: onnx.NodeProto, inputs: Any, device: str = "CPU", outputs_info: Any = None, **kwargs: Any
    ) -> tuple[Any, ...]:
        """Run one node on arrays, at the newest opset or at `opset_version`; return its outputs."""
        opset = kwargs.pop("opset_version", onnx.defs.onnx_opset_version())
        given = dict(zip([n for n in node.input if n], inputs, strict=True))
        graph = onnx.helper.make_graph(
            [node],
            node.op_type,
            [
                onnx.helper.make_tensor_value_info(n, onnx.helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
                for n, a in given.items()
            ],
            [onnx.ValueInfoProto(name=n) for n in node.output if n],
        )
        imports = [onnx.helper.make_opsetid(node.domain, opset)]
        model = onnx.helper.make_model(graph, opset_imports=imports)
        return cls.prepare(model, device, **kwargs).run(list(given.values()))

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Whether an engine or the host can run on the device ("CPU", "CUDA:0")."""
        from xrt_core.engine import engines
        from xrt_core.engine.device_kinds import is_host

        wanted = _device(device)
        if is_host(wanted):
            return True
        return any(wanted in (d, d.partition(":")[0]) for line in engines.listing() for d in line.devices)


def _device(device: str) -> str:
    """XRT's name of an ONNX device such as "CPU" or "CUDA:0"; the host's processor has no number."""
    from xrt_core.engine.device_kinds import is_host

    device = device.lower()
    return device.partition(":")[0] if is_host(device) else device


is_compatible = XRTBackend.is_compatible
prepare = XRTBackend.prepare
run_model = XRTBackend.run_model
run_node = XRTBackend.run_node
supports_device = XRTBackend.supports_device

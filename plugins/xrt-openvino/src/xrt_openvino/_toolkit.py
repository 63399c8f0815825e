"""The only importer of OpenVINO: reading and compiling models, tensors over NumPy memory, requests, versions."""

from __future__ import annotations

import functools
import io
import pathlib
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from xrt_core.engine.forking import let_forks_end
from xrt_core.engine.serialization import instruction_set

# openvino's converter reports its use over the network, out of a forked process; where its telemetry package does not
# import, it takes a stub of its own instead
_silenced = sys.modules.setdefault("openvino_telemetry", None) is None  # type: ignore[arg-type]
import openvino as ov  # type: ignore[import-untyped]  # noqa: E402

if _silenced:
    del sys.modules["openvino_telemetry"]
from openvino.utils.data_helpers.wrappers import (  # type: ignore[import-untyped]  # noqa: E402
    InferRequestBase as _Request,
)

_DEVICE: Final = "CPU"
_OLDEST: Final = (2026, 4)  # a Loop of no turns gives zeros before, and 2026.1 dies of an If in a Scan in a Loop
_LOCATION: Final = "*/_ORT_MEM_ADDR_/*"  # where OpenVINO's ONNX reader takes an external tensor's offset as an address
_PLACE: Final = re.compile(r"^(?:Exception from|Check '.*' failed at) \S+:\d+:?\s*")
_ALIAS_BYTES: Final = 16384  # a read-only input from this size on is worth the 2 us that reading it in place takes

# float32 stays float32, and no product is rounded to 8 bits on the way
EXACT: Final[Mapping[str, Any]] = {
    "PERFORMANCE_HINT": "LATENCY",
    "EXECUTION_MODE_HINT": "ACCURACY",
    "INFERENCE_PRECISION_HINT": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
}


def version() -> str:
    """Version of OpenVINO, as its package has it."""
    return str(ov.__version__).split("-", 1)[0]


@functools.cache
def core() -> Any:
    """The one Core of the process."""
    return ov.Core()


let_forks_end(lambda: [core()] if core.cache_info().currsize else [])


@functools.cache
def why_unusable() -> str:
    """What this installation of OpenVINO lacks, or ""."""
    if tuple(map(int, re.findall(r"\d+", version())[:2])) < _OLDEST:
        return f"OpenVINO {version()} is too old: {_OLDEST[0]}.{_OLDEST[1]} is the first whose loops are right"
    try:
        devices = core().available_devices
    except Exception as e:
        return f"OpenVINO does not start: {first_line(e)}"
    return "" if _DEVICE in devices else f"OpenVINO {version()} has no {_DEVICE} plugin"


@functools.cache
def computes_in_float16() -> bool:
    """Whether this processor has arithmetic of float16; the library computes in bfloat16 where it is asked for float16
    on one that has not."""
    return "FP16" in core().get_property(_DEVICE, "OPTIMIZATION_CAPABILITIES")


@functools.cache
def fingerprint() -> str:
    """What a compiled model depends on: the library's build and the processor's instruction set."""
    return f"openvino {ov.__version__} {instruction_set()}"


def location(array: np.ndarray) -> dict[str, str]:
    """The external data of a TensorProto whose memory OpenVINO reads when the model is read."""
    return {"location": _LOCATION, "offset": str(address(array)), "length": str(array.nbytes)}


def address(array: np.ndarray) -> int:
    """Where an array's first element is."""
    return int(array.__array_interface__["data"][0])


def refusal(model: bytes) -> str | None:
    """The first telling line of what the library says when it refuses `model`; None where it reads it."""
    try:
        core().read_model(model)
    except Exception as e:  # the binding raises what it likes
        return first_line(e)
    return None


def first_line(error: BaseException) -> str:
    """The first line of an error of the library that tells something, without its place in the library's source."""
    lines = [_PLACE.sub("", line.strip()) for line in str(error).splitlines()]
    return next((line for line in lines if line and not line.endswith(":")), type(error).__name__)


def compile_model(model: bytes, weights: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> Any:
    """The compiled model, which reads `weights` (large constants by name) in place where it keeps them as they are."""
    read = core().read_model(model)
    if weights:
        _share(read, weights)
    return core().compile_model(read, _DEVICE, dict(config))


def _share(model: Any, weights: Mapping[str, np.ndarray]) -> None:
    """Replace the copies of the constants that reading made by constants over the memory itself."""
    for node in model.get_ops():
        if node.get_type_name() != "Constant":
            continue
        array = weights.get(node.get_friendly_name())
        if array is None or node.get_byte_size() != array.nbytes or tuple(node.shape) != array.shape:
            continue
        shared = ov.op.Constant(writable(array), shared_memory=True)
        if shared.get_element_type() == node.get_element_type():
            shared.set_friendly_name(node.get_friendly_name())
            node.output(0).replace(shared.output(0))


def import_model(blob: bytes, config: Mapping[str, Any]) -> Any:
    """The compiled model that `exported` gave `blob` for."""
    return core().import_model(io.BytesIO(blob), _DEVICE, dict(config))


def exported(compiled: Any) -> bytes:
    """A compiled model as bytes."""
    found = compiled.export_model()
    return bytes(found.getbuffer() if isinstance(found, io.BytesIO) else found)


def layers(compiled: Any) -> set[str]:
    """The kinds of operations that a compiled model runs, by the library's own names."""
    return {
        str(v.astype(str))
        for node in compiled.get_runtime_model().get_ops()
        for k, v in node.get_rt_info().items()
        if k == "layerType"
    }


def xml(model: bytes, weights: Mapping[str, np.ndarray], config: Mapping[str, Any] | None) -> str:
    """A model in OpenVINO's IR, without its constants' data; with `config` the runtime model of what is compiled."""
    found = core().read_model(model) if config is None else compile_model(model, weights, config).get_runtime_model()
    with tempfile.TemporaryDirectory(prefix="xrt-openvino-") as folder:
        path = pathlib.Path(folder) / "model.xml"
        ov.serialize(found, path, path.with_suffix(".bin"))
        return path.read_text(encoding="utf-8", errors="replace")


def listing(compiled: Any) -> str:
    """The operations of a compiled model, one a line, with the implementation that each got."""
    lines = []
    for node in compiled.get_runtime_model().get_ordered_ops():
        info = {k: str(v.astype(str)) for k, v in node.get_rt_info().items() if k in ("layerType", "primitiveType")}
        shapes = ", ".join(str(o.get_partial_shape()) for o in node.outputs())
        lines.append(f"{node.get_friendly_name()}: {' '.join(info.values())} -> {shapes}")
    return "\n".join(lines)


def ports(compiled: Any, inputs: Sequence[str], outputs: Sequence[str]) -> list[int | None]:
    """For each input of the ONNX model its index in the compiled model, None for one it dropped; outputs keep theirs.

    Raises RuntimeError where the compiled model has other outputs than the ONNX model.
    """
    if len(compiled.outputs) != len(outputs):
        raise RuntimeError(f"it came out with {len(compiled.outputs)} outputs instead of {len(outputs)}")
    if len(compiled.inputs) == len(inputs):
        return list(range(len(inputs)))  # not by name: an input that is handed through may lose its own
    at = {port.get_node().get_friendly_name(): i for i, port in enumerate(compiled.inputs)}
    return [at.get(n) for n in inputs]


class _Alias:
    """A view of an array's memory that NumPy takes for writable; it keeps the array alive."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, array: np.ndarray) -> None:
        self.__array_interface__ = {**array.__array_interface__, "data": (address(array), False)}
        self.owner = array


def writable(array: np.ndarray) -> np.ndarray:
    """The array, or one over the same memory that may be written: OpenVINO shares no other, and does not write it."""
    if array.flags.writeable:
        return array
    return np.asarray(_Alias(array))


_OTHER_NAMES: Final = {c: np.dtype(np.dtype(c).name) for c in "lLqQ" if np.dtype(c) is not np.dtype(np.dtype(c).name)}
"""NumPy's second types for 64-bit integers (`long long` on Linux), which the library does not know, to the first."""


def tensor_over(array: np.ndarray) -> Any:
    """A Tensor over the memory of a contiguous array."""
    if not array.flags.writeable:
        array = writable(array) if array.nbytes >= _ALIAS_BYTES else array.copy()
    if array.dtype.char in _OTHER_NAMES:
        array = array.view(_OTHER_NAMES[array.dtype.char])
    return ov.Tensor(array, shared_memory=True)


def results_of(request: Any, count: int) -> list[np.ndarray]:
    """Copies of the results of a request's last run."""
    return [np.array(request.get_output_tensor(i).data) for i in range(count)]


def infer(request: Any, inputs: Mapping[int, Any], outputs: Sequence[Any]) -> None:
    """Run a request on tensors, the results' included."""
    for index, tensor in enumerate(outputs):
        request.set_output_tensor(index, tensor)
    # the public `infer` looks at every input again, which takes as long as a small model
    _Request.infer(request, inputs, True, False)

"""The only importer of the toolkit ({{ cookiecutter.__library }}): version, devices, dtypes, and sessions of models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

# YOUR ENGINE: import your toolkit here. ONNX's reference implementation stands for it: slow, but it takes whole models.
import onnx
from onnx.reference import ReferenceEvaluator
from xrt_core.errors import EngineUnavailableError
from xrt_core.ir.types import DTYPE_TO_ONNX, STRING
{%- if cookiecutter.devices == "other" %}

from {{ cookiecutter.__module }}.device import {{ cookiecutter.__class }}Array
{%- endif %}

DTYPES: Final = frozenset(d for d in DTYPE_TO_ONNX if d != STRING and d.isbuiltin == 1)
"""Element dtypes that the toolkit has."""


def version() -> str:
    """The toolkit's version."""
    return str(onnx.__version__)


def devices() -> tuple[str, ...]:
    """The devices that are here, by XRT's names: "cpu", "cuda:0", "cuda:1", "tpu:0"."""
    # YOUR ENGINE: ask the toolkit. As generated, the reference implementation stands for one device of each kind.
    return {{ cookiecutter.__places }}


def device_named(name: str) -> str:
    """The device for "cpu", "cuda" (the first one) or "cuda:1". Raises EngineUnavailableError where it is not there."""
    found = devices()
    for device in found:
        if name in (device, device.removesuffix(":0")):
            return device
    raise EngineUnavailableError(f"{{ cookiecutter.engine }}: no device {name!r} here; there is {', '.join(found)}")


def fingerprint_of(device: str) -> str:
    """What an executable depends on."""
    # YOUR ENGINE: add what compiled code depends on: a GPU's compute capability, a processor's instruction set.
    return f"onnx.reference {version()} {device_named(device)}"


{% if cookiecutter.devices == "other" -%}
def new(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """New memory with the numbers of `array`, for `device.from_host`."""
    return np.array(array)


def buffer_of(array: Any) -> np.ndarray[Any, Any]:
    """What the toolkit computes with: the memory of an array on the device, or a NumPy array."""
    return np.asarray(array.buffer if isinstance(array, {{ cookiecutter.__class }}Array) else array)


def on_device(array: np.ndarray[Any, Any], device: str) -> {{ cookiecutter.__class }}Array:
    """What the toolkit computed as XRT sees it: on the device."""
    return {{ cookiecutter.__class }}Array(array, int(device.partition(":")[2] or 0))


{% endif -%}
class Session:
    """A model that the toolkit has taken. Safe to run from many threads: it keeps nothing between runs.

    model: a serialised ONNX ModelProto, of static shapes.
    """

    def __init__(self, model: bytes, device: str) -> None:
        # YOUR ENGINE: hand the bytes to your parser, and build for `device`.
        proto = onnx.load_model_from_string(model)
        self._names = [v.name for v in proto.graph.input]
        self._evaluator = ReferenceEvaluator(proto)

    def run(self, inputs: Sequence[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
        """The outputs, in order, as the toolkit gives them: they may be inputs, or share memory with them."""
        feeds = dict(zip(self._names, inputs, strict=True))
        with np.errstate(all="ignore"):  # NaN and infinities are results, not warnings
            results: Any = self._evaluator.run(None, feeds)
        return [np.asarray(r) for r in results]

"""onnxruntime.backend without the library: ONNX's backend API on sessions."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from xrt_ort.own.kinds import RunOptions, SessionOptions
from xrt_ort.own.session import InferenceSession

_REFUSED: Final = frozenset({"enable_profiling", "optimized_model_filepath", "profile_file_prefix", "terminate"})


class OnnxRuntimeBackendRep:
    """A session that is called with arrays in the order of its inputs."""

    def __init__(self, session: InferenceSession) -> None:
        self._session = session

    def run(self, inputs: Any, **options: Any) -> list[Any]:
        """Return all results for a list of feeds, or for the feed of the only input.

        options: attributes of RunOptions. Raises RuntimeError for those that would stop or write something, and for one
        feed where there are several inputs.
        """
        names = [a.name for a in self._session.get_inputs()]
        if not isinstance(inputs, list):
            if len(names) != 1:
                raise RuntimeError(f"Model expect {len(names)} inputs")
            inputs = [inputs]
        feeds = {n: np.asarray(x) if isinstance(x, np.generic) else x for n, x in zip(names, inputs, strict=False)}
        return self._session.run(None, feeds, _set(RunOptions(), options))


def supports_device(device: str) -> bool:
    """Whether models can run on a device: on the CPU alone."""
    return device == "CPU"


def is_compatible(model: Any, device: str | None = None, **_: Any) -> bool:
    """Whether a model can run on a device, None for the default."""
    return device is None or supports_device(device)


def prepare(model: Any, device: str | None = None, **options: Any) -> OnnxRuntimeBackendRep:
    """Return a model that can be run: of a path, bytes, a ModelProto, a session, or one that was prepared.

    options: attributes of SessionOptions. Raises RuntimeError for another device than the CPU, and for options that
    would write files.
    """
    if not is_compatible(model, device):
        raise RuntimeError(f"Incompatible device expected '{device}', got 'CPU'")
    if isinstance(model, OnnxRuntimeBackendRep):
        return model
    if isinstance(model, InferenceSession):
        return OnnxRuntimeBackendRep(model)
    if not isinstance(model, str | bytes):
        from onnx.checker import check_model

        check_model(model)
        model = model.SerializeToString()
    return OnnxRuntimeBackendRep(InferenceSession(model, _set(SessionOptions(), options)))


def run_model(model: Any, inputs: Any, device: str | None = None, **options: Any) -> list[Any]:
    """Return the results of a model. Arguments are those of `prepare` and of `run` of what it returns."""
    return prepare(model, device, **options).run(inputs, **options)


run = run_model


def _set(options: Any, given: dict[str, Any]) -> Any:
    """Set attributes; names that are none of the options' are ignored, as by the library."""
    for name, value in given.items():
        if name in _REFUSED and hasattr(options, name):
            raise RuntimeError(f"{type(options).__name__} attribute '{name}' is not permitted via the backend API.")
        if hasattr(options, name):
            setattr(options, name, value)
    return options

"""A stand-in for XRTModule with the members that the command line uses; it doubles its input."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from xrt_core.errors import InputError, ModelLoadError
from xrt_core.ir.graph import Graph, Value
from xrt_core.ir.types import TensorType
from xrt_core.runtime.recording import Span, Timeline


class FakeExplanation:
    """What `explain` returns."""

    def to_json(self) -> dict[str, Any]:
        return {"clusters": []}

    def as_text(self) -> str:
        return "cluster 0 -> fake [1 node]"

    def summary(self) -> str:
        return "1 of 1 nodes in 1 cluster on fake"


class FakeModule:
    """Takes x: float32[batch, 3], flag: int64[?] and, if one likes, weight: float32[3]; gives y = 2 x."""

    made: tuple[Any, dict[str, Any]] = ("", {})
    runs = 0

    def __init__(self, model: pathlib.Path, **options: Any) -> None:
        if not model.exists():
            raise ModelLoadError(f"{model}: there is no such\n file")
        type(self).made = (model, options)
        type(self).runs = 0

    def wait(self) -> bool:
        return True

    @property
    def input_types(self) -> Mapping[str, TensorType]:
        return {
            "x": TensorType(np.dtype(np.float32), ("batch", 3)),
            "flag": TensorType(np.dtype(np.int64), (None,)),
            "weight": TensorType(np.dtype(np.float32), (3,)),
        }

    @property
    def optional_inputs(self) -> tuple[str, ...]:
        return ("weight",)

    def prepare(self, inputs: Mapping[str, Any]) -> None:
        if set(inputs) != {"x", "flag"}:
            raise InputError(f"inputs are x, flag, not {sorted(inputs)}")

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        type(self).runs += 1
        return {"y": inputs["x"] * 2, "parts": [inputs["flag"]], "none": None}

    def run_timed(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], Timeline]:
        return self.run(inputs), Timeline((Span("double", "fake cpu", "main", 0.0, 0.25),))

    def explain(self, inputs: Mapping[str, Any] | None = None) -> FakeExplanation:
        return FakeExplanation()

    def partitioned(self, inputs: Mapping[str, Any]) -> Graph:
        v = Value("x", TensorType(np.dtype(np.float32), (1,)))
        return Graph([v], [v], [], opsets={"": 20})

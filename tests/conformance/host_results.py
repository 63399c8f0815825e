"""Development models with their inputs and what the host makes of them, each computed once for all tests."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError
from typing import Any

import numpy as np
import pytest

from tests.conformance import dev_models
from xrt_core.frontends.onnx_import import import_model
from xrt_core.ir.graph import Graph
from xrt_core.module import XRTModule


@cache
def model_on_host(name: str) -> tuple[Graph, Mapping[str, np.ndarray], Mapping[str, Any]]:
    """The graph, inputs by name, and the host's results; skips where the model's package is not installed."""
    try:
        graph = import_model(str(dev_models.path(name)))
    except PackageNotFoundError as e:
        pytest.skip(f"package {e} is not installed (see models.txt)")
    required = [v.name for v in graph.inputs if v not in graph.defaults]
    inputs = dict(zip(required, dev_models.inputs_for(name).values(), strict=True))
    return graph, inputs, XRTModule(graph, engine="host").run(inputs)

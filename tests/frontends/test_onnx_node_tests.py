"""All node tests of the installed onnx: imported, verified, exported, imported again."""

from __future__ import annotations

import warnings
from typing import Any

import onnx
import pytest
from onnx.backend.test.loader import load_model_tests

from xrt_core.frontends.onnx_export import export_model
from xrt_core.frontends.onnx_import import import_model
from xrt_core.ir.function import graph_fingerprint
from xrt_core.ir.verifier import verify

pytestmark = pytest.mark.slow


def _valid(model: onnx.ModelProto) -> str:
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError as e:
        return str(e)
    return ""


def test_every_node_test_survives_import_and_export() -> None:
    """Each model keeps the IR's rules, its fingerprint over a round trip, and what the checker says of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tests: list[Any] = load_model_tests(kind="node")
    assert len(tests) > 1500
    wrong = {}
    for t in tests:
        graph = import_model(t.model)
        verify(graph, "captured")
        exported = export_model(graph)
        if graph_fingerprint(import_model(exported)) != graph_fingerprint(graph):
            wrong[t.name] = "another fingerprint"
        elif (invalid := _valid(exported)) and not _valid(t.model):
            wrong[t.name] = invalid

    assert wrong == {}

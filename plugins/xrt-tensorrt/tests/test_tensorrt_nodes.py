"""ONNX's node tests through the parser and the builder: a sample always, all of them in the slow run."""

from __future__ import annotations

import pathlib
import re

import pytest
from node_table import function_of, is_numeric, rows
from xrt_tensorrt import TensorRTEngine, _toolkit

from xrt_core.engine.contract import CompileOptions
from xrt_core.testing.node_cases import Case, all_cases

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "tensorrt.md"


def _sample() -> list[Case]:
    """One numeric case for each operator."""
    found: dict[str, Case] = {}
    for case in all_cases():
        if is_numeric(case):
            found.setdefault(case.node.operator, case)
    return list(found.values())


def test_what_is_taken_has_a_network_of_its_types(engine: TensorRTEngine) -> None:
    """One case for each operator: where `supports` says yes, the network's inputs and outputs are the function's."""
    compiler = engine.compiler("cuda:0", CompileOptions())
    taken = 0
    for case in _sample():
        function = function_of(case)
        if engine.supports(function.body.nodes[0], "cuda", "inference"):
            compiler.network(function)  # raises where they differ
            taken += 1
    assert taken >= 160


def test_every_refusal_has_a_reason(engine: TensorRTEngine) -> None:
    """What is refused is refused with a sentence that names the operator or a tensor of it."""
    for case in _sample():
        node = function_of(case).body.nodes[0]
        said = engine.supports(node, "cuda", "inference")
        assert said or node.op_type in said.reason, said.reason


@pytest.mark.nightly
def test_the_table_in_the_docs(engine: TensorRTEngine) -> None:
    """Every node test: all that is taken is built, and as many of each operator as docs/tensorrt.md says."""
    page = PAGE.read_text(encoding="utf-8")
    made_with = re.search(r"with TensorRT-RTX (\S+) and onnx (\S+),", page)
    assert made_with is not None
    found = rows(all_cases())

    assert {n: r.reasons for n, r in found.items() if r.taken != r.built} == {}
    import onnx

    if (made_with[1], made_with[2]) != (_toolkit.toolkit().version, onnx.__version__):
        pytest.skip("the table was made with other versions")
    written = {
        m[0]: (int(m[1]), int(m[2]), int(m[3]))
        for m in re.findall(r"^\| ([\w.]+) \| (\d+) \| (\d+) \| (\d+) ", page, re.M)
    }
    assert written == {n: (r.cases, r.taken, r.built) for n, r in found.items()}

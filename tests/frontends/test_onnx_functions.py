"""Model-local functions: inlined while importing, nested, with attributes, opsets and names of their own."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, TensorProto, helper

from tests.frontends.onnx_models import ATTR, N, function, info, model, subgraph
from xrt_core.errors import ModelLoadError
from xrt_core.frontends.onnx_import import import_model
from xrt_core.ir.types import TensorType
from xrt_core.ir.verifier import verify
from xrt_core.module import XRTModule


def reference(op: str, inputs: list[str], outputs: list[str], kind: int, **names: str) -> onnx.NodeProto:
    """A node whose attributes refer to attributes of the function: reference("LeakyRelu", ..., alpha="a")."""
    n = N(op, inputs, outputs)
    for name, of in names.items():
        n.attribute.append(AttributeProto(name=name, ref_attr_name=of, type=kind))  # type: ignore[arg-type]
    return n


def test_calls_are_inlined_with_unique_names() -> None:
    """Two calls give two copies; results keep the caller's names, inner values get names of their own."""
    f = function("F", ["a", "b"], ["c"], [N("Add", ["a", "b"], ["h"], name="add"), N("Relu", ["h"], ["c"])])
    nodes = [N("F", ["x", "x"], ["m"], domain="f", name="one"), N("F", ["m", "x"], ["y"], domain="f", name="two")]
    graph = import_model(model(nodes, functions=[f], domains=("f",)))

    verify(graph, "captured")
    assert [n.op_type for n in graph.nodes] == ["Add", "Relu", "Add", "Relu"]
    assert [v.name for n in graph.nodes for v in n.outputs if v] == ["one/h", "m", "two/h", "y"]
    assert graph.nodes[0].name == "one/add"
    assert graph.nodes[0].annotations.metadata == {"xrt.function": "f::F"}
    assert graph.opsets == {"": 18}


def test_inner_names_avoid_those_of_the_model() -> None:
    """A name that the model happens to use already is not taken."""
    f = function("F", ["a"], ["c"], [N("Neg", ["a"], ["h"]), N("Relu", ["h"], ["c"])])
    nodes = [N("F", ["x"], ["m"], domain="f", name="one"), N("Relu", ["m"], ["one/h"]), N("Relu", ["one/h"], ["y"])]
    graph = import_model(model(nodes, functions=[f], domains=("f",)))

    names = [v.name for n in graph.nodes for v in n.outputs if v]
    assert len(set(names)) == len(names) == 4


def test_nested_calls_and_versions() -> None:
    """A function may call another; each body follows the opset that its function imports."""
    inner = function("Inner", ["a"], ["c"], [N("Softmax", ["a"], ["c"])], opset=12)
    outer = function("Outer", ["a"], ["c"], [N("Inner", ["a"], ["h"], domain="f"), N("Softmax", ["h"], ["c"])])
    graph = import_model(model([N("Outer", ["x"], ["y"], domain="f")], functions=[outer, inner], domains=("f",)))

    assert [n.version for n in graph.nodes] == [11, 13]
    assert graph.nodes[0].annotations.metadata["xrt.function"] == "f::Outer/f::Inner"
    assert graph.outputs[0].name == "y"


def test_attributes_pass_through_references() -> None:
    """References take the caller's value, else the function's default, else they are left out."""
    nodes = [
        reference("LeakyRelu", ["a"], ["h"], AttributeProto.FLOAT, alpha="slope"),
        reference("Elu", ["h"], ["i"], AttributeProto.FLOAT, alpha="other"),
        reference("Selu", ["i"], ["c"], AttributeProto.FLOAT, alpha="missing"),
    ]
    f = function("F", ["a"], ["c"], nodes, attributes=["slope", "missing"], attribute_protos=[ATTR("other", 0.5)])
    outer = function(
        "G", ["a"], ["c"], [reference("F", ["a"], ["c"], AttributeProto.FLOAT, slope="s")], attributes=["s"]
    )
    outer.node[0].domain = "f"
    graph = import_model(model([N("G", ["x"], ["y"], domain="f", s=0.25)], functions=[f, outer], domains=("f",)))

    assert [dict(n.attributes) for n in graph.nodes] == [{"alpha": 0.25}, {"alpha": 0.5}, {}]


def test_a_constant_may_refer_to_an_attribute() -> None:
    """Constant nodes inside functions resolve references too."""
    f = function(
        "F", ["a"], ["c"],
        [reference("Constant", [], ["k"], AttributeProto.FLOAT, value_float="v"), N("Mul", ["a", "k"], ["c"])],
        attributes=["v"],
    )  # fmt: skip
    graph = import_model(model([N("F", ["x"], ["y"], domain="f", v=3.0)], functions=[f], domains=("f",)))

    assert [v.data.tolist() for v in graph.constants if v.data is not None] == [3.0]


def test_a_subgraph_may_use_the_functions_values() -> None:
    """Names in a body's subgraph are those of the function, which become the caller's values."""
    body = subgraph([N("Relu", ["a"], ["r"])], ["r"])
    f = function("F", ["a", "p"], ["c"], [N("If", ["p"], ["c"], then_branch=body, else_branch=body)])
    inputs = ["x", info("flag", (), TensorProto.BOOL)]
    graph = import_model(model([N("F", ["x", "flag"], ["y"], domain="f")], inputs, functions=[f], domains=("f",)))

    verify(graph, "captured")
    assert graph.nodes[0].captures == (graph.inputs[0],)


def test_absent_inputs_and_results() -> None:
    """Arguments may be left out, at the end or in between; results nobody wants may be too."""
    f = function("F", ["a", "lo", "hi"], ["c", "d"], [N("Clip", ["a", "lo", "hi"], ["c"]), N("Neg", ["a"], ["d"])])
    nodes = [N("F", ["x", "", "m"], ["y"], domain="f")]
    graph = import_model(model(nodes, ["x", info("m", ())], functions=[f], domains=("f",)))

    assert [v and v.name for v in graph.nodes[0].inputs] == ["x", None, "m"]


def test_what_passes_straight_through_keeps_the_callers_name() -> None:
    """A function that returns its input, or one value twice, still makes results of the names the model gives."""
    f = function("F", ["a"], ["a", "c", "c2"], [N("Relu", ["a"], ["c"]), N("Identity", ["c"], ["c2"])])
    f.output[2] = "c"
    nodes = [N("F", ["x"], ["p", "q", "r"], domain="f")]
    graph = import_model(model(nodes, outputs=["p", "q", "r"], functions=[f], domains=("f",)))

    verify(graph, "captured")
    assert [v.name for v in graph.outputs] == ["p", "q", "r"]


def test_a_function_takes_precedence_over_an_operator() -> None:
    """A model may define its own Relu."""
    f = function("Relu", ["a"], ["c"], [N("Neg", ["a"], ["c"])], domain="")

    assert [n.op_type for n in import_model(model([N("Relu", ["x"], ["y"])], functions=[f])).nodes] == ["Neg"]


def test_overloads_are_told_apart() -> None:
    """Functions of one name differ by their overload."""
    one = function("F", ["a"], ["c"], [N("Neg", ["a"], ["c"])], overload="one")
    two = function("F", ["a"], ["c"], [N("Abs", ["a"], ["c"])], overload="two")
    n = N("F", ["x"], ["y"], domain="f")
    n.overload = "two"

    assert import_model(model([n], functions=[one, two], domains=("f",))).nodes[0].op_type == "Abs"


def test_out_of_order_bodies_are_sorted() -> None:
    """Bodies are held to order as little as graphs."""
    f = function("F", ["a"], ["c"], [N("Relu", ["h"], ["c"]), N("Neg", ["a"], ["h"])])
    graph = import_model(model([N("F", ["x"], ["y"], domain="f")], functions=[f], domains=("f",)))

    assert [n.op_type for n in graph.nodes] == ["Neg", "Relu"]


def test_operators_that_the_standard_defines_as_functions_stay() -> None:
    """Gelu has a function body in its schema; it stays an operator."""
    assert import_model(model([N("Gelu", ["x"], ["y"])], opset=20)).nodes[0].op_type == "Gelu"


LOOP = function("A", ["a"], ["c"], [N("B", ["a"], ["c"], domain="f")])
BACK = function("B", ["a"], ["c"], [N("A", ["a"], ["c"], domain="f")])
CALL = N("F", ["x"], ["y"], domain="f")
BAD = {
    "recursion": ([LOOP, BACK], N("A", ["x"], ["y"], domain="f"), r"calls itself \(A -> B -> A\)"),
    "defined twice": ([function("F", ["a"], ["c"], [N("Neg", ["a"], ["c"])])] * 2, CALL, "'F' .*defined twice"),
    "too many arguments": (
        [function("F", [], ["c"], [N("Constant", [], ["c"], value_int=1)])],
        CALL,
        "takes 0 inputs and gives 1 outputs",
    ),
    "unknown attribute": (
        [function("F", ["a"], ["c"], [N("Neg", ["a"], ["c"])])],
        N("F", ["x"], ["y"], domain="f", q=1),
        "no attribute 'q'",
    ),
    "attribute of another kind": (
        [
            function(
                "F", ["a"], ["c"], [reference("Elu", ["a"], ["c"], AttributeProto.FLOAT, alpha="v")], attributes=["v"]
            )
        ],
        N("F", ["x"], ["y"], domain="f", v=1),
        "refers to 'v', which is given as 'int'",
    ),
    "output not made": ([function("F", ["a"], ["c"], [N("Neg", ["a"], ["h"])])], CALL, "output 'c' is made by none"),
    "dangling name in the body": (
        [function("F", ["a"], ["c"], [N("Neg", ["x"], ["c"])])],
        CALL,
        "function 'F': .*input 'x' is made by no node",
    ),
    "cycle in the body": (
        [function("F", ["a"], ["c"], [N("Neg", ["c"], ["h"]), N("Neg", ["h"], ["c"])])],
        CALL,
        "cycle",
    ),
    "opset too new": ([function("F", ["a"], ["c"], [N("Neg", ["a"], ["c"])], opset=999)], CALL, "opset 999"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_functions_are_refused(case: str) -> None:
    """Each fault has an error that names the call or the function."""
    functions, call, message = BAD[case]
    with pytest.raises(ModelLoadError, match=message):
        import_model(model([call], functions=functions, domains=("f",)))


def test_exponential_inlining_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions that double at each level hit a bound instead of filling the memory."""
    monkeypatch.setattr("xrt_core.frontends.onnx_reader.MAX_INLINED", 1000)
    functions = [function("F0", ["a"], ["c"], [N("Neg", ["a"], ["c"])])]
    for i in range(1, 30):
        calls = [N(f"F{i - 1}", ["a"], ["h"], domain="f"), N(f"F{i - 1}", ["h"], ["c"], domain="f")]
        functions.append(function(f"F{i}", ["a"], ["c"], calls))
    with pytest.raises(ModelLoadError, match="more than 1000 nodes"):
        import_model(model([N("F29", ["x"], ["y"], domain="f")], functions=functions, domains=("f",)))


@pytest.mark.parametrize("leaf", [N("Neg", ["a"], ["c"]), N("Constant", [], ["c"], value_float=1.0)])
def test_the_bound_is_checked_before_the_work(leaf: onnx.NodeProto, monkeypatch: pytest.MonkeyPatch) -> None:
    """No call is inlined where all of them would be too many, of constants as well."""
    functions = [function("F0", ["a"], ["c"], [leaf])]
    for i in range(1, 40):
        calls = [N(f"F{i - 1}", ["a"], ["h"], domain="f"), N(f"F{i - 1}", ["h"], ["c"], domain="f")]
        functions.append(function(f"F{i}", ["a"], ["c"], calls))
    monkeypatch.setattr("xrt_core.frontends.onnx_reader.Reader._call", lambda *a: pytest.fail("a call was inlined"))
    with pytest.raises(ModelLoadError, match="makes more than 500000 nodes"):
        import_model(model([N("F39", ["x"], ["y"], domain="f")], functions=functions, domains=("f",)))


def test_long_names_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every name inside a call begins with the call's own."""
    monkeypatch.setattr("xrt_core.frontends.onnx_reader.MAX_INLINED_NAMES", 10_000)
    functions = [function("F", ["a"], ["c"], [N("Neg", ["a"], ["c"])] * 1)]
    call = N("F", ["x"], ["y"], domain="f", name="n" * 5000)
    assert import_model(model([call], functions=functions, domains=("f",))).nodes
    call.name = "n" * 20_000
    with pytest.raises(ModelLoadError, match="names of more than 10000 characters"):
        import_model(model([call], functions=functions, domains=("f",)))


def test_unsorted_bodies_are_read_once() -> None:
    """Trying the order of the file first would double the work at each level of calls."""
    functions = [function("F0", ["a"], ["c"], [N("Neg", ["a"], ["c"])])]
    for i in range(1, 40):
        nodes = [N(f"F{i - 1}", ["a"], ["h"], domain="f"), N("Add", ["h", "k"], ["c"]), N("Neg", ["a"], ["k"])]
        functions.append(function(f"F{i}", ["a"], ["c"], nodes))
    graph = import_model(model([N("F39", ["x"], ["y"], domain="f")], functions=functions, domains=("f",)))
    assert len(graph.nodes) == 1 + 2 * 39


def test_repeated_calls_get_names_in_linear_time() -> None:
    """Thousands of unnamed calls of one function each find a free name at once."""
    f = function("F", ["a"], ["c"], [N("Neg", ["a"], ["h"]), N("Neg", ["h"], ["c"])])
    calls = [N("F", ["x" if not i else f"v{i}"], [f"v{i + 1}"], domain="f") for i in range(5000)]
    graph = import_model(model([*calls, N("Neg", ["v5000"], ["y"])], functions=[f], domains=("f",)))
    names = [v.name for n in graph.nodes for v in n.outputs if v]
    assert len(set(names)) == len(names) == 10_001
    assert "F/h_5000" in names


def test_element_types_of_results_reach_the_body() -> None:
    """What the model declares of a call's result holds for the value inside."""
    f = function("F", ["a"], ["c"], [helper.make_node("Relu", ["a"], ["c"])])
    graph = import_model(model([CALL], functions=[f], domains=("f",)))

    assert graph.outputs[0].type == TensorType(np.dtype(np.float32))


@pytest.mark.slow
def test_the_standards_body_of_a_node_with_bodies_within_a_function() -> None:
    """FlexAttention in a function: names of inlined values ("call/x") are none in the text that onnx makes of it."""
    from tests.conformance.node_tests import node_tests

    test = node_tests()["test_flexattention_score_mod"]
    m = onnx.ModelProto()
    m.CopyFrom(test.model)
    (node,) = m.graph.node
    inner = onnx.NodeProto()
    inner.CopyFrom(node)
    m.functions.append(onnx.helper.make_function("f", "Flex", node.input, node.output, [inner], m.opset_import))
    m.opset_import.append(onnx.helper.make_opsetid("f", 1))
    node.CopyFrom(N("Flex", list(node.input), list(node.output), domain="f", name="call"))
    inputs, expected = test.data_sets[0]
    results = XRTModule(m, engine="host")(*inputs)
    np.testing.assert_allclose(results, expected[0], rtol=1e-4, atol=1e-5)


def test_results_that_nobody_takes() -> None:
    """The body of a Scan may give more than the node has outputs."""
    body = subgraph([N("Neg", ["e"], ["a"]), N("Abs", ["e"], ["b"])], ["a", "b"], ["e"])
    m = model([N("Scan", ["x"], ["y"], num_scan_inputs=1, body=body)])
    x = np.ones((2, 3), np.float32)
    np.testing.assert_array_equal(XRTModule(m, engine="host")(x), -x)

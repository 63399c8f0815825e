"""Invalid graphs in valid files: each is one error that names the node and the value."""

from __future__ import annotations

import onnx
import pytest
from onnx import AttributeProto, TensorProto

from tests.frontends.onnx_models import ATTR, N, info, model, subgraph, tensor
from xrt_core.errors import GraphError, ModelLoadError
from xrt_core.frontends.onnx_import import import_model


def _with(n: onnx.NodeProto, *attributes: AttributeProto) -> onnx.NodeProto:
    n.attribute.extend(attributes)
    return n


_relu = N("Relu", ["x"], ["y"], name="r")
_two_opsets = model([_relu])
_two_opsets.opset_import.add(domain="ai.onnx", version=11)
_nameless_input = model([_relu])
_nameless_input.graph.input.add()
_negative = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[-2])
_short = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], raw_data=b"1234")
_vast = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[0, 2**63 - 1], raw_data=b"")
_wrapped = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2**62, 4], raw_data=b"")
_few = TensorProto(name="w", data_type=TensorProto.INT32, dims=[4], int32_data=[1, 2])
_untyped = TensorProto(name="w", dims=[1], raw_data=b"1234")
_unknown_type = TensorProto(name="w", data_type=99, dims=[1], raw_data=b"1234")
_bad_sparse = model([_relu])
_bad_sparse.graph.sparse_initializer.append(
    onnx.helper.make_sparse_tensor(tensor("s", [1.0]), tensor("i", [9]), [2, 2])
)
_reference = AttributeProto(name="alpha", ref_attr_name="a", type=AttributeProto.FLOAT)
_dangling_body = subgraph([N("Relu", ["lost"], ["r"], name="inside")], ["r"])
_flag = info("flag", (), TensorProto.BOOL)

BAD: dict[str, tuple[onnx.ModelProto, str]] = {
    "cycle": (
        model(
            [N("Add", ["x", "b"], ["a"], name="first"), N("Relu", ["a"], ["b"], name="second"), N("Relu", ["b"], ["y"])]
        ),
        "cycle of 2 nodes: .*first.*second",
    ),
    "self loop": (model([N("Add", ["x", "y"], ["y"], name="self")]), "cycle of 1 nodes: self -> self"),
    "dangling input": (
        model([N("Relu", ["lost"], ["y"], name="r")]),
        r"node 'r' \(Relu\): input 'lost' is made by no node",
    ),
    "dangling output": (model([_relu], outputs=["z"]), "output 'z' of graph 'g' is made by no node"),
    "dangling in a branch": (
        model([N("If", ["flag"], ["y"], then_branch=_dangling_body, else_branch=_dangling_body)], ["x", _flag]),
        "node 'inside' .*'lost' is made by no node",
    ),
    "a branch's value used outside": (
        model(
            [
                N(
                    "If",
                    ["flag"],
                    ["z"],
                    then_branch=subgraph([N("Relu", ["x"], ["r"])], ["r"]),
                    else_branch=subgraph([N("Relu", ["x"], ["r"])], ["r"]),
                ),
                N("Relu", ["r"], ["y"]),
            ],
            ["x", _flag],
        ),
        "input 'r' is made by no node",
    ),
    "output made twice": (
        model([_relu, N("Neg", ["x"], ["y"], name="n")]),
        r"node 'n' \(Neg\): output 'y' is already made",
    ),
    "output is an input": (model([N("Neg", ["x"], ["x"])], outputs=["x"]), "output 'x' is already made"),
    "constant made twice": (
        model([N("Constant", [], ["y"], value_int=1), N("Constant", [], ["y"], value_int=1)]),
        "output 'y' is already made",
    ),
    "two inputs of one name": (model([_relu], ["x", "x"]), "two inputs named 'x'"),
    "input without a name": (_nameless_input, "input 1 of graph 'g' has no name"),
    "two initialisers of one name": (
        model([_relu], initializer=[tensor("w", 1), tensor("w", 1)]),
        "initialiser 'w' of graph 'g' is defined twice",
    ),
    "initialiser without a name": (
        model([_relu], initializer=[tensor("", 1)]),
        "an initialiser of graph 'g' has no name",
    ),
    "too many inputs": (model([N("Relu", ["x", "x"], ["y"], name="r")]), r"node 'r' \(Relu\): 2 inputs, .* takes 1"),
    "too few inputs": (
        model([N("Add", ["x"], ["y"])]),
        r"node Add that makes \['y'\]: 1 inputs, but the operator takes 2",
    ),
    "too many outputs": (model([N("Relu", ["x"], ["y", "z"])]), "2 outputs, but the operator takes 1"),
    "unknown operator": (model([N("Relo", ["x"], ["y"], name="r")]), "node 'r' .*no operator Relo.*did you mean Relu"),
    "operator of a later opset": (model([N("Gelu", ["x"], ["y"])], opset=13), "Gelu came with opset 20, but opset 13"),
    "domain not imported": (
        model([N("Op", ["x"], ["y"], domain="d")]),
        r"domain 'd' is not imported \(imported: ai.onnx 18",
    ),
    "opset too new": (model([_relu], opset=10_000), "opset 10000 of ai.onnx is newer than .*upgrade onnx"),
    "opset too old": (model([N("Add", ["x", "x"], ["y"])], opset=6), "opset 6, where this operator is another one"),
    "opset 0": (model([_relu], opset=0), "opsets begin at 1"),
    "two opsets of one domain": (_two_opsets, "imported with two opsets: 18 and 11"),
    "unknown attribute": (
        model([N("Relu", ["x"], ["y"], alpha=1.0)]),
        r"Relu \(of opset 14\) has no attribute 'alpha'",
    ),
    "attribute of another kind": (
        model([N("Softmax", ["x"], ["y"], axis=1.0)]),
        "'axis' is of kind 'float', but .* takes 'int'",
    ),
    "attribute twice": (
        model([_with(N("Softmax", ["x"], ["y"]), ATTR("axis", 0), ATTR("axis", 1))]),
        "'axis' is given twice",
    ),
    "required attribute missing": (
        model([N("Cast", ["x"], ["y"], name="c")]),
        r"node 'c' \(Cast\): the required attribute 'to'",
    ),
    "reference outside a function": (
        model([_with(N("Elu", ["x"], ["y"]), _reference)]),
        "refers to 'a', but is outside",
    ),
    "constant without a value": (
        model([N("Constant", [], ["y"])], []),
        "exactly one of its value attributes, not none",
    ),
    "constant with two values": (model([N("Constant", [], ["y"], value_int=1, value_float=1.0)], []), "exactly one"),
    "constant without an output": (model([N("Constant", [], [""], value_int=1)], []), "one named output"),
    "negative dimension": (model([_relu], initializer=[_negative]), "initialiser 'w': negative dimension"),
    "no elements of a vast shape": (model([_relu], initializer=[_vast]), "'w': no array has the shape"),
    "a size beyond 64 bits": (model([_relu], initializer=[_wrapped]), r"'w': 0 bytes .* takes 73786976294838206464"),
    "too few bytes": (model([_relu], initializer=[_short]), r"'w': 4 bytes of data for float32\[4\], which takes 16"),
    "too few elements": (model([_relu], initializer=[_few]), "initialiser 'w': tensor data does not fit"),
    "tensor without a type": (model([_relu], initializer=[_untyped]), "'w': the tensor has no element type"),
    "unknown element type": (model([_relu], initializer=[_unknown_type]), "'w': unknown element type 99"),
    "unknown element type of an input": (model([_relu], [info("x", (1,), 77)]), "input 'x': unknown element type 77"),
    "sparse index outside": (_bad_sparse, "sparse initialiser 's': .*an index lies outside"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("form", ["proto", "bytes"])
def test_an_invalid_graph_is_refused(case: str, form: str) -> None:
    """The error says what is wrong, where, under which name."""
    proto, message = BAD[case]
    with pytest.raises(ModelLoadError, match=message) as e:
        import_model(proto if form == "proto" else proto.SerializeToString())
    assert isinstance(e.value, GraphError)


DAMAGED = {
    "node": N("Relu", ["x"], ["y"], name="QQQQ"),
    "operator": N("QQQQ", ["x"], ["y"]),
    "domain": N("Relu", ["x"], ["y"], domain="QQQQ"),
    "value": N("Relu", ["x"], ["y", "QQQQ"]),
    "attribute": N("Relu", ["x"], ["y"], QQQQ=1),
}


@pytest.mark.parametrize("place", DAMAGED)
def test_a_name_that_is_not_utf8(place: str) -> None:
    """Damaged names are refused wherever they stand."""
    raw = model([DAMAGED[place]]).SerializeToString().replace(b"QQQQ", b"\xff\xfe\xfd\xfc")
    with pytest.raises(ModelLoadError):
        import_model(raw)


def test_documentation_that_is_not_utf8_is_read_as_well_as_may_be() -> None:
    """Comments and symbols of another encoding are no reason to refuse a model."""
    proto = model([N("Relu", ["x"], ["y"], doc_string="QQQQ")], [info("x", ("QQQQ", 3))])
    graph = import_model(proto.SerializeToString().replace(b"QQQQ", b"\xe9\xe9\xe9\xe9"))

    assert graph.nodes[0].annotations.doc == "\\xe9" * 4
    assert graph.inputs[0].shape == ("\\xe9" * 4, 3)


def test_a_chain_of_functions_too_deep_for_the_stack() -> None:
    """A thousand functions that call each other are refused, the interpreter stays alive."""
    from tests.frontends.onnx_models import function

    functions = [function("F0", ["a"], ["c"], [N("Neg", ["a"], ["c"])])]
    functions += [function(f"F{i}", ["a"], ["c"], [N(f"F{i - 1}", ["a"], ["c"], domain="f")]) for i in range(1, 1500)]
    with pytest.raises(ModelLoadError, match="nested too deeply"):
        import_model(model([N("F1499", ["x"], ["y"], domain="f")], functions=functions, domains=("f",)))

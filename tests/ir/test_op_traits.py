"""The table of operator traits, held against ONNX's schemas and, numerically, against the host.

Where today's tables went, and what was decided where they disagreed (`DECISIONS` has a row for each):

| table | went to |
|---|---|
| `_RANDOM` of constant_folding, checker, operator_tests, xrt_xla, xrt_tensorrt | `random`, `draws_random` |
| `_RANDOM` and rules of xrt_onnxruntime, rules of xrt_openvino | `draws_random` |
| Dropout's mode in constant_folding, checker, identity_elimination, xrt_onnxruntime, xrt_openvino | `draws_random` |
| `_VIEWS`, `_SCATTERS` of memory_planner | `view`, `strided` |
| `_VIEWS` of cost_model | `view`, `shape_query` |
| `_FREE` of flops | `moves_elements`, `fills`, `shape_query`, `cast` |
| names that begin with Reduce or Arg in cost_model | `reduction` |
| `_GROWING` of constant_folding | `grows` |
| `_SHAPE_OPERATORS` of tracing, `_ARITHMETIC` of shape_specialization | `shape_arithmetic` |
| `_COMPARISONS` of shape_specialization and operator_table | `comparison` |
| pairs of Shape and Size in tracing and shape_specialization | `shape_query` |
| `_SHAPE_OF_FIRST_INPUT` of tracing | rules of `ir.inference` |
| `_FLIPPING`, `_EXACT`, `_SUMS` of checker | `is_discontinuous`, `is_exact`, `sums` |
| `OWN_PRECISION` of verify, `SAME_PRECISION` of testing | `cast`, `quantizes`, `shape_query` |
| `_NEUTRAL` of mixed_precision | `cast`, `quantizes`, `shape_query` |
| `ELEMENTWISE` of operator_table | `elementwise`, `is_exact` |
| `_CONVERTS` of transfers and onnx_export, `_CONVERTERS` of diagram | `boundary` |
| `CONTROL_FLOW` of executor | `control_flow` |
| operators without a gradient in training.rules.constant | `piecewise_constant`, `random` |
| `_TO_BOOL` of xrt_openvino | `boolean_result` |

`ELSEWHERE` lists the tables that stay where they are, each with its reason.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final

import ml_dtypes
import numpy as np
import onnx
import pytest

from tests.architecture.source import ROOT
from tests.random_graphs import F32, graph_of, node
from xrt_core.errors import GraphError, RegistrationError, XRTError
from xrt_core.host.executor import run_node
from xrt_core.ir.graph import Node, Value
from xrt_core.ir.inference import infer_types
from xrt_core.ir.op_traits import (
    NO_TRAITS,
    Traits,
    draws_random,
    find_traits,
    is_deterministic,
    is_discontinuous,
    is_exact,
    known_traits,
    operators_with,
    register_traits,
    traits_of,
    unregister_traits,
)
from xrt_core.ir.schema import dialect, latest_opset, schema_for
from xrt_core.ir.types import STRING, TensorType
from xrt_core.testing.generated import retyped
from xrt_core.testing.node_cases import Case, all_cases

TRAITS: Final = Traits.__struct_fields__
on_cases = pytest.mark.slow  # making the backend tests takes seconds
NOT_IN_CASES: Final = {
    "moves_elements": {"Scatter"},  # of opset 9, and without tests of its own
    "piecewise_constant": {"Constant", "ImageDecoder", "OptionalHasElement", "SequenceLength"},  # no numbers come in
}


def cases(trait: str) -> list[Case]:
    """Backend tests of the operators of ONNX's own domain that have a trait."""
    names = operators_with(trait)
    found = [c for c in all_cases() if c.node.op_type in names and not c.node.domain]
    assert names - {c.node.op_type for c in found} <= NOT_IN_CASES.get(trait, set())
    return found


def results(case: Case, inputs: Sequence[Any] | None = None) -> list[np.ndarray]:
    """What the host gives, without outputs that are left out."""
    given = case.inputs if inputs is None else inputs
    return [np.asarray(r) for r in run_node(case.node, list(given)) if r is not None]


def of(*shape: Any, dtype: Any = F32) -> Value:
    return Value("v", TensorType(np.dtype(dtype), shape))


# --- the rows ---


def test_every_row_is_an_operator() -> None:
    """No row names an operator that neither the installed onnx package nor the dialect has."""
    known = {(s.domain, s.name) for s in onnx.defs.get_all_schemas_with_history()}
    known |= {("xrt", name) for name in dialect()}

    assert set(known_traits()) <= known


@pytest.mark.parametrize("trait", TRAITS)
def test_every_trait_has_operators(trait: str) -> None:
    """A trait that no row has, or that says nothing new, would be dead; an operator without a row has none."""
    named = {key for key, t in known_traits().items() if getattr(t, trait)}

    assert named
    assert not any({k for k, t in known_traits().items() if getattr(t, o)} == named for o in TRAITS if o != trait)
    assert not getattr(find_traits("NoSuchOperator"), trait)


@pytest.mark.parametrize(
    ("some", "all_of"),
    [
        ("moves_elements", "exact"), ("moves_elements", "zero_preserving"), ("strided", "view"),
        ("comparison", "boolean_result"), ("comparison", "elementwise"), ("comparison", "discontinuous"),
        ("boolean_result", "piecewise_constant"), ("shape_query", "piecewise_constant"), ("boundary", "moves_elements"),
    ],
)  # fmt: skip
def test_traits_that_imply_others(some: str, all_of: str) -> None:
    """What follows from a trait by its meaning holds in every row."""
    assert [key for key, t in known_traits().items() if getattr(t, some) and not getattr(t, all_of)] == []


def test_boolean_results_by_schema() -> None:
    """Exactly the operators whose schema gives nothing but tensors of bool."""
    found = {
        s.name for s in onnx.defs.get_all_schemas()
        if not s.domain and s.outputs and all(set(o.types) == {"tensor(bool)"} for o in s.outputs)
    }  # fmt: skip

    assert operators_with("boolean_result") == found


def test_control_flow_by_schema() -> None:
    """Exactly the operators that must be given a graph."""
    found = {
        s.name for s in onnx.defs.get_all_schemas()
        if not s.domain and any(a.required and a.type == onnx.defs.OpSchema.AttrType.GRAPH
                                for a in s.attributes.values())
    }  # fmt: skip

    assert operators_with("control_flow") == found


# --- shapes and numbers ---


@pytest.mark.parametrize("op", sorted(operators_with("elementwise")))
def test_elementwise_shapes_broadcast(op: str) -> None:
    """The shape of an elementwise result is that of the inputs, broadcast."""
    schema = schema_for(op, "", latest_opset())
    count = min(schema.max_inputs, 3) if op in ("Where", "Max", "Min", "Sum", "Mean") else schema.min_inputs
    shapes = [(2, 3, 1), (1, 4), (3, 1)][:count] if op not in ("CastLike", "PRelu") else [(2, 3, 4), (3, 1)]
    inputs = [of(*s, dtype=_dtype_of(schema.onnx, i)) for i, s in enumerate(shapes)]
    attributes = {"Cast": {"to": 11}, "BitCast": {"to": 6}, "BitShift": {"direction": "LEFT"}}.get(op, {})

    (found,) = infer_types(Node(op, inputs, [Value()], attributes, version=schema.since_version))

    assert isinstance(found, TensorType)
    assert found.shape == np.broadcast_shapes(*shapes)


def _dtype_of(schema: Any, index: int) -> type:
    texts = schema.inputs[min(index, len(schema.inputs) - 1)].types
    order = (("tensor(float)", np.float32), ("tensor(int32)", np.int32), ("tensor(uint32)", np.uint32))
    return next((d for t, d in order if t in texts), np.bool_)


@on_cases
def test_elementwise_numbers_stay_in_place() -> None:
    """Elements in reverse order give the results in reverse order; shown wherever the inputs have one shape.

    NumPy computes the tail of an array by other instructions than its vectors (AVX-512): 4 units in the last place.
    """
    shown = set()
    for c in cases("elementwise"):
        given = [x for x in c.inputs if x is not None]
        if len({x.shape for x in given}) != 1 or any(x.dtype == STRING for x in given):
            continue
        turned = [None if x is None else x.reshape(-1)[::-1].reshape(x.shape) for x in c.inputs]
        for a, b in zip(results(c), results(c, turned), strict=True):
            assert a.dtype == b.dtype
            if a.dtype.kind in "fc" and a.dtype.isbuiltin == 1:
                few = 4 * np.finfo(a.dtype).eps
                np.testing.assert_allclose(a.reshape(-1)[::-1], b.reshape(-1), rtol=few, atol=0, err_msg=c.name)
            else:
                assert [repr(e) for e in _elements(a)[::-1]] == [repr(e) for e in _elements(b)], c.name
        shown.add(c.node.op_type)

    assert operators_with("elementwise") - shown <= {"CastLike", "Clip", "Where"}  # inputs of other kinds


@on_cases
def test_movers_invent_no_element() -> None:
    """Each element that a mover gives came in, or is zero."""
    for c in cases("moves_elements"):
        if not is_exact(c.node):  # a scatter that adds
            continue
        came = {0, *itertools.chain.from_iterable(_elements(x) for x in c.inputs if x is not None)}
        given = [x for x in results(c) if x.dtype == c.inputs[_data_input(c)].dtype]
        assert given, c.name
        assert all(set(_elements(x)) <= came for x in given), c.name


def _data_input(case: Case) -> int:
    return 1 if case.node.op_type == "Where" else 0


def _elements(x: np.ndarray) -> list[Any]:
    return list(x.reshape(-1).tolist()) if x.dtype.kind in "biufcO" else [float(e) for e in x.reshape(-1)]


@on_cases
def test_views_share_memory() -> None:
    """The host gives a view as the memory of its input, and nothing else in that way but what depends on the node."""
    shared: dict[str, list[bool]] = {}
    for c in all_cases():
        x = c.inputs[0] if c.inputs else None
        if c.node.domain or not isinstance(x, np.ndarray) or not x.size:
            continue
        made = [r for r in results(c) if r.size]
        shared.setdefault(c.node.op_type, []).extend(np.shares_memory(r, x) for r in made[:1])

    views = operators_with("view")
    assert {op for op in views if not all(shared[op])} == set()
    # a single input, no bounds, no cropping, inference mode, an equation that transposes, an optional that holds it
    assert {op for op, found in shared.items() if any(found)} - views == {
        "CenterCropPad", "Clip", "Dropout", "Einsum", "Max", "Min", "OptionalGetElement", "Sum"
    }  # fmt: skip


@on_cases
def test_exact_operators_do_not_round() -> None:
    """float32 and float64 give the same numbers for the same inputs."""
    shown = 0
    for c in cases("exact"):
        if not c.is_numeric or not is_exact(c.node) or not any(x is not None and x.dtype == F32 for x in c.inputs):
            continue
        wide = [x.astype(np.float64) if x is not None and x.dtype == F32 else x for x in c.inputs]
        other = retyped(c.node, wide)
        if other is None or c.node.op_type == "BitCast":  # whose bits are others
            continue
        for a, b in zip(results(c), run_node(other, wide), strict=False):
            np.testing.assert_array_equal(a.astype(np.float64), np.asarray(b).astype(np.float64), c.name)
        shown += 1

    assert shown > 100


@pytest.mark.parametrize(("op", "x"), [("Range", (0.1, 1.0, 0.1)), ("ReduceSum", ((0.1, 0.2),)), ("Mul", (0.1, 0.1))])
def test_what_rounds_is_not_exact(op: str, x: tuple[Any, ...]) -> None:
    """The comparison above can tell: these differ, and are not marked."""
    narrow, wide = ([np.array(e, d) for e in x] for d in (np.float32, np.float64))
    (a,), (b,) = (
        run_node(node(op, [of(*e.shape, dtype=e.dtype) for e in xs], [Value()]), xs)
        for xs in (narrow, [n.astype(np.float64) for n in narrow])
    )

    assert wide is not None
    assert not np.array_equal(a.astype(np.float64), b)
    assert not find_traits(op).exact


@on_cases
def test_commutative_operators() -> None:
    """Exchanged inputs give the same, and of the binary elementwise operators only those that are marked do so."""
    differs, same = set(), set()
    for c in all_cases():
        n = c.node
        if n.domain or len(c.inputs) != 2 or not traits_of(n).elementwise or n.op_type == "CastLike":
            continue
        swapped = n.replace(inputs=n.inputs[::-1])
        try:
            other = [np.asarray(r) for r in run_node(swapped, c.inputs[::-1])]
        except XRTError:
            differs.add(n.op_type)
            continue
        equal = all(a.shape == b.shape and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
                    for a, b in zip(results(c), other, strict=True))  # fmt: skip
        (same if equal else differs).add(n.op_type)

    assert operators_with("commutative") == same - differs


@on_cases
def test_zeros_stay_zeros() -> None:
    """Zeros give zeros; of the elementwise operators, those that are not marked give something else in some case."""
    other = set()
    for c in all_cases():
        n = c.node
        traits = traits_of(n)
        if n.domain or not c.is_numeric or not (traits.zero_preserving or traits.elementwise):
            continue
        if any(v is not None and v.dtype == ml_dtypes.float8_e8m0fnu for v in (*n.inputs, *n.outputs)):
            continue  # it has no zero
        if any(x is not None and not x.size for x in c.inputs[:1]):
            continue  # of nothing, the largest is -inf, and the product 1
        given = [np.zeros_like(x) if i in _numbers(n) and x is not None else x for i, x in enumerate(c.inputs)]
        zero = not np.any(results(c, given)[0].astype(np.float64))
        assert zero or not traits.zero_preserving, c.name
        if not zero:
            other.add(n.op_type)

    unmarked = operators_with("elementwise") - operators_with("zero_preserving")
    # bounds decide; and a remainder of integers by zero is what the host makes of it, of floats it is not a number
    assert unmarked - other <= {"Clip", "Mod"}


def _numbers(n: Node) -> set[int]:
    """Indices of the inputs that hold numbers of the result's type; all of them where there is none."""
    if n.op_type == "CastLike":  # whose second input is there for its type
        return {0}
    schema = schema_for(n.op_type, n.domain, n.version).onnx
    formal = [schema.inputs[min(i, len(schema.inputs) - 1)].type_str for i in range(len(n.inputs))]
    found = {i for i, t in enumerate(formal) if t == schema.outputs[0].type_str}
    return found or set(range(len(n.inputs)))


@on_cases
def test_piecewise_constant_operators_ignore_small_changes() -> None:
    """Inputs that are off by a millionth give the same, but for the few that stand at a jump."""
    rng = np.random.default_rng(5)
    moved = {op: [0, 0] for op in operators_with("piecewise_constant")}
    for c in cases("piecewise_constant"):
        here = _off(c.inputs, 1e-2, rng)  # away from the jumps, where the numbers of some cases stand
        for a, b in zip(results(c, here), results(c, _off(here, 1e-6, rng)), strict=True):
            assert a.shape == b.shape
            count = moved[c.node.op_type]
            count[0] += int((a != b).sum()) if a.dtype.kind not in "fc" else int((~np.isclose(a, b)).sum())
            count[1] += a.size

    assert {op: m for op, (m, size) in moved.items() if m > 0.02 * size} == {}


def _off(arrays: Sequence[Any], by: float, rng: np.random.Generator) -> list[Any]:
    """The arrays, those of float32 off by a factor."""
    return [x * (1 + by * rng.uniform(-1, 1, x.shape)).astype(F32) if x is not None and x.dtype == F32 else x
            for x in arrays]  # fmt: skip


@on_cases
def test_what_may_grow_without_bound() -> None:
    """An operator that is not marked has a type that follows from known inputs, or a result of a bounded size."""
    for c in all_cases():
        if not c.is_numeric or c.node.domain or traits_of(c.node).grows:
            continue
        known = [None if v is None else Value.constant(x) for v, x in zip(c.node.inputs, c.inputs, strict=True)]
        types = infer_types(c.node.replace(inputs=known))
        if all(t is None or (isinstance(t, TensorType) and t.is_static) for t in types) and types[0] is not None:
            continue
        size = sum(x.size for x in c.inputs if x is not None)
        assert sum(r.size for r in results(c)) <= 8 * max(size, 1), c.name


@on_cases
def test_contractions_multiply_what_they_sum() -> None:
    """Of ones they give how many products were added: more than one for some shape of each operator. Recurrent cells,
    attention and integers by scales aside, whose products are within."""
    summed: dict[str, float] = {}
    for c in all_cases():
        traits = traits_of(c.node)
        if traits.contraction:
            assert not any((traits.elementwise, traits.moves_elements, traits.exact, traits.reduction)), c.name
        whole = all(x is None or x.dtype == F32 for x in c.inputs)
        if traits.contraction and whole and c.node.op_type in ("Conv", "ConvTranspose", "Gemm", "MatMul"):
            ones = [None if x is None else np.ones_like(x) for x in c.inputs]
            most = max(float(np.abs(r).max()) for r in results(c, ones))
            summed[c.node.op_type] = max(summed.get(c.node.op_type, 0), most)

    assert len(summed) == 4
    assert min(summed.values()) > 1, summed


# --- what depends on the node ---


def test_dropout_draws_in_training_mode_alone() -> None:
    """It draws where its mode is on or not known; with a seed, draws are the same at every call."""
    x, y = of(2), Value("y")
    on, off = Value.constant(np.array(True)), Value.constant(np.array([False]))

    assert [draws_random(node("Dropout", i, [y])) for i in ([x], [x, None, off], [x, None, on], [x, None, of()])] == [
        False, False, True, True
    ]  # fmt: skip
    assert not is_deterministic(node("Dropout", [x, None, on], [y]))
    assert is_deterministic(node("Dropout", [x, None, on], [y], seed=1))
    assert draws_random(node("Dropout", [x, None, on], [y], seed=1))


def test_subgraphs_count() -> None:
    """A node draws if a node of its bodies does."""
    x, y = of(2), Value("y")
    condition = Value.constant(np.array(True))
    for attributes, same in (({}, False), ({"seed": 1.0}, True)):
        body = graph_of([], [y], [node("Bernoulli", [x], [y], **attributes)])
        made = node("If", [condition], [Value()], then_branch=body, else_branch=body)
        assert draws_random(made)
        assert is_deterministic(made) is same


def test_a_scatter_that_adds_rounds() -> None:
    """The attribute `reduction` decides."""
    x, i, y = of(3), of(1, dtype=np.int64), Value()

    assert is_exact(node("ScatterElements", [x, i, of(1)], [y]))
    assert is_exact(node("ScatterElements", [x, i, of(1)], [y], reduction="max"))
    assert not is_exact(node("ScatterElements", [x, i, of(1)], [y], reduction="add"))


def test_where_results_jump() -> None:
    """A Cast jumps unless it gives floats; MaxPool's values do not jump, its indices do."""
    x, indices = of(1, 1, 4), of(1, 1, 4, dtype=np.int64)

    assert is_discontinuous(node("Cast", [x], [of(2, dtype=np.int32)], to=6))
    assert is_discontinuous(node("Cast", [x], [of(2, dtype=np.bool_)], to=9))
    assert not is_discontinuous(node("Cast", [x], [of(2, dtype=np.float16)], to=10))
    assert not is_discontinuous(node("MaxPool", [x], [of(1, 1, 4)], kernel_shape=(1,)))
    assert is_discontinuous(node("MaxPool", [x], [of(1, 1, 4), indices], kernel_shape=(1,)))


# --- differences that were decided ---

DECISIONS: Final = (
    ("Dropout", "random", True, "verify and xla listed it, folding and the kit did not; its mode decides by node"),
    ("RandomNormal", "random", True, "xla left it out: it has no input, which is no reason"),
    ("Transpose", "view", True, "of both tables"),
    ("Shape", "view", False, "cost_model listed it; it reads no element, and its result is an array of its own"),
    ("Shape", "shape_query", True, "so cost_model asks for this"),
    ("GatherND", "shape_arithmetic", True, "tracing had it, specialisation did not; it gathers as Gather does"),
    ("Transpose", "shape_arithmetic", True, "specialisation had it, tracing did not; it moves elements"),
    ("ReduceMax", "shape_arithmetic", True, "specialisation had it, tracing did not; of integers it is exact"),
    ("EyeLike", "grows", False, "its result has the shape of its input"),
    ("ImageDecoder", "grows", True, "a few bytes may hold a large image"),
    ("Range", "exact", False, "start + i * delta is rounded; verify held it to be exact"),
    ("Equal", "exact", True, "verify left it out; it compares, and rounds nothing"),
    ("TopK", "exact", True, "it gives elements that came in"),
    ("Floor", "exact", True, "a whole number near a float is a float"),
    ("GlobalLpPool", "sums", True, "verify had the other norms and means"),
    ("AveragePool", "contraction", False, "what it sums is not multiplied by another input"),
    ("Mul", "contraction", False, "nothing is summed"),
    ("NonZero", "discontinuous", True, "verify left it out; so it jumps at zero"),
    ("OneHot", "discontinuous", True, "its indices may be floats, which are truncated"),
    ("QLinearMatMul", "discontinuous", True, "it rounds to integers, as QuantizeLinear does"),
    ("QLinearConv", "discontinuous", True, "it rounds to integers, as QuantizeLinear does"),
    ("BitCast", "cast", True, "verify and the kit had it among dtypes, mixed precision did not"),
    ("BitCast", "view", True, "neither table had it; the host gives the same memory"),
    ("DynamicQuantizeLinear", "quantizes", True, "verify had it among dtypes, mixed precision did not"),
    ("Trilu", "moves_elements", True, "mixed precision said it moves, flops counted it"),
    ("Compress", "moves_elements", True, "mixed precision said it moves, flops counted it"),
    ("ReverseSequence", "moves_elements", True, "mixed precision said it moves, flops counted it"),
    ("CenterCropPad", "moves_elements", True, "tensorrt's table had it, flops counted it"),
    ("NonZero", "moves_elements", False, "flops took it to move data; it compares each element with zero"),
    ("NonZero", "fills", False, "what it gives depends on the data"),
    ("DynamicQuantizeLinear", "piecewise_constant", False, "its scale varies; training takes it as constant"),
    ("Unique", "piecewise_constant", False, "its values vary; training takes it as constant"),
)


@pytest.mark.parametrize(("op", "trait", "has", "why"), DECISIONS)
def test_where_tables_disagreed(op: str, trait: str, has: bool, why: str) -> None:
    """What the ONNX specification says of an operator that tables saw differently."""
    assert getattr(find_traits(op), trait) is has, why


def test_binarizer_is_of_its_own_domain() -> None:
    """Training registered it for ONNX's own domain, which has none: its gradient was an error."""
    from xrt_core.training.registry import is_constant

    assert is_constant("ai.onnx.ml", "Binarizer")
    assert not is_constant("", "Binarizer")


def test_a_name_of_another_domain_has_no_traits() -> None:
    """Tables that went by names alone took it for ONNX's."""
    assert traits_of(Node("Transpose", [], [], domain="com.example", version=1)) is NO_TRAITS
    assert is_deterministic(Node("Bernoulli", [], [], domain="com.example", version=1))


def test_shapes_of_the_ml_domain() -> None:
    """The tracer's rule for operators of which onnx infers dtypes alone is one of inference."""
    for op, attributes in (("Imputer", {"imputed_value_floats": (1.0,)}), ("Normalizer", {}), ("Scaler", {})):
        n = Node(op, [of(2, 3)], [Value()], attributes, domain="ai.onnx.ml", version=1)
        assert infer_types(n) == (TensorType(F32, (2, 3)),)


# --- plugins ---


def test_a_plugin_adds_rows_for_its_domain() -> None:
    """Rows hold until they are taken out, and a row of one domain says nothing of others."""
    fused = Node("BiasGelu", [], [], domain="com.example", version=1)
    register_traits("com.example", {"BiasGelu": Traits(elementwise=True)}, by="xrt-example")
    try:
        assert traits_of(fused).elementwise
        assert operators_with("elementwise", "com.example") == {"BiasGelu"}
        assert "BiasGelu" not in operators_with("elementwise")
        with pytest.raises(RegistrationError, match=r"com\.example\.BiasGelu .* by xrt-example and by another"):
            register_traits("com.example", {"New": Traits(), "BiasGelu": Traits()}, by="another")
        assert ("com.example", "New") not in known_traits()
    finally:
        unregister_traits("com.example", ["BiasGelu"])
    assert traits_of(fused) is NO_TRAITS


def test_rows_of_the_core_stay() -> None:
    """A plugin neither replaces nor removes them."""
    with pytest.raises(RegistrationError, match=r"ai\.onnx\.Relu .* by xrt_core\.ir\.op_traits and by me"):
        register_traits("", {"Relu": Traits()}, by="me")
    with pytest.raises(RegistrationError, match=r"no plugin registered traits of ai\.onnx\.Relu"):
        unregister_traits("", ["Relu"])
    with pytest.raises(GraphError, match="no trait 'fast'; known: moves_elements, view"):
        operators_with("fast")
    assert find_traits("Relu").elementwise


# --- what stays elsewhere ---

ELSEWHERE: Final = {
    "xrt_core/passes/sharding/rules.py": "along which axes an operator may be split over devices",
    "xrt_core/compiler/support.py": "control flow, which engines are asked for whole",
    "xrt_core/engine/onnx_versions.py": "what a version of an operator changed",
    "xrt_core/frontends/tensor.py": "what NumPy's operators are in ONNX for bool",
    "xrt_core/generation/decoder.py": "operators that may read what a mask of tokens leaves out",
    "xrt_core/ir/attribute_limits.py": "what operators allow as attributes",
    "xrt_core/ir/ml_limits.py": "what operators of ai.onnx.ml allow as attributes, and which take a matrix",
    "xrt_core/passes/mixed_precision.py": "IsInf and IsNaN, which the pass leaves alone",
    "xrt_core/passes/mixed_precision_ops.py": "the policy of mixed precision: what gains or loses in a narrow float",
    "xrt_core/passes/padding/rows.py": "operators that move the number of a row, or look up what belongs to it",
    "xrt_core/passes/padding/rules.py": "how padding passes operators: rules that are one for several",
    "xrt_core/passes/padding/walk.py": "operators that read sizes, or whose padding is masked",
    "xrt_core/passes/partitioning/cost_model.py": "formulas of products, by the operands they read",
    "xrt_core/passes/symbolic_dims.py": "what operators make of symbolic dimensions",
    "xrt_core/passes/symbolic_shapes.py": "operators that are simpler where sizes are known",
    "xrt_core/quantization/calibration.py": "the policy of quantisation: products that engines have in int8",
    "xrt_core/runtime/memory_planner.py": "what NumPy copies: a regrouping of elements that do not lie in a row",
    "xrt_core/passes/counted_loops.py": "comparisons that end a loop, and which way round they are",
    "xrt_core/passes/loop_invariants.py": "which loops have states, and where",
    "xrt_core/passes/symbolic_ranges.py": "operators that take elements of the first input into other columns",
    "xrt_core/runtime/index_origins.py": "what elements of an index are made of, and the range of what is computed",
    "xrt_core/runtime/input_checks.py": "how indices of operators are bounded",
    "xrt_core/testing/operator_table.py": "cases that are generated for operators",
    "xrt_core/testing/operator_tests.py": "the kit's tolerances: sums that may cancel, and sums that cannot",
    "xrt_core/training/checks.py": "how operators read their second input",
    "xrt_core/training/variables.py": "the inputs in which operators read what models learn",
    "xrt_core/training/residuals.py": "operators that are computed again in a backward pass rather than stored",
    "xrt_core/training/rules/sequence.py": "operators on sequences that have gradients",
    "xrt_core/testing/fuzz.py": "exponentials, whose overflow the fuzzer does not compare",
    "xrt_core/training/rules/constant.py": "operators that vary and that training takes as constant",
    "xrt_core/verify/reference.py": "operators that interpolate between pixels",
    "xrt_core/verify/checker.py": "the policy of tolerances: operators that libraries round at the scale of 1",
    "plugins/xrt-contrib/src/xrt_contrib/activation.py": "the activations that it lowers",
    "plugins/xrt-onnxruntime/src/xrt_onnxruntime/deviations.py": "divisions, which end the process",
    "plugins/xrt-onnxruntime/src/xrt_onnxruntime/__init__.py": "what raises where an index is out of range",
    "plugins/xrt-onnxruntime/src/xrt_onnxruntime/integer_products.py": "what has kernels for uint8 alone",
    "plugins/xrt-openvino/src/xrt_openvino/deviations.py": "what the library computes as ONNX says",
    "plugins/xrt-tensorrt/src/xrt_tensorrt/carrying.py": "what the library computes in a float32 that carries uint8",
    "plugins/xrt-tensorrt/src/xrt_tensorrt/deviations.py": "what the library reads, builds and multiplies",
    "plugins/xrt-toy/src/xrt_toy/kernels/reduction.py": "the kernels that it has",
    "plugins/xrt-xla/src/xrt_xla/__init__.py": "what was tried on integers of two bits",
    "plugins/xrt-xla/src/xrt_xla/channels_last.py": "operators whose kernels of the engine take channels last",
    "plugins/xrt-xla/src/xrt_xla/program.py": "products, whose operands XLA does not fuse with them",
}


def test_no_other_module_has_a_table_of_operators() -> None:
    """A set of operators outside the table of traits is listed above with its reason, and no line is stale."""
    names = {s.name for s in onnx.defs.get_all_schemas_with_history()} | set(dialect())
    found = set()
    for path in (*ROOT.glob("xrt_core/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")):
        if path.name != "op_traits.py" and any(_operators(path.read_text(encoding="utf-8"), names)):
            found.add(path.relative_to(ROOT).as_posix())

    assert found == set(ELSEWHERE)


def _operators(text: str, names: set[str]) -> Iterator[int]:
    """Lines of sets, and tuples that are assigned or searched, with two operators or more."""
    tree = ast.parse(text)
    for n in ast.walk(tree):
        held: list[ast.expr] = []
        if isinstance(n, ast.Set):
            held = n.elts
        elif isinstance(n, ast.Compare) and isinstance(n.comparators[-1], ast.Tuple):
            held = n.comparators[-1].elts
        elif isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == "frozenset" and n.args:
            held = getattr(n.args[0], "elts", [])
        elif isinstance(n, ast.Assign | ast.AnnAssign) and isinstance(n.value, ast.Tuple):
            held = n.value.elts
        if sum(isinstance(e, ast.Constant) and e.value in names for e in held) >= 2:
            yield n.lineno


def test_the_scan_finds_tables() -> None:
    """The test above sees each way of writing one."""
    names = {"Add", "Mul"}
    both = '("Add", "Mul")'
    for text in (f"A: Final = {both}", f"A = frozenset({both})", 'A = {"Add", "Mul"}', f"A = {both}", f"x in {both}"):
        assert 1 in _operators(text, names), text
    assert not list(_operators('f("Add", "Mul")', names))

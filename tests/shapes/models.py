"""Small models whose shapes vary, with the shape arithmetic that exporters write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


class Builder:
    """Nodes and weights of an ONNX graph of opset 17, named by numbers."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.weights: list[Any] = []
        self._rng = np.random.default_rng(0)

    def op(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, [name], name=f"{op_type}_{len(self.nodes)}", **attributes))
        return name

    def constant(self, array: Any, dtype: Any = np.int64) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(array, dtype), name))
        return name

    def weight(self, *shape: int) -> str:
        return self.constant(self._rng.standard_normal(shape) * 0.3, np.float32)

    def size(self, x: str, axis: int) -> str:
        scalar = self.op("Gather", self.op("Shape", x), self.constant(axis), axis=0)
        return self.op("Unsqueeze", scalar, self.constant([0]))

    def model(self, inputs: Sequence[tuple[str, int, Sequence[Any]]], outputs: Sequence[str]) -> bytes:
        ins = [helper.make_tensor_value_info(n, t, s) for n, t, s in inputs]
        outs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [None, None]) for n in outputs]
        graph = helper.make_graph(self.nodes, "varying", ins, outs, self.weights)
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        onnx.checker.check_model(made)
        return made.SerializeToString()


def attention(names: Sequence[Any] = ("batch", "length"), width: int = 16, heads: int = 2, most: int = 24) -> bytes:
    """Embedding, positions, an attention with a mask, a pooled mean: ids and mask [batch, length] -> [batch, width]."""
    b = Builder()
    batch, length = b.size("ids", 0), b.size("ids", 1)
    at = b.op("Slice", b.constant(np.arange(most)[None]), b.constant([0]), length, b.constant([1]))
    x = b.op("Add", b.op("Gather", b.weight(50, width), "ids"), b.op("Gather", b.weight(most, width), at))
    bias = b.op("Cast", b.op("Unsqueeze", "mask", b.constant([1, 2])), to=TensorProto.FLOAT)
    bias = b.op("Mul", b.op("Sub", b.constant(1.0, np.float32), bias), b.constant(-1e4, np.float32))
    split = b.op("Concat", batch, length, b.constant([heads]), b.constant([width // heads]), axis=0)
    q, k, v = (
        b.op("Transpose", b.op("Reshape", b.op("MatMul", x, b.weight(width, width)), split), perm=perm)
        for perm in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3])
    )
    weights = b.op("Softmax", b.op("Add", b.op("MatMul", q, k), bias), axis=-1)
    merged = b.op("Concat", batch, length, b.constant([width]), axis=0)
    x = b.op("Reshape", b.op("Transpose", b.op("MatMul", weights, v), perm=[0, 2, 1, 3]), merged)
    b.nodes.append(helper.make_node("ReduceMean", [x], ["y"], axes=[1], keepdims=0))
    return b.model([("ids", TensorProto.INT64, names), ("mask", TensorProto.INT64, names)], ["y"])


def pixels(names: Sequence[Any] = (1, 3, "height", "width")) -> bytes:
    """Convolution, pooling, an image of twice the size, concatenation and a flattened head: an image -> [1, 4]."""
    b = Builder()
    x = b.op("Relu", b.op("Conv", "x", b.weight(4, 3, 3, 3), strides=[2, 2], pads=[1, 1, 1, 1]))
    half = b.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
    up = b.op("Resize", half, "", b.constant([1, 1, 2, 2], np.float32), mode="nearest")
    cut = b.op("Slice", x, b.constant([0, 0]), b.op("Slice", b.op("Shape", up), b.constant([2]), b.constant([4])),
               b.constant([2, 3]))  # fmt: skip
    both = b.op("Concat", cut, up, axis=1)
    flat = b.op("Reshape", both, b.constant([1, 8, -1]))
    mean = b.op("ReduceMean", flat, axes=[2], keepdims=0)
    b.nodes.append(helper.make_node("MatMul", [mean, b.weight(8, 4)], ["y"]))
    return b.model([("x", TensorProto.FLOAT, names)], ["y"])


def tokens(b: int, n: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Inputs of `attention`."""
    rng = np.random.default_rng(seed)
    mask = (np.arange(n) < rng.integers(1, n + 1, (b, 1))).astype(np.int64)
    return {"ids": rng.integers(0, 50, (b, n)), "mask": mask}


def read_by_number() -> bytes:
    """x [batch, n] times the first n columns of mask [batch, total], read by their numbers in the flat mask, as
    exporters write it for decoders."""
    b = Builder()
    zero, one = b.constant(0), b.constant(1)
    rows, columns = (b.op("Gather", b.op("Shape", "x"), b.constant(axis), axis=0) for axis in (0, 1))
    total = b.op("Gather", b.op("Shape", "mask"), one, axis=0)
    row = b.op("Unsqueeze", b.op("Range", zero, rows, one), b.constant([1]))
    at = b.op("Add", b.op("Mul", row, total), b.op("Range", zero, columns, one))
    flat = b.op("Reshape", "mask", b.constant([-1]))
    y = b.op("Mul", b.op("Exp", "x"), b.op("Gather", flat, at))
    return b.model([("x", TensorProto.FLOAT, ("batch", "n")), ("mask", TensorProto.FLOAT, ("batch", "total"))], [y])


def framed() -> bytes:
    """x [batch, n] mirrored at its ends by 4, in frames of 8 at every third place, by computed indices."""
    b = Builder()
    zero, one, four = b.constant(0), b.constant(1), b.constant(4)
    n = b.op("Gather", b.op("Shape", "x"), one, axis=0)
    last = b.op("Sub", n, one)
    places = b.op("Abs", b.op("Range", b.op("Neg", four), b.op("Add", n, four), one))
    mirrored = b.op("Gather", "x", b.op("Sub", last, b.op("Abs", b.op("Sub", last, places))), axis=1)
    ends = b.op("Sub", b.op("Gather", b.op("Shape", mirrored), one, axis=0), b.constant(7))
    starts = b.op("Unsqueeze", b.op("Range", zero, ends, b.constant(3)), b.constant([1]))
    y = b.op("Gather", mirrored, b.op("Add", starts, b.constant(np.arange(8))), axis=1)
    return b.model([("x", TensorProto.FLOAT, ("batch", "n"))], [b.op("Exp", y)])


def masked(written: bool = False) -> bytes:
    """x [s0, s1] times mask [s2, s3], of the same sizes, read by row and column, as torch's exporter writes attention
    masks: the mask has names of its own, and its length is what is left of its elements. written: mask is written into
    zeros by the same numbers instead."""
    b = Builder()
    zero, one, both = b.constant(0), b.constant(1), b.constant([0])
    others, columns = (b.op("Gather", b.op("Shape", "mask"), b.constant(axis), axis=0) for axis in (0, 1))
    rows = b.op("Gather", b.op("Shape", "x"), zero, axis=0)
    length = b.op("Div", b.op("Mul", others, columns), rows)
    flat = b.op("Reshape", "mask", b.op("Concat", b.op("Unsqueeze", rows, both), b.constant([-1]), axis=0))
    row = b.op("Unsqueeze", b.op("Range", zero, rows, one), b.constant([1]))
    column = b.op("Unsqueeze", b.op("Range", zero, length, one), both)
    shape = b.op("Shape", b.op("Max", row, column))
    at = [b.op("Unsqueeze", b.op("Expand", x, shape), b.constant([-1])) for x in (row, column)]
    index = b.op("Concat", *at, axis=-1)
    if written:
        zeros = b.op("Mul", flat, b.constant(0, np.float32))
        found = b.op("ScatterND", zeros, index, flat)
    else:
        found = b.op("GatherND", flat, index)
    y = b.op("Mul", b.op("Exp", "x"), found)
    return b.model([("x", TensorProto.FLOAT, ("s0", "s1")), ("mask", TensorProto.FLOAT, ("s2", "s3"))], [y])


def positioned(most: int = 12) -> bytes:
    """x [batch, n, 4] plus embeddings of positions, counted where ids [batch, n] are no padding, as in RoBERTa."""
    b = Builder()
    there = b.op("Cast", b.op("Not", b.op("Equal", "ids", b.constant(1))), to=TensorProto.INT32)
    counted = b.op("Mul", b.op("CumSum", there, b.constant(1)), there)
    at = b.op("Add", b.op("Cast", counted, to=TensorProto.INT64), b.constant(1))
    rows = b.op("Add", "x", b.op("Gather", b.weight(most, 4), at))
    picked = b.op("Gather", rows, b.op("ArgMax", "ids", axis=1, keepdims=0), axis=1)
    y = b.op("ReduceSum", picked, b.constant([1]), keepdims=0)
    return b.model([("x", TensorProto.FLOAT, ("batch", "n", 4)), ("ids", TensorProto.INT64, ("batch", "n"))], [y])


def found_by_data(read: bool = False) -> bytes:
    """x [n, m] -> a product with the places of its elements that are not zero [3, how many]; read: these elements."""
    b = Builder()
    places = b.op("NonZero", "x")
    if read:
        found = b.op("Relu", b.op("GatherND", "x", b.op("Transpose", places)))
    else:
        found = b.op("Relu", b.op("MatMul", b.weight(3, 2), b.op("Cast", places, to=TensorProto.FLOAT)))
    return b.model([("x", TensorProto.FLOAT, ["n", "m"])], [found])


def sized_by_data() -> bytes:
    """x [n, m] -> for each of its k elements that are not zero m numbers: in the part that is planned when k is known,
    shapes are made of m, and of k as the shape of another tensor has it."""
    b = Builder()
    places = b.op("Cast", b.op("NonZero", "x"), to=TensorProto.FLOAT)
    product = b.op("MatMul", b.weight(3, 2), places)
    total = b.op("ReduceSum", product, b.constant([1]), keepdims=1)
    wide = b.op("Expand", total, b.op("Concat", b.constant([3]), b.size("x", 1), axis=0))
    rows = b.op("Reshape", product, b.op("Concat", b.size(places, 1), b.constant([-1]), axis=0))
    return b.model([("x", TensorProto.FLOAT, ["n", "m"])], [b.op("MatMul", rows, wide)])


def grown() -> bytes:
    """times [], x [n, 4] -> x with a row of ones appended so many times."""
    row = numpy_helper.from_array(np.ones((1, 4), np.float32), "row")
    step = [
        helper.make_node("Concat", ["before", "row"], ["more"], axis=0),
        helper.make_node("Relu", ["more"], ["after"]),
        helper.make_node("Identity", ["go"], ["on"]),
    ]
    ports = [("turn", TensorProto.INT64, []), ("go", TensorProto.BOOL, []), ("before", TensorProto.FLOAT, ["k", 4])]
    ends = [("on", TensorProto.BOOL, []), ("after", TensorProto.FLOAT, ["l", 4])]
    body = helper.make_graph(
        step, "body", *[[helper.make_tensor_value_info(*p) for p in side] for side in (ports, ends)], [row]
    )
    b = Builder()
    b.nodes.append(helper.make_node("Loop", ["times", "", "x"], ["y"], name="Loop", body=body))
    return b.model([("times", TensorProto.INT64, []), ("x", TensorProto.FLOAT, ["n", 4])], ["y"])


def _body(nodes: Sequence[Any], ports: Sequence[tuple[str, int]], ends: Sequence[tuple[str, int]]) -> Any:
    """A body that declares no shapes but those of what counts its turns."""
    inputs, outputs = (
        [helper.make_tensor_value_info(n, t, None if t == TensorProto.FLOAT else []) for n, t in side]
        for side in (ports, ends)
    )
    return helper.make_graph(nodes, "body", inputs, outputs)


def decoder(marked: bool = False) -> bytes:
    """x [n, b, 4] -> y [b, n, 4]: a recurrent decoder as scripts are exported, in a Loop over the first axis that looks
    at all of x, and appends its state to a list at every turn. marked: the number of turns is the host's."""
    make, floats = helper.make_node, TensorProto.FLOAT
    b = Builder()
    n = b.op("Squeeze", b.op("Shape", "x", end=1))
    if marked:
        entry = b.nodes[-1].metadata_props.add()
        entry.key, entry.value = "xrt.mark", "host"
    zeros = b.op("ConstantOfShape", b.op("Shape", "x", start=1))
    steps = [
        make("Gather", ["x", "i"], ["xi"]),
        make("MatMul", ["s", b.weight(4, 4)], ["w"]),
        make("Softmax", ["x"], ["look"], axis=0),
        make("ReduceSum", ["look", b.constant([0])], ["seen"], keepdims=0),
        make("Sum", ["w", "xi", "seen"], ["sum"]),
        make("Tanh", ["sum"], ["s2"]),
        make("SequenceInsert", ["l", "s2"], ["l2"]),
        make("Identity", ["go"], ["on"]),
    ]
    ports = [("i", TensorProto.INT64), ("go", TensorProto.BOOL), ("s", floats)]
    body = _body(steps, ports, [("on", TensorProto.BOOL), ("s2", floats)])
    for side, name in ((body.input, "l"), (body.output, "l2")):
        side.append(helper.make_tensor_sequence_value_info(name, floats, None))
    b.nodes += [
        make("SequenceEmpty", [], ["l0"]),
        make("Loop", [n, b.constant(True, np.bool_), zeros, "l0"], ["last", "lists"], name="turns", body=body),
        make("ConcatFromSequence", ["lists"], ["y"], axis=1, new_axis=1),
    ]
    return b.model([("x", floats, ["n", "b", 4])], ["y"])


def scanned() -> bytes:
    """x [n, b, 4] -> its sums from the front on, where the sum of x is positive, and else from the back."""
    make, floats = helper.make_node, TensorProto.FLOAT
    b = Builder()
    zeros = b.op("ConstantOfShape", b.op("Shape", "x", start=1))
    step = [make("Add", ["s", "xi"], ["s2"]), make("Tanh", ["s2"], ["yi"])]
    ways = []
    for direction in (0, 1):
        inner = _body(step, [("s", floats), ("xi", floats)], [("s2", floats), ("yi", floats)])
        out = f"y{direction}"
        scan = make("Scan", [zeros, "x"], ["", out], body=inner, num_scan_inputs=1, scan_input_directions=[direction])
        ways.append(_body([scan], [], [(out, floats)]))
    test = b.op("Greater", b.op("ReduceSum", "x", keepdims=0), b.constant(0.0, np.float32))
    b.nodes.append(make("If", [test], ["y"], name="way", then_branch=ways[0], else_branch=ways[1]))
    return b.model([("x", floats, ["n", "b", 4])], ["y"])


def expanded() -> bytes:
    """x [n, b, 4] -> y of the same shape: engines have both ends, one of which tells the other the shape, and the host
    has what lies between."""
    b = Builder()
    shape = b.op("Shape", "x")
    x = b.op("Add", b.op("MatMul", "x", b.weight(4, 4)), b.op("ConstantOfShape", shape))
    for op in 4 * ("Tanh", "Sin"):
        x = b.op(op, x)
    x = b.op("Erf", x)
    entry = b.nodes[-1].metadata_props.add()
    entry.key, entry.value = "xrt.mark", "host"
    x = b.op("Expand", b.op("ReduceSum", x, b.constant([0])), shape)
    for op in 4 * ("Tanh", "Sin"):
        x = b.op(op, x)
    b.nodes.append(helper.make_node("MatMul", [x, b.weight(4, 4)], ["y"]))
    return b.model([("x", TensorProto.FLOAT, ["n", "b", 4])], ["y"])


def detector() -> bytes:
    """image [3, height, width] -> the best boxes [how many, 4], as exporters write detectors: the image is brought to a
    side of 24 by a computed scale, the best places of a map, at most 20, are boxes, and those that overlap go."""
    b = Builder()
    floats, one = TensorProto.FLOAT, b.constant([1])
    sides = b.op("Slice", b.op("Shape", "image"), one, b.constant([3]))
    scale = b.op("Div", b.constant([24.0], np.float32), b.op("ReduceMin", b.op("Cast", sides, to=floats), keepdims=1))
    target = b.op("Cast", b.op("Floor", b.op("Mul", b.op("Cast", sides, to=floats), scale)), to=TensorProto.INT64)
    batch = b.op("Unsqueeze", "image", b.constant([0]))
    sizes = b.op("Concat", b.constant([1, 3]), target, axis=0)
    x = b.op("Resize", batch, "", "", sizes, mode="linear", coordinate_transformation_mode="half_pixel")
    x = b.op("Relu", b.op("Conv", x, b.weight(8, 3, 3, 3), strides=[2, 2], pads=[1, 1, 1, 1]))
    x = b.op("Conv", x, b.weight(5, 8, 3, 3), strides=[2, 2], pads=[1, 1, 1, 1])
    cells = b.op("Slice", b.op("Shape", x), b.constant([2]), b.constant([4]))
    split = b.op("Reshape", x, b.op("Concat", b.constant([-1]), cells, axis=0))
    found = b.op("Transpose", b.op("Reshape", split, b.constant([5, -1])), perm=[1, 0])
    score = b.op("Slice", found, b.constant([0]), one, one)
    flat = b.op("Reshape", score, b.constant([-1]))
    best = b.op("ReduceMin", b.op("Concat", b.constant([20]), b.op("Shape", flat), axis=0), keepdims=1)
    values, places = b.op("TopK", flat, best), "places"
    b.nodes[-1].output.append(places)
    boxes = b.op("Gather", b.op("Slice", found, one, b.constant([5]), one), places)
    kept = b.op(
        "NonMaxSuppression", b.op("Unsqueeze", boxes, b.constant([0])),
        b.op("Unsqueeze", values, b.constant([0, 1])), b.constant([50]), b.constant(0.5, np.float32),
    )  # fmt: skip
    index = b.op("Squeeze", b.op("Slice", kept, b.constant([2]), b.constant([3]), one), one)
    b.nodes.append(helper.make_node("Gather", [boxes, index], ["y"]))
    return b.model([("image", floats, [3, "height", "width"])], ["y"])

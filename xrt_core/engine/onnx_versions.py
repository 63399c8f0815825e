"""Versions of operators: nodes of a Function in the versions of one opset that a library of ONNX models knows.

`aligned`: of nodes of several opsets, which passes make, the older ones in newer versions. `lowered_to`: of a library
that does not know the newest opset, the newer ones in older versions, where that is another name for the same, or as
the operators that the standard, or its version converter, makes them of.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import numpy as np

from xrt_core.errors import CompileError, XRTError
from xrt_core.ir.function import Function
from xrt_core.ir.graph import Graph, Node, Value, every_node, substitute
from xrt_core.ir.schema import find_schema

_NEW_ATTRIBUTES: Final = {
    "Attention": ("left_window_size", "right_window_size"),
    "Cast": ("saturate", "round_mode"),
    "CastLike": ("saturate", "round_mode"),
    "QuantizeLinear": ("saturate", "block_size", "output_dtype", "precision"),
    "DequantizeLinear": ("block_size", "output_dtype"),
    "Range": ("stash_type",),
    **dict.fromkeys(("ArgMax", "ArgMin"), ("select_last_index",)),
    "AveragePool": ("dilations", "ceil_mode", "count_include_pad"),
    "BatchNormalization": ("training_mode",),
    "DepthToSpace": ("mode",),
    "GatherND": ("batch_dims",),
    "LpPool": ("dilations", "ceil_mode"),
    "MaxPool": ("dilations", "ceil_mode", "storage_order"),
    "Reshape": ("allowzero",),
    "Resize": ("antialias", "axes", "keep_aspect_ratio_policy"),
    **dict.fromkeys(("GRU", "LSTM", "RNN"), ("layout",)),
    "Shape": ("start", "end"),
    "SpaceToDepth": ("mode",),
    **dict.fromkeys(("ScatterElements", "ScatterND"), ("reduction",)),
    "TopK": ("largest", "sorted"),
}
"""Attributes that later versions added, whose default is what earlier ones did, or in 16 bits is more precise."""

_REDUCTIONS: Final = (
    "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd",
    "ReduceSumSquare",
)  # fmt: skip
_INPUT_SINCE: Final = {
    **dict.fromkeys(("ReduceSum", "Squeeze", "Unsqueeze"), ("axes", 13)),
    **dict.fromkeys(_REDUCTIONS, ("axes", 18)),
    "Split": ("split", 13),
}
"""Attributes that are the second input from a version on."""
_INPUTS_SINCE: Final = {
    **{op: (since, (name,)) for op, (name, since) in _INPUT_SINCE.items()},
    "Clip": (11, ("min", "max")),
    "Dropout": (12, ("ratio",)),
    "Pad": (11, ("pads", "value")),
    "Slice": (10, ("starts", "ends", "axes")),
    "TopK": (10, ("k",)),
    "Upsample": (9, ("scales",)),
}
"""Attributes that are inputs behind the first one from a version on."""
_ADDED: Final = {
    **_NEW_ATTRIBUTES,
    "DequantizeLinear": (*_NEW_ATTRIBUTES["DequantizeLinear"], "axis"),
    "Dropout": ("seed",),
    "QuantizeLinear": (*_NEW_ATTRIBUTES["QuantizeLinear"], "axis"),
    **dict.fromkeys(("ReduceSum", *_REDUCTIONS), ("noop_with_empty_axes",)),
    "RoiAlign": ("coordinate_transformation_mode",),
    "Split": ("num_outputs",),
}
"""Attributes that later versions have as well; what is not the default then is given (`_ATTRIBUTES_SINCE`)."""
_ATTRIBUTES_SINCE: Final = {
    "Resize": (11, {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}),
    "RoiAlign": (16, {"coordinate_transformation_mode": "output_half_pixel"}),
}
"""What versions before this one did without an attribute."""
_SUCCESSORS: Final = {"Scatter": "ScatterElements", "Upsample": "Resize"}
"""Operators under which later opsets have these."""
_ONE_AXIS_SINCE: Final = dict.fromkeys(("Hardmax", "LogSoftmax", "Softmax"), 13)
"""Operators that were over all axes from one on, and are over that one from a version on."""


def aligned(function: Function, newest_opset: int | None = None) -> Function:
    """`function` with the standard's nodes in the versions of one opset, that of its newest node, bodies included.

    A node changes its version where the newer one does the same: where it takes more types, or has attributes whose
    default is what the older one did; where attributes became inputs; where the operator has another name; and where
    all the axes that an old Softmax is over are one and others of size 1. `function` itself comes back where its nodes
    are of one opset already, where one of them differs in more, and where the opset would be above `newest_opset`,
    which is the newest that the library knows.
    """
    body = function.body
    opset = body.opsets.get("", 0)
    standard = [n for n in every_node(body) if not n.domain]
    if all(_since(n, opset) == n.version for n in standard):
        return function
    newest = max(n.version for n in standard)
    if newest_opset is not None and newest > newest_opset:
        return function
    made = _aligned_graph(body, newest)
    if made is None:
        return function
    return Function(function.name, function.params, function.returns, made, function.aliases)


def _aligned_graph(graph: Graph, opset: int) -> Graph | None:
    """A graph whose nodes are of an opset; None where one of them has no such version."""
    nodes = []
    for node in graph.nodes:
        if node.attributes and node.subgraphs:
            bodies = {k: _aligned_graph(a, opset) if isinstance(a, Graph) else a for k, a in node.attributes.items()}
            if None in bodies.values():
                return None
            node = node.replace(attributes=bodies)  # type: ignore[arg-type]
        made = node if node.domain or _since(node, opset) == node.version else _of_opset(node, opset)
        if made is None:
            return None
        nodes.append(made)
    return graph.replace(nodes=nodes, opsets={**graph.opsets, "": opset})


def _of_opset(n: Node, opset: int) -> Node | None:
    """The node in the version of a later opset with the same meaning; None where there is none."""
    op = n.op_type
    old, new = schema_of(op, n.version), schema_of(op, opset)
    if old is None or new is None:
        return None
    inputs, attributes = list(n.inputs), dict(n.attributes)
    since, names = _INPUTS_SINCE.get(op, (0, ()))
    moved = names if n.version < since <= new.since_version else ()
    for name in moved:
        given = name in attributes
        if given and (value := _as_input(n, name, attributes.pop(name))) is None:
            return None
        inputs.append(value if given else None)
    while inputs and inputs[-1] is None:
        inputs.pop()
    if new.deprecated:
        op = _SUCCESSORS.get(op, op)
        new = schema_of(op, opset)
        if new is None or new.deprecated:
            return None
    since, made = _ATTRIBUTES_SINCE.get(op, (0, {}))
    if n.version < since <= new.since_version:
        attributes |= made
        if op == "Resize":  # the region of interest came in between
            inputs.insert(1, None)
    if n.version < _ONE_AXIS_SINCE.get(op, 0) <= new.since_version:
        axis = _one_axis(n)
        if axis is None:
            return None
        attributes["axis"] = axis
    elif op == "Resize" and n.version <= 10:
        pass  # what differs is said above
    elif not _continues(n, attributes, moved, old, new):
        return None
    if op == "Split" and n.version < 18 <= new.since_version and len(inputs) < 2:
        attributes["num_outputs"] = len(n.outputs)
    if op == "BatchNormalization":
        attributes.pop("spatial", None)  # it was 1, see `_continues`
    return Node(
        op, inputs, n.outputs, attributes, domain=n.domain, version=int(new.since_version), name=n.name,
        annotations=n.annotations,
    )  # fmt: skip


def _as_input(n: Node, name: str, value: Any) -> Value | None:
    """What was an attribute as a constant input; None where its dtype is not known."""
    x = n.inputs[0]
    if name in ("min", "max", "value"):
        if x is None or x.dtype is None:
            return None
        array = np.array(value, x.dtype)
    elif name in ("ratio", "scales"):
        array = np.array(value, np.float32)
    else:
        array = np.atleast_1d(np.asarray(value, np.int64))
    return Value.constant(array, f"{n.name}/{name}")


def _continues(n: Node, attributes: Mapping[str, Any], moved: Collection[str], old: Any, new: Any) -> bool:
    """Whether an operator's version goes on with what a node of an older one does, but for the `moved` attributes: its
    ports have the same names, its attributes the same types and defaults, and those that it has as well are known."""
    known = _ADDED.get(new.name, ())
    if any(k not in old.attributes and (a.required or k not in known) for k, a in new.attributes.items()):
        return False
    for key, a in old.attributes.items():
        if key in moved or (key == "spatial" and n.attributes.get(key, 1) == 1):
            continue
        own = new.attributes.get(key)
        if own is None and (key in attributes or key not in _WITHOUT):
            return False
        if own is not None and (str(own.type), own.default_value) != (str(a.type), a.default_value):
            return False
        if own is not None and own.required and not a.required and key not in attributes:
            return False
    if any(v is not None for v in n.outputs[1:]) and new.name in ("BatchNormalization", "Dropout"):
        return False  # the further ones are others, or of another type
    given = [p for p, v in zip(old.inputs, n.inputs, strict=False) if v is not None]
    ports = {p.name.removeprefix("input_") for p in new.inputs}
    outputs = zip(old.outputs, new.outputs, n.outputs, strict=False)
    same = all(a.name == b.name for a, b, v in outputs if v is not None)
    return same and all(p.name.removeprefix("input_") in ports for p in given)


_WITHOUT: Final = ("consumed_inputs", "is_test", "output_sequence")
"""Attributes that said nothing of the results."""


def _one_axis(n: Node) -> int | None:
    """The axis that an old Softmax is over, None where it is over several, or its shape is not known."""
    shape = n.inputs[0].shape if n.inputs[0] is not None else None
    axis = n.attributes.get("axis", 1)
    if shape is None or not isinstance(axis, int) or not -len(shape) <= axis < len(shape):
        return None
    axis %= len(shape)
    long = [i for i in range(axis, len(shape)) if shape[i] != 1]
    return None if len(long) > 1 else long[0] if long else axis


def schema_of(op_type: str, opset: int, domain: str = "") -> Any:
    """The `onnx.defs.OpSchema` of an operator in an opset, None where the standard has none there."""
    found = find_schema(op_type, domain, opset)
    return None if found is None else found.onnx


def same_but_types(op_type: str, opset: int, other: int) -> bool:
    """Whether an operator of the standard has the same inputs, outputs and attributes in two opsets."""
    first, second = schema_of(op_type, opset), schema_of(op_type, other)
    if first is None or second is None:
        return False
    return bool(first.since_version == second.since_version) or _form(first) == _form(second)


def _since(node: Node, opset: int) -> int:
    """The version of the node's operator in an opset, 0 where it has none there."""
    schema = schema_of(node.op_type, opset, node.domain)
    return 0 if schema is None else int(schema.since_version)


def _form(schema: Any) -> Any:
    attributes = {
        name: (str(a.type), a.required, a.default_value.SerializeToString())
        for name, a in schema.attributes.items()
        if name not in _NEW_ATTRIBUTES.get(schema.name, ())
    }
    ports = [[(p.name, str(p.option)) for p in side] for side in (schema.inputs, schema.outputs)]
    return attributes, ports


# --- to an older opset ---

_MOST_STEPS: Final = 4  # of operators made of operators


def _is_float_remainder(node: Node) -> bool:
    x = node.inputs[0]
    return x is None or x.dtype is None or (x.dtype.kind not in "iu" and not node.attributes.get("fmod", 0))


_NEW_MEANING: Final = {"Mod": _is_float_remainder}
"""What of an operator's newest version is new in what it computes, and not in its form."""


def lowered_to(function: Function, newest: int) -> Function:
    """`function` with every node of the standard in a version of opset `newest` or an older one, bodies included.

    A newer node takes its older version where the two differ in nothing that it uses; else it is replaced by the body
    that the standard gives it, or by what onnx's version converter makes of it. `function` itself where nothing is
    newer. Raises CompileError, naming the operator, where there is no such form.
    """
    if all(n.domain or n.version <= newest for n in every_node(function.body)):
        return function
    body = _lowered_graph(function.body, newest, {}, _MOST_STEPS)
    opsets = {**body.opsets, "": min(body.opsets.get("", newest), newest)}
    return Function(function.name, function.params, function.returns, body.replace(opsets=opsets), function.aliases)


def as_older(node: Node, newest: int) -> tuple[Node, ...] | None:
    """The nodes that stand for `node` in opset `newest`: itself where it is no newer; None where there is no form."""
    if all(n.domain or n.version <= newest for n in every_node(_around(node))):
        return (node,)
    try:
        return tuple(_lowered_graph(_around(node), newest, {}, _MOST_STEPS).nodes)
    except CompileError:
        return None


def _around(node: Node) -> Graph:
    """A graph of one node."""
    inputs = dict.fromkeys(v for v in node.uses() if v.data is None)
    return Graph(inputs, [v for v in node.outputs if v is not None], [node], opsets={"": node.version}, name="node")


def _lowered_graph(graph: Graph, newest: int, new: dict[Value, Value], steps: int) -> Graph:
    nodes: list[Node] = []
    for old in graph.nodes:
        node = substitute(old, new) if new else old
        if node.attributes and node.subgraphs:
            bodies = {
                k: _lowered_graph(a, newest, dict(new), steps) if isinstance(a, Graph) else a
                for k, a in node.attributes.items()
            }
            node = node.replace(attributes=bodies)
        if node.domain or node.version <= newest:
            nodes.append(node)
            continue
        is_new = _NEW_MEANING.get(node.op_type)
        renames = is_new is None or not is_new(node)
        other = _renamed(node, newest) if renames else None
        if other is not None:
            nodes.append(other)
            continue
        made = _made_of(node, newest, steps)
        if made is None:
            raise CompileError(
                f"node {node.name!r}: {node.operator}-{node.version} has no form in opset {newest}, the newest that "
                f"the library knows"
            )
        given = [v for v in node.inputs if v is not None]
        results = dict(zip(made.outputs, (v for v in node.outputs if v is not None), strict=True))
        inside = dict(zip(made.inputs, given, strict=True))
        owned = {v for n in made.nodes for v in n.outputs if v is not None}
        for made_value, wanted in results.items():
            if made_value not in owned:  # an input or a constant
                new[wanted] = inside.get(made_value, made_value)
        for i, n in enumerate(made.nodes):
            n = substitute(n, inside)
            outs: list[Value | None] = []
            for k, v in enumerate(n.outputs):
                if v is None:
                    outs.append(None)
                else:
                    mine = results.get(v) or Value(f"{node.name or node.op_type}/{i}.{k}", v.type)
                    inside[v] = mine
                    outs.append(mine)
            nodes.append(n.replace(outputs=outs))
    return graph.replace(nodes=nodes, outputs=[new.get(v, v) for v in graph.outputs])


def _renamed(node: Node, newest: int) -> Node | None:
    """The node as the version of its operator in opset `newest`, where that means the same; else None."""
    old, own = schema_of(node.op_type, newest), schema_of(node.op_type, node.version)
    if old is None or own is None:
        return None
    inputs, attributes = list(node.inputs), dict(node.attributes)
    name, since = _INPUT_SINCE.get(node.op_type, ("", 0))
    moved = old.since_version < since <= node.version
    if moved and len(inputs) > 1:
        axes = inputs.pop()
        if axes is not None and (axes.data is None or len(inputs) > 1):
            return None
        if axes is not None and axes.data is not None:
            attributes[name] = tuple(axes.data.reshape(-1).tolist())
        attributes.pop("num_outputs", None)
    if node.op_type in _ONE_AXIS_SINCE and old.since_version < _ONE_AXIS_SINCE[node.op_type] <= node.version:
        x, axis = inputs[0], attributes.get("axis", -1)
        if x is None or x.shape is None or axis not in (-1, len(x.shape) - 1):
            return None
        attributes["axis"] = len(x.shape) - 1
    elif not moved and _form(old) != _form(own):
        return None
    for key in [k for k in attributes if k not in old.attributes]:
        default = own.attributes[key].default_value if key in own.attributes else None
        if default is None or attributes.pop(key) != _default(default):
            return None
    if not _takes_types(old, inputs, node.outputs):
        return None
    return Node(
        node.op_type, inputs, node.outputs, attributes, version=int(old.since_version), name=node.name,
        annotations=node.annotations,
    )  # fmt: skip


def _default(attribute: Any) -> Any:
    """The value of a default, None where there is none."""
    import onnx

    if attribute.type == onnx.AttributeProto.UNDEFINED:
        return None
    found = onnx.helper.get_attribute_value(attribute)
    return found.decode() if isinstance(found, bytes) else found


def _takes_types(schema: Any, inputs: Iterable[Value | None], outputs: Iterable[Value | None]) -> bool:
    """Whether an operator's version has the dtypes of these values."""
    from xrt_core.ir.onnx_proto import type_to_proto

    allowed = {c.type_param_str: set(c.allowed_type_strs) for c in schema.type_constraints}
    for ports, values in ((schema.inputs, inputs), (schema.outputs, outputs)):
        for i, v in enumerate(values):
            if v is None or v.type is None or v.dtype is None:
                continue
            port = ports[min(i, len(ports) - 1)] if ports else None
            names = None if port is None else allowed.get(port.type_str, {port.type_str})
            if names is None or _type_name(type_to_proto(v.type)) not in names:
                return False
    return True


def _type_name(proto: Any) -> str:
    import onnx

    names = onnx.TensorProto.DataType.Name(proto.tensor_type.elem_type).lower()
    return f"tensor({names})"


def _made_of(node: Node, newest: int, steps: int) -> Graph | None:
    """The operators of opset `newest` that `node` is made of, by the standard's body or onnx's version converter."""
    if not steps:
        return None
    from xrt_core.frontends.onnx_functions import function_body

    body = function_body(node)
    if body is not None:
        try:
            return _lowered_graph(body, newest, {}, steps - 1)
        except CompileError:
            pass
    if node.op_type in _NEW_MEANING or (node.attributes and node.subgraphs):
        return None
    return _converted(node, newest)


def _converted(node: Node, newest: int) -> Graph | None:
    """What onnx's version converter makes of a node, None where it knows no way down."""
    from onnx import version_converter

    from xrt_core.frontends.onnx_export import export_model
    from xrt_core.frontends.onnx_import import import_model

    given = [v for v in node.inputs if v is not None]
    fresh = [Value(f"x{i}", v.type) for i, v in enumerate(given)]
    left = iter(fresh)
    inputs = [None if v is None else next(left) for v in node.inputs]
    outputs = [None if v is None else Value(f"y{i}", v.type) for i, v in enumerate(node.outputs)]
    alone = node.replace(inputs=inputs, outputs=outputs)
    graph = Graph(fresh, [v for v in outputs if v is not None], [alone], opsets={"": node.version}, name="node")
    try:
        made = import_model(version_converter.convert_version(export_model(graph), newest))
    except (XRTError, RuntimeError, ValueError):
        return None
    known = all(n.domain or n.version <= newest for n in every_node(made))
    whole = all(k in n.attributes for n in made.nodes if n.op_type == node.op_type for k in node.attributes)
    return made if known and whole and len(made.inputs) == len(given) else None

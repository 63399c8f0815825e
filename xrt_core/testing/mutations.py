"""Mutated models for the fuzzing of engines: structure, attributes, types, weights, domains, opsets, names, functions.

A case is made of its seed and number alone. Most are no valid models any more, which a loader must say; of the others
an engine must give what the host gives, or leave them to the host.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

MOST_ELEMENTS: Final = 100_000
_INTS: Final = (0, 1, -1, 2, 3, -2, 5, 7, 16, 255, 2**31 - 1, 2**31, 2**32, 2**32 + 1, 2**40, 2**63 - 1, -(2**63))
_SMALL: Final = (0, 1, -1, 2, 3, -2, 4, 5, 7)
_FLOATS: Final = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 1e-30, 1e30, 3e38, float("inf"), float("-inf"), float("nan"))
_TEXTS: Final = (
    b"", b"x", b"SAME_UPPER", b"SAME_LOWER", b"linear", b"\xff\xfe", b"NOTSET", b"a" * 5000, b"...->", b"(a*)*",
)  # fmt: skip
_NAMES: Final = ("", "x", "\x1b[31m", "a/../b", "n" * 3000, "üñí", "\x00", "graph", "0", "<script>")
_DOMAINS: Final = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft", "xrt", "ai.onnx.preview.training", "nobody", "\x07")
_OPSETS: Final = (-1, 0, 1, 6, 7, 9, 10, 11, 12, 13, 16, 17, 18, 20, 21, 22, 23, 24, 99, 2**31, 2**62)
_PLACES: Final = (
    "weights.bin", "", "../weights.bin", "/dev/zero", "model.onnx", "nothing", ".", "a\x00b", "weights.bin/x",
)  # fmt: skip


@dataclass
class Case:
    """A model, or a file, with arguments for two calls. kind: the suffix of its file."""

    name: str
    content: bytes
    calls: list[dict[str, np.ndarray]]
    kind: str = "onnx"
    weights: bytes = bytes(64)


@dataclass
class Base:
    """A valid model with arguments."""

    name: str
    model: ModelProto
    inputs: dict[str, np.ndarray]


Mutation = Callable[[ModelProto, Base, random.Random], None]


def _graphs(graph: GraphProto) -> Iterator[Any]:
    """The graph and the bodies in it."""
    yield graph
    for n in graph.node:
        for a in n.attribute:
            if a.type == AttributeProto.GRAPH:
                yield from _graphs(a.g)


def _scope(m: ModelProto, r: random.Random) -> Any:
    """A graph or function with nodes."""
    scopes = [g for g in (*_graphs(m.graph), *m.functions) if g.node]
    return r.choice(scopes) if scopes else m.graph


def _node(m: ModelProto, r: random.Random) -> Any:
    scope = _scope(m, r)
    return r.choice(scope.node) if scope.node else scope.node.add(op_type="Identity", input=["x"], output=["y"])


def _names(scope: Any) -> list[str]:
    inputs = [i if isinstance(i, str) else i.name for i in scope.input]
    return [*inputs, *(o for n in scope.node for o in n.output), *(t.name for t in getattr(scope, "initializer", ()))]


def _drop_node(m: ModelProto, base: Base, r: random.Random) -> None:
    scope = _scope(m, r)
    if scope.node:
        del scope.node[r.randrange(len(scope.node))]


def _double_node(m: ModelProto, base: Base, r: random.Random) -> None:
    scope = _scope(m, r)
    node = NodeProto()
    node.CopyFrom(_node(m, r))
    if r.random() < 0.7:
        old = list(node.output)
        node.output[:] = [f"{o}_again" for o in old]
    scope.node.append(node)


def _swap_nodes(m: ModelProto, base: Base, r: random.Random) -> None:
    scope = _scope(m, r)
    nodes = list(scope.node)
    r.shuffle(nodes)
    del scope.node[:]
    scope.node.extend(nodes)


def _rewire(m: ModelProto, base: Base, r: random.Random) -> None:
    scope = _scope(m, r)
    names = [*_names(scope), *_names(m.graph), "", "nowhere"]
    nodes = [n for n in scope.node if n.input and n.op_type != "Loop"]  # a Loop may then rightly never end
    if nodes:
        node = r.choice(nodes)
        node.input[r.randrange(len(node.input))] = r.choice(names)


def _arity(m: ModelProto, base: Base, r: random.Random) -> None:
    node = _node(m, r)
    if node.op_type == "Loop":
        return
    ports = r.choice((node.input, node.output))
    if ports and r.random() < 0.5:
        del ports[r.randrange(len(ports))]
    elif ports and r.random() < 0.3:
        values = list(ports)
        r.shuffle(values)
        ports[:] = values
    else:
        ports.append(r.choice((*_names(m.graph), "", "more")))


def _operator(m: ModelProto, base: Base, r: random.Random) -> None:
    node = _node(m, r)
    schemas = sorted({s.name for s in onnx.defs.get_all_schemas() if not s.domain} - {"Loop"})
    node.op_type = r.choice((*schemas, *schemas, "Nobody", "", "\x00"))


def _attribute(m: ModelProto, base: Base, r: random.Random) -> None:
    """One of the node's attributes, or of those that its operator has, another value."""
    node = _node(m, r)
    names = [a.name for a in node.attribute if a.type not in (AttributeProto.GRAPH, AttributeProto.GRAPHS)]
    try:
        schema = onnx.defs.get_schema(node.op_type, node.domain)
        known = {n: int(a.type.value) for n, a in schema.attributes.items()}  # type: ignore[attr-defined]
    except onnx.defs.SchemaError:
        known = {}
    chosen = r.choice([*names, *names, *known, "unknown"])
    old = next((a for a in node.attribute if a.name == chosen), None)
    kind = old.type if old is not None else known.get(chosen, AttributeProto.INT)
    value: Any
    if r.random() < 0.1:
        kind = r.choice((1, 2, 3, 6, 7, 8))
    ints = _SMALL if r.random() < 0.6 else _INTS
    if kind in (AttributeProto.INTS, AttributeProto.FLOATS):
        pool: Sequence[Any] = ints if kind == AttributeProto.INTS else _FLOATS
        values = list(old.ints or old.floats) if old is not None else [1, 1]
        if values and r.random() < 0.7:
            values[r.randrange(len(values))] = r.choice(pool)
        else:
            values = [r.choice(pool) for _ in range(r.randrange(1, 7))]
        value = [float(v) for v in values] if kind == AttributeProto.FLOATS else [int(v) for v in values]
    elif kind == AttributeProto.FLOAT:
        value = r.choice(_FLOATS)
    elif kind == AttributeProto.STRING:
        value = r.choice(_TEXTS)
    elif kind == AttributeProto.STRINGS:
        value = [r.choice(_TEXTS) for _ in range(r.randrange(1, 4))]
    elif kind == AttributeProto.TENSOR:
        value = numpy_helper.from_array(_strange(np.ones(r.randrange(0, 3), np.float32), r))
    else:
        value = r.choice(ints)
    if old is not None:
        node.attribute.remove(old)
    if r.random() < 0.9:
        node.attribute.append(helper.make_attribute(chosen, value))


def _type(m: ModelProto, base: Base, r: random.Random) -> None:
    """The declared type of a value."""
    graph = r.choice(list(_graphs(m.graph)))
    infos = [*graph.input, *graph.output, *graph.value_info]
    if not infos:
        return
    t = r.choice(infos).type
    kind = r.randrange(5)
    if kind == 0:
        t.tensor_type.elem_type = r.choice((*range(26), 99))
    elif kind == 1:
        t.Clear()
    elif kind == 2:
        t.tensor_type.ClearField("shape")
    elif kind == 3 and t.tensor_type.shape.dim:
        d = r.choice(t.tensor_type.shape.dim)
        if r.random() < 0.6:
            d.dim_value = r.choice(_INTS)
        else:
            d.dim_param = r.choice((*_NAMES, "n"))
    elif t.HasField("tensor_type"):
        t.tensor_type.shape.dim.add(dim_value=r.choice(_SMALL))


def _symbolic(m: ModelProto, base: Base, r: random.Random) -> None:
    """All dimensions unknown, inner types too."""
    for info in (*m.graph.input, *m.graph.output):
        for i, d in enumerate(info.type.tensor_type.shape.dim):
            d.dim_param = f"{info.name}_{i}"
    del m.graph.value_info[:]


def _freeze(m: ModelProto, base: Base, r: random.Random) -> None:
    """An input becomes an initializer, with other values perhaps."""
    found = [n for n in base.inputs if all(t.name != n for t in m.graph.initializer)]
    if not found:
        return
    name = r.choice(found)
    data = base.inputs[name]
    if r.random() < 0.6:
        data = _strange(data, r, bounded=has_loop(m))
    m.graph.initializer.append(numpy_helper.from_array(data, name))
    if r.random() < 0.7:
        kept = [i for i in m.graph.input if i.name != name]
        del m.graph.input[:]
        m.graph.input.extend(kept)


def _weights(m: ModelProto, base: Base, r: random.Random) -> None:
    """An initializer, or a Constant's tensor, is damaged."""
    tensors = [t for g in _graphs(m.graph) for t in g.initializer]
    tensors += [a.t for g in _graphs(m.graph) for n in g.node for a in n.attribute if a.type == AttributeProto.TENSOR]
    if not tensors:
        return _freeze(m, base, r)
    t = r.choice(tensors)
    kind = r.randrange(6)
    if kind == 0:
        t.data_type = r.choice((*range(26), 99))
    elif kind == 1:
        t.dims.append(r.choice(_INTS))
    elif kind == 2 and t.dims:
        t.dims[r.randrange(len(t.dims))] = r.choice(_INTS)
    elif kind == 3:
        t.raw_data = t.raw_data[: len(t.raw_data) // 2] if r.random() < 0.5 else t.raw_data + bytes(8)
    elif kind == 4:
        t.name = r.choice((*_NAMES, *_names(m.graph)))
    else:
        try:
            changed = _strange(numpy_helper.to_array(t), r, bounded=has_loop(m))
            t.CopyFrom(numpy_helper.from_array(changed, t.name))
        except Exception:  # a tensor that an earlier mutation has damaged
            t.raw_data = r.randbytes(len(t.raw_data))
    return None


def _external(m: ModelProto, base: Base, r: random.Random) -> None:
    if not m.graph.initializer:
        _freeze(m, base, r)
    if not m.graph.initializer:
        return
    t = r.choice(m.graph.initializer)
    t.ClearField("raw_data")
    t.data_location = TensorProto.EXTERNAL
    for key, values in (("location", _PLACES), ("offset", _INTS), ("length", (*_INTS, 64, "x", ""))):
        if r.random() < 0.8:
            t.external_data.add(key=key, value=str(values[0] if r.random() < 0.4 else r.choice(values)))


def _domain(m: ModelProto, base: Base, r: random.Random) -> None:
    kind = r.randrange(4)
    if kind == 0:
        _node(m, r).domain = r.choice(_DOMAINS)
    elif kind == 1 and m.opset_import:
        r.choice(m.opset_import).domain = r.choice(_DOMAINS)
    elif kind == 2:
        m.opset_import.add(domain=r.choice(_DOMAINS), version=r.choice(_OPSETS))
    else:
        del m.opset_import[:]


def _opset(m: ModelProto, base: Base, r: random.Random) -> None:
    if m.opset_import:
        r.choice(m.opset_import).version = r.choice(_OPSETS)
    if r.random() < 0.2:
        m.ir_version = r.choice((0, 1, 3, 4, 8, 10, 13, 99, 2**40))


def _rename(m: ModelProto, base: Base, r: random.Random) -> None:
    """A value gets a strange name or that of another, everywhere or at one place."""
    scope = _scope(m, r)
    names = _names(scope)
    if not names:
        return
    old, new = r.choice(names), r.choice((*_NAMES, *names))
    everywhere = r.random() < 0.5
    for n in scope.node:
        for ports in (n.input, n.output):
            for i, p in enumerate(ports):
                if p == old and (everywhere or r.random() < 0.5):
                    ports[i] = new
    if everywhere and isinstance(scope, GraphProto):
        for info in (*scope.input, *scope.output, *scope.initializer):
            if info.name == old:
                info.name = new


def _outputs(m: ModelProto, base: Base, r: random.Random) -> None:
    graph = r.choice(list(_graphs(m.graph)))
    if graph.output and r.random() < 0.5:
        del graph.output[r.randrange(len(graph.output))]
    else:
        graph.output.add(name=r.choice((*_names(m.graph), "nowhere")))


def _function(m: ModelProto, base: Base, r: random.Random) -> None:
    """A node moves into a function, which may call itself or be called wrongly."""
    node = _node(m, r)
    inner = NodeProto()
    inner.CopyFrom(node)
    nodes = [inner]
    name = f"F{len(m.functions)}"
    if r.random() < 0.15:
        nodes.append(helper.make_node(name, list(node.input), ["again"], domain="f"))
    inputs, outputs = list(dict.fromkeys(i for i in node.input if i)), [o for o in node.output if o]
    if r.random() < 0.2:
        r.choice((inputs, outputs)).append("more")
    m.functions.append(helper.make_function("f", name, inputs, outputs, nodes, list(m.opset_import)))
    m.functions[-1].opset_import.append(helper.make_opsetid("f", 1))
    if all(o.domain != "f" for o in m.opset_import):
        m.opset_import.append(helper.make_opsetid("f", 1))
    given = list(dict.fromkeys(i for i in node.input if i))
    del node.attribute[:]
    node.op_type, node.domain, node.input[:] = name, "f", given
    node.output[:] = [o for o in node.output if o]


def _branch(m: ModelProto, base: Base, r: random.Random) -> None:
    """A node moves into the branches of an If."""
    node = _node(m, r)
    outputs = [o for o in node.output if o]
    inner = NodeProto()
    inner.CopyFrom(node)
    for i, o in enumerate(inner.output):
        inner.output[i] = f"{o}_in" if o else ""
    infos = [onnx.ValueInfoProto(name=f"{o}_in") for o in outputs]
    then = helper.make_graph([inner], "then", [], infos)
    other = helper.make_graph([inner], "else", [], infos if r.random() < 0.9 else infos[1:])
    flag = f"flag{len(m.graph.initializer)}"
    m.graph.initializer.append(numpy_helper.from_array(np.array(r.random() < 0.5), flag))
    if r.random() < 0.5:
        m.graph.input.append(helper.make_tensor_value_info(flag, TensorProto.BOOL, ()))
    node.CopyFrom(helper.make_node("If", [flag], outputs, name=node.name, then_branch=then, else_branch=other))


_MUTATIONS: Final[tuple[Mutation, ...]] = (
    _attribute, _attribute, _attribute, _attribute, _operator, _rewire, _rewire, _arity, _drop_node, _double_node,
    _swap_nodes, _type, _type, _symbolic, _freeze, _freeze, _freeze, _weights, _weights, _external, _domain, _opset,
    _opset,
    _rename, _outputs, _function, _branch,
)  # fmt: skip


def has_loop(m: ModelProto) -> bool:
    """Whether numbers may be counts of turns: a model may rightly run for as long as they say."""
    return any(n.op_type == "Loop" for g in (*_graphs(m.graph), *m.functions) for n in g.node)


def _strange(x: np.ndarray, r: random.Random, bounded: bool = False) -> np.ndarray:
    """Values that are rare, of the same dtype and shape, or of another size at times."""
    x = np.array(x)
    if x.dtype.kind in "OUS":
        texts = [r.choice(("", "a" * 2000, "\x00", "ü", "-1")) if r.random() < 0.3 else v for v in x.reshape(-1)]
        return np.array(texts, object).reshape(x.shape)
    kind = r.randrange(6)
    pool: Sequence[Any] = _FLOATS
    if x.dtype.kind in "iu":
        pool = _SMALL if bounded or r.random() < 0.6 else _INTS
        low, high = int(np.iinfo(x.dtype).min), int(np.iinfo(x.dtype).max)
        pool = [min(max(v, low), high) for v in pool]
    with np.errstate(all="ignore"):
        if kind == 0 and not bounded:
            shape = list(x.shape)
            if shape:
                shape[r.randrange(len(shape))] = r.choice((0, 1, 2, 3))
            else:
                shape = [1]
            return np.resize(x, shape) if x.size else np.zeros(shape, x.dtype)
        if kind == 1 and x.dtype.kind not in "iub":
            return (x * r.choice((1e-30, 1e-4, 1e-3, 30.0, 1e4, 1e20, -1.0))).astype(x.dtype)
        if kind == 2:
            return np.full(x.shape, r.choice(pool)).astype(x.dtype)
        if kind == 3 and pool is _FLOATS:  # of numbers that are compared
            pool = [v for v in _FLOATS if not v or 1e-12 < abs(v) < 1e12 or not np.isfinite(v)]
        if x.size:
            flat = x.reshape(-1)
            for _ in range(r.choice((1, 1, 3))):
                flat[r.randrange(flat.size)] = np.array(r.choice(pool)).astype(x.dtype)
    return x


def model_case(bases: Sequence[Base], seed: int, number: int) -> Case:
    """The mutated model of a number."""
    r = random.Random(f"model {seed} {number}")
    base = r.choice(bases)
    m = ModelProto()
    m.CopyFrom(base.model)
    for _ in range(r.choice((1, 1, 1, 2, 2, 3))):
        r.choice(_MUTATIONS)(m, base, r)
    return Case(base.name, m.SerializeToString(), _calls(m, base, r))


def _calls(m: ModelProto, base: Base, r: random.Random) -> list[dict[str, np.ndarray]]:
    """Arguments by name: the base's where types still fit, else of the declared type; then strange ones."""
    plain = {}
    constants = {t.name for t in m.graph.initializer}
    for info in m.graph.input:
        if info.name in base.inputs:
            plain[info.name] = base.inputs[info.name]
        elif info.name not in constants:
            plain[info.name] = np.ones(2, np.float32)
        t = info.type.tensor_type
        dims = [d.dim_value if d.HasField("dim_value") else -1 for d in t.shape.dim]
        fits = t.elem_type in (0, *_element_types(plain.get(info.name))) and _same_shape(plain.get(info.name), t, dims)
        if info.name in plain and not fits and r.random() < 0.8:
            plain[info.name] = _of_type(t.elem_type, [2 if d < 0 else d for d in dims], r)
    bounded = has_loop(m)
    return [plain, {n: _strange(x, r, bounded) if r.random() < 0.7 else x for n, x in plain.items()}]


def _element_types(x: np.ndarray | None) -> tuple[int, ...]:
    return () if x is None else (8,) if x.dtype.kind in "OUS" else (int(helper.np_dtype_to_tensor_dtype(x.dtype)),)


def _same_shape(x: np.ndarray | None, t: Any, dims: Sequence[int]) -> bool:
    if x is None or not t.HasField("shape"):
        return x is not None
    return len(dims) == x.ndim and all(d in (-1, s) for d, s in zip(dims, x.shape, strict=True))


def _of_type(element: int, dims: Sequence[int], r: random.Random) -> np.ndarray:
    size = 1
    for d in dims:
        size *= max(d, 0)
    shape = [max(d, 0) for d in dims] if size <= MOST_ELEMENTS else [2] * min(len(dims), 5)
    if element == TensorProto.STRING:
        return np.full(shape, "a", object)
    try:
        dtype = helper.tensor_dtype_to_np_dtype(element)
    except Exception:  # no such type
        dtype = np.dtype(np.float32)
    values = np.random.default_rng(r.randrange(1 << 30)).integers(-3, 4, shape)
    with np.errstate(all="ignore"):
        return values.astype(dtype)

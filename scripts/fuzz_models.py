"""Runs mutated models and files on the host and on every engine through the guard, and prints what surprises.

    python scripts/fuzz_models.py [--models 20000] [--files 5000] [--seed 0] [--engines a,b] [--workers 1]
    python scripts/fuzz_models.py --only 1234,1240          # these cases of a seed, again
    python scripts/fuzz_models.py --replay FOLDER ...       # kept findings, again

A case is made of its seed and number alone: one of ONNX's node tests, or a random graph (tests/random_graphs.py), with
one to three mutations of structure, attributes, types, weights, domains, opsets, names, functions, subgraphs or
external data; or a damaged file. It runs in a worker process with limits of time and memory: on the host, then on each
engine, which must be verified before it answers, and is compared with the host at every call. Findings are: the end of
the process, a hang, an exception that is no XRTError, an InternalError, more memory than the limit, an error on one
side only, and results that differ. A worker that ends or hangs is replaced, and its case runs again with compilation
in the guard's own worker (`guard_sandbox`): what that holds is counted, and is no finding. Findings are kept in
`--out`. Exit status 1 where there are any.
"""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import os
import pathlib
import random
import resource
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

ROOT: Final = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SECONDS: Final = 60.0
"""A case may take so long, on the host and all engines."""
MEMORY: Final = 5 << 30
"""Bytes that a worker may allocate."""
_CASES_OF_A_WORKER: Final = 400  # compilers keep memory for every program
_MOST_ELEMENTS: Final = 100_000
_RANDOM_GRAPHS: Final = 300

_INTS: Final = (0, 1, -1, 2, 3, -2, 5, 7, 16, 255, 2**31 - 1, 2**31, 2**32, 2**32 + 1, 2**40, 2**63 - 1, -(2**63))
_SMALL: Final = (0, 1, -1, 2, 3, -2, 4, 5, 7)
_FLOATS: Final = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 1e-30, 1e30, 3e38, float("inf"), float("-inf"), float("nan"))
_JUDGED: Final = (1e-12, 1e12)
"""Results are compared where all floats other than 0, infinity and NaN lie between these: beyond, squares and sums
overflow in one order and not in another, and engines may take what is subnormal for zero."""
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


# --- the corpus -------------------------------------------------------------------------------------------------------


@dataclass
class Base:
    """A valid model with arguments."""

    name: str
    model: ModelProto
    inputs: dict[str, np.ndarray]


def corpus() -> list[Base]:
    """Node tests of small tensors without sequences among their inputs, and random graphs."""
    from tests.conformance.node_tests import _normalize_tensor, node_tests

    found = []
    for name, test in node_tests().items():
        inputs, _ = test.data_sets[0]
        arrays = [_normalize_tensor(x) for x in inputs]
        if all(isinstance(x, np.ndarray) and x.size <= _MOST_ELEMENTS for x in arrays):
            named = dict(zip((i.name for i in test.model.graph.input), arrays, strict=False))
            found.append(Base(name, test.model, named))
    return found + list(_random_graphs())


def _random_graphs() -> Iterator[Base]:
    from hypothesis import HealthCheck, Phase, given, seed, settings

    from tests.random_graphs import RandomGraph, graphs
    from xrt_core.frontends.onnx_export import export_model

    made: list[RandomGraph] = []

    @seed(0)
    @settings(
        max_examples=_RANDOM_GRAPHS, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(graphs(minimum=3))
    def collect(g: RandomGraph) -> None:
        made.append(g)

    collect()
    for i, g in enumerate(made):
        model = export_model(g.graph)
        yield Base(f"random graph {i}", model, dict(zip((v.name for v in g.graph.inputs), g.arrays, strict=True)))


# --- mutations of models ----------------------------------------------------------------------------------------------

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
        known = {n: int(a.type.value) for n, a in schema.attributes.items()}
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
        data = _strange(data, r, bounded=_has_loop(m))
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
            changed = _strange(numpy_helper.to_array(t), r, bounded=_has_loop(m))
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


def _has_loop(m: ModelProto) -> bool:
    """Whether numbers may be counts of turns: a model may rightly run for as long as they say."""
    return any(n.op_type == "Loop" for g in (*_graphs(m.graph), *m.functions) for n in g.node)


def _strange(x: np.ndarray, r: random.Random, bounded: bool = False) -> np.ndarray:
    """Values that are rare, of the same dtype and shape, or of another size at times."""
    x = np.array(x)
    if x.dtype.kind in "OUS":
        flat = [r.choice(("", "a" * 2000, "\x00", "ü", "-1")) if r.random() < 0.3 else v for v in x.reshape(-1)]
        return np.array(flat, object).reshape(x.shape)
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


# --- cases ------------------------------------------------------------------------------------------------------------


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
    bounded = _has_loop(m)
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
    shape = [max(d, 0) for d in dims] if size <= _MOST_ELEMENTS else [2] * min(len(dims), 5)
    if element == TensorProto.STRING:
        return np.full(shape, "a", object)
    try:
        dtype = helper.tensor_dtype_to_np_dtype(element)
    except Exception:  # no such type
        dtype = np.dtype(np.float32)
    values = np.random.default_rng(r.randrange(1 << 30)).integers(-3, 4, shape)
    with np.errstate(all="ignore"):
        return values.astype(dtype)


def file_case(bases: Sequence[Base], saved: Sequence[tuple[str, bytes]], seed: int, number: int) -> Case:
    """The damaged file of a number: an ONNX model, a saved module or a repro bundle."""
    from tests.test_decoding import container_contents, damaged

    r = random.Random(f"file {seed} {number}")
    base = r.choice(bases)
    while _has_loop(base.model):  # which may rightly never end, once the count of its turns is another
        base = r.choice(bases)
    kind, whole = r.choice(saved) if r.random() < 0.5 else ("onnx", base.model.SerializeToString())
    if kind == "xrt" and r.random() < 0.5:
        (content,) = r.sample(list(container_contents(whole, r.randrange(1 << 30), 1)), 1)
    else:
        content = whole
        for _ in range(r.choice((1, 1, 2, 4))):
            content = next(damaged(content or b"x", r, 1))
    inputs = base.inputs if kind == "onnx" else {}
    return Case(f"{kind} of {base.name}" if kind == "onnx" else kind, content, [dict(inputs)], kind)


def saved_files(engines: Sequence[str]) -> list[tuple[str, bytes]]:
    """A module saved for each engine, and a bundle."""
    from xrt_core.engine.contract import CompileOptions
    from xrt_core.module import XRTModule
    from xrt_core.testing import functions
    from xrt_core.verify.inputs import synthesize_inputs
    from xrt_core.verify.repro import Bundle, write_bundle

    function, _ = functions.chain()
    inputs = tuple(synthesize_inputs(function))
    found = []
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "m")
        for engine in ("host", *engines):
            m = XRTModule(function.body, engine=engine, guard=False, cache=False, prune=False)
            m(*inputs)
            m.save(path)
            found.append(("xrt", path.read_bytes()))
        write_bundle(Bundle(function, "acme", "cpu", CompileOptions(), "wrong", "it is", inputs, {}, "log"), path)
        found.append(("bundle", path.read_bytes()))
    return found


def store(case: Case, folder: pathlib.Path) -> None:
    """Write a case so that `load` reads it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    folder.joinpath(f"model.{case.kind}").write_bytes(case.content)
    folder.joinpath("weights.bin").write_bytes(case.weights)
    for i, call in enumerate(case.calls):
        protos = [numpy_helper.from_array(np.asarray(x), n) for n, x in call.items()]
        data = onnx.SequenceProto(name="call", elem_type=1, tensor_values=protos).SerializeToString()
        folder.joinpath(f"call{i}").write_bytes(data)


def load_calls(folder: pathlib.Path) -> list[dict[str, np.ndarray]]:
    """The arguments of a stored case."""
    calls = []
    for path in sorted(folder.glob("call*")):
        protos = onnx.SequenceProto.FromString(path.read_bytes()).tensor_values
        arrays = {p.name: numpy_helper.to_array(p) for p in protos}
        calls.append({n: x.astype(object) if x.dtype.kind in "US" else x for n, x in arrays.items()})
    return calls


# --- in a worker ------------------------------------------------------------------------------------------------------


@dataclass
class Told:
    """What came of a case. ran: engine (or host) -> calls with results; live: engine -> live clusters."""

    findings: list[str] = field(default_factory=list)
    loaded: bool = False
    ran: collections.Counter[str] = field(default_factory=collections.Counter)
    live: collections.Counter[str] = field(default_factory=collections.Counter)
    rejected: collections.Counter[str] = field(default_factory=collections.Counter)


def examine(folder: pathlib.Path, engines: Sequence[str], sandbox: bool) -> Told:
    """Run a stored case on the host and on each engine."""
    (path,) = folder.glob("model.*")
    if path.suffix != ".onnx":
        return _examine_file(path)
    told, calls = Told(), load_calls(folder)
    host = _attempt(told, "host", lambda: _module(path, "host", False))
    if host is None:
        return told
    told.loaded = True
    wanted = [_call(told, "host", host, call) for call in calls]
    judge = _Judge(path)
    for engine in engines:
        _on_engine(told, engine, path, calls, wanted, sandbox, judge)
    return told


def _examine_file(path: pathlib.Path) -> Told:
    from xrt_core.module import XRTModule
    from xrt_core.verify.repro import read_bundle

    told = Told()
    if path.suffix == ".bundle":
        told.loaded = _attempt(told, "bundle", lambda: read_bundle(path)) is not None
        return told
    m = _attempt(told, "load", lambda: XRTModule.load(path))
    if m is not None:
        told.loaded = True
        inputs = {
            n: np.ones([d if isinstance(d, int) else 2 for d in t.shape], t.dtype) for n, t in m.input_types.items()
        }
        _call(told, "saved", m, inputs)
        m.close()
    return told


def _module(path: pathlib.Path, engine: str, sandbox: bool) -> Any:
    from xrt_core.module import XRTModule

    options: dict[str, Any] = {}
    if engine != "host":
        options = {"guard_async": False, "guard_sandbox": sandbox, "guard_shadow": 1, "guard_timeout": SECONDS / 3}
    return XRTModule(str(path), engine=engine, cache=False, prune=False, **options)


def _attempt(told: Told, who: str, what: Callable[[], Any]) -> Any:
    """The result; None for an XRTError, which is as it should be, and for a finding."""
    from xrt_core.errors import InternalError, XRTError

    try:
        return what()
    except InternalError as e:
        told.findings.append(f"{who}: InternalError: {e}")
    except XRTError:
        pass
    except BaseException as e:
        told.findings.append(f"{who}: raw {type(e).__name__}: {str(e)[:500]} ({_place(e)})")
    return None


def _place(e: BaseException) -> str:
    trace, place = e.__traceback__, ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if "xrt_" in code.co_filename:
            place = f"{pathlib.Path(code.co_filename).name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def _call(told: Told, who: str, m: Any, call: dict[str, np.ndarray]) -> dict[str, Any] | None:
    found = _attempt(told, who, lambda: m.run({n: np.array(x) for n, x in call.items()}))
    told.ran[who] += found is not None
    return found  # type: ignore[no-any-return]


def _on_engine(
    told: Told, engine: str, path: pathlib.Path, calls: Sequence[dict[str, np.ndarray]],
    wanted: Sequence[dict[str, Any] | None], sandbox: bool, judge: _Judge,
) -> None:  # fmt: skip
    from xrt_core import events

    judged = True

    def listen(event: Any) -> None:
        if judged and isinstance(event, events.FallbackEvent) and event.stage == "shadow":
            told.findings.append(f"{engine}: differs: {event.error[:300]}")

    undo = events.subscribe(listen)
    try:
        m = _attempt(told, engine, lambda: _module(path, engine, sandbox))
        if m is None:
            told.findings.append(f"{engine}: loads on the host only")
            return
        for call, want in zip(calls, wanted, strict=True):
            before = len(told.findings)
            judged = judge.judges(call)
            got = _call(told, engine, m, call)
            if len(told.findings) == before and (got is None) != (want is None):
                told.findings.append(f"{engine}: {'an error' if got is None else 'a result'}, unlike the host")
            elif got is not None and want is not None and len(told.findings) == before:
                told.findings.extend(f"{engine}: {d}" for d in _differences(got, want, judged and judge.is_continuous))
        for c in m.report().clusters:
            told.live[engine] += c["state"] == "live"
            told.rejected[engine] += c["state"] == "rejected"
        m.close()
    finally:
        undo()


def _differences(got: dict[str, Any], want: dict[str, Any], numbers: bool) -> Iterator[str]:
    """Types that differ, and numbers far beyond any bound (the guard's own comparison is the precise one)."""
    for name, w in want.items():
        g = got[name]
        if not isinstance(w, np.ndarray) or not isinstance(g, np.ndarray):
            continue
        if g.dtype != w.dtype or g.shape != w.shape:
            yield f"{name!r} is {g.dtype}{list(g.shape)}, on the host {w.dtype}{list(w.shape)}"
        elif w.dtype.kind in "fV" and w.size and numbers:
            with np.errstate(all="ignore"):
                a, b = (x.astype(np.float64).reshape(-1) for x in (g, w))
                scale = float(np.max(np.abs(b), where=np.isfinite(b), initial=0))
                rough = 0.1 if w.dtype.itemsize < 4 else 0.01
                wrong = np.flatnonzero(~np.isclose(a, b, rtol=rough, atol=rough * scale + 1e-30, equal_nan=True))
            if wrong.size:
                yield f"{name!r} differs: at {wrong[:5]} {a[wrong[:5]]}, on the host {b[wrong[:5]]}"


class _Judge:
    """Whether the results of a model's calls may be compared. is_continuous: roughly, without the guard's knowledge."""

    def __init__(self, path: pathlib.Path) -> None:
        from xrt_core.frontends.onnx_import import import_model
        from xrt_core.ir.op_traits import draws_random, is_discontinuous, traits_of

        self.is_continuous, self._is_moderate, self._casts, self._powers = True, True, False, False
        graphs = [import_model(str(path))]
        while graphs:
            for n in graphs.pop().nodes:
                self.is_continuous &= not (draws_random(n) or is_discontinuous(n))
                self._casts |= traits_of(n).cast
                self._powers |= n.op_type == "Pow"
                data = [v.data for v in n.inputs if v is not None and v.data is not None]
                data += [np.array(a) for a in n.attributes.values() if isinstance(a, float)]
                self._is_moderate &= all(map(_is_moderate, data))
                graphs.extend(n.subgraphs)

    def judges(self, call: dict[str, np.ndarray]) -> bool:
        """Whether the numbers of a call are moderate; what does not fit an integer is cast to anything, as are large
        powers of integers."""
        if self._powers and any(x.dtype.kind in "iu" and x.size and np.abs(x).max() > 100 for x in call.values()):
            return False
        if self._casts and any(
            x.dtype.kind in "fV" and not np.isfinite(x.astype(np.float64)).all() for x in call.values()
        ):
            return False
        return self._is_moderate and all(map(_is_moderate, call.values()))


def _is_moderate(x: np.ndarray) -> bool:
    if x.dtype.kind not in "fV":
        return True
    size = np.abs(x.astype(np.float64))
    low, high = _JUDGED
    return bool(((size == 0) | ~np.isfinite(size) | ((size > low) & (size < high))).all())


def _work(pipe: Any, folder: str, seed: int, engines: Sequence[str], log: str) -> None:
    """The loop of a worker process."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    bases: list[Base] = []
    saved: list[tuple[str, bytes]] = []
    while True:
        task, number, sandbox = pipe.recv()
        target = pathlib.Path(folder)
        if task in ("model", "file"):
            bases = bases or corpus()
            if task == "file":
                saved = saved or saved_files(engines)
            pipe.send("started")
            store(model_case(bases, seed, number) if task == "model" else file_case(bases, saved, seed, number), target)
        else:
            target = pathlib.Path(number)
            pipe.send("started")
        pipe.send(examine(target, engines, sandbox))


# --- the parent -------------------------------------------------------------------------------------------------------


class _Worker:
    """A worker process, started when it is needed."""

    def __init__(self, folder: pathlib.Path, seed: int, engines: Sequence[str]) -> None:
        self.folder, self._seed, self._engines = folder, seed, engines
        self._process: Any = None
        self._pipe: Any = None
        self._cases = 0
        folder.mkdir(parents=True, exist_ok=True)

    def run(self, task: str, number: Any, sandbox: bool = False) -> Told | str:
        """What came of the case, or how the worker ended."""
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            given = (theirs, str(self.folder / "case"), self._seed, self._engines, str(self.folder / "log"))
            self._process = context.Process(target=_work, args=given)
            self._process.start()
            theirs.close()
            self._cases = 0
        self._cases += 1
        try:
            self._pipe.send((task, number, sandbox))
            self._pipe.recv()  # once the corpus is made
            if not self._pipe.poll(SECONDS * (2 if sandbox else 1)):
                self.end()
                return "hangs"
            told: Told = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            status = self._process.exitcode
            self.end()
            return f"ends the process with status {status}"
        if self._cases >= _CASES_OF_A_WORKER:
            self.end()
        return told

    def end(self) -> None:
        """Kill the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
        self._process = None


@dataclass
class Sums:
    """What came of all cases. held: cases that ended or hung a worker, but not through the guard's own worker."""

    cases: collections.Counter[str] = field(default_factory=collections.Counter)
    held: list[str] = field(default_factory=list)
    ran: collections.Counter[str] = field(default_factory=collections.Counter)
    live: collections.Counter[str] = field(default_factory=collections.Counter)
    rejected: collections.Counter[str] = field(default_factory=collections.Counter)
    loaded: collections.Counter[str] = field(default_factory=collections.Counter)
    findings: int = 0


def run_all(
    tasks: Sequence[tuple[str, Any]], *, seed: int, engines: Sequence[str], out: pathlib.Path, workers: int = 1
) -> Sums:
    """Run the cases, print and keep findings."""
    sums, waiting, lock = Sums(), collections.deque(tasks), threading.Lock()
    start = time.monotonic()

    def serve(name: str) -> None:
        worker = _Worker(pathlib.Path(scratch, name), seed, engines)
        try:
            while True:
                with lock:
                    if not waiting:
                        return
                    task, number = waiting.popleft()
                told = worker.run(task, number)
                ended = told if isinstance(told, str) else ""
                if ended:
                    told = worker.run(task, number, sandbox=True)
                with lock:
                    _note(sums, task, number, told, ended, worker.folder / "case", out, seed)
                    done = sum(sums.cases.values())
                    if done % 500 == 0:
                        print(f"# {done} cases, {time.monotonic() - start:.0f} s, {sums.findings} findings", flush=True)
        finally:
            worker.end()

    with tempfile.TemporaryDirectory() as scratch:
        threads = [threading.Thread(target=serve, args=(f"worker{i}",)) for i in range(workers)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    return sums


def _note(
    sums: Sums, task: str, number: Any, told: Told | str, ended: str, case: pathlib.Path, out: pathlib.Path, seed: int
) -> None:
    sums.cases[task] += 1
    if isinstance(told, str):
        told = Told(findings=[told])
    elif ended:
        sums.held.append(f"{task} {number} {ended}")
        print(f"{task} {number}: {ended}, not with the sandbox", flush=True)
    sums.loaded[task] += told.loaded
    sums.ran += told.ran
    sums.live += told.live
    sums.rejected += told.rejected
    if not told.findings:
        return
    sums.findings += 1
    for f in told.findings:
        print(f"{task} {number}: {f}", flush=True)
    if task != "replay":
        kept = out / f"{task}-{seed}-{number}"
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(case, kept)
        (kept / "findings.txt").write_text("\n".join(told.findings), encoding="utf-8", errors="backslashreplace")


def installed() -> list[str]:
    """Engines on a CPU that are ready here."""
    import importlib.util

    return [
        name for name, library in (("onnxruntime", "onnxruntime"), ("openvino", "openvino"), ("xla", "jax"))
        if importlib.util.find_spec(f"xrt_{name}") and importlib.util.find_spec(library)
    ]  # fmt: skip


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--models", type=int, default=20_000)
    parser.add_argument("--files", type=int, default=5_000)
    parser.add_argument("--first", type=int, default=0, help="the number to begin with")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engines", help="default: those that are installed; 'none' for the host alone")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("fuzz-findings"))
    parser.add_argument("--only", help="numbers of models")
    parser.add_argument("--replay", nargs="+", help="folders of kept findings")
    args = parser.parse_args()
    engines = installed() if not args.engines else [e for e in args.engines.split(",") if e != "none"]
    tasks: list[tuple[str, Any]] = [("model", i) for i in range(args.first, args.first + args.models)]
    tasks += [("file", i) for i in range(args.first, args.first + args.files)]
    if args.only:
        tasks = [("model", int(i)) for i in args.only.split(",")]
    elif args.replay:
        tasks = [("replay", str(pathlib.Path(f).resolve())) for f in args.replay]
    sums = run_all(tasks, seed=args.seed, engines=engines, out=args.out, workers=args.workers)
    print(", ".join(f"{n} {what}s, of which {sums.loaded[what]} load" for what, n in sums.cases.items()))
    for who in ("host", *engines):
        print(
            f"{who}: {sums.ran[who]} calls with results; clusters: {sums.live[who]} live, {sums.rejected[who]} rejected"
        )
    print(f"{len(sums.held)} ended or hung a worker, and not through the guard's own; {sums.findings or 'no'} findings")
    return 1 if sums.findings else 0


if __name__ == "__main__":
    sys.exit(main())

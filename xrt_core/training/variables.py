"""Variables: selection of the constants to train, and their promotion to graph inputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final

import numpy as np

from xrt_core.errors import GradientError, OptionError, nearest
from xrt_core.frontends.numpy_interop import as_array
from xrt_core.frontends.promotion import is_float
from xrt_core.frontends.tensor import Tensor, constant
from xrt_core.frontends.tracing import active_tracer
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.types import DTYPE_TO_ONNX, TensorType, dtype_name
from xrt_core.kernels import static_inputs

Select = Collection[str] | Callable[[str, np.ndarray], bool] | None


class Variable:
    """An array that training steps update.

        class Dense(xrt.Graph):
            def __init__(self):
                self.w = xrt.Variable(np.zeros((3, 2), np.float32))
                self.scale = xrt.Variable(0.5, trained=False)

            def build(self, x):
                return x @ self.w * self.scale

    Plain arrays in attributes of a graph are variables too. With an explicit Variable, arithmetic on it alone is traced
    (`self.w ** 2`, `self.w.sum()`), a scalar is trained as well, and `trained=False` keeps it constant.

    value: the value before the first step (numbers and lists become float32). trained: whether it is updated by its
    gradient; if False it is a constant, or (running statistics of a BatchNormalization) updated by the model.
    name: its attribute path in the model.
    Raises GradientError for a trained variable that is not a float, TraceError for a value that is not an array.
    """

    __slots__ = ("__weakref__", "name", "trained", "value")
    __array_ufunc__ = None  # so that `array * variable` calls the variable's __rmul__

    def __init__(self, value: Any, trained: bool = True, name: str = "") -> None:
        plain = isinstance(value, int | float | list | tuple) and not isinstance(value, np.generic)
        self.value: np.ndarray = np.asarray(value, np.float32) if plain else as_array(value)
        self.trained, self.name = bool(trained), name
        if self.trained and not is_float(self.value.dtype):
            raise GradientError(
                f"the variable {name or self.value.shape} is {dtype_name(self.value.dtype)}: only floats are trained; "
                "give it trained=False"
            )

    @property
    def type(self) -> TensorType:
        """The type; constant over training."""
        return TensorType(self.value.dtype, self.value.shape)

    @property
    def dtype(self) -> np.dtype:
        """The element dtype."""
        return self.value.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The dimensions."""
        return self.value.shape

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return self.value.ndim

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.value, dtype, copy=copy)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and hasattr(Tensor, name) and active_tracer() is not None:
            return getattr(constant(self), name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        return f"<Variable {self.name or '(unnamed)'}: {self.type}{'' if self.trained else ', not trained'}>"


def _traced(name: str) -> Callable[..., Any]:
    def method(self: Variable, *args: Any) -> Any:
        return getattr(constant(self), name)(*args)

    method.__name__ = name
    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
    setattr(Variable, f"__{_name}__", _traced(f"__{_name}__"))
    setattr(Variable, f"__r{_name}__", _traced(f"__r{_name}__"))
for _name in ("neg", "pos", "abs", "lt", "le", "gt", "ge", "getitem"):
    setattr(Variable, f"__{_name}__", _traced(f"__{_name}__"))


def all_constants(graph: Graph) -> Iterator[Value]:
    """Yield the constants of a graph and of its subgraphs in order of use, possibly repeated."""
    for n in graph.nodes:
        yield from (v for v in n.inputs if v is not None and v.data is not None)
        for g in n.subgraphs:
            yield from all_constants(g)
    yield from (v for v in graph.outputs if v.data is not None)


def replaced(graph: Graph, new: Mapping[Value, Value]) -> Graph:
    """Return the graph, subgraphs included, with uses of each constant (or input) `v` replaced by `new[v]`."""
    return graph.replace(nodes=[_node(n, new) for n in graph.nodes], outputs=[new.get(v, v) for v in graph.outputs])


def _node(node: Node, new: Mapping[Value, Value]) -> Node:
    inputs = [v if v is None else new.get(v, v) for v in node.inputs]
    if not node.subgraphs:
        return node.replace(inputs=inputs) if any(v in new for v in node.inputs) else node
    attributes = {
        k: replaced(a, new)
        if isinstance(a, Graph)
        else tuple(replaced(g, new) for g in a)
        if isinstance(a, tuple) and a and isinstance(a[0], Graph)
        else a
        for k, a in node.attributes.items()
    }
    return node.replace(inputs=inputs, attributes=attributes)


def untied(graph: Graph) -> tuple[Graph, dict[str, int]]:
    """The graph with a constant of its own for each parameter whose elements are all equal, and by name the constants
    that several parameters read before, and how many.

    Exporters write parameters of equal values, such as the scales, shifts and variances of new layers, as one constant
    (torch.onnx with dynamo=True), or as an Identity of one (dynamo=False): what is equal by chance is not learnt as
    one. A matrix that layers share has elements that differ, and stays shared.
    """
    new: dict[Value, Value] = {}
    nodes = []
    for n in graph.nodes:
        source, made = (n.inputs[0], n.outputs[0]) if n.op_type == "Identity" and not n.domain else (None, None)
        if source is not None and made is not None and made not in graph.outputs and _is_uniform(source):
            new[made] = _copied(source, made.name)
        else:
            nodes.append(n)
    graph = replaced(graph.replace(nodes=nodes), new) if new else graph
    readers: dict[Value, int] = {}
    nodes = [_with_own(n, readers) for n in graph.nodes]
    shared = {v.name: count for v, count in readers.items() if count > 1}
    return (graph.replace(nodes=nodes) if shared else graph), shared


def _with_own(node: Node, readers: dict[Value, int]) -> Node:
    """A node with constants of its own for parameters that another node reads. readers: how many did so far."""
    inputs = list(node.inputs)
    for i, v in enumerate(inputs):
        if v is None or not _is_uniform(v) or not _reads_parameter(node, i, v):
            continue
        readers[v] = readers.get(v, 0) + 1
        if readers[v] > 1:
            inputs[i] = _copied(v, f"{v.name}@{node.name or readers[v]}.{i}")
    return node.replace(inputs=inputs) if inputs != list(node.inputs) else node


def _reads_parameter(node: Node, index: int, constant: Value) -> bool:
    """Whether an input of a node is where a parameter, or a running statistic, stands."""
    if node.domain:
        return False
    if node.op_type in ("Add", "Mul"):  # a bias or a scale
        return len(constant.shape or ()) == 1 and constant.data is not None and constant.data.size > 1
    return index in _WEIGHTS.get(node.op_type, ()) or (node.op_type == "BatchNormalization" and index in (3, 4))


def _copied(constant: Value, name: str) -> Value:
    return Value.constant(np.array(constant.data), name)


def _is_uniform(value: Value) -> bool:
    data = value.data
    return data is not None and bool(data.size) and is_float(data.dtype) and bool((data == data.reshape(-1)[0]).all())


def statistics(graph: Graph) -> list[Value]:
    """Return the constants that are running statistics: mean and variance of each BatchNormalization."""
    found: dict[Value, None] = {}
    for n in graph.nodes:
        if n.op_type == "BatchNormalization" and not n.domain:
            for v in n.inputs[3:5]:
                if v is not None and v.data is not None:
                    found[v] = None
    return list(found)


def _shaping(graph: Graph) -> Iterator[Value]:
    """Yield the constants that determine shapes, such as the scales of a Resize."""
    for n in graph.nodes:
        yield from (v for i in static_inputs(n) if (v := n.inputs[i]) is not None)
        for g in n.subgraphs:
            yield from _shaping(g)


_WEIGHTS: Final[Mapping[str, tuple[int, ...]]] = {
    "MatMul": (0, 1), "Gemm": (0, 1, 2), "Einsum": (0, 1, 2, 3), "Conv": (1, 2), "ConvTranspose": (1, 2),
    "DeformConv": (1, 3), "RNN": (1, 2, 3), "GRU": (1, 2, 3), "LSTM": (1, 2, 3, 7), "Gather": (0,), "PRelu": (1,),
    "BatchNormalization": (1, 2), "InstanceNormalization": (1, 2), "LayerNormalization": (1, 2),
    "GroupNormalization": (1, 2), "RMSNormalization": (1,), "Attention": (0, 1, 2),
}  # fmt: skip
"""Operator -> its inputs that models learn: operands of products, filters, tables, scales and shifts."""

_COMBINES: Final = ("Add", "Sub", "Mul", "Div", "Concat", "Expand", "Where")
_MOVES: Final = ("Reshape", "Squeeze", "Unsqueeze", "Transpose", "Identity", "Cast", "Flatten")
_PRODUCTS: Final = ("MatMul", "Gemm", "Einsum", "Conv", "ConvTranspose")
_MASK: Final = -1e4
"""A constant with a value as low as this is a mask that is added to scores, and no bias."""


def _learnt(graph: Graph, candidates: Collection[Value]) -> set[Value]:
    """The constants among `candidates` that have the role of a parameter.

    Those of `_WEIGHTS`; a bias or a scale, of one element too, that is combined with what a weight has made, but no
    number that merely scales it; and what a weight is computed from, where that is constants alone. What is combined
    with an input alone (a normalising prologue) is none, nor a window of a transform. In a graph of no weights, every
    constant of more than one element is.
    """
    found: set[Value] = set()
    made: set[Value] = set()  # values that depend on a weight
    products: set[Value] = set()  # and that are the sums of a product, to which a bias is added
    moved: dict[Value, Value] = {}  # a constant in another shape or order -> the constant
    computed: dict[Value, set[Value]] = {}  # values that only constants make -> those of several elements
    for n in graph.nodes:
        weights = _WEIGHTS.get(n.op_type, ()) if not n.domain and not _is_group_norm(graph, n) else ()
        given = [(i, moved.get(v, v)) for i, v in enumerate(n.inputs) if v is not None]
        moves = n.op_type in _MOVES and not n.domain
        if moves and given and given[0][1] in candidates and n.outputs[0] is not None:
            moved[n.outputs[0]] = given[0][1]
            continue
        sources = _sources(n, candidates, computed)
        if sources is not None:
            computed.update((v, sources) for v in n.outputs if v is not None)
        own = {v for i, v in given if i in weights and v in candidates}
        own.update(*(computed[v] for i, v in given if i in weights and v in computed))
        after = any(v in made for _, v in given)
        if after and n.op_type in _COMBINES and not n.domain:
            for _, v in given:
                if v in candidates and _is_parameter(n, v, any(u in products for _, u in given)):
                    own.add(v)
        for g in n.subgraphs:  # what is learnt there is found by the same roles, and by what flows in
            own |= _learnt(g, candidates)
        found |= own
        if own or after:
            made.update(v for v in n.outputs if v is not None)
        if n.op_type in _PRODUCTS or (moves and any(v in products for _, v in given)):
            products.update(v for v in n.outputs if v is not None)
    return found


def _is_group_norm(graph: Graph, node: Node) -> bool:
    """Whether an InstanceNormalization is a part of a group normalisation as exporters write it for earlier opsets:
    between two changes of shape, with a scale of ones and no shift; the layer's own follow."""
    if node.op_type != "InstanceNormalization":
        return False
    source, made = node.inputs[0], node.outputs[0]
    if source is None or made is None or source not in graph.producers:
        return False
    around = [graph.producers[source], *graph.consumers.get(made, ())]
    plain = all(_is_uniform(v) for v in node.inputs[1:3] if v is not None)
    return plain and len(around) > 1 and all(graph.nodes[i].op_type == "Reshape" for i in around)


def _sources(node: Node, candidates: Collection[Value], computed: Mapping[Value, set[Value]]) -> set[Value] | None:
    """The candidates of several elements that a node's results are computed from, where constants alone make them, as
    the weight of a layer with weight normalisation is made; None for other nodes. The scales of quantised weights are
    no such."""
    given = [v for v in node.inputs if v is not None]
    if node.domain or node.subgraphs or node.op_type in ("DequantizeLinear", "QuantizeLinear") or not given:
        return None
    if not all(v.data is not None or v in computed for v in given):
        return None
    found = {v for v in given if v in candidates and v.data is not None and v.data.size > 1}
    return found.union(*(computed[v] for v in given if v in computed))


def _is_parameter(node: Node, constant: Value, sum_of_product: bool) -> bool:
    data = constant.data
    if data is None:
        return False
    if data.size == 1:  # a bias; a number that is multiplied, or added to anything else, belongs to the formula
        return node.op_type == "Add" and sum_of_product and data.ndim > 0
    return not (node.op_type in ("Add", "Where") and float(data.astype(np.float64).min()) <= _MASK)


def trainable(graph: Graph, select: Select = None, running: Collection[Value] = ()) -> list[Value]:
    """Return the constants to train: float inputs of nodes, without running statistics.

    select: a name or pattern (`"encoder.*"`, of `fnmatch`), several, or a function of name and array. Default: those
    with the role of a parameter (`_learnt`); in a graph without weights, all named ones of more than one element.
    Constants that determine shapes are part of the formula, not learnt.
    Raises GradientError for a name or pattern that no float constant has, OptionError for no names.
    """
    stats = {*running, *statistics(graph), *_shaping(graph)}
    known = dict.fromkeys(all_constants(graph))
    floats = [v for v in known if v.name and v.dtype is not None and is_float(v.dtype) and v not in stats]
    if callable(select):
        return [v for v in floats if v.data is not None and select(v.name, v.data)]
    if select is not None:
        if not isinstance(select, Collection):
            raise OptionError(
                f"trainable={select!r}: it takes names or patterns of constants, or a function of name and array"
            )
        patterns = [select] if isinstance(select, str) else list(select)
        for p in patterns:
            if not any(fnmatchcase(v.name, p) for v in floats):
                raise _none_of_that_name(p, known, floats)
        return [v for v in floats if any(fnmatchcase(v.name, p) for p in patterns)]
    learnt = _learnt(graph, set(floats))
    return [v for v in floats if v in learnt] or [v for v in floats if v.data is not None and v.data.size > 1]


def _none_of_that_name(pattern: str, known: Iterable[Value], floats: Sequence[Value]) -> GradientError:
    whole = next((v for v in known if fnmatchcase(v.name, pattern) and v.dtype is not None), None)
    if whole is not None and whole.dtype is not None and not is_float(whole.dtype):
        return GradientError(f"{whole.name!r} is {dtype_name(whole.dtype)}: only floats are trained")
    some = ", ".join(v.name for v in floats[:8])
    hint = nearest(pattern, [v.name for v in floats])
    return GradientError(f"the model has no float constant {pattern!r} to train; it has {some}, ...{hint}")


def master(array: np.ndarray) -> np.ndarray:
    """What is trained in the place of an array: 16-bit floats in float32, since most updates are smaller than their
    spacing; the array itself otherwise. The model computes with it cast back."""
    return array.astype(np.float32) if is_float(array.dtype) and array.dtype.itemsize < 4 else array


def promoted(graph: Graph, trained: Iterable[Value], others: Iterable[Value] = ()) -> Graph:
    """Return the graph with these constants as additional inputs, after its own, with the same names.

    trained: those of 16 bits come as float32 (see `master`) and are cast.
    """
    inputs, new, casts = list(graph.inputs), dict[Value, Value](), list[Node]()
    used: dict[str, Any] = {v.name: v for v in graph.inputs}
    for v, wide in (*((v, True) for v in trained), *((v, False) for v in others)):
        if v.name in used:
            raise GradientError(f"two values of the model are named {v.name!r}; variables need names of their own")
        used[v.name] = v
        assert v.data is not None
        assert v.dtype is not None
        dtype = master(np.empty(0, v.dtype)).dtype if wide else v.dtype
        entry = new[v] = Value(v.name, TensorType(dtype, v.data.shape))
        inputs.append(entry)
        if dtype != v.dtype:
            new[v] = Value(f"{v.name}.{dtype_name(v.dtype)}", v.type)
            casts.append(Node("Cast", [entry], [new[v]], {"to": DTYPE_TO_ONNX[v.dtype]}, version=13))
    if not new:
        return graph
    made = replaced(graph, new)
    return made.replace(inputs=inputs, nodes=[*casts, *made.nodes])

"""Cost model: estimated FLOPs of nodes, and the estimated time per call that a cluster saves over the host.

The constants are accurate to a factor of two at best. With F the FLOPs of a node, B the bytes that it reads and writes,
and k the array operations of its host kernel (`passes_of`):

    host    = sum over the nodes of  k * host.call + max(k * B / host.bandwidth, F / host.flops)
    engine  = launch + tensors * transfer + moved / copy               launch and transfers
            + max(moved / engine.bandwidth, sum of F / engine.flops)   fused: only the boundary is in memory
    gain    = host - engine

`tensors` is the number of values at the cluster's boundary and `moved` their bytes. Constants do not count: they are
not transferred per call. Nodes whose result is a view (Reshape, Transpose, ...) move no bytes on the host.

Sources of the constants. CPU: `benchmarks/partition_costs.py` on two cores of an EPYC with AVX-512, host NumPy against
a compiling engine. Accelerators: not measured; about half of the published figures of an H100 (fp32 67 TFLOP/s, HBM3
3.35 TB/s, PCIe 5.0 x16 64 GB/s, a few microseconds for a kernel or a copy). `preferred`: on five whole models one
engine saves -2, 5, 16, 20 and 48 % over another (`benchmarks/README.md`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import numpy as np
from msgspec import Struct

from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.op_traits import traits_of
from xrt_core.ir.types import STRING, Shape, TensorType
from xrt_core.passes.partitioning.contraction import Reads, ascending

# --- FLOPs ---


def flops(node: Node) -> int:
    """The estimated FLOPs of a node: two per multiply-add of products and convolutions, one per element of other
    operators that compute, 0 if unknown. Subgraphs do not count.

    Depends only on the operator, the types and the attribute `transA`.
    """
    op = "" if node.domain else node.op_type  # others may have a Conv of their own
    out = _elements(node.outputs[0] if node.outputs else None)
    if op in ("MatMul", "MatMulInteger", "QLinearMatMul", "Gemm"):
        shape = _shape(node.inputs[0])
        if not shape or not isinstance(shape[-1], int):
            return 0
        inner = shape[0] if op == "Gemm" and node.attributes.get("transA") else shape[-1]
        return 2 * out * inner if isinstance(inner, int) else 0
    if op in ("Conv", "ConvInteger", "QLinearConv"):
        shape = _shape(node.inputs[3 if op == "QLinearConv" else 1])
        return 2 * out * _product(shape[1:]) if shape else 0
    if op == "ConvTranspose":
        shape = _shape(node.inputs[1])
        return 2 * _elements(node.inputs[0]) * _product(shape[1:]) if shape else 0
    if op in ("LSTM", "GRU", "RNN"):
        steps = _shape(node.inputs[0])
        weights = sum(_elements(v) for v in node.inputs[1:3])
        return 2 * weights * _product(steps[:2]) if steps else 0
    traits = traits_of(node)
    if traits.moves_elements or traits.fills or traits.shape_query or traits.cast:
        return 0
    return max(out, _elements(node.inputs[0] if node.inputs else None))


def _shape(v: Value | None) -> Shape | None:
    t = None if v is None else v.type
    return t.shape if isinstance(t, TensorType) else None


def _elements(v: Value | None) -> int:
    shape = _shape(v)
    return 0 if shape is None else _product(shape)


def _product(shape: Shape) -> int:
    found = 1
    for d in shape:
        if not isinstance(d, int):
            return 0
        found *= d
    return found


# --- constants and estimates ---


class Rates(Struct, frozen=True):
    """Throughput of the host or of an engine.

    call: seconds of overhead per array operation. bandwidth: memory bandwidth in bytes per second. flops:
    floating-point operations per second in matrix products and convolutions.
    """

    call: float
    bandwidth: float
    flops: float


class Costs(Struct, frozen=True):
    """The constants for one device.

    launch: seconds per launch of an executable. transfer: seconds per tensor at a boundary. copy: bytes per second
    between host and device; infinite if they share memory. preferred: the share of its compute time (without launch
    and transfers) that an engine is assumed to save over engines of lower priority.
    """

    host: Rates
    engine: Rates
    launch: float
    transfer: float
    copy: float = math.inf
    preferred: float = 0.25


_NUMPY: Final = Rates(call=1e-6, bandwidth=25e9, flops=150e9)
_ACCELERATOR: Final = Rates(call=0.0, bandwidth=1.5e12, flops=30e12)
CPU: Final = Costs(_NUMPY, Rates(call=0.0, bandwidth=35e9, flops=200e9), launch=5e-6, transfer=1e-6)
ACCELERATOR: Final = Costs(_NUMPY, _ACCELERATOR, launch=10e-6, transfer=10e-6, copy=25e9)
ACCELERATOR_WITH_HOST: Final = Costs(
    Rates(call=10e-6, bandwidth=1.5e12, flops=30e12), _ACCELERATOR, launch=10e-6, transfer=1e-6
)


def costs_for(is_host: bool, host_on_device: bool = False) -> Costs:
    """Return the constants for the CPU (`is_host`), or for a device with separate memory.

    host_on_device: the host computes on the device too, so no copies are needed.
    """
    return CPU if is_host else ACCELERATOR_WITH_HOST if host_on_device else ACCELERATOR


class Estimate(Struct, frozen=True):
    """Estimated seconds per call of a cluster.

    host: of its nodes on the host. engine: of the cluster on its engine. boundary: the part of `engine` that is launch
    and transfers.
    """

    host: float
    engine: float
    boundary: float

    @property
    def gain(self) -> float:
        """Seconds saved a call; negative where the host is faster."""
        return self.host - self.engine

    def to_json(self) -> dict[str, float]:
        """As plain data, in microseconds."""
        seconds = {"gain": self.gain, "host": self.host, "engine": self.engine, "boundary": self.boundary}
        return {f"{name}_us": round(s * 1e6, 3) for name, s in seconds.items()}

    def __str__(self) -> str:
        verb = "saved" if self.gain > 0 else "lost"
        return (
            f"estimated {duration(abs(self.gain))} {verb} a call: {duration(self.host)} on the host, "
            f"{duration(self.engine)} on the engine, {duration(self.boundary)} of it launch and boundary"
        )


class Estimator:
    """Estimates clusters of one graph; properties of nodes and values are computed once per graph."""

    def __init__(self, graph: Graph, reads: Reads) -> None:
        unread = {v: None for v in graph.outputs if v in graph.producers and v not in graph.consumers}
        sizes = _Sizes()
        self._reads = reads
        self._work = _work(graph.nodes, sizes)
        values = [*reads.values, *unread]
        self._bytes = np.array([sizes.of[sizes[v]] for v in values], np.float64)
        self._constant = np.array([v.data is not None for v in values], np.bool_)
        self._producer = np.append(reads.producer, np.array([graph.producers[v] for v in unread], np.int64))
        returned = set(graph.outputs)
        self._returned = np.array([v in returned for v in values], np.bool_)
        self._seconds: dict[Rates, np.ndarray] = {}

    def __call__(self, assignment: np.ndarray, costs: Sequence[Costs], which: np.ndarray) -> np.ndarray:
        """Estimate all clusters at once. Returns three rows of seconds: host, engine, boundary (see `Estimate`).

        assignment: per node the number of its cluster, -1 for none. which: per cluster the index of its constants in
        `costs`. Linear in nodes and edges, up to a sort of the values at boundaries.
        """
        count = len(which)
        nodes = np.flatnonzero(assignment >= 0)
        inside = assignment[nodes]
        found = np.zeros((3, count))
        work = np.bincount(inside, self._work[2][nodes], count)
        tensors, moved = self._boundary(assignment, count)
        for k, c in enumerate(costs):
            own = which == k
            host = np.bincount(inside, self._host(c.host)[nodes], count)
            around = c.launch + tensors * c.transfer + moved / c.copy
            engine = around + np.maximum(moved / c.engine.bandwidth, work / c.engine.flops)
            found[:, own] = np.stack((host, engine, around))[:, own]
        return found

    def _boundary(self, assignment: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Per cluster the number of values at its boundary, and their bytes."""
        value = self._reads.value
        made = np.where(self._producer >= 0, assignment[self._producer], -1)
        read = assignment[self._reads.reader]
        across = made[value] != read
        leaves = self._returned.copy()
        leaves[value[across]] = True
        out = np.flatnonzero(leaves & (made >= 0))
        enters = across & (read >= 0) & ~self._constant[value]
        entry, reader = ascending(value[enters], read[enters], count)
        clusters, values = np.append(made[out], reader), np.append(out, entry)
        return np.bincount(clusters, minlength=count), np.bincount(clusters, self._bytes[values], count)

    def _host(self, rates: Rates) -> np.ndarray:
        """Per node the seconds on the host."""
        found = self._seconds.get(rates)
        if found is None:
            found = self._seconds[rates] = _seconds(self._work, rates)
        return found


_SMALL: Final = 0.05


def is_below_launch(nodes: Iterable[Node]) -> bool:
    """Whether the host, on a CPU, is estimated to take no longer for some nodes than a launch takes."""
    return bool(_seconds(_work(nodes, _Sizes()), CPU.host).sum() <= CPU.launch)


def is_small_part(graph: Graph, nodes: Collection[int]) -> bool:
    """Whether the host, on a CPU, is estimated to take no longer for some nodes than a launch takes, or than `_SMALL`
    of the time for the whole graph."""
    work = _work(graph.nodes, _Sizes())
    seconds = _seconds(work, CPU.host)
    return bool(seconds[list(nodes)].sum() <= max(CPU.launch, _SMALL * seconds.sum()))


def _seconds(work: np.ndarray, rates: Rates) -> np.ndarray:
    """Per node the seconds on the host. work: as of `_work`."""
    passes, size, flops_of = work
    found: np.ndarray = passes * rates.call + np.maximum(passes * size / rates.bandwidth, flops_of / rates.flops)
    return found


class _Sizes(dict["Value | None", int]):
    """Value -> the number of its kind, where values of one type, constant or not, are a kind.

    of: kind -> bytes to transfer, 0 for constants. Models are repetitive: they have far fewer kinds than values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.of: list[int] = []
        self._kinds: dict[tuple[object, bool], int] = {}
        self._known: dict[tuple[int, bool], int] = {}  # the same by id of the type, which spares its hash

    def __missing__(self, value: Value | None) -> int:
        t, moves = (None, False) if value is None else (value.type, value.data is None)
        kind = self._known.get((id(t), moves))
        if kind is None:
            kind = self._known[id(t), moves] = self._kinds.setdefault((t, moves), len(self.of))
            if kind == len(self.of):
                self.of.append(nbytes(value) if value is not None and moves else 0)
        self[value] = kind
        return kind


def _work(nodes: Iterable[Node], sizes: _Sizes) -> np.ndarray:
    """For each node its array operations on the host, bytes and FLOPs: three rows. Computed once per kind of node."""
    known: dict[tuple[object, ...], tuple[int, int, int]] = {}
    found = []
    kind_of = sizes.__getitem__
    for n in nodes:
        op = n.op_type
        kinds = (*map(kind_of, n.inputs), -1, *map(kind_of, n.outputs))
        own_attribute = n.attributes.get("transA") if op == "Gemm" else n.subgraphs if n.attributes else None
        key = (n.domain, op, own_attribute, kinds)
        own = known.get(key)
        if own is None:
            traits = traits_of(n)
            size = 0 if traits.view or traits.shape_query else sum(sizes.of[k] for k in kinds if k >= 0)
            if op in _PICKING and not n.domain:  # of its first input it reads no more than it returns
                size -= max(sizes.of[kinds[0]] - sizes.of[kinds[-1]], 0)
            own = known[key] = passes_of(n), size, flops(n)
        found.append(own)
    return np.array(found, np.float64).reshape(-1, 3).T.copy()


# array operations per host kernel, derived from its time on arrays of a few elements
_PASSES: Final[Mapping[str, int]] = MappingProxyType({
    "Attention": 30, "AveragePool": 15, "BatchNormalization": 9, "Clip": 2, "Compress": 7, "Concat": 3, "Conv": 27,
    "ConvInteger": 27, "ConvTranspose": 30, "DequantizeLinear": 4, "DynamicQuantizeLinear": 8, "Einsum": 10, "Elu": 4,
    "Erf": 8, "Gather": 3, "GatherND": 10, "Gelu": 6, "Gemm": 2, "GlobalAveragePool": 4, "GRU": 100,
    "GroupNormalization": 14, "HardSigmoid": 3, "HardSwish": 4, "InstanceNormalization": 12, "LayerNormalization": 13,
    "LeakyRelu": 2, "LogSoftmax": 7, "LRN": 10, "LSTM": 100, "MatMul": 2, "MatMulInteger": 4, "MaxPool": 13,
    "Mean": 3, "Mish": 5, "NonMaxSuppression": 100, "NonZero": 9, "Pad": 8, "QLinearConv": 35, "QLinearMatMul": 12,
    "QuantizeLinear": 6, "Resize": 40, "RMSNormalization": 7, "RNN": 60, "RotaryEmbedding": 12, "ScatterND": 10,
    "Selu": 4, "Sigmoid": 3, "Softmax": 6, "Softplus": 3, "SoftmaxCrossEntropyLoss": 12, "Swish": 4, "Tile": 4,
    "TopK": 6, "Unique": 30, "ConvFilterGrad": 40, "MaxPoolGrad": 30, "AveragePoolGrad": 30, "Adam": 12,
    "Momentum": 5, "Adagrad": 6, "Imputer": 4, "LinearClassifier": 23, "LinearRegressor": 6, "Normalizer": 11,
    "Scaler": 6, "SVMClassifier": 100, "SVMRegressor": 20, "TreeEnsemble": 60, "TreeEnsembleClassifier": 70,
    "TreeEnsembleRegressor": 60,
})  # fmt: skip


_PICKING: Final = frozenset(("Gather", "GatherElements", "GatherND"))
_CONTROL_PASSES: Final = 10
_TURNS: Final = 16  # assumed of a loop; few are shorter, and a wrong guess costs a launch


def passes_of(node: Node) -> int:
    """The number of array operations of the host's kernel of a node; each costs a call and a pass over the arrays."""
    op = node.op_type
    known = _PASSES.get(op)
    if known is not None:
        return known
    if node.attributes and node.subgraphs:
        return _CONTROL_PASSES + (1 if op == "If" else _TURNS) * max(
            sum(map(passes_of, g.nodes)) for g in node.subgraphs
        )
    if op.endswith(("Normalization", "Grad", "Pool")):
        return 30
    return 4 if traits_of(node).reduction or op.startswith("Cum") else 1


def nbytes(value: Value) -> int:
    """Bytes of a static tensor; 0 for strings and anything else."""
    t = value.type
    if not isinstance(t, TensorType) or not t.is_static or t.dtype == STRING:
        return 0
    return math.prod(t.shape) * t.dtype.itemsize  # type: ignore[arg-type, union-attr]


def duration(seconds: float) -> str:
    """Seconds as a text in microseconds or milliseconds."""
    us = seconds * 1e6
    if us < 10:
        return f"{us:.1f} us"
    return f"{us:.0f} us" if us < 10_000 else f"{us / 1e3:.0f} ms"

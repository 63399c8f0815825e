"""What a cluster saves: the estimated seconds of a call that its engine spares, so that tiny fragments go to the host.

The model has few constants, and they are meant to be right to a factor of two. With F the FLOPs of a node, B the bytes
that it reads and writes, and k the array operations that its host kernel makes (`passes_of`):

    host    = sum over the nodes of  k * host.call + max(k * B / host.bandwidth, F / host.flops)
    engine  = launch + tensors * crossing + moved / copy            the way there and back
            + max(moved / engine.bandwidth, sum of F / engine.flops)   a fused build passes over its boundary alone
    gain    = host - engine

`tensors` are the values at the cluster's boundary and `moved` their bytes. Constants do not count: both sides have
them already. Nodes that only look at an array in another way (Reshape, Transpose, ...) move nothing on the host.

Where the constants are from. CPU: `benchmarks/partition_costs.py` on two cores of an EPYC with AVX-512, host NumPy
against a compiling engine. Accelerators: not measured; the order of what vendors publish for an H100 (fp32 67 TFLOP/s,
HBM3 3.35 TB/s, PCIe 5.0 x16 64 GB/s, a few microseconds for a kernel or a copy), taken at about half. What a preferred
engine saves: on five whole models one engine saves -2, 5, 16, 20 and 48 % over another (`benchmarks/README.md`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np

from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.op_traits import traits_of
from xrt_core.ir.types import STRING, TensorType
from xrt_core.passes.flops import flops
from xrt_core.passes.partitioning.contraction import Reads, ascending


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast one side computes. call: seconds that an array operation costs by itself. bandwidth: bytes a second
    through memory. flops: floating-point operations a second, in products and convolutions."""

    call: float
    bandwidth: float
    flops: float


@dataclass(frozen=True, slots=True)
class Costs:
    """The constants for one device. launch: seconds of a call of an executable. crossing: seconds of a tensor in or
    out. copy: bytes a second across the boundary; infinite where both sides share memory. preferred: the share of its
    time between launch and boundary that an engine is taken to save over those behind it in the order."""

    host: Rates
    engine: Rates
    launch: float
    crossing: float
    copy: float = math.inf
    preferred: float = 0.25


_NUMPY: Final = Rates(call=1e-6, bandwidth=25e9, flops=150e9)
_ACCELERATOR: Final = Rates(call=0.0, bandwidth=1.5e12, flops=30e12)
CPU: Final = Costs(_NUMPY, Rates(call=0.0, bandwidth=35e9, flops=200e9), launch=5e-6, crossing=1e-6)
ACCELERATOR: Final = Costs(_NUMPY, _ACCELERATOR, launch=10e-6, crossing=10e-6, copy=25e9)
ACCELERATOR_WITH_HOST: Final = Costs(
    Rates(call=10e-6, bandwidth=1.5e12, flops=30e12), _ACCELERATOR, launch=10e-6, crossing=1e-6
)


def costs_for(is_host: bool, host_on_device: bool = False) -> Costs:
    """The constants for the host's processor (`is_host`), or for a device with memory of its own.

    host_on_device: the host computes on the device too, so that values between them are not copied.
    """
    return CPU if is_host else ACCELERATOR_WITH_HOST if host_on_device else ACCELERATOR


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds of a call. host: of the nodes on the host. engine: of the cluster on its engine, with `boundary`, what
    launching it and moving its inputs and outputs takes."""

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
    """Estimates clusters of one graph; what is known of nodes and values is worked out once, and by kind."""

    def __init__(self, graph: Graph, reads: Reads) -> None:
        unread = {v: None for v in graph.outputs if v in graph.producers and v not in graph.consumers}
        sizes = _Sizes()
        self._reads = reads
        self._work = _work(graph, sizes)
        values = [*reads.values, *unread]
        self._bytes = np.array([sizes.of[sizes[v]] for v in values], np.float64)
        self._constant = np.array([v.data is not None for v in values], np.bool_)
        self._producer = np.append(reads.producer, np.array([graph.producers[v] for v in unread], np.int64))
        returned = set(graph.outputs)
        self._returned = np.array([v in returned for v in values], np.bool_)
        self._seconds: dict[Rates, np.ndarray] = {}

    def __call__(self, assignment: np.ndarray, costs: Sequence[Costs], which: np.ndarray) -> np.ndarray:
        """What clusters save, all at once: seconds on the host, on the engine and of its boundary, each a row.

        assignment: per node the number of its cluster, -1 for none. which: per cluster the index of its constants in
        `costs`. Linear in nodes and edges but for a sort of the values at boundaries.
        """
        count = len(which)
        nodes = np.flatnonzero(assignment >= 0)
        inside = assignment[nodes]
        found = np.zeros((3, count))
        work = np.bincount(inside, self._work[2][nodes], count)
        crossing, moved = self._boundary(assignment, count)
        for k, c in enumerate(costs):
            own = which == k
            host = np.bincount(inside, self._host(c.host)[nodes], count)
            around = c.launch + crossing * c.crossing + moved / c.copy
            engine = around + np.maximum(moved / c.engine.bandwidth, work / c.engine.flops)
            found[:, own] = np.stack((host, engine, around))[:, own]
        return found

    def _boundary(self, assignment: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Per cluster how many values cross its boundary, and their bytes."""
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
            passes, size, work = self._work
            found = passes * rates.call + np.maximum(passes * size / rates.bandwidth, work / rates.flops)
            self._seconds[rates] = found
        return found


class _Sizes(dict["Value | None", int]):
    """Value -> the number of its kind: of one type, and constants or not. of: kind -> bytes that move, 0 for constants.

    Models are repetitive, and have far fewer kinds than values.
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


def _work(graph: Graph, sizes: _Sizes) -> np.ndarray:
    """For each node array operations on the host, bytes and FLOPs: three rows. Nodes of one kind are looked at once."""
    known: dict[tuple[object, ...], tuple[int, int, int]] = {}
    found = []
    kind_of = sizes.__getitem__
    for n in graph.nodes:
        op = n.op_type
        kinds = (*map(kind_of, n.inputs), -1, *map(kind_of, n.outputs))
        key = (n.domain, op, n.attributes.get("transA") if op == "Gemm" else None, kinds)
        own = known.get(key)
        if own is None:
            traits = traits_of(n)
            size = 0 if traits.view or traits.shape_query else sum(sizes.of[k] for k in kinds if k >= 0)
            own = known[key] = passes_of(n), size, flops(n)
        found.append(own)
    return np.array(found, np.float64).reshape(-1, 3).T.copy()


# array operations of the host's kernels, from their times on arrays of a few elements; figures of this model alone
_PASSES: Final[Mapping[str, int]] = MappingProxyType({
    "Attention": 30, "AveragePool": 15, "BatchNormalization": 9, "Clip": 2, "Concat": 3, "Conv": 27, "ConvInteger": 27,
    "ConvTranspose": 30, "DequantizeLinear": 4, "DynamicQuantizeLinear": 8, "Einsum": 10, "Elu": 4, "Erf": 8,
    "Gather": 3, "GatherND": 10, "Gelu": 6, "Gemm": 2, "GlobalAveragePool": 4, "GRU": 100, "GroupNormalization": 14,
    "HardSigmoid": 3, "HardSwish": 4, "InstanceNormalization": 12, "LayerNormalization": 13, "LeakyRelu": 2,
    "LogSoftmax": 7, "LRN": 10, "LSTM": 100, "MatMul": 2, "MatMulInteger": 4, "MaxPool": 13, "Mean": 3, "Mish": 5,
    "Pad": 8, "QLinearConv": 35, "QLinearMatMul": 12, "QuantizeLinear": 6, "Resize": 40, "RMSNormalization": 7,
    "RNN": 60, "RotaryEmbedding": 12, "ScatterND": 10, "Selu": 4, "Sigmoid": 3, "Softmax": 6, "Softplus": 3,
    "SoftmaxCrossEntropyLoss": 12, "Swish": 4, "Tile": 4, "TopK": 6, "ConvFilterGrad": 40, "MaxPoolGrad": 30,
    "AveragePoolGrad": 30, "Adam": 12, "Momentum": 5, "Adagrad": 6,
})  # fmt: skip


def passes_of(node: Node) -> int:
    """How many array operations the host's kernel of this node makes: each costs a call and a pass over the arrays."""
    op = node.op_type
    known = _PASSES.get(op)
    if known is not None:
        return known
    if op.endswith(("Normalization", "Grad", "Pool")):
        return 30
    return 4 if traits_of(node).reduction or op.startswith("Cum") else 1


def nbytes(value: Value) -> int:
    """Bytes of a static tensor; 0 for anything else."""
    t = value.type
    if not isinstance(t, TensorType) or not t.shape or t.dtype is None:
        return t.dtype.itemsize if isinstance(t, TensorType) and t.shape == () and t.dtype is not None else 0
    if t.dtype == STRING:
        return 0
    size = t.dtype.itemsize
    for d in t.shape:
        if not isinstance(d, int):
            return 0
        size *= d
    return size


def duration(seconds: float) -> str:
    """Seconds as a text in microseconds or milliseconds."""
    us = seconds * 1e6
    if us < 10:
        return f"{us:.1f} us"
    return f"{us:.0f} us" if us < 10_000 else f"{us / 1e3:.0f} ms"

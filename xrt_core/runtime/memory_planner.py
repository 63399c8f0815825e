"""Memory planner: liveness analysis of a plan by the types of its values, and a step order with a lower peak."""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from msgspec import Struct

from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.op_traits import traits_of
from xrt_core.ir.types import STRING, TensorType

_NEEDS_ORDER = frozenset({"Reshape", "Flatten"})  # NumPy copies in these where elements do not lie in a row


def is_view(node: Node) -> bool:
    """Whether the host gives the memory of the node's first input as its results."""
    return traits_of(node).view


class Memory(Struct, frozen=True):
    """Memory of a run of a plan in bytes, estimated from the types of its values.

    inputs, constants: alive during the whole run. Weights inside engines are not included.
    own: the peak of the run's own arrays (intermediates and results). step: the step of the peak.
    steps: the bytes of own arrays at every step, in the order of the plan. unknown: the number of values whose size is
    unknown before the run (data-dependent shape, or not a tensor); they count as 0 bytes.

    Scratch memory of kernels and engines is not included. Views of one array count once.
    """

    inputs: int
    constants: int
    own: int
    step: str
    steps: tuple[int, ...]
    unknown: int

    @property
    def peak(self) -> int:
        """The peak: inputs, constants, intermediates and results that are alive at once."""
        return self.inputs + self.constants + self.own

    def __str__(self) -> str:
        at = f", at step {self.step}" if self.step else ""
        note = f"; {self.unknown} values of unknown size" if self.unknown else ""
        return (
            f"peak {megabytes(self.peak)}{at} (inputs {megabytes(self.inputs)}, "
            f"constants {megabytes(self.constants)}{note})"
        )


def megabytes(count: int) -> str:
    """Format a number of bytes: "12.3 MB"."""
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"


def size_of(value: Value) -> int | None:
    """Return the bytes of a tensor with known dtype and shape; None for all other values."""
    t = value.type
    if not isinstance(t, TensorType) or not t.is_static or t.dtype is None or t.dtype == STRING:
        return None
    return math.prod(d for d in t.shape or () if isinstance(d, int)) * t.dtype.itemsize


class Buffers:
    """The buffers of a graph's intermediate arrays: which node allocates, reads and overwrites which.

    shares: per node, whether its results are views of its first input. reuses: per node, indices of inputs that its
    result may be written over if nothing else reads them. copied: whether graph results that do not own their memory
    are copied at the end.
    """

    def __init__(
        self, graph: Graph, shares: Sequence[bool], reuses: Sequence[Sequence[int]], copied: Sequence[bool]
    ) -> None:
        self.graph = graph
        self.sizes: list[int] = []
        self.reads: list[list[int]] = []  # per node
        self.makes: list[list[int]] = []
        self.over: list[list[int]] = []
        self.unknown = 0
        of: dict[Value, int] = {}  # value produced by a node -> buffer
        whole: set[Value] = set()  # values that span their whole buffer, produced by a host step
        ours: set[int] = set()  # their buffers
        scattered: set[Value] = set()
        for n, shared, reused in zip(graph.nodes, shares, reuses, strict=True):
            first = n.inputs[0] if n.inputs else None
            view = shared and not (n.op_type in _NEEDS_ORDER and first in scattered)
            self.reads.append(list(dict.fromkeys(of[v] for v in n.uses() if v in of)))
            self.over.append([of[v] for i in reused if (v := n.inputs[i]) in whole])
            made: list[int] = []
            for v in n.outputs:
                if v is None:
                    continue
                if view:
                    if first in of:
                        of[v] = of[first]
                    if traits_of(n).strided or first in scattered:
                        scattered.add(v)
                    continue
                size = size_of(v)
                self.unknown += size is None
                of[v] = len(self.sizes)
                self.sizes.append(size or 0)
                made.append(of[v])
                if n.domain != "xrt":
                    whole.add(v)
                    ours.add(of[v])
            self.makes.append(made)
        self.returned = {of[v] for v in graph.outputs if v in of}
        self.readers = [0] * len(self.sizes)
        for read in self.reads:
            for b in read:
                self.readers[b] += 1
        self.copies = 0
        seen: set[int] = set()
        for v, may_copy in zip(graph.outputs, copied, strict=True):
            if v in of and of[v] in ours and of[v] not in seen and self.sizes[of[v]] == (size_of(v) or 0):
                seen.add(of[v])  # the result may be a full view of an otherwise unreferenced array
            elif may_copy:
                self.copies += size_of(v) or 0

    def live(self, order: Sequence[int]) -> list[int]:
        """Return the live bytes of the run's own arrays during each node, in this order; last: at the return."""
        left = self.readers.copy()
        for b in self.returned:
            left[b] += 1
        sizes, found, now = self.sizes, [], 0
        for i in order:
            gone = []
            for b in self.reads[i]:
                left[b] -= 1
                if not left[b]:
                    gone.append(b)
            made = self.makes[i]
            now += sum([sizes[b] for b in made])
            over = next((b for b in self.over[i] if b in gone), -1)
            if over >= 0:
                gone.remove(over)
                now -= sizes[over]
            found.append(now)
            now -= sum([sizes[b] for b in gone]) + sum([sizes[b] for b in made if not left[b]])
        found.append(now + self.copies)
        return found

    def better_order(self, worth: int = 1 << 20) -> list[int]:
        """Return a node order with a lower peak, or the graph's own. worth: peak in bytes below which none is sought.

        Greedy list scheduling: of the ready nodes, choose the one that leaves the fewest bytes alive; ties in graph
        order. Near-linear in nodes and edges.
        """
        graph = self.graph
        order = list(range(len(graph.nodes)))
        waiting = [len(p) for p in graph.predecessors]
        if len(order) < 3 or max(waiting) < 2:  # a chain, or a tree that never joins
            return order
        peak = max(self.live(order))
        if peak < worth:
            return order
        left = self.readers.copy()
        for b in self.returned:
            left[b] += 1
        readers: list[list[int]] = [[] for _ in self.sizes]
        growth = []
        for i, (read, made) in enumerate(zip(self.reads, self.makes, strict=True)):
            for b in read:
                readers[b].append(i)
            freed = sum(self.sizes[b] for b in read if left[b] == 1)
            growth.append(sum(self.sizes[b] for b in made if left[b]) - freed)
        ready = [(growth[i], i) for i in order if not waiting[i]]
        heapify(ready)
        found: list[int] = []
        done = bytearray(len(order))
        while ready:
            grown, i = heappop(ready)
            if done[i] or grown != growth[i]:
                continue
            done[i] = 1
            found.append(i)
            for b in self.reads[i]:
                left[b] -= 1
                if left[b] == 1 and b not in self.returned:
                    last = next(r for r in readers[b] if not done[r])
                    growth[last] -= self.sizes[b]
                    if not waiting[last]:
                        heappush(ready, (growth[last], last))
            for s in graph.successors[i]:
                waiting[s] -= 1
                if not waiting[s]:
                    heappush(ready, (growth[s], s))
        return found if max(self.live(found)) < peak else order

    def memory(self, order: Sequence[int], labels: Sequence[str]) -> Memory:
        """Return the memory of a plan with this node order. labels: per node, the label of its step."""
        graph = self.graph
        live = self.live(order)
        own = max(live)
        at = live.index(own)
        inputs = [size_of(v) for v in dict.fromkeys(graph.inputs)]
        step = "" if not own else labels[order[at]] if at < len(order) else "return"
        return Memory(
            sum(s or 0 for s in inputs),
            sum(size_of(v) or 0 for v in graph.constants),
            own,
            step,
            tuple(live),
            self.unknown + sum(s is None for s in inputs),
        )

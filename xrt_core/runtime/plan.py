"""Plan: a partitioned graph as a register program, and the loop that runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.runtime.arrays import Converter, family_of, to_numpy
from xrt_core.runtime.launch import Launch

Call = Callable[[Sequence[Any]], Sequence[Any]]

HOST = "host"


class Step(NamedTuple):
    """One step: `call` reads the registers `inputs`, its results go to `outputs` (-1: nobody wants it), and the
    registers `dead` are cleared after it."""

    call: Call
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    dead: tuple[int, ...]
    label: str


class Plan:
    """Steps over numbered registers. Safe to run from many threads: each run has its own registers.

    The first registers are the inputs, then come the constants that host steps and outputs read.
    outputs: registers of the results. spaces: for each output who made it, "host" or an engine's name.
    engine_inputs: for each input, the one engine that alone reads it (it may be an array of that engine), or None.
    guarded: inputs that host steps or outputs read. Their arrays go in as read-only views, as constants do, so that
        whatever comes out writable shares no memory with them. owned: whether results must be the caller's own (see
        `_own`); parts of a graph do without, their results go on into steps.
    """

    __slots__ = (
        "_guarded", "_has_host_steps", "_owned", "_template",
        "engine_inputs", "launches", "outputs", "run", "spaces", "steps",
    )  # fmt: skip

    def __init__(
        self,
        inputs: int,
        registers: list[Any],
        steps: Sequence[Step],
        outputs: Sequence[int],
        spaces: Sequence[str],
        engine_inputs: Sequence[str | None],
        launches: Sequence[Launch],
        guarded: Sequence[int],
        owned: bool,
    ) -> None:
        self._template = registers
        self._guarded = tuple(guarded)
        self._owned = owned and HOST in spaces
        self.steps = tuple(steps)
        self.outputs = tuple(outputs)
        self.spaces = tuple(spaces)
        self.engine_inputs = tuple(engine_inputs)
        self.launches = tuple(launches)
        self._has_host_steps = any(not isinstance(s.call, Launch) for s in steps)
        self.run: Call = self._run
        if len(steps) == 1 and isinstance(steps[0].call, Launch):
            step = steps[0]
            if step.inputs == tuple(range(inputs)) and step.outputs == self.outputs:
                self.run = step.call  # the whole graph is one Launch: nothing of ours on the way

    def _run(self, arrays: Sequence[Any]) -> Sequence[Any]:
        registers = self._template.copy()
        registers[: len(arrays)] = arrays
        for i in self._guarded:
            registers[i] = _read_only(registers[i])
        if self._has_host_steps:
            with np.errstate(all="ignore"):  # NaN and infinities are results, not warnings
                self._execute(registers)
        else:
            self._execute(registers)
        results = [registers[i] for i in self.outputs]
        return _own(results) if self._owned else results

    def _execute(self, registers: list[Any]) -> None:
        for call, inputs, outputs, dead, _ in self.steps:
            results = call([registers[i] for i in inputs])
            for i, result in zip(outputs, results, strict=False):
                if i >= 0:
                    registers[i] = result
            for i in dead:
                registers[i] = None

    def as_text(self) -> str:
        """The program, a step a line."""
        lines = [f"inputs r0..r{len(self.engine_inputs) - 1}" if self.engine_inputs else "no inputs"]
        for s in self.steps:
            outs = ", ".join("_" if i < 0 else f"r{i}" for i in s.outputs)
            ins = ", ".join(f"r{i}" for i in s.inputs)
            free = f"  free {', '.join(f'r{i}' for i in s.dead)}" if s.dead else ""
            lines.append(f"{outs} = {s.label}({ins}){free}")
        lines.append(f"return {', '.join(f'r{i}' for i in self.outputs)}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.as_text()


class Lowered(NamedTuple):
    """What a node becomes: the function that computes it, where its results live, and a label."""

    call: Call
    space: str
    label: str


P = TypeVar("P", bound=Plan)


def make_plan(
    graph: Graph,
    lower: Callable[[Node], Lowered],
    kind: Callable[..., P] = Plan,  # type: ignore[assignment]
    *,
    owned: bool = True,
    to_host: Converter = to_numpy,
) -> P:
    """The plan of a partitioned graph; `lower` says what each node becomes (a node's missing inputs come as None).

    Results that an engine made are taken to the host's arrays (`to_host`) once, before the first host step that reads
    them, and constants when the plan is made. owned: results
    share no memory with inputs, constants or one another, so that no side can change the other's data; a plan whose
    results go on into another plan does without. kind: makes the plan from the arguments of `Plan`.
    """
    builder = _Builder(graph, to_host)
    for node in graph.nodes:
        builder.add(node, lower(node))
    return kind(*builder.parts(), owned)


def _read_only(x: Any) -> Any:
    """A read-only view of an array; of a sequence, one of each element."""
    if isinstance(x, np.ndarray):
        if x.flags.writeable:
            x = x.view()
            x.flags.writeable = False
        return x
    return [_read_only(e) for e in x] if isinstance(x, list) else x


def _aligned(x: Any) -> Any:
    """`x` where its elements are aligned; weights mapped from a file may not be, and would be copied at every use."""
    return x.copy() if isinstance(x, np.ndarray) and not x.flags.aligned else x


def _own(results: list[Any]) -> list[Any]:
    """The results with copies for host arrays that are not plain arrays of their own.

    Read-only ones (views of inputs and constants, broadcasts), parts of larger arrays, and what shares memory with an
    earlier result.
    """
    seen: set[int] = set()

    def own(x: Any) -> Any:
        if isinstance(x, np.ndarray):
            root = x
            while isinstance(root.base, np.ndarray):
                root = root.base
            if x.flags.writeable and root.base is None and root.nbytes == x.nbytes and id(root) not in seen:
                seen.add(id(root))
                return x
            return np.array(x)
        if family_of(type(x)) == "cupy":  # has no read-only arrays to tell views of inputs by
            return x.copy()
        return [own(e) for e in x] if isinstance(x, list) else x

    return [own(x) for x in results]


class _Builder:
    def __init__(self, graph: Graph, to_host: Converter) -> None:
        self.graph = graph
        self.to_host = to_host
        self.registers: list[Any] = []
        self.of: dict[Value, int] = {}  # where a value was made
        self.on_host: dict[Value, int] = {}  # where its NumPy form is
        self.space: dict[Value, str] = {}
        self.steps: list[Step] = []
        self.readers: dict[Value, set[str]] = {}
        self.launches: list[Launch] = []
        self.none = -1
        for v in graph.inputs:
            self.of[v] = self.on_host[v] = self.new()
            self.space[v] = HOST

    def new(self, content: Any = None) -> int:
        self.registers.append(content)
        return len(self.registers) - 1

    def all_to_host(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """The step that takes an engine's results to the host."""
        return [self.to_host(a) for a in arrays]

    def nothing(self) -> int:
        """A register that always holds None, for inputs left out."""
        if self.none < 0:
            self.none = self.new()
        return self.none

    def register(self, v: Value | None, space: str) -> int:
        """The register from which a step in `space` reads `v`."""
        if v is None:
            return self.nothing()
        if v not in self.of:  # a constant; captured values are inputs by now
            self.of[v] = self.on_host[v] = self.new(self.to_host(_aligned(_read_only(v.data))))
            self.space[v] = HOST
        self.readers.setdefault(v, set()).add(space)
        if self.space[v] == space and space != HOST:
            return self.of[v]
        if v not in self.on_host:
            self.on_host[v] = self.new()
            self.steps.append(Step(self.all_to_host, (self.of[v],), (self.on_host[v],), (), "to_host"))
        return self.on_host[v]

    def add(self, node: Node, lowered: Lowered) -> None:
        call, space, label = lowered
        given = [*node.inputs, *node.captures] if node.subgraphs else node.inputs
        inputs = tuple(self.register(v, space) for v in given)
        outputs = []
        for v in node.outputs:
            if v is None:
                outputs.append(-1)
                continue
            r = self.of[v] = self.new()
            outputs.append(r)
            self.space[v] = space
            if space == HOST:
                self.on_host[v] = r
        if isinstance(call, Launch):
            self.launches.append(call)
        self.steps.append(Step(call, inputs, tuple(outputs), (), label))

    def parts(self) -> tuple[Any, ...]:
        """The arguments of `Plan`, all but the last."""
        graph = self.graph
        outputs, spaces = [], []
        for v in graph.outputs:
            space = self.space.get(v, HOST)
            register = self.register(v, space)
            if space != HOST and register in outputs:  # returned twice: the second is the host's, and so copied
                space, register = HOST, self.register(v, HOST)
            outputs.append(register)
            spaces.append(space)
        engine_inputs: list[str | None] = []
        for v in graph.inputs:
            readers = self.readers.get(v, set())
            engine_inputs.append(next(iter(readers)) if len(readers) == 1 and HOST not in readers else None)
        guarded = [i for i, v in enumerate(graph.inputs) if HOST in self.readers.get(v, ())]
        steps = _with_deaths(self.steps, outputs, self.registers)
        return len(graph.inputs), self.registers, steps, outputs, spaces, engine_inputs, self.launches, guarded


def _with_deaths(steps: Sequence[Step], outputs: Sequence[int], registers: Sequence[Any]) -> list[Step]:
    """The steps, each clearing the registers that nothing reads after it."""
    kept = set(outputs) | {i for i, r in enumerate(registers) if r is not None}
    result: list[Step] = []
    for s in reversed(steps):
        dead = tuple(dict.fromkeys(i for i in (*s.inputs, *s.outputs) if i >= 0 and i not in kept))
        kept.update(dead)
        result.append(s._replace(dead=dead))
    result.reverse()
    return result

"""Plan: a partitioned graph lowered to a register program, and its interpreter loop."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import numpy as np

from xrt_core.errors import ExecutionError, InternalError, XRTError
from xrt_core.ir.file_backed import aligned
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.symbols import Expr
from xrt_core.runtime import recording
from xrt_core.runtime.arrays import Converter, family_of, to_numpy, without_warnings
from xrt_core.runtime.launch import DeviceLaunch, Launch
from xrt_core.runtime.memory_planner import Buffers, Memory
from xrt_core.runtime.recording import Recorder, Sink, Timeline, recorded, recorded_call
from xrt_core.runtime.scheduler import Execute, LaneScheduler, Step

Call = Callable[[Sequence[Any]], Sequence[Any]]
Scope = Callable[[], AbstractContextManager[Any]]

HOST = "host"


class Program(NamedTuple):
    """The contents of a plan.

    inputs: their number; they occupy the first registers, followed by the constants that host steps and outputs read.
    registers: initial contents. outputs: registers of the results. spaces: for each output the space that produces it,
        "host" or an engine's name.
    engine_inputs: for each input, the engine that is its only reader (it may be an array of that engine), or None.
    read_only: inputs that host steps or outputs read. Their arrays are passed as read-only views, as constants are, so
        that a writable result shares no memory with them. on_device: those that host steps read in the host's
        namespace: under CuPy `to_host` takes them to the device, once. within: makes the context of a run, in which
        that namespace works on its device; None for NumPy. owned: whether results must not share memory (see `_own`);
        not needed for subgraphs, whose results are read by further steps. name: of the graph, human-readable.
    """

    inputs: int
    registers: list[Any]
    steps: Sequence[Step]
    outputs: Sequence[int]
    spaces: Sequence[str]
    engine_inputs: Sequence[str | None]
    launches: Sequence[Launch]
    read_only: Sequence[int]
    on_device: Sequence[int]
    to_host: Converter
    within: Scope | None
    owned: bool
    memory: Memory
    name: str = "graph"


class Plan:
    """Steps over numbered registers. Thread-safe: each run has its own registers.

    outputs, spaces, engine_inputs, name: see `Program`. memory: of a run. guards: of a symbolic plan, expressions over
    its symbols that must not be negative for it to hold. agrees: whether the nodes of a symbolic plan allow sizes of
    the symbols; None where they allow all.
    pinned: whether somebody beside its cache keeps it for calls. run: function from the input arrays to the results. It
    is replaced, as are the steps that run, while something
    records (`runtime.recording`), so it is looked up for each call.
    """

    __slots__ = (
        "__weakref__", "_by_steps", "_call", "_constants", "_core", "_execute", "_has_host_steps", "_of_launch",
        "_on_device", "_owned", "_parallel", "_read_only", "_running", "_sink", "_template", "_to_host", "_within",
        "agrees", "engine_inputs", "guards", "launches", "memory", "name", "outputs", "pinned", "run", "spaces",
        "steps",
    )  # fmt: skip

    def __init__(self, program: Program) -> None:
        self._template = program.registers
        self._read_only = tuple(program.read_only)
        self._to_host = program.to_host
        self._within = program.within
        self._on_device = () if program.to_host is to_numpy else tuple(program.on_device)
        self._owned = program.owned and HOST in program.spaces
        self._constants = _memories(program.registers) if self._on_device or program.to_host is not to_numpy else set()
        self.steps = tuple(program.steps)
        self.outputs = tuple(program.outputs)
        self.spaces = tuple(program.spaces)
        self.engine_inputs = tuple(program.engine_inputs)
        self.launches = tuple(program.launches)
        self.memory = program.memory
        self.guards: Sequence[Expr] = ()
        self.agrees: Callable[[Mapping[str, int]], bool] | None = None
        self.pinned = False
        self._has_host_steps = any(not isinstance(s.call, Launch) for s in self.steps)
        self._parallel: LaneScheduler | None = None
        self._execute: Execute = self._in_order
        self.name = program.name
        self._running = self.steps  # as they are run: others while something records
        self._core = _core(self.steps)
        self._sink: Sink | None = None
        self._of_launch = _of_one_launch(program)
        self.run: Call = self._run if self._of_launch is None else self._of_launch(self.steps[0].call)
        self._call = self._by_steps = self.run
        with recording.lock:
            recording.plans.add(self)
            if recording.recorders:
                self.record(recording.sink())

    def answer_by(self, call: Call) -> None:
        """Let `run` be another function from the input arrays to the results."""
        self._call = call
        self.record(self._sink)

    def record(self, sink: Sink | None) -> None:
        """See `recording.Recordable`."""
        self._sink = sink
        if sink is None:
            self._running, self._core, self.run = self.steps, _core(self.steps), self._call
            return
        self._running = tuple(recorded(s, self.name, sink) for s in self.steps)
        self._core = _core(self._running)
        call = self._call
        if self._of_launch is not None and call is self._by_steps:
            call = self._of_launch(self._running[0].call)
        self.run = recorded_call(self.name, call, sink)

    @property
    def is_one_launch(self) -> bool:
        """Whether the whole graph is one Launch, which is called directly."""
        return isinstance(self._call, Launch)

    @property
    def is_unbuilt(self) -> bool:
        """Whether an executable is not there (yet)."""
        return any(x.executable is None for x in self.launches)

    @property
    def is_unplanned(self) -> bool:
        """Whether it only stands in for a plan that is still to be made."""
        return False

    def release(self, reason: str) -> None:
        """Let the executables go, and cancel the builds of those that are not there yet, as the plan was dropped."""
        if not self.pinned:
            for launch in self.launches:
                launch.release(reason)

    def run_side_by_side(self) -> None:
        """Run launches of different lanes concurrently from now on."""
        kept = [*self.outputs, *(i for i, r in enumerate(self._template) if r is not None)]
        alone = [i for i, s in enumerate(self.steps) if isinstance(s.call, Launch) and s.call.function.aliases]
        self._parallel = LaneScheduler(self.steps, kept, alone)
        self._execute = self._in_lanes

    @property
    def side_by_side(self) -> bool:
        """Whether launches of different lanes run concurrently."""
        return self._parallel is not None

    @property
    def may_run_side_by_side(self) -> bool:
        """Whether launches of different lanes may run concurrently, in this plan or in a subgraph."""
        return self.side_by_side

    @property
    def runs_ahead(self) -> bool:
        """Whether the plan has launches and all of them may return before their results are computed."""
        return bool(self.launches) and all(isinstance(x, DeviceLaunch) and x.asynchronous for x in self.launches)

    def run_ahead(self, asynchronous: Collection[str]) -> bool:
        """Let runs return before their results are computed from now on, where the engines of all steps are among those
        that allow it (`Engine.asynchronous`); returns whether it does. Whoever runs the plan leaves NumPy's arrays that
        it gives alone until a result was read, and takes a failure that comes as late as that. With the guard, which
        has to know what each run did, launches are always waited for."""
        launches = [s.call for s in self.steps]
        if not launches or not all(
            (type(x) is Launch or (type(x) is DeviceLaunch and x.asynchronous)) and x.engine in asynchronous
            for x in launches
        ):
            return False
        for x in self.launches:
            x.ahead = True
        return True

    def run_timed(self, arrays: Sequence[Any]) -> tuple[list[Any], Timeline]:
        """Run as `run` does; return the results and the timeline of the steps."""
        recorder = Recorder()
        begin = time.perf_counter()
        steps = [recorded(s, self.name, recorder) for s in self.steps]

        def execute(registers: list[Any]) -> None:
            if self._parallel is not None:
                self._parallel(registers, steps)
            else:
                _run_in_order(_core(steps), registers)

        return self._run_by(execute, arrays), Timeline(recorder.spans(begin))

    def run_on_host(self, arrays: Sequence[Any], error: XRTError, engine: str) -> list[Any]:
        """Run every launch on the host, after a result of `engine` could not be read. Counts as a failure of its
        launches."""
        steps = [s._replace(call=s.call.on_host) if isinstance(s.call, Launch) else s for s in self.steps]
        results = self._run_by(lambda registers: _run_in_order(_core(steps), registers), arrays)
        for launch in self.launches:
            if launch.engine == engine:
                launch.failed(error)
        return results

    def _run(self, arrays: Sequence[Any]) -> Sequence[Any]:
        return self._run_by(self._execute, arrays)

    def _run_by(self, execute: Execute, arrays: Sequence[Any]) -> list[Any]:
        if self._within is None:
            return self._run_here(execute, arrays)
        with self._within():
            return self._run_here(execute, arrays)

    def _run_here(self, execute: Execute, arrays: Sequence[Any]) -> list[Any]:
        registers = self._template.copy()
        registers[: len(arrays)] = arrays
        for i in self._read_only:
            registers[i] = _read_only(registers[i])
        for i in self._on_device:
            registers[i] = self._to_host(registers[i])
        lent = self._constants
        if self._to_host is not to_numpy and self._owned:
            lent = lent | _memories(registers[: len(arrays)])
        if self._has_host_steps:
            without_warnings(execute, registers)  # NaN and infinities are results
        else:
            execute(registers)
        results = [registers[i] for i in self.outputs]
        return _own(results, lent) if self._owned else results

    def _in_order(self, registers: list[Any]) -> None:
        _run_in_order(self._core, registers)

    def _in_lanes(self, registers: list[Any]) -> None:
        assert self._parallel is not None
        self._parallel(registers, self._running)

    def as_text(self) -> str:
        """Return the program, one step per line."""
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


def _of_one_launch(program: Program) -> Callable[[Call], Call] | None:
    """Makes the function that runs a program of one Launch of what runs that; None for other programs. Where it takes
    the inputs and gives the results as they are, it is called directly."""
    if len(program.steps) != 1 or not isinstance(program.steps[0].call, Launch):
        return None
    step = program.steps[0]
    if step.inputs == tuple(range(program.inputs)) and step.outputs == tuple(program.outputs):
        return lambda call: call
    if program.within is not None or program.read_only or program.to_host is not to_numpy:
        return None
    if any(i >= program.inputs for i in step.inputs) or not set(program.outputs) <= set(step.outputs):
        return None
    taken, given = step.inputs, tuple(step.outputs.index(i) for i in program.outputs)
    # picked in C; of one, `itemgetter` gives the element itself
    pick = (itemgetter(*taken), itemgetter(*given)) if min(len(taken), len(given)) > 1 else None

    def around(call: Call) -> Call:
        if pick is not None:
            take, give = pick

            def run(arrays: Sequence[Any]) -> Sequence[Any]:
                return [*give(call([*take(arrays)]))]

            return run

        def run_few(arrays: Sequence[Any]) -> Sequence[Any]:
            results = call([arrays[i] for i in taken])
            return [results[i] for i in given]

        return run_few

    return around


def _core(steps: Sequence[Step]) -> tuple[tuple[Any, ...], ...]:
    """What a run in order needs of each step, as plain tuples, which are unpacked faster than named ones."""
    return tuple([(s.call, s.inputs, s.outputs, s.dead) for s in steps])


def _run_in_order(steps: Sequence[tuple[Any, ...]], registers: list[Any]) -> None:
    """Run the steps sequentially. No local variable keeps an array alive beyond the step that produced it."""
    results: Any
    for call, inputs, outputs, dead in steps:
        results = call([registers[i] for i in inputs])
        if len(outputs) == 1:
            if outputs[0] >= 0:
                registers[outputs[0]] = results[0]
        else:
            for i, result in zip(outputs, results, strict=False):
                if i >= 0:
                    registers[i] = result
        result = results = None
        for i in dead:
            registers[i] = None


class Lowered(NamedTuple):
    """A lowered node.

    call: the function that computes it; None if its output is its input unchanged. space: of its results.
    label: human-readable. reads: the space of its inputs, if different. lane: for a launch, its engine and device.
    shares: whether results are views of the first input. reusable: indices of inputs that the result may be written
    over. reusing: returns the function that does so, given those of them that nothing reads after the node.
    cpu: indices of inputs that the call reads on the CPU, whatever the host's namespace.
    """

    call: Call | None
    space: str
    label: str
    reads: str = ""
    lane: str = ""
    shares: bool = False
    reusable: tuple[int, ...] = ()
    reusing: Callable[[Sequence[int]], Call] | None = None
    cpu: frozenset[int] = frozenset()


P = TypeVar("P", bound=Plan)


def make_plan(
    graph: Graph,
    lower: Callable[[Node], Lowered],
    kind: Callable[[Program], P] = Plan,  # type: ignore[assignment]
    *,
    owned: bool = True,
    to_host: Converter = to_numpy,
    within: Scope | None = None,
) -> P:
    """Compile a partitioned graph to a plan. lower: translates each node (omitted inputs are passed as None).

    Values are transferred between spaces by the converter nodes of the graph (`passes.partitioning.outline`);
    constants are converted to host arrays by `to_host` here, unless a step reads them on the CPU. Nodes run in the
    order of the graph, or in one that needs less memory. owned: results share no memory with inputs, constants or one
    another, so that neither side can modify the other's data; not needed for a plan whose results another plan reads.
    kind: creates the plan from a `Program`. within: makes the context in which `to_host` works, and each run.

    Raises InternalError if a node reads a value of another space.
    """
    lowered = [lower(n) for n in graph.nodes]
    own = [owned and _space(graph, v, lowered) == HOST for v in graph.outputs]
    buffers = Buffers(graph, [x.shares or x.call is None for x in lowered], [x.reusable for x in lowered], own)
    writes = any(isinstance(x.call, Launch) and x.call.function.aliases for x in lowered)
    # a node that writes into its inputs stays after their other readers
    order = list(range(len(lowered))) if writes else buffers.better_order()
    builder = _Builder(graph, to_host, within)
    with contextlib.nullcontext() if within is None else within():
        memory = buffers.memory(order, [x.label for x in lowered])
        for i, own_bytes in zip(order, memory.steps, strict=False):  # the last is at the return
            builder.add(graph.nodes[i], lowered[i], own_bytes)
        return kind(builder.program(owned, memory))


def _space(graph: Graph, v: Value, lowered: Sequence[Lowered]) -> str:
    i = graph.producers.get(v)
    return HOST if i is None else lowered[i].space


def _read_only(x: Any) -> Any:
    """Return a read-only view of an array; of a sequence, of each element."""
    if isinstance(x, np.ndarray):
        if x.flags.writeable:
            x = x.view()
            x.flags.writeable = False
        return x
    return [_read_only(e) for e in x] if isinstance(x, list) else x


def _aligned(x: Any) -> Any:
    """`x`, or its aligned copy (`ir.file_backed.aligned`)."""
    return aligned(x) if isinstance(x, np.ndarray) else x


def _memories(arrays: Sequence[Any]) -> set[int]:
    """The memory blocks of CuPy's arrays, by the identity of the objects that hold them; sequences count as well."""
    found: set[int] = set()
    for x in arrays:
        if isinstance(x, list):
            found |= _memories(x)
        elif x is not None and type(x) is not np.ndarray and family_of(type(x)) == "cupy":
            found.add(id(x.data.mem))
    return found


def _own(results: list[Any], lent: Collection[int] = ()) -> list[Any]:
    """Return the results, host arrays that do not own their memory exclusively replaced by copies.

    lent: memory blocks on a device (`_memories`) of inputs and constants.

    These are read-only arrays (views of inputs and constants, broadcasts), views of larger arrays, and arrays that
    share memory with an earlier result. Raises ExecutionError with its size for a view that does not fit the memory.
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
            try:
                return np.array(x)
            except MemoryError as e:
                size = f"{x.dtype}{list(x.shape)} takes {x.size * x.itemsize:,} bytes"
                raise ExecutionError(f"a result, a view until now, does not fit the memory: {size}") from e
        if isinstance(x, list):
            return [own(e) for e in x]
        if isinstance(x, dict):  # a map: of numbers and texts
            return x
        if family_of(type(x)) == "cupy":  # which has no read-only arrays: views are told by the block that they lie in
            block, whole = id(x.data.mem), getattr(x, "base", None)
            if block in lent or block in seen or (whole is not None and whole.nbytes > x.nbytes):
                return x.copy()
            seen.add(block)
        return x

    return [own(x) for x in results]


class _Builder:
    def __init__(self, graph: Graph, to_host: Converter, within: Scope | None) -> None:
        self.graph = graph
        self.to_host = to_host
        self.within = within
        self.registers: list[Any] = []
        self.of: dict[Value, int] = {}
        self.on_cpu: dict[Value, int] = {}  # constants that steps read on the CPU
        self.on_device: set[int] = set()  # registers that host steps read in the host's namespace
        self.space: dict[Value, str] = {}  # of values outside the host's space
        self.steps: list[Step] = []
        self.reusing: dict[int, Lowered] = {}  # steps that can write over an input
        self.readers: dict[int, set[str]] = {}  # register -> spaces
        self.launches: list[Launch] = []
        self.none = -1
        for v in graph.inputs:
            self.of[v] = self.new()

    def new(self, content: Any = None) -> int:
        self.registers.append(content)
        return len(self.registers) - 1

    def nothing(self) -> int:
        """Return a register that always holds None, for omitted inputs."""
        if self.none < 0:
            self.none = self.new()
        return self.none

    def register(self, v: Value | None, cpu: bool = False) -> int:
        """Return the register of `v`; of a constant that is read on the CPU (`cpu`), that of its NumPy array."""
        if v is None:
            return self.nothing()
        if v in self.of:
            return self.of[v]
        # a constant; captured values are inputs by now
        if cpu and self.to_host is not to_numpy:
            if v not in self.on_cpu:
                self.on_cpu[v] = self.new(_aligned(_read_only(to_numpy(v.data))))
            return self.on_cpu[v]
        self.of[v] = self.new(self.to_host(_aligned(_read_only(v.data))))
        return self.of[v]

    def read(self, v: Value | None, space: str, label: str, cpu: bool = False) -> int:
        """Return the register from which a step in `space` reads `v`. cpu: it reads it on the CPU."""
        r = self.register(v, cpu)
        if space == HOST and not cpu:
            self.on_device.add(r)
        home = HOST if v is None else self.space.get(v, HOST)
        if v is not None and home != space:
            raise InternalError(f"{label} reads {v.name!r} on {space}, which is on {home}: a converter is missing")
        self.readers.setdefault(r, set()).add(space)
        return r

    def add(self, node: Node, lowered: Lowered, memory: int) -> None:
        call, space, label = lowered.call, lowered.space, lowered.label
        first, made = node.inputs[0] if node.inputs else None, node.outputs[0] if node.outputs else None
        if call is None:
            assert first is not None
            assert made is not None
            self.of[made] = self.register(first)
            self.space[made] = space
            return
        given = [*node.inputs, *node.captures] if node.subgraphs else node.inputs
        reads = lowered.reads or space
        inputs = tuple(self.read(v, reads, label, i in lowered.cpu) for i, v in enumerate(given))
        outputs = []
        for v in node.outputs:
            if v is None:
                outputs.append(-1)
                continue
            r = self.of[v] = self.new()
            outputs.append(r)
            self.space[v] = space
        if isinstance(call, Launch):
            self.launches.append(call)
        if lowered.reusable:
            self.reusing[len(self.steps)] = lowered
        self.steps.append(Step(call, inputs, tuple(outputs), (), label, lowered.lane, node, memory))

    def program(self, owned: bool, memory: Memory) -> Program:
        """Return the finished program."""
        graph = self.graph
        outputs = [self.register(v) for v in graph.outputs]
        spaces = [self.space.get(v, HOST) for v in graph.outputs]
        for r, space in zip(outputs, spaces, strict=True):
            self.readers.setdefault(r, set()).add(space)
        engine_inputs: list[str | None] = []
        for i in range(len(graph.inputs)):
            readers = self.readers.get(i, set())
            engine_inputs.append(next(iter(readers)) if len(readers) == 1 and HOST not in readers else None)
        read_only = [i for i in range(len(graph.inputs)) if HOST in self.readers.get(i, ())]
        on_device = [i for i in range(len(graph.inputs)) if i in self.on_device]
        steps = _with_deaths(self.steps, outputs, self.registers)
        for i, lowered in self.reusing.items():
            dying = [k for k in lowered.reusable if steps[i].inputs[k] in steps[i].dead]
            if dying and lowered.reusing is not None:
                steps[i] = steps[i]._replace(call=lowered.reusing(dying))
        return Program(
            len(graph.inputs), self.registers, steps, outputs, spaces, engine_inputs, self.launches, read_only,
            on_device, self.to_host, self.within, owned, memory, graph.name or "graph",
        )  # fmt: skip


def _with_deaths(steps: Sequence[Step], outputs: Sequence[int], registers: Sequence[Any]) -> list[Step]:
    """Return the steps, each extended by the registers to clear after it (their last reader)."""
    kept = set(outputs) | {i for i, r in enumerate(registers) if r is not None}
    result: list[Step] = []
    for s in reversed(steps):
        dead = tuple(dict.fromkeys(i for i in (*s.inputs, *s.outputs) if i >= 0 and i not in kept))
        kept.update(dead)
        result.append(s._replace(dead=dead))
    result.reverse()
    return result

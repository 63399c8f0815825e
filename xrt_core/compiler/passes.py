"""The default passes in order, each with the reason for its position, and the registry of user and plugin passes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np

from xrt_core.engine.device_kinds import CPU, is_host
from xrt_core.errors import PluginError
from xrt_core.events import EventLog
from xrt_core.host.executor import run_node
from xrt_core.ir.graph import Graph, Node, engine_and_device, is_placed
from xrt_core.ir.op_traits import traits_of
from xrt_core.ir.types import ValueType
from xrt_core.kernels import find_kernel, static_inputs
from xrt_core.options import Options
from xrt_core.passes.counted_loops import CountedLoops
from xrt_core.passes.data_dependent_shapes import SplitLate, Taken, taken_by_none
from xrt_core.passes.loop_invariants import LoopInvariants
from xrt_core.passes.mixed_precision import Constraint, LowerPrecision, PrecisionReport
from xrt_core.passes.partitioning import (
    Candidate,
    MarkRule,
    PartitionReport,
    apply_marks,
    apply_placement,
    cluster,
    costs_for,
    mark,
    names_a_device,
    names_an_engine,
    outline,
    place,
    report,
    resolve_devices,
    without_marks,
)
from xrt_core.passes.pass_base import Pass
from xrt_core.passes.pass_manager import PassRegistry, RegisteredPass, described
from xrt_core.passes.shape_specialization import specialise
from xrt_core.passes.sharding import ShardingReport, automatic, by_batch, shard_graph, without_boxing
from xrt_core.passes.simplify import CommonSubexpressions, ConstantFold, DeadNodes, IdentityNodes, ImplicitBroadcasts
from xrt_core.passes.sized_graphs import graph_at
from xrt_core.passes.symbolic_shapes import SymbolicShapes


@dataclass
class PassResults:
    """Results of passes other than the graph. automatic: whether unmarked nodes are offered to engines.

    precision: the nodes lowered to a narrow float. sharding: how tensors lie on the mesh. report: creates the
    partition report.
    """

    automatic: bool = True
    precision: PrecisionReport | None = None
    sharding: ShardingReport | None = None
    report: Callable[[], PartitionReport] | None = None


@dataclass(frozen=True)
class PassContext:
    """Context of one run of the default passes, and the slot for their results.

    options, rules, lowering: of the module. part: the graph is a subgraph that is planned separately. types, known: of
    the signature. engines: whether the graph is compiled for engines. native: whether an engine takes
    a plugin's node as it is, for sizes of the symbols in its shapes. taken_of_any_shape: which engine takes nodes whose
    shapes depend on data, and which of them. candidates: graph -> partitioning candidates.
    device: the device of the first engine. device_for: the name of a placed node's device, see `resolve_devices`; None:
    placements do not count. host_device: where the host computes, None for the engines' device. give_up: see `place`.
    automatic: whether unmarked nodes are offered to engines. obey: whether
    marks for engines apply. absent: engine name -> why it is not selected (see `mark`). host_on_device: the host
    computes on the engines' device. mark_updates: annotates nodes whose kernels declare that they write variables.
    convert: inserts converters where values change space. symbolic: of a symbolic signature, what is known of its
    shapes. why_no_mesh: why no engine shards, "" if one does. results: results other than the graph.
    """

    options: Options
    rules: Sequence[MarkRule] = ()
    lowering: LowerPrecision | None = None
    part: bool = False
    types: Sequence[ValueType | None] = ()
    known: Mapping[int, np.ndarray] = field(default_factory=dict)
    engines: bool = False
    native: Callable[[Node, Mapping[str, int]], bool] | None = None
    taken_of_any_shape: Taken | None = None
    candidates: Callable[[Graph], Sequence[Candidate]] = lambda graph: ()
    device: str = CPU.name
    device_for: Callable[[str], str | None] | None = None
    host_device: str | None = CPU.name
    give_up: Callable[[str, str, str], None] | None = None
    automatic: bool = True
    obey: bool = True
    absent: Callable[[str], str] = lambda name: ""
    host_on_device: bool = False
    mark_updates: Callable[[Graph], Graph] = lambda graph: graph
    convert: Callable[[Graph], Graph] = lambda graph: graph
    symbolic: SymbolicShapes | None = None
    why_no_mesh: str = ""
    results: PassResults = field(default_factory=PassResults)


def rules_of(options: Options) -> tuple[MarkRule, ...]:
    """Return the rules of the option `marks`."""
    return tuple(MarkRule(*row) for row in options.marks) if isinstance(options.marks, tuple) else ()


def placement_rules(options: Options) -> tuple[MarkRule, ...]:
    """Return the rules of the option `placement`."""
    return tuple(MarkRule(pattern, device, "placement") for pattern, device in options.placement if device)


def lowering(options: Options, *, training: bool = False) -> LowerPrecision | None:
    """Return the mixed-precision pass for these options, or None if they enable none.

    training: for a graph that gradients are built from. Raises OptionError for an unknown operator.
    """
    marks = options.precision if isinstance(options.precision, tuple) else ()
    if options.narrow is None and not marks:
        return None
    constraints = [Constraint.of(key, dtype) for key, dtype in marks]
    target = None if options.strict_types else options.narrow
    return LowerPrecision(target, constraints, obey=options.force_precision_constraints, training=training)


# --- the passes ---

_SIMPLIFY: Final[tuple[Pass, ...]] = (IdentityNodes(), ImplicitBroadcasts(), CommonSubexpressions(), DeadNodes())


def _apply_marks(graph: Graph, context: PassContext) -> Graph:
    if context.options.marks is False:
        graph = without_marks(graph)
    elif not context.part:
        graph = apply_marks(graph, context.rules)
    if not context.part and (context.options.placement or names_a_device(graph)):
        graph = apply_placement(graph, placement_rules(context.options))
    asked = context.options.automatic
    context.results.automatic = asked if asked is not None else not names_an_engine(graph)
    return graph


def _constant_fold(graph: Graph, context: PassContext) -> Graph:
    return ConstantFold(run_node, context.options.constant_fold_limit)(graph)


def _specialise(graph: Graph, context: PassContext) -> Graph:
    limit, symbolic = context.options.constant_fold_limit, context.symbolic
    native = None if context.lowering is not None else context.native
    sizes = {} if symbolic is None else symbolic.sizes

    def body_of(node: Node) -> Graph | None:
        return expand(node) if native is None or not native(node, sizes) else None

    return specialise(
        graph, context.types, context.known, run_node, fold_limit=limit, expand=body_of, symbolic=symbolic,
        body_of=expand,
    )  # fmt: skip


def _split_late(graph: Graph, context: PassContext) -> Graph:
    if not context.engines:  # no region is deferred: the host handles these too
        return graph
    taken = taken_by_none if context.options.mesh is not None else context.taken_of_any_shape or taken_by_none
    if context.symbolic is None:
        return SplitLate(needed_inputs, taken=taken)(graph)
    # dynamic engines need to know no input
    return SplitLate(lambda node: (), symbolic=True, taken=taken, elements=context.symbolic.elements)(graph)


def _lower_precision(graph: Graph, context: PassContext) -> Graph:
    if context.lowering is None:
        return graph
    graph, context.results.precision = context.lowering.apply(graph)
    for p in _SIMPLIFY:
        graph = p(graph)
    return graph


def _shard(graph: Graph, context: PassContext) -> Graph:
    mesh = context.options.mesh
    if mesh is None and not any(n.op_type == "Boxing" for n in graph.nodes):
        return graph
    if mesh is None or context.part:
        return without_boxing(graph)
    if context.why_no_mesh:
        context.results.sharding = ShardingReport(str(mesh), replicated={graph.name or "graph": context.why_no_mesh})
    if context.why_no_mesh or not context.engines:
        return without_boxing(graph)
    given = context.options.sharding
    if given is None:
        rules = by_batch(graph, mesh)
    else:
        rules = automatic(graph, mesh) if isinstance(given, str) else dict(given)
    graph, context.results.sharding = shard_graph(graph, mesh, rules)
    return graph


def _subblock_to_engine(graph: Graph, context: PassContext) -> Graph:
    options = context.options
    placed: Mapping[int, str] = {}
    device_for = context.device_for if context.device_for is not None and is_placed(graph) else None
    if device_for is not None:
        graph = resolve_devices(graph, device_for, context.give_up)
    candidates = context.candidates(graph)
    if device_for is not None:
        graph, placed = place(graph, candidates, context.host_device, context.give_up)
    marks = mark(
        graph,
        candidates,
        options.phase,
        context.device,
        automatic=context.automatic,
        obey=context.obey,
        absent=context.absent,
        placed=placed,
        reserved=[c.name for c in candidates if engine_and_device(c.name)[1]],
    )
    # what a cluster saves is estimated for the sizes of the first call
    sized = graph if context.symbolic is None else graph_at(graph, context.symbolic.sizes)
    clustering = cluster(
        sized,
        marks,
        minimum_nodes=options.minimum_nodes,
        maximum_nodes=options.maximum_nodes,
        strict=options.strict_clustering,
        merge_updates=options.merge_updates,
        costs=lambda device: costs_for(is_host(device), context.host_on_device),
        prune=options.prune,
    )
    outlined = outline(graph, clustering, None if context.symbolic is None else context.symbolic.element_dims)
    context.results.report = partial(report, graph.nodes, clustering, outlined)
    return outlined


def _of(p: Pass) -> Callable[[Graph, PassContext], Graph]:
    return lambda graph, _: p(graph)


DEFAULT_PASSES: Final = (
    RegisteredPass(
        "apply_marks", _apply_marks, ("model",),
        "before any rewrite: mark patterns match the node names of the user's model",
    ),
    RegisteredPass(
        "constant_fold", _constant_fold, ("model",),
        "once per model: values that depend on constants alone are the same for every signature",
    ),
    RegisteredPass(
        "loop_invariants", _of(LoopInvariants()), ("model",),
        "before loops are looked at and values folded in their bodies: what never changes may be a constant there",
    ),
    RegisteredPass(
        "counted_loops", _of(CountedLoops()), ("model",),
        "before shapes are known: how often a loop turns gives those of its results, and the range of what it counts",
    ),
    RegisteredPass(
        "mark_updates", lambda graph, context: context.mark_updates(graph), ("signature",),
        "before nodes are folded, merged or removed: an update of variables runs once",
    ),
    RegisteredPass(
        "specialise", _specialise, ("signature",),
        "per signature: static shapes allow folding shape arithmetic, removing dead branches and inferring types",
    ),
    RegisteredPass(
        "identity", _of(_SIMPLIFY[0]), ("signature",),
        "after type inference: most identities (Cast, Reshape) are recognised by their types",
    ),
    RegisteredPass(
        "implicit_broadcasts", _of(_SIMPLIFY[1]), ("signature",),
        "after identity elimination: an Expand that changes nothing is none; before the shapes that it reads are dead",
    ),
    RegisteredPass(
        "common_subexpressions", _of(_SIMPLIFY[2]), ("signature",),
        "after identity elimination: identities would give equal nodes different inputs",
    ),
    RegisteredPass(
        "clean_unused", _of(_SIMPLIFY[3]), ("model", "signature"),
        "after the passes that leave nodes without readers; also once after constant folding",
    ),
    RegisteredPass(
        "split_late", _split_late, ("signature",),
        "last of the stage: nodes with data-dependent shapes leave the graph before support is queried",
    ),
    RegisteredPass(
        "lower_precision", _lower_precision, ("signature",),
        "on final nodes, so that no cast is inserted for a removed node; engines read the types",
    ),
    RegisteredPass(
        "shard", _shard, ("signature",),
        "on final nodes and types: conversions are for what is left to compute; clusters then hold them",
    ),
    RegisteredPass(
        "subblock_to_engine", _subblock_to_engine, ("engines",),
        "per engine by priority: query support, cluster, outline into Launch nodes; needs final nodes and types",
    ),
    RegisteredPass(
        "engine_converters", lambda graph, context: context.convert(graph), ("engines",),
        "after partitioning, which determines where values are transferred between the host and engines",
    ),
)  # fmt: skip
"""The core's passes in order. Then, not as passes: every Launch's Function is compiled, and the graph is lowered."""

passes: Final = PassRegistry(DEFAULT_PASSES)
"""The passes of this process: the core's, and those that users and plugins registered."""


# --- those of others ---


def register_pass(
    thing: Any = None,
    /,
    *,
    name: str | None = None,
    stage: str | None = None,
    before: str | Iterable[str] | None = None,
    after: str | Iterable[str] | None = None,
    requires: str | Iterable[str] | None = None,
    reason: str | None = None,
) -> Any:
    """Register a pass for modules created from now on: a function Graph -> Graph, or a subclass of `Pass`. Also a
    decorator.

        @xrt.register_pass(after="identity")
        def fuse_gelu(graph): ...

    stage: "model" (once, types as declared), "signature" (types known; the default) or "engines" (clusters become
    launches). before, after: passes to precede or follow; with neither it runs before `clean_unused`. requires: passes
    that must be registered and run earlier. reason: shown by `xrt passes`; default: the docstring's first line.

    Raises RegistrationError for a taken name, an unknown stage or pass, and a cyclic order. A pass that raises, or
    returns an invalid graph, raises PassError in the call of the module.
    """

    def add(given: Any) -> Any:
        owner = f"{getattr(given, '__module__', type(given).__module__)}"
        passes.register(
            described(
                given, name=name, owner=owner, origin="user", stage=stage, before=before, after=after,
                requires=requires, reason=reason,
            )
        )  # fmt: skip
        return given

    return add if thing is None else add(thing)


def unregister_pass(name: str) -> None:
    """Remove a pass added by `register_pass`. Raises RegistrationError for any other."""
    passes.unregister(name)


_plugins_lock = threading.Lock()
_plugin_passes: dict[tuple[str, str], str] = {}  # (name, owner) of each plugin pass seen -> why it is left out, or ""


def load_plugin_passes(events: EventLog) -> dict[str, str]:
    """Register the plugin passes that have not been seen before. Returns name -> reason, of all that were left out.

    A broken plugin is reported by one event and does not affect other plugins.
    """
    from xrt_core.engine import engines

    with _plugins_lock:
        found = []
        for name, owner, thing in engines.load_passes():
            if (name, owner) in _plugin_passes:
                continue
            _plugin_passes[name, owner] = ""
            try:
                if isinstance(thing, PluginError):
                    raise thing
                found.append(described(thing, name=name, owner=owner, origin="plugin"))
            except Exception as e:  # an attribute of the plugin's object may run arbitrary code
                _left_out(events, name, owner, str(e))
        refused = passes.register_all(found)
        for p in found:
            if p.name in refused:
                _left_out(events, p.name, p.owner, refused[p.name])
        return {name: why for (name, _), why in _plugin_passes.items() if why}


def _left_out(events: EventLog, name: str, owner: str, why: str) -> None:
    _plugin_passes[name, owner] = why
    events.emit("pass.left_out", level=logging.WARNING, name_of_pass=name, owner=owner, reason=why)


# --- callbacks of the passes: function bodies and required inputs ---


def expand(node: Node) -> Graph | None:
    """Return the function body, or a plugin's lowering, of an operator that no kernel implements; else None."""
    if node.domain == "xrt" or find_kernel(node.domain, node.op_type) is not None or traits_of(node).control_flow:
        return None
    from xrt_core.frontends.onnx_functions import function_body

    return function_body(node)


def needed_inputs(node: Node) -> Iterable[int]:
    """Return the indices of the inputs whose values an engine needs to support `node`; none if no engine can."""
    kernel = find_kernel(node.domain, node.op_type)
    if kernel is not None and (not kernel.static or kernel.why_dynamic(node) is not None):
        return ()
    return static_inputs(node)

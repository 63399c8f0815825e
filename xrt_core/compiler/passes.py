"""The passes of the core, as steps of the pipeline, and the registry that holds those of users and plugins as well."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from xrt_core.engine.device_kinds import CPU, is_host
from xrt_core.errors import PluginError
from xrt_core.events import EventLog
from xrt_core.host.executor import CONTROL_FLOW, run_node
from xrt_core.ir.graph import Graph, Node
from xrt_core.ir.support import Support
from xrt_core.ir.types import STRING, TensorType, ValueType
from xrt_core.kernels import find_kernel, static_inputs
from xrt_core.options import Options
from xrt_core.passes.dynamic_split import SplitLate, is_late
from xrt_core.passes.mixed_precision import Constraint, LowerPrecision, PrecisionReport
from xrt_core.passes.partitioning import (
    Candidate,
    MarkRule,
    PartitionReport,
    apply_marks,
    cluster,
    costs_for,
    mark,
    names_an_engine,
    outline,
    report,
    without_marks,
)
from xrt_core.passes.pass_base import Pass
from xrt_core.passes.pass_manager import PassRegistry, RegisteredPass, Stage, described
from xrt_core.passes.shape_specialization import specialise
from xrt_core.passes.simplify import CommonSubexpressions, ConstantFold, DeadNodes, IdentityNodes

if TYPE_CHECKING:
    from collections.abc import Iterable

STEPS: Final = (
    ("apply_marks", "before anything moves: patterns are about the names that the user knows"),
    ("constant_fold", "once per model: what depends on constants alone must not be redone per signature"),
    ("specialise", "per signature: with shapes known, shape arithmetic folds, dead branches go, the rest gets types"),
    ("identity", "after types are known: most identities (Cast, Reshape) are only then seen to be ones"),
    ("common_subexpressions", "after identities, which would hide equal nodes behind different inputs"),
    ("clean_unused", "after all that leaves nodes unread; once after the constants are folded as well"),
    ("split_late", "the last of them: what waits for data-dependent shapes leaves the graph that is marked"),
    ("lower_precision", "on final nodes, so that no cast is made for one that goes; engines must see the types"),
    ("subblock_to_engine", "engine after engine: mark, cluster, fold into Launch nodes; needs final nodes and types"),
    ("engine_converters", "only now is it known where values cross between the host and engines"),
    ("compile", "each Launch's Function by its engine, through the cache of executables"),
    ("plan", "registers and steps; the graph is not looked at again"),
)
"""Every step of the pipeline, in order: (name, why it stands there). All but the last two are passes."""


@dataclass
class PassContext:
    """What a pass of the core may know of the run that it is part of, and where it leaves what it found.

    options, rules, lowering: of the module. part: the graph is a part of another. types, known: of the signature.
    engines: whether engines take part; candidates: those, for a graph, and `device` the one of the first. automatic:
    whether nodes without a mark are offered to them; obey: whether marks for engines hold; absent: see `mark`.
    host_on_device: the host computes beside the engines. convert: puts converters where values cross. precision,
    report: results.
    """

    options: Options
    rules: Sequence[MarkRule] = ()
    lowering: LowerPrecision | None = None
    part: bool = False
    types: Sequence[ValueType | None] = ()
    known: Mapping[int, np.ndarray] = field(default_factory=dict)
    engines: bool = False
    candidates: Callable[[Graph], Sequence[Candidate]] = lambda graph: ()
    device: str = CPU.name
    automatic: bool = True
    obey: bool = True
    absent: Callable[[str], str] = lambda name: ""
    host_on_device: bool = False
    convert: Callable[[Graph], Graph] = lambda graph: graph
    precision: PrecisionReport | None = None
    report: PartitionReport | None = None


def rules_of(options: Options) -> tuple[MarkRule, ...]:
    """The rules of the option `marks`."""
    return tuple(MarkRule(*row) for row in options.marks) if isinstance(options.marks, tuple) else ()


def lowering(options: Options, *, training: bool = False) -> LowerPrecision | None:
    """The pass that lowers precision as the options say, or None where they ask for nothing.

    training: for a graph that gradients are built from. Raises OptionError for an operator that does not exist.
    """
    marks = options.precision if isinstance(options.precision, tuple) else ()
    if options.narrow is None and not marks:
        return None
    constraints = [Constraint.of(key, dtype) for key, dtype in marks]
    target = None if options.strict_types else options.narrow
    return LowerPrecision(target, constraints, obey=options.force_precision_constraints, training=training)


# --- the passes ---

_SIMPLIFY: Final[tuple[Pass, ...]] = (IdentityNodes(), CommonSubexpressions(), DeadNodes())


def _apply_marks(graph: Graph, run: PassContext) -> Graph:
    if run.options.marks is False:
        graph = without_marks(graph)
    elif not run.part:
        graph = apply_marks(graph, run.rules)
    asked = run.options.automatic
    run.automatic = asked if asked is not None else not names_an_engine(graph)
    return graph


def _constant_fold(graph: Graph, run: PassContext) -> Graph:
    return ConstantFold(run_node, run.options.constant_fold_limit)(graph)


def _specialise(graph: Graph, run: PassContext) -> Graph:
    limit = run.options.constant_fold_limit
    return specialise(graph, run.types, run.known, run_node, fold_limit=limit, expand=expand)


def _split_late(graph: Graph, run: PassContext) -> Graph:
    # without engines nothing has to wait: the host takes shapes as they come
    return SplitLate(needed_inputs)(graph) if run.engines else graph


def _lower_precision(graph: Graph, run: PassContext) -> Graph:
    if run.lowering is None:
        return graph
    graph, run.precision = run.lowering.apply(graph)
    for p in _SIMPLIFY:
        graph = p(graph)
    return graph


def _subblock_to_engine(graph: Graph, run: PassContext) -> Graph:
    options = run.options
    marks = mark(
        graph,
        run.candidates(graph),
        options.phase,
        run.device,
        automatic=run.automatic,
        obey=run.obey,
        absent=run.absent,
    )
    clustering = cluster(
        graph,
        marks,
        minimum_nodes=options.minimum_nodes,
        maximum_nodes=options.maximum_nodes,
        strict=options.strict,
        merge_updates=options.merge_updates,
        costs=lambda device: costs_for(is_host(device), run.host_on_device),
        prune=options.prune,
    )
    folded = outline(graph, clustering)
    run.report = report(graph, clustering, folded)
    return folded


def _of(p: Pass) -> Callable[[Graph, PassContext], Graph]:
    return lambda graph, _: p(graph)


_PASSES: Final[Mapping[str, tuple[tuple[Stage, ...], Callable[[Graph, PassContext], Graph]]]] = MappingProxyType({
    "apply_marks": (("model",), _apply_marks),
    "constant_fold": (("model",), _constant_fold),
    "specialise": (("signature",), _specialise),
    "identity": (("signature",), _of(_SIMPLIFY[0])),
    "common_subexpressions": (("signature",), _of(_SIMPLIFY[1])),
    "clean_unused": (("model", "signature"), _of(_SIMPLIFY[2])),
    "split_late": (("signature",), _split_late),
    "lower_precision": (("signature",), _lower_precision),
    "subblock_to_engine": (("engines",), _subblock_to_engine),
    "engine_converters": (("engines",), lambda graph, run: run.convert(graph)),
})  # fmt: skip

passes: Final = PassRegistry(
    RegisteredPass(name, _PASSES[name][1], _PASSES[name][0], reason) for name, reason in STEPS if name in _PASSES
)
"""The passes of this process: the core's, and what users and plugins registered."""


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
    """Add a pass for modules made from now on: a function Graph -> Graph, or a subclass of `Pass`; also a decorator.

        @xrt.register_pass(after="identity")
        def fuse_gelu(graph): ...

    stage: "model" (once, types as declared), "signature" (types known; the default) or "engines" (clusters become
    launches). before, after: passes to precede or follow; with neither it runs before `clean_unused`. requires: passes
    that must be there, and come first. reason: why there, for `xrt passes`; the docstring's first line otherwise.

    Raises RegistrationError for a name that is taken, and for a stage, a pass or an order that cannot be. A pass that
    raises, or gives a bad graph, is a PassError for the caller of the module.
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
    """Take out a pass added by `register_pass`. Raises RegistrationError for any other."""
    passes.unregister(name)


_plugins_lock = threading.Lock()
_plugin_passes: dict[tuple[str, str], str] = {}  # (name, owner) of each that was met -> why it cannot be had, or ""


def load_plugin_passes(events: EventLog) -> dict[str, str]:
    """Register the passes of plugins that were not met before. Returns name -> why one could not be had, of all.

    A plugin that is broken is an event, once, and in nobody's way.
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
            except Exception as e:  # whatever an attribute of the plugin's object does
                _left_out(events, name, owner, str(e))
        refused = passes.register_all(found)
        for p in found:
            if p.name in refused:
                _left_out(events, p.name, p.owner, refused[p.name])
        return {name: why for (name, _), why in _plugin_passes.items() if why}


def _left_out(events: EventLog, name: str, owner: str, why: str) -> None:
    _plugin_passes[name, owner] = why
    events.emit("pass.left_out", level=logging.WARNING, name_of_pass=name, owner=owner, reason=why)


# --- what the host and the engines are asked ---


def expand(node: Node) -> Graph | None:
    """The standard's body of an operator that has no kernel anywhere; None for all others."""
    if node.domain == "xrt" or node.op_type in CONTROL_FLOW or find_kernel(node.domain, node.op_type) is not None:
        return None
    from xrt_core.frontends.onnx_functions import function_body

    return function_body(node)


def needed_inputs(node: Node) -> Iterator[int]:
    """Indices of the inputs that must be known before an engine can take `node`; none where none can anyway."""
    kernel = find_kernel(node.domain, node.op_type)
    return iter(()) if kernel is None or kernel.why_dynamic(node) is not None else static_inputs(node)


def why_on_host(node: Node) -> Support | None:
    """Why no engine is asked about `node`, or None where they are."""
    if node.subgraphs:
        if is_late(node):
            return Support.no("it waits for shapes that depend on data, and is planned when they arrive")
        return Support.no("the host runs control flow; its bodies are planned by themselves")
    for v in (*node.inputs, *node.outputs):
        if v is None:
            continue
        t = v.type
        if not isinstance(t, TensorType):
            return Support.no(f"the type of {v.name!r} is {t or 'unknown'}, which is not a tensor")
        if t.dtype == STRING:
            return Support.no(f"{v.name!r} holds strings")
        if not t.is_static:
            return Support.no(f"the shape of {v.name!r} is {t}: it depends on data")
    return None

"""Stages of a graph, translated and compiled: XRT runs some, torch eager the others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.fx import GraphModule
from torch.utils._pytree import tree_map_only

import xrt_core as xrt
from xrt_core.ir.garbage_collection import collector_paused
from xrt_torch.calls import StageCall
from xrt_torch.complex_numbers import has_complex, in_real_numbers
from xrt_torch.constants import Constants, Own
from xrt_torch.devices import finish
from xrt_torch.kept import KeptGraph
from xrt_torch.ordering import OF_ANY_ORDER
from xrt_torch.partition import Stage, copy_of, draws_numbers, reason_for_eager, stages_of

Signature = tuple[tuple[int, ...], ...]
"""The shapes of a call that vary."""

_ATTEMPTS: Final = 32  # translations of one graph; each that fails moves a node to eager


class Ran:
    """A stage and what runs it. graph: its translation, where XRT runs it in `module`."""

    __slots__ = ("call", "graph", "module", "stage")

    def __init__(self, stage: Stage, call: Any, graph: Any = None, module: Any = None) -> None:
        self.stage, self.call, self.graph, self.module = stage, call, graph, module


class Results:
    """What a graph returns: results of stages, by name, and constants."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        given: Any = graph.output_node().args[0]
        self.names = [r.name if isinstance(r, torch.fx.Node) else None for r in given]
        self._constants = [None if isinstance(r, torch.fx.Node) else r for r in given]

    def of(self, values: Mapping[str, Any]) -> list[Any]:
        return [c if n is None else values[n] for n, c in zip(self.names, self._constants, strict=True)]


class Stages(list[Ran]):
    """The stages of a graph, in order. inputs, results: the graph's; constants: what they take as constants;
    content: the translation, where it is all of the graph and may be kept.

    proven: signatures whose results agreed with eager's; served: how many that plans of others serve were compared;
    least: the size from which the constants are worth their time, where sizes vary; data: the places of the arguments
    that are looked at for NaN in each call, as it would be lost; None where that is not known yet.
    """

    def __init__(
        self,
        ran: Iterable[Ran],
        inputs: Sequence[str],
        results: Results,
        constants: Constants | None = None,
        content: bytes | None = None,
    ) -> None:
        super().__init__(ran)
        self.inputs, self.results, self.constants, self.content = inputs, results, constants, content
        self.proven: set[Signature] = set()
        self.served = self.least = 0
        self.data: Sequence[int] | None = None

    @property
    def are_all_on_xrt(self) -> bool:
        return all(r.module is not None for r in self)

    def run(self, args: Sequence[Any], only_prepared: bool = False) -> list[Any] | None:
        """The results. only_prepared: None in their place where XRT would have to compile for these shapes."""
        values = dict(zip(self.inputs, args, strict=True))
        for ran in self:
            given = [values[n] for n in ran.stage.inputs]
            if only_prepared and ran.module is not None and not ran.call.is_prepared(*given):
                return None
            results = ran.call(*given)
            values.update(zip(ran.stage.outputs, results, strict=True))
        return self.results.of(values)

    def serve(self, args: Sequence[Any], size: int) -> bool:
        """Whether the one stage that there is takes calls of such arguments, without a compilation."""
        (ran,) = self
        values = dict(zip(self.inputs, args, strict=True))
        return size >= self.least and bool(ran.call.is_prepared(*(values[n] for n in ran.stage.inputs)))

    def compile(self, args: Sequence[Any], device: torch.device) -> None:
        """Compile every stage of XRT for these arguments; those run whose results another one needs."""
        from torch._dynamo.convert_frame import compile_lock

        last = max((i for i, r in enumerate(self) if r.module is not None), default=-1)
        values = dict(zip(self.inputs, args, strict=True))
        try:
            for i, ran in enumerate(self[: last + 1]):
                given = [values[n] for n in ran.stage.inputs]
                if ran.module is None:
                    with compile_lock:  # an interpreter notes the node at hand where a capture elsewhere finds it
                        results = _WithoutChance(ran.call).run(*given)
                else:
                    ran.call.prepare(*given)
                    results = ran.call(*given) if i < last else [None] * len(ran.stage.outputs)
                values.update(zip(ran.stage.outputs, results, strict=True))
        finally:
            finish(device)

    def close(self) -> None:
        """Let go what engines have compiled."""
        for ran in self:
            if ran.module is not None:
                ran.module.close()


class Builder:
    """Makes the stages of one graph. eager_nodes: where it adds the operators that torch runs, with the reasons."""

    def __init__(
        self, module: GraphModule, name: str, device: torch.device, is_dynamic: bool, eager_nodes: dict[str, str]
    ) -> None:
        self._module, self._name, self._device, self._is_dynamic = module, name, device, is_dynamic
        self._eager_nodes = eager_nodes
        self.inputs = [n.name for n in placeholders(module)]

    def build(
        self, options: Mapping[str, Any], own: Own | None = None, is_ordered: bool = False, keeps: bool = False
    ) -> Stages:
        """Translate what XRT can run. options: of its modules; own: what to take as constants; is_ordered: whether
        torch runs what chooses the order of equal elements; keeps: whether to note the translation."""
        with collector_paused():  # for what it parses: see `registry`
            from xrt_torch.translation import UntranslatableError, mistrust, translatable  # imports torch's exporter

        graph = self._module.graph
        if has_complex(graph):
            graph = in_real_numbers(graph)
        for node in graph.nodes:
            if node.op in ("call_function", "get_attr", "call_module"):
                reason = reason_for_eager(node, translatable, mistrust, self._device)
                if reason is None and is_ordered and node.target in OF_ANY_ORDER:
                    reason = "torch chooses the order of equal elements"
                if reason is not None:
                    self._eager_nodes[node.name] = f"{node.target}: {reason}"
        for _ in range(_ATTEMPTS):
            try:
                constants = None if own is None else Constants(own, own, looks=False)
                made = Stages((), self.inputs, Results(graph), constants)
                stages = stages_of(graph, self._eager_nodes)
                for i, stage in enumerate(stages):
                    self._add(made, stage, f"{self._name}_{i}", options, keeps and len(stages) == 1)
                return made
            except UntranslatableError as e:
                self._eager_nodes[e.node] = str(e)
        raise xrt.UnsupportedError(
            f"more than {_ATTEMPTS} operators are refused by torchlib, the last: {[*self._eager_nodes.values()][-1]}"
        )

    def _add(self, made: Stages, stage: Stage, name: str, options: Mapping[str, Any], keeps: bool) -> None:
        if not stage.on_xrt:
            made.append(Ran(stage, for_eager(self._module, stage.graph)))
            return
        from xrt_torch.translation import in_bytes, translate

        model: Any = translate(stage.graph, name)
        if keeps:
            model = made.content = in_bytes(model)
        graph = xrt.import_model(model)
        if made.constants is not None:
            stage, graph = made.constants.bound(stage, graph)
        made.append(self._ran(stage, graph, options))

    def of_kept(self, kept: KeptGraph, options: Mapping[str, Any], engine: str) -> Stages:
        """The stage that another process translated. engine: the one it chose, which is asked first; "": any."""
        graph = xrt.import_model(kept.model)
        results = Results(self._module.graph)
        if engine:
            with contextlib.suppress(xrt.XRTError):  # it is not installed any more
                return Stages([self._ran(kept.stage, graph, {**options, "engine": engine})], self.inputs, results)
        return Stages([self._ran(kept.stage, graph, options)], self.inputs, results)

    def again(self, stages: Stages, options: Mapping[str, Any], constants: Constants | None = None) -> Stages:
        """The same stages with other options, and with these constants in place of those that they have."""

        def made(r: Ran) -> Ran:
            if r.module is None:
                return r
            stage, graph = (r.stage, r.graph) if constants is None else constants.bound(r.stage, r.graph)
            return self._ran(stage, graph, options)

        return Stages(map(made, stages), stages.inputs, stages.results, constants or stages.constants)

    def _ran(self, stage: Stage, graph: Any, options: Mapping[str, Any]) -> Ran:
        shapes = stage.shapes() if self._is_dynamic and "shapes" not in options else {}
        module = xrt.XRTModule(graph, **{"release_cores": True, **options}, **({"shapes": shapes} if shapes else {}))
        return Ran(stage, StageCall(module, stage, self._device), graph, module)


def placeholders(module: GraphModule) -> list[torch.fx.Node]:
    """The nodes of a graph's inputs."""
    return [n for n in module.graph.nodes if n.op == "placeholder"]


def for_eager(module: GraphModule, graph: torch.fx.Graph) -> GraphModule:
    """A graph as a module whose operators take tensors of every layout: kernels may lay results out otherwise than was
    foreseen when the graph was captured."""
    aten, copied = torch.ops.aten, copy_of(graph)
    for node in [*copied.nodes]:
        if node.target is aten.view.default:
            node.target = aten.reshape.default
        elif node.target is aten.native_group_norm.default:
            with copied.inserting_before(node):
                node.update_arg(0, copied.call_function(aten.contiguous.default, (node.args[0],)))
    return GraphModule(module, copied)


class _WithoutChance(torch.fx.Interpreter):
    """Runs a graph with zeros for random numbers: torch's generator is that of the threads that call."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from torch._subclasses.fake_tensor import FakeTensorMode

        if not draws_numbers(target):
            return super().call_function(target, args, kwargs)
        with FakeTensorMode(allow_non_fake_inputs=True):
            made = super().call_function(target, args, kwargs)
        return tree_map_only(torch.Tensor, lambda t: torch.zeros(t.shape, dtype=t.dtype, device=t.device), made)

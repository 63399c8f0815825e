"""TensorRTCompiler: a Function as a network, and the network as an engine."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from xrt_core.engine.contract import (
    CompileOptions,
    Executable,
    Function,
    GraphCompiler,
    InputOutputAlias,
    Parameter,
)
from xrt_core.engine.onnx_bridge import EXTERNAL_BYTES, OnnxModel, aligned, onnx_model
from xrt_core.errors import CompileError, EngineUnavailableError
from xrt_core.ir.graph import Value
from xrt_core.ir.types import float_like
from xrt_tensorrt import _cuda, timing
from xrt_tensorrt._toolkit import Network, Refusal, Toolkit
from xrt_tensorrt.batching import Batched, generalise
from xrt_tensorrt.carrying import has_uint8
from xrt_tensorrt.deviations import dequantised, widens
from xrt_tensorrt.engine import BuiltEngine, Manifest
from xrt_tensorrt.executable import TensorRTExecutable, read_blob
from xrt_tensorrt.expansion import expand
from xrt_tensorrt.joining import join
from xrt_tensorrt.settings import Profile, Settings, check_target, tolerance_of
from xrt_tensorrt.splitting import split
from xrt_tensorrt.support import misfits, verdict

if TYPE_CHECKING:
    from onnx import ModelProto

log = logging.getLogger("xrt.tensorrt")

_OPEN: Final = -1
_MOST_FORMS: Final = 16
_LEAST_WEIGHT: Final = 64
"""Elements of a constant that counts as a weight; smaller ones may determine what is built (scales, bounds)."""
_ANOTHER: Final = 3  # a second batch, by which shapes that hold the first one show


class TensorRTCompiler(GraphCompiler):
    """Builds engines for one GPU, or for the compute capability that `target` names ("sm_89").

    `CompileOptions.workspace_bytes` bounds TensorRT's scratch memory. With `max_batch_size` the batch is left open
    where the Function allows it: one engine then serves every batch up to that size. Options of its own
    (`CompileOptions.extra`) are the fields of `Settings`.

    Raises OptionError for a bad option, EngineUnavailableError where nothing can be built for the device or target.
    """

    stages = MappingProxyType({"trt-layers": "the layers of the engine, as TensorRT's inspector shows them on a GPU"})

    def __init__(self, toolkit: Toolkit, device: int, options: CompileOptions, target: str = "") -> None:
        self._toolkit = toolkit
        self._device = device
        self._settings = settings = Settings.of(options, target)
        check_target(settings, toolkit.targets, toolkit.flavour)
        found = _cuda.capability(device) if device < max(_cuda.count(), 1) else None
        reason = toolkit.why_not_for(found)
        if reason and not settings.target:
            hint = f"; a target can be built for without it ({', '.join(toolkit.targets)})" if toolkit.targets else ""
            raise EngineUnavailableError(f"tensorrt: nothing can be built for cuda:{device}: {reason}{hint}")
        self._here = "sm_{}{}".format(*found) if found and not reason else ""
        self._open: dict[str, BuiltEngine] = {}  # engines with an open batch, by the fingerprint of their open form
        self._forms: dict[str, BuiltEngine] = {}  # engines that take other weights, by `form_of` their functions
        self._lock = threading.Lock()

    def compile(
        self,
        function: Function,
        entry_params: Sequence[Parameter],
        return_params: Sequence[Parameter],
        aliases: Sequence[InputOutputAlias],
    ) -> Executable:
        """An engine of `function`. Raises CompileError with TensorRT's own words, and the node they are about."""
        batched = generalise(function) if self._settings.max_batch is not None else None
        if batched is not None:
            with self._lock:
                built = self._of_any_batch(batched)
            if built is not None:
                return self._executable(built, function)
        return self._executable(self._static(function), function)

    def _executable(self, built: BuiltEngine, function: Function) -> TensorRTExecutable:
        made = TensorRTExecutable(built, function.params, function.returns, self._settings.cuda_graph, function.aliases)
        made.tolerance = tolerance_of(self._settings)
        if self._is_for_here:
            built.load()  # what this GPU does not take fails now, not at the first run
        return made

    @property
    def _is_for_here(self) -> bool:
        target = self._settings.target
        return bool(self._here) and (not target or self._here in target)

    # --- one size ------------------------------------------------------------------------------------------------

    def _static(self, function: Function) -> BuiltEngine:
        if not self._settings.refit:
            return self._built(self.network(function), function)
        key = form_of(function)
        with self._lock:
            known = self._forms.get(key)
        if known is not None and known.manifest.stripped:
            refit, kept = self._refitting(function), self._settings.runtime_cache
            same = BuiltEngine(self._toolkit, self._device, known.manifest, known.blob, refit, runtime_cache=kept)
            try:
                if self._is_for_here:
                    same.load()
            except CompileError as e:
                log.info("function %s is built anew: %s", function.name, e)
            else:
                log.info("function %s gets the engine of one with other weights", function.name)
                return same
        built = self._built(self.network(function), function)
        with self._lock:
            self._forms[key] = built
            while len(self._forms) > _MOST_FORMS:
                del self._forms[next(iter(self._forms))]
        return built

    def network(self, function: Function, batch: int | None = None) -> Network:
        """The network of `function`. batch: what its first dimensions are instead, -1 where they are left open.

        Raises CompileError with the parser's message and the node, or where the network's inputs and outputs are not
        those of the function.
        """
        function = aligned(_with_widened(function))
        ways = [verdict(n).way for n in function.body.nodes]
        alone = "kernel" not in ways and not any(has_uint8(n) for n in function.body.nodes)
        apart = None if alone else split(function, ways, open_batch=batch is not None)
        model = self._model(function if apart is None else apart.outer, ways if apart is None else apart.ways)
        if batch is not None:
            _set_batch(model, batch, parsed_alone=alone)
        try:
            network = self._toolkit.parse(model)
        except Refusal as e:
            raise CompileError(f"tensorrt: function {function.name!r} is refused by the parser: {e}") from e
        if apart is not None:
            network.give_outputs(join(network, function, apart, open_batch=batch is not None))
        misfit = misfits(network, function, batch)
        if misfit:
            raise CompileError(f"tensorrt: the network of function {function.name!r} differs: {misfit}")
        return network

    def _model(self, function: Function, ways: Sequence[str]) -> OnnxModel:
        """ways: how each node is taken (`Verdict.way`)."""
        # a stripped engine is refitted by the names of the model's weights, so all of them have one
        external = 1 if self._settings.strip_weights else EXTERNAL_BYTES
        model = onnx_model(function, engine="tensorrt", external_bytes=external)
        by_body = [i for i, way in enumerate(ways) if way == "body"]
        try:
            expanded = expand(model.model, function.body.nodes, by_body)
        except ValueError as e:
            raise CompileError(f"tensorrt: function {function.name!r}: {e}") from e
        return OnnxModel(expanded, model.inputs, _own_outputs(expanded), model.weights)

    def _refitting(self, function: Function) -> OnnxModel:
        """The model that gives a stripped engine its weights; such an engine has no kernels' layers."""
        function = aligned(_with_widened(function))
        return self._model(function, [verdict(n).way for n in function.body.nodes])

    def _built(self, network: Network, function: Function, profiles: Sequence[Profile] = ()) -> BuiltEngine:
        """profiles: least, usual and largest batch of each regime, of a network whose batch is open."""
        settings, toolkit = self._settings, self._toolkit
        if network.by_kernels:  # no model has what their layers hold, so nothing could give it back
            settings = replace(settings, strip_weights=False)
        config = toolkit.configure(network.builder, settings)
        for profile in profiles:
            _set_profile(network, config, function, profile)
        with timing.kept(toolkit, config, settings.timing_cache):
            try:
                blob = network.build(config)
            except CompileError as e:
                hints = []
                if settings.workspace is not None:
                    hints.append(f"with max_workspace_bytes={settings.workspace}")
                if settings.strip_weights and not self._here:
                    hints.append("engines without weights are built on a machine with a GPU")
                hint = f" ({'; '.join(hints)})" if hints else ""
                raise CompileError(f"tensorrt: function {function.name!r} is not built{hint}: {e}") from e
        manifest = Manifest(
            flavour=toolkit.flavour,
            version=toolkit.version,
            targets=settings.target or (self._here,),
            version_compatible=settings.version_compatible,
            hardware_compatibility="none" if toolkit.is_rtx else settings.hardware_compatibility,
            stripped=settings.strip_weights,
            profiles=tuple(profiles),
            inputs=network.model.inputs,
            outputs=network.model.outputs,
            model="" if toolkit.is_rtx or not self._here else _cuda.model(self._device),
        )
        refit = network.model if settings.strip_weights else None
        return BuiltEngine(toolkit, self._device, manifest, blob, refit, runtime_cache=settings.runtime_cache)

    # --- any batch -----------------------------------------------------------------------------------------------

    def _of_any_batch(self, batched: Batched) -> BuiltEngine | None:
        """The engine for every batch, None where this function must be built for its own: a batch between two regimes,
        too."""
        wanted = self._settings.max_batch
        assert wanted is not None
        known = self._open.get(batched.fingerprint)
        if known is not None and known.largest >= batched.batch:
            return known if known.manifest.profile_for(batched.batch) is not None else None
        largest = max(wanted, batched.batch)
        profiles = self._profiles(batched.batch, largest)
        if not any(least <= batched.batch <= most for least, _, most in profiles):
            return None
        start = time.perf_counter()
        try:
            fresh = self._build_open(batched, profiles)
        except CompileError as e:
            log.info("function %s is built for batch %d alone: %s", batched.function.name, batched.batch, e)
            return None  # and an engine for smaller batches stays as it is
        if batched.batch > wanted or known is not None:
            log.warning(
                "function %s: batch %d is above %s, its engine was built anew for up to %d in %.1f s; a larger "
                "max_batch_size saves that",
                batched.function.name,
                batched.batch,
                f"max_batch_size={wanted}" if known is None else f"the {known.largest} it was built for",
                largest,
                time.perf_counter() - start,
            )
        if known is None:
            self._open[batched.fingerprint] = fresh
            return fresh
        known.replace(fresh)
        return known

    def _profiles(self, batch: int, largest: int) -> tuple[Profile, ...]:
        """The regimes of batches up to the largest: the options', of which the last grows, or one of all."""
        given = self._settings.profiles
        if not given:
            return ((1, min(self._settings.opt_batch or batch, largest), largest),)
        least, usual, _ = given[-1]
        return (*given[:-1], (least, usual, largest))

    def _build_open(self, batched: Batched, profiles: Sequence[Profile]) -> BuiltEngine:
        """Raises CompileError where the function does not go with other batches, or is not built."""
        function = batched.function
        network = self.network(function, _OPEN)
        self._check_other_batch(function, batched.batch)
        return self._built(network, function, profiles)

    def _check_other_batch(self, function: Function, batch: int) -> None:
        """Raises CompileError where the function's shapes do not go with another batch: a constant holds this one."""
        self.network(function, batch + _ANOTHER)

    # --- stored ones ---------------------------------------------------------------------------------------------

    def load(self, blob: bytes) -> Executable:
        """The executable of `serialize`. Raises CompileError where it does not fit this machine or library."""
        return self._loaded(blob, None)

    def load_code(self, blob: bytes, function: Function) -> Executable:
        """As `load`; an engine without weights gets those of `function`."""
        return self._loaded(blob, function)

    def _loaded(self, blob: bytes, function: Function | None) -> Executable:
        manifest, engine, params, returns, aliases = read_blob(blob)
        model = _cuda.model(self._device) if self._here else ""
        manifest.check(self._toolkit, self._here, model, self._settings)
        if manifest.stripped and function is None:
            raise CompileError("tensorrt: the engine was stripped of its weights, and no function gives them back")
        refit = self._refitting(function) if manifest.stripped and function is not None else None
        kept = self._settings.runtime_cache
        built = BuiltEngine(self._toolkit, self._device, manifest, engine, refit, runtime_cache=kept)
        if manifest.profiles and function is not None and (batched := generalise(function)) is not None:
            with self._lock:
                known = self._open.setdefault(batched.fingerprint, built)
                if known.largest >= built.largest:
                    built = known
                else:
                    known.replace(built)
                    built = known
        made = TensorRTExecutable(built, params, returns, self._settings.cuda_graph, aliases)
        made.tolerance = tolerance_of(self._settings)
        if self._is_for_here:
            built.load()
        return made


def form_of(function: Function) -> str:
    """A digest of all that an engine is built from but the numbers of its weights: large float constants."""
    body = function.body
    blank: dict[Value | None, Value] = {}
    for v in body.constants:
        x = v.data
        if x is not None and float_like(x.dtype) and x.size >= _LEAST_WEIGHT:
            blank[v] = Value.constant(np.zeros(x.shape, x.dtype), v.name)
    nodes = [n.replace(inputs=[blank.get(v, v) for v in n.inputs]) for n in body.nodes]
    outputs = [blank.get(v, v) for v in body.outputs]
    form = Function(
        function.name, function.params, function.returns, body.replace(nodes=nodes, outputs=outputs), function.aliases
    )
    return form.fingerprint


def _with_widened(function: Function) -> Function:
    """`function` with constants of int8 dequantised where it casts them: TensorRT has such constants for that alone."""
    body = function.body
    if not any(widens(n) for n in body.nodes):
        return function
    opset = body.opsets.get("", 0)
    nodes = [dequantised(n, opset) if widens(n) else n for n in body.nodes]
    return Function(function.name, function.params, function.returns, body.replace(nodes=nodes), function.aliases)


def _set_batch(model: OnnxModel, batch: int, *, parsed_alone: bool) -> None:
    """Give a model another batch, or an open one. parsed_alone: its outputs are the function's."""
    graph = model.model.graph
    for p in (*graph.input, *graph.output) if parsed_alone else graph.input:
        first = p.type.tensor_type.shape.dim[0]
        if batch < 0:
            first.dim_param = "batch"
        else:
            first.dim_value = batch
    if not parsed_alone:  # what stands between the parser and the kernels may have any shape
        for p in graph.output:
            p.type.tensor_type.ClearField("shape")


def _own_outputs(model: ModelProto) -> tuple[str, ...]:
    """The names of a model's outputs, after those that are inputs, or were named before, got tensors of their own."""
    graph = model.graph
    taken = {p.name for p in graph.input} | {w.name for w in graph.initializer}
    for p in graph.output:
        if p.name in taken:
            fresh = f"{p.name}_returned"
            while fresh in taken:
                fresh += "_"
            graph.node.add(op_type="Identity", input=[p.name], output=[fresh], name=fresh)
            p.name = fresh
        taken.add(p.name)
    return tuple(p.name for p in graph.output)


def _set_profile(network: Network, config: Any, function: Function, sizes: Profile) -> None:
    profile = network.builder.create_optimization_profile()
    for name, p in zip(network.model.inputs, function.params, strict=True):
        profile.set_shape(name, *((n, *p.shape[1:]) for n in sizes))
    if config.add_optimization_profile(profile) < 0:
        raise CompileError(f"tensorrt: function {function.name!r}: batches of {sizes} make no optimisation profile")

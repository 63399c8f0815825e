"""TrainModule: runs training steps (forward, backward, update) of a model with a loss and an optimizer."""

from __future__ import annotations

import copy
import logging
import operator
import os
import pathlib
import secrets
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from xrt_core.cache.lru import LRU
from xrt_core.compiler.guarded import GuardedModule
from xrt_core.compiler.models import settle_operators
from xrt_core.compiler.passes import expand, lowering
from xrt_core.compiler.pipeline import Pipeline
from xrt_core.compiler.services import build_services
from xrt_core.compiler.stages import Planned
from xrt_core.engine import engines as process_engines
from xrt_core.engine.rollout import roll_out
from xrt_core.errors import CheckpointError, GradientError, InputError, OptionError
from xrt_core.events import EventLog
from xrt_core.explanation import Explanation
from xrt_core.frontends.graph import Graph as TracedGraph
from xrt_core.host.executor import run_node
from xrt_core.ir.graph import Graph
from xrt_core.ir.types import TensorType
from xrt_core.options import Options, resolve
from xrt_core.passes.mixed_precision import PrecisionReport
from xrt_core.passes.partitioning.report import PartitionReport
from xrt_core.passes.rematerialization import Recompute
from xrt_core.passes.shape_specialization import specialise
from xrt_core.runtime.arrays import beside, family_of, to_numpy
from xrt_core.runtime.binding import taken_by
from xrt_core.runtime.launch import Launch
from xrt_core.runtime.transfers import on_host
from xrt_core.training import checkpoint, sharded_checkpoint
from xrt_core.training.background import Writer
from xrt_core.training.checks import ComputedIndices, not_finite, without_checked
from xrt_core.training.interrupts import held_back
from xrt_core.training.lazy_loss import LazyLoss
from xrt_core.training.losses import LossFunction, loss_of
from xrt_core.training.model_adapter import FixedModel, WrittenGraph
from xrt_core.training.optimizer import Optimizer
from xrt_core.training.planned_step import PlannedStep
from xrt_core.training.position import PREFIX, Position, of_arrays
from xrt_core.training.recomputation import labels
from xrt_core.training.sharding import StepSharding
from xrt_core.training.state import State
from xrt_core.training.step import (
    FINITE,
    MICRO,
    STEP,
    Recipe,
    StepGraph,
    ema_name,
    evaluation_graph,
    gradient_graph,
    in_inference,
    loss_scale_of,
    slot_name,
    sum_name,
    training_graph,
    update_graph,
)
from xrt_core.training.transformation import Transformation, is_transformation
from xrt_core.training.variables import Select, Variable

if TYPE_CHECKING:
    from xrt_core.training.epochs import History

log = logging.getLogger("xrt")

_FORMAT = "xrt-training-1"
_NUMPY: Final = (np.ndarray, np.generic)
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})
_SMALL: Final = 4 << 20  # bytes of a state whose second copy costs neither memory nor time to speak of


class TrainModule(GuardedModule):
    r"""Trains a model: each step computes the loss, the gradients and the updated variables as one graph.

        t = TrainModule("model.onnx", loss="cross_entropy", optimizer=Adam(1e-3))
        for x, y in batches:
            loss = t.step(x=x, labels=y)
        t.export("trained.onnx")

    model: an ONNX file's path, its bytes, a ModelProto, an IR graph, or an `xrt.Graph`, whose arrays are its variables.
    loss: a function of outputs of the model and of further inputs of a step, by the names of its parameters, written
        like `Graph.build`. A parameter with the name of an output is that output, keyword-only ones are inputs. Where
        none has an output's name, the first is the first output, those that a step gives are inputs, and others are
        the next outputs; `*outputs` takes all. Or "cross_entropy" (input `labels`), "mse" (input `target`); or the name
        or index of an output that is the loss; None for the first output.
    loss_options: of a loss by name: `ignore_index`, `label_smoothing`, `class_weights` of "cross_entropy".
    output: name or index of the output that the loss takes first, if not the first.
    optimizer: one of `xrt.optim`, or a `GradientTransformation` of optax; an `xrt.Graph` may define it by
        `add_optimizer`, and the loss by `backward()` in its `build`.
    trainable: names or patterns of constants ("encoder.*"), or a function of name and array; default: the float
        constants with the role of a parameter (operands of products, filters, tables, scales, shifts and biases, see
        `variables`); of an `xrt.Graph`, the arrays in its attributes.
    batch_norm, dropout: True runs these operators in training mode (batch statistics; dropping by their ratio), False
        as the model specifies. seed: of Dropout: equal seeds give equal runs; None draws one.
    loss_scale: None, a number, "dynamic", or a `LossScale`; with float16 (precision="fp16", or variables of that type)
        None means "dynamic"; 1 disables scaling. Under any scale a step whose gradients are not finite changes nothing
        but a count. With `precision`, variables, optimizer and gradients stay in float32. Variables of 16 bits are kept
        and updated in float32, and cast for the model; `parameters`, `graph` and `export` have the model's types.
    check_finite: a loss that is not finite raises an ExecutionError that names the first node whose result is not; the
        state, copied for that, is unchanged.
    accumulate: the number of calls of `step`, each with a micro-batch, that make one update by the mean of their
        gradients, in which each counts by the number of its examples (the first dimension of the first input); with a
        mean as loss this equals the update of one large batch. `apply` makes an update of fewer.
    donate: whether engines update the state in place, see below; None: where it has more than 4 MiB.
    recompute: a regular expression on node names: nodes in whose names it matches the same text form a region that is
        recomputed in the backward pass instead of stored (r"layer\.\d+" makes one region per layer). Blocks of
        `training.recompute()` in an `xrt.Graph` are such regions too. recompute_budget: the maximum bytes of the
        intermediate results of a step; regions are chosen to meet it.
    lazy_loss: with an engine that computes behind the caller's back, `step` returns a number that is read from the
        device when it is used. With guard=False steps then run ahead: `step` returns before its result is there, after
        a copy of NumPy's arrays of the batch. What fails on the device is raised where a loss or the state is read, and
        the state is lost (TrainingError, see below).
    mesh, sharding: options of `XRTModule`: each batch is split over the mesh's axis "data", variables are whole unless
        `sharding` has a pattern of their names. zero: the optimizer's slots are split over "data" as well (ZeRO-1).
        Losses are those of one device, within rounding; a checkpoint is the same for every mesh. A batch that the axis
        does not divide is computed whole by each device, with the event `training.whole_batch`.
    options: those of `XRTModule`. Labels and indices among a step's inputs are checked at each step, those that the
        model computes with `check_indices=True`.

    Variables and optimizer slots stay on the device between steps and are updated in place if the engine supports it
    (a JAX array is donated). Arrays returned by `state_dict` are never modified. Concurrent calls of `step` are
    serialised. A step that raises changes nothing, with one exception: if an engine fails after the variables were
    donated to it (never in a program's first step, which runs on copies), they are lost. The step then raises
    TrainingError, and so does every method until a state is loaded. With donate=False no failure loses the state; each
    step then holds a second copy of it, and gradients and updates are one launch (option `merge_updates`).

    Raises ModelLoadError, OptionError and EngineError as XRTModule does; GradientError if there is nothing to train.
    """

    def __init__(
        self,
        model: Any,
        *,
        optimizer: Optimizer | None = None,
        loss: Callable[..., Any] | str | int | None = None,
        loss_options: Mapping[str, Any] | None = None,
        output: str | int | None = None,
        engine: str | Sequence[str] | None = None,
        trainable: Select = None,
        loss_scale: Any = None,
        batch_norm: bool = True,
        dropout: bool = True,
        seed: int | None = 0,
        check_finite: bool = False,
        accumulate: int = 1,
        donate: bool | None = None,
        recompute: str | None = None,
        recompute_budget: int | None = None,
        lazy_loss: bool = False,
        zero: bool = False,
        **options: Any,
    ) -> None:
        self._arguments = {
            "optimizer": optimizer, "loss": loss, "loss_options": loss_options, "output": output, "engine": engine,
            "trainable": trainable, "loss_scale": loss_scale, "batch_norm": batch_norm, "dropout": dropout,
            "check_finite": check_finite, "accumulate": accumulate, "donate": donate, "recompute": recompute,
            "recompute_budget": recompute_budget, "lazy_loss": lazy_loss, "zero": zero, **options,
        }  # fmt: skip
        self.events = EventLog()
        resolved = self._resolved({"engine": engine, "phase": "train", **options})
        self._source: FixedModel | WrittenGraph = (
            WrittenGraph(model, trainable)
            if isinstance(model, TracedGraph)
            else FixedModel(model, trainable, batch_norm)
        )
        if isinstance(self._source, FixedModel):
            settle_operators(self._source.graph, resolved)
        self._source.on_mesh = resolved.mesh is not None
        self._loss = loss_of(loss, self._source.output_names, output, loss_options or {})
        self._optimizer: Optimizer = _optimizer_of(optimizer, model)
        if loss_scale is None and (resolved.narrow == "float16" or self._source.is_half):
            loss_scale = "dynamic"
        self._scale = loss_scale_of(loss_scale)
        self._dropout, self._batch_norm, self._seed = bool(dropout), bool(batch_norm), _seed(seed)
        self._check, self._check_indices = bool(check_finite), resolved.check_indices
        self._lazy = bool(lazy_loss)
        self._accumulate = _count("accumulate", accumulate)
        self._is_small = not self._is_large()
        self._donate = not self._is_small if donate is None else bool(donate)
        self._pipeline = self._made_pipeline(resolved)
        self._named = trainable is not None and not callable(trainable)
        self._recompute = Recompute(labels(recompute), recompute_budget)
        self._is_named = resolved.engine not in (None, "auto", ("auto",))  # so they are to take nodes
        has_slots = not isinstance(self._optimizer, Transformation)
        self._sharding = StepSharding(resolved.mesh, resolved.sharding, bool(zero), has_slots)
        self._lock = threading.Lock()
        self._writer = Writer()
        self._steps: LRU[PlannedStep] = LRU(resolved.cache_size)
        self._known: LRU[PlannedStep] = LRU(resolved.cache_size)  # by arrays as given, and whether it updates
        self._rate: Any = None if self._optimizer.is_scheduled else self._optimizer.rates_at(0)
        self._state = State(self._optimizer, self._scale, self._accumulate, self._lazy)
        self._metrics: Mapping[str, Any] = _NOTHING  # of the last step, by the loss function
        self._recipe: Recipe | None = None
        self._last: PlannedStep | None = None
        self._applied: PlannedStep | None = None  # an update alone
        self.position: Position | None = None  # where the `fit` stands that made the state
        self.follow: Callable[[Any], None] | None = None  # called with each loss as the new state takes its place
        if isinstance(self._source, FixedModel):
            self._begin(self._source.variables)

    def _resolved(self, given: Mapping[str, Any]) -> Options:
        """Resolve the options. Raises OptionError for what has no meaning in training."""
        resolved = process_engines.settled(resolve(given), self.events)
        if resolved.rollout is not None and resolved.rollout.of == "calls":
            source = resolved.source("rollout")
            raise OptionError(f"rollout ({source}) is of calls; the steps of a training stay on one engine: of='jobs'")
        if resolved.use_int8:
            source = resolved.source("use_int8")
            raise OptionError(f"use_int8=True ({source}): integers have no gradients; train in float")
        return roll_out(resolved, self.events, process_engines)[0]

    def _is_large(self) -> bool:
        """Whether a second copy of the state, during a step, is worth avoiding."""
        slots = 3 if isinstance(self._optimizer, Transformation) else len(self._optimizer.slots)
        copies = 1 + slots + (self._optimizer.ema is not None) + (self._accumulate > 1)
        return self._source.size * copies > _SMALL

    def _made_pipeline(self, resolved: Options) -> Pipeline:
        """Choose engines and make the pipeline."""
        # One program for gradients and updates where a failure in it cannot cost the state, unless the graph of a
        # micro-batch shares that of the gradients. On a mesh what is split stays so between them.
        is_free = resolved.source("merge_updates") == "default" and self._accumulate == 1 and not self._donate
        if resolved.mesh is not None or is_free:
            resolved = replace(resolved, merge_updates=True)
        self._lowering = lowering(resolved, training=True)
        # mixed precision is applied to the forward graph alone
        services = build_services(resolved.without_lowering(), process_engines.choose(resolved), self.events)
        return Pipeline(services)

    # --- steps --------------------------------------------------------------------------------------------------

    def step(self, /, *args: Any, **inputs: Any) -> Any:
        """Run one step on the arrays of a batch, by position (the model's inputs first) or by name; returns the loss.

        Raises InputError for arrays that do not fit, GradientError if the gradient cannot be built, TrainingError
        if the state is lost (see the class).
        """
        state = self._state
        with self._lock:
            state.refuse_lost()
            update = self._accumulate == 1 or state.count(MICRO) + 1 >= self._accumulate
            given = _as_given(args, inputs, update)
            found = None if given is None else self._known.get(given)
            if found is None:
                found, loss = self._step_of(args, inputs, update, given)
            else:
                loss = self._advance(found, [*args, *[inputs[n] for n in found.names[len(args) :]]], False)
            self._last = found
        return loss

    def _step_of(
        self, args: Sequence[Any], inputs: Mapping[str, Any], update: bool, given: tuple[Any, ...] | None
    ) -> tuple[PlannedStep, Any]:
        """Run one step that is not known by `given`, and let it be known so where all follows from NumPy's dtypes and
        shapes: binding the arrays has changed none, and none is read."""
        batch = self._source.bind(args, inputs, self.loss_inputs(len(args), inputs))
        arrays = list(batch.values())
        key = _signature(batch), self._values(batch), update
        found = self._steps.get(key)
        fresh = found is None
        if found is None:
            found = self._make(batch, update)
        loss = self._advance(found, arrays, fresh)
        if fresh:
            self._steps.put(key, found)
        as_given = [*args, *[inputs.get(n) for n in found.names[len(args) :]]]
        if given is not None and not self._source.by_value and all(map(operator.is_, as_given, arrays)):
            self._known.put(given, found)
        return found, loss

    def apply(self) -> bool:
        """Update by the micro-batches since the last update, fewer than `accumulate`; returns whether there were any.

        Raises as `step` does.
        """
        with self._lock:
            self._state.refuse_lost()
            if not self._state.count(MICRO):
                return False
            if self._recipe is None:
                raise InputError(
                    f"the micro-batches that wait are in a loaded state, and {self._source.name} has not been traced "
                    "yet: run `predict` or `evaluate` on a batch first"
                )
            found = self._applied
            if found is None:
                made = update_graph(self._state.types, self._recipe)
                found = self._planned(made, {}, rates=[self._optimizer.rates_at(0)])
            self._advance(found, [], self._applied is None)
            self._applied = found
        return True

    def gradients(self, /, *args: Any, **inputs: Any) -> dict[str, np.ndarray]:
        """Return the gradients of the loss of a batch by the trained variables, by name: those of the next step before
        scaling, clipping and accumulation. Nothing is updated. Raises as `step` does."""
        batch = self._source.bind(args, inputs, self.loss_inputs(len(args), inputs))
        with self._lock:
            self._state.refuse_lost()
            found = self._found(batch, "gradients")
            arrays = [*batch.values(), *(self._state.arrays[i] for i in found.reads)]
            assert self._recipe is not None
            names = [v.name for v in self._recipe.variables if v.trained]
            return dict(zip(names, [np.array(to_numpy(a)) for a in found.run(arrays)[1:]], strict=True))

    # --- epochs and inference -----------------------------------------------------------------------------------

    def fit(
        self,
        data: Any,
        epochs: int = 1,
        *,
        batch_size: int | None = None,
        validation: Any = None,
        callbacks: Any = (),
        metrics: Any = (),
        progress: bool = True,
        resume: bool = False,
    ) -> History:
        """Train for some epochs; returns for each the means of its losses, and of those of `validation`.

        data: batches, as dicts by the names of a step's inputs or as tuples, such as a DataLoader; a function that
            gives them for an epoch, of its number from 0 if it takes one; or, with `batch_size`, whole arrays in a dict
            or tuple, which are shuffled.
        validation: the same, evaluated after each epoch, with `metrics` (see `evaluate`).
        callbacks: see `xrt_core.training.callbacks`. progress: show a bar if stderr is a terminal.
        resume: go on where the `fit` stood that saved the loaded state, with the same callbacks, up to `epochs` in all,
            as if it had not ended. Inside an epoch the batches that were taken are skipped, so `data` has to give the
            same ones in the same order: whole arrays do, a shuffling loader only if its order follows from the epoch.
            The last of them is compared. A `Callback` with `positions_data` goes to the place itself.

        Ctrl-C ends it with the state after the last whole step; the history says so by `interrupted`.
        Raises what `step` raises, InputError for data that give no batch, or not those that a run goes on with, and
        OptionError for resume=True where the state is not one that `fit` saved.
        """
        from xrt_core.training.epochs import run

        return run(self, data, epochs, batch_size, validation, callbacks, metrics, progress, resume)

    def evaluate(
        self, data: Any, *, batch_size: int | None = None, metrics: Any = (), average: bool = False
    ) -> dict[str, float]:
        """Return the mean loss over all examples of `data` (see `fit`) in inference mode, and `metrics`.

        metrics: names of `xrt_core.training.metrics` ("accuracy", "top_5", "f1", "mae", ...), or functions of the first
        output and the target, both as arrays, whose results are averaged over the examples.
        average: with the running means of the variables; raises OptionError where there are none, see `parameters`.
        """
        from xrt_core.training.epochs import evaluated

        return evaluated(self, data, batch_size, metrics, average)

    def predict(self, /, *args: Any, average: bool = False, **inputs: Any) -> Any:
        """Return the model's output for a batch in inference mode with the variables of now: an array, or a tuple of
        them. Nothing is compiled again when the variables change. Inputs that only a loss in `build` reads may be left
        out once a step has been taken.

        average: with the running means of the variables, see `parameters`. Raises as `step` does, and OptionError where
        there are no means.
        """
        if not isinstance(average, bool):
            given = f"average=<{type(average).__name__}>"
            raise OptionError(f"{given}: it takes True or False; an input of that name is given by position")
        _, outputs = self.inferred(args, inputs, with_loss=False, average=average)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def __call__(self, /, *args: Any, average: bool = False, **inputs: Any) -> Any:
        """`predict`."""
        return self.predict(*args, average=average, **inputs)

    def inferred(
        self, args: Sequence[Any], inputs: Mapping[str, Any], with_loss: bool, average: bool = False
    ) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
        """The batch by name; the loss, if asked for, and the outputs. average: by the running means of variables."""
        self._refuse_average(average)
        labels = self.loss_inputs(len(args), inputs) if with_loss else ()
        given = inputs if with_loss else self._source.with_unread(args, inputs)
        batch = self._source.bind(args, given, labels)
        with self._lock:
            self._state.refuse_lost()
            found = self._found(batch, "evaluate" if with_loss else "predict")
            reads = found.reads
            if average:
                assert self._recipe is not None
                places = {n: i for i, n in enumerate(self._recipe.names)}
                reads = tuple(places.get(ema_name(self._recipe.names[i]), i) for i in reads)
            arrays = [*batch.values(), *(self._state.arrays[i] for i in reads)]
            return batch, [np.array(to_numpy(a)) for a in found.run(arrays)]

    def trace(self, args: Sequence[Any], inputs: Mapping[str, Any]) -> None:
        """Trace a written graph for a batch, unless that has been done, so that all of a loaded state is in use."""
        if self._recipe is None:
            batch = self._source.bind(args, inputs, self.loss_inputs(len(args), inputs))
            with self._lock:
                self._specialised(batch)

    def _found(self, batch: dict[str, np.ndarray], kind: str) -> PlannedStep:
        """The plan of "gradients", "evaluate" or "predict" for the signature of a batch."""
        key = _signature(batch), self._values(batch), kind
        found = self._steps.get(key)
        if found is None:
            _examples(batch, self._source.input_names)
            self._tell_of_whole(batch, logging.DEBUG)
            whole, extra, report = self._specialised(batch)
            assert self._recipe is not None
            if kind == "gradients":
                made = gradient_graph(whole, extra, self._state.types, self._recipe)
            else:
                own = self._source.own_loss
                if own and kind == "predict":
                    whole = whole.replace(outputs=whole.outputs[1:])
                made = evaluation_graph(whole, extra, self._recipe, kind == "evaluate" and not own)
            found = self._planned(made, {n: to_numpy(a) for n, a in batch.items()}, report)
            self._steps.put(key, found)
        return found

    def _advance(self, found: PlannedStep, batch: list[Any], fresh: bool) -> Any:
        """Run one step or update, whole or not at all; the loss, or None of an update alone. fresh: its first run."""
        rate, state = self._rate, self._state.arrays
        if rate is None:
            rate = self._optimizer.rates_at(self._state.count(STEP))
        if found.ahead and self._lazy:  # the caller may write into them before the step is done
            batch = [np.array(a) if type(a) is np.ndarray else a for a in batch]
        arrays = [*batch, rate, *(state if found.reads_all else [state[i] for i in found.reads])]
        if found.computed is not None:
            found.computed.check(arrays)
        if fresh or self._check:
            # the first run of a program is the likeliest to fail; NumPy arrays are never donated
            arrays = [to_numpy(a) for a in arrays]
        # nothing may interrupt between what an engine overwrites and the new state; NumPy's arrays are not donated
        if self._donate and (found.fitting is not None or any(type(a) is not np.ndarray for a in arrays)):
            with held_back():
                return self._run_whole(found, arrays, bool(batch))
        return self._run_whole(found, arrays, bool(batch))

    def _run_whole(self, found: PlannedStep, arrays: list[Any], has_loss: bool) -> Any:
        """Make the new state from the old one, whose arrays engines may take, and put it in its place; the loss."""
        try:
            given = list(arrays) if self._check else arrays
            new, number, metrics = found.run(given), None, _NOTHING
            self._state.before = ()  # freed while the device computes
            if has_loss:
                results = [*new]
                if found.ahead is None:
                    self._settle(found, results[0])
                number = self._lazy_loss(results[0]) if self._lazy else found.read_loss(results, given)
                if self._check and not np.isfinite(np.asarray(number, np.float64)).all():
                    raise not_finite(found.graph, arrays)
                new = results[1:]
            if not found.gives_state:
                new, metrics = self._merged(found, new)
            follow = self.follow if has_loss else None
            if follow is None:
                self._put(found, new, metrics)
            else:
                with held_back():  # what the `fit` counts stands with the new state
                    self._put(found, new, metrics)
                    follow(number)
            return number
        except BaseException as e:  # an engine may raise what it likes, and so may what interrupts a thread
            self._state.note_failure(e)
            raise

    def _settle(self, found: PlannedStep, loss: Any) -> None:
        """Note after the first run on an engine, which gave `loss`, how others go: whether they may return before they
        are done, and with a rate on the device, if it never changes."""
        if isinstance(loss, _NUMPY):
            return
        family = family_of(type(loss))
        if type(self._rate) is np.ndarray and family in found.direct[len(found.names)]:
            self._rate = beside(self._rate, loss)
        asynchronous = frozenset(e.name for e, _ in self._pipeline.engines if e.asynchronous)
        late = self._lazy or (found.is_read_whole and self._sharding.mesh is None)
        found.ahead = family == "jax" and late and found.plan.run_ahead(asynchronous)

    def _lazy_loss(self, loss: Any) -> Any:
        """A loss that may still be on the device."""
        if isinstance(loss, _NUMPY):
            return to_numpy(loss)[()]
        return LazyLoss(loss, partial(self._state.failed_late, self._state.loads))

    def _merged(self, found: PlannedStep, results: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """The state and the metrics after a step whose results are not the state alone."""
        count = len(found.writes)
        metrics = dict(zip(found.metrics, results[count:], strict=True))
        state = list(self._state.arrays)
        for i, new in zip(found.writes, results, strict=False):
            state[i] = new
        if isinstance(self._optimizer, Transformation):
            state = self._transformed(self._optimizer, found, state)
        return state, metrics

    def _put(self, found: PlannedStep, new: Sequence[Any], metrics: Mapping[str, Any]) -> None:
        """Put a new state in the place of the old one."""
        self.position = None  # unless the `fit` that follows says where it stands now
        self._state.replace(new, found.updates, bool(found.ahead) and self._is_small)
        self._metrics = metrics

    def _transformed(self, optimizer: Transformation, found: PlannedStep, state: list[Any]) -> list[Any]:
        """The state after a transformation of optax was applied to the gradients that a step left in it."""
        assert self._recipe is not None
        names = self._recipe.names
        if names.index(STEP) not in found.writes:  # a micro-batch
            return state
        trained = [v.name for v in self._recipe.variables if v.trained]
        entries = dict(zip(names, state, strict=True))
        new = optimizer.applied(entries, trained, entries.get(FINITE, True))
        return [new.get(n, a) for n, a in zip(names, state, strict=True)]

    def loss_inputs(self, count: int, given: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the arrays of a step that the loss alone reads."""
        if not isinstance(self._loss, LossFunction):
            return ()
        return self._loss.labels(self._source.output_names, self._source.input_names, count, given)

    def _values(self, batch: Mapping[str, np.ndarray]) -> Any:
        by_value = self._source.by_value
        return tuple([to_numpy(batch[n]).tobytes() for n in by_value if n in batch]) if by_value else ()

    def _make(self, batch: Mapping[str, np.ndarray], update: bool) -> PlannedStep:
        self._tell_of_whole(batch, logging.WARNING)
        whole, extra, report = self._specialised(batch)
        assert self._recipe is not None
        examples = _examples(batch, self._source.input_names)
        made = training_graph(whole, extra, self._state.types, self._recipe, update, examples)
        arrays = {v.name: to_numpy(batch[v.name]) for v in made.graph.inputs[: len(batch)]}
        return self._planned(made, arrays, report, [self._optimizer.rates_at(0)], whole=update)

    def _tell_of_whole(self, batch: Mapping[str, np.ndarray], level: int) -> None:
        """Say so where a mesh does not share a batch."""
        if why := self._sharding.why_whole(batch):
            self.events.emit("training.whole_batch", level=level, reason=why)

    def _specialised(
        self, batch: Mapping[str, np.ndarray]
    ) -> tuple[Graph, dict[str, TensorType], PrecisionReport | None]:
        """The forward graph for a batch, whose last inputs are the variables, and the inputs that the loss alone
        reads."""
        types = {n: TensorType(a.dtype, a.shape) for n, a in batch.items()}
        names = self._source.input_names
        forward, variables = self._source.forward({n: types[n] for n in names})
        if self._recipe is None:
            self._begin(variables)
        recipe = self._recipe
        assert recipe is not None
        known = {i: to_numpy(batch[n]) for i, n in enumerate(names) if n in self._source.by_value}
        declared = [types[n] for n in names] + [v.type for v in recipe.variables]
        whole = specialise(self._pipeline.mark_updates(forward), declared, known, run_node, expand=expand)
        report = None
        if self._lowering is not None:
            self._lowering.check_names(forward)
            whole, report = self._lowering.apply(whole)
        return whole, {n: t for n, t in types.items() if n not in names}, report

    def _planned(
        self,
        made: StepGraph,
        batch: Mapping[str, np.ndarray],
        report: PrecisionReport | None = None,
        rates: Sequence[np.ndarray] = (),
        whole: bool = False,
    ) -> PlannedStep:
        """The plan of a graph. whole: it is a training step with its update."""
        assert self._recipe is not None
        names, pipeline = self._recipe.names, self._pipeline
        trained = [v.name for v in self._recipe.variables if v.trained]
        own = [partial(slot_name, s) for s in self._optimizer.slots] + [ema_name, sum_name]
        slots = {n: [name for of in own if (name := of(n)) in self._state.types] for n in trained}
        if rows := self._sharding.rows(made.graph, batch, self._state.types, slots, whole):
            pipeline = pipeline.with_sharding(rows)
        plans = pipeline.plan_cache(pipeline.capture(made.graph))
        reads, writes = (tuple(map(names.index, found)) for found in (made.reads, made.writes))
        state = [to_numpy(self._state.arrays[i]) for i in reads]
        plan = plans.plan_for([*batch.values(), *rates, *state])
        assert isinstance(plan, Planned)
        if self._is_named:
            self._is_named = False
            _warn_of_idle(self.engines, plan.explain().report, self._source.name)
        engines = self._pipeline.services.compilation.engines
        host = on_host(self._pipeline.services.place.xp)
        direct = tuple(host if name is None else taken_by(engines, name) for name in plan.engine_inputs)
        computed = ComputedIndices(made.graph) if self._check_indices else None
        for at in plan.steps:
            if isinstance(at.call, Launch):
                at.call.input_checks = without_checked(at.call.input_checks, at.inputs, made.ranges)
        whole_state = tuple(range(len(names)))
        return PlannedStep(
            plan, made.graph, tuple(batch), direct, reads, writes, reads == whole_state,
            writes == whole_state and not made.metrics, report, made.ranges, computed, made.metrics,
            updates=STEP in made.writes,
        )  # fmt: skip

    def _begin(self, variables: Sequence[Variable]) -> None:
        trained = [v.name for v in variables if v.trained]
        if not trained:
            raise GradientError("the model has no float constants to train; name them with trainable=[...]")
        self._optimizer.check_groups(trained)
        self._state.begin(variables)
        self._recipe = Recipe(
            tuple(variables), self._optimizer, self._loss, self._scale, self._seed, self._state.names, self._dropout,
            self._batch_norm, self._accumulate, self._donate, self._recompute, self._named,
        )  # fmt: skip
        self.events.emit("training.variables", level=logging.INFO, count=len(trained), names=", ".join(trained))

    # --- queries ------------------------------------------------------------------------------------------------

    @property
    def metrics(self) -> dict[str, Any]:
        """What the loss function of the last step gave beside the loss, by name."""
        return {n: to_numpy(a)[()] for n, a in self._metrics.items()}

    @property
    def variables(self) -> tuple[str, ...]:
        """Names of the variables: trained ones and running statistics."""
        return tuple(v.name for v in self._recipe.variables) if self._recipe is not None else ()

    @property
    def engines(self) -> tuple[str, ...]:
        """Names of the selected engines, by descending priority."""
        return tuple(e.name for e, _ in self._pipeline.engines)

    @property
    def step_count(self) -> int:
        """The number of updates of the state, those before a loaded checkpoint included."""
        with self._lock:
            return self._state.count(STEP)

    def explain(self) -> Explanation:
        """Return the explanation of the last signature. Raises InputError before the first step."""
        if self._last is None:
            raise InputError("no step has been taken yet: there is nothing to explain")
        return replace(self._last.plan.explain(), precision=self._last.precision)

    def training_graph(self) -> Graph:
        """Return the step graph of the last signature, before partitioning. Raises InputError before the first step."""
        if self._last is None:
            raise InputError("no step has been taken yet: there is no graph of it")
        return self._last.graph

    # --- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return copies of the state that the next step depends on: variables, optimizer slots, the step count, and
        what a schedule knows that follows the training (`ReduceOnPlateau`)."""
        with self._lock:
            return self._state.copies()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a result of `state_dict`. Raises CheckpointError, with nothing changed, for one that does not fit."""
        arrays = {n: np.array(to_numpy(a)) for n, a in state.items()}
        with self._lock:
            if self._recipe is None:  # a written graph gets its variables at its first step
                self._source.check(arrays)
            self._state.load(arrays)
            self.position = None

    def save(self, path: str | os.PathLike[str], *, sharded: bool = False, background: bool = False) -> None:
        """Write the state as a safetensors file, atomically; in a `fit`, or after it, also where that stands and the
        states of its callbacks, for `fit(resume=True)`.

        sharded: `path` is a folder, in which each device's part of the state becomes a file (see
        `training.sharded_checkpoint`), so that no process holds or writes all of it. A folder is loaded for any mesh.
        background: return once the state is copied, and write while training goes on. The next `save`, `load` and
        `wait_saved` wait for that and raise what it raised; so the end of the program waits.

        Raises CheckpointError, also where there is no state yet (an `xrt.Graph` has variables from its first batch on),
        and OptionError for a sharded state of several processes in the background.
        """
        where = {} if self.position is None else self.position.arrays()
        metadata = {"format": _FORMAT, "seed": str(self._seed)}
        if sharded:
            with self._lock:
                self._refuse_empty(self._state.names)
                found = sharded_checkpoint.pieces({**self._state.entries(), **where})
            if background and not found.whole:
                raise OptionError(
                    "background=True: processes that write pieces of one state wait for each other, which they can not "
                    "do beside a training step; leave one of sharded and background out"
                )
            self._write(partial(sharded_checkpoint.save, found, path, metadata), background)
            return
        state = self.state_dict()
        self._refuse_empty(state)
        if background:  # where several processes share the file, the one that writes begins to
            checkpoint.once(
                path,
                lambda: self._writer.start(partial(checkpoint.write, {**state, **where}, pathlib.Path(path), metadata)),
            )
            return
        self._write(partial(checkpoint.save, {**state, **where}, path, metadata), False)

    def _write(self, write: Callable[[], None], background: bool) -> None:
        if background:
            self._writer.start(write)
        else:
            self._writer.wait()
            write()

    def wait_saved(self) -> None:
        """Wait for the file that a `save` writes in the background. Raises CheckpointError if it cannot be written."""
        self._writer.wait()

    def save_parameters(self, path: str | os.PathLike[str], *, average: bool = False) -> None:
        """Write the variables alone, in the model's dtypes, as a safetensors file of arrays by name, which every
        library of that format reads. average: their running means. Raises as `save` and `parameters` do."""
        checkpoint.save(self.parameters(average=average), path, {})

    def load_parameters(self, arrays: Mapping[str, Any] | str | os.PathLike[str]) -> None:
        """Start from other variables: a safetensors file with arrays of their names, such as `save_parameters` wrote,
        or such arrays. They are cast to the dtypes of the state; running means start from them, and optimizer and
        counters stay. Others than variables are ignored.

        Raises CheckpointError, with nothing changed, where a variable is missing or of another shape, and where an
        `xrt.Graph` has had no batch yet (its own `load_parameters` takes arrays at any time).
        """
        given = checkpoint.load(arrays)[0] if isinstance(arrays, str | os.PathLike) else arrays
        state = self.state_dict()
        names = self.variables
        if not names:
            raise CheckpointError(
                f"{self._source.name} has no variables before its first batch; its own load_parameters takes arrays"
            )
        for n in names:
            if n not in given:
                raise CheckpointError(f"there is no array for the variable {n!r}")
            new = np.array(to_numpy(given[n]))
            if new.shape != state[n].shape:
                raise CheckpointError(f"{n!r} is of shape {list(new.shape)}, the variable {list(state[n].shape)}")
            state[n] = new.astype(state[n].dtype)
            if ema_name(n) in state:
                state[ema_name(n)] = state[n].copy()
        self.load_state_dict(state)

    def _refuse_empty(self, state: Collection[str]) -> None:
        """Raise CheckpointError where nothing is known of the variables yet."""
        if not state:
            raise CheckpointError(
                f"{self._source.name} has no state to save before its first batch: take a step, or predict or evaluate "
                "one"
            )

    def load(self, path: str | os.PathLike[str]) -> None:
        """Load the state of a file, or a folder, that `save` wrote. Raises CheckpointError, also if its seed
        differs."""
        self._writer.wait()
        source = sharded_checkpoint if pathlib.Path(path).is_dir() else checkpoint
        arrays, metadata = source.load(path)
        if metadata.get("format") != _FORMAT:
            raise CheckpointError(f"{pathlib.Path(path)} is no training state: format {metadata.get('format')!r}")
        if metadata.get("seed", str(self._seed)) != str(self._seed):
            raise CheckpointError(
                f"{pathlib.Path(path)} was written with seed={metadata['seed']}, this module has seed={self._seed}; "
                "they must be equal to continue the same run"
            )
        where = {n: arrays.pop(n) for n in list(arrays) if n.startswith(PREFIX)}
        position = of_arrays(where) if where else None
        self.load_state_dict(arrays)
        self.position = position

    def parameters(self, *, average: bool = False) -> dict[str, np.ndarray]:
        """Return copies of the variables by name, in the model's dtypes; of an `xrt.Graph` all arrays, for
        `load_parameters`. average: their running means (option `ema` of the optimizer). Raises as `state_dict` does,
        and OptionError where there are no means."""
        return self._source.own(self._parameters(average))

    def _refuse_average(self, average: bool) -> None:
        if average and self._optimizer.ema is None:
            raise OptionError("average=True: the optimizer keeps no running means; give it ema=0.999 or the like")

    def _parameters(self, average: bool = False) -> dict[str, np.ndarray]:
        """The values of the variables, as far as they are known before the first step."""
        self._refuse_average(average)
        state = self.state_dict()
        found = {n: a for n, a in state.items() if not n.startswith(("training/", "optimizer/"))}
        return {n: state.get(ema_name(n), a) for n, a in found.items()} if average else found

    def graph(self) -> Graph:
        """Return the model's graph with the current values of the variables as constants. For an `xrt.Graph` it has the
        shapes of the first step; for other shapes use `graph.load_parameters(trainer.parameters())`."""
        return self._source.filled(self._parameters())

    def export(self, path: str | os.PathLike[str], *, opset: int | None = None, average: bool = False) -> None:
        """Write the trained model as an ONNX file, for the lowest opset that has all its operators, or a given one.
        average: with the running means of the variables, see `parameters`. Dropout and BatchNormalization are
        written as in inference.

        The file of an `xrt.Graph` takes batches of any size where `build` records the same for another size; inputs
        that only a loss reads, by `backward()`, stay out. Raises ExportError if it cannot be written.
        """
        from xrt_core.frontends.onnx_export import save, with_opset

        graph = self._source.exported(self._parameters(average))
        if self._recipe is not None:
            graph = in_inference(graph, self._recipe)
        save(with_opset(graph, opset), path)

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainModule:
        """Return a module of its own with a copy of the state; it compiles its own steps."""
        made = type(self)(copy.deepcopy(self._source.model, memo), seed=self._seed, **self._arguments)
        memo[id(self)] = made
        state = self.state_dict()
        if state:
            made.load_state_dict(state)
        return made

    def __repr__(self) -> str:
        return f"<TrainModule {self._source.name}: {len(self.variables)} variables; engines {self.engines or 'host'}>"


def _optimizer_of(given: Any, model: Any) -> Optimizer:
    own = getattr(model, "_optimizer", None) if isinstance(model, TracedGraph) else None
    found = own if given is None else given
    if not isinstance(found, Optimizer) and is_transformation(found):
        return Transformation(found)
    if not isinstance(found, Optimizer):
        raise OptionError(
            f"optimizer={found!r}: it takes one of xrt.optim (SGD, Momentum, Adagrad, Adam, AdamW, LAMB), or another "
            "Optimizer"
        )
    return found


def _as_given(args: Sequence[Any], inputs: Mapping[str, Any], update: bool) -> tuple[Any, ...] | None:
    """What tells NumPy's arrays as a caller gave them apart; None for others, whose shapes may be anything."""
    found: list[Any] = [update]
    for a in args:
        if type(a) is not np.ndarray:
            return None
        found += a.shape, a.dtype
    for n, a in inputs.items():
        if type(a) is not np.ndarray:
            return None
        found += n, a.shape, a.dtype
    return tuple(found)


def _signature(batch: Mapping[str, np.ndarray]) -> tuple[tuple[str, tuple[int, ...], np.dtype], ...]:
    """Names, shapes and dtypes."""
    return tuple([(n, a.shape, a.dtype) for n, a in batch.items()])


def _examples(batch: Mapping[str, np.ndarray], names: Sequence[str]) -> int:
    """The number of examples of a batch. Raises InputError for none."""
    for name in names:
        if batch[name].ndim:
            if not batch[name].shape[0]:
                raise InputError(f"the batch is empty: input {name!r} has shape {list(batch[name].shape)}")
            return int(batch[name].shape[0])
    return 1


def _seed(given: Any) -> int:
    if given is None:
        return secrets.randbits(31)
    if not isinstance(given, int | np.integer) or isinstance(given, bool) or not -(2**31) <= given < 2**31:
        raise OptionError(f"seed={given!r}: it takes a whole number from -2**31 to 2**31 - 1, or None for any")
    return int(given)


def _warn_of_idle(engines: Sequence[str], report: PartitionReport, model: str) -> None:
    """Warn of engines that were asked for and support no node of a step, each with its reason for the first."""
    taking = {c.engine for c in report.clusters}
    for name in engines:
        said = [part for h in report.host_nodes for part in h.reason.split("; ") if part.startswith(f"{name}: ")]
        if name not in taking and said and not any("would not pay" in part for part in said):
            log.warning("%s: the engine %s takes no node of the training step (%s)", model, name, said[0])


def _count(name: str, given: Any) -> int:
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise OptionError(f"{name}={given!r}: it takes a whole number of at least 1")
    return given

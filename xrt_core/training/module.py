"""TrainModule: runs training steps (forward, backward, update) of a model with a loss and an optimizer."""

from __future__ import annotations

import copy
import logging
import os
import pathlib
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
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
from xrt_core.errors import CheckpointError, GradientError, InputError, OptionError, TrainingError, XRTError
from xrt_core.events import EventLog
from xrt_core.explanation import Explanation
from xrt_core.frontends.graph import Graph as TracedGraph
from xrt_core.host.executor import run_node
from xrt_core.ir.graph import Graph
from xrt_core.ir.types import TensorType, dtype_name
from xrt_core.options import Options, resolve
from xrt_core.passes.mixed_precision import PrecisionReport
from xrt_core.passes.partitioning.report import PartitionReport
from xrt_core.passes.rematerialization import Recompute
from xrt_core.passes.shape_specialization import specialise
from xrt_core.runtime.arrays import beside, family_of, to_numpy
from xrt_core.runtime.binding import settled_host, taken_by
from xrt_core.runtime.launch import Launch
from xrt_core.runtime.transfers import on_host
from xrt_core.training import checkpoint, sharded_checkpoint
from xrt_core.training.background import Writer
from xrt_core.training.checks import ComputedIndices, IndexRange, not_finite, refuse_out_of_range, without_checked
from xrt_core.training.interrupts import held_back
from xrt_core.training.lazy_loss import LazyLoss
from xrt_core.training.losses import LossFunction, loss_of
from xrt_core.training.model_adapter import FixedModel, WrittenGraph
from xrt_core.training.optimizer import SCHEDULE, Optimizer
from xrt_core.training.position import PREFIX, Position, of_arrays
from xrt_core.training.recomputation import labels
from xrt_core.training.sharding import StepSharding
from xrt_core.training.step import (
    EXAMPLES,
    FINITE,
    MICRO,
    SKIPPED,
    STEP,
    Recipe,
    StepGraph,
    ema_name,
    evaluation_graph,
    gradient_graph,
    in_inference,
    initial_state,
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
_SMALL: Final = 4 << 20  # bytes of a state whose second copy costs neither memory nor time to speak of
_Given = tuple[tuple[str, tuple[int, ...], np.dtype], ...]
_AT_ONCE: Final = nullcontext()


@dataclass(slots=True)
class _Step:
    """The plan of one signature's training step.

    names: of the arrays of a batch, in order. direct: for each input the array libraries, besides NumPy, whose arrays
    it accepts without conversion. reads, writes: indices into the state of the plan's last inputs, and of its outputs
    after the loss. precision: the nodes of the forward graph lowered to a narrow float. ranges: range checks of its
    integer inputs. computed: checks of indices that it computes, where these are asked for. updates: whether it counts
    as an update. fitting: the types of the arrays of a run that needed no conversion. ahead: whether runs return before
    they are done; None: not known yet.
    reads_all, writes_all: whether `reads` and `writes` are the whole state in its order.
    """

    plan: Planned
    graph: Graph
    names: tuple[str, ...]
    direct: tuple[tuple[str, ...], ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    precision: PrecisionReport | None = None
    ranges: tuple[IndexRange, ...] = ()
    computed: ComputedIndices | None = None
    metrics: tuple[str, ...] = ()
    updates: bool = True
    fitting: list[type] | None = None
    ahead: bool | None = None
    reads_all: bool = False
    writes_all: bool = False


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
        self._donate = self._is_large() if donate is None else bool(donate)
        self._pipeline = self._made_pipeline(resolved)
        self._named = trainable is not None and not callable(trainable)
        self._recompute = Recompute(labels(recompute), recompute_budget)
        self._is_named = resolved.engine not in (None, "auto", ("auto",))  # so they are to take nodes
        has_slots = not isinstance(self._optimizer, Transformation)
        self._sharding = StepSharding(resolved.mesh, resolved.sharding, bool(zero), has_slots)
        self._lost: str | None = None  # why the state is lost
        self._loads = 0  # states that were loaded
        self._lock = threading.Lock()
        self._writer = Writer()
        self._steps: LRU[_Step] = LRU(resolved.cache_size)
        self._known: LRU[dict[bool, _Step]] = LRU(resolved.cache_size)  # by arrays as given, and whether it updates
        self._rate: Any = None if self._optimizer.is_scheduled else self._optimizer.rates_at(0)
        self._state: list[Any] = []
        self._counts: dict[str, int] = {}  # counters of the state, as far as they are known here
        self._metrics: dict[str, Any] = {}  # of the last step, by the loss function
        self._types: dict[str, TensorType] = {}
        self._recipe: Recipe | None = None
        self._pending: Mapping[str, np.ndarray] | None = None
        self._last: _Step | None = None
        self._applied: _Step | None = None  # an update alone
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
        given = None if args else _as_given(inputs)
        known = None if given is None else self._known.get(given)
        batch = {} if known is not None else self._bound(args, inputs)
        with self._lock:
            self._refuse_lost()
            update = self._accumulate == 1 or self._count_of(MICRO) + 1 >= self._accumulate
            found = None if known is None else known.get(update)
            if found is not None:
                loss = self._advance(found, [inputs[n] for n in found.names], False)
            else:
                batch = batch or self._bound(args, inputs)
                key = _signature(batch), self._values(batch), update
                found = self._steps.get(key)
                if found is not None:
                    loss = self._advance(found, list(batch.values()), False)
                else:
                    found = self._make(batch, update)
                    loss = self._advance(found, list(batch.values()), True)
                    self._steps.put(key, found)
                if given is not None:
                    self._remember(given, inputs, batch, update, found)
            self._last = found
        return loss

    def _bound(self, args: Sequence[Any], inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """The arrays of a step by name, in order."""
        return self._source.bind(args, inputs, self.loss_inputs(len(args), inputs))

    def _remember(
        self, given: _Given, inputs: Mapping[str, Any], batch: Mapping[str, np.ndarray], update: bool, found: _Step
    ) -> None:
        """Note the step of NumPy's arrays as they are given, where all follows from their dtypes and shapes: binding
        them has changed nothing, and none is read."""
        if len(inputs) == len(batch) and all(batch[n] is a for n, a in inputs.items()) and not self._source.by_value:
            self._known.put(given, {**(self._known.get(given) or {}), update: found})

    def apply(self) -> bool:
        """Update by the micro-batches since the last update, fewer than `accumulate`; returns whether there were any.

        Raises as `step` does.
        """
        with self._lock:
            self._refuse_lost()
            if not self._count_of(MICRO):
                return False
            if self._recipe is None:
                raise InputError(
                    f"the micro-batches that wait are in a loaded state, and {self._source.name} has not been traced "
                    "yet: run `predict` or `evaluate` on a batch first"
                )
            found = self._applied
            if found is None:
                found = self._planned(update_graph(self._types, self._recipe), {}, rates=[self._optimizer.rates_at(0)])
            self._advance(found, [], self._applied is None)
            self._applied = found
        return True

    def gradients(self, /, *args: Any, **inputs: Any) -> dict[str, np.ndarray]:
        """Return the gradients of the loss of a batch by the trained variables, by name: those of the next step before
        scaling, clipping and accumulation. Nothing is updated. Raises as `step` does."""
        batch = self._source.bind(args, inputs, self.loss_inputs(len(args), inputs))
        with self._lock:
            self._refuse_lost()
            found = self._found(batch, "gradients")
            arrays = [*batch.values(), *(self._state[i] for i in found.reads)]
            assert self._recipe is not None
            names = [v.name for v in self._recipe.variables if v.trained]
            return dict(zip(names, [np.array(to_numpy(a)) for a in self._run(found, arrays)[1:]], strict=True))

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
            self._refuse_lost()
            found = self._found(batch, "evaluate" if with_loss else "predict")
            reads = found.reads
            if average:
                assert self._recipe is not None
                places = {n: i for i, n in enumerate(self._recipe.names)}
                reads = tuple(places.get(ema_name(self._recipe.names[i]), i) for i in reads)
            arrays = [*batch.values(), *(self._state[i] for i in reads)]
            return batch, [np.array(to_numpy(a)) for a in self._run(found, arrays)]

    def trace(self, args: Sequence[Any], inputs: Mapping[str, Any]) -> None:
        """Trace a written graph for a batch, unless that has been done, so that all of a loaded state is in use."""
        if self._recipe is None:
            batch = self._source.bind(args, inputs, self.loss_inputs(len(args), inputs))
            with self._lock:
                self._specialised(batch)

    def _found(self, batch: dict[str, np.ndarray], kind: str) -> _Step:
        """The plan of "gradients", "evaluate" or "predict" for the signature of a batch."""
        key = _signature(batch), self._values(batch), kind
        found = self._steps.get(key)
        if found is None:
            _examples(batch, self._source.input_names)
            self._tell_of_whole(batch, logging.DEBUG)
            whole, extra, report = self._specialised(batch)
            assert self._recipe is not None
            if kind == "gradients":
                made = gradient_graph(whole, extra, self._types, self._recipe)
            else:
                own = self._source.own_loss
                if own and kind == "predict":
                    whole = whole.replace(outputs=whole.outputs[1:])
                made = evaluation_graph(whole, extra, self._recipe, kind == "evaluate" and not own)
            found = self._planned(made, {n: to_numpy(a) for n, a in batch.items()}, report)
            self._steps.put(key, found)
        return found

    def _advance(self, found: _Step, batch: list[Any], fresh: bool) -> Any:
        """Run one step or update, whole or not at all; the loss, or None of an update alone. fresh: its first run."""
        rate = self._rate
        if rate is None:
            rate = self._optimizer.rates_at(self._count_of(STEP))
        state = self._state
        if found.ahead:  # the caller may write into them before the step is done
            batch = [np.array(a) if type(a) is np.ndarray else a for a in batch]
        arrays = [*batch, rate, *(state if found.reads_all else [state[i] for i in found.reads])]
        if found.computed is not None:
            found.computed.check(arrays)
        if fresh or self._check:
            # the first run of a program is the likeliest to fail; NumPy arrays are never donated
            arrays = [to_numpy(a) for a in arrays]
        # nothing may interrupt between what an engine overwrites and the new state; NumPy's arrays are not donated
        taken = self._donate and (found.fitting is not None or any(type(a) is not np.ndarray for a in arrays))
        with held_back() if taken else _AT_ONCE:
            try:
                return self._run_whole(found, arrays, bool(batch))
            except BaseException as e:  # an engine may raise what it likes, and so may what interrupts a thread
                self._note_loss(e)
                raise

    def _run_whole(self, found: _Step, arrays: list[Any], has_loss: bool) -> Any:
        """Make the new state from the old one, whose arrays engines may take, and put it in its place; the loss."""
        results = list(self._run(found, arrays if not self._check else list(arrays)))
        loss = results.pop(0) if has_loss else None
        count = len(found.writes)
        if self._check and loss is not None and not np.isfinite(to_numpy(loss).astype(np.float64)).all():
            raise not_finite(found.graph, arrays)
        if found.writes_all:
            state = results[:count]
        else:
            state = list(self._state)
            for i, new in zip(found.writes, results, strict=False):
                state[i] = new
        if isinstance(self._optimizer, Transformation):
            state = self._transformed(self._optimizer, found, state)
        number = loss
        if loss is not None and not isinstance(loss, _NUMPY):
            place = len(arrays) - len(found.reads) - 1
            if type(self._rate) is np.ndarray and family_of(type(loss)) in found.direct[place]:
                self._rate = beside(self._rate, loss)  # a rate that never changes is taken to the device once
            if self._lazy:
                number = LazyLoss(loss, partial(self._failed_late, self._loads))
                if found.ahead is None:
                    found.ahead = family_of(type(loss)) == "jax" and found.plan.run_ahead(self._asynchronous())
            else:
                number = to_numpy(loss)[()]  # which may raise what the device did
        metrics = dict(zip(found.metrics, results[count:], strict=True)) if found.metrics else {}
        counts = self._counts_after(found)
        number = number[()] if isinstance(number, np.ndarray) else number
        follow = self.follow if has_loss else None
        with held_back() if follow is not None else _AT_ONCE:
            self.position = None  # unless the `fit` that follows says where it stands now
            self._counts = {}  # read from the state if something interrupts here
            self._state, self._counts, self._metrics = state, counts, metrics
            if follow is not None:
                follow(number)
        return number

    def _transformed(self, optimizer: Transformation, found: _Step, state: list[Any]) -> list[Any]:
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

    def _count_of(self, name: str) -> int:
        """Return a counter of the state; 0 before the first step. Reading it waits for the device, unless it follows
        from the steps since it was read."""
        if self._recipe is None:
            return int((self._pending or {}).get(name, 0))
        if name not in self._recipe.names:
            return 0
        if name not in self._counts:
            self._counts[name] = int(to_numpy(self._state[self._recipe.names.index(name)]))
        return self._counts[name]

    def _counts_after(self, found: _Step) -> dict[str, int]:
        """The counters after a step that was taken, as far as they are known."""
        if not found.updates:
            return {n: c + 1 if n == MICRO else c for n, c in self._counts.items()}
        if self._scale is None:
            return {n: c + 1 if n == STEP else 0 for n, c in self._counts.items()}
        return {}  # whether the step was left out is on the device

    def _refuse_lost(self) -> None:
        if self._lost is not None:
            raise TrainingError(self._lost)

    def _run(self, step: _Step, arrays: list[Any]) -> Sequence[Any]:
        types = [*map(type, arrays)]
        if types != step.fitting:
            direct, fits = step.direct, True
            for i, kind in enumerate(types):
                if kind is not np.ndarray and family_of(kind) not in direct[i]:
                    arrays[i], fits = to_numpy(arrays[i]), False
            step.fitting = types if fits else None
        refuse_out_of_range(step.ranges, arrays, self._check_indices)  # launches do not check what NumPy's arrays hold
        if step.plan.host[0] is np:
            return step.plan.run(arrays)
        with settled_host(*step.plan.host):
            return step.plan.run(arrays)

    def _asynchronous(self) -> frozenset[str]:
        """The engines that may be run without waiting."""
        return frozenset(e.name for e, _ in self._pipeline.engines if e.asynchronous)

    def _failed_late(self, loads: int, error: Exception) -> None:
        """Note that a step that ran ahead has failed, and with it the state since. loads: how many states had been
        loaded then. Raises TrainingError."""
        message = (
            f"a step that ran ahead failed on the device, and the state is lost: {_first(error)}. Load a state "
            "(load_state_dict, load); with lazy_loss=False a step is done when it returns"
        )
        if loads == self._loads:
            self._lost = message
        raise TrainingError(message) from error

    def _note_loss(self, error: BaseException) -> None:
        """Note that the state is lost where a step failed after engines had taken its arrays. Raises TrainingError then
        for an Exception."""
        if any(getattr(a, "is_deleted", bool)() for a in self._state):
            self._lost = (
                "the step failed after its variables had been donated to the engine, and they are lost: "
                f"{_first(error)}. Load a state (load_state_dict, load); with donate=False no failure loses it"
            )
            if isinstance(error, Exception):
                raise TrainingError(self._lost) from error

    def _values(self, batch: Mapping[str, np.ndarray]) -> Any:
        by_value = self._source.by_value
        return tuple([to_numpy(batch[n]).tobytes() for n in by_value if n in batch]) if by_value else ()

    def _make(self, batch: Mapping[str, np.ndarray], update: bool) -> _Step:
        self._tell_of_whole(batch, logging.WARNING)
        whole, extra, report = self._specialised(batch)
        assert self._recipe is not None
        examples = _examples(batch, self._source.input_names)
        made = training_graph(whole, extra, self._types, self._recipe, update, examples)
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
    ) -> _Step:
        """The plan of a graph. whole: it is a training step with its update."""
        assert self._recipe is not None
        names, pipeline = self._recipe.names, self._pipeline
        trained = [v.name for v in self._recipe.variables if v.trained]
        own = [partial(slot_name, s) for s in self._optimizer.slots] + [ema_name, sum_name]
        slots = {n: [name for of in own if (name := of(n)) in self._types] for n in trained}
        if rows := self._sharding.rows(made.graph, batch, self._types, slots, whole):
            pipeline = pipeline.with_sharding(rows)
        plans = pipeline.plan_cache(pipeline.capture(made.graph))
        reads, writes = (tuple(map(names.index, found)) for found in (made.reads, made.writes))
        state = [to_numpy(self._state[i]) for i in reads]
        plan = plans.plan_for([*batch.values(), *rates, *state])
        assert isinstance(plan, Planned)
        if self._is_named:
            self._is_named = False
            _warn_of_idle(self.engines, plan.explain().report, self._source.name)
        engines = self._pipeline.services.compilation.engines
        host = on_host(self._pipeline.services.place.xp)
        direct = tuple(host if name is None else taken_by(engines, name) for name in plan.engine_inputs)
        computed = ComputedIndices(made.graph) if self._check_indices else None
        updates = STEP in made.writes
        for at in plan.steps:
            if isinstance(at.call, Launch):
                at.call.input_checks = without_checked(at.call.input_checks, at.inputs, made.ranges)
        whole_state = tuple(range(len(names)))
        return _Step(
            plan, made.graph, tuple(batch), direct, reads, writes, report, made.ranges, computed, made.metrics, updates,
            reads_all=reads == whole_state, writes_all=writes == whole_state,
        )  # fmt: skip

    def _begin(self, variables: Sequence[Variable]) -> None:
        trained = [v.name for v in variables if v.trained]
        if not trained:
            raise GradientError("the model has no float constants to train; name them with trainable=[...]")
        self._optimizer.check_groups(trained)
        state = initial_state(variables, self._optimizer, self._scale, self._accumulate)
        self._types = {n: TensorType(a.dtype, a.shape) for n, a in state.items()}
        self._recipe = Recipe(
            tuple(variables), self._optimizer, self._loss, self._scale, self._seed, tuple(state), self._dropout,
            self._batch_norm, self._accumulate, self._donate, self._recompute, self._named,
        )  # fmt: skip
        self._state = list(state.values())
        self.events.emit("training.variables", level=logging.INFO, count=len(trained), names=", ".join(trained))
        if self._pending is not None:
            try:
                self._set(self._pending)
            except CheckpointError:
                self._recipe = None  # the loaded state stands: no step trains from another one
                raise
            self._pending = None

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
            return self._count_of(STEP)

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
            self._refuse_lost()
            if self._recipe is None:
                return dict(self._pending or {})  # nothing is known of the variables before the first batch
            try:
                own = {n: np.array(to_numpy(a)) for n, a in zip(self._recipe.names, self._state, strict=True)}
            except XRTError as e:
                if self._lazy:
                    self._failed_late(self._loads, e)
                raise
            return own | self._optimizer.schedule_state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a result of `state_dict`. Raises CheckpointError, with nothing changed, for one that does not fit."""
        arrays = {n: np.array(to_numpy(a)) for n, a in state.items()}
        with self._lock:
            if self._recipe is None:  # a written graph gets its variables at its first step
                self._source.check(arrays)
                self._check_entries(arrays)
                self._pending = arrays
            else:
                self._set(arrays)
            self._optimizer.load_schedule_state(arrays)
            self.position = None

    def _check_entries(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Hold what a state has beside variables against the optimizer and the options, before a batch has said which
        variables there are. Raises CheckpointError."""
        if isinstance(self._optimizer, Transformation):  # the number of its leaves follows from the variables
            return
        one = Variable(np.zeros(1, np.float32), True, "*")
        want = {n.removesuffix("*") for n in initial_state([one], self._optimizer, self._scale, self._accumulate)}
        want -= {"", SKIPPED, EXAMPLES}  # which states of earlier versions do not have
        slots = [p for p in want if p.endswith("/")]
        others = [n for n in arrays if n.startswith(("optimizer/", "training/"))]
        have = {next((p for p in slots if n.startswith(p)), n) for n in others}
        have = {n for n in have if not n.startswith(SCHEDULE)} - {SKIPPED, EXAMPLES}
        if have != want:
            raise CheckpointError(
                f"the state does not fit this optimiser and its options: missing {_some(sorted(want - have))}; unknown "
                f"{_some(sorted(have - want))}"
            )

    def _set(self, arrays: Mapping[str, np.ndarray]) -> None:
        assert self._recipe is not None
        names = self._recipe.names
        arrays = {n: a for n, a in arrays.items() if not n.startswith(SCHEDULE)}  # the optimizer's, if it follows one
        if SKIPPED in names:  # states of earlier versions do not count them
            arrays = {SKIPPED: np.zeros((), np.int64), **arrays}
        if EXAMPLES in names and MICRO in arrays:  # nor the examples: each micro-batch weighs alike in their sums
            arrays = {EXAMPLES: arrays[MICRO].astype(np.float32), **arrays}
        missing, surplus = [n for n in names if n not in arrays], [n for n in arrays if n not in self._types]
        if missing or surplus:
            raise CheckpointError(
                f"the state does not fit this model and optimiser: missing {_some(missing)}; unknown {_some(surplus)}"
            )
        for n in names:
            have, want = arrays[n], self._types[n]
            if have.dtype != want.dtype or have.shape != want.shape:
                raise CheckpointError(f"the state's {n!r} is {dtype_name(have.dtype)}{list(have.shape)}, not {want}")
        if MICRO in names and not 0 <= arrays[MICRO] < self._accumulate:
            raise CheckpointError(
                f"the state is at micro-batch {arrays[MICRO]} of an update, this module has "
                f"accumulate={self._accumulate}"
            )
        self._state = [arrays[n] for n in names]
        self._counts = {}
        self._lost = None
        self._loads += 1

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
                self._refuse_lost()
                entries = {} if self._recipe is None else dict(zip(self._recipe.names, self._state, strict=True))
                self._refuse_empty(entries)
                found = sharded_checkpoint.pieces({**entries, **self._optimizer.schedule_state(), **where})
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

    def _refuse_empty(self, state: Mapping[str, Any]) -> None:
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


def _first(error: BaseException) -> BaseException:
    """Return the root cause of a chain of errors; the error of the failed fallback to the host is not informative."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def _as_given(inputs: Mapping[str, Any]) -> _Given | None:
    """What tells NumPy's arrays as a caller gave them apart; None for others, whose shapes may be anything."""
    for a in inputs.values():
        if type(a) is not np.ndarray:
            return None
    return tuple([(n, a.shape, a.dtype) for n, a in inputs.items()])


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


def _some(names: Sequence[str]) -> str:
    return (", ".join(map(repr, names[:4])) + (", ..." if len(names) > 4 else "")) or "nothing"

"""Training by epochs: what `TrainModule.fit` and `evaluate` do with data, callbacks and metrics."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from xrt_core.errors import InputError, OptionError
from xrt_core.progress import Progress
from xrt_core.runtime.arrays import is_array, to_numpy
from xrt_core.training.callbacks import Monitor, Trainer
from xrt_core.training.metrics import metrics_of
from xrt_core.training.position import Position, digest, named

log = logging.getLogger("xrt")


class History(list[dict[str, float]]):
    """The numbers of each epoch. interrupted: whether Ctrl-C ended the training."""

    interrupted: bool = False


def run(
    trainer: Trainer, data: Any, epochs: int, batch_size: int | None, validation: Any, callbacks: Any, metrics: Any,
    progress: bool, resume: bool,
) -> History:  # fmt: skip
    """See `TrainModule.fit`."""
    if not isinstance(epochs, int) or epochs < 1:
        raise OptionError(f"epochs={epochs!r}: it takes a whole number of at least 1")
    called = list(callbacks) if isinstance(callbacks, Sequence) else [callbacks]
    history = History()
    told = {"loss", *(m.name for m in metrics_of(metrics))}  # a wrong name is told before the first epoch
    for c in called:
        if isinstance(c, Monitor):
            c.check(told if validation is not None else set())
    position = _resumed(trainer, called) if resume else Position(callbacks=called)
    trainer.position = position
    ended = resume and not position.batch and any(c.has_ended for c in named(called).values())
    try:
        while position.epoch < epochs and not ended:
            epoch = position.epoch
            with Progress(f"epoch {epoch + 1}/{epochs}", shown=progress) as bar:
                rest = _rest(trainer, data, batch_size, position)
                stop = _epoch(trainer, rest, position, partial(_advance, bar))
            if not position.batch:
                raise InputError(
                    f"the data gave no batch in epoch {epoch + 1}"
                    + ("; a generator is used up after one: give a function that makes one" if epoch else "")
                )
            trainer.apply()
            trainer.position = position
            logs = {"epoch": float(epoch + 1), **position.means()}
            if validation is not None:
                found = evaluated(trainer, validation, batch_size, metrics)
                logs |= {f"val_{n}": v for n, v in found.items()}
            history.append(logs)
            trainer.position = None
            position.next_epoch()
            ended = _called(trainer, position, "on_epoch", logs) or stop
    except KeyboardInterrupt:
        history.interrupted = True
        lost = "" if trainer.position is not None else "; it came within a callback, so that resume=True cannot go on"
        log.warning(
            "interrupted after step %d: the state is that after the last whole step%s", trainer.step_count, lost
        )
    finally:
        for c in called:
            if hasattr(c, "on_end"):
                c.on_end(trainer)
    return history


def evaluated(
    trainer: Trainer, data: Any, batch_size: int | None, metrics: Any, average: bool = False
) -> dict[str, float]:
    """See `TrainModule.evaluate`."""
    made = metrics_of(metrics)
    total = count = 0.0
    for batch in _batches(data, batch_size, None):
        args, named = _parts(batch)
        given, (loss, *outputs) = trainer.inferred(args, named, with_loss=True, average=average)
        size = _size(given)
        total, count = total + float(loss.mean()) * size, count + size
        for m in made:
            m.update(np.asarray(outputs[0]), _target(trainer, given))
    if not count:
        raise InputError("the data gave no batch to evaluate")
    return {"loss": total / count, **{m.name: m.result() for m in made}}


def _epoch(
    trainer: Trainer, batches: Iterable[Any], position: Position, advance: Callable[[float], None]
) -> bool:
    """Take the steps of an epoch, or of the rest of one; whether a callback ends the training."""
    for batch in batches:
        args, inputs = _parts(batch)
        logs: dict[str, float] = {}
        trainer.follow = partial(_taken, trainer, position, [*args, *inputs.values()], logs)
        try:
            trainer.step(*args, **inputs)
            advance(logs["loss"])
        except KeyboardInterrupt:
            if logs:  # the step has happened, and Ctrl-C waited for it: so the callbacks have it too
                _called(trainer, position, "on_step", logs)
            raise
        finally:
            trainer.follow = None
        if _called(trainer, position, "on_step", logs):
            return True
    return False


def _taken(trainer: Trainer, position: Position, arrays: Sequence[Any], logs: dict[str, float], loss: Any) -> None:
    """Count a step whose new state takes its place, and its numbers."""
    logs |= {"loss": float(loss), **{n: float(np.mean(v)) for n, v in trainer.metrics.items()}}
    position.taken(arrays, logs, _size(arrays))


def _called(trainer: Trainer, position: Position, method: str, logs: Mapping[str, float]) -> bool:
    """Call all callbacks for a step or an epoch, then let them save; whether one ends the training."""
    try:
        trainer.position = position
        stops = [_call(c, method, trainer, logs) for c in position.callbacks]
    except BaseException:
        trainer.position = None  # some have had it and some have not
        raise
    for c in position.callbacks:
        if hasattr(c, "on_save"):
            c.on_save(trainer)
    return any(stops)


def _resumed(trainer: Trainer, callbacks: Sequence[Any]) -> Position:
    """The position that the trainer's state was saved at; the callbacks get their states back."""
    found: Position | None = trainer.position
    if found is None:
        raise OptionError(
            "resume=True: the state is not one that `fit` saved; load a file that a callback wrote, such as "
            "Checkpoint('run.safetensors'), and take no step in between"
        )
    found.callbacks, states = callbacks, found.saved()
    own = named(callbacks)
    for name, c in own.items():
        if name in states:
            c.load_state_dict(states[name])
    for name in sorted(own.keys() ^ states.keys()):
        where = "the checkpoint" if name in own else "this fit"
        if name in states or own[name].state_dict():
            log.warning("resume: the callback %s is not in %s; it starts anew or is left out", name, where)
    return found


def _rest(trainer: Trainer, data: Any, size: int | None, position: Position) -> Iterator[Any]:
    """The batches of an epoch that are not taken yet. Raises InputError where the data are not those of the
    checkpoint."""
    batches = _batches(data, size, position.epoch)
    if not position.batch or any(c.positions_data for c in named(position.callbacks).values()):
        return batches
    last: Any = None
    for k in range(position.batch):
        last = next(batches, None)
        if last is None:
            raise InputError(
                f"the checkpoint was written after {position.batch} batches of epoch {position.epoch + 1}, the data "
                f"give {k}: going on takes the same data in the same order"
            )
    args, inputs = _parts(last)
    if digest([*args, *inputs.values()]) != position.mark:
        raise InputError(
            f"batch {position.batch} of epoch {position.epoch + 1} is not the one that the checkpoint was written "
            "after: going on inside an epoch takes the same batches in the same order. Give data whose order follows "
            "from the epoch (a function of its number, whole arrays), or a Callback with positions_data"
        )
    trainer.trace(args, inputs)  # there may be none left, and an update by those before
    return batches


def _batches(data: Any, size: int | None, epoch: int | None) -> Iterator[Any]:
    """The batches of an epoch: those of an iterable, or of whole arrays, shuffled unless `epoch` is None."""
    if callable(data) and not hasattr(data, "__iter__"):
        data = data(epoch or 0) if _takes_epoch(data) else data()
    if size is None:
        if isinstance(data, Mapping) or (isinstance(data, tuple) and data and all(is_array(a) for a in data)):
            raise OptionError("data of whole arrays are cut into batches: give batch_size")
        yield from _iterable(data)
        return
    if not isinstance(size, int) or size < 1:
        raise OptionError(f"batch_size={size!r}: it takes a whole number of at least 1")
    named = isinstance(data, Mapping)
    if not named and not (isinstance(data, tuple) and all(is_array(a) for a in data)):
        yield from _iterable(data)  # batches already; the size is that of whole arrays
        return
    arrays = {k: to_numpy(a) for k, a in (data.items() if named else enumerate(data))}
    lengths = {len(a) for a in arrays.values()}
    if len(lengths) != 1:
        raise InputError(f"the arrays hold different numbers of examples: {', '.join(map(str, sorted(lengths)))}")
    (count,) = lengths
    order = np.arange(count) if epoch is None else np.random.default_rng((0, epoch)).permutation(count)
    for at in range(0, count, size):
        chosen = {k: a[order[at : at + size]] for k, a in arrays.items()}
        yield chosen if named else tuple(chosen.values())


def _iterable(data: Any) -> Iterable[Any]:
    """The data. Raises InputError for what gives no batches."""
    if not isinstance(data, Iterable) and not hasattr(data, "__getitem__"):
        raise InputError(
            f"the data are {type(data).__name__}: it takes batches (dicts or tuples, a DataLoader, a function that "
            "gives them), or whole arrays in a dict or tuple with batch_size"
        )
    found: Iterable[Any] = data
    return found


def _takes_epoch(function: Callable[..., Any]) -> bool:
    """Whether a function needs an argument."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of some that are not written in Python
        return False
    return any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def _parts(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch as the arguments of a step."""
    if isinstance(batch, Mapping):
        return (), {n: _array(a) for n, a in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(_array(a) for a in batch), {}
    return (_array(batch),), {}


def _array(a: Any) -> Any:
    return a if is_array(a) else np.asarray(a)


def _size(arrays: Any) -> int:
    """The number of examples of a batch."""
    values = arrays.values() if isinstance(arrays, Mapping) else arrays
    return next((int(a.shape[0]) for a in values if len(a.shape)), 1)


def _target(trainer: Trainer, batch: Mapping[str, np.ndarray]) -> np.ndarray:
    """The array of a batch that predictions are held against: the loss's own, or one that is called so."""
    labels = trainer.loss_inputs(0, batch)
    for name in (*labels, "labels", "target", "targets", "y"):
        if name in batch:
            return batch[name]
    raise InputError(
        f"metrics need the targets: none of {', '.join(batch)} is the loss's own, or named labels or target"
    )


def _call(callback: Any, method: str, trainer: Trainer, logs: Mapping[str, float]) -> Any:
    if hasattr(callback, method):
        return getattr(callback, method)(trainer, logs)
    if method == "on_epoch" and callable(callback):
        return callback(trainer, logs)
    return None


def _advance(bar: Progress, loss: float) -> None:
    bar.advance(f"loss {loss:.4f}")

"""Batch work on Ray: `map` runs a model over a dataset of Ray Data, in actors that each hold a warm module.

Actors of one machine share the cache of executables on its disk, which lets one of them compile while the others wait
and load; machines share the store that XRT_DISTRIBUTED_CACHE names, if it does. Ray sees to actors that die: it
starts them again, and does what they had not delivered once more.
"""

from __future__ import annotations

import importlib
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from xrt_core import XRTModule
from xrt_core.errors import EngineUnavailableError, InputError, OptionError
from xrt_distributed.jobs import JOB, job_name

Model = str | os.PathLike[str] | bytes | Callable[[], Any]
_READING_CPUS: Final = 1.0  # that Ray needs beside the actors, to read the dataset and to put blocks together
_SHARED: Final = "XRT_"  # variables that actors get from who starts the job


def map(
    dataset: Any,
    model: Model,
    *,
    batch_size: int = 32,
    engine: str | list[str] | None = None,
    workers: int | tuple[int, int] = 1,
    cpus: float = 1.0,
    gpus: float = 0.0,
    columns: Mapping[str, str] | None = None,
    outputs: Mapping[str, str] | None = None,
    **options: Any,
) -> Any:
    """The dataset with a column for each output of the model; lazy, as every dataset of Ray Data is.

    dataset: a `ray.data.Dataset` with a column for each input of the model. model: a path or URL that every node of the
        cluster can read, the bytes of an ONNX file, or a function without arguments that makes what `XRTModule` takes.
    batch_size: rows of a call. The last batch of a block may have fewer, which is a signature of its own; numbers of
        rows that divide into batches compile once.
    workers: how many actors, or the least and the most of them. cpus, gpus: that each takes.
    columns: input -> column, outputs: output -> column, where their names differ; of an `xrt.Graph` or a function,
        whose inputs are known when it is traced, columns= has all inputs.
    engine, options: of `XRTModule`. Variables of the driver that begin with XRT_ hold in the actors too.

    Raises EngineUnavailableError where ray is not installed, InputError where the cluster has no room for the actors
    beside one CPU that reads. Within the job, InputError for columns that the model does not take.
    """
    ray = _ray()
    if batch_size < 1:
        raise OptionError(f"batch_size={batch_size}: it takes a whole number of at least 1")
    least, most = (workers, workers) if isinstance(workers, int) else workers
    if not 1 <= least <= most:
        raise OptionError(f"workers={workers!r}: it takes a number of at least 1, or the least and the most of them")
    if ray.is_initialized():
        _check_room(ray.cluster_resources(), least, cpus, gpus)
    if isinstance(model, bytes):
        given: Any = model
    elif callable(model):
        given = model
    else:
        given = os.fspath(model)
        if "://" not in given and not pathlib.Path(given).is_file():
            raise InputError(f"there is no file {given}")
    settings = {"columns": dict(columns or {}), "outputs": dict(outputs or {})}
    variables = {JOB: job_name()} | {n: v for n, v in os.environ.items() if n.startswith(_SHARED)}
    return dataset.map_batches(
        Worker,
        fn_constructor_args=(given, settings, {"engine": engine, **options}),
        batch_size=batch_size,
        batch_format="numpy",
        compute=ray.data.ActorPoolStrategy(min_size=least, max_size=most),
        num_cpus=cpus,
        num_gpus=gpus or None,
        runtime_env={"env_vars": variables},
    )


class Worker:
    """A warm module in an actor: called with batches, columns by name."""

    def __init__(self, model: Any, settings: Mapping[str, Mapping[str, str]], options: Mapping[str, Any]) -> None:
        self._module = XRTModule(model() if callable(model) else model, **options)
        self._columns, self._outputs = settings["columns"], settings["outputs"]
        self._warm: set[tuple[tuple[str, str, tuple[int, ...]], ...]] = set()

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The batch with the model's outputs as further columns."""
        inputs = self._inputs(batch)
        signature = tuple((n, str(a.dtype), a.shape) for n, a in inputs.items())
        if signature not in self._warm:  # what a job computes for hours is compiled before, not beside it
            self._module.prepare(inputs)
            self._module.wait()
            self._warm.add(signature)
        rows = len(next(iter(batch.values())))
        found = dict(batch)
        for name, value in self._module.run(inputs).items():
            column, array = self._outputs.get(name, name), np.asarray(value)
            if column in batch:
                known = f"the model's output {name!r} is a column of the dataset too"
                raise InputError(f"{known}: outputs={{{name!r}: ...}} names another")
            if not array.shape or array.shape[0] != rows:
                raise InputError(
                    f"the model's output {name!r} has shape {list(array.shape)} for a batch of {rows} rows; a column "
                    "has a value for each row"
                )
            found[column] = array
        return found

    def _inputs(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        optional = set(self._module.optional_inputs)
        found = {}
        # a graph that is traced has no names before its first call
        names = dict.fromkeys(self._columns) if self._columns else dict.fromkeys(self._module.input_types)
        if not names:
            raise InputError("columns= names the inputs of a graph that is traced, such as columns={'x': 'x'}")
        for name in names | dict.fromkeys(self._module.input_types):
            column = self._columns.get(name, name)
            if column not in batch:
                if name in optional:
                    continue
                raise InputError(
                    f"the dataset has no column {column!r} for the model's input {name!r}; it has "
                    f"{', '.join(batch)}: columns={{{name!r}: ...}} names another"
                )
            array = np.asarray(batch[column])
            if array.dtype == object and array.size and isinstance(array.flat[0], np.ndarray):
                shapes = sorted({str(list(a.shape)) for a in array})
                raise InputError(f"column {column!r} has arrays of different shapes: {', '.join(shapes[:4])}")
            found[name] = array
        return found


def _ray() -> Any:
    try:
        ray = importlib.import_module("ray")
        importlib.import_module("ray.data")
    except ImportError as e:
        raise EngineUnavailableError(f"ray cannot be imported: {e}; pip install xrt-distributed[ray]") from e
    return ray


def _check_room(resources: Mapping[str, float], workers: int, cpus: float, gpus: float) -> None:
    """Raise InputError where Ray would wait for ever for a place for the actors, or for the tasks that feed them."""
    have, needed = resources.get("CPU", 0.0), workers * cpus + _READING_CPUS
    if needed > have:
        raise InputError(
            f"{workers} workers of {cpus:g} CPUs, and {_READING_CPUS:g} that reads, need {needed:g} CPUs, "
            f"and the cluster of Ray has {have:g}; take fewer workers, or a smaller cpus="
        )
    if workers * gpus > resources.get("GPU", 0.0):
        raise InputError(
            f"{workers} workers of {gpus:g} GPUs need {workers * gpus:g}, and the cluster of Ray has "
            f"{resources.get('GPU', 0.0):g}"
        )

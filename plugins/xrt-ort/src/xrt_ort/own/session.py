"""InferenceSession without the library: a model of XRT behind the library's methods."""

from __future__ import annotations

import json
import os
import pathlib
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from xrt_core.errors import GraphError, InputError, ModelLoadError, XRTError, describe
from xrt_ort.own import arguments, kinds
from xrt_ort.own.kinds import (
    ModelMetadata,
    NodeArg,
    OrtAllocatorType,
    OrtMemoryInfo,
    RunOptions,
    SessionOptions,
    error,
)
from xrt_ort.own.values import IOBinding, OrtValue
from xrt_ort.report import SessionReport
from xrt_ort.settings import PROVIDER, log, module_options, split_providers

_known: weakref.WeakSet[InferenceSession] = weakref.WeakSet()
_PROVIDERS = ["CPUExecutionProvider"]
_MEMORY = OrtMemoryInfo("Cpu", OrtAllocatorType.ORT_ARENA_ALLOCATOR)


class _GlobalThreads:
    """Whether sessions share threads of the process."""

    shared = False


global_threads = _GlobalThreads()


class InferenceSession:
    """A model that runs on XRT: its host answers first, engines when they are verified.

    Arguments, methods and exceptions are those of onnxruntime.
    """

    def __init__(
        self,
        path_or_bytes: Any,
        sess_options: SessionOptions | None = None,
        providers: Sequence[Any] | None = None,
        provider_options: Sequence[Mapping[Any, Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        from onnx import load, load_model_from_string

        self._identity = object()  # of which values and bindings are
        if isinstance(path_or_bytes, str | os.PathLike):
            self._model_path: str | None = os.fspath(path_or_bytes)
            if not os.path.exists(self._model_path):
                raise error(
                    kinds.NoSuchFile,
                    f"Load model from {self._model_path} failed:Load model {self._model_path} failed. "
                    "File doesn't exist",
                )
        elif isinstance(path_or_bytes, bytes):
            self._model_path = None
            if not path_or_bytes:
                raise error(kinds.InvalidArgument, "No graph was found in the protobuf.")
        else:
            raise TypeError(f"Unable to load from type '{type(path_or_bytes)}'")
        if not isinstance(sess_options, SessionOptions | None):
            raise TypeError(f"sess_options takes SessionOptions, not {type(sess_options).__name__}")
        self._sess_options = sess_options or SessionOptions()
        self._choose_providers(providers or self._sess_options._providers or None, provider_options)
        if global_threads.shared and self._sess_options.use_per_session_threads:
            raise RuntimeError(
                "the process has global threads (set_global_thread_pool_sizes): set use_per_session_threads to False"
            )
        try:
            if self._model_path is None:
                proto = load_model_from_string(path_or_bytes)
            else:
                proto = load(self._model_path, load_external_data=False)
        except Exception as e:
            where = f"{self._model_path} failed:" if self._model_path else ""
            raise error(
                kinds.InvalidProtobuf, f"Failed to load model {where}because protobuf parsing failed: {describe(e)}"
            ) from e
        self._sess_options = arguments.options_of_model(proto) or self._sess_options
        arguments.with_sizes(proto, self._sess_options._sizes)
        self._make(proto, path_or_bytes)
        graph = proto.graph
        weights = {t.name for t in graph.initializer} | {t.values.name for t in graph.sparse_initializer}
        self._inputs_meta = [kinds.node_arg(v) for v in graph.input if v.name not in weights]
        self._overridable = [kinds.node_arg(v) for v in graph.input if v.name in weights]
        self._outputs_meta = [kinds.node_arg(v) for v in graph.output]
        self._types = {a.name: a for a in (*self._inputs_meta, *self._overridable)}
        self._outputs = [a.name for a in self._outputs_meta]
        self._model_meta = ModelMetadata(
            proto.producer_name, graph.name, proto.domain, proto.doc_string, graph.doc_string, proto.model_version,
            {p.key: p.value for p in proto.metadata_props},
        )  # fmt: skip
        self._profile: list[dict[str, Any]] | None = [] if self._sess_options.enable_profiling else None
        self._nodes = [kinds.OrtEpAssignedNode(n.name, n.domain, n.op_type) for n in graph.node]
        self._started = time.monotonic_ns()
        self._calls = 0
        if self._sess_options.optimized_model_filepath:
            self._write_optimised(proto)
        log.debug("%s: XRT answers", self._model_path or graph.name)
        _known.add(self)

    def _make(self, proto: Any, model: Any) -> None:
        from xrt_core import XRTModule

        options = self._sess_options
        given, files = options._initializers, options._files
        if given or files or options._sizes:
            from onnx import numpy_helper
            from onnx.external_data_helper import load_external_data_for_model

            for tensor in proto.graph.initializer:
                if tensor.name in given:
                    tensor.CopyFrom(numpy_helper.from_array(given[tensor.name].numpy(), tensor.name))
                elif tensor.data_location == tensor.EXTERNAL:
                    arguments.read_from(files, tensor)
            if self._model_path:
                load_external_data_for_model(proto, os.path.dirname(self._model_path))
            model = proto
        made = {"strict": True, **module_options(options, self._own_options)}
        try:
            self._module = XRTModule(model, **made)
        except ModelLoadError as e:
            raise error(kinds.InvalidGraph, f"This is an invalid model. {e}") from e
        except (GraphError, InputError) as e:
            raise error(kinds.InvalidGraph, f"This is an invalid model. {e}") from e
        except XRTError as e:
            raise error(kinds.Fail, str(e)) from e

    def _write_optimised(self, proto: Any) -> None:
        """Write the model with the passes that hold for all sizes, as `optimized_model_filepath` says."""
        import onnx

        from xrt_core import export_model

        options, graph = self._sess_options, self._module.graph
        path, name = options.optimized_model_filepath, "session.optimized_model_external_initializers"
        beside = options._entries.get(f"{name}_file_name")
        made = export_model(graph)
        for field in ("producer_name", "domain", "doc_string", "model_version"):
            setattr(made, field, getattr(proto, field))
        made.metadata_props.extend(p for p in proto.metadata_props if p not in made.metadata_props)
        if beside is None:
            onnx.save(made, path)
            return
        pathlib.Path(path).with_name(beside).unlink(missing_ok=True)  # onnx would append to it
        least = int(options._entries.get(f"{name}_min_size_in_bytes", 1024))
        onnx.save(made, path, save_as_external_data=True, location=beside, size_threshold=least)

    # --- what the session tells -----------------------------------------------------------------------------------

    def get_inputs(self) -> list[NodeArg]:
        """The inputs that have to be given."""
        return list(self._inputs_meta)

    def get_outputs(self) -> list[NodeArg]:
        """The results."""
        return list(self._outputs_meta)

    def get_overridable_initializers(self) -> list[NodeArg]:
        """The inputs that have a default."""
        return list(self._overridable)

    def get_modelmeta(self) -> ModelMetadata:
        """What the model says about itself."""
        return self._model_meta

    def get_session_options(self) -> SessionOptions:
        """The options that the session was made with."""
        return self._sess_options

    def get_providers(self) -> list[str]:
        """The providers, XRT's own first where the program named it."""
        return [PROVIDER, *_PROVIDERS] if self._named else list(_PROVIDERS)

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        """The options of the providers."""
        return {name: {} for name in self.get_providers()}

    def set_providers(self, providers: Any = None, provider_options: Any = None) -> None:
        """Take other providers; the CPU's is the only one there is beside XRT's. Values of the session end.

        Raises RuntimeError for a provider that is not there.
        """
        self._choose_providers(providers, provider_options)
        unknown = [n for n in self._chosen if n not in (PROVIDER, *_PROVIDERS)]
        if unknown:
            raise RuntimeError(f"Unknown Provider Type: {unknown[0]}")
        self._identity = object()

    def _choose_providers(self, providers: Any, provider_options: Any) -> None:
        there = [PROVIDER, *_PROVIDERS]
        self._chosen, _ = arguments.check_and_normalize_provider_args(providers, provider_options, there)
        _, _, self._own_options = split_providers(providers, provider_options)
        self._named = self._own_options is not None

    def get_input_memory_infos(self) -> list[OrtMemoryInfo]:
        """Where each input is to be."""
        return [_MEMORY] * len(self._inputs_meta)

    def get_output_memory_infos(self) -> list[OrtMemoryInfo]:
        """Where each result is."""
        return [_MEMORY] * len(self._outputs_meta)

    def get_input_epdevices(self) -> list[None]:
        """The provider's device of each input: none that has a description."""
        return [None] * len(self._inputs_meta)

    def get_provider_graph_assignment_info(self) -> list[kinds.OrtEpAssignedSubgraph]:
        """The nodes of the model, each assigned to the CPU's provider.

        Raises Fail unless the options have session.record_ep_graph_assignment_info.
        """
        entry = "session.record_ep_graph_assignment_info"
        if self._sess_options._entries.get(entry) != "1":
            raise error(
                kinds.Fail,
                f"Session configuration entry '{entry}' must be set to \"1\" to retrieve EP graph assignment "
                "information.",
            )
        return [kinds.OrtEpAssignedSubgraph(_PROVIDERS[0], (n,)) for n in self._nodes]

    def get_tuning_results(self) -> list[dict[str, Any]]:
        """What providers tuned: nothing, XRT's own cache has what it measured."""
        return []

    def set_tuning_results(self, results: Sequence[Mapping[str, Any]], *, error_on_invalid: bool = False) -> None:
        """Refuse results: no provider takes any. Raises RuntimeError for them with error_on_invalid."""
        for result in results:
            message = f"Cannot find execution provider {result['ep']}"
            if error_on_invalid:
                raise RuntimeError(message)
            log.warning("%s", message)

    def create_ortvalue_from_shape_and_type(
        self, shape: Sequence[int], element_type: Any, device_type: str = "cpu", device_id: int = 0, vendor_id: int = -1
    ) -> OrtValue:
        """Return a value of zeros for this session alone, until its providers are changed."""
        made = OrtValue.ortvalue_from_shape_and_type(shape, element_type, device_type, device_id, vendor_id)
        made._session = self._identity
        return made  # type: ignore[no-any-return]

    def enable_fallback(self) -> None:
        """Accepted: XRT's host answers wherever engines fail."""

    def disable_fallback(self) -> None:
        """Accepted: XRT's host answers wherever engines fail."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"cannot pickle {type(self).__name__!r} object")

    # --- runs -----------------------------------------------------------------------------------------------------

    def run(self, output_names: Any, input_feed: Any, run_options: RunOptions | None = None) -> list[Any]:
        """Return the results of these names, all for None, as NumPy arrays, lists and maps.

        Raises ValueError for a missing feed, and the library's exceptions for other faults of feeds and of the run.
        """
        given = list(input_feed.keys())
        missing = [a.name for a in self._inputs_meta if a.name not in given and not a.type.startswith("optional")]
        if missing:
            raise ValueError(f"Required inputs ({missing}) are missing from input feed ({given}).")
        if isinstance(output_names, str) or not isinstance(run_options, RunOptions | None):
            raise TypeError("run() takes a list of names of results, a dict of feeds, and RunOptions")
        select = [self._output_index(n) for n in output_names] if output_names else None
        feeds = {}
        for name, value in input_feed.items():
            self._check_name(name)
            feeds[name] = self._checked(self._types[name], value)
        if run_options is not None and run_options.terminate:
            raise error(kinds.Fail, "Exiting due to terminate flag being set to true.")
        try:
            if self._profile is None:
                results = list(self._module.run(feeds).values())
            else:
                results = self._profiled(feeds)
        except InputError as e:
            raise error(kinds.InvalidArgument, str(e)) from e
        except XRTError as e:
            raise error(kinds.Fail, f"Non-zero status code returned while running: {e}") from e
        self._calls += 1
        plain = [self._own(r, feeds) for r in results]
        return plain if select is None else [plain[i] for i in select]

    def run_async(
        self, output_names: Any, input_feed: Any, callback: Callable[..., Any], user_data: Any, run_options: Any = None
    ) -> None:
        """Run in a thread of its own, and call `callback(results, user_data, error)` there."""

        def work() -> None:
            try:
                results, message = self.run(output_names, input_feed, run_options), ""
            except Exception as e:
                results, message = [], str(e)
            callback(results, user_data, message)

        threading.Thread(target=work, name="xrt-ort-async", daemon=True).start()

    def run_with_ort_values(
        self, output_names: Any, input_dict_ort_values: Any, run_options: Any = None
    ) -> list[OrtValue]:
        """Return the results as OrtValues."""
        if isinstance(output_names, str):
            raise TypeError("run_with_ort_values() takes a list of names of results")
        for value in input_dict_ort_values.values():
            value.check_session(self._identity, "used with")
        feeds = {n: v._value for n, v in input_dict_ort_values.items()}
        names = list(output_names or self._outputs)
        results = self.run(names, feeds, run_options)
        kinds_of = {a.name: a.type for a in self._outputs_meta}
        return [OrtValue(r, kind=kinds_of[n]) for n, r in zip(names, results, strict=True)]

    def io_binding(self) -> IOBinding:
        """Return a binding of inputs and results for this session."""
        return IOBinding(self)

    def run_with_iobinding(self, iobinding: IOBinding, run_options: Any = None) -> None:
        """Run on what is bound. Raises ValueError for a binding of another session."""
        if iobinding._made_for is not self._identity:
            raise ValueError("IOBinding must be used with the session that created it.")
        iobinding.run(run_options)

    # --- profiles -------------------------------------------------------------------------------------------------

    def _profiled(self, feeds: dict[str, Any]) -> list[Any]:
        begin = (time.monotonic_ns() - self._started) / 1e3
        results, timeline = self._module.run_timed(feeds)
        functions = [n.attributes.get("function") for n in self._module.partitioned(feeds).nodes]
        nodes = {f.name: [n.name or n.op_type for n in f.body.nodes] for f in functions if f is not None}
        assert self._profile is not None
        for row in timeline.to_json()["traceEvents"]:
            if row["ph"] == "X":
                inside = nodes.get(row["name"].partition(" on ")[0])
                args = {**row["args"], **({} if inside is None else {"nodes": inside})}
                self._profile.append({**row, "cat": "Node", "pid": os.getpid(), "ts": begin + row["ts"], "args": args})
        return list(results.values())

    def end_profiling(self) -> str:
        """Write the profile, a Chrome trace with a row for each node or cluster of each run; return the file's path, ""
        where the session is not profiled."""
        if self._profile is None:
            return ""
        stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
        path = pathlib.Path(f"{self._sess_options.profile_file_prefix}_{stamp}.json")
        rows = ",\n".join(json.dumps(row) for row in self._profile)  # which programs read line by line
        path.write_text(f"[\n{rows}\n]\n", encoding="utf-8")
        self._profile = None
        return str(path)

    def get_profiling_start_time_ns(self) -> int:
        """When the profile began, as `time.monotonic_ns` tells it."""
        return self._started

    # --- feeds and results ----------------------------------------------------------------------------------------

    def _check_name(self, name: str) -> None:
        if name not in self._types:
            raise error(kinds.InvalidArgument, f"Invalid input name: {name}")

    def _output_index(self, name: str) -> int:
        if not isinstance(name, str):
            raise TypeError(f"run() takes a list of names of results; {name!r} is no text")
        if name not in self._outputs:
            raise error(kinds.InvalidArgument, f"Invalid output name:{name}")
        return self._outputs.index(name)

    def _checked(self, wanted: NodeArg, value: Any) -> Any:
        """The value of a feed as XRT takes it. Raises the library's exceptions."""
        if isinstance(value, OrtValue):
            value.check_session(self._identity, "used with")
            value = value._value
        if not wanted.type.startswith(("tensor(", "optional(tensor(")):
            return _collection_of(wanted.type.removeprefix("optional("), wanted, value)
        if value is None:
            if wanted.type.startswith("optional("):
                return None
            raise error(kinds.Fail, f"input {wanted.name} is None")
        kind = wanted.type.removeprefix("optional(").removeprefix("tensor(").rstrip(")")
        if not isinstance(value, np.ndarray):
            if not isinstance(value, list):
                raise RuntimeError(f"Unable to handle object of type {type(value)} for input {wanted.name!r}")
            value = _array_of(value, kind)
        if value.dtype.kind in "cMm":
            raise RuntimeError(f"input {wanted.name!r}: {value.dtype} can't be converted to a type of ONNX Runtime")
        if value.dtype.kind in "OUS" or value.dtype.type is np.void:  # the kind of bfloat16 is V as well
            value = _texts(value)
        if not value.dtype.isnative:
            value = value.astype(value.dtype.newbyteorder("="))
        actual = kinds.NAMES.get(kinds.element_type(value.dtype), str(value.dtype))
        if actual != kind:
            raise error(
                kinds.InvalidArgument,
                f"Unexpected input data type. Actual: (tensor({actual})) , expected: (tensor({kind}))",
            )
        shape = wanted.shape
        if shape and value.ndim != len(shape):
            raise error(
                kinds.InvalidArgument,
                f"Invalid rank for input: {wanted.name} Got: {value.ndim} Expected: {len(shape)} Please fix either the "
                "inputs/outputs or the model.",
            )
        wrong = [
            f" index: {i} Got: {n} Expected: {d}"
            for i, (n, d) in enumerate(zip(value.shape, shape, strict=False))
            if isinstance(d, int) and n != d
        ]
        if wrong:
            lines = "\n".join(wrong)
            raise error(
                kinds.InvalidArgument,
                f"Got invalid dimensions for input: {wanted.name} for the following indices\n{lines}\n Please "
                "fix either the inputs/outputs or the model.",
            )
        return value

    @staticmethod
    def _own(result: Any, feeds: Mapping[str, Any]) -> Any:
        """A result that is the caller's own: no part of a feed, and writable."""
        if not isinstance(result, np.ndarray):
            return result
        shared = any(isinstance(a, np.ndarray) and np.may_share_memory(a, result) for a in feeds.values())
        return result.copy() if shared or not result.flags.writeable else result


def _array_of(value: Any, kind: str) -> np.ndarray:
    from onnx import helper

    number = next((n for n, name in kinds.NAMES.items() if name == kind), 1)
    try:
        return np.array(value, object if kind == "string" else helper.tensor_dtype_to_np_dtype(number))
    except (TypeError, ValueError) as e:
        raise RuntimeError("Could not create tensor from given input list") from e


def _texts(array: np.ndarray) -> np.ndarray:
    """Text of any kind as objects: bytes are UTF-8, those of np.void keep their zeros, and objects give their text.

    Raises UnicodeDecodeError for other bytes.
    """
    if array.dtype.kind == "U":
        return array.astype(object)
    made = np.empty(array.shape, object)
    made.flat = [str(x) if array.dtype.kind == "O" else bytes(x).decode() for x in array.flat]
    return made


def _collection_of(kind: str, wanted: NodeArg, value: Any) -> Any:
    """The value of a feed that is to be a list of arrays, or a map. kind: which. Raises the library's exceptions."""
    if value is None:
        if wanted.type.startswith("optional("):
            return None
        raise error(kinds.Fail, f"input {wanted.name} is None, a {kind} is expected")
    if isinstance(value, np.ndarray):
        raise error(kinds.InvalidArgument, f"input with name: '{wanted.name}': a {kind} is expected, not a tensor")
    if kind.startswith("seq(tensor("):
        if not isinstance(value, list):
            raise RuntimeError(f"input {wanted.name!r} takes a list of arrays, not a {type(value).__name__}")
        for i, item in enumerate(value):
            if not isinstance(item, np.ndarray):
                raise RuntimeError(f"input {wanted.name!r}: Input is not a tensor, but a {type(item).__name__} at {i}")
            found = kinds.NAMES.get(kinds.element_type(item.dtype))
            if not kind.startswith(f"seq(tensor({found})"):
                raise RuntimeError(f"input {wanted.name!r}: a tensor({found}) at {i} in a {kind}")
    elif kind.startswith("map("):
        if not isinstance(value, Mapping):
            raise RuntimeError(f"input {wanted.name!r} takes a dict, not a {type(value).__name__}")
        if not value:
            raise RuntimeError(f"Size of dictionary is empty, unable to run the prediction: input {wanted.name!r}.")
        of_key: Any = str if kind.startswith("map(string") else (int, np.integer)
        of_value: Any = str if kind.endswith("tensor(string))") else (int, float, np.number)
        for key, item in value.items():
            if not isinstance(key, of_key):
                raise RuntimeError(f"Unexpected key type  {type(key)} of input {wanted.name!r}, a {kind}")
            if not isinstance(item, of_value):
                raise RuntimeError(f"Unexpected value type  {type(item)} of input {wanted.name!r}, a {kind}")
    return value


def wait(timeout: float | None = None) -> bool:
    """Block until every compilation that sessions began is decided. Returns False after `timeout` seconds."""
    deadline = None if timeout is None else time.monotonic() + timeout
    for session in list(_known):
        left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        if not session._module.wait(left):
            return False
    return True


def known() -> list[SessionReport]:
    """A row for each session that is alive."""
    rows = []
    for s in list(_known):
        report = s._module.report()
        engines = {c["chosen"]: None for c in report.clusters if c["state"] == "live"}
        state = f"{', '.join(engines)} answer" if engines else "XRT's host answers"
        name = pathlib.PurePath(s._model_path or "model").name
        rows.append(SessionReport(name, s._calls, s._calls if engines else 0, tuple(engines), 0.0, state))
    return sorted(rows, key=lambda r: r.model)

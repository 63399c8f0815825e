"""The only importer of ONNX Runtime: sessions and their options, values over NumPy memory, versions.

From 1.29 on, its builds for Linux send what they do to Microsoft, and write a database and an identifier into
the user's cache folder when they are imported. Here that is off, unless ORT_DISABLE_TELEMETRY says something else.
"""

from __future__ import annotations

import functools
import os
import pathlib
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from xrt_core.engine.forking import let_forks_end
from xrt_core.engine.onnx_bridge import in_place
from xrt_core.engine.serialization import instruction_set
from xrt_core.ir.onnx_proto import dtype_to_onnx

_TELEMETRY: Final = "ORT_DISABLE_TELEMETRY"
if _TELEMETRY in os.environ:
    import onnxruntime as ort  # type: ignore[import-untyped]
else:
    os.environ[_TELEMETRY] = "1"  # which the library reads when it is imported, and before anything can be called
    try:
        import onnxruntime as ort
    finally:
        del os.environ[_TELEMETRY]
    ort.disable_telemetry_events()

let_forks_end()

LEVELS: Final[Mapping[str, Any]] = {
    "disable": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}
CONSTANTS: Final = "constants.bin"
"""Where optimised models say that their large constants are."""

_SOURCE: Final = re.compile(r"/\S+\.(?:cc|h):\d+ .*?\) ?(?:const )?")  # "/path/file.cc:12 function signature "
_PROVIDER: Final = "CPUExecutionProvider"
_FATAL_ONLY: Final = 4
_UNREGISTERED: Final = "is not a registered function/op"
_NEEDED: Final = ("add_external_initializers", "add_external_initializers_from_files_in_memory")
_NATIVE: Final = frozenset("?bBhHiIlLqQefd")  # NumPy types that the binding takes and gives by itself


GPU_PROVIDERS: Final[Mapping[str, str]] = {"cuda": "CUDAExecutionProvider", "tensorrt": "TensorrtExecutionProvider"}
"""The option `provider` -> the library's name."""


def gpu_providers() -> tuple[str, ...]:
    """The values of the option `provider` that this build of the library has."""
    there = ort.get_available_providers()
    return tuple(name for name, provider in GPU_PROVIDERS.items() if provider in there)


def version() -> str:
    """Version of ONNX Runtime."""
    return str(ort.__version__)


def why_unusable() -> str:
    """What this build of ONNX Runtime lacks, or ""."""
    if _PROVIDER not in ort.get_available_providers():
        return f"this build of ONNX Runtime {version()} has no {_PROVIDER}"
    missing = [n for n in _NEEDED if not hasattr(ort.SessionOptions, n)]
    return f"ONNX Runtime {version()} is too old: it has no SessionOptions.{missing[0]}" if missing else ""


@functools.cache
def fingerprint() -> str:
    """What an optimised model depends on: the library's version and the processor's instruction set."""
    return f"onnxruntime {version()} {instruction_set()}"


@functools.cache
def newest_opset() -> int:
    """The newest opset of the ONNX domain that the library takes as released."""
    return _newest((("Identity", ["x"], ["y"]),))


@functools.cache
def settled_opset() -> int:
    """The newest opset that it has kernels for: 1.32 takes opset 28, and computes quantisation up to the one before."""
    return _newest((("QuantizeLinear", ["x", "x"], ["q"]), ("DequantizeLinear", ["q", "x"], ["y"])))


def _newest(rows: Sequence[tuple[str, list[str], list[str]]]) -> int:
    """The newest opset in which the library takes these nodes."""
    from onnx import TensorProto, helper
    from onnx.defs import onnx_opset_version

    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, []) for n in "xy")
    graph = helper.make_graph([helper.make_node(*row) for row in rows], "opset", [x], [y])
    for opset in range(onnx_opset_version(), 7, -1):
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
        if refusal(model.SerializeToString()) is None:
            return opset
    return 7


class NodeSession:
    """A session of a model of one node, with a custom-operator library.

    inputs: names. output_types: as ONNX writes them, "tensor(float)".
    """

    def __init__(self, model: bytes, library: str) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = _FATAL_ONLY
        options.register_custom_ops_library(library)
        self._session = ort.InferenceSession(model, options, providers=[_PROVIDER])
        self.inputs = [i.name for i in self._session.get_inputs()]
        self.output_types = [o.type for o in self._session.get_outputs()]

    def run(self, feeds: Mapping[str, Any]) -> list[Any]:
        """The results, NumPy arrays."""
        return list(self._session.run(None, dict(feeds)))


def has_operator(library: str, model: bytes) -> bool:
    """Whether the operator of a model of one node is of a custom-operator library, and none of ONNX Runtime's own."""
    said = refusal(model)
    if said is None or _UNREGISTERED not in said:
        return False
    try:
        NodeSession(model, library)
    except Exception as e:  # where it knows the operator, the node's types may be other ones than it takes
        return _UNREGISTERED not in str(e)
    return True


def why_no_library(path: str) -> str:
    """Why a custom-operator library cannot be loaded, or ""."""
    try:
        ort.SessionOptions().register_custom_ops_library(path)
    except Exception as e:  # the binding's exceptions have no common base
        return first_line(e)
    return ""


def refusal(model: bytes) -> str | None:
    """The first line of what the library says when it refuses `model`; None where it makes a session of it."""
    options = ort.SessionOptions()
    options.log_severity_level = _FATAL_ONLY
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    try:
        ort.InferenceSession(model, options, providers=[_PROVIDER])
    except Exception as e:  # the binding's exceptions have no common base
        return first_line(e)
    return None


def first_line(error: BaseException) -> str:
    """The first line of an error of the library, without its code and place in the library's source."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    line = line.split(" : ", 3)[-1] if line.startswith("[ONNXRuntimeError]") else line
    return _SOURCE.sub("", line)


def session_options(
    *,
    threads: int | None,
    inter_op_threads: int | None,
    parallel: bool,
    level: str,
    memory_arena: bool,
    entries: Mapping[str, str],
) -> Any:
    """SessionOptions; `entries` are the library's own configuration entries by name."""
    options = ort.SessionOptions()
    options.log_severity_level = _FATAL_ONLY
    options.graph_optimization_level = LEVELS[level]
    options.enable_cpu_mem_arena = memory_arena
    if threads is not None:
        options.intra_op_num_threads = threads
    if inter_op_threads is not None:
        options.inter_op_num_threads = inter_op_threads
    if parallel:
        options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    return options


def value_over(array: np.ndarray) -> Any:
    """An OrtValue over the memory of a contiguous array, which must outlive it."""
    if array.dtype.char in _NATIVE:
        return ort.OrtValue.ortvalue_from_numpy(array)
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, dtype_to_onnx(array.dtype))


def is_native(dtype: np.dtype) -> bool:
    """Whether a session takes and gives NumPy arrays of this dtype by itself."""
    return dtype.char in _NATIVE


def make_session(
    model: bytes, options: Any, weights: Mapping[str, np.ndarray], providers: Sequence[Any] = (_PROVIDER,)
) -> Any:
    """A session of `model` whose external constants are `weights`, read in place: they must outlive the session.

    providers: of the library, the first of which must take part. Raises RuntimeError where it does not: the library
    leaves one out whose own libraries do not load, and says so in its log alone.
    """
    if weights:
        options.add_external_initializers(list(weights), [value_over(w) for w in weights.values()])
    if providers[0] != _PROVIDER and hasattr(ort, "preload_dlls"):
        ort.preload_dlls()  # CUDA's libraries, from NVIDIA's wheels
    session = ort.InferenceSession(model, options, providers=list(providers))
    wanted = providers[0] if isinstance(providers[0], str) else providers[0][0]
    if wanted not in session.get_providers():
        raise RuntimeError(f"{wanted} does not start: check CUDA and cuDNN (`xrt doctor`), and the library's log")
    return session


def runner_of(session: Any) -> Callable[[Sequence[str], Mapping[str, Any], Any], Sequence[Any]]:
    """`session.run` for complete inputs: (names of outputs, inputs by name, run options) -> results.

    Of a session on the CPU that is what the library's method calls once it has looked at each name and value in Python,
    which takes 1 us of a call and 0.2 for each input. Its other errand, another provider where one fails, is the GPU's.
    """
    inner = getattr(session, "_sess", None)
    on_cpu = session.get_providers() == [_PROVIDER]
    return inner.run if on_cpu and callable(getattr(inner, "run", None)) else session.run  # type: ignore[no-any-return]


def read_files_in(options: Any, folder: str) -> None:
    """Let a session of a model in memory read constants from files in `folder`, as their `external_data` says."""
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)


def providers_for(provider: str, index: int, *, tf32: bool, entries: Mapping[str, str]) -> list[Any]:
    """What a session on a GPU is made with: the provider of this option, and those that take what it leaves.

    tf32: whether products of float32 may be in TF32. entries: provider options of the library, by name.
    """
    cuda = {"device_id": str(index), "use_tf32": str(int(tf32))}
    if provider == "cuda":
        return [(GPU_PROVIDERS["cuda"], {**cuda, **entries}), _PROVIDER]
    rest = [(GPU_PROVIDERS["cuda"], cuda)] if "cuda" in gpu_providers() else []
    return [(GPU_PROVIDERS["tensorrt"], {"device_id": str(index), **entries}), *rest, _PROVIDER]


def optimised(model: bytes, options: Any, weights: Mapping[str, np.ndarray]) -> tuple[bytes, bytes]:
    """The model as the library optimises it under `options`, and the file of its large constants."""
    with tempfile.TemporaryDirectory(prefix="xrt-onnxruntime-") as folder:
        options.optimized_model_filepath = str(pathlib.Path(folder, "model.onnx"))
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", CONSTANTS)
        options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
        make_session(model, options, {name: in_place(w) for name, w in weights.items()})
        constants = pathlib.Path(folder, CONSTANTS)
        return pathlib.Path(folder, "model.onnx").read_bytes(), constants.read_bytes() if constants.exists() else b""


def load_optimised(model: bytes, constants: bytes, options: Any) -> Any:
    """The session of what `optimised` gave."""
    if constants:
        options.add_external_initializers_from_files_in_memory([CONSTANTS], [constants], [len(constants)])
    return ort.InferenceSession(model, options, providers=[_PROVIDER])


def run_on_device(
    session: Any, inputs: Sequence[tuple[str, Any]], outputs: Sequence[tuple[str, Any]], index: int
) -> None:
    """Run on contiguous arrays, NumPy's or in the memory of GPU `index`, that are there; outputs are all there."""
    binding = session.io_binding()
    for name, x in inputs:
        if isinstance(x, np.ndarray):
            binding.bind_ortvalue_input(name, value_over(x))
        else:
            binding.bind_input(name, "cuda", index, dtype_to_onnx(x.dtype), list(x.shape), _pointer(x))
    for name, x in outputs:
        binding.bind_output(name, "cuda", index, dtype_to_onnx(x.dtype), list(x.shape), _pointer(x))
    session.run_with_iobinding(binding)


def _pointer(x: Any) -> int:
    return int(x.__cuda_array_interface__["data"][0])


def run_bound(
    session: Any, inputs: Sequence[tuple[str, np.ndarray]], outputs: Sequence[tuple[str, np.ndarray]]
) -> None:
    """Run on values over NumPy memory, results included: for dtypes that are not NumPy's own."""
    binding = session.io_binding()
    for name, array in inputs:
        binding.bind_ortvalue_input(name, value_over(array))
    for name, array in outputs:
        binding.bind_ortvalue_output(name, value_over(array))
    session.run_with_iobinding(binding)

"""The only importer of TensorRT: finds TensorRT or TensorRT-RTX, and holds every difference between the two."""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import os
import pathlib
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from xrt_core.engine.onnx_model import OnnxModel
from xrt_core.errors import CompileError, EngineUnavailableError, ExecutionError
from xrt_tensorrt.messages import Messages, in_words, make_logger

if TYPE_CHECKING:
    from xrt_tensorrt.kernels_cache import KernelsCache
    from xrt_tensorrt.settings import Settings


RTX: Final = "TensorRT-RTX"
FULL: Final = "TensorRT"
CHOICE: Final = "XRT_TENSORRT"
"""Environment variable that names the flavour to use where both are installed: "tensorrt" or "tensorrt_rtx"."""

_INSTALL: Final[Mapping[str, str]] = {
    RTX: "pip install tensorrt-rtx-cu13-bindings==1.7.1.116 onnxruntime-ep-nv-tensorrt-rtx-cu13==0.5.0",
    FULL: "pip install 'xrt-tensorrt[cu13]' (or [cu12])",
}
_BINDINGS: Final[Mapping[str, tuple[str, ...]]] = {
    RTX: ("tensorrt_rtx_bindings", "tensorrt_rtx"),
    FULL: ("tensorrt",),
}
_LIBRARIES: Final[Mapping[str, tuple[str, ...]]] = {  # in the order in which they need each other
    RTX: ("libtensorrt_rtx.so", "libtensorrt_onnxparser_rtx.so"),
    FULL: ("libnvinfer.so", "libnvonnxparser.so"),
}
_PACKAGES: Final[Mapping[str, tuple[str, ...]]] = {  # that carry the libraries in their folder
    RTX: ("tensorrt_rtx_libs", "onnxruntime_ep_nv_tensorrt_rtx"),
    FULL: ("tensorrt_libs",),
}
_LEAST_SCRATCH: Final = 256
_DATA_CENTRE: Final = frozenset(((8, 0), (9, 0), (10, 0), (10, 3)))


class ToolkitError(EngineUnavailableError):
    """TensorRT cannot be used. reason: what is missing; remedy: what brings it."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"tensorrt cannot be used: {reason}; {remedy}")
        self.reason = reason
        self.remedy = remedy


class Refusal(CompileError):
    """The parser's own words about a model. node: index of the node that it stopped at, -1 if it names none."""

    def __init__(self, message: str, node: int = -1) -> None:
        super().__init__(message)
        self.node = node


# --- finding the library -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class System:
    """What finding looks at; tests give stand-ins."""

    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    import_module: Callable[[str], Any] = importlib.import_module
    load_library: Callable[[str], Any] = lambda path: ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
    folder_of: Callable[[str], pathlib.Path | None] = lambda package: _folder_of(package)


def find(flavour: str, system: System) -> Any:
    """The bindings module of a flavour, its libraries loaded. Raises ToolkitError with what is missing or does not fit.

    Libraries are looked for in packages that carry them, in `$TENSORRT_HOME` (itself, lib, lib64), and where the system
    finds them.
    """
    name = next((n for n in _BINDINGS[flavour] if system.folder_of(n) is not None), None)
    if name is None:
        raise ToolkitError(f"{flavour} is not installed (no module {_BINDINGS[flavour][0]})", _INSTALL[flavour])
    tried = _load_libraries(flavour, system)
    try:
        module = system.import_module(name)
    except Exception as e:  # a loader error comes as ImportError, a broken installation as anything
        why = str(e).strip().partition("\n")[0]
        if tried:
            raise ToolkitError(f"the libraries of {flavour} do not load: {'; '.join(tried)}", _INSTALL[flavour]) from e
        raise ToolkitError(f"{name} does not import: {type(e).__name__}: {why}", _INSTALL[flavour]) from e
    _check_versions(flavour, module, system)
    return module


def _load_libraries(flavour: str, system: System) -> list[str]:
    """Load the libraries, so that the bindings find them. Returns a sentence for each that is not found anywhere."""
    folders = [f for p in _PACKAGES[flavour] if (f := system.folder_of(p)) is not None]
    home = system.environ.get("TENSORRT_HOME", "")
    if home:
        folders = [pathlib.Path(home, part) for part in ("lib", "lib64", "")] + folders
    failed = []
    for library in _LIBRARIES[flavour]:
        trouble = f"{library} is in none of {', '.join(map(str, folders)) or 'the known packages'} nor on the system"
        for path in [*_files(library, folders), library]:
            try:
                system.load_library(str(path))
                trouble = ""
                break
            except OSError as e:
                if path != library:
                    trouble = f"{path}: {e}"
        if trouble:
            failed.append(trouble)
    return failed


def _files(library: str, folders: Sequence[pathlib.Path]) -> Iterator[pathlib.Path]:
    """Files of a library, the newest version in a folder first."""
    for folder in folders:
        found = [p for p in folder.glob(f"{library}*") if re.fullmatch(r"(\.\d+)*", p.name[len(library) :])]
        yield from sorted(found, key=lambda p: [int(n) for n in re.findall(r"\d+", p.name)], reverse=True)


def _check_versions(flavour: str, module: Any, system: System) -> None:
    """Raises ToolkitError where bindings and library are of different minor versions, whose classes differ."""
    bindings = str(module.__version__)
    found = _library_version(flavour, system)
    if found and tuple(map(int, bindings.split(".")[:2])) != tuple(map(int, found.split(".")[:2])):
        raise ToolkitError(
            f"the bindings {module.__name__} are {bindings}, the library of {flavour} that was loaded is {found}",
            f"make the two fit: {_INSTALL[flavour]}",
        )


def _library_version(flavour: str, system: System) -> str:
    """Version of the loaded library, "" where it cannot be asked."""
    folders = [f for p in _PACKAGES[flavour] if (f := system.folder_of(p)) is not None]
    for path in [*_files(_LIBRARIES[flavour][0], folders), _LIBRARIES[flavour][0]]:
        try:
            number = int(system.load_library(str(path)).getInferLibVersion())
        except (OSError, AttributeError, TypeError, ValueError):
            continue
        return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    return ""


def _folder_of(package: str) -> pathlib.Path | None:
    """The folder of an installed package, without importing it."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    places = list(spec.submodule_search_locations or ()) if spec else []
    return pathlib.Path(places[0]) if places else None


def order(choice: str, capability: tuple[int, int] | None) -> tuple[str, ...]:
    """The flavours in the order to try them: as `choice` names, else full TensorRT first on data-centre GPUs.

    Without a GPU TensorRT-RTX comes first, for it builds there, which full TensorRT does not.
    Raises ToolkitError for a choice that is neither.
    """
    named = {"": None, "tensorrt": FULL, "tensorrt_rtx": RTX}
    if choice not in named:
        raise ToolkitError(f"{CHOICE} is {choice!r}", "set it to tensorrt or tensorrt_rtx, or not at all")
    found = named[choice]
    if found is not None:
        return (found,)
    return (FULL, RTX) if capability in _DATA_CENTRE else (RTX, FULL)


# --- the library ---------------------------------------------------------------------------------------------------


class Toolkit:
    """One loaded TensorRT. trt: its module. flavour: RTX or FULL; version: of the bindings."""

    def __init__(self, trt: Any, flavour: str) -> None:
        self.trt = trt
        self.flavour = flavour
        self.version = str(trt.__version__)
        self.logger = make_logger(trt)
        self._messages: Messages = self.logger.messages
        self._runtime: Any = None
        self._lock = threading.Lock()

    @property
    def is_rtx(self) -> bool:
        """Whether this is TensorRT-RTX: it builds for named compute capabilities, and without a GPU."""
        return self.flavour == RTX

    @property
    def targets(self) -> tuple[str, ...]:
        """Compute capabilities that an engine can be built for by name: "sm_80", ...; none with full TensorRT."""
        kinds = getattr(self.trt, "ComputeCapability", None)
        if not self.is_rtx or kinds is None:
            return ()
        return tuple(sorted((f"sm_{n[2:]}" for n in kinds.__members__ if n[2:].isdigit()), key=lambda t: int(t[3:])))

    def why_not_for(self, capability: tuple[int, int] | None) -> str:
        """Why engines cannot be built for GPUs of this compute capability, "" where they can."""
        if capability is None:
            return "there is no CUDA device"
        name = "sm_{}{}".format(*capability)
        if self.targets and name not in self.targets:
            return f"{self.flavour} {self.version} is not made for {name}, only for {', '.join(self.targets)}"
        return ""

    @property
    def remedy_for_other_gpus(self) -> str:
        """What to install for a GPU that this flavour is not made for."""
        return _INSTALL[FULL] if self.is_rtx else _INSTALL[RTX]

    def configure(self, builder: Any, settings: Settings) -> Any:
        """The builder's configuration of settings, without profiles."""
        trt = self.trt
        config = builder.create_builder_config()
        if settings.target and self.is_rtx:
            config.num_compute_capabilities = len(settings.target)
            for i, name in enumerate(settings.target):
                config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{name[3:]}"), i)
        if settings.workspace is not None:
            config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, settings.workspace)
        if settings.optimization_level is not None:
            config.builder_optimization_level = settings.optimization_level
        if settings.hardware_compatibility != "none" and not self.is_rtx:
            levels = trt.HardwareCompatibilityLevel
            config.hardware_compatibility_level = getattr(levels, settings.hardware_compatibility.upper())
        flags = trt.BuilderFlag
        wanted = {
            "TF32": settings.tf32,
            "STRICT_NANS": settings.strict_nans,
            "VERSION_COMPATIBLE": settings.version_compatible,
            "STRIP_PLAN": settings.strip_weights,
            # the packages of TensorRT-RTX hold no lean runtime that could go into the engine
            "EXCLUDE_LEAN_RUNTIME": settings.version_compatible and self.is_rtx,
        }
        for name, on in wanted.items():
            flag = getattr(flags, name, None)
            if flag is None:
                if on and name != "TF32":
                    raise CompileError(f"tensorrt: {self.flavour} {self.version} has no {name}")
            elif on:
                config.set_flag(flag)
            else:
                config.clear_flag(flag)
        return config

    def parse(self, model: OnnxModel) -> Network:
        """The network of a model, strongly typed. Raises Refusal with the parser's own message."""
        trt = self.trt
        builder = self._builder()
        flags = trt.NetworkDefinitionCreationFlag
        typed = 1 << int(flags.STRONGLY_TYPED) if hasattr(flags, "STRONGLY_TYPED") else 0
        network = builder.create_network(typed)
        parser = trt.OnnxParser(network, self.logger)
        proto = model.model.SerializeToString()
        with self._messages.collect() as said:
            if model.weights:
                loaded = parser.load_model_proto(proto)
                for name, w in model.weights.items():
                    loaded = loaded and parser.load_initializer(name, w.ctypes.data, w.nbytes)
                done = loaded and parser.parse_model_proto()
            else:
                done = parser.parse(proto)
            if not done:
                raise _refusal(parser, said)
        return Network(self, builder, network, parser, model)

    def _builder(self) -> Any:
        with self._messages.collect() as said:
            try:
                return self.trt.Builder(self.logger)
            except TypeError as e:  # the binding's word for a null pointer
                why = "; ".join(said) or str(e)
                raise ToolkitError(
                    f"{self.flavour} {self.version} makes no builder: {why}",
                    "it needs an NVIDIA GPU and driver; TensorRT-RTX builds without one",
                ) from e

    def runtime(self) -> Any:
        """The process's Runtime. Raises ToolkitError where it cannot be made."""
        with self._lock:
            if self._runtime is None:
                try:
                    self._runtime = self.trt.Runtime(self.logger)
                except TypeError as e:
                    raise ToolkitError(f"{self.flavour} makes no runtime: {e}", "check the NVIDIA driver") from e
            return self._runtime

    def deserialize(self, blob: bytes | memoryview) -> Any:
        """The engine of serialized bytes. Raises CompileError with the library's own words."""
        runtime = self.runtime()
        with self._messages.collect() as said:
            engine = runtime.deserialize_cuda_engine(blob)
            if engine is None:
                raise CompileError(f"tensorrt: the engine does not load: {'; '.join(said) or 'no reason was given'}")
        return engine

    def refit(self, engine: Any, model: OnnxModel) -> None:
        """Give a weight-stripped engine the weights of the model it was built of.

        Raises CompileError where they are not all there.
        """
        trt = self.trt
        with self._messages.collect() as said:
            refitter = trt.Refitter(engine, self.logger)
            parser = trt.OnnxParserRefitter(refitter, self.logger)
            done = parser.load_model_proto(model.model.SerializeToString())
            for name, w in model.weights.items():
                done = done and parser.load_initializer(name, w.ctypes.data, w.nbytes)
            done = done and parser.refit_model_proto()
            if not done or not refitter.refit_cuda_engine():
                missing = list(refitter.get_missing_weights())
                lacking = f"no weights for {', '.join(missing[:5])}; " if missing else ""
                raise CompileError(f"tensorrt: the engine cannot be refitted: {lacking}{'; '.join(said)}")

    def new_context(self, engine: Any, *, cuda_graph: bool, kernels: KernelsCache | None = None) -> Any:
        """An execution context whose device memory the caller brings. Raises ExecutionError where there is none.

        cuda_graph: TensorRT-RTX records and replays by itself; for full TensorRT the executable does it.
        kernels: where TensorRT-RTX finds what it compiled before.
        """
        trt = self.trt
        with self._messages.collect() as said:
            strategy = trt.ExecutionContextAllocationStrategy.USER_MANAGED
            if self.is_rtx:
                config = engine.create_runtime_config()
                config.set_execution_context_allocation_strategy(strategy)
                if cuda_graph:
                    config.cuda_graph_strategy = trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
                if kernels is not None:
                    kernels.give(config)
                context = engine.create_execution_context(config)
            else:
                context = engine.create_execution_context(strategy)
            if context is None:
                raise ExecutionError(f"tensorrt: no execution context: {'; '.join(said) or 'no reason was given'}")
        return context

    def tensors(self, engine: Any) -> frozenset[str]:
        """Names of an engine's inputs and outputs; an input that nothing reads may be missing.

        Raises ExecutionError for one that TensorRT wants in the CPU's memory, as it does shapes.
        """
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        for name in names:
            if engine.get_tensor_location(name).name == "HOST":
                raise ExecutionError(f"tensorrt: {name!r} is a shape, which the engine wants in the CPU's memory")
        return frozenset(names)

    def scratch_bytes(self, engine: Any, context: Any) -> int:
        """Bytes of scratch memory that a context needs for the shapes that were set, 0 where it needs none at all."""
        found = int(context.update_device_memory_size_for_shapes())
        # a context of an engine that needs memory for some shapes does not run without any, whatever these shapes need
        return found or min(int(engine.device_memory_size_v2), _LEAST_SCRATCH)

    def enqueue(self, context: Any, stream: int) -> None:
        """Run a context on a stream. Raises ExecutionError with the library's own words."""
        with self._messages.collect() as said:
            if not context.execute_async_v3(stream):
                raise ExecutionError(f"tensorrt: the run failed: {'; '.join(said) or 'no reason was given'}")

    def dtype(self, kind: Any) -> np.dtype | None:
        """The NumPy dtype of a TensorRT DataType, None for one that NumPy has not."""
        return _dtypes().get(str(kind).rpartition(".")[2])


class Network:
    """A parsed network with all that must outlive it: builder, parser, and the memory of the weights."""

    def __init__(self, toolkit: Toolkit, builder: Any, network: Any, parser: Any, model: OnnxModel) -> None:
        self.toolkit = toolkit
        self.builder = builder
        self.network = network
        self._parser = parser
        self.model = model

    @property
    def inputs(self) -> list[Any]:
        """Its input tensors (`ITensor`)."""
        return [self.network.get_input(i) for i in range(self.network.num_inputs)]

    @property
    def outputs(self) -> list[Any]:
        """Its output tensors."""
        return [self.network.get_output(i) for i in range(self.network.num_outputs)]

    @property
    def layers(self) -> list[Any]:
        """Its layers (`ILayer`), in order."""
        return [self.network.get_layer(i) for i in range(self.network.num_layers)]

    def build(self, config: Any) -> memoryview:
        """The serialized engine, where the library has it. Raises CompileError with the library's last error lines."""
        with self.toolkit.logger.messages.collect() as said:
            made = self.builder.build_serialized_network(self.network, config)
            if made is None:
                raise CompileError("; ".join(said) or "no reason was given")
        return memoryview(made).cast("B")


def _refusal(parser: Any, said: Sequence[str]) -> Refusal:
    for i in range(parser.num_errors):
        e = parser.get_error(i)
        node, name, operator = int(e.node()), e.node_name(), e.node_operator()
        where = f" (node {name!r}, {operator})" if name else f" ({operator})" if operator else ""
        return Refusal(f"{in_words(e.desc())}{where}", node)
    return Refusal("; ".join(said) or "the parser gave no reason")


@functools.cache
def _dtypes() -> Mapping[str, np.dtype]:
    import ml_dtypes

    names: dict[str, Any] = {
        "FLOAT": np.float32, "HALF": np.float16, "BF16": ml_dtypes.bfloat16, "INT8": np.int8, "INT32": np.int32,
        "INT64": np.int64, "UINT8": np.uint8, "BOOL": np.bool_, "FP8": ml_dtypes.float8_e4m3fn, "INT4": ml_dtypes.int4,
        "FP4": ml_dtypes.float4_e2m1fn, "E8M0": ml_dtypes.float8_e8m0fnu,
    }  # fmt: skip
    return {k: np.dtype(v) for k, v in names.items()}


def why_not_installed(system: System | None = None) -> ToolkitError | None:
    """Why no flavour can be had at all, None where bindings of one are installed; loads nothing."""
    folder_of = (system or System()).folder_of
    if any(folder_of(name) is not None for names in _BINDINGS.values() for name in names):
        return None
    return ToolkitError("neither TensorRT-RTX nor TensorRT is installed", _INSTALL[RTX])


@functools.cache
def toolkit() -> Toolkit:
    """The TensorRT of this process. Raises ToolkitError with the reason and the remedy."""
    from xrt_tensorrt import _cuda

    system = System()
    troubles = []
    for flavour in order(system.environ.get(CHOICE, "").strip().lower(), _cuda.capability()):
        try:
            return Toolkit(find(flavour, system), flavour)
        except ToolkitError as e:
            troubles.append(e)
    # what is installed and broken tells more than what is not installed
    raise next((t for t in troubles if "is not installed" not in t.reason), troubles[0])

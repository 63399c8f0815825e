"""The only user of TensorRT's module: parses, builds, loads, runs, and holds what differs between the two flavours."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from xrt_core.engine.onnx_bridge import OnnxModel
from xrt_core.errors import CompileError, ExecutionError
from xrt_core.ir.types import dtype_name
from xrt_tensorrt.finding import CHOICE, FULL, INSTALL, RTX, System, ToolkitError, find, order
from xrt_tensorrt.messages import Messages, in_words, make_logger
from xrt_tensorrt.opened import Opened

if TYPE_CHECKING:
    from xrt_tensorrt.kernels_cache import KernelsCache
    from xrt_tensorrt.settings import Settings

_LEAST_SCRATCH: Final = 256


class Refusal(CompileError):
    """The parser's own words about a model. node: index of the node that it stopped at, -1 if it names none."""

    def __init__(self, message: str, node: int = -1) -> None:
        super().__init__(message)
        self.node = node


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
        return INSTALL[FULL] if self.is_rtx else INSTALL[RTX]

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
            "REFIT": settings.refit,  # without it a stripped engine takes the weights that it was built with alone
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
        builder, network = self.new_network()
        parser = self.trt.OnnxParser(network, self.logger)
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

    def new_network(self) -> tuple[Any, Any]:
        """A builder, and an empty network of it, strongly typed."""
        flags = self.trt.NetworkDefinitionCreationFlag
        typed = 1 << int(flags.STRONGLY_TYPED) if hasattr(flags, "STRONGLY_TYPED") else 0
        builder = self._builder()
        return builder, builder.create_network(typed)

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

    def use_profile(self, context: Any, number: int, stream: int) -> None:
        """Let a context run by another of its engine's optimisation profiles; work for that goes to the stream.

        Raises ExecutionError with the library's own words.
        """
        with self._messages.collect() as said:
            if not context.set_optimization_profile_async(number, stream):
                raise ExecutionError(
                    f"tensorrt: optimisation profile {number} is not taken: {'; '.join(said) or 'no reason was given'}"
                )

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

    def give_scratch(self, engine: Any, context: Any, pointer: int, nbytes: int) -> None:
        """Let a context run in this memory of `scratch_bytes`.

        The form that tells the size wants what the largest shapes need; the other one goes by the shapes that were set.
        """
        if nbytes >= int(engine.device_memory_size_v2):
            context.set_device_memory(pointer, nbytes)
        else:
            context.device_memory = pointer

    def enqueue(self, context: Any, stream: int) -> None:
        """Run a context on a stream. Raises ExecutionError with the library's own words."""
        with self._messages.collect() as said:
            if not context.execute_async_v3(stream):
                raise ExecutionError(f"tensorrt: the run failed: {'; '.join(said) or 'no reason was given'}")

    def opened(self, context: Any, name: str) -> Opened:
        """What gives memory for an output of a context whose shape a run determines. Raises ExecutionError."""
        opened = Opened(self.trt)
        if not context.set_output_allocator(name, opened.allocator):
            raise ExecutionError(f"tensorrt: the output {name!r} takes no allocator")
        return opened

    def dtype(self, kind: Any) -> np.dtype | None:
        """The NumPy dtype of a TensorRT DataType, None for one that NumPy has not."""
        return _dtypes().get(str(kind).rpartition(".")[2])

    def data_type(self, dtype: np.dtype) -> Any:
        """The TensorRT DataType of a NumPy dtype. Raises CompileError where it has none."""
        name = next((n for n, d in _dtypes().items() if d == dtype), "")
        if not name:
            raise CompileError(f"tensorrt: {dtype_name(dtype)} is not among the types that {self.flavour} has")
        return getattr(self.trt.DataType, name)


class Network:
    """A parsed network with all that must outlive it: builder, parser, and the memory of the weights.

    kept: what op kernels' layers point to; by_kernels: whether there are any.
    """

    def __init__(self, toolkit: Toolkit, builder: Any, network: Any, parser: Any, model: OnnxModel) -> None:
        self.toolkit = toolkit
        self.builder = builder
        self.network = network
        self._parser = parser
        self.model = model
        self.kept: list[Any] = []
        self.by_kernels = False

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

    def give_outputs(self, names: tuple[str, ...]) -> None:
        """Say that op kernels wrote layers, and the outputs are now those of these names."""
        self.by_kernels = True
        self.model = OnnxModel(self.model.model, self.model.inputs, names, self.model.weights)

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


def choose(system: System, capability: tuple[int, int] | None) -> Toolkit:
    """The flavour for a GPU of this compute capability: the first in `order` that is installed and made for it.

    Where none is made for it, the first that is installed, which says so. Raises ToolkitError where none loads.
    """
    found: list[Toolkit] = []
    troubles = []
    for flavour in order(system.environ.get(CHOICE, "").strip().lower(), capability):
        try:
            found.append(Toolkit(find(flavour, system), flavour))
        except ToolkitError as e:
            troubles.append(e)
            continue
        if capability is None or not found[-1].why_not_for(capability):
            return found[-1]
    if found:
        return found[0]
    # what is installed and broken tells more than what is not installed
    raise next((t for t in troubles if "is not installed" not in t.reason), troubles[0])


@functools.cache
def toolkit() -> Toolkit:
    """The TensorRT of this process. Raises ToolkitError with the reason and the remedy."""
    from xrt_tensorrt import _cuda

    return choose(System(), _cuda.capability())

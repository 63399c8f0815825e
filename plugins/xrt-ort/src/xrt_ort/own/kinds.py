"""The library's plain classes, with the same fields: enumerations, exceptions, options, metadata, words for types."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import numpy as np

from xrt_ort.settings import PROVIDER, log


class _Enum(enum.IntEnum):
    """Numbers whose text is their name, with that of the class."""

    __str__ = enum.Enum.__str__


class ExecutionMode(_Enum):
    """Whether independent nodes may run at the same time."""

    ORT_SEQUENTIAL = 0
    ORT_PARALLEL = 1


class ExecutionOrder(_Enum):
    """The order of nodes."""

    DEFAULT = 0
    PRIORITY_BASED = 1
    MEMORY_EFFICIENT = 2


class GraphOptimizationLevel(_Enum):
    """How far graphs are optimised."""

    ORT_DISABLE_ALL = 0
    ORT_ENABLE_BASIC = 1
    ORT_ENABLE_EXTENDED = 2
    ORT_ENABLE_LAYOUT = 3
    ORT_ENABLE_ALL = 99


class OrtAllocatorType(_Enum):
    """Kinds of allocators."""

    INVALID = -1
    ORT_DEVICE_ALLOCATOR = 0
    ORT_ARENA_ALLOCATOR = 1


class OrtDeviceMemoryType(_Enum):
    """Kinds of memory of a device."""

    DEFAULT = 0
    HOST_ACCESSIBLE = 5


class OrtMemoryInfoDeviceType(_Enum):
    """Kinds of devices."""

    CPU = 0
    GPU = 1
    NPU = 2
    FPGA = 3


class OrtMemType(_Enum):
    """Kinds of memory."""

    CPU_INPUT = -2
    CPU_OUTPUT = -1
    DEFAULT = 0


@dataclass(frozen=True)
class OrtMemoryInfo:
    """Where memory is."""

    name: str
    allocator_type: OrtAllocatorType = OrtAllocatorType.INVALID
    device_id: int = 0
    mem_type: OrtMemType = OrtMemType.DEFAULT
    device_mem_type: OrtDeviceMemoryType = OrtDeviceMemoryType.DEFAULT
    device_vendor_id: int = 0

    @staticmethod
    def create_v2(
        name: str, device_type: OrtMemoryInfoDeviceType, vendor_id: int, device_id: int,
        device_mem_type: OrtDeviceMemoryType, alignment: int, allocator_type: OrtAllocatorType,
    ) -> OrtMemoryInfo:  # fmt: skip
        """Where memory of a device is."""
        return OrtMemoryInfo(name, allocator_type, device_id, OrtMemType.DEFAULT, device_mem_type, vendor_id)


class OrtArenaCfg:
    """Settings of an arena, -1 for those that are not given: four numbers, or names with numbers. XRT obeys none."""

    _NAMES: ClassVar[tuple[str, ...]] = (
        "max_mem", "arena_extend_strategy", "initial_chunk_size_bytes", "max_dead_bytes_per_chunk",
        "initial_growth_chunk_size_bytes", "max_power_of_two_extend_bytes",
    )  # fmt: skip

    def __init__(self, *given: Any) -> None:
        if len(given) == 1 and isinstance(given[0], Mapping):
            values = dict(given[0])
        elif len(given) == 4:
            values = dict(zip(self._NAMES[:4], given, strict=True))
        else:
            raise TypeError("OrtArenaCfg takes four numbers, or a dict of names and numbers")
        unknown = [name for name in values if name not in self._NAMES]
        if unknown:
            raise RuntimeError(f"Invalid OrtArenaCfg option: {unknown[0]}")
        for name in self._NAMES:
            setattr(self, name, int(values.get(name, -1)))


@dataclass(frozen=True)
class OrtEpAssignedNode:
    """A node of a model."""

    name: str
    domain: str
    op_type: str


@dataclass(frozen=True)
class OrtEpAssignedSubgraph:
    """Nodes that a provider has."""

    ep_name: str
    nodes: tuple[OrtEpAssignedNode, ...]

    def get_nodes(self) -> list[OrtEpAssignedNode]:
        """The nodes."""
        return list(self.nodes)


# Exceptions, each derived from Exception alone as the library's are; code and name stand in every message.


class Fail(Exception):
    """Something failed while a model was made or run."""


class InvalidArgument(Exception):
    """A feed or the name of a result does not fit."""


class NoSuchFile(Exception):
    """A model's file is not there."""


class NoModel(Exception):
    """There is no model."""


class EngineError(Exception):
    """An engine failed."""


class RuntimeException(Exception):
    """An exception while running."""


class InvalidProtobuf(Exception):
    """A model that cannot be parsed."""


class ModelLoaded(Exception):
    """The model is loaded already."""


class NotImplemented(Exception):
    """An operator without an implementation."""


class InvalidGraph(Exception):
    """A model whose graph is not valid."""


class EPFail(Exception):
    """An execution provider failed."""


_CODES: Final[Mapping[type[Exception], tuple[int, str]]] = {
    Fail: (1, "FAIL"),
    InvalidArgument: (2, "INVALID_ARGUMENT"),
    NoSuchFile: (3, "NO_SUCHFILE"),
    InvalidProtobuf: (7, "INVALID_PROTOBUF"),
    NotImplemented: (9, "NOT_IMPLEMENTED"),
    InvalidGraph: (10, "INVALID_GRAPH"),
}


def error(kind: type[Exception], message: str) -> Exception:
    """An exception with a message in the library's form."""
    code, name = _CODES[kind]
    return kind(f"[ONNXRuntimeError] : {code} : {name} : {message}")


@dataclass(frozen=True)
class NodeArg:
    """An input or a result. type: such as "tensor(float)". shape: sizes, names, or None."""

    name: str
    type: str
    shape: list[Any]

    def __str__(self) -> str:
        return f"NodeArg(name='{self.name}', type='{self.type}', shape={self.shape})"


@dataclass(frozen=True)
class ModelMetadata:
    """What a model says about itself."""

    producer_name: str = ""
    graph_name: str = ""
    domain: str = ""
    description: str = ""
    graph_description: str = ""
    version: int = 0
    custom_metadata_map: dict[str, str] = field(default_factory=dict)


class _Checked:
    """Attributes of fixed types: another type is a TypeError, as with the library; another name is added freely."""

    _types: ClassVar[Mapping[str, type]] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        wanted = self._types.get(name)
        if wanted is not None and (not isinstance(value, wanted) or (wanted is int and isinstance(value, bool))):
            raise TypeError(f"{type(self).__name__}.{name} takes {wanted.__name__}, not {type(value).__name__}")
        object.__setattr__(self, name, value)


class SessionOptions(_Checked):
    """Options of a session. `intra_op_num_threads`, profiles, `optimized_model_filepath`, sizes of dimensions and
    weights are obeyed; the others are accepted, and ignored."""

    _types: ClassVar[Mapping[str, type]] = {
        "enable_cpu_mem_arena": bool, "enable_mem_pattern": bool, "enable_mem_reuse": bool, "enable_profiling": bool,
        "execution_mode": ExecutionMode, "execution_order": ExecutionOrder, "inter_op_num_threads": int,
        "graph_optimization_level": GraphOptimizationLevel, "intra_op_num_threads": int, "log_severity_level": int,
        "log_verbosity_level": int, "logid": str, "optimized_model_filepath": str, "profile_file_prefix": str,
        "use_deterministic_compute": bool, "use_per_session_threads": bool,
    }  # fmt: skip

    def __init__(self) -> None:
        self.enable_cpu_mem_arena = self.enable_mem_pattern = self.enable_mem_reuse = True
        self.use_per_session_threads = True
        self.enable_profiling = self.use_deterministic_compute = False
        self.execution_mode = ExecutionMode.ORT_SEQUENTIAL
        self.execution_order = ExecutionOrder.DEFAULT
        self.graph_optimization_level = GraphOptimizationLevel.ORT_ENABLE_ALL
        self.inter_op_num_threads = self.intra_op_num_threads = 0
        self.log_severity_level, self.log_verbosity_level, self.logid = -1, 0, ""
        self.optimized_model_filepath, self.profile_file_prefix = "", "onnxruntime_profile_"
        self._entries: dict[str, str] = {}
        self._initializers: dict[str, Any] = {}
        self._files: dict[str, bytes] = {}
        self._sizes: dict[tuple[str, str], int] = {}
        self._providers: list[tuple[str, dict[str, str]]] = []

    def add_session_config_entry(self, key: str, value: str) -> None:
        """Keep an entry; XRT obeys those about files of the optimised model, and about the assignment of nodes."""
        self._entries[str(key)] = str(value)
        log.debug("session entry %s=%s is accepted and ignored", key, value)

    def get_session_config_entry(self, key: str) -> str:
        """Return an entry. Raises RuntimeError for one that was not added."""
        if key not in self._entries:
            raise RuntimeError(f"SessionOptions does not have configuration with key: {key}")
        return self._entries[key]

    def add_free_dimension_override_by_name(self, name: str, size: int) -> None:
        """Hold every call to a size of the dimensions of a name."""
        self._sizes["dim_param", name] = int(size)

    def add_free_dimension_override_by_denotation(self, denotation: str, size: int) -> None:
        """Hold every call to a size of the dimensions of a denotation, such as "DATA_BATCH"."""
        self._sizes["denotation", denotation] = int(size)

    def add_initializer(self, name: str, value: Any) -> None:
        """Give a weight of the model."""
        self._initializers[name] = value

    def add_external_initializers(self, names: Any, values: Any) -> None:
        """Give weights of the model that it says lie in files."""
        self._initializers.update(zip(names, values, strict=True))

    def add_external_initializers_from_files_in_memory(self, names: Any, contents: Any, lengths: Any) -> None:
        """Give the contents of files in which the model says that weights lie."""
        for name, content, length in zip(names, contents, lengths, strict=True):
            self._files[str(name)] = bytes(content)[: int(length)]

    def register_custom_ops_library(self, path: str) -> None:
        """Raises Fail: a library of custom operators needs onnxruntime itself."""
        raise error(Fail, f"{path}: custom operators need onnxruntime, which is not installed")

    def add_provider(self, provider: str, provider_options: Mapping[str, str]) -> None:
        """Let sessions have a provider, XRT's or the CPU's. Raises RuntimeError for another."""
        if provider not in (PROVIDER, "CPUExecutionProvider"):
            raise RuntimeError(f"Unknown Provider Type: {provider}")
        self._providers.append((provider, dict(provider_options)))

    def has_providers(self) -> bool:
        """Whether providers were added to the options."""
        return bool(self._providers)


class RunOptions(_Checked):
    """Options of one run. `terminate` is obeyed before the run begins."""

    _types: ClassVar[Mapping[str, type]] = {
        "log_severity_level": int, "log_verbosity_level": int, "logid": str, "terminate": bool,
        "only_execute_path_to_fetches": bool,
    }  # fmt: skip

    def __init__(self) -> None:
        self.log_severity_level, self.log_verbosity_level, self.logid = -1, 0, ""
        self.terminate = self.only_execute_path_to_fetches = False
        self._entries: dict[str, str] = {}

    def add_run_config_entry(self, key: str, value: str) -> None:
        """Keep an entry; XRT obeys none."""
        self._entries[str(key)] = str(value)

    def get_run_config_entry(self, key: str) -> str:
        """Return an entry. Raises RuntimeError for one that was not added."""
        if key not in self._entries:
            raise RuntimeError(f"RunOptions does not have configuration with key: {key}")
        return self._entries[key]


NAMES: Final[Mapping[int, str]] = {
    1: "float", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 8: "string", 9: "bool",
    10: "float16", 11: "double", 12: "uint32", 13: "uint64", 14: "complex64", 15: "complex128", 16: "bfloat16",
    17: "float8e4m3fn", 18: "float8e4m3fnuz", 19: "float8e5m2", 20: "float8e5m2fnuz",
}  # fmt: skip
"""Element types of ONNX -> the library's words."""


def element_type(dtype: np.dtype[Any]) -> int:
    """The number that ONNX has for elements of an array."""
    from onnx import helper

    return 8 if dtype.kind in "OUS" else int(helper.np_dtype_to_tensor_dtype(dtype.newbyteorder("=")))


def type_name(proto: Any) -> str:
    """A TypeProto in the library's words."""
    kind = proto.WhichOneof("value")
    if kind == "tensor_type":
        return f"tensor({NAMES.get(proto.tensor_type.elem_type, 'undefined')})"
    if kind == "sequence_type":
        return f"seq({type_name(proto.sequence_type.elem_type)})"
    if kind == "optional_type":
        return f"optional({type_name(proto.optional_type.elem_type)})"
    if kind == "map_type":
        return f"map({NAMES[proto.map_type.key_type]},{type_name(proto.map_type.value_type)})"
    return f"{kind}"


def node_arg(value: Any) -> NodeArg:
    """A ValueInfoProto as the library gives it."""
    shape: list[Any] = []
    if value.type.HasField("tensor_type"):
        for d in value.type.tensor_type.shape.dim:
            shape.append(d.dim_value if d.HasField("dim_value") else d.dim_param or None)
    return NodeArg(value.name, type_name(value.type), shape)

"""The engine contract: everything an engine author implements, in one file.

An engine is a pip package. Its entry point in the group `xrt.engines` names a module whose hook `xrt_engines` gives a
subclass of `Engine` (`xrt_core/plugins/hookspecs.py`), or as the short form the class itself. Importing that module
must not import the engine's library (XRT lists engines without paying for them), so the library is loaded in `probe`,
`supports` and `compiler` only, through one module `_toolkit.py`.

    class Engine          what is it, is it usable here, which nodes does it take      (mandatory)
    class GraphCompiler   Function -> Executable                                       (mandatory)
    class Executable      runs; may serialise                                          (mandatory; serialise optional)
    @op_kernel            per-operator kernels, for compilers that go node by node     (see engine/op_kernels.py)

Before you widen this contract: every engine in the field pays for a new mandatory member. Prefer an optional one with
a default here, and say when it is called.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal

from xrt_core.errors import EngineUnavailableError, UnsupportedError
from xrt_core.ir.function import Function, InputOutputAlias, Parameter
from xrt_core.ir.graph import Node, Phase, Support, are_open

__all__ = [
    "API_VERSION",
    "ARRAY_FAMILIES",
    "WORKER_VARIABLE",
    "CompileOptions",
    "Engine",
    "EngineStatus",
    "Executable",
    "Function",
    "GraphCompiler",
    "InputOutputAlias",
    "Parameter",
    "Phase",
    "RunOptions",
    "Support",
    "Tolerance",
]

API_VERSION: Final = 1
"""Version of this contract. An engine states the one it was written for; the core refuses others with the reason."""

WORKER_VARIABLE: Final = "XRT_WORKER"
"""Environment variable of a child process of the guard, which works beside its parent: "builds" in one that compiles
and verifies, "runs" in one that runs executables for good. A library that takes a GPU's whole memory in advance must
not do so there."""

ARRAY_FAMILIES: Final = ("jax", "cupy", "torch", "other")
"""What `Engine.array_families` may name."""

_NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Whether an engine can be used here.

    available: it can. version: of the engine's library, "" if unknown. devices: usable ones ("cpu", "cuda:0").
    reason: if not available, why; remedy: what to install or set.
    """

    available: bool
    version: str = ""
    devices: tuple[str, ...] = ()
    reason: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """How to compile.

    phase: "inference" or "train". fused: False asks for the build with the engine's fusions off, which the guard
    uses as a reference. workspace_bytes, max_batch_size: limits some engines honour. threads: intra-op threads of an
    executable on a CPU (None: the engine's default). shared: other executables run on the same cores before and after
    this one in each call, so that threads which wait for work should sleep. release_cores: the program computes with
    threads of its own between calls, so that those of an executable should not wait for the next one by spinning.
    extra: the engine's own options.
    """

    phase: Phase = "inference"
    fused: bool = True
    workspace_bytes: int | None = None
    max_batch_size: int | None = None
    threads: int | None = None
    shared: bool = False
    release_cores: bool = False
    extra: Mapping[str, Any] = field(default_factory=lambda: _NO_OPTIONS)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How to run.

    stream: the caller's stream on the device as an integer handle, as its kind's `Streams` gives it (CUDA: 0 and 1 are
    the legacy default stream, 2 that of the thread); None: any stream of the executable's.
    donate: whether the executable may write results into aliased inputs in place (the caller no longer uses them).
    results: arrays of the caller's that results are wanted in, one for each return parameter, None where it does not
    matter; empty for none. An executable that can write there does, in the order of `stream`, and returns that array
    (whose content a failed run may leave in any state); it may return an array of its own as well.
    """

    stream: int | None = None
    donate: bool = True
    results: Sequence[Any] = ()


DEFAULT_RUN_OPTIONS: Final = RunOptions()


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far results of one dtype may be off.

    An element is within bounds when it is at most `relative` of itself plus `absolute` of the largest element of its
    result away from what it should be. share: the part of the elements (0 to 1) that may be out of bounds.
    reason: human-readable; an engine that declares a tolerance of its own says why it needs it.
    accumulates: "float16" or "bfloat16" where sums of products of the dtype are kept in that; else they are taken to be
    kept in float32 at least. The bounds of a result grow by its rounding steps and the root of the number of terms.
    computed_in: the name of a narrower dtype that values of the dtype are computed in, because an option of the engine
    asks for it: the table's row of that one counts as well.
    """

    absolute: float
    relative: float
    share: float = 0.0
    reason: str = ""
    accumulates: str = ""
    computed_in: Literal["", "float16", "bfloat16"] = ""


class Executable(ABC):
    """A compiled Function. Safe to call from many threads at once; each call owns its results.

    tolerance: optional; for dtypes of which this executable needs another one than `Engine.tolerance_with` says.
    fixed_results: optional; whether each run gives new arrays, not NumPy's, of the dtypes and shapes of the first one,
        as a compiled program of static shapes does. The core then checks the results of the first run, later ones by
        class and number alone, which saves most of a microsecond an array.
    """

    tolerance: Mapping[str, Tolerance] | None = None
    fixed_results: bool = False

    @abstractmethod
    def run(
        self, inputs: Sequence[Any], run_options: RunOptions = DEFAULT_RUN_OPTIONS, block_until_done: bool = True
    ) -> Sequence[Any]:
        """Run once.

        inputs: one array per entry parameter, of its dtype and shape: NumPy arrays, arrays of the engine's own library
            (what an earlier `run` of the same engine returned), or of those in `Engine.array_families`; on a kind of
            device with `DeviceKind.arrays` always arrays of that class, in the executable's device. They are not
            modified, except those that `aliases` names, when `run_options.donate` is set.
        Returns one array per return parameter, in the engine's own array type; it must support `numpy.asarray` or
            DLPack, or be of the class of its device kind's `arrays`. With block_until_done=False the arrays may still
            be under computation; only an engine that says `asynchronous` is asked for that, see there.
        Raises ExecutionError, after which the executable must stay usable.
        """

    def serialize(self) -> bytes:
        """Bytes from which the compiler's `load` makes this executable again, in another process. Optional."""
        raise UnsupportedError(f"{type(self).__name__} cannot be serialised")

    def serialize_code(self) -> bytes:
        """Like `serialize`, but may leave out what the Function holds anyway, its constants. Optional.

        The disk cache calls it after a compilation, and gives the Function back to the compiler's `load_code`.
        """
        return self.serialize()

    def devices(self) -> tuple[str, ...]:
        """The devices it runs on, as XRT names them ("cuda:1"), read from the library; empty where it does not tell.
        Optional; shown in reports, and held against where the user placed the nodes."""
        return ()

    def as_text(self) -> str:
        """What was compiled, readable (HLO, a network listing, ...). Optional."""
        return f"<{type(self).__name__}>"


class GraphCompiler(ABC):
    """Compiles Functions for one device with one set of options. Safe to call from many threads at once.

    stages: optional; the forms of a Function that `as_text` shows, in the order of compilation: name -> what it is. The
        last one is what `Executable.as_text` gives, unless `as_text` is overridden for it.
    """

    stages: Mapping[str, str] = MappingProxyType({"compiled": "what was compiled, as the executable shows it"})

    @abstractmethod
    def compile(
        self,
        function: Function,
        entry_params: Sequence[Parameter],
        return_params: Sequence[Parameter],
        aliases: Sequence[InputOutputAlias],
    ) -> Executable:
        """Compile `function`, whose every node `Engine.supports` has accepted.

        entry_params, return_params: dtype and static shape of inputs and results, in order; of a symbolic Function
            (`Engine.dynamic_dims`) dtype and dimensions, and see `open_shapes`.
        aliases: outputs that share an input's storage (updated variables).
        Raises CompileError with the engine library's own message.
        """

    def as_text(
        self,
        function: Function,
        entry_params: Sequence[Parameter],
        return_params: Sequence[Parameter],
        aliases: Sequence[InputOutputAlias],
        stage: str,
    ) -> str:
        """What `function` is at one of the `stages`, for people to read. It is compiled for this alone. Optional.

        The arguments are those of `compile`. Raises CompileError as `compile` does, UnsupportedError for another stage.
        """
        if stage != next(reversed(tuple(self.stages)), None):
            raise UnsupportedError(f"{type(self).__name__} shows no stage {stage!r} of a compilation")
        return self.compile(function, entry_params, return_params, aliases).as_text()

    def load(self, blob: bytes) -> Executable:
        """The executable that `Executable.serialize` gave `blob` for. Optional.

        Raises CompileError where the blob does not fit this machine or library, with the reason.
        """
        raise UnsupportedError(f"{type(self).__name__} cannot load serialised executables")

    def load_code(self, blob: bytes, function: Function) -> Executable:
        """The executable that `Executable.serialize_code` gave `blob` for, when `function` was compiled. Optional.

        `function` has the same fingerprint as the one that was compiled. Raises CompileError as `load` does.
        """
        return self.load(blob)


class Engine(ABC):
    """One compute engine. Light: constructing it imports nothing heavy; it holds no device state.

    name: how users call it (`engine="<name>"`), a lower-case identifier.
    api_version: the API_VERSION it was written for.
    devices: kinds of devices it can drive, such as "cpu" or "cuda"; others than XRT's own are registered first
        (`register_device_kind`, hook `xrt_device_kinds`).
    priority: phase -> rank; engines are tried from high to low, and those of one rank by name.
    switch: optional; the tri-state option of modules that is the engine's own, such as "use_<name>", with the variable
        `FLAGS_<switch>` and the function `xrt.config.<switch>`. Where no engine is named, True leaves only engines
        that are switched on, False leaves this one out.
    automatic: optional; whether the engine takes part where none is named. False suits an engine that is there to
        learn from or to debug with, and would slow a model down.
    array_families: optional; the libraries, of ARRAY_FAMILIES, whose arrays `Executable.run` takes as they are, beside
        NumPy's. "other" is any object that shows memory of a GPU by DLPack or by `__cuda_array_interface__`. On a GPU
        only arrays in the memory of the executable's own device are given so; all else arrives as NumPy arrays.
    asynchronous: optional; whether the core may run executables with block_until_done=False on devices whose kind has
        streams, and the caller's stream in `run_options`. By this an engine says: such a run comes after what makes
        its inputs (an array that does not tell by DLPack or `__cuda_array_interface__` is made on that stream); who
        reads a result by DLPack, by the array protocol, by its device kind or, where results are CuPy's arrays, on that
        stream, gets it finished; inputs on the device may be released at once, and any input be written to after a
        result was read so; and what fails late raises where a result is read on the CPU.
    tolerance: optional; by the name of a dtype ("float32"), how far the engine's results may be off where the table of
        XRT (`verify/tolerances.json`) is too strict for it, with the reason, which is shown. Only the guard reads it,
        when it checks a compiled cluster. Up to a hundred times the table's counts (`verify.compare.MOST_LENIENT`).
    dynamic_dims: optional; which Functions the engine compiles for shapes that differ between calls. "none": only such
        of static shapes. "any": also symbolic ones (`Function.is_symbolic`), with one executable for all sizes of their
        symbols; then `supports` is asked about nodes whose dimensions are texts, `GraphCompiler.compile` is given
        parameters whose `dims` have texts, and `Executable.run` arrays of any sizes that fit them, each at least 1.
    native_operators: optional; operators of plugins, as "com.microsoft.MatMulNBits", that the engine computes better as
        they are than as what they are lowered to. Where it is the first of the engines, those of which `supports` says
        yes are not lowered in inference; the host runs the lowering where the engine fails.
    open_shapes: optional; whether the engine takes nodes whose results' shapes depend on data (NonZero,
        NonMaxSuppression). Their dimensions are None in the `dims` of `return_params` (`Parameter.is_open`). "none":
        it never sees such nodes. "results": it is offered them, and no other node of the cluster reads what they give.
        "any": also nodes that read such values, in clusters whose entries have known shapes; any of the sizes within
        may be 0. Where the guard tries parts of such a cluster, entries are open too.
    checks_indices: optional; operators of ONNX that raise on the CPU where an index that is computed within the cluster
        is out of range ("GatherND"). The engine gets control flow that computes indices for them in its bodies, and
        where its `open_shapes` are "any" such nodes themselves, although nothing is known of their indices: the host
        then says what is wrong. Others must not, as libraries follow an index into foreign memory.
    meshes: optional; whether the engine runs a Function on several devices at once. Only then it sees nodes of
        `xrt.Boxing`, whose attribute `target` says how their result lies on `mesh` (`ir.sharding`); entries and
        weights that only such nodes read are given to it so.
    shares_weights: optional; whether executables of this engine on one device hold equal constants once: then one of
        another shape costs little memory, and more of them are kept.
    reduced_precisions: optional; narrower dtypes that the engine computes float32 in where options of its own ask for
        it: the name of a dtype ("bfloat16") -> these options. `accuracy` tries them (docs/precision.md); then
        `tolerance_with` must say `computed_in`.
    variables: optional; environment variables that the library reads, for `xrt doctor` to show.
    conformance: optional; answers to the conformance kit's questions, by the names of `xrt_core.testing.Capabilities`
        ({"deterministic": False}). Only the kit reads it.
    """

    name: ClassVar[str]
    api_version: ClassVar[int] = API_VERSION
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    priority: ClassVar[Mapping[Phase, int]] = MappingProxyType({"train": 0, "inference": 0})
    switch: ClassVar[str] = ""
    automatic: ClassVar[bool] = True
    array_families: ClassVar[tuple[str, ...]] = ()
    asynchronous: ClassVar[bool] = False
    tolerance: ClassVar[Mapping[str, Tolerance]] = MappingProxyType({})
    dynamic_dims: ClassVar[Literal["none", "any"]] = "none"
    native_operators: ClassVar[tuple[str, ...]] = ()
    open_shapes: ClassVar[Literal["none", "results", "any"]] = "none"
    checks_indices: ClassVar[tuple[str, ...]] = ()
    meshes: ClassVar[bool] = False
    shares_weights: ClassVar[bool] = False
    reduced_precisions: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType({})
    variables: ClassVar[tuple[str, ...]] = ()
    conformance: ClassVar[Mapping[str, Any]] = _NO_OPTIONS

    @abstractmethod
    def probe(self) -> EngineStatus:
        """Whether the engine can be used here. May import the library; never raises for a missing one."""

    def probe_installed(self) -> EngineStatus | None:
        """What `probe` says here, as far as the installed packages and the environment tell; it must not import the
        library. Optional; None where only the library knows.

        It is asked with "auto" under an asynchronous guard, about an engine that a worker process with these packages
        has found usable: a process that runs nothing on the engine need not import its library then. `fingerprint`
        should import nothing either where this says something.
        """
        return None

    @abstractmethod
    def supports(self, node: Node, device: str, phase: Phase) -> Support:
        """Whether the engine takes `node`, or why not.

        Called once per node and specialisation, after shape inference: inputs carry types, known inputs their data
        (`value.data`). Must be quick (microseconds) and must not depend on anything but its arguments.
        """

    @abstractmethod
    def compiler(self, device: str, options: CompileOptions) -> GraphCompiler:
        """A compiler for the device. Raises EngineUnavailableError where the device cannot be used."""

    @abstractmethod
    def fingerprint(self, device: str) -> str:
        """Library version and device (CPU features, compute capability): executables of another one don't fit."""

    def targeting(self, target: str) -> Engine:
        """This engine, compiling for a kind of device that need not be here, as the engine there would. Optional.

        What comes back is usable (`probe`) as far as compiling goes; its executables can be saved, and need not run.
        Raises EngineUnavailableError for a target that it cannot compile for, saying which it can.
        """
        raise EngineUnavailableError(f"engine {self.name!r} compiles for the devices that are here, not for {target!r}")

    def tolerance_with(self, options: CompileOptions) -> Mapping[str, Tolerance]:
        """The tolerance of what is compiled with these options, where it depends on them: products in TF32, sums in
        float16 or bfloat16. Optional; as `tolerance`, and within the same limits.

        Raises OptionError for options that the engine does not take.
        """
        return self.tolerance

    def prepare(self) -> None:  # noqa: B027 - optional by contract
        """Load the library now rather than at first use. Optional; called before time-critical work."""

    @property
    def package(self) -> str:
        """The pip package that brings the engine, for messages."""
        return f"xrt-{self.name}"

    def __repr__(self) -> str:
        return f"<engine {self.name}>"


def ask_support(engine: Engine, node: Node, device: str, phase: Phase) -> tuple[Support, str]:
    """Whether an engine supports a node, asked in this process; and what it raised or returned instead of a Support. It
    is not asked about shapes that depend on data, unless it takes them (`Engine.open_shapes`)."""
    if engine.open_shapes != "any":
        offered = node.inputs if engine.open_shapes == "results" else (*node.inputs, *node.outputs)
        if are_open(offered):
            return Support.no("shapes depend on data, which this engine does not take"), ""
    try:
        found = engine.supports(node, device, phase)
        if isinstance(found, Support):
            return found, ""
        fault = f"it returned {found!r} instead of a Support"
    except Exception as e:  # a broken engine refuses, it does not break the model
        fault = repr(e)
    return Support.no(f"{engine.name} failed to say whether it takes the node: {fault}"), fault

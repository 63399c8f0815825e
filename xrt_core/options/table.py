"""The one table of options: each field of `Options` carries its kind, default, environment variable and help."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

from msgspec import Struct

from xrt_core.errors import OptionError
from xrt_core.options.accuracy import ACCURACY, Accuracy
from xrt_core.options.declared import CORE_VARIABLES, PREFIX, find_section, find_switch, why_undeclared
from xrt_core.options.kinds import (
    AUTO,
    BUCKETS,
    BYTES,
    CACHE,
    DEVICE,
    ENGINE_OPTIONS,
    ENGINES,
    FLAG,
    FOLDER,
    HUGE,
    LIBRARIES,
    MARKS,
    MESH,
    PLACE,
    PLACEMENT,
    PRECISION,
    PREFER,
    SECONDS,
    SHARDING,
    SOME_SECONDS,
    TARGET,
    TRACE,
    Kind,
    choice,
    flag_or,
    integer,
)
from xrt_core.options.rollout import ROLLOUT, Rollout

if TYPE_CHECKING:  # it needs NumPy, and options are there before anything is computed
    from xrt_core.ir.graph import Phase
    from xrt_core.ir.sharding import Mesh


class Option(Struct, frozen=True):
    """One row of the table. env: the environment variable, "" if it has none."""

    name: str
    kind: Kind
    default: Any
    env: str
    help: str


def _option(default: Any, kind: Kind, help: str, env: str = "") -> Any:
    return dataclasses.field(default=default, metadata={"kind": kind, "env": env, "help": help})


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Every option with its value; made by `resolve`. Hashable and comparable by the values alone.

    switches: those of engines that somebody set, by name. left_out: engines that a rollout keeps out here. sections:
    the declared options of the plugins that `engine_options` or the environment speaks of, defaults included.
    """

    engine: tuple[str, ...] | None = _option(
        None,
        ENGINES,
        "Engines to use, tried in this order on what is left. Not given: the switches of engines decide; where they "
        "say nothing, 'auto', and for training and without verification every engine that is ready, by its priority.",
    )
    phase: Phase = _option(  # noqa: RUF009 - it makes a dataclasses.field
        "inference", choice("inference", "train"), "What the graph is run for; decides engine order and kernels."
    )
    device: str | None = _option(
        None, DEVICE, "Device that engines compile for. Not given: the first usable device of each engine."
    )
    target: str | None = _option(
        None,
        TARGET,
        "Kind of device to compile for that need not be here, for `save` and `xrt compile`; the engines must be named, "
        "and what cannot run here the host runs.",
    )
    engine_options: str | None = _option(
        None,
        ENGINE_OPTIONS,
        "Options of single engines and of other plugins, by name: engine_options={'acme': {'depth': 5}}. Each one's "
        "page lists its own.",
    )
    rollout: Rollout | None = _option(  # noqa: RUF009 - it makes a dataclasses.field
        None,
        ROLLOUT,
        "A new engine, or one version of an engine, acts on this share of the jobs or calls, drawn by a stable hash; "
        "the others go on as without it. Results are compared and reported (docs/distributed.md).",
        "XRT_ROLLOUT",
    )
    forbid_compilation: bool = _option(
        False,
        FLAG,
        "Raise CompileError where a call would need a plan that is not there, rather than compile it: for services "
        "that compile in advance (`xrt.warmup`, `prepare`, a saved module), and for their tests.",
        "XRT_FORBID_COMPILATION",
    )
    strict: bool = _option(
        False,
        FLAG,
        "A model with operators that nobody here defines is an error when the module is made, which names them all; "
        "otherwise where such a node would have to run (docs/operators.md).",
        "XRT_STRICT",
    )
    custom_op_libraries: tuple[str, ...] = _option(
        (),
        LIBRARIES,
        "Libraries of compiled operators, of an engine's own kind, that the model's nodes need: these run there "
        "(docs/operators.md).",
    )
    # One, not a larger number: the count of nodes says little about the work in them (a model may be one Attention or
    # Conv node), and a Launch of one node costs a few microseconds. Who knows their graph better raises it.
    minimum_nodes: int = _option(
        1, integer(1), "Clusters with fewer nodes are dissolved.", "FLAGS_clustering_minimum_nodes"
    )
    maximum_nodes: int = _option(
        HUGE, integer(1), "Clusters do not grow beyond this many nodes.", "FLAGS_clustering_maximum_nodes"
    )
    strict_clustering: bool = _option(
        True, FLAG, "Folding must not delay any node outside the cluster.", "FLAGS_strict_clustering"
    )
    merge_updates: bool = _option(
        False,
        FLAG,
        "Updates of variables may share a cluster with what computes their gradients. A TrainModule that donates "
        "nothing says so by itself (docs/training.md).",
    )
    prune: bool = _option(
        True,
        FLAG,
        "Dissolve clusters that are estimated to save nothing, where the host has nodes anyway, and give those that "
        "cut a later engine's in pieces, and are not worth it, to that engine (docs/partitioning.md).",
        "XRT_PRUNE",
    )
    marks: tuple[tuple[str, str], ...] | bool = _option(
        (),
        MARKS,
        "Nodes marked for an engine, or for the host, by name or operator; names are patterns with * and ?. False: all "
        "marks are ignored, those of the model too (docs/partitioning.md).",
    )
    placement: tuple[tuple[str, str], ...] = _option(
        (),
        PLACEMENT,
        "Nodes placed on a device, by name or operator; names are patterns with * and ?. A placement is obeyed or an "
        "error; with 'prefer' one that cannot be had is given up, with an event (docs/devices.md).",
        "XRT_PLACEMENT",
    )
    mesh: Mesh | None = _option(  # noqa: RUF009 - it makes a dataclasses.field
        None,
        MESH,
        "Devices as a grid with named axes, over which engines that can share tensors and work (docs/devices.md).",
        "XRT_MESH",
    )
    sharding: tuple[tuple[str, str], ...] | str | None = _option(
        None,
        SHARDING,
        "How tensors lie on the mesh, by patterns of names; the rest follows. Not given: inputs are split along their "
        "first axis over the mesh's axis 'data'. 'auto': chosen by estimated FLOPs and bytes (docs/devices.md).",
    )
    automatic: bool | None = _option(
        None,
        FLAG,
        "Whether nodes without a mark are offered to engines. Not given: where no node is marked for an engine, or "
        "`xrt.init_subblock_optimizer` was called.",
    )
    trace: str = _option(
        "",
        TRACE,
        "A folder: the graph before and after every pass is written into it, with times. True: a line of the log for "
        "each pass.",
        "XRT_TRACE",
    )
    max_workspace_bytes: int | None = _option(
        None,
        integer(1, " (bytes)"),
        "Scratch memory that an engine may use for one executable, where the engine has such a limit. Not given: the "
        "engine's own.",
        "FLAGS_max_workspace_bytes",
    )
    max_batch_size: int | None = _option(
        None, integer(1), "Largest batch that engines which need to know it prepare for.", "FLAGS_max_batch_size"
    )
    threads: int | None = _option(
        None,
        integer(1),
        "Threads inside one operator of an executable on a CPU. Not given: the engine's default, or what the process "
        "may use (affinity, quota of its control group, OMP_NUM_THREADS) if the machine has more; with "
        "`parallel=True` that divided by the number of engines. Some libraries use all cores whatever is said here.",
    )
    # Off by default: two engines on one CPU share its cores, and were measured within 4 to 7 % of one after another.
    parallel: bool = _option(
        False,
        FLAG,
        "Whether independent clusters of different engines or devices run at the same time.",
        "XRT_PARALLEL",
    )
    release_cores: bool = _option(
        False,
        FLAG,
        "Whether the threads of executables on a CPU sleep once a call is done. Some libraries' spin for some "
        "milliseconds, to begin the next call sooner, and keep a core from what the program computes in between.",
        "XRT_RELEASE_CORES",
    )
    use_fp16: bool = _option(
        False,
        FLAG,
        "Compute in float16 what may be (docs/precision.md). Inputs and outputs keep their types.",
        "FLAGS_use_fp16",
    )
    use_bf16: bool = _option(
        False,
        FLAG,
        "Compute in bfloat16 what may be (docs/precision.md). Inputs and outputs keep their types.",
        "FLAGS_use_bf16",
    )
    precision: str | tuple[tuple[str, str], ...] = _option(
        (),
        PRECISION,
        "A type: short for `use_fp16` or `use_bf16`. A mapping: what these nodes compute in, whatever the lists say; "
        "names are patterns with * and ?.",
        "XRT_PRECISION",
    )
    accuracy: Accuracy | None = _option(  # noqa: RUF009 - it makes a dataclasses.field
        None,
        ACCURACY,
        "How far outputs may be off, relative to their size, for the sake of speed: forms of the model in bfloat16, "
        "float16 and int8 are tried in the background, and the fastest whose measured error stays within this answers "
        "(docs/precision.md). For inference; not given, results are the model's own.",
        "XRT_ACCURACY",
    )
    strict_types: bool = _option(
        False,
        FLAG,
        "Every node computes in the types that the model says; only nodes that `precision` marks are lowered.",
        "FLAGS_strict_types",
    )
    force_precision_constraints: bool = _option(
        False,
        FLAG,
        "What `precision` says of a node is obeyed, or it is an error that names the node; otherwise it is followed "
        "where possible.",
        "FLAGS_force_precision_constraints",
    )
    use_int8: bool = _option(
        False,
        FLAG,
        "Quantise to 8-bit integers by the ranges in `int8_calibration` (docs/precision.md).",
        "FLAGS_use_int8",
    )
    int8_calibration: str | None = _option(
        None,
        PLACE,
        "Folder of the ranges that `xrt.ptq_calibration_mode` recorded.",
        "FLAGS_int8_calibration",
    )
    cache_size: int = _option(
        64,
        integer(1),
        "Signatures whose plans and executables a module keeps; the least recently used goes first. Not given: of a "
        "graph as many as `executable_bytes` allows.",
    )
    executable_bytes: int | None = _option(
        None,
        BYTES,
        "What the executables of a graph's signatures, and of its buckets, may take in memory, by estimate; those used "
        "longest ago go first. Not given: a quarter of the machine's memory.",
        "XRT_EXECUTABLE_BYTES",
    )
    buckets: str | tuple[tuple[str, tuple[int, ...]], ...] = _option(
        "off",
        BUCKETS,
        "Inputs whose sizes vary are padded to buckets, so that an engine of static shapes compiles once per bucket; "
        "only where padding is proven harmless, and as they are otherwise (docs/padding.md). 'auto': sizes follow from "
        "those that are seen.",
        "XRT_BUCKETS",
    )
    # On by default: what is stored is checked before it is used, a failure of the disk costs nothing but the saving,
    # the size is bounded, and unchanged weights are not hashed again. Engines that cannot serialise never touch it.
    cache: str = _option(
        "readwrite",
        CACHE,
        "The cache of executables on disk (docs/cache.md). 'read' stores nothing; 'verify' compiles what is stored "
        "again and compares results; 'off' keeps executables in memory only. A URL such as 's3://bucket/xrt': a store "
        "that machines share, behind the disk (docs/distributed.md).",
        "XRT_CACHE_MODE",
    )
    cache_dir: str | None = _option(
        None, FOLDER, "Folder of the cache on disk. Not given: the user's cache folder.", "XRT_CACHE_DIR"
    )
    cache_bytes: int = _option(
        4 << 30,
        BYTES,
        "What the cache on disk may take; what was used longest ago goes first.",
        "XRT_CACHE_SIZE",
    )
    constant_fold_limit: int = _option(
        1 << 16, integer(0, " (bytes)"), "Largest result that constant folding may put in the place of a node."
    )
    guard: bool | Literal["isolated"] | None = _option(
        None,
        flag_or("isolated"),
        "The guard (docs/guard.md): compiles in the background and in a worker process, verifies results against the "
        "host, watches what is live, and falls back to the host. Not given: on, and timed where no engine is named; "
        "True: timed with any engine; 'isolated': engines run in a child process for good; False: engines run as they "
        "are.",
        "XRT_GUARD",
    )
    guard_async: bool | None = _option(
        None,
        FLAG,
        "Compile in the background; the host answers meanwhile. Not given, as for the next two: what `guard` says.",
        "XRT_GUARD_ASYNC",
    )
    guard_sandbox: bool | None = _option(
        None, FLAG, "Compile and verify in a worker process, which may crash, hang or run out of memory.",
        "XRT_GUARD_SANDBOX",
    )  # fmt: skip
    guard_verify: bool | None = _option(
        None, FLAG, "Check an executable's results against a reference before it may answer.", "XRT_GUARD_VERIFY"
    )
    guard_tune: bool | None = _option(
        None,
        FLAG,
        "Time the engines that take a cluster, and the host; the fastest keeps it. Not given: on with `guard=True` and "
        "with `engine='auto'`, which is this with every engine that is ready and the default where no engine is named.",
        "XRT_GUARD_TUNE",
    )
    guard_timeout: float = _option(
        600.0,
        SOME_SECONDS,
        "Longest time that compiling and verifying one cluster may take.",
        "XRT_GUARD_TIMEOUT",
    )
    guard_memory: int | None = _option(
        None,
        BYTES,
        "Memory that a worker may hold, without mapped weights. Not given: half of the machine's.",
        "XRT_GUARD_MEMORY",
    )
    guard_failures: int = _option(
        3, integer(1), "Failed runs after which the host takes the cluster back.", "XRT_GUARD_FAILURES"
    )
    guard_retry: float = _option(
        60.0,
        SECONDS,
        "Time until a failed cluster is tried again; each further wait is four times longer, up to an hour. 0: never.",
        "XRT_GUARD_RETRY",
    )
    guard_run_timeout: float | None = _option(
        None,
        SECONDS,
        "Longest time that one run of an executable may take before the host answers instead; costs some 20 us a call. "
        "0: no limit. Not given: a hundred times what the host takes, at least 10 s, for an executable's first runs, "
        "and afterwards for one that takes 2 ms or more, or is isolated.",
        "XRT_GUARD_RUN_TIMEOUT",
    )
    guard_shadow: int | None = _option(
        None,
        integer(0),
        "Every how many calls of a cluster the host runs it too and must agree. 0: never. Not given: where results are "
        "verified, calls 1, 2, 4, 8, ..., then as many as take 1 % of the time, in the background.",
        "XRT_GUARD_SHADOW",
    )
    guard_real_inputs: bool = _option(
        False,
        FLAG,
        "The inputs of a first call may be used to verify executables; they are written to a temporary file then.",
        "XRT_GUARD_REAL_INPUTS",
    )
    nan: Literal["host", "engine"] = _option(
        "host",
        choice("host", "engine"),
        "Who runs a cluster whose engine is right for finite inputs only, when NaN or infinity comes in: the host, "
        "which costs a look at the floating inputs of each call, or the engine all the same.",
        "XRT_NAN",
    )
    check_indices: bool = _option(
        False,
        FLAG,
        "Where the host computes with CuPy, which checks no bounds, an index out of range is an error as it is with "
        "NumPy; costs a download of the indices of each such node. In training: indices that a model computes are "
        "computed on the host before each step and checked.",
        "XRT_CHECK_INDICES",
    )
    verify: bool = _option(False, FLAG, "Check the graph against the IR's rules after every stage.", "XRT_VERIFY")
    switches: tuple[tuple[str, bool], ...] = ()
    left_out: tuple[str, ...] = ()
    sections: Mapping[str, Mapping[str, Any]] = dataclasses.field(
        default_factory=lambda: MappingProxyType({}), repr=False, compare=False
    )
    sources: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: MappingProxyType({}), repr=False, compare=False
    )

    @property
    def narrow(self) -> str | None:
        """What float32 is lowered to where the lists allow it: "float16", "bfloat16" or None."""
        if self.use_fp16 or self.precision == "float16":
            return "float16"
        return "bfloat16" if self.use_bf16 or self.precision == "bfloat16" else None

    @property
    def prefers_placement(self) -> bool:
        """Whether a placement that cannot be had is given up, rather than an error."""
        return any(pattern == PREFER for pattern, _ in self.placement)

    def without_lowering(self) -> Options:
        """The same options for a graph whose precision has been seen to."""
        return dataclasses.replace(self, use_fp16=False, use_bf16=False, precision=())

    def switch(self, name: str) -> bool | None:
        """The value of an engine's switch, such as "use_<engine>"; None if it is not set."""
        return dict(self.switches).get(name)

    def section(self, name: str) -> Mapping[str, Any]:
        """The options that a plugin declares, with their values. Raises OptionError where it declares none."""
        if name in self.sections:
            return self.sections[name]
        found = find_section(name)
        if found is None:
            raise OptionError(f"no installed plugin declares options in a section {name!r}")
        return MappingProxyType({o.name: o.default for o in found.options.values()})

    @property
    def auto(self) -> bool:
        """Whether the fastest of all engines that are ready gets each cluster: engine="auto", and what holds where
        nobody says anything about engines and results are verified. Training takes the engines in their order."""
        if self.engine is not None:
            return self.engine == (AUTO,)
        unsaid = self.target is None and self.phase == "inference" and not any(on for _, on in self.switches)
        return unsaid and False not in (self.guard, self.guard_verify, self.guard_tune)

    def source(self, name: str) -> str:
        """Where the value of option `name` came from: 'keyword ...', 'xrt.config...', 'environment variable ...',
        or 'default'. Raises OptionError for an unknown option."""
        if name not in self.sources and name not in TABLE and find_switch(name) is None:
            raise unknown(name)
        return self.sources.get(name, "default")


TABLE: Final[Mapping[str, Option]] = MappingProxyType(
    {
        f.name: Option(f.name, f.metadata["kind"], f.default, f.metadata["env"], f.metadata["help"])
        for f in dataclasses.fields(Options)
        if "kind" in f.metadata
    }
)
"""Every option by name, in the order of the documentation."""
CORE_VARIABLES.update((o.env, o.name) for o in TABLE.values() if o.env)


def unknown(name: str) -> OptionError:
    """The error for a name that is no option."""
    close = difflib.get_close_matches(str(name), TABLE, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    if str(name).startswith(PREFIX):
        return OptionError(f"unknown option {name!r} (keyword): {hint}{why_undeclared(name)}")
    return OptionError(f"unknown option {name!r} (keyword): {hint}options are {', '.join(TABLE)}")

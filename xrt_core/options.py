"""The one table of options: each field of `Options` carries its kind, default, environment variable and help.

Keyword arguments win over `xrt.config`, which wins over environment variables, which win over the defaults.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal

from xrt_core import config
from xrt_core.errors import OptionError
from xrt_core.ir.annotations import Phase

AUTO: Final = "auto"
"""The engine's name that stands for every engine that is ready, the fastest of which the guard chooses."""
HUGE: Final = (1 << 63) - 1
"""The default of bounds that bound nothing."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What an option takes. takes: in words. accept: Python value -> clean value; parse: text -> clean value.

    Both raise ValueError or TypeError for a value that does not fit; the text of a `_Reason` reaches the user.
    """

    takes: str
    accept: Callable[[Any], Any]
    parse: Callable[[str], Any]


class _Reason(ValueError):
    """A value does not fit, for a reason that the words of `takes` do not give."""


@dataclass(frozen=True, slots=True)
class Option:
    """One row of the table. env: the environment variable, "" if it has none."""

    name: str
    kind: Kind
    default: Any
    env: str
    help: str


def _accept_flag(value: Any) -> bool:
    if isinstance(value, bool) or type(value).__name__ in ("bool", "bool_"):  # numpy's bool as well
        return bool(value)
    raise TypeError


def _parse_flag(text: str) -> bool:
    low = text.strip().lower()
    if low in ("1", "true", "on", "yes"):
        return True
    if low in ("0", "false", "off", "no"):
        return False
    raise ValueError


_FLAG = Kind("True or False (in the environment: 1/0, true/false, on/off, yes/no)", _accept_flag, _parse_flag)


def _integer(low: int, unit: str = "") -> Kind:
    def check(value: int) -> int:
        if not low <= value <= HUGE:
            raise ValueError
        return value

    def accept(value: Any) -> int:
        if isinstance(value, bool):
            raise TypeError
        return check(operator.index(value))

    return Kind(f"an integer of at least {low}{unit}", accept, lambda text: check(int(text)))


def _choice(*values: str) -> Kind:
    def accept(value: Any) -> str:
        if value not in values:
            raise ValueError
        return str(value)

    return Kind(" or ".join(repr(v) for v in values), accept, lambda text: accept(text.strip()))


_DEVICE_FORM = re.compile(r"(cpu|cuda|tpu)(:\d+)?")


def _accept_device(value: Any) -> str:
    if not isinstance(value, str) or _DEVICE_FORM.fullmatch(value) is None:
        raise ValueError
    return value


_DEVICE = Kind("'cpu', 'cuda' or 'tpu', with an index if need be, such as 'cuda:1'", _accept_device, _accept_device)


def _accept_engines(value: Any) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(n, str) and n for n in names):
        raise TypeError
    if not names:
        raise _Reason("to run without engines, say engine='host'")
    if len(set(names)) != len(names):
        raise _Reason("an engine is named twice")
    if AUTO in names and len(names) > 1:
        raise _Reason("'auto' is every engine that is ready, so it stands alone")
    if "host" in names[:-1]:
        raise _Reason("the host takes what is left, so 'host' stands alone or last")
    return names


_ENGINES = Kind(
    "the name of an engine, a list of names in the order to try them, 'auto' for the fastest, or 'host' for none",
    _accept_engines,
    lambda text: _accept_engines([n.strip() for n in text.split(",")]),
)


_CACHE_MODES: Final = ("readwrite", "read", "verify", "off")


def _accept_cache(value: Any) -> str:
    if isinstance(value, str):
        if value not in _CACHE_MODES:
            raise ValueError
        return value
    return "readwrite" if _accept_flag(value) else "off"


def _parse_cache(text: str) -> str:
    low = text.strip().lower()
    return low if low in _CACHE_MODES else _accept_cache(_parse_flag(low))


_CACHE = Kind("'readwrite' (or True), 'read', 'verify' or 'off' (or False)", _accept_cache, _parse_cache)


def _accept_folder(value: Any) -> str:
    path = os.fspath(value)
    if not isinstance(path, str) or "\0" in path or not os.path.isabs(os.path.expanduser(path)):
        raise ValueError  # a relative one would be another folder for a process that runs elsewhere
    return path


def _accept_parallel(value: Any) -> bool | str:
    return str(value) if isinstance(value, str) and value == "auto" else _accept_flag(value)


def _parse_parallel(text: str) -> bool | str:
    return "auto" if text.strip().lower() == "auto" else _parse_flag(text)


_PARALLEL = Kind("'auto', True or False", _accept_parallel, _parse_parallel)
_FOLDER = Kind(
    "a folder's path, absolute or beginning with '~'", _accept_folder, lambda text: _accept_folder(text.strip())
)
_BYTES_FORM = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)


def _accept_bytes(value: Any) -> int:
    if isinstance(value, str):
        return _parse_bytes(value)
    if isinstance(value, bool):
        raise TypeError
    count = operator.index(value)
    if not 0 <= count <= HUGE:
        raise ValueError
    return count


def _parse_bytes(text: str) -> int:
    found = _BYTES_FORM.fullmatch(text.strip())
    if found is None:
        raise ValueError
    return _accept_bytes(int(float(found[1]) * 1024 ** " KMGT".index(found[2].upper() or " ")))


_BYTES = Kind("a number of bytes, such as 500000000, '500M' or '4G'", _accept_bytes, _parse_bytes)


def _accept_seconds(value: Any) -> float:
    if isinstance(value, bool | str):
        raise TypeError
    seconds = float(value)
    if not 0 <= seconds < math.inf:
        raise ValueError
    return seconds


_SECONDS = Kind("a number of seconds, 0 or more", _accept_seconds, lambda text: _accept_seconds(float(text)))


def _some_seconds(value: Any) -> float:
    if (seconds := _accept_seconds(value)) == 0:
        raise ValueError
    return seconds


_SOME_SECONDS = Kind("a number of seconds above 0", _some_seconds, lambda text: _some_seconds(float(text)))


_NARROW: Final = MappingProxyType(
    {"fp16": "float16", "float16": "float16", "half": "float16", "bf16": "bfloat16", "bfloat16": "bfloat16"}
)
_PRECISIONS: Final = MappingProxyType({**_NARROW, "fp32": "float32", "float32": "float32"})


def _accept_precision(value: Any) -> str | tuple[tuple[str, str], ...]:
    if isinstance(value, str):
        if value.strip() not in _PRECISIONS:
            raise _Reason(f"there is no such type{_near_precision(value)}")
        return _PRECISIONS[value.strip()]
    rows = value.items() if isinstance(value, Mapping) else value
    made: dict[str, str] = {}
    for key, dtype in rows:
        kind, colon, pattern = str(key).partition(":")
        if kind not in ("op", "name") or not colon or not pattern:
            close = difflib.get_close_matches(kind, ("op", "name"), 1)
            raise _Reason(
                f"{key!r} names no nodes: say 'op:OPERATOR' or 'name:PATTERN'"
                + (f" (did you mean '{close[0]}:{pattern}'?)" if close and pattern else "")
            )
        if not isinstance(dtype, str) or dtype not in _PRECISIONS:
            raise _Reason(f"{key!r} cannot be computed in {dtype!r}{_near_precision(dtype)}")
        made[f"{kind}:{pattern}"] = _PRECISIONS[dtype]
    return tuple(made.items())


def _near_precision(value: Any) -> str:
    close = difflib.get_close_matches(str(value), _PRECISIONS, 1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _parse_precision(text: str) -> str | tuple[tuple[str, str], ...]:
    if "=" not in text:
        return _accept_precision(text)
    return _accept_precision([part.strip().rpartition("=")[::2] for part in text.split(",")])


_PRECISION = Kind(
    "'fp16', 'bf16' or 'fp32', or a mapping from 'op:OPERATOR' and 'name:PATTERN' to one of them (in the environment: "
    "op:Softmax=fp32,name:head/*=bf16)",
    _accept_precision,
    _parse_precision,
)


def _accept_marks(value: Any) -> tuple[tuple[str, str], ...] | bool:
    if value is False:
        return False
    if isinstance(value, str):
        raise TypeError
    rows = value.items() if isinstance(value, Mapping) else value
    made: dict[str, str] = {}
    for key, engine in rows:
        kind, colon, pattern = str(key).partition(":")
        if kind not in ("op", "name") or not colon or not pattern:
            raise _Reason(f"{key!r} names no nodes: say 'name:PATTERN' or 'op:OPERATOR'")
        if engine is not None and not (isinstance(engine, str) and engine.isidentifier()):
            raise _Reason(f"{key!r} is marked for {engine!r}, which is no engine's name")
        if made.setdefault(str(key), engine or "host") != (engine or "host"):
            raise _Reason(f"{key!r} is marked for {made[str(key)]!r} and for {engine!r}")
    return tuple(made.items())


def _parse_marks(text: str) -> tuple[tuple[str, str], ...] | bool:
    if "=" not in text:
        if _parse_flag(text):
            raise ValueError
        return False
    return _accept_marks([part.strip().rpartition("=")[::2] for part in text.split(",")])


_MARKS = Kind(
    "a mapping from 'name:PATTERN' and 'op:OPERATOR' to an engine's name, 'host' or None, or False (as text: "
    "name:encoder/*=xla,op:Softmax=host)",
    _accept_marks,
    _parse_marks,
)


def _accept_trace(value: Any) -> str:
    text = str(value) if isinstance(value, bool) else os.fspath(value).strip()
    low = text.lower()
    if low in ("1", "true", "on", "yes"):
        return "1"
    if low in ("", "0", "false", "off", "no"):
        return ""
    # a word that is no path is a misspelt switch rather than a folder
    if not isinstance(text, str) or "\0" in text or not (os.sep in text or text.startswith((".", "~"))):
        raise ValueError
    return text


_TRACE = Kind(
    "a folder's path ('./trace', '/tmp/trace'), True (1) for a line of the log a pass, or False (0)",
    _accept_trace,
    _accept_trace,
)


def _accept_engine_options(value: Any) -> str:
    given = json.loads(value) if isinstance(value, str) else value
    if not isinstance(given, Mapping):
        raise TypeError
    for engine, own in given.items():
        if not isinstance(own, Mapping) or not all(isinstance(k, str) for k in own):
            raise _Reason(f"what it says of engine {engine!r} is {own!r}, and no mapping of options")
    try:
        return json.dumps(given, sort_keys=True, default=dict)
    except TypeError as e:
        raise _Reason(f"engines take numbers, texts, True, False, lists and mappings of these ({e})") from None


def _parse_engine_options(text: str) -> str:
    if text.lstrip().startswith("{"):
        return _accept_engine_options(text)
    made: dict[str, dict[str, Any]] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        engine, dot, option = name.partition(".")
        if not (equals and dot and engine and option):
            raise _Reason(f"{part.strip()!r} is not ENGINE.OPTION=VALUE")
        try:
            found = json.loads(value)
        except ValueError:
            found = {"True": True, "False": False}.get(value, value)
        made.setdefault(engine, {})[option] = found
    return _accept_engine_options(made)


_ENGINE_OPTIONS = Kind(
    "a mapping from an engine's name to a mapping of its own options (as text: ENGINE.OPTION=VALUE,... or JSON)",
    _accept_engine_options,
    _parse_engine_options,
)


def _accept_target(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError
    return value.strip()


_TARGET = Kind("a kind of device in the words of the engine, such as 'sm_89'", _accept_target, _accept_target)


def _option(default: Any, kind: Kind, help: str, env: str = "") -> Any:
    return dataclasses.field(default=default, metadata={"kind": kind, "env": env, "help": help})


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Every option with its value; made by `resolve`. Hashable and comparable by the values alone."""

    engine: tuple[str, ...] | None = _option(
        None,
        _ENGINES,
        "Engines to use, tried in this order on what is left. Not given: the switches below decide, and where they say "
        "nothing, every engine that is ready takes part, in the order of the phase.",
    )
    phase: Phase = _option(  # noqa: RUF009 - it makes a dataclasses.field
        "inference", _choice("inference", "train"), "What the graph is run for; decides engine order and kernels."
    )
    device: str | None = _option(
        None, _DEVICE, "Device that engines compile for. Not given: the first usable device of each engine."
    )
    target: str | None = _option(
        None,
        _TARGET,
        "Kind of device to compile for that need not be here, for `save` and `xrt compile`; the engines must be named, "
        "and what cannot run here the host runs.",
    )
    engine_options: str | None = _option(
        None,
        _ENGINE_OPTIONS,
        "Options of single engines, by the engine's name: engine_options={'tensorrt': {'optimization_level': 5}}. Each "
        "engine's page lists its own.",
    )
    use_xla_jit: bool | None = _option(
        None,
        _FLAG,
        "Without `engine`: True uses only engines switched on like this, False leaves XLA out.",
        "FLAGS_use_xla_jit",
    )
    use_tensorrt: bool | None = _option(
        None,
        _FLAG,
        "Without `engine`: True uses only engines switched on like this, False leaves TensorRT out.",
        "FLAGS_use_tensorrt",
    )
    # One, not a larger number: the count of nodes says little about the work in them (a model may be one Attention or
    # Conv node), and a Launch of one node costs a few microseconds. Who knows their graph better raises it.
    minimum_nodes: int = _option(
        1, _integer(1), "Clusters with fewer nodes are dissolved.", "FLAGS_clustering_minimum_nodes"
    )
    maximum_nodes: int = _option(
        HUGE, _integer(1), "Clusters do not grow beyond this many nodes.", "FLAGS_clustering_maximum_nodes"
    )
    strict: bool = _option(
        True, _FLAG, "Folding must not delay any node outside the cluster.", "FLAGS_strict_clustering"
    )
    merge_updates: bool = _option(
        False, _FLAG, "Updates of variables may share a cluster with what computes their gradients."
    )
    prune: bool = _option(
        True,
        _FLAG,
        "Dissolve clusters that are estimated to save nothing, where the host has nodes anyway (docs/partitioning.md).",
        "XRT_PRUNE",
    )
    marks: tuple[tuple[str, str], ...] | bool = _option(
        (),
        _MARKS,
        "Nodes marked for an engine, or for the host, by name or operator; names are patterns with * and ?. False: all "
        "marks are ignored, those of the model too (docs/partitioning.md).",
    )
    automatic: bool | None = _option(
        None,
        _FLAG,
        "Whether nodes without a mark are offered to engines. Not given: where no node is marked for an engine, or "
        "`xrt.init_subblock_optimizer` was called.",
    )
    trace: str = _option(
        "",
        _TRACE,
        "A folder: the graph before and after every pass is written into it, with times. True: a line of the log for "
        "each pass.",
        "XRT_TRACE",
    )
    max_workspace_bytes: int | None = _option(
        None,
        _integer(1, " (bytes)"),
        "Scratch memory that an engine may use for one executable, where the engine has such a limit. Not given: the "
        "engine's own.",
        "FLAGS_max_workspace_bytes",
    )
    max_batch_size: int | None = _option(
        None, _integer(1), "Largest batch that engines which need to know it prepare for.", "FLAGS_max_batch_size"
    )
    threads: int | None = _option(
        None,
        _integer(1),
        "Threads inside one operator of an executable on a CPU. Not given: the engine's default, with `parallel=True` "
        "the cores divided by the number of engines. XLA uses all cores whatever is said here.",
    )
    # Tried rather than foretold: whether two engines get in each other's way depends on the machine and on both.
    parallel: bool | Literal["auto"] = _option(
        "auto",
        _PARALLEL,
        "Whether independent clusters of different engines or devices run at the same time. 'auto': where they have "
        "work enough, the first calls try it, and it stays where it is faster. False: one after another.",
        "XRT_PARALLEL",
    )
    use_fp16: bool = _option(
        False,
        _FLAG,
        "Compute in float16 what may be (docs/precision.md). Inputs and outputs keep their types.",
        "FLAGS_use_fp16",
    )
    use_bf16: bool = _option(
        False,
        _FLAG,
        "Compute in bfloat16 what may be (docs/precision.md). Inputs and outputs keep their types.",
        "FLAGS_use_bf16",
    )
    precision: str | tuple[tuple[str, str], ...] = _option(
        (),
        _PRECISION,
        "A type: short for `use_fp16` or `use_bf16`. A mapping: what these nodes compute in, whatever the lists say; "
        "names are patterns with * and ?.",
        "XRT_PRECISION",
    )
    strict_types: bool = _option(
        False,
        _FLAG,
        "Every node computes in the types that the model says; only nodes that `precision` marks are lowered.",
        "FLAGS_strict_types",
    )
    force_precision_constraints: bool = _option(
        False,
        _FLAG,
        "What `precision` says of a node is obeyed, or it is an error that names the node; otherwise it is followed "
        "where possible.",
        "FLAGS_force_precision_constraints",
    )
    use_int8: bool = _option(
        False,
        _FLAG,
        "Quantise to 8-bit integers by the ranges in `int8_calibration` (docs/precision.md).",
        "FLAGS_use_int8",
    )
    int8_calibration: str | None = _option(
        None,
        _FOLDER,
        "Folder of the ranges that `xrt.ptq_calibration_mode` recorded.",
        "FLAGS_int8_calibration",
    )
    cache_size: int = _option(
        64, _integer(1), "Signatures whose plans and executables a module keeps; the least recently used goes first."
    )
    # On by default: what is stored is checked before it is used, a failure of the disk costs nothing but the saving,
    # the size is bounded, and unchanged weights are not hashed again. Engines that cannot serialise never touch it.
    cache: Literal["readwrite", "read", "verify", "off"] = _option(
        "readwrite",
        _CACHE,
        "The cache of executables on disk (docs/cache.md). 'read' stores nothing; 'verify' compiles what is stored "
        "again and compares results; 'off' keeps executables in memory only.",
        "XRT_CACHE_MODE",
    )
    cache_dir: str | None = _option(
        None, _FOLDER, "Folder of the cache on disk. Not given: the user's cache folder.", "XRT_CACHE_DIR"
    )
    cache_bytes: int = _option(
        4 << 30,
        _BYTES,
        "What the cache on disk may take; what was used longest ago goes first.",
        "XRT_CACHE_SIZE",
    )
    constant_fold_limit: int = _option(
        1 << 16, _integer(0, " (bytes)"), "Largest result that constant folding may put in the place of a node."
    )
    guard: bool | None = _option(
        None,
        _FLAG,
        "Safe to leave on (docs/guard.md): compiles beside the caller and in a child process, examines results and "
        "speed against the host, and falls back. Not given: off, but on with `engine='auto'`.",
        "XRT_GUARD",
    )
    guard_async: bool | None = _option(
        None,
        _FLAG,
        "Compile beside the caller; the host answers meanwhile. Not given, as for the next three: what `guard` says.",
        "XRT_GUARD_ASYNC",
    )
    guard_sandbox: bool | None = _option(
        None, _FLAG, "Compile and examine in a child process, which may crash, hang or run out of memory.",
        "XRT_GUARD_SANDBOX",
    )  # fmt: skip
    guard_verify: bool | None = _option(
        None, _FLAG, "Hold an executable's results against a reference before it may answer.", "XRT_GUARD_VERIFY"
    )
    guard_tune: bool | None = _option(
        None,
        _FLAG,
        "Time the engines that take a cluster, and the host; the fastest keeps it. `engine='auto'` is this with every "
        "engine that is ready.",
        "XRT_GUARD_TUNE",
    )
    guard_timeout: float = _option(
        600.0,
        _SOME_SECONDS,
        "Longest time that compiling and examining one cluster may take.",
        "XRT_GUARD_TIMEOUT",
    )
    guard_memory: int | None = _option(
        None,
        _BYTES,
        "Memory that the child process may hold, weights mapped from files aside. Not given: half of the machine's.",
        "XRT_GUARD_MEMORY",
    )
    guard_failures: int = _option(
        3, _integer(1), "So many failures at run time give the cluster back to the host.", "XRT_GUARD_FAILURES"
    )
    guard_retry: float = _option(
        60.0,
        _SECONDS,
        "Time until a failed cluster is tried again; each further wait is four times longer, up to an hour. 0: never.",
        "XRT_GUARD_RETRY",
    )
    guard_run_timeout: float = _option(
        0.0,
        _SECONDS,
        "Longest time that one run of an executable may take before the host answers instead; costs some 20 us a call. "
        "0: no limit.",
        "XRT_GUARD_RUN_TIMEOUT",
    )
    guard_shadow: int = _option(
        0, _integer(0), "Every so many calls of a cluster the host runs it too and must agree. 0: never.",
        "XRT_GUARD_SHADOW",
    )  # fmt: skip
    guard_real_inputs: bool = _option(
        False,
        _FLAG,
        "The inputs of a first call may be used to examine executables; they are written to a temporary file then.",
        "XRT_GUARD_REAL_INPUTS",
    )
    verify: bool = _option(False, _FLAG, "Check the graph against the IR's rules after every stage.", "XRT_VERIFY")
    sources: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: MappingProxyType({}), repr=False, compare=False
    )

    @property
    def narrow(self) -> str | None:
        """What float32 is lowered to where the lists allow it: "float16", "bfloat16" or None."""
        if self.use_fp16 or self.precision == "float16":
            return "float16"
        return "bfloat16" if self.use_bf16 or self.precision == "bfloat16" else None

    def without_lowering(self) -> Options:
        """The same options for a graph whose precision has been seen to."""
        return dataclasses.replace(self, use_fp16=False, use_bf16=False, precision=())

    def source(self, name: str) -> str:
        """Where the value of option `name` came from: 'keyword ...', 'xrt.config...', 'environment variable ...',
        or 'default'. Raises OptionError for an unknown option."""
        if name not in TABLE:
            raise _unknown(name)
        return self.sources.get(name, "default")


TABLE: Final[Mapping[str, Option]] = MappingProxyType(
    {
        f.name: Option(f.name, f.metadata["kind"], f.default, f.metadata["env"], f.metadata["help"])
        for f in dataclasses.fields(Options)
        if "kind" in f.metadata
    }
)
"""Every option by name, in the order of the documentation."""


def resolve(keywords: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> Options:
    """The options in force now: `keywords` over `xrt.config` over the environment over the defaults.

    None stands for "not given" where the default is None. environ: `os.environ` if None.
    Raises OptionError for an unknown option or a bad value, with what the option takes and the value's source.
    """
    found: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for option, value, source in _given(keywords or {}, os.environ if environ is None else environ):
        found[option.name], sources[option.name] = value, source
    options = Options(**found, sources=MappingProxyType(sources))
    if options.minimum_nodes > options.maximum_nodes:
        raise OptionError(
            f"minimum_nodes={options.minimum_nodes} ({options.source('minimum_nodes')}) is above "
            f"maximum_nodes={options.maximum_nodes} ({options.source('maximum_nodes')})"
        )
    _check_precision(options)
    return options


def _check_precision(options: Options) -> None:
    asked = {n: d for n, d in (("use_fp16", "float16"), ("use_bf16", "bfloat16")) if getattr(options, n)}
    if isinstance(options.precision, str):
        asked["precision"] = options.precision
    if len(set(asked.values())) > 1:
        shown = " and ".join(f"{n}={getattr(options, n)!r} ({options.source(n)})" for n in asked)
        raise OptionError(
            f"{shown} contradict each other: a graph is lowered to one type; mark single nodes with "
            "precision={'name:...': ...}"
        )
    if options.use_int8 and options.int8_calibration is None:
        raise OptionError(
            f"use_int8=True ({options.source('use_int8')}) needs int8_calibration=, the folder of the recorded ranges; "
            "record them with: with xrt.ptq_calibration_mode(folder): XRTModule(model)(inputs)"
        )


def from_text(name: str, text: str, source: str) -> Any:
    """The value that `text` stands for as option `name`, as a command line or a file gives it.

    Raises OptionError for an unknown option or a bad value, naming `source`.
    """
    if name not in TABLE:
        raise _unknown(name)
    return _clean(TABLE[name], TABLE[name].kind.parse, text, source)


def _given(keywords: Mapping[str, Any], environ: Mapping[str, str]) -> Iterator[tuple[Option, Any, str]]:
    """Every value that someone gave, clean, from the weakest source to the strongest."""
    for option in TABLE.values():
        text = environ.get(option.env, "") if option.env else ""
        if text.strip():
            source = f"environment variable {option.env}"
            yield option, _clean(option, option.kind.parse, text, source), source
    for name, value in config.values().items():
        yield TABLE[name], value, config.source(name)
    for name, value in keywords.items():
        if name not in TABLE:
            raise _unknown(name)
        option = TABLE[name]
        if value is not None or option.default is not None:
            source = f"keyword {name}="
            yield option, _clean(option, option.kind.accept, value, source), source


def _clean(option: Option, clean: Callable[[Any], Any], value: Any, source: str) -> Any:
    try:
        return clean(value)
    except (ValueError, TypeError) as e:
        reason = f": {e}" if isinstance(e, _Reason) else ""
        raise OptionError(
            f"option {option.name!r} cannot be {value!r} (from {source}){reason}; it takes {option.kind.takes}"
        ) from None


def _unknown(name: str) -> OptionError:
    close = difflib.get_close_matches(str(name), TABLE, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return OptionError(f"unknown option {name!r} (keyword): {hint}options are {', '.join(TABLE)}")


def as_markdown() -> str:
    """The whole of docs/options.md; `python -m xrt_core.options` prints it."""
    rows = [
        "# Options",
        "",
        "Every option is a keyword argument of `XRTModule`. Keywords win over `xrt.config`",
        "(`xrt.config.use_xla_jit(True)`, `xrt.config.use_tensorrt(False)`; `None` makes them undefined again), which",
        "wins over environment variables, which win over the defaults. An unknown option or a bad value is an",
        "`OptionError` that says where it came from.",
        "",
    ]
    rows += ["| option | takes | default | environment | meaning |", "|---|---|---|---|---|"]
    for o in TABLE.values():
        default = "no bound" if o.default == HUGE else "not given" if o.default is None else f"`{o.default!r}`"
        env = f"`{o.env}`" if o.env else ""
        rows.append(f"| `{o.name}` | {o.kind.takes} | {default} | {env} | {o.help} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(as_markdown(), end="")

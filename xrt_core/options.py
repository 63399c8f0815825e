"""The one table of options: each field of `Options` carries its kind, default, environment variable and help.

Keyword arguments win over `xrt.config`, which wins over environment variables, which win over the defaults.
"""

from __future__ import annotations

import dataclasses
import difflib
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
    if "host" in names[:-1]:
        raise _Reason("the host takes what is left, so 'host' stands alone or last")
    return names


_ENGINES = Kind(
    "the name of an engine, a list of names in the order to try them, or 'host' for none",
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


def _accept_no_guard(value: Any) -> bool:
    if _accept_flag(value):
        raise _Reason("this version has no guard")
    return False


_GUARD = Kind("False", _accept_no_guard, lambda text: _accept_no_guard(_parse_flag(text)))


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
        None, _integer(1), "Threads inside one operator of an executable on a CPU. Not given: the engine's default."
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
    guard: bool = _option(
        False, _GUARD, "Asynchronous compilation with checks against the host; not part of this version."
    )
    verify: bool = _option(False, _FLAG, "Check the graph against the IR's rules after every stage.", "XRT_VERIFY")
    sources: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: MappingProxyType({}), repr=False, compare=False
    )

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
    return options


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
        yield TABLE[name], value, f"xrt.config.{name}"
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

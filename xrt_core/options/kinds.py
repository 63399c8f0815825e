"""What options take: each kind in words, for Python values and for text."""

from __future__ import annotations

import difflib
import json
import math
import operator
import os
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from msgspec import Struct

AUTO: Final = "auto"
"""The engine's name that stands for every engine that is ready, the fastest of which the guard chooses."""
HUGE: Final = (1 << 63) - 1
"""The default of bounds that bound nothing."""


class Kind(Struct, frozen=True):
    """What an option takes. takes: in words. accept: Python value -> clean value; parse: text -> clean value.

    Both raise ValueError or TypeError for a value that does not fit; the text of a `Reason` reaches the user.
    """

    takes: str
    accept: Callable[[Any], Any]
    parse: Callable[[str], Any]


class Reason(ValueError):
    """A value does not fit, for a reason that the words of `takes` do not give."""


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


def flag_or(word: str) -> Kind:
    """A flag with one more value, a word."""

    def accept(value: Any) -> bool | str:
        return word if value == word else _accept_flag(value)

    def parse(text: str) -> bool | str:
        return word if text.strip().lower() == word else _parse_flag(text)

    return Kind(f"True, False or {word!r} (in the environment: 1/0, true/false, on/off, yes/no, {word})", accept, parse)


FLAG = Kind("True or False (in the environment: 1/0, true/false, on/off, yes/no)", _accept_flag, _parse_flag)


def integer(low: int, unit: str = "") -> Kind:
    def check(value: int) -> int:
        if not low <= value <= HUGE:
            raise ValueError
        return value

    def accept(value: Any) -> int:
        if isinstance(value, bool):
            raise TypeError
        return check(operator.index(value))

    return Kind(f"an integer of at least {low}{unit}", accept, lambda text: check(int(text)))


def choice(*values: str) -> Kind:
    def accept(value: Any) -> str:
        if value not in values:
            raise ValueError
        return str(value)

    return Kind(" or ".join(repr(v) for v in values), accept, lambda text: accept(text.strip()))


_DEVICE_FORM = re.compile(r"[a-z][a-z0-9_]*(:[0-9]+)?")


def _accept_device(value: Any) -> str:
    if not isinstance(value, str) or _DEVICE_FORM.fullmatch(value) is None:
        raise ValueError
    return value


DEVICE = Kind(
    "a kind of device that `xrt doctor` lists, such as 'cpu' or 'cuda', with a number if need be ('cuda:1')",
    _accept_device,
    _accept_device,
)


def _accept_engines(value: Any) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(n, str) and n for n in names):
        raise TypeError
    if not names:
        raise Reason("to run without engines, say engine='host'")
    if len(set(names)) != len(names):
        raise Reason("an engine is named twice")
    if AUTO in names and len(names) > 1:
        raise Reason("'auto' is every engine that is ready, so it stands alone")
    if "host" in names[:-1]:
        raise Reason("the host takes what is left, so 'host' stands alone or last")
    return names


ENGINES = Kind(
    "the name of an engine, a list of names in the order to try them, 'auto' for the fastest, or 'host' for none",
    _accept_engines,
    lambda text: _accept_engines([n.strip() for n in text.split(",")]),
)


_CACHE_MODES: Final = ("readwrite", "read", "verify", "off")


def _accept_cache(value: Any) -> str:
    if isinstance(value, str):
        if value not in _CACHE_MODES and not re.match(r"\w[\w+.-]*://.", value):
            raise ValueError
        return value
    return "readwrite" if _accept_flag(value) else "off"


def _parse_cache(text: str) -> str:
    low = text.strip().lower()
    return low if low in _CACHE_MODES else _accept_cache(text.strip() if "://" in low else _parse_flag(low))


CACHE = Kind(
    "'readwrite' (or True), 'read', 'verify', 'off' (or False), or the URL of a shared store",
    _accept_cache,
    _parse_cache,
)


def _accept_folder(value: Any) -> str:
    path = os.fspath(value)
    if not isinstance(path, str) or "\0" in path or not os.path.isabs(os.path.expanduser(path)):
        raise ValueError  # a relative one would be another folder for a process that runs elsewhere
    return path


def _accept_place(value: Any) -> str:
    path = os.path.expanduser(os.fspath(value))
    if not isinstance(path, str) or not path or "\0" in path:
        raise ValueError
    return os.path.abspath(path)


FOLDER = Kind(
    "a folder's path, absolute or beginning with '~'", _accept_folder, lambda text: _accept_folder(text.strip())
)
PLACE = Kind(
    "a folder's path; a relative one begins where the process is then",
    _accept_place,
    lambda text: _accept_place(text.strip()),
)


def _accept_libraries(value: Any) -> tuple[str, ...]:
    paths = (value,) if isinstance(value, str | os.PathLike) else tuple(value)
    return tuple(dict.fromkeys(map(_accept_place, paths)))


LIBRARIES = Kind(
    f"the path of a library, or a list of such paths (as text: paths with {os.pathsep!r} between them)",
    _accept_libraries,
    lambda text: _accept_libraries([part.strip() for part in text.split(os.pathsep)]),
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


BYTES = Kind("a number of bytes, such as 500000000, '500M' or '4G'", _accept_bytes, _parse_bytes)


def _accept_seconds(value: Any) -> float:
    if isinstance(value, bool | str):
        raise TypeError
    seconds = float(value)
    if not 0 <= seconds < math.inf:
        raise ValueError
    return seconds


SECONDS = Kind("a number of seconds, 0 or more", _accept_seconds, lambda text: _accept_seconds(float(text)))


def _some_seconds(value: Any) -> float:
    if (seconds := _accept_seconds(value)) == 0:
        raise ValueError
    return seconds


SOME_SECONDS = Kind("a number of seconds above 0", _some_seconds, lambda text: _some_seconds(float(text)))


_NARROW: Final = MappingProxyType(
    {"fp16": "float16", "float16": "float16", "half": "float16", "bf16": "bfloat16", "bfloat16": "bfloat16"}
)
_PRECISIONS: Final = MappingProxyType({**_NARROW, "fp32": "float32", "float32": "float32"})


def _accept_precision(value: Any) -> str | tuple[tuple[str, str], ...]:
    if isinstance(value, str):
        if value.strip() not in _PRECISIONS:
            raise Reason(f"there is no such type{_near_precision(value)}")
        return _PRECISIONS[value.strip()]
    rows = value.items() if isinstance(value, Mapping) else value
    made: dict[str, str] = {}
    for key, dtype in rows:
        kind, colon, pattern = str(key).partition(":")
        if kind not in ("op", "name") or not colon or not pattern:
            close = difflib.get_close_matches(kind, ("op", "name"), 1)
            raise Reason(
                f"{key!r} names no nodes: say 'op:OPERATOR' or 'name:PATTERN'"
                + (f" (did you mean '{close[0]}:{pattern}'?)" if close and pattern else "")
            )
        if not isinstance(dtype, str) or dtype not in _PRECISIONS:
            raise Reason(f"{key!r} cannot be computed in {dtype!r}{_near_precision(dtype)}")
        made[f"{kind}:{pattern}"] = _PRECISIONS[dtype]
    return tuple(made.items())


def _near_precision(value: Any) -> str:
    close = difflib.get_close_matches(str(value), _PRECISIONS, 1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _parse_precision(text: str) -> str | tuple[tuple[str, str], ...]:
    if "=" not in text:
        return _accept_precision(text)
    return _accept_precision([part.strip().rpartition("=")[::2] for part in text.split(",")])


PRECISION = Kind(
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
            raise Reason(f"{key!r} names no nodes: say 'name:PATTERN' or 'op:OPERATOR'")
        if engine is not None and not (isinstance(engine, str) and engine.isidentifier()):
            raise Reason(f"{key!r} is marked for {engine!r}, which is no engine's name")
        if made.setdefault(str(key), engine or "host") != (engine or "host"):
            raise Reason(f"{key!r} is marked for {made[str(key)]!r} and for {engine!r}")
    return tuple(made.items())


def _parse_marks(text: str) -> tuple[tuple[str, str], ...] | bool:
    if "=" not in text:
        if _parse_flag(text):
            raise ValueError
        return False
    return _accept_marks([part.strip().rpartition("=")[::2] for part in text.split(",")])


MARKS = Kind(
    "a mapping from 'name:PATTERN' and 'op:OPERATOR' to an engine's name, 'host' or None, or False (as text: "
    "name:encoder/*=ENGINE,op:Softmax=host)",
    _accept_marks,
    _parse_marks,
)


OBEY, PREFER = "obey", "prefer"


def _accept_placement(value: Any) -> tuple[tuple[str, str], ...]:
    """Rows (pattern, device); one row (PREFER, "") where a placement that cannot be had is given up."""
    if isinstance(value, str):
        if value not in (OBEY, PREFER):
            raise ValueError
        return ((PREFER, ""),) if value == PREFER else ()
    rows: Any = value.items() if isinstance(value, Mapping) else value
    if isinstance(rows, tuple) and len(rows) == 2 and rows[0] in (OBEY, PREFER) and isinstance(rows[1], Mapping):
        return (*_accept_placement(rows[0]), *_accept_placement(rows[1]))
    made: dict[str, str] = {}
    for key, device in rows:
        kind, colon, pattern = str(key).partition(":")
        if (str(key), device) == (PREFER, ""):
            made[PREFER] = ""
            continue
        if kind not in ("op", "name") or not colon or not pattern:
            raise Reason(f"{key!r} names no nodes: say 'name:PATTERN' or 'op:OPERATOR'")
        made[str(key)] = _accept_device(device)
    return tuple(made.items())


def _parse_placement(text: str) -> tuple[tuple[str, str], ...]:
    parts = [part.strip() for part in text.split(",")]
    rows: list[tuple[str, str]] = [*_accept_placement(parts.pop(0))] if "=" not in parts[0] else []
    return _accept_placement([*rows, *(part.rpartition("=")[::2] for part in parts)])


PLACEMENT = Kind(
    "a mapping from 'name:PATTERN' and 'op:OPERATOR' to a device, 'prefer', or ('prefer', mapping) (as text: "
    "name:decoder/*=cuda:1, or prefer,name:decoder/*=cuda:1)",
    _accept_placement,
    _parse_placement,
)


def _accept_mesh(value: Any) -> Any:
    from xrt_core.errors import OptionError
    from xrt_core.ir.sharding import Mesh

    if isinstance(value, Mesh):
        return value
    if not isinstance(value, str | Mapping):
        raise ValueError
    try:
        return Mesh(value) if isinstance(value, Mapping) else Mesh.parse(value)
    except OptionError as e:
        raise Reason(str(e)) from None


MESH = Kind("an xrt.Mesh, or axes with their sizes (as text: data=4,model=2)", _accept_mesh, _accept_mesh)


def _accept_sharding(value: Any) -> tuple[tuple[str, str], ...] | str:
    if isinstance(value, str):
        if value != "auto":
            raise ValueError
        return value
    from xrt_core.errors import OptionError
    from xrt_core.ir.sharding import sharding_text

    rows = value.items() if isinstance(value, Mapping) else value
    try:
        made = tuple((str(pattern), sharding_text(sbp)) for pattern, sbp in rows)
    except OptionError as e:
        raise Reason(str(e)) from None
    if not all(pattern and sbp for pattern, sbp in made):
        raise ValueError
    return made


def _parse_sharding(text: str) -> tuple[tuple[str, str], ...] | str:
    if text.strip() == "auto":
        return "auto"
    return _accept_sharding([part.strip().partition("=")[::2] for part in text.split(";")])


SHARDING = Kind(
    "'auto', or a mapping from patterns of names of inputs, weights or other values to how they lie on the mesh, such "
    "as {'encoder.*.weight': 'model:S(1)'} or {'x': {'data': xrt.sbp.S(0)}} (as text: x=data:S(0);w=model:S(1))",
    _accept_sharding,
    _parse_sharding,
)


def _accept_buckets(value: Any) -> str | tuple[tuple[str, tuple[int, ...]], ...]:
    if isinstance(value, str):
        if value not in ("off", "auto"):
            raise ValueError
        return value
    rows = value.items() if isinstance(value, Mapping) else value
    made: dict[str, tuple[int, ...]] = {}
    for symbol, sizes in rows:
        listed = tuple(sorted({int(n) for n in ([sizes] if isinstance(sizes, int) else sizes)}))
        if not isinstance(symbol, str) or not symbol:
            raise Reason(f"{symbol!r} is no symbol: give the name of a dimension of the model")
        if not listed or listed[0] < 1:
            raise Reason(f"the sizes of {symbol!r} are {list(listed)}: give one or more, each at least 1")
        made[symbol] = listed
    if not made:
        raise ValueError
    return tuple(made.items())


def _parse_buckets(text: str) -> str | tuple[tuple[str, tuple[int, ...]], ...]:
    if "=" not in text:
        return _accept_buckets(text.strip())
    rows = [part.strip().partition("=")[::2] for part in text.split(";")]
    return _accept_buckets([(name, [int(n) for n in sizes.split(",")]) for name, sizes in rows])


BUCKETS = Kind(
    "'off', 'auto', or a mapping from the model's symbols to sizes, such as {'batch': (1, 8), 'sequence': (64, 256)} "
    "(as text: batch=1,8;sequence=64,256)",
    _accept_buckets,
    _parse_buckets,
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


TRACE = Kind(
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
            raise Reason(f"what it says of engine {engine!r} is {own!r}, and no mapping of options")
    try:
        return json.dumps(given, sort_keys=True, default=dict)
    except TypeError as e:
        raise Reason(f"engines take numbers, texts, True, False, lists and mappings of these ({e})") from None


def _parse_engine_options(text: str) -> str:
    if text.lstrip().startswith("{"):
        return _accept_engine_options(text)
    made: dict[str, dict[str, Any]] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        engine, dot, option = name.partition(".")
        if not (equals and dot and engine and option):
            raise Reason(f"{part.strip()!r} is not ENGINE.OPTION=VALUE")
        try:
            found = json.loads(value)
        except ValueError:
            found = {"True": True, "False": False}.get(value, value)
        made.setdefault(engine, {})[option] = found
    return _accept_engine_options(made)


ENGINE_OPTIONS = Kind(
    "a mapping from an engine's name to a mapping of its own options (as text: ENGINE.OPTION=VALUE,... or JSON)",
    _accept_engine_options,
    _parse_engine_options,
)


def _accept_target(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError
    return value.strip()


TARGET = Kind("a kind of device in the words of the engine, such as 'sm_89'", _accept_target, _accept_target)

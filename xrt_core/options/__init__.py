"""Options: the one table of them, and where their values come from.

Keyword arguments win over `xrt.config`, which wins over environment variables, which win over the defaults.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from xrt_core.errors import OptionError
from xrt_core.events import process_events
from xrt_core.options import declared, process_config
from xrt_core.options.declared import PluginOption, Section
from xrt_core.options.kinds import AUTO, FLAG, HUGE, Kind, Reason
from xrt_core.options.table import TABLE, Option, Options, unknown
from xrt_core.plugins import plugins

__all__ = ["AUTO", "HUGE", "TABLE", "Kind", "Option", "Options", "PluginOption", "from_text", "resolve"]


def resolve(keywords: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> Options:
    """The options in force now: `keywords` over `xrt.config` over the environment over the defaults.

    None stands for "not given" where the default is None. environ: `os.environ` if None.
    Raises OptionError for an unknown option or a bad value, with what the option takes and the value's source.
    """
    environ = os.environ if environ is None else environ
    found: dict[str, Any] = {}
    switches: dict[str, bool] = {}
    sources: dict[str, str] = {}
    others = [v for v in environ if v.startswith(_OF_PLUGINS) and v not in _VARIABLES and environ[v].strip()]
    for option, value, source in _given(keywords or {}, environ, others):
        (found if option.name in TABLE else switches)[option.name] = value
        sources[option.name] = source
    own = json.loads(found["engine_options"]) if found.get("engine_options") else {}
    sections = _sections(own, environ, others, sources)
    if own:
        found["engine_options"] = TABLE["engine_options"].kind.accept(own)
    options = Options(
        **found,
        switches=tuple(sorted(switches.items())),
        sections=MappingProxyType(sections),
        sources=MappingProxyType(sources),
    )
    if options.minimum_nodes > options.maximum_nodes:
        raise OptionError(
            f"minimum_nodes={options.minimum_nodes} ({options.source('minimum_nodes')}) is above "
            f"maximum_nodes={options.maximum_nodes} ({options.source('maximum_nodes')})"
        )
    if options.sharding is not None and options.mesh is None:
        raise OptionError(
            f"sharding={options.sharding!r} ({options.source('sharding')}) says how tensors lie on a mesh, and there "
            "is none: give mesh={'data': 2} too, or set XRT_MESH"
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
    option = _option(name)
    return _clean(option, option.kind.parse, text, source)


def _option(name: str) -> Option:
    """The row of the table, or that of an engine's switch. Raises OptionError."""
    if name in TABLE:
        return TABLE[name]
    switch = declared.find_switch(str(name))
    if switch is None:
        raise unknown(name)
    return _row(switch)


def _row(switch: declared.Switch) -> Option:
    help = f"Without `engine`: True uses only engines switched on like this, False leaves {switch.engine} out."
    return Option(switch.name, FLAG, None, switch.variable, help)


def _of_environment(others: Sequence[str]) -> Iterator[Option]:
    """The options whose variables may be set: those of the table, and the switches among other variables."""
    yield from TABLE.values()
    for name in _switches(others):
        switch = declared.find_switch(name)
        if switch is not None:
            yield _row(switch)
        elif name not in _warned:  # a warning, since the variable may be another program's
            _warned.add(name)
            reason = declared.why_undeclared(name)
            process_events.emit("option.undeclared", level=logging.WARNING, variable=f"FLAGS_{name}", reason=reason)


def undeclared(environ: Mapping[str, str]) -> list[str]:
    """The variables that look like an engine's switch, and that no installed package declares."""
    others = [v for v in environ if v not in _VARIABLES and environ[v].strip()]
    return [f"FLAGS_{name}" for name in _switches(others) if declared.find_switch(name) is None]


def _switches(variables: Iterable[str]) -> list[str]:
    """Names of the switches that variables set."""
    return [v.removeprefix("FLAGS_") for v in variables if v.startswith(_OF_PLUGINS[0])]


_OF_PLUGINS: Final = (f"FLAGS_{declared.PREFIX}", "XRT_")
"""What the variables of options begin with that plugins declare: switches of engines, and sections."""
_VARIABLES: Final = frozenset(o.env for o in TABLE.values() if o.env)
_warned: Final[set[str]] = set()


def _given(
    keywords: Mapping[str, Any], environ: Mapping[str, str], others: Sequence[str]
) -> Iterator[tuple[Option, Any, str]]:
    """Every value that someone gave, clean, from the weakest source to the strongest.

    others: the variables that are set and may be those of plugins.
    """
    for option in _of_environment(others):
        text = environ.get(option.env, "") if option.env else ""
        if text.strip():
            source = f"environment variable {option.env}"
            yield option, _clean(option, option.kind.parse, text, source), source
    for name, value in process_config.values().items():
        yield _option(name), value, process_config.source(name)
    for name, value in keywords.items():
        option = _option(name)
        if value is not None or option.default is not None:
            source = f"keyword {name}="
            yield option, _clean(option, option.kind.accept, value, source), source


def _sections(
    own: dict[str, dict[str, Any]], environ: Mapping[str, str], others: Sequence[str], sources: dict[str, str]
) -> dict[str, Mapping[str, Any]]:
    """The declared options of every plugin that `own` or the environment speaks of, with all their values.

    own: the option `engine_options`; values from the environment are added to it, all become clean.
    """
    names = {*own}
    if others:
        names |= {n for n in plugins.names() for v in others if v.startswith(declared.prefix_of(n))}
    found: dict[str, Mapping[str, Any]] = {}
    for name in sorted(names):
        section = declared.find_section(name)
        if section is not None:
            found[name] = MappingProxyType(_values(section, own, environ, sources))
    return found


def _values(
    section: Section, own: dict[str, dict[str, Any]], environ: Mapping[str, str], sources: dict[str, str]
) -> dict[str, Any]:
    values = {o.name: o.default for o in section.options.values()}
    given = own.get(section.name, {})
    for name, value in given.items():
        if name not in values:
            raise OptionError(_miss(section, name) + f" ({sources['engine_options']}); {section.owner} declares them")
        source = f"{sources['engine_options']} {section.name}"
        given[name] = values[name] = _clean(section.options[name], section.options[name].kind.accept, value, source)
    for name, option in section.options.items():
        variable = section.variable(name)
        if name not in given and environ.get(variable, "").strip():
            value = _clean(option, option.kind.parse, environ[variable], f"environment variable {variable}")
            own.setdefault(section.name, {})[name] = values[name] = value
            sources[f"{section.name}.{name}"] = f"environment variable {variable}"
            sources.setdefault("engine_options", sources[f"{section.name}.{name}"])
    return values


def _miss(section: Section, name: str) -> str:
    """The message for a name that a section does not have."""
    close = difflib.get_close_matches(name, section.options, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"section {section.name!r} has no option {name!r}: {hint}it has {', '.join(section.options)}"


def _clean(option: Option | PluginOption, clean: Callable[[Any], Any], value: Any, source: str) -> Any:
    try:
        return clean(value)
    except (ValueError, TypeError) as e:
        reason = f": {e}" if isinstance(e, Reason) else ""
        raise OptionError(
            f"option {option.name!r} cannot be {value!r} (from {source}){reason}; it takes {option.kind.takes}"
        ) from None

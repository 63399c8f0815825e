"""Options that plugins declare: switches of engines, and sections with the options of a package.

A switch is an engine's tri-state option (`Engine.switch`); a section has the rows of the hook `xrt_options`. Packages
are imported (not their libraries) when an option that the core does not have is given, and when options are listed.
"""

from __future__ import annotations

import difflib
import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from msgspec import Struct

from xrt_core.errors import RegistrationError
from xrt_core.options.kinds import Kind
from xrt_core.plugins import plugins

CORE_VARIABLES: Final[dict[str, str]] = {}
"""Environment variable -> the core's option that it sets; filled by `options/table.py`."""

PREFIX: Final = "use_"
"""What the names of switches begin with."""


class PluginOption(Struct, frozen=True):
    """An option of a package. name: a lower-case identifier; kind: what it takes (`xrt_core.options.kinds`).

    default: the value if none is given. help: what it means, in a sentence.
    """

    name: str
    kind: Kind
    default: Any
    help: str


class Section(Struct, frozen=True):
    """The options of one plugin, by name. owner: its package."""

    name: str
    owner: str
    options: Mapping[str, PluginOption]

    def variable(self, option: str) -> str:
        """The environment variable of an option."""
        return prefix_of(self.name) + option.upper()


class Switch(Struct, frozen=True):
    """A tri-state option of an engine. owner: the package that declares it."""

    name: str
    engine: str
    owner: str

    @property
    def variable(self) -> str:
        """The environment variable."""
        return f"FLAGS_{self.name}"


_lock = threading.RLock()
_of_process: dict[str, Switch] = {}  # those of engines that the program registered itself
_installed: tuple[int, Mapping[str, Switch]] | None = None  # and the generation of the plugins it was read from


def switches() -> Mapping[str, Switch]:
    """Every switch by name. Imports the packages of all engines."""
    return MappingProxyType({**_of_plugins(), **_of_process})


def find_switch(name: str) -> Switch | None:
    """The switch of a name, or None."""
    return None if not name.startswith(PREFIX) else _of_process.get(name) or _of_plugins().get(name)


def engine_of(switch: str) -> str:
    """The name of the engine that declares a switch; "" where none does."""
    found = find_switch(switch)
    return "" if found is None else found.engine


def add_switch(name: str, engine: str, owner: str) -> None:
    """Declare the switch of an engine that the program registers. Raises RegistrationError where another has it."""
    with _lock:
        taken = _of_process.get(name)
        if taken is not None and taken.engine != engine:
            raise RegistrationError(
                f"switch {name!r} is declared twice: by engine {taken.engine!r} of {taken.owner} and by engine "
                f"{engine!r} of {owner}"
            )
        _of_process[name] = Switch(name, engine, owner)


def remove_switch(name: str) -> None:
    """Forget a switch that `add_switch` declared."""
    _of_process.pop(name, None)


def why_undeclared(name: str) -> str:
    """What to say about a switch that no engine declares: those that are there, and where others come from."""
    known = switches()
    close = difflib.get_close_matches(name, known, 1)
    there = ", ".join(f"{s.name} ({s.owner})" for s in known.values()) or "none"
    engine = name.removeprefix(PREFIX).partition("_")[0]
    return (
        f"no installed package declares the switch {name!r}; "
        + (f"did you mean {close[0]!r}? " if close else "")
        + f"declared: {there}; an engine's switch comes with its package, by convention xrt-<name> (pip install "
        f"xrt-{engine})"
    )


def sections() -> Mapping[str, Section]:
    """The section of every installed plugin that declares options, by name. Imports their packages."""
    found = {name: find_section(name) for name in plugins.names()}
    return MappingProxyType({n: s for n, s in found.items() if s is not None})


def find_section(name: str) -> Section | None:
    """The options that the plugin of a name declares; None where it declares none, or is not installed."""
    owner, options = "", dict[str, PluginOption]()
    for _, by, row in plugins.contributions("xrt_options", *plugins.discovery.groups_of(name), name=name):
        owner = owner or by
        why = _why_not(name, row, options) if by == owner else f"the section has options of {owner}"
        if why:
            plugins.problem(f"option of {name}", by if by == owner else f"{owner} and {by}", why)
        else:
            options[row.name] = row
    return Section(name, owner, MappingProxyType(options)) if options else None


def prefix_of(section: str) -> str:
    """What the environment variables of a section begin with."""
    return "XRT_" + "".join(c if c.isalnum() else "_" for c in section).upper() + "_"


def _of_plugins() -> Mapping[str, Switch]:
    global _installed
    with _lock:
        if _installed is None or _installed[0] != plugins.generation:
            found: dict[str, Switch] = {}
            for _, owner, engine in plugins.contributions("xrt_engines", "xrt.engines"):
                name, switch = getattr(engine, "name", None), getattr(engine, "switch", None)
                if not (isinstance(name, str) and isinstance(switch, str) and switch.startswith(PREFIX)):
                    continue  # it has none, or the engine is refused when it is loaded
                taken = found.get(switch)
                if taken is None:
                    found[switch] = Switch(switch, name, owner)
                elif taken.engine != name:
                    both = f"by engine {taken.engine!r} of {taken.owner} and by engine {name!r} of {owner}"
                    plugins.problem(f"switch {switch}", f"{taken.owner} and {owner}", f"it is declared twice: {both}")
            _installed = plugins.generation, found
        return _installed[1]


def _why_not(section: str, row: Any, known: Mapping[str, PluginOption]) -> str:
    """What is wrong with a row of the hook `xrt_options`, or ""."""
    if not isinstance(row, PluginOption) or not isinstance(row.kind, Kind):
        return f"the hook xrt_options gives {row!r}, which is no PluginOption with a Kind"
    if not (isinstance(row.name, str) and row.name.isidentifier() and row.name == row.name.lower()):
        return f"an option's name is {row.name!r}; it must be a lower-case identifier"
    if row.name in known:
        return f"option {row.name!r} is declared twice"
    variable = prefix_of(section) + row.name.upper()
    taken = CORE_VARIABLES.get(variable, "")
    if taken:
        return f"the variable {variable} of option {row.name!r} is that of the core's option {taken!r}"
    if row.default is not None:
        try:
            row.kind.accept(row.default)
        except (ValueError, TypeError):
            return f"the default of option {row.name!r} is {row.default!r}; it takes {row.kind.takes}"
    return ""

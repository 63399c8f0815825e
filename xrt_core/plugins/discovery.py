"""Finds plugin packages through their entry points, without importing anything, and imports one when it is asked for.

Listing reads the metadata files of installed packages only. A package that is broken, too old for this core or named
twice is a `PluginError` with its cause for whoever asks for it by name, and nothing to anyone else.
"""

from __future__ import annotations

import importlib
import logging
import operator
import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from xrt_core.errors import MESSAGE_LIMIT, PluginError, describe, is_from_program
from xrt_core.events import process_events

if TYPE_CHECKING:
    from importlib.metadata import Distribution

GROUPS: Final = (
    "xrt.engines",
    "xrt.frontends",
    "xrt.passes",
    "xrt.converters",
    "xrt.operators",
    "xrt.devices",
    "xrt.commands",
    "xrt.observers",
    "xrt.caches",
)
"""Entry-point groups. A group says when a package is imported; the hooks that it implements say what it brings."""
DISABLE_VARIABLE: Final = "XRT_DISABLE_PLUGINS"
SLOW_IMPORT_SECONDS: Final = 1.0
_CORE: Final = "xrt-core"
_RELEASE: Final = re.compile(r"\d+(?:\.\d+)*")
_BOUND: Final = re.compile(rf"(<=|>=|<|>)\s*({_RELEASE.pattern})")
_PLAIN: Final = re.compile(rf"{_CORE}\s*{_BOUND.pattern}(\s*,\s*{_BOUND.pattern})*")
_COMPARE: Final = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_TARGET: Final = re.compile(r"[A-Za-z_][\w.]*(:[A-Za-z_][\w.]*)?")


class Plugin(Struct, frozen=True):
    """One entry point of an installed package.

    group, name: of the entry point; target: "module:attribute"; package, version: of the distribution.
    requirements: what the package's metadata says it needs, as written.
    """

    group: str
    name: str
    target: str
    package: str
    version: str
    requirements: tuple[str, ...] = ()

    @property
    def owner(self) -> str:
        """The package with its version, for messages."""
        return f"{self.package} {self.version}".rstrip()

    @property
    def is_disabled(self) -> bool:
        """Whether XRT_DISABLE_PLUGINS names the plugin or its package."""
        disabled = {n.strip() for n in os.environ.get(DISABLE_VARIABLE, "").split(",")}
        return self.name in disabled or self.package in disabled


class _Outcome(Struct, frozen=True):
    """What came of importing a plugin: the object, or the message and its cause."""

    value: Any = None
    message: str = ""
    cause: BaseException | None = None
    seconds: float = 0.0


class Discovery:
    """The plugins that are installed now, read once and kept until `refresh`. Safe to use from many threads.

    core_version: the version that plugins' requirements are checked against.
    path: folders to search instead of `sys.path`.
    """

    def __init__(self, core_version: str, path: Sequence[str] | None = None) -> None:
        self.core_version = core_version
        self._path = list(path) if path is not None else None
        self._plugins: Mapping[str, Mapping[str, tuple[Plugin, ...]]] | None = None
        self._outcomes: dict[Plugin, _Outcome] = {}
        self._lock = threading.RLock()

    def refresh(self) -> None:
        """Forget what was found, and which imports failed; modules that are imported stay imported."""
        with self._lock:
            self._plugins = None
            self._outcomes.clear()
            importlib.invalidate_caches()

    def plugins(self, group: str) -> Mapping[str, tuple[Plugin, ...]]:
        """Name -> plugins of that name in `group`, by name; more than one where packages collide. Imports nothing."""
        with self._lock:
            if self._plugins is None:
                self._plugins = _scan(self._distributions())
            return self._plugins[group]

    def groups_of(self, name: str) -> tuple[str, ...]:
        """The groups that have an entry point of this name. Imports nothing."""
        return tuple(g for g in GROUPS if name in self.plugins(g))

    def problem(self, plugins: Sequence[Plugin]) -> tuple[str, str] | None:
        """Why the plugins of one name must not be imported, and the cure; None if nothing speaks against it."""
        plugin = plugins[0]
        if len(plugins) > 1:
            owners = " and ".join(p.owner for p in plugins)
            return f"{plugin.name!r} is named twice in {plugin.group}: by {owners}", (
                f"uninstall one of {', '.join(p.package for p in plugins)}"
            )
        return _unmet_requirement(plugin, self.core_version)

    def load(self, plugin: Plugin) -> Any:
        """The object that the entry point names, importing its module at the first call.

        Raises PluginError with the package and the cause, chained; the same again at every later call.
        """
        with self._lock:
            outcome = self._outcomes.get(plugin)
            if outcome is None:
                outcome = self._outcomes[plugin] = self._import(plugin)
        if outcome.message:
            raise PluginError(outcome.message) from outcome.cause
        return outcome.value

    def import_seconds(self, plugin: Plugin) -> float:
        """How long importing `plugin` took; 0 if it has not been imported."""
        outcome = self._outcomes.get(plugin)
        return outcome.seconds if outcome is not None else 0.0

    def is_installed(self, plugin: Plugin) -> bool:
        """Whether the package is still there, whatever was found earlier."""
        importlib.invalidate_caches()
        return plugin in _scan(self._distributions())[plugin.group].get(plugin.name, ())

    def _distributions(self) -> Iterable[Distribution]:
        from importlib import metadata  # 20 ms that `import xrt_core` does not pay

        return metadata.distributions() if self._path is None else metadata.distributions(path=self._path)

    def _import(self, plugin: Plugin) -> _Outcome:
        start = time.perf_counter()
        try:
            module, _, attributes = plugin.target.partition(":")
            if _TARGET.fullmatch(plugin.target) is None:
                raise ImportError(f"the entry point {plugin.target!r} is not of the form module:attribute")
            value: Any = importlib.import_module(module)
            for attribute in attributes.split(".") if attributes else ():
                value = getattr(value, attribute)
        except BaseException as e:  # a plugin may do anything at all while it is imported
            if is_from_program(e):
                raise
            seconds = time.perf_counter() - start
            told = describe(e)
            process_events.emit("plugin.broken", seconds=seconds, plugin=plugin.name, error=told)
            message = (
                f"plugin {plugin.name!r} of {plugin.owner} cannot be imported: {told}; mend or "
                f"upgrade {plugin.package}, or set {DISABLE_VARIABLE}={plugin.name}"
            )
            # a cause that whoever prints a traceback can read
            cause = e if isinstance(e, Exception) and len(told) < MESSAGE_LIMIT else None
            return _Outcome(message=message, cause=cause, seconds=seconds)
        seconds = time.perf_counter() - start
        level = logging.INFO if seconds > SLOW_IMPORT_SECONDS else logging.DEBUG
        process_events.emit("plugin.imported", level=level, seconds=seconds, plugin=plugin.name)
        return _Outcome(value, seconds=seconds)


def _scan(distributions: Iterable[Distribution]) -> Mapping[str, Mapping[str, tuple[Plugin, ...]]]:
    found: dict[str, dict[str, list[Plugin]]] = {g: defaultdict(list) for g in GROUPS}
    seen: set[str] = set()
    for distribution in distributions:
        try:
            text = distribution.read_text("entry_points.txt")
            if not text or "xrt." not in text:
                continue
            package, version, requirements = _header(distribution)
            entries = [entry for entry in distribution.entry_points if entry.group in found]
        except Exception as e:  # damaged metadata of one package must not hide the others
            process_events.emit("plugin.unreadable", package=str(getattr(distribution, "_path", "?")), error=repr(e))
            continue
        if not entries or package in seen:  # the first on the path is the one that Python imports
            continue
        seen.add(package)
        for entry in entries:
            plugin = Plugin(entry.group, entry.name, entry.value, package, version, requirements)
            found[entry.group][entry.name].append(plugin)
    return MappingProxyType(
        {g: MappingProxyType({n: tuple(sorted(found[g][n], key=_owner)) for n in sorted(found[g])}) for g in GROUPS}
    )


def _owner(plugin: Plugin) -> str:
    return plugin.owner


def _header(distribution: Distribution) -> tuple[str, str, tuple[str, ...]]:
    """Name, version and requirements, from the head of METADATA (parsing all of it takes a millisecond a package)."""
    text = distribution.read_text("METADATA")
    if text is None:  # not a wheel's folder
        return _normal(distribution.metadata["Name"]), distribution.version, tuple(distribution.requires or ())
    rows = list(_rows(text))
    fields = dict(reversed(rows))
    return _normal(fields["name"]), fields.get("version", ""), tuple(v for k, v in rows if k == "requires-dist")


def _rows(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        if not line.strip():
            return
        if not line[0].isspace():
            key, _, value = line.partition(":")
            yield key.strip().lower(), value.strip()


def requirement_name(text: str) -> str:
    """The package that a requirement is about: "jax>=0.8; extra == 'x'" -> "jax"."""
    return _normal(re.split(r"[^\w.-]", text.strip(), maxsplit=1)[0])


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


_OF_AN_EXTRA: Final = re.compile(r""";\s*extra\s*==\s*["'][^"']+["']\s*$""")


def _is_plainly_met(text: str, core_version: str) -> bool:
    """Whether a requirement has numbers alone ("xrt-core>=0.1,<0.2") and this core meets it.

    That is what nearly all are like; importing `packaging`, which knows the rest, takes 10 ms of every process.
    """
    if not _PLAIN.fullmatch(text) or not _RELEASE.fullmatch(core_version):
        return False
    here = _release(core_version)
    return all(_COMPARE[sign](here, _release(number)) for sign, number in _BOUND.findall(text))


def _release(text: str) -> list[int]:
    """The numbers of a version without the zeros at its end: 1.0 and 1.0.0 are the same."""
    numbers = [int(n) for n in text.split(".")]
    while numbers and not numbers[-1]:
        numbers.pop()
    return numbers


def _unmet_requirement(plugin: Plugin, core_version: str) -> tuple[str, str] | None:
    for text in plugin.requirements:
        if not requirement_name(text).startswith(_CORE) or _OF_AN_EXTRA.search(text):
            continue
        if _is_plainly_met(text, core_version):
            continue
        from packaging.requirements import InvalidRequirement, Requirement

        try:
            requirement = Requirement(text)
        except InvalidRequirement as e:
            return f"{plugin.owner} has a requirement that cannot be read: {text!r}: {e}", f"upgrade {plugin.package}"
        if _normal(requirement.name) != _CORE or (requirement.marker and not requirement.marker.evaluate()):
            continue
        if not requirement.specifier.contains(core_version, prereleases=True):
            return (
                f"{plugin.owner} needs {_CORE}{requirement.specifier}, and this is {_CORE} {core_version}",
                f"pip install --upgrade {_CORE} {plugin.package}",
            )
    return None

"""PluginManager: loads plugins by entry-point group, calls their hooks one by one, and keeps what went wrong."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from xrt_core import events
from xrt_core.errors import PluginError, XRTError, describe, is_from_program, message_of
from xrt_core.plugins.discovery import DISABLE_VARIABLE, GROUPS, Discovery, Plugin

if TYPE_CHECKING:
    import pluggy

_SHORT_FORMS: Final = {"xrt.engines": "xrt_engines", "xrt.passes": "xrt_passes"}
"""Groups whose entry points may name the thing itself in the place of a plugin, and the hook that would bring it."""


class Contribution(NamedTuple):
    """One row that a hook of a plugin gave. name: of its entry point, or of the engine; owner: the package."""

    name: str
    owner: str
    value: Any


class Result(NamedTuple):
    """What a hook of one plugin gave, or why it gave nothing."""

    name: str
    owner: str
    rows: tuple[Any, ...] | PluginError


class Problem(NamedTuple):
    """What is wrong with a plugin. what: such as "engine acme"; owner: the package, or the packages; remedy: or ""."""

    what: str
    owner: str
    reason: str
    remedy: str = ""


@dataclass(eq=False)
class _Record:
    """A plugin that was registered.

    name: of the first entry point, for messages. entries: every entry point that names it; none for an object of the
    process. short_form: the hook that would bring it, for the thing itself. rows: what each hook gave, or why not.
    """

    plugin: object
    name: str
    owner: str
    entries: set[Plugin] = field(default_factory=set)
    short_form: str = ""
    rows: dict[str, tuple[Any, ...] | PluginError] = field(default_factory=dict)


class PluginManager:
    """The plugins that were loaded, and the way to load more. Safe to use from many threads.

    Every process has one, `xrt_core.plugins.plugins`; tests make their own.
    """

    def __init__(self, discovery: Discovery) -> None:
        self.discovery = discovery
        self.generation = 0  # grows with every change, for those who keep what they made of contributions
        self._records: list[_Record] = []
        self._tried: set[Plugin] = set()
        self._broken: dict[Plugin, PluginError] = {}
        self._problems: dict[tuple[str, str], Problem] = {}
        self._unsubscribe: Callable[[], None] | None = None
        self._lock = threading.RLock()

    @cached_property
    def _pluggy(self) -> pluggy.PluginManager:
        import pluggy  # with the first plugin, not with `import xrt_core.options`

        from xrt_core.plugins.hookspecs import PROJECT, Specification

        made = pluggy.PluginManager(PROJECT)
        made.add_hookspecs(Specification)
        return made

    # --- loading ------------------------------------------------------------------------------------------------

    def names(self, group: str = "") -> tuple[str, ...]:
        """Names of the entry points of a group, or of all, less the disabled ones. Imports nothing."""
        groups = (group,) if group else GROUPS
        found = {n for g in groups for n, p in self.discovery.plugins(g).items() if not p[0].is_disabled}
        return tuple(sorted(found))

    def added(self, hook: str) -> tuple[str, ...]:
        """Names of the objects of this process that were registered by `add` and implement a hook."""
        with self._lock:
            return tuple(r.name for r in self._ordered() if not r.entries and self._implementations(r, hook))

    def load(self, group: str, name: str = "") -> None:
        """Import and register the plugins of a group, or the one of that name. What fails becomes a problem."""
        found = self.discovery.plugins(group)
        with self._lock:
            for entries in (found.get(name, ()),) if name else tuple(found.values()):
                if entries and entries[0] not in self._tried and not entries[0].is_disabled:
                    try:
                        self.load_entry(entries)
                    except PluginError as e:
                        entry, owners = entries[0], " and ".join(p.owner for p in entries)
                        self._broken[entry] = e
                        remedy = f"mend or remove {entry.package}, or set {DISABLE_VARIABLE}={entry.name}"
                        self.problem(f"plugin {entry.name} of {entry.group}", owners, str(e), remedy)

    def load_entry(self, entries: tuple[Plugin, ...]) -> object:
        """Import and register the one plugin of these entry points of the same name; what the entry point names.

        Raises PluginError where there are several, where the package does not fit this core or cannot be imported, and
        where the object implements no hook, or one wrongly.
        """
        with self._lock:
            entry = entries[0]
            self._tried.add(entry)
            problem = self.discovery.problem(entries)
            if problem is not None:
                raise PluginError(f"{problem[0]}; {problem[1]}")
            found: object = self.discovery.load(entry)
            known = next((r for r in self._records if r.plugin is found), None)
            if known is None:
                known = self._register(found, entry.name, entry.owner, _SHORT_FORMS.get(entry.group, ""))
            known.entries.add(entry)
            return found

    def add(self, plugin: object, name: str, owner: str) -> None:
        """Register an object of this process, if it implements hooks; owner: the package it comes from.

        Raises PluginError, naming the owner, for an unknown hook, an argument that the hook does not have, or a
        wrapper; nothing is registered then.
        """
        with self._lock:
            if self._implements(plugin, owner, name):
                self._register(plugin, name, owner, "")

    def remove(self, plugin: object) -> None:
        """Forget a plugin that `add` registered, if it is there."""
        with self._lock:
            for record in [r for r in self._records if r.plugin is plugin]:
                self._forget(record)

    def refresh(self) -> None:
        """Forget what entry points brought, and look at the installed packages again."""
        with self._lock:
            self.discovery.refresh()
            for record in [r for r in self._records if r.entries]:
                self._forget(record)
            self._tried.clear()
            self._broken.clear()
            self._problems.clear()
            self.generation += 1

    # --- reading ------------------------------------------------------------------------------------------------

    def results(self, hook: str, *groups: str, name: str = "") -> list[Result]:
        """What each plugin gives through a hook that returns rows, or why it gives nothing, in the order of names.

        groups: loaded first, whole, or the entry point of that `name` alone; plugins that are loaded anyway take part.
        A hook is called once and its rows are kept.
        """
        for group in groups:
            self.load(group, name)
        with self._lock:
            found = [
                Result(entry.name, entry.owner, error)
                for entry, error in self._broken.items()
                if entry.group in groups and name in ("", entry.name)
            ]
            for record in self._ordered():
                if name and name != record.name and all(e.name != name for e in record.entries):
                    continue
                rows = self._rows(record, hook)
                if rows != ():
                    found.append(Result(name or record.name, record.owner, rows))
            return found

    def contributions(self, hook: str, *groups: str, name: str = "") -> list[Contribution]:
        """Every row of `results`. A hook that fails is a problem, and gives none."""
        found: list[Contribution] = []
        for result in self.results(hook, *groups, name=name):
            if isinstance(result.rows, PluginError):
                self.problem(f"plugin {result.name}", result.owner, str(result.rows))
            else:
                found += (Contribution(result.name, result.owner, value) for value in result.rows)
        return found

    def rows_of(self, plugin: object, hook: str) -> tuple[Any, ...]:
        """The rows of one registered plugin; none for another object. Raises PluginError where its hook fails."""
        with self._lock:
            record = next((r for r in self._records if r.plugin is plugin), None)
            rows = () if record is None else self._rows(record, hook)
        if isinstance(rows, PluginError):
            raise rows
        return rows

    def each(self, hook: str, *groups: str, **arguments: Any) -> Iterator[tuple[str, str, Callable[[], Any]]]:
        """Name, owner and a call of every implementation of a hook that takes arguments, in the order of their names.

        The call raises an XRTError as it is, and PluginError, chained, for whatever else the implementation raises.
        """
        for group in groups:
            self.load(group)
        with self._lock:
            found = [(r, i) for r in self._ordered() for i in self._implementations(r, hook)]
        for record, implementation in found:
            yield record.name, record.owner, partial(_called, record, hook, implementation, arguments)

    # --- problems -----------------------------------------------------------------------------------------------

    def problem(self, what: str, owner: str, reason: str, remedy: str = "") -> None:
        """Keep what is wrong with a plugin, once."""
        if (what, reason) not in self._problems:
            self._problems[what, reason] = Problem(what, owner, reason, remedy)
            events.process_events.emit("plugin.problem", level=logging.WARNING, plugin=what, owner=owner, reason=reason)

    def problems(self) -> list[Problem]:
        """What is known to be wrong, in the order in which it was found."""
        return list(self._problems.values())

    # --- within -------------------------------------------------------------------------------------------------

    def _ordered(self) -> list[_Record]:
        return sorted(self._records, key=lambda r: (r.name, r.owner))

    def _register(self, plugin: object, name: str, owner: str, short_form: str) -> _Record:
        record = _Record(plugin, name, owner)
        if short_form and (inspect.isclass(plugin) or not self._implements(plugin, owner, name)):
            record.short_form = short_form
        elif self._implements(plugin, owner, name):
            self._register_hooks(record)
        else:
            raise PluginError(
                f"{owner}: plugin {name!r} is {plugin!r}, which implements no hook; mark functions with @xrt.hookimpl"
            )
        self._records.append(record)
        self.generation += 1
        return record

    def _implements(self, plugin: object, owner: str, name: str) -> bool:
        try:
            return any(
                n.startswith("xrt_") and self._pluggy.parse_hookimpl_opts(plugin, n) is not None for n in dir(plugin)
            )
        except BaseException as e:  # whatever a property of the plugin raises when it is looked at
            failure = _wrong(owner, name, e)
        raise failure

    def _register_hooks(self, record: _Record) -> None:
        label = f"{record.name} of {record.owner} ({id(record.plugin)})"
        failure: PluginError | None = None
        try:
            self._pluggy.register(record.plugin, label)
            self._pluggy.check_pending()
            for caller in self._pluggy.get_hookcallers(record.plugin) or ():
                for i in caller.get_hookimpls():
                    if i.plugin is record.plugin and (i.hookwrapper or i.wrapper):
                        raise PluginError(f"{caller.name} is a wrapper, and each implementation is called by itself")
        except BaseException as e:  # pluggy's own, and what a property of the plugin raises when pluggy looks at it
            if self._pluggy.has_plugin(label):
                self._pluggy.unregister(name=label)
            failure = _wrong(record.owner, record.name, e)
        if failure is not None:
            raise failure
        if self._unsubscribe is None and self._pluggy.hook.xrt_event.get_hookimpls():
            self._unsubscribe = events.subscribe(self._forward)

    def _forget(self, record: _Record) -> None:
        self._records.remove(record)
        self.generation += 1
        if self._pluggy.is_registered(record.plugin):
            self._pluggy.unregister(record.plugin)
        if self._unsubscribe is not None and not self._pluggy.hook.xrt_event.get_hookimpls():
            self._unsubscribe()
            self._unsubscribe = None

    def _implementations(self, record: _Record, hook: str) -> list[pluggy.HookImpl]:
        return [i for i in getattr(self._pluggy.hook, hook).get_hookimpls() if i.plugin is record.plugin]

    def _rows(self, record: _Record, hook: str) -> tuple[Any, ...] | PluginError:
        if record.short_form:
            return (record.plugin,) if record.short_form == hook else ()
        if hook not in record.rows:
            rows: list[Any] = []
            try:
                for i in self._implementations(record, hook):
                    rows += _called(record, hook, i, {}, tuple)
                record.rows[hook] = tuple(rows)
            except PluginError as e:
                record.rows[hook] = e
        return record.rows[hook]

    def _forward(self, event: events.Event) -> None:
        for i in tuple(self._pluggy.hook.xrt_event.get_hookimpls()):
            try:
                i.function(*([event] if i.argnames else []))
            except BaseException as e:
                if is_from_program(e):
                    raise
                events.logger.error("plugin %s failed on %s: %s", i.plugin_name, event, describe(e))
                record = next((r for r in self._records if r.plugin is i.plugin), None)
                if record is not None and event.name != "plugin.problem":  # of which the next would be one
                    self.problem(f"plugin {record.name}", record.owner, str(_failure(record, "xrt_event", e)))


def _called(
    record: _Record,
    hook: str,
    implementation: pluggy.HookImpl,
    arguments: dict[str, Any],
    use: Callable[[Iterable[Any]], Any] | None = None,
) -> Any:
    """What an implementation gives. use: reads rows, and may raise as well, since they may come from a generator."""
    try:
        given: Any = implementation.function(*[arguments[n] for n in implementation.argnames])
        return given if use is None else use(given)
    except BaseException as e:
        if is_from_program(e) or (use is None and isinstance(e, XRTError)):
            raise
        failure = _failure(record, hook, e)
    raise failure


def _failure(record: _Record, hook: str, e: BaseException) -> PluginError:
    return PluginError(f"{record.owner}: the hook {hook} of {record.name!r} failed: {describe(e)}")


def _wrong(owner: str, name: str, e: BaseException) -> PluginError:
    """The error of a plugin that cannot be registered; raises `e` itself where it comes from the program."""
    if is_from_program(e):
        raise e
    why = " ".join(message_of(e).split()) or describe(e)
    return PluginError(f"{owner}: plugin {name!r} implements a hook wrongly: {why}")

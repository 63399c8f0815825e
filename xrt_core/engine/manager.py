"""EngineManager: engines by name, a report of their availability, and their selection by phase."""

from __future__ import annotations

import inspect
import json
import logging
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np

from xrt_core.engine.boundary import EngineProxy, call_engine, inner_of, preserved_state
from xrt_core.engine.contract import API_VERSION, ARRAY_FAMILIES, Engine, EngineStatus
from xrt_core.engine.converters import HOST, Convert, add_rows, converters, owner_of
from xrt_core.engine.device_kinds import add_rows as add_device_kinds
from xrt_core.engine.device_kinds import is_host, kinds, number_of, same_device
from xrt_core.engine.op_kernels import op_kernels
from xrt_core.engine.registry import Registry, miss
from xrt_core.errors import (
    DeviceNotFoundError,
    EngineError,
    EngineNotFoundError,
    EngineUnavailableError,
    OptionError,
    PluginError,
    RegistrationError,
    nearest,
)
from xrt_core.events import EventLog, process_events
from xrt_core.ir.graph import Phase
from xrt_core.options import AUTO, TABLE, Options, declared
from xrt_core.plugins import plugins as process_plugins
from xrt_core.plugins.discovery import DISABLE_VARIABLE, SLOW_IMPORT_SECONDS, Discovery, Plugin
from xrt_core.plugins.manager import PluginManager

_HINT: Final = "engines are pip packages: pip install xrt-<name>, and `xrt engines` lists what is installed"

State = Literal["ready", "unavailable", "broken", "disabled", "installed"]


@dataclass(frozen=True, slots=True)
class EngineListing:
    """A line of the listing.

    name; package, version: of the plugin; library_version: of what the engine runs on, "" if unknown.
    status: "ready"; "unavailable" (here, see reason and remedy); "broken" (cannot be loaded); "disabled" (by the
        environment); "installed" (not looked at).
    devices: the usable ones. reason, remedy: why it cannot be used, or what is odd about it, and what to do.
    """

    name: str
    package: str
    version: str
    status: State
    devices: tuple[str, ...] = ()
    library_version: str = ""
    reason: str = ""
    remedy: str = ""


class EngineManager:
    """Names are listed without importing anything; an engine is imported at its first use, checked, and kept.

    Safe to use from many threads. Every process has one, `engines`; tests make their own, which declare no switches.
    """

    def __init__(self, discovery: Discovery, plugins: PluginManager | None = None) -> None:
        self._discovery = discovery
        self.plugins = plugins if plugins is not None else PluginManager(discovery)
        self._declares_switches = self.plugins is process_plugins  # only its switches are options of the process
        self._converters: dict[int, list[tuple[str, str]]] = {}  # id of a plugin -> the pairs that it brought
        self._registered: Registry[type[Engine]] = Registry("engine", hint=_HINT, missing=EngineNotFoundError)
        self._engines: dict[str, Engine] = {}
        self._status: dict[str, EngineStatus | EngineError] = {}
        self._installed: dict[str, EngineStatus] = {}  # of `probe_installed`
        self._lock = threading.RLock()

    # --- by name ------------------------------------------------------------------------------------------------

    def names(self) -> tuple[str, ...]:
        """Names of the engines that are installed or registered, less the disabled ones. Imports nothing."""
        found = {n for n, p in self._plugins().items() if not p[0].is_disabled}
        return tuple(sorted(found | set(self._registered)))

    def get(self, name: str) -> Engine:
        """The engine called `name`, usable here or not; always the same object.

        Raises EngineNotFoundError (nothing provides it), EngineUnavailableError (disabled), PluginError (its package
        is broken, does not fit this core, or is one of two of that name; the cause is chained).
        """
        with self._lock:
            engine = self._engines.get(name)
            if engine is None:
                with preserved_state(f"engine {name!r}"):  # importing it may load its library
                    engine = self._load(name)
                self._engines[name] = engine
            return engine

    def status(self, name: str) -> EngineStatus:
        """What the engine's `probe` says; asked once, until `refresh`. Raises as `get`."""
        engine = self.get(name)
        with self._lock:
            known = self._status.get(name)
            if known is None:
                known = self._status[name] = _probe(engine)
        if isinstance(known, EngineError):
            raise PluginError(str(known))
        return known

    def usable(self, name: str) -> Engine:
        """The engine called `name`. Raises as `get`, and EngineUnavailableError where it cannot be used here."""
        status = self.status(name)
        if not status.available:
            cure = f"; {status.remedy}" if status.remedy else ""
            raise EngineUnavailableError(f"engine {name!r} is installed but cannot be used here: {status.reason}{cure}")
        return self.get(name)

    def devices(self, engine: Engine) -> tuple[str, ...]:
        """The devices that an engine can use here, as it names them."""
        known = self._engines.get(engine.name)  # another one compiles for a device elsewhere
        own = known is None or inner_of(known) is inner_of(engine)
        if not own:
            return tuple(engine.probe().devices or engine.devices)
        installed = None if engine.name in self._status else self._installed.get(engine.name)
        return tuple((installed or self.status(engine.name)).devices or engine.devices)

    def device(self, engine: Engine, wanted: str | None = None) -> str:
        """The device to compile for: `wanted`, or the engine's first usable one.

        Raises EngineUnavailableError where the engine cannot drive `wanted`.
        """
        devices = self.devices(engine)
        if wanted is None:
            return devices[0]
        kind, _, index = wanted.partition(":")
        for device in devices:
            if device == wanted or (device == kind and (not is_host(kind) or same_device(device, wanted))):
                return wanted if not is_host(kind) else device
            if not index and device.partition(":")[0] == kind:
                return device
        raise EngineUnavailableError(
            f"engine {engine.name!r} cannot use device {wanted!r} here; it can use {', '.join(devices)}"
        )

    # --- all of them --------------------------------------------------------------------------------------------

    def ready(
        self,
        phase: Phase,
        device: str | None,
        options: Options,
        without: Collection[str] = (),
        found_usable: Collection[str] = (),
    ) -> list[Engine]:
        """Every usable engine that can drive `device`, best first for `phase`, as the switches in `options` allow.

        A switch that is True leaves only engines switched on; one that is False takes its engine out, and an engine
        whose `automatic` is False stays out; so do those named by `without`. An engine that cannot be used is left out,
        with an event, unless a switch asks for it: then its error is raised. found_usable: engines of which another
        process knows that, so that `Engine.probe_installed` may answer.
        """
        wanted = [switch for switch, on in options.switches if on]
        if wanted:
            found = [self._switched_on(switch, options.source(switch)) for switch in wanted]
        else:
            refused = {*without, *(n for switch, _ in options.switches if (n := self._switched_by(switch)))}
            asked = {n: n in found_usable for n in self.names() if n not in refused}
            found = [e for n, is_known in asked.items() if (e := self._usable_or_none(n, device, is_known)) is not None]
        return sorted(found, key=lambda e: (-e.priority.get(phase, 0), e.name))

    def select(
        self, options: Options, without: Collection[str] = (), found_usable: Collection[str] = ()
    ) -> list[Engine]:
        """The engines that `options` mean, in the order to try them; none for engine="host", `ready` for "auto".

        without: engines that stay out where none is named; so do those of `options.left_out`. found_usable: see
        `ready`.

        Raises as `usable` for each engine asked for by name, EngineUnavailableError for a device it cannot use, or that
        none can where none is named.
        """
        self._check_options(options)
        if options.target is not None:
            return self._targeting(options.target, options)
        if options.engine is None or options.engine == (AUTO,):
            ready = self.ready(options.phase, options.device, options, without, found_usable)
            ready = [e for e in ready if e.name not in options.left_out]
            if options.device is not None:
                kinds.check(options.device)
            if not ready and not _is_whole_host(options.device):
                usable = self.ready(options.phase, None, options, without)
                here = ", ".join(dict.fromkeys(("cpu", *(d for e in usable for d in self.devices(e)))))
                raise EngineUnavailableError(
                    f"device={options.device!r} ({options.source('device')}): no engine that is ready can use it; "
                    f"there are {here}; `xrt engines` says what each can use, and without device= the host runs on "
                    "the CPU"
                )
            return ready
        found = [self.usable(n) for n in options.engine if n != HOST]
        if options.device is not None:
            kinds.check(options.device)
            for engine in found:
                self.device(engine, options.device)
            if not found:
                _check_host(options)
        return found

    def choose(
        self, options: Options, without: Collection[str] = (), found_usable: Collection[str] = ()
    ) -> list[tuple[Engine, str]]:
        """The engines of `select`, each with the device to compile for. Raises as `select` and `device`."""
        return [(e, self.device(e, options.device)) for e in self.select(options, without, found_usable)]

    def settled(self, options: Options, events: EventLog) -> Options:
        """The options, without a `device` that cannot be had, where `placement` says "prefer"; then with an event."""
        if options.device is None or not options.prefers_placement:
            return options
        try:
            self.select(options)
        except (DeviceNotFoundError, EngineUnavailableError) as e:
            events.emit("placement.given_up", level=logging.WARNING, device=options.device, reason=str(e))
            return replace(options, device=None)
        return options

    def registered(self, name: str) -> type[Engine] | None:
        """The class that `register` added under a name; None for a plugin's engine, or none."""
        return self._registered.get(name)

    def listing(self, *, probe: bool = True) -> list[EngineListing]:
        """A line for every engine, by name. probe: import each and ask whether it is ready; False imports nothing."""
        plugins = self._plugins()
        return [self._line(n, plugins.get(n), probe) for n in sorted({*plugins, *self._registered})]

    # --- change -------------------------------------------------------------------------------------------------

    def register(self, engine: type[Engine]) -> type[Engine]:
        """Add an engine of this process, beside the installed ones; usable as a class decorator.

        Raises RegistrationError for a class that breaks the contract, or a name that is taken.
        """
        owner = f"{engine.__module__}.{engine.__qualname__}" if inspect.isclass(engine) else repr(engine)
        fault = _fault(engine)
        if fault:
            raise RegistrationError(f"engine {owner}: {fault}")
        installed = self._plugins().get(engine.name)
        if installed:
            raise RegistrationError(
                f"engine {engine.name!r} is registered twice: by {installed[0].owner} and by {owner}"
            )
        made = self._registered.register(engine.name, engine, owner=owner)
        if engine.switch and self._declares_switches:
            try:
                declared.add_switch(engine.switch, engine.name, owner)
            except RegistrationError:
                self._registered.unregister(engine.name)
                raise
        return made

    def unregister(self, name: str) -> None:
        """Take out an engine added by `register`. Raises EngineNotFoundError for any other."""
        with self._lock:
            switch = self._registered.unregister(name).switch
            if self._declares_switches:
                declared.remove_switch(switch)
            self._forget(name)

    def refresh(self) -> None:
        """Look again: what is installed, what is broken, what is ready."""
        with self._lock:
            self.plugins.refresh()
            for name in list(self._engines):
                self._forget(name)
            for plugin in list(self._converters):
                self._drop_converters(plugin)
            self._status.clear()
            self._installed.clear()

    def load_converters(self) -> Mapping[str, PluginError]:
        """Register the converters of the group `xrt.converters`; plugin -> why its converters cannot be had."""
        failed: dict[str, PluginError] = {}
        for name, entries in self._discovery.plugins("xrt.converters").items():
            if entries[0].is_disabled:
                continue
            try:
                self._bring_rows(self.plugins.load_entry(entries), entries[0].owner)
            except PluginError as e:
                failed[name] = e
                self.plugins.problem(f"converters of {name}", entries[0].owner, str(e))
        return failed

    def load_passes(self) -> list[tuple[str, str, Any]]:
        """The passes of the group `xrt.passes` and of loaded plugins: rows (name, owner, pass or why there is none)."""
        found: list[tuple[str, str, Any]] = []
        for name, owner, rows in self.plugins.results("xrt_passes", "xrt.passes"):
            if isinstance(rows, PluginError):
                found.append((name, owner, rows))
            else:
                found += ((str(getattr(p, "name", "") or getattr(p, "__name__", name)), owner, p) for p in rows)
        return found

    # --- within -------------------------------------------------------------------------------------------------

    def _plugins(self) -> Mapping[str, tuple[Plugin, ...]]:
        return self._discovery.plugins("xrt.engines")

    def _forget(self, name: str) -> None:
        engine = self._engines.pop(name, None)
        self._status.pop(name, None)
        self._installed.pop(name, None)
        if engine is not None:
            self._drop_converters(id(inner_of(engine)))
            self.plugins.remove(inner_of(engine))

    def _bring_rows(self, plugin: object, owner: str) -> None:
        """Register the device kinds and converters of a loaded plugin, once. Raises PluginError for a wrong row."""
        add_device_kinds(kinds, self.plugins.rows_of(plugin, "xrt_device_kinds"), owner)
        if id(plugin) not in self._converters:
            pairs = add_rows(converters, self.plugins.rows_of(plugin, "xrt_converters"), owner)
            self._converters[id(plugin)] = pairs

    def _drop_converters(self, plugin: int) -> None:
        for pair in self._converters.pop(plugin, ()):
            converters.unregister(*pair)

    def _load(self, name: str) -> Engine:
        if name in self._registered:
            return self._make(self._registered[name], name, self._registered.owner(name))
        plugins = self._plugins().get(name)
        if not plugins:
            raise EngineNotFoundError(self._not_found(name))
        plugin = plugins[0]
        if plugin.is_disabled:
            raise EngineUnavailableError(
                f"engine {name!r} of {plugin.owner} is disabled by {DISABLE_VARIABLE}; take it out of that variable"
            )
        problem = self._discovery.problem(plugins)
        if problem is not None:
            raise PluginError(f"engine {name!r} cannot be used: {problem[0]}; {problem[1]}")
        try:
            found = self.plugins.load_entry(plugins)
        except PluginError:
            if self._discovery.is_installed(plugin):
                raise
            self._discovery.refresh()
            raise EngineNotFoundError(f"{plugin.owner} has been removed; " + self._not_found(name)) from None
        engine_class, fault = self._class_of(found, name)
        if fault:
            raise PluginError(f"engine {name!r} of {plugin.owner} ({plugin.target}): {fault}")
        self._bring_rows(found, plugin.owner)
        return self._make(engine_class, name, plugin.owner)

    def _class_of(self, found: object, name: str) -> tuple[Any, str]:
        """The class of an engine, from what its entry point names, and what is wrong with it, or ""."""
        rows = self.plugins.rows_of(found, "xrt_engines")
        if any(c is found for c in rows):  # the short form: the class itself
            return found, _fault(found, name)
        named = [c for c in rows if getattr(c, "name", None) == name]
        if len(named) != 1:
            given = ", ".join(str(getattr(c, "name", c)) for c in rows) or "nothing"
            return None, f"its hook xrt_engines must give one engine called {name!r}; it gives {given}"
        return named[0], _fault(named[0], name)

    def _make(self, engine_class: type[Engine], name: str, owner: str) -> Engine:
        made = call_engine(f"engine {name!r} of {owner}: its constructor", PluginError, engine_class)
        self.plugins.add(made, name, owner)
        try:
            self._bring_rows(made, owner)
            engine = EngineProxy(made, f"engine {name!r} of {owner}")
            unknown = [d for d in engine.devices if not kinds.is_known(d)]
            if unknown:
                raise PluginError(
                    f"engine {name!r} of {owner}: {miss('device kind', unknown[0], list(kinds.names()))}; a package "
                    "brings one with the hook xrt_device_kinds"
                )
        except PluginError:
            self.plugins.remove(made)
            raise
        process_events.emit("engine.loaded", engine=name, package=owner)
        package = engine_class.__module__.partition(".")[0]
        for stray in op_kernels.strays(package, {name, *self._plugins(), *self._registered}):
            process_events.emit("kernels.stray", level=logging.WARNING, package=owner, error=stray)
        return engine

    def _targeting(self, target: str, options: Options) -> list[Engine]:
        """The named engines, compiling for a device that need not be here."""
        if options.engine is None or options.engine == (AUTO,):
            raise OptionError(
                f"target={target!r} ({options.source('target')}) is in the words of an engine, and none is named: give "
                "engine="
            )
        if options.guard:
            raise OptionError(
                f"target={target!r} ({options.source('target')}) compiles for a device elsewhere, and guard "
                f"({options.source('guard')}) examines what runs here: leave one of them out"
            )
        return [self.get(n).targeting(target) for n in options.engine if n != HOST]

    def _check_options(self, options: Options) -> None:
        """Raises OptionError where `engine_options` names an engine or a plugin that there is not."""
        known = self.names()
        for name in json.loads(options.engine_options) if options.engine_options else ():
            if name not in known and name not in options.sections:
                raise OptionError(
                    f"option 'engine_options' ({options.source('engine_options')}) speaks of engine {name!r}; there "
                    f"are {', '.join(known) or 'none'}{nearest(name, known)}"
                )

    def _not_found(self, name: str) -> str:
        known = [*self.names(), HOST, AUTO]
        return miss("engine", name, known, f"{_HINT}; an engine {name!r} would be pip install xrt-{name}")

    def _switched_by(self, switch: str) -> str:
        """The name of the engine that declares a switch; "" for none."""
        found = next((n for n, c in self._registered.items() if c.switch == switch), "")
        return found or declared.engine_of(switch)

    def _switched_on(self, switch: str, source: str) -> Engine:
        try:
            return self.usable(self._switched_by(switch))
        except EngineError as e:
            raise type(e)(f"{e} (asked for by {source})") from e.__cause__

    def _usable_or_none(self, name: str, device: str | None, is_known: bool) -> Engine | None:
        try:
            engine = self.get(name)
            if not engine.automatic:  # not even probed: that may load its library
                return None
            if is_known and name not in self._status and (status := engine.probe_installed()) is not None:
                self._installed[name] = status
            else:
                self.usable(name)
            self.device(engine, device)
        except EngineError as e:
            process_events.emit("engine.left_out", engine=name, reason=str(e))
            return None
        return engine

    def _line(self, name: str, plugins: tuple[Plugin, ...] | None, probe: bool) -> EngineListing:
        package, version = (plugins[0].package, plugins[0].version) if plugins else (self._registered.owner(name), "")
        if plugins and plugins[0].is_disabled:
            return EngineListing(
                name, package, version, "disabled", reason=f"{DISABLE_VARIABLE} names it", remedy="take it out of there"
            )
        problem = self._discovery.problem(plugins) if plugins else None
        if problem is not None:
            return EngineListing(name, package, version, "broken", reason=problem[0], remedy=problem[1])
        if not probe:
            return EngineListing(name, package, version, "installed")
        try:
            status = self.status(name)
        except EngineError as e:
            return EngineListing(name, package, version, "broken", reason=str(e))
        seconds = self._discovery.import_seconds(plugins[0]) if plugins else 0.0
        slow = f"importing it took {seconds:.1f} s" if seconds > SLOW_IMPORT_SECONDS else ""
        return EngineListing(
            name,
            package,
            version,
            "ready" if status.available else "unavailable",
            status.devices,
            status.version,
            "; ".join(filter(None, (status.reason, slow))),
            status.remedy,
        )


def _fault(engine: Any, name: str | None = None) -> str:
    """What is wrong with an engine class, in the words of the contract, or ""."""
    if not (inspect.isclass(engine) and issubclass(engine, Engine)):
        return f"{engine!r} is not a subclass of xrt_core.engine.Engine"
    missing = sorted(engine.__abstractmethods__)
    if missing:
        return f"{engine.__qualname__} does not implement {', '.join(missing)}"
    own = getattr(engine, "name", None)
    if not (isinstance(own, str) and own.isidentifier() and own == own.lower()) or own in (HOST, AUTO):
        return f"its name is {own!r}; it must be a lower-case identifier other than {HOST!r} and {AUTO!r}"
    if name is not None and own != name:
        return f"it calls itself {own!r}; the entry point and the class must agree"
    if engine.api_version != API_VERSION:
        older = isinstance(engine.api_version, int) and engine.api_version < API_VERSION
        cure = f"upgrade the package of engine {own!r}" if older else "upgrade xrt-core"
        return f"it is written for engine API {engine.api_version!r}, and this core has {API_VERSION}; {cure}"
    if isinstance(engine.devices, str) or not engine.devices:
        return f"its devices are {engine.devices!r}; expected a tuple such as ('cpu', 'cuda')"
    if not isinstance(engine.switch, str) or (engine.switch and not engine.switch.startswith("use_")):
        return f"its switch is {engine.switch!r}; it must be the name of an option that begins with 'use_'"
    if engine.switch in TABLE:
        return f"its switch is {engine.switch!r}, which is an option of the core"
    families = engine.array_families
    if not isinstance(families, tuple) or any(f not in ARRAY_FAMILIES for f in families):
        return f"its array_families are {families!r}; they must be a tuple of some of {', '.join(ARRAY_FAMILIES)}"
    if not isinstance(engine.priority, Mapping) or not all(isinstance(p, int) for p in engine.priority.values()):
        return f"its priority is {engine.priority!r}; it must map 'train' and 'inference' to integers"
    return ""


def _is_whole_host(device: str | None) -> bool:
    """Whether a device, None for the default, is where the host computes beside engines on the CPU."""
    return device is None or (is_host(device) and number_of(device) == 0)


def _check_host(options: Options) -> None:
    """Raises EngineUnavailableError where the host alone cannot compute on the device that is asked for."""
    device = options.device
    if _is_whole_host(device) or device is None:
        return
    if is_host(device):
        raise EngineUnavailableError(
            f"engine='host' computes on 'cpu', and device={device!r} ({options.source('device')}) is a part of it that "
            "only engines may have"
        )
    kind = kinds.find(device)
    if kind.namespace() is np:
        raise EngineUnavailableError(
            f"engine='host' cannot compute on device={device!r} ({options.source('device')}): {kind.why_no_namespace()}"
        )
    kinds.check(device)  # once more: with the namespace's library loaded more may be known


def _probe(engine: Engine) -> EngineStatus | EngineError:
    try:
        return engine.probe()
    except EngineError as e:
        return e


def _load_converters() -> None:
    for name, error in engines.load_converters().items():
        process_events.emit("converters.broken", level=logging.WARNING, plugin=name, error=str(error))


engines: Final = EngineManager(process_plugins.discovery, process_plugins)
"""The engines of this process."""
converters.load_by(_load_converters)


def register_converter(source: str, target: str) -> Callable[[Convert], Convert]:
    """Make the decorated function the converter from one space to another: "host" or the name of an engine.

        @xrt.register_converter("acme", "other")
        def from_acme(x):
            return np.from_dlpack(x)

    The function takes one array and returns one of the same dtype and shape; the first result of each step of a plan
    is checked. Plans that are made later use it; those that exist stay as they are.

    Raises RegistrationError for a pair that is taken. An engine that is not there (it may come later) is a warning.
    """

    def register(function: Convert) -> Convert:
        owner = owner_of(function)
        converters.register(source, target, function, owner=owner)
        known = [HOST, *(line.name for line in engines.listing(probe=False))]
        for space in (source, target):
            if space not in known:
                error = miss("engine", space, known)
                process_events.emit("converters.unknown", level=logging.WARNING, owner=owner, error=error)
        return function

    return register

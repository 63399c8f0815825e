"""The hooks of XRT, carried by pluggy: what a plugin may implement beside its engine.

    from xrt_core.engine import hookimpl

    class MyEngine(Engine):
        @hookimpl
        def xrt_event(self, event): ...

A hook's arguments are opt-in: an implementation names only those it wants, so it goes on working when a later version
of the core passes more. Before you add a hook here: it needs a caller in the core, and every plugin may rely on it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import pluggy

from xrt_core import events
from xrt_core.engine.converters import add_rows, converters
from xrt_core.errors import PluginError

PROJECT: Final = "xrt"
hookspec: Final = pluggy.HookspecMarker(PROJECT)
hookimpl: Final = pluggy.HookimplMarker(PROJECT)


class Specification:
    """Every hook there is. All are optional."""

    @hookspec
    def xrt_event(self, event: events.Event) -> None:
        """Something happened: an engine was loaded, a signature specialised, a cluster compiled, ...

        :param event: see `xrt_core.events.Event`.

        Called in the thread in which it happened; should be quick. An exception is logged and changes nothing.
        """

    @hookspec
    def xrt_converters(self) -> Iterable[tuple[str, str, Any]]:  # type: ignore[empty-body]
        """Converters of arrays: rows (source, target, function), see `xrt_core.engine.converters.Converter`.

        Called once, when the plugin is added: an engine at its first use, a plugin of the group `xrt.converters`
        before the first look-up of a converter.
        """

    @hookspec
    def xrt_passes(self) -> Iterable[Any]:  # type: ignore[empty-body]
        """Passes over graphs: functions Graph -> Graph or classes, with their place in attributes (`name`, `stage`,
        `before`, `after`, `requires`, `reason`), as the group `xrt.passes` names them.

        Called once, before the first module that is made after the plugin was added.
        """


class Hooks:
    """The plugins that implement hooks, checked when they are added."""

    def __init__(self) -> None:
        self.manager = pluggy.PluginManager(PROJECT)
        self.manager.add_hookspecs(Specification)
        self._listening = False
        self._pairs: dict[str, list[tuple[str, str]]] = {}  # plugin -> converters that it brought
        self._packages: dict[str, str] = {}
        self._passes: dict[str, list[tuple[str, str, Any]]] = {}  # plugin -> what `passes` found of it

    def add(self, plugin: object, name: str, package: str) -> None:
        """Register the hook implementations of `plugin`, if it has any.

        Raises PluginError, naming `package`, for an unknown hook, an argument that the hook does not have, or
        converters that are none or whose pair is taken; nothing of the plugin is registered then.
        """
        try:
            self.manager.register(plugin, name)
            self.manager.check_pending()
            implemented = [i for i in self.manager.hook.xrt_converters.get_hookimpls() if i.plugin is plugin]
            rows: list[Any] = [row for i in implemented for row in i.function()]  # type: ignore[attr-defined]
        except Exception as e:  # pluggy's own, and whatever a property of the plugin raises when pluggy looks at it
            if self.manager.has_plugin(name):
                self.manager.unregister(plugin)
            why = " ".join(str(e).split())
            raise PluginError(f"{package}: plugin {name!r} implements a hook wrongly: {why}") from e
        try:
            self._pairs[name] = add_rows(converters, rows, package)
        except PluginError:
            self.manager.unregister(plugin)
            raise
        self._packages[name] = package
        if not self._listening and self.manager.hook.xrt_event.get_hookimpls():
            events.subscribe(self._forward)
            self._listening = True

    def passes(self) -> list[tuple[str, str, Any]]:
        """Rows (name, package, pass) of the hook `xrt_passes`; for a hook that fails, a PluginError in its place."""
        for i in self.manager.hook.xrt_passes.get_hookimpls():
            if i.plugin_name in self._passes:
                continue
            package = self._packages.get(i.plugin_name, i.plugin_name)
            try:
                made: Iterable[Any] = i.function()  # type: ignore[assignment]
                rows = [(str(getattr(p, "name", "") or getattr(p, "__name__", p)), package, p) for p in made]
            except Exception as e:
                error = PluginError(f"{package}: the hook xrt_passes of {i.plugin_name!r} failed: {e!r}")
                rows = [(i.plugin_name, package, error)]
            self._passes[i.plugin_name] = rows
        return [row for rows in self._passes.values() for row in rows]

    def remove(self, name: str) -> None:
        """Forget the plugin of this name, if there is one."""
        self._packages.pop(name, None)
        self._passes.pop(name, None)
        if self.manager.has_plugin(name):
            self.manager.unregister(name=name)
        for pair in self._pairs.pop(name, ()):
            converters.unregister(*pair)

    def _forward(self, event: Any) -> None:
        self.manager.hook.xrt_event(event=event)

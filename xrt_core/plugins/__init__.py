"""Plugins: the hooks that a package may implement, and the plugins of this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xrt_core.plugins.hookspecs import hookimpl
    from xrt_core.plugins.manager import PluginManager

__all__ = ["hookimpl", "plugins"]

plugins: PluginManager
"""The plugins of this process."""


def __getattr__(name: str) -> Any:
    # pluggy is imported when the first plugin is looked at, and by packages that implement a hook
    if name == "plugins":
        from xrt_core import __version__
        from xrt_core.plugins.discovery import Discovery
        from xrt_core.plugins.manager import PluginManager

        found: Any = PluginManager(Discovery(__version__))
    elif name == "hookimpl":
        from xrt_core.plugins.hookspecs import hookimpl

        found = hookimpl
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, found)

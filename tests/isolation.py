"""What a test may change for the whole process: registries, hooks, listeners, `xrt.config`, environment and umask.

`isolated()` restores all of it when its block ends and returns what the block left behind, a sentence each. It forgets
compiled executables and verdicts, so that no test finds those of another. What an installed package registers when it
is first used (kernels, hooks and converters of its engine) stays: loading it later gives the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from xrt_core import events
from xrt_core.cache import store
from xrt_core.compiler import passes as compiler_passes
from xrt_core.engine import engines
from xrt_core.engine.boundary import ASPECTS, changed, restore, snapshot
from xrt_core.engine.converters import converters
from xrt_core.engine.device_kinds import kinds
from xrt_core.engine.op_kernels import OpKernel, op_kernels
from xrt_core.guard import verdict_cache
from xrt_core.ir import op_traits, schema
from xrt_core.kernels import registry as kernels
from xrt_core.options import declared, process_config
from xrt_core.plugins import plugins
from xrt_core.plugins.discovery import GROUPS, Plugin
from xrt_core.training import registry as training

_CORE = "xrt_core"
_VARIABLES = ("XRT_", "FLAGS_")


@dataclass(frozen=True, slots=True)
class _Table:
    """A mapping of the process that tests may add to.

    what: an entry, in words. read: the mapping as it is. keeps(key, value, installed): an entry that an installed
    package registered at its first use. write: replaces the content; None: the mapping is changed in place.
    """

    what: str
    read: Callable[[], MutableMapping[Any, Any]]
    keeps: Callable[[Any, Any, _Installed], bool] = lambda key, value, installed: False
    write: Callable[[dict[Any, Any]], None] | None = None

    def restore(self, content: dict[Any, Any]) -> None:
        """Make `content` what the mapping holds."""
        if self.write is not None:
            self.write(content)
            return
        now = self.read()
        for key in [k for k in now if k not in content]:
            del now[key]
        for key, value in content.items():
            if key not in now or now[key] is not value:
                now[key] = value


@dataclass(frozen=True, slots=True)
class _Installed:
    """The plugins that are installed: names of engines, owners as messages name them, and top-level modules."""

    engines: Collection[str]
    owners: Collection[str]
    modules: Collection[str]

    @classmethod
    def now(cls) -> _Installed:
        """Those that the process's discovery knows."""
        found: list[Plugin] = [p for g in GROUPS for same in plugins.discovery.plugins(g).values() for p in same]
        return cls(
            {p.name for p in found if p.group == "xrt.engines"},
            {p.owner for p in found},
            {_CORE, *(p.target.partition(".")[0].partition(":")[0] for p in found)},
        )

    def wrote(self, function: Any) -> bool:
        """Whether a function is of the core or of an installed plugin."""
        return str(getattr(function, "__module__", "")).partition(".")[0] in self.modules


def _replace_passes(content: dict[Any, Any]) -> None:
    compiler_passes.passes._passes = content


def _replace_types(content: dict[Any, Any]) -> None:
    converters._types = content


def _hooks() -> dict[str, object]:
    return {f"{r.name} of {r.owner}": r.plugin for r in plugins._records if not r.entries}


def _restore_hooks(content: dict[str, object]) -> None:
    for name, plugin in _hooks().items():
        if name not in content:
            plugins.remove(plugin)


def _listeners() -> dict[str, Any]:
    return {f"{f!r}": f for f in events._listeners if f != plugins._forward}


def _restore_listeners(content: dict[str, Any]) -> None:
    own = [f for f in events._listeners if f == plugins._forward]
    events._listeners[:] = [*own, *content.values()]


def _op_kernel(key: Any, value: OpKernel, installed: _Installed) -> bool:
    return value.engine in installed.engines and installed.wrote(value.function)


def _portable_kernel(key: Any, value: kernels.PortableKernel, installed: _Installed) -> bool:
    return installed.wrote(value.function)


def _traits(key: Any, value: Any, installed: _Installed) -> bool:
    by = op_traits._OWNERS.get(key)
    return by is not None and any(owner.startswith(by) for owner in installed.owners)


def _function(key: Any, value: Any, installed: _Installed) -> bool:
    return installed.wrote(value)


def _variables() -> dict[str, str]:
    return {n: v for n, v in os.environ.items() if n.startswith(_VARIABLES)}


def _restore_variables(content: dict[str, str]) -> None:
    for name in _variables():
        if name not in content:
            del os.environ[name]
    os.environ.update(content)


_TABLES = (
    _Table("engine", lambda: engines._registered._entries),
    _Table("switch", lambda: declared._of_process),
    _Table("made engine", lambda: engines._engines, lambda k, v, i: k in i.engines),
    _Table("hook implementation", _hooks, lambda k, v, i: k.partition(" of ")[2] in i.owners, _restore_hooks),
    _Table("device kind", lambda: kinds._kinds._entries, lambda k, v, i: kinds._kinds.owner(k) in i.owners),
    _Table("operator traits", lambda: op_traits._OWNERS, lambda k, v, i: v in i.owners),
    _Table("converter", lambda: converters._found, lambda k, v, i: v.owner in i.owners),
    _Table("array type", lambda: converters._types, write=_replace_types),
    _Table("pass", lambda: compiler_passes.passes._passes, lambda k, v, i: v.owner in i.owners, _replace_passes),
    _Table("pass of a plugin", lambda: compiler_passes._plugin_passes, lambda k, v, i: k[1] in i.owners),
    _Table("kernel of an engine", lambda: op_kernels._kernels, _op_kernel),
    _Table("portable kernel", lambda: kernels._KERNELS, _portable_kernel),
    _Table("schema", lambda: schema._DIALECT),
    _Table("traits of an operator", lambda: op_traits._ROWS, _traits),
    _Table("owner of traits", lambda: op_traits._OWNERS, _traits),
    _Table("gradient rule", lambda: training._RULES, _function),
    _Table("composition", lambda: training._COMPOSITIONS, _function),
    _Table("constant gradient", lambda: training._CONSTANT, lambda k, v, i: str(v).startswith(_CORE)),
    _Table("listener", _listeners, write=_restore_listeners),
    _Table("setting of xrt.config", lambda: process_config._values),
    _Table("environment variable", _variables, write=_restore_variables),
)


_ASPECTS = [ASPECTS[n] for n in ("the working directory", "the umask", "the locale", "the switch interval")]


@dataclass(slots=True)
class Leaks:
    """What a block left behind, a sentence each; filled when it ends."""

    found: list[str] = field(default_factory=list)


@contextmanager
def isolated() -> Iterator[Leaks]:
    """A block after which the process's state is what it was; the yielded object lists what was left behind."""
    before = [dict(table.read()) for table in _TABLES]
    state = snapshot(_ASPECTS)
    leaks = Leaks()
    try:
        yield leaks
    finally:
        store.forget_all()
        verdict_cache.forget_all()
        for table, content in zip(_TABLES, before, strict=True):
            leaks.found += _restored(table, content)
        left = changed(state, snapshot(_ASPECTS))
        leaks.found += [a.name for a in left]
        restore(left, state)


def _restored(table: _Table, before: dict[Any, Any]) -> list[str]:
    """Restore a table; a sentence for each entry that was added, changed or taken out."""
    now = dict(table.read())
    if now.keys() == before.keys() and all(now[k] is v or now[k] == v for k, v in before.items()):
        return []
    installed = _Installed.now()
    loaded = {k: v for k, v in now.items() if k not in before and table.keeps(k, v, installed)}
    changed = {k for k, v in before.items() if k in now and now[k] is not v and now[k] != v}
    replaced = {k: now[k] for k in changed if table.keeps(k, now[k], installed)}
    table.restore({**before, **loaded, **replaced})
    return [
        *(f"{table.what} {k!r} is left" for k in now if k not in before and k not in loaded),
        *(f"{table.what} {k!r} is another one" for k in changed if k not in replaced),
        *(f"{table.what} {k!r} is gone" for k in before if k not in now and not table.keeps(k, before[k], installed)),
    ]

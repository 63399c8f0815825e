"""The configuration API of a process: a function for each switch of an engine, undefined until someone calls it.

    xrt.config.use_<engine>(True)

These stand between the keyword arguments of `XRTModule`, which win over them, and the environment (see `options`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from xrt_core.errors import OptionError
from xrt_core.options.declared import PREFIX, find_switch, why_undeclared

_values: dict[str, Any] = {}


class UndeclaredSwitch(OptionError, AttributeError):
    """`xrt.config` has no such function: no installed package declares the switch."""


def __getattr__(name: str) -> Callable[[bool | None], None]:
    """The function that switches an engine on (True) or off (False) for modules made from now on, or back to undefined
    (None).

    Raises UndeclaredSwitch, an OptionError and an AttributeError, where no engine declares the switch.
    """
    if not name.startswith(PREFIX):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if find_switch(name) is None:
        raise UndeclaredSwitch(f"xrt.config.{name}: {why_undeclared(name)}")
    return partial(_set, name)


def init_subblock_optimizer(min_ops: int | None = 2) -> None:
    """Offer nodes without a mark to engines, in clusters of at least `min_ops`, also in graphs that have marks.

    Without it only marked nodes are offloaded in a graph where any is marked for an engine. It holds for modules made
    from now on, and their options `automatic` and `minimum_nodes` win over it. None: undefined again.
    Raises OptionError for less than 1.
    """
    if min_ops is None:
        _values.pop("automatic", None)
        _values.pop("minimum_nodes", None)
    elif isinstance(min_ops, int) and not isinstance(min_ops, bool) and min_ops >= 1:
        _values["automatic"], _values["minimum_nodes"] = True, min_ops
    else:
        raise OptionError(
            f"init_subblock_optimizer(min_ops={min_ops!r}): it takes an integer of at least 1, or None for undefined"
        )


def source(name: str) -> str:
    """What a user called to configure option `name`."""
    return "xrt.init_subblock_optimizer" if name in ("automatic", "minimum_nodes") else f"xrt.config.{name}"


def values() -> Mapping[str, Any]:
    """What has been configured, by option; read-only."""
    return MappingProxyType(_values)


def reset() -> None:
    """Make everything undefined again."""
    _values.clear()


def _set(name: str, value: bool | None) -> None:
    if value is None:
        _values.pop(name, None)
    elif isinstance(value, bool):
        _values[name] = value
    else:
        raise OptionError(f"xrt.config.{name}({value!r}): it takes True, False, or None for undefined")

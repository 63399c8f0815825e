"""The configuration API of a process: `xrt.config.use_xla_jit(True)` and its kin, undefined until someone calls them.

These stand between the keyword arguments of `XRTModule`, which win over them, and the environment (see `options`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from xrt_core.errors import OptionError

_values: dict[str, Any] = {}


def use_xla_jit(value: bool | None) -> None:
    """Switch the XLA engine on (True) or off (False) for modules made from now on; None: undefined again."""
    _set("use_xla_jit", value)


def use_tensorrt(value: bool | None) -> None:
    """Switch the TensorRT engine on (True) or off (False) for modules made from now on; None: undefined again."""
    _set("use_tensorrt", value)


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

"""The configuration API of a process: `xrt.config.use_xla_jit(True)` and its kin, undefined until someone calls them.

These stand between the keyword arguments of `XRTModule`, which win over them, and the environment (see `options`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from xrt_core.errors import OptionError

_values: dict[str, bool] = {}


def use_xla_jit(value: bool | None) -> None:
    """Switch the XLA engine on (True) or off (False) for modules made from now on; None: undefined again."""
    _set("use_xla_jit", value)


def use_tensorrt(value: bool | None) -> None:
    """Switch the TensorRT engine on (True) or off (False) for modules made from now on; None: undefined again."""
    _set("use_tensorrt", value)


def values() -> Mapping[str, bool]:
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

"""The {{ cookiecutter.engine }} engine: what it is, whether it can be used here, and which nodes it takes."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Final

from xrt_core import hookimpl
from xrt_core.engine.contract import CompileOptions, Engine, EngineStatus, Phase, Support
{%- if cookiecutter.devices == "other" %}
from xrt_core.engine.device_kinds import register_device_kind
{%- endif %}
{%- if cookiecutter.array_library != "onnx" %}
from xrt_core.engine.op_kernels import op_kernels
{%- endif %}
from xrt_core.errors import EngineUnavailableError
from xrt_core.ir.graph import Node
from xrt_core.ir.types import TensorType, dtype_name
{%- if cookiecutter.devices == "other" %}

from {{ cookiecutter.__module }}.device import {{ cookiecutter.device_kind|upper }}
{%- endif %}

if TYPE_CHECKING:
    from {{ cookiecutter.__module }}.compiler import {{ cookiecutter.__class }}GraphCompiler

__all__ = ["{{ cookiecutter.__class }}Engine"]
__version__ = "0.1.0"
{%- if cookiecutter.devices == "other" %}

register_device_kind({{ cookiecutter.device_kind|upper }}, "{{ cookiecutter.package }}")
{%- endif %}

# YOUR ENGINE: what to run where the library is missing. `xrt engines` and every error about it print this line.
_INSTALL: Final = "pip install {{ cookiecutter.__root if cookiecutter.array_library == 'namespace' else 'onnx' if cookiecutter.array_library == 'onnx' else 'numpy' }}"


class {{ cookiecutter.__class }}Engine(Engine):
    """The engine over {{ cookiecutter.__library }}; importing it does not import that."""

    name = "{{ cookiecutter.engine }}"
    # YOUR ENGINE: the kinds of devices that it can drive at all; `probe` says which of them are here.
    devices = {{ cookiecutter.__devices }}
    # YOUR ENGINE: False keeps it to those who ask for it by name. Set it to True once it is faster than XRT's host.
    automatic = False
    # YOUR ENGINE: "any" once it compiles Functions whose dimensions are symbols, one executable for all their sizes;
    # then `supports` is asked about nodes of such shapes, and the conformance kit tests it.
    dynamic_dims = "none"
    # YOUR ENGINE: its place among the engines that are tried, high to low. XLA has 100 for training and 50 for
    # inference, TensorRT 50 and 100. Stay below those that are faster on the same models. With `switch = "use_..."`
    # users turn the engine on or off by an option of that name.
    priority: ClassVar[Mapping[Phase, int]] = MappingProxyType({"train": 10, "inference": 10})

    def probe(self) -> EngineStatus:
        """Version and devices of the library, or why it cannot be used."""
        return _probe()

    def supports(self, node: Node, device: str, phase: Phase) -> Support:
        """Whether every tensor around `node` is static and of a dtype that the library has, and a kernel takes it."""
        status = _probe()
        if not status.available:
            return Support.no(status.reason)
{%- if cookiecutter.array_library == "onnx" %}
        reason = _refusal(node)
        if reason:
            return Support.no(reason)
        from {{ cookiecutter.__module }} import kernels

        return kernels.supports(node, phase)
{%- else %}
        _load_kernels()
        kernel = op_kernels.find("{{ cookiecutter.engine }}", node.domain, node.op_type)
        reason = _refusal(node, kernel.static if kernel is not None else ())
        if reason:
            return Support.no(reason)
        return op_kernels.supports("{{ cookiecutter.engine }}", node, device, phase)
{%- endif %}

    def compiler(self, device: str, options: CompileOptions) -> {{ cookiecutter.__class }}GraphCompiler:
        """A compiler for the device. Raises EngineUnavailableError where it is not there."""
        status = _probe()
        if not status.available:
            raise EngineUnavailableError(f"{{ cookiecutter.engine }} cannot be used: {status.reason}; {status.remedy}")
{%- if cookiecutter.array_library != "onnx" %}
        _load_kernels()
{%- endif %}
        from {{ cookiecutter.__module }}.compiler import {{ cookiecutter.__class }}GraphCompiler

        return {{ cookiecutter.__class }}GraphCompiler(device, options)

    def fingerprint(self, device: str) -> str:
        """Versions of this package and of the library, and the device: executables of another one do not fit."""
        from {{ cookiecutter.__module }} import _toolkit

        return f"{{ cookiecutter.package }} {__version__} {_toolkit.fingerprint_of(device)}"

    def prepare(self) -> None:
        """Import the library and the kernels now."""
        if _probe().available:
{%- if cookiecutter.array_library == "onnx" %}
            importlib.import_module("{{ cookiecutter.__module }}.kernels")
{%- else %}
            _load_kernels()
{%- endif %}
            importlib.import_module("{{ cookiecutter.__module }}.compiler")

    @property
    def package(self) -> str:
        """The pip package that brings the engine, for messages."""
        return "{{ cookiecutter.package }}"


# YOUR ENGINE: what else the package brings, each by its hook: options, passes, converters, commands, ... They are in
# xrt_core/plugins/hookspecs.py.
@hookimpl
def xrt_engines() -> list[type[Engine]]:
    """The engine of this package."""
    return [{{ cookiecutter.__class }}Engine]

{% if cookiecutter.array_library != "onnx" %}
@functools.cache
def _load_kernels() -> None:
    importlib.import_module("{{ cookiecutter.__module }}.kernels")  # registers them

{% endif %}
@functools.cache
def _probe() -> EngineStatus:
    try:
        from {{ cookiecutter.__module }} import _toolkit
    except Exception as e:  # a missing or broken installation raises what it likes
        reason = f"the library does not import: {type(e).__name__}: {e}"
        if isinstance(e, ModuleNotFoundError):
            reason = f"{e.name} is not installed"
        return EngineStatus(False, reason=reason, remedy=_INSTALL)
    found = _toolkit.devices()
    if not found:
        # YOUR ENGINE: what a user can do about it: a driver to install, a variable to set.
        return EngineStatus(False, _toolkit.version(), reason="the library finds no device", remedy="check its driver")
    return EngineStatus(True, _toolkit.version(), found)


{% if cookiecutter.array_library == "onnx" -%}
def _refusal(node: Node) -> str:
    """Why the library cannot hold a tensor around `node`, or ""."""
    from {{ cookiecutter.__module }} import _toolkit

    for value in (*node.inputs, *node.outputs):
{%- else -%}
def _refusal(node: Node, static: tuple[int, ...]) -> str:
    """Why the library cannot hold a tensor around `node`, or "". static: inputs that kernels get as NumPy arrays."""
    from {{ cookiecutter.__module }} import _toolkit

    held = [v for i, v in enumerate(node.inputs) if i not in static]
    for value in (*held, *node.outputs):
{%- endif %}
        if value is None:
            continue
        t = value.type
        if not isinstance(t, TensorType) or t.dtype is None or not t.is_static:
            return f"{value.name!r} of {node.operator} is {t or 'unknown'}: dtype and every dimension must be known"
        if t.dtype not in _toolkit.DTYPES:
            return f"{value.name!r} of {node.operator} is {dtype_name(t.dtype)}, which the library does not have"
    return ""

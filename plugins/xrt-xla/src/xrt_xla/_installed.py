"""What packages and the environment tell of JAX, so that a process that runs nothing on it need not import it."""

from __future__ import annotations

import functools
import importlib.util
import os
import pkgutil
import sys
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Final

from xrt_core.engine.serialization import instruction_set

_PLUGINS: Final = "jax_plugins"  # JAX's namespace package, and its group of entry points, for devices
_NAMED: Final = ("JAX_NUM_CPU_DEVICES", "JAX_PLATFORM_NAME", "PJRT_NAMES_AND_LIBRARY_PATHS", "TPU_LIBRARY_PATH")
"""Variables that bring other devices, or more of them."""


@functools.cache
def library_version() -> str:
    """Versions of JAX and of the compiler that comes with it. Raises PackageNotFoundError."""
    jax, compiler = version("jax"), version("jaxlib")
    return jax if jax == compiler else f"{jax}+{compiler}"


def fingerprint_of(kind: str, model: str, *details: str) -> str:
    """What a program depends on that is compiled for a device of this kind and model: see `Engine.fingerprint`."""
    flags = os.environ.get("XLA_FLAGS", "")  # some of them change numbers
    return " ".join(" ".join(("jax", library_version(), kind, model, *details, flags)).split())


def of_cpu() -> str:
    """`fingerprint_of` the CPU, which JAX calls "cpu" as a model too."""
    return fingerprint_of("cpu", "cpu", instruction_set())


def finds_one_cpu() -> bool:
    """Whether JAX is there, has not been imported, and would find the CPU as one device and no other: no package
    brings it another kind of device, and no variable says anything of devices."""
    if "jax" in sys.modules or "jaxlib" in sys.modules or any(os.environ.get(name) for name in _NAMED):
        return False
    if os.environ.get("JAX_PLATFORMS", "cpu") not in ("", "cpu") or "device_count" in os.environ.get("XLA_FLAGS", ""):
        return False
    return _is_for_cpu()


@functools.cache
def _is_for_cpu() -> bool:
    """Whether JAX is installed, and no package that brings it another device. It takes 9 ms to find out."""
    try:
        library_version()
    except PackageNotFoundError:
        return False
    found = importlib.util.find_spec(_PLUGINS)
    places = () if found is None else found.submodule_search_locations or ()
    brought = any(pkgutil.iter_modules(places)) or bool(entry_points(group=_PLUGINS))
    return not brought and importlib.util.find_spec("libtpu") is None

"""`xrt doctor`: what is installed and set on this machine, what is wrong with it, and how to mend that."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib import metadata
from typing import Final, NamedTuple

import typer

from xrt_core import __version__, options
from xrt_core.cli import engines, passes
from xrt_core.cli.display import command, say, show_table
from xrt_core.engine.device_kinds import DeviceKindListing, device_kinds
from xrt_core.engine.discovery import DISABLE_VARIABLE
from xrt_core.engine.manager import EngineListing
from xrt_core.engines import NOTHING_INSTALLED
from xrt_core.errors import OptionError

PROBLEMS_FOUND: Final = 1
_REQUIRED: Final = ("numpy", "onnx", "ml_dtypes", "pluggy", "packaging", "rich", "typer")
_OPTIONAL: Final = ("jax", "cupy-cuda13x", "cupy-cuda12x", "onnxruntime", "torch", "numba")
_CPU_FEATURES: Final = (
    "avx", "avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "asimd", "asimddp", "bf16", "sve",
)  # fmt: skip
_MACHINE_VARIABLES: Final = ("JAX_PLATFORMS", "XLA_FLAGS", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")


class Problem(NamedTuple):
    """Something that is wrong, and the cure."""

    what: str
    cure: str


@command
def doctor() -> None:
    """Show versions, the processor, engines and settings, then every problem with its cure; exit code 1 if any."""
    lines = engines.listing()
    say("versions")
    show_table(("  package", "version"), [(f"  {name}", version) for name, version in _versions()])
    say(f"\nprocessor\n  {_processor()}\n\nengines")
    engines.show(lines)
    say("\ndevices")
    say("\n".join(map(_device_line, device_kinds())))
    say("\nenvironment")
    variables = _variables()
    say("\n".join(f"  {name}={value}" for name, value in variables) or "  nothing that XRT reads is set")
    say("\nsettings in force")
    problems = list(_problems(lines))
    try:
        for name, setting, source in _settings():
            say(f"  {name} = {setting}  (from {source})")
    except OptionError:
        say("  none: see the problem below")
    say()
    for problem in problems:
        say(f"problem: {problem.what}\n   cure: {problem.cure}")
    if problems:
        raise typer.Exit(PROBLEMS_FOUND)
    say("no problems found" + (f"; {NOTHING_INSTALLED}" if len(lines) == 1 else ""))


def _versions() -> Iterator[tuple[str, str]]:
    yield "xrt-core", __version__
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    for name in _REQUIRED:
        yield name, _version(name) or "missing"
    for name in _OPTIONAL:
        version = _version(name)
        if version:
            yield name, version


def _device_line(line: DeviceKindListing) -> str:
    here = [f"{name}{_memory(*memory)}" for name, memory in zip(line.devices, line.memory, strict=True)]
    return f"  {line.name}, of {line.owner}: {', '.join(here) or f'none: {line.reason}'}"


def _memory(total: int | None, free: int | None) -> str:
    if total is None:
        return ""
    return f" ({total / 2**30:.1f} GiB{'' if free is None else f', {free / 2**30:.1f} free'})"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _processor() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    model, flags = platform.processor() or platform.machine(), set[str]()
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                key, _, value = line.partition(":")
                if key.strip() == "model name":
                    model = value.strip()
                elif key.strip().lower() in ("flags", "features"):
                    flags = set(value.split())
                    break
    except OSError:  # not Linux
        return f"{model}, {cores} usable cores"
    features = " ".join(f for f in _CPU_FEATURES if f in flags) or "no vector units known"
    return f"{model}, {cores} usable cores; {features}"


def _variables() -> list[tuple[str, str]]:
    ours = {o.env for o in options.TABLE.values() if o.env} | set(_MACHINE_VARIABLES)
    return sorted((n, v) for n, v in os.environ.items() if n in ours or n.startswith("XRT_"))


def _settings() -> Iterator[tuple[str, object, str]]:
    resolved = options.resolve()
    for name in options.TABLE:
        source = resolved.source(name)
        if source != "default":
            yield name, getattr(resolved, name), source
    yield "cache_size", f"{resolved.cache_size} signatures a module, in memory", resolved.source("cache_size")


def _problems(lines: list[EngineListing]) -> Iterator[Problem]:
    for name in _REQUIRED:
        if not _version(name):
            yield Problem(f"{name} is not installed, and xrt-core needs it", f"pip install {name}")
    for e in lines:
        if e.status == "broken":
            yield Problem(f"engine {e.name}: {e.reason}", e.remedy or f"pip install --upgrade {e.package}")
    for name, why in passes.listing()[1].items():
        yield Problem(f"pass {name} of a plugin is left out: {why}", "mend or remove its package")
    try:
        options.resolve()
    except OptionError as e:
        yield Problem(str(e), "correct the variable, or unset it")
    known = {e.name for e in lines} | {e.package for e in lines}
    for name in filter(None, (n.strip() for n in os.environ.get(DISABLE_VARIABLE, "").split(","))):
        if name not in known:
            yield Problem(f"{DISABLE_VARIABLE} names {name!r}, which is not installed", "take it out of the variable")

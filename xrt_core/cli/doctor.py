"""`xrt doctor`: show installed versions and settings of this machine, and each problem with its remedy."""

from __future__ import annotations

import os
import pathlib
import platform
import re
from collections.abc import Collection, Iterator
from importlib import metadata
from typing import Annotated, Final, NamedTuple

import typer

from xrt_core import __version__, options
from xrt_core.cli import cuda_report, engines, passes, results
from xrt_core.cli.display import FailedCheck, giving, say, show_table
from xrt_core.cli.plugin_commands import add_commands
from xrt_core.engine.device_kinds import DeviceKindListing, device_kinds
from xrt_core.engine.manager import EngineListing
from xrt_core.engines import NOTHING_INSTALLED
from xrt_core.errors import OptionError
from xrt_core.ir.graph import Node, every_node
from xrt_core.ir.operator_set import newest_version, plugin_domains
from xrt_core.ir.schema import undefined_operator
from xrt_core.options import declared
from xrt_core.plugins import plugins
from xrt_core.plugins.discovery import DISABLE_VARIABLE, GROUPS, Plugin, requirement_name
from xrt_core.plugins.manager import Problem as PluginProblem

_REQUIRED: Final = ("numpy", "onnx", "ml_dtypes", "pluggy", "packaging", "rich", "typer")
_ARRAY_LIBRARIES: Final = ("jax", "cupy-cuda13x", "cupy-cuda12x", "torch")
_CPU_FEATURES: Final = (
    "avx", "avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "asimd", "asimddp", "bf16", "sve",
)  # fmt: skip
_MACHINE_VARIABLES: Final = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")


Examined = Annotated[
    pathlib.Path | None, typer.Argument(help="An ONNX file, whose operators are looked at.", show_default=False)
]


class Problem(NamedTuple):
    """A problem of the installation or the configuration, and its remedy."""

    what: str
    remedy: str

    @property
    def command(self) -> str:
        """The shell command in the remedy; "" where it has none."""
        found = _COMMAND.match(self.remedy)
        return found[1].strip() if found else ""


_COMMAND: Final = re.compile(
    r"((?:pip|apt|unset|export) [^;,()]+?)(?= (?:with|where|instead|as|and|to|if|or|in)\b|[;,(]|$)"
)
"""A remedy that begins with what can be typed; words and brackets behind it explain."""


@giving(results.Doctor)
def doctor(
    context: typer.Context,
    model: Examined = None,
    fix_hints: Annotated[
        bool, typer.Option("--fix-hints", help="Print only what to do, as a shell script; other hints are comments.")
    ] = False,
) -> results.Doctor | FailedCheck:
    """Show versions, processor, engines and settings, then every problem with its remedy; exit code 1 if any.

    With a model: also the operators in it that no installed package defines.
    """
    lines = engines.listing()
    commands = getattr(context.find_root().command, "commands", ())
    problems = list(_problems(lines, commands))
    if model is not None:
        problems += _unknown_operators(model)
    if fix_hints:
        _show_fixes(problems, lines)
    else:
        _show_all(problems, lines)
    result = results.Doctor(
        versions=dict(_versions()), processor=_processor(), engines=engines.as_results(lines),
        devices=[_device_line(line).strip() for line in device_kinds()],
        cuda=dict(cuda_report.lines(_version, _cuda_libraries())), environment=dict(_variables()),
        settings=_known_settings(),
        problems=[results.FoundProblem(what=p.what, remedy=p.remedy, command=p.command) for p in problems],
    )  # fmt: skip
    return FailedCheck(result) if problems else result


def _show_fixes(problems: list[Problem], lines: list[EngineListing]) -> None:
    """A shell script that mends what commands mend; of engines that are not usable here what would be needed, as
    comments."""
    for p in problems:
        say(f"# {p.what}")
        say(p.command if p.command else f"#   {p.remedy}")
        if p.command and p.command != p.remedy:
            say(f"#   {p.remedy}")
    for e in lines:
        if e.status == "unavailable" and e.remedy:
            say(f"# optional, for engine {e.name} ({e.reason}):\n#   {e.remedy}")
    if not problems:
        say("# no problems found")


def _show_all(problems: list[Problem], lines: list[EngineListing]) -> None:
    say("versions")
    show_table(("  package", "version"), [(f"  {name}", version) for name, version in _versions()])
    say(f"\nprocessor\n  {_processor()}\n\nengines")
    engines.show(lines)
    say("\ndevices")
    say("\n".join(map(_device_line, device_kinds())))
    say("\nCUDA")
    rows = cuda_report.lines(_version, _cuda_libraries())
    show_table(("  what", "version"), [(f"  {name}", version) for name, version in rows])
    say("\nenvironment")
    variables = _variables()
    say("\n".join(f"  {name}={value}" for name, value in variables) or "  nothing that XRT reads is set")
    say("\nsettings in force")
    settings = _known_settings()
    say("\n".join(f"  {name} = {value}" for name, value in settings.items()) or "  none: see the problem below")
    say()
    for problem in problems:
        say(f"problem: {problem.what}\n   remedy: {problem.remedy}")
    if not problems:
        say("no problems found" + (f"; {NOTHING_INSTALLED}" if len(lines) == 1 else ""))


def _known_settings() -> dict[str, str]:
    """Option -> its value and source; empty where one of them cannot be read, which is a problem of its own."""
    try:
        return {name: f"{setting}  (from {source})" for name, setting, source in _settings()}
    except OptionError:
        return {}


def _versions() -> Iterator[tuple[str, str]]:
    yield "xrt-core", __version__
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    for name in _REQUIRED:
        yield name, _version(name) or "missing"
    needed = (requirement_name(r) for p in _plugins() for r in p.requirements)
    for name in dict.fromkeys((*_ARRAY_LIBRARIES, *sorted({*needed} - {"xrt-core", *_REQUIRED}))):
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


def _plugins() -> Iterator[Plugin]:
    """Yield every entry point of every installed plugin."""
    for group in GROUPS:
        for entries in plugins.discovery.plugins(group).values():
            yield from entries


def _cuda_libraries() -> tuple[cuda_report.Library, ...]:
    return cuda_report.libraries((p.package, line) for p in _plugins() for line in p.requirements)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _processor() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    model, flags = platform.machine(), set[str]()
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
    ours |= {s.variable for s in declared.switches().values()}
    for row in plugins.contributions("xrt_engines", "xrt.engines"):
        ours |= {n for n in getattr(row.value, "variables", ()) if isinstance(n, str)}
    return sorted((n, v) for n, v in os.environ.items() if n in ours or n.startswith("XRT_"))


def _settings() -> Iterator[tuple[str, object, str]]:
    resolved = options.resolve()
    for name in options.TABLE:
        source = resolved.source(name)
        if source != "default" and name != "engine_options":
            yield name, getattr(resolved, name), source
    for name, on in resolved.switches:
        yield name, on, resolved.source(name)
    for section in declared.sections().values():
        for name, value in resolved.section(section.name).items():
            yield f"{section.name}.{name}", value, resolved.sources.get(f"{section.name}.{name}", "default")
    yield "cache_size", f"{resolved.cache_size} signatures a module, in memory", resolved.source("cache_size")


def _problems(lines: list[EngineListing], commands: Collection[str]) -> Iterator[Problem]:
    for name in _REQUIRED:
        if not _version(name):
            yield Problem(f"{name} is not installed, and xrt-core needs it", f"pip install {name}")
    yield from (Problem(*p) for p in cuda_report.problems(_version, _cuda_libraries()))
    for e in lines:
        if e.status == "broken":
            yield Problem(f"engine {e.name}: {e.reason}", e.remedy or f"pip install --upgrade {e.package}")
    for name, why in passes.listing()[1].items():
        yield Problem(f"pass {name} of a plugin is left out: {why}", "mend or remove its package")
    said = {e.reason for e in lines if e.status == "broken"}
    for p in _plugin_problems(commands):
        if not any(p.reason in reason or reason in p.reason for reason in said):
            yield Problem(f"{p.what} ({p.owner}): {p.reason}", p.remedy or "mend or remove its package")
    try:
        options.resolve()
    except OptionError as e:
        yield Problem(str(e), "correct the variable, or unset it")
    for name in options.undeclared(os.environ):
        yield Problem(f"{name} is set: {declared.why_undeclared(name.removeprefix('FLAGS_'))}", f"unset {name}")
    known = {e.name for e in lines} | {e.package for e in lines} | {n for p in _plugins() for n in (p.name, p.package)}
    for name in filter(None, (n.strip() for n in os.environ.get(DISABLE_VARIABLE, "").split(","))):
        if name not in known:
            yield Problem(f"{DISABLE_VARIABLE} names {name!r}, which is not installed", "take it out of the variable")


def _unknown_operators(model: pathlib.Path) -> Iterator[Problem]:
    from xrt_core.compiler.models import read_model

    first: dict[str, list[Node]] = {}
    for n in every_node(read_model(str(model))):
        if undefined_operator(n):
            first.setdefault(n.operator, []).append(n)
    for operator, nodes in sorted(first.items()):
        where = f"{len(nodes)} nodes, the first {nodes[0].name!r}" if len(nodes) > 1 else f"node {nodes[0].name!r}"
        why, _, remedy = undefined_operator(nodes[0]).rpartition("; ")
        yield Problem(f"{model}: {operator} ({where}): {why}", remedy)


def _plugin_problems(commands: Collection[str]) -> list[PluginProblem]:
    """Load all plugins and yield their problems. commands: names of the core's commands."""
    from xrt_core.engine import engines as manager

    for group in GROUPS:
        plugins.load(group)
    declared.switches()
    declared.sections()
    manager.load_converters()
    for domain in plugin_domains():
        newest_version(domain)
    add_commands(typer.Typer(), commands)
    return plugins.problems()

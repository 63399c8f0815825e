"""Services: the components that the stages of a pipeline share, built once from the options of a module."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from xrt_core.cache.disk import open_cache
from xrt_core.cache.model_file import ModelFile
from xrt_core.cache.store import Compilation, ExecutableStore
from xrt_core.compiler.passes import load_plugin_passes, lowering, passes, rules_of
from xrt_core.engine import engines as process_engines
from xrt_core.engine.contract import CompileOptions, Engine, Executable, Function
from xrt_core.engine.converters import converters
from xrt_core.engine.device_kinds import CPU, is_host, kinds, same_device
from xrt_core.errors import DeviceNotFoundError, EngineError, OptionError, nearest
from xrt_core.events import EventLog
from xrt_core.host.place import HostPlace
from xrt_core.options import AUTO, Options
from xrt_core.options.guard_settings import GuardSettings
from xrt_core.passes.mixed_precision import LowerPrecision
from xrt_core.passes.partitioning import MarkRule
from xrt_core.passes.pass_manager import STAGES, PassRegistry, RegisteredPass, Stage
from xrt_core.passes.trace import Trace
from xrt_core.plugins import plugins
from xrt_core.runtime.plan import HOST

if TYPE_CHECKING:
    from xrt_core.guard.manager import GuardManager

Chosen = Sequence[tuple[Engine, str]]
"""The selected engines by descending priority, each with the device it compiles for."""


@dataclass(frozen=True)
class Services:
    """The components that the stages of one pipeline share.

    place: where the host computes. host_only: the pipeline has no engines, by option or because it is the baseline of
    another pipeline, so a mark that names an engine is not an error. passes: per stage, in order, as registered when
    the module was created. precision: the mixed-precision pass, None if not enabled. guard: None if it is off. auto:
    whether the engine of each cluster is chosen by measurement.
    """

    options: Options
    engines: tuple[tuple[Engine, str], ...]
    events: EventLog
    place: HostPlace
    executables: ExecutableStore
    compilation: Compilation
    guard: GuardManager | None
    rules: Sequence[MarkRule]
    registry: PassRegistry
    passes: Mapping[Stage, Sequence[RegisteredPass]]
    precision: LowerPrecision | None
    trace: Trace | None
    host_only: bool
    auto: bool

    def why_absent(self, name: str) -> str:
        """Return why an engine that a mark names is not selected, and the remedy."""
        try:
            process_engines.usable(name)
        except EngineError as e:
            return f"{e}; or take the mark off, or run with marks=False"
        listed = [e.name for e, _ in self.engines]
        return f"engine {name!r} is installed, but not among {listed}: add it with engine={[*listed, name]}"

    def device_for(self, wanted: str) -> str | None:
        """The name of a device that a node is placed on; None for the own device of the first engine.

        Raises DeviceNotFoundError, with those that are here, where no engine can use it, nor is it the host's.
        """
        own = self.engines[0][1] if self.engines else CPU.name
        is_known = kinds.is_known(wanted.partition(":")[0])
        if is_known and same_device(wanted, own):
            return None
        for engine, _ in self.engines:
            with contextlib.suppress(EngineError):
                return process_engines.device(engine, wanted)
        if is_known and same_device(wanted, CPU.name):
            return CPU.name
        here = [CPU.name, *(d for e, _ in self.engines for d in process_engines.devices(e))]
        names = ", ".join(dict.fromkeys(here))
        raise DeviceNotFoundError(f"there is no device {wanted!r} here; there are {names}{nearest(wanted, here)}")


def build_services(
    options: Options,
    engines: Chosen,
    events: EventLog,
    saved: ModelFile | None = None,
    *,
    registry: PassRegistry | None = None,
    host_only: bool = False,
    without: Collection[str] = (),
) -> Services:
    """Build the services for these options and engines.

    saved: the model file the module was loaded from, whose executables are used. registry: the pass registry as of
    the creation of the module; None: the current one. host_only: another pipeline has the engines. without: names of
    passes that are left out.

    Raises OptionError for options that the engines do not accept, and for marks that name an unselected engine.
    """
    compile_options = CompileOptions(
        phase=options.phase,
        workspace_bytes=options.max_workspace_bytes,
        max_batch_size=options.max_batch_size,
        threads=_threads(options, engines),
        release_cores=options.release_cores,
        extra=json.loads(options.engine_options) if options.engine_options else {},
    )
    disk = open_cache(options.cache, options.cache_dir, options.cache_bytes) if engines else None
    executables = ExecutableStore(disk, events, saved, _difference)
    compilation = Compilation(tuple(engines), compile_options, executables, events)
    compilation.check_options()
    device = options.device or (engines[0][1] if engines else CPU.name)
    # what is compiled for a device elsewhere may be tried here, on the CPU
    place = HostPlace.beside(device, options.check_indices) if options.target is None else HostPlace()
    settings = GuardSettings.of(options, saved is not None and not saved.has_verdicts) if engines else None
    guard: GuardManager | None = None
    if settings is not None:
        from xrt_core.guard.manager import GuardManager
        from xrt_core.runtime.binding import taken_at
        from xrt_core.runtime.transfers import adapter
        from xrt_core.verify.verdict import SavedVerdicts

        trusted = {} if saved is None else saved.info(SavedVerdicts).verdicts
        adapt = adapter(place.xp, partial(taken_at, compilation.engines, place.device), (AUTO,))
        guard = GuardManager(
            settings, compilation, disk, events, auto=options.auto, trusted=trusted, adapt=adapt, place=place
        )
    plugins.load("xrt.observers")
    converters.load_plugins()
    load_plugin_passes(events)
    registry = passes.snapshot() if registry is None else registry.with_plugins_of(passes)
    services = Services(
        options=options,
        engines=tuple(engines),
        events=events,
        place=place,
        executables=executables,
        compilation=compilation,
        guard=guard,
        rules=rules_of(options),
        registry=registry,
        passes={stage: [p for p in registry.order(stage) if p.name not in without] for stage in STAGES},
        precision=lowering(options),
        trace=Trace(options.trace, events) if options.trace else None,
        host_only=host_only or options.engine == (HOST,),
        auto=options.auto,
    )
    for rule in services.rules:
        if rule.engine not in (HOST, *(e.name for e, _ in engines)) and not services.host_only:
            raise OptionError(f"{rule} ({options.source('marks')}): {services.why_absent(rule.engine)}")
    return services


def _difference(function: Function, one: Executable, other: Executable) -> str:
    from xrt_core.verify.evaluate import difference  # for `cache="verify"` alone

    return difference(function, one, other)


def _threads(options: Options, engines: Chosen) -> int | None:
    """Return the threads of each CPU executable: the option, a share of the cores if engines run in parallel, or what
    the process may use if the machine has more, as not all libraries see that."""
    if options.threads is not None:
        return options.threads
    cores = usable_processors()
    sharing = sum(is_host(device) for _, device in engines)
    if options.parallel is True and sharing >= 2:
        return max(1, cores // sharing)
    return cores if cores < (os.cpu_count() or 1) else None


def usable_processors(root: pathlib.Path = pathlib.Path("/")) -> int:
    """Return how many processors this process may use: by its affinity, the quota of its control group and of those
    around it, and OMP_NUM_THREADS. root: of the file system."""
    found = [len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1]
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text(encoding="ascii").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            base = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
            inner = base / path.lstrip("/")
            for folder in (inner, *inner.parents):
                if folder.is_relative_to(base):  # in a container the path may be one of outside
                    found.append(_quota(folder))
    with contextlib.suppress(ValueError):  # "4,2": by level of nesting
        found.append(int(os.environ.get("OMP_NUM_THREADS", "").split(",")[0]))
    return max(1, min(found))


def _quota(folder: pathlib.Path) -> int:
    """Return the processors that the quota of a control group is worth, rounded up; a large number if it has none."""
    with contextlib.suppress(OSError, ValueError):
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text(encoding="ascii")
            period = (folder / "cpu.cfs_period_us").read_text(encoding="ascii")
        if quota != "max" and int(quota) > 0:
            return -(-int(quota) // int(period))
    return sys.maxsize

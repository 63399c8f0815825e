"""Makes the pipeline of a model: the host's in front and the one with engines behind it, where the guard says so."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

from xrt_core.cache.disk import open_cache
from xrt_core.cache.model_file import ModelFile
from xrt_core.compiler.pipeline import Chosen, Pipeline
from xrt_core.events import EventLog
from xrt_core.guard.background import BackgroundCompiler
from xrt_core.guard.policy import GuardSettings
from xrt_core.options import AUTO, Options
from xrt_core.runtime.plan import HOST


class LazyPipeline:
    """The pipeline with engines behind one that has none, made once, when it is first needed."""

    def __init__(self, make: Callable[[], Pipeline], planning: BackgroundCompiler) -> None:
        self.made: Pipeline | None = None
        self._make = make
        self._planning = planning
        self._lock = threading.Lock()

    def get(self) -> Pipeline:
        """The pipeline. Raises what making it raises; the next one who asks has it tried again."""
        with self._lock:
            if self.made is None:
                self.made = self._make()
                if self._planning.closed and self.made.guard is not None:  # the module was closed meanwhile
                    self.made.guard.close()
            return self.made


def pipeline_for(
    options: Options, choose: Callable[[Collection[str]], Chosen], events: EventLog, saved: ModelFile | None = None
) -> Pipeline:
    """The pipeline of a model: under an asynchronous guard the host's, with the one with engines behind it.

    choose: gives the engines, less those named. It is asked now where it may find something to complain about, and
    otherwise when the first answer has been given. saved: the file that the model was loaded from; then everything is
    ready at once.

    Raises what `choose` raises, and OptionError.
    """
    settings = GuardSettings.of(options)
    waits = settings is None or not settings.asynchronous or saved is not None or options.target is not None
    if settings is None or waits or options.engine == (HOST,):
        return Pipeline(options, choose(()), events, saved)
    chosen = None if _asks_for_nothing(options) else choose(())
    if chosen is not None and not chosen:
        return Pipeline(options, (), events)
    disk = open_cache(options.cache, options.cache_dir, options.cache_bytes)
    planning = BackgroundCompiler(settings, ", ".join(options.engine or (AUTO,)), disk, events)

    def make() -> Pipeline:
        engines = choose(planning.crashing_engines()) if chosen is None else chosen
        return Pipeline(options, engines, events, planning=planning, registry=first.registry)

    behind = LazyPipeline(make, planning)
    first = Pipeline(options, (), events, planning=planning, behind=behind)
    if options.engine_options or any(rule.engine != HOST for rule in first.rules):
        behind.get()  # it says what is wrong with them
    return first


def _asks_for_nothing(options: Options) -> bool:
    """Whether the choice of engines cannot be an error: all that are ready take part, and it is no matter which."""
    switched = options.use_xla_jit or options.use_tensorrt
    return options.engine in (None, (AUTO,)) and options.device is None and not (switched or options.engine_options)

"""Roll-out of an engine: whether the new one takes part here, which a plugin decides (hook `xrt_rollout`)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from xrt_core.engine.manager import EngineManager
from xrt_core.errors import OptionError, PluginError, XRTError
from xrt_core.events import EventLog
from xrt_core.options import AUTO, Options
from xrt_core.options.rollout import Rollout

_HOST = ("host",)


class Decision(Protocol):
    """What a plugin says of a rollout.

    acts: whether the new engine takes part in this job. `answering` returns what a module asks in the place of
    `candidate`, its model on the new engine, beside `proven`, a module of the same model without it. is_settled:
    whether what the candidate does in the background is done. It has what `compiler.models.ImportedModel` has.
    """

    acts: bool

    def answering(self, candidate: Any, proven: Any, is_settled: Callable[[], bool]) -> Any:
        """See the class."""


def roll_out(options: Options, events: EventLog, engines: EngineManager) -> tuple[Options, Decision | None]:
    """The options of a module with a rollout: without the new engine where it does not take part in this job, and else
    with the decision. Without the option `rollout`, or where the version here is not the new one: as they are.

    A new engine that cannot be used here does not take part, with the event `rollout.unusable`.
    Raises OptionError where nothing says which engine is new, or the named engines do not have it, and PluginError
    where no plugin decides.
    """
    given = options.rollout
    if given is None:
        return options, None
    name = _new_engine(given, options)
    without = _without(options, name)
    try:
        status, line = engines.status(name), next(e for e in engines.listing(probe=False) if e.name == name)
        engines.usable(name)
        versions = tuple(filter(None, (line.version, status.version)))
    except XRTError as e:
        events.emit("rollout.unusable", level=logging.WARNING, engine=name, reason=str(e))
        return without, None
    if given.version and given.version not in versions:
        return replace(options, rollout=None), None
    if not given.share:
        return without, None
    rollout = Rollout(given.share, f"{name}=={versions[-1] if versions else ''}", given.of, given.tolerance)
    for _, _, ask in engines.plugins.each("xrt_rollout", "xrt.observers", rollout=rollout, events=events):
        found: Decision | None = ask()
        if found is not None:
            return (options, found) if found.acts else (without, None)
    raise PluginError(
        f"rollout ({options.source('rollout')}): no installed plugin decides which jobs take part; pip install "
        "xrt-distributed"
    )


def _new_engine(given: Rollout, options: Options) -> str:
    named = () if options.engine in (None, (AUTO,), _HOST) else options.engine or ()
    name = given.name or next(iter(named), "")
    source = options.source("rollout")
    if not name:
        raise OptionError(
            f"rollout={given.share:g} ({source}) does not say which engine is new: rollout={{'share': {given.share:g}, "
            "'engine': NAME}, or engine=[NEW, PROVEN]"
        )
    if named and name not in named:
        raise OptionError(
            f"rollout ({source}) is of engine {name!r}, which is not among engine={list(named)} "
            f"({options.source('engine')})"
        )
    return name


def _without(options: Options, name: str) -> Options:
    engine = options.engine
    if engine is not None and engine != (AUTO,):
        engine = tuple(n for n in engine if n != name) or _HOST
    return replace(options, engine=engine, left_out=(name,), rollout=None)

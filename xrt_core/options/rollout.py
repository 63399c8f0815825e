"""The option `rollout`: a new engine, or an engine's new version, acts on a share of jobs or calls."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

from msgspec import Struct

from xrt_core.options.kinds import Kind, Reason

Unit = Literal["jobs", "calls"]
_NAMES: Final = ("share", "engine", "of", "tolerance")


class Rollout(Struct, frozen=True):
    """What is new, and how much it does.

    share: from 0 to 1, of jobs or of calls, as `of` says. engine: the new one, or "name==version" for one version of
    its package or library; "" is the first that the option `engine` names. tolerance: how far an output may be off
    from that of the proven engines, relative to its largest element; None: by its dtype.
    """

    share: float
    engine: str = ""
    of: Unit = "jobs"
    tolerance: float | None = None

    @property
    def name(self) -> str:
        """The engine's name, "" where the option `engine` says it."""
        return self.engine.partition("==")[0]

    @property
    def version(self) -> str:
        """The one version that is new, "" for any."""
        return self.engine.partition("==")[2]


def _accept(value: Any) -> Rollout:
    if isinstance(value, Rollout):
        return value
    if not isinstance(value, Mapping):
        return Rollout(_share(value))
    unknown = sorted(set(map(str, value)) - set(_NAMES))
    if unknown:
        raise Reason(f"there is no {unknown[0]!r} in it")
    if "share" not in value:
        raise Reason("it does not say the share")
    of, engine, tolerance = value.get("of", "jobs"), value.get("engine", ""), value.get("tolerance")
    if of not in get_args(Unit):
        raise Reason(f"it is a share of {of!r}; it can be {' or '.join(map(repr, get_args(Unit)))}")
    if not isinstance(engine, str) or (engine and not engine.partition("==")[0]):
        raise Reason(f"the engine is {engine!r}; it can be a name, or a name and a version as in 'acme==1.2'")
    if tolerance is not None:
        tolerance = float(tolerance)
        if not (math.isfinite(tolerance) and tolerance > 0):
            raise Reason(f"the tolerance is {tolerance!r}; it can be any positive number")
    return Rollout(_share(value["share"]), engine.replace(" ", ""), of, tolerance)


def _share(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError
    share = float(value)
    if not 0 <= share <= 1:
        raise Reason(f"the share is {value!r}")
    return share


def _parse(text: str) -> Rollout:
    return _accept(json.loads(text) if text.lstrip().startswith("{") else float(text))


ROLLOUT: Final = Kind(
    "a share from 0 to 1, or a mapping with 'share', 'engine' (a name, or 'name==version'), 'of' ('jobs' or 'calls') "
    "and 'tolerance'; in the environment a number, or such a mapping as JSON",
    _accept,
    _parse,
)

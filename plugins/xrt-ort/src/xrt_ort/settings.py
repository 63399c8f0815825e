"""What sessions hand to XRT: settings of the process, options of the provider, and session options as XRT's options."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from xrt_core import options
from xrt_core.errors import OptionError

log: Final = logging.getLogger("xrt")
PROVIDER: Final = "XRTExecutionProvider"

_IGNORED: Final[Mapping[str, Any]] = {
    "enable_cpu_mem_arena": True,
    "enable_mem_pattern": True,
    "enable_mem_reuse": True,
    "inter_op_num_threads": 0,
}
"""Session options that have no counterpart in XRT -> their defaults."""


@dataclass
class Settings:
    """Of the process. options: of every module (docs/options.md). after: seconds of calls after which a session is
    worth compiling for; programs that end earlier would pay for what they never get. on: whether engines may answer at
    all."""

    options: dict[str, Any] = field(default_factory=dict)
    after: float = 1.0
    on: bool = True


settings: Final = Settings()


def configure(*, after: float | None = None, on: bool | None = None, **given: Any) -> None:
    """Set what sessions made from now on hand to XRT.

    after: seconds of calls after which a session is worth compiling for (1.0). on: False, and the library answers every
    call. given: options of XRTModule (docs/options.md); None takes one back.

    Raises OptionError for an unknown option or a bad value.
    """
    if after is not None and not after >= 0:
        raise OptionError(f"after={after!r}: it takes a number of seconds, 0 or more")
    options.resolve({k: v for k, v in given.items() if v is not None})
    settings.after = settings.after if after is None else after
    settings.on = settings.on if on is None else on
    for name, value in given.items():
        if value is None:
            settings.options.pop(name, None)
        else:
            settings.options[name] = value


def split_providers(
    providers: Sequence[Any] | None, provider_options: Sequence[Mapping[Any, Any]] | None
) -> tuple[Any, Any, dict[str, Any] | None]:
    """Return (providers, provider options, options of XRT's own provider); None for the last where it is not named.

    XRT's provider is taken out; where no other is named, the CPU's stays. Raises ValueError for bad values of its
    options, as the library does for those of its own.
    """
    if not isinstance(providers, list | tuple):
        return providers, provider_options, None
    found: dict[str, Any] | None = None
    rest, rest_options = [], []
    for i, provider in enumerate(providers):
        name, given = provider if isinstance(provider, tuple) and len(provider) == 2 else (provider, None)
        if name != PROVIDER:
            rest.append(provider)
            if isinstance(provider_options, list | tuple) and i < len(provider_options):
                rest_options.append(provider_options[i])
            continue
        if given is None and isinstance(provider_options, list | tuple) and i < len(provider_options):
            given = provider_options[i]
        found = own_options(given or {})
    if found is None:
        return providers, provider_options, None
    if not rest:
        rest, rest_options = ["CPUExecutionProvider"], [{}]
    return rest, rest_options if provider_options is not None else None, found


def own_options(given: Mapping[Any, Any]) -> dict[str, Any]:
    """Return options of XRT's provider, read from text where they are text. Raises ValueError for bad ones."""
    made: dict[str, Any] = {}
    try:
        for name, value in given.items():
            where = f"option of {PROVIDER}: {name}"
            made[str(name)] = options.from_text(str(name), value, where) if isinstance(value, str) else value
        options.resolve(made)
    except OptionError as e:
        raise ValueError(str(e)) from e
    return made


def module_options(session_options: Any, own: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the options of XRTModule for a session with these session options and options of XRT's provider."""
    made = {**settings.options, **(own or {})}
    if session_options is not None:
        threads = getattr(session_options, "intra_op_num_threads", 0)
        if threads and threads > 0:
            made.setdefault("threads", int(threads))
        for name, default in _IGNORED.items():
            value = getattr(session_options, name, default)
            if value != default:
                log.debug("session option %s=%r has no counterpart in XRT and is ignored by its engines", name, value)
    return made


def why_library_only(session_options: Any) -> str:
    """Why only the library itself can do what these session options ask for, or ""."""
    if session_options is None:
        return ""
    if getattr(session_options, "replaces_weights", False):
        return "weights are given by the session options"
    if getattr(session_options, "has_custom_operators", False):
        return "a library of custom operators is registered"
    if getattr(session_options, "enable_profiling", False):
        return "the session is profiled"
    if getattr(session_options, "use_deterministic_compute", False):
        return "use_deterministic_compute is on"
    return ""

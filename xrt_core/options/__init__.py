"""Options: the one table of them, and where their values come from.

Keyword arguments win over `xrt.config`, which wins over environment variables, which win over the defaults.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from xrt_core.errors import OptionError
from xrt_core.options import process_config
from xrt_core.options.kinds import AUTO, HUGE, Kind, Reason
from xrt_core.options.table import TABLE, Option, Options, unknown

__all__ = ["AUTO", "HUGE", "TABLE", "Kind", "Option", "Options", "from_text", "resolve"]


def resolve(keywords: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> Options:
    """The options in force now: `keywords` over `xrt.config` over the environment over the defaults.

    None stands for "not given" where the default is None. environ: `os.environ` if None.
    Raises OptionError for an unknown option or a bad value, with what the option takes and the value's source.
    """
    found: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for option, value, source in _given(keywords or {}, os.environ if environ is None else environ):
        found[option.name], sources[option.name] = value, source
    options = Options(**found, sources=MappingProxyType(sources))
    if options.minimum_nodes > options.maximum_nodes:
        raise OptionError(
            f"minimum_nodes={options.minimum_nodes} ({options.source('minimum_nodes')}) is above "
            f"maximum_nodes={options.maximum_nodes} ({options.source('maximum_nodes')})"
        )
    _check_precision(options)
    return options


def _check_precision(options: Options) -> None:
    asked = {n: d for n, d in (("use_fp16", "float16"), ("use_bf16", "bfloat16")) if getattr(options, n)}
    if isinstance(options.precision, str):
        asked["precision"] = options.precision
    if len(set(asked.values())) > 1:
        shown = " and ".join(f"{n}={getattr(options, n)!r} ({options.source(n)})" for n in asked)
        raise OptionError(
            f"{shown} contradict each other: a graph is lowered to one type; mark single nodes with "
            "precision={'name:...': ...}"
        )
    if options.use_int8 and options.int8_calibration is None:
        raise OptionError(
            f"use_int8=True ({options.source('use_int8')}) needs int8_calibration=, the folder of the recorded ranges; "
            "record them with: with xrt.ptq_calibration_mode(folder): XRTModule(model)(inputs)"
        )


def from_text(name: str, text: str, source: str) -> Any:
    """The value that `text` stands for as option `name`, as a command line or a file gives it.

    Raises OptionError for an unknown option or a bad value, naming `source`.
    """
    if name not in TABLE:
        raise unknown(name)
    return _clean(TABLE[name], TABLE[name].kind.parse, text, source)


def _given(keywords: Mapping[str, Any], environ: Mapping[str, str]) -> Iterator[tuple[Option, Any, str]]:
    """Every value that someone gave, clean, from the weakest source to the strongest."""
    for option in TABLE.values():
        text = environ.get(option.env, "") if option.env else ""
        if text.strip():
            source = f"environment variable {option.env}"
            yield option, _clean(option, option.kind.parse, text, source), source
    for name, value in process_config.values().items():
        yield TABLE[name], value, process_config.source(name)
    for name, value in keywords.items():
        if name not in TABLE:
            raise unknown(name)
        option = TABLE[name]
        if value is not None or option.default is not None:
            source = f"keyword {name}="
            yield option, _clean(option, option.kind.accept, value, source), source


def _clean(option: Option, clean: Callable[[Any], Any], value: Any, source: str) -> Any:
    try:
        return clean(value)
    except (ValueError, TypeError) as e:
        reason = f": {e}" if isinstance(e, Reason) else ""
        raise OptionError(
            f"option {option.name!r} cannot be {value!r} (from {source}){reason}; it takes {option.kind.takes}"
        ) from None

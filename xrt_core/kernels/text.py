"""Text: operators on strings, which exist on the host only.

Source: the ONNX operator specifications. Patterns are in the syntax of RE2, which matches in linear time
(https://github.com/google/re2/wiki/Syntax); it is used where the package `google-re2` is installed. Python's own
matcher backtracks, so it is not given patterns whose time grows exponentially with the text.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

import numpy as np

from xrt_core.errors import InputError
from xrt_core.kernels.registry import OpContext, kernel


@kernel("RegexFullMatch", dynamic="strings exist on the host only")
def regex_full_match(ctx: OpContext, x: Any) -> Any:
    """Whether each string matches `pattern` from end to end. Raises InputError for a pattern that is refused."""
    matches = _matcher(str(ctx.attr("pattern", "")))
    found = np.fromiter((matches(str(s)) is not None for s in x.reshape(-1)), np.bool_, x.size)
    return found.reshape(x.shape)


@functools.lru_cache(64)
def _matcher(pattern: str) -> Callable[[str], Any]:
    try:
        re2: Any = importlib.import_module("re2")
    except ImportError:
        re2 = None
    try:
        if re2 is not None:
            return re2.compile(pattern).fullmatch  # type: ignore[no-any-return]
        if _backtracks(parser.parse(pattern), repeated=False):
            raise InputError(
                f"RegexFullMatch: the pattern {pattern[:200]!r} repeats what may repeat, or has references, and may "
                "take exponential time; pip install google-re2, which matches in linear time"
            )
        return re.compile(pattern).fullmatch
    except InputError:
        raise
    except Exception as e:  # RE2's error is no re.error; a deep pattern is a RecursionError
        raise InputError(f"RegexFullMatch: the pattern {pattern[:200]!r} is not valid: {e}") from e


def _backtracks(found: Any, repeated: bool) -> bool:
    """Whether a parsed pattern may match a text in exponentially many ways: within a repetition is another one of no
    fixed count, or a choice that is not told by the first character. References and assertions are not RE2's."""
    for code, arguments in found:
        if code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
            low, high, body = arguments
            if (repeated and low != high) or _backtracks(body, repeated or high > 1):
                return True
        elif code is codes.BRANCH:
            starts = [tuple(alternative[:1]) for alternative in arguments[1]]
            told = all(s and s[0][0] is codes.LITERAL for s in starts) and len(set(starts)) == len(starts)
            if (repeated and not told) or any(_backtracks(a, repeated) for a in arguments[1]):
                return True
        elif code is codes.SUBPATTERN:
            if _backtracks(arguments[-1], repeated):
                return True
        elif code not in (codes.LITERAL, codes.NOT_LITERAL, codes.IN, codes.ANY, codes.AT):
            return True
    return False

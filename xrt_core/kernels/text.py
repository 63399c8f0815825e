"""Text: operators on strings, which exist on the host only.

Source: the ONNX operator specifications. Patterns are in the syntax of RE2, which matches in linear time
(https://github.com/google/re2/wiki/Syntax); it is used where the package `google-re2` is installed. Python's own
matcher backtracks, so it is not given patterns whose time grows faster than the text.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

import numpy as np

from xrt_core.errors import InputError
from xrt_core.kernels.registry import OpContext, kernel


@kernel("RegexFullMatch", dynamic="strings exist on the host only", strings=True)
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
        parsed = parser.parse(pattern)
        if _backtracks(parsed, repeated=False) or _ways(parsed, _Ways()).are_too_many:
            raise InputError(
                f"RegexFullMatch: the pattern {pattern[:200]!r} repeats what may repeat, has repetitions that may "
                "share the text in many ways, or has references, and may take more than linear time; "
                "pip install google-re2, which matches in linear time"
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


_MOST_WAYS = 1000
"""As many ways to match the same text may be tried, whatever its length."""


@dataclass
class _Ways:
    """How many ways a sequence has to match one text.

    count: ways of what is bounded. open: an unbounded repetition was met whose end its next character does not tell, so
    that any later repetition is tried at each of its ends.
    """

    count: int = 1
    open: bool = False
    are_too_many: bool = False


def _ways(found: Any, ways: _Ways) -> _Ways:
    """Add the ways of a parsed pattern to those of what precedes it."""
    items = list(found)
    for i, (code, arguments) in enumerate(items):
        if code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
            low, high, body = arguments
            _ways(body, ways)
            if low == high:
                continue
            is_long = high is codes.MAXREPEAT or high - low >= _MOST_WAYS
            ways.are_too_many |= is_long and ways.open
            if not _is_told(body, items[i + 1] if i + 1 < len(items) else None):
                if is_long:
                    ways.open = True
                else:
                    ways.count *= high - low + 1
        elif code is codes.BRANCH:
            for alternative in arguments[1]:
                _ways(alternative, ways)
            ways.count *= len(arguments[1])
        elif code is codes.SUBPATTERN:
            _ways(arguments[-1], ways)
    ways.are_too_many |= ways.count > _MOST_WAYS
    return ways


def _is_told(body: Any, following: Any) -> bool:
    """Whether the character that follows a repetition of one character cannot belong to it."""
    if len(body) != 1 or following is None or following[0] is not codes.LITERAL:
        return False
    code, arguments = body[0]
    if code is codes.LITERAL:
        return bool(arguments != following[1])
    if code is codes.NOT_LITERAL:
        return bool(arguments == following[1])
    return code is codes.IN and not _holds(arguments, following[1])


_CLASSES = {
    codes.CATEGORY_DIGIT: r"\d", codes.CATEGORY_NOT_DIGIT: r"\D", codes.CATEGORY_SPACE: r"\s",
    codes.CATEGORY_NOT_SPACE: r"\S", codes.CATEGORY_WORD: r"\w", codes.CATEGORY_NOT_WORD: r"\W",
}  # fmt: skip


def _holds(members: Any, character: int) -> bool:
    """Whether a character class has a character; in doubt it has."""
    negated, found = False, False
    for code, arguments in members:
        if code is codes.NEGATE:
            negated = True
        elif code is codes.LITERAL:
            found |= arguments == character
        elif code is codes.RANGE:
            found |= arguments[0] <= character <= arguments[1]
        elif code is codes.CATEGORY and arguments in _CLASSES:
            found |= re.match(_CLASSES[arguments], chr(character)) is not None
        else:
            return True
    return found is not negated

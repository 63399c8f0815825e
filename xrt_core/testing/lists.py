"""The two lists of exceptions beside a suite: what an engine will never do, and what is to be repaired.

A line is `key: reason`; blank lines and lines that begin with `#` are left out. A key names a test of the kit
(`test_damaged_blobs_are_refused`), a case (`onnx/test_bernoulli`, `generated/Mod-float16-row`) or, in unsupported.txt,
a whole operator (`operator/NonZero`); `*` stands for any text. `key if FEATURE: reason` is a line for processors with
that feature alone (as Linux names it, such as avx512f), and `key if not FEATURE: reason` for all others.

unsupported.txt: for ever, by the nature of the engine. Of a listed operator or case the engine's `supports` must say
no; a listed test must fail. xfails.txt: broken now; the test must fail until it is repaired, then the line goes.
"""

from __future__ import annotations

import fnmatch
import pathlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from xrt_core.engine.serialization import processor_features
from xrt_core.errors import OptionError

UNSUPPORTED: Final = "unsupported.txt"
XFAILS: Final = "xfails.txt"


@dataclass(frozen=True, slots=True)
class Line:
    """One exception."""

    key: str
    reason: str
    where: str
    applies: bool = True  # on this processor

    def matches(self, key: str) -> bool:
        """Whether the line is about `key`."""
        return fnmatch.fnmatchcase(key, self.key.replace("[", "[[]"))


@dataclass(frozen=True, slots=True)
class Lists:
    """Both lists of one suite."""

    unsupported: tuple[Line, ...] = ()
    xfails: tuple[Line, ...] = ()

    @classmethod
    def read(cls, folder: pathlib.Path) -> Lists:
        """The lists in a folder; one that is not there is empty. Raises OptionError for a line without a reason."""
        return cls(_read(folder / UNSUPPORTED), _read(folder / XFAILS))

    def why_unsupported(self, *keys: str) -> str | None:
        """The reason of the first line of unsupported.txt about one of the keys."""
        return _reason(self.unsupported, keys)

    def why_xfail(self, *keys: str) -> str | None:
        """The reason of the first line of xfails.txt about one of the keys."""
        return _reason(self.xfails, keys)

    def stale(self, keys: Iterable[str]) -> list[str]:
        """A sentence for each line that is about none of the keys there are."""
        known = list(keys)
        return [
            f"{line.where}: nothing is called {line.key!r}"
            for line in (*self.unsupported, *self.xfails)
            if not any(line.matches(k) for k in known)
        ]


def _reason(lines: Iterable[Line], keys: tuple[str, ...]) -> str | None:
    return next((line.reason for line in lines if line.applies and any(line.matches(k) for k in keys)), None)


def _read(path: pathlib.Path) -> tuple[Line, ...]:
    if not path.is_file():
        return ()
    lines = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        text = text.strip()
        if not text or text.startswith("#"):
            continue
        key, _, reason = (part.strip() for part in text.partition(":"))
        if not key or not reason:
            raise OptionError(f"{path}:{number}: {text!r} must be `key: reason`; every exception needs its reason")
        key, _, feature = (part.strip() for part in key.partition(" if "))
        absent = feature.startswith("not ")
        applies = not feature or (feature.removeprefix("not ") in processor_features()) is not absent
        lines.append(Line(key, reason, f"{path.name}:{number}", applies))
    return tuple(lines)

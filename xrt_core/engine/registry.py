"""One generic registry: an object, read-only for everyone but `register`, with errors that say who and what."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Generic, NamedTuple, TypeVar

from xrt_core.errors import RegistrationError, XRTError

T = TypeVar("T")


class _Entry(NamedTuple, Generic[T]):
    value: T
    owner: str


class Registry(Mapping[str, T]):
    """Things of one kind by name, in the order of registration.

    kind: what is registered, in words ("pass"). hint: how to get more, for the message of a miss.
    missing: the error class of a miss.
    As a mapping it is read-only, and `registry[name]` raises KeyError as mappings do; `find` raises `missing`.
    """

    def __init__(self, kind: str, *, hint: str = "", missing: type[XRTError] = RegistrationError) -> None:
        self.kind, self.hint, self.missing = kind, hint, missing
        self._entries: dict[str, _Entry[T]] = {}

    def register(self, name: str, value: T, *, owner: str) -> T:
        """Add `value` under `name`; owner: the package or module it comes from. Returns the value.

        Raises RegistrationError for a name that is taken (naming both owners) or no identifier.
        """
        if not (isinstance(name, str) and name.replace("-", "_").isidentifier()):
            raise RegistrationError(f"{self.kind} {name!r} of {owner}: the name must be an identifier")
        taken = self._entries.get(name)
        if taken is not None:
            raise RegistrationError(f"{self.kind} {name!r} is registered twice: by {taken.owner} and by {owner}")
        self._entries[name] = _Entry(value, owner)
        return value

    def unregister(self, name: str) -> T:
        """Take out and return what `name` stands for. Raises `missing` for an unknown name."""
        value = self.find(name)
        del self._entries[name]
        return value

    def find(self, name: str) -> T:
        """What `name` stands for. Raises `missing`, listing what is known and how to get more."""
        entry = self._entries.get(name)
        if entry is None:
            raise self.missing(miss(self.kind, name, list(self._entries), self.hint))
        return entry.value

    def owner(self, name: str) -> str:
        """Who registered `name`. Raises `missing` for an unknown name."""
        self.find(name)
        return self._entries[name].owner

    def __getitem__(self, name: str) -> T:
        return self._entries[name].value

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"<Registry of {self.kind}: {', '.join(self._entries) or 'empty'}>"


def miss(kind: str, name: object, known: list[str], hint: str = "") -> str:
    """The message for a name that is not known: the closest one, all that are, and how to get more."""
    close = difflib.get_close_matches(str(name), known, n=1)
    text = f"there is no {kind} {name!r}; "
    if close:
        text += f"did you mean {close[0]!r}? "
    text += f"known: {', '.join(known)}" if known else f"no {kind} is known here"
    return text + (f"; {hint}" if hint else "")

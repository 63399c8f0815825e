"""The registry of converters: how a value of one space becomes one of another, and the array types users bring.

A space is "host" or the name of an engine: where arrays live that its steps can read. Without an entry here, arrays of
the host go into an engine as they are (`Executable.run` takes NumPy arrays), arrays of an engine come to the host by
DLPack or the array protocol, and from one engine to another they go by way of the host. An entry replaces that.
Array families tell which library an array type belongs to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from types import MappingProxyType
from typing import Any, Final

from msgspec import Struct

from xrt_core.errors import PluginError, RegistrationError

_LIBRARIES: Final = MappingProxyType(
    {"numpy": "numpy", "jax": "jax", "jaxlib": "jax", "cupy": "cupy", "torch": "torch"}
)
FAMILIES: Final = (*dict.fromkeys(_LIBRARIES.values()), "other")


_OWN: Final[dict[type, str]] = {}
"""Classes of the libraries themselves, which stay; users' classes that derive from them may go."""


def library_of(array_type: type) -> str:
    """The library an array type belongs to: "numpy", "jax", "cupy", "torch", or "other"."""
    found = _OWN.get(array_type)
    if found is not None:
        return found
    for base in array_type.__mro__:
        found = _LIBRARIES.get(base.__module__.partition(".")[0])
        if found is not None:
            if base is array_type:
                _OWN[array_type] = found
            return found
    return "other"


HOST: Final = "host"

Convert = Callable[[Any], Any]


class Converter(Struct, frozen=True):
    """The way from `source` to `target`.

    function: takes an array of the source and returns one of the target, of the same dtype and shape; it must not write
        into what it is given. None: arrays of the source are ones of the target, and nothing needs to be done.
    owner: the package or module it comes from.
    """

    source: str
    target: str
    function: Convert | None
    owner: str

    def __str__(self) -> str:
        return f"converter {self.source} -> {self.target} of {self.owner}"


class ArrayType(Struct, frozen=True):
    """A class of arrays that a user brings. See `register_array_type`."""

    type: type
    name: str
    to_host: Convert
    from_host: Callable[[Any, Any], Any] | None
    owner: str


class Converters:
    """Converters by (source, target), and array types. Safe to use from many threads.

    load: called once, before the first look-up; registers what installed packages bring.
    """

    def __init__(self, load: Callable[[], None] | None = None) -> None:
        self._found: dict[tuple[str, str], Converter] = {}
        self._types: dict[type, ArrayType] = {}
        self._load = load
        self._lock = threading.RLock()

    def register(self, source: str, target: str, function: Convert | None, *, owner: str) -> Converter:
        """Add a converter. Raises RegistrationError for a pair that is taken (naming both owners) or is no pair."""
        for space in (source, target):
            if not (isinstance(space, str) and space.isidentifier()):
                raise RegistrationError(
                    f"a converter of {owner}: {space!r} is no space; a space is 'host' or the name of an engine"
                )
        if source == target:
            raise RegistrationError(f"a converter of {owner}: from {source!r} to {target!r} nothing needs converting")
        if function is not None and not callable(function):
            raise RegistrationError(
                f"converter {source} -> {target} of {owner}: {function!r} is neither a function nor None"
            )
        made = Converter(source, target, function, owner)
        with self._lock:
            taken = self._found.get((source, target))
            if taken is not None:
                raise RegistrationError(
                    f"converter {source} -> {target} is registered twice: by {taken.owner} and by {owner}"
                )
            self._found[source, target] = made
        return made

    def unregister(self, source: str, target: str) -> None:
        """Take a converter out. Raises RegistrationError where there is none."""
        with self._lock:
            if self._found.pop((source, target), None) is None:
                raise RegistrationError(f"there is no converter {source} -> {target}; {self.known()}")

    def find(self, source: str, target: str) -> Converter | None:
        """The converter of a pair, or None."""
        self.load_plugins()
        return self._found.get((source, target))

    def takes_from(self, source: str) -> bool:
        """Whether there is a converter for arrays of this engine."""
        self.load_plugins()
        return any(s == source for s, _ in self._found)

    def load_by(self, load: Callable[[], None]) -> None:
        """Set what registers the converters of packages; the manager of the engines does, which imports this module."""
        self._load = load

    def load_plugins(self) -> None:
        """Register what installed packages bring, at the first time."""
        if self._load is not None:
            with self._lock:
                load, self._load = self._load, None
                if load is not None:
                    load()

    def known(self) -> str:
        """The pairs that have a converter, for messages."""
        pairs = ", ".join(f"{s} -> {t}" for s, t in sorted(self._found))
        return f"registered: {pairs}" if pairs else "no converter is registered"

    def register_type(self, made: ArrayType) -> None:
        """Add an array type. Raises RegistrationError for a class or a name that is taken, naming both owners."""
        with self._lock:
            for taken in self._types.values():
                if taken.type is made.type or taken.name == made.name:
                    what = f"{taken.name!r} ({taken.type.__module__}.{taken.type.__qualname__})"
                    raise RegistrationError(
                        f"array type {what} is registered twice: by {taken.owner} and by {made.owner}"
                    )
            self._types = {**self._types, made.type: made}

    def unregister_type(self, type_: type) -> None:
        """Take an array type out. Raises RegistrationError where it is not registered."""
        with self._lock:
            if type_ not in self._types:
                raise RegistrationError(f"{type_!r} is not registered as an array type")
            self._types = {t: a for t, a in self._types.items() if t is not type_}

    @property
    def has_types(self) -> bool:
        """Whether any array type is registered."""
        return bool(self._types)

    def array_type(self, type_: type) -> ArrayType | None:
        """The array type that a class, or one that it derives from, is registered as; None for all others."""
        return next((found for base in type_.__mro__ if (found := self._types.get(base)) is not None), None)


def add_rows(registry: Converters, rows: Iterable[Any], owner: str) -> list[tuple[str, str]]:
    """Register what a plugin's hook `xrt_converters` gave: rows (source, target, function or None).

    Returns the pairs. Raises PluginError, with nothing registered, for rows that are not of this form or are taken.
    """
    added: list[tuple[str, str]] = []
    try:
        for row in rows:
            source, target, function = row
            registry.register(source, target, function, owner=owner)
            added.append((source, target))
    except (RegistrationError, TypeError, ValueError) as e:
        for pair in added:
            registry.unregister(*pair)
        raise PluginError(
            f"{owner}: its hook xrt_converters must give rows (source, target, function or None): {e}"
        ) from e
    return added


converters: Final = Converters()
"""The converters of this process."""


def register_array_type(
    type: type,
    *,
    to_host: Convert,
    from_host: Callable[[Any, Any], Any] | None = None,
    name: str = "",
) -> None:
    """Let XRTModule take objects of `type` (and of classes derived from it) as arguments.

    to_host: object -> array that the model's input takes: of NumPy, or of any library that XRT knows.
    from_host: (result as a NumPy array, the first argument of that type) -> object. Where the first argument of a call
        is of the type, every result goes through it; it may return the array itself. Without it results are NumPy's.
    name: for messages; the class's name, unless given.

    Raises RegistrationError for a class or a name that is taken, for a class whose objects XRT takes anyway, and for
    what is no class or no function.
    """
    owner = owner_of(to_host)
    if not isinstance(type, _CLASS) or not callable(to_host) or not (from_host is None or callable(from_host)):
        raise RegistrationError(f"array type of {owner}: a class, to_host= and from_host= as functions are needed")
    if (type.__module__.partition(".")[0], type.__qualname__) in _TAKEN_ANYWAY:
        raise RegistrationError(
            f"array type of {owner}: XRT takes a {type.__module__}.{type.__qualname__} as it is; register a class of "
            "your own, which may derive from it"
        )
    converters.register_type(ArrayType(type, name or type.__qualname__, to_host, from_host, owner))


_CLASS: Final = type
_TAKEN_ANYWAY: Final = frozenset(
    (
        *(("numpy", "ndarray"), ("cupy", "ndarray"), ("torch", "Tensor")),
        *(("jax", "Array"), ("jaxlib", "Array"), ("jaxlib", "ArrayImpl")),
        *(("builtins", name) for name in ("object", "list", "tuple", "dict", "NoneType")),
    )
)
"""Top package and name of the classes that are arguments, or hold them, without a registration."""


def owner_of(function: object) -> str:
    return str(getattr(function, "__module__", None) or "__main__")

"""Array families: the library that an array type belongs to."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

_LIBRARIES: Final = MappingProxyType(
    {"numpy": "numpy", "jax": "jax", "jaxlib": "jax", "cupy": "cupy", "torch": "torch"}
)
FAMILIES: Final = (*dict.fromkeys(_LIBRARIES.values()), "other")


def library_of(array_type: type) -> str:
    """The library an array type belongs to: "numpy", "jax", "cupy", "torch", or "other"."""
    for base in array_type.__mro__:
        found = _LIBRARIES.get(base.__module__.partition(".")[0])
        if found is not None:
            return found
    return "other"

"""The generic registry."""

from __future__ import annotations

import pytest

from xrt_core.engine.registry import Registry
from xrt_core.errors import GraphError, RegistrationError


@pytest.fixture
def registry() -> Registry[int]:
    """A registry of numbers with one entry."""
    made: Registry[int] = Registry("number", hint="see the list", missing=GraphError)
    made.register("one", 1, owner="package a")
    return made


def test_a_duplicate_names_both_owners(registry: Registry[int]) -> None:
    """The second registration of a name is refused and changes nothing."""
    with pytest.raises(RegistrationError, match="number 'one' is registered twice: by package a and by package b"):
        registry.register("one", 2, owner="package b")
    assert registry["one"] == 1
    assert registry.owner("one") == "package a"


def test_a_miss_says_what_is_known(registry: Registry[int]) -> None:
    """find raises the registry's own error with the closest name; as a mapping it behaves as one."""
    with pytest.raises(GraphError, match="no number 'ome'; did you mean 'one'. known: one; see the list"):
        registry.find("ome")
    with pytest.raises(GraphError, match="no number is known here"):
        Registry[int]("number", missing=GraphError).find("one")
    with pytest.raises(KeyError):
        registry["two"]
    assert dict(registry) == {"one": 1}


def test_read_only_outside(registry: Registry[int]) -> None:
    """Entries come and go through register and unregister only; names are identifiers."""
    with pytest.raises(TypeError):
        registry["two"] = 2  # type: ignore[index]
    with pytest.raises(RegistrationError, match="must be an identifier"):
        registry.register("a b", 2, owner="x")
    assert registry.unregister("one") == 1
    assert len(registry) == 0

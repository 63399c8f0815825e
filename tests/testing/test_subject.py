"""The engine under test: how it is found, and what it answers about itself."""

from __future__ import annotations

from types import MappingProxyType

import numpy as np
import pytest

from xrt_core.engine import engines
from xrt_core.errors import EngineNotFoundError, RegistrationError
from xrt_core.testing import Capabilities, HostEngine
from xrt_core.testing.subject import Subject, address, as_numpy, spec_of

SPEC = "xrt_core.testing.host_engine:HostEngine"


class Strange(HostEngine):
    """It answers a question that nobody asks."""

    name = "strange"
    conformance = MappingProxyType({"determinism": False})


class Declared(HostEngine):
    """It answers for itself."""

    name = "declared"
    conformance = MappingProxyType({"deterministic": False, "toolkit": ("numba",)})


def test_an_engine_class_takes_part_in_nothing_else() -> None:
    """A class under test is known to the kit's own manager, not to the process."""
    subject = Subject(SPEC)
    assert subject.name == "host_reference"
    assert subject.is_known_elsewhere
    assert subject.name not in engines.names()
    assert spec_of(HostEngine) == SPEC
    assert spec_of("xla") == "xla"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("no.such.module:Engine", "there is no engine 'no.such.module:Engine': No module named 'no'; give a name"),
        ("xrt_core.testing.host_engine:Gone", "has no attribute 'Gone'"),
        ("xrt_core.testing.host_engine:HostCompiler", "not a subclass of xrt_core.engine.Engine"),
    ],
)
def test_a_bad_spec(spec: str, message: str) -> None:
    """The message says what is there instead of an engine."""
    with pytest.raises(RegistrationError, match=message):
        Subject(spec)


def test_an_unknown_name() -> None:
    """A name goes to the process's engines, which list what there is."""
    with pytest.raises(EngineNotFoundError, match="there is no engine 'nonsense'"):
        _ = Subject("nonsense").status


def test_answers() -> None:
    """The suite's answers win over the engine's own, those over none; an unknown question is an error."""
    assert Subject(SPEC).capabilities.in_place is True
    declared = Subject(spec_of(Declared))
    assert declared.capabilities == Capabilities(deterministic=False, toolkit=("numba",))
    assert declared.toolkit == ("numba",)
    assert Subject(spec_of(Declared), capabilities=Capabilities()).capabilities.deterministic
    with pytest.raises(RegistrationError, match="'strange': its `conformance` names 'determinism'; it may name "):
        _ = Subject(spec_of(Strange)).capabilities


def test_addresses_and_arrays() -> None:
    """Memory is told apart by where it begins; arrays of any protocol become NumPy's."""

    class ByDLPack:
        def __init__(self, array: np.ndarray) -> None:
            self.array = array

        def __dlpack__(self, **options: object) -> object:
            return self.array.__dlpack__()

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.array.__dlpack_device__()

    x = np.arange(4.0)
    assert address(x) == address(x[:2]) != address(x[1:])
    assert address(object()) is None
    np.testing.assert_array_equal(as_numpy(ByDLPack(x)), x)
    np.testing.assert_array_equal(as_numpy(x), x)

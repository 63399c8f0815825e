"""The serialised form of executables: what goes in comes out, and nothing else does."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xrt_core.engine.contract import Parameter
from xrt_core.engine.serialization import ParameterRow, instruction_set, pack, parameters_of, rows_of, unpack
from xrt_core.errors import CompileError
from xrt_core.files import decode, encode

MAGIC = b"XRTTEST\n"
plain = st.dictionaries(st.text(max_size=4), st.integers() | st.text() | st.none())
HEADER = {"for": "here", "n": [1, 2]}
BLOB = pack(MAGIC, HEADER, (b"one", b"", b"three"))


@pytest.mark.slow
@given(plain, st.lists(st.binary(max_size=20), max_size=4))
def test_what_is_packed_comes_back(header: dict[str, object], parts: list[bytes]) -> None:
    """Whatever the header says, and however many parts there are, empty ones too."""
    assert unpack(MAGIC, pack(MAGIC, header, parts), "acme", dict[str, Any]) == (header, parts)


@pytest.mark.parametrize("size", range(len(BLOB)))
def test_what_is_cut_is_an_error(size: int) -> None:
    """At every byte."""
    with pytest.raises(CompileError, match=r"acme: the blob is (not a serialised executable|damaged|empty)"):
        unpack(MAGIC, BLOB[:size], "acme", dict[str, Any])


@pytest.mark.parametrize(
    ("blob", "reason"),
    [
        (b"XRTELSE\n" + BLOB[8:], "acme: the blob is not a serialised executable of this version of the package"),
        (BLOB + b"x", f"has {len(BLOB) + 1} bytes, its manifest describes {len(BLOB)}"),
        (b"", "acme: the blob is empty"),
    ],
    ids=["foreign", "longer", "empty"],
)
def test_what_is_damaged_is_an_error(blob: bytes, reason: str) -> None:
    """With what is wrong; never another exception."""
    with pytest.raises(CompileError, match=reason):
        unpack(MAGIC, blob, "acme", dict[str, Any])


def test_what_was_made_elsewhere_is_an_error() -> None:
    """Both names are said."""
    assert unpack(MAGIC, BLOB, "acme", dict[str, Any], "here")[0] == HEADER
    with pytest.raises(CompileError, match="acme: the executable was made for 'here'; here is 'there'"):
        unpack(MAGIC, BLOB, "acme", dict[str, Any], "there")


def test_parameters_as_rows() -> None:
    """Dtypes that NumPy does not have included, by way of JSON."""
    given = [Parameter("x", np.dtype(ml_dtypes.bfloat16), (2, 3)), Parameter("s", np.dtype(np.int64), ())]
    assert parameters_of(decode(encode(rows_of(given)), tuple[ParameterRow, ...], "it", CompileError)) == given


def test_the_instruction_set_is_the_machine_s() -> None:
    """The same in every process."""
    code = "from xrt_core.engine.serialization import instruction_set; print(instruction_set())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == instruction_set()
    assert len(instruction_set()) == 16

"""Tensors of strings as they are given to modules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import parser

from xrt_core import XRTModule
from xrt_core.errors import InputError

DOUBLED = '<ir_version: 10, opset_import: ["": 20]> g (string[N] s) => (string[N] y) { y = StringConcat(s, s) }'


@pytest.fixture(scope="module")
def module() -> XRTModule:
    """Each text twice."""
    return XRTModule(parser.parse_model(DOUBLED), engine="host", cache="off")


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (np.array(["a", "é"], object), ["aa", "éé"]),
        (np.array(["a", "é"]), ["aa", "éé"]),
        (np.array(["a", "é"], np.dtypes.StringDType()), ["aa", "éé"]),
        (["a", "é"], ["aa", "éé"]),
        (("a",), ["aa"]),
        ([], []),
        (np.array(["a", 3, 1.5, np.int64(7), np.str_("b")], object), ["aa", "33", "1.51.5", "77", "bb"]),
        (np.array([b"a", "é".encode()], object), ["aa", "éé"]),
        (np.array([b"a", "é".encode()]), ["aa", "éé"]),
    ],
    ids=str,
)
def test_what_stands_for_texts(module: XRTModule, given: Any, wanted: list[str]) -> None:
    """Arrays of strings, of bytes and of objects, and lists; at every call, not at the first alone."""
    for _ in range(2):
        result = module(given)
        assert result.tolist() == wanted
        assert result.dtype == object
    assert module.run({"s": given})["y"].tolist() == wanted


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (np.array(["a", None], object), "input 's': element 1 is None"),
        (np.array(["a", b"\xff"], object), "input 's': element 1: these bytes are not UTF-8"),
        ([["a"], ["b", "c"]], "input 's': element 0 is a list, no text"),
        (np.array([1.0, 2.0]), r"input 's': dtype float64 given, string expected; convert it with .astype\(str\)"),
        (3, "input 's'"),
    ],
    ids=str,
)
def test_what_stands_for_no_text(module: XRTModule, given: Any, message: str) -> None:
    """An error names the input and the element, also after a call of the same signature."""
    module(np.array(["a", "b"], object))
    with pytest.raises(InputError, match=message):
        module(given)
    assert module(["a", "b"]).tolist() == ["aa", "bb"]

"""Operators on strings: matches are those of Python's matcher, and a pattern cannot take exponential time."""

from __future__ import annotations

import importlib.util
import re

import numpy as np
import onnx
import pytest

from tests.kernels.node_cases import run_numpy
from tests.kernels.single_node import node_case
from xrt_core.errors import InputError, XRTError
from xrt_core.kernels.text import _matcher
from xrt_core.module import XRTModule

WITHOUT_RE2 = pytest.mark.skipif(importlib.util.find_spec("re2") is not None, reason="RE2 takes all of them")


@pytest.mark.parametrize(
    "pattern", ["", "a+b?", r"[\w.]+@[\w.]+\.\w{2,3}", "(foo|bar)*", "(ab){2,5}", "(?i:x)|y", "^a.*z$"]
)
def test_full_matches(pattern: str) -> None:
    """Each string, from end to end, in the shape of the input."""
    texts = np.array([["", "aab", "me@x.org"], ["foobar", "abab", "a to z"]], object)
    (found,) = run_numpy(node_case("RegexFullMatch", 20, [texts], pattern=pattern))
    want = [[re.fullmatch(pattern, s) is not None for s in row] for row in texts.tolist()]
    assert found.dtype == bool
    np.testing.assert_array_equal(found, want)
    assert run_numpy(node_case("RegexFullMatch", 20, [texts[:0]], pattern=pattern))[0].shape == (0, 3)


@WITHOUT_RE2
@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+b",
        "(a|a)*b",
        "(a|ab)*c",
        "((a{1,9})*)*",
        r"(\w+\s?)*x",
        "(.*)*",
        r"(a)\1",
        "(?=a)b",
        "(?:a?){30}b",
        "a*a*b",
        ".*.*=",
        ".*x[a-z]*y",
        "(?:a{0,2000})a*",
        "a?" * 12 + "a" * 12,
        "(a|.|a)" * 7,
        r"\w+\d+",
    ],
)
def test_what_backtracks_is_refused(pattern: str) -> None:
    """Before it is matched; the pattern and the remedy are named."""
    with pytest.raises(
        InputError, match=r"RegexFullMatch: the pattern .* may take more than linear time; pip install google-re2"
    ):
        _matcher(pattern)


def test_a_model_has_the_same_matcher() -> None:
    """On the host of a module, where the input is known to be of strings."""
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 20]>
        g (string[n] x) => (bool[n] y) { y = RegexFullMatch<pattern: string = "[a-z]+@x">(x) }
    """)
    m = XRTModule(model, engine="host")
    assert m(np.array(["me@x", "me"], object)).tolist() == [True, False]
    if importlib.util.find_spec("re2") is None:
        model.graph.node[0].attribute[0].s = b"(a*)*b"
        with pytest.raises(XRTError, match="may take more than linear time"):
            XRTModule(model, engine="host")(np.array(["a" * 40], object))


@pytest.mark.parametrize("pattern", ["(", "[", "a{2,1}", "(" * 5000 + ")" * 5000, "*"])
def test_what_is_no_pattern(pattern: str) -> None:
    """An error of XRT, whatever the matcher raises."""
    with pytest.raises(XRTError, match="RegexFullMatch: the pattern"):
        _matcher(pattern)

"""The operators that an engine claims: the backend tests of ONNX, and generated cases against the host."""

from __future__ import annotations

from typing import Final

import numpy as np
import pytest

from xrt_core.ir.graph import Node
from xrt_core.ir.op_traits import is_exact, traits_of
from xrt_core.testing.base import SuiteBase
from xrt_core.testing.operator_claims import Claimed, Claims, claims_of
from xrt_core.testing.reference import reference
from xrt_core.testing.scorecard import recorder
from xrt_core.testing.subject import Subject
from xrt_core.testing.tolerance import assert_close

_ADDS_TERMS: Final = frozenset({"Mean", "Sum"})  # elementwise, and terms may cancel
_ADDS_POSITIVES: Final = frozenset({"LogSoftmax", "Softmax"})  # no elementwise operators, and nothing cancels


class OperatorTests(SuiteBase):
    """One test a case; what the engine refuses is not run, and stands on the score card as not claimed."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give the case tests their cases: the sample, or all of them, those beyond the sample marked slow."""
        subject = self.subject_of(metafunc.config)
        if subject is None:
            if "claimed" in metafunc.fixturenames:
                metafunc.parametrize("claimed", [])
            return
        records = recorder(metafunc.config)
        records.card(subject.name)
        if "claimed" not in metafunc.fixturenames:
            return
        full = _wants_full(metafunc.config)
        try:
            usable = subject.status.available
            claims = claims_of(subject, full) if usable else Claims()
        except Exception as e:  # a test must say it, not the collection
            metafunc.parametrize("claimed", [pytest.param(e, id="claims")])
            return
        records.card(subject.name).claim(claims)
        cases = claims.onnx if "onnx" in metafunc.function.__name__ else claims.generated
        if full:
            metafunc.config.addinivalue_line("markers", "slow: a case of the XRT conformance kit beyond the sample")
        metafunc.parametrize(
            "claimed",
            [
                pytest.param(c, id=c.key.partition("/")[2], marks=() if c.sample else pytest.mark.slow)
                for c in cases
                if full or c.sample
            ],
        )

    def test_onnx_case(self, subject: Subject, claimed: Claimed) -> None:
        """A backend test of ONNX that the engine takes gives what the standard says."""
        got = _run(subject, claimed)
        wanted = [w for v, w in zip(claimed.case.node.outputs, claimed.case.outputs, strict=True) if v is not None]
        for i, (result, want) in enumerate(zip(got, wanted, strict=True)):
            if _has_own_numbers(claimed.case.node):
                assert (result.dtype, result.shape) == (want.dtype, want.shape)
                continue
            try:
                assert_close(result, want, inputs=_arrays(claimed), what=f"output {i}")
            except AssertionError:
                self._against_the_host(claimed, i, result, want)

    def _against_the_host(self, claimed: Claimed, i: int, result: np.ndarray, want: np.ndarray) -> None:
        """Some backend tests hold numbers of a few digits: there the host in higher precision has the say, as long as
        the test's own tolerance holds."""
        case = claimed.case
        np.testing.assert_allclose(result, want, rtol=case.rtol, atol=case.atol, err_msg=f"output {i}")
        exact = reference(case.node, case.inputs)[i]
        assert_close(result, exact, dtype=want.dtype, inputs=_arrays(claimed), what=f"output {i} against the host")

    def test_generated_case(self, subject: Subject, claimed: Claimed) -> None:
        """A generated case that the engine takes gives what the host gives in higher precision."""
        got = _run(subject, claimed)
        wanted = reference(claimed.case.node, claimed.case.inputs)
        for i, (result, want, v) in enumerate(zip(got, wanted, claimed.function.returns, strict=True)):
            sums = _adds_up(claimed.case.node)
            assert_close(result, want, dtype=v.dtype, inputs=_arrays(claimed), sums=sums, what=f"output {i}")

    def test_refusals_are_as_listed(self, subject: Subject, request: pytest.FixtureRequest) -> None:
        """What unsupported.txt lists is refused; a suite that is complete refuses nothing else; no line is stale."""
        claims = claims_of(subject, True)
        lists = self.exceptions()
        taken = [
            f"{c.key} ({c.case.node.operator}) is listed as unsupported ({why}), and the engine takes it"
            for c in (*claims.onnx, *claims.generated)
            if (why := lists.why_unsupported(c.key, f"operator/{c.case.node.operator}")) is not None
        ]
        refused = [
            f"{key} ({operator}) is refused, and not listed as unsupported: {reason}"
            for key, (operator, reason) in claims.refused.items()
            if self.complete
            and key.startswith("onnx/")
            and lists.why_unsupported(key, f"operator/{operator}") is None
        ]
        silent = [f"{key} ({o}) is refused without a reason" for key, (o, why) in claims.refused.items() if not why]
        tests = [name for name in dir(type(self)) if name.startswith("test_")]
        problems = [*taken, *refused, *silent, *lists.stale([*claims.keys(), *tests])]

        assert not problems, "\n".join(problems)


def _run(subject: Subject, claimed: Claimed) -> list[np.ndarray]:
    """The results for read-only arguments, which must be as they were afterwards."""
    if isinstance(claimed, Exception):
        raise claimed
    executable = subject.compile(claimed.function)
    given = [x.copy() for x in claimed.arguments]
    for x in given:
        x.flags.writeable = False
    got = subject.run(executable, given)
    for p, x, before in zip(claimed.function.params, given, claimed.arguments, strict=True):
        assert x.tobytes() == before.tobytes(), f"the run has changed its input {p.name!r}"
    return got


def _arrays(claimed: Claimed) -> list[np.ndarray]:
    return [x for x in claimed.case.inputs if x is not None]


def _has_own_numbers(node: Node) -> bool:
    """Whether the numbers are the engine's: dtype and shape are all that can be compared. Dropout's follow its seed."""
    return traits_of(node).random and node.op_type != "Dropout"


def _adds_up(node: Node) -> bool:
    """Whether elements are added up on the way, so that a small result may hold the rounding of large terms."""
    traits = traits_of(node)
    alone = traits.elementwise and node.op_type not in _ADDS_TERMS
    return not (alone or is_exact(node) or node.op_type in _ADDS_POSITIVES)


def _wants_full(config: pytest.Config) -> bool:
    """Whether cases beyond the sample are wanted; whoever says `-m` on the command line chooses by the marker."""
    given = config.invocation_params.args
    return bool(config.getoption("--xrt-full", default=False)) or any(str(a).startswith("-m") for a in given)

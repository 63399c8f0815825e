"""What every part of the suite stands on: the answers of a subclass, its lists of exceptions, and the score card."""

from __future__ import annotations

import inspect
import pathlib
from typing import ClassVar

import pytest

from xrt_core.engine.contract import Engine
from xrt_core.testing.capabilities import Capabilities
from xrt_core.testing.lists import Lists
from xrt_core.testing.operator_claims import Claimed, dtype_of
from xrt_core.testing.scorecard import PROPERTY, recorder
from xrt_core.testing.subject import Subject, spec_of, subject_for


class SuiteBase:
    """The answers of a suite.

    engine: the name of an installed engine, or an engine class; "" takes what `--xrt-engine` says.
    device: to run on; None: what `--xrt-device` says, else the engine's first.
    capabilities: None takes the engine's own `conformance`.
    complete: whether the engine means to take every operator: then each refusal needs a line in unsupported.txt.
    lists: folder of unsupported.txt and xfails.txt; None: that of the file that defines the class.
    """

    engine: ClassVar[str | type[Engine]] = ""
    device: ClassVar[str | None] = None
    capabilities: ClassVar[Capabilities | None] = None
    complete: ClassVar[bool] = False
    lists: ClassVar[str | pathlib.Path | None] = None

    @classmethod
    def subject_of(cls, config: pytest.Config) -> Subject | None:
        """The engine under test, or None where neither the class nor the command line names one."""
        spec = spec_of(cls.engine) or config.getoption("--xrt-engine", default=None)
        device = cls.device or config.getoption("--xrt-device", default=None)
        return subject_for(spec, device, cls.capabilities) if spec else None

    @classmethod
    def exceptions(cls) -> Lists:
        """The lists of this suite."""
        folder = cls.lists if cls.lists is not None else pathlib.Path(inspect.getfile(cls)).parent
        return Lists.read(pathlib.Path(folder))

    @pytest.fixture(autouse=True)
    def _on_the_record(self, request: pytest.FixtureRequest) -> None:
        """Say to the score card what the test is about, and expect it to fail where a list says so."""
        subject = self.subject_of(request.config)
        if subject is None:
            pytest.skip("no engine is named; give --xrt-engine NAME, or set `engine` in a subclass")
        claimed: Claimed | None = request.node.funcargs.get("claimed") or _parameter(request)
        key = claimed.key if claimed is not None else request.node.originalname
        operator = claimed.case.node.operator if claimed is not None else ""
        dtype = dtype_of(claimed.case) if claimed is not None else ""
        request.node.user_properties.append((PROPERTY, (subject.name, operator, key, dtype)))
        given = request.config.getoption("--xrt-lists", default=None)
        lists = self.exceptions() if given is None else Lists.read(pathlib.Path(given))
        if claimed is None and (reason := lists.why_unsupported(key)) is not None:
            request.applymarker(pytest.mark.xfail(strict=True, reason=f"unsupported: {reason}"))
        if (reason := lists.why_xfail(key)) is not None:
            request.applymarker(pytest.mark.xfail(strict=True, reason=reason))

    @pytest.fixture
    def subject(self, request: pytest.FixtureRequest) -> Subject:
        """The engine under test. Skips where it is unavailable here; whatever else is wrong with it fails."""
        subject = self.subject_of(request.config)
        assert subject is not None
        status = subject.status
        if not status.available:
            pytest.skip(f"engine {subject.name!r} cannot be used here: {status.reason}; {status.remedy}")
        card = recorder(request.config).card(subject.name)
        card.version, card.device = status.version, subject.device
        return subject


def _parameter(request: pytest.FixtureRequest) -> Claimed | None:
    callspec = getattr(request.node, "callspec", None)
    found = callspec.params.get("claimed") if callspec is not None else None
    return found if isinstance(found, Claimed) else None

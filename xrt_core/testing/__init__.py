"""The conformance kit, for authors of engines: two lines, or `pytest --xrt-engine NAME --pyargs xrt_core.testing`.

    from xrt_core.testing import ConformanceSuite

    class TestXla(ConformanceSuite):
        engine = "xla"

What an engine cannot do for ever stands in `unsupported.txt`, what is to be repaired in `xfails.txt`, both beside the
file of that class. In XRT only `xrt check-engine` imports this package, and importing it imports nothing else
before it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from xrt_core.testing.capabilities import Capabilities
    from xrt_core.testing.host_engine import HostEngine
    from xrt_core.testing.scorecard import ScoreCard
    from xrt_core.testing.suite import ConformanceSuite
    from xrt_core.testing.tolerance import TOLERANCES, Tolerance, assert_close

__all__ = [
    "TOLERANCES",
    "Capabilities",
    "ConformanceSuite",
    "HostEngine",
    "ScoreCard",
    "Tolerance",
    "assert_close",
]

_HOME: Final = {
    "Capabilities": "capabilities",
    "ConformanceSuite": "suite",
    "HostEngine": "host_engine",
    "ScoreCard": "scorecard",
    "TOLERANCES": "tolerance",
    "Tolerance": "tolerance",
    "assert_close": "tolerance",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name))

"""The Python API of ONNX Runtime on XRT: the same names, answered by engines where they are right and faster.

    import xrt_ort as ort
    ort.InferenceSession("model.onnx").run(None, feeds)

Where onnxruntime is installed, sessions are subclasses of its own, and every other name is the library's. Where it is
not, XRT's own implementation of the API answers (`xrt_ort.own`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xrt_ort.genuine import library as _library
from xrt_ort.report import report
from xrt_ort.scope import patched
from xrt_ort.settings import PROVIDER as _PROVIDER
from xrt_ort.settings import configure

if TYPE_CHECKING or _library is not None:
    from xrt_ort.acceleration import wait
    from xrt_ort.session import InferenceSession, SessionOptions

    _own: Any = _library
else:
    from xrt_ort import own as _own
    from xrt_ort.own import InferenceSession, SessionOptions
    from xrt_ort.own.session import wait

__version__: str = _own.__version__

__all__ = [
    "InferenceSession",
    "SessionOptions",
    "configure",
    "get_all_providers",
    "get_available_providers",
    "patched",
    "report",
    "wait",
]


def get_available_providers() -> list[str]:
    """Return the names of the providers that sessions can have, XRT's first."""
    return [_PROVIDER, *_own.get_available_providers()]


def get_all_providers() -> list[str]:
    """Return the names of all providers that the library knows, XRT's first."""
    return [_PROVIDER, *_own.get_all_providers()]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    try:
        return getattr(_own, name)
    except AttributeError:
        raise AttributeError(f"module 'onnxruntime' (of xrt_ort) has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(_own)})

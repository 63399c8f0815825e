"""The genuine library: the only importer of `onnxruntime`, which may be absent.

From 1.29 on, its builds for Linux send what they do to Microsoft, and write a database and an identifier into
the user's cache folder when they are imported. Here that is off, unless ORT_DISABLE_TELEMETRY says something else.
"""

from __future__ import annotations

import os
from typing import Any, Final

_TELEMETRY: Final = "ORT_DISABLE_TELEMETRY"


def _load() -> Any:
    told = _TELEMETRY in os.environ
    if not told:
        os.environ[_TELEMETRY] = "1"  # which the library reads when it is imported
    try:
        import onnxruntime  # type: ignore[import-untyped]
    except ImportError:
        return None
    finally:
        if not told:
            os.environ.pop(_TELEMETRY, None)
    if not hasattr(onnxruntime, "InferenceSession"):  # a folder of that name
        return None
    if not told and hasattr(onnxruntime, "disable_telemetry_events"):
        onnxruntime.disable_telemetry_events()
    return onnxruntime


library: Final[Any] = _load()
"""The module `onnxruntime`; None where it is not installed."""

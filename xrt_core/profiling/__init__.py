"""Profiles: where the time of calls goes, by cluster and node, beside what this machine can do (docs/profiling.md)."""

from xrt_core.profiling.profiles import Profile, Row, profile
from xrt_core.profiling.roofline import Roofline

__all__ = ["Profile", "Roofline", "Row", "profile"]

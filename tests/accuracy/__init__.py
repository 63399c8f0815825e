"""Tests of `xrt_core.accuracy`."""

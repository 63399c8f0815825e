"""What needs several devices runs in a process of its own, for which JAX divides the CPU into four."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.architecture.source import ROOT

pytest.importorskip("jax")


def run_cases(*arguments: str) -> None:
    """Run the cases of this folder on four virtual devices; fail with what pytest says."""
    flag = "--xla_force_host_platform_device_count=4"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": flag},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.slow
def test_cases() -> None:
    """Every case that is not nightly passes on four devices, and the examples of the page do."""
    run_cases("tests/devices/cases.py", "tests/docs/test_examples.py", "-m", "not nightly")


@pytest.mark.nightly
def test_long_cases() -> None:
    """The long cases pass on four devices."""
    run_cases("tests/devices/cases.py", "-m", "nightly")

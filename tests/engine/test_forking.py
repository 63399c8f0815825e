"""What is registered for forked processes is called there, and nowhere else."""

from __future__ import annotations

import os
import sys

import pytest

from xrt_core.engine.forking import each_in_forked_process, keep_for_ever
from xrt_core.testing.processes import run_python


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system forks no processes")
def test_calls_in_a_forked_process() -> None:
    """One call, and one for each object that exists when the process is forked."""
    said = run_python("""
        import os
        from xrt_core.engine.forking import each_in_forked_process, in_forked_process

        objects, seen = [1], []
        in_forked_process(lambda: seen.append("once"))
        each_in_forked_process(objects, seen.append)
        objects.append(2)
        if os.fork() == 0:
            os._exit(seen != ["once", 1, 2])
        print(os.waitstatus_to_exitcode(os.wait()[1]), seen)
    """)
    assert said.splitlines()[-1] == "0 []"


def test_an_object_that_is_kept() -> None:
    """It has one reference more than the program holds."""
    made = object()
    before = sys.getrefcount(made)
    keep_for_ever(made)
    assert sys.getrefcount(made) == before + 1
    each_in_forked_process([], print)

"""Other processes, for what one process cannot show: lazy imports, missing libraries, executables that travel."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterable


def run_python(code: str, *, blocked: Iterable[str] = (), timeout: float = 300) -> str:
    """What a fresh interpreter with this one's search path prints for `code`. blocked: modules that cannot be imported.

    Raises AssertionError with its error output where it fails.
    """
    blocks = "".join(f"sys.modules[{name!r}] = None\n" for name in blocked)
    path = os.pathsep.join(p or os.getcwd() for p in sys.path)
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{blocks}{textwrap.dedent(code)}"],
        capture_output=True, text=True, check=False, timeout=timeout, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, f"a process ended with {done.returncode}:\n{done.stderr[-4000:]}"
    return done.stdout.strip()

"""How many files of the core the first call of a guarded, synchronous module enters in the caller's process."""

from __future__ import annotations

import pytest

from xrt_core.testing.processes import run_python

MOST_FILES = 70
"""Files of the core that the guarded call enters."""

WALK = """
    import os, sys, threading
    os.environ.pop("XRT_VERIFY", None)  # the verifier is no part of the walk
    import numpy as np
    import xrt_core
    from xrt_core.ir.graph import Value
    from xrt_core.module import XRTModule
    from xrt_core.testing import functions

    rng = np.random.default_rng(0)
    x, h, b, r, y = (functions.value(n, 4, 16) for n in "xhbry")
    w, c, v = (Value.constant(rng.standard_normal(s).astype(np.float32)) for s in ((16, 16), (16,), (16, 16)))
    nodes = [functions.node("MatMul", [x, w], [h]), functions.node("Add", [h, c], [b]),
             functions.node("Relu", [b], [r]), functions.node("MatMul", [r, v], [y])]
    graph = functions.function("mlp", [x], nodes, [y]).body
    root = os.path.dirname(xrt_core.__file__) + os.sep
    given = rng.standard_normal((4, 16)).astype(np.float32)

    def walk(**guard):
        # files whose functions are called: neither module nor class bodies, which importing runs
        m = XRTModule(graph, engine="xla", cache=False, **guard)
        entered = set()

        def profile(frame, event, argument):
            code = frame.f_code
            if event == "call" and code.co_filename.startswith(root) and code.co_flags & 2:
                entered.add(code.co_filename.removeprefix(root))

        threading.setprofile(profile)
        sys.setprofile(profile)
        m(given)
        sys.setprofile(None)
        threading.setprofile(None)
        return m, entered

    m, guarded = walk(guard=True, guard_async=False, guard_tune=False)
    assert m.report().clusters[0]["state"] == "live", m.report()
    print(*sorted(guarded))
"""


@pytest.mark.slow
def test_the_first_guarded_call_enters_few_files() -> None:
    """The list is printed where it is too long."""
    pytest.importorskip("jax")
    guarded = run_python(WALK).splitlines()[-1].split()
    print(*guarded, f"{len(guarded)} files", sep="\n")
    assert len(guarded) <= MOST_FILES, len(guarded)

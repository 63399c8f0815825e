"""The length of the walk: files of the core that the first call of a small model enters, and hops between them.

A hop is a call from a function of one file of the core to one of another, library code in between aside. The first call
of a process counts, with the executables' cache on and empty, so that importing the engine's kernels is part of it.
"""

from __future__ import annotations

import json

import pytest

from xrt_core.testing.processes import run_python

MOST_FILES, MOST_HOPS, HOT_FILES = 47, 502, 4

WALK = """
    import collections, json, os, sys
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
    module = XRTModule(functions.function("mlp", [x], nodes, [y]).body, engine="xla")
    array = rng.standard_normal((4, 16)).astype(np.float32)
    root = os.path.dirname(xrt_core.__file__) + os.sep

    def walk():
        files, hops = set(), collections.Counter()

        def profile(frame, event, argument):
            name = frame.f_code.co_filename
            if event != "call" or not name.startswith(root) or frame.f_code.co_name == "<module>":
                return
            outer = frame.f_back
            while outer is not None and not outer.f_code.co_filename.startswith(root):
                outer = outer.f_back
            files.add(name.removeprefix(root))
            if outer is None or outer.f_code.co_filename != name:
                hops[outer and outer.f_code.co_filename.removeprefix(root), name.removeprefix(root)] += 1

        sys.setprofile(profile)
        module(array)
        sys.setprofile(None)
        return sorted(files), hops

    first, hops = walk()
    hot, _ = walk()
    rows = [f"{n} {a} -> {b}" for (a, b), n in hops.most_common(20)]
    print(json.dumps({"first": first, "hops": sum(hops.values()), "most": rows, "hot": hot}))
"""


@pytest.mark.slow
def test_the_walk_is_short() -> None:
    """The lists are printed where one is too long."""
    pytest.importorskip("jax")
    found = json.loads(run_python(WALK))
    print(*found["first"], *found["most"], f"{len(found['first'])} files, {found['hops']} hops", sep="\n")
    assert len(found["first"]) <= MOST_FILES, len(found["first"])
    assert found["hops"] <= MOST_HOPS, found["hops"]
    assert len(found["hot"]) == HOT_FILES, found["hot"]

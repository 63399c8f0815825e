"""Run without the simulator: compiles the kernels of all cases to PTX, and prints what became of each as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

try:
    from toy_cases import cases
    from xrt_toy import _toolkit, kernels
    from xrt_toy.compiler import make_program, ptx_of
    from xrt_toy.executable import Slot
except Exception as e:  # numba.cuda itself does not import where CUDA's runtime library is not found
    if type(e).__name__ != "DynamicLibNotFoundError":
        raise
    print(json.dumps({"missing": str(e).splitlines()[0]}))
    sys.exit()

assert kernels.__all__
assert not _toolkit.SIMULATED


def missing() -> str:
    """Why nothing can be compiled here, or "" where the compiler's libraries are found."""
    from numba import types

    def nothing() -> None:
        """A kernel that every installation compiles."""

    try:
        _toolkit.cuda.compile_ptx(nothing, types.void(), cc=(9, 0))
    except Exception as e:
        if type(e).__name__ in ("DynamicLibNotFoundError", "NvvmSupportError", "NvrtcSupportError"):
            return f"{type(e).__name__}: {e}".splitlines()[0]
        raise
    return ""


def main() -> None:
    """Each distinct pair of kernel and signature once, for every compute capability on the command line.

    Operators on the command line: only the first case of each of them.
    """
    wanted = {a for a in sys.argv[1:] if not a.isdigit()}
    operators: set[str] = set()
    seen: set[Any] = set()
    compiled, failed, doubles = 0, {}, set()
    for case in cases():
        if wanted and (case.op_type not in wanted or case.op_type in operators):
            continue
        operators.add(case.op_type)
        function, _ = case.function()
        program = make_program(function, function.params, function.returns)
        if wanted:  # as `xrt inspect` shows it
            assert ".visible .entry" in ptx_of(program, (9, 0))
        dtypes = program.dtypes()
        for code in program.codes:
            for capability in filter(str.isdigit, sys.argv):
                arguments = [dtypes[a] if isinstance(a, Slot) else a for a in code.arguments]
                key = (code.kernel, _toolkit.signature(arguments), capability)
                if key in seen:
                    continue
                seen.add(key)
                try:
                    cc = int(capability[:-1]), int(capability[-1])
                    ptx = _toolkit.ptx(code.kernel, key[1], cc)
                    assert f".target sm_{capability}" in ptx
                    assert ".visible .entry" in ptx
                    compiled += 1
                    if ".f64" in ptx and all(d.itemsize <= 4 or d.kind != "f" for d in dtypes):
                        doubles.add(case.op_type)
                except Exception as e:  # every failure goes into the report
                    failed[f"{case!r} sm_{capability}"] = f"{type(e).__name__}: {e}"[:2000]
    print(json.dumps({"compiled": compiled, "failed": failed, "doubles": sorted(doubles), "seen": sorted(operators)}))


reason = missing()
if reason:
    print(json.dumps({"missing": reason}))
else:
    main()

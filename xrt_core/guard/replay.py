"""Replay: compiles and checks the function of a repro bundle again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from xrt_core.engine.contract import Engine
from xrt_core.errors import ModelLoadError
from xrt_core.guard.composite import checker_at, other_sizes
from xrt_core.ir.function import Function
from xrt_core.ir.symbols import expression
from xrt_core.passes.sized_graphs import function_at
from xrt_core.verify.checker import ResultChecker
from xrt_core.verify.inputs import synthesize_inputs
from xrt_core.verify.isolate import Candidate
from xrt_core.verify.repro import Bundle


@dataclass(frozen=True, slots=True)
class Replay:
    """Result of a replay. fails: whether the failure was reproduced. text: what happened, human-readable."""

    fails: bool
    text: str


def replay(bundle: Bundle, engine: Engine, device: str | None = None, seed: int = 0) -> Replay:
    """Compile and check the function of a bundle on `engine`; one of symbolic shapes for the sizes for which it failed,
    and for other ones. Raises XRTError if the host cannot run it, ModelLoadError where these sizes are not known."""

    def compile(function: Function, fused: bool) -> Any:
        here = device or bundle.device
        compiler = engine.compiler(here, bundle.options)
        return compiler.compile(function, function.params, function.returns, function.aliases)

    candidate = Candidate(engine.name, compile, engine.tolerance_with(bundle.options))
    try:
        executable = candidate.build(bundle.function, bundle.options.fused)
    except Exception as e:  # whatever an engine raises
        return Replay(True, f"it does not compile: {type(e).__name__}: {e}")
    for where, checker in _checkers(bundle, seed):
        check = checker.check(executable, candidate.tolerance)
        if not check.is_right:
            return Replay(True, f"it compiles, and is wrong{where}: {check.reason}")
    return Replay(False, "it compiles, and its results are right")


def _checkers(bundle: Bundle, seed: int) -> Iterator[tuple[str, ResultChecker]]:
    """What checks the results, with the sizes that it is for as text."""
    function = bundle.function
    used = {s for p in function.params for d in p.dims if (e := expression(d)) is not None for s in e.symbols}
    if unknown := sorted(used - bundle.sizes.keys()):
        raise ModelLoadError(
            f"the bundle does not say for which sizes of {', '.join(unknown)} it was written, as those of earlier "
            "versions of XRT do not; run the program again that wrote it"
        )
    static = function_at(function, bundle.sizes)
    inputs = bundle.inputs or synthesize_inputs(static, "normal", seed)
    yield _text(bundle.sizes), ResultChecker(static, inputs, seed)
    if function.is_symbolic:
        for sizes in other_sizes(function, bundle.sizes):
            if (checker := checker_at(function, sizes)) is not None and checker.is_informative:
                yield _text(sizes), checker


def _text(sizes: Mapping[str, int]) -> str:
    return "".join(f" for {k} = {v}" if i == 0 else f", {k} = {v}" for i, (k, v) in enumerate(sizes.items()))

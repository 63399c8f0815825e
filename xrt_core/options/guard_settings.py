"""GuardSettings: the options of the guard, resolved, and its rule for retries."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from xrt_core.ir.types import physical_memory
from xrt_core.options import Options

MAX_INPUT_BYTES: Final = 1 << 28
"""Copies of a call's inputs are kept for verification or a warm-up run up to this size in all."""

_LONGEST_RETRY: Final = 3600.0


@dataclass(frozen=True, slots=True)
class GuardSettings:
    """How clusters are guarded.

    asynchronous: compile in the background while the host answers. sandbox: compile in a worker process. verify: check
    results against the host. tune: time the candidates against each other and the host. timeout: seconds that
    compilation and verification of one cluster may take. memory: bytes that the worker may hold. failures: failed runs
    after which an executable is dropped. retry: seconds until the first retry of a failed cluster; later waits grow (0:
    never). run_timeout: seconds that one run may take (0: no limit; None: as `guard/launch.py` sets it). shadow: every
    how many calls the host runs too and results are compared (0: never; None: as `guard/launch.py` schedules it).
    finite: NaN and infinities are for the host where an engine is right for finite inputs only. real_inputs: verify on
    the inputs of a call. probation: first calls of an executable for which donated inputs are copied. isolated:
    executables run in a child process for good.
    """

    asynchronous: bool
    sandbox: bool
    verify: bool
    tune: bool
    timeout: float
    memory: int
    failures: int
    retry: float
    run_timeout: float | None
    shadow: int | None
    finite: bool
    real_inputs: bool
    isolated: bool = False
    probation: int = 8

    @classmethod
    def of(cls, options: Options, saved: bool = False) -> GuardSettings | None:
        """The settings that the options ask for; None if no part of the guard is on.

        A part that is not given follows `guard`, which is on by default, except for a device elsewhere (`target`). An
        engine that is named is not timed against the host (`tune`) unless `guard=True`; `engine="auto"`, the default
        for inference, times all that are ready, with `guard=False` as well where it is asked for. saved: the
        executables come from a file without verdicts, and are run as they were saved unless `guard` is given.
        """
        auto = options.auto and not (saved and options.engine is None)
        whole = bool(options.guard) if options.guard is not None else auto or (options.target is None and not saved)
        asynchronous, sandbox, verify = (
            whole if given is None else given
            for given in (options.guard_async, options.guard_sandbox, options.guard_verify)
        )
        isolated = options.guard == "isolated"
        sandbox |= isolated
        tune = auto or (options.guard is True if options.guard_tune is None else options.guard_tune)
        if not (asynchronous or sandbox or verify or tune or options.guard_shadow or options.guard_run_timeout):
            return None
        return cls(
            asynchronous,
            sandbox,
            verify,
            tune,
            timeout=options.guard_timeout,
            memory=options.guard_memory or physical_memory() // 2,
            failures=options.guard_failures,
            retry=options.guard_retry,
            run_timeout=options.guard_run_timeout,
            shadow=options.guard_shadow if options.guard_shadow is not None or verify else 0,
            finite=options.nan == "host",
            real_inputs=options.guard_real_inputs,
            isolated=isolated,
        )


def retry_time(first: float, attempts: int) -> float:
    """When a failure is retried, in `time.monotonic` seconds: after `first` seconds, four times longer after each
    attempt, at most an hour; infinity where `first` is 0."""
    return time.monotonic() + (min(first * 4.0 ** (attempts - 1), _LONGEST_RETRY) if first > 0 else float("inf"))

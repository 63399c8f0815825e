"""GuardSettings: what the options say about the guard, resolved."""

from __future__ import annotations

import os
from dataclasses import dataclass

from xrt_core.options import AUTO, Options


@dataclass(frozen=True, slots=True)
class GuardSettings:
    """How clusters are guarded.

    asynchronous: compile beside the caller, the host answers meanwhile. sandbox: compile in a child process.
    verify, tune: examine results, and speed. timeout: seconds that one cluster's compilation and examination may take.
    memory: bytes that the child may hold. failures: so many at run time retire an executable. retry: seconds until a
    failure is tried again the first time, later ones wait longer (0: never). run_timeout: seconds that one execution
    may take (0: no limit). shadow: every so many calls the host's results are compared (0: never). real_inputs:
    whether the inputs of a call may be used to examine. probation: so many first calls keep copies of donated inputs
    and have every result looked at.
    """

    asynchronous: bool
    sandbox: bool
    verify: bool
    tune: bool
    timeout: float
    memory: int
    failures: int
    retry: float
    run_timeout: float
    shadow: int
    real_inputs: bool
    probation: int = 8

    @classmethod
    def of(cls, options: Options) -> GuardSettings | None:
        """The settings that options mean; None where nothing of the guard is on.

        A part that is not given is on where `guard` is; `engine="auto"` turns the whole guard on, unless `guard` is
        given as False: then its candidates are only timed against each other.
        """
        auto = options.engine == (AUTO,)
        whole = options.guard if options.guard is not None else auto
        asynchronous, sandbox, verify, tune = (
            bool(whole if given is None else given)
            for given in (options.guard_async, options.guard_sandbox, options.guard_verify, options.guard_tune)
        )
        tune = tune or auto
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
            shadow=options.guard_shadow,
            real_inputs=options.guard_real_inputs,
        )


def physical_memory() -> int:
    """Bytes of memory of this machine; 8 GiB where the system doesn't say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 8 << 30

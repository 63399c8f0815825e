"""What names a job, and which share of jobs or calls something falls on: the same in every process of a job."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Mapping
from typing import Final

JOB: Final = "XRT_DISTRIBUTED_JOB"
"""The variable that names the job; `xrt launch` and `ray.map` set it where nobody did."""
_OF_SCHEDULERS: Final = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "OMPI_MCA_ess_base_jobid", "RAY_JOB_ID")
_own: Final = uuid.uuid4().hex


def job_name(environ: Mapping[str, str] | None = None) -> str:
    """The job's name: what `XRT_DISTRIBUTED_JOB` or the scheduler says, and else a random one of this process.

    Jobs with a name of their own are drawn alike whenever they run again; a random one is drawn anew.
    """
    environ = os.environ if environ is None else environ
    return next((environ[n] for n in (JOB, *_OF_SCHEDULERS) if environ.get(n, "").strip()), _own)


def falls_on(share: float, *names: object) -> bool:
    """Whether a share (0 to 1) falls on what these names name: a hash (BLAKE2b), the same in every process."""
    digest = hashlib.blake2b("\0".join(map(str, names)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") < share * 2**32

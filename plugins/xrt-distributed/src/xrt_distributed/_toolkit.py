"""The only importer of JAX: joining processes, and what they do together."""

from __future__ import annotations

import os
from collections.abc import Callable

from xrt_core.errors import CheckpointError, EngineUnavailableError


def join() -> None:
    """Make this process one of several. See `xrt_distributed.initialize`."""
    import jax

    given = {n: os.environ.get(n) for n in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    missing = [n for n, v in given.items() if not v]
    if jax.config.jax_cpu_collectives_implementation in (None, "none"):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        if not missing:
            jax.distributed.initialize(
                f"{given['MASTER_ADDR']}:{given['MASTER_PORT']}",
                num_processes=int(given["WORLD_SIZE"] or 1),
                process_id=int(given["RANK"] or 0),
                initialization_timeout=120,
            )
        elif len(missing) == len(given):
            jax.distributed.initialize()
            os.environ.update(RANK=str(jax.process_index()), WORLD_SIZE=str(jax.process_count()))
        else:
            raise ValueError(f"{', '.join(missing)} is not set, and the others of {', '.join(given)} are")
    except (RuntimeError, ValueError) as e:
        raise EngineUnavailableError(f"this process cannot join the others: {e}") from e


def is_joined() -> bool:
    """Whether this process is one of several."""
    import jax

    return bool(jax.distributed.is_initialized())


def write_once(write: Callable[[], None]) -> None:
    """Run `write` in process 0; all others wait for it. Raises what it raises, in the others CheckpointError."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    failure: BaseException | None = None
    if jax.process_index() == 0:
        try:
            write()
        except Exception as e:
            failure = e
    good = multihost_utils.broadcast_one_to_all(np.int32(failure is None))
    if failure is not None:
        raise failure
    if not int(good):
        raise CheckpointError("process 0, which writes for all, could not write; its own error says why")

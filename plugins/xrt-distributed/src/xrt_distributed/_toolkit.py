"""The only importer of JAX: joining processes, and what they do together."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any

from xrt_core.errors import CheckpointError, EngineUnavailableError
from xrt_distributed.agent import free_port


def join() -> None:
    """Make this process one of several. See `xrt_distributed.initialize`."""
    import jax

    given = {n: os.environ.get(n) for n in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    missing = [n for n, v in given.items() if not v]
    if jax_collectives() in ("None", "none"):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        if not missing:
            jax.distributed.initialize(
                f"{given['MASTER_ADDR']}:{given['MASTER_PORT']}",
                num_processes=int(given["WORLD_SIZE"] or 1),
                process_id=int(given["RANK"] or 0),
                local_device_ids=local_devices(os.environ),
                initialization_timeout=120,
            )
            _tell_gloo(own_address(str(given["MASTER_ADDR"]), int(given["MASTER_PORT"] or 1)))
        elif len(missing) == len(given):
            if "ray" in sys.modules:
                know_ray()
            jax.distributed.initialize()
            host, _, port = str(global_state().coordinator_address).rpartition(":")
            _tell_gloo(own_address(host, int(port)))
            os.environ.update(RANK=str(jax.process_index()), WORLD_SIZE=str(jax.process_count()))
        else:
            raise ValueError(f"{', '.join(missing)} is not set, and the others of {', '.join(given)} are")
    except (RuntimeError, ValueError) as e:
        raise EngineUnavailableError(f"this process cannot join the others: {e}") from e


def local_devices(environ: Mapping[str, str]) -> list[int] | None:
    """The GPU of this process by LOCAL_RANK, where several on a machine see all of its GPUs; None for all it sees."""
    if int(environ.get("LOCAL_WORLD_SIZE", "1")) == 1 or "LOCAL_RANK" not in environ:
        return None
    seen = environ.get("CUDA_VISIBLE_DEVICES")
    if seen is not None and len(seen.split(",")) < int(environ["LOCAL_WORLD_SIZE"]):
        return None  # who started it gave each its own
    return [int(environ["LOCAL_RANK"])]


def know_ray() -> None:
    """Let JAX detect the workers of Ray Train: which one this is, and where they meet, which the first one says."""
    from jax._src import clusters

    if any(c.__name__ == "RayTrainCluster" for c in clusters.ClusterEnv._cluster_types):
        return

    class RayTrainCluster(clusters.ClusterEnv):  # JAX keeps every subclass
        name = "ray"

        @classmethod
        def _context(cls) -> Any:
            from ray import train

            return train.get_context()

        @classmethod
        def is_env_present(cls) -> bool:
            try:
                return int(cls._context().get_world_size()) > 1
            except Exception:  # each version of Ray has its own error for code outside a worker
                return False

        @classmethod
        def get_coordinator_address(cls, timeout_secs: int | None, override_coordinator_port: str | None) -> str:
            import ray
            from ray.train.collective import broadcast_from_rank_zero

            own = None
            if cls.get_process_id() == 0:
                own = f"{ray.util.get_node_ip_address()}:{override_coordinator_port or free_port()}"
            return str(broadcast_from_rank_zero(own))

        @classmethod
        def get_process_count(cls) -> int:
            return int(cls._context().get_world_size())

        @classmethod
        def get_process_id(cls) -> int:
            return int(cls._context().get_world_rank())


def global_state() -> Any:
    """What JAX knows of the processes."""
    from jax._src import distributed

    return distributed.global_state


def own_address(host: str, port: int) -> str | None:
    """The address of this machine that another one sees; None where that is itself, or cannot be told."""
    try:
        family, _, _, _, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as s:
            s.connect(there)  # sends nothing: it finds the route
            found = str(s.getsockname()[0])
    except OSError:
        return None
    return None if ipaddress.ip_address(found.partition("%")[0]).is_loopback else found


def _tell_gloo(address: str | None) -> None:
    """Have gloo listen at an address, by the way in which JAX's factory takes collectives.

    Gloo takes the address that the machine's name resolves to, which is 127.0.1.1 on many: others cannot reach that.
    """
    from jax._src import xla_bridge
    from jax._src.lib import _jax

    if address is None or jax_collectives() != "gloo":
        return

    def make() -> Any:
        client = global_state().client
        return xla_bridge.make_cpu_client(_jax.make_gloo_tcp_collectives(distributed_client=client, hostname=address))

    xla_bridge.register_backend_factory("cpu", make, priority=0, fail_quietly=False)


def jax_collectives() -> str:
    """What JAX's processes on CPUs talk through."""
    import jax

    return str(jax.config._read("jax_cpu_collectives_implementation"))


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

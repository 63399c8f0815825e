"""Processes that a scheduler starts: `initialize()` reads what it says of them."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest
from xrt_distributed.agent import free_port

pytest.importorskip("jax")
pytestmark = pytest.mark.nightly

PROGRAM = """
import jax, numpy as np, xrt_core as xrt, xrt_distributed
xrt_distributed.initialize()
assert (xrt_distributed.process_count(), xrt_distributed.rank()) == (2, jax.process_index())

class Line(xrt.Graph):
    def __init__(self):
        super().__init__()
        self.w = np.zeros((8, 1), np.float32)

    def build(self, x):
        return x @ self.w

t = xrt.training.TrainModule(Line(), loss="mse", optimizer=xrt.optim.Adam(0.1), engine="xla", guard=False,
                             mesh={"data": 2})
x = np.random.default_rng(0).random((4, 8), np.float32)
losses = [float(t.step(x=x, target=x[:, :1])) for _ in range(5)]
assert losses[-1] < losses[0]
print("trained", jax.process_index(), losses[-1])
"""
SLURM = {"SLURM_JOB_ID": "17", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_NODES": "1"}
OPEN_MPI = {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://127.0.0.1:34911", "OMPI_COMM_WORLD_SIZE": "2"}
TORCHRUN = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.parametrize(
    ("common", "rank", "local"),
    [
        (SLURM, "SLURM_PROCID", "SLURM_LOCALID"),
        (OPEN_MPI, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
        (TORCHRUN, "RANK", "LOCAL_RANK"),
    ],
)
def test_variables(environment: dict[str, str], common: dict[str, str], rank: str, local: str) -> None:
    """Two processes with the variables of a scheduler train on one mesh."""
    port = str(free_port())
    handles = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env={**environment, **common, rank: str(n), local: str(n), "JAX_COORDINATOR_PORT": port}
            | ({"MASTER_PORT": port} if common is TORCHRUN else {}),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for n in range(2)
    ]  # fmt: skip
    said = [h.communicate(timeout=120)[0] for h in handles]
    assert [h.returncode for h in handles] == [0, 0], said
    ends = [text[text.index("trained") :].split() for text in said]
    assert {e[1] for e in ends} == {"0", "1"}
    assert ends[0][2] == ends[1][2]


RAY_TRAIN = """
import os
os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

def loop():
    import pathlib
    names = {"__name__": "__main__"}
    exec(%r, names)
    pathlib.Path(%r, f"rank{names['xrt_distributed'].rank()}").write_text(str(names["losses"][-1]))

ray.init(num_cpus=3, include_dashboard=False, logging_level="ERROR")
DataParallelTrainer(loop, scaling_config=ScalingConfig(num_workers=2), run_config=RunConfig(storage_path=%r)).fit()
ray.shutdown()
"""


def test_ray_train(environment: dict[str, str], tmp_path: pathlib.Path) -> None:
    """The workers of Ray Train are processes of one mesh."""
    pytest.importorskip("ray.train")
    done = subprocess.run(
        [sys.executable, "-c", RAY_TRAIN % (PROGRAM, str(tmp_path), str(tmp_path / "storage"))],
        env=environment, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert (tmp_path / "rank0").read_text() == (tmp_path / "rank1").read_text()

"""A program for several processes: trains a small model, and prints what must be the same in one process as JSON."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import sys
from typing import Any

import numpy as np

import xrt_core as xrt
from xrt_core import ops

RNG = np.random.default_rng(0)
UP, DOWN = (0.1 * RNG.standard_normal(s).astype(np.float32) for s in ((64, 128), (128, 64)))
X, Y = (RNG.standard_normal((16, 64)).astype(np.float32) for _ in range(2))


class Regression(xrt.Graph):
    """Two layers with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.bias = UP.copy(), DOWN.copy(), np.zeros(64, np.float32)

    def build(self, x: xrt.TensorType) -> object:
        return ops.Tanh(x @ self.up) @ self.down + self.bias


def trainer(optax: bool = False, **options: Any) -> xrt.training.TrainModule:
    """A trainer of the same start."""
    adam: Any = xrt.optim.Adam(1e-3)
    if optax:
        import optax as library

        adam = library.chain(library.clip_by_global_norm(1.0), library.adamw(1e-3))
    return xrt.training.TrainModule(Regression(), loss="mse", optimizer=adam, engine="xla", guard=False, **options)


def numbers(steps: int, save: pathlib.Path | None = None, **options: Any) -> dict[str, Any]:
    """Losses, an uneven batch, epochs, evaluation, prediction, gradients and variables."""
    t = trainer(**options)
    found: dict[str, Any] = {"losses": [float(t.step(x=X, target=Y)) for _ in range(steps)]}
    found["uneven"] = float(t.step(x=X[:7], target=Y[:7]))
    found["epochs"] = [e["loss"] for e in t.fit({"x": X, "target": Y}, 2, batch_size=6)]
    found["evaluate"] = t.evaluate({"x": X, "target": Y}, batch_size=8)["loss"]
    found["predict"] = t.predict(x=X).tolist()
    found["gradients"] = {n: float(np.abs(g).sum()) for n, g in t.gradients(x=X, target=Y).items()}
    found["variables"] = {n: float(np.abs(a).sum()) for n, a in t.parameters().items()}
    if save is not None:
        t.save(save)
        again = trainer(**options)
        again.load(save)
        found["loaded"] = abs(float(again.step(x=X, target=Y)) - float(t.step(x=X, target=Y)))
        pieces = save.with_name("pieces")
        for _ in range(2):  # the second takes the place of the first
            t.save(pieces, sharded=True)
        elsewhere: Any = {n: v for n, v in options.items() if n not in ("sharding", "zero")}
        elsewhere["mesh"] = {"data": 4} if "model" in options["mesh"] else {"data": 2, "model": 2}
        found["next"] = float(t.step(x=X, target=Y))
        found["pieces"] = []
        for other in (again, trainer(**elsewhere)):
            other.load(pieces)
            found["pieces"].append(float(other.step(x=X, target=Y)))
        found["parts"] = []
        for given in ({"x": X, "target": Y}, parts(options["mesh"])):
            t.load(save)
            found["parts"].append(float(t.step(**given)))
    m = xrt.XRTModule(Regression(), engine="xla", guard=False, mesh=options.get("mesh"))
    found["inference"] = np.asarray(m(X)).tolist()
    if options.get("mesh"):
        found["ran_on"] = sorted(set(t.explain().ran_on.values()))
    return found


def parts(mesh: dict[str, int]) -> dict[str, Any]:
    """The batch as arrays over the mesh, of which this process has read half."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = np.array(jax.devices()).reshape(tuple(mesh.values()))
    places = NamedSharding(Mesh(devices, tuple(mesh)), PartitionSpec("data"))
    own = slice(8 * int(os.environ["RANK"]), 8 * int(os.environ["RANK"]) + 8)
    return {n: jax.make_array_from_process_local_data(places, a[own]) for n, a in {"x": X, "target": Y}.items()}


def faulty(path: pathlib.Path, faults: int) -> None:
    """Train with a checkpoint after each step. In each of the first attempts one rank kills or stops itself after some
    steps, by chance."""
    attempt = int(os.environ["XRT_LAUNCH_ATTEMPT"])
    rng = np.random.default_rng((7, attempt))
    victim, after = str(rng.integers(2)), int(rng.integers(1, 5))
    how = signal.SIGSTOP if rng.random() < 0.5 else signal.SIGKILL
    t = trainer(mesh={"data": 2, "model": 2})
    if path.exists():
        t.load(path)
    began = t.step_count
    while t.step_count < steps_of(faults):
        if attempt < faults and t.step_count - began >= after and os.environ["RANK"] == victim:
            os.kill(os.getpid(), how)
        loss = float(t.step(x=X, target=Y))
        if os.environ["RANK"] == "0":
            print(json.dumps({"attempt": attempt, "began": began, "step": t.step_count, "loss": loss}))
        t.save(path)


def steps_of(faults: int) -> int:
    """Steps that no attempt with a fault reaches the end of."""
    return 4 * faults + 1


def different(devices: int) -> None:
    """Each rank has a batch of a size of its own."""
    t = trainer(mesh={"data": devices})
    rows = 8 if os.environ["RANK"] == "0" else 4
    t.step(x=X[:rows], target=Y[:rows])


if __name__ == "__main__":
    what, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    if what == "optax":
        (folder / f"rank{os.environ['RANK']}.json").write_text(
            json.dumps(numbers(10, folder / "state.safetensors", mesh={"data": 4}, optax=True, accumulate=2))
        )
    elif what == "numbers":
        (folder / f"rank{os.environ['RANK']}.json").write_text(
            json.dumps(numbers(10, folder / "state.safetensors", mesh={"data": 2, "model": 2}, zero=True,
                               sharding={"up": "model:S(1)", "down": "model:S(0)"}))
        )  # fmt: skip
    elif what == "faulty":
        faulty(folder / "state.safetensors", int(sys.argv[3]))
    else:
        different(int(sys.argv[3]))

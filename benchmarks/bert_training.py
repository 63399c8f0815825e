"""BERT training on 1, 2 and 4 devices, in the form of the table that OneFlow-XRT published; and scaling beside JAX.

    python benchmarks/bert_training.py                     # the table, on virtual CPU devices, with a small BERT
    python benchmarks/bert_training.py --scaling           # weak and strong scaling beside hand-written JAX
    python benchmarks/bert_training.py --gpu               # both with BERT-base, on as many GPUs as there are
    python benchmarks/bert_training.py --precision bf16    # in the place of fp16

Op by op is XRT with a launch for each node (`maximum_nodes=1`), of XLA like the other: what the table shows is what
clustering gives. Data parallel: each device has so many sentences, and gradients are all-reduced. Losses and memory
of a cell are a process of its own; the losses are of equal batches, so that they can be compared along a row. Times are
medians of steps in turns.

Memory is that of one device: what a GPU's allocator held at most, and on CPUs the resident memory by which the process
grew from before the model was made to the peak of its steps, executables included, over the number of devices. Virtual
CPU devices share the cores of one machine, so that more devices are not faster there; what can be judged is the ratio
to JAX on the same mesh. Its goal is 0.97 of JAX's scaling efficiency.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from rounds import interleaved

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from tests.training import peers
from tests.training.peers import Batch, Model

GOAL = 0.97
HALVES = ("op by op", "XLA")
COLUMNS = tuple((n, p) for n in (1, 2, 4) for p in ("fp32", "fp16"))
# OneFlow-XRT's page: BERT-base, RTX 2080 Ti, 60 sentences a device; without / with XLA, in the order of `COLUMNS`
PUBLISHED = {
    "loss after 100 batches": (
        ("8.85064", "8.85064"), ("8.85067", "8.85083"), ("8.80611", "8.80611"), ("8.80612", "8.80624"),
        ("8.73018", "8.73018"), ("8.73011", "8.72990"),
    ),
    "s/batch": (("0.57", "0.45"), ("0.31", "0.19"), ("0.596", "0.485"), ("0.353", "0.241"), ("0.61", "0.495"),
                ("0.376", "0.252")),
    "memory, MiB": (("8669", "8685"), ("7009", "7041"), ("9147", "9149"), ("7669", "7675"), ("9147", "9149"),
                    ("7669", "7675")),
    "sentences/s": (("105", "133"), ("194", "316"), ("201", "247"), ("340", "498"), ("393", "485"), ("638", "952")),
    "speed-up": (("1.27",), ("1.63",), ("1.23",), ("1.46",), ("1.23",), ("1.49",)),
}  # fmt: skip


def model_of(gpu: bool, count: int) -> Model:
    """BERT-base with 128 tokens, or 4 layers of 256 with 64; count: sentences of a batch."""
    return peers.bert(12, 768, 12, 128, count, 30522) if gpu else peers.bert(4, 256, 4, 64, count, 8192)


def xrt_step(model: Model, devices: int, precision: str, by: str) -> tuple[Callable[[Batch], Any], Any]:
    """A step of XRT on so many devices. by: "op by op" or "XLA"."""
    options: dict[str, Any] = {"guard": False, "cache": "off"}
    if precision != "fp32":
        options["precision"] = precision
    if devices > 1:
        options["mesh"] = {"data": devices}
    if by == "op by op":
        options |= {"maximum_nodes": 1, "prune": False}
    return peers.by_xrt(model, "xla", **options)


def jax_step(model: Model, devices: int) -> Callable[[Batch], Any]:
    """What a user of JAX writes: the batch split over a mesh, the state whole on each device, and donated."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
    whole, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    step = jax.jit(peers.jax_step(model), in_shardings=(whole, split), out_shardings=(whole, whole), donate_argnums=0)
    state = jax.device_put(peers.jax_state(model), whole)

    def run(batch: Batch) -> Any:
        nonlocal state
        state, loss = step(state, peers.as_jax(batch))
        return float(loss)

    return run


# --- the table --------------------------------------------------------------------------------------------------------


def cell(devices: int, precision: str, by: str, gpu: bool, each: int, batches: int) -> dict[str, float]:
    """In a process of its own: train, and tell the row's figures."""
    import jax

    model = model_of(gpu, each * devices)
    jax.block_until_ready(jax.numpy.ones(8) + 1)
    peers.by_xrt(peers.mlp(), "xla", cache="off", guard=False)[0](peers.mlp().batch(0))  # all is loaded
    before = _status("VmRSS")
    step, module = xrt_step(model, devices, precision, by)
    loss = 0.0
    for k in range(batches):
        if k == 3:  # compiled
            pathlib.Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        loss = float(step(model.batch(k)))
    peak = jax.devices()[0].memory_stats()["peak_bytes_in_use"] if gpu else (_status("VmHWM") - before) / devices
    ran = {d for text in module.explain().ran_on.values() for d in text.split(", ")}
    if len(ran) != devices:
        raise SystemExit(f"it ran on {sorted(ran)}, not on {devices} devices")
    return {"loss": loss, "memory": peak / 2**20}


def race(devices: int, precision: str, gpu: bool, each: int, seconds: float) -> list[float]:
    """In a process of its own: seconds of a step op by op and on XLA, in turns."""
    model = model_of(gpu, each * devices)
    batch = model.batch(0)
    steps = [xrt_step(model, devices, precision, by)[0] for by in HALVES]
    for step in (*steps, *steps):
        step(batch)
    times = interleaved([lambda s=s: float(s(batch)) for s in steps], rounds=5, seconds=seconds, rest=0.05)
    return [t.median for t in times]


def _status(key: str) -> int:
    text = pathlib.Path("/proc/self/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith(key)).split()[1]) * 1024


def show_table(devices: tuple[int, ...], narrow: str, gpu: bool, each: int, batches: int, seconds: float) -> None:
    """Both halves of each cell, without and with clusters on XLA, and the published ones below."""
    found: dict[tuple[int, str], tuple[dict[str, float], ...]] = {}
    for n in devices:
        for precision in ("fp32", narrow):
            times = child("--race", n, precision, gpu, each, seconds)
            halves = [child("--cell", n, precision, by, gpu, each, batches) for by in HALVES]
            found[n, precision] = tuple(
                {**h, "seconds": t, "rate": each * n / t} for h, t in zip(halves, times, strict=True)
            )
            print(f"{n} devices, {precision}: {found[n, precision]}", file=sys.stderr, flush=True)
    what = "BERT-base, 128 tokens" if gpu else "BERT of 4 layers of 256, 64 tokens"
    heads = [f"{n} {'device' if n == 1 else 'devices'} {p}" for n, p in found]
    print(f"\n{what}, {each} sentences a device; XRT op by op / on XLA")
    print(f"| | {' | '.join(heads)} |\n|---|{'---|' * len(heads)}")
    rows: list[tuple[str, Callable[[tuple[dict[str, float], ...]], str]]] = [
        (f"loss after {batches} batches", lambda c: " / ".join(f"{x['loss']:.5f}" for x in c)),
        ("s/batch", lambda c: " / ".join(f"{x['seconds']:.3f}" for x in c)),
        ("memory, MiB", lambda c: " / ".join(f"{x['memory']:.0f}" for x in c)),
        ("sentences/s", lambda c: " / ".join(f"{x['rate']:.1f}" for x in c)),
        ("speed-up", lambda c: f"{c[1]['rate'] / c[0]['rate']:.2f}"),
    ]
    for title, text in rows:
        print(f"| {title} | {' | '.join(text(c) for c in found.values())} |")
    print("\nPublished by OneFlow-XRT: BERT-base on RTX 2080 Ti, 60 sentences a device; its framework / with XLA")
    print(f"| | {' | '.join(f'{n} GPU {p}' if n == 1 else f'{n} GPUs {p}' for n, p in COLUMNS)} |")
    print("|---|---|---|---|---|---|---|")
    for title, cells in PUBLISHED.items():
        print(f"| {title} | {' | '.join(' / '.join(c) for c in cells)} |")


# --- scaling ----------------------------------------------------------------------------------------------------------


def scaling(devices: int, count: int, gpu: bool, seconds: float) -> dict[str, float]:
    """In a process of its own: seconds of a step of XRT and of JAX, in turns, on so many devices."""
    model = model_of(gpu, count)
    batch = model.batch(0)
    steps = [xrt_step(model, devices, "fp32", "XLA")[0], jax_step(model, devices)]
    ends = [[float(s(model.batch(k))) for k in range(3)] for s in steps]  # compiled, and equal
    if max(abs(a - b) for a, b in zip(*ends, strict=True)) > 1e-3:
        raise SystemExit(f"the losses differ: {ends}")
    times = interleaved([lambda s=s: s(batch) for s in steps], rounds=5, seconds=seconds, rest=0.05)
    return dict(zip(("xrt", "jax"), (t.median for t in times), strict=True))


def show_scaling(devices: tuple[int, ...], gpu: bool, each: int, seconds: float) -> None:
    """Weak: so many sentences a device. Strong: as many in all as the largest mesh has in weak scaling."""
    print("\n| scaling | devices | sentences | XRT (ms) | JAX (ms) | JAX / XRT | efficiency, XRT | JAX | ratio |")
    print("|---|---|---|---|---|---|---|---|---|")
    for kind in ("weak", "strong"):
        first: dict[str, float] = {}
        for n in devices:
            count = each * (n if kind == "weak" else max(devices))
            t = child("--scale", n, count, gpu, seconds)
            first = first or t
            # so much of the work that one device does in the time; virtual devices share what there is
            done = {k: first[k] / v * (count / (each * devices[0]) if kind == "weak" else 1) for k, v in t.items()}
            share = {k: v / n for k, v in done.items()}
            ratio = share["xrt"] / share["jax"]
            cells = [kind, n, count, f"{t['xrt'] * 1e3:.1f}", f"{t['jax'] * 1e3:.1f}", f"{t['jax'] / t['xrt']:.2f}"]
            cells += [f"{share['xrt']:.2f}", f"{share['jax']:.2f}", f"{ratio:.2f}"]
            print(f"| {' | '.join(map(str, cells))} |{'' if ratio >= GOAL else ' below the goal'}", flush=True)
    print(f"goal: ratio of efficiencies at least {GOAL}")


# --- processes --------------------------------------------------------------------------------------------------------


def child(what: str, *arguments: Any) -> Any:
    """What a process of its own tells of a cell."""
    devices, gpu = int(arguments[0]), any(a is True for a in arguments)
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if not gpu:
        environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    command = [sys.executable, __file__, what, json.dumps(arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{what} {arguments}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="BERT on several devices")
    parser.add_argument("--scaling", action="store_true")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--precision", choices=("fp16", "bf16"), default="fp16")
    parser.add_argument("--devices", default="1,2,4", help="counts, with commas between")
    parser.add_argument("--sentences", type=int, help="a device; default 4, on GPUs 60")
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement of times")
    parser.add_argument("--cell", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--race", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--scale", type=json.loads, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.cell:
        print(json.dumps(cell(*a.cell)))
        return
    if a.race:
        print(json.dumps(race(*a.race)))
        return
    if a.scale:
        print(json.dumps(scaling(*a.scale)))
        return
    devices = tuple(int(n) for n in a.devices.split(","))
    if a.gpu:
        import jax

        devices = tuple(n for n in devices if n <= jax.device_count("gpu"))
    each = a.sentences or (60 if a.gpu else 4)
    if a.gpu or not a.scaling:
        show_table(devices, a.precision, a.gpu, each, a.batches, a.seconds)
    if a.gpu or a.scaling:
        show_scaling(devices, a.gpu, each, a.seconds)


if __name__ == "__main__":
    main()

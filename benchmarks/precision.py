"""What bfloat16, float16 and int8 cost in accuracy: results of whole models through XLA beside those in float32.

    python benchmarks/precision.py [NAME ...]      # exported models (see exported.py) and installed development models

"off" is the largest difference of any output, relative to the output's largest element; SNR is over all of the first
output; "top-1" is how often the largest element of the first output's last axis is the same, where it has more than 10
and is no image. All over 8 random inputs; int8 ranges are those of 4 others. The exported models have random weights,
the development models are trained.
"""

from __future__ import annotations

import pathlib
import sys
import tempfile
from importlib.metadata import PackageNotFoundError
from typing import Any

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import exported

import xrt_core as xrt
from tests.conformance import dev_models

SEEDS = 8


def inputs_of(name: str, seed: int) -> dict[str, np.ndarray]:
    """Inputs of one seed: of an exported model drawn anew, of a development model valid ones with noise."""
    if name in exported.NAMES:
        given = exported.inputs_for(name)
        rng = np.random.default_rng(seed)
        if name in ("bert", "gpt2"):
            return {n: rng.permuted(a, axis=-1) if a.max() > 1 else a for n, a in given.items()}
        return {n: rng.standard_normal(a.shape, dtype=np.float32) for n, a in given.items()}
    given = dev_models.inputs_for(name)
    rng = np.random.default_rng(seed)
    return {
        n: (a + 0.01 * rng.standard_normal(a.shape)).astype(a.dtype) if a.dtype == np.float32 and seed else a
        for n, a in given.items()
    }


def compare(model: str, name: str, options: dict[str, Any]) -> list[str]:
    """One row: nodes lowered, the largest difference, SNR in decibels, agreement of the largest element."""
    plain = xrt.XRTModule(model, engine="xla", guard=False)
    other = xrt.XRTModule(model, engine="xla", guard=False, **options)
    worst, signal, noise, same, count = 0.0, 0.0, 0.0, 0, 0
    for seed in range(SEEDS):
        given = inputs_of(name, seed)
        want, got = plain.run(given), other.run(given)
        first = True
        for key, w in want.items():
            if w.dtype != np.float32:
                continue
            wide, off = w.astype(np.float64), got[key].astype(np.float64) - w
            worst = max(worst, float(np.abs(off).max() / max(np.abs(wide).max(), 1e-30)))
            if first:
                signal, noise = signal + float(np.square(wide).sum()), noise + float(np.square(off).sum())
                if 0 < w.ndim < 4 and w.shape[-1] > 10:
                    hits = w.argmax(-1) == got[key].argmax(-1)
                    same, count = same + int(hits.sum()), count + hits.size
                first = False
    precision = other.explain(given).precision
    lowered = sum(precision.lowered.values()) if precision else 0
    nodes = f"{lowered} of {lowered + len(precision.kept)}" if precision else "-"
    snr = 10 * np.log10(signal / noise) if noise else float("inf")
    return [nodes, f"{worst:.1e}", f"{snr:.1f}", f"{same / count:.1%}" if count else "-"]


def main(names: list[str]) -> None:
    """Print the table."""
    print("| model | type | nodes lowered | off | SNR (dB) | top-1 |\n|---|---|---|---|---|---|")
    for name in names or [*exported.NAMES, *dev_models.MODELS]:
        try:
            model = str(exported.path(name) if name in exported.NAMES else dev_models.path(name))
        except (PackageNotFoundError, ImportError) as e:
            print(f"{name}: left out, {e}", file=sys.stderr)
            continue
        rows = [("bf16", {"use_bf16": True}), ("fp16", {"use_fp16": True})]
        for label, options in rows:
            print(f"| {name} | {label} | {' | '.join(compare(model, name, options))} |", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            try:
                m = xrt.XRTModule(model, engine="xla", guard=False)
                with xrt.ptq_calibration_mode(folder):
                    for seed in range(100, 104):
                        m.run(inputs_of(name, seed))
                row = compare(model, name, {"use_int8": True, "int8_calibration": folder})
            except xrt.errors.QuantizationError as e:
                print(f"{name}: no int8, {e}", file=sys.stderr)
                continue
            print(f"| {name} | int8 | {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

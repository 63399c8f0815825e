"""Tokens a second of `xrt.generate`, beside loops written by hand: over one session of ONNX Runtime, and in JAX.

    python benchmarks/generation.py [--tokens 200] [--batch 2] [--layers 2] [--width 256] [--words 4000]
    python benchmarks/generation.py --model FILE.onnx

The loops over a session feed the caches back as NumPy arrays, and by IO binding; that in JAX is jitted, with donated
caches. The model is that of `decoders.py`; with `--layers 0` that of the tests, of one small layer, so that what each
adds to a step is most of it. A file must have the inputs and outputs that docs/generation.md names, with caches
[batch, heads, tokens, size], and is not compared with JAX. All take the best token, and must give the same ones.
`guard=False`.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime
from decoders import Sizes, jax_loop, onnx_decoder
from rounds import interleaved

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
import xrt_core as xrt
from tests.generation.models import decoder

PROMPT = 7


def by_hand(session: Any, ids: np.ndarray, count: int, binding: bool) -> np.ndarray:
    """The tokens that a session gives, greedy."""
    outputs = [o.name for o in session.get_outputs()]
    pasts = [i for i in session.get_inputs() if "past" in i.name]
    caches = [np.zeros((len(ids), p.shape[1], 0, p.shape[3]), np.float32) for p in pasts]
    if binding:
        caches = [onnxruntime.OrtValue.ortvalue_from_numpy(c) for c in caches]
    tokens, new = ids, ids
    for _ in range(count):
        n, total = new.shape[1], tokens.shape[1]
        feeds = {
            "input_ids": np.ascontiguousarray(new),
            "attention_mask": np.ones((len(ids), total), np.int64),
            "position_ids": np.tile(np.arange(total - n, total), (len(ids), 1)),
        }
        if binding:
            bound = session.io_binding()
            for name, x in feeds.items():
                bound.bind_cpu_input(name, x)
            for p, c in zip(pasts, caches, strict=True):
                bound.bind_ortvalue_input(p.name, c)
            for name in outputs:
                bound.bind_output(name)
            session.run_with_iobinding(bound)
            found = bound.get_outputs()
            scores, caches = found[0].numpy(), found[1:]
        else:
            scores, *caches = session.run(outputs, feeds | {p.name: c for p, c in zip(pasts, caches, strict=True)})
        new = scores[:, -1].argmax(-1)[:, None]
        tokens = np.concatenate([tokens, new], 1)
    return tokens


def main() -> None:
    """Print microseconds a token, and ratios to the loops by IO binding and in JAX: medians of interleaved rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--words", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--model")
    given = parser.parse_args()
    sizes = Sizes(given.layers, given.width, max(1, given.width // 64), given.words)
    if given.model:
        model = pathlib.Path(given.model).read_bytes()
    else:
        model = (onnx_decoder(sizes) if given.layers else decoder()).SerializeToString()
    ids = np.random.default_rng(0).integers(1, 30, (given.batch, PROMPT))
    session = onnxruntime.InferenceSession(model)
    calls: dict[str, Callable[[], np.ndarray]] = {
        "IO binding": lambda: by_hand(session, ids, given.tokens, True),
        "NumPy arrays": lambda: by_hand(session, ids, given.tokens, False),
    }
    modules = {e: xrt.XRTModule(model, engine=e, guard=False, cache=False) for e in ("onnxruntime", "xla")}
    for engine, m in modules.items():
        calls[f"xrt.generate, {engine}"] = lambda m=m: xrt.generate(m, ids, max_new_tokens=given.tokens)
    if given.layers and not given.model:
        by_jax = jax_loop(sizes)
        calls["JAX"] = lambda: by_jax(ids, given.tokens)
    want = calls["IO binding"]()
    for name, call in calls.items():
        np.testing.assert_array_equal(call(), want, name)
    rounds = interleaved(list(calls.values()), rounds=given.rounds, warm=1, rest=0.05)
    times = dict(zip(calls, rounds, strict=True))
    beside = [n for n in ("IO binding", "JAX") if n in times]
    for name, t in times.items():
        ratios = [statistics.median(a / b for a, b in zip(t.wall, times[n].wall, strict=True)) for n in beside]
        shown = ", ".join(f"{r:5.2f} of {n}" for r, n in zip(ratios, beside, strict=True))
        print(f"{name:28} {t.median / given.tokens * 1e6:8.0f} us a token  {shown}")
    for engine, m in modules.items():
        print(f"{engine}: {sum(e.name == 'compile' for e in m.events)} compilations")


if __name__ == "__main__":
    main()

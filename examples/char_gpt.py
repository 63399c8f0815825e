"""A character-level GPT learns from the texts of Python's own help, and writes on.

    python examples/char_gpt.py --engine xla --curve gpt.png
    python examples/char_gpt.py --engine xla --compare --curve both.png    # beside the same network in PyTorch

The text is `pydoc_data.topics`, which every Python ships: about 700 000 characters. After the default number of steps
the loss on text that was held back is below 2.2 nats per character (random guessing: 4.6; the tests hold a shorter
run).
"""

from __future__ import annotations

import argparse
import math
from pydoc_data.topics import topics
from typing import Any

import numpy as np

import xrt_core as xrt
from xrt_core import ops
from xrt_core.training.loop import fit, save_curve
from xrt_core.training.schedules import Schedule, cosine

STEPS = 600


def text() -> str:
    """All topics, one after another."""
    return "\n".join(topics[name] for name in sorted(topics))


class Block(xrt.Graph):
    """Causal self-attention and a feed-forward part, each normalised before and added to what came in."""

    def __init__(self, rng: np.random.Generator, width: int, heads: int, layers: int) -> None:
        def matrix(rows: int, columns: int, scale: float = 0.02) -> np.ndarray:
            return (rng.standard_normal((rows, columns)) * scale).astype(np.float32)

        self.heads = heads
        deep = 0.02 / math.sqrt(2 * layers)  # GPT-2's smaller start for what is added to the residual stream
        self.qkv, self.out = matrix(width, 3 * width), matrix(width, width, deep)
        self.up, self.down = matrix(width, 4 * width), matrix(4 * width, width, deep)
        self.up_bias, self.down_bias = np.zeros(4 * width, np.float32), np.zeros(width, np.float32)
        self.norms = [{"scale": np.ones(width, np.float32), "shift": np.zeros(width, np.float32)} for _ in range(2)]

    def build(self, x: Any) -> Any:
        """x: float32[N, T, width]. Returns the same."""
        first, second = self.norms
        h = ops.LayerNormalization(x, first["scale"], first["shift"], outputs=1) @ self.qkv
        q, k, v = ops.Split(h, axis=-1, num_outputs=3)
        attended = ops.Attention(q, k, v, is_causal=1, q_num_heads=self.heads, kv_num_heads=self.heads, outputs=1)
        x = x + attended @ self.out
        h = ops.LayerNormalization(x, second["scale"], second["shift"], outputs=1) @ self.up + self.up_bias
        return x + ops.Gelu(h) @ self.down + self.down_bias


class GPT(xrt.Graph):
    """Embeddings of characters and places, blocks, and scores for the next character."""

    def __init__(
        self, characters: int, length: int, width: int = 64, heads: int = 4, layers: int = 2, seed: int = 0
    ) -> None:
        rng = np.random.default_rng(seed)
        self.embedding = (rng.standard_normal((characters, width)) * 0.02).astype(np.float32)
        self.places = (rng.standard_normal((length, width)) * 0.02).astype(np.float32)
        self.blocks = [Block(rng, width, heads, layers) for _ in range(layers)]
        self.norm = {"scale": np.ones(width, np.float32), "shift": np.zeros(width, np.float32)}

    def build(self, tokens: Any) -> Any:
        """tokens: int64[N, T], T the length. Returns float32[N, characters, T], as the loss takes scores."""
        x = ops.Gather(self.embedding, tokens) + self.places
        for block in self.blocks:
            x = block(x)
        x = ops.LayerNormalization(x, self.norm["scale"], self.norm["shift"], outputs=1)
        return ops.Transpose(x @ ops.Transpose(self.embedding, perm=[1, 0]), perm=[0, 2, 1])


class Corpus:
    """Text as numbers; the last twentieth is held back."""

    def __init__(self, length: int) -> None:
        whole = text()
        self.alphabet = sorted(set(whole))
        number = {c: i for i, c in enumerate(self.alphabet)}
        codes = np.array([number[c] for c in whole], np.int64)
        cut = len(codes) * 19 // 20
        self.train, self.held, self.length = codes[:cut], codes[cut:], length

    def batch(self, rng: np.random.Generator, size: int, codes: np.ndarray) -> dict[str, np.ndarray]:
        """Random pieces, each with the same piece one character on."""
        starts = rng.integers(0, len(codes) - self.length - 1, size)
        at = starts[:, None] + np.arange(self.length)
        return {"tokens": codes[at], "labels": codes[at + 1]}


def rates(steps: int) -> Schedule:
    """Warm up, then fall as a cosine to a tenth."""
    return cosine(3e-3, steps, warmup=max(steps // 20, 1), end=3e-4)


def run(
    steps: int, engine: str | list[str] | None, seed: int = 0, length: int = 64, size: int = 16, **options: Any
) -> Any:
    """Train; returns the losses, the loss on held-back text, the trained module and the corpus."""
    corpus = Corpus(length)
    rng = np.random.default_rng(seed)
    graph = GPT(len(corpus.alphabet), length, seed=seed)
    trainer = xrt.training.TrainModule(
        graph,
        loss="cross_entropy",
        optimizer=xrt.optim.AdamW(rates(steps), weight_decay=0.01, clip_norm=1.0),
        engine=engine,
        seed=seed,
        **options,
    )
    losses = fit(trainer, iter(lambda: corpus.batch(rng, size, corpus.train), None), steps, label="character GPT")
    graph.load_parameters(trainer.parameters())
    model = xrt.XRTModule(graph, engine=engine)
    held = corpus.batch(np.random.default_rng(1), 64, corpus.held)
    scores = model(held["tokens"]).astype(np.float64)
    likely = (
        scores
        - np.log(np.exp(scores - scores.max(1, keepdims=True)).sum(1, keepdims=True))
        - scores.max(1, keepdims=True)
    )
    loss = -np.take_along_axis(likely, held["labels"][:, None], 1).mean()
    return losses, float(loss), model, corpus


def by_torch(steps: int, seed: int = 0, length: int = 64, size: int = 16) -> tuple[list[float], float]:
    """The same network, from the same start and on the same batches, in PyTorch: the losses, and that on held-back
    text."""
    import torch
    from torch.nn import functional

    corpus, rng, rate = Corpus(length), np.random.default_rng(seed), rates(steps)
    start = GPT(len(corpus.alphabet), length, seed=seed)
    p = {n: torch.tensor(np.asarray(a), requires_grad=True) for n, a in start.named_parameters().items()}

    def norm(x: Any, name: str) -> Any:
        return functional.layer_norm(x, x.shape[-1:], p[f"{name}.scale"], p[f"{name}.shift"])

    def loss_of(batch: dict[str, np.ndarray]) -> Any:
        tokens, labels = (torch.from_numpy(batch[n]) for n in ("tokens", "labels"))
        x = p["embedding"][tokens] + p["places"]
        for k, block in enumerate(start.blocks):
            b = f"blocks.{k}"
            split = (norm(x, f"{b}.norms.0") @ p[f"{b}.qkv"]).chunk(3, -1)
            q, key, v = (t.unflatten(-1, (block.heads, -1)).transpose(1, 2) for t in split)
            attended = functional.scaled_dot_product_attention(q, key, v, is_causal=True)
            x = x + attended.transpose(1, 2).flatten(2) @ p[f"{b}.out"]
            h = norm(x, f"{b}.norms.1") @ p[f"{b}.up"] + p[f"{b}.up_bias"]
            x = x + functional.gelu(h) @ p[f"{b}.down"] + p[f"{b}.down_bias"]
        return functional.cross_entropy((norm(x, "norm") @ p["embedding"].T).transpose(1, 2), labels)

    groups = [{"params": [t for t in p.values() if (t.ndim > 1) == matrices]} for matrices in (True, False)]
    optimizer = torch.optim.AdamW([groups[0], {**groups[1], "weight_decay": 0.0}], weight_decay=0.01)
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.zero_grad()
        loss = loss_of(corpus.batch(rng, size, corpus.train))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(p.values(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        return losses, float(loss_of(corpus.batch(np.random.default_rng(1), 64, corpus.held)))


def write(model: xrt.XRTModule, corpus: Corpus, start: str, count: int, seed: int = 0) -> str:
    """Let the model write on, a character at a time."""
    rng = np.random.default_rng(seed)
    number = {c: i for i, c in enumerate(corpus.alphabet)}
    codes = [number[c] for c in start]
    for _ in range(count):
        window = codes[-corpus.length :]
        tokens = np.zeros((1, corpus.length), np.int64)
        tokens[0, : len(window)] = window  # what stands behind is not looked at
        scores = model(tokens)[0, :, len(window) - 1].astype(np.float64) / 0.7
        chances = np.exp(scores - scores.max())
        codes.append(int(rng.choice(len(chances), p=chances / chances.sum())))
    return "".join(corpus.alphabet[c] for c in codes)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--engine", help="default: all that are ready")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--curve", help="a picture of the losses")
    parser.add_argument("--compare", action="store_true", help="train the same network in PyTorch too")
    given = parser.parse_args()
    losses, held, model, corpus = run(given.steps, given.engine, given.seed)
    print(f"loss {losses[0]:.3f} -> {np.mean(losses[-20:]):.3f}; on held-back text {held:.3f} nats per character")
    print(write(model, corpus, "The ", 200))
    runs = {"": losses}
    if given.compare:
        other, loss = by_torch(given.steps, given.seed)
        print(f"PyTorch: loss {other[0]:.3f} -> {np.mean(other[-20:]):.3f}; on held-back text {loss:.3f}")
        runs = {"XRT": losses, "PyTorch": other}
    if given.curve:
        save_curve(runs if given.compare else losses, given.curve, "character GPT")
        print(f"wrote {given.curve}")


if __name__ == "__main__":
    main()

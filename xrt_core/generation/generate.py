"""`xrt.generate`: continues prompts with a language model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np

from xrt_core.engine import engines
from xrt_core.errors import InputError, OptionError
from xrt_core.generation.decoder import Decoder
from xrt_core.generation.sampling import Sampling
from xrt_core.module import XRTModule

_STEP: Final = 64  # tokens that a capacity is a multiple of


def generate(
    module: XRTModule,
    prompts: Any,
    *,
    max_new_tokens: int = 20,
    stop: int | Collection[int] = (),
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
    seed: int | None = None,
    pad: int = 0,
    capacity: int | None = None,
    inputs: Mapping[str, Any] | None = None,
    callback: Callable[[np.ndarray], object] | None = None,
) -> np.ndarray:
    """The prompts and what a model continues them with: int64 [batch, tokens], `pad` on the right of shorter rows.

    module: of a decoder: token ids, and what it has of mask, positions and caches, named as in `generation/decoder.py`.
    prompts: int [batch, n], or a sequence of token lists of unequal lengths, for a model that takes padding.
    max_new_tokens: at most so many are appended to each. stop: tokens that end a sequence, and stay in it.
    temperature, top_k, top_p, repetition_penalty: see `Sampling`; by default the best token is taken.
    seed: of the draws; None: another one each time.
    capacity: the caches have room for so many tokens from the start, and twice as many where that does not suffice, so
        that all steps have the same shapes. Not given: what all tokens take, where no engine of the module takes shapes
        that vary and the model can be padded; else caches grow by a token a step. 0: they grow.
    inputs: further inputs, given at each step, such as an encoder's states.
    callback: called with the new tokens of each step, int64 [batch] (-1: the sequence has ended); True ends the call.

    Raises InputError for prompts that are none and for a module that is no decoder, OptionError for numbers out of
    range, and what a call of the module raises.
    """
    if not isinstance(module, XRTModule):
        raise InputError(f"generate: the first argument must be an XRTModule, not a {type(module).__name__}")
    rows = _rows(prompts)
    _check_counts(max_new_tokens=max_new_tokens, pad=pad, capacity=capacity or 0, seed=seed or 0)
    sampling = Sampling(temperature, top_k, top_p, repetition_penalty)
    ends = _tokens("stop", stop)
    longest = max(len(r) for r in rows)
    must = capacity is not None
    if capacity is None and _is_static(module):
        capacity = -(-(longest + max_new_tokens) // _STEP) * _STEP
    decoder = Decoder(module, inputs or {}, capacity or None, must=must)
    tokens = np.full((len(rows), longest + max_new_tokens), pad, np.int64)
    first = np.array([longest - len(r) for r in rows])  # where each begins
    for row, r, begin in zip(tokens, rows, first, strict=True):
        row[begin:longest] = r
    after = np.full(len(rows), longest)  # where each ends
    random = np.random.default_rng(seed)
    is_open, all_open = np.ones(len(rows), bool), True
    chosen: np.ndarray | None = None
    for n in range(longest, longest + max_new_tokens):
        if chosen is None:
            scores = decoder.start(tokens[:, :n].copy(), (np.arange(n) >= first[:, None]).astype(np.int64))
        else:
            scores = decoder.step(chosen)
        seen = [] if repetition_penalty == 1.0 else [row[b:n] for row, b in zip(tokens, first, strict=True)]
        chosen = sampling.choose(scores, seen, random)
        if not all_open:
            chosen = np.where(is_open, chosen, pad)
        tokens[:, n] = chosen
        after[is_open] = n + 1
        if callback is not None and callback(chosen if all_open else np.where(is_open, chosen, -1)) is True:
            break
        if ends.size:
            is_open &= ~(chosen[:, None] == ends).any(1)
            all_open = bool(is_open.all())
            if not is_open.any():
                break
    width = int((after - first).max())
    made = np.full((len(rows), width), pad, np.int64)
    for row, found, begin, end in zip(made, tokens, first, after, strict=True):
        row[: end - begin] = found[begin:end]
    return made


def _check_counts(**given: Any) -> None:
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise OptionError(f"{name}={value!r}: give an integer of at least 0")


def _tokens(name: str, given: Any) -> np.ndarray:
    """One token or several, int64."""
    found = np.array(list(given) if isinstance(given, Collection) and not isinstance(given, str) else given).reshape(-1)
    if found.size and found.dtype.kind not in "iu":
        raise OptionError(f"{name}={given!r}: give a token, an integer, or several")
    return found.astype(np.int64)


def _rows(prompts: Any) -> list[np.ndarray]:
    """The tokens of each prompt, int64."""
    wanted = "give an array of integers [batch, tokens], or a list of token lists"
    try:
        rows = [np.asarray(p) for p in (np.asarray(prompts) if hasattr(prompts, "__array__") else prompts)]
    except (TypeError, ValueError) as e:
        raise InputError(f"generate: prompts: {e}; {wanted}") from e
    if not rows or any(r.ndim != 1 or r.size == 0 or r.dtype.kind not in "iu" for r in rows):
        raise InputError(f"generate: prompts must have at least one token each; {wanted}")
    return [r.astype(np.int64) for r in rows]


def _is_static(module: XRTModule) -> bool:
    """Whether all engines of a module compile for each shape, and there is one."""
    names: Sequence[str] = module.engines
    return bool(names) and all(engines.get(n).dynamic_dims == "none" for n in names)

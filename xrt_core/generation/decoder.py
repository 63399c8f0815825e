"""Decoder: a language model with its caches, which maps tokens to the scores of the next one, step by step.

Names are those that exporters (Optimum, genai) give: inputs `input_ids` (or `decoder_input_ids`), `attention_mask`,
`position_ids`, `past_key_values.*`, and outputs `logits`, `present.*`. Whatever is missing is not fed; without caches
all tokens are fed at each step.

The caches grow by a token each step, or have a *capacity* (`steps`), for engines that compile for each shape. Source
for masks and positions of unequal prompts: https://huggingface.co/docs/transformers/llm_tutorial#padding-side
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from xrt_core.errors import InputError
from xrt_core.generation.steps import VALID, Cache, InPlace, Inputs, in_place, shifted
from xrt_core.ir.graph import Node, every_node
from xrt_core.ir.op_traits import traits_of
from xrt_core.ir.types import TensorType
from xrt_core.module import XRTModule

_IDS: Final = ("input_ids", "decoder_input_ids", "ids", "tokens")
_MASKS: Final = ("attention_mask", "decoder_attention_mask")
_POSITIONS: Final = "position_ids"
_BRANCH: Final = "use_cache_branch"
"""An input of Optimum's merged decoders: whether there is anything in the caches."""
_COUNTS_FROM_THE_LEFT: Final = frozenset({
    "GroupQueryAttention", "SparseAttention", "PagedAttention", "MultiHeadAttention", "Attention", "TensorScatter",
    "DecoderMaskedMultiHeadAttention", "DecoderMaskedSelfAttention", "LinearAttention", "CausalConvWithState", "Scan",
    "Loop", "LSTM", "GRU", "RNN", "Conv",
})  # fmt: skip
"""Operators that may read entries by their number rather than by the mask."""
_COUNTS_NOTHING: Final = frozenset({
    "BiasGelu", "FastGelu", "FusedMatMul", "GatherBlockQuantized", "Gelu", "MatMulBnb4", "MatMulNBits", "QuickGelu",
    "SimplifiedLayerNormalization", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization",
})  # fmt: skip
"""Operators of com.microsoft that treat each token by itself, without regard to its number, as the page of that domain
(ContribOperators.md) describes them."""
_KNOWN_DOMAINS: Final = ("", "xrt")
_I64: Final = np.dtype(np.int64)
_LEAST: Final = 16  # tokens of a prompt with a capacity


class Decoder:
    """Runs a module for the sequences of one batch. Not thread-safe; the module may be shared.

    module: takes token ids, int [batch, n]. more: further inputs, given at each step (an encoder's states). capacity:
    how many tokens the caches hold, more where they do not suffice; None: caches grow. must: whether it is an error
    where they cannot have a capacity; else they grow.

    Raises InputError for a module that is no decoder, naming what it lacks, and for one that cannot have a capacity.
    """

    def __init__(self, module: XRTModule, more: Mapping[str, Any], capacity: int | None, *, must: bool = True) -> None:
        types = dict(module.input_types)
        self._module = module
        self._more = dict(more)
        self._ids = next((n for n in _IDS if n in types), "")
        if not self._ids:
            raise InputError(f"generate: the model takes {', '.join(types)}; none of these is one of {', '.join(_IDS)}")
        self._mask = next((n for n in _MASKS if n in types and n not in more), "")
        self._positions = _POSITIONS if _POSITIONS in types and _POSITIONS not in more else ""
        self._branch = _BRANCH if _BRANCH in types and _BRANCH not in more else ""
        outputs = module.output_names
        pasts = [n for n in types if "past" in n and n not in more]
        self._caches = [_cache(n, types[n], outputs, types[self._ids]) for n in pasts]
        others = set(outputs) - {c.output for c in self._caches}
        self._scores = "logits" if "logits" in others else next((n for n in outputs if n in others), "")
        fed = {self._ids, self._mask, self._positions, self._branch, *pasts, *more}
        missing = [n for n in types if n not in fed and n not in module.optional_inputs]
        if missing:
            raise InputError(f"generate: nothing is given for the model's inputs {', '.join(missing)}; see `inputs`")
        self._fed = frozenset(fed - {""})
        self._dtypes = {n: getattr(types.get(n), "dtype", None) or _I64 for n in (self._ids, *_MASKS, _POSITIONS)}
        self._no_padding = no_padding(module)
        self._capacity, self._must = capacity, must
        if capacity is not None and not self._caches and self._no_padding:
            self._grow()
        self._in_place: InPlace | None = None
        self._shifted: Any = None
        self._call: Callable[[Sequence[Any]], list[Any]] | None = None
        self._arrays: list[Any] = []  # the caches
        self._fixed: list[Any] = []
        self._state: list[Any] = []
        self._is_there = np.zeros((0, 0), np.int64)  # the mask: of each sequence and entry
        self._end = 0  # of what is valid in caches that are written in place
        self._is_first = True
        self._count = np.zeros((0, 1), np.int64)  # of tokens of each sequence
        self._tokens = np.zeros((0, 0), np.int64)  # where there are no caches

    def start(self, ids: np.ndarray, is_there: np.ndarray) -> np.ndarray:
        """The scores of the token after a prompt, float [batch, vocabulary]. ids, is_there: int64 [batch, n]; a
        sequence that is shorter than others has zeros in `is_there` on the left."""
        if not is_there.all() and self._no_padding:
            raise InputError(f"generate: prompts of unequal length: {self._no_padding}. Give one prompt at a time")
        if self._capacity is not None and not self._no_padding:
            width = _LEAST
            while width < ids.shape[1]:
                width *= 2
            ids, is_there = _widened(ids, width), _widened(is_there, width)
        before = 0
        if self._capacity is None and self._begins_with_padding:
            is_there, before = _widened(is_there, is_there.shape[1] + 1), 1
        sizes = [{c.batch: len(ids), c.length: before} for c in self._caches]
        self._arrays = [np.zeros(_with(c.shape, s), c.dtype) for c, s in zip(self._caches, sizes, strict=True)]
        self._in_place = self._shifted = None
        self._is_there, self._tokens, self._is_first = is_there, ids, True
        self._count = is_there.sum(1, keepdims=True)
        return self._run(ids, np.maximum(is_there.cumsum(1) - 1, 0)[:, before:])

    @property
    def _begins_with_padding(self) -> bool:
        """Whether caches that grow begin with an entry of padding. Engines tell empty tensors from others: with it one
        plan, and one executable, is for prompts and for steps. The threads of two would disturb each other."""
        return not (self._no_padding or self._branch or any(c.is_cross for c in self._caches)) and bool(self._caches)

    def step(self, tokens: np.ndarray) -> np.ndarray:
        """The scores of the token after these, which are appended, int64 [batch]."""
        self._is_first = False
        if self._capacity is not None:
            self._make_room()
        positions, self._count = self._count, self._count + 1
        if self._in_place is not None:
            assert self._call is not None
            self._end += 1
            scores, *self._state = self._call([self._as(self._ids, tokens[:, None]), *self._fixed, *self._state])
            return self._last(scores)
        self._is_there = np.concatenate([self._is_there, np.ones((len(tokens), 1), np.int64)], 1)
        if self._caches:
            return self._run(tokens[:, None], positions)
        self._tokens = np.concatenate([self._tokens, tokens[:, None]], 1)
        return self._run(self._tokens, np.maximum(self._is_there.cumsum(1) - 1, 0))

    def _grow(self) -> None:
        """Let caches grow, where they cannot have a capacity. Raises InputError where they must."""
        if self._must:
            raise InputError(f"generate: capacity={self._capacity}: {self._no_padding}")
        self._capacity = None

    # --- room for one more token --------------------------------------------------------------------------------------

    def _make_room(self) -> None:
        assert self._capacity is not None
        if self._in_place is not None and self._end < self._capacity:
            return
        while int(self._count.max()) >= self._capacity:
            self._capacity *= 2
        if self._caches and self._shifted is None and self._lay_out_in_place():
            return
        if self._no_padding:
            self._grow()
            return
        if self._caches and self._shifted is None:
            self._shifted = shifted(self._module, self._caches, self._scores, self._fed)
        left = self._capacity - 1
        self._is_there, self._tokens = _resized(self._is_there, 1, left), _resized(self._tokens, 1, left)
        size = left if self._shifted is None else self._capacity
        self._arrays = [
            a if c.is_cross or a.shape[c.length] == size else _resized(np.asarray(a), c.length, size)
            for a, c in zip(self._arrays, self._caches, strict=True)
        ]

    def _lay_out_in_place(self) -> bool:
        """Bring the caches to the capacity, with what is valid at their beginning; whether steps can write into them
        so."""
        assert self._capacity is not None
        given: dict[str, Any] = {**self._more, **{c.input: a for c, a in zip(self._caches, self._arrays, strict=True)}}
        first, end = 0, self._is_there.shape[1]
        if self._in_place is not None:  # they are full
            given |= zip(self._in_place.state, map(np.asarray, self._state), strict=True)
            end = self._end
            self._is_there = given.get(self._mask, self._is_there)
        else:
            first = int(self._is_there.any(0).argmax())  # entries before it are padding of all prompts
        if self._mask:
            given[self._mask] = _moved(self._as(self._mask, self._is_there), 1, first, end, self._capacity)
        if self._positions:
            given[self._positions] = self._as(self._positions, self._count)
        for c in self._caches:
            if not c.is_cross:
                given[c.input] = _moved(np.asarray(given[c.input]), c.length, first, end, self._capacity)
        given[VALID] = np.array(end - first)
        shapes = {n: np.shape(x) for n, x in given.items() if n != VALID} | {self._ids: (len(self._count), 1)}
        constants = {self._branch: np.array([True])} if self._branch else {}
        inputs = Inputs(self._ids, self._mask, self._positions)
        made = in_place(self._module, inputs, self._caches, self._scores, shapes, constants, self._capacity)
        if made is None:
            return False
        self._in_place, self._call, self._end = made, made.run.repeated(), end - first
        self._fixed, self._state = [given[n] for n in made.fixed], [given[n] for n in made.state]
        self._arrays = [given[c.input] if c.is_cross else None for c in self._caches]
        return True

    # --- a run --------------------------------------------------------------------------------------------------------

    def _run(self, ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
        feeds = dict(self._more)
        feeds[self._ids] = self._as(self._ids, ids)
        if self._mask:
            feeds[self._mask] = self._as(self._mask, self._is_there)
        if self._positions:
            feeds[self._positions] = self._as(self._positions, positions)
        if self._branch:
            feeds[self._branch] = np.array([not self._is_first])
        for c, a in zip(self._caches, self._arrays, strict=True):
            feeds[c.input] = a
        if self._shifted is not None:
            scores, *made = self._shifted.run_as_is(feeds)
            left = iter(made)
            self._arrays = [a if c.is_cross else next(left) for a, c in zip(self._arrays, self._caches, strict=True)]
            return self._last(scores)
        results = self._module.run(feeds)
        # a merged decoder's outputs of cross caches are empty after the first step
        self._arrays = [
            a if c.is_cross and not self._is_first else results[c.output]
            for a, c in zip(self._arrays, self._caches, strict=True)
        ]
        return self._last(results[self._scores])

    def _last(self, scores: Any) -> np.ndarray:
        """Those of the last token."""
        if getattr(scores, "ndim", 0) != 3:
            raise InputError(f"generate: output {self._scores!r} is no [batch, tokens, vocabulary] of scores")
        return np.asarray(scores)[:, -1]

    def _as(self, name: str, x: np.ndarray) -> np.ndarray:
        dtype = self._dtypes[name]
        return x if x.dtype == dtype else x.astype(dtype)


def no_padding(module: XRTModule) -> str:
    """Why a model cannot be given prompts that are padded on the left; "" if it can."""
    types = module.input_types
    if not any(n in types for n in _MASKS):
        return f"the model has no input {_MASKS[0]}, by which padding could be told"
    if _POSITIONS not in types and any("past" in n for n in types):
        return f"the model has no input {_POSITIONS}; it may count padding"
    graph = module.graph
    found = set() if graph is None else {n.op_type for n in every_node(graph) if _may_count(n)}
    if not found:
        return ""
    return f"the model has {', '.join(sorted(found))}, which may read by number what the mask leaves out"


def _may_count(node: Node) -> bool:
    if node.op_type in _COUNTS_FROM_THE_LEFT:
        return True
    if node.domain == "com.microsoft" and node.op_type in _COUNTS_NOTHING:
        return False
    return node.domain not in _KNOWN_DOMAINS and not traits_of(node).elementwise


def _cache(name: str, t: Any, outputs: tuple[str, ...], ids: Any) -> Cache:
    candidates = (name.replace("past_key_values", "present"), name.replace("past_key_values", "present_key_values"))
    output = next((n for n in (*candidates, name.replace("past", "present")) if n in outputs), None)
    if output is None:
        raise InputError(f"generate: the model takes {name!r} and has no output {candidates[0]!r}")
    if not isinstance(t, TensorType) or t.shape is None or t.dtype is None:
        raise InputError(f"generate: cache {name!r} has the type {t}; its dtype and rank must be known")
    open_ = [i for i, d in enumerate(t.shape) if not isinstance(d, int)]
    first = ids.shape[0] if isinstance(ids, TensorType) and ids.shape else None
    if len(open_) == 1 and isinstance(first, int):
        batch, length = t.shape.index(first), open_[0]
    elif len(open_) == 2:
        named = [i for i in open_ if first is not None and t.shape[i] == first]
        batch = named[0] if len(named) == 1 else open_[0]
        length = next(i for i in open_ if i != batch)
    else:
        raise InputError(f"generate: cache {name!r} is {t}; of its sizes those of batch and tokens must be open")
    sizes = tuple(d if isinstance(d, int) else 0 for d in t.shape)
    return Cache(name, output, t.dtype, sizes, batch, length, ".encoder." in name or "cross" in name)


def _with(shape: tuple[int, ...], sizes: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(sizes.get(i, n) for i, n in enumerate(shape))


def _widened(x: np.ndarray, width: int) -> np.ndarray:
    return np.pad(x, ((0, 0), (width - x.shape[1], 0)))


def _resized(x: np.ndarray, axis: int, size: int) -> np.ndarray:
    """The last `size` entries of an axis, with zeros before them where there are fewer."""
    have = x.shape[axis]
    if have >= size:
        return np.ascontiguousarray(x[(slice(None),) * axis + (slice(have - size, None),)])
    return np.pad(x, [(size - have, 0) if i == axis else (0, 0) for i in range(x.ndim)])


def _moved(x: np.ndarray, axis: int, first: int, end: int, size: int) -> np.ndarray:
    """Some entries of an axis at its beginning, with zeros behind them."""
    made = np.zeros(_with(x.shape, {axis: size}), x.dtype)
    before = (slice(None),) * axis
    made[(*before, slice(end - first))] = x[(*before, slice(first, end))]
    return made

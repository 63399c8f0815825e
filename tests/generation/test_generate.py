"""`xrt.generate`: tokens equal those of a reference without caches and padding, whatever the engine and the caches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper, numpy_helper

import xrt_core as xrt
from tests.generation.models import (
    SIZE,
    WIDTH,
    WORDS,
    continued,
    cross_weight,
    decoder,
    scores_of,
    weights,
    with_cross_cache,
    with_loop_over_keys,
)
from xrt_core.compiler.models import CompiledGraph
from xrt_core.errors import ExecutionError, InputError, OptionError
from xrt_core.generation.decoder import Decoder
from xrt_core.generation.sampling import Sampling

PROMPTS = [[3, 14, 15, 9, 2], [6, 5], [3, 5, 8, 9, 7, 9, 3, 2]]


def module(engine: str = "host", caches: bool = True, **options: Any) -> xrt.XRTModule:
    """A module of the small decoder."""
    return xrt.XRTModule(decoder(caches), engine=engine, guard=False, cache=False, **options)


def compiled(m: xrt.XRTModule) -> int:
    """How often an engine compiled."""
    return sum(e.name == "compile" for e in m.events)


@pytest.mark.parametrize("caches", [True, False])
@pytest.mark.parametrize("capacity", [None, 8, 64])
def test_unequal_prompts(caches: bool, capacity: int | None) -> None:
    """Each row goes on as if it were alone, with caches that grow, overflow their capacity, or have room for all."""
    got = xrt.generate(module(caches=caches), PROMPTS, max_new_tokens=20, capacity=capacity, pad=30)
    for row, prompt in zip(got, PROMPTS, strict=True):
        want = continued(prompt, 20)
        assert row[: len(want)].tolist() == want
        assert (row[len(want) :] == 30).all()


@pytest.mark.parametrize("derives", [True, False])
def test_the_state_of_steps_goes_back_as_it_came(derives: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes the arrays that the last one gave; what is valid in the caches is at their beginning. Where a module
    does not run graphs made of its own, the tokens are the same."""
    given, made = [], []
    run = CompiledGraph.repeated

    def noted(self: CompiledGraph) -> Any:
        call = run(self)

        def step(arrays: Any) -> Any:
            given.append(arrays)
            made.append(call(arrays))
            return made[-1]

        return step

    monkeypatch.setattr(CompiledGraph, "repeated", noted)
    if not derives:
        monkeypatch.setattr(xrt.XRTModule, "derived", lambda *given: None)
    got = xrt.generate(module(), PROMPTS[:1], max_new_tokens=8, capacity=16)
    assert got.tolist() == [continued(PROMPTS[0], 8)]
    assert len(given) == (7 if derives else 0)
    for arrays, results in zip(given[1:], made, strict=False):
        assert all(a is r for a, r in zip(arrays[1:], results[1:], strict=True))
    for k, (_, mask, positions, valid, key, value) in enumerate(given, len(PROMPTS[0])):
        assert mask.tolist() == [[1] * k + [0] * (16 - k)]
        assert positions.tolist() == [[k]]
        assert int(valid) == k
        assert key.shape == value.shape == (1, 2, 16, SIZE)
        assert key[:, :, :k].any()
        assert not key[:, :, k:].any()


def test_steps_of_an_engine_write_into_the_caches_that_they_are_given() -> None:
    """What was given to a step is gone after it: its storage is that of the result."""
    jax = pytest.importorskip("jax")
    m = module("xla")
    steps = Decoder(m, {}, 16)
    steps.start(np.array(PROMPTS[:1]), np.ones((1, 5), np.int64))
    steps.step(np.array([3]))
    before = steps._state[-1]
    steps.step(np.array([4]))
    assert isinstance(before, jax.Array)
    assert before.is_deleted()
    assert not steps._state[-1].is_deleted()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["xla", "onnxruntime"])
def test_under_guard(engine: str) -> None:
    """The tokens are the same while the host answers, and once the engine does."""
    pytest.importorskip({"xla": "jax"}.get(engine, engine))
    with xrt.XRTModule(decoder(), engine=engine, guard=True, cache=False) as m:
        for _ in range(3):
            got = xrt.generate(m, PROMPTS, max_new_tokens=20, pad=30)
            for row, prompt in zip(got, PROMPTS, strict=True):
                want = continued(prompt, 20)
                assert row[: len(want)].tolist() == want
            assert m.wait(60)


@pytest.mark.slow
def test_a_model_that_cannot_be_padded_compiles_for_its_prompt_and_its_steps() -> None:
    """Padding behind what is valid is proven to reach nothing, whatever the mask can say."""
    pytest.importorskip("jax")
    model = decoder()
    mask = next(i for i in model.graph.input if i.name == "attention_mask")
    model.graph.input.remove(mask)
    nodes = [n for n in model.graph.node if not any("attention_mask" in x for x in n.input)]
    shape = [n for n in model.graph.node if "attention_mask" in n.input]
    total, seen = (next(n.output[0] for n in shape if n.op_type == op) for op in ("Shape", "Cast"))
    nodes.insert(0, helper.make_node("Concat", ["nb", "past_and_new"], [total], axis=0))
    nodes.insert(0, helper.make_node("Add", ["np", "nn"], ["past_and_new"]))
    for name, source, axis in (("nb", "input_ids", 0), ("nn", "input_ids", 1), ("np", "past_key_values.0.key", 2)):
        nodes.insert(0, helper.make_node("Shape", [source], [name], start=axis, end=axis + 1))
    place = next(i for i, n in enumerate(nodes) if seen in n.input)
    nodes.insert(
        place, helper.make_node("ConstantOfShape", [total], [seen], value=helper.make_tensor("t", 9, [1], [1]))
    )
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    m = xrt.XRTModule(model, engine="xla", guard=False, cache=False)
    got = xrt.generate(m, [PROMPTS[0]], max_new_tokens=20)
    assert got.tolist() == [continued(PROMPTS[0], 20)]
    assert compiled(m) == 2


@pytest.mark.slow
def test_an_engine_of_static_shapes_compiles_twice() -> None:
    """For the prompt, and for all steps: the capacity is chosen for it."""
    pytest.importorskip("jax")
    m = module("xla")
    got = xrt.generate(m, np.array([PROMPTS[0]], np.int32), max_new_tokens=40)
    assert got.tolist() == [continued(PROMPTS[0], 40)]
    assert compiled(m) <= 3
    xrt.generate(m, [[1] * 11], max_new_tokens=30)  # prompts of up to 16 tokens, and as many in all
    assert compiled(m) <= 3


def test_an_engine_of_dynamic_shapes_compiles_for_no_further_prompt() -> None:
    """Two symbolic plans serve prompts and steps of all lengths."""
    pytest.importorskip("onnxruntime")
    m = module("onnxruntime")
    for n in (3, 5, 4):
        xrt.generate(m, np.full((1, n), n), max_new_tokens=4)
    before = compiled(m)
    got = xrt.generate(m, [PROMPTS[2]], max_new_tokens=20)
    assert got.tolist() == [continued(PROMPTS[2], 20)]
    assert compiled(m) == before


@pytest.mark.parametrize("engine", ["host", "onnxruntime"])
def test_cross_caches_are_made_once(engine: str) -> None:
    """Those of a merged decoder are kept from the first step, whatever the model returns in their place later."""
    if engine != "host":
        pytest.importorskip(engine)
    states = np.random.default_rng(3).standard_normal((2, 5, SIZE)).astype(np.float32)
    m = xrt.XRTModule(with_cross_cache(), engine=engine, guard=False, cache=False)
    got = xrt.generate(m, PROMPTS[:2], max_new_tokens=12, inputs={"states": states}, pad=30)
    for row, prompt, own in zip(got, PROMPTS[:2], states, strict=True):
        want = continued(prompt, 12, own.sum(0) @ cross_weight())
        assert row[: len(want)].tolist() == want
        assert want != continued(prompt, 12)


@pytest.mark.parametrize("engine", ["host", pytest.param("xla", marks=pytest.mark.slow)])
def test_products_of_four_bits(engine: str) -> None:
    """A model with MatMulNBits takes unequal prompts and a capacity, and gives the tokens of the float weights that it
    stands for."""
    if engine == "xla":
        pytest.importorskip("jax")
    model, w = decoder(), weights()["out"]
    node = next(n for n in model.graph.node if n.output[0] == "logits")
    scale = np.abs(w).max(0) / 7
    codes = np.zeros((WORDS, 16), np.uint8)
    codes[:, :WIDTH] = (np.clip(np.round(w / scale), -8, 7) + 8).astype(np.uint8).T
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).reshape(WORDS, 1, 8)
    model.graph.initializer.extend(
        [numpy_helper.from_array(packed, "codes"), numpy_helper.from_array(scale.astype(np.float32), "scale")]
    )
    hidden = node.input[0]
    model.graph.node.remove(node)
    attributes = {"K": WIDTH, "N": WORDS, "bits": 4, "block_size": 16}
    model.graph.node.append(
        helper.make_node("MatMulNBits", [hidden, "codes", "scale"], ["logits"], domain="com.microsoft", **attributes)
    )
    exact = decoder()
    rounded = ((codes[:, :WIDTH].astype(np.float32) - 8) * scale[:, None]).T
    next(i for i in exact.graph.initializer if i.name == "out").CopyFrom(numpy_helper.from_array(rounded, "out"))
    m, host = (xrt.XRTModule(x, engine=e, guard=False, cache=False) for x, e in ((model, engine), (exact, "host")))
    got = xrt.generate(m, PROMPTS, max_new_tokens=20, capacity=32)
    np.testing.assert_array_equal(got, xrt.generate(host, PROMPTS, max_new_tokens=20))
    if engine == "xla":
        assert compiled(m) <= 3


def test_stop_and_callback() -> None:
    """A row that ended is padded and told as -1; a callback that returns True ends the call."""
    wanted = [continued(p, 12) for p in PROMPTS[:2]]
    stop = wanted[0][5 + 3]
    ended = [w.index(stop, len(p)) if stop in w[len(p) :] else None for w, p in zip(wanted, PROMPTS[:2], strict=True)]
    assert ended[0] is not None
    seen: list[list[int]] = []
    got = xrt.generate(module(), PROMPTS[:2], max_new_tokens=12, stop=stop, callback=lambda t: seen.append(t.tolist()))
    for row, w, end in zip(got, wanted, ended, strict=True):
        alone = w if end is None else w[: end + 1]
        assert row[: len(alone)].tolist() == alone
        assert (row[len(alone) :] == 0).all()
    after = ended[0] - len(PROMPTS[0]) + 1
    assert all(t[0] == -1 for t in seen[after:])
    assert all(t[0] != -1 for t in seen[:after])
    assert xrt.generate(module(), PROMPTS[:1], max_new_tokens=9, callback=lambda _: True).shape == (1, 6)
    assert xrt.generate(module(), PROMPTS[:1], max_new_tokens=0).tolist() == PROMPTS[:1]


def test_draws_follow_the_scores() -> None:
    """The frequencies of 4000 draws are the probabilities, within the kept tokens; a seed repeats them."""
    scores = np.tile(scores_of(np.array(PROMPTS[0]))[None] / 3, (4000, 1))
    p = np.exp(scores[0] - scores[0].max())
    p /= p.sum()
    order = np.argsort(-p)
    whole = Sampling(temperature=1.0).choose(scores, [], np.random.default_rng(0))
    assert np.abs(np.bincount(whole, minlength=WORDS) / 4000 - p).max() < 0.03
    few = Sampling(temperature=1.0, top_k=3).choose(scores, [], np.random.default_rng(0))
    best = p[order[:3]] / p[order[:3]].sum()
    assert np.abs(np.bincount(few, minlength=WORDS)[order[:3]] / 4000 - best).max() < 0.03
    assert set(few) == set(order[:3])
    kept = int((p[order].cumsum() < 0.6).sum()) + 1
    nucleus = Sampling(temperature=1.0, top_p=0.6).choose(scores, [], np.random.default_rng(0))
    assert set(nucleus) == set(order[:kept])
    m = module()
    draws = [xrt.generate(m, PROMPTS, max_new_tokens=9, temperature=1.0, seed=s).tolist() for s in (5, 5, 6)]
    assert draws[0] == draws[1] != draws[2]


def test_repetition_penalty() -> None:
    """Positive scores of known tokens are divided, negative ones multiplied."""
    scores = np.array([[2.0, 3.0, -1.0, 1.9]])
    penalised = Sampling(repetition_penalty=2.0)
    assert penalised.choose(scores, [np.array([1])], np.random.default_rng()).tolist() == [0]
    assert penalised.choose(scores, [np.array([1, 0])], np.random.default_rng()).tolist() == [3]
    assert penalised.choose(scores - 3.5, [np.array([1])], np.random.default_rng()).tolist() == [1]


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"prompts": []}, InputError, "at least one token"),
        ({"prompts": [[1], []]}, InputError, "at least one token"),
        ({"prompts": [[1.5]]}, InputError, "integers"),
        ({"prompts": 5}, InputError, "token lists"),
        ({"max_new_tokens": -1}, OptionError, "max_new_tokens=-1"),
        ({"temperature": float("nan")}, OptionError, "temperature=nan"),
        ({"top_p": 0.0}, OptionError, "top_p=0.0"),
        ({"top_k": -1}, OptionError, "top_k=-1"),
        ({"repetition_penalty": 0}, OptionError, "repetition_penalty=0"),
        ({"capacity": -1}, OptionError, "capacity=-1"),
        ({"temperature": None}, OptionError, "temperature=None: give a finite number"),
        ({"top_k": 2.5}, OptionError, "top_k=2.5"),
        ({"stop": "end"}, OptionError, "stop='end'"),
        ({"stop": [1.5]}, OptionError, "stop="),
        ({"seed": "a"}, OptionError, "seed='a'"),
        ({"pad": -100}, OptionError, "pad=-100"),
        ({"module": 5}, InputError, "must be an XRTModule, not a int"),
        ({"inputs": {"unknown": 5}}, InputError, "unknown"),
    ],
)
def test_bad_arguments(given: dict[str, Any], error: type[Exception], words: str) -> None:
    """Each is named."""
    with pytest.raises(error, match=words):
        xrt.generate(**{"module": module(), "prompts": PROMPTS, **given})


def test_models_that_cannot_be_padded() -> None:
    """A model that may count what the mask leaves out takes no unequal prompts, and no capacity unless padding provably
    reaches nothing; one that is no decoder says what it lacks."""
    more = helper.make_node("LSTM", ["logits", "lw", "lr"], ["ly"], hidden_size=1)
    model = decoder(extra=[more])
    model.graph.initializer.extend(
        helper.make_tensor(n, 1, s, np.zeros(s, np.float32).ravel())
        for n, s in (("lw", (1, 4, WORDS)), ("lr", (1, 4, 1)))
    )
    model.graph.output.append(helper.make_tensor_value_info("ly", 1, None))
    m = xrt.XRTModule(model, engine="host")
    assert xrt.generate(m, [PROMPTS[0]], max_new_tokens=3).tolist() == [continued(PROMPTS[0], 3)]
    with pytest.raises(InputError, match="unequal length: the model has LSTM"):
        xrt.generate(m, PROMPTS)
    assert xrt.generate(m, [PROMPTS[0]], max_new_tokens=3, capacity=64).tolist() == [continued(PROMPTS[0], 3)]
    m = xrt.XRTModule(with_loop_over_keys(), engine="host")
    assert xrt.generate(m, [PROMPTS[0]], max_new_tokens=3).tolist() == [continued(PROMPTS[0], 3)]
    with pytest.raises(InputError, match="capacity=64: the model has Loop"):
        xrt.generate(m, [PROMPTS[0]], capacity=64)
    custom = decoder(extra=[helper.make_node("Mine", ["logits"], ["own"], domain="acme")])
    custom.opset_import.append(helper.make_opsetid("acme", 1))
    custom.graph.output.append(helper.make_tensor_value_info("own", 1, None))
    with pytest.raises(InputError, match="the model has Mine"):
        xrt.generate(xrt.XRTModule(custom, engine="host"), PROMPTS)
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])], "g",
        [helper.make_tensor_value_info("x", 1, ["n"])], [helper.make_tensor_value_info("y", 1, ["n"])],
    )  # fmt: skip
    with pytest.raises(InputError, match="takes x; none of these is one of input_ids"):
        xrt.generate(xrt.XRTModule(helper.make_model(graph, ir_version=9)), PROMPTS)


def test_scores_that_are_nan() -> None:
    """No token is made of them, as argmax would."""
    model = decoder()
    for w in model.graph.initializer:
        if w.name == "out":
            w.CopyFrom(numpy_helper.from_array(np.full((WIDTH, WORDS), np.nan, np.float32), "out"))
    with pytest.raises(ExecutionError, match="NaN among the scores"):
        xrt.generate(xrt.XRTModule(model, engine="host"), PROMPTS)

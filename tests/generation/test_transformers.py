"""`xrt.generate` gives the tokens of `transformers`, for small models with random weights, exported with caches."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import xrt_core as xrt

pytestmark = [pytest.mark.slow, pytest.mark.nightly]
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", exc_type=ImportError)
pytest.importorskip("onnxscript")

WORDS, LAYERS, HEADS, SIZE, COUNT = 64, 2, 4, 8, 40
WIDTH = HEADS * SIZE
PLAIN = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "max_position_embeddings": 256, "eos_token_id": None, "pad_token_id": 0,
    "bos_token_id": 1,
}  # fmt: skip
FEW = {"num_key_value_heads": 2}
DECODERS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=WORDS, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=256, eos_token_id=None)),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**PLAIN, **FEW)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**PLAIN, **FEW)),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(
        **PLAIN, **FEW, sliding_window=8)),
    "gemma": lambda: transformers.GemmaForCausalLM(transformers.GemmaConfig(**PLAIN, **FEW, head_dim=SIZE)),
    "phi": lambda: transformers.PhiForCausalLM(transformers.PhiConfig(**PLAIN)),
}  # fmt: skip
WITH_ENCODERS: dict[str, Callable[[], Any]] = {
    "t5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(
        vocab_size=WORDS, d_model=WIDTH, d_kv=SIZE, d_ff=48, num_layers=LAYERS, num_heads=HEADS,
        decoder_start_token_id=1, eos_token_id=None, pad_token_id=0)),
    "whisper": lambda: transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(
        vocab_size=WORDS, d_model=WIDTH, encoder_layers=1, decoder_layers=LAYERS, encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS, encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8, max_source_positions=20,
        max_target_positions=128, pad_token_id=0, bos_token_id=1, eos_token_id=None, decoder_start_token_id=1)),
}  # fmt: skip


def varied(make: Callable[[], Any]) -> Any:
    """A model whose tokens do not repeat: weights are larger than libraries draw them."""
    torch.manual_seed(5)
    model = make().eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.copy_(torch.randn_like(p) * (1.5 / p.shape[-1] ** 0.5))
    return model


def exported(model: Any, heads: int, *, encoder: bool) -> bytes:
    """The model as ONNX, with caches that Optimum's names have. encoder: it takes an encoder's states."""
    caches = transformers.cache_utils

    class Step(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Any, first: Any, second: Any, *past: Any) -> Any:
            own = caches.DynamicCache()
            for i in range(LAYERS):
                own.update(past[2 * i], past[2 * i + 1], i)
            if encoder:
                both = caches.EncoderDecoderCache(own, caches.DynamicCache())
                result = self.model(decoder_input_ids=ids, encoder_outputs=(first,), past_key_values=both)
                own = result.past_key_values.self_attention_cache
            else:
                result = self.model(input_ids=ids, attention_mask=first, position_ids=second, past_key_values=own)
                own = result.past_key_values
            return result.logits, *(x for layer in own.layers[:LAYERS] for x in (layer.keys, layer.values))

    own = ".decoder" if encoder else ""
    labels = [f"{i}{own}.{kind}" for i in range(LAYERS) for kind in ("key", "value")]
    batch, n, before = 2, 3, 5
    ids = torch.ones(batch, n, dtype=torch.int64)
    states = torch.randn(batch, 7, WIDTH)
    first = states if encoder else torch.ones(batch, before + n, dtype=torch.int64)
    second = None if encoder else torch.arange(before, before + n)[None].repeat(batch, 1)
    past = tuple(torch.randn(batch, heads, before, SIZE) for _ in labels)
    any_ = torch.export.Dim.DYNAMIC
    both = {0: any_, 1: any_}
    shapes = (both, both, None if encoder else both, tuple({0: any_, 2: any_} for _ in past))
    more = ["encoder_hidden_states"] if encoder else ["attention_mask", "position_ids"]
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            program = torch.onnx.export(
                Step(), (ids, first, second, *past), dynamo=True, verbose=False, dynamic_shapes=shapes,
                input_names=["input_ids", *more, *(f"past_key_values.{x}" for x in labels)],
                output_names=["logits", *(f"present.{x}" for x in labels)],
            )  # fmt: skip
        except torch.onnx.OnnxExporterError as e:
            if model.config.model_type != "t5":  # that of transformers 5.24 has a view that torch 2.13 cannot decompose
                raise
            pytest.skip(f"torch does not export it: {str(e).splitlines()[0]}")
        program.save(file)
    return file.getvalue()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", DECODERS)
def test_decoders(name: str) -> None:
    """On the host, ONNX Runtime and XLA; also with unequal prompts, and where the capacity does not suffice."""
    model = varied(DECODERS[name])
    heads = getattr(model.config, "num_key_value_heads", HEADS) or HEADS
    content = exported(model, heads, encoder=False)
    prompts = [[3, 14, 15, 9, 2], [6, 5], [31, 41, 59, 26, 53, 58, 9]]
    want = [model.generate(torch.tensor([p]), max_new_tokens=COUNT, do_sample=False).numpy()[0] for p in prompts]
    assert len({*want[0].tolist()}) > 5
    for engine in ("host", "onnxruntime", "xla"):
        if engine != "host":
            pytest.importorskip({"xla": "jax"}.get(engine, engine))
        m = xrt.XRTModule(content, engine=engine, guard=False, cache=False)
        for capacity in (None, 16):
            got = xrt.generate(m, prompts, max_new_tokens=COUNT, capacity=capacity)
            for row, w in zip(got, want, strict=True):
                np.testing.assert_array_equal(row[: len(w)], w, f"{engine}, capacity={capacity}")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WITH_ENCODERS)
def test_decoders_of_encoders(name: str) -> None:
    """The states go in at each step."""
    model = varied(WITH_ENCODERS[name])
    content = exported(model, HEADS, encoder=True)
    with torch.no_grad():
        given = torch.randint(2, WORDS, (2, 9)) if name == "t5" else torch.randn(2, 8, 40)
        states = model.get_encoder()(given).last_hidden_state
        want = torch.ones(2, 1, dtype=torch.int64)
        for _ in range(COUNT):  # Whisper's own `generate` adds tokens of its tasks
            scores = model(decoder_input_ids=want, encoder_outputs=(states,)).logits
            want = torch.cat([want, scores[:, -1].argmax(-1, keepdim=True)], 1)
        if name == "t5":
            plain = model.generate(given, max_new_tokens=COUNT, do_sample=False)
            np.testing.assert_array_equal(plain.numpy(), want.numpy())
    assert len({*want[0].tolist()}) >= 4
    for engine in ("host", "onnxruntime", "xla"):
        if engine != "host":
            pytest.importorskip({"xla": "jax"}.get(engine, engine))
        m = xrt.XRTModule(content, engine=engine, guard=False, cache=False)
        got = xrt.generate(m, [[1], [1]], max_new_tokens=COUNT, inputs={"encoder_hidden_states": states.numpy()})
        np.testing.assert_array_equal(got, want.numpy(), engine)

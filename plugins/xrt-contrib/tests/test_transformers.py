"""Small random models of transformers: exported and rewritten by onnxruntime.transformers, or written by
onnxruntime_genai's builder; on the host, XLA and ONNX Runtime, against a session of ONNX Runtime."""

from __future__ import annotations

import importlib.util
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import onnx
import pytest

import xrt_core as xrt

ort = pytest.importorskip("onnxruntime", reason="its tools write the models")
torch = pytest.importorskip("torch", reason="the models are made by it")
transformers = pytest.importorskip("transformers", reason="the models are its")
pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore")]

ENGINES: Final = [e for e in ("host", "xla", "onnxruntime") if e == "host" or importlib.util.find_spec(f"xrt_{e}")]
Arrays = dict[str, np.ndarray]


class _Calls(torch.nn.Module):  # type: ignore[misc]
    """A model as a function of tensors by position."""

    def __init__(self, model: Any, call: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self, *tensors: Any) -> Any:
        return self.call(self.model, *tensors)


def _network(kind: str) -> tuple[Any, dict[str, Any]]:
    """A model with random weights, and inputs."""
    torch.manual_seed(0)
    t, eager = transformers, {"attn_implementation": "eager"}
    tokens = torch.randint(3, 90, (2, 12))
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[1, 8:] = 0
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4}
    text = {"input_ids": tokens, "attention_mask": mask}
    if kind == "bert":
        config = t.BertConfig(vocab_size=90, hidden_size=64, **layers, intermediate_size=128, **eager)
        return _Calls(t.BertModel(config), lambda m, i, k: m(i, attention_mask=k).last_hidden_state), text
    if kind == "gpt2":
        config = t.GPT2Config(vocab_size=90, n_positions=64, n_embd=64, n_layer=2, n_head=4, use_cache=False, **eager)
        return _Calls(t.GPT2LMHeadModel(config), lambda m, i, k: m(i, attention_mask=k).logits), text
    if kind == "t5":
        config = t.T5Config(vocab_size=90, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, use_cache=False)
        made = t.T5ForConditionalGeneration(config)
        call = lambda m, i, k, d: m(i, attention_mask=k, decoder_input_ids=d).logits  # noqa: E731
        return _Calls(made, call), {**text, "decoder_input_ids": tokens[:, :5].clone()}
    if kind == "vit":
        config = t.ViTConfig(hidden_size=64, **layers, intermediate_size=128, image_size=32, patch_size=8, **eager)
        return _Calls(t.ViTModel(config), lambda m, x: m(x).last_hidden_state), {"x": torch.randn(2, 3, 32, 32)}
    sides = {f"{side}_{what}": n for side in ("encoder", "decoder")
              for what, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 128))}  # fmt: skip
    config = t.WhisperConfig(
        vocab_size=90, num_mel_bins=8, d_model=64, max_source_positions=20, max_target_positions=16, use_cache=False,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, **sides, **eager,
    )  # fmt: skip
    made = t.WhisperForConditionalGeneration(config)
    call = lambda m, x, d: m(input_features=x, decoder_input_ids=d).logits  # noqa: E731
    return _Calls(made, call), {"input_features": torch.randn(2, 8, 40), "decoder_input_ids": tokens[:, :5].clone()}


FAMILIES: Final = {"bert": "bert", "gpt2": "gpt2", "t5": "t5", "vit": "vit", "whisper": "bart"}
"""Model -> what onnxruntime.transformers calls its kind."""


@pytest.fixture(scope="module", params=FAMILIES)
def exported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, pathlib.Path, Arrays]:
    """A kind of model, its file and inputs."""
    made, inputs = _network(request.param)
    path = tmp_path_factory.mktemp(request.param) / "model.onnx"
    # the exporter of TorchScript, whose graphs the tools know better, has not all that Whisper needs
    traced: dict[str, Any] = {"dynamo": False, "opset_version": 17}
    how = {"dynamo": True, "external_data": False} if request.param == "whisper" else traced
    with torch.no_grad():
        torch.onnx.export(made.eval(), tuple(inputs.values()), str(path), input_names=list(inputs), **how)
    return request.param, path, {k: v.numpy() for k, v in inputs.items()}


def _session(path: pathlib.Path, level: str = "DISABLE_ALL", to: pathlib.Path | None = None) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_{level}")
    if to is not None:
        options.optimized_model_filepath = str(to)
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _optimised(kind: str, source: pathlib.Path, target: pathlib.Path, half: bool = False, heads: bool = False) -> None:
    from onnxruntime.transformers.fusion_options import FusionOptions
    from onnxruntime.transformers.optimizer import optimize_model

    options = FusionOptions(FAMILIES[kind])
    options.use_multi_head_attention = heads
    made = optimize_model(
        str(source), FAMILIES[kind], num_heads=4, hidden_size=64, optimization_options=options, opt_level=0
    )
    if half:
        made.convert_float_to_float16(keep_io_types=False)
    made.save_model_to_file(str(target))


def _in_half(source: pathlib.Path, target: pathlib.Path) -> None:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    onnx.save(convert_float_to_float16(onnx.load(source), keep_io_types=True), target)


def _of_four_bits(source: pathlib.Path, target: pathlib.Path) -> None:
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    quantizer = MatMulNBitsQuantizer(onnx.load(source), block_size=32, is_symmetric=False)
    quantizer.process()
    quantizer.model.save_model_to_file(str(target))


def _dynamic(source: pathlib.Path, target: pathlib.Path) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(str(source), str(target), weight_type=QuantType.QInt8, reduce_range=True)


WRITERS: Final[dict[str, tuple[Callable[[str, pathlib.Path, pathlib.Path], None], float]]] = {
    "optimizer": (lambda k, s, t: _optimised(k, s, t), 2e-5),
    "optimizer, MultiHeadAttention": (lambda k, s, t: _optimised(k, s, t, heads=True), 2e-5),
    "optimizer, float16": (lambda k, s, t: _optimised(k, s, t, half=True), 4e-3),
    "extended": (lambda k, s, t: _session(s, "ENABLE_EXTENDED", t) and None, 2e-5),
    "all": (lambda k, s, t: _session(s, "ENABLE_ALL", t) and None, 2e-5),
    "float16": (lambda k, s, t: _in_half(s, t), 4e-3),
    "four bits": (lambda k, s, t: _of_four_bits(s, t), 2e-5),
    "dynamic": (lambda k, s, t: _dynamic(s, t), 2e-2),
}
"""What writes a model -> how, and how far results may be off, as a part of the largest."""


@pytest.mark.parametrize("writer", WRITERS)
def test_what_a_tool_made_of_it(
    exported: tuple[str, pathlib.Path, Arrays], writer: str, tmp_path: pathlib.Path
) -> None:
    """Each engine gives what ONNX Runtime gives without optimising further."""
    kind, source, inputs = exported
    target = tmp_path / "target.onnx"
    write, tolerance = WRITERS[writer]
    write(kind, source, target)
    session = _session(target)
    fed = {
        p.name: inputs[p.name].astype(np.float16) if p.type == "tensor(float16)" else inputs[p.name]
        for p in session.get_inputs()
    }
    wanted = session.run(None, fed)[0].astype(np.float64)
    for engine in ENGINES:
        found = np.asarray(xrt.XRTModule(target, engine=engine, cache="off")(*fed.values())).astype(np.float64)
        assert np.abs(found - wanted).max() <= tolerance * np.abs(wanted).max(), engine


# --- onnxruntime_genai ---


def _decoder(kind: str) -> Any:
    torch.manual_seed(0)
    t = transformers
    sizes: dict[str, Any] = {
        "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
        "pad_token_id": 0,
    }  # fmt: skip
    if kind == "llama":
        return t.LlamaForCausalLM(t.LlamaConfig(**sizes))
    if kind == "phi":
        return t.PhiForCausalLM(t.PhiConfig(**{**sizes, "num_key_value_heads": 4, "hidden_size": 128}))
    if kind == "gemma":
        return t.GemmaForCausalLM(t.GemmaConfig(**sizes, head_dim=16))
    if kind == "gemma2":
        config = t.Gemma2Config(**sizes, head_dim=16, query_pre_attn_scalar=16, sliding_window=8)
        return t.Gemma2ForCausalLM(config)
    return t.Qwen3ForCausalLM(t.Qwen3Config(**sizes, head_dim=16))


def _vocabulary(folder: pathlib.Path) -> None:
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(96)}, unk_token="t0"))
    special = {"unk_token": "t0", "bos_token": "t1", "eos_token": "t2", "pad_token": "t0"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)


def _windows(path: pathlib.Path) -> dict[str, int]:
    """Inputs that are caches of a window -> its size."""
    found = {}
    for n in onnx.load(path, load_external_data=False).graph.node:
        said = {a.name: onnx.helper.get_attribute_value(a) for a in n.attribute}
        if n.op_type == "GroupQueryAttention" and said.get("sliding_window_cache"):
            found |= dict.fromkeys(n.input[3:5], said["local_window_size"])
    return found


@pytest.mark.parametrize("precision", ["fp32", "int4"])
@pytest.mark.parametrize("kind", ["llama", "phi", "gemma", "gemma2", "qwen3"])
def test_what_genai_builds(kind: str, precision: str, tmp_path: pathlib.Path) -> None:
    """A prompt and two tokens, with the caches that came before, as ONNX Runtime computes them.

    Products with weights of 4 bits are computed in int8 there (accuracy_level 4), here in the model's precision.
    """
    pytest.importorskip("onnxruntime_genai", reason="its builder writes the models")
    made = _decoder(kind)
    made.save_pretrained(tmp_path / "in")
    _vocabulary(tmp_path / "in")
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", "in", "-o", "out", "-p", precision,
               "-e", "cpu", "-c", "cache"]  # fmt: skip
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    path = tmp_path / "out" / "model.onnx"
    session, windows = _session(path), _windows(path)
    assert bool(windows) == (kind == "gemma2")
    modules = {e: xrt.XRTModule(path, engine=e, cache="off") for e in ENGINES}
    rng, caches = np.random.default_rng(0), {}
    size = made.config.hidden_size // made.config.num_attention_heads
    outputs = [o.name for o in session.get_outputs()]
    for past, new in ((0, 12), (12, 1), (13, 1)):
        fed = {}
        for p in session.get_inputs():
            if p.name == "input_ids":
                fed[p.name] = rng.integers(3, 90, (1, new))
            elif p.name == "attention_mask":
                fed[p.name] = np.ones((1, past + new), np.int64)
            elif p.name == "position_ids":
                fed[p.name] = np.arange(past, past + new)[None]
            else:
                empty = np.zeros((1, p.shape[1], windows.get(p.name, 0), size), np.float32)
                fed[p.name] = caches.get(p.name, empty)
        wanted = dict(zip(outputs, session.run(None, fed), strict=True))
        for engine, module in modules.items():
            found = module.run(fed)
            for name, a in wanted.items():
                off = np.abs(np.asarray(found[name], np.float64) - a).max() / max(np.abs(a).max(), 1e-9)
                assert off <= (1e-5 if precision == "fp32" else 4e-2), (engine, name, past)
        caches = {name.replace("present", "past_key_values"): a for name, a in wanted.items() if "present" in name}

"""Twenty-four architectures of PyTorch, small and with random weights, through `torch.compile(model, backend="xrt")`.

    python benchmarks/torch_architectures.py [NAME ...] [--engine host]    # one line of a table each

Results, the loss and the gradients of XRT's float32 and of eager's are compared with each other and with eager's in
float64: `off` is the largest difference to eager's, relative to the largest number of the tensor (but for gradients at
least a hundredth of the largest of all); `error` is the same to float64, of eager and of XRT. Graphs are those of
TorchDynamo, for XRT and for a backend that runs them as they are, in inference and in training.
Dropout is on, from one seed. Needs transformers.
"""

from __future__ import annotations

import argparse
import copy
import gc
import logging
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch_backend import UNet

Model = tuple[torch.nn.Module, dict[str, Any]]


class Tagger(torch.nn.Module):
    """An LSTM in both directions over embeddings, with a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(100, 24)
        self.lstm = torch.nn.LSTM(24, 16, num_layers=2, bidirectional=True, batch_first=True)
        self.head = torch.nn.Linear(32, 7)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: int64 [n, length] -> float32 [n, length, 7]."""
        return self.head(self.lstm(self.embed(ids))[0])


def models() -> dict[str, Callable[[], Model]]:
    """Name -> what makes a small model and the arguments of a call."""
    import transformers as t

    ids, mask = torch.randint(3, 90, (2, 12)), torch.ones(2, 12, dtype=torch.int64)
    mask[1, 9:] = 0
    image, large = torch.randn(2, 3, 32, 32), torch.randn(4, 3, 64, 64)
    common = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    encoder = {**common, "intermediate_size": 64, "max_position_embeddings": 40}
    decoder = {**encoder, "num_key_value_heads": 2}
    text = {"input_ids": ids, "attention_mask": mask}
    causal = {**text, "labels": ids, "use_cache": False}
    seq = {"input_ids": ids, "attention_mask": mask, "labels": ids[:, :8].contiguous(), "use_cache": False}

    def labelled(kind: Any, config: Any) -> Model:
        return kind(config), {**text, "labels": torch.tensor([0, 1])}

    def pixels(kind: Any, config: Any, image: Any = image) -> Model:
        config.num_labels = 5
        return kind(config), {"pixel_values": image, "labels": torch.arange(len(image))}

    return {
        "BERT": lambda: labelled(t.BertForSequenceClassification, t.BertConfig(**encoder)),
        "RoBERTa": lambda: labelled(t.RobertaForSequenceClassification, t.RobertaConfig(**encoder)),
        "DistilBERT": lambda: labelled(
            t.DistilBertForSequenceClassification,
            t.DistilBertConfig(vocab_size=100, dim=32, n_layers=2, n_heads=4, hidden_dim=64),
        ),
        "ALBERT": lambda: labelled(t.AlbertForSequenceClassification, t.AlbertConfig(**encoder, embedding_size=16)),
        "ELECTRA": lambda: labelled(t.ElectraForSequenceClassification, t.ElectraConfig(**encoder, embedding_size=16)),
        "DeBERTa-v2": lambda: labelled(
            t.DebertaV2ForSequenceClassification,
            t.DebertaV2Config(**encoder, relative_attention=True, pos_att_type=["p2c", "c2p"]),
        ),
        "GPT-2": lambda: (
            t.GPT2LMHeadModel(t.GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=4, n_positions=40)), causal
        ),
        "GPT-NeoX": lambda: (t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**encoder)), causal),
        "Llama": lambda: (t.LlamaForCausalLM(t.LlamaConfig(**decoder)), causal),
        "Mistral": lambda: (t.MistralForCausalLM(t.MistralConfig(**decoder, sliding_window=8)), causal),
        "Qwen2": lambda: (t.Qwen2ForCausalLM(t.Qwen2Config(**decoder)), causal),
        "Gemma": lambda: (t.GemmaForCausalLM(t.GemmaConfig(**decoder, head_dim=8)), causal),
        "T5": lambda: (
            t.T5ForConditionalGeneration(
                t.T5Config(
                    vocab_size=100, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
                )
            ),
            seq,
        ),
        "BART": lambda: (
            t.BartForConditionalGeneration(
                t.BartConfig(
                    vocab_size=100, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
                    decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=40,
                )
            ),
            seq,
        ),
        "Whisper": lambda: (
            t.WhisperForConditionalGeneration(
                t.WhisperConfig(
                    vocab_size=100, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
                    decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=16,
                    max_source_positions=20, max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
                    decoder_start_token_id=1,
                )
            ),
            {"input_features": torch.randn(2, 16, 40), "labels": ids[:, :8].contiguous(), "use_cache": False},
        ),
        "ViT": lambda: pixels(
            t.ViTForImageClassification,
            t.ViTConfig(
                hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=32,
                patch_size=8,
            ),
        ),
        "Swin": lambda: pixels(
            t.SwinForImageClassification,
            t.SwinConfig(image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4),
        ),
        "ConvNeXt": lambda: pixels(
            t.ConvNextForImageClassification, t.ConvNextConfig(hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1])
        ),
        "ResNet": lambda: pixels(
            t.ResNetForImageClassification,
            t.ResNetConfig(embedding_size=8, hidden_sizes=[16, 24, 32, 40], depths=[1, 1, 1, 1]),
            large,
        ),
        "MobileNetV2": lambda: pixels(
            t.MobileNetV2ForImageClassification, t.MobileNetV2Config(depth_multiplier=0.35), large
        ),
        "CLIP": lambda: (
            t.CLIPModel(
                t.CLIPConfig(
                    text_config={**encoder, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
                    vision_config={
                        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
                        "image_size": 32, "patch_size": 8,
                    },
                    projection_dim=16,
                )
            ),
            {**text, "pixel_values": image, "return_loss": True},
        ),
        "Wav2Vec2": lambda: (
            t.Wav2Vec2ForCTC(
                t.Wav2Vec2Config(
                    **{**encoder, "vocab_size": 30}, conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 8),
                    num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, num_feat_extract_layers=2,
                    mask_time_prob=0.0, layerdrop=0.0,
                )
            ),
            {"input_values": torch.randn(2, 800), "labels": torch.randint(1, 30, (2, 6))},
        ),
        "LSTM tagger": lambda: (Tagger(), {"ids": ids}),
        "U-Net": lambda: (UNet(16), {"x": image}),
    }  # fmt: skip


def tensors(result: Any) -> list[torch.Tensor]:
    """The tensors of a result, in order."""
    return [
        x
        for x in pytree.tree_leaves(dict(result) if hasattr(result, "keys") else result)
        if isinstance(x, torch.Tensor)
    ]


def step(model: Any, call: Any, inputs: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Results and gradients of one step from a fixed seed. Where there is no loss, it is the mean square."""
    torch.manual_seed(3)
    model.zero_grad()
    result = call(**inputs)
    loss = getattr(result, "loss", None)
    made = tensors(result)
    (made[0].square().mean() if loss is None else loss).backward()
    # AOTAutograd's backward graphs give zeros to parameters that eager gives no gradient
    own = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [x.detach().clone() for x in made], own


def off(found: list[torch.Tensor], wanted: list[torch.Tensor], share: float = 0.0) -> float:
    """The largest difference, relative to the largest number of its tensor. share: of the largest of all, at least."""
    most = max((float(w.abs().max()) for w in wanted if w.numel() and w.is_floating_point()), default=0.0)
    worst = 0.0
    for a, b in zip(found, wanted, strict=True):
        if b.numel() and b.is_floating_point():
            scale = max(float(b.abs().max()), share * most, 1e-30)
            worst = max(worst, float((a.double() - b.double()).abs().max()) / scale)
    return worst


def settle(call: Callable[[], Any], seconds: float = 240.0) -> None:
    """Call until XRT answers: what it needs for that is compiled."""
    import xrt_torch

    end = time.monotonic() + seconds
    for _ in range(6):
        call()
        xrt_torch.wait(max(end - time.monotonic(), 0.1))


def graphs_of(model: torch.nn.Module, inputs: dict[str, Any], backend: Any, train: bool) -> int:
    """The number of graphs that TorchDynamo makes of a call."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    call = torch.compile(model, backend=backend)
    for _ in range(2):
        step(model, call, inputs) if train else call(**inputs)
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def trial(name: str, make: Callable[[], Model], engine: str | None) -> str:
    """A line of the table."""
    import xrt_torch

    torch.manual_seed(0)
    model, inputs = make()
    double, inputs64 = (
        copy.deepcopy(model).double(),
        {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in inputs.items()},
    )
    options = {"engine": engine, "background": False} if engine else {}
    cells, on_xrt = [], []
    start = time.perf_counter()
    model.eval()
    plain = [0, 0]
    model(**inputs)
    with torch.no_grad():
        plain[0] = graphs_of(model, inputs, "eager", False)
    model.train()
    plain[1] = graphs_of(model, inputs, "eager", True)
    found = []
    for train in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model.train(train)
        double.train(train)
        state = copy.deepcopy(model.state_dict())
        call = torch.compile(model, backend="xrt", options=options)
        if train:
            settle(lambda call=call: step(model, call, inputs))
            model.load_state_dict(state)
            made, gradients = step(model, call, inputs)
            model.load_state_dict(state)
            wanted, own = step(model, model, inputs)
            cells += [f"{off(made, wanted):.0e}", f"{off(gradients, own, 0.01):.0e}"]
            try:
                exact = step(double, double, inputs64)[1]
                cells.append(f"{off(own, exact, 0.01):.0e}, {off(gradients, exact, 0.01):.0e}")
            except RuntimeError:  # a model that is not for float64
                cells.append("-")
        else:
            with torch.no_grad():
                settle(lambda call=call: call(**inputs))
                cells.append(f"{off(tensors(call(**inputs)), tensors(model(**inputs))):.0e}")
        found.append(int(torch._dynamo.utils.counters["stats"]["unique_graphs"]))
        known = xrt_torch.graphs(model)
        whole = sum(sum(n.op == "call_function" for n in g.module.graph.nodes) for g in known)
        on_xrt.append(1 - sum(whole and len(g.eager_nodes) for g in known) / max(whole, 1))
        for g in known:
            if g.reason is not None:
                print(f"{name}: {g.name}: {g.reason}", file=sys.stderr)
    cells.append(f"{found[0]}, {found[1]} / {plain[0]}, {plain[1]}")
    cells.append(f"{on_xrt[0]:.1%}, {on_xrt[1]:.1%}")
    print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return f"| {name} | " + " | ".join(cells) + " |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--engine")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("xrt").setLevel(logging.ERROR)
    torch.manual_seed(0)
    known = models()
    print(
        "| model | results off | training: results off | gradients off | gradients' error, eager and XRT "
        "| graphs, XRT / eager | nodes on XRT |"
    )
    print("|---|---|---|---|---|---|---|")
    for name in args.names or known:
        try:
            print(trial(name, known[name], args.engine), flush=True)
        except Exception as e:
            print(f"| {name} | {type(e).__name__}: {str(e).strip()[:200]} |", flush=True)
        torch._dynamo.reset()
        gc.collect()


if __name__ == "__main__":
    main()

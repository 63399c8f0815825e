"""The exported models of the benchmarks: BERT-base, GPT-2, ViT-base, ResNet-50, MobileNetV2, random weights.

    python benchmarks/exported.py FOLDER      # exports what is not there yet; needs torch, transformers, onnxscript
"""

from __future__ import annotations

import os
import pathlib
import sys
import tempfile
import warnings
from typing import Any

import numpy as np

NAMES = ("mobilenetv2", "resnet50", "bert", "gpt2", "vit")


def folder() -> pathlib.Path:
    """Where the models lie: $XRT_BENCH_MODELS, or a folder of the temporary directory."""
    return pathlib.Path(os.environ.get("XRT_BENCH_MODELS", pathlib.Path(tempfile.gettempdir()) / "xrt-bench-models"))


def path(name: str) -> pathlib.Path:
    """The file of a model, exported now if it is not there."""
    found = folder() / f"{name}.onnx"
    if not found.exists():
        export(name)
    return found


def inputs_for(name: str) -> dict[str, np.ndarray]:
    """Batch 1, in the model's order."""
    rng = np.random.default_rng(0)
    if name == "bert":
        ids = rng.integers(1000, 30000, (1, 128))
        return {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    if name == "gpt2":
        return {"input_ids": rng.integers(0, 50000, (1, 64))}
    return {"pixel_values": rng.standard_normal((1, 3, 224, 224), dtype=np.float32)}


def torch_module(name: str) -> Any:
    """The PyTorch module of a model, with random weights (seed 0): positional tensors in the model's order, one out."""
    import torch
    import transformers

    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    t: Any = transformers
    models = {
        "mobilenetv2": lambda: t.MobileNetV2ForImageClassification(t.MobileNetV2Config(image_size=224)),
        "resnet50": lambda: t.ResNetForImageClassification(t.ResNetConfig()),
        "bert": lambda: t.BertModel(t.BertConfig(), add_pooling_layer=False),
        "gpt2": lambda: t.GPT2LMHeadModel(t.GPT2Config(use_cache=False)),
        "vit": lambda: t.ViTForImageClassification(t.ViTConfig()),
    }
    model = models[name]().eval()
    inputs = inputs_for(name)

    class Wrapped(torch.nn.Module):
        """Takes positional tensors, returns one."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *args: Any) -> Any:
            out = self.model(**dict(zip(inputs, args, strict=True)), return_dict=True)
            return out.logits if hasattr(out, "logits") else out.last_hidden_state

    return Wrapped()


def export(name: str) -> None:
    """Export one model, static shapes, opset 18."""
    import torch

    module, inputs = torch_module(name), inputs_for(name)
    folder().mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        torch.onnx.export(
            module,
            tuple(torch.from_numpy(x) for x in inputs.values()),
            str(folder() / f"{name}.onnx"),
            input_names=list(inputs),
            opset_version=18,
            dynamo=True,
            external_data=True,
        )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        os.environ["XRT_BENCH_MODELS"] = sys.argv[1]
    for each in NAMES:
        print(each, path(each))

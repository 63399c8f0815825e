"""Architectures of transformers, small and with random weights, exported with sizes that vary, through buckets.

    python benchmarks/padded_architectures.py FOLDER [NAME ...] [--exporter dynamo|script] [--engine xla] [--calls 8]
    python benchmarks/padded_architectures.py FOLDER --passes 4 --exporter script [--engine onnxruntime-itself]
    python benchmarks/padded_architectures.py FOLDER --passes 4 --model FILE [--engine onnxruntime]

Each is exported by both of torch's ONNX exporters to FOLDER, where it is not there yet, and called with as many
random sizes. A line of a table each: compilations, the padded calls, the largest difference to ONNX Runtime, relative
to the largest number of the result, and why calls are not padded. With `--passes` a BERT of six layers of 384
instead: the seconds that 60 requests of 1 to 8 sentences of 3 to 256 tokens take, so many times, in this process;
`onnxruntime-itself` is one session. `--model`: another file with its inputs, as that model rewritten by a tool. Needs
torch, transformers, onnxscript, onnxruntime.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import pathlib
import resource
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnxruntime as ort

import xrt_core as xrt

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
TEXT = {**SMALL, "vocab_size": 99, "max_position_embeddings": 128}
GROUPED = {**TEXT, "num_key_value_heads": 2, "use_cache": False}
STAGES = {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]}
SPEECH = {
    **SMALL,
    "conv_dim": [8, 8, 8],
    "conv_kernel": [10, 3, 3],
    "conv_stride": [5, 2, 2],
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "num_feat_extract_layers": 3,
}


@dataclass(frozen=True)
class Architecture:
    """A model of transformers. side: of images, whose sizes are fixed where `is_fixed`; 0: of text or sound. batch,
    tokens: at most."""

    model: str
    config: dict[str, Any]
    side: int = 0
    is_fixed: bool = False
    is_sound: bool = False
    batch: int = 5
    tokens: int = 60

    @property
    def inputs(self) -> dict[str, dict[int, str]]:
        """Its inputs, with the axes that vary."""
        if self.is_sound:
            return {"input_values": {0: "batch", 1: "time"}}
        if self.side:
            return {"pixel_values": {0: "batch"} if self.is_fixed else {0: "batch", 2: "height", 3: "width"}}
        return {name: {0: "batch", 1: "length"} for name in ("input_ids", "attention_mask")}

    def arguments(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Random ones of random sizes."""
        batch = int(rng.integers(1, self.batch + 1))
        if self.is_sound:
            return {"input_values": rng.standard_normal((batch, int(rng.integers(400, 2000)))).astype(np.float32)}
        if self.side:
            sides = (self.side, self.side) if self.is_fixed else (32 * rng.integers(1, 5, 2)).tolist()
            return {"pixel_values": rng.standard_normal((batch, 3, *sides)).astype(np.float32)}
        length = int(rng.integers(3, self.tokens + 1))
        mask = np.arange(length)[None] < rng.integers(1, length + 1, (batch, 1))
        ids = rng.integers(3, self.config["vocab_size"], (batch, length))
        return {"input_ids": ids, "attention_mask": mask.astype(np.int64)}


ARCHITECTURES = {
    "bert": Architecture("Bert", TEXT),
    "roberta": Architecture("Roberta", TEXT),
    "distilbert": Architecture("DistilBert", {
        "vocab_size": 99, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}),
    "albert": Architecture("Albert", {**TEXT, "embedding_size": 16}),
    "electra": Architecture("Electra", {**TEXT, "embedding_size": 16}),
    "deberta": Architecture("DebertaV2", {
        **TEXT, "relative_attention": True, "position_buckets": 16, "pos_att_type": ["p2c", "c2p"]}),
    "mpnet": Architecture("MPNet", TEXT),
    "xlm_roberta": Architecture("XLMRoberta", TEXT),
    "modernbert": Architecture("ModernBert", {
        **TEXT, "local_attention": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1,
        "sep_token_id": 2}),
    "gpt2": Architecture("GPT2", {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "use_cache": False}),
    "llama": Architecture("Llama", GROUPED),
    "qwen2": Architecture("Qwen2", GROUPED),
    "mistral": Architecture("Mistral", {**GROUPED, "sliding_window": 8}),
    "gpt_neox": Architecture("GPTNeoX", {**TEXT, "use_cache": False}),
    "opt": Architecture("OPT", {
        **TEXT, "ffn_dim": 64, "word_embed_proj_dim": 32, "use_cache": False}),
    "bloom": Architecture("Bloom", {
        "vocab_size": 99, "hidden_size": 32, "n_layer": 2, "n_head": 4, "use_cache": False}),
    "t5_encoder": Architecture("T5Encoder", {
        "vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}),
    "vit": Architecture("ViT", {**SMALL, "image_size": 32, "patch_size": 8}, 32, is_fixed=True),
    "clip": Architecture("CLIPVision", {**SMALL, "image_size": 32, "patch_size": 8}, 32, is_fixed=True),
    "dinov2": Architecture("Dinov2", {**SMALL, "image_size": 28, "patch_size": 7}, 28, is_fixed=True),
    "swin": Architecture("Swin", {
        "image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
        32, is_fixed=True),
    "convnext": Architecture("ConvNext", STAGES, 64),
    "resnet": Architecture("ResNet", {**STAGES, "embedding_size": 8}, 64),
    "regnet": Architecture("RegNet", {**STAGES, "embedding_size": 8, "groups_width": 8}, 64),
    "poolformer": Architecture("PoolFormer", STAGES, 64),
    "segformer": Architecture("Segformer", {**STAGES, "num_attention_heads": [1, 2, 2, 4]}, 64),
    "wav2vec2": Architecture("Wav2Vec2", SPEECH, is_sound=True),
    "hubert": Architecture("Hubert", SPEECH, is_sound=True),
}  # fmt: skip


TIMED = Architecture("Bert", {
    **TEXT, "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536,
    "vocab_size": 30522, "max_position_embeddings": 512}, batch=8, tokens=256)  # fmt: skip
ITSELF = "onnxruntime-itself"


def exported(name: str, exporter: str, folder: pathlib.Path) -> pathlib.Path:
    """The file of an architecture, made where it is not there. Raises what the exporter raises."""
    file = folder / f"{name}.{exporter}.onnx"
    if file.exists():
        return file
    import torch
    import transformers

    class First(torch.nn.Module):
        """The first result, by arguments in order."""

        def __init__(self, model: Any, names: list[str]) -> None:
            super().__init__()
            self.model, self.names = model, names

        def forward(self, *arrays: torch.Tensor) -> Any:
            return self.model(**dict(zip(self.names, arrays, strict=True)))[0]

    kind, t = ARCHITECTURES.get(name, TIMED), transformers
    torch.manual_seed(0)
    stem = kind.model.removesuffix("Encoder")
    model = getattr(t, f"{kind.model}Model")(getattr(t, f"{stem}Config")(**kind.config)).eval()
    axes = kind.inputs
    rng = np.random.default_rng(0)
    arguments = next(a for a in (kind.arguments(rng) for _ in range(100)) if min(x.shape[0] for x in a.values()) > 1)
    tensors = tuple(map(torch.from_numpy, arguments.values()))
    common: dict[str, Any] = {"input_names": list(axes), "output_names": ["y"]}
    if exporter == "dynamo":
        vary = tuple(dict.fromkeys(a, torch.export.Dim.DYNAMIC) for a in axes.values())
        common |= {"dynamo": True, "dynamic_shapes": (vary,), "external_data": False, "verbose": False}
    else:
        common |= {"dynamo": False, "dynamic_axes": axes, "opset_version": 17}
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        torch.onnx.export(First(model, list(axes)), tensors, str(file), **common)
    return file


def lines(options: argparse.Namespace) -> Iterator[str]:
    """Those of the table."""
    for name in options.names or ARCHITECTURES:
        for exporter in options.exporter or ("script", "dynamo"):
            try:
                file = exported(name, exporter, options.folder)
            except Exception as e:  # whatever the exporter raises
                yield f"| {name} | {exporter} | not exported: {type(e).__name__} | | | |"
                continue
            yield f"| {name} | {exporter} | {tried(name, file, options)} |"


def tried(name: str, file: pathlib.Path, options: argparse.Namespace) -> str:
    """What is to be told of a model: compilations, padded calls, difference, reasons."""
    settings = ort.SessionOptions()
    settings.log_severity_level = 4
    session = ort.InferenceSession(str(file), settings)
    rng, off, padded = np.random.default_rng(options.seed), 0.0, 0
    reasons: dict[str, None] = {}
    with xrt.XRTModule(file, engine=options.engine, buckets="auto", guard=False, cache="off") as module:
        for call in range(options.calls):
            arguments = ARCHITECTURES[name].arguments(rng)
            arguments = {i.name: arguments[i.name] for i in session.get_inputs()}
            want = session.run(None, arguments)[0]
            got = np.asarray(module(**arguments))
            assert got.shape == want.shape
            off = max(off, float(np.abs(got - want).max() / max(np.abs(want).max(), 1e-6)))
            text = str(module.explain().padding).partition("\n")[0]
            padded += text.startswith("padded")
            if call and text.startswith("not padded"):
                reasons[text.removeprefix("not padded: ")] = None
        count = sum(e.name == "compile" for e in module.events)
    return f"{count} | {padded} of {options.calls - 1} | {off:.1e} | {'; '.join(reasons)}"


def timed(file: pathlib.Path, options: argparse.Namespace) -> str:
    """The seconds of each pass, compilations and the process's memory at most."""
    rng = np.random.default_rng(options.seed)
    requests = [TIMED.arguments(rng) for _ in range(60)]
    module: xrt.XRTModule | None = None
    if options.engine == ITSELF:
        session = ort.InferenceSession(str(file))
        call: Callable[[dict[str, np.ndarray]], Any] = partial(session.run, None)
    else:
        padding: Any = {"buckets": "auto"} if options.engine == "xla" else {}
        module = xrt.XRTModule(file, engine=options.engine, guard=False, cache="off", **padding)
        call = module.run
    passes = []
    for _ in range(options.passes):
        start = time.perf_counter()
        for given in requests:
            call(given)
        passes.append(f"{time.perf_counter() - start:.2f}")
    count = 0 if module is None else sum(e.name == "compile" for e in module.events)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return f"{options.engine}: {', '.join(passes)} s; {count} compilations, {peak} MB at most"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("names", nargs="*", choices=[*ARCHITECTURES, []])
    parser.add_argument("--exporter", choices=("script", "dynamo"), action="append")
    parser.add_argument("--engine", default="xla")
    parser.add_argument("--calls", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--passes", type=int, default=0)
    parser.add_argument("--model", type=pathlib.Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    if options.passes:
        exporters = options.exporter or ("script",)
        for file in [options.model] if options.model else [exported("bert_6", e, options.folder) for e in exporters]:
            print(timed(file, options))
        return
    print("| architecture | exporter | compilations | padded calls | off | why not |")
    print("|---|---|---|---|---|---|")
    for line in lines(options):
        print(line, flush=True)


if __name__ == "__main__":
    main()

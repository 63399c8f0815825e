"""Models of libraries that are built on PyTorch, small and with random weights, through `torch.compile`.

    python benchmarks/torch_libraries.py [NAME ...] [--engine host]    # lines of the table of `torch_architectures.py`

A model whose library is not installed is left out, with a line that says so. Of the gradients of networks that end in
normalised batches of two numbers only their error to float64 tells something: eager's is as large as XRT's.
"""

import argparse
import importlib
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn, randn
from torch_architectures import Model, trial

MODELS: dict[str, Callable[[], Model]] = {}
BLOCKS: dict[str, Any] = {"norm_num_groups": 8, "layers_per_block": 1, "block_out_channels": (32, 64)}
UNET: dict[str, Any] = {
    **BLOCKS,
    "in_channels": 4,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "cross_attention_dim": 32,
    "attention_head_dim": 8,
}
LATENTS: dict[str, Any] = {
    **BLOCKS,
    "latent_channels": 4,
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
}
VIT: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 8,
    "num_classes": 5,
    "dim": 32,
    "depth": 2,
    "heads": 4,
    "mlp_dim": 64,
}


class Called(nn.Module):
    """A function of a module and of inputs."""

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.function = module, function

    def forward(self, **inputs: Any) -> Any:
        return self.function(self.module, **inputs)


def ids(size: int, *shape: int) -> torch.Tensor:
    """Random indices below `size`."""
    return torch.randint(0, size, shape)


def add(name: str, path: str, inputs: Callable[[], dict[str, Any]], **options: Any) -> None:
    """A model that is a class of a library. path: of the class."""
    module, _, kind = path.rpartition(".")
    MODELS[name] = lambda: (getattr(importlib.import_module(module), kind)(**options), inputs())


def made(name: str) -> Callable[[Callable[[], Model]], None]:
    """A model that a function makes."""
    return lambda make: MODELS.__setitem__(name, make)


add(
    "diffusers UNet2DCondition", "diffusers.UNet2DConditionModel",
    lambda: {"sample": randn(2, 4, 16, 16), "timestep": torch.tensor([7, 9]), "encoder_hidden_states": randn(2, 5, 32)},
    sample_size=16, out_channels=4, up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), **UNET,
)  # fmt: skip
add("diffusers AutoencoderKL", "diffusers.AutoencoderKL", lambda: {"sample": randn(2, 3, 32, 32)}, **LATENTS)
add("diffusers VQModel", "diffusers.VQModel", lambda: {"sample": randn(2, 3, 32, 32)}, num_vq_embeddings=32, **LATENTS)
add(
    "diffusers DiT", "diffusers.DiTTransformer2DModel",
    lambda: {"hidden_states": randn(2, 4, 16, 16), "timestep": torch.tensor([3, 5]), "class_labels": ids(10, 2)},
    num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=8, num_layers=2, sample_size=16,
    num_embeds_ada_norm=10, norm_num_groups=4,
)  # fmt: skip
add(
    "diffusers SD3", "diffusers.SD3Transformer2DModel",
    lambda: {
        "hidden_states": randn(2, 4, 16, 16), "encoder_hidden_states": randn(2, 7, 32),
        "pooled_projections": randn(2, 16), "timestep": torch.tensor([3.0, 5.0]),
    },
    sample_size=16, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4, joint_attention_dim=32,
    caption_projection_dim=32, pooled_projection_dim=16, out_channels=4, pos_embed_max_size=16,
)  # fmt: skip
add(
    "diffusers Flux", "diffusers.FluxTransformer2DModel",
    lambda: {
        "hidden_states": randn(1, 16, 4), "encoder_hidden_states": randn(1, 6, 32), "pooled_projections": randn(1, 32),
        "timestep": torch.tensor([0.5]), "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(6, 3),
    },
    patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
    joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
)  # fmt: skip
for kind in ("GCN", "GraphSAGE", "GIN", "GAT", "EdgeCNN"):
    add(
        f"torch_geometric {kind}", f"torch_geometric.nn.{kind}",
        lambda: {"x": randn(20, 8), "edge_index": ids(20, 2, 60)},
        in_channels=8, hidden_channels=16, num_layers=2, out_channels=4,
    )  # fmt: skip
add(
    "MONAI UNet, 3 dimensions", "monai.networks.nets.UNet", lambda: {"x": randn(1, 1, 16, 16, 16)},
    spatial_dims=3, in_channels=1, out_channels=2, channels=(4, 8, 16), strides=(2, 2), num_res_units=1,
)  # fmt: skip
add(
    "MONAI SwinUNETR", "monai.networks.nets.SwinUNETR", lambda: {"x_in": randn(1, 1, 64, 64)},
    in_channels=1, out_channels=2, feature_size=12, spatial_dims=2,
)  # fmt: skip
add(
    "MONAI UNETR", "monai.networks.nets.UNETR", lambda: {"x_in": randn(1, 1, 32, 32, 32)},
    in_channels=1, out_channels=2, img_size=(32, 32, 32), feature_size=8, hidden_size=32, mlp_dim=64, num_heads=4,
)  # fmt: skip
for kind in ("Unet", "FPN", "PSPNet", "Linknet", "Segformer"):
    add(
        f"segmentation_models_pytorch {kind}", f"segmentation_models_pytorch.{kind}",
        lambda: {"x": randn(2, 3, 64, 64)}, encoder_name="resnet18", encoder_weights=None, classes=3,
    )  # fmt: skip
add(
    "SpeechBrain ECAPA-TDNN", "speechbrain.lobes.models.ECAPA_TDNN.ECAPA_TDNN", lambda: {"x": randn(2, 50, 40)},
    input_size=40, channels=[32] * 5, lin_neurons=16, attention_channels=16,
)  # fmt: skip
add(
    "torchaudio Conformer", "torchaudio.models.Conformer",
    lambda: {"input": randn(2, 20, 16), "lengths": torch.tensor([20, 14])},
    input_dim=16, num_heads=4, ffn_dim=32, num_layers=2, depthwise_conv_kernel_size=7,
)  # fmt: skip
for module, kind in (("vit", "ViT"), ("simple_vit", "SimpleViT"), ("deepvit", "DeepViT"), ("parallel_vit", "ViT")):
    add(f"vit_pytorch {module}", f"vit_pytorch.{module}.{kind}", lambda: {"img": randn(2, 3, 32, 32)}, **VIT)


def _adapted(config: str, **options: Any) -> Model:
    """A Llama with an adapter of PEFT."""
    peft, transformers = importlib.import_module("peft"), importlib.import_module("transformers")
    llama = transformers.LlamaConfig(
        vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    given = ids(99, 2, 9)
    model = peft.get_peft_model(transformers.LlamaForCausalLM(llama), getattr(peft, config)(**options))
    return model, {"input_ids": given, "labels": given}


MODELS["PEFT LoRA"] = lambda: _adapted("LoraConfig", r=4, target_modules=["q_proj", "v_proj"])
MODELS["PEFT DoRA"] = lambda: _adapted("LoraConfig", r=4, target_modules=["q_proj", "v_proj"], use_dora=True)
MODELS["PEFT IA3"] = lambda: _adapted(
    "IA3Config", target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
)


@made("e3nn tensor product")
def _e3nn() -> Model:
    o3 = importlib.import_module("e3nn.o3")
    product = o3.FullyConnectedTensorProduct("8x0e+4x1o", "1x0e+1x1o", "8x0e+4x1o")
    model = Called(product, lambda m, x, v: m(x, o3.spherical_harmonics([0, 1], v, True)))
    return model, {"x": randn(5, 20), "v": randn(5, 3)}


@made("torchdiffeq, adaptive steps")
def _solved() -> Model:
    solve = importlib.import_module("torchdiffeq").odeint
    field = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))
    return Called(field, lambda m, y: solve(lambda t, z: m(z), y, torch.linspace(0, 1, 3))), {"y": randn(3, 4)}


@made("GPyTorch kernels")
def _kernels() -> Model:
    kernels = importlib.import_module("gpytorch.kernels")
    kernel = kernels.ScaleKernel(kernels.MaternKernel(2.5) + kernels.PeriodicKernel())
    return Called(kernel, lambda m, x: m(x).to_dense()), {"x": torch.rand(20, 2)}


def main() -> None:
    """Print a line for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of their names; none: all")
    parser.add_argument("--engine", help="by default all that are installed take part")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    for name, make in MODELS.items():
        if given.names and not any(n.lower() in name.lower() for n in given.names):
            continue
        try:
            torch.manual_seed(0)
            make()
        except ImportError as e:
            print(f"{name}: left out: {e}", flush=True)
            continue
        print(trial(name, make, given.engine), flush=True)


if __name__ == "__main__":
    main()

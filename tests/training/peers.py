"""Models, each written by hand in XRT, JAX and PyTorch over the same parameters, and their training loops.

JAX's and PyTorch's are what their users write: a jitted step that donates its state, `torch.optim.Adam`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

import xrt_core as xrt
from xrt_core.frontends import ops

F = np.float32
Parameters = dict[str, np.ndarray]
Batch = dict[str, np.ndarray]
BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-6  # BERT's own epsilon


@dataclass(frozen=True)
class Model:
    """One network in three libraries.

    parameters: name -> array. batches: makes batch number k. xrt: the graph over parameters. jax, torch: the loss as a
    function of parameters and a batch. rate: Adam's.
    """

    name: str
    parameters: Parameters
    batch: Callable[[int], Batch]
    xrt: Callable[[Parameters], xrt.Graph]
    jax: Callable[[Mapping[str, Any], Mapping[str, Any]], Any]
    torch: Callable[[Mapping[str, Any], Mapping[str, Any]], Any]
    rate: float = 5e-4


class _Net(xrt.Graph):
    """A graph over a dict of parameters, whose loss is the mean cross-entropy."""

    def __init__(self, parameters: Parameters) -> None:
        self.p = {k: xrt.Variable(a) for k, a in parameters.items()}

    def scores(self, x: Any) -> Any:
        raise NotImplementedError

    def build(self, x: Any, labels: Any) -> Any:
        return ops.SoftmaxCrossEntropyLoss(self.scores(x), labels, reduction="mean", outputs=1)


def _weights(rng: np.random.Generator, *shape: int, scale: float | None = None) -> np.ndarray:
    fan = math.prod(shape[1:]) if len(shape) == 4 else shape[0]
    return (rng.standard_normal(shape) * (fan**-0.5 if scale is None else scale)).astype(F)


# --- a multi-layer perceptron -----------------------------------------------------------------------------------------


class _MLP(_Net):
    def scores(self, x: Any) -> Any:
        p = self.p
        h = ops.Tanh(x @ p["w1"] + p["b1"])
        h = ops.Relu(h @ p["w2"] + p["b2"])
        return h @ p["w3"] + p["b3"]


def _jax_cross_entropy(scores: Any, labels: Any) -> Any:
    import jax
    import jax.numpy as jnp

    logs = jax.nn.log_softmax(scores, axis=-1)
    return -jnp.take_along_axis(logs, labels[..., None], axis=-1).mean()


def _mlp_jax(p: Mapping[str, Any], batch: Mapping[str, Any]) -> Any:
    import jax.numpy as jnp

    h = jnp.tanh(batch["x"] @ p["w1"] + p["b1"])
    h = jnp.maximum(h @ p["w2"] + p["b2"], 0)
    return _jax_cross_entropy(h @ p["w3"] + p["b3"], batch["labels"])


def _mlp_torch(p: Mapping[str, Any], batch: Mapping[str, Any]) -> Any:
    import torch
    from torch.nn import functional

    h = torch.tanh(batch["x"] @ p["w1"] + p["b1"])
    h = torch.relu(h @ p["w2"] + p["b2"])
    return functional.cross_entropy(h @ p["w3"] + p["b3"], batch["labels"])


def mlp() -> Model:
    """Three layers on points whose class is a quadrant."""
    rng = np.random.default_rng(0)
    sizes = (16, 64, 64, 4)
    parameters: Parameters = {}
    for k in range(3):
        parameters[f"w{k + 1}"] = _weights(rng, sizes[k], sizes[k + 1])
        parameters[f"b{k + 1}"] = np.zeros(sizes[k + 1], F)

    def batch(k: int) -> Batch:
        x = np.random.default_rng(k).standard_normal((64, 16)).astype(F)
        return {"x": x, "labels": (x[:, 0] > 0) * 2 + (x[:, 1] > 0).astype(np.int64)}

    return Model("MLP", parameters, batch, _MLP, _mlp_jax, _mlp_torch)


# --- a residual convolutional network ---------------------------------------------------------------------------------


class _CNN(_Net):
    """Convolutions with batch statistics, two to a block, around which the input goes."""

    def __init__(self, parameters: Parameters, strides: tuple[int, ...]) -> None:
        super().__init__(parameters)
        self.strides = strides

    def norm(self, x: Any, name: str) -> Any:
        p = self.p
        scale, bias = p[f"{name}.scale"], p[f"{name}.bias"]
        count = scale.shape[0]
        mean, variance = np.zeros(count, F), np.ones(count, F)
        return ops.BatchNormalization(x, scale, bias, mean, variance, training_mode=1, outputs=3)[0]

    def scores(self, x: Any) -> Any:
        p = self.p
        x = ops.Relu(self.norm(ops.Conv(x, p["stem.w"], pads=[1, 1, 1, 1]), "stem"))
        for k, s in enumerate(self.strides):
            h = ops.Conv(x, p[f"{k}.w1"], pads=[1, 1, 1, 1], strides=[s, s])
            h = ops.Relu(self.norm(h, f"{k}.n1"))
            h = self.norm(ops.Conv(h, p[f"{k}.w2"], pads=[1, 1, 1, 1]), f"{k}.n2")
            if f"{k}.w3" in p:
                x = self.norm(ops.Conv(x, p[f"{k}.w3"], strides=[s, s]), f"{k}.n3")
            x = ops.Relu(h + x)
        return ops.Flatten(ops.GlobalAveragePool(x)) @ p["fc.w"] + p["fc.b"]


def _cnn_jax(strides: tuple[int, ...], p: Mapping[str, Any], batch: Mapping[str, Any]) -> Any:
    import jax
    import jax.numpy as jnp

    def conv(x: Any, w: Any, stride: int = 1) -> Any:
        pad = w.shape[2] // 2
        return jax.lax.conv_general_dilated(
            x, w, (stride, stride), [(pad, pad)] * 2, dimension_numbers=("NCHW", "OIHW", "NCHW")
        )

    def norm(x: Any, name: str) -> Any:
        mean = x.mean((0, 2, 3), keepdims=True)
        variance = ((x - mean) ** 2).mean((0, 2, 3), keepdims=True)
        y = (x - mean) * jax.lax.rsqrt(variance + 1e-5)
        return y * p[f"{name}.scale"][:, None, None] + p[f"{name}.bias"][:, None, None]

    x = jax.nn.relu(norm(conv(batch["x"], p["stem.w"]), "stem"))
    for k, s in enumerate(strides):
        h = jax.nn.relu(norm(conv(x, p[f"{k}.w1"], s), f"{k}.n1"))
        h = norm(conv(h, p[f"{k}.w2"]), f"{k}.n2")
        if f"{k}.w3" in p:
            x = norm(conv(x, p[f"{k}.w3"], s), f"{k}.n3")
        x = jax.nn.relu(h + x)
    return _jax_cross_entropy(jnp.mean(x, (2, 3)) @ p["fc.w"] + p["fc.b"], batch["labels"])


def _cnn_torch(strides: tuple[int, ...], p: Mapping[str, Any], batch: Mapping[str, Any]) -> Any:
    import torch
    from torch.nn import functional as f

    def conv(x: Any, w: Any, stride: int = 1) -> Any:
        return f.conv2d(x, w, stride=stride, padding=w.shape[2] // 2)

    def norm(x: Any, name: str) -> Any:
        return f.batch_norm(x, None, None, p[f"{name}.scale"], p[f"{name}.bias"], training=True, eps=1e-5)

    x = torch.relu(norm(conv(batch["x"], p["stem.w"]), "stem"))
    for k, s in enumerate(strides):
        h = torch.relu(norm(conv(x, p[f"{k}.w1"], s), f"{k}.n1"))
        h = norm(conv(h, p[f"{k}.w2"]), f"{k}.n2")
        if f"{k}.w3" in p:
            x = norm(conv(x, p[f"{k}.w3"], s), f"{k}.n3")
        x = torch.relu(h + x)
    return f.cross_entropy(x.mean((2, 3)) @ p["fc.w"] + p["fc.b"], batch["labels"])


def cnn(
    widths: tuple[int, ...] = (8, 16), strides: tuple[int, ...] = (1, 2), size: int = 12, count: int = 16,
    stem: int = 8, classes: int = 4,
) -> Model:  # fmt: skip
    """A residual network on images whose class is where they are bright."""
    rng = np.random.default_rng(1)
    p: Parameters = {"stem.w": _weights(rng, stem, 3, 3, 3)}
    norms = {"stem": stem}
    have = stem
    for k, (width, s) in enumerate(zip(widths, strides, strict=True)):
        p[f"{k}.w1"], p[f"{k}.w2"] = _weights(rng, width, have, 3, 3), _weights(rng, width, width, 3, 3)
        norms[f"{k}.n1"] = norms[f"{k}.n2"] = width
        if s != 1 or width != have:
            p[f"{k}.w3"] = _weights(rng, width, have, 1, 1)
            norms[f"{k}.n3"] = width
        have = width
    for name, width in norms.items():
        p[f"{name}.scale"], p[f"{name}.bias"] = np.ones(width, F), np.zeros(width, F)
    p["fc.w"], p["fc.b"] = _weights(rng, have, classes), np.zeros(classes, F)

    def batch(k: int) -> Batch:
        own = np.random.default_rng(k)
        labels = own.integers(0, classes, count)
        x = own.standard_normal((count, 3, size, size)).astype(F)
        half = size // 2
        for i, c in enumerate(labels % 4):
            x[i, :, (c // 2) * half : (c // 2 + 1) * half, (c % 2) * half : (c % 2 + 1) * half] += 1
        return {"x": x, "labels": labels}

    return Model(
        "CNN", p, batch, lambda q: _CNN(q, strides), lambda q, b: _cnn_jax(strides, q, b),
        lambda q, b: _cnn_torch(strides, q, b), 2e-4,
    )  # fmt: skip


def resnet18(size: int = 64, count: int = 8) -> Model:
    """Eight residual blocks of 64 to 512 channels, as in ResNet-18, with a 3x3 stem."""
    widths, strides = (64, 64, 128, 128, 256, 256, 512, 512), (1, 1, 2, 1, 2, 1, 2, 1)
    return cnn(widths, strides, size, count, stem=64, classes=100)


# --- inverted residuals with depthwise convolutions -------------------------------------------------------------------


class _Mobile(_CNN):
    """Blocks of MobileNetV2: wider by a 1x1 convolution, a depthwise one, narrower by another 1x1 one."""

    def scores(self, x: Any) -> Any:
        p = self.p

        def six(x: Any) -> Any:
            return ops.Clip(x, np.asarray(0, F), np.asarray(6, F))

        x = six(self.norm(ops.Conv(x, p["stem.w"], pads=[1, 1, 1, 1], strides=[2, 2]), "stem"))
        for k, s in enumerate(self.strides):
            h = six(self.norm(ops.Conv(x, p[f"{k}.w1"]), f"{k}.n1"))
            wide = p[f"{k}.w2"].shape[0]
            h = six(self.norm(ops.Conv(h, p[f"{k}.w2"], pads=[1, 1, 1, 1], strides=[s, s], group=wide), f"{k}.n2"))
            h = self.norm(ops.Conv(h, p[f"{k}.w3"]), f"{k}.n3")
            x = x + h if s == 1 and x.shape[1] == h.shape[1] else h
        return ops.Flatten(ops.GlobalAveragePool(x)) @ p["fc.w"] + p["fc.b"]


def _mobile_jax(strides: tuple[int, ...], p: Mapping[str, Any], batch: Mapping[str, Any]) -> Any:
    import jax
    import jax.numpy as jnp

    def conv(x: Any, w: Any, stride: int = 1) -> Any:
        pad = w.shape[2] // 2
        return jax.lax.conv_general_dilated(
            x, w, (stride, stride), [(pad, pad)] * 2, dimension_numbers=("NCHW", "OIHW", "NCHW"),
            feature_group_count=x.shape[1] // w.shape[1],
        )  # fmt: skip

    def norm(x: Any, name: str) -> Any:
        mean = x.mean((0, 2, 3), keepdims=True)
        variance = ((x - mean) ** 2).mean((0, 2, 3), keepdims=True)
        y = (x - mean) * jax.lax.rsqrt(variance + 1e-5)
        return y * p[f"{name}.scale"][:, None, None] + p[f"{name}.bias"][:, None, None]

    x = jnp.clip(norm(conv(batch["x"], p["stem.w"], 2), "stem"), 0, 6)
    for k, s in enumerate(strides):
        h = jnp.clip(norm(conv(x, p[f"{k}.w1"]), f"{k}.n1"), 0, 6)
        h = jnp.clip(norm(conv(h, p[f"{k}.w2"], s), f"{k}.n2"), 0, 6)
        h = norm(conv(h, p[f"{k}.w3"]), f"{k}.n3")
        x = x + h if s == 1 and x.shape[1] == h.shape[1] else h
    return _jax_cross_entropy(jnp.mean(x, (2, 3)) @ p["fc.w"] + p["fc.b"], batch["labels"])


def _mobile_torch(strides: tuple[int, ...], p: Mapping[str, Any], batch: Mapping[str, Any]) -> Any:
    from torch.nn import functional as f

    def conv(x: Any, w: Any, stride: int = 1) -> Any:
        return f.conv2d(x, w, stride=stride, padding=w.shape[2] // 2, groups=x.shape[1] // w.shape[1])

    def norm(x: Any, name: str) -> Any:
        return f.batch_norm(x, None, None, p[f"{name}.scale"], p[f"{name}.bias"], training=True, eps=1e-5)

    x = f.relu6(norm(conv(batch["x"], p["stem.w"], 2), "stem"))
    for k, s in enumerate(strides):
        h = f.relu6(norm(conv(x, p[f"{k}.w1"]), f"{k}.n1"))
        h = f.relu6(norm(conv(h, p[f"{k}.w2"], s), f"{k}.n2"))
        h = norm(conv(h, p[f"{k}.w3"]), f"{k}.n3")
        x = x + h if s == 1 and x.shape[1] == h.shape[1] else h
    return f.cross_entropy(x.mean((2, 3)) @ p["fc.w"] + p["fc.b"], batch["labels"])


def mobilenet(
    blocks: tuple[tuple[int, int, int], ...] = ((2, 8, 1), (4, 16, 2), (4, 16, 1)), size: int = 12, count: int = 16,
    stem: int = 8, classes: int = 4,
) -> Model:  # fmt: skip
    """Inverted residual blocks, each (how much wider inside, channels, stride), on the images of `cnn`."""
    like = cnn((), (), size, count, stem, classes)
    rng, p, norms, have = np.random.default_rng(3), {"stem.w": like.parameters["stem.w"]}, {"stem": stem}, stem
    for k, (factor, width, _) in enumerate(blocks):
        wide = factor * have
        p[f"{k}.w1"], p[f"{k}.w2"] = _weights(rng, wide, have, 1, 1), _weights(rng, wide, 1, 3, 3)
        p[f"{k}.w3"] = _weights(rng, width, wide, 1, 1)
        norms |= {f"{k}.n1": wide, f"{k}.n2": wide, f"{k}.n3": width}
        have = width
    for name, width in norms.items():
        p[f"{name}.scale"], p[f"{name}.bias"] = np.ones(width, F), np.zeros(width, F)
    p["fc.w"], p["fc.b"] = _weights(rng, have, classes), np.zeros(classes, F)
    strides = tuple(s for *_, s in blocks)
    return Model(
        "inverted residuals", p, like.batch, lambda q: _Mobile(q, strides), lambda q, b: _mobile_jax(strides, q, b),
        lambda q, b: _mobile_torch(strides, q, b), 2e-4,
    )  # fmt: skip


def mobilenet_v2(size: int = 128, count: int = 8) -> Model:
    """The blocks of MobileNetV2."""
    table = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    blocks = tuple((t, c, s if i == 0 else 1) for t, c, n, s in table for i in range(n))
    return mobilenet(blocks, size, count, stem=32, classes=100)


# --- BERT -------------------------------------------------------------------------------------------------------------


class _BERT(_Net):
    def __init__(self, parameters: Parameters, layers: int, heads: int, recompute: bool = False) -> None:
        super().__init__(parameters)
        self.layers, self.heads, self.recompute = layers, heads, recompute

    def norm(self, x: Any, name: str) -> Any:
        return ops.LayerNormalization(x, self.p[f"{name}.scale"], self.p[f"{name}.bias"], epsilon=1e-5, outputs=1)

    def layer(self, x: Any, k: int) -> Any:
        p = self.p
        n, t, width = x.shape
        parts = (n, t, self.heads, width // self.heads)
        q, key, v = ((x @ p[f"{k}.{c}.w"] + p[f"{k}.{c}.b"]).reshape(parts).transpose((0, 2, 1, 3)) for c in "qkv")
        scores = q @ key.transpose((0, 1, 3, 2)) * float(parts[3] ** -0.5)
        mixed = (ops.Softmax(scores, axis=-1) @ v).transpose((0, 2, 1, 3)).reshape((n, t, width))
        x = self.norm(x + (mixed @ p[f"{k}.o.w"] + p[f"{k}.o.b"]), f"{k}.n1")
        h = ops.Gelu(x @ p[f"{k}.f1.w"] + p[f"{k}.f1.b"])
        return self.norm(x + (h @ p[f"{k}.f2.w"] + p[f"{k}.f2.b"]), f"{k}.n2")

    def build(self, x: Any, labels: Any) -> Any:
        p = self.p
        h = self.norm(ops.Gather(p["tokens"], x) + p["positions"][: x.shape[1]], "n0")
        for k in range(self.layers):
            with xrt.training.recompute() if self.recompute else nullcontext():
                h = self.layer(h, k)
        scores = h @ p["head.w"] + p["head.b"]
        vocabulary = p["head.b"].shape[0]
        return ops.SoftmaxCrossEntropyLoss(
            scores.reshape((-1, vocabulary)), labels.reshape(-1), reduction="mean", outputs=1
        )


def _bert_jax(
    layers: int, heads: int, p: Mapping[str, Any], batch: Mapping[str, Any], recompute: bool = False
) -> Any:
    import jax
    import jax.numpy as jnp

    def norm(x: Any, name: str) -> Any:
        mean = x.mean(-1, keepdims=True)
        variance = ((x - mean) ** 2).mean(-1, keepdims=True)
        return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * p[f"{name}.scale"] + p[f"{name}.bias"]

    n, t = batch["x"].shape
    def layer(p: Any, x: Any, k: int) -> Any:
        width = x.shape[-1]
        q, key, v = ((x @ p[f"{k}.{c}.w"] + p[f"{k}.{c}.b"]).reshape(n, t, heads, -1) for c in "qkv")
        scores = jnp.einsum("nqhd,nkhd->nhqk", q, key) * (width // heads) ** -0.5
        mixed = jnp.einsum("nhqk,nkhd->nqhd", jax.nn.softmax(scores, axis=-1), v).reshape(n, t, width)
        x = norm(x + (mixed @ p[f"{k}.o.w"] + p[f"{k}.o.b"]), f"{k}.n1")
        h = jax.nn.gelu(x @ p[f"{k}.f1.w"] + p[f"{k}.f1.b"], approximate=False)
        return norm(x + (h @ p[f"{k}.f2.w"] + p[f"{k}.f2.b"]), f"{k}.n2")

    x = norm(p["tokens"][batch["x"]] + p["positions"][:t], "n0")
    for k in range(layers):
        x = (jax.checkpoint(layer, static_argnums=2) if recompute else layer)(p, x, k)
    return _jax_cross_entropy(x @ p["head.w"] + p["head.b"], batch["labels"])


def _bert_torch(layers: int, heads: int, p: Mapping[str, Any], batch: Mapping[str, Any]) -> Any:
    from torch.nn import functional as f

    n, t = batch["x"].shape

    def norm(x: Any, name: str) -> Any:
        return f.layer_norm(x, x.shape[-1:], p[f"{name}.scale"], p[f"{name}.bias"], 1e-5)

    x = norm(p["tokens"][batch["x"]] + p["positions"][:t], "n0")
    width = x.shape[-1]
    for k in range(layers):
        q, key, v = ((x @ p[f"{k}.{c}.w"] + p[f"{k}.{c}.b"]).view(n, t, heads, -1).transpose(1, 2) for c in "qkv")
        mixed = f.scaled_dot_product_attention(q, key, v).transpose(1, 2).reshape(n, t, width)
        x = norm(x + (mixed @ p[f"{k}.o.w"] + p[f"{k}.o.b"]), f"{k}.n1")
        h = f.gelu(x @ p[f"{k}.f1.w"] + p[f"{k}.f1.b"])
        x = norm(x + (h @ p[f"{k}.f2.w"] + p[f"{k}.f2.b"]), f"{k}.n2")
    scores = x @ p["head.w"] + p["head.b"]
    return f.cross_entropy(scores.view(-1, scores.shape[-1]), batch["labels"].view(-1))


def bert(
    layers: int = 2, width: int = 32, heads: int = 4, tokens: int = 16, count: int = 4, vocabulary: int = 64,
    recompute: bool = False,
) -> Model:  # fmt: skip
    """A BERT encoder that tells each token from itself and its neighbour; the classes are the vocabulary. recompute:
    each layer is computed again in the backward pass, by XRT and JAX."""
    rng = np.random.default_rng(2)
    p: Parameters = {
        "tokens": _weights(rng, vocabulary, width, scale=0.5), "positions": _weights(rng, tokens, width, scale=0.1),
    }  # fmt: skip
    norms = ["n0"]
    for k in range(layers):
        for c in "qkvo":
            p[f"{k}.{c}.w"], p[f"{k}.{c}.b"] = _weights(rng, width, width), np.zeros(width, F)
        p[f"{k}.f1.w"], p[f"{k}.f1.b"] = _weights(rng, width, 4 * width), np.zeros(4 * width, F)
        p[f"{k}.f2.w"], p[f"{k}.f2.b"] = _weights(rng, 4 * width, width), np.zeros(width, F)
        norms += [f"{k}.n1", f"{k}.n2"]
    for name in norms:
        p[f"{name}.scale"], p[f"{name}.bias"] = np.ones(width, F), np.zeros(width, F)
    p["head.w"], p["head.b"] = _weights(rng, width, vocabulary), np.zeros(vocabulary, F)

    def batch(k: int) -> Batch:
        x = np.random.default_rng(k).integers(0, vocabulary, (count, tokens))
        return {"x": x, "labels": (x + np.roll(x, 1, axis=1)) % vocabulary}

    return Model(
        f"BERT, {layers} layers", p, batch, lambda q: _BERT(q, layers, heads, recompute),
        lambda q, b: _bert_jax(layers, heads, q, b, recompute), lambda q, b: _bert_torch(layers, heads, q, b),
    )  # fmt: skip


# --- a recurrent network ----------------------------------------------------------------------------------------------

_GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


class _Recurrent(_Net):
    def __init__(self, parameters: Parameters, op: str) -> None:
        super().__init__(parameters)
        self.op = op

    def scores(self, x: Any) -> Any:
        p = self.p
        more: dict[str, Any] = {"linear_before_reset": 1} if self.op == "GRU" else {}
        bias = ops.Concat(p["wb"], p["rb"], axis=0).unsqueeze(0)
        _, last, *_ = getattr(ops, self.op)(
            x.transpose((1, 0, 2)), p["w"].T.unsqueeze(0), p["r"].T.unsqueeze(0), bias,
            hidden_size=p["r"].shape[0], outputs=3 if self.op == "LSTM" else 2, **more,
        )  # fmt: skip
        return last[0] @ p["head.w"] + p["head.b"]


def _recurrent_jax(op: str, p: Mapping[str, Any], batch: Mapping[str, Any]) -> Any:
    import jax
    import jax.numpy as jnp

    size = p["r"].shape[0]

    def cell(states: Any, row: Any) -> Any:
        h = states[0]
        own = h @ p["r"] + p["rb"]
        if op == "RNN":
            return (jnp.tanh(row + own),), None
        if op == "GRU":
            z, reset = jnp.split(jax.nn.sigmoid(row[:, : 2 * size] + own[:, : 2 * size]), 2, axis=1)
            new = jnp.tanh(row[:, 2 * size :] + reset * own[:, 2 * size :])
            return ((1 - z) * new + z * h,), None
        i, o, forget, new = jnp.split(row + own, 4, axis=1)
        c = jax.nn.sigmoid(forget) * states[1] + jax.nn.sigmoid(i) * jnp.tanh(new)
        return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

    rows = jnp.swapaxes(batch["x"] @ p["w"] + p["wb"], 0, 1)  # of all steps at once
    zero = jnp.zeros((rows.shape[1], size), rows.dtype)
    last, _ = jax.lax.scan(cell, (zero,) * (2 if op == "LSTM" else 1), rows)
    return _jax_cross_entropy(last[0] @ p["head.w"] + p["head.b"], batch["labels"])


def _recurrent_torch(op: str, p: Mapping[str, Any], batch: Mapping[str, Any]) -> Any:
    import torch
    from torch.nn import functional

    order = {"RNN": [0], "GRU": [1, 0, 2], "LSTM": [0, 2, 3, 1]}[op]  # of its gates, by ONNX's

    def sorted_(a: Any) -> Any:
        parts = a.chunk(len(order), dim=-1)
        found = torch.cat([parts[k] for k in order], dim=-1)
        return found.T.contiguous() if found.ndim == 2 else found

    weights = [sorted_(p[n]) for n in ("w", "r", "wb", "rb")]
    x = batch["x"].transpose(0, 1)
    zero = torch.zeros(1, x.shape[1], p["r"].shape[0])
    run = {"RNN": torch.rnn_tanh, "GRU": torch.gru, "LSTM": torch.lstm}[op]
    last = run(x, (zero, zero) if op == "LSTM" else zero, weights, True, 1, 0.0, True, False, False)[1]
    return functional.cross_entropy(last[0] @ p["head.w"] + p["head.b"], batch["labels"])


def recurrent(op: str, steps: int = 8, count: int = 4, hidden: int = 16) -> Model:
    """An RNN, GRU or LSTM with a classifier of its last state, which tells the sign of what a sequence began with."""
    rng = np.random.default_rng(3)
    width = _GATES[op] * hidden
    p: Parameters = {
        "w": _weights(rng, hidden, width), "r": _weights(rng, hidden, width), "wb": np.zeros(width, F),
        "rb": np.zeros(width, F), "head.w": _weights(rng, hidden, 4), "head.b": np.zeros(4, F),
    }  # fmt: skip

    def batch(k: int) -> Batch:
        x = np.random.default_rng(k).standard_normal((count, steps, hidden)).astype(F)
        return {"x": x, "labels": (x[:, 0, 0] > 0) * 2 + (x[:, -1, 0] > 0).astype(np.int64)}

    return Model(
        f"{op}, {steps} steps", p, batch, lambda q: _Recurrent(q, op), lambda q, b: _recurrent_jax(op, q, b),
        lambda q, b: _recurrent_torch(op, q, b), rate=5e-3,
    )  # fmt: skip


# --- training loops ---------------------------------------------------------------------------------------------------


def by_xrt(model: Model, engine: Any, **options: Any) -> tuple[Callable[[Batch], Any], Any]:
    """A step of XRT, and the module.

    Its optimiser is AdamW without decay: the epsilon of ONNX's own Adam stands elsewhere than JAX's and PyTorch's.
    """
    from xrt_core.training import AdamW, TrainModule

    optimizer = AdamW(model.rate, BETA1, BETA2, epsilon=EPSILON, weight_decay=0.0)
    t = TrainModule(model.xrt(model.parameters), optimizer=optimizer, engine=engine, **options)
    return (lambda batch: t.step(**batch)), t


def jax_step(model: Model) -> Any:
    """The step (state, batch) -> (state, loss), to be jitted with its first argument donated."""
    import jax
    import jax.numpy as jnp

    def step(state: Any, batch: Any) -> Any:
        p, m, v, count = state
        loss, g = jax.value_and_grad(model.jax)(p, batch)
        count = count + 1
        m = jax.tree.map(lambda a, b: BETA1 * a + (1 - BETA1) * b, m, g)
        v = jax.tree.map(lambda a, b: BETA2 * a + (1 - BETA2) * b * b, v, g)
        c = count.astype(jnp.float32)
        first, second = 1 - BETA1**c, 1 - BETA2**c
        p = jax.tree.map(lambda x, a, b: x - model.rate * (a / first) / (jnp.sqrt(b / second) + EPSILON), p, m, v)
        return (p, m, v, count), loss

    return step


def jax_state(model: Model) -> Any:
    """What the step begins with."""
    import jax.numpy as jnp

    def zeros() -> Any:
        return {k: jnp.zeros(a.shape, a.dtype) for k, a in model.parameters.items()}

    return {k: jnp.array(a) for k, a in model.parameters.items()}, zeros(), zeros(), jnp.zeros((), jnp.int32)


def as_jax(batch: Batch) -> Batch:
    """A batch as JAX takes it without 64-bit types."""
    return {k: a.astype(np.int32) if a.dtype == np.int64 else a for k, a in batch.items()}


def by_jax(model: Model) -> Callable[[Batch], Any]:
    """A step of JAX, jitted, with the state donated."""
    import jax

    step = jax.jit(jax_step(model), donate_argnums=0)
    state = jax_state(model)

    def run(batch: Batch) -> Any:
        nonlocal state
        state, loss = step(state, as_jax(batch))
        return float(loss)

    return run


def by_torch(model: Model, compiled: bool = False) -> Callable[[Batch], Any]:
    """A step of PyTorch, eager or through inductor."""
    import torch

    p = {k: torch.tensor(a, requires_grad=True) for k, a in model.parameters.items()}
    optimizer = torch.optim.Adam(p.values(), lr=model.rate, betas=(BETA1, BETA2), eps=EPSILON)
    loss_of = torch.compile(model.torch) if compiled else model.torch

    def run(batch: Batch) -> Any:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(p, {k: torch.from_numpy(a) for k, a in batch.items()})
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return run


def losses(step: Callable[[Batch], Any], model: Model, steps: int) -> Iterator[float]:
    """The losses of the first steps."""
    for k in range(steps):
        yield float(step(model.batch(k)))

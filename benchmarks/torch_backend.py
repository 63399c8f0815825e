"""`torch.compile(model, backend="xrt")` beside eager PyTorch and inductor: inference, first results, training, calls.

    python benchmarks/torch_backend.py inference [--freeze] [NAME ...]  # steady calls of eight, random weights
    python benchmarks/torch_backend.py first [NAME ...]       # the first result, each in a process of its own
    python benchmarks/torch_backend.py ready [NAME ...]       # until compiled and verified, then again from the cache
    python benchmarks/torch_backend.py training [NAME ...]    # steps, the optimizer included
    python benchmarks/torch_backend.py varying [NAME ...]     # 40 calls, each of a size that no call had before
    python benchmarks/torch_backend.py meanwhile [NAME ...]   # calls and steps beside XRT's compilation
    python benchmarks/torch_backend.py between [NAME ...]     # what an operator of torch's takes between calls
    python benchmarks/torch_backend.py calls                  # x + 1, and 200 parameters as inputs

Models come from transformers (configurations of base size, shortened to `--layers`, 6), the U-Net is written here. All
sides share the weights and take turns in one process; `inductor` is left out where it cannot compile. Differences are
the largest of the outputs over the largest number.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from rounds import interleaved

LAYERS = 6
NAMES = ("bert", "gpt2", "vit", "resnet", "mobilenet", "t5", "whisper", "unet")
TRAINED = ("bert", "gpt2", "resnet")


class UNet(torch.nn.Module):
    """Two levels down and up, with GroupNorm and skip connections. mode: of the interpolation on the way up."""

    def __init__(self, width: int = 64, mode: str = "nearest") -> None:
        super().__init__()
        self.mode = mode

        def block(a: int, b: int) -> torch.nn.Module:
            parts: list[torch.nn.Module] = [
                torch.nn.Conv2d(a, b, 3, padding=1),
                torch.nn.GroupNorm(8, b),
                torch.nn.SiLU(),
            ]
            return torch.nn.Sequential(
                *parts, torch.nn.Conv2d(b, b, 3, padding=1), torch.nn.GroupNorm(8, b), torch.nn.SiLU()
            )

        self.a, self.b, self.c = block(3, width), block(width, 2 * width), block(2 * width, 4 * width)
        self.d, self.e = block(6 * width, 2 * width), block(3 * width, width)
        self.last = torch.nn.Conv2d(width, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: float32 [n, 3, h, w] -> the same shape."""
        half, twice = torch.nn.functional.avg_pool2d, partial(torch.nn.functional.interpolate, mode=self.mode)
        a = self.a(x)
        b = self.b(half(a, 2))
        c = self.c(half(b, 2))
        d = self.d(torch.cat([twice(c, scale_factor=2.0), b], 1))
        return self.last(self.e(torch.cat([twice(d, scale_factor=2.0), a], 1)))


def made(name: str, layers: int, training: bool = False) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A model of random weights, and the keyword arguments of a call."""
    import transformers as t

    torch.manual_seed(0)
    image = torch.randn(1, 3, 224, 224)
    ids = torch.randint(0, 1000, (8, 64) if training else (1, 128))
    if name in ("unet", "unet-bilinear"):
        return UNet(mode=name.removeprefix("unet-") if "-" in name else "nearest"), {"x": torch.randn(1, 3, 128, 128)}
    kinds: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
        "bert": lambda: (t.BertModel(t.BertConfig(num_hidden_layers=layers)), {"input_ids": ids}),
        "gpt2": lambda: (t.GPT2Model(t.GPT2Config(n_layer=layers)), {"input_ids": ids, "use_cache": False}),
        "vit": lambda: (t.ViTModel(t.ViTConfig(num_hidden_layers=layers)), {"pixel_values": image}),
        "resnet": lambda: (t.ResNetModel(t.ResNetConfig()), {"pixel_values": image}),
        "mobilenet": lambda: (t.MobileNetV2Model(t.MobileNetV2Config()), {"pixel_values": image}),
        "t5": lambda: (
            t.T5Model(t.T5Config(num_layers=layers)),
            {"input_ids": ids, "decoder_input_ids": ids[:, :32], "use_cache": False},
        ),
        "whisper": lambda: (
            t.WhisperModel(t.WhisperConfig(encoder_layers=layers, d_model=384, encoder_ffn_dim=1536)).encoder,
            {"input_features": torch.randn(1, 80, 3000)},
        ),
    }
    if training:
        kinds["bert"] = lambda: (
            t.BertForSequenceClassification(
                t.BertConfig(num_hidden_layers=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
            ),
            {"input_ids": ids, "labels": ids[:, 0] % 2},
        )
        kinds["gpt2"] = lambda: (
            t.GPT2LMHeadModel(
                t.GPT2Config(n_layer=4, vocab_size=1000, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
            ),
            {"input_ids": ids, "labels": ids, "use_cache": False},
        )
        kinds["resnet"] = lambda: (
            t.ResNetForImageClassification(
                t.ResNetConfig(
                    layer_type="basic",
                    depths=[2, 2, 2, 2],
                    hidden_sizes=[64, 128, 256, 512],
                    embedding_size=64,
                    num_labels=10,
                )
            ),
            {"pixel_values": torch.randn(8, 3, 64, 64), "labels": torch.arange(8)},
        )
    return kinds[name]()


def output(result: Any) -> torch.Tensor:
    """The first tensor of a model's output."""
    return result if isinstance(result, torch.Tensor) else result[0]


def settle(call: Callable[[], Any], seconds: float = 180.0) -> None:
    """Call until XRT has nothing left to compile or to verify."""
    import xrt_torch

    call()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        xrt_torch.wait(end - time.monotonic())
        call()
        if xrt_torch.wait(0):
            break
    for _ in range(40):  # XRT and eager take turns until the quicker one is known
        if all(g.is_settled for g in xrt_torch.graphs()) or time.monotonic() > end:
            return
        call()


def inference(names: Sequence[str], layers: int, compiled: Sequence[str], freeze: bool = False) -> None:
    """Print a table of steady calls. freeze: whether parameters are constants on XRT."""
    options = {"freeze": True} if freeze else {}
    print("| model | eager (ms) | xrt / eager | inductor / eager | xrt / inductor | off |\n|---|---|---|---|---|---|")
    ratios: list[tuple[float, float]] = []
    for name in names:
        torch._dynamo.reset()
        model, inputs = made(name, layers)
        model.eval()
        with torch.inference_mode(False), torch.no_grad():
            calls: dict[str, Callable[[], Any]] = {"eager": partial(model, **inputs)}
            for backend in compiled:
                try:
                    given = options if backend == "xrt" else None
                    calls[backend] = partial(torch.compile(model, backend=backend, options=given), **inputs)
                    settle(calls[backend]) if backend == "xrt" else calls[backend]()
                except Exception as e:
                    print(f"{name}: {backend}: {type(e).__name__}: {str(e)[:200]}", file=sys.stderr)
                    calls.pop(backend, None)
            want = output(calls["eager"]())
            off = float((output(calls["xrt"]()) - want).abs().max() / want.abs().max()) if "xrt" in calls else math.nan
            times = dict(
                zip(calls, interleaved(list(calls.values()), rounds=9, seconds=6.0, warm=1, rest=0.05), strict=True)
            )

        def ratio(a: str, b: str, times: Any = times) -> float:
            if a not in times or b not in times:
                return math.nan
            return statistics.median(x / y for x, y in zip(times[a].wall, times[b].wall, strict=True))

        ratios.append((ratio("xrt", "eager"), ratio("xrt", "inductor")))
        print(
            f"| {name} | {times['eager'].median * 1e3:.1f} | {ratios[-1][0]:.2f} | {ratio('inductor', 'eager'):.2f} "
            f"| {ratios[-1][1]:.2f} | {off:.1e} |",
            flush=True,
        )
    for k, what in enumerate(("eager", "inductor")):
        logs = [math.log(r[k]) for r in ratios if not math.isnan(r[k])]
        if logs:
            print(f"xrt / {what}: geometric mean {math.exp(statistics.fmean(logs)):.2f}, of {len(logs)}")


def varying(names: Sequence[str], layers: int, compiled: Sequence[str]) -> None:
    """Print a table of 40 calls, each of a size that no call had before, once ten others were seen: all of a side's
    time over eager's. The sides come one after the other, as torch limits the graphs of one function."""
    print("| model | eager (ms a call) | xrt / eager | inductor / eager | xrt: slowest call / eager's | graphs | off |")
    print("|---|---|---|---|---|---|---|")
    for name in names:
        found = {b: varied(name, layers, b) for b in compiled}
        eager, over, slowest, graphs, off = found.get("xrt", (math.nan,) * 5)
        print(
            f"| {name} | {eager * 1e3:.1f} | {over:.2f} | {found.get('inductor', (math.nan,) * 2)[1]:.2f} "
            f"| {slowest:.2f} | {graphs:.0f} | {off:.1e} |",
            flush=True,
        )


def varied(name: str, layers: int, backend: str) -> tuple[float, ...]:
    """Of `varying`, for one side, in turns with eager: eager's seconds a call, the side's time over it, the largest of
    a call, how many graphs there are of XRT, and the difference."""
    import xrt_torch

    torch._dynamo.reset()
    model, first = made(name, layers)
    model.eval()
    call = torch.compile(model, backend=backend)
    sizes = random_sizes(next(iter(first.values())).dim() == 4, 50)
    seconds: list[tuple[float, float]] = []
    off = 0.0
    with torch.no_grad():
        for size in sizes[:10]:
            settle(partial(call, **resized(first, size)), 60.0)
        for i, size in enumerate(sizes[10:]):
            inputs = resized(first, size)
            results, spent = {}, {}
            for side in (model, call) if i % 2 else (call, model):
                start = time.perf_counter()
                results[side] = output(side(**inputs))
                spent[side] = time.perf_counter() - start
            seconds.append((spent[model], spent[call]))
            off = max(off, float((results[call] - results[model]).abs().max() / results[model].abs().max()))
    eager, own = (sum(s) for s in zip(*seconds, strict=True))
    return eager / len(seconds), own / eager, max(b / a for a, b in seconds), float(len(xrt_torch.graphs())), off


def random_sizes(is_image: bool, count: int) -> list[tuple[int, int]]:
    """Different sizes: of images, multiples of 32 from 96 to 352; of texts, a batch of 1 to 4 and a length."""
    generator = torch.Generator().manual_seed(1)
    found: dict[tuple[int, int], None] = {}
    while len(found) < count:
        a, b = torch.randint(3, 12, (2,), generator=generator).tolist()
        n = int(torch.randint(16, 160, (), generator=generator))
        found[(32 * a, 32 * b) if is_image else (1 + a % 4, n)] = None
    return [*found]


def resized(inputs: dict[str, Any], size: tuple[int, int]) -> dict[str, Any]:
    """The arguments of a call, with tensors of this size: images' last axes, or texts."""

    def made_of(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return torch.randn(*x.shape[:-2], *size) if x.dim() == 4 else torch.randint(0, 1000, size)

    return {n: made_of(x) for n, x in inputs.items()}


def training(names: Sequence[str], compiled: Sequence[str]) -> None:
    """Print a table of training steps, with AdamW."""
    print("| model | eager (ms a step) | xrt / eager | inductor / eager | loss, eager and xrt |\n|---|---|---|---|---|")
    for name in names:
        torch._dynamo.reset()
        steps: dict[str, Callable[[], Any]] = {}
        losses: dict[str, float] = {}
        for backend in ("eager", *compiled):
            model, inputs = made(name, LAYERS, training=True)
            model.train()
            optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
            call = model if backend == "eager" else torch.compile(model, backend=backend)

            def step(call: Any = call, inputs: Any = inputs, optimizer: Any = optimizer) -> float:
                loss = call(**inputs).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return float(loss.detach())

            try:
                losses[backend] = [step() for _ in range(3)][-1]
                if backend == "xrt":
                    settle(step)
                steps[backend] = step
            except Exception as e:
                print(f"{name}: {backend}: {type(e).__name__}: {str(e)[:200]}", file=sys.stderr)
        times = dict(zip(steps, interleaved(list(steps.values()), rounds=9, seconds=6.0, warm=1), strict=True))
        over = {b: times[b].median / times["eager"].median for b in times}
        print(
            f"| {name} | {times['eager'].median * 1e3:.0f} | {over.get('xrt', math.nan):.2f} "
            f"| {over.get('inductor', math.nan):.2f} | {losses['eager']:.5f}, {losses.get('xrt', math.nan):.5f} |",
            flush=True,
        )


def meanwhile(names: Sequence[str], layers: int) -> None:
    """Print what calls and training steps take while XRT compiles, each in a process of its own with an empty cache."""
    print("| model | | eager alone (ms) | meanwhile: mean / alone | slowest / alone | calls | seconds |")
    print("|---|---|---|---|---|---|---|")
    for name in names:
        for what in ("call", "step") if name in TRAINED else ("call",):
            with tempfile.TemporaryDirectory() as folder:
                found = alone(f"meanwhile-{what}", name, layers, "xrt", {"XRT_CACHE_DIR": folder})
            eager, mean, slowest, count, seconds = found if len(found) == 5 else [math.nan] * 5
            row = f"{eager * 1e3:.1f} | {mean / eager:.2f} | {slowest / eager:.1f} | {count:.0f} | {seconds:.0f} |"
            print(f"| {name} | {what} | {row}", flush=True)


def meanwhile_of(name: str, layers: int, is_step: bool) -> None:
    """In a process of its own: print the seconds of a call of eager; the mean and the most of those by torch.compile,
    from the one after the graphs are captured until nothing is compiled any more; how many there were; their sum."""
    import xrt_torch

    model, inputs = made(name, layers, training=is_step)
    model.train(is_step)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    def run(call: Any) -> float:
        start = time.perf_counter()
        if is_step:
            call(**inputs).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            with torch.no_grad():
                call(**inputs)
        return time.perf_counter() - start

    eager = statistics.median([run(model) for _ in range(25)][5:])
    call = torch.compile(model, backend="xrt")
    for _ in range(2):
        run(call)
    taken = [run(call)]
    while not xrt_torch.wait(0) and sum(taken) < 240:
        taken.append(run(call))
    print(eager, statistics.fmean(taken), max(taken), len(taken), sum(taken), flush=True)
    os._exit(0)


BETWEEN = {
    "eager": None,
    "named": {"engine": "onnxruntime"},
    "spinning": {"engine": "onnxruntime", "release_cores": False},
}


def between(names: Sequence[str], layers: int) -> None:
    """Print what the sum of a million numbers takes in eager, and a call, where the two take turns: in eager, on ONNX
    Runtime, and on ONNX Runtime with threads that go on spinning, each in a process of its own."""
    print("| model | sum, call: all in eager (ms) | on ONNX Runtime | with release_cores=False |\n|---|---|---|---|")
    for name in names:
        rows = (alone("between-of", name, layers, side) for side in BETWEEN)
        print(f"| {name} | {' | '.join(f'{a * 1e3:.2f}, {b * 1e3:.1f}' for a, b in rows)} |", flush=True)


def between_of(name: str, layers: int, side: str) -> None:
    """In a process of its own: print the seconds of the sum and of the call."""
    model, inputs = made(name, layers)
    model.eval()
    options, x = BETWEEN[side], torch.ones(1 << 20)
    call = model if options is None else torch.compile(model, backend="xrt", options=options)
    spent: list[tuple[float, float]] = []
    with torch.no_grad():
        if options is not None:
            settle(partial(call, **inputs))
        for _ in range(60):
            start = time.perf_counter()
            x.sum()
            middle = time.perf_counter()
            call(**inputs)
            spent.append((middle - start, time.perf_counter() - middle))
    print(*(statistics.median(s) for s in zip(*spent[10:], strict=True)), flush=True)
    os._exit(0)


def alone(what: str, name: str, layers: int, backend: str, env: dict[str, str] | None = None) -> list[float]:
    """The seconds that a process of its own prints last; NaN where it fails."""
    command = [sys.executable, __file__, what, name, "--layers", str(layers), "--backends", backend]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **(env or {})})
    if done.returncode:
        print(f"{name}: {backend}: {done.stderr[-300:]}", file=sys.stderr)
    return [float(n) for n in done.stdout.splitlines()[-1].split()] if not done.returncode else [math.nan] * 2


def first(names: Sequence[str], layers: int, compiled: Sequence[str]) -> None:
    """Print the seconds of a first result, cold, each in a process of its own: of the call, and with torch.compile,
    which imports TorchDynamo, before it."""
    print("| model | eager (s) | " + " | ".join(f"{b} / eager: call, with torch.compile" for b in compiled) + " |")
    print("|---|---|" + "---|" * len(compiled))
    for name in names:
        eager = alone("first-of", name, layers, "eager")[0]
        over = [[s / eager for s in alone("first-of", name, layers, b)] for b in compiled]
        print(f"| {name} | {eager:.2f} | " + " | ".join(f"{r[0]:.2f}, {r[1]:.2f}" for r in over) + " |", flush=True)


def first_of(name: str, layers: int, backend: str) -> None:
    """In a process of its own: print the seconds of the first call, and of torch.compile and the call."""
    model, inputs = made(name, layers)
    model.eval()
    with torch.no_grad():
        begin = time.perf_counter()
        call = model if backend == "eager" else torch.compile(model, backend=backend)
        start = time.perf_counter()
        output(call(**inputs))
        end = time.perf_counter()
        print(end - start, end - begin, flush=True)
    os._exit(0)  # what compiles in the background is not waited for


def ready(names: Sequence[str], layers: int, compiled: Sequence[str]) -> None:
    """Print the seconds until a model is compiled and, on XRT, verified; twice with the same new folder of caches. With
    the processor's seconds, those of inductor's compilers included."""
    print("| model | backend | first process (s, of processor time) | second process |\n|---|---|---|---|")
    for name in names:
        found = {}
        for backend in compiled:
            with tempfile.TemporaryDirectory() as folder:
                env = {v: f"{folder}/{v}" for v in ("XRT_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
                found[backend] = [alone("ready-of", name, layers, backend, env) for _ in range(2)]
            row = (f"{wall:.1f}, {processor:.1f}" for wall, processor in found[backend])
            print(f"| {name} | {backend} | {' | '.join(row)} |", flush=True)
        if {"inductor", "xrt"} <= found.keys():
            cold, warm = ([s / i for s, i in zip(row, found["inductor"][0], strict=True)] for row in found["xrt"])
            print(
                f"{name}: xrt / inductor's first process: cold {cold[0]:.2f} ({cold[1]:.2f} of processor time), "
                f"from the cache {warm[0]:.2f} ({warm[1]:.2f})",
                flush=True,
            )


def ready_of(name: str, layers: int, backend: str) -> None:
    """In a process of its own: the seconds, and those of processor time, from torch.compile until the compiled model
    answers."""
    model, inputs = made(name, layers)
    model.eval()
    with torch.no_grad():
        output(model(**inputs))
        start, before = time.perf_counter(), sum(os.times()[:4])
        call = torch.compile(model, backend=backend)
        output(call(**inputs))
        if backend == "xrt":
            import xrt_torch

            while not (xrt_torch.graphs() and all(g.is_proven for g in xrt_torch.graphs())):
                output(call(**inputs))
                while any(g.is_compiling for g in xrt_torch.graphs()):
                    time.sleep(0.05)
                if any(g.reason is not None for g in xrt_torch.graphs()):
                    raise SystemExit(xrt_torch.explain())
        print(time.perf_counter() - start, sum(os.times()[:4]) - before, flush=True)
    os._exit(0)


class Many(torch.nn.Module):
    """A hundred small linear layers: 200 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(100))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: float32 [n, 8] -> [n, 8]."""
        for layer in self.layers:
            x = layer(x)
        return x


def calls() -> None:
    """Print microseconds of small calls."""

    def constant(graph: Any, example: Any) -> Any:
        result = graph(*example)
        return lambda *args: result

    x = torch.ones(4)
    plus: Callable[[Any], Any] = lambda v: v + 1  # noqa: E731
    torch._dynamo.reset()
    xrt, base = torch.compile(plus, backend="xrt"), torch.compile(lambda v: v + 1, backend=constant)
    with torch.no_grad():
        base(x)
        settle(partial(xrt, x))
        times = interleaved([partial(plus, x), partial(base, x), partial(xrt, x)], rounds=21, batch=0.03)
        eager, constant_, own = (t.median * 1e6 for t in times)
        print(
            f"x + 1: eager {eager:.1f} us, dynamo with a constant backend {constant_:.1f}, "
            f"xrt {own:.1f} ({own / constant_:.2f})"
        )
    model, y = Many(), torch.ones(2, 8)
    own_ = torch.compile(model, backend="xrt")
    settle(partial(own_, y))
    a, b = (t.median * 1e6 for t in interleaved([partial(model, y), partial(own_, y)], rounds=21, batch=0.05))
    print(f"200 parameters as inputs, with gradients: eager {a:.0f} us, xrt {b:.0f} ({b / a:.2f})")


def main() -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    of = {
        "first-of": first_of,
        "ready-of": ready_of,
        "between-of": between_of,
        "meanwhile-call": lambda name, layers, _: meanwhile_of(name, layers, is_step=False),
        "meanwhile-step": lambda name, layers, _: meanwhile_of(name, layers, is_step=True),
    }
    kinds = ("inference", "varying", "first", "ready", "training", "meanwhile", "between", "calls", *of)
    parser.add_argument("what", choices=kinds)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--backends", default="inductor,xrt")
    parser.add_argument("--freeze", action="store_true", help="inference: parameters are constants on XRT")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    backends = args.backends.split(",")
    if args.what in of:
        of[args.what](args.names[0], args.layers, backends[0])
        return
    print(json.dumps({"torch": torch.__version__, "threads": torch.get_num_threads()}))
    if args.what == "inference":
        inference(args.names or NAMES, args.layers, backends, args.freeze)
    elif args.what == "varying":
        varying(args.names or ("bert", "gpt2", "resnet", "mobilenet", "unet"), args.layers, backends)
    elif args.what == "training":
        training(args.names or TRAINED, backends)
    elif args.what == "between":
        between(args.names or ("bert", "mobilenet", "unet-bilinear"), args.layers)
    elif args.what == "meanwhile":
        meanwhile(args.names or ("bert", "gpt2", "resnet"), args.layers)
    elif args.what == "ready":
        ready(args.names or ("bert",), args.layers, backends)
    elif args.what == "first":
        first(args.names or NAMES, args.layers, backends)
    else:
        calls()


if __name__ == "__main__":
    main()

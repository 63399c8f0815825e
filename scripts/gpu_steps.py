"""The steps of scripts/gpu, each run in a process of its own: `gpu_steps.py NAME FILE` writes what it finds to FILE.

With XRT_GPU_REHEARSAL set, CuPy is the stand-in of tests/fake_cupy.py, XLA compiles for the CPU and Toy simulates: all
but the numbers is as on a GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

REHEARSAL = bool(os.environ.get("XRT_GPU_REHEARSAL"))
ROOT = pathlib.Path(__file__).resolve().parents[1]
NODE_PROCESSES = 2 if REHEARSAL else 6
DEVICES = {"host": "cuda", "xla": "cpu" if REHEARSAL else "cuda", "toy": "cuda"}

Found = dict[str, Any]


@contextlib.contextmanager
def cupy_here() -> Iterator[Any]:
    """CuPy, or in a rehearsal its stand-in."""
    if REHEARSAL:
        from tests.fake_cupy import installed

        with installed() as module:
            yield module
    else:
        import cupy

        yield cupy


def attempts(cases: dict[str, Callable[[], Any]]) -> Found:
    """Run every case; what each gave, or the error's last line. Tracebacks are printed."""
    found: Found = {}
    for name, case in cases.items():
        try:
            found[name] = case() or "ok"
        except Exception as e:
            traceback.print_exc()
            found[name] = f"FAILED {type(e).__name__}: {str(e).strip().partition(chr(10))[0][:300]}"
    return found


def failures(found: Found) -> int:
    """Print the outcome of `attempts` and its summary line; the number of failures."""
    wrong = {name: value for name, value in found.items() if str(value).startswith("FAILED")}
    for name, value in found.items():
        print(f"{name}: {value}")
    print(f"summary: {len(found) - len(wrong)} of {len(found)} right{''.join(f'; {n}' for n in list(wrong)[:6])}")
    return len(wrong)


def command(*arguments: str, limit: float | None = None) -> int:
    """Run a command of this interpreter with its output on ours."""
    sys.stdout.flush()
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, timeout=limit, check=False).returncode


# --- 1 what is there --------------------------------------------------------------------------------------------------


def what(found: Found) -> int:
    """Driver, versions, engines, the doctor; a round trip of an array through every library."""
    from importlib import metadata

    for name in [
        "cupy-cuda13x",
        "jax",
        "jaxlib",
        "jax-cuda13-plugin",
        "numba-cuda",
        "torch",
        "onnx",
        "numpy",
        "onnxruntime",
    ]:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    found["python"] = sys.version.split()[0]
    with contextlib.suppress(OSError):
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        found["gpu"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    print(json.dumps(found, indent=1))
    for name in ("engines", "doctor"):  # the doctor's exit code is 1 where it finds problems
        found[f"xrt {name}"] = command("-m", "xrt_core.cli.app", name)
    with cupy_here() as cupy:
        found["round trip"] = round_trip(cupy)
        found["devices"] = int(cupy.cuda.runtime.getDeviceCount())
    broken = f"; xrt engines ends with {found['xrt engines']}" if found["xrt engines"] else ""
    print(f"summary: {found.get('gpu') or 'no nvidia-smi'}; round trip {found['round trip']}{broken}")
    return int(not found["devices"])


def round_trip(cupy: Any) -> str:
    """NumPy -> CuPy -> JAX -> torch -> NumPy, as far as these are here."""
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    passed = ["numpy", "cupy"]
    given = cupy.asarray(x)
    if not REHEARSAL:
        import jax

        given = jax.dlpack.from_dlpack(given)
        passed.append("jax")
        with contextlib.suppress(ImportError):
            import torch

            given = torch.from_dlpack(given).cpu()
            passed.append("torch")
    back = given.get() if hasattr(given, "get") else np.asarray(given)
    np.testing.assert_array_equal(back, x)
    return " -> ".join([*passed, "numpy"])


# --- 2 smoke ----------------------------------------------------------------------------------------------------------


def smoke(found: Found) -> int:
    """MatMul, TopK and NonZero on the host, XLA and Toy, for callers of every library; no engine may have failed."""
    from tests.random_graphs import F32, graph_of, ints, node
    from xrt_core.ir.graph import Value
    from xrt_core.ir.types import TensorType
    from xrt_core.module import XRTModule
    from xrt_core.runtime.arrays import family_of, to_numpy

    w = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
    x, h, top, at, r, y = Value("x", TensorType(F32, (4, 4))), *map(Value, ("h", "top", "at", "r", "y"))
    nodes = [node("MatMul", [x, Value.constant(w, "w")], [h]), node("TopK", [h, ints(2)], [top, at])]
    graph = graph_of([x], [r, y], [*nodes, node("Relu", [top], [r]), node("NonZero", [r], [y])])
    given = np.random.default_rng(1).standard_normal((4, 4)).astype(np.float32)
    want = XRTModule(graph, engine="host")(given)

    def case(engine: str, library: str, array: Any) -> Callable[[], str]:
        def run() -> str:
            module = XRTModule(graph, engine=engine, device=DEVICES[engine], prune=False)
            for _ in range(3):
                results = module(array(given))
            for got, expected in zip(results, want, strict=True):
                assert family_of(type(got)) == library, type(got)
                np.testing.assert_allclose(to_numpy(got), expected, rtol=1e-4, atol=1e-5)
            assert not module.explain().errors, module.explain().errors
            return "ok"

        return run

    with cupy_here() as cupy:
        libraries: dict[str, Any] = {"numpy": lambda a: a, "cupy": cupy.asarray}
        with contextlib.suppress(ImportError):
            import jax

            libraries["jax"] = jax.device_put
        with contextlib.suppress(ImportError):
            import torch

            if torch.cuda.is_available():
                libraries["torch"] = lambda a: torch.from_numpy(a.copy()).cuda()
        cases = {f"{e}, {n}": case(e, n, a) for e in DEVICES for n, a in libraries.items()}
        found.update(attempts(cases))
    return failures(found)


# --- 3 to 5 tests -----------------------------------------------------------------------------------------------------


def tests(found: Found) -> int:
    """The tests marked gpu, of the core, of Toy and of the PyTorch door."""
    files = (
        "tests/runtime/test_transfers_gpu.py",
        "plugins/xrt-toy/tests/test_toy_gpu.py",
        "plugins/xrt-torch/tests/test_torch_gpu.py",
    )
    return pytest_run(found, "-m", "gpu", *files)


_WARNINGS = ("-W", "ignore:The 'generic' unit for NumPy timedelta:DeprecationWarning")
"""What numba says when it is imported beside a newer NumPy."""


def pytest_run(found: Found, *arguments: str) -> int:
    """Run pytest; its counts. In a rehearsal that everything is skipped is what is expected."""
    sys.stdout.flush()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *_WARNINGS, *arguments],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    print(done.stdout, done.stderr)
    last = next((x for x in reversed(done.stdout.splitlines()) if " in " in x and "s" in x), "no outcome")
    found["outcome"] = last.strip("= ")
    print(f"summary: {found['outcome']}")
    return done.returncode


def nodes(found: Found) -> int:
    """Every ONNX node test on the CuPy host, for callers with NumPy's and CuPy's arrays, in processes by slices."""
    files = [pathlib.Path(sys.argv[2]).with_suffix(f".{k}.json") for k in range(NODE_PROCESSES)]
    here = [sys.executable, __file__, "slice"]
    running = [subprocess.Popen([*here, str(f), str(k)], cwd=ROOT) for k, f in enumerate(files)]
    codes = [p.wait() for p in running]
    operators: dict[str, dict[str, Any]] = {}
    for file in files:
        for operator, row in (json.loads(file.read_text()) if file.exists() else {}).items():
            into = operators.setdefault(operator, {"right": 0, "wrong": {}})
            into["right"] += row["right"]
            into["wrong"] |= row["wrong"]
        file.unlink(missing_ok=True)
    wrong = {name: why for row in operators.values() for name, why in row["wrong"].items()}
    found.update(operators=operators, processes=codes)
    for name, why in sorted(wrong.items()):
        print(f"{name}: {why}")
    worst = ", ".join(sorted(o for o, row in operators.items() if row["wrong"])[:12])
    right = sum(row["right"] for row in operators.values())
    print(f"summary: {right} right, {len(wrong)} wrong{': ' * bool(wrong)}{worst}")
    return int(bool(wrong) or any(codes))


def node_slice(found: Found) -> int:
    """One slice of `nodes`."""
    from tests.host import test_cupy_nodes as probe

    with cupy_here():
        for k, operator in enumerate(sorted(probe.BY_OPERATOR)):
            if k % NODE_PROCESSES == int(sys.argv[3]):
                wrong = probe.wrong_of(operator, both=True)
                found[operator] = {"right": len(probe.BY_OPERATOR[operator]) - len(wrong), "wrong": wrong}
    return 0


def conformance(found: Found) -> int:
    """The conformance kit on XLA, on the GPU."""
    device = "cpu" if REHEARSAL else "cuda:0"
    few = ("-k", "Relu or contract") if REHEARSAL else ()
    return pytest_run(found, "--pyargs", "xrt_core.testing", "--xrt-engine", "xla", "--xrt-device", device, *few)


# --- 6 races ----------------------------------------------------------------------------------------------------------

_SPIN = r"""
extern "C" __global__ void fill(float* x, const float* y, int n, long long ticks) {
    long long start = clock64();
    while (clock64() - start < ticks) {}
    for (int i = threadIdx.x; i < n; i += blockDim.x) x[i] = y[i];
}
"""


_WATCHED = {"guard": True, "guard_async": False, "guard_tune": False, "guard_run_timeout": 5.0}


def races(found: Found) -> int:
    """A producer on a stream of its own before plans on other threads; what XLA fuses; a broken context, in a child."""
    with cupy_here() as cupy:
        cases: dict[str, Callable[[], Any]] = {
            f"two lanes, {options}": (lambda o=options: two_lanes(cupy, o))
            for options in ({"parallel": True}, _WATCHED)
        }
        cases["dropped inputs"] = lambda: dropped_inputs(cupy)
        cases["fusions in the unfused build"] = fusions
        cases["a broken context is named"] = broken_context
        found.update(attempts(cases))
    return failures(found)


def two_lanes(cupy: Any, options: dict[str, Any]) -> str:
    """Two engines side by side on what a slow kernel on a non-blocking stream makes."""
    from tests.random_graphs import F32, graph_of, node
    from xrt_core.ir.graph import Value
    from xrt_core.ir.types import TensorType
    from xrt_core.module import XRTModule

    n = 4 if REHEARSAL else 128
    x, p, q, y = (Value(name, TensorType(F32, (n, n))) for name in "xpqy")
    nodes = [node("Neg", [x], [p]), node("Exp", [x], [q]), node("Add", [p, q], [y])]
    marks = {"op:Neg": "toy", "op:Exp": "xla", "op:Add": "host"}
    device = {} if REHEARSAL else {"device": "cuda"}
    module = XRTModule(graph_of([x], [y], nodes), engine=["xla", "toy"], marks=marks, prune=False, **device, **options)
    source = np.random.default_rng(2).standard_normal((n, n)).astype(np.float32)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        given = cupy.zeros((n, n), np.float32)
        for _ in range(3):
            module(given)
        stream.synchronize()
        if REHEARSAL:
            given[...] = cupy.asarray(source)
        else:
            kernel = cupy.RawKernel(_SPIN, "fill")
            kernel((1,), (256,), (given, cupy.asarray(source), np.int32(n * n), np.int64(400_000_000)))
        got = module(given)
        got = got.get() if hasattr(got, "get") else got
    np.testing.assert_allclose(got, np.exp(source) - source, rtol=1e-3, atol=1e-4)
    assert not module.explain().errors, module.explain().errors
    return "ok"


def dropped_inputs(cupy: Any) -> str:
    """Toy's kernels read an array of JAX that nobody else holds, while JAX takes memory of its size again."""
    import jax

    from tests.random_graphs import F32, graph_of, node
    from xrt_core.ir.graph import Value
    from xrt_core.ir.types import TensorType
    from xrt_core.module import XRTModule

    n = 8 if REHEARSAL else 1 << 22
    x, y = (Value(name, TensorType(F32, (n,))) for name in "xy")
    module = XRTModule(graph_of([x], [y], [node("Neg", [x], [y])]), engine="toy", device="cuda", prune=False)
    for k in range(8):
        got = module(jax.device_put(np.full(n, k, np.float32)))
        others = [jax.numpy.full((n,), 1e9 + k) for _ in range(4)]
        assert (np.asarray(got) == -k).all(), k
        del others
    return "ok"


def fusions() -> Found:
    """How many fusions XLA's program has as it is, and built unfused for the guard to compare with."""
    from tests.random_graphs import F32, graph_of, node
    from xrt_core.engine import engines
    from xrt_core.engine.contract import CompileOptions, Function
    from xrt_core.ir.graph import Value
    from xrt_core.ir.types import TensorType

    x, h, s, y = (Value(name, TensorType(F32, (64, 64))) for name in "xhsy")
    nodes = [node("MatMul", [x, x], [h]), node("Softmax", [h], [s]), node("Tanh", [s], [y])]
    function = Function.from_graph(graph_of([x], [y], nodes))
    counts = {}
    for fused in (True, False):
        compiler = engines.usable("xla").compiler(DEVICES["xla"], CompileOptions(fused=fused))
        text = compiler.compile(function, function.params, function.returns, ()).as_text()
        counts["fused" if fused else "unfused"] = text.count(" fusion(")
    return counts


def broken_context() -> str:
    """A kernel that writes to a wrong address, in a process of its own: the next call says so in XRT's words."""
    done = subprocess.run(
        [sys.executable, __file__, "broken", os.devnull], capture_output=True, text=True, timeout=60, check=False
    )
    print(done.stdout, done.stderr)
    assert "BrokenContextError" in done.stdout, done.stdout or done.stderr[-300:]
    return "ok"


def broken(found: Found) -> int:
    """The child of `broken_context`."""
    from tests.random_graphs import F32, graph_of, node
    from xrt_core.ir.graph import Value
    from xrt_core.ir.types import TensorType
    from xrt_core.module import XRTModule

    x, y = (Value(name, TensorType(F32, (4,))) for name in "xy")
    with cupy_here() as cupy:
        module = XRTModule(graph_of([x], [y], [node("Neg", [x], [y])]), engine="host", device="cuda")
        given = cupy.zeros(4, np.float32)
        module(given)
        if REHEARSAL:
            from tests.fake_cuda import GPU

            GPU.put(0, GPU.break_context)
        else:
            text = 'extern "C" __global__ void wild(float* x) { x[1ll << 40] = 1; }'
            cupy.RawKernel(text, "wild")((1,), (1,), (given,))
        try:
            module(given).get()
            module(np.zeros(4, np.float32))
            print("no error", flush=True)
        except Exception as e:
            print(f"{type(e).__name__}: {e}", flush=True)
    os._exit(0)  # nothing can be cleaned up in such a process


# --- 7 to 10 timings -----------------------------------------------------------------------------------------


def table(found: Found, *arguments: str) -> int:
    """Run a benchmark; the rows of its table."""
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    found["rows"] = [x for x in done.stdout.splitlines() if x.startswith("|")]
    print(f"summary: {max(len(found['rows']) - 2, 0)} rows")
    return done.returncode or int(not REHEARSAL and len(found["rows"]) < 3)


def calls(found: Found) -> int:
    """Overhead of a call over the engine's own."""
    return table(found, "benchmarks/gpu_calls.py", "xla", "toy")


def models(found: Found) -> int:
    """Whole models on XLA and on the host."""
    names = ("light_squeezenet",) if REHEARSAL else ("light_resnet50", "light_densenet121")
    device = "cpu" if REHEARSAL else "cuda"
    seconds = "0.05" if REHEARSAL else "0.5"
    options = ("--engines", "xla", "--device", device, "--seconds", seconds)
    return table(found, "benchmarks/gpu_models.py", *names, *options)


def compiled(found: Found) -> int:
    """torch.compile with XRT on XLA beside torch eager: a transformer and a ResNet block, inference and training."""
    import torch

    device = "cpu" if REHEARSAL else "cuda"
    for name, model, x in torch_models(torch, device):
        for what, call in (("inference", inference_of), ("training step", step_of)):
            found.update(attempts({f"{name}, {what}": lambda c=call, m=model, x=x: beside_eager(torch, c, m, x)}))
    return failures(found)


def torch_models(torch: Any, device: str) -> list[tuple[str, Any, Any]]:
    """Name, module and input."""
    nn = torch.nn
    width, layers, pixels = (64, 1, 16) if REHEARSAL else (768, 6, 112)
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)

    def block(channels: int) -> Any:
        return nn.Sequential(nn.Conv2d(channels, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU())

    convolutions = nn.Sequential(*[block(3 if not k else 64) for k in range(layers)], nn.Flatten(2))
    return [
        ("transformer", nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).to(device),
         torch.randn(8, 128 if not REHEARSAL else 8, width, device=device)),
        ("convolutions", convolutions.to(device), torch.randn(8, 3, pixels, pixels, device=device)),
    ]  # fmt: skip


def inference_of(torch: Any, model: Any, call: Any, x: Any) -> Callable[[], list[Any]]:
    """A call without gradients."""
    model.eval()

    def run() -> list[Any]:
        with torch.no_grad():
            return [call(x)]

    return run


def step_of(torch: Any, model: Any, call: Any, x: Any) -> Callable[[], list[Any]]:
    """A forward and a backward pass, with dropout of the same seed; the loss and all gradients."""
    model.train()

    def run() -> list[Any]:
        torch.manual_seed(0)
        model.zero_grad()
        loss = call(x).square().mean()
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    return run


def beside_eager(torch: Any, make: Any, model: Any, x: Any) -> str:
    """Results compared, and times in turns: eager's milliseconds and the ratio."""
    import xrt_torch

    torch._dynamo.reset()
    options = {"engine": "xla", "background": False}
    made = make(torch, model, torch.compile(model, backend="xrt", options=options), x)
    eager = make(torch, model, model, x)
    for _ in range(3):
        got = [r.clone() for r in made()]
        for a, b in zip(got, eager(), strict=True):
            limit = 5e-3 * float(b.abs().max())
            assert a.device == b.device, (a.device, b.device)
            assert float((a - b).abs().max()) <= limit, (a.shape, limit)
    for g in xrt_torch.graphs(model):
        assert g.reason is None, g.reason
    settle = (lambda: None) if REHEARSAL else torch.cuda.synchronize
    times: dict[Any, list[float]] = {made: [], eager: []}
    for _ in range(3 if REHEARSAL else 20):
        for call, spent in times.items():
            start = time.perf_counter()
            call()
            settle()
            spent.append(time.perf_counter() - start)
    ours, its = (sorted(spent)[len(spent) // 2] * 1e3 for spent in times.values())
    return f"eager {its:.2f} ms, XRT / eager {ours / its:.2f}"


ROWS = ("XRT on XLA", "XRT on XLA, bf16", "JAX by hand", "JAX by hand, highest", "op by op (CuPy)")


def training(found: Found) -> int:
    """BERT of 4 layers and BERT-base, 40 sentences of 128 tokens: a process for each row, ten steps after three."""
    sizes = {"tiny": (1, 32, 2, 8, 2, 64)} if REHEARSAL else {
        "BERT, 4 layers": (4, 256, 4, 128, 40, 8192), "BERT-base": (12, 768, 12, 128, 40, 30522),
    }  # fmt: skip
    print("| model | by | sentences a second | loss of the last step | peak memory (MiB) |\n|---|---|---|---|---|")
    rows: list[Found] = []
    for name, size in sizes.items():
        for by in ROWS:
            file = pathlib.Path(sys.argv[2]).with_suffix(f".{len(rows)}.json")
            code = command(__file__, "row", str(file), by, json.dumps(size))
            row = {"model": name, "by": by, "exit": code, **(json.loads(file.read_text()) if file.exists() else {})}
            file.unlink(missing_ok=True)
            rows.append(row)
            found["rows"] = rows
            cells = [str(row.get(k, "")) for k in ("model", "by", "rate", "loss", "memory")]
            print("|", " | ".join(cells), "|", flush=True)
            pathlib.Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")  # if the time limit comes
    wrong = [f"{r['by']} of {r['model']}" for r in rows if r["exit"]]
    for name in sizes:
        losses = [r["loss"] for r in rows if r["model"] == name and "loss" in r and "bf16" not in r["by"]]
        if losses and max(losses) - min(losses) > 0.02 * max(losses):
            wrong.append(f"losses of {name} differ: {losses}")
    print(f"summary: {len(rows)} rows{''.join(f'; {w}' for w in wrong)}")
    return len(wrong)


def row(found: Found) -> int:
    """One row of `training`: rate, loss and memory."""
    from tests.training import peers

    by, (layers, width, heads, tokens, count, vocabulary) = sys.argv[3], json.loads(sys.argv[4])
    model = peers.bert(layers, width, heads, tokens, count, vocabulary)
    with cupy_here() if "CuPy" in by else contextlib.nullcontext():
        device = DEVICES["xla"]
        makers: dict[str, Callable[[], Callable[[Any], Any]]] = {
            "XRT on XLA": lambda: peers.by_xrt(model, "xla", device=device)[0],
            "XRT on XLA, bf16": lambda: peers.by_xrt(model, "xla", device=device, precision="bf16")[0],
            "JAX by hand": lambda: peers.by_jax(model),
            "JAX by hand, highest": lambda: by_jax_highest(model),
            "op by op (CuPy)": lambda: peers.by_xrt(model, "host", device="cuda")[0],
        }
        step = makers[by]()
        losses = [float(step(model.batch(k))) for k in range(3)]
        start, steps = time.perf_counter(), 0
        while steps < 10 and time.perf_counter() - start < 8:
            losses.append(float(step(model.batch(len(losses)))))
            steps += 1
        found["rate"] = round(count * steps / (time.perf_counter() - start), 1)
        found["loss"], found["steps"] = round(losses[min(9, len(losses) - 1)], 5), steps
        found["memory"] = peak_memory(by)
    return 0


def by_jax_highest(model: Any) -> Callable[[Any], Any]:
    """JAX's step with products in float32, as XRT on XLA has them."""
    import jax

    from tests.training import peers

    jax.config.update("jax_default_matmul_precision", "highest")
    return peers.by_jax(model)


def peak_memory(by: str) -> int | None:
    """MiB of the GPU's memory that this process took at most."""
    if REHEARSAL:
        return None
    if "CuPy" in by:
        import cupy

        return int(cupy.get_default_memory_pool().total_bytes()) >> 20
    import jax

    return int((jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)) >> 20


_ALL = (what, smoke, tests, nodes, conformance, races, calls, models, compiled, training, row, broken)
STEPS = {f.__name__: f for f in _ALL}


def main() -> int:
    """Run the step that is named; write what it found."""
    name, file = sys.argv[1], pathlib.Path(sys.argv[2])
    found: Found = {}
    step = node_slice if name == "slice" else STEPS[name]
    try:
        return step(found)
    finally:
        if str(file) != os.devnull:
            file.write_text(json.dumps(found, indent=1, default=str), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())

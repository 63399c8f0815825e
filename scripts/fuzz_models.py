"""Runs mutated models and files on the host and on every engine through the guard, and prints what surprises.

    python scripts/fuzz_models.py [--models 20000] [--files 5000] [--seed 0] [--engines a,b] [--workers 1]
    python scripts/fuzz_models.py --only 1234,1240          # these cases of a seed, again
    python scripts/fuzz_models.py --replay FOLDER ...       # kept findings, again

A case is made of its seed and number alone: one of ONNX's node tests, or a random graph (tests/random_graphs.py), with
one to three mutations of structure, attributes, types, weights, domains, opsets, names, functions, subgraphs or
external data; or a damaged file. It runs in a worker process with limits of time and memory: on the host, then on each
engine, which must be verified before it answers, and is compared with the host at every call. Findings are: the end of
the process, a hang, an exception that is no XRTError, an InternalError, more memory than the limit, an error on one
side only, and results that differ. A worker that ends or hangs is replaced, and its case runs again with compilation
in the guard's own worker (`guard_sandbox`): what that holds is counted, and is no finding. Findings are kept in
`--out`. Exit status 1 where there are any.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, Final

ROOT: Final = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from xrt_core.testing.fuzz import node_tests, run_all  # noqa: E402
from xrt_core.testing.mutations import Base, Case, has_loop, model_case  # noqa: E402

_RANDOM_GRAPHS: Final = 300


def make_case(task: str, number: int, seed: int, engines: Sequence[str]) -> Case:
    """The model or the file of a number."""
    if task == "model":
        return model_case(corpus(), seed, number)
    return file_case(corpus(), saved_files(tuple(engines)), seed, number)


@functools.cache
def corpus() -> list[Base]:
    """Node tests, and random graphs."""
    return [*node_tests(), *_random_graphs()]


def _random_graphs() -> Iterator[Base]:
    from hypothesis import HealthCheck, Phase, given, seed, settings

    from tests.random_graphs import RandomGraph, graphs
    from xrt_core.frontends.onnx_export import export_model

    made: list[RandomGraph] = []

    @seed(0)
    @settings(
        max_examples=_RANDOM_GRAPHS, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(graphs(minimum=3))
    def collect(g: RandomGraph) -> None:
        made.append(g)

    collect()
    for i, g in enumerate(made):
        model = export_model(g.graph)
        yield Base(f"random graph {i}", model, dict(zip((v.name for v in g.graph.inputs), g.arrays, strict=True)))


def file_case(bases: Sequence[Base], saved: Sequence[tuple[str, bytes]], seed: int, number: int) -> Case:
    """The damaged file of a number: an ONNX model, a saved module or a repro bundle."""
    from tests.test_decoding import container_contents, damaged

    r = random.Random(f"file {seed} {number}")
    base = r.choice(bases)
    while has_loop(base.model):  # which may rightly never end, once the count of its turns is another
        base = r.choice(bases)
    kind, whole = r.choice(saved) if r.random() < 0.5 else ("onnx", base.model.SerializeToString())
    if kind == "xrt" and r.random() < 0.5:
        (content,) = r.sample(list(container_contents(whole, r.randrange(1 << 30), 1)), 1)
    else:
        content = whole
        for _ in range(r.choice((1, 1, 2, 4))):
            content = next(damaged(content or b"x", r, 1))
    inputs = base.inputs if kind == "onnx" else {}
    return Case(f"{kind} of {base.name}" if kind == "onnx" else kind, content, [dict(inputs)], kind)


@functools.cache
def saved_files(engines: tuple[str, ...]) -> list[tuple[str, bytes]]:
    """A module saved for each engine, and a bundle."""
    from xrt_core.engine.contract import CompileOptions
    from xrt_core.module import XRTModule
    from xrt_core.testing import functions
    from xrt_core.verify.inputs import synthesize_inputs
    from xrt_core.verify.repro import Bundle, write_bundle

    function, _ = functions.chain()
    inputs = tuple(synthesize_inputs(function))
    found = []
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "m")
        for engine in ("host", *engines):
            m = XRTModule(function.body, engine=engine, guard=False, cache=False, prune=False)
            m(*inputs)
            m.save(path)
            found.append(("xrt", path.read_bytes()))
        write_bundle(Bundle(function, "acme", "cpu", CompileOptions(), "wrong", "it is", inputs, {}, "log"), path)
        found.append(("bundle", path.read_bytes()))
    return found


def installed() -> list[str]:
    """Engines on a CPU that are ready here."""
    import importlib.util

    return [
        name for name, library in (("onnxruntime", "onnxruntime"), ("openvino", "openvino"), ("xla", "jax"))
        if importlib.util.find_spec(f"xrt_{name}") and importlib.util.find_spec(library)
    ]  # fmt: skip


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--models", type=int, default=20_000)
    parser.add_argument("--files", type=int, default=5_000)
    parser.add_argument("--first", type=int, default=0, help="the number to begin with")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engines", help="default: those that are installed; 'none' for the host alone")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("fuzz-findings"))
    parser.add_argument("--only", help="numbers of models")
    parser.add_argument("--replay", nargs="+", help="folders of kept findings")
    args = parser.parse_args()
    engines = installed() if not args.engines else [e for e in args.engines.split(",") if e != "none"]
    tasks: list[tuple[str, Any]] = [("model", i) for i in range(args.first, args.first + args.models)]
    tasks += [("file", i) for i in range(args.first, args.first + args.files)]
    if args.only:
        tasks = [("model", int(i)) for i in args.only.split(",")]
    elif args.replay:
        tasks = [("replay", str(pathlib.Path(f).resolve())) for f in args.replay]
    sums = run_all(tasks, seed=args.seed, engines=engines, out=args.out, workers=args.workers, make=make_case)
    print(", ".join(f"{n} {what}s, of which {sums.loaded[what]} load" for what, n in sums.cases.items()))
    for who in ("host", *engines):
        print(
            f"{who}: {sums.ran[who]} calls with results; clusters: {sums.live[who]} live, {sums.rejected[who]} rejected"
        )
    print(f"{len(sums.held)} ended or hung a worker, and not through the guard's own; {sums.findings or 'no'} findings")
    return 1 if sums.findings else 0


if __name__ == "__main__":
    sys.exit(main())

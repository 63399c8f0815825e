"""Every operator of torch's own test suite (`op_db`) through the backend, and the table of docs/torch-operators.md.

    python -m xrt_torch.conformance --log ops.jsonl [NAME ...]          # run, half an hour on two cores
    python -m xrt_torch.conformance --log ops.jsonl --table docs/torch-operators.md   # from a log

Samples are those of `OpInfo.sample_inputs`. Each is captured by AOTAutograd, as `torch.compile` does, translated, run
by XRT's host and compared with torch eager, forward and, where torch differentiates the operator, backward. Needs the
package expecttest, as torch's test suite does.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import json
import logging
import os
import pathlib
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from xrt_torch.backend import captured
from xrt_torch.compiled import CompiledGraph
from xrt_torch.linear_algebra import MOST
from xrt_torch.partition import AT_BORDER, CHECKS

DTYPES: Final = ("float32", "int64", "bool", "bfloat16", "float16")
_SAMPLES: Final = 3
_SECONDS: Final = 120  # for the samples of one dtype
_UNCAPTURED: Final = ("DynamicOutputShapeException", "DataDependentOutputException")
_UNSET: Final = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted")
"""Operators whose results are whatever the memory holds."""
_ANY_OF_EQUAL: Final = ("argsort", "kthvalue", "masked.median", "median", "mode", "msort", "nanmedian", "sort", "topk")
"""Operators that may give the place of any of equal elements, and torch's kernels do. They get different elements, but
for the mode; where they are equal nevertheless, only the values are compared, which come first."""


def operators() -> dict[str, Any]:
    """Name, with the variant, -> OpInfo. Imports torch's test helpers, which change the process: in one of its own."""
    if sys.version_info < (3, 12):  # torch's tests import setuptools, which may refuse where distutils came first
        os.environ.setdefault("SETUPTOOLS_USE_DISTUTILS", "stdlib")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db

    return {f"{o.name}.{o.variant_test_name}" if o.variant_test_name else o.name: o for o in op_db}


def outcome_of(info: Any, dtype: torch.dtype, samples: int = _SAMPLES) -> dict[str, Any]:
    """What becomes of an operator's samples of one dtype.

    samples: how many were run, forward / backward; eager: reasons for nodes that torch ran; fallen: reasons for which
    graphs became eager, or calls differed from eager's; uncaptured: why AOTAutograd makes no graph of a sample (its
    shapes depend on data: a graph break of TorchDynamo); captured: differences that AOTAutograd's graphs of torch's own
    operators, none of them decomposed, have in eager as well. Samples that torch eager refuses do not count.
    """
    found: dict[str, Any] = {"samples": 0, "backward": 0, "nodes": 0, "eager": [], "fallen": []}
    found |= {"captured": [], "uncaptured": []}
    for sample in _some(info, dtype, samples):
        leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        at = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
        if any(leaves[i].layout is not torch.strided for i in at):
            continue

        def function(*tensors: Any, leaves: Any = leaves, spec: Any = spec, at: Any = at) -> Any:
            filled = list(leaves)
            for i, t in zip(at, tensors, strict=True):
                filled[i] = t
            first, args, kwargs = pytree.tree_unflatten(filled, spec)
            return info(first, *args, **kwargs)

        given = [leaves[i].detach().clone() for i in at]
        if info.name in _ANY_OF_EQUAL and info.name != "mode":
            given[0] = _different(given[0])
        compared = None
        if info.name in _ANY_OF_EQUAL and given[0].unique().numel() < given[0].numel():
            compared = 0 if info.name == "argsort" else 1
        differentiable = info.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
        _run(info, function, given, found, backward=bool(differentiable), compared=compared)
    for part in ("eager", "fallen", "captured", "uncaptured"):
        found[part] = sorted(set(found[part]))
    return found


def _some(info: Any, dtype: torch.dtype, count: int) -> list[Any]:
    """Samples from the beginning, the middle and the end of the first few."""
    some = list(itertools.islice(info.sample_inputs("cpu", dtype, requires_grad=False), 24))
    return (
        [some[i] for i in sorted({round(k * (len(some) - 1) / max(count - 1, 1)) for k in range(count)})]
        if some
        else []
    )


def _different(x: torch.Tensor) -> torch.Tensor:
    """A tensor like x of integers around zero that are all different, if x's type has so many; else x."""
    order = torch.randperm(x.numel(), generator=torch.Generator().manual_seed(0)) - x.numel() // 2
    made = order.to(x.dtype)
    return made.reshape(x.shape) if torch.equal(made.to(order.dtype), order) else x


def _run(
    info: Any, function: Any, given: list[Any], found: dict[str, Any], *, backward: bool, compared: int | None
) -> None:
    """Run one sample, and note what becomes of it. compared: how many of the results are, without gradients; None for
    all, with gradients."""

    def tensors() -> list[Any]:
        made = [t.clone() for t in given]
        for t in made:
            if backward and t.is_floating_point():
                t.requires_grad_()
        return made

    def seeded(call: Any) -> tuple[list[Any], list[Any]]:
        torch.manual_seed(42)  # what torch's own tests of random operators set within the call
        args = tensors()
        results = pytree.tree_leaves(call(*args))
        own = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
        gradients: list[Any] = []
        if own:
            weights = [
                torch.linspace(0.5, 1.5, r.numel(), dtype=torch.float64).reshape(r.shape).to(r.dtype) for r in own
            ]
            wanted = [t for t in args if t.requires_grad]
            gradients = list(torch.autograd.grad(own, wanted, weights, allow_unused=True))
        return [r.detach() if isinstance(r, torch.Tensor) else r for r in results], gradients

    try:
        expected = seeded(function)
    except Exception:
        if backward:
            _run(info, function, given, found, backward=False, compared=compared)
        return
    graphs: list[CompiledGraph] = []
    call = captured(function, {"engine": "host"}, graphs)
    try:
        for _ in range(2):
            results = seeded(call)
    except Exception as e:
        where = "uncaptured" if type(e).__name__ in _UNCAPTURED or "Sparse" in str(e) else "fallen"
        found[where].append(f"{type(e).__name__}: {str(e).strip().splitlines()[0][:200]}")
        return
    found["samples"] += 1
    found["backward"] += bool(expected[1])
    for g in graphs:
        found["nodes"] += sum(n.op == "call_function" for n in g.module.graph.nodes)
        found["eager"] += [f"{g.kind}: {why}" for why in g.eager_nodes.values()]
        if g.reason is not None:
            found["fallen"].append(f"{g.kind}: {g.reason}")
    if info.name in _UNSET:
        return
    if compared is not None:
        results, expected = (results[0][:compared], []), (expected[0][:compared], [])
    wrong = _mismatch(results, expected)
    if wrong and compared is None and not _mismatch(results, seeded(captured(function, None, []))):
        found["captured"].append(wrong)
    elif wrong:
        found["fallen"].append(wrong)


def _mismatch(results: Sequence[Sequence[Any]], expected: Sequence[Sequence[Any]]) -> str:
    """How results and gradients differ; "" where they do not."""
    for part, a, b in zip(("results", "gradients"), results, expected, strict=True):
        for x, y in zip(a, b, strict=True):
            if isinstance(y, torch.Tensor) and y.dtype in (torch.float16, torch.bfloat16):
                there = torch.isfinite(y)  # what overflows may be computed in wider floats
                x, y = x[there], y[there]
            try:
                torch.testing.assert_close(x, y, **_close(y), equal_nan=True)
            except AssertionError as e:
                return f"{part}: {str(e).strip()[:300]}"
    return ""


def _close(expected: Any) -> dict[str, Any]:
    """Tolerances, the absolute one relative to the largest number."""
    if isinstance(expected, torch.Tensor) and expected.dtype.is_complex:
        expected = torch.view_as_real(expected.detach().resolve_conj())
    if not isinstance(expected, torch.Tensor) or not expected.dtype.is_floating_point:
        return {"rtol": 0, "atol": 0}
    finite = expected[torch.isfinite(expected)].abs().double()
    largest = float(finite.max()) if finite.numel() else 0.0
    limit = {torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.float64: 1e-9}.get(expected.dtype, 1e-3)
    return {"rtol": limit, "atol": limit * max(largest, 0.1)}


@contextlib.contextmanager
def _limited(seconds: int) -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _work(names: Sequence[str], dtypes: Sequence[str], samples: int, log: pathlib.Path) -> None:
    """Run operators in this process, a line of JSON for each dtype, and one before it."""
    known = operators()
    logging.disable(logging.CRITICAL)
    with log.open("a", buffering=1) as file:
        for name in names:
            info = known[name]
            for d in dtypes:
                dtype = getattr(torch, d)
                if dtype not in info.supported_dtypes("cpu"):
                    continue
                file.write(json.dumps({"name": name, "dtype": d}) + "\n")
                start = time.perf_counter()
                try:
                    with _limited(_SECONDS), warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        found = outcome_of(info, dtype, samples)
                except Exception as e:
                    found = {"fallen": [f"raised {type(e).__name__}: {str(e)[:300]}"]}
                seconds = round(time.perf_counter() - start, 2)
                file.write(json.dumps({"name": name, "dtype": d, **found, "seconds": seconds}) + "\n")


def run(names: Sequence[str], dtypes: Sequence[str], log: pathlib.Path, samples: int = _SAMPLES) -> None:
    """Run operators in a process of its own; one that ends the process is a crash, and the rest goes on."""
    left = [n for n in names if n not in {r["name"] for r in read(log)}]
    while left:
        command = [sys.executable, "-m", "xrt_torch.conformance", "--worker", "--log", str(log)]
        command += ["--dtypes", ",".join(dtypes), "--samples", str(samples), *left[:60]]
        done = subprocess.run(command, check=False)
        finished, begun = _lines(log)
        for name, d in begun - set(finished):
            with log.open("a") as file:
                fallen = [f"the process ended with {done.returncode}"]
                file.write(json.dumps({"name": name, "dtype": d, "fallen": fallen, "crash": True, "seconds": 0}) + "\n")
        known = {n for n, _ in begun}
        tried = [n for n in left[:60] if n in known] if done.returncode else left[:60]
        if not tried:
            raise SystemExit(f"the worker ended with {done.returncode} before its first operator")
        left = [n for n in left if n not in tried]


def _lines(log: pathlib.Path) -> tuple[dict[tuple[str, str], dict[str, Any]], set[tuple[str, str]]]:
    finished: dict[tuple[str, str], dict[str, Any]] = {}
    begun = set()
    for line in log.read_text().splitlines() if log.exists() else ():
        row = json.loads(line)
        key = row["name"], row["dtype"]
        begun.add(key)
        if "seconds" in row:
            finished[key] = row
    return finished, begun


def read(log: pathlib.Path) -> list[dict[str, Any]]:
    """The outcomes in a log; of several of the same operator and dtype the last."""
    return list(_lines(log)[0].values())


def kind_of(rows: Iterable[dict[str, Any]], backward: bool = True) -> str:
    """What becomes of an operator.

    "xrt": XRT runs all of it, but for what is torch's: it draws random numbers, takes complex numbers apart and puts
    them together, and raises errors; "part": some of it runs in torch; "torch": it is not captured, or all of it runs
    in torch; "wrong": a graph fell back, or results differed.
    backward: whether the gradients count.
    """
    rows = list(rows)
    if any(r["fallen"] for r in rows):
        return "wrong"
    reasons = [e for r in rows for e in r.get("eager", ()) if backward or not e.startswith("backward")]
    if any(r.get("uncaptured") for r in rows):
        return "torch"
    reasons = [e for e in reasons if not any(why in e for why in ("random numbers", AT_BORDER, CHECKS))]
    return "part" if reasons else "xrt"


def table(rows: Iterable[dict[str, Any]]) -> str:
    """The page docs/torch-operators.md."""
    by_name: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    for row in rows:
        if row.get("samples", 1) or row.get("uncaptured"):
            by_name[row["name"]].append(row)
    kinds = {n: kind_of(r) for n, r in sorted(by_name.items())}
    forward = sum(kind_of(r, backward=False) == "xrt" for r in by_name.values())
    whole = [n for n, k in kinds.items() if k == "xrt"]
    drawn = [n for n in whole if any("random numbers" in e for r in by_name[n] for e in r.get("eager", ()))]
    samples = sum(r.get("samples", 0) for own in by_name.values() for r in own)
    text = [
        "# Operators of PyTorch",
        "",
        "Made by `python -m xrt_torch.conformance --log ops.jsonl --table docs/torch-operators.md` from a run of",
        "all of torch's operator tests (`op_db`, with variants), each with samples of float32, int64, bool, bfloat16",
        "and float16 where it takes them, forward and, where it has one, backward, on XRT's host: "
        f"{len(kinds)} operators, {samples} samples, torch {torch.__version__.partition('+')[0]}.",
        "",
        "| | operators | of all |",
        "|---|---|---|",
        f"| XRT runs all of it, forward | {forward} | {forward / len(kinds):.1%} |",
        f"| forward and backward, in every dtype | {len(whole)} | {len(whole) / len(kinds):.1%} |",
    ]
    names = {
        "part": "some samples, or the backward pass, have nodes in torch",
        "torch": "not captured: torch",
        "wrong": "wrong, or fallen back",
    }
    text += [
        f"| {names[k]} | {list(kinds.values()).count(k)} | {list(kinds.values()).count(k) / len(kinds):.1%} |"
        for k in names
    ]
    text += [
        "",
        f"Of {len(drawn)} the random numbers are drawn by torch, so that a seed gives eager's: {', '.join(drawn)}.",
        *_not_compared(by_name),
        "",
        f"Linear algebra is XRT's for matrices of up to {MOST} rows and columns, which torch's samples have.",
        "",
        "## Run by XRT",
        "",
        ", ".join(n for n in whole if n not in drawn) + ".",
        "",
        "## With nodes in torch",
        "",
        "| operator | runs in torch, and why |",
        "|---|---|",
    ]
    for name, kind in kinds.items():
        if kind == "xrt":
            continue
        reasons = [e for r in by_name[name] for e in (*r.get("eager", ()), *r.get("uncaptured", ()), *r["fallen"])]
        text.append(f"| {name} | {_shortened(reasons)} |")
    return "\n".join(text) + "\n"


def _not_compared(by_name: dict[str, list[dict[str, Any]]]) -> list[str]:
    names = [n for n, rows in sorted(by_name.items()) if any(r.get("captured") for r in rows)]
    if not names:
        return []
    return ["", "AOTAutograd's own graphs, run in eager, differ from eager in samples of: " + ", ".join(names) + "."]


def _shortened(reasons: Iterable[str]) -> str:
    """Reasons without what repeats: of complex numbers the operators are left out."""
    short = []
    for r in reasons:
        r = r.partition(": Error when calling")[0] if ": Error when calling" in r else r
        kind, _, rest = r.partition(": ")
        rest = "complex numbers" if rest.endswith("complex numbers") else rest
        rest = rest.replace(": torchlib has no translation of it", "").replace("aten.", "").replace("|", "/")
        if not any(why in rest for why in ("random numbers", CHECKS, AT_BORDER)):
            short.append(
                f"{rest} (backward)" if kind == "backward" else rest if kind in ("forward", "inference") else r
            )
    found = list(dict.fromkeys(short))
    plain = [f for f in found if not (f.endswith(" (backward)") and f.removesuffix(" (backward)") in found)]
    return ", ".join(plain[:5]) + (", ..." if len(plain) > 5 else "")


def main() -> None:
    """Run, or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--log", type=pathlib.Path, required=True)
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--samples", type=int, default=_SAMPLES, help="of each dtype")
    parser.add_argument("--table", type=pathlib.Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--part", default="0/1", help="the K-th of N parts of the operators, from 0, as K/N")
    args = parser.parse_args()
    dtypes = args.dtypes.split(",")
    if args.worker:
        _work(args.names, dtypes, args.samples, args.log)
        return
    if args.table is None:
        k, n = map(int, args.part.split("/"))
        if not 0 <= k < n:
            parser.error(f"--part {args.part}: K is 0 to N - 1")
        run(args.names or list(operators())[k::n], dtypes, args.log, args.samples)
    else:
        args.table.write_text(table(read(args.log)))
    by_name = collections.defaultdict(list)
    for row in read(args.log):
        by_name[row["name"]].append(row)
    print(collections.Counter(kind_of(rows) for rows in by_name.values()))


if __name__ == "__main__":
    main()

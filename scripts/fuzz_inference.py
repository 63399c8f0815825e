"""Gives random nodes, operator by operator, to type inference in a child process, and prints what ends, hangs or
surprises it.

    python scripts/fuzz_inference.py [--tries 300] [--seed 0] [OPERATOR ...]

Anything but types or a ShapeError is a finding. A child that dies or exceeds its time is replaced, and the next
operator goes on. Exit status 1 where there are findings.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from xrt_core.errors import ShapeError, XRTError
from xrt_core.ir.graph import Node, Value
from xrt_core.ir.inference import infer_types
from xrt_core.ir.schema import ATTRIBUTE_KINDS, latest_opset, schema_dtypes
from xrt_core.ir.types import TensorType

SECONDS = 20.0
"""An operator's nodes may take so long."""

_NUMBERS = (0, 1, 2, 3, -1, -2, 7, 2**31, 2**63 - 1, -(2**63))
_WORDS = ("", "SAME_UPPER", "linear", "...i...->", "ij,jk->ik", "i...->...", "->", "i", "bidirectional", "none")
_DIMS = (0, 1, 2, 3, 4, 5, 1 << 33, None, "n")
_ELSEWHERE = ("graph", "graphs", "sparse_tensor", "sparse_tensors", "type", "types", "tensors")


def operators() -> list[tuple[str, int]]:
    """Every operator of the standard with every version that is accepted, but for those with bodies."""
    import onnx

    found = []
    for s in onnx.defs.get_all_schemas_with_history():
        kinds = [ATTRIBUTE_KINDS[int(a.type.value)] for a in s.attributes.values()]
        if not s.domain and not s.deprecated and s.since_version <= latest_opset() and "graph" not in kinds:
            found.append((s.name, s.since_version))
    return sorted(found)


def random_node(op_type: str, version: int, rng: np.random.Generator) -> Node:
    """A node that has what its schema lists; its values, types and attributes are random."""
    import onnx

    schema = onnx.defs.get_schema(op_type, version, "")
    inputs: list[Value | None] = []
    count = int(rng.integers(schema.min_input, min(schema.max_input, schema.min_input + 3) + 1))
    rank = int(rng.integers(0, 6))
    for i in range(count):
        formal = schema.inputs[min(i, len(schema.inputs) - 1)]
        if i >= schema.min_input and rng.random() < 0.2:
            inputs.append(None)
            continue
        dtypes = sorted(schema_dtypes(formal.types), key=str) or [np.dtype(np.float32)]
        dtype = dtypes[rng.integers(len(dtypes))]
        if rng.random() < 0.4 and dtype.kind in "iuf" and dtype.itemsize >= 4:
            size = int(rng.integers(0, 5))
            choice = (*_NUMBERS, np.inf, np.nan) if dtype.kind == "f" else _NUMBERS
            values = np.array([float(choice[rng.integers(len(choice))]) for _ in range(size)])
            with np.errstate(all="ignore"):
                data = values.astype(dtype).reshape(() if size == 1 and rng.random() < 0.5 else (size,))
            inputs.append(Value(f"x{i}", TensorType(data.dtype, data.shape), data))
            continue
        dims = None
        if rng.random() < 0.9:
            own = rank if rng.random() < 0.8 else int(rng.integers(0, 6))
            dims = tuple(_DIMS[rng.integers(6 if rng.random() < 0.9 else len(_DIMS))] for _ in range(own))
        inputs.append(Value(f"x{i}", TensorType(dtype, dims)))
    attributes: dict[str, Any] = {}
    for name, a in schema.attributes.items():
        if a.required or rng.random() < 0.5:
            made = _attribute(name, ATTRIBUTE_KINDS[int(a.type.value)], rank, rng)
            if made is not None:
                attributes[name] = made
    outputs = int(rng.integers(schema.min_output, min(schema.max_output, schema.min_output + 3) + 1))
    results = [Value(f"y{i}") for i in range(outputs)]
    return Node(op_type, inputs, results, attributes, version=version, name="fuzz")


def _attribute(name: str, kind: str, rank: int, rng: np.random.Generator) -> Any:
    if kind in _ELSEWHERE:
        return None
    if kind == "tensor":
        return np.zeros(int(rng.integers(0, 3)), np.float32)
    plain = {"int": _int, "float": lambda r: float(r.normal()), "string": _word}[kind.rstrip("s")]
    if kind.endswith("s"):
        count = rank if rng.random() < 0.4 else max(rank - 2, 0) if rng.random() < 0.6 else int(rng.integers(0, 8))
        return tuple(plain(rng) for _ in range(count * 2 if name == "pads" and rng.random() < 0.7 else count))
    return plain(rng)


def _int(rng: np.random.Generator) -> int:
    return _NUMBERS[rng.integers(4 if rng.random() < 0.7 else len(_NUMBERS))]


def _word(rng: np.random.Generator) -> str:
    return _WORDS[rng.integers(len(_WORDS))]


def _child(pipe: Any, seed: int, tries: int) -> None:
    while True:
        op_type, version = pipe.recv()
        rng = np.random.default_rng([seed, version, *op_type.encode()])
        for _ in range(tries):
            node = random_node(op_type, version, rng)
            pipe.send(("try", describe(node)))
            try:
                infer_types(node)
            except ShapeError:
                pass
            except XRTError as e:
                pipe.send(("found", f"{type(e).__name__}: {e}"))
            except Exception as e:  # what inference may not raise
                pipe.send(("found", f"{type(e).__name__}: {e}"))
        pipe.send(("done", ""))


def describe(node: Node) -> str:
    """The node in one line, with the known values of its inputs."""
    given = ", ".join(
        "_" if v is None else f"{v.type}" + ("" if v.data is None else f" = {v.data.tolist()}") for v in node.inputs
    )
    return f"{node.op_type}-{node.version}({given}) -> {len(node.outputs)}; {dict(node.attributes)}"


def findings(chosen: list[tuple[str, int]], *, tries: int = 300, seed: int = 0) -> Iterator[str]:
    """What happened other than types or a ShapeError: a line for each operator and kind of error."""
    context = multiprocessing.get_context("spawn")
    seen: set[tuple[str, str]] = set()
    process: Any = None
    pipe: Any = None
    for operator in chosen:
        if process is None:
            pipe, theirs = context.Pipe()
            process = context.Process(target=_child, args=(theirs, seed, tries), daemon=True)
            process.start()
            theirs.close()
        pipe.send(operator)
        last, problem = "", ""
        try:
            while True:
                if not pipe.poll(SECONDS):
                    problem = f"no answer within {SECONDS:g} s"
                    break
                what, text = pipe.recv()
                if what == "done":
                    break
                if what == "try":
                    last = text
                elif (operator[0], text[:40]) not in seen:
                    seen.add((operator[0], text[:40]))
                    yield f"{last}: {text}"
        except EOFError:
            process.join()
            problem = f"the process ended with status {process.exitcode}"
        if problem:
            yield f"{last}: {problem}"
            process.kill()
            process = None
    if process is not None:
        process.kill()


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("operators", nargs="*")
    parser.add_argument("--tries", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    chosen = [o for o in operators() if not args.operators or o[0] in args.operators]
    count = 0
    for line in findings(chosen, tries=args.tries, seed=args.seed):
        print(line, flush=True)
        count += 1
    print(f"{len(chosen)} operators and versions, {args.tries} nodes each: {count or 'no'} findings")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())

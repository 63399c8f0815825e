"""What becomes of ONNX's node tests: the table in docs/tensorrt.md, made with what is installed.

python plugins/xrt-tensorrt/tests/node_table.py        # prints the table; takes about a minute
"""

from __future__ import annotations

import collections
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from xrt_tensorrt import TensorRTEngine

from xrt_core.engine.contract import CompileOptions, Function
from xrt_core.errors import XRTError
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.types import TensorType
from xrt_core.kernels import static_inputs
from xrt_core.testing.node_cases import Case, all_cases

TARGET = "sm_89"


@dataclass
class Row:
    """One operator.

    cases: tests. taken: `supports` says yes. built: an engine was built. by_body, by_kernel: of those taken, by the
    body that the standard gives the operator, and by an op kernel of this package.
    reasons: of those that are not taken, or not built, with their counts.
    """

    cases: int = 0
    taken: int = 0
    built: int = 0
    by_body: int = 0
    by_kernel: int = 0
    reasons: collections.Counter[str] = field(default_factory=collections.Counter)


def function_of(case: Case) -> Function:
    """The case's node as a function. Inputs that decide shapes, scales and zero points are constants, as in models."""
    known = set(static_inputs(case.node))
    if case.node.op_type in ("QuantizeLinear", "DequantizeLinear"):
        known |= {1, 2}
    inputs: list[Value | None] = []
    entries: list[Value] = []
    for i, (v, x) in enumerate(zip(case.node.inputs, case.inputs, strict=True)):
        if v is None:
            inputs.append(None)
        elif i in known and isinstance(x, np.ndarray):
            inputs.append(Value(f"c{i}", v.type, x))
        else:
            inputs.append(Value(f"x{i}", v.type))
            entries.append(inputs[-1])
    outputs = [None if v is None else Value(f"y{i}", v.type) for i, v in enumerate(case.node.outputs)]
    node = case.node.replace(inputs=inputs, outputs=outputs)
    opsets = {"": 21, **case.opsets}
    return Function.from_graph(Graph(entries, [v for v in outputs if v], [node], opsets=opsets, name=case.name))


def rows(cases: Iterable[Case], *, build: bool = True) -> dict[str, Row]:
    """What becomes of these cases, by operator."""
    from xrt_tensorrt.support import verdict

    engine = TensorRTEngine().targeting(TARGET)
    compiler = engine.compiler("cuda:0", CompileOptions())
    found: dict[str, Row] = collections.defaultdict(Row)
    for case in cases:
        row = found[case.node.operator]
        row.cases += 1
        function = function_of(case)
        node: Node = function.body.nodes[0]
        verdict_ = engine.supports(node, "cuda:0", "inference")
        if not verdict_:
            row.reasons[verdict_.reason] += 1
            continue
        row.taken += 1
        way = verdict(node).way
        row.by_body += way == "body"
        row.by_kernel += way == "kernel"
        if not build:
            continue
        try:
            compiler.compile(function, function.params, function.returns, ())
            row.built += 1
        except XRTError as e:
            row.reasons[f"not built: {e}"] += 1
    return dict(found)


def is_numeric(case: Case) -> bool:
    """Whether all its inputs and outputs are tensors of numbers."""
    values = [v for v in (*case.node.inputs, *case.node.outputs) if v is not None]
    return case.is_numeric and all(isinstance(v.type, TensorType) for v in values)


def short(reason: str) -> str:
    """A reason in a cell of a table."""
    for start in ("TensorRT's parser refuses ", "TensorRT makes something else of "):
        reason = reason.removeprefix(start)
    reason = reason.partition(": ")[2] if ": " in reason else reason
    reason = " ".join(reason.replace("|", "/").split())
    return reason if len(reason) <= 110 else reason[:107] + "..."


def table(found: dict[str, Row]) -> str:
    """The table in Markdown, one line for each operator, by name."""
    heads = ("operator", "tests", "taken", "built", "by its body", "by a kernel", "most frequent reason for the rest")
    lines = [f"| {' | '.join(heads)} |"]
    lines.append("|---|---|---|---|---|---|---|")
    for name, r in sorted(found.items()):
        reason = short(r.reasons.most_common(1)[0][0]) if r.reasons else ""
        cells = (name, r.cases, r.taken, r.built, r.by_body or "", r.by_kernel or "", reason)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    total = [sum(getattr(r, f) for r in found.values()) for f in ("cases", "taken", "built", "by_body", "by_kernel")]
    lines.append(f"| **all** | {' | '.join(f'**{n}**' for n in total)} | |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(rows(all_cases())))

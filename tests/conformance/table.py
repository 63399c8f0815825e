"""Writes docs/onnx-operators.md: what became of ONNX's node tests, by operator, on XLA with the host behind it.

    python -m tests.conformance.table
"""

from __future__ import annotations

import pathlib
from collections import defaultdict

import onnx

from tests.conformance.node_tests import Outcome, node_tests, run_test
from tests.conformance.test_onnx_nodes import expected_failures

_PAGE = pathlib.Path(__file__).parents[2] / "docs" / "onnx-operators.md"


def page(outcomes: list[Outcome]) -> str:
    """The page as Markdown."""
    by_operator: dict[str, list[Outcome]] = defaultdict(list)
    for o in outcomes:
        by_operator[o.operator].append(o)
    static = [o for o in outcomes if o.static]
    clean = [o for o in static if o.passed and not o.host]
    lines = [
        "# ONNX operators",
        "",
        f"ONNX's own node tests (onnx {onnx.__version__}) through XRT, engine XLA with the host behind it. Written by",
        "`python -m tests.conformance.table`.",
        "",
        f"- {sum(o.passed for o in outcomes)} of {len(outcomes)} pass.",
        f"- Of the {len(static)} tests with static numeric tensors only, {len(clean)} "
        f"({len(clean) / len(static):.1%}) run",
        "  with no node on the host.",
        "",
        "Given up:",
        "",
        *[f"- `{name}`: {reason}" for name, reason in sorted(expected_failures().items())],
        "",
        "| operator | tests | pass | wholly on XLA | why nodes stay on the host |",
        "|---|---|---|---|---|",
    ]
    for operator, found in sorted(by_operator.items()):
        reasons = dict.fromkeys(r.replace("|", "/") for o in found for r in o.reasons)
        shown = "; ".join(list(reasons)[:2])
        engine = sum(o.passed and not o.host for o in found)
        lines.append(f"| {operator} | {len(found)} | {sum(o.passed for o in found)} | {engine} | {shown} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    _PAGE.write_text(page([run_test(t, ["xla"]) for t in node_tests().values()]))

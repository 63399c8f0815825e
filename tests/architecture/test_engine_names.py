"""No engine's name in the core: what belongs to one engine is declared by its package."""

from __future__ import annotations

import io
import pathlib
import re
import tokenize
from collections.abc import Iterator

import pytest

from tests.architecture.source import CORE, sources

NAMES = re.compile(
    r"(?i:tensorrt|openvino|onnx[ _-]?runtime)"
    r"|(?<![A-Za-z])(?:xla|XLA|Xla|toy|TOY|Toy)(?![a-z])"  # not the xla of xlabel, nor the tory of history
    r"|(?<=[a-z])(?:Xla|Toy)(?![a-z])"
)
# (file, word) -> why it may say so: the library is meant, not the engine.
ALLOWED = {
    ("passes/mixed_precision_ops.py", "ONNX Runtime"): "the source of a list of operators",
    ("ir/schema.py", "onnxruntime"): "the package that has a domain's operators, and the function that takes it",
    ("cli/cuda_report.py", "onnxruntime"): "two wheels of the library that exclude one another",
    ("quantization/qdq.py", "onnxruntime"): "its quantisation library makes the Q/DQ nodes; it is an extra of the core",
    ("quantization/qdq.py", "TensorRT"): "the source of what Q/DQ nodes must look like",
}


def names(text: str) -> Iterator[tuple[int, str]]:
    """Line and word of every engine's name in a source: identifiers, string constants, docstrings and comments."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        for found in NAMES.finditer(token.string):
            yield token.start[0] + token.string[: found.start()].count("\n"), found[0]


def checked() -> list[pathlib.Path]:
    return [p for p in sources(CORE) if p.relative_to(CORE).parts[0] != "testing"]


def test_the_core_names_no_engine() -> None:
    """Priorities, switches, defaults and messages about one engine are declared by its package."""
    found = [(p.relative_to(CORE).as_posix(), n, w) for p in checked() for n, w in names(p.read_text("utf-8"))]
    bad = [f"{file}:{line} says {word!r}" for file, line, word in found if (file, word) not in ALLOWED]
    assert not bad, "\n".join(bad)
    assert set(ALLOWED) <= {(file, word) for file, _, word in found}, "an allowance that nothing needs any more"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("use_xla_jit = 1", ["xla"]),
        ("class XlaEngine: ...", ["Xla"]),
        ("def f():\n    '''For ToyEngine.'''\n", ["Toy"]),
        ("x = 'ONNX Runtime'  # TensorRT", ["ONNX Runtime", "TensorRT"]),
        ("print(f'{a} on OpenVINO')", ["OpenVINO"]),
        ("axes.set(xlabel=history)", []),
    ],
)
def test_the_reader_sees_every_form(text: str, found: list[str]) -> None:
    """Identifiers, class names, docstrings, strings, comments; and not the same letters in other words."""
    assert [w for _, w in names(text)] == found

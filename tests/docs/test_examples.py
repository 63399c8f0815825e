"""The examples of README.md and docs/*.md, found by sybil: each is run, is a piece of a file, or says why not.

The blocks of a page run one after the other in one namespace, in which `SETUP` has put what the page takes as given. A
block of text behind a block of Python is what that prints. A block below the path of a file is a piece of that file. A
comment `<!-- skip: next "REASON" -->` leaves the next block out.
"""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import re
import tempfile
import tomllib
import unittest
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from sybil import Document, Example
from sybil.parsers.markdown import CodeBlockParser, SkipParser

import xrt_core as xrt
from tests.architecture.source import ROOT

_HAS_DEVICES = "host_platform_device_count=4" in os.environ.get("XLA_FLAGS", "")
"""Whether this process is one of `tests/devices`, which runs the page whose examples need several devices."""
PAGES = [p for p in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if "```python" in p.read_text("utf-8")]
PAGES = [p for p in PAGES if (p.name == "devices.md") is _HAS_DEVICES]
LONG = ("debugging.md", "first-model.md", "generation.md", "metrics.md", "pytorch.md", "training.md")
_PATH = re.compile(r"`([\w./-]+/[\w./-]+)`\n\n$")
X = np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32)


def write_model(path: pathlib.Path) -> None:
    """A convolution and a classifier of ten classes, for any number of images."""
    rng = np.random.default_rng(0)
    weights = {"conv.w": (4, 3, 3, 3), "classifier.w": (144, 10)}
    made = [numpy_helper.from_array(rng.standard_normal(s).astype(np.float32), n) for n, s in weights.items()]
    nodes = [
        helper.make_node("Conv", ["x", "conv.w"], ["c"], name="encoder/conv"),
        helper.make_node("Relu", ["c"], ["r"], name="encoder.0/relu"),
        helper.make_node("Flatten", ["r"], ["f"], name="flatten"),
        helper.make_node("MatMul", ["f", "classifier.w"], ["s"], name="head/scores"),
        helper.make_node("Softmax", ["s"], ["y"], name="head/softmax"),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 8, 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 10])
    graph = helper.make_graph(nodes, "model", [x], [y], made)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)


@contextlib.contextmanager
def converters_page(names: dict[str, Any]) -> Iterator[None]:
    """An identity of vectors to call with; what the page registers goes again."""
    from xrt_core.engine import Engine, hookimpl
    from xrt_core.engine.converters import converters

    names["m"] = xrt.XRTModule(lambda x: -x, engine="host")
    names |= {"Engine": Engine, "hookimpl": hookimpl, "to_numpy": np.asarray}
    yield
    np.testing.assert_array_equal(names["y"].values, [-1, 2, -3])
    converters.unregister("xla", "openvino")
    converters.unregister_type(names["RaggedTensor"])


@contextlib.contextmanager
def partitioning_page(names: dict[str, Any]) -> Iterator[None]:
    """The pass that the page registers goes again."""
    names["pathlib"] = pathlib
    yield
    xrt.unregister_pass("fuse_gelu")


@contextlib.contextmanager
def operators_page(names: dict[str, Any]) -> Iterator[None]:
    """The operators that the page defines go again."""
    yield
    for name in ("swish", "ranks"):
        names[name].remove()


@contextlib.contextmanager
def training_page(names: dict[str, Any]) -> Iterator[None]:
    """Batches of digits; the gradient that the page registers goes again."""
    from xrt_core.training import registry

    rng = np.random.default_rng(0)
    names["batches"] = [(rng.random((4, 64), np.float32), np.arange(4)) for _ in range(2)]
    names |= {"images": rng.random((40, 3, 8, 8), np.float32), "classes": np.arange(40) % 10}
    yield
    del registry._RULES["my.domain", "MyOperator"]


@contextlib.contextmanager
def shapes_page(names: dict[str, Any]) -> Iterator[None]:
    """The model that the page loads is a small one, in a folder that goes again."""
    from tests.shapes.models import attention

    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        pathlib.Path("encoder.onnx").write_bytes(attention())
        yield
    assert names["m"].input_types


@contextlib.contextmanager
def generation_page(names: dict[str, Any]) -> Iterator[None]:
    """The model that the page loads is a small one, in a folder that goes again."""
    from tests.generation.models import decoder

    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        onnx.save(decoder(), "decoder.onnx")
        yield
    assert names["m"].input_types


@contextlib.contextmanager
def pytorch_page(names: dict[str, Any]) -> Iterator[None]:
    """Skip without torch; its own warnings are not the page's, and its numbers start as in a new process."""
    torch: Any = pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    import itertools

    from xrt_torch import compiled

    compiled._numbers = itertools.count()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.reset()


@contextlib.contextmanager
def guarded_page(names: dict[str, Any]) -> Iterator[None]:
    """What the page shows is the guard's, which the tests' default is without."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("XRT_GUARD")
        yield


SETUP: dict[str, Callable[[dict[str, Any]], contextlib.AbstractContextManager[None]]] = {
    "converters.md": converters_page,
    "debugging.md": guarded_page,
    "first-model.md": guarded_page,
    "generation.md": generation_page,
    "metrics.md": guarded_page,
    "operators.md": operators_page,
    "pytorch.md": pytorch_page,
    "partitioning.md": partitioning_page,
    "shapes.md": shapes_page,
    "training.md": training_page,
}


def source_of(example: Example) -> str:
    """The block as it stands, its indentation included."""
    return example.document.text[example.start : example.end].split("\n", 1)[1].rpartition("```")[0]


def run(example: Example) -> None:
    """Run a block of Python, keeping what it prints; a block below a file's name is a piece of that file."""
    before = example.document.text[: example.start]
    if found := _PATH.search(before):
        assert source_of(example) in (ROOT / found[1]).read_text("utf-8"), f"{found[1]} has changed"
        return
    printed = io.StringIO()
    code = compile("\n" * example.line + example.parsed, example.path, "exec")
    with contextlib.redirect_stdout(printed):
        exec(code, example.namespace)
    example.namespace["printed"] = (example.end, printed.getvalue())


def compare(example: Example) -> None:
    """What a block printed is the text right behind it."""
    end, printed = example.namespace.get("printed", (0, ""))
    if not example.document.text[end : example.start].strip():
        assert printed == example.parsed


def piece(example: Example) -> None:
    """A block of TOML can be read, and below a file's name is a piece of that file."""
    tomllib.loads(example.parsed)
    if found := _PATH.search(example.document.text[: example.start]):
        assert source_of(example) in (ROOT / found[1]).read_text("utf-8"), f"{found[1]} has changed"


PARSERS = (
    CodeBlockParser("python", run),
    CodeBlockParser("text", compare),
    CodeBlockParser("toml", piece),
    SkipParser(),
)


@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=pytest.mark.slow if p.name in LONG else ()) for p in PAGES], ids=lambda p: p.name
)
def test_the_examples_of_a_page(page: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block runs, prints what the page says, and is a piece of the file that is named above it."""
    pytest.importorskip("jax", reason="the examples use the XLA engine")
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model.onnx")
    document = Document.parse(str(page), *PARSERS)
    names = document.namespace
    if page.name != "README.md":  # whose examples are complete
        names |= {"xrt": xrt, "np": np, "XRTModule": xrt.XRTModule, "x": X, "batches": [X, X]}
        names |= {"model": "model.onnx", "m": xrt.XRTModule("model.onnx", engine="xla")}
    with SETUP.get(page.name, contextlib.nullcontext)(names):
        for example in document.examples():
            with contextlib.suppress(unittest.SkipTest):  # sybil's, with the reason that the page gives
                example.evaluate()


def test_what_is_skipped_has_a_reason() -> None:
    """Every directive that leaves a block out says why."""
    for page in PAGES:
        for directive in re.findall(r"<!--+ *skip:.*?-->", page.read_text("utf-8"), re.DOTALL):
            assert re.search(r'skip: next "[^"]{10,}"', directive), f"{page.name}: {directive}"

"""The direction of imports, read from the source and held against docs/architecture.md."""

from __future__ import annotations

import ast
import re

import pytest

from tests.architecture.source import CORE, ROOT, imports, imports_in, sources, unit, unit_of

# What each part of the core may import, beside itself. The table of docs/architecture.md, "Layers", is the same.
GROUND = {"errors", "events", "files", "plugins"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "events": {"errors"},
    "files": {"errors"},
    "progress": GROUND,
    "plugins": {"errors", "events"},
    "ir": GROUND,
    "options": GROUND | {"ir"},
    "kernels": GROUND | {"ir"},
    "frontends": GROUND | {"ir", "kernels"},
    "passes": GROUND | {"ir"},
    "host": GROUND | {"ir", "kernels", "engine", "runtime"},
    "engine": GROUND | {"ir", "kernels", "frontends", "options"},
    "engines": {"engine"},
    "reports": GROUND | {"ir", "passes"},
    "explanation": GROUND | {"ir", "passes", "reports"},
    "cache": GROUND | {"ir", "engine"},
    "runtime": GROUND | {"ir", "engine", "cache"},
    "verify": GROUND | {"ir", "kernels", "frontends", "host", "engine", "runtime"},
    "guard": GROUND | {"verify"} | {"ir", "frontends", "passes", "host", "engine", "cache", "runtime", "options"},
    "compiler": GROUND
    | {"verify", "guard", "quantization"}
    | {"ir", "kernels", "frontends", "passes", "host", "engine", "cache", "runtime", "options", "explanation"},
    "training": GROUND
    | {"ir", "kernels", "frontends", "passes", "host", "engine", "cache", "runtime", "options", "explanation"}
    | {"compiler", "progress"},
    "profiling": GROUND | {"ir", "passes", "reports", "options", "engine", "cache", "runtime"},
    "saved_model": GROUND | {"ir", "frontends", "engine", "cache", "options", "compiler"},
    "quantization": GROUND | {"ir", "frontends", "passes", "host"},
    "accuracy": GROUND
    | {"ir", "cache", "passes", "engine", "runtime", "options", "verify", "guard", "compiler", "quantization"},
    "module": GROUND
    | {"accuracy", "quantization", "guard", "compiler", "saved_model"}
    | {"ir", "frontends", "engine", "cache", "runtime", "options", "explanation"},
    "sharding": {"errors", "ir", "passes", "frontends", "runtime", "compiler", "module"},
    "generation": {"errors", "ir", "passes", "engine", "compiler", "module"},
    "onnx_backend": GROUND | {"ir", "engine", "module"},
    "testing": GROUND | {"ir", "kernels", "host", "frontends", "engine", "runtime", "verify", "module"},
    "cli": GROUND
    | {"verify", "guard", "passes", "compiler", "ir", "frontends", "engine", "engines", "cache", "options", "reports"}
    | {"module", "host", "training", "profiling", "progress", "testing"},
}
# The one module that may import a library whose runtime is an engine: its tools, an extra of the core.
TOOLS = {("quantization/qdq.py", "onnxruntime"): "the quantisation library of onnxruntime"}
# "": `from xrt_core import hookimpl`
SDK = {"", "engine", "ir", "kernels", "errors", "events", "options", "files", "cache"}
BANNED_NAMES = {"utils", "helpers", "misc", "common", "util", "helper"}
PLUGINS = sorted(p.parent.name for p in ROOT.glob("plugins/*/pyproject.toml"))


def units() -> list[str]:
    return sorted({unit_of(p) for p in sources(CORE)} - {""})


@pytest.mark.parametrize("part", units())
def test_imports_point_one_way(part: str) -> None:
    """Every part of the core imports only the parts below it."""
    assert part in ALLOWED, f"{part} is new: give it a place in ALLOWED and in docs/architecture.md"
    bad = [
        i.where
        for path in sources(CORE)
        if unit_of(path) == part
        for i in imports(path)
        if i.module.startswith("xrt_core.") and unit(i.module) not in ALLOWED[part] | {part}
    ]
    assert not bad, "\n".join(bad)


def test_the_table_has_no_cycle() -> None:
    """The allowed imports themselves point one way, so that the table cannot be satisfied by a loop."""
    done: set[str] = set()
    while remaining := set(ALLOWED) - done:
        ready = {p for p in remaining if ALLOWED[p] - {p} <= done}
        assert ready, f"a cycle among {sorted(remaining)}"
        done |= ready


def test_the_core_imports_no_plugin_and_no_engine_library() -> None:
    """Neither a plugin package nor what it stands on is imported anywhere in the core."""
    foreign = {p.replace("-", "_") for p in PLUGINS} | {"jaxlib", "tensorrt", "openvino", "numba", "onnxruntime"}
    found = [(p.relative_to(CORE).as_posix(), i.module.split(".")[0], i) for p in sources(CORE) for i in imports(p)]
    bad = [i.where for path, root, i in found if root in foreign and not (not i.at_import and (path, root) in TOOLS)]
    assert not bad, "\n".join(bad)
    assert set(TOOLS) <= {(path, root) for path, root, _ in found}


@pytest.mark.slow
@pytest.mark.parametrize("plugin", PLUGINS)
def test_plugins_import_only_the_sdk(plugin: str) -> None:
    """A plugin imports the parts in SDK alone; only its `_toolkit` imports the engine's library."""
    folder = ROOT / "plugins" / plugin / "src"
    bad = [
        i.where
        for path in sources(folder)
        for i in imports(path)
        if i.module.split(".")[0] == "xrt_core" and unit(i.module) not in SDK
    ]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("plugin", PLUGINS)
def test_importing_a_plugin_needs_no_library(plugin: str) -> None:
    """What the package's root imports directly is the SDK and the standard library, so listing engines stays cheap."""
    root = next((ROOT / "plugins" / plugin / "src").glob("*/__init__.py"))
    bad = [i.where for i in imports(root) if i.at_import and i.module.split(".")[0] in {"jax", "jaxlib", "tensorrt"}]
    assert not bad, "\n".join(bad)


def test_no_drawer_modules() -> None:
    """No module or folder is called utils, helpers or the like."""
    folders = [CORE, ROOT / "tests", *(ROOT / "plugins" / p for p in PLUGINS)]
    bad = [p for folder in folders for p in sources(folder) if {p.stem, p.parent.name} & BANNED_NAMES]
    assert not bad


@pytest.mark.parametrize("part", sorted(ALLOWED))
def test_the_page_says_the_same(part: str) -> None:
    """The table "Layers" of docs/architecture.md names the same imports."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    row = re.search(rf"^\| `{part}` \|(.*)\|$", page, re.MULTILINE)
    assert row is not None, f"{part} is missing from the table"
    assert set(re.findall(r"`(\w+)`", row.group(1))) == ALLOWED[part] - (GROUND if part not in GROUND else set())


def test_the_reader_sees_every_form() -> None:
    """The rules above see plain, from, relative, late and type-checking imports."""
    text = (
        "import xrt_core.engine.contract\nfrom xrt_core import ir\nfrom . import graph\n"
        "from ..passes import pass_base\n"
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import jax\n"
        "def f():\n    from xrt_core.cli import app\n"
    )
    found = {(i.module, i.at_import) for i in imports_in(ast.parse(text), CORE / "ir" / "imaginary.py")}

    assert found == {
        ("xrt_core.engine.contract", True),
        ("xrt_core.ir", True),
        ("xrt_core.ir.graph", True),
        ("xrt_core.passes.pass_base", True),
        ("typing", True),
        ("jax", False),
        ("xrt_core.cli.app", False),
    }


def test_the_first_import_is_light() -> None:
    """`from xrt_core import XRTModule` imports neither NumPy nor onnx; what computes comes with the first module."""
    from xrt_core.testing.processes import run_python

    code = "import sys; from xrt_core import XRTModule; print({'numpy', 'onnx'} & sys.modules.keys() or 'none')"
    found = run_python(code)
    assert found.strip() == "none"

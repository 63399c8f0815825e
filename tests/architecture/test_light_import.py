"""What importing costs, as the modules that come with it: jax, onnx, rich and the like come only when they are used."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.architecture.source import ROOT

HEAVY = (
    "jax", "jaxlib", "torch", "numba", "cupy", "onnxruntime", "onnx", "onnx_ir", "rich", "typer", "tensorrt", "sympy",
)  # fmt: skip


def loaded_after(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after the statement."""
    code = f"import sys, json; sys.path.insert(0, {str(ROOT)!r}); {statement}; print(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return {name.split(".")[0] for name in json.loads(done.stdout)}


@pytest.mark.parametrize(
    "statement",
    [
        "import xrt_core",
        "import xrt_core; xrt_core.config, xrt_core.errors, dir(xrt_core)",
        "import xrt_core.engine",
        "from xrt_core.engine import engines; engines.names()",
        "import xrt_core.options; xrt_core.options.resolve()",
    ],
)
def test_nothing_heavy_comes_along(statement: str) -> None:
    """None of the heavy libraries is imported by what every user and every engine package imports."""
    assert not loaded_after(statement) & set(HEAVY)


def test_the_package_itself_needs_nothing() -> None:
    """`import xrt_core` does not even import NumPy: a program that only might use XRT pays nothing."""
    assert "numpy" not in loaded_after("import xrt_core")


def test_every_public_name_is_there() -> None:
    """Each name of __all__ can be had, and a name that is not there is an AttributeError that says so."""
    import xrt_core

    for name in xrt_core.__all__:
        assert getattr(xrt_core, name) is not None
    with pytest.raises(AttributeError, match="module 'xrt_core' has no attribute 'nonsense'"):
        xrt_core.nonsense  # noqa: B018

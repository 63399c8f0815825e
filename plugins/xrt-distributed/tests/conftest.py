"""How the tests find the package's hooks where it is on the path without being installed."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process in which this package is installed."""
    paths = [p for p in sys.path if p]
    try:
        importlib.metadata.version("xrt-distributed")
    except importlib.metadata.PackageNotFoundError:
        made = tmp_path_factory.mktemp("installed")
        info = made / "xrt_distributed-0.1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: xrt-distributed\nVersion: 0.1.0\n")
        groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
        rows = [f"[{group}]\n" + "\n".join(f"{n} = {t}" for n, t in rows.items()) for group, rows in groups.items()]
        (info / "entry_points.txt").write_text("\n".join(rows) + "\n")
        paths = [str(made), str(ROOT / "src"), *paths]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"}

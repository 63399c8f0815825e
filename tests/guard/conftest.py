"""The guard's tests look at clusters of a few tiny nodes, which would not pay: all of them go to their engines."""

from __future__ import annotations

import pathlib

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """As if each test of this folder carried the marker `tiny_clusters`."""
    for item in items:
        if pathlib.Path(__file__).parent in item.path.parents:
            item.add_marker("tiny_clusters")

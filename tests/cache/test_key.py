"""Keys of executables: what they depend on, and that two of them say where they differ."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.fake_engines import fake_engine
from tests.random_graphs import F32, graph_of, node
from xrt_core.cache.key import CacheKey, cache_key
from xrt_core.engine.contract import CompileOptions, InputOutputAlias
from xrt_core.ir.function import Function
from xrt_core.ir.graph import Value
from xrt_core.ir.types import TensorType


def function(op: str = "Neg", name: str = "f", aliases: Any = (), length: int = 2) -> Function:
    t = TensorType(F32, (length,))
    x, y = Value(f"x{name}", t), Value(f"y{name}", t)
    return Function.from_graph(graph_of([x], [y], [node(op, [x], [y])]), name=name, aliases=aliases)


def test_everything_that_matters_makes_another_key() -> None:
    """Each row in turn; names do not matter, nor the order of the engine's own options."""
    with fake_engine() as engine:
        base = CompileOptions(extra={"a": 1, "b": {"c", "d"}})
        key = cache_key(function(), engine, "cpu", base)
        assert cache_key(function(name="g"), engine, "cpu", base).digest == key.digest
        same = dataclasses.replace(base, extra={"b": {"d", "c"}, "a": 1})
        assert cache_key(function(), engine, "cpu", same) == key
        others = {
            "function": cache_key(function("Abs"), engine, "cpu", base),
            "entry": cache_key(function(length=3), engine, "cpu", base),
            "aliases": cache_key(function(aliases=[InputOutputAlias(0, 0)]), engine, "cpu", base),
            "device": cache_key(function(), engine, "cuda:0", base),
        }
        changes: dict[str, Any] = {
            "phase": "train", "fused": False, "workspace_bytes": 5, "max_batch_size": 6, "threads": 7,
            "extra": {"a": 2},
        }  # fmt: skip
        for row, value in changes.items():
            others[row] = cache_key(function(), engine, "cpu", dataclasses.replace(base, **{row: value}))
        engine.serial += 1
        others["engine fingerprint"] = cache_key(function(), engine, "cpu", base)
    for row, other in others.items():
        assert other.digest != key.digest, row
        assert any(line.startswith(f"{row}: ") for line in key.differences(other)), row
    assert key.differences(key) == []


def test_rows_do_not_run_into_each_other() -> None:
    """A text that contains what looks like another row is still another key."""
    assert CacheKey((("a", "1;1:b=1:2"),)).digest != CacheKey((("a", "1"), ("b", "2"))).digest


@pytest.mark.parametrize("extra", [{"w": np.arange(2000)}, {"w": [np.arange(2000)]}])
def test_arrays_among_the_options_count_whole(extra: dict[str, Any]) -> None:
    """NumPy's own text leaves the middle of a large array out."""
    with fake_engine() as engine:
        one = cache_key(function(), engine, "cpu", CompileOptions(extra=extra))
        w = extra["w"] if isinstance(extra["w"], np.ndarray) else extra["w"][0]
        w[1000] = -1
        assert cache_key(function(), engine, "cpu", CompileOptions(extra=extra)).digest != one.digest

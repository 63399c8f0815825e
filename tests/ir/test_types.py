"""Types of tensors as texts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.random_graphs import F32, node
from xrt_core.guard.ipc import read_function, write_function
from xrt_core.ir.function import Function
from xrt_core.ir.graph import Graph, Value
from xrt_core.ir.symbols import Expr, least
from xrt_core.ir.types import TensorType, type_from_text

N, M = Expr.of("n"), Expr.of("m")
NESTED = least(least(N, M) * 2 + 1, M - N, 150)


@pytest.mark.parametrize(
    "shape",
    [None, (), (3,), (None, 4), ("n", 2), (least(N, 150).dim, 2), (2, least(N, M).dim, "n"), (NESTED.dim, NESTED.dim)],
    ids=str,
)
def test_texts_are_read_as_they_were_written(shape: tuple[int | str | None, ...] | None) -> None:
    """A dimension may have commas of its own."""
    for dtype in (F32, None, np.dtype(np.bool_)):
        t = TensorType(dtype, shape)
        assert type_from_text(str(t)) == t


def test_workers_get_the_types_of_inner_values(tmp_path: Path) -> None:
    """Such dimensions were read as several: workers refused what was right, and the host answered."""
    x, h, y = (Value(v, TensorType(F32, s)) for v, s in (("x", ("n", "m")), ("h", (NESTED.dim, 2)), ("y", ("n", 2))))
    function = Function.from_graph(Graph([x], [y], [node("Neg", [x], [h]), node("Neg", [h], [y])], opsets={"": 21}))
    write_function(function, tmp_path)
    again = read_function(tmp_path)
    assert [v.type for n in again.body.nodes for v in n.outputs if v is not None] == [h.type, y.type]

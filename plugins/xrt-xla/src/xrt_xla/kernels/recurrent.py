"""RNN, GRU and LSTM with their weights as the products read them."""

from __future__ import annotations

from typing import Any

from xrt_core.ir.graph import Node
from xrt_core.kernels import find_kernel
from xrt_xla.kernels.context import Layout, XlaContext, layout, xla_kernel


def _transposed(xp: Any, w: Any) -> Any:
    return xp.swapaxes(w, 1, 2)


def _matrix(node: Node, kind: str) -> Layout | None:
    """Constant weights the other way round, on the CPU: XLA turns them round in each call, which for one time step
    takes several times as long as the products (LSTM of 512: 0.9 ms, 0.3 without)."""
    return Layout("DIO", _transposed) if kind == "cpu" else None


for _op in ("RNN", "GRU", "LSTM"):
    for _index in (1, 2):
        layout(_op, _index)(_matrix)


@xla_kernel("RNN", "GRU", "LSTM")
def recurrent(ctx: XlaContext, x: Any, w: Any, r: Any, *rest: Any) -> Any:
    """The portable kernel, whose transpose of each matrix meets that of the layout, so that XLA drops both."""
    kernel = find_kernel("", ctx.node.op_type)
    assert kernel is not None
    w, r = ([m.T for m in a] if i in ctx.laid_out else a for i, a in ((1, w), (2, r)))
    return kernel.function(ctx, x, w, r, *rest)

"""Views by strides: as gathers of rows they have the elements that torch reads."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.profiles import examples

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

import xrt_torch  # noqa: E402
from xrt_torch import strided  # noqa: E402
from xrt_torch.backend import xrt as backend  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
aten, nn = torch.ops.aten, torch.nn


def graph_of(x: Any, *how: Any) -> Any:
    graph = torch.fx.Graph()
    taken = graph.placeholder("x")
    taken.meta["val"] = x
    graph.output(graph.call_function(aten.as_strided.default, (taken, *how)))
    return graph


def run(graph: Any, x: Any) -> Any:
    """The result of a graph whose constants its nodes have."""
    root = torch.nn.Module()
    for node in graph.nodes:
        if node.op == "get_attr":
            setattr(root, node.target, node.meta["val"])
    return torch.fx.GraphModule(root, graph)(x)


@given(data=st.data())
@examples(300)
def test_views_have_the_elements_that_torch_reads(data: Any) -> None:
    """Of tensors in any order of their axes, also of such as begin within their memory."""
    shape = data.draw(st.lists(st.integers(1, 5), max_size=4))
    order = data.draw(st.permutations(range(len(shape))))
    gap = data.draw(st.integers(0, 3))
    axes = data.draw(st.lists(st.tuples(st.integers(1, 4), st.sampled_from([0, 1, 2, 3, 4, 5, 6, 12])), max_size=4))
    size, stride = [n for n, _ in axes], [s for _, s in axes]
    dense = torch.arange(gap + torch.Size(shape).numel())[gap:].view(shape)
    room = dense.numel() - 1 - sum((n - 1) * s for n, s in axes)
    assume(room >= 0)
    offset = data.draw(st.none() | st.integers(gap, gap + room))
    x = dense.permute(order)
    graph = graph_of(x, size, stride, offset)
    node = next(n for n in graph.nodes if n.op == "call_function")
    assert strided.is_known(node) == (offset is None)  # of an input of the graph
    strided.take_apart(graph)
    assert aten.as_strided.default not in {n.target for n in graph.nodes}
    torch.testing.assert_close(run(graph, x), x.as_strided(size, stride, offset))


def test_rows_are_gathered_whole() -> None:
    """Overlapping windows of rows, as Longformer's attention has them: an index for each row, and none for elements."""
    x = torch.randn(2, 3, 8, 4).transpose(1, 2)  # [batch, places, heads, features], by heads in memory
    graph = graph_of(x, [2, 3, 3, 4, 4], [96, 32, 8, 4, 1])
    strided.take_apart(graph)
    places = [n.meta["val"].numel() for n in graph.nodes if n.op == "get_attr"]
    assert places == [12]


def test_what_is_not_the_operands_is_read_by_torch() -> None:
    """Elements before, behind and between those of a tensor."""
    memory = torch.arange(12.0)
    for x, how in (
        (memory[4:8], ([2], [1], 2)),
        (memory[4:8], ([3], [2])),
        (memory[::2], ([2], [1])),
        (memory[:0], ([0], [1])),
    ):
        graph = graph_of(x, *how)
        node = next(n for n in graph.nodes if n.op == "call_function")
        assert not strided.is_known(node)
        strided.take_apart(graph)
        torch.testing.assert_close(run(graph, x), x.as_strided(*how))


@pytest.mark.usefixtures("fresh_graphs")
def test_places_in_memory_of_an_input_may_change() -> None:
    """A view that begins at a place in memory, of inputs that begin elsewhere in it in later calls."""
    call = torch.compile(
        lambda x: (x[1:].as_strided((3,), (1,), 4) * 2, x.as_strided((3,), (1,)) * 3),
        backend=backend,
        options={"engine": "host", "background": False},
    )
    for begin in (4, 4, 4, 3, 2):
        x = torch.arange(16.0)[begin : begin + 6]
        made, other = call(x)
        torch.testing.assert_close(made, torch.arange(8.0, 14.0, 2))
        torch.testing.assert_close(other, x[:3] * 3)
    (graph,) = xrt_torch.graphs()
    assert len(graph.eager_nodes) == 1


@pytest.mark.usefixtures("fresh_graphs")
def test_windows_of_a_transposed_tensor_are_on_xrt() -> None:
    def f(x: Any) -> Any:
        return (x * 2).transpose(0, 1).as_strided((3, 4, 2), (4, 2, 1)) + 1

    call = torch.compile(f, backend=backend, options={"engine": "host", "background": False})
    x = torch.randn(8, 2)
    for _ in range(2):
        torch.testing.assert_close(call(x), f(x))
    (graph,) = xrt_torch.graphs()
    assert graph.reason is None
    assert not graph.eager_nodes


@pytest.mark.usefixtures("fresh_graphs")
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_written_view_has_the_strides_of_its_memory_in_backward_passes(dynamic: bool) -> None:
    """torch views the gradient as the memory that was written was viewed."""

    def f(x: Any) -> Any:
        z = (x * 2).view(2, -1, 6).transpose(1, 2)
        z += 1
        return z.sin()

    options = {"engine": "host", "background": False}
    call = torch.compile(f, backend=backend, dynamic=dynamic, options=options)
    for n in (4, 6, 6):
        x = torch.randn(4, n, 6, requires_grad=True)
        torch.testing.assert_close(torch.autograd.grad(call(x).sum(), x), torch.autograd.grad(f(x).sum(), x))
    assert {(g.kind, g.reason) for g in xrt_torch.graphs()} == {("forward", None), ("backward", None)}


LAID_OUT = {
    "columns of an inverse": lambda x: torch.linalg.inv(x).as_strided((6,), (1,)) * 2,
    "a view of an inverse transposed": lambda x: (torch.linalg.inv(x) + 0).mT.view(-1) * 2,
    "pooling of channels that come last": lambda x: nn.functional.adaptive_avg_pool2d(
        (x.view(1, 3, 3, 4) * 2).permute(0, 3, 1, 2), 2
    ).permute(0, 2, 3, 1).view(-1),
    "softmax of rows that may be masked": lambda x: aten._safe_softmax(x.t(), 0).view(-1),
}  # fmt: skip


@pytest.mark.usefixtures("fresh_graphs")
@pytest.mark.parametrize("name", LAID_OUT)
def test_decompositions_lie_in_memory_as_torchs_results(name: str) -> None:
    """Else what follows reads other elements, in the captured graph in eager as well, or the graph is not captured."""
    function = LAID_OUT[name]
    call = torch.compile(function, backend=backend, options={"engine": "host", "background": False})
    x = torch.randn(6, 6) + 4 * torch.eye(6)
    for _ in range(3):
        torch.testing.assert_close(call(x), function(x), rtol=1e-4, atol=1e-5)
    (graph,) = xrt_torch.graphs()
    assert graph.reason is None

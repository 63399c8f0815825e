"""Every gradient rule against finite differences, at float64, and the dtypes and shapes of what it gives."""

from __future__ import annotations

import numpy as np
import pytest

from tests.training.cases import CASES
from tests.training.checks import Case, cast, differences, run, same_types, scalar_graph, sources, with_gradients
from xrt_core.training import gradients


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_finite_differences(case: Case) -> None:
    """The gradients are the slopes of the loss."""
    arrays = cast(case, "float64")
    graph, made = with_gradients(case, arrays)
    found = run(made, arrays)[1:]

    assert len(found) == len(sources(case))
    for i, g in zip(sources(case), found, strict=True):
        np.testing.assert_allclose(g, differences(graph, arrays, i), rtol=case.tolerance * 10, atol=case.tolerance)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_types(case: Case) -> None:
    """Gradients have the dtype and shape of what they are the gradient by, at lower precision as well."""
    arrays = cast(case, "float32")
    graph, made = with_gradients(case, arrays)
    found = run(made, arrays)[1:]
    exact = run(with_gradients(case, cast(case, "float64"))[1], cast(case, "float64"))[1:]

    same_types(graph, [graph.inputs[i] for i in sources(case)], found)
    for g, e in zip(found, exact, strict=True):
        np.testing.assert_allclose(g, e, rtol=2e-3, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in CASES if c.again], ids=lambda c: c.name)
def test_second_derivatives(case: Case) -> None:
    """A gradient graph can be differentiated again: by the first input, of the weighed sum of the first gradients."""
    arrays = cast(case, "float64")
    graph = scalar_graph(case, arrays)
    wrt = [graph.inputs[i] for i in sources(case)]
    once = gradients(graph, 0, wrt, unused="zeros")
    total = weighed(once, len(graph.outputs))
    twice = gradients(total, 0, [total.inputs[sources(case)[0]]], unused="zeros")
    found = run(twice, arrays)[1]

    wanted = differences(total, arrays, sources(case)[0], step=1e-5)
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=max(case.tolerance * 100, 1e-4))


def weighed(graph, first):  # type: ignore[no-untyped-def]
    """A graph of one output: the weighed sum of the outputs of `graph` from number `first` on."""
    from tests.training.checks import weights
    from xrt_core.frontends.tensor import Tensor
    from xrt_core.frontends.tracing import Tracer, tracing

    tracer = Tracer("weighed", graph.opsets)
    tracer.reserve(v.name for n in graph.nodes for v in (*n.inputs, *n.outputs) if v is not None)
    tracer.scope.nodes.extend(graph.nodes)
    with tracing(tracer):
        parts = [
            (Tensor(v, tracer.scope) * weights(tuple(v.shape), 40 + k).astype(v.dtype)).sum()
            for k, v in enumerate(graph.outputs[first:])
        ]
        total = parts[0]
        for p in parts[1:]:
            total = total + p
        total = total * 1.0
    return graph.replace(nodes=tracer.scope.nodes, outputs=[total._value], opsets={**graph.opsets, **tracer.opsets})

"""Kernels over the array API standard: in each library every case that they take gives what the host gives."""

from __future__ import annotations

import importlib
from collections import Counter
from typing import Any

import numpy as np
import pytest

from xrt_core.engine.op_kernels import OpKernelRegistry, op_kernel, register_standard_kernels
from xrt_core.errors import RegistrationError
from xrt_core.kernels import OpContext
from xrt_core.kernels.standard import DTYPES, _kernel, standard_kernels
from xrt_core.testing.functions import forms_of
from xrt_core.testing.generated import all_generated
from xrt_core.testing.node_cases import Case, all_cases
from xrt_core.testing.reference import reference
from xrt_core.testing.tolerance import assert_close

NAMESPACES = ("numpy", "torch", "array_api_strict")


def registered() -> OpKernelRegistry:
    """A registry with the kernels, for an engine "standard"."""
    registry = OpKernelRegistry()
    register_standard_kernels("standard", ("cpu",), registry=registry)
    return registry


def namespace(name: str) -> Any:
    """The library's namespace of the standard. Skips where it is not installed."""
    compat = pytest.importorskip("array_api_compat")
    pytest.importorskip(name)
    return compat.array_namespace(importlib.import_module(name).asarray(np.zeros(1, np.float32)))


def cases() -> list[Case]:
    """The kit's cases of the element types that there are."""
    made = (g.case() for g in all_generated() if g.sample)
    found = [*(c for c in all_cases() if c.is_numeric), *(c for c in made if c is not None)]
    return [c for c in found if c.node.domain == "" and c.node.op_type in standard_kernels()]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # divisions by zero, and what libraries say of them
@pytest.mark.parametrize("name", NAMESPACES)
def test_results_are_the_hosts(name: str) -> None:
    """Every kernel is run by some case, and all are within the kit's tolerance."""
    xp, registry = namespace(name), registered()
    ran: Counter[str] = Counter()
    for case in cases():
        arrays = [x for x in (*case.inputs, *case.outputs) if x is not None]
        if not all(x.dtype in DTYPES for x in arrays):
            continue
        for function, _ in forms_of(case, "standard"):
            node = function.body.nodes[0]
            if registry.supports("standard", node, "cpu", "inference"):
                break
        else:
            continue
        entry = registry.find("standard", "", node.op_type)
        assert entry is not None
        given = [
            x if x is None or i in entry.static else xp.asarray(np.array(x)) for i, x in enumerate(case.inputs)
        ]
        got = entry.function(OpContext(node, xp), *given)
        wanted = reference(case.node, case.inputs)
        for i, (g, want) in enumerate(zip(got if isinstance(got, tuple) else (got,), wanted, strict=True)):
            inputs = [x for x in case.inputs if x is not None]
            what = f"{case.name}, output {i}"
            assert_close(np.asarray(g), want, dtype=function.returns[i].dtype, inputs=inputs, what=what)
        ran[node.op_type] += 1
    assert set(standard_kernels()) - set(ran) == set()
    assert sum(ran.values()) > 400


def test_an_engines_own_kernel_stays() -> None:
    """What is registered first is kept."""
    registry = OpKernelRegistry()

    @op_kernel("Relu", engine="standard", registry=registry)
    def relu(ctx: OpContext, x: Any) -> Any:
        return x

    register_standard_kernels("standard", ("cpu",), registry=registry)
    found = registry.find("standard", "", "Relu")
    assert found is not None
    assert found.function is relu
    assert len(registry.of_engine("standard")) == len(standard_kernels())


def test_kernels_are_of_operators_that_exist() -> None:
    """The registry finds nothing wrong with them; a second kernel of an operator is refused."""
    registered().validate("standard")
    with pytest.raises(RegistrationError, match="the standard kernel of Relu is registered twice"):
        _kernel("Relu")(lambda ctx, x: x)

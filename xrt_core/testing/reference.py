"""What a generated case must give: the host's result, computed in float64 where the operator allows that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from xrt_core.errors import XRTError
from xrt_core.host.executor import run_node
from xrt_core.ir.graph import Node
from xrt_core.ir.op_traits import traits_of
from xrt_core.testing.generated import retyped
from xrt_core.testing.tolerance import is_floating


def reference(node: Node, arrays: Sequence[Any]) -> list[np.ndarray]:
    """The results of `node`, in float64 in place of narrower floats where the operator's schema has float64."""
    traits = traits_of(node)
    if not (traits.cast or traits.quantizes or traits.shape_query):  # those are about the dtypes or shapes themselves
        wide = [x if x is None or not _narrow(x.dtype) else x.astype(np.float64) for x in arrays]
        if any(w is not x for w, x in zip(wide, arrays, strict=True)):
            widened = retyped(node, wide)
            if widened is not None:
                try:
                    return _wanted(node, run_node(widened, wide))
                except XRTError:  # the host has it in the narrow dtype only
                    pass
    return _wanted(node, run_node(node, arrays))


def _wanted(node: Node, results: Sequence[Any]) -> list[np.ndarray]:
    """The results that the node lists, without those it leaves out."""
    return [np.asarray(r) for r, v in zip(results, node.outputs, strict=False) if v is not None]


def _narrow(dtype: np.dtype) -> bool:
    return is_floating(dtype) and dtype.kind != "c" and dtype != np.float64

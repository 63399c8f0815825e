"""What types the versions of an operator take: which inputs and outputs share one, and which version takes more."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np

from xrt_core.ir.schema import find_schema, latest_opset
from xrt_core.ir.types import dtype_name

TEXTS: Final = {"float16": "tensor(float16)", "bfloat16": "tensor(bfloat16)"}
"""The narrow floats, as schemas write them."""


@dataclass(frozen=True, slots=True)
class Formal:
    """A formal parameter: its type variable, and the types that it takes, as the schema writes them."""

    variable: str
    types: frozenset[str]

    def takes(self, dtype: np.dtype) -> bool:
        """Whether it takes this narrow float."""
        return TEXTS[dtype_name(dtype)] in self.types


@dataclass(frozen=True, slots=True)
class Signature:
    """The formal parameters of one version of an operator; the last of a side may be variadic."""

    inputs: tuple[Formal, ...]
    outputs: tuple[Formal, ...]

    def input(self, index: int) -> Formal:
        """The parameter of an input."""
        return self.inputs[min(index, len(self.inputs) - 1)]

    def output(self, index: int) -> Formal:
        """The parameter of an output."""
        return self.outputs[min(index, len(self.outputs) - 1)]


@cache
def signature_of(op_type: str, domain: str, version: int) -> Signature | None:
    """The parameters of an operator of the standard; None where there is none, or it takes or gives nothing."""
    schema = find_schema(op_type, domain, version)
    if schema is None or schema.onnx is None:
        return None
    read = [tuple(Formal(p.type_str, frozenset(p.types)) for p in side)
            for side in (schema.onnx.inputs, schema.onnx.outputs)]  # fmt: skip
    return Signature(*read) if all(read) else None


@cache
def version_for(op_type: str, domain: str, version: int, dtype: str) -> int | None:
    """The version itself, or the first later one that differs by more types alone, which takes `dtype`."""
    old = find_schema(op_type, domain, version)
    if old is None or old.onnx is None:
        return None
    opset = version
    while opset <= latest_opset(domain):
        new = find_schema(op_type, domain, opset)
        signature = None if new is None else signature_of(op_type, domain, new.since_version)
        if new is not None and signature is not None:
            if any(TEXTS[dtype] in f.types for f in signature.inputs):
                return new.since_version if new is old or _adds_types_alone(old.onnx, new.onnx) else None
            opset = max(opset, new.since_version)
        opset += 1
    return None


def _adds_types_alone(old: Any, new: Any) -> bool:
    """Whether a node of the old schema means the same under the new one, going by inputs and attributes.

    It is asked of operators on the allow and follow lists, whose versions differ in meaning by these alone; the test
    of this pass lists all that follows from it.
    """
    kept = all(n in new.attributes and new.attributes[n].type == a.type for n, a in old.attributes.items())
    optional = not any(a.required for n, a in new.attributes.items() if n not in old.attributes)
    return kept and optional and len(old.inputs) <= len(new.inputs) and new.min_input <= old.min_input

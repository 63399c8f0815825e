"""The operator sets of this package: schemas of the frozen table with their lowerings and kernels."""

from __future__ import annotations

import importlib
from typing import Final

from xrt_contrib.kernels import KERNELS, Kernel
from xrt_contrib.lowering import LOWERINGS, STATIC, body_of, dtypes_alone, output_types
from xrt_contrib.native import NATIVE, native_kernel
from xrt_contrib.schemas import Definition, definitions, table
from xrt_core.ir.operator_set import Operator, OperatorSet
from xrt_core.ir.schema import MANY, Schema

FAMILIES: Final = (
    "activation",
    "linear",
    "normalization",
    "attention",
    "quantized",
    "spatial",
    "movement",
    "experts",
    "blocked",
)
"""Modules of this package that register lowerings."""


def operator_sets() -> list[OperatorSet]:
    """The sets, one for each domain."""
    for family in FAMILIES:
        importlib.import_module(f"xrt_contrib.{family}")
    return [_operator_set(domain) for domain in table()["domains"]]


def _operator_set(domain: str) -> OperatorSet:
    found = []
    for name, definition in definitions(domain).items():
        kernel, lowered = KERNELS.get((domain, name)), (domain, name) in LOWERINGS
        if kernel is None and name in NATIVE:
            kernel = Kernel(native_kernel, "it runs in a session of ONNX Runtime")
        if kernel is None and not lowered:
            continue
        if kernel is None:
            found.append(Operator(_schema(definition, output_types), lowering=body_of, static=STATIC[domain, name]))
        else:
            found.append(
                Operator(
                    _schema(definition, kernel.infer or dtypes_alone), kernel.function, dynamic=kernel.dynamic,
                    is_constant=kernel.is_constant,
                )
            )  # fmt: skip
    return OperatorSet(domain, 1, found)


def _schema(d: Definition, infer: object) -> Schema:
    least_in, most_in, least_out, most_out = d.arity
    return Schema(
        d.domain, d.name, d.since, least_in, min(most_in, MANY), least_out, min(most_out, MANY), d.attributes,
        infer=infer,  # type: ignore[arg-type]
    )  # fmt: skip

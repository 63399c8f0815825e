"""Schemas of ONNX Runtime's operators, from the frozen table `schemas.json`."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final

from xrt_core.ir.schema import AttributeSchema

DOMAIN: Final = "com.microsoft"


@dataclass(frozen=True, slots=True)
class Formal:
    """An input or output: its name, its type variable (or its type), and "" single, "?" optional or "*" variadic."""

    name: str
    type: str
    option: str


@dataclass(frozen=True, slots=True)
class Definition:
    """What ONNX Runtime's schema says of an operator.

    arity: least and most inputs, least and most outputs. types: type variable -> the types that it allows.
    defaults: of the attributes that have one. cpu: whether ONNX Runtime has a kernel for it on the CPU.
    """

    domain: str
    name: str
    since: int
    arity: tuple[int, int, int, int]
    inputs: tuple[Formal, ...]
    outputs: tuple[Formal, ...]
    attributes: Mapping[str, AttributeSchema]
    defaults: Mapping[str, Any]
    types: Mapping[str, tuple[str, ...]]
    cpu: bool


@functools.cache
def table() -> dict[str, Any]:
    """The content of `schemas.json`."""
    found: dict[str, Any] = json.loads(resources.files(__package__).joinpath("schemas.json").read_text())
    return found


@functools.cache
def definitions(domain: str = DOMAIN) -> Mapping[str, Definition]:
    """The operators of a domain by name; of "" what ONNX Runtime adds to the standard's."""
    return {name: _definition(domain, name, row) for name, row in table()["domains"][domain].items()}


def _definition(domain: str, name: str, row: Mapping[str, Any]) -> Definition:
    attributes = row["attributes"]
    return Definition(
        domain,
        name,
        row["since"],
        tuple(row["arity"]),
        tuple(Formal(*p) for p in row["inputs"]),
        tuple(Formal(*p) for p in row["outputs"]),
        {n: AttributeSchema(n, kind, required) for n, (kind, required, _) in attributes.items()},
        {n: tuple(d) if isinstance(d, list) else d for n, (_, _, d) in attributes.items() if d is not None},
        {k: tuple(v) for k, v in row["types"].items()},
        row["cpu"],
    )

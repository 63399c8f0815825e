"""The script that writes `schemas.json`, the frozen table of ONNX Runtime's operators: `python -m
xrt_contrib.freeze_schemas`, where onnxruntime is installed."""

from __future__ import annotations

import json
import pathlib
from typing import Any

TABLE = pathlib.Path(__file__).with_name("schemas.json")
_STANDARD = ("SimplifiedLayerNormalization",)
"""What ONNX Runtime has in the standard domain the onnx package has not, and models of today use."""


def _formal(p: Any) -> list[Any]:
    option = str(p.option).rpartition(".")[2]
    return [p.name, p.typeStr, {"Single": "", "Optional": "?", "Variadic": "*"}[option]]


def _attribute(a: Any) -> list[Any]:
    from onnx import AttributeProto, helper

    default = None
    if a._default_value:
        default = helper.get_attribute_value(AttributeProto.FromString(a._default_value))
        if isinstance(default, bytes):
            default = default.decode()
        elif not isinstance(default, int | float):
            default = list(default)
    return [str(a.type).rpartition(".")[2].lower(), bool(a.required), default]


def frozen() -> dict[str, Any]:
    """The table: domain -> operator -> schema, and the version of ONNX Runtime that it is of."""
    import onnxruntime
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    on_cpu = {(d.domain, d.op_name) for d in state.get_all_opkernel_def() if d.provider == "CPUExecutionProvider"}
    domains: dict[str, dict[str, Any]] = {"": {}, "com.microsoft": {}, "com.microsoft.nchwc": {}}
    for s in sorted(state.get_all_operator_schema(), key=lambda s: (s.domain, s.name, s.since_version)):
        if s.domain not in domains or (s.domain == "" and (s.name not in _STANDARD or s.name in domains[""])):
            continue
        domains[s.domain][s.name] = {
            "since": s.since_version,
            "arity": [s.min_input, s.max_input, s.min_output, s.max_output],
            "inputs": [_formal(p) for p in s.inputs],
            "outputs": [_formal(p) for p in s.outputs],
            "attributes": {n: _attribute(a) for n, a in sorted(s.attributes.items())},
            "types": {c.type_param_str: sorted(c.allowed_type_strs) for c in s.type_constraints},
            "cpu": (s.domain, s.name) in on_cpu,
        }
    return {"onnxruntime": onnxruntime.__version__, "domains": domains}


def text(table: dict[str, Any]) -> str:
    """The table as JSON, a line for each operator."""
    lines = ["{", f'"onnxruntime": {json.dumps(table["onnxruntime"])},', '"domains": {']
    for i, (domain, operators) in enumerate(table["domains"].items()):
        rows = [f"{json.dumps(name)}: {json.dumps(row)}" for name, row in operators.items()]
        end = "" if i + 1 == len(table["domains"]) else ","
        lines += [f"{json.dumps(domain)}: {{", ",\n".join(rows), "}" + end]
    return "\n".join([*lines, "}", "}", ""])


if __name__ == "__main__":
    TABLE.write_text(text(frozen()))

"""`xrt.ops`: every operator of the ONNX standard as a function on traced tensors, generated on first access.

    y = xrt.ops.Conv(x, w, strides=[2, 2])
    values, indices = xrt.ops.TopK(x, 5)
    y = xrt.ops.If(x.sum() > 0, then_branch=lambda: x, else_branch=lambda: -x)

Inputs are positional (optional ones may be None or omitted), attributes are keywords. Operators of other domains are
in `ops.ml`, `ops.preview` and `ops.training`. `outputs=N` requests optional outputs, `name=` names the node.
The bodies of If, Loop, Scan and SequenceMap are callables.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xrt_core.ir.sharding import Sbp


def shard(x: Any, sharding: str | Mapping[str, Sbp]) -> Any:
    """Say how a tensor lies on the mesh of the module, such as `xrt.shard(x, "data:S(0)")`; without a mesh it is the
    tensor itself.

    x: a traced tensor, or an array of the graph; of an input or an array the first call decides where it is kept.
    sharding: for axes of the mesh S(axis) or B, as text or as a mapping `{"data": xrt.sbp.S(0)}`; other axes are B.
    Raises TraceError outside `Graph.build` and for what is no array, OptionError for another sharding.
    """
    from xrt_core.frontends.tensor import Tensor, constant, value_of
    from xrt_core.frontends.tracing import current_tracer
    from xrt_core.ir.sharding import sharding_text

    tracer = current_tracer("xrt.shard")
    value = value_of(x if isinstance(x, Tensor) else constant(x))
    made = tracer.emit(tracer.schema("Boxing", "xrt"), (value,), {"target": sharding_text(sharding)}, 1)
    return Tensor(made[0], tracer.scope)


class OperatorNamespace:
    """The operators of one domain as attributes, and the domains below it."""

    def __init__(self, domain: str) -> None:
        self._domain = domain

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        found = _find(self._domain, name)
        setattr(self, name, found)
        return found

    def __dir__(self) -> list[str]:
        return _names(self._domain)

    def __repr__(self) -> str:
        return f"<operators of {self._domain or 'ai.onnx'}>"


_ALIASES = {"ml": "ai.onnx.ml", "preview": "ai.onnx.preview", "training": "ai.onnx.preview.training"}


def _domains_below(domain: str) -> dict[str, str]:
    """Return attribute name -> domain, for the direct subdomains of a domain."""
    if not domain:
        return _ALIASES
    return {n: d for n, d in _ALIASES.items() if d == f"{domain}.{n}"}


def _operators(domain: str) -> set[str]:
    import onnx

    return {s.name for s in onnx.defs.get_all_schemas() if s.domain == domain}


def _names(domain: str) -> list[str]:
    return sorted(_operators(domain) | set(_domains_below(domain)))


def _find(domain: str, name: str) -> Callable[..., Any] | OperatorNamespace:
    below = _domains_below(domain).get(name)
    if below is not None:
        return OperatorNamespace(below)
    from xrt_core.frontends.operators import operator_function

    try:
        return operator_function(name, domain)
    except KeyError:
        pass
    names = _names(domain)
    near = difflib.get_close_matches(name, names, 3) or [n for n in names if n.lower() == name.lower()]
    hint = f"; did you mean {', '.join(near)}?" if near else ""
    raise AttributeError(f"{domain or 'ai.onnx'} has no operator {name!r}{hint} (dir(xrt.ops) lists them)")


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = _find("", name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return _names("")

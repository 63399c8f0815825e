"""Function: a cluster as a function of its own, the unit that engines compile."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from xrt_core.errors import GraphError
from xrt_core.ir.graph import NO_ANNOTATIONS, Annotations, Graph, Node, Value, _Frozen, _set
from xrt_core.ir.types import TensorType

_MOST_SHOWN: Final = 5  # operators in a message


@dataclass(frozen=True, slots=True)
class Parameter:
    """An entry or a return of a Function: a dense tensor of known dtype and shape."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def type(self) -> TensorType:
        """The type of the tensor."""
        return TensorType(self.dtype, self.shape)

    def __str__(self) -> str:
        return f"%{self.name}: {self.type}"


@dataclass(frozen=True, slots=True)
class InputOutputAlias:
    """Output number `output` shares the storage of input number `input` (an updated variable)."""

    output: int
    input: int


class Function(_Frozen):
    """A Graph with static entries and returns, frozen, that an engine compiles as one.

    name: a label, unique within a partitioned graph.
    params, returns: what enters and leaves, in the order of `body.inputs` and `body.outputs`.
    aliases: which returns are written into the storage of which params.
    body: the nodes. Its constants are values with data: they are part of the function, not params.

    Raises GraphError where params or returns do not match the body, or an alias names what is not there.
    """

    __slots__ = ("_cache", "aliases", "body", "name", "params", "returns")
    name: str
    params: tuple[Parameter, ...]
    returns: tuple[Parameter, ...]
    aliases: tuple[InputOutputAlias, ...]
    body: Graph
    _cache: dict[str, Any]

    def __init__(
        self,
        name: str,
        params: Iterable[Parameter],
        returns: Iterable[Parameter],
        body: Graph,
        aliases: Iterable[InputOutputAlias] = (),
    ) -> None:
        _set(self, "name", name)
        _set(self, "params", tuple(params))
        _set(self, "returns", tuple(returns))
        _set(self, "aliases", tuple(aliases))
        _set(self, "body", body)
        _set(self, "_cache", {})
        if len(self.params) != len(body.inputs) or len(self.returns) != len(body.outputs):
            raise GraphError(
                f"function {name!r}: {len(self.params)} params and {len(self.returns)} returns for a body with "
                f"{len(body.inputs)} inputs and {len(body.outputs)} outputs; give one for each"
            )
        for a in self.aliases:
            if not (0 <= a.output < len(self.returns) and 0 <= a.input < len(self.params)):
                raise GraphError(f"function {name!r}: {a} names a return or a param that is not there")
            if self.returns[a.output].type != self.params[a.input].type:
                raise GraphError(
                    f"function {name!r}: {a} ties {self.returns[a.output]} to {self.params[a.input]}; "
                    f"only tensors of one dtype and shape can share storage"
                )
        for what, indices in (
            ("return", [a.output for a in self.aliases]),
            ("param", [a.input for a in self.aliases]),
        ):
            if len(set(indices)) != len(indices):
                raise GraphError(f"function {name!r}: a {what} stands in more than one alias of {self.aliases}")

    @classmethod
    def from_graph(cls, body: Graph, *, name: str = "", aliases: Iterable[InputOutputAlias] = ()) -> Function:
        """The function whose params and returns are the inputs and outputs of `body`, by name and type.

        Raises GraphError for an input or output that is not a tensor of known dtype and shape.
        """
        name = name or body.name or "function"
        return cls(
            name,
            [_parameter(v, "input", i, name) for i, v in enumerate(body.inputs)],
            [_parameter(v, "output", i, name) for i, v in enumerate(body.outputs)],
            body,
            aliases,
        )

    @property
    def fingerprint(self) -> str:
        """Hex digest of everything that decides what the function computes, and of no name. Computed once."""
        found = self._cache.get("fingerprint")
        if found is None:
            from xrt_core.ir.fingerprint import function_fingerprint

            found = self._cache["fingerprint"] = function_fingerprint(self)
        return str(found)

    def as_text(self) -> str:
        """The readable form: `function name { input {...} output {...} node {...} }`."""
        from xrt_core.ir.text import function_text

        return function_text(self)

    def __str__(self) -> str:
        return self.as_text()

    def __repr__(self) -> str:
        return (
            f"<Function {self.name!r}: {len(self.params)} params, {len(self.body.nodes)} nodes, "
            f"{len(self.returns)} returns>"
        )


def launch(
    function: Function,
    engine: str,
    inputs: Iterable[Value],
    outputs: Iterable[Value],
    *,
    annotations: Annotations = NO_ANNOTATIONS,
) -> Node:
    """The `xrt.Launch` node that runs `function` on `engine`: inputs stand for params, outputs for returns."""
    return Node(
        "Launch",
        inputs,
        outputs,
        {"engine": engine, "function": function},
        domain="xrt",
        version=1,
        name=function.name,
        annotations=annotations,
    )


def _parameter(value: Value, what: str, index: int, function: str) -> Parameter:
    t = value.type
    if not isinstance(t, TensorType) or not t.is_static or t.dtype is None or t.shape is None:
        raise GraphError(
            f"function {function!r}: {what} {index} {value.name!r} has type {t or 'unknown'}, which is not a tensor "
            f"of known dtype and shape; specialise the graph for a signature first"
        )
    return Parameter(value.name or f"{what}_{index}", t.dtype, tuple(d for d in t.shape if isinstance(d, int)))


def operators_of(function: Function) -> str:
    """The operators of a function for a message: distinct, the first few."""
    names = list(dict.fromkeys(n.operator for n in function.body.nodes))
    return ", ".join(names[:_MOST_SHOWN]) + (", ..." if len(names) > _MOST_SHOWN else "")

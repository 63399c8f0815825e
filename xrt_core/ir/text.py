"""The readable text form of graphs and functions."""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from xrt_core.errors import printable
from xrt_core.ir.graph import Graph, Node, SparseTensor, Value
from xrt_core.ir.long_list import LongList
from xrt_core.ir.types import STRING, TensorType

if TYPE_CHECKING:
    from xrt_core.ir.function import Function

_PLAIN: Final = re.compile(r"[\w.:/\-]+")
SHOWN_LINES: Final = 400
_SHORT: Final = 8  # elements of a constant that are shown


def graph_text(graph: Graph) -> str:
    """The graph in SSA form: `graph name { input {...} output {...} constant {...} node {...} }`."""
    return "\n".join(_Printer().graph(graph, f"graph {_word(graph.name)}".rstrip()))


def function_text(function: Function) -> str:
    """The function in SSA form: `function name { input {...} output {...} node {...} }`."""
    return "\n".join(_Printer().function(function))


def as_html(thing: Graph | Function) -> str:
    """What notebooks show of a graph or function: a line with its operators, and its text, of which the first
    `SHOWN_LINES` lines, folded."""
    graph = thing if isinstance(thing, Graph) else thing.body
    counts = Counter(n.operator for n in graph.nodes).most_common()
    operators = ", ".join(f"{o} x{k}" if k > 1 else o for o, k in counts)
    lines = printable(str(thing)).splitlines()
    if len(lines) > SHOWN_LINES:
        lines = [*lines[:SHOWN_LINES], f"... {len(lines) - SHOWN_LINES} more lines"]
    head = f"{type(thing).__name__} {thing.name}: {len(graph.nodes)} nodes ({operators})"
    return (
        f"<details><summary>{html.escape(printable(head, lines=False))}</summary>"
        f"<pre>{html.escape(chr(10).join(lines))}</pre></details>"
    )


class _Printer:
    """Names every value once, uniquely within what is printed, and writes lines."""

    def __init__(self) -> None:
        self._names: dict[Value, str] = {}
        self._taken: set[str] = set()
        self._unnamed = 0

    def function(self, function: Function) -> list[str]:
        aliases = [
            f"{self.name(function.body.outputs[a.output])} = {self.name(function.body.inputs[a.input])}"
            for a in function.aliases
        ]
        return self.graph(function.body, f"function {_word(function.name)}", aliases)

    def graph(self, graph: Graph, head: str, aliases: Iterable[str] = ()) -> list[str]:
        inputs = [self._declared(v, graph.defaults.get(v)) for v in graph.inputs]
        constants = [self._constant(v) for v in graph.constants if v not in self._names]
        nodes = [line for n in graph.nodes for line in self._node(n)]
        outputs = [self._declared(v) for v in graph.outputs]
        lines = [head + " {"]
        for title, block in (
            ("input", inputs), ("output", outputs), ("alias", aliases), ("constant", constants), ("node", nodes)
        ):  # fmt: skip
            shown = list(block)
            if shown or title in ("input", "output", "node"):
                lines += [f"  {title} {{", *(f"    {line}" for line in shown), "  }"]
        lines.append("}")
        return lines

    def name(self, value: Value | None) -> str:
        if value is None:
            return "_"
        found = self._names.get(value)
        if found is None:
            label = value.name
            if not label:
                label = str(self._unnamed)
                self._unnamed += 1
            unique, n = label, 1
            while unique in self._taken:
                n += 1
                unique = f"{label}.{n}"
            self._taken.add(unique)
            found = self._names[value] = "%" + _word(unique)
        return found

    def _declared(self, value: Value, default: np.ndarray | None = None) -> str:
        text = f"{self.name(value)}: {value.type or '?'}"
        return text if default is None else f"{text} = {_contents(default)}"

    def _constant(self, value: Value) -> str:
        return f"{self.name(value)}: {value.type or '?'} = {_contents(value.data)}"

    def _node(self, n: Node) -> Iterator[str]:
        operands = ", ".join(self.name(v) for v in n.inputs)
        results = ", ".join(self._result(v) for v in n.outputs)
        line = f"{results} = {n.operator}({operands})" if results else f"{n.operator}({operands})"
        plain: list[str] = []
        nested: list[tuple[str, Any]] = []
        for key, a in n.attributes.items():
            items = a if type(a) is tuple and a and isinstance(a[0], Graph) else (a,)
            if isinstance(items[0], Graph) or _is_function(a):
                nested += [(key, x) for x in items]
            else:
                plain.append(f"{key}={_attribute(a)}")
        if plain:
            line += f" {{{', '.join(plain)}}}"
        if n.annotations.engine:
            line += f" @{n.annotations.engine}"
        if not nested:
            yield line
            return
        yield line + " {"
        for key, x in nested:
            block = self.graph(x, f"{key} = graph") if isinstance(x, Graph) else _Printer().function(x)
            yield from ("  " + text for text in block)
        yield "}"

    def _result(self, value: Value | None) -> str:
        if value is None or value.type is None:
            return self.name(value)
        return f"{self.name(value)}: {value.type}"


def _is_function(a: Any) -> bool:
    from xrt_core.ir.function import Function

    return isinstance(a, Function)


def _word(name: str) -> str:
    """A name as it stands in the text: quoted where it holds more than letters, digits and '_.:/-'."""
    return name if not name or _PLAIN.fullmatch(name) else '"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _contents(array: np.ndarray | None) -> str:
    if array is None:
        return "?"
    if array.size > _SHORT:
        return "..."
    if array.dtype == STRING:
        return repr(array.tolist())
    if array.dtype.kind == "f" or array.dtype.kind == "V":
        flat = [f"{float(x):.6g}" for x in array.reshape(-1)]
    else:
        flat = [str(x) for x in array.reshape(-1)]
    return flat[0] if array.ndim == 0 else "[" + ", ".join(flat) + "]"


def _attribute(a: Any) -> str:
    if isinstance(a, np.ndarray):
        return f"{TensorType(a.dtype, a.shape)} {_contents(a)}"
    if isinstance(a, SparseTensor):
        return str(a.type)
    if isinstance(a, tuple | LongList):
        shown = ", ".join(_attribute(x) for x in a[:16])
        return f"[{shown}{', ...' if len(a) > 16 else ''}]"
    if isinstance(a, float | np.floating):
        return f"{float(a):.8g}"
    if isinstance(a, str | bytes):
        text = repr(a)
        return text if len(text) <= 80 else text[:76] + "..." + text[-1]
    return str(a)

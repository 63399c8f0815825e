"""Circles of imports between files, read from the source: late imports and those for types alone count as well."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tests.architecture.source import CORE, imports, sources

# Public names are imported by the package's root when they are asked for; who imports the root gets its version.
ROOT_PACKAGE = "xrt_core"
IR = {"ir.graph", "ir.function", "ir.text"}
"""The one circle that stays: a graph holds functions as attributes, a function a graph, and both print themselves."""


def module_of(path: object) -> str:
    """The dotted name of a file below xrt_core, that of its folder for an `__init__`."""
    parts = path.relative_to(CORE.parent).with_suffix("").parts  # type: ignore[attr-defined]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def graph_of_files() -> dict[str, set[str]]:
    """Which file of the core imports which, without the root's."""
    found: dict[str, set[str]] = {}
    for path in sources(CORE):
        name = module_of(path)
        found[name] = {i.module for i in imports(path) if i.module.startswith("xrt_core.")} - {name}
    del found[ROOT_PACKAGE]
    return found


def circles(graph: Mapping[str, Iterable[str]]) -> list[set[str]]:
    """The strongly connected components of more than one file (Kosaraju)."""
    back: dict[str, list[str]] = {v: [] for v in graph}
    for v, targets in graph.items():
        for w in targets:
            back.setdefault(w, []).append(v)
    order: list[str] = []
    seen: set[str] = set()
    for v in graph:
        _walk(v, graph, seen, order)
    seen.clear()
    components = []
    for v in reversed(order):
        component: list[str] = []
        _walk(v, back, seen, component)
        if len(component) > 1:
            components.append({name.removeprefix("xrt_core.") for name in component})
    return components


def _walk(start: str, graph: Mapping[str, Iterable[str]], seen: set[str], order: list[str]) -> None:
    """Append what is reached from `start` and not seen yet, each after what it leads to."""
    if start in seen:
        return
    seen.add(start)
    for w in graph.get(start, ()):
        _walk(w, graph, seen, order)
    order.append(start)


def test_files_import_in_no_circle() -> None:
    """No file of the core imports, directly or by others, a file that imports it, but for the one circle inside ir."""
    found = circles(graph_of_files())
    bad = [", ".join(sorted(c)) for c in found if c != IR]

    assert not bad, "\n".join(bad)


def test_circles_are_found() -> None:
    """Of two and of three files, and only those."""
    graph = {"a": ["b"], "b": ["a", "c"], "c": ["d"], "d": ["e"], "e": ["c"], "f": ["a"]}
    assert sorted(map(sorted, circles(graph))) == [["a", "b"], ["c", "d", "e"]]

"""Reads imports from source files, without importing anything."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[2]
CORE = ROOT / "xrt_core"


class Import(NamedTuple):
    """One imported module: where, and as a dotted name; `at_import` if it is imported with the file itself."""

    path: pathlib.Path
    line: int
    module: str
    at_import: bool

    @property
    def where(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line} imports {self.module}"


@cache
def parse(path: pathlib.Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def sources(folder: pathlib.Path) -> list[pathlib.Path]:
    """Every Python file below a folder."""
    return sorted(folder.rglob("*.py"))


@cache
def imports(path: pathlib.Path) -> tuple[Import, ...]:
    """Every import of a file, those inside functions and under TYPE_CHECKING included."""
    return tuple(imports_in(parse(path), path))


def imports_in(tree: ast.Module, path: pathlib.Path) -> Iterator[Import]:
    """Every import of a tree, as if it were that of the file `path`."""
    todo: list[tuple[ast.AST, bool]] = [(tree, True)]
    while todo:
        node, at_import = todo.pop()
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(path, node.lineno, alias.name, at_import)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(path, node)
            for alias in node.names:
                submodule = _is_module(f"{base}.{alias.name}")
                yield Import(path, node.lineno, f"{base}.{alias.name}" if submodule else base, at_import)
        else:
            later = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or _is_type_checking(node)
            todo += [(child, at_import and not later) for child in ast.iter_child_nodes(node)]


def unit(module: str) -> str:
    """The part of xrt_core that a dotted name below it belongs to: 'xrt_core.ir.graph' -> 'ir'; the root is ''."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def unit_of(path: pathlib.Path) -> str:
    """The part of xrt_core that a file belongs to."""
    first = path.relative_to(CORE).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _absolute(path: pathlib.Path, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = path.parent.parts[len(ROOT.parts) :]
    base = package[: len(package) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])


@cache
def _is_module(name: str) -> bool:
    target = ROOT.joinpath(*name.split("."))
    return target.is_dir() or target.with_suffix(".py").is_file()

"""`pytest --fast --modules-run` fails where no function of a module of the core ran: what the fast tests must cover.

Each function of the core is compiled with a first statement that tells of its first run; tracing all calls instead
doubles the time of the tests. Functions that only run while their module is imported (decorators that register, rows of
tables) do not count; modules of packages that only find names, and hooks' specifications, have none to run.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import pathlib
import sys
from collections.abc import Callable, Sequence
from types import CodeType, FrameType, ModuleType
from typing import Any, Final

import pytest

CORE: Final = pathlib.Path(__file__).resolve().parents[1] / "xrt_core"
TABLES: Final = frozenset((CORE / "testing" / "operator_table.py",))
"""Modules whose functions make the rows of a table when they are imported."""
_TELL: Final = "__tell_of_first_run__"
"""The name in a module of what its functions call, None once one of them ran."""


def has_functions(path: pathlib.Path) -> bool:
    """Whether a module has a function or a method, so that something of it can run beyond definitions."""
    if path in TABLES:
        return False
    functions = (n for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.FunctionDef))
    return any(f.name not in ("__getattr__", "__dir__") and not _is_declaration(f) for f in functions)


def _is_declaration(function: ast.FunctionDef) -> bool:
    """Whether the body is a docstring alone."""
    return len(function.body) == 1 and isinstance(function.body[0], ast.Expr)


class ModulesRun(importlib.abc.MetaPathFinder):
    """The modules of a package of which a function ran, in this process and in those of xdist: it loads them itself.

    root: the folder of the package. seen: the modules' paths, with those imported before `start`, which are of
    `xrt_core.testing.plugin`: pytest has run its hooks. The kit's assertions are not rewritten by pytest meanwhile.
    """

    def __init__(self, root: pathlib.Path = CORE) -> None:
        self.root, self.seen = root, set[str]()

    def start(self) -> None:
        """Load what is imported from now on."""
        loaded = (m for n, m in sys.modules.items() if n.partition(".")[0] == self.root.name)
        self.seen.update(m.__file__ for m in loaded if m.__file__)
        sys.meta_path.insert(0, self)

    def stop(self) -> None:
        """Leave further imports to others."""
        sys.meta_path.remove(self)

    def missing(self) -> list[str]:
        """The modules that have functions and of which none ran, relative to the root's folder."""
        modules = [p for p in sorted(self.root.rglob("*.py")) if str(p) not in self.seen]
        return [str(p.relative_to(self.root.parent)) for p in modules if has_functions(p)]

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A module of the package, with a loader that tells."""
        if name.partition(".")[0] != self.root.name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _TellingLoader(spec.loader.name, spec.loader.path, self.seen.add)
        return spec

    # --- as a plugin of pytest --------------------------------------------------------------------------------------

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """A process of xdist is done: take over what it saw."""
        self.seen |= set(getattr(node, "workeroutput", {}).get("modules_run", ()))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail the run where a module is missing; in a process of xdist, tell the one that counts."""
        self.stop()
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["modules_run"] = sorted(self.seen)
        elif missing := self.missing():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
            print(f"\nno test ran a function of: {', '.join(missing)}")


class _TellingLoader(importlib.machinery.SourceFileLoader):
    """Loads a module from its source; `ran(path)` is called when one of its functions runs that no import called."""

    def __init__(self, name: str, path: str, ran: Callable[[str], None]) -> None:
        super().__init__(name, path)
        self.ran = ran

    def get_code(self, fullname: str) -> CodeType:
        """The code with what tells in it; bytecode files have none of it."""
        tree = ast.parse(self.get_data(self.path), self.path)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[0]
                tell = ast.parse(f"if {_TELL}: {_TELL}()").body[0]
                for part in ast.walk(tell):
                    ast.copy_location(part, first)
                node.body.insert(ast.get_docstring(node, clean=False) is not None, tell)
        return compile(tree, self.path, "exec", dont_inherit=True)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's body."""

        def tell() -> None:
            if not _imports(sys._getframe(1)):
                self.ran(self.path)
                setattr(module, _TELL, None)

        setattr(module, _TELL, tell)
        super().exec_module(module)


def _imports(frame: FrameType | None) -> bool:
    """Whether the frame is part of the import of a module."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False

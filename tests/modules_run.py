"""`pytest --fast --modules-run` fails where no function of a module of the core ran: what the fast tests must cover.

Functions that only run while their module is imported (decorators that register, rows of tables) do not count; modules
of packages that only find names, and hooks' specifications, have none to run.
"""

from __future__ import annotations

import ast
import inspect
import pathlib
import sys
import threading
from types import FrameType
from typing import Any, Final

import pytest

CORE: Final = pathlib.Path(__file__).resolve().parents[1] / "xrt_core"
TABLES: Final = frozenset((CORE / "testing" / "operator_table.py",))
"""Modules whose functions make the rows of a table when they are imported."""


def has_functions(path: pathlib.Path) -> bool:
    """Whether a module has a function or a method, so that something of it can run beyond definitions."""
    if path in TABLES:
        return False
    functions = (n for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.FunctionDef))
    return any(f.name not in ("__getattr__", "__dir__") and not _is_declaration(f) for f in functions)


def _is_declaration(function: ast.FunctionDef) -> bool:
    """Whether the body is a docstring alone."""
    return len(function.body) == 1 and isinstance(function.body[0], ast.Expr)


class ModulesRun:
    """The modules under `root` of which a function ran, in this process and in those of xdist. seen: their paths."""

    def __init__(self, root: pathlib.Path = CORE) -> None:
        self.root, self.seen = root, set[str]()
        self._prefix = f"{root}/"

    def start(self) -> None:
        """Listen to calls, in this thread and in those that start from now on."""
        threading.settrace(self._called)
        sys.settrace(self._called)

    def stop(self) -> None:
        """Listen no more."""
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]

    def missing(self) -> list[str]:
        """The modules that have functions and of which none ran, relative to the root's folder."""
        modules = [p for p in sorted(self.root.rglob("*.py")) if str(p) not in self.seen]
        return [str(p.relative_to(self.root.parent)) for p in modules if has_functions(p)]

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        name = code.co_filename
        if name in self.seen or not name.startswith(self._prefix):
            return
        if code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<") and not _imports(frame):
            self.seen.add(name)

    # --- as a plugin of pytest --------------------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> None:
        """Anew for each test: one may have set a trace function of its own."""
        self.start()

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


def _imports(frame: FrameType | None) -> bool:
    """Whether the frame is part of the import of a module."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False

"""How the command line speaks: tables, progress on a terminal only, and errors as one line."""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from xrt_core.errors import XRTError

USER_ERROR: Final = 2
BUG: Final = 1
PIPED_WIDTH: Final = 200
C = TypeVar("C", bound=Callable[..., Any])


def console(*, stderr: bool = False) -> Console:
    """A console on the current stdout or stderr; wide when piped, so that nothing is cut for want of a terminal."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, highlight=False, width=None if stream.isatty() else PIPED_WIDTH)


def say(text: str = "", *, stderr: bool = False) -> None:
    """Print plain text: square brackets in it mean nothing, and long lines stay whole."""
    console(stderr=stderr).print(text, markup=False, soft_wrap=True)


def command(function: C) -> C:
    """Wrap a command: an error of the user is one line on stderr and exit code 2, without a traceback.

    XRT_DEBUG=1 shows the traceback as well.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except Exception as e:
            if os.environ.get("XRT_DEBUG", "") not in ("", "0"):
                traceback.print_exc()
            code, text = _told(e)
        console(stderr=True).print(f"error: {' '.join(text.split())}", style="bold red", markup=False, soft_wrap=True)
        raise typer.Exit(code)

    return run  # type: ignore[return-value]


def _told(error: Exception) -> tuple[int, str]:
    """Exit code and message of an error."""
    if isinstance(error, XRTError):
        return USER_ERROR, str(error)
    if isinstance(error, OSError):
        # of two names the second is the file that was asked for, the first one that was to take its place
        name = error.filename2 or error.filename
        return USER_ERROR, f"{name}: {error.strerror}" if name else str(error)
    return BUG, f"internal error: {type(error).__name__}: {error} (XRT_DEBUG=1 shows where; please report it)"


@contextmanager
def working(label: str) -> Iterator[None]:
    """A spinner with `label` and the time, while the body runs; nothing where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as progress:
        progress.add_task(label, total=None)
        yield


def counted(label: str, count: int) -> Iterator[int]:
    """0 .. count-1 with a progress bar; without one where stderr is no terminal or there is little to count."""
    if not sys.stderr.isatty() or count < 2:
        yield from range(count)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=count)
        for i in range(count):
            yield i
            progress.advance(task)


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, colours: dict[str, str] | None = None) -> None:
    """Print rows under column heads; `colours` gives a style for cells of exactly that text."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, style=(colours or {}).get(cell, "")) for cell in row))
    console().print(table)


def duration(seconds: float) -> str:
    """A time with a fitting unit."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"

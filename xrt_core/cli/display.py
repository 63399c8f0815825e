"""Output of the command line: tables, progress bars (on a terminal only), and errors as one line."""

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

from xrt_core.errors import XRTError, printable

USER_ERROR: Final = 2
BUG: Final = 1
PIPED_WIDTH: Final = 200
C = TypeVar("C", bound=Callable[..., Any])


def console(*, stderr: bool = False) -> Console:
    """Return a rich Console on the current stdout or stderr; wide if piped, so that no cell is truncated."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, highlight=False, width=None if stream.isatty() else PIPED_WIDTH)


def say(text: str = "", *, stderr: bool = False) -> None:
    """Print plain text: no markup in square brackets, no wrapping of long lines."""
    console(stderr=stderr).print(printable(text), markup=False, soft_wrap=True)


def command(function: C) -> C:
    """Wrap a command: print a user error as one line on stderr and exit with code 2, without a traceback.

    XRT_DEBUG=1 prints the traceback as well.
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
            code, text = _exit_code_and_message(e)
        line = f"error: {printable(' '.join(text.split()))}"
        console(stderr=True).print(line, style="bold red", markup=False, soft_wrap=True)
        raise typer.Exit(code)

    return run  # type: ignore[return-value]


def _exit_code_and_message(error: Exception) -> tuple[int, str]:
    """Exit code and message of an error."""
    if isinstance(error, XRTError):
        return USER_ERROR, str(error)
    if isinstance(error, OSError):
        # of two names, the first is the temporary file and the second the requested one, which it was to replace
        name = error.filename2 or error.filename
        return USER_ERROR, f"{name}: {error.strerror}" if name else str(error)
    return BUG, f"internal error: {type(error).__name__}: {error} (XRT_DEBUG=1 shows where; please report it)"


@contextmanager
def working(label: str) -> Iterator[None]:
    """Show a spinner with `label` and the elapsed time while the body runs; nothing if stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as progress:
        progress.add_task(label, total=None)
        yield


def counted(label: str, count: int) -> Iterator[int]:
    """Yield 0 .. count-1 with a progress bar; without one if stderr is not a terminal or `count` is small."""
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
    """Print rows under column headers. colours: cell text -> rich style of cells with exactly that text."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell), style=(colours or {}).get(cell, "")) for cell in row))
    console().print(table)


def duration(seconds: float) -> str:
    """Format seconds with a suitable unit."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"

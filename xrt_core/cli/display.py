"""Output of the command line: tables, progress bars (on a terminal only), and errors as one line."""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Annotated, Any, Final, NamedTuple, TypeVar

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from xrt_core.errors import XRTError, printable
from xrt_core.progress import Progress

PIPED_WIDTH: Final = 200
C = TypeVar("C", bound=Callable[..., Any])


class ExitCode(enum.IntEnum):
    """Exit codes of `xrt`, the same for every command."""

    DONE = 0
    FAILED_CHECK = 1
    """It ran, and what it checks does not hold: a problem, a difference, a fault, damage."""
    USAGE = 2
    """It could not: wrong arguments, a file or a model that does not fit, an engine that cannot be used."""
    BUG = 3
    """An error within XRT."""
    INTERRUPTED = 130
    """Ctrl-C, by convention of shells."""


class FailedCheck(NamedTuple):
    """What a command returns whose check does not hold: exit code 1. result: for `--json`."""

    result: Any


@dataclasses.dataclass
class Output:
    """How a command writes. json: it prints its result as JSON, and no text. quiet: no progress."""

    json: bool = False
    quiet: bool = False


_output: Final[ContextVar[Output]] = ContextVar("xrt_output", default=Output())  # noqa: B039 - it is never changed


def console(*, stderr: bool = False) -> Console:
    """Return a rich Console on the current stdout or stderr; wide if piped, so that no cell is truncated."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, highlight=False, width=None if stream.isatty() else PIPED_WIDTH)


def say(text: str = "", *, stderr: bool = False) -> None:
    """Print plain text: no markup in square brackets, no wrapping of long lines. With `--json` only on stderr."""
    if _output.get().json and not stderr:
        return
    console(stderr=stderr).print(printable(text), markup=False, soft_wrap=True)


def command(function: C, result: Any = None) -> C:
    """Wrap a command: print a user error as one line on stderr and exit with code 2, without a traceback.

    XRT_DEBUG=1 prints the traceback as well. result: the type of what the command returns; it then has the options
    `--json`, which prints that and no text, and `--quiet`. It may be a function that makes it, called if it is printed.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        output = Output()
        if result is not None:
            output = Output(kwargs.pop("as_json"), kwargs.pop("quiet") or _output.get().quiet)
        token = _output.set(output)
        try:
            found = function(*args, **kwargs)
            failed = isinstance(found, FailedCheck)
            found = found.result if isinstance(found, FailedCheck) else found
            if output.json:
                print_json(found() if callable(found) else found)
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except KeyboardInterrupt:
            say("interrupted", stderr=True)
            raise typer.Exit(ExitCode.INTERRUPTED) from None
        except Exception as e:
            if os.environ.get("XRT_DEBUG", "") not in ("", "0"):
                traceback.print_exc()
            code, text = _exit_code_and_message(e)
            kind = type(e).__name__ if isinstance(e, XRTError) else "OSError" if code == ExitCode.USAGE else "internal"
        else:
            if failed:
                raise typer.Exit(ExitCode.FAILED_CHECK)
            return None
        finally:
            _output.reset(token)
        line = printable(" ".join(text.split()))
        if output.json:
            print_json({"error": {"kind": kind, "message": line}})
        console(stderr=True).print(f"error: {line}", style="bold red", markup=False, soft_wrap=True)
        raise typer.Exit(code)

    if result is not None:
        own = inspect.signature(function, eval_str=True)
        more = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=annotation)
            for name, annotation in (("as_json", _JSON), ("quiet", _QUIET))
        ]
        run.__signature__ = own.replace(parameters=[*own.parameters.values(), *more])  # type: ignore[attr-defined]
        run.__annotations__ = {**function.__annotations__, "as_json": _JSON, "quiet": _QUIET}
        run.result = result  # type: ignore[attr-defined]
    return run  # type: ignore[return-value]


_JSON: Final = Annotated[bool, typer.Option("--json", help="Print the result as JSON (docs/cli.md) instead of text.")]
_QUIET: Final = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]


def giving(result: Any) -> Callable[[C], C]:
    """`command` for one that returns a `result`."""
    return functools.partial(command, result=result)


@contextmanager
def quietly(quiet: bool) -> Iterator[None]:
    """Within it no command shows progress."""
    token = _output.set(Output(quiet=quiet))
    try:
        yield
    finally:
        _output.reset(token)


def print_json(found: Any) -> None:
    """Print data, or a Struct, as JSON on stdout."""
    import msgspec

    text = msgspec.json.format(msgspec.json.encode(found), indent=2).decode()
    console().print(text, markup=False, soft_wrap=True)


def _exit_code_and_message(error: Exception) -> tuple[int, str]:
    """Exit code and message of an error."""
    if isinstance(error, XRTError):
        return ExitCode.USAGE, str(error)
    if isinstance(error, OSError):
        # of two names, the first is the temporary file and the second the requested one, which it was to replace
        name = error.filename2 or error.filename
        return ExitCode.USAGE, f"{name}: {error.strerror}" if name else str(error)
    what = f"{type(error).__name__}: {error}"
    return ExitCode.BUG, f"internal error: {what} (XRT_DEBUG=1 shows where; please report it)"


def working(label: str) -> Progress:
    """Show what is done, how far it is and what it waits for, while the body runs; nothing if stderr is not a terminal,
    and with `--quiet`."""
    return Progress(label, shown=not is_quiet())


def counted(label: str, count: int) -> Iterator[int]:
    """Yield 0 .. count-1 with a progress bar; without one as with `working`, or if `count` is small."""
    with Progress(label, count, shown=count > 1 and not is_quiet()) as progress:
        for i in range(count):
            yield i
            progress.advance()


def is_quiet() -> bool:
    """Whether no progress is wanted."""
    return _output.get().quiet


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, colours: dict[str, str] | None = None) -> None:
    """Print rows under column headers, but with `--json`. colours: cell text -> rich style of cells with that text."""
    if _output.get().json:
        return
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

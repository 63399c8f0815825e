"""`xrt launch` and `python -m xrt_distributed`: run a program in several processes."""

from __future__ import annotations

import argparse
import math
import pathlib
import shlex
import sys
from collections.abc import Sequence
from typing import Annotated

import typer


def run(arguments: Sequence[str], prog: str) -> int:
    """Run `[options] program.py arguments`, or `-m package`; the exit code. Raises SystemExit for bad arguments."""
    from xrt_distributed.launcher import SSH, Settings, launch_all

    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} -n N [options] (program.py | -m package) [arguments ...]",
        description="Run a program in N processes that share one mesh. One that ends badly, or hangs, ends all.",
    )
    parser.add_argument("-n", "--nproc", type=_positive, required=True, metavar="N", help="processes, on each host")
    parser.add_argument("--hosts", type=_names, default=(), metavar="A,B", help="start them on these, over ssh")
    parser.add_argument("--ssh", type=shlex.split, metavar="COMMAND", help=f"instead of: {shlex.join(SSH)}")
    parser.add_argument("--python", default=sys.executable, metavar="PATH", help="there; default: this one's path")
    parser.add_argument("--devices", type=_positive, metavar="N", help="divide each process's CPU into N devices")
    parser.add_argument("--logs", type=pathlib.Path, metavar="FOLDER", help="write rank0.log and so on there too")
    parser.add_argument("--restarts", type=_count, default=0, metavar="N", help="start all again, up to N times")
    parser.add_argument(
        "--hang", type=_silence, default=20.0, metavar="SECONDS", help="without a heartbeat, a process hangs (20)"
    )
    parser.add_argument(
        "--stall", type=_span, default=0.0, metavar="SECONDS", help="end programs that stand still for so long (never)"
    )
    parser.add_argument("--port", type=_positive, help="where they meet, on the first host; default: a free one")
    parser.add_argument("-m", dest="module", action="store_true", help="the program is a package")
    parser.add_argument("program", help="a file or, with -m, a package")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the program")
    args = parser.parse_args(list(arguments))
    if not args.hosts and not args.module and not pathlib.Path(args.program).is_file():
        parser.error(f"there is no file {args.program}")
    target = ["-m", args.program] if args.module else [args.program]
    settings = Settings(
        args.nproc, args.devices, args.logs, args.restarts, args.hang, args.port,
        stall=args.stall, hosts=args.hosts, ssh=tuple(args.ssh or SSH), python=args.python,
    )  # fmt: skip
    return launch_all([*target, *args.arguments], settings)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: it takes a whole number of at least 1")
    return int(text)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(n.strip() for n in text.split(","))
    if not all(names) or any(n.startswith("-") for n in names) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r}: it takes names of machines with commas between, each once")
    return names


def _silence(text: str) -> float:
    """Seconds without a heartbeat, of which there are two a second."""
    return _number(text, 1)


def _span(text: str) -> float:
    return _number(text, 0)


def _number(text: str, least: int) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not least <= found < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: it takes seconds, {least} at least")
    return found


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}: it takes a whole number of at least 0")
    return int(text)


def launch(
    arguments: Annotated[list[str], typer.Argument(help="-n N [options] (program.py | -m package) [arguments ...]")],
) -> None:
    """Run a program in several processes that share one mesh (docs/distributed.md)."""
    sys.exit(run(arguments, "xrt launch"))


launch.context_settings = {  # type: ignore[attr-defined]
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
}

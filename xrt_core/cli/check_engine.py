"""`xrt check-engine`: the conformance kit, planted faults and mutated models against an engine, with a score."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
from importlib.metadata import entry_points
from json import dumps
from typing import Annotated, Any, Final

import typer
from msgspec import convert

from xrt_core.cli import results
from xrt_core.cli.display import FailedCheck, giving, say, show_table, working
from xrt_core.errors import EngineError, InputError, UnsupportedError
from xrt_core.files import decode, replace_file

_PLUGIN: Final = "xrt_core.testing.plugin"
_LAST: Final = 25  # lines of the tests' output that an error shows


@giving(results.CheckEngine)
def check_engine(
    package: Annotated[
        str,
        typer.Argument(
            help="The engine's pip package, its name, or module:Class of one not installed.", show_default=False
        ),
    ],
    device: Annotated[str | None, typer.Option("--device", help="The device to run on; the engine's first.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Run every case of the kit, not a sample (minutes).")] = False,
    fuzz: Annotated[int, typer.Option("--fuzz", min=0, help="Run so many mutated models on it.")] = 30,
    lists: Annotated[
        pathlib.Path | None,
        typer.Option("--lists", help="The folder of its unsupported.txt and xfails.txt (tests/conformance)."),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1.0, help="Seconds after which the tests are ended: an engine may hang.")
    ] = 3600.0,
    report: Annotated[pathlib.Path | None, typer.Option("--report", help="Write the score as JSON.")] = None,
    html: Annotated[
        pathlib.Path | None, typer.Option("--html", help="Write a page: score, what fails, what is missing and why.")
    ] = None,
    badges: Annotated[
        pathlib.Path | None, typer.Option("--badges", help="Write SVG badges into this folder.")
    ] = None,
) -> results.CheckEngine | FailedCheck:
    """Test an engine with the conformance kit; print its score by family of operators and by data type.

    Exit code 1 if anything fails that is not in its lists.
    """
    from xrt_core.testing import card_page

    if importlib.util.find_spec("pytest") is None:
        raise UnsupportedError('xrt check-engine needs pytest: pip install "xrt-core[authors]"')
    if lists is not None and not lists.is_dir():
        raise InputError(f"--lists {lists}: there is no such folder")
    spec = _spec(package)
    with working(f"testing {spec}"):
        card, status = _tested(spec, device, full, fuzz, lists, timeout)
    _show(card, card_page.failed(card))
    written = [(html, card_page.card_page(card)), (report, dumps(card, indent=1) + "\n")]
    if badges is not None:
        badges.mkdir(parents=True, exist_ok=True)
        written += [(badges / name, svg) for name, svg in card_page.badges(card).items()]
    for path, content in written:
        if path is not None:
            with replace_file(path) as file:
                file.write(content.encode())
            say(f"wrote {path}")
    result = convert(card, results.CheckEngine)
    return FailedCheck(result) if status else result


def _spec(package: str) -> str:
    """The engine's name, or module:Class. Raises InputError for what is neither an engine nor a package with one."""
    from xrt_core.engine import engines

    lines = engines.listing(probe=False)
    if ":" in package or any(line.name == package for line in lines):
        return package
    wanted = re.sub(r"[-_.]+", "-", package).lower()
    found = [line.name for line in lines if line.package and re.sub(r"[-_.]+", "-", line.package).lower() == wanted]
    if not found:
        there = ", ".join(f"{line.name} ({line.package})" for line in lines) or "none"
        raise InputError(f"{package!r} is no installed engine and no package that brings one; there is: {there}")
    if len(found) > 1:
        raise InputError(f"{package} brings several engines; name one of {', '.join(found)}")
    return found[0]


def _tested(
    spec: str, device: str | None, full: bool, fuzz: int, lists: pathlib.Path | None, timeout: float
) -> tuple[dict[str, Any], int]:
    """The score card of an engine, from a process of its own, and the status of its tests.

    Raises EngineError where the tests do not come so far as to make one, or have not ended after `timeout` seconds.
    """
    options = ["--xrt-engine", spec, "--xrt-fuzz", str(fuzz)]
    options += ["--xrt-device", device] if device is not None else []
    options += ["--xrt-full"] if full else []
    options += ["--xrt-lists", str(lists.resolve())] if lists is not None else []
    if not any(e.value == _PLUGIN for e in entry_points(group="pytest11")):
        options += ["-p", _PLUGIN]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])}
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "card.json")
        pathlib.Path(folder, "pytest.ini").write_text("[pytest]\n", encoding="utf-8")  # nobody else's settings
        arguments = ["--pyargs", "xrt_core.testing", "--xrt-scorecard", str(path), "-q", "-p", "no:cacheprovider"]
        log = pathlib.Path(folder, "log")
        with log.open("w", encoding="utf-8") as file:  # no pipe, which processes that an engine leaves would hold open
            tests = subprocess.Popen(
                [sys.executable, "-m", "pytest", "-c", "pytest.ini", "--rootdir", folder, *options, *arguments],
                cwd=folder, env=variables, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
            )  # fmt: skip
            try:
                status = tests.wait(timeout)
            except subprocess.TimeoutExpired as e:
                raise EngineError(
                    f"the tests of engine {spec!r} have not ended within {timeout:g} s; --timeout gives them longer"
                ) from e
            finally:
                if tests.poll() is None:  # with what it has started: a timeout, or an interrupt
                    os.killpg(tests.pid, signal.SIGKILL)
                    tests.wait()
        output = log.read_text(encoding="utf-8", errors="replace")
        cards: list[dict[str, Any]] = []
        if path.is_file():
            cards = decode(path.read_bytes(), dict[str, Any], "the score card", EngineError)["engines"]
    if not cards or not cards[0]["operators"]:
        reasons = "; ".join(dict.fromkeys(cards[0]["reasons"].values())) if cards else ""
        last = "\n".join(output.splitlines()[-_LAST:])
        raise EngineError(f"engine {spec!r} cannot be tested here: {reasons or last}")
    return cards[0], status


def _show(card: dict[str, Any], failed: list[str]) -> None:
    """Print the score."""
    say(f"{card['engine']} {card['version']} on {card['device'] or 'no device'}")
    say(f"score: {card['score']:.0%} of {len(card['operators'])} operators are taken, and pass")
    say()
    families = [(f, *map(str, r.values())) for f, r in card["families"].items()]
    show_table(("family", "operators", "taken", "passed"), families)
    say()
    dtypes = [(d, *map(str, r.values())) for d, r in card["dtypes"].items()]
    show_table(("dtype", "cases", "taken", "run", "passed"), dtypes)
    say()
    say("contract, faults and fuzzing: " + ", ".join(f"{n} {o}" for o, n in sorted(card["tests"].items())))
    missing: dict[str, list[str]] = {}
    for operator, row in card["operators"].items():
        if row["state"] == "not claimed":
            missing.setdefault(row["reason"].replace(operator, "it"), []).append(operator)
    if missing:
        say(f"not taken: {sum(map(len, missing.values()))} operators, for {len(missing)} reasons (--html lists them)")
    for name in failed:
        say(f"failed: {name}: {card['reasons'].get(name, '')}")

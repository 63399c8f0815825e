"""`xrt new-engine`: write the package of a new engine from the template that comes with XRT."""

from __future__ import annotations

import json
import logging
import pathlib
import sys
import tempfile
from typing import Annotated, Final

import typer

from xrt_core.cli import results
from xrt_core.cli.display import giving, say
from xrt_core.errors import InputError, UnsupportedError

_PACKAGE: Final = pathlib.Path(__file__).resolve().parents[1]
_PLACES: Final = (_PACKAGE / "templates" / "engine", _PACKAGE.parent / "templates" / "engine")
"""Where the template is: in an installed package, and in a clone of the repository."""


@giving(results.NewEngine)
def new_engine(
    engine: Annotated[
        str | None, typer.Argument(help='The engine\'s name, as users write it in engine="...".', show_default=False)
    ] = None,
    style: Annotated[
        str | None,
        typer.Option(
            "--style",
            help="How it computes: namespace (a library like NumPy, or of the array API standard), kernels (one per "
            "operator), onnx (it takes whole models).",
        ),
    ] = None,
    namespace: Annotated[
        str | None, typer.Option("--namespace", help="For that style: numpy, cupy, torch, array_api_strict, ...")
    ] = None,
    package: Annotated[str | None, typer.Option("--package", help="Name of the pip package; xrt-ENGINE.")] = None,
    author: Annotated[str | None, typer.Option("--author", help="For the licence and the metadata.")] = None,
    licence: Annotated[
        str | None, typer.Option("--licence", help="Apache-2.0, MIT, BSD-3-Clause or proprietary.")
    ] = None,
    devices: Annotated[str | None, typer.Option("--devices", help="cpu, cuda, tpu, cpu,cuda or other.")] = None,
    device_kind: Annotated[
        str | None, typer.Option("--device-kind", help="For other: the name of the kind of devices that it brings.")
    ] = None,
    operators: Annotated[
        bool, typer.Option("--operators", help="Bring operators that ONNX has not, too.", show_default=False)
    ] = False,
    output: Annotated[
        pathlib.Path, typer.Option("--output", help="The folder to write the project into.")
    ] = pathlib.Path(),
    ask: Annotated[
        bool | None, typer.Option("--ask/--no-ask", help="Ask for what is not given; the default on a terminal.")
    ] = None,
) -> results.NewEngine:
    """Write the package of a new engine: it installs, runs models and passes its tests before a line of it is changed.

    docs/writing-an-engine.md describes what to do then.
    """
    answers = {
        "engine": engine, "array_library": style, "namespace": namespace, "package": package, "author": author,
        "licence": licence, "devices": devices, "device_kind": device_kind, "operators": "yes" if operators else None,
    }  # fmt: skip
    given = {name: answer for name, answer in answers.items() if answer is not None}
    template = _template()
    _check(template, given)
    made = _bake(template, given, output, sys.stdin.isatty() if ask is None else ask)
    say(f"wrote {made}")
    return results.NewEngine(str(made))


def _template() -> pathlib.Path:
    """The folder of the template. Raises UnsupportedError where the installation has none."""
    for place in _PLACES:
        if (place / "cookiecutter.json").is_file():
            return place
    raise UnsupportedError(f"this installation of xrt-core has no template of engines ({_PLACES[0]}); install it again")


def _check(template: pathlib.Path, given: dict[str, str]) -> None:
    """Raise InputError for an answer that is none of its question's choices."""
    questions = json.loads((template / "cookiecutter.json").read_text(encoding="utf-8"))
    for name, answer in given.items():
        choices = questions[name]
        if isinstance(choices, list) and answer not in choices:
            option = "style" if name == "array_library" else name
            raise InputError(f"--{option} {answer!r} is none of {', '.join(choices)}")


def _bake(template: pathlib.Path, given: dict[str, str], output: pathlib.Path, ask: bool) -> pathlib.Path:
    """Write the project; return its folder. Raises InputError, and UnsupportedError where cookiecutter is missing."""
    try:
        from cookiecutter.exceptions import CookiecutterException, FailedHookException
        from cookiecutter.main import cookiecutter
    except ModuleNotFoundError as e:
        raise UnsupportedError(
            f"xrt new-engine needs cookiecutter, and {e.name} is not installed: pip install \"xrt-core[authors]\""
        ) from e
    logging.getLogger("cookiecutter").setLevel(logging.CRITICAL)  # it logs the trace of a hook that refuses
    with tempfile.TemporaryDirectory() as folder:
        config = pathlib.Path(folder, "config.yaml")  # nothing of the user's own, and no record of the answers
        config.write_text(json.dumps({"cookiecutters_dir": folder, "replay_dir": folder}), encoding="utf-8")
        try:
            made: str = cookiecutter(
                str(template), no_input=not ask, extra_context=given, config_file=str(config), output_dir=str(output)
            )
        except FailedHookException as e:
            raise InputError("nothing was written: these answers make no engine, for the reason above") from e
        except CookiecutterException as e:
            raise InputError(f"the project cannot be written: {e}") from e
    return pathlib.Path(made)

"""Arguments shared by several commands, and their conversion to an XRTModule and its inputs."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xrt_core import options
from xrt_core.cache.model_file import is_model_file
from xrt_core.cli.display import working
from xrt_core.cli.inputs import parse_shapes, random_inputs, read_inputs
from xrt_core.errors import OptionError

if TYPE_CHECKING:
    from xrt_core.module import XRTModule

OnnxFile = Annotated[pathlib.Path, typer.Argument(help="An ONNX file.", show_default=False)]
Model = Annotated[
    pathlib.Path, typer.Argument(help="An ONNX file, or one that `xrt compile` wrote.", show_default=False)
]


def _engines(incomplete: str) -> list[str]:
    """Names of engines, for the shell; no engine is imported."""
    from xrt_core.engine import engines

    return [n for n in ("auto", "host", *engines.names()) if n.startswith(incomplete)]


def _options(incomplete: str) -> list[str]:
    """Names of options, for the shell."""
    return [f"{n}=" for n in options.TABLE if n.startswith(incomplete)]


Engine = Annotated[
    list[str] | None,
    typer.Option(
        "--engine", "-e", help="An engine; repeat it, by priority; 'host' for none. Default: all.",
        autocompletion=_engines,
    ),
]  # fmt: skip
OneEngine = Annotated[str, typer.Option("--engine", "-e", help="The engine to test.", autocompletion=_engines)]
Inputs = Annotated[pathlib.Path | None, typer.Option("--inputs", "-i", help="A .npz file with the inputs by name.")]
Random = Annotated[bool, typer.Option("--random", help="Generate random inputs (the default without --inputs).")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of random inputs.")]
Shape = Annotated[
    list[str] | None,
    typer.Option("--shape", help="NAME=DIM,DIM,... for an input, or SYMBOL=DIM, of random inputs; others are 1."),
]
Option = Annotated[
    list[str] | None,
    typer.Option(
        "--option", "-o", help="NAME=VALUE, any option of docs/options.md; may be repeated.", autocompletion=_options
    ),
]
Recompile = Annotated[
    bool,
    typer.Option("--recompile", help="For a saved model: compile again what does not fit this machine, do not fail."),
]


def keywords_of(engine: Sequence[str] | None, option: Sequence[str] | None) -> dict[str, Any]:
    """Return the keyword arguments of XRTModule for `--engine` and `--option`. Raises OptionError."""
    keywords: dict[str, Any] = {}
    for text in option or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise OptionError(f"--option {text!r}: it takes NAME=VALUE, such as minimum_nodes=4")
        keywords[name] = options.from_text(name, value, f"--option {text}")
    if engine:
        keywords["engine"] = list(engine)
    return keywords


def load_module(
    model: pathlib.Path, engine: Sequence[str] | None, option: Sequence[str] | None, recompile: bool = False
) -> XRTModule:
    """Load an ONNX file or a saved module, with `--engine` and `--option` applied. Raises XRTError.

    recompile: see `XRTModule.load`; raises OptionError for an ONNX file.
    """
    keywords = keywords_of(engine, option)
    options.resolve(keywords)  # report a bad option before reading a large file
    saved = is_model_file(model)
    if recompile and not saved:
        raise OptionError(f"--recompile is for what `xrt compile` wrote; {model} is compiled without it")
    with working(f"loading {model.name}"):
        from xrt_core.module import XRTModule

        return XRTModule.load(model, recompile=recompile, **keywords) if saved else XRTModule(model, **keywords)


def module_inputs(
    module: XRTModule, inputs: pathlib.Path | None, random: bool, shape: Sequence[str] | None, seed: int
) -> dict[str, Any]:
    """Return the inputs read from `--inputs`, or generated from `--shape` and `--seed`. Raises XRTError."""
    if inputs is not None:
        if random or shape:
            raise OptionError("--inputs gives the inputs: --random and --shape cannot be combined with it")
        return read_inputs(inputs)
    left_out = frozenset(module.optional_inputs)
    types = {name: type_ for name, type_ in module.input_types.items() if name not in left_out}
    return random_inputs(types, parse_shapes(shape or (), types), seed)

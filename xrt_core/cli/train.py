"""`xrt train`: train an ONNX model on arrays from a file."""

from __future__ import annotations

import pathlib
import time
from typing import Annotated, Any

import typer

from xrt_core import options
from xrt_core.cli import arguments, results
from xrt_core.cli.display import ExitCode, duration, giving, is_quiet, say, working
from xrt_core.cli.inputs import read_inputs
from xrt_core.errors import OptionError, nearest


@giving(results.Train)
def train(
    model: arguments.OnnxFile,
    data: Annotated[
        pathlib.Path,
        typer.Option("--data", "-d", help="A .npz file: the model's inputs and the labels by name, a row per sample."),
    ],
    loss: Annotated[
        str | None,
        typer.Option("--loss", help="'cross_entropy' (array labels), 'mse' (array target), or an output's name."),
    ] = None,
    optimizer: Annotated[str, typer.Option("--optimizer", help="A class of xrt.optim.")] = "Adam",
    learning_rate: Annotated[float, typer.Option("--learning-rate", "--lr", help="The learning rate.")] = 1e-3,
    batch: Annotated[int, typer.Option("--batch", "-b", min=1, help="Samples in a batch.")] = 32,
    steps: Annotated[int, typer.Option("--steps", "-n", min=1, help="Steps to take.")] = 100,
    engine: arguments.Engine = None,
    seed: arguments.Seed = 0,
    curve: Annotated[pathlib.Path | None, typer.Option("--curve", help="Plot the losses to a .png file.")] = None,
    checkpoint: Annotated[
        pathlib.Path | None, typer.Option("--checkpoint", help="Where to save the state (safetensors) at the end.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from --checkpoint if the file exists.")] = False,
    output: Annotated[pathlib.Path | None, typer.Option("--output", help="Write the trained model (ONNX).")] = None,
    option: arguments.Option = None,
) -> results.Train:
    """Train a model. Ctrl-C saves --checkpoint too; a resumed run gives the same losses as an uninterrupted one."""
    from xrt_core.training.loop import batches, fit, save_curve
    from xrt_core.training.module import TrainModule

    if resume and checkpoint is None:
        raise OptionError("--resume continues from --checkpoint: give its path")
    keywords = arguments.keywords_of(engine, option)
    options.resolve({"phase": "train", **keywords})
    arrays = read_inputs(data)
    with working(f"loading {model.name}"):
        trainer = TrainModule(model, loss=loss, optimizer=_optimizer(optimizer, learning_rate), seed=seed, **keywords)
    if resume and checkpoint is not None and checkpoint.exists():
        trainer.load(checkpoint)
    begun = trainer.step_count
    source = batches(arrays, batch, seed=seed, start=begun)
    start = time.perf_counter()
    try:
        losses = fit(trainer, source, steps, label=model.stem, progress=not is_quiet())
    except KeyboardInterrupt:
        if checkpoint is not None:
            trainer.save(checkpoint)
            say(f"interrupted after step {trainer.step_count}; wrote {checkpoint}, --resume continues from there")
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    took = time.perf_counter() - start
    summary = trainer.explain().summary()
    say(summary)
    say(
        f"steps {begun + 1} to {begun + len(losses)}: loss {losses[0]:.6g} -> {losses[-1]:.6g}, {duration(took)} in all"
    )
    if curve is not None:
        save_curve(losses, curve, model.stem)
    if checkpoint is not None:
        trainer.save(checkpoint)
    if output is not None:
        trainer.export(output)
    wrote = [str(path) for path in (curve, checkpoint, output) if path is not None]
    for path in wrote:
        say(f"wrote {path}")
    return results.Train(
        first_step=begun + 1, last_step=begun + len(losses), first_loss=losses[0], last_loss=losses[-1], seconds=took,
        summary=summary, wrote=wrote,
    )  # fmt: skip


def _optimizer(name: str, rate: float) -> Any:
    from xrt_core.training import optimizer

    known = {k: v for k, v in vars(optimizer).items() if isinstance(v, type) and issubclass(v, optimizer.Optimizer)}
    known = {k: v for k, v in known.items() if k != "Optimizer" and not k.startswith("_")}
    for k, kind in known.items():
        if k.lower() == name.lower():
            return kind(rate)
    raise OptionError(f"--optimizer {name!r}: it takes one of {', '.join(known)}{nearest(name, known)}")

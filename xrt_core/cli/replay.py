"""`xrt replay`: run a repro bundle again and report whether it still fails."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from typing import Annotated

import typer

from xrt_core.cli import results
from xrt_core.cli.display import ExitCode, FailedCheck, giving, say, working
from xrt_core.errors import OptionError


@giving(results.Replay)
def replay(
    bundle: Annotated[pathlib.Path, typer.Argument(help="A repro bundle that a failure wrote.", show_default=False)],
    engine: Annotated[str | None, typer.Option("--engine", "-e", help="Engine to use instead of the bundle's.")] = None,
    timeout: Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds until the run counts as hung.")] = 600.0,
    here: Annotated[
        bool, typer.Option("--here", help="Run in this process (for a debugger); a crash then ends this command.")
    ] = False,
    onnx: Annotated[
        pathlib.Path | None, typer.Option("--onnx", help="Also write the function as an ONNX model.")
    ] = None,
) -> results.Replay | FailedCheck:
    """Compile and verify the function of a bundle in a worker process. The exit code is 1 if it still fails."""
    from xrt_core.frontends.onnx_export import export_function
    from xrt_core.verify.repro import read_bundle

    found = read_bundle(bundle)
    if onnx is not None:
        if onnx.suffix != ".onnx":
            raise OptionError(f"--onnx {onnx}: it takes a file name that ends in .onnx")
        onnx.write_bytes(export_function(found.function).SerializeToString())
        say(f"wrote {onnx}")
    if not here:
        versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
        say(f"{found.function.name}: {len(found.function.body.nodes)} nodes on {found.engine} ({versions})")
        say(f"then: {found.error}")
        fails, now = _in_child(bundle, engine, timeout)
        say(f"now: {now}")
        answer = results.Replay(fails=fails, then=found.error, now=now)
        return FailedCheck(answer) if fails else answer
    from xrt_core.engine import engines
    from xrt_core.guard.replay import replay as replay_bundle

    owner = engines.usable(engine or found.engine)
    with working("replaying"):
        result = replay_bundle(found, owner, engines.device(owner))
    say(f"{'still fails' if result.fails else 'fixed'}: {result.text}")
    answer = results.Replay(fails=result.fails, then=found.error, now=result.text)
    return FailedCheck(answer) if result.fails else answer


def _in_child(bundle: pathlib.Path, engine: str | None, timeout: float) -> tuple[bool, str]:
    """Run the command with --here in a child process; return whether it still fails, and its output. Raises Exit where
    the child could not try."""
    given = [sys.executable, "-m", "xrt_core.cli.app", "replay", "--here", str(bundle)]
    if engine is not None:
        given += ["--engine", engine]
    try:
        with working(f"replaying in a child process, at most {timeout:g} s"):
            done = subprocess.run(given, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return True, f"still fails: no result after {timeout:g} s"
    if done.returncode in (ExitCode.DONE, ExitCode.FAILED_CHECK):
        return done.returncode != ExitCode.DONE, done.stdout.strip()
    if done.returncode < 0:
        last = "\n".join(done.stderr.splitlines()[-20:])
        return True, f"still fails: the process was killed by signal {-done.returncode}; its last output:\n{last}"
    say(done.stderr.strip(), stderr=True)
    raise typer.Exit(done.returncode)

"""`xrt launch`: processes on one mesh, and what happens when one of them fails."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")

REGRESSION = pathlib.Path(__file__).with_name("regression.py")


def launch(environment: dict[str, str], *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the launcher to its end."""
    done = subprocess.run(
        [sys.executable, "-m", "xrt_distributed", *arguments],
        env=environment, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def is_running(process: int) -> bool:
    """Whether a process is there, and no zombie."""
    try:
        return "Z" not in pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def commands() -> list[str]:
    """The command lines of all processes."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            found.append(path.read_text(errors="replace"))
    return found


def numbers_of(environment: dict[str, str], folder: pathlib.Path, what: str) -> list[dict[str, object]]:
    launch(environment, "-n", "2", "--devices", "2", "--logs", str(folder), str(REGRESSION), what, str(folder))
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
def test_a_process_that_dies(environment: dict[str, str], tmp_path: pathlib.Path) -> None:
    """It ends the others within seconds; the message names it, and has its last lines; its log is a file."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, pathlib, sys, time\nprint(os.getpid(), 'of', sys.argv[1:], flush=True)\n"
        "other = pathlib.Path(__file__).with_name('printed')\n"
        "if os.environ['RANK'] == '1':\n"
        "    while not other.exists():\n        time.sleep(0.01)\n"
        "    raise ValueError('no more')\nother.touch()\ntime.sleep(120)\n"
    )
    start = time.monotonic()
    done = launch(environment, "-n", "2", "--logs", str(tmp_path / "logs"), str(program), "a", "-x", code=1)
    assert time.monotonic() - start < 60
    assert re.search(r"rank 1 \(process \d+\) ended with exit code 1 after .* all are ended", done.stderr)
    assert "ValueError: no more" in done.stderr
    own = re.findall(r"^\[\d\] (\d+) of \['a', '-x'\]$", done.stdout, re.MULTILINE)
    assert len(own) == 2
    assert not any(is_running(int(p)) for p in own)
    assert "ValueError: no more" in (tmp_path / "logs" / "rank1.log").read_text()


@pytest.mark.parametrize(
    ("option", "value", "said"), [("--hang", "0", "1 at least"), ("--hang", "nan", "1 at"), ("--stall", "-1", "0 at")]
)
def test_wrong_spans(option: str, value: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Seconds in which no process could give a heartbeat are an error, and nothing is started."""
    from xrt_distributed.command import run

    with pytest.raises(SystemExit, match="2"):
        run(["-n", "2", option, value, str(REGRESSION)], "xrt launch")
    assert f"argument {option}: {value!r}: it takes seconds, {said}" in capsys.readouterr().err


@pytest.mark.nightly
def test_wrong_arguments(environment: dict[str, str]) -> None:
    """A program that is not there is an error before anything is started; `xrt launch` is found by its entry point."""
    done = subprocess.run(
        [sys.executable, "-c", "from xrt_core.cli.app import main; main()", "launch", "-n", "2", "absent.py", "-x"],
        env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "xrt launch: error: there is no file absent.py" in done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize(("what", "options"), [("numbers", {}), ("optax", {"optax": True, "accumulate": 2})])
def test_training_in_two_processes(
    environment: dict[str, str], tmp_path: pathlib.Path, what: str, options: dict[str, Any]
) -> None:
    """Two processes of two devices each have the numbers of one process, and write one checkpoint."""
    from regression import X, Y, numbers, trainer

    want = numbers(10, **options)
    for found in numbers_of(environment, tmp_path, what):
        for name in ("losses", "uneven", "epochs", "evaluate", "predict", "inference"):
            np.testing.assert_allclose(found[name], want[name], rtol=0, atol=1e-5)
        for name in ("gradients", "variables"):
            np.testing.assert_allclose(
                list(found[name].values()),
                list(want[name].values()),
                rtol=1e-4,
                err_msg=name,  # type: ignore[attr-defined]
            )
        assert found["ran_on"] in (["cpu, cpu:1, cpu:0@1, cpu:1@1"], ["cpu:0@0, cpu:1@0, cpu, cpu:1"])
        assert float(str(found["loaded"])) < 1e-6
        # what two processes wrote is loaded by both of them, for their mesh and another one
        np.testing.assert_allclose(found["pieces"], found["next"], rtol=0, atol=1e-6)
        # a batch of which each of them has read a part is a whole one
        np.testing.assert_allclose(*found["parts"], rtol=0, atol=1e-6)
    assert len(list((tmp_path / "pieces").glob("1-*.safetensors"))) == 4
    alone = trainer(**options)
    alone.load(tmp_path / "state.safetensors")
    alone.load(tmp_path / "pieces")
    np.testing.assert_allclose(float(alone.step(x=X, target=Y)), found["next"], rtol=0, atol=1e-5)
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.nightly
def test_faults(environment: dict[str, str], tmp_path: pathlib.Path) -> None:
    """Ranks that are killed or stopped at random steps: all start again from the last checkpoint, no step before it is
    made twice, none is lost, and in the end the loss is that of a run without faults. TEST_FAULTS: how many."""
    from regression import X, Y, steps_of, trainer

    faults = int(os.environ.get("TEST_FAULTS", "20"))
    done = launch(
        environment, "-n", "2", "--devices", "2", "--restarts", str(faults), "--hang", "4",
        str(REGRESSION), "faulty", str(tmp_path), str(faults),
    )  # fmt: skip
    named = re.findall(r"rank [01] \(process \d+\) (was ended by SIGKILL|hangs)", done.stderr)
    assert len(named) == faults, done.stderr
    rows = [json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith("[0] {")]
    losses: dict[int, float] = {}
    for row in rows:
        # of an attempt that was ended between a step and its checkpoint, that one step is made again
        assert row["step"] in (len(losses), len(losses) + 1)
        assert row["step"] > row["began"]
        assert abs(losses.setdefault(row["step"], row["loss"]) - row["loss"]) < 1e-6
    assert list(losses) == list(range(1, steps_of(faults) + 1))
    alone = trainer()
    want = [float(alone.step(x=X, target=Y)) for _ in losses]
    np.testing.assert_allclose(list(losses.values()), want, rtol=0, atol=1e-5)
    assert not [c for c in commands() if str(tmp_path) in c]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ("2", "on a mesh of several processes, is another program in process 1 than in process 0"),
        ("1", "the mesh data=1 has 1 devices; on a mesh of several processes lie all of their 2 devices"),
    ],
)
def test_wrong_programs(environment: dict[str, str], tmp_path: pathlib.Path, devices: str, message: str) -> None:
    """Ranks with batches of different shapes, and a mesh that leaves a rank out, end with an error that says so."""
    done = subprocess.run(
        [sys.executable, "-m", "xrt_distributed", "-n", "2", str(REGRESSION), "different", str(tmp_path), devices],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode
    assert message in done.stdout


@pytest.mark.nightly
def test_a_process_that_hangs(environment: dict[str, str], tmp_path: pathlib.Path) -> None:
    """A process that is stopped ends all, with a message that names it; nothing is left behind."""
    program = tmp_path / "program.py"
    program.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(120)\n")
    handle = subprocess.Popen(
        [sys.executable, "-m", "xrt_distributed", "-n", "2", "--hang", "3", str(program)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert handle.stdout is not None
    own = dict(re.findall(r"\[(\d)\] (\d+)", handle.stdout.readline() + handle.stdout.readline()))
    os.kill(int(own["1"]), signal.SIGSTOP)
    _, said = handle.communicate(timeout=60)
    assert handle.returncode == 75
    assert "rank 1" in said
    assert "hangs (no heartbeat for 3 s)" in said
    assert not any(is_running(int(p)) for p in own.values())


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["time.sleep(200)", "while True: pass", "lock.acquire()"])
def test_a_process_that_waits_for_ever(environment: dict[str, str], tmp_path: pathlib.Path, how: str) -> None:
    """With --stall a rank that sleeps, loops or waits for a lock, while the others wait for it in a collective, ends
    all; the message says where each of them is."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, threading, time\nimport jax, numpy as np\nfrom jax.experimental import multihost_utils\n"
        "lock = threading.Lock()\nlock.acquire()\ngather = multihost_utils.process_allgather\n"
        "gather(np.int32(1))\ndef stuck():\n"
        f"    {how}\nif os.environ['RANK'] == '1':\n    stuck()\ngather(np.int32(1))\n"
    )
    start = time.monotonic()
    done = launch(environment, "-n", "2", "--stall", "5", str(program), code=75)
    assert time.monotonic() - start < 60
    assert re.search(r"rank 1 \(process \d+\) seems to hold the others up: nothing has moved for 5 s", done.stderr)
    assert "s at program.py:12 (<module>), in JAX" in done.stderr
    assert re.search(r"rank 1 for \d+ s at program.py:9 \(stuck\)\)", done.stderr)


@pytest.mark.nightly
def test_a_launcher_that_dies(environment: dict[str, str], tmp_path: pathlib.Path) -> None:
    """Its processes end too."""
    program = tmp_path / "program.py"
    program.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(120)\n")
    handle = subprocess.Popen(
        [sys.executable, "-m", "xrt_distributed", "-n", "2", str(program)],
        env=environment, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert handle.stdout is not None
    own = [int(handle.stdout.readline()[4:]) for _ in range(2)]
    handle.kill()
    handle.communicate()
    deadline = time.monotonic() + 20
    while any(map(is_running, own)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(is_running, own))


@pytest.mark.nightly
def test_the_cache_of_jax(environment: dict[str, str], tmp_path: pathlib.Path) -> None:
    """Programs on a mesh are found again in JAX's own cache on disk, by a later job."""
    program = tmp_path / "program.py"
    program.write_text(
        f"import sys\nsys.path.insert(0, {str(REGRESSION.parent)!r})\nfrom regression import X, Y, trainer\n"
        "t = trainer(mesh={'data': 2})\nprint('losses', [float(t.step(x=X, target=Y)) for _ in range(3)])\n"
    )
    folder = tmp_path / "cache"
    own = {**environment, "JAX_COMPILATION_CACHE_DIR": str(folder), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    said, files = [], []
    for _ in range(2):
        done = launch(own, "-n", "2", str(program))
        said.append(sorted(line[4:] for line in done.stdout.splitlines() if "losses" in line))
        files.append(sorted(p.name for p in folder.glob("jit_xrt_program-*-cache")))
    assert said[0] == said[1]
    assert files[0] == files[1]
    assert files[0]

"""Generated engines in fresh environments: installed by pip, listed, running models, and green at once."""

from __future__ import annotations

import json
import os
import pathlib
import re
import resource
import time
from dataclasses import dataclass

import pytest

from tests.template.baking import VARIANTS, Variant, bake, environment, install, run

pytestmark = pytest.mark.slow
LIMIT = 60.0
"""Seconds of machine time from `cookiecutter` to green tests."""


@dataclass(frozen=True)
class Installed:
    """A generated engine in an environment of its own, the output of its tests, and what all that took.

    seconds: by the clock; machine: of processor time, in all processes; load: programs that waited per processor.
    """

    variant: Variant
    project: pathlib.Path
    python: pathlib.Path
    returncode: int
    output: str
    seconds: float
    machine: float
    load: float


# each takes a minute; its files are those of test_generated.py, which looks at all of them every time
BY_DAY = [pytest.param(v, id=str(v), marks=[pytest.mark.nightly] if i else []) for i, v in enumerate(VARIANTS)]


@pytest.fixture(scope="module", params=BY_DAY)
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """From the template to the end of the engine's own tests."""
    folder = tmp_path_factory.mktemp("installed")
    start, before = time.perf_counter(), _machine_time()
    library = request.param.more.get("namespace")
    if library is not None:
        pytest.importorskip(library)
        pytest.importorskip("array_api_compat")
    project = bake(folder / "out", request.param)
    python = environment(folder / "venv")
    install(python, project)
    done = run([python, "-m", "pytest", "-p", "no:cacheprovider", "-q"], project)
    seconds, machine = time.perf_counter() - start, _machine_time() - before
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    return Installed(request.param, project, python, done.returncode, done.stdout, seconds, machine, load)


def _machine_time() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_its_own_tests_pass(installed: Installed) -> None:
    """All tests are green, the conformance kit's for every operator that it claims, and no skip is unexplained."""
    operators = re.search(r"^operators +(\d+) +(\d+) +(\d+)", installed.output, re.MULTILINE)
    skips = re.findall(r"^SKIPPED .*", installed.output, re.MULTILINE)

    assert installed.returncode == 0, installed.output[-6000:]
    assert operators is not None, installed.output[-6000:]
    claimed, passed, failed = map(int, operators.groups())
    least = {"kernels": 7, "namespace": 170, "onnx": 165}[installed.variant.array_library]
    assert claimed >= (100 if "namespace" in installed.variant.more else least)
    assert (passed, failed) == (claimed, 0)
    expected = (
        "the engine does not serialise",
        "have no class of arrays of their own",
        "it declares static shapes only",
        "it takes no nodes whose shapes depend on data",
        "it declares no operators that check indices",
        "the engine does not update in place",
    )
    assert all(any(reason in line for reason in expected) for line in skips), skips


def test_it_takes_less_than_a_minute(installed: Installed, record_property: pytest.RecordProperty) -> None:
    """From `cookiecutter` to green tests: a minute of machine time at most, and by the clock of an idle machine."""
    print(
        f"{installed.variant}: {installed.machine:.1f} s of machine time, {installed.seconds:.1f} s by the clock at a "
        f"load of {installed.load:.1f}"
    )
    record_property("machine_seconds", installed.machine)
    record_property("clock_seconds", installed.seconds)

    assert installed.machine < LIMIT
    if installed.load < 1:  # else the clock tells about other programs
        assert installed.seconds < LIMIT


def test_it_is_listed(installed: Installed) -> None:
    """`xrt engines` has it, ready, with its package and a device of each kind that it was generated for."""
    done = run([installed.python, "-c", LISTING], installed.project)
    assert done.returncode == 0, done.stdout
    lines = {line["name"]: line for line in json.loads(done.stdout.splitlines()[-1])}
    variant = installed.variant
    mine = lines[variant.engine]

    assert mine["status"] == "ready", mine
    assert mine["package"] == re.sub(r"[-_.]+", "-", variant.package).lower()
    assert {d.partition(":")[0] for d in mine["devices"]} == set(variant.kinds)


LISTING = """
import dataclasses, json
from xrt_core.engine import engines
print(json.dumps([dataclasses.asdict(line) for line in engines.listing()]))
"""


def test_the_example_of_its_readme_runs(installed: Installed) -> None:
    """The README's program prints the results, and says that the engine computed them."""
    text = (installed.project / "README.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)

    done = run([installed.python, "-c", program], installed.project)

    assert done.returncode == 0, done.stdout
    assert "[0.  0.  2.5]" in done.stdout
    assert f"1 on {installed.variant.engine}; 100% of nodes" in done.stdout


def test_every_device_runs(installed: Installed) -> None:
    """A model runs on each device that the engine lists, and gives what the host gives."""
    done = run([installed.python, "-c", ON_EVERY_DEVICE.format(engine=installed.variant.engine)], installed.project)

    assert done.returncode == 0, done.stdout
    assert done.stdout.split()[-1] == str(len(installed.variant.kinds))


ON_EVERY_DEVICE = """
import numpy as np
import xrt_core as xrt
from xrt_core.engine import engines

class Sum(xrt.Graph):
    def build(self, x):
        return xrt.ops.Add(xrt.ops.Relu(x), x)

x = np.array([-1.0, 2.0], np.float32)
devices = engines.status("{engine}").devices
for device in devices:
    np.testing.assert_array_equal(np.asarray(xrt.XRTModule(Sum(), engine="{engine}", device=device)(x)), [-1.0, 4.0])
print(len(devices))
"""


@pytest.mark.nightly  # by day test_generated.py looks at what is imported
def test_its_types_are_strict(installed: Installed) -> None:
    """mypy --strict has no complaint as generated."""
    done = run([installed.python, "-m", "mypy", "--cache-dir", installed.project.parent / "mypy"], installed.project)
    assert done.returncode == 0, done.stdout

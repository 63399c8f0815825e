"""Generates engines from templates/engine, and installs them into fresh environments, without a network."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import site
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

ROOT = pathlib.Path(__file__).parents[2]
TEMPLATE = ROOT / "templates" / "engine"
Done = subprocess.CompletedProcess[str]


@dataclass(frozen=True)
class Variant:
    """Answers to the template's questions, and what comes of them."""

    array_library: str
    licence: str = "Apache-2.0"
    devices: str = "cpu"
    engine: str = "acme"
    package: str = "xrt-acme"
    author: str = "Ada Lovelace"
    more: Mapping[str, str] = field(default_factory=dict)

    @property
    def kinds(self) -> list[str]:
        """The kinds of devices that the engine drives."""
        return [self.more.get("device_kind", "npu")] if self.devices == "other" else self.devices.split(",")

    @property
    def module(self) -> str:
        """The module that the package brings."""
        return self.package.lower().replace("-", "_").replace(".", "_")

    def answers(self) -> dict[str, str]:
        """Question -> answer."""
        names = ("array_library", "licence", "devices", "engine", "package", "author")
        return {**{n: getattr(self, n) for n in names}, **self.more}

    def __str__(self) -> str:
        library = self.more.get("namespace", self.array_library)
        return "-".join([library, self.licence, self.devices.replace(",", "+")])


VARIANTS = (
    Variant("namespace"),
    Variant("kernels", "MIT", "cpu,cuda", author='Zoë "Q" O\'Neil \\ Söhne 🛠'),
    Variant("onnx", "BSD-3-Clause", "cuda"),
    Variant("kernels", "proprietary", "tpu", "a_chip_of_20_letters", "Chips.for_XRT-with_a_name_of_40_letters"),
    Variant("namespace", devices="other", more={"operators": "yes"}),
    Variant("onnx", devices="other", more={"device_kind": "dsp_2"}),
    Variant("namespace", "MIT", more={"namespace": "torch"}),
    Variant("namespace", "BSD-3-Clause", more={"namespace": "array_api_strict"}),
)
"""Every way to compute, every licence, and devices and names of every kind."""


def run(command: Sequence[str | pathlib.Path], cwd: pathlib.Path, **variables: str) -> Done:
    """Run a command, without the switches and search paths of this process. Its outputs come together, as stdout."""
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("FLAGS_", "XRT_", "PYTHON", "PIP_", "PYTEST_"))}
    return subprocess.run(
        list(map(str, command)), cwd=cwd, env={**kept, "PYTHONDONTWRITEBYTECODE": "1", **variables}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, timeout=600,
    )  # fmt: skip


def cookiecutter(folder: pathlib.Path, answers: Mapping[str, str], **variables: str) -> Done:
    """`cookiecutter templates/engine` into `folder`, with nothing of the user's own configuration."""
    config = folder.parent / f"{folder.name}.cookiecutter.yaml"
    config.write_text(f"cookiecutters_dir: {folder.parent}\nreplay_dir: {folder.parent / 'replay'}\n")
    folder.mkdir(exist_ok=True)
    given = [f"{name}={answer}" for name, answer in answers.items()]
    command = [sys.executable, "-m", "cookiecutter", TEMPLATE, "--no-input", "--config-file", config, "-o", folder]
    return run([*command, *given], folder, **variables)


def bake(folder: pathlib.Path, variant: Variant) -> pathlib.Path:
    """The generated project."""
    done = cookiecutter(folder, variant.answers())
    assert done.returncode == 0, done.stdout
    return folder / variant.package


def files(folder: pathlib.Path) -> set[str]:
    """Relative paths of the files in a project, without what tools leave behind."""
    left = {"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".nox", "dist", "build"}
    found = (p.relative_to(folder) for p in folder.rglob("*") if p.is_file())
    return {p.as_posix() for p in found if not left & set(p.parts)}


def environment(folder: pathlib.Path) -> pathlib.Path:
    """The interpreter of a new virtual environment, which sees this one's packages behind its own."""
    has_pip = importlib.util.find_spec("pip") is not None
    done = run([sys.executable, "-m", "venv", *(["--without-pip"] if has_pip else []), folder], folder.parent)
    assert done.returncode == 0, done.stdout
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    own = run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder).stdout.strip()
    # a .pth file rather than --system-site-packages: that shows the packages of the interpreter this environment came
    # from, not of the environment
    lines = [f"import site; site.addsitedir({str(p)!r})" for p in site.getsitepackages()]
    pathlib.Path(own, "packages_behind.pth").write_text("\n".join([str(ROOT), *lines]) + "\n", encoding="utf-8")
    return python


def install(python: pathlib.Path, project: pathlib.Path) -> None:
    """`pip install` of the project, with the build backend and the dependencies that are here."""
    done = run(
        [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps",
         "--no-build-isolation", project],
        project.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout

"""Metadata of the packages: versions, licences, types and extras; the conda recipe; the checks of what is built."""

from __future__ import annotations

import importlib.util
import pathlib
import re
import subprocess
import sys
import tomllib
import zipfile
from types import ModuleType
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

import xrt_core as xrt
from tests.architecture.source import ROOT

FOLDERS = [ROOT, *sorted(p.parent for p in ROOT.glob("plugins/*/pyproject.toml"))]
PROJECTS = {f: tomllib.loads((f / "pyproject.toml").read_text("utf-8")) for f in FOLDERS}
each_package = pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: PROJECTS[f]["project"]["name"])


def checks() -> ModuleType:
    """The program that `nox -s build` runs."""
    spec = importlib.util.spec_from_file_location("check_packages", ROOT / "scripts" / "check_packages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@each_package
def test_metadata(folder: pathlib.Path) -> None:
    """One version, one licence with its text in the package's folder, the same Pythons, and types."""
    project = PROJECTS[folder]["project"]
    assert project.get("version", xrt.__version__) == xrt.__version__
    assert project["license"].split(" AND ")[0] == "Apache-2.0"  # what is bundled has its own
    assert "LICENSE" in project["license-files"]
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert project["requires-python"] == PROJECTS[ROOT]["project"]["requires-python"]
    name = project["name"].replace("-", "_")
    assert (folder / (name if folder == ROOT else f"src/{name}") / "py.typed").exists()
    for line in project["dependencies"]:
        requirement = Requirement(line)
        if requirement.name.startswith("xrt-"):
            assert requirement.specifier.contains(xrt.__version__)
            assert str(requirement.specifier) == "<0.2,>=0.1"


def test_extras_are_in_the_table() -> None:
    """docs/installing.md names every extra; the packages of XRT that it says an extra brings are what it requires."""
    extras = PROJECTS[ROOT]["project"]["optional-dependencies"]
    page = (ROOT / "docs" / "installing.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| (`[^|]+`) \| (.+) \|$", page.split("## Extras", 1)[1], re.MULTILINE))
    named = {n for cell in rows for n in re.findall(r"`(\w+)`", cell)}
    assert named == set(extras)
    for cell, text in rows.items():
        said = set(re.findall(r"`(xrt-\w+)`", text))
        for extra in re.findall(r"`(\w+)`", cell):
            needed = {r.name for r in map(Requirement, extras[extra])} - {"xrt-core"}
            assert {n for n in needed if n.startswith("xrt-")} == said
    (everything,) = map(Requirement, extras["all"])
    assert set(re.findall(r"`(\w+)`", rows["`all`"])) == everything.extras <= set(extras)


def recipe_requirements(line: str) -> tuple[str, str]:
    """A requirement of pip as the recipe has it."""
    requirement = Requirement(line)
    other = {"torch": "pytorch", "prometheus-client": "prometheus_client", "xxhash": "python-xxhash"}
    return other.get(requirement.name, requirement.name), str(requirement.specifier)


def test_the_conda_recipe_has_the_same_requirements() -> None:
    """Each package is an output, with the requirements of its pyproject.toml, its version and its Python."""
    recipe = yaml.safe_load((ROOT / "conda" / "recipe.yaml").read_text("utf-8"))
    assert recipe["context"]["version"] == xrt.__version__
    assert f">={recipe['context']['python_min']}" == PROJECTS[ROOT]["project"]["requires-python"]
    outputs: dict[str, Any] = {o["package"]["name"]: o for o in recipe["outputs"]}
    assert set(outputs) == {p["project"]["name"] for p in PROJECTS.values()}
    for project in PROJECTS.values():
        run = outputs[project["project"]["name"]]["requirements"]["run"][1:]  # behind Python's
        needed = project["project"]["dependencies"]
        assert [recipe_requirements(r) for r in run] == [recipe_requirements(r) for r in needed]


def test_the_conda_recipe_renders() -> None:
    """rattler-build makes every package of it, for all platforms at once."""
    rattler = pytest.importorskip("rattler_build")
    licences = {p["project"]["name"]: p["project"]["license"] for p in PROJECTS.values()}
    made = rattler.Stage0Recipe.from_file(ROOT / "conda" / "recipe.yaml").render()
    assert {v.recipe.package.name for v in made} == {p["project"]["name"] for p in PROJECTS.values()}
    for variant in made:
        assert str(variant.recipe.package.version) == xrt.__version__
        assert variant.recipe.about.license == licences[variant.recipe.package.name]
        assert variant.recipe.build.noarch


def test_the_release_publishes_without_a_secret() -> None:
    """Only the job that publishes has an identity; no job reads a secret, and every session that it runs exists."""
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text("utf-8")
    jobs = yaml.safe_load(text)["jobs"]
    assert [n for n, j in jobs.items() if j.get("permissions", {}).get("id-token") == "write"] == ["publish"]
    assert "secrets." not in text
    sessions = set(re.findall(r"^def (\w+)\(session", (ROOT / "noxfile.py").read_text("utf-8"), re.MULTILINE))
    ran = {s.partition("-")[0] for line in re.findall(r"run: nox -s ([\w -]+)", text) for s in line.split()}
    assert ran == {"build", "sbom", "installed", "oldest"} <= sessions


@pytest.mark.parametrize("name", ["onnxruntime", "openvino", "xla"])
def test_the_cure_for_an_old_library_is_what_the_package_requires(name: str) -> None:
    """An engine that says what to install says the release that its package asks for."""
    source = (ROOT / "plugins" / f"xrt-{name}" / "src" / f"xrt_{name}" / "__init__.py").read_text("utf-8")
    needed = [d for d in PROJECTS[ROOT / "plugins" / f"xrt-{name}"]["project"]["dependencies"] if "xrt-" not in d]
    assert re.findall(r"pip install -U '([^']+)'", source) == needed


def wheel(path: pathlib.Path, drop: str = "", **more: str) -> pathlib.Path:
    """A wheel of a package `thing`, less one file, and with others."""
    info = f"thing-{xrt.__version__}.dist-info"
    metadata = (
        f"Metadata-Version: 2.4\nName: thing\nVersion: {xrt.__version__}\nSummary: A thing\n"
        "License-Expression: Apache-2.0\nLicense-File: LICENSE\nDescription-Content-Type: text/markdown\n\nIt is one.\n"
    )
    files = {
        f"{info}/METADATA": metadata,
        f"{info}/licenses/LICENSE": (ROOT / "LICENSE").read_text("utf-8"),
        "thing/__init__.py": "",
        "thing/py.typed": "",
        **{name.replace("__", "/").replace("_dot_", "."): text for name, text in more.items()},
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            if not drop or not name.endswith(drop):
                archive.writestr(name, text)
    return path


def test_faults_of_wheels_are_found(tmp_path: pathlib.Path) -> None:
    """A missing licence, missing types, another version, and a bundled script without its licence."""
    faults = checks().faults_of_wheel
    path = tmp_path / "thing.whl"
    version = xrt.__version__
    assert list(faults(wheel(path), version)) == []
    assert list(faults(wheel(path), "9.9")) == [f"version {version}, where the core has 9.9"]
    assert list(faults(wheel(path, drop="licenses/LICENSE"), version)) == ["without the licence, or its text"]
    assert list(faults(wheel(path, drop="py.typed"), version)) == ["thing has no py.typed"]
    bundled = {"thing__viewer_dot_min_dot_js": "x"}
    assert list(faults(wheel(path, **bundled), version)) == ["thing/viewer.min.js is bundled without its licence"]
    licensed = {f"thing-{version}_dot_dist-info__licenses__viewer_dot_LICENSE": "free"}
    assert list(faults(wheel(path, **bundled, **licensed), version)) == []


@pytest.mark.slow
@each_package
def test_wheels_are_right_and_reproducible(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """hatchling builds each package twice into the same bytes, at another time, and nothing is wrong with the wheel."""
    pytest.importorskip("hatchling")
    made = []
    for name in ("first", "second"):
        target = tmp_path / name
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=120)
        made += target.glob("*.whl")
    first, second = made
    assert first.read_bytes() == second.read_bytes()
    assert list(checks().faults_of_wheel(first, xrt.__version__)) == []

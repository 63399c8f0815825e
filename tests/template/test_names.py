"""Answers that would not make a working engine: one message each, saying what to give, and nothing is written."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from tests.engine.packages import add_package, engine_source
from tests.template.baking import TEMPLATE, Variant, cookiecutter

GOOD = {**Variant("namespace").answers(), "namespace": "numpy", "device_kind": "npu", "__module": "xrt_acme"}


def hook(answers: dict[str, str]) -> dict[str, Any]:
    """The namespace of the hook that checks answers, rendered for these."""
    source = (TEMPLATE / "hooks" / "pre_gen_project.py").read_text(encoding="utf-8")
    text = json.dumps(answers)
    assert "{{ cookiecutter|jsonify }}" in source
    names: dict[str, Any] = {"__name__": "hook"}
    exec(source.replace("{{ cookiecutter|jsonify }}", text), names)
    return names


def fault(**answers: str) -> str:
    """What the hook says about these answers, all others being good."""
    given = {**GOOD, **answers}
    given.setdefault("__module", "")
    return str(hook(given)["fault"](given))


def test_good_answers_have_no_fault() -> None:
    """The answers that every case below spoils are good."""
    assert fault() == ""
    assert fault(engine="chip_7", package="Chips.seven", __module="chips_seven", author="Zoë") == ""


@pytest.mark.parametrize("name", ["Acme", "7up", "my-chip", "a b", "", "_x", "été", "lambda", "a" * 21, "x;import os"])
def test_an_engine_is_a_short_lower_case_identifier(name: str) -> None:
    """What cannot stand in engine="..." and in a class's name is refused."""
    said = fault(engine=name)

    assert f"engine name {name!r} is not usable" in said
    assert "such as 'acme'" in said


@pytest.mark.parametrize("name", ["host", "xla", "tensorrt", "toy", "onnxruntime", "openvino"])
def test_an_engine_of_xrt_is_taken(name: str) -> None:
    """Names of the project's own engines are refused whether they are installed or not."""
    assert f"engine name {name!r} is taken by XRT itself" in fault(engine=name)


@pytest.mark.parametrize("name", ["", "-x", "x-", "1x", "a/b", "a b", "é", "x" * 41, "../up"])
def test_a_package_has_a_name_that_indexes_take(name: str) -> None:
    """What pip or a package index refuses is refused first."""
    said = fault(package=name, __module=name.replace("-", "_"))

    assert f"package name {name!r} is not usable" in said
    assert "such as 'xrt-acme'" in said


@pytest.mark.parametrize(
    ("package", "reason"),
    [
        ("json", "which is Python's own"),
        ("import", "which is Python's own"),
        ("NumPy", "is installed here already"),
        ("xrt_core", "is installed here already"),
        ("tests", "which can be imported here already"),
    ],
)
def test_a_package_is_new(package: str, reason: str) -> None:
    """A package that hides a module of Python's, or one that is here, is refused."""
    assert reason in fault(package=package, __module=package.lower())


@pytest.mark.parametrize("author", ["", "  ", "two\nlines"])
def test_an_author_is_one_line(author: str) -> None:
    """The author goes into the licence and the metadata."""
    assert f"author {author!r} is not usable" in fault(author=author)


@pytest.mark.parametrize("namespace", ["", "jax numpy", "jax..numpy", "1st", "a.class", "a." * 20 + "b"])
def test_a_namespace_is_a_module(namespace: str) -> None:
    """What cannot be imported is refused, but only where it would be."""
    assert f"namespace {namespace!r} is not the name of a module" in fault(namespace=namespace)
    assert fault(namespace=namespace, array_library="onnx") == ""


@pytest.mark.parametrize("kind", ["cuda", "NPU", "1st", "a b", "", "torch"])
def test_a_device_kind_is_one_of_its_own(kind: str) -> None:
    """What XRT has already, or cannot be a name, is refused, but only where the package brings a kind."""
    assert f"device kind {kind!r} is not usable" in fault(devices="other", device_kind=kind)
    assert fault(devices="cpu", device_kind=kind) == ""


def test_a_refusal_writes_nothing(tmp_path: pathlib.Path) -> None:
    """The command fails with that message before all else, and leaves no folder behind."""
    out = tmp_path / "out"

    done = cookiecutter(out, {"engine": "xla"})

    assert done.returncode != 0
    assert done.stdout.startswith("ERROR: engine name 'xla' is taken by XRT itself")
    assert not list(out.iterdir())


def test_an_installed_engine_is_taken(tmp_path: pathlib.Path) -> None:
    """An engine of another package that is installed is named with the way to take it out."""
    packages = tmp_path / "packages"
    packages.mkdir()
    add_package(packages, "rocket-engines", engine_source("rocket"), engine="rocket")

    done = cookiecutter(tmp_path / "out", {"engine": "rocket"}, PYTHONPATH=str(packages))

    assert done.returncode != 0
    assert "engine name 'rocket' is taken here by rocket-engines" in done.stdout
    assert "pip uninstall rocket-engines" in done.stdout

"""What the template writes: the tree of every plugin, clean code, and marked places to fill in."""

from __future__ import annotations

import ast
import importlib
import json
import pathlib
import re
import sys
import tomllib

import pytest

from tests.template.baking import ROOT, TEMPLATE, VARIANTS, Variant, bake, cookiecutter, files, run

TOY = ROOT / "plugins" / "xrt-toy"
STANDALONE = {"LICENSE", ".gitignore", "noxfile.py", ".github/workflows/ci.yml"}
"""What a repository of its own needs; the plugins in this one share those of its root."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(v, marks=[pytest.mark.slow] if i else []) for i, v in enumerate(VARIANTS)],
    ids=list(map(str, VARIANTS)),
)
def baked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Variant, pathlib.Path]:
    """A variant, and the project that the template made of it."""
    return request.param, bake(tmp_path_factory.mktemp("baked") / "out", request.param)


def shared(found: set[str], engine: str, module: str) -> set[str]:
    """The files of a plugin that are the same in each, by neutral names: not its kernels, not its own tests,
    not the helper of its kernels for results in the storage of an input."""
    names = {f.replace(module, "MODULE").replace(f"test_{engine}_", "test_ENGINE_") for f in found}
    own = re.compile(r"src/MODULE/(kernels/(?!__init__)|aliases)|tests/(?!conformance/)")
    return {n for n in names if not own.match(n)}


@pytest.mark.slow
def test_the_tree_is_that_of_every_plugin(baked: tuple[Variant, pathlib.Path]) -> None:
    """The files are those of xrt-toy by name, and those that a repository of its own needs."""
    variant, project = baked
    found = files(project)

    more = {"src/MODULE/device.py"} if variant.devices == "other" else set()
    more |= {"src/MODULE/operators.py"} if variant.more.get("operators") == "yes" else set()
    own = found - (STANDALONE - {"LICENSE"})
    assert shared(own, variant.engine, variant.module) == shared(files(TOY), "toy", "xrt_toy") | more
    assert found >= STANDALONE
    assert f"tests/test_{variant.engine}_engine.py" in found


def test_the_package_is_described(baked: tuple[Variant, pathlib.Path]) -> None:
    """Name, licence, author, entry point, and the same requirement on the core as the plugins have."""
    variant, project = baked
    made = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    toy = tomllib.loads((TOY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    licence = (project / "LICENSE").read_text(encoding="utf-8")
    class_name = "".join(part.capitalize() for part in variant.engine.split("_"))

    assert made["name"] == variant.package
    assert made["authors"] == [{"name": variant.author}]
    assert made["license"] == ("LicenseRef-Proprietary" if variant.licence == "proprietary" else variant.licence)
    assert made["entry-points"]["xrt.engines"] == {variant.engine: variant.module}
    domain = {f"com.{variant.engine}": f"{variant.module}.operators"} if variant.more.get("operators") == "yes" else {}
    assert made["entry-points"].get("xrt.operators", {}) == domain
    source = (project / "src" / variant.module / "__init__.py").read_text(encoding="utf-8")
    assert "@hookimpl\ndef xrt_engines() -> list[type[Engine]]:" in source
    assert f"return [{class_name}Engine]" in source
    assert made["dependencies"][0] == toy["dependencies"][0]
    assert made["requires-python"] == toy["requires-python"]
    if variant.licence == "Apache-2.0":
        assert licence == (ROOT / "LICENSE").read_text(encoding="utf-8")
    else:
        assert f" {variant.author}" in licence
    words = {"Apache-2.0": "Apache License", "MIT": "MIT License", "BSD-3-Clause": "BSD 3-Clause License"}
    assert words.get(variant.licence, "All rights reserved.") in licence


def test_nothing_of_the_template_is_left(baked: tuple[Variant, pathlib.Path]) -> None:
    """No marks of the template language, no unfinished code, and no name of another variant's."""
    variant, project = baked
    for name in files(project):
        text = (project / name).read_text(encoding="utf-8")
        assert not re.search(r"\{%|%\}|cookiecutter|\bTODO\b|\bFIXME\b|NotImplementedError", text), name
        assert not re.search(r"(?<!\$)\{\{(?! *matrix)", text), name
        assert variant.engine == "acme" or "acme" not in text.lower(), name
        assert not text or text.endswith("\n"), name


def test_what_it_imports_of_the_core_is_there(baked: tuple[Variant, pathlib.Path]) -> None:
    """Every name that a module or a test of it takes from the core exists."""
    _, project = baked
    for name in (n for n in files(project) if n.endswith(".py")):
        for node in ast.walk(ast.parse((project / name).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("xrt_core"):
                module = importlib.import_module(str(node.module))
                for alias in node.names:
                    assert hasattr(module, alias.name), f"{name}: {node.module}.{alias.name}"


def test_the_places_to_fill_in_are_marked(baked: tuple[Variant, pathlib.Path]) -> None:
    """Every file of the engine has a mark where a decision is taken, and each mark says more than that it is one."""
    variant, project = baked
    for name in ("__init__", "_toolkit", "compiler", "executable"):
        text = (project / "src" / variant.module / f"{name}.py").read_text(encoding="utf-8")
        notes = re.findall(r"# YOUR ENGINE: (.*)", text)
        assert notes, name
        assert all(len(n) > 20 for n in notes), notes
    kernels = project / "src" / variant.module / "kernels"
    assert any("# YOUR ENGINE: " in p.read_text(encoding="utf-8") for p in kernels.glob("*.py"))


def test_every_module_and_session_opens_with_a_sentence(baked: tuple[Variant, pathlib.Path]) -> None:
    """Modules say what lives there, nox sessions what they do, and the CI file names only sessions that exist."""
    _, project = baked
    for name in (n for n in files(project) if n.endswith(".py")):
        text = ast.get_docstring(ast.parse((project / name).read_text(encoding="utf-8")))
        assert text, name
        assert text.splitlines()[0].rstrip()[-1] in ".:;", name
    tree = ast.parse((project / "noxfile.py").read_text(encoding="utf-8"))
    sessions = {
        node.name: ast.get_docstring(node)
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and any("session" in ast.unparse(d) for d in node.decorator_list)
    }
    ci = (project / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    named = {n.partition("-")[0] for line in re.findall(r"nox -s (.+)", ci) for n in line.replace("${{ ", "").split()}

    assert all(sessions.values()), sessions
    assert {"tests", "lint", "types", "build"} <= set(sessions)
    assert named - {"matrix.python", "}}"} <= set(sessions), named


def test_it_is_clean_for_ruff(baked: tuple[Variant, pathlib.Path]) -> None:
    """The generated code passes the rules that it brings, whatever the names are."""
    _, project = baked
    done = run([sys.executable, "-m", "ruff", "check", "--no-cache", "."], project)
    assert done.returncode == 0, done.stdout


def test_the_hooks_are_clean_for_ruff() -> None:
    """The template's own code passes the rules of this repository, and its unrendered files are left alone."""
    done = run([sys.executable, "-m", "ruff", "check", "--no-cache", "templates", "--show-files"], ROOT)
    assert sorted(pathlib.Path(line).name for line in done.stdout.split() if line.endswith(".py")) == [
        "post_gen_project.py", "pre_gen_project.py",
    ]  # fmt: skip
    done = run([sys.executable, "-m", "ruff", "check", "--no-cache", "templates"], ROOT)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_the_end_says_what_to_do_next(tmp_path: pathlib.Path) -> None:
    """The next steps name the folder and the engine; a library that is not here is said."""
    answers = {"engine": "chip", "namespace": "no_such_library.numpy"}

    done = cookiecutter(tmp_path / "out", answers)

    assert done.returncode == 0, done.stdout
    for words in ("xrt-chip is ready", "cd xrt-chip", "pip install -e .", "xrt engines", "pytest", "YOUR ENGINE"):
        assert words in done.stdout
    assert "'no_such_library.numpy' cannot be imported here" in done.stdout


@pytest.mark.slow
def test_the_page_is_true(tmp_path: pathlib.Path) -> None:
    """docs/writing-an-engine.md names every question and choice; its code is that of a generated engine."""
    page = (ROOT / "docs" / "writing-an-engine.md").read_text(encoding="utf-8")
    questions = json.loads((TEMPLATE / "cookiecutter.json").read_text(encoding="utf-8"))
    public = {q: a for q, a in questions.items() if not q.startswith("_")}
    choices = {c for answer in public.values() if isinstance(answer, list) for c in answer}
    project = bake(tmp_path / "out", Variant("kernels"))
    code = "\n".join(p.read_text(encoding="utf-8") for p in (project / "src").rglob("*.py"))

    assert re.findall(r"^\| `(\w+)` \| ", page.split("## Three ways")[0], re.MULTILINE) == list(public)
    assert not {c for c in choices if f"`{c}`" not in page}
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert blocks
    assert all(block in code for block in blocks)

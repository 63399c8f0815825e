"""The menu of checks: `nox -l` lists it, `nox` runs what a change must pass, `nox -s NAME -- ARGUMENTS` runs one."""

from __future__ import annotations

import pathlib

import nox

nox.needs_version = ">=2025.5"
nox.options.reuse_existing_virtualenvs = True
PYTHONS = ["3.11", "3.12", "3.13"]
PLUGINS = sorted(str(p.parent) for p in pathlib.Path("plugins").glob("*/pyproject.toml"))
PROJECT = nox.project.load_toml("pyproject.toml")


def install(session: nox.Session, group: str = "") -> None:
    """Install the core and every plugin, editable, with a dependency group."""
    folders = [f"{f}[rtx-cu13]" if f.endswith("xrt-tensorrt") else f for f in PLUGINS]  # it builds without a GPU
    editable = [part for folder in (".", *folders) for part in ("--editable", folder)]
    session.install(*editable, *(nox.project.dependency_groups(PROJECT, group) if group else ()))


PARALLEL = ("-n", "2", "--dist", "worksteal")


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """Run the tests of `scripts/test` (15 minutes), on each Python; arguments go to pytest."""
    install(session, "test")
    session.run("python", "-m", "pytest", *PARALLEL, *session.posargs)


@nox.session(default=False)
def fast(session: nox.Session) -> None:
    """Run the tests of three minutes, which execute something of every module of the core."""
    install(session, "test")
    session.run("python", "-m", "pytest", "--fast", "--modules-run", *PARALLEL, *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Hold the code against ruff's rules."""
    session.install(*nox.project.dependency_groups(PROJECT, "lint"))
    session.run("ruff", "check", *(session.posargs or ["."]))


@nox.session
def types(session: nox.Session) -> None:
    """Check the types of the core with mypy --strict."""
    install(session, "lint")
    session.run("mypy", *session.posargs)


@nox.session(default=False)
def slow(session: nox.Session) -> None:
    """Run everything, hours long: nightly tests, all examples of random tests, every case of the conformance kit."""
    install(session, "test")
    session.env["HYPOTHESIS_PROFILE"] = "thorough"
    session.run("python", "-m", "pytest", "-m", "", *PARALLEL, *session.posargs)


@nox.session(default=False)
def fuzz(session: nox.Session) -> None:
    """Run 20,000 mutated models and 5,000 mutated files on the host and every engine (90 minutes)."""
    install(session, "test")
    session.run("python", "scripts/fuzz_models.py", *session.posargs)


@nox.session(default=False)
def template(session: nox.Session) -> None:
    """Bake every variant of the engine template, install each in an environment of its own, and run its tests."""
    install(session, "test")
    session.run("python", "-m", "pytest", "-m", "", "tests/template", *session.posargs)


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Run the benchmarks, or those that are named; the README in benchmarks/ says what each one measures."""
    install(session, "test")
    named = [pathlib.Path("benchmarks", n).with_suffix(".py") for n in session.posargs]
    for path in named or sorted(pathlib.Path("benchmarks").glob("*.py")):
        session.run("python", str(path))


@nox.session(default=False)
def build(session: nox.Session) -> None:
    """Build wheels and source archives of the core and of every plugin into dist/."""
    session.install("build")
    for folder in (".", *PLUGINS):
        session.run("python", "-m", "build", "--outdir", "dist", folder)


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """Write the documentation that is made from the code: docs/options.md."""
    session.install("--editable", ".")
    session.install("--no-deps", *(part for folder in PLUGINS for part in ("--editable", folder)))
    text = session.run("python", "-m", "xrt_core.options", silent=True)
    pathlib.Path("docs", "options.md").write_text(str(text), encoding="utf-8")

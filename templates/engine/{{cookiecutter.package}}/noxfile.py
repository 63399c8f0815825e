"""The menu of checks: `nox -l` lists it, `nox` runs what a change must pass, `nox -s NAME -- ARGUMENTS` runs one."""

from __future__ import annotations

import nox

nox.needs_version = ">=2025.5"
nox.options.reuse_existing_virtualenvs = True
PROJECT = nox.project.load_toml("pyproject.toml")


@nox.session(python=["3.11", "3.12", "3.13"])
def tests(session: nox.Session) -> None:
    """Run the engine's tests and XRT's conformance kit, on each Python; arguments go to pytest."""
    session.install("--editable", ".", *nox.project.dependency_groups(PROJECT, "test"))
    session.run("python", "-m", "pytest", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Hold the code against ruff's rules."""
    session.install(*nox.project.dependency_groups(PROJECT, "lint"))
    session.run("ruff", "check", *(session.posargs or ["."]))


@nox.session
def types(session: nox.Session) -> None:
    """Check the types with mypy --strict."""
    session.install("--editable", ".", *nox.project.dependency_groups(PROJECT, "lint"))
    session.run("mypy", *session.posargs)


@nox.session(default=False)
def scorecard(session: nox.Session) -> None:
    """Run every case of the conformance kit and write what the engine can do to scorecard.json (minutes)."""
    session.install("--editable", ".", *nox.project.dependency_groups(PROJECT, "test"))
    session.run(
        "python", "-m", "pytest", "tests/conformance", "--xrt-full", "--xrt-scorecard", "scorecard.json",
        *session.posargs,
    )  # fmt: skip


@nox.session(default=False)
def build(session: nox.Session) -> None:
    """Build the wheel and the source archive into dist/."""
    session.install("build")
    session.run("python", "-m", "build")

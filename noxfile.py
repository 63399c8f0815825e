"""The menu of checks: `nox -l` lists it, `nox` runs what a change must pass, `nox -s NAME -- ARGUMENTS` runs one."""

from __future__ import annotations

import pathlib
import shutil

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
    """Run the tests of `scripts/test` (15 to 25 minutes), on each Python; arguments go to pytest."""
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
def fuzz_torch(session: nox.Session) -> None:
    """Run 1,000 random programs of torch through torch.compile, on the host (15 minutes)."""
    install(session, "test")
    session.run("python", "scripts/fuzz_torch.py", *session.posargs)


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


DIST = pathlib.Path("dist").absolute()
INDEX = DIST / "index" / "simple"


@nox.session(default=False)
def build(session: nox.Session) -> None:
    """Build and check wheels and source archives of every package in dist/, twice with equal bytes, and their index."""
    session.install("build", "hatchling>=1.27", "twine", "check-wheel-contents", "dumb-pypi", "packaging")
    when = session.run("git", "log", "-1", "--format=%ct", external=True, silent=True)
    session.env["SOURCE_DATE_EPOCH"] = str(when).strip()
    again = pathlib.Path(session.create_tmp(), "again").absolute()
    for folder in (DIST, again):
        shutil.rmtree(folder, ignore_errors=True)
        for package in (".", *PLUGINS):
            session.run("python", "-m", "build", "--no-isolation", "--outdir", str(folder), package, silent=True)
    archives = [str(p) for p in sorted(DIST.glob("*.*"))]
    session.run("python", "scripts/check_packages.py", str(DIST), str(again))
    session.run("twine", "check", "--strict", *archives)
    # W002, W004: the template's files; W009: xrt_ort_hooks lies beside xrt_ort, whose import would import onnxruntime
    session.run("check-wheel-contents", "--ignore", "W002,W004,W009", *(a for a in archives if a.endswith(".whl")))
    listed = ("--package-list-json", str(INDEX.with_name("packages.jsonl")), "--packages-url", "../../../")
    session.run("dumb-pypi", *listed, "--output-dir", str(INDEX.parent), "--no-per-release-json")


def fresh(session: nox.Session, name: str, *wanted: str) -> str:
    """The Python of a new environment, in which pip has installed what a user would name, from our index."""
    folder = pathlib.Path(session.create_tmp(), name).absolute()
    session.run("python", "-m", "venv", "--clear", str(folder))
    python = str(folder / "bin" / "python")
    env = {"PIP_EXTRA_INDEX_URL": INDEX.as_uri(), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    session.run(python, "-m", "pip", "install", "--quiet", *wanted, env=env, external=True)
    return python


@nox.session(python=PYTHONS, default=False)
def installed(session: nox.Session) -> None:
    """Install what `build` made as users do, in fresh environments, and run a model on each engine (`-- torch`)."""
    program = str(pathlib.Path("scripts", "try_installed.py").absolute())
    more = [f"xrt-core[{extra}]" for extra in session.posargs]
    tensorrt = fresh(session, "tensorrt", "xrt-core", "xrt-tensorrt")
    every = fresh(session, "all", "xrt-core[all]", "xrt-toy", "xrt-ort", *more)
    with session.chdir(session.create_tmp()):
        session.run(tensorrt, program, "tensorrt", external=True)
        session.run(every, program, "xla", "onnxruntime", "openvino", "toy", "ort", *session.posargs, external=True)


@nox.session(python=PYTHONS[0], default=False)
def oldest(session: nox.Session) -> None:
    """As `installed`, for the engines of a CPU beside the oldest releases of other packages that ours allow."""
    files = ["pyproject.toml", *(f"plugins/xrt-{name}/pyproject.toml" for name in ("xla", "onnxruntime", "openvino"))]
    needed = [d for f in files for d in nox.project.load_toml(f)["project"]["dependencies"] if "xrt-" not in d]
    pins = [d.replace(">=", "==").split(",")[0] for d in needed]
    packages = ("xrt-core", "xrt-xla", "xrt-onnxruntime", "xrt-openvino", "xrt-ort", "xrt-contrib")
    python = fresh(session, "oldest", *packages, *pins)
    program = str(pathlib.Path("scripts", "try_installed.py").absolute())
    with session.chdir(session.create_tmp()):
        session.run(python, program, "xla", "onnxruntime", "openvino", "ort", external=True)


@nox.session(default=False)
def sbom(session: nox.Session) -> None:
    """Write dist/xrt-core-all.cdx.json: what `pip install 'xrt-core[all]'` brings, with licences (CycloneDX)."""
    session.install("cyclonedx-bom>=7")
    python = fresh(session, "sbom", "xrt-core[all]")
    session.run(python, "-m", "pip", "uninstall", "--quiet", "--yes", "pip", external=True)
    target = str(DIST / "xrt-core-all.cdx.json")
    form = ("--pyproject", "pyproject.toml", "--mc-type", "library", "--output-reproducible", "--gather-license-texts")
    session.run("cyclonedx-py", "environment", *form, "--output-file", target, python)


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """Write docs/options.md from the code, and the site in build/site, of which every warning is an error."""
    session.install("--editable", ".", *nox.project.dependency_groups(PROJECT, "docs"))
    session.install("--no-deps", *(part for folder in PLUGINS for part in ("--editable", folder)))
    text = session.run("python", "-m", "xrt_core.options", silent=True)
    pathlib.Path("docs", "options.md").write_text(str(text), encoding="utf-8")
    session.run("mkdocs", "build", "--strict", "--quiet", env={"NO_MKDOCS_2_WARNING": "1"})

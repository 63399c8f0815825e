"""Checks what `nox -s build` built: `python scripts/check_packages.py DIST AGAIN`.

DIST holds wheels and source archives, AGAIN those of a second build, which must be equal byte for byte. Each wheel must
have valid metadata, the version of the core, the text of its licence and that of everything bundled, and `py.typed` in
each package. Writes DIST/index/packages.jsonl, from which
dumb-pypi makes the index.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import sys
import tarfile
import zipfile
from collections.abc import Iterator

from packaging.metadata import Metadata
from packaging.utils import canonicalize_name

ROOT = pathlib.Path(__file__).resolve().parents[1]
BUNDLED = (".dll", ".min.css", ".min.js", ".mjs", ".so", ".ttf", ".wasm", ".whl", ".woff", ".woff2")
"""How names end of what comes from elsewhere. Its licence is a file of `license-files` that has its name in its own."""


def faults_of_wheel(path: pathlib.Path, version: str) -> Iterator[str]:
    """What is wrong with a wheel."""
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        info = next(n.split("/")[0] for n in names if n.endswith(".dist-info/METADATA"))
        found = Metadata.from_email(wheel.read(f"{info}/METADATA"), validate=True)
        licences = [n.rpartition("/")[2] for n in names if n.startswith(f"{info}/licenses/")]
        text = wheel.read(f"{info}/licenses/LICENSE") if "LICENSE" in licences else b""
    if str(found.version) != version:
        yield f"version {found.version}, where the core has {version}"
    if (found.license_expression or "").split(" AND ")[0] != "Apache-2.0" or text != (ROOT / "LICENSE").read_bytes():
        yield "without the licence, or its text"
    if not found.description or not found.summary:
        yield "without a description"
    packages = {n.split("/")[0] for n in names if n.endswith("/__init__.py")}
    yield from (f"{p} has no py.typed" for p in sorted(packages) if f"{p}/py.typed" not in names)
    for name in names:
        file = pathlib.PurePosixPath(name)
        if file.name.endswith(BUNDLED) and not any(file.name.split(".")[0].lower() in n.lower() for n in licences):
            yield f"{name} is bundled without its licence"


def faults_of_archive(path: pathlib.Path) -> Iterator[str]:
    """What is wrong with a source archive."""
    with tarfile.open(path) as archive:
        names = [m.name.partition("/")[2] for m in archive.getmembers()]
    yield from (f"without {n}" for n in ("LICENSE", "PKG-INFO", "README.md", "pyproject.toml") if n not in names)


def digest(path: pathlib.Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main(dist: pathlib.Path, again: pathlib.Path) -> int:
    """Print what is wrong, and return 1 if anything is."""
    archives = sorted([*dist.glob("*.whl"), *dist.glob("*.tar.gz")])
    expected = {canonicalize_name(p.parent.name) for p in ROOT.glob("plugins/*/pyproject.toml")} | {"xrt-core"}
    wheels = {canonicalize_name(p.name.split("-")[0]): p for p in archives if p.suffix == ".whl"}
    faults = [f"{name}: no wheel" for name in sorted(expected - set(wheels))]
    version = wheels["xrt-core"].name.split("-")[1]
    for path in archives:
        found = faults_of_wheel(path, version) if path.suffix == ".whl" else faults_of_archive(path)
        faults += [f"{path.name}: {fault}" for fault in found]
        other = again / path.name
        if not other.exists() or digest(other) != digest(path):
            faults.append(f"{path.name}: a second build gives other bytes")
    rows = [{"filename": p.name, "hash": f"sha256={digest(p)}", "requires_python": ">=3.11"} for p in archives]
    (dist / "index").mkdir(exist_ok=True)
    (dist / "index" / "packages.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in rows), encoding="utf-8")
    print("\n".join(faults) or f"{len(archives)} archives of {len(wheels)} packages, version {version}: all is well")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main(*map(pathlib.Path, sys.argv[1:3])))

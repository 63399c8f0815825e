"""`xrt cache`: what it shows, checks, deletes and carries from folder to folder."""

from __future__ import annotations

import json
import pathlib

import pytest
from typer.testing import CliRunner, Result

from tests.cache.cached import CountingEngine, key_of, shifted, text_of
from xrt_core.cache.disk import DiskCache, Hit
from xrt_core.cli.app import application
from xrt_core.engine.contract import CompileOptions


@pytest.fixture
def disk(own_cache: pathlib.Path) -> DiskCache:
    """The cache that the command line sees, with two entries."""
    disk = DiskCache(own_cache, 1 << 20)
    for by in (1.0, 2.0):
        f = shifted(by)
        compiler = CountingEngine().compiler("cpu", CompileOptions())
        blob = compiler.compile(f, f.params, f.returns, f.aliases).serialize()
        info = {"cluster": f.name, "nodes": 1, "compile_seconds": 0.25}
        assert disk.write(key_of(f), info, text_of(f), blob) == ""
    return disk


def xrt(*arguments: object) -> Result:
    """Run `xrt cache ...`."""
    return CliRunner().invoke(application(), ["cache", *map(str, arguments)])


def test_ls(disk: DiskCache) -> None:
    """One line for each entry, a damaged one with its problem; as JSON the same."""
    disk.path_of(key_of(shifted(2.0))).write_bytes(b"")
    done = xrt("ls")
    assert done.exit_code == 0, done.output
    assert "shifted_1.0" in done.stdout
    assert "250 ms" in done.stdout
    assert "the file is empty" in done.stdout

    rows = {r["entry"]: r for r in json.loads(xrt("ls", "--json").stdout)["entries"]}
    assert rows[key_of(shifted(1.0)).digest]["engine"] == "host_reference"
    assert rows[key_of(shifted(2.0)).digest]["problem"] == "the file is empty"


def test_info(disk: DiskCache) -> None:
    """The settings with their sources, or all rows of one entry."""
    done = xrt("info")
    assert str(disk.folder) in done.stdout
    assert "environment variable XRT_CACHE_DIR" in done.stdout

    one = xrt("info", key_of(shifted(1.0)).digest[:8])
    assert "engine fingerprint" in one.stdout
    assert "blob executable" in one.stdout


def test_explain(disk: DiskCache) -> None:
    """Two entries differ in these rows, and their functions in these lines; an unknown name is one line."""
    done = xrt("explain", key_of(shifted(1.0)).digest[:10], disk.path_of(key_of(shifted(2.0))))
    assert done.stdout.startswith("function: ")
    assert "-('Add'" in done.stdout
    assert "+('Add'" in done.stdout
    same = xrt("explain", *[key_of(shifted(1.0)).digest] * 2)
    assert same.stdout == "the keys are the same\n"
    assert xrt("explain", "zzzz", "zzzz").exit_code == 2


def test_verify_and_clear(disk: DiskCache) -> None:
    """Damage is found and deleted on request; then everything is."""
    assert xrt("verify").exit_code == 0
    path = disk.path_of(key_of(shifted(2.0)))
    path.write_bytes(path.read_bytes()[:-3])
    done = xrt("verify")
    assert done.exit_code == 1
    assert "1 damaged" in done.stdout
    assert xrt("verify", "--remove").exit_code == 0
    assert len(disk.files()) == 1
    assert "0 entries deleted" in xrt("clear", "--engine", "other").stdout
    assert "1 entry deleted" in xrt("clear").stdout
    assert disk.files() == []


def test_export_and_import(disk: DiskCache, tmp_path: pathlib.Path) -> None:
    """Entries survive the way into another folder, under the names of their keys; damaged ones are refused."""
    target, there = tmp_path / "entries.tar", DiskCache(tmp_path / "there", 1 << 20)
    assert "2 entries written" in xrt("export", target).stdout
    done = xrt("import", target, "--dir", there.folder)
    assert done.exit_code == 0, done.output
    assert all(isinstance(there.read(key_of(f), text_of(f)), Hit) for f in (shifted(1.0), shifted(2.0)))

    data = bytearray(target.read_bytes())
    data[512 + 40] ^= 1  # within the digest of the first entry's manifest
    target.write_bytes(data)
    damaged = xrt("import", target, "--dir", tmp_path / "third")
    assert damaged.exit_code == 1
    assert "rejected: the file is damaged or cut off" in damaged.stdout
    assert "1 entry stored" in damaged.stdout
    assert xrt("import", disk.path_of(key_of(shifted(1.0)))).exit_code == 2


def test_an_empty_cache(own_cache: pathlib.Path) -> None:
    """Every command works where nothing was ever stored, and makes no folder."""
    for command in ("ls", "info", "verify", "clear"):
        assert xrt(command).exit_code == 0
    assert not own_cache.exists()

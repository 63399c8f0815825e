"""Entries on disk: what is written comes back, and what is damaged, foreign or not trusted is a miss with a reason."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.cache.cached import key_of, shifted, text_of
from xrt_core.cache.disk import NOTHING, DiskCache, Hit, Miss, distrust
from xrt_core.errors import CacheError

ROOT = pathlib.Path(__file__).parents[2]
F = shifted(1.0)
KEY, TEXT, BLOB = key_of(F), text_of(F), b"an executable, as far as the cache knows" * 5


@pytest.fixture
def disk(tmp_path: pathlib.Path) -> DiskCache:
    """An empty cache of a megabyte."""
    return DiskCache(tmp_path / "cache", 1 << 20)


def stored(disk: DiskCache) -> pathlib.Path:
    """The file of the one entry that this stores."""
    assert disk.write(KEY, {"cluster": "c"}, TEXT, BLOB) == ""
    return disk.path_of(KEY)


def test_what_was_written_is_read(disk: DiskCache) -> None:
    """An entry gives its blob and its information back; before it is stored there is plainly nothing."""
    assert disk.read(KEY, TEXT) == Miss(NOTHING)
    stored(disk)
    found = disk.read(KEY, TEXT)

    assert isinstance(found, Hit)
    assert found.blob == BLOB
    assert found.manifest.info == {"cluster": "c"}
    assert found.manifest.key == KEY


def test_only_this_user_can_read_or_write(disk: DiskCache) -> None:
    """Folders and files are made for their owner alone, whatever the umask says."""
    before = os.umask(0)
    try:
        path = stored(disk)
    finally:
        os.umask(before)

    for p in (disk.folder, disk.entries, path):
        assert p.stat().st_mode & 0o077 == 0, p


def test_the_function_text_is_compared(disk: DiskCache) -> None:
    """Two functions of one digest would not be mistaken for each other."""
    stored(disk)
    found = disk.read(KEY, TEXT + b"(another node)")

    assert isinstance(found, Miss)
    assert "another function" in found.reason


def test_every_flipped_bit_is_a_miss(disk: DiskCache) -> None:
    """No single bit of a file can change without being seen, but for the padding, which means nothing."""
    path = stored(disk)
    sound = path.read_bytes()
    rng = np.random.default_rng(0)
    misses = 0
    for at in range(len(sound)):
        damaged = bytearray(sound)
        damaged[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        found = disk.read(KEY, TEXT)
        if isinstance(found, Miss):
            assert found.stored
            assert found.reason
            misses += 1
        else:
            assert found.blob == BLOB

    assert misses > len(sound) - 3 * 64  # less than three alignments of padding


def test_every_length_but_the_right_one_is_a_miss(disk: DiskCache) -> None:
    """Truncated anywhere, or with something behind it."""
    path = stored(disk)
    sound = path.read_bytes()
    for end in range(len(sound)):
        path.write_bytes(sound[:end])
        assert isinstance(disk.read(KEY, TEXT), Miss), end
    path.write_bytes(sound + b"\0")

    found = disk.read(KEY, TEXT)
    assert isinstance(found, Miss)
    assert f"{len(sound) + 1} bytes" in found.reason


def test_a_thousand_damaged_entries_are_a_thousand_misses(disk: DiskCache) -> None:
    """Any damage (cut, flipped, zeroed, overwritten, mixed with another entry) at random places is a miss."""
    path = stored(disk)
    sound = path.read_bytes()
    other = key_of(shifted(2.0))
    disk.write(other, {}, text_of(shifted(2.0)), b"another" * 40)
    foreign = disk.path_of(other).read_bytes()
    rng = np.random.default_rng(1)
    covered = (*range(48), *range(sound.rindex(b'{"header"'), len(sound)))  # the head and the manifest
    for _ in range(1000):
        data = bytearray(sound)
        at = int(rng.choice(covered))
        kind = rng.integers(5)
        if kind == 0:
            data = data[:at]
        elif kind == 1:
            data[at] ^= 1 << int(rng.integers(8))
        elif kind == 2:
            data[at:] = bytes(len(data) - at)
        elif kind == 3:
            data[at : at + 32] = rng.bytes(32)
        else:
            data[at:] = foreign[at:] or b"?"
        path.write_bytes(data)
        if bytes(data) == sound:
            continue
        assert isinstance(disk.read(KEY, TEXT), Miss), (kind, at)


def test_a_swapped_entry_names_the_rows(disk: DiskCache) -> None:
    """A sound entry under another entry's name is a miss that says which rows are others'."""
    path = stored(disk)
    other = shifted(2.0)
    path.rename(disk.path_of(key_of(other)))
    found = disk.read(key_of(other), text_of(other))

    assert isinstance(found, Miss)
    assert "another key (function: " in found.reason
    assert disk.check(disk.path_of(key_of(other))) == "its name is not the digest of its key"


@pytest.mark.parametrize("what", ["empty", "noise", "folder", "pipe", "link", "later layout"])
def test_a_foreign_file_is_a_miss(disk: DiskCache, what: str, tmp_path: pathlib.Path) -> None:
    """Whatever lies where an entry should be, reading it ends at once with a reason, and storing does its best."""
    path = stored(disk)
    sound = path.read_bytes()
    path.unlink()
    if what == "empty":
        path.touch(0o600)
    elif what == "noise":
        path.write_bytes(os.urandom(500))
    elif what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path, 0o600)
    elif what == "link":
        (tmp_path / "elsewhere").write_bytes(sound)
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.write_bytes(sound[:8] + (99).to_bytes(4, "little") + sound[12:])
    found = disk.read(KEY, TEXT)

    assert isinstance(found, Miss)
    assert found.reason
    assert (disk.write(KEY, {}, TEXT, BLOB) == "") is (what != "folder")


def test_others_must_not_be_able_to_write(disk: DiskCache) -> None:
    """An entry, or the whole folder, that a group or everybody may write to is not used."""
    path = stored(disk)
    path.chmod(0o660)
    found = disk.read(KEY, TEXT)
    assert isinstance(found, Miss)
    assert "others may write" in found.reason
    path.chmod(0o600)
    for folder in (disk.folder, disk.entries):
        folder.chmod(0o777)
        with pytest.raises(CacheError, match="others may write to it .mode 777.; chmod go-w"):
            disk.prepare()
        assert disk.write(KEY, {}, TEXT, BLOB)
        folder.chmod(0o700)
    assert isinstance(disk.read(KEY, TEXT), Hit)


@pytest.mark.parametrize(("owner", "trusted"), [(os.geteuid(), True), (0, True), (os.geteuid() + 12345, False)])
def test_another_users_files_are_not_trusted(owner: int, trusted: bool) -> None:
    """Only this user's and root's files are; root could do as it likes anyway."""
    status = os.stat_result((0o100600, 1, 1, 1, owner, 0, 10, 0, 0, 0))
    assert (distrust(status) == "") is trusted


def test_a_read_only_folder_is_used_without_writing(disk: DiskCache) -> None:
    """In mode "read", or where the system refuses, entries are read, none is written, and nothing is touched."""
    path = stored(disk)
    os.utime(path, (1e9, 1e9))
    reader = DiskCache(disk.folder, 1 << 20, "read")

    assert isinstance(reader.read(KEY, TEXT), Hit)
    assert reader.write(KEY, {}, TEXT, BLOB) == "the cache is only read"
    assert path.stat().st_mtime == 1e9
    with reader.making(KEY, 1.0) as waited:
        assert not waited
    missing = DiskCache(disk.folder / "not there", 1 << 20, "read")
    assert missing.prepare() is False
    assert not missing.folder.exists()


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_folder_of_root_serves_other_users() -> None:
    """What root laid out read-only is used by everybody; what a user laid out is refused by others, root included."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        root.chmod(0o755)
        disk = DiskCache(root / "cache", 1 << 20)
        path = stored(disk)
        for p, mode in ((disk.folder, 0o755), (disk.entries, 0o755), (path, 0o644)):
            p.chmod(mode)
        code = (
            "import os, sys, pathlib\n"
            "from tests.cache.test_disk_entries import DiskCache, KEY, TEXT, BLOB\n"
            "os.setuid(65534)\n"
            "disk = DiskCache(pathlib.Path(sys.argv[1]), 1 << 20)\n"
            "print(type(disk.read(KEY, TEXT)).__name__, '/', disk.write(KEY, {}, TEXT, BLOB))\n"
        )
        command = [sys.executable, "-c", code, str(disk.folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
        assert done.stdout == "Hit / the folder cannot be written to\n", done.stderr
        os.chown(path, 65534, 65534)
        found = disk.read(KEY, TEXT)
        assert isinstance(found, Miss)
        assert "belongs to another user" in found.reason


def test_a_path_that_cannot_be_a_folder(tmp_path: pathlib.Path) -> None:
    """A file in the place of the folder is refused with its path; below a file nothing can be stored."""
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="file"):
        DiskCache(tmp_path / "file", 1 << 20).prepare()
    below = DiskCache(tmp_path / "file" / "cache", 1 << 20)
    assert below.write(KEY, {}, TEXT, BLOB)
    assert isinstance(below.read(KEY, TEXT), Miss)


def test_a_full_disk_leaves_nothing_behind(disk: DiskCache) -> None:
    """A write that the system ends half-way is not stored, says why, and leaves no temporary file."""
    stored(disk)
    code = (
        "import resource, signal, sys, pathlib\n"
        "from tests.cache.test_disk_entries import DiskCache, KEY, TEXT\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "print(DiskCache(pathlib.Path(sys.argv[1]), 1 << 20).write(KEY, {}, TEXT, bytes(100_000)))\n"
    )
    command = [sys.executable, "-c", code, str(disk.folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)

    assert "File too large" in done.stdout, done.stderr
    assert [p.name for p in disk.entries.iterdir() if p.is_file() and p.name != ".lock"] == [disk.path_of(KEY).name]
    assert isinstance(disk.read(KEY, TEXT), Hit)


def test_the_least_recently_used_goes_whoever_used_it(tmp_path: pathlib.Path) -> None:
    """The bound holds over all entries, in the order of their use by any process."""
    functions = [shifted(float(i)) for i in range(4)]
    mine, other = (DiskCache(tmp_path / "cache", 5400) for _ in range(2))
    for i, f in enumerate(functions[:3]):
        assert mine.write(key_of(f), {}, text_of(f), bytes(800)) == ""
        os.utime(mine.path_of(key_of(f)), (i, i))
    assert isinstance(other.read(key_of(functions[0]), text_of(functions[0])), Hit)
    assert other.write(key_of(functions[3]), {}, text_of(functions[3]), bytes(800)) == ""
    left = [isinstance(mine.read(key_of(f), text_of(f)), Hit) for f in functions]

    assert left[0]
    assert left[3]
    assert not left[1]
    assert sum(e.size for e in mine.files()) <= 5400


def test_an_entry_larger_than_the_cache_is_not_stored(tmp_path: pathlib.Path) -> None:
    """It would only push out the others."""
    disk = DiskCache(tmp_path, 1000)
    assert "the whole cache may have 1000" in disk.write(KEY, {}, TEXT, bytes(2000))
    assert disk.files() == []


def test_left_overs_of_killed_writers_go(disk: DiskCache) -> None:
    """A temporary file goes once nobody can be writing to it any more, and not before."""
    stored(disk)
    old, new = disk.entries / ".x.xrt.1.ab.tmp", disk.entries / ".x.xrt.2.cd.tmp"
    for p in (old, new):
        p.write_bytes(b"half an entry")
    os.utime(old, (time.time() - 3600,) * 2)
    disk.evict()

    assert not old.exists()
    assert new.exists()
    assert len(disk.files()) == 1


def test_the_nearest_entry_says_what_made_a_miss(disk: DiskCache) -> None:
    """The stored entry with the fewest different rows, and these rows; none in an empty cache."""
    assert disk.nearest(KEY) is None
    stored(disk)
    disk.write(key_of(shifted(2.0, (5, 5))), {}, b"", BLOB)
    near = disk.nearest(key_of(shifted(2.0)))

    assert near is not None
    assert near[0].digest == KEY.digest
    assert [row.partition(":")[0] for row in near[1]] == ["function"]

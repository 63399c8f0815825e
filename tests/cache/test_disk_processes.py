"""Many processes on one cache, some of them killed: no wrong bytes, no damaged entry, no error, bounded."""

from __future__ import annotations

import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest

from tests.cache import hammer
from xrt_core.cache.disk import DiskCache

ROOT = pathlib.Path(__file__).parents[2]


def start(folder: pathlib.Path, seed: int, seconds: float) -> subprocess.Popen[str]:
    """A hammering process."""
    command = [sys.executable, "-m", "tests.cache.hammer", str(folder), str(seed), str(seconds)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def hammered(folder: pathlib.Path, processes: int, seconds: float) -> tuple[int, int, int]:
    """Keep so many processes at it, killing one every now and then. Returns kills, hits and stores."""
    rng = random.Random(0)
    seeds = iter(range(10_000))
    end = time.monotonic() + seconds
    running = [start(folder, next(seeds), seconds) for _ in range(processes)]
    kills = hits = stores = 0
    while time.monotonic() < end:
        time.sleep(seconds / 12)
        i = rng.randrange(processes)
        if running[i].poll() is None and time.monotonic() < end:
            running[i].kill()
            kills += 1
            running[i].communicate()
            running[i] = start(folder, next(seeds), max(end - time.monotonic(), 0.1))
    for p in running:
        out, err = p.communicate(timeout=60)
        assert p.returncode in (0, -signal.SIGKILL), err
        if p.returncode == 0:
            h, s = map(int, out.split())
            hits, stores = hits + h, stores + s
    return kills, hits, stores


def check(folder: pathlib.Path) -> None:
    """What is left is sound, within the bound, and free of everybody's locks."""
    disk = DiskCache(folder, hammer.LIMIT)
    files = disk.files()
    assert files
    assert [reason for f in files if (reason := disk.check(f.path))] == []
    assert sum(f.size for f in files) <= hammer.LIMIT * 1.5  # each process looks at the folder about once a second
    assert disk.evict()[1] <= hammer.LIMIT


@pytest.mark.slow
def test_killed_writers_leave_no_damage(tmp_path: pathlib.Path) -> None:
    """A few processes for a few seconds."""
    kills, hits, stores = hammered(tmp_path, 3, 4.0)

    assert kills > 3
    assert hits > 0
    assert stores > 0
    check(tmp_path)


@pytest.mark.nightly
def test_sixteen_processes_for_a_minute(tmp_path: pathlib.Path) -> None:
    """The same on a larger scale."""
    kills, hits, stores = hammered(tmp_path, 16, 60.0)

    print(f"{kills} killed, {hits} hits, {stores} stores")
    assert kills > 8
    assert hits > 1000
    check(tmp_path)


def test_a_killed_holder_gives_its_lock_back(tmp_path: pathlib.Path) -> None:
    """Who waits for a process that is killed goes on at once; who waits too long goes on without the lock."""
    code = (
        "import sys, time, pathlib\n"
        "from xrt_core.cache.disk import DiskCache\n"
        "from xrt_core.cache.key import CacheKey\n"
        "with DiskCache(pathlib.Path(sys.argv[1]), 1000).making(CacheKey((('a', 'b'),)), 1):\n"
        "    print('held', flush=True)\n"
        "    time.sleep(60)\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    disk = DiskCache(tmp_path, 1000)
    key = hammer.CacheKey((("a", "b"),))
    begin = time.monotonic()
    with disk.making(key, 0.3) as waited:
        assert waited
    assert 0.25 < time.monotonic() - begin < 10
    holder.kill()
    holder.communicate()
    with disk.making(key, 30) as waited:
        assert not waited

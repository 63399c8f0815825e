"""The shared cache: what is signed is used, what fails is a miss."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import xrt_core as xrt
from xrt_core import ops
from xrt_core.cache import store
from xrt_core.errors import CacheError, OptionError
from xrt_core.plugins import plugins

pytest.importorskip("fsspec")
pytest.importorskip("jax")

from xrt_distributed.shared_cache import SharedCache, from_environment, open_url

KEY = b"0123456789abcdef"
X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)


class Plugin:
    """A package with one shared cache."""

    def __init__(self, cache: SharedCache) -> None:
        self.cache = cache

    @xrt.hookimpl
    def xrt_shared_caches(self) -> list[SharedCache]:
        return [self.cache]


def test_programs_without_a_shared_cache_import_nothing_for_one() -> None:
    """In a thread that goes on while the interpreter ends, an import that starts a pool would fail."""
    module = "xrt_distributed.shared_cache"
    program = f"import sys, xrt_distributed as d; print(d.xrt_shared_caches(), {module!r} in sys.modules)"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("XRT_DISTRIBUTED")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "False"]


class Opener:
    """A package that opens stores by their URLs."""

    @xrt.hookimpl
    def xrt_open_cache(self, url: str) -> SharedCache:
        return open_url(url)


@pytest.fixture
def use() -> Iterator[Callable[[SharedCache], None]]:
    """Have a cache as that of an installed package."""
    added: list[Plugin] = []

    def add(cache: SharedCache) -> None:
        for p in added:
            plugins.remove(p)
        added.append(Plugin(cache))
        plugins.add(added[-1], "shared", "tests")

    yield add
    for p in added:
        plugins.remove(p)


def ran(folder: pathlib.Path, cache: str = "readwrite") -> list[str]:
    """Run a model with a disk cache in a folder, as a new process would; the events of caches and compilation."""
    store.forget_all()
    m = xrt.XRTModule(
        lambda x: ops.Tanh(x) + 1, engine="xla", guard=False, prune=False, cache=cache, cache_dir=str(folder)
    )
    np.testing.assert_allclose(m(X), np.tanh(X) + 1, rtol=1e-6)
    return [e.name for e in m.events.recent() if e.name.startswith(("cache.", "compile.done", "compile"))]


def files(folder: pathlib.Path) -> list[pathlib.Path]:
    return [p for p in folder.rglob("*") if p.is_file()]


def test_a_second_machine_compiles_nothing(use: Any, tmp_path: pathlib.Path) -> None:
    """What one has compiled another fetches and loads; what was tampered with, or has another key, is compiled."""
    remote = tmp_path / "remote"
    cache = SharedCache(f"file://{remote}", KEY)
    use(cache)
    first = ran(tmp_path / "a")
    assert "cache.stored" in first
    assert cache.flush()
    (entry,) = files(remote)
    use(SharedCache(f"file://{remote}", KEY, write=False))
    second = ran(tmp_path / "b")
    assert "cache.fetched" in second
    assert "cache.hit" in second
    assert "cache.stored" not in second
    whole = entry.read_bytes()
    for wrong in (whole[:-1] + bytes([whole[-1] ^ 1]), whole[: len(whole) // 2], b""):
        entry.write_bytes(wrong)
        use(SharedCache(f"file://{remote}", KEY, write=False))
        found = ran(tmp_path / f"c{len(wrong)}")
        assert "cache.shared_failed" in found
        assert "cache.stored" in found
        assert entry.read_bytes() == wrong
    entry.write_bytes(whole)
    use(SharedCache(f"file://{remote}", KEY[::-1], write=False))
    assert "cache.shared_failed" in ran(tmp_path / "d")


def test_entries_in_memory() -> None:
    """A store of objects keeps content by name; an entry under another's name is refused; a reader writes nothing."""
    cache = SharedCache("memory://xrt-shared-test", KEY)
    assert cache.fetch("ab.xrt") is None
    cache.offer("ab.xrt", b"content")
    assert cache.flush()
    assert cache.fetch("ab.xrt") == b"content"
    cache._fs.copy("/xrt-shared-test/ab/ab.xrt", "/xrt-shared-test/cd/cd.xrt")
    with pytest.raises(CacheError, match=r"the entry cd.xrt has no signature of this key"):
        cache.fetch("cd.xrt")
    only = SharedCache("memory://xrt-shared-test", KEY, write=False)
    only.offer("ef.xrt", b"content")
    assert only.flush()
    assert only.fetch("ef.xrt") is None
    cache._fs.rm("/xrt-shared-test", recursive=True)


def test_limits(tmp_path: pathlib.Path) -> None:
    """Entries that are too old are not used, and go; so does what is beyond the size, the oldest first."""
    cache = SharedCache(f"file://{tmp_path}", KEY)
    for i in range(4):
        cache.offer(f"{i}{i}.xrt", bytes(1000))
        assert cache.flush()
        for path in files(tmp_path):
            os.utime(path, (time.time() - 100, path.stat().st_mtime - 100))
    assert SharedCache(f"file://{tmp_path}", KEY, days=1e-9).fetch("33.xrt") is None
    assert SharedCache(f"file://{tmp_path}", KEY, days=1).fetch("33.xrt") == bytes(1000)
    assert SharedCache(f"file://{tmp_path}", KEY, size=2500).trim() == 2
    assert sorted(p.name for p in files(tmp_path)) == ["22.xrt", "33.xrt"]
    writer = SharedCache(f"file://{tmp_path}", KEY, days=150 / 86400)  # of 22.xrt the file is 200 s old
    writer.offer("44.xrt", b"new")
    assert writer.flush()
    assert sorted(p.name for p in files(tmp_path)) == ["33.xrt", "44.xrt"]


def test_a_slow_store(use: Any, tmp_path: pathlib.Path) -> None:
    """It costs one time limit; then it is in back-off, and nothing waits for it."""
    cache = SharedCache(f"file://{tmp_path / 'remote'}", KEY, seconds=0.2)
    cache._read = lambda name: time.sleep(3)  # type: ignore[method-assign,assignment,return-value,func-returns-value]
    use(cache)
    start = time.perf_counter()
    with pytest.raises(CacheError, match=r"did not answer within 0.2 s; it is left alone for 60 s"):
        cache.fetch("ab.xrt")
    assert cache.fetch("ab.xrt") is None
    assert time.perf_counter() - start < 2
    cache.offer("ab.xrt", b"content")
    assert cache.flush()
    assert not files(tmp_path)


def test_a_store_that_cannot_be_written(tmp_path: pathlib.Path) -> None:
    """It is told of in `failures`, and there is a back-off."""
    (tmp_path / "remote").write_text("a file, not a folder")
    cache = SharedCache(f"file://{tmp_path / 'remote'}", KEY)
    cache.offer("ab.xrt", b"content")
    assert cache.flush()
    assert "ab.xrt" in cache.failures[0]
    assert cache.fetch("ab.xrt") is None


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, r"needs a key of at least 16 bytes"),
        ({"XRT_DISTRIBUTED_CACHE_KEY": "short"}, r"needs a key of at least 16 bytes"),
        ({"XRT_DISTRIBUTED_CACHE_KEY_FILE": "/absent/key"}, r"'/absent/key' cannot be read"),
        ({"XRT_DISTRIBUTED_CACHE_MODE": "write"}, r"it takes 'readwrite' or 'read'"),
        ({"XRT_DISTRIBUTED_CACHE_SECONDS": "soon"}, r"it takes a number of seconds above 0"),
        ({"XRT_DISTRIBUTED_CACHE_DAYS": "-1"}, r"it takes a number of days above 0"),
        ({"XRT_DISTRIBUTED_CACHE_SIZE": "big"}, r"it takes a number of bytes above 0"),
        ({"XRT_DISTRIBUTED_CACHE_KEY": KEY.decode(), "XRT_DISTRIBUTED_CACHE": "nosuch://x"}, r"nosuch"),
    ],
)
def test_wrong_variables(variables: dict[str, str], message: str) -> None:
    """They are errors that say what they take."""
    with pytest.raises(OptionError, match=message):
        from_environment({"XRT_DISTRIBUTED_CACHE": "memory://x", **variables})
    assert from_environment({}) == []


def test_the_option(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`cache=` with a URL shares what one module compiles; without a key, or a plugin that knows it, it is an error."""
    url = f"file://{tmp_path / 'remote'}"
    plugin = Opener()
    plugins.add(plugin, "opener", "tests")
    try:
        with pytest.raises(OptionError, match="needs a key of at least 16 bytes"):
            xrt.XRTModule(lambda x: ops.Tanh(x), engine="xla", cache=url)
        monkeypatch.setenv("XRT_DISTRIBUTED_CACHE_KEY", KEY.decode())
        for folder, event in (("a", "cache.stored"), ("b", "cache.fetched")):
            assert event in ran(tmp_path / folder, url)
            assert open_url(url).flush()
        with pytest.raises(OptionError, match=r"the shared cache 'nosuch://x': .*nosuch"):
            xrt.XRTModule(lambda x: ops.Tanh(x), engine="xla", cache="nosuch://x")
    finally:
        plugins.remove(plugin)
    with pytest.raises(OptionError, match="it takes 'readwrite'.* or the URL of a shared store"):
        xrt.XRTModule(lambda x: ops.Tanh(x), engine="xla", cache="bucket")

"""The shared cache on stores of objects: a server that speaks S3's protocol on this machine, and one that is away."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("s3fs", reason="s3fs is not installed")
pytest.importorskip("jax")
pytest.importorskip("moto.server", reason="moto's server is not installed")

from test_shared_cache import KEY, ran
from xrt_distributed.shared_cache import SharedCache, from_environment

import xrt_core as xrt
from xrt_core.errors import CacheError
from xrt_core.plugins import plugins

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


class Plugin:
    """A package with the shared caches that variables name."""

    def __init__(self, *caches: SharedCache) -> None:
        self.caches = caches

    @xrt.hookimpl
    def xrt_shared_caches(self) -> list[SharedCache]:
        return list(self.caches)


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    """A client of a server with the bucket "fleet"; s3fs finds it by AWS's own variables."""
    import boto3
    from moto.server import ThreadedMotoServer

    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    running.start()
    host, port = running.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "id")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        client = boto3.client("s3")
        client.create_bucket(Bucket="fleet")
        yield client
    running.stop()


def names(client: Any, prefix: str) -> list[str]:
    return [row["Key"] for row in client.list_objects_v2(Bucket="fleet", Prefix=prefix).get("Contents", ())]


def test_machines_share_a_bucket(s3: Any, tmp_path: pathlib.Path) -> None:
    """One compiles, another one that only reads fetches, keeps a copy and loads; what was tampered with is compiled."""
    variables = {"XRT_DISTRIBUTED_CACHE": "s3://fleet/shared", "XRT_DISTRIBUTED_CACHE_KEY": KEY.decode()}

    def seen(folder: str, **more: str) -> tuple[list[str], SharedCache]:
        (cache,) = from_environment({**variables, **more})
        plugin = Plugin(cache)
        plugins.add(plugin, "shared", "tests")
        try:
            return ran(tmp_path / folder), cache
        finally:
            plugins.remove(plugin)

    first, cache = seen("a")
    assert "cache.stored" in first
    assert cache.flush(), cache.failures
    (key,) = names(s3, "shared/")
    second, _ = seen("b", XRT_DISTRIBUTED_CACHE_MODE="read")
    assert "cache.fetched" in second
    assert "cache.stored" not in second
    calls = len(names(s3, "shared/"))
    again, _ = seen("b", XRT_DISTRIBUTED_CACHE_MODE="read")  # from the local copy
    assert "cache.fetched" not in again
    assert "cache.hit" in again
    body = s3.get_object(Bucket="fleet", Key=key)["Body"].read()
    s3.put_object(Bucket="fleet", Key=key, Body=body[:-1] + bytes([body[-1] ^ 1]))
    third, reader = seen("c", XRT_DISTRIBUTED_CACHE_MODE="read")
    assert "cache.shared_failed" in third
    assert "cache.stored" in third
    assert reader.flush()
    assert len(names(s3, "shared/")) == calls


def test_what_is_written_at_the_end(s3: Any, environment: dict[str, str], tmp_path: pathlib.Path) -> None:
    """A program that ends at once leaves its report, and the entry that it compiled: names are resolved in a pool of
    threads, which takes nothing once the interpreter ends."""
    program = (
        "import numpy as np, xrt_core as xrt\n"
        "m = xrt.XRTModule(lambda x: xrt.ops.Tanh(x), engine='xla', guard=False, prune=False)\n"
        "m(np.ones(4, np.float32))\n"
    )
    own = {
        **os.environ, **environment, **{n: v for n, v in os.environ.items() if n.startswith("AWS_")},
        "XRT_DISTRIBUTED_REPORTS": "s3://fleet/reports", "XRT_DISTRIBUTED_CACHE": "s3://fleet/last",
        "XRT_DISTRIBUTED_CACHE_KEY": KEY.decode(), "XRT_CACHE_DIR": str(tmp_path),
    }  # fmt: skip
    subprocess.run([sys.executable, "-c", program], env=own, check=True, timeout=120)
    (report,) = names(s3, "reports/")
    assert json.loads(s3.get_object(Bucket="fleet", Key=report)["Body"].read())["models"]
    assert len(names(s3, "last/")) == 1


def test_limits_of_a_bucket(s3: Any) -> None:
    """The oldest entries go when all of them take too much, and nothing else in the bucket does."""
    s3.put_object(Bucket="fleet", Key="other/file", Body=bytes(5000))
    cache = SharedCache("s3://fleet/limited", KEY, size=2500)
    for i in range(2):
        cache.offer(f"{i}{i}.xrt", bytes(1000))
        assert cache.flush(), cache.failures
        time.sleep(1.1)  # S3's dates are whole seconds
    cache.offer("22.xrt", bytes(1000))
    assert cache.flush()
    assert cache.trim() == 1
    assert names(s3, "limited/") == ["limited/11/11.xrt", "limited/22/22.xrt"]
    assert cache.fetch("00.xrt") is None
    assert cache.fetch("11.xrt") == bytes(1000)
    assert names(s3, "other/") == ["other/file"]


def test_a_bucket_that_is_not_there(s3: Any) -> None:
    """It is told of, and never made."""
    cache = SharedCache("s3://absent/shared", KEY)
    cache.offer("ab.xrt", b"content")
    assert cache.flush()
    assert cache.failures
    assert [b["Name"] for b in s3.list_buckets()["Buckets"]] == ["fleet"]


@pytest.mark.parametrize("answers", [False, True])
def test_a_store_that_is_away(answers: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A port where nobody listens, and a server that takes calls and says nothing: the module runs, after one time
    limit, and the next one does not wait."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        if answers:
            listening.listen()
        port = listening.getsockname()[1]
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        import s3fs

        s3fs.S3FileSystem.clear_instance_cache()
        cache = SharedCache("s3://fleet/shared", KEY, seconds=1.0)
        s3fs.S3FileSystem.clear_instance_cache()
        plugin = Plugin(cache)
        plugins.add(plugin, "shared", "tests")
        try:
            start = time.perf_counter()
            found = ran(tmp_path / "a")
            took = time.perf_counter() - start
            assert "cache.shared_failed" in found
            assert "cache.stored" in found
            assert took < 6
            start = time.perf_counter()
            assert cache.fetch("ab.xrt") is None
            cache.offer("ab.xrt", b"content")
            assert time.perf_counter() - start < 0.1
        finally:
            plugins.remove(plugin)


def test_google_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    """gs:// is gcsfs's; a store that is away is an error within the time limit."""
    pytest.importorskip("gcsfs", reason="gcsfs is not installed")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{closed.getsockname()[1]}")
        cache = SharedCache("gs://fleet/shared", KEY, seconds=1.0)
        start = time.perf_counter()
        with pytest.raises((CacheError, OSError)):
            cache.fetch("ab.xrt")
        assert time.perf_counter() - start < 3

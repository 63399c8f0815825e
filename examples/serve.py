"""A model behind HTTP: FastAPI, a pool of threads, health, metrics, and a load to see how it does.

    python examples/serve.py                       # serves 127.0.0.1:8000 until Ctrl-C
    python examples/serve.py --load 500            # serves, sends 500 requests from 8 threads, prints, and ends

A module's calls are thread-safe, so each request calls it from the thread that FastAPI gave it. The model is compiled
and verified before the first request (`xrt.warmup`); batches of 1 to 16 rows share one plan, as declared.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import socket
import statistics
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any

import httpx
import numpy as np
import uvicorn
from fastapi import FastAPI, HTTPException, Response
from pydantic import BaseModel, Field

import xrt_core as xrt

WIDTH, MOST = 64, 16


class Net(xrt.Graph):
    """64 features -> 128 -> 10 scores."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.first = (rng.standard_normal((WIDTH, 128)) / 8).astype(np.float32)
        self.last = (rng.standard_normal((128, 10)) / 11).astype(np.float32)

    def build(self, rows: Any) -> Any:
        """rows: float32[N, 64]. Returns float32[N, 10]."""
        return xrt.ops.Softmax(xrt.ops.Relu(rows @ self.first) @ self.last)


class Rows(BaseModel):
    """The body of a request."""

    rows: Annotated[list[Annotated[list[float], Field(min_length=WIDTH, max_length=WIDTH)]], Field(min_length=1)]


def application(engine: str | None = None) -> FastAPI:
    """The service."""
    graph = xrt.trace(Net(), f"float32[n, {WIDTH}]")
    module = xrt.XRTModule(graph, engine=engine, shapes={"rows": (xrt.Symbol("n", min=1, max=MOST), WIDTH)})

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        xrt.warmup(module, [{"rows": (n, WIDTH)} for n in (1, MOST)])
        yield
        module.close()

    app = FastAPI(title="XRT", lifespan=lifespan)

    @app.post("/predict")
    def predict(body: Rows) -> dict[str, list[list[float]]]:  # not async: FastAPI calls it in a thread
        try:
            return {"scores": np.asarray(module(np.asarray(body.rows, np.float32))).tolist()}
        except xrt.InputError as e:
            raise HTTPException(422, str(e)) from None

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(module.report().to_prometheus(), media_type="text/plain; version=0.0.4")

    @app.get("/healthz")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    return app


@contextlib.contextmanager
def served(app: FastAPI) -> Iterator[str]:
    """The address of the service, which runs in a thread of this process until the block ends."""
    with socket.socket(proto=socket.IPPROTO_TCP) as listening:  # asyncio sends at once only where that is said
        listening.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        deadline = time.monotonic() + 120
        while not server.started:
            if time.monotonic() > deadline or not thread.is_alive():
                raise RuntimeError("the server did not start")
            time.sleep(0.02)
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(30)


def load(address: str, requests: int, threads: int = 8) -> tuple[int, list[float], float]:
    """Send requests of 1 to 16 rows; returns how many answers were right, their seconds, and the seconds of all."""
    rng = np.random.default_rng(0)
    bodies = [rng.standard_normal((1 + i % MOST, WIDTH)).astype(np.float32) for i in range(32)]
    host = xrt.XRTModule(Net(), engine="host")
    expected = [np.asarray(host(b)) for b in bodies]
    times: list[float] = []

    def ask(client: httpx.Client, i: int) -> bool:
        begun = time.perf_counter()
        answer = client.post("/predict", json={"rows": bodies[i % 32].tolist()})
        times.append(time.perf_counter() - begun)
        return answer.status_code == 200 and np.allclose(answer.json()["scores"], expected[i % 32], atol=1e-5)

    begun = time.perf_counter()
    with httpx.Client(base_url=address, timeout=60) as client, concurrent.futures.ThreadPoolExecutor(threads) as pool:
        right = sum(pool.map(lambda i: ask(client, i), range(requests)))
    return right, times, time.perf_counter() - begun


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", help="default: the fastest")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--load", type=int, metavar="REQUESTS", help="send so many to itself, and end")
    given = parser.parse_args()
    app = application(given.engine)
    if given.load is None:
        uvicorn.run(app, host="127.0.0.1", port=given.port)
        return
    with served(app) as address:
        right, times, seconds = load(address, given.load)
        lines = httpx.get(f"{address}/metrics").text.splitlines()
    calls = sum(float(s.split()[-1]) for s in lines if s.startswith("xrt_cluster_calls_total"))
    ordered = statistics.quantiles(times, n=100)
    print(f"{right} of {given.load} answers right, {given.load / seconds:.0f} a second")
    print(f"milliseconds: median {ordered[49] * 1e3:.1f}, 95 % below {ordered[94] * 1e3:.1f}")
    print(f"calls of clusters counted: {calls:.0f}")


if __name__ == "__main__":
    main()

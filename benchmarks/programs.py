"""Real programs that use XRT under guard: how long they take to end, and what they leave behind.

    python benchmarks/programs.py [PROGRAM ...] [--engine auto] [--guard ""]

Each program runs a small model until engines answer, in the way that its name says, and ends by itself or by a signal.
Counted are the seconds from its last statement, or the signal, until all its processes are gone, and what is left 2 s
later: processes, shared memory, temporary files of XRT. The next program removes the files of one that died.

`gunicorn` needs that package, `notebook` nbclient and ipykernel. With `daemon-threads`, Python ends threads within C++
of a library, which aborts the process: with onnxruntime and JAX used directly as well.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass

HEAD = """
import os, sys, time, warnings
import numpy as np
import xrt_core as xrt
from xrt_core import ops
warnings.simplefilter("ignore")  # JAX warns of forks
W = np.linspace(-1, 1, 4096, dtype=np.float32).reshape(64, 64)
X = np.linspace(0, 1, 4096, dtype=np.float32).reshape(64, 64)
WANT = np.tanh(np.maximum(X.astype(float) @ W, 0)) + X
def check(y):
    assert np.allclose(y, WANT, rtol=1e-4, atol=1e-5), np.abs(y - WANT).max()
def new():
    engine, guard = os.environ["ENGINE"] or None, os.environ["GUARD"] or None
    return xrt.XRTModule(lambda x: ops.Tanh(ops.Relu(x @ W)) + x, engine=engine, guard=guard, prune=False)
def made():
    m = new()
    check(m(X))
    m.wait(120)
    check(m(X))
    return m
def answer(_=None):
    check(MODULE(X) if "MODULE" in globals() else made()(X))
    return os.getpid()
def ending():
    print("END", time.time(), flush=True)
"""

PROGRAMS = {
    "plain": "made()\nending()\n",
    "fork": """
MODULE = made()
pid = os.fork()
answer()
if pid:
    assert os.waitpid(pid, 0)[1] == 0
    ending()
""",
    "fork-pool": """
import multiprocessing
MODULE = made()
with multiprocessing.get_context("fork").Pool(2) as pool:
    pool.map(answer, range(8))
    ending()
""",
    "spawn-pool": """
import multiprocessing
if __name__ == "__main__":
    MODULE = made()
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        pool.map(answer, range(4))
        ending()
""",
    "forkserver": """
import concurrent.futures, multiprocessing
if __name__ == "__main__":
    with concurrent.futures.ProcessPoolExecutor(2, multiprocessing.get_context("forkserver")) as pool:
        list(pool.map(answer, range(4)))
        ending()
""",
    "threads": """
import threading
MODULE = made()
threads = [threading.Thread(target=lambda: [answer() for _ in range(200)]) for _ in range(4)]
for t in threads: t.start()
for t in threads: t.join()
ending()
""",
    "daemon-threads": """
import threading
MODULE = made()
for _ in range(4):
    threading.Thread(target=lambda: [answer() for _ in range(10**9)], daemon=True).start()
time.sleep(0.5)
ending()
""",
    "building": """
m = new()
check(m(X))  # the engines' builds have just begun
ending()
""",
    "exception": "made()\nending()\nraise RuntimeError('the program fails')\n",
    "asyncio": """
import asyncio
MODULE = made()
async def main():
    await asyncio.gather(*(asyncio.to_thread(answer) for _ in range(50)))
asyncio.run(main())
ending()
""",
    "sigint": "m = made()\nprint('READY', flush=True)\nwhile True: m(X)\n",
    "sigterm": "m = made()\nprint('READY', flush=True)\nwhile True: m(X)\n",
    "sigint-building": """
print('READY', flush=True)
m = new()
while True: m(X)
""",
    "gunicorn": """
MODULE = None
def app(environ, start_response):
    global MODULE
    if MODULE is None:
        MODULE = made()
    answer()
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"right"]
""",
    "gunicorn-preload": """
MODULE = made()
def app(environ, start_response):
    answer()
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"right"]
""",
    "xdist": """
import atexit, pytest
@pytest.mark.parametrize("i", range(4))
def test_answer(i):
    answer()
atexit.register(lambda: open(os.environ["ENDED"], "a").write(f"{time.time()}\\n"))  # its output is pytest's
""",
    "notebook": "MODULE = made()\n#%%\nanswer()\n#%%\nimport multiprocessing\n#%%\nanswer()\n",
}
"""Name -> program. Cells of the notebook are apart by "#%%"."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a program ended. seconds: until all its processes were gone."""

    right: bool
    seconds: float
    left: tuple[str, ...]
    note: str = ""


def tagged(tag: str) -> list[str]:
    """The processes with a tag in their environment."""
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if f"XRT_PROGRAM_TAG={tag}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(f"process {folder.name}")
        except OSError:
            continue
    return found


def shared_memory() -> set[str]:
    """The names of shared memory and of XRT's temporary files."""
    shm = pathlib.Path("/dev/shm")
    return {str(p) for p in [*shm.glob("*"), *pathlib.Path(tempfile.gettempdir()).glob("xrt*")]}


def run(name: str, engine: str, guard: str, folder: pathlib.Path) -> Ending:
    """Run one program to its end."""
    tag = f"{name}-{os.getpid()}-{time.time()}"
    script = folder / f"test_{name.replace('-', '_')}.py"
    script.write_text(HEAD + PROGRAMS[name])
    environment = {
        **os.environ, "XRT_PROGRAM_TAG": tag, "ENGINE": engine, "GUARD": guard, "XRT_CACHE_DIR": str(folder / "cache"),
        "XRT_GUARD": "", "ENDED": str(folder / "ended"),
        "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    before = shared_memory()
    command = [sys.executable, str(script)]
    if name == "xdist":
        command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", str(script)]
    if name.startswith("gunicorn"):
        options = ["--preload"] if name.endswith("preload") else []
        command = [sys.executable, "-m", "gunicorn", "-w", "2", "-b", "127.0.0.1:8917", *options, f"{script.stem}:app"]
    if name == "notebook":
        command = [sys.executable, "-c", _NOTEBOOK, str(script)]
    log = folder / f"{name}.log"
    with log.open("w") as err, subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=err, text=True, env=environment, cwd=folder,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:  # fmt: skip
        begin, output, wanted = 0.0, "", 0
        if name.startswith("sig"):
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(1.0)
            begin, number = time.time(), signal.SIGINT if name.startswith("sigint") else signal.SIGTERM
            process.send_signal(number)
            wanted = -number
        elif name.startswith("gunicorn"):
            answered = _requests(8)
            begin = time.time()
            process.send_signal(signal.SIGTERM)
            wanted = 0 if answered else -1
        output += process.communicate(timeout=300)[0]
        wanted = 1 if name == "exception" else wanted
        right = process.returncode == wanted
        if name.startswith("sigint") and process.returncode == 1:
            # Python forgets that it was interrupted if a thread runs `exec` of a text after that, as imports do
            right = log.read_text().rstrip().endswith("KeyboardInterrupt")
    while tagged(tag) and time.time() < (begin or time.time()) + 60:
        time.sleep(0.005)
    end = time.time()
    for line in output.splitlines():
        if line.startswith("END "):
            begin = float(line.split()[1])
    if name == "xdist":  # the last of its processes that ended
        begin = max(map(float, (folder / "ended").read_text().split()))
    time.sleep(2)
    left = (*tagged(tag), *sorted(shared_memory() - before))
    return Ending(right, end - begin, left, "" if right else log.read_text()[-300:])


_NOTEBOOK = """
import sys, time, pathlib, nbformat, nbclient
cells = pathlib.Path(sys.argv[1]).read_text().split("#%%")
book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
client = nbclient.NotebookClient(book, timeout=180)
with client.setup_kernel():
    for i, cell in enumerate(book.cells):
        client.execute_cell(cell, i)
    print("END", time.time(), flush=True)
"""


def _requests(count: int) -> bool:
    until = time.monotonic() + 180
    while count and time.monotonic() < until:
        try:
            with urllib.request.urlopen("http://127.0.0.1:8917/", timeout=150) as answer:
                count -= answer.read() == b"right"
        except OSError:
            time.sleep(0.1)
    return not count


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=f"of {', '.join(PROGRAMS)}; default all")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--guard", default="", help='"isolated", or nothing for the default')
    given = parser.parse_args()
    needs = {"gunicorn": "gunicorn", "gunicorn-preload": "gunicorn", "notebook": "nbclient", "xdist": "xdist"}
    print(f"engine {given.engine}, guard {given.guard or 'default'}\n\n| program | right | ends within (s) | left |")
    print("|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name in given.programs or PROGRAMS:
            if importlib.util.find_spec(needs.get(name, "os")) is None:
                print(f"| {name} | {needs[name]} is not installed | | |")
                continue
            ended = run(name, given.engine, given.guard, pathlib.Path(folder))
            note = ", ".join(ended.left) or "nothing"
            print(f"| {name} | {'yes' if ended.right else 'no'} | {ended.seconds:.2f} | {note} |", flush=True)
            if ended.note:
                print(ended.note, file=sys.stderr)


if __name__ == "__main__":
    main()

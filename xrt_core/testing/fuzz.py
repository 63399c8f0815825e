"""The fuzzing of engines: cases in worker processes, on the host, then on each engine, which must give the same.

A case runs with limits of time and memory. Findings are: the end of the process, a hang, an exception that is no
XRTError, an InternalError, more memory than the limit, an error on one side only, and results that differ. A worker
that ends or hangs is replaced, and its case runs again with compilation in the guard's own worker (`guard_sandbox`):
what that holds is counted, and is no finding. Findings are kept in a folder.
"""

from __future__ import annotations

import collections
import functools
import multiprocessing
import os
import pathlib
import resource
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import onnx
from onnx import numpy_helper

from xrt_core import events
from xrt_core.errors import InternalError, XRTError
from xrt_core.frontends.onnx_import import import_model
from xrt_core.ir.onnx_proto import array_from_tensor
from xrt_core.ir.op_traits import draws_random, is_discontinuous
from xrt_core.module import XRTModule
from xrt_core.testing.mutations import MOST_ELEMENTS, Base, Case, model_case
from xrt_core.verify.repro import read_bundle

SECONDS: Final = 60.0
"""A case may take so long, on the host and all engines."""
MEMORY: Final = 5 << 30
"""Bytes that a worker may allocate."""
_COMPARED: Final = 1 << 30
"""Bytes of the host's results up to which engines run too: theirs have to fit beside them."""
_CASES_OF_A_WORKER: Final = 400  # compilers keep memory for every program
_JUDGED: Final = (1e-12, 1e12)
"""Results are compared where all floats other than 0, infinity and NaN lie between these: beyond, squares and sums
overflow in one order and not in another, and engines may take what is subnormal for zero."""

MakeCase = Callable[[str, Any, int, Sequence[str]], Case]
"""Task ("model" or another), number, seed, engines -> the case; it can be pickled."""


def kit_case(task: str, number: int, seed: int, engines: Sequence[str]) -> Case:
    """A mutated node test of ONNX."""
    return model_case(node_tests(), seed, number)


@functools.cache
def node_tests() -> list[Base]:
    """The node tests of small tensors, without sequences among their inputs."""
    from onnx.backend.test.loader import load_model_tests

    found = []
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        for test in load_model_tests(kind="node"):
            if test.model is None or not test.data_sets:
                continue
            inputs, _ = test.data_sets[0]
            arrays = [array_from_tensor(x, x.name) if isinstance(x, onnx.TensorProto) else x for x in inputs]
            arrays = [x.astype(object) if isinstance(x, np.ndarray) and x.dtype.kind in "US" else x for x in arrays]
            if all(isinstance(x, np.ndarray) and x.size <= MOST_ELEMENTS for x in arrays):
                named = dict(zip((i.name for i in test.model.graph.input), arrays, strict=False))
                found.append(Base(test.name, test.model, named))
    return found


def store(case: Case, folder: pathlib.Path) -> None:
    """Write a case so that `load` reads it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    folder.joinpath(f"model.{case.kind}").write_bytes(case.content)
    folder.joinpath("weights.bin").write_bytes(case.weights)
    for i, call in enumerate(case.calls):
        protos = [numpy_helper.from_array(np.asarray(x), n) for n, x in call.items()]
        data = onnx.SequenceProto(name="call", elem_type=1, tensor_values=protos).SerializeToString()
        folder.joinpath(f"call{i}").write_bytes(data)


def load_calls(folder: pathlib.Path) -> list[dict[str, np.ndarray]]:
    """The arguments of a stored case."""
    calls = []
    for path in sorted(folder.glob("call*")):
        protos = onnx.SequenceProto.FromString(path.read_bytes()).tensor_values
        arrays = {p.name: numpy_helper.to_array(p) for p in protos}
        calls.append({n: x.astype(object) if x.dtype.kind in "US" else x for n, x in arrays.items()})
    return calls



@dataclass
class Told:
    """What came of a case. ran: engine (or host) -> calls with results; live: engine -> live clusters."""

    findings: list[str] = field(default_factory=list)
    loaded: bool = False
    ran: collections.Counter[str] = field(default_factory=collections.Counter)
    live: collections.Counter[str] = field(default_factory=collections.Counter)
    rejected: collections.Counter[str] = field(default_factory=collections.Counter)


def examine(folder: pathlib.Path, engines: Sequence[str], sandbox: bool) -> Told:
    """Run a stored case on the host and on each engine."""
    (path,) = folder.glob("model.*")
    if path.suffix != ".onnx":
        return _examine_file(path)
    told, calls = Told(), load_calls(folder)
    host = _attempt(told, "host", lambda: _module(path, "host", False))
    if host is None:
        return told
    told.loaded = True
    wanted = [_call(told, "host", host, call) for call in calls]
    if sum(y.nbytes for of_call in wanted for y in (of_call or {}).values() if isinstance(y, np.ndarray)) > _COMPARED:
        return told
    judge = _Judge(path)
    for engine in engines:
        _on_engine(told, engine, path, calls, wanted, sandbox, judge)
    return told


def _examine_file(path: pathlib.Path) -> Told:
    told = Told()
    if path.suffix == ".bundle":
        told.loaded = _attempt(told, "bundle", lambda: read_bundle(path)) is not None
        return told
    m = _attempt(told, "load", lambda: XRTModule.load(path))
    if m is not None:
        told.loaded = True
        inputs = {
            n: np.ones([d if isinstance(d, int) else 2 for d in t.shape], t.dtype) for n, t in m.input_types.items()
        }
        _call(told, "saved", m, inputs)
        m.close()
    return told


def _module(path: pathlib.Path, engine: str, sandbox: bool) -> Any:
    options: dict[str, Any] = {}
    if engine != "host":
        options = {"guard_async": False, "guard_sandbox": sandbox, "guard_shadow": 1, "guard_timeout": SECONDS / 3}
    return XRTModule(str(path), engine=engine, cache=False, prune=False, **options)


def _attempt(told: Told, who: str, what: Callable[[], Any]) -> Any:
    """The result; None for an XRTError, which is as it should be, and for a finding."""
    try:
        return what()
    except InternalError as e:
        told.findings.append(f"{who}: InternalError: {e}")
    except XRTError:
        pass
    except BaseException as e:
        told.findings.append(f"{who}: raw {type(e).__name__}: {str(e)[:500]} ({_place(e)})")
    return None


def _place(e: BaseException) -> str:
    trace, place = e.__traceback__, ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if "xrt_" in code.co_filename:
            place = f"{pathlib.Path(code.co_filename).name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def _call(told: Told, who: str, m: Any, call: dict[str, np.ndarray]) -> dict[str, Any] | None:
    found = _attempt(told, who, lambda: m.run({n: np.array(x) for n, x in call.items()}))
    told.ran[who] += found is not None
    return found  # type: ignore[no-any-return]


def _on_engine(
    told: Told, engine: str, path: pathlib.Path, calls: Sequence[dict[str, np.ndarray]],
    wanted: Sequence[dict[str, Any] | None], sandbox: bool, judge: _Judge,
) -> None:  # fmt: skip
    judged = True

    def listen(event: Any) -> None:
        if judged and isinstance(event, events.FallbackEvent) and event.stage == "shadow":
            told.findings.append(f"{engine}: differs: {event.error[:300]}")

    undo = events.subscribe(listen)
    try:
        m = _attempt(told, engine, lambda: _module(path, engine, sandbox))
        if m is None:
            told.findings.append(f"{engine}: loads on the host only")
            return
        for call, want in zip(calls, wanted, strict=True):
            before = len(told.findings)
            judged = judge.judges(call, want)
            got = _call(told, engine, m, call)
            if len(told.findings) == before and (got is None) != (want is None):
                told.findings.append(f"{engine}: {'an error' if got is None else 'a result'}, unlike the host")
            elif got is not None and want is not None and len(told.findings) == before:
                told.findings.extend(f"{engine}: {d}" for d in _differences(got, want, judged and judge.is_continuous))
        for c in m.report().clusters:
            told.live[engine] += c["state"] == "live"
            told.rejected[engine] += c["state"] == "rejected"
        m.close()
    finally:
        undo()


def _differences(got: dict[str, Any], want: dict[str, Any], numbers: bool) -> Iterator[str]:
    """Types that differ, and numbers far beyond any bound (the guard's own comparison is the precise one)."""
    for name, w in want.items():
        g = got[name]
        if not isinstance(w, np.ndarray) or not isinstance(g, np.ndarray):
            continue
        if g.dtype != w.dtype or g.shape != w.shape:
            yield f"{name!r} is {g.dtype}{list(g.shape)}, on the host {w.dtype}{list(w.shape)}"
        elif w.dtype.kind in "fV" and w.size and numbers:
            with np.errstate(all="ignore"):
                a, b = (x.astype(np.float64).reshape(-1) for x in (g, w))
                scale = float(np.max(np.abs(b), where=np.isfinite(b), initial=0))
                rough = 0.1 if w.dtype.itemsize < 4 else 0.01
                wrong = np.flatnonzero(~np.isclose(a, b, rtol=rough, atol=rough * scale + 1e-30, equal_nan=True))
            if wrong.size:
                yield f"{name!r} differs: at {wrong[:5]} {a[wrong[:5]]}, on the host {b[wrong[:5]]}"


class _Judge:
    """Whether the results of a model's calls may be compared. is_continuous: roughly, without the guard's knowledge."""

    def __init__(self, path: pathlib.Path) -> None:
        self.is_continuous, self._is_moderate, self._powers, self._exponentials = True, True, False, False
        graphs = [import_model(str(path))]
        while graphs:
            for n in graphs.pop().nodes:
                self.is_continuous &= not (draws_random(n) or is_discontinuous(n))
                self._powers |= n.op_type == "Pow"
                self._exponentials |= n.op_type in ("Exp", "Sinh", "Cosh")
                data = [v.data for v in n.inputs if v is not None and v.data is not None]
                data += [np.array(a) for a in n.attributes.values() if isinstance(a, float)]
                self._is_moderate &= all(map(_is_moderate, data))
                graphs.extend(n.subgraphs)

    def judges(self, call: dict[str, np.ndarray], want: dict[str, Any] | None) -> bool:
        """Whether the numbers of a call are moderate; large powers of integers are not, and not what the host (`want`)
        makes infinite by an exponential: a library that knows log(1 + exp(x)) gives the true value, x."""
        results = [] if want is None else [y for y in want.values() if isinstance(y, np.ndarray)]
        if self._exponentials and all(map(_are_finite, call.values())) and not all(map(_are_finite, results)):
            return False
        if self._powers and any(x.dtype.kind in "iu" and x.size and np.abs(x).max() > 100 for x in call.values()):
            return False
        return self._is_moderate and all(map(_is_moderate, call.values()))


def _are_finite(x: np.ndarray) -> bool:
    return x.dtype.kind not in "fV" or bool(np.isfinite(x.astype(np.float64)).all())


def _is_moderate(x: np.ndarray) -> bool:
    if x.dtype.kind not in "fV":
        return True
    size = np.abs(x.astype(np.float64))
    low, high = _JUDGED
    return bool(((size == 0) | ~np.isfinite(size) | ((size > low) & (size < high))).all())


def _work(pipe: Any, folder: str, seed: int, engines: Sequence[str], log: str, make: MakeCase) -> None:
    """The loop of a worker process."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    while True:
        task, number, sandbox = pipe.recv()
        target = pathlib.Path(folder)
        if task == "replay":
            target = pathlib.Path(number)
        else:
            store(make(task, number, seed, engines), target)
        pipe.send("started")
        pipe.send(examine(target, engines, sandbox))


class _Worker:
    """A worker process, started when it is needed."""

    def __init__(self, folder: pathlib.Path, seed: int, engines: Sequence[str], make: MakeCase = kit_case) -> None:
        self.folder, self._seed, self._engines, self._make = folder, seed, engines, make
        self._process: Any = None
        self._pipe: Any = None
        self._cases = 0
        folder.mkdir(parents=True, exist_ok=True)

    def run(self, task: str, number: Any, sandbox: bool = False) -> Told | str:
        """What came of the case, or how the worker ended."""
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            given = (theirs, str(self.folder / "case"), self._seed, self._engines, str(self.folder / "log"), self._make)
            self._process = context.Process(target=_work, args=given)
            self._process.start()
            theirs.close()
            self._cases = 0
        self._cases += 1
        try:
            self._pipe.send((task, number, sandbox))
            self._pipe.recv()  # once the corpus is made
            if not self._pipe.poll(SECONDS * (2 if sandbox else 1)):
                self.end()
                return "hangs"
            told: Told = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            status = self._process.exitcode
            self.end()
            return f"ends the process with status {status}"
        if self._cases >= _CASES_OF_A_WORKER:
            self.end()
        return told

    def end(self) -> None:
        """Kill the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
        self._process = None


@dataclass
class Sums:
    """What came of all cases. held: cases that ended or hung a worker, but not through the guard's own worker."""

    cases: collections.Counter[str] = field(default_factory=collections.Counter)
    held: list[str] = field(default_factory=list)
    ran: collections.Counter[str] = field(default_factory=collections.Counter)
    live: collections.Counter[str] = field(default_factory=collections.Counter)
    rejected: collections.Counter[str] = field(default_factory=collections.Counter)
    loaded: collections.Counter[str] = field(default_factory=collections.Counter)
    findings: int = 0


def run_all(
    tasks: Sequence[tuple[str, Any]], *, seed: int, engines: Sequence[str], out: pathlib.Path, workers: int = 1,
    make: MakeCase = kit_case, say: Callable[[str], None] = print,
) -> Sums:  # fmt: skip
    """Run the cases: (task, number), or ("replay", the folder of a finding); keep findings in `out`, and say them."""
    sums, waiting, lock = Sums(), collections.deque(tasks), threading.Lock()
    start = time.monotonic()

    def serve(name: str) -> None:
        worker = _Worker(pathlib.Path(scratch, name), seed, engines, make)
        try:
            while True:
                with lock:
                    if not waiting:
                        return
                    task, number = waiting.popleft()
                told = worker.run(task, number)
                ended = told if isinstance(told, str) else ""
                if ended:
                    told = worker.run(task, number, sandbox=True)
                with lock:
                    _note(sums, task, number, told, ended, worker.folder / "case", out, seed, say)
                    done = sum(sums.cases.values())
                    if done % 500 == 0:
                        say(f"# {done} cases, {time.monotonic() - start:.0f} s, {sums.findings} findings")
        finally:
            worker.end()

    with tempfile.TemporaryDirectory() as scratch:
        threads = [threading.Thread(target=serve, args=(f"worker{i}",)) for i in range(workers)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    return sums


def _note(
    sums: Sums, task: str, number: Any, told: Told | str, ended: str, case: pathlib.Path, out: pathlib.Path, seed: int,
    say: Callable[[str], None],
) -> None:  # fmt: skip
    sums.cases[task] += 1
    if isinstance(told, str):
        told = Told(findings=[told])
    elif ended:
        sums.held.append(f"{task} {number} {ended}")
        say(f"{task} {number}: {ended}, not with the sandbox")
    sums.loaded[task] += told.loaded
    sums.ran += told.ran
    sums.live += told.live
    sums.rejected += told.rejected
    if not told.findings:
        return
    sums.findings += 1
    for f in told.findings:
        say(f"{task} {number}: {f}")
    if task != "replay":
        kept = out / f"{task}-{seed}-{number}"
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(case, kept)
        (kept / "findings.txt").write_text("\n".join(told.findings), encoding="utf-8", errors="backslashreplace")

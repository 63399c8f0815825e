"""Reports of jobs: what XRT did in one process, as a line of JSON in a folder or a store that fsspec reaches.

A report has counts, names of models, engines and packages, and speed-ups. It has no inputs, results, weights, error
messages or names of machines and users.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import platform
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from xrt_core.errors import InputError
from xrt_core.events import Event
from xrt_distributed.ending import at_end
from xrt_distributed.jobs import falls_on

FOLDER: Final = "XRT_DISTRIBUTED_REPORTS"
SHARE: Final = "XRT_DISTRIBUTED_REPORTS_SHARE"
ARM: Final = "XRT_DISTRIBUTED_ROLLOUT_ARM"
"""The variable by which `xrt rollout run` says what this job stands for, as JSON: engine, share, acts."""
FORM: Final = "xrt-report-1"
_EVERY_SECONDS: Final = 30.0  # a process that is killed has reported what it did until then
_PACKAGES: Final = (
    "xrt-core", "xrt-xla", "xrt-onnxruntime", "xrt-openvino", "xrt-tensorrt", "xrt-toy", "jax", "onnxruntime",
    "openvino",
)  # fmt: skip
_MOST: Final = 200  # models, speed-ups and ratios of one report
_HUGE: Final = 1e300


@dataclass(slots=True)
class Rolled:
    """What a job did in the rollout of one version of an engine.

    acts: whether the new engine took part. unusable: it should have, and could not be used. compared, different: its
    results against those of the proven engines, worst: the largest error, ratios: time over the proven engines' time.
    """

    engine: str
    version: str
    share: float = 0.0
    of: str = "jobs"
    acts: bool = False
    unusable: int = 0
    compared: int = 0
    different: int = 0
    worst: float = 0.0
    ratios: list[float] = field(default_factory=list)

    def hear(self, name: str, fields: Mapping[str, Any]) -> None:
        """Count an event of this rollout."""
        if name == "rollout.decided":
            self.share, self.of = float(fields["share"]), str(fields["of"])
            self.acts = self.acts or bool(fields["acts"])
        elif name == "rollout.unusable":
            self.unusable += 1
        elif name == "rollout.compared":
            self.compared += 1
            self.different += not fields["is_right"]
            self.worst = max(self.worst, min(float(fields["error"]), _HUGE))  # JSON has no infinity
            if fields.get("proven_seconds") and len(self.ratios) < _MOST:
                self.ratios.append(round(fields["candidate_seconds"] / fields["proven_seconds"], 3))


class Reporter:
    """Gathers the events of this process, and writes its report in the background while it changes, and at the end.

    share: of jobs that report, by a hash of the job's random name. A store that fails is tried again next time.
    """

    def __init__(self, folder: str, share: float = 1.0) -> None:
        import fsspec  # now: while the interpreter ends, when the last report is written, it cannot be imported

        self._open = fsspec.core.url_to_fs
        self.job = uuid.uuid4().hex
        self.is_chosen = falls_on(share, self.job)
        self.failure = ""
        self._folder = folder.rstrip("/")
        self._began = time.time()
        self._engines: dict[str, str] = {}
        self._models: Counter[str] = Counter()
        self._fallbacks: Counter[tuple[str, str, str]] = Counter()
        self._chosen: Counter[str] = Counter()
        self._cache: Counter[str] = Counter()
        self._speedups: list[float] = []
        self._rollouts: dict[tuple[str, str], Rolled] = {}
        self._arm = _arm_of_environment()
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._thread: threading.Thread | None = None

    def hear(self, event: Event) -> None:
        """Count an event."""
        if not self.is_chosen:
            return
        f = event.fields
        with self._lock:
            if event.name == "specialised":
                if f["model"] in self._models or len(self._models) < _MOST:
                    self._models[str(f["model"])] += 1
            elif event.name == "engine.loaded":
                self._engines[str(f["engine"])] = str(f["package"])
            elif event.name == "fallback":
                self._fallbacks[str(f["engine"]), str(f["stage"]), str(f["kind"])] += 1
            elif event.name == "guard.live":
                self._chosen[str(f["chosen"])] += 1
                timings = {n: s for n, s in f.get("timings", {}).items() if n not in ("compile", "verify")}
                host = timings.get("host")
                if host and len(timings) > 1 and len(self._speedups) < _MOST:  # the fastest is what runs
                    self._speedups.append(round(host / min(timings.values()), 3))
            elif event.name.startswith("rollout.") and "engine" in f:
                key = str(f["engine"]), str(f.get("version", ""))
                self._rollouts.setdefault(key, Rolled(*key)).hear(event.name, f)
            elif event.name in ("cache.hit", "cache.miss", "cache.fetched"):
                self._cache[event.name.partition(".")[2]] += 1
            else:
                return
        if self._thread is None:
            self._thread = threading.Thread(target=self._keep_writing, daemon=True, name="xrt-reports")
            self._thread.start()
            at_end(self.write)
            atexit.register(self._write_rest)
        self._changed.set()

    def report(self) -> dict[str, Any]:
        """The report so far."""
        with self._lock:
            return {
                "form": FORM,
                "job": self.job,
                "began": round(self._began, 3),
                "seconds": round(time.time() - self._began, 3),
                "versions": {"python": platform.python_version(), **_versions()},
                "engines": dict(self._engines),
                "models": dict(self._models),
                "chosen": dict(self._chosen),
                "speedups": list(self._speedups),
                "fallbacks": [
                    {"engine": e, "stage": s, "kind": k, "count": n} for (e, s, k), n in self._fallbacks.items()
                ],
                "cache": dict(self._cache),
                "rollouts": [asdict(r) for r in (*self._rollouts.values(), *self._arm)],
            }

    def write(self) -> None:
        """Write the report, in the place of an earlier one."""
        self._changed.clear()
        try:
            fs, root = self._open(self._folder)
            fs.makedirs(root, exist_ok=True)
            fs.pipe_file(f"{root}/{self.job}.jsonl", (json.dumps(self.report()) + "\n").encode())
            self.failure = ""
        except Exception as e:  # reports never matter to who computes
            self.failure = f"{type(e).__name__}: {e}"

    def _write_rest(self) -> None:
        """Write what came while the program ended."""
        if self._changed.is_set():
            self.write()

    def _keep_writing(self) -> None:
        while True:
            time.sleep(_EVERY_SECONDS)
            if self._changed.is_set():
                self.write()


def reporter_from_environment(environ: Mapping[str, str] | None = None) -> Reporter | None:
    """The reporter that the variables ask for, or None; a share that is no number from 0 to 1 counts as 0."""
    environ = os.environ if environ is None else environ
    if not environ.get(FOLDER, "").strip():
        return None
    share = 0.0
    with contextlib.suppress(ValueError):
        share = float(environ.get(SHARE, "1"))
    return Reporter(environ[FOLDER].strip(), share if math.isfinite(share) else 0.0)


def _arm_of_environment() -> list[Rolled]:
    """What `xrt rollout run` said of this process, with the version of the engine that its environment has."""
    try:
        said = json.loads(os.environ[ARM])
        engine = str(said["engine"])
        found = Rolled(engine, "", float(said["share"]), "jobs", bool(said["acts"]))
    except (KeyError, TypeError, ValueError):
        return []
    for package in (engine, f"xrt-{engine}"):  # the library, where it has the engine's name
        with contextlib.suppress(PackageNotFoundError):
            found.version = version(package)
            break
    return [found]


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def lines_of(folder: str) -> Iterator[str]:
    """The lines of all reports of a folder, or a store that fsspec reaches. Raises InputError where there is none."""
    import fsspec

    try:
        fs, root = fsspec.core.url_to_fs(folder)
        names: Sequence[str] = sorted(fs.glob(f"{root.rstrip('/')}/**/*.jsonl"))
    except (ImportError, OSError, ValueError) as e:
        raise InputError(f"{folder}: {e}") from None
    if not names:
        raise InputError(f"{folder} has no reports (*.jsonl)")
    for name in names:
        yield from (line for line in fs.cat_file(name).decode("utf-8", "replace").splitlines() if line.strip())

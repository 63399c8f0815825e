"""BuiltEngine: a serialized engine, what it was built for, and on a machine with a GPU the engine itself."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass
from typing import Any

from xrt_core.engine.onnx_bridge import OnnxModel
from xrt_core.errors import CompileError, ExecutionError
from xrt_tensorrt import _cuda
from xrt_tensorrt._toolkit import Toolkit
from xrt_tensorrt.kernels_cache import KernelsCache
from xrt_tensorrt.settings import Profile, Settings


@dataclass(frozen=True, slots=True)
class Manifest:
    """What an engine was built by and for.

    flavour, version: of the library. targets: compute capabilities ("sm_89"). stripped: the weights are not in it.
    profiles: of each regime, ascending, where the batch is open; else none. inputs, outputs: names of the tensors, in
        order.
    model: the GPU on which full TensorRT built it; engines without hardware compatibility belong to that model alone.
    """

    flavour: str
    version: str
    targets: tuple[str, ...]
    version_compatible: bool
    hardware_compatibility: str
    stripped: bool
    profiles: tuple[Profile, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    model: str = ""

    def to_json(self) -> dict[str, Any]:
        """The fields, as JSON has them."""
        return asdict(self)

    def check(self, toolkit: Toolkit, here: str, model: str, settings: Settings) -> None:
        """Raises CompileError where the engine does not fit this library, or GPU. here, model: its "sm_89" and name, ""
        for none."""
        if self.flavour != toolkit.flavour:
            raise CompileError(f"tensorrt: the engine was built by {self.flavour}; here is {toolkit.flavour}")
        same = self.version == toolkit.version
        if not same and not (self.version_compatible and _at_most(self.version, toolkit.version)):
            raise CompileError(
                f"tensorrt: the engine was built by {self.flavour} {self.version}; here is {toolkit.version} "
                "(version_compatible=True builds engines that later versions take)"
            )
        if self.model and model and self.model != model and self.hardware_compatibility == "none":
            raise CompileError(
                f"tensorrt: the engine was built on {self.model}; here is {model}, and engines of full TensorRT are "
                "specific to the model of the GPU (hardware_compatibility='same_compute_capability' builds others)"
            )
        wanted = [here] if here else list(settings.target)
        missing = [t for t in wanted if not self._runs_on(t)]
        if missing:
            raise CompileError(
                f"tensorrt: the engine was built for {', '.join(self.targets)}"
                f"{self._and_more}; it is wanted for {missing[0]}"
            )

    @property
    def _and_more(self) -> str:
        return "" if self.hardware_compatibility == "none" else f" with compatibility {self.hardware_compatibility}"

    def profile_for(self, batch: int) -> int | None:
        """The number of the profile that holds a batch; None where none does."""
        return next((i for i, (least, _, most) in enumerate(self.profiles) if least <= batch <= most), None)

    def _runs_on(self, target: str) -> bool:
        if target in self.targets:
            return True
        return self.hardware_compatibility == "ampere_plus" and int(target[3:]) >= 80


class BuiltEngine:
    """A serialized engine; safe to use from many threads.

    An engine for any batch up to a size may be replaced by one for larger batches: `generation` then changes, and those
    who made something of the engine make it anew. refit: the model whose weights a stripped engine gets. runtime_cache:
    what TensorRT-RTX compiles when it runs is kept across processes.
    """

    def __init__(
        self,
        toolkit: Toolkit,
        device: int,
        manifest: Manifest,
        blob: bytes | memoryview,
        refit: OnnxModel | None = None,
        *,
        runtime_cache: bool = True,
    ) -> None:
        self.toolkit = toolkit
        self.device = device
        self.manifest = manifest
        self.blob = blob
        self.generation = 0
        self._refit = refit
        self._engine: Any = None
        self._keeps_kernels = runtime_cache and toolkit.is_rtx
        self._kernels: KernelsCache | None = None
        self._lock = threading.Lock()

    @property
    def largest(self) -> int:
        """The largest batch it takes; 0 where the batch is not open."""
        return self.manifest.profiles[-1][2] if self.manifest.profiles else 0

    def load(self) -> Any:
        """The `ICudaEngine`, made once. Raises ExecutionError without a GPU, CompileError where it does not load."""
        with self._lock:
            return self._loaded()

    def current(self) -> tuple[int, Any, KernelsCache | None]:
        """Generation, `ICudaEngine`, and the cache of its compiled kernels where that is kept. Raises as `load`."""
        with self._lock:
            return self.generation, self._loaded(), self._kernels

    def replace(self, other: BuiltEngine) -> None:
        """Take the place of another engine for the same function, for larger batches.

        Where the other one does not load on this machine nothing changes, and its CompileError is raised."""
        fresh = other.load() if self._engine is not None else None
        with self._lock:
            self.manifest, self.blob, self._refit = other.manifest, other.blob, other._refit
            self._engine, self._kernels = fresh, other._kernels
            self.generation += 1

    def _loaded(self) -> Any:
        if self._engine is None:
            why = _cuda.why_unusable()
            if why:
                built = ", ".join(self.manifest.targets)
                raise ExecutionError(f"tensorrt: the engine was built for {built} and cannot run here: {why}")
            with _cuda.on(self.device):
                engine = self.toolkit.deserialize(self.blob)
                if self.manifest.stripped:
                    if self._refit is None:
                        why = "the engine was stripped of its weights, and has no model to get them"
                        raise CompileError(f"tensorrt: {why}")
                    self.toolkit.refit(engine, self._refit)
            self._kernels = KernelsCache(self.blob) if self._keeps_kernels else None
            self._engine = engine
        return self._engine


def _at_most(version: str, other: str) -> bool:
    """Whether an engine of `version` that is version-compatible loads in `other`: same major version, not newer."""
    mine, theirs = ([int(n) for n in v.split(".")] for v in (version, other))
    return mine[0] == theirs[0] and mine <= theirs

"""The TensorRT engine: builds clusters into engines for NVIDIA GPUs, with TensorRT or TensorRT-RTX."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from xrt_core import hookimpl
from xrt_core.engine.contract import CompileOptions, Engine, EngineStatus, Phase, Support, Tolerance
from xrt_core.errors import EngineUnavailableError
from xrt_core.ir.graph import Node

if TYPE_CHECKING:
    from xrt_tensorrt.compiler import TensorRTCompiler

__all__ = ["TensorRTEngine"]
__version__ = "0.1.0"


class TensorRTEngine(Engine):
    """TensorRT as an engine. Importing and constructing it imports neither TensorRT nor CUDA.

    Running needs an NVIDIA GPU. Without one, TensorRT-RTX still builds for GPUs that are named as a target
    (`xrt compile --engine tensorrt --target sm_89`), and `supports` answers.
    """

    name = "tensorrt"
    devices = ("cuda",)
    priority: ClassVar[Mapping[Phase, int]] = MappingProxyType({"train": 50, "inference": 100})
    switch = "use_tensorrt"
    array_families = ("cupy", "torch", "jax", "other")
    asynchronous = True
    open_shapes = "results"

    def __init__(self, target: str = "") -> None:
        self._target = target

    def probe(self) -> EngineStatus:
        """The library's version and the GPUs that it can use, or why there is none."""
        if self._target:
            return EngineStatus(True, _version(), ("cuda:0",))
        return _probe()

    def targeting(self, target: str) -> TensorRTEngine:
        """The engine that builds for a compute capability ("sm_89") of which no GPU is here; nothing it builds runs.

        Raises EngineUnavailableError where the library is missing, or does not build for it.
        """
        from xrt_tensorrt import _toolkit
        from xrt_tensorrt.settings import Settings, check_target, read_target

        toolkit = _toolkit.toolkit()
        check_target(Settings(target=read_target(target)), toolkit.targets, toolkit.flavour)
        return TensorRTEngine(target)

    def supports(self, node: Node, device: str, phase: Phase) -> Support:
        """Whether TensorRT's parser takes `node`, or what it says instead; asked once per kind of node."""
        missing = _missing()
        if missing is not None:
            return Support.no(missing.reason)
        from xrt_tensorrt.support import has_open_shapes, takes_for_training, verdict

        if has_open_shapes(node) and (why := _why_not_open()):
            return Support.no(why)
        if phase == "train" and not takes_for_training(node):
            return Support.no(f"tensorrt does not take {node.operator} for training")
        reason = verdict(node).reason or self._beyond(node, device)
        return Support.no(reason) if reason else Support.yes()

    def _beyond(self, node: Node, device: str) -> str:
        """Why the target's GPU, or the device, does not run a node that others do."""
        from xrt_tensorrt import _cuda, _toolkit
        from xrt_tensorrt.deviations import beyond

        name = self._target.removeprefix("sm_")
        where = (int(name[:-1]), int(name[-1])) if name else _cuda.capability(int(device.partition(":")[2] or 0))
        return "" if where is None else beyond(node, where, is_rtx=_toolkit.toolkit().is_rtx)

    def compiler(self, device: str, options: CompileOptions) -> TensorRTCompiler:
        """A compiler for "cuda", "cuda:1", ... Raises EngineUnavailableError where nothing can be built for it: there
        is no such GPU and the options name no target, or the library is missing or does not build for it."""
        kind, _, index = device.partition(":")
        if kind != "cuda" or not (index or "0").isdigit():
            raise EngineUnavailableError(
                f"tensorrt: no device {device!r}; this engine drives cuda, cuda:0, cuda:1, ..."
            )
        from xrt_tensorrt import _toolkit
        from xrt_tensorrt.compiler import TensorRTCompiler

        return TensorRTCompiler(_toolkit.toolkit(), int(index or 0), options, self._target)

    def tolerance_with(self, options: CompileOptions) -> Mapping[str, Tolerance]:
        """That of TF32 where it is asked for. Raises OptionError for options that the engine does not take."""
        from xrt_tensorrt.settings import Settings, tolerance_of

        return tolerance_of(Settings.of(options))

    def fingerprint(self, device: str) -> str:
        """Versions of this package and of the library, the GPU's compute capability; of full TensorRT its model."""
        from xrt_tensorrt import _cuda, _toolkit

        index = int(device.partition(":")[2] or 0)
        found = _cuda.capability(index)
        where = self._target or ("sm_{}{}".format(*found) if found else "no GPU")
        toolkit = _toolkit.toolkit()
        if found and not self._target and not toolkit.is_rtx:  # "specific to the exact GPU model they were built on"
            where = f"{where} {_cuda.model(index)}"
        return f"xrt-tensorrt {__version__} {toolkit.flavour} {toolkit.version} {where}"

    def prepare(self) -> None:
        """Load the library now."""
        if _probe().available:
            importlib.import_module("xrt_tensorrt.compiler")
            importlib.import_module("xrt_tensorrt.support")


@hookimpl
def xrt_engines() -> list[type[Engine]]:
    """The engine of this package."""
    return [TensorRTEngine]


@functools.cache
def _missing() -> EngineStatus | None:
    """Why the library itself cannot be used, None where it can."""
    try:
        from xrt_tensorrt import _toolkit

        _toolkit.toolkit()
    except EngineUnavailableError as e:
        return EngineStatus(False, reason=getattr(e, "reason", str(e)), remedy=getattr(e, "remedy", ""))
    except Exception as e:  # a broken installation raises what it likes
        return EngineStatus(False, reason=f"TensorRT does not load: {type(e).__name__}: {e}", remedy="install it anew")
    return None


def _version() -> str:
    from xrt_tensorrt import _toolkit

    toolkit = _toolkit.toolkit()
    return f"{toolkit.flavour} {toolkit.version}"


def _why_not_open() -> str:
    """Why no results are taken whose shapes depend on data, "" where they are."""
    from xrt_tensorrt import _toolkit

    toolkit = _toolkit.toolkit()
    if not toolkit.is_rtx:
        return ""
    return (
        f"the result's shape depends on data, and {toolkit.flavour} {toolkit.version} has no implementation of such "
        "layers (NonZero, NMS)"
    )


@functools.cache
def _probe() -> EngineStatus:
    from xrt_tensorrt import _cuda, _toolkit, finding

    why = _cuda.why_unusable()
    if why:  # without a GPU the library, which takes 0.2 s and 250 MB to load, is left alone
        if (missing := finding.why_not_installed()) is not None:
            return EngineStatus(False, reason=missing.reason, remedy=missing.remedy)
        cure = "run it where there is an NVIDIA GPU; TensorRT-RTX builds here for one (xrt compile --target sm_89)"
        return EngineStatus(False, reason=why, remedy=cure)
    missing_here = _missing()
    if missing_here is not None:
        return missing_here
    toolkit = _toolkit.toolkit()
    version = _version()
    usable, refused = [], ""
    for i in range(_cuda.count()):
        reason = toolkit.why_not_for(_cuda.capability(i))
        if reason:
            refused = reason
        else:
            usable.append(f"cuda:{i}")
    if not usable:
        return EngineStatus(False, version, reason=refused, remedy=toolkit.remedy_for_other_gpus)
    return EngineStatus(True, version, tuple(usable))

"""How an engine is built: the engine's own options, read once and checked, and the builder's configuration of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from xrt_core.engine.contract import CompileOptions, Tolerance
from xrt_core.errors import EngineUnavailableError, OptionError, nearest

LEVELS: Final = range(6)
COMPATIBILITY: Final = ("none", "ampere_plus", "same_compute_capability")

Profile = tuple[int, int, int]
"""The least, the usual and the largest batch of a regime."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Options of a build.

    target: compute capabilities to build for ("sm_89"); none: that of the device. workspace: bytes of scratch memory.
    max_batch: the largest batch of a dynamic one, None for engines of static shapes. opt_batch: the batch to tune for.
    profiles: least, usual and largest batch of each regime that is tuned for by itself, ascending; none for one regime.
    optimization_level: 0 to 5, None for the library's. tf32: whether float32 may be multiplied in TF32,
        whose factors have 10 bits: the guard holds results of float32 to more.
    strict_nans: NaN and infinities are kept where optimisations would lose them.
    version_compatible: later versions of the library load the engine. hardware_compatibility: one of COMPATIBILITY.
    strip_weights: the engine is kept without its weights, and gets them from the model when it is loaded.
    refit: weights can be exchanged: functions that differ in large float constants alone share an engine, which is kept
        without its weights (strip_weights).
    timing_cache: tactics that were timed are kept across builds. cuda_graph: runs are recorded once and replayed.
    runtime_cache: kernels that TensorRT-RTX compiled for this GPU are kept across processes.
    """

    target: tuple[str, ...] = ()
    workspace: int | None = None
    max_batch: int | None = None
    opt_batch: int | None = None
    profiles: tuple[Profile, ...] = ()
    optimization_level: int | None = None
    tf32: bool = False
    strict_nans: bool = False
    version_compatible: bool = False
    hardware_compatibility: str = "none"
    strip_weights: bool = False
    refit: bool = False
    timing_cache: bool = True
    cuda_graph: bool = False
    runtime_cache: bool = True

    @classmethod
    def of(cls, options: CompileOptions, target: str = "") -> Settings:
        """The settings that compile options mean. Raises OptionError for an unknown option or a bad value."""
        extra = dict(options.extra)
        unknown = sorted(set(extra) - set(_READERS))
        if unknown:
            hint = nearest(unknown[0], _READERS)
            raise OptionError(f"tensorrt: unknown option {unknown[0]!r}; it takes {', '.join(sorted(_READERS))}{hint}")
        read: dict[str, Any] = {name: _READERS[name](name, value) for name, value in extra.items() if value is not None}
        if read.get("refit"):
            read["strip_weights"] = True
        if not options.fused:
            read["optimization_level"] = 0
        profiles, most = read.get("profiles", ()), options.max_batch_size
        if profiles:
            if "opt_batch" in read:
                raise OptionError("tensorrt: options 'profiles' and 'opt_batch' both say what to tune for; give one")
            if most not in (None, profiles[-1][2]):
                raise OptionError(
                    f"tensorrt: 'profiles' ends at batch {profiles[-1][2]}, max_batch_size is {most}; leave one out"
                )
            most = profiles[-1][2]
        return cls(
            read_target(target) if target else (),
            workspace=options.workspace_bytes,
            max_batch=most,
            **read,
        )


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"tensorrt: option {name!r} is {value!r}; it takes True or False")
    return value


def _level(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value not in LEVELS:
        raise OptionError(f"tensorrt: option {name!r} is {value!r}; it takes an integer from 0 to 5")
    return value


def _batch(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(f"tensorrt: option {name!r} is {value!r}; it takes a positive integer")
    return value


def _profiles(name: str, value: Any) -> tuple[Profile, ...]:
    wanted = "it takes the least, usual and largest batch of each regime, ascending, as in [[1, 1, 1], [2, 8, 32]]"
    try:
        rows = [tuple(row) for row in value]
    except TypeError:
        raise OptionError(f"tensorrt: option {name!r} is {value!r}; {wanted}") from None
    numbers = [n for row in rows for n in row]
    if not rows or any(len(row) != 3 for row in rows) or any(type(n) is not int for n in numbers):
        raise OptionError(f"tensorrt: option {name!r} is {value!r}; {wanted}")
    before = 0
    for least, usual, largest in rows:
        if not before < least <= usual <= largest:
            raise OptionError(f"tensorrt: option {name!r}: {[least, usual, largest]} after batch {before}; {wanted}")
        before = largest
    return tuple(rows)


def _compatibility(name: str, value: Any) -> str:
    if value not in COMPATIBILITY:
        raise OptionError(f"tensorrt: option {name!r} is {value!r}; it takes {', '.join(COMPATIBILITY)}")
    return str(value)


def read_target(text: str) -> tuple[str, ...]:
    """The compute capability that a target names. Raises OptionError for what names none."""
    if not (text.startswith("sm_") and text[3:].isdigit()):
        raise OptionError(f"tensorrt: the target is {text!r}; it takes a compute capability such as 'sm_89'")
    return (text,)


_READERS: Final[Mapping[str, Callable[[str, Any], Any]]] = {
    "opt_batch": _batch,
    "profiles": _profiles,
    "optimization_level": _level,
    "tf32": _flag,
    "strict_nans": _flag,
    "version_compatible": _flag,
    "hardware_compatibility": _compatibility,
    "strip_weights": _flag,
    "refit": _flag,
    "timing_cache": _flag,
    "cuda_graph": _flag,
    "runtime_cache": _flag,
}


_TF32: Final = Tolerance(2e-3, 5e-4, reason="factors are rounded to the 10 bits of TF32 (tf32=True)")
"""A rounding is off by 2**-11 = 4.9e-4 of a factor; of a product's two, as they are sums, this is of the largest."""


_FLOAT16: Final = Tolerance(
    1.4e-3, 2e-2, reason="TensorRT may keep sums of float16 products in float16", accumulates="float16"
)
"""Networks are strongly typed, and TensorRT promises sums in float32 only where a network casts (Developer Guide). The
numbers are those of XRT's table; bfloat16 is summed in float32."""


def tolerance_of(settings: Settings) -> Mapping[str, Tolerance]:
    """What an executable's results may be off by with these settings, beside the table of XRT."""
    return {"float16": _FLOAT16, **({"float32": _TF32} if settings.tf32 else {})}


def check_target(settings: Settings, targets: tuple[str, ...], flavour: str) -> None:
    """Raises EngineUnavailableError for a target that the library does not build for."""
    if not settings.target:
        return
    if not targets:
        raise EngineUnavailableError(
            f"tensorrt: {flavour} builds for the GPU of this machine only; leave target={settings.target[0]!r} out, or "
            "use TensorRT-RTX"
        )
    for name in settings.target:
        if name not in targets:
            raise EngineUnavailableError(
                f"tensorrt: {flavour} does not build for {name}; it builds for {', '.join(targets)}"
            )

"""What `xrt doctor` says of CUDA: driver and libraries with their versions, what does not fit, and what to install."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from xrt_core.engine import cuda

Version = Callable[[str], str]
"""Name of a distribution -> its version, "" where it is not installed."""


class _Library(NamedTuple):
    """A library that is built for one major version of CUDA. name: of the distribution, extra: that brings it, with
    the version in the place of {}."""

    what: str
    name: str
    extra: str


_CUPY: Final = _Library("CuPy", "cupy-cuda{}x", "xrt-core[cuda{}]")
_JAX: Final = _Library("JAX's plugin", "jax-cuda{}-plugin", "xrt-xla[cuda{}]")
_LIBRARIES: Final = (
    _CUPY,
    _JAX,
    _Library("TensorRT-RTX", "tensorrt-rtx-cu{}-bindings", "xrt-tensorrt[rtx-cu{}]"),
    _Library("TensorRT-RTX's libraries", "onnxruntime-ep-nv-tensorrt-rtx-cu{}", "xrt-tensorrt[rtx-cu{}]"),
    _Library("TensorRT", "tensorrt-cu{}-bindings", "xrt-tensorrt[cu{}]"),
)
_MAJORS: Final = (13, 12)
_BINDINGS: Final = "cuda-bindings"
_ONE_FOLDER: Final = ("onnxruntime", "onnxruntime-gpu")


def lines(version: Version) -> Iterator[tuple[str, str]]:
    """Rows (what, version) of the driver, and of what is installed for CUDA."""
    found = cuda.driver()
    yield "driver", "none" if found is None else f"{found[0]}, for CUDA up to {found[1][0]}.{found[1][1]}"
    builds = (library.name.format(major) for library in _LIBRARIES for major in _MAJORS)
    for name in (*builds, "numba-cuda", _BINDINGS, _ONE_FOLDER[1]):
        if version(name):
            yield name, version(name)


def problems(version: Version) -> Iterator[tuple[str, str]]:
    """Pairs (problem, remedy): packages that exclude one another, and on a machine with a GPU what it lacks."""
    yield from _excluding(version)
    found = cuda.driver()
    if found is not None and cuda.count():
        yield from _beside(version, *found)


def _builds(library: _Library, version: Version) -> dict[int, str]:
    """The distributions of a library that are installed, by the version of CUDA."""
    return {major: name for major in _MAJORS if version(name := library.name.format(major))}


def _excluding(version: Version) -> Iterator[tuple[str, str]]:
    """Installed packages of which one makes another useless, whatever the machine has."""
    if all(map(version, _ONE_FOLDER)):
        yield (
            f"{' and '.join(f'{name} {version(name)}' for name in _ONE_FOLDER)} are installed into one folder: what is "
            "imported is the one that was installed last",
            f"pip uninstall {' '.join(_ONE_FOLDER)}, then pip install the one that is wanted",
        )
    for library in _LIBRARIES:
        builds = _builds(library, version)
        if len(builds) > 1:
            one = library.extra.format(_MAJORS[0])
            yield (
                f"two builds of {library.what} are installed: {' and '.join(builds.values())} exclude each other",
                f"pip uninstall {' '.join(builds.values())}, then pip install one of them ('{one}')",
            )
    jaxlib = version("jaxlib")
    for major, plugin in _builds(_JAX, version).items():
        if jaxlib and _numbers(version(plugin)) != _numbers(jaxlib):  # JAX asks for the same version, to the last digit
            yield (
                f"{plugin} {version(plugin)} does not fit jaxlib {jaxlib}, so JAX leaves the GPU out",
                f"pip install -U 'jax[cuda{major}]'",
            )


def _numbers(version: str) -> str:
    found = re.match(r"\d+(\.\d+)*", version)
    return found[0] if found else version


def _beside(version: Version, driver: str, newest: tuple[int, int]) -> Iterator[tuple[str, str]]:
    """What does not fit the driver, and what is missing, where there is a GPU. newest: the CUDA it runs."""
    limit = f"{driver} is for CUDA up to {newest[0]}.{newest[1]}"
    fits = 13 if newest[0] >= 13 else 12
    cupy, plugin = _builds(_CUPY, version), _builds(_JAX, version)
    if not cupy:
        yield (
            "there is a GPU, and CuPy is not installed: beside engines on it the host computes on the CPU, and "
            "engine='host', device='cuda' is an error",
            f"pip install '{_CUPY.extra.format(fits)}'",
        )
    if version("jax") and not plugin:
        yield "there is a GPU, and JAX has no plugin for it: it uses the CPU", f"pip install 'jax[cuda{fits}]'"
    for library in _LIBRARIES:
        for major, name in _builds(library, version).items():
            if major > newest[0]:
                yield (
                    f"{name} needs a driver for CUDA {major}, and {limit}",
                    f"upgrade the driver, or pip uninstall {name} and pip install '{library.extra.format(fits)}'",
                )
    bindings = version(_BINDINGS)
    major = int(bindings.partition(".")[0]) if bindings[:1].isdigit() else 0
    built = next(iter(cupy), 0)
    if major > newest[0]:
        yield (
            f"{_BINDINGS} {bindings} needs a driver for CUDA {major}, and {limit}: engines that use it fail",
            f"upgrade the driver, or pip install '{_BINDINGS}<{newest[0] + 1}' with engines' cu{newest[0]} extras",
        )
    elif major and built and built != major:
        yield (
            f"{cupy[built]} is built for CUDA {built}, and {_BINDINGS} {bindings} for CUDA {major}: two CUDA runtimes "
            "in one process",
            f"pip install builds for one of them: '{_CUPY.extra.format(major)}', or '{_BINDINGS}=={built}.*' with "
            f"engines' cu{built} extras",
        )
    if any(n <= newest[0] for n in cupy) and (why := cuda.why_no_cupy()):
        yield f"the host cannot use the GPU: {why}", f"pip install --force-reinstall {next(iter(cupy.values()))}"

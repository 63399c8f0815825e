"""What `xrt doctor` says of CUDA: driver and libraries with their versions, what does not fit, and what to install."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from xrt_core.engine import cuda
from xrt_core.plugins.discovery import requirement_name

Version = Callable[[str], str]
"""Name of a distribution -> its version, "" where it is not installed."""


class Library(NamedTuple):
    """A library with a distribution for each major version of CUDA. name: of the distributions; extra: that brings
    them; with the version in the place of {}."""

    name: str
    extra: str


_CUPY: Final = Library("cupy-cuda{}x", "xrt-core[cuda{}]")
_JAX: Final = Library("jax-cuda{}-plugin", "jax[cuda{}]")
_MAJORS: Final = (13, 12)
_BINDINGS: Final = "cuda-bindings"
_ONE_FOLDER: Final = ("onnxruntime", "onnxruntime-gpu")


def libraries(requirements: Iterable[tuple[str, str]] = ()) -> tuple[Library, ...]:
    """CuPy, JAX's plugin, and what extras of packages bring for one version of CUDA.

    requirements: (package, a line of its metadata, such as "cupy-cuda13x>=14; extra == 'cuda13'").
    """
    found = {_CUPY.name: _CUPY, _JAX.name: _JAX}
    for package, line in requirements:
        name = requirement_name(line)
        major, extra = re.search(r"cu(?:da)?(1[23])", name), re.search(r"extra\s*==\s*['\"]([\w-]+)", line)
        if major and extra:
            pattern = name.replace(major[1], "{}")
            found.setdefault(pattern, Library(pattern, f"{package}[{extra[1].replace(major[1], '{}')}]"))
    return tuple(found.values())


def lines(version: Version, known: Sequence[Library]) -> Iterator[tuple[str, str]]:
    """Rows (what, version) of the driver, and of what is installed for CUDA."""
    found = cuda.driver()
    yield "driver", "none" if found is None else f"{found[0]}, for CUDA up to {found[1][0]}.{found[1][1]}"
    builds = (library.name.format(major) for library in known for major in _MAJORS)
    for name in (*builds, "numba-cuda", _BINDINGS, _ONE_FOLDER[1]):
        if version(name):
            yield name, version(name)


def problems(version: Version, known: Sequence[Library]) -> Iterator[tuple[str, str]]:
    """Pairs (problem, remedy): packages that exclude one another, and on a machine with a GPU what it lacks.

    known: what `libraries` gives.
    """
    yield from _excluding(version, known)
    found = cuda.driver()
    if found is not None and cuda.count():
        yield from _beside(version, known, *found)


def _builds(library: Library, version: Version) -> dict[int, str]:
    """The distributions of a library that are installed, by the version of CUDA."""
    return {major: name for major in _MAJORS if version(name := library.name.format(major))}


def _excluding(version: Version, known: Sequence[Library]) -> Iterator[tuple[str, str]]:
    """Installed packages of which one makes another useless, whatever the machine has."""
    if all(map(version, _ONE_FOLDER)):
        yield (
            f"{' and '.join(f'{name} {version(name)}' for name in _ONE_FOLDER)} are installed into one folder: what is "
            "imported is the one that was installed last",
            f"pip uninstall {' '.join(_ONE_FOLDER)}, then pip install the one that is wanted",
        )
    for library in known:
        builds = _builds(library, version)
        if len(builds) > 1:
            one = library.extra.format(_MAJORS[0])
            yield (
                f"two builds of one library are installed: {' and '.join(builds.values())} exclude each other",
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


def _beside(
    version: Version, known: Sequence[Library], driver: str, newest: tuple[int, int]
) -> Iterator[tuple[str, str]]:
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
    for library in known:
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

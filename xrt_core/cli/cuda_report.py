"""What `xrt doctor` says of CUDA: driver and libraries with their versions, what does not fit, and what to install."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from xrt_core.engine import cuda

Version = Callable[[str], str]
"""Name of a distribution -> its version, "" where it is not installed."""

_CUPY: Final = {"cupy-cuda13x": 13, "cupy-cuda12x": 12}
_JAX: Final = {"jax-cuda13-plugin": 13, "jax-cuda12-plugin": 12}
_BINDINGS: Final = "cuda-bindings"
_ONE_FOLDER: Final = ("onnxruntime", "onnxruntime-gpu")


def lines(version: Version) -> Iterator[tuple[str, str]]:
    """Rows (what, version) of the driver, and of what is installed for CUDA."""
    found = cuda.driver()
    yield "driver", "none" if found is None else f"{found[0]}, for CUDA up to {found[1][0]}.{found[1][1]}"
    for name in (*_CUPY, *_JAX, "numba-cuda", _BINDINGS, _ONE_FOLDER[1]):
        if version(name):
            yield name, version(name)


def problems(version: Version) -> Iterator[tuple[str, str]]:
    """Pairs (problem, remedy): packages that exclude one another, and on a machine with a GPU what it lacks."""
    if all(map(version, _ONE_FOLDER)):
        yield (
            f"{' and '.join(f'{name} {version(name)}' for name in _ONE_FOLDER)} are installed into one folder: what is "
            "imported is the one that was installed last",
            f"pip uninstall {' '.join(_ONE_FOLDER)}, then pip install the one that is wanted",
        )
    if all(map(version, _CUPY)):
        yield "two builds of CuPy are installed into one folder", "pip uninstall cupy-cuda12x cupy-cuda13x, install one"
    plugin = next((name for name in _JAX if version(name)), "")
    jaxlib = version("jaxlib")
    if plugin and jaxlib and version(plugin).split(".")[:2] != jaxlib.split(".")[:2]:
        yield (
            f"{plugin} {version(plugin)} does not fit jaxlib {jaxlib}, so JAX leaves the GPU out",
            f"pip install -U 'jax[cuda{_JAX[plugin]}]'",
        )
    found = cuda.driver()
    if found is None or not cuda.count():
        return
    newest = found[1][0]
    fits = 13 if newest >= 13 else 12
    cupy = next((name for name in _CUPY if version(name)), "")
    if not cupy:
        wanted = "'xrt-core[cuda13]'" if fits == 13 else "cupy-cuda12x"
        yield (
            "there is a GPU, and CuPy is not installed: beside engines on it the host computes on the CPU, and "
            "engine='host', device='cuda' is an error",
            f"pip install {wanted}",
        )
    for name, needs in ((cupy, _CUPY.get(cupy, 0)), (plugin, _JAX.get(plugin, 0))):
        if needs > newest:
            yield (
                f"{name} needs a driver for CUDA {needs}, and {found[0]} is for CUDA up to {newest}.{found[1][1]}",
                f"upgrade the driver, or install {name.replace('13', '12')} instead",
            )
    bindings = version(_BINDINGS)
    major = int(bindings.partition(".")[0]) if bindings[:1].isdigit() else 0
    if major > newest:
        yield (
            f"{_BINDINGS} {bindings} needs a driver for CUDA {major}, and {found[0]} is for CUDA up to "
            f"{newest}.{found[1][1]}: engines that use it fail",
            f"upgrade the driver, or pip install '{_BINDINGS}<{newest + 1}' with the cu{newest} builds of engines",
        )
    elif cupy and major and _CUPY[cupy] != major:
        yield (
            f"{cupy} is built for CUDA {_CUPY[cupy]}, and {_BINDINGS} {bindings} for CUDA {major}: two CUDA runtimes "
            " in one process",
            f"pip install builds for one of them: {cupy.replace(str(_CUPY[cupy]), str(major))}, or "
            f"'{_BINDINGS}=={_CUPY[cupy]}.*' with the cu{_CUPY[cupy]} extras of engines",
        )
    if cupy and _CUPY[cupy] <= newest and (why := cuda.why_no_cupy()):
        yield f"the host cannot use the GPU: {why}", f"pip install --force-reinstall {cupy}"
    if version("jax") and not plugin:
        yield "there is a GPU, and JAX has no plugin for it: it uses the CPU", f"pip install 'jax[cuda{fits}]'"

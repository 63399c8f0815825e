"""Finds TensorRT or TensorRT-RTX: bindings, libraries, whether they fit, and which of the two is used."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from xrt_core.errors import EngineUnavailableError

RTX: Final = "TensorRT-RTX"
FULL: Final = "TensorRT"
CHOICE: Final = "XRT_TENSORRT"
"""Environment variable that names the flavour to use where both are installed: "tensorrt" or "tensorrt_rtx"."""

INSTALL: Final[Mapping[str, str]] = {
    RTX: "pip install 'xrt-tensorrt[rtx-cu13]' (with a driver for CUDA 12: [rtx-cu12])",
    FULL: "pip install 'xrt-tensorrt[cu13]' (with a driver for CUDA 12: [cu12])",
}
_BINDINGS: Final[Mapping[str, tuple[str, ...]]] = {
    RTX: ("tensorrt_rtx_bindings", "tensorrt_rtx"),
    FULL: ("tensorrt",),
}
_LIBRARIES: Final[Mapping[str, tuple[str, ...]]] = {  # in the order in which they need each other
    RTX: ("libtensorrt_rtx.so", "libtensorrt_onnxparser_rtx.so"),
    FULL: ("libnvinfer.so", "libnvonnxparser.so"),
}
_PACKAGES: Final[Mapping[str, tuple[str, ...]]] = {  # that carry the libraries in their folder
    RTX: ("tensorrt_rtx_libs", "onnxruntime_ep_nv_tensorrt_rtx"),
    FULL: ("tensorrt_libs",),
}
_DATA_CENTRE: Final = frozenset(((8, 0), (9, 0), (10, 0), (10, 3)))


class ToolkitError(EngineUnavailableError):
    """TensorRT cannot be used. reason: what is missing; remedy: what brings it."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"tensorrt cannot be used: {reason}; {remedy}")
        self.reason = reason
        self.remedy = remedy


@dataclass(frozen=True)
class System:
    """What finding looks at; tests give stand-ins."""

    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    import_module: Callable[[str], Any] = importlib.import_module
    load_library: Callable[[str], Any] = lambda path: ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
    folder_of: Callable[[str], pathlib.Path | None] = lambda package: _folder_of(package)


def find(flavour: str, system: System) -> Any:
    """The bindings module of a flavour, its libraries loaded. Raises ToolkitError with what is missing or does not fit.

    Libraries are looked for in packages that carry them, in `$TENSORRT_HOME` (itself, lib, lib64), and where the system
    finds them.
    """
    name = next((n for n in _BINDINGS[flavour] if system.folder_of(n) is not None), None)
    if name is None:
        raise ToolkitError(f"{flavour} is not installed (no module {_BINDINGS[flavour][0]})", INSTALL[flavour])
    tried = _load_libraries(flavour, system)
    try:
        module = system.import_module(name)
    except Exception as e:  # a loader error comes as ImportError, a broken installation as anything
        why = str(e).strip().partition("\n")[0]
        if tried:
            raise ToolkitError(f"the libraries of {flavour} do not load: {'; '.join(tried)}", INSTALL[flavour]) from e
        raise ToolkitError(f"{name} does not import: {type(e).__name__}: {why}", INSTALL[flavour]) from e
    _check_versions(flavour, module, system)
    return module


def _load_libraries(flavour: str, system: System) -> list[str]:
    """Load the libraries, so that the bindings find them. Returns a sentence for each that is not found anywhere."""
    folders = [f for p in _PACKAGES[flavour] if (f := system.folder_of(p)) is not None]
    home = system.environ.get("TENSORRT_HOME", "")
    if home:
        folders = [pathlib.Path(home, part) for part in ("lib", "lib64", "")] + folders
    failed = []
    for library in _LIBRARIES[flavour]:
        trouble = f"{library} is in none of {', '.join(map(str, folders)) or 'the known packages'} nor on the system"
        for path in [*_files(library, folders), library]:
            try:
                system.load_library(str(path))
                trouble = ""
                break
            except OSError as e:
                if path != library:
                    trouble = f"{path}: {e}"
        if trouble:
            failed.append(trouble)
    return failed


def _files(library: str, folders: Sequence[pathlib.Path]) -> Iterator[pathlib.Path]:
    """Files of a library, the newest version in a folder first."""
    for folder in folders:
        found = [p for p in folder.glob(f"{library}*") if re.fullmatch(r"(\.\d+)*", p.name[len(library) :])]
        yield from sorted(found, key=lambda p: [int(n) for n in re.findall(r"\d+", p.name)], reverse=True)


def _check_versions(flavour: str, module: Any, system: System) -> None:
    """Raises ToolkitError where bindings and library are of different minor versions, whose classes differ."""
    bindings = str(module.__version__)
    found = _library_version(flavour, system)
    if found and tuple(map(int, bindings.split(".")[:2])) != tuple(map(int, found.split(".")[:2])):
        raise ToolkitError(
            f"the bindings {module.__name__} are {bindings}, the library of {flavour} that was loaded is {found}",
            f"make the two fit: {INSTALL[flavour]}",
        )


def _library_version(flavour: str, system: System) -> str:
    """Version of the loaded library, "" where it cannot be asked."""
    folders = [f for p in _PACKAGES[flavour] if (f := system.folder_of(p)) is not None]
    for path in [*_files(_LIBRARIES[flavour][0], folders), _LIBRARIES[flavour][0]]:
        try:
            number = int(system.load_library(str(path)).getInferLibVersion())
        except (OSError, AttributeError, TypeError, ValueError):
            continue
        return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    return ""


def _folder_of(package: str) -> pathlib.Path | None:
    """The folder of an installed package, without importing it."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    places = list(spec.submodule_search_locations or ()) if spec else []
    return pathlib.Path(places[0]) if places else None


def order(choice: str, capability: tuple[int, int] | None) -> tuple[str, ...]:
    """The flavours in the order to try them: as `choice` names, else full TensorRT first on data-centre GPUs.

    Without a GPU TensorRT-RTX comes first, for it builds there, which full TensorRT does not.
    Raises ToolkitError for a choice that is neither.
    """
    named = {"": None, "tensorrt": FULL, "tensorrt_rtx": RTX}
    if choice not in named:
        raise ToolkitError(f"{CHOICE} is {choice!r}", "set it to tensorrt or tensorrt_rtx, or not at all")
    found = named[choice]
    if found is not None:
        return (found,)
    return (FULL, RTX) if capability in _DATA_CENTRE else (RTX, FULL)


def why_not_installed(system: System | None = None) -> ToolkitError | None:
    """Why no flavour can be had at all, None where bindings of one are installed; loads nothing."""
    folder_of = (system or System()).folder_of
    if any(folder_of(name) is not None for names in _BINDINGS.values() for name in names):
        return None
    return ToolkitError("neither TensorRT-RTX nor TensorRT is installed", INSTALL[RTX])

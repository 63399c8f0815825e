"""Scope: who gets the shim for `import onnxruntime`, and who the genuine library.

The program gets the shim: a module of that name in `sys.modules`. The library's own submodules (tools, quantization,
transformers, training) and the packages of XRT get the library: their modules are executed with an `__import__` of
their own, which is all that differs in them.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib.abc
import importlib.util
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Final

from xrt_ort.genuine import library

NAME: Final = "onnxruntime"
_COLLECTION: Final = "onnxruntime.capi.onnxruntime_inference_collection"
_lock: Final = threading.RLock()
_depth = 0


class Shim(ModuleType):
    """A module in the place of another: names of its own, and otherwise those of what it stands for."""

    def __init__(self, name: str, names: Any, behind: Any) -> None:
        super().__init__(name, getattr(behind, "__doc__", None))
        for special in ("__path__", "__file__", "__spec__", "__package__", "__loader__"):
            if hasattr(behind, special):
                setattr(self, special, getattr(behind, special))
        self.__dict__["_names"], self.__dict__["_behind"] = names, behind

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__") or name == "__version__":
            for place in (self.__dict__["_names"], self.__dict__["_behind"]):
                with contextlib.suppress(AttributeError):
                    return getattr(place, name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        return sorted({*self.__dict__, *dir(self.__dict__["_behind"])} - {"_names", "_behind"})


def _genuine_import(
    name: str,
    globals: Mapping[str, object] | None = None,
    locals: Mapping[str, object] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> Any:
    """`__import__` of modules that get the genuine library."""
    if library is None and level == 0 and name.partition(".")[0] == NAME:
        raise ModuleNotFoundError(f"No module named {NAME!r}", name=NAME)
    found = builtins.__import__(name, globals, locals, fromlist or (), level)
    return found.__dict__["_behind"] if isinstance(found, Shim) else found


def _is_inside(name: str) -> bool:
    root = name.partition(".")[0]
    return root.startswith("xrt_") or (root == NAME and library is not None)


class _Loader(importlib.abc.Loader):
    """Executes a module with `_genuine_import`. Everything else is the loader's that it stands for."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: Any) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": _genuine_import}
        self._loader.exec_module(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules that get the genuine library."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> Any:
        if not _is_inside(fullname):
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


_finder: Final = _Finder()


def _modules() -> dict[str, ModuleType]:
    import xrt_ort

    if library is None:
        from xrt_ort import own

        return own.modules(Shim(NAME, xrt_ort, own))
    made: dict[str, ModuleType] = {NAME: Shim(NAME, xrt_ort, library)}
    collection = sys.modules.get(_COLLECTION)
    if collection is not None:
        session = ModuleType(_COLLECTION)
        session.__dict__["InferenceSession"] = xrt_ort.InferenceSession
        made[_COLLECTION] = Shim(_COLLECTION, session, collection)
    return made


def install() -> None:
    """Give the shim to whatever imports `onnxruntime` from now on. Modules that have the library already keep it."""
    global _depth
    with _lock:
        _depth += 1
        if _depth == 1:
            sys.meta_path.insert(0, _finder)
            sys.modules.update(_modules())


def uninstall() -> None:
    """Take back one `install`."""
    global _depth
    with _lock:
        _depth = max(_depth - 1, 0)
        if _depth:
            return
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(_finder)
        for name, module in [(n, m) for n, m in sys.modules.items() if n.partition(".")[0] == NAME]:
            if not isinstance(module, Shim):
                parent, _, child = name.rpartition(".")
                if library is not None and parent == NAME:  # loaded meanwhile, an attribute of the shim
                    setattr(library, child, module)
                elif library is None:
                    del sys.modules[name]
            elif library is not None:
                sys.modules[name] = module.__dict__["_behind"]
            else:
                del sys.modules[name]


@contextlib.contextmanager
def patched() -> Iterator[None]:
    """Within the block, `import onnxruntime` gives the shim, for tests and notebooks."""
    install()
    try:
        yield
    finally:
        uninstall()

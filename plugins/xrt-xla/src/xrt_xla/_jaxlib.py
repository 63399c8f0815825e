"""Stored programs on the CPU through jaxlib's own client, without importing JAX.

A process that finds everything compiled needs nothing of JAX but its runtime, and importing JAX takes a third of a
second. This is the only user of jaxlib's private interface, so it serves only the versions that it was tested with, and
only where JAX would see one CPU and nothing else; for all the rest, and whatever it refuses, there is `_toolkit`.
JAX can be imported at any time after it: its client and this one live side by side.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module, metadata, util
from typing import Any, Final

import numpy as np

from xrt_core.engine.serialization import instruction_set

__all__ = ["TESTED", "Code", "Program", "cpu_fingerprint", "fingerprint_text", "serves", "usable"]

TESTED: Final = frozenset(("0.10.2",))
"""Versions of jaxlib, and of JAX with it, that the tests of this package ran with."""

_ELSEWHERE: Final = ("JAX_PLATFORM_NAME", "JAX_PLATFORMS")
_LIBRARIES: Final = ("PJRT_NAMES_AND_LIBRARY_PATHS", "TPU_LIBRARY_PATH")
_RESULTS: Final = frozenset("?bBhHiIlLqQefdFD")
"""Type codes of NumPy's own dtypes: the client lends the memory of such results by the buffer protocol."""

_lock = threading.Lock()


def serves(device: str) -> bool:
    """Whether programs for the device of that name can be loaded here without JAX."""
    return device in ("cpu", "cpu:0") and usable()


def usable() -> bool:
    """Whether JAX would see the CPU alone, in versions that are known, and has not been imported, so that there is
    something to be saved."""
    return "jax" not in sys.modules and _fits()


@functools.cache
def _fits() -> bool:
    if any(os.environ.get(name, "cpu") not in ("", "cpu") for name in _ELSEWHERE):
        return False
    if any(os.environ.get(name) for name in _LIBRARIES) or util.find_spec("libtpu") or util.find_spec("jax_plugins"):
        return False
    with suppress(metadata.PackageNotFoundError):
        versions = {metadata.version("jax"), metadata.version("jaxlib")}
        if len(versions) > 1 or not versions <= TESTED or not util.find_spec("jax"):
            return False
        return not metadata.entry_points(group="jax_plugins")
    return False


def library_version() -> str:
    """The version of JAX and of jaxlib, where they are one of `TESTED`."""
    return metadata.version("jax")


@functools.cache
def cpu_fingerprint() -> str:
    """What `_toolkit.fingerprint_of` says of the CPU."""
    return fingerprint_text(library_version(), "cpu", "cpu", instruction_set())


def fingerprint_text(version: str, kind: str, *device: str) -> str:
    """What a compiled program depends on: JAX, the device, and XLA's flags."""
    # some flags change numbers
    return " ".join(" ".join(("jax", version, kind, *device, os.environ.get("XLA_FLAGS", ""))).split())


class Code:
    """XLA's code of a program on its way into the client, in a thread of its own: it does without the interpreter.

    code: what jaxlib's `LoadedExecutable.serialize` gave.
    """

    def __init__(self, code: bytes) -> None:
        self._loaded: Any = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._load, args=(code,), name="xrt-xla-load")
        self._thread.start()

    def _load(self, code: bytes) -> None:
        try:
            jaxlib, client, device, _ = _client()
            self._loaded = client.deserialize_executable(code, executable_devices=jaxlib.DeviceList((device,)))
        except Exception as e:
            self._error = e

    def loaded(self) -> Any:
        """jaxlib's executable, once it is there. Raises what jaxlib raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._loaded


class Program:
    """A loaded program with its weights, called with NumPy arrays.

    kept: indices of the arguments (entries, then weights) that the program reads; XLA's programs lack the others.
    entries, results: dtype and shape of each. weights: read in place where they are aligned to 64 bytes.

    Raises what jaxlib raises for code that it does not take, TypeError for dtypes that it does not lend.
    """

    def __init__(
        self,
        code: Code,
        kept: Sequence[int],
        entries: Sequence[tuple[np.dtype, tuple[int, ...]]],
        weights: Sequence[np.ndarray],
        results: Sequence[tuple[np.dtype, tuple[int, ...]]],
    ) -> None:
        for dtype, _ in (*entries, *results):
            if dtype.char not in _RESULTS:
                raise TypeError(f"arrays of {dtype} go through JAX")
        self._run = code.loaded().execute_sharded
        jaxlib, _, device, sharding = _client()
        self._put = jaxlib.batched_device_put
        self._devices = [device]
        self._sharding = sharding
        read = set(kept)
        self._entries = [(i, _Aval(*entry)) for i, entry in enumerate(entries) if i in read]
        self._weights = [
            self._put(_Aval(w.dtype, w.shape), sharding, [w], self._devices, enable_x64=True)
            for i, w in enumerate(weights, len(entries))
            if i in read
        ]
        self._handlers = [
            jaxlib.array_result_handler(_Aval(*r), sharding, committed=True, _skip_checks=True) for r in results
        ]

    def __call__(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The results, once they are computed: views of memory that the client holds. `inputs` must fit the entries."""
        put, sharding, devices = self._put, self._sharding, self._devices
        # aligned arrays are read in place; each argument that is named or left out here saves a third of the time
        arguments = [put(aval, sharding, [inputs[i]], devices, enable_x64=True) for i, aval in self._entries]
        arguments += self._weights
        return [np.asarray(r) for r in self._run(arguments).consume_with_handlers(self._handlers)]


class _Aval:
    """What the client asks of the type of an array; JAX has a class of its own for it."""

    __slots__ = ("dtype", "shape")
    weak_type: Final = False

    def __init__(self, dtype: np.dtype, shape: tuple[int, ...]) -> None:
        self.dtype, self.shape = dtype, shape


def _client() -> tuple[Any, Any, Any, Any]:
    """jaxlib, the process's client, its device, and the sharding that puts a whole array there."""
    with _lock:
        return _start()


@functools.cache
def _start() -> tuple[Any, Any, Any, Any]:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")  # as quiet as JAX makes it
    jaxlib = import_module("jaxlib._jax")
    client = jaxlib.get_tfrt_cpu_client(asynchronous=True)
    device = client.devices()[0]
    whole = import_module("jaxlib._hlo").HloSharding.replicate()
    return jaxlib, client, device, jaxlib.GSPMDSharding([device], whole)

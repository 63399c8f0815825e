"""Binding: a plan as a call for arguments of certain types; what goes in, on which stream it runs, what comes out."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import numpy as np

from xrt_core.engine.contract import Engine, RunOptions
from xrt_core.engine.cuda import naming_broken_context
from xrt_core.engine.device_kinds import DeviceKind, Streams, device_kind, number_of, same_device
from xrt_core.runtime.arrays import Converter, UnreadableResult, family_of, from_numpy, is_array, own_numpy, to_numpy
from xrt_core.runtime.launch import WrongResults, engine_failure, launch_mode
from xrt_core.runtime.plan import HOST, Plan
from xrt_core.runtime.transfers import on_host, to_caller, to_engine

log = logging.getLogger("xrt")

Call = Callable[[Sequence[Any]], list[Any]]
Engines = Mapping[str, tuple[Engine, str]]
"""By name, with the device for which each compiles."""

_MAX_LATE: Final = 3
_OWN: Final = (np.ndarray, list, dict, type(None))
"""Types of results on the host that are the caller's as they are."""


def bind(
    plan: Plan, arrays: Sequence[Any], engines: Engines, xp: Any, host_device: str, *, as_is: bool = False
) -> Call:
    """The plan as a call with arrays like these: of the same types, shapes and dtypes. The hot path of every call.

    engines: those that take part. xp, host_device: the host's namespace, and where it computes. Results are in the
    family of the first array; as_is: they are what computed them made, where there is no device with streams. An array
    on a device goes as it is, or in place, to an engine that takes such arrays there; all else goes in as NumPy arrays.
    """
    place = _place(engines, host_device)
    if place is not None:
        return DeviceCall(plan, arrays, engines, xp, *place)
    taken = [() if _has_streams(engines, name) else taken_by(engines, name) for name in plan.engine_inputs]
    convert = [
        i
        for i, a in enumerate(arrays)
        if (type(a) is not np.ndarray or to_numpy(a) is not a) and family_of(type(a)) not in taken[i]
    ]
    family = family_of_first(arrays) or "numpy"
    out = from_numpy(family)
    readable = all(device_kind(device).numpy_readable for _, device in engines.values())
    if family == "numpy":
        own = _writable if all(e.array_families for e, _ in engines.values()) else _as_claimed
        out = own if HOST not in plan.spaces and readable else lambda r: own(to_numpy(r))
    if as_is:
        out = _same
    plain = np.ndarray if out in (_writable, _as_claimed) else None  # what needs no conversion

    def call(arrays: Sequence[Any]) -> list[Any]:
        if convert:
            arrays = list(arrays)
            for i in convert:
                arrays[i] = to_numpy(arrays[i])
        read: list[Any] = []
        try:
            results = plan.run(arrays)
        except UnreadableResult as e:
            engine = e.engine
            failure = engine_failure(e, engine)
        else:
            if len(results) == 1 and type(results[0]) is plain and type(results) is list:
                return results
            try:
                for r in results:
                    read.append(r if type(r) is plain else out(r))
                return read
            except BaseException as e:  # reading an engine's array may run code of the engine
                engine = plan.spaces[min(len(read), len(plan.spaces) - 1)]  # an interrupt comes after the last as well
                failure = engine_failure(e, engine)
        return [out(r) for r in plan.run_on_host(arrays, failure, engine)]

    return call


def _same(x: Any) -> Any:
    return x


def _writable(x: Any) -> Any:
    """The NumPy array of a result, which is the caller's."""
    return x if type(x) in _OWN else own_numpy(x)


def _as_claimed(x: Any) -> Any:
    """As `_writable`, of arrays of a library that is not known here. Raises WrongResults where one is read as another
    dtype or shape than it claims."""
    read = _writable(x)
    claimed = getattr(x, "dtype", None)
    if isinstance(claimed, np.dtype) and (read.dtype != claimed or read.shape != tuple(x.shape)):
        said, found = f"{claimed}{list(x.shape)}", f"{read.dtype}{list(read.shape)}"
        raise WrongResults(f"a result claims to be {said} and is read as {found}", "wrong dtype")
    return read


def taken_by(engines: Engines, name: str | None) -> tuple[str, ...]:
    """The families, beside NumPy's, that the engine of this name takes as they are; none for None."""
    found = engines.get(name) if name is not None else None
    if found is None:
        return ()
    engine, device = found
    kind = device_kind(device)
    return (*engine.array_families, kind.name) if kind.arrays is not None else tuple(engine.array_families)


def taken_at(engines: Engines, host_device: str, name: str) -> tuple[str, ...]:
    """As `taken_by`, of arrays on the host's device: none where the engine computes elsewhere."""
    apart = name in engines and not same_device(engines[name][1], host_device)
    return () if apart else taken_by(engines, name)


def family_of_first(arrays: Sequence[Any]) -> str | None:
    """The family of the first array, also within sequences; None where there is none."""
    for a in arrays:
        if isinstance(a, list | tuple):
            found = family_of_first(a)
            if found is not None:
                return found
        elif is_array(a):
            return family_of(type(a))
    return None


def _place(engines: Engines, host_device: str) -> tuple[DeviceKind, Streams, int] | None:
    """The one device with streams that is used, and its number; None where there are none or several."""
    devices = [host_device, *(d for _, d in engines.values())]
    found = {(kind, number_of(d)) for d in devices if (kind := device_kind(d)).streams is not None}
    if len(found) != 1:
        return None
    kind, number = found.pop()
    assert kind.streams is not None
    return kind, kind.streams, number


def _has_streams(engines: Engines, name: str | None) -> bool:
    return name is not None and name in engines and device_kind(engines[name][1]).streams is not None


@contextlib.contextmanager
def settled(streams: Streams, device: int, arrays: Sequence[Any]) -> Iterator[None]:
    """Context of a run whose launches may be called on other threads, which have current streams of their own.

    Within it the device's default stream is the current one, as it is for other threads. Where the caller works on
    another stream, what is on that is waited for first, and what the run enqueued at the end.

    arrays: the caller's on the device.
    """
    working = {streams.current(a, device) for a in arrays} or {streams.current(None, device)}
    apart = bool(working - {None, 0, 1})
    if apart:
        streams.synchronize(device)
    with streams.using(0, device):
        yield
    if apart:
        streams.synchronize(device)


def settled_host(xp: Any, device: str) -> AbstractContextManager[Any]:
    """`settled` for the host's own device; nothing for NumPy."""
    streams = device_kind(device).streams
    if xp is np or streams is None:
        return contextlib.nullcontext()
    return _settled_or_broken(streams, number_of(device))


@contextlib.contextmanager
def _settled_or_broken(streams: Streams, device: int) -> Iterator[None]:
    with naming_broken_context(), settled(streams, device, ()):
        yield


class DeviceCall:
    """A bound call where an engine, or the host, is on a device with streams.

    If every launch of the plan is asynchronous (`DeviceLaunch`), or there is none, only reads of an array on the CPU
    synchronise. For
    arguments on the GPU the results may still be computing, ordered on the current stream of the arguments' library; if
    an argument or the results are on the CPU, the results are complete on return.

    An asynchronous failure raises where a result is read. The plan then runs once more, synchronously: the launch that
    failed fails again, and its fallback runs on the host. After three such calls launches are always synchronous. An
    error that first surfaces after results were returned unread reaches the caller.
    """

    def __init__(
        self, plan: Plan, arrays: Sequence[Any], engines: Engines, xp: Any, kind: DeviceKind, streams: Streams,
        device: int,
    ) -> None:  # fmt: skip
        self._plan = plan
        self._is_one_launch = plan.is_one_launch
        self._kind, self._streams, self._device = kind, streams, device
        self._family = family_of_first(arrays) or "numpy"
        families = [family_of(type(a)) if is_array(a) else "" for a in arrays]
        self._enter: list[tuple[int, Converter]] = []
        for i, (a, family, name) in enumerate(zip(arrays, families, plan.engine_inputs, strict=True)):
            if type(a) is not np.ndarray or to_numpy(a) is not a:
                on_it = name is not None and _has_streams(engines, name)
                taken = taken_by(engines, name) if on_it else () if name in engines else on_host(xp)
                self._enter.append((i, to_engine(family, taken, kind, device) if family else to_numpy))
        self._located = [i for i, f in enumerate(families) if f not in ("", "numpy")]
        self._only_located = len(self._located) == len(arrays)
        self._first = next((i for i, f in enumerate(families) if f == self._family), -1)
        self._late = 0
        self._host_alone = not engines or not (plan.launches or plan.may_run_side_by_side)
        # threads of the pool have other current streams than the caller's
        self._ahead = plan.runs_ahead and not plan.may_run_side_by_side

    def __call__(self, arrays: Sequence[Any], wanted: Sequence[Any] = ()) -> list[Any]:
        """wanted: arrays that results are wanted in, as `RunOptions.results`; what does not come back is not there."""
        with naming_broken_context():
            return self._call(arrays, wanted)

    def _call(self, arrays: Sequence[Any], wanted: Sequence[Any]) -> list[Any]:
        places = {i: self._kind.device_of(arrays[i]) for i in self._located}
        place, family = places.get(self._first), self._family
        on_device = place is not None
        like_first = on_device or (family == "jax" and self._first >= 0)
        out = to_caller(family, arrays[self._first]) if like_first else from_numpy(family)
        if self._host_alone:
            with self._streams.using(self._stream_of(arrays, place), self._device):
                return [out(r) for r in self._plan.run(self._entered(arrays))]
        if not self._ahead:
            given = [arrays[i] for i, p in places.items() if p == self._device]
            with settled(self._streams, self._device, given):
                return [out(r) for r in self._plan.run(self._entered(arrays))]
        stream = self._stream_of(arrays, place)
        # before the results are complete, an array of the caller on the CPU may still be read
        finished = not (on_device or family == "jax")
        ahead = finished or (self._only_located and all(p == self._device for p in places.values()))
        with self._streams.using(stream, self._device):
            entered = self._entered(arrays)
            if not ahead or self._late >= _MAX_LATE:
                return self._on(stream, True, entered, out, wanted)
            try:
                return self._on(stream, False, entered, out, wanted)
            except Exception as e:
                with contextlib.suppress(Exception):  # what failed may fail here again
                    self._streams.synchronize(self._device)
                results = self._on(stream, True, entered, out)
                self._late += 1
                log.warning("a call that did not wait for its launches failed, and ran once more, waiting: %s", e)
                return results

    def _stream_of(self, arrays: Sequence[Any], place: int | None) -> int | None:
        """The stream on which the caller works, by the first array where that lies on the device."""
        return self._streams.current(arrays[self._first] if place == self._device else None, self._device)

    def _on(
        self,
        stream: int | None,
        wait: bool,
        arrays: Sequence[Any],
        out: Callable[[Any], Any],
        wanted: Sequence[Any] = (),
    ) -> list[Any]:
        results = wanted if self._is_one_launch else ()
        token = launch_mode.set((RunOptions(stream=stream, results=results), wait))
        try:
            return [out(r) for r in self._plan.run(arrays)]
        finally:
            launch_mode.reset(token)

    def _entered(self, arrays: Sequence[Any]) -> Sequence[Any]:
        if self._enter:
            arrays = list(arrays)
            for i, enter in self._enter:
                arrays[i] = enter(arrays[i])
        return arrays

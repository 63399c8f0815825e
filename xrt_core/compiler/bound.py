"""Binding: a model on arrays that stay the same from call to call; runs of many sets of inputs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

from xrt_core.errors import InputError

_AHEAD: Final = 2  # sets of inputs for each caller that are taken before their turn


class Binding:
    """Calls a model on the same arrays again and again; see `XRTModule.bind`.

    inputs: input name -> the array that each call reads. outputs: output name -> the array that each call writes; empty
    where results are arrays of their own. Not for several threads at a time, which would share these arrays.
    """

    __slots__ = ("_names", "_run", "inputs", "outputs")

    def __init__(
        self,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        names: Sequence[str],
        run: Callable[[], Sequence[Any]],
    ) -> None:
        self.inputs = inputs
        self.outputs = outputs
        self._names = tuple(names)
        self._run = run

    def __call__(self) -> dict[str, Any]:
        """Run on what the arrays hold now; returns {output name: array}.

        Raises InputError where an array was given another shape since, and what a call raises.
        """
        return dict(zip(self._names, self._run(), strict=True))

    def __repr__(self) -> str:
        return f"<Binding: {', '.join(self.inputs)} -> {', '.join(self._names)}>"


def run_many(
    run: Callable[[Mapping[str, Any]], dict[str, Any]], sets: Iterable[Mapping[str, Any]], callers: int
) -> Iterator[dict[str, Any]]:
    """The results of `run` for each of `sets`, in their order, at most `callers` of them at a time.

    Sets are taken from the iterable as they are needed. Raises what the first run that fails raises, in its place; no
    further set is begun then. Raises InputError where `callers` is no positive integer.
    """
    if isinstance(callers, bool) or not isinstance(callers, int) or callers < 1:
        raise InputError(f"callers must be a positive integer, not {callers!r}")
    return map(run, sets) if callers == 1 else _side_by_side(run, sets, callers)


def _side_by_side(
    run: Callable[[Mapping[str, Any]], dict[str, Any]], sets: Iterable[Mapping[str, Any]], callers: int
) -> Iterator[dict[str, Any]]:
    pool = ThreadPoolExecutor(callers, thread_name_prefix="xrt-caller")
    begun: deque[Future[dict[str, Any]]] = deque()
    try:
        for row in sets:
            begun.append(pool.submit(run, row))
            if len(begun) >= _AHEAD * callers:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)

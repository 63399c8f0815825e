"""Inquiry: asks the engines of one module about nodes, in a child where there is one, and leaves out who harms it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from xrt_core.cache.disk import DiskCache
from xrt_core.engine.contract import Engine, Phase
from xrt_core.errors import XRTError
from xrt_core.events import EventLog
from xrt_core.guard import planning
from xrt_core.guard.asking import Answers, Asker, about, tell
from xrt_core.guard.pool import Job, Slot, process_pool
from xrt_core.guard.remembered import answers_key, find_answers, keep_answers, usable
from xrt_core.guard.settings import GuardSettings
from xrt_core.ir.function import Function
from xrt_core.ir.graph import Graph, Node
from xrt_core.runtime.compilation import Compilation


class Inquiry:
    """Where a call is planned beside its caller, or waits for compilation anyway, engines are asked in a child first.

    An engine that ends the child is left out of the module from then on, with one event. Others are asked again in this
    process by whoever needs to know, as they have answered without harm. compilation: with the engines that are left.
    every: with all of them. left_out: engine -> why. disk: has the answers of earlier processes.
    """

    def __init__(
        self, settings: GuardSettings, compilation: Compilation, disk: DiskCache | None, events: EventLog
    ) -> None:
        self._disk = disk
        self.every = compilation
        self.compilation = compilation
        self.left_out: Mapping[str, str] = {}
        self._settings = settings
        self._events = events
        self._lock = threading.Lock()

    def ask(self, graph: Graph, nodes: Sequence[Node], phase: Phase) -> Mapping[str, Answers]:
        """The answers of those engines that could be asked in a child."""
        compilation, here, disk = self.compilation, planning.asker(), usable(self._disk)
        if not (nodes and self._settings.sandbox) or (here is None and self._settings.asynchronous):
            return {}
        known: dict[str, Answers] = {}
        try:
            function = about(nodes, graph)
            keys = {name: answers_key(compilation.key(function, name)) for name in compilation.engines} if disk else {}
            if disk is not None:
                known = {n: a for n, k in keys.items() if (a := find_answers(k, function, disk)) is not None}
            engines = [e for name, e in compilation.engines.items() if name not in known]
            if not engines:
                found = {}
            elif here is not None:
                found = here.supports(function, engines, phase)
            else:
                found = self._by_job(function, engines, phase)
        except (OSError, XRTError) as e:
            self._events.emit("guard.not_asked_apart", graph=graph.name, reason=f"{type(e).__name__}: {e}")
            return known
        planning.check()
        if disk is not None:
            for name, answers in found.items():
                keep_answers(keys[name], function, disk, answers)
        failed = {name: a.failure for name, a in found.items() if a.failure is not None}
        for name, failure in failed.items():
            tell(self._events, name, "supports", failure, graph.name or "graph")
        if failed:
            with self._lock:
                self.left_out = {**self.left_out, **{name: f"{f.kind}: {f}" for name, f in failed.items()}}
                self.compilation = self.every.without(self.left_out)
        return {**known, **{name: a for name, a in found.items() if a.failure is None}}

    def _by_job(
        self, function: Function, engines: Sequence[tuple[Engine, str]], phase: Phase
    ) -> dict[str, Answers]:
        found: dict[str, Answers] = {}
        errors: list[OSError | XRTError] = []

        def work(slot: Slot) -> None:
            try:
                found.update(Asker(slot, self._settings).supports(function, engines, phase))
            except (OSError, XRTError) as e:
                errors.append(e)

        job = Job(work, self)
        process_pool().submit(job)
        job.done.wait()
        if errors:
            raise errors[0]
        return found

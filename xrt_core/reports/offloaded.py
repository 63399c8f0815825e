"""An assertion for users' tests: given operators run on engines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from xrt_core.errors import InputError, nearest
from xrt_core.passes.partitioning.report import PartitionReport


class HasReport(Protocol):
    """An `Explanation`."""

    @property
    def report(self) -> PartitionReport:
        """Return the partition report."""


def assert_offloaded(
    report: PartitionReport | HasReport,
    ops: Iterable[str] | None = None,
    *,
    engine: str | None = None,
    share: float | None = None,
) -> None:
    """Assert that no node of the operators `ops` runs on the host (None: no node at all).

        assert_offloaded(m.explain(), ops=["Conv", "MatMul"], engine="acme")

    report: the result of `XRTModule.explain`. engine: the engine that must run them. share: the minimum share of all
    nodes that must run on engines; without `ops` it replaces "no node at all".

    Raises AssertionError that lists the nodes with their reasons; InputError for an operator that the model does not
    have, which would make the assertion vacuous, and if `report` is not a report.
    """
    found = report if isinstance(report, PartitionReport) else getattr(report, "report", None)
    if not isinstance(found, PartitionReport):
        raise InputError(f"assert_offloaded takes what XRTModule.explain gives, not a {type(report).__name__}")
    wanted = None if ops is None else {_named(o) for o in ([ops] if isinstance(ops, str) else ops)}
    present = {o for c in found.clusters for o, _ in c.operators} | {h.operator for h in found.host_nodes}
    if missing := sorted((wanted or set()) - present):
        hint = nearest(missing[0], present)
        raise InputError(f"the model has no {', '.join(missing)}; its operators are {', '.join(sorted(present))}{hint}")
    wrong = []
    if wanted is not None or share is None:
        wrong += [
            f"{h.operator} {h.name or f'#{h.index}'} runs on the host: {h.reason}"
            for h in found.host_nodes
            if wanted is None or h.operator in wanted
        ]
    if engine is not None:
        for c in found.clusters:
            elsewhere = [o for o, _ in c.operators if wanted is None or o in wanted]
            if c.engine != engine and elsewhere:
                wrong.append(f"{', '.join(elsewhere)} of {c.name} run on {c.engine}, not on {engine}")
    if share is not None and found.offloaded_share < share:
        wrong.append(f"{found.offloaded_share:.1%} of the nodes run on engines, not {share:.1%}")
    if wrong:
        raise AssertionError("\n".join(wrong))


def _named(operator: str) -> str:
    if not isinstance(operator, str):
        raise InputError(f"ops holds {operator!r}; it takes names of operators, such as 'Conv'")
    return operator

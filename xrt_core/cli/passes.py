"""`xrt passes`: list every pass in execution order, with its stage, its owner and the reason for its position."""

from __future__ import annotations

from typing import Any

from xrt_core.cli import results
from xrt_core.cli.display import giving, say, show_table, working


@giving(results.Passes)
def passes() -> results.Passes:
    """List the passes in execution order: stage, owner, reason for the position; then plugin passes left out."""
    with working("looking for passes"):
        rows, left_out = listing()
    shown = [(str(i), r["name"], r["stage"], r["owner"], r["reason"]) for i, r in enumerate(rows, 1)]
    show_table(("", "pass", "stage", "owner", "reason"), shown)
    for name, why in left_out.items():
        say(f"left out: {name}: {why}")
    return results.Passes(passes=[results.Pass(**r) for r in rows], left_out=left_out)


def listing() -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return a row for each pass in execution order, and name -> reason for plugin passes that failed to load."""
    from xrt_core.compiler.passes import load_plugin_passes
    from xrt_core.compiler.passes import passes as registry
    from xrt_core.events import process_events
    from xrt_core.passes.pass_manager import STAGES

    left_out = dict(load_plugin_passes(process_events))
    rows = [
        {
            "name": p.name,
            "stage": stage,
            "owner": p.owner,
            "origin": p.origin,
            "before": list(p.before),
            "after": list(p.after),
            "requires": list(p.requires),
            "reason": p.reason,
        }
        for stage in STAGES
        for p in registry.order(stage)
    ]
    return rows, left_out

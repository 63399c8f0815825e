"""The way of a graph, told once: captured -> optimised -> partitioned -> planned.

Read `STEPS` (in `passes.py`) downward: every step by name, with the reason why it stands where it does. Each stage
(`stages.py`) is a type that prints itself and has the method that leads to the next; a later stage never reaches into
an earlier one. `Pipeline` (`pipeline.py`) walks the way, `Lowering` (`lowering.py`) says what a node becomes, and
`BaselinePlan` (`first_plan.py`) is the host's plan that answers while the one with engines is made.
"""

from xrt_core.compiler.guarded import GuardedModule
from xrt_core.compiler.making import pipeline_for
from xrt_core.compiler.pipeline import Pipeline
from xrt_core.compiler.stages import Captured, Optimised, Partitioned, Planned
from xrt_core.compiler.tiering import BaselinePlan

__all__ = [
    "BaselinePlan",
    "Captured",
    "GuardedModule",
    "Optimised",
    "Partitioned",
    "Pipeline",
    "Planned",
    "pipeline_for",
]  # fmt: skip

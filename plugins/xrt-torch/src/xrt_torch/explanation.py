"""Explanations: what XRT and what torch eager run of a graph, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xrt_torch.constants import Constants
from xrt_torch.stages import Stages


@dataclass(frozen=True, slots=True)
class Explanation:
    """Of one graph. operators: how many of torch it has; reason: why all of it runs in eager, None otherwise;
    eager_nodes: name -> why it runs in eager; stages: None until XRT has compiled them; seconds_xrt, seconds_eager: of
    a call, None where they were not timed."""

    name: str
    operators: int
    reason: str | None
    eager_nodes: Mapping[str, str]
    stages: Stages | None
    constants: Constants | None
    seconds_xrt: float | None
    seconds_eager: float | None

    def to_json(self) -> dict[str, Any]:
        """As plain data.

        name; operators: how many of torch it has; eager_reason: why all of it runs in torch eager, None otherwise;
        compiled: whether XRT is done; eager_operators: name -> why it runs in eager; constants: how many parameters and
        buffers are constants; stages: of those on XRT, as
        `Explanation.to_json` of `XRTModule` gives them; seconds_xrt, seconds_eager: of a call, None where they were not
        timed.
        """
        return {
            "name": self.name,
            "operators": self.operators,
            "eager_reason": self.reason,
            "compiled": self.reason is None and self.stages is not None,
            "eager_operators": dict(self.eager_nodes),
            "constants": 0 if self.constants is None else len(self.constants.values),
            "stages": [r.module.explain().to_json() for r in self.stages or () if r.module is not None],
            "seconds_xrt": self.seconds_xrt,
            "seconds_eager": self.seconds_eager,
        }

    def as_text(self) -> str:
        """As lines for people to read."""
        lines = [f"{self.name}: {self.operators} operators of torch"]
        on_xrt = [r for r in self.stages or () if r.module is not None]
        if self.reason is not None:
            lines[0] += f", all in torch eager: {self.reason}"
        elif self.stages is None:
            lines[0] += ", in torch eager until XRT has compiled them"
        else:
            lines[0] += f", {sum(r.stage.size for r in on_xrt)} on XRT in {len(on_xrt)} stages"
        if self.seconds_xrt is not None and self.seconds_eager is not None:
            a, b = self.seconds_xrt, self.seconds_eager
            which = "XRT" if a <= b else "torch eager, which is quicker"
            lines[0] += f"; a call takes {a * 1e6:.0f} us on XRT, {b * 1e6:.0f} us in eager: {which} answers"
        if self.constants is not None and self.constants.values:
            how = ", looked at in each call" if self.constants.looks else ""
            lines.append(f"  {len(self.constants.values)} parameters and buffers are constants{how}")
        lines += [f"  in torch eager: {name}: {why}" for name, why in self.eager_nodes.items()]
        lines += [r.module.explain().as_text("  ") for r in on_xrt]
        return "\n".join(lines)

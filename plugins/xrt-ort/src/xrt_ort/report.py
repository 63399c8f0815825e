"""The report: what became of the sessions of the process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SessionReport:
    """Of one session. model: file's name, or "model". calls, offloaded: of `run`, and those that engines answered.
    engines: that answered. worst: largest difference from the library in a trial, as a share of the largest value.
    state: what is done with it, for people."""

    model: str
    calls: int
    offloaded: int
    engines: tuple[str, ...]
    worst: float
    state: str

    def __str__(self) -> str:
        return f"{self.model}: {self.offloaded} of {self.calls} calls on engines; {self.state}"


def report() -> list[SessionReport]:
    """Return a row for each session that engines may answer, in the order in which they were made or dropped."""
    from xrt_ort import genuine

    if genuine.library is None:
        from xrt_ort.own.session import known

        return known()
    from xrt_ort.acceleration import rows

    return rows()

"""Support: a yes, or a no with the reason a person can read."""

from __future__ import annotations

from typing import Final, NamedTuple


class Support(NamedTuple):
    """Whether something takes a node, and if not, why. Truthy when it does."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok

    @staticmethod
    def yes() -> Support:
        """It is supported."""
        return _YES

    @staticmethod
    def no(reason: str) -> Support:
        """It is not supported, because of `reason` (a clause without a full stop)."""
        return Support(False, reason)


_YES: Final = Support(True)

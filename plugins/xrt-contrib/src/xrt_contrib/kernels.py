"""Host kernels, for what no graph of standard operators expresses: text, hashes, loops that depend on data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from xrt_contrib.schemas import DOMAIN


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel of the host. dynamic: why an engine of static shapes cannot run it. infer: the types of its outputs."""

    function: Callable[..., Any]
    dynamic: str | None
    infer: Callable[..., Any] | None = None
    is_constant: bool = True


KERNELS: Final[dict[tuple[str, str], Kernel]] = {}
"""(domain, operator) -> its kernel."""


def kernel(name: str, *, dynamic: str | None = None, infer: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Register the decorated function as the host's kernel of an operator."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        KERNELS[DOMAIN, name] = Kernel(function, dynamic, infer)
        return function

    return register

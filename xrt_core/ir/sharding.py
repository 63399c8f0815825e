"""Mesh and SBP: devices as a grid with named axes, and how a tensor lies on it: split, broadcast or as partial results.

SBP follows OneFlow (Yuan et al., "OneFlow: Redesign the Distributed Deep Learning Framework from Scratch", 2021).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from xrt_core.errors import OptionError, nearest


@dataclass(frozen=True, slots=True)
class Sbp:
    """How a tensor lies on one axis of a mesh. axis: of the tensor, where it is split; reduce: of a partial result."""

    axis: int | None = None
    reduce: str = ""

    @property
    def is_broadcast(self) -> bool:
        """Whether every device holds the whole tensor."""
        return self.axis is None and not self.reduce

    def __str__(self) -> str:
        return f"S({self.axis})" if self.axis is not None else f"P({self.reduce})" if self.reduce else "B"


def S(axis: int) -> Sbp:
    """Split: every device holds a part of the tensor along `axis`. Raises OptionError for what is no axis from 0."""
    if not isinstance(axis, int) or isinstance(axis, bool) or axis < 0:
        raise OptionError(f"S({axis!r}): a split axis is a whole number that counts from the front, from 0")
    return Sbp(axis)


B = Sbp()
"""Broadcast: every device holds the whole tensor."""


def P(reduce: str = "sum") -> Sbp:
    """Partial: the tensor is the sum, the maximum or the minimum of what the devices hold."""
    if reduce not in ("sum", "max", "min"):
        raise OptionError(f"P({reduce!r}): partial results are combined by 'sum', 'max' or 'min'")
    return Sbp(None, reduce)


@dataclass(frozen=True, slots=True)
class Mesh:
    """Devices as a grid with named axes: `Mesh({"data": 4, "model": 2})` is eight devices of the engine's kind.

    Raises OptionError for no axes, a size below 1, a name that is no identifier, or what is no mapping.
    """

    axes: Mapping[str, int]
    sizes: tuple[tuple[str, int], ...] = field(init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.axes, Mapping):
            raise OptionError(f"Mesh({self.axes!r}): it takes axes with their sizes, such as Mesh({{'data': 4}})")
        rows = tuple(self.axes.items())
        for name, size in rows:
            if not str(name).isidentifier() or not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise OptionError(f"mesh axis {name!r}: {size!r}; axes are identifiers with sizes of at least 1")
        if not rows:
            raise OptionError("a mesh has at least one axis: Mesh({'data': 4})")
        object.__setattr__(self, "sizes", rows)

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """The mesh that `str` gave `text` for: "data=4,model=2"."""
        rows = [part.strip().partition("=") for part in text.split(",")]
        if any(not size.strip().isdigit() for _, _, size in rows):
            raise OptionError(f"mesh {text!r}: say 'data=4,model=2'")
        return cls({name.strip(): int(size) for name, _, size in rows})

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the axes, in order."""
        return tuple(n for n, _ in self.sizes)

    @property
    def device_count(self) -> int:
        """How many devices it has."""
        return math.prod(n for _, n in self.sizes)

    def size(self, axis: str) -> int:
        """The size of an axis. Raises OptionError for one that does not exist, naming those that do."""
        for name, size in self.sizes:
            if name == axis:
                return size
        raise OptionError(f"the mesh has no axis {axis!r}; it has {self}{nearest(axis, self.names)}")

    def __str__(self) -> str:
        return ",".join(f"{n}={s}" for n, s in self.sizes)

    def __hash__(self) -> int:
        return hash(self.sizes)


NdSbp = tuple[Sbp, ...]
"""One SBP for each axis of the mesh, in its order."""

_FORM = re.compile(r"(\w+)\s*:\s*(?:(B)|S\(\s*(\d+)\s*\)|P(?:\(\s*(\w*)\s*\))?)$")


def parse_sbp(text: str, mesh: Mesh) -> NdSbp:
    """The SBP of a text such as "data:S(0), model:B"; axes that are not named are broadcast.

    Raises OptionError for another form, an axis that the mesh does not have, or one that stands twice.
    """
    found: dict[str, Sbp] = {}
    for part in re.split(r",(?![^(]*\))", text) if text.strip() not in ("", "B") else ():
        match = _FORM.match(part.strip())
        if match is None:
            raise OptionError(f"sharding {text!r}: {part.strip()!r} is none of 'axis:S(0)', 'axis:B', 'axis:P(sum)'")
        name, broadcast, split, reduce = match.groups()
        mesh.size(name)
        if name in found:
            raise OptionError(f"sharding {text!r} says two things of mesh axis {name!r}")
        found[name] = B if broadcast else S(int(split)) if split is not None else P(reduce or "sum")
    return tuple(found.get(n, B) for n in mesh.names)


def sharding_text(given: str | Mapping[str, Sbp]) -> str:
    """The text of what a user said: text as it is, or an SBP for each axis of a mesh, `{"data": S(0)}`.

    Raises OptionError for anything else.
    """
    if isinstance(given, str):
        return given
    if not isinstance(given, Mapping) or not all(isinstance(s, Sbp) for s in given.values()):
        raise OptionError(f"sharding {given!r}: give text such as 'data:S(0)', or a mapping {{'data': xrt.sbp.S(0)}}")
    return ",".join(f"{axis}:{s}" for axis, s in given.items()) or "B"


def sbp_text(sbp: NdSbp, mesh: Mesh) -> str:
    """The text of an SBP; "B" where every device holds the whole tensor."""
    return ",".join(f"{n}:{s}" for n, s in zip(mesh.names, sbp, strict=True) if not s.is_broadcast) or "B"

"""What an engine can do beyond the mandatory part of the contract: tests ask for these, never for an engine's name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The answers of one engine. Where an answer is None the kit finds out, and skips the test if the engine cannot.

    serialisation: executables serialise and load in another process. True: they must; False: they must refuse.
    in_place: an aliased output takes the storage of its input when that is an array of the engine's own. True: it must.
    deterministic: equal inputs give bitwise equal results at every run.
    dtypes: names of the element types that cases are made of; None: all that `Engine.supports` takes.
    toolkit: modules of the engine's library, without which the package must still import; None: what the package's
        metadata says that it requires.
    growth_bytes: so much more memory may be in use after 1000 runs.
    simulated: runs go element by element through a simulator: large cases and long loops are left out.

    What every engine must do (runs that do not wait, many threads, any layout of an input, ...) has no tag.
    """

    serialisation: bool | None = None
    in_place: bool | None = None
    deterministic: bool = True
    dtypes: frozenset[str] | None = None
    toolkit: tuple[str, ...] | None = None
    growth_bytes: int = 16 << 20
    simulated: bool = False

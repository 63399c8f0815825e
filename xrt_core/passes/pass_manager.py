"""Pass registry: the passes of a process with their stages, their order, and the reason for their positions."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from xrt_core.errors import GraphError, RegistrationError, nearest
from xrt_core.ir.dag import sort_indices
from xrt_core.ir.graph import Graph
from xrt_core.passes.pass_base import Pass

Stage = Literal["model", "signature", "engines"]
STAGES: Final[tuple[Stage, ...]] = ("model", "signature", "engines")
"""model: once, types as declared. signature: for each signature, types known. engines: clusters become Launch nodes."""

CLEANING: Final = "clean_unused"
"""Passes without a position run before this one, which removes the nodes that they leave without readers."""


class RegisteredPass(Struct, frozen=True):
    """A pass with its position.

    run: (graph, context of the run) -> graph. stages: in which it runs. reason: for its position.
    before, after: names of passes that it precedes and follows. requires: passes that must be registered and precede
    it. owner: the package or module it comes from. origin: "core", "user" or "plugin"; the failure of a plugin's pass
    is an event, that of a user's pass an error.
    """

    name: str
    run: Callable[[Graph, Any], Graph]
    stages: tuple[Stage, ...]
    reason: str = ""
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    owner: str = "xrt-core"
    origin: Literal["core", "user", "plugin"] = "core"


class PassRegistry:
    """The passes of a process, by name. core: the built-in ones, in order. `order` returns the passes of a stage."""

    def __init__(self, core: Iterable[RegisteredPass]) -> None:
        self._passes: dict[str, RegisteredPass] = {}
        last: dict[Stage, str] = {}
        for p in core:
            after = tuple(dict.fromkeys(last[s] for s in p.stages if s in last))
            self._passes[p.name] = replace(p, after=after)
            last.update(dict.fromkeys(p.stages, p.name))

    def register(self, p: RegisteredPass) -> None:
        """Add a pass. Raises RegistrationError, leaving the registry unchanged, for a taken name (naming both owners),
        an unknown stage or pass, a pass of another stage in `before` or `after`, and a cyclic order."""
        if not (isinstance(p.name, str) and p.name.isidentifier()):
            raise RegistrationError(f"pass {p.name!r} of {p.owner}: the name must be an identifier")
        taken = self._passes.get(p.name)
        if taken is not None:
            raise RegistrationError(f"pass {p.name!r} is registered twice: by {taken.owner} and by {p.owner}")
        for stage in p.stages:
            if stage not in STAGES:
                hint = nearest(stage, STAGES)
                raise RegistrationError(
                    f"pass {p.name!r} of {p.owner}: there is no stage {stage!r}; stages are {', '.join(STAGES)}{hint}"
                )
        if not p.before and not p.after and not p.requires:
            p = replace(p, before=(CLEANING,) if self._shares_stage(p, CLEANING) else ())
        for name in (*p.before, *p.after, *p.requires):
            known = self._passes.get(name)
            if known is None:
                close = difflib.get_close_matches(name, self._passes, n=1)
                hint = f"did you mean {close[0]!r}? " if close else ""
                raise RegistrationError(
                    f"pass {p.name!r} of {p.owner} names the pass {name!r}, which is not there; {hint}"
                    f"known: {', '.join(self._passes)}"
                )
            if not self._shares_stage(p, name) and name not in p.requires:
                raise RegistrationError(
                    f"pass {p.name!r} of {p.owner} is of stage {'/'.join(p.stages)} and cannot be put in order with "
                    f"{name!r} of {known.owner}, which is of the stage {'/'.join(known.stages)}"
                )
        trial = {**self._passes, p.name: p}
        for stage in p.stages:
            _sorted(trial, stage)
        self._passes = trial

    def register_all(self, passes: Iterable[RegisteredPass]) -> dict[str, str]:
        """Add passes that may refer to each other, in any order. Returns name -> reason, of those that failed."""
        left = list(passes)
        failed: dict[str, str] = {}
        while left:
            failed = {}
            again = []
            for p in left:
                try:
                    self.register(p)
                except RegistrationError as e:
                    failed[p.name] = str(e)
                    again.append(p)
            if len(again) == len(left):
                break
            left = again
        return failed

    def unregister(self, name: str) -> None:
        """Remove a pass. Raises RegistrationError if it is unknown, of the core, or referred to by others."""
        known = self._passes.get(name)
        if known is None:
            close = difflib.get_close_matches(str(name), self._passes, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise RegistrationError(f"there is no pass {name!r}; {hint}known: {', '.join(self._passes)}")
        if known.origin == "core":
            raise RegistrationError(f"pass {name!r} is one of the core's and cannot be taken out")
        users = [p for p in self._passes.values() if name in (*p.before, *p.after, *p.requires)]
        if users:
            user = users[0]
            raise RegistrationError(f"pass {name!r} is named by {user.name!r} of {user.owner}; take that out first")
        self._passes = {n: p for n, p in self._passes.items() if n != name}

    def snapshot(self) -> PassRegistry:
        """A registry with the current passes of this one."""
        made = PassRegistry(())
        made._passes = self._passes  # replaced, never changed
        return made

    def with_plugins_of(self, other: PassRegistry) -> PassRegistry:
        """This registry with the plugin passes of another; those that cannot be registered are left out."""
        made = self.snapshot()
        made.register_all(p for n, p in other._passes.items() if p.origin == "plugin" and n not in self._passes)
        return made

    def order(self, stage: Stage) -> tuple[RegisteredPass, ...]:
        """The passes of a stage in execution order: the core's in their order, others by their constraints."""
        return _sorted(self._passes, stage)

    def names(self) -> tuple[str, ...]:
        """All names, the core's first."""
        return tuple(self._passes)

    def _shares_stage(self, p: RegisteredPass, name: str) -> bool:
        other = self._passes.get(name)
        return other is not None and bool(set(p.stages) & set(other.stages))


def described(
    thing: Any,
    *,
    name: str | None = None,
    owner: str,
    origin: Literal["user", "plugin"],
    stage: str | None = None,
    before: str | Iterable[str] | None = None,
    after: str | Iterable[str] | None = None,
    requires: str | Iterable[str] | None = None,
    reason: str | None = None,
) -> RegisteredPass:
    """Describe a function Graph -> Graph, a `Pass`, or a subclass of it without required arguments for registration.

    Arguments that are None are read from attributes of `thing`. Raises RegistrationError if `thing` is not a pass.
    """

    def given(attribute: str, value: Any) -> Any:
        return value if value is not None else getattr(thing, attribute, None)

    label = given("name", name) or getattr(thing, "__name__", "")
    if inspect.isclass(thing) and hasattr(thing, "rewrite"):
        try:
            made: Any = thing()
        except Exception as e:
            raise RegistrationError(f"pass {label!r} of {owner} cannot be made: {type(e).__name__}: {e}") from e
    else:
        made = thing
    rewrite = made if isinstance(made, Pass) else getattr(made, "rewrite", made)
    if not callable(rewrite):
        kind = type(thing).__name__
        raise RegistrationError(f"pass {label!r} of {owner} is a {kind}; give a function Graph -> Graph")
    if not _takes_one(rewrite):
        raise RegistrationError(f"pass {label!r} of {owner} cannot be called with a graph alone; give a function of it")
    checked = rewrite if isinstance(rewrite, Pass) else _FunctionPass(label, rewrite)
    text = given("reason", reason) or (inspect.getdoc(thing) or "").partition("\n")[0]
    return RegisteredPass(
        label,
        lambda graph, _: checked(graph),
        (given("stage", stage) or "signature",),
        text,
        _tuple(given("before", before)),
        _tuple(given("after", after)),
        _tuple(given("requires", requires)),
        owner,
        origin,
    )


class _FunctionPass(Pass):
    """A function as a pass, checked like any other."""

    def __init__(self, name: str, function: Callable[[Graph], Graph]) -> None:
        self.name = name  # type: ignore[misc]
        self.function = function

    def rewrite(self, graph: Graph) -> Graph:
        return self.function(graph)


def _takes_one(function: Callable[..., Any]) -> bool:
    """Whether a function can be called with one argument; True if its signature is unknown."""
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:  # a function in C without a signature
        return True
    return True


def _tuple(names: str | Iterable[str] | None) -> tuple[str, ...]:
    return () if names is None else (names,) if isinstance(names, str) else tuple(names)


def _sorted(passes: Mapping[str, RegisteredPass], stage: Stage) -> tuple[RegisteredPass, ...]:
    listed = [p for p in passes.values() if stage in p.stages]
    index = {p.name: i for i, p in enumerate(listed)}
    first: list[set[int]] = [{index[n] for n in (*p.after, *p.requires) if n in index} for p in listed]
    for i, p in enumerate(listed):
        for n in p.before:
            if n in index:
                first[index[n]].add(i)
    try:
        order = sort_indices([sorted(f) for f in first], lambda i: f"{listed[i].name} ({listed[i].owner})")
    except GraphError as e:
        cycle = str(e).partition(": ")[2].partition(";")[0]
        raise RegistrationError(
            f"passes of stage {stage!r} wait for each other: {cycle}; change before or after"
        ) from e
    return tuple(listed[i] for i in order)

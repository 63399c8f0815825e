"""Operators that plugins define, in domains of their own: one record for each, with all that the core knows of it.

A registry of the core asks here when it meets a domain that it does not have, and the package is imported then (hook
`xrt_operators`): for schemas `ir/schema.py`, for kernels of the host `kernels/registry.py`, for those of engines
`engine/op_kernels.py`, for bodies `frontends/onnx_functions.py`, for gradients `training/registry.py`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from msgspec import Struct

from xrt_core.errors import PluginError, RegistrationError, ShapeError, UnsupportedError, XRTError
from xrt_core.ir.op_traits import Traits, register_traits, unregister_traits
from xrt_core.plugins import plugins

if TYPE_CHECKING:
    from xrt_core.ir.graph import Graph, Node

CORE_DOMAINS: Final = frozenset(("", "ai.onnx", "xrt"))
"""Domains that belong to the core; those of the `onnx` package are not open either."""

_STANDARD: Final = "ai.onnx"
"""The entry point of operators that a plugin adds to the standard's domain "", by names that ONNX does not use."""


class OperatorSchema(Protocol):
    """What is read here of a `xrt_core.ir.schema.Schema`, which an operator of a plugin has."""

    @property
    def domain(self) -> str: ...
    @property
    def op_type(self) -> str: ...
    @property
    def since_version(self) -> int: ...


class Operator(Struct, frozen=True):
    """One operator of a plugin.

    schema: its name, inputs, outputs, attributes and type inference (`Schema.infer`; without it the types are those of
        the lowering's results). `ir.schema.schema_of_onnx` makes one of an `onnx.defs.OpSchema`.
    kernel: the host's, `f(ctx, *inputs)`, as for `xrt_core.kernels.kernel`; static: indices of inputs whose values it,
        or the lowering, must know; dynamic: None, or why an engine of static shapes cannot run it (a sentence, or a
        function of the node). None: the host runs the lowering.
    lowering: from a node of known input types to a graph of ONNX operators whose inputs stand for the node's given ones
        and whose outputs for the wanted ones, or None for a node that it leaves.
    gradient: the rule, as for `xrt_core.training.registry.gradient`; without it gradients go through the lowering.
        is_constant: gradients end here.
    traits: its `Traits`, the row of `ir/op_traits.py`.
    engine_kernels: `xrt_core.engine.OpKernel`, of engines that compile node by node. An engine that took over the
        portable kernels (`register_portable_kernels`) has `kernel` as well.
    """

    schema: OperatorSchema
    kernel: Callable[..., Any] | None = None
    static: tuple[int, ...] = ()
    dynamic: str | Callable[[Node], str | None] | None = None
    lowering: Callable[[Node], Graph | None] | None = None
    gradient: Callable[[Any], Any] | None = None
    is_constant: bool = False
    traits: Any = None
    engine_kernels: Sequence[Any] = ()


class OperatorSet(Struct, frozen=True):
    """The operators of a domain.

    version: the newest one of the domain. find: the operator of a name that is not listed, or None; for a library that
    does not say what it has.
    """

    domain: str
    version: int
    operators: Sequence[Operator]
    find: Callable[[str], Operator | None] | None = None


@dataclass(frozen=True, slots=True)
class _Accepted:
    """A domain that is open.

    by_name: name -> its forms, the newest last. owners: (name, `since_version`) -> package. finders: the functions
    `OperatorSet.find`, with their packages.
    """

    version: int = 0
    by_name: dict[str, tuple[Operator, ...]] = field(default_factory=dict)
    owners: dict[tuple[str, int], str] = field(default_factory=dict)
    finders: Sequence[tuple[Callable[[str], Operator | None], str]] = ()


_lock = threading.RLock()
_domains: dict[str, _Accepted] = {}
_with_traits: dict[str, list[str]] = {}  # domain -> operators whose traits are registered
_generation = -1


def add_domain(plugin: object, domain: str, owner: str) -> None:
    """Make a domain known in this process, by an object with the hook `xrt_operators`. owner: for messages.

    Raises RegistrationError for a domain that the process has already.
    """
    if domain in plugins.added("xrt_operators"):
        raise RegistrationError(f"the domain {domain!r} is defined in this process already")
    plugins.add(plugin, domain, owner)


def remove_domain(plugin: object) -> None:
    """Take out what `add_domain` added, if it is there."""
    plugins.remove(plugin)


def find_operator(domain: str, op_type: str, version: int | None = None) -> Operator | None:
    """The operator of a plugin as of `version` of its domain, the newest one where that is None; None for any other.

    In the standard's domain a plugin may have operators by names that ONNX does not use.
    """
    if domain in CORE_DOMAINS and (domain != "" or _is_standard(op_type)):
        return None
    forms = _forms(domain, op_type)
    return next((o for o in reversed(forms) if version is None or o.schema.since_version <= version), None)


def operator_owner(operator: Operator) -> str:
    """The package that a plugin's operator comes from, with its version; "" for one that is not registered."""
    schema = operator.schema
    return _domain(schema.domain).owners.get((schema.op_type, schema.since_version), "")


def newest_version(domain: str) -> int:
    """The newest version of a plugin's domain, 0 for one that no plugin has."""
    return 0 if domain in CORE_DOMAINS else _domain(domain).version


def operator_versions(domain: str, op_type: str) -> list[int]:
    """The `since_version` of every form of a plugin's operator."""
    return [o.schema.since_version for o in _forms(domain, op_type)]


@functools.lru_cache(maxsize=1024)
def _is_standard(op_type: str) -> bool:
    import onnx

    return op_type == "" or bool(onnx.defs.has(op_type))


def plugin_domains() -> tuple[str, ...]:
    """The domains that installed packages say they have, and those that the program defined. Imports nothing."""
    return (*plugins.names("xrt.operators"), *plugins.added("xrt_operators"))


def _forms(domain: str, op_type: str) -> tuple[Operator, ...]:
    known = _domain(domain or _STANDARD)
    found = known.by_name.get(op_type)
    if found is None and known.finders:
        with _lock:
            for find, by in known.finders:
                made = find(op_type)
                if made is not None:
                    known.owners[op_type, made.schema.since_version] = by
                    return known.by_name.setdefault(op_type, (made,))
    return found or ()


def _domain(domain: str) -> _Accepted:
    global _generation
    with _lock:
        if _generation != plugins.generation:
            _domains.clear()
            while _with_traits:
                unregister_traits(*_with_traits.popitem())
        found = _domains.get(domain)
        if found is None:
            found = _domains[domain] = _accepted(domain) if domain in plugin_domains() else _Accepted()
        _generation = plugins.generation
        return found


def _accepted(domain: str) -> _Accepted:
    """The operators of a domain, checked; those of a set that is wrong are left out, with a problem."""
    version, by_name, owners = 0, dict[str, tuple[Operator, ...]](), dict[tuple[str, int], str]()
    finders: list[tuple[Callable[[str], Operator | None], str]] = []
    for _, by, row in plugins.contributions("xrt_operators", "xrt.operators", name=domain):
        if isinstance(row, OperatorSet) and (row.domain or _STANDARD) != domain:
            continue  # of another entry point
        keys = [] if (why := why_not(row)) else [(o.schema.op_type, o.schema.since_version) for o in row.operators]
        taken = next((k for k in keys if k in owners), None)
        if taken is not None:
            why = f"version {taken[1]} of {taken[0]} is defined by {owners[taken]} and by {by}"
        if why:
            plugins.problem(f"operators of {domain}", by, why)
            continue
        owners.update(dict.fromkeys(keys, by))
        finders += [(row.find, by)] if row.find is not None else []
        version = max(version, row.version)
        rows = {o.schema.op_type: o.traits for o in row.operators if o.traits is not None}
        register_traits(domain, rows, by=by)
        _with_traits.setdefault(domain, []).extend(rows)
        for o in row.operators:
            forms = (*by_name.get(o.schema.op_type, ()), o)
            by_name[o.schema.op_type] = tuple(sorted(forms, key=lambda o: o.schema.since_version))
    return _Accepted(version, by_name, owners, tuple(finders))


def why_not(row: Any) -> str:
    """What is wrong with a row of the hook `xrt_operators`, or "" for one that is right."""
    import onnx

    if not isinstance(row, OperatorSet):
        return f"the hook xrt_operators gives {row!r}, which is no OperatorSet"
    if row.domain != "" and (row.domain in CORE_DOMAINS or row.domain in onnx.defs.C.schema_version_map()):
        return f"the domain {row.domain!r} belongs to ONNX"
    if row.find is not None and not callable(row.find):
        return f"its find is {row.find!r}, which is no function"
    seen: set[tuple[str, int]] = set()
    for o in row.operators:
        if not isinstance(o, Operator) or not hasattr(o.schema, "since_version"):
            return f"{o!r} is no Operator with a Schema"
        name, since = o.schema.op_type, o.schema.since_version
        if row.domain == "" and (_is_standard(name) or o.kernel is not None or o.lowering is None):
            return f"{name} of the standard's domain must be one that ONNX has not, with a lowering alone"
        if o.schema.domain != row.domain:
            return f"the schema of {name} is of domain {o.schema.domain!r}, the set of {row.domain!r}"
        if not 1 <= since <= row.version:
            return f"{name} came with version {since!r} of the domain, whose newest is {row.version!r}"
        if (name, since) in seen:
            return f"{name} of version {since} is defined twice"
        seen.add((name, since))
        if o.traits is not None and not isinstance(o.traits, Traits):
            return f"the traits of {name} are {o.traits!r}, which is no Traits"
        for what in ("kernel", "lowering", "gradient"):
            given = getattr(o, what)
            if given is not None and not callable(given):
                return f"the {what} of {name} is {given!r}, which is no function"
        if o.kernel is None and o.lowering is None:
            return f"{name} has neither a kernel nor a lowering, so nothing could run it"
    return ""


def lowered(node: Node, lowering: Callable[[Node], Graph | None]) -> Graph | None:
    """Call a plugin's lowering of a node. Raises PluginError if it fails or returns anything but a fitting Graph;
    where it says itself what is wrong with the node, ShapeError or UnsupportedError."""
    try:
        body = lowering(node)
    except KeyboardInterrupt:
        raise
    except (ShapeError, UnsupportedError) as e:
        said = str(e)
        if repr(node.name) not in said:
            types = ", ".join("_" if v is None else str(v.type) for v in node.inputs)
            said = f"node {node.name!r} ({node.operator} of {types}): {said}"
        kind = ShapeError if isinstance(e, ShapeError) else UnsupportedError
        raise kind(said) from e
    except BaseException as e:
        raise PluginError(f"the lowering of {node.operator} failed for node {node.name!r}: {e!r}") from e
    if body is None:
        return None
    from xrt_core.ir.graph import Graph

    given, wanted = sum(v is not None for v in node.inputs), sum(v is not None for v in node.outputs)
    if not isinstance(body, Graph) or (len(body.inputs), len(body.outputs)) != (given, wanted):
        raise PluginError(
            f"the lowering of {node.operator} gave {body!r} for node {node.name!r}; a Graph of {given} inputs and "
            f"{wanted} outputs is needed"
        )
    return body


def types_by_lowering(node: Node, lowering: Callable[[Node], Graph | None]) -> tuple[Any, ...]:
    """Types of a node's outputs: those of what it is lowered to; None while an input's type is not known.

    Raises ShapeError where the lowering says that the node's inputs do not fit it.
    """
    body = None
    if all(v is None or v.type is not None for v in node.inputs):
        try:
            body = lowered(node, lowering)
        except UnsupportedError as e:
            raise ShapeError(str(e)) from e
        except PluginError as e:
            if isinstance(e.__cause__, XRTError):
                raise ShapeError(f"node {node.name!r} ({node.operator}): {e.__cause__}") from e
            raise
    types = iter([] if body is None else [v.type for v in body.outputs])
    return tuple(None if v is None else next(types, None) for v in node.outputs)

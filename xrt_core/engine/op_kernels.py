"""The op-kernel registry: kernels of engines that compile node by node, and the answer to "does it support this?".

    @op_kernel("Relu", engine="acme", devices=("cuda",), train=True)
    def relu(ctx, x): ...

What a kernel is called with is between an engine and its kernels; XRT's convention is `kernel(ctx, *inputs)` with an
`OpContext` (or the engine's subclass of it), as for portable kernels. What kernels declare about nodes that write
variables becomes annotations of these nodes by `mark_updates`.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import FunctionType, MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from msgspec import Struct

from xrt_core.engine.device_kinds import kinds
from xrt_core.engine.registry import miss
from xrt_core.errors import RegistrationError
from xrt_core.ir.graph import Graph, Node, Phase, Support, Value
from xrt_core.ir.operator_set import CORE_DOMAINS, find_operator
from xrt_core.ir.types import TensorType, dtype_name
from xrt_core.kernels.registry import PortableKernel, find_kernel, portable_kernels
from xrt_core.kernels.standard import standard_kernels

if TYPE_CHECKING:
    from xrt_core.ir.schema import Schema

F = TypeVar("F", bound=Callable[..., Any])


class OpKernel(Struct, frozen=True):
    """A kernel of an engine.

    function: the kernel. devices: kinds of devices it runs on. train: usable in the training phase.
    static: indices of inputs whose values must be known at compile time.
    dtypes: element dtypes its tensor inputs may have (None: what the engine as a whole takes).
    check: a further test of a node, giving a `Support`.
    mutable_variables: indices of inputs that are variables and that it writes: the k-th of them takes the k-th output
        of a node with as many outputs, in its own storage where the caller hands that over (`InputOutputAlias`).
    model_update: it is an optimiser's update. Its nodes run in training only (which implies `train`), in clusters of
        updates. Nodes of a kernel that declares either are never merged, folded or computed again; see
        `mark_updates`.
    """

    engine: str
    domain: str
    op_type: str
    function: Callable[..., Any]
    devices: tuple[str, ...]
    train: bool = False
    static: tuple[int, ...] = ()
    dtypes: frozenset[np.dtype] | None = None
    check: Callable[[Node], Support] | None = None
    mutable_variables: tuple[int, ...] = ()
    model_update: bool = False


class OpKernelRegistry:
    """Kernels by (engine, domain, operator). Registering one twice is an error that names both."""

    def __init__(self) -> None:
        self._kernels: dict[tuple[str, str, str], OpKernel] = {}
        self._portable: dict[str, tuple[str, ...]] = {}  # engines that took the portable kernels -> their devices

    def register(self, entry: OpKernel) -> None:
        """Add a kernel. Raises RegistrationError: taken, no device, not callable with a context.

        Whether the operator and the device kinds exist is asked in `validate`: importing an engine must not import
        onnx, and its package may bring a kind of its own.
        """
        where = _where(entry)
        if not entry.engine or not entry.op_type:
            raise RegistrationError(f"{where}: engine and operator must be named")
        if not callable(entry.function):
            raise RegistrationError(f"{where}: {entry.function!r} is not callable; it must be kernel(ctx, *inputs)")
        _check_signature(entry, where)
        if isinstance(entry.devices, str) or not entry.devices:
            raise RegistrationError(f"{where}: devices is {entry.devices!r}; expected a tuple such as ('cpu', 'cuda')")
        key = (entry.engine, entry.domain, entry.op_type)
        taken = self._kernels.get(key)
        if taken is not None:
            raise RegistrationError(
                f"{where} is registered twice: by {_origin(taken.function)} and by {_origin(entry.function)}"
            )
        self._kernels[key] = entry

    def find(self, engine: str, domain: str, op_type: str) -> OpKernel | None:
        """The kernel, or None."""
        found = self._kernels.get((engine, domain, op_type))
        return self._of_plugin(engine, domain, op_type) if found is None and domain not in CORE_DOMAINS else found

    def take_portable(self, engine: str, devices: tuple[str, ...]) -> None:
        """Give `engine` every portable kernel for which it has none. See `register_portable_kernels`."""
        self._portable[engine] = devices
        for (domain, op_type), portable in portable_kernels().items():
            if (engine, domain, op_type) not in self._kernels:
                self.register(_of_portable(engine, portable, devices))

    def _of_plugin(self, engine: str, domain: str, op_type: str) -> OpKernel | None:
        """The kernel that a plugin's operator brings for an engine, or that of the host for one that took those."""
        own = find_operator(domain, op_type)
        if own is None:
            return None
        brought = next((k for k in own.engine_kernels if isinstance(k, OpKernel) and k.engine == engine), None)
        portable = find_kernel(domain, op_type)
        if brought is not None or portable is None or engine not in self._portable:
            return brought
        return _of_portable(engine, portable, self._portable[engine])

    def of_engine(self, engine: str) -> Mapping[tuple[str, str], OpKernel]:
        """Every kernel of one engine by (domain, operator); read-only."""
        return MappingProxyType({(d, o): k for (e, d, o), k in self._kernels.items() if e == engine})

    def validate(self, engine: str) -> None:
        """Check the kernels of one engine against the operators there are; needs the onnx package, so not at import.

        Raises RegistrationError, listing every kernel of an operator or a device kind that does not exist, that cannot
        be called with as many inputs as its operator has, or whose `static` or `mutable_variables` name an input that
        there is not.
        """
        from xrt_core.ir.schema import latest_schemas

        entries = self.of_engine(engine)
        schemas, known = latest_schemas(entries), kinds.names()
        faults = [fault for key, entry in entries.items() if (fault := _fault(entry, schemas[key], known))]
        if faults:
            raise RegistrationError("\n".join(faults))

    def strays(self, package: str, known: Collection[str]) -> list[str]:
        """A sentence for each kernel that the top-level module `package` registered for an engine that is not known.

        Portable kernels do not count: engines of any package take them over.
        """
        return [
            f"{_where(k)}, by {_origin(k.function)}: there is no engine {k.engine!r}; expected one of "
            f"{', '.join(sorted(known))}"
            for k in self._kernels.values()
            if k.engine not in known
            and str(getattr(k.function, "__module__", "")).partition(".")[0] == package
            and ((portable := find_kernel(k.domain, k.op_type)) is None or portable.function is not k.function)
        ]

    def supports(self, engine: str, node: Node, device: str, phase: Phase) -> Support:
        """Whether `engine` has a kernel that takes `node` on `device` in `phase`, or why not."""
        entry = self.find(engine, node.domain, node.op_type)
        if entry is None:
            return Support.no(f"{engine} has no kernel for {node.operator}")
        kind = device.partition(":")[0]
        if kind not in entry.devices:
            return Support.no(f"{engine}'s kernel for {node.operator} runs on {', '.join(entry.devices)}, not {kind}")
        if phase == "train" and not (entry.train or entry.model_update):
            return Support.no(f"{engine}'s kernel for {node.operator} is not for training")
        inputs = node.inputs
        for i in entry.static:
            if i < len(inputs) and (v := inputs[i]) is not None and v.data is None:
                return Support.no(f"input {i} ({v.name!r}) of {node.operator} must be known at compile time")
        if entry.dtypes is not None:
            for v in inputs:
                t = v.type if v is not None else None
                if isinstance(t, TensorType) and t.dtype is not None and t.dtype not in entry.dtypes:
                    return Support.no(f"{engine}'s kernel for {node.operator} does not take {dtype_name(t.dtype)}")
        return entry.check(node) if entry.check is not None else Support.yes()


op_kernels = OpKernelRegistry()
"""The registry that `op_kernel` fills and the engines ask."""


def op_kernel(
    *op_types: str,
    engine: str,
    devices: tuple[str, ...] = ("cpu",),
    domain: str = "",
    train: bool = False,
    static: tuple[int, ...] = (),
    dtypes: frozenset[np.dtype] | None = None,
    check: Callable[[Node], Support] | None = None,
    mutable_variables: tuple[int, ...] = (),
    model_update: bool = False,
    registry: OpKernelRegistry = op_kernels,
) -> Callable[[F], F]:
    """Register the decorated function as `engine`'s kernel of these operators. See `OpKernel` for the arguments."""

    def decorate(function: F) -> F:
        for op_type in op_types:
            registry.register(
                OpKernel(
                    engine, domain, op_type, function, devices, train, static, dtypes, check, mutable_variables,
                    model_update,
                )
            )  # fmt: skip
        return function

    return decorate


def register_portable_kernels(
    engine: str, devices: tuple[str, ...], *, registry: OpKernelRegistry = op_kernels
) -> None:
    """Give `engine` every portable kernel for which it has registered none of its own.

    Call it after the engine's own kernels; operators whose output shape depends on data are refused per node.
    """
    registry.take_portable(engine, devices)


def register_standard_kernels(
    engine: str, devices: tuple[str, ...], *, registry: OpKernelRegistry = op_kernels
) -> None:
    """Give `engine` the kernels over the array API standard (`kernels.standard`) for which it has none of its own.

    They are for libraries whose arrays are not like NumPy's; `ctx.xp` must be a namespace of the standard.
    """
    for op_type, k in standard_kernels().items():
        if registry.find(engine, "", op_type) is None:
            registry.register(
                OpKernel(engine, "", op_type, k.function, devices, True, k.static, dtypes=k.dtypes, check=k.check)
            )


def _of_portable(engine: str, portable: PortableKernel, devices: tuple[str, ...]) -> OpKernel:
    return OpKernel(
        engine, portable.domain, portable.op_type, portable.function, devices, portable.train, portable.static,
        check=_refuse_dynamic if portable.dynamic is not None else None,
    )  # fmt: skip


def _refuse_dynamic(node: Node) -> Support:
    portable = find_kernel(node.domain, node.op_type)
    why = portable.why_dynamic(node) if portable is not None else None
    return Support.yes() if why is None else Support.no(why)


def _takes(function: Callable[..., Any], least: int) -> bool:
    """Whether the code of a plain function tells that it can be called with the context and `least` inputs.

    Asked first, because `inspect.signature` takes 20 times as long, and an engine has hundreds of kernels.
    """
    if type(function) is not FunctionType or hasattr(function, "__wrapped__"):
        return False
    code = function.__code__
    if code.co_kwonlyargcount > len(function.__kwdefaults__ or ()):
        return False
    required = code.co_argcount - len(function.__defaults__ or ())
    return required <= least + 1 and (least < code.co_argcount or bool(code.co_flags & inspect.CO_VARARGS))


def _check_signature(entry: OpKernel, where: str) -> None:
    code = getattr(entry.function, "__code__", None)
    if type(entry.function) is FunctionType and code is not None and code.co_argcount:
        return
    try:
        signature = inspect.signature(entry.function)
    except (TypeError, ValueError):  # builtins tell nothing
        return
    try:
        signature.bind_partial(None)
    except TypeError:
        raise RegistrationError(
            f"{where}: the signature {signature} must begin with the context: (ctx, *inputs)"
        ) from None


def _fault(entry: OpKernel, schema: Schema | None, known: Sequence[str]) -> str:
    """What is wrong with a kernel, or "". schema: the newest of its operator. known: names of device kinds."""
    where = f"{_where(entry)}, by {_origin(entry.function)}"
    unknown = [d for d in entry.devices if d not in known]
    if unknown:
        return f"{where}: {miss('device kind', unknown[0], list(known))}"
    if schema is None:
        from xrt_core.ir.schema import domain_version, normal_domain, why_unknown

        domain = normal_domain(entry.domain)
        if find_kernel(domain, entry.op_type) is not None:  # newer than the installed onnx package
            return ""
        return f"{where}: {why_unknown(entry.op_type, domain, domain_version(domain))}"
    for what, indices in (("static", entry.static), ("mutable_variables", entry.mutable_variables)):
        for i in indices:
            if not 0 <= i < schema.max_inputs:
                return f"{where}: {what} names input {i}; {schema.operator} has {schema.max_inputs}"
    if _takes(entry.function, schema.min_inputs):
        return ""
    try:
        signature = inspect.signature(entry.function)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(None, *[None] * schema.min_inputs)
    except TypeError:
        return (
            f"{where}: the signature {signature} does not take the context and {schema.min_inputs} inputs, which "
            f"{schema.operator} has at least; expected (ctx, *inputs)"
        )
    return ""


def _where(entry: OpKernel) -> str:
    return f"kernel {entry.domain or 'ai.onnx'}.{entry.op_type} of engine {entry.engine!r}"


def _origin(function: Any) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"


def mark_updates(
    graph: Graph, engines: Iterable[str], *, aliases: bool = True, registry: OpKernelRegistry = op_kernels
) -> Graph:
    """The graph with `model_update` on every node for whose operator a kernel of `engines` declares that it writes
    variables, the phase "train" where the kernel is a model update, and aliases for its mutable variables.

    The k-th mutable variable of a kernel is aliased with the k-th output of a node that has as many outputs. It must
    be an input of the graph, of one alias alone, that is not returned as it is: any other value has storage that
    somebody else may read. aliases: False for a graph whose inputs are not the caller's to hand over, such as the body
    of a loop. Nodes that are marked as updates already, as a training step's are, say all that there is to say.
    """
    names = tuple(engines)
    declared = {i: k for i, n in enumerate(graph.nodes) if (k := _declaration(n, names, registry)) is not None}
    if not declared:
        return graph
    states = set(graph.inputs).difference(graph.outputs) if aliases else set()
    pairs = {i: _pairs(graph.nodes[i], k, states) for i, k in declared.items()}
    written = Counter(graph.nodes[i].inputs[index] for i, found in pairs.items() for _, index in found)
    nodes = list(graph.nodes)
    for i, kernel in declared.items():
        node, own = nodes[i], nodes[i].annotations
        nodes[i] = node.replace(
            annotations=own.replace(
                model_update=True,
                phase="train" if kernel.model_update else own.phase,
                aliases=own.aliases or tuple(p for p in pairs[i] if written[node.inputs[p[1]]] == 1),
            )
        )
    return graph.replace(nodes=nodes)


def _declaration(node: Node, engines: Sequence[str], registry: OpKernelRegistry) -> OpKernel | None:
    """The first kernel that declares the node to write variables; None for a node that no kernel does so for."""
    if node.annotations.model_update:
        return None
    found = (registry.find(e, node.domain, node.op_type) for e in engines)
    return next((k for k in found if k is not None and (k.model_update or k.mutable_variables)), None)


def _pairs(node: Node, kernel: OpKernel, states: set[Value]) -> tuple[tuple[int, int], ...]:
    """(output, input) for each mutable variable of the node that may be written in place."""
    if len(kernel.mutable_variables) != len(node.outputs):
        return ()
    return tuple(
        (k, i)
        for k, i in enumerate(kernel.mutable_variables)
        if i < len(node.inputs) and node.outputs[k] is not None and node.inputs[i] in states
    )

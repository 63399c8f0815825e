"""The host as an engine: the reference that passes the whole kit, and an engine for tests without any library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from xrt_core.engine.contract import (
    DEFAULT_RUN_OPTIONS,
    CompileOptions,
    Engine,
    EngineStatus,
    Executable,
    Function,
    GraphCompiler,
    InputOutputAlias,
    Parameter,
    Phase,
    RunOptions,
    Support,
)
from xrt_core.errors import CompileError, EngineUnavailableError, ExecutionError, OptionError, XRTError
from xrt_core.host.executor import host_kernel
from xrt_core.ir.graph import Node
from xrt_core.ir.types import STRING, TensorType
from xrt_core.kernels import find_kernel
from xrt_core.runtime.arrays import to_numpy
from xrt_core.runtime.plan import HOST, Lowered, Plan, make_plan


class HostExecutable(Executable):
    """A Function as a plan of host kernels; an aliased output is written into its input's array."""

    def __init__(
        self,
        function: Function,
        entry_params: Sequence[Parameter],
        return_params: Sequence[Parameter],
        aliases: Sequence[InputOutputAlias],
    ) -> None:
        self.function = function
        self.entry_params = tuple(entry_params)
        self.return_params = tuple(return_params)
        self.aliases = tuple(aliases)
        self._plan: Plan = make_plan(function.body, lambda n: Lowered(host_kernel(n), HOST, n.operator))

    def run(
        self, inputs: Sequence[Any], run_options: RunOptions = DEFAULT_RUN_OPTIONS, block_until_done: bool = True
    ) -> Sequence[Any]:
        """Run once, on NumPy arrays. Raises ExecutionError, naming the input, for inputs that do not fit."""
        if len(inputs) != len(self.entry_params):
            raise ExecutionError(f"the executable takes {len(self.entry_params)} inputs, {len(inputs)} were given")
        try:
            arrays = [to_numpy(x) for x in inputs]
        except XRTError as e:
            raise ExecutionError(f"an input is not an array: {e}") from e
        for p, x in zip(self.entry_params, arrays, strict=True):
            if not isinstance(x, np.ndarray) or x.dtype != p.dtype or not p.fits(x.shape):
                given = f"{x.dtype}{list(x.shape)}" if isinstance(x, np.ndarray) else type(x).__name__
                raise ExecutionError(f"input {p.name!r} must be {p.type}, {given} was given")
        results = [np.asarray(r) for r in self._plan.run(arrays)]
        if run_options.donate:
            for a in self.aliases:
                target = inputs[a.input]
                if type(target) is np.ndarray and target.flags.writeable:
                    np.copyto(target, results[a.output])
                    results[a.output] = target
        return results

    def serialize(self) -> bytes:
        """The Function as an ONNX model, which is all that the host needs."""
        from xrt_core.frontends.onnx_export import export_function

        return bytes(export_function(self.function).SerializeToString())

    def as_text(self) -> str:
        """The steps."""
        return self._plan.as_text()


class HostCompiler(GraphCompiler):
    """Makes plans of host kernels."""

    def compile(
        self,
        function: Function,
        entry_params: Sequence[Parameter],
        return_params: Sequence[Parameter],
        aliases: Sequence[InputOutputAlias],
    ) -> Executable:
        """A plan. Raises CompileError, naming the node, for an operator that the host does not have."""
        for node in function.body.nodes:
            if find_kernel(node.domain, node.op_type) is None:
                raise CompileError(f"{function.name!r}: node {node.name!r}: there is no portable {node.operator}")
        return HostExecutable(function, entry_params, return_params, aliases)

    def load(self, blob: bytes) -> Executable:
        """What `serialize` gave `blob` for. Raises CompileError for anything else."""
        from xrt_core.frontends.onnx_import import import_function

        try:
            function = import_function(blob)
        except XRTError as e:
            raise CompileError(f"this is not a serialised host executable: {e}") from e
        return HostExecutable(function, function.params, function.returns, function.aliases)


class HostEngine(Engine):
    """Every operator that has a portable kernel and a static result, computed by NumPy. Never chosen by itself."""

    name = "host_reference"
    priority: ClassVar[Mapping[Phase, int]] = MappingProxyType({"train": -100, "inference": -100})
    conformance: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {"serialisation": True, "in_place": True, "toolkit": ()}
    )

    def probe(self) -> EngineStatus:
        """NumPy is always there."""
        return EngineStatus(True, np.__version__, ("cpu",))

    def supports(self, node: Node, device: str, phase: Phase) -> Support:
        """Whether every tensor around `node` is static and numeric, and a portable kernel computes it."""
        if node.subgraphs:
            return Support.no(f"{node.operator} has subgraphs; the plan runs single operators")
        for v in (*node.inputs, *node.outputs):
            if v is None:
                continue
            if not isinstance(v.type, TensorType) or not v.type.is_static:
                return Support.no(f"the type of {v.name!r} is {v.type or 'unknown'}, not a static tensor")
            if v.type.dtype == STRING:
                return Support.no(f"{v.name!r} holds strings")
        portable = find_kernel(node.domain, node.op_type)
        if portable is None:
            return Support.no(f"there is no portable kernel of {node.operator}")
        why = portable.why_dynamic(node)
        if why is not None:
            return Support.no(why)
        for i in portable.static:
            if i < len(node.inputs) and (given := node.inputs[i]) is not None and given.data is None:
                return Support.no(f"input {i} ({given.name!r}) of {node.operator} must be known at compile time")
        if phase == "train" and not portable.train:
            return Support.no(f"{node.operator} has no gradient")
        return Support.yes()

    def compiler(self, device: str, options: CompileOptions) -> GraphCompiler:
        """A compiler for "cpu". Raises EngineUnavailableError for any other device."""
        if device != "cpu":
            raise EngineUnavailableError(f"{self.name}: no device {device!r} here; it has cpu")
        if options.extra:
            raise OptionError(f"{self.name}: unknown option {sorted(options.extra)[0]!r}; it takes none")
        return HostCompiler()

    def fingerprint(self, device: str) -> str:
        """NumPy's version: plans hold nothing of the machine."""
        return f"numpy {np.__version__}"

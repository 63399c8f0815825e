"""{{ cookiecutter.__class }}GraphCompiler: walks a Function in topological order and puts the kernels' calls in a list."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from xrt_core.engine.contract import CompileOptions, Function, GraphCompiler, InputOutputAlias, Parameter
from xrt_core.engine.op_kernels import op_kernels
from xrt_core.errors import CompileError, OptionError
from xrt_core.ir.graph import Node, Value
from xrt_core.kernels import OpContext

from {{ cookiecutter.__module }} import _toolkit
from {{ cookiecutter.__module }}.executable import {{ [cookiecutter.__class ~ 'Executable', 'Step']|sort|join(', ') }}


class {{ cookiecutter.__class }}GraphCompiler(GraphCompiler):
    """Compiles Functions for one device. It keeps no state between compilations, so any thread may call it."""

    # YOUR ENGINE: what `xrt inspect` shows, in the order of compilation; the last is the text of the executable.
    stages = MappingProxyType({"compiled": "what was compiled, as the executable shows it"})

    def __init__(self, device: str, options: CompileOptions) -> None:
        # YOUR ENGINE: options of your own come in `extra`; refuse those that you do not know. Look at the other fields
        # too: `fused=False` asks for a build without your fusions, which the guard compares with. One call per node,
        # as here, is such a build.
        if options.extra:
            unknown = sorted(options.extra)[0]
            raise OptionError(f"{{ cookiecutter.engine }}: unknown option {unknown!r}; it takes none of its own")
        self._device = _toolkit.device_named(device)

    def compile(
        self,
        function: Function,
        entry_params: Sequence[Parameter],
        return_params: Sequence[Parameter],
        aliases: Sequence[InputOutputAlias],
    ) -> {{ cookiecutter.__class }}Executable:
        """The list of calls for `function`. Raises CompileError, naming the node that has no kernel."""
        registers = _Registers(function.body.inputs, self._device)
        # YOUR ENGINE: this is where a compiler earns its name: fuse neighbours, choose layouts, plan memory.
        steps = [_step(node, registers) for node in function.body.nodes]
        results = [registers.of(value) for value in function.body.outputs]
        kept = {*range(len(entry_params)), *registers.constants, *results}
        return {{ cookiecutter.__class }}Executable(
            _with_deaths(steps, kept), registers.initial, entry_params, return_params, results, aliases, self._device
        )


class _Registers:
    """Numbers for the values of a Function: entries first, then constants and results as they come up.

    initial: what each register holds before the first step; None for entries and results.
    """

    def __init__(self, entries: Sequence[Value], device: str) -> None:
        self.initial: list[Any] = [None] * len(entries)
        self._device = device
        self._numbers: dict[tuple[Value, bool], int] = {(v, False): i for i, v in enumerate(entries)}

    @property
    def constants(self) -> set[int]:
        """The registers that hold constants."""
        return {i for i, array in enumerate(self.initial) if array is not None}

    def of(self, value: Value, *, on_host: bool = False) -> int:
        """The register of a value. on_host: of a constant as the NumPy array that a kernel wants to look at."""
        key = value, on_host
        if key not in self._numbers:
            if value.data is None:
                raise CompileError(f"{{ cookiecutter.engine }}: {value.name!r} is read before it is computed")
            data = np.asarray(value.data)
            self._numbers[key] = self._add(data if on_host else _toolkit.put(data, self._device))
        return self._numbers[key]

    def new(self, value: Value) -> int:
        """The register that `value` is computed into."""
        self._numbers[value, False] = number = self._add(None)
        return number

    def _add(self, array: Any) -> int:
        self.initial.append(array)
        return len(self.initial) - 1


def _step(node: Node, registers: _Registers) -> Step:
    entry = op_kernels.find("{{ cookiecutter.engine }}", node.domain, node.op_type)
    if entry is None:
        raise CompileError(f"{{ cookiecutter.engine }}: no kernel for node {node.name!r} ({node.operator}-{node.version})")
    inputs = tuple(
        None if v is None else registers.of(v, on_host=i in entry.static and v.data is not None)
        for i, v in enumerate(node.inputs)
    )
    outputs = tuple(None if v is None else registers.new(v) for v in node.outputs)
    return Step(node.name or node.operator, entry.function, OpContext(node, _toolkit.xp), inputs, outputs)


def _with_deaths(steps: Sequence[Step], kept: set[int]) -> list[Step]:
    """The steps, each with the registers that nobody reads after it, so that memory is given back early."""
    seen, done = set(kept), []
    for step in reversed(steps):
        touched = {i for i in (*step.inputs, *step.outputs) if i is not None}
        done.append(step.with_deaths(tuple(sorted(touched - seen))))
        seen |= touched
    return done[::-1]

"""{{ cookiecutter.__class }}Executable: an ordered list of kernel calls and the registers that they read and write."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from xrt_core.engine.contract import DEFAULT_RUN_OPTIONS, Executable, InputOutputAlias, Parameter, RunOptions
from xrt_core.errors import ExecutionError
from xrt_core.kernels import OpContext

from {{ cookiecutter.__module }} import _toolkit


@dataclass(frozen=True, slots=True)
class Step:
    """One kernel call. inputs, outputs: registers, None for what is left out. deaths: registers to clear after it."""

    node: str
    kernel: Callable[..., Any]
    context: OpContext
    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    deaths: tuple[int, ...] = ()

    def with_deaths(self, deaths: tuple[int, ...]) -> Step:
        """This step, which also clears registers."""
        return dataclasses.replace(self, deaths=deaths)

    def __str__(self) -> str:
        left = ", ".join("_" if i is None else f"%{i}" for i in self.outputs)
        right = ", ".join("_" if i is None else f"%{i}" for i in self.inputs)
        return f"{left} = {self.context.node.operator}({right})  # {self.node}"


class {{ cookiecutter.__class }}Executable(Executable):
    """Runs the steps. Registers belong to a call, so any number of threads may run it at once.

    initial: the content of every register before the first step. results: the registers that are returned.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        initial: Sequence[Any],
        entry_params: Sequence[Parameter],
        return_params: Sequence[Parameter],
        results: Sequence[int],
        aliases: Sequence[InputOutputAlias],
        device: str,
    ) -> None:
        self._steps, self._initial = tuple(steps), list(initial)
        self._entries, self._returns = tuple(entry_params), tuple(return_params)
        self._results, self._aliases, self._device = tuple(results), tuple(aliases), device
        self._constants = frozenset(id(array) for array in initial if array is not None)

    def run(
        self, inputs: Sequence[Any], run_options: RunOptions = DEFAULT_RUN_OPTIONS, block_until_done: bool = True
    ) -> Sequence[Any]:
        """Run once, on NumPy arrays or arrays of the library; gives the library's. Raises ExecutionError."""
        self._check_inputs(inputs)
        registers = list(self._initial)
        try:
            registers[: len(inputs)] = arrays = [_toolkit.put(x, self._device) for x in inputs]
            with _toolkit.computing(self._device, run_options.stream):
                for step in self._steps:
                    _run_step(step, registers)
                results = self._collect(registers, arrays)
            if run_options.donate:
                for alias in self._aliases:  # the last of all: nobody reads the old value any more
                    results[alias.output] = _toolkit.write_into(arrays[alias.input], results[alias.output])
            if block_until_done:
                _toolkit.wait_for(results)
        except ExecutionError:
            raise
        except Exception as e:
            raise ExecutionError(f"{{ cookiecutter.engine }}: {type(e).__name__}: {e}") from e
{%- if cookiecutter.devices == "other" %}
        return [_toolkit.on_device(r, self._device) for r in results]
{%- else %}
        return results
{%- endif %}

    def _check_inputs(self, inputs: Sequence[Any]) -> None:
        if len(inputs) != len(self._entries):
            raise ExecutionError(
                f"{{ cookiecutter.engine }}: the executable takes {len(self._entries)} inputs, {len(inputs)} were given"
            )
        for p, x in zip(self._entries, inputs, strict=True):
            dtype, shape = _toolkit.dtype_of(x), getattr(x, "shape", None)
            if dtype != p.dtype or shape is None or tuple(shape) != p.shape:
                given = type(x).__name__ if dtype is None or shape is None else f"{dtype}{list(shape)}"
                raise ExecutionError(f"{{ cookiecutter.engine }}: input {p.name!r} must be {p.type}, {given} was given")

    def _collect(self, registers: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
        """The results, of the types that were declared, none sharing memory with another array."""
        held = {*self._constants, *map(id, arrays)}
        results = []
        for p, number in zip(self._returns, self._results, strict=True):
            array = _toolkit.owned(registers[number], held)
            if _toolkit.dtype_of(array) != p.dtype or tuple(array.shape) != p.shape:
                raise ExecutionError(
                    f"{{ cookiecutter.engine }}: result {p.name!r} is declared as {p.type}, and came out as "
                    f"{array.dtype}{list(array.shape)}"
                )
            held.add(id(array))
            results.append(array)
        return results

    # YOUR ENGINE: `serialize` here, and `load` in the compiler, let XRT keep executables on disk between processes. It
    # pays where compiling takes long; these lists are made in microseconds, so this engine has neither.

    def as_text(self) -> str:
        """The calls, one a line."""
        return "\n".join([f"on {self._device}: {len(self._steps)} calls", *map(str, self._steps)])

    def __repr__(self) -> str:
        counts = f"{len(self._entries)} in, {len(self._steps)} calls, {len(self._returns)} out"
        return f"<{{ cookiecutter.__class }}Executable: {counts}>"


def _run_step(step: Step, registers: list[Any]) -> None:
    try:
        results = step.kernel(step.context, *(None if i is None else registers[i] for i in step.inputs))
    except Exception as e:
        raise ExecutionError(
            f"{{ cookiecutter.engine }}: {step.context.node.operator} {step.node!r} failed: {type(e).__name__}: {e}"
        ) from e
    if not isinstance(results, tuple):
        results = (results,)
    for i, number in enumerate(step.outputs):
        if number is not None:
            if i >= len(results) or results[i] is None:
                raise ExecutionError(
                    f"{{ cookiecutter.engine }}: the kernel of {step.context.node.operator} {step.node!r} gave no output {i}"
                )
            registers[number] = _toolkit.xp.asarray(results[i])
    for number in step.deaths:
        registers[number] = None

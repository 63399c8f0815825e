"""XlaExecutable: a compiled XLA program with its weights on the device, called with as little ceremony as possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from xrt_core.engine.contract import DEFAULT_RUN_OPTIONS, Executable, InputOutputAlias, Parameter, RunOptions
from xrt_core.errors import ExecutionError, UnsupportedError
from xrt_xla import _toolkit
from xrt_xla._toolkit import jax, jnp, x64
from xrt_xla.blob import Stored, pack
from xrt_xla.program import program_order

_SMALL: Final = 1 << 14  # bytes, which are copied in 0.3 us
_NARROW: Final = 4  # bytes of an element; wider ones need JAX's 64-bit mode in each call
_array, _ndarray = np.array, np.ndarray


class XlaExecutable(Executable):
    """A program compiled ahead of time.

    Large NumPy inputs whose memory is 64-byte aligned are read in place. Results are fresh `jax.Array`s, except those
    that live in the storage of a donated input: a `jax.Array` given for an aliased input is consumed by the call.

    linalg: whether the program may call LAPACK. program: its serialised form, where it was loaded from that.
    """

    fixed_results = True

    def __init__(
        self,
        compiled: Any,
        weights: Sequence[Any],
        entry_params: Sequence[Parameter],
        outputs: int,
        aliases: Sequence[InputOutputAlias],
        device: Any,
        linalg: bool,
        program: bytes | None = None,
    ) -> None:
        self._compiled = compiled
        self._weights = tuple(weights)
        self._params = tuple(entry_params)
        self._outputs = outputs
        self._aliases = tuple(sorted(aliases, key=lambda a: a.input))
        self._donated = tuple(a.input for a in self._aliases)
        order = program_order(outputs, self._aliases)
        self._order = tuple(order.index(i) for i in range(outputs)) if self._aliases else None
        self._device = device
        self._linalg = linalg
        places = tuple(compiled.input_shardings[0])
        self._spanning = places if any(map(_toolkit.is_spanning, places)) else ()
        self._payload = program  # of a loaded one: XLA serialises only what it compiled itself

    def devices(self) -> tuple[str, ...]:
        """Where XLA runs it, by the shardings of the compiled program."""
        found = [s.device_set for s in _toolkit.jax.tree_util.tree_leaves(self._compiled.output_shardings)]
        return tuple(_toolkit.name_of(d) for d in sorted(set().union(*found), key=lambda d: int(d.id)))

    def run(
        self, inputs: Sequence[Any], run_options: RunOptions = DEFAULT_RUN_OPTIONS, block_until_done: bool = True
    ) -> Sequence[Any]:
        """Run once. Inputs are NumPy or JAX arrays of the entries' dtypes and shapes; results are JAX arrays.

        With block_until_done=False a NumPy input must stay as it is until the results are there.
        """
        if self._spanning:
            return self._run_spanning(inputs)
        if self._donated:
            if not run_options.donate:
                inputs = self._with_copies(inputs)
            if _toolkit.checks_numbers():  # JAX would raise after the donated inputs are gone
                return self._run_pinned(inputs)
        results: Sequence[Any]
        try:
            before = x64.get_local()
            try:
                x64.set_local(True)  # without it 64-bit NumPy inputs are cut to 32 bits
                results = self._compiled(*inputs, *self._weights)
            finally:
                x64.set_local(before)
            if block_until_done:
                results[0].block_until_ready()  # one event of XLA says that a program on one device is done, or failed
        except Exception:  # often the caller's own configuration (debug_nans, disable_jit, ...) gets in the way
            return self._run_pinned(inputs)
        return results if self._order is None else [results[i] for i in self._order]

    def _run_spanning(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Run once, with all other processes of the mesh. A failure is not tried again: the others would not join."""
        try:
            with _toolkit.pinned():
                arrays = [_toolkit.spread(x, p) for x, p in zip(inputs, self._spanning, strict=False)]
                results: Sequence[Any] = _toolkit.wait_for(self._compiled(*arrays, *self._weights))
            return results if self._order is None else [results[i] for i in self._order]
        except Exception as e:
            why = _complaint(self._params, inputs) or f"{type(e).__name__}: {e}"
            raise ExecutionError(f"xla: {_toolkit.TOGETHER}: {why}") from e

    def _run_pinned(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Run once under the engine's own configuration, and wait. Raises ExecutionError with the cause."""
        try:
            with _toolkit.pinned():
                results: Sequence[Any] = _toolkit.wait_for(self._compiled(*self._here(inputs), *self._weights))
            return results if self._order is None else [results[i] for i in self._order]
        except Exception as e:
            raise ExecutionError(f"xla: {_complaint(self._params, inputs) or f'{type(e).__name__}: {e}'}") from e

    def _here(self, inputs: Sequence[Any]) -> list[Any]:
        """The inputs, with those arrays of JAX brought here that lie elsewhere: compiled calls refuse them."""
        places = self._compiled.input_shardings[0]
        found = list(inputs)
        for i, (x, place) in enumerate(zip(inputs, places, strict=False)):
            if place is None:  # the program does not read it
                continue
            if isinstance(x, jax.Array) and not x.sharding.is_equivalent_to(place, x.ndim):
                found[i] = jax.device_put(x, place)
        return found

    def _with_copies(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """The inputs with copies for those that the program would write into (it never writes into NumPy arrays)."""
        copied, before = list(inputs), x64.get_local()
        try:
            x64.set_local(True)
            for i in self._donated:
                if isinstance(copied[i], jax.Array):
                    copied[i] = jnp.array(copied[i], copy=True)
        finally:
            x64.set_local(before)
        return copied

    def serialize(self) -> bytes:
        """The program and its weights in one piece, for `XlaGraphCompiler.load` on a machine of the same kind."""
        return self._serialized(weights=True)

    def serialize_code(self) -> bytes:
        """The program alone: its weights come from the Function again, most of them in place."""
        return self._serialized(weights=False)

    def _serialized(self, weights: bool) -> bytes:
        program = self._payload
        if program is None:
            if len(self.devices()) > 1:
                raise UnsupportedError("this XLA program runs on several devices, and is compiled in each process")
            try:
                program = _toolkit.serialize_compiled(self._compiled)
            except (NotImplementedError, ValueError) as e:
                raise UnsupportedError(f"this XLA program cannot be serialised: {e}") from e
        stored = Stored(self._params, self._outputs, self._aliases, self._linalg, program)
        return pack(stored, _toolkit.fingerprint_of(self._device), self._weights, weights)

    def as_text(self) -> str:
        """The optimised HLO."""
        return str(self._compiled.as_text())

    def __repr__(self) -> str:
        return f"<XlaExecutable: {len(self._params)} in, {len(self._weights)} weights, {self._outputs} out>"


class SmallXlaExecutable(XlaExecutable):
    """One whose arrays are of 32 bits at most, with small results on the CPU. A call with NumPy's arrays gives NumPy's:
    to look at JAX's, and read them later, takes longer than the copy that is made here."""

    fixed_results = False

    def __init__(self, compiled: Any, weights: Sequence[Any], entry_params: Sequence[Parameter], *more: Any) -> None:
        super().__init__(compiled, weights, entry_params, *more)
        self._dtypes = tuple(p.dtype for p in entry_params)

    def run(
        self, inputs: Sequence[Any], run_options: RunOptions = DEFAULT_RUN_OPTIONS, block_until_done: bool = True
    ) -> Sequence[Any]:
        """See `XlaExecutable.run`."""
        for x, dtype in zip(inputs, self._dtypes, strict=False):
            if type(x) is not _ndarray or x.dtype is not dtype:  # 64 bits would be cut here, not refused
                return super().run(inputs, run_options, block_until_done)
        try:
            results = self._compiled(*inputs, *self._weights)
            return [_array(results[0])] if len(results) == 1 else [_array(r) for r in results]
        except Exception:  # as in `XlaExecutable.run`
            return [_array(r) for r in self._run_pinned(inputs)]


def make_executable(
    compiled: Any,
    weights: Sequence[Any],
    params: Sequence[Parameter],
    outputs: int,
    aliases: Sequence[InputOutputAlias],
    device: Any,
    linalg: bool,
    program: bytes | None = None,
) -> XlaExecutable:
    """The executable of a compiled program; the arguments are those of `XlaExecutable`."""
    results = jax.tree_util.tree_leaves(compiled.out_info)
    is_small = sum(x.size * x.dtype.itemsize for x in results) <= _SMALL and not aliases
    is_narrow = all(p.dtype is not None and p.dtype.itemsize <= _NARROW for p in params)
    on_cpu = device.platform == "cpu" and _is_alone(compiled)
    kind = SmallXlaExecutable if is_small and is_narrow and on_cpu else XlaExecutable
    return kind(compiled, weights, params, outputs, aliases, device, linalg, program)


def _is_alone(compiled: Any) -> bool:
    """Whether a program runs on one device."""
    places = jax.tree_util.tree_leaves((compiled.input_shardings, compiled.output_shardings))
    return all(len(p.device_set) == 1 for p in places if p is not None)


def _complaint(params: Sequence[Parameter], inputs: Sequence[Any]) -> str | None:
    """What is wrong with the inputs of an executable, if anything is."""
    if len(inputs) != len(params):
        return f"the executable takes {len(params)} inputs, {len(inputs)} were given"
    for p, x in zip(params, inputs, strict=True):
        dtype, shape = getattr(x, "dtype", None), getattr(x, "shape", None)
        if dtype != p.dtype or shape != p.shape:
            given = type(x).__name__ if dtype is None or shape is None else f"{dtype}{list(shape)}"
            return f"input {p.name!r} must be {p.type}, {given} was given"
    return None

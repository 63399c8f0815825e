"""XlaGraphCompiler: traces a Function node by node into one XLA program and compiles it ahead of time."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from xrt_core.engine.contract import CompileOptions, Executable, Function, GraphCompiler, InputOutputAlias, Parameter
from xrt_core.engine.serialization import processor_features
from xrt_core.errors import CompileError, OptionError, XRTError, nearest
from xrt_core.ir.function import array_digest
from xrt_xla import _toolkit
from xrt_xla.blob import unpack
from xrt_xla.executable import make_executable
from xrt_xla.program import FOLD_BYTES, Program, layouts, program_order
from xrt_xla.threads import has_few_processors, place_workers
from xrt_xla.tracing import Traced, first_lines

_OPTIONS: Final = frozenset(("fold_bytes", "xla"))
_DISABLE: Final = "xla_disable_hlo_passes"
_STAGES: Final = {
    "stablehlo": "the program that JAX traced, as StableHLO",
    "hlo": "the same as HLO, which XLA is given",
    "hlo-optimized": "the program after XLA's passes",
    "llvm": "the LLVM IR of its kernels",
    "llvm-optimized": "the same after LLVM's passes",
}
_DEVICE_STAGES: Final = {
    "cpu": {"asm": "the machine code of its kernels, by objdump"},
    "cuda": {"ptx": "the PTX of its kernels"},
}


class XlaGraphCompiler(GraphCompiler):
    """Compiles Functions for one device.

    Options of its own (`CompileOptions.extra`): `fold_bytes`, the size up to which constants go into the program;
    `xla`, a mapping of XLA compiler options such as {"xla_backend_optimization_level": 1}.
    """

    def __init__(self, device: str, options: CompileOptions) -> None:
        unknown = set(options.extra) - _OPTIONS
        if unknown:
            name = sorted(unknown)[0]
            known = ", ".join(sorted(_OPTIONS))
            raise OptionError(f"xla: unknown option {name!r}; it takes {known}{nearest(name, _OPTIONS)}")
        self._device = _toolkit.device_named(device)
        self._kind = _toolkit.kind_of(self._device)
        if self._kind == "cpu":
            place_workers()
        self.stages = {**_STAGES, **_DEVICE_STAGES.get(self._kind, {})}
        self._fold = int(options.extra.get("fold_bytes", FOLD_BYTES))
        self._asked: Mapping[str, Any] = options.extra.get("xla", {})
        self._fused = options.fused
        # of training steps, and with more threads, it was not measured
        is_measured = options.phase == "inference" and has_few_processors()
        self._may_use_eigen = self._kind == "cpu" and is_measured and _toolkit.PRODUCTS not in self._asked
        # unfused: no fused loops, and dot products by XLA's own code instead of the library's
        self._disabled = [] if options.fused else ["fusion", "dot-library-rewriter"]

    @functools.cached_property
    def _xla_options(self) -> dict[str, Any]:
        """Found out at the first compilation: who only loads does not wait for it."""
        # without this XLA drops the rounding of x.astype(bfloat16).astype(float32), which ONNX's types ask for
        found: dict[str, Any] = {"xla_allow_excess_precision": False}
        if self._kind == "cpu":
            with _toolkit.pinned(self._device):
                found.update(_toolkit.cpu_options())
        return {**found, **{k: v for k, v in self._asked.items() if k != _DISABLE}}

    def compile(
        self,
        function: Function,
        entry_params: Sequence[Parameter],
        return_params: Sequence[Parameter],
        aliases: Sequence[InputOutputAlias],
    ) -> Executable:
        """One XLA program for `function`. Raises CompileError, naming the node where it is one node's fault."""
        with _toolkit.pinned(self._device), _named(function):
            program = self._program(function)
            shardings = self._shardings(function, program)
            found = self._traced(function, program, shardings, entry_params, return_params, aliases)
            lowered, options = found.lower(), self._options_for(found.jaxpr)
            if any(map(_toolkit.is_spanning, shardings)):
                compiled = _compiled_together(function, lowered, options)
            else:
                compiled = lowered.compile(compiler_options=options)
            own = shardings[len(entry_params) :]
            weights = _toolkit.put_all(program.weights, self._device, program.keys, own)
            program.weights.clear()  # JAX may keep the traced callable
            linalg = _toolkit.has_linalg(found.jaxpr)
        return make_executable(compiled, weights, entry_params, len(return_params), aliases, self._device, linalg)

    def as_text(
        self,
        function: Function,
        entry_params: Sequence[Parameter],
        return_params: Sequence[Parameter],
        aliases: Sequence[InputOutputAlias],
        stage: str,
    ) -> str:
        """The text of one of the `stages`, by XLA's own dumps (https://openxla.org/xla/hlo_dumps)."""
        if stage not in self.stages:
            return super().as_text(function, entry_params, return_params, aliases, stage)
        with _toolkit.pinned(self._device), _named(function):
            program = self._program(function)
            shardings = self._shardings(function, program)
            found = self._traced(function, program, shardings, entry_params, return_params, aliases)
            return _toolkit.text_of(found.lower(), self._options_for(found.jaxpr), stage)

    def _program(self, function: Function) -> Program:
        return Program(function, self._kind, self._fold, self._multiplies_bytes)

    def _multiplies_bytes(self) -> bool:
        """Whether products of 8-bit integers are faster than of float32: measured with VNNI, in XLA's library."""
        is_library = self._xla_options.items() >= _toolkit.CPU_OPTIONS.items()
        return self._kind == "cpu" and self._fused and is_library and "avx512_vnni" in processor_features()

    def _traced(
        self,
        function: Function,
        program: Program,
        shardings: Sequence[Any],
        entry_params: Sequence[Parameter],
        return_params: Sequence[Parameter],
        aliases: Sequence[InputOutputAlias],
    ) -> Any:
        """What JAX traced, to be lowered."""
        # what is updated in place stays where it is
        on_mesh = _is_mesh(shardings)
        places = {a.output: shardings[a.input] for a in aliases} if on_mesh else {}
        order = program_order(len(return_params), aliases)
        traced = Traced(function, program, return_params, order, self._kind, on_mesh, places)
        shapes = [(p.shape, p.dtype) for p in entry_params] + [(w.shape, w.dtype) for w in program.weights]
        arguments = [_toolkit.abstract(*shape, s) for shape, s in zip(shapes, shardings, strict=True)]
        donated = tuple(sorted(a.input for a in aliases))
        return _toolkit.jax.jit(traced.named(not on_mesh), donate_argnums=donated).trace(*arguments)

    def _shardings(self, function: Function, program: Program) -> list[Any]:
        """Where the program's arguments lie: on the device, or on the mesh of the Function."""
        mesh, found = layouts(function, program.steps)
        if not mesh:
            return [_toolkit.sharding_on(self._device)] * (len(function.body.inputs) + len(program.weights))
        arguments = [*function.body.inputs, *range(len(program.weights))]
        return [_toolkit.sharding_of(mesh, found.get(a, "B"), self._kind) for a in arguments]

    def _options_for(self, jaxpr: Any) -> dict[str, Any]:
        """XLA options for one program."""
        disabled = list(self._disabled)
        if self._kind == "cpu":
            disabled += _toolkit.cpu_passes_off(jaxpr)
        if asked := self._asked.get(_DISABLE):
            disabled.append(str(asked))
        options = dict(self._xla_options)
        if self._may_use_eigen and _toolkit.PRODUCTS in options and _toolkit.prefers_eigen(jaxpr):
            options[_toolkit.PRODUCTS] = ""
        return {**options, _DISABLE: ",".join(disabled)} if disabled else options

    def load(self, blob: bytes) -> Executable:
        """The executable that `serialize` gave `blob` for; `blob` must come from a trusted place (it is unpickled)."""
        return self._load(blob, None)

    def load_code(self, blob: bytes, function: Function) -> Executable:
        """The executable that `serialize_code` gave `blob` for, with the weights of `function`; else as `load`."""
        return self._load(blob, lambda: self._program(function))

    def _load(self, blob: bytes, program: Callable[[], Program] | None) -> Executable:
        stored = unpack(blob, _toolkit.fingerprint_of(self._device))
        made = None if program is None or stored.held is not None else program()
        weights = stored.weights(None if made is None else made.weights)
        keys = list(map(array_digest, weights)) if made is None else made.keys
        arguments = len(stored.params) + len(weights)
        try:
            with _toolkit.pinned(self._device):
                placed = _toolkit.put_all(weights, self._device, keys)
                compiled = _toolkit.load_compiled(
                    stored.program, arguments, stored.outputs, self._device, stored.linalg
                )
        except Exception as e:
            raise CompileError(f"xla: a serialised executable does not load: {type(e).__name__}: {e}") from e
        return make_executable(
            compiled,
            placed,
            stored.params,
            stored.outputs,
            stored.aliases,
            self._device,
            stored.linalg,
            stored.program,
        )


def _compiled_together(function: Function, lowered: Any, options: Mapping[str, Any]) -> Any:
    """The compiled program of a mesh that several processes share. Raises CompileError, also where theirs differ."""
    where = f"xla: function {function.name!r}, {_toolkit.TOGETHER},"
    try:
        others = _toolkit.differing_ranks(lowered.as_text())
        if not others:
            return lowered.compile(compiler_options=options)
    except Exception as e:
        raise CompileError(f"{where} does not compile: {first_lines(e)}") from e
    raise CompileError(
        f"{where} is another program in process {', '.join(map(str, others))} than in process 0; they run the same "
        "program on batches of the same shape"
    )


@contextlib.contextmanager
def _named(function: Function) -> Iterator[None]:
    """What JAX raises within becomes a CompileError with the function's name."""
    try:
        yield
    except XRTError:
        raise
    except Exception as e:
        raise CompileError(f"xla: function {function.name!r} does not compile: {first_lines(e)}") from e


def _is_mesh(shardings: Sequence[Any]) -> bool:
    return any(len(s.device_set) > 1 for s in shardings)

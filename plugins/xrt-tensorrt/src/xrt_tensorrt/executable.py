"""TensorRTExecutable: an engine for one signature, run on the caller's stream; its serialised form."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from xrt_core.engine.contract import DEFAULT_RUN_OPTIONS, Executable, InputOutputAlias, Parameter, RunOptions
from xrt_core.engine.serialization import ParameterRow, Size, loading, pack, parameters_of, rows_of, unpack
from xrt_core.errors import CompileError, ExecutionError, UnsupportedError
from xrt_tensorrt import _cuda
from xrt_tensorrt.engine import BuiltEngine, Manifest
from xrt_tensorrt.kernels_cache import KernelsCache
from xrt_tensorrt.memory import LEGACY, PER_THREAD, fits, own_stream
from xrt_tensorrt.session import Session

_MAGIC: Final = b"XRTTRT4\n"


@dataclass(frozen=True, slots=True)
class _Header:
    manifest: Manifest
    params: tuple[ParameterRow, ...]
    returns: tuple[ParameterRow, ...]
    aliases: tuple[tuple[Size, Size], ...]


class TensorRTExecutable(Executable):
    """An engine with the sizes of one signature.

    Arrays in device memory (CuPy, torch, JAX, or results of this engine) are read in place, NumPy arrays are copied
    there; results are CuPy arrays where CuPy is loaded, else `DeviceArray`s. Runs on `run_options.stream`, or on a
    stream of the calling thread, which is ordered against the default stream; so where the caller's stream is the
    default one, on which TensorRT would wait by itself, or a thread's, which has one name in all threads. Each thread
    has a context of its own; contexts on one stream share their scratch memory.

    Results are written into the arrays of `run_options.results` where those are the device's, contiguous and writable:
    by TensorRT itself where they are aligned and no input lies there, else by a copy. A result whose shape depends on
    data gets its memory when TensorRT asks for it, and the run is waited for as far as its shape.

    TensorRT promises nothing for an output in an input's memory. So a variable (an aliased input that is donated) has
    two arrays, which swap roles: a run writes its result to where the content before the last was. A recorded run
    copies it back into the input, which comes back as the result.
    """

    def __init__(
        self,
        built: BuiltEngine,
        entry_params: Sequence[Parameter],
        return_params: Sequence[Parameter],
        cuda_graph: bool = False,
        aliases: Sequence[InputOutputAlias] = (),
    ) -> None:
        self.built = built
        self._aliases = tuple(aliases)
        self._params = tuple(entry_params)
        self._returns = tuple(return_params)
        self._cuda_graph = cuda_graph
        self._local = threading.local()

    def run(
        self, inputs: Sequence[Any], run_options: RunOptions = DEFAULT_RUN_OPTIONS, block_until_done: bool = True
    ) -> Sequence[Any]:
        """Run once. Raises ExecutionError for inputs that do not fit, without a GPU, or with TensorRT's own words."""
        complaint = self._complaint(inputs)
        if complaint:
            raise ExecutionError(f"tensorrt: {complaint}")
        try:
            generation, engine, kernels = self.built.current()
            with _cuda.on(self.built.device):
                session = self._session(generation, engine, kernels)
                given, aliases = run_options.stream, self._aliases if run_options.donate else ()
                wanted = run_options.results
                if given is not None and given not in LEGACY and given != PER_THREAD:
                    return session.run(inputs, given, block_until_done, aliases, wanted)
                stream = own_stream(self.built.device)
                if given != PER_THREAD:
                    return session.run(inputs, stream, block_until_done, aliases, wanted)
                _cuda.wait_for(stream, given)
                results = session.run(inputs, stream, block_until_done, aliases, wanted)
                _cuda.wait_for(given, stream)
                return results
        except ExecutionError:
            self._local.session = None  # whatever state it is in, the next run begins with a fresh one
            raise
        except CompileError as e:
            raise ExecutionError(str(e)) from e

    def _session(self, generation: int, engine: Any, kernels: KernelsCache | None) -> Session:
        found: Session | None = getattr(self._local, "session", None)
        if found is None or found.generation != generation:
            found = Session(self.built, engine, generation, self._params, self._returns, self._cuda_graph, kernels)
            self._local.session = found
        return found

    def _complaint(self, inputs: Sequence[Any]) -> str:
        """What is wrong with the inputs, if it is they."""
        if len(inputs) != len(self._params):
            return f"the executable takes {len(self._params)} inputs, {len(inputs)} were given"
        for p, x in zip(self._params, inputs, strict=True):
            if not fits(x, p):
                dtype, shape = getattr(x, "dtype", None), getattr(x, "shape", None)
                given = type(x).__name__ if dtype is None or shape is None else f"{dtype}{list(shape)}"
                return f"input {p.name!r} must be {p.type}, {given} was given"
        return ""

    def serialize(self) -> bytes:
        """The engine with its manifest. Raises UnsupportedError for one that was stripped of its weights."""
        if self.built.manifest.stripped:
            raise UnsupportedError("the engine was built without its weights, and is loaded with its function only")
        return self.serialize_code()

    def serialize_code(self) -> bytes:
        """The engine with its manifest, as it is: one that was stripped of its weights gets them from the function."""
        header = {
            "manifest": self.built.manifest.to_json(),
            "params": rows_of(self._params),
            "returns": rows_of(self._returns),
            "aliases": [[a.output, a.input] for a in self._aliases],
        }
        return pack(_MAGIC, header, (self.built.blob,))

    def as_text(self) -> str:
        """What the engine inspector says of the layers; without a GPU, what the engine was built for."""
        m = self.built.manifest
        try:
            engine = self.built.load()
        except (ExecutionError, CompileError) as e:
            return f"{m.flavour} {m.version} engine for {', '.join(m.targets)}, {len(self.built.blob)} bytes ({e})"
        inspector = engine.create_engine_inspector()
        return str(inspector.get_engine_information(self.built.toolkit.trt.LayerInformationFormat.ONELINE))

    def __repr__(self) -> str:
        return f"<TensorRTExecutable: {len(self._params)} in, {len(self._returns)} out>"


class Stored(NamedTuple):
    """What a serialised executable holds."""

    manifest: Manifest
    engine: bytes
    params: list[Parameter]
    returns: list[Parameter]
    aliases: list[InputOutputAlias]


def read_blob(blob: bytes) -> Stored:
    """What a serialised executable holds. Raises CompileError for what is none."""
    header, parts = unpack(_MAGIC, blob, "tensorrt", _Header)
    with loading("tensorrt"):
        (engine,) = parts
    aliases = [InputOutputAlias(o, i) for o, i in header.aliases]
    return Stored(header.manifest, bytes(engine), parameters_of(header.params), parameters_of(header.returns), aliases)

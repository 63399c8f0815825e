"""The only importer of JAX: versions, devices, and the configuration that XRT's own tracing and calls run under."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import uuid
import weakref
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import serialize_executable as _serialize

from xrt_core.engine.contract import WORKER_VARIABLE
from xrt_core.engine.forking import let_forks_end
from xrt_core.engine.serialization import instruction_set
from xrt_core.errors import CompileError, EngineUnavailableError, UnsupportedError
from xrt_core.ir.sharding import Mesh, parse_sbp
from xrt_xla import _installed
from xrt_xla.weights import aligned

__all__ = ["jax", "jnp", "lax", "pinned", "x64"]

_config: Any = jax.config


def share_memory(environment: MutableMapping[str, str]) -> None:
    """Have JAX take memory of a GPU as it needs it, and not three quarters at its first use.

    A worker process of the guard shares the GPU with its parent, and this process shares it with CuPy, with which XRT's
    host computes, where that is installed, and with torch, where the program has loaded one for GPUs. What the user has
    set for his process stays.
    """
    if WORKER_VARIABLE in environment:
        environment.update(XLA_PYTHON_CLIENT_PREALLOCATE="false", TF_FORCE_GPU_ALLOW_GROWTH="true")
    elif not environment.keys() & _MEMORY_VARIABLES and (_has_cupy() or _torch_on_gpu()):
        environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"


def _has_cupy() -> bool:
    return importlib.util.find_spec("cupy") is not None


def _torch_on_gpu() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_available())


_MEMORY_VARIABLES = {"XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"}
share_memory(os.environ)  # JAX reads it when it makes its first array

_clients: dict[str, Any] = {}  # of the kinds of devices that were asked for; their destructors hang in forked processes
let_forks_end(_clients.values)


class _LocalX64:
    """`jax.enable_x64` of this thread by the public context manager alone, for a JAX without `get_local`."""

    def get_local(self) -> Any:
        """What holds in this thread."""
        return _config.jax_enable_x64

    def set_local(self, value: Any) -> None:
        """Set it, for good."""
        jax.enable_x64(value).__enter__()  # type: ignore[no-untyped-call]


x64: Any = jax.enable_x64 if hasattr(jax.enable_x64, "get_local") else _LocalX64()
"""64-bit types are exact in this thread, and the rest of the process is as it was, between
`before = x64.get_local()`, `x64.set_local(True)` and, in a `finally`, `x64.set_local(before)`.

JAX's context manager leaves by a function in Python, before which a signal's handler may raise (Ctrl-C): then the
setting stays. These are functions in C.
"""

_KINDS = ("cuda", "tpu", "cpu")
"""Kinds of devices, the one to use first: the core compiles for the first device where none is asked for."""

# What a caller may have set that would change numbers, dtypes or whether a compiled call runs at all.
_PINNED: tuple[tuple[str, Any], ...] = (
    ("default_matmul_precision", "highest"),
    ("numpy_dtype_promotion", "standard"),
    ("numpy_rank_promotion", "allow"),
    ("debug_nans", False),
    ("debug_infs", False),
    ("disable_jit", False),
    ("transfer_guard", "allow"),
    ("default_prng_impl", "threefry2x32"),
    ("threefry_partitionable", True),
    ("check_tracer_leaks", False),
    ("no_tracing", False),
)
_MANAGERS = [(getattr(jax, name), value) for name, value in _PINNED if hasattr(jax, name)]

_LINALG = frozenset(p.name for name, p in vars(lax.linalg).items() if name.endswith("_p"))
"""Names of JAX's primitives for factorisations and solvers, which call LAPACK on the CPU."""

# XLA's CPU library fusions around a reduction are wrong where a uniform array is folded into them (jaxlib 0.10.2:
# jnp.sum(x @ jnp.full(...), 0) gives NaN), so the library gets dot products alone.
PRODUCTS: Final = "xla_cpu_experimental_ynn_fusion_type"
CPU_OPTIONS: dict[str, Any] = {PRODUCTS: "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}

# Two threads divide a product of 784 x 136 x 136 among them in Eigen, and wait for one another in that library: there
# it takes longer than with one thread (8.1 ms for twenty, 6.9 with one thread, in Eigen 3.8). With few rows Eigen packs
# the other matrix in more time than that (128 x 3072 x 768: 6.0 ms, in the library 3.8).
_FEW_ROWS = 160

# XLA's own reductions in stages of 32 take twice the time of its plain ones (LayerNorm, Softmax), except for long
# ones across rows, which are 20 times slower without the stages.
_STAGED_REDUCTIONS = "tree_reduction_rewriter"
_LONG = 256
_LONGEST = 4096
_UNSTAGED = 20

# XLA divides a loop over some 20 KiB already among threads, which takes longer to begin than such a loop takes: the
# program is faster without where no loop is long (ppocr_cls: three quarters of the processor time with two threads).
_DIVIDED_LOOPS = "cpu-parallel-task-assigner"
_DIVIDED_BYTES = 512 << 10


# XLA takes optimisation barriers out before it fuses loops, where ours are to stop it (see kernels/normalization.py).
_BARRIERS_OUT = "cse_barrier_expander"


def program_name(is_stored: bool) -> str:
    """The name that a program is compiled under: a new one each time where the caller uses JAX's own disk cache, and
    the executable may be serialised by ours.

    The name is part of that cache's key. What comes out of that cache cannot be serialised again on the CPU (jaxlib
    0.10.2: it loads, and then "Function ... not found"), so none of those programs may be found in it.
    """
    return f"xrt_program_{uuid.uuid4().hex}" if is_stored and _config.jax_compilation_cache_dir else "xrt_program"


def cpu_passes_off(jaxpr: Any) -> list[str]:
    """Names of XLA's passes that make this program slower on the CPU."""
    off = [] if has_long_reduction(jaxpr) else [_STAGED_REDUCTIONS]
    if largest_loop(jaxpr) < _DIVIDED_BYTES:
        off.append(_DIVIDED_LOOPS)
    if has_barrier(jaxpr) and _compiles_barriers():
        off.append(_BARRIERS_OUT)
    return off


@functools.cache
def _compiles_barriers() -> bool:
    """Whether this compiler makes code for a barrier that is left in."""
    lowered = jax.jit(lambda x: lax.optimization_barrier(x + 1) * 2).lower(np.float32(0))  # type: ignore[no-untyped-call]
    try:
        lowered.compile(compiler_options={"xla_disable_hlo_passes": _BARRIERS_OUT})
    except jax.errors.JaxRuntimeError:
        return False
    return True


def has_barrier(jaxpr: Any) -> bool:
    """Whether a program has an optimisation barrier."""
    return any(
        e.primitive.name == "optimization_barrier" or any(has_barrier(inner) for inner in _inner(e)) for e in jaxpr.eqns
    )


def has_linalg(jaxpr: Any) -> bool:
    """Whether a program has a factorisation or a solver, which may be a call of LAPACK."""
    return any(e.primitive.name in _LINALG or any(has_linalg(inner) for inner in _inner(e)) for e in jaxpr.eqns)


def has_long_reduction(jaxpr: Any) -> bool:
    """Whether a program sums (or takes the maximum of, ...) many elements that do not lie in one row, and spends more
    on that without stages than on the others with them."""
    long, others = 0, 0
    for length, elements, is_row in _reductions(jaxpr):
        if not is_row and length > _LONGEST:  # rounding errors grow with the length as well
            return True
        if not is_row and length > _LONG:
            long += elements
        else:
            others += elements
    return long * _UNSTAGED > others and long > 0


def _reductions(jaxpr: Any) -> Iterator[tuple[int, int, bool]]:
    """How many elements each reduction of a program makes one of, how many it reads, and whether they lie in rows."""
    for equation in _equations(jaxpr):
        axes = equation.params.get("axes")
        if equation.primitive.name.startswith("reduce_") and axes:
            shape = equation.invars[0].aval.shape
            yield math.prod(shape[i] for i in axes), math.prod(shape), tuple(axes) == (len(shape) - 1,)


def prefers_eigen(jaxpr: Any) -> bool:
    """Whether most of the work in a program's products is faster in Eigen: all are of float32, and have many rows."""
    few, many = 0, 0
    for equation in _equations(jaxpr):
        if equation.primitive.name != "dot_general":
            continue
        left, right = (v.aval for v in equation.invars)
        if left.dtype != np.float32 or right.dtype != np.float32:
            return False
        (axes, _), (batch, _) = equation.params["dimension_numbers"]
        depth, batches = (math.prod(left.shape[i] for i in found) for found in (axes, batch))
        rows = left.size // max(1, depth * batches)
        work = rows * right.size  # times two, operations
        if rows < _FEW_ROWS and batches == 1:
            few += work
        else:
            many += work
    return many > few


_LIBRARY = frozenset(("conv_general_dilated", "dot_general"))
"""Primitives that are no loops of XLA's own."""


def largest_loop(jaxpr: Any) -> int:
    """Bytes of the largest array that a program computes, or reduces, by a loop."""
    most = 0
    for equation in jaxpr.eqns:
        loops = [] if equation.primitive.name in _LIBRARY else list(equation.outvars)
        if equation.primitive.name.startswith(("arg", "reduce")):
            loops += equation.invars
        sizes = (v.aval.size * v.aval.dtype.itemsize for v in loops if hasattr(v.aval, "dtype"))
        most = max(most, *sizes, *map(largest_loop, _inner(equation)), 0)
    return most


def _equations(jaxpr: Any) -> Iterator[Any]:
    """The operations of a program, and of those inside them."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in _inner(equation):
            yield from _equations(inner)


def _inner(equation: Any) -> Iterator[Any]:
    """The programs inside an operation: of a jitted call, a loop, a branch."""
    for value in equation.params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            part = getattr(part, "jaxpr", part)  # of a closed one
            if hasattr(part, "eqns"):
                yield part


@functools.cache
def cpu_options() -> Mapping[str, Any]:
    """XLA options that this package needs on the CPU, as far as the installed compiler knows them."""
    lowered = jax.jit(lambda x: x).lower(np.float32(0))
    known = {}
    for name, value in CPU_OPTIONS.items():
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # no such option, or no such value
            lowered.compile(compiler_options={name: value})
            known[name] = value
    return MappingProxyType(known)


@contextlib.contextmanager
def pinned(device: Any = None) -> Iterator[None]:
    """Everything XRT depends on in JAX's configuration, set for this thread and put back afterwards."""
    before = x64.get_local()
    with contextlib.ExitStack() as stack:
        stack.callback(x64.set_local, before)
        x64.set_local(True)
        for manager, value in _MANAGERS:
            stack.enter_context(manager(value))
        if device is not None:
            stack.enter_context(jax.default_device(device))
        yield


def checks_numbers() -> bool:
    """Whether the caller has JAX look for NaN or infinity in every result (`jax_debug_nans`, `jax_debug_infs`)."""
    return bool(_config.jax_debug_nans or _config.jax_debug_infs)


def devices() -> dict[str, Any]:
    """Usable devices by XRT's names, accelerators first: "cuda:0", "tpu:0", ..., "cpu"; last those of other processes
    ("cpu:0@1"), which only a mesh uses."""
    found: dict[str, Any] = {}
    for kind in _KINDS:
        try:
            local = _local_devices(kind)
        except RuntimeError:  # that kind is not part of this installation
            continue
        if kind == "cpu":
            found.update({name_of(d): d for d in local})
        else:
            found.update({f"{kind}:{i}": d for i, d in enumerate(local)})
    for kind in _clients if process_count() > 1 else ():
        found.update({name_of(d): d for d in jax.devices(kind) if d.process_index != jax.process_index()})
    return found


def process_count() -> int:
    """How many processes `jax.distributed` has joined to one program; 1 without it."""
    return int(jax.process_count())


def _local_devices(kind: str) -> list[Any]:
    found = jax.local_devices(backend=kind)
    _clients[kind] = found[0].client
    return found


def name_of(device: Any) -> str:
    """XRT's name of a JAX device: "cpu" for the first one of the CPU's, "cpu:1", "cuda:0", ...; "cuda:0@1" for one of
    process 1."""
    kind = kind_of(device)
    if device.process_index != jax.process_index():
        there = [d for d in jax.devices(kind) if d.process_index == device.process_index]
        return f"{kind}:{there.index(device)}@{device.process_index}"
    number = _local_devices(kind).index(device)
    return kind if kind == "cpu" and number == 0 else f"{kind}:{number}"


def device_named(name: str) -> Any:
    """The JAX device for "cpu", "cpu:1", "cuda" (the first one), "cuda:1", "tpu", ...

    Raises EngineUnavailableError where it is not there, listing what is.
    """
    kind, _, index = name.partition(":")
    number = int(index) if index.isdigit() else 0 if not index else -1
    try:
        local = _local_devices(kind) if kind in _KINDS else []
    except RuntimeError:
        local = []
    if 0 <= number < len(local):
        return local[number]
    cure = " (pip install 'jax[cuda13]' brings CUDA)" if kind == "cuda" else ""
    raise EngineUnavailableError(f"xla: no device {name!r} here; JAX sees {', '.join(devices()) or 'none'}{cure}")


def kind_of(device: Any) -> str:
    """The kind of a JAX device: "cpu", "cuda" or "tpu"."""
    return "cuda" if device.platform == "gpu" else str(device.platform)


def sharding_on(device: Any) -> Any:
    """The sharding that puts a whole array on one device."""
    return jax.sharding.SingleDeviceSharding(device)


@functools.cache
def mesh_of(text: str, kind: str) -> Any:
    """The mesh of a text such as "data=4" over the first devices of a kind; over those of all processes where
    `jax.distributed` has joined several.

    Raises EngineUnavailableError where there are too few, listing those that are here, and for a mesh that leaves
    devices of joined processes out: each process must have a part in it.
    """
    mesh = Mesh.parse(text)
    local = _local_devices(kind) if process_count() == 1 else jax.devices(kind)
    if process_count() > 1 and mesh.device_count < len(local):
        raise EngineUnavailableError(
            f"xla: the mesh {text} has {mesh.device_count} devices; {TOGETHER} lie all of their {len(local)} devices: "
            f"{process_count()} processes are joined here"
        )
    if mesh.device_count > len(local):
        here = ", ".join(map(name_of, local))
        raise EngineUnavailableError(
            f"xla: the mesh {text} has {mesh.device_count} devices, and {len(local)} of kind {kind!r} are here: {here}"
        )
    shape = tuple(size for _, size in mesh.sizes)
    return jax.sharding.Mesh(np.asarray(local[: mesh.device_count], dtype=object).reshape(shape), mesh.names)


def sharding_of(mesh: str, sbp: str, kind: str) -> Any:
    """The sharding that an SBP, such as "data:S(0)", stands for."""
    known = Mesh.parse(mesh)
    axes: dict[int, list[str]] = {}
    for name, s in zip(known.names, parse_sbp(sbp, known), strict=True):
        if s.axis is not None:
            axes.setdefault(s.axis, []).append(name)
    spec = [tuple(axes.get(i, ())) or None for i in range(max(axes, default=-1) + 1)]
    return jax.sharding.NamedSharding(mesh_of(mesh, kind), jax.sharding.PartitionSpec(*spec))


_DUMPED: Final = {
    "hlo-optimized": "*after_optimizations.txt", "llvm": "*ir-no-opt.ll", "llvm-optimized": "*ir-with-opt.ll",
    "asm": "*.o", "ptx": "*.ptx",
}  # fmt: skip
"""Stage -> the names of XLA's dumps of it."""


def text_of(lowered: Any, options: Mapping[str, Any], stage: str) -> str:
    """The text of a lowered program at a stage, which is compiled for it; several files are put one after another."""
    if stage == "stablehlo":
        return str(lowered.as_text())
    if stage == "hlo":
        return str(lowered.compiler_ir("hlo").as_hlo_text())
    with tempfile.TemporaryDirectory(prefix="xrt-xla-") as folder:
        dumping = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        lowered.compile(compiler_options={**options, **dumping})
        found = sorted(pathlib.Path(folder).glob(_DUMPED[stage]))
        read = _disassembled if stage == "asm" else _content
        if not found and stage.startswith("llvm") and jax.__version_info__ >= (0, 12):
            # asked to (xla_dump_emitter_re) it dumps that, but the process may abort: it did within 150 compilations
            return "since JAX 0.12 XLA dumps no LLVM IR; other stages have the code that it becomes"
        return "\n".join(map(read, found)) or f"XLA made nothing for the stage {stage!r} of this program"


def _content(path: pathlib.Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _disassembled(path: pathlib.Path) -> str:
    """The machine code in an object file. Raises UnsupportedError where no disassembler is installed."""
    tool = shutil.which("objdump") or shutil.which("llvm-objdump")
    if tool is None:
        raise UnsupportedError("the stage 'asm' needs objdump, of the package binutils (apt install binutils)")
    command = [tool, "--disassemble", "--no-show-raw-insn", "--reloc", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60, check=False)
    if done.returncode:
        raise CompileError(f"{tool} does not read XLA's object file: {done.stderr.strip()}")
    return done.stdout.replace(str(path), path.name)


@functools.cache
def fingerprint_of(device: Any) -> str:
    """What a compiled program depends on: JAX, XLA's flags, the device's model, and on a CPU its instruction set."""
    kind, model = kind_of(device), str(device.device_kind)
    if kind == "cpu":
        details = [instruction_set()]
    else:
        details = [str(device.client.platform_version), str(getattr(device, "compute_capability", ""))]
    return _installed.fingerprint_of(kind, model, *details)


def serialize_compiled(compiled: Any) -> bytes:
    """The payload of `jax.experimental.serialize_executable` (a pickle)."""
    payload, _, _ = _serialize.serialize(compiled)
    return bytes(payload)


def load_compiled(payload: bytes, inputs: int, outputs: int, device: Any, linalg: bool) -> Any:
    """The compiled object that `serialize_compiled` gave `payload` for, with flat argument and result lists.

    linalg: whether the program `has_linalg`.
    """
    if linalg:
        _register_lapack()
    in_tree = jax.tree_util.tree_structure(((0,) * inputs, {}))
    out_tree = jax.tree_util.tree_structure((0,) * outputs)
    return _serialize.deserialize_and_load(
        payload, in_tree, out_tree, backend=device.client, execution_devices=[device]
    )


@functools.cache
def _register_lapack() -> None:
    """Have JAX register LAPACK with the runtime: without, a loaded program that calls it crashes the process.

    JAX has no call for that; it does so whenever it lowers a factorisation.
    """
    jax.jit(lax.linalg.cholesky).lower(np.eye(2, dtype=np.float32))


def wait_for(arrays: Any) -> Any:
    """`arrays`, once they are computed."""
    return jax.block_until_ready(arrays)  # type: ignore[no-untyped-call]


def abstract(shape: tuple[int, ...], dtype: np.dtype, sharding: Any) -> Any:
    """The shape, dtype and place of an argument that is yet to come."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)  # type: ignore[no-untyped-call]


_shared: weakref.WeakValueDictionary[tuple[str, Any], Any] = weakref.WeakValueDictionary()
_sharing = threading.Lock()


def put_all(arrays: Sequence[np.ndarray], device: Any, keys: Sequence[str], places: Sequence[Any] = ()) -> list[Any]:
    """Arrays on `device`, or by their shardings, which only reads them; on the CPU those that are aligned to 64 bytes
    stay where they are. keys: by which equal ones are known; what is in use at the same place already is not put
    there again, so that executables of several shapes share their weights."""
    found: list[Any] = [None] * len(arrays)
    with _sharing:
        wanted = list(zip(keys, places or [device] * len(arrays), strict=True))
        for i, key in enumerate(wanted):
            found[i] = None if is_spanning(key[1]) else _shared.get(key)
        new = [i for i, x in enumerate(found) if x is None]
        given = [arrays[i] for i in new]
        for i, a in zip(new, aligned(given) if kind_of(device) == "cpu" else given, strict=True):
            found[i] = _put(a, wanted[i][1])
            if not is_spanning(wanted[i][1]):
                _shared[wanted[i]] = found[i]
    return found


def _put(array: np.ndarray, place: Any) -> Any:
    return spread(array, place) if is_spanning(place) else jax.device_put(array, place)


TOGETHER: Final = "on a mesh of several processes"
"""In the errors after which the other processes would wait for this one; xrt-distributed ends it then."""


def is_spanning(place: Any) -> bool:
    """Whether a sharding, or a device, has devices of other processes."""
    return not getattr(place, "is_fully_addressable", True)


def spread(array: Any, place: Any) -> Any:
    """An array that every process holds whole, as one array over the devices of all of them: each takes its parts.

    place: None for one that the program does not read."""
    if place is None:
        return array
    if isinstance(array, jax.Array):
        if array.sharding.is_equivalent_to(place, array.ndim):
            return array
        if not array.is_fully_addressable:
            return jax.device_put(array, place)
    whole = np.asarray(array)
    return jax.make_array_from_callback(whole.shape, place, lambda index: whole[index])


def differing_ranks(text: str) -> list[int]:
    """The processes whose text is another than that of process 0. All processes must call it."""
    from jax.experimental import multihost_utils

    text = re.sub(r"xrt_program_[0-9a-f]{32}", "xrt_program", text)  # see program_name
    own = np.frombuffer(hashlib.blake2b(text.encode(), digest_size=16).digest(), np.uint8)
    every = np.asarray(multihost_utils.process_allgather(own))
    return [i for i, row in enumerate(every) if not np.array_equal(row, every[0])]

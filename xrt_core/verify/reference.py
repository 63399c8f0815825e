"""Reference results: a Function executed by the host, in its own precision or, node by node, in a wider one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import ml_dtypes
import numpy as np

from xrt_core.errors import BrokenContextError, XRTError
from xrt_core.host.executor import run_node
from xrt_core.host.place import HostPlace
from xrt_core.ir.function import Function
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.op_traits import draws_random, is_discontinuous, is_exact, traits_of
from xrt_core.ir.types import TensorType, float_like
from xrt_core.kernels.namespace import narrow
from xrt_core.kernels.normalization import moved_by_mean
from xrt_core.kernels.resize import interpolated_elsewhere
from xrt_core.runtime.arrays import to_numpy
from xrt_core.runtime.control_flow import MakePart, control_step
from xrt_core.runtime.plan import HOST, Call, Lowered, Plan, make_plan

Values = Mapping[Value, np.ndarray]

ON_CPU: Final = HostPlace()

_OF_A_TERM: Final = 1 / 32
"""Rounding steps that each term of a mean adds: equal terms are rounded the same way, and two libraries that add with
few lanes were off by 1/64 of a step a term, at most."""

PRODUCTS: Final = frozenset(("Conv", "ConvTranspose", "Gemm", "MatMul"))
"""Operators whose results are sums of products."""

_F32, _F64 = np.dtype(np.float32), np.dtype(np.float64)


@dataclass(eq=False, slots=True)
class ReferenceExecutor:
    """Runs a Function on the host in its own precision, by the plan of a module without engines, made at the first run.

    place: where the host computes; where it fails on a device, NumPy answers from then on. seconds: of the fastest run
    so far by `clock`, without what goes to the device and back; infinity before the first.
    """

    function: Function
    clock: Callable[[], float] = time.perf_counter
    place: HostPlace = ON_CPU
    seconds: float = field(default=math.inf, init=False)
    _plan: Plan | None = field(default=None, init=False)

    def run(self, inputs: Sequence[Any]) -> list[np.ndarray]:
        """The results for NumPy arrays. Raises XRTError if the host fails."""
        if self.place.on_cpu:
            return list(self.compute(inputs))
        try:
            if self._plan is None:
                self.compute(self.place.copies(inputs))  # which compiles the kernels of the device
                self.seconds = math.inf
            with self.place.within():
                return [to_numpy(r) for r in self.compute(self.place.copies(inputs))]
        except BrokenContextError:
            raise
        except XRTError:
            self.place, self._plan, self.seconds = ON_CPU, None, math.inf
            return self.run(inputs)

    def compute(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """The results, complete, of a run on arrays of `place`. Raises XRTError if the host fails."""
        if self._plan is None:
            self._plan = self.place.plan(self.function.body)
        start = self.clock()
        results = self._plan.run(list(arrays))
        self.place.synchronize()
        self.seconds = min(self.seconds, self.clock() - start)
        return results


def run_host(
    function: Function, inputs: Sequence[np.ndarray], *, wide: bool = False, keep: bool = False
) -> tuple[list[np.ndarray], Values]:
    """The results of one run on the host, and with `keep` every intermediate value in the function's own precision.

    wide: floats in a wider dtype: float64, or float32 if the widest float of the function has 16 bits. Operators that
    convert dtypes, and those that the host has in their own dtype only, keep it. Raises XRTError if the host fails.
    """
    if wide:
        return _run_wide(function.body, inputs), {}
    body = function.body
    if not keep:
        return list(_plan(body).run(list(inputs))), {}
    values = host_values(body, inputs, (*body.outputs, *(v for n in body.nodes for v in n.outputs if v is not None)))
    return [values[v] for v in body.outputs], values


def host_values(body: Graph, inputs: Sequence[np.ndarray], wanted: Iterable[Value]) -> Values:
    """The inputs and the wanted values of one run on the host. Raises XRTError if the host fails."""
    outputs = list(dict.fromkeys(wanted))
    results = _plan(body.replace(outputs=outputs)).run(list(inputs))
    return dict(zip(body.inputs, inputs, strict=True)) | dict(zip(outputs, results, strict=True))


def _plan(body: Graph) -> Plan:
    return ON_CPU.plan(body)


def _run_wide(body: Graph, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    to = wide_dtype(body)
    last = _last_uses(body)
    env: dict[Value, np.ndarray] = {v: _lift(x, to) for v, x in zip(body.inputs, inputs, strict=True)}
    for i, node in enumerate(body.nodes):
        if node.attributes and node.subgraphs:  # its bodies compute in the precision that they declare
            results = _run_control(node, lambda v: _lower(_read(v, env, to), v.dtype))
        else:
            results = _run(node, [_read(v, env, to) for v in node.inputs], to)
        for v, r in zip(node.outputs, results, strict=False):
            if v is not None:
                env[v] = _lift(np.asarray(r), to)
        for v in last.get(i, ()):
            env.pop(v, None)
    return [_lift(v.data, to) if v.data is not None else env[v] for v in body.outputs]


def run_rounded(
    function: Function, inputs: Sequence[np.ndarray], rng: np.random.Generator, steps: float
) -> list[np.ndarray]:
    """The results of a run on the host in which every operator that rounds does so otherwise: its floating results are
    off by `steps` rounding steps, up or down at random (Monte Carlo arithmetic: Parker, 1997, "Monte Carlo Arithmetic:
    exploiting randomness in floating-point arithmetic").

    What that makes of a result is what another order of the same operations may make of it, also where the inputs are
    whole numbers or constant rows. What interpolates (Resize) does so at places that are off by rounding steps of
    float32, in which libraries compute them; a sum, and the mean of what normalises by its own, is off by as much as
    one that is made one term after the other; a sum of products by rounding steps of what their absolute values add up
    to (Higham, 2002, "Accuracy and Stability of Numerical Algorithms", 3.1). What jumps (`is_discontinuous`), and what
    draws random numbers, is computed from what was not moved. Raises XRTError if the host fails.
    """
    body = function.body
    last = _last_uses(body)
    staying = {node for node in body.nodes if is_discontinuous(node) or draws_random(node)}
    wanted = {v for node in staying for v in (*node.inputs, *node.captures)}
    exact: set[Node] = set()  # what is computed as it is as well, for nodes that stay
    for node in reversed(body.nodes):
        if node in staying or not wanted.isdisjoint(node.outputs):
            exact.add(node)
            wanted.update(node.inputs, node.captures)
    plain: dict[Value, Any] = dict(zip(body.inputs, inputs, strict=True))
    values = dict(plain)
    for i, node in enumerate(body.nodes):
        results: Sequence[Any] = ()
        if node in exact:
            results = _step(node)(_operands(node, plain))
            plain.update((v, r) for v, r in zip(node.outputs, results, strict=False) if v is not None)
        if node not in staying:
            results = _rounded_step(node, rng, steps)(_operands(node, values))
        values.update((v, r) for v, r in zip(node.outputs, results, strict=False) if v is not None)
        for v in last.get(i, ()):
            plain.pop(v, None)
            values.pop(v, None)
    return [v.data if v.data is not None else values[v] for v in body.outputs]


def _operands(node: Node, values: Mapping[Value, Any]) -> list[Any]:
    read = (*node.inputs, *node.captures) if node.attributes and node.subgraphs else node.inputs
    return [None if v is None else v.data if v.data is not None else values[v] for v in read]


def _step(node: Node, make_part: MakePart = ON_CPU.body) -> Call:
    """What computes a node from its inputs and captures."""
    if node.attributes and node.subgraphs:
        return control_step(node, make_part)
    return lambda arrays: [np.asarray(r) for r in run_node(node, arrays)]


def _rounded_step(node: Node, rng: np.random.Generator, steps: float) -> Call:
    """What computes a node and rounds otherwise, in bodies of control flow too."""
    if node.attributes and node.subgraphs:
        return control_step(node, _rounded_part(node, rng, steps))
    step = _step(node)

    def rounded(arrays: Sequence[Any]) -> Sequence[Any]:
        results = step(arrays)
        if is_exact(node):
            return results
        results = _interpolated_elsewhere(node, arrays, results, rng, steps)
        results = _moved_by_mean(node, arrays, results, rng, steps)
        count = max(1.0, _terms(node, arrays, results) * _OF_A_TERM)
        sizes = _sizes_of_sums(node, arrays)
        return [_off(r, rng, steps * count, sizes) for r in results]

    return rounded


def _rounded_part(node: Node, rng: np.random.Generator, steps: float) -> MakePart:
    """Plans of bodies that round otherwise; of bodies that jump on floats, or draw, plans that compute as ever."""
    if any(_jumps(body) for body in node.subgraphs):
        return ON_CPU.body

    def part(body: Graph, changing: Collection[int]) -> Plan:
        made: Plan = make_plan(body, lambda n: Lowered(_rounded_step(n, rng, steps), HOST, n.operator), owned=False)
        return made

    return part


def _jumps(body: Graph) -> bool:
    return any(
        draws_random(n)
        or (is_discontinuous(n) and any(v is not None and v.dtype is not None and _floats(v.dtype) for v in n.inputs))
        or any(_jumps(g) for g in n.subgraphs)
        for n in body.nodes
    )


def _floats(dtype: np.dtype) -> bool:
    return float_like(dtype) or dtype.kind == "c"


def _interpolated_elsewhere(
    node: Node, given: Sequence[Any], results: Sequence[Any], rng: np.random.Generator, steps: float
) -> Sequence[Any]:
    if node.op_type not in ("Resize", "Upsample") or node.domain:
        return results
    x, *rest = given
    assert x is not None
    step = steps * float(np.finfo(np.float32).eps)
    moved = interpolated_elsewhere(node, x, rest, lambda: step * float(rng.choice((-1.0, 1.0))))
    return results if moved is None else [np.where(np.isfinite(moved), moved, results[0])]


def _moved_by_mean(
    node: Node, given: Sequence[Any], results: Sequence[Any], rng: np.random.Generator, steps: float
) -> Sequence[Any]:
    if node.domain or not node.op_type.endswith("Normalization"):
        return results
    x, scale = given[0], given[1] if len(given) > 1 else None
    if x is None or not float_like(x.dtype) or not x.size:
        return results
    step = steps * float(np.finfo(np.float64 if x.dtype == np.float64 else np.float32).eps)

    def off(count: int, shape: tuple[int, ...]) -> np.ndarray:
        return step * max(1.0, count * _OF_A_TERM) * rng.choice((-1.0, 1.0), shape)

    with np.errstate(all="ignore"):
        moved = moved_by_mean(node, x, scale, off)
        if moved is None:
            return results
        moved = np.where(np.isfinite(moved), moved, 0)  # an infinity is no rounding
        return [(results[0] + moved).astype(results[0].dtype), *results[1:]]


def _terms(node: Node, given: Sequence[Any], results: Sequence[Any]) -> int:
    """Of how many terms each element of a sum's result is made; 0 of other operators."""
    if not traits_of(node).sums:
        return 0
    x = given[1 if node.op_type.endswith("Loss") else 0]
    return int(x.size) // max(1, min(int(r.size) for r in results))


def _sizes_of_sums(node: Node, given: Sequence[Any]) -> np.ndarray | None:
    """For each element of a sum of products, what their absolute values add up to; None for other operators."""
    if node.domain or node.op_type not in PRODUCTS or not all(x is None or float_like(x.dtype) for x in given):
        return None
    factors = {k: abs(a) if isinstance(a, float) else a for k, a in node.attributes.items()}
    with np.errstate(all="ignore"):
        return _wide(run_node(node.replace(attributes=factors), [None if x is None else np.abs(x) for x in given])[0])


def _off(x: Any, rng: np.random.Generator, steps: float, sizes: np.ndarray | None = None) -> Any:
    """`x` off by rounding steps of its own, and of what it is the sum of, which is added in float32 at least."""
    if not isinstance(x, np.ndarray) or not float_like(x.dtype):
        return x
    finfo: Any = ml_dtypes.finfo
    with np.errstate(all="ignore"):
        wide = _wide(x)
        off = float(finfo(x.dtype).eps) * np.abs(wide)
        if sizes is not None:
            off = np.maximum(off, float(np.finfo(np.float64 if x.dtype == np.float64 else np.float32).eps) * sizes)
        off = np.where(np.isfinite(off), steps * off, 0.0)  # an infinity is no rounding
        return np.asarray(wide + off * rng.choice((-1.0, 1.0), x.shape)).astype(x.dtype)


def _wide(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def wide_dtype(body: Graph) -> np.dtype:
    """The dtype that `run_host` widens the floats of a graph to."""
    dtypes = {v.dtype for n in body.nodes for v in (*n.inputs, *n.outputs) if v is not None}
    return _F64 if any(d in (_F32, _F64) for d in dtypes) else _F32


def _run(node: Node, arrays: Sequence[Any], to: np.dtype) -> Sequence[Any]:
    traits = traits_of(node)  # what is about dtypes runs in those that the graph says
    if not (traits.cast or traits.quantizes) and any(float_like(a.dtype) for a in arrays if a is not None):
        try:
            return run_node(_retyped(node, to), arrays)
        except XRTError:  # onnx.reference and a few kernels accept the declared dtypes only
            pass
    declared = [a if v is None else _lower(a, v.dtype) for v, a in zip(node.inputs, arrays, strict=True)]
    return run_node(node, declared)


def _run_control(node: Node, env: Callable[[Value], Any]) -> Sequence[Any]:
    arrays = [None if v is None else env(v) for v in (*node.inputs, *node.captures)]
    with np.errstate(all="ignore"):
        return control_step(node, ON_CPU.body)(arrays)


def _retyped(node: Node, to: np.dtype) -> Node:
    """The node with float tensors of dtype `to`, for kernels that read the types of their arguments."""

    def lift(v: Value | None) -> Value | None:
        if v is None or not isinstance(v.type, TensorType) or v.type.dtype is None or not float_like(v.type.dtype):
            return v
        return Value(v.name, TensorType(to, v.type.shape))

    return node.replace(inputs=map(lift, node.inputs), outputs=map(lift, node.outputs))


def _read(value: Value | None, env: Values, to: np.dtype) -> Any:
    if value is None:
        return None
    return _lift(value.data, to) if value.data is not None else env[value]


def _lift(array: np.ndarray, to: np.dtype) -> np.ndarray:
    if not float_like(array.dtype) or array.dtype.itemsize >= to.itemsize:
        return array
    return array.astype(to)


def _lower(array: np.ndarray, dtype: np.dtype | None) -> np.ndarray:
    """`array` rounded to a float dtype."""
    if dtype is None or array.dtype == dtype or not float_like(dtype):
        return array
    with np.errstate(all="ignore"):
        return np.asarray(narrow(array, dtype))


def _last_uses(body: Graph) -> dict[int, list[Value]]:
    """Node index -> the values that are dead after it."""
    kept = set(body.outputs)
    found: dict[int, list[Value]] = {}
    for v, users in body.consumers.items():
        if v.data is None and v not in kept:
            found.setdefault(users[-1], []).append(v)
    return found

"""HostPlace: where the host computes: with NumPy on the CPU, or with CuPy on the device that a module was made for."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np

from xrt_core.engine.cuda import cuda_interface, naming_broken_context
from xrt_core.engine.device_kinds import CPU, Streams, device_kind, number_of
from xrt_core.errors import ExecutionError
from xrt_core.host.executor import HostKernel, cpu_inputs, host_kernel, reusable_inputs, reusing_kernel
from xrt_core.ir.graph import Graph, Node
from xrt_core.ir.op_traits import index_input
from xrt_core.kernels import find_kernel
from xrt_core.runtime.arrays import Converter, to_host, to_numpy
from xrt_core.runtime.control_flow import conditions, control_step
from xrt_core.runtime.input_checks import has_symbolic_index, index_bounds
from xrt_core.runtime.memory_planner import is_view
from xrt_core.runtime.plan import HOST, Call, Lowered, Plan, Scope, make_plan


class HostPlace:
    """A namespace of arrays and a device; not to be changed.

    xp: NumPy, or a namespace with CuPy's functions. device: on which it computes. on_cpu: it is NumPy. to_host: takes
    arrays to the namespace; to be called `within`. scope: makes a context in which the namespace works on the device;
    None for NumPy. check_indices: an index out of range, which CuPy does not see, is an error.
    """

    __slots__ = ("check_indices", "device", "on_cpu", "scope", "to_host", "xp")

    def __init__(self, xp: Any = np, device: str = CPU.name, check_indices: bool = False) -> None:
        streams = device_kind(device).streams
        self.xp, self.device = xp, device
        self.on_cpu = xp is np
        self.check_indices = check_indices and not self.on_cpu
        self.to_host: Converter = to_host(xp)
        self.scope: Scope | None = None
        if not self.on_cpu and streams is not None:
            self.scope = partial(_on_device, streams, number_of(device))

    @classmethod
    def beside(cls, device: str, check_indices: bool = False) -> HostPlace:
        """Where the host computes beside engines on `device`: there if it can, else on the CPU."""
        xp = device_kind(device).namespace()
        return cls() if xp is np else cls(xp, device, check_indices)

    def within(self) -> AbstractContextManager[Any]:
        """A context in which the namespace works on the device."""
        return contextlib.nullcontext() if self.scope is None else self.scope()

    def lower(self, node: Node) -> Lowered:
        """A node as a host step, which may reuse the memory of dead values; control flow with plans of its bodies."""
        # a plugin's operator may have a kernel that runs its subgraphs by itself
        if node.attributes and node.subgraphs and (node.captures or find_kernel(node.domain, node.op_type) is None):
            return Lowered(control_step(node, self.body), HOST, node.operator, cpu=conditions(node))
        call = host_kernel(node, self.xp)
        return Lowered(
            _checked(node, call) if self.check_indices else call,
            HOST,
            f"{node.operator} {node.name}".strip(),
            shares=is_view(node),
            reusable=reusable_inputs(node, self.xp),
            reusing=partial(reusing_kernel, node),
            cpu=cpu_inputs(node, self.xp),
        )

    def plan(self, body: Graph) -> Plan:
        """The plan of a graph that the host runs alone. Its arrays are the host's, or NumPy's."""
        made: Plan = make_plan(body, self.lower, to_host=self.to_host, within=self.scope)
        self.synchronize()  # constants are read on streams that nothing orders after this one
        return made

    def body(self, body: Graph, changing: Collection[int] = ()) -> Plan:
        """The plan of a body of control flow, for whatever shapes come."""
        made: Plan = make_plan(body, self.lower, owned=False, to_host=self.to_host, within=self.scope)
        return made

    def runner(self, body: Graph) -> Call:
        """The plan of a graph that the host runs alone, for arrays of any family."""
        plan, to_host = self.plan(body), self.to_host

        def call(arrays: Sequence[Any]) -> Sequence[Any]:
            return plan.run([to_host(a) for a in arrays])

        def call_on_device(arrays: Sequence[Any]) -> Sequence[Any]:
            with self.within():
                return call(arrays)

        return call if self.on_cpu else call_on_device

    def copies(self, arrays: Sequence[Any]) -> list[Any]:
        """New arrays in this place with the numbers of NumPy arrays, which are there. What the device has no dtype for
        stays NumPy's."""
        if self.on_cpu:
            return [x.copy() for x in arrays]
        with self.within():
            made = [self.to_host(x) for x in arrays]
        self.synchronize()
        return [x.copy() if x is y else x for x, y in zip(made, arrays, strict=True)]

    def synchronize(self) -> None:
        """Wait for all work on the device."""
        if not self.on_cpu:
            synchronize(self.device)


def _checked(node: Node, call: HostKernel) -> HostKernel:
    """A host step that raises ExecutionError for indices out of range; `call` where it has none, or no known range."""
    i = index_input(node)
    fixed = None if i is None else index_bounds(node)
    varies = i is not None and has_symbolic_index(node)
    if i is None or (fixed is None and not varies):
        return call

    def checked(arrays: Sequence[Any]) -> tuple[Any, ...]:
        given, bounds = arrays[i] if i < len(arrays) else None, fixed
        if varies:
            bounds = index_bounds(node, lambda v, axis: arrays[node.inputs.index(v)].shape[axis])
        if given is not None and bounds is not None and not bounds.are_met(to_numpy(given)):
            raise ExecutionError(
                f"node {node.name!r}: {node.operator}: input {i} has an index that is out of range: they go from "
                f"{list(bounds.low)} to {list(bounds.high)}"
            )
        return call(arrays)

    return checked


def synchronize(device: str) -> None:
    """Wait for all work on a device; nothing where its kind has no streams. Raises BrokenContextError."""
    streams = device_kind(device).streams
    if streams is not None:
        with naming_broken_context():
            streams.synchronize(number_of(device))


def overlap(one: Any, other: Any) -> bool:
    """Whether two arrays may share memory: of NumPy, or on a GPU of libraries that show where it is."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.may_share_memory(one, other)
    a, b = _extent(one), _extent(other)
    return a is not None and b is not None and a[0] < b[1] and b[0] < a[1]


def _extent(x: Any) -> tuple[int, int] | None:
    held = None if isinstance(x, np.ndarray) else cuda_interface(x)
    if held is None:
        return None
    begin = int(held["data"][0])
    return begin, begin + int(np.prod(held["shape"])) * np.dtype(held["typestr"]).itemsize


@contextlib.contextmanager
def _on_device(streams: Streams, device: int) -> Iterator[None]:
    with naming_broken_context(), streams.using(None, device):
        yield

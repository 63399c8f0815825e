"""The conformance kit on the run side, with stand-ins for CUDA and for TensorRT's engines: the host computes.

Parsing, `supports`, manifests, contexts, memory, streams and threads are the engine's own; what an engine would compute
on a GPU, the host's kernels compute on the memory that its addresses name. It shows that the wrapper is right, and says
nothing about TensorRT's numbers.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any, ClassVar

import pytest
import standin
from xrt_tensorrt import TensorRTEngine, _cuda, _toolkit, memory
from xrt_tensorrt.compiler import TensorRTCompiler

from xrt_core.engine.contract import CompileOptions, EngineStatus, Function
from xrt_core.testing import Capabilities
from xrt_core.testing.contract_tests import ContractTests
from xrt_core.testing.execution_tests import ExecutionTests
from xrt_core.testing.host_engine import HostExecutable
from xrt_core.testing.operator_tests import OperatorTests

CUDA = standin.Cuda()
_numbers = itertools.count()


class StandInEngine(TensorRTEngine):
    """TensorRT on a GPU that is the CPU's memory. Usable where the library parses."""

    name: ClassVar[str] = "tensorrt_standin"

    def probe(self) -> EngineStatus:
        try:
            toolkit = _toolkit.toolkit()
        except _toolkit.ToolkitError as e:
            return EngineStatus(False, reason=e.reason, remedy=e.remedy)
        return EngineStatus(True, toolkit.version, ("cuda:0",))

    def compiler(self, device: str, options: CompileOptions) -> TensorRTCompiler:
        if device != "cuda:0":
            return super().compiler(device, options)  # raises
        return _Compiler(_toolkit.toolkit(), 0, options)


class _Compiler(TensorRTCompiler):
    def network(self, function: Function, batch: int | None = None) -> _toolkit.Network:
        network = super().network(function, batch)
        network.function = function  # type: ignore[attr-defined] - for `_build`
        return network


def _build(self: Any, config: Any) -> memoryview:
    """Bytes that stand for an engine which computes the network's function on the host."""
    f = self.function
    run = HostExecutable(f, f.params, f.returns, ()).run
    names = (
        [type(p)(n, p.dtype, p.shape) for n, p in zip(ns, ps, strict=True)]
        for ns, ps in ((self.model.inputs, f.params), (self.model.outputs, f.returns))
    )
    blob = f"engine {next(_numbers)}".encode()
    standin.MODULE.engines[blob] = standin.Engine(CUDA, lambda *x: run([a.copy() for a in x]), *names)
    return memoryview(blob)


@pytest.fixture(autouse=True)
def _no_gpu_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins in the place of CUDA, of building and of loading."""
    monkeypatch.setattr(_cuda, "_runtime", lambda: CUDA)
    monkeypatch.setattr(_cuda, "why_unusable", lambda: "")
    monkeypatch.setattr(_cuda, "capability", lambda device=0: (8, 9))
    monkeypatch.setattr(memory, "_local", threading.local())
    monkeypatch.setattr(_toolkit.Network, "build", _build)
    monkeypatch.setattr(_toolkit.Toolkit, "deserialize", lambda self, blob: standin.MODULE.engines[bytes(blob)])
    monkeypatch.setattr(
        _toolkit.Toolkit, "new_context", lambda self, engine, **_: engine.create_execution_context(None)
    )
    CUDA.calls.clear()


class TestStandIn(ContractTests, ExecutionTests):
    """What the kit asks of a wrapper, less what another process would have to know of the stand-ins."""

    engine = StandInEngine
    capabilities = Capabilities(in_place=False)

    test_serialises_for_another_process = None
    test_importing_it_does_not_import_its_library = None
    test_without_its_library_it_says_what_to_install = None
    test_fingerprint_is_the_same_everywhere = None


@pytest.mark.slow
class TestStandInOperators(OperatorTests):
    """Every operator that is taken goes in and comes out with its dtype, shape and values."""

    engine = StandInEngine
    capabilities = Capabilities(in_place=False)

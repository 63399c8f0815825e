"""The contract around an executable: registration, imports, refusals, what an unavailable engine says, compiling."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from xrt_core.engine.boundary import inner_of
from xrt_core.engine.contract import CompileOptions, EngineStatus, GraphCompiler, Support
from xrt_core.engine.device_kinds import kinds, number_of
from xrt_core.engine.op_kernels import op_kernels
from xrt_core.errors import EngineError, EngineUnavailableError, OptionError, RegistrationError
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.types import TensorType
from xrt_core.plugins.discovery import DISABLE_VARIABLE
from xrt_core.testing import functions
from xrt_core.testing.base import SuiteBase
from xrt_core.testing.processes import run_python
from xrt_core.testing.subject import Subject
from xrt_core.testing.tolerance import assert_close


class ContractTests(SuiteBase):
    """What the core counts on before anything runs."""

    def test_is_registered_once(self, subject: Subject) -> None:
        """One listing line, ready; always the same object; a second engine of the name is refused."""
        lines = [line for line in subject.manager.listing() if line.name == subject.name]
        assert [line.status for line in lines] == ["ready"], lines
        assert inner_of(subject.manager.get(subject.name)) is subject.engine
        with pytest.raises(RegistrationError, match=f"{subject.name}.*registered twice"):
            subject.manager.register(type("Second", (type(subject.engine),), {}))

    def test_listing_does_not_import_it(self, subject: Subject) -> None:
        """The engine's name is known in a process that has not imported its package."""
        if subject.plugin is None:
            pytest.skip("no installed package provides the engine")
        module = subject.plugin.target.partition(":")[0]
        said = run_python(f"""
            import os
            os.environ.pop({DISABLE_VARIABLE!r}, None)
            from xrt_core.engine import engines
            assert {subject.name!r} in engines.names()
            assert {subject.name!r} in [line.name for line in engines.listing(probe=False)]
            print({module!r} in sys.modules)
        """)
        assert said == "False"

    def test_importing_it_does_not_import_its_library(self, subject: Subject) -> None:
        """The package and an engine object can be had for the price of a few modules."""
        toolkit = self._toolkit(subject)
        said = run_python(f"""
            from xrt_core.testing.subject import Subject
            Subject({subject.spec!r}).engine
            print(*(m for m in {list(toolkit)!r} if m in sys.modules))
        """)
        assert said == "", f"making the engine has imported {said}"

    def test_without_its_library_it_says_what_to_install(self, subject: Subject) -> None:
        """With the library out of reach the package imports, probe says why not and the cure, compiler refuses."""
        toolkit = self._toolkit(subject)
        said = run_python(
            f"""
            import json
            from xrt_core.engine import CompileOptions
            from xrt_core.errors import EngineUnavailableError
            from xrt_core.testing.subject import Subject
            subject = Subject({subject.spec!r})
            status = subject.status
            refused = ""
            try:
                subject.engine.compiler({subject.device!r}, CompileOptions())
            except EngineUnavailableError as e:
                refused = str(e)
            print(json.dumps([status.available, status.reason, status.remedy, refused]))
            """,
            blocked=toolkit,
        )
        available, reason, remedy, refused = json.loads(said.splitlines()[-1])
        assert not available, f"without {', '.join(toolkit)} the engine calls itself available"
        assert reason, "the status has no reason"
        assert remedy, "the status does not say what to install or set"
        assert refused, "compiler() has not raised EngineUnavailableError"

    def test_probe_names_version_and_devices(self, subject: Subject) -> None:
        """The status is an EngineStatus, has a version, and lists devices of the kinds that the class declares."""
        status: Any = subject.engine.probe()
        assert isinstance(status, EngineStatus)
        assert status.version, "the version of the library is not known"
        here = {d.partition(":")[0] for d in status.devices}
        assert here, "no device is listed"
        assert here <= set(subject.engine.devices) <= set(kinds.names())

    @pytest.mark.parametrize("dtype", ["bool", "float16", "float32", "float64", "int8", "int64"])
    def test_arrays_of_its_device_kind_come_back(self, subject: Subject, dtype: str) -> None:
        """A NumPy array of any layout is the same after the way to the device and back, and shares no memory."""
        kind = kinds.find(subject.device)
        if kind.arrays is None:
            pytest.skip(f"devices of kind {kind.name!r} have no class of arrays of their own")
        number = number_of(subject.device)
        whole = (np.arange(24).reshape(4, 6) % 2).astype(dtype)
        for x in (whole, whole.T, whole[::-1, ::2], whole[:0], whole[1, 2]):
            x = np.asarray(x)
            moved: Any = kind.arrays.from_host(x, number)
            assert kinds.of_array(type(moved)) is kind
            assert (moved.dtype, tuple(moved.shape), kind.device_of(moved)) == (x.dtype, x.shape, number)
            back = kind.arrays.to_host(moved)
            assert (type(back), back.dtype, back.shape) == (np.ndarray, x.dtype, x.shape)
            assert back.tobytes() == x.tobytes()
            back[...] = 1
            assert kind.arrays.to_host(moved).tobytes() == x.tobytes()

    def test_fingerprint_is_the_same_everywhere(self, subject: Subject) -> None:
        """The fingerprint is a text that another process gets too, so that what one stores another finds."""
        here = subject.engine.fingerprint(subject.device)
        assert isinstance(here, str)
        assert here
        assert subject.engine.fingerprint(subject.device) == here
        if not subject.is_known_elsewhere:
            return
        there = run_python(f"""
            from xrt_core.testing.subject import Subject
            subject = Subject({subject.spec!r})
            subject.status
            print(subject.engine.fingerprint({subject.device!r}))
        """)
        assert there == here

    def test_an_unknown_device_is_refused(self, subject: Subject) -> None:
        """A compiler for a device that is not here is an EngineUnavailableError that names it."""
        with pytest.raises(EngineUnavailableError, match="quantum"):
            subject.engine.compiler("quantum", CompileOptions())

    def test_an_unknown_option_is_refused(self, subject: Subject) -> None:
        """An option that the engine does not have is an error that names it."""
        with pytest.raises((OptionError, EngineError), match="no_such_option"):
            subject.engine.compiler(subject.device, CompileOptions(extra={"no_such_option": 1}))

    @pytest.mark.parametrize("what", ["operator", "rank", "dimension", "dtype"])
    def test_refuses_with_a_reason(self, subject: Subject, what: str) -> None:
        """An unknown operator, rank, dimension or dtype is refused in a sentence, the same at every call."""
        if what == "dimension" and subject.engine.dynamic_dims != "none":
            pytest.skip("it takes symbolic dimensions (dynamic_dims)")
        f32 = np.dtype(np.float32)
        static = TensorType(f32, (2, 3))
        bad = {
            "operator": static,
            "rank": TensorType(f32, None),
            "dimension": TensorType(f32, ("batch", 3)),
            "dtype": TensorType(None, (2, 3)),
        }[what]
        domain, op_type = ("xrt.kit", "NoSuchOperator") if what == "operator" else ("", "Neg")
        node = Node(op_type, [Value("x", bad)], [Value("y", bad)], domain=domain, version=13, name="n")
        verdict: Any = subject.supports(node)
        assert isinstance(verdict, Support)
        assert not verdict
        assert len(verdict.reason) > 8
        assert subject.supports(node) == verdict

    def test_supports_is_quick(self, subject: Subject) -> None:
        """A verdict takes microseconds: thousands of nodes are asked about for each signature."""
        node = functions.binary().body.nodes[0]
        subject.engine.prepare()
        rounds = []
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(200):
                subject.supports(node)
            rounds.append((time.perf_counter() - start) / 200)
        assert min(rounds) < 200e-6

    def test_its_kernels_are_of_operators_that_exist(self, subject: Subject) -> None:
        """No kernel is registered for an operator or an engine that there is not, or with too few arguments."""
        subject.engine.prepare()
        subject.supports(functions.binary().body.nodes[0])
        op_kernels.validate(subject.name)
        package = type(subject.engine).__module__.partition(".")[0]
        strays = op_kernels.strays(package, {subject.name, *subject.manager.names()})
        assert not strays, "\n".join(strays)

    def test_compiles(self, subject: Subject) -> None:
        """A compiler is a GraphCompiler and makes an Executable that tells what it is, as does each of its stages."""
        compiler: Any = subject.compiler()
        assert isinstance(compiler, GraphCompiler)
        function = functions.chain()[0]
        executable = subject.compile(function)
        assert executable.as_text()
        for stage in compiler.stages:
            assert compiler.as_text(function, function.params, function.returns, (), stage), stage

    @pytest.mark.parametrize(
        "options",
        [CompileOptions(fused=False), CompileOptions(phase="train"), CompileOptions(threads=1),
         CompileOptions(workspace_bytes=1 << 24, max_batch_size=8)],
        ids=["unfused", "train", "one_thread", "limits"],
    )  # fmt: skip
    def test_options_change_no_result(self, subject: Subject, options: CompileOptions) -> None:
        """Every field of CompileOptions is taken, and changes nothing but speed."""
        function, x = functions.chain()
        if not all(subject.supports(n, options.phase) for n in function.body.nodes):
            pytest.skip(f"the engine does not take these operators in phase {options.phase!r}")
        (want,) = subject.run(subject.compile(function), [x])
        (got,) = subject.run(subject.compile(function, options), [x])
        assert_close(got, want, inputs=[x])

    def test_a_failed_compilation_is_an_error_of_the_engine(self, subject: Subject) -> None:
        """What cannot be compiled is a CompileError (or another EngineError), and the compiler stays usable."""
        with pytest.raises(EngineError, match=r"NoSuchOperator|stranger"):
            subject.compile(functions.unknown_operator())
        self._adds(subject)

    def test_a_graph_without_nodes_or_inputs(self, subject: Subject) -> None:
        """Inputs handed through, constants, and a value returned twice are results like others."""
        x, y = functions.value("x", 2), functions.value("y", 2)
        constant = Value.constant(np.array([3, 1], np.int64), "c")
        nodes = [functions.node("Neg", [x], [y])]
        function = functions.function("through", [x], nodes, [x, constant, y, y])
        given = np.array([1, -2], np.float32)
        results = subject.run(subject.compile(function), [given])
        self._equal(results, [given, np.array([3, 1], np.int64), -given, -given])
        bare = functions.function("constants", [], [], [constant])
        self._equal(subject.run(subject.compile(bare), []), [np.array([3, 1], np.int64)])

    def test_a_whole_graph_through_xrt(self, subject: Subject) -> None:
        """XRTModule hands the graph to the engine, and gives what the host gives."""
        from xrt_core.engine import engines
        from xrt_core.module import XRTModule

        function, x = functions.chain()
        graph: Graph = function.body
        want = XRTModule(graph, engine="host")(x)
        temporary = subject.name not in engines.names()
        if temporary:
            engines.register(type(subject.engine))
        try:
            module = XRTModule(
                graph, engine=subject.name, device=subject.device, cache="off", prune=False, guard=False
            )
            got = module(x)
            explanation = module.explain()
        finally:
            if temporary:
                engines.unregister(subject.name)
        assert_close(got, want, inputs=[x])
        assert not explanation.errors
        assert explanation.engine_flops > 0, f"no node went to the engine:\n{explanation}"

    def _toolkit(self, subject: Subject) -> tuple[str, ...]:
        """The modules of the engine's library; skips where there is nothing to show."""
        if not subject.is_known_elsewhere:
            pytest.skip("the engine is known to this process only")
        if not subject.toolkit:
            pytest.skip("the engine declares no library of its own")
        return subject.toolkit

    def _adds(self, subject: Subject) -> None:
        """The engine still works."""
        a, b = np.ones((2, 3), np.float32), np.full((2, 3), 2, np.float32)
        (got,) = subject.run(subject.compile(functions.binary()), [a, b])
        assert_close(got, a + b)

    def _equal(self, got: Sequence[np.ndarray], want: Sequence[np.ndarray]) -> None:
        assert len(got) == len(want)
        for i, (g, w) in enumerate(zip(got, want, strict=True)):
            assert_close(g, w, what=f"output {i}")

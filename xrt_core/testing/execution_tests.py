"""Executables at work: runs, storage, aliases, threads, repetition, memory, serialisation, bad input."""

from __future__ import annotations

import gc
import pathlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from xrt_core.engine.contract import Executable, RunOptions
from xrt_core.errors import CompileError, ExecutionError, UnsupportedError
from xrt_core.ir.graph import Value
from xrt_core.ir.types import TensorType, dtype_name
from xrt_core.testing import functions
from xrt_core.testing.base import SuiteBase
from xrt_core.testing.processes import run_python
from xrt_core.testing.subject import Subject, address, as_numpy
from xrt_core.testing.tolerance import assert_close

_THREADS = 8


class ExecutionTests(SuiteBase):
    """What the core counts on while an executable runs."""

    def test_results_are_as_declared(self, subject: Subject) -> None:
        """One array per return parameter, of its dtype and shape, readable by NumPy."""
        function, x = functions.chain()
        results: Any = subject.compile(function).run([x])
        assert len(results) == len(function.returns)
        for got, declared in zip(results, function.returns, strict=True):
            assert tuple(got.shape) == declared.shape
            array = as_numpy(got)
            assert (array.dtype, array.shape) == (declared.dtype, declared.shape)

    def test_one_executable_for_all_sizes(self, subject: Subject) -> None:
        """With `dynamic_dims` a symbolic function is compiled once, and is right for sizes in any order, 1 included."""
        if subject.engine.dynamic_dims == "none":
            pytest.skip("it declares static shapes only (dynamic_dims)")
        x, h, b, y = (Value(n, TensorType(np.dtype(np.float32), ("b", "n", 4))) for n in "xhby")
        weights = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
        nodes = [
            functions.node("MatMul", [x, Value.constant(weights, "w")], [h]),
            functions.node("Add", [h, x], [b]),
            functions.node("Relu", [b], [y]),
        ]
        function = functions.function("symbolic", [x], nodes, [y])
        assert function.is_symbolic
        for n in nodes:
            said = subject.supports(n)
            assert said.ok, said.reason
        executable = subject.compile(function)
        rng = np.random.default_rng(1)
        for sizes in ((2, 3), (5, 1), (1, 1), (1, 64), (2, 3)):
            a = rng.standard_normal((*sizes, 4)).astype(np.float32)
            (got,) = subject.run(executable, [a])
            assert_close(got, np.maximum(a @ weights + a, 0))
        with pytest.raises(ExecutionError):
            executable.run([np.ones((2, 3, 5), np.float32)])
        (got,) = subject.run(executable, [np.ones((1, 2, 4), np.float32)])
        assert got.shape == (1, 2, 4)

    def test_shapes_that_depend_on_data(self, subject: Subject) -> None:
        """With `open_shapes` NonZero gives as many places as there are; with "any", what follows goes by that number,
        which may be 0."""
        if subject.engine.open_shapes == "none":
            pytest.skip("it takes no nodes whose shapes depend on data (open_shapes)")
        x, y = functions.value("x", 4, 3), Value("y", TensorType(np.dtype(np.float32), (None,)))
        at, rows = (Value(n, TensorType(np.dtype(np.int64), d)) for n, d in (("at", (2, None)), ("rows", (None, 2))))
        nodes = [functions.node("NonZero", [x], [at])]
        if subject.engine.open_shapes == "any":
            nodes += [
                functions.node("Transpose", [at], [rows]),
                functions.node("GatherND", [x, rows], [z := Value("z", y.type)]),
                functions.node("Neg", [z], [y]),
            ]
        for n in nodes:
            said = subject.supports(n)
            assert said.ok or subject.engine.open_shapes == "results", said.reason
            if not said.ok:
                pytest.skip(said.reason)
        made = [v for v in nodes[-1].outputs if v is not None]
        executable = subject.compile(functions.function("open", [x], nodes, made))
        rng = np.random.default_rng(2)
        for share in (0.5, 0.0, 1.0, 0.2):
            a = (rng.standard_normal((4, 3)) * (rng.random((4, 3)) < share)).astype(np.float32)
            (got,) = subject.run(executable, [a])
            assert_close(got, -a[np.nonzero(a)] if len(nodes) > 1 else np.array(np.nonzero(a)))

    def test_indices_that_are_checked(self, subject: Subject) -> None:
        """The operators of `checks_indices` raise on the CPU where an index that the function computes is out of
        range."""
        if not subject.engine.checks_indices or not subject.device.startswith("cpu"):
            pytest.skip("it declares no operators that check indices (checks_indices)")
        for op in subject.engine.checks_indices:
            x, u = functions.value("x", 3, 2), functions.value("u", 1, 2)
            shape = (1, 1) if op.endswith("ND") else (1,) if op == "Gather" else (1, 2)
            i, j = (Value(n, TensorType(np.dtype(np.int64), shape)) for n in "ij")
            rows = (3, 2) if op.startswith("Scatter") else (1, 2)
            given = [x, j, u] if op.startswith("Scatter") else [x, j]
            y = functions.value("y", *rows)
            one = Value.constant(np.array(1, np.int64), "one")
            nodes = [functions.node("Add", [i, one], [j]), functions.node(op, given, [y])]
            floats = [v for v in given if v is not j]
            executable = subject.compile(functions.function(op, [*floats, i], nodes, [y]))
            arrays = [np.ones((3, 2) if v is x else (1, 2), np.float32) for v in floats]
            for index in (0, 1, -4):  # counted from the end where it is negative
                subject.run(executable, [*arrays, np.full(shape, index, np.int64)])
            for index in (2, -5, 1 << 40, -(1 << 40)):
                with pytest.raises(ExecutionError):
                    executable.run([*arrays, np.full(shape, index, np.int64)])

    def test_results_feed_the_next_run(self, subject: Subject) -> None:
        """The engine's own arrays are inputs too."""
        add = subject.compile(functions.binary("Add", 4))
        one = np.ones(4, np.float32)
        (y,) = add.run([one, one])
        (z,) = add.run([y, y])
        assert_close(as_numpy(z), 4 * one)

    def test_runs_that_do_not_wait(self, subject: Subject) -> None:
        """Results of unblocked runs, many of them under way and feeding each other, are the same once they are read."""
        size = 64 if subject.capabilities.simulated else 1 << 16
        add = subject.compile(functions.binary("Add", size))
        one = np.ones(size, np.float32)
        y: Any = one
        for _ in range(10):
            (y,) = add.run([y, one], block_until_done=False)
        assert_close(as_numpy(y), 11 * one)

    @pytest.mark.parametrize("layout", ["transposed", "strided", "reversed", "stretched", "unaligned", "read_only"])
    def test_any_layout_of_an_input(self, subject: Subject, layout: str) -> None:
        """Inputs that are not contiguous, not aligned, overlapping or read-only are read as they are, and left so."""
        rng = np.random.default_rng(3)
        whole = rng.standard_normal((12, 16), np.float32)
        x = {
            "transposed": whole[:6, :4].T,
            "strided": whole[::3, 1:13:2],
            "reversed": whole[3::-1, 5::-1],
            "stretched": np.broadcast_to(whole[0, :6], (4, 6)),
            "unaligned": _unaligned(whole[:4, :6]),
            "read_only": whole[:4, :6].copy(),
        }[layout]
        if layout == "read_only":
            x.flags.writeable = False
        function = functions.binary("Sub", 4, 6)
        before, kept = x.copy(), whole.copy()
        ones = np.ones((4, 6), np.float32)
        (got,) = subject.run(subject.compile(function), [x, ones])
        assert_close(got, before - ones, inputs=[before])
        assert x.tobytes() == before.tobytes()
        assert whole.tobytes() == kept.tobytes()

    def test_inputs_are_never_modified(self, subject: Subject) -> None:
        """A run leaves its inputs as they were, large aligned ones and writable ones too."""
        size = 64 if subject.capabilities.simulated else 1 << 16
        executable = subject.compile(functions.binary("Mul", size))
        a, b = _aligned(size), _aligned(size)
        a[:], b[:] = 3, 2
        subject.run(executable, [a, b])
        assert (a == 3).all()
        assert (b == 2).all()

    def test_nothing_is_aliased_unasked(self, subject: Subject) -> None:
        """Writing into an input after the run changes no result: an input handed through is not the caller's array."""
        size = 64 if subject.capabilities.simulated else 1 << 16
        x, y, z = (functions.value(n, size) for n in "xyz")
        shape = np.array([size // 8, 8], np.int64)
        nodes = [functions.node("Identity", [x], [y]), functions.node("Add", [x, x], [z])]
        seen = [y, z]
        reshaped = functions.node("Reshape", [x, Value.constant(shape, "shape")], [functions.value("r", *shape)])
        if subject.supports(reshaped):
            nodes.append(reshaped)
            seen += [v for v in reshaped.outputs if v is not None]
        executable = subject.compile(functions.function("views", [x], nodes, seen))
        given = _aligned(size)
        given[:] = 1
        results = executable.run([given])
        given[:] = 7
        for got, want in zip(results, (1, 2, 1), strict=False):
            assert (as_numpy(got) == want).all()

    def test_results_never_share_storage_with_later_ones(self, subject: Subject) -> None:
        """Each run owns its results: those of an earlier run stay as they are."""
        size = 64 if subject.capabilities.simulated else 1 << 14
        executable = subject.compile(functions.binary("Add", size))
        held = []
        for i in range(5):
            x = np.full(size, i, np.float32)
            held.append(executable.run([x, x])[0])
        for i, r in enumerate(held):
            assert (as_numpy(r) == 2 * i).all()
        places = [p for r in held if (p := address(r)) is not None]
        assert len(set(places)) == len(places)

    # --- aliases ------------------------------------------------------------------------------------------------

    def test_updates_in_a_row(self, subject: Subject) -> None:
        """An aliased output is right, and so is the other one that reads the same input, over many updates."""
        update, p = self._update(subject), np.full(1024, 100, np.float32)
        g = np.ones(1024, np.float32)
        current: Any = p
        for i in range(5):
            total, current = update.run([current, g])
            assert (as_numpy(total) == 101 - i).all()
        assert (as_numpy(current) == 95).all()

    def test_an_update_is_visible_in_place(self, subject: Subject) -> None:
        """The new value lies in the storage of the old one, where that is an array of the engine's own."""
        update = self._update(subject)
        g = np.ones(1024, np.float32)
        _, first = update.run([np.full(1024, 5, np.float32), g])
        before = address(first)
        _, second = update.run([first, g])
        after = address(second)
        assert (as_numpy(second) == 3).all()
        in_place = before is not None and before == after
        wanted = subject.capabilities.in_place
        if wanted is None and not in_place:
            pytest.skip("the engine does not update in place, and does not say that it does")
        assert in_place == (wanted is not False), f"the old value lay at {before}, the new one lies at {after}"
        if in_place:
            try:
                old = as_numpy(first)
            except Exception:  # an array that was consumed may say so in any way
                return
            assert (old == 3).all(), "the old array shows neither the new value nor that it is gone"

    @pytest.mark.parametrize("own", [False, True], ids=["numpy", "own_array"])
    def test_without_donation_the_input_stays(self, subject: Subject, own: bool) -> None:
        """`donate=False` keeps the old value readable and unchanged."""
        update = self._update(subject)
        g, zero = np.ones(1024, np.float32), np.zeros(1024, np.float32)
        p: Any = np.full(1024, 5, np.float32)
        if own:
            p = update.run([p, zero])[1]
        _, new = update.run([p, g], run_options=RunOptions(donate=False))
        assert (as_numpy(new) == 4).all()
        assert (as_numpy(p) == 5).all()

    def test_the_input_that_is_not_aliased_stays(self, subject: Subject) -> None:
        """Only the input that an alias names may be written into."""
        update = self._update(subject)
        _, g = update.run([np.full(1024, 2, np.float32), np.ones(1024, np.float32)])
        update.run([np.full(1024, 5, np.float32), g])
        assert (as_numpy(g) == 1).all()

    # --- many runs ------------------------------------------------------------------------------------------------

    def test_repeated_runs_are_bitwise_equal(self, subject: Subject) -> None:
        """Equal inputs give equal bits, unless the engine declares otherwise."""
        function, x = functions.chain()
        executable = subject.compile(function)
        (first,) = subject.run(executable, [x])
        for _ in range(3 if subject.capabilities.simulated else 20):
            (again,) = subject.run(executable, [x])
            if subject.capabilities.deterministic:
                assert again.tobytes() == first.tobytes()
            else:
                assert_close(again, first, inputs=[x])

    @pytest.mark.parametrize("op_type", ["ScatterElements", "ScatterND"])
    def test_no_update_is_lost(self, subject: Subject, op_type: str) -> None:
        """Updates of the same element are all added, where there are enough of them for several threads."""
        count, rows, width = (16, 4, 8) if subject.capabilities.simulated else (2048, 8, 1024)
        columns = width if op_type == "ScatterElements" else 1
        x, y = functions.value("x", rows, width), functions.value("y", rows, width)
        u, i = functions.value("u", count, width), functions.value("i", count, columns, dtype=np.int64)
        scatter = functions.node(op_type, [x, i, u], [y], reduction="add")
        if not subject.supports(scatter):
            pytest.skip("the engine does not take such an operator")
        executable = subject.compile(functions.function("scatter", [x, i, u], [scatter], [y]))
        given = np.random.default_rng(0)
        places, updates = given.integers(0, rows, count), given.random((count, width), np.float32)
        want = np.zeros((rows, width))
        np.add.at(want, places, updates)
        indices = np.broadcast_to(places[:, None], (count, columns)).copy()
        for _ in range(2 if subject.capabilities.simulated else 10):
            (got,) = subject.run(executable, [np.zeros((rows, width), np.float32), indices, updates])
            assert_close(got, want, dtype=updates.dtype, inputs=[updates])

    def test_many_threads_share_one_executable(self, subject: Subject) -> None:
        """Calls from many threads at once each get the results of their own inputs."""
        function, x = functions.chain()
        executable = subject.compile(function)
        inputs = [x * (i + 1) for i in range(_THREADS)]
        want = [subject.run(executable, [v])[0] for v in inputs]
        rounds = 2 if subject.capabilities.simulated else 40

        def call(i: int) -> None:
            for _ in range(rounds):
                (got,) = subject.run(executable, [inputs[i]])
                assert_close(got, want[i], inputs=[inputs[i]], what=f"thread {i}")

        with ThreadPoolExecutor(_THREADS) as pool:
            for done in [pool.submit(call, i) for i in range(_THREADS)]:
                done.result()

    def test_many_threads_compile(self, subject: Subject) -> None:
        """One compiler serves many threads at once."""

        def make(i: int) -> tuple[np.ndarray, np.ndarray]:
            x = np.full((i + 1, 2), i, np.float32)
            return subject.run(subject.compile(functions.binary("Add", i + 1, 2)), [x, x])[0], x

        with ThreadPoolExecutor(4) as pool:
            for got, x in pool.map(make, range(4)):
                assert_close(got, 2 * x)

    def test_memory_stays_level(self, subject: Subject) -> None:
        """A thousand runs leave no more memory in use than the declared growth."""
        statm = pathlib.Path("/proc/self/statm")
        if not statm.exists() or subject.capabilities.simulated:
            pytest.skip("memory in use is not measured here: no /proc, or a simulator")
        executable = subject.compile(functions.binary("Add", 1 << 14))
        x = np.ones(1 << 14, np.float32)

        def grow(runs: int) -> int:
            for _ in range(runs):
                executable.run([x, x])
            gc.collect()
            return int(statm.read_text().split()[1]) * 4096

        before = grow(200)
        grown = grow(1000) - before
        allowed = subject.capabilities.growth_bytes
        assert grown < allowed, f"1000 runs with results of 64 KB have grown the process by {grown >> 10} KB"

    # --- serialisation ---------------------------------------------------------------------------------------------

    def test_serialises_for_another_process(self, subject: Subject, tmp_path: pathlib.Path) -> None:
        """What one process serialises, another loads and runs to the same numbers."""
        function, x = functions.chain()
        executable = subject.compile(function)
        blob = self._blob(subject, executable)
        if not subject.is_known_elsewhere:
            pytest.skip("the engine is known to this process only")
        (tmp_path / "blob").write_bytes(blob)
        np.save(tmp_path / "x.npy", x)
        run_python(f"""
            import pathlib
            import numpy as np
            from xrt_core.testing.subject import Subject
            folder = pathlib.Path({str(tmp_path)!r})
            subject = Subject({subject.spec!r}, {subject.device!r})
            loaded = subject.compiler().load((folder / "blob").read_bytes())
            (y,) = subject.run(loaded, [np.load(folder / "x.npy")])
            np.save(folder / "y.npy", y)
        """)
        (want,) = subject.run(executable, [x])
        got = np.load(tmp_path / "y.npy")
        if subject.capabilities.deterministic:
            assert got.tobytes() == want.tobytes()
        assert_close(got, want, inputs=[x])

    def test_aliases_survive_serialisation(self, subject: Subject) -> None:
        """A loaded update gives the same results in the same order, and keeps its input where donation is off."""
        update = subject.compiler().load(self._blob(subject, self._update(subject)))
        p = np.full(1024, 5, np.float32)
        total, new = update.run([p, np.ones(1024, np.float32)], run_options=RunOptions(donate=False))
        assert (as_numpy(total) == 6).all()
        assert (as_numpy(new) == 4).all()
        assert (p == 5).all()

    @pytest.mark.parametrize("damage", ["cut", "foreign", "empty"])
    def test_damaged_blobs_are_refused(self, subject: Subject, damage: str) -> None:
        """What does not fit is a CompileError, never a crash or a wrong executable."""
        blob = self._blob(subject, subject.compile(functions.chain()[0]))
        bad = {"cut": blob[: len(blob) // 2], "foreign": b"not an executable of any engine", "empty": b""}[damage]
        with pytest.raises(CompileError):
            subject.compiler().load(bad)

    # --- failures --------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("fault", ["too few", "too many", "dtype", "shape", "rank", "no array"])
    def test_bad_input_is_an_execution_error(self, subject: Subject, fault: str) -> None:
        """Inputs that do not fit are an ExecutionError, after which the executable works as before."""
        executable = subject.compile(functions.binary("Add", 2, 3))
        good = np.ones((2, 3), np.float32)
        faults: dict[str, list[Any]] = {
            "too few": [good],
            "too many": [good, good, good],
            "dtype": [good, good.astype(np.float64)],
            "shape": [good, np.ones((2, 4), np.float32)],
            "rank": [good, np.ones(3, np.float32)],
            "no array": [good, "nothing"],
        }
        with pytest.raises(ExecutionError):
            executable.run(faults[fault])
        (got,) = subject.run(executable, [good, good])
        assert_close(got, good + good)

    def _update(self, subject: Subject) -> Executable:
        return subject.compile(functions.update())

    def _blob(self, subject: Subject, executable: Executable) -> bytes:
        wanted = subject.capabilities.serialisation
        try:
            blob: Any = executable.serialize()
        except UnsupportedError as e:
            if wanted:
                raise
            pytest.skip(f"the engine does not serialise: {e}")
        assert wanted is not False, "the engine says that it does not serialise, and has"
        assert isinstance(blob, bytes), f"serialize() gave a {type(blob).__name__}, expected bytes"
        return blob


def _aligned(size: int) -> np.ndarray:
    """float32 memory that begins at a multiple of 64, which engines may read in place."""
    raw = np.empty(size * 4 + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size * 4].view(np.float32)


def _unaligned(x: np.ndarray) -> np.ndarray:
    """`x` in memory that begins at no multiple of its item size."""
    raw = np.empty(x.nbytes + 1, np.uint8)
    made = raw[1:].view(np.dtype(x.dtype)).reshape(x.shape)
    made[...] = x
    assert not made.flags.aligned, f"{dtype_name(x.dtype)} is always aligned"
    return made

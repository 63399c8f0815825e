"""Arrays of JAX and torch through XRTModule: in and out in one family, without copies where memory can be shared."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tests.fake_engines import fake_engine
from tests.random_graphs import F32, I64, graph_of, ints, node
from xrt_core.errors import InputError
from xrt_core.ir.graph import Value
from xrt_core.ir.types import SequenceType, TensorType
from xrt_core.module import XRTModule
from xrt_core.runtime.arrays import family_of, from_numpy, to_numpy

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
jnp = jax.numpy

X = np.array([1, -2], np.float32)


def unary(op: str = "Neg", dtype: Any = F32, engine: str = "host", more: tuple[Value, ...] = (), **a: Any) -> XRTModule:
    x, y = Value("x", TensorType(np.dtype(dtype), None)), Value("y")
    return XRTModule(graph_of([x], [y], [node(op, [x, *more], [y], **a)]), engine=engine)


def engines() -> list[str]:
    from xrt_core.engine import engines as known

    return ["host", "fake", *(["xla"] if "xla" in known.names() else [])]


@pytest.fixture(params=engines())
def engine(request: pytest.FixtureRequest) -> Any:
    with fake_engine():
        yield request.param


def test_torch_in_torch_out(engine: str) -> None:
    """Twice, as the second call takes the hot path; also a tensor that wants gradients, and a strided one."""
    m = unary(engine=engine)
    for given in (torch.tensor(X), torch.tensor(X, requires_grad=True), torch.tensor(np.stack([X, X])).T[:, 0]):
        for _ in range(2):
            y = m(given)
            assert isinstance(y, torch.Tensor)
            np.testing.assert_array_equal(y.numpy(), -given.detach().numpy())
            y += 1  # the caller's own


def test_jax_in_jax_out(engine: str) -> None:
    """Also where 64-bit types are off in the caller's configuration."""
    m = unary(engine=engine)
    for _ in range(2):
        y = m(jnp.asarray(X))
        assert isinstance(y, jax.Array)
        np.testing.assert_array_equal(y, -X)
    assert not jax.config.jax_enable_x64
    x = Value("x", TensorType(I64, (2,)))
    y = Value("y")
    wide = XRTModule(graph_of([x], [y], [node("Neg", [x], [y])]), engine=engine)
    assert wide(np.array([1, 1 << 40])).tolist() == [-1, -(1 << 40)]


@pytest.mark.parametrize(
    "name",
    ["bfloat16", "float16", "float64", "int8", "int64", "uint8", "bool", "float8_e4m3fn", "float8_e5m2", "complex64"],
)
def test_dtypes_of_torch(name: str, engine: str) -> None:
    """What both libraries have comes and goes as it is, scalars and empty tensors included."""
    import ml_dtypes

    dtype = getattr(torch, name)
    m = unary("Reshape", np.dtype(getattr(ml_dtypes, name, name)), engine, (ints(-1, 1),))
    given = torch.tensor([0, 1, 1]).to(dtype)
    for x in (given, given[:0], given[0]):
        y = m(x)
        assert y.dtype == dtype
        assert y.shape == (x.numel(), 1)
        assert torch.equal(y.to(torch.complex64).reshape(-1), x.to(torch.complex64).reshape(-1))


def test_conjugates_and_negatives_of_torch_are_resolved() -> None:
    """Lazy views of torch hold other numbers in memory than they stand for."""
    z = torch.tensor([1 + 2j])
    assert to_numpy(z.conj()).tolist() == [1 - 2j]
    assert to_numpy(z.conj().imag).tolist() == [-2]


def test_what_torch_has_no_dtype_for_stays_numpy() -> None:
    """Text."""
    s, x, y = Value("s", TensorType(np.dtype(object), (1,))), Value("x", TensorType(F32, None)), Value("y")
    m = XRTModule(graph_of([x, s], [y], [node("Identity", [s], [y])]), engine="host")
    assert m(torch.tensor(X), np.array(["a"])).tolist() == ["a"]


def test_reversed_results_reach_torch() -> None:
    """torch has no negative strides."""
    m = unary("Slice", more=(ints(-1), ints(-9), ints(0), ints(-1)))
    assert m(torch.tensor(X)).tolist() == [-2, 1]


def test_the_first_array_decides_the_family() -> None:
    """Also where it stands in a list."""
    a, b, y = Value("a", TensorType(F32, (2,))), Value("b", TensorType(F32, (2,))), Value("y")
    m = XRTModule(graph_of([a, b], [y], [node("Add", [a, b], [y])]), engine="host")
    arrays = {"numpy": X, "torch": torch.tensor(X), "jax": jnp.asarray(X)}
    for first, x in arrays.items():
        for z in arrays.values():
            for _ in range(2):
                assert family_of(type(m(x, z))) == first
                np.testing.assert_array_equal(np.asarray(m(x, z)), 2 * X)
    s = Value("s", SequenceType(TensorType(F32)))
    m = XRTModule(graph_of([s], [y], [node("ConcatFromSequence", [s], [y], axis=0)]), engine="host")
    assert isinstance(m([torch.tensor(X), X]), torch.Tensor)
    assert type(m([X, torch.tensor(X)])) is np.ndarray


def test_results_do_not_alias_torch_or_numpy_inputs(engine: str) -> None:
    """Through views on the host, and through whatever the engine makes of them."""
    for m in (unary("Reshape", engine=engine, more=(ints(-1),)), unary("Identity", engine=engine)):
        for given in (torch.arange(4096, dtype=torch.float32), np.arange(4096, dtype=np.float32)):
            y = m(given)
            assert not np.shares_memory(np.asarray(y), np.asarray(given))


def test_inputs_are_read_in_place() -> None:
    """CPU memory of the three libraries is shared on the way in."""
    for given in (torch.tensor(X), jnp.asarray(X), X):
        assert np.shares_memory(to_numpy(given), np.asarray(given))


def test_an_output_of_xla_reaches_torch_in_place() -> None:
    """No copy on the way out: the tensor stands where the engine wrote."""
    pytest.importorskip("xrt_xla")
    import tracemalloc

    given = torch.arange(1 << 20, dtype=torch.float32)
    m = unary("Neg", engine="xla")
    m(given)
    tracemalloc.start()
    y = m(given)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20  # NumPy's copies are traced, XLA's own buffers are not
    y[0] = 5
    assert float(m(given)[0]) == 0


def test_a_torch_without_cuda_gets_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a torch does not raise for JAX's arrays on a GPU: it asserts that it has CUDA."""

    def asserts(_: Any) -> Any:
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch, "from_dlpack", asserts)
    y = from_numpy("torch")(jnp.asarray(X))
    assert isinstance(y, torch.Tensor)
    np.testing.assert_array_equal(y.numpy(), X)


def test_a_tracer_is_refused() -> None:
    """Inside jax.jit there are no values to run on."""
    m = unary()
    with pytest.raises(InputError, match="input 'x': this .*Tracer.* cannot be read"):
        jax.jit(m)(jnp.asarray(X))
    np.testing.assert_array_equal(m(X), -X)


def test_deleted_and_sparse_arrays_are_refused(engine: str) -> None:
    """As inputs, not as failures of the engine: it keeps its cluster."""
    m = unary(engine=engine)
    m(jnp.asarray(X))
    for _ in range(4):
        gone = jnp.asarray(X) + 0
        gone.delete()
        with pytest.raises(InputError, match="cannot be read"):
            m(gone)
    assert not m.explain().lost
    with pytest.raises(InputError, match="input 'x': this torch.Tensor cannot be read"):
        m(torch.tensor(X).to_sparse())
    np.testing.assert_array_equal(m(X), -X)


def test_numpy_alone_needs_no_other_library() -> None:
    """Running on the host with NumPy arrays imports neither jax nor torch."""
    code = (
        "import sys, numpy as np; from tests.test_module import unary;"
        "unary()(np.ones(2, np.float32));"
        "bad = {'jax', 'torch', 'cupy', 'numba', 'onnxruntime'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_maps_of_numbers_are_not_copied() -> None:
    """Probabilities of a classifier, a map a row; what is an array in one is read."""
    plain, mixed = {"cat": 0.25, "dog": 0.75}, {"cat": 0.25, "dog": np.array(0.75, np.dtype(">f4"))}
    assert to_numpy([plain])[0] is plain
    assert to_numpy(mixed)["dog"].dtype.isnative

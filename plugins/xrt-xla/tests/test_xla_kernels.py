"""The kernels with forms of their own, against plain NumPy in float64 and exact integers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from xla_functions import compile_nodes
from xrt_xla import XlaEngine
from xrt_xla.kernels import convolution, winograd
from xrt_xla.kernels.context import XlaContext
from xrt_xla.kernels.convolution import form_of
from xrt_xla.kernels.transposed import transposed_form

from xrt_core.ir.graph import Node, Value
from xrt_core.ir.types import TensorType

RNG = np.random.default_rng(11)


def _correlate(x: np.ndarray, w: np.ndarray, strides: Any, dilations: Any, begin: Any, end: Any, group: int) -> Any:
    """The definition of Conv, one output position at a time, in float64."""
    rank = x.ndim - 2
    x, w = x.astype(np.float64), w.astype(np.float64)
    x = np.pad(x, [(0, 0), (0, 0), *zip(begin, end, strict=True)])
    reach = [(w.shape[2 + i] - 1) * dilations[i] + 1 for i in range(rank)]
    out = [(x.shape[2 + i] - reach[i]) // strides[i] + 1 for i in range(rank)]
    y = np.zeros((x.shape[0], w.shape[0], *out))
    each_in, each_out = x.shape[1] // group, w.shape[0] // group
    for at in itertools.product(*map(range, out)):
        box = tuple(slice(at[i] * strides[i], at[i] * strides[i] + reach[i], dilations[i]) for i in range(rank))
        for g in range(group):
            part = x[(slice(None), slice(g * each_in, (g + 1) * each_in), *box)].reshape(x.shape[0], -1)
            rows = w[g * each_out : (g + 1) * each_out].reshape(each_out, -1)
            y[(slice(None), slice(g * each_out, (g + 1) * each_out), *at)] = part @ rows.T
    return y


def _spread(x: np.ndarray, w: np.ndarray, strides: Any, dilations: Any, group: int) -> Any:
    """The definition of ConvTranspose without padding: every element adds its scaled filter, in float64."""
    rank = x.ndim - 2
    full = [(x.shape[2 + i] - 1) * strides[i] + (w.shape[2 + i] - 1) * dilations[i] + 1 for i in range(rank)]
    each_in, each_out = x.shape[1] // group, w.shape[1]
    y = np.zeros((x.shape[0], each_out * group, *full))
    for c, at in itertools.product(range(x.shape[1]), itertools.product(*map(range, x.shape[2:]))):
        g = c // each_in
        box = tuple(
            slice(at[i] * strides[i], at[i] * strides[i] + (w.shape[2 + i] - 1) * dilations[i] + 1, dilations[i])
            for i in range(rank)
        )
        where = (slice(None), slice(g * each_out, (g + 1) * each_out), *box)
        element = x[(slice(None), c, *at)].astype(np.float64).reshape(-1, *(1,) * (rank + 1))
        y[where] += element * w[c].astype(np.float64)
    return y


def _run(
    engine: XlaEngine,
    op_type: str,
    inputs: list[Any],
    out: np.ndarray,
    constant: frozenset[int],
    version: int,
    **attrs: Any,
) -> Any:
    """One node with some inputs as constants (stored outside the program), the result as NumPy."""
    values = [
        None
        if x is None
        else Value.constant(x, f"c{i}")
        if i in constant
        else Value(f"x{i}", TensorType(x.dtype, x.shape))
        for i, x in enumerate(inputs)
    ]
    given = [i for i, v in enumerate(values) if v is not None and i not in constant]
    y = Value("y", TensorType(out.dtype, out.shape))
    node = Node(op_type, values, [y], attrs, version=version, name="n")
    entries = [v for i in given if (v := values[i]) is not None]
    executable = compile_nodes(engine, entries, [node], [y], extra={"fold_bytes": 0})
    return np.asarray(executable.run([inputs[i] for i in given])[0])


# form, input, filter, attributes
CONVOLUTIONS = [
    ("small", (1, 4, 9, 8), (4, 4, 3, 3), {"pads": (1, 1, 1, 1), "strides": (2, 1)}),
    ("depthwise", (2, 1, 9, 8), (6, 1, 3, 3), {"pads": (0, 1, 1, 1), "strides": (2, 2)}),
    ("patches", (2, 3, 9, 8), (4, 3, 3, 3), {"pads": (0, 1, 1, 1), "strides": (2, 2)}),
    ("columns", (3, 9, 7), (12, 9, 4), {"pads": (1, 1), "strides": (2,)}),
    ("columns", (2, 6, 3, 4), (24, 6, 3, 3), {"pads": (1, 0, 1, 2), "dilations": (1, 2)}),
    ("last", (2, 4, 9, 8), (4, 4, 3, 3), {"pads": (1, 1, 1, 1), "strides": (2, 1)}),
    ("last", (1, 6, 9, 9), (5, 6, 3, 2), {"dilations": (2, 3), "pads": (0, 1, 2, 1)}),
    ("last", (2, 8, 11), (4, 8, 5), {"pads": (2, 1), "strides": (3,)}),
    ("last", (1, 2, 12, 12), (2, 1, 9, 9), {"group": 2}),
    ("matmul", (2, 6, 5, 4), (7, 6, 1, 1), {}),
    ("matmul", (2, 6, 5, 7), (3, 6, 1, 1), {"strides": (2, 3), "pads": (1, 0, 2, 1)}),
    ("matmul", (2, 6, 5), (3, 6, 1), {}),
    ("depthwise", (2, 6, 9, 8), (6, 1, 3, 3), {"group": 6, "pads": (1, 1, 1, 1)}),
    (
        "depthwise",
        (1, 4, 10, 9),
        (4, 1, 3, 2),
        {"group": 4, "strides": (2, 2), "dilations": (2, 1), "pads": (2, 0, 1, 1)},
    ),
    ("depthwise", (1, 3, 5, 6, 4), (3, 1, 2, 3, 1), {"group": 3, "pads": (0, 1, 0, 1, 1, 0)}),
    ("patches", (2, 8, 7, 6), (12, 2, 3, 3), {"group": 4, "pads": (1, 1, 1, 1), "strides": (2, 1)}),
    ("patches", (1, 4, 8), (8, 1, 3), {"group": 4, "dilations": (2,)}),
    ("winograd", (2, 64, 9, 8), (66, 64, 3, 3), {"pads": (1, 0, 1, 2)}),
    ("winograd", (3, 65, 8, 9), (64, 65, 3, 3), {"pads": (2, 1, 0, 1)}),
    ("planes", (2, 3, 6, 7, 5), (4, 3, 3, 2, 3), {"pads": (1, 0, 1, 2, 1, 1), "strides": (2, 1, 2)}),
    ("planes", (1, 2, 7, 6, 6), (3, 2, 2, 3, 3), {"dilations": (3, 2, 1)}),
]


def _each_once(cases: Sequence[Any], first: Callable[[Any], Any]) -> list[Any]:
    """Every case with a constant filter, and the first of each kind with one that is an entry."""
    seen = {first(c): c for c in reversed(cases)}
    return [(*c, True) for c in cases] + [(*c, False) for c in seen.values()]


@pytest.mark.parametrize(("form", "x", "w", "attrs", "kept"), _each_once(CONVOLUTIONS, lambda c: (c[0], len(c[1]))))
def test_conv_in_every_form(
    engine: XlaEngine,
    form: str,
    x: Any,
    w: Any,
    attrs: dict[str, Any],
    kept: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each form of Conv is the definition's, with strides, dilations, uneven pads, bias, constant filter or not."""
    if form != "small":
        monkeypatch.setattr(convolution, "_SMALL", 0)  # else these are "patches"
    monkeypatch.setattr(winograd, "_POSITIONS", 100)
    rank, group = len(x) - 2, attrs.get("group", 1)
    a, b, bias = (RNG.standard_normal(s).astype(np.float32) for s in (x, w, (w[0],)))
    strides, dilations = attrs.get("strides", (1,) * rank), attrs.get("dilations", (1,) * rank)
    pads = attrs.get("pads", (0,) * (2 * rank))
    want = _correlate(a, b, strides, dilations, pads[:rank], pads[rank:], group)
    unit = set(strides) == set(dilations) == {1}
    assert form_of(w, group, "cpu", want[:, 0].size, unit) == {"small": "patches"}.get(form, form)
    want += bias.reshape(-1, *(1,) * rank)
    constant = frozenset((1, 2)) if kept else frozenset()
    got = _run(engine, "Conv", [a, b, bias], want.astype(np.float32), constant, 22, **attrs)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        *((form, np.float16) for form in ("last", "matmul", "depthwise", "patches", "columns", "planes")),
        ("last", ml_dtypes.bfloat16),
        ("depthwise", ml_dtypes.bfloat16),
        ("last", np.float64),
        ("planes", np.float64),
    ],
)
def test_conv_keeps_its_dtype(engine: XlaEngine, form: str, dtype: Any) -> None:
    """Half floats are summed in float32 and rounded once; doubles stay exact to their last bits."""
    _, x, w, attrs = next(c for c in CONVOLUTIONS if c[0] == form)
    rank, group = len(x) - 2, attrs.get("group", 1)
    a, b = (RNG.standard_normal(s).astype(dtype) for s in (x, w))
    pads = attrs.get("pads", (0,) * (2 * rank))
    want = _correlate(a, b, attrs.get("strides", (1,) * rank), (1,) * rank, pads[:rank], pads[rank:], group)
    got = _run(engine, "Conv", [a, b], want.astype(dtype), frozenset((1,)), 22, **attrs)
    rtol = 1e-12 if dtype == np.float64 else 8e-3 if dtype == ml_dtypes.bfloat16 else 1e-3
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=rtol, atol=rtol)


def test_the_form_on_other_devices_is_xlas_own() -> None:
    """CUDA and TPU have libraries for whole convolutions."""
    assert {form_of(w, a.get("group", 1), "cuda") for _, _, w, a in CONVOLUTIONS} == {"xla"}


def test_xlas_own_form_agrees(engine: XlaEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The channels-first form that other devices use computes the same (on the CPU, to see it run)."""
    import xrt_xla.kernels.convolution as module

    monkeypatch.setattr(module, "form_of", lambda *given: "xla")
    for _, x, w, attrs in CONVOLUTIONS[::3]:
        rank, group = len(x) - 2, attrs.get("group", 1)
        a, b, bias = (RNG.standard_normal(s).astype(np.float32) for s in (x, w, (w[0],)))
        strides, dilations = attrs.get("strides", (1,) * rank), attrs.get("dilations", (1,) * rank)
        pads = attrs.get("pads", (0,) * (2 * rank))
        want = _correlate(a, b, strides, dilations, pads[:rank], pads[rank:], group) + bias.reshape(-1, *(1,) * rank)
        got = _run(engine, "Conv", [a, b, bias], want.astype(np.float32), frozenset((1,)), 22, **attrs)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


TRANSPOSED = [
    ((2, 3, 4, 5), (3, 4, 3, 3), {}),
    ((1, 4, 4, 3), (4, 2, 4, 4), {"strides": (2, 2), "pads": (1, 1, 1, 1)}),
    ((1, 4, 4, 3), (4, 3, 2, 3), {"strides": (3, 2), "dilations": (2, 1), "group": 2}),
    ((1, 2, 5), (2, 3, 4), {"strides": (2,), "pads": (2, 0), "output_padding": (1,)}),
    ((1, 2, 3, 3, 2), (2, 2, 2, 3, 2), {"strides": (2, 1, 2), "pads": (0, 1, 0, 1, 1, 0)}),
    ((1, 4, 5, 4), (4, 3, 3, 3), {"strides": (2, 2), "pads": (1, 1, 1, 1), "output_padding": (1, 0)}),
    ((1, 4, 5, 4), (4, 3, 1, 1), {"strides": (2, 3), "output_padding": (1, 2)}),
    ((2, 3, 4, 5), (3, 4, 3, 3), {"dilations": (2, 1), "pads": (3, 0, 1, 2)}),
    ((1, 6, 5, 4), (6, 1, 3, 3), {"strides": (2, 1), "pads": (1, 1, 0, 1), "group": 6}),
    ((1, 6, 5, 4), (6, 1, 3, 2), {"pads": (2, 1, 1, 0), "group": 6}),
    ((1, 6, 5, 4), (6, 2, 5, 3), {"strides": (3, 2), "pads": (4, 2, 3, 1), "group": 3}),
    ((1, 256, 4, 3), (256, 2, 3, 3), {"pads": (1, 1, 2, 0)}),
    ((1, 256, 4, 3), (256, 2, 3, 2), {"strides": (2, 3), "pads": (1, 0, 0, 1), "output_padding": (1, 2)}),
    ((1, 2, 4, 4, 3), (2, 3, 3, 3, 3), {"pads": (1, 1, 0, 0, 1, 2)}),
    ((2, 64, 9, 8), (64, 65, 3, 3), {"pads": (1, 0, 2, 1)}),
    ((1, 3, 3, 4, 2), (3, 2, 3, 3, 3), {"strides": (2, 2, 2), "pads": (1,) * 6, "output_padding": (1, 1, 1)}),
    ((2, 3, 3, 2, 3), (3, 4, 2, 3, 2), {"strides": (2, 3, 2), "pads": (1, 0, 0, 0, 1, 1), "output_padding": (1, 0, 0)}),
    ((2, 3, 5, 4), (3, 4, 2, 3), {"strides": (2, 3)}),
    ((2, 3, 5), (3, 4, 4), {"strides": (4,), "pads": (3, 1), "output_padding": (2,)}),
]


@pytest.mark.parametrize(
    ("x", "w", "attrs", "kept"),
    _each_once(TRANSPOSED, lambda c: (len(c[0]), c[0][1] > 4, c[2].get("group", 1) > 1, "strides" in c[2])),
)
def test_conv_transpose(
    engine: XlaEngine, x: Any, w: Any, attrs: dict[str, Any], kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ConvTranspose is the definition's, cropped by its pads and lengthened by output_padding."""
    monkeypatch.setattr(winograd, "_POSITIONS", 100)
    rank, group = len(x) - 2, attrs.get("group", 1)
    a, b = (RNG.standard_normal(s).astype(np.float32) for s in (x, w))
    bias = RNG.standard_normal(w[1] * group).astype(np.float32)
    full = _spread(a, b, attrs.get("strides", (1,) * rank), attrs.get("dilations", (1,) * rank), group)
    extra, pads = attrs.get("output_padding", (0,) * rank), attrs.get("pads", (0,) * (2 * rank))
    full = np.pad(full, [(0, 0), (0, 0), *((0, e) for e in extra)])
    want = full[(..., *(slice(pads[i], full.shape[2 + i] - pads[rank + i]) for i in range(rank)))]
    want = want + bias.reshape(-1, *(1,) * rank)
    constant = frozenset((1, 2)) if kept else frozenset()
    got = _run(engine, "ConvTranspose", [a, b, bias], want.astype(np.float32), constant, 22, **attrs)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("x", "w", "attrs", "form"),
    [
        ((1, 21, 4, 4), (21, 1, 4, 4), {"group": 21, "strides": (2, 2)}, "phases"),
        ((1, 21, 4, 4), (21, 1, 32, 32), {"group": 21, "strides": (16, 16)}, "phases"),
        ((1, 21, 4, 4), (21, 1, 3, 3), {"group": 21, "strides": (2, 2), "dilations": (2, 2)}, "spread"),
        ((1, 256, 2, 2), (256, 2, 4, 4), {}, "scatter"),
        ((1, 256, 2, 2), (256, 2, 32, 32), {}, "spread"),
        ((2, 64, 32, 16), (64, 65, 3, 3), {"pads": (1, 0, 2, 1)}, "winograd"),
        ((2, 64, 32, 15), (64, 65, 3, 3), {"pads": (1, 0, 2, 1)}, "spread"),
        ((2, 64, 32, 16), (64, 65, 3, 3), {"strides": (2, 1)}, "spread"),
        ((1, 64, 32, 16), (64, 65, 2, 2), {"strides": (2, 2)}, "blocks"),
        ((1, 64, 320, 160), (64, 65, 2, 2), {"strides": (2, 2)}, "spread"),
        ((1, 16, 64, 64, 64), (16, 16, 2, 2, 2), {"strides": (2, 2, 2)}, "blocks"),
        ((1, 16, 8, 8, 8), (16, 16, 3, 3, 3), {"strides": (2, 2, 2)}, "phases"),
        ((1, 16, 8, 8, 8), (16, 16, 3, 3, 3), {"strides": (2, 2, 2), "dilations": (2, 2, 2)}, "spread"),
    ],
)
def test_the_form_of_conv_transpose(x: Any, w: Any, attrs: dict[str, Any], form: str) -> None:
    """Phases with groups, however many, and for volumes; blocks where no two taps meet; scattering for few taps, with
    which the program grows."""
    values = [Value(n, TensorType(np.dtype(np.float32), s)) for n, s in (("x", x), ("w", w))]
    node = Node("ConvTranspose", values, [Value("y")], attrs, version=22)
    assert transposed_form(node, "cpu") == form
    assert transposed_form(node, "cuda") == "spread"


@pytest.mark.parametrize(
    ("op_type", "where", "kept", "value"),
    [
        *itertools.product(("Conv", "ConvTranspose"), ["input"], [False], (-np.inf, np.nan, 2e38)),
        ("Conv", "input", True, np.inf),
        *itertools.product(["Conv"], ["filter"], (True, False), (np.inf, 2e38)),
        *itertools.product(["ConvTranspose"], ["filter"], (True, False), [2e38]),
    ],
)
def test_winograd_is_for_moderate_numbers(
    engine: XlaEngine, op_type: str, where: str, kept: bool, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An infinity is one in the results, and no difference of large numbers overflows."""
    monkeypatch.setattr(winograd, "_CHANNELS", 8)
    monkeypatch.setattr(winograd, "_POSITIONS", 8)
    monkeypatch.setattr(convolution, "_SMALL", 0)
    x, w = (RNG.standard_normal(s).astype(np.float32) for s in ((1, 10, 12, 11), (10, 10, 3, 3)))
    changed, other = (x, w) if where == "input" else (w, x)
    changed[0, 1, :3, 1] = value, 0, -value
    if value == 2e38:
        other *= 1e-3
    with np.errstate(all="ignore"):
        steps = (1, 1)
        if op_type == "Conv":
            want = _correlate(x, w, steps, steps, (0, 0), (0, 0), 1)
        else:
            want = _spread(x, w, steps, steps, 1)
        want = want.astype(np.float32)
    got = _run(engine, op_type, [x, w], want, frozenset((1,)) if kept else frozenset(), 22)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e32 if value == 2e38 else 1e-4)


@pytest.mark.parametrize("kept", [True, False])
def test_winograd_leaves_large_products_alone(engine: XlaEngine, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A difference over a tile is up to four times what a window adds up, and overflows before it cancels."""
    for name, value in (("_CHANNELS", 8), ("_POSITIONS", 8)):
        monkeypatch.setattr(winograd, name, value)
    monkeypatch.setattr(convolution, "_SMALL", 0)
    x, w = np.zeros((1, 10, 12, 11), np.float32), np.zeros((10, 10, 3, 3), np.float32)
    signs = np.float32([1, 0, -1, 0] * 3)
    x[0, 0] = 1.1e19 * np.outer(signs, signs[:11])
    w[:, 0, ::2, ::2] = 1.1e19
    want = _correlate(x, w, (1, 1), (1, 1), (0, 0), (0, 0), 1).astype(np.float32)
    assert not want.any()
    got = _run(engine, "Conv", [x, w], want, frozenset((1,)) if kept else frozenset(), 22)
    np.testing.assert_allclose(got, want, atol=1e-7 * 1.1e19 * 1.1e19)


@pytest.mark.parametrize(("images", "enough", "piece"), [(4, 10, (2, 5)), (2, 2, (1, 3))])
@pytest.mark.parametrize("kept", [True, False])
def test_winograd_in_rounds(
    engine: XlaEngine, images: int, enough: int, piece: tuple[int, int], kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is more than fits a cache is computed in rounds: of some images each, or of a band of one, the last of which
    has a row of tiles too many."""
    row = 6 * 16 * 8 * 4  # bytes of tiles
    for name, value in (("_CHANNELS", 8), ("_POSITIONS", 8), ("_TILES", enough * row)):
        monkeypatch.setattr(winograd, name, value)
    monkeypatch.setattr(convolution, "_SMALL", 0)
    assert winograd._piece(images, 5, row) == piece
    x, w = (RNG.standard_normal(s).astype(np.float32) for s in ((images, 8, 9, 11), (9, 8, 3, 3)))
    want = _correlate(x, w, (1, 1), (1, 1), (1, 1), (1, 1), 1).astype(np.float32)
    got = _run(engine, "Conv", [x, w], want, frozenset((1,)) if kept else frozenset(), 22, pads=(1, 1, 1, 1))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("on_mesh", [True, False])
def test_winograd_makes_no_rounds_of_images_on_several_devices(on_mesh: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would gather them: each device has some."""
    monkeypatch.setattr(winograd, "_TILES", 1)
    node = Node("Conv", [], [Value("y")], {}, version=22)
    ctx = XlaContext(node, jax.numpy, jax.lax, "cpu", (), frozenset(), on_mesh)
    x, u = np.zeros((4, 6, 6, 2), np.float32), [np.zeros((4, 2, 2), np.float32)] * 4
    program = jax.make_jaxpr(lambda x: winograd.convolve(ctx, x, u, (1, 1), (6, 6)))(x)
    assert any(e.primitive.name == "scan" for e in program.eqns) != on_mesh


def test_convolutions_of_nothing(engine: XlaEngine) -> None:
    """An empty batch gives an empty result; no input channels give the bias."""
    w, bias = np.ones((4, 3, 3, 3), np.float32), np.arange(4, dtype=np.float32)
    out = np.zeros((0, 4, 3, 3), np.float32)
    assert _run(engine, "Conv", [np.zeros((0, 3, 5, 5), np.float32), w], out, frozenset((1,)), 22).shape == out.shape
    none, out = np.zeros((1, 0, 5, 5), np.float32), np.zeros((1, 4, 3, 3), np.float32)
    got = _run(engine, "Conv", [none, w[:, :0], bias], out, frozenset((1,)), 22)
    np.testing.assert_array_equal(got, np.broadcast_to(bias.reshape(1, 4, 1, 1), out.shape))


@pytest.mark.parametrize(
    ("left", "right", "zeros"),
    [
        *((*pair, "vector") for pair in itertools.product((np.int8, np.uint8), repeat=2)),
        (np.int8, np.int8, "none"),
        (np.uint8, np.int8, "none"),
        (np.uint8, np.int8, "scalar"),
    ],
)
def test_integer_products_are_exact(engine: XlaEngine, left: Any, right: Any, zeros: str) -> None:
    """MatMulInteger over the whole range of both types, with every kind of zero point."""
    (m, k, n), (lo, hi), (lo2, hi2) = (5, 300, 7), *((np.iinfo(t).min, np.iinfo(t).max + 1) for t in (left, right))
    a, b = RNG.integers(lo, hi, (2, m, k)).astype(left), RNG.integers(lo2, hi2, (k, n)).astype(right)
    p = q = None
    if zeros != "none":
        p = np.asarray(RNG.integers(lo, hi), left)
        q = RNG.integers(lo2, hi2, n if zeros == "vector" else None)
        q = np.asarray(q, right)
    wide_a = a.astype(np.int64) - (0 if p is None else p.astype(np.int64))
    wide_b = b.astype(np.int64) - (0 if q is None else q.astype(np.int64))
    want = wide_a @ wide_b
    inputs = [a, b, p, q] if zeros != "none" else [a, b]
    got = _run(engine, "MatMulInteger", inputs, want.astype(np.int32), frozenset((1,)), 10)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("flags", [{"transB": 1}, {"transA": 1, "transB": 1}, {"transA": 1}, {}])
@pytest.mark.parametrize("constant", [frozenset(), frozenset({1})])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16])
def test_gemm(engine: XlaEngine, rows: int, flags: dict[str, int], constant: frozenset[int], dtype: Any) -> None:
    a, b, c = (RNG.integers(-4, 5, shape).astype(dtype) for shape in ((rows, 6), (6, 3), (3,)))
    expected = 0.5 * (a.astype(np.float64) @ b.astype(np.float64)) + 2 * c.astype(np.float64)
    given = [
        np.ascontiguousarray(a.T) if flags.get("transA") else a,
        np.ascontiguousarray(b.T) if flags.get("transB") else b,
        c,
    ]
    got = _run(engine, "Gemm", given, expected.astype(dtype), constant, 13, alpha=0.5, beta=2.0, **flags)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got.astype(np.float64), expected)


@pytest.mark.parametrize("rows", [1, 8])
def test_a_transposed_weight_is_not_turned_round_in_each_call(engine: XlaEngine, rows: int) -> None:
    a, b = (
        Value("a", TensorType(np.dtype(np.float32), (rows, 512))),
        Value.constant(np.ones((64, 512), np.float32), "b"),
    )
    y = Value("y", TensorType(np.dtype(np.float32), (rows, 64)))
    node = Node("Gemm", [a, b], [y], {"transB": 1}, version=13, name="n")
    program = compile_nodes(engine, [a], [node], [y], extra={"fold_bytes": 0}).as_text()
    assert "transpose(" not in program
    assert "copy(" not in program


@pytest.mark.parametrize("channels", [4, 64])
def test_integer_convolutions_are_exact(engine: XlaEngine, channels: int) -> None:
    """ConvInteger at the extremes, where sums leave float32's exact range too."""
    x = RNG.choice(np.array([0, 255], np.uint8), (1, channels, 6, 6))
    w = RNG.choice(np.array([-128, 127], np.int8), (3, channels, 3, 3))
    x[0, :, :3], w[0] = 255, 127
    zero = np.asarray(7, np.uint8)
    want = _correlate(x.astype(np.int64) - 7, w, (1, 1), (1, 1), (1, 1), (1, 1), 1)
    got = _run(engine, "ConvInteger", [x, w, zero], want.astype(np.int32), frozenset((1,)), 10, pads=(1, 1, 1, 1))
    np.testing.assert_array_equal(got, want.astype(np.int64))


def test_quantised_convolution(engine: XlaEngine) -> None:
    """QLinearConv: integer sums with bias, scaled, rounded half to even, saturated."""
    x, w = RNG.integers(0, 256, (1, 4, 6, 6)).astype(np.uint8), RNG.integers(-128, 128, (3, 4, 3, 3)).astype(np.int8)
    bias = RNG.integers(-500, 500, 3).astype(np.int32)
    f = np.float32
    x_scale, w_scale, y_scale = np.asarray(0.02, f), np.array([0.01, 0.02, 0.03], f), np.asarray(0.1, f)
    x_zero, w_zero, y_zero = np.asarray(128, np.uint8), np.zeros(3, np.int8), np.asarray(100, np.uint8)
    sums = _correlate(x.astype(np.int64) - 128, w, (1, 1), (1, 1), (0, 0), (0, 0), 1) + bias.reshape(-1, 1, 1)
    scale = (x_scale * w_scale / y_scale).reshape(-1, 1, 1)
    want = np.clip(np.rint(sums.astype(f) * scale) + 100, 0, 255).astype(np.uint8)
    inputs = [x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, bias]
    got = _run(engine, "QLinearConv", inputs, want, frozenset(range(1, 9)), 10)
    assert np.abs(got.astype(int) - want.astype(int)).max() <= 1  # float32 products may be ordered otherwise
    assert (got == want).mean() > 0.99


def test_quantised_products(engine: XlaEngine) -> None:
    """QLinearMatMul: the same, for matrices."""
    f = np.float32
    a, b = RNG.integers(0, 256, (5, 64)).astype(np.uint8), RNG.integers(-128, 128, (64, 6)).astype(np.int8)
    scales = [np.asarray(s, f) for s in (0.01, 0.02, 0.3)]
    zeros = [np.asarray(120, np.uint8), np.asarray(-3, np.int8), np.asarray(90, np.uint8)]
    sums = (a.astype(np.int64) - 120) @ (b.astype(np.int64) + 3)
    want = np.clip(np.rint(sums.astype(f) * (scales[0] * scales[1] / scales[2])) + 90, 0, 255).astype(np.uint8)
    inputs = [a, scales[0], zeros[0], b, scales[1], zeros[1], scales[2], zeros[2]]
    got = _run(engine, "QLinearMatMul", inputs, want, frozenset((3,)), 21)
    assert np.abs(got.astype(int) - want.astype(int)).max() <= 1
    assert (got == want).mean() > 0.99


@pytest.mark.parametrize(
    ("x_shape", "filters", "attributes"),
    [
        ((2, 3, 7, 6), 4, {"kernel_shape": (3, 2), "strides": (2, 1), "pads": (1, 0, 2, 1)}),
        ((2, 2, 8, 9), 3, {"kernel_shape": (2, 3), "dilations": (2, 3), "strides": (1, 2)}),
        ((1, 2, 5, 6), 3, {"kernel_shape": (3, 3), "auto_pad": "SAME_LOWER", "strides": (2, 2)}),
        ((3, 2, 9), 2, {"kernel_shape": (4,), "strides": (3,)}),
        ((1, 2, 4, 3, 5), 2, {"kernel_shape": (2, 1, 3), "pads": (0, 1, 1, 1, 0, 0)}),
        ((2, 16, 6, 4, 5), 3, {"kernel_shape": (2, 3, 3), "pads": (0, 1, 1, 1, 0, 2), "strides": (2, 1, 1)}),
        ((2, 18, 7, 6), 4, {"kernel_shape": (3, 2), "pads": (1, 0, 2, 3)}),
        ((2, 18, 7, 6), 4, {"kernel_shape": (3, 2), "strides": (2, 2)}),
        ((2, 17, 9), 4, {"kernel_shape": (4,), "pads": (3, 0)}),
        ((2, 17, 9, 8), 4, {"kernel_shape": (1, 1)}),
        ((2, 3, 9, 8), 4, {"kernel_shape": (1, 1), "strides": (2, 3), "pads": (1, 0, 0, 2)}),
        ((3, 5, 12, 11), 5, {"kernel_shape": (3, 3), "group": 5, "strides": (2, 1), "pads": (1, 1, 0, 1)}),
        ((2, 4, 5, 5), 6, {"kernel_shape": (3, 3), "group": 2}),
        ((2, 3, 3, 4), 24, {"kernel_shape": (3, 3), "strides": (1, 2), "dilations": (2, 1), "pads": (2, 1, 1, 1)}),
        ((1, 4, 9), 12, {"kernel_shape": (4,), "pads": (1, 2)}),
        ((0, 2, 5), 2, {"kernel_shape": (3,)}),
    ],
)
def test_conv_filter_grad(x_shape: tuple[int, ...], filters: int, attributes: dict[str, Any]) -> None:
    """One convolution gives what the portable kernel adds up tap by tap, with strides, dilations and pads."""
    from xrt_core.kernels import OpContext, find_kernel
    from xrt_core.kernels.windows import windows_of

    portable = find_kernel("xrt", "ConvFilterGrad")
    assert portable is not None
    x = RNG.standard_normal(x_shape).astype(np.float32)
    entry = Value("x", TensorType(x.dtype, x.shape))
    draft = Node("ConvFilterGrad", [entry, None], [Value("w")], attributes, domain="xrt", version=1)
    out = windows_of(OpContext(draft, np), x.shape[2:], attributes["kernel_shape"]).out
    dy = RNG.standard_normal((x_shape[0], filters, *out)).astype(np.float32)
    group = attributes.get("group", 1)
    shape = (filters, x_shape[1] // group, *attributes["kernel_shape"])
    inputs = [entry, Value("dy", TensorType(dy.dtype, dy.shape))]
    node = draft.replace(inputs=inputs, outputs=[Value("w", TensorType(x.dtype, shape))])
    expected = portable.function(OpContext(node, np), x, dy)
    found = compile_nodes(XlaEngine(), inputs, [node], list(node.outputs)).run([x, dy])[0]  # type: ignore[arg-type]
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((3, 5, 7, 6), np.float32),
        ((2, 3, 300), np.float32),
        ((70, 4, 1, 3), np.float32),
        ((1, 2, 3, 4, 2), np.float32),
        ((3, 5, 7, 6), ml_dtypes.bfloat16),
        ((2, 3, 300), np.float64),
    ],
)
def test_batch_norm_in_training(shape: tuple[int, ...], dtype: Any) -> None:
    """Channels last and in stages: what the portable kernels give in float64, forward and back."""
    from xrt_core.kernels import OpContext, find_kernel

    dy, x = (RNG.standard_normal(shape).astype(dtype) for _ in range(2))
    scale, bias, mean, var = (np.abs(RNG.standard_normal(shape[1])).astype(dtype) for _ in range(4))
    cases: list[tuple[str, str, int, list[Any], dict[str, Any], int]] = [
        ("BatchNormalization", "", 15, [x + 3, scale, bias, mean, var], {"training_mode": 1, "momentum": 0.8}, 3),
        ("BatchNormGrad", "xrt", 1, [dy, x - 2, scale], {"epsilon": 1e-3}, 3),
    ]
    for op, domain, version, arrays, attributes, outputs in cases:
        inputs = [Value(f"x{i}", TensorType(a.dtype, a.shape)) for i, a in enumerate(arrays)]
        results = [x, scale, bias] if domain else [x, mean, var]
        made = [Value(f"y{i}", TensorType(r.dtype, r.shape)) for i, r in enumerate(results[:outputs])]
        node = Node(op, inputs, made, attributes, domain=domain, version=version, name="n")
        portable = find_kernel(domain, op)
        assert portable is not None
        expected = portable.function(OpContext(node, np), *(a.astype(np.float64) for a in arrays))
        found = compile_nodes(XlaEngine(), inputs, [node], made).run(arrays)
        rtol = 2e-2 if dtype == ml_dtypes.bfloat16 else 1e-10 if dtype == np.float64 else 1e-4
        for f, e in zip(found, expected, strict=True):
            assert np.asarray(f).dtype == dtype
            np.testing.assert_allclose(np.asarray(f, np.float64), e, rtol=rtol, atol=rtol * np.abs(e).max())


def test_barrier() -> None:
    """It gives what it is given, and stays in the program that XLA makes."""
    x, y = (Value(n, TensorType(np.dtype(np.float32), (3,))) for n in "xy")
    a, b = (Value(n, x.type) for n in "ab")
    made = compile_nodes(XlaEngine(), [x, y], [Node("Barrier", [x, y], [a, b], domain="xrt", version=1)], [a, b])
    given = [np.arange(3, dtype=np.float32), np.ones(3, np.float32)]
    for found, expected in zip(made.run(given), given, strict=True):
        np.testing.assert_array_equal(np.asarray(found), expected)


def _dequantized(x: np.ndarray, scale: np.ndarray, zero: np.ndarray, axis: int = -1) -> list[Any]:
    """A constant's DequantizeLinear, and its result."""
    y = Value("w", TensorType(np.dtype(np.float32), x.shape))
    read = [Value.constant(v, n) for v, n in ((x, "wq"), (scale, "ws"), (zero, "wz"))]
    return [Node("DequantizeLinear", read, [y], {"axis": axis}, version=21), y]


@pytest.mark.parametrize(
    ("a_dtype", "w_dtype", "w_zero", "is_integer"),
    [
        (np.uint8, np.int8, 0, True),
        (np.int8, np.uint8, 128, True),
        (np.uint8, np.int8, 3, False),
    ],
)
def test_dequantized_product(
    monkeypatch: pytest.MonkeyPatch, a_dtype: Any, w_dtype: Any, w_zero: int, is_integer: bool
) -> None:
    """A MatMul behind two DequantizeLinear is one of integers, where the weight's zero point is in the middle: right
    to the last digit, for the outermost integers as well, and with a scale for each column."""
    monkeypatch.setattr("xrt_xla.compiler.processor_features", lambda: {"avx512_vnni"})
    low, high = np.iinfo(a_dtype).min, np.iinfo(a_dtype).max
    a = RNG.integers(low, high + 1, (2, 70, 96)).astype(a_dtype)
    w = RNG.integers(np.iinfo(w_dtype).min, np.iinfo(w_dtype).max + 1, (96, 80)).astype(w_dtype)
    a[0, 0], w[:, 0] = high, np.iinfo(w_dtype).max
    scale, zero = RNG.uniform(0.01, 0.02, 80).astype(np.float32), np.full(80, w_zero, w_dtype)
    aq, af = Value("aq", TensorType(a.dtype, a.shape)), Value("a", TensorType(np.dtype(np.float32), a.shape))
    given = [aq, Value.constant(np.float32(0.03), "s"), Value.constant(a_dtype(7), "z")]
    y = Value("y", TensorType(np.dtype(np.float32), (2, 70, 80)))
    read, wf = _dequantized(w, scale, zero)
    nodes = [Node("DequantizeLinear", given, [af], version=21), read, Node("MatMul", [af, wf], [y], version=13)]
    compiled = compile_nodes(XlaEngine(), [aq], nodes, [y])
    want = (a.astype(np.int64) - 7) @ (w.astype(np.int64) - w_zero) * (np.float64(np.float32(0.03)) * scale)
    np.testing.assert_allclose(np.asarray(compiled.run([a])[0]), want, rtol=3e-7 if is_integer else 1e-5, atol=1e-4)
    assert any(np.asarray(w).dtype == np.int8 for w in compiled._weights) is is_integer


def test_a_node_without_inputs_beside_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """What looks for dequantised operands passes over nodes that read nothing."""
    monkeypatch.setattr("xrt_xla.compiler.processor_features", lambda: {"avx512_vnni"})
    x, r, y = (Value(n, TensorType(np.dtype(np.float32), (4, 4))) for n in "xry")
    nodes = [
        Node("RandomUniform", [], [r], {"shape": (4, 4), "seed": 1.0}, version=1),
        Node("MatMul", [x, r], [y], version=13),
    ]
    compiled = compile_nodes(XlaEngine(), [x], nodes, [y])
    assert np.isfinite(np.asarray(compiled.run([np.ones((4, 4), np.float32)])[0])).all()

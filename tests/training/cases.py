"""What is differentiated: a table of functions over operators, dtypes, shapes and attributes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tests.training.checks import Case
from xrt_core.frontends import ops

_rng = np.random.default_rng(7)


def normal(*shape: int) -> np.ndarray:
    """Numbers that keep away from zero, where functions have corners."""
    x = _rng.uniform(0.2, 1.6, shape)
    return np.asarray(x * np.where(_rng.random(shape) < 0.5, -1, 1))


def positive(*shape: int) -> np.ndarray:
    """Numbers between 0.3 and 1.7."""
    return np.asarray(_rng.uniform(0.3, 1.7, shape))


def inner(*shape: int) -> np.ndarray:
    """Numbers between -0.8 and 0.8."""
    return np.asarray(_rng.uniform(-0.8, 0.8, shape))


def distinct(*shape: int) -> np.ndarray:
    """Numbers no two of which are near each other."""
    count = int(np.prod(shape))
    return (_rng.permutation(count) * 0.1 - count * 0.05 + 0.03).reshape(shape)


def i64(*values: Any) -> np.ndarray:
    """Integers."""
    return np.array(values, np.int64)


def _signal() -> Iterator[Case]:
    for parts in (1, 2):
        for inverse in (0, 1):
            for length in (None, 4, 7):
                yield Case(
                    f"DFT-{parts}-{inverse}-{length}",
                    lambda x, inv=inverse, n=length: ops.DFT(x, None if n is None else np.int64(n), inverse=inv),
                    (normal(2, 5, parts),),
                )  # fmt: skip
    for length in (None, 4, 7, 12):
        yield Case(
            f"DFT-onesided-{length}",
            lambda x, n=length: ops.DFT(x, None if n is None else np.int64(n), np.int64(1), onesided=1),
            (normal(2, 6, 1),),
        )
    for length in (None, 5, 8, 12):
        yield Case(
            f"DFT-inverse-onesided-{length}",
            lambda x, n=length: ops.DFT(x, None if n is None else np.int64(n), inverse=1, onesided=1),
            (normal(2, 5, 2),),
        )
    yield Case("DFT-17", lambda x: ops.DFT(x, axis=2), (normal(2, 3, 4, 2),), opset=17)
    yield Case("STFT", lambda x, w: ops.STFT(x, np.int64(3), w), (normal(2, 11, 1), positive(4)))
    yield Case("STFT-real", lambda x, w: ops.STFT(x, np.int64(3), w), (normal(2, 11), positive(4)))
    yield Case("STFT-length", lambda x: ops.STFT(x, np.int64(2), None, np.int64(6)), (normal(1, 9, 1),))
    yield Case("STFT-complex", lambda x: ops.STFT(x, np.int64(2), None, np.int64(5), onesided=0), (normal(2, 9, 2),))


def _unary() -> Iterator[Case]:
    table: dict[str, Callable[..., np.ndarray]] = {
        "Abs": normal, "Neg": normal, "Exp": normal, "Log": positive, "Sqrt": positive, "Reciprocal": positive,
        "Sin": normal, "Cos": normal, "Tan": inner, "Asin": inner, "Acos": inner, "Atan": normal, "Sinh": normal,
        "Cosh": normal, "Asinh": normal, "Atanh": inner, "Erf": normal, "Tanh": normal, "Identity": normal,
        "Relu": normal, "Elu": normal, "Selu": normal, "Sigmoid": normal, "Softplus": normal, "Softsign": normal,
        "Mish": normal, "HardSwish": normal, "Gelu": normal, "Celu": normal, "LeakyRelu": normal,
        "HardSigmoid": normal, "ThresholdedRelu": normal, "Shrink": normal, "Softmax": normal, "LogSoftmax": normal,
    }  # fmt: skip
    for op, draw in table.items():
        for shape in ((3, 4), (2, 0), ()):
            if shape == () and op in ("Softmax", "LogSoftmax"):
                continue
            yield Case(f"{op}{list(shape)}", lambda x, op=op: getattr(ops, op)(x), (draw(*shape),))
    yield Case("Acosh", ops.Acosh, (positive(3) + 1.5,))
    yield Case("Elu-alpha", lambda x: ops.Elu(x, alpha=0.7), (normal(5),))
    yield Case("Celu-alpha", lambda x: ops.Celu(x, alpha=1.7), (normal(5),))
    yield Case("Selu-gamma", lambda x: ops.Selu(x, alpha=1.2, gamma=0.8), (normal(5),))
    yield Case("LeakyRelu-alpha", lambda x: ops.LeakyRelu(x, alpha=0.3), (normal(5),))
    yield Case("HardSigmoid-alpha", lambda x: ops.HardSigmoid(x, alpha=0.4, beta=0.3), (normal(5) * 2,))
    yield Case("Shrink-bias", lambda x: ops.Shrink(x, lambd=0.7, bias=0.2), (normal(7),))
    yield Case("Gelu-tanh", lambda x: ops.Gelu(x, approximate="tanh"), (normal(5),))
    yield Case("Swish-alpha", lambda x: ops.Swish(x, alpha=1.3), (normal(5),))
    yield Case("HardSwish-far", ops.HardSwish, (normal(9) * 4,))
    yield Case("PRelu", ops.PRelu, (normal(2, 3, 2), normal(3, 1)))
    yield Case("SwiGLU", ops.SwiGLU, (normal(2, 3), normal(2, 3)))
    yield Case("Softmax-axis0", lambda x: ops.Softmax(x, axis=0), (normal(3, 4),))
    yield Case("Softmax-11", lambda x: ops.Softmax(x, axis=1), (normal(2, 3, 2),), opset=11)
    yield Case("LogSoftmax-11", lambda x: ops.LogSoftmax(x, axis=1), (normal(2, 3, 2),), opset=11)
    yield Case("Cast", lambda x: x.astype(np.float32).astype(x.dtype) * 2.0, (normal(3),), tolerance=1e-2, jax=False)
    yield Case("CastLike", lambda x: ops.CastLike(x, x) * x, (normal(3),))


def _binary() -> Iterator[Case]:
    shapes = [((2, 3), (2, 3)), ((2, 3), (3,)), ((2, 1), (1, 3)), ((), (2, 2)), ((2, 0), (1,)), ((1, 1), (2, 3, 2))]
    for op in ("Add", "Sub", "Mul", "Div", "Max", "Min"):
        for a, b in shapes:
            yield Case(f"{op}{list(a)}{list(b)}", lambda x, y, op=op: getattr(ops, op)(x, y), (normal(*a), normal(*b)))
    for a, b in shapes:
        yield Case(f"Pow{list(a)}{list(b)}", ops.Pow, (positive(*a), normal(*b)))
    yield Case("Pow-2", lambda x: x**2, (normal(3),))
    yield Case("Pow-3", lambda x: x**3.0, (normal(3),))
    yield Case("Pow-half", lambda x: x**0.5, (positive(3),))
    yield Case("Pow-0", lambda x: x**0.0, (normal(3),))
    yield Case("Pow-int", lambda x: ops.Pow(x, np.array([2, 3], np.int64)), (normal(3, 2),), wrt=(0,))
    yield Case("Mod", lambda x, y: ops.Mod(x, y, fmod=1), (normal(3, 2) * 3, positive(2)), tolerance=1e-5)
    yield Case("Sum", lambda *x: ops.Sum(*x), (normal(2, 3), normal(3), normal(2, 1)))
    yield Case("Mean", lambda *x: ops.Mean(*x), (normal(2, 3), normal(3), normal(2, 1)))
    yield Case("Max-three", lambda *x: ops.Max(*x), (normal(2, 3), normal(3), normal(2, 1)))
    yield Case("Where", lambda c, x, y: ops.Where(c, x, y), (np.array([True, False, True]), normal(2, 3), normal(1)))
    yield Case("Clip", lambda x, a, b: ops.Clip(x, a, b), (normal(6), np.array(-0.5), np.array(0.7)))
    yield Case("Clip-low", lambda x, a: ops.Clip(x, a), (normal(6), np.array(-0.5)))
    yield Case("Clip-6", lambda x: ops.Clip(x, min=-0.5, max=0.7), (normal(6),), opset=10)
    yield Case("used-twice", lambda x: x * x + ops.Sin(x) * x, (normal(3),))


def _linear() -> Iterator[Case]:
    pairs = [((2, 3), (3, 4)), ((3,), (3,)), ((3,), (3, 2)), ((2, 3), (3,)), ((2, 2, 3), (3, 4)),
             ((2, 2, 3), (2, 3, 2)), ((1, 2, 3), (4, 3, 2)), ((3,), (2, 3, 2)), ((2, 2, 3), (3,)),
             ((2, 1, 2, 3), (2, 3, 2)), ((0, 3), (3, 2)), ((2, 0), (0, 2))]  # fmt: skip
    for a, b in pairs:
        yield Case(f"MatMul{list(a)}{list(b)}", ops.MatMul, (normal(*a), normal(*b)))
    for ta in (0, 1):
        for tb in (0, 1):
            yield Case(
                f"Gemm-{ta}{tb}",
                lambda a, b, c, ta=ta, tb=tb: ops.Gemm(a, b, c, transA=ta, transB=tb, alpha=0.5, beta=2.0),
                (normal(*((3, 2) if ta else (2, 3))), normal(*((4, 3) if tb else (3, 4))), normal(4)),
            )
    yield Case("Gemm-plain", lambda a, b: ops.Gemm(a, b), (normal(2, 3), normal(3, 2)))
    for equation, shapes in {
        "ij,jk->ik": ((2, 3), (3, 2)), "ij->ji": ((2, 3),), "ij->i": ((2, 3),), "ij,ij->": ((2, 3), (2, 3)),
        "bij,bjk->bik": ((2, 2, 3), (2, 3, 2)), "...ij,jk->...ik": ((2, 2, 3), (3, 2)), "i,j->ij": ((2,), (3,)),
        "...i,...i": ((2, 3), (2, 3)), "ij,jk": ((2, 3), (3, 2)), "bhid,bhjd->bhij": ((1, 2, 2, 3), (1, 2, 2, 3)),
        "i,j,k->ijk": ((2,), (2,), (2,)), "ij,k->i": ((2, 3), (2,)),
        "ii->i": ((3, 3),), "iij->ij": ((2, 2, 3),), "ii": ((3, 3),), "iji,j->i": ((2, 3, 2), (3,)),
        "iijk->j": ((2, 2, 3, 2),),
    }.items():  # fmt: skip
        yield Case(f"Einsum {equation}", lambda *x, e=equation: ops.Einsum(*x, equation=e),
                   tuple(normal(*s) for s in shapes))  # fmt: skip


def _reduction() -> Iterator[Case]:
    for op in ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "SumSquare", "LogSum", "LogSumExp"):
        draw = {"Max": distinct, "Min": distinct, "LogSum": positive}.get(op, normal)
        for axes, keep in (([1], 1), ([0, 2], 0), (None, 0), ([-1], 0)):
            yield Case(
                f"Reduce{op}-{axes}-{keep}",
                lambda x, op=op, axes=axes, keep=keep: getattr(ops, f"Reduce{op}")(
                    x, *([] if axes is None else [axes]), keepdims=keep
                ),
                (draw(2, 3, 2),),
            )
        if op not in ("Max", "Min"):
            yield Case(f"Reduce{op}-13", lambda x, op=op: getattr(ops, f"Reduce{op}")(
                x, **({} if op == "Sum" else {"axes": [1]})), (draw(2, 3),), opset=13)  # fmt: skip
    yield Case("ReduceSum-empty", lambda x: ops.ReduceSum(x, [0]), (normal(0, 3),))
    yield Case("ReduceSum-noop", lambda x: ops.ReduceSum(x, noop_with_empty_axes=1) * 2.0, (normal(3),))
    yield Case("ReduceProd-zero", lambda x: ops.ReduceProd(x, [1]), (np.array([[0.0, 2, 3], [0, 0, 4], [1, 2, 3]]),),
               again=False, jax=False)  # fmt: skip
    for exclusive in (0, 1):
        for back in (0, 1):
            yield Case(
                f"CumSum-{exclusive}{back}",
                lambda x, e=exclusive, r=back: ops.CumSum(x, np.array(1, np.int64), exclusive=e, reverse=r),
                (normal(2, 4),),
            )
    yield Case("TopK", lambda x: ops.TopK(x, [2], axis=1)[0], (distinct(2, 5),))


def _movement() -> Iterator[Case]:
    yield Case("Reshape", lambda x: x.reshape(3, 2) * 2.0, (normal(2, 3),))
    yield Case("Reshape-empty", lambda x: x.reshape(0, 5), (normal(2, 0),))
    yield Case("Flatten", lambda x: ops.Flatten(x, axis=2), (normal(2, 3, 2),))
    yield Case("Squeeze", lambda x: ops.Squeeze(x, [1]), (normal(2, 1, 2),))
    yield Case("Unsqueeze", lambda x: ops.Unsqueeze(x, [0, 2]), (normal(2, 2),))
    yield Case("Transpose", lambda x: ops.Transpose(x, perm=[2, 0, 1]), (normal(2, 3, 2),))
    yield Case("Transpose-all", lambda x: ops.Transpose(x), (normal(2, 3),))
    yield Case("Concat", lambda *x: ops.Concat(*x, axis=-1), (normal(2, 1), normal(2, 3), normal(2, 0)))
    yield Case("Concat-11", lambda *x: ops.Concat(*x, axis=0), (normal(1, 2), normal(3, 2)), opset=11)
    yield Case("Split", lambda x: ops.Split(x, [1, 2, 1], axis=1)[::2], (normal(2, 4),))
    yield Case("Split-11", lambda x: ops.Split(x, split=[1, 3], axis=1), (normal(2, 4),), opset=11)
    yield Case("Slice", lambda x: x[1:3, ::2], (normal(4, 5),))
    yield Case("Slice-back", lambda x: x[::-1, 4:0:-2], (normal(2, 5),))
    yield Case("Slice-none", lambda x: x[2:2], (normal(3, 2),))
    yield Case("Slice-9", lambda x: ops.Slice(x, starts=[1], ends=[3], axes=[1]), (normal(2, 4),), opset=9)
    yield Case("Pad", lambda x, v: ops.Pad(x, [1, 0, 0, 2], v), (normal(2, 3), np.array(0.5)))
    yield Case("Pad-negative", lambda x: ops.Pad(x, [-1, 1, 0, -1]), (normal(3, 3),))
    yield Case("Pad-axes", lambda x: ops.Pad(x, [1, 2], None, [1]), (normal(2, 3),))
    for mode in ("reflect", "edge", "wrap"):
        yield Case(f"Pad-{mode}", lambda x, m=mode: ops.Pad(x, [2, 1, 1, 0], mode=m), (normal(3, 3),))
    yield Case("Pad-10", lambda x: ops.Pad(x, pads=[1, 0, 0, 2]), (normal(2, 3),), opset=10)
    yield Case("Expand", lambda x: ops.Expand(x, [2, 2, 3]), (normal(2, 1),))
    yield Case("Tile", lambda x: ops.Tile(x, [2, 3]), (normal(2, 2),))
    yield Case("DepthToSpace", lambda x: ops.DepthToSpace(x, blocksize=2), (normal(1, 8, 2, 1),))
    yield Case("DepthToSpace-CRD", lambda x: ops.DepthToSpace(x, blocksize=2, mode="CRD"), (normal(1, 8, 1, 2),))
    yield Case("SpaceToDepth", lambda x: ops.SpaceToDepth(x, blocksize=2), (normal(1, 2, 2, 4),))
    yield Case("Trilu", lambda x: ops.Trilu(x, np.array(1, np.int64)), (normal(3, 3),))
    yield Case("ReverseSequence", lambda x: ops.ReverseSequence(x, np.array([1, 3], np.int64)), (normal(3, 2),))


def _indexing() -> Iterator[Case]:
    rows = i64(2, 0, 2)
    yield Case("Gather", lambda x: ops.Gather(x, rows), (normal(3, 2),))
    yield Case("Gather-axis1", lambda x: ops.Gather(x, i64([0, -1], [1, 1]), axis=1), (normal(2, 3, 2),))
    yield Case("Gather-scalar", lambda x: ops.Gather(x, np.array(1, np.int64), axis=1), (normal(2, 3),))
    yield Case("Gather-13", lambda x: ops.Gather(x, i64(1, 1)), (normal(3, 2),), opset=13)
    yield Case("Gather-input", lambda x, i: ops.Gather(x, i), (normal(3, 2), i64(0, 2, 2)))
    yield Case("GatherElements", lambda x: ops.GatherElements(x, i64([0, 0], [2, 1]), axis=0), (normal(3, 2),))
    yield Case("GatherND", lambda x: ops.GatherND(x, i64([0, 1], [2, 0], [0, 1])), (normal(3, 2),))
    yield Case("GatherND-rows", lambda x: ops.GatherND(x, i64([1], [1])), (normal(3, 2),))
    yield Case("GatherND-batch", lambda x: ops.GatherND(x, i64([1], [0]), batch_dims=1), (normal(2, 3),))
    yield Case("ScatterElements", lambda x, u: ops.ScatterElements(x, i64([2, 0]), u, axis=0),
               (normal(3, 2), normal(1, 2)))  # fmt: skip
    yield Case(
        "ScatterElements-add",
        lambda x, u: ops.ScatterElements(x, i64([2, 0], [2, 1]), u, axis=0, reduction="add"),
        (normal(3, 2), normal(2, 2)),
    )
    for how in ("mul", "max", "min"):
        yield Case(
            f"ScatterElements-{how}",
            lambda x, u, h=how: ops.ScatterElements(x, i64([2, 0], [2, 1]), u, axis=0, reduction=h),
            (normal(3, 2), normal(2, 2)), jax=False,
        )  # fmt: skip
        yield Case(f"ScatterND-{how}", lambda x, u, h=how: ops.ScatterND(x, i64([2], [2]), u, reduction=h),
                   (normal(3, 2), normal(2, 2)), jax=False)  # fmt: skip
    for name, zeros in (("one", [[0.0, 1.5]]), ("two", [[0.0, 0.0]])):
        yield Case(
            f"ScatterElements-mul-{name} zero",
            lambda x, u: ops.ScatterElements(x, i64([1, 1]), u, axis=1, reduction="mul"),
            (normal(1, 3), np.array(zeros)), again=False, jax=False,
        )  # fmt: skip
    yield Case("ScatterND", lambda x, u: ops.ScatterND(x, i64([2], [0]), u), (normal(3, 2), normal(2, 2)))
    yield Case("ScatterND-add", lambda x, u: ops.ScatterND(x, i64([2], [2]), u, reduction="add"),
               (normal(3, 2), normal(2, 2)))  # fmt: skip
    yield Case("OneHot", lambda v: ops.OneHot(i64(1, 0), np.array(3, np.int64), v), (normal(2),))


def _normalization() -> Iterator[Case]:
    for shape in ((4, 3), (2, 3, 2, 2)):
        given = (normal(*shape), positive(3), normal(3))
        fixed = (np.zeros(3), np.ones(3))
        yield Case(
            f"BatchNormalization-training{list(shape)}",
            lambda x, s, b, m, v: ops.BatchNormalization(x, s, b, m, v, training_mode=1)[0],
            (*given, *fixed), wrt=(0, 1, 2), tolerance=1e-5,
        )  # fmt: skip
        yield Case(
            f"BatchNormalization{list(shape)}",
            lambda x, s, b, m, v: ops.BatchNormalization(x, s, b, m, v),
            (*given, normal(3), positive(3)), tolerance=1e-5,
        )  # fmt: skip
    yield Case("InstanceNormalization", ops.InstanceNormalization, (normal(2, 3, 4), positive(3), normal(3)),
               tolerance=1e-5)  # fmt: skip
    for axis in (-1, 1):
        size = (3,) if axis == -1 else (2, 3)
        yield Case(
            f"LayerNormalization{axis}",
            lambda x, s, b, a=axis: ops.LayerNormalization(x, s, b, axis=a, outputs=1),
            (normal(2, 2, 3), positive(*size), normal(*size)), tolerance=1e-5,
        )  # fmt: skip
        yield Case(f"RMSNormalization{axis}", lambda x, s, a=axis: ops.RMSNormalization(x, s, axis=a),
                   (normal(2, 2, 3), positive(*size)), tolerance=1e-5)  # fmt: skip
    yield Case("LayerNormalization-no-bias", lambda x, s: ops.LayerNormalization(x, s, outputs=1),
               (normal(2, 3), positive(3)), tolerance=1e-5)  # fmt: skip
    yield Case("GroupNormalization", lambda x, s, b: ops.GroupNormalization(x, s, b, num_groups=2),
               (normal(2, 4, 3), positive(4), normal(4)), tolerance=1e-5)  # fmt: skip
    yield Case("MeanVarianceNormalization", ops.MeanVarianceNormalization, (normal(2, 2, 2, 3),), tolerance=1e-5)
    yield Case("LpNormalization", lambda x: ops.LpNormalization(x, axis=1), (normal(2, 3),))
    yield Case("LpNormalization-1", lambda x: ops.LpNormalization(x, axis=1, p=1), (normal(2, 3),))
    yield Case("LRN", lambda x: ops.LRN(x, size=3, alpha=0.5, beta=0.6, bias=1.5), (normal(1, 4, 2, 1),))


def _loss() -> Iterator[Case]:
    labels, weight = i64(1, 0, 2), np.array([0.5, 1.5, 2.0])
    many = i64([0, 1], [2, 2])
    for reduction in ("mean", "sum", "none"):
        yield Case(f"SoftmaxCrossEntropyLoss-{reduction}",
                   lambda x, r=reduction: ops.SoftmaxCrossEntropyLoss(x, labels, reduction=r, outputs=1),
                   (normal(3, 3),))  # fmt: skip
        yield Case(f"NegativeLogLikelihoodLoss-{reduction}",
                   lambda x, r=reduction: ops.NegativeLogLikelihoodLoss(x, labels, weight.astype(x.dtype), reduction=r),
                   (normal(3, 3),))  # fmt: skip
        yield Case(f"SoftmaxCrossEntropyLoss-spatial-{reduction}",
                   lambda x, r=reduction: ops.SoftmaxCrossEntropyLoss(
                       x, many, weight.astype(x.dtype), reduction=r, ignore_index=2, outputs=1),
                   (normal(2, 3, 2),))  # fmt: skip
        yield Case(f"SoftmaxCrossEntropyLoss-weights-{reduction}",
                   lambda x, w, r=reduction: ops.SoftmaxCrossEntropyLoss(
                       x, many, w, reduction=r, ignore_index=2, outputs=1),
                   (normal(2, 3, 2), positive(3)), again=False)  # fmt: skip
        yield Case(f"NegativeLogLikelihoodLoss-weights-{reduction}",
                   lambda x, w, r=reduction: ops.NegativeLogLikelihoodLoss(x, labels, w, reduction=r),
                   (normal(3, 3), positive(3)), again=False)  # fmt: skip
    yield Case("SoftmaxCrossEntropyLoss-log", lambda x: ops.SoftmaxCrossEntropyLoss(x, labels, outputs=2),
               (normal(3, 3),))  # fmt: skip
    yield Case("SoftmaxCrossEntropyLoss-ignore",
               lambda x: ops.SoftmaxCrossEntropyLoss(x, i64(-100, 1, 0), ignore_index=-100, outputs=1),
               (normal(3, 3),))  # fmt: skip
    yield Case("mse", lambda x, y: ((x - y) ** 2).mean(), (normal(3, 2), normal(3, 2)))


def _convolution() -> Iterator[Case]:
    for name, x, w, attributes in (
        ("plain", (1, 2, 5, 5), (3, 2, 3, 3), {}),
        ("padded", (2, 2, 4, 3), (2, 2, 3, 3), {"pads": [1, 1, 1, 1]}),
        ("strided", (1, 2, 6, 5), (2, 2, 3, 2), {"strides": [2, 2], "pads": [1, 0, 0, 1]}),
        ("dilated", (1, 1, 6, 6), (1, 1, 2, 3), {"dilations": [2, 2], "strides": [1, 2]}),
        ("grouped", (1, 4, 4, 3), (4, 2, 2, 2), {"group": 2}),
        ("depthwise", (1, 3, 4, 4), (6, 1, 3, 3), {"group": 3, "pads": [1, 1, 1, 1]}),
        ("1d", (2, 2, 6), (3, 2, 3), {"strides": [2]}),
        ("same", (1, 1, 5, 6), (1, 1, 2, 3), {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
        ("same-lower", (1, 1, 5, 6), (1, 1, 2, 3), {"auto_pad": "SAME_LOWER"}),
        ("valid", (1, 1, 5, 6), (1, 1, 2, 3), {"auto_pad": "VALID"}),
        ("1x1", (2, 3, 2, 2), (2, 3, 1, 1), {}),
    ):
        yield Case(f"Conv-{name}", lambda x, w, a=attributes: ops.Conv(x, w, **a), (normal(*x), normal(*w)))
    yield Case("Conv-bias", lambda x, w, b: ops.Conv(x, w, b), (normal(1, 2, 3, 3), normal(2, 2, 2, 2), normal(2)))
    for name, x, w, attributes in (
        ("plain", (1, 2, 3, 3), (2, 3, 2, 2), {}),
        ("strided", (1, 2, 3, 2), (2, 1, 3, 3), {"strides": [2, 2], "pads": [1, 1, 0, 1]}),
        ("more", (1, 1, 3, 3), (1, 2, 3, 3), {"strides": [2, 2], "output_padding": [1, 1]}),
        ("grouped", (1, 4, 2, 2), (4, 1, 2, 2), {"group": 2, "dilations": [2, 1]}),
        ("shaped", (1, 1, 3, 3), (1, 1, 3, 3), {"strides": [2, 2], "output_shape": [6, 5]}),
        ("same", (1, 1, 3, 3), (1, 1, 3, 3), {"strides": [2, 2], "auto_pad": "SAME_UPPER"}),
        ("1d", (2, 2, 4), (2, 2, 3), {"strides": [2]}),
    ):
        yield Case(f"ConvTranspose-{name}", lambda x, w, a=attributes: ops.ConvTranspose(x, w, **a),
                   (normal(*x), normal(*w)))  # fmt: skip
    yield Case("ConvTranspose-bias", lambda x, w, b: ops.ConvTranspose(x, w, b),
               (normal(1, 2, 2, 2), normal(2, 2, 2, 2), normal(2)))  # fmt: skip


def _pooling() -> Iterator[Case]:
    for op in ("MaxPool", "AveragePool"):
        for name, shape, attributes in (
            ("plain", (1, 2, 4, 4), {"kernel_shape": [2, 2], "strides": [2, 2]}),
            ("over", (1, 1, 5, 4), {"kernel_shape": [3, 2]}),
            ("padded", (1, 1, 4, 5), {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
            ("ceil", (1, 1, 5, 5), {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1}),
            ("1d", (2, 1, 6), {"kernel_shape": [3], "dilations": [2]}),
            ("same", (1, 1, 5, 5), {"kernel_shape": [2, 3], "auto_pad": "SAME_LOWER", "strides": [2, 1]}),
        ):
            yield Case(f"{op}-{name}", lambda x, op=op, a=attributes: getattr(ops, op)(x, outputs=1, **a)
                       if op == "MaxPool" else getattr(ops, op)(x, **a), (distinct(*shape),))  # fmt: skip
    yield Case("AveragePool-counted",
               lambda x: ops.AveragePool(x, kernel_shape=[3], pads=[1, 1], count_include_pad=1),
               (normal(1, 2, 4),))  # fmt: skip
    yield Case("GlobalAveragePool", ops.GlobalAveragePool, (normal(2, 2, 2, 3),))
    yield Case("GlobalMaxPool", ops.GlobalMaxPool, (distinct(2, 2, 2, 3),))
    yield Case("GlobalLpPool", ops.GlobalLpPool, (normal(1, 2, 3),))
    yield Case("LpPool", lambda x: ops.LpPool(x, kernel_shape=[2], p=3), (normal(1, 2, 4),))


def _resize() -> Iterator[Case]:
    for mode in ("nearest", "linear", "cubic"):
        for name, scales in (("up", [1, 1, 2, 1.5]), ("down", [1, 1, 0.5, 0.6])):
            yield Case(f"Resize-{mode}-{name}", lambda x, m=mode, s=scales: ops.Resize(
                x, None, np.array(s, np.float32), mode=m), (normal(1, 2, 4, 5),))  # fmt: skip
    yield Case("Resize-sizes", lambda x: ops.Resize(x, None, None, i64(3, 7), mode="linear", axes=[2, 3], antialias=1),
               (normal(1, 1, 5, 4),))  # fmt: skip
    yield Case("Upsample", lambda x: ops.Upsample(x, np.array([1, 1, 2, 3], np.float32)), (normal(1, 1, 2, 2),),
               opset=9)  # fmt: skip


def _vision() -> Iterator[Case]:
    for mode, padding, corners in (
        ("linear", "zeros", 0), ("linear", "border", 1), ("linear", "reflection", 0), ("nearest", "zeros", 0),
        ("cubic", "zeros", 1), ("cubic", "reflection", 0),
    ):  # fmt: skip
        yield Case(
            f"GridSample-{mode}-{padding}",
            lambda x, g, m=mode, p=padding, c=corners: ops.GridSample(x, g, mode=m, padding_mode=p, align_corners=c),
            (normal(2, 2, 3, 4), inner(2, 2, 3, 2) * 1.4), again=mode == "linear", jax=mode != "cubic",
            tolerance=1e-5,
        )  # fmt: skip
    yield Case("GridSample-3d", lambda x, g: ops.GridSample(x, g), (normal(1, 1, 2, 3, 2), inner(1, 1, 2, 1, 3)))
    regions = np.array([[0.3, 0.6, 4.2, 3.1], [-0.7, 1.1, 2.9, 6.3]])
    for mode in ("avg", "max"):
        yield Case(
            f"RoiAlign-{mode}",
            lambda x, r, m=mode: ops.RoiAlign(
                x, r, i64(0, 1), mode=m, output_height=2, output_width=3, sampling_ratio=2, spatial_scale=0.9),
            (distinct(2, 2, 5, 6), regions), wrt=(0,) if mode == "max" else (0, 1), again=mode == "avg", tolerance=1e-5,
        )  # fmt: skip
    yield Case(
        "RoiAlign-whole",
        lambda x, r: ops.RoiAlign(x, r, i64(0, 0), output_height=2, output_width=2, sampling_ratio=1,
                                  coordinate_transformation_mode="output_half_pixel"),
        (normal(1, 1, 7, 8), np.array([[0.3, 0.6, 4.1, 3.1], [1.63, 1.1, 2.9, 5.2]])),
    )  # fmt: skip
    boxes = np.array([[0, 0.2, 0.3, 3.1, 4.4], [1, 1.4, 1.2, 1.3, 2.6], [0, 2, 3, 9, 9.0]])
    yield Case("MaxRoiPool", lambda x, r: ops.MaxRoiPool(x, r, pooled_shape=[2, 3], spatial_scale=0.8),
               (distinct(2, 2, 5, 6), boxes), wrt=(0,), again=False)  # fmt: skip
    moves = inner(2, 8, 3, 2) * 1.2 + 0.013
    yield Case("DeformConv", lambda x, w, o: ops.DeformConv(x, w, o, strides=[1, 2], pads=[1, 0, 0, 1]),
               (normal(2, 2, 3, 4), normal(2, 2, 2, 2), moves), tolerance=1e-5)  # fmt: skip
    yield Case(
        "DeformConv-groups",
        lambda x, w, o, b, m: ops.DeformConv(x, w, o, b, m, group=2, offset_group=2, dilations=[2, 1]),
        (normal(1, 4, 4, 3), normal(2, 2, 2, 2), inner(1, 16, 2, 2) + 0.017, normal(2), positive(1, 8, 2, 2)),
        tolerance=1e-5,
    )
    yield Case("Col2Im", lambda x: ops.Col2Im(x, i64(4, 5), i64(2, 3), pads=[1, 0, 0, 1], strides=[1, 2]),
               (normal(2, 12, 8),))  # fmt: skip
    yield Case("Col2Im-dilated", lambda x: ops.Col2Im(x, i64(6), i64(2), dilations=[3]), (normal(1, 4, 3),))
    cache, update = normal(2, 3, 6, 2), normal(2, 3, 3, 2)
    yield Case("TensorScatter", lambda c, u: ops.TensorScatter(c, u, i64(1, 3)), (cache, update))
    yield Case("TensorScatter-from-0", lambda c, u: ops.TensorScatter(c, u), (cache, update))
    yield Case("TensorScatter-circular", lambda c, u: ops.TensorScatter(c, u, i64(5, 4), mode="circular"),
               (cache, update))  # fmt: skip
    yield Case("MaxUnpool", lambda x: ops.MaxUnpool(x, i64(1, 7, 10, 12).reshape(1, 1, 2, 2), kernel_shape=[2, 2],
                                                    strides=[2, 2]), (normal(1, 1, 2, 2),))  # fmt: skip
    flags = np.array([True, False, True])
    yield Case("Compress", lambda x: ops.Exp(ops.Compress(x, flags, axis=1)).sum(), (normal(2, 4, 2),),
               again=False, jax=False)  # fmt: skip
    yield Case("Compress-flat", lambda x: ops.Sin(ops.Compress(x, flags)).sum(), (normal(2, 3),),
               again=False, jax=False)  # fmt: skip
    for name, attributes in (("plain", {}), ("reverse", {"reverse": 1}), ("exclusive", {"exclusive": 1})):
        yield Case(f"CumProd-{name}", lambda x, a=attributes: ops.CumProd(x, 1, **a), (normal(2, 4, 2),))
    yield Case("CumProd-zero", lambda x: ops.CumProd(x, 0), (np.array([1.5, 0.0, -0.7, 2.0]),), again=False, jax=False)
    whole = np.array([[3, -2, 5], [0, 7, -1]], np.int8)
    yield Case("DequantizeLinear", lambda s: ops.DequantizeLinear(
        whole, s.astype(np.float32), np.array([1, 0, 2], np.int8), axis=1).astype(s.dtype), (positive(3),),
        tolerance=1e-2, jax=False)  # fmt: skip
    yield Case("Det", ops.Det, (normal(2, 3, 3),), tolerance=1e-5)
    yield Case("Det-singular", ops.Det, (np.array([[1.0, 2.0], [2.0, 4.0]]),), again=False, jax=False)


def _random() -> Iterator[Case]:
    true = np.array(True)
    yield Case("Dropout", lambda x: ops.Dropout(x, 0.25, true, seed=3, outputs=1), (normal(4, 3),))
    yield Case("Dropout-mask", lambda x: ops.Dropout(x, 0.5, true, seed=3, outputs=2)[0], (normal(4, 3),))
    yield Case("Dropout-off", lambda x: ops.Dropout(x, 0.5, outputs=1), (normal(3),))


def _composed() -> Iterator[Case]:
    q, k, v = normal(1, 2, 3, 4), normal(1, 2, 3, 4), normal(1, 2, 3, 4)
    yield Case("Attention", lambda q, k, v: ops.Attention(q, k, v, outputs=1), (q, k, v), again=False, tolerance=1e-5)
    yield Case("Attention-causal", lambda q, k, v: ops.Attention(q, k, v, is_causal=1, outputs=1), (q, k, v),
               again=False, tolerance=1e-5)  # fmt: skip
    yield Case("Attention-grouped", lambda q, k, v: ops.Attention(q, k, v, outputs=1),
               (normal(1, 4, 2, 2), normal(1, 2, 3, 2), normal(1, 2, 3, 2)), again=False, tolerance=1e-5)  # fmt: skip
    yield Case("CenterCropPad", lambda x: ops.CenterCropPad(x, i64(5, 2), axes=[2, 1]), (normal(2, 3, 4),))
    yield Case("Cast-double", lambda x: ops.Cast(ops.Sin(x), to=11), (normal(2, 3),))
    yield Case("Range", lambda a, d: ops.Exp(ops.Range(a, np.array(3.1, a.dtype), d)).sum(),
               (np.array(0.2), np.array(0.7)), again=False, jax=False)  # fmt: skip
    yield Case("mlp", lambda x, w, b: ops.Softmax(ops.Relu(x @ w + b) @ w.T), (normal(2, 3), normal(3, 4), normal(4)))


def _recurrent() -> Iterator[Case]:
    steps, n, size, hidden = 3, 2, 2, 2
    for op, gates in (("RNN", 1), ("GRU", 3), ("LSTM", 4)):
        for direction in ("forward", "reverse", "bidirectional"):
            d = 2 if direction == "bidirectional" else 1
            given = (normal(steps, n, size), inner(d, gates * hidden, size), inner(d, gates * hidden, hidden),
                     inner(d, 2 * gates * hidden))  # fmt: skip
            attributes: dict[str, Any] = {"hidden_size": hidden, "direction": direction}
            if op == "GRU" and direction != "reverse":
                attributes["linear_before_reset"] = 1
            yield Case(
                f"{op}-{direction}",
                lambda x, w, r, b, op=op, a=attributes: getattr(ops, op)(
                    x, w, r, b, outputs=3 if op == "LSTM" else 2, **a),
                given, again=False, tolerance=1e-5,
            )  # fmt: skip
        yield Case(
            f"{op}-lengths",
            lambda x, w, r, h, op=op: getattr(ops, op)(
                x, w, r, None, np.array([3, 1], np.int32), h, hidden_size=2, direction="reverse", outputs=2),
            (normal(3, 2, 2), inner(1, gates * 2, 2), inner(1, gates * 2, 2), normal(1, 2, 2)),
            again=False, tolerance=1e-5,
        )  # fmt: skip

    for name, more in (
        ("peepholes", {}),
        ("coupled", {"input_forget": 1}),
        ("clip", {"clip": 0.6, "activations": ["HardSigmoid", "ScaledTanh", "Softsign"], "activation_alpha": [0.3, 1.5],
                  "activation_beta": [0.4, 0.7]}),
    ):  # fmt: skip
        yield Case(
            f"LSTM-{name}",
            lambda x, w, r, b, p, a=more: ops.LSTM(x, w, r, b, None, None, None, p, hidden_size=2, outputs=3, **a),
            (normal(3, 2, 2), inner(1, 8, 2), inner(1, 8, 2), inner(1, 16), inner(1, 6)), again=False,
            tolerance=1e-5, jax=False,
        )  # fmt: skip
    yield Case(
        "GRU-activations",
        lambda x, w, r, b: ops.GRU(x, w, r, b, hidden_size=2, outputs=2, layout=1, activations=["Affine", "Elu"],
                                   activation_alpha=[0.5, 0.8], activation_beta=[0.1]),
        (normal(2, 3, 2), inner(1, 6, 2), inner(1, 6, 2), inner(1, 12)), again=False, tolerance=1e-5, jax=False,
    )  # fmt: skip


CASES: list[Case] = [
    case
    for family in (
        _unary, _binary, _linear, _reduction, _movement, _indexing, _normalization, _loss, _convolution, _pooling,
        _resize, _vision, _signal, _random, _composed, _recurrent,
    )
    for case in family()
]  # fmt: skip

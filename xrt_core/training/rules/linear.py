"""Gradients of matrix products: MatMul, Gemm, Einsum."""

from __future__ import annotations

from string import ascii_letters
from typing import Any

import numpy as np

from xrt_core.frontends import ops
from xrt_core.frontends.tensor import Tensor, literal
from xrt_core.ir.inference import einsum_axes
from xrt_core.training.gradient_context import Backward, Forward, dialect, reduced, reshaped
from xrt_core.training.registry import gradient


@gradient("MatMul")
def matmul(ctx: Backward) -> Any:
    """dA = dY B', dB = A' dY, summed over broadcast axes; a vector is a row on the left, a column on the right."""
    a, b, dy = *ctx.inputs, ctx.grad
    left = a.unsqueeze(0) if a.ndim == 1 else a
    right = b.unsqueeze(1) if b.ndim == 1 else b
    if b.ndim == 1:
        dy = dy.unsqueeze(dy.ndim)
    if a.ndim == 1:
        dy = dy.unsqueeze(dy.ndim - 1)
    by_a = by_b = None
    if ctx.wants(0):
        by_a = reshaped(reduced(dy @ right.mT, left, ctx.node), a)
    if ctx.wants(1):
        if right.ndim == 2 and left.ndim > 2 and all(isinstance(d, int) and d > 0 for d in right.shape):
            k, n = right.shape  # one product over all rows, instead of one per matrix and their sum
            by_b = left.reshape(-1, k).T @ dy.reshape(-1, n)
        else:
            by_b = reduced(left.mT @ dy, right, ctx.node)
        by_b = reshaped(by_b, b)
    return by_a, by_b


@gradient("Gemm")
def gemm(ctx: Backward) -> Any:
    """Gradients of alpha A' B' + beta C by A, B and C."""
    a, b, dy = ctx.inputs[0], ctx.inputs[1], ctx.grad
    alpha, beta = float(ctx.attr("alpha", 1.0)), float(ctx.attr("beta", 1.0))
    trans_a, trans_b = bool(ctx.attr("transA", 0)), bool(ctx.attr("transB", 0))
    scaled = dy if alpha == 1.0 else dy * alpha
    by_a = by_b = by_c = None
    if ctx.wants(0):
        other = b if trans_b else b.T  # B'^T
        by_a = (other.T @ scaled.T) if trans_a else scaled @ other
    if ctx.wants(1):
        other = a if trans_a else a.T  # A'^T
        by_b = (scaled.T @ other.T) if trans_b else other @ scaled
    if ctx.wants(2):
        by_c = reduced(dy if beta == 1.0 else dy * beta, ctx.inputs[2], ctx.node)
    return (by_a, by_b, by_c)[: len(ctx.inputs)]


@gradient("Einsum")
def einsum(ctx: Backward) -> Any:
    """Each operand's gradient is the einsum of dy and the other operands, with the operand's indices as output."""
    terms, out = _explicit(ctx)
    results: list[Tensor | None] = []
    for i, term in enumerate(terms):
        if not ctx.wants(i):
            results.append(None)
            continue
        others = [(t, x) for k, (t, x) in enumerate(zip(terms, ctx.inputs, strict=True)) if k != i]
        known = set(out).union(*(t for t, _ in others))
        whole, term = term, "".join(dict.fromkeys(term))
        kept = "".join(c for c in term if c in known)
        equation = f"{','.join([out, *(t for t, _ in others)])}->{kept}"
        found: Tensor = ops.Einsum(ctx.grad, *(x for _, x in others), equation=equation)
        missing = [k for k, c in enumerate(term) if c not in known]
        if missing:
            found = found.unsqueeze(missing)
        x = ctx.inputs[i]
        if missing:
            full = ctx.shape(x)
            target = [full[whole.index(c)] if k in missing else found.shape[k] for k, c in enumerate(term)]
            found = ops.Expand(found, [int(d) for d in target])
        if whole != term:
            found = _on_diagonal(found, whole, term, ctx.shape(x))
        results.append(reduced(found, x, ctx.node))
    return tuple(results)


def _on_diagonal(x: Tensor, whole: str, term: str, shape: tuple[int, ...]) -> Tensor:
    """Put x, with an axis for each letter of `term`, where the letters that `whole` repeats have equal indices."""
    first = [whole.index(c) for c in term]
    spread = x.unsqueeze([k for k in range(len(whole)) if k not in first])
    mask = np.ones((1,) * len(whole), bool)
    for k, c in enumerate(whole):
        if k not in first:
            a, b = ([-1 if j == at else 1 for j in range(len(whole))] for at in (whole.index(c), k))
            mask = mask & (np.arange(shape[k]).reshape(a) == np.arange(shape[k]).reshape(b))
    return spread * literal(mask, x.dtype)


def _explicit(ctx: Forward) -> tuple[list[str], str]:
    """Return the terms and the output of the equation, with letters for ellipses, and an implicit output explicit."""
    found = einsum_axes(ctx.node, [x.ndim for x in ctx.inputs])
    assert found is not None  # the ranks are known
    terms, out = found
    free = (c for c in ascii_letters if not any(c in t for t in terms))
    letters = {name: name if len(name) == 1 else next(free) for name in dict.fromkeys(n for t in terms for n in t)}
    return ["".join(letters[name] for name in t) for t in terms], "".join(letters[name] for name in out)


@gradient("Det")
def det(ctx: Backward) -> Any:
    """dy times the matrix of cofactors, which is defined for singular matrices as well."""
    return dialect("Cofactors", ctx.inputs[0]) * ctx.grad.unsqueeze([ctx.grad.ndim, ctx.grad.ndim + 1])


@gradient("Cofactors", domain="xrt")
def cofactors(ctx: Backward) -> Any:
    """From C = det(x) y' with y = inv(x): dC = tr(C' dx) y' - C dx' y'. Only for non-singular x."""
    x, c, g = ctx.inputs[0], ctx.outputs[0], ctx.grad
    y = (c / ops.Det(x).unsqueeze([x.ndim - 2, x.ndim - 1])).mT
    inner = (g * y.mT).sum((x.ndim - 2, x.ndim - 1), keepdims=True)
    return c * inner - y.mT @ g.mT @ c

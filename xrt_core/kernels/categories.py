"""Categories: the operators of ai.onnx.ml that look values up, LabelEncoder, CategoryMapper and OneHotEncoder.

Source: https://onnx.ai/onnx/operators/index_ai_onnx_ml.html. Of a key that is listed twice the first entry
counts.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from xrt_core.errors import InputError
from xrt_core.ir.graph import Node
from xrt_core.ir.types import STRING
from xrt_core.kernels.registry import OpContext, kernel

_KINDS = ("tensor", "strings", "int64s", "floats")
_DTYPES = {"strings": STRING, "int64s": np.dtype(np.int64), "floats": np.dtype(np.float32)}


@kernel("LabelEncoder", domain="ai.onnx.ml", strings=True)
def label_encoder(ctx: OpContext, x: Any) -> Any:
    """For each element the value of its key, or the default."""
    if ctx.version == 1:
        return _by_position(ctx, x)
    keys, _ = _listed(ctx, "keys")
    values, kind = _listed(ctx, "values")
    return _looked_up(ctx, x, keys, values, _default(ctx, kind, values.dtype))


@kernel("CategoryMapper", domain="ai.onnx.ml", strings=True)
def category_mapper(ctx: OpContext, x: Any) -> Any:
    """For strings their integers, for integers their strings, or the default."""
    strings, ints = _array(ctx.attr("cats_strings") or (), STRING), _array(ctx.attr("cats_int64s") or (), np.int64)
    if x.dtype == STRING:
        return _looked_up(ctx, x, strings, ints, ctx.attr("default_int64", -1))
    return _looked_up(ctx, x, ints, strings, ctx.attr("default_string", "_Unused"))


def _may_be_unknown(node: Node) -> str | None:
    if node.attributes.get("zeros", 1):
        return None
    return "with zeros = 0 an unknown category is an error, which depends on the data"


@kernel("OneHotEncoder", domain="ai.onnx.ml", dynamic=_may_be_unknown, strings=True)
def one_hot_encoder(ctx: OpContext, x: Any) -> Any:
    """[..., categories] as float32. Raises InputError for an unknown category where `zeros` is 0."""
    xp = ctx.xp
    ints = ctx.attr("cats_int64s")
    names = ctx.attr("cats_strings")
    if x.dtype == STRING:
        cats = _array(names or [str(i) for i in ints], STRING)
        index = _looked_up(ctx, x, cats, np.arange(len(cats)), -1)
    else:
        cats = _array(ints or [int(n) for n in names], np.int64)
        index = _looked_up(ctx, x.astype(np.int64), cats, np.arange(len(cats)), -1)
    if not ctx.attr("zeros", 1) and bool((index < 0).any()):
        at = tuple(int(i) for i in np.argwhere(np.asarray(index < 0))[0])
        raise InputError(f"node {ctx.node.name!r}: X has an unknown category at {list(at)}, and zeros = 0 refuses it")
    return (index[..., None] == xp.arange(len(cats))).astype(np.float32)


def _array(values: Any, dtype: Any) -> np.ndarray:
    out = np.empty(len(values), dtype)
    out[:] = values
    return out


def _listed(ctx: OpContext, side: str) -> tuple[np.ndarray, str]:
    """The keys or the values, and which attribute has them."""
    for kind in _KINDS:
        found = ctx.attr(f"{side}_{kind}")
        if found is not None:
            return (np.asarray(found).reshape(-1) if kind == "tensor" else _array(found, _DTYPES[kind])), kind
    raise InputError(f"node {ctx.node.name!r}: LabelEncoder has no {side}_*")


def _default(ctx: OpContext, kind: str, dtype: np.dtype) -> Any:
    if kind == "tensor":
        given = ctx.attr("default_tensor")
        if given is not None:
            return np.asarray(given).reshape(-1)[0]
        return "_Unused" if dtype == STRING else dtype.type(-1 if dtype.kind == "i" else -0.0)
    if kind == "strings":
        return ctx.attr("default_string", "_Unused")
    return ctx.attr("default_int64", -1) if kind == "int64s" else ctx.attr("default_float", -0.0)


def _by_position(ctx: OpContext, x: Any) -> Any:
    """Version 1: strings have their place in a list, and integers the string at that place."""
    names = _array(ctx.attr("classes_strings") or (), STRING)
    places = np.arange(len(names), dtype=np.int64)
    if x.dtype == STRING:
        return _looked_up(ctx, x, names, places, ctx.attr("default_int64", -1))
    return _looked_up(ctx, x, places, names, ctx.attr("default_string", "_Unused"))


def _looked_up(ctx: OpContext, x: Any, keys: np.ndarray, values: np.ndarray, default: Any) -> Any:
    """The values of the keys in x, in the shape of x."""
    xp = ctx.xp
    if x.dtype == STRING or values.dtype == STRING:
        table = ctx.prepared(lambda _: dict(reversed(list(zip(keys.tolist(), values.tolist(), strict=True)))))
        elements = np.asarray(x).reshape(-1).tolist()
        nan = next((v for k, v in table.items() if k != k), default)
        found = [table.get(e, default) if e == e else nan for e in elements]
        return _array(found, values.dtype).reshape(x.shape)
    if not len(keys):
        return xp.full(x.shape, default, values.dtype)
    order = np.argsort(keys, kind="stable")  # NaN comes last
    ordered, wanted = keys[order].astype(x.dtype), values[order]
    at = xp.minimum(xp.searchsorted(xp.asarray(ordered), x), len(keys) - 1)
    key = xp.take(xp.asarray(ordered), at)
    is_known = (key == x) | ((key != key) & (x != x))
    return xp.where(is_known, xp.take(xp.asarray(wanted), at), xp.asarray(np.array(default, values.dtype)))

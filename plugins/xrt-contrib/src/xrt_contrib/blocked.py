"""Convolutions and pooling in blocks of channels, domain com.microsoft.nchwc, which ONNX Runtime's optimiser writes
into models that it saves at level "all".

Tensors keep their logical form, [batch, channels, height, width]; their channels may be padded to whole blocks. Filters
are in the order that the kernels of one kind of processor read, which the file does not name: such a model belongs to
the kind of machine that made it, in ONNX Runtime as well.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from xrt_contrib.activation import activate
from xrt_contrib.attention import ints
from xrt_contrib.lowering import Call, lowering
from xrt_contrib.quantized import channels_first, channels_last
from xrt_core import ops
from xrt_core.engine.serialization import processor_features

BLOCKED: Final = "com.microsoft.nchwc"
_POOL: Final = ("auto_pad", "ceil_mode", "dilations", "kernel_shape", "pads", "strides")


def block_size() -> int:
    """Channels in a block of ONNX Runtime's kernels on this processor."""
    features = processor_features()
    return 8 if "sse2" in features and "avx512f" not in features else 16


@lowering("ReorderInput", domain=BLOCKED)
def _reorder_input(n: Call, x: Any) -> Any:
    return channels_first(x) if n.attr("channels_last", 0) else ops.Identity(x)


@lowering("ReorderOutput", domain=BLOCKED)
def _reorder_output(n: Call, x: Any) -> Any:
    channels = n.attr("channels", 0) or x.shape[1]
    n.check(channels <= x.shape[1], f"channels = {channels} of {x.shape[1]}")
    y = x if channels == x.shape[1] else x[:, :channels]
    return channels_last(y) if n.attr("channels_last", 0) else ops.Identity(y)


@lowering("Conv", domain=BLOCKED)
def _conv(n: Call, x: Any, w: Any, b: Any, total: Any) -> Any:
    group, block = n.attr("group", 1), block_size()
    rows, columns, high, wide = w.shape
    n.check(
        rows % block == 0, f"filters of {w.shape} are not in blocks of {block}: another kind of processor made them"
    )
    if columns < block:  # images as they are, or one filter a channel
        parts = w.reshape(rows // block, columns, high, wide, block)
        plain = ops.Transpose(parts, perm=[0, 4, 1, 2, 3])
    else:
        n.check(columns % block == 0, f"filters of {w.shape} are not in blocks of {block}: another processor made them")
        parts = w.reshape(rows // block, columns // block, high, wide, block, block)
        plain = ops.Transpose(parts, perm=[0, 5, 1, 4, 2, 3])
    missing = columns * group - x.shape[1]
    n.check(missing >= 0, f"filters of {w.shape} in {group} groups for an input of {x.shape}")
    x = x if missing == 0 else ops.Pad(x, ints(0, 0, 0, 0, 0, missing, 0, 0))
    given = n.given("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
    y = ops.Conv(x, plain.reshape(*w.shape), b, **given)
    y = y if total is None else y + total
    alpha, beta = (*n.attr("activation_params", ()), None, None)[:2]
    return activate(n, y, n.attr("activation", ""), alpha, beta)


@lowering("MaxPool", domain=BLOCKED)
def _max_pool(n: Call, x: Any) -> Any:
    return ops.MaxPool(x, **n.given(*_POOL))


@lowering("AveragePool", domain=BLOCKED)
def _average_pool(n: Call, x: Any) -> Any:
    return ops.AveragePool(x, **n.given(*_POOL, "count_include_pad"))


@lowering("GlobalMaxPool", "GlobalAveragePool", domain=BLOCKED)
def _global_pool(n: Call, x: Any) -> Any:
    return getattr(ops, n.node.op_type)(x)


@lowering("Upsample", domain=BLOCKED)
def _upsample(n: Call, x: Any) -> Any:
    mode = n.attr("mode", "nearest")
    scales = np.array(n.attr("scales"), np.float32)
    if mode == "nearest":
        how = n.attr("coordinate_transformation_mode", "asymmetric")
        return ops.Resize(x, None, scales, mode="nearest", coordinate_transformation_mode=how, nearest_mode="floor")
    how = n.attr("coordinate_transformation_mode", "asymmetric")
    return ops.Resize(x, None, scales, mode="linear", coordinate_transformation_mode=how)

"""ConvFilterGrad as one convolution of the input by what comes back, which XLA runs without writing windows out."""

from __future__ import annotations

from typing import Any

from xrt_core.kernels import find_kernel
from xrt_core.kernels.namespace import narrow, wide
from xrt_core.kernels.windows import windows_of
from xrt_xla.kernels.context import XlaContext, xla_kernel


@xla_kernel("ConvFilterGrad", domain="xrt")
def conv_filter_grad(ctx: XlaContext, x: Any, dy: Any) -> Any:
    """The filter's gradient: images are what is summed over, strides and dilations change places."""
    kernel_shape = tuple(map(int, ctx.attr("kernel_shape")))
    if int(ctx.attr("group", 1)) != 1 or 0 in x.shape or 0 in dy.shape:
        portable = find_kernel("xrt", "ConvFilterGrad")
        assert portable is not None
        return portable.function(ctx, x, dy)
    windows = windows_of(ctx, x.shape[2:], kernel_shape)
    spatial = "".join(map(str, range(windows.rank)))
    padding = [(b, windows.reach(i) - windows.size[i] - b) for i, b in enumerate(windows.begin)]
    dtype = wide(x.dtype)
    made = ctx.lax.conv_general_dilated(
        x.astype(dtype), dy.astype(dtype), windows.dilations, padding, rhs_dilation=windows.strides,
        dimension_numbers=(f"CN{spatial}", f"IO{spatial}", f"CN{spatial}"),
    )  # fmt: skip
    return narrow(made, x.dtype)

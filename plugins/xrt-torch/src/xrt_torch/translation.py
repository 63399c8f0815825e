"""Translation: a functional FX graph of ATen operators as a graph of XRT, by torchlib, onnxscript's registry."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch._dynamo.convert_frame import compile_lock
from torch._subclasses.fake_tensor import FakeTensor
from torch.onnx._internal.exporter import _core, _fx_passes, _ir_passes, _registration

from xrt_core.errors import ModelLoadError
from xrt_core.ir.garbage_collection import collector_paused
from xrt_torch.complex_numbers import dft
from xrt_torch.convolution import conv_filter_grad
from xrt_torch.interpolation import (
    finds_same,
    has_small,
    interpolate,
    interpolate_backward,
    is_dense,
    rounds_otherwise,
    weights,
)
from xrt_torch.partition import copy_of
from xrt_torch.polynomials import recurrence
from xrt_torch.strided import is_known, take_apart

_lock = threading.RLock()  # type promotion and tracing of onnxscript functions have state of the process


class UntranslatableError(ModelLoadError):
    """A node that torchlib does not translate. node: its name in the FX graph."""

    def __init__(self, node: torch.fx.Node, reason: str) -> None:
        super().__init__(f"{node.target} ({node.name}): {reason}")
        self.node = node.name


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without the exporter's notes on what it lacks and promotes, which are nothing to users; one thread at a time."""
    logs = [logging.getLogger(name) for name in ("torch.onnx", "onnx_ir")]
    with _lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        levels = [log.level for log in logs]
        for log in logs:
            log.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for log, level in zip(logs, levels, strict=True):
                log.setLevel(level)


@functools.cache
def registry() -> Any:
    """Torchlib's registry. The first call imports onnxscript, which takes two seconds.

    It parses the source of some 500 functions. Where the garbage collector runs meanwhile, code of other threads does,
    and what they parse (TorchDynamo its guards) fails, or this: https://github.com/python/cpython/issues/106905.
    """
    with _quietly(), collector_paused():
        made = _registration.ONNXRegistry.from_torchlib()
        import xrt_torch.onnx_functions  # noqa: F401 -- parsed now, and not when the first of them is needed

        for operator, function in own_translations().items():
            made.register_op(operator, function)
        return made


def own_translations() -> dict[Any, Any]:
    """The translations of this package: of operators that torchlib lacks or gets wrong."""
    return {
        torch.ops.aten.diagonal.default: _diagonal,
        torch.ops.aten.div.Scalar_mode: _truncated,
        torch.ops.aten.div.Tensor_mode: _truncated,
        torch.ops.aten.gelu.default: _gelu,
        torch.ops.aten.grid_sampler_2d.default: _grid_sampler,
        torch.ops.aten.index.Tensor: _index,
        torch.ops.aten._unsafe_index.Tensor: _index,
        torch.ops.aten.sgn.default: _sign,
        torch.ops.aten.sign.default: _sign,
        torch.ops.aten.sort.stable: _sort_stable,
        dft._opoverload: _dft,
        recurrence._opoverload: _recurrence,
        conv_filter_grad._opoverload: _conv_filter_grad,
        interpolate._opoverload: _interpolate,
        interpolate_backward._opoverload: _interpolate_backward,
        torch.ops.aten._native_batch_norm_legit_no_training.default: _batch_norm,
        torch.ops.aten._int_mm.default: _int_mm,
    }


def _gelu(x: Any, approximate: str = "none") -> Any:
    from xrt_torch.onnx_functions import gelu, gelu_tanh

    return gelu_tanh(x) if approximate == "tanh" else gelu(x)


def _int_mm(a: Any, b: Any) -> Any:
    from onnxscript.onnx_opset import opset18 as op

    return op.MatMulInteger(a, b)


def _diagonal(x: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """Every so many elements of the two dimensions as one, which is none of what lies beside the diagonal: infinities
    and NaN there stay there."""
    from onnxscript.onnx_opset import opset18 as op

    rank = len(x.shape)
    dim1, dim2 = dim1 % rank, dim2 % rank
    order = [i for i in range(rank) if i not in (dim1, dim2)] + [dim1, dim2]
    x = x if order == sorted(order) else op.Transpose(x, perm=order)
    zero, one, below, above = (op.Constant(value_ints=[n]) for n in (0, 1, max(-offset, 0), max(offset, 0)))
    rows, columns = (op.Shape(x, start=i, end=i + 1) for i in (rank - 2, rank - 1))
    count = op.Max(op.Min(op.Sub(rows, below), op.Sub(columns, above)), zero)
    step, first = op.Add(columns, one), op.Add(op.Mul(below, columns), above)
    whole = op.Concat(op.Shape(x, end=rank - 2), op.Mul(rows, columns), axis=0) if rank > 2 else op.Mul(rows, columns)
    last = op.Constant(value_ints=[rank - 2])
    return op.Slice(op.Reshape(x, whole, allowzero=1), first, op.Add(first, op.Mul(count, step)), last, step)


def _truncated(a: Any, b: Any, rounding_mode: str | None = None) -> Any:
    """Of integers by their own division, which no float has the digits for. Floors are taken apart before this."""
    from onnxscript.function_libs.torch_lib.ops.core import aten_div_mode
    from onnxscript.onnx_opset import opset18 as op

    if rounding_mode != "trunc" or not a.dtype.is_integer():
        return aten_div_mode(a, b, rounding_mode=rounding_mode)
    return op.Div(a, op.CastLike(b, a))


def _sign(x: Any) -> Any:
    """The operator, which leaves open what the sign of NaN is: 0 for torch."""
    from onnxscript.onnx_opset import opset18 as op

    if x.dtype == ir.DataType.BOOL:
        return op.Identity(x)
    made = op.Sign(x)
    return op.Where(op.IsNaN(x), op.CastLike(0.0, x), made) if x.dtype.is_floating_point() else made


def _index(x: Any, indices: Sequence[Any]) -> Any:
    """By one tensor of integers: an operator that engines have, with an index that is no larger than it was."""
    from onnxscript.function_libs.torch_lib.ops.core import aten_index
    from onnxscript.onnx_opset import opset18 as op

    given = [(i, v) for i, v in enumerate(indices) if v is not None]
    if len(given) == 1 and given[0][1].dtype in (ir.DataType.INT32, ir.DataType.INT64):
        return op.Gather(x, given[0][1], axis=given[0][0])
    return aten_index(x, indices)


def _dft(x: Any, dim: int, inverse: bool) -> Any:
    """The first dimension is that of a batch for the operator, and not transformed."""
    from onnxscript.onnx_opset import opset18 as op

    made = op.DFT(op.Unsqueeze(x, [0]), axis=dim + 1, inverse=int(inverse), onesided=0)
    return op.Squeeze(made, [0])


def _conv_filter_grad(
    x: Any,
    grad: Any,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Any:
    """An operator of XRT's dialect, which onnxscript does not know: recorded as torch records operators of users."""
    given = {"kernel_shape": kernel, "strides": stride, "pads": [*padding, *padding], "dilations": dilation}
    attributes = [ir.AttrInt64s(name, list(numbers)) for name, numbers in given.items()]
    node = ir.Node("xrt", "ConvFilterGrad", [x, grad], [*attributes, ir.AttrInt64("group", groups)], version=1)
    _core.current_tracer.nodes.append(node)
    return node.outputs[0]


def _interpolate(x: Any, size: Sequence[Any], scales: Sequence[float], mode: str, align_corners: bool) -> Any:
    from onnxscript.onnx_opset import opset18 as op

    given = x.shape.dims[2:]
    if x.dtype == ir.DataType.DOUBLE and mode != "nearest" and has_small(given, size):  # Resize finds places in float32
        return _by_matrices(op, x, _weights(x.dtype, given, size, scales, mode, align_corners), given)
    each = [op.Constant(value_ints=[n]) if isinstance(n, int) else op.Reshape(n, [-1]) for n in size]
    how: dict[str, Any] = {"mode": mode}
    if mode == "nearest":
        how |= {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
        if not scales and not all(finds_same(n, m) for n, m in zip(x.shape.dims[2:], size, strict=True)):
            for i, n in enumerate(each):
                x = _nearest(op, x, 2 + i, n)
            return x
    else:
        how["coordinate_transformation_mode"] = "align_corners" if align_corners else "half_pixel"
    if scales:
        return op.Resize(x, None, op.Constant(value_floats=[1.0, 1.0, *scales]), None, **how)
    return op.Resize(x, None, None, op.Concat(op.Shape(x, start=0, end=2), *each, axis=0), **how)


def _interpolate_backward(
    grad: Any, size: Sequence[int], given: Sequence[int], scales: Sequence[float], mode: str, align_corners: bool
) -> Any:
    from onnxscript.onnx_opset import opset18 as op

    matrices = _weights(grad.dtype, given[2:], size, scales, mode, align_corners)
    return _by_matrices(op, grad, [w.t() for w in matrices], size)


def _weights(
    dtype: ir.DataType,
    given: Sequence[int],
    size: Sequence[int],
    scales: Sequence[float],
    mode: str,
    align_corners: bool,
) -> list[torch.Tensor]:
    """The matrices [size, given] of an interpolation, one for each axis."""
    kind = {ir.DataType.FLOAT: torch.float32, ir.DataType.DOUBLE: torch.float64}[dtype]
    each = zip(given, size, scales or [None] * len(size), strict=True)
    return [weights(n, m, s, mode, align_corners, kind) for n, m, s in each]


def _by_matrices(op: Any, x: Any, matrices: Sequence[torch.Tensor], given: Sequence[int]) -> Any:
    """x multiplied by a matrix along each of its last axes, of these sizes: the last one's from the right, the others'
    from the left."""
    made = op.MatMul(x, _constant(op, matrices[-1].t().contiguous()))
    for i in range(len(given) - 2, -1, -1):
        is_first_of_three = i < len(given) - 2
        if is_first_of_three:  # what is behind it is one axis
            made = op.Reshape(made, op.Constant(value_ints=[0, 0, given[0], -1]))
        made = op.MatMul(_constant(op, matrices[i].contiguous()), made)
        if is_first_of_three:
            made = op.Reshape(made, op.Constant(value_ints=[0, 0, *(m.shape[0] for m in matrices)]))
    return made


def _constant(op: Any, tensor: torch.Tensor) -> Any:
    return op.Constant(value=_core.TorchTensor(tensor))


def _grid_sampler(x: Any, grid: Any, interpolation: int, padding: int, align: bool) -> Any:
    """GridSample, of places that every library finds alike, with torch's results for those that are no numbers."""
    from onnxscript.onnx_opset import opset18 as op

    def number(value: float) -> Any:
        return op.CastLike(op.Constant(value_float=value), grid)

    borders = padding == 1
    near = op.Clip(grid, number(-4.0), number(4.0))  # what is further away is as far outside
    if borders:
        near = op.Where(op.IsNaN(grid), number(-1.0), near)
    made = op.GridSample(
        x,
        near,
        mode=("bilinear", "nearest", "bicubic")[interpolation],
        padding_mode=("zeros", "border", "reflection")[padding],
        align_corners=int(align),
    )
    if borders:
        return made
    nothing = op.ReduceSum(op.Sub(grid, grid), op.Constant(value_ints=[-1]), keepdims=0)  # NaN for NaN and infinities
    return op.Add(made, op.Unsqueeze(nothing, op.Constant(value_ints=[1])))


def _nearest(op: Any, x: Any, axis: int, size: Any) -> Any:
    """By indices, which are found in float32 as torch does."""
    given, size = op.Squeeze(op.Shape(x, start=axis, end=axis + 1)), op.Squeeze(size)
    ratio = op.Div(*(op.Cast(n, to=ir.DataType.FLOAT) for n in (given, size)))
    zero, one = op.Constant(value_int=0), op.Constant(value_int=1)
    places = op.Cast(op.Range(zero, size, one), to=ir.DataType.FLOAT)
    found = op.Cast(op.Floor(op.Mul(places, ratio)), to=ir.DataType.INT64)
    return op.Gather(x, op.Clip(found, zero, op.Sub(given, one)), axis=axis)


def _batch_norm(x: Any, *rest: Any) -> Any:
    """Where nothing is trained torch's own statistics are empty."""
    from onnxscript.function_libs.torch_lib.ops.core import aten__native_batch_norm_no_training
    from onnxscript.onnx_opset import opset18 as op

    made = aten__native_batch_norm_no_training(x, *rest)[0]
    empty = op.CastLike(op.Constant(value=ir.tensor([], dtype=ir.DataType.FLOAT)), x)
    return made, empty, empty


def _recurrence(x: Any, n: Any, a: float, b: float, c: float, d: float, e: float) -> Any:
    from onnxscript.onnx_opset import opset18 as op

    from xrt_torch.onnx_functions import polynomial

    doubles = [op.Constant(value=ir.tensor(v, dtype=ir.DataType.DOUBLE)) for v in (a, b, c, d, e)]
    return polynomial(x, n, *doubles)


def _sort_stable(x: Any, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
    """Of equal elements the first comes first, as in ONNX's TopK."""
    from onnxscript.function_libs.torch_lib.ops.core import aten_sort

    return aten_sort(x, dim, descending)


def translate(graph: torch.fx.Graph, name: str) -> ir.Model:
    """Return the ONNX model of an FX graph, whose placeholders and results become inputs and outputs in order.

    Integers (SymInts) become int64 scalars. Every result must be a node; the graph is left as it is.

    Raises UntranslatableError for an operator that torchlib lacks, or that it refuses for these types.
    """
    with _quietly():
        return _onnx_of(graph, name)


def set_constant(model: ir.Model, value: ir.Value, tensor: torch.Tensor) -> None:
    """Make a constant of an input."""
    model.graph.inputs.remove(value)
    value.const_value = _core.TorchTensor(tensor.detach(), name=value.name)
    model.graph.register_initializer(value)


def in_bytes(model: ir.Model) -> bytes:
    """A translation as the bytes of an ONNX model."""
    content: bytes = ir.to_proto(model).SerializeToString()
    return content


def _onnx_of(graph: torch.fx.Graph, name: str) -> ir.Model:
    root = torch.nn.Module()
    copied = copy_of(graph)
    _first_as_tensors(copied)
    take_apart(copied)
    for node in copied.nodes:
        if node.op == "get_attr":
            setattr(root, str(node.target), node.meta["val"])
    module = torch.fx.GraphModule(root, copied)
    with compile_lock, _real_constants(copied):  # torch notes the node at hand where a capture elsewhere would find it
        _fx_passes.insert_type_promotion_nodes(module)
    _keep_doubles(module.graph)
    constants = _as_inputs(module.graph)
    model = ir.Model(ir.Graph([], [], nodes=[], name=name), ir_version=10)
    values = _translated(module.graph, model)
    for made in model.graph:
        made.metadata_props.clear()  # where an operator came from, as text: three quarters of the model's bytes
    _connect(module.graph, model.graph, values)
    for node, tensor in constants.items():
        set_constant(model, values[node], tensor)
    _ir_passes.add_opset_imports(model)
    model.opset_imports.setdefault("", registry().opset_version)  # of a graph without nodes
    return model


@contextlib.contextmanager
def _real_constants(graph: torch.fx.Graph) -> Iterator[None]:
    """Let the graph's fake tensors meet its constants, which are real ones, while it is interpreted."""
    modes = {v.fake_mode for n in graph.nodes if isinstance(v := n.meta.get("val"), FakeTensor)}
    before = [(m, m.allow_non_fake_inputs) for m in modes]
    try:
        for m in modes:
            m.allow_non_fake_inputs = True
        yield
    finally:
        for m, allowed in before:
            m.allow_non_fake_inputs = allowed


def _first_as_tensors(graph: torch.fx.Graph) -> None:
    """Make a constant of a number in the place of an operator's first tensor, as in `torch.add(0.5, x)`: torch's
    exporter finds no overload for it. Its type is that which the two have together."""
    for node in list(graph.nodes):
        if not isinstance(node.target, torch._ops.OpOverload) or len(node.args) < 2:
            continue
        number, other = node.args[0], getattr(node.args[1], "meta", {}).get("val")
        is_tensor = node.target._schema.arguments[0].type.kind() == "TensorType"
        if not is_tensor or not isinstance(number, bool | int | float) or not isinstance(other, torch.Tensor):
            continue
        with graph.inserting_before(node):
            constant = graph.get_attr(f"number_{node.name}")
        constant.meta["val"] = torch.tensor(number, dtype=torch.result_type(other, number))
        node.update_arg(0, constant)


def _keep_doubles(graph: torch.fx.Graph) -> None:
    """Make Python floats that meet float64 tensors into float64 constants: torchlib would round them to float32."""
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.Tensor) or value.dtype is not torch.float64:
            continue
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        if _replaced_by_double(graph, node, value):
            continue
        _scale_by_doubles(graph, node)
        wanted = [a.type.kind() == "TensorType" for a in node.target._schema.arguments]
        for i, (a, is_tensor) in enumerate(zip(node.args, wanted, strict=False)):
            if is_tensor and isinstance(a, float):
                with graph.inserting_before(node):
                    constant = graph.get_attr(f"double_{node.name}_{i}")
                constant.meta["val"] = torch.tensor(a, dtype=torch.float64)
                node.update_arg(i, constant)


def _as_inputs(graph: torch.fx.Graph) -> dict[str, torch.Tensor]:
    """Make an input of each constant: torch's exporter takes no constants before torch 2.13. Returns them by name."""
    found = {}
    for node in [n for n in graph.nodes if n.op == "get_attr"]:
        with graph.inserting_before(node):
            made = graph.placeholder(node.name)
        made.meta = dict(node.meta)
        found[made.name] = node.meta["val"]
        node.replace_all_uses_with(made)
        graph.erase_node(node)
    return found


def _replaced_by_double(graph: torch.fx.Graph, node: torch.fx.Node, value: torch.Tensor) -> bool:
    """Replace a node that makes a tensor of one float, or a range of floats, where it is such a node."""
    aten = torch.ops.aten
    is_range = node.target in (aten.arange.default, aten.arange.start, aten.arange.start_step)
    if is_range and any(type(a) is float for a in node.args) and all(type(a) in (int, float) for a in node.args):
        with graph.inserting_before(node):
            made = graph.get_attr(f"double_{node.name}")
        made.meta["val"] = torch.arange(*node.args, dtype=torch.float64)
        node.replace_all_uses_with(made)
        graph.erase_node(node)
        return True
    place = {aten.scalar_tensor.default: 0, aten.full.default: 1, aten.full_like.default: 1}.get(node.target)
    if place is None or not isinstance(number := node.args[place], float):
        return False
    with graph.inserting_before(node):
        made = graph.get_attr(f"double_{node.name}")
        made.meta["val"] = torch.tensor(number, dtype=torch.float64)
        if place:
            is_like, number_of_type = node.target is aten.full_like.default, made
            size = list(value.shape) if is_like else node.args[0]
            if all(isinstance(n, int | torch.fx.Node) for n in size):  # type: ignore[union-attr]
                made = graph.call_function(aten.expand.default, (number_of_type, size))
            elif is_like:
                zeros = graph.node_copy(node)
                zeros.args = (node.args[0], 0.0)
                made = graph.call_function(aten.add.Tensor, (zeros, number_of_type))
            else:
                return False
            made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    graph.erase_node(node)
    return True


def _scale_by_doubles(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Multiply by constants where torchlib would have attributes, which are float32: the factors `alpha` and `beta`;
    and make a constant of a power's base."""
    aten = torch.ops.aten
    product = {aten.addmm.default: aten.mm.default, aten.baddbmm.default: aten.bmm.default}

    def constant(what: str, number: float) -> torch.fx.Node:
        made = graph.get_attr(f"double_{node.name}_{what}")
        made.meta["val"] = torch.tensor(number, dtype=torch.float64)
        return made

    def scaled(x: Any, what: str) -> Any:
        number: Any = node.kwargs.get(what, 1)
        if number == 1 or not isinstance(x, torch.fx.Node):
            return x if number == 1 else x * number
        made = graph.call_function(aten.mul.Tensor, (x, constant(what, number)))
        made.meta = dict(x.meta)
        return made

    factors = [v for k, v in node.kwargs.items() if k in ("alpha", "beta")]
    is_scaled = any(type(f) is float for f in factors) and all(type(f) in (int, float) for f in factors)
    with graph.inserting_before(node):
        if node.target is aten.pow.Scalar and isinstance(base := node.args[0], float):
            node.args = (constant("base", base), node.args[1])
            node.target = aten.pow.Tensor_Tensor
        elif is_scaled and node.target in (aten.add.Tensor, aten.sub.Tensor):
            node.args = (node.args[0], scaled(node.args[1], "alpha"))
            node.kwargs = {}
        elif is_scaled and node.target in product:
            added, *multiplied = node.args
            made = graph.call_function(product[node.target], tuple(multiplied))
            made.meta = dict(node.meta)
            if node.kwargs.get("beta", 1) == 0:  # what is not a number is not added
                node.target, node.args = aten.mul.Tensor, (made, constant("alpha", node.kwargs.get("alpha", 1)))
            else:
                node.args = (scaled(added, "beta"), scaled(made, "alpha"))
                node.target = aten.add.Tensor
            node.kwargs = {}


def _translated(graph: torch.fx.Graph, model: ir.Model) -> dict[str, Any]:
    for node in graph.nodes:
        if node.op == "call_function" and not translatable(node.target):
            raise UntranslatableError(node, "torchlib has no translation of it")
    try:
        return _core._translate_fx_graph(
            graph, model, graph_like=model.graph, owned_graphs={}, lower="at_conversion", registry=registry()
        )
    except Exception as e:
        reason = str(e.__cause__ or e).strip().partition("\n")[0][:300]
        for node in graph.nodes:
            if f"translating node {node.format_node()}." in str(e):
                raise UntranslatableError(node, reason) from e
        raise ModelLoadError(f"the graph is not translated: {reason}") from e


def translatable(target: Any) -> bool:
    """Whether torchlib has a translation of an operator, or Python computes it on sizes."""
    return not isinstance(target, torch._ops.OpOverload) or bool(registry().is_registered(target))


def mistrust(node: torch.fx.Node) -> str | None:
    """Why torchlib's translation of an operator is not taken for these arguments; None where it is."""
    target: Any = node.target
    packet = getattr(target, "overloadpacket", None)
    aten = torch.ops.aten
    first = next((v for n in node.all_input_nodes if isinstance(v := n.meta.get("val"), torch.Tensor)), None)
    if packet is aten.grid_sampler_2d and first is not None and first.dtype in (torch.float16, torch.bfloat16):
        return "torch rounds the grid to narrow floats"
    is_plain = first is not None and _is_contiguous(first) and node.args[3:] in ((), (None,))
    if packet is aten.as_strided and not (is_known(node) or is_plain):
        return "it reads elements as they lie in memory"
    if target in (interpolate._opoverload, interpolate_backward._opoverload) and rounds_otherwise(node):
        return "torch rounds what it interpolates in a way of its own"
    if target is interpolate_backward._opoverload and not is_dense(node):
        return "torch adds up gradients of pixels more quickly, or of sizes that vary"
    if packet in _WRONG:
        return "torchlib's translation computes something else"
    return None


def _is_contiguous(x: torch.Tensor) -> bool:
    """Whether it is known to be."""
    return all(isinstance(n, int) for n in (*x.shape, *x.stride())) and x.is_contiguous()


_WRONG = (
    torch.ops.aten._linalg_det,
    torch.ops.aten._upsample_bicubic2d_aa,
    torch.ops.aten._upsample_bilinear2d_aa,
    torch.ops.aten.histc,
)


def _connect(graph: torch.fx.Graph, made: ir.Graph, values: dict[str, Any]) -> None:
    """Make inputs of the placeholders and outputs of the results, each a value of its own."""
    made.inputs.clear()
    made.outputs.clear()
    for node in graph.nodes:
        if node.op == "placeholder":
            made.inputs.append(values[node.name])
    results: Sequence[Any] = graph.output_node().args[0]  # type: ignore[assignment]
    for i, node in enumerate(results):
        value = values[node.name]
        result = ir.Value(name=f"result_{i}", type=value.type, shape=value.shape)
        wanted = node.meta.get("val")
        kind = _onnx_dtype(wanted.dtype) if isinstance(wanted, torch.Tensor) else None
        if kind is None or value.dtype == kind:
            made.append(ir.Node("", "Identity", [value], outputs=[result]))
        else:  # statistics of norms, which torchlib gives in float32
            result.type = ir.TensorType(kind)
            made.append(ir.Node("", "Cast", [value], [ir.AttrInt64("to", kind)], outputs=[result]))
        made.outputs.append(result)


def _onnx_dtype(dtype: torch.dtype) -> ir.DataType | None:
    return _core.torch_dtype_to_onnx_dtype(dtype)

"""Exported programs: a `torch.export.ExportedProgram` as a graph of XRT, with its parameters as constants."""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

import torch
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.fx import Graph, Node
from torch.nn.attention import SDPBackend, sdpa_kernel

import xrt_core as xrt
from xrt_core.errors import InputError, ModelLoadError
from xrt_core.ir.graph import Graph as XRTGraph
from xrt_torch.decompositions import own, table
from xrt_torch.partition import only_checks


def graph_of(model: object, example: object = None) -> XRTGraph | None:
    """The graph of an exported program, or of a module that is exported for `example`, its arguments (a tuple, or one
    tensor); None for an object that is neither.

    A path is that of a .pt2 file, as `torch.export.save` writes it.

    Raises ModelLoadError for a module without example, for a file that is not read, and for what torch does not
    export or torchlib not translate.
    """
    if isinstance(model, str | os.PathLike):
        model = _loaded(model)
    if isinstance(model, torch.nn.Module):
        model = _exported(model, example)
    elif not isinstance(model, torch.export.ExportedProgram):
        return None
    elif example is not None:
        raise InputError("example is for modules of torch; an ExportedProgram says itself what it takes")
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            translated = _translated(model)
    except ModelLoadError:
        raise
    except Exception as e:
        reason = str(e.__cause__ or e).strip().partition("\n")[0][:300]
        raise ModelLoadError(f"this ExportedProgram is not translated: {reason}") from e
    finally:
        logging.disable(disabled)
    return xrt.import_model(translated)


def _translated(program: Any) -> Any:
    """The ONNX model, as graphs of `torch.compile` are translated; by torch's exporter where control flow is in it."""
    from onnx_ir.passes.common import RemoveUnusedNodesPass
    from onnxscript.rewriter import RewriteRuleSet
    from onnxscript.rewriter.rules import common

    from xrt_torch.translation import own_translations, set_constant, translate  # imports torch's exporter

    if any(n.op == "get_attr" for n in program.graph.nodes):  # a graph of its own, for a branch or the turns of a loop
        program = program.run_decompositions(own())
        _refuse_mistranslated(program)
        return torch.onnx.export(
            program, dynamo=True, verbose=False, optimize=False, custom_translation_table=own_translations()
        ).model
    with sdpa_kernel(SDPBackend.MATH):
        program = program.run_decompositions(_decompositions())
    _refuse_mistranslated(program)
    model = translate(_graph_of(program), "program")
    tensors = {**program.state_dict, **program.constants}
    specs = [
        s
        for s in program.graph_signature.input_specs
        if not isinstance(s.arg, ConstantArgument) and s.kind is not InputKind.TOKEN
    ]
    for spec, value in zip(specs, tuple(model.graph.inputs), strict=True):
        value.name = spec.target if spec.kind in _HELD else spec.arg.name  # which the copied graph may not have kept
        if spec.kind in _HELD:
            set_constant(model, value, tensors[spec.target])
    RemoveUnusedNodesPass()(model)
    RewriteRuleSet([common.fuse_batchnorm_into_conv_rule, common.fuse_batchnorm_into_gemm_rule]).apply_to_model(model)
    return model


def _refuse_mistranslated(program: Any) -> None:
    """Raise ModelLoadError for an operator that torchlib gets wrong, in a branch or a loop as well."""
    from xrt_torch.translation import mistrust

    for module in program.graph_module.modules():
        for node in getattr(module, "graph", Graph()).nodes:
            if node.op == "call_function" and (why := mistrust(node)):
                raise ModelLoadError(f"{node.target} ({node.name}): {why}")


def _decompositions() -> dict[Any, Any]:
    """Those of `torch.compile`, but for what ONNX has operators of, or torchlib alone translates."""
    aten = torch.ops.aten
    whole = {
        aten.linear,
        aten.lstm,
        aten.gru,
        aten.fake_quantize_per_tensor_affine,
        aten.fake_quantize_per_channel_affine,
    }
    return {o: f for o, f in table().items() if getattr(o, "overloadpacket", None) not in whole}


def _graph_of(program: Any) -> Graph:
    """The program's graph without assertions, checks of factorisations and constant arguments; results are the tensors
    that the user gets."""
    signature, made, env = program.graph_signature, Graph(), dict[Node, Node]()
    constant = {s.arg.name for s in signature.input_specs if isinstance(s.arg, ConstantArgument)}
    tokens = {s.arg.name for s in signature.input_specs if s.kind is InputKind.TOKEN}
    for node in program.graph.nodes:
        is_assertion = not node.users and str(node.target).startswith(("aten._assert", "aten.sym_constrain_range"))
        if only_checks(node):
            tokens.update(user.name for user in node.users)
        elif node.op != "output" and not is_assertion and node.name not in constant | tokens:
            if not tokens.isdisjoint(n.name for n in node.all_input_nodes):
                raise ModelLoadError(f"{node.args[1]} ({node.name}) has an effect, which a graph of XRT cannot have")
            env[node] = made.node_copy(node, lambda a: env[a])
            env[node].meta = dict(node.meta)
    named = {n.name: env[n] for n in env}
    wanted = [s.arg for s in signature.output_specs if s.kind is OutputKind.USER_OUTPUT]
    made.output(tuple(named[a.name] for a in wanted if not isinstance(a, ConstantArgument)))
    return made


_HELD = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def _loaded(path: str | os.PathLike[str]) -> Any:
    if not os.fspath(path).endswith(".pt2"):
        return None
    try:
        return torch.export.load(os.fspath(path))
    except Exception as e:
        raise ModelLoadError(f"torch.export does not load {os.fspath(path)!r}: {str(e).strip()[:300]}") from e


def _exported(module: torch.nn.Module, example: object) -> Any:
    name = type(module).__qualname__
    if example is None:
        raise ModelLoadError(
            f"{name} is a module of torch, which does not say what it takes: give example=(x, ...), its arguments; for "
            "training, torch.compile(model, backend='xrt')"
        )
    try:
        with torch.no_grad():
            return torch.export.export(module, example if isinstance(example, tuple) else (example,))
    except Exception as e:
        raise ModelLoadError(f"torch.export does not capture {name}: {str(e).strip()[:300]}") from e

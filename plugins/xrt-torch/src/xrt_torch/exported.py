"""Exported programs: a `torch.export.ExportedProgram` as a graph of XRT, with its parameters as constants.

A saved graph answers where no torch is that could be asked, so it is compared with torch eager here, once.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.fx import Graph, GraphModule, Node
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map_only

import xrt_core as xrt
from xrt_core.errors import InputError, ModelLoadError
from xrt_core.events import process_events
from xrt_core.ir.graph import Graph as XRTGraph
from xrt_torch.comparison import Comparison
from xrt_torch.decompositions import own, table
from xrt_torch.devices import CPU, RandomState
from xrt_torch.ordering import chooses_order
from xrt_torch.partition import only_checks

_LONGEST: Final = 5.0
"""Seconds of eager's call up to which the graph is compared with it: the host may take several times as long."""


def graph_of(model: object, example: object = None) -> XRTGraph | None:
    """The graph of an exported program, or of a module that is exported for `example`, its arguments (a tuple, or one
    tensor); None for an object that is neither.

    A path is that of a .pt2 file, as `torch.export.save` writes it. The graph is run on the program's example inputs
    and compared with torch eager, see `_verify`.

    Raises ModelLoadError for a module without example, for a file that is not read, for what torch does not export or
    torchlib not translate, for results that depend on what the program itself writes into its buffers, which one
    graph does not carry from call to call, and for results that differ from eager's.
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
            program, translated = _translated(model)
    except ModelLoadError:
        raise
    except Exception as e:
        reason = str(e.__cause__ or e).strip().partition("\n")[0][:300]
        raise ModelLoadError(f"this ExportedProgram is not translated: {reason}") from e
    finally:
        logging.disable(disabled)
    _refuse_state(program, {v.name for v in translated.graph.initializers.values() if v.uses()})
    graph = xrt.import_model(translated)
    if wrong := _verify(model, program, graph):
        raise ModelLoadError(f"this ExportedProgram is mistranslated: {wrong}; torch.compile(backend='xrt') runs it")
    return graph


def _refuse_state(program: Any, read: set[str]) -> None:
    """Raise ModelLoadError where the results depend on a buffer that the program writes; tell of other writes, which
    no caller sees. read: the constants that the results depend on."""
    signature = program.graph_signature
    written = dict(signature.buffers_to_mutate) | dict(getattr(signature, "user_inputs_to_mutate", {}))
    if not written:
        return
    targets = ", ".join(dict.fromkeys(written.values()))
    if state := sorted(read.intersection(signature.buffers_to_mutate.values())):
        raise ModelLoadError(
            f"the program writes the buffer {state[0]!r}, and its results depend on it: a model of XRTModule has no "
            "state between calls. Pass it as an argument and return it; torch.compile(backend='xrt') runs the module"
        )
    process_events.emit("torch.not_written", level=logging.WARNING, graph="program", targets=targets)


def _verify(source: Any, program: Any, graph: XRTGraph) -> str:
    """What is wrong with the graph's results, by the host, for the program's example inputs; "" for nothing.

    Not compared are programs without example inputs or results, that draw random numbers, take `_LONGEST` in eager, or
    do not run on the host; an event tells so. Where torch may choose another order of equal elements, a difference is
    an event too.
    """

    def left(reason: str) -> str:
        process_events.emit("torch.not_compared", graph="program", reason=reason)
        return ""

    if source.example_inputs is None:
        return left("the program has no example inputs")
    args, kwargs = tree_map_only(torch.Tensor, lambda t: t.detach().clone(), source.example_inputs)
    inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    held = {**program.state_dict, **program.constants}
    tensors = [x for x in (*inputs, *held.values()) if isinstance(x, torch.Tensor)]
    if len(inputs) != len(graph.inputs) or any(x.device != CPU for x in tensors):
        return left("its inputs are not tensors of the CPU alone")
    given = [x.clone() for x in inputs]  # which the program may write
    module = source.module()
    kept = [(b, b.detach().clone()) for b in module.buffers()]
    before, start = RandomState(CPU), time.perf_counter()
    try:
        with torch.no_grad():
            expected = [x for x in tree_leaves(module(*args, **kwargs)) if isinstance(x, torch.Tensor)]
        took = time.perf_counter() - start
    except Exception as e:
        return left(f"eager raises {type(e).__name__}: {e}"[:300])
    finally:
        with torch.no_grad():
            for b, content in kept:
                b.copy_(content)
    if not before.is_now():
        before.restore()
        return left("it draws random numbers")
    if took > _LONGEST or not expected:
        return left(f"it takes {took:.1f} s in eager" if expected else "it has no results")
    plain = _graph_of(program)
    try:
        with xrt.XRTModule(graph, engine="host", guard=False) as host:
            results = host(*given)
        found = [torch.as_tensor(r) for r in (results if isinstance(results, tuple) else (results,))]
    except (xrt.XRTError, TypeError) as e:  # an engine may run what the host does not, or torch may not take its types
        return left(f"the host raises {type(e).__name__}: {e}"[:300])
    if len(found) != len(expected):
        return left("results are views of inputs or constants")
    arguments, eager = _arguments(program, held, given), GraphModule(program.graph_module, plain)
    wrong = Comparison(plain).verdict(arguments, found, expected, eager)
    return left(wrong) if wrong and chooses_order(plain) else wrong


def _arguments(program: Any, held: Mapping[str, Any], inputs: Sequence[Any]) -> list[Any]:
    """Of `_graph_of`: what the program holds, and the inputs."""
    rest = iter(inputs)
    return [held[s.target] if s.kind in _HELD else next(rest) for s in _tensor_inputs(program)]


def _tensor_inputs(program: Any) -> list[Any]:
    """The inputs that the graph has."""
    specs = program.graph_signature.input_specs
    return [s for s in specs if not isinstance(s.arg, ConstantArgument) and s.kind is not InputKind.TOKEN]


def _translated(program: Any) -> tuple[Any, Any]:
    """The program with the decompositions, and the ONNX model, as graphs of `torch.compile` are translated; by torch's
    exporter where control flow is in it."""
    from onnx_ir.passes.common import RemoveUnusedNodesPass
    from onnxscript.rewriter import RewriteRuleSet
    from onnxscript.rewriter.rules import common

    from xrt_torch.translation import own_translations, set_constant, translate  # imports torch's exporter

    if any(n.op == "get_attr" for n in program.graph.nodes):  # a graph of its own, for a branch or the turns of a loop
        program = program.run_decompositions(own())
        _refuse_mistranslated(program)
        made = torch.onnx.export(
            program, dynamo=True, verbose=False, optimize=False, custom_translation_table=own_translations()
        )
        return program, made.model
    with sdpa_kernel(SDPBackend.MATH):
        program = program.run_decompositions(_decompositions())
    _refuse_mistranslated(program)
    model = translate(_graph_of(program), "program")
    tensors = {**program.state_dict, **program.constants}
    for spec, value in zip(_tensor_inputs(program), tuple(model.graph.inputs), strict=True):
        value.name = spec.target if spec.kind in _HELD else spec.arg.name  # which the copied graph may not have kept
        if spec.kind in _HELD:
            set_constant(model, value, tensors[spec.target])
    RemoveUnusedNodesPass()(model)
    RewriteRuleSet([common.fuse_batchnorm_into_conv_rule, common.fuse_batchnorm_into_gemm_rule]).apply_to_model(model)
    return program, model


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

"""The backend "xrt" of `torch.compile`: graphs of TorchDynamo become a forward and a backward graph of XRT."""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch.fx import GraphModule
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from xrt_core.errors import CacheError, OptionError, UnsupportedError
from xrt_core.events import process_events
from xrt_core.options import resolve
from xrt_torch.backward_passes import allow_backward_passes, twice_differentiable
from xrt_torch.choice import Call, Choice
from xrt_torch.compiled import CompiledGraph, any_engine_will_do
from xrt_torch.confirmation import Confirmation
from xrt_torch.decompositions import table
from xrt_torch.devices import CPU, device_of, on_device
from xrt_torch.interpolation import WholeInterpolation
from xrt_torch.kept import TranslationFile, written_inputs
from xrt_torch.partition import draws_numbers
from xrt_torch.transforms import in_forward_mode, left_on_failure


def xrt(module: GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, **_: Any) -> Any:
    """Compile a graph of TorchDynamo: the function that `torch.compile(model, backend="xrt", options=...)` calls.

    options: those of `XRTModule`, and
    background: whether calls run eager while XRT compiles (default: True where the guard compiles in the background, as
        it does by default).
    freeze: whether inference takes parameters and buffers as constants. True: one that is written, or replaced, is seen
        at the next call, which runs eager while XRT compiles without them; what is written through `.data`, which
        leaves no trace, is not seen: so this is for who knows that nobody does. False: they are inputs. By default they
        become constants in the background, up to 128 MiB, where that makes calls quicker though their contents are
        looked at in each, so that no write is missed.

    Where there is a process group (`torch.distributed`), both are False, whatever is given: memory of parameters may be
    freed between calls.

    A graph that cannot be captured runs eager, with a FallbackEvent. Raises OptionError for an option that XRT does not
    have, or a value that it does not take.
    """
    given = dict(options or {})
    background = given.pop("background", None)
    freeze = given.pop("freeze", None)
    for name, value in (("background", background), ("freeze", freeze)):
        if value not in (None, True, False):
            raise OptionError(f"{name}={value!r}: it takes True or False")
    resolved = resolve(given)
    if _frees_memory():
        background = freeze = False
    elif background is None:
        background = resolved.guard is not False and resolved.guard_async is not False
    try:
        for x in inputs:
            if isinstance(x, torch.Tensor) and (why := _why_eager(x)):
                raise UnsupportedError(why)
            if isinstance(x, list):
                raise UnsupportedError("it empties a list that it is given, as those of torch's compiled autograd do")
        if _communicates(module):
            raise UnsupportedError(
                "it communicates with other processes, which would not make a call twice when this one compares results"
            )
        if _writes_past_autograd(module, inputs):
            raise UnsupportedError(
                "it writes through `.data` into what autograd has computed, which AOTAutograd would show to autograd"
            )
        device = device_of(inputs)
        _ = module.code  # a lazy graph gets its own `forward`, where each call would look whether it has one
        return _aot(module, inputs, on_device(given, device), background, freeze, device)
    except Exception as e:
        from torch._dynamo.exc import RestartAnalysis

        if isinstance(e, RestartAnalysis):  # with which torch begins anew, after it made a number part of the graph
            raise
        _fall_back(e)
        return module.forward


_IN_PLACE: Final = frozenset(
    (
        operator.setitem, operator.iadd, operator.iand, operator.ifloordiv, operator.ilshift, operator.imatmul,
        operator.imod, operator.imul, operator.ior, operator.ipow, operator.irshift, operator.isub, operator.itruediv,
        operator.ixor,
    )
)  # fmt: skip
"""Python's operators that write into their first argument."""
_COLLECTIVES: Final = ("_c10d_functional", "_c10d_functional_autograd", "c10d", "symm_mem")
"""Libraries of operators by which processes communicate."""


def _frees_memory() -> bool:
    """Whether the memory of tensors may be freed after a call, while they live, as `torch.distributed.fsdp` does with
    those of parameters that it gathers: then nothing may read them in the background."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _communicates(module: GraphModule) -> bool:
    """Whether a graph of TorchDynamo, or one within it, has collective operators."""
    graphs = (m.graph for m in module.modules() if isinstance(m, GraphModule))
    return any(str(n.target).partition(".")[0] in _COLLECTIVES for graph in graphs for n in graph.nodes)


def _writes_past_autograd(module: GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether a graph writes through `.data` into an input that an operator with a backward pass gave. AOTAutograd
    writes so that autograd counts it, and a backward pass that comes later raises."""

    behind = {  # these, and what follows from them, among which are their views
        n
        for p, x in zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True)
        if isinstance(x, torch.Tensor) and x.requires_grad and not x.is_leaf
        for n in p.users
        if getattr(n.target, "__name__", "") == "_get_data_attr"
    }
    for n in module.graph.nodes:
        if not behind.isdisjoint(n.all_input_nodes):
            if not behind.isdisjoint(x for x in n.args[:1] if isinstance(x, torch.fx.Node)) and _is_in_place(n.target):
                return True
            behind.add(n)
    return False


def _is_in_place(target: Any) -> bool:
    """Whether an operator writes into its first argument; torch's have names that say so."""
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    is_torchs = name.endswith("_") and not hasattr(operator, name)  # there, `and_`
    return is_torchs or target in _IN_PLACE


def _fall_back(error: Exception) -> None:
    reason = f"{type(error).__name__}: {str(error).strip()[:600]}"
    process_events.fallback(
        cluster="torch", engine="xrt", stage="plan", kind="raised", error=reason, level=logging.WARNING
    )


def _why_eager(x: torch.Tensor) -> str:
    """Why a graph with this input is torch's; "" where it is not. Tensors that are made of others (of torchao's
    quantised weights, for example) are taken apart by AOTAutograd."""
    from torch._subclasses.fake_tensor import FakeTensor

    if x.layout is not torch.strided:
        return f"a tensor of layout {x.layout}"
    if x.is_quantized:
        return "a quantised tensor"
    plain = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)
    is_taken = type(x) in plain or (is_traceable_wrapper_subclass(x) and not _is_distributed(x))
    return "" if is_taken else f"a tensor of class {type(x).__qualname__}"


def _is_distributed(x: torch.Tensor) -> bool:
    """Whether operators on a tensor of a class of its own, or on those that it is made of, may communicate with other
    processes."""
    if any(c.__module__.startswith("torch.distributed") for c in type(x).__mro__):
        return True
    return is_traceable_wrapper_subclass(x) and any(_is_distributed(getattr(x, n)) for n in x.__tensor_flatten__()[0])


def captured(function: Callable[..., Any], options: Mapping[str, Any] | None, graphs: list[CompiledGraph]) -> Any:
    """A function of tensors, captured by AOTAutograd alone at its first call, without TorchDynamo. graphs: where its
    compiled graphs are added. Calls wait for XRT. options: those of XRTModule; None for graphs of torch's own operators
    that run in eager, without a decomposition."""
    from torch._functorch.aot_autograd import aot_function

    compilers = _compilers(options or {}, False, graphs)
    if options is None:
        compilers.update(dict.fromkeys(("fw_compiler", "bw_compiler", "inference_compiler"), lambda graph, _: graph))
        compilers["decompositions"] = {}
    made = aot_function(function, **compilers)

    def call(*args: Any) -> Any:
        with _capturing():
            return made(*args)

    return call


@contextlib.contextmanager
def _capturing() -> Iterator[None]:
    """While torch captures: attention as matrix products, whose derivative has operators of its own, and interpolation
    as one operator."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with left_on_failure(), sdpa_kernel(SDPBackend.MATH), WholeInterpolation():
        yield


def _aot(
    module: GraphModule,
    inputs: Sequence[Any],
    options: dict[str, Any],
    background: bool,
    freeze: bool | None,
    device: torch.device,
) -> Any:
    graphs: list[CompiledGraph] = []
    confirmation = Confirmation(module, device)
    shapes = _of_shapes(module, inputs)
    resolved = resolve(options)

    def capture(given: Sequence[Any]) -> Any:
        from torch._dynamo.backends.common import aot_autograd

        file = None
        if shapes is not None and not freeze:
            with contextlib.suppress(CacheError):
                file = TranslationFile(module, shapes, resolved)
        if file is not None and (kept := file.read()) is not None:
            graphs.append(
                CompiledGraph(module, "inference", options, background, set(), freeze, kept=kept, device=device)
            )
            return graphs[0]
        made = aot_autograd(**_compilers(options, background, graphs, freeze, file, device))
        with _capturing():
            compiled = made(module, given)
        own = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        places = written_inputs()
        written = [i - len(own) for i in places if i >= len(own)]
        confirmation.note_writes(written, len(written) == len(places))
        if len(written) == len(places):
            draws = any(draws_numbers(n.target) for g in graphs for n in g.module.graph.nodes)
            compiled = twice_differentiable(compiled, module.forward, written, draws, device)
        return _unless_shared(compiled, module.forward, written) if written and shapes is not None else compiled

    def capture_later() -> Any:
        assert shapes is not None
        try:
            with _as_compiling(shapes):
                return capture(shapes)
        except Exception as e:
            _fall_back(e)
            return None

    race = any_engine_will_do(options)
    if background and shapes is not None:
        inputs = ()  # the tensors are the caller's
        choice = Choice(
            module.forward, capture_later, graphs, race=race, at_once=False, device=device, confirmation=confirmation
        )
    else:
        choice = Choice(
            module.forward, lambda: capture(inputs), graphs, race=race, device=device, confirmation=confirmation
        )

    def call(*args: Any) -> Any:
        return (module.forward if in_forward_mode() else choice.answer)(*args)

    return call


def _unless_shared(compiled: Call, module: Call, written: Sequence[int]) -> Call:
    """What AOTAutograd made of inputs that share no memory; the module answers where one that is written does."""

    def call(*args: Any) -> Any:
        places = [x.untyped_storage()._cdata if isinstance(x, torch.Tensor) else None for x in args]
        known = Counter(places)
        return (module if any(known[places[i]] > 1 for i in written) else compiled)(*args)

    return call


def _of_shapes(module: GraphModule, inputs: Sequence[Any]) -> list[Any] | None:
    """The inputs as fake tensors, for a graph that is captured at a later call; None where it has to be at once.

    AOTAutograd then adds guards to those of TorchDynamo: on sizes that are symbols, tensors that share memory, and
    floats that vary, which are given as tensors, where an operator needs the number.
    """
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    if context is None or context.fake_mode is None or not all(isinstance(x, torch.Tensor) for x in inputs):
        return None
    if any(n.op == "call_method" and n.target == "item" for n in module.graph.nodes):
        return None
    made = [context.fake_mode.from_tensor(x, static_shapes=True) for x in inputs]
    places = {x.untyped_storage()._cdata for x in made}
    is_static = all(isinstance(n, int) for x in made for n in (*x.shape, *x.stride(), x.storage_offset()))
    return made if is_static and len(places) == len(made) else None


@contextlib.contextmanager
def _as_compiling(inputs: Sequence[Any]) -> Iterator[None]:
    """What TorchDynamo has around a backend: its lock, a context with the mode of the fake tensors, random numbers that
    go on as if nothing had happened."""
    from torch._dynamo.convert_frame import compile_lock
    from torch._dynamo.utils import preserve_rng_state
    from torch._guards import TracingContext, detect_fake_mode, tracing

    session = getattr(torch.compiler, "_compile_session_context", contextlib.nullcontext)  # since torch 2.13
    with compile_lock, preserve_rng_state(), session(), tracing(TracingContext(detect_fake_mode(inputs))):
        yield


def _compilers(
    options: Mapping[str, Any],
    background: bool,
    graphs: list[CompiledGraph],
    freeze: bool | None = None,
    file: TranslationFile | None = None,
    device: torch.device = CPU,
) -> dict[str, Any]:
    """The arguments of AOTAutograd. graphs: where compiled graphs are added; file: where one of inference is kept;
    device: that of the graphs' tensors."""
    from functorch.compile import make_boxed_func

    parameters: set[int] = set()

    def compiler(kind: str, graph: GraphModule, _: Sequence[Any]) -> Any:
        allow_backward_passes()
        keeps = file if kind == "inference" and file is not None and file.fits(graph) else None
        freezes = False if freeze is None and written_inputs() else freeze
        made = CompiledGraph(graph, kind, options, background, parameters, freezes, keeps, device=device)
        graphs.append(made)
        return make_boxed_func(made)

    return {
        "fw_compiler": functools.partial(compiler, "forward"),
        "bw_compiler": functools.partial(compiler, "backward"),
        "inference_compiler": functools.partial(compiler, "inference"),
        "decompositions": table(),
    }

"""Translations kept in the cache on disk: what a graph of TorchDynamo became in an earlier process.

Another one then neither captures the graph by AOTAutograd nor imports torch's exporter to translate it. Kept are graphs
of inference that XRT runs as a whole, of static shapes, that write no input and give no view of one. The entry's text
is the whole graph, with every argument and the types and strides of its inputs; what cannot be written down so
(attributes, functions of users, symbols) is not kept. As with any translation, XRT answers only after its results
agreed with eager's in this process.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Final

import torch
from msgspec import Struct, to_builtins
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import _get_qualified_name

from xrt_core.cache.disk import Hit, open_cache
from xrt_core.cache.key import CacheKey, core_row, package_state
from xrt_core.errors import CacheError
from xrt_core.files import Size, decode, encode, reading
from xrt_core.ir.function import digest
from xrt_core.options import Options
from xrt_torch.ordering import chooses_order
from xrt_torch.partition import Stage

_LARGEST: Final = 64 << 20
"""Bytes of a translation that is kept; one with weights in it is larger."""

_MODULES: Final = frozenset(
    ("torch", "torch.nn.functional", "torch._C._nn", "torch.special", "torch.fft", "torch.linalg", "_operator",
     "torch.ops.aten", "torch.Tensor")
)  # fmt: skip
"""Whose functions are what their names say, for a version of torch."""


class _Kind(Struct, frozen=True):
    """What is known of a tensor."""

    dtype: str
    shape: tuple[Size, ...]
    stride: tuple[Size, ...]

    def like(self) -> torch.Tensor:
        """A tensor of the kind, without memory."""
        return torch.empty_strided(self.shape, self.stride, dtype=getattr(torch, self.dtype), device="meta")


def _kind(x: torch.Tensor) -> _Kind:
    return _Kind(str(x.dtype).removeprefix("torch."), tuple(x.shape), tuple(x.stride()))


class _Translation(Struct, frozen=True):
    """model: an ONNX model; inputs: of each of its inputs, the number among the graph's; kinds: of its results;
    results: of each of the graph's results, the number among the model's; engine: see `KeptGraph`."""

    model: bytes
    inputs: tuple[Size, ...]
    kinds: tuple[_Kind, ...]
    results: tuple[Size, ...]
    engine: str


@dataclass(frozen=True, slots=True)
class KeptGraph:
    """A graph of TorchDynamo as XRT runs it: as one stage, by an ONNX model. engine: the one that took it first where
    none was named, so that no other one has to be loaded; "" for several, or none."""

    stage: Stage
    model: bytes
    engine: str


class TranslationFile:
    """The entry of one graph. Raises CacheError for a graph that is not kept, or options without a cache.

    module: a graph of TorchDynamo; inputs: what it is captured for, tensors, fake ones too.
    """

    def __init__(self, module: GraphModule, inputs: Sequence[torch.Tensor], options: Options) -> None:
        disk = open_cache(options.cache, options.cache_dir, options.cache_bytes)
        if disk is None or options.cache == "verify":
            raise CacheError("the cache is off, or all that is in it is to be made again")
        self._disk, self._module, self._inputs = disk, module, inputs
        self._text = "\n".join(_lines(module, inputs)).encode()
        self._key = CacheKey(
            (
                ("torch graph", digest(self._text)),
                ("torch", f"{torch.__version__} {torch.version.git_version}"),
                ("translators", ", ".join(f"{p} {version(p)}" for p in ("onnxscript", "onnx_ir", "onnx"))),
                ("plugin", package_state(__name__, "xrt-torch")),
                core_row(),
            )
        )

    def read(self) -> KeptGraph | None:
        """What an earlier process wrote; None if there is nothing, or nothing sound."""
        found = self._disk.read(self._key, self._text)
        if not isinstance(found, Hit):
            return None
        with contextlib.suppress(CacheError):
            made = decode(found.blob, _Translation, "a kept translation", CacheError)
            with reading("a kept translation", CacheError):
                return KeptGraph(self._stage(made), made.model, made.engine)
        return None

    def _stage(self, made: _Translation) -> Stage:
        names, results = _ends(self._module.graph)
        outputs = dict(zip(made.results, results, strict=True))
        return Stage(
            self._module.graph,
            tuple(names[i] for i in made.inputs),
            tuple(outputs[k] for k in range(len(made.kinds))),
            True,
            tuple(self._inputs[i] for i in made.inputs),
            tuple(kind.like() for kind in made.kinds),
        )

    def fits(self, captured: GraphModule) -> bool:
        """Whether the graph that AOTAutograd compiles just now is the same function: it writes no input, its results
        are not views of inputs, inputs and results are those of TorchDynamo's graph, in order, and torch chooses no
        order of equal elements."""
        from torch._functorch._aot_autograd.schemas import OutputType
        from torch._guards import TracingContext

        known = getattr(TracingContext.try_get(), "fw_metadata", None)
        if known is None or written_inputs():
            return False
        if not all(o.output_type is OutputType.non_alias for o in known.output_info):
            return False
        if known.num_intermediate_bases or known.tokens or known.grad_enabled_mutation is not None:
            return False
        if chooses_order(captured.graph):  # TorchDynamo's graph may choose another
            return False
        takes = [n.meta.get("val") for n in captured.graph.nodes if n.op == "placeholder"]
        if [_kind(v) for v in takes] != [_kind(v) for v in self._inputs]:
            return False
        return len(_ends(captured.graph)[1]) == len(_ends(self._module.graph)[1])

    def write(
        self, stage: Stage, inputs: Sequence[str], results: Sequence[str | None], model: bytes, engine: str
    ) -> None:
        """Keep the translation of a graph with these inputs and results for other processes, if it is all of the graph.

        model: in ONNX; engine: as of `KeptGraph`. Where writing fails nothing is kept.
        """
        wanted = [n for n in results if n is not None]
        is_all = len(set(wanted)) == len(results) and set(wanted) == set(stage.outputs)
        if not is_all or len(model) > _LARGEST or not all(isinstance(v, torch.Tensor) for v in stage.gives):
            return
        made = _Translation(
            model,
            tuple(inputs.index(n) for n in stage.inputs),
            tuple(_kind(v) for v in stage.gives),
            tuple(stage.outputs.index(n) for n in wanted),
            engine,
        )
        info = {"cluster": "a translation of torch", "nodes": stage.size, "compile_seconds": 0.0}
        self._disk.write(self._key, {**info, "created": round(time.time(), 3)}, self._text, encode(to_builtins(made)))


def written_inputs() -> list[int]:
    """The places of the inputs, after the module's own tensors, that the graph which AOTAutograd compiles just now
    changes, as far as it says."""
    from torch._guards import TracingContext

    known = getattr(TracingContext.try_get(), "fw_metadata", None)
    infos = () if known is None else known.input_info
    return [i for i, info in enumerate(infos) if info.mutates_data or info.mutates_metadata]


def _ends(graph: Graph) -> tuple[list[str], list[str]]:
    """The names of a graph's inputs and results."""
    results: Any = graph.output_node().args[0]
    return [n.name for n in graph.nodes if n.op == "placeholder"], [getattr(r, "name", "") for r in results]


def _lines(module: GraphModule, inputs: Sequence[torch.Tensor]) -> list[str]:
    """The graph and what its capture depends on beside it, as text that is equal for equal graphs alone."""
    autocast = [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")]
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.are_deterministic_algorithms_enabled()
    lines = [f"modes {modes}, autocast {autocast}, {torch.get_default_dtype()} on {torch.get_default_device()}"]
    places: dict[Node, int] = {}
    given = iter(inputs)
    for node in module.graph.nodes:
        places[node] = len(places)
        if node.op == "placeholder":
            lines.append(f"%{places[node]} = input {_input(next(given))}")
            continue
        args, kwargs = _written(node.args, places), _written(node.kwargs, places)
        if node.op == "call_function":
            lines.append(f"%{places[node]} = {_name(node.target)}{args}{kwargs}")
        elif node.op == "call_method":
            lines.append(f"%{places[node]} = .{node.target}{args}{kwargs}")
        elif node.op == "output":
            lines.append(f"output {args}")
        else:
            raise CacheError(f"{node.op} {node.target}")
    return lines


def _input(x: torch.Tensor) -> str:
    is_parameter = isinstance(x, torch.nn.Parameter)
    flags = x.requires_grad, is_parameter, x.is_conj(), x.is_neg(), x.is_inference()
    return f"{x.dtype} {tuple(x.shape)} {tuple(x.stride())} {x.storage_offset()} {x.device} {flags}"


def _name(target: Any) -> str:
    try:
        name = _get_qualified_name(target)
    except Exception as e:
        raise CacheError(f"{target!r} has no name") from e
    if name.rpartition(".")[0] not in _MODULES and not (name == "getattr" and target is getattr):
        raise CacheError(f"{name} is not an operator of torch")
    return name


def _written(value: Any, places: Mapping[Node, int]) -> str:
    """An argument as text."""
    if isinstance(value, Node):
        return f"%{places[value]}"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(_written(v, places) for v in value) + ",)"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k!r}: {_written(v, places)}" for k, v in value.items()) + "}"
    if isinstance(value, slice):
        return f"slice{_written((value.start, value.stop, value.step), places)}"
    if value is None or value is Ellipsis or type(value) in (bool, int, float, complex, str):
        return repr(value)
    if isinstance(value, torch.dtype | torch.device | torch.layout | torch.memory_format):
        return str(value)
    raise CacheError(f"an argument of type {type(value).__name__}")

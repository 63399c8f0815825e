"""Function: a cluster as a function of its own, the unit that engines compile; and fingerprints of content.

Two graphs have the same fingerprint exactly where they compute the same thing in the same way. Names of nodes, values,
graphs and symbols, annotations and documentation do not enter; operators, versions, attributes (subgraphs and arrays
included), wiring, dtypes, shapes, constants and aliases do.

The hash is BLAKE3, as for weights, keys and stored blobs: keys of caches are digests of contents, where a collision
would be a wrong result. It is cryptographic, and on one thread several times as fast as BLAKE2b or SHA-256. Source:
https://github.com/BLAKE3-team/BLAKE3-specs.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import Any, Final, Protocol

import numpy as np
from msgspec import Struct

from xrt_core.errors import GraphError
from xrt_core.ir.file_backed import FileState, place_of
from xrt_core.ir.garbage_collection import WeakIdentityMap
from xrt_core.ir.graph import NO_ANNOTATIONS, Annotations, Graph, Node, SparseTensor, Value, _Frozen, _set, are_open
from xrt_core.ir.long_list import LongList
from xrt_core.ir.types import (
    STRING,
    MapType,
    OptionalType,
    SequenceType,
    Shape,
    SparseTensorType,
    TensorType,
    ValueType,
    dtype_name,
)

_MOST_SHOWN: Final = 5  # operators in a message


class Parameter(Struct, frozen=True):
    """An entry or a return of a Function: a dense tensor of known dtype and rank.

    dims: its dimensions; in a symbolic Function some are texts of expressions (`ir.symbols`). A dimension of a return
    is None where only a run determines it, as the number of elements that are not zero.
    elements: of an entry that holds sizes, such as the target of a Reshape: its elements in order, as dimensions are
    written, None where one is not known. Those that check a Function make inputs with them; no fingerprint has them.
    """

    name: str
    dtype: np.dtype
    dims: Shape
    elements: Shape | None = None

    @property
    def type(self) -> TensorType:
        """The type of the tensor."""
        return TensorType(self.dtype, self.dims)

    @property
    def is_static(self) -> bool:
        """Whether every dimension is a number."""
        return all(type(d) is int for d in self.dims)

    @property
    def is_open(self) -> bool:
        """Whether only a run determines a dimension."""
        return None in self.dims

    @property
    def shape(self) -> tuple[int, ...]:
        """The dimensions as numbers. Raises GraphError where some are not known."""
        if not self.is_static:
            raise GraphError(
                f"parameter {self} has dimensions that differ between calls; its `dims` are for engines with "
                "dynamic_dims or open_shapes"
            )
        return self.dims  # type: ignore[return-value]

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether an array of this shape can be what the parameter stands for, whatever its expressions say."""
        known = zip(shape, self.dims, strict=False)
        return len(shape) == len(self.dims) and all(n == d or not isinstance(d, int) for n, d in known)

    def __str__(self) -> str:
        return f"%{self.name}: {self.type}"


class InputOutputAlias(Struct, frozen=True):
    """Output number `output` shares the storage of input number `input` (an updated variable)."""

    output: int
    input: int


class Function(_Frozen):
    """A Graph with typed entries and returns, frozen, that an engine compiles as one.

    Its entries and returns have static shapes; those of a symbolic Function (`is_symbolic`), which only engines with
    `dynamic_dims` get, have dimensions that differ between calls.

    name: a label, unique within a partitioned graph.
    params, returns: what enters and leaves, in the order of `body.inputs` and `body.outputs`.
    aliases: which returns are written into the storage of which params.
    body: the nodes. Its constants are values with data: they are part of the function, not params.

    Raises GraphError where params or returns do not match the body, or an alias names what is not there.
    """

    __slots__ = ("_cache", "aliases", "body", "name", "params", "returns")
    name: str
    params: tuple[Parameter, ...]
    returns: tuple[Parameter, ...]
    aliases: tuple[InputOutputAlias, ...]
    body: Graph
    _cache: dict[str, Any]

    def __init__(
        self,
        name: str,
        params: Iterable[Parameter],
        returns: Iterable[Parameter],
        body: Graph,
        aliases: Iterable[InputOutputAlias] = (),
    ) -> None:
        _set(self, "name", name)
        _set(self, "params", tuple(params))
        _set(self, "returns", tuple(returns))
        _set(self, "aliases", tuple(aliases))
        _set(self, "body", body)
        _set(self, "_cache", {})
        if len(self.params) != len(body.inputs) or len(self.returns) != len(body.outputs):
            raise GraphError(
                f"function {name!r}: {len(self.params)} params and {len(self.returns)} returns for a body with "
                f"{len(body.inputs)} inputs and {len(body.outputs)} outputs; give one for each"
            )
        for a in self.aliases:
            if not (0 <= a.output < len(self.returns) and 0 <= a.input < len(self.params)):
                raise GraphError(f"function {name!r}: {a} names a return or a param that is not there")
            if self.returns[a.output].type != self.params[a.input].type:
                raise GraphError(
                    f"function {name!r}: {a} ties {self.returns[a.output]} to {self.params[a.input]}; "
                    f"only tensors of one dtype and shape can share storage"
                )
        for what, indices in (
            ("return", [a.output for a in self.aliases]),
            ("param", [a.input for a in self.aliases]),
        ):
            if len(set(indices)) != len(indices):
                raise GraphError(f"function {name!r}: a {what} stands in more than one alias of {self.aliases}")

    @classmethod
    def from_graph(
        cls, body: Graph, *, name: str = "", aliases: Iterable[InputOutputAlias] = (), open_entries: bool = False
    ) -> Function:
        """The function whose params and returns are the inputs and outputs of `body`, by name and type.

        open_entries: an input may be of a shape that only a run determines, as within a cluster.

        Raises GraphError for an input that is not a tensor of known dtype and shape, whose dimensions may be symbolic,
        and an output that is not one of known dtype and rank.
        """
        name = name or body.name or "function"
        return cls(
            name,
            [_parameter(v, "input", i, name, open_entries) for i, v in enumerate(body.inputs)],
            [_parameter(v, "output", i, name, True) for i, v in enumerate(body.outputs)],
            body,
            aliases,
        )

    @property
    def is_symbolic(self) -> bool:
        """Whether a dimension of an entry or a return is an expression of symbols, whose sizes differ between calls."""
        found = self._cache.get("is_symbolic")
        if found is None:
            dims = (d for p in (*self.params, *self.returns) for d in p.dims)
            found = self._cache["is_symbolic"] = any(isinstance(d, str) for d in dims)
        return bool(found)

    @property
    def is_open_within(self) -> bool:
        """Whether nodes read values of which only a run determines a dimension."""
        found = self._cache.get("is_open_within")
        if found is None:
            found = self._cache["is_open_within"] = any(are_open(n.inputs) for n in self.body.nodes)
        return bool(found)

    @property
    def fingerprint(self) -> str:
        """Hex digest of everything that decides what the function computes, and of no name. Computed once."""
        found = self._cache.get("fingerprint")
        if found is None:
            found = self._cache["fingerprint"] = function_fingerprint(self)
        return str(found)

    def as_text(self) -> str:
        """The readable form: `function name { input {...} output {...} node {...} }`."""
        from xrt_core.ir.text import function_text

        return function_text(self)

    def __str__(self) -> str:
        return self.as_text()

    def _repr_html_(self) -> str:
        """What notebooks show."""
        from xrt_core.ir.text import as_html

        return as_html(self)

    def __repr__(self) -> str:
        return (
            f"<Function {self.name!r}: {len(self.params)} params, {len(self.body.nodes)} nodes, "
            f"{len(self.returns)} returns>"
        )


def launch(
    function: Function,
    engine: str,
    inputs: Iterable[Value],
    outputs: Iterable[Value],
    *,
    annotations: Annotations = NO_ANNOTATIONS,
) -> Node:
    """The `xrt.Launch` node that runs `function` on `engine`: inputs stand for params, outputs for returns."""
    return Node(
        "Launch",
        inputs,
        outputs,
        {"engine": engine, "function": function},
        domain="xrt",
        version=1,
        name=function.name,
        annotations=annotations,
    )


def _parameter(value: Value, what: str, index: int, function: str, may_be_open: bool) -> Parameter:
    t = value.type
    is_known = may_be_open or (isinstance(t, TensorType) and None not in (t.shape or ()))
    if not isinstance(t, TensorType) or t.dtype is None or t.shape is None or not is_known:
        raise GraphError(
            f"function {function!r}: {what} {index} {value.name!r} has type {t or 'unknown'}, which is not a tensor "
            f"of known dtype and shape; specialise the graph for a signature first"
        )
    return Parameter(value.name or f"{what}_{index}", t.dtype, t.shape)


def operators_of(function: Function) -> str:
    """The operators of a function for a message: distinct, the first few."""
    names = list(dict.fromkeys(n.operator for n in function.body.nodes))
    return ", ".join(names[:_MOST_SHOWN]) + (", ..." if len(names) > _MOST_SHOWN else "")


SIZE: Final = 20
"""Bytes of a digest: the chance of two equal ones among 2**64 contents is below 2**-32."""


def digest(*contents: bytes | memoryview) -> str:
    """Hex digest of the contents, one behind another. Views must be C-contiguous."""
    from blake3 import blake3

    h = blake3()
    for content in contents:
        h.update(content)
    return h.hexdigest(length=SIZE)


_VERSION: Final = "xrt-fingerprint 3"  # changes whenever the encoding below does
_INLINE: Final = 64  # bytes; smaller arrays are written out instead of hashed
_SUB_BYTE_MASKS: Final = {"int4": 15, "uint4": 15, "float4_e2m1fn": 15, "int2": 3, "uint2": 3}


class DigestMemory(Protocol):
    """Remembers digests of arrays for longer than the arrays live."""

    def get(self, array: np.ndarray) -> str | None:
        """The digest, or None where it is not known."""

    def put(self, array: np.ndarray, digest: str) -> None:
        """Remember the digest, if that is possible for such an array."""


_memory: ContextVar[DigestMemory | None] = ContextVar("digest_memory", default=None)
_digests: WeakIdentityMap[np.ndarray, str] = WeakIdentityMap()


def graph_fingerprint(graph: Graph) -> str:
    """Hex digest of what `graph` computes. Raises GraphError for a value that nothing makes."""
    return _Encoder().digest(graph, ())


def function_fingerprint(function: Function) -> str:
    """Hex digest of what `function` computes, aliases included; that of its body where there are none."""
    return _Encoder().digest(function.body, sorted((a.output, a.input) for a in function.aliases))


def place_fingerprint(function: Function) -> str:
    """As the fingerprint, of large constants by the place where they lie in a file that has not changed: it is quick,
    and means something in this process alone. The fingerprint itself where no constant lies in a file."""
    encoder = _Encoder(by_place=True)
    if all(encoder.place(a) is None for a in _constants(function.body)):
        return function.fingerprint
    return encoder.digest(function.body, sorted((a.output, a.input) for a in function.aliases))


def function_lines(function: Function) -> Iterator[str]:
    """The canonical text that the fingerprint is the digest of: free of names, a line for each node."""
    return _Encoder().lines(function.body, sorted((a.output, a.input) for a in function.aliases))


@contextmanager
def remembering(memory: DigestMemory) -> Iterator[None]:
    """Within the body, digests of arrays are looked up in `memory` before they are computed."""
    token = _memory.set(memory)
    try:
        yield
    finally:
        _memory.reset(token)


def array_digest(array: np.ndarray) -> str:
    """Hex digest of dtype, shape and contents. Remembered per array object, which must not change afterwards."""
    known = _digests.get(array)
    if known is not None:
        return known
    memory = _memory.get()
    found = memory.get(array) if memory is not None else None
    if found is None:
        found = digest(repr((dtype_name(array.dtype), array.shape)).encode(), _content(array))
        if memory is not None:
            memory.put(array, found)
    _digests.put(array, found)
    return found


def _content(array: np.ndarray) -> bytes | memoryview:
    if array.dtype == STRING:
        parts = [s if isinstance(s, bytes) else str(s).encode("utf-8", "surrogateescape") for s in array.reshape(-1)]
        return b"".join(struct.pack("<q", len(p)) + p for p in parts)
    codes = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    mask = _SUB_BYTE_MASKS.get(array.dtype.name)
    return (codes if mask is None else codes & mask).data  # the high bits of a sub-byte element mean nothing


_LARGE: Final = 1 << 16  # bytes; smaller arrays are not worth a thread
_MANY: Final = 1 << 23  # bytes of large arrays from which on several threads hash them
_THREADS: Final = 4


def _constants(graph: Graph) -> list[np.ndarray]:
    """The large constants that the nodes of a graph read, but those of strings."""
    found = (v.data for n in graph.nodes for v in n.inputs if v is not None and v.data is not None)
    return [a for a in found if a.nbytes >= _LARGE and a.dtype != STRING]


def _hash_constants(arrays: Iterable[np.ndarray]) -> None:
    """Compute the digests of many large arrays by several threads; their encoding finds them remembered."""
    large = {id(a): a for a in arrays if _digests.get(a) is None}
    if sum(a.nbytes for a in large.values()) < _MANY:
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = min(_THREADS, cores, len(large))
    if threads > 1:
        from concurrent.futures import ThreadPoolExecutor

        contexts = [copy_context() for _ in large]  # of this thread, with the memory of digests
        with ThreadPoolExecutor(threads, "xrt-digest") as pool:
            list(pool.map(lambda context, a: context.run(array_digest, a), contexts, large.values()))


class _Encoder:
    """Writes a graph as nested tuples of strings and integers, whose `repr` is hashed: no two graphs share one."""

    def __init__(self, by_place: bool = False) -> None:
        self._numbers: dict[Value, Any] = {}
        self._symbols: dict[str, int] = {}
        self._count = 0
        self._files: dict[FileState, bool] | None = {} if by_place else None  # file -> whether it is what it was

    def digest(self, graph: Graph, aliases: Iterable[tuple[int, int]]) -> str:
        _hash_constants([a for a in _constants(graph) if self.place(a) is None])
        return digest("\n".join((_VERSION, *self.lines(graph, aliases))).encode())

    def lines(self, graph: Graph, aliases: Iterable[tuple[int, int]]) -> Iterator[str]:
        yield repr(tuple(self._input(v, graph) for v in graph.inputs))
        for n in graph.nodes:
            yield repr(self._node(n))
        yield repr((tuple(self._use(v) for v in graph.outputs), tuple(aliases)))

    def _graph(self, graph: Graph) -> tuple[Any, ...]:
        inputs = tuple(self._input(v, graph) for v in graph.inputs)
        nodes = tuple(self._node(n) for n in graph.nodes)
        return ("graph", inputs, nodes, tuple(self._use(v) for v in graph.outputs))

    def _input(self, value: Value, graph: Graph) -> tuple[Any, ...]:
        self._define(value)
        default = graph.defaults.get(value)
        return (self._type(value.type), None if default is None else self._array(default))

    def _define(self, value: Value) -> None:
        self._numbers[value] = self._count
        self._count += 1

    def _use(self, value: Value | None) -> Any:
        if value is None:
            return None
        number = self._numbers.get(value)
        if number is None:
            if value.data is None:
                raise GraphError(f"value {value.name!r} is used before anything makes it; sort or verify the graph")
            number = self._numbers[value] = ("const", self._array(value.data))
        return number

    def _node(self, n: Node) -> tuple[Any, ...]:
        use = self._numbers.get
        inputs = tuple([None if v is None else (i if (i := use(v)) is not None else self._use(v)) for v in n.inputs])
        attributes: Any = None
        if n.attributes:
            attributes = tuple((k, self._attribute(a)) for k, a in sorted(n.attributes.items()))
        outputs = []
        for v in n.outputs:
            if v is None:
                outputs.append(0)
            else:
                outputs.append(1)
                self._numbers[v] = self._count
                self._count += 1
        return (n.op_type, n.domain, n.version, inputs, attributes, tuple(outputs))

    def _attribute(self, a: Any) -> Any:
        if isinstance(a, bool | int | np.integer):
            return int(a)
        if isinstance(a, float | np.floating):
            x = float(a)  # ONNX keeps attributes as float32
            return ("f", struct.pack("<f", x).hex() if abs(x) < 3e38 else repr(x))
        if isinstance(a, str):
            return ("s", a)
        if isinstance(a, bytes):
            return ("s", a) if _not_text(a) else ("s", a.decode())
        if isinstance(a, tuple | LongList):
            long = self._long(a) if len(a) > _INLINE else None
            return long or ("t", tuple(self._attribute(x) for x in a))
        if isinstance(a, np.ndarray):
            return ("a", self._array(a))
        if isinstance(a, Graph):
            return self._graph(a)
        if isinstance(a, SparseTensor):
            return ("sparse", self._array(a.values), self._array(a.indices), tuple(a.dims))
        if isinstance(a, TensorType | SparseTensorType | SequenceType | OptionalType | MapType):
            return ("type", self._type(a))
        from xrt_core.ir.function import Function

        if isinstance(a, Function):
            return ("function", a.fingerprint)
        raise GraphError(f"an attribute holds a {type(a).__name__}, which is no attribute value")

    def _long(self, a: tuple[Any, ...] | LongList) -> Any:
        """A long list of numbers or of text as its digest, such as the tables of a tree ensemble; None for others."""
        found = a if isinstance(a, LongList) else LongList.of(a)
        if found is None:
            are_texts = isinstance(a, tuple) and set(map(type, a)) == {str}
            return ("texts", digest(repr(a).encode("utf-8", "surrogatepass"))) if are_texts else None
        if found.kind == "floats" and not -3e38 < float(found.array.min()) <= float(found.array.max()) < 3e38:
            return None
        texts = tuple(self._attribute(t) for t in found.texts)
        return (found.kind, texts, self._array(found.array))

    def _array(self, array: np.ndarray) -> Any:
        if array.nbytes <= _INLINE and array.dtype != STRING:
            return (dtype_name(array.dtype), array.shape, bytes(_content(array)).hex())
        return self.place(array) or array_digest(array)

    def place(self, array: np.ndarray) -> Any:
        """What stands for a large array in a file; None for others, and where contents are asked for."""
        if self._files is None or array.nbytes < _LARGE or (place := place_of(array)) is None:
            return None
        file, offset = place
        if file not in self._files:
            self._files[file] = file.is_settled and file.is_current()
        if not self._files[file]:
            return None
        return ("place", file.path, file.stamp, offset, dtype_name(array.dtype), array.shape)

    def _type(self, t: ValueType | None) -> Any:
        if t is None:
            return None
        if isinstance(t, TensorType | SparseTensorType):
            shape = None if t.shape is None else tuple(self._dim(d) for d in t.shape)
            return (type(t).__name__, None if t.dtype is None else dtype_name(t.dtype), shape)
        if isinstance(t, MapType):
            return ("MapType", dtype_name(t.key), self._type(t.value))
        return (type(t).__name__, self._type(t.element))

    def _dim(self, d: int | str | None) -> Any:
        if isinstance(d, str):  # symbols matter by which dimensions share one, not by what they are called
            return ("symbol", self._symbols.setdefault(d, len(self._symbols)))
        return d if d is None else int(d)


def _not_text(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return True
    return False

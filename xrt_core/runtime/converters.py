"""Converters at run time: what an `EngineInputConvert` or `EngineOutputConvert` does, and the arrays users bring."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from xrt_core.engine.converters import HOST, ArrayType, Convert, Converters, converters
from xrt_core.errors import ConverterError, InputError
from xrt_core.ir.graph import Graph, Node
from xrt_core.ir.types import TensorType
from xrt_core.runtime.arrays import is_array, to_numpy

_DEFAULT: Final = "default converter (DLPack or the array protocol)"


class UnreadableResult(ConverterError):
    """A result of an engine cannot be read by DLPack or the array protocol. engine: its name."""

    def __init__(self, message: str, engine: str) -> None:
        super().__init__(message)
        self.engine = engine


def has_converter(source: str, target: str) -> bool:
    """Whether the registry has a converter for this pair of engines."""
    return converters.find(source, target) is not None


def conversion(node: Node, graph: Graph, to_host: Convert, registry: Converters = converters) -> Conversion | None:
    """What the converter `node` of `graph` does; None where its input is its output as it is.

    to_host: conversion of the arrays of engines without a converter of their own.
    Raises ConverterError, naming the value and the nodes around it, for a pair that nothing converts between.
    """
    source, target = str(node.attributes["source"]), str(node.attributes["target"])
    found = registry.find(source, target)
    if found is not None:
        return None if found.function is None else Conversion(found.function, str(found), node, graph)
    if source == HOST:
        return None  # engines take the host's arrays
    if target == HOST:
        return Conversion(to_host, f"{_DEFAULT} {source} -> {target}", node, graph)
    raise ConverterError(
        f"there is no converter from {source!r} to {target!r}, for {_transfer(node, graph)}; {registry.known()}. Write "
        f"one and register it with @xrt.register_converter({source!r}, {target!r})"
    )


class Conversion:
    """One converter as a step. Its first result is checked against the type of the value; later ones are not."""

    __slots__ = ("_function", "_is_default", "_label", "_proven", "_remedy", "_source", "_transfer", "_type")

    def __init__(self, function: Convert, label: str, node: Node, graph: Graph) -> None:
        self._function = function
        self._label = label
        self._transfer = _transfer(node, graph)
        made = node.outputs[0]
        self._type = made.type if made is not None else None
        self._proven = False
        pair = f"{node.attributes['source']!r}, {node.attributes['target']!r}"
        self._source = str(node.attributes["source"])
        self._is_default = label.startswith(_DEFAULT)
        self._remedy = f"@xrt.register_converter({pair}) registers one" if self._is_default else "Mend it"

    def __call__(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """The array in the other space. Raises ConverterError where the converter fails or gives something else."""
        try:
            made = self._function(arrays[0])
        except Exception as e:
            message = f"{self._label} failed for {self._transfer}: {type(e).__name__}: {e}. {self._remedy}"
            if self._is_default:
                raise UnreadableResult(message, self._source) from e
            raise ConverterError(message) from e
        if not self._proven:
            self._prove(made)
        return (made,)

    def _prove(self, made: Any) -> None:
        t = self._type
        if isinstance(t, TensorType):
            dtype, shape = getattr(made, "dtype", None), getattr(made, "shape", None)
            if dtype is None or shape is None:
                raise ConverterError(
                    f"{self._label} gave a {type(made).__name__} for {self._transfer}; an array {t} is needed"
                )
            fits = t.shape is None or (
                len(shape) == len(t.shape)
                and all(not isinstance(d, int) or d == n for d, n in zip(t.shape, shape, strict=True))
            )
            # dtypes of other libraries are not NumPy's; their arrays are known by shape alone
            if not fits or (isinstance(dtype, np.dtype) and t.dtype is not None and dtype != t.dtype):
                raise ConverterError(
                    f"{self._label} gave {dtype}{list(shape)} for {self._transfer}; {t} is needed: a converter must "
                    "keep dtype and shape"
                )
        self._proven = True


def _transfer(node: Node, graph: Graph) -> str:
    """The value that a converter transfers, its producer and its consumers, for messages."""
    value, made = node.inputs[0], node.outputs[0]
    assert value is not None
    assert made is not None
    producer = graph.producer(value)
    maker = "an input of the graph" if producer is None else f"made by {_shown(producer)}"
    readers = [_shown(graph.nodes[i]) for i in graph.consumers.get(made, ())[:3]]
    return f"value {value.name!r} ({maker}, read by {', '.join(readers) or 'the graph as an output'})"


def _shown(node: Node) -> str:
    if node.op_type == "Launch":
        return f"{node.name} on {node.attributes['engine']!s}"
    return f"{node.operator} {node.name!r}" if node.name else node.operator


Inverse = Callable[[Sequence[Any]], list[Any]]


def plain_arrays(arguments: Sequence[Any]) -> tuple[Sequence[Any], Inverse | None]:
    """Arrays in the place of arguments of registered types, and the inverse conversion for the results.

    The same object and None where no argument is of such a type; None as well where the first array among the arguments
    is not. Raises InputError where `to_host` of a type fails or gives no array.
    """
    if not converters.has_types:
        return arguments, None
    types = [converters.array_type(type(a)) for a in arguments]
    if not any(types):
        return arguments, None
    back: Inverse | None = None
    for t, a in zip(types, arguments, strict=True):
        if t is not None:
            back = partial(_results_in, t, a)
        if t is not None or is_array(a):
            break
    return [a if t is None else _array_from(t, a) for t, a in zip(types, arguments, strict=True)], back


def plain_arguments(
    args: Sequence[Any], named: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any], Inverse | None]:
    """`plain_arrays` of arguments by position and by name."""
    if not converters.has_types:
        return args, named, None
    arrays, back = plain_arrays([*args, *named.values()])
    return arrays[: len(args)], dict(zip(named, arrays[len(args) :], strict=True)), back


def _array_from(array_type: ArrayType, value: Any) -> Any:
    name = f"to_host of the array type {array_type.name!r} ({array_type.owner})"
    try:
        made = array_type.to_host(value)
    except Exception as e:
        raise InputError(f"{name} failed: {type(e).__name__}: {e}") from e
    if converters.array_type(type(made)) is not None or not is_array(made):
        raise InputError(f"{name} gave a {type(made).__name__}, which is no array of a library that XRT knows")
    return made


def _results_in(array_type: ArrayType, like: Any, results: Sequence[Any]) -> list[Any]:
    """Results as objects of a registered type. Raises ConverterError where `from_host` fails."""
    plain = [to_numpy(r) for r in results]
    if array_type.from_host is None:
        return plain
    try:
        return [array_type.from_host(r, like) for r in plain]
    except Exception as e:
        raise ConverterError(
            f"from_host of the array type {array_type.name!r} ({array_type.owner}) failed: {type(e).__name__}: {e}"
        ) from e

"""Model inputs of the command line: read from a .npz file, or generated at random from the declared types."""

from __future__ import annotations

import pathlib
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from xrt_core.errors import InputError, OptionError, nearest
from xrt_core.files import replace_file
from xrt_core.ir.types import STRING, Dim, TensorType, ValueType


def read_inputs(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Read the arrays of a .npz file by name. Raises InputError if it is missing or not a .npz file of arrays."""
    try:
        archive = np.load(path, allow_pickle=False)
        if isinstance(archive, np.ndarray):
            raise InputError(f"{path} holds one array without a name; save it with numpy.savez(path, name=array)")
        with archive:
            return {name: archive[name] for name in archive.files}
    except FileNotFoundError:
        raise InputError(f"inputs file {path} does not exist") from None
    except (ValueError, EOFError, OSError, zipfile.BadZipFile) as e:
        raise InputError(f"{path} cannot be read as .npz: {e}; write it with numpy.savez(path, name=array)") from None


def write_outputs(path: pathlib.Path, outputs: Mapping[str, Any]) -> None:
    """Write arrays to a .npz file atomically.

    Types that .npz lacks (bfloat16, float8, 4 bits) are widened to float32, or int8 where they are integers; item i of
    a sequence is written as "name[i]"; an absent optional is left out.
    """
    flat: dict[str, np.ndarray] = {}
    for name, value in outputs.items():
        if isinstance(value, list | tuple):
            flat.update({f"{name}[{i}]": _storable(v) for i, v in enumerate(value)})
        elif value is not None:
            flat[name] = _storable(value)
    with replace_file(path) as file:
        np.savez(file, **flat)  # type: ignore[arg-type]


def _storable(value: Any) -> np.ndarray:
    array = np.asarray(value)
    if array.dtype == STRING:
        return array.astype(np.str_)
    if array.dtype.kind == "V":  # ml_dtypes
        return array.astype(np.int8 if "int" in array.dtype.name else np.float32)
    return array


def parse_shapes(texts: Sequence[str], types: Mapping[str, ValueType | None]) -> dict[str, tuple[int, ...]]:
    """Parse `--shape` arguments: "image=1,3,224,224" for an input, "batch=4" for a symbolic dimension, "x=" for a
    scalar. Returns name -> shape. Raises OptionError for another form, or a name that is neither."""
    symbols = {d for t in types.values() if isinstance(t, TensorType) for d in t.shape or () if isinstance(d, str)}
    found: dict[str, tuple[int, ...]] = {}
    for text in texts:
        name, equals, dims = text.rpartition("=")
        try:
            if not equals:
                raise ValueError
            shape = tuple(int(d) for d in dims.split(",")) if dims.strip() else ()
            if any(d < 0 for d in shape):
                raise ValueError
        except ValueError:
            raise OptionError(f"--shape {text!r}: it takes NAME=DIM,DIM,... such as image=1,3,224,224") from None
        if name not in types and name not in symbols:
            known = ", ".join([*types, *sorted(symbols)])
            hint = nearest(name, [*types, *symbols])
            raise OptionError(f"--shape {text!r}: there is no input or dimension {name!r}; there are {known}{hint}")
        if name not in types and len(shape) != 1:
            raise OptionError(f"--shape {text!r}: the dimension {name!r} takes one number")
        found[name] = shape
    return found


def random_inputs(
    types: Mapping[str, ValueType | None], shapes: Mapping[str, tuple[int, ...]], seed: int
) -> dict[str, Any]:
    """Generate an array per input: floats N(0, 1), integers 0 or 1, booleans True or False with probability 1/2;
    deterministic for a given seed.

    shapes: the result of `parse_shapes`; a dimension that is unknown after it is 1.
    Raises InputError for an input of unknown rank without a shape, or one that is not a tensor.
    """
    generator = np.random.default_rng(seed)
    made: dict[str, Any] = {}
    for name, type_ in types.items():
        if type_ is not None and not isinstance(type_, TensorType):
            raise InputError(f"input {name!r} is a {type_}, which cannot be made at random; give it with --inputs")
        shape = shapes.get(name)
        if shape is None:
            declared = type_.shape if type_ is not None else None
            if declared is None:
                raise InputError(f"the shape of input {name!r} is not known; give it as --shape {name}=DIM,DIM,...")
            shape = tuple(_size(d, shapes) for d in declared)
        dtype = type_.dtype if type_ is not None and type_.dtype is not None else np.dtype(np.float32)
        made[name] = _random(generator, dtype, shape)
    return made


def _size(dim: Dim, shapes: Mapping[str, tuple[int, ...]]) -> int:
    if isinstance(dim, int):
        return dim
    return shapes[dim][0] if dim is not None and dim in shapes else 1


def _random(generator: np.random.Generator, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    if dtype == STRING:
        return np.full(shape, "a", dtype=object)
    if dtype.kind in "iub" or "int" in dtype.name:
        return generator.integers(0, 2, shape).astype(dtype)
    if dtype.kind == "c":
        return (generator.standard_normal(shape) + 1j * generator.standard_normal(shape)).astype(dtype)
    return generator.standard_normal(shape).astype(dtype)

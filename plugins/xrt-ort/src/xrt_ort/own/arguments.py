"""Arguments of sessions: lists of providers, and what options, the model and files in memory change in a model."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Final

from xrt_ort.own.kinds import ExecutionMode, GraphOptimizationLevel, InvalidArgument, SessionOptions, error
from xrt_ort.settings import log


def with_sizes(proto: Any, sizes: Mapping[tuple[str, str], int]) -> None:
    """Write sizes of dimensions into the types of a model's inputs and results.

    sizes: by ("dim_param" or "denotation", its text). Raises InvalidArgument where one dimension gets two sizes.
    """
    names: dict[str, int] = {}
    for value in proto.graph.input:
        for d in value.type.tensor_type.shape.dim:
            if d.HasField("dim_value"):
                continue
            found = {size for (kind, text), size in sizes.items() if text and getattr(d, kind) == text}
            if len(found) > 1 or (found and d.dim_param and names.get(d.dim_param) not in (None, *found)):
                raise error(InvalidArgument, "Conflicting free dimension overrides.")
            if found:
                size = found.pop()
                if d.dim_param:
                    names[d.dim_param] = size
                d.dim_value = size
    for value in (*proto.graph.input, *proto.graph.output):
        for d in value.type.tensor_type.shape.dim:
            if d.HasField("dim_param") and d.dim_param in names:
                d.dim_value = names[d.dim_param]


_OF_MODELS: Final[Mapping[str, Any]] = {
    "inter_op_num_threads": int, "intra_op_num_threads": int, "execution_mode": ExecutionMode,
    "graph_optimization_level": GraphOptimizationLevel, "enable_profiling": bool,
}  # fmt: skip


def options_of_model(proto: Any) -> SessionOptions | None:
    """The session options that a model brings, where ORT_LOAD_CONFIG_FROM_MODEL is 1; None where it has none.

    Raises RuntimeError for what is no JSON, or no number.
    """
    text = next((p.value for p in proto.metadata_props if p.key == "ort_config"), None)
    if text is None or os.environ.get("ORT_LOAD_CONFIG_FROM_MODEL") != "1":
        return None
    try:
        found = json.loads(text).get("session_options")
    except (ValueError, AttributeError) as e:
        raise RuntimeError(f"Json stored in the `ort_config` key cannot be parsed. Error message: {e}") from e
    if not isinstance(found, dict):
        return None
    made = SessionOptions()
    for name, value in found.items():
        if name not in _OF_MODELS:
            log.debug("session option %s in the model is ignored", name)
            continue
        if type(value) is not int:
            raise RuntimeError(f"{name} option in the model file must be an integer")
        setattr(made, name, _OF_MODELS[name](value))
    return made


def check_and_normalize_provider_args(
    providers: Any, provider_options: Any, available_provider_names: Sequence[str]
) -> tuple[list[str], list[dict[str, str]]]:
    """Return names of providers, and the options of each as text.

    Warns of a provider that is not available, and of one that is named twice. Raises ValueError for other kinds of
    arguments.
    """
    if providers is None:
        return [], []
    if not isinstance(providers, Sequence):
        raise ValueError("'providers' should be a sequence.")
    if provider_options is None:
        rows = [(p, {}) if isinstance(p, str) else p for p in providers]
    else:
        if not isinstance(provider_options, Sequence):
            raise ValueError("'provider_options' should be a sequence.")
        if len(providers) != len(provider_options):
            raise ValueError("'providers' and 'provider_options' should be the same length if both are given.")
        if not all(isinstance(p, str) for p in providers):
            raise ValueError("Only string values for 'providers' are supported if 'provider_options' is given.")
        if not all(isinstance(o, dict) for o in provider_options):
            raise ValueError("'provider_options' values must be dicts.")
        rows = list(zip(providers, provider_options, strict=True))
    made: dict[str, dict[str, str]] = {}
    for row in rows:
        if not (isinstance(row, tuple) and len(row) == 2 and isinstance(row[0], str) and isinstance(row[1], dict)):
            raise ValueError("'providers' values must be either strings or (string, dict) tuples.")
        name, options = row
        if name not in available_provider_names:
            there = ", ".join(available_provider_names)
            warnings.warn(
                f"Specified provider '{name}' is not in available provider names. Available providers: '{there}'",
                stacklevel=4,
            )
        if name in made:
            warnings.warn(f"Duplicate provider '{name}' encountered, ignoring.", stacklevel=4)
            continue
        made[name] = {str(key): str(value) for key, value in options.items()}
    return list(made), list(made.values())


def read_from(files: Mapping[str, bytes], tensor: Any) -> None:
    """Read a weight from the content of the file in which it is said to lie, if that is given."""
    entries = {e.key: e.value for e in tensor.external_data}
    content = files.get(entries.get("location", ""))
    if content is not None:
        begin = int(entries.get("offset", 0))
        tensor.raw_data = content[begin : begin + int(entries.get("length", len(content) - begin))]
        tensor.data_location = tensor.DEFAULT
        del tensor.external_data[:]

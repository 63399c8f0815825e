"""Exported programs: a `torch.export.ExportedProgram` as a graph of XRT, with its parameters as constants."""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

import torch

import xrt_core as xrt
from xrt_core.errors import InputError, ModelLoadError
from xrt_core.ir.graph import Graph


def graph_of(model: object, example: object = None) -> Graph | None:
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
            program: Any = torch.onnx.export(model, dynamo=True, verbose=False)
    except Exception as e:
        reason = str(e.__cause__ or e).strip().partition("\n")[0][:300]
        raise ModelLoadError(f"this ExportedProgram is not translated: {reason}") from e
    finally:
        logging.disable(disabled)
    return xrt.import_model(program.model)


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

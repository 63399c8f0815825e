"""Exported programs: a `torch.export.ExportedProgram` as a graph of XRT, with its parameters as constants."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch

import xrt_core as xrt
from xrt_core.errors import ModelLoadError
from xrt_core.ir.graph import Graph


def graph_of(model: object) -> Graph | None:
    """The graph of an exported program; None for an object that is none.

    Raises ModelLoadError for a module that is not exported yet, and for a program that torchlib does not translate.
    """
    if isinstance(model, torch.nn.Module):
        raise ModelLoadError(
            f"{type(model).__qualname__} is a module of torch, which knows no shapes: give "
            "torch.export.export(model, (x,)), or use torch.compile(model, backend='xrt')"
        )
    if not isinstance(model, torch.export.ExportedProgram):
        return None
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

"""The exception hierarchy: every exception that XRT raises deliberately is an `XRTError`.

A message names the offending value, its origin, and the remedy. `printable` is for what it quotes of others; `describe`
and `is_from_program` are for the exceptions of others, of engines and plugins, which may be anything.
"""

from __future__ import annotations

import difflib
import dis
import functools
import signal
from collections.abc import Iterable
from types import CodeType
from typing import Any, Final

MESSAGE_LIMIT: Final = 2000
"""Characters of the message of a foreign exception that are kept."""


class XRTError(Exception):
    """Base class of every error that XRT raises deliberately."""


class GraphError(XRTError):
    """A graph violates an invariant of the IR: a cycle, an undefined name, a wrong arity, an unknown operator."""


class ModelLoadError(GraphError):
    """A model file or protobuf cannot be read: missing, truncated, not ONNX, missing external data."""


class ExportError(GraphError):
    """A graph contains something that the target format cannot express."""


class TraceError(GraphError):
    """`Graph.build` used something that cannot be traced; the message names the user's source line."""


class ShapeError(GraphError):
    """Types or shapes of a node's inputs do not fit its operator."""


class PassError(GraphError):
    """A registered pass failed, or returned an invalid graph; names the pass and its owner."""


class GradientError(GraphError):
    """A gradient cannot be built: a node without a rule, no path to the loss, a loss that is not a scalar."""


class CheckpointError(XRTError):
    """A training state cannot be loaded: truncated, from another model, a tensor with another dtype or shape."""


class QuantizationError(XRTError):
    """A model cannot be quantised: no ranges, ranges of another model, a missing library, an inaccessible folder."""


class InputError(XRTError):
    """The caller's inputs do not fit the model: names, count, dtype, rank, a fixed dimension, not an array."""


class OptionError(XRTError):
    """An unknown option, or an invalid value; names the option, the accepted values, and the source of the value."""


class EngineError(XRTError):
    """Base class of errors of engines and plugins."""


class EngineNotFoundError(EngineError):
    """No installed package provides an engine of this name; lists the installed ones."""


class EngineUnavailableError(EngineError):
    """The engine is installed but cannot be used on this machine; has the engine's reason and the remedy."""


class DeviceNotFoundError(EngineError):
    """An unregistered kind of device, or a device number that does not exist; lists the available devices."""


class PluginError(EngineError):
    """A plugin package is broken, incompatible with this version of the core, or its name is taken."""


class RegistrationError(EngineError):
    """A registration was rejected: taken name, unknown operator, wrong signature."""


class UnsupportedError(EngineError):
    """An engine was asked for an operation that it declares unsupported."""


class CompileError(EngineError):
    """An engine failed to compile a Function; the cluster falls back to the host."""


class ExecutionError(XRTError):
    """A node or an executable failed while running; names the node and its operator."""


class BrokenContextError(ExecutionError):
    """Work on a GPU broke the CUDA context: nothing runs on a GPU in this process any more, which must be restarted."""


class ConverterError(XRTError):
    """A value cannot be transferred between spaces: no converter, or a converter returned a wrong dtype or shape."""


class TrainingError(ExecutionError):
    """A step failed after its variables were donated to the engine; they are lost until a state is loaded."""


class CacheError(XRTError):
    """A cache folder or an entry cannot be used."""


class InternalError(XRTError):
    """XRT violated one of its own invariants (such as a pass that produced an invalid graph). Please report it."""


def nearest(name: object, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: "; did you mean 'x'?" for the closest one, "" where none is close."""
    names = {k.lower(): k for k in known}
    close = difflib.get_close_matches(str(name).lower(), names, n=1)
    return f"; did you mean {names[close[0]]!r}?" if close else ""


def printable(text: str, lines: bool = True) -> str:
    """The text with control characters escaped, so that a terminal shows them instead of obeying.

    lines: line ends and tabs stay; not within a name.
    """
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(c if c.isprintable() or c in kept else repr(c)[1:-1] for c in text)


def describe(error: BaseException) -> str:
    """The type and the message of an exception, at most `MESSAGE_LIMIT` printable characters. Never raises."""
    try:
        name = str(type(error).__name__)[:100]
    except BaseException:
        name = "an exception"
    return f"{name}: {message_of(error)}"[:MESSAGE_LIMIT].removesuffix(": ")


def message_of(error: BaseException) -> str:
    """The message of an exception, at most `MESSAGE_LIMIT` printable characters. Never raises."""
    try:
        text = str.__str__(str(error))
    except BaseException:
        return "(its message cannot be printed)"
    return printable(text[:MESSAGE_LIMIT])


def is_from_program(error: BaseException) -> bool:
    """Whether an exception comes from the program around an engine's call, not from the engine: a Ctrl-C, or whatever
    the program's signal handlers raise. Such an exception is the caller's.

    The handler's frame is in the traceback. Python's own handler of SIGINT has none: its KeyboardInterrupt appears at
    any instruction, and that of an engine at a `raise`.
    """
    try:
        handlers = _handler_codes()
        innermost = None
        tb = error.__traceback__
        while tb is not None:
            if tb.tb_frame.f_code in handlers:
                return True
            innermost, tb = tb, tb.tb_next
        if not isinstance(error, KeyboardInterrupt) or innermost is None:
            return isinstance(error, KeyboardInterrupt)
        instruction = innermost.tb_frame.f_code.co_code[innermost.tb_lasti]
        return dis.opname[instruction] not in ("RAISE_VARARGS", "RERAISE")
    except Exception:  # a traceback that cannot be read
        return isinstance(error, KeyboardInterrupt)


def _handler_codes() -> set[CodeType]:
    """The code of the program's signal handlers."""
    found = set()
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        while isinstance(handler, functools.partial):
            handler = handler.func
        handler = getattr(handler, "__func__", handler)
        code = getattr(handler, "__code__", None)
        if code is None and callable(handler):
            code = getattr(type(handler).__call__, "__code__", None)
        if isinstance(code, CodeType):
            found.add(code)
    return found

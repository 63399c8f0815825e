"""The one hierarchy of errors: every exception that XRT raises on purpose is an `XRTError`.

A message says what was wrong (name and value), where it came from, and what to do about it.
"""

from __future__ import annotations


class XRTError(Exception):
    """Base of every error that XRT raises on purpose."""


class GraphError(XRTError):
    """A graph breaks the rules of the IR: a cycle, a dangling name, a wrong arity, an unknown operator."""


class ModelLoadError(GraphError):
    """A model file or protobuf cannot be read: missing, truncated, not ONNX, missing external data."""


class ExportError(GraphError):
    """A graph holds something that the target format cannot express."""


class TraceError(GraphError):
    """`Graph.build` did something that tracing cannot record; the message points at the user's line."""


class ShapeError(GraphError):
    """Types or shapes of a node's inputs do not fit its operator."""


class PassError(GraphError):
    """A pass that a user registered failed, or gave a bad graph; names the pass and its owner."""


class GradientError(GraphError):
    """A gradient cannot be built: a node without a rule, no way to the loss, a loss that is no scalar."""


class CheckpointError(XRTError):
    """A training state cannot be loaded: truncated, of another model, a tensor of another dtype or shape."""


class QuantizationError(XRTError):
    """A model cannot be quantised: no ranges, those of another model, a missing library, a folder without access."""


class InputError(XRTError):
    """The caller's inputs do not fit the model: names, count, dtype, rank, a fixed dimension, not an array."""


class OptionError(XRTError):
    """An unknown option, or a value out of range; names the option, what it takes, and the value's source."""


class EngineError(XRTError):
    """Base of everything that goes wrong around an engine."""


class EngineNotFoundError(EngineError):
    """No installed package provides an engine of this name; lists what is installed."""


class EngineUnavailableError(EngineError):
    """The engine is installed but cannot be used here; carries its own reason and the cure."""


class DeviceNotFoundError(EngineError):
    """A kind of device that nobody brings, or a number of which there is no device here; lists those that there are."""


class PluginError(EngineError):
    """A plugin package is broken, too old, too new, or named twice."""


class RegistrationError(EngineError):
    """A registration was refused: taken name, unknown operator, wrong signature."""


class UnsupportedError(EngineError):
    """An engine was asked for something that it had said it does not support."""


class CompileError(EngineError):
    """An engine failed to compile a Function; the cluster falls back to the host."""


class ExecutionError(XRTError):
    """A node or an executable failed while running; names the node and its operator."""


class ConverterError(XRTError):
    """A value cannot go from one space to another: no converter takes it, or one gave the wrong dtype or shape."""


class TrainingError(ExecutionError):
    """A step failed after its variables had been handed to the engine, and they are gone until a state is loaded."""


class CacheError(XRTError):
    """A cache folder or an entry cannot be used."""


class InternalError(XRTError):
    """XRT itself broke one of its own rules (a pass produced a bad graph, say). Please report it."""

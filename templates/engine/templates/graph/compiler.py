"""{{ cookiecutter.__class }}GraphCompiler: hands a Function to the toolkit as one ONNX model."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

from xrt_core.engine.contract import CompileOptions, Function, GraphCompiler, InputOutputAlias, Parameter
from xrt_core.engine.onnx_bridge import to_onnx
from xrt_core.errors import CompileError, OptionError

from {{ cookiecutter.__module }} import _toolkit
from {{ cookiecutter.__module }}.executable import {{ cookiecutter.__class }}Executable, load_executable


class {{ cookiecutter.__class }}GraphCompiler(GraphCompiler):
    """Compiles Functions for one device. It keeps no state between compilations, so any thread may call it."""

    # YOUR ENGINE: what `xrt inspect` shows, in the order of compilation; the last is the text of the executable.
    stages = MappingProxyType({"compiled": "what was compiled, as the executable shows it"})

    def __init__(self, device: str, options: CompileOptions) -> None:
        # YOUR ENGINE: options of your own come in `extra`; refuse those that you do not know. Look at the other fields
        # too: `fused=False` asks for a build without the toolkit's fusions, which the guard compares with; `threads`,
        # `workspace_bytes` and `max_batch_size` are limits. The reference implementation has none of these.
        if options.extra:
            unknown = sorted(options.extra)[0]
            raise OptionError(f"{{ cookiecutter.engine }}: unknown option {unknown!r}; it takes none of its own")
        self._device = _toolkit.device_named(device)

    def compile(
        self,
        function: Function,
        entry_params: Sequence[Parameter],
        return_params: Sequence[Parameter],
        aliases: Sequence[InputOutputAlias],
    ) -> {{ cookiecutter.__class }}Executable:
        """A session of the toolkit for `function`. Raises CompileError with the toolkit's own message."""
        try:
            # `to_onnx` gives a standalone model: names, types, constants, opsets. Weights are inside of it. A toolkit
            # that takes weights as memory is spared that copy by `onnx_bridge.onnx_model`.
            model = to_onnx(function).SerializeToString()
            session = _toolkit.Session(model, self._device)
        except Exception as e:
            nodes = ", ".join(dict.fromkeys(n.operator for n in function.body.nodes))
            raise CompileError(
                f"{{ cookiecutter.engine }}: function {function.name!r} of {nodes} does not compile: {type(e).__name__}: {e}"
            ) from e
        return {{ cookiecutter.__class }}Executable(session, model, entry_params, return_params, aliases, self._device)

    def load(self, blob: bytes) -> {{ cookiecutter.__class }}Executable:
        """The executable that `serialize` gave `blob` for. Raises CompileError where it does not fit."""
        return load_executable(blob, self._device)

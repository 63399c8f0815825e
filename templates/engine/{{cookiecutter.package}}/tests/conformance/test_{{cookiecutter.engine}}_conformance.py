"""The engine against XRT's conformance kit: the contract, runs, threads, memory, and every operator that it claims."""

from __future__ import annotations

from xrt_core.testing import Capabilities, ConformanceSuite


class Test{{ cookiecutter.__class }}(ConformanceSuite):
    """`pytest --xrt-full` runs every case instead of a sample; `--xrt-scorecard FILE` writes what the engine can do."""

    engine = "{{ cookiecutter.engine }}"
    # YOUR ENGINE: what it can do beyond the mandatory part of the contract (see `Capabilities`). `toolkit` names the
    # modules without which the package must still import, and say what to install: add your library's.
    capabilities = Capabilities(
        serialisation={{ cookiecutter.array_library == "onnx" }},
{%- if cookiecutter.array_library == "onnx" or cookiecutter.namespace == "numpy" or cookiecutter.array_library == "kernels" %}
        in_place=True,
{%- endif %}
        toolkit=("{{ cookiecutter.__module }}._toolkit",),
    )

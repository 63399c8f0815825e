"""`python -m xrt_core.options` prints docs/options.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from xrt_core.options import declared
from xrt_core.options.kinds import HUGE
from xrt_core.options.table import TABLE


def as_markdown() -> str:
    """The whole of docs/options.md, with the options that installed plugins declare."""
    switches = list(declared.switches().values())
    sections = list(declared.sections().values())
    return "\n".join([core_table(), *plugin_sections(switches, sections)])


def core_table() -> str:
    """The options of the core."""
    rows = [
        "# Options",
        "",
        "Every option is a keyword argument of `XRTModule`. Keywords win over `xrt.config`",
        "(functions for the switches of engines, below), which wins over environment variables, which win over the",
        "defaults. An unknown option or a bad value is an `OptionError` that says where it came from.",
        "",
    ]
    rows += ["| option | takes | default | environment | meaning |", "|---|---|---|---|---|"]
    for o in TABLE.values():
        default = "no bound" if o.default == HUGE else "not given" if o.default is None else f"`{o.default!r}`"
        env = f"`{o.env}`" if o.env else ""
        rows.append(f"| `{o.name}` | {o.kind.takes} | {default} | {env} | {o.help} |")
    return "\n".join(rows) + "\n"


def plugin_sections(switches: Iterable[declared.Switch], sections: Iterable[declared.Section]) -> Iterator[str]:
    """The options that packages declare."""
    yield "## Switches of engines\n"
    yield "A switch is None unless someone sets it. Without `engine`, True uses only engines that are switched on like"
    yield "this, and False leaves the engine out. `xrt.config.SWITCH(True)` sets it for the process, `None` makes it"
    yield "undefined again. Each comes with its engine's package; one that no installed package declares is an error"
    yield "that says so, as a variable a warning.\n"
    yield "| switch | engine | package | environment |\n|---|---|---|---|"
    for s in switches:
        yield f"| `{s.name}` | {s.engine} | {s.owner.partition(' ')[0]} | `{s.variable}` |"
    yield ""
    for section in sections:
        yield f"## Options of `{section.name}`\n"
        package = section.owner.partition(" ")[0]
        yield f"They come with {package} and are given as `engine_options={{{section.name!r}: {{...}}}}`.\n"
        yield "| option | takes | default | environment | meaning |\n|---|---|---|---|---|"
        for o in section.options.values():
            default = "not given" if o.default is None else f"`{o.default!r}`"
            yield f"| `{o.name}` | {o.kind.takes} | {default} | `{section.variable(o.name)}` | {o.help} |"
        yield ""


if __name__ == "__main__":
    print(as_markdown(), end="")

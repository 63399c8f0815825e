"""`python -m xrt_core.options` prints docs/options.md."""

from __future__ import annotations

from xrt_core.options.kinds import HUGE
from xrt_core.options.table import TABLE


def as_markdown() -> str:
    """The whole of docs/options.md; `python -m xrt_core.options` prints it."""
    rows = [
        "# Options",
        "",
        "Every option is a keyword argument of `XRTModule`. Keywords win over `xrt.config`",
        "(`xrt.config.use_xla_jit(True)`, `xrt.config.use_tensorrt(False)`; `None` makes them undefined again), which",
        "wins over environment variables, which win over the defaults. An unknown option or a bad value is an",
        "`OptionError` that says where it came from.",
        "",
    ]
    rows += ["| option | takes | default | environment | meaning |", "|---|---|---|---|---|"]
    for o in TABLE.values():
        default = "no bound" if o.default == HUGE else "not given" if o.default is None else f"`{o.default!r}`"
        env = f"`{o.env}`" if o.env else ""
        rows.append(f"| `{o.name}` | {o.kind.takes} | {default} | {env} | {o.help} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(as_markdown(), end="")

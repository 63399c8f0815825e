"""Makes real little plugin packages in a folder: a module and the .dist-info that pip would have written."""

from __future__ import annotations

import itertools
import pathlib
import textwrap
from collections.abc import Mapping, Sequence

_counter = itertools.count()

ENGINE = """
from xrt_core.engine import Engine, EngineStatus, Support

class TheEngine(Engine):
    name = "{name}"
    {members}

    def probe(self):
        {probe}

    def supports(self, node, device, phase):
        return Support.no("it takes nothing")

    def compiler(self, device, options):
        raise AssertionError("nothing to compile")

    def fingerprint(self, device):
        return "1"
"""
READY = 'return EngineStatus(True, "9.9", ("cpu",))'


def engine_source(name: str, members: str = "pass", probe: str = READY) -> str:
    """The source of a module with an engine class `TheEngine`."""
    return ENGINE.format(name=name, members=members, probe=probe)


def add_package(
    folder: pathlib.Path,
    package: str,
    source: str,
    *,
    engine: str,
    version: str = "1.0",
    requires: Sequence[str] = ("xrt-core>=0.1",),
    target: str = "",
    group: str = "xrt.engines",
) -> str:
    """Install a package whose entry point `engine` names `TheEngine` of a module holding `source`.

    Returns the module's name, which no other package of the test session has.
    """
    module = f"{package.replace('-', '_')}_{next(_counter)}"
    (folder / f"{module}.py").write_text(textwrap.dedent(source))
    info = folder / f"{package.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    needs = "".join(f"Requires-Dist: {r}\n" for r in requires)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n{needs}\nRequires-Dist: not-a-header\n"
    )
    (info / "entry_points.txt").write_text(f"[{group}]\n{engine} = {target or module + ':TheEngine'}\n")
    (info / "RECORD").write_text("")
    return module


def add_plugin(
    folder: pathlib.Path, package: str, source: str, entries: Mapping[str, str], *, version: str = "1.0"
) -> str:
    """Install a package whose module, holding `source`, is itself the plugin. Returns the module's name.

    entries: group -> name of the entry point there.
    """
    group, name = next(iter(entries.items()))
    module = add_package(folder, package, source, engine=name, group=group, version=version, target="replaced below")
    text = "".join(f"[{group}]\n{name} = {module}\n" for group, name in entries.items())
    (folder / f"{package.replace('-', '_')}-{version}.dist-info" / "entry_points.txt").write_text(text)
    return module

"""Refuses answers that would not make a working engine, before anything is written: one message, and what to give."""

from __future__ import annotations

import importlib.util
import json
import keyword
import re
import sys
from importlib import metadata

ANSWERS = json.loads(r"""{{ cookiecutter|jsonify }}""")
BUILT_IN = ("host", "xla", "tensorrt", "toy", "onnxruntime", "openvino")
LONGEST = 20  # of an engine's name: it is a part of class names and messages
LONGEST_PACKAGE = 40
KNOWN_KINDS = ("cpu", "cuda", "tpu", "host", "numpy", "jax", "cupy", "torch", "other")


def engine_fault(name: str) -> str:
    """What is wrong with the engine's name, or ""."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name) or len(name) > LONGEST:
        return (
            f"engine name {name!r} is not usable; give a lower-case identifier of up to {LONGEST} letters, digits and "
            f"underscores that begins with a letter and is no keyword of Python, such as 'acme'"
        )
    if name in BUILT_IN:
        return f"engine name {name!r} is taken by XRT itself ({', '.join(BUILT_IN)}); give another one"
    for entry in metadata.entry_points(group="xrt.engines"):
        if entry.name == name:
            owner = entry.dist.name if entry.dist is not None else "an installed package"
            return f"engine name {name!r} is taken here by {owner}; give another one, or run: pip uninstall {owner}"
    return ""


def package_fault(name: str, module: str) -> str:
    """What is wrong with the package's name, or ""."""
    usable = re.fullmatch(r"[A-Za-z]([A-Za-z0-9._-]*[A-Za-z0-9])?", name) and len(name) <= LONGEST_PACKAGE
    if not usable or not module.isidentifier():
        return (
            f"package name {name!r} is not usable; give up to {LONGEST_PACKAGE} letters, digits, '-', '_' and '.', "
            f"beginning with a letter and ending with a letter or digit, such as 'xrt-acme'"
        )
    if keyword.iskeyword(module) or module in sys.stdlib_module_names:
        return f"package name {name!r} gives a module {module!r}, which is Python's own; give another one"
    installed = re.sub(r"[-_.]+", "-", name).lower()
    for found in metadata.distributions():
        if found.name and re.sub(r"[-_.]+", "-", found.name).lower() == installed:
            return f"package {name!r} is installed here already; give another name, or run: pip uninstall {name}"
    if importlib.util.find_spec(module) is not None:
        return f"package name {name!r} gives a module {module!r}, which can be imported here already; give another one"
    return ""


def fault(answers: dict[str, str]) -> str:
    """The first thing that is wrong with the answers, or ""."""
    author, namespace = answers["author"], answers["namespace"]
    if not author.strip() or not author.isprintable():
        return f"author {author!r} is not usable; give a name of at least one letter, on one line"
    is_module = all(part.isidentifier() and not keyword.iskeyword(part) for part in namespace.split("."))
    if answers["array_library"] == "namespace" and not (is_module and len(namespace) <= LONGEST_PACKAGE):
        return (
            f"namespace {namespace!r} is not the name of a module of up to {LONGEST_PACKAGE} letters; give one such as "
            f"'numpy', 'cupy' or 'jax.numpy'"
        )
    kind = answers["device_kind"]
    if answers["devices"] == "other" and (not re.fullmatch(r"[a-z][a-z0-9_]*", kind) or kind in KNOWN_KINDS):
        return (
            f"device kind {kind!r} is not usable; give a lower-case identifier that XRT does not use itself "
            f"({', '.join(KNOWN_KINDS)}), such as 'npu'"
        )
    return engine_fault(answers["engine"]) or package_fault(answers["package"], answers["__module"])


if __name__ == "__main__":
    wrong = fault(ANSWERS)
    if wrong:
        sys.exit(f"ERROR: {wrong}")

"""Libraries of compiled operators that a module names by path: who opens them, and the domains that they bring."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterator, Sequence
from typing import Final

from xrt_core.errors import OptionError, PluginError, RegistrationError
from xrt_core.ir.operator_set import OperatorSet, find_operator, operator_owner
from xrt_core.plugins import hookimpl, plugins

_lock = threading.Lock()
_opened: Final[dict[tuple[str, str], _Opened]] = {}  # by path and domain, for as long as the process lives


class _Opened:
    """The operators of one domain in one library; a plugin of the process."""

    def __init__(self, operators: OperatorSet, owner: str) -> None:
        self.operators = operators
        self.owner = owner

    @hookimpl
    def xrt_operators(self) -> list[OperatorSet]:
        """The set."""
        return [self.operators]


def open_libraries(paths: Sequence[str], operators: Collection[tuple[str, str]]) -> None:
    """Make those of a model's operators known in this process that these libraries have, by the hook
    `xrt_open_operators`. What a package or the program defines already stays.

    operators: domain and name of each that is not of ONNX.

    Raises OptionError where there is no such file or no installed plugin opens it, RegistrationError for an operator
    that the process has from another library, and what plugins raise.
    """
    for path in paths:
        for found in _sets(path, operators):
            with _lock:
                others = {o.owner for (p, domain), o in _opened.items() if domain == found.domain and p != path}
                for domain, name in operators if others else ():
                    known = find_operator(domain, name) if domain == found.domain else None
                    by = "" if known is None else operator_owner(known)
                    if by in others and found.find is not None and found.find(name) is not None:
                        raise RegistrationError(
                            f"custom_op_libraries: {path!r} has {domain}.{name}, which this process has from {by} "
                            "already"
                        )
                if (path, found.domain) not in _opened:
                    made = _Opened(found, f"the library {path} ({_state(path)})")
                    plugins.add(made, found.domain, made.owner)
                    _opened[path, found.domain] = made


def _sets(path: str, operators: Collection[tuple[str, str]]) -> Iterator[OperatorSet]:
    if not os.path.isfile(path):
        raise OptionError(
            f"custom_op_libraries names {path!r}, and there is no such file; give the path that it has here"
        )
    for name, owner, ask in plugins.each("xrt_open_operators", "xrt.engines", library=path, operators=operators):
        found = ask()
        if found is None:
            continue
        for row in found:
            if not isinstance(row, OperatorSet):
                raise PluginError(
                    f"{owner}: the hook xrt_open_operators of {name!r} gave {row!r}, which is no OperatorSet"
                )
            yield row
        return
    raise OptionError(
        f"custom_op_libraries={path!r}: no installed plugin opens such a library; install the engine that it is for"
    )


def _state(path: str) -> str:
    """A digest of the file, which is part of cache keys with the library's name."""
    from blake3 import blake3

    return blake3().update_mmap(path).hexdigest(length=8)

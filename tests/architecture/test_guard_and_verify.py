"""verify is about numbers alone, guard about processes and threads, and no file of either imports in a circle."""

from __future__ import annotations

import pytest

from tests.architecture.source import CORE, imports, sources

BANNED_IN_VERIFY = (
    "subprocess", "threading", "multiprocessing", "concurrent", "queue", "xrt_core.cache", "xrt_core.guard",
)  # fmt: skip
MOST_MODULES = {"guard": 16, "verify": 12}


def test_verify_knows_no_process_thread_or_cache() -> None:
    """Neither at import nor late."""
    bad = [
        i.where
        for path in sources(CORE / "verify")
        for i in imports(path)
        if any(i.module == name or i.module.startswith(f"{name}.") for name in BANNED_IN_VERIFY)
    ]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("folder", MOST_MODULES)
def test_no_circle_between_files(folder: str) -> None:
    """Imports in functions and under TYPE_CHECKING count too."""
    names = {f"xrt_core.{folder}.{p.stem}": p for p in sources(CORE / folder) if p.stem != "__init__"}
    assert len(names) <= MOST_MODULES[folder]
    left = {name: {i.module for i in imports(p)} & names.keys() for name, p in names.items()}
    while left:
        lowest = [name for name, used in left.items() if not used & left.keys()]
        assert lowest, f"a circle among {sorted(left)}"
        for name in lowest:
            del left[name]

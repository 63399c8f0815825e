"""WeakIdentityMap: entries of objects that cannot be keys, which go when the collector runs, whenever that is."""

from __future__ import annotations

import gc
import pathlib
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from xrt_core.frontends.onnx_file import map_file
from xrt_core.ir.function import array_digest
from xrt_core.ir.garbage_collection import WeakIdentityMap


def test_entries_live_as_long_as_their_objects() -> None:
    """Equal objects have entries of their own; one that takes an identity over has none."""
    known: WeakIdentityMap[Any, str] = WeakIdentityMap()
    a, b = np.zeros(3), np.zeros(3)
    known.put(a, "a")
    known.put(b, "b")
    known.put(b, "again")
    assert (known.get(a), known.get(b), known.get(np.zeros(3)), len(known)) == ("a", "again", None, 2)
    for _ in range(100):
        del a
        a = np.zeros(3)
        assert known.get(a) is None
    assert len(known) == 1


def _of_mapped(folder: pathlib.Path) -> Callable[[], object]:
    file = folder / "data"
    file.write_bytes(bytes(100))
    return lambda: map_file(file)


@pytest.mark.parametrize("what", ["digests", "mapped files"])
def test_the_collector_may_end_an_object_while_another_is_noted(
    what: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its entry goes in the same thread, in the midst of the other's: that thread must not wait for itself."""
    if what == "digests":
        made = iter(np.random.default_rng(0).standard_normal((2, 7)))

        def note() -> object:
            array = next(made).copy()
            array_digest(array)
            return array

    else:
        note = _of_mapped(tmp_path)
    cycle: list[object] = [note()]
    cycle.append(cycle)
    del cycle  # garbage, until the collector runs

    class Collecting(weakref.ref):  # type: ignore[type-arg]
        __slots__ = ()

        def __init__(self, *args: Any) -> None:
            gc.collect()
            super().__init__(*args)

    monkeypatch.setattr(weakref, "ref", Collecting)
    thread = threading.Thread(target=note, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()

"""The bounded in-memory store."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from xrt_core.cache.lru import LRU


def test_the_longest_unused_goes_first() -> None:
    """Reading counts as use."""
    store: LRU[int] = LRU(2)
    store.put("a", 1)
    store.put("b", 2)
    assert store.get("a") == 1
    store.put("c", 3)
    assert store.items() == [("a", 1), ("c", 3)]
    assert store.get("b") is None
    store.put("a", 4)
    assert store.values() == [3, 4]
    store.clear()
    assert len(store) == 0


def test_a_failed_making_leaves_nothing() -> None:
    """The error comes through, and the next one tries again."""
    store: LRU[int] = LRU(2)
    with pytest.raises(ZeroDivisionError):
        store.get_or_make("a", lambda: 1 // 0)
    assert len(store) == 0
    assert store.get_or_make("a", lambda: 5) == 5
    assert store.get_or_make("a", lambda: 6) == 5
    assert not store._making


def test_one_making_for_many_threads() -> None:
    """Who asks while it is made waits for it; another key does not wait."""
    store: LRU[int] = LRU(4)
    made: list[int] = []
    free = threading.Event()

    def slow() -> int:
        free.wait(5)
        made.append(1)
        return 7

    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(store.get_or_make("k", slow))) for _ in range(6)]
    for t in threads:
        t.start()
    assert store.get_or_make("other", lambda: 1) == 1
    time.sleep(0.02)
    free.set()
    for t in threads:
        t.join()
    assert (made, found) == ([1], [7] * 6)


def test_threads_that_push_each_other_out() -> None:
    """A store of one entry under fire keeps its bound and gives right values."""
    store: LRU[int] = LRU(1)
    wrong: list[int] = []

    def work(k: int) -> None:
        for _ in range(2000):
            if store.get_or_make(k, lambda: k) != k:
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    assert len(store) == 1


def test_entries_that_move_while_others_are_looked_at() -> None:
    """A look-up takes no lock, and may come while entries are replaced."""
    store: LRU[str] = LRU(4)
    for k in range(4):
        store.put(k, f"v{k}")
    moving = True

    def move() -> None:
        while moving:
            store.get(0)
            store.get(1)

    thread, interval = threading.Thread(target=move), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for k in range(40_000):
            store.put(3, f"v{k}")
            store.replace(store.get(3) or "", "new")
    finally:
        moving = False
        thread.join()
        sys.setswitchinterval(interval)
    assert store.get(3) == "new"

"""Time from opening the page of a partition of 2000 nodes in 300 clusters to its picture, in headless Chromium.

    python benchmarks/viewer.py

Needs chromium, chromedriver and selenium.
"""

from __future__ import annotations

import pathlib
import statistics
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from tests.reports.browser import browser, show
from tests.reports.partitions import many

OPENINGS = 7


def main() -> None:
    """Print the page's size, the time to make it, and for each window the time of the first opening and the median."""
    explained = many()
    start = time.perf_counter()
    text = explained.to_html()
    print(f"{explained.summary()}\npage: {len(text) / 1e6:.1f} MB, made in {time.perf_counter() - start:.2f} s")
    with tempfile.TemporaryDirectory() as folder, browser() as driver:
        page = pathlib.Path(folder, "page.html")
        page.write_text(text, encoding="utf-8")
        for size in ((1280, 800), (390, 844)):
            times = [show(driver, page, *size) for _ in range(OPENINGS)]
            print(f"{size[0]}x{size[1]}: first {times[0]} ms, median {statistics.median(times):.0f} ms")


if __name__ == "__main__":
    main()

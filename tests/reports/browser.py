"""A headless Chromium for tests of pages: Debian's, driven by selenium; nothing is downloaded."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def browser() -> Iterator[Any]:
    """A driver of a headless Chromium that reaches no network. Skips where selenium or the browser is missing."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium drives the browser")
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("needs chromium and chromedriver (Debian: apt-get install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=driver))
    try:
        offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
        found.execute_cdp_cmd("Network.enable", {})
        found.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
        yield found
    finally:
        found.quit()


def show(driver: Any, page: pathlib.Path, width: int, height: int, *, dark: bool = False) -> int:
    """Open a page in a window of this size; return the milliseconds until its picture was drawn."""
    from selenium.webdriver.support.ui import WebDriverWait

    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
    driver.get(page.as_uri())
    root = "return document.documentElement.getAttribute('data-ready')"
    return int(WebDriverWait(driver, 30).until(lambda d: d.execute_script(root)))


def complaints(driver: Any) -> list[str]:
    """What the page has written to the console since the last call, at any level."""
    return [json.dumps(entry) for entry in driver.get_log("browser")]

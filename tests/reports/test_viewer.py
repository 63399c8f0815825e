"""The page of a partition in a real browser: it fits the screen, and can be searched, clicked and steered by keys."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.reports.browser import browser, complaints, show
from tests.reports.partitions import many

pytestmark = [pytest.mark.slow, pytest.mark.tiny_clusters]  # a browser starts; the pictures show clusters

SIZES = ((1280, 800), (390, 844))


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    explained = many()
    assert len(explained.report.clusters) >= 300
    assert explained.node_count >= 2000
    path = tmp_path_factory.mktemp("viewer") / "many.html"
    path.write_text(explained.to_html(), encoding="utf-8")
    return path


@pytest.fixture
def opened(driver: Any, page: pathlib.Path) -> Iterator[Any]:
    """The page in a wide window; whatever a test does, the console stays empty."""
    show(driver, page, *SIZES[0])
    yield driver
    assert complaints(driver) == []


def run(driver: Any, script: str) -> Any:
    return driver.execute_script(f"return {script}")


def press(driver: Any, *keys: str) -> None:
    from selenium.webdriver.common.keys import Keys

    for key in keys:
        driver.switch_to.active_element.send_keys(getattr(Keys, key, key))


def panel(driver: Any) -> str:
    return str(driver.find_element("id", "panel").text)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_it_fits_the_screen(driver: Any, page: pathlib.Path, size: tuple[int, int], dark: bool) -> None:
    """The whole partition is in sight, boxes large enough to be told apart, and nothing is wider than the window."""
    show(driver, page, *size, dark=dark)

    seen = run(driver, "(b => [b.x1, b.y1, b.x2, b.y2])(cy.elements().renderedBoundingBox())")
    canvas = driver.find_element("id", "canvas").size
    assert seen[0] >= 0
    assert seen[1] >= 0
    assert seen[2] <= canvas["width"]
    assert seen[3] <= canvas["height"]
    assert (seen[2] - seen[0]) * (seen[3] - seen[1]) > 0.5 * canvas["width"] * canvas["height"]
    assert run(driver, "cy.nodes().length") > 600
    assert run(driver, "cy.nodes().first().renderedWidth()") > 10
    assert run(driver, "document.documentElement.scrollWidth") <= size[0]
    assert driver.find_element("id", "viewer").size["height"] == size[1]
    background = run(driver, "getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(16, 22, 28)" if dark else "rgb(255, 255, 255)")
    assert complaints(driver) == []


def test_a_click_tells_the_reason(opened: Any) -> None:
    """A click on a host node shows why it is there, and what it reads."""
    from selenium.webdriver.common.action_chains import ActionChains

    where = run(
        opened,
        "(() => { const n = cy.nodes('.host.single').filter(n => n.data('text').startsWith('Exp')).first();"
        " const p = n.renderedPosition(); return [p.x, p.y]; })()",
    )
    canvas = opened.find_element("id", "canvas")
    x, y = (round(p - s / 2) for p, s in zip(where, (canvas.size["width"], canvas.size["height"]), strict=True))
    ActionChains(opened).move_to_element_with_offset(canvas, x, y).click().perform()

    assert "on the host: fake: not wanted" in panel(opened)
    assert "READS" in panel(opened)


def test_search_finds_what_is_inside_a_cluster(opened: Any) -> None:
    """Typing offers nodes; Enter opens the cluster of the first one; Back shows all clusters again."""
    press(opened, "/", "Sigmoid")
    found = opened.find_element("id", "found").text
    assert " of " in found.splitlines()[-1]
    press(opened, "ARROW_DOWN", "ENTER")
    assert run(opened, "cy.nodes(':selected').data('text')").startswith("Sigmoid")
    assert run(opened, "cy.nodes().length") < 20
    assert " on second" in panel(opened)

    opened.find_element("id", "up").click()

    assert run(opened, "cy.nodes().length") > 600
    assert panel(opened).splitlines()[0] == run(opened, "cy.nodes(':selected').data('text')").splitlines()[0]


def test_search_for_nothing(opened: Any) -> None:
    """What is not there is said, and Enter does nothing; Escape clears it."""
    press(opened, "/", "no such thing", "ENTER")
    assert opened.find_element("id", "found").text == "nothing found"
    assert run(opened, "cy.nodes('.faded').length") == run(opened, "cy.nodes().length")
    press(opened, "ESCAPE")
    assert run(opened, "cy.nodes('.faded').length") == 0


def test_keys_alone(opened: Any) -> None:
    """Tab reaches the picture; arrows go from box to box, Enter opens a cluster, Escape returns; + zooms, 0 fits."""
    for _ in range(12):
        press(opened, "TAB")
        if opened.switch_to.active_element.get_attribute("id") == "canvas":
            break
    assert opened.switch_to.active_element.get_attribute("id") == "canvas"
    press(opened, "ARROW_DOWN", "ARROW_DOWN")
    first = run(opened, "cy.nodes(':selected').data('box')")
    for _ in range(8):
        press(opened, "ARROW_DOWN")
        if run(opened, "document.getElementById('open') !== null"):
            break
    assert run(opened, "cy.nodes(':selected').data('box')") != first
    every = run(opened, "cy.nodes().length")
    press(opened, "ENTER")
    assert run(opened, "cy.nodes().length") < every
    press(opened, "ESCAPE")
    assert run(opened, "cy.nodes().length") == every
    fitted = run(opened, "(cy.fit(undefined, 14), cy.zoom())")
    press(opened, "+")
    assert run(opened, "cy.zoom()") > fitted
    press(opened, "0")
    assert run(opened, "cy.zoom()") == pytest.approx(fitted)


def test_every_node(opened: Any) -> None:
    """The second picture has a box for each node."""
    from selenium.webdriver.support.ui import Select

    Select(opened.find_element("id", "views")).select_by_index(2)
    assert run(opened, "cy.nodes().length") >= 2000
    assert panel(opened).startswith("Every node (")


def test_a_window_that_is_turned(opened: Any) -> None:
    """Another aspect takes the layout that is for it."""
    wide = run(opened, "(b => b.w / b.h)(cy.nodes().boundingBox())")
    size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    opened.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(opened, 10).until(lambda d: run(d, "(b => b.w / b.h)(cy.nodes().boundingBox())") < wide / 1.5)

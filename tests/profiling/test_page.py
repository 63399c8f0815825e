"""The page of a profile: self-contained, escaped, and drawn by a real browser without an error, light and dark."""

from __future__ import annotations

import html.parser
import json
import pathlib
import re
import shutil
import subprocess

import pytest

import xrt_core as xrt
from tests.profiling.test_profiles import Steps, X, profiled
from xrt_core.profiling import Profile, page

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


def made(name: str = "page") -> Profile:
    m = xrt.XRTModule(Steps(), engine="host")
    m(X)
    with profiled(name) as p:
        for _ in range(3):
            m(X)
    return p


def test_it_loads_nothing_and_shows_everything() -> None:
    """No address in it, every step in the data and in the table, names escaped."""
    p = made("</script><b>&")
    text = p.to_html()
    assert not re.search(r"""(src|href)\s*=|https?://|@import|url\(""", text)
    parser = html.parser.HTMLParser()
    parser.feed(text)
    assert "<title>&lt;/script&gt;&lt;b&gt;&amp;</title>" in text
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])
    assert len(data["spans"]) == len(p.timeline.spans)
    assert {label for label, _, _ in data["labels"]} == {s.label for s in p.timeline.spans}
    assert max(depth for _, depth, *_ in data["spans"]) == 1  # steps lie in calls
    assert all(r.label in text for r in p.rows)


def test_long_profiles_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timeline has so many spans at most, and says what is left out; the tables have all."""
    monkeypatch.setattr(page, "MOST_SPANS", 5)
    p = made()
    text = p.to_html()
    assert f"The last {len(p.timeline.spans) - 5} of {len(p.timeline.spans)} spans are not drawn." in text
    assert all(r.label in text for r in p.rows)


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
@pytest.mark.parametrize(("size", "dark"), [("1280,800", False), ("390,844", True)])
def test_a_browser_draws_it(tmp_path: pathlib.Path, size: str, dark: bool) -> None:
    """The script runs to its end, fits the width, and nothing is written to the console; search, zoom, sorting and a
    click work."""
    text = made().to_html()
    drive = """<script>
      const errors = []; window.onerror = (m) => errors.push(m);
      window.addEventListener("load", () => {
        const canvas = document.getElementById("timeline"), out = document.createElement("output"); out.id = "result";
        const before = [from, to];
        canvas.dispatchEvent(new KeyboardEvent("keydown", { key: "+" }));
        const zoomed = to - from < before[1] - before[0];
        canvas.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
        canvas.dispatchEvent(new KeyboardEvent("keydown", { key: "0" }));
        const whole = from === before[0] && to === before[1];
        search.value = "matmul"; search.dispatchEvent(new Event("input"));
        const hits = found.textContent;
        document.querySelectorAll("table")[0].tHead.querySelectorAll("button")[3].click();
        const times = [...document.querySelectorAll("table")[0].tBodies[0].rows].map((r) => r.cells[3].textContent);
        const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        out.textContent = JSON.stringify({ errors, zoomed, whole, hits, times, shown: details.textContent,
          drawn: pixels.some((v) => v > 0), overflow: document.documentElement.scrollWidth > innerWidth,
          dark: matchMedia("(prefers-color-scheme: dark)").matches });
        document.body.append(out);
      });</script>"""
    (tmp_path / "page.html").write_text(text.replace("</head>", drive + "</head>"), encoding="utf-8")
    colours = ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if dark else []
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={size}", "--dump-dom"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=2000", *colours]
    command += [(tmp_path / "page.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    result = json.loads(html.unescape(re.search(r'<output id="result">(.*?)</output>', done.stdout)[1]))
    assert result["errors"] == []
    assert result["zoomed"]
    assert result["whole"]
    assert result["drawn"]
    assert not result["overflow"]
    assert result["dark"] == dark
    assert result["hits"] == "3 found"
    assert "MatMul" in result["shown"]
    units = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
    seconds = [float(t.split()[0]) * units[t.split()[1]] for t in result["times"]]
    assert seconds == sorted(seconds, reverse=True)
    assert len(seconds) == 4

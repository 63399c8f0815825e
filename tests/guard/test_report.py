"""The guard's report: totals, text, and Prometheus lines, from records that are written by hand."""

from __future__ import annotations

import sys

import pytest

from xrt_core.errors import OptionError
from xrt_core.guard.record import ClusterRecord, FailureRecord, GuardReport, State
from xrt_core.verify.verdict import Outcome, Piece


def record(name: str = "c", number: int = 0) -> ClusterRecord:
    """A cluster that is live after a failure."""
    found = ClusterRecord(name, "e", 3, "MatMul, Add")
    found.number = number
    found.add(FailureRecord("compile", "crashed", "the worker process ended (SIGABRT)", "line one\nline two", -6))
    found.move(State.FAILED, "crashed")
    found.move(State.QUEUED, "tried again")
    found.move(State.READY, "fine")
    found.outcome = Outcome("ready", (Piece("e", (0, 1, 2)),), "fine", {"compile": 2.0, "host": 0.5}, ("f: it is off",))
    found.move(State.LIVE, "fine")
    found.calls, found.host_calls = 10, 4
    return found


def test_totals() -> None:
    """Calls, share and time saved: what the host takes more, for each call that it did not answer."""
    one, two = record(), record("d", 1)
    one.host_seconds.extend([0.3, 0.2, 0.4])
    one.engine_seconds.extend([0.1, 0.1])
    two.engine_seconds.append(0.1)  # the host never ran it here: its time in the verdict counts
    found = GuardReport.of([one, two], 60.0)
    assert (found.calls, found.host_calls, found.accelerated_share) == (20, 8, 0.6)
    assert found.saved_seconds == pytest.approx(6 * 0.2 + 6 * 0.4)
    assert found.to_json()["saved_seconds"] == found.saved_seconds


def test_a_slower_engine_saves_nothing() -> None:
    """An estimate below nothing is nothing."""
    one = record()
    one.host_seconds.append(0.1)
    one.engine_seconds.append(0.2)
    assert GuardReport.of([one], 1.0).saved_seconds == 0


def test_text() -> None:
    """Everything that a person asks, the tail of the log included."""
    text = GuardReport.of([record()], 1.0).as_text()
    for part in (
        "1 clusters, 10 calls, 60.0% accelerated", "c: live, runs on e: fine", "3 nodes: MatMul, Add",
        "calls: 10, of them 4 on the host", "compile 2 s, host 500 ms", "rejected: f: it is off",
        "queued +0.00 s, failed", "failed at compile, crashed (exit code -6): the worker process ended (SIGABRT)",
        "    | line two",
    ):  # fmt: skip
        assert part in text, text


def test_notebooks() -> None:
    """A table of clusters, and the whole text, with nothing that a browser takes for tags."""
    one = record("<b>")
    one.restate("a & b")
    page = GuardReport.of([one], 1.0)._repr_html_()
    row = "<td>&lt;b&gt;</td><td>live</td><td>e</td><td>10</td><td>4</td><td>a &amp; b</td>"
    assert "1 clusters, 10 calls, 60.0% accelerated" in page
    assert row in page
    assert "history: since" in page
    assert "<b>" not in page
    assert GuardReport.of([], 1.0)._repr_html_().startswith("<pre>no cluster is under guard")


def test_nothing() -> None:
    """Without clusters it says why."""
    found = GuardReport.of([], 0.0)
    assert "no cluster is under guard" in str(found)
    assert found.accelerated_share == 0.0
    assert found.to_json()["clusters"] == []


def samples(found: GuardReport) -> dict[tuple[str, ...], float]:
    """What a reader of the text gets: name and values of labels, which are in the order of their names -> value."""
    parser = pytest.importorskip("prometheus_client.parser")
    families = parser.text_string_to_metric_families(found.to_prometheus())
    return {(s.name, *s.labels.values()): s.value for f in families for s in f.samples}


def test_prometheus() -> None:
    """Every count arrives in full, however large; failures by stage and kind, and one state of all."""
    one = record()
    one.calls, one.host_calls = 1_041_078, 2**40 + 1
    read = samples(GuardReport.of([one], 1.0))
    assert read["xrt_cluster_calls_total", "c", "e", "0"] == 1_041_078
    assert read["xrt_cluster_host_calls_total", "c", "e", "0"] == 2**40 + 1
    assert read["xrt_cluster_failures_total", "c", "e", "crashed", "0", "compile"] == 1
    states = {labels[-1]: value for labels, value in read.items() if labels[0] == "xrt_cluster_state"}
    assert states == {s.value: float(s is State.LIVE) for s in State}


def test_prometheus_escapes_names() -> None:
    """A label's value may hold anything."""
    name = 'a"b\\c\nd'
    assert samples(GuardReport.of([record(name)], 1.0))["xrt_cluster_calls_total", name, "e", "0"] == 10


def test_prometheus_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package, the error has the line that installs it."""
    for name in ("prometheus_client", "prometheus_client.core"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(OptionError, match=r"pip install 'xrt-core\[metrics\]'"):
        GuardReport.of([record()], 1.0).to_prometheus()

"""A score card as an HTML page and as badges, from the JSON that `ScoreCard.as_dict` gives."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from xrt_core.errors import printable

_STYLE: Final = """
:root { color-scheme: light dark; --page: #fff; --text: #1c2733; --soft: #5b6975; --line: #d5dce2; --good: #2e7d32;
  --bad: #c62828; --bar: #e6eaee; }
@media (prefers-color-scheme: dark) { :root { --page: #10161c; --text: #e4eaf0; --soft: #9fb0bf; --line: #2c3843;
  --good: #66bb6a; --bad: #ff8a80; --bar: #33414d; } }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 24px 16px 48px; max-width: 1000px;
  color: var(--text); background: var(--page); }
h1 { font-size: 22px; margin: 0; } h2 { font-size: 17px; margin: 32px 0 8px; }
p { margin: 4px 0; } .soft { color: var(--soft); } .scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: 3px 12px 3px 0; border-bottom: 1px solid var(--line); vertical-align: top;
  overflow-wrap: anywhere; }
th.number, td.number { text-align: right; white-space: nowrap; }
.bar { display: inline-block; width: 120px; height: 10px; border-radius: 5px; background: var(--bar);
  overflow: hidden; }
.bar span { display: block; height: 10px; background: var(--good); }
.failed { color: var(--bad); font-weight: 600; } .passed { color: var(--good); }
"""
_GREEN: Final = "#2e7d32"
_AMBER: Final = "#9a6700"
_RED: Final = "#c62828"
_HIGH: Final = 0.8
_LOW: Final = 0.4


def card_page(card: Mapping[str, Any]) -> str:
    """Return a self-contained HTML page: the score by family and dtype, what fails, and what is missing and why."""
    summary, total = card["summary"], len(card["operators"])
    title = f"{card['engine']} {card['version']} on {card['device'] or 'no device'}"
    parts = [
        f"<h1>{_text(title)}</h1>",
        f"<p>{card['score']:.0%} of {total} operators: taken, and every case that ran has passed.</p>",
        f'<p class="soft">{summary["claimed"]} operators taken, {summary["passed"]} passed, '
        f"{summary['failed']} failed, {summary['xfailed']} known to fail. "
        f"Tests of the contract: {_counts(card['tests'])}.</p>",
        "<h2>By family of operators</h2>",
        _table(
            ("family", "", "#operators", "#taken", "#passed"),
            (
                (_text(f), _bar(r["passed"], r["operators"]), r["operators"], r["taken"], r["passed"])
                for f, r in card["families"].items()
            ),
        ),
        "<h2>By data type</h2>",
        _table(
            ("dtype", "", "#cases", "#taken", "#run", "#passed"),
            (
                (_text(d), _bar(r["taken"], r["cases"]), r["cases"], r["taken"], r["run"], r["passed"])
                for d, r in card["dtypes"].items()
            ),
        ),
        '<p class="soft">The bar is the share of cases that the engine takes; a sample of them runs.</p>',
        "<h2>What fails</h2>",
        _table(("test", "reason"), ((_text(t), _text(card["reasons"].get(t, ""))) for t in failed(card))),
        "<h2>What is missing</h2>",
        _table(
            ("operator", "reason"),
            ((_text(o), _text(r["reason"])) for o, r in card["operators"].items() if r["state"] == "not claimed"),
        ),
        "<h2>Contract, faults and fuzzing</h2>",
        _table(
            ("test", "outcome", "reason"),
            (
                (_text(t), f'<span class="{_text(o)}">{_text(o)}</span>', _text(card["reasons"].get(t, "")))
                for t, o in card["contract"].items()
            ),
        ),
    ]
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8" /><title>{_text(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1" />'
        f"<style>{_STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def failed(card: Mapping[str, Any]) -> list[str]:
    """Return the keys of what failed: tests of the contract by their whole names, and cases of operators."""
    contract = [t for t, o in card["contract"].items() if o == "failed"]
    names = {t.partition("[")[0] for t in contract}
    return [*contract, *(k for k in dict.fromkeys(card["failures"]) if k not in names)]


def badges(card: Mapping[str, Any]) -> dict[str, str]:
    """Return badges as SVG by file name: the share of operators, and whether anything fails."""
    score, wrong = card["score"], len(failed(card))
    colour = _GREEN if score >= _HIGH else _AMBER if score >= _LOW else _RED
    return {
        "operators.svg": badge("XRT operators", f"{score:.0%}", colour),
        "conformance.svg": badge("XRT conformance", *((f"{wrong} failed", _RED) if wrong else ("passed", _GREEN))),
    }


def badge(name: str, value: str, colour: str) -> str:
    """Return a badge of two fields as SVG. colour: of the second."""
    left, right = (round(6.6 * len(t)) + 14 for t in (name, value))
    label = html.escape(f"{name}: {value}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" aria-label="{label}">'
        f'<title>{label}</title><clipPath id="r"><rect width="{left + right}" height="20" rx="3"/></clipPath>'
        f'<g clip-path="url(#r)"><rect width="{left}" height="20" fill="#44515c"/>'
        f'<rect x="{left}" width="{right}" height="20" fill="{colour}"/></g>'
        '<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11" text-anchor="middle">'
        f'<text x="{left / 2:g}" y="14">{html.escape(name)}</text>'
        f'<text x="{left + right / 2:g}" y="14">{html.escape(value)}</text></g></svg>\n'
    )


def _counts(counted: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {o}" for o, n in sorted(counted.items())) or "none"


def _bar(part: int, whole: int) -> str:
    share = part / whole if whole else 0.0
    return f'<span class="bar" title="{share:.0%}"><span style="width:{share:.0%}"></span></span>'


def _table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table of cells that are HTML; a column whose header begins with # is numeric."""
    marks = [' class="number"' if h.startswith("#") else "" for h in heads]
    lines = ["".join(f"<td{m}>{c}</td>" for c, m in zip(row, marks, strict=True)) for row in rows]
    if not lines:
        return "<p>Nothing.</p>"
    head = "".join(f"<th{m}>{_text(h.lstrip('#'))}</th>" for h, m in zip(heads, marks, strict=True))
    return '<div class="scroll"><table>' + "\n".join(f"<tr>{line}</tr>" for line in [head, *lines]) + "</table></div>"


def _text(text: str) -> str:
    return html.escape(printable(str(text), lines=False))

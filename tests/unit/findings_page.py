"""Writes docs/findings.md from the rules: `PYTHONPATH=.build/collections python THIS`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

from ansible_collections.gpuhost.inference.plugins.module_utils._findings import FAMILIES
from public_reports import REPORTS

PAGE = Path(__file__).parents[2] / "docs" / "findings.md"
HEAD = """\
# Findings

`gpu_host_info` returns `findings`, and the report shows them: what is wrong or risky on a host,
each with what was read, why it matters and what to do. An *error* keeps something from working, or
will; a *warning* needs a look; a *note* is good to know. Nothing is concluded from what could not
be read; `part-unread` and `health-unknown` speak of that.

This page is made from the rules by `tests/unit/findings_page.py`.
"""
REPORTS_HEAD = """\
## Public reports

What went wrong for others, and what answers it here: a finding shows it, a guard of the modules
`gpu` and `gpu_reset` refuses it before anything is written. A report stands for its class.
"""


def page() -> str:
    """Return the page."""
    return "\n".join([HEAD, *_rules(), REPORTS_HEAD, *_reports()])


def _rules() -> Iterator[str]:
    seen: dict[str, list[str]] = {}
    for reports in REPORTS.values():
        for report in reports:
            for rule in report.rules:
                seen.setdefault(rule, []).extend(report.where)
    for title, rules in FAMILIES:
        yield f"## {title}\n"
        for rule in rules:
            yield f"### {rule.id} ({rule.severity})\n"
            seen_at = f" Seen in {_places(seen[rule.id])}." if rule.id in seen else ""
            yield _paragraph(rule.why)
            yield _paragraph(f"**What to do:** {rule.remedy}")
            yield _paragraph(f"**Source:** {_place(rule.reference)}.{seen_at}")


def _paragraph(text: str) -> str:
    lines = textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines) + "\n"


def _reports() -> Iterator[str]:
    for title, reports in REPORTS.items():
        yield f"### {title}\n"
        yield "| what happened | findings | guards | besides |\n|---|---|---|---|"
        for report in reports:
            yield (
                f"| {report.happened} ({_places(report.where)}) "
                f"| {_codes(report.rules)} | {_codes(report.guards)} | {report.otherwise} |"
            )
        yield ""


def _codes(ids: Iterable[str]) -> str:
    return ", ".join(f"`{one}`" for one in ids)


def _places(places: Iterable[str]) -> str:
    return ", ".join(_place(place) for place in dict.fromkeys(places))


def _place(place: str) -> str:
    project, _hash, number = place.partition("#")
    if number.isdigit() and project.count("/") == 1:
        return f"[{place}](https://github.com/{project}/issues/{number})"
    address, comma, part = place.partition(", ")
    return f"<{address}>{comma}{part}" if address.startswith("https://") else place


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")

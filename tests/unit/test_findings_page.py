"""The page of findings is up to date, and names nothing that does not exist."""

from __future__ import annotations

import re

import findings_page
from ansible_collections.gpuhost.inference.plugins.module_utils._findings import RULES
from ansible_collections.gpuhost.inference.plugins.module_utils._guards import GUARDS
from public_reports import REPORTS

ALL = [report for reports in REPORTS.values() for report in reports]


def test_the_page_is_what_the_rules_say() -> None:
    written = findings_page.PAGE.read_text(encoding="utf-8")
    assert written == findings_page.page(), f"write it anew: {findings_page.__doc__}"


def test_reports_are_answered_by_rules_and_guards_there_are() -> None:
    assert {one for report in ALL for one in report.rules} <= {rule.id for rule in RULES}
    assert {one for report in ALL for one in report.guards} <= {guard.id for guard in GUARDS}


def test_every_report_has_an_answer() -> None:
    assert [
        report for report in ALL if not (report.rules or report.guards or report.otherwise)
    ] == []


def test_every_guard_answers_a_report() -> None:
    # what these refuse was not reported in public
    assert {guard.id for guard in GUARDS} - {one for report in ALL for one in report.guards} <= {
        "foreign-type",
        "fsp-identity",
        "trial-running",
    }


def test_a_report_stands_once_with_its_place() -> None:
    places = [place for report in ALL for place in report.where]
    assert len(places) == len(set(places))
    for place in places:
        if "#" in place:
            assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", place), place


def test_a_place_is_a_link_where_it_can_be() -> None:
    place = findings_page._place
    assert place("https://a.b/c, AMD SEV") == "<https://a.b/c>, AMD SEV"
    assert place("https://a.b/c") == "<https://a.b/c>"
    assert place("a/b#1") == "[a/b#1](https://github.com/a/b/issues/1)"
    assert place("modprobe.d(5), options") == "modprobe.d(5), options"

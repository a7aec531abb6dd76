"""Options of `make test-sglang`, and the list at its end."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="write tests/fixtures/sglang anew")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    recording = terminalreporter.config.getoption("--record")
    passed = "Recorded from the real server" if recording else "Confirmed by the real server"
    for outcome, title in (("passed", passed), ("failed", "NOT confirmed")):
        names = [r.nodeid.partition("::")[2] for r in terminalreporter.stats.get(outcome, [])]
        if names:
            terminalreporter.section(title)
            terminalreporter.write_line("\n".join(names))

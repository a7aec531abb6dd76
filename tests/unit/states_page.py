"""Writes docs/sglang_states.md from the module: `PYTHONPATH=.build/collections python THIS`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from ansible_collections.gpuhost.inference.plugins.modules import sglang_info

PAGE = Path(__file__).parents[2] / "docs" / "sglang_states.md"
HEAD = """\
# States of an SGLang server

`sglang_info` returns one of these as `server.state`, with a sentence in `server.reason` and what
each witness said in `witnesses`. The service is judged first, then a start that cannot
succeed any more, the port, `/health`, and last what the server answers. What could not be looked at
is no evidence for a server that is ready.

This page is made from the module's documentation by `tests/unit/states_page.py`.

| state | what it means | which witnesses decide it | next step |
|---|---|---|---|
"""
# State: who decides it, and what to do
ROWS = {
    "absent": (
        "systemd knows no unit of that name, and it does not run",
        "check the option `unit`, or run the role `sglang`",
    ),
    "stopped": (
        "systemd: inactive, or deactivating while the journal tells of no request that is left",
        "`systemctl start`; what `reason` names on its port or GPUs must end before",
    ),
    "draining": (
        "the journal has the signal to end; systemd or `/health` (503) says that it is not over",
        "wait, up to the unit's `TimeoutStopSec`",
    ),
    "failed": (
        "systemd: failed, restarting, or a unit it cannot read; or the journal has a line that "
        "no run survives; or the kernel's table of sockets shows another process on its port; "
        "or a phase of the start took too long",
        "`reason` has the line of the log that explains it; mend that, then `systemctl start`",
    ),
    "unreachable": (
        "no connection, or another address than the one that is asked in the table of sockets",
        "check `url`, the flags `host` and `port`, and firewalls",
    ),
    "loading": (
        "systemd: its process runs; the connection is refused; the journal tells how far it is",
        "wait; limit it with `loading_timeout`",
    ),
    "warming": (
        "`/health` answers 503 at once, and the journal has not said that it is ready",
        "wait; limit it with `warming_timeout`",
    ),
    "hung": (
        "`/health` has no answer or 503 only after seconds, and neither counters, nor log, nor "
        "a compiler shows work",
        "look whether it stays so; then restart it",
    ),
    "degraded": (
        "`/health` is slow while counters or log show work; or the answer of `/health`, of "
        "`/v1/models` or of a generation is wrong; or who listens on the port cannot be seen",
        "`reason` says what is wrong; wait when it is busy, look as root when the port's owner "
        "is not known",
    ),
    "ready": (
        "`/health` answers 200, no witness contradicts; with `model_id` the model is listed, "
        "with `generate` a text came",
        "none",
    ),
}


def documented() -> dict[str, str]:
    """Return what each state means by the module's documentation."""
    state: dict[str, Any] = yaml.safe_load(sglang_info.RETURN)["server"]["contains"]["state"]
    pairs = (line.split(" - ", 1) for line in state["description"])
    meanings = {name[2:-1]: re.sub(r"[VOC]\(([^)]*)\)", r"`\1`", text) for name, text in pairs}
    if sorted(meanings) != sorted(state["choices"]):
        raise SystemExit(f"states are documented as {sorted(meanings)}, not {state['choices']}")
    return meanings


def page() -> str:
    """Return the page."""
    return HEAD + "".join(_rows())


def _rows() -> Iterator[str]:
    meanings = documented()
    for state, (witnesses, step) in ROWS.items():
        yield f"| `{state}` | {meanings[state].rstrip('.')} | {witnesses} | {step} |\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

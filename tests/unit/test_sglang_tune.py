"""The role sglang_tune on this machine: what it restarts, measures, decides, keeps and puts back.

systemd, the role that starts the server and the benchmark are stand-ins, with the rates of the
lab's table; plan, verdict and files are real.
"""

from __future__ import annotations

import csv
import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from plays import ROOT, own_collection, run_playbook

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the role gives files to root")

ON = {"name": "on", "mtp": True}
PLAY = """
- hosts: all
  connection: local
  gather_facts: false
  tasks:
    - ansible.builtin.import_role:
        name: gpuhost.inference.sglang_tune
"""
SYSTEMCTL = """#!/bin/sh
echo "$@" >> HERE/called
case "$1" in
  show) echo LoadState=loaded; echo "ActiveState=$(cat HERE/state)" ;;
  stop) echo inactive > HERE/state ;;
esac
"""
SERVE = """
- ansible.builtin.shell:
    cmd: |
      state='{{ sglang_mtp_state | default("present") }}'
      declared='{{ "" if sglang_max_running_requests is defined else " declared" }}'
      if [ "$(cat HERE/stuck)" = "$state$declared" ]; then exit 1; fi
      echo active > HERE/state
      echo '{{ sglang_mtp_state | default("present") }}
      {{- " %s" % sglang_max_running_requests if sglang_max_running_requests is defined
      }}' >> HERE/served
- ansible.builtin.set_fact:
    sglang_ready:
      server:
        speculation: {algorithm: "{{ 'EAGLE' if mtp else none }}"}
        effective_max_running_requests: "{{ 24 if mtp else 45 }}"
  vars:
    mtp: "{{ sglang_mtp_state | default('present') == 'present' }}"
"""
BENCH = """#!/usr/bin/python
# WANT_JSON
import json, pathlib, sys
here = pathlib.Path("HERE")
asked = json.loads(pathlib.Path(sys.argv[1]).read_text())
if asked.get("_ansible_check_mode"):
    short = int(asked["output_tokens"]) < 16
    print(json.dumps({"failed": short, "msg": "output_tokens must be at least 16"}))
    sys.exit()
name = f"{asked['arm']}-{asked['start'] or 1}"
broken = here / "broken"
if broken.exists() and broken.read_text() == name:
    print(json.dumps({"failed": True, "msg": "the server went away"}))
    sys.exit()
mtp = (here / "served").read_text().split()[-2:][0] == "present"
rates = {1: 79, 4: 277, 8: 473, 16: 732, 32: 1009, 45: 1135}
if mtp:
    rates = {1: 113, 4: 337, 8: 506, 16: 676, 24: 760}
luck = 1 + 0.004 * (int(asked["start"] or 1) % 2) - 0.002
file = pathlib.Path(asked["results"]) / f"{name}.json"
fresh = asked["again"] == "all" or not file.exists()
kind = asked["kinds"][0] if len(asked["kinds"]) == 1 else "mixed"
run = {
    "schema": 1, "arm": asked["arm"], "start": int(asked["start"] or 1), "at": f"{name} {here}",
    "host": "h", "server": asked["url"], "client": {"name": "own", "version": "1"}, "seed": 1,
    "corpus": {"sha256": "ab", "kinds": []},
    "equal": {"sglang": VERSION, "page_size": PAGES if mtp else 1},
    "apart": {"effective_max_running_requests": 24 if mtp else 45}, "points": [], "rejected": [],
    "flush": asked.get("flush", True),
} if fresh else json.loads(file.read_text())
for one in asked["concurrencies"]:
    speed = rates.get(int(one), 100.0) * luck * SPEED
    spread = {key: 10.0 for key in ("mean", "median", "p90", "p95", "p99")}
    run["points"].append({
        "concurrency": int(one), "prompts": kind, "requests": 32, "duration_s": 1.0,
        "steady_s": 1.0, "output_tok_s": speed, "per_request_tok_s": speed / int(one),
        **{key: spread for key in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")},
        "in_flight": float(one), "accept_length": 2.3 if mtp else None, "running_max": None,
        "output_tokens": {"asked": 512, "median": 512.0}, "reasons": [],
    })
file.write_text(json.dumps(run))
told = json.dumps({"run": run, "file": str(file)}).replace(asked["api_key"], "********")
print(json.dumps({"changed": True, **json.loads(told), "key": asked["api_key"]}))
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    linked = ("plugins/module_utils", "plugins/filter", "meta")
    own = own_collection(tmp_path, *linked, "plugins/modules/sglang_flags_info.py")
    (own / "plugins/plugin_utils").symlink_to(ROOT / "plugins/plugin_utils")
    (own / "roles/sglang_mtp/tasks").mkdir(parents=True)
    (own / "roles/sglang_tune").symlink_to(ROOT / "roles/sglang_tune")
    (own / "roles/sglang_mtp/tasks/main.yml").write_text(SERVE.replace("HERE", str(tmp_path)))
    be(tmp_path, 1.0, "0.5.23")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/systemctl").write_text(SYSTEMCTL.replace("HERE", str(tmp_path)))
    (tmp_path / "bin/systemctl").chmod(0o755)
    (tmp_path / "state").write_text("active\n")
    (tmp_path / "served").write_text("")
    (tmp_path / "stuck").write_text("")
    (tmp_path / "play.yml").write_text(PLAY)
    return tmp_path


def be(here: Path, speed: float, version: str, pages: int = 1) -> None:
    """Have the server be so fast, of this release, and have pages of this size with MTP."""
    text = BENCH.replace("HERE", str(here)).replace("SPEED", str(speed))
    text = text.replace("PAGES", str(pages))
    module = here / "collections/ansible_collections/gpuhost/inference/plugins/modules"
    (module / "sglang_benchmark.py").write_text(text.replace("VERSION", repr(version)))


def tune(here: Path, check: bool = False, extra: dict[str, Any] | None = None, **more: Any) -> str:
    """Run the role with these variables in the inventory; return what it said."""
    return tune_all(here, {"localhost": more}, extra, ["--check"] if check else [])


def tune_all(
    here: Path,
    hosts: dict[str, dict[str, Any]],
    extra: dict[str, Any] | None = None,
    options: Sequence[str] = (),
) -> str:
    """Run the role for several hosts at once, which all are this machine."""
    variables = {
        "ansible_connection": "local",
        "ansible_python_interpreter": sys.executable,
        "sglang_api_key": "not-for-anybody",
        "sglang_tune_allowed": True,
        "sglang_tune_minutes": 180,
        "sglang_tune_blocks": 1,
        "sglang_tune_dir": f"{here}/reports",
    }
    inventory = {"all": {"vars": variables, "hosts": hosts}}
    (here / "hosts.json").write_text(json.dumps(inventory))
    said = run_playbook(
        here,
        here / "play.yml",
        str(here / "hosts.json"),
        {"__sglang_tune_home": f"{here}/tune", **(extra or {})},
        options=options,
    )
    assert "not-for-anybody" not in said
    (here / "said").write_text(said)
    return " ".join(said.split())


def served(here: Path) -> list[str]:
    return (here / "served").read_text().splitlines()


def results(here: Path) -> list[dict[str, Any]]:
    files = sorted((here / "reports").glob("localhost-sglang-tune-*.json"))
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize("more", [{"check": True}, {"sglang_tune_allowed": False}], ids=str)
def test_nothing_is_done_before_it_is_allowed(here: Path, more: dict[str, Any]) -> None:
    said = tune(here, **more)
    assert "next: off on on off, each at C=1," in said
    assert "failed=0" in said
    assert served(here) == []
    assert not (here / "tune").exists()
    assert not (here / "called").exists()


def test_the_faster_one_for_the_load_is_kept(here: Path) -> None:
    said = tune(here, sglang_tune_load={1: 0.9, 4: 0.1}, sglang_mtp_state="absent")
    # each start is one of its own, with the same limit; then the winner, with its own
    assert served(here) == ["absent 48", "present 48", "present 48", "absent 48", "present"]
    assert "keep on: it gains more than 5 % over off" in said
    assert "sglang now runs on. Write these lines into host_vars/localhost.yml" in said
    # each is a line of its own; the limit is one of them, as none is declared
    lines = [
        "sglang_max_running_requests: 48",
        "sglang_mtp_state: present",
        "sglang_mtp_num_steps: 3",
        "sglang_mtp_flags: {}",
    ]
    assert ", ".join(f'"{line}"' for line in lines) in said
    assert (here / "called").read_text().count("stop sglang.service") >= 2
    (result,) = results(here)
    assert result["verdict"]["winner"] == "on"
    assert [run["start"] for run in result["runs"]] == [1, 1, 2, 2]
    assert [run["points"][0]["prompts"] for run in result["kinds"]] == ["code", "chat", "reasoning"]
    (table,) = (here / "reports").glob("*.csv")
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert {row["arm"] for row in rows} == {"off", "on"}
    assert float(rows[0]["output_tok_s"]) == pytest.approx(79, rel=0.01)
    # the next run begins anew
    assert not (here / "tune/sglang/runs").exists()


def test_without_a_winner_it_stays_as_it_is_declared(here: Path) -> None:
    said = tune(here, sglang_tune_concurrencies=[1, 8, 32, 128])
    assert served(here)[-1] == "present"
    assert "depends: on gains at C=1" in said
    (result,) = results(here)
    assert (result["verdict"]["winner"], result["verdict"]["drop_at"]) == (None, [32, 45, 64, 128])
    # each is measured up to what it runs at once
    levels = {r["arm"]: [p["concurrency"] for p in r["points"]] for r in result["runs"]}
    assert levels == {"off": [1, 8, 32, 45], "on": [1, 8, 24]}
    words = {p["name"]: p["verdict"] for p in result["verdict"]["profiles"]}
    assert words["single-user"] == "keep"
    assert words["batch"] == "drop"


def test_levels_above_the_limit_are_measured_once(here: Path) -> None:
    levels = [1, 45, 48, 64, 96]
    said = tune(here, sglang_tune_concurrencies=levels, sglang_tune_by_kind=False)
    assert "next: off on on off, each at C=1, 45, 48; about" in said
    (result,) = results(here)
    measured = {r["arm"]: [p["concurrency"] for p in r["points"]] for r in result["runs"]}
    assert measured == {"off": [1, 45], "on": [1, 24]}
    # replicas run that many each, so nothing is known before a start
    replicas = {"sglang_extra_flags": {"dp-size": 2}}
    said = tune(here, check=True, sglang_tune_concurrencies=levels, **replicas)
    assert "each at C=1, 45, 48, 64, 96; about" in said


def test_a_failure_puts_the_server_back_and_another_run_goes_on(here: Path) -> None:
    (here / "broken").write_text("on-2")
    said = tune(here, sglang_mtp_state="absent")
    assert "Not all could be done. Measure one concurrency: the server went away." in said
    assert "serves again as it is declared; 2 starts are kept" in said
    assert served(here) == ["absent 48", "present 48", "present 48", "absent"]
    (here / "broken").unlink()
    (here / "served").write_text("")
    tune(here, sglang_mtp_state="absent")
    assert served(here)[:2] == ["present 48", "absent 48"]
    (result,) = results(here)
    assert [(run["arm"], run["start"]) for run in result["runs"]] == [
        ("off", 1),
        ("on", 1),
        ("on", 2),
        ("off", 2),
    ]


def test_a_server_that_cannot_be_put_back_hides_no_failure(here: Path) -> None:
    (here / "broken").write_text("on-1")
    (here / "stuck").write_text("absent declared")
    said = tune(here, sglang_mtp_state="absent")
    told = said.rpartition("fatal: ")[2]
    assert "Measure one concurrency: the server went away. Then sglang could not be put" in told
    assert "non-zero return code" in told
    assert "1 starts are kept" in told
    assert "serves again" not in said


@pytest.mark.parametrize(
    "extra", [{"sglang_mtp_state": "absent"}, {"sglang_mtp_num_steps": 3}, {"sglang_mtp_flags": {}}]
)
def test_arms_that_are_overruled_are_not_measured(here: Path, extra: dict[str, Any]) -> None:
    steps = {"name": "steps-1", "mtp": True, "num_steps": 1, "flags": {"page-size": 64}}
    said = tune(here, extra=extra, sglang_tune_arms=[{"name": "off", "mtp": False}, ON, steps])
    assert f"{next(iter(extra))} cannot differ between the arms" in said
    assert served(here) == []


def test_a_release_that_is_slower_is_named(here: Path) -> None:
    tune(here, sglang_tune_by_kind=False)
    be(here, 0.7, "0.5.24")
    results_path(here).rename(here / "reports/localhost-sglang-tune-0.json")
    tune(here, sglang_tune_by_kind=False)
    before, now = results(here)
    assert before["history"] == []
    assert {one["arm"]: one["verdict"] for one in now["history"]} == {
        "off": "slower",
        "on": "slower",
    }
    assert now["history"][0]["changed"][0]["key"] == "sglang"


def results_path(here: Path) -> Path:
    (path,) = (here / "reports").glob("*.json")
    return path


LEFT = "__sglang_tune_spent"  # minutes that went by


def test_time_that_the_last_start_overran_spoils_nothing(here: Path) -> None:
    spent = "{{ 200 if __sglang_tune_runs | length >= 4 else 0 }}"
    said = tune(here, sglang_tune_load={1: 1}, sglang_tune_by_kind=False, extra={LEFT: spent})
    assert "keep on: it gains" in said
    assert len(results(here)) == 1


def test_starts_of_a_time_that_became_too_short_are_kept(here: Path) -> None:
    spent = "{{ 181 if __sglang_tune_runs | length >= 1 else 0 }}"
    said = tune(here, sglang_mtp_state="absent", extra={LEFT: spent})
    assert "not enough time" in said
    assert "Raise sglang_tune_minutes" in said
    assert served(here) == ["absent 48", "absent"]
    assert results(here) == []
    assert [file.name for file in (here / "tune/sglang/runs").iterdir()] == ["off-1.json"]


def test_a_winner_that_does_not_start_is_replaced_by_what_is_declared(here: Path) -> None:
    (here / "stuck").write_text("present declared")
    said = tune(here, sglang_tune_load={1: 1}, sglang_mtp_state="absent")
    assert served(here)[-1] == "absent"
    assert "serves again as it is declared; 4 starts are kept" in said
    # what was found is not lost
    (result,) = results(here)
    assert result["verdict"]["winner"] == "on"


REFUSED: dict[str, dict[str, Any]] = {
    "margin is 5.0: it must be a share": {"sglang_tune_margin": 5},
    "sglang_tune_concurrencies: write a list": {"sglang_tune_concurrencies": "16"},
    "sglang_tune_load: write a list": {"sglang_tune_load": "1=0.7,8=0.3"},
    "the load has 1: -1, which is no share": {"sglang_tune_load": {1: -1}},
    "all shares of the load are 0": {"sglang_tune_load": {1: 0}},
    "sglang_tune_kinds: write a list": {"sglang_tune_kinds": "code,chat"},
    "sglang_tune_may_differ: write a list": {"sglang_tune_may_differ": "page_size"},
    "names in quotes": {"sglang_tune_arms": [{"name": False, "mtp": False}, ON]},
    "sglang_tune_arms has 0 entries": {"sglang_tune_arms": []},
    "sglang_tune_arms has 1 entries": {"sglang_tune_arms": [ON]},
    "off-1, off-2 has num_steps or flags": {
        "sglang_tune_arms": [
            {"name": "off", "mtp": False},
            {"name": "off-1", "mtp": False, "flags": {"page-size": 64}},
            {"name": "off-2", "mtp": False, "num_steps": 1},
            {**ON, "num_steps": 1},
        ]
    },
    "sglang runs on 2 machines": {"sglang_nnodes": 2},
    "sglang runs on 3 machines": {"sglang_extra_flags": {"nnodes": 3}},
    "sglang_state is absent": {"sglang_state": "absent"},
    "http://127.0.0.1:9/metrics shows no load (-1)": {"sglang_tune_watch": 60, "sglang_port": 9},
    "results cannot be written": {"sglang_tune_dir": "/dev/null/reports"},
    "not enough time: one block of two starts an arm at C=1, 8, 32, 48 needs": {
        "sglang_tune_minutes": 10
    },
}


def test_what_cannot_end_well_is_refused_before(here: Path) -> None:
    hosts = {f"host{number}": more for number, more in enumerate(REFUSED.values())}
    said = tune_all(here, hosts)
    for host, told in zip(hosts, REFUSED):
        assert any(
            told in part
            for part in said.split("fatal: ")
            if part.startswith((f"[{host}]", f"[{host} "))
        )
    assert served(here) == []


def test_nulls_are_what_is_not_given(here: Path) -> None:
    nulls = dict.fromkeys(["context_tokens", "requests"])
    said = tune(here, check=True, **{f"sglang_tune_{name}": one for name, one in nulls.items()})
    assert "next: off on on off, each at C=1," in said
    assert "failed=0" in said


def test_its_clock_is_right_in_every_time_zone(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    told = "    - ansible.builtin.debug:\n        msg: began {{ __sglang_tune_began }}.\n"
    (here / "play.yml").write_text(PLAY + told)
    found = re.search(r"began (\d+)", tune(here, check=True))
    assert found
    assert time.time() - 60 < int(found[1]) <= time.time()


def test_an_earlier_result_and_odd_keys_spoil_nothing(here: Path) -> None:
    (here / "reports").mkdir()
    (here / "reports/localhost-sglang-tune-0.json").write_text('{"runs": [')
    keys = {"sglang_api_key": "tune", "sglang_admin_api_key": "another"}
    said = tune(here, sglang_tune_load={1: 1}, sglang_tune_by_kind=False, **keys)
    assert "cannot be compared with localhost-sglang-tune-0.json" in said
    (here / "reports/localhost-sglang-tune-0.json").unlink()
    (result,) = results(here)
    assert (result["verdict"]["winner"], result["history"]) == ("on", [])
    # a key that is a word of the path hides nothing, and only the admin key may empty the cache
    assert result["runs"][0]["at"].endswith(str(here))
    assert {run["flush"] for run in result["runs"]} == {False}


def test_arms_that_cannot_be_compared_are_told_after_one_start_of_each(here: Path) -> None:
    be(here, 1.0, "0.5.23", pages=64)
    said = tune(here, sglang_mtp_state="absent")
    assert "page_size" in said
    assert "sglang_tune_may_differ" in said
    assert served(here) == ["absent 48", "present 48", "absent"]
    (here / "served").write_text("")
    said = tune(here, sglang_tune_may_differ=["page_size"], sglang_tune_load={1: 1})
    assert served(here)[:3] == ["present 48", "absent 48", "present"]


def test_one_of_several_arms_that_cannot_be_compared_is_told_as_early(here: Path) -> None:
    be(here, 1.0, "0.5.23", pages=64)
    arms = [{"name": "off", "mtp": False}, {"name": "none", "mtp": False}, ON]
    said = tune(here, sglang_tune_arms=arms, sglang_mtp_state="absent")
    assert "off and on cannot be compared, as these differ" in said
    assert '"on": 64' in said.replace("\\", "")
    assert served(here) == ["absent 48", "absent 48", "present 48", "absent"]


def test_starts_of_another_release_are_not_mixed_with_those_of_now(here: Path) -> None:
    (here / "broken").write_text("on-2")
    tune(here)
    (here / "broken").unlink()
    be(here, 1.0, "0.5.24")
    said = tune(here)
    assert f"2 starts are kept in {here}/tune/sglang/runs" in said
    assert "the starts of the arm on differ in sglang (0.5.23, 0.5.24)" in said
    assert results(here) == []


class _Models(BaseHTTPRequestHandler):
    """A server that is ready, and serves something to four at once."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path in ("/v1/models", "/metrics") else 404)
        self.end_headers()
        self.wfile.write(b"sglang:num_running_reqs 4.0\n")

    def log_message(self, *_words: object) -> None:
        """Be quiet."""


SERVER_ARGS = """
class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--speculative-adaptive", action="store_true")
"""


@contextmanager
def serving() -> Iterator[int]:
    """Have such a server on a port."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Models) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield server.server_port
        finally:
            server.shutdown()


@pytest.mark.parametrize("allowed", [True, False], ids=["allowed", "not allowed"])
def test_what_the_benchmark_refuses_stops_no_server(here: Path, allowed: bool) -> None:
    with serving() as port:
        said = tune(
            here,
            sglang_tune_allowed=allowed,
            sglang_tune_output_tokens=8,
            sglang_extra_flags={"port": port},
        )
    assert "output_tokens must be at least 16" in said
    assert served(here) == []


def test_flags_that_the_release_does_not_know_stop_no_server(here: Path) -> None:
    package = here / "venv/lib/python3.12/site-packages/sglang/srt"
    package.mkdir(parents=True)
    (here / "venv/bin").mkdir()
    (here / "venv/bin/python").touch()
    (package / "server_args.py").write_text(SERVER_ARGS)
    typo = {**ON, "name": "typo", "flags": {"speculative-adaptiv": True}}
    python = f"{here}/venv/bin/python"
    said = tune(here, sglang_tune_arms=[{"name": "off", "mtp": False}, typo], sglang_python=python)
    assert "sglang_tune_arms: --speculative-adaptiv" in said
    assert served(here) == []


def test_the_load_is_learnt_before_the_time_counts(here: Path) -> None:
    later = "{{ 99999 if __sglang_tune_looks is defined else 0 }}"
    with serving() as port:
        said = tune(
            here,
            extra={"__sglang_tune_clock": later},
            sglang_tune_allowed=False,
            sglang_tune_watch=10,
            sglang_port=port,
        )
    assert "next: off on on off, each at C=4; about" in said
    assert "for the load C 4: 100 %" in said


def test_a_table_of_points_runs_nothing(tmp_path: Path) -> None:
    """What a host has kept is opened as a table on somebody's desk."""
    evil = [
        "=HYPERLINK(1)",
        " @SUM(1)",
        "+1",
        "-cmd",
        "a,b",
        'x"y',
        "two\nlines",
        "a;b",
        "\x1b[31m",
    ]
    times = dict.fromkeys(("median", "p95"), 0.0)
    names = ("output_tok_s", "per_request_tok_s", "accept_length", "in_flight", "running_max")
    points = [
        {
            **dict.fromkeys(names, None if text == "+1" else 0.0),
            "concurrency": 1,
            "prompts": text,
            "ttft_ms": times,
            "tpot_ms": times,
            "reasons": [{"code": text}],
        }
        for text in evil
    ]
    run = {"arm": "off", "start": 1, "at": "=1+1", "points": points, "rejected": []}
    (tmp_path / "result.json").write_text(json.dumps({"runs": [run]}))
    template = Path(__file__).parents[2] / "roles/sglang_tune/templates/points.csv.j2"
    (tmp_path / "play.yml").write_text(f"""
- hosts: localhost
  connection: local
  gather_facts: false
  tasks:
    - ansible.builtin.template: {{src: {template}, dest: {tmp_path}/points.csv}}
      vars:
        ansible_python_interpreter: "{{{{ ansible_playbook_python }}}}"
        sglang_tune_result: "{{{{ lookup('ansible.builtin.file', 'result.json') | from_json }}}}"
""")
    said = run_playbook(tmp_path, tmp_path / "play.yml")
    assert "failed=0" in said, said
    text = (tmp_path / "points.csv").read_text()
    assert text.replace("\n", "").isprintable()
    rows = list(csv.reader(text.splitlines()))
    assert {len(row) for row in rows} == {15}
    assert len(rows) == 1 + len(evil)
    fields = [field for row in rows for field in row]
    assert not [field for field in fields if field.strip()[:1] in ("=", "+", "@", "-", '"')]
    assert (rows[1][5], rows[3][5]) == ("0.0", "")  # nothing is not unknown

"""The report: what it shows, that all text is escaped, and that it only changes with the state."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import pytest
import trees
from ansible.errors import AnsibleFilterError
from ansible_collections.gpuhost.inference.plugins.filter.report import report
from ansible_collections.gpuhost.inference.plugins.module_utils._host import audit
from ansible_collections.gpuhost.inference.plugins.module_utils._kernel_log import read_blocks
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader

TEMPLATES = Path(__file__).parents[4] / "roles" / "gpu_report" / "templates"
LAYOUT = [
    {
        "name": "inference",
        "numa_node": 0,
        "driver": "nvidia",
        "iommu_type": "identity",
        "guest": {"kind": "lxc", "vmid": 100},
    }
]
SERVER: dict[str, Any] = {
    "name": "ct100",
    "server": {
        "state": "ready",
        "url": "http://10.10.10.100:30000",
        "version": "0.5.23",
        "model_id": "qwen3.5-122b",
        "pid": 4242,
        "reason": None,
        "speculation": {
            "algorithm": "NEXTN",
            "num_steps": 3,
            "accept_length": 2.4312,
            "verdict": "ok",
        },
    },
    "witnesses": [
        {"name": "unit", "said": "active for 3 min", "ok": True},
        {"name": "port", "said": "closed", "ok": False},
        {"name": "journal", "said": "not readable", "ok": None},
    ],
}


@pytest.fixture
def facts(host_tree: Callable[[str], Path]) -> dict[str, Any]:
    log = read_blocks([b"[    0.000000] Linux version 6.14.11-4-pve\n"])
    host = Reader(str(host_tree("eight-gpus")))
    result = audit(host, log, LAYOUT, "keep", observed=True)
    plain: dict[str, Any] = json.loads(json.dumps(result))
    return plain


def render(prepared: dict[str, Any]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), undefined=jinja2.StrictUndefined
    )
    return environment.get_template("report.html.j2").render(__gpu_report=prepared)


def test_the_picture_has_nodes_gpus_drivers_types_and_guests(facts: dict[str, Any]) -> None:
    nodes = report(facts, "pve1")["report"]["nodes"]
    assert [node["title"] for node in nodes] == ["NUMA node 0", "NUMA node 1"]
    first = nodes[0]["gpus"][0]
    assert (first["address"], first["driver"], first["type"]) == (
        "0000:41:00.0",
        "nvidia",
        "DMA-FQ",
    )
    assert first["guests"] == [{"label": "CT 100", "name": "inference", "state": "stopped"}]
    assert first["health"] == {"word": "healthy", "tone": "good"}
    assert nodes[1]["gpus"][3]["guests"][0]["state"] == "running"


def test_layout_shows_what_differs(facts: dict[str, Any]) -> None:
    shown = report(facts, "pve1")["report"]
    (entry,) = shown["layout"]["entries"]
    assert entry["type"] == {"wanted": "identity", "now": "DMA-FQ", "differs": True}
    assert not entry["driver"]["differs"]
    assert not entry["guest"]["differs"]
    assert len(entry["differing"]) == 4
    assert shown["pending"] == ["The playbook site: 4 GPUs are not as the layout says."]


def test_findings_of_one_rule_stand_together(facts: dict[str, Any]) -> None:
    findings = report(facts, "pve1")["report"]["findings"]
    differing = next(finding for finding in findings if finding["id"] == "type-differs")
    assert len(differing["hits"]) == 4
    order = [finding["severity"] for finding in findings]
    assert order == sorted(order, key=["error", "warning", "note"].index)


@pytest.mark.parametrize(
    ("severities", "problems", "tone"),
    [
        ([], [], "good"),
        (["note"], [], "good"),
        (["warning"], [], "attention"),
        (["warning", "error"], [], "problem"),
        ([], ["layout entry 1 has no name: give it one"], "problem"),
    ],
)
def test_the_headline_is_as_bad_as_the_worst(
    facts: dict[str, Any], severities: list[str], problems: list[str], tone: str
) -> None:
    sample = facts["findings"][0]
    facts["findings"] = [
        {**sample, "id": severity, "severity": severity} for severity in severities
    ]
    facts["layout"]["problems"] = problems
    shown = report(facts, "pve1")
    assert shown["report"]["headline"]["tone"] == tone
    assert problems == [] or problems[0] in "\n".join(shown["summary"])


def test_a_server_with_its_witnesses(facts: dict[str, Any]) -> None:
    (server,) = report(facts, "pve1", servers=[SERVER])["report"]["servers"]
    pairs = {pair["label"]: pair["value"] for pair in server["pairs"]}
    assert pairs["MTP"] == "NEXTN"
    assert pairs["Accept length"] == "2.43"
    assert [witness["tone"] for witness in server["witnesses"]] == ["good", "problem", "unknown"]


@pytest.mark.parametrize(
    ("state", "tone"), [("draining", "attention"), ("hung", "problem"), ("unreachable", "problem")]
)
def test_a_server_that_is_not_ready(facts: dict[str, Any], state: str, tone: str) -> None:
    told = {**SERVER, "server": {**SERVER["server"], "state": state, "kv_tokens": 41000}}
    (server,) = report(facts, "pve1", servers=[told])["report"]["servers"]
    assert server["tone"] == tone
    assert {"label": "Tokens in the cache", "value": "41000"} in server["pairs"]


def test_the_summary_fits_ten_lines(facts: dict[str, Any]) -> None:
    summary = report(facts, "pve1", servers=[SERVER, SERVER, SERVER])["summary"]
    assert len(summary) <= 9  # the role adds the path
    assert summary[0].startswith("pve1: Look at this (")
    told = "SGLang: ready, Model qwen3.5-122b, MTP NEXTN, MTP verdict ok, Accept length 2.43"
    assert told in summary


def later(facts: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the same host and server a little later, with other figures of the moment."""
    host, server = copy.deepcopy(facts), copy.deepcopy(SERVER)
    host["gpus"][0]["users"] = [{"pid": 7, "command": "x", "cgroup": None, "node": "/dev/nvidia0"}]
    host["guests"][2]["pid"] = 9
    host["health"]["log"].update(lines=99, last="999.0")
    host["health"]["gpus"][0]["reason"] = "another wording, 12 times"
    host["findings"][0]["evidence"] = "another wording, 12 times"
    server["server"].update(pid=9)
    server["server"]["speculation"].update(accept_length=2.5, verdict="unknown")
    server["witnesses"][0]["said"] = "active for 9 min"
    return host, server


def test_an_unchanged_state_keeps_the_report(facts: dict[str, Any]) -> None:
    old = report(facts, "pve1", servers=[SERVER], changes=["Bound a GPU"], at="1 May")
    text = json.dumps(old["report"])
    host, server = later(facts)
    for previous in (text, json.loads(text)):  # a mapping comes from ansible-core before 2.19
        new = report(host, "pve1", servers=[server], at="2 May", previous=previous)
        assert new["report"] == old["report"]
        assert render(new) == render(old)
    assert "Accept length 2.50" in "\n".join(new["summary"])


@pytest.mark.parametrize(
    "change",
    [
        lambda facts, _server: facts["gpus"][0].update(driver=None),
        lambda facts, _server: facts["gpus"][0]["iommu_group"].update(type="identity"),
        lambda facts, _server: facts["guests"][0].update(running=True),
        lambda facts, _server: facts["health"]["gpus"][0].update(fsp="failed"),
        lambda facts, _server: facts["findings"].pop(),
        lambda facts, _server: facts["host"].update(kernel="6.17.1-1-pve"),
        lambda facts, _server: facts["layout"]["differs"].pop(),
        lambda _facts, server: server["server"].update(state="loading"),
        lambda _facts, server: server["server"]["speculation"].update(algorithm=None),
        lambda _facts, server: server["server"]["speculation"].update(verdict="dead"),
    ],
)
def test_a_changed_state_gives_a_new_report(
    facts: dict[str, Any], change: Callable[[dict[str, Any], dict[str, Any]], None]
) -> None:
    old = report(facts, "pve1", servers=[SERVER], at="1 May")
    server = copy.deepcopy(SERVER)
    change(facts, server)
    previous = json.dumps(old["report"])
    new = report(facts, "pve1", servers=[server], at="2 May", previous=previous)
    assert new["report"]["since"] == "2 May"


def test_a_run_that_changed_something_gives_a_new_report(facts: dict[str, Any]) -> None:
    old = json.dumps(report(facts, "pve1", at="1 May")["report"])
    new = report(facts, "pve1", changes=["Bound a GPU"], at="2 May", previous=old)
    assert (new["report"]["since"], new["report"]["changes"]) == ("2 May", ["Bound a GPU"])


@pytest.mark.parametrize("previous", ["", "not json", "[]", "null", '{"schema": 0}', '"text"'])
def test_a_previous_report_of_another_kind_is_not_used(
    facts: dict[str, Any], previous: str
) -> None:
    assert report(facts, "pve1", at="2 May", previous=previous)["report"]["since"] == "2 May"


def poison(value: Any) -> Any:
    """Put markup into every text of a result, except the words that the code looks up."""
    if isinstance(value, dict):
        words = ("address", "subject", "kind", "severity", "mode", "addresses", "differs", "id")
        return {k: item if k in words else poison(item) for k, item in value.items()}
    if isinstance(value, list):
        return [poison(item) for item in value]
    return f"{value}\"'><script>evil&" if isinstance(value, str) else value


def test_no_markup_of_a_host_gets_through(facts: dict[str, Any]) -> None:
    prepared = report(
        poison(facts), "<script>evil", servers=[poison(SERVER)], changes=["<script>evil"]
    )
    page = render(prepared)
    assert "<script" not in page
    assert page.count("&lt;script&gt;evil") > 100
    assert "evil&\n" not in page


@pytest.mark.parametrize("host", ["four-functions", "bmc-and-nvme"])
def test_renders_other_hosts_without_layout_and_server(
    host_tree: Callable[[str], Path], host: str
) -> None:
    root = Reader(str(host_tree(host)))
    page = render(report(audit(root, read_blocks([]), None, "keep", observed=True), host))
    assert "No layout was given." in page
    assert "Model servers" not in page
    for outside in ("http://", "https://", "<script", "<link", "<img", "@import", "url("):
        assert outside not in page.replace("https://github.com", "").replace("https://pve.", "")


def test_renders_a_host_of_which_nothing_could_be_read(tmp_path: Path) -> None:
    root = trees.unpack("/sys/bus/pci/devices/0000:99:00.0/vendor/\n/etc/pve/lxc/1.conf/", tmp_path)
    facts = audit(Reader(str(root)), read_blocks([]), LAYOUT, "keep", observed=True)
    shown = report(facts, "pve1")
    assert shown["report"]["headline"]["tone"] == "problem"
    assert "the GPUs could not be read" in render(shown)


@pytest.mark.parametrize("wrong", [{}, {"gpus": []}, "text", None])
def test_another_input_is_refused(wrong: Any) -> None:
    with pytest.raises(AnsibleFilterError, match="is not a result of gpuhost"):
        report(wrong, "pve1")

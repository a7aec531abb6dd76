"""The report: what it shows, that all text is escaped, and that it only changes with the state."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jinja2
import measured_runs
import pytest
import trees
from ansible.errors import AnsibleFilterError
from ansible_collections.gpuhost.inference.plugins.filter.report import report
from ansible_collections.gpuhost.inference.plugins.module_utils._host import audit
from ansible_collections.gpuhost.inference.plugins.module_utils._kernel_log import read_blocks
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader
from ansible_collections.gpuhost.inference.plugins.module_utils._tune_verdict import judge
from ansible_collections.gpuhost.inference.plugins.plugin_utils import _report_plots

TEMPLATES = Path(__file__).parents[4] / "roles" / "gpu_report" / "templates"
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
    result = audit(host, log, measured_runs.LAYOUT, "keep", observed=True)
    plain: dict[str, Any] = json.loads(json.dumps(result))
    return plain


@pytest.fixture(autouse=True)
def no_matplotlib(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw only in tests with the fixture `plots`: it takes a second."""
    if "plots" not in request.fixturenames:
        monkeypatch.setattr(_report_plots, "MISSING", "No module named 'matplotlib'")


@pytest.fixture
def plots() -> None:
    """Have matplotlib, which is one of the tools."""
    assert _report_plots.MISSING is None


def render(prepared: dict[str, Any]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,  # as the template module has it
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
    site, wanted = shown["pending"]
    assert site == "The playbook site: 4 GPUs are not as the layout says."
    assert wanted.startswith("IOMMU group type identity is wanted by inference for 0000:41:00.0, ")
    assert wanted.endswith("; in force is DMA-FQ.")


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
    summary = report(facts, "pve1", servers=[SERVER] * 3, **measured())["summary"]
    assert len(summary) <= 9
    said = "depends: mtp3 gains at C=1, 4 and loses at C=64; against earlier runs: slower"
    assert f"MTP: {said}" in summary
    assert "P2P: broken" in summary[2]


def measured() -> dict[str, Any]:
    """Return everything that a report can be given beside the host and its servers."""
    return {
        "p2p": [measured_runs.copies()],
        "benchmark": measured_runs.runs(),
        "verdict": measured_runs.verdict(),
        "history": measured_runs.history(),
    }


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
    given = measured()
    old = report(facts, "pve1", servers=[SERVER], **given, changes=["Bound a GPU"], at="1 May")
    text = json.dumps(old["report"])
    host, server = later(facts)
    given["p2p"][0]["p2p"].update(time="2026-12-01T00:00:00Z", reason="another wording")
    for previous in (text, json.loads(text)):  # a mapping comes from ansible-core before 2.19
        new = report(host, "pve1", servers=[server], **given, at="2 May", previous=previous)
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


@pytest.mark.parametrize(
    "change",
    [
        lambda given: given["p2p"][0]["p2p"].update(verdict="works"),
        lambda given: given["p2p"][0]["p2p"]["pairs"][1].update(read="wrong"),
        lambda given: given["benchmark"].pop(),
        lambda given: given["benchmark"][0].update(at="2026-12-01T00:00:00Z"),
        lambda given: given["verdict"].update(verdict="keep"),
        lambda given: given["history"]["points"].pop(),
        lambda given: given.update(history={}),
    ],
)
def test_a_new_measurement_gives_a_new_report(
    facts: dict[str, Any], change: Callable[[dict[str, Any]], None]
) -> None:
    given = measured()
    previous = json.dumps(report(facts, "pve1", **given, at="1 May")["report"])
    change(given)
    new = report(facts, "pve1", **given, at="2 May", previous=previous)
    assert new["report"]["since"] == "2 May"


def test_a_run_that_changed_something_gives_a_new_report(facts: dict[str, Any]) -> None:
    old = json.dumps(report(facts, "pve1", at="1 May")["report"])
    new = report(facts, "pve1", changes=["Bound a GPU"], at="2 May", previous=old)
    assert (new["report"]["since"], new["report"]["changes"]) == ("2 May", ["Bound a GPU"])


@pytest.mark.parametrize(
    "previous",
    ["", "not json", "[" * 100_000, "[]", "null", '{"schema": 0}', '{"schema": 2}', '"text"'],
)
def test_a_previous_report_of_another_kind_is_not_used(
    facts: dict[str, Any], previous: str
) -> None:
    assert report(facts, "pve1", at="2 May", previous=previous)["report"]["since"] == "2 May"


def changed_ones(value: Any) -> Iterator[Any]:
    """Yield a report with one thing taken out or emptied, near its top."""
    for key in value:
        yield {name: one for name, one in value.items() if name != key}
        if value[key] is not None:
            yield {**value, key: None}
        if isinstance(value[key], dict):
            for one in changed_ones(value[key]):
                yield {**value, key: one}


def test_a_previous_report_that_was_changed_is_not_used(facts: dict[str, Any]) -> None:
    """By hand, by another release, or by a full disk: it would be shown as the truth, or fail."""
    first = report(facts, "pve1", at="1 May", **measured())["report"]
    first["headline"]["word"] = "All is well"
    shown = report(facts, "pve1", at="2 May", previous=json.dumps(first))
    assert shown["report"]["headline"]["word"] != "All is well"
    assert shown["report"]["since"] == "2 May"
    for one in changed_ones(report(facts, "pve1", at="1 May", **measured())["report"]):
        prepared = report(facts, "pve1", at="2 May", previous=json.dumps(one))
        assert prepared["report"]["since"] == "2 May"
        render(prepared)


def poison(value: Any) -> Any:
    """Put markup into every text of a result, except the words that the code looks up."""
    if isinstance(value, dict):
        words = (
            "address",
            "from",
            "to",
            "write",
            "read",
            "subject",
            "kind",
            "severity",
            "mode",
            "addresses",
            "differs",
            "id",
        )
        return {k: item if k in words else poison(item) for k, item in value.items()}
    if isinstance(value, list):
        return [poison(item) for item in value]
    return f"{value}\"'><script>evil&" if isinstance(value, str) else value


@pytest.mark.usefixtures("plots")
def test_no_markup_of_a_host_gets_through(facts: dict[str, Any]) -> None:
    given = {name: poison(value) for name, value in measured().items()}
    prepared = report(
        poison(facts), "<script>evil", servers=[poison(SERVER)], changes=["<script>evil"], **given
    )
    assert len(prepared["html"]["plots"]) == 5
    page = render(prepared)
    assert "<script" not in page
    assert page.count("&lt;script&gt;evil") > 100
    assert "evil&\n" not in page


HOSTILE = "\x1b[\x00\ud800\u202e\ufffe\x9b$a$"


def hostile(value: Any) -> Any:
    """Put what no page, plot or terminal can take into every text of a measurement."""
    if isinstance(value, dict):
        return {k: one if k in ("at", "verdict") else hostile(one) for k, one in value.items()}
    if isinstance(value, list):
        return [hostile(one) for one in value]
    return f"{value}{HOSTILE}" if isinstance(value, str) else value


@pytest.mark.usefixtures("plots")
def test_no_sign_gets_through_that_a_terminal_obeys(facts: dict[str, Any]) -> None:
    given = {name: hostile(measured()[name]) for name in ("benchmark", "verdict", "history")}
    changes = [f"a\tb\n{HOSTILE}"]
    prepared = report(facts, f"pve{HOSTILE}", servers=[hostile(SERVER)], changes=changes, **given)
    assert len(prepared["html"]["plots"]) == 5
    said = render(prepared) + json.dumps(prepared, ensure_ascii=False)
    said.encode()
    assert not set(HOSTILE) - set("[$a") & set(said)
    assert prepared["report"]["changes"][0].startswith("a\tb\n")


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1e308, 10**400])
@pytest.mark.usefixtures("plots")
def test_what_is_no_number_is_not_measured(facts: dict[str, Any], number: float) -> None:
    given = measured()
    given["benchmark"][0]["points"][0].update(
        output_tok_s=number, accept_length=number, running_max=number, in_flight=number
    )
    given["benchmark"][0]["apart"]["kv_tokens"] = number
    given["verdict"]["points"][0].update(ratio=number, low=number, high=number)
    given["history"]["points"][0].update(ratio=number, low=number, high=number)
    shown = report(facts, "pve1", **given)
    json.dumps(shown["report"], allow_nan=False)
    assert "not measured" in cells(shown["report"]["mtp"]["tables"]["ratios"])["mtp3, 1"]


@pytest.mark.usefixtures("plots")
def test_the_longest_name_of_an_arm_leaves_room_for_its_plots(facts: dict[str, Any]) -> None:
    """matplotlib warns where nothing is left of a plot, which is an error here."""
    text = json.dumps(measured()).replace('"mtp3"', f'"{"W" * 64}"')
    assert len(report(facts, "pve1", **json.loads(text))["html"]["plots"]) == 5


@pytest.mark.usefixtures("plots")
def test_a_margin_of_nothing_is_told_as_it_is(facts: dict[str, Any]) -> None:
    given = measured()
    given["verdict"]["margin"] = 0.0
    assert "Within the band, 0\xa0% to each side" in render(report(facts, "pve1", **given))


def test_a_time_before_all_times(facts: dict[str, Any]) -> None:
    given = measured()
    given["benchmark"][0]["at"] = "0001-01-01T00:00:00+14:00"
    assert "0001-01-01T00:00:00+14:00" in render(report(facts, "pve1", **given))


@pytest.mark.parametrize("host", ["four-functions", "bmc-and-nvme"])
def test_renders_other_hosts_without_layout_and_server(
    host_tree: Callable[[str], Path], host: str
) -> None:
    root = Reader(str(host_tree(host)))
    page = render(report(audit(root, read_blocks([]), None, "keep", observed=True), host))
    assert "No layout was given." in page
    assert "No server was asked." in page
    assert page.count("ot measured") > 3
    for outside in ("http://", "https://", "<script", "<link", "<img", "@import", "url("):
        assert outside not in page.replace("https://github.com", "").replace("https://pve.", "")


def test_renders_a_host_of_which_nothing_could_be_read(tmp_path: Path) -> None:
    root = trees.unpack("/sys/bus/pci/devices/0000:99:00.0/vendor/\n/etc/pve/lxc/1.conf/", tmp_path)
    facts = audit(Reader(str(root)), read_blocks([]), measured_runs.LAYOUT, "keep", observed=True)
    shown = report(facts, "pve1")
    assert shown["report"]["headline"]["tone"] == "problem"
    assert "the GPUs could not be read" in render(shown)


@pytest.mark.parametrize("wrong", [{}, {"gpus": []}, "text", None])
def test_another_input_is_refused(wrong: Any) -> None:
    with pytest.raises(AnsibleFilterError, match="is not a result of gpuhost"):
        report(wrong, "pve1")


def cells(table: dict[str, Any] | None) -> dict[str, list[str]]:
    assert table
    return {row["head"]: [cell["text"] for cell in row["cells"]] for row in table["rows"]}


def test_what_was_not_given_is_not_measured(facts: dict[str, Any]) -> None:
    shown = report(facts, "pve1")["report"]
    assert (shown["mtp"]["measured"], shown["mtp"]["sentence"]) == (False, "not measured")
    assert shown["p2p"] == {"tests": [], "kept": []}
    assert shown["capacity"] is None
    runs_alone = report(facts, "pve1", benchmark=measured_runs.runs())
    assert runs_alone["report"]["mtp"]["sentence"].startswith("not judged")


def test_what_was_measured_stays_until_it_is_measured_anew(facts: dict[str, Any]) -> None:
    given = measured()
    old = report(facts, "pve1", servers=[SERVER], **given, at="1 May")
    audit_later = report(
        facts, "pve1", servers=[SERVER], at="2 May", previous=json.dumps(old["report"])
    )
    assert audit_later["report"] == old["report"]
    facts["gpus"][0]["driver"] = None  # news, and still what was measured is there
    told = copy.deepcopy(SERVER)
    told["server"]["version"] = "0.5.24"
    new = report(facts, "pve1", servers=[told], at="3 May", previous=json.dumps(old["report"]))
    for part in ("mtp", "p2p"):
        assert new["report"][part] == old["report"][part]
    assert new["report"]["pending"][-1] == (
        "MTP was measured with SGLang 0.5.23, and 0.5.24 runs now: measure it anew."
    )
    assert "P2P: not measured" in new["summary"][2]
    assert cells(new["report"]["capacity"])["arm off"][1] == "1024000"
    texts = [event["text"] for event in new["report"]["timeline"]["dated"]]
    assert "benchmark: start 3 of mtp3" in texts


def test_a_matrix_has_a_word_for_each_ordered_pair(facts: dict[str, Any]) -> None:
    (test,) = report(facts, "pve1", p2p=[measured_runs.copies()])["report"]["p2p"]["tests"]
    assert cells(test["matrix"]) == {
        "41:00.0": ["same GPU", "corrupt (write)", "works"],
        "42:00.0": ["works", "same GPU", "works"],
        "43:00.0": ["works", "untested", "same GPU"],
    }
    faulted = report(facts, "pve1", p2p=[measured_runs.copies("failed")])["report"]["p2p"]
    assert cells(faulted["tests"][0]["matrix"])["41:00.0"][1] == "faulted (write)"


def test_figures_are_medians_over_the_starts(facts: dict[str, Any]) -> None:
    shown = report(facts, "pve1", **measured())["report"]["mtp"]
    off, mtp3 = shown["series"]
    assert (off["arm"], mtp3["arm"]) == ("off", "mtp3")
    assert [point["aggregate"] for point in off["points"]] == [103.5, 294.0, 812.3, 1780.7]
    assert off["points"][0]["starts"] == 3
    speed = cells(shown["tables"]["speed"])
    assert speed["mtp3, 64"] == ["18.9", "1211", "62.7", "3"]
    accepted = cells(shown["tables"]["acceptance"])
    assert accepted["mtp3, mixed"][:3] == ["2.64", "2.64 to 2.64", "55\N{NO-BREAK SPACE}%"]
    assert not [head for head in accepted if head.startswith("off")]


def test_ratios_show_what_was_not_measured(facts: dict[str, Any]) -> None:
    tables = report(facts, "pve1", **measured())["report"]["mtp"]["tables"]
    ratios = {
        head: [text.replace("\xa0", " ") for text in row]
        for head, row in cells(tables["ratios"]).items()
    }
    assert ratios["mtp3, 64"] == [
        "drop",
        "\N{MINUS SIGN}32 %",
        "0.68",
        "0.66 to 0.70",
        "3 off, 3 mtp3",
    ]
    # its neighbours do not say the same
    assert ratios["mtp3, 8"][::4] == ["not enough data", "interpolated"]
    left_out = cells(tables["left_out"])
    assert left_out["off, 128"] == ["1, 2, 3", "only 91 of 128 requests were in flight"]
    assert left_out["mtp3, 32"] == ["2", "its tokens were not counted"]


def test_the_starts_show_what_is_not_the_same_in_all(facts: dict[str, Any]) -> None:
    """A start has one row, also when its kinds of prompts were measured alone after it."""
    runs = measured_runs.runs()
    for run in runs:
        run["apart"]["speculative_attention_mode"] = "prefill"
    kinds = {**runs[-1], "start": 1, "at": "2026-11-30T11:00:00Z"}
    mtp = report(facts, "pve1", **{**measured(), "benchmark": [*runs, kinds]})["report"]["mtp"]
    rows = cells(mtp["tables"]["starts"])
    assert list(rows) == [f"{arm}, start {n}" for arm in ("off", "mtp3") for n in (1, 2, 3)]
    assert rows["off, start 1"][-1] == "nothing"
    assert rows["mtp3, start 1"][0].startswith("2026-11-30 05:10")
    assert rows["mtp3, start 1"][-1] == "speculative_algorithm=NEXTN, speculative_num_steps=3"
    assert {"label": "Starts", "value": "3 of off, 3 of mtp3"} in mtp["conditions"]


def test_ratios_show_which_server_was_at_its_cap(facts: dict[str, Any]) -> None:
    runs = measured_runs.runs()
    for run in runs:
        run["apart"]["effective_max_running_requests"] = 64 if run["arm"] == "off" else 16
        run["points"] = [
            point for point in run["points"] if run["arm"] == "off" or point["concurrency"] <= 16
        ]
    given = {**measured(), "benchmark": runs, "verdict": judge(runs)}
    rows = cells(report(facts, "pve1", **given)["report"]["mtp"]["tables"]["ratios"])
    assert rows["mtp3, 64"][-1] == "at the cap of mtp3"


@pytest.mark.usefixtures("plots")
def test_unknown_figures_are_told_and_not_drawn(facts: dict[str, Any]) -> None:
    given = measured_runs.run("off", 1)
    for point in given["points"]:
        point.update(output_tok_s=None, ttft_ms=None, input_tokens=None)
    given["equal"] = {}
    verdict = {"verdict": "not-enough-data", "points": [], "text": []}
    shown = report(facts, "pve1", benchmark=[given], verdict=verdict)
    mtp = shown["report"]["mtp"]
    assert mtp["sentence"] == "not enough data"
    assert sorted(shown["html"]["plots"]) == ["tpot"]
    assert cells(mtp["tables"]["speed"])["off, 1"][1] == "not measured"
    assert "SGLang not recorded; Model not recorded; GPU not recorded" in mtp["condition_line"]


@pytest.mark.usefixtures("plots")
def test_every_plot_tells_its_conditions(facts: dict[str, Any]) -> None:
    prepared = report(facts, "pve1", **measured())["html"]
    assert sorted(prepared["plots"]) == ["acceptance", "ratios", "speed", "tpot", "ttft"]
    for plot in prepared["plots"].values():
        for condition in (
            "SGLang 0.5.23",
            "RTX PRO 6000",
            "Context 262144",
            "Output 512 tokens",
            "Starts 3 of off, 3 of mtp3",
        ):
            assert condition in plot["svg"]


@pytest.mark.usefixtures("plots")
def test_plots_are_the_same_bytes_each_time(facts: dict[str, Any]) -> None:
    first, second = (report(facts, "pve1", **measured())["html"]["plots"] for _time in range(2))
    assert first == second
    text = "".join(plot["svg"] for plot in first.values())
    assert "<metadata" not in text
    assert "<style" not in text


def test_without_matplotlib_the_tables_remain(facts: dict[str, Any]) -> None:
    prepared = report(facts, "pve1", **measured())
    page = render(prepared)
    assert "<svg" not in page
    assert "install the Python package matplotlib" in page
    for caption in (
        "Speed by arm and load",
        "Time to the first token (TTFT)",
        "Tokens for each pass",
    ):
        assert f"<caption><span>{caption}" in page


def test_the_timeline_is_in_order_and_has_only_what_has_a_time(facts: dict[str, Any]) -> None:
    facts["health"]["log"].update(first="2026-11-29T22:00:05.120000Z", complete=True)
    fault = {
        "id": "iommu-fault",
        "class": "iommu_fault",
        "address": "0000:42:00.0",
        "current": True,
        "first": "2026-11-30T02:00:01Z",
        "last": "2026-11-30T02:00:02Z",
        "count": 4,
        "meaning": "the IOMMU blocked its DMA",
    }
    facts["health"]["faults"] = [
        fault,
        {**fault, "first": "12.5", "count": 1, "address": None, "current": False},
        {**fault, "first": "Nov 30 02:00:01"},
    ]
    given = measured()
    given["benchmark"][0]["at"] = None
    shown = report(facts, "pve1", **given, changes=["Bound"], at="2026-11-30 09:00 UTC")["report"]
    times = [event["at"] for event in shown["timeline"]["dated"]]
    assert times == sorted(times)
    texts = [event["text"] for event in shown["timeline"]["dated"]]
    assert texts[0] == "this boot began, kernel 6.14.11-4-pve"
    assert texts[-1] == "changed: Bound"
    assert texts.count("benchmark: start 1 of off") == 0
    said = "the IOMMU blocked its DMA (iommu-fault), 4 times until 2026-11-30 02:00:02 UTC"
    assert [text for text in texts if "iommu-fault" in text] == [f"0000:42:00.0: {said}"]
    (early,) = shown["timeline"]["since_boot"]
    assert early["at"] == "12.5 s"
    assert early["text"].startswith("a GPU that the log does not name: ")


def test_a_trial_is_pending_and_has_a_way_back(facts: dict[str, Any]) -> None:
    trial = {
        "state": "armed",
        "text": "the next boot tries type identity for 0000:41:00.0",
        "type": "identity",
        "gpus": {"0000:41:00.0": "10de:2bb5"},
        "armed": "2026-11-30T11:00:00Z",
    }
    facts["host"]["trial"] = trial
    shown = report(facts, "pve1")["report"]
    assert f"A trial: {trial['text']}." in shown["pending"]
    assert "iommu_trial -a state=absent" in shown["way_back"][0]
    assert shown["timeline"]["dated"][-1]["at"] == "2026-11-30 11:00:00 UTC"
    trial["state"] = "confirmed"
    assert "it ends with this boot" in report(facts, "pve1")["report"]["undo"][0]


@pytest.mark.parametrize(
    ("verdict", "valid", "said"),
    [("works", True, "work now"), ("works", False, "on the day"), ("broken", True, "on the day")],
)
def test_the_fallback_is_to_be_undone(
    facts: dict[str, Any], verdict: str, valid: bool, said: str
) -> None:
    both = ["0000:41:00.0", "0000:42:00.0"]
    server = {
        "addresses": both,
        "title": "process 4711 of lxc 100",
        "nccl_p2p_disable": True,
        "disable_custom_all_reduce": None,
    }
    test = {"addresses": both, "verdict": verdict, "valid": valid, "changed": ["kernel"]}
    test.update(reason="", time="2026-03-01T12:00:00Z", vmid=100)
    facts["p2p"] = {"servers": [server], "tests": [test]}
    (sentence,) = report(facts, "pve1")["report"]["undo"]
    assert sentence.startswith("NCCL_P2P_DISABLE=1 of process 4711 of lxc 100")
    assert said in sentence


def test_flags_that_matter_are_shown_and_keys_are_not(facts: dict[str, Any]) -> None:
    told = copy.deepcopy(SERVER)
    flags = {"tp_size": 4, "api_key": "sk-secret", "disable_custom_all_reduce": True}
    told["server"].update(flags=flags, effective_max_running_requests=24)
    told["capacity"] = {
        "without_mtp": {"max_running_requests": 45, "kv_tokens": None, "unknown": ["no size"]},
        "with_mtp": {"max_running_requests": 24, "kv_tokens": 7, "limited_by": "states"},
    }
    prepared = report(facts, "pve1", servers=[told], **measured())
    shown = prepared["report"]
    (server,) = shown["configuration"]["servers"]
    assert cells(server["flags"]) == {"tp_size": ["4"], "disable_custom_all_reduce": ["True"]}
    assert "sk-secret" not in render(prepared) + json.dumps(shown)
    assert "--disable-custom-all-reduce of ct100" in shown["undo"][0]
    fits = cells(shown["capacity"])
    assert fits["ct100, now"] == ["24", "not measured", "told by the server"]
    assert fits["ct100, without MTP"] == ["45", "unknown", "no size"]
    assert fits["ct100, with MTP"] == ["24", "7", "predicted, limited by states"]
    assert fits["arm mtp3"][1] == "733361"


@pytest.mark.parametrize(
    ("option", "wrong", "said"),
    [
        ("p2p", [{"failed": True}], "p2p: entry 1 is not a result of .*gpu_p2p_info"),
        ("benchmark", [measured_runs.run("off", 1), {}], "benchmark: entry 2 is not a run"),
        ("verdict", {"points": []}, "verdict: this is not a result of the filter"),
        ("history", {"changed": []}, "history: this is not a result of the filter"),
        ("benchmark", [{"arm": "off", "points": [1]}], "benchmark, .* cannot be read .TypeError"),
        ("benchmark", [{"arm": "off", "points": [{}]}], "cannot be read .KeyError: 'prompts'"),
        ("benchmark", [{"arm": "off", "points": None}], "cannot be read"),
        (
            "benchmark",
            [{"arm": "off", "points": [{"prompts": "mixed", "concurrency": "many"}]}],
            "cannot be read .ValueError",
        ),
        ("benchmark", [{"arm": "off", "points": [], "apart": "x"}], "cannot be read .Attribute"),
        ("verdict", {"verdict": "keep", "points": [{"arm": "on"}]}, "cannot be read .KeyError"),
        ("verdict", {"verdict": ["keep"], "points": [], "margin": "x"}, "cannot be read"),
        ("history", {"points": [{"concurrency": 1, "ratio": "x"}]}, "cannot be read .TypeError"),
    ],
)
def test_a_wrong_measurement_is_refused(
    facts: dict[str, Any], option: str, wrong: Any, said: str
) -> None:
    with pytest.raises(AnsibleFilterError, match=said):
        report(facts, "pve1", **{option: wrong})

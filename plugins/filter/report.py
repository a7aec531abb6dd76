# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: report
short_description: Prepare the report of a GPU host
version_added: 0.1.0
author: gpuhost.inference contributors (@gpuhost)
description:
  - Turns the result of M(gpuhost.inference.gpu_host_info), and of M(gpuhost.inference.sglang_info)
    where a server belongs to the host, into the values that the role C(gpu_report) writes as HTML,
    JSON and text. Nothing is judged here.
  - What was not given is told as not measured, or shown with its time as O(previous) has it.
  - Plots need matplotlib on the control node; without it their tables remain.
  - When O(previous) shows the same state and nothing was changed, that is the report that is
    returned, with the time at which this state was first seen. So a new one always means news.
positional: name
options:
  _input:
    description: The registered result of M(gpuhost.inference.gpu_host_info).
    type: dict
    required: true
  name:
    description: Name of the host, as people call it.
    type: str
    required: true
  servers:
    description:
      - Registered results of M(gpuhost.inference.sglang_info), one for each server of the host.
        A key C(name) names it, a key C(capacity) holds that of
        M(gpuhost.inference.sglang_mtp_info).
    type: list
    elements: dict
    default: []
  p2p:
    description: Registered results of M(gpuhost.inference.gpu_p2p_info).
    version_added: 0.2.0
    type: list
    elements: dict
    default: []
  benchmark:
    description:
      - Runs of M(gpuhost.inference.sglang_benchmark), one for each start of an arm.
    version_added: 0.2.0
    type: list
    elements: dict
    default: []
  verdict:
    description: What P(gpuhost.inference.tune_verdict#filter) said of these runs.
    version_added: 0.2.0
    type: dict
    default: {}
  history:
    description:
      - What P(gpuhost.inference.tune_history#filter) said of these runs and earlier ones.
    version_added: 0.2.0
    type: dict
    default: {}
  changes:
    description: What the play changed, one sentence each.
    type: list
    elements: str
    default: []
  at:
    description: The time of the report, as text.
    type: str
    default: ''
  previous:
    description:
      - Text of the JSON report that is there already, empty when there is none. One that was
        changed after it was written is not used.
    type: raw
    default: ''
"""

EXAMPLES = r"""
- name: Look at the host
  gpuhost.inference.gpu_host_info:
  register: host

- name: Say in ten lines how it is
  ansible.builtin.debug:
    msg: "{{ (host | gpuhost.inference.report(inventory_hostname)).summary }}"
"""

RETURN = r"""
_value:
  description: >-
    The C(report), with C(headline), C(facts), C(nodes) and their C(gpus), C(findings), C(layout),
    C(servers), C(pending), C(changes), C(p2p), C(mtp), C(capacity), C(configuration), C(undo),
    C(way_back) and C(timeline); the same with all text escaped for HTML as C(html), with its
    C(plots) and why there are none (C(no_plots)); and the C(summary) of what is now, a list of
    lines.
  type: dict
"""

import hashlib
import html
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_http import number_of
from ansible_collections.gpuhost.inference.plugins.plugin_utils._report_handover import (
    capacity,
    configuration,
    p2p_tests,
    timeline,
    undo,
    way_back,
)
from ansible_collections.gpuhost.inference.plugins.plugin_utils._report_measured import (
    measured,
    outdated,
    wrong_input,
)

SCHEMA = 2  # raise it when the shape of a report changes: an older one is then never reused
# keys of a report that make up the state of a host; measured figures, times and wording do not
_STATE = (
    "schema",
    "host",
    "headline",
    "facts",
    "nodes",
    "layout",
    "pending",
    "mtp",
    "capacity",
    "configuration",
    "undo",
)
_TONES = {
    "ok": "good",
    "healthy": "good",
    "ready": "good",
    "degraded": "attention",
    "loading": "attention",
    "warming": "attention",
    "draining": "attention",
    "stopped": "attention",
    "absent": "attention",
    "not_applicable": "plain",
    "error": "problem",
    "failed": "problem",
    "lost": "problem",
    "warning": "attention",
    "note": "plain",
}
_MODES = {
    "off": "no IOMMU",
    "passthrough": "passthrough: identity by default, no SEV-SNP guests",
    "snp": "translated, for SEV-SNP guests",
    "sme": "translated, with memory encryption (SME)",
    "translated": "translated; single groups may be set to identity",
    "unknown": "unknown",
}
_KINDS = {"lxc": "CT", "qemu": "VM"}
# what a terminal obeys, turns text around, or cannot stand in a file: names and logs may hold it
_HARMFUL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
_MTP = ("algorithm", "num_steps", "eagle_topk", "num_draft_tokens")
_MEASURED = ("Accept length", "Accept rate", "MTP verdict")
_TOLD = ("Model", "MTP", "Accept length", "MTP verdict")


def report(
    facts: Mapping[str, Any],
    name: str,
    *,
    servers: Sequence[Mapping[str, Any]] = (),
    p2p: Sequence[Mapping[str, Any]] = (),
    benchmark: Sequence[Mapping[str, Any]] = (),
    verdict: Mapping[str, Any] | None = None,
    history: Mapping[str, Any] | None = None,
    changes: Sequence[str] = (),
    at: str = "",
    previous: str | Mapping[str, Any] = "",
) -> dict[str, Any]:
    """Return the report of a host (the previous one when the state is the same) and a summary."""
    if not isinstance(facts, Mapping) or "findings" not in facts:
        raise AnsibleFilterError(
            "report: the input is not a result of gpuhost.inference.gpu_host_info (it has no "
            "findings): register that module's result and pass it on"
        )
    facts, name, servers, p2p, changes = map(_harmless, (facts, str(name), servers, p2p, changes))
    given = [_harmless(one) for one in (benchmark, verdict or {}, history or {})]
    wrong = wrong_input(p2p, *given)
    if wrong:
        raise AnsibleFilterError(f"report: {wrong}")
    old = _parsed(previous)
    try:
        mtp = measured(*given)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise AnsibleFilterError(
            f"report: benchmark, verdict or history cannot be read ({type(error).__name__}: "
            f"{error}): give them as sglang_benchmark, tune_verdict and tune_history returned them"
        ) from error
    copies = p2p_tests([result["p2p"] for result in p2p], facts["p2p"]["tests"])
    said = _copies(copies)  # of this run, or what the host remembers
    # what nobody measured again stays as it was measured, with its time
    if old and not p2p:
        copies = {**copies, "tests": old["p2p"]["tests"]}
    if old and not (benchmark or verdict or history):
        mtp = old["mtp"]
    versions = [result["server"].get("version") for result in servers]
    guests = {(guest["kind"], guest["vmid"]): guest for guest in facts["guests"] or ()}
    health = {gpu["address"]: gpu for gpu in (facts["health"] or {}).get("gpus") or ()}
    rows = [_gpu(gpu, health, guests, facts["layout"]) for gpu in facts["gpus"] or ()]
    findings = _findings(facts["findings"])
    layout = _layout(facts["layout"], rows)
    new: dict[str, Any] = {
        "schema": SCHEMA,
        "host": str(name),
        "since": at,
        "headline": _headline(facts, findings),
        "facts": _facts(facts["host"]),
        "nodes": _nodes(rows),
        "reasons": _reasons(health),
        "findings": findings,
        "layout": layout,
        "servers": [_server(result) for result in servers],
        "pending": [*_pending(facts, layout), *outdated(mtp, versions)],
        "changes": [str(change) for change in changes],
        "p2p": copies,
        "mtp": mtp,
        "capacity": capacity(servers, mtp["room"]),
        "configuration": configuration(facts, servers),
        "undo": undo(facts, servers),
        "way_back": way_back(facts, servers),
        "timeline": timeline(facts, copies, mtp["starts"], changes, at),
    }
    new["state"] = _digest(new)
    new["sum"] = _sum(new)
    same = not new["changes"] and old.get("state") == new["state"]
    chosen = old if same else new
    page = {**_escaped(chosen), **_plots(chosen["mtp"])}
    return {"report": chosen, "html": page, "summary": _summary(new, rows, said)}


def _plots(mtp: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plots, by the name of their tables, and why there are none."""
    if not mtp["measured"]:
        return {"plots": {}, "no_plots": ""}
    # matplotlib takes a second to load, which reports without measurements are spared
    from ansible_collections.gpuhost.inference.plugins.plugin_utils import (  # noqa: PLC0415
        _report_plots,
    )

    if _report_plots.MISSING:
        return {"plots": {}, "no_plots": html.escape(_report_plots.MISSING)}
    return {"plots": {plot["name"]: plot for plot in _report_plots.draw(mtp)}, "no_plots": ""}


def _harmless(value: Any) -> Any:
    """Return a result with texts that can be shown anywhere, and numbers that can be written."""
    if isinstance(value, str):
        return _HARMFUL.sub("\N{REPLACEMENT CHARACTER}", value)
    if isinstance(value, Mapping):
        return {_harmless(key): _harmless(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_harmless(item) for item in value]
    known = isinstance(value, bool) or not isinstance(value, (int, float))
    return value if known else number_of(value)


def _escaped(value: Any) -> Any:
    """Escape every text at once: the template module ignores Jinja's autoescape."""
    if isinstance(value, str):
        return html.escape(value)
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    return [_escaped(item) for item in value] if isinstance(value, list) else value


def _parsed(previous: Any) -> dict[str, Any]:
    """Return the report in a file's text; ansible-core before 2.19 has made a mapping of it."""
    try:
        old = json.loads(previous or "{}") if isinstance(previous, str) else previous
    except (ValueError, RecursionError):
        return {}
    if not isinstance(old, dict) or old.get("schema") != SCHEMA:
        return {}
    return old if old.get("sum") == _sum(old) else {}  # else somebody or something changed it


def _sum(report: Mapping[str, Any]) -> str:
    """Return a digest of all of a report, as it is in its file."""
    text = json.dumps({key: one for key, one in report.items() if key != "sum"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _digest(new: Mapping[str, Any]) -> str:
    state: dict[str, Any] = {key: new[key] for key in _STATE}
    state["findings"] = [
        [finding["id"], finding["severity"], [hit["subject"] for hit in finding["hits"]]]
        for finding in new["findings"]
    ]
    state["servers"] = [
        [server["name"], server["state"], server["useless_mtp"]]
        + [pair for pair in server["pairs"] if pair["label"] not in _MEASURED]
        for server in new["servers"]
    ]
    state["p2p"] = [
        [[test[key] for key in ("where", "verdict", "matrix")] for test in new["p2p"]["tests"]],
        [
            [test[key] for key in ("where", "addresses", "verdict", "holds")]
            for test in new["p2p"]["kept"]
        ],
    ]
    text = json.dumps(state, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _gpu(
    gpu: Mapping[str, Any],
    health: Mapping[str, Mapping[str, Any]],
    guests: Mapping[tuple[str, int], Mapping[str, Any]],
    layout: Mapping[str, Any],
) -> dict[str, Any]:
    judged = health.get(gpu["address"], {})
    group = gpu["iommu_group"] or {}
    owners = sorted({(owner["kind"], owner["vmid"]) for owner in gpu["owners"]})
    entry = next((e for e in layout["entries"] if gpu["address"] in e["addresses"]), None)
    return {
        "address": gpu["address"],
        "name": (gpu["name"] or gpu["id"]).replace("NVIDIA ", ""),
        "numa_node": gpu["numa_node"],
        "driver": gpu["driver"] or "none",
        "type": group.get("type") or "unknown",
        "group": group.get("number"),
        "guests": [_guest(kind, vmid, guests.get((kind, vmid))) for kind, vmid in owners],
        "entry": entry["name"] if entry else None,
        "fsp": _word(judged.get("fsp", "unknown")),
        "health": _word(judged.get("verdict", "unknown")),
    }


def _guest(kind: str, vmid: int, guest: Mapping[str, Any] | None) -> dict[str, Any]:
    running = guest["running"] if guest else None
    return {
        "label": f"{_KINDS.get(kind, kind)} {vmid}",
        "name": (guest and guest["name"]) or "",
        "state": "state unknown" if running is None else "running" if running else "stopped",
    }


def _word(word: str) -> dict[str, str]:
    return {"word": word.replace("_", " "), "tone": _TONES.get(word, "unknown")}


def _nodes(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    nodes: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        node = row["numa_node"]
        nodes.setdefault("NUMA node unknown" if node is None else f"NUMA node {node}", []).append(
            row
        )
    return [{"title": title, "gpus": nodes[title]} for title in sorted(nodes)]


def _reasons(health: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Join the reasons of the health verdicts: most GPUs share theirs."""
    joined: dict[str, list[str]] = {}
    for address, judged in sorted(health.items()):
        joined.setdefault(judged["reason"], []).append(address)
    return [{"text": text, "addresses": addresses} for text, addresses in joined.items()]


def _findings(findings: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Join what one rule found on several subjects; the order stays: errors first."""
    joined: dict[tuple[str, str], dict[str, Any]] = {}
    for finding in findings:
        key = (finding["id"], finding["remedy"])
        if key not in joined:
            texts = {
                name: finding[name] for name in ("id", "severity", "why", "remedy", "reference")
            }
            joined[key] = {**texts, "tone": _TONES[finding["severity"]], "hits": []}
        joined[key]["hits"].append({name: finding[name] for name in ("subject", "evidence")})
    return list(joined.values())


def _headline(facts: Mapping[str, Any], findings: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    counts = Counter(finding["severity"] for finding in findings)
    said = [
        f"{counts[word]} {word}{'s' if counts[word] > 1 else ''}"
        for word in ("error", "warning", "note")
        if counts[word]
    ]
    problems = facts["layout"]["problems"]
    if problems:
        said.insert(0, "the layout does not fit the host")
    if problems or counts["error"]:
        return {"tone": "problem", "word": "Needs action", "text": ", ".join(said)}
    if counts["warning"]:
        return {"tone": "attention", "word": "Look at this", "text": ", ".join(said)}
    return {"tone": "good", "word": "In order", "text": ", ".join([*said, "nothing to do"])}


def _facts(host: Mapping[str, Any]) -> list[dict[str, str]]:
    yes = {True: "on", False: "off"}
    loader, proxmox, iommu = host["boot_loader"], host["proxmox"], host["iommu"]
    pairs = {
        "Kernel": host["kernel"] or "unknown",
        "Proxmox VE": (proxmox["version"] or "version unknown") if proxmox["installed"] else "no",
        "IOMMU": " ".join(filter(None, ((iommu["vendor"] or "").upper(), _MODES[host["mode"]]))),
        "Default group type": iommu["default_type"] or "unknown",
        "SEV-SNP": yes.get(host["snp"], "unknown"),
        "SME": yes.get(host["sme"], "unknown"),
        "Boot loader": " through ".join(filter(None, (loader["name"], loader["tool"]))),
        "Command line": " ".join(host["cmdline"]),
    }
    return [{"label": label, "value": value} for label, value in pairs.items()]


def _layout(layout: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "entries": [_entry(entry, layout["differs"], rows) for entry in layout["entries"]],
        "unassigned": list(layout["unassigned"]),
        "problems": list(layout["problems"]),
    }


def _entry(
    entry: Mapping[str, Any], differs: Sequence[str], rows: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    mine = [row for row in rows if row["address"] in entry["addresses"]]
    guest = entry["guest"]
    wanted_guest = f"{_KINDS[guest['kind']]} {guest['vmid']}" if guest else "any"
    guests = [", ".join(guest["label"] for guest in row["guests"]) or "none" for row in mine]
    return {
        "name": entry["name"],
        "addresses": list(entry["addresses"]),
        "driver": _cell(entry["driver"], [row["driver"] for row in mine]),
        "type": _cell(entry["iommu_type"] or "any", [row["type"] for row in mine]),
        "guest": _cell(wanted_guest, guests),
        "differing": [address for address in entry["addresses"] if address in differs],
    }


def _cell(wanted: str, now: Iterable[str]) -> dict[str, Any]:
    have = sorted(set(now))
    return {
        "wanted": wanted,
        "now": " / ".join(have),
        "differs": wanted not in ("any", "auto") and have != [wanted],
    }


def _server(result: Mapping[str, Any]) -> dict[str, Any]:
    server = result["server"]
    speculation = server.get("speculation") or {}
    settings = {key: speculation.get(key) for key in _MTP}
    pairs = {
        "Model": server.get("model_id"),
        "SGLang": server.get("version"),
        "Address": server.get("url"),
        "Longest context": server.get("max_model_len"),
        "Requests at once": server.get("effective_max_running_requests"),
        "Tokens in the cache": server.get("kv_tokens"),
        "MTP": settings["algorithm"] or "off",
        "MTP steps, top-k, draft tokens": ", ".join(
            str(settings[key]) for key in _MTP[1:] if settings[key] is not None
        ),
        "MTP verdict": speculation.get("verdict"),
        "Accept length": speculation.get("accept_length"),
        "Accept rate": speculation.get("accept_rate"),
    }
    return {
        "name": str(result.get("name") or server.get("model_id") or server.get("url") or "server"),
        "state": server["state"],
        "tone": _TONES.get(server["state"], "problem"),
        "reason": server.get("reason") or "",
        "useless_mtp": speculation.get("verdict") in ("dead", "low"),
        "pairs": [
            {"label": label, "value": _number(value)}
            for label, value in pairs.items()
            if value not in (None, "")
        ],
        "witnesses": [_witness(witness) for witness in result.get("witnesses") or ()],
    }


def _number(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _witness(witness: Mapping[str, Any]) -> dict[str, str]:
    word, tone = ("unknown", "unknown")
    if witness["ok"] is not None:
        word, tone = ("yes", "good") if witness["ok"] else ("no", "problem")
    return {"name": witness["name"], "said": str(witness["said"]), "word": word, "tone": tone}


def _pending(facts: Mapping[str, Any], layout: Mapping[str, Any]) -> list[str]:
    pending = []
    boot, loader = facts["host"]["pending"], facts["host"]["boot_loader"]
    if facts["host"]["reboot_required"]:
        pending.append(
            f"A reboot: {loader['file']} and the running kernel differ ("
            + ", ".join([*boot["missing"], *(f"without {word}" for word in boot["extra"])])
            + ")."
        )
        pending += [
            f"Before that reboot: {said}." for said in facts["host"]["next_boot"]["problems"]
        ]
    trial = facts["host"]["trial"]
    if trial and trial["state"] != "ended":
        pending.append(f"A trial: {trial['text']}.")
    if facts["layout"]["differs"]:
        pending.append(
            f"The playbook site: {len(facts['layout']['differs'])} GPUs are not as the layout says."
        )
    for entry in layout["entries"]:
        if entry["type"]["differs"]:
            pending.append(
                f"IOMMU group type {entry['type']['wanted']} is wanted by {entry['name']} for "
                f"{', '.join(entry['addresses'])}; in force is {entry['type']['now']}."
            )
    return pending


def _count(words: Iterable[str]) -> str:
    return ", ".join(f"{number} {word}" for word, number in Counter(words).most_common()) or "none"


def _copies(p2p: Mapping[str, Any]) -> str:
    """Say in a word how copies between GPUs do; tests of this run count before kept ones."""
    words = [test["verdict"]["text"] for test in p2p["tests"]]
    words = words or [t["verdict"]["text"] for t in p2p["kept"] if t["holds"] == "still holds"]
    return _count(words) if len(words) > 1 else "".join(words) or "not measured"


def _summary(new: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], copies: str) -> list[str]:
    """Say it all in at most nine lines; the role adds where the report lies."""
    layout = new["layout"]
    differing = sum(len(entry["differing"]) for entry in layout["entries"])
    guests = Counter(
        " ".join(filter(None, (guest["label"], guest["name"], guest["state"])))
        for row in rows
        for guest in row["guests"]
    )
    lines = [
        f"{new['host']}: {new['headline']['word']} ({new['headline']['text']})",
        f"GPUs: {len(rows)}; drivers: {_count(row['driver'] for row in rows)}; "
        f"group types: {_count(row['type'] for row in rows)}",
        f"FSP: {_count(row['fsp']['word'] for row in rows)}; "
        f"health: {_count(row['health']['word'] for row in rows)}; P2P: {copies}",
        f"Guests: {'; '.join(f'{who}, {n} GPUs' for who, n in sorted(guests.items())) or 'none'}",
    ]
    if layout["problems"]:
        lines.append(f"Layout: {len(layout['problems'])} problems: {layout['problems'][0]}")
    elif layout["entries"]:
        lines.append(f"Layout: {f'{differing} GPUs differ' if differing else 'as declared'}")
    told = 1 if new["mtp"]["measured"] else 2
    for server in new["servers"][:told]:
        said = [f"{p['label']} {p['value']}" for p in server["pairs"] if p["label"] in _TOLD]
        lines.append(f"SGLang: {', '.join([server['state'], *said])}")
    if new["mtp"]["measured"]:
        then = new["mtp"]["history"]
        against = f"; against earlier runs: {then['verdict']['text']}" if then else ""
        lines.append(f"MTP: {new['mtp']['sentence']}{against}")
    ids = ", ".join(f"{finding['id']} ({len(finding['hits'])})" for finding in new["findings"])
    lines.append(f"Findings: {ids or 'none'}")
    lines.append(f"Pending: {' '.join(new['pending']) or 'nothing'}")
    return lines


class FilterModule:
    """Filters for the role gpu_report."""

    def filters(self) -> dict[str, Any]:
        return {"report": report}

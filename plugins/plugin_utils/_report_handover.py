# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this plugin util is private to the collection: it may change at any time.

"""What a report hands over: what happened and when, P2P, configuration, undoing, the way back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.gpuhost.inference.plugins.plugin_utils._report_measured import (
    cell,
    moment,
    table,
    when,
)

_FLAGS = (
    "tp_size",
    "pp_size",
    "dp_size",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "context_length",
    "mem_fraction_static",
    "max_running_requests",
    "max_total_tokens",
    "chunked_prefill_size",
    "cuda_graph_max_bs",
    "disable_cuda_graph",
    "attention_backend",
    "moe_runner_backend",
    "disable_custom_all_reduce",
    "mamba_ssm_dtype",
    "mamba_full_memory_ratio",
    "mamba_radix_cache_strategy",
    "mamba_scheduler_strategy",
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "speculative_adaptive",
)
_COPIES = {  # the worst that became of a pair's data first
    "wrong": ("corrupt", "problem"),
    "failed": ("faulted", "problem"),
    "untested": ("untested", "unknown"),
    "right": ("works", "good"),
}
_VERDICTS = {"works": "good", "broken": "problem"}
_FALLBACK = (
    ("nccl_p2p_disable", "NCCL_P2P_DISABLE=1"),
    ("disable_custom_all_reduce", "--disable-custom-all-reduce"),
)


def p2p_tests(
    results: Sequence[Mapping[str, Any]], kept: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return what is known of peer-to-peer copies.

    Args:
        results: tests of this run, each `p2p` of a result of `gpu_p2p_info`.
        kept: tests that the host remembers, as `gpu_host_info` returns them.
    """
    return {
        "tests": [_test(result) for result in results],
        "kept": [
            {
                "where": _place(test.get("vmid")),
                "addresses": list(test["addresses"]),
                "verdict": cell(test["verdict"], _VERDICTS.get(test["verdict"], "unknown")),
                "time": when(test["time"]),
                "reason": test["reason"],
                "holds": "still holds"
                if test["valid"]
                else f"does not hold any more: {'; '.join(test['changed']) or 'something changed'}",
            }
            for test in kept
        ],
    }


def _place(vmid: int | None) -> str:
    return "on the host" if vmid is None else f"in container {vmid}"


def _test(result: Mapping[str, Any]) -> dict[str, Any]:
    addresses = list(result["addresses"])
    pairs = {(pair["from"], pair["to"]): pair for pair in result["pairs"]}
    rows = [
        (source, *(_pair(pairs.get((source, target)), source == target) for target in addresses))
        for source in addresses
    ]
    return {
        "where": _place(result.get("vmid")),
        "addresses": addresses,
        "time": when(result["time"]),
        "verdict": cell(result["verdict"], _VERDICTS.get(result["verdict"], "unknown")),
        "reason": result["reason"],
        "matrix": table(
            "What became of copies from each GPU (row) to each other (column)",
            ["From \N{RIGHTWARDS ARROW} to", *(_short(address) for address in addresses)],
            [(_short(row[0]), *row[1:]) for row in rows],
        ),
        "reasons": [
            f"{pair['from']} \N{RIGHTWARDS ARROW} {pair['to']}: {pair['reason']}"
            for pair in result["pairs"]
            if pair.get("reason")
        ],
        "faults": [str(fault["line"]) for fault in result.get("faults") or ()],
        "problems": [str(problem) for problem in result.get("problems") or ()],
    }


def _short(address: str) -> str:
    """Leave out the PCI domain that nearly all hosts have alone."""
    return address.removeprefix("0000:")


def _pair(pair: Mapping[str, Any] | None, same: bool) -> dict[str, str]:
    if same:
        return cell("same GPU", "none")
    if pair is None:
        return cell("untested", "unknown")
    ways = {"write": pair["write"], "read": pair["read"]}
    worst = next(word for word in _COPIES if word in ways.values())
    text, tone = _COPIES[worst]
    of = [way for way, word in ways.items() if word == worst]
    return cell(text if len(of) == len(ways) else f"{text} ({of[0]})", tone)


def _seconds(text: object) -> float | None:
    try:
        return float(str(text))
    except ValueError:
        return None


def timeline(
    facts: Mapping[str, Any],
    p2p: Mapping[str, Any],
    starts: Sequence[Mapping[str, Any]],
    changes: Sequence[str],
    at: str,
) -> dict[str, Any]:
    """Return what happened, in order: `dated` by time of day, `since_boot` by seconds since it.

    Only what is known with its time is in it.

    Args:
        facts: result of `gpu_host_info`.
        p2p: what `p2p_tests` returned.
        starts: of the benchmark, each with `arm`, `start` and `at`.
        changes: what this run changed.
        at: time of this run.
    """
    events = [*_boots(facts), *_faults(facts), *_trial(facts), *_tests(p2p)]
    for start in starts:
        events.append(_event(start["at"], f"benchmark: start {start['start']} of {start['arm']}"))
    events += [_event(at, f"changed: {change}") for change in changes]
    dated = [(time, event) for event in events if (time := moment(event["at"]))]
    booted = [(after, e) for e in events if (after := _seconds(e["at"])) is not None]
    return {
        "dated": [
            {**event, "at": when(event["at"])}
            for _time, event in sorted(dated, key=lambda pair: pair[0])
        ],
        "since_boot": [
            {**event, "at": f"{after:.1f} s"}
            for after, event in sorted(booted, key=lambda pair: pair[0])
        ],
        "gaps": [str(gap) for gap in _log(facts).get("gaps") or ()],
    }


def _log(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    log: Mapping[str, Any] = (facts["health"] or {}).get("log") or {}
    return log


def _event(at: object, text: str, tone: str = "plain") -> dict[str, str]:
    return {"at": str(at), "text": text, "tone": tone}


def _boots(facts: Mapping[str, Any]) -> list[dict[str, str]]:
    events = []
    log, kernel = _log(facts), facts["host"]["kernel"] or "of unknown release"
    if log.get("first"):
        began = f"this boot began, kernel {kernel}"
        kept = f"the kernel log of this boot begins here, kernel {kernel}; what was before is lost"
        events.append(_event(log["first"], began if log.get("complete") else kept))
    for boot in (facts["health"] or {}).get("history") or ():
        ill = [gpu for gpu in boot["gpus"] if gpu["verdict"] in ("failed", "lost", "degraded")]
        said = "; ".join(f"{gpu['address']} was {gpu['verdict']}" for gpu in ill)
        events.append(_event(boot["first"], "an earlier boot began"))
        events.append(_event(boot["last"], "; ".join(filter(None, ("that boot ended", said)))))
    return events


def _faults(facts: Mapping[str, Any]) -> list[dict[str, str]]:
    events = []
    for fault in (facts["health"] or {}).get("faults") or ():
        who = fault["address"] or "a GPU that the log does not name"
        more = f", {fault['count']} times until {when(fault['last'])}" if fault["count"] > 1 else ""
        over = "" if fault["current"] else "; it does not count any more"
        tone = "problem" if fault["current"] else "plain"
        said = f"{who}: {fault.get('meaning') or fault['class']} ({fault['id']}){more}{over}"
        events.append(_event(fault["first"], said, tone))
    return events


def _trial(facts: Mapping[str, Any]) -> list[dict[str, str]]:
    trial = facts["host"]["trial"]
    if not trial:
        return []
    what = f"IOMMU group type {trial['type']} for {', '.join(sorted(trial['gpus']))}"
    return [_event(trial["armed"], f"a trial of {what} was armed")]


def _tests(p2p: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the tests of copies, those that the host remembers once."""
    events = {}
    for test in (*p2p["kept"], *p2p["tests"]):
        said = f"copies between {len(test['addresses'])} GPUs tested {test['where']}"
        verdict = test["verdict"]
        event = _event(test["time"], f"{said}: {verdict['text']}", verdict["tone"])
        events[(test["time"], said)] = event
    return list(events.values())


def configuration(facts: Mapping[str, Any], servers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what is in force beside the boot parameters: options of modules, flags of servers."""
    options = [
        (f"{line['command']} {line['module']}", line["value"], f"{line['file']}:{line['line']}")
        for line in facts["host"]["modprobe"]
    ]
    columns = ("What", "Value", "File and line")
    return {
        "modprobe": table("Lines of modprobe.d that are in force", columns, options)
        if options
        else None,
        "servers": [
            {"name": name, "flags": table(f"Flags of {name}", ("Flag", "Value"), flags)}
            for name, flags in ((_name(result), _flags(result)) for result in servers)
            if flags
        ],
    }


def _name(result: Mapping[str, Any]) -> str:
    server = result["server"]
    return str(result.get("name") or server.get("model_id") or server.get("url") or "server")


def _flags(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    flags = result["server"].get("flags") or {}
    return [(name, str(flags[name])) for name in _FLAGS if flags.get(name) is not None]


def capacity(
    servers: Sequence[Mapping[str, Any]], arms: Sequence[Mapping[str, Any]]
) -> dict[str, Any] | None:
    """Return how much fits the servers, as measured and as predicted; `None` when not known.

    Args:
        servers: results of `sglang_info`.
        arms: what ran in the arms of a benchmark, as `measured` returns it.
    """
    rows: list[tuple[dict[str, str] | str, ...]] = []
    for result in servers:
        server = result["server"]
        got = (server.get("effective_max_running_requests"), server.get("kv_tokens"))
        if any(value is not None for value in got):
            rows.append((f"{_name(result)}, now", *map(cell, got), "told by the server"))
        predicted = result.get("capacity") or {}
        for arm, title in (("without_mtp", "without MTP"), ("with_mtp", "with MTP")):
            values = predicted.get(arm)
            if values:
                numbers = (values.get("max_running_requests"), values.get("kv_tokens"))
                why = "; ".join(values.get("unknown") or ())
                said = f"predicted{f', limited by {w}' if (w := values.get('limited_by')) else ''}"
                rows.append((f"{_name(result)}, {title}", *map(_predicted, numbers), why or said))
    for ran in arms:
        tokens = " to ".join(map(str, ran["kv_tokens"]))
        said = f"the most that ran in {ran['starts']} measured starts"
        rows.append((f"arm {ran['arm']}", cell(ran["most"]), cell(tokens or None), said))
    columns = ("Server", "Requests at once", "Tokens in the cache", "How it is known")
    return table("How much fits at once", columns, rows) if rows else None


def _predicted(value: Any) -> dict[str, str]:
    return cell("unknown" if value is None else value)


def undo(facts: Mapping[str, Any], servers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what was meant for a while and has to be taken back, a sentence each."""
    tests = [test for test in facts["p2p"]["tests"] if test["valid"]]
    said = []
    seen = False
    for server in facts["p2p"]["servers"]:
        switches = [word for key, word in _FALLBACK if server[key]]
        if switches:
            seen = True
            works = any(
                test["verdict"] == "works" and set(server["addresses"]) <= set(test["addresses"])
                for test in tests
            )
            when = (
                "copies between its GPUs work now, so take it out and compare by a benchmark"
                if works
                else "take it out on the day the playbook check_p2p says that copies work"
            )
            said.append(
                f"{' and '.join(switches)} of {server['title']}, the fallback without P2P: {when} "
                "(role sglang: sglang_p2p_fallback: false)."
            )
    for result in () if seen else servers:
        if (result["server"].get("flags") or {}).get("disable_custom_all_reduce") is True:
            said.append(
                f"--disable-custom-all-reduce of {_name(result)}, part of the fallback without "
                "P2P: take it out on the day the playbook check_p2p says that copies work."
            )
    trial = facts["host"]["trial"]
    if trial and trial["state"] in ("running", "confirmed"):
        said.append(
            f"The trial of type {trial['type']}: it ends with this boot. Declare the type in "
            "gpu_layout to keep it."
        )
    return said


def way_back(facts: Mapping[str, Any], servers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return how to take back what is configured, as the roles document it, a sentence each."""
    said = []
    trial = facts["host"]["trial"]
    if trial and trial["state"] == "armed":
        said.append(
            "The armed trial: ansible HOST -b -m gpuhost.inference.iommu_trial -a state=absent."
        )
    if trial and trial["state"] in ("running", "confirmed"):
        said.append("The trial that runs: reboot; the types are then as before.")
    if facts["layout"]["entries"]:
        said.append(
            "Drivers and IOMMU group types: write the former gpu_layout and run the playbook site. "
            "gpu_passthrough_state: absent takes back what is kept over boots; what is in force "
            "stays until the next boot."
        )
    said.append(
        "Parameters of the kernel and options of modules that the role kernel_cmdline set: "
        "kernel_cmdline_state: absent, then reboot."
    )
    if any((result["server"].get("speculation") or {}).get("algorithm") for result in servers):
        said.append(
            "MTP: sglang_mtp_state: absent, then the playbook deploy_sglang. MTP's flags and "
            "environment go, all others stay."
        )
    if servers:
        said.append(
            "The server: run deploy_sglang with the former variables; what it had before the last "
            "change is in /var/lib/gpuhost/sglang/SERVICE on its machine."
        )
    said.append(
        "Then look in this order: GPUs in nvidia-smi, group types, drivers of the GPUs of virtual "
        "machines, guests, server. The playbook audit shows all of it."
    )
    return said

"""The scheduled check: its program, what the role installs, and the alerts over its metrics."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import jinja2
import pytest
import yaml
from ansible_collections.gpuhost.inference.plugins.module_utils import _health_state as health_state
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._files import plan_files
from ansible_collections.gpuhost.inference.plugins.module_utils._kernel_log import read_blocks
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parent.parent.parent
ROLE = ROOT / "roles/gpu_health"
UTILS = ROOT / "plugins/module_utils"
PACKAGE = "ansible_collections.gpuhost.inference.plugins.module_utils"
VARS = yaml.safe_load((ROLE / "vars/main.yml").read_text(encoding="utf-8"))
ALERTS = ROLE / "files/gpuhost-alerts.yml"
FOLDER = "/var/lib/prometheus/node-exporter"
LOG = (
    b"[    0.000000] Linux version 6.17.2-1-pve\n"
    b"[  901.250000] NVRM: Xid (PCI:0000:43:00): 79, GPU has fallen off the bus.\n"
)

# -- the program ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def program() -> ModuleType:
    """Load the program, which has no name that could be imported."""
    loader = SourceFileLoader("gpuhost_health", str(ROLE / "files/gpuhost-health"))
    module = ModuleType(loader.name)
    module.__file__ = loader.path
    exec(compile(loader.get_data(loader.path), loader.path, "exec"), module.__dict__)
    return module


@pytest.fixture
def root(host_tree: Callable[[str], Path]) -> Path:
    root = host_tree("eight-gpus")
    (root / "proc/sys/kernel/random").mkdir(parents=True, exist_ok=True)
    (root / "proc/sys/kernel/random/boot_id").write_text("0b1d5a7e-9c3f-4e2d-8a6b-7c5d4e3f2a10\n")
    return root


Check = Callable[..., int]


@pytest.fixture
def check(program: ModuleType, root: Path) -> Check:
    """Run the program on the tree; return its exit status."""

    def call(*words: str, log: bytes = LOG, **environment: str) -> int:
        options = ["--metrics", FOLDER, "--collection", "9.8.7", *words]
        status: int = program.main(options, str(root), environment, read_blocks([log]))
        return status

    return call


def state(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / health_state.STATE[1:]).read_text())
    return found


def metrics(root: Path) -> dict[str, float]:
    text = (root / f"{FOLDER}/gpuhost.prom"[1:]).read_text()
    return {
        " ".join([one.name, *sorted(one.labels.values())]): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


def test_ill_gpus_do_not_fail_the_check(check: Check, root: Path, capsys: Any) -> None:
    assert check() == 0
    assert capsys.readouterr().out.startswith("gpuhost: 0000:43:00.0 lost: ")
    assert metrics(root)["gpuhost_gpu_verdict 0000:43:00.0 lost"] == 1
    assert metrics(root)[
        "gpuhost_gpu_info 0000:81:00.0 RTX PRO 6000 Blackwell Server Edition vfio-pci"
    ]
    found = state(root)
    assert (found["ok"], found["boot_id"]) == (True, "0b1d5a7e9c3f4e2d8a6b7c5d4e3f2a10")
    assert found["faults"][0]["id"] == "xid-79"
    for path in (health_state.STATE, f"{FOLDER}/gpuhost.prom"):
        assert (root / path[1:]).stat().st_mode & 0o777 == 0o644  # node_exporter is not root
        assert len(list((root / path[1:]).parent.iterdir())) == 1


def test_a_check_that_fails_leaves_no_verdict_standing(
    check: Check, root: Path, program: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check() == 0

    def broken(_host: Any) -> Any:
        raise GpuHostError("/sys/bus/pci/devices could not be listed: Input/output error")

    monkeypatch.setattr(program, "read_gpus", broken)
    assert check() == program.TOLD
    assert state(root)["error"] == "/sys/bus/pci/devices could not be listed: Input/output error"
    assert metrics(root)["gpuhost_gpu_verdict 0000:44:00.0 unknown"] == 1
    assert metrics(root)["gpuhost_gpu_verdict 0000:44:00.0 healthy"] == 0
    assert metrics(root)["gpuhost_health_check_ok"] == 0
    # what the check has told itself is not told again by ExecStopPost
    check("--after", SERVICE_RESULT="exit-code", EXIT_CODE="exited", EXIT_STATUS="3")
    assert state(root)["error"] == "/sys/bus/pci/devices could not be listed: Input/output error"


@pytest.mark.parametrize(
    ("result", "status"), [("timeout", "TERM"), ("oom-kill", "KILL"), ("exit-code", "1")]
)
def test_a_check_that_was_ended_is_told_by_the_next_process(
    check: Check, root: Path, result: str, status: str
) -> None:
    check()
    assert check("--after", SERVICE_RESULT=result, EXIT_STATUS=status) == 0
    assert result in state(root)["error"]
    assert metrics(root)["gpuhost_gpu_verdict 0000:44:00.0 unknown"] == 1


def test_a_check_that_ended_well_is_left(check: Check, root: Path) -> None:
    check()
    before = state(root)
    check("--after", SERVICE_RESULT="success", EXIT_STATUS="0")
    assert state(root) == before


def test_a_state_that_is_not_understood_is_said_and_replaced(
    check: Check, root: Path, capsys: Any
) -> None:
    check()
    (root / health_state.STATE[1:]).write_text("{}")
    assert check() == 0
    assert "health.json is not understood" in capsys.readouterr().out
    assert state(root)["version"] == 1


@pytest.mark.parametrize("content", ["[" * 200000, None], ids=["deep", "a folder"])
@pytest.mark.parametrize("after", [False, True])
def test_a_state_that_cannot_be_read_leaves_no_verdict_standing(
    check: Check, root: Path, content: str | None, after: bool
) -> None:
    check()
    assert metrics(root)["gpuhost_gpu_verdict 0000:44:00.0 healthy"] == 1
    at = root / health_state.STATE[1:]
    at.unlink()
    if content is None:
        at.mkdir()
    else:
        at.write_text(content)
    words = ["--after"] if after else []
    status = check(*words, log=b"", SERVICE_RESULT="exit-code", EXIT_STATUS="1")
    assert metrics(root).get("gpuhost_gpu_verdict 0000:44:00.0 healthy", 0) == 0
    if content is None:
        assert status == 1
        assert metrics(root)["gpuhost_health_check_ok"] == 0
    else:
        assert status == 0
        assert state(root)["version"] == 1


def test_a_gpu_that_gpu_reset_started_is_not_lost_any_more(check: Check, root: Path) -> None:
    started = {
        "version": 1,
        "boot": "0b1d5a7e9c3f4e2d8a6b7c5d4e3f2a10",
        "addresses": {"0000:43:00.0": 950.5},
    }
    (root / "var/lib/gpuhost").mkdir(parents=True, exist_ok=True)
    (root / "var/lib/gpuhost/started.json").write_text(json.dumps(started))
    assert check() == 0
    assert metrics(root)["gpuhost_gpu_verdict 0000:43:00.0 lost"] == 0
    assert metrics(root)["gpuhost_gpu_verdict 0000:43:00.0 healthy"] == 1


def test_the_role_finds_metrics_that_a_check_left_in_another_folder(
    check: Check, root: Path
) -> None:
    found = re.search(r"regex_findall\('([^']*)'\)", VARS["__gpu_health_left"])
    assert found
    assert check() == 0
    text = (root / health_state.STATE[1:]).read_text()
    assert re.findall(found[1], text) == [FOLDER]
    assert check("--metrics", "") == 0
    assert re.findall(found[1], (root / health_state.STATE[1:]).read_text()) == []


def test_nothing_can_be_written(check: Check, root: Path, capsys: Any) -> None:
    (root / FOLDER[1:]).mkdir(parents=True)
    (root / f"{FOLDER}/gpuhost.prom"[1:]).mkdir()
    assert check() == 1  # neither 0 nor TOLD: ExecStopPost tries once more
    assert "gpuhost.prom is a folder" in capsys.readouterr().out


def test_no_metrics_when_nobody_wants_them(program: ModuleType, root: Path) -> None:
    assert program.main([], str(root), {}, read_blocks([LOG])) == 0
    assert not (root / "var/lib/prometheus").exists()
    assert state(root)["collection"] == "unknown"


# -- the role -------------------------------------------------------------------------------------


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
            last = (node.module or "").removeprefix(PACKAGE).lstrip(".")
            found |= {last} if last else {alias.name for alias in node.names}
    return found


def test_role_copies_just_what_the_program_imports() -> None:
    wanted, todo = set[str](), [ROLE / "files/gpuhost-health"]
    while todo:
        new = _imports(todo.pop()) - wanted
        wanted |= new
        todo += [UTILS / f"{name}.py" for name in new]
    assert VARS["__gpu_health_modules"] == sorted(wanted)


def _resolved(variables: dict[str, Any], name: str) -> list[str]:
    """Return a list of the role's paths with its other variables in their place."""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)
    known: dict[str, str] = {}
    for key, value in variables.items():
        if isinstance(value, str) and re.match(r"(\{\{ \w+ \}\})?/", value):
            known[key] = environment.from_string(value).render(known)
    return [environment.from_string(one).render(known) for one in variables[name]]


def test_neither_role_sweeps_what_the_other_installs(tmp_path: Path) -> None:
    other = yaml.safe_load((ROOT / "roles/gpu_passthrough/vars/main.yml").read_text("utf-8"))
    folder = tmp_path / "usr/local/lib/gpuhost"
    ours = {"gpuhost-health", f"health/{PACKAGE.replace('.', '/')}/_pci.py"}
    theirs = {"gpuhost-boot", f"{PACKAGE.replace('.', '/')}/_pci.py"}
    for name in ours | theirs:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()

    def left_by(sweep: list[str]) -> set[str]:
        gone = {step.path for step in plan_files(tmp_path, [], sweep)}
        files = [path for path in folder.rglob("*") if path.is_file()]
        kept = [path for path in files if f"/{path.relative_to(tmp_path)}" not in gone]
        return {str(path.relative_to(folder)) for path in kept}

    assert left_by(_resolved(other, "__gpu_passthrough_sweep")) == ours
    assert left_by(_resolved(VARS, "__gpu_health_sweep")) == theirs


def unit(kind: str, **more: Any) -> dict[str, list[str]]:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ROLE / "templates"), undefined=jinja2.StrictUndefined
    )
    environment.filters.update(comment="# {}".format)
    text = environment.get_template(f"gpuhost-health.{kind}.j2").render(
        ansible_managed="Ansible managed",
        gpu_health_interval="90",  # a survey hands over text
        gpu_health_metrics_dir=FOLDER,
        __gpu_health_program="/usr/local/lib/gpuhost/gpuhost-health",
        __gpu_health_words="--metrics X",
        __gpu_health_limit="120",
        **more,
    )
    settings: dict[str, list[str]] = {}
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            settings.setdefault(key, []).append(value)
    return settings


def test_unit_tells_of_a_check_that_systemd_ends_and_is_bounded() -> None:
    service = unit("service")
    assert service["ExecStopPost"] == [f"{service['ExecStart'][0]} --after"]
    assert service["TimeoutStartSec"] == ["120"]
    # it sees the kernel's log, and no GPU's node
    assert (service["DevicePolicy"], service["DeviceAllow"]) == (["closed"], ["/dev/kmsg r"])
    assert not {"PrivateDevices", "ProtectKernelLogs"} & service.keys()
    assert unit("timer")["OnUnitActiveSec"] == ["90"]
    assert unit("timer")["RandomizedDelaySec"] == ["9"]


# -- alerts and dashboard -------------------------------------------------------------------------

WORDS = {"verdict": health_state.VERDICTS, "state": health_state.FSP_STATES}
OF_PROMETHEUS = {"instance", "job"}


def _expressions() -> Iterator[str]:
    for group in yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]:
        for rule in group["rules"]:
            yield rule["expr"]
            yield from rule["annotations"].values()
    board = json.loads((ROLE / "files/gpuhost-dashboard.json").read_text(encoding="utf-8"))
    for panel in board["panels"]:
        for target in panel["targets"]:
            yield target["expr"]


def test_alerts_and_dashboard_name_what_the_check_writes(check: Check, root: Path) -> None:
    check()
    text = (root / f"{FOLDER}/gpuhost.prom"[1:]).read_text()
    written = {
        family.name: set().union(*(one.labels for one in family.samples))
        for family in text_string_to_metric_families(text)
    }
    labels = set().union(*written.values(), OF_PROMETHEUS)
    used = set()
    for text in _expressions():
        for name, matchers in re.findall(r"\b(gpuhost_\w+)(\{[^}]*\})?", text):
            used.add(name)
            for label, value in re.findall(r"(\w+)=~?['\"]([^'\"]*)", matchers):
                assert label in written[name] | OF_PROMETHEUS, (name, label)
                assert value in WORDS.get(label, [value]), (name, label, value)
        for listed in re.findall(r"(?:by|on|ignoring|without|group_left) ?\(([\w, ]+)\)", text):
            assert set(listed.split(", ")) <= labels, text
        assert set(re.findall(r"\$labels\.(\w+)", text)) <= labels, text
    assert used <= written.keys()
    # and all of it is shown or watched
    assert written.keys() - used == {"gpuhost_health_last_check_timestamp_seconds"}


def test_each_alert_has_its_section_in_the_readme() -> None:
    headings = re.findall(r"^#+ (\w+)$", (ROLE / "README.md").read_text("utf-8"), re.MULTILINE)
    for group in yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]:
        for rule in group["rules"]:
            assert {"summary", "description", "remedy"} < rule["annotations"].keys()
            page, _hash, anchor = rule["annotations"]["runbook_url"].partition("#")
            assert page.endswith("/roles/gpu_health/README.md")
            assert anchor == rule["alert"].lower()
            assert rule["alert"] in headings


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool (Debian: prometheus) is missing")
def test_alerts_begin_and_end_as_meant() -> None:
    subprocess.run(["promtool", "check", "rules", ALERTS], check=True)
    tests = ROOT / "tests/monitoring/gpuhost-alerts.yml"
    subprocess.run(["promtool", "test", "rules", tests.name], check=True, cwd=tests.parent)


# -- the rulebook ---------------------------------------------------------------------------------


def test_rulebook_is_guarded() -> None:
    rulebook = ROOT / "extensions/eda/rulebooks/gpu_recover.yml"
    [rules] = yaml.safe_load(rulebook.read_text(encoding="utf-8"))
    [source], [rule] = rules["sources"], rules["rules"]
    assert source["eda.builtin.webhook"]["token"]
    # the host is that of the alert, or there is none and the condition does not hold
    host = source["filters"][0]["eda.builtin.insert_hosts_to_meta"]["host_path"]
    assert f"event.{host} is match(" in rule["condition"]
    assert rule["throttle"]["group_by_attributes"] == [f"event.{host}"]
    pattern = re.search(r'is match\("([^"]+)"\)', rule["condition"])
    assert pattern
    for name in ("all", "proxmox_hosts", "pve-a:9100", "pve-a,pve-b", "!pve-a", "pve-*", ""):
        assert not re.search(pattern[1], name), name
    assert re.search(pattern[1], "pve-a.example.net")
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    alerts = {one["alert"] for group in groups for one in group["rules"]}
    named = re.findall(r"Gpuhost\w+", rule["condition"])
    assert named
    assert alerts.issuperset(named)
    # what the inventory says about reboots stands
    assert rule["action"] == {"run_playbook": {"name": "gpuhost.inference.recover"}}

"""A trial of IOMMU group types: one boot takes it, and only one, whatever happens."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils import _trial as trials
from ansible_collections.gpuhost.inference.plugins.module_utils._arming import Wish, change_trial
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._persistence import (
    Kept,
    Layout,
    stamp,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader

GPU, OTHER, ID = "0000:41:00.0", "0000:42:00.0", "10de:2bb5"
BOOT_FILE = "proc/sys/kernel/random/boot_id"
ARMED = trials.Trial(
    state="armed",
    type="identity",
    gpus={GPU: ID},
    accept=("fsp-identity",),
    armed="2026-03-04T05:06:07Z",
    armed_boot="first",
    since=400.0,
    expires=1000.0,
    confirm=600,
)


def boot(root: Path, id_: str) -> Reader:
    """Have the host be in another boot."""
    (root / BOOT_FILE).parent.mkdir(parents=True, exist_ok=True)
    (root / BOOT_FILE).write_text(f"{id_}\n")
    return Reader(str(root))


def in_file(root: Path, trial: trials.Trial) -> None:
    trials.save_trial(Reader(str(root)), trial)


def test_exactly_one_boot_takes_it(tmp_path: Path) -> None:
    host = boot(tmp_path, "first")
    in_file(tmp_path, replace(ARMED, since=time.time(), expires=time.time() + 60))
    assert trials.take(host, 0) is None  # the boot it was armed in goes on as it is
    host = boot(tmp_path, "second")
    assert "this boot tries type identity for 0000:41:00.0" in str(trials.take(host, 0))
    taken = trials.read_trial(host)
    assert taken is not None
    assert taken.in_force("second")
    assert trials.take(host, 0) is None  # asked again in the same boot, by the unit
    host = boot(tmp_path, "third")
    assert "not confirmed, ended by a reboot" in str(trials.take(host, 0))
    ended = trials.read_trial(host)
    assert ended is not None
    assert not any(ended.in_force(one) for one in ("first", "second", "third"))
    assert trials.take(boot(tmp_path, "fourth"), 0) is None


@pytest.mark.parametrize(
    ("trial", "boot_id", "now", "state"),
    [
        (ARMED, "first", 2000, "armed"),
        (ARMED, "second", 999, "running"),
        (ARMED, "second", 1001, "ended"),
        (ARMED, "second", 350, "running"),
        (ARMED, "second", 0, "ended"),  # a clock that began anew
        (replace(ARMED, state="running", boot="second"), "second", 9e9, "running"),
        (replace(ARMED, state="running", boot="second"), "third", 0, "ended"),
        (replace(ARMED, state="confirmed", boot="second"), "second", 0, "confirmed"),
        (replace(ARMED, state="confirmed", boot="second"), "third", 0, "ended"),
        (replace(ARMED, state="ended", boot="second", outcome="x"), "third", 0, "ended"),
    ],
)
def test_states_follow_the_boots(trial: trials.Trial, boot_id: str, now: float, state: str) -> None:
    after = trials.follow(trial, boot_id, now)
    assert after.state == state
    assert trials.follow(after, boot_id, now) == after


def test_what_cannot_be_noted_is_not_tried(tmp_path: Path) -> None:
    host = boot(tmp_path, "second")
    in_file(tmp_path, replace(ARMED, since=time.time(), expires=time.time() + 60))
    folder = tmp_path / trials.TRIAL[1:]
    folder.with_suffix(".new").mkdir()  # writing fails, for root as well
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            folder.with_suffix(".new").rmdir()  # the file system was mounted meanwhile

    with pytest.raises(GpuHostError, match="is left alone"):
        trials.take(host, 0, wait)
    left = trials.read_trial(host)
    assert left is not None
    assert left.state == "armed"
    assert "this boot tries" in str(trials.take(host, 60, wait))
    assert waits == [1, 1]


def test_layout_gets_the_type_for_the_right_card_only() -> None:
    layout = Layout(
        (
            Kept(GPU, ID, "inference", "nvidia", "DMA-FQ", 100),
            Kept(OTHER, ID, "inference", "nvidia", "DMA-FQ", 100),
        ),
        frozenset({"foreign-type"}),
    )
    running = replace(ARMED, state="running", boot="second")
    tried = trials.overlay(layout, running, "second")
    assert [gpu.iommu_type for gpu in tried.gpus] == ["identity", "DMA-FQ"]
    assert tried.accept == {"foreign-type", "fsp-identity"}
    exchanged = replace(running, gpus={GPU: "10de:2330"})
    assert trials.overlay(layout, exchanged, "second").gpus == layout.gpus
    virtual = Layout((replace(layout.gpus[0], driver="vfio-pci", vmid=200),), frozenset())
    assert trials.overlay(virtual, running, "second").gpus == virtual.gpus
    for trial in (None, ARMED, running, replace(running, state="ended")):
        assert trials.overlay(layout, trial, "third") == layout


def test_watch_ends_a_boot_that_nobody_confirms(tmp_path: Path) -> None:
    host = boot(tmp_path, "second")
    in_file(tmp_path, replace(ARMED, state="running", boot="second"))
    clock = [595.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    why = trials.watch(host, lambda: clock[0], sleep)
    assert "nobody confirmed type identity of 0000:41:00.0 within 600 s" in str(why)
    assert clock[0] == 600


@pytest.mark.parametrize("meanwhile", ["confirmed", "taken away"])
def test_watch_leaves_a_boot_alone(tmp_path: Path, meanwhile: str) -> None:
    host = boot(tmp_path, "second")
    running = replace(ARMED, state="running", boot="second")
    in_file(tmp_path, running)

    def sleep(_seconds: float) -> None:
        if meanwhile == "confirmed":
            in_file(tmp_path, replace(running, state="confirmed"))
        else:
            (tmp_path / trials.TRIAL[1:]).unlink()

    assert trials.watch(host, lambda: 10, sleep) is None
    in_file(tmp_path, ARMED)
    assert trials.watch(host, lambda: 9999, sleep) is None  # too late for this boot


def test_watch_goes_on_over_a_file_that_is_not_there_yet_or_cannot_be_read(tmp_path: Path) -> None:
    host = boot(tmp_path, "second")
    in_file(tmp_path, replace(ARMED, since=time.time(), expires=time.time() + 60))
    clock = [590.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds
        (tmp_path / trials.TRIAL[1:]).write_text("{")

    assert "nobody confirmed" in str(trials.watch(host, lambda: clock[0], sleep))
    with pytest.raises(GpuHostError, match="cannot be understood"):
        trials.watch(host, lambda: clock[0], sleep)  # nothing is known of it


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"state": "perhaps"},
        {"gpus": None},
        {"expires": "soon"},
        {"expires": 1e300},
        {"expires": 1e18},
        {"since": "now"},
        {"confirm": 0},
        {"more": 1},
    ],
)
def test_a_file_that_nobody_understands_is_an_error(
    tmp_path: Path, change: dict[str, object]
) -> None:
    host = boot(tmp_path, "second")
    in_file(tmp_path, ARMED)
    file = tmp_path / trials.TRIAL[1:]
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(GpuHostError, match=r"trial\.json cannot be understood"):
        trials.take(host, 0)
    file.write_text("{")
    with pytest.raises(GpuHostError, match=r"trial\.json cannot be understood"):
        trials.read_trial(host)


# -- Arming -----------------------------------------------------------------------------------


HOOK = "install nvidia /usr/local/lib/gpuhost/gpuhost-boot types; exec modprobe\n"


@pytest.fixture
def ready(host_tree: Callable[[str], Path]) -> Path:
    """Return a host that keeps a layout, with all that a trial needs."""
    root = host_tree("eight-gpus")
    boot(root, "first")
    (root / "run").mkdir(exist_ok=True)
    (root / "var/lib").mkdir(parents=True, exist_ok=True)
    entry = {"name": "inference", "driver": "nvidia", "iommu_type": None, "guest": {"vmid": 100}}
    _write(
        root,
        "etc/gpuhost/layout.json",
        json.dumps({"version": 1, "entries": [{**entry, "gpus": {GPU: ID, OTHER: ID}}]}),
    )
    _write(root, "usr/local/lib/gpuhost/gpuhost-boot", "")
    _write(root, "etc/systemd/system/multi-user.target.wants/gpuhost-trial.service", "")
    release = (root / "proc/sys/kernel/osrelease").read_text().strip()
    _write(root, f"lib/modules/{release}/modules.dep", "updates/dkms/nvidia.ko:\n")
    _write(root, "etc/kernel/proxmox-boot-uuids", "1234-ABCD\n")
    _write(root, "etc/kernel/proxmox-boot-pin", f"{release}\n")
    _write(root, "etc/default/grub", 'GRUB_CMDLINE_LINUX="root=ZFS=rpool/ROOT/pve-1"\n')
    for name in ("vmlinuz", "initrd.img"):
        _write(root, f"boot/{name}-{release}", "")
    tenant = root / "etc/pve/qemu-server/201.conf"
    tenant.write_text(tenant.read_text().replace("onboot: 1", "onboot: 0"))
    return root


def _write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def change(root: Path, state: str = "armed", *, check: bool = False, **wish: Any) -> dict[str, Any]:
    """Change the trial of a host on which modprobe and lsinitramfs answer as they should."""
    host = Reader(str(root))

    def run(command: Sequence[str], _seconds: float) -> str:
        if command[0] == "lsinitramfs":
            names = [stamp(host), "etc/udev/rules.d/10-gpuhost.rules"]
            return "\n".join([*names, "etc/modprobe.d/zz-gpuhost.conf", ""])
        return HOOK

    asked = Wish(
        **{
            "addresses": [GPU],
            "type": "identity",
            "accept": [],
            "valid_for": 3600,
            "confirm_timeout": 600,
            **wish,
        }
    )
    return change_trial(host, state, asked, run=run, now=time.time(), check=check)


def refused(result: dict[str, Any]) -> set[str]:
    assert "nothing was armed" in result["msg"]
    assert not result["changed"]
    return {guard["id"] for guard in result["guards"] if not guard["accepted"]}


def test_arming_changes_nothing_now_and_once(ready: Path) -> None:
    planned = change(ready, check=True)
    assert planned["changed"]
    assert list((ready / "var/lib").iterdir()) == []  # check mode writes nothing at all
    armed = change(ready)
    assert planned["guards"] == armed["guards"]
    assert planned["trial"]["gpus"] == armed["trial"]["gpus"]
    assert armed["trial"]["state"] == "armed"
    assert armed["trial"]["gpus"] == {GPU: ID}
    assert [guard["id"] for guard in armed["guards"] if guard["accepted"]] == ["fsp-identity"]
    assert "tries type identity for 0000:41:00.0" in armed["diff"]["after"]
    again = change(ready)
    assert not again["changed"]
    assert again["trial"] == armed["trial"]  # the time at which it expires included
    assert change(ready, addresses=[OTHER])["trial"]["gpus"] == {OTHER: ID}
    assert change(ready, "absent")["changed"]
    assert not change(ready, "absent")["changed"]


def _snp(root: Path) -> None:
    (root / "sys/module/kvm_amd/parameters/sev_snp").write_text("Y\n")


def _sme(root: Path) -> None:
    file = root / "proc/cmdline"
    file.write_text(f"{file.read_text().strip()} mem_encrypt=on\n")


def _typed(root: Path) -> None:
    (root / f"sys/bus/pci/devices/{GPU}/iommu_group/type").write_text("identity\n")


def _tenant(root: Path) -> None:
    file = root / "etc/pve/qemu-server/201.conf"
    file.write_text(file.read_text().replace("onboot: 0", "onboot: 1"))


def _ha(root: Path) -> None:
    _write(root, "etc/pve/ha/resources.cfg", "vm: 201\n\tstate started\n\nct: 100\n")


def _no_unit(root: Path) -> None:
    (root / "etc/systemd/system/multi-user.target.wants/gpuhost-trial.service").unlink()


def _other_card(root: Path) -> None:
    file = root / "etc/gpuhost/layout.json"
    file.write_text(file.read_text().replace(ID, "10de:2330"))


def _no_kernel(root: Path) -> None:
    (root / "etc/kernel/proxmox-boot-pin").write_text("9.9.9-1-pve\n")


def _cut_off(root: Path) -> None:
    record = {"version": 1, "boot": "first", "started": "", "wish": "", "before": {}, "types": {}}
    more: dict[str, list[str]] = {"awake": [], "services": [], "persistence": []}
    _write(root, "var/lib/gpuhost/transaction.json", json.dumps({**record, **more}))


@pytest.mark.parametrize(
    ("spoil", "guards"),
    [
        (_snp, {"snp-identity"}),
        (_sme, {"sme-identity"}),
        (_typed, {"same-type"}),
        (_tenant, {"guest-starts"}),
        (_ha, {"guest-starts"}),
        (_no_unit, {"no-way-back"}),
        (_other_card, {"not-kept"}),
        (_no_kernel, {"next-boot"}),
        (_cut_off, {"unfinished-change"}),
    ],
)
def test_everything_that_forbids_a_trial_is_told(
    ready: Path, spoil: Callable[[Path], None], guards: set[str]
) -> None:
    spoil(ready)
    assert refused(change(ready)) == guards
    assert not (ready / trials.TRIAL[1:]).exists()


def test_a_guest_that_ha_has_stopped_is_in_nobodys_way(ready: Path) -> None:
    _write(ready, "etc/pve/ha/resources.cfg", "vm: 201\n\tgroup a\n\tstate stopped\n")
    assert change(ready)["changed"]


def test_memory_encryption_can_be_accepted(ready: Path) -> None:
    _sme(ready)
    assert "sme-identity" in change(ready, accept=["sme-identity"])["trial"]["accept"]


def test_all_reasons_come_at_once(ready: Path) -> None:
    _tenant(ready)
    _no_unit(ready)
    assert refused(change(ready)) == {"guest-starts", "no-way-back"}


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"addresses": []}, "addresses is empty"),
        ({"addresses": ["0000:77:00.0"]}, "no PCI device there"),
        ({"confirm_timeout": 59}, "confirm_timeout is 59"),
        ({"valid_for": 0}, "valid_for 0"),
        ({"valid_for": 10**18}, "at most 604800"),
    ],
)
def test_a_wrong_wish_is_one_clear_error(ready: Path, wish: dict[str, Any], words: str) -> None:
    with pytest.raises(GpuHostError, match=words):
        change(ready, **wish)


def test_a_trial_in_force_is_confirmed_or_ends_with_its_boot(ready: Path) -> None:
    with pytest.raises(GpuHostError, match="nothing to confirm: there is no trial"):
        change(ready, "confirmed")
    change(ready)
    with pytest.raises(GpuHostError, match="nothing to confirm: the next boot"):
        change(ready, "confirmed")
    trials.take(boot(ready, "second"), 0)
    for state in ("armed", "absent"):
        with pytest.raises(GpuHostError, match="this boot tries type identity"):
            change(ready, state)
    assert change(ready, "confirmed")["trial"]["state"] == "confirmed"
    assert not change(ready, "confirmed")["changed"]
    with pytest.raises(GpuHostError, match="Reboot the host"):
        change(ready, "absent")
    layout = ready / "etc/gpuhost/layout.json"
    layout.write_text(layout.read_text().replace('"iommu_type": null', '"iommu_type": "identity"'))
    assert change(ready, type="DMA")["trial"]["type"] == "DMA"  # nothing depends on it any more
    assert change(ready, "absent")["trial"] is None

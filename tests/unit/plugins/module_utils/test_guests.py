"""Plans that make a guest's configuration name exactly the wanted GPUs, and carrying them out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._gpu import Companion, read_gpus
from ansible_collections.gpuhost.inference.plugins.module_utils._guests import (
    Plan,
    Wish,
    leftovers,
    parse_mappings,
    plan_container,
    plan_guest,
    plan_machine,
    read_situation,
    read_surroundings,
    set_gpus,
    settings_of,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader

CONTROL = ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"]
FOUR = ("0000:41:00.0", "0000:42:00.0", "0000:43:00.0", "0000:44:00.0")
NODES = {address: f"/dev/nvidia{minor}" for minor, address in enumerate(FOUR)}
LXC = "etc/pve/lxc/100.conf"
QEMU = "etc/pve/qemu-server/200.conf"


@pytest.fixture
def root(host_tree: Callable[[str], Path]) -> Path:
    return host_tree("eight-gpus")


def container(lines: Sequence[str], wanted: Sequence[str], **wish: Any) -> dict[str, str | None]:
    """Plan for a container with these device entries, GPUs named by their bus."""
    settings = [(f"dev{at}", value) for at, value in enumerate(lines) if value]
    paths = {path: address for address, path in NODES.items()}
    claims = {}
    for key, value in settings:
        address = paths.get(value.removeprefix("path=").split(",")[0])
        if address:
            claims[f"{key}: {value}"] = frozenset([address])
    addresses = tuple(f"0000:{bus}:00.0" for bus in wanted)
    nodes = {address: NODES[address] for address in addresses}
    plan = plan_container(settings, claims, nodes, Wish(addresses, **wish))
    assert not plan.problems
    return dict(plan.changes)


def test_a_container_with_its_gpus_needs_no_change() -> None:
    lines = ["/dev/nvidia0,gid=44", "path=/dev/nvidia1,gid=44", *CONTROL]
    assert container(lines, ["41", "42"]) == {}


def test_a_gpu_that_goes_leaves_the_numbers_of_the_others() -> None:
    lines = ["/dev/nvidia0", "/dev/nvidia1", "/dev/nvidia2", *CONTROL]
    assert container(lines, ["41", "43"]) == {"dev1": None}


def test_a_gpu_that_comes_takes_the_number_of_one_that_goes_and_the_owner_of_the_first() -> None:
    lines = ["/dev/nvidia0,gid=44,mode=0666", "/dev/nvidia1,gid=44", *CONTROL]
    assert container(lines, ["41", "44"]) == {"dev1": "/dev/nvidia3,gid=44,mode=0666"}


def test_a_gpu_that_comes_without_another_going_takes_the_lowest_free_number() -> None:
    lines = ["/dev/nvidia0", "", *CONTROL]
    assert container(lines, ["41", "42"]) == {"dev1": "/dev/nvidia1"}


def test_devices_of_others_stay_as_they_are() -> None:
    lines = ["/dev/ttyUSB0,uid=0,gid=20", "/dev/nvidia3", "/dev/fuse"]
    assert container(lines, [], mode="0666") == {"dev1": None}


def test_nodes_of_gpus_that_are_not_there_go() -> None:
    # community-scripts' builder lists every node there is; a card that went to a VM leaves a hole
    lines = [f"/dev/nvidia{minor},gid=44" for minor in range(8)]
    changes = container([*lines, *CONTROL], ["41", "42", "43", "44"])
    assert changes == {"dev4": None, "dev5": None, "dev6": None, "dev7": None}


def test_the_same_node_twice_is_once_too_often() -> None:
    assert container(["/dev/nvidia0", "/dev/nvidia0", *CONTROL], ["41"]) == {"dev1": None}


def test_control_nodes_are_added_once_and_never_taken() -> None:
    assert container(["/dev/nvidia0"], ["41"]) == {
        "dev1": CONTROL[0],
        "dev2": CONTROL[1],
        "dev3": CONTROL[2],
    }
    assert container(["/dev/nvidia0", *CONTROL], []) == {"dev0": None}
    assert container(["/dev/nvidia0"], ["41"], control_nodes=False) == {}


def test_an_asked_owner_holds_for_old_and_new_nodes_alike() -> None:
    lines = ["/dev/nvidia0,mode=0660,deny-write=1", *CONTROL]
    assert container(lines, ["41", "42"], uid=0, gid=44, mode="0666") == {
        "dev0": "/dev/nvidia0,mode=0666,deny-write=1,uid=0,gid=44",
        "dev1": "/dev/nvidiactl,uid=0,gid=44,mode=0666",
        "dev2": "/dev/nvidia-uvm,uid=0,gid=44,mode=0666",
        "dev3": "/dev/nvidia-uvm-tools,uid=0,gid=44,mode=0666",
        "dev4": "/dev/nvidia1,mode=0666,uid=0,gid=44",
    }


def test_pending_changes_count_and_raw_lines_may_repeat() -> None:
    config = [
        ("dev0", "/dev/nvidia0"),
        ("dev1", "/dev/nvidia1"),
        ("lxc.mount.entry", "/a a none bind"),
        ("lxc.mount.entry", "/b b none bind"),
        ("delete", "dev1"),
        ("dev0", "/dev/nvidia2"),
    ]
    assert settings_of(config) == [
        ("lxc.mount.entry", "/a a none bind"),
        ("lxc.mount.entry", "/b b none bind"),
        ("dev0", "/dev/nvidia2"),
    ]


@pytest.mark.parametrize(
    ("line", "left"),
    [
        (("lxc.cgroup2.devices.allow", "c 195:* rwm"), True),
        (("lxc.cgroup2.devices.allow", "c 505:* rwm"), True),
        (("lxc.cgroup2.devices.allow", "c 510:* rwm"), True),  # had been nvidia-uvm's
        (("lxc.cgroup2.devices.allow", "c 10:200 rwm"), False),
        (("lxc.cgroup2.devices.allow", "c 189:* rwm"), False),
        (("lxc.cgroup.devices.allow", "c 195:0 rw"), True),
        (("lxc.mount.entry", "/dev/nvidia0 dev/nvidia0 none bind,optional"), True),
        (("lxc.mount.entry", "/dev/net/tun dev/net/tun none bind"), False),
        (("lxc.apparmor.profile", "unconfined"), False),
    ],
)
def test_raw_lines_for_nvidia_nodes(line: tuple[str, str], left: bool) -> None:
    """Jammsen/proxmox-setup-scripts #7: fixed majors go stale when nvidia-uvm gets another."""
    found = leftovers([line], {10: "misc", 189: "usb_device", 195: "nvidia", 505: "nvidia-uvm"})
    assert [one.line for one in found] == ([f"{line[0]}: {line[1]}"] if left else [])


def test_a_stale_major_names_the_one_in_force() -> None:
    line = ("lxc.cgroup2.devices.allow", "c 510:* rwm")
    remedy = leftovers([line], {195: "nvidia", 505: "nvidia-uvm"})[0].remedy
    assert "no driver has major number 510; nvidia-uvm has 505 now" in remedy


def machine(
    root: Path, lines: Sequence[str], wanted: Sequence[str], *, mapping: str = "", **wish: Any
) -> Plan:
    """Plan for a machine with these lines on the host with eight GPUs, GPUs named by their bus."""
    if mapping:
        (root / "etc/pve/mapping/pci.cfg").write_text(mapping)
    config = [tuple(line.split(": ", 1)) for line in ("machine: q35", *lines)]
    host = Reader(str(root))
    addresses = tuple(f"0000:{bus}:00.0" for bus in wanted)
    settings = settings_of(list(config))
    gpus = read_gpus(host)
    for gpu in gpus[:1]:  # the first card has a sound function
        sound = Companion(gpu.address[:-1] + "1", "0x040300", None, None)
        gpus[0] = replace(gpu, companions=(sound,))
    return plan_machine(settings, gpus, read_surroundings(host, []), Wish(addresses, **wish))


@pytest.mark.parametrize(
    "line",
    [
        "hostpci0: 0000:81:00,pcie=1",
        "hostpci0: 81:00,pcie=1,rombar=0",
        "hostpci0: pcie=1,host=0000:81:00.0",
        "hostpci3: 0000:81:00.0",
    ],
)
def test_every_form_of_a_wanted_gpu_stays(root: Path, line: str) -> None:
    assert machine(root, [line, "hostpci5: 0000:00:1f.3"], ["81"]).changes == {}


def test_a_machines_entry_goes_and_the_others_keep_their_numbers(root: Path) -> None:
    lines = ["hostpci0: 0000:81:00,pcie=1", "hostpci1: 0000:82:00.0,pcie=1"]
    assert machine(root, lines, ["82"]).changes == {"hostpci0": None}
    assert machine(root, lines, []).changes == {"hostpci0": None, "hostpci1": None}


def test_a_swapped_gpu_takes_over_number_and_options(root: Path) -> None:
    lines = ["hostpci0: 0000:81:00,pcie=1", "hostpci1: 0000:82:00.0,pcie=1,x-vga=1,rombar=0"]
    assert machine(root, lines, ["81", "44"]).changes == {
        "hostpci1": "0000:44:00.0,pcie=1,x-vga=1,rombar=0"
    }


def test_a_gpu_does_not_take_what_was_said_of_the_card_before_it(root: Path) -> None:
    card = "romfile=old.bin,device-id=0x2bb5,vendor-id=0x10de,sub-device-id=0x204b,mdev=nvidia-63"
    lines = [f"hostpci0: 0000:82:00.0,pcie=1,{card},rombar=0"]
    assert machine(root, lines, ["44"]).changes == {"hostpci0": "0000:44:00.0,pcie=1,rombar=0"}


def test_a_new_gpu_has_what_the_others_have_in_common(root: Path) -> None:
    lines = ["hostpci0: 0000:81:00,pcie=1,x-vga=1,rombar=0"]
    assert machine(root, lines, ["81", "44"]).changes == {
        "hostpci1": "0000:44:00.0,pcie=1,rombar=0"
    }
    assert machine(root, [], ["44"], pcie=False).changes == {"hostpci0": "0000:44:00.0"}


def test_a_card_with_more_functions_is_given_whole(root: Path) -> None:
    assert machine(root, [], ["41"]).changes == {"hostpci0": "0000:41:00,pcie=1"}


def test_a_list_of_addresses_loses_only_what_is_not_wanted(root: Path) -> None:
    lines = ["hostpci0: 0000:81:00.0;0000:82:00.0,pcie=1"]
    assert machine(root, lines, ["82"]).changes == {"hostpci0": "0000:82:00.0,pcie=1"}


def test_a_gpu_named_twice_is_left_once(root: Path) -> None:
    lines = ["hostpci0: 0000:81:00.0", "hostpci4: 81:00"]
    assert machine(root, lines, ["81"]).changes == {"hostpci4": None}


def test_pcie_needs_q35_only_for_new_entries(root: Path) -> None:
    lines = ["machine: pc-i440fx-9.0", "hostpci0: 0000:81:00.0"]
    assert machine(root, lines, ["81"]).problems == ()
    assert "q35" in machine(root, lines, ["81", "82"]).problems[0]


def test_a_machine_has_sixteen_entries(root: Path) -> None:
    lines = [f"hostpci{number}: 0000:00:1f.3" for number in range(16)]
    assert "16 hostpci entries" in machine(root, lines, ["81"]).problems[0]


SPARE = "spare\n\tmap id=10de:2bb5,node=pve1,path=0000:83:00.0;0000:84:00.0\n"
SINGLE = "one\n\tmap node=pve2,path=0000:44:00.0\n\tmap node=pve1,path=0000:44:00.0,id=10de:2bb5\n"
POOL = "pool\n\tmap node=pve1,path=0000:81:00.0\n\tmap node=pve1,path=0000:82:00.0\n"


def test_a_mapping_of_wanted_gpus_stays(root: Path) -> None:
    plan = machine(root, ["hostpci0: mapping=spare,pcie=1"], ["83", "84"], mapping=SPARE)
    assert plan == Plan({})


def test_a_mapping_of_more_than_is_wanted_is_a_problem(root: Path) -> None:
    plan = machine(root, ["hostpci0: mapping=spare,pcie=1"], ["83"], mapping=SPARE)
    assert "stands for 0000:83:00.0, 0000:84:00.0" in plan.mapping_problems[0]


def test_an_unwanted_mapping_goes_from_the_machine_alone(root: Path) -> None:
    plan = machine(root, ["hostpci0: mapping=spare,pcie=1"], [], mapping=SPARE)
    assert plan == Plan({"hostpci0": None})


def test_a_machine_with_mappings_gets_a_mapping(root: Path) -> None:
    lines = ["hostpci0: mapping=spare,pcie=1"]
    plan = machine(root, lines, ["44", "83", "84"], mapping=SPARE + SINGLE)
    assert plan == Plan({"hostpci1": "mapping=one,pcie=1"})


def test_a_missing_mapping_is_named_with_the_command_that_makes_it(root: Path) -> None:
    lines = ["hostpci0: mapping=spare,pcie=1"]
    plan = machine(root, lines, ["44", "83", "84"], mapping=SPARE)
    assert plan.mapping_problems[0].endswith(
        "pvesh create /cluster/mapping/pci --id gpu-0000-44-00 --map node=pve1,"
        "path=0000:44:00.0,id=10de:2bb5,subsystem-id=10de:204e,iommugroup=45"
    )


def test_a_mapping_with_a_choice_is_certain_only_when_all_of_it_is_taken(root: Path) -> None:
    one, both = ["hostpci0: mapping=pool"], ["hostpci0: mapping=pool", "hostpci1: mapping=pool"]
    assert machine(root, both, ["81", "82"], mapping=POOL) == Plan({})
    assert "2 choices" in machine(root, one, ["81", "82"], mapping=POOL).mapping_problems[0]


def test_mapping_lines() -> None:
    lines = parse_mappings("a\n\tdescription x\n\tmap iommugroup=7,node=n1,path=0000:01:00\nb\n")
    assert [(one.mapping, one.node, one.iommugroup, one.paths) for one in lines] == [
        ("a", "n1", 7, ("0000:01:00",))
    ]


# everything together, on a host


class Tool:
    """Stands in for `pct set` and `qm set`: edits the configuration, or fails at the nth call."""

    def __init__(self, root: Path, *, fails_at: int = 0, ignores: bool = False) -> None:
        self.root, self.fails_at, self.ignores = root, fails_at, ignores
        self.calls: list[str] = []

    def __call__(self, command: Sequence[str]) -> str:
        self.calls.append(" ".join(command))
        if len(self.calls) == self.fails_at:
            raise GpuHostError(f"{command[0]} failed (255): can't lock file")
        tool, _set, vmid, *options = command
        file = self.root / f"etc/pve/{'lxc' if tool == 'pct' else 'qemu-server'}/{vmid}.conf"
        head, gap, rest = file.read_text().partition("\n[")
        lines = dict(line.split(": ", 1) for line in head.splitlines() if ": " in line)
        for option, value in zip(options[::2], options[1::2]):
            if option == "--delete":
                lines = {key: text for key, text in lines.items() if key not in value.split(",")}
            else:
                lines[option[2:]] = value
        if not self.ignores:
            file.write_text("".join(f"{k}: {v}\n" for k, v in lines.items()) + gap + rest)
        return ""


def change(
    root: Path, kind: str, vmid: int, wanted: Sequence[str], tool: Tool | None = None, **more: Any
) -> dict[str, Any]:
    """Run the whole change; GPUs by their bus."""
    wish = Wish(tuple(f"{bus}:00.0" for bus in wanted), **more.pop("wish", {}))
    run = tool or Tool(root)
    return set_gpus(Reader(str(root)), run, kind, vmid, wish, sleep=lambda _s: None, **more)


@pytest.fixture
def tools(root: Path) -> Path:
    """Make the node that CUDA needs beside those of the fixture."""
    (root / "dev/nvidia-uvm-tools").write_text("c 510:1")
    return root


def test_a_container_loses_and_gets_back_a_gpu(tools: Path) -> None:
    tool = Tool(tools)
    less = change(tools, "lxc", 100, ["41", "42", "43"], tool)
    assert less["changed"]
    assert tool.calls == ["pct set 100 --dev3 /dev/nvidia-uvm-tools,gid=44"]
    assert "\n[before]\ndev6: /dev/nvidia5" in (tools / LXC).read_text()  # the snapshot
    assert not change(tools, "lxc", 100, ["41", "42", "43"], tool)["changed"]
    back = change(tools, "lxc", 100, ["41", "42", "43", "44"], tool)
    assert back["writes"] == [
        {"path": "/etc/pve/lxc/100.conf", "key": "dev6", "value": "/dev/nvidia3,gid=44"}
    ]
    assert len(tool.calls) == 2


def test_check_mode_tells_and_does_nothing(root: Path) -> None:
    tool = Tool(root)
    result = change(root, "qemu", 200, ["81"], tool, check=True)
    assert result["changed"]
    assert result["diff"]["before"] == "hostpci1: host=82:00.0,pcie=1\n"
    assert result["diff"]["after"] == ""
    assert tool.calls == []


def test_a_refused_command_changes_nothing_else(root: Path) -> None:
    tool = Tool(root, fails_at=1)
    result = change(root, "qemu", 200, ["81"], tool)
    assert "can't lock file" in result["msg"]
    assert result["msg"].endswith("and is as before")
    assert not result["changed"]


def test_a_change_that_does_not_show_is_a_failure_and_is_set_back(root: Path) -> None:
    tool = Tool(root, ignores=True)
    result = change(root, "qemu", 200, ["81"], tool)
    assert "it still differs in hostpci1" in result["msg"]
    assert tool.calls == [
        "qm set 200 --delete hostpci1",
        "qm set 200 --hostpci1 host=82:00.0,pcie=1",
    ]


def test_what_could_not_be_set_back_is_said(root: Path) -> None:
    tool = Tool(root, fails_at=2, ignores=True)
    result = change(root, "qemu", 200, ["81"], tool)
    assert "could not be set back" in result["msg"]
    assert result["changed"]


def refused(root: Path, kind: str, vmid: int, wanted: Sequence[str], **more: Any) -> str:
    """Return the reasons for a refusal, after which no tool was called."""
    tool = Tool(root)
    result = change(root, kind, vmid, wanted, tool, **more)
    assert tool.calls == []
    assert not result["changed"]
    return str(result["msg"])


def test_a_running_guest_is_refused_and_stays_silent_when_nothing_is_to_be_done(
    tools: Path,
) -> None:
    (tools / "sys/fs/cgroup/lxc/100/cgroup.events").write_text("populated 1\n")
    assert "pct shutdown 100" in refused(tools, "lxc", 100, ["41"])
    with (tools / LXC).open("r+") as file:
        text = file.read()
        file.seek(0)
        file.write(f"dev9: /dev/nvidia-uvm-tools,gid=44\n{text}")
    assert not change(tools, "lxc", 100, ["41", "42", "43", "44"])["changed"]


def test_a_guest_of_unknown_state_or_with_a_lock_is_refused(tools: Path) -> None:
    (tools / "sys/fs/cgroup/cgroup.controllers").unlink()
    assert "could not be found out" in refused(tools, "lxc", 100, ["41"])
    file = tools / QEMU
    file.write_text(f"lock: backup\n{file.read_text()}")
    assert "locked (backup)" in refused(tools, "qemu", 200, ["81"])


def test_a_gpu_on_the_wrong_driver_is_refused(tools: Path) -> None:
    assert "is on driver vfio-pci" in refused(tools, "lxc", 100, ["41", "81"])
    assert "is on driver nvidia" in refused(tools, "qemu", 200, ["41", "81"])


def test_a_gpu_without_a_known_node_is_refused(tools: Path) -> None:
    (tools / "proc/driver/nvidia/gpus/0000:44:00.0/information").unlink()
    assert "does not say its device node" in refused(tools, "lxc", 100, ["44"])


def test_a_gpu_of_another_guest_is_refused_unless_allowed(tools: Path) -> None:
    said = refused(tools, "qemu", 200, ["81", "82", "83"])
    assert "0000:83:00.0 belongs to qemu guest 201, which runs" in said
    # the driver is still the wrong one
    said = refused(tools, "qemu", 200, ["41", "81", "82"], allow_from=[100])
    assert "guest 100" not in said


def test_raw_lines_of_a_container_are_refused(tools: Path) -> None:
    file = tools / LXC
    file.write_text(f"lxc.cgroup2.devices.allow: c 195:* rwm\n{file.read_text()}")
    said = refused(tools, "lxc", 100, ["41"])
    assert "lxc.cgroup2.devices.allow: c 195:* rwm" in said
    assert "remove the line" in said


def test_a_missing_control_node_is_named_with_the_command_that_makes_it(root: Path) -> None:
    said = refused(root, "lxc", 100, ["41"])
    assert "/dev/nvidia-uvm-tools does not exist" in said
    assert "nvidia-modprobe" in said


def test_nodes_that_udev_has_yet_to_make_are_waited_for(tools: Path) -> None:
    node = tools / "dev/nvidia3"
    node.unlink()
    with (tools / LXC).open() as file:
        text = file.read().replace("dev3: /dev/nvidia3,gid=44\n", "")
    (tools / LXC).write_text(text)
    waited = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        node.write_text("c 195:3")

    wish = Wish(("41:00.0", "42:00.0", "43:00.0", "44:00.0"))
    result = set_gpus(Reader(str(tools)), Tool(tools), "lxc", 100, wish, sleep=sleep)
    assert "msg" not in result
    assert waited == [1.0]
    assert "/dev/nvidia3,gid=44" in (tools / LXC).read_text()


def test_a_plan_may_take_guest_and_gpus_for_ready(tools: Path) -> None:
    (tools / "sys/fs/cgroup/lxc/100/cgroup.events").write_text("populated 1\n")
    addresses = ("0000:41:00.0", "0000:81:00.0")
    situation = read_situation(Reader(str(tools)), "lxc", 100)
    plan = plan_guest(situation, Wish(addresses), [200], assume=True)
    assert plan.problems == ()
    assert plan.changes["dev1"] == "/dev/nvidia(of 0000:81:00.0),gid=44"


@pytest.mark.parametrize(
    ("kind", "vmid", "wanted", "words"),
    [
        ("lxc", 999, ["41"], "no lxc guest 999 on this host: its lxc guests are 100"),
        ("lxc", 200, ["41"], "(it is of kind qemu)"),
        ("qemu", 200, ["99"], "0000:99:00.0 is no NVIDIA GPU of this host"),
        ("qemu", 200, ["81", "0000:81"], "0000:81:00.0 is listed twice"),
        ("qemu", 200, ["first"], "is not a PCI address"),
    ],
)
def test_bad_input(root: Path, kind: str, vmid: int, wanted: Sequence[str], words: str) -> None:
    with pytest.raises(GpuHostError) as caught:
        change(root, kind, vmid, wanted)
    assert words in str(caught.value)


def test_a_mode_without_quotes_is_no_octal_number_any_more(root: Path) -> None:
    with pytest.raises(GpuHostError, match="mode 438 is not octal"):
        change(root, "lxc", 100, ["41"], wish={"mode": "438"})

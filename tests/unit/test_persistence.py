"""What a host does by itself at boot: types, and the checks of drivers, types and images."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import subprocess
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from ansible_collections.gpuhost.inference.plugins.module_utils import _persistence as persistence
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._kernel_write import Machine
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader
from ansible_collections.gpuhost.inference.plugins.module_utils._transaction import HELD, Store
from fake_kernel import FakeKernel

ROOT = Path(__file__).parent.parent.parent
ROLE = ROOT / "roles/gpu_passthrough"
UTILS = ROOT / "plugins/module_utils"
PACKAGE = "ansible_collections.gpuhost.inference.plugins.module_utils"
ID = "10de:2bb5"
IMAGE = "/boot/initrd.img-6.14.11-4-pve"


@pytest.fixture
def root(host_tree: Callable[[str], Path]) -> Path:
    """Return the host with eight GPUs, as it is soon after a boot: typed DMA, marked, bound."""
    root = host_tree("eight-gpus")
    for number in (42, 43, 44, 45, 60, 61, 62, 63):
        (root / f"sys/kernel/iommu_groups/{number}/type").write_text("DMA\n")
    for address, driver in (("0000:41:00.0", "nvidia"), ("0000:81:00.0", "vfio-pci")):
        (root / f"sys/bus/pci/devices/{address}/driver_override").write_text(f"{driver}\n")
    return root


def keep(
    root: Path, *entries: dict[str, Any], accept: Sequence[str] = (), **more: Any
) -> persistence.Layout:
    """Have the host keep a layout, and return it as the host reads it."""
    file = root / persistence.LAYOUT[1:]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(
        json.dumps({"version": 1, "accept": accept, "entries": entries, **more}), encoding="utf-8"
    )
    return persistence.read_layout(Reader(str(root)))


def entry(*addresses: str, driver: str = "nvidia", type_: str | None = None, **more: Any) -> Any:
    return {
        "name": "inference",
        "driver": driver,
        "iommu_type": type_,
        "guest": None,
        "gpus": dict.fromkeys(addresses, ID),
        **more,
    }


def types(root: Path, layout: persistence.Layout, kernel: FakeKernel | None = None) -> Any:
    """Set the types; return what was said and what is still wrong."""
    said: list[str] = []
    kernel = kernel or FakeKernel(root)
    machine = Machine(Reader(str(root)), kernel, 1)
    return said, persistence.set_types(machine, layout, said.append)


def type_of(root: Path, address: str) -> str:
    return (root / f"sys/bus/pci/devices/{address}/iommu_group/type").read_text().strip()


def free(root: Path, address: str) -> None:
    (root / f"sys/bus/pci/devices/{address}/driver").unlink()


def test_type_is_set_and_said(root: Path) -> None:
    layout = keep(root, entry("0000:41:00.0", "0000:42:00.0", type_="DMA-FQ"))
    said, wrong = types(root, layout)
    assert said == ["0000:41:00.0 type DMA -> DMA-FQ", "0000:42:00.0 type DMA -> DMA-FQ"]
    assert wrong == []
    assert type_of(root, "0000:41:00.0") == "DMA-FQ"
    assert types(root, layout) == ([], [])  # a second time there is nothing to do


def test_type_of_a_free_gpu_and_of_one_on_vfio_can_be_any(root: Path) -> None:
    free(root, "0000:41:00.0")
    (root / "sys/bus/pci/devices/0000:81:00.0/iommu_group/type").write_text("DMA-FQ\n")
    layout = keep(
        root,
        entry("0000:41:00.0", type_="identity"),
        entry("0000:81:00.0", driver="vfio-pci", type_="DMA"),
        accept=["fsp-identity"],
    )
    said, wrong = types(root, layout)
    assert said == ["0000:41:00.0 type DMA -> identity", "0000:81:00.0 type DMA-FQ -> DMA"]
    assert wrong == []


def test_boot_takes_no_driver_off(root: Path) -> None:
    layout = keep(root, entry("0000:41:00.0", type_="identity"), accept=["fsp-identity"])
    kernel = FakeKernel(root)
    said, wrong = types(root, layout, kernel)
    assert said == kernel.writes == []
    assert "0000:41:00.0 has driver nvidia" in wrong[0]
    assert "type stays DMA, not identity" in wrong[0]


@pytest.mark.parametrize(
    ("snp", "accept", "guard"),
    [("N", [], "fsp-identity"), ("Y", ["fsp-identity", "snp-identity"], "snp-identity")],
)
def test_boot_lifts_no_guard_that_the_operator_has_not(
    root: Path, snp: str, accept: list[str], guard: str
) -> None:
    free(root, "0000:41:00.0")
    (root / "sys/module/kvm_amd/parameters/sev_snp").write_text(f"{snp}\n")
    said, wrong = types(root, keep(root, entry("0000:41:00.0", type_="identity"), accept=accept))
    assert said == []
    assert guard in wrong[0]
    assert type_of(root, "0000:41:00.0") == "DMA"


def test_another_card_at_the_address_is_left_alone(root: Path) -> None:
    layout = keep(
        root,
        entry("0000:41:00.0", type_="DMA-FQ", gpus={"0000:41:00.0": "10de:2330"}),
        entry("0000:99:00.0", type_="DMA-FQ"),
    )
    said, wrong = types(root, layout)
    assert said == []
    assert "the card there is 10de:2bb5, the layout has 10de:2330" in wrong[0]
    assert "0000:99:00.0 (inference): no device is there" in wrong[1]


def test_a_group_with_somebody_elses_device_is_left_alone(root: Path) -> None:
    (root / "sys/kernel/iommu_groups/42/devices/0000:84:00.0").symlink_to(
        "../../../../bus/pci/devices/0000:84:00.0"
    )
    said, wrong = types(root, keep(root, entry("0000:41:00.0", type_="DMA-FQ")))
    assert said == []
    assert "its group also holds 0000:84:00.0" in wrong[0]


def test_one_refusal_does_not_keep_the_others_from_their_type(root: Path) -> None:
    kernel = FakeKernel(root)
    kernel.answers[("/42/type", "DMA-FQ")] = 22  # EINVAL
    kernel.answers[("/43/type", "DMA-FQ")] = "stuck"
    layout = keep(root, entry("0000:41:00.0", "0000:42:00.0", "0000:43:00.0", type_="DMA-FQ"))
    said, wrong = types(root, layout, kernel)
    assert said == ["0000:43:00.0 type DMA -> DMA-FQ"]
    assert "EINVAL" in wrong[0]
    assert "has not returned" in wrong[1]


def test_host_as_declared_has_no_line(root: Path) -> None:
    layout = keep(
        root,
        entry("0000:41:00.0", type_="DMA"),
        entry("0000:81:00.0", driver="vfio-pci", type_="DMA"),
    )
    assert persistence.verify(Reader(str(root)), layout) == []


def test_each_wrong_gpu_has_one_line_with_all_that_is_wrong(root: Path) -> None:
    layout = keep(
        root,
        entry("0000:41:00.0", driver="vfio-pci", type_="auto", guest={"kind": "qemu", "vmid": 200}),
        entry("0000:42:00.0", type_="DMA", guest={"kind": "lxc", "vmid": 100}),
        entry("0000:83:00.0", driver="none"),
    )
    host = Reader(str(root))
    assert persistence.verify(host, layout) == [
        "0000:41:00.0 (inference): driver is nvidia, should be vfio-pci, "
        "driver_override is nvidia, should be vfio-pci, IOMMU group type is DMA, should be DMA-FQ",
        "0000:42:00.0 (inference): driver_override is not set, should be nvidia",
        "0000:83:00.0 (inference): driver is vfio-pci, should be none, driver_override is not set, "
        "should be none",
    ]
    lines = persistence.verify(host, layout, 100)
    assert [line.split()[0] for line in lines] == ["0000:42:00.0"]
    assert persistence.verify(host, layout, 101) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "is missing"),
        ("{", "cannot be understood"),
        ('{"version": 2, "entries": []}', "has version 2"),
        ('{"version": 1, "entries": [{"name": "x"}]}', "cannot be understood"),
        ('{"version": 1, "entries": "all"}', "cannot be understood"),
    ],
)
def test_layout_that_cannot_be_used_is_refused(
    tmp_path: Path, text: str | None, words: str
) -> None:
    if text is not None:
        (tmp_path / "etc/gpuhost").mkdir(parents=True)
        (tmp_path / "etc/gpuhost/layout.json").write_text(text)
    with pytest.raises(GpuHostError, match=words):
        persistence.read_layout(Reader(str(tmp_path)))


OURS = "install nvidia timeout 60 /usr/local/lib/gpuhost/gpuhost-boot types; exec modprobe\n"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (OURS, None),
        ("softdep snd_hda_intel pre: nvidia\ninstall nvidia-drm x\n" + OURS, None),
        (OURS + "softdep nvidia post: nvidia-uvm\n", "'softdep nvidia post: nvidia-uvm'"),
        ("install nvidia modprobe nvidia-current\n" + OURS, "nvidia-current', too"),
        (OURS + "install nvidia modprobe nvidia-current\n", "nvidia-current', too"),
        ("blacklist nouveau\n", "it is not there"),
    ],
)
def test_what_makes_modprobe_ignore_the_hook_is_named(
    root: Path, config: str, words: str | None
) -> None:
    modules(root, "updates/dkms/nvidia.ko.zst:\n")
    layout = keep(root, entry("0000:41:00.0", type_="identity"))
    problems = persistence.hook_problems(Reader(str(root)), layout, config)
    assert [words in problem for problem in problems] == ([True] if words else [])


def modules(root: Path, text: str) -> None:
    """Have the kernel list its modules."""
    release = (root / "proc/sys/kernel/osrelease").read_text().strip()
    (root / f"lib/modules/{release}").mkdir(parents=True, exist_ok=True)
    (root / f"lib/modules/{release}/modules.dep").write_text(text)


@pytest.mark.parametrize(
    "listed", [None, "updates/dkms/nvidia-current.ko:\nkernel/nvidia-drm.ko: updates/nvidia.ko\n"]
)
def test_driver_of_another_name_passes_the_hook_by(root: Path, listed: str | None) -> None:
    if listed:
        modules(root, listed)
    layout = keep(root, entry("0000:41:00.0", type_="identity"))
    problems = persistence.hook_problems(Reader(str(root)), layout, OURS)
    assert len(problems) == 1
    assert "modules.dep has no module nvidia" in problems[0]
    modules(root, "nvidia.ko:\n")
    assert persistence.hook_problems(Reader(str(root)), layout, OURS) == []


def test_hook_is_not_missed_where_the_boot_gives_the_type(root: Path) -> None:
    host = Reader(str(root))
    for type_ in (None, "auto", "DMA-FQ"):
        layout = keep(root, entry("0000:41:00.0", type_=type_))
        assert persistence.hook_problems(host, layout, "") == []
    (root / "proc/cmdline").write_text("iommu.strict=1 iommu=nopt\n")  # flushing lazily needs none
    assert persistence.hook_problems(host, layout, "") == []
    layout = keep(root, entry("0000:81:00.0", driver="vfio-pci", type_="identity"))
    assert persistence.hook_problems(host, layout, "") == []


# -- the initramfs -------------------------------------------------------------------------------


@pytest.fixture
def boot(root: Path) -> Path:
    """Return the host with rules, modprobe file, hook, and one kernel with its initramfs."""
    for path in (
        "etc/udev/rules.d/10-gpuhost.rules",
        "etc/modprobe.d/zz-gpuhost.conf",
        "etc/initramfs-tools/hooks/gpuhost",
        IMAGE[1:],
        "boot/vmlinuz-6.14.11-4-pve",
    ):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(f"# {path}\n")
    return root


def good(root: Path) -> list[str]:
    return [
        "etc/udev/rules.d/10-gpuhost.rules",
        "etc/modprobe.d/zz-gpuhost.conf",
        "usr/lib/modules/6.14.11-4-pve/kernel/drivers/vfio/pci/vfio-pci.ko.zst",
        persistence.stamp(Reader(str(root))),
    ]


def check(root: Path, names: list[str], *only: str, driver: str = "vfio-pci") -> Any:
    """Check the images; return what they lack and which were read."""
    asked: list[str] = []

    def listing(path: str) -> list[str]:
        asked.append(path)
        return names

    layout = keep(root, entry("0000:81:00.0", driver=driver))
    return persistence.check_images(Reader(str(root)), layout, listing, only), asked


def test_complete_image(boot: Path) -> None:
    assert check(boot, good(boot)) == ({IMAGE: ()}, [IMAGE])
    kept = json.loads((boot / "var/lib/gpuhost/initramfs.json").read_text())
    assert kept["version"] == 1
    status = (boot / IMAGE[1:]).stat()
    assert kept["images"][IMAGE] == {
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "made_from": persistence.stamp(Reader(str(boot))),
        "missing": [],
    }


@pytest.mark.parametrize(
    ("without", "words"),
    [
        (0, "/etc/udev/rules.d/10-gpuhost.rules"),
        (1, "/etc/modprobe.d/zz-gpuhost.conf"),
        (2, "module vfio-pci"),
        (3, "the present content of /etc/udev/rules.d/10-gpuhost.rules"),
    ],
)
def test_what_an_image_lacks_is_named(boot: Path, without: int, words: str) -> None:
    names = good(boot)
    del names[without]
    found, _asked = check(boot, names)
    assert len(found[IMAGE]) == 1
    assert words in found[IMAGE][0]
    kept = json.loads((boot / "var/lib/gpuhost/initramfs.json").read_text())
    assert kept["images"][IMAGE]["missing"] == list(found[IMAGE])


def test_module_is_not_missed_where_it_is_built_in_or_not_needed(boot: Path) -> None:
    names = [name for name in good(boot) if "vfio" not in name]
    assert check(boot, names, driver="nvidia")[0] == {IMAGE: ()}
    builtin = boot / "lib/modules/6.14.11-4-pve/modules.builtin"
    builtin.parent.mkdir(parents=True)
    builtin.write_text("kernel/drivers/vfio/pci/vfio-pci.ko\n")
    os.utime(boot / IMAGE[1:], ns=(1, 1))
    assert check(boot, names)[0] == {IMAGE: ()}


def test_image_is_read_again_only_when_it_or_our_files_have_changed(boot: Path) -> None:
    check(boot, good(boot))
    assert check(boot, [])[1] == []
    os.utime(boot / IMAGE[1:], ns=(1, 1))
    assert check(boot, good(boot))[1] == [IMAGE]
    before = good(boot)
    (boot / "etc/udev/rules.d/10-gpuhost.rules").write_text("# another layout\n")
    found, asked = check(boot, before)
    assert asked == [IMAGE]
    assert "the present content" in found[IMAGE][0]


def test_one_image_at_a_time_keeps_the_result_of_the_others(boot: Path) -> None:
    other = "/boot/initrd.img-6.17.2-1-pve"
    for path in (other[1:], "boot/vmlinuz-6.17.2-1-pve"):
        (boot / path).write_text("x")
    check(boot, good(boot))
    (boot / "etc/modprobe.d/zz-gpuhost.conf").write_text("# another layout\n")
    assert check(boot, good(boot), other)[1] == [other]
    kept = json.loads((boot / "var/lib/gpuhost/initramfs.json").read_text())["images"]
    assert kept[IMAGE]["missing"] == []  # as it was, and not taken for a result about today's files
    assert check(boot, good(boot))[1] == [IMAGE]
    for path in (other[1:], "boot/vmlinuz-6.17.2-1-pve"):
        (boot / path).unlink()
    assert list(check(boot, good(boot))[0]) == [IMAGE]


def test_image_that_cannot_be_listed_is_not_complete(boot: Path) -> None:
    def listing(path: str) -> list[str]:
        raise GpuHostError("lsinitramfs failed (127): it cannot be run")

    layout = keep(boot, entry("0000:81:00.0", driver="vfio-pci"))
    found = persistence.check_images(Reader(str(boot)), layout, listing)
    assert "it cannot be run" in found[IMAGE][0]


def test_broken_result_of_an_earlier_check_is_made_anew(boot: Path) -> None:
    (boot / "var/lib/gpuhost").mkdir(parents=True)
    for text in (
        *("{", "[]", '{"version": 7, "images": {}}', '{"version": 1}'),
        '{"version": 1, "images": []}',
        *(f'{{"version": 1, "images": {{"{IMAGE}": {one}}}}}' for one in ("5", "null", "{}")),
        *(
            f'{{"version": 1, "images": {{"{IMAGE}": {{"missing": {one}}}}}}}'
            for one in ("5", '"x"', "[1]")
        ),
    ):
        (boot / "var/lib/gpuhost/initramfs.json").write_text(text)
        assert check(boot, good(boot)) == ({IMAGE: ()}, [IMAGE])


def test_leftover_images_without_a_kernel_do_not_count(boot: Path) -> None:
    (boot / "boot/initrd.img-6.14.11-4-pve.dpkg-bak").write_text("x")
    assert list(check(boot, good(boot))[0]) == [IMAGE]


def test_hook_and_program_compute_the_same_stamp(boot: Path) -> None:
    """The hook's own line, run by a shell."""
    text = (ROLE / "templates/initramfs-hook.j2").read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if line.startswith("sum="))
    files = [
        boot / f for f in ("etc/udev/rules.d/10-gpuhost.rules", "etc/modprobe.d/zz-gpuhost.conf")
    ]
    script = f'rules="{files[0]}"\noptions="{files[1]}"\n{line}\necho "$sum"\n'
    hook = boot / "etc/initramfs-tools/hooks/gpuhost"
    hook.write_text(script)
    done = subprocess.run(["sh", str(hook)], capture_output=True, text=True, check=True)
    assert persistence.stamp(Reader(str(boot))) == f"etc/gpuhost/made-from-{done.stdout.strip()}"
    content = b"".join(file.read_bytes() for file in (*files, hook))
    assert done.stdout.strip() == hashlib.sha256(content).hexdigest()[:16]


# -- the program ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def program() -> ModuleType:
    """Load the boot program, which has no name that could be imported."""
    loader = SourceFileLoader("gpuhost_boot", str(ROLE / "files/gpuhost-boot"))
    module = ModuleType(loader.name)
    module.__file__ = loader.path
    exec(compile(loader.get_data(loader.path), loader.path, "exec"), module.__dict__)
    return module


@pytest.fixture
def run(
    program: ModuleType, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> Callable[..., tuple[int, list[str]]]:
    """Run the program on the tree; return its exit status and its lines."""
    kernel = FakeKernel(root)
    monkeypatch.setattr(program, "write", kernel)
    monkeypatch.delenv(HELD, raising=False)

    def call(*words: str) -> tuple[int, list[str]]:
        status = program.main(list(words), str(root))
        return status, capsys.readouterr().out.splitlines()

    return call


def test_program_sets_types_and_says_each(root: Path, run: Any) -> None:
    keep(root, entry("0000:41:00.0", type_="DMA-FQ"))
    assert run("types") == (0, ["gpuhost: 0000:41:00.0 type DMA -> DMA-FQ"])
    assert run("types") == (0, [])


def test_program_leaves_types_to_the_holder_of_the_lock(
    root: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(root, entry("0000:41:00.0", type_="DMA-FQ"))
    monkeypatch.setenv(HELD, "4711")
    assert run("types") == (0, [])
    assert type_of(root, "0000:41:00.0") == "DMA"


def test_program_gives_up_when_somebody_else_changes_the_host(
    root: Path, run: Any, program: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(root, entry("0000:41:00.0", type_="DMA-FQ"))
    monkeypatch.setattr(program, "LOCK_SECONDS", 0)
    with Store(Reader(str(root))).lock():
        monkeypatch.delenv(HELD)
        status, lines = run("types")
        monkeypatch.setenv(HELD, "1")
    assert status == 1
    assert "another change of this host is running" in lines[0]
    assert type_of(root, "0000:41:00.0") == "DMA"


def test_program_verifies_one_guest(root: Path, run: Any) -> None:
    keep(
        root,
        entry("0000:41:00.0", guest={"kind": "lxc", "vmid": 100}),
        entry("0000:81:00.0", driver="nvidia", guest={"kind": "lxc", "vmid": 101}),
    )
    assert run("verify", "--guest", "100") == (0, [])
    status, lines = run("verify", "--guest", "101")
    assert status == 1
    assert "driver is vfio-pci, should be nvidia" in lines[0]
    assert "guest 101 is not started" in lines[1]
    status, lines = run("verify")
    assert (status, len(lines)) == (1, 1)


def test_program_sends_its_lines_to_the_log_when_asked(
    root: Path, run: Any, program: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    monkeypatch.setattr(program.syslog, "syslog", lambda _priority, text: sent.append(text))
    keep(root, entry("0000:42:00.0"))
    assert run("verify")[0] == 1
    assert sent == []
    assert run("--log", "verify")[0] == 1
    assert sent == ["0000:42:00.0 (inference): driver_override is not set, should be nvidia"]


def test_program_without_a_layout_says_so(run: Any) -> None:
    for command in ("types", "verify", "images"):
        status, lines = run(command)
        assert status == 1
        assert "/etc/gpuhost/layout.json is missing" in lines[0]


def test_program_names_the_images_that_lack_something(
    boot: Path, run: Any, program: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(boot, entry("0000:81:00.0", driver="vfio-pci"))
    monkeypatch.setattr(program, "_listing", lambda _path: good(boot)[:3])
    status, lines = run("images")
    assert status == 3  # not 1, with which Python ends when the program itself fails
    assert lines[0].startswith(f"gpuhost: {IMAGE} lacks the present content of")
    assert "update-initramfs -u -k all" in lines[0]
    assert run("images", "/boot/initrd.img-other") == (0, [])
    os.utime(boot / IMAGE[1:], ns=(1, 1))
    monkeypatch.setattr(program, "_listing", lambda _path: good(boot))
    assert run("images", IMAGE) == (0, [])


# -- the role -------------------------------------------------------------------------------------


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
            last = (node.module or "").removeprefix(PACKAGE).lstrip(".")
            found |= {last} if last else {alias.name for alias in node.names}
    return found


def test_role_copies_just_what_the_program_imports() -> None:
    wanted, todo = set[str](), [ROLE / "files/gpuhost-boot"]
    while todo:
        new = _imports(todo.pop()) - wanted
        wanted |= new
        todo += [UTILS / f"{name}.py" for name in new]
    variables = yaml.safe_load((ROLE / "vars/main.yml").read_text(encoding="utf-8"))
    assert variables["__gpu_passthrough_modules"] == sorted(wanted)

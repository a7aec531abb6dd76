"""What the role gpu_passthrough leaves on a host, at work, and the module that keeps it."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml
from ansible.module_utils.parsing.convert_bool import boolean
from ansible_collections.gpuhost.inference.plugins.module_utils import _persistence as persistence
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._files import (
    File,
    apply_files,
    as_diff,
    plan_files,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader
from ansible_collections.gpuhost.inference.plugins.modules import host_files

ROLE = Path(__file__).parent.parent.parent / "roles/gpu_passthrough"
VARS = yaml.safe_load((ROLE / "vars/main.yml").read_text(encoding="utf-8"))
PROGRAM = "/usr/local/lib/gpuhost/gpuhost-boot"
ENTRIES = [
    {
        "name": 'inference "a"',
        "addresses": ["0000:41:00.0", "0000:42:00.0"],
        "driver": "nvidia",
        "iommu_type": "DMA-FQ",
        "guest": {"kind": "lxc", "vmid": 100, "sev_snp": False},
    },
    {
        "name": "confidential",
        "addresses": ["0000:81:00.0"],
        "driver": "vfio-pci",
        "iommu_type": None,
        "guest": {"kind": "qemu", "vmid": 200, "sev_snp": True},
    },
    {
        "name": "spare",
        "addresses": ["0000:82:00.0"],
        "driver": "none",
        "iommu_type": None,
        "guest": None,
    },
]


def gpu(address: str, *companions: str) -> dict[str, Any]:
    return {
        "address": address,
        "id": "10de:2bb5",
        "companions": [{"address": one} for one in companions],
    }


GPUS = [
    gpu("0000:41:00.0", "0000:41:00.1"),
    gpu("0000:42:00.0"),
    gpu("0000:81:00.0", "0000:81:00.1"),
    gpu("0000:82:00.0"),
    gpu("0000:83:00.0"),  # of nobody's entry
]


def render(
    name: str,
    entries: list[dict[str, Any]] | None = None,
    *,
    persist: bool | str = True,
    **more: Any,
) -> str:
    """Render a template of the role as Ansible does."""
    entries = ENTRIES if entries is None else entries
    folder = jinja2.FileSystemLoader(ROLE / "templates")
    environment = jinja2.Environment(
        loader=folder,
        trim_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    # not those of Ansible's plugins: once imported, they take the warnings of modules for theirs
    environment.filters.update(bool=boolean, comment="#\n# {}\n#".format, to_json=json.dumps)
    context = {
        "ansible_managed": "Ansible managed",
        "gpu_passthrough_accept": ["fsp-identity"],
        "gpu_passthrough_persist": persist,
        "__gpu_passthrough_blacklist": ["nouveau", "nova_core"],
        "__gpu_passthrough_found": {"gpus": GPUS},
        "__gpu_passthrough_entries": entries,
        "__gpu_passthrough_drivers": [entry["driver"] for entry in entries],
        "__gpu_passthrough_typed": [
            e for e in entries if e["driver"] == "nvidia" and e["iommu_type"]
        ],
        "__gpu_passthrough_virtual": ["0000:81:00.0", "0000:81:00.1"] if len(entries) > 1 else [],
        "__gpu_passthrough_program": PROGRAM,
        "__gpu_passthrough_vfio_first": "/sbin/modprobe -q vfio-pci; ",
        "__gpu_passthrough_types_first": VARS["__gpu_passthrough_types_first"].replace(
            "{{ __gpu_passthrough_program }}", PROGRAM
        ),
        **more,
    }
    return environment.get_template(name).render(context)


# -- layout and rules -----------------------------------------------------------------------------


@pytest.mark.parametrize("entries", [ENTRIES, ENTRIES[:1], []])
def test_program_understands_the_layout_that_the_role_writes(
    tmp_path: Path, entries: list[dict[str, Any]]
) -> None:
    (tmp_path / "etc/gpuhost").mkdir(parents=True)
    (tmp_path / "etc/gpuhost/layout.json").write_text(render("layout.json.j2", entries))
    layout = persistence.read_layout(Reader(str(tmp_path)))
    assert layout.accept == {"fsp-identity"}
    assert [one.address for one in layout.gpus] == [a for e in entries for a in e["addresses"]]
    if entries:
        assert layout.gpus[0] == persistence.Kept(
            "0000:41:00.0", "10de:2bb5", 'inference "a"', "nvidia", "DMA-FQ", 100
        )


def _marks(rules: str) -> dict[str, str]:
    """Return what each address is marked with, and check that each mark has its guards."""
    found = {}
    for line in rules.splitlines():
        mark = re.search(r'ATTR\{\[pci/([0-9a-f:.]+)\]driver_override\}="([^"]+)"$', line)
        if mark:
            card = mark[1][:-1] + "0"
            assert f'ATTR{{[pci/{card}]vendor}}=="0x10de"' in line
            assert f'ATTR{{[pci/{card}]device}}=="0x2bb5"' in line
            assert f'ATTR{{[pci/{mark[1]}]driver_override}}=="(null)|"' in line
            found[mark[1]] = mark[2]
    return found


def test_rules_mark_each_gpu_of_the_layout_and_no_other() -> None:
    rules = render("10-gpuhost.rules.j2")
    assert _marks(rules) == {
        "0000:41:00.0": "nvidia",  # its sound function gets the kernel's choice
        "0000:42:00.0": "nvidia",
        "0000:81:00.0": "vfio-pci",
        "0000:81:00.1": "vfio-pci",
        "0000:82:00.0": "none",
    }
    assert "0000:83:00.0" not in rules
    probe = next(line for line in rules.splitlines() if "drivers_probe" in line)
    assert probe.startswith(
        'KERNEL=="0000:81:00.0|0000:81:00.1", ATTR{driver_override}=="vfio-pci"'
    )


def test_rules_load_nothing_for_a_host_without_virtual_machines() -> None:
    rules = render("10-gpuhost.rules.j2", ENTRIES[:1])
    assert "vfio" not in rules
    assert "drivers_probe" not in rules


# -- modprobe -------------------------------------------------------------------------------------


def test_modprobe_file_says_no_more_than_the_layout_needs() -> None:
    lines = [line.split(" ", 2)[:2] for line in render("modprobe.conf.j2").splitlines() if line]
    assert ["blacklist", "nouveau"] in lines
    assert ["install", "nvidia"] in lines
    assert ["softdep", "nvidia"] not in lines  # it would make modprobe ignore the install line
    untyped = [{**ENTRIES[0], "iommu_type": None}]  # a trial may ask for a type
    assert "gpuhost-boot types" in render("modprobe.conf.j2", untyped)
    text = render("modprobe.conf.j2", ENTRIES[1:])
    assert not re.search("^softdep", text, re.MULTILINE)  # nor the line of a driver package
    assert (
        "\ninstall nvidia /sbin/modprobe -q vfio-pci; exec /sbin/modprobe --ignore-install nvidia "
        "$CMDLINE_OPTS\n"
    ) in text
    for text in (
        render("modprobe.conf.j2", persist=False),
        render("modprobe.conf.j2", persist="false"),  # as -e and surveys give it
        render("modprobe.conf.j2", ENTRIES[1:], persist="false"),
    ):
        words = {line.split(" ")[0] for line in text.splitlines() if line[:1].isalpha()}
        assert words == {"blacklist"}


def test_modprobe_file_leaves_the_first_word_to_a_driver_package() -> None:
    """Modprobe runs the first install line, by the order of names; nvidia-current needs its own."""
    ours = Path(VARS["__gpu_passthrough_options"]).name
    assert max("nvidia.conf", "nvidia-graphics-drivers.conf", ours) == ours
    assert "/etc/modprobe.d/gpuhost.conf" in VARS["__gpu_passthrough_sweep"]


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., tuple[int, list[str]]]:
    """Run the install line as modprobe would; return its status and what was run, in order."""
    line = next(
        line for line in render("modprobe.conf.j2").splitlines() if line.startswith("install")
    )
    log, program, modprobe = (tmp_path / name for name in ("log", "program", "modprobe"))
    modprobe.write_text(f'#!/bin/sh\necho "modprobe $*" >>{log}\n')
    modprobe.chmod(0o755)

    def run(types: str | None, **environment: str) -> tuple[int, list[str]]:
        log.write_text("")
        program.unlink(missing_ok=True)
        if types is not None:
            program.write_text(f'#!/bin/sh\necho "types $*" >>{log}\n{types}\n')
            program.chmod(0o755)
        command = line.removeprefix("install nvidia ").replace(PROGRAM, str(program))
        command = command.replace("/sbin/modprobe", str(modprobe)).replace("/dev/kmsg", "/dev/null")
        assert str(program) in command
        command = command.replace("-k 5 120 ", "-k 1 1 ")
        command = command.replace("$CMDLINE_OPTS", "NVreg_EnableGpuFirmware=1")
        inherited = {"PATH": "/sbin", **environment}  # as nvidia-modprobe has it
        done = subprocess.run(["/bin/sh", "-c", command], env=inherited, check=False, timeout=30)
        return done.returncode, log.read_text().splitlines()

    return run


VFIO = "modprobe -q vfio-pci"
LOADED = "modprobe --ignore-install nvidia NVreg_EnableGpuFirmware=1"


def test_types_are_set_before_nvidia_is_loaded(load: Any) -> None:
    assert load("exit 0") == (0, [VFIO, "types types", LOADED])


def test_nvidia_is_loaded_whatever_becomes_of_the_types(load: Any) -> None:
    assert load("exit 1") == (0, [VFIO, "types types", LOADED])
    assert load("exec /bin/sleep 20") == (
        0,
        [VFIO, "types types", LOADED],
    )  # stopped after its time
    assert load(None) == (0, [VFIO, LOADED])  # in an initramfs there is no program


def test_whoever_holds_the_lock_is_not_waited_for(load: Any) -> None:
    assert load("exit 0", GPUHOST_LOCKED="4711") == (0, [VFIO, LOADED])


# -- initramfs ------------------------------------------------------------------------------------


def test_hook_puts_todays_files_into_the_image(tmp_path: Path) -> None:
    files = {
        "etc/udev/rules.d/10-gpuhost.rules": render("10-gpuhost.rules.j2"),
        "etc/modprobe.d/zz-gpuhost.conf": render("modprobe.conf.j2"),
        "etc/initramfs-tools/hooks/gpuhost": "",
        "usr/share/initramfs-tools/hook-functions": (
            'manual_add_modules() { echo "$*" >>"$DESTDIR/modules"; }\n'
        ),
    }
    root, image = tmp_path / "root", tmp_path / "image"
    image.mkdir()
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    hook = root / "etc/initramfs-tools/hooks/gpuhost"
    text = re.sub(r"(?<=[= ])/(?=etc/|usr/)", f"{root}/", render("initramfs-hook.j2"))
    hook.write_text(text)

    def run(*words: str) -> None:
        environment = {"PATH": os.environ["PATH"], "DESTDIR": str(image)}
        subprocess.run(["sh", "-e", str(hook), *words], env=environment, check=True)

    run("prereqs")
    assert list(image.iterdir()) == []
    run()
    assert (image / "modules").read_text() == "vfio-pci\n"
    rules = "etc/udev/rules.d/10-gpuhost.rules"
    assert (image / rules).read_text() == files[rules]
    options = (image / "etc/modprobe.d/zz-gpuhost.conf").read_text().splitlines()
    assert "install nvidia :" in options  # it waits for the root file system
    assert not any(line.startswith("softdep") for line in options)
    virtual = render("modprobe.conf.j2", ENTRIES[1:])
    (root / "etc/modprobe.d/zz-gpuhost.conf").write_text(virtual)
    run()
    assert (image / "etc/modprobe.d/zz-gpuhost.conf").read_text() == virtual
    names = [str(path.relative_to(image)) for path in image.rglob("*")]
    stamp = persistence.stamp(Reader(str(root)))
    assert persistence.lacking(names, stamp_name=stamp) == ()
    (root / rules).unlink()
    (image / rules).unlink()
    run()
    assert not (image / rules).exists()


def test_update_of_an_image_never_fails(tmp_path: Path) -> None:
    program = tmp_path / "program"
    script = render("post-update.j2").replace(PROGRAM, str(program))
    for text in (None, "exit 1", 'test "$*" = "--log images /boot/initrd.img-6" || kill $PPID'):
        if text:
            program.write_text(f"#!/bin/sh\n{text}\n")
            program.chmod(0o755)
        command = ["sh", "-c", script, "zz-gpuhost", "6", "/boot/initrd.img-6"]
        assert subprocess.run(command, check=False).returncode == 0


# -- units ----------------------------------------------------------------------------------------


def _unit(text: str) -> dict[str, list[str]]:
    settings: dict[str, list[str]] = {}
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            settings.setdefault(key, []).append(value)
    return settings


def test_units_come_after_the_devices_and_before_the_guests() -> None:
    types = _unit(render("gpuhost-types.service.j2"))
    verify = _unit(render("gpuhost-verify.service.j2"))
    for unit in (types, verify):
        assert "systemd-udev-trigger.service" in unit["After"][0]
        assert "pve-guests.service" in unit["Before"][0]
        assert unit["TimeoutStartSec"] == ["180"]
    assert "nvidia-persistenced.service" in types["Before"][0]
    assert "gpuhost-types.service" in verify["After"][0]
    assert types["ExecStart"] == [f"{PROGRAM} types"]
    assert verify["ExecStart"] == [f"{PROGRAM} verify"]
    # makes /dev/nvidia-uvm; its failure is told by what is wrong then
    assert "-/usr/bin/nvidia-modprobe -u -c 0" in verify["ExecStartPre"]
    assert "nvidia-modprobe" not in render("gpuhost-verify.service.j2", ENTRIES[1:])


def test_container_waits_for_its_own_gpus() -> None:
    unit = _unit(render("container.conf.j2"))
    assert unit["ExecStartPre"] == [f"{PROGRAM} --log verify --guest %i"]


# -- the module that keeps them -------------------------------------------------------------------


def _files(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): os.readlink(path)
        if path.is_symlink()
        else "folder"
        if path.is_dir()
        else f"{path.stat().st_mode & 0o777:o} {path.read_text()}"
        for path in root.rglob("*")
    }


def test_files_are_written_once(tmp_path: Path) -> None:
    wanted = [
        File("/etc/a/one.conf", "x\n", 0o644),
        File("/etc/a/run", "#!/bin/sh\n", 0o755),
        File("/etc/a/link", link="/etc/a/run"),
    ]
    steps = plan_files(tmp_path, wanted, [])
    assert [step.path for step in steps] == ["/etc/a/one.conf", "/etc/a/run", "/etc/a/link"]
    assert _files(tmp_path) == {}  # planning changes nothing
    apply_files(tmp_path, steps)
    assert _files(tmp_path / "etc/a") == {
        "one.conf": "644 x\n",
        "run": "755 #!/bin/sh\n",
        "link": "/etc/a/run",
    }
    assert plan_files(tmp_path, wanted, ["/etc/a", "/etc/a/**/*"]) == []


@pytest.mark.parametrize("spoil", ["text", "mode", "kind"])
def test_what_differs_is_put_right(tmp_path: Path, spoil: str) -> None:
    wanted = [File("/etc/one.conf", "x\n", 0o644)]
    apply_files(tmp_path, plan_files(tmp_path, wanted, []))
    at = tmp_path / "etc/one.conf"
    if spoil == "text":
        at.write_text("y\n")
    elif spoil == "mode":
        at.chmod(0o600)
    else:
        at.unlink()
        at.symlink_to("/etc/passwd")
    steps = plan_files(tmp_path, wanted, [])
    assert [step.after for step in steps] == wanted
    assert as_diff(steps)[0]["before"] != as_diff(steps)[0]["after"]
    apply_files(tmp_path, steps)
    assert _files(tmp_path / "etc") == {"one.conf": "644 x\n"}


def test_sweep_removes_what_is_not_wanted_and_no_folder_of_others(tmp_path: Path) -> None:
    for path in (
        "lib/ours/a/b/old.py",
        "lib/ours/a/new.py",
        "units/x@1.d/ours",
        "units/x@2.d/ours",
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("")
    (tmp_path / "units/x@2.d/theirs").write_text("")
    sweep = ["/lib/ours", "/lib/ours/**/*", "/units/x@*.d", "/units/x@*.d/ours", "/gone"]
    keep = [File("/lib/ours/a/new.py", "", 0o644)]
    steps = plan_files(tmp_path, keep, sweep)
    assert {step.path for step in steps} == {
        *("/lib/ours/a/b/old.py", "/lib/ours/a/b"),
        *("/units/x@1.d/ours", "/units/x@1.d", "/units/x@2.d/ours"),
    }
    apply_files(tmp_path, steps)
    apply_files(tmp_path, plan_files(tmp_path, [], sweep))
    assert set(_files(tmp_path)) == {"lib", "units", "units/x@2.d", "units/x@2.d/theirs"}
    assert plan_files(tmp_path, [], sweep) == []


def test_folder_in_the_way_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "etc/one.conf").mkdir(parents=True)
    with pytest.raises(GpuHostError, match="is a folder"):
        plan_files(tmp_path, [File("/etc/one.conf", "x", 0o644)], [])


@pytest.mark.parametrize(
    ("wanted", "sweep", "words"),
    [
        ([File("/etc/a", link="")], [], "file /etc/a is a link to nothing"),
        ([File("/etc/a", "x", 0o644), File("/etc/a", "y", 0o644)], [], "/etc/a is there twice"),
        ([File("/etc//a", "x", 0o644)], [], "file '/etc//a' cannot be used"),
        ([File("etc/a", "x", 0o644)], [], "file 'etc/a' cannot be used"),
        ([File("/etc/a\0", "x", 0o644)], [], "file '/etc/a.x00' cannot be used"),
        ([], ["/"], "sweep '/' cannot be used"),
        ([], [""], "sweep '' cannot be used"),
        ([], ["/etc/a\0"], "sweep '/etc/a.x00' cannot be used"),
        ([], ["**/*"], r"sweep '\*\*/\*' cannot be used"),
        ([], ["/etc/../*"], "sweep .* cannot be used"),
        ([], ["/*"], "takes in the whole host"),
        ([], ["/**/*"], "takes in the whole host"),
        ([], ["/link/**/*"], "/link is a symbolic link"),
        ([], ["/link/x*"], "/link is a symbolic link"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    tmp_path: Path, wanted: list[File], sweep: list[str], words: str
) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/x1").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "theirs")
    with pytest.raises(GpuHostError, match=words):
        plan_files(tmp_path, wanted, sweep)


def test_sweep_does_not_go_through_links(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/ours.conf").write_text("")
    (tmp_path / "units").mkdir()
    (tmp_path / "units/x@1.d").symlink_to(tmp_path / "theirs")
    steps = plan_files(tmp_path, [], ["/units/x@*.d/ours.conf", "/units/**/*"])
    assert [step.path for step in steps] == ["/units/x@1.d"]  # the link itself
    apply_files(tmp_path, steps)
    assert sorted(_files(tmp_path)) == ["theirs", "theirs/ours.conf", "units"]


def test_file_is_not_written_through_what_somebody_puts_in_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs").write_text("theirs\n")
    (tmp_path / ".one.new").symlink_to(tmp_path / "theirs")
    monkeypatch.setattr(Path, "unlink", lambda *_words, **_more: None)  # it is back at once
    with pytest.raises(GpuHostError, match=r"/one cannot be changed: File exists"):
        apply_files(tmp_path, plan_files(tmp_path, [File("/one", "x", 0o644)], []))
    assert (tmp_path / "theirs").read_text() == "theirs\n"


def test_folder_of_records_is_for_root_alone(tmp_path: Path) -> None:
    wanted = [File(f"/var/lib/{name}", "x", 0o644) for name in ("gpuhost/a.json", "other/a")]
    before = os.umask(0o077)
    try:
        apply_files(tmp_path, plan_files(tmp_path, wanted, []))
    finally:
        os.umask(before)
    modes = {path: (tmp_path / path).stat().st_mode & 0o777 for path in ("var", "var/lib")}
    assert modes == {"var": 0o755, "var/lib": 0o755}
    assert (tmp_path / "var/lib/gpuhost").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "var/lib/other").stat().st_mode & 0o777 == 0o755


def test_module_refuses_an_empty_link(
    run_module: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    result = run_module(host_files, files=[{"path": f"{tmp_path}/link", "link": ""}])
    assert "is a link to nothing" in result["msg"]
    assert _files(tmp_path) == {}


def test_module_writes_and_sweeps(
    run_module: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / "old.conf").write_text("old\n")
    options = {
        "files": [{"path": f"{tmp_path}/new.conf", "content": "new\n"}],
        "sweep": [f"{tmp_path}/*.conf"],
    }
    changes = [
        {"path": f"{tmp_path}/new.conf", "change": "write"},
        {"path": f"{tmp_path}/old.conf", "change": "remove"},
    ]
    checked = run_module(host_files, check=True, **options)
    assert (checked["changed"], checked["files"]) == (True, changes)
    assert sorted(_files(tmp_path)) == ["old.conf"]
    done = run_module(host_files, diff=True, **options)
    assert (done["changed"], done["files"]) == (True, changes)
    assert done["diff"][0]["after"] == "mode 0644\nnew\n"
    assert _files(tmp_path) == {"new.conf": "644 new\n"}
    assert run_module(host_files, **options)["changed"] is False

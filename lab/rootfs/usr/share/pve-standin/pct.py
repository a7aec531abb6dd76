"""`pct`: real LXC containers from Proxmox's configuration. `/usr/sbin/pct` answers `exec` itself.

What differs from the real one: AppArmor and seccomp profiles are left out, `set` on a running
container takes effect at its next start, and only the commands below exist.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from pathlib import Path
from typing import NamedTuple

import guests
from guests import GuestError

LIB = Path("/var/lib/lxc")
LOCK = "/run/lock/lxc/pve-config-{}.lock"
SETTINGS = (
    r"(dev|mp|net)\d+|arch|cores|cpulimit|cpuunits|description|features|hostname|memory"
    r"|nameserver|onboot|ostype|protection|rootfs|searchdomain|startup|swap|tags|unprivileged"
)


class Node(NamedTuple):
    """A device node to hand in: `devN` of the configuration, with the host's device number."""

    path: str
    kind: str  # "c" or "b"
    major: int
    minor: int
    mode: int
    uid: int
    gid: int
    access: str  # "rw", or "r" with deny-write


def node(value: str) -> Node:
    """Look at the device that a `devN` setting names.

    Raises:
        GuestError: it does not exist or is no device. Proxmox refuses the start then, too.
    """
    wanted = guests.properties(value, "path")
    path = wanted.get("path", "")
    try:
        status = Path(path).stat()
    except FileNotFoundError:
        raise GuestError(f"Device {path} does not exist") from None
    if not (stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode)):
        raise GuestError(f"{path} is not a device")
    return Node(
        path=path,
        kind="b" if stat.S_ISBLK(status.st_mode) else "c",
        major=os.major(status.st_rdev),
        minor=os.minor(status.st_rdev),
        mode=int(wanted.get("mode", "0660"), 8),
        uid=int(wanted.get("uid", "0")),
        gid=int(wanted.get("gid", "0")),
        access="r" if wanted.get("deny-write") == "1" else "rw",
    )


def rootfs(value: str) -> str:
    """Return the folder of a volume on the storage `local` (/var/lib/vz), the only one here."""
    volume = guests.properties(value, "volume").get("volume", "")
    if not volume.startswith("local:"):
        raise GuestError(f"storage '{volume.partition(':')[0]}' does not exist")
    return "/var/lib/vz/images/" + volume.removeprefix("local:")


def lxc_config(vmid: int, settings: list[tuple[str, str]], nodes: list[Node]) -> str:
    """Return the configuration that LXC starts the container with."""
    conf = dict(settings)
    lines = [
        "lxc.cgroup.relative = 0",
        f"lxc.cgroup.dir.monitor = lxc.monitor/{vmid}",
        f"lxc.cgroup.dir.container = lxc/{vmid}",
        "lxc.cgroup.dir.container.inner = ns",
        f"lxc.arch = {conf.get('arch', 'amd64')}",
        "lxc.include = /usr/share/lxc/config/common.conf",
        "lxc.apparmor.profile = unconfined",
        "lxc.mount.auto = cgroup:rw proc:rw sys:mixed",
    ]
    for device in nodes:
        number = f"{device.kind} {device.major}:{device.minor}"
        lines.append(f"lxc.cgroup2.devices.allow = {number} {device.access}")
        source, target = passthrough(vmid, device.path), device.path.lstrip("/")
        lines.append(f"lxc.mount.entry = {source} {target} none bind,create=file 0 0")
    lines += [
        "lxc.monitor.unshare = 1",
        "lxc.tty.max = 2",
        "lxc.environment = TERM=linux",
        f"lxc.uts.name = {conf.get('hostname', f'CT{vmid}')}",
        f"lxc.cgroup2.memory.max = {int(conf.get('memory', '512')) << 20}",
        f"lxc.rootfs.path = dir:{rootfs(conf['rootfs'])}",
    ]
    for key, value in sorted(conf.items()):
        if re.fullmatch(r"net\d+", key):
            lines += network(vmid, key.removeprefix("net"), guests.properties(value, "type"))
    lines += [f"{key} = {value}" for key, value in settings if key.startswith("lxc.")]
    return "\n".join(lines) + "\n"


def network(vmid: int, index: str, net: dict[str, str]) -> list[str]:
    """Return LXC's lines for one network card. The host gives it its address (`host-managed`)."""
    values = {
        "type": "veth",
        "veth.pair": f"veth{vmid}i{index}",
        "link": net["bridge"],
        "name": net["name"],
        "hwaddr": net.get("hwaddr"),
        "flags": "up",
        "ipv4.address": net.get("ip"),
        "ipv4.gateway": net.get("gw"),
    }
    return [f"lxc.net.{index}.{key} = {value}" for key, value in values.items() if value]


def passthrough(vmid: int, path: str) -> Path:
    """Return where the container's own node for a device of the host is made."""
    return LIB / str(vmid) / "passthrough" / path.lstrip("/")


def make_nodes(vmid: int, nodes: list[Node]) -> None:
    """Make the container's nodes anew: own mode and owner, same device number."""
    folder = passthrough(vmid, "")
    if folder.is_mount():
        guests.run("umount", "--lazy", str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    guests.run("mount", "-t", "tmpfs", "-o", "size=64k,mode=0755", "none", str(folder))
    for device in nodes:
        at = passthrough(vmid, device.path)
        at.parent.mkdir(parents=True, exist_ok=True)
        kind = stat.S_IFBLK if device.kind == "b" else stat.S_IFCHR
        os.mknod(at, kind, os.makedev(device.major, device.minor))
        at.chmod(device.mode)
        os.chown(at, device.uid, device.gid)


def running(vmid: int) -> bool:
    """Tell whether a container runs: LXC's monitor then listens at its command socket."""
    return f"@{LIB}/{vmid}/command\n" in Path("/proc/net/unix").read_text()


def start(vmid: int, _words: list[str]) -> None:
    """Start the container; a `devN` that is not there stops the start."""
    with guests.locked(LOCK.format(vmid)):
        settings = guests.parse(guests.load_text("lxc", vmid))
        if running(vmid):
            raise GuestError(f"CT {vmid} already running")
        devices = sorted(
            (int(key[3:]), value) for key, value in settings if re.fullmatch(r"dev\d+", key)
        )
        nodes = [node(value) for _index, value in devices]
        text = lxc_config(vmid, settings, nodes)
        make_nodes(vmid, nodes)
        (LIB / str(vmid) / "config").write_text(text)
        log = Path(f"/run/pve/ct-{vmid}.stderr")
        log.parent.mkdir(exist_ok=True)
        log.unlink(missing_ok=True)
        unit = f"pve-container@{vmid}.service"
        subprocess.run(["systemctl", "reset-failed", unit], check=False, stderr=subprocess.DEVNULL)
        guests.run("systemctl", "start", unit)
        if not wait(vmid, "RUNNING", 60):
            said = log.read_text() if log.exists() else ""
            raise GuestError(f"{said}startup for container '{vmid}' failed")


def wait(vmid: int, state: str, seconds: int) -> bool:
    """Wait until LXC says that the container is in a state."""
    command = ["lxc-wait", "-n", str(vmid), "-s", f"{state}|ABORTING", "-t", str(seconds)]
    subprocess.run(command, check=False)
    return running(vmid) == (state == "RUNNING")


def stop(vmid: int, words: list[str]) -> None:
    """Stop at once."""
    halt(vmid, words, "--kill")


def shutdown(vmid: int, words: list[str]) -> None:
    """Ask the container's init to stop; with --forceStop 1 stop it after the time limit."""
    wanted = guests.options(words)
    limit = wanted.get("timeout", "60")
    force = wanted.get("forceStop", "0") == "1"
    halt(vmid, [], *([] if force else ["--nokill"]), "--timeout", limit)


def halt(vmid: int, words: list[str], *how: str) -> None:
    """Stop the container by `lxc-stop`, and wait until it is gone."""
    guests.options(words)
    with guests.locked(LOCK.format(vmid)):
        guests.load("lxc", vmid)
        if not running(vmid):
            raise GuestError(f"CT {vmid} not running")
        subprocess.run(["lxc-stop", "-n", str(vmid), *how], check=False)
        if not wait(vmid, "STOPPED", 10):
            raise GuestError("container did not stop")
        # the unit ends a moment later; a start before that would find it still active
        guests.run("systemctl", "stop", f"pve-container@{vmid}.service")


def reboot(vmid: int, words: list[str]) -> None:
    """Shut down and start again."""
    shutdown(vmid, words)
    start(vmid, [])


def status(vmid: int, _words: list[str]) -> None:
    """Print `status: running` or `status: stopped`."""
    guests.load("lxc", vmid)
    print(f"status: {'running' if running(vmid) else 'stopped'}")


def show(vmid: int, _words: list[str]) -> None:
    """Print the settings, sorted; raw keys last."""
    settings = guests.parse(guests.load_text("lxc", vmid))
    for key, value in sorted(settings, key=lambda s: (s[0].startswith("lxc."), s[0])):
        print(f"{key}: {value}")


def change(vmid: int, words: list[str]) -> None:
    """Change settings; devices must exist, as with the real one."""
    with guests.locked(LOCK.format(vmid)):
        text = guests.load_text("lxc", vmid)
        changes = guests.set_options("lxc", vmid, words, SETTINGS)
        for key, value in changes.items():
            if key.startswith("dev") and value is not None:
                node(value)
        guests.config_file("lxc", vmid).write_text(guests.edit(text, changes))


def listing() -> None:
    """Print the table of containers."""
    form = "{:<10} {:<10} {:<12} {:<20}"
    if guests.every("lxc"):
        print(form.format("VMID", "Status", "Lock", "Name"))
    for vmid in guests.every("lxc"):
        state = "running" if running(vmid) else "stopped"
        conf = guests.load("lxc", vmid)
        name = conf.get("hostname", f"CT{vmid}")
        print(form.format(vmid, state, conf.get("lock", ""), name))


def enter(vmid: int, _words: list[str]) -> None:
    """Give a shell in the container."""
    guests.load("lxc", vmid)
    if not running(vmid):
        raise GuestError(f"container '{vmid}' not running!")
    os.execv(shutil.which("lxc-attach") or "lxc-attach", ["lxc-attach", "-n", str(vmid)])


COMMANDS = {
    "list": listing,
    "status": status,
    "config": show,
    "set": change,
    "start": start,
    "stop": stop,
    "shutdown": shutdown,
    "reboot": reboot,
    "enter": enter,
}

if __name__ == "__main__":
    guests.main("pct", COMMANDS)

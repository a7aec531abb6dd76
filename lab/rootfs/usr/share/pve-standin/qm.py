#!/usr/bin/python3 -ES
"""`qm`: VMs from Proxmox's configuration. A VM's process is a stand-in, see kvm.py.

Devices are reserved, handed to vfio-pci and held as the real one does it; they stay with vfio-pci
when the VM stops, as there.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import guests
import pci
from guests import GuestError

LOCK = "/run/lock/qemu-server/lock-{}.conf"
SETTINGS = (
    r"(hostpci|net|scsi|sata|virtio|ide|numa|efidisk|tpmstate|usb|serial)\d+|affinity|agent"
    r"|amd-sev|args|balloon|bios|boot|cores|cpu|description|hookscript|hotplug|machine|memory"
    r"|name|numa|onboot|ostype|protection|scsihw|sockets|startup|tags|vga"
)


def pid_of(vmid: int) -> int | None:
    """Return the process of a running VM: the one in its pid file, if it still names that file."""
    file = pidfile(vmid)
    try:
        pid = int((pci.RUN / f"{vmid}.pid").read_text())
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return None
    return pid if words[0].endswith("kvm") and file in words else None


def running(vmid: int) -> bool:
    """Tell whether a VM runs."""
    return pid_of(vmid) is not None


def pidfile(vmid: int) -> str:
    """Return the pid file as QEMU's command line names it."""
    return f"/var/run/qemu-server/{vmid}.pid"


def command(vmid: int, conf: dict[str, str], devices: list[pci.HostPci]) -> list[str]:
    """Return the VM's command line, cut down to what says who it is and what it holds."""
    qmp = f"socket,id=qmp,path=/var/run/qemu-server/{vmid}.qmp,server=on,wait=off"
    words = ["/usr/bin/kvm", "-id", str(vmid)]
    words += ["-name", f"{conf.get('name', f'vm{vmid}')},debug-threads=on", "-no-shutdown"]
    words += ["-chardev", qmp, "-mon", "chardev=qmp,mode=control"]
    words += ["-pidfile", pidfile(vmid), "-daemonize"]
    sockets, cores = conf.get("sockets", "1"), conf.get("cores", "1")
    count = int(sockets) * int(cores)
    words += ["-smp", f"{count},sockets={sockets},cores={cores},maxcpus={count}"]
    words += ["-nodefaults", "-cpu", conf.get("cpu", "kvm64"), "-m", conf.get("memory", "512")]
    for index, device in enumerate(devices):
        bus = f"ich9-pcie-port-{index + 1}" if device.options.get("pcie") == "1" else "pci.0"
        slot = "0x0" if device.options.get("pcie") == "1" else f"{16 + index:#x}"
        many = len(device.addresses) > 1
        for function, address in enumerate(device.addresses):
            part = f".{function}" if many else ""
            more = ",multifunction=on" if many and not function else ""
            place = f"id={device.name}{part},bus={bus},addr={slot}{part}{more}"
            words += ["-device", f"vfio-pci,host={address},{place}"]
    return [*words, "-machine", f"type={conf.get('machine', 'pc')}+pve0"]


def start(vmid: int, words: list[str]) -> None:
    """Reserve and prepare the devices, then start the VM's process in its own scope."""
    guests.options(words)
    with guests.locked(LOCK.format(vmid)):
        conf = guests.load("qemu", vmid)
        if pid_of(vmid):
            raise GuestError(f"VM {vmid} already running")
        devices = pci.host_devices(conf, pci.present())
        addresses = [address for device in devices for address in device.addresses]
        soon = pci.Reservation(vmid, "time", int(time.time()) + 35)
        pci.reserve(addresses, soon, pid_of)
        try:
            for address in addresses:
                pci.bind_group(address)
            run_process(vmid, command(vmid, conf, devices))
        except GuestError:
            pci.release(vmid)
            raise
        pid = pid_of(vmid)
        if pid is None:
            pci.release(vmid)
            raise GuestError(f"VM {vmid} not running")
        pci.reserve(addresses, pci.Reservation(vmid, "pid", pid), pid_of)


def run_process(vmid: int, words: list[str]) -> None:
    """Run the VM's command, which goes to the background once it holds its devices."""
    scope = ["systemd-run", "--quiet", "--scope", f"--unit={vmid}", "--slice=qemu.slice"]
    scope += [f"--description=Proxmox VE VM {vmid}", "--property=KillMode=process"]
    scope += ["--property=Before=pve-guests.service"]  # at shutdown: stopped after the guests
    for verb in ("reset-failed", "stop"):  # what an earlier start may have left
        subprocess.run(["systemctl", verb, f"{vmid}.scope"], check=False, capture_output=True)
    code = subprocess.run([*scope, "--", *words], check=False).returncode
    if code:
        raise GuestError(f"start failed: QEMU exited with code {code}")


def stop(vmid: int, words: list[str]) -> None:
    """End the VM's process and drop its reservations; a stopped VM is no error, as there."""
    limit = int(guests.options(words).get("timeout", "60"))
    with guests.locked(LOCK.format(vmid)):
        guests.load("qemu", vmid)
        pid = pid_of(vmid)
        if not pid:
            return
        os.kill(pid, signal.SIGTERM)
        end = time.monotonic() + limit
        while pid_of(vmid):
            if time.monotonic() > end:
                print("VM still running - terminating now with SIGKILL", file=sys.stderr)
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        pci.release(vmid)


shutdown = stop  # there is no guest that could be asked


def status(vmid: int, _words: list[str]) -> None:
    """Print `status: running` or `status: stopped`."""
    guests.load("qemu", vmid)
    print(f"status: {'running' if pid_of(vmid) else 'stopped'}")


def show(vmid: int, _words: list[str]) -> None:
    """Print the settings, sorted."""
    for key, value in sorted(guests.load("qemu", vmid).items()):
        print(f"{key}: {value}")


def show_command(vmid: int, _words: list[str]) -> None:
    """Print the command line that `start` would run."""
    conf = guests.load("qemu", vmid)
    print(shlex.join(command(vmid, conf, pci.host_devices(conf, pci.present()))))


def change(vmid: int, words: list[str]) -> None:
    """Change settings; a running VM keeps its devices until its next start."""
    with guests.locked(LOCK.format(vmid)):
        text = guests.load_text("qemu", vmid)
        changes = guests.set_options("qemu", vmid, words, SETTINGS)
        guests.config_file("qemu", vmid).write_text(guests.edit(text, changes))
        print(f"update VM {vmid}: {' '.join(re.sub(r'^--?', '-', word) for word in words)}")


def listing() -> None:
    """Print the table of VMs."""
    form = "{:>10} {:<20} {:<10} {:<10} {:>12} {:<10}"
    if guests.every("qemu"):
        print(form.format("VMID", "NAME", "STATUS", "MEM(MB)", "BOOTDISK(GB)", "PID"))
    for vmid in guests.every("qemu"):
        conf, pid = guests.load("qemu", vmid), pid_of(vmid)
        name, memory = conf.get("name", f"VM {vmid}"), conf.get("memory", "512")
        state = "running" if pid else "stopped"
        print(form.format(vmid, name, state, memory, "0.00", pid or 0))


COMMANDS = {
    "list": listing,
    "status": status,
    "config": show,
    "set": change,
    "showcmd": show_command,
    "start": start,
    "stop": stop,
    "shutdown": shutdown,
}

if __name__ == "__main__":
    guests.main("qm", COMMANDS)

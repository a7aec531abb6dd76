# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""What the host itself does with a PCI function: disks in use, network cards that carry it."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ansible_collections.gpuhost.inference.plugins.module_utils._errors import UnreadableError
from ansible_collections.gpuhost.inference.plugins.module_utils._owners import Number, read_users
from ansible_collections.gpuhost.inference.plugins.module_utils._pci import (
    DEVICES,
    read_device,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader

_BLOCK = "/sys/class/block"
_NET = "/sys/class/net"
_SUBSYSTEMS = "/sys/class/nvme-subsystem"
_SHOWN = 4  # uses of one disk that are told; a volume group has hundreds

_REJECT = 0x200  # RTF_REJECT: a route that leads nowhere


@dataclass(frozen=True)
class _Layer:
    """A block device, and what it is called where it stands for the disk below it."""

    name: str
    number: str  # "259:3"
    through: str  # "" for the disk itself, " through dm-1 (pve-root)" above it


def read_duties(host: Reader, address: str) -> tuple[str, ...]:
    """Return why the host needs the PCI function at this full address, a sentence each.

    Disks count when they are mounted (in any mount namespace), used for swap, part of a device
    mapper, md, bcache, btrfs or ZFS stack, or open in a process; all that lies below the function
    counts, also through USB. Network cards count when the host has routes through them (main table
    only) or when they are ports of a bridge, a bond or another device.

    Returns:
        The sentences. What could not be read is one of them, so that only an empty answer says
        that nothing is known against taking the function away.
    """
    duties: list[str] = []
    for part in (_of_functions, _of_disks, _of_network):
        try:
            duties += part(host, address)
        except UnreadableError as error:
            duties.append(f"what the host does with {address} is not known: {error}")
    return tuple(duties)


def _of_functions(host: Reader, address: str) -> list[str]:
    virtual = [name for name in host.names(f"{DEVICES}/{address}") if name.startswith("virtfn")]
    return [f"it has {len(virtual)} virtual functions"] if virtual else []


def _of_disks(host: Reader, address: str) -> list[str]:
    names = _disks(host, address)
    if not names:
        return []
    stacks = {name: _stack(host, name) for name in names}
    mounts, unread = _read_mounts(host)
    swaps = _read_swaps(host)
    members = _read_members(host)
    held: dict[Number, list[str]] = {}
    for stack in stacks.values():
        for layer in stack:
            major, _colon, minor = layer.number.partition(":")
            if major.isdigit() and minor.isdigit():
                held[int(major), int(minor)] = [layer.number]
    users, unknown = read_users(host, held, "b")
    duties = [f"its disks may be in use: {text}" for text in (*unread, *unknown)]
    for name, stack in stacks.items():
        uses = []
        for layer in stack:
            uses += [
                f"disk {name} is {use}{layer.through}"
                for use in (
                    *(f"mounted at {point}" for point in _of(mounts, layer)),
                    *("used for swap" for _path in _of(swaps, layer)),
                    *(f"part of {whole}" for whole in _of(members, layer)),
                    *(
                        f"open in process {user.pid} ({user.command[:60]})"
                        for user in users.get(layer.number, ())
                    ),
                )
            ]
        if len(stack) > 1 and not uses:
            uses.append(f"disk {name} is used{stack[-1].through}")
        if len(uses) > _SHOWN:
            uses[_SHOWN:] = [f"disk {name} has {len(uses) - _SHOWN} more uses"]
        duties += uses
    return duties


def _disks(host: Reader, address: str) -> list[str]:
    """Return the names of disks and partitions below a PCI function.

    A disk that several NVMe controllers may share lies in the folder of their subsystem.
    """
    places = [f"/{address}/"]
    controllers = set(host.names(f"{DEVICES}/{address}/nvme"))
    for subsystem in host.names(_SUBSYSTEMS) if controllers else ():
        names = host.names(f"{_SUBSYSTEMS}/{subsystem}")
        if controllers.intersection(names):
            places += [f"/{name}/" for name in names if re.fullmatch(r"nvme\d+n\d+", name)]
    links = {name: f"{host.link(f'{_BLOCK}/{name}') or ''}/" for name in host.names(_BLOCK)}
    return [name for name, link in links.items() if any(place in link for place in places)]


def _stack(host: Reader, name: str) -> list[_Layer]:
    """Return a block device and everything built on it, such as logical volumes."""
    names = [name]
    for one in names:  # grows meanwhile
        names += [above for above in host.names(f"{_BLOCK}/{one}/holders") if above not in names]
    return [
        _Layer(
            one,
            host.text(f"{_BLOCK}/{one}/dev") or "",
            "" if one == name else f" through {_called(host, one)}",
        )
        for one in names
    ]


def _called(host: Reader, name: str) -> str:
    label = host.text(f"{_BLOCK}/{name}/dm/name")
    return f"{name} ({label})" if label else name


def _of(found: Mapping[str, list[str]], layer: _Layer) -> list[str]:
    """Return what was found under the number of a block device, or under its name."""
    return found.get(layer.number) or found.get(layer.name) or []


def _read_mounts(host: Reader) -> tuple[dict[str, list[str]], list[str]]:
    """Return mount points by number and by name of their block device, the host's own first.

    Containers mount volumes where only their own mount namespace sees them. What could not be read
    of them comes second.
    """
    tables = {host.link("/proc/self/ns/mnt"): host.text("/proc/self/mountinfo")}
    unread = []
    for pid in (name for name in host.names("/proc") if name.isdigit()):
        try:
            namespace = host.link(f"/proc/{pid}/ns/mnt")
            if namespace not in tables:
                tables[namespace] = host.text(f"/proc/{pid}/mountinfo")
        except UnreadableError as error:
            unread.append(str(error))
    found: dict[str, list[str]] = {}
    for table in tables.values():
        for line in (table or "").splitlines():
            mount, _dash, source = line.partition(" - ")
            number, _root, point = mount.split()[2:5]
            keys = [number]
            device = source.split()[1]
            if device.startswith("/dev/"):  # btrfs gives its mounts numbers of their own
                keys.append(device.rpartition("/")[2])
            for key in keys:
                points = found.setdefault(key, [])
                if point not in points:
                    points.append(point)
    return found, unread[:1]


def _read_swaps(host: Reader) -> dict[str, list[str]]:
    """Return swap areas by number and by name of their block device."""
    found: dict[str, list[str]] = {}
    for line in (host.text("/proc/swaps") or "").splitlines()[1:]:
        path = line.split()[0]
        number = host.device_number(path, "b")
        for key in (path.rpartition("/")[2], "{}:{}".format(*number) if number else path):
            found[key] = [path]
    return found


def _read_members(host: Reader) -> dict[str, list[str]]:
    """Return the file systems of several disks that a block device is part of.

    btrfs lists its devices in sysfs. ZFS lists them nowhere: udev tells which pool a device is
    labelled for, and the kernel module which pools are imported.
    """
    found: dict[str, list[str]] = {}
    for one in host.names("/sys/fs/btrfs"):
        for name in host.names(f"/sys/fs/btrfs/{one}/devices"):
            found.setdefault(name, []).append("a mounted btrfs")
    pools = set(host.names("/proc/spl/kstat/zfs"))
    for entry in host.names("/run/udev/data") if pools else ():
        if entry.startswith("b"):
            text = host.text(f"/run/udev/data/{entry}") or ""
            known = dict(re.findall(r"^E:(ID_FS_\w+)=(.*)$", text, re.MULTILINE))
            if known.get("ID_FS_TYPE") == "zfs_member" and known.get("ID_FS_LABEL") in pools:
                found.setdefault(entry[1:], []).append(f"ZFS pool {known['ID_FS_LABEL']}")
    return found


def _of_network(host: Reader, address: str) -> list[str]:
    links = {name: f"{host.link(f'{_NET}/{name}') or ''}/" for name in host.names(_NET)}
    cards = [name for name, link in links.items() if f"/{address}/" in link]
    device = read_device(host, address)
    if not cards and device and device.class_.startswith("0x02"):
        if device.driver not in (None, "vfio-pci", "pci-stub"):
            return ["its network interface is not the host's: a container may have it"]
        return []
    routes = _read_routes(host) if cards else {}
    duties = []
    for card in cards:
        chain = [card]
        for one in chain:  # grows by the bridges, bonds and VLANs above
            way = "" if one == card else f" through {one}"
            networks = routes.get(one, [])
            if "default" in networks:
                duties.append(f"network card {card} has the default route{way}")
            elif networks:
                duties.append(f"network card {card} carries {', '.join(networks[:3])}{way}")
            master = (host.link(f"{_NET}/{one}/master") or "").rpartition("/")[2]
            if master:
                duties.append(f"network card {card} is {_port_of(host, master)}{way}")
            uppers = [name[6:] for name in host.names(f"{_NET}/{one}") if name.startswith("upper_")]
            above = dict.fromkeys(filter(None, (*uppers, master)))
            chain += [name for name in above if name not in chain]
    return duties


def _port_of(host: Reader, master: str) -> str:
    if host.exists(f"{_NET}/{master}/bridge"):
        return f"a port of bridge {master}"
    if host.exists(f"{_NET}/{master}/bonding"):
        return f"a member of bond {master}"
    return f"a port of {master}"


def _read_routes(host: Reader) -> dict[str, list[str]]:
    """Return the networks that the host reaches through each interface, `default` for the rest.

    `/proc/net/route` and `ipv6_route` (net/ipv4/fib_trie.c, net/ipv6/route.c); the link-local and
    multicast networks of IPv6 are on every interface and say nothing.
    """
    found: dict[str, list[str]] = {}
    for line in (host.text("/proc/net/route") or "").splitlines()[1:]:
        name, target, _gateway, flags, _ref, _use, _metric, mask, *_rest = line.split()
        if not int(flags, 16) & _REJECT:
            start, bits = (
                ipaddress.IPv4Address(bytes.fromhex(one)[::-1]) for one in (target, mask)
            )
            found.setdefault(name, []).append(_network(f"{start}/{bits}"))
    for line in (host.text("/proc/net/ipv6_route") or "").splitlines():
        target, length, *_rest, flags, name = line.split()
        local = target.startswith(("fe8", "ff")) or length == "80"  # hexadecimal: a single address
        if not int(flags, 16) & _REJECT and not local and name != "lo":
            start6 = ipaddress.IPv6Address(bytes.fromhex(target))
            found.setdefault(name, []).append(_network(f"{start6}/{int(length, 16)}"))
    return found


def _network(text: str) -> str:
    network = ipaddress.ip_network(text, strict=False)
    return f"network {network}" if network.prefixlen else "default"

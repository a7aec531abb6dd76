# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""The table of faults that kernel messages tell of, with their remedies and who prints them."""

from __future__ import annotations

import re
from dataclasses import dataclass

# Rungs of the ladder of remedies, from the cheapest to the dearest, and what to do on each
RUNGS = {
    "application": "end what uses the GPU, and start it again",
    "driver": "unload the driver and load it again",
    "reset": "reset the GPU with nothing using it and its driver unloaded",
    "reboot": "reboot",
    "power-off": "power the host off and take it from the mains for 30 s",
    "hardware": "check seating, power cable, riser and slot, then have the GPU replaced",
}
_FROM_APPLICATION = ("application", "reboot", "power-off")  # a reset would wait for it too
_FROM_RESET = ("reset", "reboot", "power-off", "hardware")
_AFTER_RESET = ("reset", "power-off", "hardware")  # a device it did not bring back stays away
_FROM_REBOOT = ("reboot", "power-off", "hardware")
_FROM_POWER_OFF = ("power-off", "hardware")

# What the rungs don't tell, by what was seen
SLOT_POWER = (
    "The FSP starts only with slot power, so resets, a module reload and a warm reboot do not "
    "help. If an IOMMU group of the GPU was set to identity, set it back first."
)
REINSTALL = (
    "Put the firmware of the loaded driver version back under /lib/firmware/nvidia/VERSION "
    "(reinstall its package). With error -4 the loading was only interrupted: start the GPU again."
)
LOST = "Look at AER messages of the bridges above it."
POWER_POLICY = "Keep the GPU out of D3cold (power/control = on, d3cold_allowed = 0)."
IOMMU = (
    "The GPU used an address that the IOMMU does not map: update driver and kernel, and check "
    "which memory it was about."
)
P2P = (
    "GPU-to-GPU DMA meets a translating IOMMU: turn peer-to-peer off (NCCL_P2P_DISABLE=1) or give "
    "these GPUs a domain in which it works, then verify by writing and reading back."
)
SLOW_RESET = "Wait for 'ready' or 'giving up' in the log before anything else touches the GPU."
NO_RESET = "Of resets only one of the bus may help, which must not reach other devices."
UNBIND = (
    "The removal goes on by itself when the device nodes are closed. "
    "Writing to the device's sysfs files before that blocks too."
)

_START_SOURCE = "open-gpu-kernel-modules: src/nvidia/src/kernel/gpu/gsp"
_FSP_SOURCE = "open-gpu-kernel-modules: src/nvidia/src/kernel/gpu/fsp"
_INIT_SOURCE = "open-gpu-kernel-modules: src/nvidia/arch/nvalloc/unix/src/osinit.c"
_AER_SOURCE = "drivers/pci/pcie/aer.c"
XID_SOURCE = "open-gpu-kernel-modules: src/nvidia/src/kernel/gpu/rc/kernel_rc.c"

FSP_CLASSES = ("fsp_failed", "fsp_timeout")
START_CLASSES = (*FSP_CLASSES, "gsp_failed", "fw_missing", "stale_wpr2")
# Verdict on a GPU with such a fault, and what it means; a kind may have its own
CLASSES = {
    "fsp_failed": ("failed", "its FSP did not come up"),
    "fsp_timeout": ("failed", "its FSP does not answer"),
    "gsp_failed": ("failed", "it did not start, or its GSP firmware stopped"),
    "fw_missing": ("failed", "the driver's firmware file was not loaded"),
    "stale_wpr2": ("failed", "a failed start before this log left it locked until a reset"),
    "gpu_lost": ("lost", "it does not answer on the bus"),
    "pcie_error": ("degraded", "data to or from it was lost on PCIe"),
    "pcie_corrected": ("degraded", "its PCIe link corrects errors all the time"),
    "iommu_fault": ("degraded", "the IOMMU refused its memory accesses"),
    "reset_failed": ("failed", "it did not come back from a reset"),
    "unbind_blocked": ("degraded", "its removal from the driver waits for the last user"),
    "xid": ("degraded", "the driver reported an Xid"),
}
PCIE_CLASSES = ("pcie_error", "pcie_corrected")


@dataclass(frozen=True)
class Kind:
    """One kind of fault.

    Attributes:
        id: its name.
        class_: what it means; see the documentation of gpu_health_info.
        phase: `start` for messages of an attempt to start a GPU (they mostly have no address),
            `probe` for those before a driver is bound, `event` for all that stand for themselves.
        pattern: of the text of a message; `None` where code elsewhere decides.
        ladder: the names in `RUNGS` that may help, from where this kind is known to react.
        advice: what the ladder doesn't tell.
        source: who prints the message.
        vague: it tells that something failed, not what.
        verdict: on a GPU with it, where it differs from its class.
        meaning: likewise.
        by: who says it, groups of `SPEAKER`. Behind `nvrm` the pattern is searched, for there names
            of functions come first; what the driver of a device says begins with it.
        flood: it harms nobody unless it is logged so often in one hour of the log.
    """

    id: str
    class_: str
    phase: str
    pattern: str | None
    ladder: tuple[str, ...]
    advice: str
    source: str
    vague: bool = False
    verdict: str = ""
    meaning: str = ""
    by: tuple[str, ...] = ("nvrm",)
    flood: int = 0


def _fsp(id_: str, class_: str, pattern: str, vague: bool = False) -> Kind:
    return Kind(id_, class_, "start", pattern, _FROM_POWER_OFF, SLOT_POWER, _FSP_SOURCE, vague)


def _gsp(id_: str, pattern: str, vague: bool = False) -> Kind:
    return Kind(id_, "gsp_failed", "start", pattern, _FROM_RESET, "", _START_SOURCE, vague)


# From cause to consequence: of an attempt with several of these, the first row is the cause.
KINDS = (
    Kind("all-ones", "gpu_lost", "start", None, _FROM_REBOOT, LOST, XID_SOURCE),
    Kind("lost-at-start", "gpu_lost", "start", None, _FROM_REBOOT, LOST, _INIT_SOURCE),
    Kind(
        "firmware-not-loaded",
        "fw_missing",
        "start",
        r"(?:loading|(?:Direct )?firmware load for) [^ ]{0,64}nvidia/\S+ failed with error -\d+"
        r"|RmFetchGspRmImages: No firmware image found|version mismatch: got version",
        ("driver",),
        REINSTALL,
        "drivers/base/firmware_loader, and osinit.c of the driver",
        by=("nvrm", "device"),
    ),
    _fsp("fsp-response", "fsp_failed", r"FSP response reported error"),
    _fsp("fsp-command-timeout", "fsp_timeout", r"FSP (?:async )?command timed out"),
    _fsp("fsp-queue-timeout", "fsp_timeout", r"waiting for FSP (?:command queue|queues) to be"),
    _fsp("fsp-message", "fsp_failed", r"Received error message from FSP while waiting"),
    _fsp("fsp-fuse-check", "fsp_failed", r"FSP fuse error check has failed|FSP Fuse Check Failure"),
    _fsp("fsp-boot-poll", "fsp_failed", r"while polling for FSP boot complete"),
    _fsp("fsp-secure-boot", "fsp_failed", r"FSP secure boot (?:partition timed out|GSP prechecks)"),
    _fsp("fsp-gfw-boot", "fsp_failed", r"returned from kgspWaitForGfwBootOk_HAL"),
    Kind(
        "fsp-other-driver",
        "fsp_failed",
        "event",
        r"(?:nouveau|NovaCore) \S+ (?:fsp: )?(?:NVDM command \w+ failed with error"
        r"|FSP response error|FSP secure boot completion error)",
        _FROM_POWER_OFF,
        SLOT_POWER,
        "drivers/gpu/drm/nouveau/nvkm/subdev/fsp, drivers/gpu/nova-core/fsp.rs",
        by=("device",),
    ),
    _fsp("fsp-boot-commands", "fsp_failed", r"FSP boot cmds failed\. RM cannot boot", vague=True),
    _gsp("gsp-fmc", r"GSP-FMC reported an error|Fatal GSP-FMC Error"),
    _gsp("gsp-lockdown", r"Timeout waiting for (?:GSP target mask|lockdown) release"),
    _gsp(
        "sec2", r"SEC2 (?:secure boot partition timed out|response reported error|boot cmds fail)"
    ),
    _gsp("gfw-boot", r"failed to wait for GFW[_ ]boot"),
    _gsp(
        "booter-fwsec",
        r"failed to (?:execute|prepare interface data for) (?:Booter|FWSEC)"
        r"|Booter failed with non-zero|FWSEC failed to process boot command",
    ),
    _gsp("gsp-init", r"Xid \([^()]{0,64}\): 143\b"),
    Kind(
        "wpr2-already-up",
        "stale_wpr2",
        "start",
        r"unexpected WPR2 already up",
        _FROM_RESET,
        "",
        _START_SOURCE,
        vague=True,
    ),
    _gsp("gsp-start", r"Cannot initialize GSP firmware RM|boot attempts exceeded", vague=True),
    Kind("start-failed", "gsp_failed", "start", None, _FROM_RESET, "", _INIT_SOURCE, vague=True),
    Kind(
        "bar-firewall",
        "reset_failed",
        "probe",
        r"failed to wait for bar firewall to lower",
        _AFTER_RESET,
        NO_RESET,
        "open-gpu-kernel-modules: kernel-open/nvidia/nv-pci.c",
    ),
    Kind("xid-79", "gpu_lost", "event", None, _FROM_REBOOT, LOST, XID_SOURCE),
    Kind(
        "fallen-off-bus",
        "gpu_lost",
        "event",
        r"fallen off the bus",
        _FROM_REBOOT,
        LOST,
        XID_SOURCE,
    ),
    Kind(
        "d3cold",
        "gpu_lost",
        "event",
        r"(?:Unable to|can't) change power state from \S+ to D0"
        r"|[Rr]efused to change power state(?: from D3\w* to D0|, currently in D3)",
        _FROM_REBOOT,
        POWER_POLICY,
        "drivers/pci/pci.c",
        by=("device",),
    ),
    Kind(
        "rpc-gpu-lost",
        "gpu_lost",
        "event",
        r"rpcSendMessage failed with status 0x0*f\b|\[NV_ERR_GPU_IS_LOST\]",
        _FROM_REBOOT,
        LOST,
        "open-gpu-kernel-modules: src/nvidia/src/kernel/vgpu/rpc.c",
    ),
    Kind("gsp-rpc", "gsp_failed", "event", None, _FROM_RESET, "", XID_SOURCE),  # Xid 119 and 120
    Kind(
        "xid-154",
        "xid",
        "event",
        None,
        ("application",),
        "",
        XID_SOURCE,
        meaning="the driver wants it to be recovered, for a reason that is not in the log",
    ),
    Kind("iommu-p2p", "iommu_fault", "event", None, ("application",), P2P, "drivers/iommu"),
    Kind("iommu-fault", "iommu_fault", "event", None, ("application",), IOMMU, "drivers/iommu"),
    Kind(
        "reset-gave-up", "reset_failed", "event", None, _AFTER_RESET, NO_RESET, "drivers/pci/pci.c"
    ),
    Kind(
        "reset-waiting",
        "reset_failed",
        "event",
        None,
        (),
        SLOW_RESET,
        "drivers/pci/pci.c",
        verdict="degraded",
        meaning="it is slow to come back from a reset",
    ),
    Kind(
        "vfio-bars",
        "reset_failed",
        "event",
        r"vfio_bar_restore: (?:\S+ )?reset recovery",
        _AFTER_RESET,
        NO_RESET,
        "drivers/vfio/pci/vfio_pci_config.c",
        meaning="a guest finds it reset again and again",
        by=("device",),
        flood=8,  # a start of a guest makes a few
    ),
    Kind(
        "link-contained",
        "gpu_lost",
        "event",
        None,
        _FROM_REBOOT,
        "",
        "drivers/pci/pcie/dpc.c",
        meaning="the port above it shut the link down after an error",
    ),
    Kind(
        "pcie-fatal",
        "pcie_error",
        "event",
        None,
        _FROM_REBOOT,
        "",
        _AER_SOURCE,
        verdict="failed",
        meaning="its PCIe link failed",
    ),
    Kind("pcie-nonfatal", "pcie_error", "event", None, _FROM_RESET, "", _AER_SOURCE),
    Kind("pcie-unrecovered", "pcie_error", "event", None, _FROM_RESET, "", _AER_SOURCE),
    Kind(
        "pcie-corrected",
        "pcie_corrected",
        "event",
        None,
        ("hardware",),
        "",
        _AER_SOURCE,
        flood=480,  # 8 a minute, where DCGM warns of replays (dcgm_gpu_hardware_limits.h)
    ),
    Kind(
        "iommu-rmp",
        "iommu_fault",
        "event",
        None,
        ("application",),
        "The page belongs to a guest with encrypted memory (SEV-SNP), or to the firmware.",
        "drivers/iommu/amd/iommu.c",
    ),
    Kind(
        "iommu-interrupt",
        "iommu_fault",
        "event",
        None,
        ("driver", "reset", "reboot"),
        "The interrupt had no entry in the IOMMU's table, as after a driver that ended badly.",
        "drivers/iommu/intel",
        meaning="the IOMMU refused its interrupts",
    ),
    Kind(
        "unbind-hung",
        "unbind_blocked",
        "event",
        None,
        _FROM_APPLICATION,
        UNBIND,
        "kernel/hung_task.c",
    ),
    Kind(
        "unbind-blocked",
        "unbind_blocked",
        "event",
        r"Attempting to remove device \S+ with non-zero usage count",
        _FROM_APPLICATION,
        UNBIND,
        "open-gpu-kernel-modules: kernel-open/nvidia/nv-pci.c",
    ),
)
BY_ID = {kind.id: kind for kind in KINDS}
RANK = {kind.id: rank for rank, kind in enumerate(KINDS)}
_PATTERNS = {
    by: [(kind, re.compile(kind.pattern)) for kind in KINDS if kind.pattern and by in kind.by]
    for by in ("nvrm", "device")
}
_ANY = {
    by: re.compile("|".join(pattern.pattern for _kind, pattern in patterns))
    for by, patterns in _PATTERNS.items()
}


def said(text: str) -> Kind | None:
    """Return the first row of the table whose pattern is in a message of NVIDIA's driver."""
    if not _ANY["nvrm"].search(text):
        return None
    return next((kind for kind, pattern in _PATTERNS["nvrm"] if pattern.search(text)), None)


def said_of_device(text: str, at: int) -> Kind | None:
    """Return the first row of the table whose pattern the message of a device's driver has.

    Args:
        text: the message.
        at: where it goes on behind driver and device; a pattern may name the driver, too.
    """
    if not (_ANY["device"].match(text, at) or _ANY["device"].match(text)):
        return None
    patterns = _PATTERNS["device"]
    return next((k for k, one in patterns if one.match(text, at) or one.match(text)), None)


def remedy(advice: str, ladder: tuple[str, ...]) -> str:
    """Say what to do: the advice, then the rungs of a ladder, one after another until it helps."""
    steps = "; if that does not help, ".join(RUNGS[rung] for rung in ladder)
    steps = f"{steps[:1].upper()}{steps[1:]}." if steps else ""
    return " ".join(filter(None, (advice, steps)))

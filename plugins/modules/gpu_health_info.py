#!/usr/bin/python
# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_health_info
short_description: Judge the health of NVIDIA GPUs from the kernel log
version_added: 0.1.0
author:
  - gpuhost.inference contributors (@gpuhost)
description:
  - Reads the kernel log and says for each GPU whether its Foundation Security Processor (FSP, also
    called firmware security processor) came up, and whether the GPU is healthy.
  - It knows failures of the FSP, of the GSP firmware and its files, lost GPUs, errors on PCIe of a
    GPU and of the bridges above it, Xids, IOMMU faults of AMD, Intel and Arm IOMMUs, resets that
    the device did not survive, and unbinds that the driver holds back.
  - A fault is tied to a GPU by an address in the log, never by the number in C(GPU0), which is no
    index. What cannot be tied to a GPU is in RV(unattributed), and the GPUs it may be about are
    not called healthy.
  - An error of a bridge belongs to the GPU below it, of several below to one of them; without one
    it counts for nothing. In a log of another host the bridges are those that it names.
  - Xids that an application causes by itself, and single errors that PCIe corrected, make no GPU
    ill.
  - Of the many messages of one failed attempt to start a GPU, the nearest to the cause is the
    fault, the others are its evidence. The last attempt decides, and loading the driver again
    makes what was before it history.
  - V(healthy) needs a proof, and a log that is complete since the boot. A GPU that nobody has
    opened since its driver was bound has not been started, and is V(unknown).
  - C(nvidia-smi) is never run, as it hangs when a GPU is ill. The only command run is
    C(journalctl). Run as root, or the log cannot be read.
extends_documentation_fragment:
  - gpuhost.inference.attributes
  - gpuhost.inference.attributes.info_module
options:
  addresses:
    description:
      - PCI addresses of the GPUs to judge, all of them by default.
      - An address without an NVIDIA GPU is an error.
    type: list
    elements: str
  sources:
    description:
      - Where to read the log. The two are merged, as either may have lost what the other still
        has.
      - V(journal) is C(journalctl); it has times of day and earlier boots.
      - V(dmesg) is the ring buffer of the kernel, C(/dev/kmsg), whose sequence numbers prove that
        nothing is missing.
    type: list
    elements: str
    choices: [journal, dmesg]
    default: [journal, dmesg]
  boot:
    description:
      - The boot to judge by, V(current), an offset such as V(-1), or a boot id, as
        C(journalctl --boot) takes it. Only the journal knows other boots than the current one.
      - With another boot than the current one, the drivers that are bound now do not count.
    type: str
    default: current
  log_file:
    description:
      - A saved log to judge instead, as written by C(dmesg) or C(journalctl) with any options,
        read from C(/dev/kmsg), or collected by syslog. gzip, xz and bzip2 are unpacked.
      - Entries of C(journalctl --output=json) only count with their field C(SYSLOG_IDENTIFIER).
      - When it names GPUs of this host, they are judged by it; otherwise the GPUs are those it
        names.
      - Of several boots in one file, the last counts.
    type: path
  earlier_boots:
    description:
      - So many boots before the current one are judged too, each by its own log in the journal; see
        RV(history).
      - With V(2) or more, a fault that the GPU had in the two boots before as well is put down to
        the hardware, and RV(faults[].ladder) begins accordingly.
      - Each boot is read within O(timeout). With V(0) nothing is read.
      - Not together with O(boot), O(log_file) or O(sysroot).
    type: int
    default: 0
    version_added: 0.2.0
  timeout:
    description: Seconds after which reading one source is given up.
    type: float
    default: 30
  sysroot:
    description:
      - Folder with a captured host's C(/sys), C(/proc) and so on, to judge it offline by
        O(log_file), which is taken for its log of that time.
      - Without O(log_file) the verdict on its GPUs is V(unknown).
    type: path
    default: /
seealso:
  - module: gpuhost.inference.gpu_info
  - module: gpuhost.inference.gpu_host_info
"""

EXAMPLES = r"""
- name: Judge all GPUs
  gpuhost.inference.gpu_health_info:
  register: judged

- name: Stop when a GPU is ill
  ansible.builtin.assert:
    that: judged.gpus | rejectattr('verdict', 'in', ['healthy', 'unknown']) | length == 0
    fail_msg: "{{ judged.faults | map(attribute='remedy') | unique | join(' ') }}"

- name: Look at the boot before
  gpuhost.inference.gpu_health_info:
    boot: "-1"
  register: before

- name: Look whether a fault comes back boot after boot
  gpuhost.inference.gpu_health_info:
    earlier_boots: 2
  register: judged

- name: Show what is put down to the hardware
  ansible.builtin.debug:
    msg: "{{ judged.faults | selectattr('boots', 'ge', 3) | map(attribute='remedy') }}"

- name: Judge a log somebody sent
  gpuhost.inference.gpu_health_info:
    log_file: /tmp/dmesg.txt
  register: theirs
"""

RETURN = r"""
gpus:
  description: The GPUs, by address.
  returned: success
  type: list
  elements: dict
  contains:
    address:
      description: PCI address in full form.
      returned: success
      type: str
      sample: "0000:41:00.0"
    fsp:
      description:
        - State of the Foundation Security Processor.
        - V(ok) when the GPU started, V(failed) when the log shows that its FSP did not come up,
          V(not_applicable) for a chip that boots without one, else V(unknown). On a GPU bound to
          C(vfio-pci) the guest starts the FSP, and the host cannot know.
      returned: success
      type: str
      choices: [ok, failed, unknown, not_applicable]
      sample: failed
    verdict:
      description:
        - V(healthy) when the GPU was started and a complete log shows no fault. A GPU bound to
          C(vfio-pci) needs no proof that it was started, as the guest does that.
        - V(degraded) when it works with a fault to look after, such as IOMMU faults.
        - V(failed) when it could not be started, or stopped working.
        - V(lost) when it does not answer on the bus any more.
        - V(unknown) when there is neither a fault nor a proof, or the log has gaps, or a fault may
          be of this GPU or another.
      returned: success
      type: str
      choices: [healthy, degraded, failed, lost, unknown]
      sample: failed
    reason:
      description: Why.
      returned: success
      type: str
      sample: its FSP did not come up (fsp-response, logged once)
    faults:
      description: RV(faults[].id) of the faults of this GPU that still count.
      returned: success
      type: list
      elements: str
      sample: [fsp-response]
    ladder:
      description:
        - RV(faults[].ladder) of the worst of these faults, of the one that begins highest when
          several are equally bad; empty without a fault.
      version_added: 0.2.0
      returned: success
      type: list
      elements: str
      sample: [power-off, hardware]
    evidence:
      description: Lines of the log, the first one tells most.
      returned: success
      type: list
      elements: str
      sample:
        - "[   12.345678] NVRM: GPU0 kfspProcessCommandResponse_GH100: FSP response reported error.
          Task ID: 0x1 Command type: 0x14 Error code: 0x177"
faults:
  description: The faults in the log of this boot, one entry for all repeats on one GPU.
  returned: success
  type: list
  elements: dict
  contains:
    id:
      description: Name of the kind of fault.
      returned: success
      type: str
      sample: fsp-response
    class:
      description:
        - What it means. C(fsp_failed), the FSP answered with an error or did not finish;
          C(fsp_timeout), it did not answer; C(gsp_failed), the GPU did not start or its GSP
          stopped, and the FSP is not known to be the reason; C(fw_missing), the firmware file was
          not loaded; C(stale_wpr2), a further attempt after a failed first one that is not in the
          log; C(gpu_lost); C(pcie_error), PCIe lost data; C(pcie_corrected), PCIe corrected
          errors; C(iommu_fault); C(reset_failed); C(unbind_blocked); C(xid), any other Xid that is
          not an application's own.
      returned: success
      type: str
      sample: fsp_failed
    address:
      description: The GPU, V(null) when the log does not tell.
      returned: success
      type: str
      sample: "0000:41:00.0"
    attribution:
      description:
        - How the GPU was found; C(line), its address is in the message; C(dump), the driver's dump
          of the FSP names it; C(attempt), the attempt to start it ended with its address;
          C(bridge), it is about a bridge with this GPU below; C(only-gpu), there is no other;
          V(null) for none of these.
      returned: success
      type: str
      sample: dump
    candidates:
      description: The GPUs it may be about while RV(faults[].address) is V(null).
      returned: success
      type: list
      elements: str
      sample: []
    verdict:
      description:
        - What this fault makes of a GPU while it is current. V(healthy) for errors that PCIe
          corrected, and guests that found the GPU reset, while there are few of them.
        - An Xid 154 makes it worse when the driver wants a reset or a reboot.
      returned: success
      type: str
      choices: [lost, failed, degraded, healthy]
      sample: failed
      version_added: 0.2.0
    meaning:
      description: What it means for a GPU.
      returned: success
      type: str
      sample: its FSP did not come up
      version_added: 0.2.0
    current:
      description:
        - V(false) when the GPU was started, or its driver was loaded again, since, and for what
          makes no GPU ill, see RV(faults[].verdict).
      returned: success
      type: bool
      sample: true
    boots:
      description:
        - Boots in a row, the current one included, at whose end the GPU had a fault of this class,
          of this id for Xids, as far as O(earlier_boots) looks; else V(1).
      returned: success
      type: int
      sample: 1
      version_added: 0.2.0
    first:
      description:
        - Time of the first occurrence; time of day where the log has it, else seconds since boot.
      returned: success
      type: str
      sample: "12.345678"
    last:
      description: Time of the last occurrence.
      returned: success
      type: str
      sample: "12.345678"
    count:
      description: Occurrences; a lower bound where RV(log.gaps) says so.
      returned: success
      type: int
      sample: 1
    line:
      description: The message, its first occurrence.
      returned: success
      type: str
      sample:
        "[   12.345678] NVRM: GPU0 kfspProcessCommandResponse_GH100: FSP response reported error.
        Task ID: 0x1 Command type: 0x14 Error code: 0x177"
    ladder:
      description:
        - The rungs to try one after another, from the lowest that is known to help against this
          kind of fault.
        - V(application) is to end or restart what uses the GPU; V(driver) to unload the driver and
          load it again; V(reset) to reset the GPU with nothing using it; V(reboot); V(power-off)
          to power the host off and take it from the mains for 30 s; V(hardware) to look at
          seating, power cable, riser and slot, then to have it replaced.
        - Empty when there is nothing to do but wait.
      version_added: 0.2.0
      returned: success
      type: list
      elements: str
      sample: [power-off, hardware]
    remedy:
      description: What to know of this kind of fault, and the ladder in words.
      returned: success
      type: str
      sample:
        The FSP starts only with slot power, so resets, a module reload and a warm reboot do not
        help. Power the host off and take it from the mains for 30 s; if that does not help, check
        seating, power cable, riser and slot, then have the GPU replaced.
    source:
      description: The source file of the kernel or driver that prints such messages.
      returned: success
      type: str
      sample: "open-gpu-kernel-modules: src/nvidia/src/kernel/gpu/fsp"
    evidence:
      description: Further lines that belong to it.
      returned: success
      type: list
      elements: str
      sample:
        - "[   12.345999] NVRM: GPU 0000:41:00.0: RmInitAdapter failed! (0x62:0xffff:2168)"
unattributed:
  description: Those of RV(faults) whose GPU is not known.
  returned: success
  type: list
  elements: dict
  sample: []
history:
  description:
    - The boots before, the last one first, as many as O(earlier_boots) says.
    - Drivers and proofs of a start are those of the logs, so that most GPUs without a fault are
      V(unknown).
  returned: success
  type: list
  elements: dict
  version_added: 0.2.0
  contains:
    boot_id:
      description: The boot, V(null) in an entry about boots that are not kept.
      returned: success
      type: str
      sample: 1b2c3d4e5f60718293a4b5c6d7e8f901
    first:
      description: Time of its first message.
      returned: success
      type: str
      sample: "2026-10-03T06:14:05.120000Z"
    last:
      description: Time of its last message.
      returned: success
      type: str
      sample: "2026-10-05T21:00:41.934000Z"
    error:
      description: Why it could not be judged, V(null) when it was.
      returned: success
      type: str
      sample: null
    gpus:
      description: The GPUs of now, and those that only its log names.
      returned: success
      type: list
      elements: dict
      sample:
        - {address: "0000:41:00.0", faults: [fsp-response], verdict: failed}
log:
  description: How much of the log there was.
  returned: success
  type: dict
  contains:
    sources:
      description: What was read, and why not.
      returned: success
      type: list
      elements: dict
      sample:
        - {complete: true, error: null, lines: 1834, name: dmesg}
    boot_id:
      description: The boot, V(null) when the log does not say.
      returned: success
      type: str
      sample: 6f0c1d5e2b7a4f3d9c8e7a6b5d4c3b2a
    complete:
      description: Whether one source has all messages since the boot.
      returned: success
      type: bool
      sample: true
    gaps:
      description: What is missing, and which counts are lower bounds.
      returned: success
      type: list
      elements: str
      sample: ["journal: journalctl cannot be run: No such file or directory"]
    first:
      description: Time of the first message.
      returned: success
      type: str
      sample: "0.000000"
    last:
      description: Time of the last message.
      returned: success
      type: str
      sample: "9321.040021"
    lines:
      description:
        - Lines that were looked at; of the journal only those that its own filter let through.
      returned: success
      type: int
      sample: 1834
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._faults import examine
from ansible_collections.gpuhost.inference.plugins.module_utils._pci import as_result
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "addresses": {"type": "list", "elements": "str"},
            "sources": {
                "type": "list",
                "elements": "str",
                "choices": ["journal", "dmesg"],
                "default": ["journal", "dmesg"],
            },
            "boot": {"type": "str", "default": "current"},
            "log_file": {"type": "path"},
            "earlier_boots": {"type": "int", "default": 0},
            "timeout": {"type": "float", "default": 30},
            "sysroot": {"type": "path", "default": "/"},
        },
        supports_check_mode=True,
    )
    options = dict(module.params)
    try:
        health = examine(Reader(options.pop("sysroot")), **options)
    except GpuHostError as error:
        module.fail_json(msg=str(error))
    module.exit_json(
        changed=False,
        **as_result(health),
        unattributed=[as_result(fault) for fault in health.unattributed],
    )


if __name__ == "__main__":
    main()

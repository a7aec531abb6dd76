#!/usr/bin/python
# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_host_info
short_description: Audit a GPU host in one run and check its declared layout
version_added: 0.1.0
author:
  - gpuhost.inference contributors (@gpuhost)
description:
  - Reads the GPUs, IOMMU groups, guests and the way the host was booted, judges the health of each
    GPU from the kernel log, compares all of it with a declared layout, and says what is wrong or
    risky as RV(findings).
  - Nothing is changed. The only command that is run is C(journalctl), for the kernel log.
  - It does not fail because of what it finds. A part that could not be read is V(null), it is
    named in RV(unread), and there is a finding C(part-unread) for it.
extends_documentation_fragment:
  - gpuhost.inference.attributes
  - gpuhost.inference.attributes.info_module
options:
  layout:
    description:
      - Which GPUs have which driver, IOMMU group type and guest. Everything that is wrong with it
        is listed in RV(layout.problems), all at once, whatever was written.
      - Each entry has a C(name) and C(driver) (V(nvidia), V(vfio-pci) or V(none)), and either
        C(addresses), a list of PCI addresses in quotes, or C(numa_node), a number that stands for
        all GPUs of the node.
      - It may have C(expect), with the C(id) all its GPUs must have (V(10de:2bb5)); C(iommu_type)
        (V(DMA), V(DMA-FQ), V(identity) or V(auto)); and C(guest), with C(kind) (V(lxc) or
        V(qemu)), C(vmid), and C(sev_snp) for a confidential VM.
    type: list
    elements: raw
  layout_unassigned:
    description:
      - Whether GPUs that no entry names are a problem (V(refuse)) or somebody else's (V(keep)).
    type: str
    choices: [refuse, keep]
    default: refuse
  sources:
    description: Where to read the kernel log, as in M(gpuhost.inference.gpu_health_info).
    type: list
    elements: str
    choices: [journal, dmesg]
    default: [journal, dmesg]
  log_file:
    description:
      - A saved kernel log to judge instead of the live one, in any form. With O(sysroot) it is
        taken for a log of the captured host at that time; without a saved log the health of a
        captured host is unknown.
    type: path
  timeout:
    description: Seconds after which reading a source of the kernel log is given up.
    type: float
    default: 30
  sysroot:
    description:
      - Folder with a captured host's C(/sys), C(/proc) and so on, to judge it offline.
    type: path
    default: /
seealso:
  - module: gpuhost.inference.gpu_info
  - module: gpuhost.inference.iommu_group_info
  - module: gpuhost.inference.gpu_health_info
  - module: gpuhost.inference.gpu_p2p_info
"""

EXAMPLES = r"""
- name: Audit the host
  gpuhost.inference.gpu_host_info:
  register: host

- name: Show what needs action
  ansible.builtin.debug:
    msg: "{{ item.subject }}: {{ item.evidence }}. {{ item.remedy }}"
  loop: "{{ host.findings | selectattr('severity', 'equalto', 'error') }}"
  loop_control:
    label: "{{ item.id }}"

- name: Check a layout before anything is done with it
  gpuhost.inference.gpu_host_info:
    layout:
      - name: inference
        addresses: ["0000:41:00.0", "0000:42:00.0"]
        expect: {id: "10de:2bb5"}
        driver: nvidia
        iommu_type: DMA-FQ
        guest: {kind: lxc, vmid: 100}
    layout_unassigned: keep
  register: planned
  failed_when: planned.layout.problems | length > 0
"""

RETURN = r"""
host:
  description: How the host treats DMA, and how it was booted.
  returned: success
  type: dict
  contains:
    kernel:
      description: Release of the running kernel.
      returned: success
      type: str
      sample: 6.14.11-4-pve
    proxmox:
      description: Whether Proxmox VE is installed, and its version, V(null) when it is not known.
      returned: success
      type: dict
      sample: {installed: true, version: 9.0.11}
    iommu:
      description:
        - Whether an IOMMU is in use (there are groups), whose it is (V(amd), V(intel) or V(null)),
          and the type groups get at boot as in
          RV(gpuhost.inference.iommu_group_info#module:default_type).
      returned: success
      type: dict
      sample: {default_type: DMA-FQ, present: true, vendor: amd}
    mode:
      description:
        - What groups may be set to. V(passthrough) is identity for all and no SEV-SNP guests;
          V(snp) is translated for all, with SEV-SNP; V(sme) is translated because of memory
          encryption; V(translated) is neither, so single groups may be set to identity; V(off) is
          without IOMMU.
      returned: success
      type: str
      choices: ["off", passthrough, snp, sme, translated, unknown]
      sample: translated
    snp:
      description: Whether the host offers SEV-SNP, V(null) when it is not known.
      returned: success
      type: bool
      sample: false
    sme:
      description: Whether memory encryption (SME) is active, V(null) when it is not known.
      returned: success
      type: bool
      sample: false
    cmdline:
      description: Parameters of the running kernel.
      returned: success
      type: list
      elements: str
      sample: [BOOT_IMAGE=/boot/vmlinuz-6.14.11-4-pve, root=/dev/sda2, ro, quiet]
    boot_loader:
      description:
        - The boot loader that started the running kernel (C(name) is V(grub),
          V(systemd-boot) or V(unknown)), C(proxmox-boot-tool) as C(tool) when it
          keeps the boot partitions, the file with the parameters of the next boot, these
          parameters (V(null) when they are not known), and what the judgement rests on.
      returned: success
      type: dict
      sample:
        evidence: /proc/cmdline has BOOT_IMAGE=
        file: /etc/default/grub
        name: grub
        tool: null
        wanted: [quiet]
    reboot_required:
      description:
        - Whether the running parameters differ from those of the next boot, V(null) when it is not
          known.
      returned: success
      type: bool
      sample: false
    pending:
      description:
        - Parameters that are not running yet, and those that are still running although they are
          no longer wanted. Only parameters about IOMMU, memory encryption, PCI and GPU drivers
          count as still running.
      returned: success
      type: dict
      sample: {extra: [], missing: [iommu=nopt]}
    next_boot:
      description:
        - Whether a reboot would end in a kernel that has what the layout needs; C(problems) are
          sentences, and what cannot be told is a problem, too. C(kernel) is the release the boot
          loader starts next, V(null) when that cannot be told.
      returned: success
      type: dict
      sample: {kernel: 6.14.11-4-pve, problems: [], ready: true}
    trial:
      description:
        - A trial of IOMMU group types as in RV(gpuhost.inference.iommu_trial#module:trial),
          V(null) for none.
      returned: success
      type: dict
      sample: null
    reboot:
      description:
        - A reboot as it would be now. C(reasons) say why one is needed, none when it is not;
          C(problems) why none may be done; C(stall) why a clean shutdown may never end; C(guests)
          are the running guests of the layout, in the order in which Proxmox starts them.
      returned: success
      type: dict
      sample:
        guests:
          - {kind: lxc, name: inference, vmid: 100}
        problems: []
        reasons: [the running kernel was started without iommu=nopt]
        stall: []
    modules:
      description: Modules in the kernel out of those that matter for GPUs, loaded or built in.
      returned: success
      type: list
      elements: str
      sample: [nvidia, nvidia_uvm, vfio, vfio_pci]
    modprobe:
      description:
        - Lines of the modprobe.d files that are in force and concern GPU drivers, VFIO or KVM.
      returned: success
      type: list
      elements: dict
      sample:
        - command: blacklist
          file: /etc/modprobe.d/gpu.conf
          line: 1
          module: nouveau
          value: ""
gpus:
  description: The GPUs as in RV(gpuhost.inference.gpu_info#module:gpus), V(null) when unread.
  returned: success
  type: list
  elements: dict
  sample: []
groups:
  description:
    - The IOMMU groups as in RV(gpuhost.inference.iommu_group_info#module:groups), V(null) when
      unread.
  returned: success
  type: list
  elements: dict
  sample: []
guests:
  description:
    - Containers and virtual machines, by number, V(null) when unread. Of their configuration only
      the lines are shown that give them devices or decide how they start with them.
    - C(running) is V(null) when it could not be found out.
  returned: success
  type: list
  elements: dict
  sample:
    - kind: lxc
      name: inference
      onboot: false
      path: /etc/pve/lxc/100.conf
      pid: null
      running: true
      settings:
        - {key: dev0, value: "/dev/nvidia0,gid=44"}
      vmid: 100
health:
  description:
    - Verdict for each GPU, the faults in the kernel log and how complete that was, all as returned
      by M(gpuhost.inference.gpu_health_info).
  returned: success
  type: dict
  sample:
    faults: []
    gpus:
      - address: "0000:41:00.0"
        evidence: []
        faults: []
        fsp: ok
        reason: bound to nvidia and started
        verdict: healthy
    log: {complete: true}
    unattributed: []
p2p:
  description:
    - Peer-to-peer copies between GPUs. Nothing is tested here; C(tests) are what
      M(gpuhost.inference.gpu_p2p_info) found and the playbook C(check_p2p) kept in
      C(/var/lib/gpuhost/p2p.json), each with whether it is still C(valid), or else what has
      C(changed) that it depends on.
    - C(servers) are the SGLang and vLLM servers that run now, with their GPUs and the two switches
      that keep them from such copies, V(null) where that cannot be seen.
  returned: success
  type: dict
  sample:
    servers:
      - addresses: ["0000:41:00.0", "0000:42:00.0"]
        command: python -m sglang.launch_server --config /etc/sglang.yaml
        disable_custom_all_reduce: true
        nccl_p2p_disable: true
        pid: 4711
        subject: lxc 100
        title: process 4711 of sglang.service of lxc 100
    tests:
      - addresses: ["0000:41:00.0", "0000:42:00.0"]
        changed: []
        reason: 4 copies arrived right, and the kernel logged no fault
        time: "2026-03-01T12:00:00Z"
        valid: true
        verdict: works
        vmid: 100
findings:
  description:
    - What is wrong or risky, errors first. C(docs/findings.md) of the collection lists all kinds.
  returned: success
  type: list
  elements: dict
  contains:
    id:
      description: The rule that speaks.
      returned: success
      type: str
      sample: rival-driver
    severity:
      description: How bad it is.
      returned: success
      type: str
      choices: [error, warning, note]
      sample: warning
    subject:
      description: What it is about; a PCI address, a guest (C(lxc 100), C(qemu 200)), or a file.
      returned: success
      type: str
      sample: /etc/modprobe.d
    evidence:
      description: What was read, and where.
      returned: success
      type: str
      sample: "nouveau: no blacklist line there, none in /proc/cmdline; it is not loaded now"
    why:
      description: Why it matters.
      returned: success
      type: str
      sample: This in-tree driver binds NVIDIA GPUs when it is loaded.
    remedy:
      description: What to do.
      returned: success
      type: str
      sample: Add 'blacklist DRIVER' to a file in /etc/modprobe.d, then update-initramfs -u -k all.
    reference:
      description: Where that is documented.
      returned: success
      type: str
      sample: modprobe.d(5), blacklist
layout:
  description: The layout, with what is wrong with it and where the host differs from it.
  returned: success
  type: dict
  contains:
    entries:
      description:
        - The entries with their addresses resolved. An entry that cannot be understood is left
          out, so use them only while RV(layout.problems) is empty.
      returned: success
      type: list
      elements: dict
      sample:
        - addresses: ["0000:41:00.0", "0000:42:00.0"]
          driver: nvidia
          expect: {id: "10de:2bb5"}
          guest: {kind: lxc, sev_snp: false, vmid: 100}
          iommu_type: DMA-FQ
          name: inference
    unassigned:
      description: GPUs that no entry names.
      returned: success
      type: list
      elements: str
      sample: []
    problems:
      description: What is wrong with the layout, one sentence each.
      returned: success
      type: list
      elements: str
      sample:
        - "layout entry 1 ('inference') names 0000:41:00.0 twice: remove one"
    differs:
      description: GPUs whose driver, group type or guest is not as declared; see RV(findings).
      returned: success
      type: list
      elements: str
      sample: []
unread:
  description: Parts of the host that could not be read.
  returned: success
  type: list
  elements: str
  sample: []
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._host import audit, open_log
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "layout": {"type": "list", "elements": "raw"},
            "layout_unassigned": {"choices": ["refuse", "keep"], "default": "refuse"},
            "sources": {
                "type": "list",
                "elements": "str",
                "choices": ["journal", "dmesg"],
                "default": ["journal", "dmesg"],
            },
            "log_file": {"type": "path"},
            "timeout": {"type": "float", "default": 30},
            "sysroot": {"type": "path", "default": "/"},
        },
        supports_check_mode=True,
    )
    wish = module.params
    captured = wish["sysroot"] != "/"
    try:
        log = open_log(wish["sources"], wish["log_file"], wish["timeout"], captured=captured)
        result = audit(
            Reader(wish["sysroot"]),
            log,
            wish["layout"],
            wish["layout_unassigned"],
            observed=captured or not wish["log_file"],
        )
    except GpuHostError as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()

#!/usr/bin/python
# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: kernel_cmdline
short_description: Add and take out kernel parameters of the next boot
version_added: 0.2.0
author:
  - gpuhost.inference contributors (@gpuhost)
description:
  - Edits the parameters that the boot loader passes to the kernel, one by one; everything else in
    the files stays as it is. Nothing reboots.
  - Which files count is decided by what booted the running kernel. With systemd-boot under
    C(proxmox-boot-tool) it is the first line of C(/etc/kernel/cmdline), put in force by
    C(proxmox-boot-tool refresh). With GRUB, additions go to the drop-in
    C(/etc/default/grub.d/zz-gpuhost.cfg) and what is unwanted is taken out where it stands, put in
    force by C(update-grub), or by C(proxmox-boot-tool refresh) when that keeps the boot partitions,
    as it does with ZFS and with secure boot. Any other boot loader is refused.
  - A parameter that contradicts a wanted one is taken out, because the kernel would take the last
    of the two (C(iommu=nopt) when C(iommu=pt) is wanted; of C(iommu=nopt,soft) only the word
    C(nopt)). Parameters that may stand more than once, as C(console), are left alone. C(-) and
    C(_) are the same in names.
  - What is changed is recorded in C(/var/lib/gpuhost/kernel_cmdline.json), so that
    O(state=absent) can give the files back byte for byte. Of a file that somebody else has edited
    since, only this module's parameters are taken back, with a warning.
  - When the tool of the boot loader fails, or did not do its work, the files are put back and the
    tool's words are the error.
extends_documentation_fragment:
  - gpuhost.inference.attributes
  - gpuhost.inference.attributes.state_module
options:
  present:
    description:
      - Parameters that must be configured, as whole words, V(iommu=pt) and not V(iommu).
      - Refused are V(amd_iommu=off) and its like, V(root), V(initrd), V(init) and V(BOOT_IMAGE),
        and what boot loaders cannot pass on, such as single quotes.
    type: list
    elements: str
    default: []
  absent:
    description:
      - Parameters that must not be configured. A bare name stands for the parameter with any value,
        except for values in O(present).
    type: list
    elements: str
    default: []
  state:
    description:
      - V(present) brings about O(present) and O(absent). What neither names stays, also when an
        earlier run put it there.
      - V(absent) takes back everything this module ever changed.
    type: str
    choices: [present, absent]
    default: present
  modprobe_options:
    description:
      - Module options to compare with those in force in RV(modprobe), a dictionary of options for
        each module. Those that the host's modprobe.d files set are compared without being named.
    type: dict
    default: {}
  timeout:
    description: Seconds that the tool of the boot loader may take.
    type: float
    default: 300
seealso:
  - module: gpuhost.inference.gpu_host_info
"""

EXAMPLES = r"""
- name: Translate DMA, and flush strictly
  gpuhost.inference.kernel_cmdline:
    present: [iommu.strict=1]
    absent: [iommu=pt, amd_iommu=on]
  register: cmdline

- name: Take any value of a parameter out
  gpuhost.inference.kernel_cmdline:
    absent: [vfio-pci.ids]

- name: See whether the driver uses the options of modprobe.d
  gpuhost.inference.kernel_cmdline:
    modprobe_options:
      nvidia: {NVreg_DmaRemapPeerMmio: "0"}
  register: options
  failed_when: options.modprobe | selectattr('pending') | length > 0

- name: Leave the boot loader's files as they were
  gpuhost.inference.kernel_cmdline:
    state: absent
"""

RETURN = r"""
files:
  description:
    - The files that were changed, or would be, with their text before and after, V(null) for no
      file.
  returned: success
  type: list
  elements: dict
  sample:
    - path: /etc/kernel/cmdline
      before: "root=ZFS=rpool/ROOT/pve-1 boot=zfs\n"
      after: "root=ZFS=rpool/ROOT/pve-1 boot=zfs iommu.strict=1\n"
diff:
  description: The same for C(--diff).
  returned: success
  type: list
  elements: dict
  sample:
    - before_header: /etc/kernel/cmdline
      after_header: /etc/kernel/cmdline
      before: "root=ZFS=rpool/ROOT/pve-1 boot=zfs\n"
      after: "root=ZFS=rpool/ROOT/pve-1 boot=zfs iommu.strict=1\n"
reboot_required:
  description:
    - Whether the running kernel has other parameters than are configured for the next boot, after
      the change; V(null) when that is not known.
  returned: success
  type: bool
  sample: true
missing:
  description: Parameters of O(present) that the running kernel was not started with.
  returned: success
  type: list
  elements: str
  sample: [iommu.strict=1]
unwanted:
  description: Parameters of the running kernel that O(absent) or O(present) rule out.
  returned: success
  type: list
  elements: str
  sample: []
not_configured:
  description:
    - Parameters that the boot loader's files miss, or have and should not, after the change; in
      check mode before it.
  returned: success
  type: list
  elements: str
  sample: []
boot_loader:
  description:
    - As in RV(gpuhost.inference.gpu_host_info#module:host.boot_loader), with the parameters of the
      next boot as C(wanted) after the change.
  returned: success
  type: dict
  sample:
    evidence: EFI variable LoaderInfo says systemd-boot
    file: /etc/kernel/cmdline
    name: systemd-boot
    tool: proxmox-boot-tool
    wanted: [root=ZFS=rpool/ROOT/pve-1, boot=zfs, iommu.strict=1]
commands:
  description: The commands that were run, or would be.
  returned: success
  type: list
  elements: str
  sample: [/usr/sbin/proxmox-boot-tool refresh]
modprobe:
  description:
    - The options that modprobe.d sets for GPU, VFIO and KVM modules, and those of
      O(modprobe_options), each with the value in force, V(null) when the module is not loaded or
      does not tell. C(pending) says whether the module has to be loaded anew, and is V(null) when
      it does not tell.
  returned: success
  type: list
  elements: dict
  sample:
    - module: nvidia
      option: NVreg_DmaRemapPeerMmio
      wanted: "0"
      effective: "1"
      pending: true
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuhost.inference.plugins.module_utils._boot_files import (
    change,
    compare_options,
    run_tool,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "present": {"type": "list", "elements": "str", "default": []},
            "absent": {"type": "list", "elements": "str", "default": []},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "modprobe_options": {"type": "dict", "default": {}},
            "timeout": {"type": "float", "default": 300},
        },
        supports_check_mode=True,
    )
    wish = module.params
    try:
        modprobe = compare_options(Reader(), wish["modprobe_options"])
        result = change(
            Reader(),
            wish["present"],
            wish["absent"],
            back=wish["state"] == "absent",
            check=module.check_mode,
            run=lambda command: run_tool(command, wish["timeout"]),
        )
    except GpuHostError as error:
        module.fail_json(msg=str(error))
    for warning in result.pop("warnings"):
        module.warn(warning)
    module.exit_json(modprobe=modprobe, **result)


if __name__ == "__main__":
    main()

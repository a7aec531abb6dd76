#!/usr/bin/python
# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_info
short_description: List the NVIDIA GPUs of a host, their drivers, users and owners
version_added: 0.1.0
author:
  - gpuhost.inference contributors (@gpuhost)
description:
  - Lists every NVIDIA display device (VGA or 3D controller) of the host, by PCI address. Other
    makers' cards, such as the graphics of a management controller, are no GPUs here.
  - Everything is read from C(/sys), C(/proc), C(/etc/pve) and C(/run). No command is run, so no
    driver is loaded and no card is woken up.
  - A GPU is free only when RV(gpus[].users) and RV(gpus[].users_unknown) are both empty. Users
    are found by the device numbers of all open and mapped files of all processes, so those in
    containers are seen too. Run as root, or most processes cannot be looked at.
  - Whatever may wait for a driver, a lock or a file server is asked with a deadline of two seconds.
    What gives no answer counts as unknown, and keeps nothing else from being read.
extends_documentation_fragment:
  - gpuhost.inference.attributes
  - gpuhost.inference.attributes.info_module
options:
  addresses:
    description:
      - PCI addresses of the GPUs to list, all of them by default.
      - Full (V(0000:41:00.0)) and short form (V(41:00.0)) are understood, also the eight-digit
        domain of C(nvidia-smi).
      - An address without an NVIDIA GPU is an error.
    type: list
    elements: str
  sysroot:
    description:
      - Folder with a captured host's C(/sys), C(/proc) and so on, to judge it offline.
    type: path
    default: /
seealso:
  - module: gpuhost.inference.gpu
  - module: gpuhost.inference.iommu_group_info
"""

EXAMPLES = r"""
- name: List all GPUs
  gpuhost.inference.gpu_info:
  register: all_gpus

- name: Show who uses which GPU
  ansible.builtin.debug:
    msg: "{{ item.driver }}: {{ item.users | map(attribute='command') | join(', ') }}"
  loop: "{{ all_gpus.gpus }}"
  loop_control:
    label: "{{ item.address }}"

- name: List the GPUs next to the second processor
  ansible.builtin.debug:
    msg: "{{ all_gpus.gpus | selectattr('numa_node', 'equalto', 1) | map(attribute='address') }}"
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
    id:
      description: Vendor and device id.
      returned: success
      type: str
      sample: "10de:2bb5"
    subsystem_id:
      description:
        - Subsystem vendor and device id. It tells apart some products that share RV(gpus[].id).
      returned: success
      type: str
      sample: "10de:204e"
    class:
      description: PCI class, C(0x0300xx) for VGA and C(0x0302xx) for 3D controllers.
      returned: success
      type: str
      sample: "0x030200"
    name:
      description: Product name, V(null) for an id that this collection does not know.
      returned: success
      type: str
      sample: RTX PRO 6000 Blackwell Server Edition
    architecture:
      description:
        - Architecture by id, V(unknown) for a block of ids that this collection does not know.
      returned: success
      type: str
      sample: Blackwell
    has_fsp:
      description: Whether the chip boots through a Foundation Security Processor.
      returned: success
      type: str
      choices: ["yes", "no", unknown]
      sample: "yes"
    numa_node:
      description: NUMA node, V(null) when the firmware does not say.
      returned: success
      type: int
      sample: 0
    driver:
      description: Driver bound to the GPU, V(null) for none. A bound GPU need not be a working one.
      returned: success
      type: str
      sample: nvidia
    driver_override:
      description: The only driver that may bind the GPU, V(null) when any may.
      returned: success
      type: str
      sample: nvidia
    device_minor:
      description:
        - N of C(/dev/nvidiaN), V(null) while the GPU is not bound to C(nvidia). It changes when
          GPUs are bound anew.
      returned: success
      type: int
      sample: 0
    iommu_group:
      description:
        - The IOMMU group as in RV(gpuhost.inference.iommu_group_info#module:groups[]), V(null)
          without an IOMMU.
      returned: success
      type: dict
      sample:
        number: 42
        type: DMA-FQ
        members:
          - address: "0000:41:00.0"
            class: "0x030200"
            driver: nvidia
            id: "10de:2bb5"
            is_gpu: true
        reserved_regions:
          - {end: 4277141503, start: 4276092928, type: msi}
    companions:
      description:
        - Other functions of the same card, such as sound or USB. They move together with the GPU.
      returned: success
      type: list
      elements: dict
      sample:
        - {address: "0000:41:00.1", class: "0x040300", driver: snd_hda_intel, driver_override: null}
    bars:
      description: Memory windows by index. Size 0 means that the firmware found no room for it.
      returned: success
      type: list
      elements: dict
      sample:
        - {index: 1, size_bytes: 137438953472}
    link:
      description:
        - PCIe link now and at best. The speed of an idle GPU is often lower. All are V(null) in
          power state D3cold.
      returned: success
      type: dict
      sample: {max_speed: 32.0 GT/s PCIe, max_width: 16, speed: 32.0 GT/s PCIe, width: 16}
    power:
      description:
        - Power state and runtime power management, in the kernel's words. In state V(D3cold) the
          card is not asked for anything that would wake it up.
      returned: success
      type: dict
      sample: {control: "on", d3cold_allowed: true, runtime_status: active, state: D0}
    reset_methods:
      description: Ways to reset the GPU that the kernel knows, in the order it tries them.
      returned: success
      type: list
      elements: str
      sample: [flr, bus]
    sriov:
      description:
        - Virtual functions possible and present; C(physfn) is the address of the card a virtual
          function is part of.
      returned: success
      type: dict
      sample: {num_vfs: 0, physfn: null, total_vfs: 48}
    users:
      description:
        - Processes of the host and of its containers that hold a device node of this GPU.
        - Such nodes are C(/dev/nvidiaN) and those of MIG instances, DRM nodes, the nodes of VFIO
          for the group and for the device, and the sound nodes of a companion. C(/dev/nvidiactl),
          C(/dev/nvidia-uvm) and C(/dev/nvidia-modeset) belong to all GPUs and do not count.
        - Not seen are threads that no longer share the open files of their process, files on their
          way through a socket, and users inside the kernel.
      returned: success
      type: list
      elements: dict
      contains:
        pid:
          description: Process number on the host.
          returned: success
          type: int
          sample: 4242
        command:
          description: Command line without keys and passwords, or the name of a thread in brackets.
          returned: success
          type: str
          sample: python3 -m sglang.launch_server
        cgroup:
          description: Control group, which tells the container or service, V(null) if unknown.
          returned: success
          type: str
          sample: /lxc/100/ns/system.slice/sglang.service
        unit:
          description:
            - Unit of the host's systemd that the process belongs to, V(null) for processes of
              containers.
          returned: success
          type: str
          sample: nvidia-persistenced.service
        node:
          description: Path of the node as the process knows it, perhaps inside a container.
          returned: success
          type: str
          sample: /dev/nvidia0
        how:
          description: Whether the process has the node open, or only mapped into its memory.
          returned: success
          type: str
          choices: [open, mapped]
          sample: open
      sample:
        - cgroup: /lxc/100/ns/system.slice/sglang.service
          command: python3 -m sglang.launch_server
          how: open
          node: /dev/nvidia0
          pid: 4242
          unit: null
    users_unknown:
      description: What could not be looked at. While this is not empty the GPU counts as in use.
      returned: success
      type: list
      elements: str
      sample: ["/proc/4242/fd could not be listed: Permission denied"]
    owners:
      description:
        - Guests the GPU belongs to, by their configuration, by a running process, or by Proxmox's
          reservation file. Snapshots do not count, changes that wait for the next start do.
        - A virtual machine claims GPUs by C(hostpciN), directly or through a PCI mapping, and by
          C(args). A container does by C(devN), C(lxc.mount.entry) and C(lxc.cgroup2.devices.allow),
          where C(c 195:* rwm) claims all of them.
        - A container names device nodes, so its claim on a GPU is seen only while that is bound
          to C(nvidia). While it is on C(vfio-pci), C(/dev/nvidia3) is no card's node or another's,
          and the claim cannot be attributed.
      returned: success
      type: list
      elements: dict
      contains:
        kind:
          description: Container or virtual machine.
          returned: success
          type: str
          choices: [lxc, qemu]
          sample: lxc
        vmid:
          description: Number of the guest.
          returned: success
          type: int
          sample: 100
        source:
          description: Where the claim stands.
          returned: success
          type: str
          choices: [config, process, reservation]
          sample: config
        running:
          description:
            - Whether the guest runs, V(null) when it could not be found out. Of a reservation,
              whether it holds now.
          returned: success
          type: bool
          sample: true
        detail:
          description: The line that makes the claim, or the file it stands in.
          returned: success
          type: str
          sample: "dev0: /dev/nvidia0"
      sample:
        - {detail: "dev0: /dev/nvidia0", kind: lxc, running: true, source: config, vmid: 100}
    config_readable:
      description:
        - Whether the card answers on the bus. V(false) means that its configuration space reads all
          ones, so that only a power cycle helps.
        - V(null) when it could not be read, or was not because reading would wake the card up
          (power state D3cold).
      returned: success
      type: bool
      sample: true
    mig:
      description:
        - Whether the card is divided into MIG instances. MIG mode without instances reads V(false).
        - V(null) while it is not bound to C(nvidia), or when it could not be read.
      returned: success
      type: bool
      sample: false
    display:
      description:
        - Signs that the card drives the display of the host, a sentence each; an empty list for
          none. That it cannot be told is a sentence, too.
        - A sign is a framebuffer on the card, memory of the firmware's framebuffer inside one of
          its windows, and being the firmware's choice (C(boot_vga)) while the host draws on a
          framebuffer that no other card owns.
      returned: success
      type: list
      elements: str
      sample: ["it draws the host's framebuffer fb0 (nvidia-drmdrmfb)"]
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._gpu import read_gpus
from ansible_collections.gpuhost.inference.plugins.module_utils._pci import as_result
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "addresses": {"type": "list", "elements": "str"},
            "sysroot": {"type": "path", "default": "/"},
        },
        supports_check_mode=True,
    )
    try:
        gpus = read_gpus(Reader(module.params["sysroot"]), module.params["addresses"])
    except GpuHostError as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=False, gpus=[as_result(gpu) for gpu in gpus])


if __name__ == "__main__":
    main()

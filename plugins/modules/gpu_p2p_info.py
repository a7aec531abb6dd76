#!/usr/bin/python
# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_p2p_info
short_description: Test whether GPUs can copy to and from each other, and compare what arrives
version_added: 0.2.0
author:
  - gpuhost.inference contributors (@gpuhost)
description:
  - Says whether peer-to-peer copies (P2P) between GPUs work, for each ordered pair and both ways,
    and whether the running model servers are set accordingly. Run it on the Proxmox host.
  - The word of the driver (C(nvidia-smi topo -p2p)) is reported and believed by nobody. Behind a
    translating IOMMU it is C(OK), and copies hang, fault, or end without an error and without the
    data. So data is copied and every byte is compared, and new faults in the kernel log count.
  - The copies are made by a small program that needs a Python and C(libcuda.so.1), no PyTorch. It
    runs in a container that has the GPUs, or on the host where NVIDIA's libraries are installed.
    It takes some hundred MiB of memory on two GPUs at a time, also beside a running server.
  - RV(p2p.verdict) is V(works) only when every copy arrived right and no fault was logged.
    V(unknown) is never a reason to take a fallback off.
  - Nothing is changed. Every step has a time limit; what hangs in the kernel is left and named.
  - Run as root, or the kernel log cannot be read.
extends_documentation_fragment:
  - gpuhost.inference.attributes
  - gpuhost.inference.attributes.info_module
options:
  addresses:
    description:
      - PCI addresses of the GPUs. By default those on the driver C(nvidia), and with O(vmid)
        only those that belong to that container.
    type: list
    elements: str
  vmid:
    description:
      - The container in which the copies are made, by C(pct exec). Without it, on the host.
    type: int
  python:
    description: Python interpreter there, 3.9 or newer.
    type: str
    default: python3
  test:
    description: Whether to make copies. Without it, the verdict is V(unknown).
    type: bool
    default: true
  timeout:
    description:
      - Seconds for all of it. A real pair takes about one; a pair that hangs takes all the rest.
    type: float
    default: 120
  size:
    description: Size of each copy in MiB.
    type: int
    default: 16
seealso:
  - module: gpuhost.inference.gpu_host_info
  - module: gpuhost.inference.gpu_health_info
"""

EXAMPLES = r"""
- name: Test the GPUs of container 100 in it
  gpuhost.inference.gpu_p2p_info:
    vmid: 100
    python: /opt/sglang/bin/python
  register: tested

- name: Stop when a server's fallback does not fit
  ansible.builtin.assert:
    that: tested.p2p.problems | length == 0
    fail_msg: "{{ tested.p2p.problems | join('; ') }}"

- name: Test two GPUs on the host itself
  gpuhost.inference.gpu_p2p_info:
    addresses: ["0000:41:00.0", "0000:42:00.0"]
"""

RETURN = r"""
p2p:
  description: The verdict on these GPUs as a set, and what it rests on.
  returned: success
  type: dict
  contains:
    verdict:
      description:
        - V(works) when all copies of all ordered pairs arrived right, both ways, and no fault was
          logged. V(broken) when one did not arrive, or a fault was logged. V(unknown) otherwise.
      returned: success
      type: str
      choices: [works, broken, unknown]
      sample: broken
    reason:
      description: Why, in a sentence.
      returned: success
      type: str
      sample: 24 of 24 copies did not arrive, first the write from 0000:41:00.0 to 0000:42:00.0
    time:
      description: When it was tested, UTC.
      returned: success
      type: str
      sample: "2026-03-01T12:00:00Z"
    vmid:
      description: The container in which it was tested, V(null) for the host.
      returned: success
      type: int
      sample: 100
    addresses:
      description: The GPUs.
      returned: success
      type: list
      elements: str
      sample: ["0000:41:00.0", "0000:42:00.0"]
    pairs:
      description: All ordered pairs.
      returned: success
      type: list
      elements: dict
      contains:
        from:
          description: The GPU that has the data.
          returned: success
          type: str
          sample: "0000:41:00.0"
        to:
          description: The GPU that gets it.
          returned: success
          type: str
          sample: "0000:42:00.0"
        capability:
          description:
            - What the driver says of C(write) and C(read), in the words of C(nvidia-smi); V(OK),
              or why not (V(CNS), V(GNS), V(TNS), V(NS), V(DR), V(U)). V(null) when not known.
          returned: success
          type: dict
          sample: {read: OK, write: OK}
        write:
          description:
            - What became of the data when the first GPU executed the copy. V(failed) is a copy
              that was refused, or did not end; V(wrong) one that ended without an error.
          returned: success
          type: str
          choices: [right, wrong, failed, untested]
          sample: wrong
        read:
          description: The same when the second GPU executed the copy.
          returned: success
          type: str
          choices: [right, wrong, failed, untested]
          sample: right
        reason:
          description: Why not right; V(null) when all is right.
          returned: success
          type: str
          sample: "write: nothing arrived, and no error was told"
    faults:
      description:
        - What the kernel logged about these GPUs during the test, as
          RV(gpuhost.inference.gpu_health_info#module:faults).
      returned: success
      type: list
      elements: dict
      sample: []
    fallback:
      description:
        - Whether servers should go without P2P (C(wanted), V(null) when the verdict is V(unknown)),
          and the running SGLang and vLLM C(servers) that use two or more of these GPUs, with the
          two switches for that as their processes have them, V(null) where that cannot be seen.
      returned: success
      type: dict
      sample:
        wanted: true
        servers:
          - addresses: ["0000:41:00.0", "0000:42:00.0"]
            command: python -m sglang.launch_server --config /etc/sglang.yaml
            disable_custom_all_reduce: true
            nccl_p2p_disable: true
            pid: 4711
            subject: lxc 100
            title: process 4711 of sglang.service of lxc 100
    problems:
      description:
        - What could not be found out, and servers whose fallback is missing or left over, a
          sentence each.
      returned: success
      type: list
      elements: str
      sample: []
    basis:
      description:
        - What the verdict depends on. When any of it changes, test again. C(types) are of the
          IOMMU groups, C(cards) the cards' vendor, device and subsystem, C(parameters) those of the
          running kernel about PCI and IOMMU, C(dma_remap_peer_mmio) and C(registry_dwords) those of
          the driver.
      returned: success
      type: dict
      sample:
        cards: {"0000:41:00.0": "10de:2bb5 10de:204e", "0000:42:00.0": "10de:2bb5 10de:204e"}
        dma_remap_peer_mmio: "1"
        driver: 580.126.09
        kernel: 6.14.11-4-pve
        parameters: [iommu=pt]
        registry_dwords: ['""', '""']
        types: {"0000:41:00.0": DMA-FQ, "0000:42:00.0": DMA-FQ}
kept:
  description:
    - The tests that the playbook C(check_p2p) kept in C(/var/lib/gpuhost/p2p.json) before this one,
      each as RV(p2p).
  returned: success
  type: list
  elements: dict
  sample: []
worth_keeping:
  description:
    - Whether this test may replace those in RV(kept) that were made in the same place. V(false)
      when it is V(unknown) and one of them is not and still holds.
  returned: success
  type: bool
  sample: true
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._p2p import Wish, examine
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "addresses": {"type": "list", "elements": "str"},
            "vmid": {"type": "int"},
            "python": {"type": "str", "default": "python3"},
            "test": {"type": "bool", "default": True},
            "timeout": {"type": "float", "default": 120},
            "size": {"type": "int", "default": 16},
        },
        supports_check_mode=True,
    )
    try:
        result = examine(Reader(), Wish(**module.params))
    except GpuHostError as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()

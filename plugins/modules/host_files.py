#!/usr/bin/python
# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: host_files
short_description: Keep a set of small files of a host
version_added: 0.2.0
author:
  - gpuhost.inference contributors (@gpuhost)
description:
  - Writes several small text files and links in one run, and removes those that are no longer
    wanted. What takes C(copy), C(file) and C(find) a connection for each file takes one.
  - Each file is replaced as a whole. Missing folders are made, with mode 0755, and 0700 for
    C(/var/lib/gpuhost).
extends_documentation_fragment:
  - gpuhost.inference.attributes
  - gpuhost.inference.attributes.state_module
options:
  files:
    description:
      - The files there shall be. Each has a O(files[].content) or is a O(files[].link).
    type: list
    elements: dict
    default: []
    suboptions:
      path:
        description: Absolute path.
        type: path
        required: true
      content:
        description: The whole text.
        type: str
      mode:
        description: Permissions of the file, which is the user's who runs this, root's.
        type: str
        choices: ["0600", "0644", "0755"]
        default: "0644"
      link:
        description: Where a symbolic link points, instead of a text.
        type: str
  sweep:
    description:
      - Patterns of absolute paths. What matches and is not among O(files) is removed, a folder
        only when nothing else is in it. V(*) stands for any part of a name, V(**/*) for everything
        below a folder. Symbolic links are not followed, and a pattern that looks around in one is
        refused.
    type: list
    elements: str
    default: []
seealso:
  - module: ansible.builtin.copy
"""

EXAMPLES = r"""
- name: Have one file of two
  gpuhost.inference.host_files:
    files:
      - path: /etc/modprobe.d/gpuhost.conf
        content: |
          blacklist nouveau
    sweep: [/etc/modprobe.d/gpuhost*.conf]
"""

RETURN = r"""
files:
  description: What was, or would be, changed, in order. C(change) is V(write) or V(remove).
  returned: success
  type: list
  elements: dict
  sample:
    - {path: /etc/modprobe.d/gpuhost.conf, change: write}
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._files import (
    File,
    apply_files,
    as_diff,
    plan_files,
)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "files": {
                "type": "list",
                "elements": "dict",
                "default": [],
                "options": {
                    "path": {"type": "path", "required": True},
                    "content": {"type": "str"},
                    "mode": {"choices": ["0600", "0644", "0755"], "default": "0644"},
                    "link": {"type": "str"},
                },
                "required_one_of": [("content", "link")],
                "mutually_exclusive": [("content", "link")],
            },
            "sweep": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    wanted = [
        File(one["path"], link=one["link"])
        if one["link"] is not None
        else File(one["path"], one["content"], int(one["mode"], 8))
        for one in module.params["files"]
    ]
    try:
        steps = plan_files(Path("/"), wanted, module.params["sweep"])
        if not module.check_mode:
            apply_files(Path("/"), steps)
    except GpuHostError as error:
        module.fail_json(msg=str(error))
    module.exit_json(
        changed=bool(steps),
        files=[
            {"path": step.path, "change": "write" if step.after else "remove"} for step in steps
        ],
        **({"diff": as_diff(steps)} if module._diff else {}),
    )


if __name__ == "__main__":
    main()

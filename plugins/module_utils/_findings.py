# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.
"""What is wrong or risky on a host: one rule per kind of finding, all in the table `RULES`.

A rule is a plain function over the facts. It yields a `Hit` for each subject it has evidence
against, and stays silent about what could not be read (`part-unread` and `health-unknown` speak
of that). The rules live in a file per family; what they judge is in `_finding.Facts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ansible_collections.gpuhost.inference.plugins.module_utils import (
    _findings_boot,
    _findings_configs,
    _findings_gpus,
    _findings_guests,
    _findings_iommu,
    _findings_layout,
    _findings_p2p,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._finding import (
    SEVERITIES,
    Facts,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._iommu import IommuGroup

FAMILIES = (
    ("Cards", _findings_gpus.RULES),
    ("Guests", _findings_guests.RULES),
    ("Guests' configurations", _findings_configs.RULES),
    ("IOMMU and memory encryption", _findings_iommu.RULES),
    ("Peer-to-peer copies", _findings_p2p.RULES),
    ("Boot", _findings_boot.RULES),
    ("Layout", _findings_layout.RULES),
)
RULES = tuple(rule for _title, rules in FAMILIES for rule in rules)


@dataclass(frozen=True)
class Finding:
    """One judgement about a host."""

    id: str
    severity: str
    subject: str
    evidence: str
    why: str
    remedy: str
    reference: str


def find(facts: Facts) -> list[Finding]:
    """Return the findings of all rules, errors first, then by rule and subject."""
    found = [
        Finding(
            rule.id,
            rule.severity,
            hit.subject,
            hit.evidence,
            rule.why,
            hit.remedy or rule.remedy,
            rule.reference,
        )
        for rule in RULES
        for hit in rule.check(facts)
    ]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def host_mode(
    groups: Sequence[IommuGroup] | None,
    default_type: str | None,
    snp: bool | None,
    sme: bool | None,
) -> str:
    """Name how a host treats DMA, which decides what its groups may be set to.

    `off`: no IOMMU. `passthrough`: identity for all by default, no SEV-SNP guests. `snp`: SEV-SNP,
    so translated for all. `sme`: memory encryption, so a device must be translated. `translated`:
    neither, so a group may be set to identity. `unknown`: one of these could not be told.
    """
    if groups is not None and not groups:
        return "off"
    if default_type == "identity":
        return "passthrough"
    if snp:
        return "snp"
    if sme:
        return "sme"
    if groups is None or default_type is None or snp is None or sme is None:
        return "unknown"
    return "translated"

# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""Findings about peer-to-peer copies: the servers that run, and what tests of their GPUs said."""

from __future__ import annotations

from collections.abc import Iterator

from ansible_collections.gpuhost.inference.plugins.module_utils._finding import (
    Facts,
    Hit,
    Rule,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._p2p import Saved
from ansible_collections.gpuhost.inference.plugins.module_utils._p2p_servers import Server

_TOOLS = "gpu_p2p_info"


def verdict_on(facts: Facts, server: Server) -> tuple[str, Saved | None]:
    """Return what valid tests say of a server's GPUs, and the test that says it.

    A test of some of them that failed condemns all, only one of all of them clears them.
    """
    wanted = set(server.addresses)
    valid = [test for test in facts.extras.p2p if test.valid]
    for test in valid:
        if test.verdict == "broken" and len(wanted & set(test.addresses)) > 1:
            return "broken", test
    for test in valid:
        if test.verdict == "works" and wanted <= set(test.addresses):
            return "works", test
    return "unknown", None


def _servers(facts: Facts, wanted: str) -> Iterator[tuple[Server, Saved | None]]:
    for server in facts.extras.servers:
        verdict, test = verdict_on(facts, server)
        if verdict == wanted and len(server.addresses) > 1:
            yield server, test


def _missing(facts: Facts) -> Iterator[Hit]:
    for server, test in _servers(facts, "broken"):
        lacks = server.switches(False)
        if test and lacks:
            said = f"{server.title} lacks {lacks}; tested {test.time}: {test.reason}"
            yield Hit(server.subject, said)


def _left_over(facts: Facts) -> Iterator[Hit]:
    for server, test in _servers(facts, "works"):
        has = server.switches(True)
        if test and has:
            said = f"{server.title} has {has}; tested {test.time}: {test.reason}"
            yield Hit(server.subject, said)


def _untested(facts: Facts) -> Iterator[Hit]:
    for server, _test in _servers(facts, "unknown"):
        lacks = server.switches(False)
        tests = [test for test in facts.extras.p2p if set(server.addresses) & set(test.addresses)]
        said = [f"tested {test.time}: {'; '.join(test.changed) or test.reason}" for test in tests]
        if lacks:
            yield Hit(server.subject, "; ".join([f"{server.title} lacks {lacks}", *said]))


RULES = (
    Rule(
        "p2p-fallback-missing",
        "error",
        _missing,
        "Peer-to-peer copies between this server's GPUs do not arrive, as a test showed, and the "
        "server makes them: it may hang, or answer from wrong data without any error.",
        "Restart the server with NCCL_P2P_DISABLE=1 in its environment and "
        "--disable-custom-all-reduce (role sglang: sglang_p2p_fallback: true).",
        _TOOLS,
    ),
    Rule(
        "p2p-fallback-left-over",
        "note",
        _left_over,
        "Peer-to-peer copies between this server's GPUs arrive, as a test showed, and the server "
        "is kept from them. Its GPUs exchange data through the host's memory, which is slower.",
        "Take NCCL_P2P_DISABLE and --disable-custom-all-reduce out (role sglang: "
        "sglang_p2p_fallback: false), and compare by a benchmark.",
        _TOOLS,
    ),
    Rule(
        "p2p-untested",
        "note",
        _untested,
        "The server makes peer-to-peer copies between its GPUs, and nothing proves that they "
        "arrive. Behind a translating IOMMU they may end without an error and without the data.",
        "Run the playbook check_p2p, which tests the copies and keeps the result.",
        _TOOLS,
    ),
)

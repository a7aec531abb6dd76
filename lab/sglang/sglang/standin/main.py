# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""From the command line to a serving process, in the order and with the ends of SGLang."""

from __future__ import annotations

import json
import os
import select
import time
from typing import Any, NoReturn

from sglang import __version__
from sglang.standin import arguments, ranks
from sglang.standin.model import read_model
from sglang.standin.process import die, log


def launch(argv: list[str]) -> NoReturn:
    """Run the server. Ends with 2 for a bad flag, 1 for a bad combination or model, else later."""
    args = arguments.parse(argv)
    log(f"Lab stand-in for SGLang {__version__}: no model is computed and no GPU is used.")
    began = time.monotonic()
    model = read_model(args["model_path"])
    arguments.resolve(args, model)
    shown = {name: value for name, value in args.items() if name != "launch_command"}
    log(f"server_args={shown}")
    children = ranks.start(args, model)
    # Imported while the ranks load. A SIGTERM until the port opens ends only this process.
    from sglang.standin import server  # noqa: PLC0415

    pools = _wait_for_ranks(children)
    startup = time.monotonic() - began
    log(f"Engine startup timings (s): load_weight={startup * 0.7:.2f}, tokenizer_e2e={startup:.2f}")
    server.run(server.Setup(args, model, pools, children, startup))
    os._exit(0)


def _wait_for_ranks(children: list[ranks.Child]) -> dict[str, Any]:
    """Return the memory plan of rank 0 once every rank is ready; die with the first that does."""
    waiting = {child.channel: child for child in children if child.channel}
    plans: dict[str, dict[str, Any]] = {}
    while waiting:
        for channel in select.select(list(waiting), [], [])[0]:
            child = waiting.pop(channel)
            line = channel.recv(1 << 16)
            if not line:
                _, status = os.waitpid(child.pid, 0)
                code = os.waitstatus_to_exitcode(status)
                rank = child.name.rpartition("_")[2]
                log("Received sigquit from a child process. It usually means the child failed.")
                log(f"Rank {rank} scheduler died during initialization (exit code: {code}).")
                die([other.pid for other in children])
            plans[child.name] = json.loads(line)[1]
    return plans["scheduler_0"]

"""The verdict on a server: each state, and each way in which one witness alone would be wrong."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import (
    GpuHostError,
    UnreadableError,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang import (
    Limits,
    Witnesses,
    describe,
    judge_server,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_http import Metric, Reply
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_log import Log, read_log
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_look import (
    Question,
    facts,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_unit import (
    GpuProcess,
    Listener,
    Unit,
    parse_unit,
    read_gpu_processes,
    read_hints,
    read_listener,
    service_name,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader

URL = "http://127.0.0.1:30000"
RUNS = Unit(
    "sglang", "loaded", "active", "running", 0, 42, "ab12", 0, "success", "/x/sglang.service"
)
OPEN = Listener(open=True, pid=42, command="python", addresses=("0.0.0.0",), ours=True)
CLOSED = Listener(open=False)
FOREIGN = replace(OPEN, pid=7, command="nginx", ours=False)
REFUSED = Reply(None, "", "refused", 0.0)
TIMEOUT = Reply(None, "", "timeout", 30.0)


def reply(status: int, seconds: float = 0.01, **body: Any) -> Reply:
    return Reply(status, json.dumps(body), None, seconds)


def log(*lines: str, now: float = 0.0) -> Log:
    return read_log([(0.0, line) for line in lines], now=now)


HEALTHY = reply(200, 1.02)
MODELS = reply(200, data=[{"id": "qwen", "max_model_len": 262144}])
FULL = reply(503, error={"message": "The request queue is full."})
RANK_1 = "server_args=ServerArgs(model_path='/m', nnodes=2, dist_init_addr='a:1', node_rank=1, x)"
UP = log("Uvicorn running on http://0.0.0.0:30000", "The server is fired up and ready to roll!")
LOADS = log("server_args=ServerArgs(x)", "Load weight begin. avail mem=95 GB")
DRAINS = log("The server is fired up and ready to roll!", "SIGTERM received. signum=15")
HOLDERS = (
    GpuProcess(43, "sglang::schedul", ("/dev/nvidia0",), True, True),
    GpuProcess(9, "train", ("/dev/nvidia1",), True, False),
    GpuProcess(8, "nvtop", ("/dev/nvidia1",), False, False),
)
READY = Witnesses(
    URL,
    expected="qwen",
    unit=RUNS,
    log=UP,
    listener=OPEN,
    health=HEALTHY,
    models=MODELS,
    metrics={},
)
STARTS = replace(READY, log=LOADS, listener=CLOSED, health=REFUSED, models=None, metrics=None)
WARMS = replace(
    READY,
    log=replace(log("Uvicorn running on http://0.0.0.0:30000"), stage=60.0),
    health=reply(503),
    models=None,
)
NO_UNIT = replace(READY, unit=None, log=None, listener=replace(OPEN, ours=None))
REMOTE = replace(NO_UNIT, listener=None)


def unit(active: str, sub: str = "", **parts: Any) -> Unit:
    return replace(RUNS, active=active, sub=sub, **parts)


PRE = unit("activating", "start-pre", main_pid=None)


@pytest.mark.parametrize(
    ("seen", "state", "reason"),
    [
        (READY, "ready", "serves qwen"),
        (NO_UNIT, "ready", "serves qwen"),
        (REMOTE, "ready", "serves qwen"),
        (replace(READY, unit=replace(RUNS, restarts=3)), "ready", "restarted it 3 times"),
        (replace(READY, generated=reply(200, text="Paris.")), "ready", "serves qwen"),
        # no server
        (replace(STARTS, unit=unit("inactive", load="not-found")), "absent", "no unit sglang$"),
        (
            replace(STARTS, unit=unit("inactive", load="not-found"), listener=FOREIGN),
            "absent",
            r"process 7 \(nginx\) listens on its port",
        ),
        (replace(STARTS, unit=unit("inactive", "dead")), "stopped", "is not running$"),
        (replace(READY, unit=unit("deactivating", "stop-sigterm")), "stopped", "is stopping"),
        (replace(STARTS, unit=unit("inactive", "dead", load="masked")), "stopped", "is masked"),
        (replace(STARTS, unit=unit("failed", load="bad-setting")), "failed", "systemd-analyze"),
        (
            replace(STARTS, unit=unit("inactive", "dead"), listener=FOREIGN, processes=HOLDERS),
            "stopped",
            r"\(nginx\) listens on its port; left of it: process 43 \(sglang::schedul\) with "
            r"/dev/nvidia0; on GPUs: process 9 \(train\) with /dev/nvidia1, which must end",
        ),
        (
            replace(STARTS, unit=unit("failed", exit_status=137), processes=HOLDERS[:1]),
            "failed",
            "left of it: process 43",
        ),
        # told to end
        (replace(READY, unit=unit("deactivating"), log=DRAINS), "draining", "what is left"),
        (replace(READY, log=DRAINS, health=reply(503)), "draining", "was told to end"),
        (replace(READY, log=DRAINS, listener=CLOSED, health=REFUSED), "draining", "told to end"),
        # starting
        (STARTS, "loading", "sglang is loading weights"),
        (replace(STARTS, unit=unit("activating", "start")), "loading", "loading weights"),
        (replace(STARTS, log=None), "loading", "sglang is starting"),
        (
            replace(STARTS, log=log("Init torch distributed begin.", now=300.0)),
            "loading",
            "said nothing for 300 s.*NCCL_P2P_DISABLE=1",
        ),
        (replace(READY, log=LOADS, health=reply(503)), "warming", "has not generated yet"),
        (replace(NO_UNIT, health=reply(503)), "warming", "has not generated yet"),
        # failed
        (
            replace(STARTS, unit=unit("failed", exit_status=2, result="exit-code")),
            "failed",
            r"ended with status 2 \(a flag is wrong\)",
        ),
        (
            replace(STARTS, unit=unit("activating", "auto-restart", exit_status=137)),
            "failed",
            "status 137 .*systemd will start it again",
        ),
        (
            replace(STARTS, unit=unit("activating", "auto-restart-queued", exit_status=137)),
            "failed",
            "status 137 .*systemd will start it again",
        ),
        (
            replace(STARTS, unit=unit("failed", result="oom-kill")),
            "failed",
            "the kernel killed it for want of memory",
        ),
        (
            replace(
                STARTS,
                log=log(
                    "ValueError: Not enough memory. Please try to increase --mem-fraction-static."
                ),
            ),
            "failed",
            "sglang is ending. no memory is left for the cache.* Its log: ValueError: Not enough",
        ),
        (
            replace(
                STARTS,
                unit=unit("failed", result="exit-code", exit_status=None),
                log=log("gpuhost: will not start: port 30000 is held by process 7 (nginx)"),
            ),
            "failed",
            r"^sglang ended. Its log: gpuhost: will not start: port 30000 is held by .* \(nginx\)$",
        ),
        (
            # its web server is left, as up to 0.5.9, and says nothing of it
            replace(
                READY,
                log=log(
                    "The server is fired up and ready to roll!",
                    "Scheduler hit an exception: Traceback (most recent call last):",
                    "RuntimeError: NCCL error in: x.cpp:1",
                ),
                health=reply(503, 20.0),
                stands=True,
            ),
            "failed",
            "is ending. NCCL failed",
        ),
        # on another address of the same port it is in nobody's way
        (
            replace(STARTS, listener=replace(FOREIGN, elsewhere=True)),
            "loading",
            "loading weights",
        ),
        (replace(STARTS, listener=FOREIGN), "failed", r"process 7 \(nginx\) holds the port"),
        # a survived error, or a user's words in a log of requests
        (replace(READY, log=replace(UP, fatal=True, died=True, decisive="x")), "ready", "serves"),
        (replace(READY, generated=FULL), "ready", "its queue is full"),
        (replace(READY, unit=replace(RUNS, oom_kills=2)), "ready", "killed 2 of its processes"),
        # one of two machines, which only computes
        (
            replace(READY, log=log(RANK_1), health=reply(200), models=None),
            "ready",
            "computes as rank 1 of 2",
        ),
        (replace(STARTS, log=log(RANK_1)), "loading", "reading its configuration"),
        # healthy, but
        (replace(READY, models=reply(401)), "degraded", "does not take this api_key"),
        (replace(READY, models=reply(500)), "degraded", "/v1/models answers 500"),
        (replace(READY, models=TIMEOUT), "degraded", "/v1/models answers timeout"),
        (replace(READY, expected="glm"), "degraded", "serves qwen, not glm"),
        (replace(READY, generated=reply(200, text="")), "degraded", "came back empty"),
        (replace(READY, generated=reply(200, text=" !!!!!!!!")), "degraded", "one character"),
        (replace(READY, generated=reply(400)), "degraded", "answered with 400"),
        (replace(READY, generated=TIMEOUT), "degraded", "answered with timeout"),
        (replace(READY, health=reply(404)), "degraded", "is it SGLang that listens"),
        (replace(READY, health=reply(503)), "degraded", "503 at once"),
        (
            replace(READY, listener=replace(OPEN, pid=None, ours=None)),
            "degraded",
            "whether the unit does is not known",
        ),
        # hung, or only busy
        (
            replace(READY, health=reply(503, 20.0), stands=True),
            "hung",
            "503 after 20 s, and no tok",
        ),
        (replace(READY, health=TIMEOUT, stands=True), "hung", "no answer after 30 s"),
        (replace(READY, health=reply(503, 20.0)), "hung", "without the flag enable-metrics"),
        (replace(REMOTE, health=TIMEOUT, stands=True), "hung", "no answer after 30 s"),
        (
            replace(READY, health=reply(503, 20.0), moved="its counters of tokens move"),
            "degraded",
            "it is busy",
        ),
        (
            replace(READY, health=reply(503, 20.0), stands=True, compiler="process 4 (ptxas)"),
            "degraded",
            r"process 4 \(ptxas\) compiles a kernel",
        ),
        (
            replace(READY, health=reply(503, 20.0), stands=True, stuck="process 4 (x) is stopped"),
            "hung",
            r"meanwhile; process 4 \(x\) is stopped",
        ),
        (
            replace(READY, health=Reply(None, "", "no connection", 30.0), stands=True),
            "hung",
            "no answer after 30 s",
        ),
        (
            replace(REMOTE, health=Reply(None, "", "no connection", 30.0)),
            "unreachable",
            "firewall",
        ),
        # not from here
        (replace(READY, listener=CLOSED, health=REFUSED), "unreachable", "is that its port"),
        (replace(READY, health=REFUSED), "unreachable", "listens on 0.0.0.0, but .* refuses"),
        (
            replace(READY, listener=replace(OPEN, addresses=("10.0.0.1",), elsewhere=True)),
            "unreachable",
            "listens on 10.0.0.1, not where",
        ),
        (replace(REMOTE, health=REFUSED), "unreachable", "no unit is known"),
        (replace(REMOTE, health=TIMEOUT, metrics=None), "unreachable", "nor had /metrics"),
        (
            replace(REMOTE, health=Reply(None, "", "No route to host", 3.0)),
            "unreachable",
            "No route to host",
        ),
    ],
)
def test_state(seen: Witnesses, state: str, reason: str) -> None:
    verdict = judge_server(seen)
    assert verdict.state == state
    assert re.search(reason, verdict.reason), verdict.reason


@pytest.mark.parametrize(
    ("seen", "settled"),
    [
        (READY, True),
        (STARTS, False),
        (replace(READY, log=LOADS, health=reply(503)), False),
        (replace(READY, health=reply(503, 20.0), stands=True), False),
        (replace(READY, health=reply(503, 20.0), moved="its counters of tokens move"), False),
        (replace(READY, health=reply(503)), False),
        (replace(REMOTE, health=REFUSED), False),
        (replace(STARTS, listener=FOREIGN), True),
        (replace(STARTS, unit=unit("failed")), True),
        (replace(STARTS, unit=unit("inactive", load="not-found")), True),
        (replace(READY, models=reply(401)), True),
        (replace(READY, expected="glm"), True),
    ],
)
def test_what_waiting_cannot_change(seen: Witnesses, settled: bool) -> None:
    assert judge_server(seen).settled is settled


def test_each_witness_speaks_for_itself() -> None:
    seen = replace(
        READY, health=reply(503, 20.0), models=None, stands=True, metrics={"x": Metric(1.0, 1.0)}
    )
    assert list(describe(seen)) == [
        ("unit", "active (running), restarts 0, main PID 42", True),
        (
            "journal",
            f"has said that it is ready; its last line is: {UP.last}",
            True,
        ),
        ("port", "process 42 (python) listens on 0.0.0.0", True),
        ("gpu_processes", "not readable", None),
        ("health", "503 after 20.0 s", False),
        ("counters", "standing still", False),
    ]
    said = {name: (what, good) for name, what, good in describe(replace(READY, expected="glm"))}
    assert said["models"] == ("200 after 0.0 s: qwen", False)
    said = {name: (what, good) for name, what, good in describe(replace(STARTS, log=None))}
    assert said["journal"] == ("not readable, or empty", None)
    assert said["port"] == ("closed", False)


SHOW = """\
LoadState=loaded
ActiveState=activating
SubState=auto-restart
NRestarts=2
MainPID=0
InvocationID=0123abcd
ExecMainCode=2
ExecMainStatus=9
Result=exit-code
ControlGroup=/system.slice/sglang.service
"""


def test_properties_of_a_unit() -> None:
    assert parse_unit("sglang", SHOW) == Unit(
        name="sglang",
        load="loaded",
        active="activating",
        sub="auto-restart",
        restarts=2,
        main_pid=None,
        invocation="0123abcd",
        exit_status=137,
        result="exit-code",
        control_group="/system.slice/sglang.service",
    )
    with pytest.raises(GpuHostError, match="said nothing"):
        parse_unit("sglang", "")


HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  ...\n"
# port 30000 is 7530
ANY4 = "   0: 00000000:7530 00000000:0000 0A 00000000:00000000 00:00000000 00000000  0  0 5001 1\n"
LOOP4 = ANY4.replace("00000000:7530", "0100007F:7530")
OTHER4 = ANY4.replace("00000000:7530", "640A0A0A:7530")
CONNECTED = LOOP4.replace(" 0A ", " 01 ")
FOREIGN4 = OTHER4.replace(" 5001 ", " 6001 ")  # of process 1
MAPPED = ANY4.replace("00000000:7530", "0000000000000000FFFF00000100007F:7530")
ANY6 = ANY4.replace("00000000:7530", "00000000000000000000000000000000:7530")


def tree(root: Path, tcp: str, tcp6: str = "", group: str = "0::/system.slice/x.service") -> Reader:
    """Write processes 1, 42 and its child 43, which has socket 5001 open."""
    for pid, parent in ((1, 0), (42, 1), (43, 42)):
        folder = root / "proc" / str(pid)
        (folder / "fd").mkdir(parents=True)
        (folder / "comm").write_text("python3\n")
        (folder / "stat").write_text(f"{pid} (a) b) S {parent} 0 0")
        (folder / "cgroup").write_text(f"{group}\n")
    (root / "proc/43/fd/5").symlink_to("socket:[5001]")
    (root / "proc/1/fd/5").symlink_to("socket:[6001]")
    (root / "proc/net").mkdir()
    (root / "proc/net/tcp").write_text(HEAD + tcp)
    (root / "proc/net/tcp6").write_text(HEAD + tcp6)
    return Reader(str(root))


@pytest.mark.parametrize(
    ("tables", "url", "address", "elsewhere"),
    [
        ((ANY4, ""), URL, "0.0.0.0", False),
        ((LOOP4, ""), URL, "127.0.0.1", False),
        ((LOOP4, ""), "http://localhost:30000", "127.0.0.1", False),
        (("", ANY6), URL, "::", False),
        ((OTHER4, ""), URL, "10.10.10.100", True),
        # another program has another address of the port
        ((FOREIGN4 + LOOP4, ""), URL, "127.0.0.1", False),
        ((FOREIGN4 + ANY4, ""), URL, "0.0.0.0", False),
        (("", MAPPED), URL, "127.0.0.1", False),
        (("", ANY6), "http://[::1]:30000", "::", False),
        ((ANY4, ""), "http://[::1]:30000", "0.0.0.0", True),
        ((OTHER4, ""), "http://10.10.10.100:30000", "10.10.10.100", False),
        ((LOOP4, ""), "http://10.10.10.100:30000", "127.0.0.1", True),
        ((LOOP4, ""), "http://ct100:30000", "127.0.0.1", False),
    ],
)
def test_listener(
    tmp_path: Path, tables: tuple[str, str], url: str, address: str, elsewhere: bool
) -> None:
    assert read_listener(tree(tmp_path, *tables), url, RUNS) == Listener(
        open=True, pid=43, command="python3", addresses=(address,), ours=True, elsewhere=elsewhere
    )


@pytest.mark.parametrize(
    ("main_pid", "group", "ours"),
    [
        (42, "0::/system.slice/x.service", True),  # a descendant of the main process
        (99, "0::/system.slice/sglang.service", True),  # an orphan that the unit left
        (99, "0::/system.slice/x.service", False),
        (None, "0::/system.slice/x.service", False),
    ],
)
def test_whose_listener(tmp_path: Path, main_pid: int | None, group: str, ours: bool) -> None:
    host = tree(tmp_path, ANY4, group=group)
    listener = read_listener(host, URL, replace(RUNS, main_pid=main_pid))
    assert listener is not None
    assert listener.ours is ours


def test_localhost_where_a_stranger_has_one_of_its_addresses(tmp_path: Path) -> None:
    """Who asks localhost asks `::1` first: nobody else's answer counts, and no key is for them."""
    stranger = ANY6.replace("0" * 32, "0" * 24 + "01000000").replace(" 5001 ", " 6001 ")
    host = tree(tmp_path, LOOP4, stranger)
    listener = read_listener(host, "http://localhost:30000", RUNS)
    assert listener is not None
    assert (listener.pid, listener.ours) == (1, False)
    assert read_listener(host, URL, RUNS) == Listener(
        open=True, pid=43, command="python3", addresses=("127.0.0.1",), ours=True
    )


def test_no_listener(tmp_path: Path) -> None:
    host = tree(tmp_path, CONNECTED)
    assert read_listener(host, URL, RUNS) == CLOSED
    assert read_listener(host, "http://10.0.0.9:30000", None) is None
    assert read_listener(host, "https://127.0.0.1", None) == CLOSED


def test_listener_that_cannot_be_looked_at(tmp_path: Path) -> None:
    host = tree(tmp_path, ANY4)
    (tmp_path / "proc/43/fd/5").unlink()
    assert read_listener(host, URL, RUNS) == Listener(open=True, addresses=("0.0.0.0",))


@pytest.mark.parametrize(
    ("seen", "state", "reason"),
    [
        (STARTS, "loading", "for 600 s now$"),
        (replace(STARTS, limits=Limits(loading=900)), "loading", "for 600 s now$"),
        (replace(STARTS, limits=Limits(loading=500)), "failed", "600 s now: loading may take 500"),
        (replace(STARTS, limits=Limits(warming=1)), "loading", ""),
        (replace(STARTS, unit=PRE, log=None), "loading", "its checks before .* for 600 s now"),
        (
            replace(
                STARTS, unit=PRE, log=log("gpuhost: waits at most 6 s more: process 8 (x) has")
            ),
            "loading",
            r"sglang is waiting at most 6 s more: process 8 \(x\) has, for 600 s",
        ),
        (replace(WARMS, limits=Limits(warming=100)), "warming", "for 60 s now"),
        (replace(WARMS, limits=Limits(warming=50)), "failed", "60 s now: warming may take 50 s"),
        (replace(WARMS, limits=Limits(loading=5)), "warming", ""),
        # when the warm-up began is not known
        (replace(WARMS, log=None, limits=Limits(400, 100)), "failed", "may take 500 s"),
        (replace(WARMS, log=None, limits=Limits(500, 101)), "warming", "for 600 s now"),
        (replace(WARMS, log=None, limits=Limits(warming=1)), "warming", ""),
    ],
)
def test_limits_of_a_start(seen: Witnesses, state: str, reason: str) -> None:
    seen = replace(seen, unit=replace(seen.unit or RUNS, age=600.0))
    verdict = judge_server(seen)
    assert (verdict.state, verdict.settled) == (state, state == "failed")
    assert re.search(reason, verdict.reason), verdict.reason


@pytest.mark.parametrize(
    ("sub", "restarting"),
    [("auto-restart", True), ("auto-restart-queued", True), ("start", False), ("failed", False)],
)
def test_who_is_started_again_without_anybody(sub: str, restarting: bool) -> None:
    question = Question(URL, unit="sglang")
    seen = replace(STARTS, unit=unit("activating", sub))
    assert facts(seen, judge_server(seen), question)["restarting"] is restarting
    assert facts(NO_UNIT, judge_server(NO_UNIT), question)["restarting"] is None


@pytest.mark.parametrize(
    ("changed", "age"),
    [
        ("", None),  # waits for its next start
        ("SubState=auto-restart-queued\n", None),
        ("SubState=start-pre\n", 90.0),
        ("SubState=running\nMainPID=7\n", 80.0),
        ("SubState=failed\nActiveState=failed\n", None),
    ],
)
def test_age_of_a_run(changed: str, age: float | None) -> None:
    stamps = "InactiveExitTimestampMonotonic=10000000\nExecMainStartTimestampMonotonic=20000000\n"
    assert parse_unit("sglang", SHOW + stamps + changed, now=100.0).age == age


@pytest.mark.parametrize("name", ["", "-a", "a b", "sgl*", "sglang.socket", "a/b", "x\n"])
def test_no_name_of_a_service(name: str) -> None:
    with pytest.raises(GpuHostError, match="not the name of a systemd service"):
        service_name(name)


def gpu_tree(root: Path) -> Reader:
    """Write GPUs 0 and 1, a server with an orphan, a stranger and two that only watch."""
    (root / "dev").mkdir()
    nodes = {"nvidia0": "c 195:0", "nvidia1": "c 195:1", "nvidia-uvm": "c 508:0"}
    nodes["nvidiactl"] = "c 195:255"
    for name, number in nodes.items():
        (root / "dev" / name).write_text(f"{number}\n")
    for pid, command, unit_name, opened in (
        (42, "sglang::schedul", "sglang", ("nvidia0", "nvidia-uvm", "nvidiactl")),
        (50, "train", "other", ("nvidia1", "nvidia-uvm")),
        (51, "nvtop", "other", ("nvidia0", "nvidia1", "nvidiactl")),
        (52, "nvidia-persiste", "nvidia-persistenced", ("nvidia0", "nvidia1")),
        (53, "uvm-only", "other", ("nvidia-uvm",)),
    ):
        folder = root / "proc" / str(pid)
        (folder / "fd").mkdir(parents=True)
        (folder / "comm").write_text(f"{command}\n")
        (folder / "cmdline").write_text(f"{command}\0--api-key\0hunter2\0")
        (folder / "cgroup").write_text(f"0::/system.slice/{unit_name}.service\n")
        (folder / "stat").write_text(f"{pid} (x) S 1 0 0")
        for number, name in enumerate(opened):
            (folder / "fd" / str(number + 3)).symlink_to(f"/dev/{name}")
    return Reader(str(root))


def test_who_has_gpus_open(tmp_path: Path) -> None:
    stopped = replace(unit("inactive", "dead"), main_pid=None, control_group="")
    host = gpu_tree(tmp_path)
    found = (
        GpuProcess(42, "sglang::schedul", ("/dev/nvidia0",), True, True),
        GpuProcess(50, "train", ("/dev/nvidia1",), True, False),
        GpuProcess(51, "nvtop", ("/dev/nvidia0", "/dev/nvidia1"), False, False),
    )
    assert read_gpu_processes(host, stopped) == found  # what a killed server has left is its own
    assert read_gpu_processes(host, None) == tuple(replace(one, ours=None) for one in found)
    (tmp_path / "dev/nvidia-uvm").unlink()
    assert {one.computes for one in read_gpu_processes(host, None) or ()} == {None}
    for name in ("nvidia0", "nvidia1"):
        (tmp_path / "dev" / name).unlink()
    assert read_gpu_processes(host, None) == ()


def test_gpus_that_cannot_be_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = gpu_tree(tmp_path)
    names = Reader.names

    def refuse(self: Reader, path: str) -> list[str]:
        if path == "/proc/50/fd":
            raise UnreadableError(path)
        return names(self, path)

    monkeypatch.setattr(Reader, "names", refuse)
    assert read_gpu_processes(host, None) is None


def test_hints_of_a_server_that_does_not_answer(tmp_path: Path) -> None:
    host = gpu_tree(tmp_path)
    assert read_hints(host, RUNS) == (None, None)
    (tmp_path / "proc/42/stat").write_text("42 (a) b) T 1 0 0")
    (tmp_path / "proc/50/comm").write_text("ptxas\n")  # of another unit
    assert read_hints(host, RUNS) == (
        None, "process 42 (sglang::schedul) is stopped (SIGSTOP)",
    )  # fmt: skip
    (tmp_path / "proc/42/comm").write_text("ptxas\n")
    assert read_hints(host, RUNS)[0] == "process 42 (ptxas)"

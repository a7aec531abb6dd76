"""What the driver says, what the copies tell, what the log adds, and how long an answer holds."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import trees
from ansible_collections.gpuhost.inference.plugins.module_utils import _kernel_log, _p2p
from ansible_collections.gpuhost.inference.plugins.module_utils._command import CommandError
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import (
    GpuHostError,
    UnreadableError,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._gpu import read_gpus
from ansible_collections.gpuhost.inference.plugins.module_utils._p2p import (
    SAVED,
    Pair,
    Wish,
    examine,
    judge,
    parse_capability,
    parse_indices,
    parse_truth,
    read_capability,
    saved,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader

A, B = "0000:41:00.0", "0000:42:00.0"
LEGEND = "\nLegend:\n\n  X    = Self\n  OK   = Status Ok\n  CNS  = Chipset not supported\n"
OLD = "1,0,90000000,-;systemd[1]: Started.\n"


def table(*rows: str, escape: bool = True) -> str:
    head = "".join(f"GPU{at}\t" for at in range(len(rows)))
    head = "\t" + (head.replace("GPU", "\x1b[4mGPU").replace("\t", "\x1b[0m\t") if escape else head)
    body = [" GPU" + str(at) + "\t" + row.replace(" ", "\t") + "\t" for at, row in enumerate(rows)]
    return "\n".join([head, *body, LEGEND])


# ---- capability -------------------------------------------------------------------------------


def test_every_word_of_the_matrix_in_its_place() -> None:
    text = table("X OK CNS GNS", "TNS X NS DR", "U OK X OK", "OK OK OK X")
    matrix = parse_capability(text)
    assert len(matrix) == 16
    assert [matrix[0, at] for at in range(4)] == ["X", "OK", "CNS", "GNS"]
    assert [matrix[1, at] for at in range(4)] == ["TNS", "X", "NS", "DR"]
    assert parse_capability(table("X OK", "U X", escape=False))[1, 0] == "U"
    assert parse_capability(" \tGPU0\t\n GPU0\tX\t\n") == {(0, 0): "X"}


@pytest.mark.parametrize("text", ["", "Invalid combination of input arguments.\n", LEGEND])
def test_output_without_a_matrix(text: str) -> None:
    with pytest.raises(GpuHostError, match="no matrix"):
        parse_capability(text)


class Commands:
    """Answers commands by a word in them; an answer that is an error is raised after its output."""

    def __init__(self, **answers: str | GpuHostError | Iterator[bytes]) -> None:
        self.answers = answers
        self.seen: list[list[str]] = []
        self.given = b""

    def __call__(
        self, command: Sequence[str], timeout: float, given: bytes = b""
    ) -> Iterator[bytes]:
        assert timeout > 0
        self.seen.append(list(command))
        self.given = given or self.given
        words = " ".join(command[:5])
        (key,) = [key for key in self.answers if key.replace("_", " ") in words][:1]
        answer = self.answers[key]
        if isinstance(answer, GpuHostError):
            yield getattr(answer, "output", b"")
            raise answer
        yield from [answer.encode()] if isinstance(answer, str) else answer


INDEX = "0, 00000000:42:00.0\n1, 00000000:41:00.0\n"  # not in the order of the bus


def test_rows_execute_and_indices_are_those_of_nvidia_smi() -> None:
    run = Commands(query=INDEX, p2p_r=table("X OK", "CNS X"), p2p_w=table("X GNS", "OK X"))
    found, problems = read_capability([A, B], run, lambda: 9.0)
    assert problems == []
    assert found == {
        (A, B, "read"): "OK",  # executed by B, whose row is 0
        (B, A, "read"): "CNS",
        (A, B, "write"): "OK",
        (B, A, "write"): "GNS",
    }


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (
            Commands(query=GpuHostError("nvidia-smi failed (127): it cannot be run")),
            "cannot be run",
        ),
        (Commands(query=GpuHostError("nvidia-smi was stopped after 20 s")), "was stopped"),
        (Commands(query=INDEX, p2p=GpuHostError("topo failed (2): unknown option")), "unknown opt"),
        (Commands(query=INDEX, p2p="GPU0 GPU1\n"), "no matrix"),
        (Commands(query="No devices were found\n", p2p=table("X")), f"does not show {A}, {B}"),
    ],
)
def test_a_tool_that_does_not_tell_is_a_problem(run: Commands, said: str) -> None:
    found, problems = read_capability([A, B], run, lambda: 9.0)
    assert found == {}
    assert said in problems[0]


def test_indices() -> None:
    assert parse_indices("index, pci.bus_id\n0, 00000000:B3:00.0\n") == {0: "0000:b3:00.0"}


# ---- truth ------------------------------------------------------------------------------------


def lines(*told: dict[str, Any] | str) -> str:
    return "".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in told)


def name(source: str, target: str, way: str) -> dict[str, Any]:
    return {"from": source, "to": target, "way": way}


def results(word: str = "right", reason: str | None = None, **one: str) -> str:
    """Return a whole test of two GPUs; `A_B_write="wrong"` makes that copy another."""
    told: list[dict[str, Any] | str] = [{"gpus": [A.upper(), B]}, "libcuda: some warning"]
    for source, target in ((A, B), (B, A)):
        for way in ("write", "read"):
            key = f"{'A' if source == A else 'B'}_{'A' if target == A else 'B'}_{way}"
            became = one.get(key, word)
            copy = name(source, target, way)
            told += [{"begin": copy}, {"copy": copy}]
            told += [
                {
                    "result": {
                        **copy,
                        "word": became,
                        "reason": reason or ("bad" if became != "right" else None),
                    }
                }
            ]
    return lines(*told, {"end": True})


def test_a_crash_in_a_copy_condemns_it_and_keeps_what_was_learned() -> None:
    first, second = name(A, B, "write"), name(A, B, "read")
    right = {"result": {**first, "word": "right", "reason": None}}
    begun = lines({"gpus": [A, B]}, {"begin": first}, {"copy": first}, right, {"begin": second})
    last = begun + lines({"copy": second}) + '{"resu'
    truth = parse_truth(last, [A, B], "python3 failed (-9): ", True)
    assert truth.copies[A, B, "write"] == ("right", None)
    assert truth.copies[A, B, "read"][0] == "failed"
    # before the copy, no peer had a part in it
    truth = parse_truth(begun, [A, B], "python3 was stopped after 60 s", True)
    assert truth.copies[A, B, "read"] == (
        "untested",
        "what precedes the copy did not end: python3 was stopped after 60 s",
    )
    assert parse_truth(begun, [A, B], None, False).error == "it ended in the middle"


C = "0000:43:00.0"
NAMED = '{"result": {"from": "%s", "to": "%s", "way": %s, "word": "right", "reason": null}}\n'


@pytest.mark.parametrize(
    "text",
    [
        "7\n",
        "null\n",
        '"gpus begin end"\n',
        '{"result": 1}\n',
        '{"begin": {"from": "x"}}\n',
        "[" * 100_000 + "\n",
        NAMED % (A, C, '"read"'),
        NAMED % (A, A, '"read"'),
        NAMED % (A, B, '"banana"'),
        NAMED % (A, B, '["read"]'),
        NAMED.replace('"%s", "to"', '["%s"], "to"') % (A, B, '"read"'),
    ],
)
def test_lines_of_others_are_left_out(text: str) -> None:
    truth = parse_truth(text, [A, B], "gone", True)
    assert (truth.copies, truth.visible, truth.error) == ({}, None, "gone")


# ---- the whole --------------------------------------------------------------------------------


@pytest.fixture
def host(
    host_tree: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, Any]]:
    """Examine a host; `log` is its ring before and after the test."""

    def run(
        output: str | GpuHostError | Iterator[bytes],
        *,
        log: tuple[Sequence[str], Sequence[str]] = ((OLD,), (OLD,)),
        more: str = "",
        pace: float = 0.1,
        **wish: Any,
    ) -> dict[str, Any]:
        root = host_tree("eight-gpus")
        trees.unpack(
            f"/proc/driver/nvidia/version = NVRM  x86_64  580.126.09  Release\n{more}", root
        )
        rings = iter(log)

        def ring(_path: str, _timeout: float) -> Iterator[bytes]:
            said = next(rings)
            if not said:
                raise GpuHostError("/dev/kmsg cannot be opened: Permission denied")
            return iter([line.encode() for line in said])

        monkeypatch.setattr(_kernel_log, "_kmsg_blocks", ring)
        options = {"addresses": [A, B], "vmid": None, "python": "python3", "test": True}
        options = {**options, "timeout": 60.0, "size": 1, **wish}
        run.commands = Commands(query=INDEX, p2p=table("X OK", "OK X"), python3=output)  # type: ignore[attr-defined]
        try:
            answer = examine(
                Reader(str(root)),
                Wish(**options),
                run=run.commands,  # type: ignore[attr-defined]
                sleep=lambda _seconds: None,
                clock=map(pace.__mul__, itertools.count()).__next__,
            )
        finally:
            shutil.rmtree(root)
        run.answer = answer  # type: ignore[attr-defined]
        p2p: dict[str, Any] = answer["p2p"]
        return p2p

    return run


def fault(at: float, device: str, place: str) -> str:
    text = f"[IO_PAGE_FAULT domain=0x002a address={place} flags=0x0020]"
    return f"4,9,{int(at * 1e6)},-;nvidia {device}: AMD-Vi: Event logged {text}\n"


PEER = fault(95.0, A, "0x200000001000")


def test_all_right(host: Callable[..., Any]) -> None:
    p2p = host(results())
    assert (p2p["verdict"], p2p["problems"], p2p["faults"]) == ("works", [], [])
    assert [(pair["from"], pair["to"]) for pair in p2p["pairs"]] == [(A, B), (B, A)]
    assert p2p["pairs"][0]["capability"] == {"read": "OK", "write": "OK"}
    assert p2p["pairs"][0]["reason"] is None
    command = host.commands.seen[-1]  # type: ignore[attr-defined]
    assert command[:2] == ["python3", "-"]
    assert json.loads(command[2])["size"] == 1 << 20
    assert b"libcuda.so.1" in host.commands.given  # type: ignore[attr-defined]


def test_a_container_tests_for_itself(host: Callable[..., Any]) -> None:
    host(results(), vmid=104, python="/opt/sglang/bin/python3")
    command = host.commands.seen[-1]  # type: ignore[attr-defined]
    assert command[:6] == ["pct", "exec", "104", "--", "/opt/sglang/bin/python3", "-"]


@pytest.mark.parametrize("copy", ["A_B_write", "A_B_read", "B_A_write", "B_A_read"])
@pytest.mark.parametrize(
    ("word", "verdict"), [("wrong", "broken"), ("failed", "broken"), ("untested", "unknown")]
)
def test_one_copy_that_is_not_right_is_enough(
    host: Callable[..., Any], copy: str, word: str, verdict: str
) -> None:
    p2p = host(results(**{copy: word}))
    assert p2p["verdict"] == verdict
    assert "1 of 4 copies" in p2p["reason"]
    assert "bad" in p2p["reason"]


@pytest.mark.parametrize("word", ["banana", "", None, 1, ["right"], {"right": 1}])
def test_only_known_words_are_believed(host: Callable[..., Any], word: Any) -> None:
    p2p = host(results(A_B_read=word))
    assert p2p["verdict"] == "unknown"
    assert "1 of 4 copies were not tested" in p2p["reason"]
    assert p2p["pairs"][0]["read"] == "untested"


@pytest.mark.parametrize("reason", [["a"], {"a": 1}, "x" * 5000, "\x1b[2J\nx\u202e"])
def test_text_of_a_container_is_one_short_line(host: Callable[..., Any], reason: Any) -> None:
    p2p = host(results("wrong", reason) + lines({"error": reason}))
    assert p2p["verdict"] == "broken"
    assert len(p2p["reason"]) < 800
    assert all(text.isprintable() for text in (p2p["reason"], *p2p["problems"]))


@pytest.mark.parametrize("output", [b"x" * 65536, (results() + " " * 65536).encode()])
def test_output_without_end_is_stopped(host: Callable[..., Any], output: bytes) -> None:
    taken = itertools.count()
    p2p = host(output for _block in itertools.takewhile(lambda at: at < 99, taken))
    assert next(taken) < 20
    assert "more than 1 MiB" in p2p["problems"][0]


def test_right_data_with_a_new_fault_is_broken(host: Callable[..., Any]) -> None:
    p2p = host(results(), log=((OLD,), (OLD, PEER)))
    assert p2p["verdict"] == "broken"
    assert A in p2p["reason"]
    assert [(one["address"], one["id"]) for one in p2p["faults"]] == [(A, "iommu-p2p")]


def test_faults_before_the_test_and_of_others_do_not_count(host: Callable[..., Any]) -> None:
    before = fault(94.0, A, "0x200000001000")
    others = fault(96.0, "0000:83:00.0", "0xfd0000")
    p2p = host(results(), log=((OLD, before), (OLD, before, others)))
    assert (p2p["verdict"], p2p["faults"]) == ("works", [])


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (((), (OLD,)), "cannot be read"),
        (((OLD,), ()), "cannot be opened"),
        (((OLD,), ("4,9,97000000,-;usb: x\n",)), "wrote over"),
        (
            ((OLD,), (OLD, "4,2,96000000,-;amd_iommu_int_thread: 7 callbacks suppressed\n")),
            "7 mess",
        ),
    ],
)
def test_faults_that_may_be_unseen_leave_it_open(
    host: Callable[..., Any], log: Any, said: str
) -> None:
    p2p = host(results(), log=log)
    assert p2p["verdict"] == "unknown"
    assert said in p2p["reason"]
    assert any(said in problem for problem in p2p["problems"])


@pytest.mark.parametrize(
    ("test", "said"),
    [
        (GpuHostError("pct failed (255): container '104' not running!"), "not running"),
        (lines({"error": "libcuda.so.1: cannot open"}), "cannot open"),
        (GpuHostError("python3 was stopped after 9 s"), "was stopped"),
        (lines({"gpus": [A]}, {"end": True}), f"does not see {B} there"),
    ],
)
def test_no_copies_are_no_proof(
    host: Callable[..., Any], test: str | GpuHostError, said: str
) -> None:
    p2p = host(test)
    assert p2p["verdict"] == "unknown"
    assert said in p2p["reason"]
    assert {pair["write"] for pair in p2p["pairs"]} == {"untested"}
    assert p2p["fallback"]["wanted"] is None


HUNG = "python3 (process 7) does not end, not even when killed"


@pytest.mark.parametrize(
    ("error", "pace", "word"),
    [
        (GpuHostError(HUNG), 7.0, "failed"),
        (GpuHostError("python3 was stopped after 9 s"), 7.0, "failed"),
        # it came as far as it could in too short a time
        (GpuHostError("python3 was stopped after 9 s"), 0.1, "untested"),
        (CommandError("pct failed (142): ", 142, ""), 0.1, "untested"),
        (CommandError("python3 failed (-11): ", -11, ""), 0.1, "failed"),
    ],
)
def test_a_copy_that_does_not_end(
    host: Callable[..., Any], error: GpuHostError, pace: float, word: str
) -> None:
    copy = name(A, B, "write")
    output = lines({"gpus": [A, B]}, {"begin": copy}, {"copy": copy}).encode()
    error.output = output  # type: ignore[attr-defined]
    p2p = host(error, pace=pace, timeout=600.0)
    assert p2p["verdict"] == ("broken" if word == "failed" else "unknown")
    assert [pair["write"] for pair in p2p["pairs"]] == [word, "untested"]
    assert str(error) in p2p["problems"][0]


def test_without_a_test(host: Callable[..., Any]) -> None:
    p2p = host("", test=False)
    assert p2p["verdict"] == "unknown"
    assert all("python3" not in command for command in host.commands.seen)  # type: ignore[attr-defined]


def test_gpus_by_default(host: Callable[..., Any]) -> None:
    buses = [address[5:7] for address in host("", addresses=None, test=False)["addresses"]]
    assert buses == ["41", "42", "43", "44"]
    assert host("", addresses=None, vmid=104, test=False)["addresses"] == []
    assert len(host("", addresses=None, vmid=100, test=False)["addresses"]) == 4


def test_an_empty_set_proves_nothing() -> None:
    assert judge([], [], [])[0] == "unknown"
    right = Pair(A, B, {}, "right", "right", None)
    assert judge([right], [], [])[0] == "works"


# ---- the fallback -----------------------------------------------------------------------------


def server(switches: str = "", parent: int = 1) -> str:
    words = "python3\\x00-m\\x00sglang.launch_server\\x00--tp\\x002" + (
        "\\x00--disable-custom-all-reduce" if "reduce" in switches else ""
    )
    return "\n".join(
        (
            f"/proc/8100/cmdline = {words}\\x00",
            f"/proc/8100/status = PPid:\\t{parent}\\nUid:\\t100000",
            "/proc/8100/uid_map = 0 100000 65536",
            "/proc/8100/root/etc/passwd = root:x:0:0::/root:",
            "/proc/8100/cgroup = 0::/lxc/100/ns/system.slice/s.service",
            f"/proc/8100/environ = HOME=/{chr(92)}x00NCCL_P2P_DISABLE={int('nccl' in switches)}",
            "/proc/8100/fd/30 -> /dev/nvidia0",
            "/proc/8100/fd/31 -> /dev/nvidia1",
        )
    )


@pytest.mark.parametrize(
    ("switches", "word", "said"),
    [
        ("", "wrong", "lacks NCCL_P2P_DISABLE=1 and --disable-custom-all-reduce"),
        ("nccl", "wrong", "lacks --disable-custom-all-reduce"),
        ("nccl reduce", "wrong", None),
        (
            "nccl reduce",
            "right",
            "NCCL_P2P_DISABLE=1 and --disable-custom-all-reduce can be removed",
        ),
        ("", "right", None),
        ("", "untested", None),
        ("nccl", "untested", None),
    ],
)
def test_the_fallback_fits_both_ways(
    host: Callable[..., Any], switches: str, word: str, said: str | None
) -> None:
    p2p = host(results(word), more=server(switches))
    assert p2p["fallback"]["servers"][0]["addresses"] == (A, B)
    if said is None:
        assert p2p["problems"] == []
    else:
        assert said in p2p["problems"][0]


# ---- what is kept -----------------------------------------------------------------------------


@pytest.fixture
def kept(host: Callable[..., Any], host_tree: Callable[[str], Path]) -> Path:
    """Return a host that keeps a test."""
    test = host(results())
    root = host_tree("eight-gpus")
    content = json.dumps({"version": 1, "tests": [test]})
    trees.unpack("/proc/driver/nvidia/version = NVRM  x86_64  580.126.09  Release", root)
    file = root / SAVED[1:]
    file.parent.mkdir(parents=True)
    file.write_text(content)
    return root


def read(root: Path) -> list[_p2p.Saved]:
    return saved(Reader(str(root)), read_gpus(Reader(str(root))))


def test_it_holds_while_nothing_changes(kept: Path) -> None:
    [test] = read(kept)
    assert (test.verdict, test.valid, test.changed) == ("works", True, ())
    assert test.addresses == (A, B)


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("proc/sys/kernel/osrelease", "6.17.2-1-pve", "kernel was 6.14.11-4-pve then, and is 6.17"),
        ("proc/driver/nvidia/version", "", "driver was 580.126.09 then, and is not known"),
        ("proc/driver/nvidia/params", "DmaRemapPeerMmio: 1", "mmio was not known then, and is 1"),
        ("proc/cmdline", "quiet iommu=pt", "parameters was amd_iommu=on then, and is iommu=pt"),
        ("proc/driver/nvidia/params", 'RegistryDwords: "F=1"\n', 'was empty then, and is "F=1"'),
        ("proc/driver/nvidia/params", 'RegistryDwordsPerDevice: "p"\n', "dwords was empty then"),
        (
            "proc/cmdline",
            "amd_iommu=on pcie_acs_override=downstream",
            "parameters was amd_iommu=on",
        ),
        ("sys/kernel/iommu_groups/43/type", "identity", f"{B} was DMA-FQ then, and is identity"),
        ("sys/bus/pci/devices/DEVICE/device", "0x2bb1", f"the card at {B} was 10de:"),
        ("sys/bus/pci/devices/DEVICE/subsystem_device", "0x1234", f"the card at {B} was 10de:"),
    ],
)
def test_it_ends_when_what_it_depends_on_changes(
    kept: Path, file: str, text: str, said: str
) -> None:
    (kept / file.replace("DEVICE", B)).write_text(text)
    [test] = read(kept)
    assert not test.valid
    assert said in test.changed[0]


def test_another_group_or_a_word_about_nothing_does_not_end_it(kept: Path) -> None:
    (kept / "sys/kernel/iommu_groups/60/type").write_text("identity")
    (kept / "proc/cmdline").write_text("quiet amd_iommu=on")
    assert read(kept)[0].valid


@pytest.mark.parametrize(
    ("then", "vmid", "word", "worth"),
    [
        ("broken", None, "untested", False),
        ("works", None, "untested", False),
        ("broken", None, "right", True),
        ("unknown", None, "untested", True),
        ("broken", 100, "untested", True),  # elsewhere
    ],
)
def test_not_knowing_does_not_replace_what_is_known(
    host: Callable[..., Any], then: str, vmid: int | None, word: str, worth: bool
) -> None:
    earlier = {**json.loads(json.dumps(host(results()))), "verdict": then, "vmid": vmid}
    file = json.dumps({"version": 1, "tests": [earlier]}).replace("\\", "\\\\")
    host(results(word), more=f"{SAVED} = {file}")
    answer = host.answer  # type: ignore[attr-defined]
    assert (answer["worth_keeping"], answer["kept"]) == (worth, [earlier])
    earlier["basis"]["kernel"] = "6.2.0"
    file = json.dumps({"version": 1, "tests": [earlier]}).replace("\\", "\\\\")
    host(results(word), more=f"{SAVED} = {file}")
    assert host.answer["worth_keeping"] is True  # type: ignore[attr-defined]


def test_a_file_that_is_not_understood_is_said_and_replaced(host: Callable[..., Any]) -> None:
    problems = host(results(), more=f"{SAVED} = {{}}")["problems"]
    assert "p2p.json cannot be understood" in problems[0]
    answer = host.answer  # type: ignore[attr-defined]
    assert (answer["worth_keeping"], answer["kept"]) == (True, [])


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 2}', '{"version": 1, "tests": [{}]}'])
def test_what_cannot_be_understood_is_said(kept: Path, text: str) -> None:
    (kept / SAVED[1:]).write_text(text)
    with pytest.raises(UnreadableError, match=r"p2p\.json"):
        read(kept)


def test_without_a_file_there_is_no_test(kept: Path) -> None:
    (kept / SAVED[1:]).unlink()
    assert read(kept) == []

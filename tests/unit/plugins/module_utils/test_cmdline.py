"""Kernel parameters: what may be wished for, and what an edit leaves of a file."""

from __future__ import annotations

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils import _boot, _cmdline
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from hypothesis import given, settings
from hypothesis import strategies as st

DEFAULTS, DROP_IN = _cmdline.DEFAULTS, _cmdline.DROP_IN


def wish(present: str = "", absent: str = "") -> _cmdline.Wish:
    return _cmdline.parse_wish(present.split(), absent.split())[0]


@pytest.mark.parametrize(
    ("present", "absent", "said"),
    [
        ([""], [], "'' is empty"),
        (["  "], [], "'' is empty"),
        (["=pt"], [], "has no name"),
        (["iommu=pt\nroot=/dev/sda"], [], "line break"),
        (["iommu=pt quiet"], [], "is several parameters"),
        (['a="b'], [], "never closed"),
        (["a=$(reboot)"], [], "each in its own way"),
        (["a='b'"], [], "each in its own way"),
        (["a=b\\"], [], "each in its own way"),
        (["grün=1"], [], "not printable ASCII"),
        (["amd_iommu=off"], [], "would take the IOMMU away"),
        (["intel_iommu=sm_on,off"], [], "would take the IOMMU away"),
        (["iommu=off"], [], "would take the IOMMU away"),
        (["root=/dev/sda"], [], "where the host boots from"),
        ([], ["root"], "where the host boots from"),
        ([], ["initrd=\\EFI\\x"], "each in its own way"),
        ([], ["BOOT_IMAGE"], "where the host boots from"),
        (["--"], [], "where the host boots from"),
        (["iommu=pt"], ["iommu=pt"], "wanted present and absent"),
        (["vfio-pci.ids=a"], ["vfio_pci.ids=a"], "wanted present and absent"),
        (["iommu=pt", "iommu=nopt"], [], "'iommu=pt' and 'iommu=nopt' contradict each other"),
        (["iommu=pt", "iommu.passthrough=0"], [], "contradict each other"),
    ],
)
def test_wishes_that_hurt_are_refused(present: list[str], absent: list[str], said: str) -> None:
    with pytest.raises(GpuHostError, match=r"^kernel parameters refused: ") as refusal:
        _cmdline.parse_wish(present, absent)
    assert said in str(refusal.value)


def test_all_that_is_wrong_with_a_wish_is_said_at_once() -> None:
    with pytest.raises(GpuHostError) as refusal:
        _cmdline.parse_wish(["", "amd_iommu=off"], ["root"])
    assert str(refusal.value).count(";") == 2


def test_a_word_the_kernel_does_not_know_is_a_warning() -> None:
    wanted, warnings = _cmdline.parse_wish(["amd_iommu=on", "quiet"], [])
    assert wanted.present == ("amd_iommu=on", "quiet")
    assert [text.split()[0] for text in warnings] == ["amd_iommu=on:"]
    assert _cmdline.parse_wish(["intel_iommu=on"], ["amd_iommu=off"])[1] == ()


@pytest.mark.parametrize(
    ("before", "present", "absent", "after"),
    [
        # added at the end, nothing else touched
        ("root=ZFS=rpool quiet", "iommu=pt", "", "root=ZFS=rpool quiet iommu=pt"),
        ("  root=x   quiet ", "a=1", "", "  root=x   quiet a=1 "),
        ("root=x -- 3", "iommu=pt", "", "root=x iommu=pt -- 3"),
        ("iommu=pt", "iommu=pt", "", "iommu=pt"),
        ('root=x dyndbg="file a +p; file b +p" ro', "a", "", None),
        ("vfio_pci.ids=10de:2bb5 ro", "vfio-pci.ids=10de:2bb5", "", "vfio_pci.ids=10de:2bb5 ro"),
        # contradictions and duplicates
        ("iommu=pt iommu=nopt quiet", "iommu=pt", "", "iommu=pt quiet"),
        ("iommu=nopt quiet iommu=nopt", "iommu=pt", "", "quiet iommu=pt"),
        ("iommu=nopt,soft quiet", "iommu=pt", "", "iommu=soft quiet iommu=pt"),
        ("iommu.passthrough=0", "iommu=pt", "", "iommu=pt"),
        ("iommu=pt", "iommu.passthrough=0", "", "iommu.passthrough=0"),
        ("iommu.passthrough=1 ro", "iommu=pt", "", "iommu.passthrough=1 ro iommu=pt"),
        ("iommu=pt a iommu=pt", "iommu=pt", "", "iommu=pt a"),
        ("iommu.strict=0 a iommu.strict=0", "iommu.strict=1", "", "a iommu.strict=1"),
        ("amd_iommu=pgtbl_v2,fullflush", "amd_iommu=pgtbl_v1", "", None),
        ("pci=nomsi,disable_acs_redir=a;b", "pci=disable_acs_redir=c", "", None),
        ("console=tty0 console=ttyS0 a a", "console=ttyS1", "", None),
        ("modprobe.blacklist=x", "modprobe.blacklist=nouveau", "", None),
        ("nvidia.dyndbg=+p", "nvidia.dyndbg=+f", "", "nvidia.dyndbg=+p nvidia.dyndbg=+f"),
        # taken out: whole words only, a bare name stands for every value
        ("iommu=pt iommu.strict=0 xiommu=pt", "", "iommu=pt", "iommu.strict=0 xiommu=pt"),
        ("iommu=soft,pt ro", "", "iommu=pt", "iommu=soft ro"),
        ("iommu=pt iommu=soft ro", "", "iommu", "ro"),
        ("iommu=pt iommu=soft ro", "iommu=pt", "iommu", "iommu=pt ro"),
        ("vfio-pci.ids=a ro vfio_pci.ids=b", "", "vfio_pci.ids", "ro"),
        ("quiet splash=silent", "", "quiet splash", ""),
        ("ro -- quiet", "", "quiet", "ro -- quiet"),
        ('dyndbg="a b" ro', "", "dyndbg", "ro"),
    ],
)
def test_edit_of_a_line(before: str, present: str, absent: str, after: str | None) -> None:
    expected = f"{before} {present}" if after is None else after
    if "pgtbl_v2" in before:
        expected = "amd_iommu=fullflush amd_iommu=pgtbl_v1"
    elif "nomsi" in before:
        expected = "pci=nomsi pci=disable_acs_redir=c"
    line, _added, _removed = _cmdline.edit_line(before, wish(present, absent))
    assert line == expected
    assert _cmdline.edit_line(line, wish(present, absent)) == (line, (), ())


TOKENS = st.sampled_from(
    ["quiet", "iommu=pt", "iommu=nopt", "iommu=soft,pt", "amd_iommu=fullflush", "console=tty0",
     "iommu.passthrough=1", "iommu.strict=0", "iommu.strict=1", "pci=nomsi", "pci=noaer,nomsi",
     "vfio-pci.ids=10de:2bb5", "vfio_pci.ids=10de:22e8", 'dyndbg="file x +p"', "root=ZFS=rpool",
     "mem_encrypt=on", "mem_encrypt=off", "systemd.unit=a", "systemd.unit=b"]
)  # fmt: skip
LINES = st.lists(TOKENS, max_size=8).map(" ".join)


@st.composite
def wishes(draw: st.DrawFn) -> _cmdline.Wish:
    present: list[str] = []
    for token in draw(st.lists(TOKENS, max_size=3)):
        if "root" not in token and not _cmdline.contradictions([*present, token]):
            present.append(token)
    absent = [
        token
        for token in draw(st.lists(TOKENS | st.just("iommu") | st.just("console"), max_size=3))
        if "root" not in token and _boot.plain(token) not in map(_boot.plain, present)
    ]
    return _cmdline.parse_wish(present, absent)[0]


@settings(max_examples=300, deadline=None)
@given(LINES, wishes())
def test_an_edited_line_has_what_is_wanted_and_nothing_else_changed(
    before: str, wanted: _cmdline.Wish
) -> None:
    line, added, removed = _cmdline.edit_line(before, wanted)
    old, new = _boot.split_command_line(before), _boot.split_command_line(line)
    plain = [_boot.plain(token) for token in new]
    assert all(plain.count(_boot.plain(token)) == 1 for token in wanted.present)
    assert all(_cmdline.kept(token, wanted) == token for token in new)
    assert not [
        pair
        for pair in _cmdline.contradictions(new)
        if {*map(_boot.plain, pair)} & {*map(_boot.plain, wanted.present)}
    ]
    others = [token for token in old if token not in removed]
    assert [token for token in new if token in others and token not in added] == others
    assert _cmdline.edit_line(line, wanted) == (line, (), ())


@settings(max_examples=200, deadline=None)
@given(LINES, wishes(), st.sampled_from(['"', "'", ""]))
def test_an_edited_grub_configuration_has_what_is_wanted(
    line: str, wanted: _cmdline.Wish, quote: str
) -> None:
    if quote == '"':
        line = line.replace('"', '\\"')
    elif not quote:
        line = line.replace('"', "").split(" ")[0]
    text = f"GRUB_TIMEOUT=5\nGRUB_CMDLINE_LINUX_DEFAULT={quote}{line}{quote} # mine\n"
    before = _boot.parse_grub_defaults([text])
    plan = _cmdline.plan_grub({DEFAULTS: text}, wanted)
    texts = {DEFAULTS: text, **{edit.path: edit.after or "" for edit in plan.edits}}
    assert _boot.parse_grub_defaults(texts[path] for path in sorted(texts)) == plan.configured
    plain = [_boot.plain(token) for token in plan.configured]
    assert all(_boot.plain(token) in plain for token in wanted.present)
    assert all(_cmdline.kept(token, wanted) == token for token in plan.configured)
    assert texts[DEFAULTS].startswith("GRUB_TIMEOUT=5\nGRUB_CMDLINE_LINUX_DEFAULT=")
    assert texts[DEFAULTS].endswith(" # mine\n")
    again = _cmdline.plan_grub({path: text for path, text in texts.items() if text}, wanted)
    assert again.edits == ()
    entries = _cmdline.remember({}, plan.edits)
    back = _cmdline.take_back(entries, {path: text for path, text in texts.items() if text})
    for edit in back.edits:
        texts[edit.path] = edit.after or ""
    assert texts == {DEFAULTS: text, **({DROP_IN: ""} if DROP_IN in texts else {})}
    assert before is not None


def grub(texts: dict[str, str], present: str = "", absent: str = "") -> dict[str, str | None]:
    plan = _cmdline.plan_grub(texts, wish(present, absent))
    return {edit.path: edit.after for edit in plan.edits}


GRUB = """\
# If you change this file, run 'update-grub' afterwards; iommu=pt is for experts
GRUB_DEFAULT=0
export GRUB_CMDLINE_LINUX_DEFAULT="quiet  iommu=pt hugepages=16 dyndbg=\\"file x +p\\""  # iommu=pt
GRUB_CMDLINE_LINUX='root=ZFS=rpool/ROOT/pve-1 boot=zfs'
#GRUB_CMDLINE_LINUX="iommu=pt"
"""


def test_grub_additions_go_to_a_drop_in_and_nothing_else_is_touched() -> None:
    assert grub({DEFAULTS: GRUB}, "iommu.strict=1 pci=config_acs=10@0:1.0;10@0:2.0") == {
        DROP_IN: "# Written by gpuhost.inference.kernel_cmdline, which rewrites this file.\n"
        'GRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX iommu.strict=1 '
        "'pci=config_acs=10@0:1.0;10@0:2.0'\"\n"
    }


def test_grub_words_are_taken_out_where_they_stand() -> None:
    assert grub({DEFAULTS: GRUB}, "iommu=nopt")[DEFAULTS] == GRUB.replace(
        '"quiet  iommu=pt hugepages', '"quiet hugepages'
    )
    assert grub({DEFAULTS: "GRUB_CMDLINE_LINUX=iommu=pt\n"}, "", "iommu=pt") == {
        DEFAULTS: "GRUB_CMDLINE_LINUX=\n"
    }
    assert grub({DEFAULTS: GRUB}, "", "dyndbg boot") == {
        DEFAULTS: GRUB.replace(' dyndbg=\\"file x +p\\"', "").replace(" boot=zfs", "")
    }
    quoted = "GRUB_CMDLINE_LINUX=\"a 'pci=x@1;y@2' b\"\n"
    assert grub({DEFAULTS: quoted}, "", "pci") == {DEFAULTS: 'GRUB_CMDLINE_LINUX="a b"\n'}


def test_grub_drop_ins_of_others_count() -> None:
    texts = {
        DEFAULTS: 'GRUB_CMDLINE_LINUX_DEFAULT="quiet"\n',
        "/etc/default/grub.d/iommu.cfg": 'GRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX iommu=pt"\n',
    }
    assert grub(texts, "iommu=pt") == {}
    assert grub(texts, "iommu=nopt").keys() == {"/etc/default/grub.d/iommu.cfg", DROP_IN}


def test_grub_drop_in_keeps_earlier_words_and_goes_with_the_last() -> None:
    first = grub({DEFAULTS: GRUB}, "a=1")[DROP_IN]
    assert first
    second = grub({DEFAULTS: GRUB, DROP_IN: first}, "b=2")[DROP_IN]
    assert second
    assert second.endswith('"$GRUB_CMDLINE_LINUX a=1 b=2"\n')
    assert grub({DEFAULTS: GRUB, DROP_IN: second}, "", "a b") == {DROP_IN: None}


@pytest.mark.parametrize(
    ("texts", "present", "absent", "said"),
    [
        ({DEFAULTS: 'GRUB_CMDLINE_LINUX="$(cat /etc/x)"\n'}, "a", "", f"^{DEFAULTS} sets"),
        (
            {DEFAULTS: "", "/etc/default/grub.d/zzz.cfg": 'GRUB_CMDLINE_LINUX="ro"\n'},
            "a",
            "",
            "^/etc/default/grub.d/zzz.cfg would set GRUB_CMDLINE_LINUX anew",
        ),
        ({DEFAULTS: "GRUB_CMDLINE_LINUX='a'\"b iommu=pt\"\n"}, "", "iommu", "take it out by hand"),
        ({DEFAULTS: ""}, "a=" + "x" * 1900, "", "below 1900"),
    ],
)
def test_grub_refusals(texts: dict[str, str], present: str, absent: str, said: str) -> None:
    with pytest.raises(GpuHostError, match=said):
        _cmdline.plan_grub(texts, wish(present, absent))


def test_a_value_that_may_still_win_is_told() -> None:
    text = 'GRUB_CMDLINE_LINUX_DEFAULT="console=tty0"\n'
    plan = _cmdline.plan_grub({DEFAULTS: text}, wish("console=ttyS0"))
    assert [said.split()[0] for said in plan.warnings] == ["console=tty0"]
    assert _cmdline.plan_line("root=x console=tty0\n", wish("console=ttyS0")).warnings == ()


def test_a_contradiction_that_goes_is_told() -> None:
    plan = _cmdline.plan_line("root=x iommu=nopt\n", wish("iommu=pt"))
    assert plan.warnings == ("/etc/kernel/cmdline: iommu=nopt goes, it contradicts iommu=pt",)
    assert _cmdline.plan_line("root=x iommu=nopt\n", wish("iommu=pt", "iommu=nopt")).warnings == ()


@pytest.mark.parametrize("text", [None, "", "\n"])
def test_a_missing_line_is_refused(text: str | None) -> None:
    with pytest.raises(GpuHostError, match="is missing or empty"):
        _cmdline.plan_line(text, wish("a"))


@pytest.mark.parametrize("text", ["root=x", "root=x\n", "root=x\nroot=old a\n"])
def test_only_the_first_line_counts_and_the_end_of_the_file_stays(text: str) -> None:
    (edit,) = _cmdline.plan_line(text, wish("a")).edits
    assert edit.after == text.replace("root=x", "root=x a", 1)


def test_contradictions() -> None:
    tokens = ("ro", "iommu=pt", "amd_iommu=fullflush", "iommu.passthrough=0", "iommu=soft")
    assert _cmdline.contradictions(tokens) == (("iommu=pt", "iommu.passthrough=0"),)


def remembered(*texts: str | None) -> dict[str, _cmdline.Entry]:
    """Remember one change of the line after another, where each text comes from the one before."""
    entries: dict[str, _cmdline.Entry] = {}
    for before, after in zip(texts, texts[1:]):
        old = set(_boot.split_command_line(before or ""))
        new = set(_boot.split_command_line(after or ""))
        edit = _cmdline.Edit(
            _cmdline.LINE, before, after, tuple(sorted(new - old)), tuple(sorted(old - new))
        )
        entries = _cmdline.remember(entries, [edit])
    return entries


def test_changes_are_remembered_as_one() -> None:
    entries = remembered("root=x b\n", "root=x b a\n", "root=x a c\n")
    assert entries[_cmdline.LINE] == _cmdline.Entry(
        "root=x b\n", "root=x a c\n", ("a", "c"), ("b",)
    )
    back = _cmdline.take_back(entries, {_cmdline.LINE: "root=x a c\n"})
    assert [edit.after for edit in back.edits] == ["root=x b\n"]


def test_nothing_is_remembered_of_a_file_that_is_as_it_was() -> None:
    assert remembered("root=x\n", "root=x a\n", "root=x\n") == {}


def test_an_edit_of_somebody_else_is_kept() -> None:
    entries = remembered("root=x b\n", "root=x a\n")
    back = _cmdline.take_back(entries, {_cmdline.LINE: "root=x a mine\n"})
    assert [edit.after for edit in back.edits] == ["root=x mine\n"]
    assert "edited by somebody else" in back.warnings[0]
    assert "b is not put back" in back.warnings[0]
    assert _cmdline.take_back(entries, {_cmdline.LINE: "root=x b\n"}).edits == ()
    gone = _cmdline.take_back(entries, {})
    assert (gone.edits, len(gone.warnings)) == ((), 1)


def test_an_edit_between_two_changes_counts_as_it_was() -> None:
    entries = remembered("root=x\n", "root=x a\n")
    edit = _cmdline.Edit(_cmdline.LINE, "root=x a mine\n", "root=x a mine c\n", ("c",))
    entries = _cmdline.remember(entries, [edit])
    back = _cmdline.take_back(entries, {_cmdline.LINE: "root=x a mine c\n"})
    assert [edit.after for edit in back.edits] == ["root=x mine\n"]
    assert back.warnings == ()

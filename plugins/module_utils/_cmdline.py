# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""Plans for a host's kernel parameters: texts and a wish in, new texts out. Nothing is written.

Only whole parameters are added and taken out; everything else in a file stays as it is, byte for
byte. Two parameters contradict each other when the kernel would take only the last of them, by
Documentation/admin-guide/kernel-parameters: then the one that is not wanted is taken out, since
its order in the line would decide.

Sources: lib/cmdline.c and kernel/params.c of Linux; drivers/iommu/iommu.c,
arch/x86/kernel/pci-dma.c and the parsers of the AMD and Intel IOMMU for their words;
drivers/pci/pci.c for `pci=`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ansible_collections.gpuhost.inference.plugins.module_utils._boot import (
    parse_grub_defaults,
    plain,
    split_command_line,
    split_grub_words,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError

LINE = "/etc/kernel/cmdline"  # its first line counts
DEFAULTS = "/etc/default/grub"
DROP_INS = "/etc/default/grub.d"
DROP_IN = f"{DROP_INS}/zz-gpuhost.cfg"

_HEADER = "# Written by gpuhost.inference.kernel_cmdline, which rewrites this file.\n"
# Parameters that hold words with commas. All of them are read, in order; of the words in one
# group the last one counts.
_LISTS: Mapping[str, tuple[frozenset[str], ...]] = {
    "iommu": (frozenset({"pt", "nopt"}), frozenset({"off", "force", "noforce"})),
    "amd_iommu": (frozenset({"pgtbl_v1", "pgtbl_v2"}),),
    "intel_iommu": (frozenset({"on", "off"}), frozenset({"sm_on", "sm_off"})),
    "pci": (),
}
# Other parameters of which the kernel takes the last: those of modules, except lists that other
# programs read, and a few of its core. Of the rest, as console=, all may count.
_LAST_COUNTS = re.compile(
    r"(?!(?:modprobe|rd|systemd|udev)[.])[^=.]+[.](?!dyndbg$)[^=]+|mem_encrypt|module_blacklist"
    r"|mitigations|pcie_\w+|transparent_hugepage|default_hugepagesz"
)
_WHERE_IT_BOOTS_FROM = ("root", "initrd", "BOOT_IMAGE", "init")
_OFF = {"amd_iommu": "off", "intel_iommu": "off", "iommu": "off"}
# x86 takes 2047 characters (COMMAND_LINE_SIZE); boot loaders add kernel, root and initrd
_LONGEST = 1900
_ASSIGNMENT = re.compile(
    r"^([ \t]*(?:export[ \t]+)?GRUB_CMDLINE_LINUX(?:_DEFAULT)?=)"
    r"""((?:"(?:\\.|[^"\\\n])*"|'[^'\n]*'|\\.|[^\s"'\\#;])*)""",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Wish:
    """Parameters that must be there, that must not, and names none of whose values may be."""

    present: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Edit:
    """The text of one file before and after, `None` for no file, and the parameters that differ."""

    path: str
    before: str | None
    after: str | None
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """The edits to make, the parameters that are configured after them, and what to tell."""

    edits: tuple[Edit, ...]
    configured: tuple[str, ...]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Entry:
    """What is remembered of a file: its text before our first change and after our last one.

    `added` are the parameters that are in it because of us, `removed` those that are not any more.
    """

    before: str | None
    after: str | None
    added: tuple[str, ...]
    removed: tuple[str, ...]


def parse_wish(present: Sequence[str], absent: Sequence[str]) -> tuple[Wish, tuple[str, ...]]:
    """Check the wish of a user.

    Returns:
        The wish, and warnings about it.

    Raises:
        GpuHostError: parameters that would hurt, or cannot be written; all are named.
    """
    present = list(dict.fromkeys(token.strip() for token in present))
    absent = list(dict.fromkeys(token.strip() for token in absent))
    problems = [
        f"{token!r} {said}" for token in [*present, *absent] for said in [_problem(token)] if said
    ]
    for token in present:
        name, _equals, value = plain(token).partition("=")
        if _OFF.get(name) in value.split(","):
            problems.append(
                f"{token!r} would take the IOMMU away, without which no GPU can be given to a VM "
                "and large hosts lose processors"
            )
        if plain(token) in map(plain, absent):
            problems.append(f"{token!r} is wanted present and absent")
    problems += [
        f"{one!r} and {other!r} contradict each other" for one, other in contradictions(present)
    ]
    if problems:
        raise GpuHostError(f"kernel parameters refused: {'; '.join(problems)}")
    warnings = [
        f"{token}: the kernel does not know this word and logs so; an AMD IOMMU is on by default"
        for token in present
        if "on" in settings(token).values() and plain(token).startswith("amd_iommu=")
    ]
    exact = tuple(token for token in absent if "=" in token)
    names = tuple(plain(token) for token in absent if "=" not in token)
    return Wish(tuple(present), exact, names), tuple(warnings)


def _problem(token: str) -> str | None:
    """Say why a parameter cannot be written into a boot loader's configuration."""
    for wrong, said in (
        (not token, "is empty"),
        (token.startswith("="), "has no name"),
        (
            not (token.isascii() and token.isprintable()),
            "has a line break or another character that is not printable ASCII",
        ),
        (token.count('"') % 2, "has a quote that is never closed"),
        (
            re.search(r"['\\$`]", token),
            "has a character that boot loaders read each in its own way: ' \\ $ `",
        ),
        (
            len(split_command_line(token)) > 1,
            "is several parameters: give each as an item of its own, spaces in double quotes",
        ),
        (
            token == "--" or plain(token).partition("=")[0] in _WHERE_IT_BOOTS_FROM,
            "says where the host boots from, which is not changed here",
        ),
    ):
        if wrong:
            return said
    return None


def settings(token: str) -> dict[str, str]:
    """Return what a parameter sets, of which the kernel takes one value only: the last.

    `iommu=pt,soft` sets two things, `iommu.passthrough=0` the first of these, `console=` none.
    """
    name, equals, value = plain(token).partition("=")
    if name == "iommu.passthrough":  # drivers/iommu/iommu.c sets what x86 sets for iommu=pt
        return {"iommu nopt": "pt" if re.match(r"[yYtT1]|o[nN]", value) else "nopt"}
    if name in _LISTS and equals:
        return {_setting(name, word): word for word in value.split(",")}
    return {name: value} if _LAST_COUNTS.fullmatch(name) else {}


def _setting(name: str, word: str) -> str:
    key = word.partition("=")[0]
    group = [min(words) for words in _LISTS[name] if key in words]
    return f"{name} {group[0] if group else key}"


def contradictions(tokens: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return the pairs of parameters that set one thing to different values."""
    return tuple(
        (one, other)
        for at, one in enumerate(tokens)
        for other in tokens[at + 1 :]
        if any(
            settings(one).get(setting, value) != value for setting, value in settings(other).items()
        )
    )


def kept(token: str, wish: Wish) -> str | None:
    """Return what a wish leaves of a parameter: all, some of its words, or `None` for nothing."""
    same = plain(token)
    name, equals, value = same.partition("=")
    absent = set(map(plain, wish.absent))
    if same in map(plain, wish.present):
        return token
    if same in absent or name in wish.names:
        return None
    wanted = {key: said for ours in wish.present for key, said in settings(ours).items()}
    if name in _LISTS and equals:
        words = value.split(",")
        left = [
            word
            for word in words
            if wanted.get(_setting(name, word), word) == word and f"{name}={word}" not in absent
        ]
        if left == words:
            return token
        return f"{token.partition('=')[0]}={','.join(left)}" if left else None
    clash = any(wanted.get(key, said) != said for key, said in settings(token).items())
    return None if clash else token


def edit_line(line: str, wish: Wish) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Edit one command line: return it with what was added and what was taken out.

    What follows a lone `--` is for the init program and stays. White space stays, too.
    """
    parts = re.findall(r'\s*(?:[^\s"]|"[^"]*"?)+', line)
    ends = [at for at, part in enumerate(parts) if part.strip() == "--"]
    end = ends[0] if ends else len(parts)
    wanted = set(map(plain, wish.present))
    found: set[str] = set()
    new, removed = [], []
    for part in parts[:end]:
        token = part.strip()
        left = kept(token, wish)
        again = left is not None and plain(left) in wanted and plain(left) in found
        if left is None or again:
            removed.append(token)
            continue
        found.add(plain(left))
        if left != token:
            removed.append(token)
        new.append(part[: len(part) - len(token)] + left)
    added = [token for token in wish.present if plain(token) not in found]
    new += [f" {token}" for token in added]
    text = "".join(new + parts[end:]) + line[len("".join(parts)) :]
    return (text if line[:1].isspace() else text.lstrip()), tuple(added), tuple(removed)


def plan_line(text: str | None, wish: Wish) -> Plan:
    """Plan for `/etc/kernel/cmdline`, from which proxmox-boot-tool makes systemd-boot's entries.

    Raises:
        GpuHostError: the file is missing, or the line would be too long.
    """
    if not text or not text.strip():
        raise GpuHostError(
            f"{LINE} is missing or empty, so 'proxmox-boot-tool refresh' repeats what is running: "
            "write the wanted line there first, beginning with the root= of /proc/cmdline"
        )
    first, newline, others = text.partition("\n")
    line, added, removed = edit_line(first, wish)
    edit = Edit(LINE, text, f"{line}{newline}{others}", added, removed)
    tokens = split_command_line(line)
    return _plan([edit], tokens, wish)


def plan_grub(texts: Mapping[str, str], wish: Wish) -> Plan:
    """Plan for GRUB: a drop-in for what is added, edits in place for what is taken out.

    A drop-in cannot take words away. The result is checked by reading it as grub-mkconfig does.

    Args:
        texts: `/etc/default/grub` and its drop-ins by path, ours too when it exists.
        wish: what must be there and what must not.

    Raises:
        GpuHostError: a file can only be understood by a shell, or the plan would have no effect.
    """
    others = {path: text for path, text in texts.items() if path != DROP_IN}
    found = parse_grub_defaults(others.values())
    mine = parse_grub_defaults([texts.get(DROP_IN, "")])
    if found is None or mine is None:
        opaque = [path for path, text in texts.items() if parse_grub_defaults([text]) is None]
        raise GpuHostError(
            f"{', '.join(opaque) or DEFAULTS} sets GRUB_CMDLINE_LINUX in a way only a shell "
            "understands: write it as plain words in quotes, or change the parameters by hand"
        )
    edits = [_edit_defaults(path, text, wish) for path, text in others.items()]
    new = {edit.path: edit.after or "" for edit in edits}
    remaining = [left for left in (kept(token, wish) for token in found) if left is not None]
    if list(parse_grub_defaults(new.values()) or ()) != remaining:
        places = [path for path, text in others.items() if _ASSIGNMENT.search(text)]
        unwanted = [token for token in found if kept(token, wish) != token]
        raise GpuHostError(
            f"{' '.join(unwanted)} cannot be taken out of {', '.join(places)} without touching "
            "more than that: take it out by hand"
        )
    have = set(map(plain, remaining))
    own = [
        left for left in (kept(token, wish) for token in mine) if left and plain(left) not in have
    ]
    own += [token for token in wish.present if plain(token) not in have | set(map(plain, own))]
    edits.append(_edit_drop_in(texts.get(DROP_IN), mine, own))
    new[DROP_IN] = edits[-1].after or ""
    configured = parse_grub_defaults(new[path] for path in sorted(new, key=grub_order)) or ()
    lost = set(map(plain, wish.present)) - set(map(plain, configured))
    if lost:
        later = [path for path in new if grub_order(path) > grub_order(DROP_IN)]
        raise GpuHostError(
            f"{', '.join(later) or DEFAULTS} would set GRUB_CMDLINE_LINUX anew after {DROP_IN}: "
            "begin its value with $GRUB_CMDLINE_LINUX, or rename it so that it comes first"
        )
    return _plan(edits, configured, wish)


def _plan(edits: Iterable[Edit], configured: tuple[str, ...], wish: Wish) -> Plan:
    changed = tuple(edit for edit in edits if edit.before != edit.after)
    if len(" ".join(configured)) > _LONGEST and changed:
        raise GpuHostError(
            f"the command line would have {len(' '.join(configured))} characters, and the kernel "
            f"takes 2047 together with what the boot loader adds: keep it below {_LONGEST}"
        )
    warnings = []
    for edit in changed:
        for token in edit.removed:
            left = kept(token, Wish((), wish.absent, wish.names))
            clash = [ours for ours in wish.present if contradictions([token, ours])]
            if left == token and clash:
                warnings.append(f"{edit.path}: {token} goes, it contradicts {' '.join(clash)}")
    for token in wish.present:
        name = plain(token).partition("=")[0]
        values = [other for other in configured if plain(other).partition("=")[0] == name]
        if not settings(token) and values and plain(values[-1]) != plain(token):
            warnings.append(
                f"{values[-1]} comes after {token}: if the kernel takes only one {name}=, it is "
                f"that one; name it as absent if so"
            )
    return Plan(changed, configured, tuple(warnings))


def _edit_defaults(path: str, text: str, wish: Wish) -> Edit:
    """Take what is not wanted out of the assignments of a shell fragment."""
    removed: list[str] = []

    def edit(match: re.Match[str]) -> str:
        value = match[2]
        quote = value[:1] if value[:1] in ('"', "'") and value[-1:] == value[:1] else ""
        inner = value[len(quote) : len(value) - len(quote)]
        parts = re.findall(r"""\s*(?:[^\s"'\\]|\\"[^"\\]*\\"|\\.|'[^']*'|"[^"]*")+""", inner)
        if "".join(parts) != inner.rstrip():
            return match[0]
        new = []
        for part in parts:
            raw = part.strip()
            token = _token(raw)
            left = token if token is None else kept(token, wish)
            if token is not None and left != token:
                removed.append(token)
                if left is None:
                    continue
                new.append(part[: len(part) - len(raw)] + _for_grub(left))
            else:
                new.append(part)
        body = "".join(new) + inner[len("".join(parts)) :]
        body = body if inner[:1].isspace() else body.lstrip()
        return f"{match[1]}{quote}{body}{quote}"

    new = _ASSIGNMENT.sub(edit, text)
    return Edit(path, text, new, (), tuple(removed))


def _token(raw: str) -> str | None:
    """Return the one parameter that GRUB makes of a piece of a value, `None` if it is not one."""
    try:
        words = split_grub_words(raw.replace('\\"', '"'))
    except ValueError:
        return None
    return words[0] if len(words) == 1 else None


def _edit_drop_in(text: str | None, had: Sequence[str], tokens: Sequence[str]) -> Edit:
    words = " ".join(map(_for_grub, tokens))
    after = f'{_HEADER}GRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX {words}"\n' if tokens else None
    if text is not None and [*map(plain, had)] == [*map(plain, tokens)]:
        after = text
    before, now = set(map(plain, had)), set(map(plain, tokens))
    return Edit(
        DROP_IN,
        text,
        after,
        tuple(token for token in tokens if plain(token) not in before),
        tuple(token for token in had if plain(token) not in now),
    )


def _for_grub(token: str) -> str:
    """Quote a parameter for grub.cfg, where a shell's double quotes surround it.

    GRUB itself puts double quotes around what has spaces.
    """
    word = token.replace('"', "")
    return word if re.fullmatch(r"[\w.,:=/@%+-]+", word) else f"'{word}'"


def grub_order(path: str) -> tuple[bool, str]:
    """Return the key that sorts GRUB's files as grub-mkconfig reads them; the last one counts."""
    return path != DEFAULTS, path


def remember(entries: Mapping[str, Entry], edits: Iterable[Edit]) -> dict[str, Entry]:
    """Return what is to be remembered once these edits are made.

    A file that somebody else edited since our last change counts as it is now without our own
    parameters, so that nobody's later edit is lost when ours are taken back.
    """
    new = dict(entries)
    for edit in edits:
        old = entries.get(edit.path, Entry(edit.before, edit.before, (), ()))
        before = old.before
        if edit.before not in (old.before, old.after):
            before = _without(edit.path, edit.before, old.added)
        entry = Entry(
            before,
            edit.after,
            tuple(token for token in old.added if token not in edit.removed) + edit.added,
            tuple(token for token in old.removed if token not in edit.added)
            + tuple(token for token in edit.removed if token not in old.added),
        )
        new[edit.path] = entry
        if entry.before == entry.after:
            del new[edit.path]
    return new


def take_back(entries: Mapping[str, Entry], texts: Mapping[str, str | None]) -> Plan:
    """Plan to leave the files as if nothing had ever been changed; `configured` stays empty.

    A file that is as we left it gets its text back, byte for byte. From one that somebody else
    edited since only our parameters are taken out.
    """
    edits, warnings = [], []
    for path, entry in entries.items():
        now = texts.get(path)
        if now == entry.before:
            continue
        if now == entry.after:
            edits.append(Edit(path, now, entry.before, entry.removed, entry.added))
        elif now is None:
            warnings.append(f"{path} was removed by somebody else and is not put back")
        else:
            edits.append(Edit(path, now, _without(path, now, entry.added), (), entry.added))
            gone = f"; {' '.join(entry.removed)} is not put back" if entry.removed else ""
            own = " ".join(entry.added) or "nothing"
            warnings.append(
                f"{path} was edited by somebody else since: only our own parameters ({own}) are "
                f"taken out of it{gone}"
            )
    return Plan(tuple(edit for edit in edits if edit.before != edit.after), (), tuple(warnings))


def _without(path: str, text: str | None, tokens: tuple[str, ...]) -> str | None:
    """Return a file without these parameters."""
    wish = Wish((), tokens)
    if text is None or not tokens:
        return text
    if path == LINE:
        first, newline, others = text.partition("\n")
        return edit_line(first, Wish((), tokens))[0] + newline + others
    if path == DROP_IN:
        had = parse_grub_defaults([text]) or ()
        return _edit_drop_in(text, had, [token for token in had if kept(token, wish)]).after
    return _edit_defaults(path, text, wish).after

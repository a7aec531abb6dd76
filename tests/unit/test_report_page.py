"""The report's page: valid, self-contained, fit for light, dark, phone, paper, screen readers.

With REPORT_SHOTS=FOLDER pictures of it are left there to look at.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import html5lib
import jinja2
import measured_runs
import pytest
import trees
from ansible_collections.gpuhost.inference.plugins.filter.report import report
from ansible_collections.gpuhost.inference.plugins.module_utils._host import audit
from ansible_collections.gpuhost.inference.plugins.module_utils._kernel_log import read_blocks
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader
from plays import run_playbook

TEMPLATES = Path(__file__).parents[2] / "roles" / "gpu_report" / "templates"
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
SERVER: dict[str, Any] = {
    "name": "ct100",
    "server": {
        "state": "ready",
        "url": "http://10.10.10.100:30000",
        "version": "0.5.23",
        "model_id": "qwen3.5-122b",
        "reason": "serves qwen3.5-122b",
        "effective_max_running_requests": 24,
        "kv_tokens": 733361,
        "flags": {"tp_size": 4, "mem_fraction_static": 0.8, "disable_custom_all_reduce": True},
        "speculation": {
            "algorithm": "EAGLE",
            "num_steps": 3,
            "accept_length": 2.4,
            "verdict": "ok",
        },
    },
    "witnesses": [
        {"name": "unit", "said": "active for 3 min", "ok": True},
        {"name": "port", "said": "closed", "ok": False},
        {"name": "journal", "said": "not readable", "ok": None},
    ],
}
Given = dict[str, Any]


def host(folder: Path) -> dict[str, Any]:
    log = read_blocks([b"[    0.000000] Linux version 6.14.11-4-pve\n"])
    facts = audit(
        Reader(str(trees.host("eight-gpus", folder))),
        log,
        measured_runs.LAYOUT,
        "keep",
        observed=True,
    )
    plain: dict[str, Any] = json.loads(json.dumps(facts))
    plain["p2p"]["tests"] = [
        {
            "addresses": ["0000:41:00.0", "0000:42:00.0", "0000:43:00.0", "0000:44:00.0"],
            "changed": ["the kernel was 6.14.8-2-pve"],
            "reason": "24 of 24 copies did not arrive, first the write from 0000:41:00.0",
            "time": "2026-11-20T12:00:00Z",
            "valid": False,
            "verdict": "broken",
            "vmid": 100,
        }
    ]
    plain["host"]["modprobe"] = [
        {
            "file": "/etc/modprobe.d/gpuhost-options.conf",
            "line": 1,
            "command": "options",
            "module": "nvidia",
            "value": "NVreg_RegistryDwords=DmaRemapPeerMmio=1",
        }
    ]
    return plain


def everything() -> Given:
    return {
        "servers": [SERVER],
        "p2p": [measured_runs.copies()],
        "benchmark": measured_runs.runs(),
        "verdict": measured_runs.verdict(),
        "history": measured_runs.history(),
        "changes": ["Bound GPU 0000:41:00.0 to nvidia"],
    }


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write a page with all there can be, and one of a host that nothing was measured on."""
    folder = tmp_path_factory.mktemp("pages")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    given: dict[str, Given] = {"full": everything(), "bare": {}}
    for name, options in given.items():
        prepared = report(host(folder / name), "pve-a", at="2026-11-30 09:00 UTC", **options)
        text = environment.get_template("report.html.j2").render(__gpu_report=prepared)
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in given}


@pytest.fixture(params=["full", "bare"])
def page(request: pytest.FixtureRequest, pages: dict[str, Path]) -> Path:
    return pages[request.param]


def parsed(page: Path) -> ElementTree.Element:
    """Parse it as browsers do; the first error of its syntax is one of the test."""
    parser = html5lib.HTMLParser(
        html5lib.getTreeBuilder("etree"), strict=True, namespaceHTMLElements=False
    )
    root: ElementTree.Element = parser.parse(page.read_text(encoding="utf-8"))
    return root


def test_it_is_valid(page: Path) -> None:
    root = parsed(page)
    assert root.get("lang") == "en"
    names = [element.get("id") for element in root.iter() if element.get("id")]
    assert sorted(names) == sorted(set(names))
    assert root.find(".//title") is not None


def test_it_loads_and_runs_nothing(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    root = parsed(page)
    names = {str(element.get("id")) for element in root.iter()}
    tags = {element.tag for element in root.iter()}
    assert not tags & {"script", "link", "img", "iframe", "object", "image", "form", "base"}
    for element in root.iter():
        for name, value in element.attrib.items():
            assert not name.startswith("on")
            if name in ("href", "src", "{http://www.w3.org/1999/xlink}href"):
                assert value.startswith("#"), value
                assert value[1:] in names, value
    assert "@import" not in text
    assert set(re.findall(r"url\(#?([^)]*)\)", text)) <= names


def test_headings_are_in_order(page: Path) -> None:
    levels = [int(e.tag[1]) for e in parsed(page).iter() if re.fullmatch("h[1-6]", str(e.tag))]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in zip(levels, levels[1:], strict=False))


def test_tables_have_captions_and_heads(page: Path) -> None:
    tables = parsed(page).findall(".//table")
    assert len(tables) > 5
    for table in tables:
        assert "".join(table[0].itertext()).strip(), "no caption"
        assert table[0].tag == "caption"
        assert all(head.get("scope") in ("col", "row") for head in table.iter("th"))
        for row in table.findall("./tbody/tr"):
            assert row[0].tag == "th"


def test_plots_have_names_and_descriptions(pages: dict[str, Path]) -> None:
    svg = "{http://www.w3.org/2000/svg}"
    root = parsed(pages["full"])
    texts = {e.get("id"): "".join(e.itertext()) for e in root.iter() if e.get("id")}
    plots = root.findall(f".//{svg}svg")
    assert len(plots) == 5
    for plot in plots:
        assert plot.get("role") == "img"
        title, description = (plot.get("aria-labelledby") or "").split()
        assert texts[title]
        assert "SGLang 0.5.23" in texts[description]
        # no colour is fixed, so all follow the page's
        styles = " ".join(e.get("style") or "" for e in plot.iter())
        assert "var(--arm-1)" in styles
        assert not re.search("#[0-9a-f]{6}", styles)


def colours(media: str) -> dict[str, str]:
    css = (TEMPLATES / "report.css").read_text(encoding="utf-8")
    start = css.index(media)
    block = css[css.index(":root", start) : css.index("}", start)]
    return dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6})", block))


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("media", [":root", "prefers-color-scheme: dark", "@media print"])
def test_all_text_has_contrast(media: str) -> None:
    have = colours(media)
    grounds = ("paper", "card")
    pairs = [(text, ground) for text in ("ink", "quiet", "link") for ground in grounds]
    pairs += [(f"arm-{number}", "card") for number in range(5)]
    pairs += [("ink", ground) for ground in ("chip", "nvidia", "vfio", "guest", "band")]
    for word in ("good", "attention", "problem", "unknown"):
        pairs += [(word, ground) for ground in (*grounds, f"{word}-back")]
    for text, ground in pairs:
        light, dark = sorted((luminance(have[text]), luminance(have[ground])), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (text, ground)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(
            "THE REPORT WAS NOT SEEN IN A BROWSER: no Chromium here; "
            "apt-get install --no-install-recommends chromium-headless-shell"
        )
    api = pytest.importorskip(
        "playwright.sync_api", reason="THE REPORT WAS NOT SEEN IN A BROWSER: no playwright here"
    )
    with api.sync_playwright() as playwright:
        # as root, as in containers, Chromium refuses to start with its sandbox
        started = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield started
        started.close()


Open = Callable[..., Any]


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """Open a page in a window of some width and colour scheme."""
    contexts = []

    def start(page: Path, width: int = 1280, scheme: str = "light") -> Any:
        context = browser.new_context(
            viewport={"width": width, "height": 800}, color_scheme=scheme, reduced_motion="reduce"
        )
        contexts.append(context)
        tab = context.new_page()
        tab.asked = []
        tab.on("request", lambda request: tab.asked.append(request.url))
        tab.goto(page.as_uri())
        return tab

    yield start
    for context in contexts:
        context.close()


def keep(tab: Any, page: Path, form: str) -> None:
    """Leave a picture to look at, when that is asked for."""
    folder = os.environ.get("REPORT_SHOTS")
    if folder:
        tab.screenshot(path=f"{folder}/{page.stem}-{form}.png", full_page=True)


WIDER = """() => [...document.querySelectorAll('body *')]
  .filter(e => !e.closest('.scroll, .unseen, .skip, thead'))
  .filter(e => e.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5)
  .map(e => e.tagName + '.' + e.className)"""


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_nothing_is_wider_than_the_window(page: Path, open_page: Open, width: int) -> None:
    tab = open_page(page, width)
    tab.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.evaluate(WIDER) == []
    # heads that stay in view while a table is scrolled leave room for what is scrolled
    rooms = tab.evaluate(
        """[...document.querySelectorAll('.scroll tbody th')].map(
          e => e.getBoundingClientRect().width / e.closest('.scroll').clientWidth)"""
    )
    assert not rooms or max(rooms) < 0.7
    # on a phone, text in plots is still to be read
    sizes = tab.evaluate(
        "[...document.querySelectorAll('svg text')].map(t => t.getBoundingClientRect().height)"
    )
    assert all(size >= 8 for size in sizes if size), sorted(sizes)[:3]
    keep(tab, page, str(width))


def test_it_asks_for_nothing(page: Path, open_page: Open) -> None:
    tab = open_page(page)
    assert tab.asked == [page.as_uri()]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_follows_the_colour_scheme(pages: dict[str, Path], open_page: Open, scheme: str) -> None:
    page = pages["full"]
    tab = open_page(page, scheme=scheme)
    paper, ink, plot, ground = tab.evaluate(
        """() => [getComputedStyle(document.body).backgroundColor,
          getComputedStyle(document.body).color,
          getComputedStyle(document.querySelector('svg text')).fill,
          [...document.querySelectorAll('svg > g > g > path')]
            .map(e => getComputedStyle(e).fill).filter(f => f == 'rgb(255, 255, 255)').length]"""
    )
    light, dark = (paper, ink) if scheme == "light" else (ink, paper)
    assert min(map(int, re.findall(r"\d+", light))) > 200
    assert max(map(int, re.findall(r"\d+", dark))) < 60
    assert plot == ink
    assert ground == 0  # a plot has no ground of its own
    keep(tab, page, scheme)


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (360, "light")])
def test_axe_finds_nothing(page: Path, open_page: Open, width: int, scheme: str) -> None:
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="AXE WAS NOT ASKED: it is not here"
    )
    tab = open_page(page, width, scheme)
    tab.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    results = axe.Axe().run(tab)
    assert results.violations_count == 0, results.generate_report()


def test_the_keyboard_reaches_all(pages: dict[str, Path], open_page: Open) -> None:
    tab = open_page(pages["full"])
    tab.keyboard.press("Tab")
    link = tab.evaluate(
        """() => { const e = document.activeElement, s = getComputedStyle(e);
          return [e.className, e.getBoundingClientRect().top >= 0, parseFloat(s.outlineWidth)] }"""
    )
    assert link[:2] == ["skip", True]
    assert link[2] >= 2
    tab.keyboard.press("Enter")
    assert tab.evaluate("document.activeElement.id") == "content"
    summary = tab.locator("summary").first
    summary.focus()
    tab.keyboard.press("Enter")
    assert tab.evaluate("document.activeElement.parentElement.open") is True


def test_a_phone_keeps_tables_for_screen_readers(pages: dict[str, Path], open_page: Open) -> None:
    tab = open_page(pages["full"], 360)
    assert tab.get_by_role("table").count() == len(parsed(pages["full"]).findall(".//table")) - len(
        tab.query_selector_all("details:not([open]) table")
    )
    assert tab.get_by_role("rowheader", name="0000:41:00.0").count() >= 1
    assert tab.get_by_role("img").count() == 5
    for landmark in ("banner", "navigation", "main", "contentinfo"):
        assert tab.get_by_role(landmark).count() == 1


def test_it_prints_with_all_numbers(
    pages: dict[str, Path], open_page: Open, tmp_path: Path
) -> None:
    tab = open_page(pages["full"], 688, "dark")  # A4 without its margins
    tab.emulate_media(media="print", color_scheme="dark")
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    heights = tab.evaluate(
        "[...document.querySelectorAll('details table')].map(t => t.getBoundingClientRect().height)"
    )
    assert heights
    assert min(heights) > 20
    assert not tab.locator("nav").is_visible()
    rights = tab.evaluate(
        "[...document.querySelectorAll('td, th, svg')].map(e => e.getBoundingClientRect().right)"
    )
    assert max(rights) <= 688.5
    paper = Path(os.environ.get("REPORT_SHOTS") or tmp_path) / "full.pdf"
    tab.pdf(path=str(paper), format="A4")
    content = paper.read_bytes()
    assert content.startswith(b"%PDF")
    assert 4 < content.count(b"/Type /Page\n") < 25


PLAY = """\
- hosts: pve-a
  gather_facts: false
  tasks:
    - ansible.builtin.import_role:
        name: gpuhost.inference.gpu_report
      vars:
        gpu_report_host_info: "{{ lookup('ansible.builtin.file', 'host.json') | from_json }}"
"""


def test_the_role_writes_it_once(tmp_path: Path) -> None:
    options = everything()
    (tmp_path / "host.json").write_text(json.dumps(host(tmp_path / "tree")))
    (tmp_path / "play.yml").write_text(PLAY)
    variables = {
        "gpu_report_dir": str(tmp_path / "reports"),
        "gpu_report_sglang": options["servers"],
        **{f"gpu_report_{key}": options[key] for key in ("p2p", "benchmark", "verdict", "history")},
    }
    said = run_playbook(tmp_path, tmp_path / "play.yml", "pve-a,", variables)
    assert "failed=0" in said, said
    assert "MTP: depends: mtp3 gains at C=1, 4 and loses at C=64" in said
    written = {path.name: path.read_bytes() for path in (tmp_path / "reports").iterdir()}
    assert sorted(written) == ["pve-a.html", "pve-a.json"]
    assert written["pve-a.html"].count(b"<svg") == 5
    again = run_playbook(tmp_path, tmp_path / "play.yml", "pve-a,", variables)
    assert "changed=0" in again, again
    assert written == {path.name: path.read_bytes() for path in (tmp_path / "reports").iterdir()}
    # a control node without matplotlib
    shadow = tmp_path / "shadow"
    shadow.mkdir()
    (shadow / "matplotlib.py").write_text("raise ImportError('no matplotlib here')\n")
    variables["gpu_report_dir"] = str(tmp_path / "plain")
    plain = run_playbook(
        tmp_path, tmp_path / "play.yml", "pve-a,", variables, {"PYTHONPATH": str(shadow)}
    )
    assert "failed=0" in plain, plain
    text = (tmp_path / "plain" / "pve-a.html").read_text(encoding="utf-8")
    assert "<svg" not in text
    assert "There are no plots (no matplotlib here)" in text
    assert "Speed by arm and load" in text


def test_what_a_host_says_is_no_template(tmp_path: Path) -> None:
    """Names, logs and kept runs may hold what Ansible would evaluate on the control node."""
    evil = "{{ 6 * 7 }}{% set x = 1 %}{{ lookup('pipe', 'touch EVIL') }}{# x #}"
    facts = host(tmp_path / "tree")
    facts["host"]["kernel"] = evil
    run = measured_runs.run("off", 1)
    run["equal"] = {**run["equal"], "model": evil}
    run["rejected"][0]["reasons"][0]["text"] = evil
    given = {"host": facts, "runs": [run]}
    (tmp_path / "given.json").write_text(json.dumps(given))
    play = PLAY.replace(
        """host_info: "{{ lookup('ansible.builtin.file', 'host.json') | from_json }}\"""",
        """given: "{{ lookup('ansible.builtin.file', 'given.json') | from_json }}"
        gpu_report_host_info: "{{ gpu_report_given.host }}"
        gpu_report_benchmark: "{{ gpu_report_given.runs }}\"""",
    )
    assert "given.json" in play
    (tmp_path / "play.yml").write_text(play)
    variables = {"gpu_report_dir": str(tmp_path / "reports")}
    for _turn in range(2):  # the second one reads the report of the first
        said = run_playbook(tmp_path, tmp_path / "play.yml", "pve-a,", variables)
        assert "failed=0" in said, said
    page = (tmp_path / "reports" / "pve-a.html").read_text(encoding="utf-8")
    assert page.count(html.escape(evil)) >= 3
    kept = json.loads((tmp_path / "reports" / "pve-a.json").read_text(encoding="utf-8"))
    assert {"label": "Model", "value": evil} in kept["mtp"]["conditions"]
    assert not list(tmp_path.rglob("EVIL"))

# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this plugin util is private to the collection: it may change at any time.

"""Plots of a report, as SVG to stand inside its page. Needs matplotlib on the control node.

Colours are variables of the page's style, so that a plot is right on light and dark paper and in
print. Text stays text, and the same numbers make the same bytes.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

from ansible_collections.gpuhost.inference.plugins.plugin_utils._report_measured import share

try:
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
except ImportError as error:
    MISSING: str | None = str(error)
else:
    MISSING = None

_SVG = "{http://www.w3.org/2000/svg}"
_XLINK = "{http://www.w3.org/1999/xlink}href"
# colours that stand for variables of report.css until the plot is written
_INK, _QUIET, _LINE, _BAND, _CARD = "#010101", "#020202", "#030303", "#040404", "#050505"
_ARMS = ("#0a0a01", "#0a0a02", "#0a0a03", "#0a0a04", "#0a0a05")  # the baseline's first
_VARIABLES = {
    _INK: "--ink",
    _QUIET: "--quiet",
    _LINE: "--line",
    _BAND: "--band",
    _CARD: "--card",
    **{colour: f"--arm-{number}" for number, colour in enumerate(_ARMS)},
}
_HEIGHT = 3.3  # of a plot, in inches
_LONGEST = 36  # of a name in a legend, in characters: a longer one leaves the plot no room
_MARKS = ("s", "o", "^", "D", "v")
# where the labels of an arm's points stand: points aside, and what of the label is there
_PLACES: tuple[tuple[tuple[int, int], Any, Any], ...] = (
    ((-5, -5), "right", "top"),
    ((5, 5), "left", "bottom"),
    ((5, -5), "left", "top"),
    ((-5, 5), "right", "bottom"),
)
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "gpuhost",
    "text.parse_math": False,  # a model's name may hold dollar signs
    "font.size": 10.5,
    "font.family": "DejaVu Sans",  # comes with matplotlib; the page sets its own
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "axes.edgecolor": _LINE,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": _LINE,
    "grid.linewidth": 0.6,
    "text.color": _INK,
    "xtick.color": _LINE,
    "ytick.color": _LINE,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "legend.handletextpad": 0.4,
    "legend.columnspacing": 1.2,
    "legend.borderaxespad": 0.0,
}


def draw(mtp: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the plots of a report's part about MTP, those whose numbers are there.

    Args:
        mtp: what `measured` returned.

    Returns:
        For each plot its `name`, which is that of its table, its `title`, what is `said` to read
        it, and the `svg`.
    """
    plots = []
    for name, title, said, paint in _plots(mtp):
        with rc_context(_STYLE):
            sheet = Figure(figsize=(4.9, _HEIGHT), layout="constrained")
            paint(sheet.add_subplot())
            text = io.StringIO()
            sheet.savefig(text, format="svg", metadata={"Date": None})
        description = f"{said} {mtp['condition_line']}."
        svg = _inline(text.getvalue(), name, title, description)
        plots.append({"name": name, "title": title, "said": said, "svg": svg})
    return plots


def _plots(
    mtp: Mapping[str, Any],
) -> list[tuple[str, str, str, Callable[[Any], None]]]:
    """Return name, title, description and painter of each plot that has numbers."""
    series = [arm for arm in mtp["series"] if arm["points"]]
    arms = {name: number for number, name in enumerate(_names(mtp))}
    found: list[tuple[str, str, str, Callable[[Any], None]]] = []
    if any(_known(arm["points"], "ratio") for arm in mtp["ratios"]):
        found.append(
            (
                "ratios",
                "Speed with MTP over speed without",
                "Ratio of output tokens per second over the number of requests at once, with "
                f"{share(mtp['confidence'])} intervals. Above 1 MTP is faster. Within the band, "
                f"{share(mtp['margin'])} to each side, no arm is called faster.",
                lambda axes: _ratio(axes, mtp, arms),
            )
        )
    if any(_known(arm["points"], "aggregate", "per_request") for arm in series):
        found.append(
            (
                "speed",
                "Speed of each request over speed of all",
                "One line for each arm; the number at a point is how many requests were made at "
                "once. Up and to the right is better.",
                lambda axes: _pareto(axes, series, arms),
            )
        )
    for name, title in (("ttft", "Time to the first token"), ("tpot", "Time for each token after")):
        if any(_known(arm["points"], name) for arm in series):
            found.append(
                (
                    name,
                    title,
                    "Milliseconds over the number of requests at once, median, and the 95th "
                    "percentile dashed. Lower is better.",
                    lambda axes, name=name: _latency(axes, series, arms, name),  # type: ignore[misc]
                )
            )
    if mtp["acceptance"]:
        found.append(
            (
                "acceptance",
                "Tokens for each pass, by kind of prompt",
                "Accept length, the median as a mark, and the lowest to the highest as a line. At "
                "1 no draft is accepted.",
                lambda axes: _acceptance(axes, mtp["acceptance"], arms),
            )
        )
    return found


def _names(mtp: Mapping[str, Any]) -> list[str]:
    names = [arm["arm"] for part in ("series", "ratios") for arm in mtp[part]]
    return list(dict.fromkeys([mtp["baseline"], *names]))


def _known(points: Iterable[Mapping[str, Any]], *keys: str) -> list[Mapping[str, Any]]:
    return [point for point in points if all(point[key] is not None for key in keys)]


def _look(arms: Mapping[str, int], arm: str) -> dict[str, Any]:
    number = arms.get(arm, 0)
    return {"color": _ARMS[number % len(_ARMS)], "marker": _MARKS[number % len(_MARKS)]}


def _legend(axes: Axes, entries: Sequence[tuple[str, dict[str, Any]]]) -> None:
    handles = [
        Line2D([], [], label=name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…", **look)
        for name, look in ((name, {"linewidth": 1.6, **look}) for name, look in entries)
    ]
    columns = 1 if any(len(name) > 24 for name, _look in entries) else 3
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1.03), ncols=columns)
    rows = -(-len(entries) // columns)
    sheet = axes.get_figure()
    if isinstance(sheet, Figure):
        sheet.set_figheight(_HEIGHT + 0.21 * (rows - 1))  # the legend takes nothing of the plot


def _loads(axes: Axes, loads: Iterable[int]) -> None:
    """Give the axis of loads a logarithmic scale with a label at each that was measured."""
    axes.set_xscale("log", base=2)
    ticks = sorted(set(loads))
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda load, _at: f"{load:.0f}"))
    axes.set_xlim(ticks[0] / 1.3, ticks[-1] * 1.3)
    axes.set_xlabel("requests at once (log scale)")


def _ratio(axes: Axes, mtp: Mapping[str, Any], arms: Mapping[str, int]) -> None:
    margin, entries = mtp["margin"], []
    axes.axhspan(1 - margin, 1 + margin, color=_BAND, linewidth=0)
    axes.axhline(1, color=_QUIET, linewidth=0.9)
    shown = [arm for arm in mtp["ratios"] if _known(arm["points"], "ratio")]
    for place, arm in enumerate(shown):
        points, look = _known(arm["points"], "ratio"), _look(arms, arm["arm"])
        aside = 1.05 ** (place - (len(shown) - 1) / 2)  # so that intervals stand side by side
        xs = [point["concurrency"] * aside for point in points]
        axes.plot(xs, [point["ratio"] for point in points], color=look["color"], linewidth=1.2)
        for x, point in zip(xs, points, strict=True):
            if point["low"] is not None and point["high"] is not None:
                axes.vlines(x, point["low"], point["high"], color=look["color"], linewidth=1.8)
                axes.plot([x, x], [point["low"], point["high"]], "_", color=look["color"], ms=7)
            face = look["color"] if point["measured"] else _CARD
            axes.plot([x], [point["ratio"]], **look, markerfacecolor=face, ms=6, zorder=3)
        entries.append((arm["arm"], look))
    entries.append((f"within {share(margin)}: tie", {"color": _BAND, "linewidth": 8}))
    if any(not point["measured"] for arm in shown for point in arm["points"]):
        hollow = {"color": _QUIET, "marker": "o", "linestyle": "", "markerfacecolor": _CARD}
        entries.append(("not measured there", hollow))
    _loads(axes, (point["concurrency"] for arm in shown for point in arm["points"]))
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _at: f"{value:.2f}"))
    axes.set_ylabel("speed with MTP / without")
    axes.grid(axis="y")
    _legend(axes, entries)


def _pareto(axes: Axes, series: Sequence[Mapping[str, Any]], arms: Mapping[str, int]) -> None:
    axes.margins(x=0.1, y=0.12)
    for place, arm in enumerate(series):
        points, look = _known(arm["points"], "aggregate", "per_request"), _look(arms, arm["arm"])
        aside, across, upright = _PLACES[place % len(_PLACES)]
        xs = [point["aggregate"] for point in points]
        axes.plot(xs, [point["per_request"] for point in points], **look, linewidth=1.6, ms=5)
        for point in points:
            axes.annotate(
                str(point["concurrency"]),
                (point["aggregate"], point["per_request"]),
                xytext=aside,
                textcoords="offset points",
                ha=across,
                va=upright,
                color=look["color"],
                fontsize=9.5,
            )
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.set_xlabel("output tokens/s of all requests")
    axes.set_ylabel("tokens/s for each request")
    axes.grid()
    _legend(axes, [(arm["arm"], _look(arms, arm["arm"])) for arm in series])


def _latency(
    axes: Axes, series: Sequence[Mapping[str, Any]], arms: Mapping[str, int], name: str
) -> None:
    values = []
    for arm in series:
        look = _look(arms, arm["arm"])
        for key, line, size in ((name, "-", 5), (f"{name}_p95", "--", 3)):
            points = _known(arm["points"], key)
            ys = [point[key] for point in points]
            values += ys
            axes.plot(
                [point["concurrency"] for point in points],
                ys,
                **look,
                linestyle=line,
                linewidth=1.6 if line == "-" else 1.0,
                ms=size,
            )
    positive = [value for value in values if value > 0]
    if positive and max(positive) > 20 * min(positive):
        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _at: f"{value:g}"))
        axes.set_ylabel("ms (log scale)")
    else:
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_locator(MaxNLocator(6))
        axes.set_ylabel("ms")
    _loads(axes, (point["concurrency"] for arm in series for point in arm["points"]))
    axes.grid(axis="y")
    dashed = ("dashed: 95th percentile", {"color": _QUIET, "linestyle": "--"})
    _legend(axes, [*((arm["arm"], _look(arms, arm["arm"])) for arm in series), dashed])


def _acceptance(
    axes: Axes, acceptance: Sequence[Mapping[str, Any]], arms: Mapping[str, int]
) -> None:
    kinds = sorted({kind["kind"] for arm in acceptance for kind in arm["kinds"]}, reverse=True)
    for place, arm in enumerate(acceptance):
        look = _look(arms, arm["arm"])
        aside = ((len(acceptance) - 1) / 2 - place) * 0.22
        for kind in arm["kinds"]:
            y = kinds.index(kind["kind"]) + aside
            axes.hlines(y, kind["low"], kind["high"], color=look["color"], linewidth=1.8)
            axes.plot([kind["length"]], [y], **look, ms=6)
    axes.set_yticks(range(len(kinds)), kinds)
    axes.set_ylim(-0.6, len(kinds) - 0.4)
    axes.axvline(1, color=_QUIET, linewidth=0.9)
    axes.set_xlim(left=0.9)
    axes.margins(x=0.1)
    axes.set_xlabel("accept length (tokens for each pass)")
    axes.grid(axis="x")
    _legend(axes, [(arm["arm"], _look(arms, arm["arm"])) for arm in acceptance])


def _inline(text: str, name: str, title: str, description: str) -> str:
    """Make a file's SVG fit into a page: names of its own, the page's colours and fonts."""
    root = ElementTree.fromstring(text)
    used = set(re.findall(r'(?:url\(#|href="#)([^")]+)', text))
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{_SVG}metadata", f"{_SVG}style"):
                parent.remove(child)
    for element in root.iter():
        _fit(element, f"plot-{name}-", used)
    for number, (tag, words) in enumerate((("title", title), ("desc", description))):
        child = ElementTree.Element(tag, {"id": f"plot-{name}-{tag}"})
        child.text = words
        root.insert(number, child)
    box = root.get("viewBox", "")
    root.attrib.clear()
    root.attrib.update(
        {
            "viewBox": box,
            "role": "img",
            "aria-labelledby": f"plot-{name}-title plot-{name}-desc",
        }
    )
    return ElementTree.tostring(root, encoding="unicode")


def _fit(element: ElementTree.Element, prefix: str, used: set[str]) -> None:
    element.tag = element.tag.removeprefix(_SVG)  # a page's parser knows svg without its namespace
    identity = element.attrib.pop("id", None)
    if identity in used:
        element.set("id", prefix + str(identity))
    target = element.attrib.pop(_XLINK, None)
    if target:
        element.set("href", "#" + prefix + target.removeprefix("#"))
    if "clip-path" in element.attrib:
        element.set("clip-path", element.attrib["clip-path"].replace("url(#", f"url(#{prefix}"))
    style = element.get("style")
    if style:
        style = re.sub(r"font: (?:[a-z0-9]+ )*?([\d.]+px)[^;]*", r"font-size: \1", style)
        element.set("style", re.sub("#[0-9a-f]{6}", _variable, style))


def _variable(found: re.Match[str]) -> str:
    name = _VARIABLES.get(found.group())
    return f"var({name})" if name else found.group()

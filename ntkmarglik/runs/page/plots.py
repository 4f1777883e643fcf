"""Interactive plots of runs. Their colours can be read on light and on dark pages."""

from __future__ import annotations

import itertools
import math
from typing import Any

from bokeh.models import FixedTicker, HoverTool, PrintfTickFormatter
from bokeh.models.annotations import BoxAnnotation
from bokeh.plotting import figure

from ntkmarglik.problem.augment import RANGES
from ntkmarglik.runs.loggers import Metrics
from ntkmarglik.runs.report import NAMED_TENSORS, RANGE_LABELS, Runs, course

COLOURS = ("#2f8fd0", "#e0701a", "#12a37b", "#cc79a7", "#b59a00", "#8f7ae5")
GREY = "#8a8f98"  # of text and axes: as far from white as from black
PARTS = {  # of the time of a run
    "weights": "seconds_weights",
    "hyperparameters": "seconds_hyper",
    "predictions": "seconds_predict",
}


def plots(runs: Runs) -> dict[str, Any]:
    """By title, those that the runs have numbers for."""
    found = {
        "Log evidence per datum": _curves(runs, "log_marglik"),
        "Test log-likelihood per datum": _curves(runs, "test_log_likelihood"),
        "Prior precision over training": _precision_courses(runs),
        "Prior precision of each tensor, at the end": _precisions(runs),
        "Ranges of the augmentation": _ranges(runs),
        "Reliability on test data": _reliability(runs),
        "Where the time went": _timing(runs),
    }
    return {title: plot for title, plot in found.items() if plot is not None}


def _empty(x: str, tips: list[tuple[str, str]], **options: Any) -> Any:
    """A plot without data, which a finger on a phone scrolls past."""
    plot = figure(
        height=300,
        sizing_mode="stretch_width",
        tools="pan,wheel_zoom,box_zoom,reset",
        active_drag=None,
        active_scroll=None,
        x_axis_label=x,
        background_fill_alpha=0,
        border_fill_alpha=0,
        outline_line_color=None,
        **options,
    )
    plot.add_tools(HoverTool(tooltips=tips))
    plot.toolbar.logo = None
    plot.toolbar.autohide = True
    plot.grid.grid_line_color = GREY
    plot.grid.grid_line_alpha = 0.25
    plot.axis.axis_line_color = plot.axis.major_tick_line_color = GREY
    plot.axis.minor_tick_line_color = None
    plot.axis.major_label_text_color = plot.axis.axis_label_text_color = GREY
    plot.axis.axis_label_text_font_style = "normal"
    return plot


def _logarithmic(axis: Any) -> None:
    """Two labels for each power of ten: more would lie on one another."""
    ticks = [factor * 10.0**power for power in range(-30, 31) for factor in (1, 3)]
    axis.ticker = FixedTicker(ticks=ticks)
    axis.formatter = PrintfTickFormatter(format="%.3g")


def _legend(plot: Any) -> Any:
    """The legend below the plot; a click hides a line."""
    if plot.legend:
        legend = plot.legend[0]
        plot.add_layout(legend, "below")
        legend.orientation = "horizontal"
        legend.ncols = 2
        legend.click_policy = "hide"
        legend.label_text_color = GREY
        legend.label_text_font_size = "12px"
        legend.background_fill_alpha = 0
        legend.border_line_color = None
    return plot


def _styles() -> Any:
    """A colour and a dash for each line, however many there are."""
    for dash in itertools.cycle(("solid", "dashed", "dotted")):
        for colour in COLOURS:
            yield colour, dash


def _unit(runs: Runs) -> str:
    return "epoch" if any("epoch" in m for lines, _ in runs.values() for m in lines) else "step"


def _finite(positions: list[int], values: list[Any]) -> tuple[list[int], list[float]]:
    """Points that can be drawn."""
    points = [(p, v) for p, v in zip(positions, values, strict=True) if math.isfinite(v)]
    return [p for p, _ in points], [v for _, v in points]


def _curves(runs: Runs, key: str) -> Any:
    """A quantity over the epochs, its standard error, and the interval of its last value."""
    unit = _unit(runs)
    plot = _empty(unit, [("", "$name"), (unit, "@x"), ("value", "@y{0.0000}")])
    for (label, (lines, summary)), (colour, dash) in zip(runs.items(), _styles(), strict=False):
        positions, values = _finite(*course(lines, key))
        final = summary.get(key)
        if not values and final is not None and math.isfinite(final):  # known at the end only
            end = max((m.get(unit, 0) for m in lines), default=1)
            positions, values, dash = [0, end], [final, final], "dotted"
        if not values:
            continue
        style = {"color": colour, "legend_label": label, "name": label}
        plot.line(positions, values, line_width=2, line_dash=dash, **style)
        if dash != "dotted":
            plot.scatter(positions, values, size=4, **style)
        _band(plot, lines, key, colour, label)
        interval = summary.get(f"{key}_interval")
        if interval and all(map(math.isfinite, interval)):
            low, high = interval
            box = BoxAnnotation(bottom=low, top=high, fill_color=colour, fill_alpha=0.12)
            box.line_color = None
            plot.add_layout(box)
    return _legend(plot) if plot.renderers else None


def _band(plot: Any, lines: list[Metrics], key: str, colour: str, label: str) -> None:
    """One standard error to each side, where it was recorded."""
    known = [m for m in lines if m.get(key) is not None and m.get(f"{key}_error")]
    positions, values = course(known, key)
    errors = [m[f"{key}_error"] for m in known]
    low = [v - e for v, e in zip(values, errors, strict=True)]
    high = [v + e for v, e in zip(values, errors, strict=True)]
    if positions and all(map(math.isfinite, [*low, *high])):
        plot.varea(positions, low, high, color=colour, alpha=0.2, legend_label=label)


def _precision_courses(runs: Runs) -> Any:
    """The precision of every tensor of the first run that recorded any."""
    for lines, _ in runs.values():
        positions, values = course(lines, "prior_precision")
        if len(positions) > 1:
            break
    else:
        return None
    unit = _unit(runs)
    tips = [("", "$name"), (unit, "@x"), ("precision", "@y{0.000e+0}")]
    plot = _empty(unit, tips, y_axis_type="log")
    _logarithmic(plot.yaxis)
    names = list(values[0])
    for name, (colour, dash) in zip(names, _styles(), strict=False):
        points = [value.get(name, math.nan) for value in values]
        x, y = _finite(positions, points)
        named = {"legend_label": name} if len(names) <= NAMED_TENSORS else {}
        plot.line(x, y, color=colour, line_dash=dash, line_width=2, name=name, **named)
    return _legend(plot)


def _precisions(runs: Runs) -> Any:
    """The last precision of every tensor, of every run."""
    found = {label: summary.get("prior_precision") for label, (_, summary) in runs.items()}
    names = list(dict.fromkeys(name for values in found.values() for name in values or ()))
    if not names:
        return None
    tips = [("", "$name"), ("tensor", "@y"), ("precision", "@x{0.000e+0}")]
    plot = _empty("prior precision", tips, y_range=names[::-1], x_axis_type="log")
    _logarithmic(plot.xaxis)
    plot.height = max(220, 90 + 22 * min(len(names), 40))
    for (label, values), (colour, _) in zip(found.items(), _styles(), strict=False):
        known = {n: v for n, v in (values or {}).items() if v > 0 and math.isfinite(v)}
        style = {"color": colour, "legend_label": label, "name": label}
        plot.scatter(list(known.values()), list(known), size=9, alpha=0.85, **style)
    if len(names) > NAMED_TENSORS:
        plot.yaxis.major_label_text_font_size = "0px"
        plot.yaxis.axis_label = "parameter tensor, input to output"
    return _legend(plot)


def _ranges(runs: Runs) -> Any:
    """Each range of the augmentation, of the first run that learned any."""
    for lines, _ in runs.values():
        positions, values = course(lines, "augmentation")
        if positions:
            break
    else:
        return None
    unit = _unit(runs)
    plot = _empty(unit, [("", "$name"), (unit, "@x"), ("range", "@y{0.000}")])
    for index, (name, (colour, dash)) in enumerate(zip(RANGES, _styles(), strict=False)):
        label = RANGE_LABELS[name] + (" (radians)" if name == "rotation" else "")
        x, y = _finite(positions, [abs(value[index]) for value in values])
        style = {"color": colour, "legend_label": label, "name": label}
        plot.line(x, y, line_dash=dash, line_width=2, **style)
    return _legend(plot)


def _reliability(runs: Runs) -> Any:
    """How often predictions are right, against how sure they are."""
    found = {
        (f"{label}: {kind}" if len(runs) > 2 else kind): bins
        for label, (_, summary) in runs.items()
        for kind, bins in (summary.get("reliability") or {}).items()
        if bins
    }
    if not found:
        return None
    tips = [("", "$name"), ("confidence", "@x{0.00}"), ("right", "@y{0.00}")]
    plot = _empty("confidence", tips, x_range=(0, 1.02), y_range=(0, 1.02))
    plot.yaxis.axis_label = "share that is right"
    plot.line([0, 1], [0, 1], color=GREY, line_dash="dotted", name="as sure as right")
    for (kind, bins), (colour, dash) in zip(found.items(), _styles(), strict=False):
        confidence, accuracy, share = (list(part) for part in zip(*bins, strict=True))
        style = {"color": colour, "legend_label": kind, "name": kind}
        plot.line(confidence, accuracy, line_width=2, line_dash=dash, **style)
        sizes = [4 + 18 * math.sqrt(part) for part in share]
        plot.scatter(confidence, accuracy, size=sizes, alpha=0.7, **style)
    return _legend(plot)


def _timing(runs: Runs) -> Any:
    """The parts of each run's time, as one bar."""
    labels = [label for label, (_, s) in runs.items() if s.get("seconds_weights") is not None]
    if not labels:
        return None
    parts = {
        name: [runs[label][1].get(key) or 0.0 for label in labels] for name, key in PARTS.items()
    }
    known = [sum(values) for values in zip(*parts.values(), strict=True)]
    totals = [runs[label][1].get("seconds_total") or 0.0 for label in labels]
    rest = [max(0.0, total - sum_) for total, sum_ in zip(totals, known, strict=True)]
    parts["evaluation, the rest"] = rest
    plot = _empty("seconds", [("", "$name: @$name{0.0} s"), ("", "@run")], y_range=labels[::-1])
    plot.height = 130 + 36 * len(labels)
    plot.hbar_stack(
        list(parts),
        y="run",
        height=0.6,
        color=[*COLOURS[: len(PARTS)], GREY],
        source={"run": labels, **parts},
        legend_label=list(parts),
    )
    plot.x_range.start = 0
    return _legend(plot)

"""The page itself: sentences, plots, pictures and tables put together."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from bokeh.embed import components
from bokeh.resources import Resources
from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from ntkmarglik.runs import checkpoint
from ntkmarglik.runs.page.plots import plots
from ntkmarglik.runs.page.words import learned, next_steps
from ntkmarglik.runs.report import Runs, quantities

FILE = "report.html"


@dataclass(frozen=True)
class Page:
    """What a page is about.

    runs: the first one is what its words are about. commands: by label. pictures: by caption, as
    addresses that hold them. finished: whether the first run came to its end. notes: what is
    missing, and why.
    """

    title: str
    runs: Runs
    commands: dict[str, str] = field(default_factory=dict)
    pictures: dict[str, str] = field(default_factory=dict)
    finished: bool = True
    notes: list[str] = field(default_factory=list)


def save(page: Page, path: Path) -> None:
    """Write the page; a full disk is reported and costs the page only."""
    try:
        checkpoint.replace(path, rendered(page).encode())
        print(f"report: {path}")
    except OSError as error:
        print(f"warning: {path} cannot be written ({error.strerror or error})", file=sys.stderr)


def rendered(page: Page) -> str:
    """The page as HTML, with everything it needs inside."""
    # what is not Markup is escaped: names and commands come from outside
    loader = PackageLoader("ntkmarglik.runs.page", ".")
    template = Environment(loader=loader, autoescape=True).get_template("page.html")
    drawn = plots(page.runs)
    script, places = components(drawn) if drawn else ("", {})
    library = Resources(mode="inline", components=["bokeh"]).render_js() if drawn else ""
    return template.render(
        page=page,
        learned=learned(page.runs),
        next_steps=next_steps(page.runs, finished=page.finished),
        rows=quantities(page.runs),
        plots={title: Markup(place) for title, place in places.items()},
        library=Markup(library),
        script=Markup(script),
        versions=_versions(page.runs),
    )


def _versions(runs: Runs) -> dict[str, str]:
    """By label, what a run was made with."""
    made = {}
    for label, (_, summary) in runs.items():
        parts = [f"{name} {value}" for name, value in (summary.get("versions") or {}).items()]
        if summary.get("commit"):
            parts.append(f"commit {summary['commit'][:12]}")
        made[label] = ", ".join(parts) or "unknown"
    return made

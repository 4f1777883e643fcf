"""Table 1 and Table 2 of the paper from runs, the published number beside each measured one.

python scripts/make_tables.py --table 1 runs/cifar runs/cifar-lila --format latex
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ntkmarglik.machine.exits import exit_code
from ntkmarglik.machine.files import source
from ntkmarglik.programs.classify.config import Config, parse
from ntkmarglik.programs.paper import experiments
from ntkmarglik.programs.paper.presets import CONFIGS
from ntkmarglik.runs import records
from ntkmarglik.runs.records import Row

Change = tuple[Any, Any]  # of a setting
Cell = tuple[str, str, str]  # estimator, data set, column
PUBLISHED = Path(__file__).parent / "published.csv"
DIGITS = {"log_marglik": 2, "test_log_likelihood": 2, "test_accuracy": 1}
REFERENCE = "kfac-n-c"  # times are relative to it
BLOCKS = {"none": "prior", "affine": "invariance"}
BLOCKS_OF_ROWS = {"subset", "outputs", "columns", "partition", "root", "root_samples"}
# settings by which rows and columns differ; the caption states the others
OF_THE_ROW = {"method", "dataset", "aug_block", "aug_blocks"} | BLOCKS_OF_ROWS


@dataclass(frozen=True)
class Layout:
    """What a table of the paper shows."""

    number: str
    title: str
    datasets: dict[str, str]
    columns: dict[str, str]
    experiments: dict[str, str]  # block -> experiment with its settings


LAYOUTS = {
    "1": Layout(
        "1",
        "Stochastic marginal likelihood estimators on CIFAR",
        {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"},
        {
            "log_marglik": "log q",
            "test_log_likelihood": "log lik.",
            "test_accuracy": "acc. [%]",
            "time": "time",
        },
        {"prior": "cifar", "invariance": "cifar-lila"},
    ),
    "2": Layout(
        "2",
        "Hyperparameter learning on TinyImageNet",
        {"tinyimagenet": "TinyImageNet"},
        {"test_log_likelihood": "log likelihood", "test_accuracy": "accuracy [%]"},
        {"prior": "tiny", "invariance": "tiny-lila"},
    ),
}


def rows_from(given: Sequence[Path]) -> list[Row]:
    """Runs in folders, and rows of csv files."""
    folders = records.run_folders(path for path in given if path.suffix != ".csv")
    return [records.run_row(folder) for folder in folders] + [
        row for path in given if path.suffix == ".csv" for row in records.read(path)
    ]


def body(layout: Layout, rows: list[Row], published: list[Row]) -> Iterator[list[str]]:
    """The lines of the table: block, estimator, and a cell per data set and column."""
    for block in layout.experiments:
        own = [row for row in rows if BLOCKS[row["augment"]] == block]
        printed = records.grouped([p for p in published if p["h"] == block], "estimator")
        found = list(dict.fromkeys(row["estimator"] for row in own))
        partner = {name: _partner(name, found) for (name,) in printed}
        extra = [label for label in found if label not in partner.values()]
        best = _best(layout, own)
        for name, label in [*partner.items(), *((label.upper(), label) for label in extra)]:
            runs = [row for row in own if row["estimator"] == label]
            yield [block, name, *_cells(layout, runs, own, printed.get((name,)), best)]


def _best(layout: Layout, block: list[Row]) -> set[Cell]:
    """The cells of a block in bold: those whose standard error overlaps with that of the best.

    So the paper has it, "if standard errors with best overlap from both sides"; numbers of a
    single seed have no error. Numbers are compared as they are printed.
    """
    found = set()
    for (dataset,), runs in records.grouped(block, "dataset").items():
        for column in layout.columns:
            scores = {
                label: _rounded(records.mean_and_error(numbers), DIGITS[column])
                for (label,), own in records.grouped(runs, "estimator").items()
                if (numbers := _performance(column, own))
            }
            if len(scores) > 1:
                mean, error = max(scores.values(), key=lambda score: score[0])
                found |= {
                    (label, dataset, column)
                    for label, (own, its_error) in scores.items()
                    if own + its_error >= mean - error
                }
    return found


def _rounded(score: tuple[float, float | None], digits: int) -> tuple[float, float]:
    mean, error = score
    return round(mean, digits), round(error or 0.0, digits)


def _performance(column: str, runs: list[Row]) -> list[float]:
    """Numbers of which the largest is best; none of a time, or of the evidence of MAP."""
    if column == "time" or (column == "log_marglik" and runs[0]["estimator"] == "map"):
        return []  # MAP maximises no evidence
    return [(100 if column == "test_accuracy" else 1) * v for v in records.values(runs, column)]


def _partner(name: str, found: list[str]) -> str | None:
    """The measured estimator of a published name: the same, but for how blocks are drawn."""
    exact = [label for label in found if label.lower() == name.lower()]
    return next(
        iter(exact or [label for label in found if label.lower().split()[0] == name.lower()]), None
    )


def _cells(
    layout: Layout,
    runs: list[Row],
    block: list[Row],
    published: list[Row] | None,
    best: set[Cell],
) -> Iterator[str]:
    for dataset in layout.datasets:
        own = [row for row in runs if row["dataset"] == dataset]
        reference = [
            r for r in block if r["dataset"] == dataset and r["estimator"].lower() == REFERENCE
        ]
        beside = next((p for p in published or [] if p["dataset"] == dataset), {})
        for column in layout.columns:
            measured, paper = _measured(column, own, reference), beside.get(column) or "-"
            if own and (own[0]["estimator"], dataset, column) in best:
                measured = f"**{measured}**"
            yield measured if measured == paper == "-" else f"{measured} ({paper})"


def _measured(column: str, own: list[Row], reference: list[Row]) -> str:
    if column == "time":
        if not own or not reference:
            return "-"
        return f"{100 * _seconds(own) / _seconds(reference):.0f}%"
    return records.as_text(_performance(column, own) if own else [], DIGITS[column])


def _seconds(rows: list[Row]) -> float:
    """Training time without evaluation, of the fastest run: other load only adds to it."""
    times = zip(
        records.values(rows, "seconds_weights"), records.values(rows, "seconds_hyper"), strict=True
    )
    return min(sum(parts) for parts in times)


def caption(layout: Layout, rows: list[Row]) -> str:
    """What is shown, and how the runs differ from the paper's."""
    parts = [
        f"{layout.title}: measured, mean ± standard error over seeds (in brackets: published); "
        "bold where the standard error overlaps with that of the best of the block."
    ]
    if "time" in layout.columns:
        parts.append("Time of training relative to KFAC-N-C, of the fastest seed each.")
    for block, experiment in layout.experiments.items():
        own = [row for row in rows if BLOCKS[row["augment"]] == block]
        parts.append(
            f"{block.capitalize()}: {_scale(own, experiment)}."
            if own
            else f"{block.capitalize()}: not run."
        )
    return " ".join(parts)


def _scale(rows: list[Row], experiment: str) -> str:
    """In what the runs of a block differ from the paper's settings."""
    of_runs = {id(row): _difference(_config(row), experiment) for row in rows}
    shared = _shared(list(of_runs.values()))
    changes, told = [experiments.described(shared)], set(shared)
    for (dataset,), own in records.grouped(rows, "dataset").items():
        only = {
            k: v for k, v in _shared([of_runs[id(row)] for row in own]).items() if k not in shared
        }
        changes.append(f"{dataset} {experiments.described(only)}" if only else "")
        told |= set(only)
    rest = sorted({name for changed in of_runs.values() for name in changed} - told)
    changes.append(f"in some runs also {', '.join(rest)}" if rest else "")
    reduced = (
        f"not the paper's size ({'; '.join(filter(None, changes))})"
        if any(changes)
        else "the paper's settings"
    )
    seeds = sorted(
        {
            len({m["seed"] for m in own})
            for own in records.grouped(rows, "dataset", "estimator").values()
        }
    )
    counted = " to ".join(str(n) for n in dict.fromkeys((seeds[0], seeds[-1])))
    return f"{reduced}, {counted} seed{'' if seeds[-1] == 1 else 's'}"


def _shared(differences: list[dict[str, Change]]) -> dict[str, Change]:
    """The changes that all of them have."""
    first, *others = differences
    return {
        name: change for name, change in first.items() if all(d.get(name) == change for d in others)
    }


def _difference(config: Config, experiment: str) -> dict[str, Change]:
    """Changed settings of a run; estimators of all data may have a settings file of their own."""
    own = f"{experiment}-full"
    whole = config.estimator.subset == 0 and (CONFIGS / f"{own}.yaml").exists()
    paper = experiments.load(experiment, own) if whole else experiments.load(experiment)
    return {
        name: change
        for name, change in experiments.difference(paper, config).items()
        if name not in OF_THE_ROW
    }


def _config(row: Row) -> Config:
    return parse(shlex.split(row["command"])[2:])


def markdown(layout: Layout, lines: list[list[str]], text: str) -> str:
    """The table in Markdown."""
    heads = [f"{d} {c}" for d in layout.datasets.values() for c in layout.columns.values()]
    shown = [["h", "estimator", *heads], ["---"] * (2 + len(heads)), *lines]
    return "\n".join(
        [f"**Table {layout.number}.** {text}", "", *(f"| {' | '.join(line)} |" for line in shown)]
    )


def latex(layout: Layout, lines: list[list[str]], text: str) -> str:
    """The table in LaTeX, for booktabs."""

    def escaped(cell: str) -> str:
        for plain, special in (
            ("%", r"\%"),
            ("_", r"\_"),
            ("±", r"$\pm$"),
            ("~", r"$\sim$"),
            ("->", r"$\to$"),
        ):
            cell = cell.replace(plain, special)
        return re.sub(r"\*\*(.+?)\*\*", r"\\textbf{\1}", cell)

    width = len(layout.columns)
    groups = " & ".join(
        rf"\multicolumn{{{width}}}{{c}}{{{name}}}" for name in layout.datasets.values()
    )
    heads = " & ".join(escaped(name) for _ in layout.datasets for name in layout.columns.values())
    content = []
    for position, (block, *cells) in enumerate(lines):
        if position and block != lines[position - 1][0]:
            content.append(r"\midrule")
        first = block if not position or block != lines[position - 1][0] else ""
        content.append(" & ".join(map(escaped, [first, *cells])) + r" \\")
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{escaped(text)}}}",
            rf"\begin{{tabular}}{{ll{'c' * width * len(layout.datasets)}}}",
            r"\toprule",
            rf" & & {groups} \\",
            rf"$h$ & estimator & {heads} \\",
            r"\midrule",
            *content,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
        ]
    )


def rendered(number: str, given: Sequence[Path], style: str = "markdown") -> str | None:
    """A table of the paper from run folders and csv files; None without a finished run for it."""
    layout = LAYOUTS[number]
    rows = [row for row in rows_from(given) if row["dataset"] in layout.datasets]
    if not rows:
        return None
    published = [p for p in records.read(PUBLISHED) if p["table"] == layout.number]
    lines = list(body(layout, rows, published))
    return {"markdown": markdown, "latex": latex}[style](layout, lines, caption(layout, rows))


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return exit_code(lambda: _print(arguments))


def _print(arguments: list[str] | None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "runs", nargs="+", type=source, help="run folders, folders of them, or csv files of runs"
    )
    parser.add_argument("--table", choices=tuple(LAYOUTS), default="1")
    parser.add_argument("--format", choices=("markdown", "latex"), default="markdown")
    given = parser.parse_args(arguments)
    text = rendered(given.table, given.runs, given.format)
    if text is None:
        datasets = LAYOUTS[given.table].datasets
        parser.error(f"there are no finished runs on {' or '.join(datasets)} in these folders")
    print(text)

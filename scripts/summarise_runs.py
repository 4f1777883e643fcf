"""One row per run folder as csv, and a Markdown table of means over seeds.

python scripts/summarise_runs.py runs/* --csv illustrations/data/methods.csv
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).parent.parent))

from ntkmarglik.config import Config

COLUMNS = (
    "dataset", "model", "n_data", "estimator", "augment", "seed", "test_accuracy", "test_log_likelihood", "test_ece",
    "train_log_likelihood", "log_marglik", "log_marglik_status", "seconds_weights", "seconds_hyper", "command",
)  # fmt: skip
SHOWN = ("test_log_likelihood", "test_accuracy", "test_ece", "train_log_likelihood", "log_marglik")


def row(folder: Path) -> dict[str, str | float]:
    """The summary of one run, with the command that made it."""
    summary = json.loads((folder / "summary.json").read_text())
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    known = {name: value for name, value in settings.items() if name in Config().flat()}
    # where it ran is not part of what it is
    command = (
        Config().updated(**{**known, "out": None, "data_root": Config().problem.data_root, "resume": False}).command()
    )
    s, k = settings["subset"] or "N", settings["outputs"] or "C"
    estimator = "map" if settings["method"] == "map" else f"{settings['method']}-{s}-{k}"
    if settings["root"] != "paper":
        estimator += f" ({settings['root']})"
    return {**summary, "estimator": estimator, "augment": settings["augment"], "command": command}


def folders(given: list[Path]) -> list[Path]:
    """Finished runs among the given folders, and their baselines."""
    found = [f for path in given for f in (path, path / "baseline")]
    return [f for f in found if (f / "summary.json").exists()]


def table(rows: list[dict]) -> str:
    """Means over seeds with standard errors, in Markdown."""
    groups: dict[tuple, list[dict]] = {}
    for r in rows:
        groups.setdefault((r["dataset"], r["model"], r["n_data"], r["estimator"], r["augment"]), []).append(r)
    headings = ("data, model", "estimator", "seeds", "test log-lik.", "test acc. %", "test ECE", "train log-lik.")
    lines = [f"| {' | '.join(headings)} | log evidence / datum |", "|---" * 8 + "|"]
    for (dataset, model, n_data, estimator, augment), members in groups.items():
        label = estimator + (", affine" if augment == "affine" else "")
        cells = [_mean([float(m[c]) * (100 if c == "test_accuracy" else 1) for m in members], c) for c in SHOWN]
        status = "" if members[0]["log_marglik_status"] == "approximation" else f" ({members[0]['log_marglik_status']})"
        lines.append(f"| {dataset}-{n_data}, {model} | {label} | {len(members)} | {' | '.join(cells)}{status} |")
    return "\n".join(lines)


def _mean(values: list[float], column: str) -> str:
    digits = 2 if column == "test_accuracy" else 3
    mean = f"{statistics.mean(values):.{digits}f}"
    if len(values) < 2:
        return mean
    return f"{mean} ± {statistics.stdev(values) / len(values) ** 0.5:.{digits}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    parser.add_argument("--csv", type=Path, help="also write one row per run here")
    arguments = parser.parse_args()
    rows = [row(folder) for folder in folders(arguments.runs)]
    if not rows:
        parser.error("none of these folders holds a finished run (summary.json)")
    if arguments.csv:
        with arguments.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
    print(table(rows))


if __name__ == "__main__":
    main()

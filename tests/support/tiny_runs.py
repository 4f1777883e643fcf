"""Runs of the runner that take a second, and what is compared of them."""

import shlex
from pathlib import Path

from ntkmarglik.runs.folder import read_summary
from ntkmarglik.runs.metrics import read_metrics

ROOT = Path(__file__).parents[2]
TINY = shlex.split(
    "--method ntk --model mlp --width 8 --n-data 64 --subset 16 --outputs 5 --epochs 3 --burnin 1 "
    "--frequency 1 --prior-steps 2 --aug-steps 2 --aug-samples 2 --batch-size 32"
)


def without_costs(metrics):
    """Metrics without time, memory and commit, which differ from run to run."""
    changing = ("seconds_", "peak_memory_bytes", "commit")
    return {k: v for k, v in metrics.items() if not k.startswith(changing)}


def results(path):
    """Everything a run and its baseline computed."""
    folders = [path, path / "baseline"] if (path / "baseline").exists() else [path]
    summaries = [without_costs(read_summary(folder)) for folder in folders]
    return summaries, [[without_costs(line) for line in read_metrics(folder)] for folder in folders]

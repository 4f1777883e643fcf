"""Cost of one estimate with its gradient, for every estimator, next to its target.

python benchmarks/estimators.py --only resnet --csv illustrations/data/speed.csv
python benchmarks/estimators.py --table illustrations/data/speed.csv

A csv file keeps the rows that are not measured now. `--table` prints what the documentation shows.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import measure
import torch
from measure import Case, elbo_step, estimate, full_batch, setup, training_step

from ntkmarglik.machine.exits import exit_code
from ntkmarglik.machine.files import target_file
from ntkmarglik.runs.records import read

PRIOR_STEPS = 50


@dataclass
class Row:
    """A measurement in `unit`s, megabytes, and what both should be (nan: no target)."""

    estimator: str
    units: float
    target_units: float
    unit: str
    peak_mb: float = math.nan
    target_mb: float = math.nan
    unit_ms: float = math.nan

    @property
    def verdict(self) -> str:
        missed = [
            f"{name} x{got / target:.2f}"
            for name, got, target in (
                ("time", self.units, self.target_units),
                ("memory", self.peak_mb, self.target_mb),
            )
            if got > target
        ]
        known = not math.isnan(self.target_units) or not math.isnan(self.target_mb)
        return ", ".join(missed) if missed else "met" if known else "-"

    def __str__(self) -> str:
        numbers = [
            f"{self.units:6.2f}",
            f"{self.target_units:6.1f}",
            f"{self.peak_mb:6.0f}",
            f"{self.target_mb:9.0f}",
        ]
        known = " ".join(numbers).replace("nan", "  -")
        return f"{self.estimator:<50} {known}  {self.verdict:<26} {self.unit}"


# Memory targets, in megabytes
# ------------------------------------------------------------------------------------


def rows_and_chunk(case: Case) -> float:
    """1.3 x 4 S K P bytes and one chunk: what a training step on a chunk's inputs needs."""
    return 1.3 * measure.row_store_mb(case) + measure.peak_mb(training_step, measure.chunk_of(case))


def training_steps(factor: float) -> Callable[[Case], float]:
    return lambda case: factor * measure.peak_mb(training_step, case)


def flat_in_copies(case: Case) -> float:
    """What the estimate needs for one copy, and 15 %."""
    return 1.15 * measure.peak_mb(estimate, replace(case, copies=1))


def at_most(megabytes: float) -> Callable[[Case], float]:
    return lambda case: megabytes


# The table
# --------------------------------------------------------------------------------------------------

TARGETS: dict[Case, tuple[float, Callable[[Case], float]]] = {
    Case("resnet", "ntk", 50): (2.2, rows_and_chunk),
    Case("resnet", "ntk", 150): (2.5, rows_and_chunk),
    Case("wrn", "ntk", 50): (1.9, rows_and_chunk),
    Case("resnet", "ntk", 50, 5): (3.0, flat_in_copies),
    Case("resnet", "ntk", 50, 10): (3.0, at_most(450)),
    Case("wrn", "ntk", 50, 5): (3.2, flat_in_copies),
    Case("wrn", "ntk", 50, 10): (3.2, flat_in_copies),
    Case("resnet", "kfac", 50, 5): (1.9, training_steps(1.5)),
    Case("wrn", "kfac", 50, 5): (1.7, training_steps(1.5)),
    Case("resnet", "kfac", 50, 1, kfac="expand"): (8, training_steps(2)),
    Case("resnet", "kfac", 50, 5, kfac="expand"): (2.5, training_steps(2)),
    Case("mininet", "ntk", 50, 1, None): (22, at_most(45)),
    Case("resnet", "ntk", 20, 1, None): (25, rows_and_chunk),
    Case("resnet", "kfac", 50, 0, None): (6, training_steps(2)),
    Case("resnet", "blockdiag", 50, 5): (5, at_most(300)),
    Case("resnet", "diag", 50, 5): (5, at_most(290)),
    Case("mininet", "ntk", 100, 5): (2.8, at_most(math.nan)),
    Case("mininet", "ntk", 150): (math.nan, rows_and_chunk),
    Case("mininet", "ntk", 150, 5): (math.nan, rows_and_chunk),
}
CACHED = (Case("resnet", "ntk", 150), Case("mininet", "ntk", 150))
ELBO = tuple(Case(model, "ntk", 50) for model in ("resnet", "wrn", "mininet"))
# with the data of two memory measurements: no fewer than the widest factor has inputs, from where
# on factors are sums; for many classes, as many as time allows
STREAMED = {
    Case("mininet", "kfac", 500, 2, None): (1200, 2400),
    Case("resnet", "kfac", 100, 2, None): (1200, 2400),
    Case("resnet", "kfac", 50, 1, None, classes=100): (200, 400),
}


def block(case: Case, memory: bool) -> Row:
    """One estimate on a block, in training steps on the same inputs."""
    target, target_mb = TARGETS[case]
    seconds, step = measure.timed(case)
    row = Row(str(case), seconds / step, target, "training step", unit_ms=1000 * step)
    if memory:
        row.peak_mb, row.target_mb = measure.peak_mb(estimate, case), target_mb(case)
    return row


def _short(case: Case) -> str:
    return f"ntk-{case.subset}-1 {case.model}"


def inverted(n: int) -> Callable[[], None]:
    """The algebra that no prior step avoids, as often: a Cholesky factor [n, n] and the inverse."""
    matrix = torch.randn(n, n, dtype=torch.float64)
    matrix = torch.eye(n, dtype=torch.float64) + matrix @ matrix.mT / n

    def inverses() -> None:
        for _ in range(PRIOR_STEPS):
            torch.cholesky_inverse(torch.linalg.cholesky(matrix))

    return inverses


def cached(case: Case, memory: bool) -> Iterator[Row]:
    """A further prior step on a cached block in inverses, and 50 in passes over the block."""
    s = setup(case)
    s.ml.describe(s.x)
    evidence = s.ml.cached(s.x, s.y)
    optimizer = torch.optim.Adam(s.ml.hyperparameters(), lr=0.01)

    def prior_steps() -> None:
        for _ in range(PRIOR_STEPS):
            optimizer.zero_grad()
            (-evidence().total / s.ml.n_data).backward()
            optimizer.step()

    inverses = inverted(case.subset)
    steps, inverse, fit = measure.cpu_seconds(prior_steps, inverses, lambda: s.ml.cached(s.x, s.y))
    name = _short(case)
    yield Row(
        f"further prior step, {name}",
        steps / inverse,
        3.0,
        f"Cholesky and inverse of {case.subset} x {case.subset}",
        unit_ms=1000 * inverse / PRIOR_STEPS,
    )
    target = math.nan if case.model == "mininet" else 1.0
    yield Row(
        f"{PRIOR_STEPS} prior steps, {name}",
        steps / fit,
        target,
        "pass over the block",
        unit_ms=1000 * fit,
    )


def _elbo_name(case: Case) -> str:
    return f"step of the data-emphasised ELBO, {case.subset} data, {case.model}"


def elbo(case: Case, memory: bool) -> Row:
    """A step of the data-emphasised ELBO, which trains the weights, in plain training steps."""
    seconds, step = measure.timed(case, elbo_step)
    row = Row(_elbo_name(case), seconds / step, 1.2, "training step", unit_ms=1000 * step)
    if memory:  # two more copies of the weights at most: noise and perturbed weights
        copies = 3 * 4e-6 * sum(p.numel() for p in setup(case).model.parameters())
        row.peak_mb = measure.peak_mb(elbo_step, case)
        row.target_mb = measure.peak_mb(training_step, case) + copies
    return row


def _streamed_name(case: Case) -> str:
    return f"full data, kfac-{case.kfac}-N-C {case.model}, A={case.copies}, C={case.classes}"


def streamed(case: Case, few: int, many: int, memory: bool) -> Row:
    """All data as one block, in (3 + C) plain forward passes per datum and its copies."""
    s = setup(case)
    inputs = s.x[: measure.BATCH].repeat_interleave(case.copies, 0)

    def forward() -> None:
        with torch.no_grad():
            s.model(inputs)

    seconds, f = measure.cpu_seconds(full_batch(case), forward)
    unit = (3 + case.classes) * f * case.inputs / len(inputs)
    name = _streamed_name(case)
    row = Row(
        name,
        seconds / unit,
        1.2,
        f"(3 + C) F per datum; MB: N={many}, target: N={few}",
        unit_ms=1000 * unit,
    )
    if memory:  # independent of N, within what repetitions differ
        row.peak_mb = measure.peak_mb(full_batch, replace(case, subset=many))
        row.target_mb = 1.1 * measure.peak_mb(full_batch, replace(case, subset=few))
    return row


def rows(only: str, memory: bool) -> Iterator[Row]:
    for case in TARGETS:
        if only in str(case):
            yield block(case, memory)
    for case in CACHED:
        if only in f"further prior step, {PRIOR_STEPS} prior steps, {_short(case)}":
            yield from cached(case, memory)
    for case in ELBO:
        if only in _elbo_name(case):
            yield elbo(case, memory)
    for case, data in STREAMED.items():
        if only in _streamed_name(case):
            yield streamed(case, *data, memory)


def table(path: Path) -> str:
    """A csv file of rows in Markdown."""
    headings = ("estimate and gradient", "time", "target", "memory, MB", "target", "unit of time")
    return measure.markdown(headings, [_cells(row) for row in read(path)])


def _cells(row: dict[str, str]) -> list[str]:
    times = [measure.rounded(row[key], 2) for key in ("units", "target_units")]
    memory = [measure.rounded(row[key], 0) for key in ("peak_mb", "target_mb")]
    return [row["estimator"], *times, *memory, f"{row['unit']}, {_milliseconds(row['unit_ms'])}"]


def _milliseconds(text: str) -> str:
    number = float(text)
    return f"{number:.0f} ms" if number >= 100 else f"{number:.2g} ms"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", help="measure only what has this in its name, as 'full data' or 'wrn'"
    )
    parser.add_argument("--csv", type=target_file, help="also write the rows here")
    parser.add_argument("--no-memory", action="store_true", help="skip the memory measurements")
    parser.add_argument("--table", type=Path, help="measure nothing, print such a file")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(arguments.table))
        return
    print(
        f"{'estimator':<50} {'units':>6} {'target':>6} {'MB':>6} {'target MB':>9}  "
        f"{'verdict':<26} unit"
    )
    found = []
    for row in rows(arguments.only, not arguments.no_memory):
        found.append(vars(row) | {"verdict": row.verdict})
        print(row, flush=True)
        if arguments.csv:
            measure.update_csv(arguments.csv, found, "estimator")


if __name__ == "__main__":
    sys.exit(exit_code(main))

"""Cost of one estimate with its gradient, for every estimator: `python benchmarks/estimators.py [--only TEXT]`."""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

import measure
from measure import Case

TARGETS: dict[Case, float] = {
    Case("resnet", "ntk", 50): 2.2,
    Case("resnet", "ntk", 150): 2.5,
    Case("wrn", "ntk", 50): 1.9,
    Case("resnet", "ntk", 50, 5): 3.0,
    Case("resnet", "ntk", 50, 10): 3.0,
    Case("wrn", "ntk", 50, 5): 3.2,
    Case("resnet", "kfac", 50, 5): 2.2,
    Case("wrn", "kfac", 50, 5): 1.7,
    Case("resnet", "kfac", 50, 1, kfac="expand"): 10,
    Case("mininet", "ntk", 50, 1, None): 22,
    Case("resnet", "ntk", 20, 1, None): 25,
    Case("resnet", "kfac", 50, 0, None): 6,
    Case("resnet", "blockdiag", 50, 5): 5,
    Case("resnet", "diag", 50, 5): 5,
    Case("mininet", "ntk", 150): float("nan"),
    Case("mininet", "ntk", 150, 5): float("nan"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="measure only cases whose name contains this")
    parser.add_argument("--csv", type=Path, help="also write the table here")
    parser.add_argument("--memory", type=int, help=argparse.SUPPRESS)  # used internally: the case to run alone
    parser.add_argument("--no-memory", action="store_true", help="skip the memory measurements")
    arguments = parser.parse_args()
    cases = list(TARGETS)
    if arguments.memory is not None:
        prepared = measure.setup(cases[arguments.memory])
        prepared.ml.describe(prepared.x)  # planning is not what is measured
        print(measure.peak_above_start(lambda: measure.estimate(prepared)))
        return
    rows = []
    print(f"{'estimator':<44} {'units':>6} {'target':>6} {'MB':>7} {'4SKP MB':>8} {'step ms':>8}")
    for index, case in enumerate(cases):
        if arguments.only not in str(case):
            continue
        prepared = measure.setup(case)
        step = measure.training_step(prepared, case.copies)
        units = measure.cpu_seconds(lambda s=prepared: measure.estimate(s), 3) / step
        memory = float("nan")
        if not arguments.no_memory:
            memory = float(measure.in_fresh_process("estimators.py", "--memory", str(index))) / 1e6
        parameters = sum(p.numel() for p in prepared.model.parameters())
        store = 4 * case.subset * (case.outputs or 10) * parameters / 1e6
        rows.append([str(case), units, TARGETS[case], memory, store, 1000 * step])
        print(
            f"{case!s:<44} {units:6.2f} {TARGETS[case]:6.1f} {memory:7.0f} {store:8.0f} {1000 * step:8.0f}", flush=True
        )
    if arguments.csv:
        with arguments.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["estimator", "units", "target_units", "peak_mb", "row_store_mb", "training_step_ms"])
            writer.writerows(rows)


if __name__ == "__main__":
    main()

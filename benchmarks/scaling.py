"""Time and memory of an estimate and its gradient against S, A, N and C.

python benchmarks/scaling.py --plot     (writes illustrations/data/scaling.csv, draws
illustrations/scaling.png)

Predicted, at a fixed chunk: time grows with S (and S^2 P), with A, not with N, and with C only if
all outputs are in the block (3 + C forward passes for KFAC); memory grows with S alone, and that
for the NTK only.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path

import measure
from measure import Case

from ntkmarglik.machine.exits import exit_code
from ntkmarglik.machine.files import target_file

ROOT = Path(__file__).parent.parent
RANGES = {
    "S": (25, 50, 100, 200),
    "A": (1, 2, 5, 10),
    "N": (10**3, 10**4, 10**5, 10**6),
    "C": (2, 10, 30, 100),
}
# inputs: a chunk that grew with S A, as the library's choice does for small models, would hide the
# slopes
CHUNK = 50
DATA = ROOT / "illustrations" / "data" / "scaling.csv"


def sweeps(small: bool) -> list[tuple[str, int, Case]]:
    """(axis, value, case) for every measurement; all cases learn the six affine ranges too."""
    models = ("mininet",) if small else ("mininet", "resnet")
    s, a, n, c = (
        ((2, 4), (1, 2), (10, 1000), (2, 3)) if small else (*(RANGES[axis] for axis in "SANC"),)
    )
    block, wide = (4, "mininet") if small else (50, "resnet")
    found = []
    for model in models:
        for structure in ("ntk", "kfac"):
            case = Case(model, structure, block, 1, chunk=CHUNK)
            found += [("S", value, replace(case, subset=value)) for value in s]
            found += [("A", value, replace(case, copies=value)) for value in a]
        found += [("N", value, Case(model, "ntk", 2 * block, 1, n_data=value)) for value in n]
    for structure, outputs in (("ntk", 1), ("kfac", 1), ("kfac", None)):
        found += [
            ("C", value, Case(wide, structure, block // 2, 1, outputs, classes=value))
            for value in c
        ]
    return found


def measured(axis: str, value: int, case: Case, memory: bool) -> dict[str, object]:
    seconds, step = measure.timed(case)
    peak = measure.peak_mb(measure.estimate, case) if memory else math.nan
    return {
        "axis": axis,
        "value": value,
        "model": case.model,
        "estimator": f"{case.structure}-S-{'C' if case.outputs is None else case.outputs}",
        "case": str(case),
        "cpu_seconds": seconds,
        "units": seconds / step,
        "peak_mb": peak,
        "command": f'python benchmarks/scaling.py --axes {axis} --only "{case}"',
    }


def flags() -> argparse.Namespace:
    """The flags of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--axes", nargs="+", choices=list("SANC"), default=list("SANC"), help="what to vary"
    )
    parser.add_argument("--only", default="", help="measure only cases whose name contains this")
    parser.add_argument(
        "--small", action="store_true", help="a few data points of MiniNet, to see that it runs"
    )
    parser.add_argument("--no-memory", action="store_true", help="skip the memory measurements")
    parser.add_argument(
        "--csv", type=target_file, help=f"write here (a whole run: {DATA.relative_to(ROOT)})"
    )
    parser.add_argument(
        "--plot",
        type=target_file,
        nargs="?",
        const=ROOT / "illustrations" / "scaling.png",
        help="draw here",
    )
    return parser.parse_args()


def main() -> None:
    arguments = flags()
    if arguments.small:
        measure.SHORT = 0.0
    rows = []
    print(f"{'axis':<4} {'case':<46} {'CPU s':>8} {'units':>6} {'MB':>6}")
    for axis, value, case in sweeps(arguments.small):
        if axis in arguments.axes and arguments.only in str(case):
            rows.append(measured(axis, value, case, not arguments.no_memory))
            numbers = "{cpu_seconds:8.3f} {units:6.2f} {peak_mb:6.0f}".format(**rows[-1])  # type: ignore[str-format]
            print(f"{axis:<4} {case!s:<46} {numbers}", flush=True)
    whole = not (
        arguments.small or arguments.only or arguments.no_memory or len(arguments.axes) < 4
    )
    # a part does not replace the committed whole
    target = arguments.csv or (DATA if whole else None)
    if target:
        measure.write_csv(target, rows)
    if arguments.plot:
        from ntkmarglik.programs.paper.figures.scaling import scaling

        scaling(target or DATA, arguments.plot)


if __name__ == "__main__":
    sys.exit(exit_code(main))

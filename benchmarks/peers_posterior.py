"""Fit and predictions of `laplace_marglik.compat.Laplace` beside laplace-torch with curvlinops.

`python benchmarks/peers.py --posterior [--only TEXT] [--csv FILE]` runs it. Both are given the same
network, data and batches, in one process and in turns. Predictions are by the probit link, after
the prior precision was set anew, so that what either library prepares for a prior is in them. What
would take longer than LIMIT is measured on fewer data and scaled linearly. Memory is the peak of a
fresh process above its start, for one batch of SMALL and of LARGE data points.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import measure
from measure import Case, Operation, setup
from torch.utils.data import DataLoader, TensorDataset

from laplace_marglik.compat import Laplace

LIMIT = 20.0  # CPU seconds of one operation
FEWEST = 5  # data points of the first look at how long it takes
SMALL, LARGE = 10, 40  # data points of a batch whose memory is measured
STRUCTURES = {"kfac": "kron", "diag": "diag"}  # in laplace-torch's words
LIBRARIES = ("ours", "theirs")


def _laplace(library: str) -> Callable[..., Any]:
    """The constructor of an approximation."""
    if library == "ours":
        return Laplace
    from laplace import Laplace as Theirs
    from laplace.curvature import CurvlinopsGGN

    return partial(Theirs, backend=CurvlinopsGGN)


def _quietly(function: Callable[[], object]) -> Callable[[], object]:
    """Warnings of another library are not ours to mend."""

    def call() -> object:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function()

    return call


def _fit(case: Case, library: str) -> Callable[[], object]:
    """A new approximation, fitted to all data of a case."""
    s = setup(case)
    s.model.eval()  # as a trained network is
    make = _laplace(library)
    batch = case.chunk or measure.BATCH

    def fit(n: int) -> Any:
        la = make(s.model, "classification", case.weights, STRUCTURES[case.structure])
        la.fit(DataLoader(TensorDataset(s.x[:n], s.y[:n]), batch_size=batch))
        return la

    _quietly(lambda: fit(2))()  # what libraries import and allocate at their first call
    return _quietly(lambda: fit(case.subset))


def _predict(case: Case, library: str) -> Callable[[], object]:
    """Predictions of all data of a case, of an approximation that was fitted to a few of them."""
    la: Any = _fit(replace(case, subset=FEWEST), library)()
    batches = setup(case).x.split(case.chunk or measure.BATCH)

    def predict() -> object:
        la.prior_precision = 1.0
        return [la(x, link_approx="probit") for x in batches]

    return _quietly(predict)


def fit_ours(case: Case) -> Callable[[], object]:
    return _fit(case, "ours")


def fit_theirs(case: Case) -> Callable[[], object]:
    return _fit(case, "theirs")


def predict_ours(case: Case) -> Callable[[], object]:
    return _predict(case, "ours")


def predict_theirs(case: Case) -> Callable[[], object]:
    return _predict(case, "theirs")


# in the order of LIBRARIES
OPERATIONS: dict[str, tuple[Operation, Operation]] = {
    "fit": (fit_ours, fit_theirs),
    "predict": (predict_ours, predict_theirs),
}


def cases(small: bool) -> list[tuple[str, Case]]:
    """Every operation and case of the table."""
    if small:
        return [("fit", _case("mininet", 4)), ("predict", _case("mininet", 4))]
    found = []
    for model, n_fit, plain in (("mininet", 1000, False), ("resnet", 100, True)):
        for weights in ("all", "last_layer"):
            for structure in STRUCTURES:
                case = _case(model, n_fit, structure, weights, plain=plain)
                found += [("fit", case), ("predict", replace(case, subset=1000))]
    return found


def _case(
    model: str, n: int, structure: str = "kfac", weights: str = "last_layer", plain: bool = False
) -> Case:
    return Case(model, structure, n, kfac="expand", n_data=n, plain=plain, weights=weights)


@dataclass
class Measured:
    """Seconds and memory of one library, or why there are none.

    Args:
        seconds: CPU seconds of the operation.
        mb: peaks for a batch of SMALL and of LARGE data points.
        note: why not, or of how many data points the time was scaled up.
    """

    seconds: float = math.nan
    mb: tuple[float, float] = (math.nan, math.nan)
    note: str = ""


def affordable(operation: Operation, case: Case) -> tuple[int, float]:
    """How many data points of a case take less than LIMIT, and the seconds of the fewest."""
    few = replace(case, subset=min(FEWEST, case.subset))
    call = operation(few)
    start = time.process_time()
    call()
    seconds = time.process_time() - start
    fitting = int(LIMIT / seconds * few.subset) if seconds else case.subset
    sizes = [n for n in (case.subset, 100, few.subset) if n <= min(case.subset, fitting)]
    return (sizes[0] if sizes else few.subset), seconds


def compare(name: str, case: Case, memory: bool) -> dict[str, object]:
    """One row of the table: both libraries on one operation."""
    results = {library: Measured() for library in LIBRARIES}
    calls: dict[str, tuple[int, Callable[[], object]]] = {}
    for library, operation in zip(LIBRARIES, OPERATIONS[name], strict=True):
        try:
            n, seconds = affordable(operation, case)
            if n <= FEWEST < case.subset:
                results[library] = _scaled(case, n, seconds)
            else:
                calls[library] = n, operation(replace(case, subset=n))
            if memory:
                results[library].mb = _memory(operation, case)
        except Exception as error:  # whatever another library raises is the result here
            reason = (str(error).splitlines() or [""])[0]
            results[library] = Measured(note=f"{type(error).__name__}: {reason}")
            calls.pop(library, None)
    times = measure.cpu_seconds(*(call for _, call in calls.values()))
    for (library, (n, _)), seconds in zip(calls.items(), times, strict=True):
        results[library] = replace(_scaled(case, n, seconds), mb=results[library].mb)
    return _row(name, case, results)


def _scaled(case: Case, n: int, seconds: float) -> Measured:
    note = "" if n == case.subset else f"{n} of {case.subset} data points, scaled"
    return Measured(seconds * case.subset / n, note=note)


def _memory(operation: Operation, case: Case) -> tuple[float, float]:
    small, large = (
        measure.peak_mb(operation, replace(case, subset=n, chunk=n)) for n in (SMALL, LARGE)
    )
    return small, large


def _row(name: str, case: Case, results: dict[str, Measured]) -> dict[str, object]:
    ours, theirs = (results[library] for library in LIBRARIES)
    row: dict[str, object] = {
        "model": case.model,
        "weights": case.weights,
        "structure": STRUCTURES[case.structure],
        "operation": name,
        "data": case.subset,
        "ours_seconds": ours.seconds,
        "theirs_seconds": theirs.seconds,
        "ratio": ours.seconds / theirs.seconds,
    }
    for library in LIBRARIES:
        for n, mb in zip((SMALL, LARGE), results[library].mb, strict=True):
            row[f"{library}_mb_{n}"] = mb
    return row | {f"{library}_note": results[library].note for library in LIBRARIES}


def print_row(row: dict[str, object]) -> None:
    """A line for the terminal."""
    case = f"{row['model']} {row['weights']} {row['structure']} {row['operation']} {row['data']}"
    numbers = f"{row['ours_seconds']:9.3f} {row['theirs_seconds']:9.3f} {row['ratio']:7.3f}"
    peaks = " ".join(
        f"{row[f'{library}_mb_{n}']:6.0f}" for library in LIBRARIES for n in (SMALL, LARGE)
    )
    notes = "; ".join(
        f"{library}: {row[f'{library}_note']}" for library in LIBRARIES if row[f"{library}_note"]
    )
    print(f"{case:<40} {numbers} {peaks}  {notes}", flush=True)


def table(small: bool, only: str, memory: bool) -> list[dict[str, object]]:
    """All rows, printed as they come."""
    print(f"{'case':<40} {'ours s':>9} {'theirs s':>9} {'ratio':>7}   MB of ours, of theirs")
    rows = []
    for name, case in cases(small):
        if only in f"{name} {case.model} {case.weights} {case.structure}":
            rows.append(compare(name, case, memory))
            print_row(rows[-1])
    return rows

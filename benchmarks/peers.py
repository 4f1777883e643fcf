"""Ours, laplace-torch and torch.func: `python benchmarks/peers.py [--only TEXT] [--csv FILE]`.

`--table FILE` prints such a file as the documentation shows it.

Every method computes an evidence and its gradient in one log precision per weight tensor; only ours
and torch.func also in the six affine ranges: laplace-torch gives no gradient in the augmentation.
Equal log-determinants are equal estimators; with affine copies the draws differ. kfac-expand-N-C is
what laplace-torch computes (its KronLaplace). `--posterior` compares fits and predictions instead.
"""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import measure
import peers_posterior
import torch
from measure import Case, Operation, estimate, full_batch, setup
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap

from ntkmarglik.machine.exits import exit_code
from ntkmarglik.machine.files import target_file
from ntkmarglik.runs.records import read

MISSING = "not installed: pip install --no-deps -r requirements-laplace.txt"


def naive(case: Case) -> Callable[[], object]:
    """NTK evidence from torch.func: per-sample Jacobians, Gram matrices, autograd through both."""
    s = setup(case)
    prior = s.ml.prior
    augment = s.ml.augment
    c = case.classes
    n = case.subset
    weights = {name: w.detach() for name, w in s.ml.weights.items()}

    def outputs(w: dict[str, Tensor], copies: Tensor) -> Tensor:
        return functional_call(s.model, w, (copies,)).mean(0)

    def call() -> float:
        copies = s.x.unsqueeze(1) if augment is None else augment(s.x)
        f = vmap(outputs, (None, 0))(weights, copies)
        p = f.softmax(1)
        if case.outputs == 1:
            jacobian = vmap(grad(lambda w, x: outputs(w, x)[0]), (None, 0))(weights, copies)
            root = (p[:, 0] * (1 - p[:, 0])).sqrt().view(n, 1, 1)
        else:
            jacobian = vmap(jacrev(outputs), (None, 0))(weights, copies)
            root = p.sqrt().diag_embed() - p.unsqueeze(2) * p.sqrt().unsqueeze(1)
        gram = torch.zeros(())
        for name, theta in zip(weights, prior.log_precision, strict=True):
            rows = torch.einsum(
                "nkr,nkp->nrp", root, jacobian[name].reshape(n, root.shape[1], -1)
            ).flatten(0, 1)
            gram = gram + (-theta).exp().to(rows.dtype) * (rows @ rows.mT)
        log_det = s.ml.n_data / n * c / root.shape[1] * torch.logdet(torch.eye(len(gram)) + gram)
        log_likelihood = -s.ml.n_data * nn.functional.cross_entropy(f, s.y)
        (log_likelihood - 0.5 * prior.scatter(prior.squares(weights)) - 0.5 * log_det).backward()
        return log_det.item()

    return call


def _kron_laplace(case: Case, backend: str) -> Callable[[], object]:
    """laplace-torch's Kronecker-factored evidence of all data, and its gradient in the prior."""
    from laplace import KronLaplace, curvature

    s = setup(replace(case, n_data=case.subset))
    data = torch.utils.data.TensorDataset(s.x, s.y)

    def call() -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            laplace = KronLaplace(s.model, "classification", backend=getattr(curvature, backend))
            laplace.fit(torch.utils.data.DataLoader(data, batch_size=measure.BATCH))
            log_precision = torch.zeros(laplace.n_layers, requires_grad=True)
            laplace.log_marginal_likelihood(log_precision.exp()).backward()
        return laplace.log_det_ratio.item()

    return call


def curvlinops(case: Case) -> Callable[[], object]:
    return _kron_laplace(case, "CurvlinopsGGN")


def backpack(case: Case) -> Callable[[], object]:
    return _kron_laplace(case, "BackPackGGN")


def asdl(case: Case) -> Callable[[], object]:
    return _kron_laplace(case, "AsdlGGN")


THEIRS: dict[str, Operation] = {
    "laplace-torch, Curvlinops": curvlinops,
    "laplace-torch, BackPack": backpack,
    "laplace-torch, Asdl": asdl,
}


def table(model: str, n: int, few: int, copies: int) -> list[tuple[str, Operation, Case]]:
    """Methods to compare on one model: n data points, fewer for all outputs of the NTK."""
    everything = Case(model, "kfac", n, 0, None, "expand", n_data=n)
    ntk, all_outputs = Case(model, "ntk", n, n_data=n), Case(model, "ntk", few, 0, None, n_data=few)
    kfac = Case(model, "kfac", n, n_data=n)
    rows: list[tuple[str, Operation, Case]] = [("ours, full_batch", full_batch, everything)]
    rows += [(name, operation, everything) for name, operation in THEIRS.items()]
    rows += [("ours, full_batch", full_batch, replace(everything, copies=copies))]
    for case in (ntk, replace(ntk, copies=copies), all_outputs, replace(all_outputs, copies=1)):
        rows += [("ours", estimate, case), ("torch.func", naive, case)]
    for case in (kfac, replace(kfac, copies=copies), replace(kfac, outputs=None)):
        rows.append(("ours", estimate, case))
    return rows


def plain(model: str, n: int) -> list[tuple[str, Operation, Case]]:
    """The comparison with laplace-torch on the layers its backends know."""
    case = Case(model, "kfac", n, 0, None, "expand", n_data=n, plain=True)
    return [
        ("ours, full_batch", full_batch, case),
        *((name, operation, case) for name, operation in THEIRS.items()),
    ]


def compare(name: str, operation: Operation, case: Case, memory: bool) -> dict[str, object]:
    """One row of the table; a method that fails says why."""
    row: dict[str, object] = {"method": name, "estimator": str(case)}
    nothing = dict.fromkeys(["units", "cpu_seconds", "peak_mb", "log_det_ratio"], math.nan)
    try:
        call = operation(case)
        log_det = call()
        log_det = torch.as_tensor(getattr(log_det, "log_det_ratio", log_det)).item()
        seconds, step = measure.timed(case, lambda _: call)
        peak = measure.peak_mb(operation, case) if memory else math.nan
        return (
            row
            | dict(zip(nothing, (seconds / step, seconds, peak, log_det), strict=True))
            | {"note": ""}
        )
    except ImportError:
        return row | nothing | {"note": MISSING}
    except Exception as error:  # whatever another library raises is the result here
        return row | nothing | {"note": f"{type(error).__name__}: {str(error).splitlines()[0]}"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", help="compare only estimators or methods whose name contains this"
    )
    parser.add_argument(
        "--small", action="store_true", help="a few data points of MiniNet, to see that it runs"
    )
    parser.add_argument("--no-memory", action="store_true", help="skip the memory measurements")
    parser.add_argument("--csv", type=target_file, help="also write the table here")
    parser.add_argument(
        "--posterior", action="store_true", help="fits and predictions beside laplace-torch"
    )
    parser.add_argument("--table", type=Path, help="measure nothing, print such a file")
    arguments = parser.parse_args()
    if arguments.table:
        print(as_markdown(arguments.table))
        return
    if arguments.small:
        measure.SHORT = 0.0
    memory = not arguments.no_memory
    if arguments.posterior:
        rows = peers_posterior.table(arguments.small, arguments.only, memory)
        keys = ("model", "weights", "structure", "operation")
    else:
        rows = evidences(arguments.small, arguments.only, memory)
        keys = ("estimator", "method")
    if arguments.csv:
        measure.update_csv(arguments.csv, rows, *keys)


def as_markdown(path: Path) -> str:
    """A csv file of evidences, where a method that failed says why."""
    headings = ("estimator", "method", "training steps", "memory, MB", "log-determinant")
    return measure.markdown(headings, [_cells(row) for row in read(path)])


def _cells(row: dict[str, str]) -> list[str]:
    names = [row["estimator"], row["method"]]
    if row["note"]:
        return [*names, row["note"], "", ""]
    digits = {"units": 2, "peak_mb": 0, "log_det_ratio": 1}
    return [*names, *(measure.rounded(row[key], digits[key]) for key in digits)]


def evidences(small: bool, only: str, memory: bool) -> list[dict[str, object]]:
    """All rows of the table of evidences, printed as they come."""
    cases = table("mininet", 100, 50, 5) + table("resnet", 50, 10, 2) + plain("resnet", 50)
    if small:
        cases = table("mininet", 4, 2, 2)
    print(f"{'estimator':<52} {'method':<26} {'units':>7} {'CPU s':>7} {'MB':>6} {'log-det':>10}")
    rows = []
    for name, operation, case in cases:
        if only not in str(case) and only not in name:
            continue
        row = compare(name, operation, case, memory)
        rows.append(row)
        label = f"{row['estimator']:<52} {name:<26} "
        cost = f"{row['units']:7.2f} {row['cpu_seconds']:7.3f} {row['peak_mb']:6.0f}"
        numbers = f"{cost} {row['log_det_ratio']:10.3f}"
        print(label + (str(row["note"]) or numbers), flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(exit_code(main))

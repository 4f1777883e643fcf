"""When does the posterior help? `python benchmarks/calibration.py [--studies mnist cifar10]`.

Networks with a learned prior (conditioned blocks of 200 rows, three seeds) predict their test data
by the mode and by posteriors: kfac and ntk of all weights, full of the last layer, each by probit,
bridge and samples. Log-likelihood and calibration error on the first 2,000 test images; area under
the ROC curve of the entropy against images of another kind. Needs the data sets under --data-root.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import measure
import torch
from conditioned import CIFAR, MNIST, ONE_BLOCK, Network
from sklearn.metrics import roc_auc_score
from torch import Tensor

from laplace_marglik import LaplacePosterior, MarginalLikelihood
from ntkmarglik.learn.evaluate import metrics
from ntkmarglik.machine.exits import exit_code
from ntkmarglik.machine.files import target_file
from ntkmarglik.problem.data import load
from ntkmarglik.programs.classify.config import parse
from ntkmarglik.programs.classify.run import run

KINDS = ("probit", "bridge", "mc")
SAMPLES = 100  # of Monte Carlo predictions
INDUCING = 500  # rows of the ntk posterior
BATCH = 250


@dataclass(frozen=True)
class Study:
    """A training set, images of another kind, and how the network is trained."""

    settings: str
    dataset: str
    others: str


STUDIES = {
    "mnist": Study(MNIST, "mnist", "fmnist"),
    "cifar10": Study(CIFAR, "cifar10", "cifar100"),
}


def network_of(name: str, seed: int, runs: Path, data_root: Path) -> Network:
    """A network of the study, trained if it is not there yet."""
    path = runs / f"{name}-{seed}"
    blocks = f"{ONE_BLOCK} --subset 200 --seed {seed}"
    command = f"{STUDIES[name].settings} {blocks} --no-baseline --predict none --resume"
    run(parse([*command.split(), "--out", str(path), "--data-root", str(data_root)]))
    return Network.of_run(name, path)


def posteriors(network: Network) -> Iterator[tuple[str, LaplacePosterior]]:
    """Of several structures and weights, at the learned prior."""
    batches = list(zip(network.x.split(BATCH), network.y.split(BATCH), strict=True))
    last = list(network.prior.groups)[-2:]
    for name, structure, weights in (
        ("kfac", "kfac", None),
        (f"ntk, {INDUCING} rows", "ntk", None),
        ("last layer, full", "full", last),
    ):
        ml = MarginalLikelihood(
            network.model,
            "classification",
            n_data=network.n_data,
            prior=network.prior,
            structure=structure,
        )
        inducing = INDUCING if structure == "ntk" else None
        yield name, ml.posterior(batches, weights=weights, inducing=inducing)


def entropy(p: Tensor) -> Tensor:
    """Of class probabilities [n, C], in nats."""
    return -(p * p.clamp_min(1e-30).log()).sum(1)


def scored(known: Tensor, y: Tensor, unknown: Tensor) -> dict[str, float]:
    """Scores of probabilities for test data, and how well their entropy tells the others."""
    found = metrics(known.clamp_min(1e-30).log(), y)
    labels = torch.cat([torch.zeros(len(known)), torch.ones(len(unknown))])
    entropies = torch.cat([entropy(known), entropy(unknown)])
    return {
        "log_likelihood": found["log_likelihood"],
        "ece": found["ece"],
        "auroc": float(roc_auc_score(labels.numpy(), entropies.cpu().numpy())),
    }


def predicted(posterior: LaplacePosterior, x: Tensor, kind: str) -> Tensor:
    """Class probabilities [n, C], in batches."""
    parts = [posterior.predict(part, kind, SAMPLES) for part in x.split(BATCH)]  # type: ignore[arg-type]
    return torch.cat([part for part in parts if isinstance(part, Tensor)])


def rows_of(name: str, seed: int, network: Network, n_test: int, data_root: Path) -> list[dict]:
    """All predictions of one network."""
    study = STUDIES[name]
    data = load(study.dataset, str(data_root))
    x, y = data.x_test[:n_test], data.y_test[:n_test]
    others = load(study.others, str(data_root)).x_test[:n_test]
    rows = []
    network.model.eval()
    for label, posterior in posteriors(network):
        kinds = KINDS if rows else ("mode", *KINDS)
        for kind in kinds:
            known, unknown = (predicted(posterior, part, kind) for part in (x, others))
            by = "network" if kind == "mode" else label
            scores = scored(known, y, unknown)
            rows.append({"study": name, "seed": seed, "posterior": by, "kind": kind, **scores})
            shown = ", ".join(f"{key} {value:.4f}" for key, value in scores.items())
            print(f"{name} {seed} {by:<20} {kind:<7} {shown}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--studies", nargs="+", choices=tuple(STUDIES), default=list(STUDIES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--n-test", type=int, default=2000)
    parser.add_argument("--runs", type=Path, default=Path("runs/calibration"))
    parser.add_argument("--data-root", type=Path, default=Path("data"))
    parser.add_argument("--csv", type=target_file, help="also write the table here")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.studies:
        for seed in arguments.seeds:
            network = network_of(name, seed, arguments.runs, arguments.data_root)
            rows += rows_of(name, seed, network, arguments.n_test, arguments.data_root)
            if arguments.csv:
                measure.write_csv(arguments.csv, rows)


if __name__ == "__main__":
    sys.exit(exit_code(main))

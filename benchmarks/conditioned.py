"""What conditioning on inducing rows is worth: slack at equal rows, and learning end to end.

python benchmarks/conditioned.py slack --networks digits mnist cifar
python benchmarks/conditioned.py learn --study mnist --seeds 0 1 2
python benchmarks/conditioned.py learn --study rotated --seeds 0
python benchmarks/conditioned.py learn --study cifar --seeds 0

`slack` compares the log-determinants of plain and conditioned blocks with the exact one, and their
times, at a small network for 400 digits and at networks that `learn` has trained. `learn` runs the
classifier with several estimators, each run in a folder of its own that a later call continues, and
measures the evidence of all of them in the same way. Rows go to csv files; what is there already is
not computed again. Times are those of one thread; of runs that share the machine they are too long.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from laplace_marglik import (
    Block,
    ClassPartition,
    Evidence,
    GaussianPrior,
    InducingPartition,
    MarginalLikelihood,
    Partition,
)
from laplace_marglik.evidence.on_blocks import OnBlocks
from laplace_marglik.likelihood.base import Root
from ntkmarglik.learn.methods import METHODS, Problem
from ntkmarglik.machine.exits import exit_code
from ntkmarglik.machine.files import target_file
from ntkmarglik.problem.data import load
from ntkmarglik.programs.classify.config import Config, parse
from ntkmarglik.programs.classify.run import prepare, train

DATA = Path("illustrations/data")
Row = dict[str, object]

# ------------------------------------------------------------------------------------------- slack

N_DIGITS = 400
DRAWS = 40  # blocks of each mean
ROOTS: tuple[Root, ...] = ("paper", "fisher", "eigen")
LOOKS = [0, 5, 20, 50, 200]  # evaluations after which the inducing rows are looked at
SIZES = {  # rows of a block
    "digits": (50, 100, 200, 400),
    "mnist": (50, 100, 200, 500, 1000),
    "cifar": (50, 100, 200, 500),
}
LARGEST = 1.8e10  # bytes that the exact value may take
REFERENCE = "published-NTK-500-1-seed0"  # the run whose network is looked at


def digits_network(seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    """A convolutional network of 3,990 weights, trained on 400 digits."""
    torch.manual_seed(seed)
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels))[:N_DIGITS]
    x = (torch.tensor(images).float() / 16).view(-1, 1, 8, 8)[order]
    y = torch.tensor(labels)[order]
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 20),
        nn.ReLU(),
        nn.Linear(20, 10),
    )
    ml = MarginalLikelihood(
        model, "classification", n_data=N_DIGITS, prior=GaussianPrior(model, "scalar", 1.0)
    )
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for _ in range(150):
        for batch in torch.randperm(N_DIGITS).split(50):
            optimizer.zero_grad()
            ml.map_loss(x[batch], y[batch]).backward()
            optimizer.step()
    return model.double(), x.double(), y


@dataclass
class Network:
    """A trained network with its prior, and its training data.

    Args:
        name: of the study.
        model: the network.
        prior: of its weights.
        x: inputs.
        y: labels.
        n_classes: outputs of the network.
    """

    name: str
    model: nn.Module
    prior: GaussianPrior
    x: Tensor
    y: Tensor
    n_classes: int

    @staticmethod
    def on_digits(precision: float) -> Network:
        model, x, y = digits_network()
        return Network("digits", model, GaussianPrior(model, "scalar", precision), x, y, 10)

    @staticmethod
    def of_run(name: str, path: Path) -> Network:
        """That of a finished run."""
        state = torch.load(path / "checkpoint.pt", weights_only=True)
        config = Config().updated(**state["settings"])
        problem = _problem(config)
        _restore(problem, state)
        data = problem.data
        return Network(
            name, problem.model, problem.prior, data.x_train, data.y_train, data.n_classes
        )

    @property
    def n_data(self) -> int:
        return len(self.y)


def _with_one_kernel(network: Network) -> GaussianPrior:
    """The same prior with a precision for each weight: one kernel instead of one for each group."""
    prior = GaussianPrior(network.model, "diagonal")
    precisions = network.prior.precisions()
    with torch.no_grad():
        for name, group in prior.groups.items():
            prior.log_precision[group] = precisions[name].log()
    return prior


class Slack:
    """Log-determinants of blocks of one trained network, beside the exact one."""

    def __init__(self, network: Network):
        self.network = network
        ml = self.ml(None, "full")
        ml.prior = _with_one_kernel(network)
        ml.memory_budget = LARGEST
        with torch.no_grad():
            self.exact = ml(network.x, network.y).log_det_ratio.item()

    def ml(
        self, root: Root | None, structure: str = "ntk", outputs: int | None = None
    ) -> MarginalLikelihood:
        return MarginalLikelihood(
            self.network.model,
            "classification",
            n_data=self.network.n_data,
            prior=self.network.prior,
            structure=structure,
            root=root,
            outputs=outputs,
        )

    def row(self, kind: str, root: str, rows: int, steps: int, evidences: list[Evidence]) -> Row:
        values = torch.stack([e.log_det_ratio.detach() for e in evidences])
        return {
            "network": self.network.name,
            "precision": self.precision,
            "rows": rows,
            "kind": kind,
            "root": root,
            "steps": steps,
            "exact": round(self.exact, 3),
            "slack_percent": round(100 * (values.mean().item() / self.exact - 1), 1),
            "std_percent": round(100 * values.std().item() / self.exact, 1),
        }

    @property
    def precision(self) -> str:
        precision = self.network.prior.precision.detach()
        return f"{precision.item():g}" if precision.numel() == 1 else "learned"

    def evaluate(self, ml: MarginalLikelihood, block: Block) -> Evidence:
        with torch.no_grad():
            x, y = self.network.x[block.index], self.network.y[block.index]
            return ml(x, y, block=block)

    def plain(self, root: Root, rows: int, kind: str = "plain") -> Row:
        """Blocks of data points with one shared output, at random or class by class."""
        network = self.network
        ml = self.ml(root, outputs=1)
        partition = Partition(network.n_data, network.n_classes, rows, 1)
        if kind == "class-wise":
            partition = ClassPartition(network.y, network.n_classes, rows, 1)
        evidences = []
        for number in range(DRAWS):
            if number % len(partition) == 0:
                partition.redraw()
            evidences.append(self.evaluate(ml, partition.sample()))
        return self.row(kind, root, rows, 0, evidences)

    def partition(self, root: Root, rows: int) -> InducingPartition:
        c = self.network.n_classes
        columns = c - 1 if root == "eigen" else c
        return InducingPartition(self.network.n_data, c, rows, n_columns=columns)

    def streamed(self, root: Root, rows: int, looks: Iterable[int]) -> Iterator[Row]:
        """Inducing rows that refresh themselves, looked at after some evaluations."""
        ml = self.ml(root)
        partition = self.partition(root, rows)
        looks = sorted(looks)
        for step in range(looks[-1] + 1):
            if step in looks:
                evidences = [self.evaluate(ml, partition.sample()) for _ in range(DRAWS)]
                yield self.row("conditioned", root, rows, step, evidences)
            block = partition.sample()
            partition.update(block, self.evaluate(ml, block))

    def time_ratio(self, root: Root, rows: int) -> Row:
        """CPU time of an estimate with its gradient in the prior, conditioned / plain."""
        network = self.network
        plain = Partition(network.n_data, network.n_classes, rows, 1)
        seconds = []
        for ml, partition in (
            (self.ml(root, outputs=1), plain),
            (self.ml(root), self.partition(root, rows)),
        ):
            best = float("inf")
            for _ in range(12):
                start = time.process_time()
                block = partition.sample()
                evidence = ml(network.x[block.index], network.y[block.index], block=block)
                torch.autograd.grad(evidence.total, network.prior.log_precision)
                if isinstance(partition, InducingPartition):
                    partition.update(block, evidence)
                best = min(best, time.process_time() - start)
            seconds.append(best)
        return {
            "network": network.name,
            "precision": self.precision,
            "rows": rows,
            "kind": "time ratio",
            "root": root,
            "time_ratio": round(seconds[1] / seconds[0], 3),
        }


def slack(path: Path, runs: Path, networks: list[str]) -> None:
    """All comparisons of log-determinants that are not in the csv yet."""
    torch.set_num_threads(1)
    rows = _read(path)
    known = {(row["network"], row["rows"]) for row in rows}
    for name in networks:
        sizes = [size for size in SIZES[name] if (name, str(size)) not in known]
        studies = _studies(name, runs) if sizes else []
        looks = LOOKS if name == "digits" else LOOKS[-2:-1]
        for size in sizes:
            for study in studies:
                for row in _compared(study, size, looks):
                    rows.append(row)
                    print(row, flush=True)
            _write(path, rows)


def _studies(name: str, runs: Path) -> list[Slack]:
    """The trained networks of a name."""
    if name == "digits":
        return [Slack(Network.on_digits(precision)) for precision in (1.0, 10.0)]
    return [Slack(Network.of_run(name, runs / name / REFERENCE))]


def _compared(study: Slack, size: int, looks: list[int]) -> Iterator[Row]:
    """Every kind of block with so many rows."""
    for root in ROOTS:
        yield study.plain(root, size)
    yield study.plain("fisher", size, "class-wise")
    for root in ("fisher", "eigen"):
        yield from study.streamed(root, size, looks)
        yield study.time_ratio(root, size)


# ------------------------------------------------------------------------------------------- learn

MNIST = (
    "--dataset mnist --n-data 1000 --model mininet --epochs 300 --batch-size 250 --lr 1e-3 "
    "--lr-min 1e-9 --prior-precision 1 --eval-every 100"
)
ROTATED = (
    "--dataset mnist_r180 --n-data 1000 --model mininet --epochs 150 --batch-size 250 --lr 0.003 "
    "--prior-precision 1 --augment affine --aug-samples 8 --frequency 1 --prior-steps 4 "
    "--aug-steps 4 --eval-every 50"
)
CIFAR = (
    "--dataset cifar10 --n-data 2000 --model resnet --depth 10 --width 4 --epochs 60 "
    "--batch-size 128 --optimizer sgd --lr 0.1 --prior-precision 1 --eval-every 20"
)
ONE_BLOCK = "--method ntk --inducing 0.5 --steps-per-block 10"
ESTIMATORS = {
    "published NTK-100-1": "--method ntk --subset 100",
    "Fisher NTK-100-1": "--method ntk --subset 100 --root fisher",
    "conditioned 100": "--method ntk --subset 100 --inducing 0.5",
    "conditioned 100, one block a round": f"{ONE_BLOCK} --subset 100",
    "conditioned 200, one block a round": f"{ONE_BLOCK} --subset 200",
    "published NTK-500-1": "--method ntk --subset 500",
    "Fisher NTK-500-1": "--method ntk --subset 500 --root fisher",
    "conditioned 500": "--method ntk --subset 500 --inducing 0.5",
    "conditioned 500, one block a round": f"{ONE_BLOCK} --subset 500",
    "MAP": "--method map",
}
FEW = ("published NTK-100-1", "published NTK-500-1", "conditioned 200, one block a round", "MAP")
MORE_DATA = "conditioned 100, log-likelihood of 400 data"
LILA = {
    "conditioned 100": "--method ntk --subset 100 --inducing 0.5",
    MORE_DATA: "--method ntk --subset 100 --inducing 0.5",
    "Fisher NTK-100-1": "--method ntk --subset 100 --root fisher",
    "published NTK-100-1": "--method ntk --subset 100",
}
STUDIES: dict[str, tuple[str, dict[str, str]]] = {
    "mnist": (MNIST, ESTIMATORS),
    "rotated": (ROTATED, LILA),
    "cifar": (CIFAR, {name: ESTIMATORS[name] for name in FEW}),
}
EXACT_DATA = 1000  # up to so many data the exact evidence is computed
YARDSTICK_ROWS = 1000  # of the conditioned blocks that measure the evidence of larger problems


def exact_evidence(problem: Problem) -> Evidence:
    """That of all data and outputs."""
    ml = problem.marginal_likelihood("full")
    ml.outputs = None
    with torch.no_grad():
        return ml.full_batch([(problem.data.x_train, problem.data.y_train)])


def measured_evidence(problem: Problem) -> Evidence:
    """By conditioned blocks of the same kind for all methods."""
    data = problem.data
    ml = problem.marginal_likelihood("ntk")
    ml.root = "eigen"
    partition = InducingPartition(
        data.n_data,
        data.n_classes,
        YARDSTICK_ROWS,
        n_columns=data.n_classes - 1,
        generator=torch.Generator().manual_seed(0),
    )
    return OnBlocks(ml, problem.examples, partition).measured(10)


def learned(study: str, name: str, seed: int, folder: Path) -> Row:
    """One run, and what came out."""
    settings, estimators = STUDIES[study]
    out = folder / study / f"{name.replace(' ', '-').replace(',', '')}-seed{seed}"
    flags = [*settings.split(), *estimators[name].split(), "--seed", str(seed), "--threads", "1"]
    config: Config = parse([*flags, "--no-baseline", "--resume", "--out", str(out)])
    problem = _problem(config)
    data = problem.data
    method = METHODS[config.estimator.method](problem)
    if name == MORE_DATA:
        method.learner.on_blocks.likelihood_batch = 400
    _, summary = train(problem, method, out, name)
    _restore(problem, torch.load(out / "checkpoint.pt", weights_only=True))
    exact = data.n_data <= EXACT_DATA and problem.augment is None
    evidence = exact_evidence(problem) if exact else measured_evidence(problem)
    eta = summary["augmentation"]
    return {
        "study": study,
        "estimator": name,
        "seed": seed,
        "test_log_likelihood": round(summary["test_log_likelihood"], 4),
        "test_accuracy": round(summary["test_accuracy"], 4),
        "evidence": round(evidence.total.item() / data.n_data, 4),
        "evidence_is": evidence.status,
        "own_evidence": round(summary["log_marglik"], 4),
        "rotation": "" if eta is None else round(abs(eta[2]), 3),
        "seconds_weights": round(summary["seconds_weights"], 1),
        "seconds_hyper": round(summary["seconds_hyper"], 1),
        "command": config.updated(out=None, resume=False, threads=0, baseline=True).command(),
    }


def _problem(config: Config) -> Problem:
    settings = config.problem
    data = load(settings.dataset, settings.data_root, n_data=settings.n_data, seed=config.run.seed)
    return prepare(config, data)


def _restore(problem: Problem, state: dict) -> None:
    problem.model.load_state_dict(state["model"])
    problem.prior.load_state_dict(state["prior"])
    if problem.augment is not None:
        problem.augment.load_state_dict(state["augment"])
    problem.model.eval()


def learn(study: str, seeds: list[int], path: Path, folder: Path, only: list[str]) -> None:
    """All estimators of a study that are not in the csv yet."""
    torch.set_num_threads(1)
    rows = _read(path)
    known = {(row["study"], row["estimator"], str(row["seed"])) for row in rows}
    for seed in seeds:
        for name in STUDIES[study][1]:
            if (study, name, str(seed)) in known or (only and name not in only):
                continue
            rows.append(learned(study, name, seed, folder))
            print(rows[-1], flush=True)
            _write(path, rows)


def _read(path: Path) -> list[Row]:
    if not path.exists():
        return []
    with path.open() as file:
        return list(csv.DictReader(file))


def _write(path: Path, rows: list[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("part", choices=("slack", "learn"))
    parser.add_argument("--study", choices=tuple(STUDIES), default="mnist")
    parser.add_argument("--networks", nargs="+", default=["digits"], choices=tuple(SIZES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="*", default=[], help="names of estimators")
    parser.add_argument("--csv", type=target_file, default=None)
    parser.add_argument("--runs", type=Path, default=Path("runs/conditioned"))
    given = parser.parse_args(arguments)
    parts: dict[str, Callable[[], None]] = {
        "slack": lambda: slack(
            given.csv or DATA / "conditioned_slack.csv", given.runs, given.networks
        ),
        "learn": lambda: learn(
            given.study,
            given.seeds,
            given.csv or DATA / "conditioned_learning.csv",
            given.runs,
            given.only,
        ),
    }
    parts[given.part]()


if __name__ == "__main__":
    sys.exit(exit_code(main))

"""Is it worth it? Learned hyperparameters beside what people do today, in quality and CPU time.

python benchmarks/alternatives.py --studies digits mnist
python benchmarks/alternatives.py --table
python benchmarks/alternatives.py --quick --csv quick.csv --runs runs/quick

Every way to choose weight decay (or the range of rotations) has the same network, training set and
epochs per fit. Rows go to a csv file with their commands; what is there already is not computed
again, nor are single fits of a search. `--table` prints what the documentation shows: means over
seeds, paired differences to the grid, CPU time in units of one plain fit. `--quick` takes tiny data
and two epochs: that everything works, nothing more.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import diabetes
import measure
import optuna
import torch
from plain_fit import FOLDS, Candidate, Fits, fit

from ntkmarglik.learn.methods import METHODS
from ntkmarglik.learn.train import Trainer
from ntkmarglik.machine.exits import exit_code
from ntkmarglik.machine.files import target_file
from ntkmarglik.problem.data import Dataset, load
from ntkmarglik.problem.models import build
from ntkmarglik.programs.classify import preflight
from ntkmarglik.programs.classify.config import Config, given, parse
from ntkmarglik.programs.classify.run import prepare
from ntkmarglik.programs.paper.figures.alternatives import Compared, compared
from ntkmarglik.runs.folder import NoFolder
from ntkmarglik.runs.records import as_text, grouped, read, values

CSV = Path("illustrations/data/alternatives.csv")
TEST = 2000  # test data that all ways are scored on
DECAYS = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
SEARCHED = (1e-6, 1.0)  # decays that optuna looks at
TRIALS = 15
ROTATIONS = tuple(math.pi * part for part in (1 / 8, 1 / 4, 1 / 2, 1))
ADAMW, SGD = 0.01, 5e-4  # AdamW's default decay, and the usual one with SGD and momentum
# What the others are compared with.
GRID = "grid on a split"
GRID_OF_ROTATIONS = "grid of rotations on a split"
GRIDS = (GRID, GRID_OF_ROTATIONS, diabetes.GRID)
DEFAULT = "default decay"
POSTERIOR = ", posterior"
Row = dict[str, object]
Key = tuple[str, str, int]  # study, way, seed

MNIST = "--model mininet --batch-size 250 --lr 1e-3 --lr-min 1e-9"
NTK = {"NTK-500-1": "--method ntk", "conditioned NTK": "--method ntk-conditioned"}
OURS = {
    **NTK,
    "KFAC-N-C": "--method kfac --subset 0 --outputs 0",
    "DE-ELBO": "--method de-elbo",
}
SAMPLED = "--method sampled --burnin 50 --frequency 50 --em-steps 2 --em-precision 10"
PEOPLE = (DEFAULT, "no decay", GRID)
QUICK = "--n-data 120 --epochs 2 --burnin 1 --frequency 1 --prior-steps 1 --aug-steps 1"


@dataclass(frozen=True)
class Study:
    """A problem, and the ways to its hyperparameters.

    Args:
        settings: flags of the runner; whatever they leave out is the runner's default.
        seeds: how many.
        people: names of searches.
        ours: flags of the runner by name.
    """

    settings: str
    seeds: int
    people: tuple[str, ...]
    ours: dict[str, str]

    def small(self) -> Study:
        """The same on data that are always there, with next to no training."""
        turned = "digits_r180" if "_r180" in self.settings else "digits"
        return replace(self, settings=f"{self.settings} --dataset {turned} {QUICK}", seeds=1)


STUDIES = {
    "digits": Study(
        "--dataset digits",
        5,
        (*PEOPLE, "cross-validated grid", "optuna", "optuna per layer"),
        {**OURS, "sampled": SAMPLED},
    ),
    "mnist": Study(f"--dataset mnist --n-data 1000 --epochs 300 {MNIST}", 5, PEOPLE, OURS),
    "fashion": Study(f"--dataset fmnist --n-data 1000 --epochs 150 {MNIST}", 3, PEOPLE, OURS),
    # the same, trained until it overfits: is that what learned decays miss above?
    "fashion-600": Study(
        f"--dataset fmnist --n-data 1000 --epochs 600 {MNIST}",
        3,
        (GRID,),
        {"conditioned NTK": NTK["conditioned NTK"]},
    ),
    "cifar": Study(
        "--dataset cifar10 --n-data 2000 --model resnet --depth 10 --width 4 --epochs 60 "
        "--optimizer sgd --lr 0.1",
        3,
        PEOPLE,
        OURS,
    ),
    "rotated": Study(
        "--dataset mnist_r180 --n-data 1000 --model mininet --epochs 100 --batch-size 250 "
        "--lr 3e-3 --augment affine --aug-samples 8 --frequency 1 --prior-steps 4 --aug-steps 4",
        3,
        ("no augmentation", GRID_OF_ROTATIONS),
        {
            "NTK-100-1": "--method ntk --subset 100",
            # fewer and larger blocks, and larger steps: chosen on rotated digits
            "conditioned NTK": "--method ntk-conditioned --frequency 4 --lr-aug 0.1",
        },
    ),
    "diabetes": Study("", 5, diabetes.PEOPLE, dict.fromkeys(diabetes.OURS, "")),
}


# ------------------------------------------------------------------------------ what people do


def default(fits: Fits) -> Candidate:
    """The decay that one takes without looking."""
    return replace(usual(fits.config), rotation=None)


def on_a_split(fits: Fits, candidates: list[Candidate]) -> Candidate:
    """The best of all on a held-out fifth."""
    return max(candidates, key=fits.on_fold)


def cross_validated(fits: Fits) -> Candidate:
    """The best decay of the grid on the mean of five folds."""
    return max(_decays(), key=lambda c: sum(fits.on_fold(c, fold) for fold in range(FOLDS)))


def by_optuna(fits: Fits, tensors: int) -> Candidate:
    """TPE on a held-out fifth: one decay, or one for each of so many parameter tensors."""

    def candidate(trial: optuna.Trial | optuna.trial.FrozenTrial) -> Candidate:
        suggest = trial.suggest_float
        decays = tuple(suggest(f"decay{i}", *SEARCHED, log=True) for i in range(tensors))
        return Candidate(decays if tensors > 1 else decays[0])

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=fits.config.run.seed)
    search = optuna.create_study(direction="maximize", sampler=sampler)
    search.optimize(lambda trial: fits.on_fold(candidate(trial)), n_trials=TRIALS)
    return candidate(search.best_trial)


def _decays() -> list[Candidate]:
    return [Candidate(decay) for decay in DECAYS]


def _rotations(fits: Fits) -> list[Candidate]:
    return [replace(default(fits), rotation=rotation) for rotation in ROTATIONS]


def _tensors(fits: Fits) -> int:
    settings = fits.config.problem
    model = build(settings.model, fits.data.input_shape, fits.data.n_classes)
    return len(list(model.parameters()))


SEARCHES: dict[str, Callable[[Fits], Candidate]] = {
    DEFAULT: default,
    "no decay": lambda fits: Candidate(0.0),
    GRID: lambda fits: on_a_split(fits, _decays()),
    "cross-validated grid": cross_validated,
    "optuna": lambda fits: by_optuna(fits, 1),
    "optuna per layer": lambda fits: by_optuna(fits, _tensors(fits)),
    "no augmentation": default,
    GRID_OF_ROTATIONS: lambda fits: on_a_split(fits, _rotations(fits)),
}


def searched(way: str, fits: Fits) -> Iterator[Row]:
    """A search, and the network trained on all data with what it chose."""
    fits.begin()
    chosen = SEARCHES[way](fits)
    scores = fits.on_all(chosen)
    times = {"cpu_seconds": fits.cpu_seconds, "fit_seconds": scores["cpu_seconds"]}
    yield _row(way, scores, times, len(fits.made), str(chosen))


# ------------------------------------------------------------------------------ what we do


def learned(way: str, study: Study, seed: int, root: Path) -> Iterator[Row]:
    """One run that learns them; predictions of the network, then of the posterior."""
    config = config_of(study, seed, study.ours[way])
    data = data_of(config, root)
    fit_seconds = fit(config, data, usual(config))["cpu_seconds"]
    start = time.process_time()
    problem = preflight.fitted(
        prepare(config, data), given(_arguments(study, seed, study.ours[way]))
    )
    config = problem.config
    method = METHODS.named(config.estimator.method)(problem)
    trainer = Trainer(problem, method)
    trainer.run(NoFolder())
    seconds = time.process_time() - start
    precisions = problem.prior.precision.detach()
    chosen = f"precision {precisions.min():.3g} to {precisions.max():.3g}"
    if problem.augment is not None:
        chosen += f", rotation {problem.augment.ranges()['rotation']:.3g}"  # type: ignore[operator]
    times = {"cpu_seconds": seconds, "fit_seconds": fit_seconds}
    yield _row(way, trainer.evaluate("test"), times, 1, chosen)
    method.evidence()  # samples of the posterior are made for it
    extras = method.extras()
    times["cpu_seconds"] = time.process_time() - start
    for kind in ("sampled", "probit"):
        if f"{kind}_test_log_likelihood" in extras:
            names = ("log_likelihood", "accuracy", "ece")
            scores = {name: extras[f"{kind}_test_{name}"] for name in names}
            yield _row(way + POSTERIOR, scores, times, 1, kind)
            return


def usual(config: Config) -> Candidate:
    """A plain fit, the unit of time: the usual decay, and every rotation if images are turned."""
    turned = ROTATIONS[-1] if config.hyperparameters.augment == "affine" else None
    if config.training.optimizer == "sgd":
        return Candidate(SGD, rotation=turned)
    return Candidate(ADAMW, decoupled=True, rotation=turned)


def _row(way: str, scores: dict, times: dict, fits: int, chosen: str) -> Row:
    return {
        "way": way,
        **{f"test_{name}": scores[name] for name in ("log_likelihood", "accuracy", "ece")},
        **times,
        "fits": fits,
        "chosen": chosen,
    }


# ------------------------------------------------------------------------------ the table of rows


def _arguments(study: Study, seed: int, flags: str) -> list[str]:
    return [*study.settings.split(), *flags.split(), "--seed", str(seed)]


def config_of(study: Study, seed: int, flags: str = "--method map") -> Config:
    """Settings of a run; only the last epoch is evaluated."""
    config = parse(_arguments(study, seed, flags))
    return config.updated(eval_every=config.training.epochs)


def data_of(config: Config, root: Path) -> Dataset:
    """The data of a study: at most TEST test data."""
    settings = config.problem
    data = load(settings.dataset, root, n_data=settings.n_data, seed=config.run.seed)
    return replace(data, x_test=data.x_test[:TEST], y_test=data.y_test[:TEST])


def rows_of(name: str, study: Study, way: str, seed: int, root: Path, runs: Path) -> Iterator[Row]:
    """The rows of one way with one seed."""
    if name == "diabetes":
        yield diabetes.row(way, seed, quick=study.seeds == 1)
        return
    if way in study.ours:
        yield from learned(way, study, seed, root)
        return
    config = config_of(study, seed)
    fits = Fits(config, data_of(config, root), runs / f"{name}-{seed}.jsonl")
    yield from searched(way, fits)


def kind_of(way: str, study: Study) -> str:
    """Whether it is the grid, another thing people do, ours, or the posterior of ours."""
    if way.endswith(POSTERIOR):
        return "posterior"
    if way in GRIDS:
        return "grid"
    return "ours" if way in study.ours else "people"


def wanted(
    studies: dict[str, Study], options: argparse.Namespace
) -> Iterator[tuple[str, str, int]]:
    """What was asked for, a seed after the other."""
    for name, study in studies.items():
        for seed in options.seeds or range(study.seeds):
            for way in (*study.people, *study.ours):
                if not options.ways or way in options.ways:
                    yield name, way, seed


def compute(studies: dict[str, Study], options: argparse.Namespace) -> None:
    """All rows that are not in the csv yet."""
    torch.set_num_threads(1)
    _warm_up()
    rows: list[Row] = list(read(options.csv)) if options.csv.exists() else []
    known = {(row["study"], row["way"], str(row["seed"])) for row in rows}
    for name, way, seed in wanted(studies, options):
        if (name, way, str(seed)) in known:
            continue
        study = studies[name]
        program = "python benchmarks/alternatives.py"
        command = f'{program} --studies {name} --ways "{way}" --seeds {seed}'
        for row in rows_of(name, study, way, seed, options.data_root, options.runs):
            head = {"study": name, "kind": kind_of(str(row["way"]), study), "seed": seed}
            rows.append({**head, **row, "command": command})
            print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        measure.write_csv(options.csv, rows)


def _warm_up() -> None:
    """Make torch load what its optimisers need, a second that no single fit should have to pay."""
    weight = torch.zeros(1, requires_grad=True)
    weight.sum().backward()
    torch.optim.AdamW([weight]).step()


# ------------------------------------------------------------------------------ the table to read


def table(path: Path) -> str:
    """Means over seeds, paired differences to the grid, and CPU time, in Markdown."""
    headings = (
        "data",
        "way",
        "seeds",
        "test log-lik.",
        "difference to the grid",
        "test acc. %",
        "test ECE",
        "CPU time, plain fits",
        "fits",
    )
    cells = [
        [study, *_cells(way)]
        for (study,), rows in grouped(read(path), "study").items()
        for way in compared(rows)
    ]
    return measure.markdown(headings, cells)


def _cells(way: Compared) -> list[str]:
    rows = way.rows
    error = "" if way.error is None else f" ± {way.error:.4f}"
    accuracies = [100 * value for value in values(rows, "test_accuracy")]
    return [
        way.way,
        str(len(rows)),
        as_text(values(rows, "test_log_likelihood"), 4),
        "" if way.kind == "grid" else f"{way.difference:+.4f}{error}",
        as_text(accuracies, 1),
        as_text(values(rows, "test_ece"), 3),
        f"{way.units:.2f}",
        rows[0]["fits"],
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--studies", nargs="+", choices=tuple(STUDIES), default=list(STUDIES))
    parser.add_argument("--ways", nargs="+", default=[], help="by default all of a study")
    parser.add_argument("--seeds", nargs="+", type=int, default=[])
    parser.add_argument("--quick", action="store_true", help="tiny data, two epochs, one seed")
    parser.add_argument("--table", action="store_true", help="print the csv as a table")
    parser.add_argument("--csv", type=target_file, default=CSV)
    parser.add_argument("--runs", type=Path, default=Path("runs/alternatives"))
    parser.add_argument("--data-root", type=Path, default=Path("data"))
    options = parser.parse_args(arguments)
    if options.table:
        print(table(options.csv))
        return
    chosen = {name: STUDIES[name] for name in options.studies}
    if options.quick:
        chosen = {name: study.small() for name, study in chosen.items()}
    compute(chosen, options)


if __name__ == "__main__":
    sys.exit(exit_code(main))

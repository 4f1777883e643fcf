"""Augerino, and full-data gradients of the augmentation from blocks."""

import shlex

import pytest
import torch
from killed_runs import kill
from tiny_runs import TINY, results
from torch import nn
from trained_runs import DEATHS, trained

from asdl_marglik import Passes, augmented
from laplace_marglik import evidence_by_blocks
from laplace_marglik.examples import dealt
from ntkmarglik.problem.data import load
from ntkmarglik.programs.classify.command import main
from ntkmarglik.programs.classify.config import parse
from ntkmarglik.programs.classify.run import prepare, run

AUGERINO = [
    *TINY,
    *shlex.split("--method augerino --augment affine --model mininet --width 0"),
]
BY_BLOCKS = shlex.split(
    "--method kfac --subset 0 --outputs 1 --augment affine --aug-block 16 --aug-steps 5 --lr-aug "
    "0.01"
)


@pytest.fixture(autouse=True)
def _undrawn(monkeypatch):
    monkeypatch.setattr("ntkmarglik.programs.classify.pictures.draw", lambda *_, **__: None)


def test_a_step_of_the_weights_follows_the_loss_with_the_prior():
    trainer = trained([*TINY, "--method", "map", "--prior-precision", "30"], load("digits", "data"))
    method, x, y = trainer.method, trainer.problem.data.x_train, trainer.problem.data.y_train
    weights = list(trainer.problem.model.parameters())
    loss = method.ml.map_loss(x, y)
    expected = torch.autograd.grad(loss, weights)
    assert (method.loss(x, y) + method.prior_loss()).item() == pytest.approx(loss.item(), rel=1e-5)
    trainer._weight_step(torch.arange(len(y)), "step")
    for weight, gradient in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.grad, gradient)


# ----------------------------------------------------------------------------------------- Augerino


def test_augerino_learns_the_rotations_of_rotated_digits():
    data = load("digits_r180", "data", n_data=300)
    longer = [
        "--n-data",
        "300",
        "--epochs",
        "12",
        "--aug-samples",
        "4",
        "--lr",
        "0.01",
        "--lr-aug",
        "0.05",
    ]
    wide = trained(
        [*AUGERINO, *longer, "--augerino-regulariser", "0.2"], data
    ).problem.augment.ranges()
    none = trained(
        [*AUGERINO, *longer, "--augerino-regulariser", "0"], data
    ).problem.augment.ranges()
    assert wide["rotation"] > 0.5  # from 0.05
    assert wide["rotation"] > 3 * none["rotation"]


def test_augerino_rewards_width_and_leaves_the_prior_alone():
    trainer = trained(AUGERINO, load("digits", "data", n_data=64))
    problem, method = trainer.problem, trainer.method
    assert (
        method.learns()
        and trainer.method.learn(1) is None
        and trainer.steps == {"weights": 6, "prior": 0, "augment": 6}
    )
    assert next(iter(problem.prior.precisions().values())).mean().item() == pytest.approx(0.01)
    x, y = problem.data.x_train[:8], problem.data.y_train[:8]
    problem.generator.manual_seed(3)
    seed = int(torch.randint(2**31, (), generator=torch.Generator().manual_seed(3)))
    f = (
        problem.model(augmented(problem.augment, x, seed).flatten(0, 1))
        .unflatten(0, (8, 2))
        .mean(1)
    )
    decay = 0.01 * sum(p.square().sum() for p in problem.model.parameters()) / (2 * 64)
    expected = nn.functional.cross_entropy(f, y) + decay - 0.01 * problem.augment.eta.norm()
    loss = method.loss(x, y) + method.prior_loss()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_augerino_needs_an_augmentation(tmp_path, capsys):
    assert main([*TINY, "--method", "augerino", "--out", str(tmp_path / "run")]) == 2
    assert "--augment affine" in capsys.readouterr().err


def test_augerino_is_compared_with_a_baseline_and_named(tmp_path):
    runs = run(parse([*AUGERINO, "--out", str(tmp_path / "run")]))
    assert list(runs) == ["augerino", "MAP baseline"]
    epochs, summary = runs["augerino"]
    assert (
        all("augmentation" in line for line in epochs)
        and epochs[-1]["augmentation"] == summary["augmentation"]
    )


@pytest.mark.parametrize(
    "flags", [AUGERINO, [*TINY, *BY_BLOCKS]], ids=["augerino", "gradients by blocks"]
)
def test_repeated_or_killed_and_resumed_it_ends_in_the_same_numbers(flags, tmp_path):
    eager = [*flags, "--epochs", "4", "--checkpoint-seconds", "0"]
    assert (
        main([*eager, "--out", str(tmp_path / "first")])
        == main([*eager, "--out", str(tmp_path / "second")])
        == 0
    )
    expected = results(tmp_path / "first")
    assert results(tmp_path / "second") == expected
    arguments = [*eager, "--out", str(tmp_path / "run"), "--resume"]
    kill(DEATHS, arguments)
    assert main(arguments) == 0
    assert results(tmp_path / "run") == expected


# ------------------------------------------------------------------ all data, gradients from blocks


class Turned(nn.Module):
    """Two copies, moved by a learned amount without any randomness: draws cannot differ between
    passes.
    """

    def __init__(self):
        super().__init__()
        self.eta = nn.Parameter(torch.tensor([0.3]))

    def forward(self, x):
        return torch.stack([x, x + self.eta * x.roll(1, -1)], 1)


@pytest.mark.parametrize(
    "method, kfac", [("kfac", "expand"), ("kfac", "reduce"), ("diag", "expand")]
)
@pytest.mark.parametrize("outputs", [0, 1])
def test_over_all_blocks_the_gradient_is_that_of_all_data(method, kfac, outputs):
    data = load("digits", "data", n_data=48, dtype=torch.float64)
    flags = [
        "--method",
        method,
        "--kfac",
        kfac,
        "--outputs",
        str(outputs),
        "--subset",
        "0",
        "--precision",
        "float64",
    ]
    cnn = ["--n-data", "48", "--model", "cnn", "--width", "0"]
    problem = prepare(parse([*TINY, *cnn, *flags]), data)
    ml = problem.marginal_likelihood(method)
    ml.augment = augment = Turned().double()
    blocks = dealt(problem.examples, 16, problem.generator)
    state = problem.generator.get_state()
    whole = ml.full_batch(blocks)
    leaves = [problem.prior.log_precision, augment.eta]
    expected = torch.autograd.grad(whole.total, leaves)
    problem.generator.set_state(state)  # the same columns
    evaluate = evidence_by_blocks(ml, blocks, problem.generator)
    found = []
    for _ in range(len(blocks)):
        evidence = evaluate()
        assert evidence.total.item() == pytest.approx(whole.total.item())
        found.append(torch.autograd.grad(evidence.total, leaves))
    prior, eta = (torch.stack(gradients) for gradients in zip(*found, strict=True))
    torch.testing.assert_close(prior[0], expected[0])
    torch.testing.assert_close(eta.mean(0), expected[1])
    assert eta.std() > 0


@pytest.mark.parametrize("steps, blocks", [(6, 1), (2, 3)])
def test_a_round_by_blocks_costs_one_pass_over_all_data(steps, blocks, monkeypatch):
    calls = {"first": 0, "second": []}
    first, second = Passes.first, Passes.second

    def counted_first(self, *arguments, **options):
        calls["first"] += not self._results
        return first(self, *arguments, **options)

    def counted_second(self, *arguments):
        calls["second"].append(self.n_data)
        return second(self, *arguments)

    monkeypatch.setattr(Passes, "first", counted_first)
    monkeypatch.setattr(Passes, "second", counted_second)
    sizes = ["--aug-steps", str(steps), "--aug-blocks", str(blocks)]
    trainer = trained(
        [*TINY, *BY_BLOCKS, "--epochs", "1", *sizes], load("digits", "data", n_data=64)
    )
    assert trainer.method.learner._forward.taken == steps
    assert calls == {"first": 1, "second": [16] * 6}
    assert trainer.problem.augment.eta.tolist() != [0.05] * 6


@pytest.mark.parametrize(
    "flags, sentence",
    [("--aug-block 16 --aug-blocks 5", "are 4 blocks"), ("--aug-blocks 2", "give one above 0")],
)
def test_more_blocks_than_there_are_is_refused(flags, sentence, tmp_path, capsys):
    whole = shlex.split("--method kfac --subset 0 --augment affine --n-data 64")
    assert main([*TINY, *whole, "--out", str(tmp_path / "run"), *flags.split()]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("flags", ["--subset 0", "--method kfac --subset 16"])
def test_blocks_are_refused_where_they_have_no_meaning(flags, tmp_path, capsys):
    assert main([*TINY, "--aug-block", "8", "--out", str(tmp_path / "run"), *flags.split()]) == 2
    assert "--aug-block" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, sentence",
    [
        ("--method ntk --inducing 0.5 --root paper", "needs the rows of a true root"),
        ("--method kfac --inducing 0.5", "--method kfac has no rows"),
        ("--method diag --inducing 0.5", "--method diag has no rows"),
        ("--method ntk --inducing 1", "--inducing must be at least 0 and below 1, but is 1.0"),
        ("--method ntk --inducing -0.1", "--inducing must be at least 0 and below 1"),
        ("--method ntk --inducing nan", "--inducing must be finite"),
        ("--method ntk --inducing 0.5 --subset 0", "--subset is the number"),
        ("--method ntk --inducing 0.5 --outputs 2", "--outputs 2 deals data into independent"),
        ("--method ntk --inducing 0.5 --partition class", "--partition class deals data"),
        ("--method ntk-conditioned --inducing 0", "needs --inducing above 0"),
        ("--method ntk-conditioned --subset 999", "there are 432 rows of the training data"),
        ("--method ntk --steps-per-block 0", "--steps-per-block must be greater than 0"),
    ],
)
def test_settings_that_conditioning_cannot_work_with_are_refused_before_work_starts(
    flags, sentence, tmp_path, capsys
):
    tiny = ["--n-data", "48", "--epochs", "2", "--burnin", "1", "--frequency", "1"]
    assert main([*tiny, *flags.split(), "--out", str(tmp_path / "run")]) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


def test_defaults_of_a_method_are_those_of_its_command():
    config = parse(["--method", "ntk-conditioned"])
    assert config.estimator.subset == 400 and config.training.steps_per_block == 4
    assert config.command() == "python classification_image.py"
    other = parse(["--method", "ntk-conditioned", "--subset", "500"])
    assert parse(other.command().split()[2:]) == other and "--subset 500" in other.command()
    assert parse(["--method", "ntk"]).estimator.subset == 500

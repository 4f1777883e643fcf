"""Presets: names for the files of the paper's settings, listed, combined and overridden."""

import pytest

from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.programs.classify.config import Config, given, parse
from ntkmarglik.programs.grid.config import GridConfig
from ntkmarglik.programs.grid.config import parse as parse_grid
from ntkmarglik.programs.paper import experiments
from ntkmarglik.programs.paper.presets import presets


@pytest.mark.parametrize(
    "name, settings",
    [
        ("paper-mnist", experiments.load("bound-prior")),
        ("paper-cifar-small", experiments.load("cifar", scale="small")),
        (
            "paper-cifar-subsets-full-small",
            experiments.load("cifar-subsets", "cifar-subsets-full", scale="small"),
        ),
    ],
)
def test_a_preset_is_an_experiment_of_the_paper(name, settings):
    assert parse(["--preset", name]) == parse([f"--preset={name}"]) == settings


def test_flags_override_a_preset_wherever_they_stand():
    arguments = ["--epochs", "3", "--preset", "paper-mnist", "--seed", "2"]
    config = parse(arguments)
    assert (config.training.epochs, config.run.seed, config.problem.dataset) == (3, 2, "mnist")
    assert {"epochs", "seed", "dataset", "n_data"} <= given(arguments)


def test_each_program_has_its_own():
    of_runs, of_grids = presets(Config().flat()), presets(GridConfig().flat())
    assert "paper-bound-grid-prior" in of_grids and "paper-bound-grid-prior" not in of_runs
    assert "paper-timing" not in of_runs  # belongs upon another
    assert parse_grid(["--preset", "paper-bound-grid-prior"]).grid.points == 100


def test_they_are_listed(capsys):
    with pytest.raises(SystemExit) as end:
        parse(["--preset", "list"])
    assert not end.value.code
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said] == list(presets(Config().flat()))
    assert all(len(line.split()) > 2 for line in said)


@pytest.mark.parametrize("arguments", [["--preset", "paper-mnits"], ["--preset=paper-mnits"]])
def test_an_unknown_one_names_those_that_are_close(arguments):
    with pytest.raises(NtkMarglikError, match=r"'paper-mnits'. Did you mean paper-mnist, "):
        parse(arguments)


def test_a_name_is_needed():
    with pytest.raises(NtkMarglikError, match="No preset is named ''"):
        parse(["--preset"])


def test_help_begins_with_ten_flags_and_names_the_presets(capsys):
    assert len(Config.first) == 10 and set(Config.first) <= set(Config().flat())
    with pytest.raises(SystemExit):
        parse(["--help"])
    head = capsys.readouterr().out.partition("estimator options")[0]
    flags = [line.split()[0] for line in head.splitlines() if line.startswith("  --")]
    assert flags == [f"--{name.replace('_', '-')}" for name in Config.first]
    assert "--preset list" in " ".join(head.split())

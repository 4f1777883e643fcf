"""One list each: what is registered is known at once to everything that offers, checks, names,
draws or runs it.
"""

import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from tiny_runs import TINY

from asdl_marglik import STRUCTURES, Structure, register_structure
from laplace_marglik import GaussianPrior, MarginalLikelihood
from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.learn.methods import METHODS, Method, register_method
from ntkmarglik.learn.methods.map import Map
from ntkmarglik.learn.methods.mode import MeasuredByBlocks
from ntkmarglik.problem.data import load
from ntkmarglik.problem.models import MODELS, build
from ntkmarglik.programs.classify import preflight
from ntkmarglik.programs.classify.command import main
from ntkmarglik.programs.classify.config import Config, parse
from ntkmarglik.programs.finetune.config import FinetuneConfig
from ntkmarglik.programs.grid.bound import bounds_of
from ntkmarglik.programs.grid.config import GridConfig
from ntkmarglik.programs.grid.config import parse as parse_grid
from ntkmarglik.programs.paper.experiments import estimator
from ntkmarglik.programs.paper.figures import style
from ntkmarglik.runs.folder import name_of, read_summary

ROOT = Path(__file__).parents[2]
EVERY_STRUCTURE = 6  # tests of the conformance suite that every structure takes
CONFORMANCE = "tests/test_asdl_marglik/test_structure.py"


@pytest.fixture
def toy_structure():
    """A structure of somebody else: one function, here that of the diagonal, and one line."""

    def parts(problem):
        return STRUCTURES["diag"].parts(problem)

    yield register_structure(Structure("toy", parts, label="Toy", colour="#123456"))
    del STRUCTURES["toy"]


class Patient(MeasuredByBlocks):
    """A method of somebody else: the MAP loss, with half of the weight decay."""

    name = "patient"
    label = "Patient"
    colour = "#654321"
    learns_by = "loss"

    @classmethod
    def check(cls, config):
        if config.training.epochs < 2:
            raise NtkMarglikError("--method patient needs --epochs 2.")

    def loss(self, x, y):
        penalty = self.problem.prior.penalty(self.ml.weights) / (4 * self.problem.data.n_data)
        return super().loss(x, y) - penalty

    def baseline(self, fixed):
        return Map(fixed, self.structure)


@pytest.fixture
def toy_method():
    yield register_method(Patient)
    METHODS.remove("patient")


def help_of(parser, capsys):
    with pytest.raises(SystemExit):
        parser(["--help"])
    return "".join(capsys.readouterr().out.replace("│", " ").split())


# --------------------------------------------------------------------------------------- structures


def test_a_new_structure_guarantees_nothing_unless_it_says_so(toy_structure):
    data = load("digits", "data", n_data=8)
    model = build("mlp", data.input_shape, data.n_classes, width=4)
    prior = GaussianPrior(model)
    evidence = MarginalLikelihood(model, "classification", n_data=8, prior=prior, structure="toy")
    assert evidence(data.x_train, data.y_train).status == "approximation"


def test_a_new_structure_is_a_method_and_a_choice_of_the_grid(toy_structure, capsys):
    config = parse(["--method", "toy", "--subset", "20"])
    assert name_of(config) == "toy-20-1"
    assert estimator("TOY-20-1") == {"method": "toy", "subset": 20, "outputs": 1}
    assert f"--method{{{','.join(METHODS)}}}" in help_of(parse, capsys)
    assert "toy" in METHODS and METHODS["toy"] is METHODS["toy"]
    grid = parse_grid(["--structures", "toy", "--train-method", "toy", "--subsets", "0"])
    assert {bound.structure for bound in bounds_of(grid.grid, 40)} == {"full", "toy"}
    names = ",".join(STRUCTURES)
    assert f"--structures[{{{names}}}" in help_of(parse_grid, capsys)


def test_a_new_structure_has_its_label_colour_and_a_marker_in_figures(toy_structure):
    assert (style.label_of("toy"), style.colour_of("toy")) == ("Toy", "#123456")
    markers = [style.marker_of(name) for name in STRUCTURES]
    assert len(set(markers)) == len(markers)


def test_only_sums_over_data_take_the_augmentation_from_blocks(toy_structure):
    whole = ["--subset", "0", "--augment", "affine", "--aug-block", "8"]
    with pytest.raises(NtkMarglikError, match=r"--method kfac or diag with --subset 0"):
        preflight.check_settings(parse([*TINY, *whole, "--method", "toy"]))
    preflight.check_settings(parse([*TINY, *whole, "--method", "diag"]))


def test_a_new_structure_is_in_the_conformance_suite(tmp_path):
    """In a process of its own, in which it is registered before tests are collected."""
    (tmp_path / "toy_plugin.py").write_text(
        "from asdl_marglik import STRUCTURES, Structure, register_structure\n"
        "register_structure(Structure('toy', STRUCTURES['diag'].parts))\n"
    )
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "toy_plugin"]
    found = subprocess.run(
        [*command, CONFORMANCE],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )
    tests = [line for line in found.stdout.splitlines() if "::" in line]
    with_toy = {line.partition("[")[0] for line in tests if re.search(r"[\[-]toy\b", line)}
    assert len(with_toy) == EVERY_STRUCTURE


def test_a_new_structure_runs(toy_structure, tmp_path, capsys):
    flags = [*TINY, "--out", str(tmp_path / "run"), "--method", "toy"]
    assert main(flags) == 0, capsys.readouterr().err
    assert "an approximation" in capsys.readouterr().out
    summary = read_summary(tmp_path / "run")
    assert summary["log_marglik_structure"] == summary["method"] == "toy"
    assert read_summary(tmp_path / "run/baseline")["log_marglik_structure"] == "toy"
    same = [*TINY, "--out", str(tmp_path / "diag"), "--method", "diag", "--no-baseline"]
    assert main(same) == 0
    assert read_summary(tmp_path / "diag")["log_marglik"] == summary["log_marglik"]


# ------------------------------------------------------------------------------------------ methods


def test_a_new_method_is_on_offer_checked_named_and_drawn(toy_method, capsys):
    config = parse([*TINY, "--method", "patient"])
    assert "patient," in help_of(parse, capsys)
    assert parse_grid(["--train-method", "patient"]).reference.train_method == "patient"
    preflight.check_settings(config)
    with pytest.raises(NtkMarglikError, match="patient needs --epochs 2"):
        preflight.check_settings(config.updated(epochs=1))
    assert name_of(config) == "patient" and estimator("PATIENT") == {"method": "patient"}
    assert (style.label_of("patient"), style.colour_of("patient")) == ("Patient", "#654321")


def test_a_new_method_runs(toy_method, tmp_path, capsys):
    flags = [*TINY, "--out", str(tmp_path / "run"), "--method", "patient"]
    assert main(flags) == 0, capsys.readouterr().err
    assert read_summary(tmp_path / "run")["method"] == "patient"
    assert read_summary(tmp_path / "run/baseline")["method"] == "map"


def test_an_unknown_method_is_refused_with_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        parse(["--method", "kfax"])
    shown = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "'kfax'" in shown and "'kfac'" in shown
    with pytest.raises(NtkMarglikError, match=r"Unknown method 'kfax'. Did you mean 'kfac'"):
        preflight.check_settings(Config().updated(method="kfax"))


def test_names_are_taken_once_and_all_methods_say_what_figures_need(toy_method):
    for method in (Patient, MeasuredByBlocks):
        with pytest.raises(NtkMarglikError, match="needs a `name` of its own"):
            register_method(method)
    looks = [(method.label, method.colour) for method in METHODS.values()]
    assert all(label and re.fullmatch("#[0-9A-F]{6}", colour) for label, colour in looks)
    assert len({colour for _, colour in looks}) == len({label for label, _ in looks}) == len(looks)


def test_no_method_inherits_from_another_that_is_on_offer():
    """The baseline least of all: what methods share is in bases."""
    for method in METHODS.values():
        assert not set(method.__mro__[1:]) & set(METHODS.values())
        assert issubclass(method, Method)


# ----------------------------------------------------------------------------------- documentation


def rows_of(page):
    """The table of estimators: names in the first column -> their guarantee in the third."""
    found = {}
    for line in (ROOT / page).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        for name in re.findall(r"`(\w[\w-]*)`", cells[0]) if line.startswith("| `") else ():
            found[name] = cells[2]
    return found


def test_the_page_of_estimators_has_every_method_and_its_guarantee():
    documented = rows_of("docs/estimators.md")
    assert set(documented) == set(METHODS)
    words = {"exact": "exact", "bound": "lower bound", "approximation": "approximation"}
    for name, structure in STRUCTURES.items():
        assert words[structure.guarantee] in documented[name]


# --------------------------------------------------------------------------------- models, settings


@pytest.mark.parametrize("model", MODELS)
def test_sizes_that_a_model_does_not_use_are_refused(model):
    for setting in ("depth", "width"):
        config = Config().updated(model=model, **{setting: 26})
        if setting in MODELS[model].uses:
            preflight.check_settings(config)
        else:
            with pytest.raises(NtkMarglikError, match=rf"--{setting} 26, but the model {model}"):
                preflight.check_settings(config)


def test_no_setting_is_in_two_minds():
    """Whether a setting changes the numbers is marked in its own group, and programs agree on it.

    Settings whose values are of another kind share a name only: the outputs of a run are a number,
    those of a grid choose its rows.
    """
    minds = {}
    for settings in (Config(), GridConfig(), FinetuneConfig()):
        groups = [getattr(settings, group.name) for group in fields(settings)]
        for group in groups:
            names = {setting.name for setting in fields(group)}
            free = set(getattr(group, "FREE", ()))
            assert free <= names, f"{type(group).__name__} marks settings of another group"
            for name in names:
                kind = type(getattr(group, name))
                minds.setdefault((name, kind), set()).add(name in free)
        assert settings.free() <= settings.flat().keys()
    assert not [name for name, mind in minds.items() if len(mind) > 1]

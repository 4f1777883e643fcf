"""Settings: flags, yaml files, their errors, and that the choices offered are the ones there
are.
"""

from pathlib import Path

import pytest
import yaml

from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.learn.methods import METHODS
from ntkmarglik.problem.models import MODELS
from ntkmarglik.programs.classify.config import Config, parse
from ntkmarglik.programs.finetune.config import FinetuneConfig
from ntkmarglik.programs.grid.config import GridConfig
from ntkmarglik.programs.paper import experiments

FLAGS = [
    "method",
    "subset",
    "outputs",
    "columns",
    "partition",
    "root",
    "dataset",
    "model",
    "augment",
    "aug-samples",
    "flip",
    "prior",
    "n-data",
    "epochs",
    "batch-size",
    "optimizer",
    "lr",
    "lr-min",
    "lr-hyp",
    "lr-hyp-min",
    "lr-aug",
    "lr-aug-min",
    "burnin",
    "frequency",
    "prior-steps",
    "aug-steps",
    "seed",
    "device",
    "precision",
    "out",
    "resume",
    "wandb",
    "tensorboard",
    "dry-run",
    "data-root",
    "depth",
    "width",
    "threads",
]


def written(tmp_path, text, name="settings.yaml"):
    """A file with a text, or with bytes."""
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def refusal(arguments, capsys):
    """What a person reads when the command line is refused."""
    with pytest.raises((SystemExit, NtkMarglikError)) as refused:
        parse(arguments)
    if isinstance(refused.value, SystemExit):
        assert refused.value.code == 2
        return " ".join(capsys.readouterr().err.replace("│", " ").split())
    return str(refused.value)


def test_methods_and_models_on_offer_are_the_registered_ones(capsys):
    with pytest.raises(SystemExit):
        parse(["--help"])
    shown = "".join(capsys.readouterr().out.replace("│", " ").split())
    assert f"--method{{{','.join(METHODS)}}}" in shown
    assert f"--model{{{','.join(MODELS)}}}" in shown


def test_the_main_command_is_the_published_estimator():
    main = parse(["--method", "ntk", "--subset", "500", "--outputs", "1"])
    assert main == Config() and main.estimator.inducing == 0
    assert main.command() == "python classification_image.py --method ntk"


def test_a_command_without_a_method_takes_the_conditioned_bound():
    bare = parse([])
    assert bare == Config().updated(method="ntk-conditioned")
    assert bare.command() == "python classification_image.py"
    estimator = bare.estimator
    assert (estimator.subset, estimator.inducing, bare.training.steps_per_block) == (400, 0.5, 4)


def test_another_method_brings_its_own_defaults_along_but_keeps_what_was_given():
    bare = parse(["--subset", "300"])
    published = bare.updated(method="ntk")
    assert (published.estimator.subset, published.estimator.inducing) == (300, 0)
    assert published.updated(method="ntk-conditioned") == bare
    assert parse([]).updated(method="kfac") == Config().updated(method="kfac")


def test_help_groups_the_flags_and_explains_each(capsys):
    with pytest.raises(SystemExit) as ended:
        parse(["--help"])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert ended.value.code == 0 and "--config" in shown
    for group in ("estimator", "problem", "hyperparameters", "training", "run", "sampling"):
        assert f"{group} options" in shown
    assert all(f"--{flag}" in shown for flag in FLAGS)
    names = list(Config().flat())
    assert len(names) == len(set(names)) == shown.count("(default:")


@pytest.mark.parametrize(
    "arguments, parts",
    [
        (["--epoch", "3"], ["--epoch", "Perhaps you meant", "--epochs"]),
        (["--method", "ntl"], ["'ntl'", "--method", "'ntk'"]),
        (["--epochs", "many"], ["--epochs", "many"]),
        (["--config"], ["--config", "yaml"]),
        (["--config", "absent.yaml"], ["absent.yaml", "No such file"]),
    ],
    ids=" ".join,
)
def test_a_wrong_flag_is_refused_with_a_suggestion(arguments, parts, capsys):
    message = refusal(arguments, capsys)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    "text, parts",
    [
        ("epoch: 3", ["settings.yaml", "'epoch'", "'epochs'"]),
        ("zzz: 3", ["'zzz'", "--help"]),
        ("method: ntl", ["'ntl'", "'ntk'"]),
        ("lr: fast", ["--lr", "fast"]),
        ("epochs: yes", ["epochs", "like 100", "True"]),
        ("flip: 3", ["flip", "true or false", "3"]),
        ("epochs: [1, 2]", ["epochs", "single value"]),
        ("training: {epochs: 3}", ["'training'"]),
        ("- epochs", ["name: value", "list"]),
        ("epochs: {", ["not valid yaml"]),
        ("epochs: 3\nepochs: 4", ["'epochs' stands there twice"]),
        ("epochs: 2026-99-99", ["not valid yaml"]),
        ("classes: [[1], 2]", ["classes"]),
        ("epochs: " + "[" * 3000, ["nested too deeply"]),
        ("x" * 400 + ": 1", ["unknown setting 'xxx", "..."]),
        ("seed: " + "9" * 5000, ["not valid yaml", "digits"]),
        ("#" * (2**20 + 1), ["no file of settings"]),
        (b"lr: \xff\xfe", ["not text in UTF-8"]),
        (b"lr: 0.1\x00", ["not valid yaml"]),
    ],
)
def test_a_wrong_yaml_file_is_refused_with_a_suggestion(text, parts, tmp_path, capsys):
    message = refusal(["--config", written(tmp_path, text)], capsys)
    assert all(part in message for part in parts), message


def test_yaml_numbers_may_be_in_scientific_notation(tmp_path):
    path = written(
        tmp_path, "lr: 1e-3\nlr_min: 1E-9\nlr-hyp: 2.5e-1\nprior_precision: 1.0e+2\nlr_aug: .5\n"
    )
    config = parse(["--config", path])
    assert (config.training.lr, config.training.lr_min, config.training.lr_hyp) == (
        1e-3,
        1e-9,
        0.25,
    )
    assert (config.hyperparameters.prior_precision, config.training.lr_aug) == (100.0, 0.5)


def test_flags_override_files_and_later_files_earlier_ones(tmp_path):
    first = written(tmp_path, "epochs: 3\nflip: true\nseed: 5\nbaseline: false\nout:", "a.yaml")
    second = written(tmp_path, "epochs: 4\nmethod: kfac\n", "b.yaml")
    config = parse(
        ["--seed", "7", "--no-flip", "--config", first, f"--config={second}", "--epochs", "6"]
    )
    assert (config.training.epochs, config.run.seed, config.estimator.method) == (6, 7, "kfac")
    assert (config.hyperparameters.flip, config.run.baseline, config.run.out) == (
        False,
        False,
        None,
    )
    assert parse(["--epochs", "3", "--epochs", "4"]).training.epochs == 4
    assert parse(["--config", written(tmp_path, "", "empty.yaml")]) == parse([])


def test_settings_survive_yaml_and_the_command_line(tmp_path):
    config = Config().updated(
        method="kfac",
        subset=0,
        lr=1e-7,
        flip=True,
        augment="affine",
        baseline=False,
        prior_precision=1e12,
        out=tmp_path / "a b",
        data_root=tmp_path,
    )
    path = written(tmp_path, yaml.safe_dump(config.flat()))
    assert parse(["--config", path]) == config
    assert parse(config.arguments()) == config
    assert (
        config.command().startswith("python classification_image.py --method kfac")
        and "a b'" in config.command()
    )
    assert parse(["--config", path, "--resume"]).run.resume


def test_an_unknown_setting_cannot_be_updated():
    with pytest.raises(NtkMarglikError, match="epoch"):
        Config().updated(epoch=3)


@pytest.mark.parametrize("kind", [Config, GridConfig, FinetuneConfig])
def test_settings_that_do_not_change_numbers_are_marked_once_where_they_are(kind):
    free, known = kind().free(), kind().flat()
    assert (
        {"out", "device", "threads", "dry_run", "data_root"} & known.keys() <= free <= known.keys()
    )
    assert not {"seed", "precision", "grid_precision"} & free


def test_a_timeout_is_not_part_of_what_is_computed():
    other = Config().updated(collective_timeout=30.0, tensorboard=True, out=Path("there"))
    assert not experiments.difference(Config(), other)
    other.refuse_other(Config().flat())
    with pytest.raises(NtkMarglikError, match="lr_hyp"):
        other.refuse_other(Config().updated(lr_hyp=0.2).flat())

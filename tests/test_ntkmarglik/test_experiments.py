"""The paper's experiments: settings as it states them, and commands that the runner takes, every
one of them.
"""

import os
import re
import shlex
from pathlib import Path

import pytest
from generators import ROOT, printed, script

from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.problem.models import DEPTH, MODELS, build
from ntkmarglik.programs.classify.command import main
from ntkmarglik.programs.classify.config import parse
from ntkmarglik.programs.finetune.config import parse as parse_finetuning
from ntkmarglik.programs.finetune.plan import PLANS
from ntkmarglik.programs.grid.config import parse as parse_grid
from ntkmarglik.programs.paper import experiments
from ntkmarglik.programs.paper.experiments import (
    difference,
    estimator,
    label_of,
    load,
    load_grid,
)

GENERATORS = ["bound", "cifar", "lila", "tiny", "timing", "subset"]
SMALL_WIDTH = {"mininet": 0, "wrn": 1, "resnet": 2, "resnet50": 4}
# epochs, batch, lr, lr_min; burnin, frequency, prior steps, aug steps; lr_hyp, its end, lr_aug, its
# end
STATED = {
    "bound-prior": (500, 250, 1e-3, 1e-9, 10, 5, 10, None, 0.1, 0.01, None, None),
    "bound-lila": (500, 250, 1e-3, 1e-9, 10, 1, 2, 2, 0.1, 0.01, 0.05, 0.005),
    "cifar": (300, 128, 0.1, 1e-8, 10, 5, 50, None, 0.1, 0.1, None, None),
    "cifar-lila": (200, 128, 0.1, 1e-6, 10, 1, 4, 20, 0.1, 0.1, 0.01, 0.001),
    "cifar-subsets": (200, 128, 0.1, 1e-6, None, None, None, 100, 0.1, None, 0.01, 0.001),
    "tiny": (100, 128, 0.1, 1e-6, 10, 5, 50, None, 0.1, 0.1, None, None),
    "tiny-lila": (100, 128, 0.1, 1e-6, 10, 1, 4, 50, 0.1, 0.1, 0.01, 0.001),
}
NAMES = (
    *("epochs", "batch_size", "lr", "lr_min", "burnin", "frequency", "prior_steps", "aug_steps"),
    *("lr_hyp", "lr_hyp_min", "lr_aug", "lr_aug_min"),
)


# ----------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize("name", STATED)
def test_settings_are_those_of_the_paper(name):
    settings = load(name).flat()
    for setting, value in zip(NAMES, STATED[name], strict=True):
        assert value is None or settings[setting] == value, setting
    assert (settings["optimizer"] == "adam") == (
        name.startswith("bound") or name.endswith("subsets")
    )
    assert (settings["augment"] == "affine") == (name.endswith("lila") or name == "cifar-subsets")
    assert settings["prior"] == "layerwise" and not settings["baseline"]


def test_all_data_have_their_own_rates_and_the_timing_its_own_steps():
    lila, subsets = (
        load("cifar-lila", "cifar-lila-full"),
        load("cifar-subsets", "cifar-subsets-full"),
    )
    assert (lila.training.lr_aug, lila.training.lr_aug_min, lila.training.epochs) == (
        0.05,
        0.005,
        200,
    )
    assert (subsets.training.lr_aug, subsets.training.aug_steps, subsets.estimator.subset) == (
        0.05,
        10,
        0,
    )
    for upon in ("bound-prior", "bound-lila"):
        timing = load(upon, "timing")
        changed = difference(load(upon), timing)
        assert set(changed) <= {
            "batch_size",
            "epochs",
            "burnin",
            "frequency",
            "prior_steps",
            "aug_steps",
        }
        steps = (
            timing.training.burnin,
            timing.training.frequency,
            timing.training.prior_steps,
            timing.training.aug_steps,
        )
        assert steps == (0, 1, 1, 1) and (timing.training.epochs, timing.training.batch_size) == (
            5,
            1000,
        )


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda p: str(p.relative_to(ROOT))
)
def test_every_file_is_read_and_says_what_it_is(path):
    (parse_grid if path.name.startswith("bound-grid") else parse)(["--config", str(path)])
    assert path.read_text().startswith("# ")
    assert path.parent.name != "small" or (path.parent.parent / path.name).exists()


def test_a_small_experiment_differs_in_size_only():
    changed = difference(load("cifar"), load("cifar", scale="small"))
    assert changed["epochs"][0] == 300 and changed["n_data"][0] == 0
    assert "n_data all -> 2000" in experiments.described(changed)
    assert (
        difference(load("cifar"), load("cifar").updated(seed=3, out=Path("x"), resume=True)) == {}
    )


def test_estimators_are_named_as_in_the_paper():
    assert estimator("KFAC-N-1") == {"method": "kfac", "subset": 0, "outputs": 1}
    assert estimator("ntk-70-C") == {"method": "ntk", "subset": 70, "outputs": 0}
    assert estimator("MAP") == {"method": "map"} and estimator("Augerino") == {"method": "augerino"}
    for label in ("ntk-500-1", "kfac-N-C", "map", "augerino"):
        assert label_of(load("cifar").updated(**estimator(label))) == label
    varied = load("cifar").updated(
        **estimator("NTK-20-1"), columns="iid", partition="class", root="fisher"
    )
    assert label_of(varied) == "ntk-20-1 (fisher) iid grouped"
    for wrong in ("kfac", "kfac-n", "kfac-x-1", "map-1-1-1"):
        with pytest.raises(NtkMarglikError, match="METHOD-S-K"):
            estimator(wrong)


# ----------------------------------------------------------------------------------------- commands


@pytest.mark.parametrize("scale", ["full", "small"])
@pytest.mark.parametrize("generator", GENERATORS)
def test_every_line_is_a_command_of_the_runner(generator, scale, capsys, monkeypatch):
    lines = printed(generator, capsys, monkeypatch, "--scale", scale, "--device", "cpu", "--wandb")
    commands = [line for line in lines if not line.startswith("#")]
    folders, parsed = set(), {}
    grids = [line for line in commands if line.startswith("python scripts/bound_grid.py ")]
    assert all(
        parse_grid(shlex.split(line)[2:]).command() == line and " --device cpu" in line
        for line in grids
    )
    assert bool(grids) == (generator == "bound")
    commands = [line for line in commands if line not in grids]
    for line in commands:
        # the runs of several seeds are parsed once: only these two settings differ
        seed, out = re.search(r" --seed (\d+)", line), re.search(r" --out (\S+)", line)
        shared = line.replace(seed[0] if seed else "", "").replace(out[0], "")
        if shared not in parsed:
            parsed[shared] = parse(shlex.split(line)[2:])
        config = parsed[shared].updated(seed=int(seed[1]) if seed else 0, out=Path(out[1]))
        assert config.command() == line and line.startswith("python classification_image.py ")
        assert (
            config.run.wandb
            and config.run.device == "cpu"
            and config.run.resume
            and not config.run.baseline
        )
        folders.add(config.run.out)
    assert len(folders) == len(commands) > 5
    assert sum(line.startswith("# reduced: ") for line in lines) == (scale == "small") * len(
        script_of(generator)
    )


@pytest.mark.parametrize("scale, n_lines, n_rates", [("full", 924, 4), ("small", 48, 1)])
def test_every_search_of_the_emphasised_bound_is_a_command(
    scale, n_lines, n_rates, capsys, monkeypatch
):
    lines = printed("finetune", capsys, monkeypatch, "--scale", scale, "--wandb", "--seeds", "5")
    commands = [line for line in lines if not line.startswith("#")]
    assert len(set(commands)) == len(commands) == n_lines
    assert len({re.search(r" --out (\S+)", line)[1] for line in commands}) == n_lines
    for line in commands[:: n_lines // 24]:
        config = parse_finetuning(shlex.split(line)[2:])
        assert config.command() == line and line.startswith("python scripts/finetune.py ")
        assert config.run.seed == 5 and config.run.wandb and config.run.resume
    networks = script("generate_finetune_commands").experiments(scale)
    configs = [config for network in networks for config in network.configs]
    found = {(c.task.dataset, c.task.n_data, c.search.prior, c.search.method) for c in configs}
    for dataset, size in (("cifar10", 100), ("ag_news", 400)):
        methods = {m for d, n, p, m in found if (d, n, p) == (dataset, size, "l2-sp")}
        assert methods == set(PLANS) - {"map"}
    priors = {"l2-sp", "l2-zero"} | ({"ptyl"} if scale == "small" else set())
    assert {prior for _, _, prior, _ in found} == priors
    rates = {c.search.rates for c in configs if c.search.method == "de-elbo"}
    assert len(rates) == n_rates


def script_of(generator):
    return script(f"generate_{generator}_commands").experiments("full")


def runs_of(generator, scale="full"):
    return [
        e
        for e in script(f"generate_{generator}_commands").experiments(scale)
        if not e.name.startswith("bound-grid")
    ]


def test_the_paper_is_complete():
    seeds = {e.name: len(e.seeds) for generator in GENERATORS for e in runs_of(generator)}
    assert seeds == {
        "bound-prior": 3,
        "bound-lila": 3,
        "cifar": 5,
        "cifar-lila": 3,
        "tiny": 3,
        "tiny-lila": 3,
        "timing-prior": 1,
        "timing-lila": 1,
        "cifar-subsets": 3,
    }
    (lila,) = script_of("lila")
    of_all_data = {
        label_of(c): (c.training.aug_steps, c.estimator.aug_blocks, c.estimator.aug_block)
        for c in lila.configs
    }
    assert (of_all_data["kfac-N-1"], of_all_data["kfac-N-C"]) == ((1, 45, 120), (1, 140, 40))
    for experiment in runs_of("bound"):
        labels = [label_of(config) for config in experiment.configs]
        assert len(labels) == len(set(labels))
        assert {
            "map",
            "full-N-C",
            "diag-N-C",
            "ntk-10-C",
            "ntk-250-1 grouped",
            "kfac-500-C grouped",
        } <= set(labels)
    prior, invariance = script_of("tiny")
    assert [label_of(c) for c in prior.configs] == ["map", "ntk-400-1", "kfac-400-1"]
    assert [label_of(c) for c in invariance.configs] == ["augerino", "ntk-70-1 iid", "kfac-60-1"]


def test_grid_networks_are_trained_as_the_caption_says():
    for name in ("bound-grid-prior", "bound-grid-rotation"):
        grid = load_grid(name).flat()
        assert (grid["epochs"], grid["lr_min"]) == (500, 1e-9)
        assert (grid["train_subset"], grid["train_outputs"]) == (0, 0)  # "full"


# generator, variant -> settings in which some of its runs differ from those of the paper's text
OTHER_READINGS = {
    ("subset", "sgd"): {"optimizer": ("adam", "sgd")},
    ("subset", "labels"): {"partition": ("random", "class")},
    ("lila", "steps"): {"aug_steps": (1, 45), "aug_blocks": (45, 1)},
    ("bound", "code"): {"epochs": (500, 100), "lr_min": (1e-9, 1e-4)},
}


@pytest.mark.parametrize("generator, variant", OTHER_READINGS, ids=" ".join)
def test_another_reading_differs_where_it_says_and_has_folders_of_its_own(
    generator, variant, capsys, monkeypatch
):
    module = script(f"generate_{generator}_commands")
    expected = OTHER_READINGS[generator, variant]
    found = []
    paper, other = module.experiments("full"), module.experiments("full", variant)
    for experiment, own in zip(paper, other, strict=False):
        assert own.name == f"{experiment.name}-{variant}"
        for config, changed in zip(experiment.configs, own.configs, strict=True):
            found.append(difference(config, changed))
    assert expected in found and all(set(change) <= set(expected) for change in found)
    lines = printed(generator, capsys, monkeypatch, "--variant", variant)
    commands = [line for line in lines if not line.startswith("#")]
    assert commands and all(f"-{variant}" in line.split(" --out ")[1] for line in commands)


def test_the_demonstration_of_the_slides(capsys):
    """ResNet-18 of 11 million weights on all of CIFAR-100; small: a hundred thousand on 5,000."""
    sizes = {}
    for scale in ("full", "small"):
        (experiment,) = script("generate_sampled_commands").experiments(scale)
        (line, *_) = experiment.commands(Path("runs"), [0], device="cpu")
        config = parse(shlex.split(line)[2:])
        settings = config.flat()
        size = {name: settings[name] for name in ("depth", "width")}
        model = build("resnet_norm", (3, 32, 32), 100, **size)
        sizes[scale] = sum(p.numel() for p in model.parameters()), settings["n_data"]
        assert settings["g_prior"] and settings["burnin"] == settings["epochs"]
        tiny = {"dataset": "digits", "n_data": 8, "subset": 4, "width": 1, "depth": 10}
        assert main(config.updated(**tiny, dry_run=True).arguments()) == 0
    assert sizes["full"][0] > 11e6 and sizes["full"][1] == 0
    assert sizes["small"][0] > 1e5 and sizes["small"][1] >= 5000
    full = load("cifar100-sampled").sampling
    assert (full.samples, full.em_steps, full.em_precision, full.solver) == (6, 10, 1000, "sgd")


def kinds(scale):
    """One run of every kind: experiment, method, and whether it sees all data at once."""
    found = {}
    for generator in GENERATORS:
        for experiment in runs_of(generator, scale):
            for config in experiment.configs:
                data = "all" if config.estimator.subset == 0 else "blocks"
                found.setdefault(f"{experiment.name} {config.estimator.method} {data}", config)
    return found


@pytest.mark.parametrize(
    "kind, config", kinds("full").items(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_one_of_each_kind_could_run(kind, config, capsys):
    """On digits in place of its own data, with a narrow network."""
    variant = config.problem.dataset.partition("_")[2]
    stand_in = config.updated(
        dataset="digits" + (f"_{variant}" if variant else ""),
        n_data=12,
        width=SMALL_WIDTH[config.problem.model],
        depth=10 if "depth" in MODELS[config.problem.model].uses else DEPTH,
        subset=min(6, config.estimator.subset),
        aug_block=min(4, config.estimator.aug_block),
        aug_blocks=min(3, config.estimator.aug_blocks),
        aug_samples=2,
        batch_size=4,
        dry_run=True,
    )
    assert main(stand_in.arguments()) == 0, capsys.readouterr().err
    assert "s in all" in capsys.readouterr().out


@pytest.mark.data
@pytest.mark.skipif(
    "NTKMARGLIK_DATA" not in os.environ, reason="set NTKMARGLIK_DATA to the data root"
)
@pytest.mark.parametrize(
    "kind, config",
    kinds("small").items(),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_one_of_each_small_kind_could_run_on_its_data(kind, config, capsys):
    assert (
        main(
            config.updated(data_root=Path(os.environ["NTKMARGLIK_DATA"]), dry_run=True).arguments()
        )
        == 0
    )
    assert "s in all" in capsys.readouterr().out

"""Fine-tuning: pretrained networks as their library saves them, every method from flags to a run
folder, resume.
"""

import io
import itertools
import json
import math
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch
import transformers
import yaml
from generators import script
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from torch.func import functional_call

from laplace_marglik import DiagonalLaplace
from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.programs.finetune import (
    checkpoints,
    examples,
    inputs,
    pretrained,
    priors,
    rows,
    swag,
)
from ntkmarglik.programs.finetune.checkpoints import Place
from ntkmarglik.programs.finetune.command import main
from ntkmarglik.programs.finetune.config import FinetuneConfig, Search, parse
from ntkmarglik.programs.finetune.fit import Fit
from ntkmarglik.programs.finetune.objectives import Map
from ntkmarglik.programs.finetune.plan import PLANS, Candidate, Result, best
from ntkmarglik.programs.finetune.run import PREDICT_SEED
from ntkmarglik.programs.finetune.scores import macro_accuracy
from ntkmarglik.runs.folder import read_summary
from ntkmarglik.runs.metrics import read_metrics

WORDS = {
    0: "war peace vote king",
    1: "goal match team win",
    2: "bank price market oil",
    3: "chip code data robot",
}
TINY = [
    "--steps",
    "4",
    "--rates",
    "0.1",
    "0.01",
    "--draws",
    "2",
    "--threads",
    "1",
    "--batch-size",
    "8",
]
GRID = [
    "--backbone-decays",
    "1e-2",
    "1e-4",
    "--head-decays",
    "1e-3",
    "--trials",
    "6",
    "--laplace-steps",
    "3",
]
CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def convnext(tmp_path_factory):
    """A ConvNeXt for pictures of 8 pixels."""
    folder = tmp_path_factory.mktemp("convnext")
    torch.manual_seed(0)
    config = transformers.ConvNextConfig(
        patch_size=2,
        num_stages=2,
        depths=[1, 1],
        hidden_sizes=[4, 8],
        image_size=8,
        num_labels=3,
        layer_scale_init_value=0.1,
    )
    transformers.ConvNextForImageClassification(config).save_pretrained(folder)
    processor = transformers.ConvNextImageProcessorPil(
        size={"shortest_edge": 8}, crop_pct=1.0, image_std=[0.25] * 3
    )
    processor.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def bert(tmp_path_factory):
    """A BERT whose words are those of WORDS; it has dropout."""
    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *" ".join(WORDS.values()).split()]
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=8).save_pretrained(
        folder
    )
    config = transformers.BertConfig(
        vocab_size=len(words),
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=8,
    )
    transformers.BertForMaskedLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    """Texts of four classes and pictures of several sizes, as the hub has them."""
    root = tmp_path_factory.mktemp("data")
    draw = np.random.default_rng(0)
    for split, size in (("train", 40), ("test", 20)):
        labels = np.arange(size) % 4
        texts = [" ".join(draw.choice(WORDS[c].split(), draw.integers(2, 6))) for c in labels]
        _write(root / "ag_news" / f"{split}.parquet", text=texts, label=labels)
        pictures = []
        for number in range(size):
            pixels = draw.integers(0, 255, (9 + number % 3, 12, 3), np.uint8)
            stream = io.BytesIO()
            Image.fromarray(pixels).save(stream, "PNG")
            pictures.append({"bytes": stream.getvalue(), "path": None})
        _write(root / "pets37" / f"{split}-00000-of-00001.parquet", image=pictures, label=labels)
    return root


def _write(path, **columns):
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table({name: list(values) for name, values in columns.items()}), path)


def digits(convnext, *more):
    task = [
        "--checkpoint",
        convnext,
        "--dataset",
        "digits",
        "--classes",
        "7",
        "1",
        "4",
        "--n-data",
        "12",
    ]
    return [*task, "--n-test", "30", *TINY, *GRID, *more]


def news(bert, root, *more):
    task = [
        "--checkpoint",
        bert,
        "--dataset",
        "ag_news",
        "--data-root",
        str(root),
        "--n-data",
        "16",
    ]
    return [*task, *TINY, *GRID, *more]


def summary_of(path):
    return read_summary(path)


def without_times(value):
    if isinstance(value, dict):
        return {
            k: without_times(v)
            for k, v in value.items()
            if "seconds" not in k and k != "peak_memory_bytes"
        }
    return value


# ------------------------------------------------------------------------------ networks and inputs


def test_the_backbone_is_the_checkpoints_and_the_head_is_new(convnext):
    stored = transformers.ConvNextForImageClassification.from_pretrained(convnext).state_dict()
    models = [pretrained.load(Place(convnext), 3, text=False, seed=seed) for seed in (0, 0, 1)]
    for name, value in models[0].network.state_dict().items():
        assert (
            torch.equal(value, stored[name]) == name.startswith("convnext.")
            or name == "classifier.bias"
        )
    heads = [model.network.classifier.weight for model in models]
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])
    assert pretrained.load(Place(convnext), 5, text=False, seed=0)(
        torch.zeros(2, 3, 8, 8)
    ).shape == (2, 5)


def test_the_prior_pulls_to_pretrained_weights_and_the_head_to_zero(convnext):
    model = pretrained.load(Place(convnext), 3, text=False, seed=0)
    prior = priors.l2_sp(model).at(model, 2.0, 3.0)
    assert prior.group_names == ["backbone", "head"] and prior.precision.tolist() == pytest.approx(
        [2.0, 3.0]
    )
    assert prior.squares(dict(model.named_parameters())).tolist() == pytest.approx(
        [0.0, model.network.classifier.weight.double().square().sum().item()]
    )


def test_pixels_are_as_the_checkpoint_says(convnext):
    train, _, _ = examples.read("digits", "nowhere")
    prepare = pretrained.Preparation(Place(convnext), text=False, max_length=0)
    mean = np.array(
        json.loads((Path(convnext) / "preprocessor_config.json").read_text())["image_mean"]
    )
    grey = train.inputs[:5, :, :, 0].astype(float) / 255
    expected = (np.stack([grey] * 3, 1) - mean.reshape(1, 3, 1, 1)) / 0.25
    np.testing.assert_allclose(prepare(train, np.arange(5)).numpy(), expected, atol=1e-5)
    assert train.inputs.max() == 255


def test_pictures_of_any_size_become_inputs_of_one(convnext, root):
    train, test, n_classes = examples.read("pets37", root)
    assert (len(train), len(test), n_classes) == (40, 20, 37)
    assert {train.picture(i).shape for i in range(3)} == {(9, 12, 3), (10, 12, 3), (11, 12, 3)}
    part = inputs.Part.of(
        train, pretrained.Preparation(Place(convnext), text=False, max_length=0), CPU
    )
    x, y = part.batch(torch.tensor([3, 1]))
    assert x.shape == (2, 3, 8, 8) and y.tolist() == [3, 1]


def test_inputs_made_batch_by_batch_are_the_same(convnext, root, monkeypatch):
    train, _, _ = examples.read("pets37", root)
    prepare = pretrained.Preparation(Place(convnext), text=False, max_length=0)
    kept = inputs.Part.of(train, prepare, CPU)
    monkeypatch.setattr(inputs, "KEPT_BYTES", 0)
    made = inputs.Part.of(train, prepare, CPU)
    index = np.array([4, 9, 2])
    for part in (made, made.chosen(np.arange(40)[::-1].copy()).chosen(39 - index)):
        rows_ = torch.from_numpy(index) if part is made else torch.arange(3)
        assert torch.equal(part.batch(rows_)[0], kept.batch(torch.from_numpy(index))[0])


def test_padding_does_not_matter(bert, root):
    """Our mask gives what the library makes of its own, and what a text gives alone."""
    model = pretrained.load(Place(bert), 4, text=True, seed=0).eval()
    part = inputs.Part.of(
        examples.read("ag_news", root)[0],
        pretrained.Preparation(Place(bert), text=True, max_length=8),
        CPU,
    )
    x, _ = part.batch(torch.arange(6))
    assert x["attention_mask"].sum(1).unique().numel() > 1
    together = model(x)
    assert torch.allclose(together, model.network(**x).logits, atol=1e-6)
    alone = torch.cat([model(part.batch(torch.tensor([i]))[0]) for i in range(6)])
    assert torch.allclose(together, alone, atol=1e-6)


def test_the_curvature_of_a_bert_is_that_of_single_gradients(bert, root):
    model = pretrained.load(Place(bert), 4, text=True, seed=0).eval()
    part = inputs.Part.of(
        examples.read("ag_news", root)[0],
        pretrained.Preparation(Place(bert), text=True, max_length=8),
        CPU,
    )
    part = part.chosen(np.arange(5))
    laplace = DiagonalLaplace(
        model, "classification", priors.l2_sp(model).at(model, 1.0, 1.0), part.batches(2)
    )
    expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for i in range(5):
        x, y = part.batch(torch.tensor([i]))
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        for name, p in model.named_parameters():
            expected[name] += 0 if p.grad is None else p.grad.square()
    for name, h in laplace.curvature.items():
        assert torch.allclose(h, expected[name], atol=1e-6, rtol=1e-3), name


def test_map_minimises_its_formula(convnext):
    torch.manual_seed(0)
    model = pretrained.load(Place(convnext), 3, text=False, seed=0)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    alpha, beta, n = 0.3, 0.2, 7
    prior = priors.l2_sp(model).at(model, alpha * n, beta * n)
    objective = Map(model, prior, n, Search(), torch.Generator())
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    x, y = torch.randn(5, 3, 8, 8), torch.tensor([0, 1, 2, 1, 0])
    log_p = model(x).double().log_softmax(1)
    expected = -sum(log_p[i, c] for i, c in enumerate(y)) / 5
    for name, p in model.named_parameters():
        backbone = name.startswith("network.convnext.")
        away = (p - start[name]) if backbone else p
        expected = expected + (alpha if backbone else beta) / 2 * away.double().square().sum()
    assert objective.loss(x, y).item() == pytest.approx(expected.item(), rel=1e-5)


# ------------------------------------------------------------------------------------------- priors


@pytest.fixture(scope="session")
def remembered(convnext, tmp_path_factory):
    """The ConvNeXt with the statistics of a random walk around its weights."""
    folder = tmp_path_factory.mktemp("remembered")
    shutil.copytree(convnext, folder, dirs_exist_ok=True)
    walk(pretrained.load(Place(convnext), 3, text=False, seed=0))[0].statistics().save(folder)
    return str(folder)


def walk(model, steps=8):
    """A collection along a random walk, and the weights that it took [steps] by name."""
    generator = torch.Generator().manual_seed(1)
    collection, taken = swag.Collection(model), []
    for _ in range(steps):
        for w in swag.backbone(model).values():
            w.add_(0.3 * torch.randn(w.shape, generator=generator))
        collection.add()
        taken.append({name: w.clone() for name, w in swag.backbone(model).items()})
    return collection, taken


def test_statistics_are_those_of_the_weights_that_were_taken(convnext):
    model = pretrained.load(Place(convnext), 3, text=False, seed=0)
    collection, taken = walk(model)
    found = collection.statistics()
    assert set(found.mean) == {
        name.removeprefix("network.")
        for name, _ in model.named_parameters()
        if name.startswith("network.convnext.")
    }
    for name in found.mean:
        w = torch.stack([weights[name].double() for weights in taken])
        torch.testing.assert_close(found.mean[name].double(), w.mean(0), atol=1e-6, rtol=1e-5)
        expected = w.var(0, correction=0)
        torch.testing.assert_close(found.variance[name].double(), expected, atol=1e-6, rtol=1e-5)
        away = [w[t] - w[: t + 1].mean(0) for t in range(8 - swag.RANK, 8)]
        expected = torch.stack(away, -1)
        torch.testing.assert_close(found.deviations[name].double(), expected, atol=1e-6, rtol=1e-5)
    with pytest.raises(NtkMarglikError, match="more than 5 times"):
        walk(model, steps=5)[0].statistics()


def test_small_checkpoints_have_the_statistics_of_more_training(convnext, root, monkeypatch):
    made = script("make_small_checkpoints")
    monkeypatch.setattr(made, "SWAG_EVERY", 2)
    model = pretrained.load(Place(convnext), 37, text=False, seed=0)
    before = {name: w.clone() for name, w in swag.backbone(model).items()}
    prepare = pretrained.Preparation(Place(convnext), text=False, max_length=0)
    part = inputs.Part.of(examples.read("pets37", root)[0], prepare, CPU)
    collection = made.along(model, part, torch.Generator().manual_seed(0), 12)
    found = collection.statistics()
    after = swag.backbone(model)
    for name, mean in found.mean.items():
        assert found.deviations[name].shape == (*mean.shape, swag.RANK)
    for weights in (before, after):
        assert any(not torch.equal(mean, weights[name]) for name, mean in found.mean.items())
    monkeypatch.setattr(sys, "argv", ["x", "convnext", "--swag-steps", "11"])
    with pytest.raises(SystemExit, match="2"):
        made.main()


def test_the_mode_under_the_prior_of_a_pretraining(remembered):
    """Its loss is the log density of torch's low-rank Gaussian, up to a constant."""
    model = pretrained.load(Place(remembered), 3, text=False, seed=0)
    statistics = swag.read(Place(remembered), model)
    alpha, beta, n = 0.3, 0.2, 7
    prior = priors.ptyl(statistics, 0.1).at(model, alpha * n, beta * n)
    objective = Map(model, prior, n, Search(prior="ptyl"), torch.Generator())
    x, y = torch.randn(5, 3, 8, 8), torch.tensor([0, 1, 2, 1, 0])

    def flat(kind):
        return torch.cat(
            [
                getattr(statistics, kind)[name]
                .double()
                .flatten(0, -2 if kind == "deviations" else -1)
                for name in statistics.mean
            ]
        )

    scale = 1 / (alpha * n)
    gaussian = torch.distributions.LowRankMultivariateNormal(
        flat("mean"),
        (scale / 8) ** 0.5 * flat("deviations"),
        scale * (flat("variance") / 2 + 0.1),
    )
    w = torch.cat([w.double().flatten() for w in swag.backbone(model).values()])
    away = gaussian.log_prob(w) - gaussian.log_prob(flat("mean"))
    head = sum(
        p.double().square().sum()
        for name, p in model.named_parameters()
        if not name.startswith("network.convnext.")
    )
    data = nn.functional.cross_entropy(model(x).double(), y)
    expected = data - away / n + beta / 2 * head
    assert objective.loss(x, y).item() == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.parametrize("prior", ["l2-zero", "ptyl"])
@pytest.mark.parametrize("method", ["map", "map-gs", "elbo", "de-elbo"])
def test_priors_from_flags_to_a_run_folder(prior, method, remembered, tmp_path):
    flags = digits(remembered, "--method", method, "--prior", prior, "--out", str(tmp_path / "run"))
    assert main(flags) == 0
    summary = summary_of(tmp_path / "run")
    assert summary["prior"] == prior and math.isfinite(summary["objective"])
    assert ("probit_test_ece" in summary) == (prior == "l2-zero" and method != "map")
    assert rows.run_row(tmp_path / "run")["prior"] == prior
    assert f"{method}, {prior}" in rows.table([rows.run_row(tmp_path / "run")])


def test_l2_zero_pulls_everything_to_zero(convnext):
    model = pretrained.load(Place(convnext), 3, text=False, seed=0)
    prior = priors.family(Search(prior="l2-zero"), model, None).at(model, 2.0, 2.0)
    weights = dict(model.named_parameters())
    expected = 2 * sum(w.double().square().sum() for w in weights.values())
    assert prior.penalty(weights).item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_run_with_other_statistics_is_not_continued(remembered, tmp_path, capsys):
    folder, out = tmp_path / "network", tmp_path / "run"
    shutil.copytree(remembered, folder)
    flags = digits(str(folder), "--prior", "ptyl", "--rates", "0.01", "--out", str(out))
    assert main(flags) == 0
    (out / "summary.json").unlink()
    assert main([*flags, "--resume"]) == 0
    model = pretrained.load(Place(str(folder)), 3, text=False, seed=0)
    walk(model, steps=9)[0].statistics().save(folder)
    capsys.readouterr()
    (out / "summary.json").unlink()
    assert main([*flags, "--resume"]) == 2
    assert "The network of the run to resume" in capsys.readouterr().err


def test_statistics_that_do_not_fit_are_told(convnext, remembered, tmp_path, capsys):
    for method in ("la-lml", "la-clml"):
        assert main(digits(remembered, "--method", method, "--prior", "ptyl")) == 2
        assert "map, map-gs, map-bo, elbo, de-elbo" in capsys.readouterr().err
    assert main(digits(convnext, "--prior", "ptyl", "--out", str(tmp_path / "run"))) == 2
    assert "make_small_checkpoints.py writes one" in capsys.readouterr().err
    model = pretrained.load(Place(remembered), 3, text=False, seed=0)
    place = Place(str(tmp_path))
    good = swag.read(Place(remembered), model).tensors()
    name = next(iter(swag.backbone(model)))
    wrong = {
        "in one of them only": {"mean.other": torch.ones(1)},
        "should be": {f"variance.{name}": torch.ones(1)},
        "not finite": {f"mean.{name}": good[f"mean.{name}"] * math.nan},
        "negative": {f"variance.{name}": -1 - good[f"variance.{name}"]},
        "format": None,
    }
    for words, change in wrong.items():
        save_file({**good, **(change or {})}, tmp_path / swag.NAME, change and swag.FORMAT)
        with pytest.raises(NtkMarglikError, match=words):
            swag.read(place, model)
    (tmp_path / swag.NAME).write_bytes(b"nothing")
    with pytest.raises(NtkMarglikError, match="cannot be read"):
        swag.read(place, model)


def test_subsets_are_balanced_and_nested():
    labels = np.array([0] * 50 + [1] * 30 + [2] * 3)
    small, large = (examples.balanced(labels, size, 1) for size in (6, 20))
    assert np.bincount(labels[small]).tolist() == [2, 2, 2] and set(small) <= set(large)
    assert (
        sorted(np.bincount(labels[large])) == [3, 8, 9]
        and len(set(examples.balanced(labels, 0, 1))) == 83
    )
    assert set(examples.balanced(labels, 6, 2)) != set(small)


def test_classes_are_numbered_in_the_order_given():
    given = examples.Examples(np.arange(6).reshape(6, 1, 1, 1), np.array([0, 1, 2, 3, 2, 0]))
    kept = examples.restricted(given, (2, 0), 4)
    assert kept.inputs.flatten().tolist() == [0, 2, 4, 5] and kept.labels.tolist() == [1, 0, 0, 1]


def test_each_class_counts_the_same():
    logits = torch.eye(2)[[0, 0, 0, 0]]
    assert macro_accuracy(logits, torch.tensor([0, 0, 0, 1])) == 0.5


def test_images_are_mirrored_and_shifted(generator):
    x = torch.arange(64.0).view(1, 1, 8, 8).expand(300, 3, 8, 8)
    flipped = inputs.changed(x, "flip", generator)
    kinds = {tuple(f.flatten().tolist()) for f in flipped}
    assert kinds == {tuple(t.flatten().tolist()) for t in (x[0], x[0].flip(2))}
    crops = {tuple(c[0, 4, 3:5].tolist()) for c in inputs.changed(x, "crop", generator)}
    assert len(crops) == 18  # nine shifts, both ways round
    assert inputs.changed(x, "none", generator) is x


# -------------------------------------------------------------------------------------------- plans


def test_a_grid_is_searched_and_the_best_is_fitted_again():
    search, plan, done = (
        Search(rates=(0.1, 0.01), backbone_decays=(1.0, 2.0), head_decays=(3.0,)),
        PLANS["map-gs"],
        [],
    )
    scores = iter([-3.0, -1.0, -2.0, -math.inf, 0.0])
    while (candidate := plan.next(search, done, 0)) is not None:
        done.append(Result(candidate, next(scores)))
    pairs = [(r.candidate.rate, r.candidate.backbone_decay) for r in done]
    assert (
        pairs == [*itertools.product((0.1, 0.01), (1.0, 2.0)), (0.1, 2.0)]
        and plan.n_fits(search) == 5
    )
    with pytest.raises(NtkMarglikError, match="diverged"):
        best([Result(done[0].candidate, -math.inf)])


def test_bayesian_optimisation_follows_from_the_finished_fits():
    """It proposes within the grid's ends, the same after the same fits, and gets near the optimum
    of a parabola.
    """
    search, plan, done = Search(trials=30, rates=(0.1, 0.01)), PLANS["map-bo"], []

    def score(c):
        return (
            -((math.log10(c.backbone_decay) + 3) ** 2)
            - (math.log10(c.head_decay) + 5) ** 2
            - (c.rate - 0.1) ** 2
        )

    for _ in range(30):
        candidate = plan.next(search, done, 3)
        assert candidate == plan.next(search, list(done), 3)
        assert 1e-6 <= candidate.backbone_decay <= 1e-2 and candidate.rate in (0.1, 0.01)
        done.append(Result(candidate, score(candidate) if len(done) != 2 else -math.inf))
    assert best(done).score > -0.5 and plan.next(search, done, 3) == best(done).candidate
    assert plan.next(search, [*done, done[0]], 3) is None


# --------------------------------------------------------------------------------------------- runs


@pytest.mark.parametrize("method", PLANS)
def test_every_method_from_flags_to_a_run_folder(method, convnext, tmp_path, capsys):
    assert main(digits(convnext, "--method", method, "--out", str(tmp_path / "run"))) == 0
    summary, lines = summary_of(tmp_path / "run"), read_metrics(tmp_path / "run")
    fits = {"map-gs": 5, "la-clml": 5, "map-bo": 7}.get(method, 2)
    assert len(summary["fits"]) == fits and summary["steps"] == 4 * fits == lines[-1]["step"]
    assert (
        all(math.isfinite(fit["score"]) for fit in summary["fits"])
        and 0 <= summary["test_accuracy"] <= 1
    )
    assert (tmp_path / "run" / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["method"] == method
    assert set(summary["prior_variance"]) == {"backbone", "head"} and ("sigma" in summary) == (
        "elbo" in method
    )
    assert ("probit_test_log_likelihood" in summary) == (method != "map"), summary
    last = [line for line in lines if line["fit"] == summary["fit"]][-1]
    assert last["test_accuracy"] == summary["test_accuracy"]  # the final network is the chosen one
    if "held_out_score" in summary and fits > 2:
        searched, final = summary["fits"][:-1], summary["fits"][-1]
        chosen = max(searched, key=lambda fit: fit["score"])
        assert (
            final["backbone_decay"] == chosen["backbone_decay"]
            and summary["held_out_score"] == chosen["score"]
        )
    else:
        assert summary["objective"] == max(fit["score"] for fit in summary["fits"])
    assert "test accuracy" in capsys.readouterr().out


def test_learned_variances_differ_from_where_they_started(convnext, tmp_path):
    for method in ("la-lml", "de-elbo"):
        main(digits(convnext, "--method", method, "--out", str(tmp_path / method)))
        found = summary_of(tmp_path / method)["prior_variance"]
        assert all(abs(v * 12 * 1e-3 - 1) > 0.01 for v in found.values())


@pytest.mark.parametrize("method", ["de-elbo", "la-lml"])
def test_texts(method, bert, root, tmp_path):
    assert main(news(bert, root, "--method", method, "--out", str(tmp_path))) == 0
    assert summary_of(tmp_path)["n_data"] == 16


@pytest.mark.parametrize("kind", ["resnet", "vit"])
def test_other_architectures(kind, tmp_path):
    """A ResNet, whose batch normalisation has statistics, and a vision transformer."""
    if kind == "resnet":
        config = transformers.ResNetConfig(
            embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic"
        )
        network = transformers.ResNetForImageClassification(config)
        processor = transformers.ConvNextImageProcessorPil(size={"shortest_edge": 16}, crop_pct=0.8)
    else:
        config = transformers.ViTConfig(
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=8,
            image_size=8,
            patch_size=4,
        )
        network = transformers.ViTForImageClassification(config)
        processor = transformers.ViTImageProcessorPil(size={"height": 8, "width": 8})
    network.save_pretrained(tmp_path / "network")
    processor.save_pretrained(tmp_path / "network")
    for method in ("de-elbo", "la-lml"):
        flags = digits(
            str(tmp_path / "network"), "--method", method, "--steps", "2", "--rates", "0.01"
        )
        assert main([*flags, "--out", str(tmp_path / method)]) == 0
        assert math.isfinite(summary_of(tmp_path / method)["objective"])


def test_predictions_are_averaged_over_the_posterior(convnext, tmp_path):
    flags = digits(convnext, "--sigma", "0.1", "--predict-samples", "3", "--save-model")
    assert main([*flags, "--out", str(tmp_path)]) == 0
    summary = summary_of(tmp_path)
    config = parse(flags)
    place = Place(str(tmp_path / "model"))
    data = inputs.load(config, pretrained.Preparation(place, text=False, max_length=0), CPU)
    model = pretrained.load(place, 3, text=False, seed=0)
    # the head is renewed when a network is loaded: take the stored one
    stored = transformers.AutoModelForImageClassification.from_pretrained(place.name)
    model.network.load_state_dict(stored.state_dict())
    model.eval()
    generator = torch.Generator().manual_seed(PREDICT_SEED)
    x, y = next(data.test.batches())
    probabilities = torch.zeros(len(y), 3)
    for _ in range(3):
        noisy = {
            name: p.detach() + summary["sigma"] * torch.randn(p.shape, generator=generator)
            for name, p in model.named_parameters()
        }
        probabilities += functional_call(model, noisy, (x,)).softmax(1).detach() / 3
    picked = probabilities[torch.arange(len(y)), y]
    found = summary["sampled_test_log_likelihood"]
    assert found == pytest.approx(picked.log().mean().item(), abs=1e-4)
    assert found != pytest.approx(summary["test_log_likelihood"], abs=1e-4)
    assert main(digits(convnext, "--predict-samples", "0", "--out", str(tmp_path / "none"))) == 0
    assert "sampled_test_ece" not in summary_of(tmp_path / "none")


def test_it_learns(convnext, tmp_path):
    flags = [
        "--steps",
        "60",
        "--n-data",
        "90",
        "--batch-size",
        "45",
        "--rates",
        "0.1",
        "--method",
        "de-elbo",
    ]
    main([*digits(convnext), *flags, "--out", str(tmp_path)])
    assert summary_of(tmp_path)["test_accuracy"] > 0.8


def test_a_saved_network_is_a_checkpoint(convnext, tmp_path):
    assert (
        main(digits(convnext, "--method", "map", "--out", str(tmp_path / "first"), "--save-model"))
        == 0
    )
    again = str(tmp_path / "first" / "model")
    assert main(digits(again, "--method", "map", "--out", str(tmp_path / "second"))) == 0


class Stop(Exception):
    """A run that dies."""


@pytest.mark.parametrize(
    "method, at", [("de-elbo", 6), ("la-lml", 3), ("map-bo", 17), ("la-clml", 18)]
)
def test_a_resumed_run_ends_in_the_same_numbers(method, at, bert, root, tmp_path, monkeypatch):
    """Killed within a fit; BERT has dropout, so that torch's own generator matters too."""
    flags = news(bert, root, "--method", method, "--eval-every", "2", "--checkpoint-seconds", "0")
    assert main([*flags, "--out", str(tmp_path / "whole")]) == 0
    advance, left = Fit.advance, [at]

    def dying(fit):
        if left[0] == 0:
            raise Stop
        left[0] -= 1
        advance(fit)

    monkeypatch.setattr(Fit, "advance", dying)
    with pytest.raises(Stop):
        main([*flags, "--out", str(tmp_path / "part")])
    monkeypatch.setattr(Fit, "advance", advance)
    torch.manual_seed(123)
    assert main([*flags, "--out", str(tmp_path / "part"), "--resume"]) == 0
    whole, part = (without_times(summary_of(tmp_path / name)) for name in ("whole", "part"))
    assert whole == part
    lines = [list(map(without_times, read_metrics(tmp_path / name))) for name in ("whole", "part")]
    assert lines[0] == lines[1]
    before = (tmp_path / "part" / "summary.json").read_bytes()
    # a finished run is shown again
    assert main([*flags, "--out", str(tmp_path / "part"), "--resume"]) == 0
    assert (tmp_path / "part" / "summary.json").read_bytes() == before


def test_a_run_leaves_torchs_generator_alone(convnext, tmp_path):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    main(digits(convnext, "--method", "map", "--out", str(tmp_path)))
    assert torch.equal(before, torch.get_rng_state())


def test_a_diverging_fit_is_not_chosen(convnext, tmp_path):
    flags = digits(
        convnext, "--method", "map", "--clip", "0", "--steps", "12", "--out", str(tmp_path)
    )
    assert main([*flags, "--rates", "1e20", "0.01"]) == 0
    summary = summary_of(tmp_path)
    assert summary["rate"] == 0.01 and summary["fits"][0]["score"] is None


def test_dry_run_writes_nothing(convnext, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(digits(convnext, "--method", "map-gs", "--dry-run")) == 0
    out = capsys.readouterr().out
    assert "5 of 4 steps" in out and "12 training" in out and not list(tmp_path.iterdir())


BAD = {
    "--checkpoint /nowhere/at/all": "no such folder",
    "--checkpoint {empty}": "no config.json",
    "--checkpoint no-owner/no-network": "no such folder.*write hub:no-owner/no-network",
    "--checkpoint hub:../../etc": "hub:OWNER/NAME",
    "--checkpoint hub:a/b@..\\c": "hub:OWNER/NAME@REVISION",
    "--dataset cifar11": "Did you mean 'cifar10'",
    "--classes 3 12": r"0 \.\.\. 9",
    "--classes 3": "at least two",
    "--n-data 2000": "between 1 and",
    "--n-data 2": "one for each",
    "--n-test 5000": "--n-test",
    "--rates 0": "--rates",
    "--steps 0": "--steps",
    "--held-out 1.5": "--held-out",
    "--method map-gs --n-data 3 --held-out 0.01": "leaves one part empty",
    "--dataset ag_news": "tokenizer",
    "--method map --clip 0 --rates 1e30 --steps 12": "diverged",
    "--dataset flowers102": "flowers102",
}


@pytest.mark.parametrize("flags", BAD)
def test_what_is_wrong_is_said(flags, convnext, root, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", _no_network)
    empty = tmp_path / "empty"
    empty.mkdir()
    given = flags.format(empty=empty).split()
    data_root = [] if "flowers102" in flags else ["--data-root", str(root)]
    classes = ["--classes", "0", "1", "2"] if "--classes" not in flags else []
    base = [f for f in digits(convnext) if f]
    start = base.index("--classes")
    base = base[:start] + base[start + 4 :]
    assert main([*base, *classes, *data_root, "--out", str(tmp_path / "run"), *given]) == 2
    error = capsys.readouterr().err
    (line,) = [line for line in error.splitlines() if line.startswith("error: ")]
    assert re.search(BAD[flags], line), error


def _no_network(*_, **__):
    raise OSError("no network")


def test_a_hub_that_does_not_answer_is_a_passing_problem(tmp_path, capsys, monkeypatch):
    asked = []

    def ask(name, file, revision=None):
        asked.append((name, file, revision))
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", ask)
    flags = ["--dataset", "digits", "--checkpoint", "hub:owner/name@v1", "--out", str(tmp_path)]
    assert main(flags) == 75
    assert "Is there a connection to the hub?" in capsys.readouterr().err
    assert asked == [("owner/name", "config.json", "v1")]


def test_a_name_on_the_hub_is_one_commit(convnext, tmp_path, monkeypatch):
    """Network and preprocessing are asked for by the commit that the configuration has."""
    commit = tmp_path / "snapshots" / "0123abc"
    shutil.copytree(convnext, commit)

    def ask(name, file, revision=None):
        return str(commit / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", ask)
    place = checkpoints.find("hub:owner/name")
    assert (place.name, place.revision, place.folder) == ("owner/name", "0123abc", None)
    given = []
    kind = transformers.AutoImageProcessor

    def from_pretrained(name, revision):
        given.append((name, revision))

    monkeypatch.setattr(kind, "from_pretrained", from_pretrained)
    pretrained.Preparation(place, text=False, max_length=8)
    assert given == [("owner/name", "0123abc")]


def spoiled(folder, damage):
    """Damage the weights, or the files, of a checkpoint."""
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    if damage == "cut":
        weights.write_bytes(content[: len(content) // 2])
    elif damage == "header":
        weights.write_bytes(b"\xff" * 8 + content[8:])
    elif damage == "gone":
        weights.unlink()
    elif damage == "pickled":
        state = safetensors.torch.load_file(weights)
        weights.unlink()
        torch.save(state, folder / "pytorch_model.bin")
    elif damage == "nan":
        state = safetensors.torch.load_file(weights)
        state[next(name for name in state if name.startswith("convnext"))].fill_(math.nan)
        safetensors.torch.save_file(state, weights, metadata={"format": "pt"})
    elif damage == "config":
        (folder / "config.json").write_text('{"model_type": "nothing"}')
    else:
        (folder / "config.json").write_bytes(b"{\xff")


@pytest.mark.parametrize("damage", ["cut", "header", "gone", "pickled", "nan", "config", "text"])
def test_a_damaged_checkpoint_is_refused(damage, convnext, tmp_path, capsys):
    folder = tmp_path / "checkpoint"
    shutil.copytree(convnext, folder)
    spoiled(folder, damage)
    assert main(digits(str(folder), "--method", "map", "--out", str(tmp_path / "run"))) == 2
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert line.startswith("error: ") and str(folder) in line
    assert not (tmp_path / "run").exists()


def test_a_flipped_bit_in_a_checkpoint_of_ours_is_noticed(convnext, tmp_path, capsys):
    folder = tmp_path / "checkpoint"
    shutil.copytree(convnext, folder)
    checkpoints.write_sums(folder)
    checkpoints.find(str(folder))
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 4
    weights.write_bytes(content)
    assert main(digits(str(folder), "--method", "map", "--out", str(tmp_path / "run"))) == 2
    assert "model.safetensors is damaged (its sha256" in capsys.readouterr().err
    (folder / checkpoints.SUMS).write_text("nonsense\n")
    with pytest.raises(NtkMarglikError, match="SHA256SUMS is damaged"):
        checkpoints.find(str(folder))


def test_other_settings_and_taken_folders_are_refused(convnext, tmp_path, capsys):
    flags = digits(convnext, "--method", "map", "--out", str(tmp_path))
    assert main(flags) == 0
    assert main(flags) == 2 and "already holds a run" in capsys.readouterr().err
    assert (
        main([*flags, "--resume", "--n-data", "15"]) == 2
        and "started with n_data = 12" in capsys.readouterr().err
    )


def test_missing_libraries_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(NtkMarglikError, match=r"ntk-marglik\[finetune\]"):
        pretrained.library()
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(NtkMarglikError, match=r"ntk-marglik\[finetune\]"):
        PLANS["map-bo"].next(Search(), [], 0)


def test_rows_of_tables(convnext, tmp_path):
    for seed in ("0", "1"):
        main(digits(convnext, "--method", "map", "--seed", seed, "--out", str(tmp_path / seed)))
    found = [rows.run_row(tmp_path / seed) for seed in ("0", "1")]
    assert (
        parse(found[1]["command"].split()[2:]).run.seed == 1 and "--out" not in found[1]["command"]
    )
    assert "| digits-12, classes 7 1 4 | map | 2 |" in rows.table(found)
    of_bounds = {"sigma", "kappa", "sampled_test_log_likelihood"}
    assert set(rows.COLUMNS) - set(found[0]) == of_bounds
    with pytest.raises(NtkMarglikError, match="no finished run"):
        rows.run_row(tmp_path)


def test_runs_of_single_rates_are_one_search(convnext, tmp_path):
    for rate in ("0.1", "0.01"):
        flags = digits(convnext, "--method", "map", "--rates", rate)
        main([*flags, "--out", str(tmp_path / rate)])
    main(digits(convnext, "--method", "map", "--out", str(tmp_path / "both")))
    singles = [rows.run_row(tmp_path / rate) for rate in ("0.1", "0.01")]
    (chosen,) = rows.over_rates(singles)
    both = rows.run_row(tmp_path / "both")
    assert (chosen["rate"], chosen["n_fits"]) == (both["rate"], both["n_fits"])
    assert chosen["seconds_cpu"] == sum(row["seconds_cpu"] for row in singles)


def test_candidates_are_settings_of_fits():
    config = FinetuneConfig()
    assert PLANS["map"].next(config.search, [], 0) == Candidate(0.1, 1e-3, 1e-3)

"""Targets as people have them: classes on the last axis, ignored, soft, smoothed, weighted."""

import pytest
import torch
import torch.nn.functional as F
from kinds_of_targets import CASES, WEIGHTS, N, T, V, indices, normal
from torch import nn

from asdl_marglik import naive
from laplace_marglik import (
    Categorical,
    GaussianPrior,
    Likelihood,
    MarginalLikelihood,
    MarglikError,
    NextToken,
)

each_case = pytest.mark.parametrize("case", CASES)


@each_case
def test_the_log_probability_is_minus_torchs_cross_entropy(case):
    likelihood, f, y = CASES[case]
    if isinstance(likelihood, NextToken):
        f, y = f[:, :-1], y[:, 1:]
        found = likelihood.log_prob(*CASES[case][1:])
    else:
        found = likelihood.log_prob(f, y)
    if likelihood.class_axis == -1 and f.dim() > 2:
        f = f.movedim(-1, 1)
        y = y.movedim(-1, 1) if y.is_floating_point() else y
    loss = F.cross_entropy(
        f,
        y,
        weight=likelihood.class_weights,
        label_smoothing=likelihood.label_smoothing,
        reduction="none",
    )
    torch.testing.assert_close(found, -loss.reshape(N, -1).sum(1))


@each_case
def test_the_curvature_is_the_second_derivative(case):
    likelihood, f, y = CASES[case]
    hessian = likelihood.hessian(f, y)
    torch.testing.assert_close(hessian, Likelihood.hessian(likelihood, f, y))
    columns = torch.arange(f[0].numel()).expand(N, -1)
    for kind in ("fisher", "symmetric", "eigen"):
        U = likelihood.root(f, y, kind, columns)
        torch.testing.assert_close(U @ U.mT, hessian)
    block = likelihood.block_root(f, y, columns)
    torch.testing.assert_close(block @ block.mT, hessian)
    Q = likelihood.contrasts(f.shape[1:])
    U = likelihood.contrast_root(f, y)
    torch.testing.assert_close(Q.mT @ (U @ U.mT) @ Q, hessian)


@each_case
def test_products_are_those_of_the_matrices(case):
    likelihood, f, y = CASES[case]
    v = normal(2, *f.shape, seed=3)
    hessian = likelihood.hessian(f, y)
    want = torch.einsum("ncd,knd->knc", hessian, v.flatten(2)).reshape(v.shape)
    torch.testing.assert_close(likelihood.hessian_product(f, y, v), want)
    columns = torch.arange(f[0].numel()).expand(N, -1)
    U = likelihood.root(f, y, "fisher", columns)
    want = torch.einsum("ncd,knd->knc", U, v.flatten(2)).reshape(v.shape)
    torch.testing.assert_close(likelihood.root_product(f, y, v), want)


@each_case
def test_a_published_single_output_is_the_diagonal_of_the_curvature(case):
    likelihood, f, y = CASES[case]
    diagonal = likelihood.hessian(f, y).diagonal(dim1=1, dim2=2)
    for column in range(f[0].numel()):
        root = likelihood.block_root(f, y, torch.full((N, 1), column))
        torch.testing.assert_close(root[:, 0, 0].square(), diagonal[:, column])


def test_predictions_are_probabilities_on_the_class_axis():
    torch.testing.assert_close(
        Categorical(class_axis=-1).predict(normal(N, T, V)), normal(N, T, V).softmax(2)
    )
    torch.testing.assert_close(Categorical().predict(normal(N, V, T)), normal(N, V, T).softmax(1))


@pytest.mark.parametrize(
    "f, y, words",
    [
        (normal(N, T, V), indices(N, T), r"class_axis=-1"),
        (normal(N, V), indices(N) + V, r"in 0\.\.4, or -100"),
        (normal(N, V), -indices(N) - 1, r"in 0\.\.4, or -100"),
        (normal(N, V), normal(N, V), "probabilities that sum to one"),
        (normal(N, V), torch.ones(N, V, dtype=torch.float64), "Bernoulli"),
        (normal(N, V), normal(N, T).softmax(1), "soft labels of the shape"),
        (normal(N), indices(N), r"expected logits \[n, C"),
    ],
)
def test_targets_that_mean_nothing(f, y, words):
    with pytest.raises(MarglikError, match=words):
        Categorical().log_prob(f, y)


def test_options_that_mean_nothing():
    for options, words in (
        ({"class_axis": 2}, "class_axis must be 1 or -1"),
        ({"label_smoothing": 1.5}, "between 0 and 1"),
        ({"class_weights": torch.tensor([1.0, -1.0])}, "none below zero"),
        ({"class_weights": torch.tensor([1.0, float("nan")])}, "finite"),
    ):
        with pytest.raises(MarglikError, match=words):
            Categorical(**options)
    with pytest.raises(MarglikError, match="2 entries for 5 classes"):
        Categorical(class_weights=torch.ones(2)).log_prob(normal(N, V), indices(N))
    with pytest.raises(MarglikError, match=r"logits \[n, T, C\] and tokens \[n, T\]"):
        NextToken().log_prob(normal(N, V), indices(N))


def test_a_likelihood_says_what_it_holds():
    text = repr(Categorical(2.0, class_axis=-1, label_smoothing=0.1, class_weights=WEIGHTS))
    assert text == (
        "Categorical(temperature=2, class_axis=-1, label_smoothing=0.1, class_weights of 5 classes)"
    )


# ----------------------------------------------------------------------------------- sequences


class Tagger(nn.Module):
    """Classes of tokens from the tokens around them; padding is masked out of its attention."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 4)
        self.query = nn.Linear(4, 4)
        self.key = nn.Linear(4, 4)
        self.head = nn.Linear(4, V)
        self.sharpness = nn.Parameter(torch.tensor(0.3))
        self.double()

    def forward(self, tokens, mask):
        h = self.embedding(tokens)
        scores = self.query(h) @ self.key(h).mT * self.sharpness.exp()
        scores = scores.masked_fill(~mask.bool().unsqueeze(1), -torch.inf)
        return self.head(torch.tanh(scores.softmax(2) @ h + h))


LENGTHS = [3, 1, 4, 2]


def sequences():
    generator = torch.Generator().manual_seed(5)
    tokens = [torch.randint(0, 7, (length,), generator=generator) for length in LENGTHS]
    labels = [torch.randint(0, V, (length,), generator=generator) for length in LENGTHS]
    labels[2][1] = -100  # inside a sequence, too
    return tokens, labels


def padded(sequences, value):
    return nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=value)


def batch_of(tokens, labels):
    mask = padded([torch.ones_like(t) for t in tokens], 0)
    return {"tokens": padded(tokens, 0), "mask": mask, "labels": padded(labels, -100)}


def dense_evidence(model, weights, prior, tokens, labels, temperature, structure):
    """The evidence from V = U^T J with J and U differentiated as they stand."""
    rows, total = [], 0.0
    for t, y in zip(tokens, labels, strict=True):
        f = model(t[None], torch.ones_like(t)[None])[0]
        J = torch.stack(
            [
                torch.cat([g.reshape(-1) for g in naive.gradients(f_c, list(weights.values()))])
                for f_c in f.reshape(-1)
            ]
        ).unflatten(0, f.shape)
        log_p = f.log_softmax(1)
        for position, label in enumerate(y.tolist()):
            if label == -100:
                continue
            total = total + log_p[position, label] / temperature
            p = log_p[position].exp()
            U = (torch.diag(p.sqrt()) - torch.outer(p, p.sqrt())) / temperature.sqrt()
            rows.append(U.mT @ J[position])
    V_rows = torch.cat(rows)
    sizes = [w.numel() for w in weights.values()]
    delta = torch.cat([prior.log_precision[i].exp().expand(size) for i, size in enumerate(sizes)])
    log_det = {
        "ntk": lambda: naive.log_det_kernel(V_rows, delta),
        "full": lambda: naive.log_det_full(V_rows, delta),
        "diag": lambda: naive.log_det_diagonal(V_rows, delta),
    }[structure]()
    scatter = sum(
        prior.log_precision[i].exp() * w.detach().square().sum()
        for i, w in enumerate(weights.values())
    )
    return total - 0.5 * scatter - 0.5 * log_det


@pytest.mark.parametrize("structure", ["ntk", "full", "diag"])
def test_padding_changes_nothing(structure):
    """Value and gradients, those of a hyperparameter inside the network included."""
    tokens, labels = sequences()
    model = Tagger()
    hyper = ["sharpness"]
    prior = GaussianPrior(model, "layerwise", 0.5, hyper=hyper)
    likelihood = Categorical(1.5, learn_temperature=True, class_axis=-1)
    ml = MarginalLikelihood(
        model, likelihood, n_data=len(tokens), prior=prior, structure=structure, hyper=hyper
    )
    found = ml(batch_of(tokens, labels)).total
    leaves = [prior.log_precision, likelihood.log_temperature, model.sharpness]
    slopes = torch.autograd.grad(found, leaves)
    want = dense_evidence(
        model, ml.weights, prior, tokens, labels, likelihood.log_temperature.exp(), structure
    )
    torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(slopes, torch.autograd.grad(want, leaves), rtol=1e-9, atol=1e-9)


def test_longer_padding_changes_nothing():
    tokens, labels = sequences()
    short = batch_of(tokens, labels)
    fill = {"tokens": 0, "mask": 0, "labels": -100}
    long = {name: F.pad(t, (0, 3), value=fill[name]) for name, t in short.items()}
    model = Tagger()
    ml = MarginalLikelihood(
        model, "token-classification", n_data=len(tokens), prior=GaussianPrior(model)
    )
    torch.testing.assert_close(ml(long).total, ml(short).total, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(ml.map_loss(long), ml.map_loss(short))


@pytest.mark.parametrize("root", ["fisher", "symmetric", "eigen", "paper"])
def test_single_columns_are_those_of_single_positions(root):
    """A column is a (position, class); at an ignored position it is zero."""
    tokens, labels = sequences()
    batch = batch_of(tokens, labels)
    model = Tagger()
    ml = MarginalLikelihood(
        model,
        "token-classification",
        n_data=len(tokens),
        prior=GaussianPrior(model, precision=0.5),
        root=root,
        outputs=1,
    )
    at = 2  # ignored, or padding, in the second and fourth
    column = torch.tensor([at * V + 3])
    whole = ml(batch, columns=column).log_det_ratio
    ignored = batch["labels"][:, at] == -100
    assert ignored.tolist() == [False, True, False, True]
    kept = {name: t[~ignored] for name, t in batch.items()}
    position = At(model, at)
    alone = MarginalLikelihood(
        position,
        "classification",
        n_data=2,
        prior=GaussianPrior(position, precision=0.5),
        root=root,
        outputs=1,
    )
    inputs = {name: kept[name] for name in ("tokens", "mask")}
    single = alone(inputs, kept["labels"][:, at], columns=torch.tensor([3])).log_det_ratio
    # as many blocks of columns as there are outputs
    torch.testing.assert_close(whole / (T_MAX * V), single / V)


T_MAX = max(LENGTHS)


class At(nn.Module):
    """The outputs of a tagger at one position."""

    def __init__(self, tagger, position):
        super().__init__()
        self.tagger = tagger
        self.position = position

    def forward(self, tokens, mask):
        return self.tagger(tokens, mask)[:, self.position]

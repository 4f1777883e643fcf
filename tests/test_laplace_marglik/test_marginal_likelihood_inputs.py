"""Models, batches and modes as people have them, through the public interface."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from asdl_marglik import naive
from laplace_marglik import (
    Categorical,
    DataEmphasizedELBO,
    EvidenceLearner,
    Gaussian,
    GaussianPrior,
    MarginalLikelihood,
    MarglikError,
)

N, C = 12, 3
STRUCTURES = ["ntk", "full", "blockdiag", "kfac", "diag"]


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


X = normal(N, 4)
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0.5).long()
BATCH = {"values": X, "labels": Y}


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, C)).double()


class Scorer(nn.Module):
    """Keywords in, a mapping out; computes a loss of its own where it is given labels."""

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, values, labels=None):
        f = self.net(values)
        loss = None if labels is None else nn.functional.cross_entropy(f, labels)
        return {"loss": loss, "logits": f, "doubled": 2 * f}


def marglik(model, likelihood="classification", **options):
    ours = {k: options.pop(k) for k in ("precision", "hyper") if k in options}
    prior = GaussianPrior(model, "layerwise", **{"precision": 0.5, **ours})
    if "hyper" in ours:
        options["hyper"] = ours["hyper"]
    return MarginalLikelihood(model, likelihood, n_data=N, prior=prior, **options)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_batches_with_labels_inside(structure):
    want = marglik(mlp(), structure=structure)(X, Y)
    ml = marglik(Scorer(), structure=structure)
    torch.testing.assert_close(ml(BATCH).total, want.total)
    torch.testing.assert_close(ml.cached(BATCH)().total, want.total)
    torch.testing.assert_close(ml.full_batch([BATCH]).total, want.total)
    data = [{"values": x, "labels": y} for x, y in zip(X, Y, strict=True)]
    loader = DataLoader(data, 5)
    torch.testing.assert_close(ml.full_batch(loader).total, want.total)
    torch.testing.assert_close(ml.map_loss(BATCH), marglik(mlp()).map_loss(X, Y))
    outputs = ml.model(X)
    torch.testing.assert_close(ml.data_loss(outputs, Y), ml.data_loss(outputs["logits"], Y))


def test_labels_by_another_name_and_an_output_by_name():
    model = Scorer()
    ml = marglik(model, output="doubled", labels="kind")
    torch.testing.assert_close(
        ml({"values": X, "kind": Y}).log_likelihood,
        Categorical().log_prob(2 * model.net(X), Y).sum(),
    )
    with pytest.raises(MarglikError, match=r"an entry 'kind'.*\['values', 'labels'\]"):
        ml(BATCH)
    with pytest.raises(MarglikError, match="labels="):
        marglik(model)({"values": X})


def test_the_other_objectives_take_them_too():
    model = Scorer()
    elbo = DataEmphasizedELBO(model, "classification", n_data=N, prior=GaussianPrior(model))
    assert torch.isfinite(elbo({"values": X}, Y))


def test_a_learner_of_mappings():
    data = [{"values": x, "label": y} for x, y in zip(X, Y, strict=True)]
    learner = EvidenceLearner(marglik(Scorer()), data, rows=8, steps=2)
    before = learner.ml.prior.log_precision.detach().clone()
    assert learner.round() is not None
    assert (learner.ml.prior.log_precision != before).all()


def test_triples_and_nameless_mappings_get_a_sentence():
    for batch, words in (
        ((X, X, Y), r"tuple of 3 entries.*as a mapping"),
        ({"values": X, "target": Y}, r"keys \['values', 'target'\].*labels="),
    ):
        with pytest.raises(MarglikError, match=words):
            marglik(Scorer()).full_batch([batch])


# ----------------------------------------------------------------------------------- wrappers


@pytest.mark.parametrize("structure", STRUCTURES)
def test_compiled_models(structure):
    """Also compiled with the prior made before: names are those of the plain model."""
    model = mlp()
    prior = GaussianPrior(model, precision=0.5)
    want = marglik(model, structure=structure)(X, Y).total
    compiled = torch.compile(model, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ml = MarginalLikelihood(
            compiled, "classification", n_data=N, prior=prior, structure=structure
        )
        assert torch.equal(ml(X, Y).total, want)
        ml.map_loss(X, Y).backward()
    assert ml.model is model and model[0].weight.grad.any()
    assert [*GaussianPrior(compiled).groups] == [*prior.groups]


def test_training_runs_the_model_as_it_was_given():
    calls = []
    model = mlp()

    def backend(graph, inputs):
        calls.append(len(inputs))
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    ml = marglik(compiled)
    ml(X, Y)
    assert not calls
    ml.map_loss(X, Y)
    assert calls


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_weights_of_half_precision(structure, dtype):
    """Rows in their precision, algebra in double: the evidence to rounding of the rows."""
    half = mlp().to(dtype)
    double = mlp()
    double.load_state_dict({name: w.double() for name, w in half.state_dict().items()})
    x = X.to(dtype)
    found, want = marglik(half, structure=structure), marglik(double, structure=structure)
    torch.testing.assert_close(found(x, Y).total, want(x.double(), Y).total, rtol=2e-2, atol=2e-2)
    slopes = [
        torch.autograd.grad(ml(t, Y).total, ml.prior.log_precision)[0]
        for ml, t in ((found, x), (want, x.double()))
    ]
    torch.testing.assert_close(slopes[0].double(), slopes[1], rtol=5e-2, atol=5e-2)
    assert torch.isfinite(found.map_loss(x, Y))


# ------------------------------------------------------------------------------------ adapters


def test_adapters_of_peft():
    """One precision per adapter matrix, or per group; the frozen network counts as constant."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=20, n_positions=6, n_embd=8, n_layer=2, n_head=2, num_labels=C, pad_token_id=0
    )
    network = transformers.GPT2ForSequenceClassification(config).double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = peft.LoraConfig(
            task_type="SEQ_CLS", r=2, target_modules=["c_attn"], fan_in_fan_out=True
        )
        model = peft.get_peft_model(network, settings)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # the second matrix of every pair begins as zero
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p += 0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    tokens = torch.randint(1, 20, (N, 6), generator=generator)
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": Y}
    prior = GaussianPrior(model, precision=0.5)
    assert len(prior.groups) == 5  # two pairs of matrices, and the head
    ml = MarginalLikelihood(model, "classification", n_data=N, prior=prior)
    found = ml(batch)
    model.eval()
    f = model(tokens, torch.ones(N, 6)).logits
    gradients = [naive.gradients(f_c, list(ml.weights.values())) for f_c in f.flatten()]
    J = torch.stack([torch.cat([g.flatten() for g in row]) for row in gradients])
    U = Categorical().root(f, Y, "symmetric", torch.arange(C).expand(N, -1))
    rows = naive.root_rows(J.unflatten(0, (N, C)), U)
    want = naive.log_det_kernel(rows, torch.full_like(rows[0], 0.5))
    torch.testing.assert_close(found.log_det_ratio, want, rtol=1e-8, atol=1e-8)
    model.train()
    groups = {"*lora_A*": "inner", "*lora_B*": "outer", "*": "head"}
    data = [{k: v[i] for k, v in batch.items()} for i in range(N)]
    ml = MarginalLikelihood(model, "classification", n_data=N, prior=GaussianPrior(model, groups))
    learner = EvidenceLearner(ml, data, rows=12, steps=2)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 0.01)
    learner.attach(optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        ml.data_loss(model(**batch), Y).backward()
        optimizer.step()
        learner.round()
    assert ml.prior.group_names == ["inner", "outer", "head"]
    assert (ml.prior.log_precision != 0).all()


# ------------------------------------------------------------------------------- state and text


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.tensor(0.1, dtype=torch.float64))

    def forward(self, x):
        return torch.stack([x + self.by, x - self.by], 1)


class Sharp(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.sharpness = nn.Parameter(torch.tensor(0.2, dtype=torch.float64))

    def forward(self, x):
        return self.net(x) * self.sharpness.exp()


def everything():
    return marglik(
        Sharp(),
        Categorical(learn_temperature=True),
        augment=Shifted(),
        hyper=["sharpness"],
        outputs=1,
        generator=torch.Generator().manual_seed(4),
    )


def test_the_state_is_everything_learned(tmp_path):
    ml = everything()
    with torch.no_grad():
        for p in ml.hyperparameters():
            p += 0.3
    ml(X, Y)
    torch.save(ml.state_dict(), tmp_path / "state.pt")
    want = [ml(X, Y).total for _ in range(3)]
    other = everything()
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert [other(X, Y).total for _ in range(3)] == want  # the same columns are drawn


def test_a_state_does_not_change_with_later_steps():
    ml = everything()
    state = ml.state_dict()
    before = state["prior"]["log_precision"].clone()
    with torch.no_grad():
        ml.prior.log_precision += 1.0
    assert torch.equal(state["prior"]["log_precision"], before)


def test_the_state_of_another_is_refused():
    with pytest.raises(MarglikError, match="other hyperparameters"):
        marglik(mlp()).load_state_dict(everything().state_dict())
    smaller = marglik(nn.Linear(4, C).double())
    with pytest.raises(MarglikError, match="does not fit this prior"):
        smaller.load_state_dict(marglik(mlp()).state_dict())
    with pytest.raises(MarglikError, match="does not fit this likelihood"):
        marglik(mlp(), Gaussian()).load_state_dict(marglik(mlp()).state_dict())


def test_they_say_what_they_hold():
    ml = everything()
    text = repr(ml)
    for words in (
        "model=Sharp (43 weights)",
        "likelihood=Categorical(temperature=1 (learned))",
        "4 weights, 4 groups, precision 0.5: net.0.weight=0.5",
        "structure='ntk', n_data=12, outputs=1",
        "augment=Shifted",
        "hyperparameters=7",
    ):
        assert words in text
    assert repr(Gaussian(0.1)) == "Gaussian(sigma=0.1 (learned), temperature=1)"
    assert repr(GaussianPrior(mlp(), "diagonal")) == (
        "GaussianPrior(4 weights, 43 groups, precision 1)"
    )
    assert repr(GaussianPrior(mlp(), "scalar", mean="current")) == (
        "GaussianPrior(4 weights, 1 groups, precision 1; around means)"
    )

"""Every structure against the naive reference: values and gradients, for every kind of model, block
and likelihood.

A new structure is added to `STRUCTURES` here and inherits all of it.
"""

import pytest
import reference
import torch
from cases import CASES, LIKELIHOOD_CASES, Shift

from laplace_marglik import (
    Bernoulli,
    Categorical,
    Gaussian,
    GaussianPrior,
    HeteroscedasticGaussian,
    MarginalLikelihood,
    Poisson,
)

STRUCTURES = ["ntk", "full", "blockdiag", "kfac", "diag"]
LIKELIHOODS = {
    "categorical": Categorical,
    "gaussian": lambda: Gaussian(0.7).double(),
    "bernoulli": Bernoulli,
    "poisson": Poisson,
    "heteroscedastic": HeteroscedasticGaussian,
}
N_DATA = 24  # the block is a part of a larger data set
# weights that the library factorises although the naive reference does not know how (attention,
# grouped convolutions)
BEYOND_REFERENCE_KFAC = {
    "conv_zoo",
    "transformer",
    "transformer_time_first",
    "vit",
    "tied_embedding",
    "positions",
}
by_name = {case.name: case for case in [*CASES, *LIKELIHOOD_CASES]}


def setup(case, structure, *, prior="layerwise", augment=None, **options):
    """A marginal likelihood with a non-trivial prior, its data, and the reference's arguments for
    the same thing.
    """
    model, x, y = case.make()
    model.eval()
    torch.manual_seed(3)
    gaussian_prior = GaussianPrior(
        model,
        prior,
        mean={n: 0.1 * torch.randn_like(p) for n, p in model.named_parameters() if p.requires_grad},
    )
    with torch.no_grad():
        gaussian_prior.log_precision.normal_(0.5, 0.5)
    ml = MarginalLikelihood(
        model,
        LIKELIHOODS[case.likelihood](),
        n_data=N_DATA,
        prior=gaussian_prior,
        structure=structure,
        augment=augment,
        generator=torch.Generator().manual_seed(0),
        **options,
    )
    return ml, x, y


def expected(ml, case, x, y, columns, *, sharing="expand", blocks="module"):
    """The same evidence from the naive reference."""
    names = list(ml.weights)
    deltas = [
        ml.prior.log_precision[ml.prior.groups[n]].exp().expand(ml.weights[n].numel())
        for n in names
    ]
    means = torch.cat(
        [torch.as_tensor(ml.prior.mean_of(n)).expand(ml.weights[n].shape).flatten() for n in names]
    )
    lik = reference.Likelihood(case.likelihood, sigma=0.7 if case.likelihood == "gaussian" else 1.0)
    block_maker = reference.module_blocks if blocks == "module" else reference.tensor_blocks
    plan = ml._planned(x)
    copies = x if ml.augment is None else ml.augment(x)
    return reference.evidence(
        ml.model,
        copies,
        y,
        lik,
        torch.cat(deltas),
        structure=ml.structure,
        n_data=N_DATA,
        columns=columns,
        root=ml.root,
        mean=means,
        names=names,
        blocks=block_maker(ml.model, names),
        sharing=sharing,
        augmented=ml.augment is not None,
        dense=[n for n in names if n not in plan.kronecker],
    )


def close(ours, theirs, rtol=1e-9):
    torch.testing.assert_close(
        torch.as_tensor(ours).detach(), torch.as_tensor(theirs).detach(), rtol=rtol, atol=1e-9
    )


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_value_with_one_two_and_all_outputs(case, structure):
    if structure == "kfac" and case.name in BEYOND_REFERENCE_KFAC:
        pytest.skip("covered by test_kfac: the reference has no Kronecker form for these weights")
    for columns in (torch.tensor([1]), torch.tensor([2, 0]), None):
        ml, x, y = setup(case, structure)
        if columns is not None and len(columns) == 2 and case.name == "segmentation":
            columns = torch.tensor([2, 11])
        got = ml(x, y, columns)
        want = expected(ml, case, x, y, columns)
        for part in ("total", "log_likelihood", "scatter", "log_det_ratio"):
            close(getattr(got, part), getattr(want, part))


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("case", LIKELIHOOD_CASES, ids=str)
def test_value_for_every_likelihood(case, structure):
    for columns in (torch.tensor([1]), None):
        ml, x, y = setup(case, structure)
        close(ml(x, y, columns).total, expected(ml, case, x, y, columns).total)


@pytest.mark.parametrize("root", ["paper", "fisher", "symmetric", "eigen"])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", ["mlp", "mininet", "segmentation"])
def test_value_for_every_root(name, structure, root):
    case = by_name[name]
    for columns in (torch.tensor([1]), torch.tensor([0, 2]), None):
        ml, x, y = setup(case, structure, root=root)
        close(ml(x, y, columns).total, expected(ml, case, x, y, columns).total, rtol=1e-7)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("root", ["paper", "fisher"])
def test_value_with_columns_per_data_point(structure, root):
    case = by_name["mininet"]
    ml, x, y = setup(case, structure, root=root)
    columns = torch.stack(
        [torch.randperm(3, generator=torch.Generator().manual_seed(i))[:2] for i in range(len(y))]
    )
    close(ml(x, y, columns).total, expected(ml, case, x, y, columns).total)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("case", [c for c in CASES if c.augmentable], ids=str)
def test_value_with_augmentation(case, structure):
    if structure == "kfac" and case.name in BEYOND_REFERENCE_KFAC:
        pytest.skip("covered by test_kfac: the reference has no Kronecker form for these weights")
    augment = Shift(3).double()
    with torch.no_grad():
        augment.eta.copy_(torch.tensor([0.3, -0.2]))
    for columns in (torch.tensor([1]), None):
        ml, x, y = setup(case, structure, augment=augment)
        close(ml(x, y, columns).total, expected(ml, case, x, y, columns).total)


@pytest.mark.parametrize(
    "prior", ["scalar", "layerwise", "diagonal", {"*weight": "weights", "*": "rest"}], ids=str
)
@pytest.mark.parametrize("structure", ["ntk", "full", "blockdiag", "diag"])
def test_value_for_every_prior(structure, prior):
    case = by_name["mininet"]
    ml, x, y = setup(case, structure, prior=prior)
    close(ml(x, y).total, expected(ml, case, x, y, None).total)


@pytest.mark.parametrize("chunk", [1, 2, 5, 1000])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_chunks_change_nothing(structure, chunk):
    case = by_name["mininet"]
    values = []
    for size in (chunk, 1000):
        ml, x, y = setup(case, structure, augment=Shift(3).double(), chunk=size)
        total = ml(x, y, torch.tensor([1])).total
        values.append([total, *torch.autograd.grad(total, ml.hyperparameters())])
    for ours, theirs in zip(*values, strict=True):
        close(ours, theirs)

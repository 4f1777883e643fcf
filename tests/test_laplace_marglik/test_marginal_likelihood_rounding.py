"""Networks in single precision: where rounding would decide the determinant, statistics are made in
double.
"""

import pytest
import torch
from cases import Shift
from small_networks import randn
from torch import nn

from asdl_marglik import STRUCTURES
from laplace_marglik import Gaussian, GaussianPrior, MarginalLikelihood, evidence_by_blocks

pytestmark = pytest.mark.quick


def both(make, evaluate):
    """Results of the same network and data in single and in double precision."""
    torch.manual_seed(0)
    single = make().float()
    double = make().double()
    double.load_state_dict(single.state_dict())
    return [
        evaluate(net, dtype) for net, dtype in ((single, torch.float32), (double, torch.float64))
    ]


def assert_same(found, rtol=1e-5):
    for single, double in zip(*found, strict=True):
        scale = float(double.abs().max())
        torch.testing.assert_close(single.double(), double.double(), rtol=rtol, atol=rtol * scale)


@pytest.mark.parametrize("structure", ["ntk", "full", "blockdiag"])
@pytest.mark.parametrize(
    "n, sides, sigma, precision", [(400, (8, 1), 0.01, 0.1), (150, (5, 2), 1e-2, 1e-2)]
)
def test_more_rows_than_weights(structure, n, sides, sigma, precision):
    x, y = randn(n, sides[0]), randn(n, sides[1], seed=1)

    def evaluate(model, dtype):
        ml = MarginalLikelihood(
            model,
            Gaussian(sigma),
            n_data=n,
            prior=GaussianPrior(model, "scalar", precision),
            structure=structure,
            augment=Shift(2),
        )
        evidence = ml(x.to(dtype), y.to(dtype))
        assert evidence.status == ("bound" if structure == "blockdiag" else "exact")
        leaves = [ml.prior.log_precision, ml.likelihood.log_sigma, ml.augment.eta]
        cached = ml.cached(x.to(dtype), y.to(dtype))()
        values = [evidence.log_det_ratio.detach(), cached.log_det_ratio.detach()]
        return [*values, *torch.autograd.grad(evidence.log_det_ratio, leaves)]

    assert_same(both(lambda: nn.Linear(*sides), evaluate))


def repeated(dtype, model=None):
    """Six data points, each many times: rows of low rank, fewer than weights."""
    return randn(6, 20).repeat(20, 1).to(dtype), torch.arange(120) % 3


def mlp():
    return nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 3))


@pytest.mark.parametrize("prior", ["layerwise", "diagonal"])
@pytest.mark.parametrize("precision", [1.0, 1e-4, 1e-7])
@pytest.mark.parametrize(
    "structure, kfac", [*((s, "expand") for s in STRUCTURES), ("kfac", "reduce")]
)
def test_rows_of_low_rank(structure, kfac, precision, prior):
    def evaluate(model, dtype):
        x, y = repeated(dtype)
        ml = MarginalLikelihood(
            model,
            "classification",
            n_data=120,
            prior=GaussianPrior(model, prior, precision),
            structure=structure,
            kfac=kfac,
            augment=Shift(2),
        )
        evidence = ml(x, y)
        return [
            evidence.log_det_ratio.detach(),
            *torch.autograd.grad(evidence.log_det_ratio, ml.hyperparameters()),
        ]

    assert_same(both(mlp, evaluate), rtol=1e-4)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_cached_block_follows_the_prior_to_where_single_precision_fails(structure):
    def evaluate(model, dtype):
        x, y = repeated(dtype)
        prior = GaussianPrior(model, "layerwise", 10.0)
        ml = MarginalLikelihood(
            model, "classification", n_data=120, prior=prior, structure=structure, outputs=1
        )
        ml.generator.manual_seed(3)
        cached = ml.cached(x, y)
        before = cached().total.detach()
        state = ml.generator.get_state()
        with torch.no_grad():
            prior.log_precision.fill_(-15.0)
        after = cached()
        assert torch.equal(ml.generator.get_state(), state)
        return [
            before,
            after.total.detach(),
            *torch.autograd.grad(after.log_det_ratio, prior.log_precision),
        ]

    assert_same(both(mlp, evaluate), rtol=1e-4)


def test_a_cached_block_that_cannot_be_made_again_says_so():
    torch.manual_seed(0)
    model = mlp()
    x, y = repeated(torch.float32)
    prior = GaussianPrior(model, "layerwise", 10.0)
    ml = MarginalLikelihood(model, "classification", n_data=120, prior=prior, structure="kfac")
    cached = ml.cached(x, y)
    with torch.no_grad():
        prior.log_precision.fill_(-15.0)
        model[0].weight.add_(0.1)
    with pytest.raises(Exception, match=r"single precision.*ml\.cached anew"):
        cached()


def test_gradients_by_blocks_too():
    def evaluate(model, dtype):
        x, y = repeated(dtype)
        prior = GaussianPrior(model, "layerwise", 1e-6)
        ml = MarginalLikelihood(
            model, "classification", n_data=120, prior=prior, structure="kfac", augment=Shift(2)
        )
        blocks = [(x[:60], y[:60]), (x[60:], y[60:])]
        evidence = evidence_by_blocks(ml, blocks, torch.Generator().manual_seed(0))()
        return [evidence.total.detach(), *torch.autograd.grad(evidence.total, ml.hyperparameters())]

    assert_same(both(mlp, evaluate), rtol=1e-4)

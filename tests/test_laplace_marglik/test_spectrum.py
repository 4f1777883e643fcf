"""One decomposition gives the evidence at every prior precision."""

import pytest
import torch
from marginal_likelihoods import X, Y
from small_networks import mlp

from asdl_marglik import STRUCTURES, naive
from laplace_marglik import (
    Gaussian,
    GaussianPrior,
    MarginalLikelihood,
    MarglikError,
    Partition,
    SpectralMarginalLikelihood,
)

pytestmark = pytest.mark.quick


def make(kind, model, precision=1.0, *, groups="scalar", **options):
    prior = GaussianPrior(model, groups, precision)
    return kind(model, "classification", n_data=6, prior=prior, **options)


@pytest.mark.parametrize("precision", [1e-3, 1.0, 50.0])
@pytest.mark.parametrize("outputs", [1, None])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_evidence_is_that_of_an_estimate_at_this_precision(structure, outputs, precision):
    model = mlp()
    block = Partition(6, 3, 3, outputs, generator=torch.Generator().manual_seed(0))[0]
    x, y = X[block.index], Y[block.index]
    options = {"structure": structure, "outputs": outputs}
    spectrum = make(SpectralMarginalLikelihood, model, **options).spectrum(x, y, block)
    want = make(MarginalLikelihood, model, precision, **options)(x, y, block=block)
    found = spectrum.evidence(precision)
    for name in ("total", "log_likelihood", "scatter", "log_det_ratio"):
        torch.testing.assert_close(getattr(found, name), getattr(want, name).detach())
    assert found.status == want.status and found.n_blocks == want.n_blocks


def test_a_spectrum_leaves_its_marginal_likelihood_as_it_was():
    ml = make(SpectralMarginalLikelihood, mlp())
    before = (ml.in_double, ml._fast)
    ml.spectrum(X, Y, Partition(6, 3)[0])
    ml.gram(X, Y)
    assert (ml.in_double, ml._fast) == before


def test_the_kernel_of_all_outputs_is_that_of_the_jacobian():
    model = mlp()
    f, K = make(SpectralMarginalLikelihood, model, 2.0).gram(X, Y)
    J = naive.jacobian(model, dict(model.named_parameters()), X).flatten(0, 1).detach()
    torch.testing.assert_close(K, J @ J.mT / 2)
    torch.testing.assert_close(f, model(X).detach())


def test_several_precisions_have_no_common_spectrum():
    ml = make(SpectralMarginalLikelihood, mlp(), groups="layerwise")
    with pytest.raises(MarglikError, match="one prior precision for all weights"):
        ml.spectrum(X, Y, Partition(6, 3)[0])


def test_the_noise_is_part_of_the_eigenvalues():
    model = mlp()
    values = []
    for sigma in (1.0, 0.5):
        ml = SpectralMarginalLikelihood(
            model, Gaussian(sigma), n_data=6, prior=GaussianPrior(model, "scalar")
        )
        values.append(ml.spectrum(X, model(X).detach(), Partition(6, 3)[0]).values)
    torch.testing.assert_close(values[1], 4 * values[0])

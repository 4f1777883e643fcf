"""The same numbers from other libraries: curvlinops (GGN, KFAC) and laplace-torch (log marginal
likelihood).

Both sum over data (`reduction="sum"`); torch's MSELoss has no 1/2, so its curvature is twice that
of unit noise. Values only: neither library is right in all gradients.
"""

import math
import warnings

import pytest
import torch
from torch import nn

from laplace_marglik import Gaussian, GaussianPrior, MarginalLikelihood

N, C, PRECISION, SIGMA = 6, 3, 0.7, 0.6


def networks():
    """An MLP and a small convolutional network, in float64, with their inputs."""
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, C))
    conv = nn.Sequential(
        *(
            nn.Conv2d(2, 3, 3, padding=1, stride=2),
            nn.Tanh(),
            nn.Conv2d(3, 2, 2, bias=False),
            nn.Tanh(),
        ),
        *(nn.Flatten(), nn.Linear(2, C)),
    )
    return {
        "mlp": (mlp.double(), torch.randn(N, 4).double()),
        "conv": (conv.double(), torch.randn(N, 2, 4, 4).double()),
    }


def problem(name, likelihood):
    """Model, data, our likelihood and torch's loss for it."""
    model, x = networks()[name]
    if likelihood == "classification":
        return model, x, torch.arange(N) % C, "classification", nn.CrossEntropyLoss(reduction="sum")
    y = torch.randn(N, C, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return model, x, y, Gaussian(SIGMA), nn.MSELoss(reduction="sum")


def evidence(model, x, y, likelihood, structure, **options):
    prior = GaussianPrior(model, "scalar", PRECISION)
    return MarginalLikelihood(
        model, likelihood, n_data=N, prior=prior, structure=structure, **options
    )(x, y)


def curvature_scale(likelihood):
    """From the curvature of torch's loss to that of our likelihood."""
    return 1.0 if likelihood == "classification" else 0.5 / SIGMA**2


def dense(operator):
    matrix = operator @ torch.eye(operator.shape[1], dtype=torch.float64)
    return torch.as_tensor(matrix)


both = pytest.mark.parametrize("likelihood", ["classification", "regression"])
each_network = pytest.mark.parametrize("name", ["mlp", "conv"])


def log_det(curvature):
    return torch.logdet(torch.eye(len(curvature)).double() + curvature / PRECISION)


@both
@each_network
def test_curvlinops_ggn(name, likelihood):
    curvlinops = pytest.importorskip("curvlinops")
    model, x, y, ours, loss = problem(name, likelihood)
    ggn = dense(
        curvlinops.GGNLinearOperator(model, loss, list(model.parameters()), [(x, y)])
    ).double()
    ggn = ggn * curvature_scale(likelihood)
    want = {
        "full": log_det(ggn),
        "ntk": log_det(ggn),
        "diag": torch.log1p(ggn.diagonal() / PRECISION).sum(),
    }
    for structure, value in want.items():
        got = evidence(model, x, y, ours, structure).log_det_ratio.detach()
        torch.testing.assert_close(got, value, rtol=1e-8, atol=1e-8)


@both
@each_network
@pytest.mark.parametrize("setting", ["expand", "reduce"])
def test_curvlinops_kfac(name, likelihood, setting):
    curvlinops = pytest.importorskip("curvlinops")
    model, x, y, ours, loss = problem(name, likelihood)
    operator = curvlinops.KFACLinearOperator(
        model, loss, list(model.parameters()), [(x, y)], fisher_type="type-2", kfac_approx=setting
    )
    kfac = dense(operator).double() * curvature_scale(likelihood)
    got = evidence(model, x, y, ours, "kfac", kfac=setting).log_det_ratio.detach()
    torch.testing.assert_close(got, log_det(kfac), rtol=1e-8, atol=1e-8)
    if name == "conv":  # the settings are not the same thing
        other = evidence(
            model, x, y, ours, "kfac", kfac={"expand": "reduce", "reduce": "expand"}[setting]
        )
        assert abs(float(other.log_det_ratio.detach() - got)) > 1e-2


@both
@each_network
@pytest.mark.parametrize(
    "structure, theirs", [("full", "full"), ("ntk", "full"), ("kfac", "kron"), ("diag", "diag")]
)
def test_laplace_torch_log_marginal_likelihood(name, likelihood, structure, theirs):
    """Both leave out the (P/2) log 2 pi of prior and posterior, which cancel, and keep that of the
    Gaussian.
    """
    pytest.importorskip("curvlinops")
    laplace = pytest.importorskip("laplace")
    model, x, y, ours, _ = problem(name, likelihood)
    options = {"sigma_noise": SIGMA} if likelihood == "regression" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitted = laplace.Laplace(
            model,
            likelihood,
            subset_of_weights="all",
            hessian_structure=theirs,
            prior_precision=PRECISION,
            **options,
        )
        fitted.fit(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=N))
        want = {
            "total": fitted.log_marginal_likelihood(),
            "log_likelihood": fitted.log_likelihood,
            "scatter": fitted.scatter,
            "log_det_ratio": fitted.log_det_ratio,
        }
    got = evidence(model, x, y, ours, structure)
    for part, value in want.items():
        torch.testing.assert_close(
            getattr(got, part).detach(),
            torch.as_tensor(value).detach().double(),
            rtol=1e-6,
            atol=1e-6,
            msg=part,
        )


def test_the_gaussian_constant_is_kept():
    """What the comparison above relies on: log p of a perfect fit is -n C log(sigma sqrt(2 pi))."""
    model, x = networks()["mlp"]
    value = evidence(model, x, model(x).detach(), Gaussian(SIGMA), "diag").log_likelihood
    assert value.item() == pytest.approx(-N * C * math.log(SIGMA * math.sqrt(2 * math.pi)))

"""Scripts in the style of laplace-torch's examples, with the import line changed.

Each runs with both libraries, on the same seeds, and must come to the same numbers.
"""

import importlib
import io

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("laplace")
pytest.importorskip("curvlinops")
pytestmark = pytest.mark.filterwarnings("ignore")

LIBRARIES = ["laplace", "laplace_marglik.compat"]


def sinusoid(n=60, sigma=0.3):
    """Noisy observations of a sine, and a denser line to predict on."""
    generator = torch.Generator().manual_seed(0)
    x = (8 * torch.rand(n, 1, generator=generator)).double()
    y = torch.sin(x) + sigma * torch.randn(n, 1, generator=generator).double()
    loader = DataLoader(TensorDataset(x, y), batch_size=20)
    return x, y, loader, torch.linspace(-2, 10, 40).double()[:, None]


def regressor():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 1)).double()


def trained(model, loader, criterion, epochs=60):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
    return model


def tuned_post_hoc(library, structure="full", steps=40):
    """Train, fit, then gradient steps on the evidence in log prior precision and log noise."""
    Laplace = importlib.import_module(library).Laplace
    _, _, loader, line = sinusoid()
    model = trained(regressor(), loader, nn.MSELoss())
    la = Laplace(model, "regression", subset_of_weights="all", hessian_structure=structure)
    la.fit(loader)
    log_prior, log_sigma = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    hyper_optimizer = torch.optim.Adam([log_prior, log_sigma], lr=1e-1)
    for _ in range(steps):
        hyper_optimizer.zero_grad()
        neg_marglik = -la.log_marginal_likelihood(log_prior.exp(), log_sigma.exp())
        neg_marglik.backward()
        hyper_optimizer.step()
    f_mu, f_var = la(line)
    f_mu, f_sigma = f_mu.squeeze(), f_var.squeeze().sqrt()
    pred_std = (f_sigma**2 + la.sigma_noise.item() ** 2).sqrt()
    joint_mu, joint_cov = la(line, joint=True)
    assert joint_mu.shape == (40,) and joint_cov.shape == (40, 40)
    return [neg_marglik, f_mu, pred_std, joint_mu, joint_cov, la.prior_precision, la.sigma_noise]


def tuned_online(library):
    """`marglik_training` in place of the training loop."""
    module = importlib.import_module(library)
    options = {}
    if library == "laplace":
        options["backend"] = importlib.import_module("laplace.curvature").CurvlinopsGGN
    _, _, loader, line = sinusoid()
    la, model, margliks, losses = module.marglik_training(
        model=regressor(),
        train_loader=loader,
        likelihood="regression",
        hessian_structure="full",
        n_epochs=12,
        optimizer_kwargs={"lr": 1e-2},
        prior_structure="scalar",
        **options,
    )
    assert len(margliks) == 120 and len(losses) == 12 and isinstance(model, nn.Module)
    f_mu, f_var = la(line)
    return [torch.tensor(margliks), torch.tensor(losses), f_mu, f_var, la.sigma_noise.squeeze()]


def calibrated(library):
    """A classifier, its last layer tuned after training, saved and loaded."""
    Laplace = importlib.import_module(library).Laplace
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(90, 2, generator=generator).double()
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0.3).long()
    train = DataLoader(TensorDataset(x[:60], y[:60]), batch_size=20)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 10), nn.Tanh(), nn.Linear(10, 3)).double()
    model = trained(model, train, nn.CrossEntropyLoss())
    la = Laplace(model, "classification")
    la.fit(train)
    la.optimize_prior_precision(method="marglik")
    probabilities = la(x[60:], link_approx="probit")
    nll = nn.functional.nll_loss(probabilities.log(), y[60:])
    torch.manual_seed(0)
    samples = la.predictive_samples(x[60:], n_samples=10)
    assert samples.shape == (10, 30, 3)
    file = io.BytesIO()
    torch.save(la.state_dict(), file)
    file.seek(0)
    other = Laplace(model, "classification")
    other.load_state_dict(torch.load(file, weights_only=library != "laplace"))
    torch.testing.assert_close(other(x[60:]), probabilities)
    return [probabilities, nll, la.prior_precision]


@pytest.mark.parametrize(
    "script", [tuned_post_hoc, tuned_online, calibrated], ids=lambda f: f.__name__
)
def test_the_import_line_is_all_that_changes(script):
    theirs, ours = (script(library) for library in LIBRARIES)
    for got, want in zip(ours, theirs, strict=True):
        assert got.shape == want.shape
        got, want = got.detach().double(), want.detach().double()
        scale = max(1.0, float(want.abs().max()))
        torch.testing.assert_close(got / scale, want / scale, rtol=0, atol=1e-5)


def test_the_complete_gradient_in_the_noise_finds_more_evidence():
    """For Kronecker factors laplace-torch leaves out the log-determinant's part of it."""
    theirs, ours = (tuned_post_hoc(library, "kron", 300)[0].item() for library in LIBRARIES)
    assert ours < theirs - 1e-3  # of the same function: negative evidences

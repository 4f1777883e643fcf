"""A problem whose posterior is known in closed form, by dense matrices."""

import torch
from torch import nn
from torch.func import functional_call, jacrev

from laplace_marglik import Categorical, Gaussian, GaussianPrior, SampledLaplace
from laplace_marglik.posterior.sampled import ConjugateGradients

EXACT = ConjugateGradients(tolerance=1e-6, max_iterations=500)
ROUGH = ConjugateGradients(tolerance=1e-3)
N, BATCH = 30, 15


class Exact:
    """J, Lambda, M, H as matrices, by naive code."""

    def __init__(self, likelihood="classification", structure="layerwise", precision=0.7, seed=0):
        torch.manual_seed(seed)
        outputs = 3 if likelihood == "classification" else 2
        self.model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs)).double()
        self.x = torch.randn(N, 4, dtype=torch.float64)
        regression = likelihood != "classification"
        noise = torch.randn(N, 2, dtype=torch.float64)
        self.y = (
            2 * self.x[:, :2] + self.x[:, 2:].sin() + noise
            if regression
            else torch.randint(3, (N,))
        )
        self.likelihood = Gaussian(0.6) if regression else Categorical(temperature=0.8)
        self.prior = GaussianPrior(self.model, structure, precision=precision)
        self.loader = list(zip(self.x.split(BATCH), self.y.split(BATCH), strict=True))
        self.w = torch.cat([p.detach().flatten() for p in self.model.parameters()])
        weights = {name: p.detach() for name, p in self.model.named_parameters()}
        rows = jacrev(lambda w: functional_call(self.model, w, (self.x,)))(weights)
        self.j = torch.cat([r.flatten(2) for r in rows.values()], 2)  # [n, C, P]
        self.f = self.model(self.x).detach()
        if regression:
            self.b = torch.eye(2, dtype=torch.float64).expand(N, -1, -1) / 0.6**2
        else:
            p = self.f.softmax(1)
            self.b = (torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)) / 0.8
        self.each = torch.einsum("ncp,ncd,ndq->npq", self.j, self.b, self.j)
        self.m = self.each.sum(0)

    def a(self, log_precision=None):
        values = self.prior.log_precision if log_precision is None else log_precision
        pieces = [
            values[self.prior.groups[n]].expand(p.numel()) for n, p in self.model.named_parameters()
        ]
        return torch.cat(pieces).exp()

    @property
    def h(self):
        return self.m + torch.diag(self.a().detach())

    def gammas(self):
        """Diagonal of M H^-1 summed over groups."""
        diagonal, found, start = (self.m @ self.h.inverse()).diagonal(), [], 0
        for p in self.model.parameters():
            found.append(diagonal[start : start + p.numel()].sum())
            start += p.numel()
        return torch.stack(found)

    def sampled(self, samples=8, solver=EXACT, seed=1, **options):
        generator = torch.Generator().manual_seed(seed)
        return SampledLaplace(
            self.model,
            self.likelihood,
            n_data=N,
            prior=self.prior,
            samples=samples,
            solver=solver,
            together=options.pop("together", samples),
            generator=generator,
            **options,
        )


def log_evidence(exact, log_precision):
    """log N(Y | J mu-shifted mean, ...) of the linear regression model, by its dense covariance."""
    j = exact.j.flatten(0, 1)
    mean = (exact.f - torch.einsum("ncp,p->nc", exact.j, exact.w)).flatten()
    covariance = (j / exact.a(log_precision)) @ j.mT + 0.6**2 * torch.eye(
        len(j), dtype=torch.float64
    )
    return torch.distributions.MultivariateNormal(mean, covariance).log_prob(exact.y.flatten())

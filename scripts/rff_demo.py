"""Regression on random Fourier features: what exact evidence, ELBO and emphasised ELBO learn.

    phi_r(x) = o sqrt(2/R) cos(W_r x / l + b_r),     f = phi w,  w ~ N(0, I),     y = f + N(0, s^2)

R features, N data, lengthscale l, scale o, noise s. With q = N(m, sigma^2 I) everything is in
closed form:

    evidence     log N(y; 0, K + s^2 I),   K = Phi Phi^T
    J_kappa      kappa [ -(|y - Phi m|^2 + sigma^2 |Phi|_F^2) / (2 s^2) - N/2 log(2 pi s^2) ]
                 - KL(q || N(0, I))
    its optimum  m = Phi^T (K + s^2/kappa I)^-1 y,     1/sigma^2 = 1 + kappa |Phi|_F^2 / (R s^2)

python scripts/rff_demo.py [--features 1024] [--plot FILE.png] [--csv FILE.csv]
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ntkmarglik.machine.exits import exit_code
from ntkmarglik.machine.files import target_file
from ntkmarglik.programs.paper.figures.style import sheet
from ntkmarglik.runs.records import write
from ntkmarglik.runs.report import COLOURS

HERE = Path(__file__).parent.parent / "illustrations"
N_DATA = 20
N_TEST = 200
STEPS = 1500
COLUMNS = (
    "objective",
    "lengthscale",
    "scale",
    "noise",
    "sigma",
    "train_rmse",
    "test_rmse",
    "value",
    "elbo",
    "log_evidence",
)


@dataclass(frozen=True)
class Problem:
    """Data of a sine with noise 0.1, and the random frequencies and phases of the features."""

    x: Tensor
    y: Tensor
    frequencies: Tensor
    phases: Tensor

    @classmethod
    def drawn(cls, features: int, seed: int = 0) -> Problem:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(N_DATA, generator=generator, dtype=torch.float64)
        y = torch.sin(3 * x) + 0.1 * torch.randn(N_DATA, generator=generator, dtype=torch.float64)
        frequencies = torch.randn(features, generator=generator, dtype=torch.float64)
        phases = 2 * math.pi * torch.rand(features, generator=generator, dtype=torch.float64)
        return cls(x, y, frequencies, phases)

    def features(self, x: Tensor, log_l: Tensor, log_o: Tensor) -> Tensor:
        """Phi [n, R]."""
        waves = torch.cos(x.unsqueeze(1) * self.frequencies * torch.exp(-log_l) + self.phases)
        return torch.exp(log_o) * math.sqrt(2 / len(self.phases)) * waves


@dataclass(frozen=True)
class Posterior:
    """N(m, S) with a covariance S [R, R], or sigma^2 I."""

    mean: Tensor
    covariance: Tensor | None = None
    sigma: Tensor | None = None

    def variances(self, phi: Tensor) -> Tensor:
        """diag(Phi S Phi^T): the variance of f at each input."""
        if self.covariance is not None:
            return (phi @ self.covariance * phi).sum(1)
        assert self.sigma is not None
        return self.sigma.square() * phi.square().sum(1)


def log_evidence(phi: Tensor, y: Tensor, s2: Tensor) -> Tensor:
    """log N(y; 0, Phi Phi^T + s^2 I)."""
    root = torch.linalg.cholesky(phi @ phi.mT + s2 * torch.eye(len(y), dtype=y.dtype))
    white = torch.linalg.solve_triangular(root, y.unsqueeze(1), upper=False)
    return (
        -0.5 * white.square().sum()
        - root.diagonal().log().sum()
        - len(y) / 2 * math.log(2 * math.pi)
    )


def exact_posterior(phi: Tensor, y: Tensor, s2: Tensor) -> Posterior:
    """The posterior of the weights."""
    covariance = torch.linalg.inv(torch.eye(phi.shape[1], dtype=y.dtype) + phi.mT @ phi / s2)
    return Posterior(covariance @ phi.mT @ y / s2, covariance)


def isotropic_posterior(phi: Tensor, y: Tensor, s2: Tensor, kappa: float) -> Posterior:
    """The best N(m, sigma^2 I) for J_kappa."""
    inner = phi @ phi.mT + s2 / kappa * torch.eye(len(y), dtype=y.dtype)
    variance = 1 / (1 + kappa * phi.square().sum() / (phi.shape[1] * s2))
    return Posterior(phi.mT @ torch.linalg.solve(inner, y), sigma=variance.sqrt())


def emphasised_elbo(phi: Tensor, y: Tensor, s2: Tensor, q: Posterior, kappa: float) -> Tensor:
    """J_kappa of any Gaussian posterior; kappa = 1: the ELBO."""
    n, r = phi.shape
    if q.covariance is not None:
        trace, log_det = q.covariance.trace(), q.covariance.logdet()
    else:
        assert q.sigma is not None
        trace, log_det = r * q.sigma.square(), 2 * r * q.sigma.log()
    misfit = (y - phi @ q.mean).square().sum() + q.variances(phi).sum()
    kl = (trace + q.mean.square().sum() - r - log_det) / 2
    return kappa * (-misfit / (2 * s2) - n / 2 * torch.log(2 * math.pi * s2)) - kl


@dataclass(frozen=True)
class Fit:
    """Hyperparameters that maximise an objective, and what they give."""

    objective: str
    problem: Problem
    log_l: Tensor
    log_o: Tensor
    log_s: Tensor
    kappa: float | None  # None: the exact evidence and posterior

    def phi(self, x: Tensor) -> Tensor:
        return self.problem.features(x, self.log_l, self.log_o)

    @property
    def s2(self) -> Tensor:
        return torch.exp(2 * self.log_s)

    def posterior(self) -> Posterior:
        phi, y = self.phi(self.problem.x), self.problem.y
        return (
            exact_posterior(phi, y, self.s2)
            if self.kappa is None
            else isotropic_posterior(phi, y, self.s2, self.kappa)
        )

    def value(self) -> Tensor:
        """The objective at its best posterior."""
        phi, y = self.phi(self.problem.x), self.problem.y
        if self.kappa is None:
            return log_evidence(phi, y, self.s2)
        q = isotropic_posterior(phi, y, self.s2, self.kappa)
        return emphasised_elbo(phi, y, self.s2, q, self.kappa)

    def predict(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of f."""
        q, phi = self.posterior(), self.phi(x)
        return phi @ q.mean, q.variances(phi).sqrt()

    def row(self) -> dict[str, float | str | None]:
        """One line of the table."""
        phi = self.phi(self.problem.x)
        y = self.problem.y
        q = self.posterior()
        grid = grid_inputs()
        own = isotropic_posterior(phi, y, self.s2, 1.0)
        return {
            "objective": self.objective,
            "lengthscale": self.log_l.exp().item(),
            "scale": self.log_o.exp().item(),
            "noise": self.log_s.exp().item(),
            "sigma": None if q.sigma is None else q.sigma.item(),
            "train_rmse": (self.predict(self.problem.x)[0] - y).square().mean().sqrt().item(),
            "test_rmse": (self.predict(grid)[0] - torch.sin(3 * grid))
            .square()
            .mean()
            .sqrt()
            .item(),
            "value": self.value().item(),
            "elbo": emphasised_elbo(phi, y, self.s2, own, 1.0).item(),
            "log_evidence": log_evidence(phi, y, self.s2).item(),
        }


def grid_inputs() -> Tensor:
    """Inputs where most of the data are."""
    return torch.linspace(-2, 2, N_TEST, dtype=torch.float64)


def fitted(
    objective: str,
    problem: Problem,
    kappa: float | None,
    noise: float | None = None,
    steps: int = STEPS,
) -> Fit:
    """Maximise over lengthscale, scale and, unless given, noise, from 1 (noise: from 0.3)."""
    start = [0.0, 0.0, math.log(noise or 0.3)]
    log_l, log_o, log_s = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in start)
    fit = Fit(objective, problem, log_l, log_o, log_s, kappa)
    optimizer = torch.optim.Adam([log_l, log_o] if noise else [log_l, log_o, log_s], lr=0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        (-fit.value()).backward()
        optimizer.step()
    return Fit(objective, problem, log_l.detach(), log_o.detach(), log_s.detach(), kappa)


def fits(problem: Problem, steps: int = STEPS) -> list[Fit]:
    """Every objective; the data-emphasised one with a fixed noise, and with a learned one."""
    kappa = len(problem.phases) / len(problem.y)
    return [
        fitted("evidence", problem, None, steps=steps),
        fitted("elbo", problem, 1.0, steps=steps),
        fitted("de-elbo, noise 0.1", problem, kappa, 0.1, steps),
        fitted("de-elbo, noise 0.3", problem, kappa, 0.3, steps),
        fitted("de-elbo, noise learned", problem, kappa, steps=steps),
    ]


def draw(found: list[Fit], target: Path) -> None:
    """The fits with a well-posed objective, side by side."""
    shown, grid = found[:4], torch.linspace(-2.6, 2.6, 300, dtype=torch.float64)
    with sheet(target, 1, len(shown), (2.5, 2.4), sharey="row") as panels:
        for axes, fit, colour in zip(panels[0], shown, COLOURS, strict=False):
            mean, deviation = (t.numpy() for t in fit.predict(grid))
            row = fit.row()
            axes.fill_between(
                grid,
                mean - 2 * deviation,
                mean + 2 * deviation,
                color=colour,
                alpha=0.2,
                linewidth=0,
            )
            axes.plot(grid, mean, color=colour, linewidth=1.4)
            axes.plot(grid, torch.sin(3 * grid), color="0.5", linewidth=0.9, linestyle="--")
            axes.plot(fit.problem.x, fit.problem.y, "k.", markersize=4)
            axes.set_title(
                f"{fit.objective}\nl {row['lengthscale']:.2f}, o {row['scale']:.2f}, s "
                f"{row['noise']:.3f}"
            )
            axes.set_xlabel(f"RMSE: train {row['train_rmse']:.2f}, test {row['test_rmse']:.2f}")
            axes.set_ylim(-2.4, 2.4)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--features", type=int, default=1024, help="random features R")
    parser.add_argument("--seed", type=int, default=0, help="of data and features")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each maximisation")
    parser.add_argument("--plot", type=target_file, default=HERE / "rff_elbo.png", help="figure")
    parser.add_argument("--csv", type=target_file, default=HERE / "data/rff_elbo.csv", help="table")
    given = parser.parse_args()
    if given.features < 1 or given.steps < 1:
        parser.error("--features and --steps must be at least 1")
    found = fits(Problem.drawn(given.features, given.seed), given.steps)
    rows = [fit.row() for fit in found]
    for row in rows:
        numbers = [f"{name} {row[name]:.3g}" for name in COLUMNS[1:] if row[name] is not None]
        print(f"{row['objective']:<36} {', '.join(numbers)}")
    write(given.csv, COLUMNS, rows)
    draw(found, given.plot)
    print(given.plot)


if __name__ == "__main__":
    sys.exit(exit_code(main))

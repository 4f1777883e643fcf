"""A test of the installation that takes seconds: an evidence by its definition, and a tiny run."""

from __future__ import annotations

import contextlib
import io
import math
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from asdl_marglik import naive
from laplace_marglik import GaussianPrior, MarginalLikelihood
from ntkmarglik.programs.classify.command import main as classify
from ntkmarglik.runs.folder import read_summary

TOLERANCE = 1e-10  # of each number by itself; with four seeds they differed by at most 7e-15
TINY_RUN = (
    *("--method", "ntk", "--model", "mlp", "--width", "8", "--n-data", "64", "--subset", "16"),
    *("--epochs", "2", "--burnin", "0", "--frequency", "1", "--prior-steps", "2", "--no-baseline"),
    *("--device", "cpu", "--threads", "1"),
)


def evidence_error() -> float:
    """The largest relative error among an evidence and its derivatives, by their definition."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        x, y = torch.randn(6, 3).double(), torch.randn(6, 2).double()
    prior = GaussianPrior(model, structure="layerwise", precision=0.5)
    ml = MarginalLikelihood(
        model, "regression", n_data=len(x), prior=prior, structure="ntk", outputs=None
    )
    log_precision = prior.log_precision
    pairs = []
    for total in (ml(x, y).total, by_definition(model, log_precision, x, y)):
        (gradient,) = torch.autograd.grad(total, log_precision)
        pairs.append(torch.cat([total.detach().reshape(1), gradient.reshape(-1)]).double())
    fast, right = pairs
    return float(((fast - right) / right).abs().max())


def by_definition(model: nn.Module, log_precision: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """log p(y|f) - 1/2 w^T P0 w - 1/2 log|I + P0^-1 H| with unit noise and U = I.

    log_precision: one for each parameter tensor.
    """
    weights = dict(model.named_parameters())
    sizes = torch.tensor([w.numel() for w in weights.values()])
    delta = log_precision.double().exp().repeat_interleave(sizes)
    w = torch.cat([w.detach().reshape(-1) for w in weights.values()])
    root = torch.eye(y.shape[1]).to(y).expand(len(y), -1, -1)
    V = naive.root_rows(naive.jacobian(model, weights, x), root).detach()
    squares = (model(x).detach() - y).square()
    log_likelihood = -0.5 * (squares + math.log(2 * math.pi)).sum()
    return log_likelihood - 0.5 * (delta * w.square()).sum() - 0.5 * naive.log_det_full(V, delta)


def tiny_run() -> str:
    """Train on digits for two epochs; what went wrong, or nothing."""
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = classify([*TINY_RUN, "--out", str(out)])
        summary = read_summary(out)
    if code or summary is None:
        last = (said.getvalue().strip().splitlines() or ["it said nothing"])[-1]
        return f"a tiny run ended with code {code}: {last}"
    score = summary["test_log_likelihood"]
    return "" if math.isfinite(score) else f"a tiny run has a test log-likelihood of {score}"

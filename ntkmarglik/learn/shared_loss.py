"""The loss of a batch whose data points the processes of a run share: weights in common."""

from __future__ import annotations

import contextlib

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from laplace_marglik import Ranks
from ntkmarglik.learn.methods.base import Method, Problem


class SharedLoss:
    """A method's loss of a batch whose data points are shared out, with the gradient of the whole
    batch.

    Each rank's loss counts n_r R / n, so that DistributedDataParallel, which averages gradients
    over the R ranks, gives sum_r (n_r / n) grad_r however uneven the parts are.
    """

    def __init__(self, problem: Problem, method: Method, ranks: Ranks):
        self.problem = problem
        self.ranks = ranks
        module = _Loss(problem.model, method)
        self._parallel = DistributedDataParallel(module)

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        n = len(y)
        span = self.ranks.spans(n)[self.ranks.rank]
        share = (span.stop - span.start) * self.ranks.size / n
        if not share:  # takes part in the reduction of gradients all the same
            span = slice(0, 1)
        sharing = getattr(self.problem.augment, "sharing", None)
        with contextlib.nullcontext() if sharing is None else sharing(span.start, n):
            return self._parallel(x[span], y[span]) * share


class _Loss(nn.Module):
    """A loss as a module whose parameters are all that it is differentiated in."""

    def __init__(self, model: nn.Module, method: Method):
        super().__init__()
        self.model = model
        self.besides = nn.ParameterList(method.parameters_of_loss())
        self._method = method

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self._method.loss(x, y)

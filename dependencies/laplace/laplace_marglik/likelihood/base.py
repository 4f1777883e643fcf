"""What a likelihood is, and what follows from its `log_prob` alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from asdl_marglik import eigen_root, psd_sqrt
from laplace_marglik.checks import LARGEST_LOG, positive_number
from laplace_marglik.errors import MarglikError

Root = Literal["paper", "fisher", "symmetric", "eigen"]


class Likelihood(nn.Module):
    """p(y | f) for outputs f [n, ...]; a subclass needs only `log_prob`.

    The curvature Lambda = -d^2 log p / df^2 is `curvature_scale() * hessian(f, y)`: global factors
    (temperature, noise) are kept apart so that learning them needs no new pass over the data.
    Outputs are counted in memory order, C of them in all, whatever their shape.
    """

    diagonal = False  # whether Lambda is diagonal: then single outputs are true root rows
    # whether `log_prob` is a function of f and y alone, which no parameter can change
    constant_log_prob = False
    discrete = False  # whether targets are discrete: then log p <= 0
    # parameters that enter only through `curvature_scale`
    scale_parameters: tuple[str, ...] = ("log_temperature",)

    def __init__(self, temperature: float = 1.0, *, learn_temperature: bool = False):
        super().__init__()
        positive_number("temperature", temperature)
        self.log_temperature = nn.Parameter(
            torch.tensor(math.log(temperature), dtype=torch.float64),
            requires_grad=learn_temperature,
        )

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """log p(y_i | f_i) of each datum [n], before the temperature."""
        raise TypeError(f"{type(self).__name__} must define log_prob(f, y) -> [n]")

    @property
    def inverse_temperature(self) -> Tensor:
        """1 / tau in float64, by which log-probabilities are multiplied."""
        return torch.exp(-self.log_temperature.double())

    def predict(self, f: Tensor) -> Tensor:
        """The mean prediction for outputs f."""
        return f

    def curvature_scale(self) -> Tensor:
        """The factor between `hessian` and the curvature of the tempered likelihood."""
        return self.inverse_temperature

    def check_scales(self) -> None:
        """Refuse temperatures and noises that overflow, with which the data would count for
        nothing, or alone.
        """
        for name in self.scale_parameters:
            value = getattr(self, name).item()
            if not abs(value) <= LARGEST_LOG:
                raise MarglikError(f"{name} of the likelihood is {value:g}, which overflows")

    def root_parameters(self) -> list[nn.Parameter]:
        """Learnable parameters that shape the Hessian itself."""
        return [
            p
            for name, p in self.named_parameters()
            if p.requires_grad and name not in self.scale_parameters
        ]

    @contextmanager
    def constant(self) -> Iterator[None]:
        """The likelihood's parameters as constants inside the context."""
        learned = [p for p in self.parameters() if p.requires_grad]
        self.requires_grad_(False)
        try:
            yield
        finally:
            for p in learned:
                p.requires_grad_(True)

    def hessian(self, f: Tensor, y: Tensor) -> Tensor:
        """-d^2 log p / df^2 [n, C, C] by differentiating `log_prob` twice; may still be
        indefinite.
        """
        with torch.enable_grad():
            flat = f.flatten(1)
            flat = flat if flat.requires_grad else flat.detach().requires_grad_()
            log_prob = self.log_prob(flat.reshape(f.shape), y)
            if log_prob.shape != f.shape[:1]:
                raise MarglikError(
                    f"log_prob must return one value per datum [{len(f)}], got "
                    f"{tuple(log_prob.shape)}"
                )
            (slope,) = torch.autograd.grad(log_prob.sum(), flat, create_graph=True)
            columns = [
                torch.autograd.grad(slope[:, c].sum(), flat, create_graph=True, allow_unused=True)[
                    0
                ]
                if slope.requires_grad
                else None
                for c in range(flat.shape[1])
            ]
        return -torch.stack([torch.zeros_like(flat) if c is None else c for c in columns], 1)

    def root(self, f: Tensor, y: Tensor, kind: Root, columns: Tensor) -> Tensor:
        """Columns [n, C, K] of a root U of the Hessian's positive semi-definite part, U U^T =
        Lambda.
        """
        hessian = self.hessian(f, y)
        root = eigen_root(hessian) if kind == "eigen" else psd_sqrt(hessian)
        return root.gather(2, columns.unsqueeze(1).expand(-1, root.shape[1], -1))

    def block_root(self, f: Tensor, y: Tensor, columns: Tensor) -> Tensor | None:
        """A root [n, K, K] of the Hessian's sub-block at the given outputs; None for the
        identity.
        """
        hessian = self.hessian(f, y)
        block = hessian.gather(1, columns.unsqueeze(2).expand(-1, -1, hessian.shape[2]))
        return psd_sqrt(block.gather(2, columns.unsqueeze(1).expand(-1, columns.shape[1], -1)))

    def root_product(self, f: Tensor, y: Tensor, xi: Tensor) -> Tensor:
        """U xi of vectors xi [k, n, ...] shaped as k times the outputs; noise of covariance U U^T
        if xi is normal.
        """
        columns = torch.arange(f[0].numel(), device=f.device).expand(len(f), -1)
        root = self.root(f, y, "symmetric", columns)
        return torch.einsum("ncd,knd->knc", root, xi.flatten(2)).reshape(xi.shape)

    def hessian_product(self, f: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """U U^T v of vectors v [k, n, ...] shaped as k times the outputs f."""
        return self.root_product(f, y, self.root_product(f, y, v))

    def contrasts(self, shape: torch.Size) -> Tensor | None:
        """Directions [R, C] of the outputs that span all the curvature there is, if these are fewer
        than C.
        """
        return None

    def contrast_root(self, f: Tensor, y: Tensor) -> Tensor:
        """A root [n, R, R] of the Hessian in the coordinates of `contrasts`."""
        raise TypeError(f"{type(self).__name__} names no contrasts")


class FromLogProb(Likelihood):
    """A likelihood given by a function `log_prob(f, y) -> [n]`; of an indefinite Hessian the PSD
    part is used.
    """

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], temperature: float = 1.0):
        super().__init__(temperature)
        self._function = function

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return self._function(f, y)
